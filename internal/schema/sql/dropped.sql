-- Parked jobs that are not released: they are in trouble, they are dropped, or somebody takes them
-- out of their lines.

-- Notes why the last try of a parked job failed, and reports whether it is parked. It leaves its
-- lines as they are looked at. It is tried again after 10 seconds, then after as long as the
-- trouble has lasted, an hour at most.
create function metered._trouble_job(of_job bigint, reason text) returns boolean
language plpgsql volatile
as $$
declare
    clk timestamptz := metered.clock();
begin
    update metered.parked_jobs j
    set trouble = left(reason, 1000), troubled_at = coalesce(j.troubled_at, clk),
        retry_at = clk + least(greatest(clk - j.troubled_at, interval '10 seconds'),
            interval '1 hour')
    where j.job_id = of_job;
    return found;
end
$$;

-- Puts parked jobs in trouble that the caller could not insert or drop, each for the reason of the
-- same number. Returns how many there were.
create function metered.trouble_jobs(jobs bigint[], reasons text[]) returns int
language plpgsql volatile
as $$
declare
    troubled int := 0;
begin
    perform metered._require(cardinality(jobs) = cardinality(reasons), 'reasons');
    for i in 1..cardinality(jobs) loop
        troubled := troubled + metered._trouble_job(jobs[i], reasons[i])::int;
    end loop;
    return troubled;
end
$$;

-- Drops parked jobs whose time to wait is over, at most max_rows, as far as their lines are not
-- locked. Returns them.
create function metered.drop_parked(max_rows int) returns setof jsonb
language plpgsql volatile
as $$
declare
    parked  record;
    dropped int := 0;
begin
    perform metered._require(max_rows between 1 and 1000, 'max_rows');
    for parked in
        select x.job_id, l.scopes, l.keys from metered.parked_jobs x, lateral (
            select array_agg(z.scope order by z.lane) as scopes,
                array_agg(y.key order by y.key) filter (where z.scope <> '') as keys
            from metered.parked_jobs z
            left join metered.parked_scopes y on y.scope = z.scope
            where z.job_id = x.job_id) l
        where x.drop_at is not null
            and greatest(x.drop_at, x.retry_at) <= metered.clock()
            and x.lane = 0
        order by greatest(x.drop_at, x.retry_at) limit 10000
    loop
        continue when array_position(parked.keys, null) is not null
            or not metered._try_each(coalesce(parked.keys, '{}'));
        continue when parked.scopes is distinct from array(select z.scope from (
            select x.scope, x.lane
            from metered.parked_jobs x
            where x.job_id = parked.job_id for update skip locked) z order by z.lane);
        return next metered._leave_line(parked.job_id);
        dropped := dropped + 1;
        exit when dropped = max_rows;
    end loop;
end
$$;

-- Takes a parked job out of its line for good, or changes its priority, and returns it. null: it is
-- not parked. A job in trouble that gets a priority is tried again now.
create function metered.change_parked(of_job bigint, of_priority int, wait_ms int) returns jsonb
language plpgsql volatile
as $$
declare
    parked metered.parked_jobs;
    was    text[];
    now    timestamptz;
begin
    perform metered._require(coalesce(of_priority between 1 and 4, true), 'of_priority');
    was := array(select x.scope from metered.parked_jobs x where x.job_id = of_job order by x.lane);
    if was = '{}' then
        if metered._one_snapshot() then     -- it may have been parked since
            begin
                insert into metered.parked_jobs (job_id, turn, amount, class, parked_at, priority,
                    scope, fair, tenant, job, hold, charges)
                values (of_job, 0, 0, 0, 'epoch', 0, '', '', '', '{}', '', '')
                on conflict do nothing;
                {take back};
            end;
        end if;
        return null;
    end if;
    perform metered._lock_keys(array(select y.key
            from metered.parked_scopes y where y.scope = any (was) order by 1), wait_ms);
    perform from metered.parked_jobs x where x.job_id = of_job order by x.lane for update;
    if not found then
        return null;
    elsif was <> array(select x.scope
            from metered.parked_jobs x where x.job_id = of_job order by x.lane) then
        raise exception 'could not serialize access: the job waits for another scope now'
            using errcode = '40001';
    elsif of_priority is null then
        return metered._leave_line(of_job);
    end if;
    for parked in select x.*
        from metered.parked_jobs x
        where x.job_id = of_job and x.priority <> of_priority order by x.lane loop
        parked.turn := metered._turn(parked.scope, of_priority, parked.fair);
        parked.job := parked.job || jsonb_build_object('priority', of_priority);
        update metered.parked_jobs x
        set priority = of_priority, turn = parked.turn, job = parked.job
        where x.job_id = of_job and x.lane = parked.lane;
    end loop;
    now := metered.clock();
    update metered.parked_jobs x
    set trouble = null, troubled_at = null, retry_at = now
    where x.job_id = of_job and x.retry_at is not null;
    if found then
        perform metered._wake_releasers();
    end if;
    select x.* into parked from metered.parked_jobs x where x.job_id = of_job and x.lane = 0;
    return metered._parked_json(parked);
end
$$;
