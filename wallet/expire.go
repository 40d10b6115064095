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
	"github.com/pgmetered/metered/internal/sweep"
	"github.com/pgmetered/metered/observe"
)

// Bounds of SweepOptions.Batch.
const (
	defaultBatch = 500
	maxBatch     = 2_000 // each lot may take a lock of the server's table
)

// Breakage is units that lapsed at a lot's end.
type Breakage struct {
	// Wallet is the scope of the wallet.
	Wallet string `json:"wallet"`

	// Lot is the number of the lot that ended.
	Lot int64 `json:"lot"`

	// Reference is that of the grant, or "".
	Reference string `json:"reference,omitempty"`

	// Category is that of the grant, or "".
	Category string `json:"category,omitempty"`

	// Granted are the units of the grant.
	Granted int64 `json:"granted"`

	// GrantedAt is when the lot was granted.
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
	// Batch is the most lots that one transaction ends, from 1 to 2,000. A wallet in which more
	// than 25 lots, renewals or holds are due is swept in transactions of its own, each of which
	// writes down about 25 of them. Defaults to 500.
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

	// Behind are wallets in which more is due than this sweep wrote down, because it came to
	// SweepOptions.Max, the wallet was locked, or a step of it failed.
	Behind int `json:"behind"`

	// Batches are the transactions of the sweep.
	Batches int `json:"batches"`
}

const sweepSQL = `
select ended, busy, untold, last_end, coalesce(last_no, 0), more, crossing, behind
from metered.sweep_wallets($1::timestamptz, $2::bigint, $3::int, $4::bool, (($5::metered.new_charge[])[1]).limits, $6::int, coalesce($7::text[], '{}'))`

const sweepWalletSQL = `
select status, ended, untold, last_end, last_no, more, crossed
from metered.sweep_wallet($1::text, $2::timestamptz, $3::bigint, $4::int, $5::bool, (($6::metered.new_charge[])[1]).limits, $7::int, $8::bool)`

const toldSQL = `select metered.told_lots($1::bigint[], $2::bigint[])`

// Sweep writes down the ends of lots that are due, in batches, and announces breakage to
// Config.Subscribers. Run it every few minutes, in any number of processes. Errors of subscribers
// are joined, and stop nothing.
//
// Wallets with little that is due share transactions, and come first. A wallet in which much is due
// is swept in steps, each in a transaction that locks that wallet alone, in turn with other such
// wallets. What was committed stays when a later transaction fails or ctx ends.
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
	s := sweeper{book: b, page: start, batch: opts.Batch, steps: map[string]cursor{}, progress: opts.Progress}
	ctx, span := b.observer.Start(ctx, observe.Op{Work: observe.Sweep, Name: "lots"})
	b.tellLag(ctx, pool)
	loop := sweep.Loop{Max: opts.Max, Of: "wallet",
		Page: func(ctx context.Context, known []string) (behind []string, more bool, err error) {
			err = s.commit(ctx, pool, func(tx pgx.Tx) (err error) {
				behind, more, err = s.sweepPage(ctx, tx, known)
				return err
			})
			return behind, more, err
		},
		Step: func(ctx context.Context, wallet string) (more, left bool, err error) {
			err = s.commit(ctx, pool, func(tx pgx.Tx) (err error) {
				more, left, err = s.step(ctx, tx, wallet, true)
				return err
			})
			return more, left, err
		},
	}
	left, errs := loop.Run(ctx)
	s.report.Behind = left
	err := errors.Join(append(s.refusals, errs...)...)
	span.With(observe.End{Err: err, Rows: int64(s.report.Ended)})
	return s.report, err
}

// Expire is Sweep for one wallet, in tx. Errors of subscribers and of OnThreshold come with the
// report: commit all the same.
func (b *Book) Expire(ctx context.Context, tx pgx.Tx, wallet string) (SweepReport, error) {
	if err := cmp.Or(b.made(), notNil("tx", tx), checkWallet("wallet", wallet)); err != nil {
		return SweepReport{}, err
	}
	s := sweeper{book: b, batch: maxBatch, steps: map[string]cursor{}}
	ctx, span := b.observer.Start(ctx, observe.Op{Work: observe.Call, Name: "wallet.expire"})
	var err error
	for more := true; more && err == nil; {
		s.done = batch{}
		if more, _, err = s.step(ctx, tx, wallet, false); err == nil {
			s.add(ctx, true)
		}
	}
	if err == nil {
		err = errors.Join(s.refusals...)
	}
	span.End(err)
	return s.report, err
}

// cursor is the last lot seen, by its end: infinity, of a lot whose end was set since it lapsed.
type cursor struct {
	end pgtype.Timestamptz
	no  int64
}

var start = cursor{end: pgtype.Timestamptz{InfinityModifier: pgtype.NegativeInfinity, Valid: true}}

type sweeper struct {
	book     *Book
	batch    int
	progress func(SweepReport)
	report   SweepReport
	refusals []error
	page     cursor
	steps    map[string]cursor // of lapsed units, by the wallet
	done     batch
}

// batch is the work of a transaction that is not committed yet.
type batch struct {
	SweepReport
	lapsed   int64 // units, if there is an observer
	refusals []error
}

// commit runs a transaction of the sweep.
func (s *sweeper) commit(ctx context.Context, pool *pgxpool.Pool, work func(tx pgx.Tx) error) error {
	err := commit.InTx(ctx, pool, pgx.TxOptions{IsoLevel: pgx.ReadCommitted}, func(tx pgx.Tx) error {
		s.done = batch{}
		return work(tx)
	})
	if err != nil {
		return err
	}
	s.add(ctx, false)
	if s.progress != nil {
		s.progress(s.report)
	}
	return nil
}

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
		{Kind: observe.Lots, Name: "ended", N: int64(s.done.Ended)},
		{Kind: observe.LotsLapsed, N: s.done.lapsed},
		{Kind: observe.SweepSkipped, Name: "lots", N: int64(s.done.Busy)},
		{Kind: observe.SweepFailed, Name: "lots", N: int64(s.done.Failed)},
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
	if err := answer.QueryRow(ctx, pool, b.schema.SQL(lagSQL)).Scan(&us); err != nil &&
		!errors.Is(err, pgx.ErrNoRows) {
		return
	}
	b.observer.Event(ctx, observe.Event{Kind: observe.SweepLag, Name: "lots",
		Lag: time.Duration(us) * time.Microsecond})
}

// sweepPage writes down what is due in wallets that are not behind, and returns those that are,
// without the known ones.
func (s *sweeper) sweepPage(ctx context.Context, tx pgx.Tx,
	known []string) (behind []string, more bool, err error) {
	charge, err := s.book.priced("-", someone)
	if err != nil {
		return nil, false, err
	}
	var next cursor
	var untold [][]byte
	var crossing []string
	err = answer.QueryRow(ctx, tx, s.book.sql.sweep, s.page.end, s.page.no, s.batch, s.keeps(),
		ledger.Charges(charge.Charges), s.book.waitMS(), known).
		Scan(&s.done.Ended, &s.done.Busy, &untold, &next.end, &next.no, &more, &crossing, &behind)
	if err != nil {
		return nil, false, failed("expire", err)
	}
	if next.end.Valid {
		s.page = next
	}
	for _, wallet := range crossing {
		left, err := s.cross(ctx, tx, wallet)
		if err != nil {
			return nil, false, err
		}
		if left {
			behind = append(behind, wallet)
		}
	}
	return behind, more, s.tell(ctx, tx, untold)
}

// step writes down what is due first in a wallet, and reports whether more is due. left: the wallet
// is locked, which a sweep of all does not wait for (skipBusy).
func (s *sweeper) step(ctx context.Context, tx pgx.Tx, wallet string,
	skipBusy bool) (more, left bool, err error) {
	status, more, err := s.pass(ctx, tx, wallet, skipBusy, false)
	if err == nil && status == "crossing" {
		more, err = s.cross(ctx, tx, wallet)
		return more, false, err
	}
	return more, status == "busy", err
}

// cross takes the step of a wallet that crosses thresholds, reports these, and reports whether more
// is due.
func (s *sweeper) cross(ctx context.Context, tx pgx.Tx, wallet string) (more bool, err error) {
	before := s.done
	more, err = savepoint.In(ctx, tx, "wallet", func(sub pgx.Tx) (more bool, err error) {
		_, more, err = s.pass(ctx, sub, wallet, false, true)
		return more, err
	})
	var refusal *fault.Listener
	switch {
	case err == nil:
		return more, nil
	case sqlstate.Of(err) == sqlstate.UnknownZone: // a plan of a zone that the server has lost
		err = fmt.Errorf("wallet %q: %w", wallet, err)
	case ctx.Err() != nil || !errors.As(err, &refusal):
		return false, err
	}
	s.done = before
	s.done.Failed++
	s.done.refusals = append(s.done.refusals, err)
	return false, nil
}

// pass takes a step of a wallet, and tells subscribers.
func (s *sweeper) pass(ctx context.Context, tx pgx.Tx, wallet string, skipBusy,
	telling bool) (status string, more bool, err error) {
	charge, err := s.book.priced(wallet, someone)
	if err != nil {
		return "", false, err
	}
	at, seen := s.steps[wallet]
	if !seen {
		at = start
	}
	var ended int
	var untold [][]byte
	var next cursor
	var no *int64
	var crossed []byte
	err = answer.QueryRow(ctx, tx, s.book.sql.sweepWallet, wallet, at.end, at.no, s.batch, s.keeps(),
		ledger.Charges(ledger.Telling(charge.Charges, telling)), s.book.waitMS(), skipBusy).
		Scan(&status, &ended, &untold, &next.end, &no, &more, &crossed)
	if err != nil {
		return "", false, failed("expire", err)
	}
	if no != nil {
		next.no = *no
		s.steps[wallet] = next
	}
	s.done.Ended += ended
	if err := charge.Cross(ctx, tx, crossed); err != nil {
		return "", false, err
	}
	return status, more, s.tell(ctx, tx, untold)
}

// keeps reports whether lapsed units are to be announced.
func (s *sweeper) keeps() bool { return len(s.book.cfg.Subscribers) > 0 || s.book.observer != nil }

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
			_, err = savepoint.In(ctx, tx, "wallet",
				func(sub pgx.Tx) (struct{}, error) { return struct{}{}, b.tell(ctx, sub, lapsed) })
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
			return &fault.Listener{Err: err,
				Doing: fmt.Sprintf("wallet: a subscriber failed: wallet %q, lot %d", lapsed.Wallet,
					lapsed.Lot)}
		}
	}
	return nil
}
