package main

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/spf13/cobra"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/maintain"
)

// purges are the tables of purge, in its order, and where a policy has their ages.
var purges = []struct {
	name string
	age  func(*maintain.Policy) *time.Duration
}{
	{"ledger", func(p *maintain.Policy) *time.Duration { return &p.Entries }},
	{"holds", func(p *maintain.Policy) *time.Duration { return &p.Holds }},
	{"leases", func(p *maintain.Policy) *time.Duration { return &p.Leases }},
	{"tokens", func(p *maintain.Policy) *time.Duration { return &p.Tokens }},
	{"operations", func(p *maintain.Policy) *time.Duration { return &p.Operations }},
	{"jobs", func(p *maintain.Policy) *time.Duration { return &p.JobKeys }},
}

func (a *app) purgeCmd() *cobra.Command {
	var olderThan days
	var only []string
	var dry bool
	names := make([]string, len(purges))
	for i, p := range purges {
		names[i] = p.name
	}
	c := &cobra.Command{
		Use:   "purge --older-than AGE",
		Short: "Delete old rows, from all tables or some",
		Long: `Purge deletes entries of the ledger, ended holds, settled leases, ended tokens, records of operations and keys of jobs
that are older than the age: from all tables, or from those that --only names. With the entries of a wallet go their
changes of lots, and empty lots without later changes. The library's maintain.Policy documents the effect of each. In
short: entries must be older than the longest window in use, operations and keys older than any client may wait before
it repeats a call.

Deleted batches stay deleted if it is interrupted: purge again to go on. --dry-run counts, in READ ONLY transactions,
and deletes nothing. It needs SELECT on the tables, which the schema's owner has.`,
		Example: `  metered purge --older-than 400d --dry-run
  metered purge --older-than 90d --only holds,tokens,leases
  metered purge --older-than 400d --json`,
	}
	flags := c.Flags()
	flags.Var(&olderThan, "older-than", "the age from which it is deleted, as in 400d")
	flags.StringSliceVar(&only, "only", names, "the tables to purge")
	flags.BoolVar(&dry, "dry-run", false, "count the rows to delete, and delete none")
	_ = c.MarkFlagRequired("older-than")
	return a.does(c, needMaintenance, func(ctx context.Context, _ []string) error {
		if olderThan == 0 { // which a policy takes for its default
			return usagef("--older-than: 0 is no age")
		}
		for _, name := range only {
			if !slices.Contains(names, name) {
				return usagef("--only: %q is not one of %s", name, strings.Join(names, ", "))
			}
		}
		var functions []string
		if dry {
			a.needs = needOwner
		} else {
			functions = []string{"purge_scope", "purge_holds", "purge_leases", "purge_tokens",
				"purge_operations", "purge_job_keys"}
		}
		return a.with(ctx, func(pool *pgxpool.Pool) error {
			return a.purge(ctx, pool, only, time.Duration(olderThan), dry)
		}, functions...)
	})
}

func (a *app) purge(ctx context.Context, pool *pgxpool.Pool, only []string, olderThan time.Duration,
	dry bool) error {
	ledger, err := budget.New(budget.Config{Schema: a.schema})
	if err != nil {
		return err
	}
	verb := "DELETED"
	if dry {
		verb = "WOULD BE DELETED"
	}
	t := a.table("WHAT", verb)
	for _, p := range purges {
		if !slices.Contains(only, p.name) {
			continue
		}
		bar := a.progress(p.name+" purged", -1)
		policy := maintain.Policy{NoSweeps: true, DryRun: dry, Holds: budget.Never,
			Leases: budget.Never, Tokens: budget.Never,
			Progress: func(r maintain.Report) { bar.at(rowsOf(r)) }}
		*p.age(&policy) = olderThan
		report, err := maintain.Run(ctx, pool, maintain.Parts{Ledger: ledger}, policy)
		bar.end()
		n := rowsOf(report)
		for _, step := range report.Steps {
			if busy := int(step.Left["locked"]); busy > 0 {
				fmt.Fprintf(a.err, "%s left for the next purge\n",
					plural(busy, "scope was busy, and is", "scopes were busy, and are"))
			}
		}
		if a.json {
			if err := a.print(map[string]any{"what": p.name, "rows": n, "dry_run": dry,
				"complete": err == nil}); err != nil {
				return err
			}
		} else if n > 0 || err == nil {
			t.row(p.name, n)
		}
		if err != nil {
			return cmp.Or(t.flush(), fmt.Errorf("purge %s: %w", p.name, err))
		}
	}
	return t.flush()
}

// rowsOf is how many rows the steps of a run have deleted.
func rowsOf(r maintain.Report) (n int64) {
	for _, step := range r.Steps {
		n += step.Done
	}
	return n
}
