-- Keeps a transaction from being committed by anyone but its command's last flush. A
-- cursor WITH HOLD is run to its end by COMMIT, and this is its query.
create function metered.block_commit() returns void
language plpgsql
as $$
begin
    raise exception 'the command of this transaction is not complete' using errcode = 'MT004';
end
$$;

-- Begins a command, in two steps that usually come as one.
--
-- Claiming waits for the transaction that holds the operation id. status is new, replay (the
-- columns up to at are its record), retired (its time is at or before the
-- horizon) or future (its time is further ahead than max_future). The transaction of
-- a new one is marked, guarded against COMMIT (unless its marker begins with a minus, since nobody
-- gets at it before it is complete), and bounded by timeout_ms (0 leaves
-- the session's timeouts, and null all settings of a caller's session). The claim
-- is an advisory lock, which writes nothing, and comes before the command's locks of
-- scopes. The record's primary key makes it exact.
--
-- Opening spends the token, if there is one, and then looks at the charges without a
-- lock, so that a hopeless command is refused before its function runs. The columns from
-- token_status to consumed_at are consume_token's.
create function metered.begin_command(claiming boolean, opening boolean,
    command metered.new_command, token metered.presented_token,
    charges metered.new_charge[], ahead interval, wait_ms int,
    out status text, out fingerprint bytea, out result bytea,
    out scopes text[], out amounts bigint[], out seqs bigint[], out ats timestamptz[],
    out holds text[], out at timestamptz,
    out refusal json, out refused jsonb,
    out token_status text, out payload json, out uses_left int,
    out minted_at timestamptz, out expires_at timestamptz, out consumed_at timestamptz)
language plpgsql volatile
as $$
declare
    horizon timestamptz;
    unused  text;   -- set_config in an assignment is cheaper than in perform, by far
    answer  record; -- and so is a function than as a table
begin
    if claiming then
        if coalesce(current_setting('metered_tx.command', true), '') <> '' then
            raise exception 'a command is already begun in this transaction'
                using errcode = 'MT006';
        end if;
        if not metered._try_lock(command.key) then
            perform metered._lock_keys(array[command.key], wait_ms);
        end if;
        -- Both of one snapshot: a purge moves the horizon in the transaction that deletes.
        select (select h.at from metered.operations_horizon h where h.one),
            o.fingerprint, o.result, o.scopes, o.amounts, o.seqs, o.ats, o.holds, o.at, o.refusal
        into horizon, fingerprint, result, scopes, amounts, seqs, ats, holds, at, refusal
        from (values (1)) one left join lateral (
            select *
            from metered.operations y
            where y.tenant = command.tenant and y.id = command.id limit 1) o on true;
        if at is not null then
            status := 'replay';
            return;
        end if;
        if metered._one_snapshot() then
            -- The snapshot may be older than a record whose writer let go of the id
            -- just now, or than a purge. A write meets the first and a lock the
            -- second, with 40001. The block takes both back.
            begin
                perform set_config('lock_timeout', wait_ms::text, true);
                insert into metered.operations (tenant, id, at, fingerprint, result)
                values (command.tenant, command.id, 'infinity', '', '') on conflict do nothing;
                perform from metered.operations_horizon h where h.one for share;
                {take back};
            end;
        end if;
        if command.issued_at <= horizon then
            status := 'retired';
            return;
        elsif command.issued_at > metered.clock() + command.max_future then
            status := 'future';
            return;
        end if;
        if command.timeout_ms > 0 then
            unused := {shorter timeouts: ms = command.timeout_ms};
        end if;
        -- COMMIT is sent before the charges are made: if the client is gone by the time a scope
        -- is free, let that be noticed. Postgres on Linux can. Elsewhere it is tried.
        unused := set_config('metered_tx.command', command.marker, true)
            || case when command.timeout_ms is null then '' when strpos(version(), '-linux') > 0
                then set_config('client_connection_check_interval', '100', true) end;
        if unused is null then
            begin
                unused := set_config('client_connection_check_interval', '100', true);
            exception when invalid_parameter_value then
                null;
            end;
        end if;
        if left(command.marker, 1) is distinct from '-' then
            execute 'declare metered_command cursor with hold for select metered.block_commit()';
        end if;
    end if;
    status := 'new';
    if not opening then
        return;
    end if;
    if token.digest is not null then
        answer := metered.consume_token(token.digest, token.purpose, token.subject, wait_ms);
        token_status := answer.status;
        payload := answer.payload;
        uses_left := answer.uses_left;
        minted_at := answer.minted_at;
        expires_at := answer.expires_at;
        consumed_at := answer.consumed_at;
        if token_status <> 'ok' then
            return;
        end if;
    end if;
    if cardinality(charges) > 0 then
        answer := metered._write_charges(charges, ahead, wait_ms, null, 'look', null, false);
        refused := answer.refused;
    end if;
end
$$;

-- Ends a command: charges, records the operation, and lets COMMIT pass. A refusal
-- raises, because COMMIT follows in the same flush. Without finishing, finish_command lets
-- COMMIT pass later. With of_refusal it records that the command was refused and rolled
-- back, with an empty result.
create function metered.complete_command(command metered.new_command,
    of_fingerprint metered.fingerprint, of_result bytea, of_refusal json,
    charges metered.new_charge[], ahead interval, wait_ms int, finishing boolean,
    out seqs bigint[], out ats timestamptz[], out used bigint[], out held bigint[],
    out at timestamptz, out periods timestamptz[], out crossed jsonb)
language plpgsql volatile
as $$
declare
    posted       record;
    charge       metered.new_charge;
    scopes       text[];
    amounts      bigint[];
    command_cursor refcursor := 'metered_command';  -- CLOSE by a variable is not parsed anew
    unused       text;
begin
    if coalesce(current_setting('metered_tx.command', true), '') is distinct from command.marker
        or of_refusal is not null and (cardinality(charges) > 0 or octet_length(of_result) > 0) then
        raise exception 'the command was not begun in this transaction' using errcode = 'MT005';
    end if;
    if cardinality(charges) > 0 then
        if command.leased and cardinality(charges) = 1 then     -- charge_leased, without its arrays
            charge := charges[1];
            if pg_column_size(charge.note) > 8192
                or pg_column_compression(charge.note) is not null then
                perform metered._no_amount();
            end if;
            at := metered._spend_range(charge.lease, charge.key, charge.lease_offset, charge.amount,
                charge.scope, row(command.tenant, command.id, charge.note));
            if at is null then
                raise exception 'a lease is closed'
                    using errcode = 'MT009',
                    detail = jsonb_build_array(jsonb_build_object('lease', charge.lease));
            end if;
            posted := row(array[0]::bigint[], array[at], null::bigint[], array[0]::bigint[],
                null::jsonb, at, null::timestamptz[], null::jsonb)::metered.charged;
        elsif command.leased then
            posted := metered.charge_leased(charges, ahead, wait_ms,
                row(command.tenant, command.id, null), 'raise', command.standing);
        else
            posted := metered._write_charges(charges, ahead, wait_ms,
                row(command.tenant, command.id, null), 'raise', null, command.standing);
        end if;
        seqs := posted.seqs;
        ats := posted.ats;
        used := posted.used;
        held := posted.held;
        periods := posted.periods;
        crossed := posted.crossed;
        scopes := array[charges[1].scope];      -- a query in the INSERT would be
                                                -- prepared for one charge, too
        amounts := array[charges[1].amount];
        if cardinality(charges) > 1 then
            scopes := array(select x.scope from unnest(charges) x);
            amounts := array(select x.amount from unnest(charges) x);
        end if;
    end if;
    insert into metered.operations (tenant, id, fingerprint, issued_at, at, result, scopes, amounts,
        seqs, ats, holds, refusal, name, jobs)
    values (command.tenant, command.id, of_fingerprint, command.issued_at, metered.clock(),
        of_result, scopes, amounts, complete_command.seqs, complete_command.ats,
        string_to_array(nullif(current_setting('metered_tx.holds', true), ''), chr(30)), of_refusal,
        command.name, command.jobs)
    on conflict do nothing
    returning operations.at into at;
    if not found then
        raise exception 'could not serialize access: the operation was recorded meanwhile'
            using errcode = '40001';
    end if;
    if finishing then
        unused := set_config('metered_tx.command', '', true)
            || set_config('metered_tx.holds', '', true);
        if left(command.marker, 1) <> '-' then
            close command_cursor;
        end if;
    end if;
end
$$;

-- Lets COMMIT pass for a command that was completed without finishing, if this is still
-- its transaction.
create function metered.finish_command(marker text) returns void
language plpgsql volatile
as $$
begin
    if coalesce(current_setting('metered_tx.command', true),
            '') is distinct from coalesce(marker, '') then
        raise exception 'the command was not begun in this transaction' using errcode = 'MT005';
    end if;
    perform set_config('metered_tx.command', '', true);
    perform set_config('metered_tx.holds', '', true);
    execute 'close metered_command';
end
$$;

-- Deletes records of operations completed and issued before cutoff, at most max_rows, oldest first,
-- and moves the horizon to the latest time that their ids carry, in the same transaction. A horizon
-- beyond these would refuse new ids, after a clock was ahead, for as long. after is the last of the
-- batch before, as in purge_tokens. It waits for another purge's move, as long as wait_ms. It also
-- deletes at most max_rows newest events of keys that took effect before cutoff, which deleted does
-- not count.
create function metered.purge_operations(after timestamptz, cutoff timestamptz, max_rows int,
    wait_ms int,
    out deleted bigint, out last timestamptz)
language plpgsql volatile
as $$
declare
    latest timestamptz;
    before text := metered._bound_lock_wait(wait_ms);
begin
    perform metered._require(max_rows between 1 and 10000, 'max_rows');
    cutoff := least(cutoff, metered.clock());
    with gone as (
        -- By row address, so that there is no join to plan: these rows are never
        -- updated, and locked here.
        delete from metered.operations o
        where o.ctid = any (array(
            select p.ctid from metered.operations p
            where p.at >= coalesce(after, '-infinity')
                and p.at < cutoff
                and coalesce(p.issued_at, p.at) < cutoff
            order by p.at limit max_rows for update skip locked))
        returning o.at, o.issued_at)
    select count(*), max(g.at), max(g.issued_at) into deleted, last, latest from gone g;
    if latest is not null then
        update metered.operations_horizon h set at = latest where h.one and h.at < latest;
    end if;
    delete from metered.newest n
    where n.ctid = any (array(
        select p.ctid
        from metered.newest p
        where p.taken_at < cutoff order by p.taken_at limit max_rows
        for update skip locked));
    before := metered._unbound_lock_wait(before);
end
$$;
