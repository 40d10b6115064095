package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/pgmetered/metered/budget"
)

// statement prints the entries of an account's wallet, and their lots, by the account's clock.
func (s *service) statement(ctx context.Context, out io.Writer, a account, opts budget.EntriesOptions) error {
	zone, err := time.LoadLocation(a.Zone)
	if err != nil {
		return err
	}
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "entry\tat\twhat\tof\tamount\tbalance")
	for line, err := range s.book.Statement(ctx, s.pool, scope(a.ID), opts) {
		if err != nil {
			return err
		}
		var lots []string
		for _, m := range line.Lots {
			lots = append(lots, fmt.Sprintf("%s %s %d", m.Category, m.Kind, m.Amount))
		}
		fmt.Fprintf(w, "%d\t%s\t%s %s\t%s\t%d\t%d\n", line.Seq, line.At.In(zone).Format("02 Jan 15:04"), line.Kind, line.Note.Correlation,
			strings.Join(lots, ", "), line.Amount, line.Balance)
	}
	return w.Flush()
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

const soldSQL = `select coalesce(sum(units), 0)::bigint from renders where account = $1`

// audit recomputes the ledger and its lots, and compares them with the service's own tables of sales and invoices.
func (s *service) audit(ctx context.Context, out io.Writer, ids ...string) error {
	report, err := s.metered.Budget.Verify(ctx, s.pool, budget.VerifyOptions{})
	if err != nil {
		return err
	}
	for _, d := range report.Differences {
		fmt.Fprintln(out, d)
	}
	fmt.Fprintf(out, "verified %d entries of %d scopes: %d differences\n", report.Entries, report.Scopes, len(report.Differences))
	agree := report.OK()
	for _, id := range ids {
		var sold, billed int64
		if err := s.pool.QueryRow(ctx, soldSQL, id).Scan(&sold); err != nil {
			return err
		}
		err := s.pool.QueryRow(ctx, `select coalesce(sum((lines ->> 'used')::bigint), 0)::bigint from invoices where account = $1`, id).Scan(&billed)
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
		usage, err := s.metered.Budget.Usage(ctx, s.pool, budget.Query{Scope: scope(id)})
		if err != nil {
			return err
		}
		fmt.Fprintf(out, "%s: %d rendered, %d drawn, %d on invoices, %d since\n", id, sold, usage[0].Spent, billed, open.Used)
		agree = agree && sold == usage[0].Spent && sold == billed+open.Used
	}
	if !agree {
		return errors.New("the books do not agree")
	}
	return nil
}
