-- The end of holds: whoever ends one, or finds it due, frees its units.

-- Frees the units that holds still keep of their scopes, or of only_scopes, which are all locked,
-- by one entry for each scope. Expiring holds free the units that they do not capture, when the
-- last of them fell due. In a wallet each ends with an entry of its own (_settle).
create function metered._release_lines(nos bigint[], only_scopes text[], as_kind "char",
    clk timestamptz, of_hold text, origin metered.origin) returns void
language plpgsql volatile
as $$
declare
    scopes      text[];
    sums        bigint[];
    firsts      timestamptz[];       -- when the first line of each falls due
    written     text[];
    wallets     text[];
    minima      boolean;
    dues        timestamptz[];
    marked      boolean;
    tip         metered.ledger;
    wallet_line record;
begin
    if as_kind = 'x' then   -- in wallets, ends are written in the order of their times
        for wallet_line in
            select l.scope, max(l.due) as due from metered.hold_lines l
            where l.hold = any (nos)
                and l.open <> 0
                and (only_scopes is null or l.scope = any (only_scopes))
                    group by l.scope order by l.scope
        loop
            tip := metered._entry_for_write(wallet_line.scope);
            if tip.lots_end is not null then
                tip := metered._settle(tip, least(wallet_line.due, clk), metered._ends_per_call(),
                    0, null);
                perform metered._clear_freed(nos, array[wallet_line.scope]);      -- freed with a sum
            end if;
        end loop;
    end if;
    select array_agg(f.scope), array_agg(f.units), bool_or(f.minima), array_agg(f.due),
        array_agg(f.first) into scopes, sums, minima, dues, firsts
    from (select l.scope, sum(l.open)::bigint as units, bool_or(l.at_least > l.captured) as minima,
        max(l.due) as due, min(l.due) as first from metered.hold_lines l
          where l.hold = any (nos)
              and l.open <> 0
              and (only_scopes is null or l.scope = any (only_scopes))
          group by l.scope order by l.scope) f;
    if scopes is null then
        return;
    elsif minima and as_kind = 'x' then
        perform metered._capture_minima(nos, only_scopes, null, clk);
        -- of the others
        perform metered._release_lines(nos, only_scopes, as_kind, clk, of_hold, origin);
        return;
    end if;
    perform metered._fold_of(scopes, clk);  -- else tallies would count at this entry's time
    update metered.hold_lines l set open = 0
    where l.hold = any (nos) and l.open <> 0 and (only_scopes is null or l.scope = any (only_scopes));
    with made as (
    insert into metered.ledger as y ({entry columns})
    select {entry of t: seq = t.seq + 1, amount = f.units,
        at = greatest(case when as_kind = 'x' then least(f.due, clk) else clk end, t.at),
        held = t.held - f.units, kind = as_kind, scope = f.scope,
        next_due = metered._due_after(f.scope, t.seq, t.held - f.units, t.next_due, clk),
        hold = of_hold, operation_tenant = origin.tenant, operation = origin.operation,
        note = origin.note}
    from unnest(scopes, sums, dues, firsts) f(scope, units, due, first),
         lateral (select *
             from metered.ledger l where l.scope = f.scope order by l.seq desc limit 1
             for key share) t
    where (t.lots_end <= greatest(clk, t.at)
        or t.next_due <= clk and (t.lots_end is not null or as_kind <> 'x')) is not true
      and f.first >= t.next_due     -- else it was freed before the clock was set back
    on conflict do nothing
    returning y.scope, y.lots_end is not null as wallet)
    select array_agg(m.scope), array_agg(m.scope) filter (where m.wallet)
    into written, wallets
    from made m;
    for i in 1..coalesce(cardinality(written), 0) loop
        marked := metered._mark_freed(written[i]);
    end loop;
    if wallets is not null then
        perform metered._free_lines(nos, wallets);
    end if;
    if coalesce(cardinality(written), 0) < cardinality(scopes) then
        if as_kind <> 'x' then
            if 0 < (select count(*) from unnest(scopes) f(scope),
                         lateral (select y.next_due, y.lots_end
                             from metered.ledger y where y.scope = f.scope order by y.seq desc
                             limit 1) t
                    where (f.scope = any (written)) is not true
                        and t.lots_end is null
                        and (t.next_due <= clk) is not true) then
                perform metered._collided();     -- nothing is due, so another
                                                 -- writer has made the next entry
            end if;
            perform metered._end_minima(array(select f
                    from unnest(scopes) f
                    where (f = any (written)) is not true), null, clk, null);
        end if;
        for i in 1..cardinality(scopes) loop    -- in which something is due before
            continue when scopes[i] = any (written);
            tip := metered._entry_for_write(scopes[i]);
            if tip.lots_end is not null
                and (tip.lots_end <= greatest(clk, tip.at) or tip.next_due <= clk) then
                tip := metered._settle(tip, clk, metered._ends_per_call(), 0, null);
            elsif as_kind = 'x' or tip.lots_end is not null then
                perform metered._collided();
            end if;
            tip := metered._own_entry(tip, clk);
            tip.kind := as_kind;
            tip.amount := sums[i];
            tip.held := tip.held - sums[i];
            tip.next_due := metered._due_after(tip.scope, tip.seq, tip.held, tip.next_due, clk);
            tip.seq := tip.seq + 1;
            tip.hold := of_hold;
            tip.operation_tenant := origin.tenant;
            tip.operation := origin.operation;
            tip.note := origin.note;
            perform metered._append(tip);
            if tip.lots_end is not null then
                perform metered._free_lines(nos, array[scopes[i]]);
            end if;
        end loop;
    end if;
end
$$;

-- The note of ends of holds that a caller only writes because it needs their room.
create function metered._by_system() returns metered.origin
language sql immutable
as $$
    select row(null, null, '{"actor": "system"}')::metered.origin
$$;

-- Ends those of the holds that are due and have not ended. Their rows are locked,
-- in order. told: those that keep no units need no announcement.
create function metered._end_rows(nos bigint[], clk timestamptz, note jsonb, told boolean)
returns void
language plpgsql volatile
as $$
begin
    with ended as (
        update metered.holds h set state = 'x', ended_at = h.due, version = h.version + 1,
            pending = not told or 0 < (select count(*) from metered.hold_lines l
                where l.hold = h.no and l.open <> 0)
        where h.no = any (nos) and h.state = 'h' and h.due <= clk
        returning h.no, h.version)
    insert into metered.hold_events (hold, at, version, kind, note)
    select e.no, clk, e.version, 'x', _end_rows.note from ended e;
end
$$;

-- Frees the units of due lines of a scope by one entry after tip: minima are captured before it,
-- each at its time. Where more of these are due than one step writes, a call fails
-- (_refuse_behind), and a step of catch_up leaves the others, with all that falls due after the
-- first of them. The scope is locked. An old snapshot may not see that a hold was extended: then
-- the lock of its row fails with 40001. nos are the holds whose minima it captured. more: a call
-- would fail still.
create function metered._free_in_sum(tip metered.ledger, clk timestamptz, in_step boolean,
    wait_ms int,
    out nos bigint[], out more boolean)
language plpgsql volatile
as $$
declare
    since  timestamptz := tip.next_due;
    minima record := metered._first_minima(tip, clk);
    until  timestamptz := coalesce(minima.until, clk + interval '1 microsecond');
    due    record;
    before text;
begin
    if minima.until is not null and not in_step then
        perform metered._refuse_behind(tip.scope);
    end if;
    if metered._one_snapshot() then
        before := metered._bound_lock_wait(wait_ms);
        perform from metered.holds h
        where h.no = any (minima.nos || array(select l.hold from metered.hold_lines l
            where l.scope = tip.scope and l.open > 0 and l.due >= since and l.due < until))
        order by h.no for share;
        before := metered._unbound_lock_wait(before);
    end if;
    if minima.nos <> '{}' then
        perform metered._capture_minima(minima.nos, array[tip.scope], until, clk);
        tip := metered._entry_for_write(tip.scope);
    end if;
    select sum(l.open)::bigint as units, max(l.due) as last into due from metered.hold_lines l
    where l.scope = tip.scope and l.open > 0 and l.due >= since and l.due < until;
    tip := metered._own_entry(tip, due.last);
    tip.kind := 'x';
    tip.amount := coalesce(due.units, 0);
    tip.seq := tip.seq + 1;
    tip.held := tip.held - tip.amount;
    tip.next_due := case when tip.held > 0 then metered._later_due(tip.scope, until, clk) end;
    if tip.amount > 0 then      -- else minima have captured all
        perform metered._append(tip);
    end if;
    nos := minima.nos;
    more := minima.more;
end
$$;

-- Clears all rows of lines of a scope that were freed with a sum, before its next_due becomes
-- earlier. The scope is locked. A sweep clears such rows without its lock, in the order of holds, so
-- they are locked in that order.
create function metered._clear_freed_of(tip metered.ledger) returns void
language plpgsql volatile
as $$
begin
    perform from metered.hold_lines l
    where l.scope = tip.scope and l.open > 0 and l.due < coalesce(tip.next_due, 'infinity')
    order by l.hold for no key update;
    delete from metered.lot_holds o where o.scope = tip.scope and o.seq = any (array(
        select l.opened_seq from metered.hold_lines l
        where l.scope = tip.scope and l.open > 0 and l.due < coalesce(tip.next_due, 'infinity')));
    update metered.hold_lines l set open = 0
    where l.scope = tip.scope and l.open > 0 and l.due < coalesce(tip.next_due, 'infinity');
end
$$;

-- Ends holds that are due, whose rows it locks, and frees their units in the scopes, which are
-- locked. No more is due in one that is a wallet than a call writes.
create function metered._end_holds(nos bigint[], scopes text[], clk timestamptz, wait_ms int)
returns void
language plpgsql volatile
as $$
declare
    before text := metered._bound_lock_wait(wait_ms);
begin
    -- A caller that holds another lock than the scope's may find that a hold was extended
    -- meanwhile.
    nos := array(select y.no from (
        select h.no from metered.holds h
        where h.no = any (nos) and (h.due <= clk) is true order by h.no for no key update) y);
    before := metered._unbound_lock_wait(before);
    perform metered._end_rows(nos, clk, (metered._by_system()).note, false);
    if cardinality(scopes) > 1 then
        perform metered._clear_freed(nos, scopes);
    end if;
    perform metered._release_lines(nos, scopes, 'x', clk, null, metered._by_system());
end
$$;

-- Frees the units of all due lines of the scopes, which are locked. A caller saw some. next_due of
-- a closed scope says nothing, so its holds are ended: where they are more than one step ends, the
-- call fails (_refuse_behind).
create function metered._end_due(scopes text[], clk timestamptz, wait_ms int) returns void
language plpgsql volatile
as $$
declare
    tip    metered.ledger;
    most   int := metered._events_per_step();
    found_nos bigint[];
    nos    bigint[] := '{}';
    few    text[];
    freed  boolean := false;
begin
    for tip in
        select t.* from unnest(scopes) s(scope), lateral (
            select * from metered.ledger l where l.scope = s.scope order by l.seq desc limit 1) t
        where t.next_due <= clk
    loop
        found_nos := array(select l.hold from metered.hold_lines l
            where l.scope = tip.scope and l.open > 0 and l.due >= tip.next_due and l.due <= clk
            order by l.due limit most + 1);
        if cardinality(found_nos) > most then
            if tip.lots_end is not null then
                perform metered._settle(tip, clk, metered._ends_per_call(), 0, wait_ms);
            elsif tip.next_due = '-infinity' then
                perform metered._refuse_behind(tip.scope);
            else
                perform metered._free_in_sum(tip, clk, false, wait_ms);
            end if;
            freed := true;
        else
            few := few || tip.scope;
            nos := nos || found_nos;
        end if;
    end loop;
    if nos = '{}' then
        if not freed then
            perform metered._collided(); -- the caller saw some: not with this snapshot
        end if;
        return;
    end if;
    perform metered._end_holds(nos, few, clk, wait_ms);
end
$$;

-- Ends one hold that is due, if it still has this deadline, frees its units, and notifies
-- listeners: status is expired. Otherwise nothing is done: due_later, extended, captured,
-- released, or ended (it expired, and was announced before).
create function metered.expire_hold(of_tenant text, of_id text, issued timestamptz,
    of_deadline timestamptz, wait_ms int, note text, channel text,
    out status text, out hold json)
language plpgsql volatile
as $$
declare
    of_no     bigint;
    keys      bigint[];
    clk       timestamptz;
    this_hold record;
    origin    metered.origin;
    before    text;
begin
    select y.no, y.keys into of_no, keys
    from metered.holds y
    where y.tenant = of_tenant and y.id = of_id;
    if not found then
        status := metered._missing_hold(of_tenant, of_id, issued, wait_ms);
        return;
    end if;
    perform metered._lock_keys(keys, wait_ms);
    before := metered._bound_lock_wait(wait_ms);
    select y.state, y.due, y.deadline, y.pending into this_hold
    from metered.holds y
    where y.no = of_no for no key update;
    before := metered._unbound_lock_wait(before);
    if this_hold.state is null then     -- purged while this waited
        status := case when issued <= (select z.at
                from metered.holds_horizon z where z.one) then 'retired' else 'unknown' end;
        return;
    end if;
    clk := metered.clock();
    status := case
        when this_hold.state = 'c' then 'captured'
        when this_hold.state = 'r' then 'released'
        when not this_hold.pending then 'ended'
        when this_hold.deadline <> of_deadline then 'extended'
        when this_hold.state = 'h' and this_hold.due > clk then 'due_later' end;
    if status is null then
        origin := row(null, null, nullif(note, '')::jsonb);
        perform metered._end_rows(array[of_no], clk, origin.note, false);
        perform metered._end_minima(array(select distinct l.scope from metered.hold_lines l
            where l.hold = of_no and l.open <> 0), of_no, clk, wait_ms);
        perform metered._clear_freed(array[of_no], null);
        perform metered._release_lines(array[of_no], null, 'x', clk, of_id, origin);
        update metered.holds y
        set pending = false
        where y.no = of_no returning y.version into this_hold;
        {announce: tenant = of_tenant, id = of_id, version = this_hold.version, what = 'expired'};
        status := 'expired';
    end if;
    hold := metered.hold_json(of_no, clk);
end
$$;

-- Holds that are held, or that expired and are not announced, in the order in which they fall due,
-- after after_due and after_no, and before a time: of one tenant or of all (null), with a scope
-- that begins with prefix. It looks at no more than 10,000 and returns max_rows. Go on after
-- last_due and last_no, which are null at the end. clk counts as now.
create function metered.due_holds(of_tenant text, prefix text, after_due timestamptz,
    after_no bigint, before timestamptz,
    clk timestamptz, max_rows int, out holds json[], out last_due timestamptz, out last_no bigint)
language plpgsql stable
as $$
declare
    this_hold record;
    seen      int := 0;
begin
    holds := '{}';
    for this_hold in
        select y.no, y.due, y.tenant from metered.holds y
        where y.pending and (y.due, y.no) > (after_due, after_no) and y.due < before
        order by y.due, y.no limit 10000
    loop
        seen := seen + 1;
        if this_hold.tenant = coalesce(of_tenant, this_hold.tenant) and (prefix = '' or exists (
            select from metered.hold_lines l
            where l.hold = this_hold.no and starts_with(l.scope, prefix))) then
            holds := holds || metered.hold_json(this_hold.no, clk);
        end if;
        if seen = 10000 or cardinality(holds) = max_rows then
            last_due := this_hold.due;
            last_no := this_hold.no;
            return;
        end if;
    end loop;
end
$$;

-- Marks swept holds as announced, and notifies listeners.
create function metered.announced(nos bigint[], channel text) returns void
language plpgsql volatile
as $$
begin
    perform metered._require(cardinality(nos) <= 10000, 'nos');
    -- Not one that still keeps units, which a purge would lose.
    update metered.holds h
    set pending = false
    where h.no = any (nos) and h.state = 'x' and h.pending
        and 0 = (select count(*) from metered.hold_lines l where l.hold = h.no and l.open <> 0);
    if channel is not null then
        perform metered._announce(channel, h.tenant, h.id, h.version, 'expired')
        from metered.holds h where h.no = any (nos) order by h.no;
    end if;
end
$$;

-- Deletes holds that ended before cutoff, with lines and history, at most max_rows
-- of them, from "after" on (null: from the beginning), and moves the horizon to the latest
-- time that their ids carry, in the same transaction, as purge_operations does.
--
-- Purges use no bitmaps and sorts: with a plan from a time of few rows, each batch would
-- read all rows that are to be deleted.
create function metered.purge_holds(after timestamptz, cutoff timestamptz, max_rows int,
    wait_ms int, out deleted bigint, out last timestamptz)
language plpgsql volatile
as $$
declare
    nos    bigint[];
    latest timestamptz;
    before text := metered._bound_lock_wait(wait_ms);
begin
    perform metered._require(max_rows between 1 and 10000, 'max_rows');
    cutoff := least(cutoff, metered.clock());
    -- before rows of holds, as place does
    perform from metered.holds_horizon z where z.one for no key update;
    before := metered._unbound_lock_wait(before);
    select array_agg(d.no), max(d.ended_at), max(d.issued_at) into nos, last, latest from (
        select h.no, h.ended_at, h.issued_at from metered.holds h
        where h.ended_at is not null and (h.claim is null or h.state <> 'c' or h.returned)
          and h.ended_at >= coalesce(after, '-infinity')
          and h.ended_at < cutoff
          and not h.pending
          and coalesce(h.issued_at, h.ended_at) < cutoff
        order by h.ended_at limit max_rows for update skip locked) d;
    delete from metered.hold_events e where e.hold = any (nos);
    delete from metered.hold_lines l where l.hold = any (nos);
    delete from metered.holds h where h.no = any (nos);
    get diagnostics deleted = row_count;
    if latest is not null then
        update metered.holds_horizon z set at = latest where z.one and z.at < latest;
    end if;
end
$$;
