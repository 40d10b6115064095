-- How what is due in a wallet is written, under the wallet's lock, before anything else: _settle loads
-- it (lapses.sql), applies the rules (advance.sql, duelots.sql), and appends the entries and moves that these say.
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
        -- Held, and used up otherwise: by its end, since a lot may have parts of many holds.
        case when exists (select from metered.lot_holds k where k.scope = of_scope and k.lot > 0) then
            coalesce((select y.expires_at from metered.lots y
                where y.scope = of_scope and y.expires_at > clk and y.expires_at < 'infinity'
                  and y.held > 0 and not y.open and not y.keeps
                order by y.expires_at, y.no limit 1), 'infinity') end,
        coalesce((select y.expires_at from metered.lot_rows y where y.scope = of_scope and y.keeps and y.expires_at > clk order by y.expires_at, y.age limit 1), 'infinity'),
        coalesce((select y.starts_at from metered.lot_rows y where y.scope = of_scope and y.pending > 0 and y.starts_at > clk order by y.starts_at, y.age limit 1), 'infinity'));
end
$$;

-- Notes the lot of the next period if lot renews, which began with the entry at_seq, and returns its number. It has no
-- reference if another lot has that one.
create function metered._renew_lot(lot metered.lots, at_seq bigint) returns bigint
language plpgsql volatile
as $$
declare
    follows metered.lots;
begin
    if ((lot.plan).renews).every is not null then
        follows := metered._next_lot(lot);
        follows.granted_seq := at_seq;
        follows.last_seq := at_seq;
        if exists (select from metered.lot_rows y where y.scope = lot.scope and y.reference = follows.reference) then
            follows.reference := null;
        end if;
        follows.no := metered._note_lot(follows);
        lot.plan.renews := null;
        lot.plan.renew_amount := null;
        update metered.lot_rows y set plan = lot.plan where y.no = lot.no;
    end if;
    return follows.no;
end
$$;

-- Notes a lot that begins later.
create function metered._note_lot(lot metered.lots) returns bigint
language plpgsql volatile
as $$
declare
    made bigint;
begin
    insert into metered.lot_rows (no, granted_at, expires_at, granted_seq, last_seq, amount, rest, roll_cap, roll_no, roll_end, late,
        priority, origin, open, scope, category, reference, fingerprint, pending, starts_at, again, plan, age)
    overriding system value
    values (metered._next_number('lot_rows'), lot.starts_at, lot.expires_at, lot.granted_seq, lot.last_seq, lot.amount, 0, lot.roll_cap,
        case when lot.roll_cap is not null then metered._next_number('lot_rows') end, lot.roll_end, lot.late,
        lot.priority, 'g', false, lot.scope, lot.category, lot.reference, lot.fingerprint, lot.amount, lot.starts_at, metered._again(lot.plan), lot.plan,
        metered._age(null, lot.starts_at, lot.granted_seq))
    on conflict do nothing
    returning no into made;
    if made is null then
        perform metered._collided();
    end if;
    return made;
end
$$;

-- Writes all that is due in a wallet by clk: ends of holds, whose rows it locks, and ends and beginnings
-- of lots. It ends the first max_lots lots (null: all) of those that it could leave to later calls, and
-- those that go on, as far as a caller could draw so many units of them. Where more lines of holds are
-- due than one step writes, those that only give units back are freed as sums, and the rows of holds are
-- left to sweeps, as _free_in_sum does it. A call fails where more of the others are due (_refuse_behind).
-- tip is the last entry, under the wallet's lock. The result is the last entry after that, with the
-- lots_end of the next one, without the caller, operation and note of tip. lowered are the thresholds
-- that are reported after these ends and the caller's own entry, if it has judged them (_advance).
create function metered._settle_lowered(tip metered.ledger, clk timestamptz, max_lots int, units bigint,
    lowered jsonb, wait_ms int) returns metered.ledger
language plpgsql volatile
as $$
declare
    own       metered.ledger := metered._own_entry(tip, tip.at);
    until     timestamptz := greatest(clk, tip.at);
    nos       bigint[] := '{}';    -- holds whose lines are ended: null for sums
    due       record;
    turns     record;
    instant   timestamptz;         -- of lines, of which a step writes only some
    after     record;
    before    text;
    unwritten metered.unwritten[];
    most      int := metered._events_per_step();
    called    boolean := max_lots = metered._ends_per_call();      -- by no step
begin
    turns := metered._turns_until(tip, clk, most);
    if called and (turns.until < clk or turns.nos is not null) then
        perform metered._refuse_behind(tip.scope);
    end if;
    if tip.next_due <= clk and turns.nos is null then
        nos := array(select x.hold from metered.hold_lines x
            where x.scope = tip.scope and x.open > 0 and x.due >= tip.next_due and x.due <= clk
            order by x.due limit case when tip.next_due > '-infinity' then most + 1 end);
        if called and cardinality(nos) > most and metered._lines_until(tip, clk) < clk then
            perform metered._refuse_behind(tip.scope);
        end if;
        before := metered._bound_lock_wait(wait_ms);
        if cardinality(nos) > most and tip.next_due > '-infinity' then
            if metered._one_snapshot() then     -- it may not see that a hold was extended: then this is 40001
                perform from metered.holds h where h.no = any (array(
                    select x.hold from metered.hold_lines x where x.scope = tip.scope
                      and x.open > 0 and x.due >= tip.next_due and x.due <= clk))
                order by h.no for share;
            end if;
            nos := null;
        else
            nos := array(select y.no from (
                select h.no from metered.holds h where h.no = any (nos) and (h.due <= clk) is true
                order by h.no for no key update) y);
            perform metered._end_rows(nos, clk, (metered._by_system()).note, false);
        end if;
        before := metered._unbound_lock_wait(before);
        if lowered is not null then
            select y.crossed into own.crossed from metered.ledger y where y.scope = tip.scope and y.seq = tip.seq;
        end if;
    end if;
    due := metered._load_due(tip, clk, max_lots, units, nos, nos is null, turns.nos);
    if turns.nos is not null then
        until := (select max(metered._turn_at(x)) from unnest(due.lots) x
            where x.no = any (turns.nos));
    elsif cardinality(due.lines) > most then
        if called then
            perform metered._refuse_behind(tip.scope);
        end if;
        instant := due.lines[most + 1].due;
        clk := (select max(l.due) from unnest(due.lines) l where l.due < instant);
        if clk is null then
            nos := array(select l.hold from unnest(due.lines) l
                where l.hold is not null order by l.due, l.opened_seq limit most);
            clk := instant;
        end if;
        until := greatest(clk, tip.at);
        due := metered._load_due(tip, clk, max_lots, units, nos, nos is null, null);
    end if;
    if (due.stop is not null or turns.nos is not null) and coalesce(lowered, own.crossed) is not null then
        unwritten := metered._unwritten(tip.scope, greatest(until, tip.at), due.lots);
    end if;
    after := metered._advance(own, until, lowered, unwritten, due.lines, due.lots, due.parts, due.debts,
        due.spent);
    own := after.tip;
    own.lots_end := case when turns.nos is not null then until
        else least(due.stop,
            case when due.stop is null then metered._next_end(tip.scope, until) end,
            (select min(metered._turn_at(x)) from unnest(after.lots) x
             where x.pending + x.rest + x.kept + x.held > 0 and metered._turn_at(x) > until)) end;
    if cardinality(after.entries) = 0 and metered._lags(tip) and own.lots_end > until then
        own.lots_end := tip.lots_end;     -- a caller may write nothing, and the last entry lags. The next charge catches up
    end if;
    if cardinality(after.entries) > 0 then
        own.next_due := metered._write_lines(tip, own, clk, nos is null, due.lines);
        perform metered._write_due(tip, own, after.entries, after.moves, due.lots, after.lots,
            due.parts, after.parts, due.debts, after.debts, after.spent);
        own.others := metered._others(own.scope, own.seq);
    end if;
    own.crossed := nullif(coalesce(lowered, own.crossed), '{}');
    return own;
end
$$;

-- The same for a caller that judges no thresholds before.
create function metered._settle(tip metered.ledger, clk timestamptz, max_lots int, units bigint,
    wait_ms int) returns metered.ledger
language plpgsql volatile
as $$
begin
    return metered._settle_lowered(tip, clk, max_lots, units, null, wait_ms);
end
$$;

-- Writes that lines of holds of a wallet have ended. The rows of lines that came as sums are left to
-- sweeps, with their parts of lots. Returns next_due of the entries, of which entry is the last.
create function metered._write_lines(tip metered.ledger, entry metered.ledger, clk timestamptz, in_sum boolean,
    lines metered.due_line[]) returns timestamptz
language plpgsql volatile
as $$
begin
    if cardinality(lines) = 0 then
        return entry.next_due;
    end if;
    -- Without a join, which can be one that reads all lines of the scope for each of these.
    update metered.hold_lines y set open = 0,
        captured = y.captured + least(y.open, greatest(0, y.at_least - y.captured))
    where y.hold = any (array(select l.hold from unnest(lines) l)) and y.scope = tip.scope;
    return case when tip.next_due = '-infinity' then tip.next_due when entry.held > 0 then
        metered._later_due(tip.scope, case when in_sum then clk + interval '1 microsecond' else tip.next_due end, clk) end;
end
$$;

-- Appends entries that no caller asked for. entry is the last entry, and has lots_end and next_due of
-- all.
create function metered._append_all(entry metered.ledger, entries metered.ledger[]) returns void
language plpgsql volatile
as $$
declare
    made int;
    was  bigint := metered._others(entry.scope, entries[1].seq - 1);
begin
    if cardinality(entries) > 0 then
        insert into metered.ledger ({entry columns})
        select {entry of x: seq = x.seq, lots_end = entry.lots_end, next_due = entry.next_due,
            others = coalesce(was, 0) + count(*) filter (where x.kind not in ('c', 'u')) over (order by x.seq)}
        from unnest(entries) x on conflict do nothing;
        get diagnostics made = row_count;
        if made < cardinality(entries) then
            perform metered._collided();
        end if;
        perform metered._mark_freed(entry.scope);
    end if;
end
$$;

-- Writes moves of lots, and these lots after them. A lot of a move that has no row yet has its
-- number in nos.
create function metered._write_moves(of_scope text, moves metered.lot_moves[], lots metered.lots[],
    nos bigint[]) returns void
language plpgsql volatile
as $$
begin
    insert into metered.lot_moves (scope, seq, nth, lot, kind, amount, version,
        rest, drawn, held, kept)
    select of_scope, m.seq, m.nth, case when m.lot < 0 then nos[-m.lot] else m.lot end, m.kind,
        m.amount, m.version, m.rest, m.drawn, m.held, m.kept
    from unnest(moves) m;
    update metered.lot_rows y set pending = x.pending, open = x.open, keeps = x.keeps,
        granted_at = x.granted_at, granted_seq = x.granted_seq,
        lapsed = x.lapsed, untold = x.untold,
        revoked = x.revoked, rolled = x.rolled, roll_cap = x.roll_cap, again = x.again,
        plan = x.plan, age = x.age
    from unnest(lots) x
    where y.no = x.no
      and (y.pending, y.open, y.keeps, y.lapsed, y.revoked, y.rolled, y.plan) is distinct from
        (x.pending, x.open, x.keeps, x.lapsed, x.revoked, x.rolled, x.plan);
end
$$;

-- Appends entries after tip, and the moves of their lots, which were lots before and are after them. Those that have no row get one.
-- entry is the last entry, and has lots_end and next_due of all.
create function metered._write_due(tip metered.ledger, entry metered.ledger, entries metered.ledger[],
    moves metered.lot_moves[], lots metered.lots[], after metered.lots[],
    parts metered.lot_holds[], parts_after metered.lot_holds[],
    debts metered.lot_debts[], debts_after metered.lot_debts[], spent bigint) returns void
language plpgsql volatile
as $$
declare
    old  int := cardinality(lots);
    nos  bigint[] := '{}';         -- of lots by place
    made int;
begin
    for pos in 1..cardinality(after) loop
        nos := nos || case when after[pos].no < 0 then metered._next_number('lot_rows') else after[pos].no end;
        if after[pos].from_lot < 0 then
            after[-after[pos].from_lot].roll_no := nos[pos];
        end if;
    end loop;
    perform metered._append_all(entry, entries);
    perform metered._write_moves(tip.scope, moves, array(select after[n]
        from generate_series(1, old) n
        where after[n].version is distinct from lots[n].version), nos);
    insert into metered.lot_rows (no, granted_at, expires_at, granted_seq, last_seq, amount, rest, lapsed, rolled, untold, roll_cap, roll_no, roll_end,
        late, from_lot, priority, origin, open, scope, category, reference, fingerprint, pending, starts_at, again, plan, keeps, age)
    overriding system value
    select nos[n], x.granted_at, x.expires_at, x.granted_seq, x.granted_seq, x.amount, 0, x.lapsed, x.rolled, x.untold, x.roll_cap,
        coalesce(x.roll_no, case when x.roll_cap is not null then metered._next_number('lot_rows') end), x.roll_end,
        x.late, case when x.from_lot < 0 then nos[-x.from_lot] else x.from_lot end, x.priority, x.origin, x.open, x.scope, x.category,
        case when 0 = (select count(*) from metered.lot_rows y where y.scope = x.scope and y.reference = x.reference) then x.reference end,
        x.fingerprint, x.pending, x.starts_at, x.again, x.plan, x.keeps, x.age
    from unnest(after[old + 1:]) with ordinality x, lateral (select (old + x.ordinality)::int as n) p on conflict do nothing;
    get diagnostics made = row_count;
    if made < cardinality(after) - old then
        perform metered._collided();
    end if;
    if parts is distinct from parts_after then
        delete from metered.lot_holds o where o.scope = tip.scope and o.seq = any (array(select k.seq from unnest(parts) k));
        insert into metered.lot_holds (scope, seq, lot, amount)
        select tip.scope, k.seq, case when k.lot < 0 then nos[-k.lot] else k.lot end, sum(k.amount)::bigint
        from unnest(parts_after) k where k.amount > 0 group by 2, 3;
    end if;
    perform metered._write_debts(tip.scope, debts, debts_after);
    if metered._lags(tip) or metered._lags(entry) then
        delete from metered.lot_holds k where k.scope = tip.scope and k.seq = 0;
        if metered._lags(entry) and spent > 0 then
            perform metered._owe(tip.scope, spent);
        end if;
    end if;
end
$$;

-- _settle_lowered for an entry that is to be written: entry is the result of _next_entry.
create function metered._after_due_lowered(entry metered.ledger, units bigint, lowered jsonb, wait_ms int)
returns metered.ledger
language plpgsql volatile
as $$
declare
    tip metered.ledger := entry;
begin
    if entry.lots_end <= entry.at or entry.lots_end is not null and entry.next_due <= entry.at then
        tip.seq := entry.seq - 1;
        select y.at into tip.at from metered.ledger y where y.scope = entry.scope and y.seq = tip.seq;
        tip := metered._settle_lowered(tip, least(entry.at, metered.clock()), metered._ends_per_call(), units,
            lowered, wait_ms);
        entry.seq := tip.seq + 1;
        entry.at := greatest(entry.at, tip.at);
        entry.spent := tip.spent;
        entry.credited := tip.credited;
        entry.held := tip.held;
        entry.next_due := tip.next_due;
        entry.lots_end := tip.lots_end;
        entry.crossed := tip.crossed;
    end if;
    entry.crossed := nullif(coalesce(lowered, entry.crossed), '{}');
    return entry;
end
$$;

-- The same for a caller that judges no thresholds before.
create function metered._after_due(e metered.ledger, units bigint, wait_ms int) returns metered.ledger
language plpgsql volatile
as $$
begin
    return metered._after_due_lowered(e, units, null, wait_ms);
end
$$;
