package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"

	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/inspect"
)

// holdFlags select holds.
type holdFlags struct {
	tenant, holder, entity, scope, state string
	oneTenant, byDue, sessions           bool
	limit                                int
}

func (a *app) holdsCmd() *cobra.Command {
	f := holdFlags{limit: 50}
	c := &cobra.Command{
		Use:   "holds",
		Short: "List holds",
		Long: `Holds lists holds of all tenants, or of one, newest first. With --by-due it lists held ones, and expired ones that were not
swept, in the order in which they fall due. --scope with --state held is in that order, too. --holder and --entity need an
index by tenant: they list holds of one tenant, by default of the one without a name.`,
		Example: `  metered holds
  metered holds --scope org/acme --state held
  metered holds --by-due --json
  metered holds --sessions --state held`,
	}
	flags := c.Flags()
	flags.StringVar(&f.tenant, "tenant", "", "of this tenant; defaults to all")
	flags.StringVar(&f.holder, "holder", "", "of this holder")
	flags.StringVar(&f.entity, "entity", "", "linked with this by their capture")
	flags.StringVar(&f.scope, "scope", "", "with a line of this scope")
	flags.StringVar(&f.state, "state", "", "held, captured, released, expired or returned")
	flags.BoolVar(&f.byDue, "by-due", false, "in the order in which they fall due")
	flags.BoolVar(&f.sessions, "sessions", false,
		"holds of sessions (metered.Open): work that knows its cost at its end")
	flags.IntVarP(&f.limit, "limit", "n", f.limit, "list so many at most; 0 is all")
	for _, other := range []string{"holder", "entity", "scope"} {
		c.MarkFlagsMutuallyExclusive("by-due", other)
	}
	for _, other := range []string{"by-due", "holder", "entity"} {
		c.MarkFlagsMutuallyExclusive("sessions", other)
	}
	return a.does(c, needReporting, func(ctx context.Context, _ []string) error {
		f.oneTenant = flags.Changed("tenant")
		if f.limit < 0 {
			return usagef("--limit: %d is negative", f.limit)
		}
		return a.read(ctx, func(tx pgx.Tx) error {
			r, err := inspect.New(tx, a.schema)
			if err != nil {
				return err
			}
			return a.listHolds(ctx, r, f)
		})
	})
}

// page is a function that returns a page of holds after the cursor, and the next cursor.
type holdPage func(ctx context.Context, after string, limit int) ([]holds.Hold, string, error)

func (f holdFlags) pages(r *inspect.Reader) holdPage {
	switch {
	case f.byDue:
		return func(ctx context.Context, after string, limit int) ([]holds.Hold, string, error) {
			l, err := r.Book.Due(ctx, r.DB,
				holds.DueFilter{Tenant: f.tenant, AllTenants: !f.oneTenant,
					State: holds.State(f.state), After: after, Max: limit})
			return l.Holds, l.Next, err
		}
	case f.holder != "" || f.entity != "":
		return func(ctx context.Context, after string, limit int) ([]holds.Hold, string, error) {
			l, err := r.Book.List(ctx, r.DB,
				holds.Filter{Tenant: f.tenant, Holder: f.holder, Entity: f.entity, Scope: f.scope,
					State: holds.State(f.state), After: after, Max: limit})
			return l.Holds, l.Next, err
		}
	}
	return func(ctx context.Context, after string, limit int) ([]holds.Hold, string, error) {
		filter := inspect.HoldFilter{Scope: f.scope, State: holds.State(f.state),
			Sessions: f.sessions, After: after, Limit: limit}
		if f.oneTenant {
			filter.Tenant = &f.tenant
		}
		l, err := r.Holds(ctx, filter)
		return l.Holds, l.Next, err
	}
}

func (a *app) listHolds(ctx context.Context, r *inspect.Reader, f holdFlags) error {
	t := a.table("HOLD", "STATE", "HOLDER", "PLACED", "DUE", "UNITS")
	next, listed := f.pages(r), 0
	for after := ""; ; {
		size := 1000
		if f.limit > 0 {
			size = min(size, f.limit-listed)
		}
		page, more, err := next(ctx, after, size)
		if err != nil {
			return err
		}
		for _, h := range page {
			if a.json {
				if err := a.print(h); err != nil {
					return err
				}
				continue
			}
			t.row(named(h.Tenant, h.ID), h.State, dash(h.Holder), h.PlacedAt, h.Due, lines(h.Lines))
		}
		if listed += len(page); listed == 0 && more == "" && !a.json {
			fmt.Fprintln(a.err, "There are none.")
		}
		if more == "" {
			return t.flush()
		}
		if f.limit > 0 && listed >= f.limit {
			if err := t.flush(); err != nil || a.json {
				return err
			}
			fmt.Fprintln(a.out, "There are more: see --limit.")
			return nil
		}
		after = more
	}
}

func lines(all []holds.HeldLine) string {
	var text []string
	for _, l := range all {
		text = append(text, fmt.Sprintf("%s %d", l.Scope, l.Amount))
	}
	return strings.Join(text, ", ")
}

func (a *app) holdCmd() *cobra.Command {
	var tenant string
	c := &cobra.Command{
		Use:     "hold ID",
		Short:   "Show a hold and its history",
		Long:    "Hold shows the state of a hold, its units and its history, which has an expiry once it was recorded.",
		Example: "  metered hold seat-21A --tenant hall",
		Args:    cobra.ExactArgs(1),
	}
	c.Flags().StringVar(&tenant, "tenant", "", "the tenant of the hold")
	return a.does(c, needReporting, func(ctx context.Context, args []string) error {
		return a.read(ctx, func(tx pgx.Tx) error {
			r, err := inspect.New(tx, a.schema)
			if err != nil {
				return err
			}
			d, err := r.Hold(ctx, tenant, args[0])
			switch {
			case errors.Is(err, holds.ErrUnknown) && tenant == "":
				return fmt.Errorf("%w as %q; if it has a tenant, give it with --tenant", err,
					args[0])
			case err != nil:
				return err
			case a.json:
				return a.print(d)
			}
			return a.printHold(d)
		})
	})
}

func (a *app) printHold(d inspect.HoldDetail) error {
	h := d.Hold
	t := a.table()
	fact := func(name string, value any, known bool) {
		if known {
			t.row(name, value)
		}
	}
	fact("hold", named(h.Tenant, h.ID), true)
	fact("state", h.State, true)
	fact("holder", h.Holder, h.Holder != "")
	fact("placed", h.PlacedAt, true)
	fact("deadline", h.Deadline, true)
	fact("due", h.Due, !h.Due.Equal(h.Deadline))
	fact("remaining", h.Remaining(), h.Remaining() > 0)
	fact("ended", h.EndedAt, !h.EndedAt.IsZero())
	if h.Claim != nil {
		fact("claim", h.Claim.Type+" "+h.Claim.Value, true)
	}
	fact("entity", h.Entity, h.Entity != "")
	fact("reason", h.Reason, h.Reason != "")
	fact("metadata", string(h.Metadata), len(h.Metadata) > 0)
	l := a.table("SCOPE", "PLACED", "CAPTURED", "OPEN", "REFUNDED")
	for _, line := range h.Lines {
		l.row(line.Scope, line.Amount, line.Captured, line.Open, line.Refunded)
	}
	e := a.table("VERSION", "AT", "WHAT", "DEADLINE", "BY OPERATION", "NOTE")
	for _, event := range d.History {
		operation := "-"
		if event.Operation != "" {
			operation = named(event.OperationTenant, event.Operation)
		}
		e.row(event.Version, event.At, event.Kind, event.Deadline, operation, noteText(event.Note))
	}
	return a.sections(t, l, e)
}

// sections prints tables with a line between them.
func (a *app) sections(tables ...*table) error {
	var err error
	for i, t := range tables {
		if i > 0 {
			fmt.Fprintln(a.out)
		}
		err = cmp.Or(err, t.flush())
	}
	return err
}
