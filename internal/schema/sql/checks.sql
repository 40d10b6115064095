-- What a charge would meet, and what counts in a scope: answers of the same rules that write
-- nothing.

-- The answer of _check_limits to charges as if due holds had ended, without ending them. Lots for
-- the use of a charge raise its lifetime limits.
create function metered._check_now(charges metered.new_charge[], tips metered.ledger[],
    clk timestamptz, ahead interval,
    out used bigint[], out held bigint[], out refused jsonb)
language plpgsql stable
as $$
declare
    tip     metered.ledger;
    charge  metered.new_charge;
    verdict record;
    before  metered.ledger[] := tips;
    asked   metered.new_charge[];   -- charges as they came, if one is for a use
    nth     int := 0;
    told    record;
begin
    foreach tip in array tips loop
        held := held || tip.held - case when tip.next_due <= clk
            then metered._due_units(tip.scope, tip.next_due, clk) else 0 end;
    end loop;
    tips := metered._without_lapsing(tips, clk);
    foreach charge in array charges loop
        nth := nth + 1;
        if charge.note ? 'use' and before[nth].lots_end is not null then
            asked := coalesce(asked, charges);
            charges[nth].limits := metered._raised(charge.limits,
                metered._kept_for(before[nth], charge.note ->> 'use', clk),
                tips[nth].spent - tips[nth].refunded - tips[nth].credited + held[nth]
                + case when tips[nth].next_due <= clk then metered._minima(tips[nth], null, clk)
                    else 0 end);
        end if;
    end loop;
    verdict := metered._check_limits(charges, tips, held, clk, ahead, null, null, null);
    used := verdict.used;
    refused := verdict.refused;
    if asked is not null then
        told := metered._told_use(asked, charges, null, used, refused);
        used := told.used;
        refused := told.refused;
    end if;
end
$$;

-- The answer of charge at this moment, without a lock and without writing. STABLE, so that
-- all its statements see one snapshot.
create function metered.check_charge(charges metered.new_charge[], ahead interval,
    out used bigint[], out held bigint[], out refused jsonb, out periods timestamptz[])
language plpgsql stable
as $$
declare
    charge  metered.new_charge;
    tips    metered.ledger[];
    clk     timestamptz := metered.clock();
    verdict record;
begin
    foreach charge in array charges loop
        tips := tips || metered._last_entry(charge.scope);
        if charge.must_exist then
            refused := metered._with_absent(refused, charge.scope, metered._absence(charge.scope));
        end if;
    end loop;
    if refused is not null then
        return;
    end if;
    verdict := metered._check_now(charges, tips, clk, ahead);
    used := verdict.used;
    held := verdict.held;
    refused := verdict.refused;
    periods := metered._periods_of(charges, tips, clk);
end
$$;

-- The state of each scope, for each pair with a window. Window 0 is the lifetime, and a null one is
-- a period. with_leases: spends of open leases are used, and not held. charges says how many
-- charges were made in it, refunded or not.
create function metered.usage_of(scopes text[], windows interval[], periods metered.period[],
    with_leases boolean)
returns table (used bigint, held bigint, spent bigint, refunded bigint, credited bigint, seq bigint,
    due_us bigint, leased bigint, starts_at timestamptz, ends_at timestamptz, charges bigint)
language plpgsql stable
as $$
declare
    {usage variables}
begin
    for i in 1..cardinality(scopes) loop
        {usage tip: scope = scopes[i]}
        {usage: scope = scopes[i], win = windows[i], period = periods[i], leases = with_leases}
        refunded := tip.refunded;
        credited := tip.credited;
        seq := tip.seq;
        due_us := case when held > 0 then
            extract(epoch from metered._first_due(scopes[i], tip.next_due, clk) - clk)
                * 1000000 end;
        return next;
    end loop;
end
$$;

-- usage_of without charges, for programs of version 1.
create function metered.usage(scopes text[], windows interval[], periods metered.period[],
    with_leases boolean)
returns table (used bigint, held bigint, spent bigint, refunded bigint, credited bigint, seq bigint,
    due_us bigint, leased bigint, starts_at timestamptz, ends_at timestamptz)
language plpgsql stable
as $$
begin
    return query select u.used, u.held, u.spent, u.refunded, u.credited, u.seq, u.due_us, u.leased,
        u.starts_at, u.ends_at
        from metered.usage_of(scopes, windows, periods, with_leases) u;
end
$$;
