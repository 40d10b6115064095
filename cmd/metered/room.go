package main

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"

	"github.com/pgmetered/metered/internal/inspect"
)

// walk looks at all scopes that begin with the argument, or at all.
func (a *app) walk(ctx context.Context, args []string, w inspect.Walk,
	show func(inspect.Walk) error) error {
	if w.Keep < 1 || w.Keep > inspect.MaxPage {
		return usagef("--rows: %d is not from 1 to %d", w.Keep, inspect.MaxPage)
	}
	if len(args) == 1 {
		w.Prefix = args[0]
	}
	return a.read(ctx, func(tx pgx.Tx) error {
		r, err := inspect.New(tx, a.schema)
		for more := err == nil; more; {
			if more, err = w.More(ctx, r); err != nil {
				break
			}
		}
		if err != nil {
			return err
		}
		return show(w)
	})
}

func (a *app) nearlyCmd() *cobra.Command {
	var rules scopeLimits
	rows := 20
	c := &cobra.Command{
		Use:   "nearly-out [PREFIX] --limit LIMIT...",
		Short: "List the scopes with less than a quarter of a limit left",
		Long: `Nearly-out looks at all scopes, or at those that begin with a prefix, also if nothing has happened to them for long, and lists
the limits of which less than a quarter is left, the fullest first. Limits are not in the database: give those of your program, each
for the scopes that begin with a name. For the credit of wallets see metered wallets.`,
		Example: `  metered nearly-out --limit 'user/* 600/month@Europe/Berlin' --limit 'org/* hourly=1000/1h'
  metered nearly-out user/ --limit 5/30d -n 100 --json`,
		Args: cobra.MaximumNArgs(1),
	}
	c.Flags().VarP(&rules, "limit", "l", limitsHelp+
		", after the beginning of names and *, such as 'org/* 300/1m'")
	c.Flags().IntVarP(&rows, "rows", "n", rows, "list so many at most, 1 to 1000")
	return a.does(c, needReporting, func(ctx context.Context, args []string) error {
		if len(rules) == 0 {
			return usagef("--limit: give the limits of your program")
		}
		return a.walk(ctx, args, inspect.Walk{Limits: rules.of, Keep: rows},
			func(w inspect.Walk) error {
				some := false
				t := a.table("SCOPE", "LIMIT", "USED", "HELD", "LEASED", "OF", "LEFT")
				for _, list := range [][]inspect.Room{w.Nearly, w.Credit} {
					for _, room := range list {
						if a.json {
							if err := a.print(room); err != nil {
								return err
							}
							continue
						}
						some = true
						t.row(room.Scope, inspect.LimitText(room.Limit), room.Gone(), room.Held,
							room.Leased, room.Of(), room.Rest())
					}
				}
				if !some && !a.json {
					fmt.Fprintf(a.out, "None of %s.\n", plural(w.Scopes, "scope", "scopes"))
				}
				return t.flush()
			})
	})
}

func (a *app) walletsCmd() *cobra.Command {
	rows, ending, plan := 20, "", ""
	c := &cobra.Command{
		Use:   "wallets [PREFIX]",
		Short: "List wallets by their credit, by what ends soon, or by plan",
		Long: `Wallets looks at all wallets, or at those that begin with a prefix, and lists those with the fewest units to draw first. An
overdrawn wallet has less than 0. Units of lots for some uses alone are not among them: see metered wallet NAME. CREDITED are all units
that were granted, less those that lapsed or were revoked.

With --ending it lists the lots that end within that time and have units left, the first to end first.

With --plan it lists the wallets that have a plan, by its name and then by their credit. A plan renews, begins later, or ends: then it was
cancelled or changed, and has units left.`,
		Example: `  metered wallets
  metered wallets --ending 7d
  metered wallets --plan pro
  metered wallets user/ --plan '*' -n 100 --json`,
		Args: cobra.MaximumNArgs(1),
	}
	c.Flags().IntVarP(&rows, "rows", "n", rows, "list so many at most, 1 to 1000")
	c.Flags().StringVar(&ending, "ending", ending,
		"list the lots that end within a time, such as 7d")
	c.Flags().StringVar(&plan, "plan", plan,
		"list the wallets with a plan: its name, its beginning and *, or * for all")
	c.MarkFlagsMutuallyExclusive("ending", "plan")
	return a.does(c, needReporting, func(ctx context.Context, args []string) error {
		switch w := (inspect.Walk{Keep: rows, Plan: inspect.PlanNames(plan)}); {
		case c.Flags().Changed("ending"):
			var err error
			if w.Within, err = inspect.ParseDuration(ending); err != nil {
				return usagef("--ending: %s", err)
			} else if w.Within <= 0 {
				return usagef("--ending: %s is no time to come", ending)
			}
			return a.walk(ctx, args, w, a.showEnding)
		case c.Flags().Changed("plan"):
			if plan == "" {
				return usagef("--plan: give a plan, or * for all")
			}
			return a.walk(ctx, args, w, a.showPlans)
		default:
			return a.walk(ctx, args, w, a.showWallets)
		}
	})
}

// showWallets prints wallets by their credit.
func (a *app) showWallets(w inspect.Walk) error {
	t := a.table("WALLET", "TO DRAW", "HELD", "LEASED", "CREDITED")
	if len(w.Wallets) == 0 && !a.json {
		fmt.Fprintf(a.out, "None of %s is a wallet.\n", plural(w.Scopes, "scope", "scopes"))
	}
	for _, room := range w.Wallets {
		if a.json {
			err := a.print(struct {
				Wallet   string `json:"wallet"`
				Units    int64  `json:"units"`
				Held     int64  `json:"held"`
				Leased   int64  `json:"leased"`
				Credited int64  `json:"credited"`
			}{room.Scope, room.Rest(), room.Held, room.Leased, room.Credited})
			if err != nil {
				return err
			}
			continue
		}
		t.row(room.Scope, room.Rest(), room.Held, room.Leased, room.Credited)
	}
	return t.flush()
}

// showEnding prints lots that end within a time.
func (a *app) showEnding(w inspect.Walk) error {
	t := a.table("WALLET", "LOT", "REFERENCE", "UNITS LEFT", "ENDS")
	for _, e := range w.Ending {
		if a.json {
			if err := a.print(e); err != nil {
				return err
			}
			continue
		}
		t.row(e.Wallet, e.Lot, dash(e.Reference), e.Units, e.Expires)
	}
	if len(w.Ending) == 0 && !a.json {
		fmt.Fprintf(a.out, "No lot with units left ends within %s.\n",
			inspect.DurationText(w.Within))
	}
	return t.flush()
}

// showPlans prints the wallets that have plans, and how many there are if these are not all.
func (a *app) showPlans(w inspect.Walk) error {
	t := a.table("PLAN", "WALLET", "TO DRAW", "STATE", "AT", "EACH PERIOD", "PERIOD", "CATEGORY")
	for _, p := range w.Plans {
		if a.json {
			if err := a.print(p); err != nil {
				return err
			}
			continue
		}
		amount, period := "-", "-"
		if !p.Period.IsZero() {
			amount, period = fmt.Sprint(p.Amount), inspect.PeriodText(p.Period)
		}
		t.row(p.Plan, p.Wallet, p.Units, p.State, p.At, amount, period, dash(p.Category))
	}
	if err := t.flush(); err != nil || a.json {
		return err
	}
	switch {
	case w.Planned == 0:
		fmt.Fprintf(a.out, "None of %s has such a plan.\n", plural(w.Scopes, "scope", "scopes"))
	case w.Planned > len(w.Plans):
		fmt.Fprintf(a.out, "These are %d of %d.\n", len(w.Plans), w.Planned)
	}
	return nil
}
