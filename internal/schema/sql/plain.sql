-- The short way of the commonest calls: one charge, with at most one limit, of a scope in which nothing
-- is unusual; and the claim of a new id. Most of the time of such a call is neither reading nor writing,
-- but PL/pgSQL's: each expression is prepared in each transaction, and each composite is taken apart. So
-- these functions have few expressions, and take scalars. Where something is unusual they write nothing,
-- and go on with the full function, which alone refuses. It runs in the same call, since COMMIT may
-- follow in the same flush. See ADR 22.

-- Whether calls may go the short way. A test answers false, and so sends all calls the full way. On
-- Citus locks are taken by another node, and calls go the full way. Inlined wherever it stands.
create function metered._goes_short() returns boolean
language sql immutable
as $$
    select not metered._sharded()
$$;

-- Whether the schema is a cell. Declared immutable, so that it is a constant of each plan: Router.SetUp, which
-- makes a schema a cell, has plans of the ledger made anew.
create function metered._in_cell() returns boolean
language sql immutable
as $$
    select exists (select from metered.cell)
$$;

-- Whether the server runs on Linux, as far as version() tells. Declared immutable, so that it is a constant of each plan.
create function metered._on_linux() returns boolean
language sql immutable
as $$
    select strpos(version(), '-linux') > 0
$$;

-- The microseconds of a time since 1970: a number, which no setting of a session spells otherwise.
-- Stable, as extract is: else it would not be inlined.
create function metered._in_us(moment timestamptz) returns bigint
language sql stable
as $$
    select (extract(epoch from moment) * 1000000)::bigint
$$;

-- The period that a limit is judged in now, as the microseconds of since and until: those before the
-- limit's start, and of its end. Null if the caller knows it, or it is none.
create function metered._told_period(whole text, since timestamptz, until timestamptz) returns bigint[]
language plpgsql volatile
as $$
declare
    clk  timestamptz := metered.clock();
    span timestamptz[];
begin
    if whole is null or clk > since and clk < until then
        return null;
    end if;
    span := metered._period_at((whole::metered.charge_limit).period, clk);
    return case when span is not null then array[metered._in_us(span[1]) - 1, metered._in_us(span[2])] end;
end
$$;

-- A charge with at most one limit, as the full functions take it. whole is the limit itself, a
-- charge_limit, where it has thresholds or is by period.
create function metered._as_charges(of_scope text, key bigint, units bigint, max_units bigint, win interval,
    note jsonb, whole text) returns metered.new_charge[]
language sql stable
as $$
    select array[row(of_scope, key, units, 0, case when whole is not null then array[whole::metered.charge_limit]
            when max_units is not null then array[row(max_units, win, null, null, null, null)::metered.charge_limit] end,
        note, null, null, null)::metered.new_charge]
$$;

-- The answer of charge as JSON, with times in microseconds, and the period of _told_period.
create function metered._charged_json(answer metered.charged, told bigint[]) returns json
language sql stable
as $$
    select json_build_object('seqs', (answer).seqs,
        'ats', array(select metered._in_us(x) from unnest((answer).ats) x),
        'used', (answer).used, 'held', (answer).held, 'refused', (answer).refused, 'crossed', (answer).crossed,
        'periods', array(select metered._in_us(x) from unnest((answer).periods) x), 'told', told)
$$;

-- A charge of one scope without a command, as charge makes it: JSON, [seq, time in microseconds, held units, used
-- units], or charge's answer as an object. It has at most one limit: max_units in each win, or in its lifetime, if win is
-- 0, or in a period, if win is null. The columns that it leaves out are null in a usual scope.
--
-- To find a period is dear. The caller knows it from an answer of before (told): it goes from the microsecond after since
-- up to until, and the short way is taken between them alone.
--
-- Where the limit has thresholds or is by period, whole is the limit itself, which the full function is given. With
-- thresholds max_units is less than the lowest of them: the short way reaches none.
create function metered.charge_plain(of_scope text, key bigint, units bigint, max_units bigint, win interval,
    since timestamptz, until timestamptz, note jsonb, whole text, standing boolean, ahead interval, wait_ms int) returns json
language plpgsql volatile
as $$
declare
    of_tenant text;     -- of no command
    of_id   text;
    {short variables}
begin
    if metered._goes_short() and {short call}
        and (max_units is not null or metered._try_lock(key))       -- a mere sum waits for nobody
    then
        {short lock};
        {short charge: also = true};
        if e_seq is not null then
            return array_to_json(array[{short answer}]);
        end if;
    end if;
    return metered._charged_json(metered.charge(
        metered._as_charges(of_scope, key, units, max_units, win, note, whole), ahead, wait_ms, standing),
        metered._told_period(whole, since, until));
end
$$;

-- Claims the id of a command without a token and without charges to look at. Null: it is new, and
-- begun. Else begin_command's answer, whose arguments these are, or with raising an error, after which the
-- server skips the rest of the flush. Then the marker begins with a minus, and there is no guard.
create function metered.begin_command_plain(of_tenant text, of_id text, key bigint, issued timestamptz,
    max_future interval, timeout_ms int, marker text, wait_ms int, raising boolean) returns json
language plpgsql volatile
as $$
declare
    begun   text;
    claimed record;
begin
    if metered._goes_short() and coalesce(current_setting('metered_tx.command', true), '') = ''
        and current_setting('transaction_isolation') = 'read committed' and metered._try_lock(key)
    then
        -- A statement of its own, whose snapshot is taken after the lock.
        select case
            when {known id: tenant = of_tenant, id = of_id, issued = issued, future = max_future}
                or not metered._on_linux() then null
            else set_config('metered_tx.command', marker, true)
                || case when timeout_ms is null then ''
                    else set_config('client_connection_check_interval', '100', true) end
            end into begun;
        if begun is not null then
            if timeout_ms > 0 then
                begun := {shorter timeouts: ms = timeout_ms};
            end if;
            execute case when raising then '' else     -- then nobody gets at the transaction
                'declare metered_command cursor with hold for select metered.block_commit()' end;
            return null;
        end if;
    end if;
    claimed := metered.begin_command(true, true, row(of_tenant, of_id, key, issued, max_future, timeout_ms,
        marker, false, false, null, null)::metered.new_command, null, '{}', interval '0', wait_ms);
    if claimed.status = 'new' then
        return null;
    elsif raising then
        raise exception 'the operation id is known' using errcode = 'MT016';
    end if;
    return json_build_object('status', claimed.status, 'fingerprint', encode(claimed.fingerprint, 'base64'),
        'result', encode(claimed.result, 'base64'), 'scopes', claimed.scopes, 'amounts', claimed.amounts, 'seqs', claimed.seqs,
        'ats', array(select metered._in_us(x) from unnest(claimed.ats) x), 'holds', claimed.holds,
        'at', metered._in_us(claimed.at), 'refusal', claimed.refusal);
end
$$;

-- Ends a command by complete_command, whose answer it returns as JSON, with times in microseconds, and the
-- period of _told_period.
create function metered._completed_json(command metered.new_command, of_fingerprint bytea, of_result bytea,
    charges metered.new_charge[], ahead interval, wait_ms int, told bigint[]) returns json
language plpgsql volatile
as $$
declare
    whole record := metered.complete_command(command, of_fingerprint, of_result, null, charges, ahead, wait_ms, true);
begin
    return json_build_object('seqs', whole.seqs, 'ats', array(select metered._in_us(x) from unnest(whole.ats) x),
        'used', whole.used, 'held', whole.held, 'at', metered._in_us(whole.at), 'crossed', whole.crossed,
        'periods', array(select metered._in_us(x) from unnest(whole.periods) x), 'told', told);
end
$$;

-- Ends a command that has at most one charge of its own, as complete_command does with finishing: JSON,
-- the time of the record in microseconds and the array of charge_plain, or complete_command's answer as an object.
create function metered.complete_command_plain(of_tenant text, of_id text, marker text,
    of_fingerprint bytea, issued timestamptz, of_result bytea, name text, jobs bigint[], of_scope text,
    key bigint, units bigint, max_units bigint, win interval, since timestamptz, until timestamptz,
    note jsonb, whole text, standing boolean, ahead interval, wait_ms int) returns json
language plpgsql volatile
as $$
declare
    done_at bigint;
    {short variables}
    command_cursor refcursor := 'metered_command';  -- CLOSE by a variable is not parsed anew
begin
    if metered._goes_short() and current_setting('metered_tx.command', true) = marker
        and (of_scope is null or {short call} and (max_units is not null or metered._try_lock(key)
            -- A sum that was waited for has tallies from now on.
            and current_setting('metered_tx.waited', true) is distinct from 'true'))
    then
        if of_scope is not null then
            {short lock};
            {short charge: also = true};
        end if;
        if of_scope is null or e_seq is not null then
            insert into {short record: tenant = of_tenant, id = of_id, scopes = case when of_scope is not null then array[of_scope] end, amounts = case when of_scope is not null then array[units] end,
                seqs = case when of_scope is not null then array[e_seq] end, ats = case when of_scope is not null then array[e_at] end,
                holds = string_to_array(nullif(current_setting('metered_tx.holds', true), ''), chr(30)), jobs = jobs, also = true};
            if done_at is null then
                perform metered._recorded_meanwhile();
            end if;
            if left(set_config('metered_tx.command', '', true) || set_config('metered_tx.holds', '', true)
                || marker, 1) <> '-'
            then
                close command_cursor;
            end if;
            return array_to_json(case when of_scope is null then array[done_at] else array[done_at, {short answer}] end);
        end if;
    end if;
    return metered._completed_json(row(of_tenant, of_id, null, issued, null, null, marker, standing, false,
        name, jobs)::metered.new_command, of_fingerprint, of_result,
        case when of_scope is null then '{}'
            else metered._as_charges(of_scope, key, units, max_units, win, note, whole) end, ahead, wait_ms,
        metered._told_period(whole, since, until));
end
$$;

-- A whole command that does nothing but its one charge: the answer of begin_command_plain, if that is
-- not null, or else that of complete_command_plain. The short way needs no guard against a COMMIT,
-- since nobody gets at the transaction before it is complete.
create function metered.run_command_plain(of_tenant text, of_id text, id_key bigint,
    of_fingerprint bytea, issued timestamptz, max_future interval, of_result bytea, name text,
    of_scope text, key bigint, units bigint, max_units bigint, win interval, since timestamptz,
    until timestamptz, note jsonb, whole text, standing boolean, ahead interval, wait_ms int) returns json
language plpgsql volatile
as $$
declare
    done_at  bigint;
    answer   json;
    known    boolean;   -- the id, before a wait
    {short variables}
begin
    -- The statements see what was committed before the locks were free: each has a snapshot of its own.
    if metered._goes_short() and coalesce(current_setting('metered_tx.command', true), '') = ''
        and current_setting('transaction_isolation') = 'read committed' and metered._try_lock(id_key)
        and (of_scope is null or {short call} and (max_units is not null or metered._try_lock(key)))
    then
        if of_scope is null then
            insert into {short record: tenant = of_tenant, id = of_id, scopes = null, amounts = null, seqs = null, ats = null, holds = null, jobs = null,
                also = ({known id: tenant = of_tenant, id = of_id, issued = issued, future = max_future}) is not true};
            if done_at is not null then
                return json_build_array(done_at);
            end if;
        else
            {counted lock};
            {short charge: also = (known or {known id: tenant = of_tenant, id = of_id, issued = issued,
                future = max_future}) is not true};
            if e_seq is not null then
                insert into {short record: tenant = of_tenant, id = of_id, scopes = array[of_scope], amounts = array[units], seqs = array[e_seq], ats = array[e_at],
                    holds = null, jobs = null, also = true};
                if done_at is null then
                    perform metered._recorded_meanwhile();
                end if;
                return array_to_json(array[done_at, {short answer}]);
            end if;
        end if;
    end if;
    answer := metered.begin_command_plain(of_tenant, of_id, id_key, issued, max_future, null, 'whole', wait_ms, false);
    return coalesce(answer, metered.complete_command_plain(of_tenant, of_id, 'whole', of_fingerprint, issued,
        of_result, name, null, of_scope, key, units, max_units, win, since, until, note, whole, standing, ahead,
        wait_ms));
end
$$;

-- A whole command that does nothing but its charges, of any kind, as run_command_plain does it, by the
-- full functions.
create function metered.run_command(command metered.new_command, of_fingerprint bytea, of_result bytea,
    charges metered.new_charge[], ahead interval, wait_ms int) returns json
language plpgsql volatile
as $$
declare
    answer json;
begin
    answer := metered.begin_command_plain(command.tenant, command.id, command.key, command.issued_at,
        command.max_future, command.timeout_ms, command.marker, wait_ms, false);
    return coalesce(answer, metered._completed_json(command, of_fingerprint, of_result, charges, ahead, wait_ms, null));
end
$$;
