-- Charges that are judged each on its own, many in a call: batches, and usage events with ids.
--
-- The cost of a call is mostly the set-up of its statements, so one statement makes the entries of
-- all charges that are plain: they fit, nothing is due, and the clock is right. A scope of which
-- one charge is not plain is left to _write_charges, charge by charge, so that only _check_limits
-- refuses. The guard is the same for both: the primary key, and FOR KEY SHARE on the last entry.

-- Takes locks in the order of their keys. With skip_busy it waits for room in the lock table alone,
-- and returns the keys that are not free.
create function metered._lock_each(keys bigint[], wait_ms int, skip_busy boolean) returns bigint[]
language plpgsql volatile
as $$
declare
    waited boolean;
begin
    keys := array(select distinct x.key from unnest(keys) x(key) order by 1);
    if skip_busy then
        if cardinality(keys) > 64 then
            wait_ms := metered._make_room(cardinality(keys), wait_ms);
        end if;
        return (select array_agg(k.key)
            from unnest(keys) k(key) where not metered._try_lock(k.key));
    end if;
    waited := metered._lock_keys(keys, wait_ms);
    return null;
end
$$;

-- The records of events, whose ids are locked: replay (with the entry that was made), conflict
-- (another event has the id), or nothing.
create function metered._recorded_events(events metered.new_event[], busy bigint[], wait_ms int,
    out statuses text[], out answers metered.each_answer[])
language plpgsql volatile
as $$
begin
    select array_agg(r.status order by r.nth),
        array_agg(row(r.nth, r.seq, r.at, null, null, null, r.status, null,
                null)::metered.each_answer) filter (where r.status = 'replay')
    into statuses, answers
    from (select e.ordinality as nth, o.seqs[1] as seq, o.ats[1] as at,
            case when e.id_key = any (busy) then 'busy' when o.id is null then null
                when o.fingerprint = e.fingerprint then 'replay' else 'conflict' end as status
          from unnest(events) with ordinality e
          -- limit, or the planner may join by a hash of the whole table, made while it was empty.
          left join lateral (select x.id, x.fingerprint, x.seqs, x.ats from metered.operations x
              where x.tenant = e.tenant and x.id = e.id limit 1) o on true) r;
    if metered._one_snapshot() then
        -- As in begin_command: the snapshot may be older than a record, or than a purge.
        begin
            perform set_config('lock_timeout', wait_ms::text, true);
            insert into metered.operations (tenant, id, at, fingerprint, result)
            select e.tenant, e.id, 'infinity', '', ''
            from rows
            from (unnest(events), unnest(statuses)) e
            where e.id is not null and e.unnest is null
            order by e.tenant, e.id on conflict do nothing;
            perform from metered.operations_horizon h where h.one for share;
            {take back};
        end;
    end if;
end
$$;

-- Writes the plain charges, with the records of their events. exact are the numbers of the other
-- charges without a status. The scopes are locked.
create function metered._write_plain(charges metered.new_charge[], events metered.new_event[],
    statuses text[], clk timestamptz,
    out answers metered.each_answer[], out exact int[])
language plpgsql volatile
as $$
declare
    entries int;
    made    int;
    records int;
    kept    int;
begin
    -- before has the units that the batch charges the scope ahead of a charge. They count for it.
    with asked as (
        select c.ordinality::int as nth, c.scope, c.amount, c.limits, c.note, c.tenant, c.id,
            c.fingerprint, c.issued_at,
            row_number() over w as place, (sum(c.amount) over w)::bigint - c.amount as before,
            (c.amount between 1 and 9007199254740992
                and c.held = 0
                and octet_length(c.scope) between 1 and 255
                and coalesce(pg_column_size(c.note), 0) <= 8192
                and pg_column_compression(c.note) is null
                and cardinality(c.limits) <= 16
                and c.must_exist is not true and c.lease is null) is true as sound
        from rows from (unnest(charges), unnest(events), unnest(statuses)) with ordinality c
        where c.unnest is null
        window w as (partition by c.scope order by c.ordinality)
    ), judged as (
        select a.*, t.seq, t.spent, t.refunded, t.credited, t.held, t.epoch, t.next_due,
            t.anchor_at, t.anchor_spent, t.lots_end, t.crossed, t.tallied, t.others, u.used,
            u.periods,
            bool_and(coalesce(a.sound
                    and u.fits
                    and t.fresh
                    and t.spent <= 9223372036854775807 - a.before - a.amount, false))
                over (partition by a.scope) as plain
        from asked a
        left join lateral (
            select y.*
            from metered.ledger y
            where y.scope = a.scope order by y.seq desc limit 1 for key share) y on true
        -- A scope without entries begins here. Where a purge takes them away just now, the keys
        -- collide.
        cross join lateral (
            select coalesce(y.seq, 0) as seq, coalesce(y.at, '-infinity') as at,
                coalesce(y.spent, 0) as spent,
                coalesce(y.refunded, 0) as refunded, coalesce(y.credited, 0) as credited,
                coalesce(y.held, 0) as held,
                coalesce(y.epoch, 0::smallint) as epoch, y.next_due, y.anchor_at, y.anchor_spent,
                y.lots_end, y.crossed, y.tallied, y.others,
                y.seq is null or y.at <= clk
                    and y.lots_end is null
                    and (y.next_due <= clk) is not true as fresh) t
        -- The units that count against each limit: as in _write_charges, where they are sure.
        cross join lateral (
            select array_agg(x.used + a.before order by x.ordinality) as used,
                array_agg(x.period order by x.ordinality) filter (
                    where x.period is not null) as periods,
                coalesce(bool_and(coalesce(x.used + a.before <= least(x.max, x.tell_at - 1) - t.held
                            - a.amount, false)), true) as fits
            from (select l.ordinality, l.max, l.tell_at, l.period,
                    case when l.since = clk then t.spent - t.refunded - t.credited
                        when t.at <= l.since then 0
                        when b.seq > 1 and b.refunded = t.refunded then t.spent - b.spent
                        when b.seq > 1 then null
                        when b.seq is null and t.epoch > 0 or t.refunded > 0 then null
                        when t.seq <= 16 or (select z.seq
                            from metered.ledger z
                            where z.scope = a.scope and z.seq = 2) is not null
                            then t.spent - coalesce(b.spent, 0)
                    end as used
                  from (select y.ordinality, y.max, y.tell_at, y.period,
                      coalesce(clk - y.win, y.period[1] - interval '0.000001') as since
                        from (select z.ordinality, z.max, z.tell_at, z.win,
                            case when z.win is null
                                then metered._period_at(z.period, clk) end as period
                              from unnest(case when t.crossed is null then a.limits
                                      else metered._untold(a.limits, t.crossed,
                                  t.spent + a.before - t.refunded, t.held, t.credited,
                                  clk) end) with ordinality z
                              offset 0) y) l    -- or a period would be worked
                                                -- out wherever it is mentioned
                  left join lateral (
                      select base.seq, base.spent, base.refunded
                      from {base: scope = a.scope, epoch = t.epoch, since = l.since,
                          if = t.at > l.since and l.since <> clk}) b on true
                  offset 0) x) u        -- or the use would be worked out twice
    ), entries as (
        insert into metered.ledger ({entry columns})
        select {entry of j: seq = j.seq + j.place, at = clk, spent = j.spent + j.before + j.amount,
            kind = 'c',
            next_due = case when j.held > 0
                then metered._due_after(j.scope, j.seq + j.place - 1, j.held, j.next_due,
                    clk) else j.next_due end,
            operation_tenant = j.tenant, operation = j.id, hold = null}
        from judged j where j.plain
        on conflict do nothing
        returning 1
    ), records as (
        insert into metered.operations (tenant, id, fingerprint, issued_at, at, result, scopes,
            amounts, seqs, ats)
        select j.tenant, j.id, j.fingerprint, j.issued_at, clk, 'null', array[j.scope],
            array[j.amount], array[j.seq + j.place], array[clk]
        from judged j where j.plain and j.id is not null
        on conflict do nothing
        returning 1
    )
    select array_agg(row(j.nth, j.seq + j.place, clk, j.used, j.held, null, null, j.periods,
            null)::metered.each_answer) filter (where j.plain),
        array_agg(j.nth order by j.nth) filter (where not j.plain),
        count(*) filter (where j.plain), (select count(*) from entries),
        count(*) filter (where j.plain and j.id is not null), (select count(*) from records)
    into answers, exact, entries, made, records, kept
    from judged j;
    if made < entries then
        perform metered._collided();
    elsif kept < records then
        perform metered._recorded_meanwhile();
    end if;
end
$$;

-- Fails for a writer of a record that another writer made first.
create function metered._recorded_meanwhile() returns void
language plpgsql
as $$
begin
    raise exception 'could not serialize access: the operation was recorded meanwhile'
        using errcode = '40001';
end
$$;

-- Writes one charge, whose scope is locked, with the record of its event, or says why it is
-- refused.
create function metered._write_exact(c metered.new_charge, e metered.new_event, nth int,
    ahead interval, wait_ms int, clk timestamptz)
returns metered.each_answer
language plpgsql volatile
as $$
declare
    answer record;
begin
    answer := metered._write_charges(array[c], ahead, wait_ms, row(e.tenant, e.id, null), 'answer',
        row(null, null, null, clk), true);
    if answer.refused -> 0 ? 'crossing' then
        perform metered._refuse_unreported();
    end if;
    if answer.refused is null and e.id is not null then
        insert into metered.operations (tenant, id, fingerprint, issued_at, at, result, scopes,
            amounts, seqs, ats)
        values (e.tenant, e.id, e.fingerprint, e.issued_at, clk, 'null', array[c.scope],
            array[c.amount], answer.seqs, answer.ats)
        on conflict do nothing;
        if not found then
            perform metered._recorded_meanwhile();
        end if;
    end if;
    return row(nth, answer.seqs[1], answer.ats[1], answer.used, answer.held[1], answer.refused,
        null, answer.periods, answer.crossed)::metered.each_answer;
end
$$;

-- Makes up to 1,000 charges, each on its own, and answers each, in any order. Those of one scope
-- are judged in the order given, and one that is let in counts for the next. All locks are taken
-- first, those of ids before those of scopes: two of the server's lock table for a charge with an
-- id.
--
-- events is null, or has an element for each charge, which has an id, or none. An id is at most
-- once in a call. status says why there is no entry, or whose it is: replay (the entry of before),
-- conflict (of another event), retired (its time is at or before the horizon), future, late
-- (further from the clock than allowed), busy (with skip_busy: a lock was not free, or the scope is
-- behind), or a SQLSTATE: MT002, MT003, MT010, MT012 or 22003, with its detail as refused. A
-- threshold that is crossed and that the caller would not report ends the call (MT011).
create function metered.charge_each(charges metered.new_charge[], events metered.new_event[],
    ahead interval, late interval, future interval, wait_ms int, skip_busy boolean)
returns setof metered.each_answer
language plpgsql volatile
as $$
declare
    asked    int := cardinality(charges);
    clk      timestamptz;
    horizon  timestamptz;
    busy     bigint[];
    statuses text[];    -- why a charge is not to be made, by its number
    answers  metered.each_answer[];
    exact    int[];
    behind   text[];
    written  record;
    answer   metered.each_answer;
    which    int;
    state    text;
    detail   text;
begin
    {refuse: when = (asked between 1 and 1000 and array_ndims(charges) = 1
        and array_lower(charges, 1) = 1 and (events is null or cardinality(events) = asked
            and array_ndims(events) = 1
            and array_lower(events, 1) = 1)) is not true, what = charges};
    if events is not null then
        {refuse: when = not (select coalesce(bool_and(e.id is null
                    or octet_length(e.id) between 1 and 255
                        and (octet_length(e.tenant) <= 255) is true
            and (octet_length(e.fingerprint) = 33) is true), true) from unnest(events) e),
            what = events};
        busy := metered._lock_each(array(select e.id_key
                from unnest(events) e where e.id_key is not null), wait_ms, skip_busy);
        written := metered._recorded_events(events, busy, wait_ms);
        statuses := written.statuses;
        return query select * from unnest(written.answers);
    end if;
    busy := metered._lock_each(array(
        select coalesce(c.key, metered._scope_key(c.scope))
        from rows
        from (unnest(charges), unnest(statuses)) c
        where c.unnest is null), wait_ms, skip_busy);
    clk := metered.clock();     -- after the locks: a wait must not date the entries back
    if busy is not null then
        statuses := array(
            select coalesce(c.unnest, case when c.key = any (busy) then 'busy' end)
            from rows
            from (unnest(charges), unnest(statuses)) with ordinality c
            order by c.ordinality);
    end if;
    if events is not null then
        -- Read after the records: a purge moves the horizon in the transaction that deletes.
        horizon := (select h.at from metered.operations_horizon h where h.one);
        statuses := array(
            select coalesce(e.unnest, case when e.issued_at <= horizon then 'retired'
                when greatest(e.issued_at, e.occurred_at) > clk + future then 'future'
                when e.occurred_at < clk - late then 'late' end)
            from rows
            from (unnest(events), unnest(statuses)) with ordinality e
            order by e.ordinality);
    end if;
    if asked = 1 then   -- for one charge _write_charges is faster
        exact := array(select 1 where statuses[1] is null);
    else
        perform metered._entry_for_write(x.scope)   -- folds tallies
        from (select distinct c.scope
            from rows from (unnest(charges), unnest(statuses)) c where c.unnest is null) x,
             lateral (select l.tallied
                 from metered.ledger l where l.scope = x.scope order by l.seq desc
                 limit 1) t where t.tallied;
        written := metered._write_plain(charges, events, statuses, clk);
        return query select * from unnest(written.answers);
        exact := written.exact;
    end if;
    if skip_busy and exact <> '{}' then     -- else the others wait for what it writes
        behind := array(
            select x.scope
            from (select distinct c.scope from unnest(charges) with ordinality c
                  where c.ordinality = any (exact)) x
            where (select t.next_due <= clk or t.lots_end <= clk from metered.ledger t
                   where t.scope = x.scope order by t.seq desc limit 1) is true
              and metered._behind(x.scope, clk));
        if behind <> '{}' then
            statuses := array(
                select coalesce(c.unnest, case when c.scope = any (behind) then 'busy' end)
                from rows from (unnest(charges), unnest(statuses)) with ordinality c
                order by c.ordinality);
            exact := array(select x.nth from unnest(exact) x(nth) where statuses[x.nth] is null
                order by 1);
        end if;
    end if;
    begin
        foreach which in array coalesce(exact, '{}') loop
            answers[which] := metered._write_exact(charges[which], events[which], which, ahead,
                wait_ms, clk);
        end loop;
    exception when sqlstate 'MT002' or sqlstate 'MT003' or sqlstate 'MT010' or sqlstate 'MT012'
        or numeric_value_out_of_range then
        -- Once more, each in a block of its own, which costs a subtransaction.
        answers := null;
        foreach which in array exact loop
            begin
                answers[which] := metered._write_exact(charges[which], events[which], which, ahead,
                    wait_ms, clk);
            exception when sqlstate 'MT002' or sqlstate 'MT003' or sqlstate 'MT010'
                or sqlstate 'MT012' or numeric_value_out_of_range then
                get stacked diagnostics state = returned_sqlstate, detail = pg_exception_detail;
                answers[which] := row(which, null, null, null, null, to_jsonb(detail), state, null,
                    null)::metered.each_answer;
            end;
        end loop;
    end;
    return query select * from unnest(answers) x where x.nth is not null;
    return query select s.ordinality::int, null::bigint, null::timestamptz, null::bigint[],
        null::bigint, null::jsonb, s.status, null::timestamptz[], null::jsonb
        from unnest(statuses) with ordinality s(status, ordinality) where s.status <> 'replay';
end
$$;
