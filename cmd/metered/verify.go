package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/spf13/cobra"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/internal/inspect"
)

func (a *app) verifyCmd() *cobra.Command {
	var opts budget.VerifyOptions
	var file, against, key, archive string
	c := &cobra.Command{
		Use:   "verify",
		Short: "Recompute the ledger, and report every difference",
		Long: `Verify recomputes each entry of the ledger from the entry before it, and refunded, held and leased units from the
refunds, holds and leases. It also checks the lots of a wallet, the lots of each entry, and, if the role may read River's
table, that each job which waits there for its next attempt stands in a line. It takes no lock, and runs on
a replica too. If there is a difference, it exits with 3: see docs/operations.md.

With --against it compares the entries with a head of the log that was kept elsewhere, and finds what was edited, cut off
or removed since: see metered help notarize, and docs/notary.md.

With --archive it reads the files that examples/archive wrote, and needs no database: checksums, numbers without a gap, and
each scope's entries and sums. With --against database it compares the entries that are still there. It names the first
difference. See docs/feed.md.

An interrupted run prints its last scope, and --after goes on after that. With --checkpoint it keeps its progress and the
differences in a file, and the next run with this file goes on there. The file goes when all is verified.`,
		Example: `  metered verify
  metered verify --scope org/acme
  metered verify --checkpoint verify.json`,
	}
	flags := c.Flags()
	flags.StringVar(&opts.Scope, "scope", "", "verify this scope alone")
	flags.StringVar(&opts.After, "after", "", "skip the scopes up to this one")
	flags.StringVar(&file, "checkpoint", "",
		"keep in this file how far it came, and go on from there")
	flags.IntVar(&opts.MaxDifferences, "max-differences", 1000, "stop after so many differences")
	flags.StringVar(&against, "against", "",
		"compare with the signed head in this file; with --archive, the word database")
	flags.StringVar(&key, "key", "", "the public key that signed the head")
	flags.StringVar(&archive, "archive", "", "verify the archive in this directory")
	for _, other := range []string{"scope", "after", "checkpoint", "max-differences"} {
		c.MarkFlagsMutuallyExclusive("against", other)
		c.MarkFlagsMutuallyExclusive("archive", other)
	}
	c.MarkFlagsMutuallyExclusive("archive", "key")
	c.MarkFlagsMutuallyExclusive("scope", "after")
	c.MarkFlagsMutuallyExclusive("scope", "checkpoint")
	return a.does(c, needReporting, func(ctx context.Context, _ []string) error {
		switch {
		case archive == "" && (against == "") != (key == ""):
			return usagef("--against and --key: one is given without the other")
		case archive != "" && against == "":
			return a.verifyArchive(ctx, archive, nil)
		case archive != "" && against != "database":
			return usagef("--against: with --archive, it is the word database")
		}
		return a.with(ctx, func(pool *pgxpool.Pool) error {
			if archive != "" {
				return a.verifyArchive(ctx, archive, pool)
			}
			if against != "" {
				return a.compare(ctx, pool, against, key)
			}
			if opts.MaxDifferences == 0 {
				return usagef("--max-differences: 0 is not 1 or more")
			}
			return a.verify(ctx, pool, opts, file)
		})
	})
}

func (a *app) verify(ctx context.Context, pool *pgxpool.Pool, opts budget.VerifyOptions,
	file string) error {
	ledger, err := budget.New(budget.Config{Schema: a.schema})
	if err != nil {
		return err
	}
	before, err := readCheckpoint(file, a.schema)
	if err != nil {
		return err
	}
	opts.After = cmp.Or(before.Last, opts.After)
	if opts.MaxDifferences -= len(before.Differences); opts.MaxDifferences < 1 {
		return usagef("--max-differences: %s has %d differences already", file,
			len(before.Differences))
	}
	bar := a.progress("entries verified", entriesEstimated(ctx, pool, a.schema, opts.Scope))
	saved := time.Now()
	var unsaved error
	var done budget.VerifyReport // of the scopes that were verified to their end
	opts.Progress = func(r budget.VerifyReport) {
		bar.at(before.Entries + r.Entries)
		if r.Last != done.Last {
			done = r
		}
		if time.Since(saved) > time.Second {
			saved = time.Now()
			unsaved = cmp.Or(unsaved, before.plus(done).save(file, a.schema))
		}
	}
	r, err := ledger.Verify(ctx, pool, opts)
	bar.end()
	if err == nil && opts.Scope == "" && len(r.Differences) < opts.MaxDifferences {
		r.Differences, err = a.lostJobs(ctx, pool, r.Differences)
	}
	stopped := err != nil || len(r.Differences) >= opts.MaxDifferences
	all := before.plus(r)
	if stopped {
		unsaved = before.plus(done).save(file, a.schema)
	} else if file != "" {
		if gone := os.Remove(file); !errors.Is(gone, os.ErrNotExist) {
			unsaved = gone
		}
	}
	if err := cmp.Or(a.verified(all.VerifyReport, stopped, file), unsaved, err); err != nil {
		return err
	}
	if len(all.Differences) > 0 {
		return found(exitDifferences)
	}
	return nil
}

// lostJobs adds jobs that River has as pending between two attempts and that stand in no line.
func (a *app) lostJobs(ctx context.Context, pool *pgxpool.Pool,
	all []budget.Difference) ([]budget.Difference, error) {
	var lost inspect.JobList
	err := readOnly(ctx, pool, func(tx pgx.Tx) error {
		r, err := inspect.New(tx, a.schema)
		if err == nil {
			lost, err = r.Lost(ctx, inspect.MaxPage)
		}
		return err
	})
	for _, j := range lost.Jobs {
		all = append(all, budget.Difference{Scope: j.Tenant,
			Field: fmt.Sprintf("line of job %d", j.ID), Got: "none", Want: "one"})
	}
	return all, err
}

// verified prints the report.
func (a *app) verified(r budget.VerifyReport, stopped bool, file string) error {
	if a.json {
		return a.print(struct {
			budget.VerifyReport
			OK       bool `json:"ok"`
			Complete bool `json:"complete"`
		}{r, len(r.Differences) == 0, !stopped})
	}
	t := a.table("SCOPE", "ENTRY", "FIELD", "IS", "WANT")
	for _, d := range r.Differences {
		t.row(d.Scope, d.Seq, d.Field, d.Got, d.Want)
	}
	if err := t.flush(); err != nil {
		return err
	}
	fmt.Fprintf(a.out, "%s of %s, %s.\n", plural(int(r.Entries), "entry", "entries"),
		plural(int(r.Scopes), "scope", "scopes"),
		plural(len(r.Differences), "difference", "differences"))
	switch {
	case stopped && file != "":
		fmt.Fprintf(a.out, "It stopped. Go on with: metered verify --checkpoint %s\n",
			shellWord(file))
	case stopped && r.Last != "":
		fmt.Fprintf(a.out, "It stopped. Go on with: metered verify --after %s\n", shellWord(r.Last))
	}
	return nil
}

const estimateSQL = `select coalesce((select c.reltuples::bigint from pg_class c where c.oid = pg_catalog.to_regclass($1)::oid), -1)`

// entriesEstimated is about how many entries there are, -1 if that is not known.
func entriesEstimated(ctx context.Context, pool *pgxpool.Pool, schemaName, scope string) (n int64) {
	if scope != "" {
		return -1
	}
	err := readOnly(ctx, pool, func(tx pgx.Tx) error {
		return tx.QueryRow(ctx, estimateSQL,
			pgx.Identifier{schemaName, "ledger"}.Sanitize()).Scan(&n)
	})
	if err != nil || n <= 0 {
		return -1
	}
	return n
}

// checkpoint is how far a verification came.
type checkpoint struct {
	Schema string `json:"schema"`
	budget.VerifyReport
}

func (c checkpoint) plus(r budget.VerifyReport) checkpoint {
	r.Scopes += c.Scopes
	r.Entries += c.Entries
	r.Last = cmp.Or(r.Last, c.Last)
	r.Differences = append(append([]budget.Difference(nil), c.Differences...), r.Differences...)
	return checkpoint{c.Schema, r}
}

func readCheckpoint(file, schemaName string) (c checkpoint, err error) {
	if file == "" {
		return c, nil
	}
	text, err := os.ReadFile(file)
	if errors.Is(err, os.ErrNotExist) {
		return c, nil
	}
	if err == nil {
		err = json.Unmarshal(text, &c)
	}
	switch {
	case err != nil:
		return c, usagef("--checkpoint: %v", err)
	case c.Schema != schemaName:
		return c, usagef("--checkpoint: %s is of schema %q", file, c.Schema)
	}
	return c, nil
}

// save writes the whole file, or leaves the one that is there.
func (c checkpoint) save(file, schemaName string) error {
	if file == "" {
		return nil
	}
	c.Schema = schemaName
	text, err := json.Marshal(c)
	if err != nil {
		return err
	}
	next := filepath.Join(filepath.Dir(file), "."+filepath.Base(file)+".next")
	if err := os.WriteFile(next, append(text, '\n'), 0o600); err != nil {
		return err
	}
	return os.Rename(next, file)
}
