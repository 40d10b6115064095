-- Every table, index and function of metered, version 1.
--
-- Applied by metered.Migrate, or rendered by metered.SchemaSQL for a migration
-- tool of your own. "metered." is replaced by the schema name you choose.
--
-- Three rules hold for all of it:
--
--   * Whoever owns the schema owns the data. An application role needs EXECUTE
--     on the functions that it calls and SELECT on tables that it reads, nothing
--     else (metered.GrantSQL): the functions that write are SECURITY DEFINER, so
--     no application can change or delete a ledger entry.
--   * Functions that an application calls fix search_path, so that no operator
--     or table of the caller's can stand in for ours; enable_seqscan = off:
--     PL/pgSQL caches plans, and a sequential scan cached while a table was
--     small makes a hot scope quadratic; and plan_cache_mode = force_generic_plan:
--     a statement that compares with an array, or lets a null decide what remains
--     of it, would be planned anew at each call, for 50 to 150 microseconds. All
--     three together cost 5 to 8 microseconds a call (Postgres 15); inner functions
--     inherit them. A plan is made while the table may be empty and any index
--     looks as good, so no condition may fit an index other than the right one.
--   * Time is read only from metered.clock(), but for how long a lock is still
--     waited for. To set the clock a test replaces that function, which its owner
--     can do and an application's role cannot.

-- CREATE SCHEMA IF NOT EXISTS alone would not do: it demands the right to create a schema
-- even where this one is there, and who owns it may not have that.
do $$
begin
    if to_regnamespace('metered') is null then
        create schema if not exists metered;
    end if;
end
$$;

create table metered.schema_version (
    version    int primary key,
    applied_at timestamptz not null default clock_timestamp()
);

insert into metered.schema_version (version) values (1);

-- The only clock. clock_timestamp(), because now() is the start of the
-- transaction, and a slow one would write entries already outside their window.
create function metered.clock() returns timestamptz
language sql volatile
as 'select pg_catalog.clock_timestamp()';

-- True. The planner works that out when a session first plans an expression in which this
-- stands, and nothing is left of it then. That takes and frees a block of a megabyte, and
-- so has glibc's malloc keep up to 2 MB of free memory: as it starts out it gives back to
-- the kernel what is beyond 128 kB, and asks for it again up to four times in a place, a
-- capture or a release. See ADR 20.
create function metered.memory_kept() returns boolean
language sql immutable
as 'select pg_catalog.octet_length(pg_catalog.repeat(pg_catalog.repeat('' '', 1000), 1000)) > 0';

-- Takes transaction-scoped advisory locks in the order given (callers sort),
-- waiting at most wait_ms for all of them together, or as long as a shorter
-- lock_timeout of the session allows. Then SQLSTATE 55P03.
-- Each lock is first tried without waiting, which nearly always succeeds and needs
-- no lock_timeout to be set; it does not overtake those who already wait. Returns
-- whether it had to wait: a function that returns something can be called by an
-- assignment, which costs a fifth of a PERFORM.
create function metered.lock_keys(keys bigint[], wait_ms int) returns boolean
language plpgsql volatile
as $$
declare
    k        bigint;
    deadline timestamptz;
    before   text;
begin
    foreach k in array keys loop
        continue when pg_try_advisory_xact_lock(k);
        deadline := coalesce(deadline, clock_timestamp() + wait_ms * interval '1 ms');
        before := current_setting('lock_timeout');
        perform set_config('lock_timeout', greatest(1, least(
            (extract(epoch from deadline - clock_timestamp()) * 1000)::int,
            case when before <> '0' then (extract(epoch from before::interval) * 1000)::int end))::text, true);
        perform pg_advisory_xact_lock(k);
        perform set_config('lock_timeout', before, true);
    end loop;
    return deadline is not null;
end
$$;

-- Bounds this transaction's waits for row locks by wait_ms each, or by a shorter
-- lock_timeout that is set. Returns the setting as it was, for unbound_lock_wait,
-- which must follow; an error undoes it without.
create function metered.bound_lock_wait(wait_ms int) returns text
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

create function metered.unbound_lock_wait(before text) returns text
language plpgsql volatile
as $$
begin
    return case when before is not null then set_config('lock_timeout', before, true) end;
end
$$;

-- Takes these locks, in the order given, as far as none has to be waited for, and says
-- whether it has them all. try_keys is inlined: for one key it costs no call.
create function metered.try_each(keys bigint[]) returns boolean
language plpgsql volatile
as $$
declare
    k bigint;
begin
    foreach k in array keys loop
        if not pg_try_advisory_xact_lock(k) then
            return false;
        end if;
    end loop;
    return true;
end
$$;

create function metered.try_keys(keys bigint[]) returns boolean
language sql volatile
as $$
    select case when cardinality(keys) = 1 then pg_try_advisory_xact_lock(keys[1]) else metered.try_each(keys) end
$$;

-- Takes the locks of scopes for a caller that then reads, charges or credits.
create function metered.lock_scopes(keys bigint[], wait_ms int) returns void
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
begin
    perform metered.lock_keys(keys, wait_ms);
end
$$;

-- ===== budget =============================================================

-- The amount of an entry, never negative: whoever may only execute the functions
-- cannot make an entry that takes spending back. A domain, since a table's check
-- would be parsed anew for each statement that inserts: 6 microseconds.
create domain metered.units as bigint check (value >= 0);

-- The ledger: one chain of entries per scope, seq = 1, 2, 3, …, never changed.
-- Each entry carries its scope's totals after it, so the state of a scope is its
-- last entry, and the spending inside a window is a difference of two entries
-- instead of a sum over many. Wide columns first: no padding between them.
create table metered.ledger (
    seq       bigint      not null,
    amount    metered.units not null, -- 0 for a clock repair only
    at        timestamptz not null,   -- never decreases along seq within an epoch
    spent     bigint      not null,   -- sum of charges so far, never decreases
    refunded  bigint      not null,   -- sum of refunds so far, never decreases
    credited  bigint      not null,   -- sum of credits so far, never decreases
    held      bigint      not null,   -- units in open holds now
    epoch     smallint    not null,   -- clock repairs so far
    kind      "char"      not null,   -- c charge, d credit (deposit), r refund, k clock repair;
                                      -- of holds: h held, u captured (used), l released, x expired
    scope     text collate "C" not null,
    next_due  timestamptz,            -- no open hold falls due before this
    ref       bigint,                 -- of a refund: the seq of its charge
    hold      text,                   -- the hold's id, where the entry is about one alone
    namespace text,                   -- of the operation
    operation text,
    note      jsonb,                  -- actor, tenant, correlation, reason
    -- The guard: a writer that did not see the last entry collides here,
    -- whatever its isolation level, even if it never took the lock.
    primary key (scope, seq)
);

-- Finds the last entry at or before a time in two short index scans: this index
-- holds every 16th entry, the other 15 are next to it in the primary key. A full
-- index on (scope, at) would cost a third more bytes and time for each charge;
-- bisecting seq takes 20 look-ups in a scope of a million entries (measured: 105
-- microseconds against 19).
create index ledger_time on metered.ledger (scope, epoch, at, seq)
    where seq & 15 = 1 or kind = 'k';

-- Refunds by the charge they refund, summed in blocks of 16^level charges (level
-- 0: one charge): the refunds of all charges after some entry are at most 15 rows
-- of each level, however many there are. See ADR 1.
create table metered.refund_sum (
    block  bigint   not null,         -- charge's seq >> 4 * level
    amount bigint   not null,
    level  smallint not null,
    scope  text collate "C" not null,
    primary key (scope, level, block)
);

-- What a scope without entries stands at: everything 0, before all time.
create function metered.fresh(of_scope text) returns metered.ledger
language plpgsql immutable
as $$
declare
    l metered.ledger;
begin
    l.scope := of_scope;
    l.seq := 0;
    l.at := '-infinity';
    l.spent := 0;
    l.refunded := 0;
    l.credited := 0;
    l.held := 0;
    l.epoch := 0;
    return l;
end
$$;

-- The last entry of a scope, for a reader.
create function metered.tip(of_scope text) returns metered.ledger
language plpgsql stable
as $$
declare
    tip metered.ledger;
begin
    select * into tip from metered.ledger l where l.scope = of_scope order by l.seq desc limit 1;
    if not found then
        return metered.fresh(of_scope);
    end if;
    return tip;
end
$$;

-- Tells a writer that its view of a scope is stale. As a serialization failure,
-- because that is what callers' retry loops retry.
create function metered.collided() returns void
language plpgsql
as $$
begin
    raise exception 'could not serialize access: the scope has a newer entry' using errcode = '40001';
end
$$;

-- The last entry of a scope, for a writer that holds the scope's lock. FOR KEY
-- SHARE closes the hole that a purge opens in the guard: it fails where an old
-- snapshot still sees an entry that is deleted by now, whose successor, deleted
-- too, would no longer collide. That holds for entry 1 as well, since a purge puts
-- a new copy of it in the old one's place. At READ COMMITTED deleted entries are
-- passed over instead, until none is left; hence the second look.
create function metered.tip_for_write(of_scope text) returns metered.ledger
language plpgsql volatile
as $$
declare
    tip metered.ledger;
begin
    select * into tip from metered.ledger l
    where l.scope = of_scope order by l.seq desc limit 1 for key share;
    if not found then
        return metered.first_for_write(of_scope);
    end if;
    return tip;
end
$$;

-- The beginning of a scope, for a writer that found no last entry. If it has entries
-- after all, the writer has a stale view of it.
create function metered.first_for_write(of_scope text) returns metered.ledger
language plpgsql volatile
as $$
begin
    if exists (select from metered.ledger l where l.scope = of_scope) then
        perform metered.collided();
    end if;
    return metered.fresh(of_scope);
end
$$;

-- The last entry at or before t in the chain whose last entry is tip_seq: seq 0
-- if the chain begins after t, null if a purge took the answer away. Entries of an
-- earlier epoch count as made no later than the repair that ended it: that
-- follows from looking in the newest epoch first.
create function metered.base(of_scope text, tip_seq bigint, tip_epoch int, t timestamptz,
    out seq bigint, out spent bigint, out refunded bigint)
language plpgsql stable
as $$
begin
    for e in reverse tip_epoch..0 loop
        select b.seq, b.spent, b.refunded into base.seq, base.spent, base.refunded
        from (select l.seq from metered.ledger l
              where l.scope = of_scope and l.epoch = e and l.at <= t
                and (l.seq & 15 = 1 or l.kind = 'k')
              order by l.at desc, l.seq desc limit 1) s,
             lateral (select l.seq, l.spent, l.refunded from metered.ledger l
              where l.scope = of_scope and l.seq between s.seq and s.seq + 15
                and l.epoch = e and l.at <= t
              order by l.seq desc limit 1) b;
        exit when found;
    end loop;
    if base.seq > 1 then
        return;
    end if;
    -- A purge keeps entry 1 and then takes whole blocks of 16, entry 2 first.
    if tip_seq > 16 and not exists (select from metered.ledger l where l.scope = of_scope and l.seq = 2) then
        seq := null;
    elsif base.seq is null then
        seq := 0;
        spent := 0;
        refunded := 0;
    end if;
end
$$;

-- Refunds of the charges after entry after_seq, in the chain that ends with
-- tip_seq.
create function metered.refunds_after(of_scope text, tip_seq bigint, after_seq bigint) returns bigint
language plpgsql stable
as $$
declare
    top int := 0;
begin
    while tip_seq >> (4 * top) > 15 loop
        top := top + 1;
    end loop;
    -- The aggregate inside lateral leaves the planner no join to choose.
    return (
        select coalesce(sum(x.amount), 0)
        from generate_series(0, top) lv,
             lateral (select sum(r.amount) as amount from metered.refund_sum r
              where r.scope = of_scope and r.level = lv
                and r.block > after_seq >> (4 * lv)
                and r.block <= (after_seq >> (4 * lv)) | 15) x);
end
$$;

-- What a scope whose last entry is tip was charged after t, less the refunds of these
-- charges (used); and the base that it is counted from.
create function metered.spent_since(tip metered.ledger, t timestamptz,
    out used bigint, out base_seq bigint, out base_spent bigint)
language plpgsql stable
as $$
declare
    b record;
begin
    b := metered.base(tip.scope, tip.seq, tip.epoch, t);
    if b.seq is null then
        raise exception 'the window reaches behind what is retained'
            using errcode = 'MT002', detail = tip.scope;
    end if;
    base_seq := b.seq;
    base_spent := b.spent;
    used := tip.spent - b.spent - case when b.refunded = tip.refunded then 0 else metered.refunds_after(tip.scope, tip.seq, b.seq) end;
end
$$;

-- The time at which so much of a window's spending (used, counted from the base, as
-- spent_since has them) has left it that no more than room remains, if nothing else
-- changes. Spending only leaves, entry by entry, so it is the leaving of the first
-- entry that is enough.
--
-- Spending and refunds are mostly even, so that entry is looked for where it would be
-- if they were. A probe that does not halve what is left is followed by one that does.
-- What was refunded of the charges after an entry is dear to sum, and lies between the
-- sums at both ends of where the answer is: most probes are decided by these.
create function metered.leaves_at(tip metered.ledger, base_seq bigint, base_spent bigint, used bigint, win interval, room bigint) returns timestamptz
language plpgsql stable
as $$
declare
    too_few bigint := base_seq;
    enough  bigint := tip.seq;
    most    bigint := tip.spent - base_spent - used;    -- refunds after too_few, and after enough
    fewest  bigint := 0;
    over    float8 := used - room;      -- what is too much still after too_few, and after enough
    under   float8 := -room;
    halve   boolean := false;
    span    bigint;
    step    bigint;
    excess  bigint;
    later   bigint;             -- refunded by then, and then the refunds of charges after it
    l       record;
    at      timestamptz := tip.at;      -- of enough, as is the epoch
    in_epoch int := tip.epoch;
begin
    while enough - too_few > 1 loop
        span := enough - too_few;
        step := case when halve then span / 2 else greatest(1, least(span - 1, ceil(span * (over / (over - under)))::bigint)) end;
        select y.spent, y.refunded, y.at, y.epoch into strict l from metered.ledger y where y.scope = tip.scope and y.seq = too_few + step;
        excess := tip.spent - l.spent - room;
        later := most - (most - fewest) * (step::float8 / span);
        if excess > fewest and excess <= most then
            later := case when l.refunded = tip.refunded then 0 else metered.refunds_after(tip.scope, tip.seq, too_few + step) end;
            if excess <= later then
                fewest := later;
            else
                most := later;
            end if;
        end if;
        if excess <= fewest then
            enough := too_few + step;
            under := excess - later;
            at := l.at;
            in_epoch := l.epoch;
        else
            too_few := too_few + step;
            over := excess - later;
        end if;
        halve := not halve and (enough - too_few) * 2 > span;
    end loop;
    if in_epoch < tip.epoch then   -- a repair is the first entry of its epoch
        at := least(at, (
            select min(r.at) from generate_series(in_epoch + 1, tip.epoch) e,
                 lateral (select k.at from metered.ledger k
                  where k.scope = tip.scope and k.epoch = e and (k.seq & 15 = 1 or k.kind = 'k')
                  order by k.at, k.seq limit 1) r));
    end if;
    return at + win;
end
$$;

-- Judges the limits of one call. tips are the last entries of its scopes, held is
-- what open holds keep of each, and amounts is what they are to be charged;
-- limit_scopes says which of them a limit belongs to; a window of 0 is the lifetime.
-- used is what counts against each limit so far, holds aside; denied lists every limit
-- that refuses, with the microseconds until it would not (-1 for never: a lifetime's
-- spending does not age) and until a hold falls due.
--
-- A caller that has looked at some limits already passes what it knows: "first" is the
-- first limit that may refuse, used is filled as far as it got, and base_seq and
-- base_spent are the base that the last of these was counted from.
create function metered.judge(tips metered.ledger[], held bigint[], amounts bigint[], clk timestamptz,
    limit_scopes int[], maxima bigint[], windows interval[], max_ahead interval,
    inout used bigint[], out denied jsonb,
    first int default 1, base_seq bigint default null, base_spent bigint default null)
language plpgsql stable
as $$
declare
    s     int;
    t     metered.ledger;
    u     bigint;
    room  bigint;
    since timestamptz;
    w     record;
    retry timestamptz;
    falls timestamptz;
begin
    for i in first..cardinality(limit_scopes) loop
        s := limit_scopes[i];
        t := tips[s];
        u := used[i];
        if u is not null then
            null;
        elsif windows[i] = interval '0' then
            u := t.spent - t.refunded - t.credited;
        else
            if t.at > clk + max_ahead then
                raise exception 'the last entry is ahead of the clock'
                    using errcode = 'MT003', detail = jsonb_build_object('scope', t.scope,
                        'ahead_us', (extract(epoch from t.at - clk) * 1000000)::bigint);
            end if;
            since := greatest(clk, t.at) - windows[i];
            u := 0;
            if t.at > since then
                w := metered.spent_since(t, since);
                u := w.used;
                base_seq := w.base_seq;
                base_spent := w.base_spent;
            end if;
        end if;
        used[i] := u;
        room := maxima[i] - held[s] - amounts[s];
        continue when u <= room;
        falls := case when held[s] > 0 then metered.first_due(t.scope, t.next_due, clk) end;
        retry := null;
        if windows[i] > interval '0' and room >= 0 then
            retry := metered.leaves_at(t, base_seq, base_spent, u, windows[i], room);
        end if;
        -- The end of holds can make room, sooner or at all.
        room := maxima[i] - amounts[s];
        if u <= room then
            retry := least(retry, falls);
        elsif windows[i] > interval '0' and room >= 0 and falls < coalesce(retry, 'infinity') then
            retry := least(retry, greatest(falls, metered.leaves_at(t, base_seq, base_spent, u, windows[i], room)));
        end if;
        denied := coalesce(denied, '[]') || jsonb_build_object(
            'limit', i - 1, 'used', u, 'held', held[s],
            'retry_us', coalesce((extract(epoch from retry - clk) * 1000000)::bigint, -1),
            'due_us', (extract(epoch from falls - clk) * 1000000)::bigint);
    end loop;
end
$$;

-- Judges a charge that meets holds which are due, and, if it is let in, ends those of
-- them that are in its way. stand are the last entries after that.
create function metered.admit(tips metered.ledger[], keys bigint[], amounts bigint[], clk timestamptz,
    limit_scopes int[], maxima bigint[], windows interval[], max_ahead interval, wait_ms int,
    out stand metered.ledger[], out used bigint[], out held bigint[], out denied jsonb)
language plpgsql volatile
as $$
declare
    tip       metered.ledger;
    kept      bigint[];         -- what the last entries say is held, lines that are due among it
    remain    bigint[];         -- of that, once lines are ended
    scopes    text[];
    due       timestamptz[];
    verdict   record;
    max_lines int := 500;
begin
    foreach tip in array tips loop
        scopes := scopes || tip.scope;
        due := due || tip.next_due;
        kept := kept || tip.held;
        held := held || tip.held - case when tip.next_due <= clk then metered.overdue(tip.scope, tip.next_due, clk) else 0 end;
    end loop;
    verdict := metered.judge(tips, held, amounts, clk, limit_scopes, maxima, windows, max_ahead, null);
    used := verdict.used;
    denied := verdict.denied;
    stand := tips;
    if denied is not null or kept = held then
        return;
    end if;
    -- What is let in for lines that are due is let in for good, so their holds
    -- are ended for good, as many as it takes: a clock that is set back must not
    -- bring them to life. The rest is left to those who come after. How many it
    -- takes is found first, since rows of holds must be locked all at once, in order.
    loop
        for i in 1..cardinality(scopes) loop
            remain[i] := kept[i] - case when due[i] <= clk then metered.overdue(scopes[i], due[i], clk, max_lines) else 0 end;
        end loop;
        exit when remain = held or (metered.judge(tips, remain, amounts, clk,
            limit_scopes, maxima, windows, max_ahead, null)).denied is null;
        max_lines := 2 * max_lines;
    end loop;
    perform metered.expire_due(scopes, keys, due, clk, max_lines, wait_ms);
    for i in 1..cardinality(scopes) loop
        tip := metered.tip_for_write(scopes[i]);
        if tip.held > remain[i] then
            perform metered.collided();
        end if;
        stand[i] := tip;
    end loop;
end
$$;

-- Charges scopes, all or none. keys are their lock keys, sorted and distinct.
-- Either denied is null, and each scope has one new entry, or nothing was
-- written; with raising, a denial is SQLSTATE MT001 instead, its detail the JSON.
--
-- Of amounts, hold_amounts are not spent but held, by the hold of_hold until ttl from
-- now; they get an entry of their own. at is what counts as now: as_of, if the caller
-- has read the clock under the locks and judged holds by it, or else the clock.
--
-- Without keys it only looks, takes no lock and writes nothing: denied is what
-- check_charge says, which is asked if the charge is not plainly let in. A charge that
-- follows in the same transaction finds its statements prepared.
--
-- Most charges are let in while nothing is due. That case is decided here; all others
-- are left to judge or admit. limit_scopes ascend. What a statement of PL/pgSQL costs in
-- a transaction that runs it once is mostly its preparation, so there are few.
create function metered.post(scopes text[], keys bigint[], amounts bigint[],
    limit_scopes int[], maxima bigint[], windows interval[], max_ahead interval,
    wait_ms int, notes text[], of_namespace text, of_operation text, raising boolean,
    hold_amounts bigint[] default null, of_hold text default null, ttl interval default null, as_of timestamptz default null,
    out seqs bigint[], out ats timestamptz[], out used bigint[], out held bigint[], out denied jsonb, out at timestamptz)
language plpgsql volatile
as $$
declare
    k     bigint;
    tip   metered.ledger;
    tips  metered.ledger[];
    n     int := 1;
    since timestamptz;
    base_seq      bigint;   -- what a window's use is counted from
    base_spent    bigint;
    base_refunded bigint;
    w     record;
    plain boolean := metered.memory_kept();     -- true; what for, is said there
    due   boolean := false;
    a     record;
    units bigint;
begin
    foreach k in array coalesce(keys, '{}') loop
        continue when pg_try_advisory_xact_lock(k);
        perform metered.lock_keys(keys, wait_ms);
        exit;
    end loop;
    at := coalesce(as_of, metered.clock());     -- after the lock: a wait must not date the entry back
    for i in 1..cardinality(scopes) loop
        if keys is null then
            select * into tip from metered.ledger l where l.scope = scopes[i] order by l.seq desc limit 1;
        else
            -- tip_for_write, without the call where there is an entry.
            select * into tip from metered.ledger l where l.scope = scopes[i] order by l.seq desc limit 1 for key share;
        end if;
        if not found then
            tip := case when keys is null then metered.fresh(scopes[i]) else metered.first_for_write(scopes[i]) end;
        end if;
        tips[i] := tip;
        held[i] := tip.held;
        if tip.at > at or tip.next_due <= at then
            plain := false;
            due := due or tip.next_due <= at;
        end if;
        while plain and limit_scopes[n] = i loop
            since := at - windows[n];
            if since = at then
                used[n] := tip.spent - tip.refunded - tip.credited;
            elsif tip.at <= since then
                used[n] := 0;
            else
                -- spent_since where the base is in the newest epoch, or all that was ever
                -- spent is inside.
                select b.seq, b.spent, b.refunded into base_seq, base_spent, base_refunded
                from (select l.seq from metered.ledger l
                      where l.scope = scopes[i] and l.epoch = tip.epoch and l.at <= since
                        and (l.seq & 15 = 1 or l.kind = 'k')
                      order by l.at desc, l.seq desc limit 1) x,
                     lateral (select l.seq, l.spent, l.refunded from metered.ledger l
                      where l.scope = scopes[i] and l.seq between x.seq and x.seq + 15
                        and l.epoch = tip.epoch and l.at <= since
                      order by l.seq desc limit 1) b;
                if base_seq > 1 and base_refunded = tip.refunded then
                    used[n] := tip.spent - base_spent;
                elsif base_seq > 1 then
                    used[n] := tip.spent - base_spent - metered.refunds_after(scopes[i], tip.seq, base_seq);
                elsif base_seq is null and tip.epoch = 0 and tip.seq <= 16 then
                    used[n] := tip.spent - case when tip.refunded = 0 then 0 else metered.refunds_after(scopes[i], tip.seq, 0) end;
                -- Apart from that: a condition with a query in it is a statement.
                elsif base_seq is null and tip.epoch = 0
                      and exists (select from metered.ledger l where l.scope = scopes[i] and l.seq = 2) then
                    used[n] := tip.spent - case when tip.refunded = 0 then 0 else metered.refunds_after(scopes[i], tip.seq, 0) end;
                else
                    w := metered.spent_since(tip, since);
                    base_seq := w.base_seq;
                    base_spent := w.base_spent;
                    used[n] := w.used;
                end if;
            end if;
            plain := used[n] <= maxima[n] - tip.held - amounts[i];
            n := n + 1;
        end loop;
    end loop;
    plain := plain and n > cardinality(limit_scopes);
    if keys is null or not plain then
        if keys is null then
            if not plain then
                denied := (metered.check_charge(scopes, amounts, limit_scopes, maxima, windows, max_ahead)).denied;
            end if;
            return;
        end if;
        if due then
            a := metered.admit(tips, keys, amounts, at, limit_scopes, maxima, windows, max_ahead, wait_ms);
            tips := a.stand;
            held := a.held;
        else
            -- The last limit of which something is known is the first that may refuse.
            a := metered.judge(tips, held, amounts, at, limit_scopes, maxima, windows, max_ahead, used,
                greatest(1, cardinality(used)), coalesce(base_seq, 0), coalesce(base_spent, 0));
        end if;
        used := a.used;
        denied := a.denied;
        if denied is not null then
            if raising then
                raise exception 'a limit refuses the charge' using errcode = 'MT001', detail = denied;
            end if;
            return;
        end if;
    end if;
    for i in 1..cardinality(scopes) loop
        tip := tips[i];
        if tip.held > 0 then
            tip.next_due := metered.due_after(scopes[i], tip.seq, tip.held, tip.next_due, at);
        end if;
        tip.at := greatest(at, tip.at);
        units := amounts[i] - coalesce(hold_amounts[i], 0);
        if units < amounts[i] then
            tip.seq := tip.seq + 1;
            tip.held := tip.held + hold_amounts[i];
            tip.next_due := least(tip.next_due, at + ttl);
            insert into metered.ledger (seq, amount, at, spent, refunded, credited, held,
                epoch, kind, scope, next_due, hold, namespace, operation, note)
            values (tip.seq, hold_amounts[i], tip.at, tip.spent, tip.refunded, tip.credited, tip.held,
                tip.epoch, 'h', scopes[i], tip.next_due, of_hold, of_namespace, of_operation, nullif(notes[i], '')::jsonb)
            on conflict do nothing;
            if not found then
                perform metered.collided();
            end if;
        end if;
        if units > 0 then
            tip.seq := tip.seq + 1;
            insert into metered.ledger (seq, amount, at, spent, refunded, credited, held,
                epoch, kind, scope, next_due, hold, namespace, operation, note)
            values (tip.seq, units, tip.at, tip.spent + units, tip.refunded, tip.credited, tip.held,
                tip.epoch, 'c', scopes[i], tip.next_due, of_hold, of_namespace, of_operation, nullif(notes[i], '')::jsonb)
            on conflict do nothing;
            if not found then
                perform metered.collided();
            end if;
        elsif units < 0 or amounts[i] < 1 then
            perform metered.no_amount();
        end if;
        seqs[i] := tip.seq;
        ats[i] := tip.at;
    end loop;
end
$$;

-- What charge answers, as post has it.
create type metered.posted as (seqs bigint[], ats timestamptz[], used bigint[], held bigint[], denied jsonb, at timestamptz);

-- post, for applications: a charge that is no command's, and is answered when denied. It
-- returns the whole: that costs less than to assign each part.
create function metered.charge(scopes text[], keys bigint[], amounts bigint[],
    limit_scopes int[], maxima bigint[], windows interval[], max_ahead interval,
    wait_ms int, notes text[]) returns metered.posted
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set plan_cache_mode = force_generic_plan
as $$
begin
    return metered.post(scopes, keys, amounts, limit_scopes, maxima, windows, max_ahead, wait_ms, notes, null, null, false);
end
$$;

-- What charge would say now, without a lock and without writing. STABLE, so that
-- all its statements see one snapshot.
create function metered.check_charge(scopes text[], amounts bigint[],
    limit_scopes int[], maxima bigint[], windows interval[], max_ahead interval,
    out used bigint[], out held bigint[], out denied jsonb)
language plpgsql stable security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set plan_cache_mode = force_generic_plan
as $$
declare
    tip     metered.ledger;
    tips    metered.ledger[];
    clk     timestamptz := metered.clock();
    verdict record;
begin
    for i in 1..cardinality(scopes) loop
        tip := metered.tip(scopes[i]);
        tips[i] := tip;
        held[i] := tip.held - case when tip.next_due <= clk then metered.overdue(scopes[i], tip.next_due, clk) else 0 end;
    end loop;
    verdict := metered.judge(tips, held, amounts, clk, limit_scopes, maxima, windows, max_ahead, null);
    used := verdict.used;
    denied := verdict.denied;
end
$$;

-- Where each scope stands, for as many windows as there are pairs; window 0 is
-- the lifetime.
create function metered.usage(scopes text[], windows interval[])
returns table (used bigint, held bigint, spent bigint, refunded bigint, credited bigint, seq bigint, due_us bigint)
language plpgsql stable security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set plan_cache_mode = force_generic_plan
as $$
declare
    clk   timestamptz := metered.clock();
    since timestamptz;
    tip   metered.ledger;
begin
    for i in 1..cardinality(scopes) loop
        tip := metered.tip(scopes[i]);
        since := greatest(clk, tip.at) - windows[i];
        if windows[i] = interval '0' then
            used := tip.spent - tip.refunded - tip.credited;
        elsif tip.at <= since then
            used := 0;
        else
            used := (metered.spent_since(tip, since)).used;
        end if;
        held := tip.held;
        if tip.next_due <= clk then
            held := held - metered.overdue(scopes[i], tip.next_due, clk);
        end if;
        spent := tip.spent;
        refunded := tip.refunded;
        credited := tip.credited;
        seq := tip.seq;
        due_us := case when held > 0 then
            extract(epoch from metered.first_due(scopes[i], tip.next_due, clk) - clk) * 1000000 end;
        return next;
    end loop;
end
$$;

-- Begins an entry after the scope's last one, under its lock.
create function metered.next_entry(of_scope text, key bigint, wait_ms int, note text, of_namespace text, of_operation text) returns metered.ledger
language plpgsql volatile
as $$
declare
    e metered.ledger;
begin
    perform metered.lock_keys(array[key], wait_ms);
    e := metered.tip_for_write(of_scope);
    e.seq := e.seq + 1;
    e.at := greatest(metered.clock(), e.at);
    e.ref := null;
    e.hold := null;
    e.namespace := of_namespace;
    e.operation := of_operation;
    e.note := nullif(note, '')::jsonb;
    return e;
end
$$;

-- Refuses an amount that makes no entry.
create function metered.no_amount() returns void
language plpgsql
as $$
begin
    raise exception 'the amount of an entry is at least 1' using errcode = '23514';
end
$$;

-- Appends an entry. ON CONFLICT, because a plain unique violation is one that callers'
-- retry loops do not retry.
create function metered.append(e metered.ledger) returns void
language plpgsql volatile
as $$
begin
    if e.amount < 1 and e.kind <> 'k' then
        perform metered.no_amount();
    end if;
    insert into metered.ledger values (e.*) on conflict do nothing;
    if not found then
        perform metered.collided();
    end if;
end
$$;

create function metered.credit(of_scope text, key bigint, units bigint, wait_ms int, note text, of_namespace text, of_operation text,
    out seq bigint, out at timestamptz)
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set plan_cache_mode = force_generic_plan
as $$
declare
    e metered.ledger := metered.next_entry(of_scope, key, wait_ms, note, of_namespace, of_operation);
begin
    e.kind := 'd';
    e.amount := units;
    e.credited := e.credited + units;
    perform metered.append(e);
    seq := e.seq;
    at := e.at;
end
$$;

-- Refunds part of a charge. status is ok, or says why nothing was written:
-- missing (no such entry), purged, kind (the entry is no charge) or excess (more
-- than remains of the charge). remaining is what can still be refunded of it. With
-- raising, a refusal is SQLSTATE MT008 instead, its detail both as JSON.
create function metered.refund(of_scope text, key bigint, charge_seq bigint, units bigint, wait_ms int, note text, of_namespace text, of_operation text,
    raising boolean,
    out status text, out remaining bigint, out seq bigint, out at timestamptz)
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set plan_cache_mode = force_generic_plan
as $$
declare
    e      metered.ledger := metered.next_entry(of_scope, key, wait_ms, note, of_namespace, of_operation);
    charge metered.ledger;
begin
    select * into charge from metered.ledger l where l.scope = of_scope and l.seq = charge_seq;
    if e.seq <= charge_seq then
        status := 'missing';
    elsif charge.seq is null or charge_seq = 1 and e.seq > 2
          and not exists (select from metered.ledger l where l.scope = of_scope and l.seq = 2) then
        -- Entry 1 outlives a purge, but what was refunded of it does not.
        status := 'purged';
    elsif charge.kind not in ('c', 'u') then
        status := 'kind';
    else
        remaining := charge.amount - coalesce((select r.amount from metered.refund_sum r
            where r.scope = of_scope and r.level = 0 and r.block = charge_seq), 0);
        status := case when units > remaining then 'excess' end;
    end if;
    if status is not null then
        if current_setting('transaction_isolation') in ('repeatable read', 'serializable') then
            -- This view of the scope may be an old one. An entry meets what it has not
            -- seen, with 40001; the block takes it back.
            begin
                e.kind := 'r';
                e.amount := units;
                perform metered.append(e);
                raise exception using errcode = 'MT100';
            exception when sqlstate 'MT100' then
                null;
            end;
        end if;
        if raising then
            raise exception 'the charge cannot be refunded' using errcode = 'MT008',
                detail = jsonb_build_object('status', status, 'remaining', remaining);
        end if;
        return;
    end if;
    e.kind := 'r';
    e.amount := units;
    e.ref := charge_seq;
    e.refunded := e.refunded + units;
    perform metered.append(e);
    insert into metered.refund_sum as r (scope, level, block, amount)
    select of_scope, lv, charge_seq >> (4 * lv), units
    from generate_series(0, 15) lv where lv = 0 or charge_seq >> (4 * lv) > 0
    on conflict (scope, level, block) do update set amount = r.amount + excluded.amount;
    remaining := remaining - units;
    status := 'ok';
    seq := e.seq;
    at := e.at;
end
$$;

-- Deletes entries of one scope that no window ending at or after cutoff needs,
-- at most max_rows of them, beginning after entry after_seq. Entry 1 stays, for
-- whoever sees the scope as empty to collide with, but as a new row, for whoever
-- sees it as the last entry (tip_for_write). What follows begins at a multiple of
-- 16, plus one, which the time index holds.
-- upto is the last seq deleted or passed over, for the next call to begin after:
-- scanning from the front again would wade through the rows deleted before.
--
-- With forgetting, nothing stays of a scope whose last entry is that old, if it has no
-- credit, no open hold and no claim that stands, which do not age. A writer whose
-- snapshot shows the scope as empty is right again, and one whose snapshot shows an
-- entry finds it deleted. One without the lock may have read the last entry and be about
-- to append: the deletion waits for it, and then this function appends and deletes an
-- entry itself, which collides with that writer's.
create function metered.purge_scope(of_scope text, key bigint, cutoff timestamptz, after_seq bigint, max_rows int, wait_ms int, forgetting boolean,
    out deleted bigint, out upto bigint, out done boolean, out forgotten boolean)
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set plan_cache_mode = force_generic_plan
as $$
declare
    tip   metered.ledger;
    first metered.ledger;
    keep  bigint;   -- the first entry to stay
    rest  bigint;
begin
    perform metered.lock_keys(array[key], wait_ms);
    tip := metered.tip(of_scope);
    forgotten := false;
    keep := coalesce((metered.base(of_scope, tip.seq, tip.epoch, cutoff)).seq, 0);
    keep := greatest(1, ((keep - 1) & ~15) + 1);
    upto := greatest(after_seq, 1);
    done := keep - 1 <= upto + max_rows;
    if not done then
        keep := ((upto + max_rows) & ~15) + 1;
    end if;
    delete from metered.ledger l where l.scope = of_scope and l.seq > upto and l.seq < keep;
    get diagnostics deleted = row_count;
    if deleted > 0 then
        delete from metered.ledger l where l.scope = of_scope and l.seq = 1 returning l.* into first;
        perform metered.append(first);
    end if;
    for lv in 0..15 loop
        exit when keep >> (4 * lv) = 0;
        delete from metered.refund_sum r
        where r.scope = of_scope and r.level = lv
          and r.block >= upto >> (4 * lv) and r.block < keep >> (4 * lv);
    end loop;
    upto := greatest(upto, keep - 1);
    if forgetting and done and tip.seq > 0 and tip.at <= cutoff and tip.held = 0 and tip.credited = 0 and not exists (
        select from metered.holds h where h.claim = of_scope and (h.state = 'h' or h.state = 'c' and not h.returned)) then
        delete from metered.ledger l where l.scope = of_scope and l.seq <= tip.seq;
        get diagnostics rest = row_count;
        deleted := deleted + rest;
        delete from metered.refund_sum r where r.scope = of_scope;
        tip.seq := tip.seq + 1;
        perform metered.append(tip);
        delete from metered.ledger l where l.scope = of_scope and l.seq = tip.seq;
        forgotten := true;
    end if;
end
$$;

-- Ends the freeze of a scope whose last entry is ahead of the clock, because the
-- clock was: appends an entry of a new epoch, at the clock's time. Entries before
-- it count as made no later than it. None leaves a window early, and no entry is
-- changed. Does nothing, and seq is null, if the scope is not ahead.
create function metered.repair_clock(of_scope text, key bigint, wait_ms int, note text,
    out seq bigint, out at timestamptz, out ahead interval)
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set plan_cache_mode = force_generic_plan
as $$
declare
    e   metered.ledger := metered.next_entry(of_scope, key, wait_ms, note, null, null);
    clk timestamptz := metered.clock();
begin
    ahead := greatest(e.at - clk, interval '0');
    if e.at <= clk then
        return;
    end if;
    e.kind := 'k';
    e.amount := 0;
    e.epoch := e.epoch + 1;
    e.at := clk;
    perform metered.append(e);
    seq := e.seq;
    at := e.at;
end
$$;

-- ===== holds ==============================================================

-- Reservations. What a hold keeps of a scope is in the ledger (held) and in its
-- line; this is who holds it, until when, and how it ended.
--
-- Locks are taken in one order everywhere: the scopes' advisory locks by key, then
-- rows of holds by no. Under the lock of any of its scopes a hold can only expire.
-- That is decided once, here, by the plain clock; each line is then freed under its
-- own scope's lock, by whoever comes.
create table metered.holds (
    no          bigint      generated always as identity primary key,
    placed_at   timestamptz not null,
    deadline    timestamptz not null,
    due         timestamptz not null,   -- deadline and grace: its units are free from here on
    ceiling     timestamptz not null,   -- no deadline is later
    ended_at    timestamptz,
    issued_at   timestamptz,            -- the time that the id carries, if it does
    version     int         not null,   -- transitions so far
    state       "char"      not null,   -- h held, c captured, r released, x expired
    returned    boolean     not null default false, -- captured, and given back since
    pending     boolean     not null default true,  -- not ended, or ended by time and not announced
    tenant      text collate "C" not null,
    id          text collate "C" not null,
    holder      text collate "C" not null,
    claim       text collate "C",       -- the scope of what is claimed, if it is a claim
    entity      text collate "C",
    fingerprint bytea       not null,   -- a version byte and a SHA-256
    keys        bigint[]    not null,   -- of the locks of its scopes, ascending
    metadata    json,
    unique (tenant, id)
);

-- What the sweeper takes first.
create index holds_due on metered.holds (due, no) where pending;

-- Lists by holder, and by what a capture linked.
create index holds_holder on metered.holds (tenant, holder, no) where holder <> '';
create index holds_entity on metered.holds (tenant, entity, no) where entity is not null;

-- At most one active claim of a value. The ledger sees to that already; this is
-- how it is found.
create unique index holds_claim on metered.holds (claim)
    where claim is not null and (state = 'h' or state = 'c' and not returned);

-- What a purge takes first: a captured claim is kept while it stands.
create index holds_ended on metered.holds (ended_at)
    where ended_at is not null and (claim is null or state <> 'c' or returned);

-- One scope of a hold.
create table metered.hold_lines (
    hold     bigint      not null,      -- holds.no
    key      bigint      not null,      -- of the scope's lock
    amount   bigint      not null,      -- placed
    captured bigint      not null default 0,
    open     bigint      not null,      -- counted in the scope's held
    due      timestamptz not null,      -- holds.due
    scope    text collate "C" not null,
    primary key (hold, scope)
);

-- Which lines of a scope fall due first. Read from next_due on, so that entries of
-- lines that ended, which a long snapshot keeps alive, are not waded through. Lines
-- of a hold are asked for with open <> 0, which keeps the planner from this index.
create index hold_lines_due on metered.hold_lines (scope, due) where open > 0;

-- Every transition, written with it.
create table metered.hold_events (
    hold      bigint      not null,     -- holds.no
    at        timestamptz not null,
    deadline  timestamptz,              -- of a place or an extension: the new one
    version   int         not null,
    kind      "char"      not null,     -- h placed, p captured in part, c captured, e extended,
                                        -- r released, x expired, b given back
    entity    text,
    detail    jsonb,                    -- a place's constants; a capture's lines; what was not given back
    note      jsonb,                    -- actor, tenant, correlation, reason
    namespace text,                     -- of the operation
    operation text,
    primary key (hold, version)
);

-- The latest time of an id whose hold was purged. Never decreases.
create table metered.holds_horizon (
    at  timestamptz not null,
    one boolean primary key default true check (one)
);

insert into metered.holds_horizon (at) values ('-infinity');

-- How many units of a scope are still held by lines that are due and not freed yet: by
-- all such lines, or by the first max_lines. since is a time before which none is due.
create function metered.overdue(of_scope text, since timestamptz, clk timestamptz, max_lines int default null) returns bigint
language plpgsql stable
as $$
begin
    return (select coalesce(sum(d.open), 0) from (
        select l.open from metered.hold_lines l
        where l.scope = of_scope and l.open > 0 and l.due >= since and l.due <= clk
        order by l.due limit max_lines) d);
end
$$;

-- When the first line that is not due falls due.
create function metered.first_due(of_scope text, since timestamptz, clk timestamptz) returns timestamptz
language plpgsql stable
as $$
begin
    return (select l.due from metered.hold_lines l
            where l.scope = of_scope and l.open > 0 and l.due >= since and l.due > clk
            order by l.due limit 1);
end
$$;

-- A new next_due of a scope whose old one is since: when the first line falls due that
-- does within 10 seconds of that or of now, whichever is later, or else the end of these.
-- What ended and would have fallen due until now is read past in any case; to look further
-- than that could mean wading through all that was placed and ended meanwhile.
create function metered.later_due(of_scope text, since timestamptz, clk timestamptz) returns timestamptz
language plpgsql stable
as $$
declare
    horizon timestamptz := greatest(since, clk) + interval '10 s';
begin
    return coalesce((
        select l.due from metered.hold_lines l
        where l.scope = of_scope and l.open > 0 and l.due >= since and l.due <= horizon
        order by l.due limit 1), horizon);
end
$$;

-- What next_due becomes with the entry behind that of seq. held is what is held then; a
-- line that is new is not looked at. It moves on where it has passed, and about once in 16
-- entries (twice where the next one is odd: a call may write two), so that whoever asks
-- what falls due first need not wade through what has ended since. Inlined wherever it
-- stands.
create function metered.due_after(of_scope text, seq bigint, held bigint, next_due timestamptz, clk timestamptz)
returns timestamptz
language sql stable
as $$
    select case when held > 0 then
        case when next_due <= clk or seq & 15 < 2 then metered.later_due(of_scope, next_due, clk) else next_due end
    end
$$;

-- Frees what the holds still keep of the scopes whose keys are given, which are
-- locked: one entry for each scope.
create function metered.free_lines(nos bigint[], keys bigint[], as_kind "char", clk timestamptz,
    of_hold text, note text, of_namespace text, of_operation text) returns void
language plpgsql volatile
as $$
declare
    scopes text[];
    sums   bigint[];
    made   int;
begin
    select array_agg(f.scope), array_agg(f.units) into scopes, sums
    from (select l.scope, sum(l.open)::bigint as units from metered.hold_lines l
          where l.hold = any (nos) and l.open <> 0 and l.key = any (keys)
          group by l.scope order by l.scope) f;
    if scopes is null then
        return;
    end if;
    update metered.hold_lines l set open = 0
    where l.hold = any (nos) and l.open <> 0 and l.key = any (keys);
    insert into metered.ledger (seq, amount, at, spent, refunded, credited, held,
        epoch, kind, scope, next_due, hold, namespace, operation, note)
    select t.seq + 1, f.units, greatest(clk, t.at), t.spent, t.refunded, t.credited, t.held - f.units,
        t.epoch, as_kind, f.scope, metered.due_after(f.scope, t.seq, t.held - f.units, t.next_due, clk),
        of_hold, of_namespace, of_operation, nullif(free_lines.note, '')::jsonb
    from unnest(scopes, sums) f(scope, units),
         lateral (select * from metered.ledger l where l.scope = f.scope order by l.seq desc limit 1 for key share) t
    on conflict do nothing;
    get diagnostics made = row_count;
    if made < cardinality(scopes) then
        perform metered.collided();
    end if;
end
$$;

-- Ends those of the holds that are due and have not ended. Their rows are locked,
-- in order.
create function metered.expire_rows(nos bigint[], clk timestamptz, note text) returns void
language plpgsql volatile
as $$
begin
    with ended as (
        update metered.holds h set state = 'x', ended_at = h.due, version = h.version + 1
        where h.no = any (nos) and h.state = 'h' and h.due <= clk
        returning h.no, h.version)
    insert into metered.hold_events (hold, at, version, kind, note)
    select e.no, clk, e.version, 'x', nullif(expire_rows.note, '')::jsonb from ended e;
end
$$;

-- Frees up to max_lines lines that are due of each of the scopes, which are locked
-- and none of whose lines is due before "since". The note names the system, as
-- sweep_holds does: the caller only needs their room, and did not ask for their end.
create function metered.expire_due(scopes text[], keys bigint[], since timestamptz[], clk timestamptz, max_lines int, wait_ms int) returns void
language plpgsql volatile
as $$
declare
    nos    bigint[];
    before text;
begin
    select array_agg(distinct d.hold) into nos
    from unnest(scopes, since) s(scope, since),
         lateral (select l.hold from metered.hold_lines l
          where l.scope = s.scope and l.open > 0 and l.due >= s.since and l.due <= clk
          order by l.due limit max_lines) d;
    if nos is null then
        perform metered.collided(); -- the caller saw some: not with this snapshot
    end if;
    before := metered.bound_lock_wait(wait_ms);
    perform from metered.holds h where h.no = any (nos) order by h.no for no key update;
    before := metered.unbound_lock_wait(before);
    perform metered.expire_rows(nos, clk, '{"actor": "system"}');
    perform metered.free_lines(nos, keys, 'x', clk, null, '{"actor": "system"}', null, null);
end
$$;

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
language plpgsql stable security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set plan_cache_mode = force_generic_plan
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
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set plan_cache_mode = force_generic_plan
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
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set plan_cache_mode = force_generic_plan
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

-- Locks holds of a tenant for a transition: the scopes of their lines, by key, and
-- then their rows, by no. nos are in the order of ids. needs is the state that they
-- must be in, c or h; an h must not be due. States are read under the locks, as is clk.
-- If one of the holds does not do, failed is its id and status says why: unknown,
-- retired, holder (which callers must not tell from unknown) or state.
--
-- Whose a hold is never changes, and is looked at before anything is locked: locks, a wait
-- for one, or a 40001 would tell another's hold from none.
create function metered.lock_holds(of_tenant text, ids text[], issued timestamptz[], of_holder text, needs "char", wait_ms int,
    out nos bigint[], out keys bigint[], out clk timestamptz, out status text, out failed text, out stands "char", out failed_no bigint)
language plpgsql volatile
as $$
declare
    h       record;
    seen    bigint[];
    waited  boolean;
    before  text;
begin
    -- Nearly always there is one, and nobody is in its way. Then nothing waits, and the order
    -- in which it is all locked does not matter. Otherwise the locks that it got are the
    -- first of its scopes' by key, or all of them and perhaps its row: in order, for what
    -- comes below. The row that is locked is read as it is by then, whatever the snapshot.
    if cardinality(ids) = 1 and metered.memory_kept() then
        select y.no, y.keys, y.state, y.due into h from metered.holds y
        where y.tenant = of_tenant and y.id = ids[1]
          and case when of_holder = '' or y.holder = of_holder then metered.try_keys(y.keys) end
        for no key update skip locked;
        if found then
            clk := metered.clock();     -- after the lock
            if h.state = needs and (needs <> 'h' or h.due > clk) then
                nos := array[h.no];
                keys := h.keys;
                return;
            end if;
        end if;
    end if;
    keys := '{}';
    for i in 1..cardinality(ids) loop
        select y.no, y.keys, y.holder into h from metered.holds y where y.tenant = of_tenant and y.id = ids[i];
        if h.no is null or of_holder <> '' and h.holder <> of_holder then
            -- What does not exist would be retired with such an id: so is one of somebody else.
            status := case when issued[i] <= (select z.at from metered.holds_horizon z where z.one) then 'retired'
                when h.no is null then 'unknown' else 'holder' end;
            failed := ids[i];
            return;
        end if;
        seen := seen || h.no;
        keys := keys || h.keys;
    end loop;
    select coalesce(array_agg(k.key order by k.key), '{}') into keys from (select distinct unnest(keys)) k(key);
    waited := metered.lock_keys(keys, wait_ms);
    before := metered.bound_lock_wait(wait_ms);
    perform from metered.holds y where y.no = any (seen) order by y.no for no key update;
    before := metered.unbound_lock_wait(before);
    clk := metered.clock();     -- after the lock
    for i in 1..cardinality(ids) loop
        -- One that took the id of one purged while this waited is not locked: it comes too late.
        select y.no, y.state, y.due into h from metered.holds y
        where y.tenant = of_tenant and y.id = ids[i] and y.no = any (seen);
        if h.no is not null and h.state = needs and (needs <> 'h' or h.due > clk) then
            nos[i] := h.no;
            continue;
        end if;
        failed := ids[i];
        if h.no is null then
            status := case when issued[i] <= (select z.at from metered.holds_horizon z where z.one) then 'retired' else 'unknown' end;
        else
            status := 'state';
            stands := case when h.state = 'h' and h.due <= clk then 'x' else h.state end;
            failed_no := h.no;
        end if;
        return;
    end loop;
end
$$;

-- Answers a refused transition, or raises the answer. json, since a hold may be in it
-- whose metadata is none to jsonb: \u0000, half a surrogate pair, 1e200000.
create function metered.refuse_hold(raising boolean, answer json) returns json
language plpgsql
as $$
begin
    if raising then
        raise exception 'the hold does not allow it' using errcode = 'MT007', detail = answer;
    end if;
    return answer;
end
$$;

-- Captures holds, all or none: spends what they keep, or the units given for the
-- scopes of one hold, and with closing frees the rest and ends them. policy says what
-- happens to units beyond what is kept: n (refused), f (charged if the limits given
-- let them), a (charged). refused is null, or why nothing was written.
create function metered.capture_holds(of_tenant text, ids text[], issued timestamptz[], of_holder text,
    line_scopes text[], line_units bigint[], closing boolean, policy "char",
    limit_scopes int[], maxima bigint[], windows interval[], max_ahead interval, wait_ms int,
    of_entity text, note text, channel text, of_namespace text, of_operation text, raising boolean,
    out refused json, out holds json[])
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set plan_cache_mode = force_generic_plan
as $$
declare
    k       record;
    own     text;
    l       record;
    c       record;
    take    bigint;
    covered bigint;
    excess_scopes text[];
    excess_units bigint[];
    excess_limits int[];
    excess_maxima bigint[];
    excess_windows interval[];
    detail  jsonb;
    lines   json[];
    n       int;
    v       int;
    hold    json;
    unused  text;
begin
    k := metered.lock_holds(of_tenant, ids, issued, of_holder, 'h', wait_ms);
    if k.status is not null then
        refused := metered.refuse_hold(raising, json_build_object('status', k.status, 'id', k.failed, 'state', k.stands,
            'hold', metered.hold_json(k.failed_no, k.clk)));
        return;
    end if;
    -- A claim's unit is spent when the claim is confirmed, and only then. If it could be
    -- spent before, and the hold then ended otherwise, nobody could have the key, nor give
    -- it back; were it not spent, the key would be taken, and nothing given back would end
    -- that. Without lines, all is taken.
    if line_scopes is not null then
        select h.claim into own from metered.holds h where h.no = k.nos[1];
        if own is not null and closing <> coalesce(line_units[array_position(line_scopes, own)] > 0, false) then
            refused := metered.refuse_hold(raising, json_build_object('status', case when closing then 'unconfirmed' else 'claim' end,
                'id', ids[1], 'scope', own));
            return;
        end if;
        for i in 1..cardinality(line_scopes) loop
            select y.open, y.key into l from metered.hold_lines y where y.hold = k.nos[1] and y.scope = line_scopes[i];
            if l.open is null then
                refused := metered.refuse_hold(raising, json_build_object('status', 'line', 'id', ids[1],
                    'scope', line_scopes[i]));
                return;
            end if;
            if line_units[i] > l.open then
                if policy = 'n' then
                    refused := metered.refuse_hold(raising, json_build_object('status', 'excess', 'id', ids[1],
                        'scope', line_scopes[i], 'requested', line_units[i], 'open', l.open));
                    return;
                end if;
                excess_scopes := excess_scopes || line_scopes[i];
                excess_units := excess_units || (line_units[i] - l.open);
                if policy = 'f' then
                    for j in 1..cardinality(limit_scopes) loop
                        continue when limit_scopes[j] <> i;
                        excess_limits := excess_limits || cardinality(excess_scopes);
                        excess_maxima := excess_maxima || maxima[j];
                        excess_windows := excess_windows || windows[j];
                    end loop;
                end if;
            end if;
        end loop;
    end if;
    -- The excess first: what is kept and what is spent of it count the same.
    if excess_scopes is not null then
        c := metered.post(excess_scopes, k.keys, excess_units,
            coalesce(excess_limits, '{}'), coalesce(excess_maxima, '{}'), coalesce(excess_windows, '{}'), max_ahead, wait_ms,
            array_fill(note, array[cardinality(excess_scopes)]), of_namespace, of_operation, false, null, ids[1], null, k.clk);
        if c.denied is not null then
            refused := metered.refuse_hold(raising, json_build_object('status', 'denied', 'denied', c.denied,
                'scopes', excess_scopes, 'units', excess_units));
            return;
        end if;
    end if;
    for i in 1..cardinality(ids) loop
        detail := '[]';
        lines := '{}';
        for l in
            select y.scope, y.amount, y.captured, y.open, t.seq, t.at, t.spent, t.refunded, t.credited, t.held, t.epoch, t.next_due
            from metered.hold_lines y left join lateral (
                select * from metered.ledger e where e.scope = y.scope order by e.seq desc limit 1 for key share) t on true
            where y.hold = k.nos[i] order by y.scope
        loop
            take := case when line_scopes is null then l.open
                else coalesce(line_units[array_position(line_scopes, l.scope)], 0) end;
            covered := least(take, l.open);
            if covered > 0 or closing and l.open > 0 then
                if l.seq is null then
                    perform metered.collided();
                end if;
                if covered > 0 then
                    insert into metered.ledger (seq, amount, at, spent, refunded, credited, held,
                        epoch, kind, scope, next_due, hold, namespace, operation, note)
                    values (l.seq + 1, covered, greatest(k.clk, l.at),
                        l.spent + covered, l.refunded, l.credited, l.held - covered,
                        l.epoch, 'u', l.scope, metered.due_after(l.scope, l.seq, l.held - covered, l.next_due, k.clk),
                        ids[i], of_namespace, of_operation, nullif(capture_holds.note, '')::jsonb)
                    on conflict do nothing;
                    if not found then
                        perform metered.collided();
                    end if;
                    detail := detail || jsonb_build_object('scope', l.scope, 'amount', covered,
                        'seq', l.seq + 1, 'at', greatest(k.clk, l.at));
                end if;
                if closing and covered < l.open then
                    insert into metered.ledger (seq, amount, at, spent, refunded, credited, held,
                        epoch, kind, scope, next_due, hold, namespace, operation, note)
                    values (l.seq + case when covered > 0 then 2 else 1 end, l.open - covered, greatest(k.clk, l.at),
                        l.spent + covered, l.refunded, l.credited, l.held - l.open,
                        l.epoch, 'l', l.scope, metered.due_after(l.scope, l.seq, l.held - l.open, l.next_due, k.clk),
                        ids[i], of_namespace, of_operation, nullif(capture_holds.note, '')::jsonb)
                    on conflict do nothing;
                    if not found then
                        perform metered.collided();
                    end if;
                end if;
            end if;
            if take > covered then
                n := array_position(excess_scopes, l.scope);
                detail := detail || jsonb_build_object('scope', l.scope, 'amount', take - covered, 'seq', c.seqs[n], 'at', c.ats[n], 'excess', true);
            end if;
            lines := lines || metered.line_json(l.scope, l.amount, l.captured + take, case when closing then 0 else l.open - covered end);
            if take > 0 or closing and l.open > 0 then
                update metered.hold_lines y set captured = y.captured + take, open = case when closing then 0 else y.open - covered end
                where y.hold = k.nos[i] and y.scope = l.scope;
            end if;
        end loop;
        update metered.holds h set version = h.version + 1, entity = coalesce(of_entity, h.entity),
            state = case when closing then 'c' else 'h' end::"char", ended_at = case when closing then k.clk end, pending = not closing
        where h.no = k.nos[i]
        returning h.version, metered.hold_as_json(h, array_to_json(lines), k.clk) into v, hold;
        holds[i] := hold;
        insert into metered.hold_events (hold, at, version, kind, entity, detail, note, namespace, operation)
        values (k.nos[i], k.clk, v, case when closing then 'c' else 'p' end, of_entity, detail,
            nullif(capture_holds.note, '')::jsonb, of_namespace, of_operation);
        if channel is not null then
            perform metered.announce(channel, of_tenant, ids[i], v, case when closing then 'captured' else 'captured_part' end);
        end if;
        unused := case when of_operation is not null then metered.remember_hold(hold) end;
    end loop;
end
$$;

-- Releases holds, all or none.
create function metered.release_holds(of_tenant text, ids text[], issued timestamptz[], of_holder text, wait_ms int,
    note text, channel text, of_namespace text, of_operation text, raising boolean,
    out refused json, out holds json[])
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set plan_cache_mode = force_generic_plan
as $$
declare
    k      record;
    v      int;
    hold   json;
    unused text;
begin
    k := metered.lock_holds(of_tenant, ids, issued, of_holder, 'h', wait_ms);
    if k.status is not null then
        refused := metered.refuse_hold(raising, json_build_object('status', k.status, 'id', k.failed, 'state', k.stands,
            'hold', metered.hold_json(k.failed_no, k.clk)));
        return;
    end if;
    perform metered.free_lines(k.nos, k.keys, 'l', k.clk, case when cardinality(ids) = 1 then ids[1] end, note, of_namespace, of_operation);
    for i in 1..cardinality(ids) loop
        update metered.holds h set version = h.version + 1, state = 'r', ended_at = k.clk, pending = false
        where h.no = k.nos[i]
        returning h.version, metered.hold_as_json(h, (
            select json_agg(metered.line_json(l.scope, l.amount, l.captured, 0) order by l.scope)
            from metered.hold_lines l where l.hold = h.no), k.clk) into v, hold;
        holds[i] := hold;
        insert into metered.hold_events (hold, at, version, kind, note, namespace, operation)
        values (k.nos[i], k.clk, v, 'r', nullif(release_holds.note, '')::jsonb, of_namespace, of_operation);
        if channel is not null then
            perform metered.announce(channel, of_tenant, ids[i], v, 'released');
        end if;
        unused := case when of_operation is not null then metered.remember_hold(hold) end;
    end loop;
end
$$;

-- Extends holds, all or none: each deadline by "by", no deadline past its ceiling.
create function metered.extend_holds(of_tenant text, ids text[], issued timestamptz[], of_holder text, wait_ms int,
    note text, channel text, by interval, of_namespace text, of_operation text, raising boolean,
    out refused json, out holds json[])
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set plan_cache_mode = force_generic_plan
as $$
declare
    k      record;
    h      record;
    unused text;
begin
    k := metered.lock_holds(of_tenant, ids, issued, of_holder, 'h', wait_ms);
    if k.status is not null then
        refused := metered.refuse_hold(raising, json_build_object('status', k.status, 'id', k.failed, 'state', k.stands,
            'hold', metered.hold_json(k.failed_no, k.clk)));
        return;
    end if;
    for i in 1..cardinality(ids) loop
        select y.deadline, y.ceiling into h from metered.holds y where y.no = k.nos[i];
        if h.deadline <= k.clk then     -- in its grace, which is for captures
            refused := metered.refuse_hold(raising, json_build_object('status', 'state', 'id', ids[i], 'state', 'x',
                'hold', metered.hold_json(k.nos[i], k.clk)));
        elsif h.deadline + by > h.ceiling then
            refused := metered.refuse_hold(raising, json_build_object('status', 'ceiling', 'id', ids[i],
                'left_us', (extract(epoch from h.ceiling - h.deadline) * 1000000)::bigint));
        end if;
        if refused is not null then
            return;
        end if;
    end loop;
    for i in 1..cardinality(ids) loop
        update metered.holds y set version = y.version + 1, deadline = y.deadline + by, due = y.due + by
        where y.no = k.nos[i] returning y.version, y.deadline, y.due into h;
        update metered.hold_lines l set due = h.due where l.hold = k.nos[i];
        insert into metered.hold_events (hold, at, deadline, version, kind, note, namespace, operation)
        values (k.nos[i], k.clk, h.deadline, h.version, 'e', nullif(extend_holds.note, '')::jsonb, of_namespace, of_operation);
        if channel is not null then
            perform metered.announce(channel, of_tenant, ids[i], h.version, 'extended');
        end if;
        holds[i] := metered.hold_json(k.nos[i], k.clk);
        unused := case when of_operation is not null then metered.remember_hold(holds[i]) end;
    end loop;
end
$$;

-- Gives back what captured holds spent, all or none, as refunds of their charges; with
-- skip_purged, without those that were purged, unless it is of the claim's own unit,
-- which would stay taken. refused: besides lock_holds's, returned (it was before),
-- purged, excess (somebody refunded part of a charge by hand).
create function metered.refund_holds(of_tenant text, ids text[], issued timestamptz[], of_holder text, wait_ms int,
    note text, channel text, skip_purged boolean, of_namespace text, of_operation text, raising boolean,
    out refused json, out holds json[])
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set plan_cache_mode = force_generic_plan
as $$
declare
    k      record;
    e      record;
    answer text;
    kept   jsonb;
    v      int;
    unused text;
begin
    k := metered.lock_holds(of_tenant, ids, issued, of_holder, 'c', wait_ms);
    if k.status is null and exists (select from metered.holds h where h.no = any (k.nos) and h.returned) then
        select 'returned', h.id, h.no into k.status, k.failed, k.failed_no
        from metered.holds h where h.no = any (k.nos) and h.returned order by h.no limit 1;
    end if;
    if k.status is not null then
        refused := metered.refuse_hold(raising, json_build_object('status', k.status, 'id', k.failed, 'state', k.stands,
            'hold', metered.hold_json(k.failed_no, k.clk)));
        return;
    end if;
    -- A refusal after the first refund takes that back, too. By a code that does not end in
    -- 000: such a one would catch its whole class, and what refuse_hold raises with it.
    begin
        for i in 1..cardinality(ids) loop
            kept := null;
            for e in select d.scope, d.amount, d.seq, d.at, l.key, (
                         -- Of a scope that was forgotten the number may be another's by now. Not
                         -- EXISTS, which Postgres 18 answers from a hash of the whole ledger.
                         select c.seq from metered.ledger c where c.scope = d.scope and c.seq = d.seq and c.at = d.at and c.hold = ids[i]
                     ) is not null as there
                     from metered.hold_events y, lateral jsonb_to_recordset(y.detail) d(scope text, amount bigint, seq bigint, at timestamptz),
                          lateral (select z.key from metered.hold_lines z where z.hold = y.hold and z.scope = d.scope) l
                     where y.hold = k.nos[i] and y.kind in ('p', 'c') order by d.scope, d.seq loop
                answer := case when not e.there then 'purged' else
                    (metered.refund(e.scope, e.key, e.seq, e.amount, wait_ms, note, of_namespace, of_operation, false)).status end;
                if skip_purged and answer = 'purged' and not exists (
                    select from metered.holds h where h.no = k.nos[i] and h.claim = e.scope) then
                    kept := coalesce(kept, '[]') || jsonb_build_object('scope', e.scope, 'amount', e.amount, 'seq', e.seq, 'at', e.at);
                elsif answer <> 'ok' then
                    refused := metered.refuse_hold(raising, json_build_object('status', answer, 'id', ids[i], 'scope', e.scope));
                    raise exception using errcode = 'MT100';
                end if;
            end loop;
            update metered.holds h set version = h.version + 1, returned = true
            where h.no = k.nos[i] returning h.version into v;
            insert into metered.hold_events (hold, at, version, kind, detail, note, namespace, operation)
            values (k.nos[i], k.clk, v, 'b', kept, nullif(refund_holds.note, '')::jsonb, of_namespace, of_operation);
            if channel is not null then
                perform metered.announce(channel, of_tenant, ids[i], v, 'returned');
            end if;
            holds[i] := metered.hold_json(k.nos[i], k.clk);
            unused := case when of_operation is not null then metered.remember_hold(holds[i]) end;
        end loop;
    exception when sqlstate 'MT100' then
        holds := null;
    end;
end
$$;

-- Ends one hold that is due, if its deadline is still the one given, frees what it
-- keeps, and says so to those who listen. status: expired; due_later, extended, or
-- the state of one that ended otherwise (captured, released), or ended (by time, and
-- announced before): nothing was done.
create function metered.expire_hold(of_tenant text, of_id text, issued timestamptz, of_deadline timestamptz, wait_ms int, note text, channel text,
    out status text, out hold json)
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set plan_cache_mode = force_generic_plan
as $$
declare
    of_no  bigint;
    keys   bigint[];
    clk    timestamptz;
    h      record;
    before text;
begin
    select y.no, y.keys into of_no, keys from metered.holds y where y.tenant = of_tenant and y.id = of_id;
    if not found then
        status := case when issued <= (select z.at from metered.holds_horizon z where z.one) then 'retired' else 'unknown' end;
        return;
    end if;
    perform metered.lock_keys(keys, wait_ms);
    before := metered.bound_lock_wait(wait_ms);
    select y.state, y.due, y.deadline, y.pending into h from metered.holds y where y.no = of_no for no key update;
    before := metered.unbound_lock_wait(before);
    if h.state is null then     -- purged while this waited
        status := case when issued <= (select z.at from metered.holds_horizon z where z.one) then 'retired' else 'unknown' end;
        return;
    end if;
    clk := metered.clock();
    status := case
        when h.state = 'c' then 'captured'
        when h.state = 'r' then 'released'
        when not h.pending then 'ended'
        when h.deadline <> of_deadline then 'extended'
        when h.state = 'h' and h.due > clk then 'due_later' end;
    if status is null then
        perform metered.expire_rows(array[of_no], clk, note);
        perform metered.free_lines(array[of_no], keys, 'x', clk, of_id, note, null, null);
        update metered.holds y set pending = false where y.no = of_no returning y.version into h;
        if channel is not null then
            perform metered.announce(channel, of_tenant, of_id, h.version, 'expired');
        end if;
        status := 'expired';
    end if;
    hold := metered.hold_json(of_no, clk);
end
$$;

-- Ends up to max_holds holds that are due, after the one of these due time and no,
-- and frees what they keep: those whose scopes and rows are to be had without
-- waiting. nos are these; unless they are still to be announced (keep_pending) they
-- are done with. seen is how many were due; the last of them is where to go on, if
-- there may be more.
--
-- They have at most 2,000 scopes together, since each takes a lock of the server's
-- table, which by default has room for some 6,400 of all sessions. One hold has at
-- most 64.
create function metered.sweep_holds(after_due timestamptz, after_no bigint, max_holds int, keep_pending boolean, channel text,
    out nos bigint[], out seen int, out last_due timestamptz, out last_no bigint, out more boolean)
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set plan_cache_mode = force_generic_plan
as $$
declare
    clk     timestamptz := metered.clock();
    due_nos bigint[];
    locked  bigint[] := '{}';
    k       bigint;
begin
    select array_agg(d.no order by d.due, d.no) filter (where d.locks <= 2000),
        count(*) filter (where d.locks <= 2000), max(d.due) filter (where d.locks <= 2000),
        count(*) = max_holds or coalesce(bool_or(d.locks > 2000), false)
    into due_nos, seen, last_due, more
    from (select c.no, c.due, sum(cardinality(c.keys)) over (order by c.due, c.no) as locks
          from (select y.no, y.due, y.keys from metered.holds y
                where y.pending and (y.due, y.no) > (after_due, after_no) and y.due <= clk
                order by y.due, y.no limit max_holds) c) d;
    if seen = 0 then
        return;
    end if;
    last_no := due_nos[seen];
    for k in select distinct l.key from metered.hold_lines l where l.hold = any (due_nos) and l.open <> 0 order by l.key loop
        if pg_try_advisory_xact_lock(k) then
            locked := locked || k;
        end if;
    end loop;
    select array_agg(r.no) into due_nos from (
        -- "is true" keeps the planner from the index of all that is due.
        select y.no from metered.holds y where y.no = any (due_nos) and (y.pending and y.due <= clk) is true
        order by y.no for no key update skip locked) r;
    if due_nos is null then
        return;
    end if;
    -- Counted, since NOT EXISTS is a join, which can be one with all lines.
    select array_agg(y.no) into due_nos from metered.holds y
    where y.no = any (due_nos) and 0 = (
        select count(*) from metered.hold_lines l where l.hold = y.no and l.open <> 0 and l.key <> all (locked));
    if due_nos is null then
        return;
    end if;
    perform metered.expire_rows(due_nos, clk, '{"actor": "system"}');
    perform metered.free_lines(due_nos, locked, 'x', clk, null, '{"actor": "system"}', null, null);
    nos := due_nos;
    if not keep_pending then
        perform metered.announced(nos, channel);
    end if;
end
$$;

-- Marks swept holds as announced, and announces them to those who listen.
create function metered.announced(nos bigint[], channel text) returns void
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set plan_cache_mode = force_generic_plan
as $$
begin
    update metered.holds h set pending = false where h.no = any (nos) and h.state = 'x';
    if channel is not null then
        perform metered.announce(channel, h.tenant, h.id, h.version, 'expired')
        from metered.holds h where h.no = any (nos) order by h.no;
    end if;
end
$$;

-- Deletes holds that ended before cutoff, with lines and history, at most max_rows
-- of them, from "after" on (null: from the beginning), and moves the horizon to the latest
-- time that their ids carry, in the same transaction, as purge_operations does.
--
-- Purges are without bitmaps and sorts: with these, a batch would read all that there is
-- to delete, by a plan of when it was little.
create function metered.purge_holds(after timestamptz, cutoff timestamptz, max_rows int, wait_ms int, out deleted bigint, out last timestamptz)
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set plan_cache_mode = force_generic_plan
set enable_bitmapscan = off
set enable_sort = off
as $$
declare
    nos    bigint[];
    latest timestamptz;
    before text := metered.bound_lock_wait(wait_ms);
begin
    perform from metered.holds_horizon z where z.one for no key update;     -- before rows of holds, as place does
    before := metered.unbound_lock_wait(before);
    select array_agg(d.no), max(d.ended_at), max(d.issued_at) into nos, last, latest from (
        select h.no, h.ended_at, h.issued_at from metered.holds h
        where h.ended_at is not null and (h.claim is null or h.state <> 'c' or h.returned)
          and h.ended_at >= coalesce(after, '-infinity') and h.ended_at < cutoff and not h.pending and coalesce(h.issued_at, h.ended_at) < cutoff
        order by h.ended_at limit max_rows for update skip locked) d;
    delete from metered.hold_events e where e.hold = any (nos);
    delete from metered.hold_lines l where l.hold = any (nos);
    delete from metered.holds h where h.no = any (nos);
    get diagnostics deleted = row_count;
    if latest is not null then
        update metered.holds_horizon z set at = latest where z.one and z.at < latest;
    end if;
end
$$;

-- ===== tokens =============================================================

-- One-time grants. The token itself is nowhere in here, only the SHA-256 of its
-- text, from which 32 random bytes cannot be found.
create table metered.tokens (
    digest     bytea       primary key check (octet_length(digest) = 32),
    minted_at  timestamptz not null,
    expires_at timestamptz not null,
    ended_at   timestamptz,                     -- last use, revocation, or expiry seen by a revocation
    uses       int         not null check (uses >= 1),
    used       int         not null default 0 check (used between 0 and uses),
    revoked    boolean     not null default false,
    sole       boolean     not null default false,  -- minted by replace_token
    purpose    text collate "C" not null,
    subject    text collate "C" not null,
    payload    json,                            -- json, not jsonb: it comes back byte for byte
    check (used < uses and not revoked or ended_at is not null)
);

-- A subject's tokens that have not ended, to revoke them. A use that is not the
-- last changes no indexed column and stays a HOT update.
create index tokens_open on metered.tokens (purpose, subject) where ended_at is null;

-- The guard of replace_token: at most one such token per purpose and subject,
-- whatever the isolation level, even if its lock was never taken.
create unique index tokens_sole on metered.tokens (purpose, subject) where sole and ended_at is null;

-- What purge_tokens takes first.
create index tokens_purge on metered.tokens ((coalesce(ended_at, expires_at)));

-- Mints tokens, all or none, in the order of their digests, so that two calls
-- that mint the same ones do not deadlock. Status 'exists': one of the digests
-- is there already, and nothing was written. That is an answer and not a unique
-- violation, which would end the caller's transaction; where a snapshot is too
-- old to see the other token, ON CONFLICT raises 40001.
create function metered.mint_tokens(digests bytea[], purposes text[], subjects text[], payloads text[],
    uses int[], ttls_us bigint[], wait_ms int,
    out status text, out minted_at timestamptz)
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set plan_cache_mode = force_generic_plan
as $$
declare
    before  text := metered.bound_lock_wait(wait_ms);
    fresh   bytea[];
begin
    mint_tokens.minted_at := metered.clock();
    with inserted as (
        insert into metered.tokens (digest, minted_at, expires_at, uses, purpose, subject, payload)
        select m.digest, mint_tokens.minted_at, mint_tokens.minted_at + m.ttl_us * interval '1 microsecond',
               m.uses, m.purpose, m.subject, m.payload::json
        from unnest(digests, purposes, subjects, payloads, mint_tokens.uses, ttls_us)
             as m(digest, purpose, subject, payload, uses, ttl_us)
        order by m.digest
        on conflict do nothing
        returning tokens.digest)
    select array_agg(i.digest) into fresh from inserted i;
    if coalesce(cardinality(fresh), 0) < cardinality(digests) then
        delete from metered.tokens t where t.digest = any (fresh);
        status := 'exists';
    else
        status := 'ok';
    end if;
    before := metered.unbound_lock_wait(before);
end
$$;

-- Looks at a token and changes nothing. Status is 'ok', or why it cannot be
-- consumed: 'unknown', 'purpose', 'subject', 'revoked', 'used', 'expired'. The
-- other columns are null unless it is 'ok'; consumed_at always is.
create function metered.inspect_token(token_digest bytea, for_purpose text, for_subject text,
    out status text, out payload json, out uses_left int,
    out minted_at timestamptz, out expires_at timestamptz, out consumed_at timestamptz)
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set plan_cache_mode = force_generic_plan
as $$
declare
    now_at timestamptz := metered.clock();
    tok    metered.tokens;
begin
    select * into tok from metered.tokens t where t.digest = token_digest;
    status := case
        when tok.digest is null then 'unknown'
        when tok.purpose <> for_purpose then 'purpose'
        when tok.subject <> for_subject then 'subject'
        when tok.revoked then 'revoked'
        when tok.used = tok.uses then 'used'
        when tok.ended_at is not null or tok.expires_at <= now_at then 'expired'
        else 'ok' end;
    if status = 'ok' then
        payload := tok.payload;
        uses_left := tok.uses - tok.used;
        minted_at := tok.minted_at;
        expires_at := tok.expires_at;
    end if;
end
$$;

-- Takes one use of a token, or says why not, with inspect_token's columns;
-- uses_left is what remains after this use. A refusal changes nothing. The time
-- that counts is the clock's as the call begins.
--
-- The reason is looked up only after the update found nothing. If that finds the
-- token in order, it was minted between the two statements: the update runs again.
create function metered.consume_token(token_digest bytea, for_purpose text, for_subject text,
    wait_ms int default null,
    out status text, out payload json, out uses_left int,
    out minted_at timestamptz, out expires_at timestamptz, out consumed_at timestamptz)
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set plan_cache_mode = force_generic_plan
as $$
declare
    now_at  timestamptz := metered.clock();
    before  text := current_setting('lock_timeout');
    bounds  boolean := wait_ms is not null and (before = '0' or before::interval > wait_ms * interval '1 ms');
    unused  text;
begin
    if bounds then  -- bound_lock_wait, without the call
        unused := set_config('lock_timeout', wait_ms::text, true);
    end if;
    for attempt in 1..3 loop
        update metered.tokens t
        set used = t.used + 1,
            ended_at = case when t.used + 1 = t.uses then now_at end
        -- "is true" keeps the planner from the index of open tokens.
        where t.digest = token_digest
          and (t.purpose = for_purpose and t.subject = for_subject and t.ended_at is null and t.expires_at > now_at) is true
        returning 'ok', t.payload, t.uses - t.used, t.minted_at, t.expires_at, now_at
        into status, payload, uses_left, minted_at, expires_at, consumed_at;
        if not found then
            status := (metered.inspect_token(token_digest, for_purpose, for_subject)).status;
            continue when status = 'ok';
        end if;
        if bounds then
            unused := set_config('lock_timeout', before, true);
        end if;
        return;
    end loop;
    raise exception 'could not serialize access: the token keeps changing' using errcode = '40001';
end
$$;

-- Revokes one token. False if there was nothing left to revoke.
create function metered.revoke_token(token_digest bytea, wait_ms int) returns boolean
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set plan_cache_mode = force_generic_plan
as $$
declare
    now_at  timestamptz := metered.clock();
    before  text := metered.bound_lock_wait(wait_ms);
    was     boolean;
begin
    update metered.tokens t
    set revoked = true, ended_at = now_at
    where t.digest = token_digest and (t.ended_at is null and t.expires_at > now_at) is true;     -- as in consume_token
    was := found;
    before := metered.unbound_lock_wait(before);
    return was;
end
$$;

-- Ends every open token of a purpose and subject and returns how many of them
-- were still good. Rows are locked in the order of their digests.
create function metered.revoke_tokens(for_purpose text, for_subject text, wait_ms int) returns bigint
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set plan_cache_mode = force_generic_plan
as $$
declare
    now_at  timestamptz := metered.clock();
    before  text := metered.bound_lock_wait(wait_ms);
    digests bytea[];
    total   bigint;
begin
    -- Two statements, so that there is no join to plan; and an order that the key's index
    -- does not have, or all tokens would be read in it, if they were few when this was planned.
    select array_agg(o.digest) into digests from (
        select t.digest from metered.tokens t
        where t.purpose = for_purpose and t.subject = for_subject and t.ended_at is null
        order by t.digest || '' for no key update) o;
    with ended as (
        update metered.tokens t
        set revoked = t.expires_at > now_at, ended_at = least(now_at, t.expires_at)
        where t.digest = any (digests)
        returning t.revoked)
    select count(*) filter (where e.revoked) into total from ended e;
    before := metered.unbound_lock_wait(before);
    return total;
end
$$;

-- Revokes every token of a purpose and subject and mints another, under the
-- advisory lock lock_key. Status 'exists' as with mint_tokens: nothing was written.
create function metered.replace_token(lock_key bigint, token_digest bytea, for_purpose text, for_subject text,
    with_payload text, allowed_uses int, ttl_us bigint, wait_ms int,
    out status text, out minted_at timestamptz, out revoked bigint)
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set plan_cache_mode = force_generic_plan
as $$
declare
    before  text;
begin
    perform metered.lock_keys(array[lock_key], wait_ms);
    before := metered.bound_lock_wait(wait_ms);
    if exists (select from metered.tokens t where t.digest = token_digest) then
        status := 'exists';
    else
        revoked := metered.revoke_tokens(for_purpose, for_subject, wait_ms);
        minted_at := metered.clock();
        insert into metered.tokens (digest, minted_at, expires_at, uses, sole, purpose, subject, payload)
        values (token_digest, replace_token.minted_at,
                replace_token.minted_at + ttl_us * interval '1 microsecond',
                allowed_uses, true, for_purpose, for_subject, with_payload::json)
        on conflict do nothing;
        if not found then
            raise exception 'could not serialize access: the token was replaced meanwhile'
                using errcode = '40001';
        end if;
        status := 'ok';
    end if;
    before := metered.unbound_lock_wait(before);
end
$$;

-- Deletes up to max_rows tokens that ended, or expired, at cutoff or before, oldest
-- first, and skips what another purge is deleting. Never one that lives, whatever cutoff
-- is. after is the last of the batch before (null: from the beginning), so that no batch
-- reads again through the index entries that the one before it left dead.
create function metered.purge_tokens(after timestamptz, cutoff timestamptz, max_rows int,
    out deleted bigint, out last timestamptz)
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set plan_cache_mode = force_generic_plan
set enable_bitmapscan = off
set enable_sort = off
as $$
declare
    ended timestamptz := least(coalesce(cutoff, '-infinity'), metered.clock());
begin
    with gone as (
        delete from metered.tokens t
        where t.digest = any (array(
            select d.digest from metered.tokens d
            where coalesce(d.ended_at, d.expires_at) >= coalesce(after, '-infinity')
              and coalesce(d.ended_at, d.expires_at) <= ended
            order by coalesce(d.ended_at, d.expires_at)
            limit max_rows for update skip locked))
        returning coalesce(t.ended_at, t.expires_at) as at)
    select count(*), max(g.at) into deleted, last from gone g;
end
$$;

-- ===== jobs ===============================================================

-- Which job a key was used for. No foreign key: River deletes finished jobs
-- after a day, and a key must be remembered for longer than its job.
create table metered.job_keys (
    job_id     bigint      not null,
    created_at timestamptz not null,
    queue      text collate "C" not null,
    key        text collate "C" not null,
    kind       text        not null,
    tenant     text        not null,
    digest     bytea       not null,   -- of kind and args, its first byte the version: see jobs/digest.go
    primary key (queue, key)
);

-- For purging by age.
create index job_keys_age on metered.job_keys (created_at);

-- Claims a key for job new_id, or tells which job it was claimed for. If another
-- transaction has claimed it and is still open, waits for that one to end, at
-- most wait_ms since the statement began (one statement may claim many keys, in
-- the order of queue and key); then SQLSTATE 55P03. If the other one commits, a
-- claimant at REPEATABLE READ or above gets 40001, as it cannot see that row.
--
-- Inserts before it looks: looking for a key that is not there and then adding
-- it would make any two SERIALIZABLE claimants each other's conflict. So a
-- repeated key uses up a number of River's sequence, as River's own unique jobs
-- do.
create function metered.claim_job_key(of_queue text, of_key text, of_kind text, of_tenant text, of_digest bytea,
    new_id bigint, wait_ms int,
    out id bigint, out created boolean, out first_kind text, out first_tenant text, out first_digest bytea)
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set plan_cache_mode = force_generic_plan
as $$
declare
    before  text := current_setting('lock_timeout');
    left_ms int := wait_ms - (extract(epoch from clock_timestamp() - statement_timestamp()) * 1000)::int;
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
            id := new_id; first_kind := of_kind; first_tenant := of_tenant; first_digest := of_digest;
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

-- The record of a key, or no row.
create function metered.find_job_key(of_queue text, of_key text) returns setof metered.job_keys
language plpgsql stable
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set plan_cache_mode = force_generic_plan
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
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set plan_cache_mode = force_generic_plan
set enable_bitmapscan = off
set enable_sort = off
as $$
begin
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

-- ===== operations =========================================================

-- What committed, by the caller's id: written with the command's own writes, so
-- that a record exists exactly where they do.
create table metered.operations (
    at          timestamptz not null,   -- when the command was completed
    issued_at   timestamptz,            -- the time that the id carries, if it does
    namespace   text collate "C" not null,
    id          text collate "C" not null,
    fingerprint bytea       not null,   -- a version byte and a SHA-256
    result      bytea       not null,   -- JSON, byte for byte as it was returned
    scopes      text[],                 -- what was charged, for the receipt
    amounts     bigint[],
    seqs        bigint[],
    ats         timestamptz[],
    holds       text[],                 -- JSON: what was placed, captured, released
    primary key (namespace, id)
);

create index operations_at on metered.operations (at);

-- The latest time of an id whose record was purged. Never decreases.
-- Always found by its key: with sequential scans off, one would look so expensive
-- that each is compiled first (jit), for 50 ms.
create table metered.operations_horizon (
    at  timestamptz not null,
    one boolean primary key default true check (one)
);

insert into metered.operations_horizon (at) values ('-infinity');

-- Keeps a transaction from being committed by anyone but its command's last flush. A
-- cursor WITH HOLD is run to its end by COMMIT, and this is what it runs.
create function metered.unfinished() returns void
language plpgsql
as $$
begin
    raise exception 'the command of this transaction is not complete' using errcode = 'MT004';
end
$$;

-- Begins a command, in two steps that usually come as one.
--
-- Claiming waits for whoever holds the operation id. status: new; replay (the
-- columns up to at are its record); retired (its time is at or before the
-- horizon); future (its time is further ahead than max_future). The transaction of
-- a new one is marked, guarded against COMMIT, and bounded by timeout_ms (0 leaves
-- the session's timeouts, null all of its settings: it is the caller's). The claim
-- is an advisory lock, which writes nothing; the record's primary key is what makes
-- it exact. It comes before the scopes' locks of its command.
--
-- Opening spends the token, if there is one, and then looks at the budget without
-- a lock, so that a hopeless command is refused before it works. The columns from
-- token_status to consumed_at are consume_token's.
create function metered.begin_command(claiming boolean, opening boolean,
    of_namespace text, of_id text, key bigint, issued timestamptz, max_future interval,
    wait_ms int, timeout_ms int, marker text,
    token_digest bytea, token_purpose text, token_subject text,
    charge_scopes text[], charge_amounts bigint[], limit_scopes int[], maxima bigint[], windows interval[], max_ahead interval,
    out status text, out fingerprint bytea, out result bytea,
    out scopes text[], out amounts bigint[], out seqs bigint[], out ats timestamptz[], out holds text[], out at timestamptz,
    out denied jsonb,
    out token_status text, out payload json, out uses_left int,
    out minted_at timestamptz, out expires_at timestamptz, out consumed_at timestamptz)
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set plan_cache_mode = force_generic_plan
as $$
declare
    setting text;
    before  text;
    unused  text;   -- set_config in an assignment is cheaper than in perform, by far
    t       record; -- and so is a function than as a table
begin
    if claiming then
        if coalesce(current_setting('metered_tx.command', true), '') <> '' then
            raise exception 'a command is already begun in this transaction' using errcode = 'MT006';
        end if;
        if not pg_try_advisory_xact_lock(key) then
            perform metered.lock_keys(array[key], wait_ms);
        end if;
        select 'replay', o.fingerprint, o.result, o.scopes, o.amounts, o.seqs, o.ats, o.holds, o.at
        into status, fingerprint, result, scopes, amounts, seqs, ats, holds, at
        from metered.operations o where o.namespace = of_namespace and o.id = of_id;
        if found then
            return;
        end if;
        if current_setting('transaction_isolation') in ('repeatable read', 'serializable') then
            -- The snapshot may be older than a record whose writer let go of the id
            -- just now, or than a purge. A write meets the first and a lock the
            -- second, with 40001; the block takes both back.
            begin
                perform set_config('lock_timeout', wait_ms::text, true);
                insert into metered.operations (namespace, id, at, fingerprint, result)
                values (of_namespace, of_id, 'infinity', '', '') on conflict do nothing;
                perform from metered.operations_horizon h where h.one for share;
                raise exception using errcode = 'MT100';
            exception when sqlstate 'MT100' then
                null;
            end;
        end if;
        -- Read after the record was not found: a purge moves the horizon in the
        -- transaction that deletes.
        if issued <= (select h.at from metered.operations_horizon h where h.one) then
            status := 'retired';
            return;
        elsif issued > metered.clock() + max_future then
            status := 'future';
            return;
        end if;
        if timeout_ms > 0 then
            foreach setting in array array['statement_timeout', 'lock_timeout', 'idle_in_transaction_session_timeout'] loop
                before := current_setting(setting);
                if before = '0' or before::interval > timeout_ms * interval '1 ms' then
                    unused := set_config(setting, timeout_ms::text, true);
                end if;
            end loop;
        end if;
        if timeout_ms is not null then
            -- COMMIT is sent before the charges are made: if the client is gone by the
            -- time a scope is free, let that be noticed. Not every platform can.
            begin
                unused := set_config('client_connection_check_interval', '100', true);
            exception when invalid_parameter_value then
                null;
            end;
        end if;
        unused := set_config('metered_tx.command', marker, true);
        execute 'declare metered_command cursor with hold for select metered.unfinished()';
    end if;
    status := 'new';
    if not opening then
        return;
    end if;
    if token_digest is not null then
        t := metered.consume_token(token_digest, token_purpose, token_subject, wait_ms);
        token_status := t.status;
        payload := t.payload;
        uses_left := t.uses_left;
        minted_at := t.minted_at;
        expires_at := t.expires_at;
        consumed_at := t.consumed_at;
        if token_status <> 'ok' then
            return;
        end if;
    end if;
    if cardinality(limit_scopes) > 0 then
        t := metered.post(charge_scopes, null, charge_amounts, limit_scopes, maxima, windows, max_ahead, wait_ms, null, null, null, false);
        denied := t.denied;
    end if;
end
$$;

-- Ends a command: charges, records the operation, and lets COMMIT pass. A denial
-- raises, because COMMIT follows in the same flush. Without finishing something comes
-- before COMMIT, which is let pass by finish_command then.
create function metered.complete_command(marker text, of_namespace text, of_id text,
    of_fingerprint bytea, issued timestamptz, of_result bytea,
    charge_scopes text[], keys bigint[], charge_amounts bigint[],
    limit_scopes int[], maxima bigint[], windows interval[], max_ahead interval, wait_ms int, notes text[],
    finishing boolean,
    out seqs bigint[], out ats timestamptz[], out used bigint[], out held bigint[], out at timestamptz)
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set plan_cache_mode = force_generic_plan
as $$
declare
    c      record;
    unused text;
begin
    if coalesce(current_setting('metered_tx.command', true), '') <> marker then
        raise exception 'the command was not begun in this transaction' using errcode = 'MT005';
    end if;
    if cardinality(charge_scopes) > 0 then
        c := metered.post(charge_scopes, keys, charge_amounts, limit_scopes, maxima, windows,
            max_ahead, wait_ms, notes, of_namespace, of_id, true);
        seqs := c.seqs;
        ats := c.ats;
        used := c.used;
        held := c.held;
    end if;
    at := metered.clock();
    insert into metered.operations (namespace, id, fingerprint, issued_at, at, result, scopes, amounts, seqs, ats, holds)
    values (of_namespace, of_id, of_fingerprint, issued, complete_command.at, of_result,
        nullif(charge_scopes, '{}'), nullif(charge_amounts, '{}'), complete_command.seqs, complete_command.ats,
        string_to_array(nullif(current_setting('metered_tx.holds', true), ''), chr(30)))
    on conflict do nothing;
    if not found then
        raise exception 'could not serialize access: the operation was recorded meanwhile' using errcode = '40001';
    end if;
    if finishing then
        unused := set_config('metered_tx.command', '', true);
        unused := set_config('metered_tx.holds', '', true);
        execute 'close metered_command';
    end if;
end
$$;

-- Lets the COMMIT of a command pass that was completed without finishing, if this is
-- its transaction still.
create function metered.finish_command(marker text) returns void
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
as $$
begin
    if coalesce(current_setting('metered_tx.command', true), '') <> marker then
        raise exception 'the command was not begun in this transaction' using errcode = 'MT005';
    end if;
    perform set_config('metered_tx.command', '', true);
    perform set_config('metered_tx.holds', '', true);
    execute 'close metered_command';
end
$$;

-- Deletes records of operations completed and issued before cutoff, at most
-- max_rows, oldest first, and moves the horizon to the latest time that their ids
-- carry, in the same transaction. No further: a clock that was ahead for a while would
-- refuse new ids for as long. after is the last of the batch before, as in purge_tokens.
-- It waits for another purge's move, as long as wait_ms.
create function metered.purge_operations(after timestamptz, cutoff timestamptz, max_rows int, wait_ms int,
    out deleted bigint, out last timestamptz)
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set plan_cache_mode = force_generic_plan
set enable_bitmapscan = off
set enable_sort = off
as $$
declare
    latest timestamptz;
    before text := metered.bound_lock_wait(wait_ms);
begin
    with gone as (
        -- By row address, so that there is no join to plan: these rows are never
        -- updated, and locked here.
        delete from metered.operations o
        where o.ctid = any (array(
            select p.ctid from metered.operations p
            where p.at >= coalesce(after, '-infinity') and p.at < cutoff and coalesce(p.issued_at, p.at) < cutoff
            order by p.at limit max_rows for update skip locked))
        returning o.at, o.issued_at)
    select count(*), max(g.at), max(g.issued_at) into deleted, last, latest from gone g;
    if latest is not null then
        update metered.operations_horizon h set at = latest where h.one and h.at < latest;
    end if;
    before := metered.unbound_lock_wait(before);
end
$$;

-- Nothing is for everybody. See metered.GrantSQL.
revoke all on all functions in schema metered from public;
