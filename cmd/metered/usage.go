package main

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/internal/inspect"
)

func (a *app) usageCmd() *cobra.Command {
	windows := []string{"lifetime"}
	c := &cobra.Command{
		Use:   "usage SCOPE...",
		Short: "Show the usage of scopes, in windows up to now",
		Long: `Usage shows the usage of each scope in each window up to now, of how many charges it is, and the spent, refunded and credited units of its lifetime,
from one snapshot. Held and leased units stand beside it. For days and months see metered series.

A scope without entries that was not declared is left out: it exits with 5.`,
		Example: `  metered usage org/acme
  metered usage org/acme org/globex --window 1h,30d,lifetime --json`,
		Args: cobra.MinimumNArgs(1),
	}
	c.Flags().StringSliceVarP(&windows, "window", "w", windows,
		"the windows to look at: lifetime, or durations")
	return a.does(c, needReporting, func(ctx context.Context, scopes []string) error {
		var queries []budget.Query
		for _, scope := range scopes {
			for _, text := range windows {
				window, err := parseWindow(text)
				if err != nil {
					return usagef("--window: %v", err)
				}
				queries = append(queries, budget.Query{Scope: scope, Window: window})
			}
		}
		ledger, err := budget.New(budget.Config{Schema: a.schema})
		if err != nil {
			return err
		}
		return a.read(ctx, func(tx pgx.Tx) error {
			all, err := ledger.Usage(ctx, tx, queries...)
			if err != nil {
				return err
			}
			var unknown error
			all = slices.DeleteFunc(all, func(u budget.Usage) bool {
				if u.Seq > 0 {
					return false
				}
				err := a.known(ctx, tx, u.Scope)
				unknown = cmp.Or(unknown, err)
				return err != nil
			})
			return cmp.Or(a.printUsage(all), unknown)
		})
	})
}

func (a *app) printUsage(all []budget.Usage) error {
	t := a.table("SCOPE", "WINDOW", "USED", "CHARGES", "HELD", "LEASED", "SPENT", "REFUNDED", "CREDITED",
		"ENTRIES")
	for _, u := range all {
		if a.json {
			if err := a.print(u); err != nil {
				return err
			}
			continue
		}
		t.row(u.Scope, windowText(u.Window), u.Used, u.Charges, u.Held, u.Leased, u.Spent, u.Refunded,
			u.Credited, u.Seq)
	}
	return t.flush()
}

// known refuses a scope without entries: its name may be mistyped, and 0 would look like its usage.
func (a *app) known(ctx context.Context, tx pgx.Tx, scope string) error {
	r, err := inspect.New(tx, a.schema)
	if err != nil {
		return err
	}
	return r.Known(ctx, scope)
}

func parseWindow(text string) (time.Duration, error) {
	if strings.EqualFold(text, "lifetime") {
		return 0, nil
	}
	d, err := inspect.ParseDuration(text)
	if err == nil && d == 0 {
		err = fmt.Errorf("%q is not a window: want lifetime, or a duration such as 1h or 30d", text)
	}
	return d, err
}

func windowText(d time.Duration) string {
	if d <= 0 {
		return "lifetime"
	}
	return lasting(d)
}
