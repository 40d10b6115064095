-- The effect of ended holds, leases and charges on the lots of a wallet, and how credit becomes a
-- lot.

-- Takes away what the entries opened_seqs hold of a wallet: parts of the lots nos, of which
-- overdrawn units are of none (0).
create function metered._taken_parts(of_scope text, opened_seqs bigint[], out nos bigint[],
    out lots metered.lots[], out parts bigint[], out overdrawn bigint)
language plpgsql volatile
as $$
begin
    with gone as (
        delete from metered.lot_holds y where y.scope = of_scope and y.seq = any (opened_seqs)
        returning y.lot, y.amount),
    sums as (select g.lot, sum(g.amount)::bigint as amount from gone g group by g.lot)
    select array_agg(s.lot), array_agg(x.l), array_agg(s.amount),
        coalesce(sum(s.amount) filter (where s.lot = 0), 0)
    into nos, lots, parts, overdrawn
    from sums s left join lateral (
        select z from metered.lots z where z.no = s.lot limit 1) x(l) on true;
end
$$;

-- Says of which lots the units are that an entry has just captured of a hold or a lease, which the
-- entry opened_seq held (_captured).
create function metered._capture_lots(entry metered.ledger, opened_seq bigint, units bigint)
returns void
language plpgsql volatile
as $$
declare
    held record;
    step record;
begin
    held := metered._taken_parts(entry.scope, array[opened_seq]);
    step := metered._captured(entry, units, held.lots, held.parts);
    perform metered._write_moves(entry.scope, step.moves, step.lots, null);
    insert into metered.lot_holds (scope, seq, lot, amount)
    select entry.scope, opened_seq, k.lot, k.amount from unnest(held.nos, step.parts) k(lot, amount)
    where k.amount > 0;
    if step.drawn > 0 then
        perform metered._owe_use(entry.scope, opened_seq, step.drawn);
        if metered._lags(entry) then
            perform metered._owe(entry.scope, step.drawn);
        end if;
    end if;
end
$$;

-- By how many units a wallet was overdrawn before an entry that freed or gave back units, and has
-- moved no lots yet.
create function metered._owed_before(entry metered.ledger) returns bigint
language plpgsql stable
as $$
begin
    return case when metered._lags(entry) then metered._debt(entry)
        else greatest(0, entry.amount - metered._balance(entry)) end;
end
$$;

-- Gives the lots of a wallet the units back that holds and leases kept of them, which the entries
-- opened_seqs held and the entry freed has just freed (_given_back). They pay an overdraft back.
-- Returns the last entry.
create function metered._free_lots(freed metered.ledger, opened_seqs bigint[])
    returns metered.ledger
language plpgsql volatile
as $$
declare
    owed bigint := metered._owed_before(freed);
    held record;
    step record;
begin
    held := metered._taken_parts(freed.scope, opened_seqs);
    step := metered._given_back(freed, freed.seq, 'f', 0, held.lots, held.parts);
    perform metered._append_all(step.tip, step.entries);
    perform metered._write_moves(freed.scope, step.moves, step.lots, null);
    return metered._pay_back(step.tip, freed.seq, step.nth, held.nos, owed - held.overdrawn);
end
$$;

-- The same for the units that one call has just freed of several wallets, in the last entry of
-- each.
create function metered._free_lines(nos bigint[], wallets text[]) returns void
language plpgsql volatile
as $$
declare
    wallet text;
begin
    foreach wallet in array wallets loop
        perform metered._free_lots(metered._entry_for_write(wallet), array(select l.opened_seq
                from metered.hold_lines l where l.hold = any (nos) and l.scope = wallet));
    end loop;
end
$$;

-- Gives units of a refund, which was just written, back to a lot (_given_back). Of one that has
-- ended they go into a new lot, or lapse, as that lot says, and pay nothing back: _refund_lots does
-- that, when it has given all. tip is the last entry by then, and nth the number of the refund's
-- last move.
create function metered._give_back(refund metered.ledger, of_lot bigint, units bigint,
    inout tip metered.ledger, inout nth int)
language plpgsql volatile
as $$
declare
    its_lot metered.lots;
    step    record;
begin
    select * into its_lot from metered.lots y where y.no = of_lot;
    step := metered._given_back(tip, refund.seq, 'g', nth, array[its_lot], array[units]);
    perform metered._append_all(step.tip, step.entries);
    perform metered._write_moves(refund.scope, step.moves, step.lots, null);
    tip := step.tip;
    nth := step.nth;
    if its_lot.expires_at <= refund.at and its_lot.late is not null then
        tip := (metered._append_lot(tip, row(units,
            case when its_lot.late = interval '0' then 'infinity'
                else refund.at + its_lot.late end, null,
            its_lot.category, its_lot.priority, null, null, null, null,
            its_lot.late)::metered.new_lot, metered._plan_on(its_lot), 'l', of_lot)).entry;
    end if;
end
$$;

-- The moves that a refund gives back, before or after its entry: those of its charge, the last one
-- first. Units that no lot covered first lower the overdraft (from_seq null, lot 0), and then come
-- from lots that have paid overdraft back, the last one first. The rest is of no lot (null): it was
-- charged before the scope had lots.
create function metered._refund_parts(refund metered.ledger)
    returns table (from_seq bigint, from_nth int, lot bigint, units bigint)
language plpgsql stable
as $$
declare
    left_over bigint := refund.amount;
    bare      bigint := 0;      -- units that no lot covered
    part      record;
begin
    for part in
        select y.nth, y.lot, y.amount - y.back as units from metered.lot_moves y
        where y.scope = refund.scope
            and y.seq = refund.ref
            and y.kind in ('t', 'u')
            and y.amount > y.back order by y.nth desc
    loop
        from_seq := refund.ref;
        from_nth := part.nth;
        lot := part.lot;
        units := least(left_over, part.units);
        exit when units = 0;
        left_over := left_over - units;
        bare := bare + case when lot = 0 then units else 0 end;
        return next;
    end loop;
    bare := bare + left_over;
    if bare = 0 then
        return;
    end if;
    from_seq := null;
    lot := 0;
    units := least(bare, metered._owed_before(refund)
        - (select coalesce(sum(k.amount), 0)
            from metered.lot_holds k where k.scope = refund.scope and k.lot = 0 and k.seq > 0));
    if units > 0 then
        bare := bare - units;
        return next;
    end if;
    for part in
        select y.seq, y.nth, y.lot, y.amount - y.back as units from metered.lot_moves y
        where y.scope = refund.scope and y.kind = 'p' and y.amount > y.back
        order by y.seq desc, y.nth desc
    loop
        from_seq := part.seq;
        from_nth := part.nth;
        lot := part.lot;
        units := least(bare, part.units);
        exit when units = 0;
        bare := bare - units;
        return next;
    end loop;
    if bare > 0 then
        from_seq := null;
        lot := null;
        units := bare;
        return next;
    end if;
end
$$;

-- Gives the lots of a wallet the units back that the entry refund has just returned of a charge.
create function metered._refund_lots(refund metered.ledger) returns void
language plpgsql volatile
as $$
declare
    over  bigint := metered._owed_before(refund);
    last  bigint;
    part  record;
    given record;
    spent bigint := over - (select coalesce(sum(k.amount), 0)
        from metered.lot_holds k where k.scope = refund.scope and k.lot = 0 and k.seq > 0);
    came  bigint[] := '{}';
begin
    select refund as tip, 0 as nth into given;
    for part in select * from metered._refund_parts(refund) loop
        update metered.lot_moves y
        set back = y.back + part.units
        where y.scope = refund.scope and y.seq = part.from_seq and y.nth = part.from_nth;
        if part.lot is null then
            perform metered._old_lot(refund, part.units, 0);
        elsif part.lot > 0 then
            given := metered._give_back(refund, part.lot, part.units, given.tip, given.nth);
            came := came || part.lot;
        elsif part.from_seq is null then
            given.nth := given.nth + 1;
            insert into metered.lot_moves (scope, seq, nth, lot, kind, amount)
            values (refund.scope, refund.seq, given.nth, 0, 'g', part.units);
            over := over - part.units;
            perform metered._debt_paid(refund.scope, part.units, spent,
                (select y.note ->> 'use'
                    from metered.ledger y where y.scope = refund.scope and y.seq = refund.ref));
            if metered._lags(refund) then
                perform metered._owe(refund.scope, -part.units);
            end if;
        end if;
    end loop;
    if over > 0 then    -- in the entry of the last lot that was made
        last := (select max(y.seq) from metered.ledger y
            where y.scope = refund.scope and y.seq > refund.seq and y.kind = 'd');
        perform metered._pay_back(given.tip, coalesce(last, refund.seq),
            case when last is null then given.nth else 1 end, came, over);
    end if;
end
$$;

-- The fate of a refund that is to be written: how many units lapse at once, since their lot has
-- ended and says so, or pay for some uses alone, and when the first of the other lots ends that get
-- units of it.
create function metered._refund_fate(refund metered.ledger, out lapses bigint, out ends timestamptz)
language plpgsql stable
as $$
begin
    select coalesce(sum(p.units) filter (
            where l.expires_at <= refund.at and l.late is null
                or l.for_uses), 0), min(l.expires_at) filter (where l.expires_at > refund.at)
    into lapses, ends
    -- A join without the limit can be one that reads all lots.
    from metered._refund_parts(refund) p,
        lateral (select x.expires_at, x.late, (x.plan).uses is not null as for_uses
            from metered.lot_rows x where x.no = p.lot limit 1) l;
end
$$;

-- The credit of a scope that no grant brought becomes a lot that never ends, after an entry. So
-- many of its units are held.
create function metered._old_lot(e metered.ledger, units bigint, held bigint) returns bigint
language plpgsql volatile
as $$
declare
    made bigint;
begin
    if units > 0 then
        insert into metered.lot_rows (granted_at, expires_at, granted_seq, last_seq, amount, rest,
            held, priority, origin, open, scope, category, age)
        values (e.at, 'infinity', e.seq, e.seq, units, units - _old_lot.held, _old_lot.held, 0, 'c',
            units > _old_lot.held, e.scope, '', metered._age(null, e.at, e.seq))
        returning no into made;
    end if;
    return made;
end
$$;

-- Makes a scope a wallet, whose last entry is tip: its credit, held units among it, becomes a lot.
create function metered._open_wallet(tip metered.ledger) returns void
language plpgsql volatile
as $$
declare
    covered   bigint := greatest(0, metered._balance(tip) + tip.held);
    held      bigint := least(tip.held, covered);
    made      bigint := metered._old_lot(tip, covered, held);
    held_part record;
    part      bigint;
begin
    if tip.held = 0 then
        return;
    end if;
    for held_part in
        select l.opened_seq, l.open
        from metered.hold_lines l
        where l.scope = tip.scope and l.open > 0 and l.due >= tip.next_due
        union all
        select y.opened_seq, y.granted
        from metered.leases y
        where y.scope = tip.scope and y.settled_at is null and y.mode <> 'g'
        order by 1
    loop
        part := least(held, held_part.open);
        insert into metered.lot_holds (scope, seq, lot, amount)
        select tip.scope, held_part.opened_seq, x.lot, x.amount
        from (values (made, part), (0, held_part.open - part)) x(lot, amount)
        where x.amount > 0;
        held := held - part;
    end loop;
end
$$;

-- An entry that is to be written, whose scope is a wallet from here on.
create function metered._as_wallet(entry metered.ledger, wait_ms int) returns metered.ledger
language plpgsql volatile
as $$
begin
    if entry.lots_end is null then
        entry.seq := entry.seq - 1;
        if entry.tallied then
            entry := metered._end_tallies(entry, wait_ms);
        end if;
        perform metered._open_wallet(entry);
        entry.seq := entry.seq + 1;
        entry.lots_end := 'infinity';
    end if;
    return entry;
end
$$;

-- Credits a wallet by a lot. last_entry is as _next_entry has it. The scope is a wallet from here
-- on.
create function metered._credit_lot(last_entry metered.ledger, lot metered.new_lot,
    plan metered.lot_plan, as_origin "char", wait_ms int, out entry metered.ledger,
    out no bigint)
language plpgsql volatile
as $$
declare
    made record;
begin
    last_entry := metered._after_due(metered._as_wallet(last_entry, wait_ms), 0, wait_ms);
    last_entry.seq := last_entry.seq - 1;
    made := metered._add_lot(last_entry, lot, plan, as_origin, null);
    entry := made.entry;
    no := made.no;
end
$$;
