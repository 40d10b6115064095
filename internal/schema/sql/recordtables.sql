-- The tables of tokens and of commands.

-- One-time grants. The token itself is nowhere in here, only the SHA-256 of its text, from which 32
-- random bytes cannot be found. Bounds are those of the functions that write: a CHECK would be read
-- from its text for each token that is consumed.
create table metered.tokens (
    digest     bytea       primary key, -- the SHA-256 of its text
    minted_at  timestamptz not null,    -- when it was minted
    expires_at timestamptz not null,    -- when it is no longer good
    ended_at   timestamptz,                     -- last use, revocation, or
                                                -- expiry seen by a revocation
    uses       int         not null,    -- how often it can be used
    used       int         not null default 0, -- how often it was, uses at most
    revoked    boolean     not null default false, -- whether it was revoked
    sole       boolean     not null default false,  -- minted by replace_token
    purpose    text collate "C" not null, -- the right that it grants
    subject    text collate "C" not null, -- the user or thing that it is for
    payload    json                             -- json, not jsonb: it comes back byte for byte
);

-- A subject's tokens that have not ended, to revoke them. A use that is not the last changes no
-- indexed column and stays a HOT update.
create index tokens_open on metered.tokens (purpose, subject) where ended_at is null;

-- The guard of replace_token: at most one such token per purpose and subject, whatever the
-- isolation level, even if its lock was never taken.
create unique index tokens_sole on metered.tokens (purpose, subject)
    where sole and ended_at is null;

-- The order of purge_tokens.
create index tokens_purge on metered.tokens ((coalesce(ended_at, expires_at)));

-- Commands that committed, by the caller's id: written with the command's own writes, so that a
-- record exists exactly where they do. An event of charge_each has one, too, with the result null
-- and one scope. Its issued_at is the time of the id, or else when it occurred. Refusals, too,
-- where the caller asked for the refusal to be remembered.
create table metered.operations (
    at          timestamptz not null,   -- when the command was completed
    issued_at   timestamptz,            -- the time that the id carries, if it does
    tenant      text collate "C" not null, -- keeps the ids of tenants apart
    id          text collate "C" not null, -- chosen by the caller
    fingerprint bytea       not null,   -- a version byte and a SHA-256
    result      bytea       not null,   -- JSON, byte for byte as it was returned
    scopes      text[],                 -- the charged scopes, for the receipt
    amounts     bigint[],               -- the amount of each charge
    seqs        bigint[],               -- the number of each entry
    ats         timestamptz[],          -- the time of each entry
    holds       text[],                 -- JSON: the holds that it placed, captured or
                                        -- released, and the draws of its own steps
    refusal     json,                   -- the reason of a refusal, whose result is empty
    name        text collate "C",       -- the command's name, or null
    jobs        bigint[],               -- the ids of River's jobs that it made
    primary key (tenant, id)
);

create index operations_at on metered.operations (at);

-- The latest time of an id whose record was purged. Never decreases. Always found by its key: with
-- sequential scans off, one would look so expensive that each is compiled first (jit), for 50 ms.
create table metered.operations_horizon (
    at  timestamptz not null,           -- ids of this time and before are retired
    one boolean primary key default true check (one) -- there is one row
);

insert into metered.operations_horizon (at) values ('-infinity');
