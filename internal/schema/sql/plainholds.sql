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
    {short captured}
begin
    if metered._goes_short() then
        {short capture: of = capture_holds_plain, also = true, command = operation is not null, end = return answer};
    end if;
    was := metered.capture_holds(row(of_tenant, array[of_id], array[coalesce(issued, 'infinity')], holder)::metered.hold_ids,
        case when units is not null then array[row(of_scope, units, '{}')::metered.used_units] end,
        row(true, 'refuse', entity)::metered.capture_terms, interval '0', wait_ms, row(op_tenant, operation, note)::metered.origin,
        channel, raising);
    return json_build_array(was.refused::text, was.holds::text[], was.crossed);
end
$$;

-- A whole command that does nothing but one capture, which ends its hold: the answer of
-- complete_command_plain, a line feed, and that of capture_holds_plain. Where the id is known, it
-- fails as begin_command_plain does when it raises. As in run_command_plain, there is no guard.
create function metered.run_capture_plain(of_tenant text, of_id text, held_at timestamptz, holder text,
    of_scope text, units bigint, entity text, note jsonb, op_tenant text, operation text, wait_ms int,
    channel text, raising boolean, id_key bigint, issued timestamptz, max_future interval,
    of_fingerprint bytea, of_result bytea, name text) returns text
language plpgsql volatile
as $$
declare
    {short captured}
    done_at bigint;
    whole   text;
begin
    if metered._goes_short() and coalesce(current_setting('metered_tx.command', true), '') = ''
        and current_setting('transaction_isolation') = 'read committed' and metered._try_lock(id_key)
    then
        -- Its first statement has a snapshot that is taken after the lock.
        {short capture: of = run_capture_plain, command = false, end = null,
            also = ({known id: tenant = op_tenant, id = operation, issued = issued, future = max_future}) is not true};
        if answer is not null then
            insert into {short record: tenant = op_tenant, id = operation, scopes = null, amounts = null, seqs = null,
                ats = null, holds = array[answer::text], jobs = null, also = true};
            if done_at is null then
                perform metered._recorded_meanwhile();
            end if;
            return concat('[', done_at, E']\n', answer);
        end if;
    end if;
    perform metered.begin_command_plain(op_tenant, operation, id_key, issued, max_future, null, '-whole', wait_ms, true);
    whole := metered.capture_holds_plain(of_tenant, of_id, held_at, holder, of_scope, units, entity, note, op_tenant,
        operation, wait_ms, channel, raising);
    return concat(metered.complete_command_plain(op_tenant, operation, '-whole', of_fingerprint, issued, of_result, name,
        null, null, null, null, null, null, null, null, null, null, false, interval '0', wait_ms), E'\n', whole);
end
$$;
