-- Purges of entries, and what the feed (feed.sql) needs of them.

-- Deletes entries of one scope that no window ending at or after cutoff needs, at most max_rows of
-- them, beginning after entry after_seq. Entry 1 stays, so that a writer that sees the scope as
-- empty collides with it. It is a new row, so that a writer that sees it as the last entry
-- collides, too (_entry_for_write). The entries after it begin at a multiple of 16, plus one, which
-- the time index holds. upto is the last seq deleted or passed over, for the next call to begin
-- after: scanning from the front again would wade through the rows deleted before.
--
-- With forgetting, nothing stays of a scope whose last entry is that old, if it has no credit (or
-- is a child that was closed, and whose lease was purged: until then it stays closed), no debt of a
-- wallet, no open hold and no claim that stands, which do not age. A writer whose snapshot shows
-- the scope as empty is right again, and one whose snapshot shows an entry finds it deleted. One
-- without the lock may have read the last entry and be about to append: the deletion waits for it,
-- and then this function appends and deletes an entry itself, which collides with that writer's.
create function metered.purge_scope(of_scope text, key bigint, cutoff timestamptz, after_seq bigint,
    max_rows int, wait_ms int, forgetting boolean,
    out deleted bigint, out upto bigint, out done boolean, out forgotten boolean)
language plpgsql volatile
as $$
declare
    tip   metered.ledger;
    first metered.ledger;
    keep  bigint;   -- the first entry to stay
    needed bigint;  -- the first entry that the feed needs, or null
    rest  bigint;
begin
    perform metered._require(metered._key_fits(key, of_scope), 'key');
    perform metered._require(after_seq >= 0
        and max_rows between 16 and 100000
        and wait_ms > 0
        and cutoff is not null
        and forgetting is not null, 'purge_scope');
    -- A purge takes a prefix of the chain: entries before after_seq are gone, or the scope was
    -- forgotten meanwhile, and has begun anew.
    if exists (select from metered.ledger l
            where l.scope = of_scope
                and l.seq in (2, after_seq)
                and l.seq <= after_seq
                and l.seq > 1) then
        after_seq := 0;
    end if;
    cutoff := least(cutoff, metered.clock());
    perform metered._lock_keys(array[key], wait_ms);
    tip := metered._last_entry(of_scope);
    if tip.tallied then
        -- An old snapshot would not see a tally that is about to be committed.
        forgetting := forgetting
            and not metered._one_snapshot()
            and metered._try_lock(metered._tally_key(of_scope));
        tip := metered._entry_for_write(of_scope);
    end if;
    forgotten := false;
    keep := coalesce((metered._base(of_scope, tip.seq, tip.epoch, cutoff)).seq, 0);
    -- Entries that go without a number get none meanwhile.
    perform from metered.feed_state s
    where s.one and s.since is not null and tip.at <= cutoff - interval '7 days' and tip.seq > (
        select coalesce(max(y.seq), 0) from metered.feed_scopes y where y.scope = of_scope)
    for update of s;
    needed := metered._feed_needs(tip, cutoff);
    keep := greatest(1, ((least(keep, needed) - 1) & ~15) + 1);
    upto := greatest(after_seq, 1);
    done := keep - 1 <= upto + max_rows;
    if not done then
        keep := ((upto + max_rows) & ~15) + 1;
    end if;
    delete from metered.ledger l where l.scope = of_scope and l.seq > upto and l.seq < keep;
    get diagnostics deleted = row_count;
    if deleted > 0 then
        perform metered._purge_feed(of_scope, keep);
        delete from metered.ledger l
        where l.scope = of_scope and l.seq = 1 returning l.* into first;
        insert into metered.ledger values (first.*) on conflict do nothing;
        {or collide};
        perform metered._mark_freed(of_scope);
    end if;
    for lv in 0..15 loop
        exit when keep >> (4 * lv) = 0;
        delete from metered.refund_sum r
        where r.scope = of_scope and r.level = lv
          and r.block >= upto >> (4 * lv) and r.block < keep >> (4 * lv);
    end loop;
    if tip.lots_end is not null and keep > 1 then
        perform metered._purge_lots(of_scope, upto, keep);
        if done then
            perform metered._purge_all_lots(of_scope, keep);
        end if;
        perform metered._purge_changes(of_scope, keep);
    end if;
    upto := greatest(upto, keep - 1);
    if forgetting
        and done
        and needed is null
        and tip.seq > 0
        and tip.at <= cutoff
        and tip.held = 0
        and (tip.credited = 0 or tip.next_due = '-infinity')
        and (tip.lots_end is null or metered._debt(tip) = 0) and not exists (
        select from metered.leases y where y.child = of_scope and y.mode <> 'r'
        and (y.settled_at is null or tip.next_due = '-infinity')) and not exists (
        select from metered.lot_rows l
        where l.scope = of_scope and (l.untold > 0 or l.pending > 0 or l.keeps)) and not exists (
        select from metered.holds h
        where h.claim = of_scope and (h.state = 'h' or h.state = 'c' and not h.returned)) then
        delete from metered.ledger l where l.scope = of_scope and l.seq <= tip.seq;
        get diagnostics rest = row_count;
        deleted := deleted + rest;
        delete from metered.refund_sum r where r.scope = of_scope;
        delete from metered.lot_moves m where m.scope = of_scope;
        delete from metered.lot_rows l where l.scope = of_scope;
        delete from metered.plan_changes c where c.scope = of_scope;
        perform metered._purge_feed(of_scope, tip.seq + 1);
        delete from metered.feed_scopes y where y.scope = of_scope;
        tip.seq := tip.seq + 1;
        perform metered._append(tip);
        delete from metered.ledger l where l.scope = of_scope and l.seq = tip.seq;
        forgotten := true;
    end if;
end
$$;

-- The first entry of a scope, whose last one is tip, that a purge up to cutoff has to keep for the
-- feed: one that has no number, or that a consumer has not consumed, unless it is older than cutoff
-- by the consumer's patience. Null: none. What has no number waits for 7 days.
create function metered._feed_needs(tip metered.ledger, cutoff timestamptz) returns bigint
language plpgsql stable
as $$
declare
    reader record;
    done   bigint;      -- the last numbered entry
    unread bigint;
    needed bigint;
begin
    if not exists (select from metered.feed_state s where s.one and s.since is not null) then
        return null;
    end if;
    select coalesce(max(y.seq), 0) into done
    from metered.feed_scopes y where y.scope = tip.scope;
    for reader in
        select c.no, c.patience from metered.feed_consumers c
        union all
        select null, interval '7 days'
    loop
        unread := done + 1;
        if reader.no is not null then
            select least(unread, f.seq + 1 - least(f.entries, f.no - reader.no)) into unread
            from (values (1)) one left join lateral (
                select x.seq, x.entries, x.no from metered.feed x
                where x.scope = tip.scope and x.no > reader.no order by x.no limit 1) f on true;
        end if;
        continue when unread > tip.seq or tip.at <= cutoff - reader.patience;
        needed := least(needed, greatest(unread,
            coalesce((metered._base(tip.scope, tip.seq, tip.epoch,
                cutoff - reader.patience)).seq, 0)));
    end loop;
    return needed;
end
$$;

-- The first entry of a scope that a purge of entries up to cutoff would keep for the feed, or null.
create function metered.feed_keeps(of_scope text, cutoff timestamptz) returns bigint
language plpgsql stable
as $$
begin
    perform metered._require(cutoff is not null, 'feed_keeps');
    return metered._feed_needs(metered._last_entry(of_scope), cutoff);
end
$$;

-- Notes that the entries of a scope before keep are deleted: the feed is whole from behind them on.
create function metered._purge_feed(of_scope text, keep bigint) returns void
language plpgsql volatile
as $$
declare
    gone bigint;    -- the number of the entry before keep
begin
    select case when f.seq - f.entries < keep - 1 then f.no - f.seq + keep - 1 end into gone
    from metered.feed f where f.scope = of_scope and f.seq >= keep - 1 order by f.no limit 1;
    if gone is null then
        select max(f.no) into gone from metered.feed f where f.scope = of_scope and f.seq < keep;
    end if;
    if gone is not null then
        insert into metered.feed_purged (no)
        select gone where gone > coalesce((select max(p.no) from metered.feed_purged p), 0)
        on conflict do nothing;
        delete from metered.feed f where f.scope = of_scope and f.seq < keep;
    end if;
end
$$;
