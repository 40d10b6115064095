-- What applications call of wallets besides: ends of lots and of renewals, draws, the balance.

-- Sets the end of a lot, by its number or reference: earlier, later, or never (infinity). status is
-- set, same (it has that end), unknown, ended (it has ended by now, or the end would be over), or
-- crossing: it ends other lots, and would cross thresholds of limits, which the caller does not
-- report.
create function metered.set_lot_end(of_scope metered.scope_name, key bigint, of_lot bigint,
    of_reference text, ends timestamptz, limits metered.charge_limit[],
    wait_ms int, origin metered.origin,
    out status text, out no bigint, out units bigint, out seq bigint, out at timestamptz,
    out crossed jsonb)
language plpgsql volatile
as $$
declare
    entry metered.ledger;
    lot   metered.lots;
    named record;
begin
    perform metered._require(coalesce(metered._key_fits(key, of_scope), true)
        and (of_lot is null) <> (of_reference is null)
        and (ends = 'infinity' or ends > '-infinity' and ends < '9000-01-01 00:00:00+00') is true,
            'set_lot_end');
    entry := metered._next_entry(of_scope, key, wait_ms, origin);
    named := metered._name_lot(entry, of_lot, of_reference, null, limits, wait_ms);
    {named lot};
    lot := named.lot;
    no := lot.no;
    units := lot.amount;
    at := entry.at;
    seq := lot.last_seq;
    if lot.expires_at = ends then
        status := 'same';
        return;
    elsif lot.expires_at <= entry.at
        or ends <= greatest(entry.at, case when lot.pending > 0 then lot.starts_at end) then
        status := metered._missing_lot(entry);
        status := 'ended';
        return;
    end if;
    perform metered._refuse_closed(entry);
    at := entry.at;
    entry := metered._schedule(entry, lot.rest + lot.held + lot.pending + lot.kept, ends);
    if lot.roll_cap is not null then
        -- granted by 0.1.0, and never set
        if (lot.plan).roll_for is null and ((lot.plan).roll_to).every is null then
            lot.plan.roll_for := case when lot.roll_end = 'infinity' then interval '0'
                else (extract(epoch from lot.roll_end) - extract(epoch from lot.expires_at))
                    * interval '1 second' end;
        end if;
        lot.roll_end := metered._roll_end(ends, lot.plan, (lot.plan).roll_for);
    end if;
    update metered.lot_rows y
    set expires_at = ends, roll_end = lot.roll_end, plan = lot.plan
    where y.no = lot.no;
    perform metered._move_lot(of_scope, entry.seq, 1, lot.no, 's', entry.amount, 0, 0);
    status := 'set';
    seq := entry.seq;
    crossed := coalesce(crossed, metered._crossed_at(named.crossings, array[seq]));
end
$$;

-- Ends the renewals of a grant, by its reference: the lot of the next period is withdrawn, and none
-- comes after it. The present one stays. status is revoked, same (they were ended before), unknown
-- (no such grant renews), or crossing, as revoke_lot has it.
create function metered.end_renewal(of_scope metered.scope_name, key bigint, of_reference text,
    limits metered.charge_limit[], wait_ms int, origin metered.origin,
    out status text, out no bigint, out revoked bigint, out missing bigint, out seq bigint,
    out at timestamptz, out crossed jsonb)
language plpgsql volatile
as $$
declare
    entry   metered.ledger;
    its_lot metered.lots;
    named   record;
begin
    perform metered._require(coalesce(metered._key_fits(key, of_scope), true)
        and (octet_length(of_reference) between 1 and 255) is true, 'end_renewal');
    entry := metered._next_entry(of_scope, key, wait_ms, origin);
    begin
        named := metered._name_lot(entry, null, of_reference, null, limits, wait_ms);
    -- a zone that the server has lost: the lot that is due begins, and no other
    exception when sqlstate 'MT010' then
        no := metered._end_lost(of_scope, of_reference);
        if no is null then
            raise;
        end if;
        status := 'revoked';
        return;
    end;
    {named lot};
    if ((named.lot).plan).renewal is distinct from of_reference then
        status := metered._missing_lot(entry);
        return;
    end if;
    select * into its_lot
    from metered.lots y
    where y.scope = of_scope
        and y.pending > 0
        and ((y.plan).renews).every is not null
        and (y.plan).renewal = of_reference
    order by y.starts_at, y.age limit 1;
    missing := 0;
    revoked := 0;
    if its_lot.no is null then
        status := metered._missing_lot(entry);
        status := 'same';
        return;
    end if;
    entry := metered._withdraw(entry, its_lot, its_lot.pending);
    status := 'revoked';
    no := its_lot.no;
    revoked := its_lot.pending;
    seq := entry.seq;
    at := entry.at;
    crossed := coalesce(crossed, metered._crossed_at(named.crossings, array[seq]));
end
$$;

-- Ends what the lots of a plan still need its zones for: no lot comes after those that are there.
-- Returns the last one.
create function metered._end_lost(of_scope text, of_reference text) returns bigint
language plpgsql volatile
as $$
declare
    last bigint;
begin
    for last in
        select y.no from metered.lot_rows y
        where y.scope = of_scope
            and ((y.plan).renewal = of_reference or (y.plan).of_reference = of_reference)
        order by y.age
    loop
        update metered.lot_rows y
        set plan.renews = null, plan.renew_amount = null, plan.roll_to = null,
            plan.roll_again = null
        where y.no = last;
    end loop;
    return last;
end
$$;

-- Takes back units of a lot before they begin. Without any left, it does not begin, and none comes
-- after it. Appends an entry after it, and returns it.
create function metered._withdraw(entry metered.ledger, lot metered.lots, units bigint)
    returns metered.ledger
language plpgsql volatile
as $$
begin
    entry := metered._schedule(entry, units, entry.lots_end);
    update metered.lot_rows y
    set pending = y.pending - units, revoked = y.revoked + units
    where y.no = lot.no;
    perform metered._move_lot(lot.scope, entry.seq, 1, lot.no, 'w', units, 0, 0);
    return entry;
end
$$;

-- Draws units of a wallet, as a charge does: charge.amount of them, or with up_to as much of that
-- as its limits let in. lots says of which lots they are, and overdrawn how many are of none. left
-- is the balance after it, with lots for the use of the charge. A refusal of a command's draw
-- raises, because COMMIT follows, and its draws are kept for its record.
create function metered.draw(charge metered.new_charge, up_to boolean, ahead interval, wait_ms int,
    origin metered.origin,
    out seq bigint, out at timestamptz, out amount bigint, out lots json, out overdrawn bigint,
    out left_over bigint, out refused jsonb, out crossed jsonb)
language plpgsql volatile
as $$
declare
    mode    text := case when origin.operation is null then 'answer' else 'raise' end;
    written record;
    posted  metered.charged;
    kept    bigint;
begin
    {refuse: when = (charge.held = 0
            and charge.lease is null
            and charge.amount between 1 and 9007199254740992
            and up_to is not null) is not true, what = draw};
    if up_to then
        written := metered._write_up_to(array[charge], 1, ahead, wait_ms, origin, mode, null,
            false);
        charge := written.charges[1];
        posted := written.posted;
    else
        posted := metered._write_charges(array[charge], ahead, wait_ms, origin, mode, null, false);
    end if;
    amount := charge.amount;
    refused := posted.refused;
    if refused is not null then
        return;
    end if;
    crossed := posted.crossed;
    seq := posted.seqs[1];
    at := posted.ats[1];
    lots := metered._lots_of(charge.scope, seq);
    select e.credited - e.spent + e.refunded - e.held
        - case when metered._lags(row(e.*)::metered.ledger)
        then metered._lapsing(row(e.*)::metered.ledger, e.at) else 0 end into left_over
    from metered.ledger e
    where e.scope = charge.scope and e.seq = draw.seq;
    overdrawn := greatest(0, least(amount, -left_over));
    if charge.note ? 'use' then
        overdrawn := coalesce((select coalesce(sum(x.amount) filter (where x.lot = 0), 0)
                from metered.lot_moves x
            where x.scope = charge.scope and x.seq = draw.seq having count(*) > 0), overdrawn);
        kept := (select coalesce(sum(y.kept), 0) from metered.lots y
            where y.scope = charge.scope
                and y.keeps
                and y.expires_at > draw.at
                and (y.plan).uses @> array[charge.note ->> 'use']);
        left_over := case when kept > 0 then greatest(0, left_over) + kept else left_over end;
    end if;
    if origin.operation is not null then
        perform metered._remember_hold(json_build_object('drawn',
                json_strip_nulls(json_build_object('wallet', charge.scope, 'seq', seq, 'at', at,
            'amount', amount, 'lots', lots, 'overdrawn', overdrawn, 'left', left_over))));
    end if;
end
$$;

-- The balance of a wallet: units that can be drawn (less than 0: overdrawn), held units, and the
-- lots that have some of either, in the order in which they are drawn. Lots for some uses are no
-- part of units. A lot or hold that is due has ended, whether that is written down or not. A lot
-- that rolls over then is there as it will be.
create function metered.wallet_balance(of_scope text,
    out now timestamptz, out seq bigint, out units bigint, out held bigint, out lots json)
language plpgsql stable
as $$
declare
    tip    metered.ledger := metered._last_entry(of_scope);
    clk    timestamptz := metered.clock();
    due    bigint;     -- held, and due
    lapses record;
begin
    now := greatest(clk, tip.at);
    seq := tip.seq;
    due := case when tip.next_due <= clk
        then metered._due_units(of_scope, tip.next_due, clk) else 0 end;
    held := tip.held - due;
    units := metered._balance(tip) + due - case when tip.next_due <= clk
        then metered._minima(tip, null, clk) else 0 end;
    if tip.lots_end is null then
        return;
    end if;
    lapses := metered._due_state(tip, clk);
    units := units - metered._lapsing_after(tip, clk, lapses.lots, lapses.lapsed, lapses.debt);
    lots := (
        select json_agg(json_build_object('lot', coalesce(x.no, 0), 'reference',
                coalesce(x.reference, (x.plan).of_reference), 'category', x.category,
                'priority', x.priority,
            'granted_at', x.granted_at, 'expires_at', nullif(x.expires_at, 'infinity'), 'amount',
            x.amount, 'rest', x.rest, 'held', x.held, 'uses', (x.plan).uses)
            order by x.priority, x.expires_at, x.age)
        from metered._lots_after(tip, clk, null, lapses.lots) x);
end
$$;
