package main

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"

	"github.com/pgmetered/metered/internal/inspect"
)

func (a *app) walletCmd() *cobra.Command {
	var before moment
	c := &cobra.Command{
		Use:   "wallet NAME",
		Short: "Show the units of a wallet: in all, by category and by lot",
		Long: `Wallet shows the units of a wallet that can be drawn now, those that open holds and leases keep, and its overdraft, in all
and by category. It lists lots with units left, in the order in which they are drawn. A lot that is due has ended, swept or
not. With --expiring-before it shows the units that lapse or roll over before that time unless they are drawn.

For ended lots see metered lots, and for the history metered statement NAME --by-lot.`,
		Example: `  metered wallet user/ann
  metered wallet user/ann --expiring-before 2027-01-01 --json`,
		Args: cobra.ExactArgs(1),
	}
	c.Flags().Var(&before, "expiring-before", "also show the units that end before this time")
	return a.does(c, needReporting, func(ctx context.Context, args []string) error {
		return a.read(ctx, func(tx pgx.Tx) error {
			r, err := inspect.New(tx, a.schema)
			if err != nil {
				return err
			}
			w, err := r.Wallet(ctx, args[0])
			if err != nil || w == nil {
				return orUnknownWallet(err, args[0])
			}
			var expiring *int64
			if !before.IsZero() {
				units := w.Expiring(before.Time)
				expiring = &units
			}
			if a.json {
				return a.print(struct {
					*inspect.Wallet
					Before   *moment `json:"expiring_before,omitempty"`
					Expiring *int64  `json:"expiring,omitempty"`
				}{w, given(before, expiring), expiring})
			}
			return a.printWallet(*w, before, expiring)
		})
	})
}

// given is the time, if units were given.
func given(at moment, units *int64) *moment {
	if units == nil {
		return nil
	}
	return &at
}

func (a *app) printWallet(w inspect.Wallet, before moment, expiring *int64) error {
	fmt.Fprintf(a.out, "At %s %s has %d to draw, and %d held.\n", instant(w.Now), shown(w.Wallet),
		max(0, w.Units), w.Held)
	var uses []string
	for _, l := range w.Lots {
		uses = append(uses, l.Uses...)
	}
	slices.Sort(uses)
	for _, use := range slices.Compact(uses) {
		fmt.Fprintf(a.out, "For %s it has %d.\n", shown(use), w.For(use))
	}
	if w.Overdrawn > 0 {
		fmt.Fprintf(a.out, "It is overdrawn by %d.\n", w.Overdrawn)
	}
	if !w.NextEnd.IsZero() {
		fmt.Fprintf(a.out, "%d of it end next, at %s.\n", w.NextUnits, instant(w.NextEnd))
	}
	if expiring != nil {
		fmt.Fprintf(a.out, "%d of it end before %s.\n", *expiring, instant(before.Time))
	}
	categories := a.table("CATEGORY", "REST", "HELD")
	for _, c := range w.Categories {
		categories.row(dash(c.Category), c.Units, c.Held)
	}
	if len(w.Lots) > 0 {
		fmt.Fprintln(a.out)
	}
	return a.sections(categories, a.lotsLeft(w))
}

// lotsLeft is a table of the lots that have something.
func (a *app) lotsLeft(w inspect.Wallet) *table {
	t := a.table("LOT", "REFERENCE", "CATEGORY", "PRIORITY", "ENDS", "GRANTED", "REST", "HELD")
	for _, l := range w.Lots {
		t.row(l.Lot, dash(l.Reference), forUses(l.Category, l.Uses), l.Priority,
			ends(instant(l.Expires)), l.Amount, l.Units, l.Held)
	}
	return t
}

// forUses is a lot's category, with the uses that it pays for.
func forUses(category string, uses []string) string {
	if len(uses) > 0 {
		category = strings.TrimSpace(category + " for " + strings.Join(uses, ", "))
	}
	return dash(category)
}

func ends(at string) string {
	if at == "-" {
		return "never"
	}
	return at
}

func (a *app) lotsCmd() *cobra.Command {
	limit := 50
	c := &cobra.Command{
		Use:   "lots WALLET",
		Short: "List a wallet's lots, newest first, with their outcomes",
		Long: `Lots lists all lots of a wallet, ended ones too, until they are purged. GRANTED is the sum of the units left (REST), DRAWN,
HELD, LAPSED at the lot's end, REVOKED, and ROLLED over into another lot. State is pending (it begins later), open, held,
ended, revoked or used up.
"FROM" is the lot that its units were in before.`,
		Example: `  metered lots user/ann
  metered lots user/ann --limit 0 --json`,
		Args: cobra.ExactArgs(1),
	}
	c.Flags().IntVarP(&limit, "limit", "n", limit, "list so many at most; 0 is all")
	return a.does(c, needReporting, func(ctx context.Context, args []string) error {
		if limit < 0 {
			return usagef("--limit: %d is negative", limit)
		}
		return a.read(ctx, func(tx pgx.Tx) error {
			r, err := inspect.New(tx, a.schema)
			if err != nil {
				return err
			}
			return a.listLots(ctx, r, args[0], limit)
		})
	})
}

func (a *app) listLots(ctx context.Context, r *inspect.Reader, name string, limit int) error {
	t, listed := a.table("LOT", "REFERENCE", "CATEGORY", "STATE", "GRANTED AT", "ENDS", "GRANTED",
		"REST", "DRAWN", "HELD", "LAPSED", "REVOKED", "ROLLED", "FROM"), 0
	for after := ""; ; {
		size := inspect.MaxPage
		if limit > 0 {
			size = min(size, limit-listed)
		}
		page, err := r.Lots(ctx, name, after, size)
		if err != nil {
			return err
		}
		for _, l := range page.Lots {
			if a.json {
				if err := a.print(l); err != nil {
					return err
				}
				continue
			}
			from := "-"
			if l.From > 0 {
				from = fmt.Sprint(l.From)
			}
			t.row(l.No, dash(l.Reference), forUses(l.Category, l.Uses), l.State, l.GrantedAt,
				ends(instant(l.Expires)), l.Granted, l.Rest, l.Drawn, l.Held, l.Lapsed, l.Revoked,
				l.Rolled, from)
		}
		if listed += len(page.Lots); listed == 0 {
			if w, err := r.Wallet(ctx, name); err != nil || w == nil {
				return orUnknownWallet(err, name)
			}
		}
		after = page.Next
		if after != "" && listed != limit {
			continue
		}
		if err := t.flush(); err != nil || a.json || after == "" {
			return err
		}
		fmt.Fprintln(a.out, "There may be more: see --limit.")
		return nil
	}
}
