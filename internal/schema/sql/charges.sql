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
-- standing: the caller wants the use of each limit (used). Without it an upper bound of a window's
-- use is enough for most charges: the units spent since the anchor of the last entry, or ever. The
-- anchor is older than the window's beginning, and refunds only lower the use. If the bound is not
-- enough, the window's base is looked up, and becomes the anchor (ADR 4).
create function metered._write_charges(charges metered.new_charge[], ahead interval, wait_ms int,
    origin metered.origin, mode text, hold metered.hold_terms, standing boolean,
    out seqs bigint[], out ats timestamptz[], out used bigint[], out held bigint[],
    out refused jsonb, out at timestamptz, out periods timestamptz[], out crossed jsonb)
language plpgsql volatile
as $$
declare
    charge  metered.new_charge;
    lim     metered.charge_limit;
    tip     metered.ledger;
    tips    metered.ledger[];
    nth     int;            -- charges so far, or null
    nth_limit int;          -- limits so far, or null
    counts  bigint;         -- units that count against a limit
    since   timestamptz;
    base_seq      bigint;   -- the last entry before the window
    base_spent    bigint;
    base_refunded bigint;
    part    record;
    look    boolean := mode = 'look';
    plain   boolean := true;
    due     boolean;
    span    timestamptz[];  -- the start and the end of a limit's period
    absent  jsonb;          -- scopes that must exist and are missing
    units   bigint;
    tallies timestamptz[];  -- the times of charges that are tallies
    -- Scopes of charges without limits. They have tallies from now on if this charge had to wait.
    sums    text[];
    waited  boolean;
begin
    {charge sums}
    if tallies is not null then
        part := metered._write_others(charges, tallies, ahead, wait_ms, origin, mode, hold,
            standing);
        {charge answer: of = part}
        return;
    end if;
    if hold.at is null then
        -- One lock needs no order.
        if not look and (cardinality(charges) > 1
                or metered._try_lock(charges[1].key) is not true) then
            waited := metered._lock_charges(charges, wait_ms);
        end if;
        at := metered.clock();  -- after the lock: a wait must not date the entry back
    else
        at := hold.at;
    end if;
    foreach charge in array charges loop
        nth := coalesce(nth, 0) + 1;
        if {charge usual} is not true then
            if charge.note ? 'use' and mode not in ('look', 'applied') then
                part := metered._write_for_uses(charges, ahead, wait_ms, origin, mode, hold,
                    standing, at);
                {charge answer: of = part}
                return;
            end if;
            absent := metered._admit(charge, absent, look, wait_ms);
            plain := plain and absent is null;
        end if;
        {charge tip}
        if tip.at > at or tip.next_due <= at or tip.lots_end <= at or tip.crossed is not null then
            plain := plain and (tip.at > at
                or tip.next_due <= at
                or tip.lots_end <= at) is not true;
            due := due or tip.next_due <= at or tip.lots_end <= greatest(at, tip.at);
            if tip.crossed is not null then
                charge.limits := metered._untold(charge.limits, tip.crossed,
                    tip.spent - tip.refunded, tip.held, tip.credited, at);
            end if;
        end if;
        foreach lim in array charge.limits loop
            exit when plain is not true;
            nth_limit := coalesce(nth_limit, 0) + 1;
            {charge use}
            used[nth_limit] := counts;
            plain := counts <= {charge room};
        end loop;
        if plain and nth = cardinality(charges) and nth = 1 and charge.held = 0 and not look then
            {charge alone}
            return;
        end if;
        tips[nth] := tip;
        held[nth] := tip.held;
    end loop;
    if look and plain then
        return;
    elsif plain is not true then
        -- The last limit looked at is the first that may refuse.
        part := metered._judge_charges(charges, tips, held, used, at, ahead, wait_ms, hold.nos,
            mode,
            standing, absent, due, row(coalesce(nth_limit, 0), coalesce(base_seq, 0),
                coalesce(base_spent, 0)));
        refused := part.refused;
        used := part.used;
        if refused is not null or look then
            return;
        end if;
        tips := part.tips;
        held := part.held;
        periods := part.periods;
        crossed := part.crossed;
    elsif standing is not true then
        used := null;
    end if;
    nth := 0;
    foreach charge in array charges loop
        nth := nth + 1;
        tip := tips[nth];
        {charge entries}
        seqs[nth] := tip.seq;
        ats[nth] := tip.at;
    end loop;
    if crossed is not null then
        crossed := metered._crossed_at(crossed, seqs);
    end if;
end
$$;

-- Judges charges that are not plainly let in, and ends what is due if they are. It returns the last
-- entries of their scopes and the units held after that, the thresholds that they cross, or the
-- refusal. absent, due, and known (see _check_limits) are what _write_charges has found.
create function metered._judge_charges(charges metered.new_charge[], inout tips metered.ledger[],
    inout held bigint[], inout used bigint[], clk timestamptz, ahead interval, wait_ms int,
    of_nos bigint[], mode text, standing boolean, absent jsonb, due boolean, known metered.counted,
    out refused jsonb, out periods timestamptz[], out crossed jsonb)
language plpgsql volatile
as $$
declare
    verdict   record;
    crossings record;
begin
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
        if mode = 'look' then
            perform metered._lock_charges(charges, wait_ms);
        end if;
        perform metered._refuse_stale(tips);
    end if;
    if mode = 'look' then
        verdict := metered._check_now(charges, tips, clk, ahead);
    elsif due then
        verdict := metered._expire_and_check(charges, tips, clk, ahead, wait_ms, of_nos);
        tips := verdict.stand;
        held := verdict.held;
    else
        verdict := metered._check_limits(charges, tips, held, clk, ahead, of_nos, known, used);
    end if;
    refused := verdict.refused;
    used := case when standing then verdict.used end;
    if refused is not null then
        if mode = 'raise' then
            raise exception 'a limit refuses the charge' using errcode = 'MT001', detail = refused;
        end if;
        return;
    end if;
    periods := case when standing then metered._periods_of(charges, tips, clk) end;
    if mode = 'look' then
        return;
    end if;
    crossings := metered._cross_thresholds(charges, verdict.used, held, clk, tips);
    if crossings.silent then
        if mode = 'raise' then
            perform metered._refuse_unreported();
        end if;
        used := null;
        refused := '[{"crossing": true}]';
        return;
    end if;
    tips := crossings.tips;
    crossed := crossings.crossings;
end
$$;

-- When the next lot of a wallet ends, if it lags (_lags) and all ends up to its last entry are
-- written by now. Else its lots_end, as it is.
create function metered._lots_end_caught_up(tip metered.ledger) returns timestamptz
language plpgsql volatile
as $$
begin
    if exists (select from metered.lot_rows y
            where y.scope = tip.scope and y.open and y.expires_at <= tip.at
            order by y.expires_at, y.age limit 1) then
        return tip.lots_end;
    end if;
    tip.lots_end := metered._next_end(tip.scope, tip.at);
    delete from metered.lot_holds k where k.scope = tip.scope and k.seq = 0;
    return tip.lots_end;
end
$$;

-- The locks of the charges' scopes, in order.
create function metered._lock_charges(charges metered.new_charge[], wait_ms int) returns boolean
language plpgsql volatile
as $$
begin
    return metered._lock_all_scopes(array(select c.scope from unnest(charges) c),
        array(select c.key from unnest(charges) c), wait_ms);
end
$$;

-- Charges scopes, all or none, without a command, and returns a refusal. Returning the whole
-- answer costs less than assigning each part.
create function metered.charge(charges metered.new_charge[], ahead interval, wait_ms int,
    standing boolean) returns metered.charged
language plpgsql volatile
as $$
begin
    return metered._write_charges(charges, ahead, wait_ms, null, 'answer', null, standing);
end
$$;

-- Charges costs that were incurred, whatever their limits, which only report thresholds. If the use
-- of a limit is unknown, no threshold is reported.
create function metered._charge_anyway(charges metered.new_charge[], ahead interval, wait_ms int,
    origin metered.origin, hold metered.hold_terms) returns metered.charged
language plpgsql volatile
as $$
declare
    tells  boolean := false;
    posted metered.charged;
begin
    for i in 1..cardinality(charges) loop
        charges[i].limits := array(select row(9223372036854775807, l.win, l.period, l.tell_at,
                l.thresholds, l.telling)::metered.charge_limit
            from unnest(charges[i].limits) l where l.thresholds is not null);
        tells := tells or cardinality(charges[i].limits) > 0;
    end loop;
    if tells then
        begin
            posted := metered._write_charges(charges, ahead, wait_ms, origin, 'answer', hold,
                false);
            if (posted.refused -> 0 ? 'limit') is not true then
                return posted;
            end if;
        exception when sqlstate 'MT002' or sqlstate 'MT003' or sqlstate 'MT010'
            or sqlstate 'MT012' then
        end;
        for i in 1..cardinality(charges) loop   -- a sum is beyond 64 bits, for example
            charges[i].limits := '{}';
        end loop;
    end if;
    return metered._write_charges(charges, ahead, wait_ms, origin, 'answer', hold, false);
end
$$;
