package schema

import "maps"

// The macros of the full functions, by which _write_charges and capture_holds are read by subject.
// They name the arguments and variables of these functions. A function of PL/pgSQL in their place
// would cost each call more than it runs.
func init() {
	maps.Copy(templates, chargeMacros)
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
                tip := metered._fold(tip);
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
            tip := metered._settle(tip, at, metered._ends_per_call(), charge.amount, wait_ms);
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
