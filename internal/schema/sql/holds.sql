-- Placing holds, and the locks of a command that does several things.

-- Takes the locks of a command that does several things to scopes and holds, in the one
-- order: all scopes, by key, with those of the named holds, unless these are
-- another holder's (see _lock_holds); the ids that it places, by key; then rows of holds, by
-- no: of the named holds, and of due holds that could be in its way in scopes that it
-- may charge. A command that names thousands of scopes needs a larger lock table.
--
-- A hold that was not there before the locks, and is there after them, was placed while this
-- waited. Its scopes are not locked, and would be locked late: the whole is to be tried again.
create function metered.lock_all(keys bigint[], id_keys bigint[], scopes text[],
    named metered.hold_ids[], wait_ms int) returns void
language plpgsql volatile
as $$
declare
    nos    bigint[];
    there  bigint[];
    due    bigint[];
    clk    timestamptz;
    before text;
begin
    {refuse: when = (cardinality(keys) + cardinality(id_keys) + cardinality(scopes) < 10000
            and cardinality(named) < 1000) is not true, what = locks};
    nos := metered._named_holds(named);
    if nos is not null then
        select array_agg(k.key order by k.key) into keys
        from (select unnest(h.keys)
            from metered.holds h where h.no = any (nos) union select unnest(keys)) k(key);
    end if;
    if metered._lock_keys(keys || id_keys, wait_ms) then
        -- so sums have tallies from now on
        before := set_config('metered_tx.waited', 'true', true);
    end if;
    if cardinality(named) > 0 then
        there := metered._named_holds(named);
        if not coalesce(there, '{}') <@ coalesce(nos, '{}') then
            raise exception 'could not serialize access: a hold was placed meanwhile'
                using errcode = '40001';
        end if;
    end if;
    clk := metered.clock();
    -- As many as _end_due would take. If another one falls due before it looks, that one is locked
    -- out of order.
    select array_agg(d.hold) into due
    from unnest(scopes) s(scope),
         lateral (select l.next_due
             from metered.ledger l where l.scope = s.scope order by l.seq desc limit 1) t,
         lateral (select l.hold from metered.hold_lines l
          where t.next_due <= clk
              and l.scope = s.scope
              and l.open > 0
              and l.due >= t.next_due
              and l.due <= clk
          order by l.due limit metered._events_per_step()) d;
    nos := nos || due;
    if nos is not null then
        before := metered._bound_lock_wait(wait_ms);
        perform from metered.holds h where h.no = any (nos) order by h.no for no key update;
        before := metered._unbound_lock_wait(before);
    end if;
end
$$;

-- The named holds, without those of another holder.
create function metered._named_holds(named metered.hold_ids[]) returns bigint[]
language plpgsql volatile
as $$
begin
    return (
        select array_agg(h.no)
        from unnest(named) n, lateral unnest(n.ids) i(id),
             lateral (select x.no, x.holder
                 from metered.holds x where x.tenant = n.tenant and x.id = i.id limit 1) h
        where n.holder = '' or h.holder = n.holder);
end
$$;

-- Notifies the listeners of the channel of a hold's transition. Every build reads the first fields:
-- more may be added, and none may change. With a + after the channel's name, the actor and the
-- present hold are added. Postgres takes less than 8,000 bytes. So the note is sent if it fits, and
-- as many lines, by scope. cut says that these are not all.
create function metered._announce(channel text, of_tenant text, of_id text, of_version int,
    of_kind text) returns void
language plpgsql volatile
as $$
declare
    said      text := json_build_object('tenant', of_tenant, 'id', of_id, 'version', of_version,
        'kind', of_kind);
    this_hold record;
    fitting   record;
    cut       boolean;
begin
    if right(channel, 1) = '+' then
        channel := left(channel, -1);
        -- Four texts of 255 bytes, of which JSON makes 6,120 at most.
        select y.no, y.state,
            json_build_object('state', case when y.returned then 'b' else y.state end,
                'holder', y.holder, 'deadline', y.deadline, 'at', e.at,
                'claim', y.claim)::text as stands,
            case when e.note is not null then json_strip_nulls(json_build_object(
                'actor', e.note ->> 'actor', 'tenant', e.note ->> 'tenant',
                'correlation', e.note ->> 'correlation',
                'reason', e.note ->> 'reason'))::text end as note
        into this_hold
        from metered.holds y
        left join metered.hold_events e on e.hold = y.no and e.version = of_version
        where y.tenant = of_tenant and y.id = of_id;
        said := left(said, -1) || ', ' || right(this_hold.stands, -1);
        cut := coalesce(octet_length(said) + octet_length(this_hold.note) >= 7900, false);
        if not cut and this_hold.note is not null then
            said := left(said, -1) || ', "note" : ' || this_hold.note || '}';
        end if;
        select coalesce(string_agg(x.line, ', ' order by x.scope) filter (where x.bytes < 7900),
            '') as sent, bool_or(x.bytes >= 7900) as cut into fitting
        from (select y.scope, j.line,
            octet_length(said) + sum(octet_length(j.line) + 2) over (order by y.scope) as bytes
              from metered.hold_lines y,
                  lateral (select metered._line_json(y.scope, y.amount, y.captured,
                  case when this_hold.state = 'h' then y.open else 0 end, y.refunded,
                  y.at_least)::text) j(line)
              where y.hold = this_hold.no) x;
        said := left(said, -1) || ', "lines" : [' || fitting.sent || ']'
            || case when cut or fitting.cut then ', "cut" : true}' else '}' end;
    end if;
    perform pg_notify(channel, said);
end
$$;

-- Takes the locks of a placement: its scopes, by key, and then the id that the caller chose.
create function metered._lock_place(charges metered.new_charge[], id_key bigint, wait_ms int)
    returns boolean
language plpgsql volatile
as $$
begin
    if cardinality(charges) = 1 and metered._try_lock(charges[1].key)
       and (id_key is null or metered._try_lock(id_key)) then
        return false;
    end if;
    return metered._lock_charges(charges, wait_ms)
        or id_key is not null and metered._lock_keys(array[id_key], wait_ms);
end
$$;

-- The refusal of place at this moment, without a lock, in a command that has begun (it is no
-- replay). status is taken, refused, or null. Null means that place would not refuse, or that only
-- place can decide: the hold was placed before, or the snapshot may be old. stored is the hold of a
-- taken claim, if reveal.
create function metered.look_place(hold metered.new_hold, charges metered.new_charge[],
    ahead interval, reveal boolean,
    out status text, out at timestamptz, out deadline timestamptz, out refused jsonb,
    out stored json)
language plpgsql stable
as $$
declare
    was record;
begin
    if coalesce(current_setting('metered_tx.command', true), '') = ''
        or metered._one_snapshot()
        or hold.chosen and exists (select from metered.holds h
            where h.tenant = hold.tenant and h.id = hold.id) then
        return;
    end if;
    if hold.claim is not null then
        at := metered.clock();
        select h.no, h.state, h.holder, h.due into was
        from metered.holds h
        where h.claim = hold.claim
            and (h.state = 'h' and h.due > at or h.state = 'c' and not h.returned);
        if found then
            if was.state = 'c' or was.holder <> hold.holder then
                status := 'taken';
                deadline := case when was.state = 'h' then was.due end;
                stored := case when reveal then metered.hold_json(was.no, at) end;
            end if;
            return;
        end if;
    end if;
    refused := (metered.check_charge(charges, ahead)).refused;
    status := case when refused is not null then 'refused' end;
end
$$;

-- Places a hold of the units that the charges hold, and charges the rest of their amounts, all or
-- none. status is placed, same (placed before, with the same content, which stored has), conflict
-- (with other content), retired, taken (of a claim: another holder has it, until deadline if that
-- is not null, and stored is their hold, if reveal) or refused. Of a hold up to so much (see
-- new_hold) stored is the hold.
--
-- If the caller chose the id, it is locked after the scopes: a call that places the same id
-- on other scopes waits there, as long as for a scope, and then sees the first one. An
-- id that was made up for this call is not looked for.
create function metered.place(hold metered.new_hold, charges metered.new_charge[], ahead interval, wait_ms int,
    origin metered.origin, channel text, raising boolean, reveal boolean default false,
    out status text, out placed_at timestamptz, out deadline timestamptz,
    out seqs bigint[], out ats timestamptz[], out refused jsonb, out stored json, out crossed jsonb)
language plpgsql volatile
as $$
declare
    posted    record;
    was       record;
    clk       timestamptz;
    due_in    interval := hold.ttl + hold.grace;
    line_keys bigint[] := '{}';
    lines     jsonb := '[]';
    claimed   boolean := hold.claim is null;
    new_no    bigint;
    unused    text;
    charge    metered.new_charge;
    minima    int;
    mode      text := case when raising then 'raise' else 'answer' end;
    fewest    bigint;      -- units of each line, of a hold up to so much
    over      bigint;      -- the claim's last hold, if it is due
begin
    minima := cardinality(hold.minimum);
    if minima > 0 and (hold.minimum[minima]).scope = '' then
        fewest := (hold.minimum[minima]).amount;
        hold.minimum := nullif(hold.minimum[:minima - 1], '{}');
        perform metered._require((select min(x.held) = max(x.held) and fewest between 1 and min(x.held) from unnest(charges) x where x.held > 0), 'up to');
    end if;
    foreach charge in array charges loop
        if charge.held > 0 then
            if charge.key is null then
                charge.key := metered._scope_key(charge.scope);
                charges := metered._with_keys(charges);
            elsif not metered._key_fits(charge.key, charge.scope) then
                perform metered._require(false, 'key');
            end if;
            line_keys := line_keys || charge.key;
            claimed := claimed or charge.scope = hold.claim and charge.held = 1;
        end if;
    end loop;
    if (claimed and line_keys <> '{}' and hold.ttl > interval '0' and hold.grace >= interval '0' and hold.ttl <= coalesce(hold.lifetime, interval '3660 days')
        and hold.grace <= interval '3660 days' and coalesce(hold.lifetime <= interval '3660 days', true)
        and hold.tenant is not null and hold.id <> '' and hold.holder is not null and octet_length(hold.fingerprint) = 33) is not true then
        perform metered._require(false, 'hold');
    end if;
    if cardinality(line_keys) > 1 then
        line_keys := array(select distinct k from unnest(line_keys) k order by k);
    end if;
    if hold.chosen or hold.claim is not null then
        unused := metered._lock_place(charges, case when hold.chosen then coalesce(hold.key, metered._lock_key('metered/hold/metered',
            convert_to(hold.tenant, 'UTF8') || decode('00', 'hex') || convert_to(hold.id, 'UTF8'))) end, wait_ms);
        clk := metered.clock();     -- else _write_charges does both
        was := metered._hold_before(hold, clk, wait_ms);
        status := was.status;
        deadline := was.deadline;
        placed_at := was.at;
        over := was.over;
    end if;
    if status is not null then
        stored := metered._answer_before(hold.id, was.no, status, was.state, deadline - placed_at,
            clk, origin, raising, reveal);
        return;
    end if;
    if fewest is null then
        posted := metered._write_charges(charges, ahead, wait_ms, origin, mode, row(hold.id, due_in, null, clk), false);
    else
        posted := metered._write_up_to(charges, fewest, ahead, wait_ms, origin, mode, row(hold.id, due_in, null, clk), false);
        charges := posted.charges;
        posted := posted.posted;
    end if;
    foreach charge in array charges loop
        if charge.held > 0 then
            lines := lines || jsonb_build_object('scope', charge.scope, 'amount', charge.held, 'open', charge.held);
        end if;
    end loop;
    seqs := posted.seqs;
    ats := posted.ats;
    refused := posted.refused;
    crossed := posted.crossed;
    placed_at := posted.at;
    if refused is not null then
        status := 'refused';
        return;
    end if;
    deadline := placed_at + hold.ttl;
    -- A month less 30 days is more than nothing, and can lead back.
    {refuse: when = (deadline > placed_at and placed_at + due_in >= deadline
        and coalesce(deadline <= placed_at + hold.lifetime, true)) is not true,
        what = ttl};
    if over is not null then    -- its units may have been freed with a sum, and its row left
        perform metered._end_rows(array[over], clk, (metered._by_system()).note, false);
    end if;
    {new hold: at = place.placed_at, ttl = hold.ttl, due_in = due_in, lifetime = hold.lifetime, issued = hold.issued_at, tenant = hold.tenant,
        id = hold.id, holder = hold.holder, claim = hold.claim, fingerprint = hold.fingerprint, keys = line_keys, metadata = hold.metadata}
    if cardinality(charges) = 1 then
        insert into metered.hold_lines (hold, key, amount, open, due, scope, opened_seq)
        values (new_no, charge.key, charge.held, charge.held, place.placed_at + due_in, charge.scope, seqs[1] - (charge.amount > charge.held)::int);
    else
        insert into metered.hold_lines (hold, key, amount, open, due, scope, opened_seq)
        select new_no, l.key, l.held, l.held, place.placed_at + due_in, l.scope, l.seq - (l.amount > l.held)::int
        from rows from (unnest(charges), unnest(seqs)) l(scope, key, amount, held, limits, note, must_exist, lease, lease_offset, seq) where l.held > 0;
    end if;
    if hold.minimum is not null then
        lines := metered._with_minima(new_no, hold.minimum, lines);
    end if;
    insert into metered.hold_events (hold, at, deadline, version, kind, detail, note, operation_tenant, operation)
    values (new_no, place.placed_at, place.deadline, 1, 'h', {placed detail: tenant = hold.tenant, holder = hold.holder,
            claim = coalesce(hold.claim, ''), grace = hold.grace, lifetime = hold.lifetime, lines = lines},
        origin.note, origin.tenant, origin.operation);
    {announce: tenant = hold.tenant, id = hold.id, version = 1, what = 'placed'};
    stored := case when fewest is not null then metered.hold_json(new_no, placed_at) end;
    if current_setting('metered_tx.command', true) <> '' then     -- a session is opened by no command
        unused := metered._remember_hold(metered._created_json(metered.hold_json(new_no, placed_at), charges, seqs, ats));
    end if;
    status := 'placed';
end
$$;

-- The hold that place answers with where _hold_before has a status: the one that was placed before,
-- or the one that has the claim, if that is revealed. If raising, all but a hold that is still
-- placed is an exception.
create function metered._answer_before(of_id text, of_no bigint, status text, state text,
    retry interval, clk timestamptz,
    origin metered.origin, raising boolean, reveal boolean) returns json
language plpgsql volatile
as $$
declare
    stored json;
    unused text;
begin
    if status = 'same' or status = 'taken' and reveal then
        stored := metered.hold_json(of_no, clk);
    end if;
    if raising and status <> 'same' then
        raise exception 'the hold cannot be placed'
            using errcode = 'MT007', detail = json_build_object('status', status,
            'id', of_id, 'retry_us', (extract(epoch from retry) * 1000000)::bigint, 'hold', stored);
    elsif status = 'same' then
        if raising and state <> 'h' then
            perform metered._refuse_hold(true,
                json_build_object('status', 'state', 'id', of_id, 'state', state, 'hold', stored));
        end if;
        unused := case when origin.operation is not null then metered._remember_hold(stored) end;
    end if;
    return stored;
end
$$;

-- The charges with the keys of their scopes' locks, where these were left to be derived.
create function metered._with_keys(charges metered.new_charge[]) returns metered.new_charge[]
language plpgsql stable
as $$
begin
    return array(select row(c.scope, coalesce(c.key, metered._scope_key(c.scope)), c.amount, c.held,
            c.limits, c.note, c.must_exist, null, null)::metered.new_charge
        from unnest(charges) with ordinality c(scope, key, amount, held, limits, note, must_exist,
            lease, lease_offset, n) order by c.n);
end
$$;

-- The hold that was placed before: with this id, if the caller chose it, or of this claim. status
-- as place has it, or null: none is in the way. state is its present state. over is a hold of the
-- claim that is due.
create function metered._hold_before(hold metered.new_hold, clk timestamptz, wait_ms int,
    out status text, out no bigint, out state text, out deadline timestamptz, out at timestamptz,
    out over bigint)
language plpgsql volatile
as $$
declare
    was    record;
    before text;
begin
    if hold.chosen then
        select h.no, h.fingerprint, h.state, h.holder, h.due into was
        from metered.holds h where h.tenant = hold.tenant and h.id = hold.id;
    else
        select h.no, h.fingerprint, h.state, h.holder, h.due into was
        from metered.holds h
        where h.claim = hold.claim and (h.state = 'h' or h.state = 'c' and not h.returned);
    end if;
    no := was.no;
    if no is null then
        if hold.chosen and hold.issued_at is not null and metered._one_snapshot() then
            -- It may have been placed and purged since this snapshot, with which the
            -- horizon has moved: then this fails with 40001, as a lock of a row does
            -- that was updated since. FOR KEY SHARE would not.
            before := metered._bound_lock_wait(wait_ms);
            perform from metered.holds_horizon z where z.one for share;
            before := metered._unbound_lock_wait(before);
        end if;
        if hold.chosen and hold.issued_at <= (select z.at
                from metered.holds_horizon z where z.one) then
            status := 'retired';
        end if;
        return;
    end if;
    state := case when was.state = 'h' and was.due <= clk then 'x' else was.state end;
    if not hold.chosen then
        if state = 'x' then
            over := no;
            no := null;
            return;
        elsif state = 'c' or was.holder <> hold.holder then
            status := 'taken';
            if state = 'h' then
                deadline := was.due;
                at := clk;
            end if;
        end if;
    end if;
    status := coalesce(status,
        case when was.fingerprint = hold.fingerprint then 'same' else 'conflict' end);
    if status = 'same' or metered._one_snapshot() then
        -- A snapshot that is too old for the hold's present state fails here.
        before := metered._bound_lock_wait(wait_ms);
        perform from metered.holds h where h.no = was.no for share;
        {or collide};
        before := metered._unbound_lock_wait(before);
    end if;
end
$$;

-- A hold that was just placed, with the other charges of its request.
create function metered._created_json(hold json, charges metered.new_charge[], seqs bigint[],
    ats timestamptz[]) returns json
language plpgsql stable
as $$
begin
    return ('{"created":true,' || coalesce('"charges":' || (
        select json_agg(json_build_object('scope', s.scope, 'seq', q.seq, 'amount',
                s.amount - s.held, 'at', q.at) order by s.n)
        from unnest(charges) with ordinality s(scope, key, amount, held, limits, note, must_exist,
            lease, lease_offset, n)
             join unnest(seqs, ats) with ordinality q(seq, at, n) on q.n = s.n
        where s.amount > s.held)::text || ',', '') || substr(hold::text, 2))::json;
end
$$;
