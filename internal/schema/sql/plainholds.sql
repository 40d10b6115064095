-- The short way of holds (see plain.sql): a placement of one line with at most one limit, the
-- capture that ends such a hold, and the opening of a session. As there, these functions
-- decide nothing but the usual case, and otherwise write nothing and go on with the full function.

-- The answer of place or open_session as JSON, with times in microseconds and the hold as text.
create function metered._placed_json(status text, placed_at timestamptz, deadline timestamptz, refused jsonb,
    stored json, crossed jsonb, told bigint[]) returns json
language sql stable
as $$
    select json_build_object('status', status, 'placed_at', metered._in_us(placed_at),
        'deadline', metered._in_us(deadline), 'refused', refused, 'stored', stored::text, 'crossed', crossed,
        'told', told)
$$;

-- Places a hold of one line, as place does: JSON, [seq, time in microseconds], or place's answer as an
-- object. id_key is null if the id was made up for this call.
create function metered.place_plain(of_tenant text, of_id text, id_key bigint, holder text,
    of_fingerprint bytea, issued timestamptz, ttl interval, grace interval, lifetime interval, metadata json,
    of_scope text, key bigint, units bigint, max_units bigint, win interval, since timestamptz,
    until timestamptz, note jsonb, whole text, op_tenant text,
    operation text, ahead interval, wait_ms int, channel text, raising boolean) returns json
language plpgsql volatile
as $$
declare
    {short placed}
    answer      record;
begin
    if metered._goes_short() and {fits hold: tenant = of_tenant, id = of_id, holder = holder, fingerprint = of_fingerprint,
        ttl = ttl, grace = grace, lifetime = lifetime, scope = of_scope} and {short call}
    then
        if metered._try_lock(key) is not true then
            perform metered._lock_all_scopes(array[of_scope], array[key], wait_ms);
        end if;
        -- A chosen id is looked for by a statement whose snapshot is taken after its lock.
        if id_key is null or not metered._one_snapshot() and metered._try_lock(id_key) and metered._new_hold_id(of_tenant, of_id, issued) then
            {short placing: command = operation is not null};
        end if;
    end if;
    answer := metered.place(
        row(of_tenant, of_id, id_key is not null, id_key, holder, null, of_fingerprint, issued, ttl, grace, lifetime, metadata, null)::metered.new_hold,
        metered._as_held(of_scope, key, units, max_units, win, note, whole), ahead, wait_ms,
        row(op_tenant, operation, note)::metered.origin, channel, raising);
    return metered._placed_json(answer.status, answer.placed_at, answer.deadline, answer.refused, answer.stored, answer.crossed,
        metered._told_period(whole, since, until));
end
$$;

-- Whether no hold has the id, nor had one that was purged.
create function metered._new_hold_id(of_tenant text, of_id text, issued timestamptz) returns boolean
language plpgsql volatile
as $$
begin
    return not exists (select from metered.holds h where h.tenant = of_tenant and h.id = of_id)
        and (issued <= (select z.at from metered.holds_horizon z where z.one)) is not true;
end
$$;

-- The units of a placement of one line, as the full functions take them.
create function metered._as_held(of_scope text, key bigint, units bigint, max_units bigint, win interval,
    note jsonb, whole text) returns metered.new_charge[]
language sql stable
as $$
    select array[row(of_scope, key, units, units, case when max_units is null then '{}'
            when whole is not null then array[whole::metered.charge_limit]
            else array[row(max_units, win, null, null, null, null)::metered.charge_limit] end,
        note, null, null, null)::metered.new_charge]
$$;

-- Opens a session whose hold has one line, as open_session does: JSON, as place_plain has it.
create function metered.open_session_plain(named text, name_key bigint, named_at timestamptz, max_future interval,
    of_tenant text, of_id text, holder text, of_fingerprint bytea, issued timestamptz, ttl interval, grace interval,
    lifetime interval, metadata json, of_scope text, key bigint, units bigint, max_units bigint, win interval,
    since timestamptz, until timestamptz, note jsonb, whole text, op_tenant text, operation text, ahead interval, wait_ms int, channel text) returns json
language plpgsql volatile
as $$
declare
    {short placed}
    opened      record;
begin
    if metered._goes_short() and {fits hold: tenant = of_tenant, id = of_id, holder = holder, fingerprint = of_fingerprint,
            ttl = ttl, grace = grace, lifetime = lifetime, scope = of_scope} and {short call}
        and octet_length(of_id) > 41 and not metered._one_snapshot() and metered._try_lock(name_key)
    then
        -- A statement of its own, whose snapshot is taken after the lock.
        if ({known id: tenant = of_tenant, id = named, issued = named_at, future = max_future}
            or exists (select from metered.holds h where h.tenant = of_tenant and h.id >= left(of_id, 41)
                and h.id < left(of_id, 41) || '~' and (h.id = of_id or h.state = 'h'))) is not true
        then
            if metered._try_lock(key) is not true then
                perform metered._lock_all_scopes(array[of_scope], array[key], wait_ms);
            end if;
            {short placing: command = false};
        end if;
    end if;
    opened := metered.open_session(row(of_tenant, named, name_key, named_at, max_future, null, null, null, null, null, null)::metered.new_command,
        row(of_tenant, of_id, false, null, holder, null, of_fingerprint, issued, ttl, grace, lifetime, metadata, null)::metered.new_hold,
        metered._as_held(of_scope, key, units, max_units, win, note, whole), ahead, wait_ms,
        row(op_tenant, operation, note)::metered.origin, channel);
    return metered._placed_json(opened.status, opened.placed_at, opened.deadline, opened.refused, opened.stored, opened.crossed,
        metered._told_period(whole, since, until));
end
$$;

-- Captures one hold and ends it, as capture_holds does: all of it (units is null), or units of of_scope, its
-- one line, as far as they are held. JSON: the hold, or an array of capture_holds' answer, whose holds are
-- text, since the metadata of one may be as deep as a reader of JSON goes.
create function metered.capture_holds_plain(of_tenant text, of_id text, issued timestamptz, holder text, of_scope text,
    units bigint, entity text, note jsonb, op_tenant text, operation text, wait_ms int, channel text,
    raising boolean) returns json
language plpgsql volatile
as $$
declare
    was    record;      -- the hold before, and the time
    at_scope text;      -- of its line
    at_seq bigint;      -- the entry of captured units
    taken  bigint;      -- these
    rest   bigint;      -- units that are freed
    line   json;
    answer json;
    unused text;
    waited boolean;     -- a job may wait for the units
begin
    if metered._goes_short() then
        -- As in _lock_holds: nothing waits, and the row is read as it is by now. Another's hold is not locked.
        select y.no, y.version, y.due, y.keys[1] as key, metered.clock() as clk into was
        from metered.holds y
        where y.tenant = of_tenant and y.id = of_id and y.state = 'h' and (units is null or y.claim is null)
          and case when (capture_holds_plain.holder = '' or y.holder = capture_holds_plain.holder) and cardinality(y.keys) = 1
              then metered._try_lock(y.keys[1]) end
        for no key update skip locked;
        if was.due > was.clk and current_setting('transaction_isolation') = 'read committed' then
            insert into metered.ledger as e (seq, amount, at, spent, refunded, credited, held, epoch, kind,
                scope, next_due, hold, operation_tenant, operation, note, anchor_at, anchor_spent, crossed, others)
            select t.seq + 1, y.take, was.clk, t.spent + y.take, t.refunded, t.credited, t.held - y.take, t.epoch, 'u',
                t.scope, {due: tip = t, at = was.clk, held = t.held - y.take}, of_id, op_tenant, capture_holds_plain.operation,
                capture_holds_plain.note, t.anchor_at, t.anchor_spent, t.crossed, {others: tip = t}
            from (select l.scope, coalesce(units, l.open) as take from metered.hold_lines l
                    where l.hold = was.no and coalesce(l.scope = of_scope and units between 1 and l.open, units is null and l.open > 0)
                    and not exists (select from metered.hold_lines z where z.hold = was.no and z.scope <> l.scope)) y,
                lateral {short last: scope = y.scope} t
            where metered._key_fits(was.key, y.scope) and {settled: tip = t, at = was.clk}
            on conflict do nothing
            returning e.scope, e.seq, e.amount into at_scope, at_seq, taken;
        end if;
        if at_seq > 0 then
            -- What is open of a line that has not ended is its amount less what was captured.
            update metered.hold_lines l set captured = l.captured + taken, open = 0
            where l.hold = was.no and l.scope = at_scope
            returning l.amount - l.captured, metered._line_json(l.scope, l.amount, l.captured, 0, l.refunded, l.at_least)
            into rest, line;
            if rest > 0 then
                -- After the entry above, which nobody else has seen: its row needs no lock.
                insert into metered.ledger (seq, amount, at, spent, refunded, credited, held, epoch, kind,
                    scope, next_due, hold, operation_tenant, operation, note, anchor_at, anchor_spent, crossed, others)
                select t.seq + 1, rest, t.at, t.spent, t.refunded, t.credited, t.held - rest, t.epoch, 'l',
                    t.scope, {due: tip = t, at = t.at, held = t.held - rest}, t.hold, t.operation_tenant, t.operation,
                    t.note, t.anchor_at, t.anchor_spent, t.crossed, coalesce({others: tip = t}, 0) + 1
                from metered.ledger t where t.scope = at_scope and t.seq = at_seq
                on conflict do nothing;
                if not found then
                    perform metered._collided();
                end if;
            end if;
            update metered.holds y set version = y.version + 1, entity = coalesce(capture_holds_plain.entity, y.entity), state = 'c',
                ended_at = was.clk, pending = false
            where y.no = was.no
            returning metered._hold_as_json(row(y.*)::metered.holds, json_build_array(line), was.clk, null) into answer;
            insert into metered.hold_events (hold, at, version, kind, entity, detail, note, operation_tenant, operation)
            values (was.no, was.clk, was.version + 1, 'c', entity,
                jsonb_build_array(jsonb_build_object('scope', at_scope, 'amount', taken, 'seq', at_seq, 'at', was.clk)),
                note, op_tenant, operation)
            returning exists (select from metered.parked_scopes p where p.scope = at_scope) into waited;
            if waited then
                perform metered._mark_freed(at_scope);
            end if;
            if channel is not null or operation is not null then
                if channel is not null then
                    perform metered._announce(channel, of_tenant, of_id, was.version + 1, 'captured');
                end if;
                unused := case when operation is not null then metered._remember_hold(answer) end;
            end if;
            return answer;
        end if;
    end if;
    was := metered.capture_holds(row(of_tenant, array[of_id], array[coalesce(issued, 'infinity')], holder)::metered.hold_ids,
        case when units is not null then array[row(of_scope, units, '{}')::metered.used_units] end,
        row(true, 'refuse', entity)::metered.capture_terms, interval '0', wait_ms, row(op_tenant, operation, note)::metered.origin,
        channel, raising);
    return json_build_array(was.refused::text, was.holds::text[], was.crossed);
end
$$;
