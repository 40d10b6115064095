package wallet

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgmetered/metered/internal/answer"
	"github.com/pgmetered/metered/internal/commit"
	"github.com/pgmetered/metered/internal/fault"
	"github.com/pgmetered/metered/internal/ledger"
	"github.com/pgmetered/metered/internal/savepoint"
	"github.com/pgmetered/metered/internal/sqlstate"
	"github.com/pgmetered/metered/observe"
)

// Bounds of SweepOptions.Batch.
const (
	defaultBatch = 500
	maxBatch     = 2_000 // each lot may take a lock of the server's table
)

// Breakage is units that lapsed at a lot's end.
type Breakage struct {
	Wallet    string    `json:"wallet"`
	Lot       int64     `json:"lot"`
	Reference string    `json:"reference,omitempty"`
	Category  string    `json:"category,omitempty"`
	Granted   int64     `json:"granted"`
	GrantedAt time.Time `json:"granted_at"`

	// Expires is the lot's end. It is zero if the end was set to never since.
	Expires time.Time `json:"expires_at"`

	// Amount are the units that lapsed since the last Breakage of the lot.
	Amount int64 `json:"amount"`

	// Seq is the last entry about the lot.
	Seq int64 `json:"seq"`
}

// Subscriber gets a breakage in a savepoint of the sweep's transaction, which it must not end.
// After an error the next sweep calls again. A panic takes back the batch.
type Subscriber func(ctx context.Context, tx pgx.Tx, b Breakage) error

// SweepOptions configures Sweep. The zero value sweeps all due lots.
type SweepOptions struct {
	// Batch is the most lots that one transaction ends, from 1 to 2,000. Defaults to 500.
	Batch int

	// Max is the most batches. Defaults to no bound.
	Max int

	// Progress is called after each batch, with the report so far. It may be nil.
	Progress func(SweepReport)
}

// SweepReport counts lots and breakages.
type SweepReport struct {
	// Ended are the lots that lapsed or rolled over.
	Ended int `json:"ended"`

	// Announced are the breakages that Subscribers got.
	Announced int `json:"announced"`

	// Failed are lots whose Subscriber or OnThreshold failed, and wallets with a plan whose time
	// zone the server has lost.
	Failed int `json:"failed"`

	// Busy are lots of locked wallets. They are left for the next sweep.
	Busy int `json:"busy"`

	Batches int `json:"batches"`
}

const sweepSQL = `
select seen, ended, busy, untold, last_end, coalesce(last_no, 0), more, crossing, crossed
from metered.sweep_lots($1::timestamptz, $2::bigint, $3::int, $4::text, $5::bool, (($6::metered.new_charge[])[1]).limits, $7::int)`

const toldSQL = `select metered.told_lots($1::bigint[], $2::bigint[])`

// Sweep writes down the ends of lots that are due, in batches, and announces breakage to
// Config.Subscribers. Run it every few minutes, in any number of processes. Errors of subscribers
// are joined, and stop nothing.
func (b *Book) Sweep(ctx context.Context, pool *pgxpool.Pool, opts SweepOptions) (SweepReport, error) {
	if err := cmp.Or(b.made(), notNil("pool", pool)); err != nil {
		return SweepReport{}, err
	}
	opts.Batch = cmp.Or(opts.Batch, defaultBatch)
	switch {
	case opts.Batch < 1 || opts.Batch > maxBatch:
		return SweepReport{}, invalid("SweepOptions.Batch", "%d is not from 1 to %d", opts.Batch, maxBatch)
	case opts.Max < 0:
		return SweepReport{}, invalid("SweepOptions.Max", "%d is negative", opts.Max)
	}
	s := sweeper{book: b, end: "-infinity", batch: opts.Batch}
	ctx, span := b.observer.Start(ctx, observe.Op{Work: observe.Sweep, Name: "lots"})
	b.tellLag(ctx, pool)
	err := s.run(ctx, pool, opts)
	span.With(observe.End{Err: err, Rows: int64(s.report.Ended)})
	return s.report, err
}

// Expire is Sweep for one wallet, in tx. Errors of subscribers and of OnThreshold come with the
// report: commit all the same.
func (b *Book) Expire(ctx context.Context, tx pgx.Tx, wallet string) (SweepReport, error) {
	if err := cmp.Or(b.made(), notNil("tx", tx), checkWallet("wallet", wallet)); err != nil {
		return SweepReport{}, err
	}
	s := sweeper{book: b, end: "-infinity", batch: maxBatch, only: &wallet}
	ctx, span := b.observer.Start(ctx, observe.Op{Work: observe.Call, Name: "wallet.expire"})
	err := s.sweep(ctx, tx)
	for err == nil {
		s.add(ctx, true)
		if !s.done.more {
			err = errors.Join(s.refusals...)
			break
		}
		s.next()
		err = s.sweep(ctx, tx)
	}
	span.End(err)
	return s.report, err
}

type sweeper struct {
	book     *Book
	batch    int
	only     *string // the wallet, or nil for all
	report   SweepReport
	refusals []error
	end      any // of the last lot seen
	no       int64

	done struct { // by the batch that is not committed yet
		SweepReport
		end      pgtype.Timestamptz
		no       int64
		more     bool
		lapsed   int64 // units, if there is an observer
		refusals []error
	}
}

func (s *sweeper) run(ctx context.Context, pool *pgxpool.Pool, opts SweepOptions) error {
	for {
		err := commit.InTx(ctx, pool, pgx.TxOptions{IsoLevel: pgx.ReadCommitted}, func(tx pgx.Tx) error { return s.sweep(ctx, tx) })
		if err != nil {
			return errors.Join(append(s.refusals, err)...)
		}
		s.add(ctx, false)
		if opts.Progress != nil {
			opts.Progress(s.report)
		}
		if !s.done.more || s.report.Batches == opts.Max {
			return errors.Join(s.refusals...)
		}
		s.next()
	}
}

// next is where the next batch begins.
func (s *sweeper) next() { s.end, s.no = s.done.end, s.done.no }

// add adds the batch to the report, and reports it to the observer. pending: it is in the caller's
// transaction.
func (s *sweeper) add(ctx context.Context, pending bool) {
	s.report.Batches++
	s.report.Ended += s.done.Ended
	s.report.Announced += s.done.Announced
	s.report.Failed += s.done.Failed
	s.report.Busy += s.done.Busy
	s.refusals = append(s.refusals, s.done.refusals...)
	for _, e := range []observe.Event{
		{Kind: observe.Lots, Name: "ended", N: int64(s.done.Ended)}, {Kind: observe.LotsLapsed, N: s.done.lapsed},
		{Kind: observe.LotsLeft, Name: "skipped", N: int64(s.done.Busy)}, {Kind: observe.LotsLeft, Name: "failed", N: int64(s.done.Failed)},
	} {
		if e.Pending = pending; e.N > 0 {
			s.book.observer.Event(ctx, e)
		}
	}
}

const lagSQL = `
select (extract(epoch from c.now - l.expires_at) * 1e6)::bigint
from (select metered.clock() as now offset 0) c, lateral (
    (select y.expires_at from metered.lots y where (y.open or y.untold > 0) and y.expires_at <= c.now order by y.expires_at, y.no limit 1)
    union all
    (select y.expires_at from metered.lots y where y.keeps and y.expires_at <= c.now order by y.expires_at, y.no limit 1) order by 1 limit 1) l`

// tellLag reports to the observer how late the oldest lot is that is due. The look is for the
// observer alone: without one it is not made, and if it fails the sweep goes on.
func (b *Book) tellLag(ctx context.Context, pool *pgxpool.Pool) {
	if b.observer == nil {
		return
	}
	var us int64
	if err := answer.QueryRow(ctx, pool, b.schema.SQL(lagSQL)).Scan(&us); err != nil && !errors.Is(err, pgx.ErrNoRows) {
		return
	}
	b.observer.Event(ctx, observe.Event{Kind: observe.LotsLag, Lag: time.Duration(us) * time.Microsecond})
}

func (s *sweeper) sweep(ctx context.Context, tx pgx.Tx) error {
	s.done.SweepReport, s.done.refusals, s.done.lapsed = SweepReport{}, nil, 0
	crossing, err := s.pass(ctx, tx, s.only, false)
	for _, wallet := range crossing {
		before := s.done
		_, failed := savepoint.In(ctx, tx, "wallet", func(sub pgx.Tx) ([]string, error) { return s.pass(ctx, sub, &wallet, true) })
		var refusal *fault.Listener
		if sqlstate.Of(failed) == sqlstate.UnknownZone { // a plan of a zone that the server has lost
			s.done = before
			s.done.Failed++
			s.done.refusals = append(s.done.refusals, fmt.Errorf("wallet %q: %w", wallet, failed))
		} else if ctx.Err() == nil && errors.As(failed, &refusal) {
			s.done = before
			s.done.Failed++
			s.done.refusals = append(s.done.refusals, failed)
		} else if failed != nil {
			return failed
		}
	}
	return err
}

// pass ends lots, and tells subscribers. It leaves wallets that would cross thresholds, and returns
// them: each gets a pass that reports.
func (s *sweeper) pass(ctx context.Context, tx pgx.Tx, only *string, telling bool) (crossing []string, err error) {
	b, subscribed := s.book, len(s.book.cfg.Subscribers) > 0
	wallet := "-"
	if only != nil {
		wallet = *only
	}
	charge, err := b.priced(wallet, someone)
	if err != nil {
		return nil, err
	}
	var seen, ended, busy int
	var end pgtype.Timestamptz // infinity, of a lot whose end was set since it lapsed
	var no int64
	var more bool
	var untold [][]byte
	var crossed []byte
	err = answer.QueryRow(ctx, tx, b.sql.sweep, s.end, s.no, s.batch, only, subscribed || b.observer != nil,
		ledger.Charges(ledger.Telling(charge.Charges, telling)), b.waitMS()).
		Scan(&seen, &ended, &busy, &untold, &end, &no, &more, &crossing, &crossed)
	if err != nil {
		return nil, failed("expire", err)
	}
	s.done.Ended += ended
	if !telling {
		s.done.Busy, s.done.end, s.done.no, s.done.more = busy, end, no, more
	}
	if err := charge.Cross(ctx, tx, crossed); err != nil {
		return nil, err
	}
	return crossing, s.tell(ctx, tx, untold)
}

// tell reports breakage.
func (s *sweeper) tell(ctx context.Context, tx pgx.Tx, untold [][]byte) error {
	b, subscribed := s.book, len(s.book.cfg.Subscribers) > 0
	if len(untold) == 0 {
		return nil
	}
	nos, units := []int64{}, []int64{} // not nil, which is sent as null
	for _, raw := range untold {
		var lapsed Breakage
		if err := json.Unmarshal(raw, &lapsed); err != nil {
			return failed("read a lot", err)
		}
		var err error
		if subscribed {
			_, err = savepoint.In(ctx, tx, "wallet", func(sub pgx.Tx) (struct{}, error) { return struct{}{}, b.tell(ctx, sub, lapsed) })
		}
		var refusal *fault.Listener
		switch {
		case err == nil:
			nos, units = append(nos, lapsed.Lot), append(units, lapsed.Amount)
			s.done.lapsed += lapsed.Amount
		case ctx.Err() == nil && errors.As(err, &refusal):
			s.done.Failed++
			s.done.refusals = append(s.done.refusals, err)
		default:
			return err
		}
	}
	if subscribed {
		s.done.Announced += len(nos)
	}
	_, err := tx.Exec(ctx, b.sql.told, nos, units)
	return failed("expire", err)
}

var errSwallowed = errors.New("wallet: a statement of the subscriber failed, and it returned no error")

// tell calls the subscribers with a breakage. The first error of one is returned as a
// *fault.Listener.
func (b *Book) tell(ctx context.Context, tx pgx.Tx, lapsed Breakage) error {
	lapsed.GrantedAt, lapsed.Expires = lapsed.GrantedAt.UTC(), lapsed.Expires.UTC()
	for _, subscriber := range b.cfg.Subscribers {
		err := subscriber(ctx, tx, lapsed)
		if conn := tx.Conn(); err == nil && conn != nil && conn.PgConn().TxStatus() == 'E' {
			err = errSwallowed // else the savepoint could not be released
		}
		if err != nil {
			return &fault.Listener{Err: err, Doing: fmt.Sprintf("wallet: a subscriber failed: wallet %q, lot %d", lapsed.Wallet, lapsed.Lot)}
		}
	}
	return nil
}
