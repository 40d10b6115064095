package orders

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
)

// answer is the word of a call's error, as the documentation has it.
func answer(err error) string {
	var pg *pgconn.PgError
	switch {
	case err == nil:
		return ok
	case errors.As(err, &pg) && pg.Code == "MT003": // of a statement that no package sends for the test
		return "budget_clock"
	case metered.Retryable(err):
		if errors.As(err, &pg) && pg.Code == "40P01" {
			return "deadlock"
		}
		return again
	case metered.Code(err) != "":
		return metered.Code(err)
	}
	return err.Error()
}

// stateSQL reads the state of a world, and looks whether each entry follows from the one before.
const stateSQL = `
with chain as (
    select scope, seq, kind, amount, at, spent, refunded, credited, held, epoch,
        lag(seq) over p as seq0, lag(spent) over p as spent0, lag(refunded) over p as refunded0, lag(held) over p as held0, lag(at) over p as at0, lag(epoch) over p as epoch0
    from metered.ledger where scope = any (array[$1 || '/s', $1 || '/t', $1 || '/w', $1 || '/child'])
    window p as (partition by scope order by seq)),
tips as (select distinct on (scope) * from chain order by scope, seq desc),
sums as (
    select n.name, coalesce(t.spent, 0) spent, coalesce(t.refunded, 0) refunded, coalesce(t.credited, 0) credited,
        coalesce(t.held, 0) - coalesce((select sum(l.open) from metered.hold_lines l where l.scope = t.scope and l.due <= metered.clock()), 0) held
    from (values ('s'), ('t'), ('w'), ('child')) n(name) left join tips t on t.scope = $1 || '/' || n.name)
select
    (select string_agg(case name when 'w' then format('w spent=%s; ', spent)
        else format('%s spent=%s refunded=%s credited=%s held=%s; ', name, spent, refunded, credited, held) end, '' order by array_position('{s,t,w,child}', name)) from sums)
    || (select string_agg(format('%s=%s ', i.id, case when h.state = 'h' and h.due <= metered.clock() then 'x' else h.state::text end), '' order by i.n)
        from (values (1, 'capture'), (2, 'due'), (3, 'place')) i(n, id) left join metered.holds h on h.tenant = $1 and h.id = i.id)
    || format('jobs=%s,%s uses=%s revoked=%s lots=%s,%s,%s done=%s lease=%s reports=%s claims=%s',
        (select count(*) from metered.holds h where h.tenant = $1 and h.id like 'job/%' and h.state = 'h'),
        (select count(distinct j.job_id) from metered.parked_jobs j where j.tenant = $1),
        (select coalesce(sum(t.uses - t.used) filter (where t.ended_at is null), 0) from metered.tokens t where t.subject = $1),
        (select count(*) from metered.tokens t where t.subject = $1 and t.revoked),
        (select coalesce(sum(l.rest), 0) from metered.lots l left join metered.lots f on f.no = l.from_lot where l.scope = $1 || '/w' and coalesce(f.reference, l.reference) = 'a' and l.expires_at > metered.clock()),
        (select coalesce(sum(l.rest), 0) from metered.lots l where l.scope = $1 || '/w' and l.reference = 'c' and l.expires_at > metered.clock()),
        (select coalesce(sum(l.kept), 0) from metered.lots l where l.scope = $1 || '/w' and l.reference = 'u' and l.expires_at > metered.clock()),
        (select count(*) from metered.operations o where o.tenant = $1) + (select count(*) from metered.job_keys k where k.tenant = $1),
        (select coalesce(max(case when l.settled_at is null then 'open' else 'settled' end), '') || '/' ||
            coalesce(sum((select coalesce(sum(x.amount), 0) from metered.lease_spends x where x.lease = l.no)), 0) from metered.leases l where l.scope = $1 || '/s' and l.owner = 'me'),
        (select count(*) from reports r where r.scope = any (array[$1 || '/s', $1 || '/t', $1 || '/w', $1 || '/child'])),
        (select count(*) from metered.holds h where h.tenant = $1 and h.claim is not null and h.state = 'h')),
    (select count(*) from chain where seq0 > 1 and (seq <> seq0 + 1 or epoch < epoch0 or epoch = epoch0 and at < at0
        or spent <> spent0 + case when kind in ('c', 'u') then amount else 0 end
        or refunded <> refunded0 + case when kind = 'r' then amount else 0 end
        or held < 0)),
    (select count(*) from metered.parked_jobs j where j.scope in ($1 || '/s', $1 || '/t')),
    (select count(*) from river_job j where j.state = 'pending' and not exists (
        select from metered.parked_jobs p where p.job_id = j.id and p.job -> 'metadata' ->> 'metered:hold' = j.metadata ->> 'metered:hold'))
    + (select count(*) from metered.parked_jobs p where p.job ? 'again' and not exists (
        select from river_job j where j.state = 'pending' and j.id = p.job_id and p.job -> 'metadata' ->> 'metered:hold' = j.metadata ->> 'metered:hold'))
    + (select count(*) from metered.holds h where h.id like 'job/%' and h.state = 'h' and not exists (
        select from river_job j where j.state <> 'pending' and j.finalized_at is null and j.metadata ->> 'metered:hold' = h.id))
    + (select count(*) from metered.parked_scopes y where y.waiting <> (select count(*) from metered.parked_jobs p where p.scope = y.scope))`

// stuckSQL counts jobs that fit, in a line that nobody is to look at.
const stuckSQL = `
select count(*) from metered.parked_scopes p, metered.parked_jobs j, metered.check_charge(j.charges::metered.new_charge[], '1 minute') c
where p.scope = any ($1) and j.scope = p.scope and p.wake_at > metered.clock() and c.refused is null`

// unfedSQL counts the scopes of which not each entry was consumed once.
const unfedSQL = `
select count(*) from (select scope, count(*) as n, max(seq) as last from fed group by scope) f
full join (select scope, max(seq) as last from metered.ledger group by scope) l using (scope)
where f.n is distinct from l.last or f.last is distinct from l.last`

// unfed consumes the rest of the feed, if somebody has begun, and takes it back.
func (w *world) unfed(ctx context.Context, db *pgxpool.Pool) (scopes int64, err error) {
	tx, err := db.Begin(ctx)
	if err != nil {
		return 0, err
	}
	defer func() { _ = tx.Rollback(ctx) }()
	var begun bool
	if err := tx.QueryRow(ctx, "select exists (select from fed)").Scan(&begun); err != nil || !begun {
		return 0, err
	}
	if err := errors.Join(w.number(ctx, tx), w.consume(ctx, tx, 1000)); err != nil {
		return 0, err
	}
	err = tx.QueryRow(ctx, unfedSQL).Scan(&scopes)
	return scopes, err
}

func (w *world) state(ctx context.Context, db *pgxpool.Pool) (text string, err error) {
	var broken, parked, lost, stuck int64
	if err := db.QueryRow(ctx, stateSQL, w.name).Scan(&text, &broken, &parked, &lost); err != nil {
		return "", err
	}
	if w.model.due != nil {
		due, err := w.dueState(ctx, db)
		if err != nil {
			return "", err
		}
		text += due
	}
	if w.model.scopes["p"] != nil {
		u, err := w.ledger.Usage(ctx, db, budget.Query{Scope: w.scope("p")})
		if err != nil {
			return "", err
		}
		text += pileText(u[0].Spent, u[0].Held)
	}
	if lost > 0 {
		text += fmt.Sprintf(" and %d jobs stand in no line and are not started, or have a hold and are none of River's", lost)
	}
	unfed, err := w.unfed(ctx, db)
	if err != nil {
		return "", err
	}
	if unfed > 0 {
		text += fmt.Sprintf(" and %d scopes are not whole in the feed", unfed)
	}
	if broken > 0 {
		text += fmt.Sprintf(" and %d entries do not follow from the ones before", broken)
	}
	if parked == 0 {
		return text, nil
	}
	if err := db.QueryRow(ctx, stuckSQL, []string{w.scope("s"), w.scope("t")}).Scan(&stuck); err != nil && answer(err) != "budget_clock" {
		return "", err
	}
	if stuck > 0 {
		text += fmt.Sprintf(" and %d jobs fit that nobody will look at", stuck)
	}
	return text, nil
}
