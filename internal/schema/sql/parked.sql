-- Jobs that wait for budget. A job whose hold does not fit is parked: it is a row here, and River
-- has no row of it, or between attempts one that no worker takes. It waits in the line of the first
-- scope that refused it. A transaction that frees units of a scope marks the scope's line
-- (_mark_freed). A releaser then places the holds of jobs that fit, in order, and returns these
-- jobs. The statement around it inserts them into river_job with its caller's privileges.

-- The channel on which releasers hear that a line is marked.
create function metered._parked_channel() returns text
language sql immutable
as $$
    select left(substr('metered/parked/metered', 16), 56) || '_parked'
$$;

-- Wakes the releasers, except in a statement from another node of Citus, which may be prepared:
-- then NOTIFY is forbidden.
create function metered._wake_releasers() returns void
language plpgsql volatile
as $$
begin
    if not metered._sharded()
        or not starts_with(current_setting('application_name'), 'citus_internal') then
        perform pg_notify(metered._parked_channel(), '');
    end if;
end
$$;

-- Marks the line, if there is one, of a scope whose units were freed, and says whether it did.
-- Whoever appends an entry that can let a job in calls it: credits, refunds, releases, expiries,
-- clock repairs and scheduled lots can, and so can a capture, whose units leave a window sooner
-- than its hold would fall due (a trigger of the ledger, whose condition is parsed from text at
-- each insert, would cost each charge a tenth). At READ COMMITTED this sees each line, since jobs
-- are parked under the scope's lock. An older snapshot may miss a line: then an insert collides
-- with it, with 40001, and the block takes the insert back.
create function metered._mark_freed(of_scope text) returns boolean
language plpgsql volatile
as $$
begin
    if exists (select from metered.parked_scopes p
            where p.scope = of_scope and not (p.again and p.wake_at = '-infinity')) then
        update metered.parked_scopes p
        set wake_at = '-infinity', again = true
        where p.scope = of_scope;
        perform metered._wake_releasers();
        return true;
    elsif metered._one_snapshot()
        and not exists (select from metered.parked_scopes p where p.scope = of_scope) then
        begin
            insert into metered.parked_scopes (scope, key, wake_at, waiting)
            values (of_scope, 0, 'infinity', 0)
            on conflict do nothing;
            {take back};
        end;
    end if;
    return false;
end
$$;

-- The charge of a scope among those of a job.
create function metered._charge_of(of_scope text, charges metered.new_charge[])
    returns metered.new_charge[]
language sql immutable
as $$
    select array(select row(c.*)::metered.new_charge
        from unnest(charges) c where c.scope = of_scope)
$$;

-- The class of a charge: where one does not fit, none of its class does that is as large. Credit
-- for a use lets in those for this use alone. Sessions of other styles give the same class, and
-- _hold_text the same text.
create function metered._class_of(charge metered.new_charge) returns bigint
language sql immutable
set datestyle = 'ISO, MDY' set intervalstyle = postgres set timezone = 'UTC'
as $$
    select hashtextextended(row(charge.limits, charge.note ->> 'use', charge.must_exist)::text, 0)
$$;

-- The scope that refused, own or else the first, and how long from now it will refuse, or null if
-- nobody knows. scope is null if neither time nor credit ends the refusal: a scope is absent or
-- closed, or (unless hopeful) the job wants more units than the limit has.
create function metered._refusing(charges metered.new_charge[], refused jsonb, own text,
    hopeful boolean,
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
            refusal := jsonb_path_query_first(refused, '$[*] ? (@.limit == $n)',
                jsonb_build_object('n', nth_limit));
            nth_limit := nth_limit + 1;
            continue when refusal is null;
            if not hopeful
                and charge.amount > lim.max
                and lim.win is distinct from interval '0' then
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

-- The turn of a job that joins a line: one round after the last job of its key (fair), and after
-- the round that is being released. So a key with one job waits for at most one round, however many
-- jobs others have in the line.
create function metered._turn(of_scope text, of_priority int, of_fair text) returns bigint
language plpgsql volatile
as $$
begin
    return 1 + greatest(0,
        (select p.turns[of_priority] from metered.parked_scopes p where p.scope = of_scope),
        (select j.turn
            from metered.parked_jobs j
            where j.scope = of_scope and j.priority = of_priority and j.fair = of_fair
         order by j.turn desc limit 1));
end
$$;

-- When the next lot of a wallet begins, or infinity: no entry is written at that time. If one has
-- begun and is not written yet, it counts already, and the next is unknown: then a minute from now.
create function metered._lot_begins(of_scope text, clk timestamptz) returns timestamptz
language sql stable
as $$
    select coalesce((select case when y.starts_at > clk then y.starts_at
                else clk + interval '1 minute' end
        from metered.lots y
        where y.scope = of_scope and y.pending > 0 order by y.starts_at
        limit 1), 'infinity')
$$;

-- Counts a job in a line, and has releasers look at the line by wake, even if a look is under way
-- that has passed the job's place. The scope is locked. Releasers are woken if wake is earlier than
-- the line's time.
create function metered._join_line(of_scope text, of_key bigint, wake timestamptz) returns void
language plpgsql volatile
as $$
declare
    before timestamptz := (select p.wake_at from metered.parked_scopes p where p.scope = of_scope);
begin
    wake := least(wake, metered._lot_begins(of_scope, metered.clock()));
    insert into metered.parked_scopes as p (scope, key, wake_at, again, waiting, since)
    values (of_scope, of_key, wake, wake = '-infinity', 1, metered.clock())
    on conflict (scope) do update
        set waiting = p.waiting + 1, wake_at = least(p.wake_at, excluded.wake_at),
        next_at = least(p.next_at, excluded.wake_at), again = p.again or excluded.again;
    if wake < coalesce(before, 'infinity') then
        perform metered._wake_releasers();
    end if;
end
$$;

-- Has releasers look at a line again, if there is one: a job that came from it leaves the line to
-- which it went.
create function metered._look_again(of_scope text) returns void
language plpgsql volatile
as $$
begin
    if of_scope is not null then
        update metered.parked_scopes y
        set wake_at = '-infinity', again = true
        where y.scope = of_scope and not (y.again and y.wake_at = '-infinity');
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
