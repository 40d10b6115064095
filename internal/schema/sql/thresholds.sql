-- Thresholds: levels of use that are told of once, by the charge that reaches them.
--
-- A limit comes with its thresholds, each in a line: level, rearm, key. Both are units used, holds among them. A text without
-- quotes, since what nests in a composite is quoted over and over. tell_at is the lowest level. What was told stands in the scope's last entry (crossed), by key: of a period
-- {"until"}, its end; of a lifetime {"rearm"}; of a window {"until", "net"}, a proof that it is not armed again: before that time,
-- and while what was spent and is held, less refunds, is not less than net. See ADR 39.

-- The key in a line of a limit's thresholds.
create function metered.threshold_key(line text) returns text
language sql immutable
as $$
    select substr(line, length(split_part(line, ' ', 1)) + length(split_part(line, ' ', 2)) + 3)
$$;

-- The limits, with tell_at as the lowest level that is still to be told, or null. Where one may be armed again, tell_at
-- is so low that nothing goes by it without a count. told is not null; net is what was spent and is held, less refunds.
create function metered.untold(limits metered.charge_limit[], told jsonb, net bigint, credited bigint, at timestamptz)
returns metered.charge_limit[]
language plpgsql stable
as $$
declare
    l metered.charge_limit;
    n int := 0;
    h text;
    was jsonb;
begin
    foreach l in array limits loop
        n := n + 1;
        continue when l.thresholds is null;
        l.tell_at := null;
        foreach h in array string_to_array(l.thresholds, chr(10)) loop
            was := told -> metered.threshold_key(h);
            l.tell_at := case
                when was is null or l.win is null and at >= (was ->> 'until')::timestamptz then least(l.tell_at, split_part(h, ' ', 1)::bigint)
                when l.win is null
                    or l.win = interval '0' and net - credited > split_part(h, ' ', 2)::bigint
                    or l.win > interval '0' and at < (was ->> 'until')::timestamptz and net >= (was ->> 'net')::bigint
                    then l.tell_at
                when l.win = interval '0' then least(l.tell_at, net - credited)
                else 0 end;
        end loop;
        limits[n] := l;
    end loop;
    return limits;
end
$$;

-- Which thresholds charges cross that are let in, and what is told of them then (crossed, in the last entries).
-- crossings is null for none. silent: the caller did not say that it will tell them.
--
-- Armed again is what use has gone back from, to rearm or less, before the charge adds its own; a period, when it has ended. used
-- lacks what is decided without a count: there, nothing is reached, and nothing is armed.
create function metered.cross_thresholds(charges metered.new_charge[], used bigint[], held bigint[], at timestamptz,
    inout tips metered.ledger[], out crossings jsonb, out silent boolean)
language plpgsql stable
as $$
declare
    c    metered.new_charge;
    l    metered.charge_limit;
    tip  metered.ledger;
    told jsonb;
    h    record;
    i    int := 0;
    n    int := 0;
    had  bigint;        -- used and held before the charge
    now  timestamptz;
    p    timestamptz[];
begin
    silent := false;
    foreach c in array charges loop
        i := i + 1;
        tip := tips[i];
        now := greatest(at, tip.at);
        told := coalesce(tip.crossed, '{}');
        foreach l in array c.limits loop
            n := n + 1;
            continue when l.thresholds is null or used[n] is null;
            if octet_length(l.thresholds) > 8192 then
                perform metered.require(false, 'thresholds');
            end if;
            had := used[n] + held[i];
            p := null;
            for h in select metered.threshold_key(x) as key, split_part(x, ' ', 1)::bigint as level, split_part(x, ' ', 2)::bigint as rearm
                from unnest(string_to_array(l.thresholds, chr(10))) x loop
                if told -> h.key is not null
                    and (case when l.win is null then now < (told -> h.key ->> 'until')::timestamptz else had > h.rearm end) then
                    continue when l.win is null or l.win = interval '0' or now < (told -> h.key ->> 'until')::timestamptz
                        and tip.spent + tip.held - tip.refunded >= (told -> h.key ->> 'net')::bigint;
                elsif had + c.amount >= h.level then
                    p := case when l.win is null then coalesce(p, metered.period_at(l.period, now)) end;
                    crossings := coalesce(crossings, '[]') || jsonb_build_object('scope', c.scope, 'key', h.key, 'nth', i, 'at', now,
                        'used', had - held[i] + c.amount - c.held, 'held', held[i] + c.held, 'period', p);
                    silent := silent or l.telling is not true;
                else
                    -- A period that ended is remembered: the clock may be set back.
                    told := case when l.win is null then told else told - h.key end;
                    continue;
                end if;
                told := told || jsonb_build_object(h.key, case
                    when l.win is null then jsonb_build_object('until', p[2])
                    when l.win = interval '0' then jsonb_build_object('rearm', h.rearm)
                    else jsonb_build_object('until', metered.told_until(tip, l.win, h.rearm - held[i] - c.amount, now),
                        'net', tip.spent + tip.held - tip.refunded + c.amount) end);
            end loop;
        end loop;
        if told <> coalesce(tip.crossed, '{}') then
            tip.crossed := metered.kept_told(told, charges[i].limits, now);
            tips[i] := tip;
        end if;
    end loop;
end
$$;

-- The crossings, each with the entry of its charge (seq).
create function metered.crossed_at(crossings jsonb, seqs bigint[]) returns jsonb
language plpgsql immutable
as $$
begin
    return (select jsonb_agg(x - 'nth' || jsonb_build_object('seq', seqs[(x ->> 'nth')::int])) from jsonb_array_elements(crossings) x);
end
$$;

-- Until when a window holds more than room of what was spent so far, though nothing is added.
create function metered.told_until(tip metered.ledger, win interval, room bigint, now timestamptz) returns timestamptz
language plpgsql stable
as $$
declare
    w record;
begin
    if room < 0 or tip.at <= now - win then
        return now + win;
    end if;
    w := metered.spent_since(tip, now - win);
    if w.used <= room then
        return now + win;
    end if;
    return metered.leaves_at(tip, w.base_seq, w.base_spent, w.used, win, room);
end
$$;

-- What is remembered of what was told: not of periods that have ended, and of no more than 64 thresholds beside those of limits.
create function metered.kept_told(told jsonb, limits metered.charge_limit[], at timestamptz) returns jsonb
language plpgsql stable
as $$
declare
    own text[] := array(select metered.threshold_key(x) from unnest(limits) l, lateral unnest(string_to_array(l.thresholds, chr(10))) x);
begin
    return (
        select jsonb_object_agg(y.key, y.value)
        from (select x.key, x.value from jsonb_each(told) x
              where x.key = any (own) or x.value ? 'net' or x.value ? 'rearm' or (x.value ->> 'until')::timestamptz > at
              order by x.key = any (own) desc, x.key limit greatest(64, cardinality(own))) y);
end
$$;

-- What is left of what was told when an entry lowers what a lifetime has used: credit, or a refund. e is that entry, not written yet.
create function metered.rearmed(e metered.ledger) returns jsonb
language plpgsql stable
as $$
declare
    had bigint := e.spent - e.refunded - e.credited + e.held
        - case when e.next_due <= e.at then metered.overdue(e.scope, e.next_due, e.at) else 0 end
        + case when e.lots_end is not null then metered.lapsing(e, e.at) else 0 end;
begin
    return (select jsonb_object_agg(x.key, x.value) from jsonb_each(e.crossed) x where (had <= (x.value ->> 'rearm')::bigint) is not true);
end
$$;

-- What was told, after a clock repair: windows are counted anew, since the proof was by the clock before.
create function metered.told_by_another_clock(told jsonb) returns jsonb
language plpgsql stable
as $$
begin
    return (select jsonb_object_agg(x.key, case when x.value ? 'net' then x.value || '{"until": "-infinity"}' else x.value end) from jsonb_each(told) x);
end
$$;

-- Ends a transaction that would cross a threshold without telling.
create function metered.untold_crossing() returns void
language plpgsql
as $$
begin
    raise exception 'a threshold is crossed, and nobody would be told' using errcode = 'MT011';
end
$$;

-- What crosses thresholds where no charge says so: the end of lots, and units that are revoked. e is the scope's last entry, with its lots
-- that are due. The caller appends what follows it with crossed, and tells of crossings. silent: it did not say that it will.
create function metered.cross_lowered(e metered.ledger, units bigint, of_limits metered.charge_limit[], clk timestamptz,
    out crossed jsonb, out crossings jsonb, out silent boolean)
language plpgsql stable
as $$
declare
    lifetimes metered.charge_limit[] := array(select l::metered.charge_limit from unnest(of_limits) l where l.win = interval '0' and l.thresholds is not null);
    held bigint := e.held;
    w    record;
begin
    crossed := e.crossed;
    silent := false;
    if cardinality(lifetimes) > 0 then
        e.credited := e.credited - units - metered.lapsing(e, clk);
        if e.next_due <= clk then
            held := held - metered.overdue(e.scope, e.next_due, clk);
            e.spent := e.spent + metered.minima(e, null, clk);
        end if;
        w := metered.cross_thresholds(array[row(e.scope, null, 0, 0, lifetimes, null, null, null, null)::metered.new_charge],
            array_fill(e.spent - e.refunded - e.credited, array[cardinality(lifetimes)]), array[held], clk, array[e]);
        crossed := (w.tips[1]).crossed;
        crossings := w.crossings;
        silent := w.silent;
    end if;
end
$$;
