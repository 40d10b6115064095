-- What calls are made of. A domain checks a value where it arrives, whoever sends it: a role
-- that may execute the functions can pass anything. A domain is used instead of a table's
-- CHECK, which Postgres parses anew for each statement that inserts (6 microseconds).

-- A sum or an amount that is never negative, as the ledger stores it.
create domain metered.units as bigint check (value >= 0);

create domain metered.amount as bigint not null check (value between 1 and 9007199254740992);       -- 2^53
create domain metered.part as bigint not null check (value between 0 and 9007199254740992);
create domain metered.maximum as bigint not null check (value between 0 and 4611686018427387904);   -- 2^62
create domain metered.scope_name as text collate "C" not null check (octet_length(value) between 1 and 255);
create domain metered.id as text collate "C" not null check (octet_length(value) between 1 and 255);
create domain metered.name as text collate "C" check (octet_length(value) <= 255);
create domain metered.fingerprint as bytea not null check (octet_length(value) = 33);   -- a version byte and a SHA-256
create domain metered.span as interval not null check (value between '0' and '36525 days');
create domain metered.tolerance as interval not null check (value between '0' and '24:00:00');
create domain metered.wait_ms as int not null check (value between 1 and 3600000);
create domain metered.note as jsonb check (pg_column_size(value) <= 8192);
create domain metered.batch as int not null check (value between 1 and 100000);
create domain metered.ids as text[] not null
    check (array_ndims(value) = 1 and array_lower(value, 1) = 1 and cardinality(value) <= 100 and array_position(value, null) is null);

-- A limit: so many units in each window of this length, or in the scope's lifetime (0).
create type metered.charge_limit as (max metered.maximum, win metered.span);

-- A charge to be made: amount units of the scope. Of these held are not spent but held, by
-- the hold that is being placed. key is that of the scope's lock, or null: then it is
-- derived, which takes 20 microseconds.
create type metered.new_charge as (
    scope metered.scope_name, key bigint, amount metered.amount, held metered.part, limits metered.charge_limit[], note metered.note);

-- Who makes an entry or a transition: the command, if it is one, and a note.
create type metered.origin as (namespace metered.name, operation metered.name, note metered.note);

-- A hold to be placed. chosen: the caller chose the id, and key is that of its lock, or null: then
-- it is derived. claim is the scope of what is claimed, if it is a claim. lifetime is how long
-- after its beginning a hold ends at the latest.
create type metered.new_hold as (
    tenant metered.name, id metered.id, chosen boolean, key bigint, holder metered.name, claim text, fingerprint metered.fingerprint,
    issued_at timestamptz, ttl metered.span, grace metered.span, lifetime metered.span, metadata json);

-- Holds of one tenant, and the holder that they must have ('' for any). issued are the times
-- that the ids carry.
create type metered.hold_ids as (tenant metered.name, ids metered.ids, issued timestamptz[], holder metered.name);

-- Units of one scope that a capture takes, or that a refund gives back.
create type metered.used_units as (scope metered.scope_name, amount metered.part, limits metered.charge_limit[]);

-- How a capture is made. closing frees the rest and ends the holds. policy says what happens to
-- units beyond what is held: refuse; fit (they are charged if the limits let them); allow (they
-- are charged).
create type metered.capture_terms as (closing boolean, policy text, entity text);

-- A command as its first and its last statement name it. key is that of its id's lock.
-- timeout_ms bounds its transaction: 0 leaves the session's timeouts, and null all of its
-- settings, since the transaction is the caller's.
create type metered.new_command as (
    namespace metered.name, id metered.id, key bigint, issued_at timestamptz, max_future metered.span, timeout_ms int, marker text);

-- A token as it was presented.
create type metered.presented_token as (digest bytea, purpose text, subject text);

-- A token to be minted.
create type metered.new_token as (digest bytea, purpose text, subject text, payload json, uses int, ttl metered.span);

-- What charge answers: an entry a charge, in the order of the charges; what counts against each
-- limit, and what is held of each scope; or else why it is denied.
create type metered.posted as (seqs bigint[], ats timestamptz[], used bigint[], held bigint[], denied jsonb, at timestamptz);

-- For functions of ours. What a limit that is being looked at was counted from: the number of
-- the limit, and the entry at the beginning of its window.
create type metered.counted as (nth int, base_seq bigint, base_spent bigint);

-- For functions of ours. What an entry that holds units says of the hold: its id, and when
-- it falls due, from now; or, of a capture beyond what is held, the holds that are captured. at is
-- what counts as now, if the caller has read the clock under the locks.
create type metered.hold_terms as (id text, due_in interval, nos bigint[], at timestamptz);
