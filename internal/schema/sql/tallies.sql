-- Charges without limits of a busy scope, such as the total of a channel that all users share. They
-- do not queue: each is a row of its own (a tally), written without the scope's lock, and whoever
-- has that lock next folds all rows that it sees into the chain.
--
-- A scope has tallies from the charge on that had to wait for its lock (tallied in its entries). So
-- a writer learns from the last entry, which it reads anyway, whether it has to look for rows. A
-- row that it does not see was committed after it looked, and is charged after it.
--
-- What nothing may be charged to without the lock (a wallet, a closed scope, a scope that is
-- forgotten) takes the tallies' lock, exclusively, and folds once more: _end_tallies. A tally has
-- it shared. See ADR 26.

-- The key of the lock that ends the tallies of a scope.
create function metered._tally_key(of_scope text) returns bigint
language sql stable
as $$
    select metered._lock_key('metered/tally/metered', convert_to(of_scope, 'UTF8'))
$$;

-- Folds the tallies of a scope, which is locked, into its chain, whose last entry is tip, and
-- returns the last entry then. Each row becomes an entry, in the order of their times, but no
-- earlier than the entry before it, nor than its own time, even if the clock was set back: else a
-- later tally could get that time again, and with it the number.
--
-- A tally that does not see a hold commits before it, and later than the hold falls due, where the
-- transaction that places it lasts that long. The hold's minimum is captured before such a tally.
-- clk is when the caller read the clock, or null, for now: what is not due by then stays the caller's,
-- who may be ending it. Tallies of a later time stay, too, since minima may fall due before them.
create function metered._fold(tip metered.ledger, clk timestamptz) returns metered.ledger
language plpgsql volatile
as $$
declare
    dues timestamptz[];
    nos  bigint[];
begin
    while tip.next_due > '-infinity' loop
        dues := metered._due_before_tallies(tip, coalesce(clk, metered.clock()));
        exit when dues is null;
        tip := metered._fold_before(tip, dues[1]);
        nos := array(select l.hold from metered.hold_lines l
            where l.scope = tip.scope and l.open > 0 and l.at_least > 0 and l.at_least > l.captured
              and l.due >= tip.next_due and l.due <= dues[2]);
        if metered._one_snapshot() then     -- it may not see that a hold was extended: then this is 40001
            perform from metered.holds h where h.no = any (nos) order by h.no for share;
        end if;
        tip := metered._append_minima(tip, nos, null, dues[2]);
    end loop;
    return metered._fold_before(tip, coalesce(clk + interval '1 microsecond', 'infinity'));
end
$$;

-- When the first minimum of a scope fell due, and the last one before the tally that follows it:
-- null, if no tally follows one.
create function metered._due_before_tallies(tip metered.ledger, clk timestamptz) returns timestamptz[]
language plpgsql stable
as $$
declare
    newest timestamptz := (select x.at from metered.tallies x where x.scope = tip.scope
        order by x.at desc limit 1);
    due    timestamptz;
begin
    if newest >= tip.next_due then
        due := (select l.due from metered.hold_lines l
            where l.scope = tip.scope and l.open > 0 and l.at_least > 0 and l.at_least > l.captured
              and l.due >= tip.next_due and l.due <= least(clk, newest) order by l.due limit 1);
    end if;
    if due is not null then
        return array[due, least(clk, (select x.at from metered.tallies x
            where x.scope = tip.scope and x.at >= due order by x.at limit 1))];
    end if;
    return null;
end
$$;

-- Folds the tallies from before a time.
create function metered._fold_before(tip metered.ledger, until timestamptz) returns metered.ledger
language plpgsql volatile
as $$
declare
    rows_  bigint;
    made   bigint;
    folded metered.ledger := tip;
begin
    with gone as (
        delete from metered.tallies x where x.scope = tip.scope and x.at < until returning x.*
    ), placed as (
        select g.*, row_number() over w as nth, (sum(g.amount) over w)::bigint as sum
        from gone g window w as (order by g.at)
    ), entries as (
        insert into metered.ledger ({entry columns}, ref)
        select {entry of tip: seq = tip.seq + p.nth, amount = p.amount, at = greatest(tip.at, p.at),
            spent = tip.spent + p.sum,
            kind = 'c', hold = p.hold, operation_tenant = p.operation_tenant,
            operation = p.operation, note = p.note}, metered._in_us(p.at)
        from placed p
        on conflict do nothing
        returning seq
    )
    select (select count(*) from gone), (select count(*) from entries) into rows_, made;
    if made < rows_ then
        perform metered._collided();
    elsif made > 0 then
        select * into folded
        from metered.ledger l
        where l.scope = tip.scope and l.seq = tip.seq + made;
    end if;
    return folded;
end
$$;

-- The units of a scope's tallies that count after a time, or of all of them (null), for a reader,
-- and how many they are.
create function metered._tallied_units(tip metered.ledger, since timestamptz, out units bigint,
    out charges bigint)
language sql stable
as $$
    select coalesce(sum(x.amount), 0)::bigint, count(*) from metered.tallies x
    where x.scope = tip.scope and (since is null or tip.at > since or x.at > since)
$$;

-- Writes a charge without limits as a tally, if its scope has them, and returns its time, which no
-- other one of the scope has, or null. It waits for nobody: a time is the writer's own by a lock,
-- and where the chain is ahead of the clock, the next one is looked for.
create function metered._tally(charge metered.new_charge, origin metered.origin, of_hold text)
    returns timestamptz
language plpgsql volatile
as $$
declare
    t_lock bigint := metered._tally_key(charge.scope);
    made   timestamptz;
begin
    if ({sum: amount = charge.amount, note = charge.note}
            and charge.held = 0
            and charge.must_exist is not true
            and charge.lease is null
        and pg_try_advisory_xact_lock_shared(t_lock)) is not true then
        return null;
    end if;
    {write tally: into = made, scope = charge.scope, amount = charge.amount,
        tenant = origin.tenant, operation = origin.operation, hold = of_hold, note = charge.note};
    if made is not null or not exists (
        select from (select *
            from metered.ledger l where l.scope = charge.scope order by l.seq desc limit 1) t
        where {tallied: scope = charge.scope, tip = t, at = metered.clock()}) then
        return made;
    end if;
    for nth in 1..100 loop
        insert into metered.tallies as y (at, amount, scope, operation_tenant, operation, hold,
            note)
        select x.at, charge.amount, charge.scope, origin.tenant, origin.operation, of_hold,
            charge.note
        from (
            select nth * interval '1 microsecond' + greatest(metered.clock(), t.at,
                (select y.at
                    from metered.tallies y where y.scope = charge.scope order by y.at desc
                    limit 1)) as at
            from (select *
                from metered.ledger l where l.scope = charge.scope order by l.seq desc
                limit 1) t
            where {tallied: scope = charge.scope, tip = t, at = metered.clock()}) x
        where {own time: key = t_lock, at = x.at}
        on conflict do nothing
        returning y.at into made;
        exit when made is not null;
    end loop;
    return made;
end
$$;

-- _write_charges, where some charges were written as tallies, at these times: makes the others, or
-- takes the tallies back. The seq of a tally is its time in microseconds, less than 0. One in 32
-- also folds, if nobody has the scope's lock.
create function metered._write_others(charges metered.new_charge[], tallies timestamptz[],
    ahead interval, wait_ms int,
    origin metered.origin, mode text, hold metered.hold_terms, standing boolean)
returns metered.charged
language plpgsql volatile
as $$
declare
    others    metered.new_charge[] := '{}';
    posted    metered.charged;
    answer    metered.charged;
    nth_other int := 0;
begin
    for i in 1..cardinality(charges) loop
        if tallies[i] is null then
            others := others || charges[i];
        end if;
    end loop;
    if others <> '{}' then
        posted := metered._write_charges(others, ahead, wait_ms, origin, mode, hold, standing);
        answer := posted;
        if posted.refused is not null then
            for i in 1..cardinality(charges) loop
                delete from metered.tallies y
                where y.scope = charges[i].scope and y.at = tallies[i];
            end loop;
            return answer;
        end if;
    end if;
    for i in 1..cardinality(charges) loop
        if tallies[i] is not null then
            answer.ats[i] := tallies[i];
            answer.seqs[i] := -metered._in_us(tallies[i]);
            answer.held[i] := 0;
            answer.at := coalesce(answer.at, tallies[i]);
            if answer.seqs[i] & 31 = 0
                and metered._try_lock(metered._scope_key(charges[i].scope)) then
                perform metered._entry_for_write(charges[i].scope);
            end if;
        else
            nth_other := nth_other + 1;
            answer.ats[i] := posted.ats[nth_other];
            answer.seqs[i] := posted.seqs[nth_other];
            answer.held[i] := coalesce(posted.held[nth_other], 0);
        end if;
    end loop;
    return answer;
end
$$;

-- Ends the tallies of a scope that is locked, and waits as long for those that are on their way: no
-- transaction writes one from here on. entry is its last entry, as far as the caller knows it,
-- which gets the number, the time and the spent units of the last one.
create function metered._end_tallies(entry metered.ledger, wait_ms int) returns metered.ledger
language plpgsql volatile
as $$
declare
    last   metered.ledger;
    waited boolean;
begin
    -- An old snapshot does not see the tallies that the lock waited for.
    if metered._one_snapshot() then
        raise exception 'a scope with tallies becomes a wallet, is closed, or has its clock repaired, at READ COMMITTED' using errcode = '25001';
    end if;
    waited := metered._lock_keys(array[metered._tally_key(entry.scope)], wait_ms);
    last := metered._entry_for_write(entry.scope);
    entry.seq := last.seq;
    entry.at := greatest(entry.at, last.at);
    entry.spent := last.spent;
    entry.others := last.others;
    entry.tallied := null;
    return entry;
end
$$;

-- Keeps tallies out of scopes that are locked, until the transaction ends, and folds those that
-- there are: for a caller to whom nothing of the past may be missing.
create function metered._without_tallies(scopes text[], wait_ms int) returns void
language plpgsql volatile
as $$
declare
    busy   text[] := metered._tallied_of(scopes);
begin
    if busy <> '{}' then
        perform metered._lock_keys(array(select metered._tally_key(b) as key
                from unnest(busy) b order by 1), wait_ms);
        perform metered._fold_of(busy, null);
    end if;
end
$$;

-- Those of the scopes that have tallies.
create function metered._tallied_of(scopes text[]) returns text[]
language plpgsql stable
as $$
begin
    return array(select s.scope from unnest(scopes) s(scope),
        lateral (select l.tallied
            from metered.ledger l where l.scope = s.scope order by l.seq desc
            limit 1) t where t.tallied);
end
$$;

-- Folds the tallies of those of the scopes that have some. They are locked. clk is as in _fold.
create function metered._fold_of(scopes text[], clk timestamptz) returns void
language plpgsql volatile
as $$
declare
    folded text;
begin
    foreach folded in array metered._tallied_of(scopes) loop
        perform metered._entry_by(folded, clk);
    end loop;
end
$$;

-- _entry_for_write of a scope that has entries, for a caller that ends holds and has read the clock:
-- the fold captures nothing that falls due after that.
create function metered._entry_by(of_scope text, clk timestamptz) returns metered.ledger
language plpgsql volatile
as $$
declare
    tip metered.ledger;
begin
    select * into tip from metered.ledger l
    where l.scope = of_scope order by l.seq desc limit 1 for key share;
    return case when tip.tallied then metered._fold(tip, clk)
        when found then tip else metered._first_for_write(of_scope) end;
end
$$;

-- Folds the tallies of scopes whose locks are free, of up to 100 scopes.
create function metered._fold_all() returns void
language plpgsql volatile
as $$
declare
    last_scope text := '';
begin
    for nth in 1..100 loop
        select x.scope into last_scope
        from metered.tallies x
        where x.scope > last_scope order by x.scope limit 1;
        exit when not found;
        if metered._try_lock(metered._scope_key(last_scope)) then
            perform metered._entry_for_write(last_scope);
        end if;
    end loop;
end
$$;

-- The keys of locks that a command takes first, with those of the scopes of its charges without
-- limits, unless these are tallies.
create function metered.with_sums(keys bigint[], scopes text[]) returns bigint[]
language plpgsql volatile
as $$
begin
    return array(select distinct k.key from (
        select unnest(keys) as key
        union all
        select metered._scope_key(s.scope) from unnest(scopes) s(scope)
        where metered._one_snapshot() or metered._sharded() or (
            select {tallied: scope = s.scope, tip = l, at = metered.clock()}
            from metered.ledger l
            where l.scope = s.scope order by l.seq desc limit 1) is not true) k order by 1);
end
$$;

-- The units of a scope's tallies that count before each of the times, which ascend (see
-- usage_before), or how many they are.
create function metered._tallies_before(tip metered.ledger, times timestamptz[], counting boolean)
    returns bigint[]
language plpgsql stable
as $$
declare
    units bigint[] := array_fill(0::bigint, array[cardinality(times)]);
    total bigint := 0;
    tally record;
begin
    for tally in
        select width_bucket(greatest(x.at, tip.at), times) as nth,
            sum(case when counting then 1 else x.amount end)::bigint as amount
        from metered.tallies x where x.scope = tip.scope group by 1
    loop
        if tally.nth < cardinality(times) then
            units[tally.nth + 1] := tally.amount;
        end if;
    end loop;
    for i in 1..cardinality(times) loop
        total := total + units[i];
        units[i] := total;
    end loop;
    return units;
end
$$;

-- The entry of a tally that was folded, or null. It is no earlier than the tally. A scope has
-- tallies in its first epoch only.
create function metered._seq_of_tally(of_scope text, named bigint) returns bigint
language plpgsql stable
as $$
declare
    before timestamptz;
begin
    if named < -9007199254740992 then   -- no clock shows that time
        return null;
    end if;
    before := timestamptz 'epoch' - (named + 1) * interval '1 microsecond';
    return (select l.seq from metered.ledger l
        where l.scope = of_scope and l.epoch = 0 and l.kind = 'c' and l.ref = -named
            and l.seq > coalesce((select base.seq
                    from {base: scope = of_scope, epoch = 0, since = before}), 0)
        order by l.seq limit 1);
end
$$;
