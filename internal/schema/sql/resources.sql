-- The registry: which scopes were declared to exist. Charges, credits and holds look here if they
-- demand it (must_exist), under their scopes' locks. A retirement takes the scope's lock, too: the
-- answer of a charge holds until it commits. At REPEATABLE READ and above its snapshot may be older
-- than the lock. There a lock of the row, or a write where there is none, meets the newer row.

-- The reason to refuse new charges of a scope that must exist: unknown, retired, or null for
-- nothing.
create function metered._absence(of_scope text) returns text
language plpgsql stable
as $$
declare
    resource metered.resources;
begin
    select * into resource from metered.resources x where x.scope = of_scope;
    return case when resource.scope is null then 'unknown'
        when resource.retired_at is not null then 'retired' end;
end
$$;

-- A scope's row, locked, or all null if there is none. It is the committed one, or 40001.
create function metered._resource_for_write(of_scope text, wait_ms int) returns metered.resources
language plpgsql volatile
as $$
declare
    before   text := metered._bound_lock_wait(wait_ms);
    resource metered.resources;
begin
    select * into resource from metered.resources x where x.scope = of_scope for share;
    if not found and metered._one_snapshot() then
        begin   -- taken back by the block
            insert into metered.resources (created_at, scope)
            values (metered.clock(), of_scope)
            on conflict do nothing;
            {take back};
        end;
    end if;
    before := metered._unbound_lock_wait(before);
    return resource;
end
$$;

-- Adds a scope to a refusal, if absence says why it does not exist.
create function metered._with_absent(refused jsonb, of_scope text, absence text) returns jsonb
language plpgsql immutable
as $$
begin
    if absence is null then
        return refused;
    end if;
    return coalesce(refused, '[]') || jsonb_build_object('scope', of_scope, 'absent', absence);
end
$$;

-- Checks a charge that seems out of bounds, or whose scope must exist. It returns refused, with the
-- scope if it does not exist. looking: the scope is not locked.
create function metered._admit(c metered.new_charge, refused jsonb, looking boolean, wait_ms int)
    returns jsonb
language plpgsql volatile
as $$
declare
    absence text;
begin
    if (c.amount between 1 and 9007199254740992
            and c.held between 0 and c.amount
            and octet_length(c.scope) between 1 and 255
        and coalesce(pg_column_size(c.note), 0) <= 8192
        and (pg_column_compression(c.note) is null or octet_length(c.note::text) <= 8192)
        and coalesce(cardinality(c.limits), 0) <= 16) is not true then
        perform metered._no_amount();
    end if;
    -- If the key were another scope's, the charge would not read under the scope's lock.
    {refuse: when = not metered._key_fits(c.key, c.scope), what = key};
    absence := metered._absence(c.scope);
    if metered._one_snapshot() and (absence is not null or not looking) then
        perform metered._resource_for_write(c.scope, wait_ms);
    end if;
    return metered._with_absent(refused, c.scope, absence);
end
$$;

-- Declares that scopes exist, all or none. If some are retired, only these are returned, and
-- nothing is done. changed: the scope did not exist before. The answer holds until the transaction
-- ends.
create function metered.create_scopes(scopes text[], wait_ms int)
returns table (scope text, created_at timestamptz, retired_at timestamptz, changed boolean)
language plpgsql volatile
as $$
declare
    before     text := metered._bound_lock_wait(wait_ms);
    clk        timestamptz := metered.clock();
    scope_name text;
    resource   metered.resources;
    made       boolean[];
    found_rows metered.resources[];
    refused    boolean := false;
begin
    perform metered._require(cardinality(scopes) between 1 and 1000
        and cardinality(scopes) = (select count(*)
            from unnest(scopes) u where octet_length(u) between 1 and 255), 'scopes');
    begin
        -- in order: two creators do not deadlock
        for scope_name in select distinct u from unnest(scopes) u order by u loop
            insert into metered.resources as x (created_at, scope)
            values (clk, scope_name)
            on conflict do nothing;
            made := made || found;
            select * into resource from metered.resources x where x.scope = scope_name for share;
            found_rows := found_rows || resource;
            refused := refused or resource.retired_at is not null;
        end loop;
        if refused then
            raise exception using errcode = 'MT100';
        end if;
    exception when sqlstate 'MT100' then
        null;
    end;
    before := metered._unbound_lock_wait(before);
    return query select u.scope, u.created_at, u.retired_at, m.made
        from unnest(found_rows) with ordinality u(created_at, retired_at, scope, n)
        join unnest(made) with ordinality m(made, n) on m.n = u.n
        where not refused or u.retired_at is not null order by u.n;
end
$$;

-- Retires scopes, or takes that back (retiring is false), all or none. If some were never declared,
-- only these are returned, without created_at, and nothing is done. Takes the scopes' locks. held
-- has units of a scope's open holds, which go on.
create function metered.retire_scopes(scopes text[], retiring boolean, wait_ms int)
returns table (scope text, created_at timestamptz, retired_at timestamptz, changed boolean,
    held bigint)
language plpgsql volatile
as $$
declare
    clk      timestamptz;
    before   text;
    resource metered.resources;
    tip      metered.ledger;
    fences   bigint[];
    missing  boolean := false;
begin
    perform metered._require(retiring is not null and cardinality(scopes) between 1 and 64
        and cardinality(scopes) = (select count(*)
            from unnest(scopes) u where octet_length(u) between 1 and 255), 'scopes');
    if retiring then
        -- A spend from a lease takes no lock of its scope, so the leases end with the scope. A
        -- lease's lock comes before its scope's.
        fences := array(select y.fence
            from metered.leases y
            where y.scope = any (scopes) and y.settled_at is null and y.mode = 's');
        if fences <> '{}' then
            perform metered._lock_keys(fences, wait_ms);
        end if;
    end if;
    perform metered._lock_all_scopes(scopes, null, wait_ms);
    clk := metered.clock();
    if retiring then
        if exists (select from metered.leases y
                where y.scope = any (scopes)
                    and y.settled_at is null
                    and y.mode = 's'
                    and y.fence <> all (fences)) then
            perform metered._collided();     -- it was opened meanwhile
        end if;
        -- A spend with an older snapshot meets FOR UPDATE.
        perform from metered.leases y
        where y.scope = any (scopes) and y.settled_at is null and y.mode in ('s', 'm')
        for update;
        -- later than each spend
        update metered.leases y set ends_at = clk + interval '1 microsecond'
        where y.scope = any (scopes)
            and y.settled_at is null
            and y.mode in ('s', 'm')
            and y.ends_at > clk;
    end if;
    for scope in select distinct u from unnest(scopes) u order by u loop
        resource := metered._resource_for_write(scope, wait_ms);
        if resource.scope is null then
            missing := true;
            return next;
        end if;
    end loop;
    if missing then
        return;
    end if;
    before := metered._bound_lock_wait(wait_ms);     -- a creator has locks of
                                                     -- rows, and no scope's lock
    for scope in select distinct u from unnest(scopes) u order by u loop
        update metered.resources x set retired_at = case when retiring then clk end
        where x.scope = retire_scopes.scope and (x.retired_at is null) = retiring;
        changed := found;
        if retiring then
            perform metered._recall_leases(scope);
        end if;
        select x.created_at, x.retired_at into retire_scopes.created_at, retire_scopes.retired_at
        from metered.resources x where x.scope = retire_scopes.scope;
        tip := metered._entry_for_write(scope);
        if metered._one_snapshot() then
            perform metered._refuse_stale(array[tip]);
        end if;
        held := tip.held - case when tip.next_due <= clk
            then metered._due_units(scope, tip.next_due, clk) else 0 end;
        return next;
    end loop;
    before := metered._unbound_lock_wait(before);
end
$$;
