-- Periods: days, weeks, months and years of a time zone, and stretches of fixed length. A period is
-- [start, end). A sliding window is (since, now], so a period is looked up as the window since its
-- start less a microsecond.

-- The period that t is in: its start and its end. Periods follow each other without a gap, before the
-- anchor too. All are counted from the anchor, so that the 31st is the last day of a shorter month,
-- and the 31st again in a longer one.
--
-- Where a clock is set forward past a start, the period starts as if it had not been. Where a clock is set back, at the
-- first time that it shows the start. Only hours are added to a timestamptz: days would be those of
-- the session's time zone.
create function metered._period_at(p metered.period, t timestamptz) returns timestamptz[]
language plpgsql stable
as $$
declare
    months  int := extract(year from p.every) * 12 + extract(month from p.every);
    days    int := extract(day from p.every);
    length  bigint;
    into_it bigint;
    shown   timestamp;      -- t, as a clock of the zone shows it
    origin  timestamp;
    start   timestamp;
    n       int;
    starts  timestamptz;
    ends    timestamptz;
    back    interval;       -- by how much the clock was set back in the day before starts
begin
    if p.zone is null then
        length := extract(epoch from p.every) * 1000000;
        if (length > 0 and isfinite(p.anchor)) is not true then
            perform metered._require(false, 'period');
        end if;
        into_it := (extract(epoch from t) - extract(epoch from p.anchor)) * 1000000;
        into_it := (into_it % length + length) % length;
        starts := t - into_it * interval '1 microsecond';
        return array[starts, starts + length * interval '1 microsecond'];
    end if;
    if ((months > 0 and days = 0 or months = 0 and days > 0) and p.every = make_interval(months => months, days => days)) is not true
        or isfinite(p.anchor) is false then
        perform metered._require(false, 'period');
    end if;
    begin
        shown := t at time zone p.zone;
    exception when invalid_parameter_value then
        raise exception 'the time zone is not known' using errcode = 'MT010', detail = p.zone;
    end;
    origin := coalesce(p.anchor at time zone p.zone, '0001-01-01');
    -- A period that starts later, and from there back to the one that has begun.
    n := 1 + case when days > 0 then date_part('day', shown - origin)::int / days
        else (date_part('year', shown) * 12 + date_part('month', shown) - date_part('year', origin) * 12 - date_part('month', origin))::int / months end;
    loop
        start := origin + n * p.every;
        starts := start at time zone p.zone;
        back := ((starts - interval '24:00') at time zone p.zone) - (start - interval '24:00');
        if back > interval '0' and (starts - extract(epoch from back) * interval '1 second') at time zone p.zone = start then
            starts := starts - extract(epoch from back) * interval '1 second';
        end if;
        if starts > t then
            ends := starts;
            n := n - 1;
        elsif ends is null then
            n := n + 2;
        else
            return array[starts, ends];
        end if;
    end loop;
end
$$;

-- The periods that charges of scopes whose last entries are tips are judged in: two times for each
-- limit by period, in the order of the limits. Null without any.
create function metered._periods_of(charges metered.new_charge[], tips metered.ledger[], clk timestamptz) returns timestamptz[]
language plpgsql stable
as $$
declare
    l       metered.charge_limit;
    periods timestamptz[];
begin
    for i in 1..cardinality(charges) loop
        foreach l in array charges[i].limits loop
            if l.win is null then
                periods := periods || metered._period_at(l.period, greatest(clk, tips[i].at));
            end if;
        end loop;
    end loop;
    return periods;
end
$$;
