-- When at most room units of a window's spending are left in it, if nothing else changes.
-- used and the base are those of _spent_since. Spending leaves entry by entry: the answer
-- is when the first entry leaves with which enough has left.
--
-- Spending and refunds are mostly even, so a probe looks where that entry would be if they
-- were. After a probe that does not halve the rest comes one that does. The refunds
-- of charges after an entry are dear to sum, but lie between the sums at both ends of
-- the rest, which decide most probes.
create function metered._leaves_at(tip metered.ledger, base_seq bigint, base_spent bigint, used bigint, win interval, room bigint) returns timestamptz
language plpgsql stable
as $$
declare
    too_few  bigint := base_seq;
    enough   bigint := tip.seq;
    most     bigint := tip.spent - base_spent - used;    -- refunds after too_few, and after enough
    fewest   bigint := 0;
    over     float8 := used - room;      -- the excess after too_few, and after enough
    under    float8 := -room;
    halve    boolean := false;
    span     bigint;
    step     bigint;
    excess   bigint;
    later    bigint;             -- refunded by then, and then the refunds of charges after it
    entry    record;
    at       timestamptz := tip.at;      -- of enough, as is the epoch
    in_epoch int := tip.epoch;
begin
    while enough - too_few > 1 loop
        span := enough - too_few;
        step := case when halve then span / 2 else greatest(1, least(span - 1, ceil(span * (over / (over - under)))::bigint)) end;
        select y.spent, y.refunded, y.at, y.epoch into strict entry from metered.ledger y where y.scope = tip.scope and y.seq = too_few + step;
        excess := tip.spent - entry.spent - room;
        later := most - (most - fewest) * (step::float8 / span);
        if excess > fewest and excess <= most then
            later := case when entry.refunded = tip.refunded then 0 else metered._refunds_after(tip.scope, tip.seq, too_few + step) end;
            if excess <= later then
                fewest := later;
            else
                most := later;
            end if;
        end if;
        if excess <= fewest then
            enough := too_few + step;
            under := excess - later;
            at := entry.at;
            in_epoch := entry.epoch;
        else
            too_few := too_few + step;
            over := excess - later;
        end if;
        halve := not halve and (enough - too_few) * 2 > span;
    end loop;
    if in_epoch < tip.epoch then   -- a repair is the first entry of its epoch
        at := least(at, (
            select min(r.at) from (select generate_series(in_epoch + 1, tip.epoch) limit 32767) g(e),
                 lateral (select k.at from metered.ledger k
                  where k.scope = tip.scope and k.epoch = g.e and (k.seq & 15 = 1 or k.kind = 'k')
                  order by k.at, k.seq limit 1) r));
    end if;
    return at + win;
end
$$;

-- Whether this transaction wrote the row of that xmin, in a savepoint of it or outside. The row
-- is visible, so a transaction that is in progress can only be this one. Asked in the query that reads the row: on Citus it
-- is answered by the node that has it.
create function metered._written_here(row_xmin xid) returns boolean
language plpgsql stable
as $$
declare
    own   numeric := pg_current_xact_id_if_assigned()::text::numeric;
    ahead numeric := row_xmin::text::numeric - own % 4294967296;
begin
    if own is null then     -- it has written nothing
        return false;
    end if;
    if ahead < 0 then
        ahead := ahead + 4294967296;
    end if;
    begin
        return ahead = 0 or ahead < 2147483648 and pg_xact_status((own + ahead)::text::xid8) = 'in progress';
    exception when invalid_parameter_value then     -- "in the future": an old row, from before the ids wrapped around
        return false;
    end;
end
$$;

-- Units of a scope that are held by this transaction itself, or by the holds of_nos, which it is about to capture. A refusal may not
-- wait for their end, since a rollback frees them. leased are units among them of leases. A writer has locked the scope, so this transaction's
-- entries are the last ones.
create function metered._held_here(tip metered.ledger, of_nos bigint[], out units bigint, out leased bigint)
language plpgsql stable
as $$
declare
    entry       record;
    ended       jsonb := '{}';   -- by hold: units that this transaction has spent or freed of it
    group_ended boolean := false;
begin
    units := 0;
    leased := 0;
    -- Without an id of its own the transaction has written nothing. On Citus another node may have the id.
    for back in 0..case when metered._sharded() or pg_current_xact_id_if_assigned() is not null then tip.seq else -1 end loop
        select l.kind, l.hold, l.amount, metered._written_here(l.xmin) as here into entry
        from metered.ledger l where l.scope = tip.scope and l.seq = tip.seq - back;
        exit when not found or not entry.here;
        if entry.kind = 'h' and group_ended then
            -- Rare: the entry of a group does not say how many units of this hold had ended.
            units := (select coalesce(sum(l.open), 0) from metered.hold_lines l
                where l.scope = tip.scope and l.open > 0 and l.due >= tip.next_due and metered._written_here(l.xmin) and metered._written_here((
                    select v.xmin from metered.hold_events v where v.hold = l.hold and v.version = 1)));
            leased := 0;
            exit;
        elsif entry.kind = 'h' then
            if entry.hold ~ '^lease/[0-9]{1,18}$' then  -- it may be the name of a hold
                leased := leased + coalesce((select y.granted from metered.leases y
                    where y.no = substr(entry.hold, 7)::bigint and y.scope = tip.scope and y.opened_seq = tip.seq - back and y.settled_at is null), 0);
            end if;
            units := units + greatest(0, entry.amount - coalesce((ended ->> entry.hold)::bigint, 0));
            ended := ended || jsonb_build_object(entry.hold, greatest(0, coalesce((ended ->> entry.hold)::bigint, 0) - entry.amount));
        elsif entry.kind in ('u', 'l', 'x') and entry.hold is not null then
            ended := ended || jsonb_build_object(entry.hold, coalesce((ended ->> entry.hold)::bigint, 0) + entry.amount);
        elsif entry.kind in ('u', 'l', 'x') then
            group_ended := true;
        end if;
    end loop;
    if of_nos is not null then
        units := units + (select coalesce(sum(l.open), 0) from metered.hold_lines l
            where l.hold = any (of_nos) and l.scope = tip.scope and l.open <> 0 and l.due >= tip.next_due and metered._written_here((
                select v.xmin from metered.hold_events v where v.hold = l.hold and v.version = 1)) is not true);
    end if;
    units := least(tip.held, units);
end
$$;

-- When the first unit that others hold of a scope falls due.
create function metered._others_fall_due(tip metered.ledger, of_nos bigint[], clk timestamptz) returns timestamptz
language plpgsql stable
as $$
declare
    line record;
    here boolean;
    own  timestamptz;
begin
    for skipped in 0..1000 loop     -- one by one: the planner would sort all that a loop over a query could want
        select x.due, x.hold, metered._written_here(x.row_xmin) as here into line
        from (select y.due, y.hold, y.xmin as row_xmin from metered.hold_lines y
              where y.scope = tip.scope and y.open > 0 and y.due >= tip.next_due and y.due > clk
              order by y.due limit 1 offset skipped) x;
        exit when not found;
        -- A line that was written here is of a hold that was placed, or only extended, here.
        here := (line.hold = any (of_nos)) is true;
        if line.here and not here then
            select metered._written_here(e.xmin) into here from metered.hold_events e where e.hold = line.hold and e.version = 1;
        end if;
        if here is not true then
            return line.due;
        end if;
        own := coalesce(own, line.due);
    end loop;
    return coalesce(own, greatest(clk, tip.next_due));
end
$$;

-- Who holds the held units of a scope that a limit refuses: this transaction, or the holds of_nos (own),
-- leases until leases_end (leased), and others. falls_due is when the first unit becomes free that is not own.
create function metered._who_holds(tip metered.ledger, held bigint, of_nos bigint[], clk timestamptz,
    out own bigint, out leased bigint, out falls_due timestamptz, out leases_end timestamptz)
language plpgsql stable
as $$
declare
    here record;
    open_leases record;
begin
    here := metered._held_here(tip, of_nos);
    own := here.units;
    leased := 0;
    if held <= own then
        return;
    end if;
    open_leases := metered._leased_units(tip.scope, here.leased);
    leased := open_leases.units;
    if held > own + leased then
        falls_due := metered._others_fall_due(tip, of_nos, clk);
    end if;
    if leased > 0 then
        -- One that has ended waits for its settlement: pools look every 2 seconds.
        leases_end := case when open_leases.ends_at > clk then open_leases.ends_at else clk + interval '2 s' end;
        falls_due := least(falls_due, leases_end);
    end if;
end
$$;

-- When a limit by period admits units that find no room before their period ends: then, or when enough of
-- the units that are still held then, and of minima of that very moment, have left. own and so on are as in _who_holds.
create function metered._fits_after_period(tip metered.ledger, lim metered.charge_limit, units bigint, period_end timestamptz,
    own bigint, leased bigint, leases_end timestamptz, clk timestamptz, of_nos bigint[]) returns timestamptz
language plpgsql stable
as $$
declare
    minima    record;
    held_then bigint;
begin
    minima := metered._minima_leave(tip, lim, period_end, period_end + interval '1 microsecond', clk, of_nos);
    held_then := tip.held - case when leases_end <= period_end then leased else 0 end
        - case when tip.next_due <= period_end then metered._due_units(tip.scope, tip.next_due, period_end) else 0 end
        + coalesce(minima.units[1], 0);
    if greatest(held_then, own) <= lim.max - units then
        return period_end;
    end if;
    minima := metered._minima_leave(tip, lim, period_end, 'infinity', clk, of_nos);
    return metered._fits_at(tip, lim, lim.max - own - units, 0, null,
        coalesce(metered._first_due(tip.scope, tip.next_due, period_end), greatest(period_end, leases_end)),
        minima.units, minima.leave);
end
$$;

-- The use of a limit that refuses nothing, where its window or period begins before the entries that a purge has kept. A known
-- use of either is 0 or more.
create function metered._unknown_use() returns bigint
language sql immutable
as $$
    select -4611686018427387904
$$;

-- Checks the limits of one call. Every refusal of a charge or of a hold by a limit falls here.
-- tips are the last entries of the charges' scopes, and held has the units of open holds of each.
-- used has the units that count against each limit, without held ones (or _unknown_use). refused lists every closed scope, or every limit that refuses:
--   limit     its number in the call, from 0 on
--   held      units that others hold; own: that this transaction holds, or the holds of_nos, which it captures; leased: on leases
--   retry_us  microseconds until it admits the charge, -1 for never: a lifetime's spending does not age
--   due_us    microseconds until a hold falls due
--   period    of a limit by period
--
-- A caller that has looked at some limits passes its results: used of these, and the base of the last one (known).
create function metered._check_limits(charges metered.new_charge[], tips metered.ledger[], held bigint[],
    clk timestamptz, ahead interval, of_nos bigint[], known metered.counted,
    inout used bigint[], out refused jsonb)
language plpgsql stable
as $$
declare
    charge      metered.new_charge;
    lim         metered.charge_limit;
    nth         int := 0;
    nth_limit   int := 0;
    tip         metered.ledger;
    counts      bigint;
    own         bigint;
    room        bigint;
    since       timestamptz;
    found_units record;
    base_seq    bigint := known.base_seq;
    base_spent  bigint := known.base_spent;
    retry       timestamptz;
    falls_due   timestamptz;  -- the first unit that others hold
    leased      bigint;
    leases_end  timestamptz;
    span        timestamptz[];   -- of a limit by period
    minima      record;           -- minima, and when they leave
    fits        timestamptz;
    spent       bigint;
    apart       bigint;           -- units that count and are in no entry: of tallies, and minima of due holds
begin
    foreach tip in array tips loop
        if tip.next_due = '-infinity' then
            refused := metered._with_absent(refused, tip.scope, 'closed');
        end if;
    end loop;
    if refused is not null then
        return;
    end if;
    foreach charge in array charges loop
        nth := nth + 1;
        tip := tips[nth];
        foreach lim in array charge.limits loop
            nth_limit := nth_limit + 1;
            continue when nth_limit < known.nth;
            counts := used[nth_limit];
            span := case when lim.win is null then metered._period_at(lim.period, greatest(clk, tip.at)) end;
            since := null;
            apart := 0;
            if counts is null and lim.win = interval '0' then
                counts := tip.spent - tip.refunded - tip.credited;
            elsif counts is null then
                if (tip.at <= clk + ahead) is not true and lim.max < 9223372036854775807 then
                    raise exception 'the last entry is ahead of the clock'
                        using errcode = 'MT003', detail = jsonb_build_object('scope', tip.scope,
                            'ahead_us', (extract(epoch from tip.at - clk) * 1000000)::bigint);
                end if;
                since := coalesce(greatest(clk, tip.at) - lim.win, span[1] - interval '0.000001');
                counts := 0;
                if tip.at > since then
                    -- A limit that refuses nothing (Limit.Observe) does so, too, where its use is not known.
                    if lim.max = 9223372036854775807 and (metered._base(tip.scope, tip.seq, tip.epoch, since)).seq is null then
                        used[nth_limit] := metered._unknown_use();
                        continue;
                    end if;
                    found_units := metered._spent_since(tip, since);
                    counts := found_units.used;
                    base_seq := found_units.base_seq;
                    base_spent := found_units.base_spent;
                end if;
            end if;
            if tip.tallied then
                apart := (metered._tallied_units(tip, since)).units;
            end if;
            if tip.next_due <= clk then
                apart := apart + metered._minima(tip, since, clk);
            end if;
            counts := counts + apart;
            used[nth_limit] := counts;
            continue when counts <= lim.max - held[nth] - charge.amount;
            own := 0;
            leased := 0;
            falls_due := null;
            leases_end := null;
            if held[nth] > 0 then
                found_units := metered._who_holds(tip, held[nth], of_nos, clk);
                own := found_units.own;
                leased := found_units.leased;
                falls_due := found_units.falls_due;
                leases_end := found_units.leases_end;
            end if;
            retry := null;
            room := lim.max - held[nth] - charge.amount;
            if lim.win > interval '0' and room >= 0 and apart = 0 then
                retry := metered._leaves_at(tip, base_seq, base_spent, counts, lim.win, room);
            elsif lim.win > interval '0' and room >= 0 then
                minima := metered._minima_leave(tip, lim, '-infinity', clk + interval '1 microsecond', clk, of_nos);
                retry := metered._fits_at(tip, lim, room, counts - apart, row(nth_limit, base_seq, base_spent), clk, minima.units, minima.leave);
            end if;
            -- The end of holds can make room, sooner or at all: but for their minima, until these have left.
            room := lim.max - own - charge.amount;
            spent := counts - apart;
            if lim.win = interval '0' then    -- it may be less than 0
                room := greatest(-1, least(9223372036854775807, room::numeric - spent))::bigint;
                spent := 0;
            end if;
            if room >= 0 and falls_due < coalesce(retry, 'infinity') and falls_due < coalesce(span[2], 'infinity') then
                minima := metered._minima_leave(tip, lim, '-infinity', 'infinity', clk, of_nos);
                fits := metered._fits_at(tip, lim, room, spent, row(nth_limit, base_seq, base_spent), falls_due, minima.units, minima.leave);
                retry := least(retry, case when span is null or fits < span[2] then fits end);
            end if;
            if lim.win is null and room >= 0 and retry is null then
                retry := metered._fits_after_period(tip, lim, charge.amount, span[2], own, leased, leases_end, clk, of_nos);
            end if;
            refused := coalesce(refused, '[]') || jsonb_build_object(
                'limit', nth_limit - 1, 'used', counts, 'held', held[nth] - own - leased, 'own', own, 'leased', leased,
                'retry_us', coalesce((extract(epoch from retry - clk) * 1000000)::bigint, -1),
                'due_us', (extract(epoch from falls_due - clk) * 1000000)::bigint,
                'period', span);
        end loop;
    end loop;
end
$$;

-- Fails with 40001 unless tips are still the last entries of their scopes, which are locked: a refusal that rests on an old
-- snapshot must not be final. It writes an entry after each, which collides with one that the snapshot does not see, and takes it back.
create function metered._refuse_stale(tips metered.ledger[]) returns void
language plpgsql volatile
as $$
declare
    tip metered.ledger;
begin
    foreach tip in array tips loop
        perform from metered.ledger l where l.scope = tip.scope and l.seq = tip.seq for key share;
        tip.seq := tip.seq + 1;
        tip.amount := 1;
        tip.at := coalesce(nullif(tip.at, '-infinity'), metered.clock());
        tip.kind := 'c';
        perform metered._append(tip);
    end loop;
    {take back};
end
$$;

-- Checks charges of scopes with due holds. If they are let in, all due holds are freed. stand are the
-- last entries after that. A charge that is let in because lines are due is let in for good, so they
-- are freed for good: a clock that is set back must not bring them to life.
create function metered._expire_and_check(charges metered.new_charge[], tips metered.ledger[], clk timestamptz,
    ahead interval, wait_ms int, of_nos bigint[],
    out stand metered.ledger[], out used bigint[], out held bigint[], out refused jsonb)
language plpgsql volatile
as $$
declare
    tip     metered.ledger;
    freed   text[];             -- scopes with units that due lines free
    due     record;
    verdict record;
    charge  metered.new_charge;
begin
    -- If the key were another scope's, the reads below would not be under the lock.
    foreach charge in array charges loop
        {refuse: when = not metered._key_fits(charge.key, charge.scope), what = key};
    end loop;
    foreach tip in array tips loop
        select count(*) as lines, coalesce(sum(l.open), 0) as units into due
        from metered.hold_lines l
        where tip.next_due <= clk and l.scope = tip.scope and l.open > 0
          and l.due >= tip.next_due and l.due <= clk;
        if tip.lots_end is not null and due.lines > metered._lines_per_step() then
            perform metered._refuse_behind(tip.scope);
        end if;
        held := held || tip.held - due.units::bigint;
        if due.units > 0 then
            freed := freed || tip.scope;
        end if;
    end loop;
    stand := tips;
    tips := metered._without_lapsing(tips, clk);     -- a bound, where not all is ended that is due
    verdict := metered._check_limits(charges, tips, held, clk, ahead, of_nos, null, null);
    used := verdict.used;
    refused := verdict.refused;
    for i in 1..cardinality(stand) loop
        stand[i].crossed := tips[i].crossed;
    end loop;
    if refused is not null or freed is null then
        return;
    end if;
    perform metered._end_due(freed, clk, wait_ms);
    for i in 1..cardinality(stand) loop
        continue when stand[i].scope <> all (freed);
        stand[i] := metered._entry_for_write(stand[i].scope);
        if stand[i].held > held[i] then
            perform metered._collided();
        end if;
    end loop;
end
$$;
