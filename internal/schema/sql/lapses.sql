-- The lots of a wallet after the ends that are due, for readers, who write none of them: duelots.sql says in which order ends happen.

-- The lot into which so many units of l roll over at its end, or null for none. It has no number if nobody has written l yet. As long as nobody has written it,
-- granted_seq is the number of the written lot, or of the period's, that had the units first.
create function metered._gone_on(l metered.lots, units bigint) returns metered.lots
language plpgsql stable
as $$
declare
    child metered.lots;
begin
    if units > 0 then
        child.no := l.roll_no;
        child.granted_at := l.expires_at;
        child.granted_seq := case when l.last_seq is null then l.granted_seq else l.no end;
        child.expires_at := l.roll_end;
        child.amount := units;
        child.rest := units;
        child.held := 0;
        child.pending := 0;
        child.kept := 0;
        child.from_lot := l.no;
        child.priority := l.priority;
        child.scope := l.scope;
        child.age := l.age[1:2] || 9223372036854775807;
        child.category := l.category;
        child.origin := 'r';
        child.plan := metered._plan_on(l);
        if (l.plan).roll_again <> 0 then
            child.roll_cap := l.roll_cap;
            child.roll_end := metered._roll_end(child.expires_at, child.plan, (l.plan).roll_for);
        end if;
    end if;
    return child;
end
$$;

-- Overdraft by use, with so many units more for one use, or for none.
create function metered._with_debt(debts metered.lot_debts[], of_use text, units bigint) returns metered.lot_debts[]
language plpgsql immutable
as $$
begin
    return array(select row(sum(y.amount)::bigint, '', y.use)::metered.lot_debts
        from (select x.amount, x.use from unnest(debts) x union all select units, of_use where of_use is not null and units > 0) y
        group by y.use order by y.use);
end
$$;

-- Overdraft by use, less so many units, in the order of the uses: of all, or only of some.
create function metered._without_debt(debts metered.lot_debts[], units bigint, for_uses text[]) returns metered.lot_debts[]
language plpgsql immutable
as $$
declare
    part bigint;
begin
    for n in 1..cardinality(debts) loop
        continue when debts[n].use <> all (for_uses);
        part := greatest(0, least(units, debts[n].amount));
        debts[n].amount := debts[n].amount - part;
        units := units - part;
    end loop;
    return debts;
end
$$;

-- The lots of a wallet after all that is due, as settle would write it: those of which due holds keep units, those that begin, those on whose end others
-- depend, and those into which one of these rolls over. lapsed is how many units lapsed, less those that began, and debt by how many units the wallet is still
-- overdrawn.
create function metered._due_lots(tip metered.ledger, clk timestamptz, out lots metered.lots[], out lapsed bigint, out debt bigint)
language plpgsql stable
as $$
declare
    until       timestamptz := greatest(clk, tip.at);
    due         boolean := coalesce(tip.next_due <= clk, false); -- some holds are
    of_holds    metered.lot_holds[] := '{}'; -- units of these holds, and overdrawn units of other holds
    starts      metered.lots[] := '{}';     -- that begin
    begun       boolean;                    -- some have
    spent       bigint := 0;                -- of debt
    debts       metered.lot_debts[] := '{}'; -- the part of spent that was drawn for uses
    came        int[];                      -- places in lots whose units have come in this step
    at          timestamptz := tip.at;
    child       metered.lots;
    follows     metered.lots;               -- the lot of its next period
    nos         bigint[] := '{}';           -- of the due holds, in their order, with their times, entries and minima
    times       timestamptz[];
    seqs        bigint[];
    minima      bigint[];
    next_hold   int := 1;                   -- the place of the next one
    held        record;                     -- units of a lot in due holds
    overdrawn   record;                     -- a row of an overdrawn hold
    lot_pos     int;                        -- a place in lots
    start_pos   int;                        -- a place in starts
    part        bigint;
    units       bigint;
    max_written constant bigint := 4611686018427387904; -- numbers beyond it name lots that nobody has written yet, so that holds can name them
    new_no      bigint := max_written;      -- the last one
    later       bigint := max_written;      -- entries beyond it are not written
begin
    debt := metered._debt(tip);
    lapsed := 0;
    lots := '{}';
    if tip.lots_end <= until then
        select array(select y from metered.lots y where y.scope = tip.scope and y.pending > 0 and y.starts_at <= until order by y.starts_at, y.age) into starts;
        select array(select y from metered.lots y where y.scope = tip.scope and y.open and y.again and y.expires_at <= until order by y.expires_at, y.age)
            || array(select metered._as_rest(y) from metered.lots y
                where y.scope = tip.scope and y.keeps and y.roll_cap is not null and y.again and y.expires_at <= until order by y.expires_at, y.age)
        into lots;
    end if;
    begun := starts <> '{}';
    if due and debt = 0 and starts = '{}' and lots = '{}' then    -- then no hold pays for another one, and one statement does
        for held in
            select o.lot, sum(o.amount)::bigint as kept, coalesce(sum(o.freed) filter (where o.expires_at > greatest(o.due, tip.at)), 0)::bigint as back,
                coalesce(sum(o.freed) filter (where o.expires_at <= greatest(o.due, tip.at)), 0)::bigint as late
            from (select y.due, x.lot, x.amount, x.expires_at, least(x.amount, greatest(0, x.upto - greatest(0, y.at_least - y.captured))) as freed
                  from metered.hold_lines y, lateral (
                      select z.lot, z.amount, v.expires_at, sum(z.amount) over (order by v.priority, v.expires_at, v.age) as upto
                      from metered.lot_holds z, lateral (select w.age, w.priority, w.expires_at from metered.lot_rows w where w.no = z.lot limit 1) v
                      where z.scope = y.scope and z.seq = y.opened_seq) x
                  where y.scope = tip.scope and y.open > 0 and y.due >= tip.next_due and y.due <= clk) o
            group by o.lot order by o.lot
        loop
            select y.* into child from metered.lots y where y.no = held.lot;
            child := metered._as_rest(child);
            child.held := child.held - held.kept;
            child.rest := child.rest + held.back;
            lapsed := lapsed + held.late + case when (child.plan).uses is not null then held.back else 0 end;
            lots := lots || child;
        end loop;
    elsif due or starts <> '{}' or lots <> '{}' then
        if due then
            select array_agg(y.hold order by y.due, y.opened_seq), array_agg(y.due order by y.due, y.opened_seq), array_agg(y.opened_seq order by y.due, y.opened_seq),
                array_agg(least(y.open, greatest(0, y.at_least - y.captured)) order by y.due, y.opened_seq)
            into nos, times, seqs, minima
            from metered.hold_lines y where y.scope = tip.scope and y.open > 0 and y.due >= tip.next_due and y.due <= clk;
            nos := coalesce(nos, '{}');
            select array(select row(o.*)::metered.lot_holds from metered.lot_holds o where o.scope = tip.scope and o.seq = any (seqs) order by o.seq, o.lot)
            into of_holds;
            lots := lots || array(select metered._as_rest(y) from metered.lots y where y.no = any (array(select o.lot from unnest(of_holds) o))
                and y.no <> all (array(select x.no from unnest(lots) x)) order by y.no);
        end if;
        of_holds := of_holds || array(select row(o.*)::metered.lot_holds from metered.lot_holds o
            where debt > 0 and o.scope = tip.scope and o.lot = 0 and o.seq > 0 and o.seq <> all (array(select x.seq from unnest(of_holds) x)) order by o.seq);
        spent := debt - (select coalesce(sum(o.amount), 0) from unnest(of_holds) o where o.lot = 0);
        select array(select row(y.*)::metered.lot_debts from metered.lot_debts y
            where y.scope = tip.scope order by y.use) into debts;
    end if;
    loop
        came := '{}';
        lot_pos := (select x.pos from generate_subscripts(lots, 1) x(pos) where lots[x.pos].rest > 0 and lots[x.pos].expires_at <= until
            order by lots[x.pos].expires_at, lots[x.pos].age, x.pos limit 1);
        start_pos := (select x.pos from generate_subscripts(starts, 1) x(pos) order by starts[x.pos].starts_at, starts[x.pos].age, x.pos limit 1);
        if lot_pos is not null and lots[lot_pos].expires_at <= coalesce(starts[start_pos].starts_at, 'infinity') and lots[lot_pos].expires_at <= coalesce(times[next_hold], 'infinity') then
            units := metered._rolls_among(lots[lot_pos], lots);
            child := metered._gone_on(lots[lot_pos], units);
            lapsed := lapsed + case when (lots[lot_pos].plan).uses is null then lots[lot_pos].rest - units else 0 end;
            if lots[lot_pos].held = 0 and (lots[lot_pos].no > max_written or lots[lot_pos].last_seq is null) then   -- nobody has written it, and nothing is left of it
                lots := lots[:lot_pos - 1] || lots[lot_pos + 1:];
            else
                lots[lot_pos].rest := 0;
                lots[lot_pos].roll_cap := null;
            end if;
            if units > 0 then
                new_no := new_no + (child.no is null)::int;
                child.no := coalesce(child.no, new_no);
                lots := lots || child;
            end if;
            continue;
        elsif start_pos is not null and starts[start_pos].starts_at <= coalesce(times[next_hold], 'infinity') then
            child := starts[start_pos];
            at := greatest(at, child.starts_at);
            starts := starts[:start_pos - 1] || starts[start_pos + 1:];
            later := later + 1;
            if ((child.plan).renews).every is not null and (metered._next_lot(child)).starts_at <= until then
                follows := metered._next_lot(child);
                follows.age := array[(extract(epoch from follows.starts_at) * 1000000)::bigint, later, later];
                starts := starts || follows;
            end if;
            if (child.plan).uses is null then
                lapsed := lapsed - child.pending;
            end if;
            child.rest := child.pending;
            child.pending := 0;
            child.granted_at := child.starts_at;
            if child.no is null then
                new_no := new_no + 1;
                child.no := new_no;
                child.granted_seq := new_no;
                child.last_seq := null;
            end if;
            child.age := array[(extract(epoch from child.starts_at) * 1000000)::bigint, later, later];
            lots := lots || child;
            came := array[cardinality(lots)];
        elsif next_hold <= cardinality(nos) then
            at := greatest(at, times[next_hold]);
            units := minima[next_hold];
            for held in
                select o.n, o.lot, o.amount, y.n as pos from unnest(of_holds) with ordinality o(seq, lot, amount, scope, n)
                    left join (select x.no, x.priority, x.expires_at, x.age, row_number() over () as n from unnest(lots) x) y on y.no = o.lot
                where o.seq = seqs[next_hold] and o.amount > 0 order by y.priority, y.expires_at, y.age
            loop
                part := least(units, held.amount);
                units := units - part;
                of_holds[held.n].amount := 0;
                if held.lot = 0 then
                    spent := spent + part;
                    debts := metered._with_debt(debts, (select e.note ->> 'use' from metered.ledger e where e.scope = tip.scope and e.seq = seqs[next_hold]), part);
                    continue;
                end if;
                lot_pos := held.pos;
                lots[lot_pos].held := lots[lot_pos].held - held.amount;
                if lots[lot_pos].expires_at <= at or (lots[lot_pos].plan).uses is not null then
                    lapsed := lapsed + held.amount - part;     -- or back to its uses
                end if;
                if lots[lot_pos].expires_at > at then
                    lots[lot_pos].rest := lots[lot_pos].rest + held.amount - part;
                    came := came || lot_pos;
                end if;
            end loop;
            next_hold := next_hold + 1;
        else
            exit;
        end if;
        continue when spent + (select coalesce(sum(o.amount), 0) from unnest(of_holds) o where o.lot = 0) = 0;
        -- As _pay_back does it.
        for lot_pos in select x.pos from generate_subscripts(lots, 1) x(pos) where lots[x.pos].rest > 0 and (lots[x.pos].plan).uses is null
            order by lots[x.pos].priority, lots[x.pos].expires_at, lots[x.pos].age
        loop
            part := least(spent, lots[lot_pos].rest);
            debts := metered._without_debt(debts, part - spent + (select coalesce(sum(y.amount), 0) from unnest(debts) y)::bigint, null);
            spent := spent - part;
            lots[lot_pos].rest := lots[lot_pos].rest - part;
            for overdrawn in select o.n, o.amount from unnest(of_holds) with ordinality o(seq, lot, amount, scope, n) where o.lot = 0 and o.amount > 0 order by o.seq loop
                part := least(overdrawn.amount, lots[lot_pos].rest);
                exit when part = 0;
                of_holds[overdrawn.n].amount := overdrawn.amount - part;
                of_holds := of_holds || row(of_holds[overdrawn.n].seq, lots[lot_pos].no, part, tip.scope)::metered.lot_holds;
                lots[lot_pos].rest := lots[lot_pos].rest - part;
                lots[lot_pos].held := lots[lot_pos].held + part;
            end loop;
        end loop;
        -- As _pay_debts does it.
        for lot_pos in select n from unnest(came) n where (lots[n].plan).uses is not null order by lots[n].no loop
            part := least(lots[lot_pos].rest, (select coalesce(sum(y.amount), 0) from unnest(debts) y where y.use = any ((lots[lot_pos].plan).uses)));
            debts := metered._without_debt(debts, part, (lots[lot_pos].plan).uses);
            spent := spent - part;
            lapsed := lapsed - part;
            lots[lot_pos].rest := lots[lot_pos].rest - part;
        end loop;
    end loop;
    for lot_pos in 1..case when new_no > max_written then cardinality(lots) else 0 end loop
        if lots[lot_pos].no > max_written then
            lots[lot_pos].no := null;
        end if;
    end loop;
    if due or begun then
        debt := case when nos <> '{}' or begun or of_holds <> '{}' then coalesce(spent, 0) + (select coalesce(sum(o.amount), 0) from unnest(of_holds) o where o.lot = 0) else debt end;
    end if;
end
$$;

-- Units of a wallet that have lapsed by now, unwritten: so much too high is its last entry's balance, with the units that due holds free. It reads no more ended
-- lots than a call writes. If there are more, it adds up the lots that have not ended.
create function metered._lapsing(tip metered.ledger, clk timestamptz) returns bigint
language plpgsql stable
as $$
declare
    until timestamptz := greatest(clk, tip.at);
    d     record;
    nos   bigint[];
    few   record;
begin
    d := metered._due_lots(tip, clk);
    if (tip.lots_end <= until) is not true then
        return d.lapsed;
    end if;
    nos := array(select x.no from unnest(d.lots) x where x.no is not null);
    select count(*) as n, sum(x.rest - case when x.roll_end > until then metered._rolls(x) else 0 end) as units into few
    from (select y.* from metered.lots y where y.scope = tip.scope and y.open and y.expires_at <= until and y.no <> all (nos)
          order by y.expires_at, y.age limit metered._ends_per_call() + 1) x;
    if few.n <= metered._ends_per_call() then
        return d.lapsed + coalesce(few.units, 0);
    end if;
    return metered._balance(tip) + case when tip.next_due <= clk then metered._due_units(tip.scope, tip.next_due, clk) - metered._minima(tip, null, clk) else 0 end
        + d.debt - (select coalesce(sum(x.rest), 0) from unnest(d.lots) x where (x.plan).uses is null)
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
declare
    until timestamptz := greatest(clk, tip.at);
    due   metered.lots[] := (metered._due_lots(tip, clk)).lots;
    nos   bigint[] := array(select x.no from unnest(due) x where x.no is not null);
    l     metered.lots;
begin
    foreach l in array due loop
        if (l.rest > 0 or l.held > 0) and (l.no = any (of_nos) or l.from_lot = any (of_nos) or l.last_seq is null and l.granted_seq = any (of_nos) or of_nos is null) then
            return next l;
        end if;
    end loop;
    for l in
        -- In the order of the index of open lots, which is read without a sort: that keeps the planner from the index of all.
        select y.* from ((select x.no from metered.lot_rows x where of_nos is null and x.scope = tip.scope and x.open order by x.expires_at, x.age)
                         union select k.lot from metered.lot_holds k where of_nos is null and k.scope = tip.scope and k.lot > 0
                         union (select x.no from metered.lot_rows x where of_nos is null and x.scope = tip.scope and x.keeps order by x.priority, x.expires_at, x.age)
                         union select unnest(of_nos)) n,
            -- A join without the limit can be one that reads all lots.
            lateral (select z.* from metered.lots z where z.no = n.no limit 1) y
        where y.no <> all (nos)
    loop
        l.rest := l.rest + l.kept;
        l.kept := 0;
        while l.rest > 0 and l.expires_at <= until loop
            if l.held > 0 then
                l.rest := 0;
                return next l;
                select y.* into l from metered.lots y where y.no = l.no;
                l.held := 0;
            end if;
            l := metered._gone_on(l, metered._rolls(l));
        end loop;
        if l.rest > 0 or l.held > 0 then
            return next l;
        end if;
    end loop;
end
$$;

-- The last entries of scopes as if all lapses that are due in wallets were written.
create function metered._without_lapsing(tips metered.ledger[], clk timestamptz) returns metered.ledger[]
language plpgsql stable
as $$
declare
    tip metered.ledger;
    i   int := 0;
begin
    foreach tip in array tips loop
        i := i + 1;
        if tip.lots_end is not null then
            tip.credited := tip.credited - metered._lapsing(tip, clk);
            tips[i] := tip;
        end if;
    end loop;
    return tips;
end
$$;
