-- Events that must take effect in order: commands that come late are refused.

-- The newest event that took effect, one row for each key. A row goes with the records of
-- operations.
create table metered.newest (
    at       timestamptz not null,                              -- when the event happened,
                                                                -- as its sender says
    taken_at timestamptz not null default metered.clock(),      -- when it took effect
    tenant   text collate "C" not null,                         -- of the command
    key      text collate "C" not null,                         -- what the event is about,
                                                                -- such as a subscription
    id       text collate "C" not null,                         -- the command's id: of two
                                                                -- events of one time, the
                                                                -- greater one is newer
    primary key (tenant, key)
);
create index newest_taken_at on metered.newest (taken_at);

-- Makes a command the newest of its key, or returns the one that is at least as new. The row is
-- locked until the transaction ends, so that commands of one key take effect one after another.
create function metered.take_newest(of_tenant text, of_key text, event_at timestamptz, of_id text,
    wait_ms int,
    out newest timestamptz, out newest_id text)
language plpgsql volatile
as $$
declare
    before text := metered._bound_lock_wait(wait_ms);
begin
    perform metered._require(isfinite(event_at), 'event_at');
    insert into metered.newest as n (at, tenant, key, id)
    values (event_at, of_tenant, of_key, of_id)
    on conflict (tenant, key) do update
        set at = excluded.at, id = excluded.id, taken_at = metered.clock()
    where (n.at, n.id) < (excluded.at, excluded.id);
    if not found then
        select n.at, n.id into newest, newest_id
        from metered.newest n
        where n.tenant = of_tenant and n.key = of_key;
    end if;
    before := metered._unbound_lock_wait(before);
end
$$;
