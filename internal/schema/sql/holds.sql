-- A hold as JSON. One that is due has expired, whether that is written down or not.
-- Inlined wherever it stands.
create function metered.hold_as_json(h metered.holds, lines json, clk timestamptz) returns json
language sql stable
as $$
    select json_build_object('tenant', h.tenant, 'id', h.id, 'holder', h.holder,
        'state', case when h.state = 'h' and h.due <= clk then 'x' else h.state end,
        'version', h.version, 'placed_at', h.placed_at, 'deadline', h.deadline, 'due', h.due, 'ceiling', h.ceiling,
        'ended_at', case when h.state = 'h' and h.due <= clk then h.due else h.ended_at end,
        'now', clk, 'claim', h.claim, 'entity', h.entity, 'returned', h.returned, 'metadata', h.metadata, 'lines', lines)
$$;

-- A line of a hold as JSON; open is 0 if the hold has ended, also where the line has
-- not been freed yet. Inlined wherever it stands.
create function metered.line_json(of_scope text, amount bigint, captured bigint, open bigint) returns json
language sql stable
as $$
    select json_build_object('scope', of_scope, 'amount', amount, 'captured', captured, 'open', open)
$$;

-- The hold of that no.
create function metered.hold_json(of_no bigint, clk timestamptz) returns json
language plpgsql stable
as $$
begin
    return (
        select metered.hold_as_json(h, (
            select json_agg(metered.line_json(l.scope, l.amount, l.captured,
                case when h.state = 'h' and h.due > clk then l.open else 0 end) order by l.scope)
            from metered.hold_lines l where l.hold = h.no), clk)
        from metered.holds h where h.no = of_no);
end
$$;

-- Keeps what a command did to a hold for the command's record, which is written later
-- in its transaction. JSON has no record separator in it.
create function metered.remember_hold(hold json) returns text
language plpgsql volatile
as $$
begin
    return set_config('metered_tx.holds',
        concat_ws(chr(30), nullif(current_setting('metered_tx.holds', true), ''), hold::text), true);
end
$$;

-- Takes the locks of a command that does several things to scopes and holds, in the one
-- order: all scopes, by key, with those of the holds that are named, unless these are
-- another holder's (see lock_holds); the ids that it places, by key; then rows of holds, by
-- no: of those that are named, and of those that are due in scopes that it may charge and
-- could be in its way. A command that names thousands of scopes needs a larger lock table.
create function metered.lock_all(keys bigint[], id_keys bigint[], scopes text[], tenants text[], holders text[], ids text[], wait_ms int) returns void
language plpgsql volatile
as $$
declare
    nos    bigint[];
    due    bigint[];
    clk    timestamptz;
    before text;
begin
    select array_agg(h.no) into nos
    from unnest(tenants, holders, ids) n(tenant, holder, id),
         lateral (select x.no, x.holder from metered.holds x where x.tenant = n.tenant and x.id = n.id limit 1) h
    where n.holder = '' or h.holder = n.holder;
    if nos is not null then
        select array_agg(k.key order by k.key) into keys
        from (select unnest(h.keys) from metered.holds h where h.no = any (nos) union select unnest(keys)) k(key);
    end if;
    perform metered.lock_keys(coalesce(keys, '{}') || id_keys, wait_ms);
    clk := metered.clock();
    -- As many as expire_due would take at first. If it comes to need more, or another one
    -- falls due before it looks, that one is locked out of order.
    select array_agg(d.hold) into due
    from unnest(scopes) s(scope),
         lateral (select l.next_due from metered.ledger l where l.scope = s.scope order by l.seq desc limit 1) t,
         lateral (select l.hold from metered.hold_lines l
          where t.next_due <= clk and l.scope = s.scope and l.open > 0 and l.due >= t.next_due and l.due <= clk
          order by l.due limit 500) d;
    nos := nos || due;
    if nos is not null then
        before := metered.bound_lock_wait(wait_ms);
        perform from metered.holds h where h.no = any (nos) order by h.no for no key update;
        before := metered.unbound_lock_wait(before);
    end if;
end
$$;

-- Notifies those who listen to the channel of a hold's transition.
create function metered.announce(channel text, of_tenant text, of_id text, of_version int, of_kind text) returns void
language plpgsql volatile
as $$
begin
    perform pg_notify(channel, json_build_object('tenant', of_tenant, 'id', of_id, 'version', of_version, 'kind', of_kind)::text);
end
$$;

-- Places a hold on the scopes of which hold_amounts is not 0, and charges the rest
-- of amounts, all or none. status: placed; same (placed before, with the same
-- content: hold tells); conflict (with other content); retired; taken (of a claim:
-- somebody else has it, until deadline if that is not null); denied.
--
-- If the caller chose the id, keys end with that of the id: whoever places the same id
-- on other scopes waits there, as long as for a scope, and then sees the first one. An
-- id that was made up for this call is not looked for.
-- hold_keys are those of the scopes; line_keys those of them that are held, ascending.
create function metered.place(of_tenant text, of_id text, chosen boolean, of_holder text, of_claim text, print bytea, issued timestamptz,
    ttl interval, grace interval, lifetime interval, of_metadata text, detail text, note text, channel text,
    scopes text[], keys bigint[], amounts bigint[], hold_amounts bigint[], hold_keys bigint[], line_keys bigint[],
    limit_scopes int[], maxima bigint[], windows interval[], max_ahead interval, wait_ms int, notes text[],
    of_namespace text, of_operation text, raising boolean,
    out status text, out hold_id text, out placed_at timestamptz, out deadline timestamptz,
    out seqs bigint[], out ats timestamptz[], out denied jsonb, out hold json)
language plpgsql volatile
as $$
declare
    c      record;
    was    record;
    clk    timestamptz;
    new_no bigint;
    waited boolean;
    before text;
    unused text;
begin
    hold_id := of_id;
    if chosen or of_claim is not null then
        waited := metered.lock_keys(keys, wait_ms);
        clk := metered.clock();     -- else post does both
    end if;
    if chosen then
        select h.no, h.fingerprint, h.state, h.holder, h.due into was
        from metered.holds h where h.tenant = of_tenant and h.id = of_id;
        if found then
            status := case when was.fingerprint = print then 'same' else 'conflict' end;
        else
            if issued is not null and current_setting('transaction_isolation') in ('repeatable read', 'serializable') then
                -- It may have been placed and purged since this snapshot, with which the
                -- horizon has moved: then this fails with 40001, as a lock of a row does
                -- that was updated since. FOR KEY SHARE would not.
                before := metered.bound_lock_wait(wait_ms);
                perform from metered.holds_horizon z where z.one for share;
                before := metered.unbound_lock_wait(before);
            end if;
            if issued <= (select z.at from metered.holds_horizon z where z.one) then
                status := 'retired';
            end if;
        end if;
    elsif of_claim is not null then
        select h.no, h.fingerprint, h.state, h.holder, h.due into was
        from metered.holds h where h.claim = of_claim and (h.state = 'h' or h.state = 'c' and not h.returned);
        if found and (was.state = 'c' or was.due > clk) then
            if was.state = 'c' or was.holder <> of_holder then
                status := 'taken';
                if was.state = 'h' then
                    deadline := was.due;
                    placed_at := clk;
                end if;
            else
                status := case when was.fingerprint = print then 'same' else 'conflict' end;
            end if;
        end if;
    end if;
    if status = 'same' then
        -- A snapshot that is too old for what the hold is by now fails here.
        before := metered.bound_lock_wait(wait_ms);
        perform from metered.holds h where h.no = was.no for share;
        if not found then
            perform metered.collided();
        end if;
        before := metered.unbound_lock_wait(before);
        hold := metered.hold_json(was.no, clk);
        if raising and (was.state <> 'h' or was.due <= clk) then
            perform metered.refuse_hold(true, json_build_object('status', 'state', 'id', hold_id,
                'state', case when was.state = 'h' then 'x' else was.state end, 'hold', hold));
        end if;
        unused := case when of_operation is not null then metered.remember_hold(hold) end;
    end if;
    if status is not null then
        if raising and status <> 'same' then
            raise exception 'the hold cannot be placed' using errcode = 'MT007', detail = jsonb_build_object(
                'status', status, 'id', hold_id, 'retry_us', (extract(epoch from deadline - placed_at) * 1000000)::bigint);
        end if;
        return;
    end if;
    c := metered.post(scopes, keys, amounts, limit_scopes, maxima, windows, max_ahead, wait_ms, notes,
        of_namespace, of_operation, raising, hold_amounts, hold_id, ttl + grace, clk);
    seqs := c.seqs;
    ats := c.ats;
    denied := c.denied;
    placed_at := c.at;
    if denied is not null then
        status := 'denied';
        return;
    end if;
    deadline := placed_at + ttl;
    insert into metered.holds (placed_at, deadline, due, ceiling, issued_at, version, state,
        tenant, id, holder, claim, fingerprint, keys, metadata)
    values (place.placed_at, place.deadline, place.deadline + grace, place.placed_at + lifetime, issued, 1, 'h',
        of_tenant, hold_id, of_holder, of_claim, print, line_keys, of_metadata::json)
    on conflict do nothing
    returning no into new_no;
    if new_no is null then
        perform metered.collided();     -- this view is older than one that was placed
    end if;
    insert into metered.hold_lines (hold, key, amount, open, due, scope)
    select new_no, l.key, l.units, l.units, place.deadline + grace, l.scope
    from unnest(scopes, hold_keys, hold_amounts) l(scope, key, units) where l.units > 0;
    insert into metered.hold_events (hold, at, deadline, version, kind, detail, note, namespace, operation)
    values (new_no, place.placed_at, place.deadline, 1, 'h', place.detail::jsonb, nullif(place.note, '')::jsonb,
        of_namespace, of_operation);
    if channel is not null then
        perform metered.announce(channel, of_tenant, hold_id, 1, 'placed');
    end if;
    if of_operation is not null then
        unused := metered.remember_hold(('{"created":true,' || case when amounts <> hold_amounts then '"charges":' || (
            select json_agg(json_build_object('scope', s.scope, 'seq', s.seq, 'amount', s.amount - s.held, 'at', s.at) order by s.n)
            from unnest(scopes, seqs, amounts, hold_amounts, ats) with ordinality s(scope, seq, amount, held, at, n)
            where s.amount > s.held)::text || ',' else '' end || substr(metered.hold_json(new_no, placed_at)::text, 2))::json);
    end if;
    status := 'placed';
end
$$;
