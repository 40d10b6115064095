-- What time alone does in a wallet, in its order. _advance gets lots, due lines and overdraft as arrays
-- (_load_due), applies the events (duelots.sql), and answers with the entries and moves that say so, and
-- with the lots after them. A writer appends them (_settle). A reader answers from the lots (lapses.sql).
-- idle.sql says how it passes over years in which nobody called. _advance_each, here, applies one event after the other.
--
-- Events come in the order of their times. At one instant lots end, then lots begin, then holds fall
-- due, each from the oldest on. A lot that no row has yet has a number below 0: its place in the array.

-- When the turn of a lot comes: it begins, or it ends. Inlined wherever it stands.
create function metered._turn_at(lot metered.lots) returns timestamptz
language sql immutable
as $$
    select case when lot.pending > 0 then lot.starts_at else lot.expires_at end
$$;

-- The first turns of a lot up to a time, and of the lots that its plan brings, or in which its units
-- go on, with the units that they bring: more than most, if there are so many.
create function metered._turns_of(lot metered.lots, until timestamptz, most int)
returns metered.unwritten[]
language plpgsql stable
as $$
declare
    plan  metered.lot_plan := lot.plan;
    at    timestamptz := metered._turn_at(lot);
    units bigint := lot.pending;
    turns metered.unwritten[] := '{}';
begin
    while at <= until and cardinality(turns) <= most loop
        turns := turns || row(at, units)::metered.unwritten;
        if lot.pending > 0 then
            at := case when (plan.renews).every is not null
                then (metered._period_at(plan.renews, at))[2] end;
            units := plan.renew_amount;
        elsif cardinality(turns) = 1 then
            at := lot.roll_end;
        else
            at := case when plan.roll_again = -1 or plan.roll_again >= cardinality(turns) - 1
                then metered._roll_end(at, plan, plan.roll_for) end;
        end if;
    end loop;
    return turns;
exception when sqlstate 'MT010' then    -- a lost zone, which the fold itself reports
    return turns;
end
$$;

-- Places in lots after the first from_n, which had their turn, with one more: in the order of turns.
create function metered._queued(turns int[], from_n int, pos int, lots metered.lots[]) returns int[]
language plpgsql immutable
as $$
declare
    remaining int := cardinality(turns);
begin
    while remaining > from_n and (metered._turn_at(lots[pos]), lots[pos].pending > 0, lots[pos].age)
        < (metered._turn_at(lots[turns[remaining]]), lots[turns[remaining]].pending > 0, lots[turns[remaining]].age)
    loop
        remaining := remaining - 1;
    end loop;
    return turns[from_n + 1:remaining] || pos || turns[remaining + 1:];
end
$$;

-- The places of the parts of a line: those after place from_n, and those after loaded, which are units
-- of lots that have paid its overdraft since.
create function metered._parts_of(opened_seq bigint, parts metered.lot_holds[], from_n int, loaded int)
returns int[]
language plpgsql immutable
as $$
declare
    mine int[] := '{}';
begin
    while from_n < loaded and parts[from_n + 1].seq = opened_seq loop
        from_n := from_n + 1;
        mine := mine || from_n;
    end loop;
    for n in loaded + 1..cardinality(parts) loop
        mine := case when parts[n].seq = opened_seq then mine || n else mine end;
    end loop;
    return mine;
end
$$;

-- The places of the lots of parts: null for overdraft.
create function metered._places(parts metered.lot_holds[], lots metered.lots[]) returns int[]
language plpgsql immutable
as $$
declare
    by_no jsonb := (select jsonb_object_agg(x.no, x.ordinality) from unnest(lots) with ordinality x);
begin
    return array(select (by_no ->> k.lot::text)::int
        from unnest(parts) with ordinality k(seq, lot, amount, scope, n) order by k.n);
end
$$;

-- Units that a shared cap counts where a lot ends: those of its category that have rolled over, and
-- have not ended by then. capped are places of lots that may be of these: those that have ended are
-- left out from here on.
create function metered._capped(lot metered.lots, lots metered.lots[], inout capped int[],
    out units bigint)
language plpgsql stable
as $$
declare
    live int[] := '{}';
    pos  int;
begin
    units := 0;
    if (lot.plan).roll_shared is true and lot.roll_cap is not null then
        foreach pos in array capped loop
            continue when lots[pos].expires_at <= lot.expires_at;
            live := live || pos;
            if lots[pos].category = lot.category then
                units := units + lots[pos].rest + lots[pos].kept + lots[pos].held;
            end if;
        end loop;
        capped := live;
    end if;
end
$$;

-- Applies what time alone does in a wallet up to a time, after its entry tip. lots are those that it
-- changes, and those on which that depends (_load_due). lines are in their order, and parts first those
-- of the lines, and then the overdrawn ones of other holds. spent is overdraft that no hold keeps, of
-- which debts were drawn for uses. unwritten are units of other lots that have ended (_unwritten).
-- lowered are the thresholds that are reported after all this, which entries remember from the first
-- one on that lowers the balance. Where it is null, nobody has judged them: entries remember those of
-- tip, but for what a lot arms that begins.
create function metered._advance_each(inout tip metered.ledger, until timestamptz, lowered jsonb,
    unwritten metered.unwritten[], lines metered.due_line[], inout lots metered.lots[],
    inout parts metered.lot_holds[], inout debts metered.lot_debts[], inout spent bigint,
    out entries metered.ledger[], out moves metered.lot_moves[])
language plpgsql stable
as $$
declare
    -- Places in lots, in their order, and how many had their turn.
    turns    int[] := array(select x.ordinality from unnest(lots) with ordinality x
        where case when x.pending > 0 then x.starts_at else x.expires_at end <= until
          and x.pending + x.rest + x.kept + x.held > 0
        order by case when x.pending > 0 then x.starts_at else x.expires_at end, x.pending > 0, x.age);
    turned   int := 0;
    capped   int[] := array(select x.ordinality from unnest(lots) with ordinality x
        where x.origin = 'r' and (x.plan).roll_shared and x.rest + x.kept + x.held > 0);
    places   int[] := case when parts = '{}' then '{}' else metered._places(parts, lots) end;
    due      int := 0;
    parted   int := 0;
    loaded   int := cardinality(parts);
    over     bigint := (select coalesce(sum(k.amount), 0) from unnest(parts) k where k.lot = 0);
    pos      int;
    step     record;
    begins   boolean;
    made     metered.lots;
    mine     int[];       -- places in parts
    came     int[];       -- places of lots to which units came
    came_seq bigint;    -- by this entry, up to its move came_nth
    came_nth int;
    said     metered.ledger[];
    moved    metered.lot_moves[];
begin
    entries := '{}';
    moves := '{}';
    loop
        pos := turns[turned + 1];
        exit when pos is null and lines[due + 1] is null;
        made := null;
        came := '{}';
        came_nth := 1;
        if pos is not null and (metered._turn_at(lots[pos]) > lines[due + 1].due) is not true then
            turned := turned + 1;
            continue when lots[pos].pending + lots[pos].rest + lots[pos].kept = 0;
            begins := lots[pos].pending > 0;
            if begins then
                step := metered._start_lot(tip, lots[pos], unwritten, -1 - cardinality(lots));
                came := array[pos];
                came_seq := (step.tip).seq;
            else
                tip.crossed := nullif(coalesce(lowered, tip.crossed), '{}');
                step := metered._capped(lots[pos], lots, capped);
                capped := step.capped;
                step := metered._end_lot(tip, lots[pos], step.units, -1 - cardinality(lots));
                came_seq := case when ((step.made).plan).uses is null then (step.made).granted_seq end;
            end if;
            lots[pos] := step.lot;
            made := step.made;
            if begins and lots[pos].expires_at <= until then
                turns := metered._queued(turns, turned, pos, lots);
                turned := 0;
            end if;
        else
            due := due + 1;
            mine := metered._parts_of(lines[due].opened_seq, parts, parted, loaded);
            parted := parted + (select count(*) from unnest(mine) n where n <= loaded);
            step := metered._end_line(tip, lines[due], lowered,
                array(select lots[places[n]] from unnest(mine) n),
                array(select parts[n].amount from unnest(mine) n));
            for n in 1..cardinality(mine) loop
                if places[mine[n]] is null then
                    over := over - parts[mine[n]].amount;
                else
                    lots[places[mine[n]]] := step.lots[n];
                    came := came || places[mine[n]];
                end if;
                parts[mine[n]].amount := 0;
            end loop;
            spent := spent + step.drawn;
            debts := metered._with_debt(debts, lines[due].use, step.drawn);
            came_seq := step.came;
            came_nth := step.nth;
        end if;
        tip := step.tip;
        said := step.entries;
        moved := step.moves;
        if made.no is not null then
            pos := cardinality(lots) + 1;
            lots[pos] := made;
            if metered._turn_at(made) <= until then
                turns := metered._queued(turns, turned, pos, lots);
                turned := 0;
            end if;
            if made.origin = 'r' and (made.plan).roll_shared then
                capped := capped || pos;
            end if;
        end if;
        if came_seq is not null and spent + over > 0 then
            step := metered._repaid(tip, came_seq, came_nth, came, unwritten, lots, parts, debts,
                spent);
            tip := step.tip;
            lots := step.lots;
            parts := step.parts;
            debts := step.debts;
            spent := step.spent;
            said := said || step.entries;
            moved := moved || step.moves;
            over := (select coalesce(sum(k.amount), 0) from unnest(parts) k where k.lot = 0);
            places := places || metered._places(parts[cardinality(places) + 1:], lots);
        end if;
        for n in 1..cardinality(said) loop     -- one by one, which copies nothing
            entries := entries || said[n];
        end loop;
        for n in 1..cardinality(moved) loop
            moves := moves || moved[n];
        end loop;
    end loop;
end
$$;
