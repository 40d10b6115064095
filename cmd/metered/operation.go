package main

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"

	"github.com/pgmetered/metered/internal/inspect"
)

func (a *app) operationCmd() *cobra.Command {
	var tenant, river string
	c := &cobra.Command{
		Use:   "operation ID",
		Short: "Show the outcome of an operation, and its charges",
		Long: `Operation shows the outcome of a command or a usage event: whether it committed or was refused, its charges, the
holds that it placed or ended, and its jobs. A refusal is on record only if the command has RecordRefusal. An operation
that is not on record has not committed, or was purged, or is of another tenant: it exits with 5.`,
		Example: "  metered operation order-42 --tenant shop",
		Args:    cobra.ExactArgs(1),
	}
	c.Flags().StringVar(&tenant, "tenant", "", "the tenant of the operation")
	c.Flags().StringVar(&river, "river-schema", "",
		"where River's tables are; defaults to the search_path")
	return a.does(c, needReporting, func(ctx context.Context, args []string) error {
		return a.read(ctx, func(tx pgx.Tx) error {
			r, err := inspect.New(tx, a.schema)
			if err != nil {
				return err
			}
			d, err := r.WithRiver(river).Operation(ctx, tenant, args[0])
			switch {
			case errors.Is(err, inspect.ErrUnknown) && tenant == "":
				return fmt.Errorf("%w; if it has a tenant, give it with --tenant", err)
			case err != nil:
				return err
			case a.json:
				return a.print(d)
			}
			return a.printOperation(d)
		})
	})
}

func (a *app) printOperation(d inspect.OperationDetail) error {
	t := a.table()
	t.row("operation", named(d.Tenant, d.ID))
	t.row("name", dash(d.Name))
	t.row("state", d.State)
	t.row("at", d.At)
	if !d.IssuedAt.IsZero() {
		t.row("issued", d.IssuedAt)
	}
	if d.Refusal != "" {
		t.row("refusal", d.Refusal)
		t.row("code", d.Code)
	}
	all := []*table{t}
	if len(d.Charges) > 0 {
		charges := a.table("CHARGED", "ENTRY", "AMOUNT", "AT")
		for _, p := range d.Charges {
			charges.row(p.Scope, p.Seq, p.Amount, p.At)
		}
		all = append(all, charges)
	}
	if len(d.Holds) > 0 {
		list := a.table("HOLD", "THEN")
		for _, h := range d.Holds {
			list.row(named(h.Tenant, h.ID), h.State)
		}
		all = append(all, list)
	}
	if len(d.Jobs.Jobs) > 0 {
		jobs := a.table("JOB", "KIND", "QUEUE", "STATE", "ATTEMPT", "ERROR")
		for _, j := range d.Jobs.Jobs {
			state := j.State
			switch {
			case j.Gone:
				state = "gone"
			case j.State == inspect.Parked:
				state = parkedState(j)
			}
			jobs.row(j.ID, dash(j.Kind), dash(j.Queue), dash(state), j.Attempt, dash(j.Error))
		}
		all = append(all, jobs)
	}
	if d.Jobs.Unreadable != "" {
		unreadable := a.table()
		unreadable.row("Of its jobs only the ids are known: " + d.Jobs.Unreadable)
		all = append(all, unreadable)
	}
	return a.sections(all...)
}

// parkedState says where a parked job waits.
func parkedState(j inspect.Job) string {
	if j.Position == 0 {
		return fmt.Sprintf("parked in the line of %s", j.WaitsFor)
	}
	return fmt.Sprintf("parked, number %d in the line of %s", j.Position, j.WaitsFor)
}
