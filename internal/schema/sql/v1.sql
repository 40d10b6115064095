-- SQL for programs in other languages: the functions v1_*. Their names, arguments and answers are a
-- contract, which no later version of the schema breaks: another one gets names of its own. They take
-- scalars and jsonb, derive the keys of locks, and answer by an object: {"ok": true, ...}, or
-- {"ok": false, "code": ..., "status": ...} for a refusal, which wrote nothing, with the codes and the
-- statuses of HTTP that the Go library has. A wrong argument raises SQLSTATE 22023. They wait for a
-- lock for 5 seconds at most, and for a clock that runs ahead they have the library's default.

-- A refusal as an answer.
create function metered._v1_no(code text, status int) returns jsonb
language sql immutable
as $$
    select jsonb_build_object('ok', false, 'code', code, 'status', status)
$$;

-- The limit of a call that has one over a window or of prepaid credit, or none, for the short way
-- (plain.sql): its window, 0 for ever. Null: another limit, or a wrong one. Both are inlined.
create function metered._v1_window(limits jsonb) returns interval
language sql stable
as $$
    select case when limits = '[]' or limits = '[{"prepaid": true}]' then interval '0'
        when jsonb_typeof(limits) = 'array' and jsonb_array_length(limits) = 1
            and limits -> 0 ?& '{max,window}'::text[]
            and (limits -> 0) - '{name,max,window}'::text[] = '{}'
        then nullif(extract(epoch from (limits -> 0 ->> 'window')::interval) * interval '1 second',
            interval '0') end
$$;

create function metered._v1_most(limits jsonb) returns bigint
language sql immutable
as $$
    select case when limits <> '[]' then coalesce((limits -> 0 ->> 'max')::bigint, 0) end
$$;

-- A limit as the functions below take it. Of window, period, lifetime and prepaid it has one.
create function metered._v1_limit(given jsonb) returns metered.charge_limit
language plpgsql stable
as $$
declare
    zone  text := given ->> 'time_zone';
    most  bigint := coalesce((given ->> 'max')::bigint,
        case when given @> '{"prepaid": true}' then 0 end);
    win   interval := case
        when given ? 'window'
            then extract(epoch from (given ->> 'window')::interval) * interval '1 second'
        when not given ? 'period' then interval '0' end;
    every interval;
begin
    if (given - '{name,max,window}'::text[] = '{}' and most >= 0
        and win > interval '0' and win <= interval '3660 days') is not true
    then
        every := case when given ->> 'period' in ('day', 'week', 'month', 'year') then '1 ' else '' end
            || (given ->> 'period');
        if (jsonb_typeof(given) = 'object' and most >= 0 and not given ? 'window'
            and given - '{name,max,period,time_zone,anchor,lifetime,prepaid}'::text[] = '{}'
            and (given ? 'period')::int + (given @> '{"lifetime": true}')::int
                + (given @> '{"prepaid": true}')::int = 1
            and (given ? 'period' or given - '{name,max,lifetime,prepaid}'::text[] = '{}')
            and (given ->> 'lifetime' = 'false' or given ->> 'prepaid' = 'false') is not true
            and coalesce(octet_length(zone) <= 64 and zone
                ~ '^(UTC|Etc/GMT[+-][0-9]{1,2}|[A-Z][A-Za-z]+(/[A-Z][A-Za-z_-]*)+)$',
                not given ? 'time_zone')) is not true
        then
            perform metered._require(false, 'limits');
        elsif given ? 'period' then
            return row(most, null, row(every, (given ->> 'anchor')::timestamptz, zone)::metered.period,
                null, null, null)::metered.charge_limit;
        end if;
    end if;
    return row(most, win, null, null, null, null)::metered.charge_limit;
end
$$;

-- The charge of a scope as the functions below take it.
create function metered._v1_charge(of_scope text, amount bigint, held bigint, limits jsonb,
    note jsonb, must_exist boolean) returns metered.new_charge[]
language plpgsql stable
as $$
declare
    asked metered.charge_limit[] := '{}';
begin
    if (jsonb_typeof(limits) = 'array' and jsonb_array_length(limits) <= 16
        and coalesce(jsonb_typeof(note) = 'object', true)) is not true
    then
        perform metered._require(false, 'limits');
    end if;
    for nth in 0..jsonb_array_length(limits) - 1 loop
        asked[nth + 1] := metered._v1_limit(limits -> nth);
    end loop;
    return array[row(of_scope, metered._scope_key(of_scope), amount, held, asked, note, must_exist,
        null, null)::metered.new_charge];
end
$$;

-- The limits as they stand, with units that were let in.
create function metered._v1_standings(limits jsonb, used bigint[], held bigint, more bigint)
    returns jsonb
language plpgsql immutable
as $$
declare
    stand jsonb := '[]';
    spent bigint;
begin
    for nth in 0..jsonb_array_length(limits) - 1 loop
        spent := used[nth + 1] + more;
        stand := stand || ((limits -> nth) || jsonb_build_object('used', spent, 'held', held,
            'available', greatest(0, coalesce((limits -> nth ->> 'max')::numeric, 0) - spent - held)));
    end loop;
    return stand;
end
$$;

-- The refusal of charges of a scope. retry_after has whole seconds, and is missing if waiting alone
-- does not help.
create function metered._v1_refused(refused jsonb, limits jsonb) returns jsonb
language plpgsql immutable
as $$
declare
    absent text := refused -> 0 ->> 'absent';
    whole  record;
begin
    if absent is not null then
        return metered._v1_no('scope_' || absent, case absent when 'unknown' then 404 else 410 end);
    end if;
    select bool_or(one.asked ? 'prepaid') as credit,
        bool_or(one.asked ?| '{lifetime,prepaid}') as lasting,
        case when min(one.us) >= 0 then greatest(1, ceil(max(one.us) / 1000000)) end as seconds,
        jsonb_agg(one.asked || jsonb_build_object('used', one.used, 'held', one.held, 'available',
            greatest(0, coalesce((one.asked ->> 'max')::numeric, 0) - one.used - one.held))) as limits
    into whole
    from (select limits -> (each ->> 'limit')::int as asked, (each ->> 'retry_us')::numeric as us,
            (each ->> 'used')::numeric as used, (each ->> 'held')::bigint
                + (each ->> 'own')::bigint + (each ->> 'leased')::bigint as held
        from jsonb_array_elements(refused) each) one;
    return metered._v1_no('budget_exceeded',
            case when whole.credit then 402 when whole.lasting then 409 else 429 end)
        || jsonb_build_object('limits', whole.limits)
        || case when whole.seconds is null or whole.credit then '{}'
            else jsonb_build_object('retry_after', whole.seconds) end;
end
$$;

-- Charges units of a scope if all limits let them in: seq, the entry, and the limits as they stand.
create function metered.v1_charge(scope text, amount bigint, limits jsonb default '[]',
    note jsonb default null, must_exist boolean default false) returns jsonb
language plpgsql volatile
as $$
declare
    posted    metered.charged;
    win       interval;
    max_units bigint;
    key       bigint;
    of_scope  alias for scope;  -- the names of the short way
    units     alias for amount;
    standing  boolean := true;
    wait_ms   int := 5000;
    of_tenant text;
    of_id     text;
    {short variables}
begin
    win := metered._v1_window(limits);
    if metered._goes_short() and win >= interval '0' and win <= interval '3660 days'
        and must_exist is not true and coalesce(jsonb_typeof(note) = 'object', true)
    then
        max_units := metered._v1_most(limits);
        key := metered._scope_key(scope);
        {short lock};
        {short charge: also = true};
        if e_seq is not null then
            return jsonb_build_object('ok', true, 'seq', e_seq, 'at', e_at, 'limits',
                case when max_units is null then '[]'::jsonb else jsonb_build_array((limits -> 0)
                    || jsonb_build_object('used', e_used + units, 'held', e_held,
                        'available', max_units - e_used - units - e_held)) end);
        end if;
    end if;
    posted := metered._write_charges(metered._v1_charge(scope, amount, 0, limits, note, must_exist),
        interval '1 minute', 5000, null, 'answer', null, true);
    return case when posted.refused is not null then metered._v1_refused(posted.refused, limits)
        else jsonb_build_object('ok', true, 'seq', posted.seqs[1], 'at', posted.ats[1],
            'limits', metered._v1_standings(limits, posted.used, posted.held[1], amount)) end;
end
$$;

-- The answer of v1_charge at this moment, without a lock and without writing.
create function metered.v1_check(scope text, amount bigint, limits jsonb default '[]',
    note jsonb default null, must_exist boolean default false) returns jsonb
language plpgsql stable
as $$
declare
    looked record;
begin
    looked := metered.check_charge(
        metered._v1_charge(scope, amount, 0, limits, note, must_exist), interval '1 minute');
    return case when looked.refused is not null then metered._v1_refused(looked.refused, limits)
        else jsonb_build_object('ok', true,
            'limits', metered._v1_standings(limits, looked.used, looked.held[1], 0)) end;
end
$$;

-- Gives a scope credit, which limits for its lifetime and prepaid ones count.
create function metered.v1_credit(scope text, amount bigint, note jsonb default null,
    must_exist boolean default false) returns jsonb
language plpgsql volatile
as $$
declare
    given record;
begin
    if coalesce(jsonb_typeof(note) <> 'object', false) then
        perform metered._require(false, 'note');
    end if;
    given := metered.credit(scope, metered._scope_key(scope), amount, must_exist, 5000,
        row(null, null, note)::metered.origin, false);
    return case when given.refused is not null then metered._v1_refused(given.refused, '[]')
        else jsonb_build_object('ok', true, 'seq', given.seq, 'at', given.at) end;
end
$$;

-- Gives back units of a charge, by its entry, or all that is left of it. remaining are those that can
-- still be given back.
create function metered.v1_refund(scope text, seq bigint, amount bigint default null,
    note jsonb default null) returns jsonb
language plpgsql volatile
as $$
declare
    given record;
begin
    if coalesce(jsonb_typeof(note) <> 'object', false) then
        perform metered._require(false, 'note');
    end if;
    given := metered.refund(scope, metered._scope_key(scope), seq, amount, 5000,
        row(null, null, note)::metered.origin, false);
    return case given.status
        when 'ok' then jsonb_build_object('ok', true, 'seq', given.seq, 'at', given.at, 'amount', given.amount)
        when 'missing' then metered._v1_no('budget_unknown_entry', 404)
        when 'purged' then metered._v1_no('budget_entry_purged', 409)
        when 'kind' then metered._v1_no('budget_not_charge', 409)
        else metered._v1_no('budget_refund_exceeds', 409) end
        || case when given.remaining is null then '{}'
            else jsonb_build_object('remaining', given.remaining) end;
end
$$;

-- The units that count for each limit now, or for the lifetime without limits, and the scope's totals.
create function metered.v1_usage(scope text, limits jsonb default '[]') returns jsonb
language plpgsql stable
as $$
declare
    asked metered.charge_limit;
    found_use record;
    stand jsonb := '[]';
begin
    if (jsonb_typeof(limits) = 'array' and jsonb_array_length(limits) <= 16) is not true then
        perform metered._require(false, 'limits');
    end if;
    for nth in 0..greatest(1, jsonb_array_length(limits)) - 1 loop
        asked := metered._v1_limit(coalesce(limits -> nth, '{"max": 0, "lifetime": true}'));
        select one.used, one.held + one.leased as held, one.spent, one.refunded, one.credited
        into found_use
        from metered.usage(array[scope], array[asked.win], array[asked.period], true) one;
        stand := stand || metered._v1_standings(jsonb_build_array(coalesce(limits -> nth, '{}')),
            array[found_use.used], found_use.held, 0);
    end loop;
    return jsonb_build_object('ok', true, 'spent', found_use.spent, 'refunded', found_use.refunded,
            'credited', found_use.credited, 'held', found_use.held,
            'used', found_use.spent - found_use.refunded - found_use.credited)
        || case when limits = '[]' then '{}' else jsonb_build_object('limits', stand) end;
end
$$;

-- The units of a wallet that can be drawn, those that are held, and its lots, in the order in which
-- they are drawn.
create function metered.v1_balance(scope text) returns jsonb
language plpgsql stable
as $$
declare
    now_in record;
begin
    now_in := metered.wallet_balance(scope);
    return jsonb_build_object('ok', true, 'units', now_in.units, 'held', now_in.held,
        'lots', coalesce(now_in.lots, '[]'));
end
$$;
