package main

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"

	"github.com/pgmetered/metered/internal/inspect"
)

func (a *app) jobsCmd() *cobra.Command {
	limit := 50
	c := &cobra.Command{
		Use:   "jobs",
		Short: "List the lines of jobs that wait for budget",
		Long: `Jobs lists the scopes for whose units parked jobs wait, the longest lines first. A line that stays due has no releaser:
jobs.Enqueuer.Run runs nowhere, or fails as TROUBLE says.`,
		Example: `  metered jobs
  metered jobs -n 10`,
	}
	c.Flags().IntVarP(&limit, "limit", "n", limit, "list so many at most, 1 to 1000")
	return a.does(c, needReporting, func(ctx context.Context, _ []string) error {
		if limit < 1 || limit > inspect.MaxPage {
			return usagef("--limit: %d is not from 1 to %d", limit, inspect.MaxPage)
		}
		return a.read(ctx, func(tx pgx.Tx) error {
			r, err := inspect.New(tx, a.schema)
			if err != nil {
				return err
			}
			lines, err := r.Lines(ctx, limit)
			if err != nil {
				return err
			}
			return a.printLines(lines)
		})
	})
}

func (a *app) printLines(lines []inspect.Line) error {
	t := a.table("SCOPE", "WAITING", "LOOKED AT", "TROUBLE")
	for _, l := range lines {
		if a.json {
			if err := a.print(l); err != nil {
				return err
			}
			continue
		}
		at := any("when units are free")
		switch {
		case l.Due:
			at = "now"
		case !l.LookedAt.IsZero():
			at = l.LookedAt
		}
		t.row(l.Scope, l.Waiting, at, dash(l.Trouble))
	}
	if len(lines) == 0 && !a.json {
		fmt.Fprintln(a.out, "No jobs are parked.")
	}
	return t.flush()
}
