-- Version 2, of 0.2.0.

-- Each call of version 1 begins with the ledger. One that has read it ends before, and the others wait here: inside, a call would meet a type that changes
-- under it (42804). In a block, since a tool may run each statement in a transaction of its own.
do $$
begin
    lock table metered.ledger, metered.lots in access exclusive mode;
end
$$;

-- The holds of jobs that have not ended: see jobs.Enqueuer.Run.
create index holds_jobs on metered.holds (no) where pending and id like 'job/%';

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

-- What the caller bound to the table itself would stay with it under its new name, where the units of a lot are no longer: a view, a body
-- of SQL, a rule, a publication or a child would go on with numbers that nobody changes, a policy would not apply to the view, and a
-- trigger would not fire. What names the table in a text (PL/pgSQL) meets the view.
do $$
declare
    theirs text;
begin
    select string_agg(distinct case when w.rulename = '_RETURN' then pg_describe_object('pg_class'::regclass, w.ev_class, 0)
        else pg_describe_object(x.classid, x.objid, 0) end, ', ') into theirs
    from pg_class t cross join lateral (
        select d.classid, d.objid from pg_depend d
        where d.refclassid = 'pg_class'::regclass and d.refobjid = t.oid
            and d.classid in ('pg_rewrite'::regclass, 'pg_proc'::regclass, 'pg_policy'::regclass, 'pg_publication_rel'::regclass)
        union all
        select d.classid, d.objid from pg_depend d
        where d.refclassid = 'pg_type'::regclass and d.deptype <> 'i'
            and d.refobjid in (select y.oid from pg_type y where y.oid = t.reltype or y.typelem = t.reltype and y.typcategory = 'A')
        union all
        select 'pg_trigger'::regclass, g.oid from pg_trigger g where g.tgrelid = t.oid and not g.tgisinternal
        union all
        select 'pg_class'::regclass, case t.oid when i.inhparent then i.inhrelid else i.inhparent end from pg_inherits i
        where t.oid in (i.inhparent, i.inhrelid)) x
    left join pg_rewrite w on x.classid = 'pg_rewrite'::regclass and w.oid = x.objid
    left join pg_class v on v.oid = w.ev_class
    left join pg_proc p on x.classid = 'pg_proc'::regclass and p.oid = x.objid
    where t.oid = 'metered.lots'::regclass
        and (v.relnamespace = t.relnamespace and v.relname in ('lots_words', 'lots_statement')) is not true
        and (p.pronamespace = t.relnamespace and p.proname in ('_due_lots', '_end_lot', '_find_lot', '_gone_on', '_lots_now', '_roll_lot', '_rolls', '_untold_json')) is not true;
    if theirs is not null then
        raise exception 'drop these before the upgrade and create them again after it, since the table metered.lots becomes a view: %', theirs
            using errcode = '2BP01', hint = 'What cannot be of a view, such as a publication, is of the tables lot_rows and lot_moves after it.';
    end if;
end
$$;

-- The state of a lot is in its newest move: see the view lots, which has the name that the table had. Functions of that type cannot be replaced.
drop function if exists metered._due_lots(metered.ledger, timestamptz), metered._end_lot(metered.ledger, metered.lots), metered._find_lot(text, bigint, text),
    metered._gone_on(metered.lots), metered._lots_now(metered.ledger, timestamptz, bigint[]),
    metered._roll_lot(metered.ledger, metered.lots, bigint, timestamptz, bigint), metered._rolls(metered.lots), metered._untold_json(metered.lots);
alter table metered.lots rename to lot_rows;
alter table metered.lot_rows reset (fillfactor);
alter index metered.lots_pkey rename to lot_rows_pkey;
alter table metered.lot_moves
    add column version bigint,
    add column rest bigint,
    add column drawn bigint,
    add column held bigint,
    add column kept bigint;
create unique index lot_moves_lot on metered.lot_moves (lot, version) where version is not null;

-- Lots that begin later, that renew, that roll over more than once, and that pay for some uses.
alter table metered.lot_rows
    add column pending bigint not null default 0,
    add column starts_at timestamptz,
    add column again boolean not null default false,
    add column plan metered.lot_plan,
    add column kept bigint not null default 0,
    add column keeps boolean not null default false,
    add column age bigint[] not null default '{}';

-- The oldest lot is drawn first: units that went on keep the age of their first grant.
with recursive f as (
    select r.no, (extract(epoch from r.granted_at) * 1000000)::bigint as at, r.granted_seq as seq
    from metered.lot_rows r where r.from_lot is null or not exists (select from metered.lot_rows o where o.no = r.from_lot)
    union all
    select r.no, f.at, f.seq from f join metered.lot_rows r on r.from_lot = f.no)
update metered.lot_rows r set age = array[f.at, f.seq, r.granted_seq] from f where f.no = r.no;
drop index metered.lots_open;
drop index metered.lots_ends;
drop index metered.lots_rolling;
drop index metered.lots_scope;
create index lots_open on metered.lot_rows (scope, priority, expires_at, age) where open;
create index lots_ends on metered.lot_rows (scope, expires_at, age) where open;
create index lots_rolling on metered.lot_rows (scope, priority, roll_end, age) where open and roll_cap is not null;
create index lots_scope on metered.lot_rows (scope, expires_at, no);
create view metered.lots as
select r.no,
    r.granted_at,
    r.expires_at,
    r.granted_seq,
    coalesce(m.seq, r.last_seq) as last_seq,
    r.amount,
    coalesce(m.rest, r.rest) as rest,
    coalesce(m.drawn, r.drawn) as drawn,
    coalesce(m.held, r.held) as held,
    r.lapsed,
    r.revoked,
    r.rolled,
    r.untold,
    r.roll_cap,
    r.roll_no,
    r.roll_end,
    r.late,
    r.from_lot,
    r.priority,
    r.origin,
    r.open,
    r.scope,
    r.category,
    r.reference,
    r.fingerprint,
    r.pending,
    r.starts_at,
    r.again,
    r.plan,
    coalesce(m.kept, r.kept) as kept,
    r.keeps,
    m.version,
    r.age
from metered.lot_rows r left join lateral (
    select x.seq, x.version, x.rest, x.drawn, x.held, x.kept from metered.lot_moves x
    where x.lot = r.no and x.version is not null order by x.version desc limit 1) m on true;

-- Whoever could read the table can read the view.
do $$
declare
    a record;
begin
    for a in
        select case when x.grantee = 0 then 'public' else x.grantee::regrole::text end as role, x.may
        from pg_class c cross join lateral (
            select y.grantee, y.privilege_type as may from aclexplode(c.relacl) y
            union all
            select y.grantee, format('%s (%I)', y.privilege_type, n.attname) from pg_attribute n, aclexplode(n.attacl) y
            where n.attrelid = c.oid) x
        where c.oid = to_regclass('metered.lot_rows') and x.grantee <> c.relowner
    loop
        execute format('grant %s on metered.lots to %s', a.may, a.role);
    end loop;
end
$$;

-- A call of 0.1.0 that waited for its wallet while the upgrade was committed writes to the table that had this name. It runs again.
create function metered._meet_upgrade() returns trigger
language plpgsql volatile
as $$
begin
    raise exception 'the schema was upgraded while the call waited' using errcode = '40001';
end
$$;

create trigger lots_of_before instead of insert or update or delete on metered.lots for each row execute function metered._meet_upgrade();

-- 0.1.0 looks for this function before its first call. The others that had the table's type, but for the next three, are among those of the version.
create function metered._gone_on(l metered.lots) returns metered.lots
language plpgsql stable
as $$
declare
    child metered.lots;
begin
    if metered._rolls(l) > 0 then
        child.no := l.roll_no;
        child.granted_at := l.expires_at;
        child.expires_at := l.roll_end;
        child.amount := metered._rolls(l);
        child.rest := child.amount;
        child.held := 0;
        child.from_lot := l.no;
        child.priority := l.priority;
        child.scope := l.scope;
        child.category := l.category;
    end if;
    return child;
end
$$;

-- And for these. A call of 0.1.0 that waited for its wallet meets them after the upgrade, and runs again.
create function metered._end_lot(tip metered.ledger, l metered.lots) returns metered.ledger
language plpgsql volatile
as $$
begin
    raise exception 'the schema was upgraded while the call waited' using errcode = '40001';
end
$$;

create function metered._roll_lot(tip metered.ledger, l metered.lots, units bigint, ends timestamptz, as_no bigint,
    out entry metered.ledger, out no bigint)
language plpgsql volatile
as $$
begin
    raise exception 'the schema was upgraded while the call waited' using errcode = '40001';
end
$$;

create function metered._due_lots(tip metered.ledger, clk timestamptz, out lots metered.lots[], out lapsed bigint, out debt bigint)
language plpgsql stable
as $$
begin
    raise exception 'the schema was upgraded while the call waited' using errcode = '40001';
end
$$;

create index lots_roll_no on metered.lot_rows (roll_no) where roll_no is not null;
create index lots_starts on metered.lot_rows (scope, starts_at, age) where pending > 0;
create index lots_starting on metered.lot_rows (starts_at, no) where pending > 0;
create index lots_again on metered.lot_rows (scope, expires_at, age) where open and again;
create index lots_carried on metered.lot_rows (scope, category, expires_at) where origin = 'r' and (open or keeps);
create index lots_kept on metered.lot_rows (scope, priority, expires_at, age) where keeps;
create index lots_kept_ends on metered.lot_rows (scope, expires_at, age) where keeps;
create index lots_kept_rolling on metered.lot_rows (scope, expires_at, age) where keeps and roll_cap is not null;
create index lots_kept_due on metered.lot_rows (expires_at, no) where keeps;

-- Overdraft that was drawn for uses, and that no lot has paid: a lot that pays for the use repays it. The rest of a wallet's
-- overdraft was drawn for no use.
create table metered.lot_debts (
    amount bigint not null,             -- spent units, 1 or more
    scope  text collate "C" not null,   -- the wallet
    use    text collate "C" not null,   -- the use in the note of the draw, or of the hold that was captured
    primary key (scope, use)
);

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

-- These were read from their text for each token that was consumed. Where a caller dropped or
-- renamed one, that is no reason to stop.
alter table metered.tokens drop constraint if exists tokens_digest_check,
    drop constraint if exists tokens_uses_check,
    drop constraint if exists tokens_check, drop constraint if exists tokens_check1;

alter table metered.ledger add column tallied boolean;

-- Charges are counted from here on. Entries of before say so, and no row is rewritten. So do entries of calls
-- of version 1 that wait for this transaction, and go on after it.
alter table metered.ledger add column others bigint default 9223372036854775807;

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
