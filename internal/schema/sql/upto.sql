-- Charges and holds up to so many units: as many as the limits admit.

-- Units of each charge that its limits do not admit, by the charges' refusal.
create function metered._beyond_limits(charges metered.new_charge[], refused jsonb) returns bigint[]
language plpgsql immutable
as $$
declare
    charge    metered.new_charge;
    lim       metered.charge_limit;
    refusal   jsonb;
    nth_limit int := 0;
    most      numeric;
    all_of    bigint[];
begin
    foreach charge in array charges loop
        most := 0;
        foreach lim in array charge.limits loop
            refusal := jsonb_path_query_first(refused, '$[*] ? (@.limit == $n)',
                jsonb_build_object('n', nth_limit));
            most := greatest(most,
                charge.amount - lim.max + (refusal ->> 'used')::numeric
                    + (refusal ->> 'held')::bigint + (refusal ->> 'own')::bigint
                    + (refusal ->> 'leased')::bigint);
            nth_limit := nth_limit + 1;
        end loop;
        all_of := all_of || least(most, charge.amount)::bigint;
    end loop;
    return all_of;
end
$$;

-- _write_charges up to so many units. If limits refuse, all charges are cut by the same units, so
-- that each takes the same, and no less than fewest. Charges that hold units hold fewer then, and
-- spend as many as before. The second attempt has the locks and the clock of the first, so it is
-- refused only if fewest units do not fit, either. Its refusal is the answer.
create function metered._write_up_to(inout charges metered.new_charge[], fewest bigint,
    ahead interval, wait_ms int,
    origin metered.origin, mode text, hold metered.hold_terms, standing boolean,
    out posted metered.charged)
language plpgsql volatile
as $$
declare
    charge  metered.new_charge;
    units   bigint;
    less    bigint;
    holding boolean := false;
begin
    posted := metered._write_charges(charges, ahead, wait_ms, origin, 'answer', hold, standing);
    if posted.refused is null or mode = 'answer' and not posted.refused -> 0 ? 'limit' then
        return;
    end if;
    foreach charge in array charges loop
        holding := holding or charge.held > 0;
        units := case when charge.held > 0 then charge.held else coalesce(units, charge.amount) end;
    end loop;
    less := least(units - fewest, (select max(x)
            from unnest(metered._beyond_limits(charges, posted.refused)) x));
    for i in 1..cardinality(charges) loop
        if holding = (charges[i].held > 0) then
            charges[i].amount := charges[i].amount - less;
            charges[i].held := charges[i].held - case when holding then less else 0 end;
        end if;
    end loop;
    hold.at := posted.at;
    posted := metered._write_charges(charges, ahead, wait_ms, origin, mode, hold, standing);
end
$$;

-- The lots that paid for an entry, in order, as JSON: null for none. A unit that no lot covers is
-- in none of them. Aggregates inside lateral leave the planner no join to choose.
create function metered._lots_of(of_scope text, of_seq bigint) returns json
language plpgsql stable
as $$
begin
    return (select json_agg(json_build_object('lot', y.no, 'reference',
                coalesce(y.reference, y.of_reference),
            'category', y.category, 'amount', x.amount) order by x.nth)
        from metered.lot_moves x, lateral (
            select z.no, z.reference, (z.plan).of_reference, z.category
            from metered.lot_rows z where z.no = x.lot limit 1) y
        where x.scope = of_scope and x.seq = of_seq);
end
$$;

-- Charges scopes as charge does, and says which lots paid: lots has an element for each charge,
-- null for none. With up_to the amounts are equal: all of it is charged, or else the largest amount
-- that the limits of all scopes admit, at least 1. amount is this, and a refusal is of 1 unit. A
-- refusal of a command raises, because COMMIT follows, and its charges are kept for its record.
create function metered.charge_lots(charges metered.new_charge[], up_to boolean, ahead interval,
    wait_ms int,
    standing boolean, origin metered.origin, out amount bigint, out seqs bigint[],
    out ats timestamptz[],
    out used bigint[], out held bigint[], out refused jsonb, out periods timestamptz[],
    out crossed jsonb, out lots json)
language plpgsql volatile
as $$
declare
    mode    text := case when origin.operation is null then 'answer' else 'raise' end;
    charge  metered.new_charge;
    written record;
    posted  metered.charged;
    paid    json[];
begin
    {refuse: when = up_to is null, what = up_to};
    foreach charge in array charges loop
        {refuse: when = (charge.held = 0
                and charge.lease is null
                and charge.amount = case when up_to then charges[1].amount
                    else charge.amount end) is not true, what = amounts};
    end loop;
    if up_to then
        written := metered._write_up_to(charges, 1, ahead, wait_ms, origin, mode, null, standing);
        posted := written.posted;
        charges := written.charges;
        amount := charges[1].amount;
    else
        posted := metered._write_charges(charges, ahead, wait_ms, origin, mode, null, standing);
    end if;
    seqs := posted.seqs;
    ats := posted.ats;
    used := posted.used;
    held := posted.held;
    refused := posted.refused;
    periods := posted.periods;
    crossed := posted.crossed;
    if refused is not null then
        return;
    end if;
    for i in 1..cardinality(charges) loop
        paid[i] := metered._lots_of(charges[i].scope, seqs[i]);
        if origin.operation is not null then
            perform metered._remember_hold(json_build_object('drawn',
                    json_strip_nulls(json_build_object(
                'wallet', charges[i].scope, 'seq', seqs[i], 'at', ats[i], 'amount',
                charges[i].amount, 'lots', paid[i]))));
        end if;
    end loop;
    lots := to_json(paid);
end
$$;

-- The part of refused charges that limits admit: each cut by its own limits, or evenly, all cut by
-- as many units as the one that is cut most. Null if nothing is left.
create function metered._as_far_as_admitted(charges metered.new_charge[], refused jsonb,
    evenly boolean) returns metered.new_charge[]
language plpgsql immutable
as $$
declare
    charge metered.new_charge;
    less   bigint[] := metered._beyond_limits(charges, refused);
    most   bigint := case when evenly then (select max(x) from unnest(less) x) end;
    nth    int := 0;
    fit    metered.new_charge[];
begin
    foreach charge in array charges loop
        nth := nth + 1;
        charge.amount := charge.amount - coalesce(most, less[nth]);
        if charge.amount > 0 then
            fit := fit || charge;
        end if;
    end loop;
    return fit;
end
$$;
