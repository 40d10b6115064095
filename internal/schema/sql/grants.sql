-- Granting lots that begin now, later or again. See lots.sql.

-- Grants a lot that begins at once and has no plan, for builds of 0.1.0: see plan_lot.
create function metered.grant_lot(of_scope metered.scope_name, key bigint, lot metered.new_lot,
    must_exist boolean, wait_ms int, origin metered.origin,
    out status text, out no bigint, out seq bigint, out at timestamptz, out expires_at timestamptz,
    out refused jsonb)
language plpgsql volatile
as $$
begin
    select g.status, g.no, g.seq, g.at, g.expires_at, g.refused
    into status, no, seq, at, expires_at, refused
    from metered.plan_lot(of_scope, key, lot, null, null, must_exist, wait_ms, origin) g;
end
$$;

-- Checks a plan that a caller passes. What comes again is a day long at least, since a call writes
-- all that came meanwhile.
create function metered._require_plan(lot metered.new_lot, plan metered.lot_plan,
    starts_at timestamptz) returns void
language plpgsql stable
as $$
begin
    perform metered._require(plan.renewal is null
        and plan.of_reference is null
        and plan.roll_for is null
        and (((plan.renews).every is null) = (plan.renew_amount is null))
        and coalesce(plan.renew_amount between 1 and 9007199254740992, true)
        and coalesce((plan.renews).every >= interval '1 day', true)
        and coalesce(octet_length((plan.renews).zone) <= 255, true)
        and coalesce(octet_length((plan.roll_to).zone) <= 255, true)
        and ((plan.renews).every is null
            or lot.lasts is null and lot.expires_at is null and lot.reference is not null)
        and (lot.roll_cap is not null
            or (plan.roll_to).every is null
                and plan.roll_again is null
                and plan.roll_shared is null)
        and coalesce(plan.roll_again between -1 and 10000, true)
        and coalesce(metered._sound_uses(plan.uses), true)
        and (coalesce(plan.roll_again, 0) = 0
            or coalesce((plan.roll_to).every, lot.roll_for) >= interval '1 day')
        and coalesce(starts_at > '-infinity'
            and starts_at < '9000-01-01 00:00:00+00', true), 'plan');
end
$$;

-- The first lot of a grant that was bought at since: its amount, its beginning and its end. amount
-- is null for the part of the period that was left then. Ended by that time is one that does not
-- renew, and one whose plan would have brought more than 24 lots since.
create function metered._first_lot(inout lot metered.new_lot, plan metered.lot_plan,
    since timestamptz, now timestamptz, out ended boolean)
language plpgsql stable
as $$
declare
    span timestamptz[];
begin
    ended := false;
    if (plan.renews).every is null then
        lot.expires_at := coalesce(since + lot.lasts, lot.expires_at, 'infinity');
        ended := lot.expires_at <= greatest(since, now);
        return;
    end if;
    span := metered._period_at(plan.renews, since);
    lot.expires_at := span[2];
    lot.amount := coalesce(lot.amount,
        div(plan.renew_amount * (extract(epoch from span[2]) - extract(epoch from since)),
        extract(epoch from span[2]) - extract(epoch from span[1])));
    ended := extract(epoch from now) - extract(epoch from since) > 24
        * extract(epoch from (plan.renews).every);
end
$$;

-- Notes the first lot of a plan that has no units, and schedules the lot of the next period.
-- last_entry is after everything due. Appends it, and returns it.
create function metered._empty_lot(last_entry metered.ledger, empty metered.lots,
    out entry metered.ledger, out no bigint)
language plpgsql volatile
as $$
begin
    entry := metered._schedule(last_entry, (empty.plan).renew_amount,
        case when empty.expires_at > last_entry.at then empty.expires_at end);
    empty.granted_seq := entry.seq;
    empty.last_seq := entry.seq;
    empty.no := metered._note_lot(empty);
    perform metered._move_lot(last_entry.scope, entry.seq, 1, metered._renew_lot(empty, entry.seq),
        's', entry.amount, 0, 0);
    no := empty.no;
end
$$;

-- Grants a lot to a wallet, which is any scope: it becomes a wallet with the first one. The lot
-- begins at starts_at, or at once. That of a plan may have no units, or null: the part of its
-- period that was left at starts_at. A plan that was bought in a period which is over brings the
-- lots of that period and of all since. status is granted, same (it was granted under the reference
-- before, and is answered as it is now, with the units that were revoked of it since, and whether
-- its renewals were ended), conflict (the reference is of another lot) or ended (it would have
-- ended by now). refused, and nothing written, if the scope must exist and does not.
create function metered.plan_lot(of_scope metered.scope_name, key bigint, lot metered.new_lot,
    plan metered.lot_plan, starts_at timestamptz, must_exist boolean,
    wait_ms int, origin metered.origin,
    out status text, out no bigint, out amount bigint, out seq bigint, out at timestamptz,
    out expires_at timestamptz, out refused jsonb,
    out revoked bigint, out renewals_ended boolean)
language plpgsql volatile
as $$
declare
    entry  metered.ledger;
    was    metered.lots;
    first  metered.lots;
    made   record;
    renews boolean := ((plan).renews).every is not null;
begin
    perform metered._require(coalesce(metered._key_fits(key, of_scope), true), 'key');
    perform metered._require((renews and lot.amount is null
            or lot.amount between (not renews)::int and 9007199254740992)
        and octet_length(lot.category) <= 255 and lot.priority is not null
        and coalesce(octet_length(lot.reference) between 1 and 255, true)
        and (lot.reference is null) = (lot.fingerprint is null)
        and coalesce(octet_length(lot.fingerprint) = 33, true) and (lot.lasts is null or lot.expires_at is null)
        and coalesce(lot.lasts > interval '0' and lot.lasts <= interval '36525 days', true)
        and coalesce(lot.expires_at > '-infinity' and lot.expires_at < '9000-01-01 00:00:00+00', true)
        and (lot.roll_cap is null) = (lot.roll_for is null)
        and coalesce(lot.roll_cap between 1 and 9007199254740992, true)
        and coalesce(metered._goes_on(lot.roll_for), true) and coalesce(metered._goes_on(lot.late), true), 'lot');
    if plan is distinct from null or starts_at is not null then
        perform metered._require_plan(lot, plan, starts_at);
        plan := metered._plan_kept(plan);
    end if;
    entry := metered._next_entry(of_scope, key, wait_ms, origin);
    if lot.reference is not null then
        was := metered._find_lot(of_scope, null, lot.reference);
        if was.no is null and entry.lots_end is not null then   -- a lot that is due may have the reference
            entry := metered._after_due(entry, 0, wait_ms);
            was := metered._find_lot(of_scope, null, lot.reference);
        end if;
        if was.no is not null then
            status := case when was.fingerprint = lot.fingerprint then 'same' else 'conflict' end;
            no := was.no;
            amount := was.amount;
            seq := was.granted_seq;
            at := was.granted_at;
            expires_at := nullif(was.expires_at, 'infinity');
            revoked := (select sum(y.revoked) from metered.lot_rows y where y.no = any (metered._family(was.no)));
            renewals_ended := (was.plan).renewal = was.reference and not exists (select from metered.lot_rows y
                where y.scope = of_scope and y.pending > 0 and (y.plan).renewal = was.reference);
            return;
        end if;
    end if;
    perform metered._refuse_closed(entry);
    if must_exist then
        refused := metered._admit(row(of_scope, key, coalesce(plan.renew_amount, lot.amount), 0,
                null, null, true, null, null), null, false, wait_ms);
        if refused is not null then
            return;
        end if;
    end if;
    made := metered._first_lot(lot, plan, coalesce(starts_at, entry.at), entry.at);
    lot := made.lot;
    expires_at := nullif(lot.expires_at, 'infinity');
    if made.ended then
        status := metered._missing_lot(entry);   -- it was not granted before, as of now
        status := 'ended';
        at := entry.at;
        return;
    end if;
    if renews then
        plan.renewal := lot.reference;
    end if;
    if plan is distinct from null or lot.roll_cap is not null then
        plan.roll_for := lot.roll_for;
    end if;
    entry := metered._after_minima(entry, wait_ms);
    first.scope := of_scope;
    first.amount := lot.amount;
    first.expires_at := lot.expires_at;
    first.roll_cap := lot.roll_cap;
    first.late := lot.late;
    first.priority := lot.priority;
    first.category := lot.category;
    first.reference := lot.reference;
    first.fingerprint := lot.fingerprint;
    first.plan := plan;
    first.starts_at := coalesce(starts_at, entry.at);
    if lot.roll_cap is not null then
        first.roll_end := metered._roll_end(lot.expires_at, plan, lot.roll_for);
    end if;
    if lot.amount > 0 and first.starts_at <= entry.at and lot.expires_at > entry.at then
        made := metered._credit_lot(entry, lot, plan, 'g', wait_ms);
        entry := made.entry;
        no := made.no;
        if renews then
            first.no := no;
            perform metered._renew_lot(first, entry.seq);
        end if;
    else
        entry := metered._after_due(metered._as_wallet(entry, wait_ms), 0, wait_ms);
        if lot.amount = 0 then
            made := metered._empty_lot(entry, first);
            entry := made.entry;
            no := made.no;
        else
            entry := metered._schedule(entry, lot.amount, case when first.starts_at > entry.at then first.starts_at end);
            first.granted_seq := entry.seq;
            first.last_seq := entry.seq;
            no := metered._note_lot(first);
            perform metered._move_lot(of_scope, entry.seq, 1, no, 's', lot.amount, 0, 0);
        end if;
        if lot.expires_at <= entry.at then      -- what it has brought by now
            perform metered._settle(entry, least(entry.at, metered.clock()), metered._ends_per_call(), 0, wait_ms);
        end if;
    end if;
    status := 'granted';
    amount := lot.amount;
    seq := entry.seq;
    at := entry.at;
end
$$;

-- Appends an entry that moves no units: a lot of so many units is scheduled, or its end is set.
-- entry is as _next_entry has it, after everything due. The lot begins or ends at comes.
create function metered._schedule(entry metered.ledger, units bigint, comes timestamptz)
    returns metered.ledger
language plpgsql volatile
as $$
begin
    entry.kind := 's';
    entry.amount := units;
    entry.lots_end := least(entry.lots_end, comes);
    perform metered._append(entry);
    return entry;
end
$$;
