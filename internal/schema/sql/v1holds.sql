-- The functions of v1.sql about holds, tokens, ids and jobs that wait.

-- The time that an id carries, if it is a UUID of version 7 with hyphens. A regular expression would
-- cost as much as the row of a hold.
create function metered._v1_issued(id text) returns timestamptz
language sql stable
as $$
    select case when translate(id, '123456789abcdefABCDEF', '000000000000000000000')
            = '00000000-0000-0000-0000-000000000000'
            and substr(id, 15, 1) = '7' and strpos('89abAB', substr(id, 20, 1)) > 0
        then timestamptz 'epoch' + ('x' || left(replace(id, '-', ''), 12))::bit(48)::bigint * interval '1 millisecond' end
$$;

-- The fingerprint of what an id was used for.
create function metered._v1_print(content text) returns bytea
language sql stable
as $$
    select decode('56', 'hex') || sha256(convert_to(content, 'UTF8'))
$$;

-- A hold as an answer.
create function metered._v1_hold(hold json) returns jsonb
language sql stable
as $$
    select jsonb_build_object('deadline', hold -> 'deadline', 'lines', (hold ->> 'lines')::jsonb,
        'state', case when (hold ->> 'returned')::boolean then 'returned' else case hold ->> 'state'
            when 'h' then 'held' when 'c' then 'captured' when 'r' then 'released'
            else 'expired' end end)
$$;

-- The refusal of a transition of a hold.
create function metered._v1_hold_no(refused json) returns jsonb
language sql stable
as $$
    select case refused ->> 'status'
        when 'retired' then metered._v1_no('hold_retired', 409)
        when 'excess' then metered._v1_no('hold_excess', 409)
            || jsonb_build_object('available', (refused ->> 'open')::bigint)
        when 'state' then metered._v1_no('hold_' || (metered._v1_hold(refused -> 'hold') ->> 'state'), 409)
            || jsonb_build_object('hold', metered._v1_hold(refused -> 'hold'))
        when 'unconfirmed' then metered._v1_no('invalid_argument', 400)
        when 'line' then metered._v1_no('invalid_argument', 400)
        else metered._v1_no('hold_unknown', 404) end
$$;

-- Holds units of a scope for so long, if all limits let them in. The id names the hold within its
-- tenant: the same call again answers with the hold as it stands, and new is false.
create function metered.v1_hold(tenant text, id text, scope text, amount bigint, ttl interval,
    limits jsonb default '[]', note jsonb default null, metadata jsonb default null) returns jsonb
language plpgsql volatile
as $$
declare
    print  bytea;
    {v1 limit variables}
    answer json;    -- of place_plain
    placed record;
begin
    {refuse: when = tenant is null, what = hold};
    print := metered._v1_print(json_build_array(scope, amount, extract(epoch from ttl), limits, metadata)::text);
    {v1 limit};
    if standing then
        answer := metered.place_plain(tenant, id, metered._lock_key('metered/hold/metered',
                convert_to(tenant, 'UTF8') || decode('00', 'hex') || convert_to(id, 'UTF8')),
            tenant, print, metered._v1_issued(id), ttl, interval '0', null, metadata::json, scope,
            metered._scope_key(scope), amount, max_units, win, null, null, note, null, null, null,
            interval '1 minute', 5000, null, false);
    else
        placed := metered.place(row(tenant, id, true, null, tenant, null, print,
                metered._v1_issued(id), ttl, interval '0', null, metadata::json, null)::metered.new_hold,
            metered._v1_charge(scope, amount, amount, limits, note, false), interval '1 minute', 5000,
            row(null, null, note)::metered.origin, null, false);
        answer := metered._placed_json(placed.status, placed.placed_at, placed.deadline,
            placed.refused, placed.stored, null, null);
    end if;
    if json_typeof(answer) = 'array' then
        return format('{"ok": true, "new": true, "state": "held", "deadline": %s}', to_json(
            timestamptz 'epoch' + (answer ->> 1)::bigint * interval '1 microsecond' + ttl))::jsonb;
    end if;
    return case answer ->> 'status'
        when 'placed' then jsonb_build_object('ok', true, 'new', true, 'state', 'held', 'deadline',
            timestamptz 'epoch' + (answer ->> 'deadline')::bigint * interval '1 microsecond')
        when 'same' then jsonb_build_object('ok', true, 'new', false)
            || metered._v1_hold((answer ->> 'stored')::json)
        when 'refused' then metered._v1_refused((answer ->> 'refused')::jsonb, limits)
        else metered._v1_no('hold_' || (answer ->> 'status'), 409) end;
end
$$;

-- Spends so many units of a hold of one line, or all units of a hold without an amount, and ends it.
-- The rest is free.
create function metered.v1_capture(tenant text, id text, amount bigint default null,
    note jsonb default null) returns jsonb
language plpgsql volatile
as $$
declare
    line   text;
    answer json;
begin
    if amount is not null then
        select min(x.scope) into line from metered.holds h,
            lateral (select y.scope from metered.hold_lines y where y.hold = h.no) x
        where h.tenant = v1_capture.tenant and h.id = v1_capture.id having count(*) <= 1;
        {refuse: when = not (found and amount > 0), what = amount};
        line := coalesce(line, '-');    -- of no hold
    end if;
    answer := metered.capture_holds_plain(tenant, id, metered._v1_issued(id), '', line, amount, null,
        note, null, null, 5000, null, false);
    return case
        when json_typeof(answer) = 'object' then '{"ok": true}' || metered._v1_hold(answer)
        when json_typeof(answer -> 0) = 'string' then metered._v1_hold_no((answer ->> 0)::json)
        else '{"ok": true}' || metered._v1_hold((answer -> 1 ->> 0)::json) end;
end
$$;

-- Ends a hold, and frees its units.
create function metered.v1_release(tenant text, id text, note jsonb default null) returns jsonb
language plpgsql volatile
as $$
declare
    ended record;
begin
    ended := metered.release_holds(row(tenant, array[id],
            array[coalesce(metered._v1_issued(id), 'infinity')], '')::metered.hold_ids,
        5000, row(null, null, note)::metered.origin, null, false);
    return case when ended.refused is not null then metered._v1_hold_no(ended.refused)
        else '{"ok": true}' || metered._v1_hold(ended.holds[1]) end;
end
$$;

-- Takes one use of a token, by its text.
create function metered.v1_consume(token text, purpose text, subject text) returns jsonb
language plpgsql volatile
as $$
declare
    taken record;
begin
    taken := metered.consume_token(sha256(convert_to(token, 'UTF8')), purpose, subject, 5000);
    return case when taken.status = 'ok'
        then jsonb_build_object('ok', true, 'payload', taken.payload, 'uses_left', taken.uses_left)
        else metered._v1_no('token_invalid', 403) end;
end
$$;

-- Claims an id for this transaction, which v1_answer must end, else COMMIT fails. If the id was
-- answered before, new is false, and answer is that one. The content is what the id is used for:
-- another one is a conflict.
create function metered.v1_claim(tenant text, id text, content jsonb default null) returns jsonb
language plpgsql volatile
as $$
declare
    print  bytea;
    unused text;
    before json;
begin
    print := metered._v1_print(coalesce(content, 'null')::text);
    {refuse: when = (tenant is not null and id <> '') is not true, what = id};
    before := metered.begin_command_plain(tenant, id, metered._lock_key('metered/operation/metered',
            int8send(octet_length(tenant)) || convert_to(tenant, 'UTF8')
            || int8send(octet_length(id)) || convert_to(id, 'UTF8')),
        metered._v1_issued(id), interval '5 minutes', null, 'v1', 5000, false);
    if before is null then
        unused := set_config('metered_tx.v1',
            jsonb_build_array(tenant, id, encode(print, 'hex'))::text, true);
        return '{"ok": true, "new": true}';
    end if;
    return case
        when before ->> 'status' <> 'replay' then metered._v1_no('operation_' || (before ->> 'status'),
            case before ->> 'status' when 'future' then 400 else 409 end)
        when decode(before ->> 'fingerprint', 'base64') <> print
            then metered._v1_no('operation_conflict', 422)
        else jsonb_build_object('ok', true, 'new', false, 'answer',
            convert_from(decode(before ->> 'result', 'base64'), 'UTF8')::jsonb) end;
end
$$;

-- Records the answer of the id that this transaction has claimed, and lets COMMIT pass.
create function metered.v1_answer(answer jsonb) returns jsonb
language plpgsql volatile
as $$
declare
    of     jsonb;
    unused text;
begin
    of := nullif(current_setting('metered_tx.v1', true), '')::jsonb;
    {refuse: when = (current_setting('metered_tx.command', true) = 'v1' and answer is not null) is not true, what = answer};
    unused := metered.complete_command_plain(of_tenant => of ->> 0, of_id => of ->> 1,
        marker => 'v1', of_fingerprint => decode(of ->> 2, 'hex'),
        issued => metered._v1_issued(of ->> 1), of_result => convert_to(answer::text, 'UTF8'),
        name => null, jobs => null, of_scope => null, key => null, units => null,
        max_units => null, win => null, since => null, until => null, note => null, whole => null, standing => false,
        ahead => interval '1 minute', wait_ms => 5000);
    unused := set_config('metered_tx.v1', '', true);
    return '{"ok": true}';
end
$$;

-- Holds units of a scope for a job of River's until it ends. status is started, and the caller
-- inserts job into river_job, or parked until the units fit. job_id is of River's sequence.
create function metered.v1_enqueue(job_id bigint, kind text, args jsonb, tenant text, scope text,
    amount bigint, limits jsonb default '[]', queue text default 'default', most int default null)
    returns jsonb
language plpgsql volatile
as $$
declare
    member text := concat('job/', job_id, '/', left(replace(gen_random_uuid()::text, '-', ''), 16));
    parked record;
begin
    select * into parked from metered.park_jobs(jsonb_build_array(jsonb_strip_nulls(jsonb_build_object(
            'job_id', job_id, 'kind', kind, 'queue', queue, 'priority', 1, 'max_attempts', 25,
            'tags', '[]'::jsonb, 'fair', tenant, 'most', most,
            'metadata', jsonb_build_object('metered:tenant', tenant, 'metered:hold', member),
            'hold', row(tenant, 'job', false, null, 'job', null, metered._v1_print('null'), null,
                interval '3650 days', interval '0', null, null, null)::metered.new_hold::text,
            'charges', metered._v1_charge(scope, amount, amount, limits, null, false)::text))
        || jsonb_build_object('args', args)), interval '1 minute', 5000, null, null, false);
    return case parked.status
        when 'refused' then metered._v1_refused(parked.refused, limits)
        when 'full' then metered._v1_no('jobs_full', 429)
        else jsonb_build_object('ok', true, 'status', parked.status,
            'job', parked.job - '{hold,charges,fair,most}'::text[]) end;
end
$$;
