package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/riverqueue/river"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/wallet"
)

// invoice is an account's month. Opening + Granted - Used + Refunded - Lapsed - Revoked = Closing, from the ledger's
// entries of the month. Refunded counts refunds of this month, of draws of earlier months too.
type invoice struct {
	Account  string           `json:"account"`
	Starts   time.Time        `json:"starts"`
	Ends     time.Time        `json:"ends"`
	Opening  int64            `json:"opening"`
	Granted  int64            `json:"granted"`
	Used     int64            `json:"used"`
	Of       map[string]int64 `json:"of"` // Used by the lots' categories; "" of what no lot covered
	Refunded int64            `json:"refunded"`
	Lapsed   int64            `json:"lapsed"`
	Revoked  int64            `json:"revoked"`
	Closing  int64            `json:"closing"`

	Fee     int64 `json:"fee"`
	Overage int64 `json:"overage"` // owed at the month's end
	Debts   int64 `json:"debts"`   // spent units of payments that bounced
	Total   int64 `json:"total"`
}

var errSums = errors.New("the month's sums do not agree with the ledger")

// month sums up an account's month from the statement of its wallet. Under the wallet's lock, and when the month is over,
// nothing of it is missing.
func (s *service) month(ctx context.Context, db budget.Querier, a account) (invoice, error) {
	in := invoice{Account: a.ID, Starts: a.Starts, Ends: a.Ends, Of: map[string]int64{}, Fee: plans[a.Plan].Fee}
	first := true
	for line, err := range s.book.Statement(ctx, db, scope(a.ID), budget.EntriesOptions{From: a.Starts, To: a.Ends}) {
		if err != nil {
			return in, err
		}
		var change int64
		switch line.Kind {
		case budget.EntryCredit:
			change, in.Granted = line.Amount, in.Granted+line.Amount
		case budget.EntryRollOver: // the credit after it is the same again
			change, in.Granted = -line.Amount, in.Granted-line.Amount
		case budget.EntryCharge, budget.EntryCapture:
			change, in.Used = -line.Amount, in.Used+line.Amount
			for _, m := range line.Lots {
				in.Of[m.Category] += m.Amount
			}
		case budget.EntryRefund:
			change, in.Refunded = line.Amount, in.Refunded+line.Amount
		case budget.EntryLapse:
			change, in.Lapsed = -line.Amount, in.Lapsed+line.Amount
		case budget.EntryRevoke:
			change, in.Revoked = -line.Amount, in.Revoked+line.Amount
		}
		in.Closing = line.Balance + line.Held
		if first {
			first, in.Opening = false, in.Closing-change
		}
	}
	if in.Opening+in.Granted-in.Used+in.Refunded-in.Lapsed-in.Revoked != in.Closing {
		return in, fmt.Errorf("%w: %+v", errSums, in)
	}
	in.Overage = max(0, -in.Closing)
	in.Total = in.Fee + in.Overage
	return in, nil
}

const (
	lockAccountSQL = accountSQL + ` for update`
	debtsSQL       = `
with billed as (update debts set invoice = $2 where account = $1 and invoice is null returning units)
select coalesce(sum(units), 0)::bigint from billed`
	invoiceSQL = `insert into invoices values ($1, $2, $3, $4, $5)`
	nextSQL    = `update accounts set starts = $2, ends = $3, lots = next where id = $1`
)

// renew closes an account's month, if it is over: it writes the invoice, and forgives the billed overage, which the lot of the
// next month has paid back. It does all or nothing, once for each month, for any number of callers. An account that nobody
// renewed for longer than a month gets one invoice for all of it.
func (s *service) renew(ctx context.Context, id string) (done bool, err error) {
	err = pgx.BeginFunc(ctx, s.pool, func(tx pgx.Tx) error {
		a, err := find(ctx, tx, lockAccountSQL, id)
		if err != nil {
			return err
		}
		if err := s.metered.Budget.Lock(ctx, tx, scope(id)); err != nil {
			return err
		}
		starts, ends, err := s.now(ctx, tx, a)
		if err != nil || starts.Before(a.Ends) {
			return err
		}
		overage, err := s.forgive(ctx, tx, a, starts)
		if err != nil {
			return err
		}
		a.Ends = starts
		if err := s.bill(ctx, tx, a, overage); err != nil {
			return err
		}
		_, err = tx.Exec(ctx, nextSQL, id, starts, ends)
		done = err == nil
		return err
	})
	return done && err == nil, err
}

// forgive adds up what the account was overdrawn by at the end of each month until then, and gives the new months their units
// back.
func (s *service) forgive(ctx context.Context, tx pgx.Tx, a account, until time.Time) (units int64, err error) {
	month, err := a.month()
	for at := a.Ends; err == nil && !at.After(until); _, at, err = month.Period.At(at) {
		over, err := s.book.Overage(ctx, tx, wallet.Overage{
			Wallet: scope(a.ID), Plan: a.Next, At: at, Forgive: true,
			Note: budget.Note{Correlation: "invoice/" + a.Starts.Format(time.RFC3339), Reason: "overage, billed"},
		})
		if err != nil {
			return 0, err
		}
		units += over.Amount
	}
	return units, err
}

func (s *service) bill(ctx context.Context, tx pgx.Tx, a account, overage int64) error {
	in, err := s.month(ctx, tx, a)
	if err != nil {
		return err
	}
	if err := tx.QueryRow(ctx, debtsSQL, a.ID, a.Starts).Scan(&in.Debts); err != nil {
		return err
	}
	in.Overage = overage
	in.Total = in.Fee + in.Overage + in.Debts
	_, err = tx.Exec(ctx, invoiceSQL, a.ID, a.Starts, a.Ends, in.Total, in)
	return err
}

// closing is a periodic job, every few minutes: it sweeps wallets, and renews accounts whose month is over.
type closing struct{}

// Kind is the job's kind.
func (closing) Kind() string { return "closing" }

// closeBooks reads the time from the library's clock, which is the database's.
func (s *service) closeBooks(ctx context.Context, _ *river.Job[closing]) error {
	rows, _ := s.pool.Query(ctx, `select id from accounts where ends <= metered.clock() order by id`)
	ids, err := pgx.CollectRows(rows, pgx.RowTo[string])
	for _, id := range ids {
		_, failed := s.renew(ctx, id)
		err = errors.Join(err, failed)
	}
	_, failed := s.book.Sweep(ctx, s.pool, wallet.SweepOptions{})
	return errors.Join(err, failed)
}

// explain words the refusal of a render for a customer. The limits differ by their names.
func explain(err error) string {
	var exceeded *budget.ExceededError
	if !errors.As(err, &exceeded) {
		return err.Error()
	}
	var all []string
	for _, r := range exceeded.Refusals {
		text := fmt.Sprintf("%d of %s are left", r.Available, r.Limit.Name)
		if r.RetryAfter != budget.Never {
			text += fmt.Sprintf(" until %s", r.PeriodEnd.Format(time.DateOnly))
		}
		all = append(all, text)
	}
	return strings.Join(all, "; ")
}

const (
	soldSQL   = `select coalesce(sum(units), 0)::bigint from renders where account = $1`
	billedSQL = `select coalesce(sum((lines ->> 'used')::bigint), 0)::bigint from invoices where account = $1`
)

// audit has the library verify the ledger and its lots, and compares them with the service's own tables of sales and
// invoices.
func (s *service) audit(ctx context.Context, out io.Writer, id string) error {
	report, err := s.metered.Budget.Verify(ctx, s.pool, budget.VerifyOptions{})
	if err != nil {
		return err
	}
	var sold, billed int64
	err = errors.Join(s.pool.QueryRow(ctx, soldSQL, id).Scan(&sold), s.pool.QueryRow(ctx, billedSQL, id).Scan(&billed))
	if err != nil {
		return err
	}
	a, err := find(ctx, s.pool, accountSQL, id)
	if err != nil {
		return err
	}
	a.Ends = time.Time{} // it may be over, and have no invoice yet
	open, err := s.month(ctx, s.pool, a)
	if err != nil {
		return err
	}
	fmt.Fprintf(out, "verified %d entries: %v; %s: %d rendered, %d on invoices, %d since\n",
		report.Entries, report.Differences, id, sold, billed, open.Used)
	if len(report.Differences) > 0 || sold != billed+open.Used {
		return errors.New("the books do not agree")
	}
	return nil
}
