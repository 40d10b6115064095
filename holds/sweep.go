package holds

import (
	"cmp"
	"context"
	"errors"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgmetered/metered/budget"
)

// ExpireStatus is what Expire found.
type ExpireStatus string

// The answers of Expire. All but the first changed nothing.
const (
	ExpiredNow      ExpireStatus = "expired"   // its time was over: it has ended, and was announced
	ExpiredBefore   ExpireStatus = "ended"     // the same, by an earlier call
	AlreadyCaptured ExpireStatus = "captured"  // it was captured
	AlreadyReleased ExpireStatus = "released"  // it was released
	WasExtended     ExpireStatus = "extended"  // its deadline is another one
	NotDue          ExpireStatus = "due_later" // its time is not over yet
)

// Expire names a hold to end, if its time is over.
type Expire struct {
	Tenant string
	ID     string
	// Deadline is the deadline it was given: if it has another by now, it was extended.
	Deadline time.Time
	// Note is what subscribers hear. It is recorded in the history, and with the ledger's
	// entries, if this call is what ends the hold: one that a charge or placement saw
	// through before was ended, and recorded, by System.
	Note budget.Note
}

const expireSQL = `
select status, hold from metered.expire_hold($1::text, $2::text, $3::timestamptz, $4::timestamptz, $5::int, $6::text, $7::text)`

// Expire ends one hold whose time is over, and tells subscribers and listeners so,
// for a job that was scheduled when the hold was placed. If it was captured, released,
// extended or ended meanwhile, or is not due, nothing is done, and that is no error:
// the call can be repeated at will. What a hold keeps is free when it is due, whether
// Expire is called or not.
//
// Locks and rollback are those of Release. Errors: *ArgumentError; ErrUnknown and
// ErrRetired leave tx usable; ErrBusy, SQLSTATE 40001 and 40P01 abort it.
func (b *Book) Expire(ctx context.Context, tx pgx.Tx, e Expire) (Hold, ExpireStatus, error) {
	if err := cmp.Or(b.made(), notNil("tx", tx)); err != nil {
		return Hold{}, "", err
	}
	if err := checkNames(e.Tenant, "", e.ID); err != nil {
		return Hold{}, "", err
	}
	if e.Deadline.IsZero() {
		return Hold{}, "", invalid("Expire.Deadline", "is zero")
	}
	if err := checkNote("Expire.Note", e.Note); err != nil {
		return Hold{}, "", err
	}
	type answer struct {
		hold   Hold
		status ExpireStatus
	}
	a, err := inSavepoint(ctx, tx, func(sub pgx.Tx) (a answer, err error) {
		a.hold, a.status, err = b.expire(ctx, sub, e)
		if err == nil && a.status == ExpiredNow {
			err = b.tell(ctx, sub, Transition{Kind: EventExpired, Hold: a.hold, Note: e.Note})
		}
		return a, err
	})
	return a.hold, a.status, err
}

func (b *Book) expire(ctx context.Context, tx pgx.Tx, e Expire) (h Hold, status ExpireStatus, err error) {
	var raw []byte
	var text string
	err = tx.QueryRow(ctx, b.sql.expire, e.Tenant, e.ID, issuedAt(e.ID), e.Deadline, b.waitMS(), e.Note.JSON(), b.channel()).Scan(&text, &raw)
	switch {
	case err != nil:
		return Hold{}, "", failed("expire", err)
	case text == "unknown":
		return Hold{}, "", unknown(ReasonUnknown)
	case text == "retired":
		return Hold{}, "", ErrRetired
	}
	err = h.decode(raw)
	return h, ExpireStatus(text), err
}

// Bounds of a Sweep.
const (
	DefaultSweepBatch = 500
	MaxSweepBatch     = 10_000
)

// SweepOptions says how Sweep works. The zero value sweeps all that is due, 500
// holds in a transaction.
type SweepOptions struct {
	// Batch is how many holds one transaction ends, 1 to MaxSweepBatch; fewer where
	// these have more than 2,000 scopes, whose locks it takes. Defaults to
	// DefaultSweepBatch.
	Batch int
	// Max ends the sweep after so many batches. Defaults to 0, all.
	Max int
	// Progress is called after each batch, once it is committed. Defaults to none.
	Progress func(SweepReport)
}

// SweepReport says what a sweep did.
type SweepReport struct {
	// Expired holds were ended, freed and announced; those among them that somebody
	// had seen through before included.
	Expired int `json:"expired"`
	// Skipped holds were in use by somebody else, and are left for the next sweep.
	Skipped int `json:"skipped"`
	// Failed holds are those whose subscriber returned an error: they have ended, and
	// will be announced again by the next sweep.
	Failed int `json:"failed"`
	// Batches is how many transactions it took.
	Batches int `json:"batches"`
}

const sweepSQL = `
select nos, seen, last_due, last_no, more from metered.sweep_holds($1::timestamptz, $2::bigint, $3::int, $4::bool, $5::text)`

const announcedSQL = `select metered.announced($1::bigint[], $2::text)`

// Sweep ends the holds whose time is over, writes so down, and tells subscribers and
// listeners. It is cleanup: what they kept is free already. Run it now and then (a few
// seconds to a minute apart): from a River periodic job, a ticker, or cron; see the
// examples. Any number may run at the same time: they wait for nobody, and nobody
// waits for them longer than for one batch.
//
// Use a Book with the application's Config, also in a program that does nothing else: a
// hold is announced once, to the subscribers of the Book that sweeps, and to listeners if
// that has Notify. One without them marks what it ends as announced for good, and nobody
// ever hears of it. That holds for Expire as well.
//
// It owns its transactions, at READ COMMITTED, one for each batch. An error, or the
// end of ctx, leaves what was done until then, which is reported with it. The errors
// of subscribers are joined and returned at the end, and stop nothing.
func (b *Book) Sweep(ctx context.Context, pool *pgxpool.Pool, opts SweepOptions) (SweepReport, error) {
	if err := cmp.Or(b.made(), notNil("pool", pool)); err != nil {
		return SweepReport{}, err
	}
	if opts.Batch == 0 {
		opts.Batch = DefaultSweepBatch
	}
	switch {
	case opts.Batch < 1 || opts.Batch > MaxSweepBatch:
		return SweepReport{}, invalid("SweepOptions.Batch", "%d is not from 1 to %d", opts.Batch, MaxSweepBatch)
	case opts.Max < 0:
		return SweepReport{}, invalid("SweepOptions.Max", "%d is negative", opts.Max)
	}
	s := sweeper{book: b, opts: opts, due: "-infinity"}
	for {
		more, err := s.batch(ctx, pool)
		if err != nil {
			return s.report, errors.Join(append(s.refusals, err)...)
		}
		if opts.Progress != nil {
			opts.Progress(s.report)
		}
		if !more || s.report.Batches == opts.Max {
			return s.report, errors.Join(s.refusals...)
		}
	}
}

type sweeper struct {
	book     *Book
	opts     SweepOptions
	report   SweepReport
	refusals []error
	due      any // of the last hold seen
	no       int64
}

// batch sweeps one batch, and reports whether there may be more. It goes on after the
// last hold seen: what was skipped is not tried again, and the index entries of what
// has ended are not waded through again.
func (s *sweeper) batch(ctx context.Context, pool *pgxpool.Pool) (more bool, err error) {
	var nos []int64
	var seen int
	var due *time.Time
	var no *int64
	var refusals []error
	told := 0
	err = pgx.BeginTxFunc(ctx, pool, pgx.TxOptions{IsoLevel: pgx.ReadCommitted}, func(tx pgx.Tx) error {
		subscribed := len(s.book.cfg.Subscribers) > 0
		err := tx.QueryRow(ctx, s.book.sql.sweep, s.due, s.no, s.opts.Batch, subscribed, s.book.channel()).Scan(&nos, &seen, &due, &no, &more)
		if err != nil || !subscribed {
			told = len(nos)
			return err
		}
		told, refusals, err = s.announce(ctx, tx, nos)
		return err
	})
	if err != nil {
		return false, failed("sweep", err)
	}
	s.report.Batches++
	s.report.Expired += told
	s.report.Failed += len(refusals)
	s.report.Skipped += seen - len(nos)
	s.refusals = append(s.refusals, refusals...)
	if seen > 0 {
		s.due, s.no = *due, *no
	}
	return more, nil
}

const sweptSQL = `
select n.no, metered.hold_json(n.no, metered.clock()) from unnest($1::bigint[]) n(no) order by n.no`

// announce tells the subscribers of each hold that was ended, in a savepoint of its
// own, and marks those as announced that they all accepted.
func (s *sweeper) announce(ctx context.Context, tx pgx.Tx, nos []int64) (told int, refusals []error, err error) {
	type swept struct {
		no   int64
		hold Hold
	}
	rows, err := tx.Query(ctx, s.book.schema.SQL(sweptSQL), nos)
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
		_, err := inSavepoint(ctx, tx, func(sub pgx.Tx) (struct{}, error) {
			return struct{}{}, s.book.tell(ctx, sub, Transition{Kind: EventExpired, Hold: sw.hold, Note: sweeperNote})
		})
		var refusal *SubscriberError
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

// sweeperNote is the note of what sweep_holds and expire_due in schema.sql record.
var sweeperNote = budget.Note{Actor: System}
