package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"text/tabwriter"
	"time"

	"github.com/pgmetered/metered/budget"
)

// statement prints an account's ledger. Each entry carries the sums after it, so that a balance is read and not added up.
func (s *shop) statement(ctx context.Context, out io.Writer, account string) error {
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(w, "entry\tat\tby\twhat\tin\tout\tbalance\t")
	for e, err := range s.metered.Budget.Entries(ctx, s.pool, wallet(account), budget.EntriesOptions{}) {
		if err != nil {
			return err
		}
		in, spent := money(e.Amount), ""
		if e.Kind == budget.KindCharge {
			in, spent = "", money(e.Amount)
		}
		fmt.Fprintf(w, "%d\t%s\t%s\t%s\t%s\t%s\t%s\t\n", e.Seq, e.At.UTC().Format(time.DateTime),
			e.Note.Correlation, e.Note.Reason, in, spent, money(e.Credited-e.Spent+e.Refunded))
	}
	return w.Flush()
}

// balance is what an account can still spend, the day's cap aside: its credit less what was spent and what holds keep.
func (s *shop) balance(ctx context.Context, account string) (int64, error) {
	usage, err := s.metered.Budget.Usage(ctx, s.pool, budget.Query{Scope: wallet(account)})
	if err != nil {
		return 0, err
	}
	return usage[0].Available(0), nil
}

func money(cents int64) string {
	sign := ""
	if cents < 0 {
		sign, cents = "-", -cents
	}
	return fmt.Sprintf("%s%d.%02d", sign, cents/100, cents%100)
}

// explain says to a customer why an order was refused. The limits are told apart by their names.
func explain(err error) string {
	var exceeded *budget.ExceededError
	if !errors.As(err, &exceeded) {
		return err.Error()
	}
	text := ""
	for _, r := range exceeded.Refusals {
		switch {
		case r.Limit.Name == "credit":
			text += fmt.Sprintf("it costs %s, and there is %s. ", money(r.Requested), money(r.Available))
		case r.RetryAfter == budget.Never:
			text += fmt.Sprintf("it costs %s, and a day's cap is %s. ", money(r.Requested), money(r.Limit.Max))
		default:
			text += fmt.Sprintf("it costs %s, and %s of the day's %s are left; it fits in %v. ",
				money(r.Requested), money(r.Available), money(r.Limit.Max), (r.RetryAfter + time.Minute - 1).Truncate(time.Minute))
		}
	}
	return text[:len(text)-1]
}

const soldSQL = `
select coalesce(sum(cents) filter (where cancelled is null), 0)::bigint,
    count(*) filter (where cancelled is null), (select count(*) from shipments)
from orders`

// audit recomputes the ledgers from their entries, and compares them with what the shop's own tables say was sold.
func (s *shop) audit(ctx context.Context, out io.Writer, accounts ...string) error {
	report, err := s.metered.Budget.Verify(ctx, s.pool, budget.VerifyOptions{})
	if err != nil {
		return err
	}
	for _, d := range report.Differences {
		fmt.Fprintln(out, d)
	}
	var sold, orders, shipped, paid int64
	if err := s.pool.QueryRow(ctx, soldSQL).Scan(&sold, &orders, &shipped); err != nil {
		return err
	}
	for _, account := range accounts {
		usage, err := s.metered.Budget.Usage(ctx, s.pool, budget.Query{Scope: wallet(account)})
		if err != nil {
			return err
		}
		paid += usage[0].Spent - usage[0].Refunded
	}
	fmt.Fprintf(out, "verified %d entries of %d scopes: %d differences\n", report.Entries, report.Scopes, len(report.Differences))
	fmt.Fprintf(out, "%d orders of %s, %d shipments, %s debited\n", orders, money(sold), shipped, money(paid))
	if !report.OK() || sold != paid || orders != shipped {
		return errors.New("the books do not agree")
	}
	return nil
}
