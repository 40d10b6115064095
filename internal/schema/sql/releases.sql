-- Parked jobs whose units are free are released: they become jobs of River. See dropped.sql for
-- those that are not.

-- Charges with the present limits of their scopes: given has these as text by scope. A charge keeps
-- its own if given is null, as a whole or for the scope. The result is null if given lacks a scope,
-- or has an object for it: why its limits are not known (trouble).
create function metered._under_limits(charges metered.new_charge[], given jsonb)
    returns metered.new_charge[]
language plpgsql immutable
as $$
begin
    if given is not null then
        for i in 1..cardinality(charges) loop
            if not given ? charges[i].scope
                or jsonb_typeof(given -> charges[i].scope) = 'object' then
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
    select format('limits of "%s": %s', x, given -> x ->> 'trouble')
    from unnest(scopes) x
    where jsonb_typeof(given -> x) = 'object' limit 1
$$;

-- _start_job, but started is null after an error, such as of a window that reaches purged entries.
-- why is the error.
create function metered._try_start_job(this_hold metered.new_hold, charges metered.new_charge[],
    ahead interval, wait_ms int, origin metered.origin, channel text,
    out started boolean, out refused jsonb, out due timestamptz, out why text)
language plpgsql volatile
as $$
begin
    select p.started, p.refused, p.due into started, refused, due
    from metered._start_job(this_hold, charges, ahead, wait_ms, origin, channel) p;
exception
    when serialization_failure or deadlock_detected or lock_not_available then
        raise;
    when others then
        started := null;
        why := sqlerrm;
end
$$;

-- For a job in two lines: its row in the other one, the charges of its first choice, which is tried
-- first, and the keys that starting it locks beside those of r's charges.
create function metered._other_lane(job metered.parked_jobs, given jsonb,
    out other metered.parked_jobs, out first metered.new_charge[], out keys bigint[])
language plpgsql volatile
as $$
begin
    keys := '{}';
    if not job.job ? 'burst' then
        return;
    end if;
    select x.* into other
    from metered.parked_jobs x
    where x.job_id = job.job_id and x.lane <> job.lane;
    if other.job_id is null then
        return;
    end if;
    keys := array(select y.key from metered.parked_scopes y where y.scope = other.scope);
    if job.lane = 1 then
        first := metered._under_limits(other.charges::metered.new_charge[], given);
        keys := case when first is not null
            then keys || array(select c.key from unnest(first) c) end;
    end if;
end
$$;

-- Starts a job of a line, or says why not. outcome is started, passes (it is to join the line of
-- onward), refused, failed (in a careful look) or limits (both say why), unknown (given lacks a
-- scope), or busy (another has one of its locks, or moves it). other is its row in another line.
create function metered._release_job(job metered.parked_jobs, given jsonb, ahead interval,
    wait_ms int, origin metered.origin, channel text, careful boolean,
    out outcome text, out charges metered.new_charge[], out refused jsonb, out due timestamptz,
    out why text, out other metered.parked_jobs, out onward metered.new_charge)
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
            select c.scope
            from unnest(job.charges::metered.new_charge[]
                || coalesce(other.charges, '{}')::metered.new_charge[]) c), given);
        outcome := case when why is null then 'unknown' else 'limits' end;
        return;
    elsif not metered._try_each(array(select x.key
                from unnest(charges) x union select unnest(lane.keys) order by 1)) then
        outcome := 'busy';
        return;
    elsif other.job_id is not null then    -- another releaser may have moved it since, or do so now
        perform from metered.parked_jobs x
        where x.job_id = job.job_id and x.lane = other.lane and x.scope = other.scope
        for update skip locked;
        if not found then
            outcome := 'busy';
            return;
        end if;
    end if;
    if lane.first is not null then
        started := metered._try_start_job(other.hold::metered.new_hold, lane.first, ahead, wait_ms,
            origin, channel);
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
        select own.amount + coalesce(sum(x.passed_amount), 0) into own.amount
        from metered.parked_jobs x
        where x.passed = job.scope;
        refused := (metered.check_charge(array[own], ahead)).refused;
        charges := array[own];
        outcome := case when refused is null then 'passes' else 'refused' end;
        -- jobs that came from here will have left their line, or not
        due := metered.clock() + interval '1 minute';
        return;
    end if;
    if careful then
        started := metered._try_start_job(job.hold::metered.new_hold, charges, ahead, wait_ms,
            origin, channel);
        why := started.why;
    else
        started := metered._start_job(job.hold::metered.new_hold, charges, ahead, wait_ms, origin,
            channel);
    end if;
    refused := started.refused; due := started.due;
    outcome := case when started.started is null then 'failed' when started.started then 'started'
        else 'refused' end;
end
$$;

-- Takes jobs that fit out of the line of one scope, which is locked, and starts them, at most room
-- jobs. A job that another scope refuses moves to the line of that scope. If a lock of a job's
-- other scopes is not free, the job stays, and the line is looked at again soon. A job that could
-- not be inserted leaves the line until it is tried again.
--
-- A look goes through at most 500 jobs, and the next one goes on after these. A careful look tries
-- each job, and passes jobs that fail.
create function metered._release_line(of_scope text, given jsonb, room int, ahead interval,
    wait_ms int, origin metered.origin, channel text, careful boolean) returns jsonb[]
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
    update metered.parked_scopes y
    set waiting = line.waiting, turns = line.turns, next_at = line.next_at, trouble = line.trouble,
        started = line.started, since = line.since,
        after = case when whole then null else line.after end,
        wake_at = case when not whole or y.again then '-infinity' else line.wake_at end
    where y.scope = of_scope;
    return jobs;
end
$$;
