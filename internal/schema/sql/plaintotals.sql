-- The short way (see plain.sql) of two charges: one with a limit, such as a user's own, and one
-- without, such as the total of a channel that all users share, if that is a tally (tallies.sql). As
-- there, these functions decide nothing but the usual case, and otherwise write nothing and go on
-- with the full function.

-- Both charges, as the full functions take them, in the order of their caller.
create function metered._with_total(of_scope text, key bigint, units bigint, max_units bigint,
    win interval, note jsonb, whole text, total_scope text, total_key bigint, total_units bigint,
    total_note jsonb, total_first boolean)
returns metered.new_charge[]
language sql stable
as $$
    select case when total_first
        then metered._as_charges(total_scope, total_key, total_units, null, null, total_note, null)
            || metered._as_charges(of_scope, key, units, max_units, win, note, whole)
        else metered._as_charges(of_scope, key, units, max_units, win, note, whole)
            || metered._as_charges(total_scope, total_key, total_units, null, null, total_note, null) end
$$;

-- Two charges without a command, as charge makes them: JSON, the array of charge_plain and the seq
-- of the tally, which is less than 0 and has its time, or charge's answer as an object.
create function metered.charge_total(of_scope text, key bigint, units bigint, max_units bigint,
    win interval, since timestamptz, until timestamptz, note jsonb, whole text, standing boolean,
    total_scope text, total_key bigint,
    total_units bigint, total_note jsonb, total_first boolean, ahead interval, wait_ms int) returns json
language plpgsql volatile
as $$
declare
    of_tenant text;     -- of no command
    of_id   text;
    {pair variables}
begin
    if metered._goes_short() then
        {short pair: lock = {short lock}, also = true};
        if e_seq is not null then
            return array_to_json(array[{pair answer}]);
        end if;
    end if;
    return metered._charged_json(metered.charge(metered._with_total(of_scope, key, units, max_units,
        win, note, whole, total_scope, total_key, total_units, total_note, total_first), ahead, wait_ms,
        standing), metered._told_period(whole, since, until));
end
$$;

-- Ends a command that has two such charges, as complete_command_plain ends one with one: JSON, the
-- time of the record in microseconds and the array of charge_total, or complete_command's answer as
-- an object.
create function metered.complete_command_total(of_tenant text, of_id text, marker text,
    of_fingerprint bytea, issued timestamptz, of_result bytea, name text, jobs bigint[],
    of_scope text, key bigint, units bigint, max_units bigint, win interval, since timestamptz,
    until timestamptz, note jsonb, whole text, standing boolean,
    total_scope text, total_key bigint, total_units bigint, total_note jsonb, total_first boolean,
    ahead interval, wait_ms int) returns json
language plpgsql volatile
as $$
declare
    done_at bigint;
    {pair variables}
    command_cursor refcursor := 'metered_command';  -- CLOSE by a variable is not parsed anew
begin
    if metered._goes_short() and current_setting('metered_tx.command', true) = marker then
        {short pair: lock = {short lock}, also = true};
        if e_seq is not null then
            insert into {pair record: jobs = jobs,
                holds = string_to_array(nullif(current_setting('metered_tx.holds', true), ''), chr(30))};
            if done_at is null then
                perform metered._recorded_meanwhile();
            end if;
            if left(set_config('metered_tx.command', '', true) || set_config('metered_tx.holds', '', true)
                || marker, 1) <> '-'
            then
                close command_cursor;
            end if;
            return array_to_json(array[done_at, {pair answer}]);
        end if;
    end if;
    return metered._completed_json(row(of_tenant, of_id, null, issued, null, null, marker, standing,
        false, name, jobs)::metered.new_command, of_fingerprint, of_result, metered._with_total(of_scope,
        key, units, max_units, win, note, whole, total_scope, total_key, total_units, total_note, total_first),
        ahead, wait_ms, metered._told_period(whole, since, until));
end
$$;

-- A whole command that does nothing but two such charges, as run_command_plain does it.
create function metered.run_command_total(of_tenant text, of_id text, id_key bigint,
    of_fingerprint bytea, issued timestamptz, max_future interval, of_result bytea, name text,
    of_scope text, key bigint, units bigint, max_units bigint, win interval, since timestamptz,
    until timestamptz, note jsonb, whole text, standing boolean, total_scope text, total_key bigint, total_units bigint, total_note jsonb, total_first boolean,
    ahead interval, wait_ms int) returns json
language plpgsql volatile
as $$
declare
    done_at  bigint;
    answer   json;
    known    boolean;   -- the id, before a wait
    {pair variables}
begin
    if metered._goes_short() and coalesce(current_setting('metered_tx.command', true), '') = ''
        and metered._try_lock(id_key)
    then
        {short pair: lock = {counted lock}, also = (known or {known id: tenant = of_tenant,
            id = of_id, issued = issued, future = max_future}) is not true};
        if e_seq is not null then
            insert into {pair record: holds = null, jobs = null};
            if done_at is null then
                perform metered._recorded_meanwhile();
            end if;
            return array_to_json(array[done_at, {pair answer}]);
        end if;
    end if;
    answer := metered.begin_command_plain(of_tenant, of_id, id_key, issued, max_future, null, 'whole',
        wait_ms, false);
    return coalesce(answer, metered.complete_command_total(of_tenant, of_id, 'whole', of_fingerprint,
        issued, of_result, name, null, of_scope, key, units, max_units, win, since, until, note, whole, standing,
        total_scope, total_key, total_units, total_note, total_first, ahead, wait_ms));
end
$$;
