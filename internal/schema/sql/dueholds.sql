-- Holds of a wallet that are due, one or many at once. See duelots.sql for their order among ends and beginnings of lots.

-- Ends a line of a hold that is due, at its time: it captures its minimum, and gives back the other units. Appends the entries after tip, and
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

-- The lines of holds of a wallet, in the order in which they fall due, and a row without a hold at until. A plain line gives
-- units back to lots for anything that have not ended by then, and does nothing else; first_end is the first end of these lots.
create function metered._due_lines(tip metered.ledger, nos bigint[], until timestamptz)
returns table (hold bigint, due timestamptz, id text, line metered.hold_lines, plain boolean, first_end timestamptz)
language plpgsql stable
as $$
declare
    owes boolean := nos is not null and metered._debt(tip) > 0;    -- then freed units pay first
begin
    return query
    select x.hold, x.due, h.id, x.line, coalesce(not owes and (x.line).at_least <= (x.line).captured and k.plain, false), k.first_end
    from (select y.hold, y.due, row(y.*)::metered.hold_lines as line from metered.hold_lines y where y.hold = any (nos) and y.scope = tip.scope and y.open > 0
          union all select null, until, null) x
        left join lateral (select z.id from metered.holds z where z.no = x.hold) h on true
        -- The aggregate inside lateral leaves the planner no join to choose.
        left join lateral (
            select bool_and(y.for_anything is true and y.expires_at > greatest(x.due, tip.at)) as plain, min(y.expires_at) as first_end
            from metered.lot_holds o left join lateral (
                select r.expires_at, (r.plan).uses is null as for_anything from metered.lot_rows r where r.no = o.lot limit 1) y on true
            where o.scope = tip.scope and o.seq = (x.line).opened_seq) k on true
    order by x.due, (x.line).opened_seq;
end
$$;

-- Ends plain lines of holds, which held units by the entries opened_seqs, in the order in which they fall due: nothing else happens in
-- between. Each has its entry, as _end_line writes it. Appends these after tip, and returns the last one.
create function metered._end_lines(tip metered.ledger, opened_seqs bigint[], clk timestamptz) returns metered.ledger
language plpgsql volatile
as $$
declare
    e    metered.ledger := metered._own_entry(tip, tip.at);
    lots bigint[];
    made int;
begin
    if coalesce(cardinality(opened_seqs), 0) = 0 then
        return tip;
    end if;
    with gone as (
        update metered.hold_lines y set open = 0
        from (select z.hold, z.scope, z.open from metered.hold_lines z where z.scope = e.scope and z.open > 0 and z.opened_seq = any (opened_seqs)) was
        where y.hold = was.hold and y.scope = was.scope
        returning y.hold, y.due, y.opened_seq, was.open as units),
    lines as (
        select g.*, row_number() over due_order as nth, sum(g.units) over due_order as upto, lead(g.due) over due_order as next_due,
            (select h.id from metered.holds h where h.no = g.hold) as id
        from gone g window due_order as (order by g.due, g.opened_seq)),
    parts as (
        delete from metered.lot_holds o where o.scope = e.scope and o.seq = any (opened_seqs) returning o.seq, o.lot, o.amount),
    freed as (
        select n.nth, p.lot, p.amount, row_number() over (partition by n.nth order by p.lot) as part,
            row_number() over (partition by p.lot order by n.nth) as version, sum(p.amount) over (partition by p.lot order by n.nth) as upto
        from parts p join lines n on n.opened_seq = p.seq),
    entries as (
        insert into metered.ledger ({entry columns})
        select {entry of e: seq = e.seq + n.nth, amount = n.units, at = greatest(e.at, n.due), held = e.held - n.upto, kind = 'x', hold = n.id,
            next_due = case when e.next_due = '-infinity' then e.next_due when e.held > n.upto then coalesce(n.next_due, n.due) end}
        from lines n on conflict do nothing
        returning seq),
    moves as (
        insert into metered.lot_moves (scope, seq, nth, lot, kind, amount, version, rest, drawn, held, kept)
        select e.scope, e.seq + f.nth, f.part, f.lot, 'f', f.amount, coalesce(l.version, 0) + f.version, l.rest + f.upto, l.drawn, l.held - f.upto, l.kept
        from freed f, lateral (select y.version, y.rest, y.drawn, y.held, y.kept from metered.lots y where y.no = f.lot limit 1) l
        returning lot)
    select (select count(*) from entries), (select array_agg(distinct m.lot) from moves m) into made, lots;
    if made < cardinality(opened_seqs) then
        perform metered._collided();
    end if;
    perform metered._mark_freed(e.scope);
    update metered.lot_rows y set open = true where y.no = any (lots) and not y.open;
    return metered._last_entry(e.scope);
end
$$;
