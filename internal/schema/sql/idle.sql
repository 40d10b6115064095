-- Writes what becomes of a wallet that nobody touched for long (foreseen.sql): of the lots that it had, and
-- of those that are left, at their times and by the rules of duelots.sql. The other periods of a plan are one
-- lot, with the units of all of them. It comes and lapses when the last of them is over. Its reference is
-- the plan's, and from when to when.

-- The lot that the plan of another one brings for the period from a time on.
create function metered._lot_from(lot metered.lots, begins timestamptz) returns metered.lots
language plpgsql stable
as $$
begin
    lot.starts_at := begins - interval '1 microsecond';
    return metered._next_lot(lot);
end
$$;

-- A lot ends, after tip, and so many units of it go on, as was foreseen. If that is at a later time, they
-- went on before, and do so at once in the lot that lasts from at until ends.
create function metered._end_foreseen(inout tip metered.ledger, inout lot metered.lots, units bigint,
    at timestamptz, ends timestamptz, new_no bigint,
    out made metered.lots, out entries metered.ledger[], out moves metered.lot_moves[])
language plpgsql stable
as $$
declare
    was  metered.lots := lot;
    step record;
begin
    if units > 0 and at > lot.expires_at then
        lot.expires_at := at;
        lot.roll_end := ends;
    end if;
    step := metered._end_lot(tip, lot, lot.roll_cap - units, new_no);
    tip := step.tip;
    lot := step.lot;
    lot.expires_at := was.expires_at;
    lot.roll_end := was.roll_end;
    made := step.made;
    entries := step.entries;
    moves := step.moves;
end
$$;

-- The lot of so many skipped periods comes, after tip, and lapses. The first of them began at first_at, and the last one is
-- over at over. lot is the lot whose plan brings them.
create function metered._end_skipped(inout tip metered.ledger, inout lot metered.lots, periods int,
    first_at timestamptz, over timestamptz, lowered jsonb, new_no bigint,
    out made metered.lots, out entries metered.ledger[], out moves metered.lot_moves[])
language plpgsql stable
as $$
declare
    step record;
begin
    lot := metered._lot_from(lot, first_at);
    lot.no := new_no;
    lot.amount := lot.amount * periods;
    lot.pending := lot.amount;
    lot.expires_at := over;
    lot.roll_cap := null;
    lot.roll_end := null;
    lot.again := false;
    lot.reference := left(lot.reference || '/' || ltrim(metered._period_name('', over)), 255);
    lot.plan.renews := null;
    lot.plan.renew_amount := null;
    step := metered._start_lot(metered._own_entry(tip, over), lot, null, null);
    entries := step.entries;
    moves := step.moves;
    tip := step.tip;
    tip.crossed := nullif(coalesce(lowered, tip.crossed), '{}');
    step := metered._end_lot(tip, step.lot, null, null);
    tip := step.tip;
    lot := step.lot;
    entries := entries || step.entries;
    moves := moves || step.moves;
end
$$;

-- Writes what was foreseen, after tip, as _advance has it.
create function metered._awake(inout tip metered.ledger, until timestamptz, lowered jsonb,
    unwritten metered.unwritten[], state metered.idle_state, inout lots metered.lots[],
    out entries metered.ledger[], out moves metered.lot_moves[])
language plpgsql stable
as $$
declare
    was   metered.lots[] := lots;
    last  int[];        -- by units, the place of the last lot that has them
    nths  int[];        -- by place, how many periods later the last lot of the plan is
    event record;
    units metered.idle_units;
    entry metered.ledger;
    move  metered.lot_moves;
    pos   int;
    step  record;
begin
    entries := '{}';
    moves := '{}';
    for n in 1..cardinality(state.next) loop
        nths[(state.next[n]).place] := (state.next[n]).nth - 1;
    end loop;
    for event in
        with x as (select * from unnest(state.said) with ordinality)
        select x.ordinality as nth, 'ends' as what, y.at, 1 as phase, x.born, x.rank, y.units,
            coalesce(x.went_at[y.n + 1], x.ends) as goes_until
        from x, unnest(x.went_at, x.went) with ordinality y(at, units, n)
        union all
        select x.ordinality, 'ends', x.ends, 1, x.born, x.rank, 0, null
        from x where x.units > 0 and x.ends <= until
        union all
        select s.place, 'was skipped', state.over, 2, 0, s.place, 0, null
        from unnest(state.skipped) with ordinality s(periods, place) where s.periods > 0
        union all
        select x.ordinality, 'begins', x.begins, 3, x.born, x.rank, 0, null
        from x where x.begins <= until
        order by 3, 4, 5, 6
    loop
        units := state.said[event.nth];
        pos := cardinality(lots) + 1;
        case event.what
            when 'begins' then
                if units.nth = 0 then
                    pos := units.place;
                else
                    lots[pos] := metered._lot_from(was[units.place], units.begins);
                    lots[pos].no := -pos;
                end if;
                last[event.nth] := pos;
                if units.nth < nths[units.place] then
                    lots[pos].plan.renews := null;
                    lots[pos].plan.renew_amount := null;
                end if;
                step := metered._start_lot(tip, lots[pos], unwritten, -1 - cardinality(lots));
            when 'ends' then
                pos := coalesce(last[event.nth], units.place);
                tip.crossed := nullif(coalesce(lowered, tip.crossed), '{}');
                step := metered._end_foreseen(tip, lots[pos], event.units, event.at,
                    event.goes_until, -1 - cardinality(lots));
                last[event.nth] := cardinality(lots) + 1;
            else
                step := metered._end_skipped(tip, was[event.nth], state.skipped[event.nth],
                    state.first_at[event.nth], state.over, lowered, -pos);
        end case;
        tip := step.tip;
        lots[pos] := step.lot;
        foreach entry in array coalesce(step.entries, '{}') loop     -- one by one, which copies nothing
            entries := entries || entry;
        end loop;
        foreach move in array coalesce(step.moves, '{}') loop
            moves := moves || move;
        end loop;
        if (step.made).no is not null then
            lots := lots || step.made;
        end if;
    end loop;
end
$$;

-- Whether units that come in a wallet pay overdraft.
create function metered._pays(lots metered.lots[], parts metered.lot_holds[],
    debts metered.lot_debts[], spent bigint) returns boolean
language plpgsql immutable
as $$
begin
    return spent + (select coalesce(sum(x.amount), 0) from unnest(parts) x where x.lot = 0) > 0
        and exists (select from unnest(lots) y
            where y.pending + y.rest + y.kept > 0 and ((y.plan).uses is null
                or (y.plan).uses && array(select x.use from unnest(debts) x where x.amount > 0)));
end
$$;

-- Applies what time alone does in a wallet up to a time, after its entry tip. lots are those that it
-- changes, and those on which that depends (_load_due). lines are in their order, and parts first those
-- of the lines, and then the overdrawn ones of other holds. spent is overdraft that no hold keeps, of
-- which debts were drawn for uses. unwritten are units of other lots that have ended (_unwritten).
-- lowered are the thresholds that are reported after all this, which entries remember from the first
-- one on that lowers the balance. Where it is null, nobody has judged them: entries remember those of
-- tip, but for what a lot arms that begins.
create function metered._advance(inout tip metered.ledger, until timestamptz, lowered jsonb,
    unwritten metered.unwritten[], lines metered.due_line[], inout lots metered.lots[],
    inout parts metered.lot_holds[], inout debts metered.lot_debts[], inout spent bigint,
    out entries metered.ledger[], out moves metered.lot_moves[])
language plpgsql stable
as $$
declare
    at   timestamptz := tip.at;
    idle boolean := metered._is_idle(lots, until);
    step record;
begin
    entries := '{}';
    moves := '{}';
    loop
        -- One event after the other, as long as units that come pay overdraft, or holds fall due.
        if not idle then
            at := until;
        elsif cardinality(lines) > 0 then
            at := lines[cardinality(lines)].due;
        elsif metered._pays(lots, parts, debts, spent) then
            at := least(until, at + interval '480:00');
        else
            begin
                step := metered._awake(tip, until, lowered, unwritten,
                    metered._foreseen_all(lots, until), lots);
                tip := step.tip;
                lots := step.lots;
                entries := entries || step.entries;
                moves := moves || step.moves;
                return;
            exception when sqlstate 'MT010' then
                at := until;        -- where a zone is lost, the event that meets it says which
            end;
        end if;
        step := metered._advance_each(tip, at, lowered, unwritten, lines, lots, parts, debts, spent);
        tip := step.tip;
        lots := step.lots;
        parts := step.parts;
        debts := step.debts;
        spent := step.spent;
        entries := entries || step.entries;
        moves := moves || step.moves;
        exit when at >= until;
        lines := '{}';
        idle := metered._is_idle(lots, until);
    end loop;
end
$$;
