package schema

import (
	"fmt"
	"regexp"
	"strings"
)

// A macro is text that stands in several statements: a call of a function there would cost more
// than what it runs. It is written in braces, and stands for SQL:
//
//	{entry columns}                              the columns of an entry of the ledger
//	{entry of tip: amount = 5, kind = 'c'}       the values of a new entry after tip, which copies every other column from it
//	{base: scope = s, epoch = e, since = t}      from-items: base is the last entry of a scope's epoch at or before a time. mark is on its way there
//	{bound: tip = t, since = s}                  the units that a scope spent since its anchor, or ever: an upper bound of those since a time
//	{short last: scope = s}                      the last entry of a scope, as far as a plain charge needs it, and clk, the time: under the condition
//	                                             {locked}, and none in a cell, whose moves wait for whoever has locked an entry's row
//	{locked}                                     the condition that the call has the scope's own lock, and sees all that was committed before
//	{short call}                                 the condition of a short charge or hold on what it is given: {locked}, and {plain}
//	{plain: amount = n, note = j}                the condition that an entry has a usual amount, and a usual note or none
//	{usual: tip = t, at = c}                     the condition that a scope needs none of the full function's care
//	{admits: tip = t, at = c, amount = n, …}     the condition that its one limit admits a charge (max_units since a time) by the bound, when that is known
//	{known period}                               the condition that the time is in the period that the caller knows
//	{settled: tip = t, at = c}                   the condition that nothing of a scope is due, nor ahead of the clock, and that it has no lots
//	{due: tip = t, at = c, held = n}             next_due of the entry after tip, which leaves n units held, without its own new line: see _due_after
//	{known id: tenant = t, id = i, issued = j, future = f}   whether an operation id is recorded, retired, or too far ahead
//	{new hold: at = t, …}                        inserts a hold that was placed at a time, with its number in new_no
//	{placed detail: lines = l, …}                the detail of the event of a placement, without a holder or claim where both are empty
//	{hold terms: grace = g, lifetime = l}        what it says of these
//	{fits hold: tenant = t, …}                   the condition that a hold of one line is within its bounds
//	{short charge: of = f, also = true}     appends a plain charge, if its limits and the condition also admit it (plain.sql)
//	{short variables}                            the variables that a short charge needs
//	{short answer}                               what it returns, as charge_plain
//	{short placing: command = c}                 places a hold of one line, and returns (plainholds.sql). Under the condition, a command records it
//	{short placed}                               the variables that it needs
//	{short capture: of = f, also = true, …}      captures a hold of one line in the function f, if the condition admits it, and ends by a statement. Under command, one
//	                                             records it. {short captured} are its variables
//	{short pair: lock = l, also = true}                  a short charge with a limit, beside a total that is a tally (plaintotals.sql)
//	{pair variables}, {pair answer}              its variables, and what it returns
//	{pair record: holds = h, jobs = j}           the record of a command with such charges
//	{tallied: scope = s, tip = t, at = c}        the condition that a scope has tallies, now
//	{others: tip = t}                            others of the charge that follows an entry; any other entry adds 1
//	{sum: amount = n, note = j}                  the condition that a charge without limits may be a tally
//	{write tally: into = a, scope = s, …}        writes a tally at the clock's time into a variable, if the scope has them and that time is free
//	{own time: key = k, at = t}                  the condition that no other transaction writes a tally of that time
//	{short lock}, {counted lock}                 the lock of its scope
//	{short record: tenant = t, jobs = j, …}      the record of a command, with its short charge, for an INSERT INTO
//	{refuse: when = c, what = w}                 refuses an argument under a condition
//	{or collide}                                 fails for a stale view, if the statement before it found no row
//	{take back}                                  ends a block whose write was to meet a row that the snapshot does not see
//	{unseen: entry = e}                          refuses a stale view of a scope, whose next entry that is
//	{unlocked}                                   refuses and returns, if _lock_holds has a status
//	{named lot}                                  ends a call without the lot that _name_lot looked for, or takes its entry
//	{announce: tenant = t, id = i, …}            announces a hold's transition, if there is a channel
//	{remembered: scope = s}                      whether the last entry of a scope remembers the thresholds of crossing
//	{entry sought}                               whether an entry l is one that search_entries looks for
//	{v1 limit}, {v1 limit variables}             whether a call of v1.sql goes the short way, and its limit
//	{v1 window: of = l}                          the seconds of a window, as an interval
//	{usage: scope = s, win = w, …}               what counts in a scope, and {usage variables}, {usage tip} (macros_full.go)
//	{charge sums}, {charge tip}, …               the parts of _write_charges by subject (macros_full.go)
//	{use of token}                               takes one use of a good token, up to the end of the condition (tokens.sql)
//	{granted: of = t, left = n, consumed = c}    the answer of consume_token_plain
//	{shorter timeouts: ms = n}                   sets the timeouts of a transaction, unless they are shorter
//
// A macro may stand in the arguments of another one.
var macro = regexp.MustCompile(`(?s)\{(entry columns|entry of (\w+)|base|bound|(?:short|counted) \w+|locked|known period|usual|admits|exact|settled|plain|due|known id|tallied|others|sum|own time|write tally|pair \w+|shorter timeouts|use of token|granted|refuse|or collide|take back|unseen|unlocked|named lot|announce|remembered|entry sought|v1 (?:limit variables|limit|window)|new hold|hold terms|placed detail|fits hold|usage|(?:charge|capture|usage) \w+)(?:: ([^{}]*))?\}`)

// templates are the macros that only fill in their arguments.
var templates = map[string]string{
	// "is true" keeps the planner from the index of open tokens.
	"use of token": `update metered.tokens t
        set used = t.used + 1,
            ended_at = case when t.used + 1 = t.uses then now_at end
        where t.digest = token_digest
          and (t.purpose = for_purpose and t.subject = for_subject and t.ended_at is null and t.expires_at > now_at) is true`,
	"granted": `int4send($left) || timestamptz_send($of.minted_at) || timestamptz_send($of.expires_at)
            || timestamptz_send($consumed) || coalesce(convert_to($of.payload::text, 'UTF8'), '')`,
	"bound": `$tip.spent - case when $tip.anchor_at <= $since then $tip.anchor_spent else 0 end`,
	"short last": `(select l.seq, l.at, l.spent, l.refunded, l.credited, l.held, l.epoch, l.scope, l.next_due, l.anchor_at,
                l.anchor_spent, l.lots_end, l.crossed, l.tallied, l.others, metered.clock() as clk
            from metered.ledger l where l.scope = $scope and not metered._in_cell()
            order by l.seq desc limit 1)`,
	// Then no purge takes the last entry before this call has appended to it. To lock its row would write to its
	// page, and to the log. Another writer's entry collides.
	"locked": `metered._key_fits(key, of_scope) and current_setting('transaction_isolation') = 'read committed'`,
	// In the statement it would be a node of the plan with all columns of the entry.
	"short call": `{locked} and {plain: amount = units, note = note}`,
	"plain": `$amount between 1 and 9007199254740992 and ($note is null or pg_column_size($note) <= 8192
                and pg_column_compression($note) is null and not $note ? 'use')`,
	// Up to an entry of version 1, which has the greatest number, none is counted. Strict: null stays null.
	"others": `int8smaller($tip.others, $tip.seq)`,
	// With two of 16 entries a scope with held units moves its next_due on (_due_after).
	"usual":        `($tip.held = 0 or $tip.seq & 15 > 1) and {settled: tip = $tip, at = $at} and $tip.crossed is null`,
	"settled":      `$tip.at <= $at and ($tip.next_due <= $at) is not true and $tip.lots_end is null and $tip.tallied is null`,
	"known period": `t.clk > since and t.clk < until`,
	"admits": `(max_units is null or $when
            and case when win = interval '0' then $tip.spent - $tip.refunded - $tip.credited
                else {bound: tip = $tip, since = $since} end <= max_units - $tip.held - $amount)`,
	"due": `case when $held > 0 then case when $tip.seq & 15 < 2 and $tip.next_due > '-infinity'
            then metered._later_due($tip.scope, $tip.next_due, $at) else $tip.next_due end end`,
	// A number that a row has was drawn by a sequence that is behind (numbers.sql).
	"new hold": `loop
        insert into metered.holds (placed_at, deadline, due, ceiling, issued_at, version, state,
            tenant, id, holder, claim, fingerprint, keys, metadata)
        values ($at, $at + $ttl, $at + ($due_in), coalesce($at + $lifetime, 'infinity'), $issued, 1, 'h',
            $tenant, $id, $holder, $claim, $fingerprint, $keys, $metadata)
        on conflict do nothing
        returning no into new_no;
        exit when new_no is not null;
        if not metered._has_number('holds', currval(metered._numbers('holds'))) then
            perform metered._collided();     -- this view is older than one that was placed
        end if;
        perform metered._raise_sequence('holds');
    end loop;`,
	"placed detail": `case when $holder = '' and $claim = '' then jsonb_build_object('tenant', $tenant, {hold terms: grace = $grace, lifetime = $lifetime}, 'lines', $lines)
            else jsonb_build_object('tenant', $tenant, 'holder', $holder, 'claim', $claim, {hold terms: grace = $grace, lifetime = $lifetime}, 'lines', $lines) end`,
	"hold terms": `'grace_us', (extract(epoch from $grace) * 1000000)::bigint, 'lifetime_us', (extract(epoch from $lifetime) * 1000000)::bigint`,
	"fits hold": `($ttl > interval '0' and $grace >= interval '0' and $ttl <= coalesce($lifetime, interval '3660 days')
            and $grace <= interval '3660 days' and coalesce($lifetime <= interval '3660 days', true)
            and $tenant is not null and $id <> '' and $holder is not null and octet_length($fingerprint) = 33
            and octet_length($scope) between 1 and 255) is true`,
	"known id": `exists (select from metered.operations o where o.tenant = $tenant and o.id = $id)
                or $issued <= (select h.at from metered.operations_horizon h where h.one)
                or $issued > metered.clock() + $future`,
	// Not while a minimum waits to be captured, which counts before them.
	"tallied": `$tip.tallied and $tip.lots_end is null and $tip.next_due is distinct from '-infinity'
            and $tip.spent < 4611686018427387904
            and ($tip.next_due <= $at and metered._minimum_is_due($scope, $tip.next_due, $at)) is not true`,
	"sum": `$amount between 1 and 1099511627776 and coalesce(pg_column_size($note) <= 8192
            and pg_column_compression($note) is null and not $note ? 'use', true)`,
	// Else it would wait until that transaction ends, to know whether the time is free.
	"own time": `pg_try_advisory_xact_lock($key # metered._in_us($at))`,
	// Its snapshot is newer than the lock t_lock, which the caller has shared.
	"write tally": `insert into metered.tallies as y (at, amount, scope, operation_tenant, operation, hold, note)
            select t.clk, $amount, $scope, $tenant, $operation, $hold, $note
            from (select l.at, l.spent, l.tallied, l.lots_end, l.next_due, metered.clock() as clk
                from metered.ledger l where l.scope = $scope order by l.seq desc limit 1) t
            where {tallied: scope = $scope, tip = t, at = t.clk} and t.at < t.clk and {own time: key = t_lock, at = t.clk}
            on conflict do nothing
            returning y.at into $into`,
	// A PERFORM costs in each transaction, so it stands under its condition.
	"refuse": `if $when then
        perform metered._require(false, '$what');
    end if`,
	"or collide": `if not found then
            perform metered._collided();
        end if`,
	// The write fails with 40001 where the row is there. The block takes back one that does not. Not
	// by a code that ends in 000, which would catch its whole class.
	"take back": `raise exception using errcode = 'MT100';
        exception when sqlstate 'MT100' then
            null`,
	"unseen": `if metered._one_snapshot() then
            $entry.seq := $entry.seq - 1;
            perform metered._refuse_stale(array[$entry]);
        end if`,
	"unlocked": `if locked.status is not null then
        refused := metered._refuse_hold(raising, json_build_object('status', locked.status, 'id', locked.failed,
            'state', locked.stands, 'hold', metered.hold_json(locked.failed_no, locked.clk)));
        return;
    end if`,
	"named lot": `status := named.status;
    crossed := named.crossed;
    if status is not null then
        return;
    end if;
    entry := named.entry`,
	"announce": `if channel is not null then
            perform metered._announce(channel, $tenant, $id, $version, $what);
        end if`,
	// Entries that only bring units remember no level, as they lower nothing.
	"remembered": `crossing.crossings is not null
        and (metered._last_entry($scope)).crossed is not distinct from nullif(crossing.crossed, '{}')`,
	"entry sought": `coalesce((made_by.note is null or l.note @> made_by.note)
                and (made_by.operation is null or l.operation = made_by.operation
                    and coalesce(l.operation_tenant, '') = coalesce(made_by.tenant, ''))
                and (named is null or named = (select o.name from metered.operations o
                    where o.tenant = l.operation_tenant and o.id = l.operation)), false)`,
	"shorter timeouts": `set_config('statement_timeout', metered._shorter(current_setting('statement_timeout'), $ms), true)
                || set_config('lock_timeout', metered._shorter(current_setting('lock_timeout'), $ms), true)
                || set_config('idle_in_transaction_session_timeout',
                    metered._shorter(current_setting('idle_in_transaction_session_timeout'), $ms), true)`,
}

// The macros of plain.sql, which its functions share. They name its arguments and variables.
func init() {
	for name, text := range map[string]string{
		"short variables": `e_seq    bigint;        -- the entry that was appended, or null
    e_at     timestamptz;
    e_held   bigint;
    e_used   bigint;        -- units that counted before it`,
		// None, one by window, or prepaid credit. Any other limit, and a wrong one, leaves standing null.
		"v1 limit variables": `one       jsonb;     -- the only limit
    standing  boolean;
    win       interval;
    max_units bigint;`,
		"v1 limit": `one := limits -> 0;
    if one @> '{}' and one - '{name,max,window}'::text[] = '{}' and jsonb_array_length(limits) = 1 then
        max_units := one ->> 'max';
        win := {v1 window: of = one};
        standing := max_units >= 0 and win > interval '0' and win <= interval '3660 days';
    elsif limits in ('[]', '[{"prepaid": true}]') then
        standing := true;
        max_units := case when one is not null then 0 end;
        win := interval '0';
    end if`,
		"v1 window": `interval '1 second' * date_part('epoch', ($of ->> 'window')::interval)`,
		"short lock": `if metered._try_lock(key) is not true then
            perform metered._lock_all_scopes(array[of_scope], array[key], wait_ms);
        end if`,
		// A command that waits is counted by its lock of the table. A replay waits for no scope.
		"counted lock": `if metered._try_lock(key) is not true then
                perform from metered.operations o where false;
                known := {known id: tenant = of_tenant, id = of_id, issued = issued, future = max_future};
                if known is not true then
                    perform metered._lock_all_scopes(array[of_scope], array[key], wait_ms);
                end if;
            end if`,
		"short columns": `seq, amount, at, spent, refunded, credited, held, epoch, kind, scope, next_due, operation_tenant, operation, note,
                    others, anchor_at, anchor_spent`,
		"short values": `t.seq + 1, units, $at, t.spent + units, t.refunded, t.credited, t.held, t.epoch, 'c', of_scope, t.next_due, of_tenant,
                    of_id, note, {others: tip = t}`,
		// The base is the newest entry before the window, or there is none, and no refund is of a
		// charge in the window.
		"exact": `coalesce($refunded, 0) = t.refunded and ($seq > 1 or $seq = t.seq or t.epoch = 0 and (t.seq <= 16 and $seq is null
                        or (select l.seq from metered.ledger l where l.scope = of_scope and l.seq = 2) > 0))`,
		"short base": `(select base.seq, base.spent, base.refunded
                    from {base: scope = of_scope, epoch = $epoch, since = $since}) b on true`,
		// A charge with at most one limit. A period has statements of its own: a window pays for no
		// more conditions.
		"short charge": `if standing and win > interval '0' then
                {short exact: since = t.clk - win, when = true, also = $also};
            elsif since is null then
                {short bounded: since = t.clk - win, when = win >= interval '0', also = $also};
            elsif standing then
                {short exact: since = since, when = {known period}, also = $also};
            else
                {short bounded: since = since, when = {known period}, also = $also};
            end if`,
		// The base of the window becomes the entry's anchor: so it is in the answer, too. Where
		// nothing was spent before the window, an anchor says no more than none.
		"short exact": `insert into metered.ledger as y ({short columns})
                select {short values: at = t.clk}, case when b.spent > 0 then $since end, nullif(b.spent, 0)
                from {short last: scope = of_scope} t left join lateral {short base: epoch = t.epoch, since = $since}
                where {usual: tip = t, at = t.clk} and $also and $when
                    and {exact: seq = b.seq, refunded = b.refunded} and t.spent - coalesce(b.spent, 0) <= max_units - t.held - units
                on conflict do nothing
                returning y.seq, y.at, y.held, y.spent - units - coalesce(y.anchor_spent, 0) into e_seq, e_at, e_held, e_used`,
		"short bounded": `insert into metered.ledger as y ({short columns})
                select {short values: at = t.clk}, t.anchor_at, t.anchor_spent
                from {short last: scope = of_scope} t
                where {usual: tip = t, at = t.clk} and $also
                    and {admits: tip = t, at = t.clk, amount = units, since = $since, when = $when}
                on conflict do nothing
                returning y.seq, y.at, y.held, y.spent - units - y.refunded - y.credited into e_seq, e_at, e_held, e_used`,
		"short placed": `placed_at timestamptz;
    at_seq bigint;      -- the entry that was appended, or null
    new_no bigint;
    unused text;`,
		// A hold of one line, and its answer. Without an entry nothing was written.
		"short placing": `insert into metered.ledger as y (seq, amount, at, spent, refunded, credited, held, epoch, kind,
                scope, next_due, hold, operation_tenant, operation, note, anchor_at, anchor_spent, others)
            select t.seq + 1, units, t.clk, t.spent, t.refunded, t.credited, t.held + units, t.epoch, 'h',
                of_scope, least({due: tip = t, at = t.clk, held = t.held}, t.clk + (ttl + grace)), of_id, op_tenant,
                operation, note, t.anchor_at, t.anchor_spent, coalesce({others: tip = t}, 0) + 1
            from {short last: scope = of_scope} t
            where {settled: tip = t, at = t.clk} and t.crossed is null
                and {admits: tip = t, at = t.clk, amount = units, since = coalesce(since, t.clk - win),
                    when = (win >= interval '0' or {known period})}
                and t.clk + ttl > t.clk and t.clk + (ttl + grace) >= t.clk + ttl
                and coalesce(ttl <= lifetime and t.clk + ttl <= t.clk + lifetime, true)
            on conflict do nothing
            returning y.seq, y.at into at_seq, placed_at;
            if at_seq is not null then
                {new hold: at = placed_at, ttl = ttl, due_in = ttl + grace, lifetime = lifetime, issued = issued, tenant = of_tenant,
                    id = of_id, holder = holder, claim = null, fingerprint = of_fingerprint, keys = array[key], metadata = metadata}
                insert into metered.hold_lines (hold, key, amount, open, due, scope, opened_seq)
                values (new_no, key, units, units, placed_at + (ttl + grace), of_scope, at_seq);
                insert into metered.hold_events (hold, at, deadline, version, kind, detail, note, operation_tenant, operation)
                values (new_no, placed_at, placed_at + ttl, 1, 'h', {placed detail: tenant = of_tenant, holder = holder, claim = '', grace = grace,
                    lifetime = lifetime, lines = jsonb_build_array(jsonb_build_object('scope', of_scope, 'amount', units, 'open', units))},
                    note, op_tenant, operation);
                if channel is not null or $command then
                    {announce: tenant = of_tenant, id = of_id, version = 1, what = 'placed'};
                    unused := case when $command then metered._remember_hold(
                        metered._created_json(metered.hold_json(new_no, placed_at), '{}', null, null)) end;
                end if;
                return array_to_json(array[at_seq, metered._in_us(placed_at)]);
            end if`,
		"short captured": `was    record;      -- the hold before, and the time
    at_scope text;      -- of its line
    at_seq bigint;      -- the entry of captured units
    taken  bigint;      -- these
    rest   bigint;      -- units that are freed
    line   json;
    answer json;
    unused text;
    waited boolean;     -- a job may wait for the units`,
		// Captures a hold of one line, and has its answer. Without an entry nothing was written.
		"short capture": `-- As in _lock_holds: nothing waits, and the row is read as it is by now. Another's hold is not locked.
        select y.no, y.version, y.due, y.keys[1] as key, metered.clock() as clk into was
        from metered.holds y
        where y.tenant = of_tenant and y.id = of_id and y.state = 'h' and (units is null or y.claim is null)
          and case when ($of.holder = '' or y.holder = $of.holder) and cardinality(y.keys) = 1
              then metered._try_lock(y.keys[1]) end
          and $also
        for no key update skip locked;
        if was.due > was.clk and current_setting('transaction_isolation') = 'read committed' then
            insert into metered.ledger as e (seq, amount, at, spent, refunded, credited, held, epoch, kind,
                scope, next_due, hold, operation_tenant, operation, note, anchor_at, anchor_spent, crossed, others)
            select t.seq + 1, y.take, was.clk, t.spent + y.take, t.refunded, t.credited, t.held - y.take, t.epoch, 'u',
                t.scope, {due: tip = t, at = was.clk, held = t.held - y.take}, of_id, op_tenant, $of.operation,
                $of.note, t.anchor_at, t.anchor_spent, t.crossed, {others: tip = t}
            from (select l.scope, coalesce(units, l.open) as take from metered.hold_lines l
                    where l.hold = was.no and coalesce(l.scope = of_scope and units between 1 and l.open, units is null and l.open > 0)
                    and not exists (select from metered.hold_lines z where z.hold = was.no and z.scope <> l.scope)) y,
                lateral {short last: scope = y.scope} t
            where metered._key_fits(was.key, y.scope) and {settled: tip = t, at = was.clk}
            on conflict do nothing
            returning e.scope, e.seq, e.amount into at_scope, at_seq, taken;
        end if;
        if at_seq > 0 then
            -- What is open of a line that has not ended is its amount less what was captured.
            update metered.hold_lines l set captured = l.captured + taken, open = 0
            where l.hold = was.no and l.scope = at_scope
            returning l.amount - l.captured, metered._line_json(l.scope, l.amount, l.captured, 0, l.refunded, l.at_least)
            into rest, line;
            if rest > 0 then
                -- After the entry above, which nobody else has seen: its row needs no lock.
                insert into metered.ledger (seq, amount, at, spent, refunded, credited, held, epoch, kind,
                    scope, next_due, hold, operation_tenant, operation, note, anchor_at, anchor_spent, crossed, others)
                select t.seq + 1, rest, t.at, t.spent, t.refunded, t.credited, t.held - rest, t.epoch, 'l',
                    t.scope, {due: tip = t, at = t.at, held = t.held - rest}, t.hold, t.operation_tenant, t.operation,
                    t.note, t.anchor_at, t.anchor_spent, t.crossed, coalesce({others: tip = t}, 0) + 1
                from metered.ledger t where t.scope = at_scope and t.seq = at_seq
                on conflict do nothing;
                {or collide};
            end if;
            update metered.holds y set version = y.version + 1, entity = coalesce($of.entity, y.entity), state = 'c',
                ended_at = was.clk, pending = false
            where y.no = was.no
            returning metered._hold_as_json(row(y.*)::metered.holds, json_build_array(line), was.clk, null) into answer;
            insert into metered.hold_events (hold, at, version, kind, entity, detail, note, operation_tenant, operation)
            values (was.no, was.clk, was.version + 1, 'c', entity,
                jsonb_build_array(jsonb_build_object('scope', at_scope, 'amount', taken, 'seq', at_seq, 'at', was.clk)),
                note, op_tenant, operation)
            returning exists (select from metered.parked_scopes p where p.scope = at_scope) into waited;
            if waited then
                perform metered._mark_freed(at_scope);
            end if;
            if channel is not null or $command then
                {announce: tenant = of_tenant, id = of_id, version = was.version + 1, what = 'captured'};
                unused := case when $command then metered._remember_hold(answer) end;
            end if;
            $end;
        end if`,
		"pair variables": `{short variables}
    t_lock   bigint := metered._tally_key(total_scope);
    t_at     timestamptz;   -- of the tally that was written, or null`,
		// The tally comes first: without one, no lock of a scope was taken out of order.
		"short pair": `if {sum: amount = total_units, note = total_note} and {short call}
            and pg_try_advisory_xact_lock_shared(t_lock)
        then
            {write tally: into = t_at, scope = total_scope, amount = total_units, tenant = of_tenant, operation = of_id,
                hold = null, note = total_note};
            if t_at is not null then
                $lock;
                {short charge: also = $also};
                if e_seq is null then
                    delete from metered.tallies y where y.scope = total_scope and y.at = t_at;
                elsif metered._in_us(t_at) & 31 = 0 and metered._try_lock(metered._scope_key(total_scope)) then
                    perform metered._entry_for_write(total_scope);
                end if;
            end if;
        end if`,
		"pair record": `{short record: tenant = of_tenant, id = of_id, scopes = case when total_first then array[total_scope, of_scope] else array[of_scope, total_scope] end,
                amounts = case when total_first then array[total_units, units] else array[units, total_units] end,
                seqs = case when total_first then array[-metered._in_us(t_at), e_seq] else array[e_seq, -metered._in_us(t_at)] end,
                ats = case when total_first then array[t_at, e_at] else array[e_at, t_at] end, holds = $holds, jobs = $jobs, also = true}`,
		"pair answer":  `{short answer}, -metered._in_us(t_at)`,
		"short answer": `e_seq, metered._in_us(e_at), e_held, e_used`,
		"short record": `metered.operations as o (tenant, id, fingerprint, issued_at, at, result, scopes, amounts, seqs, ats, holds, name, jobs)
        select $tenant, $id, of_fingerprint, issued, metered.clock(), of_result, $scopes, $amounts, $seqs, $ats, $holds, name, $jobs
        where $also
        on conflict do nothing
        returning metered._in_us(o.at) into done_at`,
	} {
		templates[name] = text
	}
}

// entryColumns are the columns of an entry, in the order of the table.
var entryColumns = strings.Fields("seq amount at spent refunded credited held epoch kind scope next_due hold operation_tenant operation note anchor_at anchor_spent lots_end crossed tallied others")

// expand replaces the macros of a text of SQL.
func expand(sql string) string {
	for macro.MatchString(sql) { // the innermost ones first
		sql = expandOnce(sql)
	}
	return sql
}

func expandOnce(sql string) string {
	return macro.ReplaceAllStringFunc(sql, func(text string) string {
		m := macro.FindStringSubmatch(text)
		given := macroArguments(m[3])
		switch {
		case m[1] == "entry columns":
			return strings.Join(entryColumns, ", ")
		case m[1] == "base":
			return baseOf(given)
		case templates[m[1]] != "":
			return fill(templates[m[1]], given)
		}
		if given["others"] == "" {
			given["others"] = "{others: tip = " + m[2] + "}"
			if given["seq"] == "" { // tip has that of the new entry already
				given["others"] = "int8smaller(" + m[2] + ".others, " + m[2] + ".seq - 1)"
			}
			if given["kind"] != "'c'" && given["kind"] != "'u'" {
				given["others"] = "coalesce(" + given["others"] + ", 0) + 1"
			}
		}
		values := make([]string, len(entryColumns))
		for i, name := range entryColumns {
			value, changed := given[name]
			if !changed {
				value = m[2] + "." + name
			}
			values[i] = value
			delete(given, name)
		}
		if len(given) > 0 {
			panic(fmt.Sprintf("%s: no columns of an entry: %v", text, given))
		}
		return strings.Join(values, ", ")
	})
}

// fill puts the arguments of a macro in the places of its template.
func fill(template string, given map[string]string) string {
	var pairs []string
	for name, value := range given {
		pairs = append(pairs, "$"+name, value)
	}
	return strings.NewReplacer(pairs...).Replace(template)
}

// baseOf finds an entry in the index over time, which has each sixteenth one, and reads on to the
// last one in time. if is a further condition.
func baseOf(given map[string]string) string {
	also := ""
	if given["if"] != "" {
		also = " and " + given["if"]
	}
	return strings.NewReplacer("$scope", given["scope"], "$epoch", given["epoch"], "$since", given["since"], "$also", also).Replace(
		`(select y.seq from metered.ledger y
                where y.scope = $scope and y.epoch = $epoch and y.at <= $since and (y.seq & 15 = 1 or y.kind = 'k')$also
                order by y.at desc, y.seq desc limit 1) mark,
            lateral (select y.seq, y.spent, y.refunded from metered.ledger y
                where y.scope = $scope and y.seq between mark.seq and mark.seq + 15 and y.epoch = $epoch and y.at <= $since
                order by y.seq desc limit 1) base`)
}

// macroArguments reads "name = value, name = value". A comma in parentheses belongs to a value.
func macroArguments(list string) map[string]string {
	given := map[string]string{}
	depth, start := 0, 0
	add := func(end int) {
		if name, value, ok := strings.Cut(list[start:end], " = "); ok {
			given[strings.TrimSpace(name)] = strings.Join(strings.Fields(value), " ")
		}
		start = end + 1
	}
	for i, r := range list {
		switch {
		case r == '(' || r == '[':
			depth++
		case r == ')' || r == ']':
			depth--
		case r == ',' && depth == 0:
			add(i)
		}
	}
	add(len(list))
	return given
}
