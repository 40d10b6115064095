package main

import (
	"context"
	"encoding/csv"
	"fmt"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"

	"github.com/pgmetered/metered/budget"
)

func (a *app) statementCmd() *cobra.Command {
	var from, to moment
	var format string
	var lots byLot
	c := &cobra.Command{
		Use:   "statement SCOPE",
		Short: "List a scope's entries of a period, with sums: for an invoice",
		Long: `Statement lists the entries of a scope from one time on until before another, oldest first, and their sums. "Used" is the
scope's usage so far: charges less refunds and credits. As CSV it has the entries alone, with their notes. As JSON it is an
object for each entry and a last one, {"period": …}, with the sums.

With --by-lot it shows each entry of a wallet with its changes of lots, with --lot the changes of one lot. "Credited" is
then less units that lapsed, were revoked, or rolled over.

The spends from a lease are one capture. If entries of the period were purged, it fails, and prints nothing.`,
		Example: `  metered statement org/acme --from 2026-11-01 --to 2026-12-01
  metered statement org/acme --format csv
  metered statement user/ann --by-lot
  metered statement user/ann --lot 1 --format csv`,
		Args: cobra.ExactArgs(1),
	}
	flags := c.Flags()
	flags.Var(&from, "from", "the first time of the period; defaults to the first entry")
	flags.Var(&to, "to", "the first time that is no longer part of it; defaults to now")
	flags.BoolVar(&lots.all, "by-lot", false, "of a wallet: each entry with its changes of lots")
	flags.Int64Var(&lots.lot, "lot", 0, "of a wallet: changes of this lot alone")
	flags.StringVar(&format, "format", "table", "table, csv or json")
	return a.does(c, needReporting, func(ctx context.Context, args []string) error {
		switch format {
		case "json":
			a.json = true
		case "table", "csv":
		default:
			return usagef("--format: %q is not table, csv or json", format)
		}
		ledger, err := budget.New(budget.Config{Schema: a.schema})
		if err != nil {
			return err
		}
		return a.read(ctx, func(tx pgx.Tx) error {
			if err := a.known(ctx, tx, args[0]); err != nil {
				return err
			}
			if to.IsZero() {
				if err := tx.QueryRow(ctx,
					"select pg_catalog.to_json(pg_catalog.clock_timestamp())").Scan(&to.Time); err != nil {
					return err
				}
			}
			sums, err := ledger.UsageBetween(ctx, tx, args[0], from.Time, to.Time)
			if err != nil {
				return err
			}
			if lots.all || lots.lot != 0 {
				return a.statementByLot(ctx, tx, args[0], sums, lots, format == "csv")
			}
			return a.statement(ctx, tx, ledger, args[0], sums, format == "csv")
		})
	})
}

func (a *app) statement(ctx context.Context, tx pgx.Tx, ledger *budget.Ledger, scope string,
	sums budget.RangeUsage, asCSV bool) error {
	entries := ledger.Entries(ctx, tx, scope, budget.EntriesOptions{From: sums.From, To: sums.To})
	if asCSV {
		w := csv.NewWriter(a.out)
		if err := w.Write(csvHead); err != nil {
			return err
		}
		for e, err := range entries {
			if err != nil {
				return err
			}
			if err := w.Write(csvRow(e)); err != nil {
				return err
			}
		}
		w.Flush()
		return w.Error()
	}
	t := a.table("ENTRY", "AT", "KIND", "AMOUNT", "USED", "HELD", "ABOUT", "NOTE")
	for e, err := range entries {
		switch {
		case err != nil:
			return err
		case a.json:
			if err := a.print(e); err != nil {
				return err
			}
		default:
			t.row(e.Seq, e.At, e.Kind, signed(e), used(e), e.Held, about(e), noteText(e.Note))
		}
	}
	if a.json {
		return a.print(map[string]any{"period": ranged(sums)})
	}
	if err := t.flush(); err != nil {
		return err
	}
	a.printSums(sums)
	return nil
}

func (a *app) printSums(sums budget.RangeUsage) {
	fmt.Fprintf(a.out, "Charged %d, of which %d were refunded until now; credited %d; refunds made %d.\n",
		sums.Charged, sums.RefundedOfCharged, sums.Credited, sums.RefundsMade)
	if sums.Unsettled > 0 {
		fmt.Fprintf(a.out, "Not in it: %d spent from leases that are open.\n", sums.Unsettled)
	}
}

func used(e budget.Entry) int64 { return e.Spent - e.Refunded - e.Credited }

// change is the amount that an entry adds to usage.
func change(e budget.Entry) int64 {
	switch e.Kind {
	case budget.EntryCharge, budget.EntryCapture, budget.EntryLapse, budget.EntryRevoke,
		budget.EntryRollOver:
		return e.Amount
	case budget.EntryRefund, budget.EntryCredit:
		return -e.Amount
	}
	return 0
}

// signed is the amount of an entry, without a sign if it does not change usage.
func signed(e budget.Entry) string {
	if n := change(e); n != 0 {
		return fmt.Sprintf("%+d", n)
	}
	return strconv.FormatInt(e.Amount, 10)
}

var csvHead = []string{"scope", "entry", "at", "kind", "amount", "change", "used", "held",
	"refunds_entry", "hold", "operation_tenant",
	"operation", "actor", "tenant", "correlation", "reason", "occurred_at"}

func csvRow(e budget.Entry) []string {
	number := func(n int64) string { return strconv.FormatInt(n, 10) }
	ref, occurred := "", ""
	if e.Ref > 0 {
		ref = number(e.Ref)
	}
	if !e.OccurredAt.IsZero() {
		occurred = e.OccurredAt.UTC().Format(time.RFC3339Nano)
	}
	return []string{e.Scope, number(e.Seq), e.At.UTC().Format(time.RFC3339Nano), string(e.Kind),
		number(e.Amount), number(change(e)),
		number(used(e)), number(e.Held), ref, e.Hold, e.OperationTenant, e.Operation, e.Note.Actor,
		e.Note.Tenant, e.Note.Correlation,
		e.Note.Reason, occurred}
}

// ranged is a RangeUsage with its derived sums.
func ranged(u budget.RangeUsage) any {
	return struct {
		budget.RangeUsage
		Billed int64 `json:"billed"`
		Used   int64 `json:"used"`
	}{u, u.Billed(), u.Used()}
}
