package main

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/spf13/cobra"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/maintain"
	"github.com/pgmetered/metered/wallet"
)

func (a *app) maintainCmd() *cobra.Command {
	var policy maintain.Policy
	var cfg holds.Config
	var noLots bool
	c := &cobra.Command{
		Use:   "maintain",
		Short: "Run all sweeps and purges, as cron does",
		Long: `Maintain ends the holds, leases and lots whose time is over, and deletes holds, leases and tokens that ended 30 days ago.
Entries of the ledger, records of operations and keys of jobs are kept unless a flag gives their age: entries must be
older than the longest window in use, operations and keys older than any client may wait before it repeats a call.

This command calls no subscribers (of holds.Config and wallet.Config, its Thresholds too). If the application has some,
let the application sweep (package maintain), and give this command --no-sweeps, or --no-lots if only wallets have some.

A step that fails does not keep the others from running, and the exit code is that of the failure. Deleted batches stay
deleted if it is interrupted: it says where to go on. Any number may run at once. Sweeps need the application's grants,
purges those of maintenance.`,
		Example: `  metered maintain
  metered maintain --entries 400d --operations 30d --job-keys 90d
  metered maintain --no-sweeps --entries 400d --json`,
	}
	flags := c.Flags()
	for _, age := range []struct {
		to    *time.Duration
		name  string
		usage string
	}{
		{&policy.Entries, "entries", "delete entries of the ledger that are older, as in 400d; without it all are kept"},
		{&policy.Operations, "operations",
			"delete records of operations that are older; without it all are kept"},
		{&policy.JobKeys, "job-keys", "delete keys of jobs that are older; without it all are kept"},
		{&policy.Holds, "holds", "delete holds that ended longer ago (default 30d)"},
		{&policy.Leases, "leases", "delete leases that were settled longer ago (default 30d)"},
		{&policy.Tokens, "tokens", "delete tokens that ended longer ago (default 30d)"},
	} {
		flags.Var((*days)(age.to), age.name, age.usage)
	}
	flags.BoolVar(&policy.NoSweeps, "no-sweeps", false, "do not end holds, leases and lots")
	flags.BoolVar(&policy.NoPurges, "no-purges", false, "delete nothing")
	flags.BoolVar(&noLots, "no-lots", false, "do not end lots of wallets")
	flags.IntVar(&policy.Batch, "batch", 0,
		"end or delete so many rows in one transaction, 16 to 2000; 0 is 500 to 5000, by table")
	flags.StringVar(&policy.After, "after", "",
		"begin the purge of entries with the scopes after this one")
	flags.BoolVar(&cfg.Notify, "notify", false,
		"tell those who listen, as holds.Config.Notify does")
	return a.does(c, needMaintenance, func(ctx context.Context, _ []string) error {
		return a.with(ctx, func(pool *pgxpool.Pool) error { return a.maintain(ctx, pool, cfg, noLots, policy) })
	})
}

func (a *app) maintain(ctx context.Context, pool *pgxpool.Pool, cfg holds.Config, noLots bool,
	policy maintain.Policy) error {
	ledger, err := budget.New(budget.Config{Schema: a.schema})
	if err != nil {
		return err
	}
	parts := maintain.Parts{Ledger: ledger}
	if parts.Holds, err = holds.New(ledger, cfg); err != nil {
		return err
	}
	if !noLots {
		if parts.Wallets, err = wallet.New(ledger, wallet.Config{}); err != nil {
			return err
		}
	}
	bar := a.progress("rows ended and deleted", -1)
	policy.Progress = func(r maintain.Report) {
		var n int64
		for _, s := range r.Steps {
			n += s.Done
		}
		bar.at(n)
	}
	report, err := maintain.Run(ctx, pool, parts, policy)
	bar.end()
	if len(report.Steps) == 0 {
		return err
	}
	t := a.table("STEP", "DONE", "LEFT FOR LATER", "REMARK")
	for _, s := range report.Steps {
		if s.Err != nil && strings.HasPrefix(s.Name, "sweep") {
			a.needs = needApplication // for the advice, if that is what it lacks
		}
		if a.json {
			line := map[string]any{"step": s.Name, "done": s.Done, "left": s.Left, "off": s.Off}
			if s.Err != nil {
				line["error"], line["code"] = a.advice(s.Err), metered.Code(s.Err)
			}
			if err := a.print(line); err != nil {
				return err
			}
			continue
		}
		t.row(s.Name, s.Done, leftOf(s), remark(s))
	}
	if report.After != "" && err != nil {
		fmt.Fprintf(a.err, "Go on with: --after %s\n", shellWord(report.After))
	}
	return cmp.Or(t.flush(), err)
}

// leftOf are the rows that wait, with the reasons.
func leftOf(s maintain.Step) string {
	var all []string
	for _, why := range slices.Sorted(maps.Keys(s.Left)) {
		all = append(all, fmt.Sprintf("%d (%s)", s.Left[why], why))
	}
	return cmp.Or(strings.Join(all, ", "), "0")
}

func remark(s maintain.Step) string {
	switch {
	case s.Err != nil:
		return "failed"
	case s.Off != "":
		return "left out: " + flagOf(s)
	}
	return ""
}

// flagOf is why a step was left out, by the flag in place of the field of Policy.
func flagOf(s maintain.Step) string {
	for field, flag := range map[string]string{
		"Policy.NoSweeps": "--no-sweeps", "Policy.NoPurges": "--no-purges",
		"Parts.Wallets is nil":         "--no-lots",
		"Policy.Operations is not set": "no --operations",
		"Policy.JobKeys is not set":    "no --job-keys",
		"Policy.Entries is not set":    "no --entries",
	} {
		if s.Off == field {
			return flag
		}
	}
	return s.Off
}
