package main

import (
	"context"
	"errors"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/riverqueue/river"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/jobs"
	"github.com/pgmetered/metered/wallet"
)

var errNoRender = errors.New("no such render")

// render does a piece of work and draws its cost, or does neither. Two limits judge the account's one scope: the
// units in the wallet, and the plan's monthly cap. A repetition with its id gets the same answer.
//
// The account is locked from the charge to the commit, so the charge comes late: only the row that names it, for
// refunds, follows.
func (s *service) render(ctx context.Context, id, account string, units int64) (replayed bool, err error) {
	out, err := metered.Do(ctx, s.metered, metered.Command{
		ID: id, Tenant: "renders/" + account, Name: "render", Input: units,
	}, func(ctx context.Context, tx *metered.Tx) (any, error) {
		a, err := find(ctx, tx, accountSQL, account) // the plan as it is by now
		if err != nil {
			return nil, err
		}
		month, err := a.month()
		if err != nil {
			return nil, err
		}
		charge := s.book.Charge(scope(account), units, month)
		charge.Note = budget.Note{Actor: account, Correlation: id, Reason: "render"}
		receipt, err := s.metered.Budget.Charge(ctx, tx, charge)
		if err != nil {
			return nil, err
		}
		_, err = tx.Exec(ctx, `insert into renders values ($1, $2, $3, $4)`, account, id, units, receipt.Entries[0].Seq)
		return nil, err
	})
	return out.Replayed, err
}

// refund gives back units of a render, or with units 0 all that is left of it: a dispute. Any number of callers, at
// once or in turn, get no more back than was drawn. The units go to their lots, and the room to the month of the
// draw.
func (s *service) refund(ctx context.Context, id, account string, units int64, reason string) (given int64, err error) {
	err = pgx.BeginFunc(ctx, s.pool, func(tx pgx.Tx) error {
		r := budget.Refund{Scope: scope(account), Amount: units, All: units == 0, Note: budget.Note{Correlation: id, Reason: reason}}
		err := tx.QueryRow(ctx, `select entry from renders where account = $1 and id = $2`, account, id).Scan(&r.Seq)
		if errors.Is(err, pgx.ErrNoRows) {
			return errNoRender
		} else if err != nil {
			return err
		}
		back, err := s.metered.Budget.Refund(ctx, tx, r)
		if r.All && errors.Is(err, budget.ErrRefundExceeds) {
			return nil // all of it was given back before
		}
		given = back.Amount
		return err
	})
	return given, err
}

// reached is a job: an account's month has reached a threshold.
type reached struct {
	Scope string    `json:"scope"`
	Month time.Time `json:"month"`
	Name  string    `json:"name"`
	Used  int64     `json:"used"`
}

// Kind is the job's kind.
func (reached) Kind() string { return "threshold" }

// crossed enqueues the alert in the transaction of the charge that reached the threshold: both commit, or none does.
// It is called once a month for each threshold, even after refunds, changes and further charges.
func crossed(enqueuer *jobs.Enqueuer) func(ctx context.Context, tx pgx.Tx, c budget.Crossing) error {
	return func(ctx context.Context, tx pgx.Tx, c budget.Crossing) error {
		_, err := enqueuer.Enqueue(ctx, tx, reached{c.Scope, c.PeriodStart, c.Threshold.Name, c.Used}, nil)
		return err
	}
}

// alert writes the account's alert. River works a job at least once, so the row keeps a second one out.
func (s *service) alert(ctx context.Context, job *river.Job[reached]) error {
	id, err := wallets.Parse(job.Args.Scope)
	if err != nil {
		return err
	}
	_, err = s.pool.Exec(ctx, `insert into alerts values ($1, $2, $3, $4) on conflict do nothing`, id, job.Args.Month, job.Args.Name, job.Args.Used)
	return err
}

// topUp credits a payment, in a lot without an end. The payment provider repeats its message until it gets an answer:
// a payment's id grants the lot once, and another sum is refused (wallet.ErrConflict).
func (s *service) topUp(ctx context.Context, payment, account string, units int64) (granted wallet.Granted, err error) {
	return s.grant(ctx, wallet.Grant{
		Wallet: scope(account), Amount: units, Category: paid, Reference: payment,
		LateRefunds: wallet.Forever, Note: budget.Note{Correlation: payment, Reason: "payment"},
	})
}

// promote gives an account credit for a time. Later refunds to it lapse.
func (s *service) promote(ctx context.Context, code, account string, units int64, lasts time.Duration) (wallet.Granted, error) {
	return s.grant(ctx, wallet.Grant{
		Wallet: scope(account), Amount: units, Category: promotional, Reference: code, Ends: wallet.After(lasts),
		LateRefunds: wallet.Lapse, Note: budget.Note{Correlation: code, Reason: "promotion"},
	})
}

func (s *service) grant(ctx context.Context, g wallet.Grant) (granted wallet.Granted, err error) {
	err = pgx.BeginFunc(ctx, s.pool, func(tx pgx.Tx) (err error) {
		granted, err = s.book.Grant(ctx, tx, g)
		return err
	})
	return granted, err
}

// The payment may bounce again, or be announced again.
const debtSQL = `insert into debts (account, payment, units) values ($1, $2, $3) on conflict do nothing`

// bounce takes a payment's unspent units back. The next invoice bills the spent ones.
func (s *service) bounce(ctx context.Context, payment, account string) (revoked wallet.Revoked, err error) {
	err = pgx.BeginFunc(ctx, s.pool, func(tx pgx.Tx) (err error) {
		revoked, err = s.book.Revoke(ctx, tx, wallet.Revoke{
			Wallet: scope(account), Reference: payment, Note: budget.Note{Correlation: payment, Reason: "bounced"},
		})
		if err != nil || revoked.Missing == 0 {
			return err
		}
		_, err = tx.Exec(ctx, debtSQL, account, payment, revoked.Missing)
		return err
	})
	return revoked, err
}
