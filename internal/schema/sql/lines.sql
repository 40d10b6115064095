-- Which lines are looked at, by which call, and when. See releases.sql for a look at one.

-- Lines to look at: those of only_scopes, or else all that are marked or whose time has come. Jobs
-- whose next attempt or try may begin join their lines first, at most 64: then a null says that
-- more may be due. If the lock of such a scope is not free, the scope is returned too.
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
          and (only_scopes is null
              or ((x.charges::metered.new_charge[])[1]).scope = any (only_scopes))
        order by greatest(x.not_before, x.retry_at) limit 10000
    loop
        charge := (parked.charges::metered.new_charge[])[1];
        continue when charge.scope = any (locked);
        if metered._try_lock(charge.key) then
            select x.* into parked from metered.parked_jobs x
            where x.job_id = parked.job_id and x.lane = parked.lane and x.scope = ''
            for update skip locked;
            continue when not found;
            joined := joined + 1;
            if metered._one_snapshot() then     -- nobody marked the line in which the job was not
                perform metered._refuse_stale(array[metered._last_entry(charge.scope)]);
            end if;
            parked.class := metered._class_of(charge);
            parked.turn := metered._turn(charge.scope, parked.priority, parked.fair);
            update metered.parked_jobs x
            set scope = charge.scope, amount = charge.amount, class = parked.class,
                turn = parked.turn
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
        return query select y.scope, y.key
            from metered.parked_scopes y
            where y.wake_at <= metered.clock() order by y.wake_at limit most;
    else
        return query select y.scope, y.key
            from metered.parked_scopes y
            where y.scope = any (only_scopes);
    end if;
end
$$;

-- The scopes whose present limits release_jobs needs (given). It takes the same locks.
create function metered.judged_scopes(only_scopes text[], wait_ms int, max_jobs int) returns text[]
language plpgsql volatile
as $$
declare
    line   record;
    judged text[] := '{}';
begin
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
                  and (j.priority, j.turn, j.job_id) > (coalesce(y.after[1], -1),
                      coalesce(y.after[2], -1), coalesce(y.after[3], -1))
                order by j.priority, j.turn, j.job_id limit max_jobs) f,
                lateral (select x.charges
                    from metered.parked_jobs x
                    where x.job_id = f.job_id
                        and x.lane <= f.lane) a, unnest(a.charges::metered.new_charge[]) c
            where pg_try_advisory_xact_lock(c.key));
    end loop;
    return array(select distinct x from unnest(judged) x);
end
$$;

-- Releases parked jobs that fit, at most max_jobs: of only_scopes, whose locks it waits for, or of
-- lines that are marked or whose time has come, if their locks are free. A row is released (the
-- caller inserts job), busy (the scope's lock was not free), trouble (why the line cannot be looked
-- at), or more (call again).
--
-- Jobs count with their own limits, or with those of given, text by scope. Jobs and lines with a
-- scope that given lacks are left for later.
create function metered.release_jobs(only_scopes text[], given jsonb, wait_ms int, max_jobs int,
    ahead interval, origin metered.origin, channel text)
returns table (status text, job jsonb, scope text)
language plpgsql volatile
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
            update metered.parked_scopes y
            set wake_at = soon, after = null, trouble = failed
            where y.scope = line.scope;
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
            jobs := metered._release_line(line.scope, given, left_, ahead, wait_ms, origin, channel,
                false);
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
                jobs := metered._release_line(line.scope, given, left_, ahead, wait_ms, origin,
                    channel, true);
            exception
                when serialization_failure or deadlock_detected or lock_not_available then
                    raise;
                when others then
                    failed := sqlerrm;
                    soon := metered.clock() + interval '10 seconds';
                    update metered.parked_scopes y
                    set wake_at = soon, after = null, trouble = failed
                    where y.scope = line.scope;
                    continue;
            end;
        end if;
        status := 'released';
        foreach job in array jobs loop
            left_ := left_ - 1;
            return next;
        end loop;
        more := more or exists (select from metered.parked_scopes y
            where y.scope = line.scope and y.wake_at <= metered.clock());
    end loop;
    more := more or only_scopes is null and exists (    -- a job has joined another line
        select from metered.parked_scopes y
        where y.wake_at = '-infinity' and y.scope <> all (busy));
    if more then
        status := 'more'; job := null; scope := null;
        return next;
    end if;
end
$$;

-- Microseconds until a line is to be looked at or a parked job to be dropped, 0 if one is due, or
-- null if no time is known.
create function metered.next_release() returns bigint
language plpgsql stable
as $$
declare
    next timestamptz := least(
        (select y.wake_at from metered.parked_scopes y order by y.wake_at limit 1),
        (select greatest(j.not_before, j.retry_at)
            from metered.parked_jobs j where j.scope = ''
            order by greatest(j.not_before, j.retry_at) limit 1),
        (select greatest(j.drop_at, j.retry_at)
            from metered.parked_jobs j where j.drop_at is not null
            order by greatest(j.drop_at, j.retry_at) limit 1));
begin
    return case when next < 'infinity'
        then greatest(0, case when next > '-infinity'
                then extract(epoch from next - metered.clock()) * 1000000 else 0 end)::bigint end;
end
$$;
