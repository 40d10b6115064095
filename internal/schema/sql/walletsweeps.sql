-- Sweeps of wallets. As those of holds (sweeps.sql), a transaction that writes down what is due in many
-- wallets leaves out one that is behind. It is swept alone, a step a transaction.

-- Writes down what is due in a wallet until a time, and at most max_lots of its ended lots. The scope
-- is locked. ended counts lots that lapsed or rolled over, and touched are these and all lots that
-- the new entries are about. silent: it would cross thresholds of limits that the caller does not
-- report, and has done nothing.
create function metered._sweep_lots(of_scope text, until timestamptz, max_lots int,
    limits metered.charge_limit[], wait_ms int,
    out ended int, out touched bigint[], out crossed jsonb, out silent boolean)
language plpgsql volatile
as $$
declare
    tip      metered.ledger := metered._entry_for_write(of_scope);
    entry    metered.ledger := tip;
    crossing record;
    due      bigint[];
begin
    ended := 0;
    crossing := metered._cross_lowered(tip, 0, limits, greatest(until, tip.at));
    silent := crossing.silent;
    if silent then
        return;
    end if;
    -- Each in the order of its index, which keeps the planner from the index of all.
    due := array(select d.no from (
        (select y.no from metered.lot_rows y
         where y.scope = of_scope and y.open and y.expires_at <= until
         order by y.expires_at, y.age)
        union
        (select y.no from metered.lot_rows y
         where y.scope = of_scope and y.keeps and y.expires_at <= until
         order by y.expires_at, y.age)) d);
    entry := metered._settle_lowered(entry, until, max_lots, 0, crossing.crossed, wait_ms);
    ended := (select count(*) from metered.lot_rows y
        where y.no = any (due) and not y.open and not y.keeps);
    -- In the order of the moves, which keeps the planner from the index of all moves of each lot.
    touched := due || array(select m.lot from metered.lot_moves m
        where m.scope = of_scope and m.seq > tip.seq and m.seq <= entry.seq order by m.seq, m.nth);
    if entry.seq > tip.seq and {remembered: scope = of_scope} then
        crossed := metered._crossed_at(crossing.crossings, array[entry.seq]);
    end if;
end
$$;

-- Looks at up to max_lots lots that are due, or have lapsed units that are not announced, after
-- after_end and after_no, and writes down all that is due in their wallets, if these are not locked.
-- Wallets that are behind are returned, for sweep_wallet, and so are those that would cross
-- thresholds of the limits, or have a plan of a lost time zone (crossing). untold are lapsed units,
-- for told_lots: without keep_untold they need no announcement. busy counts lots of locked wallets.
-- If there may be more, go on after last_end and last_no. Lots of wallets in without are passed over.
create function metered.sweep_wallets(after_end timestamptz, after_no bigint, max_lots int,
    keep_untold boolean, limits metered.charge_limit[], wait_ms int, without text[],
    out ended int, out busy int, out untold json[], out last_end timestamptz, out last_no bigint,
    out more boolean, out crossing text[], out behind text[])
language plpgsql volatile
as $$
declare
    clk    timestamptz := metered.clock();
    due    bigint[];
    locked text[] := '{}';
    one    record;
    part   record;
    silent boolean;
begin
    perform metered._require((max_lots between 1 and 2000 and keep_untold is not null
        and cardinality(without) <= 10000) is true, 'sweep_wallets');
    ended := 0;
    behind := '{}';
    crossing := '{}';
    select array_agg(d.no order by d.ends, d.no), max(d.ends), count(*) = max_lots
    into due, last_end, more
    from ((select y.no, y.expires_at as ends from metered.lot_rows y
           where (y.open or y.untold > 0) and (y.expires_at, y.no) > (after_end, after_no)
             and y.expires_at <= clk and y.scope <> all (without)
           order by y.expires_at, y.no limit max_lots)
          union
          (select y.no, y.expires_at from metered.lot_rows y
           where y.keeps and (y.expires_at, y.no) > (after_end, after_no) and y.expires_at <= clk
             and y.scope <> all (without)
           order by y.expires_at, y.no limit max_lots)
          union all
          (select y.no, y.starts_at from metered.lot_rows y
           where y.pending > 0 and (y.starts_at, y.no) > (after_end, after_no)
             and y.starts_at <= clk and y.scope <> all (without)
           order by y.starts_at, y.no limit max_lots)
          order by 2, 1 limit max_lots) d;
    last_no := due[cardinality(due)];
    for one in
        select x.scope, metered._scope_key(x.scope) as key, x.writes
        from (select y.scope, bool_or((y.open or y.keeps) and y.expires_at <= clk
                  or y.pending > 0 and y.starts_at <= clk) as writes
              from metered.lot_rows y where y.no = any (due) group by y.scope) x order by 2
    loop
        if metered._behind(one.scope, clk) then
            behind := behind || one.scope;
        elsif metered._try_lock(one.key) then
            locked := locked || one.scope;
            continue when not one.writes;
            begin
                part := metered._sweep_lots(one.scope, clk, null, limits, wait_ms);
                silent := part.silent;
            exception when sqlstate 'MT010' then
                silent := true;     -- a plan of a zone that the server has lost stops no other wallet
            end;
            if silent then
                crossing := crossing || one.scope;
                locked := array_remove(locked, one.scope);
            else
                ended := ended + part.ended;
                due := due || part.touched;
            end if;
        end if;
    end loop;
    crossing := array(select x from unnest(crossing) x order by 1);
    busy := (select count(*) from metered.lot_rows y
        where y.no = any (due) and y.scope <> all (locked || behind || crossing));
    if keep_untold then
        untold := array(select metered._untold_json(y) from metered.lots y
            where y.no = any (due) and y.scope = any (locked) and y.untold > 0
            order by y.expires_at, y.no);
    else
        update metered.lot_rows y set untold = 0
        where y.no = any (due) and y.scope = any (locked) and y.untold > 0;
    end if;
end
$$;

-- Takes one step in a wallet: writes down what is due first in it, as many events as one step
-- writes. untold are lapsed units of the lots that they are about, and of the next max_lots others
-- after after_end and after_no. status is swept, busy (its lock is not free; without skip_busy it
-- is waited for), or crossing, as sweep_wallets has it: the last step alone crosses thresholds, as
-- the wallet is by now. more: call again, after last_end and last_no.
create function metered.sweep_wallet(of_scope metered.scope_name, after_end timestamptz,
    after_no bigint, max_lots int, keep_untold boolean, limits metered.charge_limit[], wait_ms int,
    skip_busy boolean,
    out status text, out ended int, out untold json[], out last_end timestamptz,
    out last_no bigint, out more boolean, out crossed jsonb)
language plpgsql volatile
as $$
declare
    tip  metered.ledger;
    now_tip metered.ledger;
    clk  timestamptz;
    until timestamptz;      -- of the step
    part record;
    told bigint[];
begin
    perform metered._require((max_lots between 1 and 2000 and keep_untold is not null
        and skip_busy is not null) is true, 'sweep_wallet');
    ended := 0;
    more := false;
    status := 'busy';
    if not skip_busy then
        perform metered._lock_keys(array[metered._scope_key(of_scope)], wait_ms);
    elsif not metered._try_lock(metered._scope_key(of_scope)) then
        return;
    end if;
    clk := metered.clock();
    tip := metered._last_entry(of_scope);
    until := (metered._step_until(tip, clk, metered._events_per_step())).until;
    part := metered._sweep_lots(of_scope, until, metered._events_per_step(),
        case when until = clk then limits end, wait_ms);
    if part.silent then
        status := 'crossing';
        return;
    end if;
    status := 'swept';
    ended := part.ended;
    crossed := part.crossed;
    select array_agg(x.no order by x.expires_at, x.no), max(x.expires_at), count(*) = max_lots
    into told, last_end, more
    from (select y.no, y.expires_at from metered.lot_rows y
          where y.scope = of_scope and y.untold > 0 and (y.expires_at, y.no) > (after_end, after_no)
          order by y.expires_at, y.no limit max_lots) x;
    last_no := coalesce(told[cardinality(told)], after_no);
    last_end := coalesce(last_end, after_end);
    told := told || part.touched;
    if keep_untold then
        untold := array(select metered._untold_json(y) from metered.lots y
            where y.no = any (told) and y.untold > 0 order by y.expires_at, y.no);
    else
        update metered.lot_rows y set untold = 0 where y.no = any (told) and y.untold > 0;
    end if;
    now_tip := metered._last_entry(of_scope);
    more := more or now_tip.seq > tip.seq
        and (now_tip.lots_end <= clk or now_tip.next_due <= clk) is true;
end
$$;

-- For programs of version 1. only_scope: all steps of one wallet. Otherwise sweep_wallets, and a
-- step of the first wallet that is behind. If more is due in it, the call goes on before that.
create function metered.sweep_lots(after_end timestamptz, after_no bigint, max_lots int,
    only_scope text, keep_untold boolean, limits metered.charge_limit[], wait_ms int,
    out seen int, out ended int, out busy int, out untold json[], out last_end timestamptz,
    out last_no bigint, out more boolean, out crossing text[], out crossed jsonb)
language plpgsql volatile
as $$
declare
    every boolean := only_scope is null;
    page  record;
    step  record;
    next  timestamptz;
begin
    perform metered._require(max_lots between 1 and 10000 and keep_untold is not null
        and coalesce(octet_length(only_scope) between 1 and 255, true), 'sweep_lots');
    ended := 0;
    busy := 0;
    more := false;
    last_end := after_end;
    last_no := after_no;
    if every then
        page := metered.sweep_wallets(after_end, after_no, least(max_lots, 2000), keep_untold,
            limits, wait_ms, '{}');
        ended := page.ended;
        busy := page.busy;
        untold := page.untold;
        last_end := page.last_end;
        last_no := page.last_no;
        more := page.more;
        crossing := page.crossing;
        only_scope := page.behind[1];
        after_end := '-infinity';
        after_no := 0;
    end if;
    while only_scope is not null loop
        step := metered.sweep_wallet(only_scope, after_end, after_no, 2000, keep_untold, limits,
            wait_ms, every);
        ended := ended + step.ended;
        untold := untold || step.untold;
        crossed := coalesce(crossed || step.crossed, step.crossed, crossed);
        if step.status = 'crossing' then
            crossing := crossing || only_scope;
        end if;
        exit when every or not step.more;
        after_end := step.last_end;
        after_no := step.last_no;
    end loop;
    if every and only_scope is not null then
        next := case when step.more then (metered._last_entry(only_scope)).lots_end end;
        if next <= metered.clock() then
            last_end := next - interval '1 microsecond';
            last_no := 9223372036854775807;
            more := true;
        end if;
    end if;
    seen := ended + busy;
end
$$;

-- Marks lapsed units of lots as reported to subscribers: so many units of each.
create function metered.told_lots(nos bigint[], units bigint[]) returns void
language plpgsql volatile
as $$
begin
    perform metered._require(cardinality(nos) <= 10000 and cardinality(units) = cardinality(nos), 'nos');
    update metered.lot_rows y set untold = greatest(0, least(y.untold, y.untold - t.units)) from unnest(nos, units) t(no, units) where y.no = t.no;
end
$$;
