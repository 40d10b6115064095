package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/pgmetered/metered/budget"
)

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
	a, err := s.find(ctx, id)
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
