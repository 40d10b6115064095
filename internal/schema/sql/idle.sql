-- A wallet that nobody touched for long, with plans. Most lots that its plans have brought since are
-- over by now, and nobody drew of them. _advance writes no entries of these one by one. It looks first
-- at what becomes of all lots (_foreseen), by their ends and units alone. Then it writes what becomes of
-- the lots that the wallet had, and of those that are left, at their times and by the rules of duelots.sql
-- (_awake). The other periods of a plan are one lot, with the units of all of them: it comes and lapses
-- when the last of them is over. Its reference says from when to when: a plan's, and two times.
--
-- So a call costs a few entries, and not the years in which nobody called. Nothing needs to repeat itself:
-- periods may be months, and clocks may be set.

-- Units of one lot in _foreseen, and of those in which they go on, of which the last one counts.
create type metered.idle_units as (
    place     int,          -- of the lot, or of the one whose plan brings it
    nth       int,          -- so many periods later than that
    born      bigint,       -- the age of the units, in microseconds
    rank      bigint,       -- the order of those of one age
    begins    timestamptz,  -- when the lot begins, or null: it has begun
    ends      timestamptz,  -- when the last one ends
    links     int,          -- how often they went on
    since     timestamptz,  -- and since when in the last one
    units     bigint,
    held      bigint,
    roll_cap  bigint,
    roll_end  timestamptz,
    roll_again int,
    shares    text,         -- a cap with the units of this category, or null
    rolled    boolean);     -- such a cap counts them

-- Whether more periods of plans are due in a wallet than one step writes: not where a lot would have more
-- units than one may have.
create function metered._is_idle(lots metered.lots[], until timestamptz) returns boolean
language plpgsql stable
as $$
begin
    return (select sum(x.due) > metered._events_per_step() and max(x.due * x.units) < 9007199254740992
        from (select (y.plan).renew_amount as units,
                  extract(epoch from until - y.starts_at) / extract(epoch from ((y.plan).renews).every) + 1 as due
              from unnest(lots) y
              where y.pending > 0 and y.starts_at <= until and ((y.plan).renews).every is not null) x)
        and cardinality(lots) < 200;
end
$$;

-- Units of a lot go on in another one at the time at, or lapse: then they are 0. taken are units that a
-- shared cap counts already.
create function metered._foreseen_on(u metered.idle_units, plan metered.lot_plan, at timestamptz, taken bigint)
returns metered.idle_units
language plpgsql stable
as $$
begin
    u.units := case when u.roll_cap is null then 0 else greatest(0, least(u.units, u.roll_cap - taken)) end;
    if u.units > 0 then
        u.links := u.links + 1;
        u.since := at;
        u.ends := u.roll_end;
        u.held := 0;
        u.rolled := true;
        if u.roll_again <> 0 then
            u.roll_end := metered._roll_end(u.ends, plan, plan.roll_for);
            u.roll_again := greatest(u.roll_again - 1, -1);
        else
            u.roll_cap := null;
        end if;
    end if;
    return u;
end
$$;

-- What becomes of the lots of a wallet until a time, and of those that its plans bring, if nobody touches
-- them. said has these lots, and of the others those that are left. Of the rest of a plan, by the place
-- of its lot, skipped counts the periods, the first of which begins at first_at. All these are over at over.
-- nths has how many periods later the present lot of a plan is.
create function metered._foreseen(lots metered.lots[], until timestamptz,
    out said metered.idle_units[], out nths int[], out skipped int[], out first_at timestamptz[],
    out over timestamptz)
language plpgsql stable
as $$
declare
    live   metered.idle_units[];
    ending metered.idle_units[];
    now    metered.idle_units;
    next   metered.idle_units;
    other  metered.idle_units;
    lot    metered.lots;
    begins timestamptz[];   -- by place: when the lot of a plan begins, or the next one
    ranks  bigint[];        -- and in which order
    count  bigint;
    taken  bigint;
    place  int;
    at     timestamptz;
begin
    said := '{}';
    begins := array_fill(null::timestamptz, array[cardinality(lots)]);
    first_at := begins;
    nths := array_fill(-1, array[cardinality(lots)]);
    skipped := array_fill(0, array[cardinality(lots)]);
    for now in
        select x.ordinality, 0, x.age[1], row_number() over (order by x.age),
            case when x.pending > 0 then x.starts_at end, x.expires_at, 0, null,
            x.pending + x.rest + x.kept, x.held, x.roll_cap, x.roll_end, (x.plan).roll_again,
            case when (x.plan).roll_shared then x.category end, x.origin = 'r'
        from unnest(lots) with ordinality x
        where x.pending + x.rest + x.kept + x.held > 0 order by x.age
    loop
        ranks[now.place] := now.rank;
        count := now.rank;
        if now.begins <= until then
            begins[now.place] := now.begins;
        else
            live := live || now;
        end if;
    end loop;
    loop
        at := least((select min(x.ends) from unnest(live) x), (select min(x) from unnest(begins) x));
        exit when (at <= until) is not true;
        select array_agg(x order by x.born, x.rank) filter (where x.ends <= at),
            array_agg(x) filter (where x.ends > at)
        into ending, live from unnest(live) x;
        foreach now in array coalesce(ending, '{}') loop
            taken := 0;
            if now.shares is not null and now.roll_cap is not null then
                foreach other in array coalesce(live, '{}') loop
                    if other.rolled and other.shares = now.shares then
                        taken := taken + other.units + other.held;
                    end if;
                end loop;
            end if;
            next := metered._foreseen_on(now, lots[now.place].plan, at, taken);
            if next.units > 0 then
                live := live || next;
            elsif now.nth = 0 then
                said := said || now;
            else
                skipped[now.place] := skipped[now.place] + 1;
                first_at[now.place] := coalesce(first_at[now.place], now.begins);
                over := at;
            end if;
        end loop;
        for place in
            select x.nth from unnest(begins) with ordinality x(due, nth) where x.due = at
            order by ranks[x.nth]
        loop
            lot := lots[place];
            count := count + 1;
            ranks[place] := count;
            nths[place] := nths[place] + 1;
            begins[place] := case when ((lot.plan).renews).every is not null
                then (metered._period_at((lot.plan).renews, at))[2] end;
            if nths[place] > 0 then
                lot.pending := (lot.plan).renew_amount;
                lot.expires_at := begins[place];
                lot.roll_end := case when lot.roll_cap is not null
                    then metered._roll_end(lot.expires_at, lot.plan, (lot.plan).roll_for) end;
            end if;
            live := live || row(place, nths[place], extract(epoch from at) * 1000000, count, at,
                lot.expires_at, 0, null, lot.pending, 0, lot.roll_cap, lot.roll_end,
                (lot.plan).roll_again, case when (lot.plan).roll_shared then lot.category end,
                false)::metered.idle_units;
        end loop;
    end loop;
    said := said || live;
end
$$;

-- The lot that the plan of another one brings for the period from a time on.
create function metered._lot_from(lot metered.lots, begins timestamptz) returns metered.lots
language plpgsql stable
as $$
begin
    lot.starts_at := begins - interval '1 microsecond';
    return metered._next_lot(lot);
end
$$;

-- Units that were foreseen end in their lot, after tip, and go on in the last one at once.
create function metered._end_foreseen(inout tip metered.ledger, inout l metered.lots, units metered.idle_units,
    new_no bigint, out made metered.lots, out entries metered.ledger[], out moves metered.lot_moves[])
language plpgsql stable
as $$
declare
    was  metered.lots := l;
    step record;
begin
    if units.links > 0 then
        l.expires_at := units.since;
        l.roll_end := units.ends;
        if (l.plan).roll_again > 0 then
            l.plan.roll_again := (l.plan).roll_again - units.links + 1;
        end if;
    end if;
    step := metered._end_lot(tip, l,
        l.roll_cap - case when units.links > 0 then units.units else 0 end, new_no);
    tip := step.tip;
    l := step.l;
    l.expires_at := was.expires_at;
    l.roll_end := was.roll_end;
    l.plan := was.plan;
    made := step.made;
    entries := step.entries;
    moves := step.moves;
end
$$;

-- The lot of so many skipped periods comes, after tip, and lapses. The first of them began at first_at, and the last one is
-- over at over. l is the lot whose plan brings them.
create function metered._end_skipped(inout tip metered.ledger, inout l metered.lots, periods int,
    first_at timestamptz, over timestamptz, lowered jsonb, new_no bigint,
    out made metered.lots, out entries metered.ledger[], out moves metered.lot_moves[])
language plpgsql stable
as $$
declare
    step record;
begin
    l := metered._lot_from(l, first_at);
    l.no := new_no;
    l.amount := l.amount * periods;
    l.pending := l.amount;
    l.expires_at := over;
    l.roll_cap := null;
    l.roll_end := null;
    l.again := false;
    l.reference := left(l.reference || '/' || ltrim(metered._period_name('', over)), 255);
    l.plan.renews := null;
    l.plan.renew_amount := null;
    step := metered._start_lot(metered._own_entry(tip, over), l, 0, null);
    entries := step.entries;
    moves := step.moves;
    tip := step.tip;
    tip.crossed := lowered;
    step := metered._end_lot(tip, step.l, null, null);
    tip := step.tip;
    l := step.l;
    entries := entries || step.entries;
    moves := moves || step.moves;
end
$$;

-- Writes what was foreseen, after tip, as _advance has it.
create function metered._awake(inout tip metered.ledger, until timestamptz, lowered jsonb,
    unwritten bigint, inout lots metered.lots[], said metered.idle_units[], nths int[],
    skipped int[], first_at timestamptz[], over timestamptz,
    out entries metered.ledger[], out moves metered.lot_moves[])
language plpgsql stable
as $$
declare
    was   metered.lots[] := lots;
    own   int[];        -- by units, the place of their lot
    last  int[];        -- and of the one in which they went on
    event record;
    units metered.idle_units;
    pos   int;
    step  record;
begin
    entries := '{}';
    moves := '{}';
    for event in
        with x as (select * from unnest(said) with ordinality)
        select x.ordinality as nth, 'ends' as what, coalesce(x.since, x.ends) as at, 1 as phase,
            x.born, x.rank
        from x where x.units > 0 and coalesce(x.since, x.ends) <= until
        union all
        select x.ordinality, 'is over', greatest(x.ends, x.since), 2, x.born, x.rank
        from x where x.links > 0 and x.ends <= until
        union all
        select s.place, 'was skipped', over, 2, 0, s.place
        from unnest(skipped) with ordinality s(periods, place) where s.periods > 0
        union all
        select x.ordinality, 'begins', x.begins, 3, x.born, x.rank from x where x.begins <= until
        order by 3, 4, 5, 6
    loop
        units := said[event.nth];
        pos := coalesce(own[event.nth], cardinality(lots) + 1);
        case event.what
            when 'begins' then
                if units.nth = 0 then
                    pos := units.place;
                else
                    lots[pos] := metered._lot_from(was[units.place], units.begins);
                    lots[pos].no := -pos;
                end if;
                own[event.nth] := pos;
                if units.nth < nths[units.place] then
                    lots[pos].plan.renews := null;
                    lots[pos].plan.renew_amount := null;
                end if;
                step := metered._start_lot(tip, lots[pos], unwritten, -1 - cardinality(lots));
            when 'ends' then
                pos := coalesce(own[event.nth], units.place);
                tip.crossed := lowered;
                step := metered._end_foreseen(tip, lots[pos], units, -1 - cardinality(lots));
                last[event.nth] := cardinality(lots) + 1;
            when 'is over' then
                pos := last[event.nth];
                tip.crossed := lowered;
                step := metered._end_lot(tip, lots[pos], lots[pos].roll_cap, null);
            else
                pos := cardinality(lots) + 1;
                step := metered._end_skipped(tip, was[event.nth], skipped[event.nth],
                    first_at[event.nth], over, lowered, -pos);
        end case;
        tip := step.tip;
        lots[pos] := step.l;
        entries := entries || step.entries;
        moves := moves || step.moves;
        if (step.made).no is not null then
            lots := lots || step.made;
        end if;
    end loop;
end
$$;

-- Whether units that come in a wallet pay overdraft.
create function metered._pays(lots metered.lots[], parts metered.lot_holds[],
    debts metered.lot_debts[], spent bigint) returns boolean
language plpgsql immutable
as $$
begin
    return spent + (select coalesce(sum(x.amount), 0) from unnest(parts) x where x.lot = 0) > 0
        and exists (select from unnest(lots) y
            where y.pending + y.rest + y.kept > 0 and ((y.plan).uses is null
                or (y.plan).uses && array(select x.use from unnest(debts) x where x.amount > 0)));
end
$$;

-- Applies what time alone does in a wallet up to a time, after its entry tip. lots are those that it
-- changes, and those on which that depends (_load_due). lines are in their order, and parts first those
-- of the lines, and then the overdrawn ones of other holds. spent is overdraft that no hold keeps, of
-- which debts were drawn for uses. unwritten are units of other lots that have ended. The entries
-- remember the thresholds lowered from the first one on that lowers the balance.
create function metered._advance(inout tip metered.ledger, until timestamptz, lowered jsonb,
    unwritten bigint, lines metered.due_line[], inout lots metered.lots[],
    inout parts metered.lot_holds[], inout debts metered.lot_debts[], inout spent bigint,
    out entries metered.ledger[], out moves metered.lot_moves[])
language plpgsql stable
as $$
declare
    at   timestamptz := tip.at;
    idle boolean := metered._is_idle(lots, until);
    seen record;
    step record;
begin
    entries := '{}';
    moves := '{}';
    loop
        -- One event after the other, as long as units that come pay overdraft, or holds fall due.
        if not idle then
            at := until;
        elsif lines[1] is not null then
            at := lines[cardinality(lines)].due;
        elsif metered._pays(lots, parts, debts, spent) then
            at := least(until, at + interval '480:00');
        else
            begin
                seen := metered._foreseen(lots, until);
                step := metered._awake(tip, until, lowered, unwritten, lots, seen.said, seen.nths,
                    seen.skipped, seen.first_at, seen.over);
                tip := step.tip;
                lots := step.lots;
                entries := entries || step.entries;
                moves := moves || step.moves;
                return;
            exception when sqlstate 'MT010' then
                at := until;        -- where a zone is lost, the event that meets it says which
            end;
        end if;
        step := metered._advance_each(tip, at, lowered, unwritten, lines, lots, parts, debts, spent);
        tip := step.tip;
        lots := step.lots;
        parts := step.parts;
        debts := step.debts;
        spent := step.spent;
        entries := entries || step.entries;
        moves := moves || step.moves;
        exit when at >= until;
        lines := '{}';
        idle := metered._is_idle(lots, until);
    end loop;
end
$$;
