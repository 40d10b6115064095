-- What becomes of a lot, a due line or a debt when its time comes: a lot begins, a lot ends (its rest
-- lapses, goes on in another lot, or both), a plan brings its next lot, a hold falls due. One function
-- an event, and none reads or writes a table. advance.sql says which event comes next.

-- A lot after a move: its units change by rest and kept, and with the kind of the move drawn, held,
-- lapsed, revoked and rolled. move is its row. Without a lot it is of overdraft.
create function metered._moved(inout lot metered.lots, of_scope text, at_seq bigint, nth int,
    as_kind "char", units bigint, rest bigint, kept bigint, out move metered.lot_moves)
language plpgsql immutable
as $$
begin
    if lot.no is not null then
        lot.version := coalesce(lot.version, 0) + 1;
        lot.last_seq := at_seq;
        lot.rest := lot.rest + rest;
        lot.kept := lot.kept + kept;
        lot.drawn := lot.drawn + case when as_kind in ('u', 'p') then units
            when as_kind = 'g' then -units else 0 end;
        lot.held := lot.held - case when as_kind in ('u', 'f') then units
            when as_kind = 'q' then -units else 0 end;
        lot.open := lot.rest + lot.kept > 0 and (lot.plan).uses is null;
        lot.keeps := lot.rest + lot.kept > 0 and (lot.plan).uses is not null;
        case as_kind
            when 'e' then
                lot.lapsed := lot.lapsed + units;
                lot.untold := lot.untold + units;
            when 'v' then lot.revoked := lot.revoked + units;
            when 'o' then lot.rolled := lot.rolled + units;
            else null;
        end case;
    end if;
    move := row(at_seq, nth, coalesce(lot.no, 0), units, 0, as_kind, of_scope, lot.version, lot.rest, lot.drawn, lot.held,
        lot.kept)::metered.lot_moves;
end
$$;

-- The entry after tip that moves units of a lot: credited changes by so many units.
create function metered._lot_entry(tip metered.ledger, as_kind text, units bigint, credited bigint)
returns metered.ledger
language plpgsql immutable
as $$
begin
    tip.seq := tip.seq + 1;
    tip.kind := as_kind;
    tip.amount := units;
    tip.credited := tip.credited + credited;
    return tip;
end
$$;

-- Units leave a lot, in an entry after tip, those of its rest first: they lapse (e), are revoked (v),
-- or roll over (o), or are kept for its uses again (b).
create function metered._taken(inout tip metered.ledger, inout lot metered.lots, units bigint,
    as_kind "char", out move metered.lot_moves)
language plpgsql immutable
as $$
declare
    rest   bigint := least(units, lot.rest);
    moving record;
begin
    tip := metered._lot_entry(tip, case when as_kind = 'b' then 'o' when rest > 0 then as_kind
        else 's' end, units, -rest);
    moving := metered._moved(lot, tip.scope, tip.seq, 1, as_kind, units, -rest,
        case when as_kind = 'b' then units else rest - units end);
    lot := moving.lot;
    move := moving.move;
end
$$;

-- The lot in which so many units of it go on, as the entry at_seq credits it, or one with no number
-- for none. new_no is its number, where none was set aside for it.
create function metered._gone_on(lot metered.lots, units bigint, at_seq bigint, new_no bigint)
returns metered.lots
language plpgsql stable
as $$
declare
    child metered.lots;
begin
    if units > 0 then
        child.no := coalesce(lot.roll_no, new_no);
        child.granted_at := lot.expires_at;
        child.granted_seq := at_seq;
        child.last_seq := at_seq;
        child.expires_at := lot.roll_end;
        child.amount := units;
        child.rest := case when (lot.plan).uses is null then units else 0 end;
        child.kept := units - child.rest;
        child.drawn := 0;
        child.held := 0;
        child.pending := 0;
        child.lapsed := 0;
        child.revoked := 0;
        child.rolled := 0;
        child.untold := 0;
        child.late := lot.late;
        child.from_lot := lot.no;
        child.priority := lot.priority;
        child.origin := 'r';
        child.open := child.rest > 0;
        child.keeps := child.kept > 0;
        child.scope := lot.scope;
        child.category := lot.category;
        child.plan := metered._plan_on(lot);
        child.age := lot.age[1:2] || at_seq;
        if (lot.plan).roll_again <> 0 then
            child.roll_cap := lot.roll_cap;
            child.roll_end := metered._roll_end(child.expires_at, child.plan, (lot.plan).roll_for);
        end if;
        child.again := metered._again(child.plan);
    end if;
    return child;
end
$$;

-- A lot ends, after tip. taken are the units that a shared cap counts already. entries and moves say
-- so, and made is the lot in which units go on, if it has a number.
create function metered._end_lot(inout tip metered.ledger, inout lot metered.lots, taken bigint,
    new_no bigint,
    out made metered.lots, out entries metered.ledger[], out moves metered.lot_moves[])
language plpgsql stable
as $$
declare
    general boolean := (lot.plan).uses is null;
    units   bigint := greatest(0, least(lot.rest + lot.kept, lot.roll_cap - taken));
    step    record;
begin
    units := case when lot.roll_cap is null then 0 else units end;
    tip := metered._own_entry(tip, lot.expires_at);
    if units > 0 then
        step := metered._taken(tip, lot, units, 'o');
        entries := entries || step.tip;
        lot := step.lot;
        moves := moves || step.move;
        tip := step.tip;
        tip := metered._lot_entry(tip, case when general then 'd' else 's' end, units,
            case when general then units else 0 end);
        entries := entries || tip;
        made := metered._gone_on(lot, units, tip.seq, new_no);
        made.version := 1;
        moves := moves || row(tip.seq, 1, made.no, units, 0, 'd', tip.scope, 1, made.rest, 0, 0,
            made.kept)::metered.lot_moves;
        lot.roll_cap := null;
        lot.again := false;
    end if;
    units := lot.rest + lot.kept;
    if units > 0 then
        step := metered._taken(tip, lot, units, 'e');
        entries := entries || step.tip;
        lot := step.lot;
        moves := moves || step.move;
        tip := step.tip;
    end if;
end
$$;

-- The reference of a plan's lot that begins then.
create function metered._period_name(renewal text, starts_at timestamptz) returns text
language plpgsql immutable
as $$
begin
    return left(renewal || ' '
        || to_char(starts_at at time zone 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS"Z"'), 255);
end
$$;

-- The lot of the period after a lot that renews.
create function metered._next_lot(lot metered.lots) returns metered.lots
language plpgsql stable
as $$
declare
    follows metered.lots := lot;
    zone    text;
begin
    follows.roll_no := null;
    begin
        follows.starts_at := (metered._period_at((lot.plan).renews, lot.starts_at))[2];
        follows.expires_at := (metered._period_at((lot.plan).renews, follows.starts_at))[2];
        follows.roll_end := case when lot.roll_cap is not null then
            metered._roll_end(follows.expires_at, lot.plan, (lot.plan).roll_for) end;
    exception when sqlstate 'MT010' then
        get stacked diagnostics zone = pg_exception_detail;
        raise exception 'the time zone of a plan is not known' using errcode = 'MT010',
            detail = format('%s, of the plan %s of wallet %s', zone, (lot.plan).renewal, lot.scope);
    end;
    follows.no := null;
    follows.granted_at := follows.starts_at;
    follows.amount := (lot.plan).renew_amount;
    follows.pending := follows.amount;
    follows.rest := 0;
    follows.kept := 0;
    follows.drawn := 0;
    follows.held := 0;
    follows.lapsed := 0;
    follows.revoked := 0;
    follows.rolled := 0;
    follows.untold := 0;
    follows.open := false;
    follows.keeps := false;
    follows.version := null;
    follows.from_lot := null;
    follows.origin := 'g';
    follows.again := metered._again(lot.plan);
    follows.reference := metered._period_name((lot.plan).renewal, follows.starts_at);
    return follows;
end
$$;

-- A lot begins, after tip. made is the lot of the next period, if it has a number.
create function metered._start_lot(inout tip metered.ledger, inout lot metered.lots,
    unwritten metered.unwritten[], new_no bigint,
    out made metered.lots, out entries metered.ledger[], out moves metered.lot_moves[])
language plpgsql stable
as $$
declare
    general boolean := (lot.plan).uses is null;
    units   bigint := case when general then lot.pending else 0 end;
    moving  record;
begin
    tip := metered._lot_entry(metered._own_entry(tip, lot.starts_at),
        case when general then 'd' else 's' end, lot.pending, units);
    if general then
        tip.crossed := metered._armed(tip.crossed,
            tip.spent - tip.refunded - tip.credited + metered._lapsed_by(unwritten, tip.at), tip.held);
    end if;
    entries := array[tip];
    moving := metered._moved(lot, tip.scope, tip.seq, 1, 'd', lot.pending, units, lot.pending - units);
    lot := moving.lot;
    moves := array[moving.move];
    lot.pending := 0;
    lot.granted_at := lot.starts_at;
    lot.granted_seq := tip.seq;
    lot.age := array[(extract(epoch from lot.starts_at) * 1000000)::bigint, tip.seq, tip.seq];
    if ((lot.plan).renews).every is not null then
        made := metered._next_lot(lot);
        made.no := new_no;
        made.granted_seq := tip.seq;
        made.last_seq := tip.seq;
        made.age := array[(extract(epoch from made.starts_at) * 1000000)::bigint, tip.seq, tip.seq];
        lot.plan.renews := null;
        lot.plan.renew_amount := null;
    end if;
end
$$;

-- So many units that the entry tip captures are of those lots that are drawn first: units of a lot
-- that has ended are still its own. parts are how many units are held of each lot (null:
-- overdraft). drawn is overdraft that is captured.
create function metered._captured(tip metered.ledger, units bigint, inout lots metered.lots[],
    inout parts bigint[], out drawn bigint, out moves metered.lot_moves[])
language plpgsql stable
as $$
declare
    part   bigint;
    pos    int;
    nth    int := 0;
    moving record;
begin
    drawn := 0;
    for pos in select x.ordinality from unnest(lots) with ordinality x
        order by x.priority, x.expires_at, x.age
    loop
        part := least(units, parts[pos]);
        continue when part = 0;
        nth := nth + 1;
        moving := metered._moved(lots[pos], tip.scope, tip.seq, nth, 'u', part, 0, 0);
        lots[pos] := moving.lot;
        moves := moves || moving.move;
        parts[pos] := parts[pos] - part;
        units := units - part;
        drawn := case when lots[pos].no is null then part else drawn end;
    end loop;
end
$$;

-- Units come back to lots, by the entry at_seq, after its move nth: freed (f), or refunded (g).
-- parts are how many of each lot (null: overdraft). Units of a lot that has ended lapse, or leave
-- it if they are refunded and last, and units for some uses are kept for these: in entries after
-- tip.
create function metered._given_back(inout tip metered.ledger, at_seq bigint, as_kind "char",
    inout nth int, inout lots metered.lots[], parts bigint[],
    out entries metered.ledger[], out moves metered.lot_moves[])
language plpgsql stable
as $$
declare
    part   bigint;
    pos    int;
    moving record;
begin
    for pos in select x.ordinality from unnest(lots) with ordinality x where parts[x.ordinality] > 0
        order by x.no is not null, x.age
    loop
        part := parts[pos];
        nth := nth + 1;
        moving := metered._moved(lots[pos], tip.scope, at_seq, nth, as_kind, part, part, 0);
        lots[pos] := moving.lot;
        moves := moves || moving.move;
        continue when lots[pos].no is null
            or lots[pos].expires_at > tip.at and (lots[pos].plan).uses is null;
        moving := metered._taken(metered._own_entry(tip, tip.at), lots[pos], part,
            case when lots[pos].expires_at > tip.at then 'b'
            when as_kind = 'g' and lots[pos].late is not null then 'o' else 'e' end::"char");
        tip := moving.tip;
        lots[pos] := moving.lot;
        moves := moves || moving.move;
        entries := entries || tip;
    end loop;
end
$$;

-- A line of a hold falls due, after tip: it captures its minimum of its lots, in their order, and gives
-- the other units back to them. lots are those that have parts of its units (null: overdraft). drawn is
-- overdraft that it captured. came is the entry that gives units back, if one does, and nth the number
-- of its last move.
create function metered._end_line(inout tip metered.ledger, line metered.due_line,
    lowered jsonb, inout lots metered.lots[], parts bigint[],
    out drawn bigint, out came bigint, out nth int,
    out entries metered.ledger[], out moves metered.lot_moves[])
language plpgsql stable
as $$
declare
    step record;
begin
    drawn := 0;
    nth := 0;
    tip := metered._own_entry(tip, line.due);
    tip.hold := line.id;
    if line.minimum > 0 then
        tip := metered._lot_entry(tip, 'u', line.minimum, 0);
        tip.spent := tip.spent + line.minimum;
        tip.held := tip.held - line.minimum;
        tip.crossed := nullif(coalesce(lowered, tip.crossed), '{}');
        tip.operation_tenant := line.operation_tenant;
        tip.operation := line.operation;
        entries := array[tip];
        tip.operation_tenant := null;
        tip.operation := null;
        step := metered._captured(tip, line.minimum, lots, parts);
        lots := step.lots;
        parts := step.parts;
        drawn := step.drawn;
        moves := step.moves;
    end if;
    if line.units > line.minimum then
        tip := metered._lot_entry(tip, 'x', line.units - line.minimum, 0);
        tip.held := tip.held - tip.amount;
        entries := entries || tip;
        came := tip.seq;
        tip.hold := null;
        step := metered._given_back(tip, came, 'f', 0, lots, parts);
        tip := step.tip;
        nth := step.nth;
        lots := step.lots;
        entries := entries || step.entries;
        moves := moves || step.moves;
    end if;
end
$$;
