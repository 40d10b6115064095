package budget

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/pgmetered/metered/internal/answer"
)

// lotsSQL finds differences in the lots of a wallet, from entry $2 on. Each lot equals the sum of
// its entries, and each move has the units after it. A lot has a rest, or with uses kept units. The
// lots add up to the last entry. Holds keep the same units of lots as of the scope. Each entry
// names its lots, and drew none that had ended. The units given back to a charge's lots are the
// units refunded.
const lotsSQL = `
with tip as (
    select * from metered.ledger y where y.scope = $1 order by y.seq desc limit 1
), lots as (
    select * from metered.lots y where y.scope = $1
), moves as (
    select * from metered.lot_moves y where y.scope = $1 and y.seq >= $2
), did as (
    select m.lot, coalesce(sum(m.amount) filter (where m.kind = 'd'), 0) as granted,
        coalesce(sum(case when m.kind in ('t', 'p', 'u') then m.amount when m.kind = 'g' then -m.amount end), 0) as drawn,
        coalesce(sum(case when m.kind in ('h', 'q') then m.amount when m.kind in ('u', 'f') then -m.amount end), 0) as held,
        coalesce(sum(m.amount) filter (where m.kind = 'e'), 0) as lapsed, coalesce(sum(case when m.kind in ('v', 'w') then m.amount when m.kind in ('n', 'm') then -m.amount end), 0) as revoked,
        coalesce(sum(case m.kind when 'w' then m.amount when 'm' then -m.amount end), 0) as withdrawn,
        coalesce(sum(m.amount) filter (where m.kind = 'o'), 0) as rolled,
        coalesce(sum(m.amount) filter (where m.kind = 'g'), 0) as given, sum(m.back) as back
    from moves m group by m.lot
), freed as (
    select l.opened_seq as seq from metered.hold_lines l, tip t
    where l.scope = $1 and l.open <> 0 and (l.due >= t.next_due) is not true and l.due <= t.at
), kept as (
    select * from metered.lot_holds y where y.scope = $1 and y.seq not in (select f.seq from freed f)
), opened as (
    select l.opened_seq as seq, l.open as units from metered.hold_lines l
    where l.scope = $1 and l.open <> 0 and l.opened_seq not in (select f.seq from freed f)
    union all
    select y.opened_seq, y.granted from metered.leases y where y.scope = $1 and y.settled_at is null and y.mode <> 'g'
)
select l.granted_seq, 'lot ' || l.no, format('%s rest, %s drawn, %s held, %s lapsed, %s revoked, %s rolled over', l.rest, l.drawn, l.held, l.lapsed, l.revoked, l.rolled),
    format('%s in all, none negative', l.amount)
from lots l
where l.rest + l.drawn + l.held + l.lapsed + l.revoked + l.rolled + l.pending + l.kept <> l.amount
   or case when (l.plan).uses is null then l.kept else l.rest end <> 0
   or least(l.kept, l.pending, l.rest, l.drawn, l.held, l.lapsed, l.revoked, l.rolled, l.untold, l.lapsed - l.untold) < 0 or (l.open, l.keeps) <> (l.rest > 0, l.kept > 0)
union all
select t.seq, 'rests of lots', coalesce(s.rest, 0)::text, greatest(0, t.credited - t.spent + t.refunded - t.held)::text
from tip t, (select sum(l.rest) as rest from lots l) s
where t.lots_end is not null and coalesce(s.rest, 0) <> t.credited - t.spent + t.refunded - t.held + case when t.lots_end <= t.at
        then (select coalesce(sum(k.amount), 0) from kept k where k.lot = 0) else greatest(0, t.spent + t.held - t.credited - t.refunded) end
   or t.lots_end is null and s.rest is not null
union all
select t.seq, 'overdrawn', k.amount::text, case when k.seq = 0 then 'none, where all lots are written that have ended' else 'more than 0' end
from tip t, kept k where k.seq = 0 and (t.lots_end > t.at) or k.amount < 1
union all
select t.seq, 'overdrawn', k.units::text, '0, where lots have a rest that have not ended'
from tip t, (select sum(k.amount) as units from kept k where k.lot = 0) k
where t.lots_end <= t.at and k.units > 0 and exists (select from lots l where l.open and l.expires_at > t.at)
union all
select t.seq, 'lots_end', to_json(t.lots_end) #>> '{}', 'at most ' || (to_json(l.expires_at) #>> '{}')
from tip t, lots l where (l.open or l.kept > 0 and l.expires_at > t.at) and t.lots_end > l.expires_at or l.pending > 0 and t.lots_end > l.starts_at
union all
select l.granted_seq, 'held of lot ' || l.no, l.held::text, coalesce(k.units, 0)::text
from lots l left join (select k.lot, sum(k.amount) as units from kept k group by k.lot) k on k.lot = l.no
where l.held <> coalesce(k.units, 0)
union all
select coalesce(o.seq, k.seq), 'held of lots', coalesce(k.units, 0)::text, coalesce(o.units, 0)::text
from tip t, opened o full join (select k.seq, sum(k.amount) as units from kept k where k.seq > 0 group by k.seq) k on k.seq = o.seq
where t.lots_end is not null and o.units is distinct from k.units
union all
select t.seq, 'held of no lot', k.units::text, 'at most ' || greatest(0, t.spent + t.held - t.credited - t.refunded)
from tip t, (select sum(k.amount) as units from kept k where k.lot = 0) k
where k.units > greatest(0, t.spent + t.held - t.credited - t.refunded) and t.lots_end > t.at
union all
select t.seq, 'overdrawn for uses', d.units::text, 'at most ' || d.spent || ', each more than 0'
from tip t, (select sum(y.amount) as units, min(y.amount) as least,
        (select case when t.lots_end <= t.at then coalesce((select k.amount from kept k where k.seq = 0 and k.lot = 0), 0)
            else greatest(0, t.spent + t.held - t.credited - t.refunded) - coalesce((select sum(k.amount) from kept k where k.seq > 0 and k.lot = 0), 0) end
         from tip t) as spent
    from metered.lot_debts y where y.scope = $1) d
where d.units > d.spent or d.least < 1
union all
select e.seq, 'moves of lots', coalesce(m.units, 0)::text, e.amount::text
from metered.ledger e
    left join lateral (select sum(m.amount) as units from metered.lot_moves m
        where m.scope = e.scope and m.seq = e.seq and m.kind = case e.kind when 'c' then 't' when 'r' then 'g' when 'l' then 'f' when 'x' then 'f' when 's' then m.kind
            when 'd' then case when m.kind in ('a', 'n') then m.kind else e.kind end when 'o' then case when m.kind = 'b' then m.kind else e.kind end else e.kind end
            and (e.kind <> 's' or m.kind in ('s', 'w', 'm') or exists (select from metered.lot_rows y where y.no = m.lot and (y.plan).uses is not null))) m on true
    left join (select l.granted_seq as seq, sum(l.amount) as units from lots l where l.origin = 'c' group by l.granted_seq) c on c.seq = e.seq and e.kind = 'r'
where e.scope = $1 and e.seq >= $2 and e.lots_end is not null and e.kind not in ('k', 'z') and coalesce(m.units, 0) + coalesce(c.units, 0) <> e.amount
union all
select l.granted_seq, 'moves of lot ' || l.no, format(l.told, m.granted, m.drawn, m.held, m.lapsed, m.revoked, m.rolled),
    format(l.told, l.amount - l.pending, l.drawn, l.held, l.lapsed, l.revoked, l.rolled)
from (select *, '%s granted, %s drawn, %s held, %s lapsed, %s revoked, %s rolled over' as told from lots) l left join did m on m.lot = l.no
where l.granted_seq >= $2 and ((coalesce(m.drawn, 0), coalesce(m.lapsed, 0), coalesce(m.revoked, 0), coalesce(m.rolled, 0)) <> (l.drawn, l.lapsed, l.revoked, l.rolled)
    -- A lot made after an entry of something else has no move, nor have the units that were held of it then.
    or l.origin <> 'c' and (coalesce(m.granted, 0), coalesce(m.held, 0)) <> (l.amount - l.pending - coalesce(m.withdrawn, 0), l.held))
union all
select l.granted_seq, 'given back to lot ' || l.no, m.given::text, m.back::text
from lots l join did m on m.lot = l.no
where l.granted_seq >= $2 and m.given <> m.back
union all
select m.seq, 'units after a move of lot ' || m.lot, format(m.told, m.version, m.rest + m.kept, m.drawn, m.held), format(m.told, m.last + 1, m.units, m.spent, m.hold)
from (select y.*, '%s: %s rest, %s drawn, %s held' as told, lag(y.version) over w as last,
        lag(y.rest + y.kept) over w + case when y.kind in ('d', 'g', 'f', 'n') then y.amount when y.kind in ('t', 'p', 'h', 'q', 'e', 'v', 'o') then -y.amount else 0 end as units,
        lag(y.drawn) over w + case when y.kind in ('t', 'p', 'u') then y.amount when y.kind = 'g' then -y.amount else 0 end as spent,
        lag(y.held) over w + case when y.kind in ('h', 'q') then y.amount when y.kind in ('u', 'f') then -y.amount else 0 end as hold
    from moves y where y.version is not null window w as (partition by y.lot order by y.version)) m
where (m.version, m.rest + m.kept, m.drawn, m.held) <> (m.last + 1, m.units, m.spent, m.hold) or least(m.rest, m.kept, m.drawn, m.held) < 0
union all
select m.seq, 'moves of lots', 'of lot ' || m.lot, 'of a lot of the wallet'
from moves m left join lots l on l.no = m.lot
where m.lot <> 0 and l.no is null
union all
select m.seq, 'drawn of lot ' || m.lot, to_json(e.at) #>> '{}', 'before its end, ' || (to_json(l.expires_at) #>> '{}')
from moves m join lots l on l.no = m.lot join metered.ledger e on e.scope = m.scope and e.seq = m.seq
where m.kind in ('t', 'p', 'h', 'q') and e.at >= l.expires_at
  -- An entry counts as made no later than a clock repair after it.
  and not exists (select from metered.ledger r where r.scope = $1 and r.seq > m.seq and r.kind = 'k' and r.at < l.expires_at)
union all
select m.seq, 'given back to lots', m.back::text, coalesce(r.amount, 0)::text
from (select m.seq, sum(m.back) as back, bool_or(m.back not between 0 and m.amount) as wrong from moves m where m.kind in ('t', 'u') group by m.seq) m
    left join metered.refund_sum r on r.scope = $1 and r.level = 0 and r.block = m.seq
where m.back <> coalesce(r.amount, 0) or m.wrong`

// carriedSQL finds entries, from $2 on, that lost a field that they should have copied from the
// entry before: lots_end, or the thresholds already reported. A release or an expiry leaves these
// as they are. A credit or a refund only arms some again, but for units that are applied to a use,
// whose entry has the thresholds of the charge after it, and for a lot that begins, whose entry may
// have those that the call crosses that writes it.
const carriedSQL = `
select e.seq, 'lots_end', 'none', 'one, as before'
from (select y.seq, y.lots_end, lag(y.lots_end) over (order by y.seq) as before from metered.ledger y where y.scope = $1 and y.seq >= $2) e
where e.lots_end is null and e.before is not null
union all
select e.seq, 'crossed', coalesce(e.crossed::text, 'none'), coalesce(e.before::text, 'none') || case when e.kind in ('d', 'r') then ', or less' else '' end
from (select y.seq, y.kind, y.crossed, lag(y.crossed) over w as before, lag(y.seq) over w is null as first
    from metered.ledger y where y.scope = $1 and y.seq >= $2 window w as (order by y.seq)) e
where not e.first and (e.kind in ('l', 'x', 'z') and e.crossed is distinct from e.before
    or e.kind in ('d', 'r') and not coalesce(e.before, '{}') @> coalesce(e.crossed, '{}')
        and not exists (select from metered.lot_moves m left join metered.lot_rows y on y.no = m.lot
            where m.scope = $1 and m.seq = e.seq and (m.kind = 'a' or m.kind = 'd' and y.starts_at is not null)))
order by 1`

// anyLotsSQL is whether a scope has anything of a wallet. It spares the others lotsSQL, which takes
// long to plan.
const anyLotsSQL = `
select exists (select from metered.lots y where y.scope = $1) or exists (select from metered.lot_moves y where y.scope = $1)
    or exists (select from metered.lot_holds y where y.scope = $1) or exists (select from metered.ledger y where y.scope = $1 and y.lots_end is not null)`

// lots checks the lots of a wallet, and the fields that entries copy.
func (v *verification) lots(ctx context.Context, tx pgx.Tx, scope string, first int64) error {
	var wallet bool
	if err := answer.QueryRow(ctx, tx, v.ledger.sql.anyLots, scope).Scan(&wallet); err != nil {
		return failed("verify lots", err)
	}
	for _, sql := range []string{v.ledger.sql.lots, v.ledger.sql.carried} {
		args := []any{scope, first}
		if sql == v.ledger.sql.lots {
			if !wallet {
				continue
			}
			args = []any{pgx.QueryExecModeExec, scope, first} // planned for the wallet
		}
		rows, err := answer.Query(ctx, tx, sql, args...)
		if err != nil {
			return failed("verify lots", err)
		}
		var seq int64
		var field, got, want string
		_, err = pgx.ForEachRow(rows, []any{&seq, &field, &got, &want}, func() error {
			v.differs(Entry{Scope: scope, Seq: seq}, field, got, want)
			return nil
		})
		if err != nil {
			return failed("verify lots", err)
		}
	}
	if !wallet {
		return nil
	}
	return v.zones(ctx, tx, scope)
}

// zonesSQL has the zones that plans of a wallet still need.
const zonesSQL = `
select y.granted_seq, y.no, z.zone
from metered.lot_rows y, lateral (values (((y.plan).renews).zone), (((y.plan).roll_to).zone)) z(zone)
where y.scope = $1 and z.zone is not null and (y.pending > 0 or y.open or y.keeps)
  and (((y.plan).renews).every is not null or (y.plan).roll_again <> 0)
order by y.no`

const knownZonesSQL = `select pg_catalog.lower(n.name) from pg_catalog.pg_timezone_names n`

// zones finds plans of a zone that the server has lost. It asks for the server's zones once, which
// takes long.
func (v *verification) zones(ctx context.Context, tx pgx.Tx, scope string) error {
	type need struct {
		Seq, Lot int64
		Zone     string
	}
	rows, _ := answer.Query(ctx, tx, v.ledger.sql.zones, scope)
	needs, err := pgx.CollectRows(rows, pgx.RowToStructByPos[need])
	if err != nil {
		return failed("verify zones", err)
	}
	if len(needs) > 0 && v.known == nil {
		rows, _ := answer.Query(ctx, tx, knownZonesSQL)
		if v.known, err = pgx.CollectRows(rows, pgx.RowTo[string]); err != nil {
			return failed("verify zones", err)
		}
	}
	for _, n := range needs {
		if !slices.Contains(v.known, strings.ToLower(n.Zone)) {
			v.differs(Entry{Scope: scope, Seq: n.Seq}, fmt.Sprintf("zone of lot %d", n.Lot), n.Zone,
				"one that the server knows")
		}
	}
	return nil
}
