-- The state of a scope without entries: everything 0, before all time.
create function metered._fresh(of_scope text) returns metered.ledger
language plpgsql immutable
as $$
declare
    entry metered.ledger;
begin
    entry.scope := of_scope;
    entry.seq := 0;
    entry.at := '-infinity';
    entry.spent := 0;
    entry.refunded := 0;
    entry.credited := 0;
    entry.held := 0;
    entry.epoch := 0;
    return entry;
end
$$;

-- The last entry of a scope, for a reader.
create function metered._last_entry(of_scope text) returns metered.ledger
language plpgsql stable
as $$
declare
    tip metered.ledger;
begin
    select * into tip from metered.ledger l where l.scope = of_scope order by l.seq desc limit 1;
    if not found then
        return metered._fresh(of_scope);
    end if;
    return tip;
end
$$;

-- Fails, for a writer whose view of a scope is stale, with a serialization failure,
-- which callers' retry loops retry.
create function metered._collided() returns void
language plpgsql
as $$
begin
    raise exception 'could not serialize access: the scope has a newer entry'
        using errcode = '40001';
end
$$;

-- The last entry of a scope, for a writer that holds the scope's lock. FOR KEY
-- SHARE closes the hole that a purge opens in the guard: it fails where an old
-- snapshot still sees an entry that is deleted by now, whose successor, deleted
-- too, would no longer collide. That holds for entry 1 as well, since a purge puts
-- a new copy of it in the old one's place. At READ COMMITTED deleted entries are
-- passed over instead, until none is left. Hence the second look.
create function metered._entry_for_write(of_scope text) returns metered.ledger
language plpgsql volatile
as $$
declare
    tip metered.ledger;
begin
    select * into tip from metered.ledger l
    where l.scope = of_scope order by l.seq desc limit 1 for key share;
    if not found then
        return metered._first_for_write(of_scope);
    elsif tip.tallied then
        return metered._fold(tip, null);
    end if;
    return tip;
end
$$;

-- The beginning of a scope, for a writer that found no last entry. If it has entries
-- after all, the writer has a stale view of it.
create function metered._first_for_write(of_scope text) returns metered.ledger
language plpgsql volatile
as $$
begin
    if exists (select from metered.ledger l where l.scope = of_scope) then
        perform metered._collided();
    end if;
    if exists (select from metered.cell c where c.one) then
        perform metered._refuse_moved(of_scope);
    end if;
    return metered._fresh(of_scope);
end
$$;

-- The last entry at or before moment in the chain whose last entry is tip_seq: seq 0
-- if the chain begins after moment, null if a purge took the answer away. Entries of an
-- earlier epoch count as made no later than the repair that ended it: that
-- follows from looking in the newest epoch first.
create function metered._base(of_scope text, tip_seq bigint, tip_epoch int, t timestamptz,
    out seq bigint, out spent bigint, out refunded bigint)
language plpgsql stable
as $$
begin
    for e in reverse tip_epoch..0 loop
        select base.seq, base.spent, base.refunded into _base.seq, _base.spent, _base.refunded
        from {base: scope = of_scope, epoch = e, since = t};
        exit when found;
    end loop;
    if _base.seq > 1 then
        return;
    end if;
    -- A purge keeps entry 1 and then takes whole blocks of 16, entry 2 first.
    if tip_seq > 16 and not exists (select from metered.ledger l
            where l.scope = of_scope and l.seq = 2) then
        seq := null;
    elsif _base.seq is null then
        seq := 0;
        spent := 0;
        refunded := 0;
    end if;
end
$$;

-- Refunds of the charges after entry after_seq, in the chain that ends with
-- tip_seq.
create function metered._refunds_after(of_scope text, tip_seq bigint, after_seq bigint)
    returns bigint
language plpgsql stable
as $$
declare
    top int := 0;
begin
    while tip_seq >> (4 * top) > 15 loop
        top := top + 1;
    end loop;
    -- The aggregate inside lateral leaves the planner no join to choose.
    return (
        select coalesce(sum(x.amount), 0)
        -- A limit, or the planner expects a thousand levels, and compiles (jit).
        from (select generate_series(0, top) limit 16) g(lv),
             lateral (select sum(r.amount) as amount from metered.refund_sum r
              where r.scope = of_scope and r.level = lv
                and r.block > after_seq >> (4 * lv)
                and r.block <= (after_seq >> (4 * lv)) | 15) x);
end
$$;

-- The units that a scope, whose last entry is tip, was charged after since, less the refunds of
-- these charges (used), and the base from which they are counted.
create function metered._spent_since(tip metered.ledger, t timestamptz,
    out used bigint, out base_seq bigint, out base_spent bigint)
language plpgsql stable
as $$
declare
    base record;
begin
    base := metered._base(tip.scope, tip.seq, tip.epoch, t);
    if base.seq is null then
        raise exception 'the window reaches purged entries'
            using errcode = 'MT002', detail = tip.scope;
    end if;
    base_seq := base.seq;
    base_spent := base.spent;
    used := tip.spent - base.spent - case when base.refunded = tip.refunded then 0
        else metered._refunds_after(tip.scope, tip.seq, base.seq) end;
end
$$;

-- Begins an entry after the scope's last one, under its lock.
create function metered._next_entry(of_scope text, key bigint, wait_ms int, origin metered.origin)
    returns metered.ledger
language plpgsql volatile
as $$
declare
    entry metered.ledger;
begin
    {refuse: when = not metered._fits_origin(origin), what = origin};
    if key is null then
        key := metered._scope_key(of_scope);
    end if;
    perform metered._lock_keys(array[key], wait_ms);
    entry := metered._entry_for_write(of_scope);
    entry.seq := entry.seq + 1;
    entry.at := greatest(metered.clock(), entry.at);
    entry.ref := null;
    entry.hold := null;
    entry.operation_tenant := origin.tenant;
    entry.operation := origin.operation;
    entry.note := origin.note;
    return entry;
end
$$;

-- Refuses an amount that makes no entry.
create function metered._no_amount() returns void
language plpgsql
as $$
begin
    raise exception 'a charge is of 1 to 2^53 units of a scope of 1 to 255 bytes'
        using errcode = '23514';
end
$$;

-- others of an entry, or null if it is gone. In SQL it would be planned at each call.
create function metered._others(of_scope text, of_seq bigint) returns bigint
language plpgsql stable
as $$
begin
    return (select {others: tip = l}
        from metered.ledger l where l.scope = of_scope and l.seq = of_seq);
end
$$;

-- The charges of a scope up to an entry, or up to none (0).
create function metered._charges_upto(of_scope text, of_seq bigint) returns bigint
language sql stable
as $$
    select of_seq - coalesce(metered._others(of_scope, of_seq), 0)
$$;

-- Appends an entry. entry.others is of the entry before. It is looked up in a wallet, whose calls
-- append several, and after an entry of version 1, whose calls may do so while the schema is
-- upgraded. ON CONFLICT, because callers' retry loops do not retry a unique violation.
create function metered._append(e metered.ledger) returns void
language plpgsql volatile
as $$
declare
    marked boolean;
begin
    if e.amount < 1 and e.kind not in ('k', 'z', 's') then
        perform metered._no_amount();
    end if;
    if e.lots_end is not null or e.others = 9223372036854775807 then
        e.others := metered._others(e.scope, e.seq - 1);
    end if;
    e.others := case when e.kind in ('c', 'u') then int8smaller(e.others, e.seq - 1)
        else coalesce(int8smaller(e.others, e.seq - 1), 0) + 1 end;
    insert into metered.ledger values (e.*) on conflict do nothing;
    if not found then
        perform metered._collided();
    elsif e.kind in ('d', 'r', 'l', 'u', 'x', 'k', 's') then
        marked := metered._mark_freed(e.scope);
    end if;
end
$$;

-- Adds credit to a scope: it counts for lifetimes, and for no window. refused, and nothing written,
-- if the scope must exist and does not (see admit). With raising that is SQLSTATE MT001 instead.
create function metered.credit(of_scope metered.scope_name, key bigint, units metered.amount,
    must_exist boolean, wait_ms int, origin metered.origin, raising boolean,
    out seq bigint, out at timestamptz, out refused jsonb)
language plpgsql volatile
as $$
declare
    entry metered.ledger := metered._next_entry(of_scope, key, wait_ms, origin);
begin
    perform metered._refuse_closed(entry);
    if must_exist then
        refused := metered._admit(row(of_scope, key, units, 0, null, null, true, null, null), null,
            false, wait_ms);
        if refused is not null then
            if raising then
                raise exception 'the scope does not exist'
                    using errcode = 'MT001', detail = refused;
            end if;
            return;
        end if;
    end if;
    if entry.lots_end is null then
        entry := metered._after_minima(entry, wait_ms);
        entry.kind := 'd';
        entry.amount := units;
        entry.credited := entry.credited + units;
        entry.crossed := case when entry.crossed is not null then metered._rearmed(entry) end;
        perform metered._append(entry);
    else
        entry := (metered._credit_lot(entry,
                row(units, 'infinity', null, '', 0, null, null, null, null, null)::metered.new_lot,
                null, 'c', wait_ms)).entry;
    end if;
    seq := entry.seq;
    at := entry.at;
end
$$;

-- Refunds part of a charge, or all that is left of it (units is null). status is ok, or says why
-- nothing was written: missing (no such entry), purged, kind (the entry is no charge) or excess
-- (more than remains of the charge). remaining has the units that can still be refunded of it. With
-- raising, a refusal is SQLSTATE MT008 instead, its detail both as JSON.
create function metered.refund(of_scope metered.scope_name, key bigint, charge_seq bigint,
    units metered.units, wait_ms int, origin metered.origin, raising boolean,
    out status text, out remaining bigint, out seq bigint, out at timestamptz, out amount bigint)
language plpgsql volatile
as $$
declare
    entry  metered.ledger := metered._next_entry(of_scope, key, wait_ms, origin);
    charge metered.ledger;
    stays  metered.ledger;  -- e, less the units that lapse at once
    fate   record;
    lapses bigint := 0;
begin
    {refuse: when = not metered._key_fits(key, of_scope) or units = 0, what = refund};
    perform metered._refuse_closed(entry);
    if charge_seq < 0 then
        charge_seq := metered._seq_of_tally(of_scope, charge_seq);
    end if;
    select * into charge from metered.ledger l where l.scope = of_scope and l.seq = charge_seq;
    if entry.seq <= charge_seq then
        status := 'missing';
    elsif charge.seq is null or charge_seq = 1 and entry.seq > 2
          and not exists (select from metered.ledger l where l.scope = of_scope and l.seq = 2) then
        -- Entry 1 outlives a purge, and the sum of its refunds does not.
        status := 'purged';
    elsif charge.kind not in ('c', 'u') then
        status := 'kind';
    else
        remaining := charge.amount - coalesce((select r.amount from metered.refund_sum r
            where r.scope = of_scope and r.level = 0 and r.block = charge_seq), 0);
        amount := coalesce(units, remaining);
        status := case when amount > remaining or remaining = 0 then 'excess' end;
    end if;
    if status is not null then
        {unseen: entry = entry};
        if raising then
            raise exception 'the charge cannot be refunded' using errcode = 'MT008',
                detail = jsonb_build_object('status', status, 'remaining', remaining);
        end if;
        return;
    end if;
    entry := metered._after_minima(entry, wait_ms);
    entry := metered._after_due(entry, 0, wait_ms);
    entry.kind := 'r';
    entry.amount := refund.amount;
    entry.ref := charge_seq;
    entry.refunded := entry.refunded + refund.amount;
    if entry.lots_end is not null then
        fate := metered._refund_fate(entry);
        lapses := fate.lapses;
        entry.lots_end := least(entry.lots_end, fate.ends);
    end if;
    if entry.crossed is not null then
        stays := entry;
        stays.refunded := entry.refunded - lapses;
        entry.crossed := metered._rearmed(stays);
    end if;
    perform metered._append(entry);
    if entry.lots_end is not null then
        perform metered._refund_lots(entry);
    end if;
    insert into metered.refund_sum as r (scope, level, block, amount)
    select of_scope, lv, charge_seq >> (4 * lv), refund.amount
    from generate_series(0, 15) lv where lv = 0 or charge_seq >> (4 * lv) > 0
    on conflict (scope, level, block) do update set amount = r.amount + excluded.amount;
    remaining := remaining - refund.amount;
    status := 'ok';
    seq := entry.seq;
    at := entry.at;
end
$$;

-- Ends the freeze of a scope whose last entry is ahead of the clock, because the
-- clock was: appends an entry of a new epoch, at the clock's time. Entries before
-- it count as made no later than it. None leaves a window early, and no entry is
-- changed. Does nothing, and seq is null, if the scope is not ahead.
create function metered.repair_clock(of_scope text, key bigint, wait_ms int, note text,
    out seq bigint, out at timestamptz, out ahead interval)
language plpgsql volatile
as $$
declare
    entry metered.ledger;
    clk   timestamptz;
begin
    perform metered._require(metered._key_fits(key, of_scope), 'key');
    entry := metered._next_entry(of_scope, key, wait_ms, row(null, null, nullif(note, '')::jsonb));
    clk := metered.clock();
    ahead := greatest(entry.at - clk, interval '0');
    if entry.at <= clk then
        return;
    elsif metered._lags(entry) then  -- by the clock that was wrong, all of them have ended
        entry.seq := entry.seq - 1;
        entry := metered._settle(entry, clk, null, 0, wait_ms);
        delete from metered.lot_holds k where k.scope = of_scope and k.seq = 0;
        entry.seq := entry.seq + 1;
        entry.note := nullif(note, '')::jsonb;
    end if;
    if entry.tallied then   -- in an epoch of earlier times, the number of one could come twice
        entry.seq := entry.seq - 1;
        entry := metered._end_tallies(entry, wait_ms);
        entry.seq := entry.seq + 1;
    end if;
    if entry.crossed is not null then
        entry.crossed := metered._reported_after_repair(metered._last_entry(of_scope), clk);
    end if;
    entry.kind := 'k';
    entry.amount := 0;
    entry.epoch := entry.epoch + 1;
    entry.at := clk;
    entry.anchor_at := null;        -- it is of the clock before
    entry.anchor_spent := null;
    -- lots that are held may end again
    entry.lots_end := case when entry.lots_end is not null
        then metered._next_end(of_scope, clk) end;
    perform metered._append(entry);
    seq := entry.seq;
    at := entry.at;
end
$$;
