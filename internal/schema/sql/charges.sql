-- Writes the entries of charges, all or none: either refused is null, and each charge has an
-- entry, or nothing was written. The modes:
--   answer   returns a refusal
--   raise    raises a refusal, as SQLSTATE MT001 with the JSON as its detail
--   look     takes no lock and writes nothing. It returns the refusal that a charge later in the
--            same transaction would get. That charge then finds its statements prepared
--   applied  is answer, called by _write_for_uses
--
-- Most charges are let in while nothing is due. That case is decided here, and all others
-- by _check_limits or _expire_and_check. Only _check_limits refuses. The cost of a
-- statement of PL/pgSQL in a transaction that runs it once is mostly its preparation,
-- so there are few, and one charge alone is written without arrays of its state.
--
-- standing: the caller wants the use of each limit (used). Without it an upper bound of a window's use
-- is enough for most charges: the units spent since the anchor of the last entry, or ever. The anchor
-- is older than the window's beginning, and refunds only lower the use. If the bound is not enough,
-- the window's base is looked up, and becomes the anchor (ADR 4).
create function metered._write_charges(charges metered.new_charge[], ahead interval, wait_ms int,
    origin metered.origin, mode text, hold metered.hold_terms, standing boolean,
    out seqs bigint[], out ats timestamptz[], out used bigint[], out held bigint[], out refused jsonb, out at timestamptz,
    out periods timestamptz[], out crossed jsonb)
language plpgsql volatile
as $$
declare
    c     metered.new_charge;
    l     metered.charge_limit;
    tip   metered.ledger;
    tips  metered.ledger[];
    i     int;              -- charges so far, or null
    n     int;              -- limits so far, or null
    u     bigint;           -- units that count against a limit
    since timestamptz;
    base_seq      bigint;   -- the last entry before the window
    base_spent    bigint;
    base_refunded bigint;
    w     record;
    look  boolean := mode = 'look';
    plain boolean := true;
    due   boolean;
    p     timestamptz[];    -- the start and the end of a limit's period
    absent jsonb;           -- scopes that must exist and are missing
    verdict record;
    units bigint;
    tallies timestamptz[];  -- the times of charges that are tallies
    sums  text[];           -- scopes of charges without limits, which have tallies from now on if this one had to wait
    waited boolean;
begin
    foreach c in array charges loop
        i := coalesce(i, 0) + 1;
        if c.limits is null then    -- a mere sum
            if not look and not metered._sharded() and not metered._one_snapshot() then
                at := metered._tally(c, origin, hold.id);
                if at is not null then
                    tallies[i] := at;
                end if;
            end if;
            sums := sums || c.scope;
        end if;
    end loop;
    if tallies is not null then
        w := metered._write_others(charges, tallies, ahead, wait_ms, origin, mode, hold, standing);
        seqs := w.seqs;
        ats := w.ats;
        used := w.used;
        held := w.held;
        refused := w.refused;
        at := w.at;
        periods := w.periods;
        crossed := w.crossed;
        return;
    end if;
    for nth in 1..case when sums is not null then i else 0 end loop
        charges[nth].limits := coalesce(charges[nth].limits, '{}');
    end loop;
    i := null;
    if hold.at is null then
        -- One lock needs no order.
        if not look and (cardinality(charges) > 1 or metered._try_lock(charges[1].key) is not true) then
            waited := metered._lock_charges(charges, wait_ms);
        end if;
        at := metered.clock();  -- after the lock: a wait must not date the entry back
    else
        at := hold.at;
    end if;
    foreach c in array charges loop
        i := coalesce(i, 0) + 1;
        if (c.amount between 1 and 9007199254740992 and c.held between 0 and c.amount and octet_length(c.scope) between 1 and 255
            and coalesce(pg_column_size(c.note), 0) <= 8192 and pg_column_compression(c.note) is null and cardinality(c.limits) <= 16
            and c.must_exist is not true and ((c.note ? 'use') is not true or mode in ('look', 'applied'))) is not true then
            if c.note ? 'use' and mode not in ('look', 'applied') then
                w := metered._write_for_uses(charges, ahead, wait_ms, origin, mode, hold, standing, at);
                seqs := w.seqs;
                ats := w.ats;
                used := w.used;
                held := w.held;
                refused := w.refused;
                periods := w.periods;
                crossed := w.crossed;
                return;
            end if;
            absent := metered._admit(c, absent, look, wait_ms);
            plain := plain and absent is null;
        end if;
        if look then
            select * into tip from metered.ledger y where y.scope = c.scope order by y.seq desc limit 1;
        else
            -- _entry_for_write, without the call where there is an entry.
            select * into tip from metered.ledger y where y.scope = c.scope order by y.seq desc limit 1 for key share;
        end if;
        if not found then
            tip := case when look then metered._fresh(c.scope) else metered._first_for_write(c.scope) end;
        end if;
        if tip.tallied then
            if look then
                plain := false;
            else
                tip := metered._fold(tip);
            end if;
        elsif c.scope = any (sums) and (waited or current_setting('metered_tx.waited', true) = 'true') and tip.seq > 0 and tip.epoch = 0
            and tip.lots_end is null and not metered._sharded() then
            tip.tallied := true;
        end if;
        if tip.at > at or tip.next_due <= at or tip.lots_end <= at or tip.crossed is not null then
            plain := plain and (tip.at > at or tip.next_due <= at or tip.lots_end <= at) is not true;
            due := due or tip.next_due <= at or tip.lots_end <= greatest(at, tip.at);
            if tip.crossed is not null then
                c.limits := metered._untold(c.limits, tip.crossed, tip.spent - tip.refunded, tip.held, tip.credited, at);
            end if;
        end if;
        foreach l in array c.limits loop
            exit when plain is not true;
            n := coalesce(n, 0) + 1;
            continue when standing is not true and l.win > interval '0'
                and {bound: tip = tip, since = at - l.win} <= least(l.max, l.tell_at - 1) - tip.held - c.amount;
            since := at - l.win;
            if since = at then
                u := tip.spent - tip.refunded - tip.credited;
            elsif tip.at <= since then
                u := 0;
            else
                if since is null then   -- a limit by period. The bound is tried twice, since a period is dear to find
                    continue when standing is not true and tip.spent <= least(l.max, l.tell_at - 1) - tip.held - c.amount;
                    p := metered._period_at(l.period, at);
                    since := p[1] - interval '0.000001';
                    continue when standing is not true and tip.anchor_at <= since
                        and tip.spent - tip.anchor_spent <= least(l.max, l.tell_at - 1) - tip.held - c.amount;
                    periods := periods || p;
                end if;
                -- _spent_since where the base is in the newest epoch, or all that was ever
                -- spent is inside: base_seq is 0 if entry 2 says that nothing was purged.
                select coalesce(b.seq, (select 0 from metered.ledger y where y.scope = c.scope and y.seq = 2)),
                    coalesce(b.spent, 0), coalesce(b.refunded, 0) into base_seq, base_spent, base_refunded
                from (values (1)) one left join lateral (
                    select base.seq, base.spent, base.refunded
                    from {base: scope = c.scope, epoch = tip.epoch, since = since}) b on true;
                if base_seq > 1 or tip.epoch = 0 and (base_seq = 0 or base_seq is null and tip.seq <= 16) then
                    u := tip.spent - base_spent - case when base_refunded = tip.refunded then 0
                        else metered._refunds_after(c.scope, tip.seq, coalesce(base_seq, 0)) end;
                elsif l.max = 9223372036854775807 then     -- it refuses nothing: _check_limits looks whether its use is known
                    plain := false;
                    exit;
                else
                    w := metered._spent_since(tip, since);
                    base_seq := w.base_seq;
                    base_spent := w.base_spent;
                    u := w.used;
                end if;
                if standing is not true and base_spent > 0 then
                    tip.anchor_at := since;
                    tip.anchor_spent := base_spent;
                end if;
            end if;
            used[n] := u;
            plain := u <= least(l.max, l.tell_at - 1) - tip.held - c.amount;
        end loop;
        if plain and i = cardinality(charges) and i = 1 and c.held = 0 and not look then
            -- One charge, let in: the loop below, for it alone.
            if tip.held > 0 then
                tip.next_due := metered._due_after(c.scope, tip.seq, tip.held, tip.next_due, at);
            end if;
            insert into metered.ledger as y ({entry columns})
            values ({entry of tip: seq = tip.seq + 1, amount = c.amount, at = _write_charges.at, spent = tip.spent + c.amount, kind = 'c', scope = c.scope,
                hold = hold.id, operation_tenant = origin.tenant, operation = origin.operation, note = c.note})
            on conflict do nothing
            returning array[y.seq], array[y.at], array[y.held], case when standing then used end into seqs, ats, held, used;
            if seqs is null then
                perform metered._collided();
            elsif tip.lots_end is not null then
                perform metered._use_lots(c.scope, tip.seq + 1, c.amount, metered._balance(tip), 't', c.note ->> 'use');
            end if;
            return;
        end if;
        tips[i] := tip;
        held[i] := tip.held;
    end loop;
    if look or plain is not true then
        if look and plain then
            return;
        end if;
        if absent is not null then
            refused := absent;
            used := null;
            if mode = 'raise' then
                raise exception 'a scope does not exist' using errcode = 'MT001', detail = refused;
            end if;
            return;
        end if;
        -- A refusal, or an error of the clock, must rest on all that is committed by now.
        if metered._one_snapshot() then
            if look then
                perform metered._lock_charges(charges, wait_ms);
            end if;
            perform metered._refuse_stale(tips);
        end if;
        if look then
            verdict := metered._check_now(charges, tips, at, ahead);
        elsif due then
            verdict := metered._expire_and_check(charges, tips, at, ahead, wait_ms, hold.nos);
            tips := verdict.stand;
            held := verdict.held;
        else
            -- The last limit looked at is the first that may refuse.
            verdict := metered._check_limits(charges, tips, held, at, ahead, hold.nos, row(coalesce(n, 0), coalesce(base_seq, 0), coalesce(base_spent, 0)), used);
        end if;
        refused := verdict.refused;
        used := case when standing then verdict.used end;
        periods := case when standing and refused is null then metered._periods_of(charges, tips, at) end;
        if refused is not null then
            if mode = 'raise' then
                raise exception 'a limit refuses the charge' using errcode = 'MT001', detail = refused;
            end if;
            return;
        elsif look then
            return;
        end if;
        w := metered._cross_thresholds(charges, verdict.used, held, at, tips);
        if w.silent then
            if mode = 'raise' then
                perform metered._refuse_unreported();
            end if;
            used := null;
            refused := '[{"crossing": true}]';
            return;
        end if;
        tips := w.tips;
        crossed := w.crossings;
    elsif standing is not true then
        used := null;
    end if;
    i := 0;
    foreach c in array charges loop
        i := i + 1;
        tip := tips[i];
        if tip.lots_end <= greatest(at, tip.at) then
            tip := metered._settle(tip, at, metered._ends_per_call(), c.amount, wait_ms);
        end if;
        if tip.held > 0 then
            tip.next_due := metered._due_after(c.scope, tip.seq, tip.held, tip.next_due, at);
        end if;
        tip.at := greatest(at, tip.at);
        if metered._lags(tip) and not exists (select from metered.lot_rows y where y.scope = c.scope and y.open and y.expires_at <= tip.at
                order by y.expires_at, y.age limit 1) then     -- all ends are written, and this call writes
            tip.lots_end := metered._next_end(c.scope, tip.at);
            delete from metered.lot_holds k where k.scope = c.scope and k.seq = 0;
        end if;
        units := c.amount - c.held;
        if c.held > 0 and hold.due_in >= interval '0' then
            if at + hold.due_in <= tip.at then      -- the clock was set back
                perform metered._clear_freed_of(tip);
            end if;
            tip.seq := tip.seq + 1;
            tip.held := tip.held + c.held;
            tip.next_due := least(tip.next_due, at + hold.due_in);
            insert into metered.ledger ({entry columns})
            values ({entry of tip: amount = c.held, kind = 'h', scope = c.scope, hold = hold.id, operation_tenant = origin.tenant,
                operation = origin.operation, note = c.note})
            on conflict do nothing
            returning others into tip.others;
            if not found then
                perform metered._collided();
            elsif tip.lots_end is not null then
                perform metered._use_lots(c.scope, tip.seq, c.held, case when not metered._lags(tip) then metered._balance(tip) + c.held end, 'h', c.note ->> 'use');
            end if;
        elsif c.held <> 0 then
            raise exception 'a charge holds nothing: place a hold' using errcode = '22023';
        end if;
        if units > 0 then
            tip.seq := tip.seq + 1;
            insert into metered.ledger ({entry columns})
            values ({entry of tip: amount = units, spent = tip.spent + units, kind = 'c', scope = c.scope, hold = hold.id, operation_tenant = origin.tenant,
                operation = origin.operation, note = c.note})
            on conflict do nothing;
            if not found then
                perform metered._collided();
            elsif tip.lots_end is not null then
                perform metered._use_lots(c.scope, tip.seq, units, case when not metered._lags(tip) then metered._balance(tip) end, 't', c.note ->> 'use');
            end if;
        end if;
        seqs[i] := tip.seq;
        ats[i] := tip.at;
    end loop;
    if crossed is not null then
        crossed := metered._crossed_at(crossed, seqs);
    end if;
end
$$;

-- The locks of the charges' scopes, in order.
create function metered._lock_charges(charges metered.new_charge[], wait_ms int) returns boolean
language plpgsql volatile
as $$
begin
    return metered._lock_all_scopes(array(select c.scope from unnest(charges) c), array(select c.key from unnest(charges) c), wait_ms);
end
$$;

-- Charges scopes, all or none, without a command, and returns a refusal. Returning the whole
-- answer costs less than assigning each part.
create function metered.charge(charges metered.new_charge[], ahead interval, wait_ms int, standing boolean) returns metered.charged
language plpgsql volatile
as $$
begin
    return metered._write_charges(charges, ahead, wait_ms, null, 'answer', null, standing);
end
$$;

-- Charges costs that were incurred, whatever their limits, which only report thresholds. If the use of a limit is unknown, no
-- threshold is reported.
create function metered._charge_anyway(charges metered.new_charge[], ahead interval, wait_ms int, origin metered.origin,
    hold metered.hold_terms) returns metered.charged
language plpgsql volatile
as $$
declare
    tells  boolean := false;
    posted metered.charged;
begin
    for i in 1..cardinality(charges) loop
        charges[i].limits := array(select row(9223372036854775807, l.win, l.period, l.tell_at, l.thresholds, l.telling)::metered.charge_limit
            from unnest(charges[i].limits) l where l.thresholds is not null);
        tells := tells or cardinality(charges[i].limits) > 0;
    end loop;
    if tells then
        begin
            posted := metered._write_charges(charges, ahead, wait_ms, origin, 'answer', hold, false);
            if (posted.refused -> 0 ? 'limit') is not true then
                return posted;
            end if;
        exception when sqlstate 'MT002' or sqlstate 'MT003' or sqlstate 'MT010' or sqlstate 'MT012' then
        end;
        for i in 1..cardinality(charges) loop   -- a sum is beyond 64 bits, for example
            charges[i].limits := '{}';
        end loop;
    end if;
    return metered._write_charges(charges, ahead, wait_ms, origin, 'answer', hold, false);
end
$$;
