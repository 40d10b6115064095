-- How lots end: by time, by revocation, by rollover. How subscribers hear of it, and how lots are deleted.

-- A lot of a wallet, by its number or its reference.
create function metered._find_lot(of_scope text, of_lot bigint, of_reference text) returns metered.lots
language plpgsql stable
as $$
declare
    its_lot metered.lots;
begin
    if of_lot is not null then
        select * into its_lot from metered.lots y where y.no = of_lot and y.scope = of_scope;
    else
        select * into its_lot from metered.lots y where y.scope = of_scope and y.reference = of_reference;
        if its_lot.no is null and of_reference ~ ' \d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ$' then
            its_lot := metered._find_skipped(of_scope, left(of_reference, -21), right(of_reference, 20));
        end if;
    end if;
    return its_lot;
end
$$;

-- The lot of a plan's period that began then and was skipped, for which another one stands (idle.sql): that one, with the units and
-- the end of the period.
create function metered._find_skipped(of_scope text, of_renewal text, began text) returns metered.lots
language plpgsql stable
as $$
declare
    its_lot metered.lots;
    plan    metered.lot_plan;
    named   timestamptz;
    span    timestamptz[];
begin
    -- The last lot of a plan has its period.
    select (y.plan).* into plan from metered.lot_rows y
    where y.scope = of_scope and (y.plan).renewal = of_renewal and ((y.plan).renews).every is not null
    order by y.age desc limit 1;
    begin
        named := began::timestamptz;
        span := metered._period_at(plan.renews, named + interval '999999 microseconds');
    exception when datetime_field_overflow or sqlstate 'MT010' then     -- no time, or of a zone that is lost
        return null;
    end;
    select y.* into its_lot from metered.lots y
    where y.scope = of_scope and (y.plan).renewal = of_renewal and y.starts_at <= span[1] and y.expires_at > span[1]
      and starts_with(y.reference, metered._period_name(of_renewal, y.starts_at) || '/')
      and date_trunc('second', span[1]) = named;
    if its_lot.no is not null then
        its_lot.amount := plan.renew_amount;
        its_lot.expires_at := span[2];
    end if;
    return its_lot;
end
$$;

-- A lot, and all lots that its units went on in.
create function metered._family(of_no bigint) returns bigint[]
language plpgsql stable
as $$
declare
    nos  bigint[] := array[of_no];
    more bigint[] := nos;
begin
    while more <> '{}' loop
        more := array(select y.no from metered.lot_rows y where y.from_lot = any (more));
        nos := nos || more;
    end loop;
    return nos;
end
$$;

-- The lot that a call names, by its number or its reference, after all that is due has been
-- written: so a call accepts each name that a balance shows, whoever wrote it. With
-- lowers, the caller takes so many units back, and also the ends of lots that its units went on in
-- are written. last_entry is the result of _next_entry, and entry the same after that. crossings are
-- thresholds that due ends and the caller's units cross: crossed has them if what is written by then
-- remembers them. Else the entry that the caller writes may: entry has them. status is crossing, where
-- the caller did not say that it reports them, and nothing is written, or unknown: there is no such lot.
create function metered._name_lot(last_entry metered.ledger, of_lot bigint, of_reference text,
    lowers bigint, limits metered.charge_limit[], wait_ms int,
    out entry metered.ledger, out lot metered.lots, out crossings jsonb, out crossed jsonb,
    out status text)
language plpgsql volatile
as $$
declare
    tip      metered.ledger := last_entry;
    crossing record;
begin
    tip.seq := last_entry.seq - 1;   -- with its time: a hold may have freed units of a lot before that lot ended
    select coalesce((select y.at from metered.ledger y where y.scope = last_entry.scope and y.seq = tip.seq), last_entry.at) into tip.at;
    crossing := metered._cross_lowered(tip, coalesce(lowers, 0), limits, least(last_entry.at, metered.clock()));
    entry := last_entry;
    crossings := crossing.crossings;
    if crossing.silent then
        status := 'crossing';
        return;
    end if;
    entry := metered._after_due_lowered(entry, 0, crossing.crossed, wait_ms);
    lot := metered._find_lot(last_entry.scope, of_lot, of_reference);
    if lot.no is null and of_lot is not null then   -- the lot before it ends among more than one call writes
        entry := metered._end_named(entry, array(select y.no from metered.lot_rows y where y.roll_no = of_lot and y.scope = last_entry.scope));
        lot := metered._find_lot(last_entry.scope, of_lot, null);
    end if;
    if lot.no is not null then
        entry := metered._end_named(entry,
            case when lowers is not null then metered._family(lot.no) else array[lot.no] end);
        lot := metered._find_lot(last_entry.scope, of_lot, of_reference);
    end if;
    if entry.seq > last_entry.seq and {remembered: scope = last_entry.scope} then
        crossed := metered._crossed_at(crossings, array[entry.seq - 1]);
    end if;
    if lot.no is null then
        status := metered._missing_lot(entry);
    end if;
end
$$;

-- Takes back units of a lot and of those that it went on in, or all units (null), as far as they are neither drawn nor held: revoked. missing counts units that are
-- drawn or held; lapsed units of a lot that is revoked whole are not missing. Each lot has an entry of its own, and seq is the last. status is revoked (perhaps 0 units), unknown, or crossing: it would cross thresholds
-- of limits, which the caller does not report (_cross_lowered).
create function metered.revoke_lot(of_scope metered.scope_name, key bigint, of_lot bigint, of_reference text, units bigint, limits metered.charge_limit[],
    wait_ms int, origin metered.origin,
    out status text, out no bigint, out revoked bigint, out missing bigint, out seq bigint, out at timestamptz, out crossed jsonb)
language plpgsql volatile
as $$
declare
    entry     metered.ledger;
    its_lot   metered.lots;
    nos       bigint[];
    named     record;
    part      bigint;
    origin_no bigint;
begin
    perform metered._require(coalesce(metered._key_fits(key, of_scope), true) and (of_lot is null) <> (of_reference is null)
        and coalesce(units between 1 and 9007199254740992, true), 'revoke');
    entry := metered._next_entry(of_scope, key, wait_ms, origin);
    its_lot := metered._find_lot(of_scope, of_lot, of_reference);
    if its_lot.no is null and of_lot is not null then     -- its number is set aside for units of this lot, whose end is perhaps due
        select y.no into origin_no from metered.lot_rows y where y.roll_no = of_lot and y.scope = of_scope;
    end if;
    part := (select coalesce(sum(y.rest), 0) from metered._lots_now(metered._last_entry(of_scope), least(entry.at, metered.clock()),
            case when its_lot.no is not null then metered._family(its_lot.no) when of_lot is not null then array[origin_no, of_lot] end) y
        where (y.plan).uses is null and (y.no = origin_no) is not true and (coalesce(its_lot.no, of_lot) is not null or coalesce(y.reference, (y.plan).of_reference) = of_reference));
    named := metered._name_lot(entry, of_lot, of_reference, least(coalesce(units, part), part), limits, wait_ms);
    {named lot};
    no := (named.lot).no;
    nos := metered._family(no);
    select sum(y.pending + y.rest + y.kept), sum(y.drawn + y.held) into revoked, missing from metered.lots y where y.no = any (nos);
    missing := coalesce(units - least(units, revoked), missing);
    revoked := 0;
    for its_lot in
        select y.* from metered.lots y where y.no = any (nos) and (y.pending > 0 or y.open or y.keeps)
        order by y.pending = 0, y.age
    loop
        part := least(units - revoked, its_lot.pending + its_lot.rest + its_lot.kept);
        exit when part = 0;
        part := coalesce(part, its_lot.pending + its_lot.rest + its_lot.kept);
        continue when part = 0;
        if its_lot.pending > 0 then
            entry := metered._withdraw(entry, its_lot, part);
        else
            entry.seq := entry.seq - 1;
            entry := metered._take_units(entry, its_lot, part, 'v');
        end if;
        revoked := revoked + part;
        seq := entry.seq;
        at := entry.at;
        entry.seq := entry.seq + 1;
    end loop;
    if seq is null and metered._one_snapshot() then
        status := metered._missing_lot(entry);   -- nothing was there, as of this snapshot
    end if;
    status := 'revoked';
    if seq is not null then
        crossed := metered._crossed_at(named.crossings, array[seq]);
    end if;
end
$$;

-- Writes the ends of some lots that are due, where earlier calls have left them. entry is the result of _next_entry.
create function metered._end_named(e metered.ledger, nos bigint[]) returns metered.ledger
language plpgsql volatile
as $$
declare
    tip   metered.ledger := e;
    due   record;
    after record;
begin
    tip.seq := e.seq - 1;
    due := metered._load_due(tip, '-infinity', 0, 0, '{}', false, nos);
    after := metered._advance(tip, e.at, null, null, due.lines, due.lots, due.parts, due.debts,
        due.spent);
    if cardinality(after.entries) > 0 then
        e.seq := (after.tip).seq + 1;
        e.credited := (after.tip).credited;
        e.lots_end := least(tip.lots_end, (select min(metered._turn_at(x)) from unnest(after.lots) x
            where x.pending + x.rest + x.kept + x.held > 0 and metered._turn_at(x) > e.at));
        perform metered._write_due(tip, e, after.entries, after.moves, due.lots, after.lots,
            due.parts, after.parts, due.debts, after.debts, after.spent);
    end if;
    return e;
end
$$;

-- Why there is no such lot: none was granted. Where the snapshot may be older than one that was, this fails with 40001. entry is as
-- _next_entry has it.
create function metered._missing_lot(e metered.ledger) returns text
language plpgsql volatile
as $$
begin
    {unseen: entry = e};
    return 'unknown';
end
$$;

-- Rolls units of a lot over into another one: once. status is rolled, same
-- (it rolled over before, at its end or so, and no and units are that lot), empty (no units are left), unknown, or crossing: it ends
-- other lots, and would cross thresholds of limits, which the caller does not report (_cross_lowered). Units beyond cap stay in the lot.
create function metered.roll_over(of_scope metered.scope_name, key bigint, rollover metered.lot_rollover,
    limits metered.charge_limit[], wait_ms int, origin metered.origin,
    out status text, out no bigint, out units bigint, out seq bigint, out at timestamptz, out expires_at timestamptz, out crossed jsonb)
language plpgsql volatile
as $$
declare
    entry metered.ledger;
    lot   metered.lots;
    made  record;
    named record;
begin
    perform metered._require(coalesce(metered._key_fits(key, of_scope), true) and (rollover.of_lot is null) <> (rollover.of_reference is null)
        and rollover.cap between 1 and 9007199254740992 and metered._goes_on(rollover.lasts), 'roll_over');
    entry := metered._next_entry(of_scope, key, wait_ms, origin);
    named := metered._name_lot(entry, rollover.of_lot, rollover.of_reference, null, limits, wait_ms);
    {named lot};
    lot := named.lot;
    select 'same', y.no, y.amount, y.granted_seq, y.granted_at, nullif(y.expires_at, 'infinity')
    into status, no, units, seq, at, expires_at
    from metered.lots y where y.from_lot = lot.no and y.origin = 'r';
    if found then
        return;
    end if;
    units := least(rollover.cap, lot.rest + lot.kept);
    if units = 0 then
        status := metered._missing_lot(entry);
        status := 'empty';
        return;
    end if;
    perform metered._refuse_closed(entry);
    entry.seq := entry.seq - 1;
    expires_at := case when rollover.lasts > interval '0' then entry.at + rollover.lasts end;
    lot.roll_cap := null;
    lot.again := false;
    made := metered._add_lot(metered._take_units(entry, lot, units, 'o'), row(units,
        coalesce(expires_at, 'infinity'), null, lot.category, lot.priority, null, null, null,
        (lot.plan).roll_for, lot.late)::metered.new_lot, metered._plan_on(lot), 'r', lot.no);
    status := 'rolled';
    no := made.no;
    seq := (made.entry).seq;
    crossed := coalesce(crossed, metered._crossed_at(named.crossings, array[seq]));
    at := (made.entry).at;
end
$$;

-- A lot with lapsed units, as subscribers get it.
create function metered._untold_json(l metered.lots) returns json
language sql stable
as $$
    select json_build_object('wallet', l.scope, 'lot', l.no, 'reference', coalesce(l.reference, (l.plan).of_reference), 'category', l.category, 'granted', l.amount,
        'granted_at', l.granted_at, 'expires_at', nullif(l.expires_at, 'infinity'), 'amount', l.untold, 'seq', l.last_seq)
$$;

-- Whether a lot is the first one of a plan, which renews or has lots that a purge leaves.
create function metered._names_kept(of_scope text, of_reference text, of_plan metered.lot_plan,
    keep bigint) returns boolean
language plpgsql stable
as $$
begin
    return (of_plan.renewal = of_reference) is true and 0 < (select count(*) from metered.lots y
        where y.scope = of_scope and (y.plan).renewal = of_reference
          and (y.pending > 0 or y.last_seq >= keep));
end
$$;

-- Whether a purge leaves one of some lots.
create function metered._purge_leaves(nos bigint[], keep bigint) returns boolean
language plpgsql stable
as $$
begin
    return exists (select from metered.lots y
        where y.no = any (nos)
          and (y.last_seq >= keep or y.open or y.keeps or y.held > 0 or y.untold > 0 or y.pending > 0
               or metered._names_kept(y.scope, y.reference, y.plan, keep)));
end
$$;

-- Deletes those of some lots, each the first one of its family, to which nothing was done since
-- keep, and nothing can be: they are in no balance. A lot and all that its units went on in go
-- together: a name finds them by the first one, and revocations, and what brings revoked units
-- back, count those of all. The first lot of a plan stays while the plan renews, or its last lots
-- stay: its reference names the plan, and is not granted again.
create function metered._purge_families(firsts bigint[], keep bigint) returns void
language plpgsql volatile
as $$
begin
    delete from metered.lot_rows r where r.no = any (array(
        select unnest(l.nos) from (select metered._family(f.no) as nos from unnest(firsts) f(no)) l
        where not metered._purge_leaves(l.nos, keep)));
end
$$;

-- Deletes the families of a wallet's lots that a purge of all entries before keep leaves none of.
create function metered._purge_all_lots(of_scope text, keep bigint) returns void
language plpgsql volatile
as $$
begin
    perform metered._purge_families(array(
        select f.no from metered.lots f
        where f.scope = of_scope and f.last_seq < keep and not f.open
          and not exists (select from metered.lot_rows y where y.no = f.from_lot)), keep);
end
$$;

-- Deletes the moves of a wallet's entries from one on and before keep, which a purge deletes, and
-- the families of lots whose last move is one of them. It looks at no others: a wallet may have
-- many, of which a step of a purge ends few. A lot that stays keeps the units that its newest move
-- had.
create function metered._purge_lots(of_scope text, from_seq bigint, keep bigint) returns void
language plpgsql volatile
as $$
declare
    stays  metered.lots;
    lots   bigint[];    -- whose first lots are looked for
    above  bigint[];
    firsts bigint[] := '{}';
begin
    lots := array(select f.no from metered.lots f
        where f.no = any (array(select m.lot from metered.lot_moves m
                where m.scope = of_scope and m.seq >= from_seq and m.seq < keep))
          and f.last_seq < keep and not f.open
          and not exists (select from metered.lots y
                where y.from_lot = f.no and y.last_seq >= from_seq));
    while lots <> '{}' loop
        above := array(select distinct z.no from metered.lot_rows y, metered.lot_rows z
            where y.no = any (lots) and z.no = y.from_lot);
        firsts := firsts || array(select y.no from metered.lot_rows y
            where y.no = any (lots)
              and not exists (select from metered.lot_rows z where z.no = y.from_lot));
        lots := above;
    end loop;
    perform metered._purge_families(array(select distinct x from unnest(firsts) x), keep);
    for stays in
        select y.* from metered.lots y where y.version is not null and y.last_seq < keep
        and y.no = any (array(select m.lot from metered.lot_moves m where m.scope = of_scope and m.seq >= from_seq and m.seq < keep))
    loop
        update metered.lot_rows r set last_seq = stays.last_seq, rest = stays.rest, drawn = stays.drawn, held = stays.held, kept = stays.kept where r.no = stays.no;
    end loop;
    delete from metered.lot_moves m where m.scope = of_scope and m.seq >= from_seq and m.seq < keep;
end
$$;
