package main

import (
	"context"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"

	"github.com/pgmetered/metered/budget"
)

func (a *app) entriesCmd() *cobra.Command {
	opts := budget.EntriesOptions{Max: 50}
	var oldest bool
	c := &cobra.Command{
		Use:   "entries SCOPE",
		Short: "List a scope's entries, newest first",
		Long: `Entries lists the entries of a scope's ledger, newest first, each with the scope's sums after it. --before and --after
go on from the last one of a page. For a period of time, and for CSV, see metered statement.`,
		Example: `  metered entries org/acme
  metered entries org/acme --before 3
  metered entries org/acme --oldest-first --limit 0 --json`,
		Args: cobra.ExactArgs(1),
	}
	flags := c.Flags()
	flags.BoolVar(&oldest, "oldest-first", false, "begin with the first entry")
	flags.Int64Var(&opts.After, "after", 0, "skip the entries up to this number")
	flags.Int64Var(&opts.Before, "before", 0, "skip the entries from this number on")
	flags.IntVarP(&opts.Max, "limit", "n", opts.Max, "list so many at most; 0 is all")
	return a.does(c, needReporting, func(ctx context.Context, args []string) error {
		opts.NewestFirst = !oldest
		ledger, err := budget.New(budget.Config{Schema: a.schema})
		if err != nil {
			return err
		}
		return a.read(ctx, func(tx pgx.Tx) error {
			if err := a.known(ctx, tx, args[0]); err != nil {
				return err
			}
			return a.entries(ctx, tx, ledger, args[0], opts)
		})
	})
}

func (a *app) entries(ctx context.Context, tx pgx.Tx, ledger *budget.Ledger, scope string,
	opts budget.EntriesOptions) error {
	t := a.table("ENTRY", "AT", "KIND", "AMOUNT", "SPENT", "REFUNDED", "CREDITED", "HELD", "ABOUT",
		"NOTE")
	for e, err := range ledger.Entries(ctx, tx, scope, opts) {
		switch {
		case err != nil:
			return err
		case a.json:
			if err := a.print(e); err != nil {
				return err
			}
		default:
			t.row(e.Seq, e.At, e.Kind, e.Amount, e.Spent, e.Refunded, e.Credited, e.Held, about(e),
				noteText(e.Note))
		}
	}
	return t.flush()
}

// about names the objects of an entry.
func about(e budget.Entry) string {
	var all []string
	if e.Ref > 0 {
		all = append(all, fmt.Sprintf("of entry %d", e.Ref))
	}
	if e.Hold != "" {
		all = append(all, "hold "+e.Hold)
	}
	if e.Operation != "" {
		all = append(all, "operation "+named(e.OperationTenant, e.Operation))
	}
	return dash(strings.Join(all, ", "))
}

// named is an id in its tenant.
func named(space, id string) string {
	if space == "" {
		return id
	}
	return space + " " + id
}

func dash(text string) string {
	if text == "" {
		return "-"
	}
	return text
}

func noteText(n budget.Note) string {
	var all []string
	for _, part := range []struct{ name, text string }{{"", n.Actor}, {"for ", n.Tenant},
		{"in ", n.Correlation}, {"", n.Reason}, {"use ", n.Use}} {
		if part.text != "" {
			all = append(all, part.name+part.text)
		}
	}
	return dash(strings.Join(all, ", "))
}
