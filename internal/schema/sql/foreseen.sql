-- What becomes of a wallet that nobody touches for long. Most lots that its plans bring are over by then, and
-- nobody drew of them. _foreseen looks at ends and units alone, and says what becomes of the lots that the
-- wallet has, which others are left, and how many periods are over. idle.sql writes that. So a call on an idle wallet
-- writes a few entries, however long nobody called. Periods may be months, and clocks may be set.

-- Units of one lot in _foreseen, and of those in which they go on, of which the last one counts.
create type metered.idle_units as (
    place     int,          -- of the lot, or of the one whose plan brings it
    nth       int,          -- so many periods later than that
    born      bigint,       -- the age of the units, in microseconds
    rank      bigint,       -- the order of those of one age
    begins    timestamptz,  -- when the lot begins, or null: it has begun
    ends      timestamptz,  -- when the last one ends
    went      bigint[],     -- how many of them went on, each time or the last times
    went_at   timestamptz[],
    units     bigint,
    held      bigint,
    roll_cap  bigint,
    roll_end  timestamptz,
    roll_again int,
    shares    text,         -- a cap with the units of this category, or null
    rolled    boolean);     -- such a cap counts them

-- What is foreseen at a time, which has passed. The arrays but live and said are by places of lots that have not begun.
create type metered.idle_state as (
    at       timestamptz,
    live     metered.idle_units[],  -- not over
    said     metered.idle_units[],  -- over, of the lots that the wallet had
    begins   timestamptz[],         -- when the next lot of its plan begins
    ranks    bigint[],              -- of the last one
    nths     int[],                 -- how many periods later it is: -1 for none yet
    skipped  int[],                 -- periods whose units are over
    first_at timestamptz[],         -- when the first of these began
    over     timestamptz);          -- when the last one of all was over

-- Whether more periods of plans are due in a wallet than one step writes: not where a lot would have more
-- units than one may have.
create function metered._is_idle(lots metered.lots[], until timestamptz) returns boolean
language plpgsql stable
as $$
begin
    return (select coalesce(sum(x.due) > metered._events_per_step()
            and max(x.due * x.units) < 9007199254740992, false)
        from (select (y.plan).renew_amount as units,
                  extract(epoch from until - y.starts_at) / extract(epoch from ((y.plan).renews).every) + 1 as due
              from unnest(lots) y
              where y.pending > 0 and y.starts_at <= until and ((y.plan).renews).every is not null) x)
        and cardinality(lots) < 200;
end
$$;

-- Units of a lot go on in another one at the time at, or lapse: then they are 0. taken are units that a
-- shared cap counts already.
create function metered._foreseen_on(u metered.idle_units, plan metered.lot_plan, at timestamptz, taken bigint)
returns metered.idle_units
language plpgsql stable
as $$
begin
    u.units := case when u.roll_cap is null then 0 else greatest(0, least(u.units, u.roll_cap - taken)) end;
    if u.units > 0 then
        if cardinality(u.went) >= metered._events_per_step() then
            u.went := '{}';
            u.went_at := '{}';
        end if;
        u.went := u.went || u.units;
        u.went_at := u.went_at || at;
        u.ends := u.roll_end;
        u.held := 0;
        u.rolled := true;
        if u.roll_again <> 0 then
            u.roll_end := metered._roll_end(u.ends, plan, plan.roll_for);
            u.roll_again := greatest(u.roll_again - 1, -1);
        else
            u.roll_cap := null;
        end if;
    end if;
    return u;
end
$$;

-- Whether a period is as long as any other, but where a clock is set.
create function metered._by_days(every metered.period) returns boolean
language sql immutable
as $$
    select every.zone is null or extract(year from every.every) + extract(month from every.every) = 0
$$;

-- How units repeat themselves as long as no clock is set: others take their place (s), or they go on for ever (p), or
-- null: they do not.
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

-- A state, but for its dates: it repeats itself where two marks are equal, up to the next event that does not repeat
-- itself, at still. ahead is the last date that counts.
create function metered._mark(state metered.idle_state, lots metered.lots[],
    out mark text, out still timestamptz, out ahead timestamptz)
language plpgsql stable
as $$
declare
    state_at numeric := extract(epoch from state.at);
begin
    select string_agg(case x.how
            when 's' then row(x.place, x.units, extract(epoch from x.begins) - state_at, x.roll_again,
                extract(epoch from x.ends) - state_at, extract(epoch from x.roll_end) - state_at)
            when 'p' then row(x.place, x.units, x.nth,
                extract(epoch from x.ends) - state_at, extract(epoch from x.roll_end) - state_at)
            else row(x.place, x.units, x.held, x.nth, x.ends) end::text, ';' order by x.born, x.rank),
        min(x.ends) filter (where x.how is null),
        max(greatest(x.ends, nullif(x.roll_end, 'infinity'))) filter (where x.ends < 'infinity')
    into mark, still, ahead
    from (select y.*, metered._repeats(y, lots[y.place].plan) as how from unnest(state.live) y) x;
    select concat_ws(';', mark, string_agg((extract(epoch from x.begins) - state_at)::text, ' '
            order by x.place) filter (where x.repeats)),
        least(still, min(x.begins) filter (where not x.repeats))
    into mark, still
    from (select y.begins, y.place,
              state.nths[y.place] >= 0 and metered._by_days((lots[y.place].plan).renews) as repeats
          from unnest(state.begins) with ordinality y(begins, place) where y.begins is not null) x;
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

-- A state so many times as much later as it is later than was, of which it has the mark.
create function metered._foreseen_later(state metered.idle_state, was metered.idle_state, times bigint,
    lots metered.lots[]) returns metered.idle_state
language plpgsql stable
as $$
declare
    micros bigint := (extract(epoch from state.at) - extract(epoch from was.at)) * 1000000 * times;
    later  interval := micros * interval '1 microsecond';
    how    text;
begin
    for n in 1..cardinality(state.live) loop
        how := metered._repeats(state.live[n], lots[state.live[n].place].plan);
        continue when how is null;
        if how = 'p' then
            state.live[n].went := array[state.live[n].units];
            state.live[n].went_at := state.live[n].went_at[cardinality(state.live[n].went_at):];
        end if;
        state.live[n].ends := state.live[n].ends + later;
        state.live[n].roll_end := state.live[n].roll_end + later;
        state.live[n].went_at := array(select x + later
            from unnest(state.live[n].went_at) with ordinality y(x, nth) order by y.nth);
        continue when how = 'p';
        state.live[n].begins := state.live[n].begins + later;
        state.live[n].born := state.live[n].born + micros;
        state.live[n].nth := state.live[n].nth + times
            * (state.nths[state.live[n].place] - was.nths[state.live[n].place]);
    end loop;
    for n in 1..cardinality(lots) loop
        continue when state.nths[n] = was.nths[n];
        state.begins[n] := state.begins[n] + later;
        state.nths[n] := state.nths[n] + times * (state.nths[n] - was.nths[n]);
        state.skipped[n] := state.skipped[n] + times * (state.skipped[n] - was.skipped[n]);
    end loop;
    state.at := state.at + later;
    if state.over > was.at then
        state.over := state.over + later;
    end if;
    return state;
end
$$;

-- All that ends in a state at a time, and then all that begins.
create function metered._foreseen_at(state metered.idle_state, lots metered.lots[], at timestamptz)
returns metered.idle_state
language plpgsql stable
as $$
declare
    live   metered.idle_units[];
    ending metered.idle_units[];
    now    metered.idle_units;
    next   metered.idle_units;
    lot    metered.lots;
    taken  bigint;
    place  int;
    count  bigint;
begin
    state.at := at;
    select array_agg(x order by x.born, x.rank) filter (where x.ends <= at),
        array_agg(x) filter (where x.ends > at)
    into ending, live from unnest(state.live) x;
    foreach now in array coalesce(ending, '{}') loop
        taken := 0;
        if now.shares is not null and now.roll_cap is not null then
            taken := (select coalesce(sum(x.units + x.held), 0) from unnest(live) x
                where x.rolled and x.shares = now.shares);
        end if;
        next := metered._foreseen_on(now, lots[now.place].plan, at, taken);
        if next.units > 0 then
            live := live || next;
        elsif now.nth = 0 then
            state.said := state.said || now;
        else
            state.skipped[now.place] := state.skipped[now.place] + 1;
            state.first_at[now.place] := coalesce(state.first_at[now.place], now.begins);
            state.over := at;
        end if;
    end loop;
    for place in
        select x.nth from unnest(state.begins) with ordinality x(due, nth) where x.due = at
        order by state.ranks[x.nth]
    loop
        lot := lots[place];
        count := coalesce(count, (select max(x) from unnest(state.ranks) x)) + 1;
        state.ranks[place] := count;
        state.nths[place] := state.nths[place] + 1;
        state.begins[place] := case when ((lot.plan).renews).every is not null
            then (metered._period_at((lot.plan).renews, at))[2] end;
        if state.nths[place] > 0 then
            lot.pending := (lot.plan).renew_amount;
            lot.expires_at := state.begins[place];
            lot.roll_end := case when lot.roll_cap is not null
                then metered._roll_end(lot.expires_at, lot.plan, (lot.plan).roll_for) end;
        end if;
        live := live || row(place, state.nths[place], extract(epoch from at) * 1000000, count, at,
            lot.expires_at, '{}', '{}', lot.pending, 0, lot.roll_cap, lot.roll_end,
            (lot.plan).roll_again, case when (lot.plan).roll_shared then lot.category end,
            false)::metered.idle_units;
    end loop;
    state.live := live;
    return state;
end
$$;

-- What becomes of the lots of a wallet until a time, and of those that its plans bring, if nobody touches them. Where a state
-- repeats itself, as many repetitions as there is time for are one step.
create function metered._foreseen(lots metered.lots[], until timestamptz) returns metered.idle_state
language plpgsql stable
as $$
declare
    state   metered.idle_state;
    was     metered.idle_state;     -- an earlier state, of which mark is the mark
    mark    text;
    seen    record;
    steps   int := 0;               -- since that
    most    int := 1;
    at      timestamptz;
    changes timestamptz[];
    times   bigint;
begin
    state.begins := array(select case when x.pending > 0 and x.starts_at <= until then x.starts_at end
        from unnest(lots) with ordinality x order by x.ordinality);
    state.ranks := array(select y.rank from (select x.ordinality as place, row_number() over (order by x.age) as rank
        from unnest(lots) with ordinality x) y order by y.place);
    state.nths := array_fill(-1, array[cardinality(lots)]);
    state.skipped := array_fill(0, array[cardinality(lots)]);
    state.first_at := array_fill(null::timestamptz, array[cardinality(lots)]);
    select array_agg(row(x.ordinality, 0, x.age[1], state.ranks[x.ordinality],
            case when x.pending > 0 then x.starts_at end, x.expires_at, '{}', '{}',
            x.pending + x.rest + x.kept, x.held, x.roll_cap, x.roll_end, (x.plan).roll_again,
            case when (x.plan).roll_shared then x.category end, x.origin = 'r')::metered.idle_units)
    into state.live
    from unnest(lots) with ordinality x
    where x.pending + x.rest + x.kept + x.held > 0 and state.begins[x.ordinality] is null;
    loop
        at := least((select min(x.ends) from unnest(state.live) x),
            (select min(x) from unnest(state.begins) x));
        exit when (at <= until) is not true;
        state := metered._foreseen_at(state, lots, at);
        seen := metered._mark(state, lots);
        steps := steps + 1;
        times := 0;
        if seen.mark = mark then
            changes := coalesce(changes,
                metered._clock_changes(lots, was.at, greatest(until, seen.ahead)));
            at := least(until, seen.still, (select min(x) from unnest(changes) x where x > was.at - interval '48:00')
                - (extract(epoch from seen.ahead) - extract(epoch from at)) * interval '1 second');
            times := greatest(0, div(extract(epoch from at) - extract(epoch from state.at) - 0.000001,
                extract(epoch from state.at) - extract(epoch from was.at)));
            state := metered._foreseen_later(state, was, times, lots);
        end if;
        if steps >= most or times > 0 then
            most := case when times > 0 or most >= 256 then 1 else most * 2 end;
            mark := seen.mark;
            was := state;
            steps := 0;
        end if;
    end loop;
    state.said := state.said || state.live;
    return state;
end
$$;
