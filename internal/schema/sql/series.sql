-- Usage by time. The sums of a scope at the beginning and at the end of a range are those of two
-- entries, so a range costs the two look-ups, and a series of ranges one look-up for each edge.

-- The sums of a scope's chain before each of the times, which ascend. seq is the last entry before
-- it, refunded_after has the refunds, up to now, of charges after it, and unsettled the spends from
-- open leases between the time and the next one. charges and unsettled_charges say how many charges
-- spent and unsettled are of. If a purge took an answer away, the last row has known_from, since
-- when usage is known. STABLE, so that all its statements see one snapshot.
create function metered.usage_before(of_scope text, times timestamptz[])
returns table (seq bigint, spent bigint, refunded bigint, credited bigint, refunded_after bigint,
    unsettled bigint, known_from timestamptz, charges bigint, unsettled_charges bigint)
language plpgsql stable
as $$
declare
    tip    metered.ledger := metered._last_entry(of_scope);
    clk    timestamptz := metered.clock();
    open   bigint[];
    due    bigint[];
    apart  bigint[];     -- units of tallies before each time
    opens  bigint[];     -- how many they are
    dues   bigint[];
    aparts bigint[];
    lapsed bigint[];    -- units of a wallet, before each time after tip
    until  timestamptz;
begin
    perform metered._require(cardinality(times) between 1 and 2001
        and array_ndims(times) = 1
        and array_lower(times, 1) = 1
        and array_position(times, null) is null, 'times');
    open := case when tip.held > 0 then metered._unsettled_spends(of_scope, times, false) end;
    opens := case when open is not null then metered._unsettled_spends(of_scope, times, true) end;
    due := case when tip.next_due <= clk then metered._due_minima(tip, times, clk, false) end;
    dues := case when due is not null then metered._due_minima(tip, times, clk, true) end;
    apart := case when tip.tallied then metered._tallies_before(tip, times, false) end;
    aparts := case when apart is not null then metered._tallies_before(tip, times, true) end;
    lapsed := case when tip.lots_end is not null then metered._lapsing_before(tip, times, clk) end;
    for i in 1..cardinality(times) loop
        until := times[i] - interval '1 microsecond';       -- an entry at an edge is after it
        unsettled := coalesce(open[i], 0);
        unsettled_charges := coalesce(opens[i], 0);
        if tip.at <= until then
            seq := tip.seq;
            spent := tip.spent + coalesce(due[i], 0) + coalesce(apart[i], 0);
            refunded := tip.refunded;
            credited := tip.credited - coalesce(lapsed[i], 0);
            refunded_after := 0;
            charges := tip.seq - coalesce({others: tip = tip}, 0) + coalesce(dues[i], 0)
                + coalesce(aparts[i], 0);
            return next;
            continue;
        end if;
        select b.seq, b.spent, b.refunded into seq, spent, refunded
        from metered._base(of_scope, tip.seq, tip.epoch, until) b;
        if seq is null
            and tip.epoch = 0
            and (select l.at > until
                from metered.ledger l where l.scope = of_scope and l.seq = 1) then
            seq := 0;       -- before the scope began: a purge leaves
                            -- entry 1, which says when that was
            spent := 0;
            refunded := 0;
        elsif seq is null then
            known_from := metered._usage_known_from(tip);
            return next;
            return;
        end if;
        credited := case when tip.credited = 0 and tip.lots_end is null then 0 else
            coalesce((select l.credited
                    from metered.ledger l
                    where l.scope = of_scope and l.seq = usage_before.seq), 0) end;
        -- The rows of refund_sum that a purge took are of charges before seq.
        refunded_after := case when refunded = tip.refunded then 0 when seq = 0 then tip.refunded
            else metered._refunds_after(of_scope, tip.seq, seq) end;
        charges := metered._charges_upto(of_scope, seq);
        return next;
    end loop;
end
$$;

-- usage_before without charges, for programs of version 1.
create function metered.usage_at(of_scope text, times timestamptz[])
returns table (seq bigint, spent bigint, refunded bigint, credited bigint, refunded_after bigint,
    unsettled bigint, known_from timestamptz)
language plpgsql stable
as $$
begin
    return query select u.seq, u.spent, u.refunded, u.credited, u.refunded_after, u.unsettled,
        u.known_from
        from metered.usage_before(of_scope, times) u;
end
$$;

-- How many units of a wallet have lapsed, unwritten, before each of the times, which ascend, less
-- those that began: 0 before its entry tip. From one event of the wallet to the next one it is the
-- same.
create function metered._lapsing_before(tip metered.ledger, times timestamptz[], clk timestamptz)
    returns bigint[]
language plpgsql stable
as $$
declare
    units  bigint[] := array_fill(0::bigint, array[cardinality(times)]);
    at     timestamptz;
    until  timestamptz;
    comes  timestamptz := '-infinity';      -- the next event
    due    record;
    lapsed bigint;
begin
    for i in 1..cardinality(times) loop
        at := least(clk, times[i] - interval '1 microsecond');
        continue when times[i] <= tip.at;
        if at >= comes then
            until := greatest(at, tip.at);
            due := metered._due_state(tip, at);
            lapsed := metered._lapsing_after(tip, at, due.lots, due.lapsed, due.debt);
            comes := least(metered._next_end(tip.scope, until),
                (select min(metered._turn_at(x)) from unnest(due.lots) x
                 where x.pending + x.rest + x.kept + x.held > 0 and metered._turn_at(x) > until),
                (select min(y.roll_end) from metered.lot_rows y
                 where y.scope = tip.scope and y.open and y.roll_cap is not null
                   and y.expires_at <= until and y.roll_end > until),
                (select l.due from metered.hold_lines l
                 where l.scope = tip.scope and l.open > 0 and l.due > at order by l.due limit 1));
        end if;
        units[i] := lapsed;
    end loop;
    return units;
end
$$;

-- The minima of a scope's due lines, not freed yet, that count before each of the times (see
-- _minima), or how many they are.
create function metered._due_minima(tip metered.ledger, times timestamptz[], clk timestamptz,
    counting boolean) returns bigint[]
language plpgsql stable
as $$
declare
    units bigint[] := array_fill(0::bigint, array[cardinality(times)]);
    total bigint := 0;
    line  record;
begin
    for line in
        select width_bucket(greatest(l.due, tip.at), times) as nth,
            sum(case when counting then 1 else l.at_least - l.captured end)::bigint as amount
        from metered.hold_lines l
        where l.scope = tip.scope
            and l.open > 0
            and l.at_least > 0
            and l.at_least > l.captured
            and l.due >= tip.next_due
            and l.due <= clk
        group by 1 order by 1
    loop
        if line.nth < cardinality(times) then
            units[line.nth + 1] := line.amount;
        end if;
    end loop;
    for i in 1..cardinality(times) loop
        total := total + units[i];
        units[i] := total;
    end loop;
    return units;
end
$$;

-- The spends from the open leases of a scope, from each time on until the next one, or how many
-- they are. It reads all of their spends.
create function metered._unsettled_spends(of_scope text, times timestamptz[], counting boolean)
    returns bigint[]
language plpgsql stable
as $$
declare
    units bigint[] := array_fill(0::bigint, array[cardinality(times)]);
    spend record;
begin
    for spend in
        select width_bucket(x.at, times) as nth,
            sum(case when counting then 1 else x.amount end)::bigint as amount
        -- In order, or the planner may take the index of the history, and read all that was ever
        -- settled.
        from (select y.no from metered.leases y
              where y.scope = of_scope and y.settled_at is null and y.mode = 's'
              order by y.ends_at) l,
             lateral (select s.at, s.amount
                 from metered.lease_spends s
                 where s.lease = l.no and s.at >= times[1] offset 0) x
        group by 1
    loop
        units[spend.nth] := spend.amount;
    end loop;
    return units;
end
$$;

-- Since when the usage of a scope is known whose entries a purge has taken: after the first entry
-- that it left. That entry counts no later than the clock repairs after it.
create function metered._usage_known_from(tip metered.ledger) returns timestamptz
language plpgsql stable
as $$
declare
    since timestamptz;
    first int;
begin
    select l.at, l.epoch into since, first
    from metered.ledger l
    where l.scope = tip.scope and l.seq > 1 order by l.seq limit 1;
    for e in first + 1..tip.epoch loop
        since := least(since, (select l.at from metered.ledger l
            where l.scope = tip.scope and l.epoch = e and (l.seq & 15 = 1 or l.kind = 'k')
            order by l.at, l.seq limit 1));
    end loop;
    return since + interval '1 microsecond';
end
$$;

-- Scans up to look entries between two numbers, forwards or backwards, for entries with the texts
-- of made_by.note, with made_by.operation, and of a command of that name (null is any). It returns
-- up to most + 1 of them, and always the last entry that it looked at. more: there may be others
-- after that.
create function metered.search_entries(of_scope text, after_seq bigint, before_seq bigint,
    backwards boolean, look int, most int, made_by metered.origin, named text)
returns table (entry metered.ledger, matched boolean, more boolean)
language plpgsql stable
as $$
declare
    stop bigint;    -- the last entry to be read
begin
    perform metered._require(look between 1 and 100000
        and most between 1 and 1000
        and backwards is not null, 'search');
    if backwards then
        select min(x.seq), count(*) >= look into stop, more
        from (select l.seq from metered.ledger l
              where l.scope = of_scope and l.seq > after_seq and l.seq < before_seq
              order by l.seq desc limit look) x;
        return query
        select l, m.ok, search_entries.more
        from metered.ledger l,
            lateral (select {entry sought} as ok) m
        where l.scope = of_scope and l.seq >= stop and l.seq < before_seq and (m.ok or l.seq = stop)
        order by l.seq desc limit most + 1;
    else
        select max(x.seq), count(*) >= look into stop, more
        from (select l.seq from metered.ledger l
              where l.scope = of_scope and l.seq > after_seq and l.seq < before_seq
              order by l.seq limit look) x;
        return query
        select l, m.ok, search_entries.more
        from metered.ledger l,
            lateral (select {entry sought} as ok) m
        where l.scope = of_scope and l.seq > after_seq and l.seq <= stop and (m.ok or l.seq = stop)
        order by l.seq limit most + 1;
    end if;
end
$$;
