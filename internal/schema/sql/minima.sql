-- Minima: units that a hold captures when it expires. They count as charged when the hold fell due, even if it is ended
-- later. So a writer of a scope first ends its due holds, up to the last one with a minimum, which would count later if its entry came after the new one.

-- Units that the due lines of a scope, not freed yet, capture, as far as they count after since. They count from the time at which their line
-- fell due, or of the last entry if that is later.
create function metered._minima(tip metered.ledger, since timestamptz, clk timestamptz) returns bigint
language plpgsql stable
as $$
begin
    return (
        select coalesce(sum(greatest(l.at_least - l.captured, 0)), 0) from metered.hold_lines l
        where l.scope = tip.scope and l.open > 0 and l.at_least > 0 and l.due >= tip.next_due and l.due <= clk
          and greatest(l.due, tip.at) > coalesce(since, '-infinity'));
end
$$;

-- How many lines these units are of.
create function metered._minima_due(tip metered.ledger, since timestamptz, clk timestamptz) returns bigint
language sql stable
as $$
    select count(*) from metered.hold_lines l
    where l.scope = tip.scope and l.open > 0 and l.at_least > 0 and l.at_least > l.captured and l.due >= tip.next_due and l.due <= clk
      and greatest(l.due, tip.at) > coalesce(since, '-infinity')
$$;

-- Whether a due line of a scope, not freed yet, captures any. since is next_due of the last entry.
create function metered._minimum_is_due(of_scope text, since timestamptz, clk timestamptz) returns boolean
language plpgsql stable
as $$
begin
    return exists (select from metered.hold_lines l
        where l.scope = of_scope and l.open > 0 and l.at_least > 0 and l.at_least > l.captured and l.due >= since and l.due <= clk);
end
$$;

-- The minima of a scope's open lines that fall due from since on and before until, without the holds of_nos, and the tallies from since on: units,
-- and when they leave the window or period of a limit, in the order of these times. They never leave a lifetime. Null if there are none.
create function metered._minima_leave(tip metered.ledger, l metered.charge_limit, since timestamptz, until timestamptz, clk timestamptz, of_nos bigint[],
    out units bigint[], out leave timestamptz[])
language plpgsql stable
as $$
declare
    span timestamptz[];
begin
    select array_agg(x.units order by x.leaves), array_agg(x.leaves order by x.leaves) into units, leave
    from (select sum(y.at_least - y.captured)::bigint as units, case
              when l.win > interval '0' then greatest(y.due, tip.at) + l.win
              when l.win is null then (metered._period_at(l.period, greatest(y.due, tip.at)))[2]
              else 'infinity' end as leaves
          from metered.hold_lines y
          where y.scope = tip.scope and y.open > 0 and y.at_least > 0 and y.at_least > y.captured
            and y.due >= greatest(tip.next_due, since) and y.due < until and (y.hold = any (of_nos)) is not true
          group by 2) x
    where x.leaves > greatest(clk, tip.at);
    if tip.tallied then
        span := case when l.win is null then metered._period_at(l.period, greatest(clk, tip.at)) end;
        select array_agg(x.units order by x.leaves), array_agg(x.leaves order by x.leaves) into units, leave
        from (select sum(y.units)::bigint as units, y.leaves
              from (select m.units, m.leaves from unnest(units, leave) m(units, leaves)
                    union all
                    select t.amount, case when l.win > interval '0' then greatest(t.at, tip.at) + l.win
                        else coalesce(span[2], 'infinity') end
                    from metered.tallies t
                    where t.scope = tip.scope and t.at >= since and (greatest(t.at, tip.at) < span[1]) is not true) y
              group by y.leaves) x
        where x.leaves > greatest(clk, tip.at);
    end if;
end
$$;

-- The first time from since on at which at most room units are left in a window, if nothing else changes, or null for never. used are
-- charged units, counted from the base (_spent_since), which leave by age. units are minima, and leave their times (_minima_leave).
create function metered._fits_at(tip metered.ledger, l metered.charge_limit, room bigint, used bigint, base metered.counted,
    since timestamptz, units bigint[], leave timestamptz[]) returns timestamptz
language plpgsql stable
as $$
declare
    gone   int := coalesce(cardinality(units), 0);  -- minima that have left, when there is room
    few    int := -1;           -- minima that have left, when there is no room yet
    stay   bigint := 0;         -- units of minima that stay
    stays  bigint[] := '{}';    -- by gone + 1
    half   int;
    first  timestamptz := 'infinity';
    free   timestamptz;         -- when the charges have left that are in the way
    best   timestamptz := 'infinity';
begin
    for n in reverse gone..0 loop
        stays[n + 1] := stay;
        exit when stay > room;
        few := n - 1;
        stay := stay + case when n > 0 then units[n] else 0 end;
    end loop;
    if room < 0 then
        return null;
    end if;
    -- The more minima have left, the earlier the charges are few enough: the two times meet.
    gone := gone + 1;
    while gone - few > 1 loop
        half := (gone + few) / 2;
        free := case when used <= room - stays[half + 1] then '-infinity'
            when l.win > interval '0' then metered._leaves_at(tip, base.base_seq, base.base_spent, used, l.win, room - stays[half + 1])
            else 'infinity' end;
        first := greatest(since, case when half > 0 then leave[half] end);
        best := least(best, greatest(first, free));
        if free <= first then
            gone := half;
        else
            few := half;
        end if;
    end loop;
    return nullif(best, 'infinity');
end
$$;

-- The holds of the first due lines of a scope that have minima, as many as one step writes, when the last
-- of these fell due, and when the next one did, or null if there is none. more: those after these are more
-- than one step writes, too.
create function metered._first_minima(tip metered.ledger, clk timestamptz,
    out nos bigint[], out last timestamptz, out until timestamptz, out more boolean)
language plpgsql stable
as $$
declare
    dues timestamptz[];
begin
    select coalesce(array_agg(x.hold order by x.due, x.hold), '{}'), array_agg(x.due order by x.due)
    into nos, dues from (
        select l.hold, l.due from metered.hold_lines l
        where l.scope = tip.scope and l.open > 0 and l.at_least > 0 and l.at_least > l.captured
          and l.due >= tip.next_due and l.due <= clk
        order by l.due, l.hold limit 2 * metered._events_per_step() + 1) x;
    more := cardinality(nos) > 2 * metered._events_per_step();
    until := dues[metered._events_per_step() + 1];
    nos := nos[:metered._events_per_step()];
    last := dues[cardinality(nos)];
end
$$;

-- Fails in a call that would write more than one step writes, since each event counts at its own time,
-- before the call. What the call was to do is undone, and steps are taken in transactions of their own.
create function metered._refuse_behind(of_scope text) returns void
language plpgsql
as $$
begin
    raise exception 'more is due in the scope than one call writes: sweep it'
        using errcode = '55P03', detail = json_build_object('behind', of_scope),
            hint = 'Call metered.catch_up until it returns false, and try again.';
end
$$;

-- How many due lines of a wallet one call or step frees in sums, at most. It reads each of them a few
-- times. Inlined wherever it stands.
create function metered._lines_per_step() returns int
language sql immutable
as $$
    select 20000
$$;

-- The time up to which a call, or a step of one, writes due lines of a wallet: clk, or earlier if more are
-- due than it writes one by one, or than it frees in sums.
create function metered._lines_until(tip metered.ledger, clk timestamptz) returns timestamptz
language plpgsql stable
as $$
declare
    minima record;
begin
    if (tip.next_due <= clk) is not true then
        return clk;
    elsif tip.next_due = '-infinity' or metered._debt(tip) > 0 then
        return (metered._nth_due(tip, clk, metered._events_per_step())).at;
    end if;
    minima := metered._first_minima(tip, clk);
    return (metered._nth_due(tip, case when minima.until is null then clk else minima.last end,
        metered._lines_per_step())).at;
end
$$;

-- The time up to which a call, or a step of one, writes what lots do in a wallet that no call leaves
-- to a later one: they begin, and end where other lots depend on it (_again). It is clk, or earlier
-- if more than most do so by then. Periods of plans and units that go on again count as one where
-- they are foreseen (_awake). They are not as long as holds fall due, or units that come pay
-- overdraft. Where nothing is due before an instant, and more than most lots have their turn in it,
-- nos are the first of them: first those that end, then those that begin, each from the oldest on.
-- A step writes these alone.
create function metered._turns_until(tip metered.ledger, clk timestamptz, most int,
    out until timestamptz, out nos bigint[])
language plpgsql stable
as $$
declare
    ends  timestamptz := greatest(clk, tip.at);
    next  timestamptz;      -- when the first lot that is too many has its turn
    debt  bigint;
    lots  metered.lots[];
    last  timestamptz;      -- when the last line falls due
    each  boolean;          -- nothing is foreseen, whatever falls due
    times metered.unwritten[] := '{}';
    dues  timestamptz[];
begin
    until := clk;
    if (tip.lots_end <= ends) is not true then
        return;
    end if;
    -- Each in the order of its index, which keeps the planner from the index of all.
    nos := array(select y.no from metered.lot_rows y
            where y.scope = tip.scope and y.pending > 0 and y.starts_at <= ends
            order by y.starts_at, y.age limit most + 1)
        || array(select y.no from metered.lot_rows y
            where y.scope = tip.scope and y.open and y.again and y.expires_at <= ends
            order by y.expires_at, y.age limit most + 1)
        || array(select y.no from metered.lot_rows y
            where y.scope = tip.scope and y.keeps and y.roll_cap is not null
              and y.expires_at <= ends
            order by y.expires_at, y.age limit most + 1);
    if nos = '{}' then
        nos := null;
        return;
    end if;
    lots := array(select l from unnest(nos) n,
        lateral (select z from metered.lots z where z.no = n limit 1) y(l)
        order by metered._turn_at(l), (l).pending > 0, (l).age limit most + 1);
    nos := null;
    if cardinality(lots) > most then
        next := metered._turn_at(lots[most + 1]);
        ends := (select max(metered._turn_at(x)) from unnest(lots) x
            where metered._turn_at(x) < next);
        if ends is null and tip.next_due < next and 0 < (select count(*) from (
                select from metered.hold_lines l
                where l.scope = tip.scope and l.open > 0 and l.due >= tip.next_due and l.due < next
                order by l.due limit 1) x) then
            ends := next - interval '1 microsecond';
        elsif ends is null then
            nos := array(select x.no from unnest(lots[:most]) x);
            ends := next;
        end if;
        until := least(clk, ends);
        if nos is not null then
            return;
        end if;
    end if;
    debt := metered._debt(tip);
    if tip.next_due <= until then
        last := (select l.due from metered.hold_lines l
            where l.scope = tip.scope and l.open > 0 and l.due >= tip.next_due and l.due <= until
            order by l.due desc limit 1);
    end if;
    each := metered._is_idle(lots, until) is not true or 200 - most <= (
        select count(*) from (select from unnest(lots) x, metered.lot_rows y
            where (x.plan).roll_shared and y.scope = tip.scope and y.category = x.category
              and y.origin = 'r' and (y.open or y.keeps) limit 200) z);
    for pos in 1..least(most, cardinality(lots)) loop
        times := times || metered._turns_of(lots[pos],
            case when each or debt > 0 then until else last end, most);
    end loop;
    dues := array(select y.at from (
            select x.at, sum(x.units) over (order by x.at) - x.units as paid
            from unnest(times) x) y
        where each or y.at <= last or y.paid < debt
        order by y.at limit most + 1);
    until := least(until, case when cardinality(dues) > most then dues[most] end);
end
$$;

-- Takes a step in a scope that is so far behind that calls fail (_refuse_behind). In a scope without
-- lots it ends no rows of holds, which sweeps do, but in one that is closed. more: take another one.
create function metered.catch_up(of_scope metered.scope_name, wait_ms int, out more boolean)
language plpgsql volatile
as $$
declare
    tip   metered.ledger;
    stands metered.ledger;
    clk   timestamptz;
    turns record;
    most  int := metered._events_per_step();
    nos   bigint[];
begin
    perform metered._lock_keys(array[metered._scope_key(of_scope)], wait_ms);
    clk := metered.clock();
    tip := metered._entry_for_write(of_scope);
    if tip.lots_end is not null then
        turns := metered._turns_until(tip, metered._lines_until(tip, clk), most);
        perform metered._settle(tip, turns.until, most, 0, wait_ms);
        stands := metered._last_entry(of_scope);
        more := stands.seq > tip.seq and (turns.until < clk or turns.nos is not null
            or stands.next_due <= turns.until) is true;
    elsif tip.next_due > '-infinity' and tip.next_due <= clk then
        more := (metered._free_in_sum(tip, clk, true, wait_ms)).more;
    elsif tip.next_due = '-infinity' then
        nos := array(select l.hold from metered.hold_lines l
            where l.scope = tip.scope and l.open > 0 and l.due <= clk order by l.due limit most + 1);
        perform metered._end_holds(nos[:most], array[of_scope::text], clk, wait_ms);
        stands := metered._last_entry(of_scope);
        more := cardinality(nos) > most and stands.seq > tip.seq;
    else
        more := false;
    end if;
end
$$;

-- Captures the minima of holds that expire, in their scopes or in only_scopes, which are all locked
-- and no wallets (_append_minima).
create function metered._capture_minima(nos bigint[], only_scopes text[], border timestamptz,
    clk timestamptz) returns void
language plpgsql volatile
as $$
declare
    of_scope text;
    unused   metered.ledger;
begin
    for of_scope in
        select distinct y.scope from metered.hold_lines y
        where y.hold = any (nos) and y.open <> 0 and y.at_least > y.captured
          and (only_scopes is null or y.scope = any (only_scopes))
        order by 1
    loop
        unused := metered._append_minima(metered._entry_by(of_scope, clk), nos, border, clk);
    end loop;
end
$$;

-- Captures the minima of holds that expire in a scope, after its last entry tip: an entry for each line,
-- of the time at which it fell due, or of tip if that is later. One statement writes them. next_due
-- stays where it is, at or before the first line that still has units, or becomes border, before which
-- none will have any. Returns the last entry.
create function metered._append_minima(tip metered.ledger, nos bigint[], border timestamptz,
    clk timestamptz) returns metered.ledger
language plpgsql volatile
as $$
declare
    taken bigint[];      -- the holds, in the order in which they fall due
    made  int;
begin
    with minima as (
        select y.hold, y.due, least(y.open, y.at_least - y.captured) as units,
            row_number() over due_order as nth,
            (sum(least(y.open, y.at_least - y.captured)) over due_order)::bigint as upto
        from metered.hold_lines y
        where y.hold = any (nos) and y.scope = tip.scope and y.open <> 0
          and y.at_least > y.captured
        window due_order as (order by y.due, y.hold)),
    entries as (
        insert into metered.ledger ({entry columns})
        select {entry of tip: seq = tip.seq + m.nth, amount = m.units,
            at = greatest(tip.at, least(m.due, clk)), spent = tip.spent + m.upto,
            held = tip.held - m.upto, kind = 'u', scope = tip.scope,
            next_due = case when tip.next_due = '-infinity' then tip.next_due
                when tip.held > m.upto then coalesce(border, tip.next_due) end,
            hold = (select h.id from metered.holds h where h.no = m.hold),
            operation_tenant = e.operation_tenant, operation = e.operation,
            note = (metered._by_system()).note}
        from minima m, lateral (
            select v.operation_tenant, v.operation from metered.hold_events v
            where v.hold = m.hold and v.version = 1 limit 1) e
        on conflict do nothing
        returning 1)
    select array_agg(m.hold order by m.nth), (select count(*) from entries)
    into taken, made from minima m;
    if made < cardinality(taken) then
        perform metered._collided();
    end if;
    perform metered._mark_freed(tip.scope);
    update metered.hold_lines y set captured = y.captured + least(y.open, y.at_least - y.captured),
        open = y.open - least(y.open, y.at_least - y.captured)
    where y.hold = any (taken) and y.scope = tip.scope;
    select * into tip from metered.ledger l where l.scope = tip.scope and l.seq = tip.seq + made;
    return tip;
end
$$;

-- Before an entry is written: frees what is due in each of the scopes, which are locked, where a due
-- line has a minimum. A minimum of the hold of_others_than alone ends nothing.
create function metered._end_minima(scopes text[], of_others_than bigint, clk timestamptz, wait_ms int) returns boolean
language plpgsql volatile
as $$
begin
    select array_agg(d.scope) into scopes
    from unnest(scopes) s(scope),
         lateral (select y.scope, y.next_due, y.lots_end from metered.ledger y where y.scope = s.scope order by y.seq desc limit 1) d
    where d.next_due <= clk and d.lots_end is null and 0 < (
        select count(*) from (select from metered.hold_lines l
            where l.scope = d.scope and l.open > 0 and l.at_least > 0 and l.at_least > l.captured and l.due >= d.next_due and l.due <= clk
              and l.hold is distinct from of_others_than limit 1) x);
    if scopes is null then
        return false;
    end if;
    perform metered._end_due(scopes, clk, wait_ms);
    return true;
end
$$;

-- _end_minima for an entry of _next_entry. In a wallet, _settle ends due holds.
create function metered._after_minima(e metered.ledger, wait_ms int) returns metered.ledger
language plpgsql volatile
as $$
declare
    tip metered.ledger;
begin
    if e.next_due <= e.at and e.lots_end is null then
        if metered._end_minima(array[e.scope], null, least(e.at, metered.clock()), wait_ms) then
            tip := metered._entry_for_write(e.scope);
            e.seq := tip.seq + 1;
            e.at := greatest(e.at, tip.at);
            e.spent := tip.spent;
            e.held := tip.held;
            e.next_due := tip.next_due;
            e.crossed := tip.crossed;
            e.others := tip.others;
        end if;
    end if;
    return e;
end
$$;

-- Sets the minima of a new hold's lines, which are captured when it expires, and returns the lines with them.
create function metered._with_minima(new_no bigint, minima metered.used_units[], lines jsonb) returns jsonb
language plpgsql volatile
as $$
declare
    changed int;
begin
    update metered.hold_lines l set at_least = u.amount
    from unnest(minima) u where l.hold = new_no and l.scope = u.scope and u.amount between 1 and l.amount;
    get diagnostics changed = row_count;
    {refuse: when = changed <> cardinality(minima), what = minimum};
    return (
        select jsonb_agg(case when u.amount is null then x.line
            else x.line || jsonb_build_object('at_least', u.amount) end order by x.n)
        from jsonb_array_elements(lines) with ordinality x(line, n)
             left join unnest(minima) u on u.scope = x.line ->> 'scope');
end
$$;
