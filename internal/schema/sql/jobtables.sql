-- The tables of jobs: keys that were used, and jobs in line.

-- Which job a key was used for. No foreign key: River deletes finished jobs after a day, and a key
-- must be remembered for longer than its job.
create table metered.job_keys (
    job_id     bigint      not null,    -- river_job.id
    created_at timestamptz not null,    -- when the key was claimed
    queue      text collate "C" not null, -- of the job
    key        text collate "C" not null, -- chosen by the caller, once in the queue
    kind       text        not null,    -- of the job
    tenant     text        not null,    -- of the job
    digest     bytea       not null,   -- of kind and args, its first byte
                                       -- the version: see jobs/digest.go
    primary key (queue, key)
);

-- For purging by age.
create index job_keys_age on metered.job_keys (created_at);

-- Jobs that wait for units of a scope: see parked.sql. Those that wait for their first attempt have
-- no row of River's yet.
create table metered.parked_jobs (
    job_id    bigint      not null,     -- the id that it has or will have in river_job
    turn      bigint      not null,     -- its round in the line
    amount    bigint      not null,     -- the units that it needs of the scope
    class     bigint      not null,     -- a hash of its limits of the scope, and its use
    parked_at timestamptz not null,     -- when it was parked
    drop_at   timestamptz,              -- when it is dropped, or null: never
    not_before timestamptz,             -- when its next attempt may start,
                                        -- or null: it waits for its first
    troubled_at timestamptz,            -- when it got into trouble, or null: it is in none
    retry_at  timestamptz,              -- when a job in trouble is tried
                                        -- again: it is in no line before
    passed_amount bigint,               -- the units that it needs of passed, whose line counts them
    priority  smallint    not null,     -- River's: 1 is first
    lane      smallint    not null default 0, -- 1: it waits for a second choice of
                                              -- units, too, and has a row for each
    scope     text collate "C" not null, -- the scope that it waits for, or empty: it is in no line
    fair      text collate "C" not null, -- jobs of different keys take turns
    tenant    text collate "C" not null, -- of the job and its hold
    job       jsonb       not null,     -- its columns in river_job
    hold      text        not null,     -- the hold, a metered.new_hold
    charges   text        not null,     -- metered.new_charge[] of all its scopes
    trouble   text,                     -- why its last try failed
    passed    text collate "C",         -- the scope from whose line it came,
                                        -- since it fits there, or null
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

create index parked_jobs_drop on metered.parked_jobs (greatest(drop_at, retry_at))
    where drop_at is not null;

-- Jobs that are in no line until their next attempt, or because they are in trouble, and all that
-- River has.
create index parked_jobs_rest on metered.parked_jobs (greatest(not_before, retry_at))
    where scope = '';

create index parked_jobs_again on metered.parked_jobs (job_id) where not_before is not null;

-- Jobs that came from a line.
create index parked_jobs_passed on metered.parked_jobs (passed) where passed is not null;

-- Jobs in trouble.
create index parked_jobs_trouble on metered.parked_jobs (troubled_at) where trouble is not null;

-- The lines. A scope that no job waits for has none.
create table metered.parked_scopes (
    key      bigint      not null,      -- of the scope's lock
    wake_at  timestamptz not null,      -- when the line is to be looked at: -infinity
                                        -- (now), or infinity (when units are freed)
    next_at  timestamptz not null default 'infinity', -- the earliest time that the
                                                      -- present look has found
    waiting  bigint      not null,      -- jobs in the line
    again    boolean     not null default false, -- units were freed since the present look began
    turns    bigint[]    not null default '{0,0,0,0}', -- the last round that was
                                                       -- released, of each priority
    after    bigint[],                  -- where the present look goes on: priority, turn, job_id
    started  bigint      not null default 0, -- jobs of the line that started since counting began
    since    timestamptz,               -- when counting began: the line's
                                        -- rate is of an hour or two at most
    trouble  text,                      -- why the last look failed
    scope    text collate "C" primary key -- the scope
) with (fillfactor = 70);

create index parked_scopes_wake on metered.parked_scopes (wake_at);
