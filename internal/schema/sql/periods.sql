-- Periods: days, weeks, months and years of a time zone, and stretches of fixed length. A period is
-- [start, end). A sliding window is (since, now], so a period is looked up as the window since its
-- start less a microsecond.

-- Names of time zones that IANA gave up for others, which mean the same place. A server may know
-- one of both alone: its data are older, or distributions leave the old names out (Debian's
-- tzdata-legacy).
create function metered._renamed_zones() returns jsonb
language sql immutable
as $$
    select '{
        "Africa/Asmera": "Africa/Asmara", "America/Atka": "America/Adak",
        "America/Buenos_Aires": "America/Argentina/Buenos_Aires",
        "America/Catamarca": "America/Argentina/Catamarca",
        "America/Cordoba": "America/Argentina/Cordoba", "America/Ensenada": "America/Tijuana",
        "America/Fort_Wayne": "America/Indiana/Indianapolis", "America/Godthab": "America/Nuuk",
        "America/Indianapolis": "America/Indiana/Indianapolis",
        "America/Jujuy": "America/Argentina/Jujuy", "America/Knox_IN": "America/Indiana/Knox",
        "America/Louisville": "America/Kentucky/Louisville",
        "America/Mendoza": "America/Argentina/Mendoza", "America/Porto_Acre": "America/Rio_Branco",
        "America/Shiprock": "America/Denver", "Asia/Ashkhabad": "Asia/Ashgabat",
        "Asia/Calcutta": "Asia/Kolkata", "Asia/Dacca": "Asia/Dhaka",
        "Asia/Katmandu": "Asia/Kathmandu", "Asia/Macao": "Asia/Macau", "Asia/Rangoon": "Asia/Yangon",
        "Asia/Saigon": "Asia/Ho_Chi_Minh", "Asia/Tel_Aviv": "Asia/Jerusalem",
        "Asia/Thimbu": "Asia/Thimphu", "Asia/Ujung_Pandang": "Asia/Makassar",
        "Asia/Ulan_Bator": "Asia/Ulaanbaatar", "Atlantic/Faeroe": "Atlantic/Faroe",
        "Australia/ACT": "Australia/Sydney", "Australia/Canberra": "Australia/Sydney",
        "Australia/LHI": "Australia/Lord_Howe", "Australia/NSW": "Australia/Sydney",
        "Australia/North": "Australia/Darwin", "Australia/Queensland": "Australia/Brisbane",
        "Australia/South": "Australia/Adelaide", "Australia/Tasmania": "Australia/Hobart",
        "Australia/Victoria": "Australia/Melbourne", "Australia/West": "Australia/Perth",
        "Australia/Yancowinna": "Australia/Broken_Hill", "Brazil/Acre": "America/Rio_Branco",
        "Brazil/DeNoronha": "America/Noronha", "Brazil/East": "America/Sao_Paulo",
        "Brazil/West": "America/Manaus", "Canada/Atlantic": "America/Halifax",
        "Canada/Central": "America/Winnipeg", "Canada/Eastern": "America/Toronto",
        "Canada/Mountain": "America/Edmonton", "Canada/Newfoundland": "America/St_Johns",
        "Canada/Pacific": "America/Vancouver", "Canada/Saskatchewan": "America/Regina",
        "Canada/Yukon": "America/Whitehorse", "Chile/Continental": "America/Santiago",
        "Chile/EasterIsland": "Pacific/Easter", "Europe/Kiev": "Europe/Kyiv",
        "Mexico/BajaNorte": "America/Tijuana", "Mexico/BajaSur": "America/Mazatlan",
        "Mexico/General": "America/Mexico_City", "Pacific/Enderbury": "Pacific/Kanton",
        "Pacific/Ponape": "Pacific/Pohnpei", "Pacific/Samoa": "Pacific/Pago_Pago",
        "Pacific/Truk": "Pacific/Chuuk", "US/Alaska": "America/Anchorage",
        "US/Aleutian": "America/Adak", "US/Arizona": "America/Phoenix",
        "US/Central": "America/Chicago", "US/East-Indiana": "America/Indiana/Indianapolis",
        "US/Eastern": "America/New_York", "US/Hawaii": "Pacific/Honolulu",
        "US/Indiana-Starke": "America/Indiana/Knox", "US/Michigan": "America/Detroit",
        "US/Mountain": "America/Denver", "US/Pacific": "America/Los_Angeles",
        "US/Samoa": "Pacific/Pago_Pago"}'::jsonb
$$;

-- The name by which the server knows a zone, or null: its present name, where the server shows the
-- same time by both, or else the given one, or an earlier one.
create function metered._known_zone(of_zone text) returns text
language plpgsql stable
as $$
declare
    renamed   text := metered._renamed_zones() ->> of_zone;
    candidate text;
    known     text;
begin
    for candidate in
        select of_zone union all select renamed where renamed is not null
        union all select x.key
            from jsonb_each_text(metered._renamed_zones()) x
            where x.value = of_zone
    loop
        begin
            perform timestamptz 'epoch' at time zone candidate;
            if known is null or candidate = renamed and not exists (
                select from generate_series(timestamptz '2000-01-01 00:00Z', '2040-01-01 00:00Z',
                    interval '730 hours') t
                where t at time zone renamed <> t at time zone of_zone) then
                known := candidate;
            end if;
        exception when invalid_parameter_value then
            null;   -- the server does not know it
        end;
    end loop;
    return known;
end
$$;

-- A plan as it is kept: its zones by their present names.
create function metered._plan_kept(plan metered.lot_plan) returns metered.lot_plan
language plpgsql stable
as $$
begin
    if metered._renamed_zones() ? (plan.renews).zone then
        plan.renews.zone := coalesce(metered._known_zone((plan.renews).zone), (plan.renews).zone);
    end if;
    if metered._renamed_zones() ? (plan.roll_to).zone then
        plan.roll_to.zone := coalesce(metered._known_zone((plan.roll_to).zone),
            (plan.roll_to).zone);
    end if;
    return plan;
end
$$;

-- The period that moment is in: its start and its end. Periods follow each other without a gap,
-- before the anchor too. All are counted from the anchor, so that the 31st is the last day of a
-- shorter month, and the 31st again in a longer one.
--
-- Where a clock is set forward past a start, the period starts as if it had not been. Where a clock
-- is set back, at the first time that it shows the start. Only hours are added to a timestamptz:
-- days would be those of the session's time zone.
create function metered._period_at(p metered.period, t timestamptz) returns timestamptz[]
language plpgsql stable strict
as $$
declare
    months  int := extract(year from p.every) * 12 + extract(month from p.every);
    days    int := extract(day from p.every);
    length  bigint;
    into_it bigint;
    shown   timestamp;      -- t, as a clock of the zone shows it
    origin  timestamp;
    start   timestamp;
    nth     int;
    starts  timestamptz;
    ends    timestamptz;
    back    interval;       -- by how much the clock was set back in the day before starts
begin
    if p.zone is null then
        length := extract(epoch from p.every) * 1000000;
        {refuse: when = (length > 0 and isfinite(p.anchor)) is not true, what = period};
        into_it := (extract(epoch from t) - extract(epoch from p.anchor)) * 1000000;
        into_it := (into_it % length + length) % length;
        starts := t - into_it * interval '1 microsecond';
        return array[starts, starts + length * interval '1 microsecond'];
    end if;
    {refuse: when = ((months > 0 and days = 0 or months = 0 and days > 0)
            and p.every = make_interval(months => months, days => days)) is not true
        or isfinite(p.anchor) is false, what = period};
    begin
        shown := t at time zone p.zone;
    exception when invalid_parameter_value then
        if metered._known_zone(p.zone) is null then
            raise exception 'the time zone is not known' using errcode = 'MT010', detail = p.zone;
        end if;
        p.zone := metered._known_zone(p.zone);
        shown := t at time zone p.zone;
    end;
    origin := coalesce(p.anchor at time zone p.zone, '0001-01-01');
    -- A period that starts later, and from there back to the one that has begun.
    nth := 1 + case when days > 0 then date_part('day', shown - origin)::int / days
        else (date_part('year', shown) * 12 + date_part('month', shown) - date_part('year', origin)
            * 12 - date_part('month', origin))::int / months end;
    loop
        start := origin + nth * p.every;
        starts := start at time zone p.zone;
        back := ((starts - interval '24:00') at time zone p.zone) - (start - interval '24:00');
        if back > interval '0'
            and (starts - extract(epoch from back) * interval '1 second') at time zone p.zone
                = start then
            starts := starts - extract(epoch from back) * interval '1 second';
        end if;
        if starts > t then
            ends := starts;
            nth := nth - 1;
        elsif ends is null then
            nth := nth + 2;
        else
            return array[starts, ends];
        end if;
    end loop;
end
$$;

-- The periods that charges of scopes whose last entries are tips are judged in: two times for each
-- limit by period, in the order of the limits. Null without any.
create function metered._periods_of(charges metered.new_charge[], tips metered.ledger[],
    clk timestamptz) returns timestamptz[]
language plpgsql stable
as $$
declare
    lim     metered.charge_limit;
    periods timestamptz[];
begin
    for i in 1..cardinality(charges) loop
        foreach lim in array charges[i].limits loop
            if lim.win is null then
                periods := periods || metered._period_at(lim.period, greatest(clk, tips[i].at));
            end if;
        end loop;
    end loop;
    return periods;
end
$$;
