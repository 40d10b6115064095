-- Sweeps of holds. A transaction that ends holds of many scopes keeps their locks until it commits.
-- So a scope with more due than one step writes (it is behind) is no part of it. It is swept alone,
-- a step a transaction, and nobody else waits for its backlog.

-- How many due events one step writes at most, about. Inlined wherever it stands.
create function metered._events_per_step() returns int
language sql immutable
as $$
    select 25
$$;

-- When the nth of more due lines of a scope fell due, or clk if no more are due. tip is the last
-- entry.
create function metered._nth_due(tip metered.ledger, clk timestamptz, nth int,
    out at timestamptz, out more boolean)
language plpgsql stable
as $$
declare
    times timestamptz[] := array(select l.due from metered.hold_lines l
        where l.scope = tip.scope and l.open > 0 and l.due >= tip.next_due and l.due <= clk
        order by l.due limit nth + 1);
begin
    more := cardinality(times) > nth;
    at := case when more then times[nth] else clk end;
end
$$;

-- The time up to which a step writes what is due in a scope: clk, or earlier if about most events
-- are due by then. tip is the last entry. What idle plans bring counts as one event. more:
-- something that is due is perhaps left, also of that time.
create function metered._step_until(tip metered.ledger, clk timestamptz, most int,
    out until timestamptz, out more boolean)
language plpgsql stable
as $$
declare
    lines record;
    turns record;
begin
    until := clk;
    more := false;
    if tip.next_due <= clk then
        lines := metered._nth_due(tip, clk, most);
        until := lines.at;
        more := lines.more;
    end if;
    turns := metered._lots_until(tip, until, most);
    until := turns.until;
    more := more or until < clk or turns.nos is not null;
end
$$;

-- The same, of what lots do by clk. Lines of holds may be due by then. nos are lots, if it writes
-- only these of that time (_turns_until).
create function metered._lots_until(tip metered.ledger, clk timestamptz, most int,
    out until timestamptz, out nos bigint[])
language plpgsql stable
as $$
declare
    turns record;
    times timestamptz[];
    plans metered.period[];
    begun timestamptz[];
    nth   timestamptz;
begin
    until := clk;
    if tip.lots_end <= greatest(clk, tip.at) then
        turns := metered._turns_until(tip, clk, most);
        until := turns.until;
        times := array(select y.expires_at from metered.lot_rows y
            where y.scope = tip.scope and y.open and y.expires_at <= clk
            order by y.expires_at, y.age limit most + 1);
        until := least(until, case when cardinality(times) > most then times[most] end);
        times := array(select y.expires_at from metered.lot_rows y
            where y.scope = tip.scope and y.keeps and y.expires_at <= clk
            order by y.expires_at, y.age limit most + 1);
        until := least(until, case when cardinality(times) > most then times[most] end);
        select array_agg(b.starts_at order by b.starts_at), array_agg(b.renews order by b.starts_at)
        into begun, plans
        from (select y.starts_at, (y.plan).renews from metered.lot_rows y
              where y.scope = tip.scope and y.pending > 0 and y.starts_at <= clk
              order by y.starts_at, y.age limit most + 1) b;
        until := least(until, case when cardinality(begun) > most then begun[most] end);
        begin
            for i in 1..coalesce(cardinality(plans), 0) loop
                continue when (plans[i]).every is null;
                exit when (tip.next_due <= clk) is not true and metered._debt(tip) = 0
                    and metered._is_idle(metered._beginning(tip.scope, until), until);
                nth := begun[i];    -- in each period a lot begins, one ends, and one may go on
                for n in 1..greatest(1, most / (3 * cardinality(plans))) loop
                    exit when nth > until;
                    nth := (metered._period_at(plans[i], nth))[2];
                end loop;
                until := least(until, nth);
            end loop;
        exception when sqlstate 'MT010' then    -- a lost zone, which the step itself reports
            null;
        end;
        nos := case when until = turns.until then turns.nos end;
    end if;
end
$$;

-- The lots of a wallet that begin until a time.
create function metered._beginning(of_scope text, until timestamptz) returns metered.lots[]
language plpgsql stable
as $$
begin
    return array(select l from (select y.no from metered.lot_rows y
            where y.scope = of_scope and y.pending > 0 and y.starts_at <= until
            order by y.starts_at, y.age) x,
        lateral (select z from metered.lots z where z.no = x.no limit 1) y(l));
end
$$;

-- Whether more is due in a scope than one step writes, or than it reads: a wallet that nobody
-- touched for long.
create function metered._behind(of_scope text, clk timestamptz) returns boolean
language plpgsql stable
as $$
begin
    return (metered._step_until(metered._last_entry(of_scope), clk, metered._events_per_step())).more
        or metered._is_idle(metered._beginning(of_scope, clk), clk) is true;
end
$$;

-- Those of due holds, whose rows are locked, that a sweep can end whole, or but for lines of scopes
-- that are behind. The locked scopes are not behind, and nothing is due in the idle ones.
create function metered._sweepable(due_nos bigint[], locked text[], idle text[], behind text[])
returns bigint[]
language plpgsql volatile
as $$
declare
    blocked bigint[];
begin
    -- Counted, since NOT EXISTS is a join, which can be one with all lines. A hold that keeps only
    -- lines of scopes that are behind is ended by their steps.
    due_nos := array(
        select y.no
        from unnest(due_nos) y(no), lateral (
            select count(*) as lines,
                count(*) filter (where l.scope = any (locked || idle)) as mine,
                count(*) filter (where l.scope = any (behind)) as later
            from metered.hold_lines l where l.hold = y.no and l.open <> 0) x
        where x.lines = x.mine + x.later and (x.lines = 0 or x.mine > 0));
    -- Nor one that fell due after another that is left to others, and captures something.
    loop
        blocked := array(
            select distinct x.hold from metered.hold_lines x
            where x.hold = any (due_nos) and x.open <> 0 and x.scope = any (locked) and 0 < (
                select count(*) from metered.hold_lines l
                where l.scope = x.scope and l.open > 0 and l.at_least > 0
                  and l.at_least > l.captured and l.due < x.due and l.hold <> all (due_nos)));
        exit when blocked = '{}';
        due_nos := array(select n from unnest(due_nos) n where n <> all (blocked));
    end loop;
    return due_nos;
end
$$;

-- Looks at up to max_holds due holds, after after_due and after_no, and ends those whose
-- locks are free. Scopes that are behind are returned, for sweep_scope, and their lines stay. nos
-- are the holds that ended whole, and skipped counts those whose locks were not free. Without
-- keep_pending they need no announcement. seen counts the holds looked at. If there may be more,
-- go on after last_due and last_no.
--
-- Together they have at most 2,000 scopes, since each takes a lock of the server's
-- table, which by default has room for some 6,400 of all sessions. One hold has at
-- most 64.
create function metered.sweep_due(after_due timestamptz, after_no bigint, max_holds int,
    keep_pending boolean, channel text,
    out nos bigint[], out seen int, out last_due timestamptz, out last_no bigint, out more boolean,
    out skipped int, out behind text[])
language plpgsql volatile
as $$
declare
    clk     timestamptz := metered.clock();
    due_nos bigint[];
    looked  bigint[];
    ended   bigint[];
    locked  text[] := '{}';
    idle    text[] := '{}';     -- in which nothing is due but rows of
                                -- lines that were freed with a sum
    tip     metered.ledger;
    wallets text[];
    one     record;
begin
    perform metered._require(max_holds between 1 and 10000 and keep_pending is not null,
        'sweep_due');
    perform metered._fold_all();
    behind := '{}';
    skipped := 0;
    select array_agg(d.no order by d.due, d.no) filter (where d.locks <= 2000),
        count(*) filter (where d.locks <= 2000), max(d.due) filter (where d.locks <= 2000),
        count(*) = max_holds or coalesce(bool_or(d.locks > 2000), false)
    into looked, seen, last_due, more
    from (select c.no, c.due, sum(cardinality(c.keys)) over (order by c.due, c.no) as locks
          from (select y.no, y.due, y.keys from metered.holds y
                where y.pending and (y.due, y.no) > (after_due, after_no) and y.due <= clk
                order by y.due, y.no limit max_holds) c) d;
    if seen = 0 then
        return;
    end if;
    last_no := looked[seen];
    for one in
        select distinct l.key, l.scope from metered.hold_lines l
        where l.hold = any (looked) and l.open <> 0 order by l.key, l.scope
    loop
        tip := metered._last_entry(one.scope);
        if tip.lots_end is null and (tip.next_due <= clk) is not true then
            idle := idle || one.scope;
        elsif metered._behind(one.scope, clk) then
            behind := behind || one.scope;
        elsif metered._try_lock(one.key) then
            locked := locked || one.scope;
        end if;
    end loop;
    due_nos := metered._lock_due(case when behind = '{}' then looked else array(
        select y.no from unnest(looked) y(no), lateral (
            select count(*) as lines, count(*) filter (where l.scope = any (behind)) as later
            from metered.hold_lines l where l.hold = y.no and l.open <> 0) x
        where x.lines = 0 or x.lines > x.later) end, clk);
    loop
        begin
            ended := metered._sweepable(due_nos, locked, idle, behind);
            if ended <> '{}' then
                perform metered._clear_freed(ended, locked || idle);
                perform metered._release_lines(ended, locked, 'x', clk, null, metered._by_system());
                nos := metered._end_swept(ended, clk, keep_pending, channel);
            end if;
            exit;
        exception when sqlstate 'MT010' then    -- of one wallet: each is swept alone, and one fails
            wallets := array(select s from unnest(locked) s
                where (metered._last_entry(s)).lots_end is not null);
            if wallets = '{}' then
                raise;
            end if;
            behind := behind || wallets;
            locked := array(select s from unnest(locked) s where s <> all (wallets));
        end;
    end loop;
    skipped := seen - coalesce(cardinality(nos), 0) - (
        select count(distinct l.hold) from metered.hold_lines l
        where l.hold = any (looked) and l.open <> 0 and l.scope = any (behind))::int;
end
$$;

-- Clears rows of lines that were freed with a sum, and their parts of lots, of some holds, whose
-- rows are locked: in only_scopes, or in all. Wallets are locked. Other scopes need not be: what
-- was freed stays freed.
create function metered._clear_freed(nos bigint[], only_scopes text[]) returns void
language plpgsql volatile
as $$
declare
    lines record;
    seqs  bigint[];
begin
    for lines in
        select x.scope, x.holds, t.next_due, t.lots_end is not null as wallet
        from (select l.scope, array_agg(l.hold) as holds, min(l.due) as due
              from metered.hold_lines l
              where l.hold = any (nos) and l.open <> 0
                and (only_scopes is null or l.scope = any (only_scopes))
              group by l.scope) x,
             lateral (select y.next_due, y.lots_end from metered.ledger y
                      where y.scope = x.scope order by y.seq desc limit 1) t
        where x.due < coalesce(t.next_due, 'infinity') order by x.scope
    loop
        with freed as (
            update metered.hold_lines l set open = 0
            where l.hold = any (lines.holds) and l.scope = lines.scope and l.open <> 0
              and l.due < coalesce(lines.next_due, 'infinity')
            returning l.opened_seq)
        select array_agg(f.opened_seq) into seqs from freed f;
        if lines.wallet then
            delete from metered.lot_holds o where o.scope = lines.scope and o.seq = any (seqs);
        end if;
    end loop;
end
$$;

-- Ends the rows of swept holds, whose lines have ended, and returns those that keep no units.
-- Unless subscribers still shall hear of them, they are marked as announced.
create function metered._end_swept(swept bigint[], clk timestamptz, keep_pending boolean,
    channel text) returns bigint[]
language plpgsql volatile
as $$
declare
    nos bigint[];
begin
    perform metered._end_rows(swept, clk, (metered._by_system()).note, not keep_pending);
    select array_agg(y.no order by y.no) into nos from unnest(swept) y(no) where 0 = (
        select count(*) from metered.hold_lines l where l.hold = y.no and l.open <> 0);
    if not keep_pending and nos is not null then
        perform metered.announced(nos, channel);
    end if;
    return nos;
end
$$;

-- Locks the rows of due holds, in order, but those that another call has locked or announced.
create function metered._lock_due(nos bigint[], clk timestamptz) returns bigint[]
language plpgsql volatile
as $$
begin
    -- "is true" keeps the planner from the index of all that is due.
    return array(select r.no from (
        select y.no from metered.holds y
        where y.no = any (nos) and (y.pending and y.due <= clk) is true
        order by y.no for no key update skip locked) r);
end
$$;

-- Takes one step in a scope that is behind. A step clears the rows of up to max_holds lines that
-- were freed with a sum, and locks no scope. Where there are none, it frees what is due, if the
-- scope's lock is free: by a sum, as catch_up does it, or, in a wallet or a closed scope, the first
-- lines one by one. Then it takes the step that sweep_wallet takes, which may end lots and no line.
-- freed counts lines that it ended: null if it did nothing, since others have the locks. nos are
-- holds that ended whole with them, as sweep_due has it. more: rows of others are left.
create function metered.sweep_scope(of_scope metered.scope_name, max_holds int,
    keep_pending boolean, channel text,
    out nos bigint[], out freed int, out more boolean)
language plpgsql volatile
as $$
declare
    tip    metered.ledger := metered._last_entry(of_scope);
    clk    timestamptz := metered.clock();
    ours   bigint[] := '{}';
    locked boolean := false;
    moved  boolean := true;
begin
    perform metered._require(max_holds between 1 and 10000 and keep_pending is not null,
        'sweep_scope');
    more := false;
    loop
        if locked or tip.lots_end is null then
            ours := metered._lock_due(array(select l.hold from metered.hold_lines l
                where l.scope = of_scope and l.open > 0 and l.due <= clk
                  and l.due < coalesce(tip.next_due, 'infinity')
                order by l.due limit max_holds), clk);
            perform metered._clear_freed(ours, array[of_scope::text]);
        end if;
        exit when ours <> '{}' or locked;
        if not metered._try_lock(metered._scope_key(of_scope)) then
            return;
        end if;
        locked := true;
        clk := metered.clock();
        tip := metered._entry_for_write(of_scope);
    end loop;
    if ours = '{}' and tip.lots_end is null and tip.next_due > '-infinity' then
        ours := metered._lock_due((metered._free_in_sum(tip, clk, true, null)).nos, clk);
        moved := (metered._last_entry(of_scope)).seq > tip.seq;
        perform metered._clear_freed(ours, array[of_scope::text]);
    elsif ours = '{}' then
        ours := metered._free_first(tip, clk, least(max_holds, metered._events_per_step()));
        moved := ours is not null;
    end if;
    nos := metered._end_swept(ours, clk, keep_pending, channel);
    more := 0 < (select count(*) from (select from metered.hold_lines l
        where l.scope = of_scope and l.open > 0 and l.due <= clk
        order by l.due limit 1) x);
    if moved or not more then
        freed := coalesce(cardinality(ours), 0);
    else
        more := false;
    end if;
end
$$;

-- Ends the first due lines, at most most, of a wallet or a closed scope, which is locked: up to the
-- first whose hold another call has locked, since it may capture something. In a wallet, what is
-- due by then is written, or a part of it. Returns the holds that it ended: null if the first one is
-- locked.
create function metered._free_first(tip metered.ledger, clk timestamptz, most int) returns bigint[]
language plpgsql volatile
as $$
declare
    until   timestamptz := (metered._step_until(tip, clk, most)).until;
    due_nos bigint[];
    ours    bigint[];
begin
    due_nos := array(select l.hold from metered.hold_lines l
        where l.scope = tip.scope and l.open > 0 and l.due <= until
        order by l.due, l.opened_seq limit most);
    ours := metered._lock_due(due_nos, clk);
    if cardinality(ours) < cardinality(due_nos) then
        due_nos := due_nos[:(select min(d.n) from unnest(due_nos) with ordinality d(no, n)
            where d.no <> all (ours)) - 1];
        until := (select max(l.due) from metered.hold_lines l
            where l.scope = tip.scope and l.hold = any (due_nos));
        if until is null then
            return null;
        end if;
    end if;
    if tip.lots_end is not null then
        perform metered._settle(tip, until, metered._events_per_step(), 0, null);
        perform metered._clear_freed(due_nos, array[tip.scope]);
        return array(select n from unnest(due_nos) n where 0 = (
            select count(*) from metered.hold_lines l
            where l.scope = tip.scope and l.hold = n and l.open > 0));
    end if;
    perform metered._clear_freed(due_nos, array[tip.scope]);
    perform metered._release_lines(due_nos, array[tip.scope], 'x', clk, null, metered._by_system());
    return due_nos;
end
$$;

-- sweep_due, and a step of the first scope that is behind, for programs of version 1, which go on
-- where this call says. If more is due in that scope, it is before the next hold of that scope.
create function metered.sweep_holds(after_due timestamptz, after_no bigint, max_holds int,
    keep_pending boolean, channel text,
    out nos bigint[], out seen int, out last_due timestamptz, out last_no bigint, out more boolean)
language plpgsql volatile
as $$
declare
    page record;
    step record;
    next timestamptz;
begin
    perform metered._require(max_holds between 1 and 10000 and keep_pending is not null,
        'sweep_holds');
    page := metered.sweep_due(after_due, after_no, max_holds, keep_pending, channel);
    nos := page.nos;
    seen := page.seen;
    last_due := page.last_due;
    last_no := page.last_no;
    more := page.more;
    if page.behind <> '{}' then
        step := metered.sweep_scope(page.behind[1], max_holds, keep_pending, channel);
        nos := nos || step.nos;
        if step.more then
            next := (select l.due from metered.hold_lines l
                where l.scope = page.behind[1] and l.open > 0
                order by l.due limit 1) - interval '1 microsecond';
            if step.freed = 0 or (next, 9223372036854775807) > (after_due, after_no) then
                last_due := next;
                last_no := 9223372036854775807;
                more := true;
            end if;
        end if;
        seen := greatest(coalesce(cardinality(nos), 0), 1);
    end if;
end
$$;
