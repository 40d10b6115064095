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

-- Appends a charge of units to a scope that is locked, if its limits admit them: at most max_units in each window
-- win, in its lifetime, if win is 0, or in each period per, if win is null; and likewise max_2, which may be null.
-- Returns the entry's seq, its time in microseconds, the held units, and with standing the units that
-- counted before for each limit, and the start and the end of the period of each. Null: nothing was written, and the full
-- function must decide. The columns that it leaves out are null in a usual scope. A charge with one limit that has no period
-- has fewer expressions: see the macro short charge.
create function metered._append_limited(of_scope text, units bigint, max_units bigint, win interval, per metered.period,
    max_2 bigint, win_2 interval, per_2 metered.period, note jsonb, standing boolean, of_tenant text, of_id text)
    returns bigint[]
language plpgsql volatile
as $$
declare
    moment   timestamptz := metered.clock();    -- after the lock
    since_1  timestamptz;   -- the time after which units count for a limit. Null for its lifetime
    since_2  timestamptz;
    p_1      timestamptz[]; -- the period of a limit
    p_2      timestamptz[];
    epoch_2  bigint;        -- the scope's, and the base of the second limit's window
    seq_2    bigint;
    spent_2  bigint;
    refunded_2 bigint;
    e_seq    bigint;        -- the entry that was appended, or null
    e_held   bigint;
    e_before bigint;        -- units that were spent before it
    e_free   bigint;        -- refunds and credits
    e_base   bigint;        -- units that were spent before the first limit's window
begin
    -- A limit by a window of negative length, or by nothing, is for the full function to refuse.
    if max_units is null or win < interval '0' or win is null and per is null or win_2 < interval '0'
        or max_2 is not null and win_2 is null and per_2 is null then
        return null;
    end if;
    -- The bound is tried twice, since a period is dear to find. A period that has a null is neither null nor not null.
    for look in 1..2 loop
        if (standing or look = 2) and (not per is null or not per_2 is null) then
            p_1 := case when win is null then metered._period_at(per, moment) end;
            p_2 := case when max_2 is not null and win_2 is null then metered._period_at(per_2, moment) end;
        end if;
        since_1 := {short since: win = win, period = p_1};
        if max_2 is not null then
            since_2 := {short since: win = win_2, period = p_2};
        end if;
        if standing and (since_1 is not null or since_2 is not null) then
            if since_2 is not null then
                select t.epoch, b.seq, b.spent, b.refunded into epoch_2, seq_2, spent_2, refunded_2
                from (select l.epoch from metered.ledger l where l.scope = of_scope order by l.seq desc limit 1) t
                    left join lateral {short base: epoch = t.epoch, since = since_2};
            end if;
            -- The base of the first window becomes the entry's anchor: so it is in the answer, too.
            insert into metered.ledger as y ({short columns})
            select {short values: at = moment}, coalesce(since_1, t.anchor_at), case when since_1 is null then t.anchor_spent else coalesce(b.spent, 0) end
            from {short tip: scope = of_scope} t left join lateral {short base: epoch = t.epoch, since = since_1}
            where {usual: tip = t, at = moment, amount = units, note = note}
                and case when since_1 is null then {short lifetime: max = max_units}
                    else {exact: seq = b.seq, refunded = b.refunded} and t.spent - coalesce(b.spent, 0) <= max_units - t.held - units end
                and case when since_2 is null then {short lifetime: max = max_2}
                    else epoch_2 = t.epoch and {exact: seq = seq_2, refunded = refunded_2} and t.spent - coalesce(spent_2, 0) <= max_2 - t.held - units end
            {short written};
            exit;
        end if;
        insert into metered.ledger as y ({short columns})
        select {short values: at = moment}, t.anchor_at, t.anchor_spent
        from {short tip: scope = of_scope} t
        where {usual: tip = t, at = moment, amount = units, note = note}
            and {admits since: max = max_units, since = since_1} and {admits since: max = max_2, since = since_2}
        {short written};
        exit when e_seq is not null or standing or per is null and per_2 is null;
    end loop;
    return case when e_seq is not null then
        array[e_seq, metered._in_us(moment), e_held, e_before - case when since_1 is null then e_free else e_base end,
            e_before - case when since_2 is null then e_free else coalesce(spent_2, 0) end,
            metered._in_us(p_1[1]), metered._in_us(p_1[2]), metered._in_us(p_2[1]), metered._in_us(p_2[2])] end;
end
$$;

-- The charge of _append_limited, as the full functions take it.
create function metered._as_charges(of_scope text, key bigint, units bigint, max_units bigint, win interval,
    per metered.period, max_2 bigint, win_2 interval, per_2 metered.period, note jsonb) returns metered.new_charge[]
language sql immutable
as $$
    select array[row(of_scope, key, units, 0, case when max_units is null then '{}' else
            array[row(max_units, win, case when win is null then per end, null, null, null)::metered.charge_limit] end
        || case when max_2 is null then '{}' else
            array[row(max_2, win_2, case when win_2 is null then per_2 end, null, null, null)::metered.charge_limit] end,
        note, null, null, null)::metered.new_charge]
$$;

-- The answer of charge as JSON, with times in microseconds.
create function metered._charged_json(a metered.charged) returns json
language sql stable
as $$
    select json_build_object('seqs', (a).seqs,
        'ats', array(select metered._in_us(x) from unnest((a).ats) x),
        'used', (a).used, 'held', (a).held, 'refused', (a).refused, 'crossed', (a).crossed,
        'periods', array(select metered._in_us(x) from unnest((a).periods) x))
$$;

-- A charge of one scope without a command, as charge makes it: JSON, the array of _append_limited, or charge's answer
-- as an object.
create function metered.charge_plain(of_scope text, key bigint, units bigint, max_units bigint, win interval,
    per metered.period, max_2 bigint, win_2 interval, per_2 metered.period,
    note jsonb, standing boolean, ahead interval, wait_ms int) returns json
language plpgsql volatile
as $$
declare
    written bigint[];
    of_tenant text;     -- of no command
    of_id   text;
    {short variables}
begin
    if metered._goes_short() then
        {short lock};
        if max_2 is null and per is null then
            {short charge: also = true};
            if e_seq is not null then
                return array_to_json({short answer});
            end if;
        else
            written := metered._append_limited(of_scope, units, max_units, win, per, max_2, win_2, per_2, note, standing, null, null);
            if written is not null then
                return array_to_json(written);
            end if;
        end if;
    end if;
    return metered._charged_json(metered.charge(
        metered._as_charges(of_scope, key, units, max_units, win, per, max_2, win_2, per_2, note), ahead, wait_ms, standing));
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

-- Ends a command that has at most one charge of its own, as complete_command does with finishing: JSON,
-- the time of the record in microseconds and the array of _append_limited, or complete_command's answer as an object.
create function metered.complete_command_plain(of_tenant text, of_id text, marker text,
    of_fingerprint bytea, issued timestamptz, of_result bytea, name text, jobs bigint[], of_scope text,
    key bigint, units bigint, max_units bigint, win interval, per metered.period, max_2 bigint,
    win_2 interval, per_2 metered.period, note jsonb, standing boolean, ahead interval, wait_ms int) returns json
language plpgsql volatile
as $$
declare
    written bigint[];
    done_at bigint;
    {short variables}
    unused  text;
    whole   record;
    command_cursor refcursor := 'metered_command';  -- CLOSE by a variable is not parsed anew
begin
    if metered._goes_short() and current_setting('metered_tx.command', true) = marker then
        if of_scope is not null then
            {short lock};
            if max_2 is null and per is null then
                {short charge: also = true};
                if e_seq is not null then
                    written := {short answer};
                end if;
            else
                written := metered._append_limited(of_scope, units, max_units, win, per, max_2, win_2, per_2, note, standing, of_tenant, of_id);
            end if;
        end if;
        if of_scope is null or written is not null then
            insert into {short record: scopes = case when of_scope is not null then array[of_scope] end, amounts = case when of_scope is not null then array[units] end,
                seqs = written[1:1], ats = case when of_scope is not null then array[timestamptz 'epoch' + written[2] * interval '1 microsecond'] end,
                holds = string_to_array(nullif(current_setting('metered_tx.holds', true), ''), chr(30)), jobs = jobs, also = true};
            if done_at is null then
                perform metered._recorded_meanwhile();
            end if;
            unused := set_config('metered_tx.command', '', true) || set_config('metered_tx.holds', '', true);
            close command_cursor;
            return array_to_json(done_at || written);
        end if;
    end if;
    whole := metered.complete_command(row(of_tenant, of_id, null, issued, null, null, marker, standing, false,
        name, jobs)::metered.new_command, of_fingerprint, of_result, null,
        case when of_scope is null then '{}'
            else metered._as_charges(of_scope, key, units, max_units, win, per, max_2, win_2, per_2, note) end, ahead, wait_ms, true);
    return json_build_object('seqs', whole.seqs, 'ats', array(select metered._in_us(x) from unnest(whole.ats) x),
        'used', whole.used, 'held', whole.held, 'at', metered._in_us(whole.at), 'crossed', whole.crossed,
        'periods', array(select metered._in_us(x) from unnest(whole.periods) x));
end
$$;

-- A whole command that does nothing but its one charge: the answer of begin_command_plain, if that is
-- not null, or else that of complete_command_plain. The short way needs no guard against a COMMIT,
-- since nobody gets at the transaction before it is complete.
create function metered.run_command_plain(of_tenant text, of_id text, id_key bigint,
    of_fingerprint bytea, issued timestamptz, max_future interval, of_result bytea, name text,
    of_scope text, key bigint, units bigint, max_units bigint, win interval, per metered.period, max_2 bigint,
    win_2 interval, per_2 metered.period, note jsonb, standing boolean, ahead interval, wait_ms int) returns json
language plpgsql volatile
as $$
declare
    done_at  bigint;
    answer   json;
    {short variables}
begin
    -- The statements see what was committed before the locks were free: each has a snapshot of its own.
    if metered._goes_short() and coalesce(current_setting('metered_tx.command', true), '') = ''
        and current_setting('transaction_isolation') = 'read committed' and metered._try_lock(id_key)
    then
        if of_scope is null then
            insert into {short record: scopes = null, amounts = null, seqs = null, ats = null, holds = null, jobs = null,
                also = ({known id: tenant = of_tenant, id = of_id, issued = issued, future = max_future}) is not true};
            if done_at is not null then
                return json_build_array(done_at);
            end if;
        elsif max_2 is null and per is null then
            if metered._try_lock(key) is not true then
                perform from metered.operations o where false;  -- a command that waits is counted by its lock of the table
                perform metered._lock_all_scopes(array[of_scope], array[key], wait_ms);
            end if;
            {short charge: also = ({known id: tenant = of_tenant, id = of_id, issued = issued, future = max_future}) is not true};
            if e_seq is not null then
                insert into {short record: scopes = array[of_scope], amounts = array[units], seqs = array[e_seq], ats = array[e_at],
                    holds = null, jobs = null, also = true};
                if done_at is null then
                    perform metered._recorded_meanwhile();
                end if;
                return array_to_json(done_at || {short answer});
            end if;
        end if;
    end if;
    answer := metered.begin_command_plain(of_tenant, of_id, id_key, issued, max_future, null, 'whole', wait_ms);
    return coalesce(answer, metered.complete_command_plain(of_tenant, of_id, 'whole', of_fingerprint, issued,
        of_result, name, null, of_scope, key, units, max_units, win, per, max_2, win_2, per_2, note, standing, ahead,
        wait_ms));
end
$$;
