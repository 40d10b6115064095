-- The short way of the commonest calls: one charge, with at most one limit by window or lifetime, of a
-- scope in which nothing is unusual; and the claim of a new id. Most of the time of such a call is
-- neither reading nor writing, but PL/pgSQL's: each expression is prepared in each transaction, and
-- each composite is taken apart. So these functions have few expressions, and take scalars. Where
-- something is unusual they write nothing, and go on with the full function, which alone refuses. It
-- runs in the same call, since COMMIT may follow in the same flush. See ADR 22.

-- Whether calls may go the short way. A test answers false, and so sends all calls the full way. On
-- Citus locks are taken by another node, and calls go the full way. Inlined wherever it stands.
create function metered._goes_short() returns boolean
language sql immutable
as $$
    select not metered._sharded()
$$;

-- The microseconds of a time since 1970: a number, which no setting of a session spells otherwise.
-- Stable, as extract is: else it would not be inlined.
create function metered._in_us(t timestamptz) returns bigint
language sql stable
as $$
    select (extract(epoch from t) * 1000000)::bigint
$$;

-- Appends a charge of units to a scope that is locked, if its limit (max_units in each window win; in
-- its lifetime, if win is 0; none, if max_units is null) admits them, and returns the entry's seq, its time
-- in microseconds, the held units, and with standing the units that counted before. Null: nothing was
-- written, and the full function must decide. The columns that it leaves out are null in a usual scope.
create function metered._append_short(of_scope text, units bigint, max_units bigint, win interval,
    note jsonb, standing boolean, of_tenant text, of_operation text) returns bigint[]
language plpgsql volatile
as $$
declare
    written bigint[];
begin
    if standing and win > interval '0' then
        -- The base of the window becomes the entry's anchor: so it is in the answer, too.
        insert into metered.ledger as y (seq, amount, at, spent, refunded, credited, held, epoch, kind,
            scope, next_due, operation_tenant, operation, note, anchor_at, anchor_spent)
        select t.seq + 1, units, t.clk, t.spent + units, t.refunded, t.credited, t.held, t.epoch, 'c',
            of_scope, t.next_due, of_tenant, of_operation, _append_short.note,
            t.clk - win, coalesce(b.spent, 0)
        from {short tip: scope = of_scope} t
            left join lateral (
                select base.seq, base.spent, base.refunded
                from {base: scope = of_scope, epoch = t.epoch, since = t.clk - win}) b on true
        where {usual: tip = t, at = t.clk, amount = units, note = _append_short.note}
            and coalesce(b.refunded, 0) = t.refunded and (b.seq > 1 or b.seq = t.seq
                or t.epoch = 0 and (t.seq <= 16 and b.seq is null
                    or (select l.seq from metered.ledger l where l.scope = of_scope and l.seq = 2) > 0))
            and t.spent - coalesce(b.spent, 0) <= max_units - t.held - units
        on conflict do nothing
        returning array[y.seq, metered._in_us(y.at), y.held, y.spent - units - y.anchor_spent]
            into written;
        return written;
    end if;
    insert into metered.ledger as y (seq, amount, at, spent, refunded, credited, held, epoch, kind,
        scope, next_due, operation_tenant, operation, note, anchor_at, anchor_spent)
    select t.seq + 1, units, t.clk, t.spent + units, t.refunded, t.credited, t.held, t.epoch, 'c',
        of_scope, t.next_due, of_tenant, of_operation, _append_short.note,
        t.anchor_at, t.anchor_spent
    from {short tip: scope = of_scope} t
    where {usual: tip = t, at = t.clk, amount = units, note = _append_short.note}
        and {admits: tip = t, at = t.clk, amount = units}
    on conflict do nothing
    returning array[y.seq, metered._in_us(y.at), y.held, y.spent - units - y.refunded - y.credited]
        into written;
    return written;
end
$$;

-- The charge of _append_short, as the full functions take it.
create function metered._as_charges(of_scope text, key bigint, units bigint, max_units bigint, win interval,
    note jsonb) returns metered.new_charge[]
language sql immutable
as $$
    select array[row(of_scope, key, units, 0, case when max_units is null then '{}'
            else array[row(max_units, win, null, null, null, null)::metered.charge_limit] end,
        note, null, null, null)::metered.new_charge]
$$;

-- The answer of charge as JSON, with times in microseconds.
create function metered._charged_json(a metered.charged) returns json
language sql stable
as $$
    select json_build_object('seqs', (a).seqs,
        'ats', array(select metered._in_us(x) from unnest((a).ats) x),
        'used', (a).used, 'held', (a).held, 'refused', (a).refused, 'crossed', (a).crossed)
$$;

-- A charge of one scope without a command, as charge makes it: JSON, [seq, time in microseconds, held
-- units, used units], or charge's answer as an object.
create function metered.charge_plain(of_scope text, key bigint, units bigint, max_units bigint, win interval,
    note jsonb, standing boolean, ahead interval, wait_ms int) returns json
language plpgsql volatile
as $$
declare
    written bigint[];
begin
    if metered._goes_short() then
        if metered._try_lock(key) is not true then
            perform metered._lock_all_scopes(array[of_scope], array[key], wait_ms);
        end if;
        written := metered._append_short(of_scope, units, max_units, win, note, standing, null, null);
        if written is not null then
            return array_to_json(written);
        end if;
    end if;
    return metered._charged_json(metered.charge(
        metered._as_charges(of_scope, key, units, max_units, win, note), ahead, wait_ms, standing));
end
$$;

-- Claims the id of a command without a token and without charges to look at. Null: it is new, and
-- begun. Else begin_command's answer, whose arguments these are.
create function metered.begin_command_plain(of_tenant text, of_id text, key bigint, issued timestamptz,
    max_future interval, timeout_ms int, marker text, wait_ms int) returns json
language plpgsql volatile
as $$
declare
    begun text;
    t     record;
begin
    if metered._goes_short() and coalesce(current_setting('metered_tx.command', true), '') = ''
        and current_setting('transaction_isolation') = 'read committed' and metered._try_lock(key)
    then
        -- A statement of its own, whose snapshot is taken after the lock.
        select case
            when {known id: tenant = of_tenant, id = of_id, issued = issued, future = max_future}
                or strpos(version(), '-linux') = 0 then null
            else set_config('metered_tx.command', marker, true)
                || case when timeout_ms is null then ''
                    else set_config('client_connection_check_interval', '100', true) end
                || case when timeout_ms > 0 then {shorter timeouts: ms = timeout_ms} else '' end
            end into begun;
        if begun is not null then
            execute 'declare metered_command cursor with hold for select metered.block_commit()';
            return null;
        end if;
    end if;
    t := metered.begin_command(true, true, row(of_tenant, of_id, key, issued, max_future, timeout_ms,
        marker, false, false, null, null)::metered.new_command, null, '{}', interval '0', wait_ms);
    if t.status = 'new' then
        return null;
    end if;
    return json_build_object('status', t.status, 'fingerprint', encode(t.fingerprint, 'base64'),
        'result', encode(t.result, 'base64'), 'scopes', t.scopes, 'amounts', t.amounts, 'seqs', t.seqs,
        'ats', array(select metered._in_us(x) from unnest(t.ats) x), 'holds', t.holds,
        'at', metered._in_us(t.at), 'refusal', t.refusal);
end
$$;

-- Makes the one charge of a command, if it has one, and its record, and returns the time of the record
-- in microseconds, and what _append_short returns. Null: nothing was written.
create function metered._complete_short(of_tenant text, of_id text, of_fingerprint bytea,
    issued timestamptz, of_result bytea, name text, jobs bigint[], of_scope text, key bigint,
    units bigint, max_units bigint, win interval, note jsonb, standing boolean, wait_ms int)
    returns bigint[]
language plpgsql volatile
as $$
declare
    written bigint[];
    done_at bigint;
begin
    if of_scope is not null then
        if metered._try_lock(key) is not true then
            perform metered._lock_all_scopes(array[of_scope], array[key], wait_ms);
        end if;
        written := metered._append_short(of_scope, units, max_units, win, note, standing, of_tenant, of_id);
        if written is null then
            return null;
        end if;
    end if;
    insert into metered.operations as o (tenant, id, fingerprint, issued_at, at, result,
        scopes, amounts, seqs, ats, holds, name, jobs)
    select of_tenant, of_id, of_fingerprint, issued, metered.clock(), of_result,
        case when of_scope is not null then array[of_scope] end,
        case when of_scope is not null then array[units] end, written[1:1],
        case when of_scope is not null then
            array[timestamptz 'epoch' + written[2] * interval '1 microsecond'] end,
        string_to_array(nullif(current_setting('metered_tx.holds', true), ''), chr(30)), name, jobs
    on conflict do nothing
    returning metered._in_us(o.at) into done_at;
    if done_at is null then
        raise exception 'could not serialize access: the operation was recorded meanwhile'
            using errcode = '40001';
    end if;
    return done_at || written;
end
$$;

-- Ends a command that has at most one charge of its own, as complete_command does with finishing: JSON,
-- what _complete_short returns, or complete_command's answer as an object.
create function metered.complete_command_plain(of_tenant text, of_id text, marker text,
    of_fingerprint bytea, issued timestamptz, of_result bytea, name text, jobs bigint[], of_scope text,
    key bigint, units bigint, max_units bigint, win interval, note jsonb, standing boolean,
    ahead interval, wait_ms int) returns json
language plpgsql volatile
as $$
declare
    written bigint[];
    unused  text;
    t       record;
    command_cursor refcursor := 'metered_command';  -- CLOSE by a variable is not parsed anew
begin
    if metered._goes_short() and current_setting('metered_tx.command', true) = marker then
        written := metered._complete_short(of_tenant, of_id, of_fingerprint, issued, of_result, name, jobs,
            of_scope, key, units, max_units, win, note, standing, wait_ms);
        if written is not null then
            unused := set_config('metered_tx.command', '', true) || set_config('metered_tx.holds', '', true);
            close command_cursor;
            return array_to_json(written);
        end if;
    end if;
    t := metered.complete_command(row(of_tenant, of_id, null, issued, null, null, marker, standing, false,
        name, jobs)::metered.new_command, of_fingerprint, of_result, null,
        case when of_scope is null then '{}'
            else metered._as_charges(of_scope, key, units, max_units, win, note) end, ahead, wait_ms, true);
    return json_build_object('seqs', t.seqs, 'ats', array(select metered._in_us(x) from unnest(t.ats) x),
        'used', t.used, 'held', t.held, 'at', metered._in_us(t.at), 'crossed', t.crossed);
end
$$;

-- A whole command that does nothing but its one charge: the answer of begin_command_plain, if that is
-- not null, or else that of complete_command_plain. The short way needs no guard against a COMMIT,
-- since nobody gets at the transaction before it is complete.
create function metered.run_command_plain(of_tenant text, of_id text, id_key bigint,
    of_fingerprint bytea, issued timestamptz, max_future interval, of_result bytea, name text,
    of_scope text, key bigint, units bigint, max_units bigint, win interval, note jsonb,
    standing boolean, ahead interval, wait_ms int) returns json
language plpgsql volatile
as $$
declare
    written bigint[];
    answer  json;
begin
    if metered._goes_short() and coalesce(current_setting('metered_tx.command', true), '') = ''
        and current_setting('transaction_isolation') = 'read committed' and metered._try_lock(id_key)
    then
        -- A statement of its own, whose snapshot is taken after the lock.
        if ({known id: tenant = of_tenant, id = of_id, issued = issued, future = max_future}) is not true then
            written := metered._complete_short(of_tenant, of_id, of_fingerprint, issued, of_result, name, null,
                of_scope, key, units, max_units, win, note, standing, wait_ms);
            if written is not null then
                return array_to_json(written);
            end if;
        end if;
    end if;
    answer := metered.begin_command_plain(of_tenant, of_id, id_key, issued, max_future, null, 'whole', wait_ms);
    return coalesce(answer, metered.complete_command_plain(of_tenant, of_id, 'whole', of_fingerprint, issued,
        of_result, name, null, of_scope, key, units, max_units, win, note, standing, ahead, wait_ms));
end
$$;
