-- Thresholds: levels of use. The charge that reaches one reports it, once.
--
-- A limit comes with its thresholds, each in a line: level, rearm, key. level and rearm are used units, with held ones unless the key
-- says that spending alone counts. The text has no quotes, since quotes are doubled at each nesting of a composite. tell_at is the lowest level. The scope's last
-- entry has the reported thresholds (crossed), by key: of a period {"from", "until"}, its bounds; of a lifetime {"rearm"}; of a window
-- {"until", "net"}, a proof that it is not armed again before that time, unless spent and held units, less refunds, fall below net. See ADR 15.

-- Whether a threshold with that key is on spending alone, which ignores held units. Its kind is in upper case.
create function metered._on_spending(key text) returns boolean
language sql immutable
as $$
    select ascii(key) < 97
$$;

-- The key in a line of a limit's thresholds.
create function metered._threshold_key(line text) returns text
language sql immutable
as $$
    select substr(line, length(split_part(line, ' ', 1)) + length(split_part(line, ' ', 2)) + 3)
$$;

-- The limits, with tell_at as the lowest level that is not reported yet, or null. If a threshold may be armed again, tell_at
-- is so low that no bound admits a charge. told is not null, and spent is without refunds.
create function metered._untold(limits metered.charge_limit[], told jsonb, spent bigint, held bigint, credited bigint, at timestamptz)
returns metered.charge_limit[]
language plpgsql stable
as $$
declare
    lim       metered.charge_limit;
    nth       int := 0;
    threshold text;
    key       text;
    was       jsonb;
    net       bigint;
begin
    foreach lim in array limits loop
        nth := nth + 1;
        continue when lim.thresholds is null;
        {refuse: when = octet_length(lim.thresholds) > 1536, what = thresholds};
        lim.tell_at := null;
        foreach threshold in array string_to_array(lim.thresholds, chr(10)) loop
            key := metered._threshold_key(threshold);
            was := told -> key;
            net := spent + case when metered._on_spending(key) then 0 else held end;
            lim.tell_at := least(lim.tell_at, case
                when was is null or lim.win is null and not (at >= (was ->> 'from')::timestamptz and at < (was ->> 'until')::timestamptz) then split_part(threshold, ' ', 1)::bigint
                when lim.win is null
                    or lim.win = interval '0' and net - credited > split_part(threshold, ' ', 2)::bigint
                    or lim.win > interval '0' and at < (was ->> 'until')::timestamptz and net >= (was ->> 'net')::bigint
                    then null
                when lim.win = interval '0' then net - credited
                else 0 end);
        end loop;
        limits[nth] := lim;
    end loop;
    return limits;
end
$$;

-- The thresholds that admitted charges cross (crossings, null for none), and all that are reported by then (crossed, in tips).
-- silent: the caller did not say that it will report them.
--
-- A threshold is armed again when use, without this charge, is back at rearm or less, and in a period when the next begins.
-- used is null for a limit that was decided without a count, which crosses and arms nothing.
create function metered._cross_thresholds(charges metered.new_charge[], used bigint[], held bigint[], at timestamptz,
    inout tips metered.ledger[], out crossings jsonb, out silent boolean)
language plpgsql stable
as $$
declare
    charge    metered.new_charge;
    lim       metered.charge_limit;
    tip       metered.ledger;
    told      jsonb;
    threshold record;
    nth       int := 0;
    nth_limit int := 0;
    kept      bigint;        -- held units, if they count
    adds      bigint;        -- units that the charge adds
    net       bigint;
    now       timestamptz;
    span      timestamptz[];
    found     jsonb[] := '{}';  -- the crossings. An array grows in place, and a jsonb is copied for each
begin
    silent := false;
    foreach charge in array charges loop
        nth := nth + 1;
        tip := tips[nth];
        now := greatest(at, tip.at);
        told := coalesce(tip.crossed, '{}');
        foreach lim in array charge.limits loop
            nth_limit := nth_limit + 1;
            continue when lim.thresholds is null or used[nth_limit] is null;
            {refuse: when = octet_length(lim.thresholds) > 1536, what = thresholds};
            span := null;
            for threshold in select metered._threshold_key(x) as key, split_part(x, ' ', 1)::bigint as level, split_part(x, ' ', 2)::bigint as rearm
                from unnest(string_to_array(lim.thresholds, chr(10))) x loop
                kept := case when metered._on_spending(threshold.key) then 0 else held[nth] end;
                adds := charge.amount - case when metered._on_spending(threshold.key) then charge.held else 0 end;
                net := tip.spent - tip.refunded + case when metered._on_spending(threshold.key) then 0 else tip.held end;
                if told -> threshold.key is not null
                    and (case when lim.win is null then now >= (told -> threshold.key ->> 'from')::timestamptz and now < (told -> threshold.key ->> 'until')::timestamptz else used[nth_limit] + kept > threshold.rearm end) then
                    continue when lim.win is null or lim.win = interval '0' or now < (told -> threshold.key ->> 'until')::timestamptz
                        and net >= (told -> threshold.key ->> 'net')::bigint;
                elsif used[nth_limit] + kept + adds >= threshold.level then
                    span := case when lim.win is null then coalesce(span, metered._period_at(lim.period, now)) end;
                    found := found || jsonb_build_object('scope', charge.scope, 'key', threshold.key, 'nth', nth, 'at', now,
                        'used', used[nth_limit] + charge.amount - charge.held, 'held', held[nth] + charge.held, 'period', span);
                    silent := silent or lim.telling is not true;
                else
                    -- A period that ended is remembered: the clock may be set back.
                    told := case when lim.win is null then told else told - threshold.key end;
                    continue;
                end if;
                told := told || jsonb_build_object(threshold.key, case
                    when lim.win is null then jsonb_build_object('from', span[1], 'until', span[2])
                    when lim.win = interval '0' then jsonb_build_object('rearm', threshold.rearm)
                    else jsonb_build_object('until', metered._reported_until(tip, lim.win, threshold.rearm - kept - adds, now), 'net', net + adds) end);
            end loop;
        end loop;
        if told <> coalesce(tip.crossed, '{}') then
            tip.crossed := metered._kept_reports(told, charges[nth].limits, now, tip);
            tips[nth] := tip;
        end if;
    end loop;
    if found <> '{}' then
        crossings := to_jsonb(found);
    end if;
end
$$;

-- The crossings, each with the entry of its charge (seq).
create function metered._crossed_at(crossings jsonb, seqs bigint[]) returns jsonb
language plpgsql immutable
as $$
begin
    return (select jsonb_agg(x - 'nth' || jsonb_build_object('seq', seqs[(x ->> 'nth')::int])) from jsonb_array_elements(crossings) x);
end
$$;

-- Until when a window keeps more than room of its spent units. Minima of due lines, not written yet, will be dated now or later.
create function metered._reported_until(tip metered.ledger, win interval, room bigint, now timestamptz) returns timestamptz
language plpgsql stable
as $$
declare
    counted record;
begin
    if room < 0 or tip.at <= now - win then
        return now + win;
    end if;
    counted := metered._spent_since(tip, now - win);
    if counted.used <= room then
        return now + win;
    end if;
    return metered._leaves_at(tip, counted.base_seq, counted.base_spent, counted.used, win, room);
end
$$;

-- The thresholds that a scope remembers as reported: up to 64, or as many as the limits or tip have. Beyond that it forgets thresholds of periods and windows
-- that were over a day ago and that the limits do not have. If it cannot forget enough, this fails: a threshold would be reported twice.
create function metered._kept_reports(told jsonb, limits metered.charge_limit[], at timestamptz, tip metered.ledger) returns jsonb
language plpgsql stable
as $$
declare
    own  text[];
    most int;
    kept jsonb;
begin
    if (select count(*) from jsonb_object_keys(told)) <= 64 then
        return nullif(told, '{}');
    end if;
    own := array(select metered._threshold_key(x) from unnest(limits) l, lateral unnest(string_to_array(l.thresholds, chr(10))) x);
    most := greatest(64, cardinality(own), (select count(*) from jsonb_object_keys(tip.crossed)));
    kept := (
        select jsonb_object_agg(y.key, y.value)
        from (select x.key, x.value, (x.value ->> 'until')::timestamptz as until from jsonb_each(told) x
              order by x.key = any (own) desc, coalesce((x.value ->> 'until')::timestamptz > at - interval '24 hours', true) desc, until desc, x.key limit most) y);
    if exists (select from jsonb_each(told - array(select jsonb_object_keys(kept))) x where coalesce((x.value ->> 'until')::timestamptz > at - interval '24 hours', true)) then
        raise exception 'the scope has more thresholds than %', most using errcode = 'MT012', detail = tip.scope;
    end if;
    return kept;
end
$$;

-- The thresholds that stay reported when entry, a credit or refund not written yet, lowers the use of a lifetime. Holds
-- are due by the clock, which may have been set back since the entry before.
create function metered._rearmed(e metered.ledger) returns jsonb
language plpgsql stable
as $$
declare
    clk  timestamptz := least(e.at, metered.clock());
    used bigint := e.spent - e.refunded - e.credited
        + case when e.next_due <= clk then metered._minima(e, null, clk) else 0 end
        + case when e.lots_end is not null then metered._lapsing(e, clk) else 0 end;
    held bigint := e.held - case when e.next_due <= clk then metered._due_units(e.scope, e.next_due, clk) else 0 end;
begin
    return metered._armed(e.crossed, used, held);
end
$$;

-- The thresholds that stay reported of these, where so many units of a lifetime are used, and so many held.
create function metered._armed(crossed jsonb, used bigint, held bigint) returns jsonb
language plpgsql immutable
as $$
begin
    return (select jsonb_object_agg(x.key, x.value) from jsonb_each(crossed) x
        where (used + case when metered._on_spending(x.key) then 0 else held end <= (x.value ->> 'rearm')::bigint) is not true);
end
$$;

-- The reported thresholds after a clock repair. tip is the last entry before it. Windows are counted anew, since the proof was by the clock before. A
-- period that has not begun by the new clock is forgotten: its charges count in the period of now. The reports of the period of now are looked up
-- in the chain, at the last entry before each period that is forgotten, and at the last one by the new clock, for thresholds that the clock before made old.
create function metered._reported_after_repair(tip metered.ledger, clk timestamptz) returns jsonb
language plpgsql stable
as $$
declare
    told     jsonb := '{}';
    crossing record;
    was      jsonb;
begin
    for crossing in
        select e.key, e.value
        from (select coalesce((
                select jsonb_object_agg(o.key, o.value)
                from metered._base(tip.scope, tip.seq, tip.epoch, clk) b
                join metered.ledger y on y.scope = tip.scope and y.seq = b.seq, lateral jsonb_each(y.crossed) o
                where o.value ? 'from'), '{}') || tip.crossed as all_of) a, lateral jsonb_each(a.all_of) e
    loop
        was := case when crossing.value ? 'net' then crossing.value || jsonb_build_object('until', clk) else crossing.value end;
        while (was ->> 'from')::timestamptz > clk loop
            was := (select y.crossed -> crossing.key
                from metered._base(tip.scope, tip.seq, tip.epoch, (was ->> 'from')::timestamptz - interval '0.000001') b
                join metered.ledger y on y.scope = tip.scope and y.seq = b.seq);
        end loop;
        told := told || case when was is not null then jsonb_build_object(crossing.key, was) else '{}' end;
    end loop;
    return nullif(told, '{}');
end
$$;

-- Fails for a caller that crosses a threshold, and did not say that it reports.
create function metered._refuse_unreported() returns void
language plpgsql
as $$
begin
    raise exception 'a threshold is crossed, and nobody would be told' using errcode = 'MT011';
end
$$;

-- The thresholds that are crossed without a charge, by ends of lots and by revoked units. entry is the scope's last entry, and due ends
-- are not written yet. The caller appends the next entry with crossed, and reports crossings. silent: it did not say that it will.
-- crossed is null where the caller has no thresholds of a lifetime, and {} where none is reported any more.
create function metered._cross_lowered(e metered.ledger, units bigint, of_limits metered.charge_limit[], clk timestamptz,
    out crossed jsonb, out crossings jsonb, out silent boolean)
language plpgsql stable
as $$
declare
    lifetimes metered.charge_limit[] := array(select l::metered.charge_limit from unnest(of_limits) l where l.win = interval '0' and l.thresholds is not null);
    held      bigint := e.held;
    due       record;
    crossing  record;
begin
    silent := false;
    if cardinality(lifetimes) > 0 then
        due := metered._due_state(e, clk);
        e.credited := e.credited - metered._lapsing_after(e, clk, due.lots, due.lapsed, due.debt);
        e.crossed := due.crossed;
        if e.next_due <= clk then
            held := held - metered._due_units(e.scope, e.next_due, clk);
            e.spent := e.spent + metered._minima(e, null, clk);
        end if;
        begin
            -- The units are as those of a charge: without them use may be so low that a lot which has begun arms a level.
            crossing := metered._cross_thresholds(array[row(e.scope, null, units, 0, lifetimes, null, null, null, null)::metered.new_charge],
                array_fill(e.spent - e.refunded - e.credited, array[cardinality(lifetimes)]), array[held], clk, array[e]);
            crossed := coalesce((crossing.tips[1]).crossed, '{}');
            crossings := crossing.crossings;
            silent := crossing.silent;
        exception when sqlstate 'MT012' then    -- a lot ends in any case
        end;
    end if;
end
$$;

-- The limits that have thresholds on spending alone, with only these, and raised so that they refuse nothing. Null for none.
create function metered._spent_limits(limits metered.charge_limit[]) returns metered.charge_limit[]
language plpgsql immutable
as $$
declare
    one     metered.charge_limit;
    watched int := 0;
begin
    foreach one in array coalesce(limits, '{}') loop
        watched := watched + (one.tell_at is not null)::int;
    end loop;
    return case when watched > 0 then (
        select array_agg(row(9223372036854775807, l.win, l.period, t.lowest, t.lines, l.telling)::metered.charge_limit)
        from unnest(limits) l, lateral (
            select string_agg(x, chr(10)) as lines, min(split_part(x, ' ', 1)::bigint) as lowest
            from unnest(string_to_array(l.thresholds, chr(10))) x where metered._on_spending(metered._threshold_key(x))) t
        where t.lines is not null) end;
end
$$;

-- The thresholds that a capture crosses: take has its held units as a negative number (held), and its units beyond them (amount).
-- tip is the scope's last entry, and the limits are _spent_limits. As in _write_charges a bound decides where it can. If the use of
-- a limit is unknown, its thresholds are not reported. crossed is null where nothing was judged, and {} where none is reported any more.
create function metered._cross_captured(take metered.new_charge, tip metered.ledger, clk timestamptz, ahead interval,
    out crossed jsonb, out crossings jsonb, out silent boolean)
language plpgsql stable
as $$
declare
    untold   metered.charge_limit[] := take.limits;
    lim      metered.charge_limit;
    counted  boolean := tip.at > clk or tip.next_due <= clk or tip.lots_end <= greatest(clk, tip.at);
    verdict  record;
    crossing record;
begin
    silent := false;
    if tip.lots_end <= greatest(clk, tip.at) and tip.crossed is not null then
        tip.crossed := (metered._due_state(tip, clk)).crossed;
    end if;
    if tip.crossed is not null then
        untold := metered._untold(untold, tip.crossed, tip.spent - tip.refunded, tip.held, tip.credited, clk);
    end if;
    foreach lim in array untold loop
        counted := coalesce(counted, false) or coalesce(tip.spent - case when lim.win = interval '0' then tip.refunded + tip.credited
            when tip.anchor_at < coalesce(clk - lim.win + interval '0.000001', (metered._period_at(lim.period, clk))[1]) then tip.anchor_spent
            else 0 end + take.amount - take.held >= lim.tell_at, false);
    end loop;
    if counted then
        verdict := metered._check_now(array[take], array[tip], clk, ahead);
        crossing := metered._cross_thresholds(array[take], verdict.used, verdict.held, clk, array[tip]);
        crossed := coalesce((crossing.tips[1]).crossed, '{}');
        crossings := crossing.crossings;
        silent := crossing.silent;
    end if;
exception when sqlstate 'MT002' or sqlstate 'MT003' or sqlstate 'MT010' or sqlstate 'MT012' then
    crossed := null;
end
$$;
