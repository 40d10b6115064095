-- Wallets: scopes whose credit is in lots. Its last entry has its balance, as of any scope:
-- credited - spent + refunded - held units are left. If that is 0 or more, it is the sum of the
-- rests of its lots. If it is less, no lot has a rest, and the missing units are overdraft, which
-- the next credit pays back.
--
-- A lot that pays for some uses has its units as kept, which are no credit of the ledger: see
-- uses.sql.
--
-- An entry of a wallet has lots_end, before which none of its lots ends that has a rest or is held.
-- A call that spends, holds or credits judges, writes the ends that are due (duelots.sql), writes
-- the entry, and then names its lots. The entry comes first: the guard lets one writer make it, so
-- lots need no lock of their own.

-- Lots: the credit of a wallet, in parts that end. The wallet's balance is in its ledger, as of any
-- scope. This says where it is from. amount = rest + drawn + held + lapsed + revoked + rolled +
-- pending + kept.
create view metered.lots as
select r.no,                                    -- the number of the lot
    r.granted_at,                               -- when it was granted
    r.expires_at,                               -- nothing is drawn of it from here
                                                -- on, or infinity: it never ends
    r.granted_seq,                              -- the entry that credited it
    coalesce(m.seq, r.last_seq) as last_seq,    -- the last entry that moved units of it
    r.amount,                                   -- units that it was granted with
    coalesce(m.rest, r.rest) as rest,           -- units of amount that can be drawn
    coalesce(m.drawn, r.drawn) as drawn,        -- units of amount that were spent, less refunds
    coalesce(m.held, r.held) as held,           -- units of amount in open holds and leases
    r.lapsed,                                   -- units of amount that were left
                                                -- at its end, or refunded later
    r.revoked,                                  -- units of amount that were taken back
    r.rolled,                                   -- units of amount that rolled over into another lot
    r.untold,                                   -- units of lapsed that no
                                                -- subscriber has heard of yet
    r.roll_cap,                                 -- units that roll over at its
                                                -- end at most, or null: none
    r.roll_no,                                  -- the number that one will have
    r.roll_end,                                 -- when that lot ends, or infinity: never
    r.late,                                     -- how long units last that are refunded
                                                -- after its end: 0 for ever, null not at all
    r.from_lot,                                 -- the lot that its units were in before
    r.priority,                                 -- a lot of a lower priority is drawn first
    r.origin,                                   -- g granted, c credited without a grant,
                                                -- r rolled over, l given back late
    r.open,                                     -- something can be drawn of it
                                                -- for anything, but for its end
    r.scope,                                    -- the wallet
    r.category,                                 -- of the caller: paid, promotional
    r.reference,                                -- of the caller, once in a wallet
    r.fingerprint,                              -- of the grant under the reference:
                                                -- a version byte and a SHA-256
    r.pending,                                  -- units of amount that nobody
                                                -- can draw before starts_at
    r.starts_at,                                -- when it begins, or began, or null: with the grant
    r.again,                                    -- its units roll over again, or share a cap:
                                                -- no call leaves its end to a later one
    r.plan,                                     -- how it renews and rolls over,
                                                -- and what it pays for, or null
    coalesce(m.kept, r.kept) as kept,           -- units of amount that pay for the uses of its plan
                                                -- alone. The ledger has them when a use takes them
    r.keeps,                                    -- something can be drawn of it
                                                -- for its uses, but for its end
    m.version,                                  -- of its newest move, or null: none has its units
    r.age                                       -- when its units were granted first, in
                                                -- microseconds, the entry of that grant,
                                                -- and its own: the oldest is drawn first
from metered.lot_rows r left join lateral (
    select x.seq, x.version, x.rest, x.drawn, x.held, x.kept from metered.lot_moves x
    where x.lot = r.no and x.version is not null order by x.version desc limit 1) m on true;

-- A call of 0.1.0 that waited for its wallet while the upgrade was committed writes to the table
-- that had this name. It runs again.
create function metered._meet_upgrade() returns trigger
language plpgsql volatile
as $$
begin
    raise exception 'the schema was upgraded while the call waited' using errcode = '40001';
end
$$;

create trigger lots_of_before instead of insert or update or delete on metered.lots
    for each row execute function metered._meet_upgrade();

-- Writes a move of a lot of a wallet (_moved). Of overdraft (lot 0) it writes the move alone.
create function metered._move_lot(of_scope text, at_seq bigint, nth int, of_lot bigint,
    as_kind "char", units bigint, rest bigint, kept bigint) returns void
language plpgsql volatile
as $$
declare
    its_lot metered.lots;
    moving  record;
begin
    select * into its_lot from metered.lots y where y.no = of_lot and of_lot > 0;
    moving := metered._moved(its_lot, of_scope, at_seq, nth, as_kind, units, rest, kept);
    perform metered._write_moves(of_scope, array[moving.move], array[moving.lot], null);
end
$$;

-- The balance of a wallet, by its last entry. Inlined wherever it stands.
create function metered._balance(t metered.ledger) returns bigint
language sql immutable
as $$
    select t.credited - t.spent + t.refunded - t.held
$$;

-- Whether a time is later by that, or the same if it is 0: none of its parts is negative, as in a
-- month less 30 days. Inlined wherever it stands.
create function metered._goes_on(for_so_long interval) returns boolean
language sql immutable
as $$
    select for_so_long between interval '0' and interval '36525 days'
        and least(extract(year from for_so_long), extract(month from for_so_long),
        extract(day from for_so_long), extract(hour from for_so_long),
        extract(minute from for_so_long), extract(second from for_so_long)) >= 0
$$;

-- The units of a lot that roll over at its end. Inlined wherever it stands.
create function metered._rolls(l metered.lots) returns bigint
language sql stable
as $$
    select case when l.roll_cap is not null then least(l.rest + l.kept, l.roll_cap) else 0 end
$$;

-- Whether the end of a lot with that plan depends on other lots, or makes a lot that ends in turn.
-- No call leaves such an end to a later one.
create function metered._again(plan metered.lot_plan) returns boolean
language sql immutable
as $$
    select coalesce(plan.roll_again <> 0, false) or coalesce(plan.roll_shared, false)
$$;

-- The plan of a lot that takes over units of another one.
create function metered._plan_on(lot metered.lots) returns metered.lot_plan
language plpgsql stable
as $$
declare
    plan metered.lot_plan := lot.plan;
begin
    plan.renews := null;
    plan.renew_amount := null;
    plan.of_reference := coalesce(lot.reference, plan.of_reference);
    if plan.roll_again > 0 then
        plan.roll_again := plan.roll_again - 1;
    end if;
    return case when plan is not distinct from row(null, null, null, null, null, null, null, null,
            null)::metered.lot_plan then null else plan end;
end
$$;

-- The end of the lot into which one rolls over that ends at ends.
create function metered._roll_end(ends timestamptz, plan metered.lot_plan, roll_for interval)
    returns timestamptz
language plpgsql stable
as $$
begin
    if ends = 'infinity' then     -- it does not end, so nothing rolls over
        return ends;
    elsif (plan.roll_to).every is not null then
        return (metered._period_at(plan.roll_to, ends))[2];
    end if;
    return case when roll_for = interval '0' then 'infinity' else ends + roll_for end;
end
$$;

-- Takes up to so many units of the lots of a wallet, in their order, as the entry at_seq does: for
-- a charge (t), or for a hold (h). nth is the number of its next move. ended is null, or the time
-- of an entry that lags: lots that ended by then are passed over. With use, lots for it pay too, as
-- far as their units were applied.
create function metered._take_lots(of_scope text, at_seq bigint, units bigint, as_kind "char",
    ended timestamptz, use text, inout nth int, out taken bigint)
language plpgsql volatile
as $$
declare
    its_lot      record;
    next_for_use record;                       -- the next one for the use
    passed       record;
    part         bigint;
    at           timestamptz := (select e.at
        from metered.ledger e where use is not null and e.scope = of_scope and e.seq = at_seq);
    first        int := -2147483648;           -- where the next lot is: after the last one,
                                               -- whose index entry is still in the way
    ends         timestamptz := '-infinity';
    after        bigint[] := '{}';
begin
    taken := 0;
    while taken < units loop
        if use is not null then
            select y.no, y.priority, y.expires_at, y.age, y.version, y.rest, y.drawn, y.held, y.kept
            into next_for_use
            from metered.lots y
            where y.scope = of_scope
                and y.keeps
                and (y.priority, y.expires_at, y.age) > (first, ends, after)
              and y.expires_at > at and (y.plan).uses @> array[use]
            order by y.priority, y.expires_at, y.age limit 1;
        end if;
        if ended is not null then
            passed := metered._pass_ended(of_scope, first, ends, after, ended);
            first := passed.priority;
            ends := passed.ends;
            after := passed.after;
        end if;
        select y.no, y.priority, y.expires_at, y.age, y.version, y.rest, y.drawn, y.held, y.kept
        into its_lot
        from metered.lots y
        where y.scope = of_scope
            and y.open
            and (y.priority, y.expires_at, y.age) > (first, ends, after)
        order by y.priority, y.expires_at, y.age limit 1;
        if use is not null then
            if next_for_use.rest > 0
                and (its_lot.no is null
                    or (next_for_use.priority, next_for_use.expires_at,
                        next_for_use.age) < (its_lot.priority, its_lot.expires_at,
                        its_lot.age)) then
                its_lot := next_for_use;
            end if;
        end if;
        exit when its_lot.no is null;
        part := least(its_lot.rest, units - taken);
        insert into metered.lot_moves (scope, seq, nth, lot, kind, amount, version, rest, drawn,
            held, kept)
        values (of_scope, at_seq, nth, its_lot.no, as_kind, part, coalesce(its_lot.version, 0) + 1,
            its_lot.rest - part,
            its_lot.drawn + case when as_kind = 't' then part else 0 end,
            its_lot.held + case when as_kind = 'h' then part else 0 end, its_lot.kept);
        if part = its_lot.rest + its_lot.kept then
            update metered.lot_rows y set open = false, keeps = false where y.no = its_lot.no;
        end if;
        if as_kind = 'h' then
            insert into metered.lot_holds (scope, seq, lot, amount)
            values (of_scope, at_seq, its_lot.no, part);
        end if;
        taken := taken + part;
        nth := nth + 1;
        first := its_lot.priority;
        ends := its_lot.expires_at;
        after := its_lot.age;
    end loop;
end
$$;

-- The place in the order of lots before the next one that has not ended: null if all have. It reads
-- two of each priority.
create function metered._pass_ended(of_scope text, from_priority int, from_end timestamptz,
    from_age bigint[], ended timestamptz,
    out priority int, out ends timestamptz, out after bigint[])
language plpgsql stable
as $$
begin
    priority := from_priority;
    ends := greatest(from_end, ended);
    after := case when from_end > ended then from_age else array[9223372036854775807] end;
    loop
        perform from metered.lot_rows y
        where y.scope = of_scope
            and y.open
            and y.priority = _pass_ended.priority
            and (y.expires_at, y.age) > (ends, after)
        order by y.priority, y.expires_at, y.age limit 1;
        exit when found;
        priority := (select y.priority
            from metered.lot_rows y
            where y.scope = of_scope and y.open and y.priority > _pass_ended.priority
            order by y.priority, y.expires_at, y.age limit 1);
        exit when priority is null;
        ends := ended;
        after := array[9223372036854775807];
    end loop;
end
$$;

-- Says of which lots the units of an entry are that was just written: of a charge (t), or of a hold
-- (h). before is the balance before it, and units beyond it are overdraft. It is null if the wallet
-- lags: then the rests of its lots decide. use is null, or a use to which units of lots were
-- applied.
create function metered._use_lots(of_scope text, at_seq bigint, units bigint, before bigint,
    as_kind "char", use text) returns void
language plpgsql volatile
as $$
declare
    covered bigint := greatest(0, least(units, before));
    ended   timestamptz;
    got     record;
begin
    if before is null then
        ended := (select e.at from metered.ledger e where e.scope = of_scope and e.seq = at_seq);
    end if;
    got := metered._take_lots(of_scope, at_seq, units, as_kind, ended, use, 1);
    if before is not null and got.taken < covered then
        raise exception 'the lots of a wallet do not add up to its balance'
            using errcode = 'XX001', detail = of_scope;
    end if;
    covered := got.taken;   -- more than the balance, where lots of a
                            -- use pay in a wallet that is overdrawn
    if covered < units then
        insert into metered.lot_moves (scope, seq, nth, lot, kind, amount)
        values (of_scope, at_seq, got.nth, 0, as_kind, units - covered);
        if as_kind = 'h' then
            insert into metered.lot_holds (scope, seq, lot, amount)
            values (of_scope, at_seq, 0, units - covered);
        else
            perform metered._owe_use(of_scope, at_seq, units - covered);
            if before is null then
                perform metered._owe(of_scope, units - covered);
            end if;
        end if;
    end if;
end
$$;

-- The age of a lot that the entry at_seq grants, or whose units were in of_lot before.
create function metered._age(of_lot bigint, at timestamptz, at_seq bigint) returns bigint[]
language plpgsql stable
as $$
begin
    if of_lot is not null then
        return (select y.age[1:2] || at_seq from metered.lot_rows y where y.no = of_lot);
    end if;
    return array[(extract(epoch from at) * 1000000)::bigint, at_seq, at_seq];
end
$$;

-- Credit becomes a lot: appends the entry after tip, which the wallet's lots are due before, and
-- returns it.
create function metered._append_lot(tip metered.ledger, lot metered.new_lot, plan metered.lot_plan,
    as_origin "char", of_lot bigint, out entry metered.ledger, out no bigint)
language plpgsql volatile
as $$
declare
    general boolean := plan.uses is null;
begin
    entry := metered._lot_entry(tip, case when general then 'd' else 's' end, lot.amount,
        case when general then lot.amount else 0 end);
    entry.lots_end := least(coalesce(tip.lots_end, 'infinity'), lot.expires_at);
    -- a rollover brings no units
    if entry.crossed is not null and of_lot is null and general then
        entry.crossed := metered._rearmed(entry);
    end if;
    perform metered._append(entry);
    insert into metered.lot_rows (no, granted_at, expires_at, granted_seq, last_seq, amount, rest,
        roll_cap, roll_no, roll_end, late, from_lot,
        priority, origin, open, scope, category, reference, fingerprint, again, plan, keeps, age)
    overriding system value
    values (metered._next_number('lot_rows'), entry.at, lot.expires_at, entry.seq, entry.seq,
        lot.amount, 0, lot.roll_cap,
        case when lot.roll_cap is not null then metered._next_number('lot_rows') end,
        case when lot.roll_cap is not null
            then metered._roll_end(lot.expires_at, plan, lot.roll_for) end, lot.late, of_lot,
        lot.priority, as_origin, general, tip.scope, lot.category, lot.reference, lot.fingerprint,
        metered._again(plan), plan, not general, metered._age(of_lot, entry.at, entry.seq))
    on conflict do nothing
    returning lot_rows.no into _append_lot.no;
    if _append_lot.no is null then
        perform metered._collided();
    end if;
    perform metered._move_lot(tip.scope, entry.seq, 1, no, 'd', lot.amount,
        case when general then lot.amount else 0 end,
        case when general then 0 else lot.amount end);
end
$$;

-- The same, and pays an overdraft back at once.
create function metered._add_lot(tip metered.ledger, lot metered.new_lot, plan metered.lot_plan,
    as_origin "char", of_lot bigint, out entry metered.ledger, out no bigint)
language plpgsql volatile
as $$
declare
    owed bigint := metered._debt(tip);
    made record;
begin
    made := metered._append_lot(tip, lot, plan, as_origin, of_lot);
    entry := made.entry;
    no := made.no;
    perform metered._pay_back(entry, entry.seq, 1, array[no], owed);
end
$$;

-- Takes units of a lot (_taken). Appends the entry after tip, and returns it.
create function metered._take_units(tip metered.ledger, lot metered.lots, units bigint,
    as_kind "char") returns metered.ledger
language plpgsql volatile
as $$
declare
    step record;
begin
    step := metered._taken(tip, lot, units, as_kind);
    perform metered._append(step.tip);
    perform metered._write_moves(tip.scope, array[step.move], array[step.lot], null);
    return step.tip;
end
$$;

-- An entry after tip that no caller asked for, without the caller's marks.
create function metered._own_entry(tip metered.ledger, clk timestamptz) returns metered.ledger
language plpgsql stable
as $$
begin
    tip.at := greatest(clk, tip.at);
    tip.ref := null;
    tip.hold := null;
    tip.operation_tenant := null;
    tip.operation := null;
    tip.note := (metered._by_system()).note;
    return tip;
end
$$;
