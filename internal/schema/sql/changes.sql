-- Changes of plans. A plan is a grant that renews, and has the reference of its first lot. A change
-- ends its renewals, and may put another plan in its place, at once or from the next period on. The
-- calls of one change are made in one transaction: begin_change locks the wallet, end_renewal and
-- others do the work, and note_change keeps the answer.

-- The changes of plans. A row goes with the entries of its wallet, once its plan has no lot any
-- more that has not ended.
create table metered.plan_changes (
    effect_at   timestamptz not null,           -- when the change takes effect
    seq         bigint not null,                -- the wallet's last entry, when it was made
    scope       text collate "C" not null,      -- the wallet
    reference   text collate "C" not null,      -- of the caller, once in a wallet
    plan        text collate "C" not null,      -- the reference of the plan that is changed
    to_plan     text collate "C",               -- the reference of the plan after it, or null: none
    kind        text collate "C" not null       -- replaced: a later one took its place in time
                check (kind in ('changed', 'replaced', 'resumed')),
    fingerprint bytea not null,                 -- of the change: a version byte and a SHA-256
    answer      jsonb not null,                 -- of the call that made it
    primary key (scope, reference)
);

-- Locks a wallet for a change of a plan. fingerprint and answer are those of the change that has
-- the reference already. Otherwise the plan's last change is the one of effect_at: to to_plan, and
-- by by_reference. at is now. Fails with 40001 where the snapshot is older than the wallet.
create function metered.begin_change(of_scope metered.scope_name, key bigint, of_reference text,
    of_plan text, wait_ms int,
    out at timestamptz, out fingerprint bytea, out answer jsonb, out effect_at timestamptz,
    out to_plan text, out by_reference text)
language plpgsql volatile
as $$
declare
    entry metered.ledger;
begin
    perform metered._require(coalesce(metered._key_fits(key, of_scope), true)
        and (octet_length(of_reference) between 1 and 255) is true
        and (octet_length(of_plan) between 1 and 255) is true, 'begin_change');
    entry := metered._next_entry(of_scope, key, wait_ms, null);
    {unseen: entry = entry};
    at := entry.at;
    select c.fingerprint, c.answer into fingerprint, answer
    from metered.plan_changes c where c.scope = of_scope and c.reference = of_reference;
    if not found then
        select c.effect_at, c.to_plan, c.reference into effect_at, to_plan, by_reference
        from metered.plan_changes c
        where c.scope = of_scope and c.plan = of_plan and c.kind = 'changed';
    end if;
end
$$;

-- A plan whose renewals have been ended, by the entry at_seq, or before it (0), as of that entry:
-- its period, the numbers of its lots that have begun and not ended, also of plans that it took the
-- place of, the units that holds have of them, and when its next lot would have begun. A change of
-- the plan counts from starts on at the earliest. starts is null if it has not begun or is over,
-- and next if it is over. first is the part of new_plan's amount that is beyond the plan's own, for
-- the part of new_plan's period that is left at since: at next, if that is asked for.
create function metered.plan_state(of_scope metered.scope_name, of_plan text, at_seq bigint,
    new_plan metered.lot_plan, since timestamptz, at_end boolean,
    out at timestamptz, out starts timestamptz, out ends timestamptz, out next timestamptz,
    out lots bigint[], out held bigint, out first bigint)
language plpgsql stable
as $$
declare
    follows record;
    span    timestamptz[];
begin
    perform metered._require((octet_length(of_plan) between 1 and 255) is true
        and at_seq >= 0
        and at_end is not null
        and coalesce(octet_length((new_plan.renews).zone) <= 255, true)
        and coalesce(new_plan.renew_amount between 1 and 9007199254740992, true)
        and coalesce(since > '-infinity' and since < '9000-01-01 00:00:00+00', true), 'plan_state');
    at := coalesce((select e.at from metered.ledger e where e.scope = of_scope and e.seq = at_seq),
        greatest(metered.clock(), (metered._last_entry(of_scope)).at));
    -- The plan's last lot still has what renews it: it was withdrawn, or has not begun. It has not
    -- ended, unless that was long ago.
    select y.starts_at, (y.plan).renews, (y.plan).renew_amount as amount into follows
    from metered.lot_rows y
    where y.scope = of_scope
        and (y.plan).renewal = of_plan
        and y.origin = 'g'
        and ((y.plan).renews).every is not null
      and y.expires_at > at
    order by y.expires_at desc, y.no desc limit 1;
    if not found then
        select y.starts_at, (y.plan).renews, (y.plan).renew_amount as amount into follows
        from metered.lot_rows y
        where y.scope = of_scope
            and (y.plan).renewal = of_plan
            and y.origin = 'g'
            and ((y.plan).renews).every is not null
        order by y.expires_at desc, y.no desc limit 1;
    end if;
    -- In the order of its index first, which keeps the planner from the lots that have ended.
    select x.begun, x.expires_at into starts, ends from (
        select y.age, coalesce(y.starts_at, y.granted_at) as begun, y.expires_at
        from metered.lot_rows y
        where y.scope = of_scope
            and (y.plan).renewal = of_plan
            and y.origin = 'g'
            and ((y.plan).renews).every is null
          and y.pending = 0 and coalesce(y.starts_at, y.granted_at) <= at and y.expires_at > at
        order by y.expires_at, y.no) x
    order by x.age desc limit 1;
    -- The period's first moment, also where the plan was granted later: or that of the change which
    -- brought the plan.
    if starts is not null and (follows.renews).every is not null then
        starts := greatest((metered._period_at(follows.renews, at))[1],
            (select max(c.effect_at)
                from metered.plan_changes c
                where c.scope = of_scope and c.to_plan = of_plan and c.kind = 'changed'));
    end if;
    next := case when follows.starts_at > at then follows.starts_at end;
    with recursive chain (plan) as (
        select of_plan collate "C"
        union
        select c.plan
        from metered.plan_changes c
        join chain n on c.to_plan = n.plan
        where c.scope = of_scope and c.kind = 'changed')
    select array_agg(y.no order by y.age), sum(y.held) into lots, held
    from metered.lots y join chain n on (y.plan).renewal = n.plan
    where y.scope = of_scope and y.origin = 'g' and ((y.plan).renews).every is null
      and y.pending = 0 and coalesce(y.starts_at, y.granted_at) <= at and y.expires_at > at;
    if (new_plan.renews).every is not null then
        since := case when at_end then coalesce(next, ends) else least(since, at) end;
        span := metered._period_at(new_plan.renews, since);
        first := div(greatest(0,
                new_plan.renew_amount - coalesce(follows.amount, 0))
                * (extract(epoch from span[2]) - extract(epoch from since)),
            extract(epoch from span[2]) - extract(epoch from span[1]));
    end if;
end
$$;

-- Keeps the answer of a change (changed), or of a call that took one back (resumed), in place of
-- the plan's last one, which has not taken effect.
create function metered.note_change(of_scope metered.scope_name, of_reference text, of_plan text,
    to_plan text, effect_at timestamptz, mode text, of_fingerprint bytea, given jsonb) returns void
language plpgsql volatile
as $$
begin
    perform metered._require((octet_length(of_reference) between 1 and 255) is true
        and (octet_length(of_plan) between 1 and 255) is true
        and coalesce(octet_length(to_plan) between 1 and 255, true)
        and isfinite(effect_at) is true
        and mode in ('changed', 'resumed')
        and (octet_length(of_fingerprint) = 33) is true
        and jsonb_typeof(given) = 'object', 'note_change');
    update metered.plan_changes c
    set kind = 'replaced'
    where c.scope = of_scope and c.plan = of_plan and c.kind = 'changed';
    insert into metered.plan_changes (scope, reference, plan, to_plan, effect_at, kind, fingerprint,
        answer, seq)
    values (of_scope, of_reference, of_plan, note_change.to_plan, note_change.effect_at, mode,
        of_fingerprint, given, coalesce((metered._last_entry(of_scope)).seq, 0))
    on conflict do nothing;     -- 40001 for an older snapshot
end
$$;

-- How much overdraft (paid) a plan's lot has paid back when it began: the lot whose period during
-- is in, or now. ends is when units end that are granted in place of these: with that lot, or if it
-- has ended, with the plan's present one, or never. restored is the lot that was granted for them.
-- status is found, or unknown: no such lot has begun. Locks the wallet.
create function metered.plan_overage(of_scope metered.scope_name, key bigint, of_plan text,
    during timestamptz, wait_ms int,
    out status text, out no bigint, out paid bigint, out restored bigint, out ends timestamptz,
    out category text, out priority int, out uses text[])
language plpgsql volatile
as $$
declare
    entry metered.ledger;
    lot   record;       -- the lot
    near  record;    -- or one that ends later
begin
    perform metered._require(coalesce(metered._key_fits(key, of_scope), true)
        and (octet_length(of_plan) between 1 and 255) is true
        and coalesce(isfinite(during), true), 'plan_overage');
    select null::bigint as no, null::bigint[] as age into lot;
    entry := metered._next_entry(of_scope, key, wait_ms, null);
    during := coalesce(during, entry.at);
    -- Lots that end later begin later, but for those whose end was set.
    for near in
        select x.no, x.age, x.granted_seq, x.expires_at, x.category, x.priority,
            (x.plan).uses as uses, coalesce(x.starts_at, x.granted_at) as begun
        from metered.lot_rows x
        where x.scope = of_scope and x.expires_at > during and (x.plan).renewal = of_plan
          and x.origin = 'g' and ((x.plan).renews).every is null and x.pending = 0
        order by x.expires_at, x.no
    loop
        if near.begun > during then
            exit when lot.no is not null;
        elsif (lot.age > near.age) is not true then
            lot := near;
        end if;
    end loop;
    if lot.no is null then
        {unseen: entry = entry};
        status := 'unknown';
        return;
    end if;
    no := lot.no;
    category := lot.category;
    priority := lot.priority;
    uses := lot.uses;
    paid := (select coalesce(sum(m.amount), 0) from metered.ledger b
        join metered.ledger x on x.scope = b.scope and x.seq >= b.seq and x.at = b.at
        join metered.lot_moves m on m.scope = x.scope
            and m.seq = x.seq
            and m.lot = lot.no
            and m.kind = 'p'
        where b.scope = of_scope and b.seq = lot.granted_seq);
    select y.no, y.expires_at into restored, ends from metered.lot_rows y
    where y.scope = of_scope and y.reference = format('overage of lot %s', lot.no);
    status := 'found';
    if found then
        ends := nullif(ends, 'infinity');
        return;
    end if;
    -- A period that is over leaves its units to the present one.
    ends := case when lot.expires_at > entry.at then lot.expires_at
        else (select max(y.expires_at) from metered.lot_rows y
        where y.scope = of_scope
            and (y.plan).renewal = of_plan
            and y.origin = 'g'
            and ((y.plan).renews).every is null
            and y.pending = 0
          and coalesce(y.starts_at, y.granted_at) <= entry.at and y.expires_at > entry.at) end;
end
$$;

-- Deletes changes of plans with the entries before keep of a wallet, unless a plan of theirs has a
-- lot that has not ended.
create function metered._purge_changes(of_scope text, keep bigint) returns void
language plpgsql volatile
as $$
begin
    delete from metered.plan_changes c
    where c.scope = of_scope and c.seq < keep and c.effect_at < metered.clock() and not exists (
        select from metered.lot_rows y
        where y.scope = of_scope and (y.plan).renewal = c.plan and y.expires_at > metered.clock());
end
$$;
