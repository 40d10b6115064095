package main

import (
	"cmp"
	"context"
	"fmt"
	"strconv"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/internal/inspect"
)

func (a *app) explainCmd() *cobra.Command {
	var rules limits
	var mustExist bool
	var note budget.Note
	c := &cobra.Command{
		Use:   "explain SCOPE AMOUNT --limit LIMIT...",
		Short: "Say whether a charge would be let in now, and if not, why and when",
		Long: `Explain predicts the answer to a charge: admitted, or refused by which limit, with the usage that counts against it, and
when the charge would fit if nothing else happens. Limits are not in the database: they come with each call, so give those
of your program. For a wallet it also shows the remaining lots: the limit of a draw is "prepaid", or "credit/50" with an
overdraft of 50. Lots for some uses count for a charge with --use alone. It takes no lock, and the next charge may change
the answer.

If the charge would be refused, it exits with 4.`,
		Example: `  metered explain org/acme 5 --limit hourly=1000/1h --limit 100000/30d
  metered explain org/acme 5 --limit prepaid --json
  metered explain user/ann 5 --limit wallet=prepaid
  metered explain user/ann 5 --limit prepaid --use images`,
		Args: cobra.ExactArgs(2),
	}
	c.Flags().VarP(&rules, "limit", "l", limitsHelp)
	c.Flags().BoolVar(&mustExist, "must-exist", false,
		"refuse a scope that was never created, or was retired")
	c.Flags().StringVar(&note.Use, "use", "",
		"the use of the charge (Note.Use): lots of a wallet for it pay, too")
	return a.does(c, needReporting, func(ctx context.Context, args []string) error {
		amount, err := strconv.ParseInt(args[1], 10, 64)
		if err != nil {
			return usagef("%q is not an amount", args[1])
		}
		return a.read(ctx, func(tx pgx.Tx) error {
			r, err := inspect.New(tx, a.schema)
			if err != nil {
				return err
			}
			e, err := r.Explain(ctx, budget.Charge{Scope: args[0], Amount: amount, Limits: rules,
				MustExist: mustExist, Note: note})
			if err != nil {
				return err
			}
			if a.json {
				err = a.print(e)
			} else {
				err = a.printExplanation(e)
			}
			if err == nil && !e.Fits {
				err = found(exitRefused)
			}
			return err
		})
	})
}

func (a *app) printExplanation(e inspect.Explanation) error {
	verdict := "would be let in"
	if !e.Fits {
		verdict = "would be refused"
	}
	if len(e.Limits) == 0 && e.Fits {
		verdict += ", for no limit was given"
	}
	use := ""
	if e.Use != "" {
		use = " for " + shown(e.Use)
	}
	fmt.Fprintf(a.out, "At %s a charge of %d%s on %s %s.\n", instant(e.Now), e.Amount, use,
		shown(e.Scope), verdict)
	if e.Usage.Seq == 0 {
		fmt.Fprintln(a.out, "The scope has no entries. If it should have, its name is mistyped.")
	}
	switch {
	case e.Fits:
	case e.Code == "budget_exceeded" && e.FitsAfter == budget.Never:
		fmt.Fprintln(a.out, "Waiting does not help.")
		if e.Wallet != nil {
			fmt.Fprintln(a.out, "Units that come later are not counted, such as those of a plan that renews.")
		}
	case e.Code == "budget_exceeded":
		fmt.Fprintf(a.out, "It would fit in %s, at %s, if nothing else happens.\n",
			lasting(e.FitsAfter), instant(e.FitsAt))
	default:
		fmt.Fprintln(a.out, shown(e.Reason))
	}
	if !e.Fits && e.ForUse() {
		fmt.Fprintln(a.out, "Lots for some uses are not counted: name the use of the charge with --use.")
	}
	all := []*table{}
	if len(e.Limits) > 0 {
		t := a.table("LIMIT", "MAX", "USED", "HELD", "LEASED", "AVAILABLE", "ADMITS IT", "FITS IN")
		for _, l := range e.Limits {
			t.row(explainedLimit(l)...)
		}
		all = append(all, t)
	}
	for _, l := range e.Limits {
		if l.Refusal == nil || len(l.Oldest) == 0 {
			continue
		}
		t := a.table("COUNTS AGAINST "+limitName(l.Limit)+", OLDEST FIRST", "AT", "LEAVES AT",
			"KIND", "AMOUNT", "ABOUT")
		for _, o := range l.Oldest {
			entry := "entry " + strconv.FormatInt(o.Seq, 10)
			switch o.Kind {
			case budget.EntryCharge, budget.EntryCapture:
				leaves := o.At.Add(l.Limit.Window)
				if !l.PeriodEnd.IsZero() {
					leaves = l.PeriodEnd
				}
				t.row(entry, o.At, instant(leaves), o.Kind, o.Amount, about(o))
			case budget.EntryRefund:
				t.row(entry, o.At, "with its charge", o.Kind, -o.Amount, about(o))
			}
		}
		all = append(all, t)
	}
	if len(e.Holds) > 0 && !e.Fits {
		t := a.table("HOLD", "HOLDER", "DUE", "UNITS")
		for _, h := range e.Holds {
			t.row(named(h.Tenant, h.ID), dash(h.Holder), h.Due, lines(h.Lines))
		}
		all = append(all, t)
	}
	if len(e.Leases) > 0 && !e.Fits {
		t := a.table("LEASE", "OWNER", "ENDS", "GRANTED", "SPENT")
		for _, l := range e.Leases {
			t.row(l.No, cmp.Or(l.Child, l.Owner), l.EndsAt, l.Granted, l.Spent)
		}
		all = append(all, t)
	}
	if e.Wallet != nil && !e.Fits {
		all = append(all, a.lotsLeft(*e.Wallet))
	}
	if len(all) > 0 {
		fmt.Fprintln(a.out)
	}
	return a.sections(all...)
}

func explainedLimit(l inspect.ExplainedLimit) []any {
	admits, fits := "yes", "-"
	switch {
	case l.Purged:
		admits = "not known: purged"
	case l.Refusal != nil && l.Refusal.RetryAfter == budget.Never:
		admits, fits = "no", "never"
	case l.Refusal != nil:
		admits, fits = "no", lasting(l.Refusal.RetryAfter)
	}
	return []any{limitName(l.Limit), l.Limit.Max, l.Used, l.Held, l.Leased, l.Available, admits,
		fits}
}

func limitName(l budget.Limit) string {
	rule := windowText(l.Window)
	switch {
	case l.Prepaid:
		rule = "credit"
	case !l.Period.IsZero():
		rule = inspect.PeriodText(l.Period)
	}
	if l.Name != "" {
		return l.Name + " (" + rule + ")"
	}
	return rule
}
