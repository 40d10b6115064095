-- The order of parked jobs: which of a line may fit at all, and which line comes before another.

-- Asks for the smallest job of each class of a line (jobs with equal limits and the same use): if
-- it does not fit, none of its class does. closed has the amounts that were refused, by class, and
-- next is when the first of these may fit. whole: no class fits.
create function metered._closed_classes(of_scope text, given jsonb, ahead interval, clk timestamptz,
    out closed jsonb, out whole boolean, out next timestamptz)
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
        where j.scope = of_scope and j.class > coalesce(last_class, -9223372036854775808)
        order by j.class, j.amount limit 1;
        whole := not found;
        exit when whole;
        last_class := parked.class;
        charge := (metered._under_limits(metered._charge_of(of_scope,
                    parked.charges::metered.new_charge[]), given))[1];
        refusing := metered._refusing(array[charge],
            (metered.check_charge(array[charge], ahead)).refused, of_scope, true);
        -- it fits, or the scope is absent or closed: place will say
        if refusing.scope is null then
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
        if exists (select from metered.parked_jobs x
                where x.scope = of_scope and x.priority = p and x.fair < of_fair)
            or exists (select from metered.parked_jobs x
                where x.scope = of_scope and x.priority = p and x.fair > of_fair)
        then
            return true;
        end if;
    end loop;
    return false;
end
$$;

-- The charge of the scope whose line a job is to join before it starts, since others wait there:
-- else a tenant whose own line frees first would pass them. From a line that others share, too, a
-- job goes to those behind it alone, and never back to where it came from.
create function metered._line_before(job metered.parked_jobs, charges metered.new_charge[])
    returns metered.new_charge
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
            elsif charge.scope is distinct from job.passed
                and metered._others_wait(charge.scope, job.priority, job.fair)
                and (behind or not metered._others_wait(job.scope, 4, job.fair))
            then
                return charge;
            end if;
        end loop;
    end if;
    return null;
end
$$;

-- Has a job join the line of a charge: it is refused there, or (passing) it fits where it is, and
-- others wait there.
create function metered._change_lines(parked metered.parked_jobs, charge metered.new_charge,
    wake timestamptz, passing boolean) returns void
language plpgsql volatile
as $$
begin
    update metered.parked_jobs j
    set scope = charge.scope, amount = charge.amount, class = metered._class_of(charge),
        turn = metered._turn(charge.scope, parked.priority, parked.fair),
        passed = case when passing then parked.scope end,
        passed_amount = case when passing then parked.amount end
    where j.job_id = parked.job_id and j.lane = parked.lane;
    perform metered._join_line(charge.scope, charge.key, wake),
        metered._look_again(nullif(parked.passed, charge.scope));
end
$$;
