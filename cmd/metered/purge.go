package main

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"
	"github.com/spf13/cobra"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/jobs"
	"github.com/pgmetered/metered/leases"
	"github.com/pgmetered/metered/tokens"
)

// purges are the tables of purge, in its order.
var purges = []struct {
	name string
	run  func(ctx context.Context, a *app, pool *pgxpool.Pool, o purgeOptions) (int64, error)
}{
	{"ledger", purgeLedger}, {"holds", purgeHolds}, {"leases", purgeLeases},
	{"tokens", purgeTokens}, {"operations", purgeOperations}, {"jobs", purgeJobs},
}

// purgeOptions are those that every purge has.
type purgeOptions struct {
	olderThan time.Duration
	dry       bool
	progress  func(deleted int64)
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
changes of lots, and empty lots without later changes. The Purge calls of the library document the effect of each. In
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
			return a.purge(ctx, pool, only,
				purgeOptions{olderThan: time.Duration(olderThan), dry: dry})
		}, functions...)
	})
}

func (a *app) purge(ctx context.Context, pool *pgxpool.Pool, only []string,
	opts purgeOptions) error {
	verb := "DELETED"
	if opts.dry {
		verb = "WOULD BE DELETED"
	}
	t := a.table("WHAT", verb)
	for _, p := range purges {
		if !slices.Contains(only, p.name) {
			continue
		}
		o := opts
		bar := a.progress(p.name+" purged", -1)
		o.progress = bar.at
		n, err := p.run(ctx, a, pool, o)
		bar.end()
		if a.json {
			if err := a.print(map[string]any{"what": p.name, "rows": n, "dry_run": opts.dry,
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

func purgeLedger(ctx context.Context, a *app, pool *pgxpool.Pool, o purgeOptions) (int64, error) {
	ledger, err := budget.New(budget.Config{Schema: a.schema})
	if err != nil {
		return 0, err
	}
	r, err := ledger.Purge(ctx, pool, budget.PurgeOptions{OlderThan: o.olderThan, DryRun: o.dry,
		Progress: func(r budget.PurgeReport) { o.progress(r.Entries) }})
	if err == nil && r.Busy > 0 {
		fmt.Fprintf(a.err, "%s left for the next purge\n",
			plural(r.Busy, "scope was busy, and is", "scopes were busy, and are"))
	}
	return r.Entries, err
}

func purgeHolds(ctx context.Context, a *app, pool *pgxpool.Pool, o purgeOptions) (int64, error) {
	ledger, err := budget.New(budget.Config{Schema: a.schema})
	if err != nil {
		return 0, err
	}
	book, err := holds.New(ledger, holds.Config{})
	if err != nil {
		return 0, err
	}
	return book.Purge(ctx, pool, holds.PurgeOptions{OlderThan: o.olderThan, Progress: o.progress,
		DryRun: o.dry})
}

func purgeLeases(ctx context.Context, a *app, pool *pgxpool.Pool, o purgeOptions) (int64, error) {
	ledger, err := budget.New(budget.Config{Schema: a.schema})
	if err != nil {
		return 0, err
	}
	return leases.Purge(ctx, pool, ledger,
		leases.PurgeOptions{OlderThan: o.olderThan, Progress: o.progress, DryRun: o.dry})
}

func purgeTokens(ctx context.Context, a *app, pool *pgxpool.Pool, o purgeOptions) (int64, error) {
	store, err := tokens.New(tokens.Config{Schema: a.schema})
	if err != nil {
		return 0, err
	}
	return store.Purge(ctx, pool, tokens.PurgeOptions{OlderThan: o.olderThan, Progress: o.progress,
		DryRun: o.dry})
}

func purgeOperations(ctx context.Context, a *app, pool *pgxpool.Pool,
	o purgeOptions) (int64, error) {
	client, err := metered.New(pool, metered.Config{Config: budget.Config{Schema: a.schema}})
	if err != nil {
		return 0, err
	}
	return client.PurgeOperations(ctx, pool,
		metered.PurgeOptions{OlderThan: o.olderThan, Progress: o.progress, DryRun: o.dry})
}

func purgeJobs(ctx context.Context, a *app, pool *pgxpool.Pool, o purgeOptions) (int64, error) {
	inserter, err := river.NewClient[pgx.Tx](riverpgxv5.New(pool), &river.Config{})
	if err != nil {
		return 0, err
	}
	enqueuer, err := jobs.New(inserter, jobs.Config{Schema: a.schema})
	if err != nil {
		return 0, err
	}
	return enqueuer.Purge(ctx, pool, jobs.PurgeOptions{OlderThan: o.olderThan, Progress: o.progress,
		DryRun: o.dry})
}
