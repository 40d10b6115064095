package schema

import "maps"

// The macros of the full functions, by which _write_charges and capture_holds are read by subject.
// They name the arguments and variables of these functions. A function of PL/pgSQL in their place
// would cost each call more than it runs.
func init() {
	maps.Copy(templates, chargeMacros)
	maps.Copy(templates, captureMacros)
	maps.Copy(templates, usageMacros)
}

var chargeMacros = map[string]string{
	// Charges without limits are written as tallies first, where their scopes have these: such a
	// tally takes no lock. Nothing is tallied by a look, on Citus, or at an old snapshot.
	"charge sums": `foreach charge in array charges loop
        nth := coalesce(nth, 0) + 1;
        if charge.limits is null then
            if not look and not metered._sharded() and not metered._one_snapshot() then
                at := metered._tally(charge, origin, hold.id);
                if at is not null then
                    tallies[nth] := at;
                end if;
            end if;
            sums := sums || charge.scope;
        end if;
    end loop;
    for which in 1..case when sums is not null and tallies is null then nth else 0 end loop
        charges[which].limits := coalesce(charges[which].limits, '{}');
    end loop;
    nth := null;`,
	// A function answers in place of this one.
	"charge answer": `seqs := $of.seqs;
        ats := $of.ats;
        used := $of.used;
        held := $of.held;
        refused := $of.refused;
        at := coalesce($of.at, at);
        periods := $of.periods;
        crossed := $of.crossed;`,
	// The condition that a charge is within its bounds, asks for no resource, and is for no use of lots.
	"charge usual": `(charge.amount between 1 and 9007199254740992 and charge.held between 0 and charge.amount
            and octet_length(charge.scope) between 1 and 255 and coalesce(pg_column_size(charge.note), 0) <= 8192
            and pg_column_compression(charge.note) is null and cardinality(charge.limits) <= 16
            and charge.must_exist is not true
            and ((charge.note ? 'use') is not true or mode in ('look', 'applied')))`,
	// The last entry of a charge's scope, with the tallies that it has folded into it. It is that of
	// _entry_for_write, without the call where there is an entry.
	"charge tip": `if look then
            select * into tip from metered.ledger y where y.scope = charge.scope order by y.seq desc limit 1;
        else
            select * into tip from metered.ledger y where y.scope = charge.scope
            order by y.seq desc limit 1 for key share;
        end if;
        if not found then
            tip := case when look then metered._fresh(charge.scope) else metered._first_for_write(charge.scope) end;
        end if;
        if tip.tallied then
            if look then
                plain := false;
            else
                tip := metered._fold(tip, hold.at);
            end if;
        elsif charge.scope = any (sums) and (waited or current_setting('metered_tx.waited', true) = 'true')
            and tip.seq > 0 and tip.epoch = 0 and tip.lots_end is null and not metered._sharded() then
            tip.tallied := true;
        end if;`,
	// The most that may count against a limit for it to admit a charge, and for no threshold to be crossed.
	"charge room": `least(lim.max, lim.tell_at - 1) - tip.held - charge.amount`,
	// Takes the units that count against a limit, or goes on to the next limit where a bound of them
	// is enough. A period is dear to find, so that its bound is tried before and after. The base of
	// a window or period is that of _spent_since where it is in the newest epoch, or all that was
	// ever spent is inside: base_seq is 0 if entry 2 says that nothing was purged.
	"charge use": `continue when standing is not true and lim.win > interval '0'
                and {bound: tip = tip, since = at - lim.win} <= {charge room};
            since := at - lim.win;
            if since = at then
                counts := tip.spent - tip.refunded - tip.credited;
            elsif tip.at <= since then
                counts := 0;
            else
                if since is null then   -- a limit by period
                    continue when standing is not true and tip.spent <= {charge room};
                    span := metered._period_at(lim.period, at);
                    since := span[1] - interval '0.000001';
                    continue when standing is not true and tip.anchor_at <= since
                        and tip.spent - tip.anchor_spent <= {charge room};
                    periods := periods || span;
                end if;
                select coalesce(b.seq, (select 0 from metered.ledger y where y.scope = charge.scope and y.seq = 2)),
                    coalesce(b.spent, 0), coalesce(b.refunded, 0) into base_seq, base_spent, base_refunded
                from (values (1)) one left join lateral (
                    select base.seq, base.spent, base.refunded
                    from {base: scope = charge.scope, epoch = tip.epoch, since = since}) b on true;
                if base_seq > 1 or tip.epoch = 0 and (base_seq = 0 or base_seq is null and tip.seq <= 16) then
                    counts := tip.spent - base_spent - case when base_refunded = tip.refunded then 0
                        else metered._refunds_after(charge.scope, tip.seq, coalesce(base_seq, 0)) end;
                elsif lim.max = 9223372036854775807 then
                    plain := false;     -- it refuses nothing: _check_limits looks whether its use is known
                    exit;
                else
                    part := metered._spent_since(tip, since);
                    base_seq := part.base_seq;
                    base_spent := part.base_spent;
                    counts := part.used;
                end if;
                if standing is not true and base_spent > 0 then
                    tip.anchor_at := since;
                    tip.anchor_spent := base_spent;
                end if;
            end if;`,
	// Writes one charge that is let in: {charge entries} for it alone, without arrays of its state.
	"charge alone": `if tip.held > 0 then
                tip.next_due := metered._due_after(charge.scope, tip.seq, tip.held, tip.next_due, at);
            end if;
            insert into metered.ledger as y ({entry columns})
            values ({entry of tip: seq = tip.seq + 1, amount = charge.amount, at = _write_charges.at,
                spent = tip.spent + charge.amount, kind = 'c', {charge origin}})
            on conflict do nothing
            returning array[y.seq], array[y.at], array[y.held], case when standing then used end
            into seqs, ats, held, used;
            if seqs is null then
                perform metered._collided();
            elsif tip.lots_end is not null then
                perform metered._use_lots(charge.scope, tip.seq + 1, charge.amount, metered._balance(tip), 't',
                    charge.note ->> 'use');
            end if;`,
	"charge origin": `scope = charge.scope, hold = hold.id, operation_tenant = origin.tenant,
                operation = origin.operation, note = charge.note`,
	// Writes the entries of a charge that was let in: its held units, and then its spent ones. Before
	// them the ends of lots are written, as far as a call writes them.
	"charge entries": `if tip.lots_end <= greatest(at, tip.at) then
            tip := metered._settle_lowered(tip, at, metered._ends_per_call(), charge.amount,
                case when exists (select from unnest(charge.limits) l where l.thresholds is not null)
                    then coalesce(tip.crossed, '{}') end, wait_ms);
        end if;
        if tip.held > 0 then
            tip.next_due := metered._due_after(charge.scope, tip.seq, tip.held, tip.next_due, at);
        end if;
        tip.at := greatest(at, tip.at);
        if metered._lags(tip) then
            tip.lots_end := metered._lots_end_caught_up(tip);
        end if;
        units := charge.amount - charge.held;
        if charge.held > 0 and hold.due_in >= interval '0' then
            if at + hold.due_in <= tip.at then      -- the clock was set back
                perform metered._clear_freed_of(tip);
            end if;
            tip.seq := tip.seq + 1;
            tip.held := tip.held + charge.held;
            tip.next_due := least(tip.next_due, at + hold.due_in);
            insert into metered.ledger ({entry columns})
            values ({entry of tip: amount = charge.held, kind = 'h', {charge origin}})
            on conflict do nothing
            returning others into tip.others;
            if not found then
                perform metered._collided();
            elsif tip.lots_end is not null then
                perform metered._use_lots(charge.scope, tip.seq, charge.held,
                    case when not metered._lags(tip) then metered._balance(tip) + charge.held end, 'h',
                    charge.note ->> 'use');
            end if;
        elsif charge.held <> 0 then
            raise exception 'a charge holds nothing: place a hold' using errcode = '22023';
        end if;
        if units > 0 then
            tip.seq := tip.seq + 1;
            insert into metered.ledger ({entry columns})
            values ({entry of tip: amount = units, spent = tip.spent + units, kind = 'c', {charge origin}})
            on conflict do nothing;
            if not found then
                perform metered._collided();
            elsif tip.lots_end is not null then
                perform metered._use_lots(charge.scope, tip.seq, units,
                    case when not metered._lags(tip) then metered._balance(tip) end, 't', charge.note ->> 'use');
            end if;
        end if;`,
}

// What counts in a scope, for usage_of and v1_usage.
var usageMacros = map[string]string{
	"usage variables": `clk     timestamptz := metered.clock();
    since   timestamptz;
    tip     metered.ledger;
    counted record;
    span    timestamptz[];
    after   timestamptz;  -- since, or null for a lifetime`,
	// The scope's last entry, with the credit that has not lapsed.
	"usage tip": `tip := metered._last_entry($scope);
        tip.credited := tip.credited - case when tip.lots_end is not null
            then metered._lapsing(tip, clk) else 0 end;`,
	// used, held, spent, leased and charges of a window or a period, and its times.
	"usage": `span := case when $win is null
            then metered._period_at($period, greatest(clk, tip.at)) end;
        starts_at := span[1];
        ends_at := span[2];
        since := coalesce(greatest(clk, tip.at) - $win, starts_at - interval '0.000001');
        after := case when $win is distinct from interval '0' then since end;
        charges := tip.seq - coalesce({others: tip = tip}, 0);
        if after is null then
            used := tip.spent - tip.refunded - tip.credited;
        elsif tip.at <= since then
            used := 0;
            charges := 0;
        else
            counted := metered._spent_since(tip, since);
            used := counted.used;
            charges := charges - metered._charges_upto(tip.scope, counted.base_seq);
        end if;
        held := tip.held;
        spent := tip.spent;
        if tip.tallied then
            counted := metered._tallied_units(tip, after);
            used := used + counted.units;
            charges := charges + counted.charges;
            spent := spent + (metered._tallied_units(tip, null)).units;
        end if;
        if tip.next_due <= clk then
            held := held - metered._due_units($scope, tip.next_due, clk);
            used := used + metered._minima(tip, after, clk);
            spent := spent + metered._minima(tip, null, clk);
            charges := charges + metered._minima_due(tip, after, clk);
        end if;
        leased := 0;
        if held > 0 and $leases then    -- spends of leases count, before they are in the chain
            counted := metered._leased($scope);
            leased := counted.unspent;
            held := held - counted.unspent - counted.spent;
            used := used + counted.spent;
            spent := spent + counted.spent;
            charges := charges + (metered._unsettled_spends($scope,
                    array['-infinity'::timestamptz], true))[1];
        end if;`,
}

var captureMacros = map[string]string{
	// Judges the units that a capture takes of each scope of used, before anything is written: that they
	// are well named, what the claim of the hold demands, what is beyond the held units (excess), and
	// whether the caller reports the thresholds on spending that they cross.
	//
	// A claim's unit is spent when the claim is confirmed, and only then. If it could be spent before, and
	// the hold then ended otherwise, nobody could have the key, nor give it back. Were it not spent, the
	// key would be taken, and nothing given back would end that.
	"capture asked": `foreach asked in array used loop
            if (whole and asked.amount is null or not whole and asked.amount between 0 and 9007199254740992) is not true
                or asked.scope = any (scopes) then
                perform metered._require(false, 'used');
            end if;
            scopes := scopes || asked.scope::text;
            units := units || asked.amount::bigint;
        end loop;
        select h.claim into own from metered.holds h where h.no = locked.nos[1];
        if own is not null and not whole
            and terms.closing <> coalesce(units[array_position(scopes, own)] > 0, false) then
            refused := metered._refuse_hold(raising, json_build_object(
                'status', case when terms.closing then 'unconfirmed' else 'claim' end,
                'id', named.ids[1], 'scope', own));
            return;
        end if;
        foreach asked in array used loop
            select y.open into line from metered.hold_lines y
            where y.hold = locked.nos[1] and y.scope = asked.scope;
            if line.open is null then
                refused := metered._refuse_hold(raising, json_build_object('status', 'line', 'id', named.ids[1],
                    'scope', asked.scope));
                return;
            elsif asked.amount > line.open and terms.policy = 'refuse' then
                refused := metered._refuse_hold(raising, json_build_object('status', 'excess', 'id', named.ids[1],
                    'scope', asked.scope, 'requested', asked.amount, 'open', line.open));
                return;
            elsif asked.amount > line.open then
                excess := excess || row(asked.scope, null, asked.amount - line.open, 0,
                    asked.limits, origin.note, null, null, null)::metered.new_charge;
            end if;
            covered := least(asked.amount, line.open);
            spent := case when cardinality(asked.limits) > 0 and covered > 0
                then metered._spent_limits(asked.limits) end;
            if spent is not null then
                tip := metered._last_entry(asked.scope);
                crossing := metered._cross_captured(row(asked.scope, null, coalesce(asked.amount, covered) - covered,
                    -covered, spent, null, null, null, null)::metered.new_charge, tip, locked.clk, ahead);
                if crossing.silent then
                    if raising then
                        perform metered._refuse_unreported();
                    end if;
                    refused := json_build_object('status', 'refused',
                        'refused', json_build_array(json_build_object('crossing', true)),
                        'scopes', json_build_array(asked.scope), 'units', json_build_array(covered));
                    return;
                elsif crossing.crossings is not null
                    or nullif(coalesce(crossing.crossed, tip.crossed), '{}') is distinct from tip.crossed then
                    watched := watched || asked.scope;
                    takes := takes
                        || row(asked.scope, null, 0, -covered, spent, null, null, null, null)::metered.new_charge;
                end if;
            end if;
        end loop;`,
	// Brings a line's last entry up to what is due in its scope: minima of other holds, the ends of
	// lots, and tallies.
	"capture tip": `if line.next_due <= locked.clk and line.lots_end is null then
                    ended := ended or metered._end_minima(array(select distinct y.scope from metered.hold_lines y
                        where y.hold = any (locked.nos) and y.open <> 0
                          and (terms.closing or units[array_position(scopes, y.scope)] > 0)),
                        locked.nos[1], locked.clk, wait_ms) is not null;
                    tip := metered._entry_by(line.scope, locked.clk);
                elsif line.lots_end <= greatest(locked.clk, line.at)
                    or line.lots_end is not null and line.next_due <= locked.clk then
                    tip := metered._settle(metered._entry_for_write(line.scope), locked.clk,
                        metered._ends_per_call(), 0, wait_ms);
                elsif line.tallied then
                    tip := metered._entry_by(line.scope, locked.clk);
                end if;
                if tip.scope = line.scope and tip.seq >= line.seq then
                    select tip.seq, tip.at, tip.spent, tip.credited, tip.held, tip.next_due, tip.lots_end,
                        tip.crossed, tip.others
                    into line.seq, line.at, line.spent, line.credited, line.held, line.next_due, line.lots_end,
                        line.crossed, line.others;
                end if;
                if take > covered then   -- the excess is no charge beside the capture
                    line.others := coalesce({others: tip = line}, 0) + 1;
                end if;`,
	"capture origin": `hold = named.ids[i], operation_tenant = origin.tenant, operation = origin.operation,
                        note = origin.note`,
	// Spends the covered units of a line. Thresholds on spending were judged for all units before
	// ({capture asked}), and are judged for these after the excess.
	"capture spent": `which := array_position(watched, line.scope);
                    if which is not null then
                        crossing := metered._cross_captured(takes[which], metered._last_entry(line.scope), locked.clk,
                            ahead);
                        if crossing.silent then
                            perform metered._collided();     -- the state that was judged first has changed
                        end if;
                        line.crossed := nullif(coalesce(crossing.crossed, line.crossed), '{}');
                        crossed := case when crossing.crossings is null then crossed
                            else coalesce(crossed, '[]')
                                || metered._crossed_at(crossing.crossings, array[line.seq + 1]) end;
                    end if;
                    insert into metered.ledger ({entry columns})
                    values ({entry of line: seq = line.seq + 1, amount = covered, at = greatest(locked.clk, line.at),
                        spent = line.spent + covered, held = line.held - covered, kind = 'u',
                        next_due = metered._due_after(line.scope, line.seq, line.held - covered, line.next_due,
                            locked.clk), {capture origin}})
                    on conflict do nothing;
                    if not found then
                        perform metered._collided();
                    elsif line.lots_end is not null then
                        perform metered._capture_lots(metered._last_entry(line.scope), line.opened_seq, covered);
                    end if;
                    detail := detail || jsonb_build_object('scope', line.scope, 'amount', covered,
                        'seq', line.seq + 1, 'at', greatest(locked.clk, line.at));`,
	// Frees what a capture that closes leaves of a line.
	"capture rest": `insert into metered.ledger ({entry columns})
                    values ({entry of line: seq = line.seq + case when covered > 0 then 2 else 1 end,
                        amount = line.open - covered, at = greatest(locked.clk, line.at),
                        spent = line.spent + covered, held = line.held - line.open, kind = 'l',
                        next_due = metered._due_after(line.scope, line.seq, line.held - line.open, line.next_due,
                            locked.clk), {capture origin}})
                    on conflict do nothing;
                    if not found then
                        perform metered._collided();
                    elsif line.lots_end is not null then
                        perform metered._free_lots(metered._entry_for_write(line.scope), array[line.opened_seq]);
                    end if;`,
	// Writes a line as it is after the capture, and keeps it for the answer and the event.
	"capture line": `if take > covered then
                which := (select x.n from unnest(excess) with ordinality
                    x(scope, key, amount, held, limits, note, must_exist, lease, lease_offset, n)
                    where x.scope = line.scope);
                detail := detail || jsonb_build_object('scope', line.scope, 'amount', take - covered,
                    'seq', beyond.seqs[which], 'at', beyond.ats[which], 'excess', true);
            end if;
            lines := lines || metered._line_json(line.scope, line.amount, line.captured + take,
                case when terms.closing then 0 else line.open - covered end, line.given_back, line.at_least);
            if take > 0 or terms.closing and line.open > 0 then
                update metered.hold_lines y set captured = y.captured + take,
                    open = case when terms.closing then 0 else y.open - covered end
                where y.hold = locked.nos[i] and y.scope = line.scope;
            end if;`,
}
