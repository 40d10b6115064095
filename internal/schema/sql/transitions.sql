-- Why there is no hold with this id: retired or unknown. An old snapshot may miss a hold that was
-- placed since: then an insertion fails with 40001. The block takes it back. So a caller that names
-- a holder may learn that somebody has placed the id since its snapshot, and no more: its next try
-- finds another's hold as unknown as none.
create function metered._missing_hold(of_tenant text, of_id text, issued timestamptz, wait_ms int)
    returns text
language plpgsql volatile
as $$
begin
    if exists (select from metered.cell) then
        perform metered._refuse_moved(of_tenant);   -- it may be in the tenant's cell
    end if;
    if issued <= (select z.at from metered.holds_horizon z where z.one) then
        return 'retired';
    end if;
    if metered._one_snapshot() then
        begin
            perform metered._bound_lock_wait(wait_ms);
            insert into metered.holds (placed_at, deadline, due, ceiling, version, state, tenant,
                id, holder, fingerprint, keys)
            values ('epoch', 'epoch', 'epoch', 'epoch', 0, 'x', of_tenant, of_id, '', '', '{}')
            on conflict do nothing;
            {take back};
        end;
    end if;
    return 'unknown';
end
$$;

-- Locks holds of a tenant for a transition: the scopes of their lines, by key, and then their rows,
-- by no. nos are in the order of ids. needs is the state that they must be in, c or h, or * for
-- either. An h must not be due. States and clk are read under the locks. If a hold does not fit,
-- failed is its id and status says why: unknown, retired, holder (which callers must not tell from
-- unknown) or state.
--
-- A hold's holder never changes, and is looked at before anything is locked: a lock, a wait, or a
-- 40001 would tell another's hold from none.
create function metered._lock_holds(named metered.hold_ids, needs "char", wait_ms int,
    out nos bigint[], out keys bigint[], out clk timestamptz, out status text, out failed text,
    out stands "char", out failed_no bigint)
language plpgsql volatile
as $$
declare
    of_tenant text := named.tenant;
    of_holder text := named.holder;
    ids       text[] := named.ids;
    this_hold record;
    seen      bigint[];
    waited    boolean;
    before    text;
begin
    -- Nearly always there is one, and nobody is in its way. Then nothing waits, and the order
    -- in which it is all locked does not matter. Otherwise the locks that it got are the
    -- first of its scopes' by key, or all of them and perhaps its row: in order, for what
    -- comes below. The row that is locked is read as it is by then, whatever the snapshot.
    if cardinality(ids) = 1 then
        select y.no, y.keys, y.state, y.due into this_hold from metered.holds y
        where y.tenant = of_tenant and y.id = ids[1]
          and case when of_holder = '' or y.holder = of_holder then metered._try_keys(y.keys) end
        for no key update skip locked;
        if found then
            clk := metered.clock();     -- after the lock
            if (this_hold.state = needs or needs = '*' and this_hold.state in ('h', 'c'))
                and (this_hold.state <> 'h' or this_hold.due > clk) then
                nos := array[this_hold.no];
                keys := this_hold.keys;
                return;
            end if;
        end if;
    end if;
    perform metered._require(array_lower(ids, 1) = 1
        and cardinality(ids) <= 100
        and cardinality(ids) = (select count(distinct id) from unnest(ids) id), 'ids');
    keys := '{}';
    for i in 1..cardinality(ids) loop
        select y.no, y.keys, y.holder into this_hold
        from metered.holds y
        where y.tenant = of_tenant and y.id = ids[i];
        if this_hold.no is null or of_holder <> '' and this_hold.holder <> of_holder then
            -- An id that does not exist would be retired with such an id, and so is another
            -- tenant's.
            status := case
                when this_hold.no is null
                    then metered._missing_hold(of_tenant, ids[i], named.issued[i], wait_ms)
                when named.issued[i] <= (select z.at
                    from metered.holds_horizon z where z.one) then 'retired'
                else 'holder' end;
            failed := ids[i];
            return;
        end if;
        seen := seen || this_hold.no;
        keys := keys || this_hold.keys;
    end loop;
    select coalesce(array_agg(k.key order by k.key), '{}') into keys
    from (select distinct unnest(keys)) k(key);
    waited := metered._lock_keys(keys, wait_ms);
    before := metered._bound_lock_wait(wait_ms);
    perform from metered.holds y where y.no = any (seen) order by y.no for no key update;
    before := metered._unbound_lock_wait(before);
    clk := metered.clock();     -- after the lock
    for i in 1..cardinality(ids) loop
        -- One that took the id of one purged while this waited is not locked: it comes too late.
        select y.no, y.state, y.due into this_hold from metered.holds y
        where y.tenant = of_tenant and y.id = ids[i] and y.no = any (seen);
        if (this_hold.state = needs or needs = '*' and this_hold.state in ('h', 'c'))
            and (this_hold.state <> 'h' or this_hold.due > clk) then
            nos[i] := this_hold.no;
            continue;
        end if;
        failed := ids[i];
        if this_hold.no is null then
            status := case when named.issued[i] <= (select z.at
                    from metered.holds_horizon z where z.one) then 'retired' else 'unknown' end;
        else
            status := 'state';
            stands := case when this_hold.state = 'h' and this_hold.due <= clk then 'x'
                else this_hold.state end;
            failed_no := this_hold.no;
        end if;
        return;
    end loop;
end
$$;

-- Answers a refused transition, or raises the answer. json, since a hold may be in it
-- whose metadata is none to jsonb: \u0000, half a surrogate pair, 1e200000.
create function metered._refuse_hold(raising boolean, answer json) returns json
language plpgsql
as $$
begin
    if raising then
        raise exception 'the hold does not allow it' using errcode = 'MT007', detail = answer;
    end if;
    return answer;
end
$$;

-- Captures holds, all or none: spends all their units (used is null), or units of the scopes of one
-- hold. A scope whose amount is null spends all, and its limits only report thresholds. refused is
-- null, or why nothing was written.
--
-- Thresholds on spending alone are judged twice: first for all units, so that nothing is written if
-- the caller does not report. Then for the covered units, after the excess.
create function metered.capture_holds(named metered.hold_ids, used metered.used_units[],
    terms metered.capture_terms, ahead interval, wait_ms int, origin metered.origin, channel text,
    raising boolean,
    out refused json, out holds json[], out crossed jsonb)
language plpgsql volatile
as $$
declare
    locked   record;
    own      text;
    line     record;
    asked    metered.used_units;
    crossing record;
    tip      metered.ledger;
    whole    boolean := used is null or (used[1]).amount is null;
    take     bigint;
    covered  bigint;
    spent    metered.charge_limit[];
    takes    metered.new_charge[];  -- covered units of scopes with such thresholds
    watched  text[];                -- these
    scopes   text[];                -- of used
    units    bigint[];
    excess   metered.new_charge[];
    beyond   record;                -- the excess as it was charged
    detail   jsonb;
    lines    json[];
    which    int;
    row_now  metered.holds;
    hold     json;
    ended    boolean := false;      -- lines that are due before a minimum that is
    unused   text;
    marked   boolean;
begin
    {refuse: when = (terms.closing and terms.policy in ('refuse', 'fit', 'upto', 'even', 'allow')
        and (used is null or cardinality(named.ids) = 1)
        or not terms.closing and used is not null) is not true, what = terms};
    locked := metered._lock_holds(named, 'h', wait_ms);
    {unlocked};
    if used is not null then
        {capture asked}
    end if;
    if excess is not null then
        beyond := metered._charge_excess(excess, scopes, units, terms.policy, ahead, wait_ms,
            origin, row(named.ids[1], null, locked.nos, locked.clk), raising);
        refused := beyond.refused;
        if refused is not null then
            return;
        end if;
        excess := beyond.excess;
        units := beyond.units;
        crossed := beyond.crossed;
    end if;
    for i in 1..cardinality(named.ids) loop
        detail := '[]';
        lines := '{}';
        for line in
            select y.scope, y.amount, y.captured, y.open, y.due, y.opened_seq,
                y.refunded as given_back, y.at_least,
                t.seq, t.at, t.spent, t.refunded, t.credited, t.held, t.epoch, t.next_due,
                t.anchor_at, t.anchor_spent, t.lots_end, t.crossed, t.tallied, t.others
            from metered.hold_lines y left join lateral (
                select *
                from metered.ledger e
                where e.scope = y.scope order by e.seq desc limit 1 for key share) t on true
            where y.hold = locked.nos[i] order by y.scope
        loop
            take := case when whole then line.open
                else coalesce(units[array_position(scopes, line.scope)], 0) end;
            covered := least(take, line.open);
            if covered > 0 or terms.closing and line.open > 0 then
                -- The latter was freed before the clock was set back.
                if line.seq is null or line.open > 0
                    and (line.due >= line.next_due) is not true then
                    perform metered._collided();
                end if;
                {capture tip}
                if covered > 0 then
                    {capture spent}
                end if;
                if terms.closing and covered < line.open then
                    {capture rest}
                end if;
                marked := metered._mark_freed(line.scope);
            end if;
            {capture line}
        end loop;
        update metered.holds y
        set version = y.version + 1, entity = coalesce(terms.entity, y.entity),
            state = case when terms.closing then 'c' else 'h' end::"char",
            ended_at = case when terms.closing then locked.clk end, pending = not terms.closing
        where y.no = locked.nos[i] returning y.* into row_now;
        hold := metered._hold_as_json(row_now, array_to_json(lines), locked.clk, null);
        holds[i] := hold;
        insert into metered.hold_events (hold, at, version, kind, entity, detail, note,
            operation_tenant, operation)
        values (locked.nos[i], locked.clk, row_now.version,
            case when terms.closing then 'c' else 'p' end, terms.entity,
            detail, origin.note, origin.tenant, origin.operation);
        if channel is not null then
            perform metered._announce(channel, named.tenant, named.ids[i], row_now.version,
                case when terms.closing then 'captured' else 'captured_part' end);
        end if;
        unused := case when origin.operation is not null then metered._remember_hold(hold) end;
    end loop;
end
$$;

-- Charges what a capture takes beyond the held units of its lines, by its policy, and before it
-- takes these: held units and units spent of them count the same. It returns what was charged
-- (excess, seqs, ats), the units of each scope that the capture takes then, or why the policy
-- refuses.
create function metered._charge_excess(inout excess metered.new_charge[], scopes text[],
    inout units bigint[],
    policy text, ahead interval, wait_ms int, origin metered.origin, terms metered.hold_terms,
    raising boolean,
    out seqs bigint[], out ats timestamptz[], out crossed jsonb, out refused json)
language plpgsql volatile
as $$
declare
    posted  record;
    fitting metered.new_charge[];
    covered bigint;
begin
    while excess is not null loop
        if policy = 'allow' then
            posted := metered._charge_anyway(excess, ahead, wait_ms, origin, terms);
        else
            posted := metered._write_charges(excess, ahead, wait_ms, origin, 'answer', terms,
                false);
        end if;
        seqs := posted.seqs;
        ats := posted.ats;
        crossed := posted.crossed;
        exit when posted.refused is null;
        if posted.refused -> 0 ? 'crossing' and raising then
            perform metered._refuse_unreported();
        end if;
        fitting := case when policy in ('upto', 'even') and not posted.refused -> 0 ? 'crossing'
            then metered._as_far_as_admitted(excess, posted.refused,
                policy = 'even') else excess end;
        if fitting = excess then
            refused := metered._refuse_hold(raising,
                json_build_object('status', 'refused', 'refused', posted.refused,
                'scopes', (select json_agg(e.scope) from unnest(excess) e),
                'units', (select json_agg(e.amount) from unnest(excess) e)));
            return;
        end if;
        excess := fitting;
    end loop;
    if policy in ('upto', 'even') then
        for which in 1..cardinality(scopes) loop
            select y.open into covered
            from metered.hold_lines y
            where y.hold = terms.nos[1] and y.scope = scopes[which];
            units[which] := least(units[which],
                covered + coalesce((select e.amount
                        from unnest(excess) e where e.scope = scopes[which]), 0));
        end loop;
    end if;
end
$$;

-- Releases holds, all or none.
create function metered.release_holds(named metered.hold_ids, wait_ms int, origin metered.origin,
    channel text, raising boolean,
    out refused json, out holds json[])
language plpgsql volatile
as $$
declare
    locked  record;
    row_now metered.holds;
    hold    json;
    unused  text;
begin
    locked := metered._lock_holds(named, 'h', wait_ms);
    {unlocked};
    perform metered._release_lines(locked.nos, null, 'l', locked.clk,
        case when cardinality(named.ids) = 1 then named.ids[1] end, origin);
    for i in 1..cardinality(named.ids) loop
        update metered.holds y
        set version = y.version + 1, state = 'r', ended_at = locked.clk, pending = false
        where y.no = locked.nos[i] returning y.* into row_now;
        select json_agg(metered._line_json(l.scope, l.amount, l.captured, 0, l.refunded,
                l.at_least) order by l.scope) into hold
        from metered.hold_lines l where l.hold = locked.nos[i];
        hold := metered._hold_as_json(row_now, hold, locked.clk, origin.note ->> 'reason');
        holds[i] := hold;
        insert into metered.hold_events (hold, at, version, kind, note, operation_tenant, operation)
        values (locked.nos[i], locked.clk, row_now.version, 'r', origin.note, origin.tenant,
            origin.operation);
        {announce: tenant = named.tenant, id = named.ids[i], version = row_now.version,
            what = 'released'};
        unused := case when origin.operation is not null then metered._remember_hold(hold) end;
    end loop;
end
$$;

-- Extends holds, all or none: each deadline by "by", no deadline past its ceiling, nor so far that
-- JSON has no such year.
create function metered.extend_holds(named metered.hold_ids, by interval, wait_ms int,
    origin metered.origin, channel text, raising boolean,
    out refused json, out holds json[])
language plpgsql volatile
as $$
declare
    locked    record;
    this_hold record;
    deadlines timestamptz[];    -- the new ones
    dues      timestamptz[];
    ends      timestamptz;         -- of one: Citus 13 crashes over an element of an array in a SET
    due_at    timestamptz;
    unused    text;
begin
    {refuse: when = (by > interval '0' and by <= interval '3660 days') is not true, what = by};
    locked := metered._lock_holds(named, 'h', wait_ms);
    {unlocked};
    for i in 1..cardinality(named.ids) loop
        select y.deadline, y.due, least(y.ceiling, '9980-01-01 00:00:00+00') as ceiling
        into this_hold
        from metered.holds y
        where y.no = locked.nos[i];
        if this_hold.deadline <= locked.clk then     -- in its grace, which is for captures
            refused := metered._refuse_hold(raising,
                json_build_object('status', 'state', 'id', named.ids[i], 'state', 'x',
                'hold', metered.hold_json(locked.nos[i], locked.clk)));
        -- a month can be shorter than 30 days
        elsif this_hold.deadline + by <= this_hold.deadline
            or this_hold.due + by < this_hold.deadline + by then
            perform metered._require(false, 'by');
        elsif this_hold.deadline + by > this_hold.ceiling then
            refused := metered._refuse_hold(raising,
                json_build_object('status', 'ceiling', 'id', named.ids[i],
                'left_us', (extract(epoch from this_hold.ceiling - this_hold.deadline)
                    * 1000000)::bigint));
        end if;
        if refused is not null then
            return;
        end if;
        deadlines[i] := this_hold.deadline + by;
        dues[i] := this_hold.due + by;
    end loop;
    perform metered._collided() from metered.hold_lines l   -- freed before the clock was set back
    where l.hold = any (locked.nos) and l.open <> 0 and (l.due >= (
        select t.next_due
        from metered.ledger t
        where t.scope = l.scope order by t.seq desc limit 1)) is not true;
    for i in 1..cardinality(named.ids) loop
        ends := deadlines[i];
        due_at := dues[i];
        update metered.holds y set version = y.version + 1, deadline = ends, due = due_at
        where y.no = locked.nos[i] returning y.version, y.deadline, y.due into this_hold;
        update metered.hold_lines l set due = this_hold.due where l.hold = locked.nos[i];
        insert into metered.hold_events (hold, at, deadline, version, kind, note, operation_tenant,
            operation)
        values (locked.nos[i], locked.clk, this_hold.deadline, this_hold.version, 'e', origin.note,
            origin.tenant, origin.operation);
        {announce: tenant = named.tenant, id = named.ids[i], version = this_hold.version,
            what = 'extended'};
        holds[i] := metered.hold_json(locked.nos[i], locked.clk);
        unused := case when origin.operation is not null then metered._remember_hold(holds[i]) end;
    end loop;
end
$$;
