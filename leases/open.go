package leases

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/internal/answer"
	"github.com/pgmetered/metered/internal/fault"
	"github.com/pgmetered/metered/internal/ledger"
	"github.com/pgmetered/metered/internal/pause"
	"github.com/pgmetered/metered/internal/schema"
	"github.com/pgmetered/metered/internal/sweep"
	"github.com/pgmetered/metered/observe"
)

// statements are the package's SQL, rendered for one schema.
type statements struct{ charge, spend, direct, open, settle, due, history, spends string }

const (
	chargeSQL = `
select seqs, ats, used, held, refused, periods, crossed
from metered.charge_leased($1::metered.new_charge[], $2::interval, $3::int, null, 'answer', $4::bool)`
	spendSQL  = `select metered.spend($1::bigint, $2::bigint, $3::bigint, $4::bigint, $5::text, $6::jsonb)`
	directSQL = `
select seqs, ats, used, held, refused, periods, crossed
from metered.charge($1::metered.new_charge[], $2::interval, $3::int, $4::bool)`
	openSQL = `
select no, fence, granted, used, coalesce(held, 0), coalesce(lasts_us, 0), periods, crossed
from metered.open_lease(($1::metered.new_charge[])[1], $2::metered.lease_terms, $3::interval, $4::int)`
	settleSQL = `
select status, granted, spent, crossed
from metered.settle_lease($1::bigint, $2::text, $3::bigint, $4::int, (($5::metered.new_charge[])[1]).limits, $6::interval)`
	dueSQL = `
select no, ends_at from metered.leases
where settled_at is null and mode in ('s', 'm') and ends_at <= (select metered.clock()) and ends_at >= $1 and (ends_at, no) > ($1, $2)
order by ends_at, no limit $3`
)

func render(n schema.Name) statements {
	return statements{
		charge: n.SQL(chargeSQL), spend: n.SQL(spendSQL), direct: n.SQL(directSQL),
		open: n.SQL(openSQL), settle: n.SQL(settleSQL), due: n.SQL(dueSQL),
		history: n.SQL(historySQL), spends: n.SQL(spendsSQL),
	}
}

// open opens a lease for a slot, or returns nil without an error if too few units are left.
func (p *Pool) open(ctx context.Context, s *slot) (_ *slice, err error) {
	ctx, span := p.observer.Start(ctx, observe.Op{Work: observe.Lease, Name: "open"})
	defer func() { span.End(err) }()
	s.mu.Lock()
	size := s.size()
	s.mu.Unlock()
	mode := "rows"
	if s.memory {
		mode = "memory"
	}
	terms := ledger.LeaseTerms{Mode: mode, Owner: p.cfg.Owner, Least: s.rule.MinSlice,
		Share: s.rule.Share, TTL: s.rule.TTL}
	call, err := inBudget.Charges(p.ledger,
		budget.Charge{Scope: s.scope, Amount: size, Limits: s.limits, MustExist: s.mustExist,
			Note: p.note()})
	if err != nil {
		return nil, err
	}
	asked := time.Now()
	got := &slice{}
	var no, fence *int64
	var used []int64
	var held, lasts int64
	var periods ledger.Periods
	var crossed []byte
	scan := func(row pgx.Row) error {
		return row.Scan(&no, &fence, &got.granted, &used, &held, &lasts, &periods, &crossed)
	}
	args := func(telling bool) []any {
		return []any{ledger.Charges(ledger.Telling(call.Charges, telling)), terms.String(),
			call.Tolerance, int32(p.wait / time.Millisecond)}
	}
	err = p.silently(ctx, p.own, p.sql.open, args, scan,
		func(tx pgx.Tx) error { return call.Cross(ctx, tx, crossed) })
	if known := call.Failed(err); err != nil && fault.Code(known) != "" {
		return nil, known
	}
	if err != nil {
		return nil, failed("open a lease", err)
	}
	if no == nil || got.granted == 0 {
		return nil, nil
	}
	// A tenth less than the database gives, for clocks that run at different speeds.
	life := time.Duration(lasts) * time.Microsecond * 9 / 10
	got.no, got.fence, got.opened, got.ends, got.endsWall = *no, *fence, time.Now(),
		asked.Add(life), asked.Add(life).UnixNano()
	got.seenAt = got.opened
	stands := &standing{slice: got}
	for i, limit := range s.limits {
		of := budget.Standing{Limit: limit, Used: used[i], Held: held,
			Available: max(0, limit.Max-used[i]-held)}
		if !limit.Period.IsZero() {
			of.PeriodStart, of.PeriodEnd = periods.Next()
		}
		stands.of = append(stands.of, of)
	}
	s.stands.Store(stands)
	p.keep()
	p.observer.Event(ctx, observe.Event{Kind: observe.Slice, Name: "opened", N: got.granted})
	return got, nil
}

// call makes a call in a transaction of its own at READ COMMITTED, in one round trip, and again
// after a collision.
func (p *Pool) call(ctx context.Context, db *pgxpool.Pool,
	scan func(pgx.Row) error, sql string, args ...any) error {
	return pause.Collided(ctx, p.observer, "leases", maxTries, func() error {
		batch := &pgx.Batch{}
		batch.Queue("begin isolation level read committed")
		pins := answer.Textual(db)
		if pins {
			batch.Queue(answer.PinSQL)
		}
		batch.Queue(sql, args...)
		batch.Queue("commit")
		results := db.SendBatch(ctx, batch)
		_, err := results.Exec()
		if err == nil && pins {
			_, err = results.Exec()
		}
		if err == nil {
			err = scan(results.QueryRow())
		}
		if closing := results.Close(); err == nil {
			err = closing
		}
		return err
	})
}

// silently makes a call in a transaction of its own. If it crosses thresholds, cross reports them
// before it commits.
func (p *Pool) silently(ctx context.Context, db *pgxpool.Pool, sql string,
	args func(telling bool) []any, scan func(pgx.Row) error, cross func(pgx.Tx) error) error {
	return sweep.Through(ctx, db, p.schema, p.wait, func() error {
		return ledger.Silently(func(telling bool) error {
			if !telling {
				return p.call(ctx, db, scan, sql, args(false)...)
			}
			return retried(ctx, p.observer, db, func(tx pgx.Tx) error {
				if err := scan(answer.QueryRow(ctx, tx, sql, args(true)...)); err != nil {
					return err
				}
				return cross(tx)
			})
		})
	})
}
