-- Ends that come by time alone: of lots, and of holds in a wallet. They happen in the order of their times, whenever they are written. At the same
-- instant lots end before holds, and each by number. A writer of a wallet first writes the ends that are due (settle), under the
-- wallet's lock. A reader counts them the same (_due_lots, lapsing). So no answer depends on a sweep.
--
-- Nobody draws a lot that has ended, and its lapse changes no other lot. So a call writes the ends of the first few lots, and leaves the
-- others to later calls. Then lots_end of its entry is not later than the entry: the wallet lags. The balance of an entry that lags contains
-- units of lots that have ended. Overdraft is then in lot_holds: of holds as ever, and spent units under seq 0.

-- How many ends of lots one call writes at most, of those that it could leave to later calls. Inlined wherever it stands.
create function metered._ends_per_call() returns int
language sql immutable
as $$
    select 32
$$;

-- Whether lots have ended by the time of an entry, and their ends are not written. Inlined wherever it stands.
create function metered._lags(e metered.ledger) returns boolean
language sql immutable
as $$
    select coalesce(e.lots_end <= e.at, false)
$$;

-- How many units a wallet is overdrawn by, as of its last entry.
create function metered._debt(tip metered.ledger) returns bigint
language plpgsql stable
as $$
begin
    if metered._lags(tip) then
        return (select coalesce(sum(k.amount), 0) from metered.lot_holds k where k.scope = tip.scope and k.lot = 0);
    end if;
    return greatest(0, -metered._balance(tip));
end
$$;

-- Notes units that a wallet which lags has spent beyond its lots, or (less than 0) that were paid back.
create function metered._owe(of_scope text, units bigint) returns void
language plpgsql volatile
as $$
begin
    insert into metered.lot_holds as k (scope, seq, lot, amount) values (of_scope, 0, 0, units)
    on conflict (scope, seq, lot) do update set amount = k.amount + excluded.amount;
    delete from metered.lot_holds k where k.scope = of_scope and k.seq = 0 and k.lot = 0 and k.amount = 0;
end
$$;

-- When the next lot of a wallet ends, of those that have a rest or are held: infinity, if none does.
create function metered._next_end(of_scope text, clk timestamptz) returns timestamptz
language plpgsql stable
as $$
begin
    return least(
        coalesce((select y.expires_at from metered.lots y where y.scope = of_scope and y.open and y.expires_at > clk order by y.expires_at, y.no limit 1), 'infinity'),
        coalesce((select min(y.expires_at) from metered.lot_holds k, lateral (select x.expires_at from metered.lots x where x.no = k.lot) y
            where k.scope = of_scope and y.expires_at > clk), 'infinity'));
end
$$;

-- Ends a lot, at its time: some of its rest goes on, and the rest lapses. Appends the entries behind tip, and returns the last one.
create function metered._end_lot(tip metered.ledger, l metered.lots) returns metered.ledger
language plpgsql volatile
as $$
declare
    e metered.ledger := metered._own_entry(tip, l.expires_at);
    n bigint := metered._rolls(l);
begin
    if n > 0 then
        e := (metered._roll_lot(e, l, n, l.roll_end, l.roll_no)).entry;
    end if;
    if l.rest > n then
        e := metered._take_back(e, l.no, l.rest - n, 'e');
    end if;
    return e;
end
$$;

-- Ends a line of a hold that is due, at its time: it captures its minimum, and gives back the other units. Appends the entries behind tip, and
-- returns the last one.
create function metered._end_line(tip metered.ledger, l metered.hold_lines, of_id text, clk timestamptz) returns metered.ledger
language plpgsql volatile
as $$
declare
    e       metered.ledger := metered._own_entry(tip, l.due);
    minimum bigint := least(l.open, greatest(0, l.at_least - l.captured));
begin
    update metered.hold_lines y set captured = y.captured + minimum, open = 0 where y.hold = l.hold and y.scope = l.scope;
    e.hold := of_id;
    if minimum > 0 then
        select v.operation_tenant, v.operation into e.operation_tenant, e.operation from metered.hold_events v where v.hold = l.hold and v.version = 1;
        e.kind := 'u';
        e.amount := minimum;
        e.spent := e.spent + minimum;
        e.held := e.held - minimum;
        e.next_due := metered._due_after(e.scope, e.seq, e.held, e.next_due, clk);
        e.seq := e.seq + 1;
        perform metered._append(e);
        perform metered._capture_lots(e, l.opened_seq, minimum);
        e.operation_tenant := null;
        e.operation := null;
    end if;
    if l.open > minimum then
        e.kind := 'x';
        e.amount := l.open - minimum;
        e.held := e.held - e.amount;
        e.next_due := metered._due_after(e.scope, e.seq, e.held, e.next_due, clk);
        e.seq := e.seq + 1;
        perform metered._append(e);
        e := metered._free_lots(e, array[l.opened_seq]);
    end if;
    return e;
end
$$;

-- Writes the ends that are due in a wallet by clk, in their order: of holds, whose rows it locks, and of lots. It ends the first max_lots lots (null: all), and
-- beyond them lots of due holds, and lots that go on, as far as a caller could draw so many units of those. tip is the last entry, under the wallet's lock. The result is the last entry behind that, with a
-- new lots_end, without the caller, operation and note of tip.
create function metered._settle(tip metered.ledger, clk timestamptz, max_lots int, units bigint, wait_ms int) returns metered.ledger
language plpgsql volatile
as $$
declare
    e       metered.ledger := metered._own_entry(tip, tip.at);
    until   timestamptz := greatest(clk, tip.at);
    nos     bigint[];           -- holds that are due
    named   bigint[] := '{}';   -- lots that must be ended, and of no hold that is due
    l       metered.lots;
    due     record;
    line    metered.hold_lines;
    pos_end timestamptz := '-infinity';     -- the lot that was ended last, behind which the next is
    pos_no  bigint := 0;
    stop_end timestamptz;       -- the first lot that is left to others, or null
    stop_no bigint;
    left_over bigint := units;  -- of units, in lots that go on
    ends    timestamptz;        -- when the next lot ends behind all this
    before  text;
begin
    if tip.next_due <= clk then
        before := metered._bound_lock_wait(wait_ms);
        select array_agg(y.no) into nos from (
            select h.no from metered.holds h
            where h.no = any (array(select x.hold from metered.hold_lines x where x.scope = tip.scope and x.open > 0 and x.due >= tip.next_due and x.due <= clk))
              and (h.due <= clk) is true order by h.no for no key update) y;
        before := metered._unbound_lock_wait(before);
        if nos is not null then
            perform metered._expire_rows(nos, clk, (metered._by_system()).note);
        end if;
    end if;
    select y.expires_at, y.no into stop_end, stop_no from metered.lots y
    where y.scope = tip.scope and y.open and y.expires_at <= until order by y.expires_at, y.no limit 1 offset coalesce(max_lots, 2147483647);
    if stop_end is not null then
        named := array(
            select k.lot from metered.hold_lines x, lateral (select o.lot from metered.lot_holds o where o.scope = x.scope and o.seq = x.opened_seq and o.lot > 0) k
            where x.hold = any (nos) and x.scope = tip.scope and x.open > 0);
        for l in
            select y.* from metered.lots y
            where left_over > 0 and y.scope = tip.scope and y.open and y.roll_cap is not null and y.expires_at <= until and y.roll_end > until
            order by y.priority, y.roll_end, y.roll_no
        loop
            exit when left_over <= 0;
            named := named || l.no;
            left_over := left_over - metered._rolls(l);
        end loop;
    end if;
    ends := coalesce(stop_end, metered._next_end(tip.scope, until));
    e.lots_end := ends;
    for due in
        select x.hold, x.due, h.id, x.line from (
            select y.hold, y.due, y as line from metered.hold_lines y where y.hold = any (nos) and y.scope = tip.scope and y.open > 0
            union all select null, until, null) x
            left join lateral (select z.id from metered.holds z where z.no = x.hold) h on true
        order by x.due, x.hold
    loop
        loop
            select y.* into l from (
                (select z.* from metered.lots z where z.scope = tip.scope and z.open and (z.expires_at, z.no) > (pos_end, pos_no) and z.expires_at <= due.due
                 order by z.expires_at, z.no limit 1)
                union all
                (select z.* from metered.lots z where z.no = any (named) and z.open and z.expires_at <= due.due order by z.expires_at, z.no limit 1)) y
            where stop_end is null or (y.expires_at, y.no) < (stop_end, stop_no) or y.no = any (named)
            order by y.expires_at, y.no limit 1;
            exit when l.no is null;
            e := metered._end_lot(e, l);
            if metered._rolls(l) > 0 and l.roll_end > until then
                ends := least(ends, l.roll_end);
            end if;
            e.lots_end := ends;
            if stop_end is not null then
                named := named || l.roll_no;
            end if;
            pos_end := greatest(pos_end, l.expires_at);
            pos_no := case when pos_end = l.expires_at then l.no else pos_no end;
        end loop;
        if due.hold is not null then
            line := due.line;
            e := metered._end_line(e, line, due.id, clk);
        end if;
    end loop;
    if metered._lags(tip) and e.lots_end > until then
        delete from metered.lot_holds k where k.scope = tip.scope and k.seq = 0;
    end if;
    return e;
end
$$;

-- The same for an entry that is to be written: e is the result of _next_entry.
create function metered._after_due(e metered.ledger, units bigint, wait_ms int) returns metered.ledger
language plpgsql volatile
as $$
declare
    tip metered.ledger := e;
begin
    if e.lots_end <= e.at or e.lots_end is not null and e.next_due <= e.at then
        tip.seq := e.seq - 1;
        tip.at := (select y.at from metered.ledger y where y.scope = e.scope and y.seq = tip.seq);
        tip := metered._settle(tip, least(e.at, metered.clock()), metered._ends_per_call(), units, wait_ms);
        e.seq := tip.seq + 1;
        e.at := greatest(e.at, tip.at);
        e.spent := tip.spent;
        e.credited := tip.credited;
        e.held := tip.held;
        e.next_due := tip.next_due;
        e.lots_end := tip.lots_end;
        e.crossed := tip.crossed;
    end if;
    return e;
end
$$;

-- The lot into which a lot rolls over at its end, or null.
create function metered._gone_on(l metered.lots) returns metered.lots
language plpgsql stable
as $$
declare
    child metered.lots;
begin
    if metered._rolls(l) > 0 then
        child.no := l.roll_no;
        child.granted_at := l.expires_at;
        child.expires_at := l.roll_end;
        child.amount := metered._rolls(l);
        child.rest := child.amount;
        child.held := 0;
        child.from_lot := l.no;
        child.priority := l.priority;
        child.scope := l.scope;
        child.category := l.category;
    end if;
    return child;
end
$$;

-- The ends of a wallet's due holds, and of the lots that they keep units of, as settle would write them: these lots behind that, and the lots into which one
-- rolls over, how many units of them lapsed, and by how many units the wallet is still overdrawn.
create function metered._due_lots(tip metered.ledger, clk timestamptz, out lots metered.lots[], out lapsed bigint, out debt bigint)
language plpgsql stable
as $$
declare
    kept   metered.lot_holds[]; -- units of these holds, and overdrawn units of other holds
    spent  bigint;              -- of debt
    at     timestamptz := tip.at;
    child  metered.lots;
    due    record;
    k      record;
    own    record;
    j      int;
    part   bigint;
    units  bigint;
begin
    debt := metered._debt(tip);
    lapsed := 0;
    lots := '{}';
    if not coalesce(tip.next_due <= clk, false) then
        return;
    end if;
    if debt = 0 then    -- then no hold pays for another one, and one statement does
        for k in
            select o.lot, sum(o.amount)::bigint as kept, coalesce(sum(o.freed) filter (where o.expires_at > greatest(o.due, tip.at)), 0)::bigint as back,
                coalesce(sum(o.freed) filter (where o.expires_at <= greatest(o.due, tip.at)), 0)::bigint as late
            from (select y.due, x.lot, x.amount, x.expires_at, least(x.amount, greatest(0, x.upto - greatest(0, y.at_least - y.captured))) as freed
                  from metered.hold_lines y, lateral (
                      select z.lot, z.amount, v.expires_at, sum(z.amount) over (order by v.priority, v.expires_at, v.no) as upto
                      from metered.lot_holds z, lateral (select w.no, w.priority, w.expires_at from metered.lots w where w.no = z.lot limit 1) v
                      where z.scope = y.scope and z.seq = y.opened_seq) x
                  where y.scope = tip.scope and y.open > 0 and y.due >= tip.next_due and y.due <= clk) o
            group by o.lot order by o.lot
        loop
            select y.* into child from metered.lots y where y.no = k.lot;
            child.held := child.held - k.kept;
            child.rest := child.rest + k.back;
            lapsed := lapsed + k.late;
            lots := lots || child;
        end loop;
    else
        kept := array(
            select o from metered.lot_holds o
            where o.scope = tip.scope and o.seq = any (array(select y.opened_seq from metered.hold_lines y
                where y.scope = tip.scope and y.open > 0 and y.due >= tip.next_due and y.due <= clk))
            order by o.seq, o.lot);
        lots := array(select y from metered.lots y where y.no = any (array(select o.lot from unnest(kept) o)) order by y.no);
        kept := kept || array(select o from metered.lot_holds o
            where o.scope = tip.scope and o.lot = 0 and o.seq > 0 and o.seq <> all (array(select x.seq from unnest(kept) x)) order by o.seq);
        spent := debt - (select coalesce(sum(o.amount), 0) from unnest(kept) o where o.lot = 0);
    end if;
    for due in
        select y.hold, y.due, y.opened_seq, least(y.open, greatest(0, y.at_least - y.captured)) as minimum from metered.hold_lines y
        where debt > 0 and y.scope = tip.scope and y.open > 0 and y.due >= tip.next_due and y.due <= clk
        union all select null, greatest(clk, tip.at), null, null
        order by due, hold
    loop
        at := greatest(at, due.due);
        j := 1;
        while j <= cardinality(lots) loop
            if lots[j].rest > 0 and lots[j].expires_at <= due.due then
                child := metered._gone_on(lots[j]);
                lapsed := lapsed + lots[j].rest - coalesce(child.rest, 0);
                lots[j].rest := 0;
                lots[j].roll_cap := null;
                if child.no is not null then
                    lots := lots || child;
                end if;
            end if;
            j := j + 1;
        end loop;
        exit when due.hold is null;
        units := due.minimum;
        for k in
            select o.n, o.lot, o.amount, y.n as j from unnest(kept) with ordinality o(seq, lot, amount, scope, n)
                left join (select x.no, x.priority, x.expires_at, row_number() over () as n from unnest(lots) x) y on y.no = o.lot
            where o.seq = due.opened_seq and o.amount > 0 order by y.priority, y.expires_at, y.no
        loop
            part := least(units, k.amount);
            units := units - part;
            kept[k.n].amount := 0;
            if k.lot = 0 then
                spent := spent + part;
                continue;
            end if;
            j := k.j;
            lots[j].held := lots[j].held - k.amount;
            if lots[j].expires_at <= at then
                lapsed := lapsed + k.amount - part;
            else
                lots[j].rest := lots[j].rest + k.amount - part;
            end if;
        end loop;
        continue when spent + (select coalesce(sum(o.amount), 0) from unnest(kept) o where o.lot = 0) = 0;
        -- As _pay_back does it.
        for k in select x.j from generate_subscripts(lots, 1) x(j) where lots[x.j].rest > 0
            order by lots[x.j].priority, lots[x.j].expires_at, lots[x.j].no
        loop
            j := k.j;
            part := least(spent, lots[j].rest);
            spent := spent - part;
            lots[j].rest := lots[j].rest - part;
            for own in select o.n, o.amount from unnest(kept) with ordinality o(seq, lot, amount, scope, n) where o.lot = 0 and o.amount > 0 order by o.seq loop
                part := least(own.amount, lots[j].rest);
                exit when part = 0;
                kept[own.n].amount := own.amount - part;
                kept := kept || row(kept[own.n].seq, lots[j].no, part, tip.scope)::metered.lot_holds;
                lots[j].rest := lots[j].rest - part;
                lots[j].held := lots[j].held + part;
            end loop;
        end loop;
    end loop;
    debt := coalesce(spent, 0) + (select coalesce(sum(o.amount), 0) from unnest(kept) o where o.lot = 0);
end
$$;

-- Units of a wallet that have lapsed by now, unwritten: so much too high is its last entry's balance, with the units that due holds free. It reads no more ended
-- lots than a call writes. If there are more, it adds up the lots that have not ended.
create function metered._lapsing(tip metered.ledger, clk timestamptz) returns bigint
language plpgsql stable
as $$
declare
    until timestamptz := greatest(clk, tip.at);
    d     record;
    nos   bigint[];
    few   record;
begin
    d := metered._due_lots(tip, clk);
    if (tip.lots_end <= until) is not true then
        return d.lapsed;
    end if;
    nos := array(select x.no from unnest(d.lots) x);
    select count(*) as n, sum(x.rest - case when x.roll_end > until then metered._rolls(x) else 0 end) as units into few
    from (select y.* from metered.lots y where y.scope = tip.scope and y.open and y.expires_at <= until and y.no <> all (nos)
          order by y.expires_at, y.no limit metered._ends_per_call() + 1) x;
    if few.n <= metered._ends_per_call() then
        return d.lapsed + coalesce(few.units, 0);
    end if;
    return metered._balance(tip) + case when tip.next_due <= clk then metered._overdue(tip.scope, tip.next_due, clk) - metered._minima(tip, null, clk) else 0 end
        + d.debt - (select coalesce(sum(x.rest), 0) from unnest(d.lots) x)
        - (select coalesce(sum(x.rest), 0) from (select y.rest from metered.lots y
            where y.scope = tip.scope and y.open and y.expires_at > until and y.no <> all (nos) order by y.expires_at, y.no) x)
        - (select coalesce(sum(x.units), 0) from (select metered._rolls(y) as units from metered.lots y
            where y.scope = tip.scope and y.open and y.roll_cap is not null and y.expires_at <= until and y.roll_end > until and y.no <> all (nos)
            order by y.priority, y.roll_end, y.roll_no) x);
end
$$;

-- The lots of a wallet that have a rest or are held, as they are behind all ends that are due. With of_nos, these lots and those that they go on in.
create function metered._lots_now(tip metered.ledger, clk timestamptz, of_nos bigint[]) returns setof metered.lots
language plpgsql stable
as $$
declare
    until timestamptz := greatest(clk, tip.at);
    due   metered.lots[] := (metered._due_lots(tip, clk)).lots;
    l     metered.lots;
begin
    foreach l in array due loop
        if (l.rest > 0 or l.held > 0) and (l.no = any (of_nos) or l.from_lot = any (of_nos) or of_nos is null) then
            return next l;
        end if;
    end loop;
    for l in
        -- In the order of the index of open lots, which is read without a sort: that keeps the planner from the index of all.
        select y.* from ((select x.no from metered.lots x where of_nos is null and x.scope = tip.scope and x.open order by x.expires_at, x.no)
                         union select k.lot from metered.lot_holds k where of_nos is null and k.scope = tip.scope and k.lot > 0
                         union select unnest(of_nos)) n,
            -- A join without the limit can be one that reads all lots.
            lateral (select z.* from metered.lots z where z.no = n.no limit 1) y
        where y.no <> all (array(select x.no from unnest(due) x))
    loop
        while l.rest > 0 and l.expires_at <= until loop
            if l.held > 0 then
                l.rest := 0;
                return next l;
                select y.* into l from metered.lots y where y.no = l.no;
                l.held := 0;
            end if;
            l := metered._gone_on(l);
        end loop;
        if l.rest > 0 or l.held > 0 then
            return next l;
        end if;
    end loop;
end
$$;

-- The last entries of scopes as if all lapses that are due in wallets were written.
create function metered._without_lapsing(tips metered.ledger[], clk timestamptz) returns metered.ledger[]
language plpgsql stable
as $$
declare
    tip metered.ledger;
    i   int := 0;
begin
    foreach tip in array tips loop
        i := i + 1;
        if tip.lots_end is not null then
            tip.credited := tip.credited - metered._lapsing(tip, clk);
            tips[i] := tip;
        end if;
    end loop;
    return tips;
end
$$;
