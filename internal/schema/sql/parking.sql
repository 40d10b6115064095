-- Parking a job: what a job to be parked has to say, and who decides that it waits.

-- A parked job as callers see it.
create function metered._parked_json(job metered.parked_jobs) returns jsonb
language sql stable
as $$
    select jsonb_build_object('job_id', job.job_id, 'queue', job.job ->> 'queue', 'kind',
        job.job ->> 'kind', 'key', coalesce(job.job -> 'metadata' ->> 'metered:key', ''),
        'tenant', job.tenant, 'fair', job.fair, 'priority', job.priority, 'scope', job.scope,
        'amount', job.amount, 'parked_at', job.parked_at, 'drop_at', job.drop_at,
        'args', job.job -> 'args', 'not_before', job.not_before, 'hold',
        job.job -> 'metadata' ->> 'metered:hold', 'trouble', job.trouble)
$$;

-- Whether a job is one that River takes, and that the releaser can read: SQL would cast more than
-- it does.
create function metered._is_job(job jsonb) returns boolean
language sql immutable
as $$
    select jsonb_typeof(job) = 'object'
        and jsonb_typeof(job -> 'args') is not null
        and jsonb_typeof(job -> 'metadata') = 'object'
        and jsonb_typeof(job -> 'kind') = 'string'
        and jsonb_typeof(job -> 'queue') = 'string'
        and jsonb_typeof(job -> 'job_id') = 'number'
        and jsonb_typeof(job -> 'priority') = 'number'
        and jsonb_typeof(job -> 'max_attempts') = 'number'
        and not jsonb_path_exists(job -> 'tags', 'strict $[*] ? (@.type() <> "string")', '{}', true)
        and char_length(job ->> 'kind') between 1 and 127
        and char_length(job ->> 'queue') between 1 and 64
        and (job ->> 'priority')::int between 1 and 4
        and (job ->> 'max_attempts')::int between 1 and 32767
        and (job ->> 'job_id')::bigint > 0
        and jsonb_typeof(job -> 'tags') = 'array'
        and octet_length(coalesce(job ->> 'fair', '')) <= 255
        and job -> 'metadata' ->> 'metered:hold' ~ ('^job/' || (job ->> 'job_id')
            || '/[0-9a-f]{16}$')
        and octet_length(job ->> 'charges') <= 65536 and octet_length(job ->> 'hold') <= 131072
        and coalesce((job ->> 'most')::bigint > 0, true)
        and coalesce((job ->> 'wait_us')::bigint between 1 and 315576000000000, true)
        and coalesce((job ->> 'rest_us')::bigint between 0 and 315576000000000, true)
        and coalesce(octet_length(job -> 'burst' ->> 'charges') <= 65536
            and octet_length(job -> 'burst' ->> 'hold') <= 131072, not job ? 'burst')
$$;

-- The keys of the scopes of a job's charges, of both choices. Conditions are no statements, which
-- cost more: a job that fits is enqueued by few.
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
    return case when job ? 'burst'
        then keys || metered._keys_of_job((job || (job -> 'burst')) - 'burst') else keys end;
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

-- Holds the units of a job that starts, and charges the others: as place, also for a job that holds
-- nothing. Then due is null.
create function metered._start_job(hold metered.new_hold, charges metered.new_charge[],
    ahead interval, wait_ms int, origin metered.origin, channel text,
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

-- Enqueues jobs whose units are held until they end, all or none. status is started (the hold is
-- placed, and the caller inserts job), parked (until the units fit), refused (they never fit), or
-- full (its line has most jobs). With raising, the last two are SQLSTATE MT001 and MT013. A job
-- that fits is parked too if others wait for one of its scopes.
--
-- Each element of parking has River's columns of the job, with its job_id; the hold and the charges
-- of place, as text; the key of its turn (fair), the most jobs in its line (most), how long it
-- waits (wait_us), and whether its limits may be raised (hopeful). burst is another hold and its
-- charges, for a job whose own do not fit: it starts with the first that fits, and waits in the
-- lines of both.
create function metered.park_jobs(parking jsonb, ahead interval, wait_ms int, origin metered.origin,
    channel text, raising boolean)
returns table (nth int, status text, job jsonb, refused jsonb, scope text, retry_us bigint)
language plpgsql volatile
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
    {refuse: when = (jsonb_typeof(parking) = 'array'
            and jsonb_array_length(parking) between 1 and 1000) is not true, what = parking};
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
            busy := (select y.scope
                from unnest(cs) x, lateral (select z.scope
                    from metered.parked_scopes z where z.scope = x.scope) y
                limit 1);
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
                    perform metered._refuse_stale(array(select metered._last_entry(x.scope)
                            from unnest(cs) x));
                end if;
            end if;
            refused := coalesce(refused, no);
            refusing := metered._refusing(cs, no, null, coalesce((parked ->> 'hopeful')::boolean, false));
            clk := metered.clock();
            if no is null or refusing.scope is not null then
                charge := (metered._charge_of(coalesce(refusing.scope, busy), cs))[1];
                waits := waits || row((parked ->> 'job_id')::bigint, 0, charge.amount,
                    metered._class_of(charge), clk,
                    clk + (parked ->> 'wait_us')::bigint * interval '1 microsecond', null, null,
                    null, null, (parked ->> 'priority')::int, cardinality(waits), charge.scope,
                    coalesce(parked ->> 'fair', ''), hold.tenant,
                    parked - '{hold,charges,fair,most,wait_us,hopeful,burst}'::text[],
                    metered._hold_text(hold), parked ->> 'charges', null,
                    null)::metered.parked_jobs;
                line_keys := line_keys || charge.key;
                wakes := wakes || case when no is null then '-infinity'
                    else coalesce(clk + refusing.retry, 'infinity') end;
                if scope is null then
                    scope := charge.scope;
                    retry_us := case when no is not null
                        then extract(epoch from refusing.retry) * 1000000 end;
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
                raise exception 'too many jobs wait'
                    using errcode = 'MT013',
                    detail = jsonb_build_object('scope', scope, 'most', most);
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

-- Parks jobs until their next attempt, each for rest_us, whose hold the caller releases in this
-- transaction. They are in no line until then. Each element is as in park_jobs, and its hold is a
-- new one.
create function metered.rest_jobs(resting jsonb) returns setof bigint
language plpgsql volatile
as $$
declare
    parked jsonb;
    held   metered.new_hold;
    clk    timestamptz := metered.clock();
    due    timestamptz;
    keys   bigint[];
begin
    perform metered._require(jsonb_typeof(resting) = 'array'
        and jsonb_array_length(resting) between 1 and 1000, 'resting');
    for parked in select x from jsonb_array_elements(resting) x loop
        keys := metered._keys_of_job(parked);
        due := clk + (parked ->> 'rest_us')::bigint * interval '1 microsecond';
        for of_lane in 0..1 loop
            held := metered._hold_of_job(parked);
            insert into metered.parked_jobs (job_id, turn, amount, class, parked_at, not_before,
                drop_at, priority, lane, scope, fair, tenant, job, hold, charges)
            values ((parked ->> 'job_id')::bigint, 0, 0, 0, clk, due,
                due + (parked ->> 'wait_us')::bigint * interval '1 microsecond',
                (parked ->> 'priority')::int,
                of_lane, '', coalesce(parked ->> 'fair', ''), held.tenant,
                (parked - '{hold,charges,fair,wait_us,rest_us,burst}'::text[])
                || case when of_lane = 1 or parked ? 'burst' then '{"burst": true}'
                    else '{}' end::jsonb, metered._hold_text(held), parked ->> 'charges');
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
    return jsonb_build_object('refused',
        (metered.check_charge(of_charges::metered.new_charge[], ahead)).refused,
        'charges', (select jsonb_agg(jsonb_build_object('scope', c.scope, 'amount', c.amount,
                    'limits', (
            select jsonb_agg(jsonb_build_object('max', l.max, 'window_us',
                    extract(epoch from l.win) * 1000000)) from unnest(c.limits) l)))
            from unnest(of_charges::metered.new_charge[]) c));
end
$$;

-- A parked job, with its place in its line (no further than 10,000; none while it is in no line),
-- when the line is looked at, and the answers of check_charge for its charges, and for those of its
-- second choice. null: it is not parked.
create function metered.explain_parked(of_job bigint, ahead interval) returns jsonb
language plpgsql stable
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
    return metered._parked_json(parked) || metered._explain_charges(parked.charges, ahead)
        || jsonb_build_object(
        'waiting', line.waiting, 'wake_at',
        nullif(greatest(case when parked.scope = '' then parked.retry_at else line.wake_at end,
                '0001-01-01Z'), 'infinity'),
        'trouble', coalesce(parked.trouble, line.trouble),
        'now', metered.clock(), 'burst', (select metered._explain_charges(x.charges, ahead)
            from metered.parked_jobs x where x.job_id = of_job and x.lane = 1),
        'position', case when parked.scope <> '' then 1 end + (select count(*)
            from (select from metered.parked_jobs x
            where x.scope = parked.scope
                and (x.priority, x.turn, x.job_id) < (parked.priority, parked.turn, parked.job_id)
            order by x.priority desc, x.turn desc, x.job_id desc limit 9999) y));
end
$$;
