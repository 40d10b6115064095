-- Wallets: scopes whose credit is in lots. What a wallet has is said by its last entry, as of any scope: credited - spent +
-- refunded - held is what is left. If that is 0 or more, it is the rests of its lots; if it is less, no lot has a rest, and
-- what is missing is overdraft, which the next credit pays back.
--
-- An entry of a wallet has lots_end, before which none of its lots ends that has a rest or is held. Whoever spends, holds or
-- credits ends the lots that are due (end_lots), judges, writes the entry, and then says which lots it is of. The
-- entry comes first: the guard lets one writer make it, so lots need no lock of their own.

-- What a wallet has, by its last entry. Inlined wherever it stands.
create function metered.balance(t metered.ledger) returns bigint
language sql immutable
as $$
    select t.credited - t.spent + t.refunded - t.held
$$;

-- Whether a time is later by that, or the same if it is 0: none of its parts is negative, as in a month less 30 days. Inlined
-- wherever it stands.
create function metered.goes_on(for_so_long interval) returns boolean
language sql immutable
as $$
    select for_so_long between interval '0' and interval '36525 days' and least(extract(year from for_so_long), extract(month from for_so_long),
        extract(day from for_so_long), extract(hour from for_so_long), extract(minute from for_so_long), extract(second from for_so_long)) >= 0
$$;

-- What goes on of a lot in another one, if it is ended now. Inlined wherever it stands.
create function metered.rolls(l metered.lots, clk timestamptz) returns bigint
language sql stable
as $$
    select case when l.roll_cap is not null and (l.roll_for = interval '0' or l.expires_at + l.roll_for > clk) then least(l.rest, l.roll_cap) else 0 end
$$;

-- Takes up to so many units of the lots of a wallet, in their order, as the entry at_seq does: for a charge (t), for what was
-- overdrawn (p), for a hold (h, q) that the entry of_hold holds. nth is the number of its next move.
create function metered.take_lots(of_scope text, at_seq bigint, units bigint, as_kind "char", of_hold bigint, inout nth int, out taken bigint)
language plpgsql volatile
as $$
declare
    m     record;
    first int := -2147483648;           -- where the next lot is: behind the last one, whose index entry is still in the way
    ends  timestamptz := '-infinity';
    after bigint := 0;
begin
    taken := 0;
    while taken < units loop
        with f as (
            select y.no, y.priority, y.expires_at, least(y.rest, units - taken) as part from metered.lots y
            where y.scope = of_scope and y.open and (y.priority, y.expires_at, y.no) > (first, ends, after)
            order by y.priority, y.expires_at, y.no limit 1
        ), u as (
            update metered.lots y set rest = y.rest - f.part, open = y.rest > f.part, last_seq = at_seq,
                drawn = y.drawn + case when of_hold is null then f.part else 0 end,
                held = y.held + case when of_hold is null then 0 else f.part end
            from f where y.no = f.no
            returning f.no, f.priority, f.expires_at, f.part
        ), i as (
            insert into metered.lot_moves (scope, seq, nth, lot, kind, amount)
            select of_scope, at_seq, take_lots.nth, u.no, as_kind, u.part from u
        )
        select u.no, u.part, u.priority, u.expires_at into m from u;
        exit when m.no is null;
        if of_hold is not null then
            insert into metered.lot_holds as k (scope, seq, lot, amount) values (of_scope, of_hold, m.no, m.part)
            on conflict (scope, seq, lot) do update set amount = k.amount + excluded.amount;
        end if;
        taken := taken + m.part;
        nth := nth + 1;
        first := m.priority;
        ends := m.expires_at;
        after := m.no;
    end loop;
end
$$;

-- Says of which lots the units of an entry are that was just written: of a charge (t), or of a hold (h). before is what
-- the wallet had before it; what that does not cover is overdraft.
create function metered.use_lots(of_scope text, at_seq bigint, units bigint, before bigint, as_kind "char") returns void
language plpgsql volatile
as $$
declare
    covered bigint := greatest(0, least(units, before));
    held_by bigint := case when as_kind = 'h' then at_seq end;
    got     record;
begin
    got := metered.take_lots(of_scope, at_seq, covered, as_kind, held_by, 1);
    if got.taken < covered then
        raise exception 'the lots of a wallet do not add up to its balance' using errcode = 'XX001', detail = of_scope;
    end if;
    if covered < units then
        insert into metered.lot_moves (scope, seq, nth, lot, kind, amount) values (of_scope, at_seq, got.nth, 0, as_kind, units - covered);
        if held_by is not null then
            insert into metered.lot_holds (scope, seq, lot, amount) values (of_scope, held_by, 0, units - covered);
        end if;
    end if;
end
$$;

-- Credit becomes a lot: appends the entry behind tip, which the wallet's lots are due before, and returns it.
create function metered.append_lot(tip metered.ledger, lot metered.new_lot, as_origin "char", of_lot bigint, out entry metered.ledger, out no bigint)
language plpgsql volatile
as $$
begin
    entry := tip;
    entry.seq := tip.seq + 1;
    entry.kind := 'd';
    entry.amount := lot.amount;
    entry.credited := tip.credited + lot.amount;
    entry.lots_end := least(coalesce(tip.lots_end, 'infinity'), lot.expires_at);
    if entry.crossed is not null and of_lot is null then    -- what goes on of another lot brings nothing
        entry.crossed := metered.rearmed(entry);
    end if;
    perform metered.append(entry);
    insert into metered.lots (granted_at, expires_at, granted_seq, last_seq, amount, rest, roll_cap, roll_for, late, from_lot,
        priority, origin, open, scope, category, reference, fingerprint)
    values (entry.at, lot.expires_at, entry.seq, entry.seq, lot.amount, lot.amount, lot.roll_cap, lot.roll_for, lot.late, of_lot,
        lot.priority, as_origin, true, tip.scope, lot.category, lot.reference, lot.fingerprint)
    on conflict do nothing
    returning lots.no into append_lot.no;
    if append_lot.no is null then
        perform metered.collided();
    end if;
    insert into metered.lot_moves (scope, seq, nth, lot, kind, amount) values (tip.scope, entry.seq, 1, append_lot.no, 'd', lot.amount);
end
$$;

-- The same, and pays back at once what was overdrawn.
create function metered.add_lot(tip metered.ledger, lot metered.new_lot, as_origin "char", of_lot bigint, out entry metered.ledger, out no bigint)
language plpgsql volatile
as $$
declare
    before bigint := metered.balance(tip);
    made   record;
begin
    made := metered.append_lot(tip, lot, as_origin, of_lot);
    entry := made.entry;
    no := made.no;
    if before < 0 then
        perform metered.pay_back(tip.scope, entry.seq, -before, 2);
    end if;
end
$$;

-- Pays back what a wallet has overdrawn, as far as its lots have a rest: first what was spent, then what is held, the oldest first.
create function metered.pay_back(of_scope text, at_seq bigint, overdrawn bigint, inout nth int)
language plpgsql volatile
as $$
declare
    spent bigint := overdrawn - (select coalesce(sum(k.amount), 0) from metered.lot_holds k where k.scope = of_scope and k.lot = 0);
    got   record;
    k     record;
begin
    got := metered.take_lots(of_scope, at_seq, spent, 'p', null, nth);
    nth := got.nth;
    if got.taken < spent or spent = overdrawn then
        return;
    end if;
    for k in select y.seq, y.amount from metered.lot_holds y where y.scope = of_scope and y.lot = 0 order by y.seq loop
        got := metered.take_lots(of_scope, at_seq, k.amount, 'q', k.seq, nth);
        nth := got.nth;
        update metered.lot_holds y set amount = y.amount - got.taken where y.scope = of_scope and y.seq = k.seq and y.lot = 0;
        exit when got.taken < k.amount;
        delete from metered.lot_holds y where y.scope = of_scope and y.seq = k.seq and y.lot = 0;
    end loop;
end
$$;

-- Takes back units of a lot that has them as its rest: they lapsed (e), are revoked (v) or roll over (o). Appends the entry
-- behind tip, and returns it.
create function metered.take_back(tip metered.ledger, of_lot bigint, units bigint, as_kind "char") returns metered.ledger
language plpgsql volatile
as $$
declare
    entry metered.ledger := tip;
begin
    entry.seq := tip.seq + 1;
    entry.kind := as_kind;
    entry.amount := units;
    entry.credited := tip.credited - units;
    perform metered.append(entry);
    update metered.lots y set rest = y.rest - units, open = y.rest > units, last_seq = entry.seq,
        lapsed = y.lapsed + case when as_kind = 'e' then units else 0 end, untold = y.untold + case when as_kind = 'e' then units else 0 end,
        revoked = y.revoked + case when as_kind = 'v' then units else 0 end, rolled = y.rolled + case when as_kind = 'o' then units else 0 end
    where y.no = of_lot;
    insert into metered.lot_moves (scope, seq, nth, lot, kind, amount) values (tip.scope, entry.seq, 1, of_lot, as_kind, units);
    return entry;
end
$$;

-- Lets units of a lot go on in another one: because it ends, or is asked to (r), or, in version 2, since they were given back after its end (l).
create function metered.roll_lot(tip metered.ledger, l metered.lots, units bigint, ends timestamptz, as_origin "char", out entry metered.ledger, out no bigint)
language plpgsql volatile
as $$
declare
    made record;
begin
    entry := metered.take_back(tip, l.no, units, 'o');
    if as_origin = 'r' then
        update metered.lots y set roll_cap = null where y.no = l.no;
    end if;
    made := metered.add_lot(entry, row(units, ends, null, l.category, l.priority, null, null, null, null, l.late)::metered.new_lot, as_origin, l.no);
    entry := made.entry;
    no := made.no;
end
$$;

-- An entry behind tip that no caller asked for, without what says whose that was.
create function metered.own_entry(tip metered.ledger, clk timestamptz) returns metered.ledger
language plpgsql stable
as $$
begin
    tip.at := greatest(clk, tip.at);
    tip.ref := null;
    tip.hold := null;
    tip.namespace := null;
    tip.operation := null;
    tip.note := (metered.by_system()).note;
    return tip;
end
$$;

-- Ends the lots of a wallet that are due, and returns its last entry after that, with its new lots_end. tip is its last entry,
-- whose lock is held.
create function metered.end_lots(tip metered.ledger, clk timestamptz) returns metered.ledger
language plpgsql volatile
as $$
declare
    e metered.ledger := metered.own_entry(tip, clk);
    l metered.lots;
    n bigint;
begin
    e.lots_end := metered.next_end(tip.scope, e.at);
    for l in select * from metered.lots y where y.scope = tip.scope and y.open and y.expires_at <= e.at order by y.expires_at, y.no loop
        n := metered.rolls(l, e.at);
        if n > 0 then
            e := (metered.roll_lot(e, l, n, case when l.roll_for = interval '0' then 'infinity' else l.expires_at + l.roll_for end, 'r')).entry;
        end if;
        if l.rest > n then
            e := metered.take_back(e, l.no, l.rest - n, 'e');
        end if;
    end loop;
    return e;
end
$$;

-- When the next lot of a wallet ends, of those that have a rest or are held: infinity, if none does.
create function metered.next_end(of_scope text, clk timestamptz) returns timestamptz
language plpgsql stable
as $$
begin
    return least(
        coalesce((select min(y.expires_at) from metered.lots y where y.scope = of_scope and y.open and y.expires_at > clk), 'infinity'),
        coalesce((select min(y.expires_at) from metered.lot_holds k, lateral (select x.expires_at from metered.lots x where x.no = k.lot) y
            where k.scope = of_scope and y.expires_at > clk), 'infinity'));
end
$$;

-- The same for an entry that is to be written: e is as next_entry has it.
create function metered.after_due_lots(e metered.ledger) returns metered.ledger
language plpgsql volatile
as $$
declare
    tip metered.ledger := e;
begin
    if e.lots_end <= e.at then
        tip.seq := e.seq - 1;
        tip := metered.end_lots(tip, e.at);
        e.seq := tip.seq + 1;
        e.credited := tip.credited;
        e.lots_end := tip.lots_end;
    end if;
    return e;
end
$$;

-- What the lines of a wallet that are due keep of its lots: freed is what they give back when they expire. What they capture
-- then is of the lots that are drawn first.
create function metered.due_parts(tip metered.ledger, clk timestamptz) returns table (lot bigint, ends timestamptz, kept bigint, freed bigint)
language plpgsql stable
as $$
begin
    return query
    select k.lot, k.expires_at, k.amount, least(k.amount, greatest(0, k.upto - greatest(l.at_least - l.captured, 0)))::bigint
    from metered.hold_lines l,
         lateral (select o.lot, o.amount, z.expires_at, sum(o.amount) over (order by z.priority, z.expires_at, z.no) as upto
                  from metered.lot_holds o left join lateral (select x.no, x.priority, x.expires_at from metered.lots x where x.no = o.lot) z on true
                  where o.scope = l.scope and o.seq = l.opened_seq) k
    where l.scope = tip.scope and l.open > 0 and l.due >= tip.next_due and l.due <= clk;
end
$$;

-- Of a wallet's credit, what lapses if the lots that are due are ended now, and the holds that are: what these keep of lots that have
-- ended is nobody's.
create function metered.lapsing(tip metered.ledger, clk timestamptz) returns bigint
language plpgsql stable
as $$
declare
    units bigint := 0;
begin
    if tip.lots_end <= greatest(clk, tip.at) then
        units := (select coalesce(sum(y.rest - metered.rolls(y, greatest(clk, tip.at))), 0) from metered.lots y
            where y.scope = tip.scope and y.open and y.expires_at <= greatest(clk, tip.at));
    end if;
    if tip.lots_end is not null and tip.next_due <= clk then
        units := units + (select coalesce(sum(d.freed), 0) from metered.due_parts(tip, clk) d where d.ends <= greatest(clk, tip.at));
    end if;
    return units;
end
$$;

-- The last entries of scopes as if the lots that are due, and the holds, had been ended.
create function metered.without_lapsing(tips metered.ledger[], clk timestamptz) returns metered.ledger[]
language plpgsql stable
as $$
declare
    tip metered.ledger;
    i   int := 0;
begin
    foreach tip in array tips loop
        i := i + 1;
        if tip.lots_end is not null then
            tip.credited := tip.credited - metered.lapsing(tip, clk);
            tips[i] := tip;
        end if;
    end loop;
    return tips;
end
$$;
