-- Locks holds of a tenant for a transition: the scopes of their lines, by key, and
-- then their rows, by no. nos are in the order of ids. needs is the state that they
-- must be in, c or h; an h must not be due. States are read under the locks, as is clk.
-- If one of the holds does not do, failed is its id and status says why: unknown,
-- retired, holder (which callers must not tell from unknown) or state.
--
-- Whose a hold is never changes, and is looked at before anything is locked: locks, a wait
-- for one, or a 40001 would tell another's hold from none.
create function metered.lock_holds(of_tenant text, ids text[], issued timestamptz[], of_holder text, needs "char", wait_ms int,
    out nos bigint[], out keys bigint[], out clk timestamptz, out status text, out failed text, out stands "char", out failed_no bigint)
language plpgsql volatile
as $$
declare
    h       record;
    seen    bigint[];
    waited  boolean;
    before  text;
begin
    -- Nearly always there is one, and nobody is in its way. Then nothing waits, and the order
    -- in which it is all locked does not matter. Otherwise the locks that it got are the
    -- first of its scopes' by key, or all of them and perhaps its row: in order, for what
    -- comes below. The row that is locked is read as it is by then, whatever the snapshot.
    if cardinality(ids) = 1 and metered.memory_kept() then
        select y.no, y.keys, y.state, y.due into h from metered.holds y
        where y.tenant = of_tenant and y.id = ids[1]
          and case when of_holder = '' or y.holder = of_holder then metered.try_keys(y.keys) end
        for no key update skip locked;
        if found then
            clk := metered.clock();     -- after the lock
            if h.state = needs and (needs <> 'h' or h.due > clk) then
                nos := array[h.no];
                keys := h.keys;
                return;
            end if;
        end if;
    end if;
    keys := '{}';
    for i in 1..cardinality(ids) loop
        select y.no, y.keys, y.holder into h from metered.holds y where y.tenant = of_tenant and y.id = ids[i];
        if h.no is null or of_holder <> '' and h.holder <> of_holder then
            -- What does not exist would be retired with such an id: so is one of somebody else.
            status := case when issued[i] <= (select z.at from metered.holds_horizon z where z.one) then 'retired'
                when h.no is null then 'unknown' else 'holder' end;
            failed := ids[i];
            return;
        end if;
        seen := seen || h.no;
        keys := keys || h.keys;
    end loop;
    select coalesce(array_agg(k.key order by k.key), '{}') into keys from (select distinct unnest(keys)) k(key);
    waited := metered.lock_keys(keys, wait_ms);
    before := metered.bound_lock_wait(wait_ms);
    perform from metered.holds y where y.no = any (seen) order by y.no for no key update;
    before := metered.unbound_lock_wait(before);
    clk := metered.clock();     -- after the lock
    for i in 1..cardinality(ids) loop
        -- One that took the id of one purged while this waited is not locked: it comes too late.
        select y.no, y.state, y.due into h from metered.holds y
        where y.tenant = of_tenant and y.id = ids[i] and y.no = any (seen);
        if h.no is not null and h.state = needs and (needs <> 'h' or h.due > clk) then
            nos[i] := h.no;
            continue;
        end if;
        failed := ids[i];
        if h.no is null then
            status := case when issued[i] <= (select z.at from metered.holds_horizon z where z.one) then 'retired' else 'unknown' end;
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
create function metered.refuse_hold(raising boolean, answer json) returns json
language plpgsql
as $$
begin
    if raising then
        raise exception 'the hold does not allow it' using errcode = 'MT007', detail = answer;
    end if;
    return answer;
end
$$;

-- Captures holds, all or none: spends what they keep, or the units given for the
-- scopes of one hold, and with closing frees the rest and ends them. policy says what
-- happens to units beyond what is kept: n (refused), f (charged if the limits given
-- let them), a (charged). refused is null, or why nothing was written.
create function metered.capture_holds(of_tenant text, ids text[], issued timestamptz[], of_holder text,
    line_scopes text[], line_units bigint[], closing boolean, policy "char",
    limit_scopes int[], maxima bigint[], windows interval[], max_ahead interval, wait_ms int,
    of_entity text, note text, channel text, of_namespace text, of_operation text, raising boolean,
    out refused json, out holds json[])
language plpgsql volatile
as $$
declare
    k       record;
    own     text;
    l       record;
    c       record;
    take    bigint;
    covered bigint;
    excess_scopes text[];
    excess_units bigint[];
    excess_limits int[];
    excess_maxima bigint[];
    excess_windows interval[];
    detail  jsonb;
    lines   json[];
    n       int;
    v       int;
    hold    json;
    unused  text;
begin
    k := metered.lock_holds(of_tenant, ids, issued, of_holder, 'h', wait_ms);
    if k.status is not null then
        refused := metered.refuse_hold(raising, json_build_object('status', k.status, 'id', k.failed, 'state', k.stands,
            'hold', metered.hold_json(k.failed_no, k.clk)));
        return;
    end if;
    -- A claim's unit is spent when the claim is confirmed, and only then. If it could be
    -- spent before, and the hold then ended otherwise, nobody could have the key, nor give
    -- it back; were it not spent, the key would be taken, and nothing given back would end
    -- that. Without lines, all is taken.
    if line_scopes is not null then
        select h.claim into own from metered.holds h where h.no = k.nos[1];
        if own is not null and closing <> coalesce(line_units[array_position(line_scopes, own)] > 0, false) then
            refused := metered.refuse_hold(raising, json_build_object('status', case when closing then 'unconfirmed' else 'claim' end,
                'id', ids[1], 'scope', own));
            return;
        end if;
        for i in 1..cardinality(line_scopes) loop
            select y.open, y.key into l from metered.hold_lines y where y.hold = k.nos[1] and y.scope = line_scopes[i];
            if l.open is null then
                refused := metered.refuse_hold(raising, json_build_object('status', 'line', 'id', ids[1],
                    'scope', line_scopes[i]));
                return;
            end if;
            if line_units[i] > l.open then
                if policy = 'n' then
                    refused := metered.refuse_hold(raising, json_build_object('status', 'excess', 'id', ids[1],
                        'scope', line_scopes[i], 'requested', line_units[i], 'open', l.open));
                    return;
                end if;
                excess_scopes := excess_scopes || line_scopes[i];
                excess_units := excess_units || (line_units[i] - l.open);
                if policy = 'f' then
                    for j in 1..cardinality(limit_scopes) loop
                        continue when limit_scopes[j] <> i;
                        excess_limits := excess_limits || cardinality(excess_scopes);
                        excess_maxima := excess_maxima || maxima[j];
                        excess_windows := excess_windows || windows[j];
                    end loop;
                end if;
            end if;
        end loop;
    end if;
    -- The excess first: what is kept and what is spent of it count the same.
    if excess_scopes is not null then
        c := metered.post(excess_scopes, k.keys, excess_units,
            coalesce(excess_limits, '{}'), coalesce(excess_maxima, '{}'), coalesce(excess_windows, '{}'), max_ahead, wait_ms,
            array_fill(note, array[cardinality(excess_scopes)]), of_namespace, of_operation, false, null, ids[1], null, k.clk);
        if c.denied is not null then
            refused := metered.refuse_hold(raising, json_build_object('status', 'denied', 'denied', c.denied,
                'scopes', excess_scopes, 'units', excess_units));
            return;
        end if;
    end if;
    for i in 1..cardinality(ids) loop
        detail := '[]';
        lines := '{}';
        for l in
            select y.scope, y.amount, y.captured, y.open, t.seq, t.at, t.spent, t.refunded, t.credited, t.held, t.epoch, t.next_due
            from metered.hold_lines y left join lateral (
                select * from metered.ledger e where e.scope = y.scope order by e.seq desc limit 1 for key share) t on true
            where y.hold = k.nos[i] order by y.scope
        loop
            take := case when line_scopes is null then l.open
                else coalesce(line_units[array_position(line_scopes, l.scope)], 0) end;
            covered := least(take, l.open);
            if covered > 0 or closing and l.open > 0 then
                if l.seq is null then
                    perform metered.collided();
                end if;
                if covered > 0 then
                    insert into metered.ledger (seq, amount, at, spent, refunded, credited, held,
                        epoch, kind, scope, next_due, hold, namespace, operation, note)
                    values (l.seq + 1, covered, greatest(k.clk, l.at),
                        l.spent + covered, l.refunded, l.credited, l.held - covered,
                        l.epoch, 'u', l.scope, metered.due_after(l.scope, l.seq, l.held - covered, l.next_due, k.clk),
                        ids[i], of_namespace, of_operation, nullif(capture_holds.note, '')::jsonb)
                    on conflict do nothing;
                    if not found then
                        perform metered.collided();
                    end if;
                    detail := detail || jsonb_build_object('scope', l.scope, 'amount', covered,
                        'seq', l.seq + 1, 'at', greatest(k.clk, l.at));
                end if;
                if closing and covered < l.open then
                    insert into metered.ledger (seq, amount, at, spent, refunded, credited, held,
                        epoch, kind, scope, next_due, hold, namespace, operation, note)
                    values (l.seq + case when covered > 0 then 2 else 1 end, l.open - covered, greatest(k.clk, l.at),
                        l.spent + covered, l.refunded, l.credited, l.held - l.open,
                        l.epoch, 'l', l.scope, metered.due_after(l.scope, l.seq, l.held - l.open, l.next_due, k.clk),
                        ids[i], of_namespace, of_operation, nullif(capture_holds.note, '')::jsonb)
                    on conflict do nothing;
                    if not found then
                        perform metered.collided();
                    end if;
                end if;
            end if;
            if take > covered then
                n := array_position(excess_scopes, l.scope);
                detail := detail || jsonb_build_object('scope', l.scope, 'amount', take - covered, 'seq', c.seqs[n], 'at', c.ats[n], 'excess', true);
            end if;
            lines := lines || metered.line_json(l.scope, l.amount, l.captured + take, case when closing then 0 else l.open - covered end);
            if take > 0 or closing and l.open > 0 then
                update metered.hold_lines y set captured = y.captured + take, open = case when closing then 0 else y.open - covered end
                where y.hold = k.nos[i] and y.scope = l.scope;
            end if;
        end loop;
        update metered.holds h set version = h.version + 1, entity = coalesce(of_entity, h.entity),
            state = case when closing then 'c' else 'h' end::"char", ended_at = case when closing then k.clk end, pending = not closing
        where h.no = k.nos[i]
        returning h.version, metered.hold_as_json(h, array_to_json(lines), k.clk) into v, hold;
        holds[i] := hold;
        insert into metered.hold_events (hold, at, version, kind, entity, detail, note, namespace, operation)
        values (k.nos[i], k.clk, v, case when closing then 'c' else 'p' end, of_entity, detail,
            nullif(capture_holds.note, '')::jsonb, of_namespace, of_operation);
        if channel is not null then
            perform metered.announce(channel, of_tenant, ids[i], v, case when closing then 'captured' else 'captured_part' end);
        end if;
        unused := case when of_operation is not null then metered.remember_hold(hold) end;
    end loop;
end
$$;

-- Releases holds, all or none.
create function metered.release_holds(of_tenant text, ids text[], issued timestamptz[], of_holder text, wait_ms int,
    note text, channel text, of_namespace text, of_operation text, raising boolean,
    out refused json, out holds json[])
language plpgsql volatile
as $$
declare
    k      record;
    v      int;
    hold   json;
    unused text;
begin
    k := metered.lock_holds(of_tenant, ids, issued, of_holder, 'h', wait_ms);
    if k.status is not null then
        refused := metered.refuse_hold(raising, json_build_object('status', k.status, 'id', k.failed, 'state', k.stands,
            'hold', metered.hold_json(k.failed_no, k.clk)));
        return;
    end if;
    perform metered.free_lines(k.nos, k.keys, 'l', k.clk, case when cardinality(ids) = 1 then ids[1] end, note, of_namespace, of_operation);
    for i in 1..cardinality(ids) loop
        update metered.holds h set version = h.version + 1, state = 'r', ended_at = k.clk, pending = false
        where h.no = k.nos[i]
        returning h.version, metered.hold_as_json(h, (
            select json_agg(metered.line_json(l.scope, l.amount, l.captured, 0) order by l.scope)
            from metered.hold_lines l where l.hold = h.no), k.clk) into v, hold;
        holds[i] := hold;
        insert into metered.hold_events (hold, at, version, kind, note, namespace, operation)
        values (k.nos[i], k.clk, v, 'r', nullif(release_holds.note, '')::jsonb, of_namespace, of_operation);
        if channel is not null then
            perform metered.announce(channel, of_tenant, ids[i], v, 'released');
        end if;
        unused := case when of_operation is not null then metered.remember_hold(hold) end;
    end loop;
end
$$;

-- Extends holds, all or none: each deadline by "by", no deadline past its ceiling.
create function metered.extend_holds(of_tenant text, ids text[], issued timestamptz[], of_holder text, wait_ms int,
    note text, channel text, by interval, of_namespace text, of_operation text, raising boolean,
    out refused json, out holds json[])
language plpgsql volatile
as $$
declare
    k      record;
    h      record;
    unused text;
begin
    k := metered.lock_holds(of_tenant, ids, issued, of_holder, 'h', wait_ms);
    if k.status is not null then
        refused := metered.refuse_hold(raising, json_build_object('status', k.status, 'id', k.failed, 'state', k.stands,
            'hold', metered.hold_json(k.failed_no, k.clk)));
        return;
    end if;
    for i in 1..cardinality(ids) loop
        select y.deadline, y.ceiling into h from metered.holds y where y.no = k.nos[i];
        if h.deadline <= k.clk then     -- in its grace, which is for captures
            refused := metered.refuse_hold(raising, json_build_object('status', 'state', 'id', ids[i], 'state', 'x',
                'hold', metered.hold_json(k.nos[i], k.clk)));
        elsif h.deadline + by > h.ceiling then
            refused := metered.refuse_hold(raising, json_build_object('status', 'ceiling', 'id', ids[i],
                'left_us', (extract(epoch from h.ceiling - h.deadline) * 1000000)::bigint));
        end if;
        if refused is not null then
            return;
        end if;
    end loop;
    for i in 1..cardinality(ids) loop
        update metered.holds y set version = y.version + 1, deadline = y.deadline + by, due = y.due + by
        where y.no = k.nos[i] returning y.version, y.deadline, y.due into h;
        update metered.hold_lines l set due = h.due where l.hold = k.nos[i];
        insert into metered.hold_events (hold, at, deadline, version, kind, note, namespace, operation)
        values (k.nos[i], k.clk, h.deadline, h.version, 'e', nullif(extend_holds.note, '')::jsonb, of_namespace, of_operation);
        if channel is not null then
            perform metered.announce(channel, of_tenant, ids[i], h.version, 'extended');
        end if;
        holds[i] := metered.hold_json(k.nos[i], k.clk);
        unused := case when of_operation is not null then metered.remember_hold(holds[i]) end;
    end loop;
end
$$;

-- Gives back what captured holds spent, all or none, as refunds of their charges; with
-- skip_purged, without those that were purged, unless it is of the claim's own unit,
-- which would stay taken. refused: besides lock_holds's, returned (it was before),
-- purged, excess (somebody refunded part of a charge by hand).
create function metered.refund_holds(of_tenant text, ids text[], issued timestamptz[], of_holder text, wait_ms int,
    note text, channel text, skip_purged boolean, of_namespace text, of_operation text, raising boolean,
    out refused json, out holds json[])
language plpgsql volatile
as $$
declare
    k      record;
    e      record;
    answer text;
    kept   jsonb;
    v      int;
    unused text;
begin
    k := metered.lock_holds(of_tenant, ids, issued, of_holder, 'c', wait_ms);
    if k.status is null and exists (select from metered.holds h where h.no = any (k.nos) and h.returned) then
        select 'returned', h.id, h.no into k.status, k.failed, k.failed_no
        from metered.holds h where h.no = any (k.nos) and h.returned order by h.no limit 1;
    end if;
    if k.status is not null then
        refused := metered.refuse_hold(raising, json_build_object('status', k.status, 'id', k.failed, 'state', k.stands,
            'hold', metered.hold_json(k.failed_no, k.clk)));
        return;
    end if;
    -- A refusal after the first refund takes that back, too. By a code that does not end in
    -- 000: such a one would catch its whole class, and what refuse_hold raises with it.
    begin
        for i in 1..cardinality(ids) loop
            kept := null;
            for e in select d.scope, d.amount, d.seq, d.at, l.key, (
                         -- Of a scope that was forgotten the number may be another's by now. Not
                         -- EXISTS, which Postgres 18 answers from a hash of the whole ledger.
                         select c.seq from metered.ledger c where c.scope = d.scope and c.seq = d.seq and c.at = d.at and c.hold = ids[i]
                     ) is not null as there
                     from metered.hold_events y, lateral jsonb_to_recordset(y.detail) d(scope text, amount bigint, seq bigint, at timestamptz),
                          lateral (select z.key from metered.hold_lines z where z.hold = y.hold and z.scope = d.scope) l
                     where y.hold = k.nos[i] and y.kind in ('p', 'c') order by d.scope, d.seq loop
                answer := case when not e.there then 'purged' else
                    (metered.refund(e.scope, e.key, e.seq, e.amount, wait_ms, note, of_namespace, of_operation, false)).status end;
                if skip_purged and answer = 'purged' and not exists (
                    select from metered.holds h where h.no = k.nos[i] and h.claim = e.scope) then
                    kept := coalesce(kept, '[]') || jsonb_build_object('scope', e.scope, 'amount', e.amount, 'seq', e.seq, 'at', e.at);
                elsif answer <> 'ok' then
                    refused := metered.refuse_hold(raising, json_build_object('status', answer, 'id', ids[i], 'scope', e.scope));
                    raise exception using errcode = 'MT100';
                end if;
            end loop;
            update metered.holds h set version = h.version + 1, returned = true
            where h.no = k.nos[i] returning h.version into v;
            insert into metered.hold_events (hold, at, version, kind, detail, note, namespace, operation)
            values (k.nos[i], k.clk, v, 'b', kept, nullif(refund_holds.note, '')::jsonb, of_namespace, of_operation);
            if channel is not null then
                perform metered.announce(channel, of_tenant, ids[i], v, 'returned');
            end if;
            holds[i] := metered.hold_json(k.nos[i], k.clk);
            unused := case when of_operation is not null then metered.remember_hold(holds[i]) end;
        end loop;
    exception when sqlstate 'MT100' then
        holds := null;
    end;
end
$$;
