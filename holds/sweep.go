package holds

import (
	"cmp"
	"context"
	"errors"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/internal/answer"
	"github.com/pgmetered/metered/internal/bounds"
	"github.com/pgmetered/metered/internal/commit"
	"github.com/pgmetered/metered/internal/fault"
	"github.com/pgmetered/metered/internal/savepoint"
	"github.com/pgmetered/metered/internal/sweep"
	"github.com/pgmetered/metered/observe"
)

// Expire names a hold that may be due.
type Expire struct {
	// Tenant is the hold's tenant.
	Tenant string

	// ID is the hold's id.
	ID string

	// Deadline is that of the hold when the job was scheduled. A hold that was extended since is
	// left alone.
	Deadline time.Time

	// Note is recorded, unless another write has ended the hold before.
	Note budget.Note
}

const expireSQL = `
select status, hold from metered.expire_hold($1::text, $2::text, $3::timestamptz, $4::timestamptz, $5::int, $6::text, $7::text)`

// Expire ends one hold that is due, announces it, and reports whether this call did: for a job at
// Hold.Due (jobs.Cleanup). Any other hold stays as it is. Errors: ErrUnknown, ErrRetired.
func (b *Book) Expire(ctx context.Context, tx pgx.Tx, e Expire) (h Hold, ended bool, err error) {
	if err := cmp.Or(b.made(), notNil("tx", tx)); err != nil {
		return Hold{}, false, err
	}
	if err := checkNames(e.Tenant, "", e.ID); err != nil {
		return Hold{}, false, err
	}
	if e.Deadline.IsZero() {
		return Hold{}, false, invalid("Expire.Deadline", "is zero")
	}
	if err := b.checkNote("Expire.Note", e.Note); err != nil {
		return Hold{}, false, err
	}
	type answer struct {
		hold  Hold
		ended bool
	}
	ctx, span := b.observer.Start(ctx, observe.Op{Work: observe.Call, Name: "holds.expire"})
	a, err := savepoint.In(ctx, tx, "holds", func(sub pgx.Tx) (a answer, err error) {
		a.hold, a.ended, err = b.expire(ctx, sub, e)
		if err == nil && a.ended {
			err = b.tell(ctx, sub, Transition{Kind: EventExpired, Hold: a.hold, Note: e.Note})
		}
		return a, err
	})
	if err == nil && a.ended {
		tellHolds(ctx, b.observer, string(EventExpired), []Hold{a.hold}, true)
	}
	span.End(err)
	return a.hold, a.ended, err
}

func (b *Book) expire(ctx context.Context, tx pgx.Tx, e Expire) (h Hold, ended bool, err error) {
	var raw []byte
	var status string
	err = answer.QueryRow(ctx, tx, b.sql.expire, e.Tenant, e.ID, issuedAt(e.ID), e.Deadline,
		b.waitMS(), inBudget.NoteJSON(e.Note), b.channel()).Scan(&status, &raw)
	switch {
	case err != nil:
		return Hold{}, false, failed("expire", err)
	case status == "unknown":
		return Hold{}, false, unknown(false)
	case status == "retired":
		return Hold{}, false, ErrRetired
	}
	err = h.decode(raw)
	return h, status == "expired", err
}

// SweepOptions configures Sweep. The zero value sweeps all due holds.
type SweepOptions struct {
	// Batch is the most holds that one transaction ends, from 1 to 10,000. Together they have at
	// most 2,000 scopes. A scope in which more than 25 holds are due is swept in transactions of
	// its own: the first frees the units of all these holds, or captures 25 minima and frees the
	// units of holds that fell due before the 26th. The others end the holds themselves, without the
	// scope's lock. In a wallet, each transaction ends at most 25 holds. Defaults to 500.
	Batch int

	// Max is the most batches. Defaults to no bound.
	Max int

	// Progress is called after each batch, with the report so far. It may be nil.
	Progress func(SweepReport)
}

// SweepReport counts holds.
type SweepReport struct {
	// Expired are the holds that were announced. Other writes may have ended them before.
	Expired int `json:"expired"`

	// Skipped are holds that others had locked. They are left for the next sweep.
	Skipped int `json:"skipped"`

	// Failed are holds whose subscriber failed. They are left for the next sweep.
	Failed int `json:"failed"`

	// Behind are scopes in which more holds are due than this sweep ended, because it came to
	// SweepOptions.Max, the scope was locked, or a step of it failed.
	Behind int `json:"behind"`

	// Batches are the transactions of the sweep.
	Batches int `json:"batches"`

	// ScannedAt is the time of the last batch.
	ScannedAt time.Time `json:"scanned_at,omitzero"`
}

// The clock is an argument so that it is read before the statement.
const sweepSQL = `
select s.nos, s.seen, s.last_due, s.last_no, s.more, s.skipped, s.behind, c.now
from (select metered.clock() as now offset 0) c,
    lateral metered.sweep_due($1::timestamptz, $2::bigint, $3::int, $4::bool and c.now is not null, $5::text) s`

const sweepScopeSQL = `
select s.nos, s.freed, s.more, c.now
from (select metered.clock() as now offset 0) c,
    lateral metered.sweep_scope($1::text, $2::int, $3::bool and c.now is not null, $4::text) s`

const announcedSQL = `select metered.announced($1::bigint[], $2::text)`

// Sweep ends and announces holds that are due, in batches. Run it every few seconds to a minute, in
// any number of processes. Errors of subscribers stop nothing, and are joined.
//
// Scopes with few due holds share transactions, and come first. A scope in which many are due is
// swept in steps, each in a transaction that locks that scope alone, or none, in turn with other such
// scopes and with holds that have fallen due since. What was committed stays when a later transaction
// fails or ctx ends.
//
// A hold is announced once, by the Book that ends it: use the application's Config.
func (b *Book) Sweep(ctx context.Context, pool *pgxpool.Pool, opts SweepOptions) (SweepReport, error) {
	if err := cmp.Or(b.made(), notNil("pool", pool)); err != nil {
		return SweepReport{}, err
	}
	if opts.Batch == 0 {
		opts.Batch = defaultSweepBatch
	}
	switch {
	case opts.Batch < 1 || opts.Batch > bounds.MaxSweepBatch:
		return SweepReport{}, invalid("SweepOptions.Batch", "%d is not from 1 to %d", opts.Batch,
			bounds.MaxSweepBatch)
	case opts.Max < 0:
		return SweepReport{}, invalid("SweepOptions.Max", "%d is negative", opts.Max)
	}
	s := sweeper{book: b, opts: opts, due: "-infinity"}
	ctx, span := b.observer.Start(ctx, observe.Op{Work: observe.Sweep})
	s.tellLag(ctx, pool)
	loop := sweep.Loop{Max: opts.Max, Of: "scope",
		Page: func(ctx context.Context, _ []string) ([]string, bool, error) { return s.page(ctx, pool) },
		Step: func(ctx context.Context, scope string) (bool, bool, error) { return s.step(ctx, pool, scope) },
	}
	left, errs := loop.Run(ctx)
	s.report.Behind = left
	err := errors.Join(append(s.refusals, errs...)...)
	span.With(observe.End{Err: err, Rows: int64(s.report.Expired)})
	return s.report, err
}

// tellLag reports the lateness of the oldest due hold to the observer. The look is for the observer
// alone: without one it is not made, and if it fails the sweep goes on.
func (s *sweeper) tellLag(ctx context.Context, pool *pgxpool.Pool) {
	if s.book.observer == nil {
		return
	}
	due, err := s.book.Due(ctx, pool, DueFilter{AllTenants: true, State: Expired, Max: 1})
	if err != nil {
		return
	}
	var lag time.Duration
	for _, h := range due.Holds {
		lag = max(lag, h.Now.Sub(h.Due))
	}
	s.book.observer.Event(ctx, observe.Event{Kind: observe.SweepLag, Name: "holds", Lag: lag})
}

// tell reports a committed batch to the observer.
func (s *sweeper) tell(ctx context.Context, expired, skipped, failed int) {
	for _, e := range []observe.Event{
		{Kind: observe.Hold, Name: string(EventExpired), N: int64(expired)},
		{Kind: observe.SweepSkipped, Name: "holds", N: int64(skipped)},
		{Kind: observe.SweepFailed, Name: "holds", N: int64(failed)},
	} {
		if e.N > 0 {
			s.book.observer.Event(ctx, e)
		}
	}
}

type sweeper struct {
	book     *Book
	opts     SweepOptions
	report   SweepReport
	refusals []error
	due      any // the due time of the last hold seen
	no       int64
}

// page ends holds of scopes that are not behind, and returns the others. It goes on
// after the last hold seen: it does not retry skipped holds, nor wade through the index entries of
// ended ones again.
func (s *sweeper) page(ctx context.Context, pool *pgxpool.Pool) (behind []string, more bool, err error) {
	var seen, skipped int
	var due *time.Time
	var no *int64
	var now time.Time
	told, refusals, err := s.batch(ctx, pool, func(tx pgx.Tx, subscribed bool) (nos []int64, err error) {
		err = answer.QueryRow(ctx, tx, s.book.sql.sweep, s.due, s.no, s.opts.Batch, subscribed,
			s.book.channel()).
			Scan(&nos, &seen, &due, &no, &more, &skipped, &behind, &now)
		return nos, err
	})
	if err != nil {
		return nil, false, err
	}
	if seen > 0 {
		s.due, s.no = *due, *no
	}
	s.add(ctx, told, skipped, refusals, now)
	return behind, more, nil
}

// step ends the first due holds of a scope that is behind, and reports whether others are due.
func (s *sweeper) step(ctx context.Context, pool *pgxpool.Pool, scope string) (more, left bool, err error) {
	var freed *int
	var now time.Time
	told, refusals, err := s.batch(ctx, pool, func(tx pgx.Tx, subscribed bool) (nos []int64, err error) {
		err = answer.QueryRow(ctx, tx, s.book.sql.sweepScope, scope, s.opts.Batch, subscribed,
			s.book.channel()).
			Scan(&nos, &freed, &more, &now)
		return nos, err
	})
	if err != nil {
		return false, false, err
	}
	s.add(ctx, told, 0, refusals, now)
	return more, freed == nil, nil // left: another call has locked it
}

// batch runs a transaction of the sweep, which ends holds, and announces these.
func (s *sweeper) batch(ctx context.Context, pool *pgxpool.Pool,
	sweep func(tx pgx.Tx, subscribed bool) ([]int64, error)) (told int, refusals []error,
	err error) {
	err = commit.InTx(ctx, pool, pgx.TxOptions{IsoLevel: pgx.ReadCommitted}, func(tx pgx.Tx) error {
		subscribed := len(s.book.cfg.Subscribers) > 0
		nos, err := sweep(tx, subscribed)
		if err != nil || !subscribed {
			told = len(nos)
			return err
		}
		told, refusals, err = s.announce(ctx, tx, nos)
		return err
	})
	if err != nil {
		return 0, nil, failed("sweep", err)
	}
	return told, refusals, nil
}

// add adds a committed batch to the report, and reports it to the observer and to Progress.
func (s *sweeper) add(ctx context.Context, told, skipped int, refusals []error, now time.Time) {
	s.report.Batches++
	s.report.ScannedAt = now.UTC()
	s.report.Expired += told
	s.report.Failed += len(refusals)
	s.report.Skipped += skipped
	s.refusals = append(s.refusals, refusals...)
	s.tell(ctx, told, skipped, len(refusals))
	if s.opts.Progress != nil {
		s.opts.Progress(s.report)
	}
}

const sweptSQL = `
select n.no, metered.hold_json(n.no, metered.clock()) from pg_catalog.unnest($1::bigint[]) n(no) order by n.no`

// announce calls the subscribers for each hold that was ended, in a savepoint of its own, and marks
// as announced the holds that all of them accepted.
func (s *sweeper) announce(ctx context.Context, tx pgx.Tx,
	nos []int64) (told int, refusals []error, err error) {
	type swept struct {
		no   int64
		hold Hold
	}
	rows, err := answer.Query(ctx, tx, s.book.schema.SQL(sweptSQL), nos)
	if err != nil {
		return 0, nil, err
	}
	all, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (sw swept, err error) {
		var raw []byte
		if err := row.Scan(&sw.no, &raw); err != nil {
			return sw, err
		}
		err = sw.hold.decode(raw)
		return sw, err
	})
	if err != nil {
		return 0, nil, err
	}
	accepted := make([]int64, 0, len(all))
	for _, sw := range all {
		_, err := savepoint.In(ctx, tx, "holds", func(sub pgx.Tx) (struct{}, error) {
			return struct{}{}, s.book.tell(ctx, sub,
				Transition{Kind: EventExpired, Hold: sw.hold, Note: sweeperNote})
		})
		var refusal *fault.Listener
		switch {
		case err == nil:
			accepted = append(accepted, sw.no)
		case ctx.Err() == nil && errors.As(err, &refusal):
			refusals = append(refusals, err)
		default:
			return 0, nil, err
		}
	}
	_, err = tx.Exec(ctx, s.book.sql.announced, accepted, s.book.channel())
	return len(accepted), refusals, err
}

// sweeperNote is the note of what sweeps and _end_due in schema.sql record.
var sweeperNote = budget.Note{Actor: "system"}
