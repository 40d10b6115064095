-- Why there is no hold with this id: retired or unknown. An old snapshot may miss a hold that was placed since: then an insertion fails with 40001.
-- The block takes it back. So a caller that names a holder may learn that somebody has placed the id since its snapshot, and no
-- more: its next try finds another's hold as unknown as none.
create function metered._missing_hold(of_tenant text, of_id text, issued timestamptz, wait_ms int) returns text
language plpgsql volatile
as $$
begin
    if exists (select from metered.cell) then
        perform metered._refuse_moved(of_tenant);   -- it may be in the tenant's cell
    end if;
    if issued <= (select z.at from metered.holds_horizon z where z.one) then
        return 'retired';
    end if;
    if metered._one_snapshot() then
        begin
            perform metered._bound_lock_wait(wait_ms);
            insert into metered.holds (placed_at, deadline, due, ceiling, version, state, tenant, id, holder, fingerprint, keys)
            values ('epoch', 'epoch', 'epoch', 'epoch', 0, 'x', of_tenant, of_id, '', '', '{}')
            on conflict do nothing;
            raise exception using errcode = 'MT100';
        exception when sqlstate 'MT100' then
            null;
        end;
    end if;
    return 'unknown';
end
$$;

-- Locks holds of a tenant for a transition: the scopes of their lines, by key, and then their rows, by no. nos are in the order of ids. needs is
-- the state that they must be in, c or h, or * for either. An h must not be due. States and clk are read under the locks. If a hold
-- does not fit, failed is its id and status says why: unknown, retired, holder (which callers must not tell from unknown) or state.
--
-- A hold's holder never changes, and is looked at before anything is locked: a lock, a wait, or a 40001 would tell another's hold from none.
create function metered._lock_holds(named metered.hold_ids, needs "char", wait_ms int,
    out nos bigint[], out keys bigint[], out clk timestamptz, out status text, out failed text, out stands "char", out failed_no bigint)
language plpgsql volatile
as $$
declare
    of_tenant text := named.tenant;
    of_holder text := named.holder;
    ids     text[] := named.ids;
    h       record;
    seen    bigint[];
    waited  boolean;
    before  text;
begin
    -- Nearly always there is one, and nobody is in its way. Then nothing waits, and the order
    -- in which it is all locked does not matter. Otherwise the locks that it got are the
    -- first of its scopes' by key, or all of them and perhaps its row: in order, for what
    -- comes below. The row that is locked is read as it is by then, whatever the snapshot.
    if cardinality(ids) = 1 then
        select y.no, y.keys, y.state, y.due into h from metered.holds y
        where y.tenant = of_tenant and y.id = ids[1]
          and case when of_holder = '' or y.holder = of_holder then metered._try_keys(y.keys) end
        for no key update skip locked;
        if found then
            clk := metered.clock();     -- after the lock
            if (h.state = needs or needs = '*' and h.state in ('h', 'c')) and (h.state <> 'h' or h.due > clk) then
                nos := array[h.no];
                keys := h.keys;
                return;
            end if;
        end if;
    end if;
    perform metered._require(array_lower(ids, 1) = 1 and cardinality(ids) <= 100 and cardinality(ids) = (select count(distinct id) from unnest(ids) id), 'ids');
    keys := '{}';
    for i in 1..cardinality(ids) loop
        select y.no, y.keys, y.holder into h from metered.holds y where y.tenant = of_tenant and y.id = ids[i];
        if h.no is null or of_holder <> '' and h.holder <> of_holder then
            -- An id that does not exist would be retired with such an id, and so is another tenant's.
            status := case
                when h.no is null then metered._missing_hold(of_tenant, ids[i], named.issued[i], wait_ms)
                when named.issued[i] <= (select z.at from metered.holds_horizon z where z.one) then 'retired'
                else 'holder' end;
            failed := ids[i];
            return;
        end if;
        seen := seen || h.no;
        keys := keys || h.keys;
    end loop;
    select coalesce(array_agg(k.key order by k.key), '{}') into keys from (select distinct unnest(keys)) k(key);
    waited := metered._lock_keys(keys, wait_ms);
    before := metered._bound_lock_wait(wait_ms);
    perform from metered.holds y where y.no = any (seen) order by y.no for no key update;
    before := metered._unbound_lock_wait(before);
    clk := metered.clock();     -- after the lock
    for i in 1..cardinality(ids) loop
        -- One that took the id of one purged while this waited is not locked: it comes too late.
        select y.no, y.state, y.due into h from metered.holds y
        where y.tenant = of_tenant and y.id = ids[i] and y.no = any (seen);
        if (h.state = needs or needs = '*' and h.state in ('h', 'c')) and (h.state <> 'h' or h.due > clk) then
            nos[i] := h.no;
            continue;
        end if;
        failed := ids[i];
        if h.no is null then
            status := case when named.issued[i] <= (select z.at from metered.holds_horizon z where z.one) then 'retired' else 'unknown' end;
        else
            status := 'state';
            stands := case when h.state = 'h' and h.due <= clk then 'x' else h.state end;
            failed_no := h.no;
        end if;
        return;
    end loop;
end
$$;

-- Answers a refused transition, or raises the answer. json, since a hold may be in it
-- whose metadata is none to jsonb: \u0000, half a surrogate pair, 1e200000.
create function metered._refuse_hold(raising boolean, answer json) returns json
language plpgsql
as $$
begin
    if raising then
        raise exception 'the hold does not allow it' using errcode = 'MT007', detail = answer;
    end if;
    return answer;
end
$$;

-- Captures holds, all or none: spends all their units (used is null), or units of the scopes of one
-- hold. A scope whose amount is null spends all, and its limits only report thresholds. refused is null, or why nothing was written.
--
-- Thresholds on spending alone are judged twice: first for all units, so that nothing is written if the caller does not report. Then for the covered
-- units, after the excess.
create function metered.capture_holds(named metered.hold_ids, used metered.used_units[], terms metered.capture_terms,
    ahead interval, wait_ms int, origin metered.origin, channel text, raising boolean,
    out refused json, out holds json[], out crossed jsonb)
language plpgsql volatile
as $$
declare
    k       record;
    own     text;
    l       record;
    c       record;
    u       metered.used_units;
    w       record;
    tip     metered.ledger;
    whole   boolean := used is null or (used[1]).amount is null;
    take    bigint;
    covered bigint;
    spent   metered.charge_limit[];
    takes   metered.new_charge[];   -- covered units of scopes with such thresholds
    watched text[];                 -- these
    scopes  text[];                 -- of used
    units   bigint[];
    excess  metered.new_charge[];
    fitting metered.new_charge[];
    detail  jsonb;
    lines   json[];
    n       int;
    row_now metered.holds;
    hold    json;
    ended   boolean := false;       -- lines that are due before a minimum that is
    unused  text;
    marked  boolean;
begin
    if (terms.closing and terms.policy in ('refuse', 'fit', 'upto', 'even', 'allow') and (used is null or cardinality(named.ids) = 1)
        or not terms.closing and used is not null) is not true then
        perform metered._require(false, 'terms');
    end if;
    k := metered._lock_holds(named, 'h', wait_ms);
    if k.status is not null then
        refused := metered._refuse_hold(raising, json_build_object('status', k.status, 'id', k.failed, 'state', k.stands,
            'hold', metered.hold_json(k.failed_no, k.clk)));
        return;
    end if;
    if used is not null then
        foreach u in array used loop
            if (whole and u.amount is null or not whole and u.amount between 0 and 9007199254740992) is not true or u.scope = any (scopes) then
                perform metered._require(false, 'used');
            end if;
            scopes := scopes || u.scope::text;
            units := units || u.amount::bigint;
        end loop;
        -- A claim's unit is spent when the claim is confirmed, and only then. If it could be
        -- spent before, and the hold then ended otherwise, nobody could have the key, nor give
        -- it back. Were it not spent, the key would be taken, and nothing given back would end
        -- that.
        select h.claim into own from metered.holds h where h.no = k.nos[1];
        if own is not null and not whole and terms.closing <> coalesce(units[array_position(scopes, own)] > 0, false) then
            refused := metered._refuse_hold(raising, json_build_object('status', case when terms.closing then 'unconfirmed' else 'claim' end,
                'id', named.ids[1], 'scope', own));
            return;
        end if;
        foreach u in array used loop
            select y.open into l from metered.hold_lines y where y.hold = k.nos[1] and y.scope = u.scope;
            if l.open is null then
                refused := metered._refuse_hold(raising, json_build_object('status', 'line', 'id', named.ids[1], 'scope', u.scope));
                return;
            elsif u.amount > l.open and terms.policy = 'refuse' then
                refused := metered._refuse_hold(raising, json_build_object('status', 'excess', 'id', named.ids[1],
                    'scope', u.scope, 'requested', u.amount, 'open', l.open));
                return;
            elsif u.amount > l.open then
                excess := excess || row(u.scope, null, u.amount - l.open, 0,
                    u.limits, origin.note, null, null, null)::metered.new_charge;
            end if;
            covered := least(u.amount, l.open);
            spent := case when cardinality(u.limits) > 0 and covered > 0 then metered._spent_limits(u.limits) end;
            if spent is not null then
                tip := metered._last_entry(u.scope);
                w := metered._cross_captured(row(u.scope, null, coalesce(u.amount, covered) - covered, -covered, spent, null, null, null, null)::metered.new_charge,
                    tip, k.clk, ahead);
                if w.silent then
                    if raising then
                        perform metered._refuse_unreported();
                    end if;
                    refused := json_build_object('status', 'refused', 'refused', json_build_array(json_build_object('crossing', true)),
                        'scopes', json_build_array(u.scope), 'units', json_build_array(covered));
                    return;
                elsif w.crossed is distinct from tip.crossed then
                    watched := watched || u.scope;
                    takes := takes || row(u.scope, null, 0, -covered, spent, null, null, null, null)::metered.new_charge;
                end if;
            end if;
        end loop;
    end if;
    -- The excess first: held units and units spent of them count the same.
    while excess is not null loop
        if terms.policy = 'allow' then
            c := metered._charge_anyway(excess, ahead, wait_ms, origin, row(named.ids[1], null, k.nos, k.clk));
        else
            c := metered._write_charges(excess, ahead, wait_ms, origin, 'answer', row(named.ids[1], null, k.nos, k.clk), false);
        end if;
        crossed := c.crossed;
        exit when c.refused is null;
        if c.refused -> 0 ? 'crossing' and raising then
            perform metered._refuse_unreported();
        end if;
        fitting := case when terms.policy in ('upto', 'even') and not c.refused -> 0 ? 'crossing'
            then metered._as_far_as_admitted(excess, c.refused, terms.policy = 'even') else excess end;
        if fitting = excess then
            refused := metered._refuse_hold(raising, json_build_object('status', 'refused', 'refused', c.refused,
                'scopes', (select json_agg(e.scope) from unnest(excess) e), 'units', (select json_agg(e.amount) from unnest(excess) e)));
            return;
        end if;
        excess := fitting;
    end loop;
    if terms.policy in ('upto', 'even') then
        for n in 1..cardinality(scopes) loop
            select y.open into covered from metered.hold_lines y where y.hold = k.nos[1] and y.scope = scopes[n];
            units[n] := least(units[n], covered + coalesce((select e.amount from unnest(excess) e where e.scope = scopes[n]), 0));
        end loop;
    end if;
    for i in 1..cardinality(named.ids) loop
        detail := '[]';
        lines := '{}';
        for l in
            select y.scope, y.amount, y.captured, y.open, y.due, y.opened_seq, y.refunded as given_back, y.at_least, t.seq, t.at, t.spent, t.refunded, t.credited, t.held, t.epoch, t.next_due,
                t.anchor_at, t.anchor_spent, t.lots_end, t.crossed, t.tallied, t.others
            from metered.hold_lines y left join lateral (
                select * from metered.ledger e where e.scope = y.scope order by e.seq desc limit 1 for key share) t on true
            where y.hold = k.nos[i] order by y.scope
        loop
            take := case when whole then l.open else coalesce(units[array_position(scopes, l.scope)], 0) end;
            covered := least(take, l.open);
            if covered > 0 or terms.closing and l.open > 0 then
                -- The latter was freed before the clock was set back.
                if l.seq is null or l.open > 0 and (l.due >= l.next_due) is not true then
                    perform metered._collided();
                end if;
                if l.next_due <= k.clk and l.lots_end is null then
                    ended := ended or metered._end_minima(array(select distinct y.scope from metered.hold_lines y
                        where y.hold = any (k.nos) and y.open <> 0 and (terms.closing or units[array_position(scopes, y.scope)] > 0)), k.nos[1], k.clk, wait_ms) is not null;
                    tip := metered._entry_for_write(l.scope);
                elsif l.lots_end <= greatest(k.clk, l.at) or l.lots_end is not null and l.next_due <= k.clk then
                    tip := metered._settle(metered._entry_for_write(l.scope), k.clk, metered._ends_per_call(), 0, wait_ms);
                elsif l.tallied then
                    tip := metered._entry_for_write(l.scope);
                end if;
                if tip.scope = l.scope and tip.seq >= l.seq then
                    select tip.seq, tip.at, tip.spent, tip.credited, tip.held, tip.next_due, tip.lots_end, tip.others
                    into l.seq, l.at, l.spent, l.credited, l.held, l.next_due, l.lots_end, l.others;
                end if;
                if take > covered then   -- the excess is no charge beside the capture
                    l.others := coalesce({others: tip = l}, 0) + 1;
                end if;
                if covered > 0 then
                    n := array_position(watched, l.scope);
                    if n is not null then
                        w := metered._cross_captured(takes[n], metered._last_entry(l.scope), k.clk, ahead);
                        if w.silent then
                            perform metered._collided();     -- the state that was judged first has changed
                        end if;
                        l.crossed := w.crossed;
                        crossed := case when w.crossings is null then crossed else coalesce(crossed, '[]') || metered._crossed_at(w.crossings, array[l.seq + 1]) end;
                    end if;
                    insert into metered.ledger ({entry columns})
                    values ({entry of l: seq = l.seq + 1, amount = covered, at = greatest(k.clk, l.at), spent = l.spent + covered, held = l.held - covered,
                        kind = 'u', next_due = metered._due_after(l.scope, l.seq, l.held - covered, l.next_due, k.clk), hold = named.ids[i],
                        operation_tenant = origin.tenant, operation = origin.operation, note = origin.note})
                    on conflict do nothing;
                    if not found then
                        perform metered._collided();
                    elsif l.lots_end is not null then
                        perform metered._capture_lots(metered._last_entry(l.scope), l.opened_seq, covered);
                    end if;
                    detail := detail || jsonb_build_object('scope', l.scope, 'amount', covered,
                        'seq', l.seq + 1, 'at', greatest(k.clk, l.at));
                end if;
                if terms.closing and covered < l.open then
                    insert into metered.ledger ({entry columns})
                    values ({entry of l: seq = l.seq + case when covered > 0 then 2 else 1 end, amount = l.open - covered, at = greatest(k.clk, l.at),
                        spent = l.spent + covered, held = l.held - l.open, kind = 'l',
                        next_due = metered._due_after(l.scope, l.seq, l.held - l.open, l.next_due, k.clk), hold = named.ids[i],
                        operation_tenant = origin.tenant, operation = origin.operation, note = origin.note})
                    on conflict do nothing;
                    if not found then
                        perform metered._collided();
                    elsif l.lots_end is not null then
                        perform metered._free_lots(metered._entry_for_write(l.scope), array[l.opened_seq]);
                    end if;
                end if;
                marked := metered._mark_freed(l.scope);
            end if;
            if take > covered then
                n := (select x.n from unnest(excess) with ordinality x(scope, key, amount, held, limits, note, must_exist, lease, lease_offset, n) where x.scope = l.scope);
                detail := detail || jsonb_build_object('scope', l.scope, 'amount', take - covered, 'seq', c.seqs[n], 'at', c.ats[n], 'excess', true);
            end if;
            lines := lines || metered._line_json(l.scope, l.amount, l.captured + take, case when terms.closing then 0 else l.open - covered end, l.given_back, l.at_least);
            if take > 0 or terms.closing and l.open > 0 then
                update metered.hold_lines y set captured = y.captured + take, open = case when terms.closing then 0 else y.open - covered end
                where y.hold = k.nos[i] and y.scope = l.scope;
            end if;
        end loop;
        update metered.holds y set version = y.version + 1, entity = coalesce(terms.entity, y.entity),
            state = case when terms.closing then 'c' else 'h' end::"char", ended_at = case when terms.closing then k.clk end, pending = not terms.closing
        where y.no = k.nos[i] returning y.* into row_now;
        hold := metered._hold_as_json(row_now, array_to_json(lines), k.clk, null);
        holds[i] := hold;
        insert into metered.hold_events (hold, at, version, kind, entity, detail, note, operation_tenant, operation)
        values (k.nos[i], k.clk, row_now.version, case when terms.closing then 'c' else 'p' end, terms.entity, detail,
            origin.note, origin.tenant, origin.operation);
        if channel is not null then
            perform metered._announce(channel, named.tenant, named.ids[i], row_now.version, case when terms.closing then 'captured' else 'captured_part' end);
        end if;
        unused := case when origin.operation is not null then metered._remember_hold(hold) end;
    end loop;
end
$$;

-- Releases holds, all or none.
create function metered.release_holds(named metered.hold_ids, wait_ms int, origin metered.origin, channel text, raising boolean,
    out refused json, out holds json[])
language plpgsql volatile
as $$
declare
    k      record;
    row_now metered.holds;
    hold   json;
    unused text;
begin
    k := metered._lock_holds(named, 'h', wait_ms);
    if k.status is not null then
        refused := metered._refuse_hold(raising, json_build_object('status', k.status, 'id', k.failed, 'state', k.stands,
            'hold', metered.hold_json(k.failed_no, k.clk)));
        return;
    end if;
    perform metered._release_lines(k.nos, null, 'l', k.clk, case when cardinality(named.ids) = 1 then named.ids[1] end, origin);
    for i in 1..cardinality(named.ids) loop
        update metered.holds y set version = y.version + 1, state = 'r', ended_at = k.clk, pending = false
        where y.no = k.nos[i] returning y.* into row_now;
        select json_agg(metered._line_json(l.scope, l.amount, l.captured, 0, l.refunded, l.at_least) order by l.scope) into hold
        from metered.hold_lines l where l.hold = k.nos[i];
        hold := metered._hold_as_json(row_now, hold, k.clk, origin.note ->> 'reason');
        holds[i] := hold;
        insert into metered.hold_events (hold, at, version, kind, note, operation_tenant, operation)
        values (k.nos[i], k.clk, row_now.version, 'r', origin.note, origin.tenant, origin.operation);
        if channel is not null then
            perform metered._announce(channel, named.tenant, named.ids[i], row_now.version, 'released');
        end if;
        unused := case when origin.operation is not null then metered._remember_hold(hold) end;
    end loop;
end
$$;

-- Extends holds, all or none: each deadline by "by", no deadline past its ceiling, nor so far that JSON has no such year.
create function metered.extend_holds(named metered.hold_ids, by interval, wait_ms int, origin metered.origin,
    channel text, raising boolean,
    out refused json, out holds json[])
language plpgsql volatile
as $$
declare
    k      record;
    h      record;
    deadlines timestamptz[];    -- the new ones
    dues   timestamptz[];
    ends   timestamptz;         -- of one: Citus 13 crashes over an element of an array in a SET
    due_at timestamptz;
    unused text;
begin
    if (by > interval '0' and by <= interval '3660 days') is not true then
        perform metered._require(false, 'by');
    end if;
    k := metered._lock_holds(named, 'h', wait_ms);
    if k.status is not null then
        refused := metered._refuse_hold(raising, json_build_object('status', k.status, 'id', k.failed, 'state', k.stands,
            'hold', metered.hold_json(k.failed_no, k.clk)));
        return;
    end if;
    for i in 1..cardinality(named.ids) loop
        select y.deadline, y.due, least(y.ceiling, '9980-01-01 00:00:00+00') as ceiling into h from metered.holds y where y.no = k.nos[i];
        if h.deadline <= k.clk then     -- in its grace, which is for captures
            refused := metered._refuse_hold(raising, json_build_object('status', 'state', 'id', named.ids[i], 'state', 'x',
                'hold', metered.hold_json(k.nos[i], k.clk)));
        elsif h.deadline + by <= h.deadline or h.due + by < h.deadline + by then    -- a month can be shorter than 30 days
            perform metered._require(false, 'by');
        elsif h.deadline + by > h.ceiling then
            refused := metered._refuse_hold(raising, json_build_object('status', 'ceiling', 'id', named.ids[i],
                'left_us', (extract(epoch from h.ceiling - h.deadline) * 1000000)::bigint));
        end if;
        if refused is not null then
            return;
        end if;
        deadlines[i] := h.deadline + by;
        dues[i] := h.due + by;
    end loop;
    perform metered._collided() from metered.hold_lines l   -- freed before the clock was set back
    where l.hold = any (k.nos) and l.open <> 0 and (l.due >= (
        select t.next_due from metered.ledger t where t.scope = l.scope order by t.seq desc limit 1)) is not true;
    for i in 1..cardinality(named.ids) loop
        ends := deadlines[i];
        due_at := dues[i];
        update metered.holds y set version = y.version + 1, deadline = ends, due = due_at
        where y.no = k.nos[i] returning y.version, y.deadline, y.due into h;
        update metered.hold_lines l set due = h.due where l.hold = k.nos[i];
        insert into metered.hold_events (hold, at, deadline, version, kind, note, operation_tenant, operation)
        values (k.nos[i], k.clk, h.deadline, h.version, 'e', origin.note, origin.tenant, origin.operation);
        if channel is not null then
            perform metered._announce(channel, named.tenant, named.ids[i], h.version, 'extended');
        end if;
        holds[i] := metered.hold_json(k.nos[i], k.clk);
        unused := case when origin.operation is not null then metered._remember_hold(holds[i]) end;
    end loop;
end
$$;
