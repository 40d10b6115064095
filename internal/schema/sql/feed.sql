-- The feed: all entries of all scopes under one number each, which is given after they were
-- committed. See ADR 27.
--
-- A number is given by one transaction at a time (number_feed, which has the row of feed_state). So
-- numbers become visible in their order, and a reader that has seen number n has seen all before
-- it. What it numbers is committed, and within a scope entries are committed in the order of seq,
-- since a writer has the scope's lock until its COMMIT. So the entries that it finds behind the
-- last numbered one of a scope are those that come next, however long other transactions last.
--
-- Nothing in a charge knows of the feed. The price is the search: number_feed walks from scope to
-- scope in the ledger's key, a part of all scopes in each call (a round is all of them), and always
-- looks at those that had entries last.

-- The feed's state: see feed.sql.
create table metered.feed_state (
    last     bigint not null default 0, -- the last number that was given
    since    timestamptz,               -- when the feed began, or null: nobody reads it
    began_at timestamptz,               -- when the present round began
    whole_at timestamptz,               -- all that was committed before has a number
    one      boolean primary key default true check (one) -- there is one row
);

insert into metered.feed_state (last) values (0);

-- The scope that the present round has come to, unless it is at its end.
create table metered.feed_round (
    scope text collate "C" primary key  -- the scope: there is one row at most
);

-- Entries by number: a run of entries that follow one another in their scope and in the feed.
create table metered.feed (
    no      bigint primary key,         -- the number of its last entry: 1, 2, 3 and so on
    seq     bigint not null,            -- the seq of its last entry
    entries bigint not null,            -- how many they are
    scope   text collate "C" not null   -- whose entries they are
);

create unique index feed_scope on metered.feed (scope, no);

-- How far the entries of scopes have numbers.
create table metered.feed_scopes (
    seq    bigint not null,             -- the last entry with a number
    new_at timestamptz not null,        -- when it got it
    scope  text collate "C" primary key -- the scope
) with (fillfactor = 70);

create index feed_scopes_new on metered.feed_scopes (new_at);

-- Numbers whose entries were deleted. Only the greatest counts: the feed is whole from behind it
-- on.
create table metered.feed_purged (
    no bigint primary key               -- the number
);

-- The servers that gave numbers, in turn: another one after a failover or a restore.
create table metered.feed_histories (
    history  bigint primary key,        -- a number greater than those before
    first_no bigint not null,           -- its first number
    server   text not null              -- the server, its timeline, database and table
);

-- Who consumes the feed, and how far.
create table metered.feed_consumers (
    no       bigint not null,           -- the number of the last consumed entry
    patience interval not null,         -- how much longer a purge keeps what it has not consumed
    moved_at timestamptz not null,      -- when it looked last, within 10 seconds
    consumer text collate "C" primary key -- its name
) with (fillfactor = 70);

-- The server that the feed's numbers are given on, its timeline, and its database and table: others
-- after a failover or a restore.
create function metered._feed_server() returns text
language plpgsql volatile
as $$
declare
    server text;
begin
    begin
        select x.system_identifier || '/' || left(pg_walfile_name(pg_current_wal_lsn()), 8)
        into server from pg_control_system() x;
    exception when insufficient_privilege or feature_not_supported then
        server := 'unknown';
    end;
    select server || '/' || d.oid || '/' || s.tableoid into server
    from metered.feed_state s, pg_database d where s.one and d.datname = current_database();
    return server;
end
$$;

-- Says since when numbers are given on this server. A number behind the last one may have been
-- another entry's on the server before: the one that was known there was lost. Two servers that
-- take over from one, each without the other, begin with other histories.
create function metered._note_feed_server(last_no bigint) returns void
language plpgsql volatile
as $$
declare
    here   text := metered._feed_server();
    before record;
begin
    select h.history, h.server into before
    from metered.feed_histories h order by h.history desc limit 1;
    if before.server is distinct from here then
        insert into metered.feed_histories (history, first_no, server)
        values (coalesce(before.history, 0) + 1 + (hashtextextended(here, 0) & 1048575),
            last_no + 1, here);
    end if;
end
$$;

-- Numbers the entries of scopes up to these, their last ones, and returns how many. Its transaction
-- has the row of feed_state.
create function metered._number_scopes(scopes text[], seqs bigint[]) returns bigint
language plpgsql volatile
as $$
declare
    was  bigint;    -- the last number before
    made bigint;
    now  timestamptz := metered.clock();
begin
    select s.last into was from metered.feed_state s where s.one;
    -- One more number is passed over where entries are missing: they were purged before they had
    -- one.
    with tips as (
        select t.scope, max(t.seq) as seq from unnest(scopes, seqs) t(scope, seq) group by t.scope
    ), behind as (
        select t.scope, t.seq, y.seq as done,
            (select l.seq from metered.ledger l where l.scope = t.scope and l.seq > coalesce(y.seq,
                case when t.seq > 1 and not exists (
                    select from metered.ledger z
                    where z.scope = t.scope and z.seq = 2) then 1 else 0 end)
             order by l.seq limit 1) as begins
        from tips t left join lateral (
            select x.seq from metered.feed_scopes x where x.scope = t.scope) y on true
        where t.seq > coalesce(y.seq, 0)
    ), runs as (
        select b.scope, b.seq, b.seq - b.begins + 1 as entries, b.begins > b.done + 1 as lost,
            was + (sum(b.seq - b.begins + 1 + (b.begins > coalesce(b.done, b.begins) + 1)::int)
                over (order by b.scope))::bigint as no
        from behind b where b.begins <= b.seq
    ), numbered as (
        insert into metered.feed (no, seq, entries, scope)
        select r.no, r.seq, r.entries, r.scope from runs r
    ), missed as (
        insert into metered.feed_purged (no) select r.no - r.entries from runs r where r.lost
    ), upto as (
        insert into metered.feed_scopes as x (scope, seq, new_at)
        select r.scope, r.seq, now from runs r
        on conflict (scope) do update set seq = excluded.seq, new_at = excluded.new_at
    )
    select max(r.no) - was into made from runs r;
    if made > 0 then
        update metered.feed_state s set last = was + made where s.one;
    end if;
    return coalesce(made, 0);
end
$$;

-- Gives the entries of up to look scopes that are committed and have no number one each, and
-- returns how many. done: the round is at its end, and all that was committed when it began has a
-- number. It waits for nobody: while another transaction gives numbers, or where nothing can be
-- written, it returns null. Its own transaction should end soon, since nobody else gives numbers
-- meanwhile. The feed begins with the first call.
create function metered.number_feed(look int, out numbered bigint, out done boolean)
language plpgsql volatile
as $$
declare
    state  record;
    before text;        -- where the round goes on
    start  record;      -- the first scope to look at, and its last entry
    scopes text[];
    seqs   bigint[];
    whole  boolean;     -- all that was committed when the round began has a number now
begin
    perform metered._require(look between 1 and 100000, 'number_feed');
    if current_setting('transaction_read_only') = 'on' then     -- a standby, too
        return;
    end if;
    select s.since, s.last, s.began_at into state
    from metered.feed_state s where s.one for update skip locked;
    if not found then
        return;
    end if;
    select r.scope into before from metered.feed_round r order by r.scope limit 1;
    -- Entries that a crash can take back (early lock release) are durable with their number.
    if current_setting('synchronous_commit') = 'off' then
        perform set_config('synchronous_commit', 'on', true);
    end if;
    perform metered._note_feed_server(state.last);
    if before is null then
        state.began_at := metered.clock();
        if not metered._one_snapshot() then
            perform metered._fold_all();
        end if;
        select l.scope, l.seq into start
        from metered.ledger l order by l.scope desc, l.seq desc limit 1;
    else
        select l.scope, l.seq into start
        from metered.ledger l where l.scope < before order by l.scope desc, l.seq desc limit 1;
    end if;
    -- From the last scope to the first: so one look-up finds the next scope and its last entry.
    with recursive walk(scope, seq, nth) as (
        select start.scope collate "C", start.seq, 1 where start.scope is not null
        union all
        select n.scope, n.seq, w.nth + 1
        from walk w cross join lateral (
            select l.scope, l.seq from metered.ledger l
            where l.scope < w.scope order by l.scope desc, l.seq desc limit 1) n
        where w.nth < look
    )
    select array_agg(w.scope order by w.nth), array_agg(w.seq order by w.nth) into scopes, seqs
    from walk w;
    done := coalesce(cardinality(scopes), 0) < look;
    if not done or before is not null then
        select scopes || array_agg(x.scope), seqs || array_agg(x.seq) into scopes, seqs
        from (select h.scope, (select l.seq from metered.ledger l
                where l.scope = h.scope order by l.seq desc limit 1) as seq
            from (select y.scope from metered.feed_scopes y order by y.new_at desc limit 1000) h) x
        where x.seq is not null;
    end if;
    numbered := metered._number_scopes(scopes, seqs);
    whole := done and not metered._one_snapshot();
    update metered.feed_state s
    set since = coalesce(s.since, state.began_at), began_at = state.began_at,
        whole_at = case when whole then state.began_at else s.whole_at end
    where s.one;
    delete from metered.feed_round;
    if not done then
        insert into metered.feed_round (scope) values (scopes[look]);
    end if;
    if done then
        delete from metered.feed_purged p
        where p.no < (select max(y.no) from metered.feed_purged y);
    end if;
end
$$;

-- Refuses to go on after a number whose successor is not there any more, or that may be another
-- entry's now, and says from which number on there is something to read. of_history is of the
-- cursor with the number, or 0.
create function metered._check_feed(of_history bigint, after bigint) returns void
language plpgsql stable
as $$
declare
    whole   bigint;     -- the number from which on the feed is whole
    differs bigint;     -- the first number that may be another entry's than in this history
begin
    select coalesce((select max(p.no) from metered.feed_purged p), 0) + 1,
        case when of_history = 0 or exists (
                select from metered.feed_histories h where h.history = of_history)
            then least(s.last + 1, (select min(h.first_no) from metered.feed_histories h
                where h.history > of_history and of_history > 0))
            else 1 end
    into whole, differs
    from metered.feed_state s where s.one;
    if after + 1 < whole or after >= differs then
        raise exception 'the feed has other entries after number %', after using errcode = 'MT017',
            detail = jsonb_build_object('lost', after >= differs,
                'first', greatest(whole, case when after >= differs then differs end),
                'history', coalesce((select max(h.history) from metered.feed_histories h), 0));
    end if;
end
$$;

-- Up to most entries of the feed after a number, in the order of their numbers. of_history is that
-- of the entry with that number: 0, if there is none. SQLSTATE MT017: entries in between were
-- purged, or lost with a server.
create function metered.read_feed(of_history bigint, after bigint, most int)
returns table (no bigint, history bigint, entry metered.ledger)
language plpgsql stable
as $$
declare
    run  record;
    rest int := most;
    made int;
begin
    perform metered._require(
        of_history >= 0 and after >= 0 and most between 1 and 1000, 'read_feed');
    perform metered._check_feed(of_history, after);
    select coalesce(max(h.history), 0) into history from metered.feed_histories h;
    for run in
        select f.no, f.seq, f.scope, least(f.entries, f.no - after) as entries
        from metered.feed f where f.no > after order by f.no limit most
    loop
        return query
        select run.no - run.seq + l.seq, read_feed.history, row(l.*)::metered.ledger
        from metered.ledger l
        where l.scope = run.scope and l.seq > run.seq - run.entries and l.seq <= run.seq
        order by l.seq limit rest;
        get diagnostics made = row_count;
        if run.no - run.entries <> after + most - rest or made <> least(run.entries, rest) then
            raise exception 'entries of the feed are missing after number %', after
                using errcode = 'XX001';
        end if;
        rest := rest - made;
        exit when rest = 0;
    end loop;
end
$$;

-- The next entries of the feed for a consumer, up to most, which are consumed if the caller's
-- transaction commits. Its row is locked until then: others that consume by that name wait. The
-- first call begins with the first entry that is there, or, from_now, behind the last one. A purge
-- keeps entries that it has not consumed for patience longer than it would.
create function metered.consume_feed(of_consumer text, most int, patience interval,
    from_now boolean)
returns table (no bigint, history bigint, entry metered.ledger)
language plpgsql volatile
as $$
declare
    upto bigint;
    made bigint;
    now  timestamptz := metered.clock();
begin
    perform metered._require(of_consumer <> '' and most between 1 and 1000 and from_now is not null
        and patience between interval '0' and interval '366 days', 'consume_feed');
    select c.no into upto
    from metered.feed_consumers c where c.consumer = of_consumer for update;
    if not found then
        insert into metered.feed_consumers as c (consumer, no, patience, moved_at)
        select of_consumer, case when from_now then s.last
                else coalesce((select max(p.no) from metered.feed_purged p), 0) end,
            consume_feed.patience, now
        from metered.feed_state s where s.one
        on conflict do nothing;
        select c.no into upto
        from metered.feed_consumers c where c.consumer = of_consumer for update;
        {or collide};     -- it is newer than this snapshot
    end if;
    return query select r.no, r.history, r.entry from metered.read_feed(0, upto, most) r;
    get diagnostics made = row_count;
    upto := upto + made;    -- numbers follow one another
    update metered.feed_consumers c
    set no = upto, patience = consume_feed.patience, moved_at = now
    where c.consumer = of_consumer and (c.no <> upto or c.patience <> consume_feed.patience
        or c.moved_at < now - interval '10 seconds');
end
$$;

-- Forgets a consumer, and says whether there was one. A purge waits for it no longer. Consumed
-- again, the name begins anew.
create function metered.drop_feed_consumer(of_consumer text) returns boolean
language plpgsql volatile
as $$
begin
    delete from metered.feed_consumers c where c.consumer = of_consumer;
    return found;
end
$$;

-- How far the consumers of the feed are.
create view metered.feed_lag as
select c.consumer,                      -- its name
    c.no as consumed,                   -- the number of the last consumed entry
    s.last - c.no as unread,            -- entries that it has not consumed
    e.at as unread_since,               -- the time of the first of them, or null
    c.moved_at,                         -- when it looked last, within 10 seconds
    c.patience,                         -- how much longer a purge keeps what it has not consumed
    s.whole_at                          -- all entries that were committed before have numbers
from metered.feed_consumers c cross join metered.feed_state s left join lateral (
    select l.at from metered.feed f join metered.ledger l
        on l.scope = f.scope and l.seq = f.seq + 1 - least(f.entries, f.no - c.no)
    where f.no > c.no order by f.no limit 1) e on true;
