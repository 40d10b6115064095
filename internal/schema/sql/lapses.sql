-- What a fold of a wallet's time needs (_advance), and readers, who answer from it.

-- What is due in a wallet by clk: lots that begin or end, lines of holds, and what these depend on.
-- Of lots whose end changes no other lot, and that no due line keeps units of, it has the first
-- max_lots (null: all), and those that go on, as far as a caller could draw so many units of them.
-- stop is the end of the first of the others. nos are holds, or null for all that are due: then lines
-- of which each gives units back, and nothing else, come as sums, if whoever asks writes none of their
-- rows (in_sum). With of_lots, it has these lots and no other that begins or ends.
create function metered._load_due(tip metered.ledger, clk timestamptz, max_lots int, units bigint,
    nos bigint[], in_sum boolean, of_lots bigint[],
    out lots metered.lots[], out lines metered.due_line[], out parts metered.lot_holds[],
    out debts metered.lot_debts[], out spent bigint, out stop timestamptz)
language plpgsql stable
as $$
declare
    until timestamptz := greatest(clk, tip.at);
    debt  bigint := metered._debt(tip);
    due   record;
    load  bigint[] := of_lots;
    ended bigint[];
    beyond bigint;      -- the first lot that is perhaps left
    first timestamptz;  -- when the first lot ends that shares a cap
    shared text[];      -- the categories of these
    few   record;
begin
    lines := '{}';
    parts := '{}';
    debts := '{}';
    if tip.next_due <= clk then
        due := metered._load_lines(tip, clk, nos, in_sum and debt = 0, max_lots = 0);
        lines := due.lines;
        parts := due.parts;
        load := load || array(select k.lot from unnest(parts) k where k.lot > 0);
    end if;
    if of_lots is null and ((max_lots = 0) is not true or tip.lots_end <= until) then
        ended := array(select y.no from metered.lot_rows y
            where y.scope = tip.scope and y.open and y.expires_at <= until
            order by y.expires_at, y.age limit max_lots + 1);
        beyond := ended[max_lots + 1];
        -- Each in the order of its index, which keeps the planner from the index of all.
        load := load
            || array(select y.no from metered.lot_rows y
                where y.scope = tip.scope and y.pending > 0 and y.starts_at <= until
                order by y.starts_at, y.age)
            || array(select y.no from metered.lot_rows y
                where y.scope = tip.scope and y.open and y.again and y.expires_at <= until
                order by y.expires_at, y.age)
            || array(select y.no from metered.lot_rows y
                where y.scope = tip.scope and y.keeps and y.roll_cap is not null
                  and y.expires_at <= until order by y.expires_at, y.age)
            || ended[:coalesce(max_lots, cardinality(ended))]
            || array(select y.no from metered.lot_rows y
                where y.scope = tip.scope and y.keeps and y.roll_cap is null
                  and y.expires_at <= until order by y.expires_at, y.age limit max_lots)
            || metered._load_rolling(tip.scope, until, case when beyond is not null then units end);
    end if;
    -- A join without the limit can be one that reads all lots.
    select array(select l from (select distinct n from unnest(load) n) x,
        lateral (select z from metered.lots z where z.no = x.n limit 1) y(l)
        order by (l).expires_at, (l).age) into lots;
    if beyond = any (load) then
        stop := (select y.expires_at from metered.lot_rows y
            where y.scope = tip.scope and y.open and y.expires_at <= until and y.no <> all (load)
            order by y.expires_at, y.age limit 1);
    else
        stop := (select y.expires_at from metered.lot_rows y where y.no = beyond);
    end if;
    first := (select min(x.expires_at) from unnest(lots) x
        where (x.plan).roll_shared and x.expires_at <= until);
    if first is not null then
        shared := array(select distinct x.category from unnest(lots) x where (x.plan).roll_shared);
        lots := lots || array(select l from (
                select y.no from unnest(shared) c, lateral (select z.no from metered.lot_rows z
                    where z.scope = tip.scope and z.category = c and z.origin = 'r'
                      and (z.open or z.keeps) and z.expires_at > first order by z.expires_at) y
                union select k.lot from metered.lot_holds k
                where k.scope = tip.scope and k.lot > 0) n,
            lateral (select z from metered.lots z where z.no = n.no limit 1) y(l)
            where n.no <> all (load) and (l).category = any (shared) and (l).origin = 'r'
              and (l).expires_at > first and ((l).plan).roll_shared
              and (l).rest + (l).kept + (l).held > 0);
    end if;
    few := metered._load_debt(tip.scope, debt, parts);
    parts := few.parts;
    debts := few.debts;
    spent := few.spent;
end
$$;

-- What is owed in a wallet that is overdrawn by so many units: the parts of overdrawn holds, after
-- those that are there, and what is spent, of which debts were drawn for uses.
create function metered._load_debt(of_scope text, owed bigint, inout parts metered.lot_holds[],
    out debts metered.lot_debts[], out spent bigint)
language plpgsql stable
as $$
begin
    debts := '{}';
    if owed > 0 then
        parts := parts || array(select row(o.*)::metered.lot_holds from metered.lot_holds o
            where o.scope = of_scope and o.seq = any (array(select z.seq from metered.lot_holds z
                where z.scope = of_scope and z.lot = 0 and z.seq > 0))
              and o.seq <> all (array(select k.seq from unnest(parts) k)) order by o.seq, o.lot);
        debts := metered._load_debts(of_scope);
    end if;
    spent := owed - (select coalesce(sum(k.amount), 0) from unnest(parts) k where k.lot = 0);
end
$$;

-- The first lots of a wallet that have ended, and go on, as far as a caller could draw so many units
-- of those.
create function metered._load_rolling(of_scope text, until timestamptz, units bigint)
returns bigint[]
language plpgsql stable
as $$
declare
    nos     bigint[] := '{}';
    its_lot metered.lots;
begin
    if (units > 0) is not true then
        return nos;
    end if;
    for its_lot in
        select y.* from metered.lots y
        where y.scope = of_scope and y.open and y.roll_cap is not null
          and y.expires_at <= until and y.roll_end > until
        order by y.priority, y.roll_end, y.age
    loop
        nos := nos || its_lot.no;
        units := units - metered._rolls(its_lot);
        exit when units <= 0;
    end loop;
    return nos;
end
$$;

-- Due lines of a wallet, in their order, and their parts: of the holds nos, or of all (null). In a sum,
-- those that fall due between the same ends of their own lots are one (_sum_lines), and lines with minima are
-- alone, unless these are in sums, too.
create function metered._load_lines(tip metered.ledger, clk timestamptz, nos bigint[], in_sum boolean,
    minima_too boolean, out lines metered.due_line[], out parts metered.lot_holds[])
language plpgsql stable
as $$
declare
    sums record;
begin
    if in_sum then
        sums := metered._sum_lines(tip, clk, minima_too);
        nos := case when minima_too then '{}' else array(
            select y.hold from metered.hold_lines y
            where y.scope = tip.scope and y.open > 0 and y.at_least > 0 and y.at_least > y.captured
              and y.due >= tip.next_due and y.due <= clk) end;
    elsif nos is null then
        nos := array(select y.hold from metered.hold_lines y
            where y.scope = tip.scope and y.open > 0 and y.due >= tip.next_due and y.due <= clk);
    end if;
    select coalesce(array_agg(row(y.hold, y.due, y.opened_seq, y.open, y.minimum, h.id,
            v.operation_tenant, v.operation, e.note ->> 'use')::metered.due_line
            order by y.due, y.opened_seq), '{}')
    into lines
    from (select z.*, least(z.open, greatest(0, z.at_least - z.captured)) as minimum
          from metered.hold_lines z where z.hold = any (nos) and z.scope = tip.scope and z.open <> 0
            and z.due >= tip.next_due and z.due <= clk) y
        left join lateral (select z.id from metered.holds z where z.no = y.hold) h on true
        left join lateral (select z.operation_tenant, z.operation from metered.hold_events z
            where y.minimum > 0 and z.hold = y.hold and z.version = 1) v on true
        left join lateral (select z.note from metered.ledger z
            where y.minimum > 0 and z.scope = tip.scope and z.seq = y.opened_seq) e on true;
    -- The order keeps the planner from a join that reads all parts of the wallet for each line.
    select array(select row(o.*)::metered.lot_holds
            from unnest(lines) with ordinality l, lateral (
                select z.* from metered.lot_holds z
                where z.scope = tip.scope and z.seq = l.opened_seq order by z.lot) o
            order by l.ordinality, o.lot)
    into parts;
    if in_sum then
        lines := lines || sums.lines;
        select array(select l from unnest(lines) l order by l.due, l.opened_seq),
            array(select k from unnest(parts || sums.parts) k, unnest(lines) l
                where l.opened_seq = k.seq order by l.due, k.seq, k.lot)
        into lines, parts;
    end if;
end
$$;

-- The due lines of a wallet that only give units back, and their parts, as a line for all that fall due
-- between the same ends of their own lots, at the time of the last. With minima, these come as another
-- such line, whose number is below 0, and which captures its parts whole. Of few lines the parts are
-- looked up, and of many those of the wallet are read, once.
create function metered._sum_lines(tip metered.ledger, clk timestamptz, minima_too boolean,
    out lines metered.due_line[], out parts metered.lot_holds[])
language plpgsql stable
set enable_nestloop = off
as $$
declare
    bounds timestamptz[] := array(select distinct y.expires_at from metered.lot_rows y
        where y.scope = tip.scope and y.expires_at > tip.next_due and y.expires_at <= clk
        order by y.expires_at);
    many boolean := 1000 < (select count(*) from (select from metered.hold_lines l
        where l.scope = tip.scope and l.open > 0 and l.due >= tip.next_due and l.due <= clk
        limit 1001) x);
begin
    with due as not materialized (
        select y.due, y.opened_seq, y.open,
            least(y.open, greatest(0, y.at_least - y.captured)) as minimum
        from metered.hold_lines y
        where y.scope = tip.scope and y.open > 0 and y.due >= tip.next_due and y.due <= clk
          and (minima_too or y.at_least <= y.captured)),
    held as (
        select d.*, z.lot, z.amount from due d, lateral (
            select k.lot, k.amount from metered.lot_holds k
            where k.scope = tip.scope and k.seq = d.opened_seq order by k.lot) z
        where not many
        union all
        select d.*, k.lot, k.amount from due d join metered.lot_holds k on k.seq = d.opened_seq
        where many and k.scope = tip.scope),
    -- Between ends of any lots of the wallet.
    sums as (
        select h.lot, sum(h.amount - h.taken)::bigint as freed, sum(h.taken)::bigint as taken,
            max(h.due) filter (where h.open > h.minimum) as due,
            max(h.opened_seq) filter (where h.open > h.minimum) as seq,
            max(h.due) filter (where h.minimum > 0) as taken_due,
            max(h.opened_seq) filter (where h.minimum > 0) as taken_seq
        from (select y.*, width_bucket(y.due, bounds) as span, case when y.minimum = 0 then 0
                  when y.amount = y.open then y.minimum
                  else metered._taken_of(tip.scope, y.opened_seq, y.lot, y.minimum) end as taken
              from held y) h
        group by h.span, h.lot),
    ends as (
        select array_agg(distinct r.expires_at order by r.expires_at)
            filter (where r.expires_at <= clk) as own
        from (select distinct s.lot from sums s) x, lateral (
            select z.expires_at from metered.lot_rows z where z.no = x.lot limit 1) r),
    kept as (
        select x.lot, x.units, x.due,
            max(x.seq) over (partition by x.span, x.sign) * x.sign as seq, x.sign
        from (select width_bucket(coalesce(s.due, s.taken_due), coalesce(e.own, '{}')) as span,
                  s.lot, p.*
              from ends e, sums s, lateral (values (1, s.freed, s.due, s.seq),
                  (-1, s.taken, s.taken_due, s.taken_seq)) p(sign, units, due, seq)
              where p.units > 0) x),
    lined as (
        select k.seq, max(k.due) as due, sum(k.units)::bigint as units from kept k group by k.seq)
    select array(select row(null, l.due, l.seq, l.units, case when l.seq < 0 then l.units else 0 end,
                null, null, null, null)::metered.due_line from lined l order by l.due, l.seq),
        array(select row(k.seq, k.lot, sum(k.units)::bigint, tip.scope)::metered.lot_holds
            from kept k join lined l on l.seq = k.seq
            group by l.due, k.seq, k.lot order by l.due, k.seq, k.lot)
    into lines, parts;
end
$$;

-- How many units of a lot a hold captures with a minimum: its lots give them in their order.
create function metered._taken_of(of_scope text, opened_seq bigint, of_lot bigint, minimum bigint)
returns bigint
language plpgsql stable
as $$
begin
    return (select x.taken
        from (select z.lot, greatest(0, least(z.amount, minimum + z.amount - sum(z.amount) over (
                  order by r.priority, r.expires_at, r.age))) as taken
              from metered.lot_holds z, lateral (select y.priority, y.expires_at, y.age
                  from metered.lot_rows y where y.no = z.lot limit 1) r
              where z.scope = of_scope and z.seq = opened_seq) x
        where x.lot = of_lot);
end
$$;

-- The lots of a wallet that are due, and those on which they depend, after all that is due. lapsed is
-- how many units of its balance have lapsed with them, less those that began, and debt by how many units
-- the wallet is overdrawn then. crossed are the reported thresholds that no lot has armed which began.
create function metered._due_state(tip metered.ledger, clk timestamptz,
    out lots metered.lots[], out lapsed bigint, out debt bigint, out crossed jsonb)
language plpgsql stable
as $$
declare
    until timestamptz := greatest(clk, tip.at);
    unwritten metered.unwritten[];
    due   record;
    after record;
begin
    if (tip.next_due <= clk or tip.lots_end <= until) is not true then
        lots := '{}';
        lapsed := 0;
        debt := metered._debt(tip);
        crossed := tip.crossed;
        return;
    end if;
    due := metered._load_due(tip, clk, 0, 0, null, true, null);
    if tip.crossed is not null and exists (select from unnest(due.lots) x where x.pending > 0) then
        unwritten := metered._unwritten(tip.scope, until, due.lots);
    end if;
    after := metered._advance(tip, until, null, unwritten, due.lines, due.lots, due.parts, due.debts,
        due.spent);
    lots := after.lots;
    crossed := (after.tip).crossed;
    lapsed := tip.credited - (after.tip).credited;
    debt := after.spent + (select coalesce(sum(k.amount), 0) from unnest(after.parts) k where k.lot = 0);
end
$$;

-- Units of the lots of a wallet that have ended, without those that are loaded, at the times of their
-- ends, and what of them goes on from there.
create function metered._unwritten(of_scope text, until timestamptz, loaded metered.lots[])
returns metered.unwritten[]
language plpgsql stable
as $$
begin
    return array(select row(e.at, e.units)::metered.unwritten
        from (select y.* from metered.lots y
              where y.scope = of_scope and y.open and y.expires_at <= until
                and y.no <> all (array(select l.no from unnest(loaded) l)) order by y.expires_at, y.age) x,
            lateral (select coalesce(metered._rolls(x), 0) as rolls) r,
            lateral (values (x.expires_at, x.rest - r.rolls), (x.roll_end, r.rolls)) e(at, units)
        where e.units > 0 and e.at <= until);
end
$$;

-- How many of unwritten units have lapsed by that time.
create function metered._lapsed_by(unwritten metered.unwritten[], until timestamptz) returns bigint
language plpgsql immutable
as $$
begin
    return (select coalesce(sum(x.units), 0) from unnest(unwritten) x where x.at <= until);
end
$$;

-- Units of a wallet that have lapsed by now, unwritten: so much too high is its last entry's balance, with the units that due holds free.
create function metered._lapsing(tip metered.ledger, clk timestamptz) returns bigint
language plpgsql stable
as $$
declare
    due record := metered._due_state(tip, clk);
begin
    return metered._lapsing_after(tip, clk, due.lots, due.lapsed, due.debt);
end
$$;

-- The same, after _due_state. It reads no more ended lots than a call writes. If there are more, it adds up the lots that have not ended.
create function metered._lapsing_after(tip metered.ledger, clk timestamptz, lots metered.lots[], lapsed bigint, debt bigint)
returns bigint
language plpgsql stable
as $$
declare
    until timestamptz := greatest(clk, tip.at);
    nos   bigint[];
    few   record;
begin
    if (tip.lots_end <= until) is not true then
        return lapsed;
    end if;
    nos := array(select x.no from unnest(lots) x where x.no > 0);
    select count(*) as n, sum(x.rest - case when x.roll_end > until then metered._rolls(x) else 0 end) as units into few
    from (select y.* from metered.lots y where y.scope = tip.scope and y.open and y.expires_at <= until and y.no <> all (nos)
          order by y.expires_at, y.age limit metered._ends_per_call() + 1) x;
    if few.n <= metered._ends_per_call() then
        return lapsed + coalesce(few.units, 0);
    end if;
    return metered._balance(tip) + case when tip.next_due <= clk then metered._due_units(tip.scope, tip.next_due, clk) - metered._minima(tip, null, clk) else 0 end
        + debt - (select coalesce(sum(x.rest), 0) from unnest(lots) x where (x.plan).uses is null)
        - (select coalesce(sum(x.rest), 0) from (select y.rest from metered.lots y
            where y.scope = tip.scope and y.open and y.expires_at > until and y.no <> all (nos) order by y.expires_at, y.age) x)
        - (select coalesce(sum(x.rest), 0) from (select y.rest from metered.lots y     -- applied to a use
            where y.scope = tip.scope and y.keeps and y.expires_at > until and y.no <> all (nos) order by y.expires_at, y.age) x)
        - (select coalesce(sum(x.units), 0) from (select metered._rolls(y) as units from metered.lots y
            where y.scope = tip.scope and y.open and y.roll_cap is not null and y.expires_at <= until and y.roll_end > until and y.no <> all (nos)
            order by y.priority, y.roll_end, y.age) x);
end
$$;

-- The lots of a wallet that have a rest or are held, as they are after all ends that are due. With of_nos, these lots and those that they go on in.
-- One that nobody has written yet and that has no number set aside has none.
create function metered._lots_now(tip metered.ledger, clk timestamptz, of_nos bigint[]) returns setof metered.lots
language plpgsql stable
as $$
begin
    return query select * from metered._lots_after(tip, clk, of_nos, (metered._due_state(tip, clk)).lots);
end
$$;

-- The same, after _due_state, of which due are the lots.
create function metered._lots_after(tip metered.ledger, clk timestamptz, of_nos bigint[], due metered.lots[])
returns setof metered.lots
language plpgsql stable
as $$
declare
    until   timestamptz := greatest(clk, tip.at);
    nos     bigint[] := array(select x.no from unnest(due) x where x.no > 0);
    family  bigint[] := of_nos;      -- and all that they went on in
    its_lot metered.lots;
begin
    foreach its_lot in array due loop
        if its_lot.no = any (family) or its_lot.from_lot = any (family) then
            family := family || its_lot.no;
        else
            continue when of_nos is not null;
        end if;
        if its_lot.rest + its_lot.kept + its_lot.held > 0 then
            its_lot.no := case when its_lot.no > 0 then its_lot.no end;
            return next metered._as_rest(its_lot);
        end if;
    end loop;
    for its_lot in
        -- In the order of the index of open lots, which is read without a sort: that keeps the planner from the index of all.
        select y.* from ((select x.no from metered.lot_rows x where of_nos is null and x.scope = tip.scope and x.open order by x.expires_at, x.age)
                         union select k.lot from metered.lot_holds k where of_nos is null and k.scope = tip.scope and k.lot > 0
                         union (select x.no from metered.lot_rows x where of_nos is null and x.scope = tip.scope and x.keeps order by x.priority, x.expires_at, x.age)
                         union select unnest(of_nos)) n,
            -- A join without the limit can be one that reads all lots.
            lateral (select z.* from metered.lots z where z.no = n.no limit 1) y
        where y.no <> all (nos)
    loop
        its_lot.rest := its_lot.rest + its_lot.kept;
        its_lot.kept := 0;
        while its_lot.rest > 0 and its_lot.expires_at <= until loop
            if its_lot.held > 0 then
                its_lot.rest := 0;
                return next its_lot;
                select y.* into its_lot from metered.lots y where y.no = its_lot.no;
                its_lot.held := 0;
            end if;
            its_lot := metered._as_rest(metered._gone_on(its_lot, metered._rolls(its_lot), 9223372036854775807, null));
        end loop;
        if its_lot.rest > 0 or its_lot.held > 0 then
            return next its_lot;
        end if;
    end loop;
end
$$;

-- The last entries of scopes as if all lapses that are due in wallets were written, without the thresholds
-- that lots have armed which begin.
create function metered._without_lapsing(tips metered.ledger[], clk timestamptz) returns metered.ledger[]
language plpgsql stable
as $$
declare
    tip metered.ledger;
    nth int := 0;
    due record;
begin
    foreach tip in array tips loop
        nth := nth + 1;
        if tip.lots_end is not null then
            due := metered._due_state(tip, clk);
            tip.credited := tip.credited - metered._lapsing_after(tip, clk, due.lots, due.lapsed, due.debt);
            tip.crossed := due.crossed;
            tips[nth] := tip;
        end if;
    end loop;
    return tips;
end
$$;
