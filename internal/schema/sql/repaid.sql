-- How units that come pay debts back in the fold, on arrays: no function reads or writes a table.
-- See debts.sql.

-- Overdraft by use, with so many units more for one use, or for none.
create function metered._with_debt(debts metered.lot_debts[], of_use text, units bigint)
    returns metered.lot_debts[]
language plpgsql immutable
as $$
begin
    return array(select row(sum(y.amount)::bigint, '', y.use)::metered.lot_debts
        from (select x.amount, x.use
            from unnest(debts) x union all select units, of_use
            where of_use is not null and units > 0) y
        group by y.use order by y.use);
end
$$;

-- Overdraft by use, less so many units, in the order of the uses: of all, or only of some.
create function metered._without_debt(debts metered.lot_debts[], units bigint, for_uses text[])
    returns metered.lot_debts[]
language plpgsql immutable
as $$
declare
    part bigint;
begin
    for n in 1..cardinality(debts) loop
        continue when debts[n].use <> all (for_uses);
        part := greatest(0, least(units, debts[n].amount));
        debts[n].amount := debts[n].amount - part;
        units := units - part;
    end loop;
    return debts;
end
$$;

-- Lots with a rest, in their order, pay overdraft back in the entry at_seq, after its move nth:
-- first spent units, and then units of overdrawn holds, in their order. parts are the parts of
-- holds without a lot.
create function metered._paid_back(of_scope text, at_seq bigint, nth int, inout lots metered.lots[],
    inout spent bigint, inout debts metered.lot_debts[], inout parts metered.lot_holds[],
    out more metered.lot_holds[], out moves metered.lot_moves[])
language plpgsql stable
as $$
declare
    part   bigint;
    moving record;
begin
    for pos in 1..coalesce(cardinality(lots), 0) loop
        part := least(spent, lots[pos].rest);
        if part > 0 then
            debts := metered._without_debt(debts, part - spent
                + (select coalesce(sum(y.amount), 0) from unnest(debts) y)::bigint, null);
            spent := spent - part;
            nth := nth + 1;
            moving := metered._moved(lots[pos], of_scope, at_seq, nth, 'p', part, -part, 0);
            lots[pos] := moving.lot;
            moves := moves || moving.move;
        end if;
        for n in 1..cardinality(parts) loop
            part := least(parts[n].amount, lots[pos].rest);
            exit when lots[pos].rest = 0;
            continue when part = 0;
            nth := nth + 1;
            moving := metered._moved(lots[pos], of_scope, at_seq, nth, 'q', part, -part, 0);
            lots[pos] := moving.lot;
            moves := moves || moving.move;
            parts[n].amount := parts[n].amount - part;
            more := more || row(parts[n].seq, lots[pos].no, part, of_scope)::metered.lot_holds;
        end loop;
    end loop;
end
$$;

-- A lot whose units for its uses have come pays overdraft that was drawn for these, after tip.
create function metered._use_repaid(inout tip metered.ledger, inout used_lot metered.lots,
    unwritten metered.unwritten[], inout spent bigint, inout debts metered.lot_debts[],
    out entries metered.ledger[], out moves metered.lot_moves[])
language plpgsql stable
as $$
declare
    units  bigint := least(used_lot.kept, (select coalesce(sum(y.amount), 0) from unnest(debts) y
        where y.use = any ((used_lot.plan).uses)));
    moving record;
begin
    if (units > 0 and used_lot.expires_at > tip.at) is not true then
        return;
    end if;
    tip := metered._lot_entry(metered._own_entry(tip, tip.at), 'd', units, units);
    tip.crossed := metered._armed(tip.crossed,
        tip.spent - tip.refunded - tip.credited + metered._lapsed_by(unwritten, tip.at), tip.held);
    entries := array[tip];
    moving := metered._moved(used_lot, tip.scope, tip.seq, 1, 'a', units, units, -units);
    moves := array[moving.move];
    moving := metered._moved(moving.lot, tip.scope, tip.seq, 2, 'p', units, -units, 0);
    moves := moves || moving.move;
    used_lot := moving.lot;
    debts := metered._without_debt(debts, units, (used_lot.plan).uses);
    spent := spent - units;
end
$$;

-- Units that came with the move nth of the entry at_seq pay overdraft back, after tip. came are the
-- places of lots to which units for their uses came. The others are as _advance has them.
create function metered._repaid(inout tip metered.ledger, at_seq bigint, nth int, came int[],
    unwritten metered.unwritten[], inout lots metered.lots[], inout parts metered.lot_holds[],
    inout debts metered.lot_debts[], inout spent bigint,
    out entries metered.ledger[], out moves metered.lot_moves[])
language plpgsql stable
as $$
declare
    payers int[] := array(select x.ordinality from unnest(lots) with ordinality x
        where x.rest > 0 and (x.plan).uses is null and x.expires_at > tip.at
        order by x.priority, x.expires_at, x.age);
    owed   int[] := array(select k.n
        from unnest(parts) with ordinality k(seq, lot, amount, scope, n)
        where k.lot = 0 and k.amount > 0 order by k.seq);
    pos    int;
    paid   record;
begin
    paid := metered._paid_back(tip.scope, at_seq, nth,
        array(select lots[x.pos] from unnest(payers) with ordinality x(pos, n) order by x.n),
        spent, debts,
        array(select parts[x.pos] from unnest(owed) with ordinality x(pos, n) order by x.n));
    spent := paid.spent;
    debts := paid.debts;
    moves := paid.moves;
    for n in 1..cardinality(payers) loop
        lots[payers[n]] := paid.lots[n];
    end loop;
    for n in 1..cardinality(owed) loop
        parts[owed[n]] := paid.parts[n];
    end loop;
    for n in 1..coalesce(cardinality(paid.more), 0) loop
        pos := (select k.place from unnest(parts) with ordinality k(seq, lot, amount, scope, place)
            where k.seq = paid.more[n].seq and k.lot = paid.more[n].lot);
        if pos is null then
            parts := parts || paid.more[n];
        else
            parts[pos].amount := parts[pos].amount + paid.more[n].amount;
        end if;
    end loop;
    for pos in select x.pos from unnest(came) x(pos) where (lots[x.pos].plan).uses is not null
        order by lots[x.pos].age
    loop
        paid := metered._use_repaid(tip, lots[pos], unwritten, spent, debts);
        tip := paid.tip;
        lots[pos] := paid.used_lot;
        spent := paid.spent;
        debts := paid.debts;
        entries := entries || paid.entries;
        moves := moves || paid.moves;
    end loop;
end
$$;
