-- SQL for programs in other languages: the functions v1_*. Their names, arguments and answers are a
-- contract, which no later version of the schema breaks: another one gets names of its own. They take
-- scalars and jsonb, derive the keys of locks, and answer by an object: {"ok": true, ...}, or
-- {"ok": false, "code": ..., "status": ...} for a refusal, which wrote nothing, with the codes and the
-- statuses of HTTP that the Go library has. A wrong argument raises SQLSTATE 22023. They wait for a
-- lock for 5 seconds at most, and for a clock that runs ahead they have the library's default.
--
-- Each expression costs as much as it has operators, once in each transaction. So a call on the short
-- way (plain.sql) has few, and what is seldom needed stands in a statement of its own.

-- A refusal as an answer.
create function metered._v1_no(code text, status int) returns jsonb
language sql stable
as $$
    select jsonb_build_object('ok', false, 'code', code, 'status', status)
$$;

-- A limit as the functions below take it. Of window, period, lifetime and prepaid it has one.
create function metered._v1_limit(given jsonb) returns metered.charge_limit
language plpgsql stable
as $$
declare
    lim  metered.charge_limit;
    fits boolean;
begin
    lim.max := given ->> 'max';
    if (given @> '{}') is not true then     -- it is no object
        fits := false;
    elsif given - '{name,max,window}'::text[] = '{}' then
        lim.win := {v1 window: of = given};
        fits := lim.win > interval '0' and lim.win <= interval '3660 days';
    elsif given - '{name,max,period,time_zone,anchor}'::text[] = '{}' then
        lim.period := row(case when given ->> 'period' in ('day', 'week', 'month', 'year') then '1 ' else '' end
            || (given ->> 'period'), given ->> 'anchor', given ->> 'time_zone');
        fits := given ? 'period' and (not given ? 'time_zone' or octet_length(given ->> 'time_zone') <= 64
            and given ->> 'time_zone' ~ '^(UTC|Etc/GMT[+-][0-9]{1,2}|[A-Z][A-Za-z]+(/[A-Z][A-Za-z_-]*)+)$');
    else
        lim.max := coalesce(lim.max, case when given ? 'prepaid' then 0 end);
        lim.win := interval '0';
        fits := given - '{name,max}'::text[] in ('{"lifetime": true}', '{"prepaid": true}');
    end if;
    if (lim.max >= 0 and fits) is not true then
        raise exception 'out of bounds: limits' using errcode = '22023', detail = left(coalesce(given::text, 'null'), 200),
            hint = 'A limit has max, a name or none, and one of window, period, lifetime and prepaid.';
    end if;
    return lim;
end
$$;

-- The charge of a scope as the functions below take it. Without limits it may be a tally. Null is a
-- wrong limit.
create function metered._v1_charge(of_scope text, amount bigint, held bigint, limits jsonb,
    note jsonb, must_exist boolean) returns metered.new_charge[]
language plpgsql stable
as $$
declare
    asked metered.charge_limit[];
begin
    for nth in 0..jsonb_array_length(coalesce(limits, '[null]')) - 1 loop
        asked := asked || metered._v1_limit(limits -> nth);
    end loop;
    return array[row(of_scope, metered._scope_key(of_scope), amount, held, asked,
        note, must_exist, null, null)::metered.new_charge];
end
$$;

-- A limit as it stands: the text of an object, since members of jsonb are dear to add.
create function metered._v1_stand(given jsonb, most numeric, used numeric, held bigint) returns text
language sql stable
as $$
    select left(given::text, -1) || format(', "used": %s, "held": %s, "available": %s}', used, held,
        greatest(0, coalesce(most, 0) - used - held))
$$;

-- Charges that were let in, as an answer: the limits as they stand, with more units.
create function metered._v1_let(answer text, limits jsonb, used bigint[], held bigint, more bigint)
    returns jsonb
language plpgsql stable
as $$
declare
    given jsonb;
    stand text;
begin
    for nth in 1..jsonb_array_length(limits) loop
        given := limits -> nth - 1;
        stand := concat(stand || ', ', metered._v1_stand(given, (given ->> 'max')::numeric, used[nth] + more, held));
    end loop;
    return format('{"ok": true, %s"limits": [%s]}', answer, stand)::jsonb;
end
$$;

-- The refusal of charges of a scope. retry_after has whole seconds, and is missing if waiting alone
-- does not help.
create function metered._v1_refused(refused jsonb, limits jsonb) returns jsonb
language sql stable
as $$
    select case refused -> 0 ->> 'absent' when 'unknown' then metered._v1_no('scope_unknown', 404)
        when 'retired' then metered._v1_no('scope_retired', 410)
        else metered._v1_no('budget_exceeded', case when bool_or(y.asked ? 'prepaid') then 402
                when bool_or(y.asked ? 'lifetime') then 409 else 429 end)
            || jsonb_build_object('limits', jsonb_agg(metered._v1_stand(
                y.asked, (y.asked ->> 'max')::numeric, y.used, y.held)::jsonb))
            || case when min(y.us) >= 0 and not bool_or(y.asked ? 'prepaid') then jsonb_build_object(
                'retry_after', greatest(1, ceil(max(y.us) / 1000000))) else '{}' end end
    from (select limits -> (x ->> 'limit')::int as asked, (x ->> 'retry_us')::numeric as us,
            (x ->> 'used')::numeric as used, (x ->> 'held')::bigint + (x ->> 'own')::bigint
                + (x ->> 'leased')::bigint as held
        from jsonb_array_elements(refused) x) y
$$;

-- Charges units of a scope if all limits let them in: seq, the entry, and the limits as they stand.
create function metered.v1_charge(scope text, amount bigint, limits jsonb default '[]',
    note jsonb default null, must_exist boolean default false) returns jsonb
language plpgsql volatile
as $$
declare
    {v1 limit variables}
    since     timestamptz;      -- of no period
    until     timestamptz;
    key       bigint;
    of_scope  alias for scope;  -- the names of the short way
    units     alias for amount;
    wait_ms   int := 5000;
    of_tenant text;
    of_id     text;
    {short variables}
    posted    metered.charged;  -- where anything is unusual
begin
    {v1 limit};
    key := metered._scope_key(scope);
    if standing and metered._goes_short() and must_exist is not true
        and current_setting('transaction_isolation') = 'read committed' and {plain: amount = units, note = note}
        and (one is not null or metered._try_lock(key))     -- a mere sum waits for nobody
    then
        {short lock};
        {short charge: also = true};
        if e_seq > 0 then
            return format('{"ok": true, "seq": %s, "at": %s, "limits": [%s]}', e_seq, to_json(e_at),
                metered._v1_stand(one, max_units, e_used + units, e_held))::jsonb;
        end if;
    end if;
    posted := metered._write_charges(metered._v1_charge(scope, amount, 0, limits, note, must_exist),
        interval '1 minute', wait_ms, null, 'answer', null, true);
    return case when posted.refused is not null then metered._v1_refused(posted.refused, limits)
        else metered._v1_let(format('"seq": %s, "at": %s, ', posted.seqs[1], to_json(posted.ats[1])),
            limits, posted.used, posted.held[1], amount) end;
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
        else metered._v1_let('', limits, looked.used, looked.held[1], 0) end;
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
    given := metered.refund(scope, metered._scope_key(scope), seq, amount, 5000,
        row(null, null, note)::metered.origin, false);
    return case given.status when 'ok' then jsonb_build_object('ok', true, 'seq', given.seq,
                'at', given.at, 'amount', given.amount)
            when 'missing' then metered._v1_no('budget_unknown_entry', 404)
            when 'purged' then metered._v1_no('budget_entry_purged', 409)
            when 'kind' then metered._v1_no('budget_not_charge', 409)
            else metered._v1_no('budget_refund_exceeds', 409) end
        || jsonb_strip_nulls(jsonb_build_object('remaining', given.remaining));
end
$$;

-- The units and charges that count for each limit now, or for the lifetime without limits, and the
-- scope's totals.
create function metered.v1_usage(scope text, limits jsonb default '[]') returns jsonb
language plpgsql stable
as $$
declare
    {usage variables}
    used  bigint; held bigint; spent bigint; leased bigint; charges bigint;
    starts_at timestamptz; ends_at timestamptz;
    asked metered.charge_limit;
    stand text := '';
begin
    {refuse: when = scope is null, what = scope};
    {usage tip: scope = scope}
    for nth in 0..greatest(1, jsonb_array_length(coalesce(limits, '[null]'))) - 1 loop
        if limits = '[]' then
            asked.win := interval '0';
        else
            asked := metered._v1_limit(limits -> nth);
        end if;
        {usage: scope = scope, win = asked.win, period = asked.period, leases = true}
        held := held + leased;
        stand := stand || format('%s, "used": %s, "held": %s, "available": %s, "charges": %s}, ',
            left((limits -> nth)::text, -1), used, held, greatest(0, asked.max::numeric - used - held), charges);
    end loop;
    return format('{"ok": true, "spent": %s, "refunded": %s, "credited": %s, "held": %s, "used": %s, %s}',
        spent, tip.refunded, tip.credited, held, spent - tip.refunded - tip.credited, case when limits = '[]'
            then format('"charges": %s', charges) else format('"limits": [%s]', left(stand, -2)) end)::jsonb;
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
