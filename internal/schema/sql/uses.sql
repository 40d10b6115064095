-- Lots that pay for some uses alone. A charge or a hold names its use in its note.
--
-- Such a lot has its units as kept. They are no credit of the ledger, so no other balance, limit or
-- lapse counts them. They pay an overdraft that was drawn for their uses: see debts.sql. A call for
-- a use credits as many as it takes of these lots, in one entry (apply), and then charges the whole
-- amount like any call. The applied units are rests of their lots in between, so the order of lots
-- is the same for all. Units that a hold frees, or a refund gives back, go back to kept by a later
-- entry (_taken), as units of a lot that has ended lapse. What happens to kept units moves no units
-- of the ledger: its entries are of the kind s, and the moves say what they did.

-- Whether these are uses as a plan has them.
create function metered._sound_uses(uses text[]) returns boolean
language plpgsql immutable
as $$
begin
    return cardinality(uses) between 1 and 16 and uses = array(
        select distinct x collate "C"
        from unnest(uses) x
        where octet_length(x) between 1 and 255 order by x collate "C");
end
$$;

-- A lot for readers, who count kept units as its rest.
create function metered._as_rest(lot metered.lots) returns metered.lots
language plpgsql immutable
as $$
begin
    lot.rest := lot.rest + lot.kept;
    lot.kept := 0;
    return lot;
end
$$;

-- The units of lots for a use, as they are after all that is due.
create function metered._kept_for(tip metered.ledger, use text, clk timestamptz) returns bigint
language plpgsql stable
as $$
begin
    return (select coalesce(sum(x.rest), 0)
        from metered._lots_now(tip, clk, null) x where (x.plan).uses @> array[use]);
end
$$;

-- The limits of a charge for a use, of which those of a lifetime admit so many units more. stood
-- are the units that count without it: if these are more than a limit admits, lots for the use pay
-- all the same.
create function metered._raised(limits metered.charge_limit[], units bigint, stood bigint)
    returns metered.charge_limit[]
language plpgsql immutable
as $$
begin
    for i in 1..coalesce(cardinality(limits), 0) loop
        if limits[i].win = interval '0' then
            limits[i].max := least(9223372036854775807,
                greatest(limits[i].max, stood)::numeric + units);
        end if;
    end loop;
    return limits;
end
$$;

-- The use of limits, and a refusal by them, as if lots for a use raised no limit, and lowered the
-- use instead. taken are the units by charge that lowered it already.
create function metered._told_use(charges metered.new_charge[], raised metered.new_charge[],
    taken bigint[], inout used bigint[], inout refused jsonb)
language plpgsql immutable
as $$
declare
    nth  int := 0;
    more bigint[] := '{}';     -- by limit
begin
    for i in 1..cardinality(charges) loop
        for j in 1..coalesce(cardinality(charges[i].limits), 0) loop
            nth := nth + 1;
            more[nth] := case when charges[i].limits[j].win = interval '0'
                then raised[i].limits[j].max - charges[i].limits[j].max
                    - coalesce(taken[i], 0) else 0 end;
        end loop;
    end loop;
    for nth in 1..coalesce(cardinality(used), 0) loop
        used[nth] := used[nth] - more[nth];
    end loop;
    if refused -> 0 ? 'limit' then
        refused := (select jsonb_agg(x.r || jsonb_build_object('used',
                    (x.r ->> 'used')::bigint - more[1 + (x.r ->> 'limit')::int]) order by x.n)
            from jsonb_array_elements(refused) with ordinality x(r, n));
    end if;
end
$$;

-- Applies kept units of lots to a charge for a use, as many as it takes of them in the order of all
-- lots, after all that is due. The scope is locked. taken are these units, of the lots nos, and
-- kept all that there are for the use. limits are the charge's from here on, without the thresholds
-- of a lifetime, which are judged here, since applied units lower no use: crossings, and silent if
-- nobody would report them.
create function metered._apply_lots(charge metered.new_charge, clk timestamptz, wait_ms int,
    origin metered.origin,
    out limits metered.charge_limit[], out taken bigint, out nos bigint[], out kept bigint,
    out stood bigint, out crossings jsonb, out silent boolean)
language plpgsql volatile
as $$
declare
    use          text := charge.note ->> 'use';
    entry        metered.ledger := metered._entry_for_write(charge.scope);
    was          bigint := entry.seq;
    units        bigint := charge.amount;      -- that no lot has paid for
    parts        bigint[] := '{}';
    next_for_use metered.lots;            -- the next lot for the use
    next_for_all metered.lots;            -- the next one for anything
    passed       record;
    crossing     record;
    lifetimes    metered.charge_limit[];
begin
    limits := charge.limits;
    taken := 0;
    nos := '{}';
    kept := 0;
    stood := 0;
    silent := false;
    if entry.lots_end is null or (entry.next_due = '-infinity') is true then
        return;
    elsif entry.lots_end <= greatest(clk, entry.at) or entry.next_due <= clk then
        entry := metered._settle(entry, clk, metered._ends_per_call(), charge.amount, wait_ms);
    end if;
    entry.at := greatest(clk, entry.at);
    stood := case when metered._lags(entry) then metered._lapsing(entry, clk)
        else 0 end - metered._balance(entry);
    kept := (select coalesce(sum(y.kept), 0) from (select x.kept from metered.lots x
        where x.scope = charge.scope
            and x.keeps
            and x.expires_at > entry.at
            and (x.plan).uses @> array[use] order by x.priority, x.expires_at, x.age) y);
    if kept = 0 then
        return;
    end if;
    next_for_all.priority := -2147483648;
    next_for_all.expires_at := '-infinity';
    next_for_all.no := 0;
    next_for_all.age := '{}';
    next_for_use := next_for_all;
    while units > 0 loop
        if next_for_use.kept is null or next_for_use.kept = 0 then
            select y.* into next_for_use from metered.lots y
            where y.scope = charge.scope
                and y.keeps
                and (y.priority, y.expires_at, y.age) > (next_for_use.priority,
                    next_for_use.expires_at, next_for_use.age)
              and y.expires_at > entry.at and (y.plan).uses @> array[use]
            order by y.priority, y.expires_at, y.age limit 1;
            exit when next_for_use.no is null;
        end if;
        if next_for_all.no is not null and coalesce(next_for_all.rest, 0) = 0 then
            if metered._lags(entry) then
                passed := metered._pass_ended(charge.scope, next_for_all.priority,
                    next_for_all.expires_at, next_for_all.age, entry.at);
                next_for_all.priority := passed.priority;
                next_for_all.expires_at := passed.ends;
                next_for_all.age := passed.after;
            end if;
            select y.* into next_for_all from metered.lots y
            where y.scope = charge.scope
                and y.open
                and (y.priority, y.expires_at, y.age) > (next_for_all.priority,
                    next_for_all.expires_at, next_for_all.age)
            order by y.priority, y.expires_at, y.age limit 1;
        end if;
        if (next_for_all.priority, next_for_all.expires_at,
                next_for_all.age) < (next_for_use.priority, next_for_use.expires_at,
                next_for_use.age) then
            units := units - next_for_all.rest;
            next_for_all.rest := 0;
        else
            nos := nos || next_for_use.no;
            parts := parts || least(units, next_for_use.kept);
            taken := taken + least(units, next_for_use.kept);
            units := units - next_for_use.kept;
            next_for_use.kept := 0;
        end if;
    end loop;
    if taken = 0 then
        return;
    end if;
    lifetimes := array(select l::metered.charge_limit
        from unnest(charge.limits) l where l.win = interval '0' and l.thresholds is not null);
    if cardinality(lifetimes) > 0 and (charge.amount > taken or entry.seq > was) then
        crossing := metered._cross_thresholds(array[row(charge.scope, null, charge.amount - taken,
                    case when charge.held > 0 then charge.amount - taken else 0 end, lifetimes,
                null, null, null, null)::metered.new_charge],
            array_fill(stood - entry.held, array[cardinality(lifetimes)]), array[entry.held],
            entry.at, array[entry]);
        entry.crossed := (crossing.tips[1]).crossed;
        crossings := crossing.crossings;
        silent := crossing.silent;
        if silent then
            return;
        end if;
    end if;
    limits := array(select row(l.max, l.win, l.period,
            case when l.win is distinct from interval '0' then l.tell_at end,
        case when l.win is distinct from interval '0' then l.thresholds end,
        l.telling)::metered.charge_limit
        from unnest(metered._raised(charge.limits, 0, stood)) with ordinality l(max, win, period,
            tell_at, thresholds, telling, n) order by l.n);
    entry := metered._lot_entry(entry, 'd', taken, taken);
    entry.ref := null;
    entry.hold := null;
    entry.operation_tenant := origin.tenant;
    entry.operation := origin.operation;
    entry.note := charge.note;
    perform metered._append(entry);
    for i in 1..cardinality(nos) loop
        perform metered._move_lot(charge.scope, entry.seq, i, nos[i], 'a', parts[i], parts[i], -parts[i]);
    end loop;
end
$$;

-- _write_charges where some of the charges are for a use. The scopes are locked, and clk was read
-- under the locks. A refusal takes all back.
create function metered._write_for_uses(charges metered.new_charge[], ahead interval, wait_ms int,
    origin metered.origin, mode text, hold metered.hold_terms, standing boolean, clk timestamptz)
returns metered.charged
language plpgsql volatile
as $$
declare
    asked    metered.new_charge[] := charges;
    raised   metered.new_charge[] := charges;
    taken    bigint[];
    told     jsonb[];     -- crossings by charge
    nos      bigint[] := '{}';
    applied  record;
    its_lot  metered.lots;
    told_use record;
    before   text;
    posted   metered.charged;
begin
    hold.at := clk;
    begin
        if cardinality(charges) > 1 then    -- rows of due holds are locked all at once, in order
            before := metered._bound_lock_wait(wait_ms);
            perform from metered.holds h where h.no = any (array(
                select x.hold from unnest(asked) c, lateral (select y.hold from metered.hold_lines y
                    where y.scope = c.scope and y.open > 0 and y.due <= clk
                    order by y.due limit 500) x)) order by h.no for no key update;
            before := metered._unbound_lock_wait(before);
        end if;
        for i in 1..cardinality(charges) loop
            continue when (charges[i].note ? 'use'
                and charges[i].amount > 0
                and charges[i].scope is not null) is not true;
            applied := metered._apply_lots(charges[i], clk, wait_ms, origin);
            if applied.silent then
                posted.refused := '[{"crossing": true}]';
                raise exception using errcode = 'MT100';
            end if;
            charges[i].limits := applied.limits;
            raised[i].limits := metered._raised(raised[i].limits, applied.kept, applied.stood);
            taken[i] := applied.taken;
            told[i] := applied.crossings;
            nos := nos || applied.nos;
        end loop;
        posted := metered._write_charges(charges, ahead, wait_ms, origin, 'applied', hold,
            standing);
        if posted.refused is not null then
            raise exception using errcode = 'MT100';
        end if;
        for i in 1..cardinality(charges) loop
            if told[i] is not null then
                posted.crossed := coalesce(posted.crossed, '[]')
                    || metered._crossed_at(told[i], array[posted.seqs[i]]);
            end if;
        end loop;
        for its_lot in select y.*
            from metered.lots y
            where y.no = any (nos) and y.rest > 0 order by y.age loop
            perform metered._take_units(metered._own_entry(metered._entry_for_write(its_lot.scope),
                    clk), its_lot, its_lot.rest, 'b');
        end loop;
    exception when sqlstate 'MT100' then
        null;
    end;
    posted.at := clk;
    told_use := metered._told_use(asked, raised, taken, posted.used, posted.refused);
    posted.used := told_use.used;
    posted.refused := told_use.refused;
    if mode = 'raise' and posted.refused -> 0 ? 'crossing' then
        perform metered._refuse_unreported();
    elsif mode = 'raise' and posted.refused is not null then
        raise exception 'a limit refuses the charge'
            using errcode = 'MT001', detail = posted.refused;
    end if;
    return posted;
end
$$;
