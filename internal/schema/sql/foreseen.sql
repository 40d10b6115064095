-- What becomes of a wallet that nobody touches for long. Most lots that its plans bring are over by
-- then, and nobody drew of them. _foreseen looks at ends and units alone, and says what becomes of
-- the lots that the wallet has, which others are left, and how many periods are over. idle.sql
-- writes that. So a call on an idle wallet writes a few entries, however long nobody called.
-- Periods may be months, and clocks may be set.

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
    next     metered.idle_units[],  -- of each plan, from the one on whose last lot
                                    -- began first. Without begins, no lot follows
    skipped  int[],                 -- periods whose units are over
    first_at timestamptz[],         -- when the first of these began
    over     timestamptz);          -- when the last one of all was over

-- Whether more periods of plans, and ends of units that go on again and again, are due in a wallet
-- than one step writes: not where a lot would have more units than one may have. Of many lots each
-- has that many on average, since it takes as long to foresee one. Those that are foreseen together
-- (_foreseen_all) are few.
create function metered._is_idle(lots metered.lots[], until timestamptz) returns boolean
language plpgsql stable
as $$
begin
    return (select coalesce(sum(x.due) > metered._events_per_step()
                * case when cardinality(lots) < 200 then 1 else cardinality(lots) end
            and max(x.due * x.units) < 9007199254740992, false)
        from (select (y.plan).renew_amount as units,
                  extract(epoch from until
                      - y.starts_at) / extract(epoch from ((y.plan).renews).every) + 1 as due
              from unnest(lots) y
              where y.pending > 0
                  and y.starts_at <= until
                  and ((y.plan).renews).every is not null
              union all
              select 0, 1 + least(nullif((y.plan).roll_again, -1),
                  extract(epoch from until - y.expires_at)
                      / extract(epoch from coalesce(((y.plan).roll_to).every, (y.plan).roll_for)))
              from unnest(lots) y
              where y.rest + y.kept > 0
                  and y.roll_cap is not null
                  and y.expires_at <= until
                  and (y.plan).roll_again <> 0
                  and y.roll_end < 'infinity') x)
        and (cardinality(lots) < 200 or 200 > (select count(*) from unnest(lots) y
            where y.pending > 0 or (y.plan).roll_shared));
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
    select every.zone is null
        or extract(year from every.every) + extract(month from every.every) = 0
$$;

-- How units repeat themselves as long as no clock is set: others take their place (s), or they go
-- on for ever (p), or null: they do not.
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
    select ((extract(epoch from until) - extract(epoch from since)) * 1000000)::bigint
        * interval '1 microsecond'
$$;

-- Whether a state repeats an earlier one, but for its dates: then it does so again, up to the next
-- event that does not repeat itself, which is the first result. The second one is the last date
-- that a calendar made. Null: it does not.
create function metered._recurs(state metered.idle_state, was metered.idle_state,
    plans metered.lot_plan[])
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
            or (how = 's' and now.begins <> old.begins + later)
            or (how is distinct from 's' and now.nth <> old.nth) then
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
create function metered._foreseen_later(state metered.idle_state, was metered.idle_state,
    times bigint, plans metered.lot_plan[]) returns metered.idle_state
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
    state.due := least((select min(x.ends)
            from unnest(state.live) x), (select min(x.begins) from unnest(state.next) x));
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
        units := case when now.roll_cap is null then 0
            else least(now.units, now.roll_cap - taken) end;
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
            begins := case when of_period.every is not null
                then (metered._period_at(of_period, at))[2] end;
        end if;
        if now.nth > 0 then
            now.ends := begins;
            now.roll_end := case when now.roll_cap is not null
                then metered._roll_end(begins, plan, plan.roll_for) end;
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

-- What becomes of the lots of a wallet until a time, and of those that its plans bring, if nobody
-- touches them. Where a state repeats itself, as many repetitions as there is time for are one
-- step.
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
        least(min((y.units).ends) filter (where not y.begins),
            min((y.units).begins) filter (where y.begins)),
        bool_or(((y.plan).renews).every is not null and metered._by_days((y.plan).renews)
            or (y.plan).roll_again = -1)
    into state.live, state.next, state.due, repeats
    from (select x.plan, x.age[1] as born, row_number() over (order by x.age) as rank,
              x.pending > 0 and x.starts_at <= until as begins,
              row(x.ordinality, 0, x.age[1], row_number() over (order by x.age),
                  case when x.pending > 0 then x.starts_at end,
                  x.expires_at, '{}', '{}', x.pending + x.rest + x.kept, x.held, x.roll_cap,
                  x.roll_end, (x.plan).roll_again,
                  case when (x.plan).roll_shared then x.category end,
                  x.origin = 'r')::metered.idle_units as units
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
            changes := coalesce(changes,
                metered._clock_changes(lots, was.at, greatest(until, span[2])));
            at := least(until, span[1], (select min(x)
                    from unnest(changes) x where x > was.at - interval '48:00')
                - metered._hours_between(state.at, span[2]));
            times := greatest(0,
                div(extract(epoch from at) - extract(epoch from state.at) - 0.000001,
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

-- The same for all lots of a wallet. Only those that share a cap, and those that begin, whose order
-- is that of their beginnings, are foreseen together. Nothing that happens to another lot depends
-- on these, or changes them, so it is foreseen apart: many lots take as long as one does, each.
create function metered._foreseen_all(lots metered.lots[], until timestamptz)
returns metered.idle_state
language plpgsql stable
as $$
declare
    together int[] := array(select x.ordinality from unnest(lots) with ordinality x
        where x.pending > 0 or (x.plan).roll_shared order by x.ordinality);
    ranks    bigint[] := array(select y.rank
        from (select x.ordinality, row_number() over (order by x.age) as rank
              from unnest(lots) with ordinality x) y order by y.ordinality);
    state    metered.idle_state;
    was      metered.idle_state := metered._foreseen(
        array(select lots[n] from unnest(together) n), until);
    units    metered.idle_units;
begin
    state.over := was.over;
    state.skipped := array_fill(0, array[cardinality(lots)]);
    state.first_at := array_fill(null::timestamptz, array[cardinality(lots)]);
    for n in 1..cardinality(together) loop
        state.skipped[together[n]] := was.skipped[n];
        state.first_at[together[n]] := was.first_at[n];
    end loop;
    state.next := '{}';
    foreach units in array was.next loop
        units.place := together[units.place];
        state.next := state.next || units;
    end loop;
    state.said := '{}';
    foreach units in array was.said loop
        units.place := together[units.place];
        units.rank := case when units.rank > cardinality(together)
            then cardinality(lots) + units.rank else ranks[units.place] end;
        state.said := state.said || units;
    end loop;
    for pos in 1..cardinality(lots) loop
        continue when lots[pos].pending > 0 or (lots[pos].plan).roll_shared;
        foreach units in array (metered._foreseen(array[lots[pos]], until)).said loop
            units.place := pos;
            units.rank := ranks[pos];
            state.said := state.said || units;
        end loop;
    end loop;
    return state;
end
$$;
