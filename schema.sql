-- Names are those of pg_catalog, whatever is on the search_path. It is put back at the end.
do $$
begin
    perform pg_catalog.set_config('metered_script.search_path', pg_catalog.current_setting('search_path'), false);
    perform pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', false);
end
$$;

-- Every table, index and function of metered.
--
-- Applied by metered.Migrate, or rendered by metered.SchemaSQL for a migration
-- tool of your own. "metered." is replaced by the schema name you choose.
--
-- Three rules hold for all of it:
--
--   * The schema's owner owns the data. An application role needs EXECUTE
--     on the functions that it calls and SELECT on tables that it reads, nothing
--     else (metered.GrantSQL): the functions that write are SECURITY DEFINER, so
--     no application can change or delete a ledger entry.
--   * Functions that an application calls fix search_path, so that no operator
--     or table of the caller's can stand in for ours, enable_seqscan = off:
--     PL/pgSQL caches plans, and a sequential scan cached while a table was
--     small makes a hot scope quadratic; and plan_cache_mode = force_generic_plan:
--     a statement that compares with an array, or lets a null decide the rest
--     of it, would be planned anew at each call, for 50 to 150 microseconds. All
--     three together cost 5 to 8 microseconds a call (Postgres 15); inner functions
--     inherit them. A plan is made while the table may be empty and any index
--     looks as good, so no condition may fit an index other than the right one.
--   * Time is read only from metered.clock(), but for how long a lock is still
--     waited for. To set the clock a test replaces that function, which its owner
--     can do and an application's role cannot.

-- CREATE SCHEMA IF NOT EXISTS alone would not do: it demands the right to create a schema
-- even where this one is there, and its owner may not have that.
do $$
begin
    if to_regnamespace('metered') is null then
        create schema if not exists metered;
    end if;
end
$$;

-- True, and makes a session on Postgres 14 faster: as it plans a statement of metered.clock(), the
-- planner works this constant out, and nothing is left of it. That takes and frees a block of a
-- megabyte, and so has glibc's malloc keep up to 2 MB of free memory. Else it
-- gives memory beyond 128 kB back to the kernel, and asks for it again up to four times in a
-- place, a capture or a release: 15 to 19 percent of their time. See ADR 8. Later versions do
-- that by themselves, and the block, taken at each statement that is planned, would be a third of
-- the first call on a new connection.
create function metered.keep_memory() returns boolean
language sql immutable parallel safe
as 'select pg_catalog.octet_length(pg_catalog.repeat(pg_catalog.repeat('' '', 1000),
    case when pg_catalog.current_setting(''server_version_num'')::pg_catalog.int4 operator(pg_catalog.<) 150000 then 1000 else 1 end)) operator(pg_catalog.>) 0';

-- The only clock. clock_timestamp(), because now() is the start of the
-- transaction, and a slow one would write entries already outside their window.
create function metered.clock() returns timestamptz
language sql volatile parallel safe
as 'select case when metered.keep_memory() then pg_catalog.clock_timestamp() end';

-- The types of arguments and answers.

-- The amount of an entry, never negative: nobody can make one that takes spending back. A
-- domain, since a table's check would be parsed anew for each statement that inserts: 6
-- microseconds.
create domain metered.units as bigint check (value >= 0);

-- A role that may execute a function can pass anything. The functions that commands wait for check their arguments
-- by one condition of its own (Postgres prepares a domain's check anew in each call, for 1 to 2
-- microseconds: a place would have 20 of them). The others use these.

-- An amount from 1 to 2^53.
create domain metered.amount as bigint not null check (value between 1 and 9007199254740992);

-- The name of a scope, 1 to 255 bytes.
create domain metered.scope_name as text collate "C" not null check (octet_length(value) between 1 and 255);

-- A fingerprint: a version byte and a SHA-256.
create domain metered.fingerprint as bytea not null check (octet_length(value) = 33);

-- A period: a number of months or days of the calendar of a zone, by its name, or without a zone a
-- number of microseconds. It is counted from the anchor; a calendar without one has the first day of its months and years, and Monday.
create type metered.period as (every interval, anchor timestamptz, zone text);

-- A limit: so many units in each window of this length, or in the scope's lifetime (0), or, if
-- win is null, in each period. thresholds are reported when they are crossed, and tell_at is the lowest of them (see
-- thresholds.sql): a charge that crosses one is only made if its caller is telling.
create type metered.charge_limit as (max bigint, win interval, period metered.period, tell_at bigint, thresholds text, telling boolean);

-- Units of one scope that a call spends or holds. amount is how many units more count against the scope's limits, and held is how many more are held;
-- so spending grows by amount - held. Its four uses: (1) a charge has held = 0, and all units are spent; (2) a placement has held > 0: the
-- hold that is being placed holds these units, and the other units of amount are spent; (3) a spend from a lease has lease set: it takes
-- the units of that lease from lease_offset on, key is the fence of the lease, held is 0 and there are no limits; (4) a capture has held < 0, inside functions only: -held units
-- stop being held and are spent, and amount units beyond them are charged. With amount = 0 it spends held units alone, and usage stays as it is.
--
-- key is that of the scope's lock, or null: then it is derived, which takes 20 microseconds. must_exist: the scope is one of
-- resources, and not retired.
create type metered.new_charge as (
    scope text, key bigint, amount bigint, held bigint, limits metered.charge_limit[], note jsonb, must_exist boolean,
    lease bigint, lease_offset bigint);

-- How a lease is opened: as rows (each spend is one), memory (of its owner), carved (for the child, a
-- scope) or away (the child is on another cluster). It has at least so many units (least), and at most the available units divided by share.
create type metered.lease_terms as (mode text, owner text, least bigint, share int, ttl interval, child text);

-- The origin of an entry or a transition: the command, if it is one, and a note.
create type metered.origin as (tenant text, operation text, note jsonb);

-- Units of one scope that a capture takes, that a refund gives back, or that are captured when a hold expires.
create type metered.used_units as (scope text, amount bigint, limits metered.charge_limit[]);

-- A hold to be placed. chosen: the caller chose the id, and key is that of its lock, or null: then
-- it is derived. claim is the claimed scope, if it is a claim. lifetime is how long
-- after its beginning a hold ends at the latest. minimum has the units captured of its scopes when it expires. A hold up to so much, whose lines
-- hold equal units, has a last minimum of scope '': the fewest units that each of its lines may hold.
create type metered.new_hold as (
    tenant text, id text, chosen boolean, key bigint, holder text, claim text, fingerprint bytea,
    issued_at timestamptz, ttl interval, grace interval, lifetime interval, metadata json, minimum metered.used_units[]);

-- Holds of one tenant, and the holder that they must have ('' for any). issued are the times
-- that the ids carry.
create type metered.hold_ids as (tenant text, ids text[], issued timestamptz[], holder text);

-- A lot to be granted to a wallet. It ends at expires_at, or lasts so long after the grant, or never ends. Up to roll_cap of the
-- units that are left then roll over into a lot that lasts roll_for longer (0: that never ends). Units that are refunded to it later last
-- for late from then on (0: for ever), or ends at once (null).
create type metered.new_lot as (
    amount bigint, expires_at timestamptz, lasts interval, category text, priority int, reference text, fingerprint bytea,
    roll_cap bigint, roll_for interval, late interval);

-- How a lot renews and rolls over, and what it pays for. Each period of renews has a lot of renew_amount units, and renewal is the reference of the first. Units that roll over
-- last until their period of roll_to ends, or else for roll_for. They do so roll_again times more (-1: always). With roll_shared the lot's roll_cap counts all
-- units of the category that rolled over. The caller sets neither renewal, roll_for nor of_reference, which is the reference of the lot that had the units first. uses are
-- in their order, and null for everything.
create type metered.lot_plan as (
    renews metered.period, renew_amount bigint, renewal text, roll_to metered.period, roll_for interval, roll_again int,
    roll_shared boolean, of_reference text, uses text[]);

-- A line of a hold of a wallet that has fallen due, or the sum of several of which each gives its units
-- back and does nothing else. Its units are those of the entry opened_seq; of a sum, that of the last line.
create type metered.due_line as (
    hold bigint, due timestamptz, opened_seq bigint, units bigint, minimum bigint, id text,
    operation_tenant text, operation text, use text);

-- How a lot is rolled over: the lot, by its number or its reference, up to cap of its units, and how long the new lot lasts (0: for ever).
create type metered.lot_rollover as (of_lot bigint, of_reference text, cap bigint, lasts interval);

-- How a capture is made. closing frees the rest and ends the holds. policy is for
-- units beyond the held ones: refuse, fit (they are charged if the limits admit them), upto (as many as the limits admit are charged), even (likewise, and all
-- scopes are cut by as many units as the one that is cut most), allow (they are charged).
create type metered.capture_terms as (closing boolean, policy text, entity text);

-- A command as its first and its last statement name it. key is that of its id's lock.
-- timeout_ms bounds its transaction: 0 leaves the session's timeouts, and null all of its
-- settings, since the transaction is the caller's. standing: its receipt has the standing of its limits. leased: some of its
-- charges are spent from leases. name is the command's name, and jobs are those that it made: both are for the record.
create type metered.new_command as (
    tenant text, id text, key bigint, issued_at timestamptz, max_future interval, timeout_ms int, marker text, standing boolean, leased boolean,
    name text, jobs bigint[]);

-- A token as it was presented.
create type metered.presented_token as (digest bytea, purpose text, subject text);

-- A token to be minted.
create type metered.new_token as (digest bytea, purpose text, subject text, payload json, uses int, ttl interval);

-- The answer of charge: an entry for each charge, in the order of the charges, the units that count against each
-- limit, the units held of each scope, the start and the end of each limit's period, if there are any, and the
-- thresholds that it crosses, or else the reason of its refusal.
create type metered.charged as (
    seqs bigint[], ats timestamptz[], used bigint[], held bigint[], refused jsonb, at timestamptz, periods timestamptz[], crossed jsonb);

-- A usage event, whose charge stands at the same place of another array. id is null for a charge without
-- one. id_key is that of the id's lock. issued_at is the time that the id carries, or occurred_at.
create type metered.new_event as (
    tenant text, id text, id_key bigint, fingerprint bytea, issued_at timestamptz, occurred_at timestamptz);

-- The answer of charge_each to one charge: its number in the call, its entry, the units that count against each limit
-- before it, the held units, the limits' periods, and the thresholds that it crosses, or else the reason of its refusal.
create type metered.each_answer as (
    nth int, seq bigint, at timestamptz, used bigint[], held bigint, refused jsonb, status text, periods timestamptz[], crossed jsonb);

-- For functions of ours. The start from which a limit was counted: the number of
-- the limit, and the entry at the beginning of its window.
create type metered.counted as (nth int, base_seq bigint, base_spent bigint);

-- For functions of ours. The hold of an entry that holds units: its id, and when
-- it falls due, from now. For a capture beyond the held units, the holds that are captured. at
-- counts as now, if the caller has read the clock under the locks.
create type metered.hold_terms as (id text, due_in interval, nos bigint[], at timestamptz);

-- Whether no text is longer than so many bytes.
create function metered._fits(texts text[], most int) returns boolean
language plpgsql immutable strict
as $$
declare
    x text;
begin
    foreach x in array texts loop
        if octet_length(x) > most then
            return false;
        end if;
    end loop;
    return true;
end
$$;

-- Whether each is within the bounds of its fields.
create function metered._fits(all_of metered.period[]) returns boolean
language plpgsql immutable strict
as $$
declare
    x metered.period;
begin
    foreach x in array all_of loop
        if octet_length(x.zone) > 255 then
            return false;
        end if;
    end loop;
    return true;
end
$$;

-- Whether each is within the bounds of its fields.
create function metered._fits(all_of metered.charge_limit[]) returns boolean
language plpgsql immutable strict
as $$
declare
    x metered.charge_limit;
begin
    foreach x in array all_of loop
        if octet_length((x.period).zone) > 255
            or octet_length(x.thresholds) > 1536
            or octet_length(x.thresholds) - octet_length(replace(x.thresholds, chr(10), '')) >= 8 then
            return false;
        end if;
    end loop;
    return true;
end
$$;

-- Whether each is within the bounds of its fields.
create function metered._fits(all_of metered.new_charge[]) returns boolean
language plpgsql immutable strict
as $$
declare
    x metered.new_charge;
begin
    foreach x in array all_of loop
        if octet_length(x.scope) > 255
            or array_lower(x.limits, 1) <> 1
            or array_ndims(x.limits) <> 1
            or array_position(x.limits, null) is not null
            or cardinality(x.limits) > 16
            or pg_column_size(x.limits) > 1400 and not metered._fits(x.limits)
            or pg_column_size(x.note) > 8196
            or pg_column_compression(x.note) is not null and octet_length(x.note::text) > 8192 then
            return false;
        end if;
    end loop;
    return true;
end
$$;

-- Whether each is within the bounds of its fields.
create function metered._fits(all_of metered.used_units[]) returns boolean
language plpgsql immutable strict
as $$
declare
    x metered.used_units;
begin
    foreach x in array all_of loop
        if octet_length(x.scope) > 255
            or array_lower(x.limits, 1) <> 1
            or array_ndims(x.limits) <> 1
            or array_position(x.limits, null) is not null
            or cardinality(x.limits) > 16
            or pg_column_size(x.limits) > 1400 and not metered._fits(x.limits) then
            return false;
        end if;
    end loop;
    return true;
end
$$;

-- Whether each is within the bounds of its fields.
create function metered._fits(all_of metered.hold_ids[]) returns boolean
language plpgsql immutable strict
as $$
declare
    x metered.hold_ids;
begin
    foreach x in array all_of loop
        if greatest(octet_length(x.tenant), octet_length(x.holder)) > 255
            or array_lower(x.ids, 1) <> 1
            or array_ndims(x.ids) <> 1
            or array_position(x.ids, null) is not null
            or cardinality(x.ids) > 100
            or pg_column_size(x.ids) > 255 and not metered._fits(x.ids, 255)
            or array_lower(x.issued, 1) <> 1
            or array_ndims(x.issued) <> 1
            or cardinality(x.issued) > 100 then
            return false;
        end if;
    end loop;
    return true;
end
$$;

-- Whether each is within the bounds of its fields.
create function metered._fits(all_of metered.new_token[]) returns boolean
language plpgsql immutable strict
as $$
declare
    x metered.new_token;
begin
    foreach x in array all_of loop
        if octet_length(x.digest) > 33
            or octet_length(x.purpose) > 128
            or octet_length(x.subject) > 512
            or pg_column_size(x.payload) > 8196
            or pg_column_compression(x.payload) is not null and octet_length(x.payload::text) > 8192
            or x.uses > 1000000 then
            return false;
        end if;
    end loop;
    return true;
end
$$;

-- Whether each is within the bounds of its fields.
create function metered._fits(all_of metered.new_event[]) returns boolean
language plpgsql immutable strict
as $$
declare
    x metered.new_event;
begin
    foreach x in array all_of loop
        if greatest(octet_length(x.tenant), octet_length(x.id)) > 255
            or octet_length(x.fingerprint) > 33 then
            return false;
        end if;
    end loop;
    return true;
end
$$;

-- The versions of this schema that were installed; the last one is the greatest.
create table metered.schema_version (
    version      int primary key,       -- a version that was installed
    installed_at timestamptz not null default clock_timestamp() -- when
);

insert into metered.schema_version (version) values (2);

-- The ledger: one chain of entries per scope, seq = 1, 2, 3 and so on, never changed. Each entry carries its scope's totals after it, so the
-- state of a scope is its last entry, and the spending inside a window is a difference of two entries instead of a sum over many. Wide columns
-- first: no padding between them.
create table metered.ledger (
    seq       bigint      not null,     -- 1, 2, 3 and so on in the scope, without a gap
    amount    metered.units not null, -- 0 for a clock repair and a close
    at        timestamptz not null,   -- never decreases along seq within an epoch
    spent     bigint      not null,   -- sum of charges so far, never decreases
    refunded  bigint      not null,   -- sum of refunds so far, never decreases
    credited  bigint      not null,   -- sum of credits so far, less revoked and lapsed units
    held      bigint      not null,   -- units in open holds now
    epoch     smallint    not null,   -- clock repairs so far
    kind      "char"      not null,   -- c charge, d credit (deposit), r refund, k clock repair,
                                      -- z the scope was closed: nothing new is let in;
                                      -- of holds: h held, u captured (used), l released, x expired;
                                      -- of lots, credit taken back: e lapsed (ended), v revoked, o rolled over;
                                      -- s scheduled: a lot that begins later, is withdrawn, or whose end was set
    scope     text collate "C" not null, -- the charged scope
    next_due  timestamptz,            -- no hold that held counts falls due before this, or -infinity: the scope is closed
    ref       bigint,                 -- of a refund: the seq of its charge
    hold      text,                   -- the hold's id, where the entry is about one alone
    operation_tenant text,            -- of the operation
    operation text,                     -- the operation's id, where a command made the entry
    note      jsonb,                  -- actor, tenant, correlation, reason
    anchor_at timestamptz,            -- some time in the past, for which anchor_spent is known, or null
    anchor_spent bigint,              -- spent at that time: it bounds the units spent since
    lots_end timestamptz,             -- no lot of the scope ends or begins before this, or null: the scope has no lots
    crossed jsonb,                    -- the reported thresholds, until they are armed again, or null
    tallied boolean,                  -- true: charges without limits may be rows of tallies, else null
    others bigint default 9223372036854775807,  -- seq less this are the charges so far, or null: 0. An entry of version 1 has the greatest number
    -- The guard: a writer that did not see the last entry collides here,
    -- whatever its isolation level, even if it never took the lock.
    primary key (scope, seq)
);

-- Finds the last entry at or before a time in two short index scans: this index holds every 16th entry, the other 15 are next to it in the
-- primary key. A full index on (scope, at) would cost a third more bytes and time for each charge; bisecting seq takes 20 look-ups in a scope
-- of a million entries (measured: 105 microseconds against 19).
create index ledger_time on metered.ledger (scope, epoch, at, seq)
    where seq & 15 = 1 or kind = 'k';

-- Charges without limits of busy scopes that are not in the chain yet: see tallies.sql.
create table metered.tallies (
    at     timestamptz not null,        -- when
    amount bigint not null,             -- charged units
    scope  text collate "C" not null,   -- the charged scope
    operation_tenant text,              -- of the operation
    operation text,                     -- the operation's id, where a command made the charge
    hold   text,                        -- the hold's id, where its placement made the charge
    note   jsonb,                       -- actor, tenant, correlation, reason
    primary key (scope, at)
);

-- Refunds by the charge they refund, summed in blocks of 16^level charges (level 0: one charge): the refunds of all charges after some entry
-- are at most 15 rows of each level, however many there are. See ADR 1.
create table metered.refund_sum (
    block  bigint   not null,         -- charge's seq >> 4 * level
    amount bigint   not null,           -- refunded of the block's charges
    level  smallint not null,           -- a block is of 16^level charges
    scope  text collate "C" not null,   -- whose charges they are
    primary key (scope, level, block)
);

-- Scopes that were declared to exist. Only charges, credits and holds that demand it look here.
-- A row stays when its scope is retired, so that no program creates the scope again unawares.
create table metered.resources (
    created_at timestamptz not null,    -- when it was declared first
    retired_at timestamptz,             -- since when nothing new is let in, or null
    scope      text collate "C" primary key -- the name
);

-- Leases: units of a scope that are spent without its lock, until the lease is settled. A row is the history of one.
create table metered.leases (
    no          bigint      generated always as identity primary key, -- the number of the lease
    opened_at   timestamptz not null,   -- when it was opened
    ends_at     timestamptz not null,   -- nothing is spent of it from here on, and anybody may settle it
    settled_at  timestamptz,            -- when it was settled, or null while it is open
    granted     bigint      not null,   -- units that it held
    spent       bigint,                 -- captured units of granted, once it is settled
    fence       bigint      not null,   -- the key of its lock
    opened_seq  bigint      not null,   -- the entry that holds its units
    settled_seq bigint,                 -- the last entry of its end
    mode        "char"      not null,   -- s its spends are rows, m they are in its owner's memory, c a child scope has it,
                                        -- r a child on another cluster has it, g the row on that cluster
    scope       text collate "C" not null, -- whose units they are
    owner       text collate "C" not null, -- the process that opened it
    settled_by  text collate "C",       -- the process that settled it: its owner, or another
    child       text collate "C",       -- the scope that its units were carved for
    home_at     timestamptz             -- of mode g: when the parent's cluster was known to have settled its side
);

-- A scope is carved for once.
create unique index leases_child on metered.leases (child, (mode = 'r')) where child is not null;

-- The open leases of a scope by their end, the history of a scope, and settled leases by age.
create index leases_open on metered.leases (scope, ends_at) where settled_at is null;
create index leases_due on metered.leases (ends_at) where settled_at is null;
create index leases_scope on metered.leases (scope, no);
create index leases_settled on metered.leases (settled_at) where settled_at is not null;

-- How much all open leases of a scope hold together, so that a refusal need not read them. Written under the scope's lock; a scope
-- without open leases has no row.
create table metered.lease_sum (
    granted bigint not null,            -- sum of leases.granted
    scope   text collate "C" primary key -- whose units they are
);

-- Spends from leases, written by the transactions that spend. Each takes a range of its lease, as a box of the plane: its lease
-- is one side, its units the other, exact up to 2^53. Ranges that share a unit exclude each other, also where neither session sees the other's row:
-- the second waits for the first one's transaction.
create table metered.lease_spends (
    lease     bigint      not null,     -- leases.no
    at_offset bigint      not null,     -- where its range begins, from 0 on
    amount    bigint      not null,     -- how long it is
    at        timestamptz not null,     -- when
    operation_tenant text,              -- of the operation
    operation text,                     -- the operation's id, where a command spent it
    note      jsonb,                    -- actor, tenant, correlation, reason
    primary key (lease, at_offset),
    constraint lease_spends_apart exclude using gist (box(point(lease, at_offset), point(lease, at_offset + amount - 1)) with &&)
);

-- Reservations. The units that a hold keeps of a scope are in the ledger (held) and in its
-- line. This row says who holds them, until when, and how the hold ended.
--
-- Locks are taken in one order everywhere: the scopes' advisory locks by key, then rows of holds by no. Under the lock of any of its scopes a
-- hold can only expire. That is decided once, here, by the plain clock. Each line is then freed under its own scope's lock, by whoever comes.
create table metered.holds (
    no          bigint      generated always as identity primary key, -- the number of the hold, in the order of placing
    placed_at   timestamptz not null,   -- when it was placed
    deadline    timestamptz not null,   -- when it ends, unless it is extended
    due         timestamptz not null,   -- deadline and grace: its units are free from here on
    ceiling     timestamptz not null,   -- no deadline is later
    ended_at    timestamptz,            -- when it ended: due, if it expired
    issued_at   timestamptz,            -- the time that the id carries, if it does
    version     int         not null,   -- transitions so far
    state       "char"      not null,   -- h held, c captured, r released, x expired
    returned    boolean     not null default false, -- captured, and given back since
    pending     boolean     not null default true,  -- not ended, or ended by time and not announced
    tenant      text collate "C" not null, -- keeps the ids of tenants apart
    id          text collate "C" not null, -- chosen by the caller, or made up
    holder      text collate "C" not null, -- the holder, or empty for nobody
    claim       text collate "C",       -- the claimed scope, if it is a claim
    entity      text collate "C",       -- the entity that a capture linked
    fingerprint bytea       not null,   -- a version byte and a SHA-256
    keys        bigint[]    not null,   -- of the locks of its scopes, ascending
    metadata    json,                   -- of the caller
    unique (tenant, id)
);

-- The order of the sweeper.
create index holds_due on metered.holds (due, no) where pending;

-- Lists by holder, and by the linked entity.
create index holds_holder on metered.holds (tenant, holder, no) where holder <> '';
create index holds_entity on metered.holds (tenant, entity, no) where entity is not null;

-- At most one active claim of a value. The ledger sees to that already; this is how it is found.
create unique index holds_claim on metered.holds (claim)
    where claim is not null and (state = 'h' or state = 'c' and not returned);

-- The order of a purge. A captured claim is kept while it stands.
create index holds_ended on metered.holds (ended_at)
    where ended_at is not null and (claim is null or state <> 'c' or returned);

-- The holds of jobs that have not ended: see jobs.Enqueuer.Run.
create index holds_jobs on metered.holds (no) where pending and id like 'job/%';

-- One scope of a hold.
create table metered.hold_lines (
    hold     bigint      not null,      -- holds.no
    key      bigint      not null,      -- of the scope's lock
    amount   bigint      not null,      -- placed
    captured bigint      not null default 0, -- spent of amount
    open     bigint      not null,      -- counted in the scope's held, unless due is before its next_due: then it was freed
    due      timestamptz not null,      -- holds.due
    scope    text collate "C" not null, -- the scope that it holds units of
    refunded bigint      not null default 0,    -- units of captured that return_holds gave back
    opened_seq bigint    not null,      -- the entry that holds its units
    at_least bigint      not null default 0,    -- is captured when the hold expires, as far as it was not before
    primary key (hold, scope)
);

-- Which lines of a scope fall due first. Read from next_due on, so that entries of lines that ended, which a long snapshot keeps alive, are
-- not waded through. Lines of a hold are asked for with open <> 0, which keeps the planner from this index.
create index hold_lines_due on metered.hold_lines (scope, due) where open > 0;

-- Which lines will capture something when they expire.
create index hold_lines_least on metered.hold_lines (scope, due) where open > 0 and at_least > 0;

-- The rows of lots. What a draw, a hold or a refund changes of a lot is in its newest move: a row that each of them updated would get slower with each version
-- that an open snapshot keeps. This one changes where a lot begins, is empty, gets units again, or ends. The view lots has both. Written after an entry of its
-- scope, which the guard lets one writer make.
create table metered.lot_rows (
    no          bigint      generated always as identity primary key, -- the number of the lot
    granted_at  timestamptz not null,   -- when it was granted
    expires_at  timestamptz not null,   -- nothing is drawn of it from here on, or infinity: it never ends
    granted_seq bigint      not null,   -- the entry that credited it
    last_seq    bigint      not null,   -- the last entry that moved units of it, where no move of it has its units
    amount      bigint      not null,   -- units that it was granted with
    rest        bigint      not null,   -- units that can be drawn, where no move of it has its units
    drawn       bigint      not null default 0, -- units that were spent, less refunds, where no move of it has its units
    held        bigint      not null default 0, -- units in open holds and leases, where no move of it has its units
    lapsed      bigint      not null default 0, -- units of amount that were left at its end, or refunded later
    revoked     bigint      not null default 0, -- units of amount that were taken back
    rolled      bigint      not null default 0, -- units of amount that rolled over into another lot
    untold      bigint      not null default 0, -- units of lapsed that no subscriber has heard of yet
    roll_cap    bigint,                 -- units that roll over at its end at most, or null: none
    roll_no     bigint,                 -- the number that one will have
    roll_end    timestamptz,            -- when that lot ends, or infinity: never
    late        interval,               -- how long units last that are refunded after its end: 0 for ever, null not at all
    from_lot    bigint,                 -- the lot that its units were in before
    priority    int         not null,   -- a lot of a lower priority is drawn first
    origin      "char"      not null,   -- g granted, c credited without a grant, r rolled over, l given back late
    open        boolean     not null,   -- something can be drawn of it for anything, but for its end
    scope       text collate "C" not null, -- the wallet
    category    text collate "C" not null, -- of the caller: paid, promotional
    reference   text collate "C",       -- of the caller, once in a wallet
    fingerprint bytea,                  -- of the grant under the reference: a version byte and a SHA-256
    pending     bigint      not null default 0, -- units of amount that nobody can draw before starts_at
    starts_at   timestamptz,            -- when it begins, or began, or null: with the grant
    again       boolean     not null default false, -- its units roll over again, or share a cap: no call leaves its end to a later one
    plan        metered.lot_plan,       -- how it renews and rolls over, and what it pays for, or null
    kept        bigint      not null default 0, -- units that pay for the uses of its plan alone, where no move of it has its units
    keeps       boolean     not null default false, -- something can be drawn of it for its uses, but for its end
    age         bigint[]    not null default '{}' -- when its units were granted first, in microseconds, the entry of that grant, and its own: the oldest is drawn first
);

-- The order in which lots are drawn.
create index lots_open on metered.lot_rows (scope, priority, expires_at, age) where open;

-- The lots of a wallet by their end, and the lots that roll over, in the order in which they are drawn then.
create index lots_ends on metered.lot_rows (scope, expires_at, age) where open;
create index lots_rolling on metered.lot_rows (scope, priority, roll_end, age) where open and roll_cap is not null;

-- Lots that begin later, in one wallet and in all.
create index lots_starts on metered.lot_rows (scope, starts_at, age) where pending > 0;
create index lots_starting on metered.lot_rows (starts_at, no) where pending > 0;

-- Lots whose end no call leaves to a later one, and lots that hold units which rolled over.
create index lots_again on metered.lot_rows (scope, expires_at, age) where open and again;
create index lots_carried on metered.lot_rows (scope, category, expires_at) where origin = 'r' and (open or keeps);

-- Lots that pay for some uses: in the order in which they are drawn, and by their end, in one wallet and in all.
create index lots_kept on metered.lot_rows (scope, priority, expires_at, age) where keeps;
create index lots_kept_ends on metered.lot_rows (scope, expires_at, age) where keeps;
create index lots_kept_rolling on metered.lot_rows (scope, expires_at, age) where keeps and roll_cap is not null;
create index lots_kept_due on metered.lot_rows (expires_at, no) where keeps;

-- The lots of all wallets by their end, with those that subscribers have not heard of.
create index lots_due on metered.lot_rows (expires_at, no) where open or untold > 0;

-- The lots of one wallet that subscribers have not heard of.
create index lots_untold on metered.lot_rows (scope, expires_at, no) where untold > 0;

create unique index lots_reference on metered.lot_rows (scope, reference) where reference is not null;

-- A lot is rolled over once.
create unique index lots_rolled on metered.lot_rows (from_lot) where origin = 'r';

-- All lots of a wallet by their end, also those of which nothing is left.
create index lots_scope on metered.lot_rows (scope, expires_at, no);

-- The lots that a lot went on in.
create index lots_from on metered.lot_rows (from_lot) where from_lot is not null;

-- The effect of each entry of a wallet on its lots.
create table metered.lot_moves (
    seq    bigint not null,             -- the entry
    nth    int    not null,             -- 1, 2, 3 and so on in the entry
    lot    bigint not null,             -- lots.no, or 0: overdraft, which no lot covers
    amount bigint not null,             -- how many units
    back   bigint not null default 0,   -- units of amount that refunds gave back
    kind   "char" not null,             -- d credited, t taken by a charge, p taken to pay an overdraft back, g given back by a refund,
                                        -- h held, q held in place of an overdraft, u captured, f freed, e lapsed, v revoked, o rolled over,
                                        -- s scheduled for later, or its end set, w withdrawn before it began,
                                        -- a applied to a use that takes them now, b back to its uses,
                                        -- n reinstated after v, m reinstated after w
    scope  text collate "C" not null,   -- the wallet
    version bigint,                     -- 1, 2, 3 and so on of its lot. After the newest one, the lot has these units. Null: overdraft, or of 0.1.0
    rest   bigint,                      -- units of the lot that can be drawn
    drawn  bigint,                      -- units of the lot that were spent, less refunds
    held   bigint,                      -- units of the lot in open holds and leases
    kept   bigint,                      -- units of the lot that pay for the uses of its plan alone
    primary key (scope, seq, nth)
);

-- The newest move of a lot.
create unique index lot_moves_lot on metered.lot_moves (lot, version) where version is not null;

-- Overdrafts that were paid back. A refund of overdrawn units gives them back to the lot that paid.
create index lot_moves_paid on metered.lot_moves (scope, seq, nth) where kind = 'p' and amount > back;

-- Units of lots in open holds and leases, and of lines that a sum freed, until a sweep ends their holds.
create table metered.lot_holds (
    seq    bigint not null,             -- the entry that held the units: hold_lines.opened_seq or leases.opened_seq. 0: spent units that are overdrawn, while ends of lots are unwritten
    lot    bigint not null,             -- lots.no, or 0: overdraft
    amount bigint not null,             -- units
    scope  text collate "C" not null,   -- the wallet
    primary key (scope, seq, lot)
);

-- Overdrafts.
create index lot_holds_overdrawn on metered.lot_holds (scope, seq) where lot = 0;

-- Every transition, written with it.
create table metered.hold_events (
    hold      bigint      not null,     -- holds.no
    at        timestamptz not null,     -- when it was recorded
    deadline  timestamptz,              -- of a place or an extension: the new one
    version   int         not null,     -- 1, 2, 3 and so on in the hold
    kind      "char"      not null,     -- h placed, p captured in part, c captured, e extended,
                                        -- r released, x expired, g given back in part, b given back
    entity    text,                     -- the entity that a capture linked
    detail    jsonb,                    -- a place's constants, a capture's lines, or the units given back, with (b) those that were not
    note      jsonb,                    -- actor, tenant, correlation, reason
    operation_tenant text,              -- of the operation
    operation text,                     -- the operation's id, where a command did it
    primary key (hold, version)
);

-- The latest time of an id whose hold was purged. Never decreases.
create table metered.holds_horizon (
    at  timestamptz not null,           -- ids of this time and before are retired
    one boolean primary key default true check (one) -- there is one row
);

insert into metered.holds_horizon (at) values ('-infinity');

-- One-time grants. The token itself is nowhere in here, only the SHA-256 of its text, from which 32 random bytes cannot be found.
create table metered.tokens (
    digest     bytea       primary key check (octet_length(digest) = 32), -- the SHA-256 of its text
    minted_at  timestamptz not null,    -- when it was minted
    expires_at timestamptz not null,    -- when it is no longer good
    ended_at   timestamptz,                     -- last use, revocation, or expiry seen by a revocation
    uses       int         not null check (uses >= 1), -- how often it can be used
    used       int         not null default 0 check (used between 0 and uses), -- how often it was
    revoked    boolean     not null default false, -- whether it was revoked
    sole       boolean     not null default false,  -- minted by replace_token
    purpose    text collate "C" not null, -- the right that it grants
    subject    text collate "C" not null, -- the user or thing that it is for
    payload    json,                            -- json, not jsonb: it comes back byte for byte
    check (used < uses and not revoked or ended_at is not null)
);

-- A subject's tokens that have not ended, to revoke them. A use that is not the last changes no indexed column and stays a HOT update.
create index tokens_open on metered.tokens (purpose, subject) where ended_at is null;

-- The guard of replace_token: at most one such token per purpose and subject, whatever the isolation level, even if its lock was never taken.
create unique index tokens_sole on metered.tokens (purpose, subject) where sole and ended_at is null;

-- The order of purge_tokens.
create index tokens_purge on metered.tokens ((coalesce(ended_at, expires_at)));

-- Commands that committed, by the caller's id: written with the command's own writes, so that a record exists exactly where they do. An event
-- of charge_each has one, too, with the result null and one scope. Its issued_at is the time of the id, or else when it occurred. Refusals,
-- too, where the caller asked for the refusal to be remembered.
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
    holds       text[],                 -- JSON: the holds that it placed, captured or released, and the draws of its own steps
    refusal     json,                   -- the reason of a refusal, whose result is empty
    name        text collate "C",       -- the command's name, or null
    jobs        bigint[],               -- the ids of River's jobs that it made
    primary key (tenant, id)
);

create index operations_at on metered.operations (at);

-- The latest time of an id whose record was purged. Never decreases. Always found by its key: with sequential scans off, one would look so
-- expensive that each is compiled first (jit), for 50 ms.
create table metered.operations_horizon (
    at  timestamptz not null,           -- ids of this time and before are retired
    one boolean primary key default true check (one) -- there is one row
);

insert into metered.operations_horizon (at) values ('-infinity');

-- The tables of jobs: keys that were used, and jobs in line.

-- Which job a key was used for. No foreign key: River deletes finished jobs after a day, and a key must be remembered for longer than its job.
create table metered.job_keys (
    job_id     bigint      not null,    -- river_job.id
    created_at timestamptz not null,    -- when the key was claimed
    queue      text collate "C" not null, -- of the job
    key        text collate "C" not null, -- chosen by the caller, once in the queue
    kind       text        not null,    -- of the job
    tenant     text        not null,    -- of the job
    digest     bytea       not null,   -- of kind and args, its first byte the version: see jobs/digest.go
    primary key (queue, key)
);

-- For purging by age.
create index job_keys_age on metered.job_keys (created_at);

-- Jobs that wait for units of a scope: see parked.sql. Those that wait for their first attempt have no row of River's yet.
create table metered.parked_jobs (
    job_id    bigint      not null,     -- the id that it has or will have in river_job
    turn      bigint      not null,     -- its round in the line
    amount    bigint      not null,     -- the units that it needs of the scope
    class     bigint      not null,     -- a hash of its limits of the scope, and its use
    parked_at timestamptz not null,     -- when it was parked
    drop_at   timestamptz,              -- when it is dropped, or null: never
    not_before timestamptz,             -- when its next attempt may start, or null: it waits for its first
    troubled_at timestamptz,            -- when it got into trouble, or null: it is in none
    retry_at  timestamptz,              -- when a job in trouble is tried again: it is in no line before
    passed_amount bigint,               -- the units that it needs of passed, whose line counts them
    priority  smallint    not null,     -- River's: 1 is first
    lane      smallint    not null default 0, -- 1: it waits for a second choice of units, too, and has a row for each
    scope     text collate "C" not null, -- the scope that it waits for, or empty: it is in no line
    fair      text collate "C" not null, -- jobs of different keys take turns
    tenant    text collate "C" not null, -- of the job and its hold
    job       jsonb       not null,     -- its columns in river_job
    hold      text        not null,     -- the hold, a metered.new_hold
    charges   text        not null,     -- metered.new_charge[] of all its scopes
    trouble   text,                     -- why its last try failed
    passed    text collate "C",         -- the scope from whose line it came, since it fits there, or null
    primary key (job_id, lane)
);

-- The order of a line.
create index parked_jobs_line on metered.parked_jobs (scope, priority, turn, job_id);

-- The last job of a key in a line.
create index parked_jobs_fair on metered.parked_jobs (scope, priority, fair, turn);

-- The smallest job of each class in a line.
create index parked_jobs_class on metered.parked_jobs (scope, class, amount);

-- The oldest job in a line.
create index parked_jobs_age on metered.parked_jobs (scope, parked_at);

create index parked_jobs_drop on metered.parked_jobs (greatest(drop_at, retry_at)) where drop_at is not null;

-- Jobs that are in no line until their next attempt, or because they are in trouble, and all that River has.
create index parked_jobs_rest on metered.parked_jobs (greatest(not_before, retry_at)) where scope = '';

create index parked_jobs_again on metered.parked_jobs (job_id) where not_before is not null;

-- Jobs that came from a line.
create index parked_jobs_passed on metered.parked_jobs (passed) where passed is not null;

-- Jobs in trouble.
create index parked_jobs_trouble on metered.parked_jobs (troubled_at) where trouble is not null;

-- The lines. A scope that no job waits for has none.
create table metered.parked_scopes (
    key      bigint      not null,      -- of the scope's lock
    wake_at  timestamptz not null,      -- when the line is to be looked at: -infinity (now), or infinity (when units are freed)
    next_at  timestamptz not null default 'infinity', -- the earliest time that the present look has found
    waiting  bigint      not null,      -- jobs in the line
    again    boolean     not null default false, -- units were freed since the present look began
    turns    bigint[]    not null default '{0,0,0,0}', -- the last round that was released, of each priority
    after    bigint[],                  -- where the present look goes on: priority, turn, job_id
    started  bigint      not null default 0, -- jobs of the line that started since counting began
    since    timestamptz,               -- when counting began: the line's rate is of an hour or two at most
    trouble  text,                      -- why the last look failed
    scope    text collate "C" primary key -- the scope
) with (fillfactor = 70);

create index parked_scopes_wake on metered.parked_scopes (wake_at);

-- Advisory locks of one server count there alone. Where the schema is a shard of a Citus cluster, they are taken on the node that has the tables,
-- whichever node a call came through: by queries of a table with one row, which Citus runs there.

-- Whether the schema is such a shard: there Migrate writes true. Inlined, so that it costs nothing elsewhere.
create function metered._sharded() returns boolean
language sql immutable
as $$
    select false
$$;

create function metered._try_lock_there(key bigint, shared boolean) returns boolean
language plpgsql volatile
as $$
declare
    got boolean;
begin
    if shared then
        select pg_try_advisory_xact_lock_shared(key) into got from metered.operations_horizon h where h.one;
    else
        select pg_try_advisory_xact_lock(key) into got from metered.operations_horizon h where h.one;
    end if;
    return got;
end
$$;

-- Takes a lock if it is free, and returns whether. Inlined wherever it stands.
create function metered._try_lock(key bigint) returns boolean
language sql volatile
as $$
    select case when metered._sharded() then metered._try_lock_there(key, false) else pg_try_advisory_xact_lock(key) end
$$;

create function metered._try_lock_shared(key bigint) returns boolean
language sql volatile
as $$
    select case when metered._sharded() then metered._try_lock_there(key, true) else pg_try_advisory_xact_lock_shared(key) end
$$;

-- _lock_keys on the node that has the tables, of a call that may wait for most_ms.
create function metered._lock_keys_there(keys bigint[], most_ms int) returns boolean
language plpgsql volatile
as $$
declare
    key      bigint;
    deadline timestamptz := clock_timestamp() + most_ms * interval '1 ms';
    before   text := current_setting('lock_timeout');
begin
    foreach key in array keys loop
        perform set_config('lock_timeout', greatest(1, (extract(epoch from deadline - clock_timestamp()) * 1000)::int)::text, true);
        perform pg_advisory_xact_lock(key);
    end loop;
    perform set_config('lock_timeout', before, true);
    return true;
end
$$;

-- Room in the server's lock table, which all its databases share, for calls that take more than 64
-- locks: three quarters of the locks that the settings promise, in up to 64 units. A call takes an
-- advisory lock for each unit that it needs, until its transaction ends, so that many large calls at
-- once queue, and leave the last quarter to everybody else. Beyond that a statement of any program
-- on the server fails (53200). A transaction that has all units goes on: there is no other one.
-- Waits for up to wait_ms, or for a shorter lock_timeout of the session, and returns the rest of
-- wait_ms. Then SQLSTATE 55P03.
create function metered._make_room(locks int, wait_ms int) returns int
language plpgsql volatile
as $$
declare
    capacity bigint := greatest(1, current_setting('max_locks_per_transaction')::bigint * 3 / 4
        * (current_setting('max_connections')::int + current_setting('max_prepared_transactions')::int));
    units    int := greatest(1, least(64, capacity / 256));
    mine     int[] := coalesce(string_to_array(nullif(current_setting('metered_tx.room', true), ''), ' ')::int[], '{}');
    needed   int := least(units - cardinality(mine), ceil(locks::numeric * units / capacity));
    taken    int[];
    bound    text := current_setting('lock_timeout');
    began    timestamptz := clock_timestamp();
    waited   int := 0;
begin
    loop
        begin
            taken := '{}';
            for unit in 1..units loop
                exit when cardinality(taken) >= needed;
                -- A session gets a lock that it has once more.
                if unit <> all (mine) and metered._try_lock(7308620103914913792 + unit) then
                    taken := taken || unit;
                end if;
            end loop;
            if cardinality(taken) >= needed then
                perform set_config('metered_tx.room', array_to_string(mine || taken, ' '), true);
                return greatest(wait_ms - waited, 1);
            end if;
            raise exception using errcode = 'MT100';    -- gives back those that it has
        exception when sqlstate 'MT100' then
            waited := 1 + extract(epoch from clock_timestamp() - began) * 1000;
        end;
        if (waited < least(wait_ms, case when bound <> '0' then extract(epoch from bound::interval) * 1000 end)) is not true then
            raise exception 'the lock table of the server has no room for % locks of one call', locks
                using errcode = '55P03', hint = 'Commit sooner, name fewer scopes in a transaction, or raise max_locks_per_transaction.';
        end if;
        perform pg_sleep((5 + 20 * random()) / 1000);
    end loop;
end
$$;

-- Takes transaction-scoped advisory locks in the order given (callers sort),
-- waiting at most wait_ms for all of them together, or as long as a shorter
-- lock_timeout of the session allows. Then SQLSTATE 55P03.
-- Each lock is first tried without waiting, which nearly always succeeds and needs
-- no lock_timeout. A try does not overtake calls that already wait. Returns whether
-- it had to wait: a caller assigns that, which costs a fifth of a PERFORM.
create function metered._lock_keys(keys bigint[], wait_ms int) returns boolean
language plpgsql volatile
as $$
declare
    key      bigint;
    deadline timestamptz;
    before   text;
    longest  int := wait_ms;
begin
    if cardinality(keys) > 64 then
        wait_ms := metered._make_room(cardinality(keys), wait_ms);
    end if;
    if metered._sharded() then
        before := current_setting('lock_timeout');
        wait_ms := least(wait_ms, case when before <> '0' then (extract(epoch from before::interval) * 1000)::int end);
        perform metered._lock_keys_there(keys, wait_ms) from metered.operations_horizon h where h.one;
        return true;
    end if;
    foreach key in array keys loop
        continue when pg_try_advisory_xact_lock(key);
        deadline := coalesce(deadline, clock_timestamp() + wait_ms * interval '1 ms');
        before := current_setting('lock_timeout');
        perform set_config('lock_timeout', greatest(1, least(
            (extract(epoch from deadline - clock_timestamp()) * 1000)::int,
            case when before <> '0' then (extract(epoch from before::interval) * 1000)::int end))::text, true);
        perform pg_advisory_xact_lock(key);
        perform set_config('lock_timeout', before, true);
    end loop;
    return deadline is not null or wait_ms < longest;
end
$$;

-- Bounds this transaction's waits for row locks by wait_ms each, or by a shorter
-- lock_timeout that is set. Returns the setting as it was, for _unbound_lock_wait,
-- which must follow. An error undoes it without.
create function metered._bound_lock_wait(wait_ms int) returns text
language plpgsql volatile
as $$
declare
    before text := current_setting('lock_timeout');
    bound  text;
begin
    if wait_ms is null or before <> '0' and before::interval <= wait_ms * interval '1 ms' then
        return null;
    end if;
    bound := set_config('lock_timeout', wait_ms::text, true);
    return before;
end
$$;

-- The shorter one of a timeout, as a setting has it, and of so many milliseconds. Inlined
-- wherever it stands.
create function metered._shorter(before text, ms int) returns text
language sql stable
as $$
    select case when before = '0' or before::interval > ms * interval '1 ms' then ms::text else before end
$$;

create function metered._unbound_lock_wait(before text) returns text
language plpgsql volatile
as $$
begin
    return case when before is not null then set_config('lock_timeout', before, true) end;
end
$$;

-- Takes locks, in the order given, until one is not free, and returns whether it has them
-- all. _try_keys is inlined: for one key it costs no call.
create function metered._try_each(keys bigint[]) returns boolean
language plpgsql volatile
as $$
declare
    key bigint;
begin
    foreach key in array keys loop
        if not metered._try_lock(key) then
            return false;
        end if;
    end loop;
    return true;
end
$$;

create function metered._try_keys(keys bigint[]) returns boolean
language sql volatile
as $$
    select case when cardinality(keys) = 1 then metered._try_lock(keys[1]) else metered._try_each(keys) end
$$;

-- The key of a lock: the first 8 bytes of the SHA-256 of a space, a zero byte and a name. Go
-- derives the same one.
create function metered._lock_key(space bytea, name bytea) returns bigint
language sql stable
as $$
    select ('x' || encode(substr(sha256(space || decode('00', 'hex') || name), 1, 8), 'hex'))::bit(64)::bigint
$$;

create function metered._scope_key(of_scope text) returns bigint
language sql stable
as $$
    select metered._lock_key('metered/scope/metered', convert_to(of_scope, 'UTF8'))
$$;

-- Whether key is the scope's: cheaper than deriving the key.
create function metered._key_fits(key bigint, of_scope text) returns boolean
language sql stable
as $$
    select int8send(key) = substr(sha256('metered/scope/metered'::bytea || decode('00', 'hex') || convert_to(of_scope, 'UTF8')), 1, 8)
$$;

-- Whether an origin is within its bounds. Inlined wherever it stands.
create function metered._fits_origin(o metered.origin) returns boolean
language sql stable
as $$
    select coalesce(octet_length(o.tenant) <= 255 and octet_length(o.operation) <= 255, true)
        and coalesce(pg_column_size(o.note) <= 8192, true)
$$;

-- Refuses an argument that is out of bounds, which Go never sends. Functions that commands wait
-- for call it in an IF, which costs a fifth of a PERFORM.
create function metered._require(holds boolean, what text) returns void
language plpgsql
as $$
begin
    if holds is not true then
        raise exception 'out of bounds: %', what using errcode = '22023';
    end if;
end
$$;

-- The locks of several scopes, in the one order in which everybody takes them.
create function metered._lock_all_scopes(scopes text[], keys bigint[], wait_ms int) returns boolean
language plpgsql volatile
as $$
begin
    return metered._lock_keys(array(
        select distinct coalesce(s.key, metered._scope_key(s.scope)) from unnest(scopes, keys) s(scope, key) order by 1), wait_ms);
end
$$;

-- Takes the locks of scopes for a caller that then reads, charges or credits.
create function metered.lock_scopes(scopes text[], wait_ms int) returns void
language plpgsql volatile
security definer
set search_path = pg_catalog, pg_temp
as $$
begin
    if array_lower(scopes, 1) <> 1
        or array_ndims(scopes) <> 1
        or array_position(scopes, null) is not null
        or cardinality(scopes) > 64
        or pg_column_size(scopes) > 255 and not metered._fits(scopes, 255)
        or wait_ms > 3600000 then
        raise exception 'out of bounds: an argument of lock_scopes' using errcode = '22023';
    end if;
    perform metered._require(cardinality(scopes) <= 64, 'scopes');
    perform metered._lock_all_scopes(scopes, null, wait_ms);
    perform metered._without_tallies(scopes, wait_ms);
end
$$;

-- Whether this transaction's statements all read from one snapshot. Inlined wherever it stands.
create function metered._one_snapshot() returns boolean
language sql stable
as $$
    select current_setting('transaction_isolation') in ('repeatable read', 'serializable')
$$;

-- Cells: several schemas, each with the rows of its tenants (package cells). A transaction enters its tenant first, which shares the tenant's
-- lock, and a move takes that lock alone. So it comes before the transaction or after it, never beside it.
--
-- The first entry of a scope is refused in a cell that the scope's tenant has left. Since a move takes the scopes' entries along, no
-- charge gets into the old cell, whether or not its transaction has entered.

-- The number of the cell that this schema is: see package cells. Other schemas have no row.
create table metered.cell (
    no    int not null,                 -- from 0 on
    cells int not null,                 -- how many there are, for good
    one   boolean primary key default true check (one) -- there is one row
);

-- Where tenants live that have moved, as far as this cell knows: a tenant's first cell, the one that it has left, and its new one. A row is
-- only replaced by one with more moves.
create table metered.tenants (
    moves  bigint  not null,            -- how often it had moved by then
    cell   int     not null,            -- where it lives since
    packed boolean not null default false, -- its rows are in packed_rows, until they are known to have arrived
    tenant text collate "C" primary key -- the tenant
);

-- Rows of tenants on their way to another cell.
create table metered.packed_rows (
    tenant   text collate "C" not null, -- whose they are
    nth      int    not null,           -- of the table, in the order of arrival
    row_no   bigint not null,           -- 1, 2, 3 and so on of the table
    of_table text   not null,           -- its name
    body     text   not null,           -- the row, as the table's type has it as text
    primary key (tenant, nth, row_no)
);

-- The key of a tenant's lock.
create function metered._tenant_key(of_tenant text) returns bigint
language sql stable
as $$
    select metered._lock_key('metered/tenant/metered', convert_to(of_tenant, 'UTF8'))
$$;

-- Refuses a snapshot that may be older than a row of a tenant, whose lock is held, with 40001.
create function metered._refuse_old_tenant(of_tenant text) returns void
language plpgsql volatile
as $$
begin
    perform from metered.tenants t where t.tenant = of_tenant for share;
    if not found then
        begin   -- the insert meets a row that the snapshot does not see, and the block takes it back
            insert into metered.tenants (tenant, moves, cell) values (of_tenant, 0, 0) on conflict do nothing;
            raise exception using errcode = 'MT100';
        exception when sqlstate 'MT100' then
            null;
        end;
    end if;
end
$$;

create function metered._raise_moved(of_tenant text, in_cell int, after_moves bigint) returns void
language plpgsql
as $$
begin
    raise exception 'the tenant lives in another cell' using errcode = 'MT014',
        detail = jsonb_build_object('tenant', of_tenant, 'cell', in_cell, 'moves', after_moves);
end
$$;

-- Begins the work of a transaction for a tenant, in a cell of so many: SQLSTATE MT014 if the tenant lives in another one. home: it lives
-- here unless it has moved. The answer holds until the transaction ends.
create function metered.enter_tenant(of_tenant text, key bigint, in_cell int, of_cells int, home boolean, wait_ms int) returns void
language plpgsql volatile
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set plan_cache_mode = force_generic_plan
as $$
declare
    before   text;
    cell_now record;
begin
    if octet_length(of_tenant) > 255
        or in_cell > 256
        or of_cells > 256
        or wait_ms > 3600000 then
        raise exception 'out of bounds: an argument of enter_tenant' using errcode = '22023';
    end if;
    if int8send(key) is distinct from substr(sha256('metered/tenant/metered'::bytea || decode('00', 'hex') || convert_to(of_tenant, 'UTF8')), 1, 8) then
        perform metered._require(false, 'key');
    end if;
    if not metered._try_lock_shared(key) then
        before := metered._bound_lock_wait(wait_ms);
        perform pg_advisory_xact_lock_shared(key) from metered.operations_horizon h where h.one;     -- on the node that has the tables
        before := metered._unbound_lock_wait(before);
    end if;
    if metered._one_snapshot() then
        perform metered._refuse_old_tenant(of_tenant);
    end if;
    select y.no, y.cells, t.cell, t.moves into cell_now
    from metered.cell y left join metered.tenants t on t.tenant = of_tenant where y.one;
    if (cell_now.no = in_cell and cell_now.cells = of_cells) is not true then
        raise exception 'the schema is cell % of %, and not % of %', cell_now.no, cell_now.cells, in_cell, of_cells using errcode = 'MT015';
    elsif coalesce(cell_now.cell = in_cell, home) is not true then
        perform metered._raise_moved(of_tenant, cell_now.cell, cell_now.moves);
    end if;
end
$$;

-- Refuses the first entry of a scope whose tenant has left this cell, and an answer that such a tenant has no hold of an id. A tenant's name has up
-- to four parts.
create function metered._refuse_moved(of_scope text) returns void
language plpgsql volatile
as $$
declare
    parts text[] := (string_to_array(of_scope, '/'))[1:4];
    name  text;
    moved metered.tenants;
begin
    for i in 1..cardinality(parts) loop
        name := array_to_string(parts[1:i], '/');
        if not metered._try_lock_shared(metered._tenant_key(name)) then
            perform metered._collided();     -- it moves. To wait with the scope's lock could be a deadlock
        end if;
        if metered._one_snapshot() then
            perform metered._refuse_old_tenant(name);
        end if;
        select * into moved from metered.tenants y where y.tenant = name;
        if moved.cell <> (select c.no from metered.cell c where c.one) then
            perform metered._raise_moved(name, moved.cell, moved.moves);
        end if;
    end loop;
end
$$;

-- Numbers of holds, leases and lots, from sequences. Logical replication carries rows and no sequence, so on a server that was switched to the
-- sequences are behind their tables. A call goes on there: it draws no number that a row has, or has set aside for another row, and moves the
-- sequence on. Until then a number may be drawn again whose row was purged, so Validate compares each sequence with its table, and Migrate
-- moves it on.

-- Numbers that are set aside for rollovers.
create index lots_roll_no on metered.lot_rows (roll_no) where roll_no is not null;

-- The sequence of a table's numbers.
create function metered._numbers(of_table text) returns regclass
language plpgsql stable
as $$
begin
    return case of_table
        when 'holds' then pg_get_serial_sequence('metered.holds', 'no')
        when 'leases' then pg_get_serial_sequence('metered.leases', 'no')
        when 'lot_rows' then pg_get_serial_sequence('metered.lot_rows', 'no') end::regclass;
end
$$;

-- Whether a row has the number, or has set it aside.
create function metered._has_number(of_table text, number bigint) returns boolean
language plpgsql stable
as $$
begin
    return case of_table
        when 'holds' then exists (select from metered.holds h where h.no = number)
        when 'leases' then exists (select from metered.leases l where l.no = number)
        when 'lot_rows' then exists (select from metered.lot_rows r where r.no = number)
            or exists (select from metered.lot_rows r where r.roll_no = number) end;
end
$$;

-- The number after which the sequence must go on: the largest in use. Those of other cells, and of other nodes of Citus, do not count: each
-- has 2^40 numbers of its own.
create function metered._largest_number(of_table text) returns bigint
language plpgsql stable
as $$
declare
    low bigint := (select q.seqmin - 1 + coalesce((select c.no from metered.cell c where c.one), 0) * 1099511627776
        from pg_sequence q where q.seqrelid = metered._numbers(of_table));
    top bigint := low + 1099511627776;
begin
    return greatest(low, case of_table
        when 'holds' then (select max(h.no) from metered.holds h where h.no between low and top)
        when 'leases' then (select max(l.no) from metered.leases l where l.no between low and top)
        when 'lot_rows' then greatest((select max(r.no) from metered.lot_rows r where r.no between low and top),
            (select max(r.roll_no) from metered.lot_rows r where r.roll_no between low and top)) end);
end
$$;

-- Moves a sequence on, if it is behind its table. One caller does, and leaves out numbers that others may have drawn since it looked.
create function metered._raise_sequence(of_table text) returns void
language plpgsql volatile
as $$
declare
    largest bigint;
begin
    perform pg_advisory_xact_lock(metered._lock_key('metered/numbers/metered', convert_to(of_table, 'UTF8')));
    largest := metered._largest_number(of_table);
    if coalesce(pg_sequence_last_value(metered._numbers(of_table)), 0) < largest then
        perform setval(metered._numbers(of_table), largest + 1000);
    end if;
end
$$;

-- The next number of a table that is free.
create function metered._next_number(of_table text) returns bigint
language plpgsql volatile
as $$
declare
    number bigint;
begin
    loop
        number := nextval(metered._numbers(of_table));
        if not metered._has_number(of_table, number) then
            return number;
        end if;
        perform metered._raise_sequence(of_table);
    end loop;
end
$$;

-- The sequences that are behind their tables, with the last number that each gave. Stable: a row that it sees was numbered before it looks at
-- the sequence.
create function metered.numbers_behind(out of_table text, out last bigint, out largest bigint) returns setof record
language plpgsql stable
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set plan_cache_mode = force_generic_plan
as $$
begin
    for of_table in values ('holds'), ('leases'), ('lot_rows') loop
        largest := metered._largest_number(of_table);
        last := coalesce(pg_sequence_last_value(metered._numbers(of_table)), 0);
        if last < largest then
            return next;
        end if;
    end loop;
end
$$;

-- Moves all sequences on that are behind. A lot whose number for a rollover went to another lot meanwhile gets a new one.
create function metered._mend_numbers() returns void
language plpgsql volatile
as $$
declare
    taken bigint;
begin
    perform metered._raise_sequence(b.of_table) from metered.numbers_behind() b;
    for taken in
        select r.no from metered.lot_rows r join metered.lot_rows o on o.no = r.roll_no
        where r.roll_cap is not null and o.from_lot is distinct from r.no order by r.no for update of r
    loop
        update metered.lot_rows r set roll_no = metered._next_number('lot_rows') where r.no = taken;
    end loop;
end
$$;

-- The state of a scope without entries: everything 0, before all time.
create function metered._fresh(of_scope text) returns metered.ledger
language plpgsql immutable
as $$
declare
    entry metered.ledger;
begin
    entry.scope := of_scope;
    entry.seq := 0;
    entry.at := '-infinity';
    entry.spent := 0;
    entry.refunded := 0;
    entry.credited := 0;
    entry.held := 0;
    entry.epoch := 0;
    return entry;
end
$$;

-- The last entry of a scope, for a reader.
create function metered._last_entry(of_scope text) returns metered.ledger
language plpgsql stable
as $$
declare
    tip metered.ledger;
begin
    select * into tip from metered.ledger l where l.scope = of_scope order by l.seq desc limit 1;
    if not found then
        return metered._fresh(of_scope);
    end if;
    return tip;
end
$$;

-- Fails, for a writer whose view of a scope is stale, with a serialization failure,
-- which callers' retry loops retry.
create function metered._collided() returns void
language plpgsql
as $$
begin
    raise exception 'could not serialize access: the scope has a newer entry' using errcode = '40001';
end
$$;

-- The last entry of a scope, for a writer that holds the scope's lock. FOR KEY
-- SHARE closes the hole that a purge opens in the guard: it fails where an old
-- snapshot still sees an entry that is deleted by now, whose successor, deleted
-- too, would no longer collide. That holds for entry 1 as well, since a purge puts
-- a new copy of it in the old one's place. At READ COMMITTED deleted entries are
-- passed over instead, until none is left. Hence the second look.
create function metered._entry_for_write(of_scope text) returns metered.ledger
language plpgsql volatile
as $$
declare
    tip metered.ledger;
begin
    select * into tip from metered.ledger l
    where l.scope = of_scope order by l.seq desc limit 1 for key share;
    if not found then
        return metered._first_for_write(of_scope);
    elsif tip.tallied then
        return metered._fold(tip);
    end if;
    return tip;
end
$$;

-- The beginning of a scope, for a writer that found no last entry. If it has entries
-- after all, the writer has a stale view of it.
create function metered._first_for_write(of_scope text) returns metered.ledger
language plpgsql volatile
as $$
begin
    if exists (select from metered.ledger l where l.scope = of_scope) then
        perform metered._collided();
    end if;
    if exists (select from metered.cell c where c.one) then
        perform metered._refuse_moved(of_scope);
    end if;
    return metered._fresh(of_scope);
end
$$;

-- The last entry at or before moment in the chain whose last entry is tip_seq: seq 0
-- if the chain begins after moment, null if a purge took the answer away. Entries of an
-- earlier epoch count as made no later than the repair that ended it: that
-- follows from looking in the newest epoch first.
create function metered._base(of_scope text, tip_seq bigint, tip_epoch int, t timestamptz,
    out seq bigint, out spent bigint, out refunded bigint)
language plpgsql stable
as $$
begin
    for e in reverse tip_epoch..0 loop
        select base.seq, base.spent, base.refunded into _base.seq, _base.spent, _base.refunded
        from (select y.seq from metered.ledger y
                where y.scope = of_scope and y.epoch = e and y.at <= t and (y.seq & 15 = 1 or y.kind = 'k')
                order by y.at desc, y.seq desc limit 1) mark,
            lateral (select y.seq, y.spent, y.refunded from metered.ledger y
                where y.scope = of_scope and y.seq between mark.seq and mark.seq + 15 and y.epoch = e and y.at <= t
                order by y.seq desc limit 1) base;
        exit when found;
    end loop;
    if _base.seq > 1 then
        return;
    end if;
    -- A purge keeps entry 1 and then takes whole blocks of 16, entry 2 first.
    if tip_seq > 16 and not exists (select from metered.ledger l where l.scope = of_scope and l.seq = 2) then
        seq := null;
    elsif _base.seq is null then
        seq := 0;
        spent := 0;
        refunded := 0;
    end if;
end
$$;

-- Refunds of the charges after entry after_seq, in the chain that ends with
-- tip_seq.
create function metered._refunds_after(of_scope text, tip_seq bigint, after_seq bigint) returns bigint
language plpgsql stable
as $$
declare
    top int := 0;
begin
    while tip_seq >> (4 * top) > 15 loop
        top := top + 1;
    end loop;
    -- The aggregate inside lateral leaves the planner no join to choose.
    return (
        select coalesce(sum(x.amount), 0)
        -- A limit, or the planner expects a thousand levels, and compiles (jit).
        from (select generate_series(0, top) limit 16) g(lv),
             lateral (select sum(r.amount) as amount from metered.refund_sum r
              where r.scope = of_scope and r.level = lv
                and r.block > after_seq >> (4 * lv)
                and r.block <= (after_seq >> (4 * lv)) | 15) x);
end
$$;

-- The units that a scope, whose last entry is tip, was charged after since, less the refunds of these
-- charges (used), and the base from which they are counted.
create function metered._spent_since(tip metered.ledger, t timestamptz,
    out used bigint, out base_seq bigint, out base_spent bigint)
language plpgsql stable
as $$
declare
    base record;
begin
    base := metered._base(tip.scope, tip.seq, tip.epoch, t);
    if base.seq is null then
        raise exception 'the window reaches purged entries'
            using errcode = 'MT002', detail = tip.scope;
    end if;
    base_seq := base.seq;
    base_spent := base.spent;
    used := tip.spent - base.spent - case when base.refunded = tip.refunded then 0 else metered._refunds_after(tip.scope, tip.seq, base.seq) end;
end
$$;

-- Begins an entry after the scope's last one, under its lock.
create function metered._next_entry(of_scope text, key bigint, wait_ms int, origin metered.origin) returns metered.ledger
language plpgsql volatile
as $$
declare
    entry metered.ledger;
begin
    if not metered._fits_origin(origin) then
        perform metered._require(false, 'origin');
    end if;
    if key is null then
        key := metered._scope_key(of_scope);
    end if;
    perform metered._lock_keys(array[key], wait_ms);
    entry := metered._entry_for_write(of_scope);
    entry.seq := entry.seq + 1;
    entry.at := greatest(metered.clock(), entry.at);
    entry.ref := null;
    entry.hold := null;
    entry.operation_tenant := origin.tenant;
    entry.operation := origin.operation;
    entry.note := origin.note;
    return entry;
end
$$;

-- Refuses an amount that makes no entry.
create function metered._no_amount() returns void
language plpgsql
as $$
begin
    raise exception 'a charge is of 1 to 2^53 units of a scope of 1 to 255 bytes' using errcode = '23514';
end
$$;

-- others of an entry, or null if it is gone. In SQL it would be planned at each call.
create function metered._others(of_scope text, of_seq bigint) returns bigint
language plpgsql stable
as $$
begin
    return (select int8smaller(l.others, l.seq) from metered.ledger l where l.scope = of_scope and l.seq = of_seq);
end
$$;

-- The charges of a scope up to an entry, or up to none (0).
create function metered._charges_upto(of_scope text, of_seq bigint) returns bigint
language sql stable
as $$
    select of_seq - coalesce(metered._others(of_scope, of_seq), 0)
$$;

-- Appends an entry. entry.others is of the entry before. It is looked up in a wallet, whose calls append several, and after an
-- entry of version 1, whose calls may do so while the schema is upgraded.
-- ON CONFLICT, because callers' retry loops do not retry a unique violation.
create function metered._append(e metered.ledger) returns void
language plpgsql volatile
as $$
declare
    marked boolean;
begin
    if e.amount < 1 and e.kind not in ('k', 'z', 's') then
        perform metered._no_amount();
    end if;
    if e.lots_end is not null or e.others = 9223372036854775807 then
        e.others := metered._others(e.scope, e.seq - 1);
    end if;
    e.others := case when e.kind in ('c', 'u') then int8smaller(e.others, e.seq - 1)
        else coalesce(int8smaller(e.others, e.seq - 1), 0) + 1 end;
    insert into metered.ledger values (e.*) on conflict do nothing;
    if not found then
        perform metered._collided();
    elsif e.kind in ('d', 'r', 'l', 'u', 'x', 'k', 's') then
        marked := metered._mark_freed(e.scope);
    end if;
end
$$;

-- Adds credit to a scope: it counts for lifetimes, and for no window. refused, and nothing written,
-- if the scope must exist and does not (see admit). With raising that is SQLSTATE MT001 instead.
create function metered.credit(of_scope metered.scope_name, key bigint, units metered.amount, must_exist boolean, wait_ms int,
    origin metered.origin, raising boolean,
    out seq bigint, out at timestamptz, out refused jsonb)
language plpgsql volatile
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set plan_cache_mode = force_generic_plan
as $$
declare
    entry metered.ledger := metered._next_entry(of_scope, key, wait_ms, origin);
begin
    if wait_ms > 3600000
        or greatest(octet_length(origin.tenant), octet_length(origin.operation)) > 255
        or pg_column_size(origin.note) > 8196
        or pg_column_compression(origin.note) is not null and octet_length(origin.note::text) > 8192 then
        raise exception 'out of bounds: an argument of credit' using errcode = '22023';
    end if;
    perform metered._refuse_closed(entry);
    if must_exist then
        refused := metered._admit(row(of_scope, key, units, 0, null, null, true, null, null), null, false, wait_ms);
        if refused is not null then
            if raising then
                raise exception 'the scope does not exist' using errcode = 'MT001', detail = refused;
            end if;
            return;
        end if;
    end if;
    if entry.lots_end is null then
        entry := metered._after_minima(entry, wait_ms);
        entry.kind := 'd';
        entry.amount := units;
        entry.credited := entry.credited + units;
        entry.crossed := case when entry.crossed is not null then metered._rearmed(entry) end;
        perform metered._append(entry);
    else
        entry := (metered._credit_lot(entry, row(units, 'infinity', null, '', 0, null, null, null, null, null)::metered.new_lot, null, 'c', wait_ms)).entry;
    end if;
    seq := entry.seq;
    at := entry.at;
end
$$;

-- Refunds part of a charge, or all that is left of it (units is null). status is ok, or says why nothing was written:
-- missing (no such entry), purged, kind (the entry is no charge) or excess (more
-- than remains of the charge). remaining has the units that can still be refunded of it. With
-- raising, a refusal is SQLSTATE MT008 instead, its detail both as JSON.
create function metered.refund(of_scope metered.scope_name, key bigint, charge_seq bigint, units metered.units, wait_ms int,
    origin metered.origin, raising boolean,
    out status text, out remaining bigint, out seq bigint, out at timestamptz, out amount bigint)
language plpgsql volatile
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set plan_cache_mode = force_generic_plan
as $$
declare
    entry  metered.ledger := metered._next_entry(of_scope, key, wait_ms, origin);
    charge metered.ledger;
    stays  metered.ledger;  -- e, less the units that lapse at once
    fate   record;
    lapses bigint := 0;
begin
    if wait_ms > 3600000
        or greatest(octet_length(origin.tenant), octet_length(origin.operation)) > 255
        or pg_column_size(origin.note) > 8196
        or pg_column_compression(origin.note) is not null and octet_length(origin.note::text) > 8192 then
        raise exception 'out of bounds: an argument of refund' using errcode = '22023';
    end if;
    if not metered._key_fits(key, of_scope) or units = 0 then
        perform metered._require(false, 'refund');
    end if;
    perform metered._refuse_closed(entry);
    if charge_seq < 0 then
        charge_seq := metered._seq_of_tally(of_scope, charge_seq);
    end if;
    select * into charge from metered.ledger l where l.scope = of_scope and l.seq = charge_seq;
    if entry.seq <= charge_seq then
        status := 'missing';
    elsif charge.seq is null or charge_seq = 1 and entry.seq > 2
          and not exists (select from metered.ledger l where l.scope = of_scope and l.seq = 2) then
        -- Entry 1 outlives a purge, and the sum of its refunds does not.
        status := 'purged';
    elsif charge.kind not in ('c', 'u') then
        status := 'kind';
    else
        remaining := charge.amount - coalesce((select r.amount from metered.refund_sum r
            where r.scope = of_scope and r.level = 0 and r.block = charge_seq), 0);
        amount := coalesce(units, remaining);
        status := case when amount > remaining or remaining = 0 then 'excess' end;
    end if;
    if status is not null then
        if metered._one_snapshot() then
            entry.seq := entry.seq - 1;
            perform metered._refuse_stale(array[entry]);
        end if;
        if raising then
            raise exception 'the charge cannot be refunded' using errcode = 'MT008',
                detail = jsonb_build_object('status', status, 'remaining', remaining);
        end if;
        return;
    end if;
    entry := metered._after_minima(entry, wait_ms);
    entry := metered._after_due(entry, 0, wait_ms);
    entry.kind := 'r';
    entry.amount := refund.amount;
    entry.ref := charge_seq;
    entry.refunded := entry.refunded + refund.amount;
    if entry.lots_end is not null then
        fate := metered._refund_fate(entry);
        lapses := fate.lapses;
        entry.lots_end := least(entry.lots_end, fate.ends);
    end if;
    if entry.crossed is not null then
        stays := entry;
        stays.refunded := entry.refunded - lapses;
        entry.crossed := metered._rearmed(stays);
    end if;
    perform metered._append(entry);
    if entry.lots_end is not null then
        perform metered._refund_lots(entry);
    end if;
    insert into metered.refund_sum as r (scope, level, block, amount)
    select of_scope, lv, charge_seq >> (4 * lv), refund.amount
    from generate_series(0, 15) lv where lv = 0 or charge_seq >> (4 * lv) > 0
    on conflict (scope, level, block) do update set amount = r.amount + excluded.amount;
    remaining := remaining - refund.amount;
    status := 'ok';
    seq := entry.seq;
    at := entry.at;
end
$$;

-- Ends the freeze of a scope whose last entry is ahead of the clock, because the
-- clock was: appends an entry of a new epoch, at the clock's time. Entries before
-- it count as made no later than it. None leaves a window early, and no entry is
-- changed. Does nothing, and seq is null, if the scope is not ahead.
create function metered.repair_clock(of_scope text, key bigint, wait_ms int, note text,
    out seq bigint, out at timestamptz, out ahead interval)
language plpgsql volatile
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set plan_cache_mode = force_generic_plan
as $$
declare
    entry metered.ledger;
    clk   timestamptz;
begin
    if octet_length(of_scope) > 255
        or wait_ms > 3600000
        or octet_length(note) > 8192 then
        raise exception 'out of bounds: an argument of repair_clock' using errcode = '22023';
    end if;
    perform metered._require(metered._key_fits(key, of_scope), 'key');
    entry := metered._next_entry(of_scope, key, wait_ms, row(null, null, nullif(note, '')::jsonb));
    clk := metered.clock();
    ahead := greatest(entry.at - clk, interval '0');
    if entry.at <= clk then
        return;
    elsif metered._lags(entry) then  -- by the clock that was wrong, all of them have ended
        entry.seq := entry.seq - 1;
        entry := metered._settle(entry, clk, null, 0, wait_ms);
        delete from metered.lot_holds k where k.scope = of_scope and k.seq = 0;
        entry.seq := entry.seq + 1;
        entry.note := nullif(note, '')::jsonb;
    end if;
    if entry.tallied then   -- in an epoch of earlier times, the number of one could come twice
        entry.seq := entry.seq - 1;
        entry := metered._end_tallies(entry, wait_ms);
        entry.seq := entry.seq + 1;
    end if;
    if entry.crossed is not null then
        entry.crossed := metered._reported_after_repair(metered._last_entry(of_scope), clk);
    end if;
    entry.kind := 'k';
    entry.amount := 0;
    entry.epoch := entry.epoch + 1;
    entry.at := clk;
    entry.anchor_at := null;        -- it is of the clock before
    entry.anchor_spent := null;
    entry.lots_end := case when entry.lots_end is not null then metered._next_end(of_scope, clk) end;    -- lots that are held may end again
    perform metered._append(entry);
    seq := entry.seq;
    at := entry.at;
end
$$;

-- Charges without limits of a busy scope, such as the total of a channel that all users share. They do not queue: each is a row of its own
-- (a tally), written without the scope's lock, and whoever has that lock next folds all rows that it sees into the chain.
--
-- A scope has tallies from the charge on that had to wait for its lock (tallied in its entries). So a writer learns from the last entry, which it
-- reads anyway, whether it has to look for rows. A row that it does not see was committed after it looked, and is charged after it.
--
-- What nothing may be charged to without the lock (a wallet, a closed scope, a scope that is forgotten) takes the tallies' lock,
-- exclusively, and folds once more: _end_tallies. A tally has it shared. See ADR 26.

-- The key of the lock that ends the tallies of a scope.
create function metered._tally_key(of_scope text) returns bigint
language sql stable
as $$
    select metered._lock_key('metered/tally/metered', convert_to(of_scope, 'UTF8'))
$$;

-- Folds the tallies of a scope, which is locked, into its chain, whose last entry is tip, and returns the last entry then. Each row
-- becomes an entry, in the order of their times, but no earlier than the entry before it, nor than its own time, even if the clock was
-- set back: else a later tally could get that time again, and with it the number.
create function metered._fold(tip metered.ledger) returns metered.ledger
language plpgsql volatile
as $$
declare
    rows_  bigint;
    made   bigint;
    folded metered.ledger := tip;
begin
    with gone as (
        delete from metered.tallies x where x.scope = tip.scope returning x.*
    ), placed as (
        select g.*, row_number() over w as nth, (sum(g.amount) over w)::bigint as sum
        from gone g window w as (order by g.at)
    ), entries as (
        insert into metered.ledger (seq, amount, at, spent, refunded, credited, held, epoch, kind, scope, next_due, hold, operation_tenant, operation, note, anchor_at, anchor_spent, lots_end, crossed, tallied, others, ref)
        select tip.seq + p.nth, p.amount, greatest(tip.at, p.at), tip.spent + p.sum, tip.refunded, tip.credited, tip.held, tip.epoch, 'c', tip.scope, tip.next_due, p.hold, p.operation_tenant, p.operation, p.note, tip.anchor_at, tip.anchor_spent, tip.lots_end, tip.crossed, tip.tallied, int8smaller(tip.others, tip.seq), metered._in_us(p.at)
        from placed p
        on conflict do nothing
        returning seq
    )
    select (select count(*) from gone), (select count(*) from entries) into rows_, made;
    if made < rows_ then
        perform metered._collided();
    elsif made > 0 then
        select * into folded from metered.ledger l where l.scope = tip.scope and l.seq = tip.seq + made;
    end if;
    return folded;
end
$$;

-- The units of a scope's tallies that count after a time, or of all of them (null), for a reader, and how many they are.
create function metered._tallied_units(tip metered.ledger, since timestamptz, out units bigint, out charges bigint)
language sql stable
as $$
    select coalesce(sum(x.amount), 0)::bigint, count(*) from metered.tallies x
    where x.scope = tip.scope and (since is null or tip.at > since or x.at > since)
$$;

-- Writes a charge without limits as a tally, if its scope has them, and returns its time, which no other one of the scope has, or null.
-- It waits for nobody: a time is the writer's own by a lock, and where the chain is ahead of the clock, the next one is looked for.
create function metered._tally(charge metered.new_charge, origin metered.origin, of_hold text) returns timestamptz
language plpgsql volatile
as $$
declare
    t_lock bigint := metered._tally_key(charge.scope);
    made   timestamptz;
begin
    if (charge.amount between 1 and 1099511627776 and coalesce(pg_column_size(charge.note) <= 8192
            and pg_column_compression(charge.note) is null and not charge.note ? 'use', true) and charge.held = 0 and charge.must_exist is not true and charge.lease is null
        and pg_try_advisory_xact_lock_shared(t_lock)) is not true then
        return null;
    end if;
    insert into metered.tallies as y (at, amount, scope, operation_tenant, operation, hold, note)
            select t.clk, charge.amount, charge.scope, origin.tenant, origin.operation, of_hold, charge.note
            from (select l.at, l.spent, l.tallied, l.lots_end, l.next_due, metered.clock() as clk
                from metered.ledger l where l.scope = charge.scope order by l.seq desc limit 1) t
            where t.tallied and t.lots_end is null and t.next_due is distinct from '-infinity'
            and t.spent < 4611686018427387904
            and (t.next_due <= t.clk and metered._minimum_is_due(charge.scope, t.next_due, t.clk)) is not true and t.at < t.clk and pg_try_advisory_xact_lock(t_lock # metered._in_us(t.clk))
            on conflict do nothing
            returning y.at into made;
    if made is not null or not exists (
        select from (select * from metered.ledger l where l.scope = charge.scope order by l.seq desc limit 1) t
        where t.tallied and t.lots_end is null and t.next_due is distinct from '-infinity'
            and t.spent < 4611686018427387904
            and (t.next_due <= metered.clock() and metered._minimum_is_due(charge.scope, t.next_due, metered.clock())) is not true) then
        return made;
    end if;
    for nth in 1..100 loop
        insert into metered.tallies as y (at, amount, scope, operation_tenant, operation, hold, note)
        select x.at, charge.amount, charge.scope, origin.tenant, origin.operation, of_hold, charge.note
        from (
            select nth * interval '1 microsecond' + greatest(metered.clock(), t.at,
                (select y.at from metered.tallies y where y.scope = charge.scope order by y.at desc limit 1)) as at
            from (select * from metered.ledger l where l.scope = charge.scope order by l.seq desc limit 1) t
            where t.tallied and t.lots_end is null and t.next_due is distinct from '-infinity'
            and t.spent < 4611686018427387904
            and (t.next_due <= metered.clock() and metered._minimum_is_due(charge.scope, t.next_due, metered.clock())) is not true) x
        where pg_try_advisory_xact_lock(t_lock # metered._in_us(x.at))
        on conflict do nothing
        returning y.at into made;
        exit when made is not null;
    end loop;
    return made;
end
$$;

-- _write_charges, where some charges were written as tallies, at these times: makes the others, or takes the tallies back. The seq of
-- a tally is its time in microseconds, less than 0. One in 32 also folds, if nobody has the scope's lock.
create function metered._write_others(charges metered.new_charge[], tallies timestamptz[], ahead interval, wait_ms int,
    origin metered.origin, mode text, hold metered.hold_terms, standing boolean) returns metered.charged
language plpgsql volatile
as $$
declare
    others    metered.new_charge[] := '{}';
    posted    metered.charged;
    answer    metered.charged;
    nth_other int := 0;
begin
    for i in 1..cardinality(charges) loop
        if tallies[i] is null then
            others := others || charges[i];
        end if;
    end loop;
    if others <> '{}' then
        posted := metered._write_charges(others, ahead, wait_ms, origin, mode, hold, standing);
        answer := posted;
        if posted.refused is not null then
            for i in 1..cardinality(charges) loop
                delete from metered.tallies y where y.scope = charges[i].scope and y.at = tallies[i];
            end loop;
            return answer;
        end if;
    end if;
    for i in 1..cardinality(charges) loop
        if tallies[i] is not null then
            answer.ats[i] := tallies[i];
            answer.seqs[i] := -metered._in_us(tallies[i]);
            answer.held[i] := 0;
            answer.at := coalesce(answer.at, tallies[i]);
            if answer.seqs[i] & 31 = 0 and metered._try_lock(metered._scope_key(charges[i].scope)) then
                perform metered._entry_for_write(charges[i].scope);
            end if;
        else
            nth_other := nth_other + 1;
            answer.ats[i] := posted.ats[nth_other];
            answer.seqs[i] := posted.seqs[nth_other];
            answer.held[i] := coalesce(posted.held[nth_other], 0);
        end if;
    end loop;
    return answer;
end
$$;

-- Ends the tallies of a scope that is locked, and waits as long for those that are on their way: no transaction writes one from here on. entry is its last entry, as far as the caller knows it,
-- which gets the number, the time and the spent units of the last one.
create function metered._end_tallies(entry metered.ledger, wait_ms int) returns metered.ledger
language plpgsql volatile
as $$
declare
    last   metered.ledger;
    waited boolean;
begin
    -- An old snapshot does not see the tallies that the lock waited for.
    if metered._one_snapshot() then
        raise exception 'a scope with tallies becomes a wallet, is closed, or has its clock repaired, at READ COMMITTED' using errcode = '25001';
    end if;
    waited := metered._lock_keys(array[metered._tally_key(entry.scope)], wait_ms);
    last := metered._entry_for_write(entry.scope);
    entry.seq := last.seq;
    entry.at := greatest(entry.at, last.at);
    entry.spent := last.spent;
    entry.others := last.others;
    entry.tallied := null;
    return entry;
end
$$;

-- Keeps tallies out of scopes that are locked, until the transaction ends, and folds those that there are: for a caller to whom nothing
-- of the past may be missing.
create function metered._without_tallies(scopes text[], wait_ms int) returns void
language plpgsql volatile
as $$
declare
    busy   text[] := metered._tallied_of(scopes);
begin
    if busy <> '{}' then
        perform metered._lock_keys(array(select metered._tally_key(b) as key from unnest(busy) b order by 1), wait_ms);
        perform metered._fold_of(busy);
    end if;
end
$$;

-- Those of the scopes that have tallies.
create function metered._tallied_of(scopes text[]) returns text[]
language plpgsql stable
as $$
begin
    return array(select s.scope from unnest(scopes) s(scope),
        lateral (select l.tallied from metered.ledger l where l.scope = s.scope order by l.seq desc limit 1) t where t.tallied);
end
$$;

-- Folds the tallies of those of the scopes that have some. They are locked.
create function metered._fold_of(scopes text[]) returns void
language plpgsql volatile
as $$
declare
    folded text;
begin
    foreach folded in array metered._tallied_of(scopes) loop
        perform metered._entry_for_write(folded);
    end loop;
end
$$;

-- Folds the tallies of scopes whose locks are free, of up to 100 scopes.
create function metered._fold_all() returns void
language plpgsql volatile
as $$
declare
    last_scope text := '';
begin
    for nth in 1..100 loop
        select x.scope into last_scope from metered.tallies x where x.scope > last_scope order by x.scope limit 1;
        exit when not found;
        if metered._try_lock(metered._scope_key(last_scope)) then
            perform metered._entry_for_write(last_scope);
        end if;
    end loop;
end
$$;

-- The keys of locks that a command takes first, with those of the scopes of its charges without limits, unless these are tallies.
create function metered.with_sums(keys bigint[], scopes text[]) returns bigint[]
language plpgsql volatile
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set plan_cache_mode = force_generic_plan
as $$
begin
    if array_lower(keys, 1) <> 1
        or array_ndims(keys) <> 1
        or array_position(keys, null) is not null
        or cardinality(keys) > 10000
        or array_lower(scopes, 1) <> 1
        or array_ndims(scopes) <> 1
        or array_position(scopes, null) is not null
        or cardinality(scopes) > 10000
        or pg_column_size(scopes) > 255 and not metered._fits(scopes, 255) then
        raise exception 'out of bounds: an argument of with_sums' using errcode = '22023';
    end if;
    return array(select distinct k.key from (
        select unnest(keys) as key
        union all
        select metered._scope_key(s.scope) from unnest(scopes) s(scope)
        where metered._one_snapshot() or metered._sharded() or (
            select l.tallied and l.lots_end is null and l.next_due is distinct from '-infinity'
            and l.spent < 4611686018427387904
            and (l.next_due <= metered.clock() and metered._minimum_is_due(s.scope, l.next_due, metered.clock())) is not true
            from metered.ledger l where l.scope = s.scope order by l.seq desc limit 1) is not true) k order by 1);
end
$$;

-- The units of a scope's tallies that count before each of the times, which ascend (see usage_before), or how many they are.
create function metered._tallies_before(tip metered.ledger, times timestamptz[], counting boolean) returns bigint[]
language plpgsql stable
as $$
declare
    units bigint[] := array_fill(0::bigint, array[cardinality(times)]);
    total bigint := 0;
    tally record;
begin
    for tally in
        select width_bucket(greatest(x.at, tip.at), times) as nth, sum(case when counting then 1 else x.amount end)::bigint as amount
        from metered.tallies x where x.scope = tip.scope group by 1
    loop
        if tally.nth < cardinality(times) then
            units[tally.nth + 1] := tally.amount;
        end if;
    end loop;
    for i in 1..cardinality(times) loop
        total := total + units[i];
        units[i] := total;
    end loop;
    return units;
end
$$;

-- The entry of a tally that was folded, or null. It is no earlier than the tally. A scope has tallies in its first epoch only.
create function metered._seq_of_tally(of_scope text, named bigint) returns bigint
language plpgsql stable
as $$
declare
    before timestamptz;
begin
    if named < -9007199254740992 then   -- no clock shows that time
        return null;
    end if;
    before := timestamptz 'epoch' - (named + 1) * interval '1 microsecond';
    return (select l.seq from metered.ledger l
        where l.scope = of_scope and l.epoch = 0 and l.kind = 'c' and l.ref = -named
            and l.seq > coalesce((select base.seq from (select y.seq from metered.ledger y
                where y.scope = of_scope and y.epoch = 0 and y.at <= before and (y.seq & 15 = 1 or y.kind = 'k')
                order by y.at desc, y.seq desc limit 1) mark,
            lateral (select y.seq, y.spent, y.refunded from metered.ledger y
                where y.scope = of_scope and y.seq between mark.seq and mark.seq + 15 and y.epoch = 0 and y.at <= before
                order by y.seq desc limit 1) base), 0)
        order by l.seq limit 1);
end
$$;

-- Purges of entries, and what the feed (feed.sql) needs of them.

-- Deletes entries of one scope that no window ending at or after cutoff needs,
-- at most max_rows of them, beginning after entry after_seq. Entry 1 stays, so that
-- a writer that sees the scope as empty collides with it. It is a new row, so that a writer that
-- sees it as the last entry collides, too (_entry_for_write). The entries after it begin at a multiple of
-- 16, plus one, which the time index holds.
-- upto is the last seq deleted or passed over, for the next call to begin after:
-- scanning from the front again would wade through the rows deleted before.
--
-- With forgetting, nothing stays of a scope whose last entry is that old, if it has no
-- credit (or is a child that was closed, and whose lease was purged: until then it stays closed), no debt of a wallet,
-- no open hold and no claim that stands, which do not age. A writer whose
-- snapshot shows the scope as empty is right again, and one whose snapshot shows an
-- entry finds it deleted. One without the lock may have read the last entry and be about
-- to append: the deletion waits for it, and then this function appends and deletes an
-- entry itself, which collides with that writer's.
create function metered.purge_scope(of_scope text, key bigint, cutoff timestamptz, after_seq bigint, max_rows int, wait_ms int, forgetting boolean,
    out deleted bigint, out upto bigint, out done boolean, out forgotten boolean)
language plpgsql volatile
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set plan_cache_mode = force_generic_plan
as $$
declare
    tip   metered.ledger;
    first metered.ledger;
    keep  bigint;   -- the first entry to stay
    needed bigint;  -- the first entry that the feed needs, or null
    rest  bigint;
begin
    if octet_length(of_scope) > 255
        or max_rows > 100000
        or wait_ms > 3600000 then
        raise exception 'out of bounds: an argument of purge_scope' using errcode = '22023';
    end if;
    perform metered._require(metered._key_fits(key, of_scope), 'key');
    perform metered._require(after_seq >= 0 and max_rows between 16 and 100000 and wait_ms > 0 and cutoff is not null and forgetting is not null, 'purge_scope');
    -- A purge takes a prefix of the chain: entries before after_seq are gone, or the scope was
    -- forgotten meanwhile, and has begun anew.
    if exists (select from metered.ledger l where l.scope = of_scope and l.seq in (2, after_seq) and l.seq <= after_seq and l.seq > 1) then
        after_seq := 0;
    end if;
    cutoff := least(cutoff, metered.clock());
    perform metered._lock_keys(array[key], wait_ms);
    tip := metered._last_entry(of_scope);
    if tip.tallied then
        -- An old snapshot would not see a tally that is about to be committed.
        forgetting := forgetting and not metered._one_snapshot() and metered._try_lock(metered._tally_key(of_scope));
        tip := metered._entry_for_write(of_scope);
    end if;
    forgotten := false;
    keep := coalesce((metered._base(of_scope, tip.seq, tip.epoch, cutoff)).seq, 0);
    -- Entries that go without a number get none meanwhile.
    perform from metered.feed_state s
    where s.one and s.since is not null and tip.at <= cutoff - interval '7 days' and tip.seq > (
        select coalesce(max(y.seq), 0) from metered.feed_scopes y where y.scope = of_scope)
    for update of s;
    needed := metered._feed_needs(tip, cutoff);
    keep := greatest(1, ((least(keep, needed) - 1) & ~15) + 1);
    upto := greatest(after_seq, 1);
    done := keep - 1 <= upto + max_rows;
    if not done then
        keep := ((upto + max_rows) & ~15) + 1;
    end if;
    delete from metered.ledger l where l.scope = of_scope and l.seq > upto and l.seq < keep;
    get diagnostics deleted = row_count;
    if deleted > 0 then
        perform metered._purge_feed(of_scope, keep);
        delete from metered.ledger l where l.scope = of_scope and l.seq = 1 returning l.* into first;
        insert into metered.ledger values (first.*) on conflict do nothing;
        if not found then
            perform metered._collided();
        end if;
        perform metered._mark_freed(of_scope);
    end if;
    for lv in 0..15 loop
        exit when keep >> (4 * lv) = 0;
        delete from metered.refund_sum r
        where r.scope = of_scope and r.level = lv
          and r.block >= upto >> (4 * lv) and r.block < keep >> (4 * lv);
    end loop;
    if tip.lots_end is not null and keep > 1 then
        perform metered._purge_lots(of_scope, upto, keep);
        perform metered._purge_changes(of_scope, keep);
    end if;
    upto := greatest(upto, keep - 1);
    if forgetting and done and needed is null and tip.seq > 0 and tip.at <= cutoff and tip.held = 0 and (tip.credited = 0 or tip.next_due = '-infinity')
        and (tip.lots_end is null or metered._debt(tip) = 0) and not exists (
        select from metered.leases y where y.child = of_scope and y.mode <> 'r'
        and (y.settled_at is null or tip.next_due = '-infinity')) and not exists (
        select from metered.lot_rows l where l.scope = of_scope and (l.untold > 0 or l.pending > 0 or l.keeps)) and not exists (
        select from metered.holds h where h.claim = of_scope and (h.state = 'h' or h.state = 'c' and not h.returned)) then
        delete from metered.ledger l where l.scope = of_scope and l.seq <= tip.seq;
        get diagnostics rest = row_count;
        deleted := deleted + rest;
        delete from metered.refund_sum r where r.scope = of_scope;
        delete from metered.lot_moves m where m.scope = of_scope;
        delete from metered.lot_rows l where l.scope = of_scope;
        delete from metered.plan_changes c where c.scope = of_scope;
        perform metered._purge_feed(of_scope, tip.seq + 1);
        delete from metered.feed_scopes y where y.scope = of_scope;
        tip.seq := tip.seq + 1;
        perform metered._append(tip);
        delete from metered.ledger l where l.scope = of_scope and l.seq = tip.seq;
        forgotten := true;
    end if;
end
$$;

-- The first entry of a scope, whose last one is tip, that a purge up to cutoff has to keep for the feed: one that has no number, or that a
-- consumer has not consumed, unless it is older than cutoff by the consumer's patience. Null: none. What has no number waits for 7 days.
create function metered._feed_needs(tip metered.ledger, cutoff timestamptz) returns bigint
language plpgsql stable
as $$
declare
    reader record;
    done   bigint;      -- the last numbered entry
    unread bigint;
    needed bigint;
begin
    if not exists (select from metered.feed_state s where s.one and s.since is not null) then
        return null;
    end if;
    select coalesce(max(y.seq), 0) into done
    from metered.feed_scopes y where y.scope = tip.scope;
    for reader in
        select c.no, c.patience from metered.feed_consumers c
        union all
        select null, interval '7 days'
    loop
        unread := done + 1;
        if reader.no is not null then
            select least(unread, f.seq + 1 - least(f.entries, f.no - reader.no)) into unread
            from (values (1)) one left join lateral (
                select x.seq, x.entries, x.no from metered.feed x
                where x.scope = tip.scope and x.no > reader.no order by x.no limit 1) f on true;
        end if;
        continue when unread > tip.seq or tip.at <= cutoff - reader.patience;
        needed := least(needed, greatest(unread,
            coalesce((metered._base(tip.scope, tip.seq, tip.epoch,
                cutoff - reader.patience)).seq, 0)));
    end loop;
    return needed;
end
$$;

-- The first entry of a scope that a purge of entries up to cutoff would keep for the feed, or null.
create function metered.feed_keeps(of_scope text, cutoff timestamptz) returns bigint
language plpgsql stable
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set plan_cache_mode = force_generic_plan
as $$
begin
    if octet_length(of_scope) > 255 then
        raise exception 'out of bounds: an argument of feed_keeps' using errcode = '22023';
    end if;
    perform metered._require(cutoff is not null, 'feed_keeps');
    return metered._feed_needs(metered._last_entry(of_scope), cutoff);
end
$$;

-- Notes that the entries of a scope before keep are deleted: the feed is whole from behind them on.
create function metered._purge_feed(of_scope text, keep bigint) returns void
language plpgsql volatile
as $$
declare
    gone bigint;    -- the number of the entry before keep
begin
    select case when f.seq - f.entries < keep - 1 then f.no - f.seq + keep - 1 end into gone
    from metered.feed f where f.scope = of_scope and f.seq >= keep - 1 order by f.no limit 1;
    if gone is null then
        select max(f.no) into gone from metered.feed f where f.scope = of_scope and f.seq < keep;
    end if;
    if gone is not null then
        insert into metered.feed_purged (no)
        select gone where gone > coalesce((select max(p.no) from metered.feed_purged p), 0)
        on conflict do nothing;
        delete from metered.feed f where f.scope = of_scope and f.seq < keep;
    end if;
end
$$;

-- Wallets: scopes whose credit is in lots. Its last entry has its balance, as of any scope: credited - spent +
-- refunded - held units are left. If that is 0 or more, it is the sum of the rests of its lots. If it is less, no lot has a rest, and
-- the missing units are overdraft, which the next credit pays back.
--
-- A lot that pays for some uses has its units as kept, which are no credit of the ledger: see uses.sql.
--
-- An entry of a wallet has lots_end, before which none of its lots ends that has a rest or is held. A call that spends, holds or
-- credits judges, writes the ends that are due (duelots.sql), writes the entry, and then names its lots. The
-- entry comes first: the guard lets one writer make it, so lots need no lock of their own.

-- Lots: the credit of a wallet, in parts that end. The wallet's balance is in its ledger, as of any scope. This says where
-- it is from. amount = rest + drawn + held + lapsed + revoked + rolled + pending + kept.
create view metered.lots as
select r.no,                                    -- the number of the lot
    r.granted_at,                               -- when it was granted
    r.expires_at,                               -- nothing is drawn of it from here on, or infinity: it never ends
    r.granted_seq,                              -- the entry that credited it
    coalesce(m.seq, r.last_seq) as last_seq,    -- the last entry that moved units of it
    r.amount,                                   -- units that it was granted with
    coalesce(m.rest, r.rest) as rest,           -- units of amount that can be drawn
    coalesce(m.drawn, r.drawn) as drawn,        -- units of amount that were spent, less refunds
    coalesce(m.held, r.held) as held,           -- units of amount in open holds and leases
    r.lapsed,                                   -- units of amount that were left at its end, or refunded later
    r.revoked,                                  -- units of amount that were taken back
    r.rolled,                                   -- units of amount that rolled over into another lot
    r.untold,                                   -- units of lapsed that no subscriber has heard of yet
    r.roll_cap,                                 -- units that roll over at its end at most, or null: none
    r.roll_no,                                  -- the number that one will have
    r.roll_end,                                 -- when that lot ends, or infinity: never
    r.late,                                     -- how long units last that are refunded after its end: 0 for ever, null not at all
    r.from_lot,                                 -- the lot that its units were in before
    r.priority,                                 -- a lot of a lower priority is drawn first
    r.origin,                                   -- g granted, c credited without a grant, r rolled over, l given back late
    r.open,                                     -- something can be drawn of it for anything, but for its end
    r.scope,                                    -- the wallet
    r.category,                                 -- of the caller: paid, promotional
    r.reference,                                -- of the caller, once in a wallet
    r.fingerprint,                              -- of the grant under the reference: a version byte and a SHA-256
    r.pending,                                  -- units of amount that nobody can draw before starts_at
    r.starts_at,                                -- when it begins, or began, or null: with the grant
    r.again,                                    -- its units roll over again, or share a cap: no call leaves its end to a later one
    r.plan,                                     -- how it renews and rolls over, and what it pays for, or null
    coalesce(m.kept, r.kept) as kept,           -- units of amount that pay for the uses of its plan alone. The ledger has them when a use takes them
    r.keeps,                                    -- something can be drawn of it for its uses, but for its end
    m.version,                                  -- of its newest move, or null: none has its units
    r.age                                       -- when its units were granted first, in microseconds, the entry of that grant, and its own: the oldest is drawn first
from metered.lot_rows r left join lateral (
    select x.seq, x.version, x.rest, x.drawn, x.held, x.kept from metered.lot_moves x
    where x.lot = r.no and x.version is not null order by x.version desc limit 1) m on true;

-- A call of 0.1.0 that waited for its wallet while the upgrade was committed writes to the table that had this name. It runs again.
create function metered._meet_upgrade() returns trigger
language plpgsql volatile
as $$
begin
    raise exception 'the schema was upgraded while the call waited' using errcode = '40001';
end
$$;

create trigger lots_of_before instead of insert or update or delete on metered.lots for each row execute function metered._meet_upgrade();

-- Writes a move of a lot of a wallet (_moved). Of overdraft (lot 0) it writes the move alone.
create function metered._move_lot(of_scope text, at_seq bigint, nth int, of_lot bigint,
    as_kind "char", units bigint, rest bigint, kept bigint) returns void
language plpgsql volatile
as $$
declare
    its_lot metered.lots;
    moving  record;
begin
    select * into its_lot from metered.lots y where y.no = of_lot and of_lot > 0;
    moving := metered._moved(its_lot, of_scope, at_seq, nth, as_kind, units, rest, kept);
    perform metered._write_moves(of_scope, array[moving.move], array[moving.lot], null);
end
$$;

-- The balance of a wallet, by its last entry. Inlined wherever it stands.
create function metered._balance(t metered.ledger) returns bigint
language sql immutable
as $$
    select t.credited - t.spent + t.refunded - t.held
$$;

-- Whether a time is later by that, or the same if it is 0: none of its parts is negative, as in a month less 30 days. Inlined
-- wherever it stands.
create function metered._goes_on(for_so_long interval) returns boolean
language sql immutable
as $$
    select for_so_long between interval '0' and interval '36525 days' and least(extract(year from for_so_long), extract(month from for_so_long),
        extract(day from for_so_long), extract(hour from for_so_long), extract(minute from for_so_long), extract(second from for_so_long)) >= 0
$$;

-- The units of a lot that roll over at its end. Inlined wherever it stands.
create function metered._rolls(l metered.lots) returns bigint
language sql stable
as $$
    select case when l.roll_cap is not null then least(l.rest + l.kept, l.roll_cap) else 0 end
$$;

-- Whether the end of a lot with that plan depends on other lots, or makes a lot that ends in turn. No call leaves such an end to a later one.
create function metered._again(plan metered.lot_plan) returns boolean
language sql immutable
as $$
    select coalesce(plan.roll_again <> 0, false) or coalesce(plan.roll_shared, false)
$$;

-- The plan of a lot that takes over units of another one.
create function metered._plan_on(lot metered.lots) returns metered.lot_plan
language plpgsql stable
as $$
declare
    plan metered.lot_plan := lot.plan;
begin
    plan.renews := null;
    plan.renew_amount := null;
    plan.of_reference := coalesce(lot.reference, plan.of_reference);
    if plan.roll_again > 0 then
        plan.roll_again := plan.roll_again - 1;
    end if;
    return case when plan is not distinct from row(null, null, null, null, null, null, null, null, null)::metered.lot_plan then null else plan end;
end
$$;

-- The end of the lot into which one rolls over that ends at ends.
create function metered._roll_end(ends timestamptz, plan metered.lot_plan, roll_for interval) returns timestamptz
language plpgsql stable
as $$
begin
    if ends = 'infinity' then     -- it does not end, so nothing rolls over
        return ends;
    elsif (plan.roll_to).every is not null then
        return (metered._period_at(plan.roll_to, ends))[2];
    end if;
    return case when roll_for = interval '0' then 'infinity' else ends + roll_for end;
end
$$;

-- Takes up to so many units of the lots of a wallet, in their order, as the entry at_seq does: for
-- a charge (t), or for a hold (h). nth is the number of its next move. ended is null, or the time
-- of an entry that lags: lots that ended by then are passed over. With use, lots for it pay too, as
-- far as their units were applied.
create function metered._take_lots(of_scope text, at_seq bigint, units bigint, as_kind "char",
    ended timestamptz, use text, inout nth int, out taken bigint)
language plpgsql volatile
as $$
declare
    its_lot      record;
    next_for_use record;                       -- the next one for the use
    passed       record;
    part         bigint;
    at           timestamptz := (select e.at from metered.ledger e where use is not null and e.scope = of_scope and e.seq = at_seq);
    first        int := -2147483648;           -- where the next lot is: after the last one, whose index entry is still in the way
    ends         timestamptz := '-infinity';
    after        bigint[] := '{}';
begin
    taken := 0;
    while taken < units loop
        if use is not null then
            select y.no, y.priority, y.expires_at, y.age, y.version, y.rest, y.drawn, y.held, y.kept into next_for_use from metered.lots y
            where y.scope = of_scope and y.keeps and (y.priority, y.expires_at, y.age) > (first, ends, after)
              and y.expires_at > at and (y.plan).uses @> array[use]
            order by y.priority, y.expires_at, y.age limit 1;
        end if;
        if ended is not null then
            passed := metered._pass_ended(of_scope, first, ends, after, ended);
            first := passed.priority;
            ends := passed.ends;
            after := passed.after;
        end if;
        select y.no, y.priority, y.expires_at, y.age, y.version, y.rest, y.drawn, y.held, y.kept into its_lot from metered.lots y
        where y.scope = of_scope and y.open and (y.priority, y.expires_at, y.age) > (first, ends, after)
        order by y.priority, y.expires_at, y.age limit 1;
        if use is not null then
            if next_for_use.rest > 0 and (its_lot.no is null or (next_for_use.priority, next_for_use.expires_at, next_for_use.age) < (its_lot.priority, its_lot.expires_at, its_lot.age)) then
                its_lot := next_for_use;
            end if;
        end if;
        exit when its_lot.no is null;
        part := least(its_lot.rest, units - taken);
        insert into metered.lot_moves (scope, seq, nth, lot, kind, amount, version, rest, drawn, held, kept)
        values (of_scope, at_seq, nth, its_lot.no, as_kind, part, coalesce(its_lot.version, 0) + 1,
            its_lot.rest - part,
            its_lot.drawn + case when as_kind = 't' then part else 0 end,
            its_lot.held + case when as_kind = 'h' then part else 0 end, its_lot.kept);
        if part = its_lot.rest + its_lot.kept then
            update metered.lot_rows y set open = false, keeps = false where y.no = its_lot.no;
        end if;
        if as_kind = 'h' then
            insert into metered.lot_holds (scope, seq, lot, amount)
            values (of_scope, at_seq, its_lot.no, part);
        end if;
        taken := taken + part;
        nth := nth + 1;
        first := its_lot.priority;
        ends := its_lot.expires_at;
        after := its_lot.age;
    end loop;
end
$$;

-- The place in the order of lots before the next one that has not ended: null if all have. It reads two of each priority.
create function metered._pass_ended(of_scope text, from_priority int, from_end timestamptz, from_age bigint[], ended timestamptz,
    out priority int, out ends timestamptz, out after bigint[])
language plpgsql stable
as $$
begin
    priority := from_priority;
    ends := greatest(from_end, ended);
    after := case when from_end > ended then from_age else array[9223372036854775807] end;
    loop
        perform from metered.lot_rows y where y.scope = of_scope and y.open and y.priority = _pass_ended.priority and (y.expires_at, y.age) > (ends, after)
        order by y.priority, y.expires_at, y.age limit 1;
        exit when found;
        priority := (select y.priority from metered.lot_rows y where y.scope = of_scope and y.open and y.priority > _pass_ended.priority
            order by y.priority, y.expires_at, y.age limit 1);
        exit when priority is null;
        ends := ended;
        after := array[9223372036854775807];
    end loop;
end
$$;

-- Says of which lots the units of an entry are that was just written: of a charge (t), or of a hold (h). before is
-- the balance before it, and units beyond it are overdraft. It is null if the wallet lags: then the rests of its lots decide. use is null, or a use
-- to which units of lots were applied.
create function metered._use_lots(of_scope text, at_seq bigint, units bigint, before bigint, as_kind "char", use text) returns void
language plpgsql volatile
as $$
declare
    covered bigint := greatest(0, least(units, before));
    ended   timestamptz;
    got     record;
begin
    if before is null then
        ended := (select e.at from metered.ledger e where e.scope = of_scope and e.seq = at_seq);
    end if;
    got := metered._take_lots(of_scope, at_seq, units, as_kind, ended, use, 1);
    if before is not null and got.taken < covered then
        raise exception 'the lots of a wallet do not add up to its balance' using errcode = 'XX001', detail = of_scope;
    end if;
    covered := got.taken;   -- more than the balance, where lots of a use pay in a wallet that is overdrawn
    if covered < units then
        insert into metered.lot_moves (scope, seq, nth, lot, kind, amount)
        values (of_scope, at_seq, got.nth, 0, as_kind, units - covered);
        if as_kind = 'h' then
            insert into metered.lot_holds (scope, seq, lot, amount)
            values (of_scope, at_seq, 0, units - covered);
        else
            perform metered._owe_use(of_scope, at_seq, units - covered);
            if before is null then
                perform metered._owe(of_scope, units - covered);
            end if;
        end if;
    end if;
end
$$;

-- The age of a lot that the entry at_seq grants, or whose units were in of_lot before.
create function metered._age(of_lot bigint, at timestamptz, at_seq bigint) returns bigint[]
language plpgsql stable
as $$
begin
    if of_lot is not null then
        return (select y.age[1:2] || at_seq from metered.lot_rows y where y.no = of_lot);
    end if;
    return array[(extract(epoch from at) * 1000000)::bigint, at_seq, at_seq];
end
$$;

-- Credit becomes a lot: appends the entry after tip, which the wallet's lots are due before, and
-- returns it.
create function metered._append_lot(tip metered.ledger, lot metered.new_lot, plan metered.lot_plan,
    as_origin "char", of_lot bigint, out entry metered.ledger, out no bigint)
language plpgsql volatile
as $$
declare
    general boolean := plan.uses is null;
begin
    entry := metered._lot_entry(tip, case when general then 'd' else 's' end, lot.amount,
        case when general then lot.amount else 0 end);
    entry.lots_end := least(coalesce(tip.lots_end, 'infinity'), lot.expires_at);
    if entry.crossed is not null and of_lot is null and general then    -- a rollover brings no units
        entry.crossed := metered._rearmed(entry);
    end if;
    perform metered._append(entry);
    insert into metered.lot_rows (no, granted_at, expires_at, granted_seq, last_seq, amount, rest, roll_cap, roll_no, roll_end, late, from_lot,
        priority, origin, open, scope, category, reference, fingerprint, again, plan, keeps, age)
    overriding system value
    values (metered._next_number('lot_rows'), entry.at, lot.expires_at, entry.seq, entry.seq,
        lot.amount, 0, lot.roll_cap,
        case when lot.roll_cap is not null then metered._next_number('lot_rows') end,
        case when lot.roll_cap is not null then metered._roll_end(lot.expires_at, plan, lot.roll_for) end, lot.late, of_lot,
        lot.priority, as_origin, general, tip.scope, lot.category, lot.reference, lot.fingerprint, metered._again(plan), plan,
        not general, metered._age(of_lot, entry.at, entry.seq))
    on conflict do nothing
    returning lot_rows.no into _append_lot.no;
    if _append_lot.no is null then
        perform metered._collided();
    end if;
    perform metered._move_lot(tip.scope, entry.seq, 1, no, 'd', lot.amount, case when general then lot.amount else 0 end, case when general then 0 else lot.amount end);
end
$$;

-- The same, and pays an overdraft back at once.
create function metered._add_lot(tip metered.ledger, lot metered.new_lot, plan metered.lot_plan,
    as_origin "char", of_lot bigint, out entry metered.ledger, out no bigint)
language plpgsql volatile
as $$
declare
    owed bigint := metered._debt(tip);
    made record;
begin
    made := metered._append_lot(tip, lot, plan, as_origin, of_lot);
    entry := made.entry;
    no := made.no;
    perform metered._pay_back(entry, entry.seq, 1, array[no], owed);
end
$$;

-- Takes units of a lot (_taken). Appends the entry after tip, and returns it.
create function metered._take_units(tip metered.ledger, lot metered.lots, units bigint,
    as_kind "char") returns metered.ledger
language plpgsql volatile
as $$
declare
    step record;
begin
    step := metered._taken(tip, lot, units, as_kind);
    perform metered._append(step.tip);
    perform metered._write_moves(tip.scope, array[step.move], array[step.lot], null);
    return step.tip;
end
$$;

-- An entry after tip that no caller asked for, without the caller's marks.
create function metered._own_entry(tip metered.ledger, clk timestamptz) returns metered.ledger
language plpgsql stable
as $$
begin
    tip.at := greatest(clk, tip.at);
    tip.ref := null;
    tip.hold := null;
    tip.operation_tenant := null;
    tip.operation := null;
    tip.note := (metered._by_system()).note;
    return tip;
end
$$;

-- Overdraft by use: a lot that pays for some uses repays what was drawn for them, from its own units, when these come: at its
-- beginning, from a hold, by a refund or a reinstatement. A lot for anything pays what was drawn for no use first.

-- Overdraft that was drawn for uses, and that no lot has paid: a lot that pays for the use repays it. The rest of a wallet's
-- overdraft was drawn for no use.
create table metered.lot_debts (
    amount bigint not null,             -- spent units, 1 or more
    scope  text collate "C" not null,   -- the wallet
    use    text collate "C" not null,   -- the use in the note of the draw, or of the hold that was captured
    primary key (scope, use)
);

-- Notes spent units that no lot covers, if the entry of_seq says what they were for: a charge, or the one that held them.
create function metered._owe_use(of_scope text, of_seq bigint, units bigint) returns void
language plpgsql volatile
as $$
declare
    of_use text := (select e.note ->> 'use' from metered.ledger e where e.scope = of_scope and e.seq = of_seq);
begin
    if of_use is not null and units > 0 then
        insert into metered.lot_debts as d (scope, use, amount) values (of_scope, of_use, units)
        on conflict (scope, use) do update set amount = d.amount + excluded.amount;
    end if;
end
$$;

-- Notes that so many of the spent units were refunded, of all that were overdrawn: first of those
-- for the use first_use, then of those for no use, and then of others.
create function metered._debt_paid(of_scope text, units bigint, spent bigint, first_use text)
returns void
language plpgsql volatile
as $$
declare
    debts metered.lot_debts[] := metered._load_debts(of_scope);
    own   bigint := least(units,
        (select coalesce(sum(y.amount), 0) from unnest(debts) y where y.use = first_use));
    named bigint := (select sum(y.amount) from unnest(debts) y);
begin
    perform metered._write_debts(of_scope, debts, metered._without_debt(
        metered._without_debt(debts, own, array[first_use]), units - own - (spent - named), null));
end
$$;

-- Overdraft of a wallet that was drawn for uses.
create function metered._load_debts(of_scope text) returns metered.lot_debts[]
language plpgsql stable
as $$
begin
    return array(select row(y.*)::metered.lot_debts from metered.lot_debts y
        where y.scope = of_scope order by y.use);
end
$$;

-- Writes overdraft that was drawn for uses, which was debts before and is after.
create function metered._write_debts(of_scope text, debts metered.lot_debts[],
    after metered.lot_debts[]) returns void
language plpgsql volatile
as $$
begin
    if debts is distinct from after then
        delete from metered.lot_debts d where d.scope = of_scope;
        insert into metered.lot_debts (scope, use, amount)
        select of_scope, d.use, d.amount from unnest(after) d where d.amount > 0;
    end if;
end
$$;

-- Lots to which units have come pay overdraft back (_repaid): with the last move nth of the entry
-- at_seq, to the lots came. owed is by how many units the wallet was overdrawn then. Appends what
-- they pay for their uses after tip, and returns the last entry.
create function metered._pay_back(tip metered.ledger, at_seq bigint, nth int, came bigint[],
    owed bigint) returns metered.ledger
language plpgsql volatile
as $$
declare
    lots  metered.lots[];
    due   record;
    after record;
begin
    if owed > 0 then
        lots := array(select l from (
                select y.no from metered.lot_rows y
                where y.scope = tip.scope and y.open and y.expires_at > tip.at
                union select unnest(came)) n,
            lateral (select z from metered.lots z where z.no = n.no limit 1) x(l));
        due := metered._load_debt(tip.scope, owed, '{}');
        after := metered._repaid(tip, at_seq, nth,
            array(select x.ordinality::int from unnest(lots) with ordinality x
                where x.no = any (came)),
            case when tip.crossed is null then 0
                else metered._lapsing(tip, least(tip.at, metered.clock())) end,
            lots, due.parts, due.debts, due.spent);
        perform metered._write_due(tip, after.tip, after.entries, after.moves, lots, after.lots,
            due.parts, after.parts, due.debts, after.debts, after.spent);
        tip := after.tip;
    end if;
    return tip;
end
$$;


-- What becomes of a lot, a due line or a debt when its time comes: a lot begins, a lot ends (its rest
-- lapses, goes on in another lot, or both), a plan brings its next lot, a hold falls due. One function
-- an event, and none reads or writes a table. advance.sql says which event comes next.

-- A lot after a move: its units change by rest and kept, and with the kind of the move drawn, held,
-- lapsed, revoked and rolled. move is its row. Without a lot it is of overdraft.
create function metered._moved(inout lot metered.lots, of_scope text, at_seq bigint, nth int,
    as_kind "char", units bigint, rest bigint, kept bigint, out move metered.lot_moves)
language plpgsql immutable
as $$
begin
    if lot.no is not null then
        lot.version := coalesce(lot.version, 0) + 1;
        lot.last_seq := at_seq;
        lot.rest := lot.rest + rest;
        lot.kept := lot.kept + kept;
        lot.drawn := lot.drawn + case when as_kind in ('u', 'p') then units
            when as_kind = 'g' then -units else 0 end;
        lot.held := lot.held - case when as_kind in ('u', 'f') then units
            when as_kind = 'q' then -units else 0 end;
        lot.open := lot.rest + lot.kept > 0 and (lot.plan).uses is null;
        lot.keeps := lot.rest + lot.kept > 0 and (lot.plan).uses is not null;
        case as_kind
            when 'e' then
                lot.lapsed := lot.lapsed + units;
                lot.untold := lot.untold + units;
            when 'v' then lot.revoked := lot.revoked + units;
            when 'o' then lot.rolled := lot.rolled + units;
            else null;
        end case;
    end if;
    move := row(at_seq, nth, coalesce(lot.no, 0), units, 0, as_kind, of_scope, lot.version, lot.rest, lot.drawn, lot.held,
        lot.kept)::metered.lot_moves;
end
$$;

-- The entry after tip that moves units of a lot: credited changes by so many units.
create function metered._lot_entry(tip metered.ledger, as_kind text, units bigint, credited bigint)
returns metered.ledger
language plpgsql immutable
as $$
begin
    tip.seq := tip.seq + 1;
    tip.kind := as_kind;
    tip.amount := units;
    tip.credited := tip.credited + credited;
    return tip;
end
$$;

-- Units leave a lot, in an entry after tip, those of its rest first: they lapse (e), are revoked (v),
-- or roll over (o), or are kept for its uses again (b).
create function metered._taken(inout tip metered.ledger, inout lot metered.lots, units bigint,
    as_kind "char", out move metered.lot_moves)
language plpgsql immutable
as $$
declare
    rest   bigint := least(units, lot.rest);
    moving record;
begin
    tip := metered._lot_entry(tip, case when as_kind = 'b' then 'o' when rest > 0 then as_kind
        else 's' end, units, -rest);
    moving := metered._moved(lot, tip.scope, tip.seq, 1, as_kind, units, -rest,
        case when as_kind = 'b' then units else rest - units end);
    lot := moving.lot;
    move := moving.move;
end
$$;

-- The lot in which so many units of it go on, as the entry at_seq credits it, or one with no number
-- for none. new_no is its number, where none was set aside for it.
create function metered._gone_on(lot metered.lots, units bigint, at_seq bigint, new_no bigint)
returns metered.lots
language plpgsql stable
as $$
declare
    child metered.lots;
begin
    if units > 0 then
        child.no := coalesce(lot.roll_no, new_no);
        child.granted_at := lot.expires_at;
        child.granted_seq := at_seq;
        child.last_seq := at_seq;
        child.expires_at := lot.roll_end;
        child.amount := units;
        child.rest := case when (lot.plan).uses is null then units else 0 end;
        child.kept := units - child.rest;
        child.drawn := 0;
        child.held := 0;
        child.pending := 0;
        child.lapsed := 0;
        child.revoked := 0;
        child.rolled := 0;
        child.untold := 0;
        child.late := lot.late;
        child.from_lot := lot.no;
        child.priority := lot.priority;
        child.origin := 'r';
        child.open := child.rest > 0;
        child.keeps := child.kept > 0;
        child.scope := lot.scope;
        child.category := lot.category;
        child.plan := metered._plan_on(lot);
        child.age := lot.age[1:2] || at_seq;
        if (lot.plan).roll_again <> 0 then
            child.roll_cap := lot.roll_cap;
            child.roll_end := metered._roll_end(child.expires_at, child.plan, (lot.plan).roll_for);
        end if;
        child.again := metered._again(child.plan);
    end if;
    return child;
end
$$;

-- A lot ends, after tip. taken are the units that a shared cap counts already. entries and moves say
-- so, and made is the lot in which units go on, if it has a number.
create function metered._end_lot(inout tip metered.ledger, inout lot metered.lots, taken bigint,
    new_no bigint,
    out made metered.lots, out entries metered.ledger[], out moves metered.lot_moves[])
language plpgsql stable
as $$
declare
    general boolean := (lot.plan).uses is null;
    units   bigint := greatest(0, least(lot.rest + lot.kept, lot.roll_cap - taken));
    step    record;
begin
    units := case when lot.roll_cap is null then 0 else units end;
    tip := metered._own_entry(tip, lot.expires_at);
    if units > 0 then
        step := metered._taken(tip, lot, units, 'o');
        entries := entries || step.tip;
        lot := step.lot;
        moves := moves || step.move;
        tip := step.tip;
        tip := metered._lot_entry(tip, case when general then 'd' else 's' end, units,
            case when general then units else 0 end);
        entries := entries || tip;
        made := metered._gone_on(lot, units, tip.seq, new_no);
        made.version := 1;
        moves := moves || row(tip.seq, 1, made.no, units, 0, 'd', tip.scope, 1, made.rest, 0, 0,
            made.kept)::metered.lot_moves;
        lot.roll_cap := null;
        lot.again := false;
    end if;
    units := lot.rest + lot.kept;
    if units > 0 then
        step := metered._taken(tip, lot, units, 'e');
        entries := entries || step.tip;
        lot := step.lot;
        moves := moves || step.move;
        tip := step.tip;
    end if;
end
$$;

-- The reference of a plan's lot that begins then.
create function metered._period_name(renewal text, starts_at timestamptz) returns text
language plpgsql immutable
as $$
begin
    return left(renewal || ' '
        || to_char(starts_at at time zone 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS"Z"'), 255);
end
$$;

-- The lot of the period after a lot that renews.
create function metered._next_lot(lot metered.lots) returns metered.lots
language plpgsql stable
as $$
declare
    follows metered.lots := lot;
    zone    text;
begin
    follows.roll_no := null;
    begin
        follows.starts_at := (metered._period_at((lot.plan).renews, lot.starts_at))[2];
        follows.expires_at := (metered._period_at((lot.plan).renews, follows.starts_at))[2];
        follows.roll_end := case when lot.roll_cap is not null then
            metered._roll_end(follows.expires_at, lot.plan, (lot.plan).roll_for) end;
    exception when sqlstate 'MT010' then
        get stacked diagnostics zone = pg_exception_detail;
        raise exception 'the time zone of a plan is not known' using errcode = 'MT010',
            detail = format('%s, of the plan %s of wallet %s', zone, (lot.plan).renewal, lot.scope);
    end;
    follows.no := null;
    follows.granted_at := follows.starts_at;
    follows.amount := (lot.plan).renew_amount;
    follows.pending := follows.amount;
    follows.rest := 0;
    follows.kept := 0;
    follows.drawn := 0;
    follows.held := 0;
    follows.lapsed := 0;
    follows.revoked := 0;
    follows.rolled := 0;
    follows.untold := 0;
    follows.open := false;
    follows.keeps := false;
    follows.version := null;
    follows.from_lot := null;
    follows.origin := 'g';
    follows.again := metered._again(lot.plan);
    follows.reference := metered._period_name((lot.plan).renewal, follows.starts_at);
    return follows;
end
$$;

-- A lot begins, after tip. made is the lot of the next period, if it has a number.
create function metered._start_lot(inout tip metered.ledger, inout lot metered.lots, unwritten bigint,
    new_no bigint,
    out made metered.lots, out entries metered.ledger[], out moves metered.lot_moves[])
language plpgsql stable
as $$
declare
    general boolean := (lot.plan).uses is null;
    units   bigint := case when general then lot.pending else 0 end;
    moving  record;
begin
    tip := metered._lot_entry(metered._own_entry(tip, lot.starts_at),
        case when general then 'd' else 's' end, lot.pending, units);
    if general then
        tip.crossed := metered._armed(tip.crossed,
            tip.spent - tip.refunded - tip.credited + unwritten, tip.held);
    end if;
    entries := array[tip];
    moving := metered._moved(lot, tip.scope, tip.seq, 1, 'd', lot.pending, units, lot.pending - units);
    lot := moving.lot;
    moves := array[moving.move];
    lot.pending := 0;
    lot.granted_at := lot.starts_at;
    lot.granted_seq := tip.seq;
    lot.age := array[(extract(epoch from lot.starts_at) * 1000000)::bigint, tip.seq, tip.seq];
    if ((lot.plan).renews).every is not null then
        made := metered._next_lot(lot);
        made.no := new_no;
        made.granted_seq := tip.seq;
        made.last_seq := tip.seq;
        made.age := array[(extract(epoch from made.starts_at) * 1000000)::bigint, tip.seq, tip.seq];
        lot.plan.renews := null;
        lot.plan.renew_amount := null;
    end if;
end
$$;

-- So many units that the entry tip captures are of those lots that are drawn first: units of a lot
-- that has ended are still its own. parts are how many units are held of each lot (null:
-- overdraft). drawn is overdraft that is captured.
create function metered._captured(tip metered.ledger, units bigint, inout lots metered.lots[],
    inout parts bigint[], out drawn bigint, out moves metered.lot_moves[])
language plpgsql stable
as $$
declare
    part   bigint;
    pos    int;
    nth    int := 0;
    moving record;
begin
    drawn := 0;
    for pos in select x.ordinality from unnest(lots) with ordinality x
        order by x.priority, x.expires_at, x.age
    loop
        part := least(units, parts[pos]);
        continue when part = 0;
        nth := nth + 1;
        moving := metered._moved(lots[pos], tip.scope, tip.seq, nth, 'u', part, 0, 0);
        lots[pos] := moving.lot;
        moves := moves || moving.move;
        parts[pos] := parts[pos] - part;
        units := units - part;
        drawn := case when lots[pos].no is null then part else drawn end;
    end loop;
end
$$;

-- Units come back to lots, by the entry at_seq, after its move nth: freed (f), or refunded (g).
-- parts are how many of each lot (null: overdraft). Units of a lot that has ended lapse, or leave
-- it if they are refunded and last, and units for some uses are kept for these: in entries after
-- tip.
create function metered._given_back(inout tip metered.ledger, at_seq bigint, as_kind "char",
    inout nth int, inout lots metered.lots[], parts bigint[],
    out entries metered.ledger[], out moves metered.lot_moves[])
language plpgsql stable
as $$
declare
    part   bigint;
    pos    int;
    moving record;
begin
    for pos in select x.ordinality from unnest(lots) with ordinality x where parts[x.ordinality] > 0
        order by x.no is not null, x.age
    loop
        part := parts[pos];
        nth := nth + 1;
        moving := metered._moved(lots[pos], tip.scope, at_seq, nth, as_kind, part, part, 0);
        lots[pos] := moving.lot;
        moves := moves || moving.move;
        continue when lots[pos].no is null
            or lots[pos].expires_at > tip.at and (lots[pos].plan).uses is null;
        moving := metered._taken(metered._own_entry(tip, tip.at), lots[pos], part,
            case when lots[pos].expires_at > tip.at then 'b'
            when as_kind = 'g' and lots[pos].late is not null then 'o' else 'e' end::"char");
        tip := moving.tip;
        lots[pos] := moving.lot;
        moves := moves || moving.move;
        entries := entries || tip;
    end loop;
end
$$;

-- A line of a hold falls due, after tip: it captures its minimum of its lots, in their order, and gives
-- the other units back to them. lots are those that have parts of its units (null: overdraft). drawn is
-- overdraft that it captured. came is the entry that gives units back, if one does, and nth the number
-- of its last move.
create function metered._end_line(inout tip metered.ledger, line metered.due_line,
    lowered jsonb, inout lots metered.lots[], parts bigint[],
    out drawn bigint, out came bigint, out nth int,
    out entries metered.ledger[], out moves metered.lot_moves[])
language plpgsql stable
as $$
declare
    step record;
begin
    drawn := 0;
    nth := 0;
    tip := metered._own_entry(tip, line.due);
    tip.hold := line.id;
    if line.minimum > 0 then
        tip := metered._lot_entry(tip, 'u', line.minimum, 0);
        tip.spent := tip.spent + line.minimum;
        tip.held := tip.held - line.minimum;
        tip.crossed := nullif(coalesce(lowered, tip.crossed), '{}');
        tip.operation_tenant := line.operation_tenant;
        tip.operation := line.operation;
        entries := array[tip];
        tip.operation_tenant := null;
        tip.operation := null;
        step := metered._captured(tip, line.minimum, lots, parts);
        lots := step.lots;
        parts := step.parts;
        drawn := step.drawn;
        moves := step.moves;
    end if;
    if line.units > line.minimum then
        tip := metered._lot_entry(tip, 'x', line.units - line.minimum, 0);
        tip.held := tip.held - tip.amount;
        entries := entries || tip;
        came := tip.seq;
        tip.hold := null;
        step := metered._given_back(tip, came, 'f', 0, lots, parts);
        tip := step.tip;
        nth := step.nth;
        lots := step.lots;
        entries := entries || step.entries;
        moves := moves || step.moves;
    end if;
end
$$;

-- How units that come pay debts back in the fold, on arrays: no function reads or writes a table.
-- See debts.sql.

-- Overdraft by use, with so many units more for one use, or for none.
create function metered._with_debt(debts metered.lot_debts[], of_use text, units bigint) returns metered.lot_debts[]
language plpgsql immutable
as $$
begin
    return array(select row(sum(y.amount)::bigint, '', y.use)::metered.lot_debts
        from (select x.amount, x.use from unnest(debts) x union all select units, of_use where of_use is not null and units > 0) y
        group by y.use order by y.use);
end
$$;

-- Overdraft by use, less so many units, in the order of the uses: of all, or only of some.
create function metered._without_debt(debts metered.lot_debts[], units bigint, for_uses text[]) returns metered.lot_debts[]
language plpgsql immutable
as $$
declare
    part bigint;
begin
    for n in 1..cardinality(debts) loop
        continue when debts[n].use <> all (for_uses);
        part := greatest(0, least(units, debts[n].amount));
        debts[n].amount := debts[n].amount - part;
        units := units - part;
    end loop;
    return debts;
end
$$;

-- Lots with a rest, in their order, pay overdraft back in the entry at_seq, after its move nth: first spent
-- units, and then units of overdrawn holds, in their order. parts are the parts of holds without a lot.
create function metered._paid_back(of_scope text, at_seq bigint, nth int, inout lots metered.lots[],
    inout spent bigint, inout debts metered.lot_debts[], inout parts metered.lot_holds[],
    out more metered.lot_holds[], out moves metered.lot_moves[])
language plpgsql stable
as $$
declare
    part   bigint;
    moving record;
begin
    for pos in 1..coalesce(cardinality(lots), 0) loop
        part := least(spent, lots[pos].rest);
        if part > 0 then
            debts := metered._without_debt(debts, part - spent
                + (select coalesce(sum(y.amount), 0) from unnest(debts) y)::bigint, null);
            spent := spent - part;
            nth := nth + 1;
            moving := metered._moved(lots[pos], of_scope, at_seq, nth, 'p', part, -part, 0);
            lots[pos] := moving.lot;
            moves := moves || moving.move;
        end if;
        for n in 1..cardinality(parts) loop
            part := least(parts[n].amount, lots[pos].rest);
            exit when lots[pos].rest = 0;
            continue when part = 0;
            nth := nth + 1;
            moving := metered._moved(lots[pos], of_scope, at_seq, nth, 'q', part, -part, 0);
            lots[pos] := moving.lot;
            moves := moves || moving.move;
            parts[n].amount := parts[n].amount - part;
            more := more || row(parts[n].seq, lots[pos].no, part, of_scope)::metered.lot_holds;
        end loop;
    end loop;
end
$$;

-- A lot whose units for its uses have come pays overdraft that was drawn for these, after tip.
create function metered._use_repaid(inout tip metered.ledger, inout used_lot metered.lots, unwritten bigint,
    inout spent bigint, inout debts metered.lot_debts[],
    out entries metered.ledger[], out moves metered.lot_moves[])
language plpgsql stable
as $$
declare
    units  bigint := least(used_lot.kept, (select coalesce(sum(y.amount), 0) from unnest(debts) y
        where y.use = any ((used_lot.plan).uses)));
    moving record;
begin
    if (units > 0 and used_lot.expires_at > tip.at) is not true then
        return;
    end if;
    tip := metered._lot_entry(metered._own_entry(tip, tip.at), 'd', units, units);
    tip.crossed := metered._armed(tip.crossed,
        tip.spent - tip.refunded - tip.credited + unwritten, tip.held);
    entries := array[tip];
    moving := metered._moved(used_lot, tip.scope, tip.seq, 1, 'a', units, units, -units);
    moves := array[moving.move];
    moving := metered._moved(moving.lot, tip.scope, tip.seq, 2, 'p', units, -units, 0);
    moves := moves || moving.move;
    used_lot := moving.lot;
    debts := metered._without_debt(debts, units, (used_lot.plan).uses);
    spent := spent - units;
end
$$;

-- Units that came with the move nth of the entry at_seq pay overdraft back, after tip. came are the places of lots
-- to which units for their uses came. The others are as _advance has them.
create function metered._repaid(inout tip metered.ledger, at_seq bigint, nth int, came int[],
    unwritten bigint, inout lots metered.lots[], inout parts metered.lot_holds[],
    inout debts metered.lot_debts[], inout spent bigint,
    out entries metered.ledger[], out moves metered.lot_moves[])
language plpgsql stable
as $$
declare
    payers int[] := array(select x.ordinality from unnest(lots) with ordinality x
        where x.rest > 0 and (x.plan).uses is null and x.expires_at > tip.at
        order by x.priority, x.expires_at, x.age);
    owed   int[] := array(select k.n from unnest(parts) with ordinality k(seq, lot, amount, scope, n)
        where k.lot = 0 and k.amount > 0 order by k.seq);
    pos    int;
    paid   record;
begin
    paid := metered._paid_back(tip.scope, at_seq, nth,
        array(select lots[x.pos] from unnest(payers) with ordinality x(pos, n) order by x.n),
        spent, debts,
        array(select parts[x.pos] from unnest(owed) with ordinality x(pos, n) order by x.n));
    spent := paid.spent;
    debts := paid.debts;
    moves := paid.moves;
    for n in 1..cardinality(payers) loop
        lots[payers[n]] := paid.lots[n];
    end loop;
    for n in 1..cardinality(owed) loop
        parts[owed[n]] := paid.parts[n];
    end loop;
    for n in 1..coalesce(cardinality(paid.more), 0) loop
        pos := (select k.place from unnest(parts) with ordinality k(seq, lot, amount, scope, place)
            where k.seq = paid.more[n].seq and k.lot = paid.more[n].lot);
        if pos is null then
            parts := parts || paid.more[n];
        else
            parts[pos].amount := parts[pos].amount + paid.more[n].amount;
        end if;
    end loop;
    for pos in select x.pos from unnest(came) x(pos) where (lots[x.pos].plan).uses is not null
        order by lots[x.pos].age
    loop
        paid := metered._use_repaid(tip, lots[pos], unwritten, spent, debts);
        tip := paid.tip;
        lots[pos] := paid.used_lot;
        spent := paid.spent;
        debts := paid.debts;
        entries := entries || paid.entries;
        moves := moves || paid.moves;
    end loop;
end
$$;

-- What time alone does in a wallet, in its order. _advance gets lots, due lines and overdraft as arrays
-- (_load_due), applies the events (duelots.sql), and answers with the entries and moves that say so, and
-- with the lots after them. A writer appends them (_settle). A reader answers from the lots (lapses.sql).
-- idle.sql says how it passes over years in which nobody called. _advance_each, here, applies one event after the other.
--
-- Events come in the order of their times. At one instant lots end, then lots begin, then holds fall
-- due, each from the oldest on. A lot that no row has yet has a number below 0: its place in the array.

-- When the turn of a lot comes: it begins, or it ends. Inlined wherever it stands.
create function metered._turn_at(lot metered.lots) returns timestamptz
language sql immutable
as $$
    select case when lot.pending > 0 then lot.starts_at else lot.expires_at end
$$;

-- Places in lots after the first from_n, which had their turn, with one more: in the order of turns.
create function metered._queued(turns int[], from_n int, pos int, lots metered.lots[]) returns int[]
language plpgsql immutable
as $$
declare
    remaining int := cardinality(turns);
begin
    while remaining > from_n and (metered._turn_at(lots[pos]), lots[pos].pending > 0, lots[pos].age)
        < (metered._turn_at(lots[turns[remaining]]), lots[turns[remaining]].pending > 0, lots[turns[remaining]].age)
    loop
        remaining := remaining - 1;
    end loop;
    return turns[from_n + 1:remaining] || pos || turns[remaining + 1:];
end
$$;

-- The places of the parts of a line: those after place from_n, and those after loaded, which are units
-- of lots that have paid its overdraft since.
create function metered._parts_of(opened_seq bigint, parts metered.lot_holds[], from_n int, loaded int)
returns int[]
language plpgsql immutable
as $$
declare
    mine int[] := '{}';
begin
    while from_n < loaded and parts[from_n + 1].seq = opened_seq loop
        from_n := from_n + 1;
        mine := mine || from_n;
    end loop;
    for n in loaded + 1..cardinality(parts) loop
        mine := case when parts[n].seq = opened_seq then mine || n else mine end;
    end loop;
    return mine;
end
$$;

-- The places of the lots of parts: null for overdraft.
create function metered._places(parts metered.lot_holds[], lots metered.lots[]) returns int[]
language plpgsql immutable
as $$
declare
    by_no jsonb := (select jsonb_object_agg(x.no, x.ordinality) from unnest(lots) with ordinality x);
begin
    return array(select (by_no ->> k.lot::text)::int
        from unnest(parts) with ordinality k(seq, lot, amount, scope, n) order by k.n);
end
$$;

-- Units that a shared cap counts where a lot ends: those of its category that have rolled over, and
-- have not ended by then. capped are places of lots that may be of these: those that have ended are
-- left out from here on.
create function metered._capped(lot metered.lots, lots metered.lots[], inout capped int[],
    out units bigint)
language plpgsql stable
as $$
declare
    live int[] := '{}';
    pos  int;
begin
    units := 0;
    if (lot.plan).roll_shared is true and lot.roll_cap is not null then
        foreach pos in array capped loop
            continue when lots[pos].expires_at <= lot.expires_at;
            live := live || pos;
            if lots[pos].category = lot.category then
                units := units + lots[pos].rest + lots[pos].kept + lots[pos].held;
            end if;
        end loop;
        capped := live;
    end if;
end
$$;

-- Applies what time alone does in a wallet up to a time, after its entry tip. lots are those that it
-- changes, and those on which that depends (_load_due). lines are in their order, and parts first those
-- of the lines, and then the overdrawn ones of other holds. spent is overdraft that no hold keeps, of
-- which debts were drawn for uses. unwritten are units of other lots that have ended. lowered are the
-- thresholds that are reported after all this, which entries remember from the first one on that lowers
-- the balance. Where it is null, nobody has judged them: entries remember those of tip, but for what a
-- lot arms that begins.
create function metered._advance_each(inout tip metered.ledger, until timestamptz, lowered jsonb,
    unwritten bigint, lines metered.due_line[], inout lots metered.lots[],
    inout parts metered.lot_holds[], inout debts metered.lot_debts[], inout spent bigint,
    out entries metered.ledger[], out moves metered.lot_moves[])
language plpgsql stable
as $$
declare
    -- Places in lots, in their order, and how many had their turn.
    turns    int[] := array(select x.ordinality from unnest(lots) with ordinality x
        where case when x.pending > 0 then x.starts_at else x.expires_at end <= until
          and x.pending + x.rest + x.kept + x.held > 0
        order by case when x.pending > 0 then x.starts_at else x.expires_at end, x.pending > 0, x.age);
    turned   int := 0;
    capped   int[] := array(select x.ordinality from unnest(lots) with ordinality x
        where x.origin = 'r' and (x.plan).roll_shared and x.rest + x.kept + x.held > 0);
    places   int[] := case when parts = '{}' then '{}' else metered._places(parts, lots) end;
    due      int := 0;
    parted   int := 0;
    loaded   int := cardinality(parts);
    over     bigint := (select coalesce(sum(k.amount), 0) from unnest(parts) k where k.lot = 0);
    pos      int;
    step     record;
    begins   boolean;
    made     metered.lots;
    mine     int[];       -- places in parts
    came     int[];       -- places of lots to which units came
    came_seq bigint;    -- by this entry, up to its move came_nth
    came_nth int;
    said     metered.ledger[];
    moved    metered.lot_moves[];
begin
    entries := '{}';
    moves := '{}';
    loop
        pos := turns[turned + 1];
        exit when pos is null and lines[due + 1] is null;
        made := null;
        came := '{}';
        came_nth := 1;
        if pos is not null and (metered._turn_at(lots[pos]) > lines[due + 1].due) is not true then
            turned := turned + 1;
            continue when lots[pos].pending + lots[pos].rest + lots[pos].kept = 0;
            begins := lots[pos].pending > 0;
            if begins then
                step := metered._start_lot(tip, lots[pos], unwritten, -1 - cardinality(lots));
                came := array[pos];
                came_seq := (step.tip).seq;
            else
                tip.crossed := nullif(coalesce(lowered, tip.crossed), '{}');
                step := metered._capped(lots[pos], lots, capped);
                capped := step.capped;
                step := metered._end_lot(tip, lots[pos], step.units, -1 - cardinality(lots));
                came_seq := case when ((step.made).plan).uses is null then (step.made).granted_seq end;
            end if;
            lots[pos] := step.lot;
            made := step.made;
            if begins and lots[pos].expires_at <= until then
                turns := metered._queued(turns, turned, pos, lots);
                turned := 0;
            end if;
        else
            due := due + 1;
            mine := metered._parts_of(lines[due].opened_seq, parts, parted, loaded);
            parted := parted + (select count(*) from unnest(mine) n where n <= loaded);
            step := metered._end_line(tip, lines[due], lowered,
                array(select lots[places[n]] from unnest(mine) n),
                array(select parts[n].amount from unnest(mine) n));
            for n in 1..cardinality(mine) loop
                if places[mine[n]] is null then
                    over := over - parts[mine[n]].amount;
                else
                    lots[places[mine[n]]] := step.lots[n];
                    came := came || places[mine[n]];
                end if;
                parts[mine[n]].amount := 0;
            end loop;
            spent := spent + step.drawn;
            debts := metered._with_debt(debts, lines[due].use, step.drawn);
            came_seq := step.came;
            came_nth := step.nth;
        end if;
        tip := step.tip;
        said := step.entries;
        moved := step.moves;
        if made.no is not null then
            pos := cardinality(lots) + 1;
            lots[pos] := made;
            if metered._turn_at(made) <= until then
                turns := metered._queued(turns, turned, pos, lots);
                turned := 0;
            end if;
            if made.origin = 'r' and (made.plan).roll_shared then
                capped := capped || pos;
            end if;
        end if;
        if came_seq is not null and spent + over > 0 then
            step := metered._repaid(tip, came_seq, came_nth, came, unwritten, lots, parts, debts,
                spent);
            tip := step.tip;
            lots := step.lots;
            parts := step.parts;
            debts := step.debts;
            spent := step.spent;
            said := said || step.entries;
            moved := moved || step.moves;
            over := (select coalesce(sum(k.amount), 0) from unnest(parts) k where k.lot = 0);
            places := places || metered._places(parts[cardinality(places) + 1:], lots);
        end if;
        for n in 1..cardinality(said) loop     -- one by one, which copies nothing
            entries := entries || said[n];
        end loop;
        for n in 1..cardinality(moved) loop
            moves := moves || moved[n];
        end loop;
    end loop;
end
$$;

-- What becomes of a wallet that nobody touches for long. Most lots that its plans bring are over by then, and
-- nobody drew of them. _foreseen looks at ends and units alone, and says what becomes of the lots that the
-- wallet has, which others are left, and how many periods are over. idle.sql writes that. So a call on an idle wallet
-- writes a few entries, however long nobody called. Periods may be months, and clocks may be set.

-- Units of one lot in _foreseen, and of those in which they go on, of which the last one counts.
create type metered.idle_units as (
    place     int,          -- of the lot, or of the one whose plan brings it
    nth       int,          -- so many periods later than that
    born      bigint,       -- the age of the units, in microseconds
    rank      bigint,       -- the order of those of one age
    begins    timestamptz,  -- when the lot begins, or null: it has begun
    ends      timestamptz,  -- when the last one ends
    went      bigint[],     -- how many of them went on, each time or the first and the last times
    went_at   timestamptz[],
    units     bigint,
    held      bigint,
    roll_cap  bigint,
    roll_end  timestamptz,
    roll_again int,
    shares    text,         -- a cap with the units of this category, or null
    rolled    boolean);     -- such a cap counts them

-- What is foreseen at a time, which has passed. The last arrays are by places of lots.
create type metered.idle_state as (
    at       timestamptz,
    due      timestamptz,           -- when the next lot ends, or begins
    live     metered.idle_units[],  -- not over, from the oldest on
    said     metered.idle_units[],  -- over, of the lots that the wallet had
    next     metered.idle_units[],  -- of each plan, from the one on whose last lot began first. Without begins, no lot follows
    skipped  int[],                 -- periods whose units are over
    first_at timestamptz[],         -- when the first of these began
    over     timestamptz);          -- when the last one of all was over

-- Whether more periods of plans are due in a wallet than one step writes: not where a lot would have more
-- units than one may have.
create function metered._is_idle(lots metered.lots[], until timestamptz) returns boolean
language plpgsql stable
as $$
begin
    return (select coalesce(sum(x.due) > metered._events_per_step()
            and max(x.due * x.units) < 9007199254740992, false)
        from (select (y.plan).renew_amount as units,
                  extract(epoch from until - y.starts_at) / extract(epoch from ((y.plan).renews).every) + 1 as due
              from unnest(lots) y
              where y.pending > 0 and y.starts_at <= until and ((y.plan).renews).every is not null) x)
        and cardinality(lots) < 200;
end
$$;

-- So many units of a lot go on in another one, at its end.
create function metered._foreseen_on(idle metered.idle_units, plan metered.lot_plan, units bigint)
returns metered.idle_units
language plpgsql stable
as $$
begin
    if cardinality(idle.went) >= metered._events_per_step() then
        idle.went := idle.went[:1];
        idle.went_at := idle.went_at[:1];
    end if;
    idle.went := idle.went || units;
    idle.went_at := idle.went_at || idle.ends;
    idle.units := units;
    idle.ends := idle.roll_end;
    idle.held := 0;
    idle.rolled := true;
    if idle.roll_again <> 0 then
        idle.roll_end := metered._roll_end(idle.ends, plan, plan.roll_for);
        idle.roll_again := greatest(idle.roll_again - 1, -1);
    else
        idle.roll_cap := null;
    end if;
    return idle;
end
$$;

-- Whether a period is as long as any other, but where a clock is set.
create function metered._by_days(every metered.period) returns boolean
language sql immutable
as $$
    select every.zone is null or extract(year from every.every) + extract(month from every.every) = 0
$$;

-- How units repeat themselves as long as no clock is set: others take their place (s), or they go on for ever (p), or
-- null: they do not.
create function metered._repeats(units metered.idle_units, plan metered.lot_plan) returns text
language plpgsql immutable
as $$
begin
    return case when units.roll_cap is not null and (plan.roll_to).every is not null
            and not metered._by_days(plan.roll_to) then null
        when units.roll_again = -1 and units.went <> '{}' then 'p'
        when units.nth > 0 and metered._by_days(plan.renews) then 's' end;
end
$$;

-- The time from one time to another, in hours: days would be those of the session's time zone.
create function metered._hours_between(since timestamptz, until timestamptz) returns interval
language sql stable
as $$
    select ((extract(epoch from until) - extract(epoch from since)) * 1000000)::bigint * interval '1 microsecond'
$$;

-- Whether a state repeats an earlier one, but for its dates: then it does so again, up to the next event that does not
-- repeat itself, which is the first result. The second one is the last date that a calendar made. Null: it does not.
create function metered._recurs(state metered.idle_state, was metered.idle_state, plans metered.lot_plan[])
returns timestamptz[]
language plpgsql stable
as $$
declare
    later interval := metered._hours_between(was.at, state.at);
    still timestamptz := 'infinity';
    ahead timestamptz := state.at;
    now   metered.idle_units;
    old   metered.idle_units;
    how   text;
    moves interval;
begin
    if cardinality(state.live) is distinct from cardinality(was.live) then
        return null;
    end if;
    for n in 1..cardinality(state.live) loop
        now := state.live[n];
        old := was.live[n];
        if now.place <> old.place or now.units <> old.units then
            return null;
        end if;
        how := metered._repeats(now, plans[now.place]);
        moves := case when how is null then interval '0' else later end;
        if (now.ends, now.roll_end, now.held, now.rolled, now.roll_again, how) is distinct from
                (old.ends + moves, old.roll_end + moves, old.held, old.rolled, old.roll_again,
                    metered._repeats(old, plans[now.place]))
            or (how = 's' and now.begins <> old.begins + later) or (how is distinct from 's' and now.nth <> old.nth) then
            return null;
        end if;
        if how is null then
            still := least(still, now.ends);
        elsif not now.rolled or ((plans[now.place]).roll_to).every is not null then
            ahead := greatest(ahead, nullif(now.ends, 'infinity'),
                case when ((plans[now.place]).roll_to).every is not null then now.roll_end end);
        end if;
    end loop;
    for n in 1..cardinality(state.next) loop
        now := state.next[n];
        old := was.next[n];
        if now.nth > 0 and metered._by_days((plans[now.place]).renews) then
            if (now.place, now.begins) is distinct from (old.place, old.begins + later) then
                return null;
            end if;
            ahead := greatest(ahead, now.begins);
        elsif (now.place, now.begins) is distinct from (old.place, old.begins) then
            return null;
        else
            still := least(still, now.begins);
        end if;
    end loop;
    return array[still, ahead];
end
$$;

-- Times up to a day after which a clock is set, or was, in a zone of the plans.
create function metered._clock_changes(lots metered.lots[], since timestamptz, until timestamptz)
returns timestamptz[]
language plpgsql stable
as $$
begin
    return array(
        select distinct t - interval '24:00'
        from (select ((x.plan).renews).zone from unnest(lots) x
              union select ((x.plan).roll_to).zone from unnest(lots) x) z,
            generate_series(since - interval '48:00', until + interval '96:00', interval '24:00') t
        where z.zone <> 'UTC' and (t at time zone z.zone)
            - ((t - interval '24:00') at time zone z.zone) <> interval '24:00');
exception when invalid_parameter_value then
    return array[since];        -- a name that the server does not know
end
$$;

-- A state so many times as much later as it is later than was, which it repeats.
create function metered._foreseen_later(state metered.idle_state, was metered.idle_state, times bigint,
    plans metered.lot_plan[]) returns metered.idle_state
language plpgsql stable
as $$
declare
    later interval := times * metered._hours_between(was.at, state.at);
    now   metered.idle_units;
    how   text;
begin
    if times = 0 then
        return state;
    end if;
    for n in 1..cardinality(state.live) loop
        now := state.live[n];
        how := metered._repeats(now, plans[now.place]);
        continue when how is null;
        now.ends := now.ends + later;
        now.roll_end := now.roll_end + later;
        if how = 'p' then
            now.went := now.went[:1] || now.units;
            now.went_at := now.went_at[:1] || now.went_at[cardinality(now.went_at)] + later;
        else
            now.went_at := array(select x + later from unnest(now.went_at) x);
            now.begins := now.begins + later;
            now.born := extract(epoch from now.begins) * 1000000;
            now.nth := now.nth + times * (now.nth - (was.live[n]).nth);
        end if;
        state.live[n] := now;
    end loop;
    for n in 1..cardinality(state.next) loop
        now := state.next[n];
        continue when now.nth = (was.next[n]).nth;
        now.begins := now.begins + later;
        now.nth := now.nth + times * (now.nth - (was.next[n]).nth);
        state.next[n] := now;
        state.skipped[now.place] := state.skipped[now.place]
            + times * (state.skipped[now.place] - was.skipped[now.place]);
    end loop;
    state.at := state.at + later;
    state.due := least((select min(x.ends) from unnest(state.live) x), (select min(x.begins) from unnest(state.next) x));
    if state.over > was.at then
        state.over := state.over + later;
    end if;
    return state;
end
$$;

-- All that ends in a state when the next lot does, or begins, and then all that begins.
create function metered._foreseen_next(state metered.idle_state, plans metered.lot_plan[])
returns metered.idle_state
language plpgsql stable
as $$
declare
    at     timestamptz := state.due;
    due    timestamptz;
    live   metered.idle_units[] := state.live;
    stays  metered.idle_units[] := '{}';
    comes  metered.idle_units[] := '{}';
    now    metered.idle_units;
    plan   metered.lot_plan;
    units  bigint;
    shares text;                -- the category of which units are taken
    taken  bigint := 0;
    of_period metered.period;   -- of which the next period begins at
    begins timestamptz;
begin
    for n in 1..cardinality(live) loop
        if live[n].ends > at then
            due := least(due, live[n].ends);
            continue;
        end if;
        now := live[n];
        if now.roll_cap is not null and now.shares is distinct from shares then
            shares := now.shares;
            taken := (select coalesce(sum(x.units + x.held), 0) from unnest(live) x
                where x.rolled and x.ends > at and x.shares = now.shares);
        end if;
        units := case when now.roll_cap is null then 0 else least(now.units, now.roll_cap - taken) end;
        if units > 0 then
            taken := case when shares is not null then taken + units else 0 end;
            live[n] := metered._foreseen_on(now, plans[now.place], units);
            due := least(due, live[n].ends);
            continue;
        end if;
        live[n] := null;
        if now.nth = 0 then
            state.said := state.said || now;
        else
            state.skipped[now.place] := state.skipped[now.place] + 1;
            state.first_at[now.place] := coalesce(state.first_at[now.place], now.begins);
            state.over := at;
        end if;
    end loop;
    live := array_remove(live, null);
    foreach now in array state.next loop
        if (now.begins = at) is not true then
            stays := stays || now;
            due := least(due, now.begins);
            continue;
        end if;
        plan := plans[now.place];
        if plan.renews is distinct from of_period then
            of_period := plan.renews;
            begins := case when of_period.every is not null then (metered._period_at(of_period, at))[2] end;
        end if;
        if now.nth > 0 then
            now.ends := begins;
            now.roll_end := case when now.roll_cap is not null then metered._roll_end(begins, plan, plan.roll_for) end;
        end if;
        now.born := extract(epoch from at) * 1000000;
        now.rank := cardinality(plans) + cardinality(comes) + 1;
        live := live || now;
        due := least(due, now.ends, begins);
        now.nth := now.nth + 1;
        now.begins := begins;
        now.units := plan.renew_amount;
        comes := comes || now;
    end loop;
    state.at := at;
    state.due := due;
    state.live := live;
    state.next := stays || comes;
    return state;
end
$$;

-- What becomes of the lots of a wallet until a time, and of those that its plans bring, if nobody touches them. Where a state
-- repeats itself, as many repetitions as there is time for are one step.
create function metered._foreseen(lots metered.lots[], until timestamptz) returns metered.idle_state
language plpgsql stable
as $$
declare
    plans   metered.lot_plan[] := array(select x.plan from unnest(lots) x);
    state   metered.idle_state;
    was     metered.idle_state;     -- an earlier state
    steps   int := 0;               -- since that
    most    int := 1;
    repeats boolean;
    span    timestamptz[];
    changes timestamptz[];
    at      timestamptz;
    times   bigint;
begin
    select coalesce(array_agg(y.units order by y.born, y.rank) filter (where not y.begins), '{}'),
        coalesce(array_agg(y.units order by y.rank) filter (where y.begins), '{}'),
        least(min((y.units).ends) filter (where not y.begins), min((y.units).begins) filter (where y.begins)),
        bool_or(((y.plan).renews).every is not null and metered._by_days((y.plan).renews) or (y.plan).roll_again = -1)
    into state.live, state.next, state.due, repeats
    from (select x.plan, x.age[1] as born, row_number() over (order by x.age) as rank,
              x.pending > 0 and x.starts_at <= until as begins,
              row(x.ordinality, 0, x.age[1], row_number() over (order by x.age), case when x.pending > 0 then x.starts_at end,
                  x.expires_at, '{}', '{}', x.pending + x.rest + x.kept, x.held, x.roll_cap, x.roll_end, (x.plan).roll_again,
                  case when (x.plan).roll_shared then x.category end, x.origin = 'r')::metered.idle_units as units
          from unnest(lots) with ordinality x
          where x.pending + x.rest + x.kept + x.held > 0) y;
    state.skipped := array_fill(0, array[cardinality(lots)]);
    state.first_at := array_fill(null::timestamptz, array[cardinality(lots)]);
    while state.due <= until loop
        state := metered._foreseen_next(state, plans);
        continue when not repeats;
        steps := steps + 1;
        times := 0;
        span := metered._recurs(state, was, plans);
        if span is not null then
            changes := coalesce(changes, metered._clock_changes(lots, was.at, greatest(until, span[2])));
            at := least(until, span[1], (select min(x) from unnest(changes) x where x > was.at - interval '48:00')
                - metered._hours_between(state.at, span[2]));
            times := greatest(0, div(extract(epoch from at) - extract(epoch from state.at) - 0.000001,
                extract(epoch from state.at) - extract(epoch from was.at)));
            state := metered._foreseen_later(state, was, times, plans);
        end if;
        if steps >= most or times > 0 then
            most := case when times > 0 or most >= 256 then 1 else most * 2 end;
            was := state;
            steps := 0;
        end if;
    end loop;
    state.said := state.said || state.live;
    return state;
end
$$;

-- Writes what becomes of a wallet that nobody touched for long (foreseen.sql): of the lots that it had, and
-- of those that are left, at their times and by the rules of duelots.sql. The other periods of a plan are one
-- lot, with the units of all of them. It comes and lapses when the last of them is over. Its reference is
-- the plan's, and from when to when.

-- The lot that the plan of another one brings for the period from a time on.
create function metered._lot_from(lot metered.lots, begins timestamptz) returns metered.lots
language plpgsql stable
as $$
begin
    lot.starts_at := begins - interval '1 microsecond';
    return metered._next_lot(lot);
end
$$;

-- A lot ends, after tip, and so many units of it go on, as was foreseen. If that is at a later time, they
-- went on before, and do so at once in the lot that lasts from at until ends.
create function metered._end_foreseen(inout tip metered.ledger, inout lot metered.lots, units bigint,
    at timestamptz, ends timestamptz, new_no bigint,
    out made metered.lots, out entries metered.ledger[], out moves metered.lot_moves[])
language plpgsql stable
as $$
declare
    was  metered.lots := lot;
    step record;
begin
    if units > 0 and at > lot.expires_at then
        lot.expires_at := at;
        lot.roll_end := ends;
    end if;
    step := metered._end_lot(tip, lot, lot.roll_cap - units, new_no);
    tip := step.tip;
    lot := step.lot;
    lot.expires_at := was.expires_at;
    lot.roll_end := was.roll_end;
    made := step.made;
    entries := step.entries;
    moves := step.moves;
end
$$;

-- The lot of so many skipped periods comes, after tip, and lapses. The first of them began at first_at, and the last one is
-- over at over. lot is the lot whose plan brings them.
create function metered._end_skipped(inout tip metered.ledger, inout lot metered.lots, periods int,
    first_at timestamptz, over timestamptz, lowered jsonb, new_no bigint,
    out made metered.lots, out entries metered.ledger[], out moves metered.lot_moves[])
language plpgsql stable
as $$
declare
    step record;
begin
    lot := metered._lot_from(lot, first_at);
    lot.no := new_no;
    lot.amount := lot.amount * periods;
    lot.pending := lot.amount;
    lot.expires_at := over;
    lot.roll_cap := null;
    lot.roll_end := null;
    lot.again := false;
    lot.reference := left(lot.reference || '/' || ltrim(metered._period_name('', over)), 255);
    lot.plan.renews := null;
    lot.plan.renew_amount := null;
    step := metered._start_lot(metered._own_entry(tip, over), lot, 0, null);
    entries := step.entries;
    moves := step.moves;
    tip := step.tip;
    tip.crossed := nullif(coalesce(lowered, tip.crossed), '{}');
    step := metered._end_lot(tip, step.lot, null, null);
    tip := step.tip;
    lot := step.lot;
    entries := entries || step.entries;
    moves := moves || step.moves;
end
$$;

-- Writes what was foreseen, after tip, as _advance has it.
create function metered._awake(inout tip metered.ledger, until timestamptz, lowered jsonb,
    unwritten bigint, state metered.idle_state, inout lots metered.lots[],
    out entries metered.ledger[], out moves metered.lot_moves[])
language plpgsql stable
as $$
declare
    was   metered.lots[] := lots;
    last  int[];        -- by units, the place of the last lot that has them
    nths  int[];        -- by place, how many periods later the last lot of the plan is
    event record;
    units metered.idle_units;
    pos   int;
    step  record;
begin
    entries := '{}';
    moves := '{}';
    for n in 1..cardinality(state.next) loop
        nths[(state.next[n]).place] := (state.next[n]).nth - 1;
    end loop;
    for event in
        with x as (select * from unnest(state.said) with ordinality)
        select x.ordinality as nth, 'ends' as what, y.at, 1 as phase, x.born, x.rank, y.units,
            coalesce(x.went_at[y.n + 1], x.ends) as goes_until
        from x, unnest(x.went_at, x.went) with ordinality y(at, units, n)
        union all
        select x.ordinality, 'ends', x.ends, 1, x.born, x.rank, 0, null
        from x where x.units > 0 and x.ends <= until
        union all
        select s.place, 'was skipped', state.over, 2, 0, s.place, 0, null
        from unnest(state.skipped) with ordinality s(periods, place) where s.periods > 0
        union all
        select x.ordinality, 'begins', x.begins, 3, x.born, x.rank, 0, null
        from x where x.begins <= until
        order by 3, 4, 5, 6
    loop
        units := state.said[event.nth];
        pos := cardinality(lots) + 1;
        case event.what
            when 'begins' then
                if units.nth = 0 then
                    pos := units.place;
                else
                    lots[pos] := metered._lot_from(was[units.place], units.begins);
                    lots[pos].no := -pos;
                end if;
                last[event.nth] := pos;
                if units.nth < nths[units.place] then
                    lots[pos].plan.renews := null;
                    lots[pos].plan.renew_amount := null;
                end if;
                step := metered._start_lot(tip, lots[pos], unwritten, -1 - cardinality(lots));
            when 'ends' then
                pos := coalesce(last[event.nth], units.place);
                tip.crossed := nullif(coalesce(lowered, tip.crossed), '{}');
                step := metered._end_foreseen(tip, lots[pos], event.units, event.at,
                    event.goes_until, -1 - cardinality(lots));
                last[event.nth] := cardinality(lots) + 1;
            else
                step := metered._end_skipped(tip, was[event.nth], state.skipped[event.nth],
                    state.first_at[event.nth], state.over, lowered, -pos);
        end case;
        tip := step.tip;
        lots[pos] := step.lot;
        entries := entries || step.entries;
        moves := moves || step.moves;
        if (step.made).no is not null then
            lots := lots || step.made;
        end if;
    end loop;
end
$$;

-- Whether units that come in a wallet pay overdraft.
create function metered._pays(lots metered.lots[], parts metered.lot_holds[],
    debts metered.lot_debts[], spent bigint) returns boolean
language plpgsql immutable
as $$
begin
    return spent + (select coalesce(sum(x.amount), 0) from unnest(parts) x where x.lot = 0) > 0
        and exists (select from unnest(lots) y
            where y.pending + y.rest + y.kept > 0 and ((y.plan).uses is null
                or (y.plan).uses && array(select x.use from unnest(debts) x where x.amount > 0)));
end
$$;

-- Applies what time alone does in a wallet up to a time, after its entry tip. lots are those that it
-- changes, and those on which that depends (_load_due). lines are in their order, and parts first those
-- of the lines, and then the overdrawn ones of other holds. spent is overdraft that no hold keeps, of
-- which debts were drawn for uses. unwritten are units of other lots that have ended. lowered are the
-- thresholds that are reported after all this, which entries remember from the first one on that lowers
-- the balance. Where it is null, nobody has judged them: entries remember those of tip, but for what a
-- lot arms that begins.
create function metered._advance(inout tip metered.ledger, until timestamptz, lowered jsonb,
    unwritten bigint, lines metered.due_line[], inout lots metered.lots[],
    inout parts metered.lot_holds[], inout debts metered.lot_debts[], inout spent bigint,
    out entries metered.ledger[], out moves metered.lot_moves[])
language plpgsql stable
as $$
declare
    at   timestamptz := tip.at;
    idle boolean := metered._is_idle(lots, until);
    step record;
begin
    entries := '{}';
    moves := '{}';
    loop
        -- One event after the other, as long as units that come pay overdraft, or holds fall due.
        if not idle then
            at := until;
        elsif cardinality(lines) > 0 then
            at := lines[cardinality(lines)].due;
        elsif metered._pays(lots, parts, debts, spent) then
            at := least(until, at + interval '480:00');
        else
            begin
                step := metered._awake(tip, until, lowered, unwritten,
                    metered._foreseen(lots, until), lots);
                tip := step.tip;
                lots := step.lots;
                entries := entries || step.entries;
                moves := moves || step.moves;
                return;
            exception when sqlstate 'MT010' then
                at := until;        -- where a zone is lost, the event that meets it says which
            end;
        end if;
        step := metered._advance_each(tip, at, lowered, unwritten, lines, lots, parts, debts, spent);
        tip := step.tip;
        lots := step.lots;
        parts := step.parts;
        debts := step.debts;
        spent := step.spent;
        entries := entries || step.entries;
        moves := moves || step.moves;
        exit when at >= until;
        lines := '{}';
        idle := metered._is_idle(lots, until);
    end loop;
end
$$;

-- How what is due in a wallet is written, under the wallet's lock, before anything else: _settle loads
-- it (lapses.sql), applies the rules (advance.sql, duelots.sql), and appends the entries and moves that these say.
--
-- Nobody draws a lot that has ended, and its lapse changes no other lot. So a call writes the ends of the first few lots, and leaves the
-- others to later calls. Then lots_end of its entry is not later than the entry: the wallet lags. The balance of an entry that lags contains
-- units of lots that have ended. Overdraft is then in lot_holds: of holds as ever, and spent units under seq 0.

-- How many ends of lots one call writes at most, of those that it could leave to later calls. Inlined wherever it stands.
create function metered._ends_per_call() returns int
language sql immutable
as $$
    select 32
$$;

-- Whether lots have ended by the time of an entry, and their ends are not written. Inlined wherever it stands.
create function metered._lags(e metered.ledger) returns boolean
language sql immutable
as $$
    select coalesce(e.lots_end <= e.at, false)
$$;

-- How many units a wallet is overdrawn by, as of its last entry. A plan that was bought in a period which is over brings lots that have
-- ended by the entry before them: they pay nothing, until their ends are written.
create function metered._debt(tip metered.ledger) returns bigint
language plpgsql stable
as $$
begin
    if metered._lags(tip) then
        return (select coalesce(sum(k.amount), 0) from metered.lot_holds k where k.scope = tip.scope and k.lot = 0);
    end if;
    return greatest(0, (select coalesce(sum(x.rest), 0) from (select y.rest from metered.lots y
        where y.scope = tip.scope and y.open and y.expires_at <= tip.at order by y.expires_at, y.age) x) - metered._balance(tip));
end
$$;

-- Notes units that a wallet which lags has spent beyond its lots, or (less than 0) that were paid back.
create function metered._owe(of_scope text, units bigint) returns void
language plpgsql volatile
as $$
begin
    insert into metered.lot_holds as k (scope, seq, lot, amount) values (of_scope, 0, 0, units)
    on conflict (scope, seq, lot) do update set amount = k.amount + excluded.amount;
    delete from metered.lot_holds k where k.scope = of_scope and k.seq = 0 and k.lot = 0 and k.amount = 0;
end
$$;

-- When the next lot of a wallet ends, of those that have a rest or are held, or begins: infinity, if none does.
create function metered._next_end(of_scope text, clk timestamptz) returns timestamptz
language plpgsql stable
as $$
begin
    return least(
        coalesce((select y.expires_at from metered.lot_rows y where y.scope = of_scope and y.open and y.expires_at > clk order by y.expires_at, y.age limit 1), 'infinity'),
        -- Held, and used up otherwise: by its end, since a lot may have parts of many holds.
        case when exists (select from metered.lot_holds k where k.scope = of_scope and k.lot > 0) then
            coalesce((select y.expires_at from metered.lots y
                where y.scope = of_scope and y.expires_at > clk and y.expires_at < 'infinity'
                  and y.held > 0 and not y.open and not y.keeps
                order by y.expires_at, y.no limit 1), 'infinity') end,
        coalesce((select y.expires_at from metered.lot_rows y where y.scope = of_scope and y.keeps and y.expires_at > clk order by y.expires_at, y.age limit 1), 'infinity'),
        coalesce((select y.starts_at from metered.lot_rows y where y.scope = of_scope and y.pending > 0 and y.starts_at > clk order by y.starts_at, y.age limit 1), 'infinity'));
end
$$;

-- Notes the lot of the next period if lot renews, which began with the entry at_seq, and returns its number. It has no
-- reference if another lot has that one.
create function metered._renew_lot(lot metered.lots, at_seq bigint) returns bigint
language plpgsql volatile
as $$
declare
    follows metered.lots;
begin
    if ((lot.plan).renews).every is not null then
        follows := metered._next_lot(lot);
        follows.granted_seq := at_seq;
        follows.last_seq := at_seq;
        if exists (select from metered.lot_rows y where y.scope = lot.scope and y.reference = follows.reference) then
            follows.reference := null;
        end if;
        follows.no := metered._note_lot(follows);
        lot.plan.renews := null;
        lot.plan.renew_amount := null;
        update metered.lot_rows y set plan = lot.plan where y.no = lot.no;
    end if;
    return follows.no;
end
$$;

-- Notes a lot that begins later.
create function metered._note_lot(lot metered.lots) returns bigint
language plpgsql volatile
as $$
declare
    made bigint;
begin
    insert into metered.lot_rows (no, granted_at, expires_at, granted_seq, last_seq, amount, rest, roll_cap, roll_no, roll_end, late,
        priority, origin, open, scope, category, reference, fingerprint, pending, starts_at, again, plan, age)
    overriding system value
    values (metered._next_number('lot_rows'), lot.starts_at, lot.expires_at, lot.granted_seq, lot.last_seq, lot.amount, 0, lot.roll_cap,
        case when lot.roll_cap is not null then metered._next_number('lot_rows') end, lot.roll_end, lot.late,
        lot.priority, 'g', false, lot.scope, lot.category, lot.reference, lot.fingerprint, lot.amount, lot.starts_at, metered._again(lot.plan), lot.plan,
        metered._age(null, lot.starts_at, lot.granted_seq))
    on conflict do nothing
    returning no into made;
    if made is null then
        perform metered._collided();
    end if;
    return made;
end
$$;

-- Writes all that is due in a wallet by clk: ends of holds, whose rows it locks, and ends and beginnings
-- of lots. It ends the first max_lots lots (null: all) of those that it could leave to later calls, and
-- those that go on, as far as a caller could draw so many units of them. Where more lines of holds are
-- due than one step writes, those that only give units back are freed as sums, and the rows of holds are
-- left to sweeps, as _free_in_sum does it. A call fails where more of the others are due (_refuse_behind).
-- tip is the last entry, under the wallet's lock. The result is the last entry after that, with the
-- lots_end of the next one, without the caller, operation and note of tip. lowered are the thresholds
-- that are reported after these ends and the caller's own entry, if it has judged them (_advance).
create function metered._settle_lowered(tip metered.ledger, clk timestamptz, max_lots int, units bigint,
    lowered jsonb, wait_ms int) returns metered.ledger
language plpgsql volatile
as $$
declare
    own       metered.ledger := metered._own_entry(tip, tip.at);
    until     timestamptz := greatest(clk, tip.at);
    nos       bigint[] := '{}';    -- holds whose lines are ended: null for sums
    due       record;
    after     record;
    before    text;
    unwritten bigint := 0;
    most      int := metered._events_per_step();
    called    boolean := max_lots = metered._ends_per_call();      -- by no step
begin
    if tip.next_due <= clk then
        nos := array(select x.hold from metered.hold_lines x
            where x.scope = tip.scope and x.open > 0 and x.due >= tip.next_due and x.due <= clk
            order by x.due limit case when tip.next_due > '-infinity' then most + 1 end);
        if called and cardinality(nos) > most and metered._lines_until(tip, clk) < clk then
            perform metered._refuse_behind(tip.scope);
        end if;
        before := metered._bound_lock_wait(wait_ms);
        if cardinality(nos) > most and tip.next_due > '-infinity' then
            if metered._one_snapshot() then     -- it may not see that a hold was extended: then this is 40001
                perform from metered.holds h where h.no = any (array(
                    select x.hold from metered.hold_lines x where x.scope = tip.scope
                      and x.open > 0 and x.due >= tip.next_due and x.due <= clk))
                order by h.no for share;
            end if;
            nos := null;
        else
            nos := array(select y.no from (
                select h.no from metered.holds h where h.no = any (nos) and (h.due <= clk) is true
                order by h.no for no key update) y);
            perform metered._end_rows(nos, clk, (metered._by_system()).note, false);
        end if;
        before := metered._unbound_lock_wait(before);
        if lowered is not null then
            select y.crossed into own.crossed from metered.ledger y where y.scope = tip.scope and y.seq = tip.seq;
        end if;
    end if;
    due := metered._load_due(tip, clk, max_lots, units, nos, nos is null, null);
    if cardinality(due.lines) > most and due.lines[most].due < clk then
        if called then
            perform metered._refuse_behind(tip.scope);
        end if;
        clk := due.lines[most].due;
        until := greatest(clk, tip.at);
        due := metered._load_due(tip, clk, max_lots, units, nos, nos is null, null);
    end if;
    if due.stop is not null and coalesce(lowered, own.crossed) is not null then
        unwritten := metered._unwritten(tip.scope, until, due.lots);
    end if;
    after := metered._advance(own, until, lowered, unwritten, due.lines, due.lots, due.parts, due.debts,
        due.spent);
    own := after.tip;
    own.lots_end := least(due.stop, case when due.stop is null then metered._next_end(tip.scope, until) end,
        (select min(metered._turn_at(x)) from unnest(after.lots) x
         where x.pending + x.rest + x.kept + x.held > 0 and metered._turn_at(x) > until));
    if cardinality(after.entries) = 0 and metered._lags(tip) and own.lots_end > until then
        own.lots_end := tip.lots_end;     -- a caller may write nothing, and the last entry lags. The next charge catches up
    end if;
    if cardinality(after.entries) > 0 then
        own.next_due := metered._write_lines(tip, own, clk, nos is null, due.lines);
        perform metered._write_due(tip, own, after.entries, after.moves, due.lots, after.lots,
            due.parts, after.parts, due.debts, after.debts, after.spent);
        own.others := metered._others(own.scope, own.seq);
    end if;
    own.crossed := nullif(coalesce(lowered, own.crossed), '{}');
    return own;
end
$$;

-- The same for a caller that judges no thresholds before.
create function metered._settle(tip metered.ledger, clk timestamptz, max_lots int, units bigint,
    wait_ms int) returns metered.ledger
language plpgsql volatile
as $$
begin
    return metered._settle_lowered(tip, clk, max_lots, units, null, wait_ms);
end
$$;

-- Writes that lines of holds of a wallet have ended. The rows of lines that came as sums are left to
-- sweeps, with their parts of lots. Returns next_due of the entries, of which entry is the last.
create function metered._write_lines(tip metered.ledger, entry metered.ledger, clk timestamptz, in_sum boolean,
    lines metered.due_line[]) returns timestamptz
language plpgsql volatile
as $$
begin
    if cardinality(lines) = 0 then
        return entry.next_due;
    end if;
    -- Without a join, which can be one that reads all lines of the scope for each of these.
    update metered.hold_lines y set open = 0,
        captured = y.captured + least(y.open, greatest(0, y.at_least - y.captured))
    where y.hold = any (array(select l.hold from unnest(lines) l)) and y.scope = tip.scope;
    return case when tip.next_due = '-infinity' then tip.next_due when entry.held > 0 then
        metered._later_due(tip.scope, case when in_sum then clk + interval '1 microsecond' else tip.next_due end, clk) end;
end
$$;

-- Appends entries that no caller asked for. entry is the last entry, and has lots_end and next_due of
-- all.
create function metered._append_all(entry metered.ledger, entries metered.ledger[]) returns void
language plpgsql volatile
as $$
declare
    made int;
    was  bigint := metered._others(entry.scope, entries[1].seq - 1);
begin
    if cardinality(entries) > 0 then
        insert into metered.ledger (seq, amount, at, spent, refunded, credited, held, epoch, kind, scope, next_due, hold, operation_tenant, operation, note, anchor_at, anchor_spent, lots_end, crossed, tallied, others)
        select x.seq, x.amount, x.at, x.spent, x.refunded, x.credited, x.held, x.epoch, x.kind, x.scope, entry.next_due, x.hold, x.operation_tenant, x.operation, x.note, x.anchor_at, x.anchor_spent, entry.lots_end, x.crossed, x.tallied, coalesce(was, 0) + count(*) filter (where x.kind not in ('c', 'u')) over (order by x.seq)
        from unnest(entries) x on conflict do nothing;
        get diagnostics made = row_count;
        if made < cardinality(entries) then
            perform metered._collided();
        end if;
        perform metered._mark_freed(entry.scope);
    end if;
end
$$;

-- Writes moves of lots, and these lots after them. A lot of a move that has no row yet has its
-- number in nos.
create function metered._write_moves(of_scope text, moves metered.lot_moves[], lots metered.lots[],
    nos bigint[]) returns void
language plpgsql volatile
as $$
begin
    insert into metered.lot_moves (scope, seq, nth, lot, kind, amount, version,
        rest, drawn, held, kept)
    select of_scope, m.seq, m.nth, case when m.lot < 0 then nos[-m.lot] else m.lot end, m.kind,
        m.amount, m.version, m.rest, m.drawn, m.held, m.kept
    from unnest(moves) m;
    update metered.lot_rows y set pending = x.pending, open = x.open, keeps = x.keeps,
        granted_at = x.granted_at, granted_seq = x.granted_seq,
        lapsed = x.lapsed, untold = x.untold,
        revoked = x.revoked, rolled = x.rolled, roll_cap = x.roll_cap, again = x.again,
        plan = x.plan, age = x.age
    from unnest(lots) x
    where y.no = x.no
      and (y.pending, y.open, y.keeps, y.lapsed, y.revoked, y.rolled, y.plan) is distinct from
        (x.pending, x.open, x.keeps, x.lapsed, x.revoked, x.rolled, x.plan);
end
$$;

-- Appends entries after tip, and the moves of their lots, which were lots before and are after them. Those that have no row get one.
-- entry is the last entry, and has lots_end and next_due of all.
create function metered._write_due(tip metered.ledger, entry metered.ledger, entries metered.ledger[],
    moves metered.lot_moves[], lots metered.lots[], after metered.lots[],
    parts metered.lot_holds[], parts_after metered.lot_holds[],
    debts metered.lot_debts[], debts_after metered.lot_debts[], spent bigint) returns void
language plpgsql volatile
as $$
declare
    old  int := cardinality(lots);
    nos  bigint[] := '{}';         -- of lots by place
    made int;
begin
    for pos in 1..cardinality(after) loop
        nos := nos || case when after[pos].no < 0 then metered._next_number('lot_rows') else after[pos].no end;
        if after[pos].from_lot < 0 then
            after[-after[pos].from_lot].roll_no := nos[pos];
        end if;
    end loop;
    perform metered._append_all(entry, entries);
    perform metered._write_moves(tip.scope, moves, array(select after[n]
        from generate_series(1, old) n
        where after[n].version is distinct from lots[n].version), nos);
    insert into metered.lot_rows (no, granted_at, expires_at, granted_seq, last_seq, amount, rest, lapsed, rolled, untold, roll_cap, roll_no, roll_end,
        late, from_lot, priority, origin, open, scope, category, reference, fingerprint, pending, starts_at, again, plan, keeps, age)
    overriding system value
    select nos[n], x.granted_at, x.expires_at, x.granted_seq, x.granted_seq, x.amount, 0, x.lapsed, x.rolled, x.untold, x.roll_cap,
        coalesce(x.roll_no, case when x.roll_cap is not null then metered._next_number('lot_rows') end), x.roll_end,
        x.late, case when x.from_lot < 0 then nos[-x.from_lot] else x.from_lot end, x.priority, x.origin, x.open, x.scope, x.category,
        case when 0 = (select count(*) from metered.lot_rows y where y.scope = x.scope and y.reference = x.reference) then x.reference end,
        x.fingerprint, x.pending, x.starts_at, x.again, x.plan, x.keeps, x.age
    from unnest(after[old + 1:]) with ordinality x, lateral (select (old + x.ordinality)::int as n) p on conflict do nothing;
    get diagnostics made = row_count;
    if made < cardinality(after) - old then
        perform metered._collided();
    end if;
    if parts is distinct from parts_after then
        delete from metered.lot_holds o where o.scope = tip.scope and o.seq = any (array(select k.seq from unnest(parts) k));
        insert into metered.lot_holds (scope, seq, lot, amount)
        select tip.scope, k.seq, case when k.lot < 0 then nos[-k.lot] else k.lot end, sum(k.amount)::bigint
        from unnest(parts_after) k where k.amount > 0 group by 2, 3;
    end if;
    perform metered._write_debts(tip.scope, debts, debts_after);
    if metered._lags(tip) or metered._lags(entry) then
        delete from metered.lot_holds k where k.scope = tip.scope and k.seq = 0;
        if metered._lags(entry) and spent > 0 then
            perform metered._owe(tip.scope, spent);
        end if;
    end if;
end
$$;

-- _settle_lowered for an entry that is to be written: entry is the result of _next_entry.
create function metered._after_due_lowered(entry metered.ledger, units bigint, lowered jsonb, wait_ms int)
returns metered.ledger
language plpgsql volatile
as $$
declare
    tip metered.ledger := entry;
begin
    if entry.lots_end <= entry.at or entry.lots_end is not null and entry.next_due <= entry.at then
        tip.seq := entry.seq - 1;
        select y.at into tip.at from metered.ledger y where y.scope = entry.scope and y.seq = tip.seq;
        tip := metered._settle_lowered(tip, least(entry.at, metered.clock()), metered._ends_per_call(), units,
            lowered, wait_ms);
        entry.seq := tip.seq + 1;
        entry.at := greatest(entry.at, tip.at);
        entry.spent := tip.spent;
        entry.credited := tip.credited;
        entry.held := tip.held;
        entry.next_due := tip.next_due;
        entry.lots_end := tip.lots_end;
        entry.crossed := tip.crossed;
    end if;
    entry.crossed := nullif(coalesce(lowered, entry.crossed), '{}');
    return entry;
end
$$;

-- The same for a caller that judges no thresholds before.
create function metered._after_due(e metered.ledger, units bigint, wait_ms int) returns metered.ledger
language plpgsql volatile
as $$
begin
    return metered._after_due_lowered(e, units, null, wait_ms);
end
$$;

-- What a fold of a wallet's time needs (_advance), and readers, who answer from it.

-- What is due in a wallet by clk: lots that begin or end, lines of holds, and what these depend on.
-- Of lots whose end changes no other lot, and that no due line keeps units of, it has the first
-- max_lots (null: all), and those that go on, as far as a caller could draw so many units of them.
-- stop is the end of the first of the others. nos are holds, or null for all that are due: then lines
-- of which each gives units back, and nothing else, come as sums, if whoever asks writes none of their
-- rows (in_sum). With of_lots, it has these lots too.
create function metered._load_due(tip metered.ledger, clk timestamptz, max_lots int, units bigint,
    nos bigint[], in_sum boolean, of_lots bigint[],
    out lots metered.lots[], out lines metered.due_line[], out parts metered.lot_holds[],
    out debts metered.lot_debts[], out spent bigint, out stop timestamptz)
language plpgsql stable
as $$
declare
    until timestamptz := greatest(clk, tip.at);
    debt  bigint := metered._debt(tip);
    due   record;
    load  bigint[] := of_lots;
    ended bigint[];
    beyond bigint;      -- the first lot that is perhaps left
    first timestamptz;  -- when the first lot ends that shares a cap
    shared text[];      -- the categories of these
    few   record;
begin
    lines := '{}';
    parts := '{}';
    debts := '{}';
    if tip.next_due <= clk then
        due := metered._load_lines(tip, clk, nos, in_sum and debt = 0, max_lots = 0);
        lines := due.lines;
        parts := due.parts;
        load := load || array(select k.lot from unnest(parts) k where k.lot > 0);
    end if;
    if (max_lots = 0) is not true or tip.lots_end <= until then
        ended := array(select y.no from metered.lot_rows y
            where y.scope = tip.scope and y.open and y.expires_at <= until
            order by y.expires_at, y.age limit max_lots + 1);
        beyond := ended[max_lots + 1];
        -- Each in the order of its index, which keeps the planner from the index of all.
        load := load
            || array(select y.no from metered.lot_rows y
                where y.scope = tip.scope and y.pending > 0 and y.starts_at <= until
                order by y.starts_at, y.age)
            || array(select y.no from metered.lot_rows y
                where y.scope = tip.scope and y.open and y.again and y.expires_at <= until
                order by y.expires_at, y.age)
            || array(select y.no from metered.lot_rows y
                where y.scope = tip.scope and y.keeps and y.roll_cap is not null
                  and y.expires_at <= until order by y.expires_at, y.age)
            || ended[:coalesce(max_lots, cardinality(ended))]
            || array(select y.no from metered.lot_rows y
                where y.scope = tip.scope and y.keeps and y.roll_cap is null
                  and y.expires_at <= until order by y.expires_at, y.age limit max_lots)
            || metered._load_rolling(tip.scope, until, case when beyond is not null then units end);
    end if;
    -- A join without the limit can be one that reads all lots.
    select array(select l from (select distinct n from unnest(load) n) x,
        lateral (select z from metered.lots z where z.no = x.n limit 1) y(l)
        order by (l).expires_at, (l).age) into lots;
    if beyond = any (load) then
        stop := (select y.expires_at from metered.lot_rows y
            where y.scope = tip.scope and y.open and y.expires_at <= until and y.no <> all (load)
            order by y.expires_at, y.age limit 1);
    else
        stop := (select y.expires_at from metered.lot_rows y where y.no = beyond);
    end if;
    first := (select min(x.expires_at) from unnest(lots) x
        where (x.plan).roll_shared and x.expires_at <= until);
    if first is not null then
        shared := array(select distinct x.category from unnest(lots) x where (x.plan).roll_shared);
        lots := lots || array(select l from (
                select y.no from unnest(shared) c, lateral (select z.no from metered.lot_rows z
                    where z.scope = tip.scope and z.category = c and z.origin = 'r'
                      and (z.open or z.keeps) and z.expires_at > first order by z.expires_at) y
                union select k.lot from metered.lot_holds k
                where k.scope = tip.scope and k.lot > 0) n,
            lateral (select z from metered.lots z where z.no = n.no limit 1) y(l)
            where n.no <> all (load) and (l).category = any (shared) and (l).origin = 'r'
              and (l).expires_at > first and ((l).plan).roll_shared
              and (l).rest + (l).kept + (l).held > 0);
    end if;
    few := metered._load_debt(tip.scope, debt, parts);
    parts := few.parts;
    debts := few.debts;
    spent := few.spent;
end
$$;

-- What is owed in a wallet that is overdrawn by so many units: the parts of overdrawn holds, after
-- those that are there, and what is spent, of which debts were drawn for uses.
create function metered._load_debt(of_scope text, owed bigint, inout parts metered.lot_holds[],
    out debts metered.lot_debts[], out spent bigint)
language plpgsql stable
as $$
begin
    debts := '{}';
    if owed > 0 then
        parts := parts || array(select row(o.*)::metered.lot_holds from metered.lot_holds o
            where o.scope = of_scope and o.seq = any (array(select z.seq from metered.lot_holds z
                where z.scope = of_scope and z.lot = 0 and z.seq > 0))
              and o.seq <> all (array(select k.seq from unnest(parts) k)) order by o.seq, o.lot);
        debts := metered._load_debts(of_scope);
    end if;
    spent := owed - (select coalesce(sum(k.amount), 0) from unnest(parts) k where k.lot = 0);
end
$$;

-- The first lots of a wallet that have ended, and go on, as far as a caller could draw so many units
-- of those.
create function metered._load_rolling(of_scope text, until timestamptz, units bigint)
returns bigint[]
language plpgsql stable
as $$
declare
    nos     bigint[] := '{}';
    its_lot metered.lots;
begin
    if (units > 0) is not true then
        return nos;
    end if;
    for its_lot in
        select y.* from metered.lots y
        where y.scope = of_scope and y.open and y.roll_cap is not null
          and y.expires_at <= until and y.roll_end > until
        order by y.priority, y.roll_end, y.age
    loop
        nos := nos || its_lot.no;
        units := units - metered._rolls(its_lot);
        exit when units <= 0;
    end loop;
    return nos;
end
$$;

-- Due lines of a wallet, in their order, and their parts: of the holds nos, or of all (null). In a sum,
-- those that fall due between the same ends of their own lots are one (_sum_lines), and lines with minima are
-- alone, unless these are in sums, too.
create function metered._load_lines(tip metered.ledger, clk timestamptz, nos bigint[], in_sum boolean,
    minima_too boolean, out lines metered.due_line[], out parts metered.lot_holds[])
language plpgsql stable
as $$
declare
    sums record;
begin
    if in_sum then
        sums := metered._sum_lines(tip, clk, minima_too);
        nos := case when minima_too then '{}' else array(
            select y.hold from metered.hold_lines y
            where y.scope = tip.scope and y.open > 0 and y.at_least > 0 and y.at_least > y.captured
              and y.due >= tip.next_due and y.due <= clk) end;
    elsif nos is null then
        nos := array(select y.hold from metered.hold_lines y
            where y.scope = tip.scope and y.open > 0 and y.due >= tip.next_due and y.due <= clk);
    end if;
    select coalesce(array_agg(row(y.hold, y.due, y.opened_seq, y.open, y.minimum, h.id,
            v.operation_tenant, v.operation, e.note ->> 'use')::metered.due_line
            order by y.due, y.opened_seq), '{}')
    into lines
    from (select z.*, least(z.open, greatest(0, z.at_least - z.captured)) as minimum
          from metered.hold_lines z where z.hold = any (nos) and z.scope = tip.scope and z.open <> 0
            and z.due >= tip.next_due and z.due <= clk) y
        left join lateral (select z.id from metered.holds z where z.no = y.hold) h on true
        left join lateral (select z.operation_tenant, z.operation from metered.hold_events z
            where y.minimum > 0 and z.hold = y.hold and z.version = 1) v on true
        left join lateral (select z.note from metered.ledger z
            where y.minimum > 0 and z.scope = tip.scope and z.seq = y.opened_seq) e on true;
    -- The order keeps the planner from a join that reads all parts of the wallet for each line.
    select array(select row(o.*)::metered.lot_holds
            from unnest(lines) with ordinality l, lateral (
                select z.* from metered.lot_holds z
                where z.scope = tip.scope and z.seq = l.opened_seq order by z.lot) o
            order by l.ordinality, o.lot)
    into parts;
    if in_sum then
        lines := lines || sums.lines;
        select array(select l from unnest(lines) l order by l.due, l.opened_seq),
            array(select k from unnest(parts || sums.parts) k, unnest(lines) l
                where l.opened_seq = k.seq order by l.due, k.seq, k.lot)
        into lines, parts;
    end if;
end
$$;

-- The due lines of a wallet that only give units back, and their parts, as a line for all that fall due
-- between the same ends of their own lots, at the time of the last. With minima, these come as another
-- such line, whose number is below 0, and which captures its parts whole. Of few lines the parts are
-- looked up, and of many those of the wallet are read, once.
create function metered._sum_lines(tip metered.ledger, clk timestamptz, minima_too boolean,
    out lines metered.due_line[], out parts metered.lot_holds[])
language plpgsql stable
set enable_nestloop = off
as $$
declare
    bounds timestamptz[] := array(select distinct y.expires_at from metered.lot_rows y
        where y.scope = tip.scope and y.expires_at > tip.next_due and y.expires_at <= clk
        order by y.expires_at);
    many boolean := 1000 < (select count(*) from (select from metered.hold_lines l
        where l.scope = tip.scope and l.open > 0 and l.due >= tip.next_due and l.due <= clk
        limit 1001) x);
begin
    with due as not materialized (
        select y.due, y.opened_seq, y.open,
            least(y.open, greatest(0, y.at_least - y.captured)) as minimum
        from metered.hold_lines y
        where y.scope = tip.scope and y.open > 0 and y.due >= tip.next_due and y.due <= clk
          and (minima_too or y.at_least <= y.captured)),
    held as (
        select d.*, z.lot, z.amount from due d, lateral (
            select k.lot, k.amount from metered.lot_holds k
            where k.scope = tip.scope and k.seq = d.opened_seq order by k.lot) z
        where not many
        union all
        select d.*, k.lot, k.amount from due d join metered.lot_holds k on k.seq = d.opened_seq
        where many and k.scope = tip.scope),
    -- Between ends of any lots of the wallet.
    sums as (
        select h.lot, sum(h.amount - h.taken)::bigint as freed, sum(h.taken)::bigint as taken,
            max(h.due) filter (where h.open > h.minimum) as due,
            max(h.opened_seq) filter (where h.open > h.minimum) as seq,
            max(h.due) filter (where h.minimum > 0) as taken_due,
            max(h.opened_seq) filter (where h.minimum > 0) as taken_seq
        from (select y.*, width_bucket(y.due, bounds) as span, case when y.minimum = 0 then 0
                  when y.amount = y.open then y.minimum
                  else metered._taken_of(tip.scope, y.opened_seq, y.lot, y.minimum) end as taken
              from held y) h
        group by h.span, h.lot),
    ends as (
        select array_agg(distinct r.expires_at order by r.expires_at)
            filter (where r.expires_at <= clk) as own
        from (select distinct s.lot from sums s) x, lateral (
            select z.expires_at from metered.lot_rows z where z.no = x.lot limit 1) r),
    kept as (
        select x.lot, x.units, x.due,
            max(x.seq) over (partition by x.span, x.sign) * x.sign as seq, x.sign
        from (select width_bucket(coalesce(s.due, s.taken_due), coalesce(e.own, '{}')) as span,
                  s.lot, p.*
              from ends e, sums s, lateral (values (1, s.freed, s.due, s.seq),
                  (-1, s.taken, s.taken_due, s.taken_seq)) p(sign, units, due, seq)
              where p.units > 0) x),
    lined as (
        select k.seq, max(k.due) as due, sum(k.units)::bigint as units from kept k group by k.seq)
    select array(select row(null, l.due, l.seq, l.units, case when l.seq < 0 then l.units else 0 end,
                null, null, null, null)::metered.due_line from lined l order by l.due, l.seq),
        array(select row(k.seq, k.lot, sum(k.units)::bigint, tip.scope)::metered.lot_holds
            from kept k join lined l on l.seq = k.seq
            group by l.due, k.seq, k.lot order by l.due, k.seq, k.lot)
    into lines, parts;
end
$$;

-- How many units of a lot a hold captures with a minimum: its lots give them in their order.
create function metered._taken_of(of_scope text, opened_seq bigint, of_lot bigint, minimum bigint)
returns bigint
language plpgsql stable
as $$
begin
    return (select x.taken
        from (select z.lot, greatest(0, least(z.amount, minimum + z.amount - sum(z.amount) over (
                  order by r.priority, r.expires_at, r.age))) as taken
              from metered.lot_holds z, lateral (select y.priority, y.expires_at, y.age
                  from metered.lot_rows y where y.no = z.lot limit 1) r
              where z.scope = of_scope and z.seq = opened_seq) x
        where x.lot = of_lot);
end
$$;

-- The lots of a wallet that are due, and those on which they depend, after all that is due. lapsed is
-- how many units of its balance have lapsed with them, less those that began, and debt by how many units
-- the wallet is overdrawn then. crossed are the reported thresholds that no lot has armed which began:
-- units of the lots that are not loaded count as lapsed before that.
create function metered._due_lots(tip metered.ledger, clk timestamptz,
    out lots metered.lots[], out lapsed bigint, out debt bigint, out crossed jsonb)
language plpgsql stable
as $$
declare
    until timestamptz := greatest(clk, tip.at);
    unwritten bigint := 0;
    due   record;
    after record;
begin
    if (tip.next_due <= clk or tip.lots_end <= until) is not true then
        lots := '{}';
        lapsed := 0;
        debt := metered._debt(tip);
        crossed := tip.crossed;
        return;
    end if;
    due := metered._load_due(tip, clk, 0, 0, null, true, null);
    if tip.crossed is not null and exists (select from unnest(due.lots) x where x.pending > 0) then
        unwritten := metered._unwritten(tip.scope, until, due.lots);
    end if;
    after := metered._advance(tip, until, null, unwritten, due.lines, due.lots, due.parts, due.debts,
        due.spent);
    lots := after.lots;
    crossed := (after.tip).crossed;
    lapsed := tip.credited - (after.tip).credited;
    debt := after.spent + (select coalesce(sum(k.amount), 0) from unnest(after.parts) k where k.lot = 0);
end
$$;

-- Units of the lots of a wallet that have ended, without those that are loaded.
create function metered._unwritten(of_scope text, until timestamptz, loaded metered.lots[])
returns bigint
language plpgsql stable
as $$
begin
    return (select coalesce(sum(x.rest), 0) from (select y.rest from metered.lots y
        where y.scope = of_scope and y.open and y.expires_at <= until
          and y.no <> all (array(select l.no from unnest(loaded) l)) order by y.expires_at, y.age) x);
end
$$;

-- Units of a wallet that have lapsed by now, unwritten: so much too high is its last entry's balance, with the units that due holds free.
create function metered._lapsing(tip metered.ledger, clk timestamptz) returns bigint
language plpgsql stable
as $$
declare
    due record := metered._due_lots(tip, clk);
begin
    return metered._lapsing_after(tip, clk, due.lots, due.lapsed, due.debt);
end
$$;

-- The same, after _due_lots. It reads no more ended lots than a call writes. If there are more, it adds up the lots that have not ended.
create function metered._lapsing_after(tip metered.ledger, clk timestamptz, lots metered.lots[], lapsed bigint, debt bigint)
returns bigint
language plpgsql stable
as $$
declare
    until timestamptz := greatest(clk, tip.at);
    nos   bigint[];
    few   record;
begin
    if (tip.lots_end <= until) is not true then
        return lapsed;
    end if;
    nos := array(select x.no from unnest(lots) x where x.no > 0);
    select count(*) as n, sum(x.rest - case when x.roll_end > until then metered._rolls(x) else 0 end) as units into few
    from (select y.* from metered.lots y where y.scope = tip.scope and y.open and y.expires_at <= until and y.no <> all (nos)
          order by y.expires_at, y.age limit metered._ends_per_call() + 1) x;
    if few.n <= metered._ends_per_call() then
        return lapsed + coalesce(few.units, 0);
    end if;
    return metered._balance(tip) + case when tip.next_due <= clk then metered._due_units(tip.scope, tip.next_due, clk) - metered._minima(tip, null, clk) else 0 end
        + debt - (select coalesce(sum(x.rest), 0) from unnest(lots) x where (x.plan).uses is null)
        - (select coalesce(sum(x.rest), 0) from (select y.rest from metered.lots y
            where y.scope = tip.scope and y.open and y.expires_at > until and y.no <> all (nos) order by y.expires_at, y.age) x)
        - (select coalesce(sum(x.rest), 0) from (select y.rest from metered.lots y     -- applied to a use
            where y.scope = tip.scope and y.keeps and y.expires_at > until and y.no <> all (nos) order by y.expires_at, y.age) x)
        - (select coalesce(sum(x.units), 0) from (select metered._rolls(y) as units from metered.lots y
            where y.scope = tip.scope and y.open and y.roll_cap is not null and y.expires_at <= until and y.roll_end > until and y.no <> all (nos)
            order by y.priority, y.roll_end, y.age) x);
end
$$;

-- The lots of a wallet that have a rest or are held, as they are after all ends that are due. With of_nos, these lots and those that they go on in.
-- One that nobody has written yet and that has no number set aside has none.
create function metered._lots_now(tip metered.ledger, clk timestamptz, of_nos bigint[]) returns setof metered.lots
language plpgsql stable
as $$
begin
    return query select * from metered._lots_after(tip, clk, of_nos, (metered._due_lots(tip, clk)).lots);
end
$$;

-- The same, after _due_lots, of which due are the lots.
create function metered._lots_after(tip metered.ledger, clk timestamptz, of_nos bigint[], due metered.lots[])
returns setof metered.lots
language plpgsql stable
as $$
declare
    until   timestamptz := greatest(clk, tip.at);
    nos     bigint[] := array(select x.no from unnest(due) x where x.no > 0);
    family  bigint[] := of_nos;      -- and all that they went on in
    its_lot metered.lots;
begin
    foreach its_lot in array due loop
        if its_lot.no = any (family) or its_lot.from_lot = any (family) then
            family := family || its_lot.no;
        else
            continue when of_nos is not null;
        end if;
        if its_lot.rest + its_lot.kept + its_lot.held > 0 then
            its_lot.no := case when its_lot.no > 0 then its_lot.no end;
            return next metered._as_rest(its_lot);
        end if;
    end loop;
    for its_lot in
        -- In the order of the index of open lots, which is read without a sort: that keeps the planner from the index of all.
        select y.* from ((select x.no from metered.lot_rows x where of_nos is null and x.scope = tip.scope and x.open order by x.expires_at, x.age)
                         union select k.lot from metered.lot_holds k where of_nos is null and k.scope = tip.scope and k.lot > 0
                         union (select x.no from metered.lot_rows x where of_nos is null and x.scope = tip.scope and x.keeps order by x.priority, x.expires_at, x.age)
                         union select unnest(of_nos)) n,
            -- A join without the limit can be one that reads all lots.
            lateral (select z.* from metered.lots z where z.no = n.no limit 1) y
        where y.no <> all (nos)
    loop
        its_lot.rest := its_lot.rest + its_lot.kept;
        its_lot.kept := 0;
        while its_lot.rest > 0 and its_lot.expires_at <= until loop
            if its_lot.held > 0 then
                its_lot.rest := 0;
                return next its_lot;
                select y.* into its_lot from metered.lots y where y.no = its_lot.no;
                its_lot.held := 0;
            end if;
            its_lot := metered._as_rest(metered._gone_on(its_lot, metered._rolls(its_lot), 9223372036854775807, null));
        end loop;
        if its_lot.rest > 0 or its_lot.held > 0 then
            return next its_lot;
        end if;
    end loop;
end
$$;

-- The last entries of scopes as if all lapses that are due in wallets were written, without the thresholds
-- that lots have armed which begin.
create function metered._without_lapsing(tips metered.ledger[], clk timestamptz) returns metered.ledger[]
language plpgsql stable
as $$
declare
    tip metered.ledger;
    nth int := 0;
    due record;
begin
    foreach tip in array tips loop
        nth := nth + 1;
        if tip.lots_end is not null then
            due := metered._due_lots(tip, clk);
            tip.credited := tip.credited - metered._lapsing_after(tip, clk, due.lots, due.lapsed, due.debt);
            tip.crossed := due.crossed;
            tips[nth] := tip;
        end if;
    end loop;
    return tips;
end
$$;

-- The effect of ended holds, leases and charges on the lots of a wallet, and how credit becomes a lot.

-- Takes away what the entries opened_seqs hold of a wallet: parts of the lots nos, of which
-- overdrawn units are of none (0).
create function metered._taken_parts(of_scope text, opened_seqs bigint[], out nos bigint[],
    out lots metered.lots[], out parts bigint[], out overdrawn bigint)
language plpgsql volatile
as $$
begin
    with gone as (
        delete from metered.lot_holds y where y.scope = of_scope and y.seq = any (opened_seqs)
        returning y.lot, y.amount),
    sums as (select g.lot, sum(g.amount)::bigint as amount from gone g group by g.lot)
    select array_agg(s.lot), array_agg(x.l), array_agg(s.amount),
        coalesce(sum(s.amount) filter (where s.lot = 0), 0)
    into nos, lots, parts, overdrawn
    from sums s left join lateral (
        select z from metered.lots z where z.no = s.lot limit 1) x(l) on true;
end
$$;

-- Says of which lots the units are that an entry has just captured of a hold or a lease, which the
-- entry opened_seq held (_captured).
create function metered._capture_lots(entry metered.ledger, opened_seq bigint, units bigint)
returns void
language plpgsql volatile
as $$
declare
    held record;
    step record;
begin
    held := metered._taken_parts(entry.scope, array[opened_seq]);
    step := metered._captured(entry, units, held.lots, held.parts);
    perform metered._write_moves(entry.scope, step.moves, step.lots, null);
    insert into metered.lot_holds (scope, seq, lot, amount)
    select entry.scope, opened_seq, k.lot, k.amount from unnest(held.nos, step.parts) k(lot, amount)
    where k.amount > 0;
    if step.drawn > 0 then
        perform metered._owe_use(entry.scope, opened_seq, step.drawn);
        if metered._lags(entry) then
            perform metered._owe(entry.scope, step.drawn);
        end if;
    end if;
end
$$;

-- By how many units a wallet was overdrawn before an entry that freed or gave back units, and has moved no lots yet.
create function metered._owed_before(entry metered.ledger) returns bigint
language plpgsql stable
as $$
begin
    return case when metered._lags(entry) then metered._debt(entry) else greatest(0, entry.amount - metered._balance(entry)) end;
end
$$;

-- Gives the lots of a wallet the units back that holds and leases kept of them, which the entries
-- opened_seqs held and the entry freed has just freed (_given_back). They pay an overdraft back.
-- Returns the last entry.
create function metered._free_lots(freed metered.ledger, opened_seqs bigint[]) returns metered.ledger
language plpgsql volatile
as $$
declare
    owed bigint := metered._owed_before(freed);
    held record;
    step record;
begin
    held := metered._taken_parts(freed.scope, opened_seqs);
    step := metered._given_back(freed, freed.seq, 'f', 0, held.lots, held.parts);
    perform metered._append_all(step.tip, step.entries);
    perform metered._write_moves(freed.scope, step.moves, step.lots, null);
    return metered._pay_back(step.tip, freed.seq, step.nth, held.nos, owed - held.overdrawn);
end
$$;

-- The same for the units that one call has just freed of several wallets, in the last entry of each.
create function metered._free_lines(nos bigint[], wallets text[]) returns void
language plpgsql volatile
as $$
declare
    wallet text;
begin
    foreach wallet in array wallets loop
        perform metered._free_lots(metered._entry_for_write(wallet), array(select l.opened_seq from metered.hold_lines l where l.hold = any (nos) and l.scope = wallet));
    end loop;
end
$$;

-- Gives units of a refund, which was just written, back to a lot (_given_back). Of one that has
-- ended they go into a new lot, or lapse, as that lot says, and pay nothing back: _refund_lots does
-- that, when it has given all. tip is the last entry by then, and nth the number of the refund's
-- last move.
create function metered._give_back(refund metered.ledger, of_lot bigint, units bigint,
    inout tip metered.ledger, inout nth int)
language plpgsql volatile
as $$
declare
    its_lot metered.lots;
    step    record;
begin
    select * into its_lot from metered.lots y where y.no = of_lot;
    step := metered._given_back(tip, refund.seq, 'g', nth, array[its_lot], array[units]);
    perform metered._append_all(step.tip, step.entries);
    perform metered._write_moves(refund.scope, step.moves, step.lots, null);
    tip := step.tip;
    nth := step.nth;
    if its_lot.expires_at <= refund.at and its_lot.late is not null then
        tip := (metered._append_lot(tip, row(units,
            case when its_lot.late = interval '0' then 'infinity' else refund.at + its_lot.late end, null,
            its_lot.category, its_lot.priority, null, null, null, null, its_lot.late)::metered.new_lot,
            metered._plan_on(its_lot), 'l', of_lot)).entry;
    end if;
end
$$;

-- The moves that a refund gives back, before or after its entry: those of its charge, the last one first. Units that no lot covered first lower the
-- overdraft (from_seq null, lot 0), and then come from lots that have paid overdraft back, the last one first. The rest is of no lot (null): it was charged
-- before the scope had lots.
create function metered._refund_parts(refund metered.ledger) returns table (from_seq bigint, from_nth int, lot bigint, units bigint)
language plpgsql stable
as $$
declare
    left_over bigint := refund.amount;
    bare      bigint := 0;      -- units that no lot covered
    part      record;
begin
    for part in
        select y.nth, y.lot, y.amount - y.back as units from metered.lot_moves y
        where y.scope = refund.scope and y.seq = refund.ref and y.kind in ('t', 'u') and y.amount > y.back order by y.nth desc
    loop
        from_seq := refund.ref;
        from_nth := part.nth;
        lot := part.lot;
        units := least(left_over, part.units);
        exit when units = 0;
        left_over := left_over - units;
        bare := bare + case when lot = 0 then units else 0 end;
        return next;
    end loop;
    bare := bare + left_over;
    if bare = 0 then
        return;
    end if;
    from_seq := null;
    lot := 0;
    units := least(bare, metered._owed_before(refund)
        - (select coalesce(sum(k.amount), 0) from metered.lot_holds k where k.scope = refund.scope and k.lot = 0 and k.seq > 0));
    if units > 0 then
        bare := bare - units;
        return next;
    end if;
    for part in
        select y.seq, y.nth, y.lot, y.amount - y.back as units from metered.lot_moves y
        where y.scope = refund.scope and y.kind = 'p' and y.amount > y.back order by y.seq desc, y.nth desc
    loop
        from_seq := part.seq;
        from_nth := part.nth;
        lot := part.lot;
        units := least(bare, part.units);
        exit when units = 0;
        bare := bare - units;
        return next;
    end loop;
    if bare > 0 then
        from_seq := null;
        lot := null;
        units := bare;
        return next;
    end if;
end
$$;

-- Gives the lots of a wallet the units back that the entry refund has just returned of a charge.
create function metered._refund_lots(refund metered.ledger) returns void
language plpgsql volatile
as $$
declare
    over  bigint := metered._owed_before(refund);
    last  bigint;
    part  record;
    given record;
    spent bigint := over - (select coalesce(sum(k.amount), 0) from metered.lot_holds k where k.scope = refund.scope and k.lot = 0 and k.seq > 0);
    came  bigint[] := '{}';
begin
    select refund as tip, 0 as nth into given;
    for part in select * from metered._refund_parts(refund) loop
        update metered.lot_moves y set back = y.back + part.units where y.scope = refund.scope and y.seq = part.from_seq and y.nth = part.from_nth;
        if part.lot is null then
            perform metered._old_lot(refund, part.units, 0);
        elsif part.lot > 0 then
            given := metered._give_back(refund, part.lot, part.units, given.tip, given.nth);
            came := came || part.lot;
        elsif part.from_seq is null then
            given.nth := given.nth + 1;
            insert into metered.lot_moves (scope, seq, nth, lot, kind, amount)
            values (refund.scope, refund.seq, given.nth, 0, 'g', part.units);
            over := over - part.units;
            perform metered._debt_paid(refund.scope, part.units, spent,
                (select y.note ->> 'use' from metered.ledger y where y.scope = refund.scope and y.seq = refund.ref));
            if metered._lags(refund) then
                perform metered._owe(refund.scope, -part.units);
            end if;
        end if;
    end loop;
    if over > 0 then    -- in the entry of the last lot that was made
        last := (select max(y.seq) from metered.ledger y
            where y.scope = refund.scope and y.seq > refund.seq and y.kind = 'd');
        perform metered._pay_back(given.tip, coalesce(last, refund.seq),
            case when last is null then given.nth else 1 end, came, over);
    end if;
end
$$;

-- The fate of a refund that is to be written: how many units lapse at once, since their lot has ended and says so, or pay for some uses alone, and when the first of the other
-- lots ends that get units of it.
create function metered._refund_fate(refund metered.ledger, out lapses bigint, out ends timestamptz)
language plpgsql stable
as $$
begin
    select coalesce(sum(p.units) filter (where l.expires_at <= refund.at and l.late is null or l.for_uses), 0), min(l.expires_at) filter (where l.expires_at > refund.at)
    into lapses, ends
    -- A join without the limit can be one that reads all lots.
    from metered._refund_parts(refund) p, lateral (select x.expires_at, x.late, (x.plan).uses is not null as for_uses from metered.lot_rows x where x.no = p.lot limit 1) l;
end
$$;

-- The credit of a scope that no grant brought becomes a lot that never ends, after an entry. So many of its units are held.
create function metered._old_lot(e metered.ledger, units bigint, held bigint) returns bigint
language plpgsql volatile
as $$
declare
    made bigint;
begin
    if units > 0 then
        insert into metered.lot_rows (granted_at, expires_at, granted_seq, last_seq, amount, rest, held, priority, origin, open, scope, category, age)
        values (e.at, 'infinity', e.seq, e.seq, units, units - _old_lot.held, _old_lot.held, 0, 'c', units > _old_lot.held, e.scope, '',
            metered._age(null, e.at, e.seq))
        returning no into made;
    end if;
    return made;
end
$$;

-- Makes a scope a wallet, whose last entry is tip: its credit, held units among it, becomes a lot.
create function metered._open_wallet(tip metered.ledger) returns void
language plpgsql volatile
as $$
declare
    covered   bigint := greatest(0, metered._balance(tip) + tip.held);
    held      bigint := least(tip.held, covered);
    made      bigint := metered._old_lot(tip, covered, held);
    held_part record;
    part      bigint;
begin
    if tip.held = 0 then
        return;
    end if;
    for held_part in
        select l.opened_seq, l.open from metered.hold_lines l where l.scope = tip.scope and l.open > 0 and l.due >= tip.next_due
        union all
        select y.opened_seq, y.granted from metered.leases y where y.scope = tip.scope and y.settled_at is null and y.mode <> 'g'
        order by 1
    loop
        part := least(held, held_part.open);
        insert into metered.lot_holds (scope, seq, lot, amount)
        select tip.scope, held_part.opened_seq, x.lot, x.amount from (values (made, part), (0, held_part.open - part)) x(lot, amount) where x.amount > 0;
        held := held - part;
    end loop;
end
$$;

-- An entry that is to be written, whose scope is a wallet from here on.
create function metered._as_wallet(entry metered.ledger, wait_ms int) returns metered.ledger
language plpgsql volatile
as $$
begin
    if entry.lots_end is null then
        entry.seq := entry.seq - 1;
        if entry.tallied then
            entry := metered._end_tallies(entry, wait_ms);
        end if;
        perform metered._open_wallet(entry);
        entry.seq := entry.seq + 1;
        entry.lots_end := 'infinity';
    end if;
    return entry;
end
$$;

-- Credits a wallet by a lot. last_entry is as _next_entry has it. The scope is a wallet from here on.
create function metered._credit_lot(last_entry metered.ledger, lot metered.new_lot, plan metered.lot_plan, as_origin "char", wait_ms int, out entry metered.ledger, out no bigint)
language plpgsql volatile
as $$
declare
    made record;
begin
    last_entry := metered._after_due(metered._as_wallet(last_entry, wait_ms), 0, wait_ms);
    last_entry.seq := last_entry.seq - 1;
    made := metered._add_lot(last_entry, lot, plan, as_origin, null);
    entry := made.entry;
    no := made.no;
end
$$;

-- How lots end: by time, by revocation, by rollover. How subscribers hear of it, and how lots are deleted.

-- A lot of a wallet, by its number or its reference.
create function metered._find_lot(of_scope text, of_lot bigint, of_reference text) returns metered.lots
language plpgsql stable
as $$
declare
    its_lot metered.lots;
begin
    if of_lot is not null then
        select * into its_lot from metered.lots y where y.no = of_lot and y.scope = of_scope;
    else
        select * into its_lot from metered.lots y where y.scope = of_scope and y.reference = of_reference;
        if its_lot.no is null and of_reference ~ ' \d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ$' then
            its_lot := metered._find_skipped(of_scope, left(of_reference, -21), right(of_reference, 20));
        end if;
    end if;
    return its_lot;
end
$$;

-- The lot of a plan's period that began then and was skipped, for which another one stands (idle.sql): that one, with the units and
-- the end of the period.
create function metered._find_skipped(of_scope text, of_renewal text, began text) returns metered.lots
language plpgsql stable
as $$
declare
    its_lot metered.lots;
    plan    metered.lot_plan;
    named   timestamptz;
    span    timestamptz[];
begin
    -- The last lot of a plan has its period.
    select (y.plan).* into plan from metered.lot_rows y
    where y.scope = of_scope and (y.plan).renewal = of_renewal and ((y.plan).renews).every is not null
    order by y.age desc limit 1;
    begin
        named := began::timestamptz;
        span := metered._period_at(plan.renews, named + interval '999999 microseconds');
    exception when datetime_field_overflow or sqlstate 'MT010' then     -- no time, or of a zone that is lost
        return null;
    end;
    select y.* into its_lot from metered.lots y
    where y.scope = of_scope and (y.plan).renewal = of_renewal and y.starts_at <= span[1] and y.expires_at > span[1]
      and starts_with(y.reference, metered._period_name(of_renewal, y.starts_at) || '/')
      and date_trunc('second', span[1]) = named;
    if its_lot.no is not null then
        its_lot.amount := plan.renew_amount;
        its_lot.expires_at := span[2];
    end if;
    return its_lot;
end
$$;

-- A lot, and all lots that its units went on in.
create function metered._family(of_no bigint) returns bigint[]
language plpgsql stable
as $$
declare
    nos  bigint[] := array[of_no];
    more bigint[] := nos;
begin
    while more <> '{}' loop
        more := array(select y.no from metered.lot_rows y where y.from_lot = any (more));
        nos := nos || more;
    end loop;
    return nos;
end
$$;

-- The lot that a call names, by its number or its reference, after all that is due has been
-- written: so a call accepts each name that a balance shows, whoever wrote it. With
-- lowers, the caller takes so many units back, and also the ends of lots that its units went on in
-- are written. last_entry is the result of _next_entry, and entry the same after that. crossings are
-- thresholds that due ends and the caller's units cross: crossed has them if anything is written by
-- then. status is crossing, where the caller did not say that it reports them, and nothing is
-- written, or unknown: there is no such lot.
create function metered._name_lot(last_entry metered.ledger, of_lot bigint, of_reference text,
    lowers bigint, limits metered.charge_limit[], wait_ms int,
    out entry metered.ledger, out lot metered.lots, out crossings jsonb, out crossed jsonb,
    out status text)
language plpgsql volatile
as $$
declare
    tip      metered.ledger := last_entry;
    crossing record;
begin
    tip.seq := last_entry.seq - 1;   -- with its time: a hold may have freed units of a lot before that lot ended
    select coalesce((select y.at from metered.ledger y where y.scope = last_entry.scope and y.seq = tip.seq), last_entry.at) into tip.at;
    crossing := metered._cross_lowered(tip, coalesce(lowers, 0), limits, least(last_entry.at, metered.clock()));
    entry := last_entry;
    crossings := crossing.crossings;
    if crossing.silent then
        status := 'crossing';
        return;
    end if;
    entry := metered._after_due_lowered(entry, 0, crossing.crossed, wait_ms);
    lot := metered._find_lot(last_entry.scope, of_lot, of_reference);
    if lot.no is null and of_lot is not null then   -- the lot before it ends among more than one call writes
        entry := metered._end_named(entry, array(select y.no from metered.lot_rows y where y.roll_no = of_lot and y.scope = last_entry.scope));
        lot := metered._find_lot(last_entry.scope, of_lot, null);
    end if;
    if lot.no is not null then
        entry := metered._end_named(entry,
            case when lowers is not null then metered._family(lot.no) else array[lot.no] end);
        lot := metered._find_lot(last_entry.scope, of_lot, of_reference);
    end if;
    if entry.seq > last_entry.seq then
        crossed := metered._crossed_at(crossings, array[entry.seq - 1]);
    end if;
    if lot.no is null then
        status := metered._missing_lot(entry);
    end if;
end
$$;

-- Takes back units of a lot and of those that it went on in, or all units (null), as far as they are neither drawn nor held: revoked. missing counts units that are
-- drawn or held; lapsed units of a lot that is revoked whole are not missing. Each lot has an entry of its own, and seq is the last. status is revoked (perhaps 0 units), unknown, or crossing: it would cross thresholds
-- of limits, which the caller does not report (_cross_lowered).
create function metered.revoke_lot(of_scope metered.scope_name, key bigint, of_lot bigint, of_reference text, units bigint, limits metered.charge_limit[],
    wait_ms int, origin metered.origin,
    out status text, out no bigint, out revoked bigint, out missing bigint, out seq bigint, out at timestamptz, out crossed jsonb)
language plpgsql volatile
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set plan_cache_mode = force_generic_plan
as $$
declare
    entry     metered.ledger;
    its_lot   metered.lots;
    nos       bigint[];
    named     record;
    part      bigint;
    origin_no bigint;
begin
    if greatest(octet_length(of_reference), octet_length(origin.tenant), octet_length(origin.operation)) > 255
        or array_lower(limits, 1) <> 1
        or array_ndims(limits) <> 1
        or array_position(limits, null) is not null
        or cardinality(limits) > 16
        or pg_column_size(limits) > 1400 and not metered._fits(limits)
        or wait_ms > 3600000
        or pg_column_size(origin.note) > 8196
        or pg_column_compression(origin.note) is not null and octet_length(origin.note::text) > 8192 then
        raise exception 'out of bounds: an argument of revoke_lot' using errcode = '22023';
    end if;
    perform metered._require(coalesce(metered._key_fits(key, of_scope), true) and (of_lot is null) <> (of_reference is null)
        and coalesce(units between 1 and 9007199254740992, true), 'revoke');
    entry := metered._next_entry(of_scope, key, wait_ms, origin);
    its_lot := metered._find_lot(of_scope, of_lot, of_reference);
    if its_lot.no is null and of_lot is not null then     -- its number is set aside for units of this lot, whose end is perhaps due
        select y.no into origin_no from metered.lot_rows y where y.roll_no = of_lot and y.scope = of_scope;
    end if;
    part := (select coalesce(sum(y.rest), 0) from metered._lots_now(metered._last_entry(of_scope), least(entry.at, metered.clock()),
            case when its_lot.no is not null then metered._family(its_lot.no) when of_lot is not null then array[origin_no, of_lot] end) y
        where (y.plan).uses is null and (y.no = origin_no) is not true and (coalesce(its_lot.no, of_lot) is not null or coalesce(y.reference, (y.plan).of_reference) = of_reference));
    named := metered._name_lot(entry, of_lot, of_reference, least(coalesce(units, part), part), limits, wait_ms);
    status := named.status;
    crossed := named.crossed;
    if status is not null then
        return;
    end if;
    entry := named.entry;
    no := (named.lot).no;
    nos := metered._family(no);
    select sum(y.pending + y.rest + y.kept), sum(y.drawn + y.held) into revoked, missing from metered.lots y where y.no = any (nos);
    missing := coalesce(units - least(units, revoked), missing);
    revoked := 0;
    for its_lot in
        select y.* from metered.lots y where y.no = any (nos) and (y.pending > 0 or y.open or y.keeps)
        order by y.pending = 0, y.age
    loop
        part := least(units - revoked, its_lot.pending + its_lot.rest + its_lot.kept);
        exit when part = 0;
        part := coalesce(part, its_lot.pending + its_lot.rest + its_lot.kept);
        continue when part = 0;
        if its_lot.pending > 0 then
            entry := metered._withdraw(entry, its_lot, part);
        else
            entry.seq := entry.seq - 1;
            entry := metered._take_units(entry, its_lot, part, 'v');
        end if;
        revoked := revoked + part;
        seq := entry.seq;
        at := entry.at;
        entry.seq := entry.seq + 1;
    end loop;
    if seq is null and metered._one_snapshot() then
        status := metered._missing_lot(entry);   -- nothing was there, as of this snapshot
    end if;
    status := 'revoked';
    if seq is not null then
        crossed := metered._crossed_at(named.crossings, array[seq]);
    end if;
end
$$;

-- Writes the ends of some lots that are due, where earlier calls have left them. entry is the result of _next_entry.
create function metered._end_named(e metered.ledger, nos bigint[]) returns metered.ledger
language plpgsql volatile
as $$
declare
    tip   metered.ledger := e;
    due   record;
    after record;
begin
    tip.seq := e.seq - 1;
    due := metered._load_due(tip, '-infinity', 0, 0, '{}', false, nos);
    after := metered._advance(tip, e.at, null, 0, due.lines, due.lots, due.parts, due.debts,
        due.spent);
    if cardinality(after.entries) > 0 then
        e.seq := (after.tip).seq + 1;
        e.credited := (after.tip).credited;
        e.lots_end := least(tip.lots_end, (select min(metered._turn_at(x)) from unnest(after.lots) x
            where x.pending + x.rest + x.kept + x.held > 0 and metered._turn_at(x) > e.at));
        perform metered._write_due(tip, e, after.entries, after.moves, due.lots, after.lots,
            due.parts, after.parts, due.debts, after.debts, after.spent);
    end if;
    return e;
end
$$;

-- Why there is no such lot: none was granted. Where the snapshot may be older than one that was, this fails with 40001. entry is as
-- _next_entry has it.
create function metered._missing_lot(e metered.ledger) returns text
language plpgsql volatile
as $$
begin
    if metered._one_snapshot() then
        e.seq := e.seq - 1;
        perform metered._refuse_stale(array[e]);
    end if;
    return 'unknown';
end
$$;

-- Rolls units of a lot over into another one: once. status is rolled, same
-- (it rolled over before, at its end or so, and no and units are that lot), empty (no units are left), unknown, or crossing: it ends
-- other lots, and would cross thresholds of limits, which the caller does not report (_cross_lowered). Units beyond cap stay in the lot.
create function metered.roll_over(of_scope metered.scope_name, key bigint, rollover metered.lot_rollover,
    limits metered.charge_limit[], wait_ms int, origin metered.origin,
    out status text, out no bigint, out units bigint, out seq bigint, out at timestamptz, out expires_at timestamptz, out crossed jsonb)
language plpgsql volatile
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set plan_cache_mode = force_generic_plan
as $$
declare
    entry metered.ledger;
    lot   metered.lots;
    made  record;
    named record;
begin
    if greatest(octet_length(rollover.of_reference), octet_length(origin.tenant), octet_length(origin.operation)) > 255
        or array_lower(limits, 1) <> 1
        or array_ndims(limits) <> 1
        or array_position(limits, null) is not null
        or cardinality(limits) > 16
        or pg_column_size(limits) > 1400 and not metered._fits(limits)
        or wait_ms > 3600000
        or pg_column_size(origin.note) > 8196
        or pg_column_compression(origin.note) is not null and octet_length(origin.note::text) > 8192 then
        raise exception 'out of bounds: an argument of roll_over' using errcode = '22023';
    end if;
    perform metered._require(coalesce(metered._key_fits(key, of_scope), true) and (rollover.of_lot is null) <> (rollover.of_reference is null)
        and rollover.cap between 1 and 9007199254740992 and metered._goes_on(rollover.lasts), 'roll_over');
    entry := metered._next_entry(of_scope, key, wait_ms, origin);
    named := metered._name_lot(entry, rollover.of_lot, rollover.of_reference, null, limits, wait_ms);
    status := named.status;
    crossed := named.crossed;
    if status is not null then
        return;
    end if;
    entry := named.entry;
    lot := named.lot;
    select 'same', y.no, y.amount, y.granted_seq, y.granted_at, nullif(y.expires_at, 'infinity')
    into status, no, units, seq, at, expires_at
    from metered.lots y where y.from_lot = lot.no and y.origin = 'r';
    if found then
        return;
    end if;
    units := least(rollover.cap, lot.rest + lot.kept);
    if units = 0 then
        status := metered._missing_lot(entry);
        status := 'empty';
        return;
    end if;
    perform metered._refuse_closed(entry);
    entry.seq := entry.seq - 1;
    expires_at := case when rollover.lasts > interval '0' then entry.at + rollover.lasts end;
    lot.roll_cap := null;
    lot.again := false;
    made := metered._add_lot(metered._take_units(entry, lot, units, 'o'), row(units,
        coalesce(expires_at, 'infinity'), null, lot.category, lot.priority, null, null, null,
        (lot.plan).roll_for, lot.late)::metered.new_lot, metered._plan_on(lot), 'r', lot.no);
    status := 'rolled';
    no := made.no;
    seq := (made.entry).seq;
    crossed := coalesce(crossed, metered._crossed_at(named.crossings, array[seq]));
    at := (made.entry).at;
end
$$;

-- A lot with lapsed units, as subscribers get it.
create function metered._untold_json(l metered.lots) returns json
language sql stable
as $$
    select json_build_object('wallet', l.scope, 'lot', l.no, 'reference', coalesce(l.reference, (l.plan).of_reference), 'category', l.category, 'granted', l.amount,
        'granted_at', l.granted_at, 'expires_at', nullif(l.expires_at, 'infinity'), 'amount', l.untold, 'seq', l.last_seq)
$$;

-- Whether a lot is the first one of a plan, which renews or has lots that a purge leaves.
create function metered._names_kept(of_scope text, of_reference text, of_plan metered.lot_plan,
    keep bigint) returns boolean
language plpgsql stable
as $$
begin
    return (of_plan.renewal = of_reference) is true and 0 < (select count(*) from metered.lots y
        where y.scope = of_scope and (y.plan).renewal = of_reference
          and (y.pending > 0 or y.last_seq >= keep));
end
$$;

-- Whether a purge leaves a lot, or one of those whose units went on in it.
create function metered._comes_of_kept(of_lot bigint, keep bigint) returns boolean
language plpgsql stable
as $$
declare
    its_lot metered.lots;
begin
    while of_lot is not null loop
        select y.* into its_lot from metered.lots y where y.no = of_lot;
        if its_lot.last_seq >= keep or its_lot.open or its_lot.keeps or its_lot.held > 0 or its_lot.untold > 0 or its_lot.pending > 0
            or metered._names_kept(its_lot.scope, its_lot.reference, its_lot.plan, keep) then
            return true;
        end if;
        of_lot := its_lot.from_lot;
    end loop;
    return false;
end
$$;

-- Deletes the moves of a wallet's entries from one on and before keep, which a purge deletes, and the lots to which nothing was done since, and
-- nothing can be: they are in no balance. One that another lot rolled over into stays as long as
-- that one, and the first lot of a plan stays while the plan renews, or its last lots stay: its reference names the plan,
-- and is not granted again. A lot that stays keeps the units that its newest move had.
create function metered._purge_lots(of_scope text, from_seq bigint, keep bigint) returns void
language plpgsql volatile
as $$
declare
    stays metered.lots;
begin
    -- A lot stays while one is there that it went on in: it is found by its reference. And that one stays while a lot stays that it
    -- comes of: revocations, and what brings revoked units back, count those of all of them.
    loop
        delete from metered.lot_rows r where r.no = any (array(
            select l.no from metered.lots l where l.scope = of_scope and l.last_seq < keep and not l.open and l.held = 0 and l.untold = 0 and l.pending = 0 and not l.keeps
            and case when 0 = (select count(*) from metered.lot_rows y where y.from_lot = l.no)
                then not metered._names_kept(l.scope, l.reference, l.plan, keep) and not metered._comes_of_kept(l.from_lot, keep)
                else false end));
        exit when not found;
    end loop;
    for stays in
        select y.* from metered.lots y where y.version is not null and y.last_seq < keep
        and y.no = any (array(select m.lot from metered.lot_moves m where m.scope = of_scope and m.seq >= from_seq and m.seq < keep))
    loop
        update metered.lot_rows r set last_seq = stays.last_seq, rest = stays.rest, drawn = stays.drawn, held = stays.held, kept = stays.kept where r.no = stays.no;
    end loop;
    delete from metered.lot_moves m where m.scope = of_scope and m.seq >= from_seq and m.seq < keep;
end
$$;

-- The functions of wallets that applications call. See lots.sql.

-- Grants a lot that begins at once and has no plan, for builds of 0.1.0: see plan_lot.
create function metered.grant_lot(of_scope metered.scope_name, key bigint, lot metered.new_lot, must_exist boolean, wait_ms int, origin metered.origin,
    out status text, out no bigint, out seq bigint, out at timestamptz, out expires_at timestamptz, out refused jsonb)
language plpgsql volatile
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set plan_cache_mode = force_generic_plan
as $$
begin
    if greatest(octet_length(lot.category), octet_length(lot.reference), octet_length(origin.tenant), octet_length(origin.operation)) > 255
        or octet_length(lot.fingerprint) > 33
        or wait_ms > 3600000
        or pg_column_size(origin.note) > 8196
        or pg_column_compression(origin.note) is not null and octet_length(origin.note::text) > 8192 then
        raise exception 'out of bounds: an argument of grant_lot' using errcode = '22023';
    end if;
    select g.status, g.no, g.seq, g.at, g.expires_at, g.refused into status, no, seq, at, expires_at, refused
    from metered.plan_lot(of_scope, key, lot, null, null, must_exist, wait_ms, origin) g;
end
$$;

-- Checks a plan that a caller passes. What comes again is a day long at least, since a call writes all that came meanwhile.
create function metered._require_plan(lot metered.new_lot, plan metered.lot_plan, starts_at timestamptz) returns void
language plpgsql stable
as $$
begin
    perform metered._require(plan.renewal is null and plan.of_reference is null and plan.roll_for is null
        and (((plan.renews).every is null) = (plan.renew_amount is null)) and coalesce(plan.renew_amount between 1 and 9007199254740992, true)
        and coalesce((plan.renews).every >= interval '1 day', true) and coalesce(octet_length((plan.renews).zone) <= 255, true)
        and coalesce(octet_length((plan.roll_to).zone) <= 255, true)
        and ((plan.renews).every is null or lot.lasts is null and lot.expires_at is null and lot.reference is not null)
        and (lot.roll_cap is not null or (plan.roll_to).every is null and plan.roll_again is null and plan.roll_shared is null)
        and coalesce(plan.roll_again between -1 and 10000, true) and coalesce(metered._sound_uses(plan.uses), true)
        and (coalesce(plan.roll_again, 0) = 0 or coalesce((plan.roll_to).every, lot.roll_for) >= interval '1 day')
        and coalesce(starts_at > '-infinity' and starts_at < '9000-01-01 00:00:00+00', true), 'plan');
end
$$;

-- The first lot of a grant that was bought at since: its amount, its beginning and its end. amount is null for the part of the
-- period that was left then. Ended by that time is one that does not renew, and one whose plan would have brought more
-- than 24 lots since.
create function metered._first_lot(inout lot metered.new_lot, plan metered.lot_plan, since timestamptz, now timestamptz, out ended boolean)
language plpgsql stable
as $$
declare
    span timestamptz[];
begin
    ended := false;
    if (plan.renews).every is null then
        lot.expires_at := coalesce(since + lot.lasts, lot.expires_at, 'infinity');
        ended := lot.expires_at <= greatest(since, now);
        return;
    end if;
    span := metered._period_at(plan.renews, since);
    lot.expires_at := span[2];
    lot.amount := coalesce(lot.amount, div(plan.renew_amount * (extract(epoch from span[2]) - extract(epoch from since)),
        extract(epoch from span[2]) - extract(epoch from span[1])));
    ended := extract(epoch from now) - extract(epoch from since) > 24 * extract(epoch from (plan.renews).every);
end
$$;

-- Notes the first lot of a plan that has no units, and schedules the lot of the next period. last_entry is after everything due. Appends
-- it, and returns it.
create function metered._empty_lot(last_entry metered.ledger, empty metered.lots, out entry metered.ledger, out no bigint)
language plpgsql volatile
as $$
begin
    entry := metered._schedule(last_entry, (empty.plan).renew_amount, case when empty.expires_at > last_entry.at then empty.expires_at end);
    empty.granted_seq := entry.seq;
    empty.last_seq := entry.seq;
    empty.no := metered._note_lot(empty);
    perform metered._move_lot(last_entry.scope, entry.seq, 1, metered._renew_lot(empty, entry.seq), 's', entry.amount, 0, 0);
    no := empty.no;
end
$$;

-- Grants a lot to a wallet, which is any scope: it becomes a wallet with the first one. The lot begins at starts_at, or at once. That of a plan may have no
-- units, or null: the part of its period that was left at starts_at. A plan that was bought in a period which is over brings
-- the lots of that period and of all since. status is granted, same (it was
-- granted under the reference before, and is answered as it is now, with the units that were revoked of it since, and whether its renewals were ended), conflict (the reference is of another lot) or ended (it would have ended by now). refused, and nothing
-- written, if the scope must exist and does not.
create function metered.plan_lot(of_scope metered.scope_name, key bigint, lot metered.new_lot, plan metered.lot_plan, starts_at timestamptz, must_exist boolean,
    wait_ms int, origin metered.origin,
    out status text, out no bigint, out amount bigint, out seq bigint, out at timestamptz, out expires_at timestamptz, out refused jsonb,
    out revoked bigint, out renewals_ended boolean)
language plpgsql volatile
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set plan_cache_mode = force_generic_plan
as $$
declare
    entry  metered.ledger;
    was    metered.lots;
    first  metered.lots;
    made   record;
    renews boolean := ((plan).renews).every is not null;
begin
    if greatest(octet_length(lot.category), octet_length(lot.reference), octet_length((plan.renews).zone), octet_length(plan.renewal), octet_length((plan.roll_to).zone), octet_length(plan.of_reference), octet_length(origin.tenant), octet_length(origin.operation)) > 255
        or octet_length(lot.fingerprint) > 33
        or plan.roll_again > 10000
        or array_lower(plan.uses, 1) <> 1
        or array_ndims(plan.uses) <> 1
        or array_position(plan.uses, null) is not null
        or cardinality(plan.uses) > 16
        or pg_column_size(plan.uses) > 255 and not metered._fits(plan.uses, 255)
        or wait_ms > 3600000
        or pg_column_size(origin.note) > 8196
        or pg_column_compression(origin.note) is not null and octet_length(origin.note::text) > 8192 then
        raise exception 'out of bounds: an argument of plan_lot' using errcode = '22023';
    end if;
    perform metered._require(coalesce(metered._key_fits(key, of_scope), true), 'key');
    perform metered._require((renews and lot.amount is null or lot.amount between (not renews)::int and 9007199254740992)
        and octet_length(lot.category) <= 255 and lot.priority is not null
        and coalesce(octet_length(lot.reference) between 1 and 255, true) and (lot.reference is null) = (lot.fingerprint is null)
        and coalesce(octet_length(lot.fingerprint) = 33, true) and (lot.lasts is null or lot.expires_at is null)
        and coalesce(lot.lasts > interval '0' and lot.lasts <= interval '36525 days', true)
        and coalesce(lot.expires_at > '-infinity' and lot.expires_at < '9000-01-01 00:00:00+00', true)
        and (lot.roll_cap is null) = (lot.roll_for is null) and coalesce(lot.roll_cap between 1 and 9007199254740992, true)
        and coalesce(metered._goes_on(lot.roll_for), true) and coalesce(metered._goes_on(lot.late), true), 'lot');
    if plan is distinct from null or starts_at is not null then
        perform metered._require_plan(lot, plan, starts_at);
        plan := metered._plan_kept(plan);
    end if;
    entry := metered._next_entry(of_scope, key, wait_ms, origin);
    if lot.reference is not null then
        was := metered._find_lot(of_scope, null, lot.reference);
        if was.no is null and entry.lots_end is not null then   -- a lot that is due may have the reference
            entry := metered._after_due(entry, 0, wait_ms);
            was := metered._find_lot(of_scope, null, lot.reference);
        end if;
        if was.no is not null then
            status := case when was.fingerprint = lot.fingerprint then 'same' else 'conflict' end;
            no := was.no;
            amount := was.amount;
            seq := was.granted_seq;
            at := was.granted_at;
            expires_at := nullif(was.expires_at, 'infinity');
            revoked := (select sum(y.revoked) from metered.lot_rows y where y.no = any (metered._family(was.no)));
            renewals_ended := (was.plan).renewal = was.reference and not exists (select from metered.lot_rows y
                where y.scope = of_scope and y.pending > 0 and (y.plan).renewal = was.reference);
            return;
        end if;
    end if;
    perform metered._refuse_closed(entry);
    if must_exist then
        refused := metered._admit(row(of_scope, key, coalesce(plan.renew_amount, lot.amount), 0, null, null, true, null, null), null, false, wait_ms);
        if refused is not null then
            return;
        end if;
    end if;
    made := metered._first_lot(lot, plan, coalesce(starts_at, entry.at), entry.at);
    lot := made.lot;
    expires_at := nullif(lot.expires_at, 'infinity');
    if made.ended then
        status := metered._missing_lot(entry);   -- it was not granted before, as of now
        status := 'ended';
        at := entry.at;
        return;
    end if;
    if renews then
        plan.renewal := lot.reference;
    end if;
    if plan is distinct from null or lot.roll_cap is not null then
        plan.roll_for := lot.roll_for;
    end if;
    entry := metered._after_minima(entry, wait_ms);
    first.scope := of_scope;
    first.amount := lot.amount;
    first.expires_at := lot.expires_at;
    first.roll_cap := lot.roll_cap;
    first.late := lot.late;
    first.priority := lot.priority;
    first.category := lot.category;
    first.reference := lot.reference;
    first.fingerprint := lot.fingerprint;
    first.plan := plan;
    first.starts_at := coalesce(starts_at, entry.at);
    if lot.roll_cap is not null then
        first.roll_end := metered._roll_end(lot.expires_at, plan, lot.roll_for);
    end if;
    if lot.amount > 0 and first.starts_at <= entry.at and lot.expires_at > entry.at then
        made := metered._credit_lot(entry, lot, plan, 'g', wait_ms);
        entry := made.entry;
        no := made.no;
        if renews then
            first.no := no;
            perform metered._renew_lot(first, entry.seq);
        end if;
    else
        entry := metered._after_due(metered._as_wallet(entry, wait_ms), 0, wait_ms);
        if lot.amount = 0 then
            made := metered._empty_lot(entry, first);
            entry := made.entry;
            no := made.no;
        else
            entry := metered._schedule(entry, lot.amount, case when first.starts_at > entry.at then first.starts_at end);
            first.granted_seq := entry.seq;
            first.last_seq := entry.seq;
            no := metered._note_lot(first);
            perform metered._move_lot(of_scope, entry.seq, 1, no, 's', lot.amount, 0, 0);
        end if;
        if lot.expires_at <= entry.at then      -- what it has brought by now
            perform metered._settle(entry, least(entry.at, metered.clock()), metered._ends_per_call(), 0, wait_ms);
        end if;
    end if;
    status := 'granted';
    amount := lot.amount;
    seq := entry.seq;
    at := entry.at;
end
$$;

-- Appends an entry that moves no units: a lot of so many units is scheduled, or its end is set. entry is as _next_entry has it, after everything due. The lot begins or
-- ends at comes.
create function metered._schedule(entry metered.ledger, units bigint, comes timestamptz) returns metered.ledger
language plpgsql volatile
as $$
begin
    entry.kind := 's';
    entry.amount := units;
    entry.lots_end := least(entry.lots_end, comes);
    perform metered._append(entry);
    return entry;
end
$$;

-- Sets the end of a lot, by its number or reference: earlier, later, or never (infinity). status is set, same (it has that end), unknown, ended (it has
-- ended by now, or the end would be over), or crossing: it ends other lots, and would cross thresholds of limits, which the caller does not report.
create function metered.set_lot_end(of_scope metered.scope_name, key bigint, of_lot bigint, of_reference text, ends timestamptz, limits metered.charge_limit[],
    wait_ms int, origin metered.origin,
    out status text, out no bigint, out units bigint, out seq bigint, out at timestamptz, out crossed jsonb)
language plpgsql volatile
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set plan_cache_mode = force_generic_plan
as $$
declare
    entry metered.ledger;
    lot   metered.lots;
    named record;
begin
    if greatest(octet_length(of_reference), octet_length(origin.tenant), octet_length(origin.operation)) > 255
        or array_lower(limits, 1) <> 1
        or array_ndims(limits) <> 1
        or array_position(limits, null) is not null
        or cardinality(limits) > 16
        or pg_column_size(limits) > 1400 and not metered._fits(limits)
        or wait_ms > 3600000
        or pg_column_size(origin.note) > 8196
        or pg_column_compression(origin.note) is not null and octet_length(origin.note::text) > 8192 then
        raise exception 'out of bounds: an argument of set_lot_end' using errcode = '22023';
    end if;
    perform metered._require(coalesce(metered._key_fits(key, of_scope), true) and (of_lot is null) <> (of_reference is null)
        and (ends = 'infinity' or ends > '-infinity' and ends < '9000-01-01 00:00:00+00') is true, 'set_lot_end');
    entry := metered._next_entry(of_scope, key, wait_ms, origin);
    named := metered._name_lot(entry, of_lot, of_reference, null, limits, wait_ms);
    status := named.status;
    crossed := named.crossed;
    if status is not null then
        return;
    end if;
    entry := named.entry;
    lot := named.lot;
    no := lot.no;
    units := lot.amount;
    at := entry.at;
    seq := lot.last_seq;
    if lot.expires_at = ends then
        status := 'same';
        return;
    elsif lot.expires_at <= entry.at or ends <= greatest(entry.at, case when lot.pending > 0 then lot.starts_at end) then
        status := metered._missing_lot(entry);
        status := 'ended';
        return;
    end if;
    perform metered._refuse_closed(entry);
    at := entry.at;
    entry := metered._schedule(entry, lot.rest + lot.held + lot.pending + lot.kept, ends);
    if lot.roll_cap is not null then
        if (lot.plan).roll_for is null and ((lot.plan).roll_to).every is null then   -- granted by 0.1.0, and never set
            lot.plan.roll_for := case when lot.roll_end = 'infinity' then interval '0'
                else (extract(epoch from lot.roll_end) - extract(epoch from lot.expires_at)) * interval '1 second' end;
        end if;
        lot.roll_end := metered._roll_end(ends, lot.plan, (lot.plan).roll_for);
    end if;
    update metered.lot_rows y set expires_at = ends, roll_end = lot.roll_end, plan = lot.plan where y.no = lot.no;
    perform metered._move_lot(of_scope, entry.seq, 1, lot.no, 's', entry.amount, 0, 0);
    status := 'set';
    seq := entry.seq;
    crossed := coalesce(crossed, metered._crossed_at(named.crossings, array[seq]));
end
$$;

-- Ends the renewals of a grant, by its reference: the lot of the next period is withdrawn, and none comes after it. The present one stays. status is revoked,
-- same (they were ended before), unknown (no such grant renews), or crossing, as revoke_lot has it.
create function metered.end_renewal(of_scope metered.scope_name, key bigint, of_reference text, limits metered.charge_limit[], wait_ms int, origin metered.origin,
    out status text, out no bigint, out revoked bigint, out missing bigint, out seq bigint, out at timestamptz, out crossed jsonb)
language plpgsql volatile
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set plan_cache_mode = force_generic_plan
as $$
declare
    entry   metered.ledger;
    its_lot metered.lots;
    named   record;
begin
    if greatest(octet_length(of_reference), octet_length(origin.tenant), octet_length(origin.operation)) > 255
        or array_lower(limits, 1) <> 1
        or array_ndims(limits) <> 1
        or array_position(limits, null) is not null
        or cardinality(limits) > 16
        or pg_column_size(limits) > 1400 and not metered._fits(limits)
        or wait_ms > 3600000
        or pg_column_size(origin.note) > 8196
        or pg_column_compression(origin.note) is not null and octet_length(origin.note::text) > 8192 then
        raise exception 'out of bounds: an argument of end_renewal' using errcode = '22023';
    end if;
    perform metered._require(coalesce(metered._key_fits(key, of_scope), true) and (octet_length(of_reference) between 1 and 255) is true, 'end_renewal');
    entry := metered._next_entry(of_scope, key, wait_ms, origin);
    begin
        named := metered._name_lot(entry, null, of_reference, null, limits, wait_ms);
    exception when sqlstate 'MT010' then    -- a zone that the server has lost: the lot that is due begins, and no other
        no := metered._end_lost(of_scope, of_reference);
        if no is null then
            raise;
        end if;
        status := 'revoked';
        return;
    end;
    status := named.status;
    crossed := named.crossed;
    if status is not null then
        return;
    end if;
    entry := named.entry;
    if ((named.lot).plan).renewal is distinct from of_reference then
        status := metered._missing_lot(entry);
        return;
    end if;
    select * into its_lot from metered.lots y where y.scope = of_scope and y.pending > 0 and ((y.plan).renews).every is not null and (y.plan).renewal = of_reference
    order by y.starts_at, y.age limit 1;
    missing := 0;
    revoked := 0;
    if its_lot.no is null then
        status := metered._missing_lot(entry);
        status := 'same';
        return;
    end if;
    entry := metered._withdraw(entry, its_lot, its_lot.pending);
    status := 'revoked';
    no := its_lot.no;
    revoked := its_lot.pending;
    seq := entry.seq;
    at := entry.at;
    crossed := coalesce(crossed, metered._crossed_at(named.crossings, array[seq]));
end
$$;

-- Ends what the lots of a plan still need its zones for: no lot comes after those that are there. Returns the last one.
create function metered._end_lost(of_scope text, of_reference text) returns bigint
language plpgsql volatile
as $$
declare
    last bigint;
begin
    for last in
        select y.no from metered.lot_rows y
        where y.scope = of_scope and ((y.plan).renewal = of_reference or (y.plan).of_reference = of_reference)
        order by y.age
    loop
        update metered.lot_rows y set plan.renews = null, plan.renew_amount = null, plan.roll_to = null, plan.roll_again = null
        where y.no = last;
    end loop;
    return last;
end
$$;

-- Takes back units of a lot before they begin. Without any left, it does not begin, and none comes after it. Appends an entry after it, and returns it.
create function metered._withdraw(entry metered.ledger, lot metered.lots, units bigint) returns metered.ledger
language plpgsql volatile
as $$
begin
    entry := metered._schedule(entry, units, entry.lots_end);
    update metered.lot_rows y set pending = y.pending - units, revoked = y.revoked + units where y.no = lot.no;
    perform metered._move_lot(lot.scope, entry.seq, 1, lot.no, 'w', units, 0, 0);
    return entry;
end
$$;

-- Draws units of a wallet, as a charge does: charge.amount of them, or with up_to as much of that as its limits let in. lots says of
-- which lots they are, and overdrawn how many are of none. left is the balance after it, with lots for the use of the charge. A refusal of a command's draw raises, because COMMIT
-- follows, and its draws are kept for its record.
create function metered.draw(charge metered.new_charge, up_to boolean, ahead interval, wait_ms int, origin metered.origin,
    out seq bigint, out at timestamptz, out amount bigint, out lots json, out overdrawn bigint, out left_over bigint, out refused jsonb, out crossed jsonb)
language plpgsql volatile
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set plan_cache_mode = force_generic_plan
as $$
declare
    mode    text := case when origin.operation is null then 'answer' else 'raise' end;
    written record;
    posted  metered.charged;
    kept    bigint;
begin
    if greatest(octet_length(charge.scope), octet_length(origin.tenant), octet_length(origin.operation)) > 255
        or array_lower(charge.limits, 1) <> 1
        or array_ndims(charge.limits) <> 1
        or array_position(charge.limits, null) is not null
        or cardinality(charge.limits) > 16
        or pg_column_size(charge.limits) > 1400 and not metered._fits(charge.limits)
        or pg_column_size(charge.note) > 8196
        or pg_column_compression(charge.note) is not null and octet_length(charge.note::text) > 8192
        or wait_ms > 3600000
        or pg_column_size(origin.note) > 8196
        or pg_column_compression(origin.note) is not null and octet_length(origin.note::text) > 8192 then
        raise exception 'out of bounds: an argument of draw' using errcode = '22023';
    end if;
    if (charge.held = 0 and charge.lease is null and charge.amount between 1 and 9007199254740992 and up_to is not null) is not true then
        perform metered._require(false, 'draw');
    end if;
    if up_to then
        written := metered._write_up_to(array[charge], 1, ahead, wait_ms, origin, mode, null, false);
        charge := written.charges[1];
        posted := written.posted;
    else
        posted := metered._write_charges(array[charge], ahead, wait_ms, origin, mode, null, false);
    end if;
    amount := charge.amount;
    refused := posted.refused;
    if refused is not null then
        return;
    end if;
    crossed := posted.crossed;
    seq := posted.seqs[1];
    at := posted.ats[1];
    lots := metered._lots_of(charge.scope, seq);
    select e.credited - e.spent + e.refunded - e.held - case when metered._lags(row(e.*)::metered.ledger)
        then metered._lapsing(row(e.*)::metered.ledger, e.at) else 0 end into left_over
    from metered.ledger e
    where e.scope = charge.scope and e.seq = draw.seq;
    overdrawn := greatest(0, least(amount, -left_over));
    if charge.note ? 'use' then
        overdrawn := coalesce((select coalesce(sum(x.amount) filter (where x.lot = 0), 0) from metered.lot_moves x
            where x.scope = charge.scope and x.seq = draw.seq having count(*) > 0), overdrawn);
        kept := (select coalesce(sum(y.kept), 0) from metered.lots y
            where y.scope = charge.scope and y.keeps and y.expires_at > draw.at and (y.plan).uses @> array[charge.note ->> 'use']);
        left_over := case when kept > 0 then greatest(0, left_over) + kept else left_over end;
    end if;
    if origin.operation is not null then
        perform metered._remember_hold(json_build_object('drawn', json_strip_nulls(json_build_object('wallet', charge.scope, 'seq', seq, 'at', at,
            'amount', amount, 'lots', lots, 'overdrawn', overdrawn, 'left', left_over))));
    end if;
end
$$;

-- The balance of a wallet: units that can be drawn (less than 0: overdrawn), held units, and the lots that have some of either, in the
-- order in which they are drawn. Lots for some uses are no part of units. A lot or hold that is due has ended, whether that is written down or not. A lot that rolls over then is there as it will be.
create function metered.wallet_balance(of_scope text,
    out now timestamptz, out seq bigint, out units bigint, out held bigint, out lots json)
language plpgsql stable
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set plan_cache_mode = force_generic_plan
set enable_bitmapscan = off
set enable_sort = off
set jit = off
as $$
declare
    tip    metered.ledger := metered._last_entry(of_scope);
    clk    timestamptz := metered.clock();
    due    bigint;     -- held, and due
    lapses record;
begin
    if octet_length(of_scope) > 255 then
        raise exception 'out of bounds: an argument of wallet_balance' using errcode = '22023';
    end if;
    now := greatest(clk, tip.at);
    seq := tip.seq;
    due := case when tip.next_due <= clk then metered._due_units(of_scope, tip.next_due, clk) else 0 end;
    held := tip.held - due;
    units := metered._balance(tip) + due - case when tip.next_due <= clk then metered._minima(tip, null, clk) else 0 end;
    if tip.lots_end is null then
        return;
    end if;
    lapses := metered._due_lots(tip, clk);
    units := units - metered._lapsing_after(tip, clk, lapses.lots, lapses.lapsed, lapses.debt);
    lots := (
        select json_agg(json_build_object('lot', coalesce(x.no, 0), 'reference', coalesce(x.reference, (x.plan).of_reference), 'category', x.category, 'priority', x.priority,
            'granted_at', x.granted_at, 'expires_at', nullif(x.expires_at, 'infinity'), 'amount', x.amount, 'rest', x.rest, 'held', x.held, 'uses', (x.plan).uses)
            order by x.priority, x.expires_at, x.age)
        from metered._lots_after(tip, clk, null, lapses.lots) x);
end
$$;

-- How units that were revoked come back to their lots.

-- Gives units back to a lot from which they were revoked, and which has not ended: as pending ones before it begins. entry is
-- after everything due. Appends it, and returns it.
create function metered._reinstate(entry metered.ledger, lot metered.lots, units bigint) returns metered.ledger
language plpgsql volatile
as $$
declare
    later   boolean := coalesce(lot.starts_at > entry.at, false);
    general boolean := (lot.plan).uses is null;
    rest    bigint := case when general and not later then units else 0 end;
    kept    bigint := case when general or later then 0 else units end;
    tip     metered.ledger := entry;
    debt    bigint;
begin
    tip.seq := entry.seq - 1;
    debt := metered._debt(tip);
    entry.kind := case when rest > 0 then 'd' else 's' end;
    entry.amount := units;
    entry.credited := entry.credited + rest;
    entry.lots_end := least(entry.lots_end, case when later then lot.starts_at else lot.expires_at end);
    if entry.crossed is not null and rest > 0 then
        entry.crossed := metered._rearmed(entry);
    end if;
    perform metered._append(entry);
    update metered.lot_rows y set revoked = y.revoked - units, pending = y.pending + case when later then units else 0 end where y.no = lot.no;
    perform metered._move_lot(entry.scope, entry.seq, 1, lot.no, case when later then 'm' else 'n' end::"char", units, rest, kept);
    return metered._pay_back(entry, entry.seq, 1, array[lot.no], debt);
end
$$;

-- Gives back units that were revoked from a lot and from those that it went on in, or all of them (null), as far as these
-- lots have not ended. Each lot has an entry of its own, and seq is the last. status is reinstated, same (nothing of
-- them is revoked), ended (what is revoked is of lots that have ended), unknown, or crossing: it ends other lots, and would
-- cross thresholds of limits, which the caller does not report.
create function metered.reinstate_lot(of_scope metered.scope_name, key bigint, of_lot bigint, of_reference text, units bigint,
    limits metered.charge_limit[], wait_ms int, origin metered.origin,
    out status text, out no bigint, out reinstated bigint, out seq bigint, out at timestamptz, out expires_at timestamptz, out crossed jsonb)
language plpgsql volatile
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set plan_cache_mode = force_generic_plan
as $$
declare
    entry   metered.ledger;
    its_lot metered.lots;
    nos     bigint[];
    named   record;
    part    bigint;
begin
    if greatest(octet_length(of_reference), octet_length(origin.tenant), octet_length(origin.operation)) > 255
        or array_lower(limits, 1) <> 1
        or array_ndims(limits) <> 1
        or array_position(limits, null) is not null
        or cardinality(limits) > 16
        or pg_column_size(limits) > 1400 and not metered._fits(limits)
        or wait_ms > 3600000
        or pg_column_size(origin.note) > 8196
        or pg_column_compression(origin.note) is not null and octet_length(origin.note::text) > 8192 then
        raise exception 'out of bounds: an argument of reinstate_lot' using errcode = '22023';
    end if;
    perform metered._require(coalesce(metered._key_fits(key, of_scope), true) and (of_lot is null) <> (of_reference is null)
        and coalesce(units between 1 and 9007199254740992, true), 'reinstate_lot');
    entry := metered._next_entry(of_scope, key, wait_ms, origin);
    named := metered._name_lot(entry, of_lot, of_reference, 0, limits, wait_ms);
    status := named.status;
    crossed := named.crossed;
    if status is not null then
        return;
    end if;
    entry := named.entry;
    no := (named.lot).no;
    expires_at := nullif((named.lot).expires_at, 'infinity');
    nos := metered._family(no);
    reinstated := 0;
    for its_lot in select y.* from metered.lots y where y.no = any (nos) and y.revoked > 0 and y.expires_at > entry.at order by y.age loop
        part := least(units - reinstated, its_lot.revoked);
        exit when part = 0;
        perform metered._refuse_closed(entry);
        entry := metered._reinstate(entry, its_lot, part);
        reinstated := reinstated + part;
        seq := entry.seq;
        at := entry.at;
        entry.seq := entry.seq + 1;
    end loop;
    if reinstated > 0 then
        status := 'reinstated';
        return;
    end if;
    status := metered._missing_lot(entry);      -- nothing is revoked, as of this snapshot
    status := case when exists (select from metered.lot_rows y where y.no = any (nos) and y.revoked > 0) then 'ended' else 'same' end;
    at := entry.at;
end
$$;

-- Takes back that the renewals of a grant were ended, by its reference: the lot of the next period is scheduled again, and others come
-- after it. status is reinstated, same (they go on), ended (that period has begun), unknown (no such grant renews), or
-- crossing, as reinstate_lot has it.
create function metered.resume_renewal(of_scope metered.scope_name, key bigint, of_reference text, limits metered.charge_limit[],
    wait_ms int, origin metered.origin,
    out status text, out no bigint, out reinstated bigint, out seq bigint, out at timestamptz, out expires_at timestamptz, out crossed jsonb)
language plpgsql volatile
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set plan_cache_mode = force_generic_plan
as $$
declare
    entry   metered.ledger;
    its_lot metered.lots;
    named   record;
begin
    if greatest(octet_length(of_reference), octet_length(origin.tenant), octet_length(origin.operation)) > 255
        or array_lower(limits, 1) <> 1
        or array_ndims(limits) <> 1
        or array_position(limits, null) is not null
        or cardinality(limits) > 16
        or pg_column_size(limits) > 1400 and not metered._fits(limits)
        or wait_ms > 3600000
        or pg_column_size(origin.note) > 8196
        or pg_column_compression(origin.note) is not null and octet_length(origin.note::text) > 8192 then
        raise exception 'out of bounds: an argument of resume_renewal' using errcode = '22023';
    end if;
    perform metered._require(coalesce(metered._key_fits(key, of_scope), true)
        and (octet_length(of_reference) between 1 and 255) is true, 'resume_renewal');
    entry := metered._next_entry(of_scope, key, wait_ms, origin);
    named := metered._name_lot(entry, null, of_reference, null, limits, wait_ms);
    status := named.status;
    crossed := named.crossed;
    if status is not null then
        return;
    end if;
    entry := named.entry;
    reinstated := 0;
    status := metered._missing_lot(entry);      -- as of this snapshot
    if ((named.lot).plan).renewal is distinct from of_reference then
        return;
    end if;
    at := entry.at;
    -- The last lot of a plan has it. Those before passed it on.
    select y.* into its_lot from metered.lots y
    where y.scope = of_scope and ((y.plan).renews).every is not null and (y.plan).renewal = of_reference
    order by y.age desc limit 1;
    no := its_lot.no;
    expires_at := nullif(its_lot.expires_at, 'infinity');
    if its_lot.pending > 0 then
        status := 'same';
    elsif (its_lot.revoked > 0 and its_lot.starts_at > entry.at) is not true then
        status := 'ended';
    else
        perform metered._refuse_closed(entry);
        reinstated := its_lot.revoked;
        entry := metered._reinstate(entry, its_lot, its_lot.revoked);
        status := 'reinstated';
        seq := entry.seq;
    end if;
end
$$;

-- Changes of plans. A plan is a grant that renews, and has the reference of its first lot. A change ends its renewals, and may
-- put another plan in its place, at once or from the next period on. The calls of one change are made in one transaction: begin_change
-- locks the wallet, end_renewal and others do the work, and note_change keeps the answer.

-- The changes of plans. A row goes with the entries of its wallet, once its plan has no lot any more that has not ended.
create table metered.plan_changes (
    effect_at   timestamptz not null,           -- when the change takes effect
    seq         bigint not null,                -- the wallet's last entry, when it was made
    scope       text collate "C" not null,      -- the wallet
    reference   text collate "C" not null,      -- of the caller, once in a wallet
    plan        text collate "C" not null,      -- the reference of the plan that is changed
    to_plan     text collate "C",               -- the reference of the plan after it, or null: none
    kind        text collate "C" not null check (kind in ('changed', 'replaced', 'resumed')),   -- replaced: a later one took its place in time
    fingerprint bytea not null,                 -- of the change: a version byte and a SHA-256
    answer      jsonb not null,                 -- of the call that made it
    primary key (scope, reference)
);

-- Locks a wallet for a change of a plan. fingerprint and answer are those of the change that has the reference already.
-- Otherwise the plan's last change is the one of effect_at: to to_plan, and by by_reference. at is now. Fails with 40001 where the
-- snapshot is older than the wallet.
create function metered.begin_change(of_scope metered.scope_name, key bigint, of_reference text, of_plan text, wait_ms int,
    out at timestamptz, out fingerprint bytea, out answer jsonb, out effect_at timestamptz, out to_plan text, out by_reference text)
language plpgsql volatile
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set plan_cache_mode = force_generic_plan
as $$
declare
    entry metered.ledger;
begin
    if greatest(octet_length(of_reference), octet_length(of_plan)) > 255
        or wait_ms > 3600000 then
        raise exception 'out of bounds: an argument of begin_change' using errcode = '22023';
    end if;
    perform metered._require(coalesce(metered._key_fits(key, of_scope), true)
        and (octet_length(of_reference) between 1 and 255) is true and (octet_length(of_plan) between 1 and 255) is true, 'begin_change');
    entry := metered._next_entry(of_scope, key, wait_ms, null);
    if metered._one_snapshot() then
        entry.seq := entry.seq - 1;
        perform metered._refuse_stale(array[entry]);
    end if;
    at := entry.at;
    select c.fingerprint, c.answer into fingerprint, answer
    from metered.plan_changes c where c.scope = of_scope and c.reference = of_reference;
    if not found then
        select c.effect_at, c.to_plan, c.reference into effect_at, to_plan, by_reference
        from metered.plan_changes c where c.scope = of_scope and c.plan = of_plan and c.kind = 'changed';
    end if;
end
$$;

-- A plan whose renewals have been ended, by the entry at_seq, or before it (0), as of that entry: its period, the
-- numbers of its lots that have begun and not ended, also of plans that it took the place of, the units that holds have of them,
-- and when its next lot would have begun. A change of the plan counts from starts on at the earliest. starts is null if it has not begun or is over, and next if it is over. first is the part of
-- new_plan's amount that is beyond the plan's own, for the part of new_plan's period that is left at since: at next, if that is asked for.
create function metered.plan_state(of_scope metered.scope_name, of_plan text, at_seq bigint, new_plan metered.lot_plan, since timestamptz, at_end boolean,
    out at timestamptz, out starts timestamptz, out ends timestamptz, out next timestamptz, out lots bigint[], out held bigint, out first bigint)
language plpgsql stable
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set plan_cache_mode = force_generic_plan
as $$
declare
    follows record;
    span    timestamptz[];
begin
    if greatest(octet_length(of_plan), octet_length((new_plan.renews).zone), octet_length(new_plan.renewal), octet_length((new_plan.roll_to).zone), octet_length(new_plan.of_reference)) > 255
        or new_plan.roll_again > 10000
        or array_lower(new_plan.uses, 1) <> 1
        or array_ndims(new_plan.uses) <> 1
        or array_position(new_plan.uses, null) is not null
        or cardinality(new_plan.uses) > 16
        or pg_column_size(new_plan.uses) > 255 and not metered._fits(new_plan.uses, 255) then
        raise exception 'out of bounds: an argument of plan_state' using errcode = '22023';
    end if;
    perform metered._require((octet_length(of_plan) between 1 and 255) is true and at_seq >= 0 and at_end is not null
        and coalesce(octet_length((new_plan.renews).zone) <= 255, true)
        and coalesce(new_plan.renew_amount between 1 and 9007199254740992, true)
        and coalesce(since > '-infinity' and since < '9000-01-01 00:00:00+00', true), 'plan_state');
    at := coalesce((select e.at from metered.ledger e where e.scope = of_scope and e.seq = at_seq),
        greatest(metered.clock(), (metered._last_entry(of_scope)).at));
    -- The plan's last lot still has what renews it: it was withdrawn, or has not begun. It has not ended,
    -- unless that was long ago.
    select y.starts_at, (y.plan).renews, (y.plan).renew_amount as amount into follows from metered.lot_rows y
    where y.scope = of_scope and (y.plan).renewal = of_plan and y.origin = 'g' and ((y.plan).renews).every is not null
      and y.expires_at > at
    order by y.expires_at desc, y.no desc limit 1;
    if not found then
        select y.starts_at, (y.plan).renews, (y.plan).renew_amount as amount into follows from metered.lot_rows y
        where y.scope = of_scope and (y.plan).renewal = of_plan and y.origin = 'g' and ((y.plan).renews).every is not null
        order by y.expires_at desc, y.no desc limit 1;
    end if;
    -- In the order of its index first, which keeps the planner from the lots that have ended.
    select x.begun, x.expires_at into starts, ends from (
        select y.age, coalesce(y.starts_at, y.granted_at) as begun, y.expires_at from metered.lot_rows y
        where y.scope = of_scope and (y.plan).renewal = of_plan and y.origin = 'g' and ((y.plan).renews).every is null
          and y.pending = 0 and coalesce(y.starts_at, y.granted_at) <= at and y.expires_at > at
        order by y.expires_at, y.no) x
    order by x.age desc limit 1;
    -- The period's first moment, also where the plan was granted later: or that of the change which brought the plan.
    if starts is not null and (follows.renews).every is not null then
        starts := greatest((metered._period_at(follows.renews, at))[1],
            (select max(c.effect_at) from metered.plan_changes c where c.scope = of_scope and c.to_plan = of_plan and c.kind = 'changed'));
    end if;
    next := case when follows.starts_at > at then follows.starts_at end;
    with recursive chain (plan) as (
        select of_plan collate "C"
        union
        select c.plan from metered.plan_changes c join chain n on c.to_plan = n.plan where c.scope = of_scope and c.kind = 'changed')
    select array_agg(y.no order by y.age), sum(y.held) into lots, held
    from metered.lots y join chain n on (y.plan).renewal = n.plan
    where y.scope = of_scope and y.origin = 'g' and ((y.plan).renews).every is null
      and y.pending = 0 and coalesce(y.starts_at, y.granted_at) <= at and y.expires_at > at;
    if (new_plan.renews).every is not null then
        since := case when at_end then coalesce(next, ends) else least(since, at) end;
        span := metered._period_at(new_plan.renews, since);
        first := div(greatest(0, new_plan.renew_amount - coalesce(follows.amount, 0)) * (extract(epoch from span[2]) - extract(epoch from since)),
            extract(epoch from span[2]) - extract(epoch from span[1]));
    end if;
end
$$;

-- Keeps the answer of a change (changed), or of a call that took one back (resumed), in place of the plan's last one, which has not taken effect.
create function metered.note_change(of_scope metered.scope_name, of_reference text, of_plan text, to_plan text, effect_at timestamptz, mode text,
    of_fingerprint bytea, given jsonb) returns void
language plpgsql volatile
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set plan_cache_mode = force_generic_plan
as $$
begin
    if greatest(octet_length(of_reference), octet_length(of_plan), octet_length(to_plan), octet_length(mode)) > 255
        or octet_length(of_fingerprint) > 33
        or pg_column_size(given) > 1048580
        or pg_column_compression(given) is not null and octet_length(given::text) > 1048576 then
        raise exception 'out of bounds: an argument of note_change' using errcode = '22023';
    end if;
    perform metered._require((octet_length(of_reference) between 1 and 255) is true and (octet_length(of_plan) between 1 and 255) is true
        and coalesce(octet_length(to_plan) between 1 and 255, true) and isfinite(effect_at) is true and mode in ('changed', 'resumed')
        and (octet_length(of_fingerprint) = 33) is true and jsonb_typeof(given) = 'object', 'note_change');
    update metered.plan_changes c set kind = 'replaced' where c.scope = of_scope and c.plan = of_plan and c.kind = 'changed';
    insert into metered.plan_changes (scope, reference, plan, to_plan, effect_at, kind, fingerprint, answer, seq)
    values (of_scope, of_reference, of_plan, note_change.to_plan, note_change.effect_at, mode, of_fingerprint, given,
        coalesce((metered._last_entry(of_scope)).seq, 0))
    on conflict do nothing;     -- 40001 for an older snapshot
end
$$;

-- How much overdraft (paid) a plan's lot has paid back when it began: the lot whose period during is in, or now. ends is when
-- units end that are granted in place of these: with that lot, or if it has ended, with the plan's present one, or never. restored is the lot
-- that was granted for them. status is found, or unknown: no
-- such lot has begun. Locks the wallet.
create function metered.plan_overage(of_scope metered.scope_name, key bigint, of_plan text, during timestamptz, wait_ms int,
    out status text, out no bigint, out paid bigint, out restored bigint, out ends timestamptz, out category text, out priority int, out uses text[])
language plpgsql volatile
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set plan_cache_mode = force_generic_plan
as $$
declare
    entry metered.ledger;
    lot   record;       -- the lot
    near  record;    -- or one that ends later
begin
    if octet_length(of_plan) > 255
        or wait_ms > 3600000 then
        raise exception 'out of bounds: an argument of plan_overage' using errcode = '22023';
    end if;
    perform metered._require(coalesce(metered._key_fits(key, of_scope), true) and (octet_length(of_plan) between 1 and 255) is true
        and coalesce(isfinite(during), true), 'plan_overage');
    select null::bigint as no, null::bigint[] as age into lot;
    entry := metered._next_entry(of_scope, key, wait_ms, null);
    during := coalesce(during, entry.at);
    -- Lots that end later begin later, but for those whose end was set.
    for near in
        select x.no, x.age, x.granted_seq, x.expires_at, x.category, x.priority, (x.plan).uses as uses,
            coalesce(x.starts_at, x.granted_at) as begun
        from metered.lot_rows x
        where x.scope = of_scope and x.expires_at > during and (x.plan).renewal = of_plan
          and x.origin = 'g' and ((x.plan).renews).every is null and x.pending = 0
        order by x.expires_at, x.no
    loop
        if near.begun > during then
            exit when lot.no is not null;
        elsif (lot.age > near.age) is not true then
            lot := near;
        end if;
    end loop;
    if lot.no is null then
        if metered._one_snapshot() then
            entry.seq := entry.seq - 1;
            perform metered._refuse_stale(array[entry]);
        end if;
        status := 'unknown';
        return;
    end if;
    no := lot.no;
    category := lot.category;
    priority := lot.priority;
    uses := lot.uses;
    paid := (select coalesce(sum(m.amount), 0) from metered.ledger b
        join metered.ledger x on x.scope = b.scope and x.seq >= b.seq and x.at = b.at
        join metered.lot_moves m on m.scope = x.scope and m.seq = x.seq and m.lot = lot.no and m.kind = 'p'
        where b.scope = of_scope and b.seq = lot.granted_seq);
    select y.no, y.expires_at into restored, ends from metered.lot_rows y
    where y.scope = of_scope and y.reference = format('overage of lot %s', lot.no);
    status := 'found';
    if found then
        ends := nullif(ends, 'infinity');
        return;
    end if;
    -- A period that is over leaves its units to the present one.
    ends := case when lot.expires_at > entry.at then lot.expires_at else (select max(y.expires_at) from metered.lot_rows y
        where y.scope = of_scope and (y.plan).renewal = of_plan and y.origin = 'g' and ((y.plan).renews).every is null and y.pending = 0
          and coalesce(y.starts_at, y.granted_at) <= entry.at and y.expires_at > entry.at) end;
end
$$;

-- Deletes changes of plans with the entries before keep of a wallet, unless a plan of theirs has a lot that has not ended.
create function metered._purge_changes(of_scope text, keep bigint) returns void
language plpgsql volatile
as $$
begin
    delete from metered.plan_changes c where c.scope = of_scope and c.seq < keep and c.effect_at < metered.clock() and not exists (
        select from metered.lot_rows y where y.scope = of_scope and (y.plan).renewal = c.plan and y.expires_at > metered.clock());
end
$$;

-- Lots that pay for some uses alone. A charge or a hold names its use in its note.
--
-- Such a lot has its units as kept. They are no credit of the ledger, so no other balance, limit or lapse counts them. They pay an overdraft that was drawn for their uses: see debts.sql. A call for a
-- use credits as many as it takes of these lots, in one entry (apply), and then charges the whole amount like any call. The applied units
-- are rests of their lots in between, so the order of lots is the same for all. Units that a hold frees, or a refund gives back, go back to
-- kept by a later entry (_taken), as units of a lot that has ended lapse. What happens to kept units moves no units of the ledger:
-- its entries are of the kind s, and the moves say what they did.

-- Whether these are uses as a plan has them.
create function metered._sound_uses(uses text[]) returns boolean
language plpgsql immutable
as $$
begin
    return cardinality(uses) between 1 and 16 and uses = array(
        select distinct x collate "C" from unnest(uses) x where octet_length(x) between 1 and 255 order by x collate "C");
end
$$;

-- A lot for readers, who count kept units as its rest.
create function metered._as_rest(lot metered.lots) returns metered.lots
language plpgsql immutable
as $$
begin
    lot.rest := lot.rest + lot.kept;
    lot.kept := 0;
    return lot;
end
$$;

-- The units of lots for a use, as they are after all that is due.
create function metered._kept_for(tip metered.ledger, use text, clk timestamptz) returns bigint
language plpgsql stable
as $$
begin
    return (select coalesce(sum(x.rest), 0) from metered._lots_now(tip, clk, null) x where (x.plan).uses @> array[use]);
end
$$;

-- The limits of a charge for a use, of which those of a lifetime admit so many units more. stood are the units that count without it: if these are more than a limit
-- admits, lots for the use pay all the same.
create function metered._raised(limits metered.charge_limit[], units bigint, stood bigint) returns metered.charge_limit[]
language plpgsql immutable
as $$
begin
    for i in 1..coalesce(cardinality(limits), 0) loop
        if limits[i].win = interval '0' then
            limits[i].max := least(9223372036854775807, greatest(limits[i].max, stood)::numeric + units);
        end if;
    end loop;
    return limits;
end
$$;

-- The use of limits, and a refusal by them, as if lots for a use raised no limit, and lowered the use instead. taken are the units by charge that
-- lowered it already.
create function metered._told_use(charges metered.new_charge[], raised metered.new_charge[], taken bigint[], inout used bigint[], inout refused jsonb)
language plpgsql immutable
as $$
declare
    nth  int := 0;
    more bigint[] := '{}';     -- by limit
begin
    for i in 1..cardinality(charges) loop
        for j in 1..coalesce(cardinality(charges[i].limits), 0) loop
            nth := nth + 1;
            more[nth] := case when charges[i].limits[j].win = interval '0' then raised[i].limits[j].max - charges[i].limits[j].max - coalesce(taken[i], 0) else 0 end;
        end loop;
    end loop;
    for nth in 1..coalesce(cardinality(used), 0) loop
        used[nth] := used[nth] - more[nth];
    end loop;
    if refused -> 0 ? 'limit' then
        refused := (select jsonb_agg(x.r || jsonb_build_object('used', (x.r ->> 'used')::bigint - more[1 + (x.r ->> 'limit')::int]) order by x.n)
            from jsonb_array_elements(refused) with ordinality x(r, n));
    end if;
end
$$;

-- Applies kept units of lots to a charge for a use, as many as it takes of them in the order of all lots, after all that is due. The scope is locked. taken
-- are these units, of the lots nos, and kept all that there are for the use. limits are the charge's from here on, without the thresholds of a lifetime, which
-- are judged here, since applied units lower no use: crossings, and silent if nobody would report them.
create function metered._apply_lots(charge metered.new_charge, clk timestamptz, wait_ms int, origin metered.origin,
    out limits metered.charge_limit[], out taken bigint, out nos bigint[], out kept bigint, out stood bigint, out crossings jsonb, out silent boolean)
language plpgsql volatile
as $$
declare
    use          text := charge.note ->> 'use';
    entry        metered.ledger := metered._entry_for_write(charge.scope);
    was          bigint := entry.seq;
    units        bigint := charge.amount;      -- that no lot has paid for
    parts        bigint[] := '{}';
    next_for_use metered.lots;            -- the next lot for the use
    next_for_all metered.lots;            -- the next one for anything
    passed       record;
    crossing     record;
    lifetimes    metered.charge_limit[];
begin
    limits := charge.limits;
    taken := 0;
    nos := '{}';
    kept := 0;
    stood := 0;
    silent := false;
    if entry.lots_end is null or (entry.next_due = '-infinity') is true then
        return;
    elsif entry.lots_end <= greatest(clk, entry.at) or entry.next_due <= clk then
        entry := metered._settle(entry, clk, metered._ends_per_call(), charge.amount, wait_ms);
    end if;
    entry.at := greatest(clk, entry.at);
    stood := case when metered._lags(entry) then metered._lapsing(entry, clk) else 0 end - metered._balance(entry);
    kept := (select coalesce(sum(y.kept), 0) from (select x.kept from metered.lots x
        where x.scope = charge.scope and x.keeps and x.expires_at > entry.at and (x.plan).uses @> array[use] order by x.priority, x.expires_at, x.age) y);
    if kept = 0 then
        return;
    end if;
    next_for_all.priority := -2147483648;
    next_for_all.expires_at := '-infinity';
    next_for_all.no := 0;
    next_for_all.age := '{}';
    next_for_use := next_for_all;
    while units > 0 loop
        if next_for_use.kept is null or next_for_use.kept = 0 then
            select y.* into next_for_use from metered.lots y
            where y.scope = charge.scope and y.keeps and (y.priority, y.expires_at, y.age) > (next_for_use.priority, next_for_use.expires_at, next_for_use.age)
              and y.expires_at > entry.at and (y.plan).uses @> array[use]
            order by y.priority, y.expires_at, y.age limit 1;
            exit when next_for_use.no is null;
        end if;
        if next_for_all.no is not null and coalesce(next_for_all.rest, 0) = 0 then
            if metered._lags(entry) then
                passed := metered._pass_ended(charge.scope, next_for_all.priority, next_for_all.expires_at, next_for_all.age, entry.at);
                next_for_all.priority := passed.priority;
                next_for_all.expires_at := passed.ends;
                next_for_all.age := passed.after;
            end if;
            select y.* into next_for_all from metered.lots y
            where y.scope = charge.scope and y.open and (y.priority, y.expires_at, y.age) > (next_for_all.priority, next_for_all.expires_at, next_for_all.age)
            order by y.priority, y.expires_at, y.age limit 1;
        end if;
        if (next_for_all.priority, next_for_all.expires_at, next_for_all.age) < (next_for_use.priority, next_for_use.expires_at, next_for_use.age) then
            units := units - next_for_all.rest;
            next_for_all.rest := 0;
        else
            nos := nos || next_for_use.no;
            parts := parts || least(units, next_for_use.kept);
            taken := taken + least(units, next_for_use.kept);
            units := units - next_for_use.kept;
            next_for_use.kept := 0;
        end if;
    end loop;
    if taken = 0 then
        return;
    end if;
    lifetimes := array(select l::metered.charge_limit from unnest(charge.limits) l where l.win = interval '0' and l.thresholds is not null);
    if cardinality(lifetimes) > 0 and (charge.amount > taken or entry.seq > was) then
        crossing := metered._cross_thresholds(array[row(charge.scope, null, charge.amount - taken, case when charge.held > 0 then charge.amount - taken else 0 end, lifetimes,
                null, null, null, null)::metered.new_charge],
            array_fill(stood - entry.held, array[cardinality(lifetimes)]), array[entry.held], entry.at, array[entry]);
        entry.crossed := (crossing.tips[1]).crossed;
        crossings := crossing.crossings;
        silent := crossing.silent;
        if silent then
            return;
        end if;
    end if;
    limits := array(select row(l.max, l.win, l.period, case when l.win is distinct from interval '0' then l.tell_at end,
        case when l.win is distinct from interval '0' then l.thresholds end, l.telling)::metered.charge_limit
        from unnest(metered._raised(charge.limits, 0, stood)) with ordinality l(max, win, period, tell_at, thresholds, telling, n) order by l.n);
    entry := metered._lot_entry(entry, 'd', taken, taken);
    entry.ref := null;
    entry.hold := null;
    entry.operation_tenant := origin.tenant;
    entry.operation := origin.operation;
    entry.note := charge.note;
    perform metered._append(entry);
    for i in 1..cardinality(nos) loop
        perform metered._move_lot(charge.scope, entry.seq, i, nos[i], 'a', parts[i], parts[i], -parts[i]);
    end loop;
end
$$;

-- _write_charges where some of the charges are for a use. The scopes are locked, and clk was read under the locks. A refusal takes all back.
create function metered._write_for_uses(charges metered.new_charge[], ahead interval, wait_ms int,
    origin metered.origin, mode text, hold metered.hold_terms, standing boolean, clk timestamptz) returns metered.charged
language plpgsql volatile
as $$
declare
    asked    metered.new_charge[] := charges;
    raised   metered.new_charge[] := charges;
    taken    bigint[];
    told     jsonb[];     -- crossings by charge
    nos      bigint[] := '{}';
    applied  record;
    its_lot  metered.lots;
    told_use record;
    before   text;
    posted   metered.charged;
begin
    hold.at := clk;
    begin
        if cardinality(charges) > 1 then    -- rows of due holds are locked all at once, in order
            before := metered._bound_lock_wait(wait_ms);
            perform from metered.holds h where h.no = any (array(
                select x.hold from unnest(asked) c, lateral (select y.hold from metered.hold_lines y
                    where y.scope = c.scope and y.open > 0 and y.due <= clk order by y.due limit 500) x)) order by h.no for no key update;
            before := metered._unbound_lock_wait(before);
        end if;
        for i in 1..cardinality(charges) loop
            continue when (charges[i].note ? 'use' and charges[i].amount > 0 and charges[i].scope is not null) is not true;
            applied := metered._apply_lots(charges[i], clk, wait_ms, origin);
            if applied.silent then
                posted.refused := '[{"crossing": true}]';
                raise exception using errcode = 'MT100';
            end if;
            charges[i].limits := applied.limits;
            raised[i].limits := metered._raised(raised[i].limits, applied.kept, applied.stood);
            taken[i] := applied.taken;
            told[i] := applied.crossings;
            nos := nos || applied.nos;
        end loop;
        posted := metered._write_charges(charges, ahead, wait_ms, origin, 'applied', hold, standing);
        if posted.refused is not null then
            raise exception using errcode = 'MT100';
        end if;
        for i in 1..cardinality(charges) loop
            if told[i] is not null then
                posted.crossed := coalesce(posted.crossed, '[]') || metered._crossed_at(told[i], array[posted.seqs[i]]);
            end if;
        end loop;
        for its_lot in select y.* from metered.lots y where y.no = any (nos) and y.rest > 0 order by y.age loop
            perform metered._take_units(metered._own_entry(metered._entry_for_write(its_lot.scope), clk), its_lot, its_lot.rest, 'b');
        end loop;
    exception when sqlstate 'MT100' then
        null;
    end;
    posted.at := clk;
    told_use := metered._told_use(asked, raised, taken, posted.used, posted.refused);
    posted.used := told_use.used;
    posted.refused := told_use.refused;
    if mode = 'raise' and posted.refused -> 0 ? 'crossing' then
        perform metered._refuse_unreported();
    elsif mode = 'raise' and posted.refused is not null then
        raise exception 'a limit refuses the charge' using errcode = 'MT001', detail = posted.refused;
    end if;
    return posted;
end
$$;

-- Periods: days, weeks, months and years of a time zone, and stretches of fixed length. A period is
-- [start, end). A sliding window is (since, now], so a period is looked up as the window since its
-- start less a microsecond.

-- Names of time zones that IANA gave up for others, which mean the same place. A server may know one of both alone:
-- its data are older, or distributions leave the old names out (Debian's tzdata-legacy).
create function metered._renamed_zones() returns jsonb
language sql immutable
as $$
    select '{
        "Africa/Asmera": "Africa/Asmara", "America/Atka": "America/Adak",
        "America/Buenos_Aires": "America/Argentina/Buenos_Aires",
        "America/Catamarca": "America/Argentina/Catamarca",
        "America/Cordoba": "America/Argentina/Cordoba", "America/Ensenada": "America/Tijuana",
        "America/Fort_Wayne": "America/Indiana/Indianapolis", "America/Godthab": "America/Nuuk",
        "America/Indianapolis": "America/Indiana/Indianapolis",
        "America/Jujuy": "America/Argentina/Jujuy", "America/Knox_IN": "America/Indiana/Knox",
        "America/Louisville": "America/Kentucky/Louisville",
        "America/Mendoza": "America/Argentina/Mendoza", "America/Porto_Acre": "America/Rio_Branco",
        "America/Shiprock": "America/Denver", "Asia/Ashkhabad": "Asia/Ashgabat",
        "Asia/Calcutta": "Asia/Kolkata", "Asia/Dacca": "Asia/Dhaka",
        "Asia/Katmandu": "Asia/Kathmandu", "Asia/Macao": "Asia/Macau", "Asia/Rangoon": "Asia/Yangon",
        "Asia/Saigon": "Asia/Ho_Chi_Minh", "Asia/Tel_Aviv": "Asia/Jerusalem",
        "Asia/Thimbu": "Asia/Thimphu", "Asia/Ujung_Pandang": "Asia/Makassar",
        "Asia/Ulan_Bator": "Asia/Ulaanbaatar", "Atlantic/Faeroe": "Atlantic/Faroe",
        "Australia/ACT": "Australia/Sydney", "Australia/Canberra": "Australia/Sydney",
        "Australia/LHI": "Australia/Lord_Howe", "Australia/NSW": "Australia/Sydney",
        "Australia/North": "Australia/Darwin", "Australia/Queensland": "Australia/Brisbane",
        "Australia/South": "Australia/Adelaide", "Australia/Tasmania": "Australia/Hobart",
        "Australia/Victoria": "Australia/Melbourne", "Australia/West": "Australia/Perth",
        "Australia/Yancowinna": "Australia/Broken_Hill", "Brazil/Acre": "America/Rio_Branco",
        "Brazil/DeNoronha": "America/Noronha", "Brazil/East": "America/Sao_Paulo",
        "Brazil/West": "America/Manaus", "Canada/Atlantic": "America/Halifax",
        "Canada/Central": "America/Winnipeg", "Canada/Eastern": "America/Toronto",
        "Canada/Mountain": "America/Edmonton", "Canada/Newfoundland": "America/St_Johns",
        "Canada/Pacific": "America/Vancouver", "Canada/Saskatchewan": "America/Regina",
        "Canada/Yukon": "America/Whitehorse", "Chile/Continental": "America/Santiago",
        "Chile/EasterIsland": "Pacific/Easter", "Europe/Kiev": "Europe/Kyiv",
        "Mexico/BajaNorte": "America/Tijuana", "Mexico/BajaSur": "America/Mazatlan",
        "Mexico/General": "America/Mexico_City", "Pacific/Enderbury": "Pacific/Kanton",
        "Pacific/Ponape": "Pacific/Pohnpei", "Pacific/Samoa": "Pacific/Pago_Pago",
        "Pacific/Truk": "Pacific/Chuuk", "US/Alaska": "America/Anchorage",
        "US/Aleutian": "America/Adak", "US/Arizona": "America/Phoenix",
        "US/Central": "America/Chicago", "US/East-Indiana": "America/Indiana/Indianapolis",
        "US/Eastern": "America/New_York", "US/Hawaii": "Pacific/Honolulu",
        "US/Indiana-Starke": "America/Indiana/Knox", "US/Michigan": "America/Detroit",
        "US/Mountain": "America/Denver", "US/Pacific": "America/Los_Angeles",
        "US/Samoa": "Pacific/Pago_Pago"}'::jsonb
$$;

-- The name by which the server knows a zone, or null: its present name, where the server shows the same time by
-- both, or else the given one, or an earlier one.
create function metered._known_zone(of_zone text) returns text
language plpgsql stable
as $$
declare
    renamed   text := metered._renamed_zones() ->> of_zone;
    candidate text;
    known     text;
begin
    for candidate in
        select of_zone union all select renamed where renamed is not null
        union all select x.key from jsonb_each_text(metered._renamed_zones()) x where x.value = of_zone
    loop
        begin
            perform timestamptz 'epoch' at time zone candidate;
            if known is null or candidate = renamed and not exists (
                select from generate_series(timestamptz '2000-01-01 00:00Z', '2040-01-01 00:00Z', interval '730 hours') t
                where t at time zone renamed <> t at time zone of_zone) then
                known := candidate;
            end if;
        exception when invalid_parameter_value then
            null;   -- the server does not know it
        end;
    end loop;
    return known;
end
$$;

-- A plan as it is kept: its zones by their present names.
create function metered._plan_kept(plan metered.lot_plan) returns metered.lot_plan
language plpgsql stable
as $$
begin
    if metered._renamed_zones() ? (plan.renews).zone then
        plan.renews.zone := coalesce(metered._known_zone((plan.renews).zone), (plan.renews).zone);
    end if;
    if metered._renamed_zones() ? (plan.roll_to).zone then
        plan.roll_to.zone := coalesce(metered._known_zone((plan.roll_to).zone), (plan.roll_to).zone);
    end if;
    return plan;
end
$$;

-- The period that moment is in: its start and its end. Periods follow each other without a gap, before the
-- anchor too. All are counted from the anchor, so that the 31st is the last day of a shorter month,
-- and the 31st again in a longer one.
--
-- Where a clock is set forward past a start, the period starts as if it had not been. Where a clock is set back, at the
-- first time that it shows the start. Only hours are added to a timestamptz: days would be those of
-- the session's time zone.
create function metered._period_at(p metered.period, t timestamptz) returns timestamptz[]
language plpgsql stable strict
as $$
declare
    months  int := extract(year from p.every) * 12 + extract(month from p.every);
    days    int := extract(day from p.every);
    length  bigint;
    into_it bigint;
    shown   timestamp;      -- t, as a clock of the zone shows it
    origin  timestamp;
    start   timestamp;
    nth     int;
    starts  timestamptz;
    ends    timestamptz;
    back    interval;       -- by how much the clock was set back in the day before starts
begin
    if p.zone is null then
        length := extract(epoch from p.every) * 1000000;
        if (length > 0 and isfinite(p.anchor)) is not true then
            perform metered._require(false, 'period');
        end if;
        into_it := (extract(epoch from t) - extract(epoch from p.anchor)) * 1000000;
        into_it := (into_it % length + length) % length;
        starts := t - into_it * interval '1 microsecond';
        return array[starts, starts + length * interval '1 microsecond'];
    end if;
    if ((months > 0 and days = 0 or months = 0 and days > 0) and p.every = make_interval(months => months, days => days)) is not true
        or isfinite(p.anchor) is false then
        perform metered._require(false, 'period');
    end if;
    begin
        shown := t at time zone p.zone;
    exception when invalid_parameter_value then
        if metered._known_zone(p.zone) is null then
            raise exception 'the time zone is not known' using errcode = 'MT010', detail = p.zone;
        end if;
        p.zone := metered._known_zone(p.zone);
        shown := t at time zone p.zone;
    end;
    origin := coalesce(p.anchor at time zone p.zone, '0001-01-01');
    -- A period that starts later, and from there back to the one that has begun.
    nth := 1 + case when days > 0 then date_part('day', shown - origin)::int / days
        else (date_part('year', shown) * 12 + date_part('month', shown) - date_part('year', origin) * 12 - date_part('month', origin))::int / months end;
    loop
        start := origin + nth * p.every;
        starts := start at time zone p.zone;
        back := ((starts - interval '24:00') at time zone p.zone) - (start - interval '24:00');
        if back > interval '0' and (starts - extract(epoch from back) * interval '1 second') at time zone p.zone = start then
            starts := starts - extract(epoch from back) * interval '1 second';
        end if;
        if starts > t then
            ends := starts;
            nth := nth - 1;
        elsif ends is null then
            nth := nth + 2;
        else
            return array[starts, ends];
        end if;
    end loop;
end
$$;

-- The periods that charges of scopes whose last entries are tips are judged in: two times for each
-- limit by period, in the order of the limits. Null without any.
create function metered._periods_of(charges metered.new_charge[], tips metered.ledger[], clk timestamptz) returns timestamptz[]
language plpgsql stable
as $$
declare
    lim     metered.charge_limit;
    periods timestamptz[];
begin
    for i in 1..cardinality(charges) loop
        foreach lim in array charges[i].limits loop
            if lim.win is null then
                periods := periods || metered._period_at(lim.period, greatest(clk, tips[i].at));
            end if;
        end loop;
    end loop;
    return periods;
end
$$;

-- When at most room units of a window's spending are left in it, if nothing else changes.
-- used and the base are those of _spent_since. Spending leaves entry by entry: the answer
-- is when the first entry leaves with which enough has left.
--
-- Spending and refunds are mostly even, so a probe looks where that entry would be if they
-- were. After a probe that does not halve the rest comes one that does. The refunds
-- of charges after an entry are dear to sum, but lie between the sums at both ends of
-- the rest, which decide most probes.
create function metered._leaves_at(tip metered.ledger, base_seq bigint, base_spent bigint, used bigint, win interval, room bigint) returns timestamptz
language plpgsql stable
as $$
declare
    too_few  bigint := base_seq;
    enough   bigint := tip.seq;
    most     bigint := tip.spent - base_spent - used;    -- refunds after too_few, and after enough
    fewest   bigint := 0;
    over     float8 := used - room;      -- the excess after too_few, and after enough
    under    float8 := -room;
    halve    boolean := false;
    span     bigint;
    step     bigint;
    excess   bigint;
    later    bigint;             -- refunded by then, and then the refunds of charges after it
    entry    record;
    at       timestamptz := tip.at;      -- of enough, as is the epoch
    in_epoch int := tip.epoch;
begin
    while enough - too_few > 1 loop
        span := enough - too_few;
        step := case when halve then span / 2 else greatest(1, least(span - 1, ceil(span * (over / (over - under)))::bigint)) end;
        select y.spent, y.refunded, y.at, y.epoch into strict entry from metered.ledger y where y.scope = tip.scope and y.seq = too_few + step;
        excess := tip.spent - entry.spent - room;
        later := most - (most - fewest) * (step::float8 / span);
        if excess > fewest and excess <= most then
            later := case when entry.refunded = tip.refunded then 0 else metered._refunds_after(tip.scope, tip.seq, too_few + step) end;
            if excess <= later then
                fewest := later;
            else
                most := later;
            end if;
        end if;
        if excess <= fewest then
            enough := too_few + step;
            under := excess - later;
            at := entry.at;
            in_epoch := entry.epoch;
        else
            too_few := too_few + step;
            over := excess - later;
        end if;
        halve := not halve and (enough - too_few) * 2 > span;
    end loop;
    if in_epoch < tip.epoch then   -- a repair is the first entry of its epoch
        at := least(at, (
            select min(r.at) from (select generate_series(in_epoch + 1, tip.epoch) limit 32767) g(e),
                 lateral (select k.at from metered.ledger k
                  where k.scope = tip.scope and k.epoch = g.e and (k.seq & 15 = 1 or k.kind = 'k')
                  order by k.at, k.seq limit 1) r));
    end if;
    return at + win;
end
$$;

-- Whether this transaction wrote the row of that xmin, in a savepoint of it or outside. The row
-- is visible, so a transaction that is in progress can only be this one. Asked in the query that reads the row: on Citus it
-- is answered by the node that has it.
create function metered._written_here(row_xmin xid) returns boolean
language plpgsql stable
as $$
declare
    own   numeric := pg_current_xact_id_if_assigned()::text::numeric;
    ahead numeric := row_xmin::text::numeric - own % 4294967296;
begin
    if own is null then     -- it has written nothing
        return false;
    end if;
    if ahead < 0 then
        ahead := ahead + 4294967296;
    end if;
    begin
        return ahead = 0 or ahead < 2147483648 and pg_xact_status((own + ahead)::text::xid8) = 'in progress';
    exception when invalid_parameter_value then     -- "in the future": an old row, from before the ids wrapped around
        return false;
    end;
end
$$;

-- Units of a scope that are held by this transaction itself, or by the holds of_nos, which it is about to capture. A refusal may not
-- wait for their end, since a rollback frees them. leased are units among them of leases. A writer has locked the scope, so this transaction's
-- entries are the last ones.
create function metered._held_here(tip metered.ledger, of_nos bigint[], out units bigint, out leased bigint)
language plpgsql stable
as $$
declare
    entry       record;
    ended       jsonb := '{}';   -- by hold: units that this transaction has spent or freed of it
    group_ended boolean := false;
begin
    units := 0;
    leased := 0;
    -- Without an id of its own the transaction has written nothing. On Citus another node may have the id.
    for back in 0..case when metered._sharded() or pg_current_xact_id_if_assigned() is not null then tip.seq else -1 end loop
        select l.kind, l.hold, l.amount, metered._written_here(l.xmin) as here into entry
        from metered.ledger l where l.scope = tip.scope and l.seq = tip.seq - back;
        exit when not found or not entry.here;
        if entry.kind = 'h' and group_ended then
            -- Rare: the entry of a group does not say how many units of this hold had ended.
            units := (select coalesce(sum(l.open), 0) from metered.hold_lines l
                where l.scope = tip.scope and l.open > 0 and l.due >= tip.next_due and metered._written_here(l.xmin) and metered._written_here((
                    select v.xmin from metered.hold_events v where v.hold = l.hold and v.version = 1)));
            leased := 0;
            exit;
        elsif entry.kind = 'h' then
            if entry.hold ~ '^lease/[0-9]{1,18}$' then  -- it may be the name of a hold
                leased := leased + coalesce((select y.granted from metered.leases y
                    where y.no = substr(entry.hold, 7)::bigint and y.scope = tip.scope and y.opened_seq = tip.seq - back and y.settled_at is null), 0);
            end if;
            units := units + greatest(0, entry.amount - coalesce((ended ->> entry.hold)::bigint, 0));
            ended := ended || jsonb_build_object(entry.hold, greatest(0, coalesce((ended ->> entry.hold)::bigint, 0) - entry.amount));
        elsif entry.kind in ('u', 'l', 'x') and entry.hold is not null then
            ended := ended || jsonb_build_object(entry.hold, coalesce((ended ->> entry.hold)::bigint, 0) + entry.amount);
        elsif entry.kind in ('u', 'l', 'x') then
            group_ended := true;
        end if;
    end loop;
    if of_nos is not null then
        units := units + (select coalesce(sum(l.open), 0) from metered.hold_lines l
            where l.hold = any (of_nos) and l.scope = tip.scope and l.open <> 0 and l.due >= tip.next_due and metered._written_here((
                select v.xmin from metered.hold_events v where v.hold = l.hold and v.version = 1)) is not true);
    end if;
    units := least(tip.held, units);
end
$$;

-- When the first unit that others hold of a scope falls due.
create function metered._others_fall_due(tip metered.ledger, of_nos bigint[], clk timestamptz) returns timestamptz
language plpgsql stable
as $$
declare
    line record;
    here boolean;
    own  timestamptz;
begin
    for skipped in 0..1000 loop     -- one by one: the planner would sort all that a loop over a query could want
        select x.due, x.hold, metered._written_here(x.row_xmin) as here into line
        from (select y.due, y.hold, y.xmin as row_xmin from metered.hold_lines y
              where y.scope = tip.scope and y.open > 0 and y.due >= tip.next_due and y.due > clk
              order by y.due limit 1 offset skipped) x;
        exit when not found;
        -- A line that was written here is of a hold that was placed, or only extended, here.
        here := (line.hold = any (of_nos)) is true;
        if line.here and not here then
            select metered._written_here(e.xmin) into here from metered.hold_events e where e.hold = line.hold and e.version = 1;
        end if;
        if here is not true then
            return line.due;
        end if;
        own := coalesce(own, line.due);
    end loop;
    return coalesce(own, greatest(clk, tip.next_due));
end
$$;

-- Who holds the held units of a scope that a limit refuses: this transaction, or the holds of_nos (own),
-- leases until leases_end (leased), and others. falls_due is when the first unit becomes free that is not own.
create function metered._who_holds(tip metered.ledger, held bigint, of_nos bigint[], clk timestamptz,
    out own bigint, out leased bigint, out falls_due timestamptz, out leases_end timestamptz)
language plpgsql stable
as $$
declare
    here record;
    open_leases record;
begin
    here := metered._held_here(tip, of_nos);
    own := here.units;
    leased := 0;
    if held <= own then
        return;
    end if;
    open_leases := metered._leased_units(tip.scope, here.leased);
    leased := open_leases.units;
    if held > own + leased then
        falls_due := metered._others_fall_due(tip, of_nos, clk);
    end if;
    if leased > 0 then
        -- One that has ended waits for its settlement: pools look every 2 seconds.
        leases_end := case when open_leases.ends_at > clk then open_leases.ends_at else clk + interval '2 s' end;
        falls_due := least(falls_due, leases_end);
    end if;
end
$$;

-- When a limit by period admits units that find no room before their period ends: then, or when enough of
-- the units that are still held then, and of minima of that very moment, have left. own and so on are as in _who_holds.
create function metered._fits_after_period(tip metered.ledger, lim metered.charge_limit, units bigint, period_end timestamptz,
    own bigint, leased bigint, leases_end timestamptz, clk timestamptz, of_nos bigint[]) returns timestamptz
language plpgsql stable
as $$
declare
    minima    record;
    held_then bigint;
begin
    minima := metered._minima_leave(tip, lim, period_end, period_end + interval '1 microsecond', clk, of_nos);
    held_then := tip.held - case when leases_end <= period_end then leased else 0 end
        - case when tip.next_due <= period_end then metered._due_units(tip.scope, tip.next_due, period_end) else 0 end
        + coalesce(minima.units[1], 0);
    if greatest(held_then, own) <= lim.max - units then
        return period_end;
    end if;
    minima := metered._minima_leave(tip, lim, period_end, 'infinity', clk, of_nos);
    return metered._fits_at(tip, lim, lim.max - own - units, 0, null,
        coalesce(metered._first_due(tip.scope, tip.next_due, period_end), greatest(period_end, leases_end)),
        minima.units, minima.leave);
end
$$;

-- The use of a limit that refuses nothing, where its window or period begins before the entries that a purge has kept. A known
-- use of either is 0 or more.
create function metered._unknown_use() returns bigint
language sql immutable
as $$
    select -4611686018427387904
$$;

-- Checks the limits of one call. Every refusal of a charge or of a hold by a limit falls here.
-- tips are the last entries of the charges' scopes, and held has the units of open holds of each.
-- used has the units that count against each limit, without held ones (or _unknown_use). refused lists every closed scope, or every limit that refuses:
--   limit     its number in the call, from 0 on
--   held      units that others hold; own: that this transaction holds, or the holds of_nos, which it captures; leased: on leases
--   retry_us  microseconds until it admits the charge, -1 for never: a lifetime's spending does not age
--   due_us    microseconds until a hold falls due
--   period    of a limit by period
--
-- A caller that has looked at some limits passes its results: used of these, and the base of the last one (known).
create function metered._check_limits(charges metered.new_charge[], tips metered.ledger[], held bigint[],
    clk timestamptz, ahead interval, of_nos bigint[], known metered.counted,
    inout used bigint[], out refused jsonb)
language plpgsql stable
as $$
declare
    charge      metered.new_charge;
    lim         metered.charge_limit;
    nth         int := 0;
    nth_limit   int := 0;
    tip         metered.ledger;
    counts      bigint;
    own         bigint;
    room        bigint;
    since       timestamptz;
    found_units record;
    base_seq    bigint := known.base_seq;
    base_spent  bigint := known.base_spent;
    retry       timestamptz;
    falls_due   timestamptz;  -- the first unit that others hold
    leased      bigint;
    leases_end  timestamptz;
    span        timestamptz[];   -- of a limit by period
    minima      record;           -- minima, and when they leave
    fits        timestamptz;
    spent       bigint;
    apart       bigint;           -- units that count and are in no entry: of tallies, and minima of due holds
begin
    foreach tip in array tips loop
        if tip.next_due = '-infinity' then
            refused := metered._with_absent(refused, tip.scope, 'closed');
        end if;
    end loop;
    if refused is not null then
        return;
    end if;
    foreach charge in array charges loop
        nth := nth + 1;
        tip := tips[nth];
        foreach lim in array charge.limits loop
            nth_limit := nth_limit + 1;
            continue when nth_limit < known.nth;
            counts := used[nth_limit];
            span := case when lim.win is null then metered._period_at(lim.period, greatest(clk, tip.at)) end;
            since := null;
            apart := 0;
            if counts is null and lim.win = interval '0' then
                counts := tip.spent - tip.refunded - tip.credited;
            elsif counts is null then
                if (tip.at <= clk + ahead) is not true and lim.max < 9223372036854775807 then
                    raise exception 'the last entry is ahead of the clock'
                        using errcode = 'MT003', detail = jsonb_build_object('scope', tip.scope,
                            'ahead_us', (extract(epoch from tip.at - clk) * 1000000)::bigint);
                end if;
                since := coalesce(greatest(clk, tip.at) - lim.win, span[1] - interval '0.000001');
                counts := 0;
                if tip.at > since then
                    -- A limit that refuses nothing (Limit.Observe) does so, too, where its use is not known.
                    if lim.max = 9223372036854775807 and (metered._base(tip.scope, tip.seq, tip.epoch, since)).seq is null then
                        used[nth_limit] := metered._unknown_use();
                        continue;
                    end if;
                    found_units := metered._spent_since(tip, since);
                    counts := found_units.used;
                    base_seq := found_units.base_seq;
                    base_spent := found_units.base_spent;
                end if;
            end if;
            if tip.tallied then
                apart := (metered._tallied_units(tip, since)).units;
            end if;
            if tip.next_due <= clk then
                apart := apart + metered._minima(tip, since, clk);
            end if;
            counts := counts + apart;
            used[nth_limit] := counts;
            continue when counts <= lim.max - held[nth] - charge.amount;
            own := 0;
            leased := 0;
            falls_due := null;
            leases_end := null;
            if held[nth] > 0 then
                found_units := metered._who_holds(tip, held[nth], of_nos, clk);
                own := found_units.own;
                leased := found_units.leased;
                falls_due := found_units.falls_due;
                leases_end := found_units.leases_end;
            end if;
            retry := null;
            room := lim.max - held[nth] - charge.amount;
            if lim.win > interval '0' and room >= 0 and apart = 0 then
                retry := metered._leaves_at(tip, base_seq, base_spent, counts, lim.win, room);
            elsif lim.win > interval '0' and room >= 0 then
                minima := metered._minima_leave(tip, lim, '-infinity', clk + interval '1 microsecond', clk, of_nos);
                retry := metered._fits_at(tip, lim, room, counts - apart, row(nth_limit, base_seq, base_spent), clk, minima.units, minima.leave);
            end if;
            -- The end of holds can make room, sooner or at all: but for their minima, until these have left.
            room := lim.max - own - charge.amount;
            spent := counts - apart;
            if lim.win = interval '0' then    -- it may be less than 0
                room := greatest(-1, least(9223372036854775807, room::numeric - spent))::bigint;
                spent := 0;
            end if;
            if room >= 0 and falls_due < coalesce(retry, 'infinity') and falls_due < coalesce(span[2], 'infinity') then
                minima := metered._minima_leave(tip, lim, '-infinity', 'infinity', clk, of_nos);
                fits := metered._fits_at(tip, lim, room, spent, row(nth_limit, base_seq, base_spent), falls_due, minima.units, minima.leave);
                retry := least(retry, case when span is null or fits < span[2] then fits end);
            end if;
            if lim.win is null and room >= 0 and retry is null then
                retry := metered._fits_after_period(tip, lim, charge.amount, span[2], own, leased, leases_end, clk, of_nos);
            end if;
            refused := coalesce(refused, '[]') || jsonb_build_object(
                'limit', nth_limit - 1, 'used', counts, 'held', held[nth] - own - leased, 'own', own, 'leased', leased,
                'retry_us', coalesce((extract(epoch from retry - clk) * 1000000)::bigint, -1),
                'due_us', (extract(epoch from falls_due - clk) * 1000000)::bigint,
                'period', span);
        end loop;
    end loop;
end
$$;

-- Fails with 40001 unless tips are still the last entries of their scopes, which are locked: a refusal that rests on an old
-- snapshot must not be final. It writes an entry after each, which collides with one that the snapshot does not see, and takes it back.
create function metered._refuse_stale(tips metered.ledger[]) returns void
language plpgsql volatile
as $$
declare
    tip metered.ledger;
begin
    foreach tip in array tips loop
        perform from metered.ledger l where l.scope = tip.scope and l.seq = tip.seq for key share;
        tip.seq := tip.seq + 1;
        tip.amount := 1;
        tip.at := coalesce(nullif(tip.at, '-infinity'), metered.clock());
        tip.kind := 'c';
        perform metered._append(tip);
    end loop;
    raise exception using errcode = 'MT100';
exception when sqlstate 'MT100' then
    null;
end
$$;

-- Checks charges of scopes with due holds. If they are let in, all due holds are freed. stand are the
-- last entries after that. A charge that is let in because lines are due is let in for good, so they
-- are freed for good: a clock that is set back must not bring them to life.
create function metered._expire_and_check(charges metered.new_charge[], tips metered.ledger[], clk timestamptz,
    ahead interval, wait_ms int, of_nos bigint[],
    out stand metered.ledger[], out used bigint[], out held bigint[], out refused jsonb)
language plpgsql volatile
as $$
declare
    tip     metered.ledger;
    freed   text[];             -- scopes with units that due lines free
    due     record;
    verdict record;
    charge  metered.new_charge;
begin
    -- If the key were another scope's, the reads below would not be under the lock.
    foreach charge in array charges loop
        if not metered._key_fits(charge.key, charge.scope) then
            perform metered._require(false, 'key');
        end if;
    end loop;
    foreach tip in array tips loop
        select count(*) as lines, coalesce(sum(l.open), 0) as units into due
        from metered.hold_lines l
        where tip.next_due <= clk and l.scope = tip.scope and l.open > 0
          and l.due >= tip.next_due and l.due <= clk;
        if tip.lots_end is not null and due.lines > metered._lines_per_step() then
            perform metered._refuse_behind(tip.scope);
        end if;
        held := held || tip.held - due.units::bigint;
        if due.units > 0 then
            freed := freed || tip.scope;
        end if;
    end loop;
    stand := tips;
    tips := metered._without_lapsing(tips, clk);     -- a bound, where not all is ended that is due
    verdict := metered._check_limits(charges, tips, held, clk, ahead, of_nos, null, null);
    used := verdict.used;
    refused := verdict.refused;
    for i in 1..cardinality(stand) loop
        stand[i].crossed := tips[i].crossed;
    end loop;
    if refused is not null or freed is null then
        return;
    end if;
    perform metered._end_due(freed, clk, wait_ms);
    for i in 1..cardinality(stand) loop
        continue when stand[i].scope <> all (freed);
        stand[i] := metered._entry_for_write(stand[i].scope);
        if stand[i].held > held[i] then
            perform metered._collided();
        end if;
    end loop;
end
$$;

-- Thresholds: levels of use. The charge that reaches one reports it, once.
--
-- A limit comes with its thresholds, each in a line: level, rearm, key. level and rearm are used units, with held ones unless the key
-- says that spending alone counts. The text has no quotes, since quotes are doubled at each nesting of a composite. tell_at is the lowest level. The scope's last
-- entry has the reported thresholds (crossed), by key: of a period {"from", "until"}, its bounds; of a lifetime {"rearm"}; of a window
-- {"until", "net"}, a proof that it is not armed again before that time, unless spent and held units, less refunds, fall below net. See ADR 15.

-- Whether a threshold with that key is on spending alone, which ignores held units. Its kind is in upper case.
create function metered._on_spending(key text) returns boolean
language sql immutable
as $$
    select ascii(key) < 97
$$;

-- The key in a line of a limit's thresholds.
create function metered._threshold_key(line text) returns text
language sql immutable
as $$
    select substr(line, length(split_part(line, ' ', 1)) + length(split_part(line, ' ', 2)) + 3)
$$;

-- The limits, with tell_at as the lowest level that is not reported yet, or null. If a threshold may be armed again, tell_at
-- is so low that no bound admits a charge. told is not null, and spent is without refunds.
create function metered._untold(limits metered.charge_limit[], told jsonb, spent bigint, held bigint, credited bigint, at timestamptz)
returns metered.charge_limit[]
language plpgsql stable
as $$
declare
    lim       metered.charge_limit;
    nth       int := 0;
    threshold text;
    key       text;
    was       jsonb;
    net       bigint;
begin
    foreach lim in array limits loop
        nth := nth + 1;
        continue when lim.thresholds is null;
        if octet_length(lim.thresholds) > 1536 then
            perform metered._require(false, 'thresholds');
        end if;
        lim.tell_at := null;
        foreach threshold in array string_to_array(lim.thresholds, chr(10)) loop
            key := metered._threshold_key(threshold);
            was := told -> key;
            net := spent + case when metered._on_spending(key) then 0 else held end;
            lim.tell_at := least(lim.tell_at, case
                when was is null or lim.win is null and not (at >= (was ->> 'from')::timestamptz and at < (was ->> 'until')::timestamptz) then split_part(threshold, ' ', 1)::bigint
                when lim.win is null
                    or lim.win = interval '0' and net - credited > split_part(threshold, ' ', 2)::bigint
                    or lim.win > interval '0' and at < (was ->> 'until')::timestamptz and net >= (was ->> 'net')::bigint
                    then null
                when lim.win = interval '0' then net - credited
                else 0 end);
        end loop;
        limits[nth] := lim;
    end loop;
    return limits;
end
$$;

-- The thresholds that admitted charges cross (crossings, null for none), and all that are reported by then (crossed, in tips).
-- silent: the caller did not say that it will report them.
--
-- A threshold is armed again when use, without this charge, is back at rearm or less, and in a period when the next begins.
-- used is null for a limit that was decided without a count, which crosses and arms nothing.
create function metered._cross_thresholds(charges metered.new_charge[], used bigint[], held bigint[], at timestamptz,
    inout tips metered.ledger[], out crossings jsonb, out silent boolean)
language plpgsql stable
as $$
declare
    charge    metered.new_charge;
    lim       metered.charge_limit;
    tip       metered.ledger;
    told      jsonb;
    threshold record;
    nth       int := 0;
    nth_limit int := 0;
    kept      bigint;        -- held units, if they count
    adds      bigint;        -- units that the charge adds
    net       bigint;
    now       timestamptz;
    span      timestamptz[];
    found     jsonb[] := '{}';  -- the crossings. An array grows in place, and a jsonb is copied for each
begin
    silent := false;
    foreach charge in array charges loop
        nth := nth + 1;
        tip := tips[nth];
        now := greatest(at, tip.at);
        told := coalesce(tip.crossed, '{}');
        foreach lim in array charge.limits loop
            nth_limit := nth_limit + 1;
            continue when lim.thresholds is null or used[nth_limit] is null;
            if octet_length(lim.thresholds) > 1536 then
                perform metered._require(false, 'thresholds');
            end if;
            span := null;
            for threshold in select metered._threshold_key(x) as key, split_part(x, ' ', 1)::bigint as level, split_part(x, ' ', 2)::bigint as rearm
                from unnest(string_to_array(lim.thresholds, chr(10))) x loop
                kept := case when metered._on_spending(threshold.key) then 0 else held[nth] end;
                adds := charge.amount - case when metered._on_spending(threshold.key) then charge.held else 0 end;
                net := tip.spent - tip.refunded + case when metered._on_spending(threshold.key) then 0 else tip.held end;
                if told -> threshold.key is not null
                    and (case when lim.win is null then now >= (told -> threshold.key ->> 'from')::timestamptz and now < (told -> threshold.key ->> 'until')::timestamptz else used[nth_limit] + kept > threshold.rearm end) then
                    continue when lim.win is null or lim.win = interval '0' or now < (told -> threshold.key ->> 'until')::timestamptz
                        and net >= (told -> threshold.key ->> 'net')::bigint;
                elsif used[nth_limit] + kept + adds >= threshold.level then
                    span := case when lim.win is null then coalesce(span, metered._period_at(lim.period, now)) end;
                    found := found || jsonb_build_object('scope', charge.scope, 'key', threshold.key, 'nth', nth, 'at', now,
                        'used', used[nth_limit] + charge.amount - charge.held, 'held', held[nth] + charge.held, 'period', span);
                    silent := silent or lim.telling is not true;
                else
                    -- A period that ended is remembered: the clock may be set back.
                    told := case when lim.win is null then told else told - threshold.key end;
                    continue;
                end if;
                told := told || jsonb_build_object(threshold.key, case
                    when lim.win is null then jsonb_build_object('from', span[1], 'until', span[2])
                    when lim.win = interval '0' then jsonb_build_object('rearm', threshold.rearm)
                    else jsonb_build_object('until', metered._reported_until(tip, lim.win, threshold.rearm - kept - adds, now), 'net', net + adds) end);
            end loop;
        end loop;
        if told <> coalesce(tip.crossed, '{}') then
            tip.crossed := metered._kept_reports(told, charges[nth].limits, now, tip);
            tips[nth] := tip;
        end if;
    end loop;
    if found <> '{}' then
        crossings := to_jsonb(found);
    end if;
end
$$;

-- The crossings, each with the entry of its charge (seq).
create function metered._crossed_at(crossings jsonb, seqs bigint[]) returns jsonb
language plpgsql immutable
as $$
begin
    return (select jsonb_agg(x - 'nth' || jsonb_build_object('seq', seqs[(x ->> 'nth')::int])) from jsonb_array_elements(crossings) x);
end
$$;

-- Until when a window keeps more than room of its spent units. Minima of due lines, not written yet, will be dated now or later.
create function metered._reported_until(tip metered.ledger, win interval, room bigint, now timestamptz) returns timestamptz
language plpgsql stable
as $$
declare
    counted record;
begin
    if room < 0 or tip.at <= now - win then
        return now + win;
    end if;
    counted := metered._spent_since(tip, now - win);
    if counted.used <= room then
        return now + win;
    end if;
    return metered._leaves_at(tip, counted.base_seq, counted.base_spent, counted.used, win, room);
end
$$;

-- The thresholds that a scope remembers as reported: up to 64, or as many as the limits or tip have. Beyond that it forgets thresholds of periods and windows
-- that were over a day ago and that the limits do not have. If it cannot forget enough, this fails: a threshold would be reported twice.
create function metered._kept_reports(told jsonb, limits metered.charge_limit[], at timestamptz, tip metered.ledger) returns jsonb
language plpgsql stable
as $$
declare
    own  text[];
    most int;
    kept jsonb;
begin
    if (select count(*) from jsonb_object_keys(told)) <= 64 then
        return nullif(told, '{}');
    end if;
    own := array(select metered._threshold_key(x) from unnest(limits) l, lateral unnest(string_to_array(l.thresholds, chr(10))) x);
    most := greatest(64, cardinality(own), (select count(*) from jsonb_object_keys(tip.crossed)));
    kept := (
        select jsonb_object_agg(y.key, y.value)
        from (select x.key, x.value, (x.value ->> 'until')::timestamptz as until from jsonb_each(told) x
              order by x.key = any (own) desc, coalesce((x.value ->> 'until')::timestamptz > at - interval '24 hours', true) desc, until desc, x.key limit most) y);
    if exists (select from jsonb_each(told - array(select jsonb_object_keys(kept))) x where coalesce((x.value ->> 'until')::timestamptz > at - interval '24 hours', true)) then
        raise exception 'the scope has more thresholds than %', most using errcode = 'MT012', detail = tip.scope;
    end if;
    return kept;
end
$$;

-- The thresholds that stay reported when entry, a credit or refund not written yet, lowers the use of a lifetime. Holds
-- are due by the clock, which may have been set back since the entry before.
create function metered._rearmed(e metered.ledger) returns jsonb
language plpgsql stable
as $$
declare
    clk  timestamptz := least(e.at, metered.clock());
    used bigint := e.spent - e.refunded - e.credited
        + case when e.next_due <= clk then metered._minima(e, null, clk) else 0 end
        + case when e.lots_end is not null then metered._lapsing(e, clk) else 0 end;
    held bigint := e.held - case when e.next_due <= clk then metered._due_units(e.scope, e.next_due, clk) else 0 end;
begin
    return metered._armed(e.crossed, used, held);
end
$$;

-- The thresholds that stay reported of these, where so many units of a lifetime are used, and so many held.
create function metered._armed(crossed jsonb, used bigint, held bigint) returns jsonb
language plpgsql immutable
as $$
begin
    return (select jsonb_object_agg(x.key, x.value) from jsonb_each(crossed) x
        where (used + case when metered._on_spending(x.key) then 0 else held end <= (x.value ->> 'rearm')::bigint) is not true);
end
$$;

-- The reported thresholds after a clock repair. tip is the last entry before it. Windows are counted anew, since the proof was by the clock before. A
-- period that has not begun by the new clock is forgotten: its charges count in the period of now. The reports of the period of now are looked up
-- in the chain, at the last entry before each period that is forgotten, and at the last one by the new clock, for thresholds that the clock before made old.
create function metered._reported_after_repair(tip metered.ledger, clk timestamptz) returns jsonb
language plpgsql stable
as $$
declare
    told     jsonb := '{}';
    crossing record;
    was      jsonb;
begin
    for crossing in
        select e.key, e.value
        from (select coalesce((
                select jsonb_object_agg(o.key, o.value)
                from metered._base(tip.scope, tip.seq, tip.epoch, clk) b
                join metered.ledger y on y.scope = tip.scope and y.seq = b.seq, lateral jsonb_each(y.crossed) o
                where o.value ? 'from'), '{}') || tip.crossed as all_of) a, lateral jsonb_each(a.all_of) e
    loop
        was := case when crossing.value ? 'net' then crossing.value || jsonb_build_object('until', clk) else crossing.value end;
        while (was ->> 'from')::timestamptz > clk loop
            was := (select y.crossed -> crossing.key
                from metered._base(tip.scope, tip.seq, tip.epoch, (was ->> 'from')::timestamptz - interval '0.000001') b
                join metered.ledger y on y.scope = tip.scope and y.seq = b.seq);
        end loop;
        told := told || case when was is not null then jsonb_build_object(crossing.key, was) else '{}' end;
    end loop;
    return nullif(told, '{}');
end
$$;

-- Fails for a caller that crosses a threshold, and did not say that it reports.
create function metered._refuse_unreported() returns void
language plpgsql
as $$
begin
    raise exception 'a threshold is crossed, and nobody would be told' using errcode = 'MT011';
end
$$;

-- The thresholds that are crossed without a charge, by ends of lots and by revoked units. entry is the scope's last entry, and due ends
-- are not written yet. The caller appends the next entry with crossed, and reports crossings. silent: it did not say that it will.
-- crossed is null where the caller has no thresholds of a lifetime, and {} where none is reported any more.
create function metered._cross_lowered(e metered.ledger, units bigint, of_limits metered.charge_limit[], clk timestamptz,
    out crossed jsonb, out crossings jsonb, out silent boolean)
language plpgsql stable
as $$
declare
    lifetimes metered.charge_limit[] := array(select l::metered.charge_limit from unnest(of_limits) l where l.win = interval '0' and l.thresholds is not null);
    held      bigint := e.held;
    due       record;
    crossing  record;
begin
    silent := false;
    if cardinality(lifetimes) > 0 then
        due := metered._due_lots(e, clk);
        e.credited := e.credited - metered._lapsing_after(e, clk, due.lots, due.lapsed, due.debt);
        e.crossed := due.crossed;
        if e.next_due <= clk then
            held := held - metered._due_units(e.scope, e.next_due, clk);
            e.spent := e.spent + metered._minima(e, null, clk);
        end if;
        begin
            -- The units are as those of a charge: without them use may be so low that a lot which has begun arms a level.
            crossing := metered._cross_thresholds(array[row(e.scope, null, units, 0, lifetimes, null, null, null, null)::metered.new_charge],
                array_fill(e.spent - e.refunded - e.credited, array[cardinality(lifetimes)]), array[held], clk, array[e]);
            crossed := coalesce((crossing.tips[1]).crossed, '{}');
            crossings := crossing.crossings;
            silent := crossing.silent;
        exception when sqlstate 'MT012' then    -- a lot ends in any case
        end;
    end if;
end
$$;

-- The limits that have thresholds on spending alone, with only these, and raised so that they refuse nothing. Null for none.
create function metered._spent_limits(limits metered.charge_limit[]) returns metered.charge_limit[]
language plpgsql immutable
as $$
declare
    one     metered.charge_limit;
    watched int := 0;
begin
    foreach one in array coalesce(limits, '{}') loop
        watched := watched + (one.tell_at is not null)::int;
    end loop;
    return case when watched > 0 then (
        select array_agg(row(9223372036854775807, l.win, l.period, t.lowest, t.lines, l.telling)::metered.charge_limit)
        from unnest(limits) l, lateral (
            select string_agg(x, chr(10)) as lines, min(split_part(x, ' ', 1)::bigint) as lowest
            from unnest(string_to_array(l.thresholds, chr(10))) x where metered._on_spending(metered._threshold_key(x))) t
        where t.lines is not null) end;
end
$$;

-- The thresholds that a capture crosses: take has its held units as a negative number (held), and its units beyond them (amount).
-- tip is the scope's last entry, and the limits are _spent_limits. As in _write_charges a bound decides where it can. If the use of
-- a limit is unknown, its thresholds are not reported. crossed is null where nothing was judged, and {} where none is reported any more.
create function metered._cross_captured(take metered.new_charge, tip metered.ledger, clk timestamptz, ahead interval,
    out crossed jsonb, out crossings jsonb, out silent boolean)
language plpgsql stable
as $$
declare
    untold   metered.charge_limit[] := take.limits;
    lim      metered.charge_limit;
    counted  boolean := tip.at > clk or tip.next_due <= clk or tip.lots_end <= greatest(clk, tip.at);
    verdict  record;
    crossing record;
begin
    silent := false;
    if tip.lots_end <= greatest(clk, tip.at) and tip.crossed is not null then
        tip.crossed := (metered._due_lots(tip, clk)).crossed;
    end if;
    if tip.crossed is not null then
        untold := metered._untold(untold, tip.crossed, tip.spent - tip.refunded, tip.held, tip.credited, clk);
    end if;
    foreach lim in array untold loop
        counted := coalesce(counted, false) or coalesce(tip.spent - case when lim.win = interval '0' then tip.refunded + tip.credited
            when tip.anchor_at < coalesce(clk - lim.win + interval '0.000001', (metered._period_at(lim.period, clk))[1]) then tip.anchor_spent
            else 0 end + take.amount - take.held >= lim.tell_at, false);
    end loop;
    if counted then
        verdict := metered._check_now(array[take], array[tip], clk, ahead);
        crossing := metered._cross_thresholds(array[take], verdict.used, verdict.held, clk, array[tip]);
        crossed := coalesce((crossing.tips[1]).crossed, '{}');
        crossings := crossing.crossings;
        silent := crossing.silent;
    end if;
exception when sqlstate 'MT002' or sqlstate 'MT003' or sqlstate 'MT010' or sqlstate 'MT012' then
    crossed := null;
end
$$;

-- Writes the entries of charges, all or none: either refused is null, and each charge has an
-- entry, or nothing was written. The modes:
--   answer   returns a refusal
--   raise    raises a refusal, as SQLSTATE MT001 with the JSON as its detail
--   look     takes no lock and writes nothing. It returns the refusal that a charge later in the
--            same transaction would get. That charge then finds its statements prepared
--   applied  is answer, called by _write_for_uses
--
-- Most charges are let in while nothing is due. That case is decided here, and all others
-- by _check_limits or _expire_and_check. Only _check_limits refuses. The cost of a
-- statement of PL/pgSQL in a transaction that runs it once is mostly its preparation,
-- so there are few, and one charge alone is written without arrays of its state.
--
-- standing: the caller wants the use of each limit (used). Without it an upper bound of a window's use
-- is enough for most charges: the units spent since the anchor of the last entry, or ever. The anchor
-- is older than the window's beginning, and refunds only lower the use. If the bound is not enough,
-- the window's base is looked up, and becomes the anchor (ADR 4).
create function metered._write_charges(charges metered.new_charge[], ahead interval, wait_ms int,
    origin metered.origin, mode text, hold metered.hold_terms, standing boolean,
    out seqs bigint[], out ats timestamptz[], out used bigint[], out held bigint[],
    out refused jsonb, out at timestamptz, out periods timestamptz[], out crossed jsonb)
language plpgsql volatile
as $$
declare
    charge  metered.new_charge;
    lim     metered.charge_limit;
    tip     metered.ledger;
    tips    metered.ledger[];
    nth     int;            -- charges so far, or null
    nth_limit int;          -- limits so far, or null
    counts  bigint;         -- units that count against a limit
    since   timestamptz;
    base_seq      bigint;   -- the last entry before the window
    base_spent    bigint;
    base_refunded bigint;
    part    record;
    look    boolean := mode = 'look';
    plain   boolean := true;
    due     boolean;
    span    timestamptz[];  -- the start and the end of a limit's period
    absent  jsonb;          -- scopes that must exist and are missing
    units   bigint;
    tallies timestamptz[];  -- the times of charges that are tallies
    -- Scopes of charges without limits. They have tallies from now on if this charge had to wait.
    sums    text[];
    waited  boolean;
begin
    foreach charge in array charges loop
        nth := coalesce(nth, 0) + 1;
        if charge.limits is null then
            if not look and not metered._sharded() and not metered._one_snapshot() then
                at := metered._tally(charge, origin, hold.id);
                if at is not null then
                    tallies[nth] := at;
                end if;
            end if;
            sums := sums || charge.scope;
        end if;
    end loop;
    for which in 1..case when sums is not null and tallies is null then nth else 0 end loop
        charges[which].limits := coalesce(charges[which].limits, '{}');
    end loop;
    nth := null;
    if tallies is not null then
        part := metered._write_others(charges, tallies, ahead, wait_ms, origin, mode, hold, standing);
        seqs := part.seqs;
        ats := part.ats;
        used := part.used;
        held := part.held;
        refused := part.refused;
        at := coalesce(part.at, at);
        periods := part.periods;
        crossed := part.crossed;
        return;
    end if;
    if hold.at is null then
        -- One lock needs no order.
        if not look and (cardinality(charges) > 1 or metered._try_lock(charges[1].key) is not true) then
            waited := metered._lock_charges(charges, wait_ms);
        end if;
        at := metered.clock();  -- after the lock: a wait must not date the entry back
    else
        at := hold.at;
    end if;
    foreach charge in array charges loop
        nth := coalesce(nth, 0) + 1;
        if (charge.amount between 1 and 9007199254740992 and charge.held between 0 and charge.amount
            and octet_length(charge.scope) between 1 and 255 and coalesce(pg_column_size(charge.note), 0) <= 8192
            and pg_column_compression(charge.note) is null and cardinality(charge.limits) <= 16
            and charge.must_exist is not true
            and ((charge.note ? 'use') is not true or mode in ('look', 'applied'))) is not true then
            if charge.note ? 'use' and mode not in ('look', 'applied') then
                part := metered._write_for_uses(charges, ahead, wait_ms, origin, mode, hold, standing, at);
                seqs := part.seqs;
        ats := part.ats;
        used := part.used;
        held := part.held;
        refused := part.refused;
        at := coalesce(part.at, at);
        periods := part.periods;
        crossed := part.crossed;
                return;
            end if;
            absent := metered._admit(charge, absent, look, wait_ms);
            plain := plain and absent is null;
        end if;
        if look then
            select * into tip from metered.ledger y where y.scope = charge.scope order by y.seq desc limit 1;
        else
            select * into tip from metered.ledger y where y.scope = charge.scope
            order by y.seq desc limit 1 for key share;
        end if;
        if not found then
            tip := case when look then metered._fresh(charge.scope) else metered._first_for_write(charge.scope) end;
        end if;
        if tip.tallied then
            if look then
                plain := false;
            else
                tip := metered._fold(tip);
            end if;
        elsif charge.scope = any (sums) and (waited or current_setting('metered_tx.waited', true) = 'true')
            and tip.seq > 0 and tip.epoch = 0 and tip.lots_end is null and not metered._sharded() then
            tip.tallied := true;
        end if;
        if tip.at > at or tip.next_due <= at or tip.lots_end <= at or tip.crossed is not null then
            plain := plain and (tip.at > at or tip.next_due <= at or tip.lots_end <= at) is not true;
            due := due or tip.next_due <= at or tip.lots_end <= greatest(at, tip.at);
            if tip.crossed is not null then
                charge.limits := metered._untold(charge.limits, tip.crossed, tip.spent - tip.refunded,
                    tip.held, tip.credited, at);
            end if;
        end if;
        foreach lim in array charge.limits loop
            exit when plain is not true;
            nth_limit := coalesce(nth_limit, 0) + 1;
            continue when standing is not true and lim.win > interval '0'
                and tip.spent - case when tip.anchor_at <= at - lim.win then tip.anchor_spent else 0 end <= least(lim.max, lim.tell_at - 1) - tip.held - charge.amount;
            since := at - lim.win;
            if since = at then
                counts := tip.spent - tip.refunded - tip.credited;
            elsif tip.at <= since then
                counts := 0;
            else
                if since is null then   -- a limit by period
                    continue when standing is not true and tip.spent <= least(lim.max, lim.tell_at - 1) - tip.held - charge.amount;
                    span := metered._period_at(lim.period, at);
                    since := span[1] - interval '0.000001';
                    continue when standing is not true and tip.anchor_at <= since
                        and tip.spent - tip.anchor_spent <= least(lim.max, lim.tell_at - 1) - tip.held - charge.amount;
                    periods := periods || span;
                end if;
                select coalesce(b.seq, (select 0 from metered.ledger y where y.scope = charge.scope and y.seq = 2)),
                    coalesce(b.spent, 0), coalesce(b.refunded, 0) into base_seq, base_spent, base_refunded
                from (values (1)) one left join lateral (
                    select base.seq, base.spent, base.refunded
                    from (select y.seq from metered.ledger y
                where y.scope = charge.scope and y.epoch = tip.epoch and y.at <= since and (y.seq & 15 = 1 or y.kind = 'k')
                order by y.at desc, y.seq desc limit 1) mark,
            lateral (select y.seq, y.spent, y.refunded from metered.ledger y
                where y.scope = charge.scope and y.seq between mark.seq and mark.seq + 15 and y.epoch = tip.epoch and y.at <= since
                order by y.seq desc limit 1) base) b on true;
                if base_seq > 1 or tip.epoch = 0 and (base_seq = 0 or base_seq is null and tip.seq <= 16) then
                    counts := tip.spent - base_spent - case when base_refunded = tip.refunded then 0
                        else metered._refunds_after(charge.scope, tip.seq, coalesce(base_seq, 0)) end;
                elsif lim.max = 9223372036854775807 then
                    plain := false;     -- it refuses nothing: _check_limits looks whether its use is known
                    exit;
                else
                    part := metered._spent_since(tip, since);
                    base_seq := part.base_seq;
                    base_spent := part.base_spent;
                    counts := part.used;
                end if;
                if standing is not true and base_spent > 0 then
                    tip.anchor_at := since;
                    tip.anchor_spent := base_spent;
                end if;
            end if;
            used[nth_limit] := counts;
            plain := counts <= least(lim.max, lim.tell_at - 1) - tip.held - charge.amount;
        end loop;
        if plain and nth = cardinality(charges) and nth = 1 and charge.held = 0 and not look then
            if tip.held > 0 then
                tip.next_due := metered._due_after(charge.scope, tip.seq, tip.held, tip.next_due, at);
            end if;
            insert into metered.ledger as y (seq, amount, at, spent, refunded, credited, held, epoch, kind, scope, next_due, hold, operation_tenant, operation, note, anchor_at, anchor_spent, lots_end, crossed, tallied, others)
            values (tip.seq + 1, charge.amount, _write_charges.at, tip.spent + charge.amount, tip.refunded, tip.credited, tip.held, tip.epoch, 'c', charge.scope, tip.next_due, hold.id, origin.tenant, origin.operation, charge.note, tip.anchor_at, tip.anchor_spent, tip.lots_end, tip.crossed, tip.tallied, int8smaller(tip.others, tip.seq))
            on conflict do nothing
            returning array[y.seq], array[y.at], array[y.held], case when standing then used end
            into seqs, ats, held, used;
            if seqs is null then
                perform metered._collided();
            elsif tip.lots_end is not null then
                perform metered._use_lots(charge.scope, tip.seq + 1, charge.amount, metered._balance(tip), 't',
                    charge.note ->> 'use');
            end if;
            return;
        end if;
        tips[nth] := tip;
        held[nth] := tip.held;
    end loop;
    if look and plain then
        return;
    elsif plain is not true then
        -- The last limit looked at is the first that may refuse.
        part := metered._judge_charges(charges, tips, held, used, at, ahead, wait_ms, hold.nos, mode,
            standing, absent, due, row(coalesce(nth_limit, 0), coalesce(base_seq, 0), coalesce(base_spent, 0)));
        refused := part.refused;
        used := part.used;
        if refused is not null or look then
            return;
        end if;
        tips := part.tips;
        held := part.held;
        periods := part.periods;
        crossed := part.crossed;
    elsif standing is not true then
        used := null;
    end if;
    nth := 0;
    foreach charge in array charges loop
        nth := nth + 1;
        tip := tips[nth];
        if tip.lots_end <= greatest(at, tip.at) then
            tip := metered._settle_lowered(tip, at, metered._ends_per_call(), charge.amount,
                case when exists (select from unnest(charge.limits) l where l.thresholds is not null)
                    then coalesce(tip.crossed, '{}') end, wait_ms);
        end if;
        if tip.held > 0 then
            tip.next_due := metered._due_after(charge.scope, tip.seq, tip.held, tip.next_due, at);
        end if;
        tip.at := greatest(at, tip.at);
        if metered._lags(tip) then
            tip.lots_end := metered._lots_end_caught_up(tip);
        end if;
        units := charge.amount - charge.held;
        if charge.held > 0 and hold.due_in >= interval '0' then
            if at + hold.due_in <= tip.at then      -- the clock was set back
                perform metered._clear_freed_of(tip);
            end if;
            tip.seq := tip.seq + 1;
            tip.held := tip.held + charge.held;
            tip.next_due := least(tip.next_due, at + hold.due_in);
            insert into metered.ledger (seq, amount, at, spent, refunded, credited, held, epoch, kind, scope, next_due, hold, operation_tenant, operation, note, anchor_at, anchor_spent, lots_end, crossed, tallied, others)
            values (tip.seq, charge.held, tip.at, tip.spent, tip.refunded, tip.credited, tip.held, tip.epoch, 'h', charge.scope, tip.next_due, hold.id, origin.tenant, origin.operation, charge.note, tip.anchor_at, tip.anchor_spent, tip.lots_end, tip.crossed, tip.tallied, coalesce(int8smaller(tip.others, tip.seq - 1), 0) + 1)
            on conflict do nothing
            returning others into tip.others;
            if not found then
                perform metered._collided();
            elsif tip.lots_end is not null then
                perform metered._use_lots(charge.scope, tip.seq, charge.held,
                    case when not metered._lags(tip) then metered._balance(tip) + charge.held end, 'h',
                    charge.note ->> 'use');
            end if;
        elsif charge.held <> 0 then
            raise exception 'a charge holds nothing: place a hold' using errcode = '22023';
        end if;
        if units > 0 then
            tip.seq := tip.seq + 1;
            insert into metered.ledger (seq, amount, at, spent, refunded, credited, held, epoch, kind, scope, next_due, hold, operation_tenant, operation, note, anchor_at, anchor_spent, lots_end, crossed, tallied, others)
            values (tip.seq, units, tip.at, tip.spent + units, tip.refunded, tip.credited, tip.held, tip.epoch, 'c', charge.scope, tip.next_due, hold.id, origin.tenant, origin.operation, charge.note, tip.anchor_at, tip.anchor_spent, tip.lots_end, tip.crossed, tip.tallied, int8smaller(tip.others, tip.seq - 1))
            on conflict do nothing;
            if not found then
                perform metered._collided();
            elsif tip.lots_end is not null then
                perform metered._use_lots(charge.scope, tip.seq, units,
                    case when not metered._lags(tip) then metered._balance(tip) end, 't', charge.note ->> 'use');
            end if;
        end if;
        seqs[nth] := tip.seq;
        ats[nth] := tip.at;
    end loop;
    if crossed is not null then
        crossed := metered._crossed_at(crossed, seqs);
    end if;
end
$$;

-- Judges charges that are not plainly let in, and ends what is due if they are. It returns the last
-- entries of their scopes and the units held after that, the thresholds that they cross, or the refusal.
-- absent, due, and known (see _check_limits) are what _write_charges has found.
create function metered._judge_charges(charges metered.new_charge[], inout tips metered.ledger[],
    inout held bigint[], inout used bigint[], clk timestamptz, ahead interval, wait_ms int,
    of_nos bigint[], mode text, standing boolean, absent jsonb, due boolean, known metered.counted,
    out refused jsonb, out periods timestamptz[], out crossed jsonb)
language plpgsql volatile
as $$
declare
    verdict   record;
    crossings record;
begin
    if absent is not null then
        refused := absent;
        used := null;
        if mode = 'raise' then
            raise exception 'a scope does not exist' using errcode = 'MT001', detail = refused;
        end if;
        return;
    end if;
    -- A refusal, or an error of the clock, must rest on all that is committed by now.
    if metered._one_snapshot() then
        if mode = 'look' then
            perform metered._lock_charges(charges, wait_ms);
        end if;
        perform metered._refuse_stale(tips);
    end if;
    if mode = 'look' then
        verdict := metered._check_now(charges, tips, clk, ahead);
    elsif due then
        verdict := metered._expire_and_check(charges, tips, clk, ahead, wait_ms, of_nos);
        tips := verdict.stand;
        held := verdict.held;
    else
        verdict := metered._check_limits(charges, tips, held, clk, ahead, of_nos, known, used);
    end if;
    refused := verdict.refused;
    used := case when standing then verdict.used end;
    if refused is not null then
        if mode = 'raise' then
            raise exception 'a limit refuses the charge' using errcode = 'MT001', detail = refused;
        end if;
        return;
    end if;
    periods := case when standing then metered._periods_of(charges, tips, clk) end;
    if mode = 'look' then
        return;
    end if;
    crossings := metered._cross_thresholds(charges, verdict.used, held, clk, tips);
    if crossings.silent then
        if mode = 'raise' then
            perform metered._refuse_unreported();
        end if;
        used := null;
        refused := '[{"crossing": true}]';
        return;
    end if;
    tips := crossings.tips;
    crossed := crossings.crossings;
end
$$;

-- When the next lot of a wallet ends, if it lags (_lags) and all ends up to its last entry are
-- written by now. Else its lots_end, as it is.
create function metered._lots_end_caught_up(tip metered.ledger) returns timestamptz
language plpgsql volatile
as $$
begin
    if exists (select from metered.lot_rows y where y.scope = tip.scope and y.open and y.expires_at <= tip.at
            order by y.expires_at, y.age limit 1) then
        return tip.lots_end;
    end if;
    tip.lots_end := metered._next_end(tip.scope, tip.at);
    delete from metered.lot_holds k where k.scope = tip.scope and k.seq = 0;
    return tip.lots_end;
end
$$;

-- The locks of the charges' scopes, in order.
create function metered._lock_charges(charges metered.new_charge[], wait_ms int) returns boolean
language plpgsql volatile
as $$
begin
    return metered._lock_all_scopes(array(select c.scope from unnest(charges) c), array(select c.key from unnest(charges) c), wait_ms);
end
$$;

-- Charges scopes, all or none, without a command, and returns a refusal. Returning the whole
-- answer costs less than assigning each part.
create function metered.charge(charges metered.new_charge[], ahead interval, wait_ms int, standing boolean) returns metered.charged
language plpgsql volatile
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set plan_cache_mode = force_generic_plan
as $$
begin
    if array_lower(charges, 1) <> 1
        or array_ndims(charges) <> 1
        or array_position(charges, null) is not null
        or cardinality(charges) > 64
        or pg_column_size(charges) > 1400 and not metered._fits(charges)
        or wait_ms > 3600000 then
        raise exception 'out of bounds: an argument of charge' using errcode = '22023';
    end if;
    return metered._write_charges(charges, ahead, wait_ms, null, 'answer', null, standing);
end
$$;

-- Charges costs that were incurred, whatever their limits, which only report thresholds. If the use of a limit is unknown, no
-- threshold is reported.
create function metered._charge_anyway(charges metered.new_charge[], ahead interval, wait_ms int, origin metered.origin,
    hold metered.hold_terms) returns metered.charged
language plpgsql volatile
as $$
declare
    tells  boolean := false;
    posted metered.charged;
begin
    for i in 1..cardinality(charges) loop
        charges[i].limits := array(select row(9223372036854775807, l.win, l.period, l.tell_at, l.thresholds, l.telling)::metered.charge_limit
            from unnest(charges[i].limits) l where l.thresholds is not null);
        tells := tells or cardinality(charges[i].limits) > 0;
    end loop;
    if tells then
        begin
            posted := metered._write_charges(charges, ahead, wait_ms, origin, 'answer', hold, false);
            if (posted.refused -> 0 ? 'limit') is not true then
                return posted;
            end if;
        exception when sqlstate 'MT002' or sqlstate 'MT003' or sqlstate 'MT010' or sqlstate 'MT012' then
        end;
        for i in 1..cardinality(charges) loop   -- a sum is beyond 64 bits, for example
            charges[i].limits := '{}';
        end loop;
    end if;
    return metered._write_charges(charges, ahead, wait_ms, origin, 'answer', hold, false);
end
$$;

-- What a charge would meet, and what counts in a scope: answers of the same rules that write nothing.

-- The answer of _check_limits to charges as if due holds had ended, without ending them. Lots for the use of a charge raise its lifetime limits.
create function metered._check_now(charges metered.new_charge[], tips metered.ledger[], clk timestamptz, ahead interval,
    out used bigint[], out held bigint[], out refused jsonb)
language plpgsql stable
as $$
declare
    tip     metered.ledger;
    charge  metered.new_charge;
    verdict record;
    before  metered.ledger[] := tips;
    asked   metered.new_charge[];   -- charges as they came, if one is for a use
    nth     int := 0;
    told    record;
begin
    foreach tip in array tips loop
        held := held || tip.held - case when tip.next_due <= clk then metered._due_units(tip.scope, tip.next_due, clk) else 0 end;
    end loop;
    tips := metered._without_lapsing(tips, clk);
    foreach charge in array charges loop
        nth := nth + 1;
        if charge.note ? 'use' and before[nth].lots_end is not null then
            asked := coalesce(asked, charges);
            charges[nth].limits := metered._raised(charge.limits, metered._kept_for(before[nth], charge.note ->> 'use', clk), tips[nth].spent - tips[nth].refunded - tips[nth].credited + held[nth]
                + case when tips[nth].next_due <= clk then metered._minima(tips[nth], null, clk) else 0 end);
        end if;
    end loop;
    verdict := metered._check_limits(charges, tips, held, clk, ahead, null, null, null);
    used := verdict.used;
    refused := verdict.refused;
    if asked is not null then
        told := metered._told_use(asked, charges, null, used, refused);
        used := told.used;
        refused := told.refused;
    end if;
end
$$;

-- The answer of charge at this moment, without a lock and without writing. STABLE, so that
-- all its statements see one snapshot.
create function metered.check_charge(charges metered.new_charge[], ahead interval,
    out used bigint[], out held bigint[], out refused jsonb, out periods timestamptz[])
language plpgsql stable
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set plan_cache_mode = force_generic_plan
as $$
declare
    charge  metered.new_charge;
    tips    metered.ledger[];
    clk     timestamptz := metered.clock();
    verdict record;
begin
    if array_lower(charges, 1) <> 1
        or array_ndims(charges) <> 1
        or array_position(charges, null) is not null
        or cardinality(charges) > 64
        or pg_column_size(charges) > 1400 and not metered._fits(charges) then
        raise exception 'out of bounds: an argument of check_charge' using errcode = '22023';
    end if;
    foreach charge in array charges loop
        tips := tips || metered._last_entry(charge.scope);
        if charge.must_exist then
            refused := metered._with_absent(refused, charge.scope, metered._absence(charge.scope));
        end if;
    end loop;
    if refused is not null then
        return;
    end if;
    verdict := metered._check_now(charges, tips, clk, ahead);
    used := verdict.used;
    held := verdict.held;
    refused := verdict.refused;
    periods := metered._periods_of(charges, tips, clk);
end
$$;

-- The state of each scope, for each pair with a window. Window 0 is
-- the lifetime, and a null one is a period. with_leases: spends of open leases are used, and not held.
-- charges says how many charges were made in it, refunded or not.
create function metered.usage_of(scopes text[], windows interval[], periods metered.period[], with_leases boolean)
returns table (used bigint, held bigint, spent bigint, refunded bigint, credited bigint, seq bigint, due_us bigint, leased bigint,
    starts_at timestamptz, ends_at timestamptz, charges bigint)
language plpgsql stable
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set plan_cache_mode = force_generic_plan
as $$
declare
    clk     timestamptz := metered.clock();
    since   timestamptz;
    tip     metered.ledger;
    counted record;
    span    timestamptz[];
    after   timestamptz;  -- since, or null for a lifetime
begin
    if array_lower(scopes, 1) <> 1
        or array_ndims(scopes) <> 1
        or array_position(scopes, null) is not null
        or cardinality(scopes) > 1024
        or pg_column_size(scopes) > 255 and not metered._fits(scopes, 255)
        or array_lower(windows, 1) <> 1
        or array_ndims(windows) <> 1
        or cardinality(windows) > 1024
        or array_lower(periods, 1) <> 1
        or array_ndims(periods) <> 1
        or cardinality(periods) > 1024
        or pg_column_size(periods) > 1400 and not metered._fits(periods) then
        raise exception 'out of bounds: an argument of usage_of' using errcode = '22023';
    end if;
    for i in 1..cardinality(scopes) loop
        tip := metered._last_entry(scopes[i]);
        tip.credited := tip.credited - case when tip.lots_end is not null then metered._lapsing(tip, clk) else 0 end;
        span := case when windows[i] is null then metered._period_at(periods[i], greatest(clk, tip.at)) end;
        starts_at := span[1];
        ends_at := span[2];
        since := coalesce(greatest(clk, tip.at) - windows[i], starts_at - interval '0.000001');
        after := case when windows[i] is distinct from interval '0' then since end;
        charges := tip.seq - coalesce(int8smaller(tip.others, tip.seq), 0);
        if after is null then
            used := tip.spent - tip.refunded - tip.credited;
        elsif tip.at <= since then
            used := 0;
            charges := 0;
        else
            counted := metered._spent_since(tip, since);
            used := counted.used;
            charges := charges - metered._charges_upto(tip.scope, counted.base_seq);
        end if;
        held := tip.held;
        spent := tip.spent;
        if tip.tallied then
            counted := metered._tallied_units(tip, after);
            used := used + counted.units;
            charges := charges + counted.charges;
            spent := spent + (metered._tallied_units(tip, null)).units;
        end if;
        if tip.next_due <= clk then
            held := held - metered._due_units(scopes[i], tip.next_due, clk);
            used := used + metered._minima(tip, after, clk);
            spent := spent + metered._minima(tip, null, clk);
            charges := charges + metered._minima_due(tip, after, clk);
        end if;
        refunded := tip.refunded;
        credited := tip.credited;
        seq := tip.seq;
        leased := 0;
        if held > 0 and with_leases then    -- spends of leases count, before they are in the chain
            counted := metered._leased(scopes[i]);
            leased := counted.unspent;
            held := held - counted.unspent - counted.spent;
            used := used + counted.spent;
            spent := spent + counted.spent;
            charges := charges + (metered._unsettled_spends(scopes[i], array['-infinity'::timestamptz], true))[1];
        end if;
        due_us := case when held > 0 then
            extract(epoch from metered._first_due(scopes[i], tip.next_due, clk) - clk) * 1000000 end;
        return next;
    end loop;
end
$$;

-- usage_of without charges, for programs of version 1.
create function metered.usage(scopes text[], windows interval[], periods metered.period[], with_leases boolean)
returns table (used bigint, held bigint, spent bigint, refunded bigint, credited bigint, seq bigint, due_us bigint, leased bigint,
    starts_at timestamptz, ends_at timestamptz)
language plpgsql stable
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set plan_cache_mode = force_generic_plan
as $$
begin
    if array_lower(scopes, 1) <> 1
        or array_ndims(scopes) <> 1
        or array_position(scopes, null) is not null
        or cardinality(scopes) > 1024
        or pg_column_size(scopes) > 255 and not metered._fits(scopes, 255)
        or array_lower(windows, 1) <> 1
        or array_ndims(windows) <> 1
        or cardinality(windows) > 1024
        or array_lower(periods, 1) <> 1
        or array_ndims(periods) <> 1
        or cardinality(periods) > 1024
        or pg_column_size(periods) > 1400 and not metered._fits(periods) then
        raise exception 'out of bounds: an argument of usage' using errcode = '22023';
    end if;
    return query select u.used, u.held, u.spent, u.refunded, u.credited, u.seq, u.due_us, u.leased, u.starts_at, u.ends_at
        from metered.usage_of(scopes, windows, periods, with_leases) u;
end
$$;

-- Charges and holds up to so many units: as many as the limits admit.

-- Units of each charge that its limits do not admit, by the charges' refusal.
create function metered._beyond_limits(charges metered.new_charge[], refused jsonb) returns bigint[]
language plpgsql immutable
as $$
declare
    charge    metered.new_charge;
    lim       metered.charge_limit;
    refusal   jsonb;
    nth_limit int := 0;
    most      numeric;
    all_of    bigint[];
begin
    foreach charge in array charges loop
        most := 0;
        foreach lim in array charge.limits loop
            refusal := jsonb_path_query_first(refused, '$[*] ? (@.limit == $n)', jsonb_build_object('n', nth_limit));
            most := greatest(most, charge.amount - lim.max + (refusal ->> 'used')::numeric + (refusal ->> 'held')::bigint + (refusal ->> 'own')::bigint + (refusal ->> 'leased')::bigint);
            nth_limit := nth_limit + 1;
        end loop;
        all_of := all_of || least(most, charge.amount)::bigint;
    end loop;
    return all_of;
end
$$;

-- _write_charges up to so many units. If limits refuse, all charges are cut by the same units, so that each takes the same, and no less than
-- fewest. Charges that hold units hold fewer then, and spend as many as before. The second attempt has the locks and the clock of the first, so it is
-- refused only if fewest units do not fit, either. Its refusal is the answer.
create function metered._write_up_to(inout charges metered.new_charge[], fewest bigint, ahead interval, wait_ms int,
    origin metered.origin, mode text, hold metered.hold_terms, standing boolean, out posted metered.charged)
language plpgsql volatile
as $$
declare
    charge  metered.new_charge;
    units   bigint;
    less    bigint;
    holding boolean := false;
begin
    posted := metered._write_charges(charges, ahead, wait_ms, origin, 'answer', hold, standing);
    if posted.refused is null or mode = 'answer' and not posted.refused -> 0 ? 'limit' then
        return;
    end if;
    foreach charge in array charges loop
        holding := holding or charge.held > 0;
        units := case when charge.held > 0 then charge.held else coalesce(units, charge.amount) end;
    end loop;
    less := least(units - fewest, (select max(x) from unnest(metered._beyond_limits(charges, posted.refused)) x));
    for i in 1..cardinality(charges) loop
        if holding = (charges[i].held > 0) then
            charges[i].amount := charges[i].amount - less;
            charges[i].held := charges[i].held - case when holding then less else 0 end;
        end if;
    end loop;
    hold.at := posted.at;
    posted := metered._write_charges(charges, ahead, wait_ms, origin, mode, hold, standing);
end
$$;

-- The lots that paid for an entry, in order, as JSON: null for none. A unit that no lot covers is in
-- none of them. Aggregates inside lateral leave the planner no join to choose.
create function metered._lots_of(of_scope text, of_seq bigint) returns json
language plpgsql stable
as $$
begin
    return (select json_agg(json_build_object('lot', y.no, 'reference', coalesce(y.reference, y.of_reference),
            'category', y.category, 'amount', x.amount) order by x.nth)
        from metered.lot_moves x, lateral (
            select z.no, z.reference, (z.plan).of_reference, z.category
            from metered.lot_rows z where z.no = x.lot limit 1) y
        where x.scope = of_scope and x.seq = of_seq);
end
$$;

-- Charges scopes as charge does, and says which lots paid: lots has an element for each charge, null
-- for none. With up_to the amounts are equal: all of it is charged, or else the largest amount that
-- the limits of all scopes admit, at least 1. amount is this, and a refusal is of 1 unit. A refusal
-- of a command raises, because COMMIT follows, and its charges are kept for its record.
create function metered.charge_lots(charges metered.new_charge[], up_to boolean, ahead interval, wait_ms int,
    standing boolean, origin metered.origin, out amount bigint, out seqs bigint[], out ats timestamptz[],
    out used bigint[], out held bigint[], out refused jsonb, out periods timestamptz[], out crossed jsonb, out lots json)
language plpgsql volatile
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set plan_cache_mode = force_generic_plan
as $$
declare
    mode    text := case when origin.operation is null then 'answer' else 'raise' end;
    charge  metered.new_charge;
    written record;
    posted  metered.charged;
    paid    json[];
begin
    if array_lower(charges, 1) <> 1
        or array_ndims(charges) <> 1
        or array_position(charges, null) is not null
        or cardinality(charges) > 64
        or pg_column_size(charges) > 1400 and not metered._fits(charges)
        or wait_ms > 3600000
        or greatest(octet_length(origin.tenant), octet_length(origin.operation)) > 255
        or pg_column_size(origin.note) > 8196
        or pg_column_compression(origin.note) is not null and octet_length(origin.note::text) > 8192 then
        raise exception 'out of bounds: an argument of charge_lots' using errcode = '22023';
    end if;
    if up_to is null then
        perform metered._require(false, 'up_to');
    end if;
    foreach charge in array charges loop
        if (charge.held = 0 and charge.lease is null and charge.amount = case when up_to then charges[1].amount else charge.amount end) is not true then
            perform metered._require(false, 'amounts');
        end if;
    end loop;
    if up_to then
        written := metered._write_up_to(charges, 1, ahead, wait_ms, origin, mode, null, standing);
        posted := written.posted;
        charges := written.charges;
        amount := charges[1].amount;
    else
        posted := metered._write_charges(charges, ahead, wait_ms, origin, mode, null, standing);
    end if;
    seqs := posted.seqs;
    ats := posted.ats;
    used := posted.used;
    held := posted.held;
    refused := posted.refused;
    periods := posted.periods;
    crossed := posted.crossed;
    if refused is not null then
        return;
    end if;
    for i in 1..cardinality(charges) loop
        paid[i] := metered._lots_of(charges[i].scope, seqs[i]);
        if origin.operation is not null then
            perform metered._remember_hold(json_build_object('drawn', json_strip_nulls(json_build_object(
                'wallet', charges[i].scope, 'seq', seqs[i], 'at', ats[i], 'amount', charges[i].amount, 'lots', paid[i]))));
        end if;
    end loop;
    lots := to_json(paid);
end
$$;

-- The part of refused charges that limits admit: each cut by its own limits, or evenly, all cut by as many units as the one that is cut most. Null if
-- nothing is left.
create function metered._as_far_as_admitted(charges metered.new_charge[], refused jsonb, evenly boolean) returns metered.new_charge[]
language plpgsql immutable
as $$
declare
    charge metered.new_charge;
    less   bigint[] := metered._beyond_limits(charges, refused);
    most   bigint := case when evenly then (select max(x) from unnest(less) x) end;
    nth    int := 0;
    fit    metered.new_charge[];
begin
    foreach charge in array charges loop
        nth := nth + 1;
        charge.amount := charge.amount - coalesce(most, less[nth]);
        if charge.amount > 0 then
            fit := fit || charge;
        end if;
    end loop;
    return fit;
end
$$;

-- Usage by time. The sums of a scope at the beginning and at the end of a range are those of two entries, so
-- a range costs the two look-ups, and a series of ranges one look-up for each edge.

-- The sums of a scope's chain before each of the times, which ascend. seq is the last entry before it,
-- refunded_after has the refunds, up to now, of charges after it, and unsettled the spends from open leases
-- between the time and the next one. charges and unsettled_charges say how many charges spent and unsettled are of. If a purge took an answer away, the last row has known_from, since when usage
-- is known. STABLE, so that all its statements see one snapshot.
create function metered.usage_before(of_scope text, times timestamptz[])
returns table (seq bigint, spent bigint, refunded bigint, credited bigint, refunded_after bigint, unsettled bigint,
    known_from timestamptz, charges bigint, unsettled_charges bigint)
language plpgsql stable
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set plan_cache_mode = force_generic_plan
as $$
declare
    tip    metered.ledger := metered._last_entry(of_scope);
    clk    timestamptz := metered.clock();
    open   bigint[];
    due    bigint[];
    apart  bigint[];     -- units of tallies before each time
    opens  bigint[];     -- how many they are
    dues   bigint[];
    aparts bigint[];
    lapsed bigint[];    -- units of a wallet, before each time after tip
    until  timestamptz;
begin
    if octet_length(of_scope) > 255
        or array_lower(times, 1) <> 1
        or array_ndims(times) <> 1
        or array_position(times, null) is not null
        or cardinality(times) > 2001 then
        raise exception 'out of bounds: an argument of usage_before' using errcode = '22023';
    end if;
    perform metered._require(cardinality(times) between 1 and 2001 and array_ndims(times) = 1 and array_lower(times, 1) = 1
        and array_position(times, null) is null, 'times');
    open := case when tip.held > 0 then metered._unsettled_spends(of_scope, times, false) end;
    opens := case when open is not null then metered._unsettled_spends(of_scope, times, true) end;
    due := case when tip.next_due <= clk then metered._due_minima(tip, times, clk, false) end;
    dues := case when due is not null then metered._due_minima(tip, times, clk, true) end;
    apart := case when tip.tallied then metered._tallies_before(tip, times, false) end;
    aparts := case when apart is not null then metered._tallies_before(tip, times, true) end;
    lapsed := case when tip.lots_end is not null then metered._lapsing_before(tip, times, clk) end;
    for i in 1..cardinality(times) loop
        until := times[i] - interval '1 microsecond';       -- an entry at an edge is after it
        unsettled := coalesce(open[i], 0);
        unsettled_charges := coalesce(opens[i], 0);
        if tip.at <= until then
            seq := tip.seq;
            spent := tip.spent + coalesce(due[i], 0) + coalesce(apart[i], 0);
            refunded := tip.refunded;
            credited := tip.credited - coalesce(lapsed[i], 0);
            refunded_after := 0;
            charges := tip.seq - coalesce(int8smaller(tip.others, tip.seq), 0) + coalesce(dues[i], 0) + coalesce(aparts[i], 0);
            return next;
            continue;
        end if;
        select b.seq, b.spent, b.refunded into seq, spent, refunded
        from metered._base(of_scope, tip.seq, tip.epoch, until) b;
        if seq is null and tip.epoch = 0 and (select l.at > until from metered.ledger l where l.scope = of_scope and l.seq = 1) then
            seq := 0;       -- before the scope began: a purge leaves entry 1, which says when that was
            spent := 0;
            refunded := 0;
        elsif seq is null then
            known_from := metered._usage_known_from(tip);
            return next;
            return;
        end if;
        credited := case when tip.credited = 0 and tip.lots_end is null then 0 else
            coalesce((select l.credited from metered.ledger l where l.scope = of_scope and l.seq = usage_before.seq), 0) end;
        -- The rows of refund_sum that a purge took are of charges before seq.
        refunded_after := case when refunded = tip.refunded then 0 when seq = 0 then tip.refunded
            else metered._refunds_after(of_scope, tip.seq, seq) end;
        charges := metered._charges_upto(of_scope, seq);
        return next;
    end loop;
end
$$;

-- usage_before without charges, for programs of version 1.
create function metered.usage_at(of_scope text, times timestamptz[])
returns table (seq bigint, spent bigint, refunded bigint, credited bigint, refunded_after bigint, unsettled bigint,
    known_from timestamptz)
language plpgsql stable
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set plan_cache_mode = force_generic_plan
as $$
begin
    if octet_length(of_scope) > 255
        or array_lower(times, 1) <> 1
        or array_ndims(times) <> 1
        or array_position(times, null) is not null
        or cardinality(times) > 2001 then
        raise exception 'out of bounds: an argument of usage_at' using errcode = '22023';
    end if;
    return query select u.seq, u.spent, u.refunded, u.credited, u.refunded_after, u.unsettled, u.known_from
        from metered.usage_before(of_scope, times) u;
end
$$;

-- How many units of a wallet have lapsed, unwritten, before each of the times, which ascend, less those that
-- began: 0 before its entry tip. From one event of the wallet to the next one it is the same.
create function metered._lapsing_before(tip metered.ledger, times timestamptz[], clk timestamptz) returns bigint[]
language plpgsql stable
as $$
declare
    units  bigint[] := array_fill(0::bigint, array[cardinality(times)]);
    at     timestamptz;
    until  timestamptz;
    comes  timestamptz := '-infinity';      -- the next event
    due    record;
    lapsed bigint;
begin
    for i in 1..cardinality(times) loop
        at := least(clk, times[i] - interval '1 microsecond');
        continue when times[i] <= tip.at;
        if at >= comes then
            until := greatest(at, tip.at);
            due := metered._due_lots(tip, at);
            lapsed := metered._lapsing_after(tip, at, due.lots, due.lapsed, due.debt);
            comes := least(metered._next_end(tip.scope, until),
                (select min(metered._turn_at(x)) from unnest(due.lots) x
                 where x.pending + x.rest + x.kept + x.held > 0 and metered._turn_at(x) > until),
                (select min(y.roll_end) from metered.lot_rows y
                 where y.scope = tip.scope and y.open and y.roll_cap is not null
                   and y.expires_at <= until and y.roll_end > until),
                (select l.due from metered.hold_lines l
                 where l.scope = tip.scope and l.open > 0 and l.due > at order by l.due limit 1));
        end if;
        units[i] := lapsed;
    end loop;
    return units;
end
$$;

-- The minima of a scope's due lines, not freed yet, that count before each of the times (see _minima), or how many they are.
create function metered._due_minima(tip metered.ledger, times timestamptz[], clk timestamptz, counting boolean) returns bigint[]
language plpgsql stable
as $$
declare
    units bigint[] := array_fill(0::bigint, array[cardinality(times)]);
    total bigint := 0;
    line  record;
begin
    for line in
        select width_bucket(greatest(l.due, tip.at), times) as nth, sum(case when counting then 1 else l.at_least - l.captured end)::bigint as amount
        from metered.hold_lines l
        where l.scope = tip.scope and l.open > 0 and l.at_least > 0 and l.at_least > l.captured and l.due >= tip.next_due and l.due <= clk
        group by 1 order by 1
    loop
        if line.nth < cardinality(times) then
            units[line.nth + 1] := line.amount;
        end if;
    end loop;
    for i in 1..cardinality(times) loop
        total := total + units[i];
        units[i] := total;
    end loop;
    return units;
end
$$;

-- The spends from the open leases of a scope, from each time on until the next one, or how many they are. It reads all of their spends.
create function metered._unsettled_spends(of_scope text, times timestamptz[], counting boolean) returns bigint[]
language plpgsql stable
as $$
declare
    units bigint[] := array_fill(0::bigint, array[cardinality(times)]);
    spend record;
begin
    for spend in
        select width_bucket(x.at, times) as nth, sum(case when counting then 1 else x.amount end)::bigint as amount
        -- In order, or the planner may take the index of the history, and read all that was ever settled.
        from (select y.no from metered.leases y
              where y.scope = of_scope and y.settled_at is null and y.mode = 's' order by y.ends_at) l,
             lateral (select s.at, s.amount from metered.lease_spends s where s.lease = l.no and s.at >= times[1] offset 0) x
        group by 1
    loop
        units[spend.nth] := spend.amount;
    end loop;
    return units;
end
$$;

-- Since when the usage of a scope is known whose entries a purge has taken: after the first entry that it left. That
-- entry counts no later than the clock repairs after it.
create function metered._usage_known_from(tip metered.ledger) returns timestamptz
language plpgsql stable
as $$
declare
    since timestamptz;
    first int;
begin
    select l.at, l.epoch into since, first from metered.ledger l where l.scope = tip.scope and l.seq > 1 order by l.seq limit 1;
    for e in first + 1..tip.epoch loop
        since := least(since, (select l.at from metered.ledger l
            where l.scope = tip.scope and l.epoch = e and (l.seq & 15 = 1 or l.kind = 'k') order by l.at, l.seq limit 1));
    end loop;
    return since + interval '1 microsecond';
end
$$;

-- Scans up to look entries between two numbers, forwards or backwards, for entries with the texts of made_by.note, with
-- made_by.operation, and of a command of that name (null is any). It returns up to most + 1 of them, and always
-- the last entry that it looked at. more: there may be others after that.
create function metered.search_entries(of_scope text, after_seq bigint, before_seq bigint, backwards boolean, look int, most int,
    made_by metered.origin, named text)
returns table (entry metered.ledger, matched boolean, more boolean)
language plpgsql stable
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set plan_cache_mode = force_generic_plan
as $$
declare
    stop bigint;    -- the last entry to be read
begin
    if greatest(octet_length(of_scope), octet_length(made_by.tenant), octet_length(made_by.operation), octet_length(named)) > 255
        or look > 100000
        or most > 1000
        or pg_column_size(made_by.note) > 8196
        or pg_column_compression(made_by.note) is not null and octet_length(made_by.note::text) > 8192 then
        raise exception 'out of bounds: an argument of search_entries' using errcode = '22023';
    end if;
    perform metered._require(look between 1 and 100000 and most between 1 and 1000 and backwards is not null, 'search');
    if backwards then
        select min(x.seq), count(*) >= look into stop, more
        from (select l.seq from metered.ledger l
              where l.scope = of_scope and l.seq > after_seq and l.seq < before_seq order by l.seq desc limit look) x;
        return query
        select l, m.ok, search_entries.more
        from metered.ledger l, lateral (select coalesce((made_by.note is null or l.note @> made_by.note)
                and (made_by.operation is null
                    or l.operation = made_by.operation and coalesce(l.operation_tenant, '') = coalesce(made_by.tenant, ''))
                and (named is null
                    or named = (select o.name from metered.operations o where o.tenant = l.operation_tenant and o.id = l.operation)),
            false) as ok) m
        where l.scope = of_scope and l.seq >= stop and l.seq < before_seq and (m.ok or l.seq = stop)
        order by l.seq desc limit most + 1;
    else
        select max(x.seq), count(*) >= look into stop, more
        from (select l.seq from metered.ledger l
              where l.scope = of_scope and l.seq > after_seq and l.seq < before_seq order by l.seq limit look) x;
        return query
        select l, m.ok, search_entries.more
        from metered.ledger l, lateral (select coalesce((made_by.note is null or l.note @> made_by.note)
                and (made_by.operation is null
                    or l.operation = made_by.operation and coalesce(l.operation_tenant, '') = coalesce(made_by.tenant, ''))
                and (named is null
                    or named = (select o.name from metered.operations o where o.tenant = l.operation_tenant and o.id = l.operation)),
            false) as ok) m
        where l.scope = of_scope and l.seq > after_seq and l.seq <= stop and (m.ok or l.seq = stop)
        order by l.seq limit most + 1;
    end if;
end
$$;

-- Leases. A lease holds units of a scope, under the scope's lock, and lets them be spent without it.
-- Settling it captures the spent units, and frees the rest. Until then all of it counts as held, and from then on
-- the spent units count. So each unit counts from before its use until at least a window after.
--
-- The fence: a spender keeps the lease's lock, shared, until the transaction ends. Once it has the lock it looks, with
-- a newer snapshot, whether the lease is open. The settler takes the lock exclusively: no spend is running, none
-- begins, and it sees all committed spends. The lease's lock comes before its scope's. A transaction with a
-- scope's lock never waits for a lease's.

-- The key of the lock that keeps others from spending while a lease is settled.
create function metered._lease_key(of_no bigint) returns bigint
language sql stable
as $$
    select metered._lock_key('metered/lease/metered', convert_to(of_no::text, 'UTF8'))
$$;

-- The channel on which pools hear that units of a scope are wanted back: see leases/recall.go.
create function metered._leases_channel() returns text
language sql immutable
as $$
    select left('metered_leases_' || substr('metered/leases/metered', 16), 63)
$$;

-- Recalls units of a scope that programs spend from memory, once this transaction commits. They ask nobody, and would let calls in
-- until their slices end.
create function metered._recall_leases(of_scope text) returns void
language plpgsql volatile
as $$
begin
    if exists (select from metered.leases y where y.scope = of_scope and y.settled_at is null and y.mode = 'm') then
        perform pg_notify(metered._leases_channel(), of_scope);
    end if;
end
$$;

-- Opens a lease of up to charge.amount units, and at most the units that the limits admit, divided by terms.share.
-- granted is 0, and nothing written, if that is less than terms.least, or if a limit refuses. used, by
-- limit, and held are the scope's state before. The lease lasts for terms.ttl, or until the first of the limits'
-- periods ends: settled later, it would count in the next one.
create function metered.open_lease(charge metered.new_charge, terms metered.lease_terms, ahead interval, wait_ms int,
    out no bigint, out fence bigint, out granted bigint, out used bigint[], out held bigint, out lasts_us bigint, out periods timestamptz[],
    out crossed jsonb)
language plpgsql volatile
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set plan_cache_mode = force_generic_plan
as $$
declare
    lim    metered.charge_limit;
    tip    metered.ledger;
    looked record;
    posted metered.charged;
    wanted bigint := charge.amount;
    room   bigint;
    ends   timestamptz;
    nth    int := 0;
begin
    if greatest(octet_length(charge.scope), octet_length(terms.mode), octet_length(terms.owner), octet_length(terms.child)) > 255
        or array_lower(charge.limits, 1) <> 1
        or array_ndims(charge.limits) <> 1
        or array_position(charge.limits, null) is not null
        or cardinality(charge.limits) > 16
        or pg_column_size(charge.limits) > 1400 and not metered._fits(charge.limits)
        or pg_column_size(charge.note) > 8196
        or pg_column_compression(charge.note) is not null and octet_length(charge.note::text) > 8192
        or terms.share > 1000000
        or wait_ms > 3600000 then
        raise exception 'out of bounds: an argument of open_lease' using errcode = '22023';
    end if;
    perform metered._require(terms.mode in ('rows', 'memory') and terms.share between 1 and 1000000 and terms.least between 1 and charge.amount
        and terms.ttl between interval '1 millisecond' and interval '3660 days' and octet_length(terms.owner) between 1 and 255, 'lease');
    if charge.key is null then
        charge.key := metered._scope_key(charge.scope);
    end if;
    perform metered._require(metered._key_fits(charge.key, charge.scope), 'key');
    perform metered._lock_keys(array[charge.key], wait_ms);
    granted := 0;
    if cardinality(charge.limits) > 0 then
        tip := metered._last_entry(charge.scope);
        charge.amount := terms.least;
        looked := metered._check_now(array[charge], array[tip], metered.clock(), ahead);
        foreach lim in array charge.limits loop
            nth := nth + 1;
            -- After large credits the units left may be beyond 64 bits. A lease has at most 2^53 units.
            room := least(room, greatest(-1, least(9007199254740992, lim.max::numeric - looked.used[nth] - looked.held[1])))::bigint;
        end loop;
        used := looked.used;
        held := looked.held[1];
        wanted := least(wanted, room / terms.share);
        if looked.refused is not null or wanted < terms.least then
            if metered._one_snapshot() then
                perform metered._refuse_stale(array[tip]);
            end if;
            return;
        end if;
    end if;
    no := metered._next_number('leases');
    fence := metered._lease_key(no);
    charge.amount := wanted;
    charge.held := wanted;
    charge.note := jsonb_build_object('actor', terms.owner);
    -- The hold never falls due: a lease is settled, and not freed.
    posted := metered._write_charges(array[charge], ahead, wait_ms, null, 'answer', row('lease/' || no, interval '36500 days', null, null), false);
    if posted.refused is not null then
        if posted.refused -> 0 ? 'crossing' then
            perform metered._refuse_unreported();
        end if;
        no := null;
        return;
    end if;
    granted := wanted;
    crossed := posted.crossed;
    periods := metered._periods_of(array[charge], array[tip], posted.at);
    ends := least(posted.at + terms.ttl, (select min(p.at) from unnest(periods) with ordinality p(at, n) where p.n % 2 = 0));
    lasts_us := extract(epoch from ends - posted.at) * 1000000;
    insert into metered.leases (no, opened_at, ends_at, granted, fence, opened_seq, mode, scope, owner)
    overriding system value
    values (open_lease.no, posted.at, ends, wanted, open_lease.fence, posted.seqs[1],
        case terms.mode when 'rows' then 's' else 'm' end, charge.scope, terms.owner);
    perform metered._add_leased(charge.scope, wanted);
end
$$;

-- Adds an opened lease's units to its scope's sum, or takes those of a settled one away (units < 0). The scope is locked.
create function metered._add_leased(of_scope text, units bigint) returns void
language plpgsql volatile
as $$
begin
    delete from metered.lease_sum s where s.scope = of_scope and s.granted = -units;
    if not found then
        insert into metered.lease_sum as s (scope, granted) values (of_scope, units)
        on conflict (scope) do update set granted = s.granted + excluded.granted;
    end if;
end
$$;

-- Spends units of a lease from an offset on, and returns the time, or null if the lease is closed or
-- a unit of the range was spent before (lease_spends_apart).
create function metered._spend_range(of_lease bigint, of_fence bigint, from_offset bigint, units bigint, of_scope text, origin metered.origin)
returns timestamptz
language plpgsql volatile
as $$
declare
    clk timestamptz;
begin
    if metered._try_lock_shared(of_fence) then
        clk := metered.clock();
        if metered._one_snapshot() then
            -- The snapshot may be older than the lease's end: then a lock of the row fails with 40001, since the settler
            -- has locked it FOR UPDATE. Or it is older than the lease, and finds no row.
            perform from metered.leases l where l.no = of_lease for key share;
            if not found then
                perform metered._collided();
            end if;
        end if;
        insert into metered.lease_spends (lease, at_offset, amount, at, operation_tenant, operation, note)
        select l.no, from_offset, units, clk, origin.tenant, origin.operation, origin.note
        from metered.leases l
        where l.no = of_lease and l.fence = of_fence and l.scope = of_scope and l.mode = 's' and l.settled_at is null and l.ends_at > clk
          and from_offset between 0 and l.granted - units and units > 0
        on conflict do nothing;
        if found then
            return clk;
        end if;
    end if;
    return null;
end
$$;

-- Spends from a lease without a command.
create function metered.spend(of_lease bigint, of_fence bigint, from_offset bigint, units bigint, of_scope text, note jsonb)
returns timestamptz
language plpgsql volatile
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set plan_cache_mode = force_generic_plan
as $$
begin
    if octet_length(of_scope) > 255
        or pg_column_size(note) > 8196
        or pg_column_compression(note) is not null and octet_length(note::text) > 8192 then
        raise exception 'out of bounds: an argument of spend' using errcode = '22023';
    end if;
    return metered._spend_range(of_lease, of_fence, from_offset, units, of_scope, row(null, null, note));
end
$$;

-- Makes charges, some from leases, all or none, as _write_charges does. A lease that is closed, or whose range
-- was spent, refuses.
create function metered.charge_leased(charges metered.new_charge[], ahead interval, wait_ms int, origin metered.origin, mode text, standing boolean) returns metered.charged
language plpgsql volatile
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set plan_cache_mode = force_generic_plan
as $$
declare
    charge      metered.new_charge;
    chain       metered.new_charge[] := '{}';    -- charges of the ledger
    spent       metered.new_charge[] := '{}';    -- from leases, by this call
    posted      metered.charged;
    answer      metered.charged;
    nth_chained int := 0;    -- in chain
begin
    if array_lower(charges, 1) <> 1
        or array_ndims(charges) <> 1
        or array_position(charges, null) is not null
        or cardinality(charges) > 64
        or pg_column_size(charges) > 1400 and not metered._fits(charges)
        or wait_ms > 3600000
        or greatest(octet_length(origin.tenant), octet_length(origin.operation), octet_length(mode)) > 255
        or pg_column_size(origin.note) > 8196
        or pg_column_compression(origin.note) is not null and octet_length(origin.note::text) > 8192 then
        raise exception 'out of bounds: an argument of charge_leased' using errcode = '22023';
    end if;
    if (cardinality(charges) between 1 and 64 and mode in ('answer', 'raise')) is not true then
        perform metered._require(false, 'charges');
    end if;
    foreach charge in array charges loop
        if charge.lease is null then
            chain := chain || charge;
        elsif (charge.amount between 1 and 9007199254740992 and coalesce(pg_column_size(charge.note), 0) <= 8192 and pg_column_compression(charge.note) is null) is not true then
            perform metered._no_amount();
        else
            answer.at := metered._spend_range(charge.lease, charge.key, charge.lease_offset, charge.amount, charge.scope, row(origin.tenant, origin.operation, charge.note));
            if answer.at is null then
                answer.refused := jsonb_build_array(jsonb_build_object('lease', charge.lease));
                exit;
            end if;
            spent := spent || charge;
        end if;
    end loop;
    if answer.refused is null and chain <> '{}' then
        posted := metered._write_charges(chain, ahead, wait_ms, origin, mode, null, standing);
        answer.refused := posted.refused;
    end if;
    if answer.refused is not null then
        if mode = 'raise' then
            raise exception 'a lease is closed' using errcode = 'MT009', detail = answer.refused;
        end if;
        delete from metered.lease_spends s using unnest(spent) x(scope, key, amount, held, limits, note, must_exist, lease, lease_offset)
        where s.lease = x.lease and s.at_offset = x.lease_offset;
        return answer;
    end if;
    if cardinality(charges) = 1 and chain = '{}' then
        return row(array[0]::bigint[], array[answer.at], null::bigint[], array[0]::bigint[], null::jsonb, answer.at, null::timestamptz[], null::jsonb);
    end if;
    for i in 1..cardinality(charges) loop
        if charges[i].lease is null then
            nth_chained := nth_chained + 1;
            answer.seqs[i] := posted.seqs[nth_chained];
            answer.ats[i] := posted.ats[nth_chained];
            answer.held[i] := coalesce(posted.held[nth_chained], 0);
        else
            answer.seqs[i] := 0;
            answer.ats[i] := answer.at;
            answer.held[i] := 0;
        end if;
    end loop;
    answer.used := posted.used;     -- spends from leases have no limits
    answer.periods := posted.periods;
    answer.crossed := posted.crossed;
    return answer;
end
$$;

-- Settles a lease: captures its spent units, and frees the rest. of_owner is the caller. told has the used units of a lease in memory, by its
-- owner's word. If it is null, all were used. The status:
--   settled
--   closed    it was settled before, with spent units
--   early     before its end only its owner may settle it
--   unknown
--   crossing  nothing was written: it crosses thresholds on spending in limits, and the caller is not telling
create function metered.settle_lease(of_no bigint, of_owner text, told bigint, wait_ms int, limits metered.charge_limit[], ahead interval,
    out status text, out granted bigint, out spent bigint, out crossed jsonb)
language plpgsql volatile
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set plan_cache_mode = force_generic_plan
as $$
declare
    lease  metered.leases;
    last   timestamptz;
    made   bigint := 1;       -- charges: units that were spent in memory are one
    closed record;
begin
    if octet_length(of_owner) > 255
        or wait_ms > 3600000
        or array_lower(limits, 1) <> 1
        or array_ndims(limits) <> 1
        or array_position(limits, null) is not null
        or cardinality(limits) > 16
        or pg_column_size(limits) > 1400 and not metered._fits(limits) then
        raise exception 'out of bounds: an argument of settle_lease' using errcode = '22023';
    end if;
    perform metered._require(octet_length(of_owner) between 1 and 255 and coalesce(told >= 0, true), 'settle');
    lease := metered._lease_to_settle(of_no, wait_ms);
    granted := lease.granted;
    status := case
        when lease.no is null or lease.mode not in ('s', 'm') then 'unknown'
        when lease.settled_at is not null then 'closed'
        when lease.owner <> of_owner and lease.ends_at > metered.clock() then 'early' end;
    if status is not null then
        spent := lease.spent;
        return;
    end if;
    if lease.mode = 's' then
        select coalesce(sum(s.amount), 0), max(s.at), count(*) into spent, last, made from metered.lease_spends s where s.lease = of_no;
    else
        spent := case when lease.owner = of_owner and told <= lease.granted then told else lease.granted end;
    end if;
    closed := metered._close_lease(lease, spent, of_owner, wait_ms, last, metered._spent_limits(limits), ahead, made);
    status := case when closed.silent then 'crossing' else 'settled' end;
    crossed := closed.crossed;
end
$$;

-- Locks a lease, exclusively, and its row. Only a statement with a snapshot of its own then sees all spends.
create function metered._lease_to_settle(of_no bigint, wait_ms int) returns metered.leases
language plpgsql volatile
as $$
declare
    of_lease metered.leases;
    before   text;
begin
    if metered._one_snapshot() then
        raise exception 'a lease is settled at READ COMMITTED' using errcode = '25001';
    end if;
    perform metered._lock_keys(array[metered._lease_key(of_no)], wait_ms);
    before := metered._bound_lock_wait(wait_ms);
    select * into of_lease from metered.leases y where y.no = of_no for update;
    before := metered._unbound_lock_wait(before);
    return of_lease;
end
$$;

-- Writes the end of a lease of which so many units were spent, under its scope's lock. Units beyond the
-- granted ones, which nobody can spend, would be charged. The end is dated no earlier than last, the last spend, since the
-- clock may have been set back. limits are _spent_limits. silent: nothing was written, since it crosses a threshold
-- and the caller is not telling. The spent units count as so many charges.
create function metered._close_lease(lease metered.leases, units bigint, by_whom text, wait_ms int, last timestamptz,
    limits metered.charge_limit[], ahead interval, charges bigint, out crossed jsonb, out silent boolean)
language plpgsql volatile
as $$
declare
    tip      metered.ledger := metered._next_entry(lease.scope, null, wait_ms, row(null, null, jsonb_build_object('actor', by_whom)));
    before   bigint;
    clk      timestamptz := metered.clock();
    amount   bigint;
    crossing record;
    lowered  jsonb;
begin
    silent := false;
    tip := metered._after_minima(tip, wait_ms);
    if limits is not null and units > 0 then
        amount := least(units, lease.granted);
        crossing := metered._cross_captured(row(lease.scope, null, units - amount, -amount, limits, null, null, null, null)::metered.new_charge,
            metered._last_entry(lease.scope), greatest(clk, last), ahead);
        silent := crossing.silent;
        if silent then
            return;
        end if;
        lowered := crossing.crossed;
        crossed := metered._crossed_at(crossing.crossings, array[tip.seq]);
    end if;
    tip.at := greatest(tip.at, last);
    tip := metered._after_due_lowered(tip, greatest(0, units - lease.granted), lowered, wait_ms);
    before := tip.seq - 1;
    tip.hold := 'lease/' || lease.no;
    foreach tip.kind in array array['u', 'c', 'l']::"char"[] loop
        amount := case tip.kind when 'u' then least(units, lease.granted) when 'c' then units - lease.granted else lease.granted - units end;
        continue when amount <= 0;
        tip.seq := before + 1;
        tip.amount := amount;
        tip.spent := tip.spent + case when tip.kind in ('u', 'c') then amount else 0 end;
        tip.held := tip.held - case when tip.kind in ('u', 'l') then amount else 0 end;
        tip.next_due := metered._due_after(lease.scope, before, tip.held, tip.next_due, clk);
        tip.others := nullif(coalesce(metered._others(lease.scope, before), 0) + 1 - case tip.kind when 'u' then charges else 0 end, 0);
        insert into metered.ledger values (tip.*) on conflict do nothing;
        if not found then
            perform metered._collided();
        end if;
        perform metered._mark_freed(lease.scope);
        before := tip.seq;
        continue when tip.lots_end is null;
        case tip.kind
            when 'u' then perform metered._capture_lots(tip, lease.opened_seq, amount);
            when 'c' then perform metered._use_lots(lease.scope, tip.seq, amount, case when not metered._lags(tip) then metered._balance(tip) + amount end, 't', null);
            else perform metered._free_lots(tip, array[lease.opened_seq]);
        end case;
    end loop;
    update metered.leases y set settled_at = tip.at, spent = units, settled_by = by_whom, settled_seq = tip.seq where y.no = lease.no;
    perform metered._add_leased(lease.scope, -lease.granted);
end
$$;

-- Units that open leases hold of a scope, and when the last lease ends. It reads one row for each answer, however many leases are open. own units
-- are of leases that this transaction has opened, and do not count.
create function metered._leased_units(of_scope text, own bigint, out units bigint, out ends_at timestamptz)
language plpgsql stable
as $$
begin
    units := coalesce((select s.granted from metered.lease_sum s where s.scope = of_scope), 0) - own;
    if units > 0 then
        select y.ends_at into _leased_units.ends_at from metered.leases y
        where y.scope = of_scope and y.settled_at is null and y.mode <> 'g' and (own = 0 or not metered._written_here(y.xmin))
        order by y.ends_at desc limit 1;
    end if;
end
$$;

-- The open leases of a scope: unspent units, spends that are not settled yet, and when the last lease ends. It reads all of them and their
-- spends, so nothing under the scope's lock asks it.
create function metered._leased(of_scope text, out unspent bigint, out spent bigint, out ends_at timestamptz)
language plpgsql stable
as $$
begin
    select coalesce(sum(l.granted), 0), coalesce(sum(s.units), 0), max(l.ends_at) into unspent, spent, ends_at
    -- In order, or the planner may take the index of the history, and read all that was ever settled.
    from (select y.no, y.granted, y.ends_at, y.mode from metered.leases y
          where y.scope = of_scope and y.settled_at is null and y.mode <> 'g' order by y.ends_at) l,
         lateral (select sum(x.amount) as units from metered.lease_spends x where x.lease = l.no and l.mode = 's') s;
    unspent := unspent - spent;
end
$$;

-- Deletes leases that were settled before cutoff, with their spends: at most max_rows spends, oldest lease first.
-- after is the last of the batch before. A child that got units from another cluster stays until the parent's side is known to be settled, and
-- its time was over before cutoff: until then a message can ask for its used units.
create function metered.purge_leases(after timestamptz, cutoff timestamptz, max_rows int, out deleted bigint, out last timestamptz)
language plpgsql volatile
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set plan_cache_mode = force_generic_plan
set enable_bitmapscan = off
set enable_sort = off
as $$
declare
    of_lease  record;
    left_over bigint := max_rows;
    purged    bigint;
begin
    if max_rows > 10000 then
        raise exception 'out of bounds: an argument of purge_leases' using errcode = '22023';
    end if;
    perform metered._require(max_rows between 1 and 10000, 'max_rows');
    cutoff := least(cutoff, metered.clock());
    deleted := 0;
    for of_lease in
        select y.no, y.settled_at from metered.leases y
        where y.settled_at is not null and y.settled_at >= coalesce(after, '-infinity') and y.settled_at < cutoff
          and (y.mode <> 'g' or y.home_at is not null and y.ends_at < cutoff)
        order by y.settled_at limit max_rows for update skip locked
    loop
        delete from metered.lease_spends s where s.lease = of_lease.no and s.at_offset = any (array(
            select x.at_offset from metered.lease_spends x where x.lease = of_lease.no order by x.at_offset limit left_over));
        get diagnostics purged = row_count;
        deleted := deleted + purged;
        left_over := left_over - purged;
        last := of_lease.settled_at;
        exit when left_over <= 0;
        delete from metered.leases y where y.no = of_lease.no;
        deleted := deleted + 1;
        left_over := left_over - 1;
        exit when left_over <= 0;
    end loop;
end
$$;

-- Carving: a lease whose units a child scope spends. The child is credited with them, and is closed in
-- the end: the units that it charged are captured at the parent, and the rest is free there again. Until then all
-- of it counts as held at the parent.
--
-- A closed scope has -infinity as its last entry's next_due, which every later entry keeps. So the path
-- of a charge that is let in comes to _check_limits, which refuses it. Credit and refund ask
-- _refuse_closed. Units that were held before may still end, or be captured, and the settlement waits for them.
--
-- Parent and child are locked by key, and then the lease's row. Nobody else locks the row of a carved
-- lease that is open, so the lock of spenders is not needed.
--
-- On another cluster the child has a row of its own, of mode g. The parent's row is of mode r, and settle_away settles it with the
-- units that the child used. Messages between the clusters can come again, and in any order. So a row of mode g stays, and answers each
-- message with the units used, until the parent's side is known to be settled (home_at) and its time is over.

-- Refuses a new entry in a closed scope. entry is its last entry, or one that is to follow it.
create function metered._refuse_closed(e metered.ledger) returns void
language plpgsql stable
as $$
begin
    if e.next_due = '-infinity' then
        raise exception 'the scope is closed' using errcode = 'MT001', detail = metered._with_absent(null, e.scope, 'closed');
    end if;
end
$$;

-- Closes a scope, whose lock is held, unless it is closed.
create function metered._close_scope(of_scope text, note jsonb, wait_ms int) returns void
language plpgsql volatile
as $$
declare
    entry metered.ledger := metered._entry_for_write(of_scope);
begin
    if entry.next_due = '-infinity' then
        return;
    end if;
    if entry.tallied then
        entry := metered._end_tallies(entry, wait_ms);
    end if;
    if entry.lots_end is not null then
        entry := metered._settle(entry, metered.clock(), metered._ends_per_call(), 0, null);
    end if;
    perform metered._clear_freed_of(entry);
    entry.seq := entry.seq + 1;
    entry.amount := 0;
    entry.at := greatest(metered.clock(), entry.at);
    entry.kind := 'z';
    entry.next_due := '-infinity';
    entry.ref := null;
    entry.hold := null;
    entry.operation_tenant := null;
    entry.operation := null;
    entry.note := _close_scope.note;
    perform metered._append(entry);
    perform metered._recall_leases(of_scope);
end
$$;

-- Carves charge.amount units, judged by the charge's limits as a hold, for the child of terms, which has no
-- entries yet. status is carved, exists (it was carved before, equally), conflict (it was carved otherwise), used (the
-- child has entries) or refused. A child of a child ends no later than that one.
create function metered.carve(charge metered.new_charge, terms metered.lease_terms, ahead interval, wait_ms int,
    out status text, out lease metered.leases, out refused jsonb, out crossed jsonb)
language plpgsql volatile
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set plan_cache_mode = force_generic_plan
as $$
declare
    away   boolean := terms.mode = 'away';
    as_mode "char" := case when away then 'r' else 'c' end;
    tip    metered.ledger;
    posted metered.charged;
    own    bigint;
    ends   timestamptz;
begin
    if greatest(octet_length(charge.scope), octet_length(terms.mode), octet_length(terms.owner), octet_length(terms.child)) > 255
        or array_lower(charge.limits, 1) <> 1
        or array_ndims(charge.limits) <> 1
        or array_position(charge.limits, null) is not null
        or cardinality(charge.limits) > 16
        or pg_column_size(charge.limits) > 1400 and not metered._fits(charge.limits)
        or pg_column_size(charge.note) > 8196
        or pg_column_compression(charge.note) is not null and octet_length(charge.note::text) > 8192
        or terms.share > 1000000
        or wait_ms > 3600000 then
        raise exception 'out of bounds: an argument of carve' using errcode = '22023';
    end if;
    perform metered._require(terms.mode in ('carved', 'away') and octet_length(terms.child) between 1 and 255 and (away or terms.child <> charge.scope)
        and terms.ttl between interval '1 millisecond' and interval '3660 days' and octet_length(terms.owner) between 1 and 255
        and metered._key_fits(charge.key, charge.scope), 'carve');
    perform metered._lock_all_scopes(array[charge.scope, case when not away then terms.child else charge.scope end], null, wait_ms);
    select * into lease from metered.leases y where y.child = terms.child and y.mode <> 'g' and (y.mode = 'r') = away;
    if found then
        status := case when lease.scope = charge.scope and lease.granted = charge.amount then 'exists' else 'conflict' end;
        return;
    end if;
    if not away then
        tip := metered._entry_for_write(terms.child);
        if tip.seq > 0 or exists (select from metered.leases y where y.child = terms.child and y.mode = 'g') then
            status := 'used';
            return;
        end if;
    end if;
    own := metered._next_number('leases');
    charge.held := charge.amount;
    posted := metered._write_charges(array[charge], ahead, wait_ms, null, 'answer', row('lease/' || own, interval '36500 days', null, null), false);
    if posted.refused is not null then
        status := 'refused';
        refused := posted.refused;
        return;
    end if;
    select y.ends_at into ends from metered.leases y where y.child = charge.scope and y.mode in ('c', 'g') and y.settled_at is null;
    insert into metered.leases (no, opened_at, ends_at, granted, fence, opened_seq, mode, scope, owner, child)
    overriding system value
    values (own, posted.at, least(posted.at + terms.ttl, ends),
        charge.amount, metered._lease_key(own), posted.seqs[1], as_mode, charge.scope, terms.owner, terms.child)
    on conflict do nothing
    returning * into lease;
    if not found then
        perform metered._collided();     -- of another parent, at the same time
    end if;
    perform metered._add_leased(charge.scope, charge.amount);
    if not away then
        perform metered.credit(terms.child, null, charge.amount, false, wait_ms, row(null, null, charge.note), true);
    end if;
    crossed := posted.crossed;
    status := 'carved';
end
$$;

-- Closes a child of this cluster, and settles it once it has no held units. status is settled, open (closed, with
-- held units), closed (it was settled before) or unknown.
create function metered.end_child(of_child text, by_whom text, wait_ms int,
    out status text, out lease metered.leases, out held bigint)
language plpgsql volatile
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set plan_cache_mode = force_generic_plan
as $$
declare
    tip  metered.ledger;
    clk  timestamptz;
begin
    if greatest(octet_length(of_child), octet_length(by_whom)) > 255
        or wait_ms > 3600000 then
        raise exception 'out of bounds: an argument of end_child' using errcode = '22023';
    end if;
    perform metered._require(octet_length(by_whom) between 1 and 255, 'end_child');
    select * into lease from metered.leases y where y.child = of_child and y.mode in ('c', 'g');
    if not found then
        status := 'unknown';
        return;
    end if;
    perform metered._lock_all_scopes(array[lease.scope, of_child], null, wait_ms);
    select * into lease from metered.leases y where y.no = lease.no for update;
    clk := metered.clock();
    status := case when lease.no is null then 'unknown' when lease.settled_at is not null then 'closed' end;
    if status is not null then
        return;
    end if;
    tip := metered._last_entry(of_child);
    if tip.next_due <= clk and metered._due_units(of_child, tip.next_due, clk) > 0 then
        perform metered._end_due(array[of_child], clk, wait_ms);
    end if;
    perform metered._close_scope(of_child, jsonb_build_object('actor', by_whom), wait_ms);
    tip := metered._entry_for_write(of_child);
    held := tip.held;
    status := 'open';
    if held = 0 then
        status := 'settled';
        if lease.mode = 'c' then
            perform metered._close_lease(lease, tip.spent - tip.refunded, by_whom, wait_ms, null, null, null, 1);
        else
            update metered.leases y set settled_at = tip.at, spent = tip.spent - tip.refunded, settled_by = by_whom, settled_seq = tip.seq where y.no = lease.no;
        end if;
        select * into lease from metered.leases y where y.no = lease.no;
    end if;
end
$$;

-- The child's side of units that were carved on another cluster: credits the child until ends. With units 0, or after ends, the child gets
-- nothing, now or later: the row says so, and the scope gets no entry. status is received, late, exists (a row of this child is
-- there) or used (the child has entries).
create function metered.receive_child(of_child text, units bigint, ends timestamptz, by_whom text, note text, wait_ms int,
    out status text, out lease metered.leases)
language plpgsql volatile
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set plan_cache_mode = force_generic_plan
as $$
declare
    tip  metered.ledger;
    clk  timestamptz;
    own  bigint;
    json jsonb := nullif(note, '')::jsonb;
begin
    if greatest(octet_length(of_child), octet_length(by_whom)) > 255
        or octet_length(note) > 8192
        or wait_ms > 3600000 then
        raise exception 'out of bounds: an argument of receive_child' using errcode = '22023';
    end if;
    perform metered._require(octet_length(of_child) between 1 and 255 and octet_length(by_whom) between 1 and 255
        and units between 0 and 9007199254740992 and ends is not null, 'receive_child');
    perform metered._lock_all_scopes(array[of_child], null, wait_ms);
    select * into lease from metered.leases y where y.child = of_child and y.mode in ('c', 'g');
    if found then
        status := case when lease.mode = 'g' then 'exists' else 'used' end;
        return;
    end if;
    tip := metered._entry_for_write(of_child);
    if tip.seq > 0 then
        status := 'used';
        return;
    end if;
    clk := metered.clock();
    status := case when units = 0 or ends <= clk then 'late' else 'received' end;
    own := metered._next_number('leases');
    if status = 'received' then
        perform metered.credit(of_child, null, units, false, wait_ms, row(null, null, json), true);
    end if;
    insert into metered.leases (no, opened_at, ends_at, settled_at, granted, spent, fence, opened_seq, settled_seq, mode, scope, owner, settled_by, child)
    overriding system value
    values (own, clk, case when units = 0 then clk + interval '3660 days' else ends end, case when status = 'late' then clk end, case when status = 'late' then 0 else units end,
        case when status = 'late' then 0 end, metered._lease_key(own), 1, case when status = 'late' then 1 end, 'g', of_child, by_whom,
        case when status = 'late' then by_whom end, of_child)
    on conflict do nothing
    returning * into lease;
    if not found then
        perform metered._collided();
    end if;
end
$$;

-- Settles the parent's side of units that were carved for another cluster. units is the number used there, or null for
-- all of them. status is settled, closed (it was settled before, and spent has the units captured then) or unknown. On the child's cluster it notes in the
-- child's row that the parent's side is settled: status is noted or unknown.
create function metered.settle_away(of_child text, units bigint, by_whom text, wait_ms int,
    out status text, out lease metered.leases)
language plpgsql volatile
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set plan_cache_mode = force_generic_plan
as $$
declare
    clk timestamptz := metered.clock();
begin
    if greatest(octet_length(of_child), octet_length(by_whom)) > 255
        or wait_ms > 3600000 then
        raise exception 'out of bounds: an argument of settle_away' using errcode = '22023';
    end if;
    perform metered._require(octet_length(by_whom) between 1 and 255 and coalesce(units between 0 and 9007199254740992, true), 'settle_away');
    update metered.leases y set home_at = clk where y.child = of_child and y.mode = 'g' and y.settled_at is not null and y.home_at is null;
    select * into lease from metered.leases y where y.child = of_child and (y.mode = 'r' or y.home_at is not null) order by y.mode = 'r' desc limit 1;
    status := case when lease.no is null then 'unknown' when lease.mode = 'g' then 'noted' end;
    if status is not null then
        return;
    end if;
    perform metered._lock_all_scopes(array[lease.scope], null, wait_ms);
    select * into lease from metered.leases y where y.no = lease.no for update;
    status := case when lease.no is null then 'unknown' when lease.settled_at is not null then 'closed' else 'settled' end;
    if status = 'settled' then
        perform metered._close_lease(lease, coalesce(units, lease.granted), by_whom, wait_ms, null, null, null, 1);
        select * into lease from metered.leases y where y.no = lease.no;
    end if;
end
$$;

-- The registry: which scopes were declared to exist. Charges, credits and holds look here if they
-- demand it (must_exist), under their scopes' locks. A retirement takes the scope's lock, too: the answer of
-- a charge holds until it commits. At REPEATABLE READ and above its snapshot may be older
-- than the lock. There a lock of the row, or a write where there is none, meets the newer row.

-- The reason to refuse new charges of a scope that must exist: unknown, retired, or null for nothing.
create function metered._absence(of_scope text) returns text
language plpgsql stable
as $$
declare
    resource metered.resources;
begin
    select * into resource from metered.resources x where x.scope = of_scope;
    return case when resource.scope is null then 'unknown' when resource.retired_at is not null then 'retired' end;
end
$$;

-- A scope's row, locked, or all null if there is none. It is the committed one, or 40001.
create function metered._resource_for_write(of_scope text, wait_ms int) returns metered.resources
language plpgsql volatile
as $$
declare
    before   text := metered._bound_lock_wait(wait_ms);
    resource metered.resources;
begin
    select * into resource from metered.resources x where x.scope = of_scope for share;
    if not found and metered._one_snapshot() then
        begin   -- taken back by the block
            insert into metered.resources (created_at, scope) values (metered.clock(), of_scope) on conflict do nothing;
            raise exception using errcode = 'MT100';
        exception when sqlstate 'MT100' then
            null;
        end;
    end if;
    before := metered._unbound_lock_wait(before);
    return resource;
end
$$;

-- Adds a scope to a refusal, if absence says why it does not exist.
create function metered._with_absent(refused jsonb, of_scope text, absence text) returns jsonb
language plpgsql immutable
as $$
begin
    if absence is null then
        return refused;
    end if;
    return coalesce(refused, '[]') || jsonb_build_object('scope', of_scope, 'absent', absence);
end
$$;

-- Checks a charge that seems out of bounds, or whose scope must exist. It returns refused, with the
-- scope if it does not exist. looking: the scope is not locked.
create function metered._admit(c metered.new_charge, refused jsonb, looking boolean, wait_ms int) returns jsonb
language plpgsql volatile
as $$
declare
    absence text;
begin
    if (c.amount between 1 and 9007199254740992 and c.held between 0 and c.amount and octet_length(c.scope) between 1 and 255
        and coalesce(pg_column_size(c.note), 0) <= 8192
        and (pg_column_compression(c.note) is null or octet_length(c.note::text) <= 8192) and coalesce(cardinality(c.limits), 0) <= 16) is not true then
        perform metered._no_amount();
    end if;
    -- If the key were another scope's, the charge would not read under the scope's lock.
    if not metered._key_fits(c.key, c.scope) then
        perform metered._require(false, 'key');
    end if;
    absence := metered._absence(c.scope);
    if metered._one_snapshot() and (absence is not null or not looking) then
        perform metered._resource_for_write(c.scope, wait_ms);
    end if;
    return metered._with_absent(refused, c.scope, absence);
end
$$;

-- Declares that scopes exist, all or none. If some are retired, only these are returned, and nothing is
-- done. changed: the scope did not exist before. The answer holds until the transaction ends.
create function metered.create_scopes(scopes text[], wait_ms int)
returns table (scope text, created_at timestamptz, retired_at timestamptz, changed boolean)
language plpgsql volatile
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set plan_cache_mode = force_generic_plan
as $$
declare
    before     text := metered._bound_lock_wait(wait_ms);
    clk        timestamptz := metered.clock();
    scope_name text;
    resource   metered.resources;
    made       boolean[];
    found_rows metered.resources[];
    refused    boolean := false;
begin
    if array_lower(scopes, 1) <> 1
        or array_ndims(scopes) <> 1
        or array_position(scopes, null) is not null
        or cardinality(scopes) > 1000
        or pg_column_size(scopes) > 255 and not metered._fits(scopes, 255)
        or wait_ms > 3600000 then
        raise exception 'out of bounds: an argument of create_scopes' using errcode = '22023';
    end if;
    perform metered._require(cardinality(scopes) between 1 and 1000
        and cardinality(scopes) = (select count(*) from unnest(scopes) u where octet_length(u) between 1 and 255), 'scopes');
    begin
        for scope_name in select distinct u from unnest(scopes) u order by u loop   -- in order: two creators do not deadlock
            insert into metered.resources as x (created_at, scope) values (clk, scope_name) on conflict do nothing;
            made := made || found;
            select * into resource from metered.resources x where x.scope = scope_name for share;
            found_rows := found_rows || resource;
            refused := refused or resource.retired_at is not null;
        end loop;
        if refused then
            raise exception using errcode = 'MT100';
        end if;
    exception when sqlstate 'MT100' then
        null;
    end;
    before := metered._unbound_lock_wait(before);
    return query select u.scope, u.created_at, u.retired_at, m.made
        from unnest(found_rows) with ordinality u(created_at, retired_at, scope, n) join unnest(made) with ordinality m(made, n) on m.n = u.n
        where not refused or u.retired_at is not null order by u.n;
end
$$;

-- Retires scopes, or takes that back (retiring is false), all or none. If some were never declared, only
-- these are returned, without created_at, and nothing is done. Takes the scopes' locks. held has
-- units of a scope's open holds, which go on.
create function metered.retire_scopes(scopes text[], retiring boolean, wait_ms int)
returns table (scope text, created_at timestamptz, retired_at timestamptz, changed boolean, held bigint)
language plpgsql volatile
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set plan_cache_mode = force_generic_plan
as $$
declare
    clk      timestamptz;
    before   text;
    resource metered.resources;
    tip      metered.ledger;
    fences   bigint[];
    missing  boolean := false;
begin
    if array_lower(scopes, 1) <> 1
        or array_ndims(scopes) <> 1
        or array_position(scopes, null) is not null
        or cardinality(scopes) > 64
        or pg_column_size(scopes) > 255 and not metered._fits(scopes, 255)
        or wait_ms > 3600000 then
        raise exception 'out of bounds: an argument of retire_scopes' using errcode = '22023';
    end if;
    perform metered._require(retiring is not null and cardinality(scopes) between 1 and 64
        and cardinality(scopes) = (select count(*) from unnest(scopes) u where octet_length(u) between 1 and 255), 'scopes');
    if retiring then
        -- A spend from a lease takes no lock of its scope, so the leases end with the scope. A lease's lock comes before its scope's.
        fences := array(select y.fence from metered.leases y where y.scope = any (scopes) and y.settled_at is null and y.mode = 's');
        if fences <> '{}' then
            perform metered._lock_keys(fences, wait_ms);
        end if;
    end if;
    perform metered._lock_all_scopes(scopes, null, wait_ms);
    clk := metered.clock();
    if retiring then
        if exists (select from metered.leases y where y.scope = any (scopes) and y.settled_at is null and y.mode = 's' and y.fence <> all (fences)) then
            perform metered._collided();     -- it was opened meanwhile
        end if;
        -- A spend with an older snapshot meets FOR UPDATE.
        perform from metered.leases y where y.scope = any (scopes) and y.settled_at is null and y.mode in ('s', 'm') for update;
        update metered.leases y set ends_at = clk + interval '1 microsecond'   -- later than each spend
        where y.scope = any (scopes) and y.settled_at is null and y.mode in ('s', 'm') and y.ends_at > clk;
    end if;
    for scope in select distinct u from unnest(scopes) u order by u loop
        resource := metered._resource_for_write(scope, wait_ms);
        if resource.scope is null then
            missing := true;
            return next;
        end if;
    end loop;
    if missing then
        return;
    end if;
    before := metered._bound_lock_wait(wait_ms);     -- a creator has locks of rows, and no scope's lock
    for scope in select distinct u from unnest(scopes) u order by u loop
        update metered.resources x set retired_at = case when retiring then clk end
        where x.scope = retire_scopes.scope and (x.retired_at is null) = retiring;
        changed := found;
        if retiring then
            perform metered._recall_leases(scope);
        end if;
        select x.created_at, x.retired_at into retire_scopes.created_at, retire_scopes.retired_at
        from metered.resources x where x.scope = retire_scopes.scope;
        tip := metered._entry_for_write(scope);
        if metered._one_snapshot() then
            perform metered._refuse_stale(array[tip]);
        end if;
        held := tip.held - case when tip.next_due <= clk then metered._due_units(scope, tip.next_due, clk) else 0 end;
        return next;
    end loop;
    before := metered._unbound_lock_wait(before);
end
$$;

-- Units come free when their lines fall due, whoever writes that down. The first writer that needs
-- them does. Where few lines are due, it ends their holds. Where more are due than one step writes,
-- one entry frees their sum (_free_in_sum), however many they are, and their rows are left to sweeps.
--
-- So next_due of the last entry says which lines are still counted as held: those with open units
-- that are due at next_due or later. A line that is due before, or any line if next_due is null, was
-- freed with the sum. It is due at the last entry's time or before. Where next_due becomes earlier
-- than that, after the clock was set back, such lines are cleared first (_clear_freed_of).

-- Units of a scope that due lines, not freed yet, still hold. since is next_due of the last entry.
create function metered._due_units(of_scope text, since timestamptz, clk timestamptz) returns bigint
language plpgsql stable
as $$
begin
    return (select coalesce(sum(l.open), 0) from metered.hold_lines l
        where l.scope = of_scope and l.open > 0 and l.due >= since and l.due <= clk);
end
$$;

-- When the first line that is not due falls due.
create function metered._first_due(of_scope text, since timestamptz, clk timestamptz) returns timestamptz
language plpgsql stable
as $$
begin
    return (select l.due from metered.hold_lines l
            where l.scope = of_scope and l.open > 0 and l.due >= since and l.due > clk
            order by l.due limit 1);
end
$$;

-- A new next_due of a scope, whose old one is since: when the first line falls due, but at most
-- 10 seconds after since or now, whichever is later. It reads past ended lines that would have
-- fallen due by then. A further look could read past all lines that were placed and ended meanwhile.
-- Volatile, though it writes nothing: into an insert from a select with a stable function, Citus 13 puts a condition without a column.
create function metered._later_due(of_scope text, since timestamptz, clk timestamptz) returns timestamptz
language plpgsql volatile
as $$
declare
    horizon timestamptz := greatest(since, clk) + interval '10 s';
begin
    return coalesce((
        select l.due from metered.hold_lines l
        where l.scope = of_scope and l.open > 0 and l.due >= since and l.due <= horizon
        order by l.due limit 1), horizon);
end
$$;

-- next_due of the entry after seq, without its own new line. held has its held units. next_due
-- moves on once it has passed, and with two of 16 entries (a call may write two, and skip one of
-- them), so that a search for the first due line need not read past many ended lines.
-- That of a closed scope (carve.sql) stays. Inlined wherever it stands.
create function metered._due_after(of_scope text, seq bigint, held bigint, next_due timestamptz, clk timestamptz)
returns timestamptz
language sql volatile
as $$
    select case when held > 0 then
        case when next_due > '-infinity' and (next_due <= clk or seq & 15 < 2) then metered._later_due(of_scope, next_due, clk) else next_due end
    when next_due = '-infinity' then next_due end
$$;

-- Frees the units that holds still keep of their scopes, or of only_scopes, which are all locked, by one
-- entry for each scope. Expiring holds free the units that they do not capture, when the last of them fell due. In a
-- wallet each ends with an entry of its own (_settle).
create function metered._release_lines(nos bigint[], only_scopes text[], as_kind "char", clk timestamptz,
    of_hold text, origin metered.origin) returns void
language plpgsql volatile
as $$
declare
    scopes      text[];
    sums        bigint[];
    firsts      timestamptz[];       -- when the first line of each falls due
    written     text[];
    wallets     text[];
    minima      boolean;
    dues        timestamptz[];
    marked      boolean;
    tip         metered.ledger;
    wallet_line record;
begin
    if as_kind = 'x' then   -- in wallets, ends are written in the order of their times
        for wallet_line in
            select l.scope, max(l.due) as due from metered.hold_lines l
            where l.hold = any (nos) and l.open <> 0 and (only_scopes is null or l.scope = any (only_scopes)) group by l.scope order by l.scope
        loop
            tip := metered._entry_for_write(wallet_line.scope);
            if tip.lots_end is not null then
                tip := metered._settle(tip, least(wallet_line.due, clk), metered._ends_per_call(), 0, null);
                perform metered._clear_freed(nos, array[wallet_line.scope]);      -- freed with a sum
            end if;
        end loop;
    end if;
    select array_agg(f.scope), array_agg(f.units), bool_or(f.minima), array_agg(f.due), array_agg(f.first) into scopes, sums, minima, dues, firsts
    from (select l.scope, sum(l.open)::bigint as units, bool_or(l.at_least > l.captured) as minima, max(l.due) as due, min(l.due) as first from metered.hold_lines l
          where l.hold = any (nos) and l.open <> 0 and (only_scopes is null or l.scope = any (only_scopes))
          group by l.scope order by l.scope) f;
    if scopes is null then
        return;
    elsif minima and as_kind = 'x' then
        perform metered._capture_minima(nos, only_scopes, null, clk);
        perform metered._release_lines(nos, only_scopes, as_kind, clk, of_hold, origin);   -- of the others
        return;
    end if;
    perform metered._fold_of(scopes);       -- else tallies would count at this entry's time
    update metered.hold_lines l set open = 0
    where l.hold = any (nos) and l.open <> 0 and (only_scopes is null or l.scope = any (only_scopes));
    with made as (
    insert into metered.ledger as y (seq, amount, at, spent, refunded, credited, held, epoch, kind, scope, next_due, hold, operation_tenant, operation, note, anchor_at, anchor_spent, lots_end, crossed, tallied, others)
    select t.seq + 1, f.units, greatest(case when as_kind = 'x' then least(f.due, clk) else clk end, t.at), t.spent, t.refunded, t.credited, t.held - f.units, t.epoch, as_kind, f.scope, metered._due_after(f.scope, t.seq, t.held - f.units, t.next_due, clk), of_hold, origin.tenant, origin.operation, origin.note, t.anchor_at, t.anchor_spent, t.lots_end, t.crossed, t.tallied, coalesce(int8smaller(t.others, t.seq), 0) + 1
    from unnest(scopes, sums, dues, firsts) f(scope, units, due, first),
         lateral (select * from metered.ledger l where l.scope = f.scope order by l.seq desc limit 1 for key share) t
    where (t.lots_end <= greatest(clk, t.at) or t.next_due <= clk and (t.lots_end is not null or as_kind <> 'x')) is not true
      and f.first >= t.next_due     -- else it was freed before the clock was set back
    on conflict do nothing
    returning y.scope, y.lots_end is not null as wallet)
    select array_agg(m.scope), array_agg(m.scope) filter (where m.wallet) into written, wallets from made m;
    for i in 1..coalesce(cardinality(written), 0) loop
        marked := metered._mark_freed(written[i]);
    end loop;
    if wallets is not null then
        perform metered._free_lines(nos, wallets);
    end if;
    if coalesce(cardinality(written), 0) < cardinality(scopes) then
        if as_kind <> 'x' then
            if 0 < (select count(*) from unnest(scopes) f(scope),
                         lateral (select y.next_due, y.lots_end from metered.ledger y where y.scope = f.scope order by y.seq desc limit 1) t
                    where (f.scope = any (written)) is not true and t.lots_end is null and (t.next_due <= clk) is not true) then
                perform metered._collided();     -- nothing is due, so another writer has made the next entry
            end if;
            perform metered._end_minima(array(select f from unnest(scopes) f where (f = any (written)) is not true), null, clk, null);
        end if;
        for i in 1..cardinality(scopes) loop    -- in which something is due before
            continue when scopes[i] = any (written);
            tip := metered._entry_for_write(scopes[i]);
            if tip.lots_end is not null and (tip.lots_end <= greatest(clk, tip.at) or tip.next_due <= clk) then
                tip := metered._settle(tip, clk, metered._ends_per_call(), 0, null);
            elsif as_kind = 'x' or tip.lots_end is not null then
                perform metered._collided();
            end if;
            tip := metered._own_entry(tip, clk);
            tip.kind := as_kind;
            tip.amount := sums[i];
            tip.held := tip.held - sums[i];
            tip.next_due := metered._due_after(tip.scope, tip.seq, tip.held, tip.next_due, clk);
            tip.seq := tip.seq + 1;
            tip.hold := of_hold;
            tip.operation_tenant := origin.tenant;
            tip.operation := origin.operation;
            tip.note := origin.note;
            perform metered._append(tip);
            if tip.lots_end is not null then
                perform metered._free_lines(nos, array[scopes[i]]);
            end if;
        end loop;
    end if;
end
$$;

-- The note of ends of holds that a caller only writes because it needs their room.
create function metered._by_system() returns metered.origin
language sql immutable
as $$
    select row(null, null, '{"actor": "system"}')::metered.origin
$$;

-- Ends those of the holds that are due and have not ended. Their rows are locked,
-- in order. told: those that keep no units need no announcement.
create function metered._end_rows(nos bigint[], clk timestamptz, note jsonb, told boolean)
returns void
language plpgsql volatile
as $$
begin
    with ended as (
        update metered.holds h set state = 'x', ended_at = h.due, version = h.version + 1,
            pending = not told or 0 < (select count(*) from metered.hold_lines l
                where l.hold = h.no and l.open <> 0)
        where h.no = any (nos) and h.state = 'h' and h.due <= clk
        returning h.no, h.version)
    insert into metered.hold_events (hold, at, version, kind, note)
    select e.no, clk, e.version, 'x', _end_rows.note from ended e;
end
$$;

-- Frees the units of due lines of a scope by one entry after tip: minima are captured before it, each
-- at its time. Where more of these are due than one step writes, a call fails (_refuse_behind), and a
-- step of catch_up leaves the others, with all that falls due after the first of them. The scope is
-- locked. An old snapshot may not see that a hold was extended: then the lock of its row fails with 40001.
-- nos are the holds whose minima it captured. more: a call would fail still.
create function metered._free_in_sum(tip metered.ledger, clk timestamptz, in_step boolean, wait_ms int,
    out nos bigint[], out more boolean)
language plpgsql volatile
as $$
declare
    since  timestamptz := tip.next_due;
    minima record := metered._first_minima(tip, clk);
    until  timestamptz := coalesce(minima.until, clk + interval '1 microsecond');
    due    record;
    before text;
begin
    if minima.until is not null and not in_step then
        perform metered._refuse_behind(tip.scope);
    end if;
    if metered._one_snapshot() then
        before := metered._bound_lock_wait(wait_ms);
        perform from metered.holds h where h.no = any (minima.nos || array(select l.hold from metered.hold_lines l
            where l.scope = tip.scope and l.open > 0 and l.due >= since and l.due < until))
        order by h.no for share;
        before := metered._unbound_lock_wait(before);
    end if;
    if minima.nos <> '{}' then
        perform metered._capture_minima(minima.nos, array[tip.scope], until, clk);
        tip := metered._entry_for_write(tip.scope);
    end if;
    select sum(l.open)::bigint as units, max(l.due) as last into due from metered.hold_lines l
    where l.scope = tip.scope and l.open > 0 and l.due >= since and l.due < until;
    tip := metered._own_entry(tip, due.last);
    tip.kind := 'x';
    tip.amount := coalesce(due.units, 0);
    tip.seq := tip.seq + 1;
    tip.held := tip.held - tip.amount;
    tip.next_due := case when tip.held > 0 then metered._later_due(tip.scope, until, clk) end;
    if tip.amount > 0 then      -- else minima have captured all
        perform metered._append(tip);
    end if;
    nos := minima.nos;
    more := minima.more;
end
$$;

-- Clears all rows of lines of a scope that were freed with a sum, before its next_due becomes earlier. The scope
-- is locked.
create function metered._clear_freed_of(tip metered.ledger) returns void
language plpgsql volatile
as $$
begin
    delete from metered.lot_holds o where o.scope = tip.scope and o.seq = any (array(
        select l.opened_seq from metered.hold_lines l
        where l.scope = tip.scope and l.open > 0 and l.due < coalesce(tip.next_due, 'infinity')));
    update metered.hold_lines l set open = 0
    where l.scope = tip.scope and l.open > 0 and l.due < coalesce(tip.next_due, 'infinity');
end
$$;

-- Frees the units of all due lines of the scopes, which are locked. A caller saw some. next_due of a
-- closed scope says nothing: its holds are ended, however many they are.
create function metered._end_due(scopes text[], clk timestamptz, wait_ms int) returns void
language plpgsql volatile
as $$
declare
    tip    metered.ledger;
    most   int;         -- lines of a scope whose holds are ended
    found_nos bigint[];
    nos    bigint[] := '{}';
    few    text[];
    freed  boolean := false;
    before text;
begin
    for tip in
        select t.* from unnest(scopes) s(scope), lateral (
            select * from metered.ledger l where l.scope = s.scope order by l.seq desc limit 1) t
        where t.next_due <= clk
    loop
        most := case when tip.next_due > '-infinity' then metered._events_per_step() end;
        found_nos := array(select l.hold from metered.hold_lines l
            where l.scope = tip.scope and l.open > 0 and l.due >= tip.next_due and l.due <= clk
            order by l.due limit most + 1);
        if cardinality(found_nos) > most then
            if tip.lots_end is null then
                perform metered._free_in_sum(tip, clk, false, wait_ms);
            else
                perform metered._settle(tip, clk, metered._ends_per_call(), 0, wait_ms);
            end if;
            freed := true;
        else
            few := few || tip.scope;
            nos := nos || found_nos;
        end if;
    end loop;
    if nos = '{}' then
        if not freed then
            perform metered._collided(); -- the caller saw some: not with this snapshot
        end if;
        return;
    end if;
    before := metered._bound_lock_wait(wait_ms);
    -- A caller that holds another lock than the scope's may find that a hold was extended meanwhile.
    nos := array(select y.no from (
        select h.no from metered.holds h
        where h.no = any (nos) and (h.due <= clk) is true order by h.no for no key update) y);
    before := metered._unbound_lock_wait(before);
    perform metered._end_rows(nos, clk, (metered._by_system()).note, false);
    if cardinality(few) > 1 then
        perform metered._clear_freed(nos, few);
    end if;
    perform metered._release_lines(nos, few, 'x', clk, null, metered._by_system());
end
$$;

-- Ends one hold that is due, if it still has this deadline, frees its units, and notifies
-- listeners: status is expired. Otherwise nothing is done: due_later, extended, captured,
-- released, or ended (it expired, and was announced before).
create function metered.expire_hold(of_tenant text, of_id text, issued timestamptz, of_deadline timestamptz, wait_ms int, note text, channel text,
    out status text, out hold json)
language plpgsql volatile
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set plan_cache_mode = force_generic_plan
as $$
declare
    of_no     bigint;
    keys      bigint[];
    clk       timestamptz;
    this_hold record;
    origin    metered.origin;
    before    text;
begin
    if greatest(octet_length(of_tenant), octet_length(of_id)) > 255
        or wait_ms > 3600000
        or octet_length(note) > 8192
        or octet_length(channel) > 64 then
        raise exception 'out of bounds: an argument of expire_hold' using errcode = '22023';
    end if;
    select y.no, y.keys into of_no, keys from metered.holds y where y.tenant = of_tenant and y.id = of_id;
    if not found then
        status := metered._missing_hold(of_tenant, of_id, issued, wait_ms);
        return;
    end if;
    perform metered._lock_keys(keys, wait_ms);
    before := metered._bound_lock_wait(wait_ms);
    select y.state, y.due, y.deadline, y.pending into this_hold from metered.holds y where y.no = of_no for no key update;
    before := metered._unbound_lock_wait(before);
    if this_hold.state is null then     -- purged while this waited
        status := case when issued <= (select z.at from metered.holds_horizon z where z.one) then 'retired' else 'unknown' end;
        return;
    end if;
    clk := metered.clock();
    status := case
        when this_hold.state = 'c' then 'captured'
        when this_hold.state = 'r' then 'released'
        when not this_hold.pending then 'ended'
        when this_hold.deadline <> of_deadline then 'extended'
        when this_hold.state = 'h' and this_hold.due > clk then 'due_later' end;
    if status is null then
        origin := row(null, null, nullif(note, '')::jsonb);
        perform metered._end_rows(array[of_no], clk, origin.note, false);
        perform metered._end_minima(array(select distinct l.scope from metered.hold_lines l
            where l.hold = of_no and l.open <> 0), of_no, clk, wait_ms);
        perform metered._clear_freed(array[of_no], null);
        perform metered._release_lines(array[of_no], null, 'x', clk, of_id, origin);
        update metered.holds y set pending = false where y.no = of_no returning y.version into this_hold;
        if channel is not null then
            perform metered._announce(channel, of_tenant, of_id, this_hold.version, 'expired');
        end if;
        status := 'expired';
    end if;
    hold := metered.hold_json(of_no, clk);
end
$$;

-- Holds that are held, or that expired and are not announced, in the order in which they fall due, after after_due and
-- after_no, and before a time: of one tenant or of all (null), with a scope that begins with prefix. It looks at no more than 10,000
-- and returns max_rows. Go on after last_due and last_no, which are null at the end. clk counts as now.
create function metered.due_holds(of_tenant text, prefix text, after_due timestamptz, after_no bigint, before timestamptz,
    clk timestamptz, max_rows int, out holds json[], out last_due timestamptz, out last_no bigint)
language plpgsql stable
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set plan_cache_mode = force_generic_plan
set enable_bitmapscan = off
set enable_sort = off
as $$
declare
    this_hold record;
    seen      int := 0;
begin
    if greatest(octet_length(of_tenant), octet_length(prefix)) > 255
        or max_rows > 10000 then
        raise exception 'out of bounds: an argument of due_holds' using errcode = '22023';
    end if;
    holds := '{}';
    for this_hold in
        select y.no, y.due, y.tenant from metered.holds y
        where y.pending and (y.due, y.no) > (after_due, after_no) and y.due < before
        order by y.due, y.no limit 10000
    loop
        seen := seen + 1;
        if this_hold.tenant = coalesce(of_tenant, this_hold.tenant) and (prefix = '' or exists (
            select from metered.hold_lines l where l.hold = this_hold.no and starts_with(l.scope, prefix))) then
            holds := holds || metered.hold_json(this_hold.no, clk);
        end if;
        if seen = 10000 or cardinality(holds) = max_rows then
            last_due := this_hold.due;
            last_no := this_hold.no;
            return;
        end if;
    end loop;
end
$$;

-- Marks swept holds as announced, and notifies listeners.
create function metered.announced(nos bigint[], channel text) returns void
language plpgsql volatile
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set plan_cache_mode = force_generic_plan
as $$
begin
    if array_lower(nos, 1) <> 1
        or array_ndims(nos) <> 1
        or array_position(nos, null) is not null
        or cardinality(nos) > 10000
        or octet_length(channel) > 64 then
        raise exception 'out of bounds: an argument of announced' using errcode = '22023';
    end if;
    perform metered._require(cardinality(nos) <= 10000, 'nos');
    -- Not one that still keeps units, which a purge would lose.
    update metered.holds h set pending = false where h.no = any (nos) and h.state = 'x' and h.pending
        and 0 = (select count(*) from metered.hold_lines l where l.hold = h.no and l.open <> 0);
    if channel is not null then
        perform metered._announce(channel, h.tenant, h.id, h.version, 'expired')
        from metered.holds h where h.no = any (nos) order by h.no;
    end if;
end
$$;

-- Deletes holds that ended before cutoff, with lines and history, at most max_rows
-- of them, from "after" on (null: from the beginning), and moves the horizon to the latest
-- time that their ids carry, in the same transaction, as purge_operations does.
--
-- Purges use no bitmaps and sorts: with a plan from a time of few rows, each batch would
-- read all rows that are to be deleted.
create function metered.purge_holds(after timestamptz, cutoff timestamptz, max_rows int, wait_ms int, out deleted bigint, out last timestamptz)
language plpgsql volatile
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set plan_cache_mode = force_generic_plan
set enable_bitmapscan = off
set enable_sort = off
as $$
declare
    nos    bigint[];
    latest timestamptz;
    before text := metered._bound_lock_wait(wait_ms);
begin
    if max_rows > 10000
        or wait_ms > 3600000 then
        raise exception 'out of bounds: an argument of purge_holds' using errcode = '22023';
    end if;
    perform metered._require(max_rows between 1 and 10000, 'max_rows');
    cutoff := least(cutoff, metered.clock());
    perform from metered.holds_horizon z where z.one for no key update;     -- before rows of holds, as place does
    before := metered._unbound_lock_wait(before);
    select array_agg(d.no), max(d.ended_at), max(d.issued_at) into nos, last, latest from (
        select h.no, h.ended_at, h.issued_at from metered.holds h
        where h.ended_at is not null and (h.claim is null or h.state <> 'c' or h.returned)
          and h.ended_at >= coalesce(after, '-infinity') and h.ended_at < cutoff and not h.pending and coalesce(h.issued_at, h.ended_at) < cutoff
        order by h.ended_at limit max_rows for update skip locked) d;
    delete from metered.hold_events e where e.hold = any (nos);
    delete from metered.hold_lines l where l.hold = any (nos);
    delete from metered.holds h where h.no = any (nos);
    get diagnostics deleted = row_count;
    if latest is not null then
        update metered.holds_horizon z set at = latest where z.one and z.at < latest;
    end if;
end
$$;

-- Minima: units that a hold captures when it expires. They count as charged when the hold fell due, even if it is ended
-- later. So a writer of a scope first ends its due holds, up to the last one with a minimum, which would count later if its entry came after the new one.

-- Units that the due lines of a scope, not freed yet, capture, as far as they count after since. They count from the time at which their line
-- fell due, or of the last entry if that is later.
create function metered._minima(tip metered.ledger, since timestamptz, clk timestamptz) returns bigint
language plpgsql stable
as $$
begin
    return (
        select coalesce(sum(greatest(l.at_least - l.captured, 0)), 0) from metered.hold_lines l
        where l.scope = tip.scope and l.open > 0 and l.at_least > 0 and l.due >= tip.next_due and l.due <= clk
          and greatest(l.due, tip.at) > coalesce(since, '-infinity'));
end
$$;

-- How many lines these units are of.
create function metered._minima_due(tip metered.ledger, since timestamptz, clk timestamptz) returns bigint
language sql stable
as $$
    select count(*) from metered.hold_lines l
    where l.scope = tip.scope and l.open > 0 and l.at_least > 0 and l.at_least > l.captured and l.due >= tip.next_due and l.due <= clk
      and greatest(l.due, tip.at) > coalesce(since, '-infinity')
$$;

-- Whether a due line of a scope, not freed yet, captures any. since is next_due of the last entry.
create function metered._minimum_is_due(of_scope text, since timestamptz, clk timestamptz) returns boolean
language plpgsql stable
as $$
begin
    return exists (select from metered.hold_lines l
        where l.scope = of_scope and l.open > 0 and l.at_least > 0 and l.at_least > l.captured and l.due >= since and l.due <= clk);
end
$$;

-- The minima of a scope's open lines that fall due from since on and before until, without the holds of_nos, and the tallies from since on: units,
-- and when they leave the window or period of a limit, in the order of these times. They never leave a lifetime. Null if there are none.
create function metered._minima_leave(tip metered.ledger, l metered.charge_limit, since timestamptz, until timestamptz, clk timestamptz, of_nos bigint[],
    out units bigint[], out leave timestamptz[])
language plpgsql stable
as $$
declare
    span timestamptz[];
begin
    select array_agg(x.units order by x.leaves), array_agg(x.leaves order by x.leaves) into units, leave
    from (select sum(y.at_least - y.captured)::bigint as units, case
              when l.win > interval '0' then greatest(y.due, tip.at) + l.win
              when l.win is null then (metered._period_at(l.period, greatest(y.due, tip.at)))[2]
              else 'infinity' end as leaves
          from metered.hold_lines y
          where y.scope = tip.scope and y.open > 0 and y.at_least > 0 and y.at_least > y.captured
            and y.due >= greatest(tip.next_due, since) and y.due < until and (y.hold = any (of_nos)) is not true
          group by 2) x
    where x.leaves > greatest(clk, tip.at);
    if tip.tallied then
        span := case when l.win is null then metered._period_at(l.period, greatest(clk, tip.at)) end;
        select array_agg(x.units order by x.leaves), array_agg(x.leaves order by x.leaves) into units, leave
        from (select sum(y.units)::bigint as units, y.leaves
              from (select m.units, m.leaves from unnest(units, leave) m(units, leaves)
                    union all
                    select t.amount, case when l.win > interval '0' then greatest(t.at, tip.at) + l.win
                        else coalesce(span[2], 'infinity') end
                    from metered.tallies t
                    where t.scope = tip.scope and t.at >= since and (greatest(t.at, tip.at) < span[1]) is not true) y
              group by y.leaves) x
        where x.leaves > greatest(clk, tip.at);
    end if;
end
$$;

-- The first time from since on at which at most room units are left in a window, if nothing else changes, or null for never. used are
-- charged units, counted from the base (_spent_since), which leave by age. units are minima, and leave their times (_minima_leave).
create function metered._fits_at(tip metered.ledger, l metered.charge_limit, room bigint, used bigint, base metered.counted,
    since timestamptz, units bigint[], leave timestamptz[]) returns timestamptz
language plpgsql stable
as $$
declare
    gone   int := coalesce(cardinality(units), 0);  -- minima that have left, when there is room
    few    int := -1;           -- minima that have left, when there is no room yet
    stay   bigint := 0;         -- units of minima that stay
    stays  bigint[] := '{}';    -- by gone + 1
    half   int;
    first  timestamptz := 'infinity';
    free   timestamptz;         -- when the charges have left that are in the way
    best   timestamptz := 'infinity';
begin
    for n in reverse gone..0 loop
        stays[n + 1] := stay;
        exit when stay > room;
        few := n - 1;
        stay := stay + case when n > 0 then units[n] else 0 end;
    end loop;
    if room < 0 then
        return null;
    end if;
    -- The more minima have left, the earlier the charges are few enough: the two times meet.
    gone := gone + 1;
    while gone - few > 1 loop
        half := (gone + few) / 2;
        free := case when used <= room - stays[half + 1] then '-infinity'
            when l.win > interval '0' then metered._leaves_at(tip, base.base_seq, base.base_spent, used, l.win, room - stays[half + 1])
            else 'infinity' end;
        first := greatest(since, case when half > 0 then leave[half] end);
        best := least(best, greatest(first, free));
        if free <= first then
            gone := half;
        else
            few := half;
        end if;
    end loop;
    return nullif(best, 'infinity');
end
$$;

-- The holds of the first due lines of a scope that have minima, as many as one step writes, when the last
-- of these fell due, and when the next one did, or null if there is none. more: those after these are more
-- than one step writes, too.
create function metered._first_minima(tip metered.ledger, clk timestamptz,
    out nos bigint[], out last timestamptz, out until timestamptz, out more boolean)
language plpgsql stable
as $$
declare
    dues timestamptz[];
begin
    select coalesce(array_agg(x.hold order by x.due, x.hold), '{}'), array_agg(x.due order by x.due)
    into nos, dues from (
        select l.hold, l.due from metered.hold_lines l
        where l.scope = tip.scope and l.open > 0 and l.at_least > 0 and l.at_least > l.captured
          and l.due >= tip.next_due and l.due <= clk
        order by l.due, l.hold limit 2 * metered._events_per_step() + 1) x;
    more := cardinality(nos) > 2 * metered._events_per_step();
    until := dues[metered._events_per_step() + 1];
    nos := nos[:metered._events_per_step()];
    last := dues[cardinality(nos)];
end
$$;

-- Fails in a call that would write more than one step writes, since each event counts at its own time,
-- before the call. What the call was to do is undone, and steps are taken in transactions of their own.
create function metered._refuse_behind(of_scope text) returns void
language plpgsql
as $$
begin
    raise exception 'more is due in the scope than one call writes: sweep it'
        using errcode = '55P03', detail = json_build_object('behind', of_scope),
            hint = 'Call metered.catch_up until it returns false, and try again.';
end
$$;

-- How many due lines of a wallet one call or step frees in sums, at most. It reads each of them a few
-- times. Inlined wherever it stands.
create function metered._lines_per_step() returns int
language sql immutable
as $$
    select 20000
$$;

-- The time up to which a call, or a step of one, writes due lines of a wallet: clk, or earlier if more are
-- due than it writes one by one, or than it frees in sums.
create function metered._lines_until(tip metered.ledger, clk timestamptz) returns timestamptz
language plpgsql stable
as $$
declare
    minima record;
begin
    if (tip.next_due <= clk) is not true then
        return clk;
    elsif tip.next_due = '-infinity' or metered._debt(tip) > 0 then
        return metered._nth_due(tip, clk, metered._events_per_step());
    end if;
    minima := metered._first_minima(tip, clk);
    return metered._nth_due(tip, case when minima.until is null then clk else minima.last end,
        metered._lines_per_step());
end
$$;

-- Takes a step in a scope that is so far behind that calls fail (_refuse_behind). In a scope without
-- lots it ends no rows of holds, which sweeps do. more: take another one.
create function metered.catch_up(of_scope metered.scope_name, wait_ms int, out more boolean)
language plpgsql volatile
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set plan_cache_mode = force_generic_plan
as $$
declare
    tip   metered.ledger;
    stands metered.ledger;
    clk   timestamptz;
    until timestamptz;
begin
    if wait_ms > 3600000 then
        raise exception 'out of bounds: an argument of catch_up' using errcode = '22023';
    end if;
    perform metered._lock_keys(array[metered._scope_key(of_scope)], wait_ms);
    clk := metered.clock();
    tip := metered._entry_for_write(of_scope);
    if tip.lots_end is not null then
        until := metered._lots_until(tip, metered._lines_until(tip, clk), metered._events_per_step());
        perform metered._settle(tip, until, metered._events_per_step(), 0, wait_ms);
        stands := metered._last_entry(of_scope);
        more := stands.seq > tip.seq and (until < clk or stands.next_due <= until) is true;
    elsif tip.next_due > '-infinity' and tip.next_due <= clk then
        more := (metered._free_in_sum(tip, clk, true, wait_ms)).more;
    else
        more := false;
    end if;
end
$$;

-- Captures the minima of holds that expire, in their scopes or in only_scopes, which are all locked
-- and no wallets: an entry for each line, of the time at which it fell due, or of its scope's last
-- entry if that is later. One statement writes those of a scope. next_due stays where it is, at or
-- before the first line that still has units, or becomes border, before which none will have any.
create function metered._capture_minima(nos bigint[], only_scopes text[], border timestamptz,
    clk timestamptz) returns void
language plpgsql volatile
as $$
declare
    of_scope text;
    tip      metered.ledger;
    taken    bigint[];      -- the holds, in the order in which they fall due
    made     int;
begin
    for of_scope in
        select distinct y.scope from metered.hold_lines y
        where y.hold = any (nos) and y.open <> 0 and y.at_least > y.captured
          and (only_scopes is null or y.scope = any (only_scopes))
        order by 1
    loop
        tip := metered._entry_for_write(of_scope);
        with minima as (
            select y.hold, y.due, least(y.open, y.at_least - y.captured) as units,
                row_number() over due_order as nth,
                (sum(least(y.open, y.at_least - y.captured)) over due_order)::bigint as upto
            from metered.hold_lines y
            where y.hold = any (nos) and y.scope = of_scope and y.open <> 0
              and y.at_least > y.captured
            window due_order as (order by y.due, y.hold)),
        entries as (
            insert into metered.ledger (seq, amount, at, spent, refunded, credited, held, epoch, kind, scope, next_due, hold, operation_tenant, operation, note, anchor_at, anchor_spent, lots_end, crossed, tallied, others)
            select tip.seq + m.nth, m.units, greatest(tip.at, least(m.due, clk)), tip.spent + m.upto, tip.refunded, tip.credited, tip.held - m.upto, tip.epoch, 'u', of_scope, case when tip.next_due = '-infinity' then tip.next_due when tip.held > m.upto then coalesce(border, tip.next_due) end, (select h.id from metered.holds h where h.no = m.hold), e.operation_tenant, e.operation, (metered._by_system()).note, tip.anchor_at, tip.anchor_spent, tip.lots_end, tip.crossed, tip.tallied, int8smaller(tip.others, tip.seq)
            from minima m, lateral (
                select v.operation_tenant, v.operation from metered.hold_events v
                where v.hold = m.hold and v.version = 1 limit 1) e
            on conflict do nothing
            returning 1)
        select array_agg(m.hold order by m.nth), (select count(*) from entries)
        into taken, made from minima m;
        if made < cardinality(taken) then
            perform metered._collided();
        end if;
        perform metered._mark_freed(of_scope);
        update metered.hold_lines y set captured = y.captured + least(y.open, y.at_least - y.captured),
            open = y.open - least(y.open, y.at_least - y.captured)
        where y.hold = any (taken) and y.scope = of_scope;
    end loop;
end
$$;

-- Before an entry is written: frees what is due in each of the scopes, which are locked, where a due
-- line has a minimum. A minimum of the hold of_others_than alone ends nothing.
create function metered._end_minima(scopes text[], of_others_than bigint, clk timestamptz, wait_ms int) returns boolean
language plpgsql volatile
as $$
begin
    select array_agg(d.scope) into scopes
    from unnest(scopes) s(scope),
         lateral (select y.scope, y.next_due, y.lots_end from metered.ledger y where y.scope = s.scope order by y.seq desc limit 1) d
    where d.next_due <= clk and d.lots_end is null and 0 < (
        select count(*) from (select from metered.hold_lines l
            where l.scope = d.scope and l.open > 0 and l.at_least > 0 and l.at_least > l.captured and l.due >= d.next_due and l.due <= clk
              and l.hold is distinct from of_others_than limit 1) x);
    if scopes is null then
        return false;
    end if;
    perform metered._end_due(scopes, clk, wait_ms);
    return true;
end
$$;

-- _end_minima for an entry of _next_entry. In a wallet, _settle ends due holds.
create function metered._after_minima(e metered.ledger, wait_ms int) returns metered.ledger
language plpgsql volatile
as $$
declare
    tip metered.ledger;
begin
    if e.next_due <= e.at and e.lots_end is null then
        if metered._end_minima(array[e.scope], null, least(e.at, metered.clock()), wait_ms) then
            tip := metered._entry_for_write(e.scope);
            e.seq := tip.seq + 1;
            e.at := greatest(e.at, tip.at);
            e.spent := tip.spent;
            e.held := tip.held;
            e.next_due := tip.next_due;
            e.crossed := tip.crossed;
            e.others := tip.others;
        end if;
    end if;
    return e;
end
$$;

-- Sets the minima of a new hold's lines, which are captured when it expires, and returns the lines with them.
create function metered._with_minima(new_no bigint, minima metered.used_units[], lines jsonb) returns jsonb
language plpgsql volatile
as $$
declare
    changed int;
begin
    update metered.hold_lines l set at_least = u.amount
    from unnest(minima) u where l.hold = new_no and l.scope = u.scope and u.amount between 1 and l.amount;
    get diagnostics changed = row_count;
    if changed <> cardinality(minima) then
        perform metered._require(false, 'minimum');
    end if;
    return (
        select jsonb_agg(case when u.amount is null then x.line
            else x.line || jsonb_build_object('at_least', u.amount) end order by x.n)
        from jsonb_array_elements(lines) with ordinality x(line, n)
             left join unnest(minima) u on u.scope = x.line ->> 'scope');
end
$$;

-- Sweeps of holds. A transaction that ends holds of many scopes keeps their locks until it commits. So
-- a scope with more due than one step writes (it is behind) is no part of it. It is swept alone, a
-- step a transaction, and nobody else waits for its backlog.

-- How many due events one step writes at most, about. Inlined wherever it stands.
create function metered._events_per_step() returns int
language sql immutable
as $$
    select 25
$$;

-- When the nth of more due lines of a scope fell due, or clk if no more are due. tip is the last entry.
create function metered._nth_due(tip metered.ledger, clk timestamptz, nth int) returns timestamptz
language plpgsql stable
as $$
declare
    times timestamptz[] := array(select l.due from metered.hold_lines l
        where l.scope = tip.scope and l.open > 0 and l.due >= tip.next_due and l.due <= clk
        order by l.due limit nth + 1);
begin
    return case when cardinality(times) > nth then times[nth] else clk end;
end
$$;

-- The time up to which a step writes what is due in a scope: clk, or earlier if about most events
-- are due by then. tip is the last entry. Events of one instant count as one, and so does what idle plans bring.
create function metered._step_until(tip metered.ledger, clk timestamptz, most int)
returns timestamptz
language plpgsql stable
as $$
begin
    return metered._lots_until(tip, case when tip.next_due <= clk then metered._nth_due(tip, clk, most)
        else clk end, most);
end
$$;

-- The same, of what lots do by clk. Lines of holds may be due by then.
create function metered._lots_until(tip metered.ledger, clk timestamptz, most int)
returns timestamptz
language plpgsql stable
as $$
declare
    until timestamptz := clk;
    times timestamptz[];
    plans metered.period[];
    begun timestamptz[];
    nth   timestamptz;
begin
    if tip.lots_end <= clk then
        times := array(select y.expires_at from metered.lot_rows y
            where y.scope = tip.scope and y.open and y.expires_at <= clk
            order by y.expires_at, y.age limit most + 1);
        until := least(until, case when cardinality(times) > most then times[most] end);
        times := array(select y.expires_at from metered.lot_rows y
            where y.scope = tip.scope and y.keeps and y.expires_at <= clk
            order by y.expires_at, y.age limit most + 1);
        until := least(until, case when cardinality(times) > most then times[most] end);
        select array_agg(b.starts_at order by b.starts_at), array_agg(b.renews order by b.starts_at)
        into begun, plans
        from (select y.starts_at, (y.plan).renews from metered.lot_rows y
              where y.scope = tip.scope and y.pending > 0 and y.starts_at <= clk
              order by y.starts_at, y.age limit most + 1) b;
        until := least(until, case when cardinality(begun) > most then begun[most] end);
        begin
            for i in 1..coalesce(cardinality(plans), 0) loop
                exit when (tip.next_due <= clk) is not true and metered._debt(tip) = 0
                    and metered._is_idle(metered._beginning(tip.scope, until), until);
                continue when (plans[i]).every is null;
                nth := begun[i];    -- in each period a lot begins, one ends, and one may go on
                for n in 1..greatest(1, most / (3 * cardinality(plans))) loop
                    exit when nth > until;
                    nth := (metered._period_at(plans[i], nth))[2];
                end loop;
                until := least(until, nth);
            end loop;
        exception when sqlstate 'MT010' then    -- a lost zone, which the step itself reports
            null;
        end;
    end if;
    return until;
end
$$;

-- The lots of a wallet that begin until a time.
create function metered._beginning(of_scope text, until timestamptz) returns metered.lots[]
language plpgsql stable
as $$
begin
    return array(select l from (select y.no from metered.lot_rows y
            where y.scope = of_scope and y.pending > 0 and y.starts_at <= until
            order by y.starts_at, y.age) x,
        lateral (select z from metered.lots z where z.no = x.no limit 1) y(l));
end
$$;

-- Whether more is due in a scope than one step writes, or than it reads: a wallet that nobody touched for long.
create function metered._behind(of_scope text, clk timestamptz) returns boolean
language plpgsql stable
as $$
begin
    return metered._step_until(metered._last_entry(of_scope), clk, metered._events_per_step())
        < clk or metered._is_idle(metered._beginning(of_scope, clk), clk) is true;
end
$$;

-- Those of due holds, whose rows are locked, that a sweep can end whole, or but for lines of scopes that
-- are behind. The locked scopes are not behind, and nothing is due in the idle ones.
create function metered._sweepable(due_nos bigint[], locked text[], idle text[], behind text[])
returns bigint[]
language plpgsql volatile
as $$
declare
    blocked bigint[];
begin
    -- Counted, since NOT EXISTS is a join, which can be one with all lines. A hold that keeps only
    -- lines of scopes that are behind is ended by their steps.
    due_nos := array(
        select y.no
        from unnest(due_nos) y(no), lateral (
            select count(*) as lines, count(*) filter (where l.scope = any (locked || idle)) as mine,
                count(*) filter (where l.scope = any (behind)) as later
            from metered.hold_lines l where l.hold = y.no and l.open <> 0) x
        where x.lines = x.mine + x.later and (x.lines = 0 or x.mine > 0));
    -- Nor one that fell due after another that is left to others, and captures something.
    loop
        blocked := array(
            select distinct x.hold from metered.hold_lines x
            where x.hold = any (due_nos) and x.open <> 0 and x.scope = any (locked) and 0 < (
                select count(*) from metered.hold_lines l
                where l.scope = x.scope and l.open > 0 and l.at_least > 0
                  and l.at_least > l.captured and l.due < x.due and l.hold <> all (due_nos)));
        exit when blocked = '{}';
        due_nos := array(select n from unnest(due_nos) n where n <> all (blocked));
    end loop;
    return due_nos;
end
$$;

-- Looks at up to max_holds due holds, after after_due and after_no, and ends those whose
-- locks are free. Scopes that are behind are returned, for sweep_scope, and their lines stay. nos
-- are the holds that ended whole, and skipped counts those whose locks were not free. Without
-- keep_pending they need no announcement. seen counts the holds looked at. If there may be more,
-- go on after last_due and last_no.
--
-- Together they have at most 2,000 scopes, since each takes a lock of the server's
-- table, which by default has room for some 6,400 of all sessions. One hold has at
-- most 64.
create function metered.sweep_due(after_due timestamptz, after_no bigint, max_holds int,
    keep_pending boolean, channel text,
    out nos bigint[], out seen int, out last_due timestamptz, out last_no bigint, out more boolean,
    out skipped int, out behind text[])
language plpgsql volatile
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set plan_cache_mode = force_generic_plan
as $$
declare
    clk     timestamptz := metered.clock();
    due_nos bigint[];
    looked  bigint[];
    ended   bigint[];
    locked  text[] := '{}';
    idle    text[] := '{}';     -- in which nothing is due but rows of lines that were freed with a sum
    tip     metered.ledger;
    wallets text[];
    one     record;
begin
    if max_holds > 10000
        or octet_length(channel) > 64 then
        raise exception 'out of bounds: an argument of sweep_due' using errcode = '22023';
    end if;
    perform metered._require(max_holds between 1 and 10000 and keep_pending is not null,
        'sweep_due');
    perform metered._fold_all();
    behind := '{}';
    skipped := 0;
    select array_agg(d.no order by d.due, d.no) filter (where d.locks <= 2000),
        count(*) filter (where d.locks <= 2000), max(d.due) filter (where d.locks <= 2000),
        count(*) = max_holds or coalesce(bool_or(d.locks > 2000), false)
    into looked, seen, last_due, more
    from (select c.no, c.due, sum(cardinality(c.keys)) over (order by c.due, c.no) as locks
          from (select y.no, y.due, y.keys from metered.holds y
                where y.pending and (y.due, y.no) > (after_due, after_no) and y.due <= clk
                order by y.due, y.no limit max_holds) c) d;
    if seen = 0 then
        return;
    end if;
    last_no := looked[seen];
    for one in
        select distinct l.key, l.scope from metered.hold_lines l
        where l.hold = any (looked) and l.open <> 0 order by l.key, l.scope
    loop
        tip := metered._last_entry(one.scope);
        if tip.lots_end is null and (tip.next_due <= clk) is not true then
            idle := idle || one.scope;
        elsif metered._behind(one.scope, clk) then
            behind := behind || one.scope;
        elsif metered._try_lock(one.key) then
            locked := locked || one.scope;
        end if;
    end loop;
    due_nos := metered._lock_due(case when behind = '{}' then looked else array(
        select y.no from unnest(looked) y(no), lateral (
            select count(*) as lines, count(*) filter (where l.scope = any (behind)) as later
            from metered.hold_lines l where l.hold = y.no and l.open <> 0) x
        where x.lines = 0 or x.lines > x.later) end, clk);
    loop
        begin
            ended := metered._sweepable(due_nos, locked, idle, behind);
            if ended <> '{}' then
                perform metered._clear_freed(ended, locked || idle);
                perform metered._release_lines(ended, locked, 'x', clk, null, metered._by_system());
                nos := metered._end_swept(ended, clk, keep_pending, channel);
            end if;
            exit;
        exception when sqlstate 'MT010' then    -- of one wallet: each is swept alone, and one fails
            wallets := array(select s from unnest(locked) s
                where (metered._last_entry(s)).lots_end is not null);
            if wallets = '{}' then
                raise;
            end if;
            behind := behind || wallets;
            locked := array(select s from unnest(locked) s where s <> all (wallets));
        end;
    end loop;
    skipped := seen - coalesce(cardinality(nos), 0) - (
        select count(distinct l.hold) from metered.hold_lines l
        where l.hold = any (looked) and l.open <> 0 and l.scope = any (behind))::int;
end
$$;

-- Clears rows of lines that were freed with a sum, and their parts of lots, of some holds, whose rows are
-- locked: in only_scopes, or in all. Wallets are locked. Other scopes need not be: what was freed stays freed.
create function metered._clear_freed(nos bigint[], only_scopes text[]) returns void
language plpgsql volatile
as $$
declare
    lines record;
    seqs  bigint[];
begin
    for lines in
        select x.scope, x.holds, t.next_due, t.lots_end is not null as wallet
        from (select l.scope, array_agg(l.hold) as holds, min(l.due) as due
              from metered.hold_lines l
              where l.hold = any (nos) and l.open <> 0
                and (only_scopes is null or l.scope = any (only_scopes))
              group by l.scope) x,
             lateral (select y.next_due, y.lots_end from metered.ledger y
                      where y.scope = x.scope order by y.seq desc limit 1) t
        where x.due < coalesce(t.next_due, 'infinity') order by x.scope
    loop
        with freed as (
            update metered.hold_lines l set open = 0
            where l.hold = any (lines.holds) and l.scope = lines.scope and l.open <> 0
              and l.due < coalesce(lines.next_due, 'infinity')
            returning l.opened_seq)
        select array_agg(f.opened_seq) into seqs from freed f;
        if lines.wallet then
            delete from metered.lot_holds o where o.scope = lines.scope and o.seq = any (seqs);
        end if;
    end loop;
end
$$;

-- Ends the rows of swept holds, whose lines have ended, and returns those that keep no units. Unless
-- subscribers still shall hear of them, they are marked as announced.
create function metered._end_swept(swept bigint[], clk timestamptz, keep_pending boolean,
    channel text) returns bigint[]
language plpgsql volatile
as $$
declare
    nos bigint[];
begin
    perform metered._end_rows(swept, clk, (metered._by_system()).note, not keep_pending);
    select array_agg(y.no order by y.no) into nos from unnest(swept) y(no) where 0 = (
        select count(*) from metered.hold_lines l where l.hold = y.no and l.open <> 0);
    if not keep_pending and nos is not null then
        perform metered.announced(nos, channel);
    end if;
    return nos;
end
$$;

-- Locks the rows of due holds, in order, but those that another call has locked or announced.
create function metered._lock_due(nos bigint[], clk timestamptz) returns bigint[]
language plpgsql volatile
as $$
begin
    -- "is true" keeps the planner from the index of all that is due.
    return array(select r.no from (
        select y.no from metered.holds y
        where y.no = any (nos) and (y.pending and y.due <= clk) is true
        order by y.no for no key update skip locked) r);
end
$$;

-- Takes one step in a scope that is behind. A step clears the rows of up to max_holds lines that were
-- freed with a sum, and locks no scope. Where there are none, it frees what is due, if the scope's
-- lock is free: by a sum, as catch_up does it, or, in a wallet or a closed scope, the first lines one
-- by one. Then it takes the step that sweep_wallet takes, which may end lots and no line. freed counts
-- lines that it ended: null if it did nothing, since others have the locks. nos are holds that ended
-- whole with them, as sweep_due has it. more: rows of others are left.
create function metered.sweep_scope(of_scope metered.scope_name, max_holds int,
    keep_pending boolean, channel text,
    out nos bigint[], out freed int, out more boolean)
language plpgsql volatile
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set plan_cache_mode = force_generic_plan
as $$
declare
    tip    metered.ledger := metered._last_entry(of_scope);
    clk    timestamptz := metered.clock();
    ours   bigint[] := '{}';
    locked boolean := false;
    moved  boolean := true;
begin
    if max_holds > 10000
        or octet_length(channel) > 64 then
        raise exception 'out of bounds: an argument of sweep_scope' using errcode = '22023';
    end if;
    perform metered._require(max_holds between 1 and 10000 and keep_pending is not null,
        'sweep_scope');
    more := false;
    loop
        if locked or tip.lots_end is null then
            ours := metered._lock_due(array(select l.hold from metered.hold_lines l
                where l.scope = of_scope and l.open > 0 and l.due <= clk
                  and l.due < coalesce(tip.next_due, 'infinity')
                order by l.due limit max_holds), clk);
            perform metered._clear_freed(ours, array[of_scope::text]);
        end if;
        exit when ours <> '{}' or locked;
        if not metered._try_lock(metered._scope_key(of_scope)) then
            return;
        end if;
        locked := true;
        clk := metered.clock();
        tip := metered._entry_for_write(of_scope);
    end loop;
    if ours = '{}' and tip.lots_end is null and tip.next_due > '-infinity' then
        ours := metered._lock_due((metered._free_in_sum(tip, clk, true, null)).nos, clk);
        moved := (metered._last_entry(of_scope)).seq > tip.seq;
        perform metered._clear_freed(ours, array[of_scope::text]);
    elsif ours = '{}' then
        ours := metered._free_first(tip, clk, least(max_holds, metered._events_per_step()));
        moved := ours is not null;
    end if;
    nos := metered._end_swept(ours, clk, keep_pending, channel);
    more := 0 < (select count(*) from (select from metered.hold_lines l
        where l.scope = of_scope and l.open > 0 and l.due <= clk
        order by l.due limit 1) x);
    if moved or not more then
        freed := coalesce(cardinality(ours), 0);
    else
        more := false;
    end if;
end
$$;

-- Ends the first due lines, at most most, of a wallet or a closed scope, which is locked: up to the
-- first whose hold another call has locked, since it may capture something. In a wallet, what is due by
-- then is written. Returns the holds: null if the first one is locked.
create function metered._free_first(tip metered.ledger, clk timestamptz, most int) returns bigint[]
language plpgsql volatile
as $$
declare
    until   timestamptz := metered._step_until(tip, clk, most);
    due_nos bigint[];
    ours    bigint[];
begin
    due_nos := array(select l.hold from metered.hold_lines l
        where l.scope = tip.scope and l.open > 0 and l.due <= until
        order by l.due limit most);
    ours := metered._lock_due(due_nos, clk);
    if cardinality(ours) < cardinality(due_nos) then
        due_nos := due_nos[:(select min(d.n) from unnest(due_nos) with ordinality d(no, n)
            where d.no <> all (ours)) - 1];
        until := (select max(l.due) from metered.hold_lines l
            where l.scope = tip.scope and l.hold = any (due_nos));
        if until is null then
            return null;
        end if;
    end if;
    if tip.lots_end is not null then
        perform metered._settle(tip, until, metered._events_per_step(), 0, null);
    end if;
    perform metered._clear_freed(due_nos, array[tip.scope]);
    perform metered._release_lines(due_nos, array[tip.scope], 'x', clk, null, metered._by_system());
    return due_nos;
end
$$;

-- sweep_due, and a step of the first scope that is behind, for programs of version 1, which go on
-- where this call says. If more is due in that scope, it is before the next hold of that scope.
create function metered.sweep_holds(after_due timestamptz, after_no bigint, max_holds int,
    keep_pending boolean, channel text,
    out nos bigint[], out seen int, out last_due timestamptz, out last_no bigint, out more boolean)
language plpgsql volatile
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set plan_cache_mode = force_generic_plan
as $$
declare
    page record;
    step record;
    next timestamptz;
begin
    if max_holds > 10000
        or octet_length(channel) > 64 then
        raise exception 'out of bounds: an argument of sweep_holds' using errcode = '22023';
    end if;
    perform metered._require(max_holds between 1 and 10000 and keep_pending is not null,
        'sweep_holds');
    page := metered.sweep_due(after_due, after_no, max_holds, keep_pending, channel);
    nos := page.nos;
    seen := page.seen;
    last_due := page.last_due;
    last_no := page.last_no;
    more := page.more;
    if page.behind <> '{}' then
        step := metered.sweep_scope(page.behind[1], max_holds, keep_pending, channel);
        nos := nos || step.nos;
        if step.more then
            next := (select l.due from metered.hold_lines l
                where l.scope = page.behind[1] and l.open > 0
                order by l.due limit 1) - interval '1 microsecond';
            if step.freed = 0 or (next, 9223372036854775807) > (after_due, after_no) then
                last_due := next;
                last_no := 9223372036854775807;
                more := true;
            end if;
        end if;
        seen := greatest(coalesce(cardinality(nos), 0), 1);
    end if;
end
$$;

-- Sweeps of wallets. As those of holds (sweeps.sql), a transaction that writes down what is due in many
-- wallets leaves out one that is behind. It is swept alone, a step a transaction.

-- Writes down what is due in a wallet until a time, and at most max_lots of its ended lots. The scope
-- is locked. ended counts lots that lapsed or rolled over, and touched are these and all lots that
-- the new entries are about. silent: it would cross thresholds of limits that the caller does not
-- report, and has done nothing.
create function metered._sweep_lots(of_scope text, until timestamptz, max_lots int,
    limits metered.charge_limit[], wait_ms int,
    out ended int, out touched bigint[], out crossed jsonb, out silent boolean)
language plpgsql volatile
as $$
declare
    tip      metered.ledger := metered._entry_for_write(of_scope);
    entry    metered.ledger := tip;
    crossing record;
    due      bigint[];
begin
    ended := 0;
    crossing := metered._cross_lowered(tip, 0, limits, greatest(until, tip.at));
    silent := crossing.silent;
    if silent then
        return;
    end if;
    -- Each in the order of its index, which keeps the planner from the index of all.
    due := array(select d.no from (
        (select y.no from metered.lot_rows y
         where y.scope = of_scope and y.open and y.expires_at <= until
         order by y.expires_at, y.age)
        union
        (select y.no from metered.lot_rows y
         where y.scope = of_scope and y.keeps and y.expires_at <= until
         order by y.expires_at, y.age)) d);
    entry := metered._settle_lowered(entry, until, max_lots, 0, crossing.crossed, wait_ms);
    ended := (select count(*) from metered.lot_rows y
        where y.no = any (due) and not y.open and not y.keeps);
    -- In the order of the moves, which keeps the planner from the index of all moves of each lot.
    touched := due || array(select m.lot from metered.lot_moves m
        where m.scope = of_scope and m.seq > tip.seq and m.seq <= entry.seq order by m.seq, m.nth);
    if entry.seq > tip.seq and crossing.crossings is not null then
        crossed := metered._crossed_at(crossing.crossings, array[entry.seq]);
    end if;
end
$$;

-- Looks at up to max_lots lots that are due, or have lapsed units that are not announced, after
-- after_end and after_no, and writes down all that is due in their wallets, if these are not locked.
-- Wallets that are behind are returned, for sweep_wallet, and so are those that would cross
-- thresholds of the limits, or have a plan of a lost time zone (crossing). untold are lapsed units,
-- for told_lots: without keep_untold they need no announcement. busy counts lots of locked wallets.
-- If there may be more, go on after last_end and last_no. Lots of wallets in without are passed over.
create function metered.sweep_wallets(after_end timestamptz, after_no bigint, max_lots int,
    keep_untold boolean, limits metered.charge_limit[], wait_ms int, without text[],
    out ended int, out busy int, out untold json[], out last_end timestamptz, out last_no bigint,
    out more boolean, out crossing text[], out behind text[])
language plpgsql volatile
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set plan_cache_mode = force_generic_plan
as $$
declare
    clk    timestamptz := metered.clock();
    due    bigint[];
    locked text[] := '{}';
    one    record;
    part   record;
    silent boolean;
begin
    if max_lots > 10000
        or array_lower(limits, 1) <> 1
        or array_ndims(limits) <> 1
        or array_position(limits, null) is not null
        or cardinality(limits) > 16
        or pg_column_size(limits) > 1400 and not metered._fits(limits)
        or wait_ms > 3600000
        or array_lower(without, 1) <> 1
        or array_ndims(without) <> 1
        or array_position(without, null) is not null
        or cardinality(without) > 10000
        or pg_column_size(without) > 255 and not metered._fits(without, 255) then
        raise exception 'out of bounds: an argument of sweep_wallets' using errcode = '22023';
    end if;
    perform metered._require((max_lots between 1 and 2000 and keep_untold is not null
        and cardinality(without) <= 10000) is true, 'sweep_wallets');
    ended := 0;
    behind := '{}';
    crossing := '{}';
    select array_agg(d.no order by d.ends, d.no), max(d.ends), count(*) = max_lots
    into due, last_end, more
    from ((select y.no, y.expires_at as ends from metered.lot_rows y
           where (y.open or y.untold > 0) and (y.expires_at, y.no) > (after_end, after_no)
             and y.expires_at <= clk and y.scope <> all (without)
           order by y.expires_at, y.no limit max_lots)
          union
          (select y.no, y.expires_at from metered.lot_rows y
           where y.keeps and (y.expires_at, y.no) > (after_end, after_no) and y.expires_at <= clk
             and y.scope <> all (without)
           order by y.expires_at, y.no limit max_lots)
          union all
          (select y.no, y.starts_at from metered.lot_rows y
           where y.pending > 0 and (y.starts_at, y.no) > (after_end, after_no)
             and y.starts_at <= clk and y.scope <> all (without)
           order by y.starts_at, y.no limit max_lots)
          order by 2, 1 limit max_lots) d;
    last_no := due[cardinality(due)];
    for one in
        select x.scope, metered._scope_key(x.scope) as key, x.writes
        from (select y.scope, bool_or((y.open or y.keeps) and y.expires_at <= clk
                  or y.pending > 0 and y.starts_at <= clk) as writes
              from metered.lot_rows y where y.no = any (due) group by y.scope) x order by 2
    loop
        if metered._behind(one.scope, clk) then
            behind := behind || one.scope;
        elsif metered._try_lock(one.key) then
            locked := locked || one.scope;
            continue when not one.writes;
            begin
                part := metered._sweep_lots(one.scope, clk, null, limits, wait_ms);
                silent := part.silent;
            exception when sqlstate 'MT010' then
                silent := true;     -- a plan of a zone that the server has lost stops no other wallet
            end;
            if silent then
                crossing := crossing || one.scope;
                locked := array_remove(locked, one.scope);
            else
                ended := ended + part.ended;
                due := due || part.touched;
            end if;
        end if;
    end loop;
    crossing := array(select x from unnest(crossing) x order by 1);
    busy := (select count(*) from metered.lot_rows y
        where y.no = any (due) and y.scope <> all (locked || behind || crossing));
    if keep_untold then
        untold := array(select metered._untold_json(y) from metered.lots y
            where y.no = any (due) and y.scope = any (locked) and y.untold > 0
            order by y.expires_at, y.no);
    else
        update metered.lot_rows y set untold = 0
        where y.no = any (due) and y.scope = any (locked) and y.untold > 0;
    end if;
end
$$;

-- Takes one step in a wallet: writes down what is due first in it, as many events as one step
-- writes. untold are lapsed units of the lots that they are about, and of the next max_lots others
-- after after_end and after_no. status is swept, busy (its lock is not free; without skip_busy it
-- is waited for), or crossing, as sweep_wallets has it: the last step alone crosses thresholds, as
-- the wallet is by now. more: call again, after last_end and last_no.
create function metered.sweep_wallet(of_scope metered.scope_name, after_end timestamptz,
    after_no bigint, max_lots int, keep_untold boolean, limits metered.charge_limit[], wait_ms int,
    skip_busy boolean,
    out status text, out ended int, out untold json[], out last_end timestamptz,
    out last_no bigint, out more boolean, out crossed jsonb)
language plpgsql volatile
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set plan_cache_mode = force_generic_plan
as $$
declare
    tip  metered.ledger;
    now_tip metered.ledger;
    clk  timestamptz;
    until timestamptz;      -- of the step
    part record;
    told bigint[];
begin
    if max_lots > 10000
        or array_lower(limits, 1) <> 1
        or array_ndims(limits) <> 1
        or array_position(limits, null) is not null
        or cardinality(limits) > 16
        or pg_column_size(limits) > 1400 and not metered._fits(limits)
        or wait_ms > 3600000 then
        raise exception 'out of bounds: an argument of sweep_wallet' using errcode = '22023';
    end if;
    perform metered._require((max_lots between 1 and 2000 and keep_untold is not null
        and skip_busy is not null) is true, 'sweep_wallet');
    ended := 0;
    more := false;
    status := 'busy';
    if not skip_busy then
        perform metered._lock_keys(array[metered._scope_key(of_scope)], wait_ms);
    elsif not metered._try_lock(metered._scope_key(of_scope)) then
        return;
    end if;
    clk := metered.clock();
    tip := metered._last_entry(of_scope);
    until := metered._step_until(tip, clk, metered._events_per_step());
    part := metered._sweep_lots(of_scope, until, metered._events_per_step(),
        case when until = clk then limits end, wait_ms);
    if part.silent then
        status := 'crossing';
        return;
    end if;
    status := 'swept';
    ended := part.ended;
    crossed := part.crossed;
    select array_agg(x.no order by x.expires_at, x.no), max(x.expires_at), count(*) = max_lots
    into told, last_end, more
    from (select y.no, y.expires_at from metered.lot_rows y
          where y.scope = of_scope and y.untold > 0 and (y.expires_at, y.no) > (after_end, after_no)
          order by y.expires_at, y.no limit max_lots) x;
    last_no := coalesce(told[cardinality(told)], after_no);
    last_end := coalesce(last_end, after_end);
    told := told || part.touched;
    if keep_untold then
        untold := array(select metered._untold_json(y) from metered.lots y
            where y.no = any (told) and y.untold > 0 order by y.expires_at, y.no);
    else
        update metered.lot_rows y set untold = 0 where y.no = any (told) and y.untold > 0;
    end if;
    now_tip := metered._last_entry(of_scope);
    more := more or now_tip.seq > tip.seq
        and (now_tip.lots_end <= clk or now_tip.next_due <= clk) is true;
end
$$;

-- For programs of version 1. only_scope: all steps of one wallet. Otherwise sweep_wallets, and a
-- step of the first wallet that is behind. If more is due in it, the call goes on before that.
create function metered.sweep_lots(after_end timestamptz, after_no bigint, max_lots int,
    only_scope text, keep_untold boolean, limits metered.charge_limit[], wait_ms int,
    out seen int, out ended int, out busy int, out untold json[], out last_end timestamptz,
    out last_no bigint, out more boolean, out crossing text[], out crossed jsonb)
language plpgsql volatile
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set plan_cache_mode = force_generic_plan
as $$
declare
    every boolean := only_scope is null;
    page  record;
    step  record;
    next  timestamptz;
begin
    if max_lots > 10000
        or octet_length(only_scope) > 255
        or array_lower(limits, 1) <> 1
        or array_ndims(limits) <> 1
        or array_position(limits, null) is not null
        or cardinality(limits) > 16
        or pg_column_size(limits) > 1400 and not metered._fits(limits)
        or wait_ms > 3600000 then
        raise exception 'out of bounds: an argument of sweep_lots' using errcode = '22023';
    end if;
    perform metered._require(max_lots between 1 and 10000 and keep_untold is not null
        and coalesce(octet_length(only_scope) between 1 and 255, true), 'sweep_lots');
    ended := 0;
    busy := 0;
    more := false;
    last_end := after_end;
    last_no := after_no;
    if every then
        page := metered.sweep_wallets(after_end, after_no, least(max_lots, 2000), keep_untold,
            limits, wait_ms, '{}');
        ended := page.ended;
        busy := page.busy;
        untold := page.untold;
        last_end := page.last_end;
        last_no := page.last_no;
        more := page.more;
        crossing := page.crossing;
        only_scope := page.behind[1];
        after_end := '-infinity';
        after_no := 0;
    end if;
    while only_scope is not null loop
        step := metered.sweep_wallet(only_scope, after_end, after_no, 2000, keep_untold, limits,
            wait_ms, every);
        ended := ended + step.ended;
        untold := untold || step.untold;
        crossed := coalesce(crossed || step.crossed, step.crossed, crossed);
        if step.status = 'crossing' then
            crossing := crossing || only_scope;
        end if;
        exit when every or not step.more;
        after_end := step.last_end;
        after_no := step.last_no;
    end loop;
    if every and only_scope is not null then
        next := case when step.more then (metered._last_entry(only_scope)).lots_end end;
        if next <= metered.clock() then
            last_end := next - interval '1 microsecond';
            last_no := 9223372036854775807;
            more := true;
        end if;
    end if;
    seen := ended + busy;
end
$$;

-- Marks lapsed units of lots as reported to subscribers: so many units of each.
create function metered.told_lots(nos bigint[], units bigint[]) returns void
language plpgsql volatile
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set plan_cache_mode = force_generic_plan
as $$
begin
    if array_lower(nos, 1) <> 1
        or array_ndims(nos) <> 1
        or array_position(nos, null) is not null
        or cardinality(nos) > 10000
        or array_lower(units, 1) <> 1
        or array_ndims(units) <> 1
        or array_position(units, null) is not null
        or cardinality(units) > 10000 then
        raise exception 'out of bounds: an argument of told_lots' using errcode = '22023';
    end if;
    perform metered._require(cardinality(nos) <= 10000 and cardinality(units) = cardinality(nos), 'nos');
    update metered.lot_rows y set untold = greatest(0, least(y.untold, y.untold - t.units)) from unnest(nos, units) t(no, units) where y.no = t.no;
end
$$;

-- A hold as JSON, which is also on the record of a command: without what is empty, null or false. One that is due
-- has expired, whether that is written down or not. reason is that of its release or return. A ceiling
-- of infinity is none. Inlined wherever it stands.
create function metered._hold_as_json(h metered.holds, lines json, clk timestamptz, reason text) returns json
language sql stable
as $$
    select concat('{"tenant":', to_json(h.tenant), ',"id":', to_json(h.id), case when h.holder <> '' then ',"holder":' || to_json(h.holder)::text end,
        ',"state":"', case when h.state = 'h' and h.due <= clk then 'x' else h.state end, '","version":', h.version,
        ',"placed_at":', to_json(h.placed_at), ',"deadline":', to_json(h.deadline), ',"due":', to_json(h.due),
        ',"ceiling":' || to_json(nullif(h.ceiling, 'infinity'))::text,
        ',"ended_at":' || to_json(case when h.state = 'h' and h.due <= clk then h.due else h.ended_at end)::text,
        ',"now":', to_json(clk), ',"claim":' || to_json(h.claim)::text, ',"entity":' || to_json(h.entity)::text,
        case when h.returned then ',"returned":true' end, ',"reason":' || to_json(reason)::text,
        ',"metadata":' || h.metadata::text, ',"lines":' || lines::text, '}')::json
$$;

-- A line of a hold as JSON. open is 0 if the hold has ended, also where the line has
-- not been freed yet. Inlined wherever it stands.
create function metered._line_json(of_scope text, amount bigint, captured bigint, open bigint, refunded bigint, at_least bigint) returns json
language sql stable
as $$
    select concat('{"scope":', to_json(of_scope), ',"amount":', amount, ',"captured":', captured, ',"open":', open,
        case when refunded > 0 then ',"refunded":' || refunded end, case when at_least > 0 then ',"at_least":' || at_least end, '}')::json
$$;

-- The hold of that no.
create function metered.hold_json(of_no bigint, clk timestamptz) returns json
language plpgsql stable
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set plan_cache_mode = force_generic_plan
as $$
begin
    return (
        select metered._hold_as_json(row(h.*)::metered.holds, (
            select json_agg(metered._line_json(l.scope, l.amount,
                case when h.state = 'x' or h.state = 'h' and h.due <= clk then greatest(l.captured, l.at_least) else l.captured end,
                case when h.state = 'h' and h.due > clk then l.open else 0 end, l.refunded, l.at_least) order by l.scope)
            from metered.hold_lines l where l.hold = h.no), clk,
            case when h.state = 'r' or h.returned then (      -- its last transition
                select e.note ->> 'reason' from metered.hold_events e where e.hold = h.no and e.version = h.version) end)
        from metered.holds h where h.no = of_no);
end
$$;

-- Keeps a command's hold, or its draw of a wallet, for the command's record, which is written later
-- in its transaction. JSON has no record separator in it.
create function metered._remember_hold(hold json) returns text
language plpgsql volatile
as $$
begin
    return set_config('metered_tx.holds',
        concat_ws(chr(30), nullif(current_setting('metered_tx.holds', true), ''), hold::text), true);
end
$$;

-- Takes the locks of a command that does several things to scopes and holds, in the one
-- order: all scopes, by key, with those of the named holds, unless these are
-- another holder's (see _lock_holds); the ids that it places, by key; then rows of holds, by
-- no: of the named holds, and of due holds that could be in its way in scopes that it
-- may charge. A command that names thousands of scopes needs a larger lock table.
--
-- A hold that was not there before the locks, and is there after them, was placed while this
-- waited. Its scopes are not locked, and would be locked late: the whole is to be tried again.
create function metered.lock_all(keys bigint[], id_keys bigint[], scopes text[], named metered.hold_ids[], wait_ms int) returns void
language plpgsql volatile
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set plan_cache_mode = force_generic_plan
as $$
declare
    nos    bigint[];
    there  bigint[];
    due    bigint[];
    clk    timestamptz;
    before text;
begin
    if array_lower(keys, 1) <> 1
        or array_ndims(keys) <> 1
        or array_position(keys, null) is not null
        or cardinality(keys) > 10000
        or array_lower(id_keys, 1) <> 1
        or array_ndims(id_keys) <> 1
        or array_position(id_keys, null) is not null
        or cardinality(id_keys) > 10000
        or array_lower(scopes, 1) <> 1
        or array_ndims(scopes) <> 1
        or array_position(scopes, null) is not null
        or cardinality(scopes) > 10000
        or pg_column_size(scopes) > 255 and not metered._fits(scopes, 255)
        or array_lower(named, 1) <> 1
        or array_ndims(named) <> 1
        or array_position(named, null) is not null
        or cardinality(named) > 1000
        or pg_column_size(named) > 1400 and not metered._fits(named)
        or wait_ms > 3600000 then
        raise exception 'out of bounds: an argument of lock_all' using errcode = '22023';
    end if;
    if (cardinality(keys) + cardinality(id_keys) + cardinality(scopes) < 10000 and cardinality(named) < 1000) is not true then
        perform metered._require(false, 'locks');
    end if;
    nos := metered._named_holds(named);
    if nos is not null then
        select array_agg(k.key order by k.key) into keys
        from (select unnest(h.keys) from metered.holds h where h.no = any (nos) union select unnest(keys)) k(key);
    end if;
    if metered._lock_keys(keys || id_keys, wait_ms) then
        before := set_config('metered_tx.waited', 'true', true);    -- so sums have tallies from now on
    end if;
    if cardinality(named) > 0 then
        there := metered._named_holds(named);
        if not coalesce(there, '{}') <@ coalesce(nos, '{}') then
            raise exception 'could not serialize access: a hold was placed meanwhile' using errcode = '40001';
        end if;
    end if;
    clk := metered.clock();
    -- As many as _end_due would take. If another one falls due before it looks, that one is locked out
    -- of order.
    select array_agg(d.hold) into due
    from unnest(scopes) s(scope),
         lateral (select l.next_due from metered.ledger l where l.scope = s.scope order by l.seq desc limit 1) t,
         lateral (select l.hold from metered.hold_lines l
          where t.next_due <= clk and l.scope = s.scope and l.open > 0 and l.due >= t.next_due and l.due <= clk
          order by l.due limit metered._events_per_step()) d;
    nos := nos || due;
    if nos is not null then
        before := metered._bound_lock_wait(wait_ms);
        perform from metered.holds h where h.no = any (nos) order by h.no for no key update;
        before := metered._unbound_lock_wait(before);
    end if;
end
$$;

-- The named holds, without those of another holder.
create function metered._named_holds(named metered.hold_ids[]) returns bigint[]
language plpgsql volatile
as $$
begin
    return (
        select array_agg(h.no)
        from unnest(named) n, lateral unnest(n.ids) i(id),
             lateral (select x.no, x.holder from metered.holds x where x.tenant = n.tenant and x.id = i.id limit 1) h
        where n.holder = '' or h.holder = n.holder);
end
$$;

-- Notifies the listeners of the channel of a hold's transition. Every build reads the first
-- fields: more may be added, and none may change. With a + after the channel's name, the actor and
-- the present hold are added. Postgres takes less than 8,000 bytes. So the note is sent if it fits, and as
-- many lines, by scope. cut says that these are not all.
create function metered._announce(channel text, of_tenant text, of_id text, of_version int, of_kind text) returns void
language plpgsql volatile
as $$
declare
    said      text := json_build_object('tenant', of_tenant, 'id', of_id, 'version', of_version, 'kind', of_kind);
    this_hold record;
    fitting   record;
    cut       boolean;
begin
    if right(channel, 1) = '+' then
        channel := left(channel, -1);
        -- Four texts of 255 bytes, of which JSON makes 6,120 at most.
        select y.no, y.state, json_build_object('state', case when y.returned then 'b' else y.state end, 'holder', y.holder, 'deadline', y.deadline,
                'at', e.at, 'claim', y.claim)::text as stands,
            case when e.note is not null then json_strip_nulls(json_build_object('actor', e.note ->> 'actor', 'tenant', e.note ->> 'tenant',
                'correlation', e.note ->> 'correlation', 'reason', e.note ->> 'reason'))::text end as note
        into this_hold from metered.holds y left join metered.hold_events e on e.hold = y.no and e.version = of_version
        where y.tenant = of_tenant and y.id = of_id;
        said := left(said, -1) || ', ' || right(this_hold.stands, -1);
        cut := coalesce(octet_length(said) + octet_length(this_hold.note) >= 7900, false);
        if not cut and this_hold.note is not null then
            said := left(said, -1) || ', "note" : ' || this_hold.note || '}';
        end if;
        select coalesce(string_agg(x.line, ', ' order by x.scope) filter (where x.bytes < 7900), '') as sent, bool_or(x.bytes >= 7900) as cut into fitting
        from (select y.scope, j.line, octet_length(said) + sum(octet_length(j.line) + 2) over (order by y.scope) as bytes
              from metered.hold_lines y, lateral (select metered._line_json(y.scope, y.amount, y.captured,
                  case when this_hold.state = 'h' then y.open else 0 end, y.refunded, y.at_least)::text) j(line)
              where y.hold = this_hold.no) x;
        said := left(said, -1) || ', "lines" : [' || fitting.sent || ']' || case when cut or fitting.cut then ', "cut" : true}' else '}' end;
    end if;
    perform pg_notify(channel, said);
end
$$;

-- Takes the locks of a placement: its scopes, by key, and then the id that the caller chose.
create function metered._lock_place(charges metered.new_charge[], id_key bigint, wait_ms int) returns boolean
language plpgsql volatile
as $$
begin
    if cardinality(charges) = 1 and metered._try_lock(charges[1].key)
       and (id_key is null or metered._try_lock(id_key)) then
        return false;
    end if;
    return metered._lock_charges(charges, wait_ms) or id_key is not null and metered._lock_keys(array[id_key], wait_ms);
end
$$;

-- The refusal of place at this moment, without a lock, in a command that has begun (it is no replay). status is taken, refused, or null. Null means
-- that place would not refuse, or that only place can decide: the hold was placed before, or the snapshot may be old.
-- stored is the hold of a taken claim, if reveal.
create function metered.look_place(hold metered.new_hold, charges metered.new_charge[], ahead interval, reveal boolean,
    out status text, out at timestamptz, out deadline timestamptz, out refused jsonb, out stored json)
language plpgsql stable
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set plan_cache_mode = force_generic_plan
as $$
declare
    was record;
begin
    if greatest(octet_length(hold.tenant), octet_length(hold.id), octet_length(hold.holder), octet_length(hold.claim)) > 255
        or octet_length(hold.fingerprint) > 33
        or pg_column_size(hold.metadata) > 65540
        or pg_column_compression(hold.metadata) is not null and octet_length(hold.metadata::text) > 65536
        or array_lower(hold.minimum, 1) <> 1
        or array_ndims(hold.minimum) <> 1
        or array_position(hold.minimum, null) is not null
        or cardinality(hold.minimum) > 65
        or pg_column_size(hold.minimum) > 1400 and not metered._fits(hold.minimum)
        or array_lower(charges, 1) <> 1
        or array_ndims(charges) <> 1
        or array_position(charges, null) is not null
        or cardinality(charges) > 64
        or pg_column_size(charges) > 1400 and not metered._fits(charges) then
        raise exception 'out of bounds: an argument of look_place' using errcode = '22023';
    end if;
    if coalesce(current_setting('metered_tx.command', true), '') = '' or metered._one_snapshot() or hold.chosen and exists (select from metered.holds h where h.tenant = hold.tenant and h.id = hold.id) then
        return;
    end if;
    if hold.claim is not null then
        at := metered.clock();
        select h.no, h.state, h.holder, h.due into was
        from metered.holds h where h.claim = hold.claim and (h.state = 'h' and h.due > at or h.state = 'c' and not h.returned);
        if found then
            if was.state = 'c' or was.holder <> hold.holder then
                status := 'taken';
                deadline := case when was.state = 'h' then was.due end;
                stored := case when reveal then metered.hold_json(was.no, at) end;
            end if;
            return;
        end if;
    end if;
    refused := (metered.check_charge(charges, ahead)).refused;
    status := case when refused is not null then 'refused' end;
end
$$;

-- Places a hold of the units that the charges hold, and charges the rest of their amounts, all or none.
-- status is placed, same (placed before, with the same content, which stored has), conflict (with other
-- content), retired, taken (of a claim: another holder has it, until deadline if that is not
-- null, and stored is their hold, if reveal) or refused. Of a hold up to so much (see new_hold) stored is the hold.
--
-- If the caller chose the id, it is locked after the scopes: a call that places the same id
-- on other scopes waits there, as long as for a scope, and then sees the first one. An
-- id that was made up for this call is not looked for.
create function metered.place(hold metered.new_hold, charges metered.new_charge[], ahead interval, wait_ms int,
    origin metered.origin, channel text, raising boolean, reveal boolean default false,
    out status text, out placed_at timestamptz, out deadline timestamptz,
    out seqs bigint[], out ats timestamptz[], out refused jsonb, out stored json, out crossed jsonb)
language plpgsql volatile
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set plan_cache_mode = force_generic_plan
as $$
declare
    posted    record;
    was       record;
    clk       timestamptz;
    due_in    interval := hold.ttl + hold.grace;
    line_keys bigint[] := '{}';
    lines     jsonb := '[]';
    claimed   boolean := hold.claim is null;
    new_no    bigint;
    unused    text;
    charge    metered.new_charge;
    minima    int;
    mode      text := case when raising then 'raise' else 'answer' end;
    fewest    bigint;      -- units of each line, of a hold up to so much
    over      bigint;      -- the claim's last hold, if it is due
begin
    if greatest(octet_length(hold.tenant), octet_length(hold.id), octet_length(hold.holder), octet_length(hold.claim), octet_length(origin.tenant), octet_length(origin.operation)) > 255
        or octet_length(hold.fingerprint) > 33
        or pg_column_size(hold.metadata) > 65540
        or pg_column_compression(hold.metadata) is not null and octet_length(hold.metadata::text) > 65536
        or array_lower(hold.minimum, 1) <> 1
        or array_ndims(hold.minimum) <> 1
        or array_position(hold.minimum, null) is not null
        or cardinality(hold.minimum) > 65
        or pg_column_size(hold.minimum) > 1400 and not metered._fits(hold.minimum)
        or array_lower(charges, 1) <> 1
        or array_ndims(charges) <> 1
        or array_position(charges, null) is not null
        or cardinality(charges) > 64
        or pg_column_size(charges) > 1400 and not metered._fits(charges)
        or wait_ms > 3600000
        or pg_column_size(origin.note) > 8196
        or pg_column_compression(origin.note) is not null and octet_length(origin.note::text) > 8192
        or octet_length(channel) > 64 then
        raise exception 'out of bounds: an argument of place' using errcode = '22023';
    end if;
    minima := cardinality(hold.minimum);
    if minima > 0 and (hold.minimum[minima]).scope = '' then
        fewest := (hold.minimum[minima]).amount;
        hold.minimum := nullif(hold.minimum[:minima - 1], '{}');
        perform metered._require((select min(x.held) = max(x.held) and fewest between 1 and min(x.held) from unnest(charges) x where x.held > 0), 'up to');
    end if;
    foreach charge in array charges loop
        if charge.held > 0 then
            if charge.key is null then
                charge.key := metered._scope_key(charge.scope);
                charges := metered._with_keys(charges);
            elsif not metered._key_fits(charge.key, charge.scope) then
                perform metered._require(false, 'key');
            end if;
            line_keys := line_keys || charge.key;
            claimed := claimed or charge.scope = hold.claim and charge.held = 1;
        end if;
    end loop;
    if (claimed and line_keys <> '{}' and hold.ttl > interval '0' and hold.grace >= interval '0' and hold.ttl <= coalesce(hold.lifetime, interval '3660 days')
        and hold.grace <= interval '3660 days' and coalesce(hold.lifetime <= interval '3660 days', true)
        and hold.tenant is not null and hold.id <> '' and hold.holder is not null and octet_length(hold.fingerprint) = 33) is not true then
        perform metered._require(false, 'hold');
    end if;
    if cardinality(line_keys) > 1 then
        line_keys := array(select distinct k from unnest(line_keys) k order by k);
    end if;
    if hold.chosen or hold.claim is not null then
        unused := metered._lock_place(charges, case when hold.chosen then coalesce(hold.key, metered._lock_key('metered/hold/metered',
            convert_to(hold.tenant, 'UTF8') || decode('00', 'hex') || convert_to(hold.id, 'UTF8'))) end, wait_ms);
        clk := metered.clock();     -- else _write_charges does both
        was := metered._hold_before(hold, clk, wait_ms);
        status := was.status;
        deadline := was.deadline;
        placed_at := was.at;
        over := was.over;
    end if;
    if status is not null then
        stored := metered._answer_before(hold.id, was.no, status, was.state, deadline - placed_at,
            clk, origin, raising, reveal);
        return;
    end if;
    if fewest is null then
        posted := metered._write_charges(charges, ahead, wait_ms, origin, mode, row(hold.id, due_in, null, clk), false);
    else
        posted := metered._write_up_to(charges, fewest, ahead, wait_ms, origin, mode, row(hold.id, due_in, null, clk), false);
        charges := posted.charges;
        posted := posted.posted;
    end if;
    foreach charge in array charges loop
        if charge.held > 0 then
            lines := lines || jsonb_build_object('scope', charge.scope, 'amount', charge.held, 'open', charge.held);
        end if;
    end loop;
    seqs := posted.seqs;
    ats := posted.ats;
    refused := posted.refused;
    crossed := posted.crossed;
    placed_at := posted.at;
    if refused is not null then
        status := 'refused';
        return;
    end if;
    deadline := placed_at + hold.ttl;
    -- A month less 30 days is more than nothing, and can lead back.
    if (deadline > placed_at and placed_at + due_in >= deadline and coalesce(deadline <= placed_at + hold.lifetime, true)) is not true then
        perform metered._require(false, 'ttl');
    end if;
    if over is not null then    -- its units may have been freed with a sum, and its row left
        perform metered._end_rows(array[over], clk, (metered._by_system()).note, false);
    end if;
    loop
        insert into metered.holds (placed_at, deadline, due, ceiling, issued_at, version, state,
            tenant, id, holder, claim, fingerprint, keys, metadata)
        values (place.placed_at, place.placed_at + hold.ttl, place.placed_at + (due_in), coalesce(place.placed_at + hold.lifetime, 'infinity'), hold.issued_at, 1, 'h',
            hold.tenant, hold.id, hold.holder, hold.claim, hold.fingerprint, line_keys, hold.metadata)
        on conflict do nothing
        returning no into new_no;
        exit when new_no is not null;
        if not metered._has_number('holds', currval(metered._numbers('holds'))) then
            perform metered._collided();     -- this view is older than one that was placed
        end if;
        perform metered._raise_sequence('holds');
    end loop;
    if cardinality(charges) = 1 then
        insert into metered.hold_lines (hold, key, amount, open, due, scope, opened_seq)
        values (new_no, charge.key, charge.held, charge.held, place.placed_at + due_in, charge.scope, seqs[1] - (charge.amount > charge.held)::int);
    else
        insert into metered.hold_lines (hold, key, amount, open, due, scope, opened_seq)
        select new_no, l.key, l.held, l.held, place.placed_at + due_in, l.scope, l.seq - (l.amount > l.held)::int
        from rows from (unnest(charges), unnest(seqs)) l(scope, key, amount, held, limits, note, must_exist, lease, lease_offset, seq) where l.held > 0;
    end if;
    if hold.minimum is not null then
        lines := metered._with_minima(new_no, hold.minimum, lines);
    end if;
    insert into metered.hold_events (hold, at, deadline, version, kind, detail, note, operation_tenant, operation)
    values (new_no, place.placed_at, place.deadline, 1, 'h', case when hold.holder = '' and coalesce(hold.claim, '') = '' then jsonb_build_object('tenant', hold.tenant, 'grace_us', (extract(epoch from hold.grace) * 1000000)::bigint, 'lifetime_us', (extract(epoch from hold.lifetime) * 1000000)::bigint, 'lines', lines)
            else jsonb_build_object('tenant', hold.tenant, 'holder', hold.holder, 'claim', coalesce(hold.claim, ''), 'grace_us', (extract(epoch from hold.grace) * 1000000)::bigint, 'lifetime_us', (extract(epoch from hold.lifetime) * 1000000)::bigint, 'lines', lines) end,
        origin.note, origin.tenant, origin.operation);
    if channel is not null then
        perform metered._announce(channel, hold.tenant, hold.id, 1, 'placed');
    end if;
    stored := case when fewest is not null then metered.hold_json(new_no, placed_at) end;
    if current_setting('metered_tx.command', true) <> '' then     -- a session is opened by no command
        unused := metered._remember_hold(metered._created_json(metered.hold_json(new_no, placed_at), charges, seqs, ats));
    end if;
    status := 'placed';
end
$$;

-- The hold that place answers with where _hold_before has a status: the one that was placed before, or the
-- one that has the claim, if that is revealed. If raising, all but a hold that is still placed is an exception.
create function metered._answer_before(of_id text, of_no bigint, status text, state text, retry interval, clk timestamptz,
    origin metered.origin, raising boolean, reveal boolean) returns json
language plpgsql volatile
as $$
declare
    stored json;
    unused text;
begin
    if status = 'same' or status = 'taken' and reveal then
        stored := metered.hold_json(of_no, clk);
    end if;
    if raising and status <> 'same' then
        raise exception 'the hold cannot be placed' using errcode = 'MT007', detail = json_build_object('status', status,
            'id', of_id, 'retry_us', (extract(epoch from retry) * 1000000)::bigint, 'hold', stored);
    elsif status = 'same' then
        if raising and state <> 'h' then
            perform metered._refuse_hold(true, json_build_object('status', 'state', 'id', of_id, 'state', state, 'hold', stored));
        end if;
        unused := case when origin.operation is not null then metered._remember_hold(stored) end;
    end if;
    return stored;
end
$$;

-- The charges with the keys of their scopes' locks, where these were left to be derived.
create function metered._with_keys(charges metered.new_charge[]) returns metered.new_charge[]
language plpgsql stable
as $$
begin
    return array(select row(c.scope, coalesce(c.key, metered._scope_key(c.scope)), c.amount, c.held, c.limits, c.note, c.must_exist, null, null)::metered.new_charge
        from unnest(charges) with ordinality c(scope, key, amount, held, limits, note, must_exist, lease, lease_offset, n) order by c.n);
end
$$;

-- The hold that was placed before: with this id, if the caller chose it, or of this claim. status as place
-- has it, or null: none is in the way. state is its present state. over is a hold of the claim that is due.
create function metered._hold_before(hold metered.new_hold, clk timestamptz, wait_ms int,
    out status text, out no bigint, out state text, out deadline timestamptz, out at timestamptz, out over bigint)
language plpgsql volatile
as $$
declare
    was    record;
    before text;
begin
    if hold.chosen then
        select h.no, h.fingerprint, h.state, h.holder, h.due into was
        from metered.holds h where h.tenant = hold.tenant and h.id = hold.id;
    else
        select h.no, h.fingerprint, h.state, h.holder, h.due into was
        from metered.holds h where h.claim = hold.claim and (h.state = 'h' or h.state = 'c' and not h.returned);
    end if;
    no := was.no;
    if no is null then
        if hold.chosen and hold.issued_at is not null and metered._one_snapshot() then
            -- It may have been placed and purged since this snapshot, with which the
            -- horizon has moved: then this fails with 40001, as a lock of a row does
            -- that was updated since. FOR KEY SHARE would not.
            before := metered._bound_lock_wait(wait_ms);
            perform from metered.holds_horizon z where z.one for share;
            before := metered._unbound_lock_wait(before);
        end if;
        if hold.chosen and hold.issued_at <= (select z.at from metered.holds_horizon z where z.one) then
            status := 'retired';
        end if;
        return;
    end if;
    state := case when was.state = 'h' and was.due <= clk then 'x' else was.state end;
    if not hold.chosen then
        if state = 'x' then
            over := no;
            no := null;
            return;
        elsif state = 'c' or was.holder <> hold.holder then
            status := 'taken';
            if state = 'h' then
                deadline := was.due;
                at := clk;
            end if;
        end if;
    end if;
    status := coalesce(status, case when was.fingerprint = hold.fingerprint then 'same' else 'conflict' end);
    if status = 'same' or metered._one_snapshot() then
        -- A snapshot that is too old for the hold's present state fails here.
        before := metered._bound_lock_wait(wait_ms);
        perform from metered.holds h where h.no = was.no for share;
        if not found then
            perform metered._collided();
        end if;
        before := metered._unbound_lock_wait(before);
    end if;
end
$$;

-- A hold that was just placed, with the other charges of its request.
create function metered._created_json(hold json, charges metered.new_charge[], seqs bigint[], ats timestamptz[]) returns json
language plpgsql stable
as $$
begin
    return ('{"created":true,' || coalesce('"charges":' || (
        select json_agg(json_build_object('scope', s.scope, 'seq', q.seq, 'amount', s.amount - s.held, 'at', q.at) order by s.n)
        from unnest(charges) with ordinality s(scope, key, amount, held, limits, note, must_exist, lease, lease_offset, n)
             join unnest(seqs, ats) with ordinality q(seq, at, n) on q.n = s.n
        where s.amount > s.held)::text || ',', '') || substr(hold::text, 2))::json;
end
$$;

-- Why there is no hold with this id: retired or unknown. An old snapshot may miss a hold that was placed since: then an insertion fails with 40001.
-- The block takes it back. So a caller that names a holder may learn that somebody has placed the id since its snapshot, and no
-- more: its next try finds another's hold as unknown as none.
create function metered._missing_hold(of_tenant text, of_id text, issued timestamptz, wait_ms int) returns text
language plpgsql volatile
as $$
begin
    if exists (select from metered.cell) then
        perform metered._refuse_moved(of_tenant);   -- it may be in the tenant's cell
    end if;
    if issued <= (select z.at from metered.holds_horizon z where z.one) then
        return 'retired';
    end if;
    if metered._one_snapshot() then
        begin
            perform metered._bound_lock_wait(wait_ms);
            insert into metered.holds (placed_at, deadline, due, ceiling, version, state, tenant, id, holder, fingerprint, keys)
            values ('epoch', 'epoch', 'epoch', 'epoch', 0, 'x', of_tenant, of_id, '', '', '{}')
            on conflict do nothing;
            raise exception using errcode = 'MT100';
        exception when sqlstate 'MT100' then
            null;
        end;
    end if;
    return 'unknown';
end
$$;

-- Locks holds of a tenant for a transition: the scopes of their lines, by key, and then their rows, by no. nos are in the order of ids. needs is
-- the state that they must be in, c or h, or * for either. An h must not be due. States and clk are read under the locks. If a hold
-- does not fit, failed is its id and status says why: unknown, retired, holder (which callers must not tell from unknown) or state.
--
-- A hold's holder never changes, and is looked at before anything is locked: a lock, a wait, or a 40001 would tell another's hold from none.
create function metered._lock_holds(named metered.hold_ids, needs "char", wait_ms int,
    out nos bigint[], out keys bigint[], out clk timestamptz, out status text, out failed text, out stands "char", out failed_no bigint)
language plpgsql volatile
as $$
declare
    of_tenant text := named.tenant;
    of_holder text := named.holder;
    ids       text[] := named.ids;
    this_hold record;
    seen      bigint[];
    waited    boolean;
    before    text;
begin
    -- Nearly always there is one, and nobody is in its way. Then nothing waits, and the order
    -- in which it is all locked does not matter. Otherwise the locks that it got are the
    -- first of its scopes' by key, or all of them and perhaps its row: in order, for what
    -- comes below. The row that is locked is read as it is by then, whatever the snapshot.
    if cardinality(ids) = 1 then
        select y.no, y.keys, y.state, y.due into this_hold from metered.holds y
        where y.tenant = of_tenant and y.id = ids[1]
          and case when of_holder = '' or y.holder = of_holder then metered._try_keys(y.keys) end
        for no key update skip locked;
        if found then
            clk := metered.clock();     -- after the lock
            if (this_hold.state = needs or needs = '*' and this_hold.state in ('h', 'c')) and (this_hold.state <> 'h' or this_hold.due > clk) then
                nos := array[this_hold.no];
                keys := this_hold.keys;
                return;
            end if;
        end if;
    end if;
    perform metered._require(array_lower(ids, 1) = 1 and cardinality(ids) <= 100 and cardinality(ids) = (select count(distinct id) from unnest(ids) id), 'ids');
    keys := '{}';
    for i in 1..cardinality(ids) loop
        select y.no, y.keys, y.holder into this_hold from metered.holds y where y.tenant = of_tenant and y.id = ids[i];
        if this_hold.no is null or of_holder <> '' and this_hold.holder <> of_holder then
            -- An id that does not exist would be retired with such an id, and so is another tenant's.
            status := case
                when this_hold.no is null then metered._missing_hold(of_tenant, ids[i], named.issued[i], wait_ms)
                when named.issued[i] <= (select z.at from metered.holds_horizon z where z.one) then 'retired'
                else 'holder' end;
            failed := ids[i];
            return;
        end if;
        seen := seen || this_hold.no;
        keys := keys || this_hold.keys;
    end loop;
    select coalesce(array_agg(k.key order by k.key), '{}') into keys from (select distinct unnest(keys)) k(key);
    waited := metered._lock_keys(keys, wait_ms);
    before := metered._bound_lock_wait(wait_ms);
    perform from metered.holds y where y.no = any (seen) order by y.no for no key update;
    before := metered._unbound_lock_wait(before);
    clk := metered.clock();     -- after the lock
    for i in 1..cardinality(ids) loop
        -- One that took the id of one purged while this waited is not locked: it comes too late.
        select y.no, y.state, y.due into this_hold from metered.holds y
        where y.tenant = of_tenant and y.id = ids[i] and y.no = any (seen);
        if (this_hold.state = needs or needs = '*' and this_hold.state in ('h', 'c')) and (this_hold.state <> 'h' or this_hold.due > clk) then
            nos[i] := this_hold.no;
            continue;
        end if;
        failed := ids[i];
        if this_hold.no is null then
            status := case when named.issued[i] <= (select z.at from metered.holds_horizon z where z.one) then 'retired' else 'unknown' end;
        else
            status := 'state';
            stands := case when this_hold.state = 'h' and this_hold.due <= clk then 'x' else this_hold.state end;
            failed_no := this_hold.no;
        end if;
        return;
    end loop;
end
$$;

-- Answers a refused transition, or raises the answer. json, since a hold may be in it
-- whose metadata is none to jsonb: \u0000, half a surrogate pair, 1e200000.
create function metered._refuse_hold(raising boolean, answer json) returns json
language plpgsql
as $$
begin
    if raising then
        raise exception 'the hold does not allow it' using errcode = 'MT007', detail = answer;
    end if;
    return answer;
end
$$;

-- Captures holds, all or none: spends all their units (used is null), or units of the scopes of one
-- hold. A scope whose amount is null spends all, and its limits only report thresholds. refused is null, or why nothing was written.
--
-- Thresholds on spending alone are judged twice: first for all units, so that nothing is written if the caller does not report. Then for the covered
-- units, after the excess.
create function metered.capture_holds(named metered.hold_ids, used metered.used_units[],
    terms metered.capture_terms, ahead interval, wait_ms int, origin metered.origin, channel text, raising boolean,
    out refused json, out holds json[], out crossed jsonb)
language plpgsql volatile
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set plan_cache_mode = force_generic_plan
as $$
declare
    locked   record;
    own      text;
    line     record;
    asked    metered.used_units;
    crossing record;
    tip      metered.ledger;
    whole    boolean := used is null or (used[1]).amount is null;
    take     bigint;
    covered  bigint;
    spent    metered.charge_limit[];
    takes    metered.new_charge[];  -- covered units of scopes with such thresholds
    watched  text[];                -- these
    scopes   text[];                -- of used
    units    bigint[];
    excess   metered.new_charge[];
    beyond   record;                -- the excess as it was charged
    detail   jsonb;
    lines    json[];
    which    int;
    row_now  metered.holds;
    hold     json;
    ended    boolean := false;      -- lines that are due before a minimum that is
    unused   text;
    marked   boolean;
begin
    if greatest(octet_length(named.tenant), octet_length(named.holder), octet_length(terms.policy), octet_length(terms.entity), octet_length(origin.tenant), octet_length(origin.operation)) > 255
        or array_lower(named.ids, 1) <> 1
        or array_ndims(named.ids) <> 1
        or array_position(named.ids, null) is not null
        or cardinality(named.ids) > 100
        or pg_column_size(named.ids) > 255 and not metered._fits(named.ids, 255)
        or array_lower(named.issued, 1) <> 1
        or array_ndims(named.issued) <> 1
        or cardinality(named.issued) > 100
        or array_lower(used, 1) <> 1
        or array_ndims(used) <> 1
        or array_position(used, null) is not null
        or cardinality(used) > 64
        or pg_column_size(used) > 1400 and not metered._fits(used)
        or wait_ms > 3600000
        or pg_column_size(origin.note) > 8196
        or pg_column_compression(origin.note) is not null and octet_length(origin.note::text) > 8192
        or octet_length(channel) > 64 then
        raise exception 'out of bounds: an argument of capture_holds' using errcode = '22023';
    end if;
    if (terms.closing and terms.policy in ('refuse', 'fit', 'upto', 'even', 'allow')
        and (used is null or cardinality(named.ids) = 1) or not terms.closing and used is not null) is not true then
        perform metered._require(false, 'terms');
    end if;
    locked := metered._lock_holds(named, 'h', wait_ms);
    if locked.status is not null then
        refused := metered._refuse_hold(raising, json_build_object('status', locked.status, 'id', locked.failed,
            'state', locked.stands, 'hold', metered.hold_json(locked.failed_no, locked.clk)));
        return;
    end if;
    if used is not null then
        foreach asked in array used loop
            if (whole and asked.amount is null or not whole and asked.amount between 0 and 9007199254740992) is not true
                or asked.scope = any (scopes) then
                perform metered._require(false, 'used');
            end if;
            scopes := scopes || asked.scope::text;
            units := units || asked.amount::bigint;
        end loop;
        select h.claim into own from metered.holds h where h.no = locked.nos[1];
        if own is not null and not whole
            and terms.closing <> coalesce(units[array_position(scopes, own)] > 0, false) then
            refused := metered._refuse_hold(raising, json_build_object(
                'status', case when terms.closing then 'unconfirmed' else 'claim' end,
                'id', named.ids[1], 'scope', own));
            return;
        end if;
        foreach asked in array used loop
            select y.open into line from metered.hold_lines y
            where y.hold = locked.nos[1] and y.scope = asked.scope;
            if line.open is null then
                refused := metered._refuse_hold(raising, json_build_object('status', 'line', 'id', named.ids[1],
                    'scope', asked.scope));
                return;
            elsif asked.amount > line.open and terms.policy = 'refuse' then
                refused := metered._refuse_hold(raising, json_build_object('status', 'excess', 'id', named.ids[1],
                    'scope', asked.scope, 'requested', asked.amount, 'open', line.open));
                return;
            elsif asked.amount > line.open then
                excess := excess || row(asked.scope, null, asked.amount - line.open, 0,
                    asked.limits, origin.note, null, null, null)::metered.new_charge;
            end if;
            covered := least(asked.amount, line.open);
            spent := case when cardinality(asked.limits) > 0 and covered > 0
                then metered._spent_limits(asked.limits) end;
            if spent is not null then
                tip := metered._last_entry(asked.scope);
                crossing := metered._cross_captured(row(asked.scope, null, coalesce(asked.amount, covered) - covered,
                    -covered, spent, null, null, null, null)::metered.new_charge, tip, locked.clk, ahead);
                if crossing.silent then
                    if raising then
                        perform metered._refuse_unreported();
                    end if;
                    refused := json_build_object('status', 'refused',
                        'refused', json_build_array(json_build_object('crossing', true)),
                        'scopes', json_build_array(asked.scope), 'units', json_build_array(covered));
                    return;
                elsif crossing.crossings is not null
                    or nullif(coalesce(crossing.crossed, tip.crossed), '{}') is distinct from tip.crossed then
                    watched := watched || asked.scope;
                    takes := takes
                        || row(asked.scope, null, 0, -covered, spent, null, null, null, null)::metered.new_charge;
                end if;
            end if;
        end loop;
    end if;
    if excess is not null then
        beyond := metered._charge_excess(excess, scopes, units, terms.policy, ahead, wait_ms, origin,
            row(named.ids[1], null, locked.nos, locked.clk), raising);
        refused := beyond.refused;
        if refused is not null then
            return;
        end if;
        excess := beyond.excess;
        units := beyond.units;
        crossed := beyond.crossed;
    end if;
    for i in 1..cardinality(named.ids) loop
        detail := '[]';
        lines := '{}';
        for line in
            select y.scope, y.amount, y.captured, y.open, y.due, y.opened_seq, y.refunded as given_back, y.at_least,
                t.seq, t.at, t.spent, t.refunded, t.credited, t.held, t.epoch, t.next_due,
                t.anchor_at, t.anchor_spent, t.lots_end, t.crossed, t.tallied, t.others
            from metered.hold_lines y left join lateral (
                select * from metered.ledger e where e.scope = y.scope order by e.seq desc limit 1 for key share) t on true
            where y.hold = locked.nos[i] order by y.scope
        loop
            take := case when whole then line.open else coalesce(units[array_position(scopes, line.scope)], 0) end;
            covered := least(take, line.open);
            if covered > 0 or terms.closing and line.open > 0 then
                -- The latter was freed before the clock was set back.
                if line.seq is null or line.open > 0 and (line.due >= line.next_due) is not true then
                    perform metered._collided();
                end if;
                if line.next_due <= locked.clk and line.lots_end is null then
                    ended := ended or metered._end_minima(array(select distinct y.scope from metered.hold_lines y
                        where y.hold = any (locked.nos) and y.open <> 0
                          and (terms.closing or units[array_position(scopes, y.scope)] > 0)),
                        locked.nos[1], locked.clk, wait_ms) is not null;
                    tip := metered._entry_for_write(line.scope);
                elsif line.lots_end <= greatest(locked.clk, line.at)
                    or line.lots_end is not null and line.next_due <= locked.clk then
                    tip := metered._settle(metered._entry_for_write(line.scope), locked.clk,
                        metered._ends_per_call(), 0, wait_ms);
                elsif line.tallied then
                    tip := metered._entry_for_write(line.scope);
                end if;
                if tip.scope = line.scope and tip.seq >= line.seq then
                    select tip.seq, tip.at, tip.spent, tip.credited, tip.held, tip.next_due, tip.lots_end,
                        tip.crossed, tip.others
                    into line.seq, line.at, line.spent, line.credited, line.held, line.next_due, line.lots_end,
                        line.crossed, line.others;
                end if;
                if take > covered then   -- the excess is no charge beside the capture
                    line.others := coalesce(int8smaller(line.others, line.seq), 0) + 1;
                end if;
                if covered > 0 then
                    which := array_position(watched, line.scope);
                    if which is not null then
                        crossing := metered._cross_captured(takes[which], metered._last_entry(line.scope), locked.clk,
                            ahead);
                        if crossing.silent then
                            perform metered._collided();     -- the state that was judged first has changed
                        end if;
                        line.crossed := nullif(coalesce(crossing.crossed, line.crossed), '{}');
                        crossed := case when crossing.crossings is null then crossed
                            else coalesce(crossed, '[]')
                                || metered._crossed_at(crossing.crossings, array[line.seq + 1]) end;
                    end if;
                    insert into metered.ledger (seq, amount, at, spent, refunded, credited, held, epoch, kind, scope, next_due, hold, operation_tenant, operation, note, anchor_at, anchor_spent, lots_end, crossed, tallied, others)
                    values (line.seq + 1, covered, greatest(locked.clk, line.at), line.spent + covered, line.refunded, line.credited, line.held - covered, line.epoch, 'u', line.scope, metered._due_after(line.scope, line.seq, line.held - covered, line.next_due, locked.clk), named.ids[i], origin.tenant, origin.operation, origin.note, line.anchor_at, line.anchor_spent, line.lots_end, line.crossed, line.tallied, int8smaller(line.others, line.seq))
                    on conflict do nothing;
                    if not found then
                        perform metered._collided();
                    elsif line.lots_end is not null then
                        perform metered._capture_lots(metered._last_entry(line.scope), line.opened_seq, covered);
                    end if;
                    detail := detail || jsonb_build_object('scope', line.scope, 'amount', covered,
                        'seq', line.seq + 1, 'at', greatest(locked.clk, line.at));
                end if;
                if terms.closing and covered < line.open then
                    insert into metered.ledger (seq, amount, at, spent, refunded, credited, held, epoch, kind, scope, next_due, hold, operation_tenant, operation, note, anchor_at, anchor_spent, lots_end, crossed, tallied, others)
                    values (line.seq + case when covered > 0 then 2 else 1 end, line.open - covered, greatest(locked.clk, line.at), line.spent + covered, line.refunded, line.credited, line.held - line.open, line.epoch, 'l', line.scope, metered._due_after(line.scope, line.seq, line.held - line.open, line.next_due, locked.clk), named.ids[i], origin.tenant, origin.operation, origin.note, line.anchor_at, line.anchor_spent, line.lots_end, line.crossed, line.tallied, coalesce(int8smaller(line.others, line.seq), 0) + 1)
                    on conflict do nothing;
                    if not found then
                        perform metered._collided();
                    elsif line.lots_end is not null then
                        perform metered._free_lots(metered._entry_for_write(line.scope), array[line.opened_seq]);
                    end if;
                end if;
                marked := metered._mark_freed(line.scope);
            end if;
            if take > covered then
                which := (select x.n from unnest(excess) with ordinality
                    x(scope, key, amount, held, limits, note, must_exist, lease, lease_offset, n)
                    where x.scope = line.scope);
                detail := detail || jsonb_build_object('scope', line.scope, 'amount', take - covered,
                    'seq', beyond.seqs[which], 'at', beyond.ats[which], 'excess', true);
            end if;
            lines := lines || metered._line_json(line.scope, line.amount, line.captured + take,
                case when terms.closing then 0 else line.open - covered end, line.given_back, line.at_least);
            if take > 0 or terms.closing and line.open > 0 then
                update metered.hold_lines y set captured = y.captured + take,
                    open = case when terms.closing then 0 else y.open - covered end
                where y.hold = locked.nos[i] and y.scope = line.scope;
            end if;
        end loop;
        update metered.holds y set version = y.version + 1, entity = coalesce(terms.entity, y.entity),
            state = case when terms.closing then 'c' else 'h' end::"char",
            ended_at = case when terms.closing then locked.clk end, pending = not terms.closing
        where y.no = locked.nos[i] returning y.* into row_now;
        hold := metered._hold_as_json(row_now, array_to_json(lines), locked.clk, null);
        holds[i] := hold;
        insert into metered.hold_events (hold, at, version, kind, entity, detail, note, operation_tenant, operation)
        values (locked.nos[i], locked.clk, row_now.version, case when terms.closing then 'c' else 'p' end, terms.entity,
            detail, origin.note, origin.tenant, origin.operation);
        if channel is not null then
            perform metered._announce(channel, named.tenant, named.ids[i], row_now.version,
                case when terms.closing then 'captured' else 'captured_part' end);
        end if;
        unused := case when origin.operation is not null then metered._remember_hold(hold) end;
    end loop;
end
$$;

-- Charges what a capture takes beyond the held units of its lines, by its policy, and before it takes these:
-- held units and units spent of them count the same. It returns what was charged (excess, seqs, ats), the units
-- of each scope that the capture takes then, or why the policy refuses.
create function metered._charge_excess(inout excess metered.new_charge[], scopes text[], inout units bigint[],
    policy text, ahead interval, wait_ms int, origin metered.origin, terms metered.hold_terms, raising boolean,
    out seqs bigint[], out ats timestamptz[], out crossed jsonb, out refused json)
language plpgsql volatile
as $$
declare
    posted  record;
    fitting metered.new_charge[];
    covered bigint;
begin
    while excess is not null loop
        if policy = 'allow' then
            posted := metered._charge_anyway(excess, ahead, wait_ms, origin, terms);
        else
            posted := metered._write_charges(excess, ahead, wait_ms, origin, 'answer', terms, false);
        end if;
        seqs := posted.seqs;
        ats := posted.ats;
        crossed := posted.crossed;
        exit when posted.refused is null;
        if posted.refused -> 0 ? 'crossing' and raising then
            perform metered._refuse_unreported();
        end if;
        fitting := case when policy in ('upto', 'even') and not posted.refused -> 0 ? 'crossing'
            then metered._as_far_as_admitted(excess, posted.refused, policy = 'even') else excess end;
        if fitting = excess then
            refused := metered._refuse_hold(raising, json_build_object('status', 'refused', 'refused', posted.refused,
                'scopes', (select json_agg(e.scope) from unnest(excess) e),
                'units', (select json_agg(e.amount) from unnest(excess) e)));
            return;
        end if;
        excess := fitting;
    end loop;
    if policy in ('upto', 'even') then
        for which in 1..cardinality(scopes) loop
            select y.open into covered from metered.hold_lines y where y.hold = terms.nos[1] and y.scope = scopes[which];
            units[which] := least(units[which],
                covered + coalesce((select e.amount from unnest(excess) e where e.scope = scopes[which]), 0));
        end loop;
    end if;
end
$$;

-- Releases holds, all or none.
create function metered.release_holds(named metered.hold_ids, wait_ms int, origin metered.origin, channel text, raising boolean,
    out refused json, out holds json[])
language plpgsql volatile
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set plan_cache_mode = force_generic_plan
as $$
declare
    locked  record;
    row_now metered.holds;
    hold    json;
    unused  text;
begin
    if greatest(octet_length(named.tenant), octet_length(named.holder), octet_length(origin.tenant), octet_length(origin.operation)) > 255
        or array_lower(named.ids, 1) <> 1
        or array_ndims(named.ids) <> 1
        or array_position(named.ids, null) is not null
        or cardinality(named.ids) > 100
        or pg_column_size(named.ids) > 255 and not metered._fits(named.ids, 255)
        or array_lower(named.issued, 1) <> 1
        or array_ndims(named.issued) <> 1
        or cardinality(named.issued) > 100
        or wait_ms > 3600000
        or pg_column_size(origin.note) > 8196
        or pg_column_compression(origin.note) is not null and octet_length(origin.note::text) > 8192
        or octet_length(channel) > 64 then
        raise exception 'out of bounds: an argument of release_holds' using errcode = '22023';
    end if;
    locked := metered._lock_holds(named, 'h', wait_ms);
    if locked.status is not null then
        refused := metered._refuse_hold(raising, json_build_object('status', locked.status, 'id', locked.failed, 'state', locked.stands,
            'hold', metered.hold_json(locked.failed_no, locked.clk)));
        return;
    end if;
    perform metered._release_lines(locked.nos, null, 'l', locked.clk, case when cardinality(named.ids) = 1 then named.ids[1] end, origin);
    for i in 1..cardinality(named.ids) loop
        update metered.holds y set version = y.version + 1, state = 'r', ended_at = locked.clk, pending = false
        where y.no = locked.nos[i] returning y.* into row_now;
        select json_agg(metered._line_json(l.scope, l.amount, l.captured, 0, l.refunded, l.at_least) order by l.scope) into hold
        from metered.hold_lines l where l.hold = locked.nos[i];
        hold := metered._hold_as_json(row_now, hold, locked.clk, origin.note ->> 'reason');
        holds[i] := hold;
        insert into metered.hold_events (hold, at, version, kind, note, operation_tenant, operation)
        values (locked.nos[i], locked.clk, row_now.version, 'r', origin.note, origin.tenant, origin.operation);
        if channel is not null then
            perform metered._announce(channel, named.tenant, named.ids[i], row_now.version, 'released');
        end if;
        unused := case when origin.operation is not null then metered._remember_hold(hold) end;
    end loop;
end
$$;

-- Extends holds, all or none: each deadline by "by", no deadline past its ceiling, nor so far that JSON has no such year.
create function metered.extend_holds(named metered.hold_ids, by interval, wait_ms int, origin metered.origin,
    channel text, raising boolean,
    out refused json, out holds json[])
language plpgsql volatile
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set plan_cache_mode = force_generic_plan
as $$
declare
    locked    record;
    this_hold record;
    deadlines timestamptz[];    -- the new ones
    dues      timestamptz[];
    ends      timestamptz;         -- of one: Citus 13 crashes over an element of an array in a SET
    due_at    timestamptz;
    unused    text;
begin
    if greatest(octet_length(named.tenant), octet_length(named.holder), octet_length(origin.tenant), octet_length(origin.operation)) > 255
        or array_lower(named.ids, 1) <> 1
        or array_ndims(named.ids) <> 1
        or array_position(named.ids, null) is not null
        or cardinality(named.ids) > 100
        or pg_column_size(named.ids) > 255 and not metered._fits(named.ids, 255)
        or array_lower(named.issued, 1) <> 1
        or array_ndims(named.issued) <> 1
        or cardinality(named.issued) > 100
        or wait_ms > 3600000
        or pg_column_size(origin.note) > 8196
        or pg_column_compression(origin.note) is not null and octet_length(origin.note::text) > 8192
        or octet_length(channel) > 64 then
        raise exception 'out of bounds: an argument of extend_holds' using errcode = '22023';
    end if;
    if (by > interval '0' and by <= interval '3660 days') is not true then
        perform metered._require(false, 'by');
    end if;
    locked := metered._lock_holds(named, 'h', wait_ms);
    if locked.status is not null then
        refused := metered._refuse_hold(raising, json_build_object('status', locked.status, 'id', locked.failed, 'state', locked.stands,
            'hold', metered.hold_json(locked.failed_no, locked.clk)));
        return;
    end if;
    for i in 1..cardinality(named.ids) loop
        select y.deadline, y.due, least(y.ceiling, '9980-01-01 00:00:00+00') as ceiling into this_hold from metered.holds y where y.no = locked.nos[i];
        if this_hold.deadline <= locked.clk then     -- in its grace, which is for captures
            refused := metered._refuse_hold(raising, json_build_object('status', 'state', 'id', named.ids[i], 'state', 'x',
                'hold', metered.hold_json(locked.nos[i], locked.clk)));
        elsif this_hold.deadline + by <= this_hold.deadline or this_hold.due + by < this_hold.deadline + by then    -- a month can be shorter than 30 days
            perform metered._require(false, 'by');
        elsif this_hold.deadline + by > this_hold.ceiling then
            refused := metered._refuse_hold(raising, json_build_object('status', 'ceiling', 'id', named.ids[i],
                'left_us', (extract(epoch from this_hold.ceiling - this_hold.deadline) * 1000000)::bigint));
        end if;
        if refused is not null then
            return;
        end if;
        deadlines[i] := this_hold.deadline + by;
        dues[i] := this_hold.due + by;
    end loop;
    perform metered._collided() from metered.hold_lines l   -- freed before the clock was set back
    where l.hold = any (locked.nos) and l.open <> 0 and (l.due >= (
        select t.next_due from metered.ledger t where t.scope = l.scope order by t.seq desc limit 1)) is not true;
    for i in 1..cardinality(named.ids) loop
        ends := deadlines[i];
        due_at := dues[i];
        update metered.holds y set version = y.version + 1, deadline = ends, due = due_at
        where y.no = locked.nos[i] returning y.version, y.deadline, y.due into this_hold;
        update metered.hold_lines l set due = this_hold.due where l.hold = locked.nos[i];
        insert into metered.hold_events (hold, at, deadline, version, kind, note, operation_tenant, operation)
        values (locked.nos[i], locked.clk, this_hold.deadline, this_hold.version, 'e', origin.note, origin.tenant, origin.operation);
        if channel is not null then
            perform metered._announce(channel, named.tenant, named.ids[i], this_hold.version, 'extended');
        end if;
        holds[i] := metered.hold_json(locked.nos[i], locked.clk);
        unused := case when origin.operation is not null then metered._remember_hold(holds[i]) end;
    end loop;
end
$$;

-- Refunds of captured units: in full or in part, and together with the release of held ones.

-- Gives back the units that captured holds spent, all or none, as refunds of their charges: all units that
-- are left (used is null), or so many units of the scopes of one hold. skip_purged leaves out
-- purged charges, but refuses for a claim's own unit, which would stay taken. refused is as _lock_holds
-- has it, or returned (all was given back before), purged, left (fewer captured units are
-- left) or claim (a claim's own unit is given back with all the rest, or not at all).
create function metered.return_holds(named metered.hold_ids, used metered.used_units[], skip_purged boolean, wait_ms int,
    origin metered.origin, channel text, raising boolean,
    out refused json, out holds json[])
language plpgsql volatile
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set plan_cache_mode = force_generic_plan
as $$
declare
    locked record;
    unused text;
begin
    if greatest(octet_length(named.tenant), octet_length(named.holder), octet_length(origin.tenant), octet_length(origin.operation)) > 255
        or array_lower(named.ids, 1) <> 1
        or array_ndims(named.ids) <> 1
        or array_position(named.ids, null) is not null
        or cardinality(named.ids) > 100
        or pg_column_size(named.ids) > 255 and not metered._fits(named.ids, 255)
        or array_lower(named.issued, 1) <> 1
        or array_ndims(named.issued) <> 1
        or cardinality(named.issued) > 100
        or array_lower(used, 1) <> 1
        or array_ndims(used) <> 1
        or array_position(used, null) is not null
        or cardinality(used) > 64
        or pg_column_size(used) > 1400 and not metered._fits(used)
        or wait_ms > 3600000
        or pg_column_size(origin.note) > 8196
        or pg_column_compression(origin.note) is not null and octet_length(origin.note::text) > 8192
        or octet_length(channel) > 64 then
        raise exception 'out of bounds: an argument of return_holds' using errcode = '22023';
    end if;
    perform metered._require(skip_purged is not null and (used is null or cardinality(named.ids) = 1 and cardinality(used) > 0), 'used');
    locked := metered._lock_holds(named, 'c', wait_ms);
    if locked.status is null and exists (select from metered.holds h where h.no = any (locked.nos) and h.returned) then
        select 'returned', h.id, h.no into locked.status, locked.failed, locked.failed_no
        from metered.holds h where h.no = any (locked.nos) and h.returned order by h.no limit 1;
    end if;
    if locked.status is not null then
        refused := metered._refuse_hold(raising, json_build_object('status', locked.status, 'id', locked.failed, 'state', locked.stands,
            'hold', metered.hold_json(locked.failed_no, locked.clk)));
        return;
    end if;
    -- A refusal after the first refund takes that back, too. By a code that does not end in
    -- 000: such a one would catch its whole class, and with it the errors of _refuse_hold.
    begin
        for i in 1..cardinality(named.ids) loop
            refused := metered._refund_hold(locked.nos[i], named.ids[i], used, skip_purged, locked.clk, wait_ms, origin);
            if refused is not null then
                refused := metered._refuse_hold(raising, refused);
                raise exception using errcode = 'MT100';
            end if;
            holds[i] := metered.hold_json(locked.nos[i], locked.clk);
            if channel is not null then
                -- Not out of the JSON, in which the caller's may be that no operator reads.
                perform metered._announce(channel, h.tenant, h.id, h.version, case when h.returned then 'returned' else 'returned_part' end)
                from metered.holds h where h.no = locked.nos[i];
            end if;
            unused := case when origin.operation is not null then metered._remember_hold(holds[i]) end;
        end loop;
    exception when sqlstate 'MT100' then
        holds := null;
    end;
end
$$;

-- Gives back the units that one captured hold spent: see return_holds. Its scopes and its row are locked.
create function metered._refund_hold(of_no bigint, of_id text, used metered.used_units[], skip_purged boolean,
    clk timestamptz, wait_ms int, origin metered.origin) returns json
language plpgsql volatile
as $$
declare
    entry        record;
    asked        metered.used_units;
    own          text;
    wanted       jsonb := '{}';       -- by scope: units still to be given back
    want         bigint;
    left_over    bigint;
    answer       text;
    given        jsonb := '[]';
    kept         jsonb;
    whole        boolean := true;
    own_returned boolean := false;
    new_version  int;
begin
    select h.claim into own from metered.holds h where h.no = of_no;
    foreach asked in array coalesce(used, '{}') loop
        perform metered._require(asked.amount between 1 and 9007199254740992 and not wanted ? asked.scope, 'used');
        wanted := wanted || jsonb_build_object(asked.scope, asked.amount);
    end loop;
    for entry in select d.scope, d.amount, d.seq, d.at, l.key, (
                 -- The number in a scope that was forgotten may be another's by now. Not
                 -- EXISTS, which Postgres 18 answers from a hash of the whole ledger.
                 select c.seq from metered.ledger c where c.scope = d.scope and c.seq = d.seq and c.at = d.at and c.hold = of_id
             ) is not null as there
             from metered.hold_events y, lateral jsonb_to_recordset(y.detail) d(scope text, amount bigint, seq bigint, at timestamptz),
                  lateral (select z.key from metered.hold_lines z where z.hold = y.hold and z.scope = d.scope) l
             where y.hold = of_no and y.kind in ('p', 'c') order by d.scope, d.seq loop
        -- A purge takes the sum of refunds, and not the history.
        left_over := entry.amount - greatest(
            coalesce((select r.amount from metered.refund_sum r where r.scope = entry.scope and r.level = 0 and r.block = entry.seq), 0),
            coalesce((select sum(x.amount) from metered.hold_events y, lateral jsonb_to_recordset(y.detail) x(scope text, amount bigint, seq bigint)
                where y.hold = of_no and y.kind = 'g' and x.scope = entry.scope and x.seq = entry.seq), 0));
        continue when left_over <= 0;
        want := case when used is null then left_over else least(left_over, coalesce((wanted ->> entry.scope)::bigint, 0)) end;
        answer := case when not entry.there then 'purged' when want = 0 then 'ok' else
            (metered.refund(entry.scope, entry.key, entry.seq, want, wait_ms, origin, false)).status end;
        if answer = 'ok' then
            whole := whole and want = left_over;
            own_returned := own_returned or entry.scope = own and want > 0;
            if want > 0 then
                given := given || jsonb_build_object('scope', entry.scope, 'amount', want, 'seq', entry.seq, 'at', entry.at);
                wanted := wanted || jsonb_build_object(entry.scope, coalesce((wanted ->> entry.scope)::bigint, want) - want);
            end if;
        elsif answer = 'purged' and (used is not null or skip_purged and entry.scope is distinct from own) then
            whole := whole and used is null;
            kept := coalesce(kept, '[]') || jsonb_build_object('scope', entry.scope, 'amount', left_over, 'seq', entry.seq, 'at', entry.at);
        else
            return json_build_object('status', answer, 'id', of_id, 'scope', entry.scope);
        end if;
    end loop;
    foreach asked in array coalesce(used, '{}') loop
        if (wanted ->> asked.scope)::bigint > 0 then
            return json_build_object('status', 'left', 'id', of_id, 'scope', asked.scope, 'requested', asked.amount,
                'open', asked.amount - (wanted ->> asked.scope)::bigint);
        end if;
    end loop;
    if own_returned and not whole then
        return json_build_object('status', 'claim_part', 'id', of_id, 'scope', own);
    end if;
    update metered.hold_lines l set refunded = case
        when whole then greatest(l.refunded,
            l.captured - coalesce((select sum(x.amount) from jsonb_to_recordset(kept) x(scope text, amount bigint) where x.scope = l.scope), 0))
        else l.refunded + coalesce((select sum(x.amount) from jsonb_to_recordset(given) x(scope text, amount bigint) where x.scope = l.scope), 0) end
    where l.hold = of_no;
    update metered.holds h set version = h.version + 1, returned = whole where h.no = of_no returning h.version into new_version;
    insert into metered.hold_events (hold, at, version, kind, detail, note, operation_tenant, operation)
    values (of_no, clk, new_version, case when whole then 'b' else 'g' end, case when whole then kept else given end,
        origin.note, origin.tenant, origin.operation);
    return null;
end
$$;

-- Releases holds, all or none: those that are held, and those that were captured, whose spending is
-- given back as return_holds does.
create function metered.release_captured(named metered.hold_ids, wait_ms int, origin metered.origin, channel text, raising boolean,
    out refused json, out holds json[])
language plpgsql volatile
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set plan_cache_mode = force_generic_plan
as $$
declare
    locked  record;
    one     metered.hold_ids;
    outcome record;
begin
    if greatest(octet_length(named.tenant), octet_length(named.holder), octet_length(origin.tenant), octet_length(origin.operation)) > 255
        or array_lower(named.ids, 1) <> 1
        or array_ndims(named.ids) <> 1
        or array_position(named.ids, null) is not null
        or cardinality(named.ids) > 100
        or pg_column_size(named.ids) > 255 and not metered._fits(named.ids, 255)
        or array_lower(named.issued, 1) <> 1
        or array_ndims(named.issued) <> 1
        or cardinality(named.issued) > 100
        or wait_ms > 3600000
        or pg_column_size(origin.note) > 8196
        or pg_column_compression(origin.note) is not null and octet_length(origin.note::text) > 8192
        or octet_length(channel) > 64 then
        raise exception 'out of bounds: an argument of release_captured' using errcode = '22023';
    end if;
    locked := metered._lock_holds(named, '*', wait_ms);
    if locked.status is not null then
        refused := metered._refuse_hold(raising, json_build_object('status', locked.status, 'id', locked.failed, 'state', locked.stands,
            'hold', metered.hold_json(locked.failed_no, locked.clk)));
        return;
    end if;
    begin
        for i in 1..cardinality(named.ids) loop     -- all is locked by now, whatever their order
            one := row(named.tenant, array[named.ids[i]], array[named.issued[i]], named.holder);
            if (select h.state from metered.holds h where h.no = locked.nos[i]) = 'c' then
                outcome := metered.return_holds(one, null, false, wait_ms, origin, channel, false);
            else
                outcome := metered.release_holds(one, wait_ms, origin, channel, false);
            end if;
            if outcome.refused is not null then
                refused := metered._refuse_hold(raising, outcome.refused);
                raise exception using errcode = 'MT100';
            end if;
            holds := holds || outcome.holds;
        end loop;
    exception when sqlstate 'MT100' then
        holds := null;
    end;
end
$$;

-- Mints tokens, all or none, in the order of their digests, so that two calls
-- that mint the same ones do not deadlock. Status 'exists': one of the digests
-- is there already, and nothing was written. That is an answer and not a unique
-- violation, which would end the caller's transaction. Where a snapshot is too
-- old to see the other token, ON CONFLICT raises 40001.
create function metered.mint_tokens(minted metered.new_token[], wait_ms int,
    out status text, out minted_at timestamptz)
language plpgsql volatile
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set plan_cache_mode = force_generic_plan
as $$
declare
    before  text := metered._bound_lock_wait(wait_ms);
    fresh   bytea[];
    one     metered.new_token;
begin
    if array_lower(minted, 1) <> 1
        or array_ndims(minted) <> 1
        or cardinality(minted) > 1000
        or pg_column_size(minted) > 1400 and not metered._fits(minted)
        or wait_ms > 3600000 then
        raise exception 'out of bounds: an argument of mint_tokens' using errcode = '22023';
    end if;
    foreach one in array minted loop
        if metered._token_fits(one) is not true or cardinality(minted) > 1000 then
            perform metered._require(false, 'tokens');
        end if;
    end loop;
    mint_tokens.minted_at := metered.clock();
    with inserted as (
        insert into metered.tokens (digest, minted_at, expires_at, uses, purpose, subject, payload)
        select m.digest, mint_tokens.minted_at, mint_tokens.minted_at + m.ttl, m.uses, m.purpose, m.subject, m.payload
        from unnest(minted) m
        order by m.digest
        on conflict do nothing
        returning tokens.digest)
    select array_agg(i.digest) into fresh from inserted i;
    if coalesce(cardinality(fresh), 0) < cardinality(minted) then
        delete from metered.tokens t where t.digest = any (fresh);
        status := 'exists';
    else
        status := 'ok';
    end if;
    before := metered._unbound_lock_wait(before);
end
$$;

-- Whether a token is within its bounds. The table catches nulls. Inlined wherever it stands.
create function metered._token_fits(m metered.new_token) returns boolean
language sql stable
as $$
    select m.ttl between interval '1 s' and interval '9600:00:00' and m.uses between 1 and 1000000
        and octet_length(m.purpose) between 1 and 128 and octet_length(m.subject) between 1 and 512
        and (m.payload is null or octet_length(m.payload::text) <= 8192)
$$;

-- Looks at a token and changes nothing. Status is 'ok', or why it cannot be
-- consumed: 'unknown', 'purpose', 'subject', 'revoked', 'used', 'expired'. The
-- other columns are null unless it is 'ok', and consumed_at always is.
create function metered.inspect_token(token_digest bytea, for_purpose text, for_subject text,
    out status text, out payload json, out uses_left int,
    out minted_at timestamptz, out expires_at timestamptz, out consumed_at timestamptz)
language plpgsql volatile
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set plan_cache_mode = force_generic_plan
as $$
declare
    now_at timestamptz := metered.clock();
    tok    metered.tokens;
begin
    if octet_length(token_digest) > 33
        or octet_length(for_purpose) > 128
        or octet_length(for_subject) > 512 then
        raise exception 'out of bounds: an argument of inspect_token' using errcode = '22023';
    end if;
    select * into tok from metered.tokens t where t.digest = token_digest;
    status := case
        when tok.digest is null then 'unknown'
        when tok.purpose <> for_purpose then 'purpose'
        when tok.subject <> for_subject then 'subject'
        when tok.revoked then 'revoked'
        when tok.used = tok.uses then 'used'
        when tok.ended_at is not null or tok.expires_at <= now_at then 'expired'
        else 'ok' end;
    if status = 'ok' then
        payload := tok.payload;
        uses_left := tok.uses - tok.used;
        minted_at := tok.minted_at;
        expires_at := tok.expires_at;
    end if;
end
$$;

-- Takes one use of a token, or says why not, with inspect_token's columns.
-- uses_left is the number of uses after this one. A refusal changes nothing. The time
-- that counts is the clock's as the call begins.
--
-- The reason is looked up only after the update found nothing. If that finds the
-- token in order, it was minted between the two statements: the update runs again.
create function metered.consume_token(token_digest bytea, for_purpose text, for_subject text,
    wait_ms int default null,
    out status text, out payload json, out uses_left int,
    out minted_at timestamptz, out expires_at timestamptz, out consumed_at timestamptz)
language plpgsql volatile
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set plan_cache_mode = force_generic_plan
as $$
declare
    now_at  timestamptz := metered.clock();
    before  text := current_setting('lock_timeout');
    bounds  boolean := wait_ms is not null and (before = '0' or before::interval > wait_ms * interval '1 ms');
    unused  text;
begin
    if octet_length(token_digest) > 33
        or octet_length(for_purpose) > 128
        or octet_length(for_subject) > 512
        or wait_ms > 3600000 then
        raise exception 'out of bounds: an argument of consume_token' using errcode = '22023';
    end if;
    if bounds then  -- _bound_lock_wait, without the call
        unused := set_config('lock_timeout', wait_ms::text, true);
    end if;
    for attempt in 1..3 loop
        update metered.tokens t
        set used = t.used + 1,
            ended_at = case when t.used + 1 = t.uses then now_at end
        -- "is true" keeps the planner from the index of open tokens.
        where t.digest = token_digest
          and (t.purpose = for_purpose and t.subject = for_subject and t.ended_at is null and t.expires_at > now_at) is true
        returning 'ok', t.payload, t.uses - t.used, t.minted_at, t.expires_at, now_at
        into status, payload, uses_left, minted_at, expires_at, consumed_at;
        if not found then
            status := (metered.inspect_token(token_digest, for_purpose, for_subject)).status;
            continue when status = 'ok';
            if status = 'unknown' and metered._one_snapshot() then
                perform metered._missing_token(token_digest);
            end if;
        end if;
        if bounds then
            unused := set_config('lock_timeout', before, true);
        end if;
        return;
    end loop;
    raise exception 'could not serialize access: the token keeps changing' using errcode = '40001';
end
$$;

-- Fails with 40001 where a token was minted since this snapshot: it is not unknown. Its insertion
-- meets the other one. The block takes it back.
create function metered._missing_token(token_digest bytea) returns void
language plpgsql volatile
as $$
begin
    insert into metered.tokens (digest, minted_at, expires_at, uses, purpose, subject)
    values (token_digest, 'epoch', 'epoch', 1, '', '') on conflict do nothing;
    raise exception using errcode = 'MT100';
exception when sqlstate 'MT100' then
    null;
end
$$;

-- Revokes one token. False if there was nothing left to revoke.
create function metered.revoke_token(token_digest bytea, wait_ms int) returns boolean
language plpgsql volatile
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set plan_cache_mode = force_generic_plan
as $$
declare
    now_at  timestamptz := metered.clock();
    before  text := metered._bound_lock_wait(wait_ms);
    was     boolean;
begin
    if octet_length(token_digest) > 33
        or wait_ms > 3600000 then
        raise exception 'out of bounds: an argument of revoke_token' using errcode = '22023';
    end if;
    update metered.tokens t
    set revoked = true, ended_at = now_at
    where t.digest = token_digest and (t.ended_at is null and t.expires_at > now_at) is true;     -- as in consume_token
    was := found;
    before := metered._unbound_lock_wait(before);
    return was;
end
$$;

-- Ends every open token of a purpose and subject and returns how many of them
-- were still good. Rows are locked in the order of their digests.
create function metered.revoke_tokens(for_purpose text, for_subject text, wait_ms int) returns bigint
language plpgsql volatile
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set plan_cache_mode = force_generic_plan
as $$
declare
    now_at  timestamptz := metered.clock();
    before  text := metered._bound_lock_wait(wait_ms);
    digests bytea[];
    total   bigint;
begin
    if octet_length(for_purpose) > 128
        or octet_length(for_subject) > 512
        or wait_ms > 3600000 then
        raise exception 'out of bounds: an argument of revoke_tokens' using errcode = '22023';
    end if;
    -- Two statements, so that there is no join to plan, and an order that the key's index
    -- does not have, or all tokens would be read in it, if they were few when this was planned.
    select array_agg(o.digest) into digests from (
        select t.digest from metered.tokens t
        where t.purpose = for_purpose and t.subject = for_subject and t.ended_at is null
        order by t.digest || '' for no key update) o;
    with ended as (
        update metered.tokens t
        set revoked = t.expires_at > now_at, ended_at = least(now_at, t.expires_at)
        where t.digest = any (digests)
        returning t.revoked)
    select count(*) filter (where e.revoked) into total from ended e;
    before := metered._unbound_lock_wait(before);
    return total;
end
$$;

-- Revokes every token of a purpose and subject and mints another, under the
-- advisory lock of that key. Status 'exists' as with mint_tokens: nothing was written.
create function metered.replace_token(key bigint, token metered.new_token, wait_ms int,
    out status text, out minted_at timestamptz, out revoked bigint)
language plpgsql volatile
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set plan_cache_mode = force_generic_plan
as $$
declare
    before  text;
begin
    if octet_length(token.digest) > 33
        or octet_length(token.purpose) > 128
        or octet_length(token.subject) > 512
        or pg_column_size(token.payload) > 8196
        or pg_column_compression(token.payload) is not null and octet_length(token.payload::text) > 8192
        or token.uses > 1000000
        or wait_ms > 3600000 then
        raise exception 'out of bounds: an argument of replace_token' using errcode = '22023';
    end if;
    perform metered._require(metered._token_fits(token), 'token');
    perform metered._lock_keys(array[key], wait_ms);
    before := metered._bound_lock_wait(wait_ms);
    if exists (select from metered.tokens t where t.digest = token.digest) then
        status := 'exists';
    else
        revoked := metered.revoke_tokens(token.purpose, token.subject, wait_ms);
        minted_at := metered.clock();
        insert into metered.tokens (digest, minted_at, expires_at, uses, sole, purpose, subject, payload)
        values (token.digest, replace_token.minted_at, replace_token.minted_at + token.ttl,
                token.uses, true, token.purpose, token.subject, token.payload)
        on conflict do nothing;
        if not found then
            raise exception 'could not serialize access: the token was replaced meanwhile'
                using errcode = '40001';
        end if;
        status := 'ok';
    end if;
    before := metered._unbound_lock_wait(before);
end
$$;

-- Deletes up to max_rows tokens that ended, or expired, at cutoff or before, oldest
-- first, and skips what another purge is deleting. Never one that lives, whatever cutoff
-- is. after is the last of the batch before (null: from the beginning), so that no batch
-- reads again through the index entries that the one before it left dead.
create function metered.purge_tokens(after timestamptz, cutoff timestamptz, max_rows int,
    out deleted bigint, out last timestamptz)
language plpgsql volatile
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set plan_cache_mode = force_generic_plan
set enable_bitmapscan = off
set enable_sort = off
as $$
declare
    ended timestamptz := least(coalesce(cutoff, '-infinity'), metered.clock());
begin
    if max_rows > 10000 then
        raise exception 'out of bounds: an argument of purge_tokens' using errcode = '22023';
    end if;
    perform metered._require(max_rows between 1 and 10000, 'max_rows');
    with gone as (
        delete from metered.tokens t
        where t.digest = any (array(
            select d.digest from metered.tokens d
            where coalesce(d.ended_at, d.expires_at) >= coalesce(after, '-infinity')
              and coalesce(d.ended_at, d.expires_at) <= ended
            order by coalesce(d.ended_at, d.expires_at)
            limit max_rows for update skip locked))
        returning coalesce(t.ended_at, t.expires_at) as at)
    select count(*), max(g.at) into deleted, last from gone g;
end
$$;

-- Claims a key for job new_id, or tells which job it was claimed for. If another
-- transaction has claimed it and is still open, waits for that one to end, at
-- most wait_ms since the statement began (one statement may claim many keys, in
-- the order of queue and key). Then SQLSTATE 55P03. If the other one commits, a
-- claimant at REPEATABLE READ or above gets 40001, as it cannot see that row.
--
-- Inserts before it looks: looking for a key that is not there and then adding
-- it would make any two SERIALIZABLE claimants each other's conflict. So a
-- repeated key uses up a number of River's sequence, as River's own unique jobs
-- do.
create function metered.claim_job_key(of_queue text, of_key text, of_kind text, of_tenant text, of_digest bytea,
    new_id bigint, wait_ms int,
    out id bigint, out created boolean, out first_kind text, out first_tenant text, out first_digest bytea)
language plpgsql volatile
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set plan_cache_mode = force_generic_plan
as $$
declare
    before  text := current_setting('lock_timeout');
    left_ms int := wait_ms - (extract(epoch from clock_timestamp() - statement_timestamp()) * 1000)::int;
    unused  text;   -- set_config in an assignment is cheaper than in perform
begin
    if greatest(octet_length(of_queue), octet_length(of_key), octet_length(of_kind), octet_length(of_tenant)) > 255
        or octet_length(of_digest) > 33
        or wait_ms > 3600000 then
        raise exception 'out of bounds: an argument of claim_job_key' using errcode = '22023';
    end if;
    if before <> '0' then   -- the caller's own bound, where that is shorter
        left_ms := least(left_ms, extract(epoch from before::interval) * 1000);
    end if;
    unused := set_config('lock_timeout', greatest(1, left_ms)::text, true);
    loop
        insert into metered.job_keys (job_id, created_at, queue, key, kind, tenant, digest)
        values (new_id, metered.clock(), of_queue, of_key, of_kind, of_tenant, of_digest)
        on conflict (queue, key) do nothing;
        created := found;
        if created then
            id := new_id; first_kind := of_kind; first_tenant := of_tenant; first_digest := of_digest;
            exit;
        end if;
        select k.job_id, k.kind, k.tenant, k.digest into id, first_kind, first_tenant, first_digest
        from metered.job_keys k where k.queue = of_queue and k.key = of_key;
        exit when found;
        -- A purge took the key between the two statements: it is free now.
    end loop;
    unused := set_config('lock_timeout', before, true);
end
$$;

-- The record of a key, or no row.
create function metered.find_job_key(of_queue text, of_key text) returns setof metered.job_keys
language plpgsql stable
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set plan_cache_mode = force_generic_plan
as $$
begin
    if greatest(octet_length(of_queue), octet_length(of_key)) > 255 then
        raise exception 'out of bounds: an argument of find_job_key' using errcode = '22023';
    end if;
    return query select * from metered.job_keys k where k.queue = of_queue and k.key = of_key;
end
$$;

-- Forgets up to max_rows keys claimed before cutoff, oldest first, and passes over
-- those that another purge is at. after is the last of the batch before, as in
-- purge_tokens. Not for an application, which must not make an old key new.
create function metered.purge_job_keys(after timestamptz, cutoff timestamptz, max_rows int,
    out deleted bigint, out last timestamptz)
language plpgsql volatile
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set plan_cache_mode = force_generic_plan
set enable_bitmapscan = off
set enable_sort = off
as $$
begin
    if max_rows > 10000 then
        raise exception 'out of bounds: an argument of purge_job_keys' using errcode = '22023';
    end if;
    perform metered._require(max_rows between 1 and 10000, 'max_rows');
    cutoff := least(cutoff, metered.clock());
    with gone as (
        -- By row address, so that there is no join to plan: these rows are never
        -- updated, and locked here.
        delete from metered.job_keys d
        where d.ctid = any (array(
            select k.ctid from metered.job_keys k
            where k.created_at >= coalesce(after, '-infinity') and k.created_at < cutoff
            order by k.created_at limit max_rows
            for update skip locked))
        returning d.created_at
    )
    select count(*), max(g.created_at) into deleted, last from gone g;
end
$$;

-- Jobs that wait for budget. A job whose hold does not fit is parked: it is a row here, and River has no row of it, or between
-- attempts one that no worker takes. It waits in the line of the first scope that refused it. A transaction that frees units of a scope
-- marks the scope's line (_mark_freed). A releaser then places the holds of jobs that fit, in
-- order, and returns these jobs. The statement around it inserts them into river_job with its caller's privileges.

-- The channel on which releasers hear that a line is marked.
create function metered._parked_channel() returns text
language sql immutable
as $$
    select left(substr('metered/parked/metered', 16), 56) || '_parked'
$$;

-- Wakes the releasers, except in a statement from another node of Citus, which may be prepared: then NOTIFY is forbidden.
create function metered._wake_releasers() returns void
language plpgsql volatile
as $$
begin
    if not metered._sharded() or not starts_with(current_setting('application_name'), 'citus_internal') then
        perform pg_notify(metered._parked_channel(), '');
    end if;
end
$$;

-- Marks the line, if there is one, of a scope whose units were freed, and says whether it did. Whoever appends an entry that can let a
-- job in calls it: credits, refunds, releases, expiries, clock repairs and scheduled lots can, and so can a capture, whose units leave a
-- window sooner than its hold would fall due (a trigger of the ledger, whose condition is parsed from text at each insert, would cost
-- each charge a tenth). At READ COMMITTED this sees each line, since jobs are parked under the scope's lock. An older snapshot may miss a
-- line: then an insert collides with it, with 40001, and the block takes the insert back.
create function metered._mark_freed(of_scope text) returns boolean
language plpgsql volatile
as $$
begin
    if exists (select from metered.parked_scopes p where p.scope = of_scope and not (p.again and p.wake_at = '-infinity')) then
        update metered.parked_scopes p set wake_at = '-infinity', again = true where p.scope = of_scope;
        perform metered._wake_releasers();
        return true;
    elsif metered._one_snapshot() and not exists (select from metered.parked_scopes p where p.scope = of_scope) then
        begin
            insert into metered.parked_scopes (scope, key, wake_at, waiting) values (of_scope, 0, 'infinity', 0) on conflict do nothing;
            raise exception using errcode = 'MT100';
        exception when sqlstate 'MT100' then
            null;
        end;
    end if;
    return false;
end
$$;

-- The charge of a scope among those of a job.
create function metered._charge_of(of_scope text, charges metered.new_charge[]) returns metered.new_charge[]
language sql immutable
as $$
    select array(select row(c.*)::metered.new_charge from unnest(charges) c where c.scope = of_scope)
$$;

-- The class of a charge: where one does not fit, none of its class does that is as large. Credit for a use lets in those for this use alone.
-- Sessions of other styles give the same class, and _hold_text the same text.
create function metered._class_of(charge metered.new_charge) returns bigint
language sql immutable
set datestyle = 'ISO, MDY' set intervalstyle = postgres set timezone = 'UTC'
as $$
    select hashtextextended(row(charge.limits, charge.note ->> 'use', charge.must_exist)::text, 0)
$$;

-- The scope that refused, own or else the first, and how long from now it will refuse, or null if nobody knows. scope is null if neither time nor
-- credit ends the refusal: a scope is absent or closed, or (unless hopeful) the job wants more units than the limit has.
create function metered._refusing(charges metered.new_charge[], refused jsonb, own text, hopeful boolean,
    out scope text, out retry interval)
language plpgsql immutable
as $$
declare
    charge    metered.new_charge;
    lim       metered.charge_limit;
    refusal   jsonb;
    nth_limit int := 0;
    us        bigint;
    never     boolean := false;
begin
    foreach charge in array charges loop
        us := null;
        foreach lim in array charge.limits loop
            refusal := jsonb_path_query_first(refused, '$[*] ? (@.limit == $n)', jsonb_build_object('n', nth_limit));
            nth_limit := nth_limit + 1;
            continue when refusal is null;
            if not hopeful and charge.amount > lim.max and lim.win is distinct from interval '0' then
                scope := null;
                return;
            end if;
            never := never or (refusal ->> 'retry_us')::bigint < 0;
            us := greatest(coalesce(us, 0), (refusal ->> 'retry_us')::bigint);
        end loop;
        if us is not null and (scope is null or charge.scope = own) then
            scope := charge.scope;
            retry := case when not never then us * interval '1 microsecond' end;
        end if;
        never := false;
    end loop;
end
$$;

-- The turn of a job that joins a line: one round after the last job of its key (fair), and after the round that
-- is being released. So a key with one job waits for at most one round, however many jobs others have in the line.
create function metered._turn(of_scope text, of_priority int, of_fair text) returns bigint
language plpgsql volatile
as $$
begin
    return 1 + greatest(0,
        (select p.turns[of_priority] from metered.parked_scopes p where p.scope = of_scope),
        (select j.turn from metered.parked_jobs j where j.scope = of_scope and j.priority = of_priority and j.fair = of_fair
         order by j.turn desc limit 1));
end
$$;

-- When the next lot of a wallet begins, or infinity: no entry is written at that time. If one has begun and is not written yet, it
-- counts already, and the next is unknown: then a minute from now.
create function metered._lot_begins(of_scope text, clk timestamptz) returns timestamptz
language sql stable
as $$
    select coalesce((select case when y.starts_at > clk then y.starts_at else clk + interval '1 minute' end
        from metered.lots y where y.scope = of_scope and y.pending > 0 order by y.starts_at limit 1), 'infinity')
$$;

-- Counts a job in a line, and has releasers look at the line by wake, even if a look is under way that has passed the job's
-- place. The scope is locked. Releasers are woken if wake is earlier than the line's time.
create function metered._join_line(of_scope text, of_key bigint, wake timestamptz) returns void
language plpgsql volatile
as $$
declare
    before timestamptz := (select p.wake_at from metered.parked_scopes p where p.scope = of_scope);
begin
    wake := least(wake, metered._lot_begins(of_scope, metered.clock()));
    insert into metered.parked_scopes as p (scope, key, wake_at, again, waiting, since)
    values (of_scope, of_key, wake, wake = '-infinity', 1, metered.clock())
    on conflict (scope) do update set waiting = p.waiting + 1, wake_at = least(p.wake_at, excluded.wake_at),
        next_at = least(p.next_at, excluded.wake_at), again = p.again or excluded.again;
    if wake < coalesce(before, 'infinity') then
        perform metered._wake_releasers();
    end if;
end
$$;

-- Has releasers look at a line again, if there is one: a job that came from it leaves the line to which it went.
create function metered._look_again(of_scope text) returns void
language plpgsql volatile
as $$
begin
    if of_scope is not null then
        update metered.parked_scopes y set wake_at = '-infinity', again = true where y.scope = of_scope and not (y.again and y.wake_at = '-infinity');
    end if;
end
$$;

-- Takes a job out of its lines, whose scopes are locked.
create function metered._leave_line(of_job bigint) returns jsonb
language plpgsql volatile
as $$
declare
    gone metered.parked_jobs;
    said jsonb;
begin
    for gone in delete from metered.parked_jobs j where j.job_id = of_job returning j.* loop
        update metered.parked_scopes p set waiting = p.waiting - 1 where p.scope = gone.scope;
        delete from metered.parked_scopes p where p.scope = gone.scope and p.waiting = 0;
        perform metered._look_again(gone.passed);
        said := case when gone.lane = 0 then metered._parked_json(gone) else said end;
    end loop;
    return said;
end
$$;

-- A parked job as callers see it.
create function metered._parked_json(job metered.parked_jobs) returns jsonb
language sql stable
as $$
    select jsonb_build_object('job_id', job.job_id, 'queue', job.job ->> 'queue', 'kind', job.job ->> 'kind', 'key', coalesce(job.job -> 'metadata' ->> 'metered:key', ''),
        'tenant', job.tenant, 'fair', job.fair, 'priority', job.priority, 'scope', job.scope, 'amount', job.amount, 'parked_at', job.parked_at, 'drop_at', job.drop_at,
        'args', job.job -> 'args', 'not_before', job.not_before, 'hold', job.job -> 'metadata' ->> 'metered:hold', 'trouble', job.trouble)
$$;

-- Whether a job is one that River takes, and that the releaser can read: SQL would cast more than it does.
create function metered._is_job(job jsonb) returns boolean
language sql immutable
as $$
    select jsonb_typeof(job) = 'object' and jsonb_typeof(job -> 'args') is not null and jsonb_typeof(job -> 'metadata') = 'object'
        and jsonb_typeof(job -> 'kind') = 'string' and jsonb_typeof(job -> 'queue') = 'string' and jsonb_typeof(job -> 'job_id') = 'number'
        and jsonb_typeof(job -> 'priority') = 'number' and jsonb_typeof(job -> 'max_attempts') = 'number'
        and not jsonb_path_exists(job -> 'tags', 'strict $[*] ? (@.type() <> "string")', '{}', true)
        and char_length(job ->> 'kind') between 1 and 127 and char_length(job ->> 'queue') between 1 and 64
        and (job ->> 'priority')::int between 1 and 4 and (job ->> 'max_attempts')::int between 1 and 32767 and (job ->> 'job_id')::bigint > 0
        and jsonb_typeof(job -> 'tags') = 'array' and octet_length(coalesce(job ->> 'fair', '')) <= 255
        and job -> 'metadata' ->> 'metered:hold' ~ ('^job/' || (job ->> 'job_id') || '/[0-9a-f]{16}$')
        and octet_length(job ->> 'charges') <= 65536 and octet_length(job ->> 'hold') <= 131072
        and coalesce((job ->> 'most')::bigint > 0, true) and coalesce((job ->> 'wait_us')::bigint between 1 and 315576000000000, true)
        and coalesce((job ->> 'rest_us')::bigint between 0 and 315576000000000, true)
        and coalesce(octet_length(job -> 'burst' ->> 'charges') <= 65536 and octet_length(job -> 'burst' ->> 'hold') <= 131072, not job ? 'burst')
$$;

-- The keys of the scopes of a job's charges, of both choices. Conditions are no statements, which cost more: a job that fits is enqueued by few.
create function metered._keys_of_job(job jsonb) returns bigint[]
language plpgsql volatile
as $$
declare
    cs     metered.new_charge[] := (job ->> 'charges')::metered.new_charge[];
    charge metered.new_charge;
    keys   bigint[] := '{}';
begin
    if metered._is_job(job) is not true then
        perform metered._require(false, 'job');
    elsif (cardinality(cs) between 1 and 64 and metered._fits(cs)) is not true then
        perform metered._require(false, 'charges');
    end if;
    foreach charge in array cs loop
        if (metered._key_fits(charge.key, charge.scope) and charge.lease is null) is not true then
            perform metered._require(false, 'key');
        end if;
        keys := keys || charge.key;
    end loop;
    return case when job ? 'burst' then keys || metered._keys_of_job((job || (job -> 'burst')) - 'burst') else keys end;
end
$$;

-- The hold that a job asks for, with its id.
create function metered._hold_of_job(job jsonb) returns metered.new_hold
language plpgsql stable
as $$
declare
    hold metered.new_hold := (job ->> 'hold')::metered.new_hold;
begin
    hold.id := job -> 'metadata' ->> 'metered:hold';
    hold.holder := hold.id;
    hold.chosen := false;
    hold.claim := null;
    return hold;
end
$$;

-- A hold as parked_jobs has it: a session of another style reads it as it was written.
create function metered._hold_text(hold metered.new_hold) returns text
language sql immutable
set datestyle = 'ISO, MDY' set intervalstyle = postgres set timezone = 'UTC' set bytea_output = hex
as $$
    select hold::text
$$;

-- Holds the units of a job that starts, and charges the others: as place, also for a job that holds nothing. Then due is null.
create function metered._start_job(hold metered.new_hold, charges metered.new_charge[], ahead interval, wait_ms int, origin metered.origin, channel text,
    out started boolean, out refused jsonb, out due timestamptz)
language plpgsql volatile
as $$
declare
    start  record;
    charge metered.new_charge;
    held   boolean := false;
begin
    foreach charge in array charges loop
        held := held or charge.held > 0;
    end loop;
    if held then
        start := metered.place(hold, charges, ahead, wait_ms, origin, channel, false, false);
        due := start.deadline + hold.grace;
    else
        start := metered._write_charges(charges, ahead, wait_ms, origin, 'answer', null, false);
    end if;
    refused := start.refused;
    started := refused is null;
end
$$;

-- Enqueues jobs whose units are held until they end, all or none. status is started (the hold is placed, and the caller
-- inserts job), parked (until the units fit), refused (they never fit), or full (its line has most jobs).
-- With raising, the last two are SQLSTATE MT001 and MT013. A job that fits is parked too if others wait for one
-- of its scopes.
--
-- Each element of parking has River's columns of the job, with its job_id; the hold and the charges of place, as text; the key
-- of its turn (fair), the most jobs in its line (most), how long it waits (wait_us), and whether its limits may be raised (hopeful).
-- burst is another hold and its charges, for a job whose own do not fit: it starts with the first that fits, and waits in the lines of both.
create function metered.park_jobs(parking jsonb, ahead interval, wait_ms int, origin metered.origin, channel text, raising boolean)
returns table (nth int, status text, job jsonb, refused jsonb, scope text, retry_us bigint)
language plpgsql volatile
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set plan_cache_mode = force_generic_plan
as $$
declare
    parked    jsonb;
    hold      metered.new_hold;
    cs        metered.new_charge[];
    charge    metered.new_charge;
    started   record;
    refusing  record;
    no        jsonb;    -- a refusal
    busy      text;     -- a scope with a line
    clk       timestamptz;
    keys      bigint[] := '{}';
    most      bigint;
    waits     metered.parked_jobs[];
    waited    boolean;
    line_keys bigint[];
    wakes     timestamptz[];
begin
    if pg_column_size(parking) > 16777220
        or pg_column_compression(parking) is not null and octet_length(parking::text) > 16777216
        or wait_ms > 3600000
        or greatest(octet_length(origin.tenant), octet_length(origin.operation)) > 255
        or pg_column_size(origin.note) > 8196
        or pg_column_compression(origin.note) is not null and octet_length(origin.note::text) > 8192
        or octet_length(channel) > 64 then
        raise exception 'out of bounds: an argument of park_jobs' using errcode = '22023';
    end if;
    if (jsonb_typeof(parking) = 'array' and jsonb_array_length(parking) between 1 and 1000) is not true then
        perform metered._require(false, 'parking');
    end if;
    for i in 0..jsonb_array_length(parking) - 1 loop
        keys := keys || metered._keys_of_job(parking -> i);
    end loop;
    if cardinality(keys) > 1 then
        keys := array(select distinct k from unnest(keys) k order by k);
    end if;
    waited := metered._lock_keys(keys, wait_ms);
    for i in 1..jsonb_array_length(parking) loop
        nth := i;
        parked := parking -> i - 1;
        status := null; job := null; refused := null; scope := null; retry_us := null;
        waits := '{}'; line_keys := '{}'; wakes := '{}';
        loop
            cs := (parked ->> 'charges')::metered.new_charge[];
            hold := metered._hold_of_job(parked);
            busy := (select y.scope from unnest(cs) x, lateral (select z.scope from metered.parked_scopes z where z.scope = x.scope) y limit 1);
            if busy is null then
                started := metered._start_job(hold, cs, ahead, wait_ms, origin, channel);
                if started.started then
                    status := 'started'; job := parked;
                    exit;
                end if;
                no := started.refused;
            else
                no := (metered.check_charge(cs, ahead)).refused;
                if metered._one_snapshot() then
                    perform metered._refuse_stale(array(select metered._last_entry(x.scope) from unnest(cs) x));
                end if;
            end if;
            refused := coalesce(refused, no);
            refusing := metered._refusing(cs, no, null, coalesce((parked ->> 'hopeful')::boolean, false));
            clk := metered.clock();
            if no is null or refusing.scope is not null then
                charge := (metered._charge_of(coalesce(refusing.scope, busy), cs))[1];
                waits := waits || row((parked ->> 'job_id')::bigint, 0, charge.amount, metered._class_of(charge), clk,
                    clk + (parked ->> 'wait_us')::bigint * interval '1 microsecond', null, null, null, null, (parked ->> 'priority')::int, cardinality(waits), charge.scope,
                    coalesce(parked ->> 'fair', ''), hold.tenant, parked - '{hold,charges,fair,most,wait_us,hopeful,burst}'::text[], metered._hold_text(hold), parked ->> 'charges', null, null)::metered.parked_jobs;
                line_keys := line_keys || charge.key;
                wakes := wakes || case when no is null then '-infinity' else coalesce(clk + refusing.retry, 'infinity') end;
                if scope is null then
                    scope := charge.scope;
                    retry_us := case when no is not null then extract(epoch from refusing.retry) * 1000000 end;
                end if;
            end if;
            exit when not parked ? 'burst';
            parked := (parked || (parked -> 'burst')) - 'burst';
        end loop;
        if status = 'started' then
            refused := null; scope := null; retry_us := null;
            return next;
            continue;
        elsif cardinality(waits) = 0 then
            status := 'refused';
            if raising then
                raise exception 'the job never fits' using errcode = 'MT001', detail = refused;
            end if;
            return next;
            continue;
        end if;
        most := (parked ->> 'most')::bigint;
        if most <= (select y.waiting from metered.parked_scopes y where y.scope = park_jobs.scope) then
            status := 'full';
            if raising then
                raise exception 'too many jobs wait' using errcode = 'MT013', detail = jsonb_build_object('scope', scope, 'most', most);
            end if;
            return next;
            continue;
        end if;
        for n in 1..cardinality(waits) loop
            if cardinality(waits) > 1 then
                waits[n].job := waits[n].job || '{"burst": true}';
            end if;
            waits[n].turn := metered._turn(waits[n].scope, waits[n].priority, waits[n].fair);
            insert into metered.parked_jobs select (waits[n]).*;
            perform metered._join_line(waits[n].scope, line_keys[n], wakes[n]);
        end loop;
        status := 'parked';
        return next;
    end loop;
end
$$;

-- Parks jobs until their next attempt, each for rest_us, whose hold the caller releases in this transaction. They are in no line until then.
-- Each element is as in park_jobs, and its hold is a new one.
create function metered.rest_jobs(resting jsonb) returns setof bigint
language plpgsql volatile
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set plan_cache_mode = force_generic_plan
as $$
declare
    parked jsonb;
    held   metered.new_hold;
    clk    timestamptz := metered.clock();
    due    timestamptz;
    keys   bigint[];
begin
    if pg_column_size(resting) > 16777220
        or pg_column_compression(resting) is not null and octet_length(resting::text) > 16777216 then
        raise exception 'out of bounds: an argument of rest_jobs' using errcode = '22023';
    end if;
    perform metered._require(jsonb_typeof(resting) = 'array' and jsonb_array_length(resting) between 1 and 1000, 'resting');
    for parked in select x from jsonb_array_elements(resting) x loop
        keys := metered._keys_of_job(parked);
        due := clk + (parked ->> 'rest_us')::bigint * interval '1 microsecond';
        for of_lane in 0..1 loop
            held := metered._hold_of_job(parked);
            insert into metered.parked_jobs (job_id, turn, amount, class, parked_at, not_before, drop_at, priority, lane, scope, fair, tenant, job, hold, charges)
            values ((parked ->> 'job_id')::bigint, 0, 0, 0, clk, due, due + (parked ->> 'wait_us')::bigint * interval '1 microsecond', (parked ->> 'priority')::int,
                of_lane, '', coalesce(parked ->> 'fair', ''), held.tenant, (parked - '{hold,charges,fair,wait_us,rest_us,burst}'::text[])
                || case when of_lane = 1 or parked ? 'burst' then '{"burst": true}' else '{}' end::jsonb, metered._hold_text(held), parked ->> 'charges');
            exit when not parked ? 'burst';
            parked := (parked || (parked -> 'burst')) - 'burst';
        end loop;
        return next (parked ->> 'job_id')::bigint;
    end loop;
end
$$;

create function metered._explain_charges(of_charges text, ahead interval) returns jsonb
language plpgsql stable
as $$
begin
    return jsonb_build_object('refused', (metered.check_charge(of_charges::metered.new_charge[], ahead)).refused,
        'charges', (select jsonb_agg(jsonb_build_object('scope', c.scope, 'amount', c.amount, 'limits', (
            select jsonb_agg(jsonb_build_object('max', l.max, 'window_us', extract(epoch from l.win) * 1000000)) from unnest(c.limits) l)))
            from unnest(of_charges::metered.new_charge[]) c));
end
$$;

-- A parked job, with its place in its line (no further than 10,000; none while it is in no line), when the line is looked at, and the answers of check_charge for
-- its charges, and for those of its second choice. null: it is not parked.
create function metered.explain_parked(of_job bigint, ahead interval) returns jsonb
language plpgsql stable
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set plan_cache_mode = force_generic_plan
as $$
declare
    parked metered.parked_jobs;
    line   metered.parked_scopes;
begin
    select * into parked from metered.parked_jobs x where x.job_id = of_job and x.lane = 0;
    if not found then
        return null;
    end if;
    select * into line from metered.parked_scopes y where y.scope = parked.scope;
    return metered._parked_json(parked) || metered._explain_charges(parked.charges, ahead) || jsonb_build_object(
        'waiting', line.waiting, 'wake_at', nullif(greatest(case when parked.scope = '' then parked.retry_at else line.wake_at end, '0001-01-01Z'), 'infinity'),
        'trouble', coalesce(parked.trouble, line.trouble),
        'now', metered.clock(), 'burst', (select metered._explain_charges(x.charges, ahead) from metered.parked_jobs x where x.job_id = of_job and x.lane = 1),
        'position', case when parked.scope <> '' then 1 end + (select count(*) from (select from metered.parked_jobs x
            where x.scope = parked.scope and (x.priority, x.turn, x.job_id) < (parked.priority, parked.turn, parked.job_id)
            order by x.priority desc, x.turn desc, x.job_id desc limit 9999) y));
end
$$;

-- The order of parked jobs: which of a line may fit at all, and which line comes before another.

-- Asks for the smallest job of each class of a line (jobs with equal limits and the same use): if it does not fit, none of its class does. closed has the
-- amounts that were refused, by class, and next is when the first of these may fit. whole: no class fits.
create function metered._closed_classes(of_scope text, given jsonb, ahead interval, clk timestamptz, out closed jsonb, out whole boolean, out next timestamptz)
language plpgsql volatile
as $$
declare
    parked     metered.parked_jobs;
    charge     metered.new_charge;
    refusing   record;
    last_class bigint;
    open       boolean := false;
begin
    closed := '{}'; whole := false; next := 'infinity';
    for i in 1..64 loop
        select * into parked from metered.parked_jobs j
        where j.scope = of_scope and j.class > coalesce(last_class, -9223372036854775808) order by j.class, j.amount limit 1;
        whole := not found;
        exit when whole;
        last_class := parked.class;
        charge := (metered._under_limits(metered._charge_of(of_scope, parked.charges::metered.new_charge[]), given))[1];
        refusing := metered._refusing(array[charge], (metered.check_charge(array[charge], ahead)).refused, of_scope, true);
        if refusing.scope is null then     -- it fits, or the scope is absent or closed: place will say
            open := true;
        else
            closed := closed || jsonb_build_object(last_class, parked.amount);
            next := least(next, clk + refusing.retry);
        end if;
    end loop;
    whole := whole and not open;
end
$$;

-- Whether jobs of other keys wait in a line, of this priority or before it.
create function metered._others_wait(of_scope text, of_priority int, of_fair text) returns boolean
language plpgsql volatile
as $$
begin
    for p in 1..of_priority loop
        if exists (select from metered.parked_jobs x where x.scope = of_scope and x.priority = p and x.fair < of_fair)
            or exists (select from metered.parked_jobs x where x.scope = of_scope and x.priority = p and x.fair > of_fair)
        then
            return true;
        end if;
    end loop;
    return false;
end
$$;

-- The charge of the scope whose line a job is to join before it starts, since others wait there: else a tenant whose own line frees first would pass
-- them. From a line that others share, too, a job goes to those behind it alone, and never back to where it came from.
create function metered._line_before(job metered.parked_jobs, charges metered.new_charge[]) returns metered.new_charge
language plpgsql volatile
as $$
declare
    charge metered.new_charge;
    behind boolean := false;
begin
    if cardinality(charges) > 1 then
        foreach charge in array charges loop
            if charge.scope = job.scope then
                behind := true;
            elsif charge.scope is distinct from job.passed and metered._others_wait(charge.scope, job.priority, job.fair)
                and (behind or not metered._others_wait(job.scope, 4, job.fair))
            then
                return charge;
            end if;
        end loop;
    end if;
    return null;
end
$$;

-- Has a job join the line of a charge: it is refused there, or (passing) it fits where it is, and others wait there.
create function metered._change_lines(parked metered.parked_jobs, charge metered.new_charge, wake timestamptz, passing boolean) returns void
language plpgsql volatile
as $$
begin
    update metered.parked_jobs j set scope = charge.scope, amount = charge.amount, class = metered._class_of(charge), turn = metered._turn(charge.scope, parked.priority, parked.fair),
        passed = case when passing then parked.scope end, passed_amount = case when passing then parked.amount end
    where j.job_id = parked.job_id and j.lane = parked.lane;
    perform metered._join_line(charge.scope, charge.key, wake), metered._look_again(nullif(parked.passed, charge.scope));
end
$$;

-- Parked jobs whose units are free are released: they become jobs of River. See dropped.sql for those that are not.

-- Charges with the present limits of their scopes: given has these as text by scope. A charge keeps its own if given is null, as a whole or
-- for the scope. The result is null if given lacks a scope, or has an object for it: why its limits are not known (trouble).
create function metered._under_limits(charges metered.new_charge[], given jsonb) returns metered.new_charge[]
language plpgsql immutable
as $$
begin
    if given is not null then
        for i in 1..cardinality(charges) loop
            if not given ? charges[i].scope or jsonb_typeof(given -> charges[i].scope) = 'object' then
                return null;
            elsif given ->> charges[i].scope is not null then
                charges[i].limits := (given ->> charges[i].scope)::metered.charge_limit[];
            end if;
        end loop;
    end if;
    return charges;
end
$$;

-- Why the limits of scopes are not known, or null.
create function metered._limits_trouble(scopes text[], given jsonb) returns text
language sql immutable
as $$
    select format('limits of "%s": %s', x, given -> x ->> 'trouble') from unnest(scopes) x where jsonb_typeof(given -> x) = 'object' limit 1
$$;

-- _start_job, but started is null after an error, such as of a window that reaches purged entries. why is the error.
create function metered._try_start_job(this_hold metered.new_hold, charges metered.new_charge[], ahead interval, wait_ms int, origin metered.origin, channel text,
    out started boolean, out refused jsonb, out due timestamptz, out why text)
language plpgsql volatile
as $$
begin
    select p.started, p.refused, p.due into started, refused, due from metered._start_job(this_hold, charges, ahead, wait_ms, origin, channel) p;
exception
    when serialization_failure or deadlock_detected or lock_not_available then
        raise;
    when others then
        started := null;
        why := sqlerrm;
end
$$;

-- For a job in two lines: its row in the other one, the charges of its first choice, which is tried first, and the keys that starting it
-- locks beside those of r's charges.
create function metered._other_lane(job metered.parked_jobs, given jsonb, out other metered.parked_jobs, out first metered.new_charge[], out keys bigint[])
language plpgsql volatile
as $$
begin
    keys := '{}';
    if not job.job ? 'burst' then
        return;
    end if;
    select x.* into other from metered.parked_jobs x where x.job_id = job.job_id and x.lane <> job.lane;
    if other.job_id is null then
        return;
    end if;
    keys := array(select y.key from metered.parked_scopes y where y.scope = other.scope);
    if job.lane = 1 then
        first := metered._under_limits(other.charges::metered.new_charge[], given);
        keys := case when first is not null then keys || array(select c.key from unnest(first) c) end;
    end if;
end
$$;

-- Starts a job of a line, or says why not. outcome is started, passes (it is to join the line of onward), refused, failed (in a careful look) or limits (both say why), unknown (given
-- lacks a scope), or busy (another has one of its locks, or moves it). other is its row in another line.
create function metered._release_job(job metered.parked_jobs, given jsonb, ahead interval, wait_ms int, origin metered.origin, channel text, careful boolean,
    out outcome text, out charges metered.new_charge[], out refused jsonb, out due timestamptz, out why text, out other metered.parked_jobs, out onward metered.new_charge)
language plpgsql volatile
as $$
declare
    lane    record;
    started record;
    own     metered.new_charge;
begin
    charges := metered._under_limits(job.charges::metered.new_charge[], given);
    lane := metered._other_lane(job, given);
    other := lane.other;
    if charges is null or lane.keys is null then
        why := metered._limits_trouble(array(
            select c.scope from unnest(job.charges::metered.new_charge[] || coalesce(other.charges, '{}')::metered.new_charge[]) c), given);
        outcome := case when why is null then 'unknown' else 'limits' end;
        return;
    elsif not metered._try_each(array(select x.key from unnest(charges) x union select unnest(lane.keys) order by 1)) then
        outcome := 'busy';
        return;
    elsif other.job_id is not null then    -- another releaser may have moved it since, or do so now
        perform from metered.parked_jobs x
        where x.job_id = job.job_id and x.lane = other.lane and x.scope = other.scope for update skip locked;
        if not found then
            outcome := 'busy';
            return;
        end if;
    end if;
    if lane.first is not null then
        started := metered._try_start_job(other.hold::metered.new_hold, lane.first, ahead, wait_ms, origin, channel);
        if started.started then
            outcome := 'started'; due := started.due;
            return;
        end if;
    end if;
    if not careful then
        onward := metered._line_before(job, charges);
    end if;
    if onward.scope is not null then
        own := (metered._charge_of(job.scope, charges))[1];
        select own.amount + coalesce(sum(x.passed_amount), 0) into own.amount from metered.parked_jobs x where x.passed = job.scope;
        refused := (metered.check_charge(array[own], ahead)).refused;
        charges := array[own];
        outcome := case when refused is null then 'passes' else 'refused' end;
        due := metered.clock() + interval '1 minute';   -- jobs that came from here will have left their line, or not
        return;
    end if;
    if careful then
        started := metered._try_start_job(job.hold::metered.new_hold, charges, ahead, wait_ms, origin, channel);
        why := started.why;
    else
        started := metered._start_job(job.hold::metered.new_hold, charges, ahead, wait_ms, origin, channel);
    end if;
    refused := started.refused; due := started.due;
    outcome := case when started.started is null then 'failed' when started.started then 'started' else 'refused' end;
end
$$;

-- Takes jobs that fit out of the line of one scope, which is locked, and starts them, at most room jobs. A job that
-- another scope refuses moves to the line of that scope. If a lock of a job's other scopes is not free, the job stays, and the line
-- is looked at again soon. A job that could not be inserted leaves the line until it is tried again.
--
-- A look goes through at most 500 jobs, and the next one goes on after these. A careful look tries each job, and passes jobs that fail.
create function metered._release_line(of_scope text, given jsonb, room int, ahead interval, wait_ms int, origin metered.origin, channel text, careful boolean) returns jsonb[]
language plpgsql volatile
as $$
declare
    line     metered.parked_scopes;
    parked   metered.parked_jobs;
    outcome  record;
    refusing record;
    closed   jsonb := '{}';       -- by class: the smallest amount that was refused
    jobs     jsonb[] := '{}';
    clk      timestamptz;
    before   bigint[];
    gone     bigint[] := '{}';    -- jobs that stood in this line twice
    seen     int := 0;
    whole    boolean := false;    -- all classes were asked, or all jobs looked at
begin
    select * into line from metered.parked_scopes y where y.scope = of_scope for update;
    if not found then
        return jobs;
    end if;
    clk := metered.clock();
    if line.after is null then
        line.next_at := 'infinity'; line.trouble := null;
    end if;
    update metered.parked_scopes y set again = line.after is not null and y.again where y.scope = of_scope;
    if not careful then
        outcome := metered._closed_classes(of_scope, given, ahead, clk);
        closed := outcome.closed; whole := outcome.whole;
        line.next_at := least(line.next_at, outcome.next);
    end if;
    if not whole then
        for parked in
            select * from metered.parked_jobs j
            where j.scope = of_scope and (j.priority, j.turn, j.job_id) > (coalesce(line.after[1], -1), coalesce(line.after[2], -1), coalesce(line.after[3], -1))
            order by j.priority, j.turn, j.job_id limit 501
        loop
            seen := seen + 1;
            exit when seen > 500 or cardinality(jobs) = room;
            before := line.after;
            line.after := array[parked.priority, parked.turn, parked.job_id];
            if parked.retry_at > clk then
                update metered.parked_jobs j set scope = '', passed = null, passed_amount = null where j.job_id = parked.job_id and j.lane = parked.lane;
                perform metered._look_again(parked.passed);
                line.waiting := line.waiting - 1;
                continue;
            end if;
            continue when parked.amount >= (closed ->> parked.class::text)::bigint or parked.drop_at <= clk or parked.job_id = any (gone);
            outcome := metered._release_job(parked, given, ahead, wait_ms, origin, channel, careful);
            if outcome.outcome = 'unknown' and seen > room then   -- judged_scopes did not come so far: the next look begins here
                line.after := before;
                seen := 501;
                exit;
            elsif outcome.outcome in ('unknown', 'busy') then
                line.next_at := least(line.next_at, clk + interval '20 milliseconds');
                continue;
            elsif outcome.outcome in ('limits', 'failed') then
                line.trouble := outcome.why;
                line.next_at := least(line.next_at, clk + interval '10 seconds');
                if outcome.outcome = 'failed' then    -- it stays in its line: units that are freed may end the trouble
                    update metered.parked_jobs j set trouble = left(outcome.why, 1000), troubled_at = coalesce(j.troubled_at, clk) where j.job_id = parked.job_id;
                end if;
                continue;
            elsif outcome.outcome = 'passes' then
                perform metered._change_lines(parked, outcome.onward, '-infinity', true);
                line.waiting := line.waiting - 1;
                continue;
            elsif outcome.outcome = 'started' then
                jobs := jobs || parked.job;
                perform metered._look_again(parked.passed), metered._look_again((outcome.other).passed);
                delete from metered.parked_jobs j where j.job_id = parked.job_id;
                line.waiting := line.waiting - 1;
                if (outcome.other).scope = of_scope then
                    line.waiting := line.waiting - 1;
                    gone := gone || parked.job_id;
                elsif (outcome.other).scope <> '' then
                    update metered.parked_scopes y set waiting = y.waiting - 1 where y.scope = (outcome.other).scope;
                    delete from metered.parked_scopes y where y.scope = (outcome.other).scope and y.waiting = 0;
                end if;
                line.turns[parked.priority] := greatest(line.turns[parked.priority], parked.turn);
                line.next_at := least(line.next_at, outcome.due);
                continue;
            end if;
            if parked.trouble is not null and parked.retry_at is null then
                update metered.parked_jobs j set trouble = null, troubled_at = null where j.job_id = parked.job_id;
            end if;
            refusing := metered._refusing(outcome.charges, outcome.refused, of_scope, true);
            if refusing.scope is null then
                line.next_at := least(line.next_at, clk + interval '1 minute');
            elsif refusing.scope = of_scope then
                closed := closed || jsonb_build_object(parked.class, least(parked.amount, (closed ->> parked.class::text)::bigint));
                line.next_at := least(line.next_at, clk + refusing.retry, outcome.due);
            else
                perform metered._change_lines(parked, (metered._charge_of(refusing.scope, outcome.charges))[1], coalesce(clk + refusing.retry, 'infinity'), false);
                line.waiting := line.waiting - 1;
            end if;
        end loop;
        whole := seen <= 500 and cardinality(jobs) < room or line.waiting = 0;
    end if;
    if whole and line.waiting = 0 then
        delete from metered.parked_scopes y where y.scope = of_scope;
        return jobs;
    end if;
    line.started := line.started + cardinality(jobs);
    if clk - line.since > interval '1 hour' then   -- the rate stays, and the past counts half
        line.started := line.started / 2;
        line.since := clk - (clk - line.since) / 2;
    end if;
    if whole then
        line.wake_at := greatest(least(line.next_at, metered._lot_begins(of_scope, clk)), clk + interval '1 millisecond');
    end if;
    update metered.parked_scopes y set waiting = line.waiting, turns = line.turns, next_at = line.next_at, trouble = line.trouble, started = line.started, since = line.since,
        after = case when whole then null else line.after end,
        wake_at = case when not whole or y.again then '-infinity' else line.wake_at end
    where y.scope = of_scope;
    return jobs;
end
$$;

-- Lines to look at: those of only_scopes, or else all that are marked or whose time has come. Jobs whose next attempt or try may begin join their
-- lines first, at most 64: then a null says that more may be due. If the lock of such a scope is not free, the scope is returned too.
create function metered._lines(only_scopes text[], most int) returns table (scope text, key bigint)
language plpgsql volatile
as $$
declare
    parked metered.parked_jobs;
    charge metered.new_charge;
    nth    int := 0;
    joined int := 0;
    locked text[] := '{}';  -- scopes: their other jobs are passed, and keep nobody waiting
begin
    for parked in
        select x.* from metered.parked_jobs x
        where x.scope = '' and greatest(x.not_before, x.retry_at) <= metered.clock()
          and (only_scopes is null or ((x.charges::metered.new_charge[])[1]).scope = any (only_scopes))
        order by greatest(x.not_before, x.retry_at) limit 10000
    loop
        charge := (parked.charges::metered.new_charge[])[1];
        continue when charge.scope = any (locked);
        if metered._try_lock(charge.key) then
            select x.* into parked from metered.parked_jobs x
            where x.job_id = parked.job_id and x.lane = parked.lane and x.scope = '' for update skip locked;
            continue when not found;
            joined := joined + 1;
            if metered._one_snapshot() then     -- nobody marked the line in which the job was not
                perform metered._refuse_stale(array[metered._last_entry(charge.scope)]);
            end if;
            parked.class := metered._class_of(charge);
            parked.turn := metered._turn(charge.scope, parked.priority, parked.fair);
            update metered.parked_jobs x set scope = charge.scope, amount = charge.amount, class = parked.class, turn = parked.turn
            where x.job_id = parked.job_id and x.lane = parked.lane;
            perform metered._join_line(charge.scope, charge.key, '-infinity');
            if joined = 64 then
                scope := null; key := null;
                return next;
                exit;
            end if;
        else
            locked := locked || charge.scope;
            scope := charge.scope;
            key := charge.key;
            nth := nth + 1;
            return next;
            exit when nth = 16;
        end if;
    end loop;
    if only_scopes is null then
        return query select y.scope, y.key from metered.parked_scopes y where y.wake_at <= metered.clock() order by y.wake_at limit most;
    else
        return query select y.scope, y.key from metered.parked_scopes y where y.scope = any (only_scopes);
    end if;
end
$$;

-- The scopes whose present limits release_jobs needs (given). It takes the same locks.
create function metered.judged_scopes(only_scopes text[], wait_ms int, max_jobs int) returns text[]
language plpgsql volatile
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set plan_cache_mode = force_generic_plan
as $$
declare
    line   record;
    judged text[] := '{}';
begin
    if array_lower(only_scopes, 1) <> 1
        or array_ndims(only_scopes) <> 1
        or array_position(only_scopes, null) is not null
        or cardinality(only_scopes) > 64
        or pg_column_size(only_scopes) > 255 and not metered._fits(only_scopes, 255)
        or wait_ms > 3600000
        or max_jobs > 1000 then
        raise exception 'out of bounds: an argument of judged_scopes' using errcode = '22023';
    end if;
    perform metered._require(max_jobs between 1 and 1000, 'max_jobs');
    if only_scopes is not null then
        perform metered._lock_all_scopes(only_scopes, null, wait_ms);
    end if;
    for line in select l.scope, l.key from metered._lines(only_scopes, 65) l loop
        continue when line.scope is null or not metered._try_lock(line.key);
        judged := judged || line.scope || array(
            select distinct c.scope from (
                select j.job_id, j.lane from metered.parked_jobs j, metered.parked_scopes y
                where y.scope = line.scope and j.scope = line.scope
                  and (j.priority, j.turn, j.job_id) > (coalesce(y.after[1], -1), coalesce(y.after[2], -1), coalesce(y.after[3], -1))
                order by j.priority, j.turn, j.job_id limit max_jobs) f,
                lateral (select x.charges from metered.parked_jobs x where x.job_id = f.job_id and x.lane <= f.lane) a, unnest(a.charges::metered.new_charge[]) c
            where pg_try_advisory_xact_lock(c.key));
    end loop;
    return array(select distinct x from unnest(judged) x);
end
$$;

-- Releases parked jobs that fit, at most max_jobs: of only_scopes, whose locks it waits for, or of
-- lines that are marked or whose time has come, if their locks are free. A row is released (the caller inserts job),
-- busy (the scope's lock was not free), trouble (why the line cannot be looked at), or more (call again).
--
-- Jobs count with their own limits, or with those of given, text by scope. Jobs and lines with a scope that given lacks are left for later.
create function metered.release_jobs(only_scopes text[], given jsonb, wait_ms int, max_jobs int, ahead interval, origin metered.origin, channel text)
returns table (status text, job jsonb, scope text)
language plpgsql volatile
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set plan_cache_mode = force_generic_plan
set enable_bitmapscan = off
set enable_sort = off
set jit = off
as $$
declare
    line  record;
    jobs  jsonb[];
    left_ int := max_jobs;
    more  boolean := false;
    failed text;
    soon  timestamptz;
    lines int := 0;
    busy  text[] := '{}';
begin
    if array_lower(only_scopes, 1) <> 1
        or array_ndims(only_scopes) <> 1
        or array_position(only_scopes, null) is not null
        or cardinality(only_scopes) > 64
        or pg_column_size(only_scopes) > 255 and not metered._fits(only_scopes, 255)
        or pg_column_size(given) > 1048580
        or pg_column_compression(given) is not null and octet_length(given::text) > 1048576
        or wait_ms > 3600000
        or max_jobs > 1000
        or greatest(octet_length(origin.tenant), octet_length(origin.operation)) > 255
        or pg_column_size(origin.note) > 8196
        or pg_column_compression(origin.note) is not null and octet_length(origin.note::text) > 8192
        or octet_length(channel) > 64 then
        raise exception 'out of bounds: an argument of release_jobs' using errcode = '22023';
    end if;
    perform metered._require(max_jobs between 1 and 1000, 'max_jobs');
    if only_scopes is not null then
        perform metered._lock_all_scopes(only_scopes, null, wait_ms);
    end if;
    for line in select l.scope, l.key from metered._lines(only_scopes, 65) l loop
        if line.scope is null then
            more := true;
            continue;
        end if;
        lines := lines + 1;
        if left_ = 0 or lines > 64 then
            more := true;
            exit;
        end if;
        scope := line.scope;
        if jsonb_typeof(given -> line.scope) = 'object' then
            failed := metered._limits_trouble(array[line.scope], given);
            soon := metered.clock() + interval '10 seconds';
            update metered.parked_scopes y set wake_at = soon, after = null, trouble = failed where y.scope = line.scope;
            status := 'trouble'; job := to_jsonb(failed);
            return next;
            continue;
        end if;
        if given is not null and not given ? line.scope or not metered._try_lock(line.key) then
            status := 'busy'; job := null;
            return next;
            busy := busy || line.scope;
            continue;
        end if;
        begin
            jobs := metered._release_line(line.scope, given, left_, ahead, wait_ms, origin, channel, false);
            failed := null;
        exception
            when serialization_failure or deadlock_detected or lock_not_available then
                raise;
            when others then
                failed := sqlerrm;
        end;
        if failed is not null then      -- of one job, or of all
            status := 'trouble'; job := to_jsonb(failed);
            return next;
            begin
                jobs := metered._release_line(line.scope, given, left_, ahead, wait_ms, origin, channel, true);
            exception
                when serialization_failure or deadlock_detected or lock_not_available then
                    raise;
                when others then
                    failed := sqlerrm;
                    soon := metered.clock() + interval '10 seconds';
                    update metered.parked_scopes y set wake_at = soon, after = null, trouble = failed where y.scope = line.scope;
                    continue;
            end;
        end if;
        status := 'released';
        foreach job in array jobs loop
            left_ := left_ - 1;
            return next;
        end loop;
        more := more or exists (select from metered.parked_scopes y where y.scope = line.scope and y.wake_at <= metered.clock());
    end loop;
    more := more or only_scopes is null and exists (    -- a job has joined another line
        select from metered.parked_scopes y where y.wake_at = '-infinity' and y.scope <> all (busy));
    if more then
        status := 'more'; job := null; scope := null;
        return next;
    end if;
end
$$;

-- Microseconds until a line is to be looked at or a parked job to be dropped, 0 if one is due, or null if no time is known.
create function metered.next_release() returns bigint
language plpgsql stable
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set plan_cache_mode = force_generic_plan
set enable_bitmapscan = off
set enable_sort = off
as $$
declare
    next timestamptz := least(
        (select y.wake_at from metered.parked_scopes y order by y.wake_at limit 1),
        (select greatest(j.not_before, j.retry_at) from metered.parked_jobs j where j.scope = '' order by greatest(j.not_before, j.retry_at) limit 1),
        (select greatest(j.drop_at, j.retry_at) from metered.parked_jobs j where j.drop_at is not null order by greatest(j.drop_at, j.retry_at) limit 1));
begin
    return case when next < 'infinity' then greatest(0, case when next > '-infinity' then extract(epoch from next - metered.clock()) * 1000000 else 0 end)::bigint end;
end
$$;

-- Parked jobs that are not released: they are in trouble, they are dropped, or somebody takes them out of their lines.

-- Notes why the last try of a parked job failed, and reports whether it is parked. It leaves its lines as they are looked at. It is tried again after 10
-- seconds, then after as long as the trouble has lasted, an hour at most.
create function metered._trouble_job(of_job bigint, reason text) returns boolean
language plpgsql volatile
as $$
declare
    clk timestamptz := metered.clock();
begin
    update metered.parked_jobs j set trouble = left(reason, 1000), troubled_at = coalesce(j.troubled_at, clk),
        retry_at = clk + least(greatest(clk - j.troubled_at, interval '10 seconds'), interval '1 hour')
    where j.job_id = of_job;
    return found;
end
$$;

-- Puts parked jobs in trouble that the caller could not insert or drop, each for the reason of the same number. Returns how many there were.
create function metered.trouble_jobs(jobs bigint[], reasons text[]) returns int
language plpgsql volatile
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set plan_cache_mode = force_generic_plan
as $$
declare
    troubled int := 0;
begin
    if array_lower(jobs, 1) <> 1
        or array_ndims(jobs) <> 1
        or array_position(jobs, null) is not null
        or cardinality(jobs) > 1000
        or array_lower(reasons, 1) <> 1
        or array_ndims(reasons) <> 1
        or array_position(reasons, null) is not null
        or cardinality(reasons) > 1000
        or pg_column_size(reasons) > 8192 and not metered._fits(reasons, 8192) then
        raise exception 'out of bounds: an argument of trouble_jobs' using errcode = '22023';
    end if;
    perform metered._require(cardinality(jobs) = cardinality(reasons), 'reasons');
    for i in 1..cardinality(jobs) loop
        troubled := troubled + metered._trouble_job(jobs[i], reasons[i])::int;
    end loop;
    return troubled;
end
$$;

-- Drops parked jobs whose time to wait is over, at most max_rows, as far as their lines are not locked. Returns them.
create function metered.drop_parked(max_rows int) returns setof jsonb
language plpgsql volatile
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set plan_cache_mode = force_generic_plan
as $$
declare
    parked  record;
    dropped int := 0;
begin
    if max_rows > 10000 then
        raise exception 'out of bounds: an argument of drop_parked' using errcode = '22023';
    end if;
    perform metered._require(max_rows between 1 and 1000, 'max_rows');
    for parked in
        select x.job_id, l.scopes, l.keys from metered.parked_jobs x, lateral (
            select array_agg(z.scope order by z.lane) as scopes, array_agg(y.key order by y.key) filter (where z.scope <> '') as keys
            from metered.parked_jobs z left join metered.parked_scopes y on y.scope = z.scope where z.job_id = x.job_id) l
        where x.drop_at is not null and greatest(x.drop_at, x.retry_at) <= metered.clock() and x.lane = 0
        order by greatest(x.drop_at, x.retry_at) limit 10000
    loop
        continue when array_position(parked.keys, null) is not null or not metered._try_each(coalesce(parked.keys, '{}'));
        continue when parked.scopes is distinct from array(select z.scope from (
            select x.scope, x.lane from metered.parked_jobs x where x.job_id = parked.job_id for update skip locked) z order by z.lane);
        return next metered._leave_line(parked.job_id);
        dropped := dropped + 1;
        exit when dropped = max_rows;
    end loop;
end
$$;

-- Takes a parked job out of its line for good, or changes its priority, and returns it. null: it is not parked. A job in trouble
-- that gets a priority is tried again now.
create function metered.change_parked(of_job bigint, of_priority int, wait_ms int) returns jsonb
language plpgsql volatile
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set plan_cache_mode = force_generic_plan
as $$
declare
    parked metered.parked_jobs;
    was    text[];
    now    timestamptz;
begin
    if of_priority > 4
        or wait_ms > 3600000 then
        raise exception 'out of bounds: an argument of change_parked' using errcode = '22023';
    end if;
    perform metered._require(coalesce(of_priority between 1 and 4, true), 'of_priority');
    was := array(select x.scope from metered.parked_jobs x where x.job_id = of_job order by x.lane);
    if was = '{}' then
        if metered._one_snapshot() then     -- it may have been parked since
            begin
                insert into metered.parked_jobs (job_id, turn, amount, class, parked_at, priority, scope, fair, tenant, job, hold, charges)
                values (of_job, 0, 0, 0, 'epoch', 0, '', '', '', '{}', '', '') on conflict do nothing;
                raise exception using errcode = 'MT100';
            exception when sqlstate 'MT100' then
                null;
            end;
        end if;
        return null;
    end if;
    perform metered._lock_keys(array(select y.key from metered.parked_scopes y where y.scope = any (was) order by 1), wait_ms);
    perform from metered.parked_jobs x where x.job_id = of_job order by x.lane for update;
    if not found then
        return null;
    elsif was <> array(select x.scope from metered.parked_jobs x where x.job_id = of_job order by x.lane) then
        raise exception 'could not serialize access: the job waits for another scope now' using errcode = '40001';
    elsif of_priority is null then
        return metered._leave_line(of_job);
    end if;
    for parked in select x.* from metered.parked_jobs x where x.job_id = of_job and x.priority <> of_priority order by x.lane loop
        parked.turn := metered._turn(parked.scope, of_priority, parked.fair);
        parked.job := parked.job || jsonb_build_object('priority', of_priority);
        update metered.parked_jobs x set priority = of_priority, turn = parked.turn, job = parked.job where x.job_id = of_job and x.lane = parked.lane;
    end loop;
    now := metered.clock();
    update metered.parked_jobs x set trouble = null, troubled_at = null, retry_at = now where x.job_id = of_job and x.retry_at is not null;
    if found then
        perform metered._wake_releasers();
    end if;
    select x.* into parked from metered.parked_jobs x where x.job_id = of_job and x.lane = 0;
    return metered._parked_json(parked);
end
$$;

-- Events that must take effect in order: commands that come late are refused.

-- The newest event that took effect, one row for each key. A row goes with the records of operations.
create table metered.newest (
    at       timestamptz not null,                              -- when the event happened, as its sender says
    taken_at timestamptz not null default metered.clock(),      -- when it took effect
    tenant   text collate "C" not null,                         -- of the command
    key      text collate "C" not null,                         -- what the event is about, such as a subscription
    id       text collate "C" not null,                         -- the command's id: of two events of one time, the greater one is newer
    primary key (tenant, key)
);
create index newest_taken_at on metered.newest (taken_at);

-- Makes a command the newest of its key, or returns the one that is at least as new. The row is locked until the transaction
-- ends, so that commands of one key take effect one after another.
create function metered.take_newest(of_tenant text, of_key text, event_at timestamptz, of_id text, wait_ms int,
    out newest timestamptz, out newest_id text)
language plpgsql volatile
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set plan_cache_mode = force_generic_plan
as $$
declare
    before text := metered._bound_lock_wait(wait_ms);
begin
    if greatest(octet_length(of_tenant), octet_length(of_key), octet_length(of_id)) > 255
        or wait_ms > 3600000 then
        raise exception 'out of bounds: an argument of take_newest' using errcode = '22023';
    end if;
    perform metered._require(isfinite(event_at), 'event_at');
    insert into metered.newest as n (at, tenant, key, id) values (event_at, of_tenant, of_key, of_id)
    on conflict (tenant, key) do update set at = excluded.at, id = excluded.id, taken_at = metered.clock()
    where (n.at, n.id) < (excluded.at, excluded.id);
    if not found then
        select n.at, n.id into newest, newest_id from metered.newest n where n.tenant = of_tenant and n.key = of_key;
    end if;
    before := metered._unbound_lock_wait(before);
end
$$;

-- Records that others can check: see the module notary. Its log has one leaf for each entry, in the order in which it was taken down, and
-- is a Merkle tree whose heads are signed. No call of the schema reads or writes these tables.

-- The scopes whose entries are in the log. A leaf has the commitment in place of the name, so that the name can go.
create table metered.notary_scopes (
    no         bigint primary key,              -- the number of the scope in the log
    seq        bigint not null,                 -- its last entry that is in the log
    commitment bytea not null,                  -- the SHA-256 of salt and name
    salt       bytea,                           -- 32 random bytes, or null: the name was taken out, and cannot be guessed
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

-- Keeps a transaction from being committed by anyone but its command's last flush. A
-- cursor WITH HOLD is run to its end by COMMIT, and this is its query.
create function metered.block_commit() returns void
language plpgsql
as $$
begin
    raise exception 'the command of this transaction is not complete' using errcode = 'MT004';
end
$$;

-- Begins a command, in two steps that usually come as one.
--
-- Claiming waits for the transaction that holds the operation id. status is new, replay (the
-- columns up to at are its record), retired (its time is at or before the
-- horizon) or future (its time is further ahead than max_future). The transaction of
-- a new one is marked, guarded against COMMIT (unless its marker begins with a minus, since nobody
-- gets at it before it is complete), and bounded by timeout_ms (0 leaves
-- the session's timeouts, and null all settings of a caller's session). The claim
-- is an advisory lock, which writes nothing, and comes before the command's locks of
-- scopes. The record's primary key makes it exact.
--
-- Opening spends the token, if there is one, and then looks at the charges without a
-- lock, so that a hopeless command is refused before its function runs. The columns from
-- token_status to consumed_at are consume_token's.
create function metered.begin_command(claiming boolean, opening boolean, command metered.new_command, token metered.presented_token,
    charges metered.new_charge[], ahead interval, wait_ms int,
    out status text, out fingerprint bytea, out result bytea,
    out scopes text[], out amounts bigint[], out seqs bigint[], out ats timestamptz[], out holds text[], out at timestamptz,
    out refusal json, out refused jsonb,
    out token_status text, out payload json, out uses_left int,
    out minted_at timestamptz, out expires_at timestamptz, out consumed_at timestamptz)
language plpgsql volatile
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set plan_cache_mode = force_generic_plan
as $$
declare
    horizon timestamptz;
    unused  text;   -- set_config in an assignment is cheaper than in perform, by far
    answer  record; -- and so is a function than as a table
begin
    if greatest(octet_length(command.tenant), octet_length(command.id), octet_length(command.marker), octet_length(command.name)) > 255
        or array_lower(command.jobs, 1) <> 1
        or array_ndims(command.jobs) <> 1
        or array_position(command.jobs, null) is not null
        or cardinality(command.jobs) > 1000
        or octet_length(token.digest) > 33
        or octet_length(token.purpose) > 128
        or octet_length(token.subject) > 512
        or array_lower(charges, 1) <> 1
        or array_ndims(charges) <> 1
        or array_position(charges, null) is not null
        or cardinality(charges) > 64
        or pg_column_size(charges) > 1400 and not metered._fits(charges)
        or wait_ms > 3600000 then
        raise exception 'out of bounds: an argument of begin_command' using errcode = '22023';
    end if;
    if claiming then
        if coalesce(current_setting('metered_tx.command', true), '') <> '' then
            raise exception 'a command is already begun in this transaction' using errcode = 'MT006';
        end if;
        if not metered._try_lock(command.key) then
            perform metered._lock_keys(array[command.key], wait_ms);
        end if;
        -- Both of one snapshot: a purge moves the horizon in the transaction that deletes.
        select (select h.at from metered.operations_horizon h where h.one),
            o.fingerprint, o.result, o.scopes, o.amounts, o.seqs, o.ats, o.holds, o.at, o.refusal
        into horizon, fingerprint, result, scopes, amounts, seqs, ats, holds, at, refusal
        from (values (1)) one left join lateral (
            select * from metered.operations y where y.tenant = command.tenant and y.id = command.id limit 1) o on true;
        if at is not null then
            status := 'replay';
            return;
        end if;
        if metered._one_snapshot() then
            -- The snapshot may be older than a record whose writer let go of the id
            -- just now, or than a purge. A write meets the first and a lock the
            -- second, with 40001. The block takes both back.
            begin
                perform set_config('lock_timeout', wait_ms::text, true);
                insert into metered.operations (tenant, id, at, fingerprint, result)
                values (command.tenant, command.id, 'infinity', '', '') on conflict do nothing;
                perform from metered.operations_horizon h where h.one for share;
                raise exception using errcode = 'MT100';
            exception when sqlstate 'MT100' then
                null;
            end;
        end if;
        if command.issued_at <= horizon then
            status := 'retired';
            return;
        elsif command.issued_at > metered.clock() + command.max_future then
            status := 'future';
            return;
        end if;
        if command.timeout_ms > 0 then
            unused := set_config('statement_timeout', metered._shorter(current_setting('statement_timeout'), command.timeout_ms), true)
                || set_config('lock_timeout', metered._shorter(current_setting('lock_timeout'), command.timeout_ms), true)
                || set_config('idle_in_transaction_session_timeout',
                    metered._shorter(current_setting('idle_in_transaction_session_timeout'), command.timeout_ms), true);
        end if;
        -- COMMIT is sent before the charges are made: if the client is gone by the time a scope
        -- is free, let that be noticed. Postgres on Linux can. Elsewhere it is tried.
        unused := set_config('metered_tx.command', command.marker, true)
            || case when command.timeout_ms is null then '' when strpos(version(), '-linux') > 0
                then set_config('client_connection_check_interval', '100', true) end;
        if unused is null then
            begin
                unused := set_config('client_connection_check_interval', '100', true);
            exception when invalid_parameter_value then
                null;
            end;
        end if;
        if left(command.marker, 1) is distinct from '-' then
            execute 'declare metered_command cursor with hold for select metered.block_commit()';
        end if;
    end if;
    status := 'new';
    if not opening then
        return;
    end if;
    if token.digest is not null then
        answer := metered.consume_token(token.digest, token.purpose, token.subject, wait_ms);
        token_status := answer.status;
        payload := answer.payload;
        uses_left := answer.uses_left;
        minted_at := answer.minted_at;
        expires_at := answer.expires_at;
        consumed_at := answer.consumed_at;
        if token_status <> 'ok' then
            return;
        end if;
    end if;
    if cardinality(charges) > 0 then
        answer := metered._write_charges(charges, ahead, wait_ms, null, 'look', null, false);
        refused := answer.refused;
    end if;
end
$$;

-- Ends a command: charges, records the operation, and lets COMMIT pass. A refusal
-- raises, because COMMIT follows in the same flush. Without finishing, finish_command lets
-- COMMIT pass later. With of_refusal it records that the command was refused and rolled
-- back, with an empty result.
create function metered.complete_command(command metered.new_command, of_fingerprint metered.fingerprint, of_result bytea, of_refusal json,
    charges metered.new_charge[], ahead interval, wait_ms int, finishing boolean,
    out seqs bigint[], out ats timestamptz[], out used bigint[], out held bigint[], out at timestamptz, out periods timestamptz[], out crossed jsonb)
language plpgsql volatile
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set plan_cache_mode = force_generic_plan
as $$
declare
    posted       record;
    charge       metered.new_charge;
    scopes       text[];
    amounts      bigint[];
    command_cursor refcursor := 'metered_command';  -- CLOSE by a variable is not parsed anew
    unused       text;
begin
    if greatest(octet_length(command.tenant), octet_length(command.id), octet_length(command.marker), octet_length(command.name)) > 255
        or array_lower(command.jobs, 1) <> 1
        or array_ndims(command.jobs) <> 1
        or array_position(command.jobs, null) is not null
        or cardinality(command.jobs) > 1000
        or octet_length(of_result) > 1048576
        or pg_column_size(of_refusal) > 1048580
        or pg_column_compression(of_refusal) is not null and octet_length(of_refusal::text) > 1048576
        or array_lower(charges, 1) <> 1
        or array_ndims(charges) <> 1
        or array_position(charges, null) is not null
        or cardinality(charges) > 64
        or pg_column_size(charges) > 1400 and not metered._fits(charges)
        or wait_ms > 3600000 then
        raise exception 'out of bounds: an argument of complete_command' using errcode = '22023';
    end if;
    if coalesce(current_setting('metered_tx.command', true), '') is distinct from command.marker
        or of_refusal is not null and (cardinality(charges) > 0 or octet_length(of_result) > 0) then
        raise exception 'the command was not begun in this transaction' using errcode = 'MT005';
    end if;
    if cardinality(charges) > 0 then
        if command.leased and cardinality(charges) = 1 then     -- charge_leased, without its arrays
            charge := charges[1];
            if pg_column_size(charge.note) > 8192 or pg_column_compression(charge.note) is not null then
                perform metered._no_amount();
            end if;
            at := metered._spend_range(charge.lease, charge.key, charge.lease_offset, charge.amount, charge.scope, row(command.tenant, command.id, charge.note));
            if at is null then
                raise exception 'a lease is closed' using errcode = 'MT009', detail = jsonb_build_array(jsonb_build_object('lease', charge.lease));
            end if;
            posted := row(array[0]::bigint[], array[at], null::bigint[], array[0]::bigint[], null::jsonb, at, null::timestamptz[], null::jsonb)::metered.charged;
        elsif command.leased then
            posted := metered.charge_leased(charges, ahead, wait_ms, row(command.tenant, command.id, null), 'raise', command.standing);
        else
            posted := metered._write_charges(charges, ahead, wait_ms, row(command.tenant, command.id, null), 'raise', null, command.standing);
        end if;
        seqs := posted.seqs;
        ats := posted.ats;
        used := posted.used;
        held := posted.held;
        periods := posted.periods;
        crossed := posted.crossed;
        scopes := array[charges[1].scope];      -- a query in the INSERT would be prepared for one charge, too
        amounts := array[charges[1].amount];
        if cardinality(charges) > 1 then
            scopes := array(select x.scope from unnest(charges) x);
            amounts := array(select x.amount from unnest(charges) x);
        end if;
    end if;
    insert into metered.operations (tenant, id, fingerprint, issued_at, at, result, scopes, amounts, seqs, ats, holds, refusal, name, jobs)
    values (command.tenant, command.id, of_fingerprint, command.issued_at, metered.clock(), of_result,
        scopes, amounts, complete_command.seqs, complete_command.ats,
        string_to_array(nullif(current_setting('metered_tx.holds', true), ''), chr(30)), of_refusal, command.name, command.jobs)
    on conflict do nothing
    returning operations.at into at;
    if not found then
        raise exception 'could not serialize access: the operation was recorded meanwhile' using errcode = '40001';
    end if;
    if finishing then
        unused := set_config('metered_tx.command', '', true) || set_config('metered_tx.holds', '', true);
        if left(command.marker, 1) <> '-' then
            close command_cursor;
        end if;
    end if;
end
$$;

-- Lets COMMIT pass for a command that was completed without finishing, if this is still
-- its transaction.
create function metered.finish_command(marker text) returns void
language plpgsql volatile
security definer
set search_path = pg_catalog, pg_temp
as $$
begin
    if octet_length(marker) > 255 then
        raise exception 'out of bounds: an argument of finish_command' using errcode = '22023';
    end if;
    if coalesce(current_setting('metered_tx.command', true), '') is distinct from coalesce(marker, '') then
        raise exception 'the command was not begun in this transaction' using errcode = 'MT005';
    end if;
    perform set_config('metered_tx.command', '', true);
    perform set_config('metered_tx.holds', '', true);
    execute 'close metered_command';
end
$$;

-- Deletes records of operations completed and issued before cutoff, at most
-- max_rows, oldest first, and moves the horizon to the latest time that their ids
-- carry, in the same transaction. A horizon beyond these would refuse new ids, after a
-- clock was ahead, for as long. after is the last of the batch before, as in purge_tokens.
-- It waits for another purge's move, as long as wait_ms. It also deletes at most max_rows newest events of keys that took effect
-- before cutoff, which deleted does not count.
create function metered.purge_operations(after timestamptz, cutoff timestamptz, max_rows int, wait_ms int,
    out deleted bigint, out last timestamptz)
language plpgsql volatile
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set plan_cache_mode = force_generic_plan
set enable_bitmapscan = off
set enable_sort = off
as $$
declare
    latest timestamptz;
    before text := metered._bound_lock_wait(wait_ms);
begin
    if max_rows > 10000
        or wait_ms > 3600000 then
        raise exception 'out of bounds: an argument of purge_operations' using errcode = '22023';
    end if;
    perform metered._require(max_rows between 1 and 10000, 'max_rows');
    cutoff := least(cutoff, metered.clock());
    with gone as (
        -- By row address, so that there is no join to plan: these rows are never
        -- updated, and locked here.
        delete from metered.operations o
        where o.ctid = any (array(
            select p.ctid from metered.operations p
            where p.at >= coalesce(after, '-infinity') and p.at < cutoff and coalesce(p.issued_at, p.at) < cutoff
            order by p.at limit max_rows for update skip locked))
        returning o.at, o.issued_at)
    select count(*), max(g.at), max(g.issued_at) into deleted, last, latest from gone g;
    if latest is not null then
        update metered.operations_horizon h set at = latest where h.one and h.at < latest;
    end if;
    delete from metered.newest n
    where n.ctid = any (array(
        select p.ctid from metered.newest p where p.taken_at < cutoff order by p.taken_at limit max_rows for update skip locked));
    before := metered._unbound_lock_wait(before);
end
$$;

-- The short way of the commonest calls: one charge, with at most one limit by window or lifetime, of a
-- scope in which nothing is unusual; and the claim of a new id. Most of the time of such a call is
-- neither reading nor writing, but PL/pgSQL's: each expression is prepared in each transaction, and
-- each composite is taken apart. So these functions have few expressions, and take scalars. Where
-- something is unusual they write nothing, and go on with the full function, which alone refuses. It
-- runs in the same call, since COMMIT may follow in the same flush. See ADR 22.

-- Whether calls may go the short way. A test answers false, and so sends all calls the full way. On
-- Citus locks are taken by another node, and calls go the full way. Inlined wherever it stands.
create function metered._goes_short() returns boolean
language sql immutable
as $$
    select not metered._sharded()
$$;

-- Whether the schema is a cell. Declared immutable, so that it is a constant of each plan: Router.SetUp, which
-- makes a schema a cell, has plans of the ledger made anew.
create function metered._in_cell() returns boolean
language sql immutable
as $$
    select exists (select from metered.cell)
$$;

-- Whether the server runs on Linux, as far as version() tells. Declared immutable, so that it is a constant of each plan.
create function metered._on_linux() returns boolean
language sql immutable
as $$
    select strpos(version(), '-linux') > 0
$$;

-- The microseconds of a time since 1970: a number, which no setting of a session spells otherwise.
-- Stable, as extract is: else it would not be inlined.
create function metered._in_us(moment timestamptz) returns bigint
language sql stable
as $$
    select (extract(epoch from moment) * 1000000)::bigint
$$;

-- A charge with at most one limit by window or lifetime, as the full functions take it. whole is the limit itself,
-- a charge_limit, where it has thresholds.
create function metered._as_charges(of_scope text, key bigint, units bigint, max_units bigint, win interval,
    note jsonb, whole text) returns metered.new_charge[]
language sql stable
as $$
    select array[row(of_scope, key, units, 0, case when whole is not null then array[whole::metered.charge_limit]
            when max_units is not null then array[row(max_units, win, null, null, null, null)::metered.charge_limit] end,
        note, null, null, null)::metered.new_charge]
$$;

-- The answer of charge as JSON, with times in microseconds.
create function metered._charged_json(answer metered.charged) returns json
language sql stable
as $$
    select json_build_object('seqs', (answer).seqs,
        'ats', array(select metered._in_us(x) from unnest((answer).ats) x),
        'used', (answer).used, 'held', (answer).held, 'refused', (answer).refused, 'crossed', (answer).crossed,
        'periods', array(select metered._in_us(x) from unnest((answer).periods) x))
$$;

-- A charge of one scope without a command, as charge makes it: JSON, [seq, time in microseconds, held units, used
-- units], or charge's answer as an object. It has at most one limit: max_units in each win, or in its lifetime, if win is
-- 0. The columns that it leaves out are null in a usual scope.
--
-- Where the limit has thresholds, whole is the limit itself, which the full function is given, and max_units is less than
-- the lowest of them: the short way reaches none.
create function metered.charge_plain(of_scope text, key bigint, units bigint, max_units bigint, win interval,
    note jsonb, whole text, standing boolean, ahead interval, wait_ms int) returns json
language plpgsql volatile
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set plan_cache_mode = force_generic_plan
as $$
declare
    of_tenant text;     -- of no command
    of_id   text;
    e_seq    bigint;        -- the entry that was appended, or null
    e_at     timestamptz;
    e_held   bigint;
    e_used   bigint;        -- units that counted before it
begin
    if octet_length(of_scope) > 255
        or pg_column_size(note) > 8196
        or pg_column_compression(note) is not null and octet_length(note::text) > 8192
        or octet_length(whole) > 2048
        or wait_ms > 3600000 then
        raise exception 'out of bounds: an argument of charge_plain' using errcode = '22023';
    end if;
    if metered._goes_short() and metered._key_fits(key, of_scope) and current_setting('transaction_isolation') = 'read committed' and units between 1 and 9007199254740992 and (note is null or pg_column_size(note) <= 8192
                and pg_column_compression(note) is null and not note ? 'use')
        and (max_units is not null or metered._try_lock(key))       -- a mere sum waits for nobody
    then
        if metered._try_lock(key) is not true then
            perform metered._lock_all_scopes(array[of_scope], array[key], wait_ms);
        end if;
        if standing and win > interval '0' then
                insert into metered.ledger as y (seq, amount, at, spent, refunded, credited, held, epoch, kind, scope, next_due, operation_tenant, operation, note,
                    others, anchor_at, anchor_spent)
                select t.seq + 1, units, t.clk, t.spent + units, t.refunded, t.credited, t.held, t.epoch, 'c', of_scope, t.next_due, of_tenant,
                    of_id, note, int8smaller(t.others, t.seq), case when b.spent > 0 then t.clk - win end, nullif(b.spent, 0)
                from (select l.seq, l.at, l.spent, l.refunded, l.credited, l.held, l.epoch, l.scope, l.next_due, l.anchor_at,
                l.anchor_spent, l.lots_end, l.crossed, l.tallied, l.others, metered.clock() as clk
            from metered.ledger l where l.scope = of_scope and not metered._in_cell()
            order by l.seq desc limit 1) t left join lateral (select base.seq, base.spent, base.refunded
                    from (select y.seq from metered.ledger y
                where y.scope = of_scope and y.epoch = t.epoch and y.at <= t.clk - win and (y.seq & 15 = 1 or y.kind = 'k')
                order by y.at desc, y.seq desc limit 1) mark,
            lateral (select y.seq, y.spent, y.refunded from metered.ledger y
                where y.scope = of_scope and y.seq between mark.seq and mark.seq + 15 and y.epoch = t.epoch and y.at <= t.clk - win
                order by y.seq desc limit 1) base) b on true
                where (t.held = 0 or t.seq & 15 > 1) and t.at <= t.clk and (t.next_due <= t.clk) is not true and t.lots_end is null and t.tallied is null and t.crossed is null and true
                    and coalesce(b.refunded, 0) = t.refunded and (b.seq > 1 or b.seq = t.seq or t.epoch = 0 and (t.seq <= 16 and b.seq is null
                        or (select l.seq from metered.ledger l where l.scope = of_scope and l.seq = 2) > 0)) and t.spent - coalesce(b.spent, 0) <= max_units - t.held - units
                on conflict do nothing
                returning y.seq, y.at, y.held, y.spent - units - coalesce(y.anchor_spent, 0) into e_seq, e_at, e_held, e_used;
            else
                insert into metered.ledger as y (seq, amount, at, spent, refunded, credited, held, epoch, kind, scope, next_due, operation_tenant, operation, note,
                    others, anchor_at, anchor_spent)
                select t.seq + 1, units, t.clk, t.spent + units, t.refunded, t.credited, t.held, t.epoch, 'c', of_scope, t.next_due, of_tenant,
                    of_id, note, int8smaller(t.others, t.seq), t.anchor_at, t.anchor_spent
                from (select l.seq, l.at, l.spent, l.refunded, l.credited, l.held, l.epoch, l.scope, l.next_due, l.anchor_at,
                l.anchor_spent, l.lots_end, l.crossed, l.tallied, l.others, metered.clock() as clk
            from metered.ledger l where l.scope = of_scope and not metered._in_cell()
            order by l.seq desc limit 1) t
                where (t.held = 0 or t.seq & 15 > 1) and t.at <= t.clk and (t.next_due <= t.clk) is not true and t.lots_end is null and t.tallied is null and t.crossed is null and true
                    and (max_units is null or win >= interval '0'
            and case when win = interval '0' then t.spent - t.refunded - t.credited
                else t.spent - case when t.anchor_at <= t.clk - win then t.anchor_spent else 0 end end <= max_units - t.held - units)
                on conflict do nothing
                returning y.seq, y.at, y.held, y.spent - units - y.refunded - y.credited into e_seq, e_at, e_held, e_used;
            end if;
        if e_seq is not null then
            return array_to_json(array[e_seq, metered._in_us(e_at), e_held, e_used]);
        end if;
    end if;
    return metered._charged_json(metered.charge(
        metered._as_charges(of_scope, key, units, max_units, win, note, whole), ahead, wait_ms, standing));
end
$$;

-- Claims the id of a command without a token and without charges to look at. Null: it is new, and
-- begun. Else begin_command's answer, whose arguments these are, or with raising an error, after which the
-- server skips the rest of the flush. Then the marker begins with a minus, and there is no guard.
create function metered.begin_command_plain(of_tenant text, of_id text, key bigint, issued timestamptz,
    max_future interval, timeout_ms int, marker text, wait_ms int, raising boolean) returns json
language plpgsql volatile
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set plan_cache_mode = force_generic_plan
as $$
declare
    begun   text;
    claimed record;
begin
    if greatest(octet_length(of_tenant), octet_length(of_id), octet_length(marker)) > 255
        or wait_ms > 3600000 then
        raise exception 'out of bounds: an argument of begin_command_plain' using errcode = '22023';
    end if;
    if metered._goes_short() and coalesce(current_setting('metered_tx.command', true), '') = ''
        and current_setting('transaction_isolation') = 'read committed' and metered._try_lock(key)
    then
        -- A statement of its own, whose snapshot is taken after the lock.
        select case
            when exists (select from metered.operations o where o.tenant = of_tenant and o.id = of_id)
                or issued <= (select h.at from metered.operations_horizon h where h.one)
                or issued > metered.clock() + max_future
                or not metered._on_linux() then null
            else set_config('metered_tx.command', marker, true)
                || case when timeout_ms is null then ''
                    else set_config('client_connection_check_interval', '100', true) end
            end into begun;
        if begun is not null then
            if timeout_ms > 0 then
                begun := set_config('statement_timeout', metered._shorter(current_setting('statement_timeout'), timeout_ms), true)
                || set_config('lock_timeout', metered._shorter(current_setting('lock_timeout'), timeout_ms), true)
                || set_config('idle_in_transaction_session_timeout',
                    metered._shorter(current_setting('idle_in_transaction_session_timeout'), timeout_ms), true);
            end if;
            execute case when raising then '' else     -- then nobody gets at the transaction
                'declare metered_command cursor with hold for select metered.block_commit()' end;
            return null;
        end if;
    end if;
    claimed := metered.begin_command(true, true, row(of_tenant, of_id, key, issued, max_future, timeout_ms,
        marker, false, false, null, null)::metered.new_command, null, '{}', interval '0', wait_ms);
    if claimed.status = 'new' then
        return null;
    elsif raising then
        raise exception 'the operation id is known' using errcode = 'MT016';
    end if;
    return json_build_object('status', claimed.status, 'fingerprint', encode(claimed.fingerprint, 'base64'),
        'result', encode(claimed.result, 'base64'), 'scopes', claimed.scopes, 'amounts', claimed.amounts, 'seqs', claimed.seqs,
        'ats', array(select metered._in_us(x) from unnest(claimed.ats) x), 'holds', claimed.holds,
        'at', metered._in_us(claimed.at), 'refusal', claimed.refusal);
end
$$;

-- Ends a command by complete_command, whose answer it returns as JSON, with times in microseconds.
create function metered._completed_json(command metered.new_command, of_fingerprint bytea, of_result bytea,
    charges metered.new_charge[], ahead interval, wait_ms int) returns json
language plpgsql volatile
as $$
declare
    whole record := metered.complete_command(command, of_fingerprint, of_result, null, charges, ahead, wait_ms, true);
begin
    return json_build_object('seqs', whole.seqs, 'ats', array(select metered._in_us(x) from unnest(whole.ats) x),
        'used', whole.used, 'held', whole.held, 'at', metered._in_us(whole.at), 'crossed', whole.crossed,
        'periods', array(select metered._in_us(x) from unnest(whole.periods) x));
end
$$;

-- Ends a command that has at most one charge of its own, as complete_command does with finishing: JSON,
-- the time of the record in microseconds and the array of charge_plain, or complete_command's answer as an object.
create function metered.complete_command_plain(of_tenant text, of_id text, marker text,
    of_fingerprint bytea, issued timestamptz, of_result bytea, name text, jobs bigint[], of_scope text,
    key bigint, units bigint, max_units bigint, win interval, note jsonb, whole text, standing boolean,
    ahead interval, wait_ms int) returns json
language plpgsql volatile
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set plan_cache_mode = force_generic_plan
as $$
declare
    done_at bigint;
    e_seq    bigint;        -- the entry that was appended, or null
    e_at     timestamptz;
    e_held   bigint;
    e_used   bigint;        -- units that counted before it
    command_cursor refcursor := 'metered_command';  -- CLOSE by a variable is not parsed anew
begin
    if greatest(octet_length(of_tenant), octet_length(of_id), octet_length(marker), octet_length(name), octet_length(of_scope)) > 255
        or octet_length(of_fingerprint) > 33
        or octet_length(of_result) > 1048576
        or array_lower(jobs, 1) <> 1
        or array_ndims(jobs) <> 1
        or array_position(jobs, null) is not null
        or cardinality(jobs) > 1000
        or pg_column_size(note) > 8196
        or pg_column_compression(note) is not null and octet_length(note::text) > 8192
        or octet_length(whole) > 2048
        or wait_ms > 3600000 then
        raise exception 'out of bounds: an argument of complete_command_plain' using errcode = '22023';
    end if;
    if metered._goes_short() and current_setting('metered_tx.command', true) = marker
        and (of_scope is null or metered._key_fits(key, of_scope) and current_setting('transaction_isolation') = 'read committed' and units between 1 and 9007199254740992 and (note is null or pg_column_size(note) <= 8192
                and pg_column_compression(note) is null and not note ? 'use') and (max_units is not null or metered._try_lock(key)))
    then
        if of_scope is not null then
            if metered._try_lock(key) is not true then
            perform metered._lock_all_scopes(array[of_scope], array[key], wait_ms);
        end if;
            if standing and win > interval '0' then
                insert into metered.ledger as y (seq, amount, at, spent, refunded, credited, held, epoch, kind, scope, next_due, operation_tenant, operation, note,
                    others, anchor_at, anchor_spent)
                select t.seq + 1, units, t.clk, t.spent + units, t.refunded, t.credited, t.held, t.epoch, 'c', of_scope, t.next_due, of_tenant,
                    of_id, note, int8smaller(t.others, t.seq), case when b.spent > 0 then t.clk - win end, nullif(b.spent, 0)
                from (select l.seq, l.at, l.spent, l.refunded, l.credited, l.held, l.epoch, l.scope, l.next_due, l.anchor_at,
                l.anchor_spent, l.lots_end, l.crossed, l.tallied, l.others, metered.clock() as clk
            from metered.ledger l where l.scope = of_scope and not metered._in_cell()
            order by l.seq desc limit 1) t left join lateral (select base.seq, base.spent, base.refunded
                    from (select y.seq from metered.ledger y
                where y.scope = of_scope and y.epoch = t.epoch and y.at <= t.clk - win and (y.seq & 15 = 1 or y.kind = 'k')
                order by y.at desc, y.seq desc limit 1) mark,
            lateral (select y.seq, y.spent, y.refunded from metered.ledger y
                where y.scope = of_scope and y.seq between mark.seq and mark.seq + 15 and y.epoch = t.epoch and y.at <= t.clk - win
                order by y.seq desc limit 1) base) b on true
                where (t.held = 0 or t.seq & 15 > 1) and t.at <= t.clk and (t.next_due <= t.clk) is not true and t.lots_end is null and t.tallied is null and t.crossed is null and true
                    and coalesce(b.refunded, 0) = t.refunded and (b.seq > 1 or b.seq = t.seq or t.epoch = 0 and (t.seq <= 16 and b.seq is null
                        or (select l.seq from metered.ledger l where l.scope = of_scope and l.seq = 2) > 0)) and t.spent - coalesce(b.spent, 0) <= max_units - t.held - units
                on conflict do nothing
                returning y.seq, y.at, y.held, y.spent - units - coalesce(y.anchor_spent, 0) into e_seq, e_at, e_held, e_used;
            else
                insert into metered.ledger as y (seq, amount, at, spent, refunded, credited, held, epoch, kind, scope, next_due, operation_tenant, operation, note,
                    others, anchor_at, anchor_spent)
                select t.seq + 1, units, t.clk, t.spent + units, t.refunded, t.credited, t.held, t.epoch, 'c', of_scope, t.next_due, of_tenant,
                    of_id, note, int8smaller(t.others, t.seq), t.anchor_at, t.anchor_spent
                from (select l.seq, l.at, l.spent, l.refunded, l.credited, l.held, l.epoch, l.scope, l.next_due, l.anchor_at,
                l.anchor_spent, l.lots_end, l.crossed, l.tallied, l.others, metered.clock() as clk
            from metered.ledger l where l.scope = of_scope and not metered._in_cell()
            order by l.seq desc limit 1) t
                where (t.held = 0 or t.seq & 15 > 1) and t.at <= t.clk and (t.next_due <= t.clk) is not true and t.lots_end is null and t.tallied is null and t.crossed is null and true
                    and (max_units is null or win >= interval '0'
            and case when win = interval '0' then t.spent - t.refunded - t.credited
                else t.spent - case when t.anchor_at <= t.clk - win then t.anchor_spent else 0 end end <= max_units - t.held - units)
                on conflict do nothing
                returning y.seq, y.at, y.held, y.spent - units - y.refunded - y.credited into e_seq, e_at, e_held, e_used;
            end if;
        end if;
        if of_scope is null or e_seq is not null then
            insert into metered.operations as o (tenant, id, fingerprint, issued_at, at, result, scopes, amounts, seqs, ats, holds, name, jobs)
        select of_tenant, of_id, of_fingerprint, issued, metered.clock(), of_result, case when of_scope is not null then array[of_scope] end, case when of_scope is not null then array[units] end, case when of_scope is not null then array[e_seq] end, case when of_scope is not null then array[e_at] end, string_to_array(nullif(current_setting('metered_tx.holds', true), ''), chr(30)), name, jobs
        where true
        on conflict do nothing
        returning metered._in_us(o.at) into done_at;
            if done_at is null then
                perform metered._recorded_meanwhile();
            end if;
            if left(set_config('metered_tx.command', '', true) || set_config('metered_tx.holds', '', true)
                || marker, 1) <> '-'
            then
                close command_cursor;
            end if;
            return array_to_json(case when of_scope is null then array[done_at] else array[done_at, e_seq, metered._in_us(e_at), e_held, e_used] end);
        end if;
    end if;
    return metered._completed_json(row(of_tenant, of_id, null, issued, null, null, marker, standing, false,
        name, jobs)::metered.new_command, of_fingerprint, of_result,
        case when of_scope is null then '{}'
            else metered._as_charges(of_scope, key, units, max_units, win, note, whole) end, ahead, wait_ms);
end
$$;

-- A whole command that does nothing but its one charge: the answer of begin_command_plain, if that is
-- not null, or else that of complete_command_plain. The short way needs no guard against a COMMIT,
-- since nobody gets at the transaction before it is complete.
create function metered.run_command_plain(of_tenant text, of_id text, id_key bigint,
    of_fingerprint bytea, issued timestamptz, max_future interval, of_result bytea, name text,
    of_scope text, key bigint, units bigint, max_units bigint, win interval, note jsonb,
    whole text, standing boolean, ahead interval, wait_ms int) returns json
language plpgsql volatile
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set plan_cache_mode = force_generic_plan
as $$
declare
    done_at  bigint;
    answer   json;
    e_seq    bigint;        -- the entry that was appended, or null
    e_at     timestamptz;
    e_held   bigint;
    e_used   bigint;        -- units that counted before it
begin
    if greatest(octet_length(of_tenant), octet_length(of_id), octet_length(name), octet_length(of_scope)) > 255
        or octet_length(of_fingerprint) > 33
        or octet_length(of_result) > 1048576
        or pg_column_size(note) > 8196
        or pg_column_compression(note) is not null and octet_length(note::text) > 8192
        or octet_length(whole) > 2048
        or wait_ms > 3600000 then
        raise exception 'out of bounds: an argument of run_command_plain' using errcode = '22023';
    end if;
    -- The statements see what was committed before the locks were free: each has a snapshot of its own.
    if metered._goes_short() and coalesce(current_setting('metered_tx.command', true), '') = ''
        and current_setting('transaction_isolation') = 'read committed' and metered._try_lock(id_key)
        and (of_scope is null or metered._key_fits(key, of_scope) and current_setting('transaction_isolation') = 'read committed' and units between 1 and 9007199254740992 and (note is null or pg_column_size(note) <= 8192
                and pg_column_compression(note) is null and not note ? 'use') and (max_units is not null or metered._try_lock(key)))
    then
        if of_scope is null then
            insert into metered.operations as o (tenant, id, fingerprint, issued_at, at, result, scopes, amounts, seqs, ats, holds, name, jobs)
        select of_tenant, of_id, of_fingerprint, issued, metered.clock(), of_result, null, null, null, null, null, name, null
        where (exists (select from metered.operations o where o.tenant = of_tenant and o.id = of_id) or issued <= (select h.at from metered.operations_horizon h where h.one) or issued > metered.clock() + max_future) is not true
        on conflict do nothing
        returning metered._in_us(o.at) into done_at;
            if done_at is not null then
                return json_build_array(done_at);
            end if;
        else
            if metered._try_lock(key) is not true then
                perform from metered.operations o where false;
                perform metered._lock_all_scopes(array[of_scope], array[key], wait_ms);
            end if;
            if standing and win > interval '0' then
                insert into metered.ledger as y (seq, amount, at, spent, refunded, credited, held, epoch, kind, scope, next_due, operation_tenant, operation, note,
                    others, anchor_at, anchor_spent)
                select t.seq + 1, units, t.clk, t.spent + units, t.refunded, t.credited, t.held, t.epoch, 'c', of_scope, t.next_due, of_tenant,
                    of_id, note, int8smaller(t.others, t.seq), case when b.spent > 0 then t.clk - win end, nullif(b.spent, 0)
                from (select l.seq, l.at, l.spent, l.refunded, l.credited, l.held, l.epoch, l.scope, l.next_due, l.anchor_at,
                l.anchor_spent, l.lots_end, l.crossed, l.tallied, l.others, metered.clock() as clk
            from metered.ledger l where l.scope = of_scope and not metered._in_cell()
            order by l.seq desc limit 1) t left join lateral (select base.seq, base.spent, base.refunded
                    from (select y.seq from metered.ledger y
                where y.scope = of_scope and y.epoch = t.epoch and y.at <= t.clk - win and (y.seq & 15 = 1 or y.kind = 'k')
                order by y.at desc, y.seq desc limit 1) mark,
            lateral (select y.seq, y.spent, y.refunded from metered.ledger y
                where y.scope = of_scope and y.seq between mark.seq and mark.seq + 15 and y.epoch = t.epoch and y.at <= t.clk - win
                order by y.seq desc limit 1) base) b on true
                where (t.held = 0 or t.seq & 15 > 1) and t.at <= t.clk and (t.next_due <= t.clk) is not true and t.lots_end is null and t.tallied is null and t.crossed is null and (exists (select from metered.operations o where o.tenant = of_tenant and o.id = of_id) or issued <= (select h.at from metered.operations_horizon h where h.one) or issued > metered.clock() + max_future) is not true
                    and coalesce(b.refunded, 0) = t.refunded and (b.seq > 1 or b.seq = t.seq or t.epoch = 0 and (t.seq <= 16 and b.seq is null
                        or (select l.seq from metered.ledger l where l.scope = of_scope and l.seq = 2) > 0)) and t.spent - coalesce(b.spent, 0) <= max_units - t.held - units
                on conflict do nothing
                returning y.seq, y.at, y.held, y.spent - units - coalesce(y.anchor_spent, 0) into e_seq, e_at, e_held, e_used;
            else
                insert into metered.ledger as y (seq, amount, at, spent, refunded, credited, held, epoch, kind, scope, next_due, operation_tenant, operation, note,
                    others, anchor_at, anchor_spent)
                select t.seq + 1, units, t.clk, t.spent + units, t.refunded, t.credited, t.held, t.epoch, 'c', of_scope, t.next_due, of_tenant,
                    of_id, note, int8smaller(t.others, t.seq), t.anchor_at, t.anchor_spent
                from (select l.seq, l.at, l.spent, l.refunded, l.credited, l.held, l.epoch, l.scope, l.next_due, l.anchor_at,
                l.anchor_spent, l.lots_end, l.crossed, l.tallied, l.others, metered.clock() as clk
            from metered.ledger l where l.scope = of_scope and not metered._in_cell()
            order by l.seq desc limit 1) t
                where (t.held = 0 or t.seq & 15 > 1) and t.at <= t.clk and (t.next_due <= t.clk) is not true and t.lots_end is null and t.tallied is null and t.crossed is null and (exists (select from metered.operations o where o.tenant = of_tenant and o.id = of_id) or issued <= (select h.at from metered.operations_horizon h where h.one) or issued > metered.clock() + max_future) is not true
                    and (max_units is null or win >= interval '0'
            and case when win = interval '0' then t.spent - t.refunded - t.credited
                else t.spent - case when t.anchor_at <= t.clk - win then t.anchor_spent else 0 end end <= max_units - t.held - units)
                on conflict do nothing
                returning y.seq, y.at, y.held, y.spent - units - y.refunded - y.credited into e_seq, e_at, e_held, e_used;
            end if;
            if e_seq is not null then
                insert into metered.operations as o (tenant, id, fingerprint, issued_at, at, result, scopes, amounts, seqs, ats, holds, name, jobs)
        select of_tenant, of_id, of_fingerprint, issued, metered.clock(), of_result, array[of_scope], array[units], array[e_seq], array[e_at], null, name, null
        where true
        on conflict do nothing
        returning metered._in_us(o.at) into done_at;
                if done_at is null then
                    perform metered._recorded_meanwhile();
                end if;
                return array_to_json(array[done_at, e_seq, metered._in_us(e_at), e_held, e_used]);
            end if;
        end if;
    end if;
    answer := metered.begin_command_plain(of_tenant, of_id, id_key, issued, max_future, null, 'whole', wait_ms, false);
    return coalesce(answer, metered.complete_command_plain(of_tenant, of_id, 'whole', of_fingerprint, issued,
        of_result, name, null, of_scope, key, units, max_units, win, note, whole, standing, ahead,
        wait_ms));
end
$$;

-- A whole command that does nothing but its charges, of any kind, as run_command_plain does it, by the
-- full functions.
create function metered.run_command(command metered.new_command, of_fingerprint bytea, of_result bytea,
    charges metered.new_charge[], ahead interval, wait_ms int) returns json
language plpgsql volatile
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set plan_cache_mode = force_generic_plan
as $$
declare
    answer json;
begin
    if greatest(octet_length(command.tenant), octet_length(command.id), octet_length(command.marker), octet_length(command.name)) > 255
        or array_lower(command.jobs, 1) <> 1
        or array_ndims(command.jobs) <> 1
        or array_position(command.jobs, null) is not null
        or cardinality(command.jobs) > 1000
        or octet_length(of_fingerprint) > 33
        or octet_length(of_result) > 1048576
        or array_lower(charges, 1) <> 1
        or array_ndims(charges) <> 1
        or array_position(charges, null) is not null
        or cardinality(charges) > 64
        or pg_column_size(charges) > 1400 and not metered._fits(charges)
        or wait_ms > 3600000 then
        raise exception 'out of bounds: an argument of run_command' using errcode = '22023';
    end if;
    answer := metered.begin_command_plain(command.tenant, command.id, command.key, command.issued_at,
        command.max_future, command.timeout_ms, command.marker, wait_ms, false);
    return coalesce(answer, metered._completed_json(command, of_fingerprint, of_result, charges, ahead, wait_ms));
end
$$;

-- The short way (see plain.sql) of two charges: one with a limit, such as a user's own, and one
-- without, such as the total of a channel that all users share, if that is a tally (tallies.sql). As
-- there, these functions decide nothing but the usual case, and otherwise write nothing and go on
-- with the full function.

-- Both charges, as the full functions take them, in the order of their caller.
create function metered._with_total(of_scope text, key bigint, units bigint, max_units bigint,
    win interval, note jsonb, whole text, total_scope text, total_key bigint, total_units bigint,
    total_note jsonb, total_first boolean)
returns metered.new_charge[]
language sql stable
as $$
    select case when total_first
        then metered._as_charges(total_scope, total_key, total_units, null, null, total_note, null)
            || metered._as_charges(of_scope, key, units, max_units, win, note, whole)
        else metered._as_charges(of_scope, key, units, max_units, win, note, whole)
            || metered._as_charges(total_scope, total_key, total_units, null, null, total_note, null) end
$$;

-- Two charges without a command, as charge makes them: JSON, the array of charge_plain and the seq
-- of the tally, which is less than 0 and has its time, or charge's answer as an object.
create function metered.charge_total(of_scope text, key bigint, units bigint, max_units bigint,
    win interval, note jsonb, whole text, standing boolean, total_scope text, total_key bigint,
    total_units bigint, total_note jsonb, total_first boolean, ahead interval, wait_ms int) returns json
language plpgsql volatile
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set plan_cache_mode = force_generic_plan
as $$
declare
    of_tenant text;     -- of no command
    of_id   text;
    e_seq    bigint;        -- the entry that was appended, or null
    e_at     timestamptz;
    e_held   bigint;
    e_used   bigint;        -- units that counted before it
    t_lock   bigint := metered._tally_key(total_scope);
    t_at     timestamptz;   -- of the tally that was written, or null
begin
    if greatest(octet_length(of_scope), octet_length(total_scope)) > 255
        or pg_column_size(note) > 8196
        or pg_column_compression(note) is not null and octet_length(note::text) > 8192
        or octet_length(whole) > 2048
        or pg_column_size(total_note) > 8196
        or pg_column_compression(total_note) is not null and octet_length(total_note::text) > 8192
        or wait_ms > 3600000 then
        raise exception 'out of bounds: an argument of charge_total' using errcode = '22023';
    end if;
    if metered._goes_short() then
        if total_units between 1 and 1099511627776 and coalesce(pg_column_size(total_note) <= 8192
            and pg_column_compression(total_note) is null and not total_note ? 'use', true) and metered._key_fits(key, of_scope) and current_setting('transaction_isolation') = 'read committed' and units between 1 and 9007199254740992 and (note is null or pg_column_size(note) <= 8192
                and pg_column_compression(note) is null and not note ? 'use')
            and pg_try_advisory_xact_lock_shared(t_lock)
        then
            insert into metered.tallies as y (at, amount, scope, operation_tenant, operation, hold, note)
            select t.clk, total_units, total_scope, of_tenant, of_id, null, total_note
            from (select l.at, l.spent, l.tallied, l.lots_end, l.next_due, metered.clock() as clk
                from metered.ledger l where l.scope = total_scope order by l.seq desc limit 1) t
            where t.tallied and t.lots_end is null and t.next_due is distinct from '-infinity'
            and t.spent < 4611686018427387904
            and (t.next_due <= t.clk and metered._minimum_is_due(total_scope, t.next_due, t.clk)) is not true and t.at < t.clk and pg_try_advisory_xact_lock(t_lock # metered._in_us(t.clk))
            on conflict do nothing
            returning y.at into t_at;
            if t_at is not null then
                if metered._try_lock(key) is not true then perform metered._lock_all_scopes(array[of_scope], array[key], wait_ms); end if;
                if standing and win > interval '0' then
                insert into metered.ledger as y (seq, amount, at, spent, refunded, credited, held, epoch, kind, scope, next_due, operation_tenant, operation, note,
                    others, anchor_at, anchor_spent)
                select t.seq + 1, units, t.clk, t.spent + units, t.refunded, t.credited, t.held, t.epoch, 'c', of_scope, t.next_due, of_tenant,
                    of_id, note, int8smaller(t.others, t.seq), case when b.spent > 0 then t.clk - win end, nullif(b.spent, 0)
                from (select l.seq, l.at, l.spent, l.refunded, l.credited, l.held, l.epoch, l.scope, l.next_due, l.anchor_at,
                l.anchor_spent, l.lots_end, l.crossed, l.tallied, l.others, metered.clock() as clk
            from metered.ledger l where l.scope = of_scope and not metered._in_cell()
            order by l.seq desc limit 1) t left join lateral (select base.seq, base.spent, base.refunded
                    from (select y.seq from metered.ledger y
                where y.scope = of_scope and y.epoch = t.epoch and y.at <= t.clk - win and (y.seq & 15 = 1 or y.kind = 'k')
                order by y.at desc, y.seq desc limit 1) mark,
            lateral (select y.seq, y.spent, y.refunded from metered.ledger y
                where y.scope = of_scope and y.seq between mark.seq and mark.seq + 15 and y.epoch = t.epoch and y.at <= t.clk - win
                order by y.seq desc limit 1) base) b on true
                where (t.held = 0 or t.seq & 15 > 1) and t.at <= t.clk and (t.next_due <= t.clk) is not true and t.lots_end is null and t.tallied is null and t.crossed is null and true
                    and coalesce(b.refunded, 0) = t.refunded and (b.seq > 1 or b.seq = t.seq or t.epoch = 0 and (t.seq <= 16 and b.seq is null
                        or (select l.seq from metered.ledger l where l.scope = of_scope and l.seq = 2) > 0)) and t.spent - coalesce(b.spent, 0) <= max_units - t.held - units
                on conflict do nothing
                returning y.seq, y.at, y.held, y.spent - units - coalesce(y.anchor_spent, 0) into e_seq, e_at, e_held, e_used;
            else
                insert into metered.ledger as y (seq, amount, at, spent, refunded, credited, held, epoch, kind, scope, next_due, operation_tenant, operation, note,
                    others, anchor_at, anchor_spent)
                select t.seq + 1, units, t.clk, t.spent + units, t.refunded, t.credited, t.held, t.epoch, 'c', of_scope, t.next_due, of_tenant,
                    of_id, note, int8smaller(t.others, t.seq), t.anchor_at, t.anchor_spent
                from (select l.seq, l.at, l.spent, l.refunded, l.credited, l.held, l.epoch, l.scope, l.next_due, l.anchor_at,
                l.anchor_spent, l.lots_end, l.crossed, l.tallied, l.others, metered.clock() as clk
            from metered.ledger l where l.scope = of_scope and not metered._in_cell()
            order by l.seq desc limit 1) t
                where (t.held = 0 or t.seq & 15 > 1) and t.at <= t.clk and (t.next_due <= t.clk) is not true and t.lots_end is null and t.tallied is null and t.crossed is null and true
                    and (max_units is null or win >= interval '0'
            and case when win = interval '0' then t.spent - t.refunded - t.credited
                else t.spent - case when t.anchor_at <= t.clk - win then t.anchor_spent else 0 end end <= max_units - t.held - units)
                on conflict do nothing
                returning y.seq, y.at, y.held, y.spent - units - y.refunded - y.credited into e_seq, e_at, e_held, e_used;
            end if;
                if e_seq is null then
                    delete from metered.tallies y where y.scope = total_scope and y.at = t_at;
                elsif metered._in_us(t_at) & 31 = 0 and metered._try_lock(metered._scope_key(total_scope)) then
                    perform metered._entry_for_write(total_scope);
                end if;
            end if;
        end if;
        if e_seq is not null then
            return array_to_json(array[e_seq, metered._in_us(e_at), e_held, e_used, -metered._in_us(t_at)]);
        end if;
    end if;
    return metered._charged_json(metered.charge(metered._with_total(of_scope, key, units, max_units,
        win, note, whole, total_scope, total_key, total_units, total_note, total_first), ahead, wait_ms, standing));
end
$$;

-- Ends a command that has two such charges, as complete_command_plain ends one with one: JSON, the
-- time of the record in microseconds and the array of charge_total, or complete_command's answer as
-- an object.
create function metered.complete_command_total(of_tenant text, of_id text, marker text,
    of_fingerprint bytea, issued timestamptz, of_result bytea, name text, jobs bigint[],
    of_scope text, key bigint, units bigint, max_units bigint, win interval, note jsonb,
    whole text, standing boolean,
    total_scope text, total_key bigint, total_units bigint, total_note jsonb, total_first boolean,
    ahead interval, wait_ms int) returns json
language plpgsql volatile
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set plan_cache_mode = force_generic_plan
as $$
declare
    done_at bigint;
    e_seq    bigint;        -- the entry that was appended, or null
    e_at     timestamptz;
    e_held   bigint;
    e_used   bigint;        -- units that counted before it
    t_lock   bigint := metered._tally_key(total_scope);
    t_at     timestamptz;   -- of the tally that was written, or null
    command_cursor refcursor := 'metered_command';  -- CLOSE by a variable is not parsed anew
begin
    if greatest(octet_length(of_tenant), octet_length(of_id), octet_length(marker), octet_length(name), octet_length(of_scope), octet_length(total_scope)) > 255
        or octet_length(of_fingerprint) > 33
        or octet_length(of_result) > 1048576
        or array_lower(jobs, 1) <> 1
        or array_ndims(jobs) <> 1
        or array_position(jobs, null) is not null
        or cardinality(jobs) > 1000
        or pg_column_size(note) > 8196
        or pg_column_compression(note) is not null and octet_length(note::text) > 8192
        or octet_length(whole) > 2048
        or pg_column_size(total_note) > 8196
        or pg_column_compression(total_note) is not null and octet_length(total_note::text) > 8192
        or wait_ms > 3600000 then
        raise exception 'out of bounds: an argument of complete_command_total' using errcode = '22023';
    end if;
    if metered._goes_short() and current_setting('metered_tx.command', true) = marker then
        if total_units between 1 and 1099511627776 and coalesce(pg_column_size(total_note) <= 8192
            and pg_column_compression(total_note) is null and not total_note ? 'use', true) and metered._key_fits(key, of_scope) and current_setting('transaction_isolation') = 'read committed' and units between 1 and 9007199254740992 and (note is null or pg_column_size(note) <= 8192
                and pg_column_compression(note) is null and not note ? 'use')
            and pg_try_advisory_xact_lock_shared(t_lock)
        then
            insert into metered.tallies as y (at, amount, scope, operation_tenant, operation, hold, note)
            select t.clk, total_units, total_scope, of_tenant, of_id, null, total_note
            from (select l.at, l.spent, l.tallied, l.lots_end, l.next_due, metered.clock() as clk
                from metered.ledger l where l.scope = total_scope order by l.seq desc limit 1) t
            where t.tallied and t.lots_end is null and t.next_due is distinct from '-infinity'
            and t.spent < 4611686018427387904
            and (t.next_due <= t.clk and metered._minimum_is_due(total_scope, t.next_due, t.clk)) is not true and t.at < t.clk and pg_try_advisory_xact_lock(t_lock # metered._in_us(t.clk))
            on conflict do nothing
            returning y.at into t_at;
            if t_at is not null then
                if metered._try_lock(key) is not true then perform metered._lock_all_scopes(array[of_scope], array[key], wait_ms); end if;
                if standing and win > interval '0' then
                insert into metered.ledger as y (seq, amount, at, spent, refunded, credited, held, epoch, kind, scope, next_due, operation_tenant, operation, note,
                    others, anchor_at, anchor_spent)
                select t.seq + 1, units, t.clk, t.spent + units, t.refunded, t.credited, t.held, t.epoch, 'c', of_scope, t.next_due, of_tenant,
                    of_id, note, int8smaller(t.others, t.seq), case when b.spent > 0 then t.clk - win end, nullif(b.spent, 0)
                from (select l.seq, l.at, l.spent, l.refunded, l.credited, l.held, l.epoch, l.scope, l.next_due, l.anchor_at,
                l.anchor_spent, l.lots_end, l.crossed, l.tallied, l.others, metered.clock() as clk
            from metered.ledger l where l.scope = of_scope and not metered._in_cell()
            order by l.seq desc limit 1) t left join lateral (select base.seq, base.spent, base.refunded
                    from (select y.seq from metered.ledger y
                where y.scope = of_scope and y.epoch = t.epoch and y.at <= t.clk - win and (y.seq & 15 = 1 or y.kind = 'k')
                order by y.at desc, y.seq desc limit 1) mark,
            lateral (select y.seq, y.spent, y.refunded from metered.ledger y
                where y.scope = of_scope and y.seq between mark.seq and mark.seq + 15 and y.epoch = t.epoch and y.at <= t.clk - win
                order by y.seq desc limit 1) base) b on true
                where (t.held = 0 or t.seq & 15 > 1) and t.at <= t.clk and (t.next_due <= t.clk) is not true and t.lots_end is null and t.tallied is null and t.crossed is null and true
                    and coalesce(b.refunded, 0) = t.refunded and (b.seq > 1 or b.seq = t.seq or t.epoch = 0 and (t.seq <= 16 and b.seq is null
                        or (select l.seq from metered.ledger l where l.scope = of_scope and l.seq = 2) > 0)) and t.spent - coalesce(b.spent, 0) <= max_units - t.held - units
                on conflict do nothing
                returning y.seq, y.at, y.held, y.spent - units - coalesce(y.anchor_spent, 0) into e_seq, e_at, e_held, e_used;
            else
                insert into metered.ledger as y (seq, amount, at, spent, refunded, credited, held, epoch, kind, scope, next_due, operation_tenant, operation, note,
                    others, anchor_at, anchor_spent)
                select t.seq + 1, units, t.clk, t.spent + units, t.refunded, t.credited, t.held, t.epoch, 'c', of_scope, t.next_due, of_tenant,
                    of_id, note, int8smaller(t.others, t.seq), t.anchor_at, t.anchor_spent
                from (select l.seq, l.at, l.spent, l.refunded, l.credited, l.held, l.epoch, l.scope, l.next_due, l.anchor_at,
                l.anchor_spent, l.lots_end, l.crossed, l.tallied, l.others, metered.clock() as clk
            from metered.ledger l where l.scope = of_scope and not metered._in_cell()
            order by l.seq desc limit 1) t
                where (t.held = 0 or t.seq & 15 > 1) and t.at <= t.clk and (t.next_due <= t.clk) is not true and t.lots_end is null and t.tallied is null and t.crossed is null and true
                    and (max_units is null or win >= interval '0'
            and case when win = interval '0' then t.spent - t.refunded - t.credited
                else t.spent - case when t.anchor_at <= t.clk - win then t.anchor_spent else 0 end end <= max_units - t.held - units)
                on conflict do nothing
                returning y.seq, y.at, y.held, y.spent - units - y.refunded - y.credited into e_seq, e_at, e_held, e_used;
            end if;
                if e_seq is null then
                    delete from metered.tallies y where y.scope = total_scope and y.at = t_at;
                elsif metered._in_us(t_at) & 31 = 0 and metered._try_lock(metered._scope_key(total_scope)) then
                    perform metered._entry_for_write(total_scope);
                end if;
            end if;
        end if;
        if e_seq is not null then
            insert into metered.operations as o (tenant, id, fingerprint, issued_at, at, result, scopes, amounts, seqs, ats, holds, name, jobs)
        select of_tenant, of_id, of_fingerprint, issued, metered.clock(), of_result, case when total_first then array[total_scope, of_scope] else array[of_scope, total_scope] end, case when total_first then array[total_units, units] else array[units, total_units] end, case when total_first then array[-metered._in_us(t_at), e_seq] else array[e_seq, -metered._in_us(t_at)] end, case when total_first then array[t_at, e_at] else array[e_at, t_at] end, string_to_array(nullif(current_setting('metered_tx.holds', true), ''), chr(30)), name, jobs
        where true
        on conflict do nothing
        returning metered._in_us(o.at) into done_at;
            if done_at is null then
                perform metered._recorded_meanwhile();
            end if;
            if left(set_config('metered_tx.command', '', true) || set_config('metered_tx.holds', '', true)
                || marker, 1) <> '-'
            then
                close command_cursor;
            end if;
            return array_to_json(array[done_at, e_seq, metered._in_us(e_at), e_held, e_used, -metered._in_us(t_at)]);
        end if;
    end if;
    return metered._completed_json(row(of_tenant, of_id, null, issued, null, null, marker, standing,
        false, name, jobs)::metered.new_command, of_fingerprint, of_result, metered._with_total(of_scope,
        key, units, max_units, win, note, whole, total_scope, total_key, total_units, total_note, total_first),
        ahead, wait_ms);
end
$$;

-- A whole command that does nothing but two such charges, as run_command_plain does it.
create function metered.run_command_total(of_tenant text, of_id text, id_key bigint,
    of_fingerprint bytea, issued timestamptz, max_future interval, of_result bytea, name text,
    of_scope text, key bigint, units bigint, max_units bigint, win interval, note jsonb,
    whole text, standing boolean, total_scope text, total_key bigint, total_units bigint, total_note jsonb, total_first boolean,
    ahead interval, wait_ms int) returns json
language plpgsql volatile
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set plan_cache_mode = force_generic_plan
as $$
declare
    done_at  bigint;
    answer   json;
    e_seq    bigint;        -- the entry that was appended, or null
    e_at     timestamptz;
    e_held   bigint;
    e_used   bigint;        -- units that counted before it
    t_lock   bigint := metered._tally_key(total_scope);
    t_at     timestamptz;   -- of the tally that was written, or null
begin
    if greatest(octet_length(of_tenant), octet_length(of_id), octet_length(name), octet_length(of_scope), octet_length(total_scope)) > 255
        or octet_length(of_fingerprint) > 33
        or octet_length(of_result) > 1048576
        or pg_column_size(note) > 8196
        or pg_column_compression(note) is not null and octet_length(note::text) > 8192
        or octet_length(whole) > 2048
        or pg_column_size(total_note) > 8196
        or pg_column_compression(total_note) is not null and octet_length(total_note::text) > 8192
        or wait_ms > 3600000 then
        raise exception 'out of bounds: an argument of run_command_total' using errcode = '22023';
    end if;
    if metered._goes_short() and coalesce(current_setting('metered_tx.command', true), '') = ''
        and metered._try_lock(id_key)
    then
        if total_units between 1 and 1099511627776 and coalesce(pg_column_size(total_note) <= 8192
            and pg_column_compression(total_note) is null and not total_note ? 'use', true) and metered._key_fits(key, of_scope) and current_setting('transaction_isolation') = 'read committed' and units between 1 and 9007199254740992 and (note is null or pg_column_size(note) <= 8192
                and pg_column_compression(note) is null and not note ? 'use')
            and pg_try_advisory_xact_lock_shared(t_lock)
        then
            insert into metered.tallies as y (at, amount, scope, operation_tenant, operation, hold, note)
            select t.clk, total_units, total_scope, of_tenant, of_id, null, total_note
            from (select l.at, l.spent, l.tallied, l.lots_end, l.next_due, metered.clock() as clk
                from metered.ledger l where l.scope = total_scope order by l.seq desc limit 1) t
            where t.tallied and t.lots_end is null and t.next_due is distinct from '-infinity'
            and t.spent < 4611686018427387904
            and (t.next_due <= t.clk and metered._minimum_is_due(total_scope, t.next_due, t.clk)) is not true and t.at < t.clk and pg_try_advisory_xact_lock(t_lock # metered._in_us(t.clk))
            on conflict do nothing
            returning y.at into t_at;
            if t_at is not null then
                if metered._try_lock(key) is not true then perform from metered.operations o where false; perform metered._lock_all_scopes(array[of_scope], array[key], wait_ms); end if;
                if standing and win > interval '0' then
                insert into metered.ledger as y (seq, amount, at, spent, refunded, credited, held, epoch, kind, scope, next_due, operation_tenant, operation, note,
                    others, anchor_at, anchor_spent)
                select t.seq + 1, units, t.clk, t.spent + units, t.refunded, t.credited, t.held, t.epoch, 'c', of_scope, t.next_due, of_tenant,
                    of_id, note, int8smaller(t.others, t.seq), case when b.spent > 0 then t.clk - win end, nullif(b.spent, 0)
                from (select l.seq, l.at, l.spent, l.refunded, l.credited, l.held, l.epoch, l.scope, l.next_due, l.anchor_at,
                l.anchor_spent, l.lots_end, l.crossed, l.tallied, l.others, metered.clock() as clk
            from metered.ledger l where l.scope = of_scope and not metered._in_cell()
            order by l.seq desc limit 1) t left join lateral (select base.seq, base.spent, base.refunded
                    from (select y.seq from metered.ledger y
                where y.scope = of_scope and y.epoch = t.epoch and y.at <= t.clk - win and (y.seq & 15 = 1 or y.kind = 'k')
                order by y.at desc, y.seq desc limit 1) mark,
            lateral (select y.seq, y.spent, y.refunded from metered.ledger y
                where y.scope = of_scope and y.seq between mark.seq and mark.seq + 15 and y.epoch = t.epoch and y.at <= t.clk - win
                order by y.seq desc limit 1) base) b on true
                where (t.held = 0 or t.seq & 15 > 1) and t.at <= t.clk and (t.next_due <= t.clk) is not true and t.lots_end is null and t.tallied is null and t.crossed is null and (exists (select from metered.operations o where o.tenant = of_tenant and o.id = of_id) or issued <= (select h.at from metered.operations_horizon h where h.one) or issued > metered.clock() + max_future) is not true
                    and coalesce(b.refunded, 0) = t.refunded and (b.seq > 1 or b.seq = t.seq or t.epoch = 0 and (t.seq <= 16 and b.seq is null
                        or (select l.seq from metered.ledger l where l.scope = of_scope and l.seq = 2) > 0)) and t.spent - coalesce(b.spent, 0) <= max_units - t.held - units
                on conflict do nothing
                returning y.seq, y.at, y.held, y.spent - units - coalesce(y.anchor_spent, 0) into e_seq, e_at, e_held, e_used;
            else
                insert into metered.ledger as y (seq, amount, at, spent, refunded, credited, held, epoch, kind, scope, next_due, operation_tenant, operation, note,
                    others, anchor_at, anchor_spent)
                select t.seq + 1, units, t.clk, t.spent + units, t.refunded, t.credited, t.held, t.epoch, 'c', of_scope, t.next_due, of_tenant,
                    of_id, note, int8smaller(t.others, t.seq), t.anchor_at, t.anchor_spent
                from (select l.seq, l.at, l.spent, l.refunded, l.credited, l.held, l.epoch, l.scope, l.next_due, l.anchor_at,
                l.anchor_spent, l.lots_end, l.crossed, l.tallied, l.others, metered.clock() as clk
            from metered.ledger l where l.scope = of_scope and not metered._in_cell()
            order by l.seq desc limit 1) t
                where (t.held = 0 or t.seq & 15 > 1) and t.at <= t.clk and (t.next_due <= t.clk) is not true and t.lots_end is null and t.tallied is null and t.crossed is null and (exists (select from metered.operations o where o.tenant = of_tenant and o.id = of_id) or issued <= (select h.at from metered.operations_horizon h where h.one) or issued > metered.clock() + max_future) is not true
                    and (max_units is null or win >= interval '0'
            and case when win = interval '0' then t.spent - t.refunded - t.credited
                else t.spent - case when t.anchor_at <= t.clk - win then t.anchor_spent else 0 end end <= max_units - t.held - units)
                on conflict do nothing
                returning y.seq, y.at, y.held, y.spent - units - y.refunded - y.credited into e_seq, e_at, e_held, e_used;
            end if;
                if e_seq is null then
                    delete from metered.tallies y where y.scope = total_scope and y.at = t_at;
                elsif metered._in_us(t_at) & 31 = 0 and metered._try_lock(metered._scope_key(total_scope)) then
                    perform metered._entry_for_write(total_scope);
                end if;
            end if;
        end if;
        if e_seq is not null then
            insert into metered.operations as o (tenant, id, fingerprint, issued_at, at, result, scopes, amounts, seqs, ats, holds, name, jobs)
        select of_tenant, of_id, of_fingerprint, issued, metered.clock(), of_result, case when total_first then array[total_scope, of_scope] else array[of_scope, total_scope] end, case when total_first then array[total_units, units] else array[units, total_units] end, case when total_first then array[-metered._in_us(t_at), e_seq] else array[e_seq, -metered._in_us(t_at)] end, case when total_first then array[t_at, e_at] else array[e_at, t_at] end, null, name, null
        where true
        on conflict do nothing
        returning metered._in_us(o.at) into done_at;
            if done_at is null then
                perform metered._recorded_meanwhile();
            end if;
            return array_to_json(array[done_at, e_seq, metered._in_us(e_at), e_held, e_used, -metered._in_us(t_at)]);
        end if;
    end if;
    answer := metered.begin_command_plain(of_tenant, of_id, id_key, issued, max_future, null, 'whole',
        wait_ms, false);
    return coalesce(answer, metered.complete_command_total(of_tenant, of_id, 'whole', of_fingerprint,
        issued, of_result, name, null, of_scope, key, units, max_units, win, note, whole, standing,
        total_scope, total_key, total_units, total_note, total_first, ahead, wait_ms));
end
$$;

-- Opens a session of an operation: places its hold, unless the operation is on record, or another session of it is open.
-- The id of a session's hold is that of its operation, as a digest in 41 characters, and some of its own. status as place has it, or open (this
-- very session was opened before, and its hold is stored), replay (the operation is on record), retired and future, as begin_command has them,
-- running (another session is open, until deadline, as seen at placed_at) or busy (a session of another command is open).
--
-- The operation's lock comes first, as in a command. The transaction must see commits that came while it waited for that lock.
create function metered.open_session(command metered.new_command, hold metered.new_hold, charges metered.new_charge[], ahead interval,
    wait_ms int, origin metered.origin, channel text,
    out status text, out placed_at timestamptz, out deadline timestamptz,
    out seqs bigint[], out ats timestamptz[], out refused jsonb, out stored json, out crossed jsonb)
language plpgsql volatile
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set plan_cache_mode = force_generic_plan
as $$
declare
    ids     text := left(hold.id, 41);
    clk     timestamptz;
    horizon timestamptz;
    done    timestamptz;
    was     record;
    placed  record;
begin
    if greatest(octet_length(command.tenant), octet_length(command.id), octet_length(command.marker), octet_length(command.name), octet_length(hold.tenant), octet_length(hold.id), octet_length(hold.holder), octet_length(hold.claim), octet_length(origin.tenant), octet_length(origin.operation)) > 255
        or array_lower(command.jobs, 1) <> 1
        or array_ndims(command.jobs) <> 1
        or array_position(command.jobs, null) is not null
        or cardinality(command.jobs) > 1000
        or octet_length(hold.fingerprint) > 33
        or pg_column_size(hold.metadata) > 65540
        or pg_column_compression(hold.metadata) is not null and octet_length(hold.metadata::text) > 65536
        or array_lower(hold.minimum, 1) <> 1
        or array_ndims(hold.minimum) <> 1
        or array_position(hold.minimum, null) is not null
        or cardinality(hold.minimum) > 65
        or pg_column_size(hold.minimum) > 1400 and not metered._fits(hold.minimum)
        or array_lower(charges, 1) <> 1
        or array_ndims(charges) <> 1
        or array_position(charges, null) is not null
        or cardinality(charges) > 64
        or pg_column_size(charges) > 1400 and not metered._fits(charges)
        or wait_ms > 3600000
        or pg_column_size(origin.note) > 8196
        or pg_column_compression(origin.note) is not null and octet_length(origin.note::text) > 8192
        or octet_length(channel) > 64 then
        raise exception 'out of bounds: an argument of open_session' using errcode = '22023';
    end if;
    if (not hold.chosen and hold.claim is null and octet_length(hold.id) > 41 and not metered._one_snapshot()) is not true then
        perform metered._require(false, 'session');
    end if;
    if not metered._try_lock(command.key) then
        perform metered._lock_keys(array[command.key], wait_ms);
    end if;
    select (select z.at from metered.operations_horizon z where z.one),
        (select o.at from metered.operations o where o.tenant = command.tenant and o.id = command.id)
    into horizon, done;
    clk := metered.clock();
    status := case when done is not null then 'replay'
        when command.issued_at <= horizon then 'retired'
        when command.issued_at > clk + command.max_future then 'future' end;
    if status is not null then
        return;
    end if;
    select h.no, h.id, h.due, h.fingerprint into was
    from metered.holds h
    where h.tenant = hold.tenant and h.id >= ids and h.id < ids || '~' and (h.id = hold.id or h.state = 'h' and h.due > clk)
    order by h.id = hold.id desc limit 1;
    if was.id = hold.id then
        status := 'open';
        stored := metered.hold_json(was.no, clk);
    elsif was.no is not null then
        status := case when was.fingerprint = hold.fingerprint then 'running' else 'busy' end;
        placed_at := clk;
        deadline := was.due;
    end if;
    if status is not null then
        return;
    end if;
    placed := metered.place(hold, charges, ahead, wait_ms, origin, channel, false);
    status := placed.status;
    placed_at := placed.placed_at;
    deadline := placed.deadline;
    seqs := placed.seqs;
    ats := placed.ats;
    refused := placed.refused;
    stored := placed.stored;
    crossed := placed.crossed;
end
$$;

-- The short way of holds (see plain.sql): a placement of one line with at most one limit by window or
-- lifetime, the capture that ends such a hold, and the opening of a session. As there, these functions
-- decide nothing but the usual case, and otherwise write nothing and go on with the full function.

-- The answer of place or open_session as JSON, with times in microseconds and the hold as text.
create function metered._placed_json(status text, placed_at timestamptz, deadline timestamptz, refused jsonb,
    stored json, crossed jsonb) returns json
language sql stable
as $$
    select json_build_object('status', status, 'placed_at', metered._in_us(placed_at),
        'deadline', metered._in_us(deadline), 'refused', refused, 'stored', stored::text, 'crossed', crossed)
$$;

-- Places a hold of one line, as place does: JSON, [seq, time in microseconds], or place's answer as an
-- object. id_key is null if the id was made up for this call.
create function metered.place_plain(of_tenant text, of_id text, id_key bigint, holder text,
    of_fingerprint bytea, issued timestamptz, ttl interval, grace interval, lifetime interval, metadata json,
    of_scope text, key bigint, units bigint, max_units bigint, win interval, note jsonb, op_tenant text,
    operation text, ahead interval, wait_ms int, channel text, raising boolean) returns json
language plpgsql volatile
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set plan_cache_mode = force_generic_plan
as $$
declare
    placed_at timestamptz;
    at_seq bigint;      -- the entry that was appended, or null
    new_no bigint;
    unused text;
    answer      record;
begin
    if greatest(octet_length(of_tenant), octet_length(of_id), octet_length(holder), octet_length(of_scope), octet_length(op_tenant), octet_length(operation)) > 255
        or octet_length(of_fingerprint) > 33
        or pg_column_size(metadata) > 65540
        or pg_column_compression(metadata) is not null and octet_length(metadata::text) > 65536
        or pg_column_size(note) > 8196
        or pg_column_compression(note) is not null and octet_length(note::text) > 8192
        or wait_ms > 3600000
        or octet_length(channel) > 64 then
        raise exception 'out of bounds: an argument of place_plain' using errcode = '22023';
    end if;
    if metered._goes_short() and (ttl > interval '0' and grace >= interval '0' and ttl <= coalesce(lifetime, interval '3660 days')
            and grace <= interval '3660 days' and coalesce(lifetime <= interval '3660 days', true)
            and of_tenant is not null and of_id <> '' and holder is not null and octet_length(of_fingerprint) = 33
            and octet_length(of_scope) between 1 and 255) is true and metered._key_fits(key, of_scope) and current_setting('transaction_isolation') = 'read committed' and units between 1 and 9007199254740992 and (note is null or pg_column_size(note) <= 8192
                and pg_column_compression(note) is null and not note ? 'use')
    then
        if metered._try_lock(key) is not true then
            perform metered._lock_all_scopes(array[of_scope], array[key], wait_ms);
        end if;
        -- A chosen id is looked for by a statement whose snapshot is taken after its lock.
        if id_key is null or not metered._one_snapshot() and metered._try_lock(id_key) and metered._new_hold_id(of_tenant, of_id, issued) then
            insert into metered.ledger as y (seq, amount, at, spent, refunded, credited, held, epoch, kind,
                scope, next_due, hold, operation_tenant, operation, note, anchor_at, anchor_spent, others)
            select t.seq + 1, units, t.clk, t.spent, t.refunded, t.credited, t.held + units, t.epoch, 'h',
                of_scope, least(case when t.held > 0 then case when t.seq & 15 < 2 and t.next_due > '-infinity'
            then metered._later_due(t.scope, t.next_due, t.clk) else t.next_due end end, t.clk + (ttl + grace)), of_id, op_tenant,
                operation, note, t.anchor_at, t.anchor_spent, coalesce(int8smaller(t.others, t.seq), 0) + 1
            from (select l.seq, l.at, l.spent, l.refunded, l.credited, l.held, l.epoch, l.scope, l.next_due, l.anchor_at,
                l.anchor_spent, l.lots_end, l.crossed, l.tallied, l.others, metered.clock() as clk
            from metered.ledger l where l.scope = of_scope and not metered._in_cell()
            order by l.seq desc limit 1) t
            where t.at <= t.clk and (t.next_due <= t.clk) is not true and t.lots_end is null and t.tallied is null and t.crossed is null
                and (max_units is null or win >= interval '0'
            and case when win = interval '0' then t.spent - t.refunded - t.credited
                else t.spent - case when t.anchor_at <= t.clk - win then t.anchor_spent else 0 end end <= max_units - t.held - units)
                and t.clk + ttl > t.clk and t.clk + (ttl + grace) >= t.clk + ttl
                and coalesce(ttl <= lifetime and t.clk + ttl <= t.clk + lifetime, true)
            on conflict do nothing
            returning y.seq, y.at into at_seq, placed_at;
            if at_seq is not null then
                loop
        insert into metered.holds (placed_at, deadline, due, ceiling, issued_at, version, state,
            tenant, id, holder, claim, fingerprint, keys, metadata)
        values (placed_at, placed_at + ttl, placed_at + (ttl + grace), coalesce(placed_at + lifetime, 'infinity'), issued, 1, 'h',
            of_tenant, of_id, holder, null, of_fingerprint, array[key], metadata)
        on conflict do nothing
        returning no into new_no;
        exit when new_no is not null;
        if not metered._has_number('holds', currval(metered._numbers('holds'))) then
            perform metered._collided();     -- this view is older than one that was placed
        end if;
        perform metered._raise_sequence('holds');
    end loop;
                insert into metered.hold_lines (hold, key, amount, open, due, scope, opened_seq)
                values (new_no, key, units, units, placed_at + (ttl + grace), of_scope, at_seq);
                insert into metered.hold_events (hold, at, deadline, version, kind, detail, note, operation_tenant, operation)
                values (new_no, placed_at, placed_at + ttl, 1, 'h', case when holder = '' and '' = '' then jsonb_build_object('tenant', of_tenant, 'grace_us', (extract(epoch from grace) * 1000000)::bigint, 'lifetime_us', (extract(epoch from lifetime) * 1000000)::bigint, 'lines', jsonb_build_array(jsonb_build_object('scope', of_scope, 'amount', units, 'open', units)))
            else jsonb_build_object('tenant', of_tenant, 'holder', holder, 'claim', '', 'grace_us', (extract(epoch from grace) * 1000000)::bigint, 'lifetime_us', (extract(epoch from lifetime) * 1000000)::bigint, 'lines', jsonb_build_array(jsonb_build_object('scope', of_scope, 'amount', units, 'open', units))) end,
                    note, op_tenant, operation);
                if channel is not null or operation is not null then
                    if channel is not null then
                        perform metered._announce(channel, of_tenant, of_id, 1, 'placed');
                    end if;
                    unused := case when operation is not null then metered._remember_hold(
                        metered._created_json(metered.hold_json(new_no, placed_at), '{}', null, null)) end;
                end if;
                return array_to_json(array[at_seq, metered._in_us(placed_at)]);
            end if;
        end if;
    end if;
    answer := metered.place(
        row(of_tenant, of_id, id_key is not null, id_key, holder, null, of_fingerprint, issued, ttl, grace, lifetime, metadata, null)::metered.new_hold,
        metered._as_held(of_scope, key, units, max_units, win, note), ahead, wait_ms,
        row(op_tenant, operation, note)::metered.origin, channel, raising);
    return metered._placed_json(answer.status, answer.placed_at, answer.deadline, answer.refused, answer.stored, answer.crossed);
end
$$;

-- Whether no hold has the id, nor had one that was purged.
create function metered._new_hold_id(of_tenant text, of_id text, issued timestamptz) returns boolean
language plpgsql volatile
as $$
begin
    return not exists (select from metered.holds h where h.tenant = of_tenant and h.id = of_id)
        and (issued <= (select z.at from metered.holds_horizon z where z.one)) is not true;
end
$$;

-- The units of a placement of one line, as the full functions take them.
create function metered._as_held(of_scope text, key bigint, units bigint, max_units bigint, win interval,
    note jsonb) returns metered.new_charge[]
language sql immutable
as $$
    select array[row(of_scope, key, units, units, case when max_units is null then '{}'
            else array[row(max_units, win, null, null, null, null)::metered.charge_limit] end,
        note, null, null, null)::metered.new_charge]
$$;

-- Opens a session whose hold has one line, as open_session does: JSON, as place_plain has it.
create function metered.open_session_plain(named text, name_key bigint, named_at timestamptz, max_future interval,
    of_tenant text, of_id text, holder text, of_fingerprint bytea, issued timestamptz, ttl interval, grace interval,
    lifetime interval, metadata json, of_scope text, key bigint, units bigint, max_units bigint, win interval,
    note jsonb, op_tenant text, operation text, ahead interval, wait_ms int, channel text) returns json
language plpgsql volatile
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set plan_cache_mode = force_generic_plan
as $$
declare
    placed_at timestamptz;
    at_seq bigint;      -- the entry that was appended, or null
    new_no bigint;
    unused text;
    opened      record;
begin
    if greatest(octet_length(named), octet_length(of_tenant), octet_length(of_id), octet_length(holder), octet_length(of_scope), octet_length(op_tenant), octet_length(operation)) > 255
        or octet_length(of_fingerprint) > 33
        or pg_column_size(metadata) > 65540
        or pg_column_compression(metadata) is not null and octet_length(metadata::text) > 65536
        or pg_column_size(note) > 8196
        or pg_column_compression(note) is not null and octet_length(note::text) > 8192
        or wait_ms > 3600000
        or octet_length(channel) > 64 then
        raise exception 'out of bounds: an argument of open_session_plain' using errcode = '22023';
    end if;
    if metered._goes_short() and (ttl > interval '0' and grace >= interval '0' and ttl <= coalesce(lifetime, interval '3660 days')
            and grace <= interval '3660 days' and coalesce(lifetime <= interval '3660 days', true)
            and of_tenant is not null and of_id <> '' and holder is not null and octet_length(of_fingerprint) = 33
            and octet_length(of_scope) between 1 and 255) is true and metered._key_fits(key, of_scope) and current_setting('transaction_isolation') = 'read committed' and units between 1 and 9007199254740992 and (note is null or pg_column_size(note) <= 8192
                and pg_column_compression(note) is null and not note ? 'use')
        and octet_length(of_id) > 41 and not metered._one_snapshot() and metered._try_lock(name_key)
    then
        -- A statement of its own, whose snapshot is taken after the lock.
        if (exists (select from metered.operations o where o.tenant = of_tenant and o.id = named)
                or named_at <= (select h.at from metered.operations_horizon h where h.one)
                or named_at > metered.clock() + max_future
            or exists (select from metered.holds h where h.tenant = of_tenant and h.id >= left(of_id, 41)
                and h.id < left(of_id, 41) || '~' and (h.id = of_id or h.state = 'h'))) is not true
        then
            if metered._try_lock(key) is not true then
                perform metered._lock_all_scopes(array[of_scope], array[key], wait_ms);
            end if;
            insert into metered.ledger as y (seq, amount, at, spent, refunded, credited, held, epoch, kind,
                scope, next_due, hold, operation_tenant, operation, note, anchor_at, anchor_spent, others)
            select t.seq + 1, units, t.clk, t.spent, t.refunded, t.credited, t.held + units, t.epoch, 'h',
                of_scope, least(case when t.held > 0 then case when t.seq & 15 < 2 and t.next_due > '-infinity'
            then metered._later_due(t.scope, t.next_due, t.clk) else t.next_due end end, t.clk + (ttl + grace)), of_id, op_tenant,
                operation, note, t.anchor_at, t.anchor_spent, coalesce(int8smaller(t.others, t.seq), 0) + 1
            from (select l.seq, l.at, l.spent, l.refunded, l.credited, l.held, l.epoch, l.scope, l.next_due, l.anchor_at,
                l.anchor_spent, l.lots_end, l.crossed, l.tallied, l.others, metered.clock() as clk
            from metered.ledger l where l.scope = of_scope and not metered._in_cell()
            order by l.seq desc limit 1) t
            where t.at <= t.clk and (t.next_due <= t.clk) is not true and t.lots_end is null and t.tallied is null and t.crossed is null
                and (max_units is null or win >= interval '0'
            and case when win = interval '0' then t.spent - t.refunded - t.credited
                else t.spent - case when t.anchor_at <= t.clk - win then t.anchor_spent else 0 end end <= max_units - t.held - units)
                and t.clk + ttl > t.clk and t.clk + (ttl + grace) >= t.clk + ttl
                and coalesce(ttl <= lifetime and t.clk + ttl <= t.clk + lifetime, true)
            on conflict do nothing
            returning y.seq, y.at into at_seq, placed_at;
            if at_seq is not null then
                loop
        insert into metered.holds (placed_at, deadline, due, ceiling, issued_at, version, state,
            tenant, id, holder, claim, fingerprint, keys, metadata)
        values (placed_at, placed_at + ttl, placed_at + (ttl + grace), coalesce(placed_at + lifetime, 'infinity'), issued, 1, 'h',
            of_tenant, of_id, holder, null, of_fingerprint, array[key], metadata)
        on conflict do nothing
        returning no into new_no;
        exit when new_no is not null;
        if not metered._has_number('holds', currval(metered._numbers('holds'))) then
            perform metered._collided();     -- this view is older than one that was placed
        end if;
        perform metered._raise_sequence('holds');
    end loop;
                insert into metered.hold_lines (hold, key, amount, open, due, scope, opened_seq)
                values (new_no, key, units, units, placed_at + (ttl + grace), of_scope, at_seq);
                insert into metered.hold_events (hold, at, deadline, version, kind, detail, note, operation_tenant, operation)
                values (new_no, placed_at, placed_at + ttl, 1, 'h', case when holder = '' and '' = '' then jsonb_build_object('tenant', of_tenant, 'grace_us', (extract(epoch from grace) * 1000000)::bigint, 'lifetime_us', (extract(epoch from lifetime) * 1000000)::bigint, 'lines', jsonb_build_array(jsonb_build_object('scope', of_scope, 'amount', units, 'open', units)))
            else jsonb_build_object('tenant', of_tenant, 'holder', holder, 'claim', '', 'grace_us', (extract(epoch from grace) * 1000000)::bigint, 'lifetime_us', (extract(epoch from lifetime) * 1000000)::bigint, 'lines', jsonb_build_array(jsonb_build_object('scope', of_scope, 'amount', units, 'open', units))) end,
                    note, op_tenant, operation);
                if channel is not null or false then
                    if channel is not null then
                        perform metered._announce(channel, of_tenant, of_id, 1, 'placed');
                    end if;
                    unused := case when false then metered._remember_hold(
                        metered._created_json(metered.hold_json(new_no, placed_at), '{}', null, null)) end;
                end if;
                return array_to_json(array[at_seq, metered._in_us(placed_at)]);
            end if;
        end if;
    end if;
    opened := metered.open_session(row(of_tenant, named, name_key, named_at, max_future, null, null, null, null, null, null)::metered.new_command,
        row(of_tenant, of_id, false, null, holder, null, of_fingerprint, issued, ttl, grace, lifetime, metadata, null)::metered.new_hold,
        metered._as_held(of_scope, key, units, max_units, win, note), ahead, wait_ms,
        row(op_tenant, operation, note)::metered.origin, channel);
    return metered._placed_json(opened.status, opened.placed_at, opened.deadline, opened.refused, opened.stored, opened.crossed);
end
$$;

-- Captures one hold and ends it, as capture_holds does: all of it (units is null), or units of of_scope, its
-- one line, as far as they are held. JSON: the hold, or an array of capture_holds' answer, whose holds are
-- text, since the metadata of one may be as deep as a reader of JSON goes.
create function metered.capture_holds_plain(of_tenant text, of_id text, issued timestamptz, holder text, of_scope text,
    units bigint, entity text, note jsonb, op_tenant text, operation text, wait_ms int, channel text,
    raising boolean) returns json
language plpgsql volatile
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set plan_cache_mode = force_generic_plan
as $$
declare
    was    record;      -- the hold before, and the time
    at_scope text;      -- of its line
    at_seq bigint;      -- the entry of captured units
    taken  bigint;      -- these
    rest   bigint;      -- units that are freed
    line   json;
    answer json;
    unused text;
    waited boolean;     -- a job may wait for the units
begin
    if greatest(octet_length(of_tenant), octet_length(of_id), octet_length(holder), octet_length(of_scope), octet_length(entity), octet_length(op_tenant), octet_length(operation)) > 255
        or pg_column_size(note) > 8196
        or pg_column_compression(note) is not null and octet_length(note::text) > 8192
        or wait_ms > 3600000
        or octet_length(channel) > 64 then
        raise exception 'out of bounds: an argument of capture_holds_plain' using errcode = '22023';
    end if;
    if metered._goes_short() then
        -- As in _lock_holds: nothing waits, and the row is read as it is by now. Another's hold is not locked.
        select y.no, y.version, y.due, y.keys[1] as key, metered.clock() as clk into was
        from metered.holds y
        where y.tenant = of_tenant and y.id = of_id and y.state = 'h' and (units is null or y.claim is null)
          and case when (capture_holds_plain.holder = '' or y.holder = capture_holds_plain.holder) and cardinality(y.keys) = 1
              then metered._try_lock(y.keys[1]) end
        for no key update skip locked;
        if was.due > was.clk and current_setting('transaction_isolation') = 'read committed' then
            insert into metered.ledger as e (seq, amount, at, spent, refunded, credited, held, epoch, kind,
                scope, next_due, hold, operation_tenant, operation, note, anchor_at, anchor_spent, crossed, others)
            select t.seq + 1, y.take, was.clk, t.spent + y.take, t.refunded, t.credited, t.held - y.take, t.epoch, 'u',
                t.scope, case when t.held - y.take > 0 then case when t.seq & 15 < 2 and t.next_due > '-infinity'
            then metered._later_due(t.scope, t.next_due, was.clk) else t.next_due end end, of_id, op_tenant, capture_holds_plain.operation,
                capture_holds_plain.note, t.anchor_at, t.anchor_spent, t.crossed, int8smaller(t.others, t.seq)
            from (select l.scope, coalesce(units, l.open) as take from metered.hold_lines l
                    where l.hold = was.no and coalesce(l.scope = of_scope and units between 1 and l.open, units is null and l.open > 0)
                    and not exists (select from metered.hold_lines z where z.hold = was.no and z.scope <> l.scope)) y,
                lateral (select l.seq, l.at, l.spent, l.refunded, l.credited, l.held, l.epoch, l.scope, l.next_due, l.anchor_at,
                l.anchor_spent, l.lots_end, l.crossed, l.tallied, l.others, metered.clock() as clk
            from metered.ledger l where l.scope = y.scope and not metered._in_cell()
            order by l.seq desc limit 1) t
            where metered._key_fits(was.key, y.scope) and t.at <= was.clk and (t.next_due <= was.clk) is not true and t.lots_end is null and t.tallied is null
            on conflict do nothing
            returning e.scope, e.seq, e.amount into at_scope, at_seq, taken;
        end if;
        if at_seq > 0 then
            -- What is open of a line that has not ended is its amount less what was captured.
            update metered.hold_lines l set captured = l.captured + taken, open = 0
            where l.hold = was.no and l.scope = at_scope
            returning l.amount - l.captured, metered._line_json(l.scope, l.amount, l.captured, 0, l.refunded, l.at_least)
            into rest, line;
            if rest > 0 then
                -- After the entry above, which nobody else has seen: its row needs no lock.
                insert into metered.ledger (seq, amount, at, spent, refunded, credited, held, epoch, kind,
                    scope, next_due, hold, operation_tenant, operation, note, anchor_at, anchor_spent, crossed, others)
                select t.seq + 1, rest, t.at, t.spent, t.refunded, t.credited, t.held - rest, t.epoch, 'l',
                    t.scope, case when t.held - rest > 0 then case when t.seq & 15 < 2 and t.next_due > '-infinity'
            then metered._later_due(t.scope, t.next_due, t.at) else t.next_due end end, t.hold, t.operation_tenant, t.operation,
                    t.note, t.anchor_at, t.anchor_spent, t.crossed, coalesce(int8smaller(t.others, t.seq), 0) + 1
                from metered.ledger t where t.scope = at_scope and t.seq = at_seq
                on conflict do nothing;
                if not found then
                    perform metered._collided();
                end if;
            end if;
            update metered.holds y set version = y.version + 1, entity = coalesce(capture_holds_plain.entity, y.entity), state = 'c',
                ended_at = was.clk, pending = false
            where y.no = was.no
            returning metered._hold_as_json(row(y.*)::metered.holds, json_build_array(line), was.clk, null) into answer;
            insert into metered.hold_events (hold, at, version, kind, entity, detail, note, operation_tenant, operation)
            values (was.no, was.clk, was.version + 1, 'c', entity,
                jsonb_build_array(jsonb_build_object('scope', at_scope, 'amount', taken, 'seq', at_seq, 'at', was.clk)),
                note, op_tenant, operation)
            returning exists (select from metered.parked_scopes p where p.scope = at_scope) into waited;
            if waited then
                perform metered._mark_freed(at_scope);
            end if;
            if channel is not null or operation is not null then
                if channel is not null then
                    perform metered._announce(channel, of_tenant, of_id, was.version + 1, 'captured');
                end if;
                unused := case when operation is not null then metered._remember_hold(answer) end;
            end if;
            return answer;
        end if;
    end if;
    was := metered.capture_holds(row(of_tenant, array[of_id], array[coalesce(issued, 'infinity')], holder)::metered.hold_ids,
        case when units is not null then array[row(of_scope, units, '{}')::metered.used_units] end,
        row(true, 'refuse', entity)::metered.capture_terms, interval '0', wait_ms, row(op_tenant, operation, note)::metered.origin,
        channel, raising);
    return json_build_array(was.refused::text, was.holds::text[], was.crossed);
end
$$;

-- Charges that are judged each on its own, many in a call: batches, and usage events with ids.
--
-- The cost of a call is mostly the set-up of its statements, so one statement makes the entries of all
-- charges that are plain: they fit, nothing is due, and the clock is right. A scope of which one charge
-- is not plain is left to _write_charges, charge by charge, so that only _check_limits refuses. The
-- guard is the same for both: the primary key, and FOR KEY SHARE on the last entry.

-- Takes locks in the order of their keys. With skip_busy it waits for room in the lock table alone,
-- and returns the keys that are not free.
create function metered._lock_each(keys bigint[], wait_ms int, skip_busy boolean) returns bigint[]
language plpgsql volatile
as $$
declare
    waited boolean;
begin
    keys := array(select distinct x.key from unnest(keys) x(key) order by 1);
    if skip_busy then
        if cardinality(keys) > 64 then
            wait_ms := metered._make_room(cardinality(keys), wait_ms);
        end if;
        return (select array_agg(k.key) from unnest(keys) k(key) where not metered._try_lock(k.key));
    end if;
    waited := metered._lock_keys(keys, wait_ms);
    return null;
end
$$;

-- The records of events, whose ids are locked: replay (with the entry that was made), conflict
-- (another event has the id), or nothing.
create function metered._recorded_events(events metered.new_event[], busy bigint[], wait_ms int,
    out statuses text[], out answers metered.each_answer[])
language plpgsql volatile
as $$
begin
    select array_agg(r.status order by r.nth),
        array_agg(row(r.nth, r.seq, r.at, null, null, null, r.status, null, null)::metered.each_answer) filter (where r.status = 'replay')
    into statuses, answers
    from (select e.ordinality as nth, o.seqs[1] as seq, o.ats[1] as at,
            case when e.id_key = any (busy) then 'busy' when o.id is null then null
                when o.fingerprint = e.fingerprint then 'replay' else 'conflict' end as status
          from unnest(events) with ordinality e
          -- limit, or the planner may join by a hash of the whole table, made while it was empty.
          left join lateral (select x.id, x.fingerprint, x.seqs, x.ats from metered.operations x
              where x.tenant = e.tenant and x.id = e.id limit 1) o on true) r;
    if metered._one_snapshot() then
        -- As in begin_command: the snapshot may be older than a record, or than a purge.
        begin
            perform set_config('lock_timeout', wait_ms::text, true);
            insert into metered.operations (tenant, id, at, fingerprint, result)
            select e.tenant, e.id, 'infinity', '', ''
            from rows from (unnest(events), unnest(statuses)) e where e.id is not null and e.unnest is null
            order by e.tenant, e.id on conflict do nothing;
            perform from metered.operations_horizon h where h.one for share;
            raise exception using errcode = 'MT100';
        exception when sqlstate 'MT100' then
            null;
        end;
    end if;
end
$$;

-- Writes the plain charges, with the records of their events. exact are the numbers of the other
-- charges without a status. The scopes are locked.
create function metered._write_plain(charges metered.new_charge[], events metered.new_event[], statuses text[], clk timestamptz,
    out answers metered.each_answer[], out exact int[])
language plpgsql volatile
as $$
declare
    entries int;
    made    int;
    records int;
    kept    int;
begin
    -- before has the units that the batch charges the scope ahead of a charge. They count for it.
    with asked as (
        select c.ordinality::int as nth, c.scope, c.amount, c.limits, c.note, c.tenant, c.id, c.fingerprint, c.issued_at,
            row_number() over w as place, (sum(c.amount) over w)::bigint - c.amount as before,
            (c.amount between 1 and 9007199254740992 and c.held = 0 and octet_length(c.scope) between 1 and 255
                and coalesce(pg_column_size(c.note), 0) <= 8192 and pg_column_compression(c.note) is null and cardinality(c.limits) <= 16
                and c.must_exist is not true and c.lease is null) is true as sound
        from rows from (unnest(charges), unnest(events), unnest(statuses)) with ordinality c
        where c.unnest is null
        window w as (partition by c.scope order by c.ordinality)
    ), judged as (
        select a.*, t.seq, t.spent, t.refunded, t.credited, t.held, t.epoch, t.next_due, t.anchor_at, t.anchor_spent, t.lots_end, t.crossed, t.tallied, t.others, u.used, u.periods,
            bool_and(coalesce(a.sound and u.fits and t.fresh and t.spent <= 9223372036854775807 - a.before - a.amount, false))
                over (partition by a.scope) as plain
        from asked a
        left join lateral (
            select y.* from metered.ledger y where y.scope = a.scope order by y.seq desc limit 1 for key share) y on true
        -- A scope without entries begins here. Where a purge takes them away just now, the keys collide.
        cross join lateral (
            select coalesce(y.seq, 0) as seq, coalesce(y.at, '-infinity') as at, coalesce(y.spent, 0) as spent,
                coalesce(y.refunded, 0) as refunded, coalesce(y.credited, 0) as credited, coalesce(y.held, 0) as held,
                coalesce(y.epoch, 0::smallint) as epoch, y.next_due, y.anchor_at, y.anchor_spent, y.lots_end, y.crossed, y.tallied, y.others,
                y.seq is null or y.at <= clk and y.lots_end is null and (y.next_due <= clk) is not true as fresh) t
        -- The units that count against each limit: as in _write_charges, where they are sure.
        cross join lateral (
            select array_agg(x.used + a.before order by x.ordinality) as used,
                array_agg(x.period order by x.ordinality) filter (where x.period is not null) as periods,
                coalesce(bool_and(coalesce(x.used + a.before <= least(x.max, x.tell_at - 1) - t.held - a.amount, false)), true) as fits
            from (select l.ordinality, l.max, l.tell_at, l.period,
                    case when l.since = clk then t.spent - t.refunded - t.credited
                        when t.at <= l.since then 0
                        when b.seq > 1 and b.refunded = t.refunded then t.spent - b.spent
                        when b.seq > 1 then null
                        when b.seq is null and t.epoch > 0 or t.refunded > 0 then null
                        when t.seq <= 16 or (select z.seq from metered.ledger z where z.scope = a.scope and z.seq = 2) is not null
                            then t.spent - coalesce(b.spent, 0)
                    end as used
                  from (select y.ordinality, y.max, y.tell_at, y.period, coalesce(clk - y.win, y.period[1] - interval '0.000001') as since
                        from (select z.ordinality, z.max, z.tell_at, z.win, case when z.win is null then metered._period_at(z.period, clk) end as period
                              from unnest(case when t.crossed is null then a.limits else metered._untold(a.limits, t.crossed,
                                  t.spent + a.before - t.refunded, t.held, t.credited, clk) end) with ordinality z
                              offset 0) y) l    -- or a period would be worked out wherever it is mentioned
                  left join lateral (
                      select base.seq, base.spent, base.refunded
                      from (select y.seq from metered.ledger y
                where y.scope = a.scope and y.epoch = t.epoch and y.at <= l.since and (y.seq & 15 = 1 or y.kind = 'k') and t.at > l.since and l.since <> clk
                order by y.at desc, y.seq desc limit 1) mark,
            lateral (select y.seq, y.spent, y.refunded from metered.ledger y
                where y.scope = a.scope and y.seq between mark.seq and mark.seq + 15 and y.epoch = t.epoch and y.at <= l.since
                order by y.seq desc limit 1) base) b on true
                  offset 0) x) u        -- or the use would be worked out twice
    ), entries as (
        insert into metered.ledger (seq, amount, at, spent, refunded, credited, held, epoch, kind, scope, next_due, hold, operation_tenant, operation, note, anchor_at, anchor_spent, lots_end, crossed, tallied, others)
        select j.seq + j.place, j.amount, clk, j.spent + j.before + j.amount, j.refunded, j.credited, j.held, j.epoch, 'c', j.scope, case when j.held > 0 then metered._due_after(j.scope, j.seq + j.place - 1, j.held, j.next_due, clk) else j.next_due end, null, j.tenant, j.id, j.note, j.anchor_at, j.anchor_spent, j.lots_end, j.crossed, j.tallied, int8smaller(j.others, j.seq)
        from judged j where j.plain
        on conflict do nothing
        returning 1
    ), records as (
        insert into metered.operations (tenant, id, fingerprint, issued_at, at, result, scopes, amounts, seqs, ats)
        select j.tenant, j.id, j.fingerprint, j.issued_at, clk, 'null', array[j.scope], array[j.amount], array[j.seq + j.place], array[clk]
        from judged j where j.plain and j.id is not null
        on conflict do nothing
        returning 1
    )
    select array_agg(row(j.nth, j.seq + j.place, clk, j.used, j.held, null, null, j.periods, null)::metered.each_answer) filter (where j.plain),
        array_agg(j.nth order by j.nth) filter (where not j.plain),
        count(*) filter (where j.plain), (select count(*) from entries),
        count(*) filter (where j.plain and j.id is not null), (select count(*) from records)
    into answers, exact, entries, made, records, kept
    from judged j;
    if made < entries then
        perform metered._collided();
    elsif kept < records then
        perform metered._recorded_meanwhile();
    end if;
end
$$;

-- Fails for a writer of a record that another writer made first.
create function metered._recorded_meanwhile() returns void
language plpgsql
as $$
begin
    raise exception 'could not serialize access: the operation was recorded meanwhile' using errcode = '40001';
end
$$;

-- Writes one charge, whose scope is locked, with the record of its event, or says why it is refused.
create function metered._write_exact(c metered.new_charge, e metered.new_event, nth int, ahead interval, wait_ms int, clk timestamptz)
returns metered.each_answer
language plpgsql volatile
as $$
declare
    answer record;
begin
    answer := metered._write_charges(array[c], ahead, wait_ms, row(e.tenant, e.id, null), 'answer', row(null, null, null, clk), true);
    if answer.refused -> 0 ? 'crossing' then
        perform metered._refuse_unreported();
    end if;
    if answer.refused is null and e.id is not null then
        insert into metered.operations (tenant, id, fingerprint, issued_at, at, result, scopes, amounts, seqs, ats)
        values (e.tenant, e.id, e.fingerprint, e.issued_at, clk, 'null', array[c.scope], array[c.amount], answer.seqs, answer.ats)
        on conflict do nothing;
        if not found then
            perform metered._recorded_meanwhile();
        end if;
    end if;
    return row(nth, answer.seqs[1], answer.ats[1], answer.used, answer.held[1], answer.refused, null, answer.periods, answer.crossed)::metered.each_answer;
end
$$;

-- Makes up to 1,000 charges, each on its own, and answers each, in any order. Those of one scope are
-- judged in the order given, and one that is let in counts for the next. All locks are taken
-- first, those of ids before those of scopes: two of the server's lock table for a charge with an id.
--
-- events is null, or has an element for each charge, which has an id, or none. An id is at most once
-- in a call. status says why there is no entry, or whose it is: replay (the entry of before), conflict (of another event),
-- retired (its time is at or before the horizon), future, late (further from the clock than allowed), busy (with skip_busy:
-- a lock was not free, or the scope is behind), or a SQLSTATE: MT002, MT003, MT010, MT012 or 22003, with its detail as refused. A threshold that is crossed
-- and that the caller would not report ends the call (MT011).
create function metered.charge_each(charges metered.new_charge[], events metered.new_event[], ahead interval,
    late interval, future interval, wait_ms int, skip_busy boolean)
returns setof metered.each_answer
language plpgsql volatile
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set plan_cache_mode = force_generic_plan
set enable_bitmapscan = off
as $$
declare
    asked    int := cardinality(charges);
    clk      timestamptz;
    horizon  timestamptz;
    busy     bigint[];
    statuses text[];    -- why a charge is not to be made, by its number
    answers  metered.each_answer[];
    exact    int[];
    behind   text[];
    written  record;
    answer   metered.each_answer;
    which    int;
    state    text;
    detail   text;
begin
    if array_lower(charges, 1) <> 1
        or array_ndims(charges) <> 1
        or array_position(charges, null) is not null
        or cardinality(charges) > 1000
        or pg_column_size(charges) > 1400 * cardinality(charges) and not metered._fits(charges)
        or array_lower(events, 1) <> 1
        or array_ndims(events) <> 1
        or array_position(events, null) is not null
        or cardinality(events) > 1000
        or pg_column_size(events) > 1400 * cardinality(events) and not metered._fits(events)
        or wait_ms > 3600000 then
        raise exception 'out of bounds: an argument of charge_each' using errcode = '22023';
    end if;
    if (asked between 1 and 1000 and array_ndims(charges) = 1 and array_lower(charges, 1) = 1
        and (events is null or cardinality(events) = asked and array_ndims(events) = 1 and array_lower(events, 1) = 1)) is not true then
        perform metered._require(false, 'charges');
    end if;
    if events is not null then
        if not (select coalesce(bool_and(e.id is null or octet_length(e.id) between 1 and 255 and (octet_length(e.tenant) <= 255) is true
            and (octet_length(e.fingerprint) = 33) is true), true) from unnest(events) e) then
            perform metered._require(false, 'events');
        end if;
        busy := metered._lock_each(array(select e.id_key from unnest(events) e where e.id_key is not null), wait_ms, skip_busy);
        written := metered._recorded_events(events, busy, wait_ms);
        statuses := written.statuses;
        return query select * from unnest(written.answers);
    end if;
    busy := metered._lock_each(array(
        select coalesce(c.key, metered._scope_key(c.scope))
        from rows from (unnest(charges), unnest(statuses)) c where c.unnest is null), wait_ms, skip_busy);
    clk := metered.clock();     -- after the locks: a wait must not date the entries back
    if busy is not null then
        statuses := array(
            select coalesce(c.unnest, case when c.key = any (busy) then 'busy' end)
            from rows from (unnest(charges), unnest(statuses)) with ordinality c order by c.ordinality);
    end if;
    if events is not null then
        -- Read after the records: a purge moves the horizon in the transaction that deletes.
        horizon := (select h.at from metered.operations_horizon h where h.one);
        statuses := array(
            select coalesce(e.unnest, case when e.issued_at <= horizon then 'retired'
                when greatest(e.issued_at, e.occurred_at) > clk + future then 'future'
                when e.occurred_at < clk - late then 'late' end)
            from rows from (unnest(events), unnest(statuses)) with ordinality e order by e.ordinality);
    end if;
    if asked = 1 then   -- for one charge _write_charges is faster
        exact := array(select 1 where statuses[1] is null);
    else
        perform metered._entry_for_write(x.scope)   -- folds tallies
        from (select distinct c.scope from rows from (unnest(charges), unnest(statuses)) c where c.unnest is null) x,
             lateral (select l.tallied from metered.ledger l where l.scope = x.scope order by l.seq desc limit 1) t where t.tallied;
        written := metered._write_plain(charges, events, statuses, clk);
        return query select * from unnest(written.answers);
        exact := written.exact;
    end if;
    if skip_busy and exact <> '{}' then     -- else the others wait for what it writes
        behind := array(
            select x.scope
            from (select distinct c.scope from unnest(charges) with ordinality c
                  where c.ordinality = any (exact)) x
            where (select t.next_due <= clk or t.lots_end <= clk from metered.ledger t
                   where t.scope = x.scope order by t.seq desc limit 1) is true
              and metered._behind(x.scope, clk));
        if behind <> '{}' then
            statuses := array(
                select coalesce(c.unnest, case when c.scope = any (behind) then 'busy' end)
                from rows from (unnest(charges), unnest(statuses)) with ordinality c
                order by c.ordinality);
            exact := array(select x.nth from unnest(exact) x(nth) where statuses[x.nth] is null
                order by 1);
        end if;
    end if;
    begin
        foreach which in array coalesce(exact, '{}') loop
            answers[which] := metered._write_exact(charges[which], events[which], which, ahead, wait_ms, clk);
        end loop;
    exception when sqlstate 'MT002' or sqlstate 'MT003' or sqlstate 'MT010' or sqlstate 'MT012' or numeric_value_out_of_range then
        -- Once more, each in a block of its own, which costs a subtransaction.
        answers := null;
        foreach which in array exact loop
            begin
                answers[which] := metered._write_exact(charges[which], events[which], which, ahead, wait_ms, clk);
            exception when sqlstate 'MT002' or sqlstate 'MT003' or sqlstate 'MT010' or sqlstate 'MT012' or numeric_value_out_of_range then
                get stacked diagnostics state = returned_sqlstate, detail = pg_exception_detail;
                answers[which] := row(which, null, null, null, null, to_jsonb(detail), state, null, null)::metered.each_answer;
            end;
        end loop;
    end;
    return query select * from unnest(answers) x where x.nth is not null;
    return query select s.ordinality::int, null::bigint, null::timestamptz, null::bigint[], null::bigint, null::jsonb, s.status, null::timestamptz[], null::jsonb
        from unnest(statuses) with ordinality s(status, ordinality) where s.status <> 'replay';
end
$$;

-- The feed: all entries of all scopes under one number each, which is given after they were
-- committed. See ADR 27.
--
-- A number is given by one transaction at a time (number_feed, which has the row of feed_state). So
-- numbers become visible in their order, and a reader that has seen number n has seen all before
-- it. What it numbers is committed, and within a scope entries are committed in the order of seq,
-- since a writer has the scope's lock until its COMMIT. So the entries that it finds behind the
-- last numbered one of a scope are those that come next, however long other transactions last.
--
-- Nothing in a charge knows of the feed. The price is the search: number_feed walks from scope to
-- scope in the ledger's key, a part of all scopes in each call (a round is all of them), and always
-- looks at those that had entries last.

-- The feed's state: see feed.sql.
create table metered.feed_state (
    last     bigint not null default 0, -- the last number that was given
    since    timestamptz,               -- when the feed began, or null: nobody reads it
    began_at timestamptz,               -- when the present round began
    whole_at timestamptz,               -- all that was committed before has a number
    one      boolean primary key default true check (one) -- there is one row
);

insert into metered.feed_state (last) values (0);

-- The scope that the present round has come to, unless it is at its end.
create table metered.feed_round (
    scope text collate "C" primary key  -- the scope: there is one row at most
);

-- Entries by number: a run of entries that follow one another in their scope and in the feed.
create table metered.feed (
    no      bigint primary key,         -- the number of its last entry: 1, 2, 3 and so on
    seq     bigint not null,            -- the seq of its last entry
    entries bigint not null,            -- how many they are
    scope   text collate "C" not null   -- whose entries they are
);

create unique index feed_scope on metered.feed (scope, no);

-- How far the entries of scopes have numbers.
create table metered.feed_scopes (
    seq    bigint not null,             -- the last entry with a number
    new_at timestamptz not null,        -- when it got it
    scope  text collate "C" primary key -- the scope
) with (fillfactor = 70);

create index feed_scopes_new on metered.feed_scopes (new_at);

-- Numbers whose entries were deleted. Only the greatest counts: the feed is whole from behind it
-- on.
create table metered.feed_purged (
    no bigint primary key               -- the number
);

-- The servers that gave numbers, in turn: another one after a failover or a restore.
create table metered.feed_histories (
    history  bigint primary key,        -- a number greater than those before
    first_no bigint not null,           -- its first number
    server   text not null              -- the server, its timeline, database and table
);

-- Who consumes the feed, and how far.
create table metered.feed_consumers (
    no       bigint not null,           -- the number of the last consumed entry
    patience interval not null,         -- how much longer a purge keeps what it has not consumed
    moved_at timestamptz not null,      -- when it looked last, within 10 seconds
    consumer text collate "C" primary key -- its name
) with (fillfactor = 70);

-- The server that the feed's numbers are given on, its timeline, and its database and table: others
-- after a failover or a restore.
create function metered._feed_server() returns text
language plpgsql volatile
as $$
declare
    server text;
begin
    begin
        select x.system_identifier || '/' || left(pg_walfile_name(pg_current_wal_lsn()), 8)
        into server from pg_control_system() x;
    exception when insufficient_privilege or feature_not_supported then
        server := 'unknown';
    end;
    select server || '/' || d.oid || '/' || s.tableoid into server
    from metered.feed_state s, pg_database d where s.one and d.datname = current_database();
    return server;
end
$$;

-- Says since when numbers are given on this server. A number behind the last one may have been
-- another entry's on the server before: the one that was known there was lost. Two servers that
-- take over from one, each without the other, begin with other histories.
create function metered._note_feed_server(last_no bigint) returns void
language plpgsql volatile
as $$
declare
    here   text := metered._feed_server();
    before record;
begin
    select h.history, h.server into before
    from metered.feed_histories h order by h.history desc limit 1;
    if before.server is distinct from here then
        insert into metered.feed_histories (history, first_no, server)
        values (coalesce(before.history, 0) + 1 + (hashtextextended(here, 0) & 1048575),
            last_no + 1, here);
    end if;
end
$$;

-- Numbers the entries of scopes up to these, their last ones, and returns how many. Its transaction
-- has the row of feed_state.
create function metered._number_scopes(scopes text[], seqs bigint[]) returns bigint
language plpgsql volatile
as $$
declare
    was  bigint;    -- the last number before
    made bigint;
    now  timestamptz := metered.clock();
begin
    select s.last into was from metered.feed_state s where s.one;
    -- One more number is passed over where entries are missing: they were purged before they had
    -- one.
    with tips as (
        select t.scope, max(t.seq) as seq from unnest(scopes, seqs) t(scope, seq) group by t.scope
    ), behind as (
        select t.scope, t.seq, y.seq as done,
            (select l.seq from metered.ledger l where l.scope = t.scope and l.seq > coalesce(y.seq,
                case when t.seq > 1 and not exists (
                    select from metered.ledger z where z.scope = t.scope and z.seq = 2) then 1 else 0 end)
             order by l.seq limit 1) as begins
        from tips t left join lateral (
            select x.seq from metered.feed_scopes x where x.scope = t.scope) y on true
        where t.seq > coalesce(y.seq, 0)
    ), runs as (
        select b.scope, b.seq, b.seq - b.begins + 1 as entries, b.begins > b.done + 1 as lost,
            was + (sum(b.seq - b.begins + 1 + (b.begins > coalesce(b.done, b.begins) + 1)::int)
                over (order by b.scope))::bigint as no
        from behind b where b.begins <= b.seq
    ), numbered as (
        insert into metered.feed (no, seq, entries, scope)
        select r.no, r.seq, r.entries, r.scope from runs r
    ), missed as (
        insert into metered.feed_purged (no) select r.no - r.entries from runs r where r.lost
    ), upto as (
        insert into metered.feed_scopes as x (scope, seq, new_at)
        select r.scope, r.seq, now from runs r
        on conflict (scope) do update set seq = excluded.seq, new_at = excluded.new_at
    )
    select max(r.no) - was into made from runs r;
    if made > 0 then
        update metered.feed_state s set last = was + made where s.one;
    end if;
    return coalesce(made, 0);
end
$$;

-- Gives the entries of up to look scopes that are committed and have no number one each, and
-- returns how many. done: the round is at its end, and all that was committed when it began has a
-- number. It waits for nobody: while another transaction gives numbers, or where nothing can be
-- written, it returns null. Its own transaction should end soon, since nobody else gives numbers
-- meanwhile. The feed begins with the first call.
create function metered.number_feed(look int, out numbered bigint, out done boolean)
language plpgsql volatile
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set plan_cache_mode = force_generic_plan
set jit = off
as $$
declare
    state  record;
    before text;        -- where the round goes on
    start  record;      -- the first scope to look at, and its last entry
    scopes text[];
    seqs   bigint[];
    whole  boolean;     -- all that was committed when the round began has a number now
begin
    if look > 100000 then
        raise exception 'out of bounds: an argument of number_feed' using errcode = '22023';
    end if;
    perform metered._require(look between 1 and 100000, 'number_feed');
    if current_setting('transaction_read_only') = 'on' then     -- a standby, too
        return;
    end if;
    select s.since, s.last, s.began_at into state
    from metered.feed_state s where s.one for update skip locked;
    if not found then
        return;
    end if;
    select r.scope into before from metered.feed_round r order by r.scope limit 1;
    -- Entries that a crash can take back (early lock release) are durable with their number.
    if current_setting('synchronous_commit') = 'off' then
        perform set_config('synchronous_commit', 'on', true);
    end if;
    perform metered._note_feed_server(state.last);
    if before is null then
        state.began_at := metered.clock();
        if not metered._one_snapshot() then
            perform metered._fold_all();
        end if;
        select l.scope, l.seq into start
        from metered.ledger l order by l.scope desc, l.seq desc limit 1;
    else
        select l.scope, l.seq into start
        from metered.ledger l where l.scope < before order by l.scope desc, l.seq desc limit 1;
    end if;
    -- From the last scope to the first: so one look-up finds the next scope and its last entry.
    with recursive walk(scope, seq, nth) as (
        select start.scope collate "C", start.seq, 1 where start.scope is not null
        union all
        select n.scope, n.seq, w.nth + 1
        from walk w cross join lateral (
            select l.scope, l.seq from metered.ledger l
            where l.scope < w.scope order by l.scope desc, l.seq desc limit 1) n
        where w.nth < look
    )
    select array_agg(w.scope order by w.nth), array_agg(w.seq order by w.nth) into scopes, seqs
    from walk w;
    done := coalesce(cardinality(scopes), 0) < look;
    if not done or before is not null then
        select scopes || array_agg(x.scope), seqs || array_agg(x.seq) into scopes, seqs
        from (select h.scope, (select l.seq from metered.ledger l
                where l.scope = h.scope order by l.seq desc limit 1) as seq
            from (select y.scope from metered.feed_scopes y order by y.new_at desc limit 1000) h) x
        where x.seq is not null;
    end if;
    numbered := metered._number_scopes(scopes, seqs);
    whole := done and not metered._one_snapshot();
    update metered.feed_state s
    set since = coalesce(s.since, state.began_at), began_at = state.began_at,
        whole_at = case when whole then state.began_at else s.whole_at end
    where s.one;
    delete from metered.feed_round;
    if not done then
        insert into metered.feed_round (scope) values (scopes[look]);
    end if;
    if done then
        delete from metered.feed_purged p
        where p.no < (select max(y.no) from metered.feed_purged y);
    end if;
end
$$;

-- Refuses to go on after a number whose successor is not there any more, or that may be another
-- entry's now, and says from which number on there is something to read. of_history is of the cursor
-- with the number, or 0.
create function metered._check_feed(of_history bigint, after bigint) returns void
language plpgsql stable
as $$
declare
    whole   bigint;     -- the number from which on the feed is whole
    differs bigint;     -- the first number that may be another entry's than in this history
begin
    select coalesce((select max(p.no) from metered.feed_purged p), 0) + 1,
        case when of_history = 0 or exists (
                select from metered.feed_histories h where h.history = of_history)
            then least(s.last + 1, (select min(h.first_no) from metered.feed_histories h
                where h.history > of_history and of_history > 0))
            else 1 end
    into whole, differs
    from metered.feed_state s where s.one;
    if after + 1 < whole or after >= differs then
        raise exception 'the feed has other entries after number %', after using errcode = 'MT017',
            detail = jsonb_build_object('lost', after >= differs,
                'first', greatest(whole, case when after >= differs then differs end),
                'history', coalesce((select max(h.history) from metered.feed_histories h), 0));
    end if;
end
$$;

-- Up to most entries of the feed after a number, in the order of their numbers. of_history is that
-- of the entry with that number: 0, if there is none. SQLSTATE MT017: entries in between were
-- purged, or lost with a server.
create function metered.read_feed(of_history bigint, after bigint, most int)
returns table (no bigint, history bigint, entry metered.ledger)
language plpgsql stable
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set plan_cache_mode = force_generic_plan
as $$
declare
    run  record;
    rest int := most;
    made int;
begin
    if most > 1000 then
        raise exception 'out of bounds: an argument of read_feed' using errcode = '22023';
    end if;
    perform metered._require(
        of_history >= 0 and after >= 0 and most between 1 and 1000, 'read_feed');
    perform metered._check_feed(of_history, after);
    select coalesce(max(h.history), 0) into history from metered.feed_histories h;
    for run in
        select f.no, f.seq, f.scope, least(f.entries, f.no - after) as entries
        from metered.feed f where f.no > after order by f.no limit most
    loop
        return query
        select run.no - run.seq + l.seq, read_feed.history, row(l.*)::metered.ledger
        from metered.ledger l
        where l.scope = run.scope and l.seq > run.seq - run.entries and l.seq <= run.seq
        order by l.seq limit rest;
        get diagnostics made = row_count;
        if run.no - run.entries <> after + most - rest or made <> least(run.entries, rest) then
            raise exception 'entries of the feed are missing after number %', after
                using errcode = 'XX001';
        end if;
        rest := rest - made;
        exit when rest = 0;
    end loop;
end
$$;

-- The next entries of the feed for a consumer, up to most, which are consumed if the caller's
-- transaction commits. Its row is locked until then: others that consume by that name wait. The
-- first call begins with the first entry that is there, or, from_now, behind the last one. A purge
-- keeps entries that it has not consumed for patience longer than it would.
create function metered.consume_feed(of_consumer text, most int, patience interval,
    from_now boolean)
returns table (no bigint, history bigint, entry metered.ledger)
language plpgsql volatile
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set plan_cache_mode = force_generic_plan
as $$
declare
    upto bigint;
    made bigint;
    now  timestamptz := metered.clock();
begin
    if octet_length(of_consumer) > 255
        or most > 1000 then
        raise exception 'out of bounds: an argument of consume_feed' using errcode = '22023';
    end if;
    perform metered._require(of_consumer <> '' and most between 1 and 1000 and from_now is not null
        and patience between interval '0' and interval '366 days', 'consume_feed');
    select c.no into upto
    from metered.feed_consumers c where c.consumer = of_consumer for update;
    if not found then
        insert into metered.feed_consumers as c (consumer, no, patience, moved_at)
        select of_consumer, case when from_now then s.last
                else coalesce((select max(p.no) from metered.feed_purged p), 0) end,
            consume_feed.patience, now
        from metered.feed_state s where s.one
        on conflict do nothing;
        select c.no into upto
        from metered.feed_consumers c where c.consumer = of_consumer for update;
        if not found then
            perform metered._collided();    -- it is newer than this snapshot
        end if;
    end if;
    return query select r.no, r.history, r.entry from metered.read_feed(0, upto, most) r;
    get diagnostics made = row_count;
    upto := upto + made;    -- numbers follow one another
    update metered.feed_consumers c
    set no = upto, patience = consume_feed.patience, moved_at = now
    where c.consumer = of_consumer and (c.no <> upto or c.patience <> consume_feed.patience
        or c.moved_at < now - interval '10 seconds');
end
$$;

-- Forgets a consumer, and says whether there was one. A purge waits for it no longer. Consumed
-- again, the name begins anew.
create function metered.drop_feed_consumer(of_consumer text) returns boolean
language plpgsql volatile
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set plan_cache_mode = force_generic_plan
as $$
begin
    if octet_length(of_consumer) > 255 then
        raise exception 'out of bounds: an argument of drop_feed_consumer' using errcode = '22023';
    end if;
    delete from metered.feed_consumers c where c.consumer = of_consumer;
    return found;
end
$$;

-- How far the consumers of the feed are.
create view metered.feed_lag as
select c.consumer,                      -- its name
    c.no as consumed,                   -- the number of the last consumed entry
    s.last - c.no as unread,            -- entries that it has not consumed
    e.at as unread_since,               -- the time of the first of them, or null
    c.moved_at,                         -- when it looked last, within 10 seconds
    c.patience,                         -- how much longer a purge keeps what it has not consumed
    s.whole_at                          -- all entries that were committed before have numbers
from metered.feed_consumers c cross join metered.feed_state s left join lateral (
    select l.at from metered.feed f join metered.ledger l
        on l.scope = f.scope and l.seq = f.seq + 1 - least(f.entries, f.no - c.no)
    where f.no > c.no order by f.no limit 1) e on true;

-- Views for people and their tools: the tables with words for kinds and states, and without the columns that
-- is nobody's business. No function of a command reads them. See metered.GrantReportingSQL.
--
-- They are stable: a later version may add columns at the end, and changes none. A view belongs to
-- the schema's owner and reads with the owner's rights; so a role that may read the view needs no right
-- on its tables. None of them hides rows, so none is a security_barrier, which would keep conditions
-- from the indexes. Now is metered.clock(), which the reader may execute. It stands in a subquery of its own:
-- beside the columns it would keep conditions from the indexes.

-- The entries of the ledger: the statement of each scope. By scope it reads the primary key: 1
-- ms for a thousand entries. Without a scope it reads the whole ledger, and a condition on the time
-- alone does not help. The spends from a lease are one capture here, and rows of lease_spends_words.
create view metered.statement as
select l.scope,                                 -- the charged scope
    l.seq,                                      -- 1, 2, 3 and so on in the scope
    l.at,                                       -- by the database's clock
    case l.kind when 'c' then 'charge' when 'd' then 'credit' when 'r' then 'refund' when 'k' then 'clock repair' when 'z' then 'close'
        when 'h' then 'hold' when 'u' then 'capture' when 'l' then 'release' when 'x' then 'expire'
        when 'e' then 'lapse' when 'v' then 'revoke' when 'o' then 'roll over' when 's' then 'schedule' end as kind, -- the kind of entry
    l.amount,                                   -- of the entry, never negative
    case when l.kind in ('c', 'u', 'e', 'v', 'o') then l.amount when l.kind in ('r', 'd') then -l.amount else 0 end as change, -- of used
    l.spent - l.refunded - l.credited as used,  -- charges less refunds and credits, so far
    l.held,                                     -- in open holds now
    l.spent,                                    -- charges so far
    l.refunded,                                 -- refunds so far
    l.credited,                                 -- credits so far, less revoked and lapsed units
    l.ref as refunds_seq,                       -- of a refund: the number of its charge
    l.hold,                                     -- the hold's id, where the entry is about one alone
    l.operation_tenant,                         -- of the operation
    l.operation,                                -- the operation's id
    l.note ->> 'actor' as actor,                -- the person or process that made it
    l.note ->> 'tenant' as tenant,              -- for whom
    l.note ->> 'correlation' as correlation,    -- the request or case that it belongs to
    l.note ->> 'reason' as reason,              -- why
    l.note ->> 'occurred_at' as occurred_at,    -- of a usage event: when it happened, in ISO 8601
    l.note ->> 'use' as use                     -- the use that a charge or a hold is for
from metered.ledger l;

-- The state of each scope, by its last entry. One scope, or a range of names, takes 20
-- microseconds a scope. All of them, or a condition on anything else, read the sixteenth part of the ledger that is
-- indexed by time, and each scope's last entry: 0.1 s for ten thousand scopes.
create view metered.scopes as
select f.scope,                                 -- its name
    l.seq as entries,                           -- how many entries were ever made
    l.spent - l.refunded - l.credited + l.apart as used, -- charges less refunds and credits
    l.held,                                     -- in open holds, those that are due and not swept among them, and on leases
    l.spent + l.apart as spent,                 -- charges
    l.refunded,                                 -- refunds
    l.credited,                                 -- credits, less revoked and lapsed units
    f.at as first_at,                           -- when the first entry was made
    l.at as last_at,                            -- when the last entry was made
    l.epoch as clock_repairs,                   -- so many
    coalesce(l.next_due = '-infinity', false) as closed, -- carved from another scope, and given back: nothing new is let in
    r.created_at,                               -- when it was declared, or null
    r.retired_at,                               -- since when nothing new is let in that demands a declared scope
    case when l.lots_end is not null then l.credited - l.spent + l.refunded - l.held end as balance, -- of a wallet: units that can be drawn, or less than 0 if it is overdrawn. Lots that ended and are not swept count
    nullif(l.lots_end, 'infinity') as lots_end,  -- of a wallet: no lot with units ends before this, or null: none ends
    l.crossed as told                           -- thresholds that were reached and reported, by kind (p of a period, w of a window, l of a lifetime, in upper case of spending alone), limit and name
from metered.ledger f
    cross join lateral (select y.seq, y.spent, y.refunded, y.credited, y.held, y.at, y.epoch, y.next_due, y.lots_end, y.crossed,
            case when y.tallied then (select coalesce(sum(x.amount), 0)::bigint from metered.tallies x where x.scope = y.scope) else 0 end as apart
        from metered.ledger y where y.scope = f.scope order by y.seq desc limit 1) l
    left join metered.resources r on r.scope = f.scope
where f.seq = 1 and f.seq & 15 = 1;             -- as the index over time has it

-- Holds, with words for their states. One that is due has expired, whether that is recorded or not.
-- By tenant and id, by tenant and holder, by tenant and entity, or by no it reads an index. Units
-- and reason cost a look-up for each row that is shown. Everything else reads all holds.
create view metered.holds_words as
select h.no,                                    -- the number of the hold, in the order of placing
    h.tenant,                                   -- keeps the ids of tenants apart
    h.id,                                       -- chosen by the caller, or made up
    h.holder,                                   -- the holder
    case when h.state = 'h' and h.due <= c.now then 'expired' when h.state = 'h' then 'held'
        when h.returned then 'captured and given back' when h.state = 'c' then 'captured'
        when h.state = 'r' then 'released' else 'expired' end as state, -- the state
    h.placed_at,                                -- when it was placed
    h.deadline,                                 -- when it ends, unless it is extended
    h.due,                                      -- deadline and grace: its units are free from here on
    case when h.state = 'h' and h.due <= c.now then h.due else h.ended_at end as ended_at, -- when it ended
    h.claim,                                    -- the claimed scope, if it is a claim
    h.entity,                                   -- the entity that a capture linked
    h.metadata,                                 -- of the caller
    (select jsonb_object_agg(l.scope, l.amount) from metered.hold_lines l where l.hold = h.no) as units, -- by scope, as they were placed
    (select jsonb_object_agg(l.scope, case when h.state = 'x' or h.state = 'h' and h.due <= c.now
        then greatest(l.captured, l.at_least) else l.captured end) from metered.hold_lines l where l.hold = h.no) as captured, -- of these, by scope
    case when h.state = 'r' or h.returned then (
        select e.note ->> 'reason' from metered.hold_events e where e.hold = h.no and e.version = h.version) end as reason -- why it was released or given back
from metered.holds h, (select metered.clock() as now) c;

-- The history of holds, with words for the transitions. By tenant and id it reads an index,
-- everything else reads all that ever happened.
create view metered.hold_events_words as
select h.tenant,                                -- of the hold
    h.id,                                       -- of the hold
    e.version,                                  -- 1, 2, 3 and so on in the hold
    case e.kind when 'h' then 'placed' when 'p' then 'captured in part' when 'c' then 'captured' when 'e' then 'extended'
        when 'r' then 'released' when 'x' then 'expired' when 'g' then 'returned in part' when 'b' then 'returned' end as kind, -- the transition
    e.at,                                       -- when it was recorded
    e.deadline,                                 -- the new one, of a placement or an extension
    e.entity,                                   -- the entity that a capture linked
    e.detail,                                   -- more about it
    e.note,                                     -- actor, tenant, correlation, reason
    e.operation_tenant,                         -- of the operation
    e.operation                                 -- the operation's id
from metered.hold_events e join metered.holds h on h.no = e.hold;

-- Leases, with words. By no, or by scope, it reads an index. Everything else reads all leases.
create view metered.leases_words as
select l.no,                                    -- the number of the lease
    l.scope,                                    -- whose units they are
    l.owner,                                    -- the process that opened it
    l.child,                                    -- the scope that its units were carved for
    case l.mode when 's' then 'rows' when 'm' then 'memory' when 'c' then 'carved' when 'r' then 'away' else 'received' end as mode, -- how its spends are recorded
    case when l.settled_at is not null then 'settled' when l.ends_at <= c.now then 'ended' else 'out' end as state, -- ended: its time is over, and nobody has settled it
    l.opened_at,                                -- when it was opened
    l.ends_at,                                  -- nothing is spent of it from here on
    l.settled_at,                               -- when it was settled
    l.settled_by,                               -- the process that settled it
    l.granted,                                  -- units that it held
    l.spent,                                    -- captured units of granted, once it is settled
    l.opened_seq,                               -- the entry of the ledger that holds its units
    l.settled_seq                               -- the last entry of its end
from metered.leases l, (select metered.clock() as now) c;

-- Spends from leases whose spends are rows. By lease it reads an index. Everything else reads all spends.
create view metered.lease_spends_words as
select s.lease,                                 -- leases_words.no
    s.at_offset,                                -- where its range begins in the lease
    s.amount,                                   -- units
    s.at,                                       -- when
    s.operation_tenant,                         -- of the operation
    s.operation,                                -- the operation's id, where a command spent it
    s.note ->> 'actor' as actor,                -- the person or process that spent it
    s.note ->> 'tenant' as tenant,              -- for whom
    s.note ->> 'correlation' as correlation,    -- the request or case that it belongs to
    s.note ->> 'reason' as reason               -- why
from metered.lease_spends s;

-- Commands that committed, recorded refusals, and usage events. Without the
-- input, of which only a hash is stored, and without the result. By tenant and id, or by the time at, it reads
-- an index. Everything else reads all records.
create view metered.operations_words as
select o.tenant,                                -- keeps the ids of tenants apart
    o.id,                                       -- chosen by the caller
    o.name,                                     -- the command's name, or null of a usage event
    case when o.refusal is null then 'committed' else 'refused' end as state, -- the state
    o.at,                                       -- when it was completed
    o.issued_at,                                -- the time that the id carries, if it does
    o.scopes,                                   -- the charged scopes
    o.amounts,                                  -- the amount of each charge
    o.seqs,                                     -- the number of each entry, or 0 of a spend from a lease
    o.ats,                                      -- the time of each entry
    (select jsonb_agg(jsonb_build_object('tenant', j.h ->> 'tenant', 'id', j.h ->> 'id', 'state', case
            when (j.h ->> 'returned')::boolean then 'returned' else case j.h ->> 'state' when 'h' then 'held' when 'c' then 'captured' when 'r' then 'released' else 'expired' end end))
        from (select x::json as h from unnest(o.holds) x where not starts_with(x, '{"drawn"')) j) as holds, -- the holds that it placed, captured, released or gave back
    o.jobs,                                     -- the ids of River's jobs that it made
    o.refusal ->> 'code' as refusal_code,       -- why it was refused, as metered.Code has it
    o.refusal ->> 'text' as refusal_text,       -- the same for people
    o.refusal -> 'exceeded' -> 'refusals' as refusal_limits -- of a refusal by limits: which, and by how much
from metered.operations o;

-- Tokens without anything that a thief could use: neither the token, which is stored nowhere, nor its digest, nor
-- its payload. By purpose and subject, of tokens that are open, it reads an index if ended_at is null is asked for;
-- everything else reads all tokens.
create view metered.tokens_words as
select t.purpose,                               -- the right that it grants
    t.subject,                                  -- the user or thing that it is for
    case when t.used >= t.uses then 'used up' when t.revoked then 'revoked'
        when t.ended_at is not null or t.expires_at <= c.now then 'expired' else 'open' end as state, -- the state
    t.minted_at,                                -- when it was minted
    t.expires_at,                               -- when it is no longer good
    t.ended_at,                                 -- last use, revocation, or expiry seen by a revocation
    t.uses,                                     -- how often it can be used
    t.used,                                     -- how often it was
    t.sole                                      -- whether it replaced the subject's token before it
from metered.tokens t, (select metered.clock() as now) c;

-- Lots of wallets, with words for their states. By scope, or by no, it reads an index. Everything else reads all lots. What
-- is in a lot adds up: granted = rest + drawn + held + lapsed + revoked + rolled + pending. Units of a lot that pays for some uses are in rest, too.
create view metered.lots_words as
select y.no,                                    -- the number of the lot
    y.scope,                                    -- the wallet
    y.reference,                                -- of the caller, once in a wallet
    y.category,                                 -- of the caller, as paid or promotional
    y.priority,                                 -- the lower one is drawn first
    case when y.pending > 0 then 'pending' when y.rest + y.kept > 0 and y.expires_at <= c.now then 'ended' when y.rest + y.kept > 0 then 'open' when y.held > 0 then 'held'
        when y.lapsed > 0 or y.rolled > 0 then 'ended' when y.revoked > 0 and y.revoked = y.amount then 'revoked' else 'used up' end as state, -- ended: units were left at its end, whether that is written down or not. held: the rest is in open holds and leases
    case y.origin when 'g' then 'granted' when 'c' then 'credited' when 'r' then 'rolled over' else 'given back late' end as origin, -- where its units are from
    y.from_lot,                                 -- the lot that they were in before
    y.granted_at,                               -- when it was granted
    nullif(y.expires_at, 'infinity') as expires_at, -- nothing is drawn of it from here on, or null: it never ends
    y.amount as granted,                        -- units that it was granted with
    y.rest + y.kept as rest,                    -- units that can be drawn. After its end, units that lapse or roll over with the next write or sweep
    y.drawn,                                    -- units that were spent, less refunds
    y.held,                                     -- units in open holds and leases, after its end, too
    y.lapsed,                                   -- units that were left at its end or refunded later: breakage
    y.revoked,                                  -- units that were taken back
    y.rolled,                                   -- units that rolled over into another lot
    y.granted_seq,                              -- the entry that credited it
    y.last_seq,                                 -- the last entry that moved units of it
    y.pending,                                  -- units that nobody can draw before starts_at
    y.starts_at,                                -- when it begins, or began, or null: with the grant
    (y.plan).of_reference as of_reference,      -- the reference of the lot that had its units first, or null
    (y.plan).renewal as renewal,                -- the reference of the grant that renews by it, or null
    (y.plan).uses as uses                       -- the uses that it pays for alone, or null: all
from metered.lots y, (select metered.clock() as now) c;

-- The statement of each wallet by lot: which lots each entry was of, so where credit went. By scope it reads a primary key, and a
-- look-up for each row. A lot or a time alone does not help. Moves of entries that were purged are gone.
create view metered.lots_statement as
select m.scope,                                 -- the wallet
    m.seq,                                      -- the entry: statement.seq
    m.nth,                                      -- 1, 2, 3 and so on in the entry
    l.at,                                       -- when, by the database's clock
    nullif(m.lot, 0) as lot,                    -- lots_words.no, or null: overdraft, which no lot covers
    y.reference,                                -- of the lot
    y.category,                                 -- of the lot
    case m.kind when 'd' then 'credited' when 't' then 'taken' when 'p' then 'paid back' when 'g' then 'given back' when 'h' then 'held' when 'q' then 'held after'
        when 'u' then 'captured' when 'f' then 'freed' when 'e' then 'lapsed' when 'v' then 'revoked' when 'o' then 'rolled over' when 's' then 'scheduled' when 'w' then 'withdrawn' when 'a' then 'applied' when 'b' then 'kept' when 'n' then 'reinstated' when 'm' then 'reinstated' end as does, -- the effect on the lot. paid back: taken for an earlier overdraft. held after: taken for overdrawn units of an earlier hold. applied: for the use of the next entry. kept: for its uses again
    m.amount,                                   -- units
    case when m.lot = 0 then null when m.kind in ('d', 'g', 'f', 'n') then m.amount when m.kind in ('u', 's', 'w', 'a', 'b', 'm') then 0 else -m.amount end as change, -- of the lot's rest
    m.back as given_back,                       -- drawn units that refunds gave back
    l.ref as refunds_seq,                       -- of a refund: the number of its charge
    l.hold,                                     -- the hold's id, where the entry is about one alone
    l.operation_tenant,                         -- of the operation
    l.operation,                                -- the operation's id
    l.note ->> 'actor' as actor,                -- who made the entry
    l.note ->> 'reason' as reason,              -- why
    l.note ->> 'use' as use                     -- what it is for
from metered.lot_moves m
    join metered.ledger l on l.scope = m.scope and l.seq = m.seq
    left join metered.lot_rows y on y.no = m.lot;

-- The lines of parked jobs: one row for each scope for whose units jobs wait. By scope it reads an index. Everything else reads all
-- lines. oldest_at costs a look-up for each row that is shown.
create view metered.parked_scopes_words as
select p.scope,                                 -- the scope whose units the jobs wait for
    p.waiting,                                  -- jobs in the line
    (select j.parked_at from metered.parked_jobs j where j.scope = p.scope order by j.parked_at limit 1) as oldest_at, -- when the job was parked that waits longest
    case when p.wake_at <= c.now then 'due' when p.wake_at < c.now + interval '5 years' then 'waits for a time' else 'waits for units' end as state, -- due: a releaser is to look at it now
    case when p.wake_at > '-infinity' and p.wake_at < c.now + interval '5 years' then p.wake_at end as looked_at, -- when it is looked at, if no units are freed before. A job's hold without a TTL would end in ten years: that is no time to wait for
    p.started,                                  -- jobs of the line that started since then
    p.since,                                    -- when the line began, or an hour or two ago
    p.trouble                                   -- why the last look at the line failed, or null
from metered.parked_scopes p, (select metered.clock() as now) c;

-- Parked jobs, without their args. By job_id, by scope in the order of priority, turn and job_id, or those in trouble (trouble is not null), it reads an index. Everything else
-- reads all parked jobs. position counts the jobs before each row that is shown: ask for it of a few rows only.
create view metered.parked_jobs_words as
select j.job_id,                                -- the id that it will have in river_job
    j.scope,                                    -- the scope whose units it waits for, or empty: it is in no line until its next attempt, or its next try
    j.amount,                                   -- units that it needs of the scope
    j.priority,                                 -- River's: 1 is first
    1 + (select count(*) from (select from metered.parked_jobs b where b.scope = j.scope and (b.priority, b.turn, b.job_id) < (j.priority, j.turn, j.job_id)
        order by b.priority desc, b.turn desc, b.job_id desc limit 9999) y) as position, -- in the line: 1 is next. No further than 10,000
    j.turn,                                     -- its round in the line: jobs of different keys take turns
    j.fair,                                     -- the key of its turns
    j.tenant,                                   -- of the job and its hold
    j.job ->> 'queue' as queue,                 -- River's queue
    j.job ->> 'kind' as kind,                   -- River's kind
    j.job -> 'metadata' ->> 'metered:key' as key, -- of the caller, or null
    j.job -> 'metadata' ->> 'metered:hold' as hold, -- the id that its hold will have
    j.parked_at,                                -- when it was parked
    j.drop_at,                                  -- when it is dropped, or null: never
    j.not_before,                               -- when its next attempt may start, or null: it waits for its first
    j.lane,                                     -- 0, or 1: the row of its second choice of units, for which it waits as well
    j.trouble,                                  -- why its last try failed, or null: it is not in trouble
    j.troubled_at,                              -- when that began, or null
    j.retry_at                                  -- when it is tried again, or null
from metered.parked_jobs j;

-- SQL for programs in other languages: the functions v1_*. Their names, arguments and answers are a
-- contract, which no later version of the schema breaks: another one gets names of its own. They take
-- scalars and jsonb, derive the keys of locks, and answer by an object: {"ok": true, ...}, or
-- {"ok": false, "code": ..., "status": ...} for a refusal, which wrote nothing, with the codes and the
-- statuses of HTTP that the Go library has. A wrong argument raises SQLSTATE 22023. They wait for a
-- lock for 5 seconds at most, and for a clock that runs ahead they have the library's default.
--
-- Each expression costs as much as it has operators, once in each transaction. So a call on the short
-- way (plain.sql) has few, and what is seldom needed stands in a statement of its own.

-- A refusal as an answer.
create function metered._v1_no(code text, status int) returns jsonb
language sql stable
as $$
    select jsonb_build_object('ok', false, 'code', code, 'status', status)
$$;

-- A limit as the functions below take it. Of window, period, lifetime and prepaid it has one.
create function metered._v1_limit(given jsonb) returns metered.charge_limit
language plpgsql stable
as $$
declare
    lim  metered.charge_limit;
    fits boolean;
begin
    lim.max := given ->> 'max';
    if given - '{name,max,window}'::text[] = '{}' then
        lim.win := interval '1 second' * date_part('epoch', (given ->> 'window')::interval);
        fits := lim.win > interval '0' and lim.win <= interval '3660 days';
    elsif given - '{name,max,period,time_zone,anchor}'::text[] = '{}' then
        lim.period := row(case when given ->> 'period' in ('day', 'week', 'month', 'year') then '1 ' else '' end
            || (given ->> 'period'), given ->> 'anchor', given ->> 'time_zone');
        fits := given ? 'period' and (not given ? 'time_zone' or octet_length(given ->> 'time_zone') <= 64
            and given ->> 'time_zone' ~ '^(UTC|Etc/GMT[+-][0-9]{1,2}|[A-Z][A-Za-z]+(/[A-Z][A-Za-z_-]*)+)$');
    else
        lim.max := coalesce(lim.max, case when given ? 'prepaid' then 0 end);
        lim.win := interval '0';
        fits := given - '{name,max}'::text[] in ('{"lifetime": true}', '{"prepaid": true}');
    end if;
    if (lim.max >= 0 and fits) is not true then
        raise exception 'out of bounds: limits' using errcode = '22023', detail = left(given::text, 200),
            hint = 'A limit has max, a name or none, and one of window, period, lifetime and prepaid.';
    end if;
    return lim;
end
$$;

-- The charge of a scope as the functions below take it. Without limits it may be a tally. Null is no
-- list of limits.
create function metered._v1_charge(of_scope text, amount bigint, held bigint, limits jsonb,
    note jsonb, must_exist boolean) returns metered.new_charge[]
language sql stable
as $$
    select array[row(of_scope, metered._scope_key(of_scope), amount, held,
        (select array_agg(metered._v1_limit(x) order by n)
         from jsonb_array_elements(coalesce(limits, '0')) with ordinality y(x, n)),
        note, must_exist, null, null)::metered.new_charge]
$$;

-- A limit as it stands.
create function metered._v1_stand(given jsonb, used numeric, held bigint) returns jsonb
language sql stable
as $$
    select given || jsonb_build_object('used', used, 'held', held, 'available',
        greatest(0, coalesce((given ->> 'max')::numeric, 0) - used - held))
$$;

-- The limits as they stand, with more units that were let in.
create function metered._v1_standings(limits jsonb, used bigint[], held bigint, more bigint)
    returns jsonb
language sql stable
as $$
    select coalesce(jsonb_agg(metered._v1_stand(x, used[n] + more, held) order by n), '[]')
    from jsonb_array_elements(limits) with ordinality y(x, n)
$$;

-- The refusal of charges of a scope. retry_after has whole seconds, and is missing if waiting alone
-- does not help.
create function metered._v1_refused(refused jsonb, limits jsonb) returns jsonb
language sql stable
as $$
    select case refused -> 0 ->> 'absent' when 'unknown' then metered._v1_no('scope_unknown', 404)
        when 'retired' then metered._v1_no('scope_retired', 410)
        else metered._v1_no('budget_exceeded', case when bool_or(y.asked ? 'prepaid') then 402
                when bool_or(y.asked ? 'lifetime') then 409 else 429 end)
            || jsonb_build_object('limits', jsonb_agg(metered._v1_stand(y.asked, y.used, y.held)))
            || case when min(y.us) >= 0 and not bool_or(y.asked ? 'prepaid') then jsonb_build_object(
                'retry_after', greatest(1, ceil(max(y.us) / 1000000))) else '{}' end end
    from (select limits -> (x ->> 'limit')::int as asked, (x ->> 'retry_us')::numeric as us,
            (x ->> 'used')::numeric as used, (x ->> 'held')::bigint + (x ->> 'own')::bigint
                + (x ->> 'leased')::bigint as held
        from jsonb_array_elements(refused) x) y
$$;

-- Charges units of a scope if all limits let them in: seq, the entry, and the limits as they stand.
create function metered.v1_charge(scope text, amount bigint, limits jsonb default '[]',
    note jsonb default null, must_exist boolean default false) returns jsonb
language plpgsql volatile
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set plan_cache_mode = force_generic_plan
as $$
declare
    one       jsonb;
    standing  boolean;
    win       interval;
    max_units bigint;
    key       bigint;
    of_scope  alias for scope;  -- the names of the short way
    units     alias for amount;
    wait_ms   int := 5000;
    of_tenant text;
    of_id     text;
    e_seq    bigint;        -- the entry that was appended, or null
    e_at     timestamptz;
    e_held   bigint;
    e_used   bigint;        -- units that counted before it
    posted    metered.charged;  -- where anything is unusual
begin
    if octet_length(scope) > 255
        or pg_column_size(limits) > 65540
        or pg_column_compression(limits) is not null and octet_length(limits::text) > 65536
        or jsonb_array_length(limits) > 16
        or pg_column_size(note) > 8196
        or pg_column_compression(note) is not null and octet_length(note::text) > 8192
        or jsonb_typeof(note) <> 'object' then
        raise exception 'out of bounds: an argument of v1_charge' using errcode = '22023';
    end if;
    one := limits -> 0;
    if one - '{name,max,window}'::text[] = '{}' and jsonb_array_length(limits) = 1 then
        max_units := one ->> 'max';
        win := interval '1 second' * date_part('epoch', (one ->> 'window')::interval);
        standing := max_units >= 0 and win > interval '0' and win <= interval '3660 days';
    elsif limits in ('[]', '[{"prepaid": true}]') then
        standing := true;
        max_units := case when one is not null then 0 end;
        win := interval '0';
    end if;
    key := metered._scope_key(scope);
    if standing and metered._goes_short() and must_exist is not true
        and current_setting('transaction_isolation') = 'read committed' and units between 1 and 9007199254740992 and (note is null or pg_column_size(note) <= 8192
                and pg_column_compression(note) is null and not note ? 'use')
        and (one is not null or metered._try_lock(key))     -- a mere sum waits for nobody
    then
        if metered._try_lock(key) is not true then
            perform metered._lock_all_scopes(array[of_scope], array[key], wait_ms);
        end if;
        if standing and win > interval '0' then
                insert into metered.ledger as y (seq, amount, at, spent, refunded, credited, held, epoch, kind, scope, next_due, operation_tenant, operation, note,
                    others, anchor_at, anchor_spent)
                select t.seq + 1, units, t.clk, t.spent + units, t.refunded, t.credited, t.held, t.epoch, 'c', of_scope, t.next_due, of_tenant,
                    of_id, note, int8smaller(t.others, t.seq), case when b.spent > 0 then t.clk - win end, nullif(b.spent, 0)
                from (select l.seq, l.at, l.spent, l.refunded, l.credited, l.held, l.epoch, l.scope, l.next_due, l.anchor_at,
                l.anchor_spent, l.lots_end, l.crossed, l.tallied, l.others, metered.clock() as clk
            from metered.ledger l where l.scope = of_scope and not metered._in_cell()
            order by l.seq desc limit 1) t left join lateral (select base.seq, base.spent, base.refunded
                    from (select y.seq from metered.ledger y
                where y.scope = of_scope and y.epoch = t.epoch and y.at <= t.clk - win and (y.seq & 15 = 1 or y.kind = 'k')
                order by y.at desc, y.seq desc limit 1) mark,
            lateral (select y.seq, y.spent, y.refunded from metered.ledger y
                where y.scope = of_scope and y.seq between mark.seq and mark.seq + 15 and y.epoch = t.epoch and y.at <= t.clk - win
                order by y.seq desc limit 1) base) b on true
                where (t.held = 0 or t.seq & 15 > 1) and t.at <= t.clk and (t.next_due <= t.clk) is not true and t.lots_end is null and t.tallied is null and t.crossed is null and true
                    and coalesce(b.refunded, 0) = t.refunded and (b.seq > 1 or b.seq = t.seq or t.epoch = 0 and (t.seq <= 16 and b.seq is null
                        or (select l.seq from metered.ledger l where l.scope = of_scope and l.seq = 2) > 0)) and t.spent - coalesce(b.spent, 0) <= max_units - t.held - units
                on conflict do nothing
                returning y.seq, y.at, y.held, y.spent - units - coalesce(y.anchor_spent, 0) into e_seq, e_at, e_held, e_used;
            else
                insert into metered.ledger as y (seq, amount, at, spent, refunded, credited, held, epoch, kind, scope, next_due, operation_tenant, operation, note,
                    others, anchor_at, anchor_spent)
                select t.seq + 1, units, t.clk, t.spent + units, t.refunded, t.credited, t.held, t.epoch, 'c', of_scope, t.next_due, of_tenant,
                    of_id, note, int8smaller(t.others, t.seq), t.anchor_at, t.anchor_spent
                from (select l.seq, l.at, l.spent, l.refunded, l.credited, l.held, l.epoch, l.scope, l.next_due, l.anchor_at,
                l.anchor_spent, l.lots_end, l.crossed, l.tallied, l.others, metered.clock() as clk
            from metered.ledger l where l.scope = of_scope and not metered._in_cell()
            order by l.seq desc limit 1) t
                where (t.held = 0 or t.seq & 15 > 1) and t.at <= t.clk and (t.next_due <= t.clk) is not true and t.lots_end is null and t.tallied is null and t.crossed is null and true
                    and (max_units is null or win >= interval '0'
            and case when win = interval '0' then t.spent - t.refunded - t.credited
                else t.spent - case when t.anchor_at <= t.clk - win then t.anchor_spent else 0 end end <= max_units - t.held - units)
                on conflict do nothing
                returning y.seq, y.at, y.held, y.spent - units - y.refunded - y.credited into e_seq, e_at, e_held, e_used;
            end if;
        if e_seq > 0 then
            return format(case when one is null then '{"ok": true, "seq": %s, "at": %s, "limits": []}' else
                '{"ok": true, "seq": %s, "at": %s, "limits": [%s, "used": %s, "held": %s, "available": %s}]}' end,
                e_seq, to_json(e_at), left(one::text, -1), e_used + units, e_held,
                max_units - e_used - units - e_held)::jsonb;
        end if;
    end if;
    posted := metered._write_charges(metered._v1_charge(scope, amount, 0, limits, note, must_exist),
        interval '1 minute', wait_ms, null, 'answer', null, true);
    return case when posted.refused is not null then metered._v1_refused(posted.refused, limits)
        else jsonb_build_object('ok', true, 'seq', posted.seqs[1], 'at', posted.ats[1],
            'limits', metered._v1_standings(limits, posted.used, posted.held[1], amount)) end;
end
$$;

-- The answer of v1_charge at this moment, without a lock and without writing.
create function metered.v1_check(scope text, amount bigint, limits jsonb default '[]',
    note jsonb default null, must_exist boolean default false) returns jsonb
language plpgsql stable
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set plan_cache_mode = force_generic_plan
as $$
declare
    looked record;
begin
    if octet_length(scope) > 255
        or pg_column_size(limits) > 65540
        or pg_column_compression(limits) is not null and octet_length(limits::text) > 65536
        or jsonb_array_length(limits) > 16
        or pg_column_size(note) > 8196
        or pg_column_compression(note) is not null and octet_length(note::text) > 8192
        or jsonb_typeof(note) <> 'object' then
        raise exception 'out of bounds: an argument of v1_check' using errcode = '22023';
    end if;
    looked := metered.check_charge(
        metered._v1_charge(scope, amount, 0, limits, note, must_exist), interval '1 minute');
    return case when looked.refused is not null then metered._v1_refused(looked.refused, limits)
        else jsonb_build_object('ok', true,
            'limits', metered._v1_standings(limits, looked.used, looked.held[1], 0)) end;
end
$$;

-- Gives a scope credit, which limits for its lifetime and prepaid ones count.
create function metered.v1_credit(scope text, amount bigint, note jsonb default null,
    must_exist boolean default false) returns jsonb
language plpgsql volatile
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set plan_cache_mode = force_generic_plan
as $$
declare
    given record;
begin
    if octet_length(scope) > 255
        or pg_column_size(note) > 8196
        or pg_column_compression(note) is not null and octet_length(note::text) > 8192
        or jsonb_typeof(note) <> 'object' then
        raise exception 'out of bounds: an argument of v1_credit' using errcode = '22023';
    end if;
    given := metered.credit(scope, metered._scope_key(scope), amount, must_exist, 5000,
        row(null, null, note)::metered.origin, false);
    return case when given.refused is not null then metered._v1_refused(given.refused, '[]')
        else jsonb_build_object('ok', true, 'seq', given.seq, 'at', given.at) end;
end
$$;

-- Gives back units of a charge, by its entry, or all that is left of it. remaining are those that can
-- still be given back.
create function metered.v1_refund(scope text, seq bigint, amount bigint default null,
    note jsonb default null) returns jsonb
language plpgsql volatile
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set plan_cache_mode = force_generic_plan
as $$
declare
    given record;
begin
    if octet_length(scope) > 255
        or pg_column_size(note) > 8196
        or pg_column_compression(note) is not null and octet_length(note::text) > 8192
        or jsonb_typeof(note) <> 'object' then
        raise exception 'out of bounds: an argument of v1_refund' using errcode = '22023';
    end if;
    given := metered.refund(scope, metered._scope_key(scope), seq, amount, 5000,
        row(null, null, note)::metered.origin, false);
    return case given.status when 'ok' then jsonb_build_object('ok', true, 'seq', given.seq,
                'at', given.at, 'amount', given.amount)
            when 'missing' then metered._v1_no('budget_unknown_entry', 404)
            when 'purged' then metered._v1_no('budget_entry_purged', 409)
            when 'kind' then metered._v1_no('budget_not_charge', 409)
            else metered._v1_no('budget_refund_exceeds', 409) end
        || jsonb_strip_nulls(jsonb_build_object('remaining', given.remaining));
end
$$;

-- The units and charges that count for each limit now, or for the lifetime without limits, and the
-- scope's totals.
create function metered.v1_usage(scope text, limits jsonb default '[]') returns jsonb
language plpgsql stable
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set plan_cache_mode = force_generic_plan
as $$
declare
    asked  metered.charge_limit;
    now_in record;
    stand  text := '';
begin
    if octet_length(scope) > 255
        or pg_column_size(limits) > 65540
        or pg_column_compression(limits) is not null and octet_length(limits::text) > 65536
        or jsonb_array_length(limits) > 16 then
        raise exception 'out of bounds: an argument of v1_usage' using errcode = '22023';
    end if;
    for nth in 0..greatest(1, jsonb_array_length(coalesce(limits, '0'))) - 1 loop
        if limits = '[]' then
            asked.win := interval '0';
        else
            asked := metered._v1_limit(limits -> nth);
        end if;
        select y.used, y.held + y.leased as held, y.spent, y.refunded, y.credited, y.charges into now_in
        from metered.usage_of(array[scope], array[asked.win], array[asked.period], true) y;
        stand := stand || format('%s, "used": %s, "held": %s, "available": %s, "charges": %s}, ',
            left((limits -> nth)::text, -1), now_in.used, now_in.held,
            greatest(0, asked.max::numeric - now_in.used - now_in.held), now_in.charges);
    end loop;
    return format('{"ok": true, "spent": %s, "refunded": %s, "credited": %s, "held": %s, "used": %s, %s}',
        now_in.spent, now_in.refunded, now_in.credited, now_in.held,
        now_in.spent - now_in.refunded - now_in.credited, case when limits = '[]'
            then format('"charges": %s', now_in.charges) else format('"limits": [%s]', left(stand, -2)) end)::jsonb;
end
$$;

-- The units of a wallet that can be drawn, those that are held, and its lots, in the order in which
-- they are drawn.
create function metered.v1_balance(scope text) returns jsonb
language plpgsql stable
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set plan_cache_mode = force_generic_plan
as $$
declare
    now_in record;
begin
    if octet_length(scope) > 255 then
        raise exception 'out of bounds: an argument of v1_balance' using errcode = '22023';
    end if;
    now_in := metered.wallet_balance(scope);
    return jsonb_build_object('ok', true, 'units', now_in.units, 'held', now_in.held,
        'lots', coalesce(now_in.lots, '[]'));
end
$$;

-- The functions of v1.sql about holds, tokens, ids and jobs that wait.

-- The time that an id carries, if it is a UUID of version 7 with hyphens. A regular expression would
-- cost as much as the row of a hold.
create function metered._v1_issued(id text) returns timestamptz
language sql stable
as $$
    select case when translate(id, '123456789abcdefABCDEF', '000000000000000000000')
            = '00000000-0000-0000-0000-000000000000'
            and substr(id, 15, 1) = '7' and strpos('89abAB', substr(id, 20, 1)) > 0
        then timestamptz 'epoch' + ('x' || left(replace(id, '-', ''), 12))::bit(48)::bigint * interval '1 millisecond' end
$$;

-- The fingerprint of what an id was used for.
create function metered._v1_print(content text) returns bytea
language sql stable
as $$
    select decode('56', 'hex') || sha256(convert_to(content, 'UTF8'))
$$;

-- A hold as an answer.
create function metered._v1_hold(hold json) returns jsonb
language sql stable
as $$
    select jsonb_build_object('deadline', hold -> 'deadline', 'lines', (hold ->> 'lines')::jsonb,
        'state', case when (hold ->> 'returned')::boolean then 'returned' else case hold ->> 'state'
            when 'h' then 'held' when 'c' then 'captured' when 'r' then 'released'
            else 'expired' end end)
$$;

-- The refusal of a transition of a hold.
create function metered._v1_hold_no(refused json) returns jsonb
language sql stable
as $$
    select case refused ->> 'status'
        when 'retired' then metered._v1_no('hold_retired', 409)
        when 'excess' then metered._v1_no('hold_excess', 409)
            || jsonb_build_object('available', (refused ->> 'open')::bigint)
        when 'state' then metered._v1_no('hold_' || (metered._v1_hold(refused -> 'hold') ->> 'state'), 409)
            || jsonb_build_object('hold', metered._v1_hold(refused -> 'hold'))
        when 'unconfirmed' then metered._v1_no('invalid_argument', 400)
        when 'line' then metered._v1_no('invalid_argument', 400)
        else metered._v1_no('hold_unknown', 404) end
$$;

-- Holds units of a scope for so long, if all limits let them in. The id names the hold within its
-- tenant: the same call again answers with the hold as it stands, and new is false.
create function metered.v1_hold(tenant text, id text, scope text, amount bigint, ttl interval,
    limits jsonb default '[]', note jsonb default null, metadata jsonb default null) returns jsonb
language plpgsql volatile
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set plan_cache_mode = force_generic_plan
as $$
declare
    print  bytea;
    one    jsonb;
    standing boolean;
    win    interval;
    max_units bigint;
    answer json;    -- of place_plain
    placed record;
begin
    if greatest(octet_length(tenant), octet_length(id), octet_length(scope)) > 255
        or pg_column_size(limits) > 65540
        or pg_column_compression(limits) is not null and octet_length(limits::text) > 65536
        or jsonb_array_length(limits) > 16
        or pg_column_size(note) > 8196
        or pg_column_compression(note) is not null and octet_length(note::text) > 8192
        or jsonb_typeof(note) <> 'object'
        or pg_column_size(metadata) > 65540
        or pg_column_compression(metadata) is not null and octet_length(metadata::text) > 65536 then
        raise exception 'out of bounds: an argument of v1_hold' using errcode = '22023';
    end if;
    if tenant is null then
        perform metered._require(false, 'hold');
    end if;
    print := metered._v1_print(json_build_array(scope, amount, extract(epoch from ttl), limits, metadata)::text);
    one := limits -> 0;
    if one - '{name,max,window}'::text[] = '{}' and jsonb_array_length(limits) = 1 then
        max_units := one ->> 'max';
        win := interval '1 second' * date_part('epoch', (one ->> 'window')::interval);
        standing := max_units >= 0 and win > interval '0' and win <= interval '3660 days';
    elsif limits in ('[]', '[{"prepaid": true}]') then
        standing := true;
        max_units := case when one is not null then 0 end;
        win := interval '0';
    end if;
    if standing then
        answer := metered.place_plain(tenant, id, metered._lock_key('metered/hold/metered',
                convert_to(tenant, 'UTF8') || decode('00', 'hex') || convert_to(id, 'UTF8')),
            tenant, print, metered._v1_issued(id), ttl, interval '0', null, metadata::json, scope,
            metered._scope_key(scope), amount, max_units, win, note, null, null,
            interval '1 minute', 5000, null, false);
    else
        placed := metered.place(row(tenant, id, true, null, tenant, null, print,
                metered._v1_issued(id), ttl, interval '0', null, metadata::json, null)::metered.new_hold,
            metered._v1_charge(scope, amount, amount, limits, note, false), interval '1 minute', 5000,
            row(null, null, note)::metered.origin, null, false);
        answer := metered._placed_json(placed.status, placed.placed_at, placed.deadline,
            placed.refused, placed.stored, null);
    end if;
    if json_typeof(answer) = 'array' then
        return format('{"ok": true, "new": true, "state": "held", "deadline": %s}', to_json(
            timestamptz 'epoch' + (answer ->> 1)::bigint * interval '1 microsecond' + ttl))::jsonb;
    end if;
    return case answer ->> 'status'
        when 'placed' then jsonb_build_object('ok', true, 'new', true, 'state', 'held', 'deadline',
            timestamptz 'epoch' + (answer ->> 'deadline')::bigint * interval '1 microsecond')
        when 'same' then jsonb_build_object('ok', true, 'new', false)
            || metered._v1_hold((answer ->> 'stored')::json)
        when 'refused' then metered._v1_refused((answer ->> 'refused')::jsonb, limits)
        else metered._v1_no('hold_' || (answer ->> 'status'), 409) end;
end
$$;

-- Spends so many units of a hold of one line, or all units of a hold without an amount, and ends it.
-- The rest is free.
create function metered.v1_capture(tenant text, id text, amount bigint default null,
    note jsonb default null) returns jsonb
language plpgsql volatile
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set plan_cache_mode = force_generic_plan
as $$
declare
    line   text;
    answer json;
begin
    if greatest(octet_length(tenant), octet_length(id)) > 255
        or pg_column_size(note) > 8196
        or pg_column_compression(note) is not null and octet_length(note::text) > 8192
        or jsonb_typeof(note) <> 'object' then
        raise exception 'out of bounds: an argument of v1_capture' using errcode = '22023';
    end if;
    if amount is not null then
        select min(x.scope) into line from metered.holds h,
            lateral (select y.scope from metered.hold_lines y where y.hold = h.no) x
        where h.tenant = v1_capture.tenant and h.id = v1_capture.id having count(*) <= 1;
        if not (found and amount > 0) then
            perform metered._require(false, 'amount');
        end if;
        line := coalesce(line, '-');    -- of no hold
    end if;
    answer := metered.capture_holds_plain(tenant, id, metered._v1_issued(id), '', line, amount, null,
        note, null, null, 5000, null, false);
    return case
        when json_typeof(answer) = 'object' then '{"ok": true}' || metered._v1_hold(answer)
        when json_typeof(answer -> 0) = 'string' then metered._v1_hold_no((answer ->> 0)::json)
        else '{"ok": true}' || metered._v1_hold((answer -> 1 ->> 0)::json) end;
end
$$;

-- Ends a hold, and frees its units.
create function metered.v1_release(tenant text, id text, note jsonb default null) returns jsonb
language plpgsql volatile
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set plan_cache_mode = force_generic_plan
as $$
declare
    ended record;
begin
    if greatest(octet_length(tenant), octet_length(id)) > 255
        or pg_column_size(note) > 8196
        or pg_column_compression(note) is not null and octet_length(note::text) > 8192
        or jsonb_typeof(note) <> 'object' then
        raise exception 'out of bounds: an argument of v1_release' using errcode = '22023';
    end if;
    ended := metered.release_holds(row(tenant, array[id],
            array[coalesce(metered._v1_issued(id), 'infinity')], '')::metered.hold_ids,
        5000, row(null, null, note)::metered.origin, null, false);
    return case when ended.refused is not null then metered._v1_hold_no(ended.refused)
        else '{"ok": true}' || metered._v1_hold(ended.holds[1]) end;
end
$$;

-- Takes one use of a token, by its text.
create function metered.v1_consume(token text, purpose text, subject text) returns jsonb
language plpgsql volatile
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set plan_cache_mode = force_generic_plan
as $$
declare
    taken record;
begin
    if octet_length(token) > 255
        or octet_length(purpose) > 128
        or octet_length(subject) > 512 then
        raise exception 'out of bounds: an argument of v1_consume' using errcode = '22023';
    end if;
    taken := metered.consume_token(sha256(convert_to(token, 'UTF8')), purpose, subject, 5000);
    return case when taken.status = 'ok'
        then jsonb_build_object('ok', true, 'payload', taken.payload, 'uses_left', taken.uses_left)
        else metered._v1_no('token_invalid', 403) end;
end
$$;

-- Claims an id for this transaction, which v1_answer must end, else COMMIT fails. If the id was
-- answered before, new is false, and answer is that one. The content is what the id is used for:
-- another one is a conflict.
create function metered.v1_claim(tenant text, id text, content jsonb default null) returns jsonb
language plpgsql volatile
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set plan_cache_mode = force_generic_plan
as $$
declare
    print  bytea;
    unused text;
    before json;
begin
    if greatest(octet_length(tenant), octet_length(id)) > 255
        or pg_column_size(content) > 1048580
        or pg_column_compression(content) is not null and octet_length(content::text) > 1048576 then
        raise exception 'out of bounds: an argument of v1_claim' using errcode = '22023';
    end if;
    print := metered._v1_print(coalesce(content, 'null')::text);
    if (tenant is not null and id <> '') is not true then
        perform metered._require(false, 'id');
    end if;
    before := metered.begin_command_plain(tenant, id, metered._lock_key('metered/operation/metered',
            int8send(octet_length(tenant)) || convert_to(tenant, 'UTF8')
            || int8send(octet_length(id)) || convert_to(id, 'UTF8')),
        metered._v1_issued(id), interval '5 minutes', null, 'v1', 5000, false);
    if before is null then
        unused := set_config('metered_tx.v1',
            jsonb_build_array(tenant, id, encode(print, 'hex'))::text, true);
        return '{"ok": true, "new": true}';
    end if;
    return case
        when before ->> 'status' <> 'replay' then metered._v1_no('operation_' || (before ->> 'status'),
            case before ->> 'status' when 'future' then 400 else 409 end)
        when decode(before ->> 'fingerprint', 'base64') <> print
            then metered._v1_no('operation_conflict', 422)
        else jsonb_build_object('ok', true, 'new', false, 'answer',
            convert_from(decode(before ->> 'result', 'base64'), 'UTF8')::jsonb) end;
end
$$;

-- Records the answer of the id that this transaction has claimed, and lets COMMIT pass.
create function metered.v1_answer(answer jsonb) returns jsonb
language plpgsql volatile
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set plan_cache_mode = force_generic_plan
as $$
declare
    of     jsonb;
    unused text;
begin
    if pg_column_size(answer) > 1048580
        or pg_column_compression(answer) is not null and octet_length(answer::text) > 1048576 then
        raise exception 'out of bounds: an argument of v1_answer' using errcode = '22023';
    end if;
    of := nullif(current_setting('metered_tx.v1', true), '')::jsonb;
    if (current_setting('metered_tx.command', true) = 'v1' and answer is not null) is not true then
        perform metered._require(false, 'answer');
    end if;
    unused := metered.complete_command_plain(of_tenant => of ->> 0, of_id => of ->> 1,
        marker => 'v1', of_fingerprint => decode(of ->> 2, 'hex'),
        issued => metered._v1_issued(of ->> 1), of_result => convert_to(answer::text, 'UTF8'),
        name => null, jobs => null, of_scope => null, key => null, units => null,
        max_units => null, win => null, note => null, whole => null, standing => false,
        ahead => interval '1 minute', wait_ms => 5000);
    unused := set_config('metered_tx.v1', '', true);
    return '{"ok": true}';
end
$$;

-- Holds units of a scope for a job of River's until it ends. status is started, and the caller
-- inserts job into river_job, or parked until the units fit. job_id is of River's sequence.
create function metered.v1_enqueue(job_id bigint, kind text, args jsonb, tenant text, scope text,
    amount bigint, limits jsonb default '[]', queue text default 'default', most int default null)
    returns jsonb
language plpgsql volatile
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set plan_cache_mode = force_generic_plan
as $$
declare
    member text := concat('job/', job_id, '/', left(replace(gen_random_uuid()::text, '-', ''), 16));
    parked record;
begin
    if greatest(octet_length(kind), octet_length(tenant), octet_length(scope), octet_length(queue)) > 255
        or pg_column_size(args) > 16777220
        or pg_column_compression(args) is not null and octet_length(args::text) > 16777216
        or pg_column_size(limits) > 65540
        or pg_column_compression(limits) is not null and octet_length(limits::text) > 65536
        or jsonb_array_length(limits) > 16
        or most > 1000 then
        raise exception 'out of bounds: an argument of v1_enqueue' using errcode = '22023';
    end if;
    select * into parked from metered.park_jobs(jsonb_build_array(jsonb_strip_nulls(jsonb_build_object(
            'job_id', job_id, 'kind', kind, 'queue', queue, 'priority', 1, 'max_attempts', 25,
            'tags', '[]'::jsonb, 'fair', tenant, 'most', most,
            'metadata', jsonb_build_object('metered:tenant', tenant, 'metered:hold', member),
            'hold', row(tenant, 'job', false, null, 'job', null, metered._v1_print('null'), null,
                interval '3650 days', interval '0', null, null, null)::metered.new_hold::text,
            'charges', metered._v1_charge(scope, amount, amount, limits, null, false)::text))
        || jsonb_build_object('args', args)), interval '1 minute', 5000, null, null, false);
    return case parked.status
        when 'refused' then metered._v1_refused(parked.refused, limits)
        when 'full' then metered._v1_no('jobs_full', 429)
        else jsonb_build_object('ok', true, 'status', parked.status,
            'job', parked.job - '{hold,charges,fair,most}'::text[]) end;
end
$$;

comment on function metered.keep_memory() is 'True, and makes a session on Postgres 14 faster: as it plans a statement of metered.clock(), the planner works this constant out, and nothing is left of it. That takes and frees a block of a megabyte, and so has glibc''s malloc keep up to 2 MB of free memory. Else it gives memory beyond 128 kB back to the kernel, and asks for it again up to four times in a place, a capture or a release: 15 to 19 percent of their time. See ADR 8. Later versions do that by themselves, and the block, taken at each statement that is planned, would be a third of the first call on a new connection.';
comment on function metered.clock() is 'The only clock. clock_timestamp(), because now() is the start of the transaction, and a slow one would write entries already outside their window.';
comment on domain metered.units is 'The amount of an entry, never negative: nobody can make one that takes spending back. A domain, since a table''s check would be parsed anew for each statement that inserts: 6 microseconds.';
comment on domain metered.amount is 'An amount from 1 to 2^53.';
comment on domain metered.scope_name is 'The name of a scope, 1 to 255 bytes.';
comment on domain metered.fingerprint is 'A fingerprint: a version byte and a SHA-256.';
comment on type metered.period is 'A period: a number of months or days of the calendar of a zone, by its name, or without a zone a number of microseconds. It is counted from the anchor; a calendar without one has the first day of its months and years, and Monday.';
comment on type metered.charge_limit is 'A limit: so many units in each window of this length, or in the scope''s lifetime (0), or, if win is null, in each period. thresholds are reported when they are crossed, and tell_at is the lowest of them (see thresholds.sql): a charge that crosses one is only made if its caller is telling.';
comment on type metered.new_charge is 'Units of one scope that a call spends or holds. amount is how many units more count against the scope''s limits, and held is how many more are held; so spending grows by amount - held. Its four uses: (1) a charge has held = 0, and all units are spent; (2) a placement has held > 0: the hold that is being placed holds these units, and the other units of amount are spent; (3) a spend from a lease has lease set: it takes the units of that lease from lease_offset on, key is the fence of the lease, held is 0 and there are no limits; (4) a capture has held < 0, inside functions only: -held units stop being held and are spent, and amount units beyond them are charged. With amount = 0 it spends held units alone, and usage stays as it is.';
comment on type metered.lease_terms is 'How a lease is opened: as rows (each spend is one), memory (of its owner), carved (for the child, a scope) or away (the child is on another cluster). It has at least so many units (least), and at most the available units divided by share.';
comment on type metered.origin is 'The origin of an entry or a transition: the command, if it is one, and a note.';
comment on type metered.used_units is 'Units of one scope that a capture takes, that a refund gives back, or that are captured when a hold expires.';
comment on type metered.new_hold is 'A hold to be placed. chosen: the caller chose the id, and key is that of its lock, or null: then it is derived. claim is the claimed scope, if it is a claim. lifetime is how long after its beginning a hold ends at the latest. minimum has the units captured of its scopes when it expires. A hold up to so much, whose lines hold equal units, has a last minimum of scope '''': the fewest units that each of its lines may hold.';
comment on type metered.hold_ids is 'Holds of one tenant, and the holder that they must have ('''' for any). issued are the times that the ids carry.';
comment on type metered.new_lot is 'A lot to be granted to a wallet. It ends at expires_at, or lasts so long after the grant, or never ends. Up to roll_cap of the units that are left then roll over into a lot that lasts roll_for longer (0: that never ends). Units that are refunded to it later last for late from then on (0: for ever), or ends at once (null).';
comment on type metered.lot_plan is 'How a lot renews and rolls over, and what it pays for. Each period of renews has a lot of renew_amount units, and renewal is the reference of the first. Units that roll over last until their period of roll_to ends, or else for roll_for. They do so roll_again times more (-1: always). With roll_shared the lot''s roll_cap counts all units of the category that rolled over. The caller sets neither renewal, roll_for nor of_reference, which is the reference of the lot that had the units first. uses are in their order, and null for everything.';
comment on type metered.due_line is 'A line of a hold of a wallet that has fallen due, or the sum of several of which each gives its units back and does nothing else. Its units are those of the entry opened_seq; of a sum, that of the last line.';
comment on type metered.lot_rollover is 'How a lot is rolled over: the lot, by its number or its reference, up to cap of its units, and how long the new lot lasts (0: for ever).';
comment on type metered.capture_terms is 'How a capture is made. closing frees the rest and ends the holds. policy is for units beyond the held ones: refuse, fit (they are charged if the limits admit them), upto (as many as the limits admit are charged), even (likewise, and all scopes are cut by as many units as the one that is cut most), allow (they are charged).';
comment on type metered.new_command is 'A command as its first and its last statement name it. key is that of its id''s lock. timeout_ms bounds its transaction: 0 leaves the session''s timeouts, and null all of its settings, since the transaction is the caller''s. standing: its receipt has the standing of its limits. leased: some of its charges are spent from leases. name is the command''s name, and jobs are those that it made: both are for the record.';
comment on type metered.presented_token is 'A token as it was presented.';
comment on type metered.new_token is 'A token to be minted.';
comment on type metered.charged is 'The answer of charge: an entry for each charge, in the order of the charges, the units that count against each limit, the units held of each scope, the start and the end of each limit''s period, if there are any, and the thresholds that it crosses, or else the reason of its refusal.';
comment on type metered.new_event is 'A usage event, whose charge stands at the same place of another array. id is null for a charge without one. id_key is that of the id''s lock. issued_at is the time that the id carries, or occurred_at.';
comment on type metered.each_answer is 'The answer of charge_each to one charge: its number in the call, its entry, the units that count against each limit before it, the held units, the limits'' periods, and the thresholds that it crosses, or else the reason of its refusal.';
comment on type metered.counted is 'For functions of ours. The start from which a limit was counted: the number of the limit, and the entry at the beginning of its window.';
comment on type metered.hold_terms is 'For functions of ours. The hold of an entry that holds units: its id, and when it falls due, from now. For a capture beyond the held units, the holds that are captured. at counts as now, if the caller has read the clock under the locks.';
comment on table metered.schema_version is 'The versions of this schema that were installed; the last one is the greatest.';
comment on column metered.schema_version.version is 'a version that was installed';
comment on column metered.schema_version.installed_at is 'when';
comment on table metered.ledger is 'The ledger: one chain of entries per scope, seq = 1, 2, 3 and so on, never changed. Each entry carries its scope''s totals after it, so the state of a scope is its last entry, and the spending inside a window is a difference of two entries instead of a sum over many. Wide columns first: no padding between them.';
comment on column metered.ledger.seq is '1, 2, 3 and so on in the scope, without a gap';
comment on column metered.ledger.amount is '0 for a clock repair and a close';
comment on column metered.ledger.at is 'never decreases along seq within an epoch';
comment on column metered.ledger.spent is 'sum of charges so far, never decreases';
comment on column metered.ledger.refunded is 'sum of refunds so far, never decreases';
comment on column metered.ledger.credited is 'sum of credits so far, less revoked and lapsed units';
comment on column metered.ledger.held is 'units in open holds now';
comment on column metered.ledger.epoch is 'clock repairs so far';
comment on column metered.ledger.kind is 'c charge, d credit (deposit), r refund, k clock repair, z the scope was closed: nothing new is let in; of holds: h held, u captured (used), l released, x expired; of lots, credit taken back: e lapsed (ended), v revoked, o rolled over; s scheduled: a lot that begins later, is withdrawn, or whose end was set';
comment on column metered.ledger.scope is 'the charged scope';
comment on column metered.ledger.next_due is 'no hold that held counts falls due before this, or -infinity: the scope is closed';
comment on column metered.ledger.ref is 'of a refund: the seq of its charge';
comment on column metered.ledger.hold is 'the hold''s id, where the entry is about one alone';
comment on column metered.ledger.operation_tenant is 'of the operation';
comment on column metered.ledger.operation is 'the operation''s id, where a command made the entry';
comment on column metered.ledger.note is 'actor, tenant, correlation, reason';
comment on column metered.ledger.anchor_at is 'some time in the past, for which anchor_spent is known, or null';
comment on column metered.ledger.anchor_spent is 'spent at that time: it bounds the units spent since';
comment on column metered.ledger.lots_end is 'no lot of the scope ends or begins before this, or null: the scope has no lots';
comment on column metered.ledger.crossed is 'the reported thresholds, until they are armed again, or null';
comment on column metered.ledger.tallied is 'true: charges without limits may be rows of tallies, else null';
comment on column metered.ledger.others is 'seq less this are the charges so far, or null: 0. An entry of version 1 has the greatest number The guard: a writer that did not see the last entry collides here, whatever its isolation level, even if it never took the lock.';
comment on table metered.tallies is 'Charges without limits of busy scopes that are not in the chain yet: see tallies.sql.';
comment on column metered.tallies.at is 'when';
comment on column metered.tallies.amount is 'charged units';
comment on column metered.tallies.scope is 'the charged scope';
comment on column metered.tallies.operation_tenant is 'of the operation';
comment on column metered.tallies.operation is 'the operation''s id, where a command made the charge';
comment on column metered.tallies.hold is 'the hold''s id, where its placement made the charge';
comment on column metered.tallies.note is 'actor, tenant, correlation, reason';
comment on table metered.refund_sum is 'Refunds by the charge they refund, summed in blocks of 16^level charges (level 0: one charge): the refunds of all charges after some entry are at most 15 rows of each level, however many there are. See ADR 1.';
comment on column metered.refund_sum.block is 'charge''s seq >> 4 * level';
comment on column metered.refund_sum.amount is 'refunded of the block''s charges';
comment on column metered.refund_sum.level is 'a block is of 16^level charges';
comment on column metered.refund_sum.scope is 'whose charges they are';
comment on table metered.resources is 'Scopes that were declared to exist. Only charges, credits and holds that demand it look here. A row stays when its scope is retired, so that no program creates the scope again unawares.';
comment on column metered.resources.created_at is 'when it was declared first';
comment on column metered.resources.retired_at is 'since when nothing new is let in, or null';
comment on column metered.resources.scope is 'the name';
comment on table metered.leases is 'Leases: units of a scope that are spent without its lock, until the lease is settled. A row is the history of one.';
comment on column metered.leases.no is 'the number of the lease';
comment on column metered.leases.opened_at is 'when it was opened';
comment on column metered.leases.ends_at is 'nothing is spent of it from here on, and anybody may settle it';
comment on column metered.leases.settled_at is 'when it was settled, or null while it is open';
comment on column metered.leases.granted is 'units that it held';
comment on column metered.leases.spent is 'captured units of granted, once it is settled';
comment on column metered.leases.fence is 'the key of its lock';
comment on column metered.leases.opened_seq is 'the entry that holds its units';
comment on column metered.leases.settled_seq is 'the last entry of its end';
comment on column metered.leases.mode is 's its spends are rows, m they are in its owner''s memory, c a child scope has it, r a child on another cluster has it, g the row on that cluster';
comment on column metered.leases.scope is 'whose units they are';
comment on column metered.leases.owner is 'the process that opened it';
comment on column metered.leases.settled_by is 'the process that settled it: its owner, or another';
comment on column metered.leases.child is 'the scope that its units were carved for';
comment on column metered.leases.home_at is 'of mode g: when the parent''s cluster was known to have settled its side';
comment on table metered.lease_sum is 'How much all open leases of a scope hold together, so that a refusal need not read them. Written under the scope''s lock; a scope without open leases has no row.';
comment on column metered.lease_sum.granted is 'sum of leases.granted';
comment on column metered.lease_sum.scope is 'whose units they are';
comment on table metered.lease_spends is 'Spends from leases, written by the transactions that spend. Each takes a range of its lease, as a box of the plane: its lease is one side, its units the other, exact up to 2^53. Ranges that share a unit exclude each other, also where neither session sees the other''s row: the second waits for the first one''s transaction.';
comment on column metered.lease_spends.lease is 'leases.no';
comment on column metered.lease_spends.at_offset is 'where its range begins, from 0 on';
comment on column metered.lease_spends.amount is 'how long it is';
comment on column metered.lease_spends.at is 'when';
comment on column metered.lease_spends.operation_tenant is 'of the operation';
comment on column metered.lease_spends.operation is 'the operation''s id, where a command spent it';
comment on column metered.lease_spends.note is 'actor, tenant, correlation, reason';
comment on table metered.holds is 'Reservations. The units that a hold keeps of a scope are in the ledger (held) and in its line. This row says who holds them, until when, and how the hold ended.';
comment on column metered.holds.no is 'the number of the hold, in the order of placing';
comment on column metered.holds.placed_at is 'when it was placed';
comment on column metered.holds.deadline is 'when it ends, unless it is extended';
comment on column metered.holds.due is 'deadline and grace: its units are free from here on';
comment on column metered.holds.ceiling is 'no deadline is later';
comment on column metered.holds.ended_at is 'when it ended: due, if it expired';
comment on column metered.holds.issued_at is 'the time that the id carries, if it does';
comment on column metered.holds.version is 'transitions so far';
comment on column metered.holds.state is 'h held, c captured, r released, x expired';
comment on column metered.holds.returned is 'captured, and given back since';
comment on column metered.holds.pending is 'not ended, or ended by time and not announced';
comment on column metered.holds.tenant is 'keeps the ids of tenants apart';
comment on column metered.holds.id is 'chosen by the caller, or made up';
comment on column metered.holds.holder is 'the holder, or empty for nobody';
comment on column metered.holds.claim is 'the claimed scope, if it is a claim';
comment on column metered.holds.entity is 'the entity that a capture linked';
comment on column metered.holds.fingerprint is 'a version byte and a SHA-256';
comment on column metered.holds.keys is 'of the locks of its scopes, ascending';
comment on column metered.holds.metadata is 'of the caller';
comment on table metered.hold_lines is 'One scope of a hold.';
comment on column metered.hold_lines.hold is 'holds.no';
comment on column metered.hold_lines.key is 'of the scope''s lock';
comment on column metered.hold_lines.amount is 'placed';
comment on column metered.hold_lines.captured is 'spent of amount';
comment on column metered.hold_lines.open is 'counted in the scope''s held, unless due is before its next_due: then it was freed';
comment on column metered.hold_lines.due is 'holds.due';
comment on column metered.hold_lines.scope is 'the scope that it holds units of';
comment on column metered.hold_lines.refunded is 'units of captured that return_holds gave back';
comment on column metered.hold_lines.opened_seq is 'the entry that holds its units';
comment on column metered.hold_lines.at_least is 'is captured when the hold expires, as far as it was not before';
comment on table metered.lot_rows is 'The rows of lots. What a draw, a hold or a refund changes of a lot is in its newest move: a row that each of them updated would get slower with each version that an open snapshot keeps. This one changes where a lot begins, is empty, gets units again, or ends. The view lots has both. Written after an entry of its scope, which the guard lets one writer make.';
comment on column metered.lot_rows.no is 'the number of the lot';
comment on column metered.lot_rows.granted_at is 'when it was granted';
comment on column metered.lot_rows.expires_at is 'nothing is drawn of it from here on, or infinity: it never ends';
comment on column metered.lot_rows.granted_seq is 'the entry that credited it';
comment on column metered.lot_rows.last_seq is 'the last entry that moved units of it, where no move of it has its units';
comment on column metered.lot_rows.amount is 'units that it was granted with';
comment on column metered.lot_rows.rest is 'units that can be drawn, where no move of it has its units';
comment on column metered.lot_rows.drawn is 'units that were spent, less refunds, where no move of it has its units';
comment on column metered.lot_rows.held is 'units in open holds and leases, where no move of it has its units';
comment on column metered.lot_rows.lapsed is 'units of amount that were left at its end, or refunded later';
comment on column metered.lot_rows.revoked is 'units of amount that were taken back';
comment on column metered.lot_rows.rolled is 'units of amount that rolled over into another lot';
comment on column metered.lot_rows.untold is 'units of lapsed that no subscriber has heard of yet';
comment on column metered.lot_rows.roll_cap is 'units that roll over at its end at most, or null: none';
comment on column metered.lot_rows.roll_no is 'the number that one will have';
comment on column metered.lot_rows.roll_end is 'when that lot ends, or infinity: never';
comment on column metered.lot_rows.late is 'how long units last that are refunded after its end: 0 for ever, null not at all';
comment on column metered.lot_rows.from_lot is 'the lot that its units were in before';
comment on column metered.lot_rows.priority is 'a lot of a lower priority is drawn first';
comment on column metered.lot_rows.origin is 'g granted, c credited without a grant, r rolled over, l given back late';
comment on column metered.lot_rows.open is 'something can be drawn of it for anything, but for its end';
comment on column metered.lot_rows.scope is 'the wallet';
comment on column metered.lot_rows.category is 'of the caller: paid, promotional';
comment on column metered.lot_rows.reference is 'of the caller, once in a wallet';
comment on column metered.lot_rows.fingerprint is 'of the grant under the reference: a version byte and a SHA-256';
comment on column metered.lot_rows.pending is 'units of amount that nobody can draw before starts_at';
comment on column metered.lot_rows.starts_at is 'when it begins, or began, or null: with the grant';
comment on column metered.lot_rows.again is 'its units roll over again, or share a cap: no call leaves its end to a later one';
comment on column metered.lot_rows.plan is 'how it renews and rolls over, and what it pays for, or null';
comment on column metered.lot_rows.kept is 'units that pay for the uses of its plan alone, where no move of it has its units';
comment on column metered.lot_rows.keeps is 'something can be drawn of it for its uses, but for its end';
comment on column metered.lot_rows.age is 'when its units were granted first, in microseconds, the entry of that grant, and its own: the oldest is drawn first';
comment on table metered.lot_moves is 'The effect of each entry of a wallet on its lots.';
comment on column metered.lot_moves.seq is 'the entry';
comment on column metered.lot_moves.nth is '1, 2, 3 and so on in the entry';
comment on column metered.lot_moves.lot is 'lots.no, or 0: overdraft, which no lot covers';
comment on column metered.lot_moves.amount is 'how many units';
comment on column metered.lot_moves.back is 'units of amount that refunds gave back';
comment on column metered.lot_moves.kind is 'd credited, t taken by a charge, p taken to pay an overdraft back, g given back by a refund, h held, q held in place of an overdraft, u captured, f freed, e lapsed, v revoked, o rolled over, s scheduled for later, or its end set, w withdrawn before it began, a applied to a use that takes them now, b back to its uses, n reinstated after v, m reinstated after w';
comment on column metered.lot_moves.scope is 'the wallet';
comment on column metered.lot_moves.version is '1, 2, 3 and so on of its lot. After the newest one, the lot has these units. Null: overdraft, or of 0.1.0';
comment on column metered.lot_moves.rest is 'units of the lot that can be drawn';
comment on column metered.lot_moves.drawn is 'units of the lot that were spent, less refunds';
comment on column metered.lot_moves.held is 'units of the lot in open holds and leases';
comment on column metered.lot_moves.kept is 'units of the lot that pay for the uses of its plan alone';
comment on table metered.lot_holds is 'Units of lots in open holds and leases, and of lines that a sum freed, until a sweep ends their holds.';
comment on column metered.lot_holds.seq is 'the entry that held the units: hold_lines.opened_seq or leases.opened_seq. 0: spent units that are overdrawn, while ends of lots are unwritten';
comment on column metered.lot_holds.lot is 'lots.no, or 0: overdraft';
comment on column metered.lot_holds.amount is 'units';
comment on column metered.lot_holds.scope is 'the wallet';
comment on table metered.hold_events is 'Every transition, written with it.';
comment on column metered.hold_events.hold is 'holds.no';
comment on column metered.hold_events.at is 'when it was recorded';
comment on column metered.hold_events.deadline is 'of a place or an extension: the new one';
comment on column metered.hold_events.version is '1, 2, 3 and so on in the hold';
comment on column metered.hold_events.kind is 'h placed, p captured in part, c captured, e extended, r released, x expired, g given back in part, b given back';
comment on column metered.hold_events.entity is 'the entity that a capture linked';
comment on column metered.hold_events.detail is 'a place''s constants, a capture''s lines, or the units given back, with (b) those that were not';
comment on column metered.hold_events.note is 'actor, tenant, correlation, reason';
comment on column metered.hold_events.operation_tenant is 'of the operation';
comment on column metered.hold_events.operation is 'the operation''s id, where a command did it';
comment on table metered.holds_horizon is 'The latest time of an id whose hold was purged. Never decreases.';
comment on column metered.holds_horizon.at is 'ids of this time and before are retired';
comment on column metered.holds_horizon.one is 'there is one row';
comment on table metered.tokens is 'One-time grants. The token itself is nowhere in here, only the SHA-256 of its text, from which 32 random bytes cannot be found.';
comment on column metered.tokens.digest is 'the SHA-256 of its text';
comment on column metered.tokens.minted_at is 'when it was minted';
comment on column metered.tokens.expires_at is 'when it is no longer good';
comment on column metered.tokens.ended_at is 'last use, revocation, or expiry seen by a revocation';
comment on column metered.tokens.uses is 'how often it can be used';
comment on column metered.tokens.used is 'how often it was';
comment on column metered.tokens.revoked is 'whether it was revoked';
comment on column metered.tokens.sole is 'minted by replace_token';
comment on column metered.tokens.purpose is 'the right that it grants';
comment on column metered.tokens.subject is 'the user or thing that it is for';
comment on column metered.tokens.payload is 'json, not jsonb: it comes back byte for byte';
comment on table metered.operations is 'Commands that committed, by the caller''s id: written with the command''s own writes, so that a record exists exactly where they do. An event of charge_each has one, too, with the result null and one scope. Its issued_at is the time of the id, or else when it occurred. Refusals, too, where the caller asked for the refusal to be remembered.';
comment on column metered.operations.at is 'when the command was completed';
comment on column metered.operations.issued_at is 'the time that the id carries, if it does';
comment on column metered.operations.tenant is 'keeps the ids of tenants apart';
comment on column metered.operations.id is 'chosen by the caller';
comment on column metered.operations.fingerprint is 'a version byte and a SHA-256';
comment on column metered.operations.result is 'JSON, byte for byte as it was returned';
comment on column metered.operations.scopes is 'the charged scopes, for the receipt';
comment on column metered.operations.amounts is 'the amount of each charge';
comment on column metered.operations.seqs is 'the number of each entry';
comment on column metered.operations.ats is 'the time of each entry';
comment on column metered.operations.holds is 'JSON: the holds that it placed, captured or released, and the draws of its own steps';
comment on column metered.operations.refusal is 'the reason of a refusal, whose result is empty';
comment on column metered.operations.name is 'the command''s name, or null';
comment on column metered.operations.jobs is 'the ids of River''s jobs that it made';
comment on table metered.operations_horizon is 'The latest time of an id whose record was purged. Never decreases. Always found by its key: with sequential scans off, one would look so expensive that each is compiled first (jit), for 50 ms.';
comment on column metered.operations_horizon.at is 'ids of this time and before are retired';
comment on column metered.operations_horizon.one is 'there is one row';
comment on table metered.job_keys is 'Which job a key was used for. No foreign key: River deletes finished jobs after a day, and a key must be remembered for longer than its job.';
comment on column metered.job_keys.job_id is 'river_job.id';
comment on column metered.job_keys.created_at is 'when the key was claimed';
comment on column metered.job_keys.queue is 'of the job';
comment on column metered.job_keys.key is 'chosen by the caller, once in the queue';
comment on column metered.job_keys.kind is 'of the job';
comment on column metered.job_keys.tenant is 'of the job';
comment on column metered.job_keys.digest is 'of kind and args, its first byte the version: see jobs/digest.go';
comment on table metered.parked_jobs is 'Jobs that wait for units of a scope: see parked.sql. Those that wait for their first attempt have no row of River''s yet.';
comment on column metered.parked_jobs.job_id is 'the id that it has or will have in river_job';
comment on column metered.parked_jobs.turn is 'its round in the line';
comment on column metered.parked_jobs.amount is 'the units that it needs of the scope';
comment on column metered.parked_jobs.class is 'a hash of its limits of the scope, and its use';
comment on column metered.parked_jobs.parked_at is 'when it was parked';
comment on column metered.parked_jobs.drop_at is 'when it is dropped, or null: never';
comment on column metered.parked_jobs.not_before is 'when its next attempt may start, or null: it waits for its first';
comment on column metered.parked_jobs.troubled_at is 'when it got into trouble, or null: it is in none';
comment on column metered.parked_jobs.retry_at is 'when a job in trouble is tried again: it is in no line before';
comment on column metered.parked_jobs.passed_amount is 'the units that it needs of passed, whose line counts them';
comment on column metered.parked_jobs.priority is 'River''s: 1 is first';
comment on column metered.parked_jobs.lane is '1: it waits for a second choice of units, too, and has a row for each';
comment on column metered.parked_jobs.scope is 'the scope that it waits for, or empty: it is in no line';
comment on column metered.parked_jobs.fair is 'jobs of different keys take turns';
comment on column metered.parked_jobs.tenant is 'of the job and its hold';
comment on column metered.parked_jobs.job is 'its columns in river_job';
comment on column metered.parked_jobs.hold is 'the hold, a metered.new_hold';
comment on column metered.parked_jobs.charges is 'metered.new_charge[] of all its scopes';
comment on column metered.parked_jobs.trouble is 'why its last try failed';
comment on column metered.parked_jobs.passed is 'the scope from whose line it came, since it fits there, or null';
comment on table metered.parked_scopes is 'The lines. A scope that no job waits for has none.';
comment on column metered.parked_scopes.key is 'of the scope''s lock';
comment on column metered.parked_scopes.wake_at is 'when the line is to be looked at: -infinity (now), or infinity (when units are freed)';
comment on column metered.parked_scopes.next_at is 'the earliest time that the present look has found';
comment on column metered.parked_scopes.waiting is 'jobs in the line';
comment on column metered.parked_scopes.again is 'units were freed since the present look began';
comment on column metered.parked_scopes.turns is 'the last round that was released, of each priority';
comment on column metered.parked_scopes.after is 'where the present look goes on: priority, turn, job_id';
comment on column metered.parked_scopes.started is 'jobs of the line that started since counting began';
comment on column metered.parked_scopes.since is 'when counting began: the line''s rate is of an hour or two at most';
comment on column metered.parked_scopes.trouble is 'why the last look failed';
comment on column metered.parked_scopes.scope is 'the scope';
comment on function metered.lock_scopes(text[], int) is 'Takes the locks of scopes for a caller that then reads, charges or credits.';
comment on table metered.cell is 'The number of the cell that this schema is: see package cells. Other schemas have no row.';
comment on column metered.cell.no is 'from 0 on';
comment on column metered.cell.cells is 'how many there are, for good';
comment on column metered.cell.one is 'there is one row';
comment on table metered.tenants is 'Where tenants live that have moved, as far as this cell knows: a tenant''s first cell, the one that it has left, and its new one. A row is only replaced by one with more moves.';
comment on column metered.tenants.moves is 'how often it had moved by then';
comment on column metered.tenants.cell is 'where it lives since';
comment on column metered.tenants.packed is 'its rows are in packed_rows, until they are known to have arrived';
comment on column metered.tenants.tenant is 'the tenant';
comment on table metered.packed_rows is 'Rows of tenants on their way to another cell.';
comment on column metered.packed_rows.tenant is 'whose they are';
comment on column metered.packed_rows.nth is 'of the table, in the order of arrival';
comment on column metered.packed_rows.row_no is '1, 2, 3 and so on of the table';
comment on column metered.packed_rows.of_table is 'its name';
comment on column metered.packed_rows.body is 'the row, as the table''s type has it as text';
comment on function metered.enter_tenant(text, bigint, int, int, boolean, int) is 'Begins the work of a transaction for a tenant, in a cell of so many: SQLSTATE MT014 if the tenant lives in another one. home: it lives here unless it has moved. The answer holds until the transaction ends.';
comment on function metered.numbers_behind() is 'The sequences that are behind their tables, with the last number that each gave. Stable: a row that it sees was numbered before it looks at the sequence.';
comment on function metered.credit(metered.scope_name, bigint, metered.amount, boolean, int, metered.origin, boolean) is 'Adds credit to a scope: it counts for lifetimes, and for no window. refused, and nothing written, if the scope must exist and does not (see admit). With raising that is SQLSTATE MT001 instead.';
comment on function metered.refund(metered.scope_name, bigint, bigint, metered.units, int, metered.origin, boolean) is 'Refunds part of a charge, or all that is left of it (units is null). status is ok, or says why nothing was written: missing (no such entry), purged, kind (the entry is no charge) or excess (more than remains of the charge). remaining has the units that can still be refunded of it. With raising, a refusal is SQLSTATE MT008 instead, its detail both as JSON.';
comment on function metered.repair_clock(text, bigint, int, text) is 'Ends the freeze of a scope whose last entry is ahead of the clock, because the clock was: appends an entry of a new epoch, at the clock''s time. Entries before it count as made no later than it. None leaves a window early, and no entry is changed. Does nothing, and seq is null, if the scope is not ahead.';
comment on function metered.with_sums(bigint[], text[]) is 'The keys of locks that a command takes first, with those of the scopes of its charges without limits, unless these are tallies.';
comment on function metered.purge_scope(text, bigint, timestamptz, bigint, int, int, boolean) is 'Deletes entries of one scope that no window ending at or after cutoff needs, at most max_rows of them, beginning after entry after_seq. Entry 1 stays, so that a writer that sees the scope as empty collides with it. It is a new row, so that a writer that sees it as the last entry collides, too (_entry_for_write). The entries after it begin at a multiple of 16, plus one, which the time index holds. upto is the last seq deleted or passed over, for the next call to begin after: scanning from the front again would wade through the rows deleted before.';
comment on function metered.feed_keeps(text, timestamptz) is 'The first entry of a scope that a purge of entries up to cutoff would keep for the feed, or null.';
comment on view metered.lots is 'Lots: the credit of a wallet, in parts that end. The wallet''s balance is in its ledger, as of any scope. This says where it is from. amount = rest + drawn + held + lapsed + revoked + rolled + pending + kept.';
comment on column metered.lots.no is 'the number of the lot';
comment on column metered.lots.granted_at is 'when it was granted';
comment on column metered.lots.expires_at is 'nothing is drawn of it from here on, or infinity: it never ends';
comment on column metered.lots.granted_seq is 'the entry that credited it';
comment on column metered.lots.last_seq is 'the last entry that moved units of it';
comment on column metered.lots.amount is 'units that it was granted with';
comment on column metered.lots.rest is 'units of amount that can be drawn';
comment on column metered.lots.drawn is 'units of amount that were spent, less refunds';
comment on column metered.lots.held is 'units of amount in open holds and leases';
comment on column metered.lots.lapsed is 'units of amount that were left at its end, or refunded later';
comment on column metered.lots.revoked is 'units of amount that were taken back';
comment on column metered.lots.rolled is 'units of amount that rolled over into another lot';
comment on column metered.lots.untold is 'units of lapsed that no subscriber has heard of yet';
comment on column metered.lots.roll_cap is 'units that roll over at its end at most, or null: none';
comment on column metered.lots.roll_no is 'the number that one will have';
comment on column metered.lots.roll_end is 'when that lot ends, or infinity: never';
comment on column metered.lots.late is 'how long units last that are refunded after its end: 0 for ever, null not at all';
comment on column metered.lots.from_lot is 'the lot that its units were in before';
comment on column metered.lots.priority is 'a lot of a lower priority is drawn first';
comment on column metered.lots.origin is 'g granted, c credited without a grant, r rolled over, l given back late';
comment on column metered.lots.open is 'something can be drawn of it for anything, but for its end';
comment on column metered.lots.scope is 'the wallet';
comment on column metered.lots.category is 'of the caller: paid, promotional';
comment on column metered.lots.reference is 'of the caller, once in a wallet';
comment on column metered.lots.fingerprint is 'of the grant under the reference: a version byte and a SHA-256';
comment on column metered.lots.pending is 'units of amount that nobody can draw before starts_at';
comment on column metered.lots.starts_at is 'when it begins, or began, or null: with the grant';
comment on column metered.lots.again is 'its units roll over again, or share a cap: no call leaves its end to a later one';
comment on column metered.lots.plan is 'how it renews and rolls over, and what it pays for, or null';
comment on column metered.lots.kept is 'units of amount that pay for the uses of its plan alone. The ledger has them when a use takes them';
comment on column metered.lots.keeps is 'something can be drawn of it for its uses, but for its end';
comment on column metered.lots.version is 'of its newest move, or null: none has its units';
comment on column metered.lots.age is 'when its units were granted first, in microseconds, the entry of that grant, and its own: the oldest is drawn first';
comment on table metered.lot_debts is 'Overdraft that was drawn for uses, and that no lot has paid: a lot that pays for the use repays it. The rest of a wallet''s overdraft was drawn for no use.';
comment on column metered.lot_debts.amount is 'spent units, 1 or more';
comment on column metered.lot_debts.scope is 'the wallet';
comment on column metered.lot_debts.use is 'the use in the note of the draw, or of the hold that was captured';
comment on type metered.idle_units is 'Units of one lot in _foreseen, and of those in which they go on, of which the last one counts.';
comment on type metered.idle_state is 'What is foreseen at a time, which has passed. The last arrays are by places of lots.';
comment on function metered.revoke_lot(metered.scope_name, bigint, bigint, text, bigint, metered.charge_limit[], int, metered.origin) is 'Takes back units of a lot and of those that it went on in, or all units (null), as far as they are neither drawn nor held: revoked. missing counts units that are drawn or held; lapsed units of a lot that is revoked whole are not missing. Each lot has an entry of its own, and seq is the last. status is revoked (perhaps 0 units), unknown, or crossing: it would cross thresholds of limits, which the caller does not report (_cross_lowered).';
comment on function metered.roll_over(metered.scope_name, bigint, metered.lot_rollover, metered.charge_limit[], int, metered.origin) is 'Rolls units of a lot over into another one: once. status is rolled, same (it rolled over before, at its end or so, and no and units are that lot), empty (no units are left), unknown, or crossing: it ends other lots, and would cross thresholds of limits, which the caller does not report (_cross_lowered). Units beyond cap stay in the lot.';
comment on function metered.grant_lot(metered.scope_name, bigint, metered.new_lot, boolean, int, metered.origin) is 'Grants a lot that begins at once and has no plan, for builds of 0.1.0: see plan_lot.';
comment on function metered.plan_lot(metered.scope_name, bigint, metered.new_lot, metered.lot_plan, timestamptz, boolean, int, metered.origin) is 'Grants a lot to a wallet, which is any scope: it becomes a wallet with the first one. The lot begins at starts_at, or at once. That of a plan may have no units, or null: the part of its period that was left at starts_at. A plan that was bought in a period which is over brings the lots of that period and of all since. status is granted, same (it was granted under the reference before, and is answered as it is now, with the units that were revoked of it since, and whether its renewals were ended), conflict (the reference is of another lot) or ended (it would have ended by now). refused, and nothing written, if the scope must exist and does not.';
comment on function metered.set_lot_end(metered.scope_name, bigint, bigint, text, timestamptz, metered.charge_limit[], int, metered.origin) is 'Sets the end of a lot, by its number or reference: earlier, later, or never (infinity). status is set, same (it has that end), unknown, ended (it has ended by now, or the end would be over), or crossing: it ends other lots, and would cross thresholds of limits, which the caller does not report.';
comment on function metered.end_renewal(metered.scope_name, bigint, text, metered.charge_limit[], int, metered.origin) is 'Ends the renewals of a grant, by its reference: the lot of the next period is withdrawn, and none comes after it. The present one stays. status is revoked, same (they were ended before), unknown (no such grant renews), or crossing, as revoke_lot has it.';
comment on function metered.draw(metered.new_charge, boolean, interval, int, metered.origin) is 'Draws units of a wallet, as a charge does: charge.amount of them, or with up_to as much of that as its limits let in. lots says of which lots they are, and overdrawn how many are of none. left is the balance after it, with lots for the use of the charge. A refusal of a command''s draw raises, because COMMIT follows, and its draws are kept for its record.';
comment on function metered.wallet_balance(text) is 'The balance of a wallet: units that can be drawn (less than 0: overdrawn), held units, and the lots that have some of either, in the order in which they are drawn. Lots for some uses are no part of units. A lot or hold that is due has ended, whether that is written down or not. A lot that rolls over then is there as it will be.';
comment on function metered.reinstate_lot(metered.scope_name, bigint, bigint, text, bigint, metered.charge_limit[], int, metered.origin) is 'Gives back units that were revoked from a lot and from those that it went on in, or all of them (null), as far as these lots have not ended. Each lot has an entry of its own, and seq is the last. status is reinstated, same (nothing of them is revoked), ended (what is revoked is of lots that have ended), unknown, or crossing: it ends other lots, and would cross thresholds of limits, which the caller does not report.';
comment on function metered.resume_renewal(metered.scope_name, bigint, text, metered.charge_limit[], int, metered.origin) is 'Takes back that the renewals of a grant were ended, by its reference: the lot of the next period is scheduled again, and others come after it. status is reinstated, same (they go on), ended (that period has begun), unknown (no such grant renews), or crossing, as reinstate_lot has it.';
comment on table metered.plan_changes is 'The changes of plans. A row goes with the entries of its wallet, once its plan has no lot any more that has not ended.';
comment on column metered.plan_changes.effect_at is 'when the change takes effect';
comment on column metered.plan_changes.seq is 'the wallet''s last entry, when it was made';
comment on column metered.plan_changes.scope is 'the wallet';
comment on column metered.plan_changes.reference is 'of the caller, once in a wallet';
comment on column metered.plan_changes.plan is 'the reference of the plan that is changed';
comment on column metered.plan_changes.to_plan is 'the reference of the plan after it, or null: none';
comment on column metered.plan_changes.kind is 'replaced: a later one took its place in time';
comment on column metered.plan_changes.fingerprint is 'of the change: a version byte and a SHA-256';
comment on column metered.plan_changes.answer is 'of the call that made it';
comment on function metered.begin_change(metered.scope_name, bigint, text, text, int) is 'Locks a wallet for a change of a plan. fingerprint and answer are those of the change that has the reference already. Otherwise the plan''s last change is the one of effect_at: to to_plan, and by by_reference. at is now. Fails with 40001 where the snapshot is older than the wallet.';
comment on function metered.plan_state(metered.scope_name, text, bigint, metered.lot_plan, timestamptz, boolean) is 'A plan whose renewals have been ended, by the entry at_seq, or before it (0), as of that entry: its period, the numbers of its lots that have begun and not ended, also of plans that it took the place of, the units that holds have of them, and when its next lot would have begun. A change of the plan counts from starts on at the earliest. starts is null if it has not begun or is over, and next if it is over. first is the part of new_plan''s amount that is beyond the plan''s own, for the part of new_plan''s period that is left at since: at next, if that is asked for.';
comment on function metered.note_change(metered.scope_name, text, text, text, timestamptz, text, bytea, jsonb) is 'Keeps the answer of a change (changed), or of a call that took one back (resumed), in place of the plan''s last one, which has not taken effect.';
comment on function metered.plan_overage(metered.scope_name, bigint, text, timestamptz, int) is 'How much overdraft (paid) a plan''s lot has paid back when it began: the lot whose period during is in, or now. ends is when units end that are granted in place of these: with that lot, or if it has ended, with the plan''s present one, or never. restored is the lot that was granted for them. status is found, or unknown: no such lot has begun. Locks the wallet.';
comment on function metered.charge(metered.new_charge[], interval, int, boolean) is 'Charges scopes, all or none, without a command, and returns a refusal. Returning the whole answer costs less than assigning each part.';
comment on function metered.check_charge(metered.new_charge[], interval) is 'The answer of charge at this moment, without a lock and without writing. STABLE, so that all its statements see one snapshot.';
comment on function metered.usage_of(text[], interval[], metered.period[], boolean) is 'The state of each scope, for each pair with a window. Window 0 is the lifetime, and a null one is a period. with_leases: spends of open leases are used, and not held. charges says how many charges were made in it, refunded or not.';
comment on function metered.usage(text[], interval[], metered.period[], boolean) is 'usage_of without charges, for programs of version 1.';
comment on function metered.charge_lots(metered.new_charge[], boolean, interval, int, boolean, metered.origin) is 'Charges scopes as charge does, and says which lots paid: lots has an element for each charge, null for none. With up_to the amounts are equal: all of it is charged, or else the largest amount that the limits of all scopes admit, at least 1. amount is this, and a refusal is of 1 unit. A refusal of a command raises, because COMMIT follows, and its charges are kept for its record.';
comment on function metered.usage_before(text, timestamptz[]) is 'The sums of a scope''s chain before each of the times, which ascend. seq is the last entry before it, refunded_after has the refunds, up to now, of charges after it, and unsettled the spends from open leases between the time and the next one. charges and unsettled_charges say how many charges spent and unsettled are of. If a purge took an answer away, the last row has known_from, since when usage is known. STABLE, so that all its statements see one snapshot.';
comment on function metered.usage_at(text, timestamptz[]) is 'usage_before without charges, for programs of version 1.';
comment on function metered.search_entries(text, bigint, bigint, boolean, int, int, metered.origin, text) is 'Scans up to look entries between two numbers, forwards or backwards, for entries with the texts of made_by.note, with made_by.operation, and of a command of that name (null is any). It returns up to most + 1 of them, and always the last entry that it looked at. more: there may be others after that.';
comment on function metered.open_lease(metered.new_charge, metered.lease_terms, interval, int) is 'Opens a lease of up to charge.amount units, and at most the units that the limits admit, divided by terms.share. granted is 0, and nothing written, if that is less than terms.least, or if a limit refuses. used, by limit, and held are the scope''s state before. The lease lasts for terms.ttl, or until the first of the limits'' periods ends: settled later, it would count in the next one.';
comment on function metered.spend(bigint, bigint, bigint, bigint, text, jsonb) is 'Spends from a lease without a command.';
comment on function metered.charge_leased(metered.new_charge[], interval, int, metered.origin, text, boolean) is 'Makes charges, some from leases, all or none, as _write_charges does. A lease that is closed, or whose range was spent, refuses.';
comment on function metered.settle_lease(bigint, text, bigint, int, metered.charge_limit[], interval) is 'Settles a lease: captures its spent units, and frees the rest. of_owner is the caller. told has the used units of a lease in memory, by its owner''s word. If it is null, all were used. The status: settled closed    it was settled before, with spent units early     before its end only its owner may settle it unknown crossing  nothing was written: it crosses thresholds on spending in limits, and the caller is not telling';
comment on function metered.purge_leases(timestamptz, timestamptz, int) is 'Deletes leases that were settled before cutoff, with their spends: at most max_rows spends, oldest lease first. after is the last of the batch before. A child that got units from another cluster stays until the parent''s side is known to be settled, and its time was over before cutoff: until then a message can ask for its used units.';
comment on function metered.carve(metered.new_charge, metered.lease_terms, interval, int) is 'Carves charge.amount units, judged by the charge''s limits as a hold, for the child of terms, which has no entries yet. status is carved, exists (it was carved before, equally), conflict (it was carved otherwise), used (the child has entries) or refused. A child of a child ends no later than that one.';
comment on function metered.end_child(text, text, int) is 'Closes a child of this cluster, and settles it once it has no held units. status is settled, open (closed, with held units), closed (it was settled before) or unknown.';
comment on function metered.receive_child(text, bigint, timestamptz, text, text, int) is 'The child''s side of units that were carved on another cluster: credits the child until ends. With units 0, or after ends, the child gets nothing, now or later: the row says so, and the scope gets no entry. status is received, late, exists (a row of this child is there) or used (the child has entries).';
comment on function metered.settle_away(text, bigint, text, int) is 'Settles the parent''s side of units that were carved for another cluster. units is the number used there, or null for all of them. status is settled, closed (it was settled before, and spent has the units captured then) or unknown. On the child''s cluster it notes in the child''s row that the parent''s side is settled: status is noted or unknown.';
comment on function metered.create_scopes(text[], int) is 'Declares that scopes exist, all or none. If some are retired, only these are returned, and nothing is done. changed: the scope did not exist before. The answer holds until the transaction ends.';
comment on function metered.retire_scopes(text[], boolean, int) is 'Retires scopes, or takes that back (retiring is false), all or none. If some were never declared, only these are returned, without created_at, and nothing is done. Takes the scopes'' locks. held has units of a scope''s open holds, which go on.';
comment on function metered.expire_hold(text, text, timestamptz, timestamptz, int, text, text) is 'Ends one hold that is due, if it still has this deadline, frees its units, and notifies listeners: status is expired. Otherwise nothing is done: due_later, extended, captured, released, or ended (it expired, and was announced before).';
comment on function metered.due_holds(text, text, timestamptz, bigint, timestamptz, timestamptz, int) is 'Holds that are held, or that expired and are not announced, in the order in which they fall due, after after_due and after_no, and before a time: of one tenant or of all (null), with a scope that begins with prefix. It looks at no more than 10,000 and returns max_rows. Go on after last_due and last_no, which are null at the end. clk counts as now.';
comment on function metered.announced(bigint[], text) is 'Marks swept holds as announced, and notifies listeners.';
comment on function metered.purge_holds(timestamptz, timestamptz, int, int) is 'Deletes holds that ended before cutoff, with lines and history, at most max_rows of them, from "after" on (null: from the beginning), and moves the horizon to the latest time that their ids carry, in the same transaction, as purge_operations does.';
comment on function metered.catch_up(metered.scope_name, int) is 'Takes a step in a scope that is so far behind that calls fail (_refuse_behind). In a scope without lots it ends no rows of holds, which sweeps do. more: take another one.';
comment on function metered.sweep_due(timestamptz, bigint, int, boolean, text) is 'Looks at up to max_holds due holds, after after_due and after_no, and ends those whose locks are free. Scopes that are behind are returned, for sweep_scope, and their lines stay. nos are the holds that ended whole, and skipped counts those whose locks were not free. Without keep_pending they need no announcement. seen counts the holds looked at. If there may be more, go on after last_due and last_no.';
comment on function metered.sweep_scope(metered.scope_name, int, boolean, text) is 'Takes one step in a scope that is behind. A step clears the rows of up to max_holds lines that were freed with a sum, and locks no scope. Where there are none, it frees what is due, if the scope''s lock is free: by a sum, as catch_up does it, or, in a wallet or a closed scope, the first lines one by one. Then it takes the step that sweep_wallet takes, which may end lots and no line. freed counts lines that it ended: null if it did nothing, since others have the locks. nos are holds that ended whole with them, as sweep_due has it. more: rows of others are left.';
comment on function metered.sweep_holds(timestamptz, bigint, int, boolean, text) is 'sweep_due, and a step of the first scope that is behind, for programs of version 1, which go on where this call says. If more is due in that scope, it is before the next hold of that scope.';
comment on function metered.sweep_wallets(timestamptz, bigint, int, boolean, metered.charge_limit[], int, text[]) is 'Looks at up to max_lots lots that are due, or have lapsed units that are not announced, after after_end and after_no, and writes down all that is due in their wallets, if these are not locked. Wallets that are behind are returned, for sweep_wallet, and so are those that would cross thresholds of the limits, or have a plan of a lost time zone (crossing). untold are lapsed units, for told_lots: without keep_untold they need no announcement. busy counts lots of locked wallets. If there may be more, go on after last_end and last_no. Lots of wallets in without are passed over.';
comment on function metered.sweep_wallet(metered.scope_name, timestamptz, bigint, int, boolean, metered.charge_limit[], int, boolean) is 'Takes one step in a wallet: writes down what is due first in it, as many events as one step writes. untold are lapsed units of the lots that they are about, and of the next max_lots others after after_end and after_no. status is swept, busy (its lock is not free; without skip_busy it is waited for), or crossing, as sweep_wallets has it: the last step alone crosses thresholds, as the wallet is by now. more: call again, after last_end and last_no.';
comment on function metered.sweep_lots(timestamptz, bigint, int, text, boolean, metered.charge_limit[], int) is 'For programs of version 1. only_scope: all steps of one wallet. Otherwise sweep_wallets, and a step of the first wallet that is behind. If more is due in it, the call goes on before that.';
comment on function metered.told_lots(bigint[], bigint[]) is 'Marks lapsed units of lots as reported to subscribers: so many units of each.';
comment on function metered.hold_json(bigint, timestamptz) is 'The hold of that no.';
comment on function metered.lock_all(bigint[], bigint[], text[], metered.hold_ids[], int) is 'Takes the locks of a command that does several things to scopes and holds, in the one order: all scopes, by key, with those of the named holds, unless these are another holder''s (see _lock_holds); the ids that it places, by key; then rows of holds, by no: of the named holds, and of due holds that could be in its way in scopes that it may charge. A command that names thousands of scopes needs a larger lock table.';
comment on function metered.look_place(metered.new_hold, metered.new_charge[], interval, boolean) is 'The refusal of place at this moment, without a lock, in a command that has begun (it is no replay). status is taken, refused, or null. Null means that place would not refuse, or that only place can decide: the hold was placed before, or the snapshot may be old. stored is the hold of a taken claim, if reveal.';
comment on function metered.place(metered.new_hold, metered.new_charge[], interval, int, metered.origin, text, boolean, boolean) is 'Places a hold of the units that the charges hold, and charges the rest of their amounts, all or none. status is placed, same (placed before, with the same content, which stored has), conflict (with other content), retired, taken (of a claim: another holder has it, until deadline if that is not null, and stored is their hold, if reveal) or refused. Of a hold up to so much (see new_hold) stored is the hold.';
comment on function metered.capture_holds(metered.hold_ids, metered.used_units[], metered.capture_terms, interval, int, metered.origin, text, boolean) is 'Captures holds, all or none: spends all their units (used is null), or units of the scopes of one hold. A scope whose amount is null spends all, and its limits only report thresholds. refused is null, or why nothing was written.';
comment on function metered.release_holds(metered.hold_ids, int, metered.origin, text, boolean) is 'Releases holds, all or none.';
comment on function metered.extend_holds(metered.hold_ids, interval, int, metered.origin, text, boolean) is 'Extends holds, all or none: each deadline by "by", no deadline past its ceiling, nor so far that JSON has no such year.';
comment on function metered.return_holds(metered.hold_ids, metered.used_units[], boolean, int, metered.origin, text, boolean) is 'Gives back the units that captured holds spent, all or none, as refunds of their charges: all units that are left (used is null), or so many units of the scopes of one hold. skip_purged leaves out purged charges, but refuses for a claim''s own unit, which would stay taken. refused is as _lock_holds has it, or returned (all was given back before), purged, left (fewer captured units are left) or claim (a claim''s own unit is given back with all the rest, or not at all).';
comment on function metered.release_captured(metered.hold_ids, int, metered.origin, text, boolean) is 'Releases holds, all or none: those that are held, and those that were captured, whose spending is given back as return_holds does.';
comment on function metered.mint_tokens(metered.new_token[], int) is 'Mints tokens, all or none, in the order of their digests, so that two calls that mint the same ones do not deadlock. Status ''exists'': one of the digests is there already, and nothing was written. That is an answer and not a unique violation, which would end the caller''s transaction. Where a snapshot is too old to see the other token, ON CONFLICT raises 40001.';
comment on function metered.inspect_token(bytea, text, text) is 'Looks at a token and changes nothing. Status is ''ok'', or why it cannot be consumed: ''unknown'', ''purpose'', ''subject'', ''revoked'', ''used'', ''expired''. The other columns are null unless it is ''ok'', and consumed_at always is.';
comment on function metered.consume_token(bytea, text, text, int) is 'Takes one use of a token, or says why not, with inspect_token''s columns. uses_left is the number of uses after this one. A refusal changes nothing. The time that counts is the clock''s as the call begins.';
comment on function metered.revoke_token(bytea, int) is 'Revokes one token. False if there was nothing left to revoke.';
comment on function metered.revoke_tokens(text, text, int) is 'Ends every open token of a purpose and subject and returns how many of them were still good. Rows are locked in the order of their digests.';
comment on function metered.replace_token(bigint, metered.new_token, int) is 'Revokes every token of a purpose and subject and mints another, under the advisory lock of that key. Status ''exists'' as with mint_tokens: nothing was written.';
comment on function metered.purge_tokens(timestamptz, timestamptz, int) is 'Deletes up to max_rows tokens that ended, or expired, at cutoff or before, oldest first, and skips what another purge is deleting. Never one that lives, whatever cutoff is. after is the last of the batch before (null: from the beginning), so that no batch reads again through the index entries that the one before it left dead.';
comment on function metered.claim_job_key(text, text, text, text, bytea, bigint, int) is 'Claims a key for job new_id, or tells which job it was claimed for. If another transaction has claimed it and is still open, waits for that one to end, at most wait_ms since the statement began (one statement may claim many keys, in the order of queue and key). Then SQLSTATE 55P03. If the other one commits, a claimant at REPEATABLE READ or above gets 40001, as it cannot see that row.';
comment on function metered.find_job_key(text, text) is 'The record of a key, or no row.';
comment on function metered.purge_job_keys(timestamptz, timestamptz, int) is 'Forgets up to max_rows keys claimed before cutoff, oldest first, and passes over those that another purge is at. after is the last of the batch before, as in purge_tokens. Not for an application, which must not make an old key new.';
comment on function metered.park_jobs(jsonb, interval, int, metered.origin, text, boolean) is 'Enqueues jobs whose units are held until they end, all or none. status is started (the hold is placed, and the caller inserts job), parked (until the units fit), refused (they never fit), or full (its line has most jobs). With raising, the last two are SQLSTATE MT001 and MT013. A job that fits is parked too if others wait for one of its scopes.';
comment on function metered.rest_jobs(jsonb) is 'Parks jobs until their next attempt, each for rest_us, whose hold the caller releases in this transaction. They are in no line until then. Each element is as in park_jobs, and its hold is a new one.';
comment on function metered.explain_parked(bigint, interval) is 'A parked job, with its place in its line (no further than 10,000; none while it is in no line), when the line is looked at, and the answers of check_charge for its charges, and for those of its second choice. null: it is not parked.';
comment on function metered.judged_scopes(text[], int, int) is 'The scopes whose present limits release_jobs needs (given). It takes the same locks.';
comment on function metered.release_jobs(text[], jsonb, int, int, interval, metered.origin, text) is 'Releases parked jobs that fit, at most max_jobs: of only_scopes, whose locks it waits for, or of lines that are marked or whose time has come, if their locks are free. A row is released (the caller inserts job), busy (the scope''s lock was not free), trouble (why the line cannot be looked at), or more (call again).';
comment on function metered.next_release() is 'Microseconds until a line is to be looked at or a parked job to be dropped, 0 if one is due, or null if no time is known.';
comment on function metered.trouble_jobs(bigint[], text[]) is 'Puts parked jobs in trouble that the caller could not insert or drop, each for the reason of the same number. Returns how many there were.';
comment on function metered.drop_parked(int) is 'Drops parked jobs whose time to wait is over, at most max_rows, as far as their lines are not locked. Returns them.';
comment on function metered.change_parked(bigint, int, int) is 'Takes a parked job out of its line for good, or changes its priority, and returns it. null: it is not parked. A job in trouble that gets a priority is tried again now.';
comment on table metered.newest is 'The newest event that took effect, one row for each key. A row goes with the records of operations.';
comment on column metered.newest.at is 'when the event happened, as its sender says';
comment on column metered.newest.taken_at is 'when it took effect';
comment on column metered.newest.tenant is 'of the command';
comment on column metered.newest.key is 'what the event is about, such as a subscription';
comment on column metered.newest.id is 'the command''s id: of two events of one time, the greater one is newer';
comment on function metered.take_newest(text, text, timestamptz, text, int) is 'Makes a command the newest of its key, or returns the one that is at least as new. The row is locked until the transaction ends, so that commands of one key take effect one after another.';
comment on table metered.notary_scopes is 'The scopes whose entries are in the log. A leaf has the commitment in place of the name, so that the name can go.';
comment on column metered.notary_scopes.no is 'the number of the scope in the log';
comment on column metered.notary_scopes.seq is 'its last entry that is in the log';
comment on column metered.notary_scopes.commitment is 'the SHA-256 of salt and name';
comment on column metered.notary_scopes.salt is '32 random bytes, or null: the name was taken out, and cannot be guessed';
comment on column metered.notary_scopes.scope is 'its name by now';
comment on table metered.notary_runs is 'Which leaves are whose entries.';
comment on column metered.notary_runs.first is 'the number of the first leaf, from 0 on';
comment on column metered.notary_runs.entries is 'how many leaves follow one another';
comment on column metered.notary_runs.seq is 'the entry of the first one';
comment on column metered.notary_runs.scope_no is 'notary_scopes.no';
comment on table metered.notary_hashes is 'The hashes of the tree, in the order of golang.org/x/mod/sumdb/tlog.';
comment on column metered.notary_hashes.block is '0, 1, 2 and so on';
comment on column metered.notary_hashes.hashes is '60 hashes of 32 bytes. The last block may have fewer';
comment on table metered.notary_heads is 'The signed heads of the tree.';
comment on column metered.notary_heads.size is 'how many leaves it has';
comment on column metered.notary_heads.signed_at is 'when, by the database''s clock';
comment on column metered.notary_heads.head is 'the signed note';
comment on function metered.block_commit() is 'Keeps a transaction from being committed by anyone but its command''s last flush. A cursor WITH HOLD is run to its end by COMMIT, and this is its query.';
comment on function metered.begin_command(boolean, boolean, metered.new_command, metered.presented_token, metered.new_charge[], interval, int) is 'Begins a command, in two steps that usually come as one.';
comment on function metered.complete_command(metered.new_command, metered.fingerprint, bytea, json, metered.new_charge[], interval, int, boolean) is 'Ends a command: charges, records the operation, and lets COMMIT pass. A refusal raises, because COMMIT follows in the same flush. Without finishing, finish_command lets COMMIT pass later. With of_refusal it records that the command was refused and rolled back, with an empty result.';
comment on function metered.finish_command(text) is 'Lets COMMIT pass for a command that was completed without finishing, if this is still its transaction.';
comment on function metered.purge_operations(timestamptz, timestamptz, int, int) is 'Deletes records of operations completed and issued before cutoff, at most max_rows, oldest first, and moves the horizon to the latest time that their ids carry, in the same transaction. A horizon beyond these would refuse new ids, after a clock was ahead, for as long. after is the last of the batch before, as in purge_tokens. It waits for another purge''s move, as long as wait_ms. It also deletes at most max_rows newest events of keys that took effect before cutoff, which deleted does not count.';
comment on function metered.charge_plain(text, bigint, bigint, bigint, interval, jsonb, text, boolean, interval, int) is 'A charge of one scope without a command, as charge makes it: JSON, [seq, time in microseconds, held units, used units], or charge''s answer as an object. It has at most one limit: max_units in each win, or in its lifetime, if win is 0. The columns that it leaves out are null in a usual scope.';
comment on function metered.begin_command_plain(text, text, bigint, timestamptz, interval, int, text, int, boolean) is 'Claims the id of a command without a token and without charges to look at. Null: it is new, and begun. Else begin_command''s answer, whose arguments these are, or with raising an error, after which the server skips the rest of the flush. Then the marker begins with a minus, and there is no guard.';
comment on function metered.complete_command_plain(text, text, text, bytea, timestamptz, bytea, text, bigint[], text, bigint, bigint, bigint, interval, jsonb, text, boolean, interval, int) is 'Ends a command that has at most one charge of its own, as complete_command does with finishing: JSON, the time of the record in microseconds and the array of charge_plain, or complete_command''s answer as an object.';
comment on function metered.run_command_plain(text, text, bigint, bytea, timestamptz, interval, bytea, text, text, bigint, bigint, bigint, interval, jsonb, text, boolean, interval, int) is 'A whole command that does nothing but its one charge: the answer of begin_command_plain, if that is not null, or else that of complete_command_plain. The short way needs no guard against a COMMIT, since nobody gets at the transaction before it is complete.';
comment on function metered.run_command(metered.new_command, bytea, bytea, metered.new_charge[], interval, int) is 'A whole command that does nothing but its charges, of any kind, as run_command_plain does it, by the full functions.';
comment on function metered.charge_total(text, bigint, bigint, bigint, interval, jsonb, text, boolean, text, bigint, bigint, jsonb, boolean, interval, int) is 'Two charges without a command, as charge makes them: JSON, the array of charge_plain and the seq of the tally, which is less than 0 and has its time, or charge''s answer as an object.';
comment on function metered.complete_command_total(text, text, text, bytea, timestamptz, bytea, text, bigint[], text, bigint, bigint, bigint, interval, jsonb, text, boolean, text, bigint, bigint, jsonb, boolean, interval, int) is 'Ends a command that has two such charges, as complete_command_plain ends one with one: JSON, the time of the record in microseconds and the array of charge_total, or complete_command''s answer as an object.';
comment on function metered.run_command_total(text, text, bigint, bytea, timestamptz, interval, bytea, text, text, bigint, bigint, bigint, interval, jsonb, text, boolean, text, bigint, bigint, jsonb, boolean, interval, int) is 'A whole command that does nothing but two such charges, as run_command_plain does it.';
comment on function metered.open_session(metered.new_command, metered.new_hold, metered.new_charge[], interval, int, metered.origin, text) is 'Opens a session of an operation: places its hold, unless the operation is on record, or another session of it is open. The id of a session''s hold is that of its operation, as a digest in 41 characters, and some of its own. status as place has it, or open (this very session was opened before, and its hold is stored), replay (the operation is on record), retired and future, as begin_command has them, running (another session is open, until deadline, as seen at placed_at) or busy (a session of another command is open).';
comment on function metered.place_plain(text, text, bigint, text, bytea, timestamptz, interval, interval, interval, json, text, bigint, bigint, bigint, interval, jsonb, text, text, interval, int, text, boolean) is 'Places a hold of one line, as place does: JSON, [seq, time in microseconds], or place''s answer as an object. id_key is null if the id was made up for this call.';
comment on function metered.open_session_plain(text, bigint, timestamptz, interval, text, text, text, bytea, timestamptz, interval, interval, interval, json, text, bigint, bigint, bigint, interval, jsonb, text, text, interval, int, text) is 'Opens a session whose hold has one line, as open_session does: JSON, as place_plain has it.';
comment on function metered.capture_holds_plain(text, text, timestamptz, text, text, bigint, text, jsonb, text, text, int, text, boolean) is 'Captures one hold and ends it, as capture_holds does: all of it (units is null), or units of of_scope, its one line, as far as they are held. JSON: the hold, or an array of capture_holds'' answer, whose holds are text, since the metadata of one may be as deep as a reader of JSON goes.';
comment on function metered.charge_each(metered.new_charge[], metered.new_event[], interval, interval, interval, int, boolean) is 'Makes up to 1,000 charges, each on its own, and answers each, in any order. Those of one scope are judged in the order given, and one that is let in counts for the next. All locks are taken first, those of ids before those of scopes: two of the server''s lock table for a charge with an id.';
comment on table metered.feed_state is 'The feed''s state: see feed.sql.';
comment on column metered.feed_state.last is 'the last number that was given';
comment on column metered.feed_state.since is 'when the feed began, or null: nobody reads it';
comment on column metered.feed_state.began_at is 'when the present round began';
comment on column metered.feed_state.whole_at is 'all that was committed before has a number';
comment on column metered.feed_state.one is 'there is one row';
comment on table metered.feed_round is 'The scope that the present round has come to, unless it is at its end.';
comment on column metered.feed_round.scope is 'the scope: there is one row at most';
comment on table metered.feed is 'Entries by number: a run of entries that follow one another in their scope and in the feed.';
comment on column metered.feed.no is 'the number of its last entry: 1, 2, 3 and so on';
comment on column metered.feed.seq is 'the seq of its last entry';
comment on column metered.feed.entries is 'how many they are';
comment on column metered.feed.scope is 'whose entries they are';
comment on table metered.feed_scopes is 'How far the entries of scopes have numbers.';
comment on column metered.feed_scopes.seq is 'the last entry with a number';
comment on column metered.feed_scopes.new_at is 'when it got it';
comment on column metered.feed_scopes.scope is 'the scope';
comment on table metered.feed_purged is 'Numbers whose entries were deleted. Only the greatest counts: the feed is whole from behind it on.';
comment on column metered.feed_purged.no is 'the number';
comment on table metered.feed_histories is 'The servers that gave numbers, in turn: another one after a failover or a restore.';
comment on column metered.feed_histories.history is 'a number greater than those before';
comment on column metered.feed_histories.first_no is 'its first number';
comment on column metered.feed_histories.server is 'the server, its timeline, database and table';
comment on table metered.feed_consumers is 'Who consumes the feed, and how far.';
comment on column metered.feed_consumers.no is 'the number of the last consumed entry';
comment on column metered.feed_consumers.patience is 'how much longer a purge keeps what it has not consumed';
comment on column metered.feed_consumers.moved_at is 'when it looked last, within 10 seconds';
comment on column metered.feed_consumers.consumer is 'its name';
comment on function metered.number_feed(int) is 'Gives the entries of up to look scopes that are committed and have no number one each, and returns how many. done: the round is at its end, and all that was committed when it began has a number. It waits for nobody: while another transaction gives numbers, or where nothing can be written, it returns null. Its own transaction should end soon, since nobody else gives numbers meanwhile. The feed begins with the first call.';
comment on function metered.read_feed(bigint, bigint, int) is 'Up to most entries of the feed after a number, in the order of their numbers. of_history is that of the entry with that number: 0, if there is none. SQLSTATE MT017: entries in between were purged, or lost with a server.';
comment on function metered.consume_feed(text, int, interval, boolean) is 'The next entries of the feed for a consumer, up to most, which are consumed if the caller''s transaction commits. Its row is locked until then: others that consume by that name wait. The first call begins with the first entry that is there, or, from_now, behind the last one. A purge keeps entries that it has not consumed for patience longer than it would.';
comment on function metered.drop_feed_consumer(text) is 'Forgets a consumer, and says whether there was one. A purge waits for it no longer. Consumed again, the name begins anew.';
comment on view metered.feed_lag is 'How far the consumers of the feed are.';
comment on column metered.feed_lag.consumer is 'its name';
comment on column metered.feed_lag.consumed is 'the number of the last consumed entry';
comment on column metered.feed_lag.unread is 'entries that it has not consumed';
comment on column metered.feed_lag.unread_since is 'the time of the first of them, or null';
comment on column metered.feed_lag.moved_at is 'when it looked last, within 10 seconds';
comment on column metered.feed_lag.patience is 'how much longer a purge keeps what it has not consumed';
comment on column metered.feed_lag.whole_at is 'all entries that were committed before have numbers';
comment on view metered.statement is 'The entries of the ledger: the statement of each scope. By scope it reads the primary key: 1 ms for a thousand entries. Without a scope it reads the whole ledger, and a condition on the time alone does not help. The spends from a lease are one capture here, and rows of lease_spends_words.';
comment on column metered.statement.scope is 'the charged scope';
comment on column metered.statement.seq is '1, 2, 3 and so on in the scope';
comment on column metered.statement.at is 'by the database''s clock';
comment on column metered.statement.kind is 'the kind of entry';
comment on column metered.statement.amount is 'of the entry, never negative';
comment on column metered.statement.change is 'of used';
comment on column metered.statement.used is 'charges less refunds and credits, so far';
comment on column metered.statement.held is 'in open holds now';
comment on column metered.statement.spent is 'charges so far';
comment on column metered.statement.refunded is 'refunds so far';
comment on column metered.statement.credited is 'credits so far, less revoked and lapsed units';
comment on column metered.statement.refunds_seq is 'of a refund: the number of its charge';
comment on column metered.statement.hold is 'the hold''s id, where the entry is about one alone';
comment on column metered.statement.operation_tenant is 'of the operation';
comment on column metered.statement.operation is 'the operation''s id';
comment on column metered.statement.actor is 'the person or process that made it';
comment on column metered.statement.tenant is 'for whom';
comment on column metered.statement.correlation is 'the request or case that it belongs to';
comment on column metered.statement.reason is 'why';
comment on column metered.statement.occurred_at is 'of a usage event: when it happened, in ISO 8601';
comment on column metered.statement.use is 'the use that a charge or a hold is for';
comment on view metered.scopes is 'The state of each scope, by its last entry. One scope, or a range of names, takes 20 microseconds a scope. All of them, or a condition on anything else, read the sixteenth part of the ledger that is indexed by time, and each scope''s last entry: 0.1 s for ten thousand scopes.';
comment on column metered.scopes.scope is 'its name';
comment on column metered.scopes.entries is 'how many entries were ever made';
comment on column metered.scopes.used is 'charges less refunds and credits';
comment on column metered.scopes.held is 'in open holds, those that are due and not swept among them, and on leases';
comment on column metered.scopes.spent is 'charges';
comment on column metered.scopes.refunded is 'refunds';
comment on column metered.scopes.credited is 'credits, less revoked and lapsed units';
comment on column metered.scopes.first_at is 'when the first entry was made';
comment on column metered.scopes.last_at is 'when the last entry was made';
comment on column metered.scopes.clock_repairs is 'so many';
comment on column metered.scopes.closed is 'carved from another scope, and given back: nothing new is let in';
comment on column metered.scopes.created_at is 'when it was declared, or null';
comment on column metered.scopes.retired_at is 'since when nothing new is let in that demands a declared scope';
comment on column metered.scopes.balance is 'of a wallet: units that can be drawn, or less than 0 if it is overdrawn. Lots that ended and are not swept count';
comment on column metered.scopes.lots_end is 'of a wallet: no lot with units ends before this, or null: none ends';
comment on column metered.scopes.told is 'thresholds that were reached and reported, by kind (p of a period, w of a window, l of a lifetime, in upper case of spending alone), limit and name';
comment on view metered.holds_words is 'Holds, with words for their states. One that is due has expired, whether that is recorded or not. By tenant and id, by tenant and holder, by tenant and entity, or by no it reads an index. Units and reason cost a look-up for each row that is shown. Everything else reads all holds.';
comment on column metered.holds_words.no is 'the number of the hold, in the order of placing';
comment on column metered.holds_words.tenant is 'keeps the ids of tenants apart';
comment on column metered.holds_words.id is 'chosen by the caller, or made up';
comment on column metered.holds_words.holder is 'the holder';
comment on column metered.holds_words.state is 'the state';
comment on column metered.holds_words.placed_at is 'when it was placed';
comment on column metered.holds_words.deadline is 'when it ends, unless it is extended';
comment on column metered.holds_words.due is 'deadline and grace: its units are free from here on';
comment on column metered.holds_words.ended_at is 'when it ended';
comment on column metered.holds_words.claim is 'the claimed scope, if it is a claim';
comment on column metered.holds_words.entity is 'the entity that a capture linked';
comment on column metered.holds_words.metadata is 'of the caller';
comment on column metered.holds_words.units is 'by scope, as they were placed';
comment on column metered.holds_words.captured is 'of these, by scope';
comment on column metered.holds_words.reason is 'why it was released or given back';
comment on view metered.hold_events_words is 'The history of holds, with words for the transitions. By tenant and id it reads an index, everything else reads all that ever happened.';
comment on column metered.hold_events_words.tenant is 'of the hold';
comment on column metered.hold_events_words.id is 'of the hold';
comment on column metered.hold_events_words.version is '1, 2, 3 and so on in the hold';
comment on column metered.hold_events_words.kind is 'the transition';
comment on column metered.hold_events_words.at is 'when it was recorded';
comment on column metered.hold_events_words.deadline is 'the new one, of a placement or an extension';
comment on column metered.hold_events_words.entity is 'the entity that a capture linked';
comment on column metered.hold_events_words.detail is 'more about it';
comment on column metered.hold_events_words.note is 'actor, tenant, correlation, reason';
comment on column metered.hold_events_words.operation_tenant is 'of the operation';
comment on column metered.hold_events_words.operation is 'the operation''s id';
comment on view metered.leases_words is 'Leases, with words. By no, or by scope, it reads an index. Everything else reads all leases.';
comment on column metered.leases_words.no is 'the number of the lease';
comment on column metered.leases_words.scope is 'whose units they are';
comment on column metered.leases_words.owner is 'the process that opened it';
comment on column metered.leases_words.child is 'the scope that its units were carved for';
comment on column metered.leases_words.mode is 'how its spends are recorded';
comment on column metered.leases_words.state is 'ended: its time is over, and nobody has settled it';
comment on column metered.leases_words.opened_at is 'when it was opened';
comment on column metered.leases_words.ends_at is 'nothing is spent of it from here on';
comment on column metered.leases_words.settled_at is 'when it was settled';
comment on column metered.leases_words.settled_by is 'the process that settled it';
comment on column metered.leases_words.granted is 'units that it held';
comment on column metered.leases_words.spent is 'captured units of granted, once it is settled';
comment on column metered.leases_words.opened_seq is 'the entry of the ledger that holds its units';
comment on column metered.leases_words.settled_seq is 'the last entry of its end';
comment on view metered.lease_spends_words is 'Spends from leases whose spends are rows. By lease it reads an index. Everything else reads all spends.';
comment on column metered.lease_spends_words.lease is 'leases_words.no';
comment on column metered.lease_spends_words.at_offset is 'where its range begins in the lease';
comment on column metered.lease_spends_words.amount is 'units';
comment on column metered.lease_spends_words.at is 'when';
comment on column metered.lease_spends_words.operation_tenant is 'of the operation';
comment on column metered.lease_spends_words.operation is 'the operation''s id, where a command spent it';
comment on column metered.lease_spends_words.actor is 'the person or process that spent it';
comment on column metered.lease_spends_words.tenant is 'for whom';
comment on column metered.lease_spends_words.correlation is 'the request or case that it belongs to';
comment on column metered.lease_spends_words.reason is 'why';
comment on view metered.operations_words is 'Commands that committed, recorded refusals, and usage events. Without the input, of which only a hash is stored, and without the result. By tenant and id, or by the time at, it reads an index. Everything else reads all records.';
comment on column metered.operations_words.tenant is 'keeps the ids of tenants apart';
comment on column metered.operations_words.id is 'chosen by the caller';
comment on column metered.operations_words.name is 'the command''s name, or null of a usage event';
comment on column metered.operations_words.state is 'the state';
comment on column metered.operations_words.at is 'when it was completed';
comment on column metered.operations_words.issued_at is 'the time that the id carries, if it does';
comment on column metered.operations_words.scopes is 'the charged scopes';
comment on column metered.operations_words.amounts is 'the amount of each charge';
comment on column metered.operations_words.seqs is 'the number of each entry, or 0 of a spend from a lease';
comment on column metered.operations_words.ats is 'the time of each entry';
comment on column metered.operations_words.holds is 'the holds that it placed, captured, released or gave back';
comment on column metered.operations_words.jobs is 'the ids of River''s jobs that it made';
comment on column metered.operations_words.refusal_code is 'why it was refused, as metered.Code has it';
comment on column metered.operations_words.refusal_text is 'the same for people';
comment on column metered.operations_words.refusal_limits is 'of a refusal by limits: which, and by how much';
comment on view metered.tokens_words is 'Tokens without anything that a thief could use: neither the token, which is stored nowhere, nor its digest, nor its payload. By purpose and subject, of tokens that are open, it reads an index if ended_at is null is asked for; everything else reads all tokens.';
comment on column metered.tokens_words.purpose is 'the right that it grants';
comment on column metered.tokens_words.subject is 'the user or thing that it is for';
comment on column metered.tokens_words.state is 'the state';
comment on column metered.tokens_words.minted_at is 'when it was minted';
comment on column metered.tokens_words.expires_at is 'when it is no longer good';
comment on column metered.tokens_words.ended_at is 'last use, revocation, or expiry seen by a revocation';
comment on column metered.tokens_words.uses is 'how often it can be used';
comment on column metered.tokens_words.used is 'how often it was';
comment on column metered.tokens_words.sole is 'whether it replaced the subject''s token before it';
comment on view metered.lots_words is 'Lots of wallets, with words for their states. By scope, or by no, it reads an index. Everything else reads all lots. What is in a lot adds up: granted = rest + drawn + held + lapsed + revoked + rolled + pending. Units of a lot that pays for some uses are in rest, too.';
comment on column metered.lots_words.no is 'the number of the lot';
comment on column metered.lots_words.scope is 'the wallet';
comment on column metered.lots_words.reference is 'of the caller, once in a wallet';
comment on column metered.lots_words.category is 'of the caller, as paid or promotional';
comment on column metered.lots_words.priority is 'the lower one is drawn first';
comment on column metered.lots_words.state is 'ended: units were left at its end, whether that is written down or not. held: the rest is in open holds and leases';
comment on column metered.lots_words.origin is 'where its units are from';
comment on column metered.lots_words.from_lot is 'the lot that they were in before';
comment on column metered.lots_words.granted_at is 'when it was granted';
comment on column metered.lots_words.expires_at is 'nothing is drawn of it from here on, or null: it never ends';
comment on column metered.lots_words.granted is 'units that it was granted with';
comment on column metered.lots_words.rest is 'units that can be drawn. After its end, units that lapse or roll over with the next write or sweep';
comment on column metered.lots_words.drawn is 'units that were spent, less refunds';
comment on column metered.lots_words.held is 'units in open holds and leases, after its end, too';
comment on column metered.lots_words.lapsed is 'units that were left at its end or refunded later: breakage';
comment on column metered.lots_words.revoked is 'units that were taken back';
comment on column metered.lots_words.rolled is 'units that rolled over into another lot';
comment on column metered.lots_words.granted_seq is 'the entry that credited it';
comment on column metered.lots_words.last_seq is 'the last entry that moved units of it';
comment on column metered.lots_words.pending is 'units that nobody can draw before starts_at';
comment on column metered.lots_words.starts_at is 'when it begins, or began, or null: with the grant';
comment on column metered.lots_words.of_reference is 'the reference of the lot that had its units first, or null';
comment on column metered.lots_words.renewal is 'the reference of the grant that renews by it, or null';
comment on column metered.lots_words.uses is 'the uses that it pays for alone, or null: all';
comment on view metered.lots_statement is 'The statement of each wallet by lot: which lots each entry was of, so where credit went. By scope it reads a primary key, and a look-up for each row. A lot or a time alone does not help. Moves of entries that were purged are gone.';
comment on column metered.lots_statement.scope is 'the wallet';
comment on column metered.lots_statement.seq is 'the entry: statement.seq';
comment on column metered.lots_statement.nth is '1, 2, 3 and so on in the entry';
comment on column metered.lots_statement.at is 'when, by the database''s clock';
comment on column metered.lots_statement.lot is 'lots_words.no, or null: overdraft, which no lot covers';
comment on column metered.lots_statement.reference is 'of the lot';
comment on column metered.lots_statement.category is 'of the lot';
comment on column metered.lots_statement.does is 'the effect on the lot. paid back: taken for an earlier overdraft. held after: taken for overdrawn units of an earlier hold. applied: for the use of the next entry. kept: for its uses again';
comment on column metered.lots_statement.amount is 'units';
comment on column metered.lots_statement.change is 'of the lot''s rest';
comment on column metered.lots_statement.given_back is 'drawn units that refunds gave back';
comment on column metered.lots_statement.refunds_seq is 'of a refund: the number of its charge';
comment on column metered.lots_statement.hold is 'the hold''s id, where the entry is about one alone';
comment on column metered.lots_statement.operation_tenant is 'of the operation';
comment on column metered.lots_statement.operation is 'the operation''s id';
comment on column metered.lots_statement.actor is 'who made the entry';
comment on column metered.lots_statement.reason is 'why';
comment on column metered.lots_statement.use is 'what it is for';
comment on view metered.parked_scopes_words is 'The lines of parked jobs: one row for each scope for whose units jobs wait. By scope it reads an index. Everything else reads all lines. oldest_at costs a look-up for each row that is shown.';
comment on column metered.parked_scopes_words.scope is 'the scope whose units the jobs wait for';
comment on column metered.parked_scopes_words.waiting is 'jobs in the line';
comment on column metered.parked_scopes_words.oldest_at is 'when the job was parked that waits longest';
comment on column metered.parked_scopes_words.state is 'due: a releaser is to look at it now';
comment on column metered.parked_scopes_words.looked_at is 'when it is looked at, if no units are freed before. A job''s hold without a TTL would end in ten years: that is no time to wait for';
comment on column metered.parked_scopes_words.started is 'jobs of the line that started since then';
comment on column metered.parked_scopes_words.since is 'when the line began, or an hour or two ago';
comment on column metered.parked_scopes_words.trouble is 'why the last look at the line failed, or null';
comment on view metered.parked_jobs_words is 'Parked jobs, without their args. By job_id, by scope in the order of priority, turn and job_id, or those in trouble (trouble is not null), it reads an index. Everything else reads all parked jobs. position counts the jobs before each row that is shown: ask for it of a few rows only.';
comment on column metered.parked_jobs_words.job_id is 'the id that it will have in river_job';
comment on column metered.parked_jobs_words.scope is 'the scope whose units it waits for, or empty: it is in no line until its next attempt, or its next try';
comment on column metered.parked_jobs_words.amount is 'units that it needs of the scope';
comment on column metered.parked_jobs_words.priority is 'River''s: 1 is first';
comment on column metered.parked_jobs_words.position is 'in the line: 1 is next. No further than 10,000';
comment on column metered.parked_jobs_words.turn is 'its round in the line: jobs of different keys take turns';
comment on column metered.parked_jobs_words.fair is 'the key of its turns';
comment on column metered.parked_jobs_words.tenant is 'of the job and its hold';
comment on column metered.parked_jobs_words.queue is 'River''s queue';
comment on column metered.parked_jobs_words.kind is 'River''s kind';
comment on column metered.parked_jobs_words.key is 'of the caller, or null';
comment on column metered.parked_jobs_words.hold is 'the id that its hold will have';
comment on column metered.parked_jobs_words.parked_at is 'when it was parked';
comment on column metered.parked_jobs_words.drop_at is 'when it is dropped, or null: never';
comment on column metered.parked_jobs_words.not_before is 'when its next attempt may start, or null: it waits for its first';
comment on column metered.parked_jobs_words.lane is '0, or 1: the row of its second choice of units, for which it waits as well';
comment on column metered.parked_jobs_words.trouble is 'why its last try failed, or null: it is not in trouble';
comment on column metered.parked_jobs_words.troubled_at is 'when that began, or null';
comment on column metered.parked_jobs_words.retry_at is 'when it is tried again, or null';
comment on function metered.v1_charge(text, bigint, jsonb, jsonb, boolean) is 'Charges units of a scope if all limits let them in: seq, the entry, and the limits as they stand.';
comment on function metered.v1_check(text, bigint, jsonb, jsonb, boolean) is 'The answer of v1_charge at this moment, without a lock and without writing.';
comment on function metered.v1_credit(text, bigint, jsonb, boolean) is 'Gives a scope credit, which limits for its lifetime and prepaid ones count.';
comment on function metered.v1_refund(text, bigint, bigint, jsonb) is 'Gives back units of a charge, by its entry, or all that is left of it. remaining are those that can still be given back.';
comment on function metered.v1_usage(text, jsonb) is 'The units and charges that count for each limit now, or for the lifetime without limits, and the scope''s totals.';
comment on function metered.v1_balance(text) is 'The units of a wallet that can be drawn, those that are held, and its lots, in the order in which they are drawn.';
comment on function metered.v1_hold(text, text, text, bigint, interval, jsonb, jsonb, jsonb) is 'Holds units of a scope for so long, if all limits let them in. The id names the hold within its tenant: the same call again answers with the hold as it stands, and new is false.';
comment on function metered.v1_capture(text, text, bigint, jsonb) is 'Spends so many units of a hold of one line, or all units of a hold without an amount, and ends it. The rest is free.';
comment on function metered.v1_release(text, text, jsonb) is 'Ends a hold, and frees its units.';
comment on function metered.v1_consume(text, text, text) is 'Takes one use of a token, by its text.';
comment on function metered.v1_claim(text, text, jsonb) is 'Claims an id for this transaction, which v1_answer must end, else COMMIT fails. If the id was answered before, new is false, and answer is that one. The content is what the id is used for: another one is a conflict.';
comment on function metered.v1_answer(jsonb) is 'Records the answer of the id that this transaction has claimed, and lets COMMIT pass.';
comment on function metered.v1_enqueue(bigint, text, jsonb, text, text, bigint, jsonb, text, int) is 'Holds units of a scope for a job of River''s until it ends. status is started, and the caller inserts job into river_job, or parked until the units fit. job_id is of River''s sequence.';

-- Nothing is for everybody. See metered.GrantSQL.
do $$
declare
    f regprocedure;
begin
    for f in
        select p.oid from pg_proc p
        where p.pronamespace = to_regnamespace('metered') and p.proname = any ('{_absence,_add_leased,_add_lot,_admit,_advance,_advance_each,_after_due,_after_due_lowered,_after_minima,
            _again,_age,_announce,_answer_before,_append,_append_all,_append_lot,_apply_lots,_armed,_as_charges,
            _as_far_as_admitted,_as_held,_as_rest,_as_wallet,_awake,_balance,_base,_beginning,_behind,_beyond_limits,
            _bound_lock_wait,_by_days,_by_system,_capped,_capture_lots,_capture_minima,_captured,_change_lines,
            _charge_anyway,_charge_excess,_charge_of,_charged_json,_charges_upto,_check_feed,_check_limits,
            _check_now,_class_of,_clear_freed,_clear_freed_of,_clock_changes,_close_lease,_close_scope,
            _closed_classes,_collided,_comes_of_kept,_completed_json,_created_json,_credit_lot,_cross_captured,
            _cross_lowered,_cross_thresholds,_crossed_at,_debt,_debt_paid,_due_after,_due_lots,_due_minima,
            _due_units,_empty_lot,_end_due,_end_foreseen,_end_line,_end_lost,_end_lot,_end_minima,_end_minima_of,
            _end_named,_end_rows,_end_skipped,_end_swept,_end_tallies,_ends_per_call,_entry_for_write,_events_per_step,
            _expire_and_check,_expire_due,_expire_rows,_explain_charges,_family,_feed_needs,_feed_server,
            _find_lot,_find_skipped,_first_due,_first_for_write,_first_lot,_first_minima,_fits,_fits_after_period,
            _fits_at,_fits_origin,_fold,_fold_all,_fold_of,_foreseen,_foreseen_later,_foreseen_next,_foreseen_on,
            _free_first,_free_in_sum,_free_lines,_free_lots,_fresh,_give_back,_given_back,_goes_on,_goes_short,
            _gone_on,_has_number,_held_here,_hold_as_json,_hold_before,_hold_of_job,_hold_text,_hours_between,
            _in_cell,_in_us,_is_idle,_is_job,_join_line,_judge_charges,_kept_for,_kept_reports,_key_fits,
            _keys_of_job,_known_zone,_lags,_lapsing,_lapsing_after,_lapsing_before,_largest_number,_last_entry,
            _later_due,_lease_key,_lease_to_settle,_leased,_leased_units,_leases_channel,_leave_line,_leaves_at,
            _limits_trouble,_line_before,_line_json,_lines,_lines_per_step,_lines_until,_load_debt,_load_debts,
            _load_due,_load_lines,_load_rolling,_lock_all_scopes,_lock_charges,_lock_due,_lock_each,_lock_holds,
            _lock_key,_lock_keys,_lock_keys_there,_lock_place,_look_again,_lot_begins,_lot_entry,_lot_from,
            _lots_after,_lots_end_caught_up,_lots_now,_lots_of,_lots_until,_make_room,_mark_freed,_meet_upgrade,
            _mend_numbers,_minima,_minima_due,_minima_leave,_minimum_is_due,_missing_hold,_missing_lot,
            _missing_token,_move_lot,_moved,_name_lot,_named_holds,_names_kept,_new_hold_id,_next_end,_next_entry,
            _next_lot,_next_number,_no_amount,_note_feed_server,_note_lot,_nth_due,_number_scopes,_numbers,
            _old_lot,_on_linux,_on_spending,_one_snapshot,_open_wallet,_other_lane,_others,_others_fall_due,
            _others_wait,_overdue,_owe,_owe_use,_owed_before,_own_entry,_paid_back,_parked_channel,_parked_json,
            _parts_of,_pass_ended,_pay_back,_pays,_period_at,_period_name,_periods_of,_placed_before,_placed_json,
            _places,_plan_kept,_plan_on,_purge_changes,_purge_feed,_purge_lots,_queued,_raise_moved,_raise_sequence,
            _raised,_rearmed,_recall_leases,_recorded_events,_recorded_meanwhile,_recurs,_refund_fate,_refund_hold,
            _refund_lots,_refund_parts,_refunds_after,_refuse_behind,_refuse_closed,_refuse_hold,_refuse_moved,
            _refuse_old_tenant,_refuse_stale,_refuse_unreported,_refusing,_reinstate,_release_job,_release_line,
            _release_lines,_remember_hold,_renamed_zones,_renew_lot,_repaid,_repeats,_reported_after_repair,
            _reported_until,_require,_require_plan,_resource_for_write,_roll_end,_roll_lot,_rolls,_schedule,
            _scope_key,_seq_of_tally,_settle,_settle_lowered,_sharded,_shorter,_sound_uses,_spend_range,
            _spent_limits,_spent_since,_start_job,_start_lot,_step_until,_sum_lines,_sweep_lots,_sweepable,
            _take_back,_take_lots,_take_units,_taken,_taken_of,_taken_parts,_tallied_of,_tallied_units,
            _tallies_before,_tally,_tally_key,_tenant_key,_threshold_key,_token_fits,_told_use,_trouble_job,
            _try_each,_try_keys,_try_lock,_try_lock_shared,_try_lock_there,_try_start_job,_turn,_turn_at,
            _unbound_lock_wait,_under_limits,_unknown_use,_unsettled_spends,_untold,_untold_json,_unwritten,
            _usage_known_from,_use_lots,_use_repaid,_v1_charge,_v1_hold,_v1_hold_no,_v1_issued,_v1_limit,
            _v1_no,_v1_print,_v1_refused,_v1_stand,_v1_standings,_wake_releasers,_who_holds,_with_absent,
            _with_debt,_with_keys,_with_minima,_with_total,_withdraw,_without_debt,_without_lapsing,_without_tallies,
            _write_charges,_write_debts,_write_due,_write_exact,_write_for_uses,_write_lines,_write_moves,
            _write_others,_write_plain,_write_up_to,_written_here,announced,begin_change,begin_command,
            begin_command_plain,block_commit,capture_holds,capture_holds_plain,carve,catch_up,change_parked,
            charge,charge_each,charge_leased,charge_lots,charge_plain,charge_total,check_charge,claim_job_key,
            clock,complete_command,complete_command_plain,complete_command_total,consume_feed,consume_token,
            create_scopes,credit,draw,drop_feed_consumer,drop_parked,due_holds,end_child,end_renewal,enter_tenant,
            expire_hold,explain_parked,extend_holds,feed_keeps,find_job_key,finish_command,grant_lot,hold_json,
            inspect_token,judged_scopes,keep_memory,lock_all,lock_scopes,look_place,mint_tokens,next_release,
            note_change,number_feed,numbers_behind,open_lease,open_session,open_session_plain,park_jobs,
            place,place_plain,plan_lot,plan_overage,plan_state,purge_holds,purge_job_keys,purge_leases,
            purge_operations,purge_scope,purge_tokens,read_feed,receive_child,refund,reinstate_lot,release_captured,
            release_holds,release_jobs,repair_clock,replace_token,rest_jobs,resume_renewal,retire_scopes,
            return_holds,revoke_lot,revoke_token,revoke_tokens,roll_over,run_command,run_command_plain,
            run_command_total,search_entries,set_lot_end,settle_away,settle_lease,spend,sweep_due,sweep_holds,
            sweep_lots,sweep_scope,sweep_wallet,sweep_wallets,take_newest,told_lots,trouble_jobs,usage,
            usage_at,usage_before,usage_of,v1_answer,v1_balance,v1_capture,v1_charge,v1_check,v1_claim,
            v1_consume,v1_credit,v1_enqueue,v1_hold,v1_refund,v1_release,v1_usage,wallet_balance,with_sums}')
          and exists (select from aclexplode(coalesce(p.proacl, acldefault('f', p.proowner))) a where a.grantee = 0)
        order by p.oid
    loop
        execute format('revoke all on function %s from public', f);
    end loop;
end
$$;

-- On Citus: locks are taken on the node that has the tables, and a statement that has no generic plan is planned at each call.
do $$
declare
    sharded boolean := false;
    f       regprocedure;
begin
    if to_regclass('pg_catalog.pg_dist_schema') is not null then
        execute 'select exists (select from pg_catalog.pg_dist_schema where schemaid = $1)' into sharded using to_regnamespace('metered');
    end if;
    if sharded then
        create or replace function metered._sharded() returns boolean language sql immutable as 'select true';
    end if;
    for f in
        select p.oid from pg_proc p
        where sharded and p.pronamespace = to_regnamespace('metered') and 'plan_cache_mode=force_generic_plan' = any (p.proconfig)
        order by p.oid
    loop
        execute format('alter function %s set plan_cache_mode = auto', f);
    end loop;
end
$$;

do $$
begin
    perform pg_catalog.set_config('search_path', pg_catalog.current_setting('metered_script.search_path'), false);
end
$$;
