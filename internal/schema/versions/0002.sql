-- Version 2, of 0.2.0.

-- The holds of jobs that have not ended: see jobs.Enqueuer.Run.
create index holds_jobs on metered.holds (no) where pending and id like 'job/%';

-- Jobs that wait for units of a scope: see parked.sql. Those that wait for their first attempt have no row of River's yet.
create table metered.parked_jobs (
    job_id    bigint      not null,     -- the id that it has or will have in river_job
    turn      bigint      not null,     -- its round in the line
    amount    bigint      not null,     -- the units that it needs of the scope
    class     bigint      not null,     -- a hash of its limits of the scope
    parked_at timestamptz not null,     -- when it was parked
    drop_at   timestamptz,              -- when it is dropped, or null: never
    not_before timestamptz,             -- when its next attempt may start, or null: it waits for its first
    priority  smallint    not null,     -- River's: 1 is first
    lane      smallint    not null default 0, -- 1: it waits for a second choice of units, too, and has a row for each
    scope     text collate "C" not null, -- the scope that it waits for, or empty until then
    fair      text collate "C" not null, -- jobs of different keys take turns
    tenant    text collate "C" not null, -- of the job and its hold
    job       jsonb       not null,     -- its columns in river_job
    hold      text        not null,     -- the hold, a metered.new_hold
    charges   text        not null,     -- metered.new_charge[] of all its scopes
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

create index parked_jobs_drop on metered.parked_jobs (drop_at) where drop_at is not null;

-- Jobs that rest until their next attempt, and all that River has.
create index parked_jobs_rest on metered.parked_jobs (not_before) where scope = '';

create index parked_jobs_again on metered.parked_jobs (job_id) where not_before is not null;

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

-- The trigger of the ledger, with its functions: they are created again as those of the version.
-- The channel on which releasers hear that a line is marked.
create function metered._parked_channel() returns text
language sql immutable
as $$
    select left(substr('metered/parked/metered', 16), 56) || '_parked'
$$;

-- Marks the line of a scope of which units were freed, if it has one. At READ COMMITTED this sees each line, since
-- whoever parks a job holds the scope's lock. An older snapshot may not show a line that is there: an insert meets it, with
-- 40001, and the block takes the insert back.
create function metered._mark_freed() returns trigger
language plpgsql volatile
as $$
begin
    if exists (select from metered.parked_scopes p where p.scope = new.scope and not (p.again and p.wake_at = '-infinity')) then
        update metered.parked_scopes p set wake_at = '-infinity', again = true where p.scope = new.scope;
        perform pg_notify(metered._parked_channel(), '');
    elsif metered._one_snapshot() and not exists (select from metered.parked_scopes p where p.scope = new.scope) then
        begin
            insert into metered.parked_scopes (scope, key, wake_at, waiting) values (new.scope, 0, 'infinity', 0) on conflict do nothing;
            raise exception using errcode = 'MT100';
        exception when sqlstate 'MT100' then
            null;
        end;
    end if;
    return new;
end
$$;

-- Credits, refunds, releases, expiries and clock repairs can let a job in, and a capture can, sooner than its hold would have fallen
-- due: a window leaves the captured units behind. A lot that was scheduled will. Other entries cannot, and cost a comparison.
do $$
begin
    perform set_config('citus.enable_unsafe_triggers', 'on', true);   -- read by Citus alone: ours stays on the ledger's node
    create trigger ledger_frees before insert on metered.ledger
        for each row when (new.kind in ('d', 'r', 'l', 'u', 'x', 'k', 's')) execute function metered._mark_freed();
end
$$;

-- Lots that begin later, that renew, and that roll over more than once.
alter table metered.lots
    add column pending bigint not null default 0,
    add column starts_at timestamptz,
    add column again boolean not null default false,
    add column plan metered.lot_plan,
    add column kept bigint not null default 0;
create index lots_starts on metered.lots (scope, starts_at, no) where pending > 0;
create index lots_starting on metered.lots (starts_at, no) where pending > 0;
create index lots_again on metered.lots (scope, expires_at, no) where open and again;
create index lots_carried on metered.lots (scope, category, expires_at) where origin = 'r';

-- Lots that pay for some uses.
create index lots_kept on metered.lots (scope, priority, expires_at, no) where kept > 0;
create index lots_kept_ends on metered.lots (scope, expires_at, no) where kept > 0;
create index lots_kept_rolling on metered.lots (scope, expires_at, no) where kept > 0 and roll_cap is not null;
create index lots_kept_due on metered.lots (expires_at, no) where kept > 0;

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
