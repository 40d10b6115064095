-- Every table, index and function of metered, version 1.
--
-- Applied by metered.Migrate, or rendered by metered.SchemaSQL for a migration
-- tool of your own. "metered." is replaced by the schema name you choose.
--
-- Three rules hold for all of it:
--
--   * Whoever owns the schema owns the data. An application role needs EXECUTE
--     on the functions and SELECT on the tables, nothing else (metered.GrantSQL):
--     the functions that write are SECURITY DEFINER, so no application can
--     change or delete a ledger entry.
--   * Functions that an application calls fix search_path, so that no operator
--     or table of the caller's can stand in for ours, and enable_seqscan = off:
--     PL/pgSQL caches plans, and a sequential scan cached while a table was
--     small makes a hot scope quadratic. Both together cost 3 to 6 microseconds
--     a call (Postgres 15); inner functions inherit them.
--   * Time is read only from metered.clock(). To set the clock a test replaces
--     that function, which its owner can do and an application's role cannot.

create schema if not exists metered;

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

-- Takes transaction-scoped advisory locks in the order given (callers sort),
-- waiting at most wait_ms for all of them together, or as long as a shorter
-- lock_timeout of the session allows. Then SQLSTATE 55P03.
-- The first try is without a time limit to set, since it nearly always succeeds;
-- it does not overtake those who already wait.
create function metered.lock_keys(keys bigint[], wait_ms int) returns void
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
end
$$;

-- ===== budget =============================================================

-- The ledger: one chain of entries per scope, seq = 1, 2, 3, …, never changed.
-- Each entry carries its scope's totals after it, so the state of a scope is its
-- last entry, and the spending inside a window is a difference of two entries
-- instead of a sum over many. Wide columns first: no padding between them.
create table metered.ledger (
    seq       bigint      not null,
    amount    bigint      not null,   -- units, >= 1; 0 for a clock repair
    at        timestamptz not null,   -- never decreases along seq within an epoch
    spent     bigint      not null,   -- sum of charges so far, never decreases
    refunded  bigint      not null,   -- sum of refunds so far, never decreases
    credited  bigint      not null,   -- sum of credits so far, never decreases
    held      bigint      not null,   -- units in open holds now
    epoch     smallint    not null,   -- clock repairs so far
    kind      "char"      not null,   -- c charge, d credit (deposit), r refund, k clock repair
    scope     text collate "C" not null,
    next_due  timestamptz,            -- no open hold falls due before this
    ref       bigint,                 -- of a refund: the seq of its charge
    hold      text,
    namespace text,                   -- of the operation
    operation text,
    note      jsonb,                  -- actor, tenant, correlation, reason
    -- Nobody with EXECUTE alone can make an entry that takes spending back.
    constraint ledger_amount check (amount >= 1 and kind <> 'k' or amount = 0 and kind = 'k'),
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
    if found then
        return tip;
    end if;
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

-- Charges after t less their own refunds, in the chain that ends with tip_seq and
-- stands at spent and refunded there.
create function metered.spent_since(of_scope text, tip_seq bigint, tip_epoch int, spent bigint, refunded bigint, t timestamptz) returns bigint
language plpgsql stable
as $$
declare
    b record;
begin
    b := metered.base(of_scope, tip_seq, tip_epoch, t);
    if b.seq is null then
        raise exception 'the window reaches behind what is retained'
            using errcode = 'MT002', detail = of_scope;
    end if;
    if b.refunded = refunded then
        return spent - b.spent;
    end if;
    return spent - b.spent - metered.refunds_after(of_scope, tip_seq, b.seq);
end
$$;

-- The time at which so much of a window's spending has left it that no more than
-- room remains, if nothing else changes. Spending only leaves, entry by entry, so
-- it is the leaving of the first entry that is enough. Searched in growing steps
-- from the window's start, since most refusals are close.
create function metered.leaves_at(of_scope text, tip_seq bigint, tip_epoch int, spent bigint, refunded bigint, since timestamptz, win interval, room bigint) returns timestamptz
language plpgsql stable
as $$
declare
    too_few bigint := (metered.base(of_scope, tip_seq, tip_epoch, since)).seq;
    enough  bigint := tip_seq;
    probe   bigint;
    step    bigint := 1;
    p       record;
begin
    while enough - too_few > 1 loop
        probe := least(too_few + step, (too_few + enough) / 2);
        select l.spent, l.refunded into strict p from metered.ledger l where l.scope = of_scope and l.seq = probe;
        if spent - p.spent
           - (case when p.refunded = refunded then 0
                   else metered.refunds_after(of_scope, tip_seq, probe) end) <= room then
            enough := probe;
        else
            too_few := probe;
            step := step * 2;
        end if;
    end loop;
    -- A repair is the first entry of its epoch.
    return (select least(l.at, (
                select min(r.at) from generate_series(l.epoch + 1, tip_epoch) e,
                     lateral (select k.at from metered.ledger k
                      where k.scope = of_scope and k.epoch = e and (k.seq & 15 = 1 or k.kind = 'k')
                      order by k.at, k.seq limit 1) r)) + win
            from metered.ledger l where l.scope = of_scope and l.seq = enough);
end
$$;

-- Judges the limits of one call. The first ten arrays hold, for each scope of the
-- call, its last entry and what it is to be charged; limit_scopes says which of
-- them a limit belongs to; a window of 0 is the lifetime. used is what each limit
-- has used so far, holds aside; denied lists every limit that refuses, with the
-- microseconds until it would not (-1 for never: spending cannot get out of a
-- lifetime's way) and until a hold falls due.
create function metered.judge(scopes text[], seqs bigint[], ats timestamptz[], epochs int[],
    spent bigint[], refunded bigint[], credited bigint[], held bigint[], due timestamptz[], amounts bigint[],
    clk timestamptz, limit_scopes int[], maxima bigint[], windows interval[], max_ahead interval,
    out used bigint[], out denied jsonb)
language plpgsql stable
as $$
declare
    s     int;
    u     bigint;
    room  bigint;
    since timestamptz;
    retry timestamptz;
begin
    for i in 1..cardinality(limit_scopes) loop
        s := limit_scopes[i];
        if windows[i] = interval '0' then
            u := spent[s] - refunded[s] - credited[s];
        else
            if ats[s] > clk + max_ahead then
                raise exception 'the last entry is ahead of the clock'
                    using errcode = 'MT003', detail = jsonb_build_object('scope', scopes[s],
                        'ahead_us', (extract(epoch from ats[s] - clk) * 1000000)::bigint);
            end if;
            since := greatest(clk, ats[s]) - windows[i];
            if ats[s] <= since then
                u := 0;
            else
                u := metered.spent_since(scopes[s], seqs[s], epochs[s], spent[s], refunded[s], since);
            end if;
        end if;
        used[i] := u;
        room := maxima[i] - held[s] - amounts[s];
        continue when u <= room;
        if windows[i] > interval '0' and room >= 0 then
            retry := metered.leaves_at(scopes[s], seqs[s], epochs[s], spent[s], refunded[s], since, windows[i], room);
        elsif held[s] > 0 and amounts[s] + (case when windows[i] > interval '0' then 0 else u end) <= maxima[i] then
            -- Only the end of a hold can make room, and can make enough.
            retry := greatest(due[s], clk);
        else
            retry := null;
        end if;
        denied := coalesce(denied, '[]') || jsonb_build_object(
            'limit', i - 1, 'used', u, 'held', held[s],
            'retry_us', coalesce((extract(epoch from retry - clk) * 1000000)::bigint, -1),
            'due_us', (extract(epoch from due[s] - clk) * 1000000)::bigint);
    end loop;
end
$$;

-- Charges scopes, all or none. keys are their lock keys, sorted and distinct.
-- Either denied is null, and each scope has one new entry, or nothing was
-- written; with raising, a denial is SQLSTATE MT001 instead, its detail the JSON.
create function metered.charge(scopes text[], keys bigint[], amounts bigint[],
    limit_scopes int[], maxima bigint[], windows interval[], max_ahead interval,
    wait_ms int, notes text[], of_namespace text, of_operation text, raising boolean,
    out seqs bigint[], out ats timestamptz[], out used bigint[], out held bigint[], out denied jsonb)
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
as $$
declare
    tip      record;
    epochs   int[];
    spent    bigint[];
    refunded bigint[];
    credited bigint[];
    due      timestamptz[];
    clk      timestamptz;
    verdict  record;
begin
    perform metered.lock_keys(keys, wait_ms);
    clk := metered.clock();     -- after the lock: a wait must not date the entry back
    for i in 1..cardinality(scopes) loop
        tip := metered.tip_for_write(scopes[i]);
        seqs[i] := tip.seq;
        ats[i] := tip.at;
        epochs[i] := tip.epoch;
        spent[i] := tip.spent;
        refunded[i] := tip.refunded;
        credited[i] := tip.credited;
        held[i] := tip.held;
        due[i] := tip.next_due;
    end loop;
    verdict := metered.judge(scopes, seqs, ats, epochs, spent, refunded, credited, held, due, amounts,
        clk, limit_scopes, maxima, windows, max_ahead);
    used := verdict.used;
    denied := verdict.denied;
    if denied is not null then
        if raising then
            raise exception 'a limit refuses the charge' using errcode = 'MT001', detail = denied;
        end if;
        seqs := null;
        ats := null;
        return;
    end if;
    for i in 1..cardinality(scopes) loop
        seqs[i] := seqs[i] + 1;
        ats[i] := greatest(clk, ats[i]);
        -- ON CONFLICT, because a plain unique violation is one that callers' retry
        -- loops do not retry.
        insert into metered.ledger (seq, amount, at, spent, refunded, credited, held,
            epoch, kind, scope, next_due, namespace, operation, note)
        values (seqs[i], amounts[i], ats[i], spent[i] + amounts[i], refunded[i], credited[i], held[i],
            epochs[i], 'c', scopes[i], due[i], of_namespace, of_operation, nullif(notes[i], '')::jsonb)
        on conflict do nothing;
        if not found then
            perform metered.collided();
        end if;
    end loop;
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
as $$
declare
    tip      record;
    seqs     bigint[];
    ats      timestamptz[];
    epochs   int[];
    spent    bigint[];
    refunded bigint[];
    credited bigint[];
    due      timestamptz[];
    verdict  record;
begin
    for i in 1..cardinality(scopes) loop
        tip := metered.tip(scopes[i]);
        seqs[i] := tip.seq;
        ats[i] := tip.at;
        epochs[i] := tip.epoch;
        spent[i] := tip.spent;
        refunded[i] := tip.refunded;
        credited[i] := tip.credited;
        held[i] := tip.held;
        due[i] := tip.next_due;
    end loop;
    verdict := metered.judge(scopes, seqs, ats, epochs, spent, refunded, credited, held, due, amounts,
        metered.clock(), limit_scopes, maxima, windows, max_ahead);
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
as $$
declare
    clk   timestamptz := metered.clock();
    since timestamptz;
    tip   record;
begin
    for i in 1..cardinality(scopes) loop
        tip := metered.tip(scopes[i]);
        since := greatest(clk, tip.at) - windows[i];
        if windows[i] = interval '0' then
            used := tip.spent - tip.refunded - tip.credited;
        elsif tip.at <= since then
            used := 0;
        else
            used := metered.spent_since(scopes[i], tip.seq, tip.epoch, tip.spent, tip.refunded, since);
        end if;
        held := tip.held;
        spent := tip.spent;
        refunded := tip.refunded;
        credited := tip.credited;
        seq := tip.seq;
        due_us := extract(epoch from tip.next_due - clk) * 1000000;
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

create function metered.append(e metered.ledger) returns void
language plpgsql volatile
as $$
begin
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
-- than remains of the charge). remaining is what can still be refunded of it.
create function metered.refund(of_scope text, key bigint, charge_seq bigint, units bigint, wait_ms int, note text, of_namespace text, of_operation text,
    out status text, out remaining bigint, out seq bigint, out at timestamptz)
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
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
    elsif charge.kind <> 'c' then
        status := 'kind';
    end if;
    if status is not null then
        return;
    end if;
    remaining := charge.amount - coalesce((select r.amount from metered.refund_sum r
        where r.scope = of_scope and r.level = 0 and r.block = charge_seq), 0);
    if units > remaining then
        status := 'excess';
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
create function metered.purge_scope(of_scope text, key bigint, cutoff timestamptz, after_seq bigint, max_rows int, wait_ms int,
    out deleted bigint, out upto bigint, out done boolean)
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
as $$
declare
    tip   metered.ledger;
    first metered.ledger;
    keep  bigint;   -- the first entry to stay
begin
    perform metered.lock_keys(array[key], wait_ms);
    tip := metered.tip(of_scope);
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
        delete from metered.refund_sum r
        where r.scope = of_scope and r.level = lv
          and r.block >= upto >> (4 * lv) and r.block < keep >> (4 * lv);
    end loop;
    upto := greatest(upto, keep - 1);
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

-- Bounds this transaction's waits for row locks by wait_ms each, or by a shorter
-- lock_timeout that is set. Returns the setting as it was, for unbound_lock_wait,
-- which must follow; an error undoes it without.
create function metered.bound_lock_wait(wait_ms int) returns text
language plpgsql volatile
as $$
declare
    before text := current_setting('lock_timeout');
begin
    if wait_ms is null or before <> '0' and before::interval <= wait_ms * interval '1 ms' then
        return null;
    end if;
    perform set_config('lock_timeout', wait_ms::text, true);
    return before;
end
$$;

create function metered.unbound_lock_wait(before text) returns void
language plpgsql volatile
as $$
begin
    if before is not null then
        perform set_config('lock_timeout', before, true);
    end if;
end
$$;

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
    perform metered.unbound_lock_wait(before);
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
as $$
declare
    now_at  timestamptz := metered.clock();
    before  text := metered.bound_lock_wait(wait_ms);
begin
    for attempt in 1..3 loop
        update metered.tokens t
        set used = t.used + 1,
            ended_at = case when t.used + 1 = t.uses then now_at end
        where t.digest = token_digest and t.purpose = for_purpose and t.subject = for_subject
          and t.ended_at is null and t.expires_at > now_at
        returning 'ok', t.payload, t.uses - t.used, t.minted_at, t.expires_at, now_at
        into status, payload, uses_left, minted_at, expires_at, consumed_at;
        if not found then
            status := (metered.inspect_token(token_digest, for_purpose, for_subject)).status;
            continue when status = 'ok';
        end if;
        perform metered.unbound_lock_wait(before);
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
as $$
declare
    now_at  timestamptz := metered.clock();
    before  text := metered.bound_lock_wait(wait_ms);
    was     boolean;
begin
    update metered.tokens t
    set revoked = true, ended_at = now_at
    where t.digest = token_digest and t.ended_at is null and t.expires_at > now_at;
    was := found;
    perform metered.unbound_lock_wait(before);
    return was;
end
$$;

-- Ends every open token of a purpose and subject and returns how many of them
-- were still good. Rows are locked in the order of their digests.
create function metered.revoke_tokens(for_purpose text, for_subject text, wait_ms int) returns bigint
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
as $$
declare
    now_at  timestamptz := metered.clock();
    before  text := metered.bound_lock_wait(wait_ms);
    total   bigint;
begin
    with open as (
        select t.digest from metered.tokens t
        where t.purpose = for_purpose and t.subject = for_subject and t.ended_at is null
        order by t.digest for no key update),
    ended as (
        update metered.tokens t
        set revoked = t.expires_at > now_at, ended_at = least(now_at, t.expires_at)
        from open o where t.digest = o.digest
        returning t.revoked)
    select count(*) filter (where e.revoked) into total from ended e;
    perform metered.unbound_lock_wait(before);
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
    perform metered.unbound_lock_wait(before);
end
$$;

-- Deletes up to batch tokens that ended, or expired, at least keep_us ago, oldest
-- first, and skips what another purge is deleting. after is last_end of the batch
-- before (null: from the beginning), so that no batch reads again through the
-- index entries that the one before it left dead. For the owner only.
create function metered.purge_tokens(after timestamptz, keep_us bigint, batch int,
    out deleted int, out last_end timestamptz)
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
as $$
declare
    cutoff timestamptz := metered.clock() - greatest(keep_us, 0) * interval '1 microsecond';
begin
    with doomed as (
        select t.digest, coalesce(t.ended_at, t.expires_at) as ended from metered.tokens t
        where coalesce(t.ended_at, t.expires_at) >= coalesce(after, '-infinity')
          and coalesce(t.ended_at, t.expires_at) <= cutoff
        order by coalesce(t.ended_at, t.expires_at)
        limit batch for update skip locked),
    gone as (
        delete from metered.tokens t using doomed d where t.digest = d.digest
        returning d.ended)
    select count(*), max(g.ended) into deleted, last_end from gone g;
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
as $$
begin
    return query select * from metered.job_keys k where k.queue = of_queue and k.key = of_key;
end
$$;

-- Forgets up to max_rows keys claimed from "since" on and before cutoff, oldest
-- first, and passes over those that another purge is at. last_at is where to go
-- on: starting over would step across the index entries of all that was just
-- deleted. For a maintenance role: an application must not make an old key new.
create function metered.purge_job_keys(since timestamptz, cutoff timestamptz, max_rows int,
    out purged bigint, out last_at timestamptz)
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
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
            where k.created_at >= since and k.created_at < cutoff
            order by k.created_at limit max_rows
            for update skip locked))
        returning d.created_at
    )
    select count(*), max(g.created_at) into purged, last_at from gone g;
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
    primary key (namespace, id)
);

create index operations_at on metered.operations (at);

-- Ids that carry a time at or before this may have been purged. Never decreases.
-- Always found by its key: with sequential scans off, one would look so expensive
-- that each is compiled first (jit), for 50 ms.
create table metered.operations_horizon (
    at  timestamptz not null,
    one boolean primary key default true check (one)
);

insert into metered.operations_horizon (at) values ('-infinity');

-- Keeps a transaction from being committed by anyone but complete_command. A
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
    out scopes text[], out amounts bigint[], out seqs bigint[], out ats timestamptz[], out at timestamptz,
    out denied jsonb,
    out token_status text, out payload json, out uses_left int,
    out minted_at timestamptz, out expires_at timestamptz, out consumed_at timestamptz)
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
as $$
declare
    setting text;
    before  text;
begin
    if claiming then
        if coalesce(current_setting('metered_tx.command', true), '') <> '' then
            raise exception 'a command is already begun in this transaction' using errcode = 'MT006';
        end if;
        if not pg_try_advisory_xact_lock(key) then
            perform metered.lock_keys(array[key], wait_ms);
        end if;
        select 'replay', o.fingerprint, o.result, o.scopes, o.amounts, o.seqs, o.ats, o.at
        into status, fingerprint, result, scopes, amounts, seqs, ats, at
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
                raise exception using errcode = 'MT000';
            exception when sqlstate 'MT000' then
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
                    perform set_config(setting, timeout_ms::text, true);
                end if;
            end loop;
        end if;
        if timeout_ms is not null then
            -- COMMIT is sent before the charges are made: if the client is gone by the
            -- time a scope is free, let that be noticed. Not every platform can.
            begin
                perform set_config('client_connection_check_interval', '100', true);
            exception when invalid_parameter_value then
                null;
            end;
        end if;
        perform set_config('metered_tx.command', marker, true);
        execute 'declare metered_command cursor with hold for select metered.unfinished()';
    end if;
    status := 'new';
    if not opening then
        return;
    end if;
    if token_digest is not null then
        select t.status, t.payload, t.uses_left, t.minted_at, t.expires_at, t.consumed_at
        into token_status, payload, uses_left, minted_at, expires_at, consumed_at
        from metered.consume_token(token_digest, token_purpose, token_subject, wait_ms) t;
        if token_status <> 'ok' then
            return;
        end if;
    end if;
    if cardinality(limit_scopes) > 0 then
        denied := (metered.check_charge(charge_scopes, charge_amounts, limit_scopes, maxima, windows, max_ahead)).denied;
    end if;
end
$$;

-- Ends a command: charges, records the operation, and lets COMMIT pass. A denial
-- raises, because COMMIT follows in the same flush.
create function metered.complete_command(marker text, of_namespace text, of_id text,
    of_fingerprint bytea, issued timestamptz, of_result bytea,
    charge_scopes text[], keys bigint[], charge_amounts bigint[],
    limit_scopes int[], maxima bigint[], windows interval[], max_ahead interval, wait_ms int, notes text[],
    out seqs bigint[], out ats timestamptz[], out used bigint[], out held bigint[], out at timestamptz)
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
as $$
begin
    if coalesce(current_setting('metered_tx.command', true), '') <> marker then
        raise exception 'the command was not begun in this transaction' using errcode = 'MT005';
    end if;
    if cardinality(charge_scopes) > 0 then
        select c.seqs, c.ats, c.used, c.held into seqs, ats, used, held
        from metered.charge(charge_scopes, keys, charge_amounts, limit_scopes, maxima, windows,
            max_ahead, wait_ms, notes, of_namespace, of_id, true) c;
    end if;
    at := metered.clock();
    insert into metered.operations (namespace, id, fingerprint, issued_at, at, result, scopes, amounts, seqs, ats)
    values (of_namespace, of_id, of_fingerprint, issued, complete_command.at, of_result,
        nullif(charge_scopes, '{}'), nullif(charge_amounts, '{}'), complete_command.seqs, complete_command.ats)
    on conflict do nothing;
    if not found then
        raise exception 'could not serialize access: the operation was recorded meanwhile' using errcode = '40001';
    end if;
    perform set_config('metered_tx.command', '', true);
    execute 'close metered_command';
end
$$;

-- Deletes records of operations completed and issued before cutoff, at most
-- max_rows, and moves the horizon there in the same transaction.
create function metered.purge_operations(cutoff timestamptz, max_rows int) returns bigint
language plpgsql volatile security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
as $$
declare
    deleted bigint;
begin
    update metered.operations_horizon h set at = cutoff where h.one and h.at < cutoff;
    delete from metered.operations o
    where (o.namespace, o.id) in (
        select p.namespace, p.id from metered.operations p
        where p.at < cutoff and coalesce(p.issued_at, p.at) < cutoff
        order by p.at limit max_rows for update skip locked);
    get diagnostics deleted = row_count;
    return deleted;
end
$$;

-- Nothing is for everybody. See metered.GrantSQL.
revoke all on all functions in schema metered from public;
