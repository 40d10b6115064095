package main

import (
	"cmp"
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"

	"github.com/pgmetered/metered/internal/inspect"
)

func (a *app) jobsCmd() *cobra.Command {
	limit, job := 50, int64(0)
	c := &cobra.Command{
		Use:   "jobs [SCOPE]",
		Short: "List the lines of jobs that wait for budget",
		Long: `Jobs lists the scopes for whose units parked jobs wait, the longest lines first. OLDEST is how long the job waits that was
parked first, and A HOUR how many jobs of the line start in an hour, by the last one or two. A line that stays due has no releaser:
jobs.Enqueuer.Run runs nowhere, or fails as TROUBLE says. A job that could not be released or dropped stands below, with the reason and the
time of its next try: docs/operations.md has the remedies. So does a job that River has as pending between two attempts, and that is in no line. With a SCOPE it lists the jobs of that line, the next one first. With --job it says which limits keep that job, and until when.`,
		Example: `  metered jobs
  metered jobs running/acme -n 10`,
		Args: cobra.MaximumNArgs(1),
	}
	c.Flags().IntVarP(&limit, "limit", "n", limit, "list so many at most, 1 to 1000")
	c.Flags().Int64Var(&job, "job", job, "explain the parked job of this id")
	return a.does(c, needReporting, func(ctx context.Context, args []string) error {
		if limit < 1 || limit > inspect.MaxPage {
			return usagef("--limit: %d is not from 1 to %d", limit, inspect.MaxPage)
		}
		if job != 0 && len(args) == 1 {
			return usagef("--job is not for a scope")
		}
		return a.read(ctx, func(tx pgx.Tx) error {
			r, err := inspect.New(tx, a.schema)
			if err != nil {
				return err
			}
			if job != 0 {
				return a.explainJob(ctx, r, job)
			}
			if len(args) == 1 {
				waiting, err := r.Waiting(ctx, args[0], limit)
				if err != nil {
					return err
				}
				return a.printWaiting(waiting)
			}
			lines, err := r.Lines(ctx, limit)
			if err != nil {
				return err
			}
			lost, err := r.Lost(ctx, limit)
			if err != nil {
				return err
			}
			troubled, err := r.Troubled(ctx, limit)
			if err != nil {
				return err
			}
			return cmp.Or(a.printLines(lines, len(troubled) > 0), a.printTroubled(troubled),
				a.printLost(lost.Jobs))
		})
	})
}

// explainJob prints a parked job, without its args, and the limits that keep it.
func (a *app) explainJob(ctx context.Context, r *inspect.Reader, id int64) error {
	p, err := r.ParkedJob(ctx, id)
	if err != nil {
		return err
	}
	if a.json {
		return a.print(p)
	}
	t := a.table()
	t.row("job", p.JobID)
	t.row("kind", p.Kind)
	t.row("queue", p.Queue)
	t.row("key", dash(p.Key))
	t.row("tenant", dash(p.Tenant))
	t.row("priority", p.Priority)
	if p.Scope == "" && p.Trouble != "" {
		t.row("waits for", "its next try")
	} else if p.Scope == "" {
		t.row("waits for", fmt.Sprintf("its next attempt, not before %s",
			p.NotBefore.Format(time.RFC3339)))
	} else {
		t.row("waits for", fmt.Sprintf("%d of %s, number %d of %d", p.Amount, p.Scope, p.Position,
			p.Waiting))
	}
	t.row("parked", p.ParkedAt)
	t.row("dropped", p.DropAt)
	t.row("looked at", p.LookedAt)
	t.row("trouble", dash(p.Trouble))
	kept := a.table("KEPT BY")
	for _, limit := range p.Refused {
		kept.row(limit)
	}
	return a.sections(t, kept)
}

func (a *app) printLines(lines []inspect.Line, others bool) error {
	t := a.table("SCOPE", "WAITING", "OLDEST", "A HOUR", "LOOKED AT", "TROUBLE")
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
		t.row(l.Scope, l.Waiting, l.Age, fmt.Sprintf("%.1f", l.PerHour), at, dash(l.Trouble))
	}
	if len(lines) == 0 && !others && !a.json {
		fmt.Fprintln(a.out, "No jobs are parked.")
	}
	return t.flush()
}

// printTroubled prints jobs in trouble, if there are any.
func (a *app) printTroubled(troubled []inspect.Troubled) error {
	if len(troubled) == 0 {
		return nil
	}
	if !a.json {
		fmt.Fprintln(a.out, "\nParked, and in trouble. All others go on:")
	}
	t := a.table("JOB", "KIND", "QUEUE", "KEY", "TENANT", "SINCE", "TRIED AGAIN", "TROUBLE")
	for _, j := range troubled {
		if a.json {
			if err := a.print(j); err != nil {
				return err
			}
			continue
		}
		again := any("as units are free")
		if !j.TriedAt.IsZero() {
			again = j.TriedAt
		}
		t.row(j.JobID, j.Kind, j.Queue, dash(j.Key), dash(j.Tenant), j.Since, again, j.Trouble)
	}
	return t.flush()
}

// printLost prints jobs that stand in no line, if there are any.
func (a *app) printLost(lost []inspect.Job) error {
	if len(lost) == 0 {
		return nil
	}
	if !a.json {
		fmt.Fprintln(a.out, "\nPending in River, and in no line. jobs.Enqueuer.Run parks them again:")
	}
	t := a.table("JOB", "KIND", "QUEUE", "KEY", "TENANT", "ATTEMPT", "NOT BEFORE")
	for _, j := range lost {
		if a.json {
			if err := a.print(j); err != nil {
				return err
			}
			continue
		}
		t.row(j.ID, j.Kind, j.Queue, dash(j.Key), dash(j.Tenant), j.Attempt, j.Scheduled)
	}
	return t.flush()
}

func (a *app) printWaiting(waiting []inspect.Waiting) error {
	t := a.table("POSITION", "JOB", "KIND", "QUEUE", "KEY", "TENANT", "PRIORITY", "UNITS",
		"PARKED AT", "DROPPED AT")
	for _, w := range waiting {
		if a.json {
			if err := a.print(w); err != nil {
				return err
			}
			continue
		}
		t.row(w.Position, w.JobID, w.Kind, w.Queue, dash(w.Key), dash(w.Tenant), w.Priority,
			w.Amount, w.ParkedAt, w.DropAt)
	}
	if len(waiting) == 0 && !a.json {
		fmt.Fprintln(a.out, "No jobs are parked there.")
	}
	return t.flush()
}
