package wallet

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/internal/fault"
	"github.com/pgmetered/metered/internal/ledger"
	"github.com/pgmetered/metered/internal/savepoint"
	"github.com/pgmetered/metered/observe"
)

// Bounds of ExpireOptions.Batch.
const (
	DefaultBatch = 500
	MaxBatch     = 2_000 // each lot may take a lock of the server's table
)

// Breakage is the lapse of units of a lot.
type Breakage struct {
	Wallet    string    `json:"wallet"`
	Lot       int64     `json:"lot"`
	Reference string    `json:"reference,omitempty"`
	Category  string    `json:"category,omitempty"`
	Granted   int64     `json:"granted"` // units that the lot was granted with
	GrantedAt time.Time `json:"granted_at"`
	Expires   time.Time `json:"expires_at"` // when the lot ended
	Amount    int64     `json:"amount"`     // units that lapsed, and that no subscriber has heard of
	Seq       int64     `json:"seq"`        // the last entry of the lot
}

// Subscriber is called with each breakage, in the transaction of the sweep and a savepoint. Its writes through tx commit with it. An error
// takes back these writes alone: the lot has ended, and the next sweep calls again. A panic takes back the batch. It does not end tx.
type Subscriber func(ctx context.Context, tx pgx.Tx, b Breakage) error

// ExpireOptions says how Expire works. The zero value ends all lots that are due.
type ExpireOptions struct {
	Batch    int                // how many lots one transaction ends, 1 to MaxBatch. Defaults to DefaultBatch
	Max      int                // ends the pass after so many batches. Defaults to 0, all
	Progress func(ExpireReport) // is called after each batch, once it is committed. Defaults to none
}

// ExpireReport is the report of a pass.
type ExpireReport struct {
	Ended   int `json:"ended"`   // lots that lapsed or rolled over in this pass
	Told    int `json:"told"`    // breakages that Subscribers got, of lots that others ended, too
	Failed  int `json:"failed"`  // breakages of which one Subscriber failed, and wallets whose OnThreshold did: the next pass tries again
	Busy    int `json:"busy"`    // lots of wallets in use, left for the next pass
	Batches int `json:"batches"` // transactions
}

const sweepSQL = `
select seen, ended, busy, untold, last_end, coalesce(last_no, 0), more, crossing, crossed
from metered.sweep_lots($1::timestamptz, $2::bigint, $3::int, $4::text, $5::bool, (($6::metered.new_charge[])[1]).limits, $7::int)`

const toldSQL = `select metered.told_lots($1::bigint[], $2::bigint[])`

// Expire is one pass of the sweeper: it ends the lots that are due, writes breakage, and calls Config.Subscribers with it, also with breakage that draws
// wrote since the last pass. It is not needed for a lot to end. Run it every few minutes. Any number may run
// at once, and nobody waits for one longer than for a batch. It owns its transactions. On error, or when ctx ends, the batches
// before stay done and are reported. Errors of subscribers stop nothing. They are joined and returned at the end. A Book without
// Subscribers marks breakage as announced.
func (b *Book) Expire(ctx context.Context, pool *pgxpool.Pool, opts ExpireOptions) (ExpireReport, error) {
	if err := cmp.Or(b.made(), notNil("pool", pool)); err != nil {
		return ExpireReport{}, err
	}
	opts.Batch = cmp.Or(opts.Batch, DefaultBatch)
	switch {
	case opts.Batch < 1 || opts.Batch > MaxBatch:
		return ExpireReport{}, invalid("ExpireOptions.Batch", "%d is not from 1 to %d", opts.Batch, MaxBatch)
	case opts.Max < 0:
		return ExpireReport{}, invalid("ExpireOptions.Max", "%d is negative", opts.Max)
	}
	s := sweeper{book: b, end: "-infinity", batch: opts.Batch}
	ctx, span := b.observer.Start(ctx, observe.Op{Work: observe.Sweep, Name: "lots"})
	b.tellLag(ctx, pool)
	err := s.run(ctx, pool, opts)
	span.With(observe.End{Err: err, Rows: int64(s.report.Ended)})
	return s.report, err
}

// ExpireWallet ends the lots of one wallet that are due: for a job at a lot's end. It waits for the wallet's lock. Errors of subscribers
// and of OnThreshold are joined and returned, with the report: commit all the same to keep the ends.
func (b *Book) ExpireWallet(ctx context.Context, tx pgx.Tx, wallet string) (ExpireReport, error) {
	if err := cmp.Or(b.made(), notNil("tx", tx), checkWallet("wallet", wallet)); err != nil {
		return ExpireReport{}, err
	}
	s := sweeper{book: b, end: "-infinity", batch: MaxBatch, only: &wallet}
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
	report   ExpireReport
	refusals []error
	end      any // of the last lot seen
	no       int64

	done struct { // by the batch that is not committed yet
		ExpireReport
		end      *time.Time
		no       int64
		more     bool
		lapsed   int64 // units, if there is an observer
		refusals []error
	}
}

func (s *sweeper) run(ctx context.Context, pool *pgxpool.Pool, opts ExpireOptions) error {
	for {
		err := pgx.BeginTxFunc(ctx, pool, pgx.TxOptions{IsoLevel: pgx.ReadCommitted}, func(tx pgx.Tx) error { return s.sweep(ctx, tx) })
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
func (s *sweeper) next() { s.end, s.no = *s.done.end, s.done.no }

// add adds the batch to the report, and reports it to the observer. pending: it is in the caller's transaction.
func (s *sweeper) add(ctx context.Context, pending bool) {
	s.report.Batches++
	s.report.Ended += s.done.Ended
	s.report.Told += s.done.Told
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
    select y.expires_at from metered.lots y where (y.open or y.untold > 0) and y.expires_at <= c.now order by y.expires_at, y.no limit 1) l`

// tellLag reports to the observer how late the oldest lot is that is due. The look is for the observer alone: without one it is not
// made, and if it fails the sweep goes on.
func (b *Book) tellLag(ctx context.Context, pool *pgxpool.Pool) {
	if b.observer == nil {
		return
	}
	var us int64
	if err := pool.QueryRow(ctx, b.schema.SQL(lagSQL)).Scan(&us); err != nil && !errors.Is(err, pgx.ErrNoRows) {
		return
	}
	b.observer.Event(ctx, observe.Event{Kind: observe.LotsLag, Lag: time.Duration(us) * time.Microsecond})
}

func (s *sweeper) sweep(ctx context.Context, tx pgx.Tx) error {
	s.done.ExpireReport, s.done.refusals, s.done.lapsed = ExpireReport{}, nil, 0
	crossing, err := s.pass(ctx, tx, s.only, false)
	for _, wallet := range crossing {
		before := s.done
		_, failed := savepoint.In(ctx, tx, "wallet", func(sub pgx.Tx) ([]string, error) { return s.pass(ctx, sub, &wallet, true) })
		var refusal *budget.CrossingError
		if ctx.Err() == nil && errors.As(failed, &refusal) {
			s.done = before
			s.done.Failed++
			s.done.refusals = append(s.done.refusals, failed)
		} else if failed != nil {
			return failed
		}
	}
	return err
}

// pass ends lots, and reports them. Wallets that would cross thresholds are left to a pass of each, which reports: they are named.
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
	var end *time.Time
	var no int64
	var more bool
	var untold [][]byte
	var crossed []byte
	err = tx.QueryRow(ctx, b.sql.sweep, s.end, s.no, s.batch, only, subscribed || b.observer != nil,
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
		var refusal *SubscriberError
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
		s.done.Told += len(nos)
	}
	_, err := tx.Exec(ctx, b.sql.told, nos, units)
	return failed("expire", err)
}

var errSwallowed = errors.New("wallet: a statement of the subscriber failed, and it returned no error")

// tell calls the subscribers with a breakage. The first error of one is returned as a *SubscriberError.
func (b *Book) tell(ctx context.Context, tx pgx.Tx, lapsed Breakage) error {
	lapsed.GrantedAt, lapsed.Expires = lapsed.GrantedAt.UTC(), lapsed.Expires.UTC()
	for _, subscriber := range b.cfg.Subscribers {
		err := subscriber(ctx, tx, lapsed)
		if conn := tx.Conn(); err == nil && conn != nil && conn.PgConn().TxStatus() == 'E' {
			err = errSwallowed // else the savepoint could not be released
		}
		if err != nil {
			return &SubscriberError{Breakage: lapsed, Cause: err}
		}
	}
	return nil
}

// SubscriberError says which breakage a Subscriber did not take.
type SubscriberError struct {
	Breakage Breakage
	Cause    error
}

func (e *SubscriberError) Error() string {
	return fmt.Sprintf("wallet: a subscriber failed: wallet %q, lot %d: %v", e.Breakage.Wallet, e.Breakage.Lot, e.Cause)
}

// Unwrap returns the cause.
func (e *SubscriberError) Unwrap() error { return e.Cause }

// Code is that of the cause.
func (e *SubscriberError) Code() string { return fault.Code(e.Cause) }
