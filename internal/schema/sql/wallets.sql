-- The functions of wallets that applications call. See lots.sql.

-- Grants a lot to a wallet, which is any scope: it becomes a wallet with the first one. status is granted, same (it was granted under the
-- reference before, and is answered as it is now), conflict (the reference is of another lot) or ended (it would have ended by now). refused, and nothing
-- written, if the scope must exist and does not.
create function metered.grant_lot(of_scope metered.scope_name, key bigint, lot metered.new_lot, must_exist boolean, wait_ms int, origin metered.origin,
    out status text, out no bigint, out seq bigint, out at timestamptz, out expires_at timestamptz, out refused jsonb)
language plpgsql volatile
as $$
declare
    e    metered.ledger;
    was  metered.lots;
    made record;
begin
    perform metered._require(coalesce(metered._key_fits(key, of_scope), true), 'key');
    perform metered._require(lot.amount between 1 and 9007199254740992 and octet_length(lot.category) <= 255 and lot.priority is not null
        and coalesce(octet_length(lot.reference) between 1 and 255, true) and (lot.reference is null) = (lot.fingerprint is null)
        and coalesce(octet_length(lot.fingerprint) = 33, true) and (lot.lasts is null or lot.expires_at is null)
        and coalesce(lot.lasts > interval '0' and lot.lasts <= interval '36525 days', true)
        and coalesce(lot.expires_at > '-infinity' and lot.expires_at < '9000-01-01 00:00:00+00', true)
        and (lot.roll_cap is null) = (lot.roll_for is null) and coalesce(lot.roll_cap between 1 and 9007199254740992, true)
        and coalesce(metered._goes_on(lot.roll_for), true) and coalesce(metered._goes_on(lot.late), true), 'lot');
    e := metered._next_entry(of_scope, key, wait_ms, origin);
    if lot.reference is not null then
        select * into was from metered.lots y where y.scope = of_scope and y.reference = lot.reference;
        if found then
            status := case when was.fingerprint = lot.fingerprint then 'same' else 'conflict' end;
            no := was.no;
            seq := was.granted_seq;
            at := was.granted_at;
            expires_at := nullif(was.expires_at, 'infinity');
            return;
        end if;
    end if;
    perform metered._refuse_closed(e);
    if must_exist then
        refused := metered._admit(row(of_scope, key, lot.amount, 0, null, null, true, null, null), null, false, wait_ms);
        if refused is not null then
            return;
        end if;
    end if;
    lot.expires_at := coalesce(e.at + lot.lasts, lot.expires_at, 'infinity');
    if lot.expires_at <= e.at then
        status := metered._missing_lot(e);   -- it was not granted before, as of now
        status := 'ended';
        at := e.at;
        return;
    end if;
    e := metered._after_minima(e, wait_ms);
    made := metered._credit_lot(e, lot, 'g', wait_ms);
    status := 'granted';
    no := made.no;
    seq := (made.entry).seq;
    at := (made.entry).at;
    expires_at := nullif(lot.expires_at, 'infinity');
end
$$;

-- Draws units of a wallet, as a charge does: charge.amount of them, or with up_to as much of that as its limits let in. lots says of
-- which lots they are, and overdrawn how many are of none. left is the balance behind it. A refusal of a command's draw raises, because COMMIT
-- follows, and its draws are kept for its record.
create function metered.draw(charge metered.new_charge, up_to boolean, ahead interval, wait_ms int, origin metered.origin,
    out seq bigint, out at timestamptz, out amount bigint, out lots json, out overdrawn bigint, out left_over bigint, out refused jsonb, out crossed jsonb)
language plpgsql volatile
as $$
declare
    tip    metered.ledger;
    terms  metered.hold_terms;  -- null, or the clock by which the amount was decided
    looked record;
    posted metered.charged;
    l      metered.charge_limit;
    i      int := 0;
begin
    if (charge.held = 0 and charge.lease is null and charge.amount between 1 and 9007199254740992 and up_to is not null) is not true then
        perform metered._require(false, 'draw');
    end if;
    if charge.key is null then
        charge.key := metered._scope_key(charge.scope);
    end if;
    if up_to then
        perform metered._lock_keys(array[charge.key], wait_ms);
        tip := metered._last_entry(charge.scope);
        amount := charge.amount;
        charge.amount := 1;
        terms.at := metered.clock();
        looked := metered._check_now(array[charge], array[tip], terms.at, ahead);
        foreach l in array charge.limits loop
            i := i + 1;
            if looked.used[i] > l.max - looked.held[1] - amount then     -- a great credit makes no number too large
                amount := l.max - looked.used[i] - looked.held[1];
            end if;
        end loop;
        charge.amount := greatest(1, amount);   -- 1 is refused where there is none
    end if;
    posted := metered._write_charges(array[charge], ahead, wait_ms, origin, case when origin.operation is null then 'answer' else 'raise' end, terms, false);
    amount := charge.amount;
    refused := posted.refused;
    if refused is not null then
        return;
    end if;
    crossed := posted.crossed;
    seq := posted.seqs[1];
    at := posted.ats[1];
    -- Aggregates inside lateral leave the planner no join to choose.
    select e.credited - e.spent + e.refunded - e.held - case when metered._lags(e) then metered._lapsing(e, e.at) else 0 end, m.lots into left_over, lots
    from metered.ledger e, lateral (
        select json_agg(json_build_object('lot', y.no, 'reference', y.reference, 'category', y.category, 'amount', x.amount) order by x.nth) as lots
        from metered.lot_moves x, lateral (select z.no, z.reference, z.category from metered.lots z where z.no = x.lot limit 1) y
        where x.scope = e.scope and x.seq = e.seq) m
    where e.scope = charge.scope and e.seq = draw.seq;
    overdrawn := greatest(0, least(amount, -left_over));
    if origin.operation is not null then
        perform metered._remember_hold(json_build_object('drawn', json_strip_nulls(json_build_object('wallet', charge.scope, 'seq', seq, 'at', at,
            'amount', amount, 'lots', lots, 'overdrawn', overdrawn, 'left', left_over))));
    end if;
end
$$;

-- The balance of a wallet: units that can be drawn (less than 0: overdrawn), held units, and the lots that have some of either, in the
-- order in which they are drawn. A lot or hold that is due has ended, whether that is written down or not. A lot that rolls over then is there as it will be.
create function metered.wallet_balance(of_scope text,
    out now timestamptz, out seq bigint, out units bigint, out held bigint, out lots json)
language plpgsql stable
as $$
declare
    tip metered.ledger := metered._last_entry(of_scope);
    clk timestamptz := metered.clock();
    due bigint;     -- held, and due
begin
    now := greatest(clk, tip.at);
    seq := tip.seq;
    due := case when tip.next_due <= clk then metered._overdue(of_scope, tip.next_due, clk) else 0 end;
    held := tip.held - due;
    units := metered._balance(tip) + due - case when tip.next_due <= clk then metered._minima(tip, null, clk) else 0 end
        - case when tip.lots_end is not null then metered._lapsing(tip, clk) else 0 end;
    if tip.lots_end is null then
        return;
    end if;
    lots := (
        select json_agg(json_build_object('lot', x.no, 'reference', x.reference, 'category', x.category, 'priority', x.priority,
            'granted_at', x.granted_at, 'expires_at', nullif(x.expires_at, 'infinity'), 'amount', x.amount, 'rest', x.rest, 'held', x.held)
            order by x.priority, x.expires_at, x.no)
        from metered._lots_now(tip, clk, null) x);
end
$$;
