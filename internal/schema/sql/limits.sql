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

-- What charge answers, as post has it.
create type metered.posted as (seqs bigint[], ats timestamptz[], used bigint[], held bigint[], denied jsonb, at timestamptz);

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

-- post, for applications: a charge that is no command's, and is answered when denied. It
-- returns the whole: that costs less than to assign each part.
create function metered.charge(scopes text[], keys bigint[], amounts bigint[],
    limit_scopes int[], maxima bigint[], windows interval[], max_ahead interval,
    wait_ms int, notes text[]) returns metered.posted
language plpgsql volatile
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
language plpgsql stable
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
language plpgsql stable
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
