-- How units that were revoked come back to their lots.

-- Gives units back to a lot from which they were revoked, and which has not ended: as pending ones
-- before it begins. entry is after everything due. Appends it, and returns it.
create function metered._reinstate(entry metered.ledger, lot metered.lots, units bigint)
    returns metered.ledger
language plpgsql volatile
as $$
declare
    later   boolean := coalesce(lot.starts_at > entry.at, false);
    general boolean := (lot.plan).uses is null;
    rest    bigint := case when general and not later then units else 0 end;
    kept    bigint := case when general or later then 0 else units end;
    tip     metered.ledger := entry;
    debt    bigint;
begin
    tip.seq := entry.seq - 1;
    debt := metered._debt(tip);
    entry.kind := case when rest > 0 then 'd' else 's' end;
    entry.amount := units;
    entry.credited := entry.credited + rest;
    entry.lots_end := least(entry.lots_end,
        case when later then lot.starts_at else lot.expires_at end);
    if entry.crossed is not null and rest > 0 then
        entry.crossed := metered._rearmed(entry);
    end if;
    perform metered._append(entry);
    update metered.lot_rows y
    set revoked = y.revoked - units, pending = y.pending + case when later then units else 0 end
    where y.no = lot.no;
    perform metered._move_lot(entry.scope, entry.seq, 1, lot.no,
        case when later then 'm' else 'n' end::"char", units, rest, kept);
    return metered._pay_back(entry, entry.seq, 1, array[lot.no], debt);
end
$$;

-- Gives back units that were revoked from a lot and from those that it went on in, or all of them
-- (null), as far as these lots have not ended. Each lot has an entry of its own, and seq is the
-- last. status is reinstated, same (nothing of them is revoked), ended (what is revoked is of lots
-- that have ended), unknown, or crossing: it ends other lots, and would cross thresholds of limits,
-- which the caller does not report.
create function metered.reinstate_lot(of_scope metered.scope_name, key bigint, of_lot bigint,
    of_reference text, units bigint,
    limits metered.charge_limit[], wait_ms int, origin metered.origin,
    out status text, out no bigint, out reinstated bigint, out seq bigint, out at timestamptz,
    out expires_at timestamptz, out crossed jsonb)
language plpgsql volatile
as $$
declare
    entry   metered.ledger;
    its_lot metered.lots;
    nos     bigint[];
    named   record;
    part    bigint;
begin
    perform metered._require(coalesce(metered._key_fits(key, of_scope), true)
        and (of_lot is null) <> (of_reference is null)
        and coalesce(units between 1 and 9007199254740992, true), 'reinstate_lot');
    entry := metered._next_entry(of_scope, key, wait_ms, origin);
    named := metered._name_lot(entry, of_lot, of_reference, 0, limits, wait_ms);
    {named lot};
    entry.crossed := (metered._last_entry(of_scope)).crossed;   -- units that come back lower nothing
    no := (named.lot).no;
    expires_at := nullif((named.lot).expires_at, 'infinity');
    nos := metered._family(no);
    reinstated := 0;
    for its_lot in select y.*
        from metered.lots y
        where y.no = any (nos) and y.revoked > 0 and y.expires_at > entry.at order by y.age loop
        part := least(units - reinstated, its_lot.revoked);
        exit when part = 0;
        perform metered._refuse_closed(entry);
        entry := metered._reinstate(entry, its_lot, part);
        reinstated := reinstated + part;
        seq := entry.seq;
        at := entry.at;
        entry.seq := entry.seq + 1;
    end loop;
    if reinstated > 0 then
        status := 'reinstated';
        return;
    end if;
    status := metered._missing_lot(entry);      -- nothing is revoked, as of this snapshot
    status := case when exists (select from metered.lot_rows y
            where y.no = any (nos) and y.revoked > 0) then 'ended' else 'same' end;
    at := entry.at;
end
$$;

-- Takes back that the renewals of a grant were ended, by its reference: the lot of the next period
-- is scheduled again, and others come after it. status is reinstated, same (they go on), ended
-- (that period has begun), unknown (no such grant renews), or crossing, as reinstate_lot has it.
create function metered.resume_renewal(of_scope metered.scope_name, key bigint, of_reference text,
    limits metered.charge_limit[], wait_ms int, origin metered.origin,
    out status text, out no bigint, out reinstated bigint, out seq bigint, out at timestamptz,
    out expires_at timestamptz, out crossed jsonb)
language plpgsql volatile
as $$
declare
    entry   metered.ledger;
    its_lot metered.lots;
    named   record;
begin
    perform metered._require(coalesce(metered._key_fits(key, of_scope), true)
        and (octet_length(of_reference) between 1 and 255) is true, 'resume_renewal');
    entry := metered._next_entry(of_scope, key, wait_ms, origin);
    named := metered._name_lot(entry, null, of_reference, null, limits, wait_ms);
    {named lot};
    entry.crossed := (metered._last_entry(of_scope)).crossed;
    reinstated := 0;
    status := metered._missing_lot(entry);      -- as of this snapshot
    if ((named.lot).plan).renewal is distinct from of_reference then
        return;
    end if;
    at := entry.at;
    -- The last lot of a plan has it. Those before passed it on.
    select y.* into its_lot from metered.lots y
    where y.scope = of_scope
        and ((y.plan).renews).every is not null
        and (y.plan).renewal = of_reference
    order by y.age desc limit 1;
    no := its_lot.no;
    expires_at := nullif(its_lot.expires_at, 'infinity');
    if its_lot.pending > 0 then
        status := 'same';
    elsif (its_lot.revoked > 0 and its_lot.starts_at > entry.at) is not true then
        status := 'ended';
    else
        perform metered._refuse_closed(entry);
        reinstated := its_lot.revoked;
        entry := metered._reinstate(entry, its_lot, its_lot.revoked);
        status := 'reinstated';
        seq := entry.seq;
    end if;
end
$$;
