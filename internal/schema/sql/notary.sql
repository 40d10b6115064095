-- Records that others can check: see the module notary. Its log has one leaf for each entry, in the
-- order in which it was taken down, and is a Merkle tree whose heads are signed. No call of the
-- schema reads or writes these tables.

-- The scopes whose entries are in the log. A leaf has the commitment in place of the name, so that
-- the name can go.
create table metered.notary_scopes (
    no         bigint primary key,              -- the number of the scope in the log
    seq        bigint not null,                 -- its last entry that is in the log
    commitment bytea not null,                  -- the SHA-256 of salt and name
    salt       bytea,                           -- 32 random bytes, or null: the name
                                                -- was taken out, and cannot be guessed
    scope      text collate "C" not null unique -- its name by now
);

-- Which leaves are whose entries.
create table metered.notary_runs (
    first    bigint primary key,        -- the number of the first leaf, from 0 on
    entries  bigint not null,           -- how many leaves follow one another
    seq      bigint not null,           -- the entry of the first one
    scope_no bigint not null            -- notary_scopes.no
);
create index notary_runs_scope on metered.notary_runs (scope_no, seq);

-- The hashes of the tree, in the order of golang.org/x/mod/sumdb/tlog.
create table metered.notary_hashes (
    block  bigint primary key,          -- 0, 1, 2 and so on
    hashes bytea not null               -- 60 hashes of 32 bytes. The last block may have fewer
);

-- The signed heads of the tree.
create table metered.notary_heads (
    size      bigint primary key,       -- how many leaves it has
    signed_at timestamptz not null,     -- when, by the database's clock
    head      text not null             -- the signed note
);
