-- Usage by time. The sums of a scope at the beginning and at the end of a range are those of two entries, so
-- a range costs the two look-ups, and a series of ranges one look-up for each edge.

-- What the chain of a scope had summed up before each of the times, which ascend: seq is the last entry before it.
-- refunded_after is what was refunded by now of the charges that follow it. unsettled is what open leases were
-- spent from the time on until the next one. If a purge took the answer away, there is one row with known_from: from
-- when on usage is known. STABLE: one snapshot for all.
create function metered.usage_at(of_scope text, times timestamptz[])
returns table (seq bigint, spent bigint, refunded bigint, credited bigint, refunded_after bigint, unsettled bigint, known_from timestamptz)
language plpgsql stable
as $$
declare
    tip  metered.ledger := metered.last_entry(of_scope);
    open bigint[];
    t    timestamptz;
begin
    perform metered.require(cardinality(times) between 1 and 2001 and array_ndims(times) = 1 and array_lower(times, 1) = 1
        and array_position(times, null) is null, 'times');
    open := case when tip.held > 0 then metered.unsettled_spends(of_scope, times) end;
    for i in 1..cardinality(times) loop
        t := times[i] - interval '1 microsecond';       -- what happened at an edge is after it
        unsettled := coalesce(open[i], 0);
        if tip.at <= t then
            seq := tip.seq;
            spent := tip.spent;
            refunded := tip.refunded;
            credited := tip.credited;
            refunded_after := 0;
            return next;
            continue;
        end if;
        select b.seq, b.spent, b.refunded into seq, spent, refunded
        from metered.base(of_scope, tip.seq, tip.epoch, t) b;
        if seq is null and tip.epoch = 0 and (select l.at > t from metered.ledger l where l.scope = of_scope and l.seq = 1) then
            seq := 0;       -- before the scope began: a purge leaves entry 1, which says when that was
            spent := 0;
            refunded := 0;
        elsif seq is null then
            known_from := metered.usage_known_from(tip);
            return next;
            return;
        end if;
        credited := case when tip.credited = 0 then 0 else
            coalesce((select l.credited from metered.ledger l where l.scope = of_scope and l.seq = usage_at.seq), 0) end;
        -- What a purge took of refund_sum is of charges before seq.
        refunded_after := case when refunded = tip.refunded then 0 when seq = 0 then tip.refunded
            else metered.refunds_after(of_scope, tip.seq, seq) end;
        return next;
    end loop;
end
$$;

-- What was spent from the open leases of a scope, from each time on until the next one. It reads all of their spends.
create function metered.unsettled_spends(of_scope text, times timestamptz[]) returns bigint[]
language plpgsql stable
as $$
declare
    units bigint[] := array_fill(0::bigint, array[cardinality(times)]);
    r     record;
begin
    for r in
        select width_bucket(x.at, times) as nth, sum(x.amount)::bigint as amount
        -- In order, or the planner may take the index of the history, and read all that was ever settled.
        from (select y.no from metered.leases y
              where y.scope = of_scope and y.settled_at is null and y.mode = 's' order by y.ends_at) l,
             lateral (select s.at, s.amount from metered.lease_spends s where s.lease = l.no and s.at >= times[1] offset 0) x
        group by 1
    loop
        units[r.nth] := r.amount;
    end loop;
    return units;
end
$$;

-- Since when the usage of a scope is known, of which a purge took entries: after the first of those that it left. That
-- one counts no later than the clock repairs that follow it.
create function metered.usage_known_from(tip metered.ledger) returns timestamptz
language plpgsql stable
as $$
declare
    since timestamptz;
    first int;
begin
    select l.at, l.epoch into since, first from metered.ledger l where l.scope = tip.scope and l.seq > 1 order by l.seq limit 1;
    for e in first + 1..tip.epoch loop
        since := least(since, (select l.at from metered.ledger l
            where l.scope = tip.scope and l.epoch = e and (l.seq & 15 = 1 or l.kind = 'k') order by l.at, l.seq limit 1));
    end loop;
    return since + interval '1 microsecond';
end
$$;
