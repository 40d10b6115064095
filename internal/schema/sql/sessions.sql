-- Opens a session of an operation: places its hold, unless the operation is on record, or another session of it is open.
-- The id of a session's hold is that of its operation, as a digest in 41 characters, and some of its own. status as place has it, or open (this
-- very session was opened before, and its hold is stored), replay (the operation is on record), retired and future, as begin_command has them,
-- running (another session is open, until deadline, as seen at placed_at) or busy (a session of another command is open).
--
-- The operation's lock comes first, as in a command. The transaction must see commits that came while it waited for that lock.
create function metered.open_session(command metered.new_command, hold metered.new_hold, charges metered.new_charge[], ahead interval,
    wait_ms int, origin metered.origin, channel text,
    out status text, out placed_at timestamptz, out deadline timestamptz,
    out seqs bigint[], out ats timestamptz[], out refused jsonb, out stored json, out crossed jsonb)
language plpgsql volatile
as $$
declare
    ids     text := left(hold.id, 41);
    clk     timestamptz;
    horizon timestamptz;
    done    timestamptz;
    was     record;
    placed  record;
begin
    {refuse: when = (not hold.chosen and hold.claim is null and octet_length(hold.id) > 41
        and not metered._one_snapshot()) is not true,
        what = session};
    if not metered._try_lock(command.key) then
        perform metered._lock_keys(array[command.key], wait_ms);
    end if;
    select (select z.at from metered.operations_horizon z where z.one),
        (select o.at from metered.operations o where o.tenant = command.tenant and o.id = command.id)
    into horizon, done;
    clk := metered.clock();
    status := case when done is not null then 'replay'
        when command.issued_at <= horizon then 'retired'
        when command.issued_at > clk + command.max_future then 'future' end;
    if status is not null then
        return;
    end if;
    select h.no, h.id, h.due, h.fingerprint into was
    from metered.holds h
    where h.tenant = hold.tenant and h.id >= ids and h.id < ids || '~' and (h.id = hold.id or h.state = 'h' and h.due > clk)
    order by h.id = hold.id desc limit 1;
    if was.id = hold.id then
        status := 'open';
        stored := metered.hold_json(was.no, clk);
    elsif was.no is not null then
        status := case when was.fingerprint = hold.fingerprint then 'running' else 'busy' end;
        placed_at := clk;
        deadline := was.due;
    end if;
    if status is not null then
        return;
    end if;
    placed := metered.place(hold, charges, ahead, wait_ms, origin, channel, false);
    status := placed.status;
    placed_at := placed.placed_at;
    deadline := placed.deadline;
    seqs := placed.seqs;
    ats := placed.ats;
    refused := placed.refused;
    stored := placed.stored;
    crossed := placed.crossed;
end
$$;
