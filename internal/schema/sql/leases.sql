-- Leases. A lease holds units of a scope, under the scope's lock, and lets them be spent without it.
-- Settling it captures the spent units, and frees the rest. Until then all of it counts as held, and from then on
-- the spent units count. So each unit counts from before its use until at least a window after.
--
-- The fence: a spender keeps the lease's lock, shared, until the transaction ends. Once it has the lock it looks, with
-- a newer snapshot, whether the lease is open. The settler takes the lock exclusively: no spend is running, none
-- begins, and it sees all committed spends. The lease's lock comes before its scope's. A transaction with a
-- scope's lock never waits for a lease's.

-- The key of the lock that keeps others from spending while a lease is settled.
create function metered._lease_key(of_no bigint) returns bigint
language sql stable
as $$
    select metered._lock_key('metered/lease/metered', convert_to(of_no::text, 'UTF8'))
$$;

-- The channel on which pools hear that units of a scope are wanted back: see leases/recall.go.
create function metered._leases_channel() returns text
language sql immutable
as $$
    select left('metered_leases_' || substr('metered/leases/metered', 16), 63)
$$;

-- Recalls units of a scope that programs spend from memory, once this transaction commits. They ask nobody, and would let calls in
-- until their slices end.
create function metered._recall_leases(of_scope text) returns void
language plpgsql volatile
as $$
begin
    if exists (select from metered.leases y where y.scope = of_scope and y.settled_at is null and y.mode = 'm') then
        perform pg_notify(metered._leases_channel(), of_scope);
    end if;
end
$$;

-- Opens a lease of up to charge.amount units, and at most the units that the limits admit, divided by terms.share.
-- granted is 0, and nothing written, if that is less than terms.least, or if a limit refuses. used, by
-- limit, and held are the scope's state before. The lease lasts for terms.ttl, or until the first of the limits'
-- periods ends: settled later, it would count in the next one.
create function metered.open_lease(charge metered.new_charge, terms metered.lease_terms, ahead interval, wait_ms int,
    out no bigint, out fence bigint, out granted bigint, out used bigint[], out held bigint, out lasts_us bigint, out periods timestamptz[],
    out crossed jsonb)
language plpgsql volatile
as $$
declare
    lim    metered.charge_limit;
    tip    metered.ledger;
    looked record;
    posted metered.charged;
    wanted bigint := charge.amount;
    room   bigint;
    ends   timestamptz;
    nth    int := 0;
begin
    perform metered._require(terms.mode in ('rows', 'memory') and terms.share between 1 and 1000000 and terms.least between 1 and charge.amount
        and terms.ttl between interval '1 millisecond' and interval '3660 days' and octet_length(terms.owner) between 1 and 255, 'lease');
    if charge.key is null then
        charge.key := metered._scope_key(charge.scope);
    end if;
    perform metered._require(metered._key_fits(charge.key, charge.scope), 'key');
    perform metered._lock_keys(array[charge.key], wait_ms);
    granted := 0;
    if cardinality(charge.limits) > 0 then
        tip := metered._last_entry(charge.scope);
        charge.amount := terms.least;
        looked := metered._check_now(array[charge], array[tip], metered.clock(), ahead);
        foreach lim in array charge.limits loop
            nth := nth + 1;
            -- After large credits the units left may be beyond 64 bits. A lease has at most 2^53 units.
            room := least(room, greatest(-1, least(9007199254740992, lim.max::numeric - looked.used[nth] - looked.held[1])))::bigint;
        end loop;
        used := looked.used;
        held := looked.held[1];
        wanted := least(wanted, room / terms.share);
        if looked.refused is not null or wanted < terms.least then
            if metered._one_snapshot() then
                perform metered._refuse_stale(array[tip]);
            end if;
            return;
        end if;
    end if;
    no := metered._next_number('leases');
    fence := metered._lease_key(no);
    charge.amount := wanted;
    charge.held := wanted;
    charge.note := jsonb_build_object('actor', terms.owner);
    -- The hold never falls due: a lease is settled, and not freed.
    posted := metered._write_charges(array[charge], ahead, wait_ms, null, 'answer', row('lease/' || no, interval '36500 days', null, null), false);
    if posted.refused is not null then
        if posted.refused -> 0 ? 'crossing' then
            perform metered._refuse_unreported();
        end if;
        no := null;
        return;
    end if;
    granted := wanted;
    crossed := posted.crossed;
    periods := metered._periods_of(array[charge], array[tip], posted.at);
    ends := least(posted.at + terms.ttl, (select min(p.at) from unnest(periods) with ordinality p(at, n) where p.n % 2 = 0));
    lasts_us := extract(epoch from ends - posted.at) * 1000000;
    insert into metered.leases (no, opened_at, ends_at, granted, fence, opened_seq, mode, scope, owner)
    overriding system value
    values (open_lease.no, posted.at, ends, wanted, open_lease.fence, posted.seqs[1],
        case terms.mode when 'rows' then 's' else 'm' end, charge.scope, terms.owner);
    perform metered._add_leased(charge.scope, wanted);
end
$$;

-- Adds an opened lease's units to its scope's sum, or takes those of a settled one away (units < 0). The scope is locked.
create function metered._add_leased(of_scope text, units bigint) returns void
language plpgsql volatile
as $$
begin
    delete from metered.lease_sum s where s.scope = of_scope and s.granted = -units;
    if not found then
        insert into metered.lease_sum as s (scope, granted) values (of_scope, units)
        on conflict (scope) do update set granted = s.granted + excluded.granted;
    end if;
end
$$;

-- Spends units of a lease from an offset on, and returns the time, or null if the lease is closed or
-- a unit of the range was spent before (lease_spends_apart).
create function metered._spend_range(of_lease bigint, of_fence bigint, from_offset bigint, units bigint, of_scope text, origin metered.origin)
returns timestamptz
language plpgsql volatile
as $$
declare
    clk timestamptz;
begin
    if metered._try_lock_shared(of_fence) then
        clk := metered.clock();
        if metered._one_snapshot() then
            -- The snapshot may be older than the lease's end: then a lock of the row fails with 40001, since the settler
            -- has locked it FOR UPDATE. Or it is older than the lease, and finds no row.
            perform from metered.leases l where l.no = of_lease for key share;
            {or collide};
        end if;
        insert into metered.lease_spends (lease, at_offset, amount, at, operation_tenant, operation, note)
        select l.no, from_offset, units, clk, origin.tenant, origin.operation, origin.note
        from metered.leases l
        where l.no = of_lease and l.fence = of_fence and l.scope = of_scope and l.mode = 's' and l.settled_at is null and l.ends_at > clk
          and from_offset between 0 and l.granted - units and units > 0
        on conflict do nothing;
        if found then
            return clk;
        end if;
    end if;
    return null;
end
$$;

-- Spends from a lease without a command.
create function metered.spend(of_lease bigint, of_fence bigint, from_offset bigint, units bigint, of_scope text, note jsonb)
returns timestamptz
language plpgsql volatile
as $$
begin
    return metered._spend_range(of_lease, of_fence, from_offset, units, of_scope, row(null, null, note));
end
$$;

-- Makes charges, some from leases, all or none, as _write_charges does. A lease that is closed, or whose range
-- was spent, refuses.
create function metered.charge_leased(charges metered.new_charge[], ahead interval, wait_ms int, origin metered.origin, mode text, standing boolean) returns metered.charged
language plpgsql volatile
as $$
declare
    charge      metered.new_charge;
    chain       metered.new_charge[] := '{}';    -- charges of the ledger
    spent       metered.new_charge[] := '{}';    -- from leases, by this call
    posted      metered.charged;
    answer      metered.charged;
    nth_chained int := 0;    -- in chain
begin
    if (cardinality(charges) between 1 and 64 and mode in ('answer', 'raise')) is not true then
        perform metered._require(false, 'charges');
    end if;
    foreach charge in array charges loop
        if charge.lease is null then
            chain := chain || charge;
        elsif (charge.amount between 1 and 9007199254740992 and coalesce(pg_column_size(charge.note), 0) <= 8192 and pg_column_compression(charge.note) is null) is not true then
            perform metered._no_amount();
        else
            answer.at := metered._spend_range(charge.lease, charge.key, charge.lease_offset, charge.amount, charge.scope, row(origin.tenant, origin.operation, charge.note));
            if answer.at is null then
                answer.refused := jsonb_build_array(jsonb_build_object('lease', charge.lease));
                exit;
            end if;
            spent := spent || charge;
        end if;
    end loop;
    if answer.refused is null and chain <> '{}' then
        posted := metered._write_charges(chain, ahead, wait_ms, origin, mode, null, standing);
        answer.refused := posted.refused;
    end if;
    if answer.refused is not null then
        if mode = 'raise' then
            raise exception 'a lease is closed' using errcode = 'MT009', detail = answer.refused;
        end if;
        delete from metered.lease_spends s using unnest(spent) x(scope, key, amount, held, limits, note, must_exist, lease, lease_offset)
        where s.lease = x.lease and s.at_offset = x.lease_offset;
        return answer;
    end if;
    if cardinality(charges) = 1 and chain = '{}' then
        return row(array[0]::bigint[], array[answer.at], null::bigint[], array[0]::bigint[], null::jsonb, answer.at, null::timestamptz[], null::jsonb);
    end if;
    for i in 1..cardinality(charges) loop
        if charges[i].lease is null then
            nth_chained := nth_chained + 1;
            answer.seqs[i] := posted.seqs[nth_chained];
            answer.ats[i] := posted.ats[nth_chained];
            answer.held[i] := coalesce(posted.held[nth_chained], 0);
        else
            answer.seqs[i] := 0;
            answer.ats[i] := answer.at;
            answer.held[i] := 0;
        end if;
    end loop;
    answer.used := posted.used;     -- spends from leases have no limits
    answer.periods := posted.periods;
    answer.crossed := posted.crossed;
    return answer;
end
$$;

-- Settles a lease: captures its spent units, and frees the rest. of_owner is the caller. told has the used units of a lease in memory, by its
-- owner's word. If it is null, all were used. The status:
--   settled
--   closed    it was settled before, with spent units
--   early     before its end only its owner may settle it
--   unknown
--   crossing  nothing was written: it crosses thresholds on spending in limits, and the caller is not telling
create function metered.settle_lease(of_no bigint, of_owner text, told bigint, wait_ms int, limits metered.charge_limit[], ahead interval,
    out status text, out granted bigint, out spent bigint, out crossed jsonb)
language plpgsql volatile
as $$
declare
    lease  metered.leases;
    last   timestamptz;
    made   bigint := 1;       -- charges: units that were spent in memory are one
    closed record;
begin
    perform metered._require(octet_length(of_owner) between 1 and 255 and coalesce(told >= 0, true), 'settle');
    lease := metered._lease_to_settle(of_no, wait_ms);
    granted := lease.granted;
    status := case
        when lease.no is null or lease.mode not in ('s', 'm') then 'unknown'
        when lease.settled_at is not null then 'closed'
        when lease.owner <> of_owner and lease.ends_at > metered.clock() then 'early' end;
    if status is not null then
        spent := lease.spent;
        return;
    end if;
    if lease.mode = 's' then
        select coalesce(sum(s.amount), 0), max(s.at), count(*) into spent, last, made from metered.lease_spends s where s.lease = of_no;
    else
        spent := case when lease.owner = of_owner and told <= lease.granted then told else lease.granted end;
    end if;
    closed := metered._close_lease(lease, spent, of_owner, wait_ms, last, metered._spent_limits(limits), ahead, made);
    status := case when closed.silent then 'crossing' else 'settled' end;
    crossed := closed.crossed;
end
$$;

-- Locks a lease, exclusively, and its row. Only a statement with a snapshot of its own then sees all spends.
create function metered._lease_to_settle(of_no bigint, wait_ms int) returns metered.leases
language plpgsql volatile
as $$
declare
    of_lease metered.leases;
    before   text;
begin
    if metered._one_snapshot() then
        raise exception 'a lease is settled at READ COMMITTED' using errcode = '25001';
    end if;
    perform metered._lock_keys(array[metered._lease_key(of_no)], wait_ms);
    before := metered._bound_lock_wait(wait_ms);
    select * into of_lease from metered.leases y where y.no = of_no for update;
    before := metered._unbound_lock_wait(before);
    return of_lease;
end
$$;

-- Writes the end of a lease of which so many units were spent, under its scope's lock. Units beyond the
-- granted ones, which nobody can spend, would be charged. The end is dated no earlier than last, the last spend, since the
-- clock may have been set back. limits are _spent_limits. silent: nothing was written, since it crosses a threshold
-- and the caller is not telling. The spent units count as so many charges.
create function metered._close_lease(lease metered.leases, units bigint, by_whom text, wait_ms int, last timestamptz,
    limits metered.charge_limit[], ahead interval, charges bigint, out crossed jsonb, out silent boolean)
language plpgsql volatile
as $$
declare
    tip      metered.ledger := metered._next_entry(lease.scope, null, wait_ms, row(null, null, jsonb_build_object('actor', by_whom)));
    before   bigint;
    clk      timestamptz := metered.clock();
    amount   bigint;
    crossing record;
    lowered  jsonb;
begin
    silent := false;
    tip := metered._after_minima(tip, wait_ms);
    if limits is not null and units > 0 then
        amount := least(units, lease.granted);
        crossing := metered._cross_captured(row(lease.scope, null, units - amount, -amount, limits, null, null, null, null)::metered.new_charge,
            metered._last_entry(lease.scope), greatest(clk, last), ahead);
        silent := crossing.silent;
        if silent then
            return;
        end if;
        lowered := crossing.crossed;
        crossed := metered._crossed_at(crossing.crossings, array[tip.seq]);
    end if;
    tip.at := greatest(tip.at, last);
    tip := metered._after_due_lowered(tip, greatest(0, units - lease.granted), lowered, wait_ms);
    before := tip.seq - 1;
    tip.hold := 'lease/' || lease.no;
    foreach tip.kind in array array['u', 'c', 'l']::"char"[] loop
        amount := case tip.kind when 'u' then least(units, lease.granted) when 'c' then units - lease.granted else lease.granted - units end;
        continue when amount <= 0;
        tip.seq := before + 1;
        tip.amount := amount;
        tip.spent := tip.spent + case when tip.kind in ('u', 'c') then amount else 0 end;
        tip.held := tip.held - case when tip.kind in ('u', 'l') then amount else 0 end;
        tip.next_due := metered._due_after(lease.scope, before, tip.held, tip.next_due, clk);
        tip.others := nullif(coalesce(metered._others(lease.scope, before), 0) + 1 - case tip.kind when 'u' then charges else 0 end, 0);
        insert into metered.ledger values (tip.*) on conflict do nothing;
        {or collide};
        perform metered._mark_freed(lease.scope);
        before := tip.seq;
        continue when tip.lots_end is null;
        case tip.kind
            when 'u' then perform metered._capture_lots(tip, lease.opened_seq, amount);
            when 'c' then perform metered._use_lots(lease.scope, tip.seq, amount, case when not metered._lags(tip) then metered._balance(tip) + amount end, 't', null);
            else perform metered._free_lots(tip, array[lease.opened_seq]);
        end case;
    end loop;
    update metered.leases y set settled_at = tip.at, spent = units, settled_by = by_whom, settled_seq = tip.seq where y.no = lease.no;
    perform metered._add_leased(lease.scope, -lease.granted);
end
$$;

-- Units that open leases hold of a scope, and when the last lease ends. It reads one row for each answer, however many leases are open. own units
-- are of leases that this transaction has opened, and do not count.
create function metered._leased_units(of_scope text, own bigint, out units bigint, out ends_at timestamptz)
language plpgsql stable
as $$
begin
    units := coalesce((select s.granted from metered.lease_sum s where s.scope = of_scope), 0) - own;
    if units > 0 then
        select y.ends_at into _leased_units.ends_at from metered.leases y
        where y.scope = of_scope and y.settled_at is null and y.mode <> 'g' and (own = 0 or not metered._written_here(y.xmin))
        order by y.ends_at desc limit 1;
    end if;
end
$$;

-- The open leases of a scope: unspent units, spends that are not settled yet, and when the last lease ends. It reads all of them and their
-- spends, so nothing under the scope's lock asks it.
create function metered._leased(of_scope text, out unspent bigint, out spent bigint, out ends_at timestamptz)
language plpgsql stable
as $$
begin
    select coalesce(sum(l.granted), 0), coalesce(sum(s.units), 0), max(l.ends_at) into unspent, spent, ends_at
    -- In order, or the planner may take the index of the history, and read all that was ever settled.
    from (select y.no, y.granted, y.ends_at, y.mode from metered.leases y
          where y.scope = of_scope and y.settled_at is null and y.mode <> 'g' order by y.ends_at) l,
         lateral (select sum(x.amount) as units from metered.lease_spends x where x.lease = l.no and l.mode = 's') s;
    unspent := unspent - spent;
end
$$;

-- Deletes leases that were settled before cutoff, with their spends: at most max_rows spends, oldest lease first.
-- after is the last of the batch before. A child that got units from another cluster stays until the parent's side is known to be settled, and
-- its time was over before cutoff: until then a message can ask for its used units.
create function metered.purge_leases(after timestamptz, cutoff timestamptz, max_rows int, out deleted bigint, out last timestamptz)
language plpgsql volatile
as $$
declare
    of_lease  record;
    left_over bigint := max_rows;
    purged    bigint;
begin
    perform metered._require(max_rows between 1 and 10000, 'max_rows');
    cutoff := least(cutoff, metered.clock());
    deleted := 0;
    for of_lease in
        select y.no, y.settled_at from metered.leases y
        where y.settled_at is not null and y.settled_at >= coalesce(after, '-infinity') and y.settled_at < cutoff
          and (y.mode <> 'g' or y.home_at is not null and y.ends_at < cutoff)
        order by y.settled_at limit max_rows for update skip locked
    loop
        delete from metered.lease_spends s where s.lease = of_lease.no and s.at_offset = any (array(
            select x.at_offset from metered.lease_spends x where x.lease = of_lease.no order by x.at_offset limit left_over));
        get diagnostics purged = row_count;
        deleted := deleted + purged;
        left_over := left_over - purged;
        last := of_lease.settled_at;
        exit when left_over <= 0;
        delete from metered.leases y where y.no = of_lease.no;
        deleted := deleted + 1;
        left_over := left_over - 1;
        exit when left_over <= 0;
    end loop;
end
$$;
