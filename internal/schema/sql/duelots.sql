-- Time alone ends lots and holds of a wallet, and begins lots. It does so in the order of the times, whenever a call writes it. At the same
-- instant lots end, then lots begin, then holds end, each in the order of the numbers. A writer of a wallet first writes the ends that are due (settle), under the
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

-- How many units a wallet is overdrawn by, as of its last entry. A plan that was bought in a period which is over brings lots that have
-- ended by the entry before them: they pay nothing, until their ends are written.
create function metered._debt(tip metered.ledger) returns bigint
language plpgsql stable
as $$
begin
    if metered._lags(tip) then
        return (select coalesce(sum(k.amount), 0) from metered.lot_holds k where k.scope = tip.scope and k.lot = 0);
    end if;
    return greatest(0, (select coalesce(sum(x.rest), 0) from (select y.rest from metered.lots y
        where y.scope = tip.scope and y.open and y.expires_at <= tip.at order by y.expires_at, y.age) x) - metered._balance(tip));
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

-- When the next lot of a wallet ends, of those that have a rest or are held, or begins: infinity, if none does.
create function metered._next_end(of_scope text, clk timestamptz) returns timestamptz
language plpgsql stable
as $$
begin
    return least(
        coalesce((select y.expires_at from metered.lot_rows y where y.scope = of_scope and y.open and y.expires_at > clk order by y.expires_at, y.age limit 1), 'infinity'),
        coalesce((select min(y.expires_at) from metered.lot_holds k, lateral (select x.expires_at from metered.lot_rows x where x.no = k.lot) y
            where k.scope = of_scope and y.expires_at > clk), 'infinity'),
        coalesce((select y.expires_at from metered.lot_rows y where y.scope = of_scope and y.keeps and y.expires_at > clk order by y.expires_at, y.age limit 1), 'infinity'),
        coalesce((select y.starts_at from metered.lot_rows y where y.scope = of_scope and y.pending > 0 and y.starts_at > clk order by y.starts_at, y.age limit 1), 'infinity'));
end
$$;

-- Ends a lot, at its time: some of its rest goes on, and the rest lapses. Appends the entries after tip, and returns the last one.
create function metered._end_lot(tip metered.ledger, l metered.lots) returns metered.ledger
language plpgsql volatile
as $$
declare
    e metered.ledger := metered._own_entry(tip, l.expires_at);
    n bigint := metered._rolls_among(l, '{}');
begin
    if n > 0 then
        e := (metered._roll_lot(e, l, n, l.roll_end, l.roll_no)).entry;
    end if;
    if l.kept > n then
        e := metered._take_kept(e, l.no, l.kept - n, 'e');
    elsif l.rest > n then
        e := metered._take_back(e, l.no, l.rest - n, 'e');
    end if;
    return e;
end
$$;

-- Begins a lot, at its time: credits its units, which pay an overdraft back at once, and notes the lot of the next period if it renews. Appends the entry after
-- tip, and returns it.
create function metered._start_lot(tip metered.ledger, l metered.lots) returns metered.ledger
language plpgsql volatile
as $$
declare
    e    metered.ledger := metered._own_entry(tip, l.starts_at);
    debt bigint := metered._debt(tip);
    general boolean := (l.plan).uses is null;
    units bigint := case when general then l.pending else 0 end;
begin
    e.seq := e.seq + 1;
    e.kind := case when general then 'd' else 's' end;
    e.amount := l.pending;
    e.credited := e.credited + units;
    update metered.lot_rows y set pending = 0, open = general, keeps = not general, granted_at = l.starts_at, granted_seq = e.seq,
        age = metered._age(null, l.starts_at, e.seq) where y.no = l.no;
    if e.crossed is not null and general then
        e.crossed := metered._rearmed(e);
    end if;
    perform metered._append(e);
    perform metered._move_lot(e.scope, e.seq, 1, l.no, 'd', l.pending, units, l.pending - units);
    if debt > 0 and general then
        perform metered._pay_back(e, debt, 2);
    end if;
    perform metered._renew_lot(l, e.seq);
    return metered._pay_debts(e, l.no);
end
$$;

-- The lot of the period after that of l, which renews.
create function metered._next_lot(l metered.lots) returns metered.lots
language plpgsql stable
as $$
declare
    follows metered.lots := l;
    zone    text;
begin
    follows.no := null;
    follows.roll_no := null;
    begin
        follows.starts_at := (metered._period_at((l.plan).renews, l.starts_at))[2];
        follows.expires_at := (metered._period_at((l.plan).renews, follows.starts_at))[2];
        follows.roll_end := case when l.roll_cap is not null then metered._roll_end(follows.expires_at, l.plan, (l.plan).roll_for) end;
    exception when sqlstate 'MT010' then
        get stacked diagnostics zone = pg_exception_detail;
        raise exception 'the time zone of a plan is not known' using errcode = 'MT010', detail = format('%s, of the plan %s of wallet %s', zone, (l.plan).renewal, l.scope);
    end;
    follows.amount := (l.plan).renew_amount;
    follows.pending := follows.amount;
    follows.rest := 0;
    follows.reference := left((l.plan).renewal || ' ' || to_char(follows.starts_at at time zone 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS"Z"'), 255);
    return follows;
end
$$;

-- Notes the lot of the next period if l renews, which began with the entry at_seq. It has no reference if another lot has that one.
create function metered._renew_lot(l metered.lots, at_seq bigint) returns void
language plpgsql volatile
as $$
declare
    follows metered.lots;
begin
    if ((l.plan).renews).every is not null then
        follows := metered._next_lot(l);
        follows.granted_seq := at_seq;
        follows.last_seq := at_seq;
        if exists (select from metered.lot_rows y where y.scope = l.scope and y.reference = follows.reference) then
            follows.reference := null;
        end if;
        perform metered._note_lot(follows);
        l.plan.renews := null;
        l.plan.renew_amount := null;
        update metered.lot_rows y set plan = l.plan where y.no = l.no;
    end if;
end
$$;

-- Notes a lot that begins later.
create function metered._note_lot(l metered.lots) returns bigint
language plpgsql volatile
as $$
declare
    made bigint;
begin
    insert into metered.lot_rows (no, granted_at, expires_at, granted_seq, last_seq, amount, rest, roll_cap, roll_no, roll_end, late,
        priority, origin, open, scope, category, reference, fingerprint, pending, starts_at, again, plan, age)
    overriding system value
    values (metered._next_number('lot_rows'), l.starts_at, l.expires_at, l.granted_seq, l.last_seq, l.amount, 0, l.roll_cap,
        case when l.roll_cap is not null then metered._next_number('lot_rows') end, l.roll_end, l.late,
        l.priority, 'g', false, l.scope, l.category, l.reference, l.fingerprint, l.amount, l.starts_at, metered._again(l.plan), l.plan,
        metered._age(null, l.starts_at, l.granted_seq))
    on conflict do nothing
    returning no into made;
    if made is null then
        perform metered._collided();
    end if;
    return made;
end
$$;

-- Writes all that is due in a wallet by clk, in its order: ends of holds, whose rows it locks, ends of lots, and beginnings. It ends the first max_lots lots (null: all), and
-- beyond them lots of due holds, lots that begin, lots on whose end others depend, and lots that go on, as far as a caller could draw so many units of those. tip is the last entry, under the wallet's lock. The result is the last entry after that, with the
-- lots_end of the next one, without the caller, operation and note of tip. The caller may have put into tip.crossed the thresholds that these ends, or its own entry, cross:
-- the entries remember them from the first one on that lowers the balance, since an expired hold lowers none.
create function metered._settle(tip metered.ledger, clk timestamptz, max_lots int, units bigint, wait_ms int) returns metered.ledger
language plpgsql volatile
as $$
declare
    e       metered.ledger := metered._own_entry(tip, tip.at);
    until   timestamptz := greatest(clk, tip.at);
    nos     bigint[];           -- holds that are due
    named   bigint[] := '{}';   -- lots that must be ended, and of no hold that is due
    l       metered.lots;
    begins  metered.lots;
    due     record;
    plain   bigint[] := '{}';   -- lines that end together, before next_lot
    next_lot timestamptz := '-infinity';    -- when the next lot ends or begins at the earliest
    pos_end timestamptz := '-infinity';     -- the lot that was ended last, after which the next is
    pos_age bigint[] := '{}';
    begun   timestamptz := '-infinity';     -- the lot that began last, after which the next does
    begun_age bigint[] := '{}';
    stop_end timestamptz;       -- the first lot that is left to others, or null
    stop_age bigint[];
    left_over bigint := units;  -- of units, in lots that go on
    may_keep boolean;           -- there may be such lots
    kept_left int := 2147483647;    -- how many lots of some uses may still lapse
    ends    timestamptz;        -- when the next lot ends after all this
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
            select y.crossed into e.crossed from metered.ledger y where y.scope = tip.scope and y.seq = tip.seq;
        end if;
    end if;
    select y.expires_at, y.age into stop_end, stop_age from metered.lot_rows y
    where y.scope = tip.scope and y.open and y.expires_at <= until order by y.expires_at, y.age limit 1 offset coalesce(max_lots, 2147483647);
    if stop_end is not null then
        named := array(
            select k.lot from metered.hold_lines x, lateral (select o.lot from metered.lot_holds o where o.scope = x.scope and o.seq = x.opened_seq and o.lot > 0) k
            where x.hold = any (nos) and x.scope = tip.scope and x.open > 0
            union select y.no from metered.lot_rows y where y.scope = tip.scope and y.open and y.again and y.expires_at <= until);
        for l in
            select y.* from metered.lots y
            where left_over > 0 and y.scope = tip.scope and y.open and y.roll_cap is not null and y.expires_at <= until and y.roll_end > until
            order by y.priority, y.roll_end, y.age
        loop
            exit when left_over <= 0;
            named := named || l.no;
            left_over := left_over - metered._rolls(l);
        end loop;
    end if;
    may_keep := nos is not null or exists (select from metered.lot_rows y where y.scope = tip.scope and y.keeps)
        or exists (select from metered.lot_rows y where y.scope = tip.scope and y.pending > 0);
    if exists (select from metered.lot_rows y where y.scope = tip.scope and y.keeps and y.roll_cap is null and y.expires_at <= until
               order by y.expires_at, y.age limit 1 offset coalesce(max_lots, 2147483647)) then
        kept_left := max_lots;
    end if;
    ends := coalesce(stop_end, metered._next_end(tip.scope, until));
    e.lots_end := ends;
    for due in select * from metered._due_lines(tip, nos, until) loop
        if due.due >= next_lot or not due.plain or cardinality(plain) = 100 then    -- more would be joined by nested loops
            e := metered._end_lines(e, plain, clk);
            plain := '{}';
        end if;
        while due.due >= next_lot loop
            select y.* into l from (
                (select z.* from metered.lots z where z.scope = tip.scope and z.open and (z.expires_at, z.age) > (pos_end, pos_age) and z.expires_at <= until
                 order by z.expires_at, z.age limit 1)
                union all
                (select z.* from unnest(named) n, lateral (select w.* from metered.lots w where w.no = n limit 1) z -- never the index of all wallets
                 where z.open and z.expires_at <= until order by z.expires_at, z.age limit 1)
                union all
                (select z.* from metered._kept_due(tip.scope, until, kept_left > 0) z where may_keep and z.no is not null)) y
            where stop_end is null or (y.expires_at, y.age) < (stop_end, stop_age) or y.no = any (named) or y.kept > 0
            order by y.expires_at, y.age limit 1;
            select y.* into begins from metered.lots y
            where y.scope = tip.scope and y.pending > 0 and y.starts_at <= until and (y.starts_at, y.age) > (begun, begun_age) order by y.starts_at, y.age limit 1;
            next_lot := coalesce(least(l.expires_at, begins.starts_at), 'infinity');
            exit when due.due < next_lot;
            if l.no is null or begins.starts_at < l.expires_at then
                ends := least(ends, case when begins.expires_at > until then begins.expires_at end,
                    case when ((begins.plan).renews).every is not null then
                        case when (metered._next_lot(begins)).starts_at > until then (metered._next_lot(begins)).starts_at end end);
                e.lots_end := ends;
                e := metered._start_lot(e, begins);
                begun := begins.starts_at;
                begun_age := begins.age;
                if stop_end is not null then
                    named := named || begins.no;
                end if;
                continue;
            end if;
            e.crossed := tip.crossed;
            e := metered._end_lot(e, l);
            if metered._rolls(l) > 0 and l.roll_end > until then
                ends := least(ends, l.roll_end);
            end if;
            e.lots_end := ends;
            if l.kept > 0 then
                kept_left := kept_left - (l.roll_cap is null)::int;
                continue;
            end if;
            if stop_end is not null then
                named := case when nos is null then array_remove(named, l.no) else named end || l.roll_no;
            end if;
            pos_end := greatest(pos_end, l.expires_at);
            pos_age := case when pos_end = l.expires_at then l.age else pos_age end;
        end loop;
        if due.plain then
            plain := plain || (due.line).opened_seq;
            next_lot := least(next_lot, due.first_end);
        elsif due.hold is not null then
            e.crossed := case when (due.line).at_least > (due.line).captured then tip.crossed else e.crossed end;
            e := metered._end_line(e, due.line, due.id, clk);
            next_lot := '-infinity';
        end if;
    end loop;
    if metered._lags(tip) and e.lots_end > until then
        if e.seq > tip.seq then
            delete from metered.lot_holds k where k.scope = tip.scope and k.seq = 0;
        else
            e.lots_end := tip.lots_end;     -- a caller may write nothing, and the last entry lags. The next charge catches up
        end if;
    end if;
    e.crossed := tip.crossed;
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
        select y.at into tip.at from metered.ledger y where y.scope = e.scope and y.seq = tip.seq;
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
