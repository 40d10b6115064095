-- Refunds of captured units: in full or in part, and together with the release of held ones.

-- Gives back the units that captured holds spent, all or none, as refunds of their charges: all
-- units that are left (used is null), or so many units of the scopes of one hold. skip_purged
-- leaves out purged charges, but refuses for a claim's own unit, which would stay taken. refused is
-- as _lock_holds has it, or returned (all was given back before), purged, left (fewer captured
-- units are left) or claim (a claim's own unit is given back with all the rest, or not at all).
create function metered.return_holds(named metered.hold_ids, used metered.used_units[],
    skip_purged boolean, wait_ms int, origin metered.origin, channel text, raising boolean,
    out refused json, out holds json[])
language plpgsql volatile
as $$
declare
    locked record;
    unused text;
begin
    perform metered._require(skip_purged is not null
        and (used is null or cardinality(named.ids) = 1 and cardinality(used) > 0), 'used');
    locked := metered._lock_holds(named, 'c', wait_ms);
    if locked.status is null
        and exists (select from metered.holds h where h.no = any (locked.nos) and h.returned) then
        select 'returned', h.id, h.no into locked.status, locked.failed, locked.failed_no
        from metered.holds h where h.no = any (locked.nos) and h.returned order by h.no limit 1;
    end if;
    {unlocked};
    -- A refusal after the first refund takes that back, too. By a code that does not end in
    -- 000: such a one would catch its whole class, and with it the errors of _refuse_hold.
    begin
        for i in 1..cardinality(named.ids) loop
            refused := metered._refund_hold(locked.nos[i], named.ids[i], used, skip_purged,
                locked.clk, wait_ms, origin);
            if refused is not null then
                refused := metered._refuse_hold(raising, refused);
                raise exception using errcode = 'MT100';
            end if;
            holds[i] := metered.hold_json(locked.nos[i], locked.clk);
            if channel is not null then
                -- Not out of the JSON, in which the caller's may be that no operator reads.
                perform metered._announce(channel, h.tenant, h.id, h.version,
                    case when h.returned then 'returned' else 'returned_part' end)
                from metered.holds h where h.no = locked.nos[i];
            end if;
            unused := case when origin.operation is not null
                then metered._remember_hold(holds[i]) end;
        end loop;
    exception when sqlstate 'MT100' then
        holds := null;
    end;
end
$$;

-- Gives back the units that one captured hold spent: see return_holds. Its scopes and its row are
-- locked.
create function metered._refund_hold(of_no bigint, of_id text, used metered.used_units[],
    skip_purged boolean, clk timestamptz, wait_ms int, origin metered.origin) returns json
language plpgsql volatile
as $$
declare
    entry        record;
    asked        metered.used_units;
    own          text;
    wanted       jsonb := '{}';       -- by scope: units still to be given back
    want         bigint;
    left_over    bigint;
    answer       text;
    given        jsonb := '[]';
    kept         jsonb;
    whole        boolean := true;
    own_returned boolean := false;
    new_version  int;
begin
    select h.claim into own from metered.holds h where h.no = of_no;
    foreach asked in array coalesce(used, '{}') loop
        perform metered._require(asked.amount between 1 and 9007199254740992
            and not wanted ? asked.scope, 'used');
        wanted := wanted || jsonb_build_object(asked.scope, asked.amount);
    end loop;
    for entry in select d.scope, d.amount, d.seq, d.at, l.key, (
                 -- The number in a scope that was forgotten may be another's by now. Not
                 -- EXISTS, which Postgres 18 answers from a hash of the whole ledger.
                 select c.seq
                 from metered.ledger c
                 where c.scope = d.scope and c.seq = d.seq and c.at = d.at and c.hold = of_id
             ) is not null as there
             from metered.hold_events y,
                 lateral jsonb_to_recordset(y.detail) d(scope text, amount bigint, seq bigint,
                     at timestamptz),
                  lateral (select z.key
                      from metered.hold_lines z where z.hold = y.hold and z.scope = d.scope) l
             where y.hold = of_no and y.kind in ('p', 'c') order by d.scope, d.seq loop
        -- A purge takes the sum of refunds, and not the history.
        left_over := entry.amount - greatest(
            coalesce((select r.amount
                    from metered.refund_sum r
                    where r.scope = entry.scope and r.level = 0 and r.block = entry.seq), 0),
            coalesce((select sum(x.amount)
                    from metered.hold_events y,
                        lateral jsonb_to_recordset(y.detail) x(scope text, amount bigint,
                            seq bigint)
                where y.hold = of_no
                    and y.kind = 'g'
                    and x.scope = entry.scope
                    and x.seq = entry.seq), 0));
        continue when left_over <= 0;
        want := case when used is null then left_over
            else least(left_over, coalesce((wanted ->> entry.scope)::bigint, 0)) end;
        answer := case when not entry.there then 'purged' when want = 0 then 'ok' else
            (metered.refund(entry.scope, entry.key, entry.seq, want, wait_ms, origin,
                    false)).status end;
        if answer = 'ok' then
            whole := whole and want = left_over;
            own_returned := own_returned or entry.scope = own and want > 0;
            if want > 0 then
                given := given || jsonb_build_object('scope', entry.scope, 'amount', want, 'seq',
                    entry.seq, 'at', entry.at);
                wanted := wanted || jsonb_build_object(entry.scope,
                    coalesce((wanted ->> entry.scope)::bigint, want) - want);
            end if;
        elsif answer = 'purged' and (used is not null
                or skip_purged and entry.scope is distinct from own) then
            whole := whole and used is null;
            kept := coalesce(kept, '[]') || jsonb_build_object('scope', entry.scope, 'amount',
                left_over, 'seq', entry.seq, 'at', entry.at);
        else
            return json_build_object('status', answer, 'id', of_id, 'scope', entry.scope);
        end if;
    end loop;
    foreach asked in array coalesce(used, '{}') loop
        if (wanted ->> asked.scope)::bigint > 0 then
            return json_build_object('status', 'left', 'id', of_id, 'scope', asked.scope,
                'requested', asked.amount, 'open', asked.amount - (wanted ->> asked.scope)::bigint);
        end if;
    end loop;
    if own_returned and not whole then
        return json_build_object('status', 'claim_part', 'id', of_id, 'scope', own);
    end if;
    update metered.hold_lines l set refunded = case
        when whole then greatest(l.refunded,
            l.captured - coalesce((select sum(x.amount)
                    from jsonb_to_recordset(kept) x(scope text, amount bigint)
                    where x.scope = l.scope), 0))
        else l.refunded + coalesce((select sum(x.amount)
                from jsonb_to_recordset(given) x(scope text, amount bigint)
                where x.scope = l.scope), 0) end
    where l.hold = of_no;
    update metered.holds h
    set version = h.version + 1, returned = whole
    where h.no = of_no returning h.version into new_version;
    insert into metered.hold_events (hold, at, version, kind, detail, note, operation_tenant,
        operation)
    values (of_no, clk, new_version, case when whole then 'b' else 'g' end,
        case when whole then kept else given end, origin.note, origin.tenant, origin.operation);
    return null;
end
$$;

-- Releases holds, all or none: those that are held, and those that were captured, whose spending is
-- given back as return_holds does.
create function metered.release_captured(named metered.hold_ids, wait_ms int, origin metered.origin,
    channel text, raising boolean,
    out refused json, out holds json[])
language plpgsql volatile
as $$
declare
    locked  record;
    one     metered.hold_ids;
    outcome record;
begin
    locked := metered._lock_holds(named, '*', wait_ms);
    {unlocked};
    begin
        for i in 1..cardinality(named.ids) loop     -- all is locked by now, whatever their order
            one := row(named.tenant, array[named.ids[i]], array[named.issued[i]], named.holder);
            if (select h.state from metered.holds h where h.no = locked.nos[i]) = 'c' then
                outcome := metered.return_holds(one, null, false, wait_ms, origin, channel, false);
            else
                outcome := metered.release_holds(one, wait_ms, origin, channel, false);
            end if;
            if outcome.refused is not null then
                refused := metered._refuse_hold(raising, outcome.refused);
                raise exception using errcode = 'MT100';
            end if;
            holds := holds || outcome.holds;
        end loop;
    exception when sqlstate 'MT100' then
        holds := null;
    end;
end
$$;
