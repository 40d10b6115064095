-- A wallet that nobody touched for long, with plans whose periods are days. Once each lot of before has
-- ended, what time does in it repeats itself: after some periods its lots are the same, but for their
-- dates. Then _advance skips as many repetitions as there is time for, and applies the last ones event
-- by event. So a call costs a few weeks of such plans, and not the years in which nobody called.
--
-- The skipped repetitions have few entries, of the time at which they are over: for each plan one lot
-- with the units of all its skipped periods, which begins and ends then, and one step from the lots
-- before to those after. All sums are those of the events one by one, and so are the lots that are left.
--
-- A repetition is the same only where nothing else happens in it, and no clock is set forward or back.
-- Months are never the same.

-- A lot that is so many microseconds later.
create function metered._later_lot(l metered.lots, micros bigint) returns metered.lots
language plpgsql immutable
as $$
declare
    longer interval := micros * interval '1 microsecond';
    first  timestamptz := timestamptz 'epoch' + l.age[1] * interval '1 microsecond';
begin
    if l.reference = metered._period_name((l.plan).renewal, l.starts_at) then
        l.reference := metered._period_name((l.plan).renewal, l.starts_at + longer);
    end if;
    if (l.plan).of_reference = metered._period_name((l.plan).renewal, first) then
        l.plan.of_reference := metered._period_name((l.plan).renewal, first + longer);
    end if;
    l.granted_at := l.granted_at + longer;
    l.starts_at := l.starts_at + longer;
    l.expires_at := l.expires_at + longer;
    l.roll_end := l.roll_end + longer;
    l.age[1] := l.age[1] + micros;
    return l;
end
$$;

-- How a lot is part of a repetition: another takes its place (s), its units go on for ever in others
-- (p), it stays (u), or null: it is over. plans are the references of the plans that repeat themselves.
create function metered._repeats(l metered.lots, plans text[], until timestamptz) returns text
language plpgsql immutable
as $$
begin
    return case when l.pending + l.rest + l.kept + l.held = 0 then null
        when metered._turn_at(l) > until or l.drawn + l.held + l.lapsed + l.revoked + l.rolled > 0
            or ((l.plan).renewal = any (plans)) is not true then 'u'
        when l.origin = 'r' and (l.plan).roll_again = -1 then 'p'
        when l.origin in ('g', 'r') then 's'
        else 'u' end;
end
$$;

-- A wallet at a time, but for all dates: it repeats itself where two marks are equal.
create function metered._mark(tip metered.ledger, at timestamptz, lots metered.lots[], plans text[],
    until timestamptz) returns text
language plpgsql stable
as $$
declare
    micros bigint := -extract(epoch from at) * 1000000;
begin
    return concat_ws(' ', tip.credited, tip.spent, tip.held, tip.crossed, (
        select string_agg(l.how || case when l.how = 'u' then
                concat_ws(' ', (l.z).no, (l.z).pending, (l.z).rest, (l.z).kept, (l.z).held)
            else row((l.z).starts_at, (l.z).expires_at, (l.z).roll_end, (l.z).amount,
                (l.z).pending, (l.z).rest, (l.z).kept, (l.z).roll_cap, (l.z).late,
                (l.z).priority, (l.z).origin, (l.z).category, (l.z).again,
                case when l.how = 's' then (l.z).reference end,
                case when l.how = 's' then (l.z).plan end,
                case when l.how = 's' then (l.z).age[1:1] else l.age[1:2] end)::text end, ';'
            order by l.age)
        from (select metered._later_lot(y, micros) as z, y.age,     -- once for each, by offset
                  metered._repeats(y, plans, until) as how
              from unnest(lots) y where y.pending + y.rest + y.kept + y.held > 0 offset 0) l));
end
$$;

-- Microseconds of a period that is as long as any other, but where a clock is set: null for months.
create function metered._days_of(p metered.period) returns bigint
language plpgsql immutable
as $$
begin
    return case when p.zone is null or extract(year from p.every) + extract(month from p.every) = 0
        then extract(epoch from p.every) * 1000000 end;
end
$$;

-- Plans of lots that may repeat themselves before until: their references, their zones, when the first
-- of them begins, and how long one repetition is at least. No plans: there is not time enough for that.
create function metered._idle_plans(lots metered.lots[], until timestamptz,
    out plans text[], out zones text[], out since timestamptz, out micros bigint)
language plpgsql stable
as $$
declare
    l    metered.lots;
    days numeric;       -- in microseconds: periods of odd lengths coincide after ages
    all_days numeric := 1;
begin
    plans := '{}';
    zones := '{}';
    foreach l in array lots loop
        continue when l.pending = 0 or ((l.plan).renews).every is null
            or l.starts_at > until - interval '480:00';
        days := metered._days_of((l.plan).renews);
        continue when (l.plan).renew_amount * extract(epoch from until - l.starts_at) * 1000000
            > 9007199254740992 * days;      -- more units than a lot may have
        if ((l.plan).roll_to).every is not null then
            days := lcm(days, metered._days_of((l.plan).roll_to)::numeric);
        end if;
        if days is not null then
            plans := plans || (l.plan).renewal;
            zones := zones || array[((l.plan).renews).zone, ((l.plan).roll_to).zone];
            since := least(since, l.starts_at);
            all_days := lcm(all_days, days);
            if all_days * 12 > extract(epoch from until - since) * 1000000 then
                plans := '{}';
                return;
            end if;
        end if;
    end loop;
    micros := all_days;
end
$$;

-- When a clock is set in one of the zones, to a day, between two times: infinity for never.
create function metered._clock_set(zones text[], since timestamptz, until timestamptz)
returns timestamptz
language plpgsql stable
as $$
begin
    return coalesce((
        select min(t) - interval '24:00'
        from unnest(zones) z, generate_series(since, until, interval '24:00') t
        where z <> 'UTC' and (t at time zone z) - (since at time zone z) <> t - since), 'infinity');
exception when invalid_parameter_value then
    return since;       -- a name that the server does not know
end
$$;

-- The entry after tip that a move of a lot makes: its units come (d), lapse (e), or roll over (o).
create function metered._told_move(inout tip metered.ledger, inout l metered.lots, as_kind "char",
    units bigint, out move metered.lot_moves)
language plpgsql stable
as $$
declare
    general boolean := (l.plan).uses is null;
    change  bigint := case when as_kind = 'd' then units else -units end;
    moved   record;
begin
    tip := metered._lot_entry(tip, case when general then as_kind else 's' end, units,
        case when general then change else 0 end);
    moved := metered._moved(l, tip.scope, tip.seq, 1, as_kind, units,
        case when general then change else 0 end, case when general then 0 else change end);
    l := moved.l;
    move := moved.move;
end
$$;

-- The skipped repetitions, after tip: micros in all, which are over at landing.
create function metered._skip(inout tip metered.ledger, landing timestamptz, micros bigint,
    plans text[], until timestamptz, inout lots metered.lots[],
    out entries metered.ledger[], out moves metered.lot_moves[])
language plpgsql stable
as $$
declare
    places int[] := array(select n from generate_series(1, cardinality(lots)) n
        where metered._repeats(lots[n], plans, until) in ('s', 'p') order by (lots[n]).age);
    sums   jsonb := '{}';       -- the place of the lot of all skipped periods, by plan
    was    metered.lots[] := '{}';
    l      metered.lots;
    step   record;
    pos    int;
    sum_at int;
begin
    entries := '{}';
    moves := '{}';
    tip := metered._own_entry(tip, landing);
    foreach pos in array places loop
        l := lots[pos];
        was := was || l;
        continue when l.pending = 0;
        sums := sums || jsonb_build_object((l.plan).renewal, pos);
        l.amount := (l.plan).renew_amount * (micros / metered._days_of((l.plan).renews))
            - (select coalesce(sum((lots[n]).rest + (lots[n]).kept), 0) from unnest(places) n
               where ((lots[n]).plan).renewal = (l.plan).renewal and (lots[n]).origin = 'g');
        l.pending := 0;
        l.granted_at := l.starts_at;
        l.granted_seq := tip.seq + 1;
        l.expires_at := landing;
        l.roll_cap := null;
        l.again := false;
        l.plan.renews := null;
        l.plan.renew_amount := null;
        step := metered._told_move(tip, l, 'd', l.amount);
        tip := step.tip;
        lots[pos] := step.l;
        entries := entries || tip;
        moves := moves || step.move;
    end loop;
    for n in 1..cardinality(places) loop
        l := metered._later_lot(was[n], micros);
        l.no := -1 - cardinality(lots);
        l.roll_no := null;
        l.version := null;
        if l.pending = 0 then
            l.rest := 0;
            l.kept := 0;
            l.from_lot := null;
            pos := places[n];
            sum_at := sums ->> (l.plan).renewal;
            if metered._repeats(was[n], plans, until) = 'p' then
                l.no := coalesce(was[n].roll_no, l.no);
                l.from_lot := was[n].no;
                l.age[1] := was[n].age[1];
                l.plan.of_reference := (was[n].plan).of_reference;
                lots[pos].roll_cap := null;
                lots[pos].again := false;
                step := metered._told_move(tip, lots[pos], 'o', l.amount);
            else
                step := metered._told_move(tip, lots[pos], 'e', l.amount);
            end if;
            tip := step.tip;
            lots[pos] := step.l;
            entries := entries || tip;
            moves := moves || step.move;
            if l.origin = 'r' and l.from_lot is null then
                step := metered._told_move(tip, lots[sum_at], 'o', l.amount);
                tip := step.tip;
                lots[sum_at] := step.l;
                entries := entries || tip;
                moves := moves || step.move;
            end if;
            step := metered._told_move(tip, l, 'd', l.amount);
            tip := step.tip;
            l := step.l;
            entries := entries || tip;
            moves := moves || step.move;
        end if;
        l.granted_seq := tip.seq;
        l.last_seq := tip.seq;
        l.age := array[l.age[1], case when l.from_lot is null then tip.seq else l.age[2] end,
            tip.seq + case when l.pending > 0 then n else 0 end];   -- which has no entry
        lots := lots || l;
    end loop;
    for pos in select x.value::int from jsonb_each_text(sums) x order by 1 loop
        continue when lots[pos].rest + lots[pos].kept = 0;
        step := metered._told_move(tip, lots[pos], 'e', lots[pos].rest + lots[pos].kept);
        tip := step.tip;
        lots[pos] := step.l;
        entries := entries || tip;
        moves := moves || step.move;
    end loop;
end
$$;

-- Microseconds of repetitions, of which one is from since to at, that can be skipped: not past the time
-- from which lots are left at until, nor past the next other event, or past a time at which a clock is
-- set. oldest is the age of the oldest lot that a repetition had, in microseconds, and apart how far
-- apart two of them are at least. next is what comes then.
create function metered._skippable(since timestamptz, at timestamptz, oldest bigint, apart bigint,
    zones text[], plans text[], lots metered.lots[], until timestamptz,
    out micros bigint, out next timestamptz)
language plpgsql stable
as $$
declare
    ahead  interval;    -- to the last date of a lot that repeats itself, and a day or two more
    set_at timestamptz;
    once   bigint := (extract(epoch from at) - extract(epoch from since)) * 1000000;
begin
    select coalesce(min(x.turn) filter (where x.how = 'u'), 'infinity'),
        interval '48:00' + coalesce(extract(epoch from max(x.last) filter (where x.how <> 'u'))
            - extract(epoch from at), 0) * interval '1 second'
    into next, ahead
    from (select metered._turn_at(y) as turn, metered._repeats(y, plans, until) as how,
              greatest(y.starts_at, nullif(y.expires_at, 'infinity'),
                  nullif(y.roll_end, 'infinity')) as last
          from unnest(lots) y) x;
    set_at := metered._clock_set(zones, since - interval '48:00', until + ahead) - ahead;
    next := least(next, set_at, until);
    micros := 1000000 * (extract(epoch from least(next - interval '1 microsecond',
        until - (oldest + apart) * interval '1 microsecond')) - extract(epoch from at));
    micros := micros / once * once;
    if micros < 2 * once or micros <= oldest then
        micros := 0;
    end if;
    next := case when next = set_at then next + ahead + interval '72:00' else next end;
end
$$;

-- Applies what time alone does in a wallet up to a time, after its entry tip. lots are those that it
-- changes, and those on which that depends (_load_due). lines are in their order, and parts first those
-- of the lines, and then the overdrawn ones of other holds. spent is overdraft that no hold keeps, of
-- which debts were drawn for uses. unwritten are units of other lots that have ended. The entries
-- remember the thresholds lowered from the first one on that lowers the balance.
create function metered._advance(inout tip metered.ledger, until timestamptz, lowered jsonb,
    unwritten bigint, lines metered.due_line[], inout lots metered.lots[],
    inout parts metered.lot_holds[], inout debts metered.lot_debts[], inout spent bigint,
    out entries metered.ledger[], out moves metered.lot_moves[])
language plpgsql stable
as $$
declare
    idle  record := metered._idle_plans(lots, until);
    at    timestamptz;
    step  record;
    jump  record;
    live  int[];                -- places in lots of those that are not over
    now   metered.lots[];       -- these lots
    marks text[] := '{}';       -- at the times since the last obstacle
    times timestamptz[] := '{}';
    old   bigint := 0;
    nth   int;
begin
    entries := '{}';
    moves := '{}';
    at := case when idle.plans = '{}' then until
        else greatest(idle.since, lines[cardinality(lines)].due) end;
    live := array(select n from generate_series(1, cardinality(lots)) n);
    loop
        now := array(select lots[n] from unnest(live) with ordinality x(n, nth) order by x.nth);
        step := metered._advance_each(tip, least(at, until), lowered, unwritten,
            cardinality(lots) - cardinality(now), lines, now, parts, debts, spent);
        tip := step.tip;
        parts := step.parts;
        debts := step.debts;
        spent := step.spent;
        entries := entries || step.entries;
        moves := moves || step.moves;
        now := step.lots;
        for n in 1..cardinality(now) loop
            live[n] := coalesce(live[n], cardinality(lots) + 1);
            lots[live[n]] := now[n];
        end loop;
        exit when at >= until;
        lines := '{}';
        live := array(select x.place from unnest(now) with ordinality l
            join unnest(live) with ordinality x(place, nth) on x.nth = l.ordinality
            where l.pending + l.rest + l.kept + l.held > 0 order by x.nth);
        nth := null;
        if spent + (select coalesce(sum(k.amount), 0) from unnest(parts) k where k.lot = 0) = 0 then
            marks := marks || metered._mark(tip, at, now, idle.plans, until);
            times := times || at;
            old := greatest(old, (extract(epoch from at) * 1000000)::bigint - (
                select min(x.age[1]) from unnest(now) x
                where metered._repeats(x, idle.plans, until) = 's'));
            nth := array_position(marks, marks[cardinality(marks)]);
        end if;
        if nth < cardinality(marks) then
            jump := metered._skippable(times[nth], at, old, idle.micros, idle.zones, idle.plans,
                now, until);
            if jump.micros > 0 then
                at := at + jump.micros * interval '1 microsecond';
                step := metered._skip(tip, at, jump.micros, idle.plans, until, lots);
                tip := step.tip;
                lots := step.lots;
                entries := entries || step.entries;
                moves := moves || step.moves;
                live := array(select n from generate_series(1, cardinality(lots)) n
                    where (lots[n]).pending + (lots[n]).rest + (lots[n]).kept + (lots[n]).held > 0);
            end if;
            at := greatest(jump.next, at + idle.micros * interval '1 microsecond');
            marks := '{}';
            times := '{}';
            old := 0;
        elsif cardinality(times) = 40 then
            at := until;
        else
            at := at + idle.micros * interval '1 microsecond';
        end if;
    end loop;
end
$$;
