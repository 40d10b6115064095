-- How units that were revoked come back to their lots.

-- Gives units back to a lot from which they were revoked, and which has not ended: as pending ones before it begins. e is
-- after everything due. Appends it, and returns it.
create function metered._reinstate(e metered.ledger, l metered.lots, units bigint) returns metered.ledger
language plpgsql volatile
as $$
declare
    later   boolean := coalesce(l.starts_at > e.at, false);
    general boolean := (l.plan).uses is null;
    rest    bigint := case when general and not later then units else 0 end;
    kept    bigint := case when general or later then 0 else units end;
    tip     metered.ledger := e;
    debt    bigint;
begin
    tip.seq := e.seq - 1;
    debt := metered._debt(tip);
    e.kind := case when rest > 0 then 'd' else 's' end;
    e.amount := units;
    e.credited := e.credited + rest;
    e.lots_end := least(e.lots_end, case when later then l.starts_at else l.expires_at end);
    if e.crossed is not null and rest > 0 then
        e.crossed := metered._rearmed(e);
    end if;
    perform metered._append(e);
    update metered.lot_rows y set revoked = y.revoked - units, pending = y.pending + case when later then units else 0 end where y.no = l.no;
    perform metered._move_lot(e.scope, e.seq, 1, l.no, case when later then 'm' else 'n' end::"char", units, rest, kept);
    return metered._pay_back(e, e.seq, 1, array[l.no], debt);
end
$$;

-- Gives back units that were revoked from a lot and from those that it went on in, or all of them (null), as far as these
-- lots have not ended. Each lot has an entry of its own, and seq is the last. status is reinstated, same (nothing of
-- them is revoked), ended (what is revoked is of lots that have ended), unknown, or crossing: it ends other lots, and would
-- cross thresholds of limits, which the caller does not report.
create function metered.reinstate_lot(of_scope metered.scope_name, key bigint, of_lot bigint, of_reference text, units bigint,
    limits metered.charge_limit[], wait_ms int, origin metered.origin,
    out status text, out no bigint, out reinstated bigint, out seq bigint, out at timestamptz, out expires_at timestamptz, out crossed jsonb)
language plpgsql volatile
as $$
declare
    e     metered.ledger;
    l     metered.lots;
    nos   bigint[];
    named record;
    part  bigint;
begin
    perform metered._require(coalesce(metered._key_fits(key, of_scope), true) and (of_lot is null) <> (of_reference is null)
        and coalesce(units between 1 and 9007199254740992, true), 'reinstate_lot');
    e := metered._next_entry(of_scope, key, wait_ms, origin);
    named := metered._name_lot(e, of_lot, of_reference, 0, limits, wait_ms);
    status := named.status;
    crossed := named.crossed;
    if status is not null then
        return;
    end if;
    e := named.entry;
    no := (named.lot).no;
    expires_at := nullif((named.lot).expires_at, 'infinity');
    nos := metered._family(no);
    reinstated := 0;
    for l in select y.* from metered.lots y where y.no = any (nos) and y.revoked > 0 and y.expires_at > e.at order by y.age loop
        part := least(units - reinstated, l.revoked);
        exit when part = 0;
        perform metered._refuse_closed(e);
        e := metered._reinstate(e, l, part);
        reinstated := reinstated + part;
        seq := e.seq;
        at := e.at;
        e.seq := e.seq + 1;
    end loop;
    if reinstated > 0 then
        status := 'reinstated';
        return;
    end if;
    status := metered._missing_lot(e);      -- nothing is revoked, as of this snapshot
    status := case when exists (select from metered.lot_rows y where y.no = any (nos) and y.revoked > 0) then 'ended' else 'same' end;
    at := e.at;
end
$$;

-- Takes back that the renewals of a grant were ended, by its reference: the lot of the next period is scheduled again, and others come
-- after it. status is reinstated, same (they go on), ended (that period has begun), unknown (no such grant renews), or
-- crossing, as reinstate_lot has it.
create function metered.resume_renewal(of_scope metered.scope_name, key bigint, of_reference text, limits metered.charge_limit[],
    wait_ms int, origin metered.origin,
    out status text, out no bigint, out reinstated bigint, out seq bigint, out at timestamptz, out expires_at timestamptz, out crossed jsonb)
language plpgsql volatile
as $$
declare
    e     metered.ledger;
    l     metered.lots;
    named record;
begin
    perform metered._require(coalesce(metered._key_fits(key, of_scope), true)
        and (octet_length(of_reference) between 1 and 255) is true, 'resume_renewal');
    e := metered._next_entry(of_scope, key, wait_ms, origin);
    named := metered._name_lot(e, null, of_reference, null, limits, wait_ms);
    status := named.status;
    crossed := named.crossed;
    if status is not null then
        return;
    end if;
    e := named.entry;
    reinstated := 0;
    status := metered._missing_lot(e);      -- as of this snapshot
    if ((named.lot).plan).renewal is distinct from of_reference then
        return;
    end if;
    at := e.at;
    -- The last lot of a plan has it. Those before passed it on.
    select y.* into l from metered.lots y
    where y.scope = of_scope and ((y.plan).renews).every is not null and (y.plan).renewal = of_reference
    order by y.age desc limit 1;
    no := l.no;
    expires_at := nullif(l.expires_at, 'infinity');
    if l.pending > 0 then
        status := 'same';
    elsif (l.revoked > 0 and l.starts_at > e.at) is not true then
        status := 'ended';
    else
        perform metered._refuse_closed(e);
        reinstated := l.revoked;
        e := metered._reinstate(e, l, l.revoked);
        status := 'reinstated';
        seq := e.seq;
    end if;
end
$$;
