-- Claims a key for job new_id, or tells which job it was claimed for. If another
-- transaction has claimed it and is still open, waits for that one to end, at
-- most wait_ms since the statement began (one statement may claim many keys, in
-- the order of queue and key). Then SQLSTATE 55P03. If the other one commits, a
-- claimant at REPEATABLE READ or above gets 40001, as it cannot see that row.
--
-- Inserts before it looks: looking for a key that is not there and then adding
-- it would make any two SERIALIZABLE claimants each other's conflict. So a
-- repeated key uses up a number of River's sequence, as River's own unique jobs
-- do.
create function metered.claim_job_key(of_queue text, of_key text, of_kind text, of_tenant text,
    of_digest bytea, new_id bigint, wait_ms int,
    out id bigint, out created boolean, out first_kind text, out first_tenant text,
    out first_digest bytea)
language plpgsql volatile
as $$
declare
    before  text := current_setting('lock_timeout');
    left_ms int := wait_ms - (extract(epoch from clock_timestamp() - statement_timestamp())
        * 1000)::int;
    unused  text;   -- set_config in an assignment is cheaper than in perform
begin
    if before <> '0' then   -- the caller's own bound, where that is shorter
        left_ms := least(left_ms, extract(epoch from before::interval) * 1000);
    end if;
    unused := set_config('lock_timeout', greatest(1, left_ms)::text, true);
    loop
        insert into metered.job_keys (job_id, created_at, queue, key, kind, tenant, digest)
        values (new_id, metered.clock(), of_queue, of_key, of_kind, of_tenant, of_digest)
        on conflict (queue, key) do nothing;
        created := found;
        if created then
            id := new_id; first_kind := of_kind; first_tenant := of_tenant; first_digest :=
                of_digest;
            exit;
        end if;
        select k.job_id, k.kind, k.tenant, k.digest into id, first_kind, first_tenant, first_digest
        from metered.job_keys k where k.queue = of_queue and k.key = of_key;
        exit when found;
        -- A purge took the key between the two statements: it is free now.
    end loop;
    unused := set_config('lock_timeout', before, true);
end
$$;

-- Claims a key, as claim_job_key does: JSON, new_id if the key was free, or [id, kind, tenant,
-- digest] of the job for which it was claimed. This is the short way (ADR 22), where the session
-- has no lock_timeout. Where it has one, the full function compares that with wait_ms.
create function metered.claim_job_key_plain(of_queue text, of_key text, of_kind text, of_tenant text,
    of_digest bytea, new_id bigint, wait_ms int) returns json
language plpgsql volatile
as $$
declare
    before text := current_setting('lock_timeout');
    answer json;
begin
    insert into metered.job_keys as k (queue, key, job_id, created_at, kind, tenant, digest)
    select of_queue, of_key, new_id, metered.clock(), of_kind, of_tenant, of_digest
    where metered._goes_short()
      and case when before = '0' then set_config('lock_timeout', wait_ms::text, true) <> '' end
    on conflict (queue, key) do nothing
    returning case when set_config('lock_timeout', before, true) is not null then to_json(k.job_id) end into answer;
    if found then
        return answer;
    end if;
    before := set_config('lock_timeout', before, true);
    -- A key that is known. One that a purge took meanwhile, or that this view does not see, is tried again.
    select json_build_array(k.job_id, k.kind, k.tenant, encode(k.digest, 'base64')) into answer
    from metered.job_keys k
    where k.queue = of_queue and k.key = of_key and metered._goes_short();
    if found then
        return answer;
    end if;
    return (select case when c.created then to_json(c.id)
            else json_build_array(c.id, c.first_kind, c.first_tenant, encode(c.first_digest, 'base64')) end
        from metered.claim_job_key(of_queue, of_key, of_kind, of_tenant, of_digest, new_id, wait_ms) c);
end
$$;

-- The record of a key, or no row.
create function metered.find_job_key(of_queue text, of_key text) returns setof metered.job_keys
language plpgsql stable
as $$
begin
    return query select * from metered.job_keys k where k.queue = of_queue and k.key = of_key;
end
$$;

-- Forgets up to max_rows keys claimed before cutoff, oldest first, and passes over
-- those that another purge is at. after is the last of the batch before, as in
-- purge_tokens. Not for an application, which must not make an old key new.
create function metered.purge_job_keys(after timestamptz, cutoff timestamptz, max_rows int,
    out deleted bigint, out last timestamptz)
language plpgsql volatile
as $$
begin
    perform metered._require(max_rows between 1 and 10000, 'max_rows');
    cutoff := least(cutoff, metered.clock());
    with gone as (
        -- By row address, so that there is no join to plan: these rows are never
        -- updated, and locked here.
        delete from metered.job_keys d
        where d.ctid = any (array(
            select k.ctid from metered.job_keys k
            where k.created_at >= coalesce(after, '-infinity') and k.created_at < cutoff
            order by k.created_at limit max_rows
            for update skip locked))
        returning d.created_at
    )
    select count(*), max(g.created_at) into deleted, last from gone g;
end
$$;
