-- Numbers of holds, leases and lots, from sequences. Logical replication carries rows and no
-- sequence, so on a server that was switched to the sequences are behind their tables. A call goes
-- on there: it draws no number that a row has, or has set aside for another row, and moves the
-- sequence on. Until then a number may be drawn again whose row was purged, so Validate compares
-- each sequence with its table, and Migrate moves it on.

-- Numbers that are set aside for rollovers.
create index lots_roll_no on metered.lot_rows (roll_no) where roll_no is not null;

-- The sequence of a table's numbers.
create function metered._numbers(of_table text) returns regclass
language plpgsql stable
as $$
begin
    return case of_table
        when 'holds' then pg_get_serial_sequence('metered.holds', 'no')
        when 'leases' then pg_get_serial_sequence('metered.leases', 'no')
        when 'lot_rows' then pg_get_serial_sequence('metered.lot_rows', 'no') end::regclass;
end
$$;

-- Whether a row has the number, or has set it aside.
create function metered._has_number(of_table text, number bigint) returns boolean
language plpgsql stable
as $$
begin
    return case of_table
        when 'holds' then exists (select from metered.holds h where h.no = number)
        when 'leases' then exists (select from metered.leases l where l.no = number)
        when 'lot_rows' then exists (select from metered.lot_rows r where r.no = number)
            or exists (select from metered.lot_rows r where r.roll_no = number) end;
end
$$;

-- The number after which the sequence must go on: the largest in use. Those of other cells, and of
-- other nodes of Citus, do not count: each has 2^40 numbers of its own.
create function metered._largest_number(of_table text) returns bigint
language plpgsql stable
as $$
declare
    low bigint := (select q.seqmin - 1 + coalesce((select c.no
                from metered.cell c where c.one), 0) * 1099511627776
        from pg_sequence q where q.seqrelid = metered._numbers(of_table));
    top bigint := low + 1099511627776;
begin
    return greatest(low, case of_table
        when 'holds' then (select max(h.no) from metered.holds h where h.no between low and top)
        when 'leases' then (select max(l.no) from metered.leases l where l.no between low and top)
        when 'lot_rows' then greatest((select max(r.no)
                from metered.lot_rows r where r.no between low and top),
            (select max(r.roll_no)
                from metered.lot_rows r where r.roll_no between low and top)) end);
end
$$;

-- Moves a sequence on, if it is behind its table. One caller does, and leaves out numbers that
-- others may have drawn since it looked.
create function metered._raise_sequence(of_table text) returns void
language plpgsql volatile
as $$
declare
    largest bigint;
begin
    perform pg_advisory_xact_lock(metered._lock_key('metered/numbers/metered',
            convert_to(of_table, 'UTF8')));
    largest := metered._largest_number(of_table);
    if coalesce(pg_sequence_last_value(metered._numbers(of_table)), 0) < largest then
        perform setval(metered._numbers(of_table), largest + 1000);
    end if;
end
$$;

-- The next number of a table that is free.
create function metered._next_number(of_table text) returns bigint
language plpgsql volatile
as $$
declare
    number bigint;
begin
    loop
        number := nextval(metered._numbers(of_table));
        if not metered._has_number(of_table, number) then
            return number;
        end if;
        perform metered._raise_sequence(of_table);
    end loop;
end
$$;

-- The sequences that are behind their tables, with the last number that each gave. Stable: a row
-- that it sees was numbered before it looks at the sequence.
create function metered.numbers_behind(out of_table text, out last bigint, out largest bigint)
    returns setof record
language plpgsql stable
as $$
begin
    for of_table in values ('holds'), ('leases'), ('lot_rows') loop
        largest := metered._largest_number(of_table);
        last := coalesce(pg_sequence_last_value(metered._numbers(of_table)), 0);
        if last < largest then
            return next;
        end if;
    end loop;
end
$$;

-- Moves all sequences on that are behind. A lot whose number for a rollover went to another lot
-- meanwhile gets a new one.
create function metered._mend_numbers() returns void
language plpgsql volatile
as $$
declare
    taken bigint;
begin
    perform metered._raise_sequence(b.of_table) from metered.numbers_behind() b;
    for taken in
        select r.no from metered.lot_rows r join metered.lot_rows o on o.no = r.roll_no
        where r.roll_cap is not null and o.from_lot is distinct from r.no
        order by r.no for update of r
    loop
        update metered.lot_rows r set roll_no = metered._next_number('lot_rows') where r.no = taken;
    end loop;
end
$$;
