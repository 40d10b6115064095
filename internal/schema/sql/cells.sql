-- Cells: several schemas, each with the rows of its tenants (package cells). A transaction enters
-- its tenant first, which shares the tenant's lock, and a move takes that lock alone. So it comes
-- before the transaction or after it, never beside it.
--
-- The first entry of a scope is refused in a cell that the scope's tenant has left. Since a move
-- takes the scopes' entries along, no charge gets into the old cell, whether or not its transaction
-- has entered.

-- The number of the cell that this schema is: see package cells. Other schemas have no row.
create table metered.cell (
    no    int not null,                 -- from 0 on
    cells int not null,                 -- how many there are, for good
    one   boolean primary key default true check (one) -- there is one row
);

-- Where tenants live that have moved, as far as this cell knows: a tenant's first cell, the one
-- that it has left, and its new one. A row is only replaced by one with more moves.
create table metered.tenants (
    moves  bigint  not null,            -- how often it had moved by then
    cell   int     not null,            -- where it lives since
    packed boolean not null default false, -- its rows are in packed_rows, until
                                           -- they are known to have arrived
    tenant text collate "C" primary key -- the tenant
);

-- Rows of tenants on their way to another cell.
create table metered.packed_rows (
    tenant   text collate "C" not null, -- whose they are
    nth      int    not null,           -- of the table, in the order of arrival
    row_no   bigint not null,           -- 1, 2, 3 and so on of the table
    of_table text   not null,           -- its name
    body     text   not null,           -- the row, as the table's type has it as text
    primary key (tenant, nth, row_no)
);

-- The key of a tenant's lock.
create function metered._tenant_key(of_tenant text) returns bigint
language sql stable
as $$
    select metered._lock_key('metered/tenant/metered', convert_to(of_tenant, 'UTF8'))
$$;

-- Refuses a snapshot that may be older than a row of a tenant, whose lock is held, with 40001.
create function metered._refuse_old_tenant(of_tenant text) returns void
language plpgsql volatile
as $$
begin
    perform from metered.tenants t where t.tenant = of_tenant for share;
    if not found then
        begin   -- the insert meets a row that the snapshot
                -- does not see, and the block takes it back
            insert into metered.tenants (tenant, moves, cell)
            values (of_tenant, 0, 0)
            on conflict do nothing;
            {take back};
        end;
    end if;
end
$$;

create function metered._raise_moved(of_tenant text, in_cell int, after_moves bigint) returns void
language plpgsql
as $$
begin
    raise exception 'the tenant lives in another cell' using errcode = 'MT014',
        detail = jsonb_build_object('tenant', of_tenant, 'cell', in_cell, 'moves', after_moves);
end
$$;

-- Begins the work of a transaction for a tenant, in a cell of so many: SQLSTATE MT014 if the tenant
-- lives in another one. home: it lives here unless it has moved. The answer holds until the
-- transaction ends.
create function metered.enter_tenant(of_tenant text, key bigint, in_cell int, of_cells int,
    home boolean, wait_ms int) returns void
language plpgsql volatile
as $$
declare
    before   text;
    cell_now record;
begin
    {refuse: when = int8send(key) is distinct from substr(sha256('metered/tenant/metered'::bytea
                || decode('00', 'hex') || convert_to(of_tenant, 'UTF8')), 1, 8), what = key};
    if not metered._try_lock_shared(key) then
        before := metered._bound_lock_wait(wait_ms);
        -- on the node that has the tables
        perform pg_advisory_xact_lock_shared(key) from metered.operations_horizon h where h.one;
        before := metered._unbound_lock_wait(before);
    end if;
    if metered._one_snapshot() then
        perform metered._refuse_old_tenant(of_tenant);
    end if;
    select y.no, y.cells, t.cell, t.moves into cell_now
    from metered.cell y left join metered.tenants t on t.tenant = of_tenant where y.one;
    if (cell_now.no = in_cell and cell_now.cells = of_cells) is not true then
        raise exception 'the schema is cell % of %, and not % of %', cell_now.no, cell_now.cells,
            in_cell, of_cells using errcode = 'MT015';
    elsif coalesce(cell_now.cell = in_cell, home) is not true then
        perform metered._raise_moved(of_tenant, cell_now.cell, cell_now.moves);
    end if;
end
$$;

-- Refuses the first entry of a scope whose tenant has left this cell, and an answer that such a
-- tenant has no hold of an id. A tenant's name has up to four parts.
create function metered._refuse_moved(of_scope text) returns void
language plpgsql volatile
as $$
declare
    parts text[] := (string_to_array(of_scope, '/'))[1:4];
    name  text;
    moved metered.tenants;
begin
    for i in 1..cardinality(parts) loop
        name := array_to_string(parts[1:i], '/');
        if not metered._try_lock_shared(metered._tenant_key(name)) then
            perform metered._collided();     -- it moves. To wait with the
                                             -- scope's lock could be a deadlock
        end if;
        if metered._one_snapshot() then
            perform metered._refuse_old_tenant(name);
        end if;
        select * into moved from metered.tenants y where y.tenant = name;
        if moved.cell <> (select c.no from metered.cell c where c.one) then
            perform metered._raise_moved(name, moved.cell, moved.moves);
        end if;
    end loop;
end
$$;
