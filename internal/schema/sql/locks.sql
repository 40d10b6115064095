-- Advisory locks of one server count there alone. Where the schema is a shard of a Citus cluster,
-- they are taken on the node that has the tables, whichever node a call came through: by queries of
-- a table with one row, which Citus runs there.

-- Whether the schema is such a shard: there Migrate writes true. Inlined, so that it costs nothing
-- elsewhere.
create function metered._sharded() returns boolean
language sql immutable
as $$
    select false
$$;

create function metered._try_lock_there(key bigint, shared boolean) returns boolean
language plpgsql volatile
as $$
declare
    got boolean;
begin
    if shared then
        select pg_try_advisory_xact_lock_shared(key) into got
        from metered.operations_horizon h
        where h.one;
    else
        select pg_try_advisory_xact_lock(key) into got
        from metered.operations_horizon h
        where h.one;
    end if;
    return got;
end
$$;

-- Takes a lock if it is free, and returns whether. Inlined wherever it stands.
create function metered._try_lock(key bigint) returns boolean
language sql volatile
as $$
    select case when metered._sharded() then metered._try_lock_there(key, false)
        else pg_try_advisory_xact_lock(key) end
$$;

create function metered._try_lock_shared(key bigint) returns boolean
language sql volatile
as $$
    select case when metered._sharded() then metered._try_lock_there(key, true)
        else pg_try_advisory_xact_lock_shared(key) end
$$;

-- _lock_keys on the node that has the tables, of a call that may wait for most_ms.
create function metered._lock_keys_there(keys bigint[], most_ms int) returns boolean
language plpgsql volatile
as $$
declare
    key      bigint;
    deadline timestamptz := clock_timestamp() + most_ms * interval '1 ms';
    before   text := current_setting('lock_timeout');
begin
    foreach key in array keys loop
        perform set_config('lock_timeout',
            greatest(1, (extract(epoch from deadline - clock_timestamp()) * 1000)::int)::text,
            true);
        perform pg_advisory_xact_lock(key);
    end loop;
    perform set_config('lock_timeout', before, true);
    return true;
end
$$;

-- Room in the server's lock table, which all its databases share, for calls that take more than 64
-- locks: three quarters of the locks that the settings promise, in up to 64 units. A call takes an
-- advisory lock for each unit that it needs, until its transaction ends, so that many large calls
-- at once queue, and leave the last quarter to everybody else. Beyond that a statement of any
-- program on the server fails (53200). A transaction that has all units goes on: there is no other
-- one. Waits for up to wait_ms, or for a shorter lock_timeout of the session, and returns the rest
-- of wait_ms. Then SQLSTATE 55P03.
create function metered._make_room(locks int, wait_ms int) returns int
language plpgsql volatile
as $$
declare
    capacity bigint := greatest(1, current_setting('max_locks_per_transaction')::bigint * 3 / 4
        * (current_setting('max_connections')::int
            + current_setting('max_prepared_transactions')::int));
    units    int := greatest(1, least(64, capacity / 256));
    mine     int[] := coalesce(string_to_array(nullif(current_setting('metered_tx.room', true), ''),
            ' ')::int[], '{}');
    needed   int := least(units - cardinality(mine), ceil(locks::numeric * units / capacity));
    taken    int[];
    bound    text := current_setting('lock_timeout');
    began    timestamptz := clock_timestamp();
    waited   int := 0;
begin
    loop
        begin
            taken := '{}';
            for unit in 1..units loop
                exit when cardinality(taken) >= needed;
                -- A session gets a lock that it has once more.
                if unit <> all (mine) and metered._try_lock(7308620103914913792 + unit) then
                    taken := taken || unit;
                end if;
            end loop;
            if cardinality(taken) >= needed then
                perform set_config('metered_tx.room', array_to_string(mine || taken, ' '), true);
                return greatest(wait_ms - waited, 1);
            end if;
            raise exception using errcode = 'MT100';    -- gives back those that it has
        exception when sqlstate 'MT100' then
            waited := 1 + extract(epoch from clock_timestamp() - began) * 1000;
        end;
        if (waited < least(wait_ms,
                    case when bound <> '0' then extract(epoch from bound::interval) * 1000 end))
            is not true then
            raise exception 'the lock table of the server has no room for % locks of one call',
                locks
                using errcode = '55P03',
                hint = 'Commit sooner, name fewer scopes in a transaction, or raise max_locks_per_transaction.';
        end if;
        perform pg_sleep((5 + 20 * random()) / 1000);
    end loop;
end
$$;

-- Takes transaction-scoped advisory locks in the order given (callers sort),
-- waiting at most wait_ms for all of them together, or as long as a shorter
-- lock_timeout of the session allows. Then SQLSTATE 55P03.
-- Each lock is first tried without waiting, which nearly always succeeds and needs
-- no lock_timeout. A try does not overtake calls that already wait. Returns whether
-- it had to wait: a caller assigns that, which costs a fifth of a PERFORM.
create function metered._lock_keys(keys bigint[], wait_ms int) returns boolean
language plpgsql volatile
as $$
declare
    key      bigint;
    deadline timestamptz;
    before   text;
    longest  int := wait_ms;
begin
    if cardinality(keys) > 64 then
        wait_ms := metered._make_room(cardinality(keys), wait_ms);
    end if;
    if metered._sharded() then
        before := current_setting('lock_timeout');
        wait_ms := least(wait_ms,
            case when before <> '0' then (extract(epoch from before::interval) * 1000)::int end);
        perform metered._lock_keys_there(keys, wait_ms)
        from metered.operations_horizon h
        where h.one;
        return true;
    end if;
    foreach key in array keys loop
        continue when pg_try_advisory_xact_lock(key);
        deadline := coalesce(deadline, clock_timestamp() + wait_ms * interval '1 ms');
        before := current_setting('lock_timeout');
        perform set_config('lock_timeout', greatest(1, least(
            (extract(epoch from deadline - clock_timestamp()) * 1000)::int,
            case when before <> '0'
                then (extract(epoch from before::interval) * 1000)::int end))::text, true);
        perform pg_advisory_xact_lock(key);
        perform set_config('lock_timeout', before, true);
    end loop;
    return deadline is not null or wait_ms < longest;
end
$$;

-- Bounds this transaction's waits for row locks by wait_ms each, or by a shorter
-- lock_timeout that is set. Returns the setting as it was, for _unbound_lock_wait,
-- which must follow. An error undoes it without.
create function metered._bound_lock_wait(wait_ms int) returns text
language plpgsql volatile
as $$
declare
    before text := current_setting('lock_timeout');
    bound  text;
begin
    if wait_ms is null or before <> '0' and before::interval <= wait_ms * interval '1 ms' then
        return null;
    end if;
    bound := set_config('lock_timeout', wait_ms::text, true);
    return before;
end
$$;

-- The shorter one of a timeout, as a setting has it, and of so many milliseconds. Inlined
-- wherever it stands.
create function metered._shorter(before text, ms int) returns text
language sql stable
as $$
    select case when before = '0' or before::interval > ms * interval '1 ms' then ms::text
        else before end
$$;

create function metered._unbound_lock_wait(before text) returns text
language plpgsql volatile
as $$
begin
    return case when before is not null then set_config('lock_timeout', before, true) end;
end
$$;

-- Takes locks, in the order given, until one is not free, and returns whether it has them
-- all. _try_keys is inlined: for one key it costs no call.
create function metered._try_each(keys bigint[]) returns boolean
language plpgsql volatile
as $$
declare
    key bigint;
begin
    foreach key in array keys loop
        if not metered._try_lock(key) then
            return false;
        end if;
    end loop;
    return true;
end
$$;

create function metered._try_keys(keys bigint[]) returns boolean
language sql volatile
as $$
    select case when cardinality(keys) = 1 then metered._try_lock(keys[1])
        else metered._try_each(keys) end
$$;

-- The key of a lock: the first 8 bytes of the SHA-256 of a space, a zero byte and a name. Go
-- derives the same one.
create function metered._lock_key(space bytea, name bytea) returns bigint
language sql stable
as $$
    select ('x' || encode(substr(sha256(space || decode('00', 'hex') || name), 1, 8),
            'hex'))::bit(64)::bigint
$$;

create function metered._scope_key(of_scope text) returns bigint
language sql stable
as $$
    select metered._lock_key('metered/scope/metered', convert_to(of_scope, 'UTF8'))
$$;

-- Whether key is the scope's: cheaper than deriving the key.
create function metered._key_fits(key bigint, of_scope text) returns boolean
language sql stable
as $$
    select int8send(key) = substr(sha256('metered/scope/metered'::bytea || decode('00', 'hex')
            || convert_to(of_scope, 'UTF8')), 1, 8)
$$;

-- Whether an origin is within its bounds. Inlined wherever it stands.
create function metered._fits_origin(o metered.origin) returns boolean
language sql stable
as $$
    select coalesce(octet_length(o.tenant) <= 255 and octet_length(o.operation) <= 255, true)
        and coalesce(pg_column_size(o.note) <= 8192, true)
$$;

-- Refuses an argument that is out of bounds, which Go never sends. Functions that commands wait
-- for call it in an IF, which costs a fifth of a PERFORM.
create function metered._require(holds boolean, what text) returns void
language plpgsql
as $$
begin
    if holds is not true then
        raise exception 'out of bounds: %', what using errcode = '22023';
    end if;
end
$$;

-- The locks of several scopes, in the one order in which everybody takes them.
create function metered._lock_all_scopes(scopes text[], keys bigint[], wait_ms int) returns boolean
language plpgsql volatile
as $$
begin
    return metered._lock_keys(array(
        select distinct coalesce(s.key, metered._scope_key(s.scope))
        from unnest(scopes, keys) s(scope, key) order by 1), wait_ms);
end
$$;

-- Takes the locks of scopes for a caller that then reads, charges or credits.
create function metered.lock_scopes(scopes text[], wait_ms int) returns void
language plpgsql volatile
as $$
begin
    perform metered._require(cardinality(scopes) <= 64, 'scopes');
    perform metered._lock_all_scopes(scopes, null, wait_ms);
    perform metered._without_tallies(scopes, wait_ms);
end
$$;

-- Whether this transaction's statements all read from one snapshot. Inlined wherever it stands.
create function metered._one_snapshot() returns boolean
language sql stable
as $$
    select current_setting('transaction_isolation') in ('repeatable read', 'serializable')
$$;
