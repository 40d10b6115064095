-- Carving: a lease whose units a child scope spends. The child is credited with them, and is closed
-- in the end: the units that it charged are captured at the parent, and the rest is free there
-- again. Until then all of it counts as held at the parent.
--
-- A closed scope has -infinity as its last entry's next_due, which every later entry keeps. So the
-- path of a charge that is let in comes to _check_limits, which refuses it. Credit and refund ask
-- _refuse_closed. Units that were held before may still end, or be captured, and the settlement
-- waits for them.
--
-- Parent and child are locked by key, and then the lease's row. Nobody else locks the row of a
-- carved lease that is open, so the lock of spenders is not needed.
--
-- On another cluster the child has a row of its own, of mode g. The parent's row is of mode r, and
-- settle_away settles it with the units that the child used. Messages between the clusters can come
-- again, and in any order. So a row of mode g stays, and answers each message with the units used,
-- until the parent's side is known to be settled (home_at) and its time is over.

-- Refuses a new entry in a closed scope. entry is its last entry, or one that is to follow it.
create function metered._refuse_closed(e metered.ledger) returns void
language plpgsql stable
as $$
begin
    if e.next_due = '-infinity' then
        raise exception 'the scope is closed'
            using errcode = 'MT001', detail = metered._with_absent(null, e.scope, 'closed');
    end if;
end
$$;

-- Closes a scope, whose lock is held, unless it is closed.
create function metered._close_scope(of_scope text, note jsonb, wait_ms int) returns void
language plpgsql volatile
as $$
declare
    entry metered.ledger := metered._entry_for_write(of_scope);
begin
    if entry.next_due = '-infinity' then
        return;
    end if;
    if entry.tallied then
        entry := metered._end_tallies(entry, wait_ms);
    end if;
    if entry.lots_end is not null then
        entry := metered._settle(entry, metered.clock(), metered._ends_per_call(), 0, null);
    end if;
    perform metered._clear_freed_of(entry);
    entry.seq := entry.seq + 1;
    entry.amount := 0;
    entry.at := greatest(metered.clock(), entry.at);
    entry.kind := 'z';
    entry.next_due := '-infinity';
    entry.ref := null;
    entry.hold := null;
    entry.operation_tenant := null;
    entry.operation := null;
    entry.note := _close_scope.note;
    perform metered._append(entry);
    perform metered._recall_leases(of_scope);
end
$$;

-- Carves charge.amount units, judged by the charge's limits as a hold, for the child of terms,
-- which has no entries yet. status is carved, exists (it was carved before, equally), conflict (it
-- was carved otherwise), used (the child has entries) or refused. A child of a child ends no later
-- than that one.
create function metered.carve(charge metered.new_charge, terms metered.lease_terms, ahead interval,
    wait_ms int,
    out status text, out lease metered.leases, out refused jsonb, out crossed jsonb)
language plpgsql volatile
as $$
declare
    away   boolean := terms.mode = 'away';
    as_mode "char" := case when away then 'r' else 'c' end;
    tip    metered.ledger;
    posted metered.charged;
    own    bigint;
    ends   timestamptz;
begin
    perform metered._require(terms.mode in ('carved', 'away')
        and octet_length(terms.child) between 1 and 255
        and (away or terms.child <> charge.scope)
        and terms.ttl between interval '1 millisecond' and interval '3660 days'
        and octet_length(terms.owner) between 1 and 255
        and metered._key_fits(charge.key, charge.scope), 'carve');
    perform metered._lock_all_scopes(array[charge.scope,
            case when not away then terms.child else charge.scope end], null, wait_ms);
    select * into lease
    from metered.leases y
    where y.child = terms.child and y.mode <> 'g' and (y.mode = 'r') = away;
    if found then
        status := case when lease.scope = charge.scope
            and lease.granted = charge.amount then 'exists' else 'conflict' end;
        return;
    end if;
    if not away then
        tip := metered._entry_for_write(terms.child);
        if tip.seq > 0 or exists (select from metered.leases y
                where y.child = terms.child and y.mode = 'g') then
            status := 'used';
            return;
        end if;
    end if;
    own := metered._next_number('leases');
    charge.held := charge.amount;
    posted := metered._write_charges(array[charge], ahead, wait_ms, null, 'answer',
        row('lease/' || own, interval '36500 days', null, null), false);
    if posted.refused is not null then
        status := 'refused';
        refused := posted.refused;
        return;
    end if;
    select y.ends_at into ends
    from metered.leases y
    where y.child = charge.scope and y.mode in ('c', 'g') and y.settled_at is null;
    insert into metered.leases (no, opened_at, ends_at, granted, fence, opened_seq, mode, scope,
        owner, child)
    overriding system value
    values (own, posted.at, least(posted.at + terms.ttl, ends),
        charge.amount, metered._lease_key(own), posted.seqs[1], as_mode, charge.scope, terms.owner,
        terms.child)
    on conflict do nothing
    returning * into lease;
    {or collide};     -- of another parent, at the same time
    perform metered._add_leased(charge.scope, charge.amount);
    if not away then
        perform metered.credit(terms.child, null, charge.amount, false, wait_ms,
            row(null, null, charge.note), true);
    end if;
    crossed := posted.crossed;
    status := 'carved';
end
$$;

-- Closes a child of this cluster, and settles it once it has no held units. status is settled, open
-- (closed, with held units), closed (it was settled before) or unknown.
create function metered.end_child(of_child text, by_whom text, wait_ms int,
    out status text, out lease metered.leases, out held bigint)
language plpgsql volatile
as $$
declare
    tip  metered.ledger;
    clk  timestamptz;
begin
    perform metered._require(octet_length(by_whom) between 1 and 255, 'end_child');
    select * into lease from metered.leases y where y.child = of_child and y.mode in ('c', 'g');
    if not found then
        status := 'unknown';
        return;
    end if;
    perform metered._lock_all_scopes(array[lease.scope, of_child], null, wait_ms);
    select * into lease from metered.leases y where y.no = lease.no for update;
    clk := metered.clock();
    status := case when lease.no is null then 'unknown'
        when lease.settled_at is not null then 'closed' end;
    if status is not null then
        return;
    end if;
    tip := metered._last_entry(of_child);
    if tip.next_due <= clk and metered._due_units(of_child, tip.next_due, clk) > 0 then
        perform metered._end_due(array[of_child], clk, wait_ms);
    end if;
    perform metered._close_scope(of_child, jsonb_build_object('actor', by_whom), wait_ms);
    tip := metered._entry_for_write(of_child);
    held := tip.held;
    status := 'open';
    if held = 0 then
        status := 'settled';
        if lease.mode = 'c' then
            perform metered._close_lease(lease, tip.spent - tip.refunded, by_whom, wait_ms, null,
                null, null, 1);
        else
            update metered.leases y
            set settled_at = tip.at, spent = tip.spent - tip.refunded, settled_by = by_whom,
                settled_seq = tip.seq
            where y.no = lease.no;
        end if;
        select * into lease from metered.leases y where y.no = lease.no;
    end if;
end
$$;

-- The child's side of units that were carved on another cluster: credits the child until ends. With
-- units 0, or after ends, the child gets nothing, now or later: the row says so, and the scope gets
-- no entry. status is received, late, exists (a row of this child is there) or used (the child has
-- entries).
create function metered.receive_child(of_child text, units bigint, ends timestamptz, by_whom text,
    note text, wait_ms int,
    out status text, out lease metered.leases)
language plpgsql volatile
as $$
declare
    tip  metered.ledger;
    clk  timestamptz;
    own  bigint;
    json jsonb := nullif(note, '')::jsonb;
begin
    perform metered._require(octet_length(of_child) between 1 and 255
        and octet_length(by_whom) between 1 and 255
        and units between 0 and 9007199254740992 and ends is not null, 'receive_child');
    perform metered._lock_all_scopes(array[of_child], null, wait_ms);
    select * into lease from metered.leases y where y.child = of_child and y.mode in ('c', 'g');
    if found then
        status := case when lease.mode = 'g' then 'exists' else 'used' end;
        return;
    end if;
    tip := metered._entry_for_write(of_child);
    if tip.seq > 0 then
        status := 'used';
        return;
    end if;
    clk := metered.clock();
    status := case when units = 0 or ends <= clk then 'late' else 'received' end;
    own := metered._next_number('leases');
    if status = 'received' then
        perform metered.credit(of_child, null, units, false, wait_ms, row(null, null, json), true);
    end if;
    insert into metered.leases (no, opened_at, ends_at, settled_at, granted, spent, fence,
        opened_seq, settled_seq, mode, scope, owner, settled_by, child)
    overriding system value
    values (own, clk, case when units = 0 then clk + interval '3660 days' else ends end,
        case when status = 'late' then clk end, case when status = 'late' then 0 else units end,
        case when status = 'late' then 0 end, metered._lease_key(own), 1,
        case when status = 'late' then 1 end, 'g', of_child, by_whom,
        case when status = 'late' then by_whom end, of_child)
    on conflict do nothing
    returning * into lease;
    {or collide};
end
$$;

-- Settles the parent's side of units that were carved for another cluster. units is the number used
-- there, or null for all of them. status is settled, closed (it was settled before, and spent has
-- the units captured then) or unknown. On the child's cluster it notes in the child's row that the
-- parent's side is settled: status is noted or unknown.
create function metered.settle_away(of_child text, units bigint, by_whom text, wait_ms int,
    out status text, out lease metered.leases)
language plpgsql volatile
as $$
declare
    clk timestamptz := metered.clock();
begin
    perform metered._require(octet_length(by_whom) between 1 and 255
        and coalesce(units between 0 and 9007199254740992, true), 'settle_away');
    update metered.leases y
    set home_at = clk
    where y.child = of_child and y.mode = 'g' and y.settled_at is not null and y.home_at is null;
    select * into lease
    from metered.leases y
    where y.child = of_child and (y.mode = 'r' or y.home_at is not null)
    order by y.mode = 'r' desc limit 1;
    status := case when lease.no is null then 'unknown' when lease.mode = 'g' then 'noted' end;
    if status is not null then
        return;
    end if;
    perform metered._lock_all_scopes(array[lease.scope], null, wait_ms);
    select * into lease from metered.leases y where y.no = lease.no for update;
    status := case when lease.no is null then 'unknown'
        when lease.settled_at is not null then 'closed' else 'settled' end;
    if status = 'settled' then
        perform metered._close_lease(lease, coalesce(units, lease.granted), by_whom, wait_ms, null,
            null, null, 1);
        select * into lease from metered.leases y where y.no = lease.no;
    end if;
end
$$;
