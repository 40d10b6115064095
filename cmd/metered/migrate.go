package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/spf13/cobra"

	"github.com/pgmetered/metered"
)

func (a *app) migrateCmd() *cobra.Command {
	c := &cobra.Command{
		Use:   "migrate",
		Short: "Create the schema, upgrade it, or show its state",
		Long: `Migrate creates the schema and upgrades it to the version of this build (up), shows its state (status, also without a
subcommand), compares it object by object with that of this build (validate), or prints the SQL of up for another tool
(sql).`,
		Example: `  metered migrate
  metered migrate up`,
	}
	a.does(c, needReporting, a.migrateStatus)
	c.AddCommand(a.migrateStatusCmd(), a.migrateUpCmd(), a.migrateSQLCmd(), a.migrateValidateCmd())
	return c
}

// state is the output of migrate status and validate.
type state struct {
	Schema      string                     `json:"schema"`
	Version     int                        `json:"version"` // 0: there is none
	Wants       int                        `json:"wants"`   // this build
	OK          bool                       `json:"ok"`
	Differences []metered.SchemaDifference `json:"differences"`
	Previous    []string                   `json:"previous"`
	differs     bool
}

// onlyReading begins READ ONLY transactions.
type onlyReading struct{ *pgxpool.Pool }

func (p onlyReading) Begin(ctx context.Context) (pgx.Tx, error) {
	return p.BeginTx(ctx, pgx.TxOptions{AccessMode: pgx.ReadOnly})
}

func (a *app) state(ctx context.Context) (s state, err error) {
	pool, err := a.open(ctx)
	if err != nil {
		return s, err
	}
	defer pool.Close()
	r, err := metered.Validate(ctx, onlyReading{pool}, a.schema)
	differs := errors.Is(r.Err(), metered.ErrSchemaDiffers)
	if r.Version == 0 && !differs {
		r.Differences = nil // everything is missing
	}
	return state{a.schema, r.Version, metered.SchemaVersion, r.Version > 0 && r.Err() == nil,
		append([]metered.SchemaDifference{}, r.Differences...),
		append([]string{}, r.Previous...), differs}, err
}

func (s state) String() string {
	switch {
	case s.differs && s.Version != s.Wants:
		return fmt.Sprintf("Schema %s cannot be used: %s %s", s.Schema, s.Differences[0].Object,
			s.Differences[0].Problem)
	case s.differs:
		return fmt.Sprintf("Schema %s is of version %d, and %s from what this build needs: see metered migrate validate",
			s.Schema, s.Version, plural(len(s.Differences), "object differs", "objects differ"))
	case s.Version == 0:
		return fmt.Sprintf("There is no schema %s. Create it with: metered migrate up", s.Schema)
	case s.Version < s.Wants:
		return fmt.Sprintf("Schema %s is of version %d, this build needs %d. Upgrade with: metered migrate up", s.Schema, s.Version, s.Wants)
	case !s.OK:
		return fmt.Sprintf("Schema %s is of version %d, newer than this build works with, which needs %d", s.Schema, s.Version, s.Wants)
	case s.Version > s.Wants:
		return fmt.Sprintf("Schema %s is of version %d: newer than this build, which works with it",
			s.Schema, s.Version)
	case len(s.Previous) > 0:
		return fmt.Sprintf("Schema %s is of version %d, as this build needs it. %d functions are left for the build before: once none of its processes runs, metered migrate up --drop-previous drops them",
			s.Schema, s.Version, len(s.Previous))
	}
	return fmt.Sprintf("Schema %s is of version %d, as this build needs it.", s.Schema, s.Version)
}

// end is 3 if objects differ, and 7 if there is no schema, or it is of a version that this build
// does not work with.
func (s state) end() error {
	switch {
	case s.OK:
		return nil
	case s.differs:
		return found(exitDifferences)
	}
	return found(exitSchema)
}

func plural(n int, one, many string) string {
	if n == 1 {
		return "1 " + one
	}
	return fmt.Sprintf("%d %s", n, many)
}

func (a *app) migrateStatus(ctx context.Context, _ []string) error {
	s, err := a.state(ctx)
	switch {
	case err != nil:
		return err
	case a.json:
		return cmp.Or(a.print(s), s.end())
	}
	fmt.Fprintln(a.out, s)
	return s.end()
}

func (a *app) migrateStatusCmd() *cobra.Command {
	return a.does(&cobra.Command{
		Use:   "status",
		Short: "Say which version is installed, and whether this build works with it",
		Long: `Status shows the installed version of the schema, and whether this build works with it. It exits with 7 for no schema or
another version, and with 3 if objects of it differ.`,
		Example: "  metered migrate status --json",
	}, needReporting, a.migrateStatus)
}

func (a *app) migrateValidateCmd() *cobra.Command {
	return a.does(&cobra.Command{
		Use:   "validate",
		Short: "Compare the schema, object by object, with that of this build",
		Long: `Validate compares tables, columns, indexes, constraints, types, functions, their owners and their grants to everybody
with those of this build. It names the objects that differ, up to 20 of them, and exits with 3. --json has all, with both
definitions. For no schema, or one of another version, it says only that, and exits with 7.`,
		Example: "  metered migrate validate",
	}, needReporting, func(ctx context.Context, args []string) error {
		s, err := a.state(ctx)
		switch {
		case err != nil:
			return err
		case a.json:
			return cmp.Or(a.print(s), s.end())
		}
		fmt.Fprintln(a.out, s.verdict())
		if s.differs && s.Version == s.Wants || s.Version > s.Wants { // an upgrade makes the objects that an older version lacks
			a.listDifferences(s.Differences)
		}
		return s.end()
	})
}

// verdict is the first line of validate, before the differences.
func (s state) verdict() string {
	said, _, _ := strings.Cut(s.String(), ": see metered migrate validate")
	return said
}

// listDifferences names differences, a few of them. A table that is missing stands for its columns.
func (a *app) listDifferences(all []metered.SchemaDifference) {
	missing := func(table string) bool {
		return slices.ContainsFunc(all, func(d metered.SchemaDifference) bool { return d.Object == "table "+table && d.Problem == "is missing" })
	}
	all = slices.DeleteFunc(slices.Clone(all), func(d metered.SchemaDifference) bool {
		kind, name, _ := strings.Cut(d.Object, " ")
		table, _, of := strings.Cut(name, ".")
		return of && (kind == "column" || kind == "constraint") && missing(table)
	})
	const most = 20
	for _, d := range all[:min(most, len(all))] {
		fmt.Fprintf(a.out, "  %s %s\n", shown(d.Object), d.Problem)
	}
	if len(all) > most {
		fmt.Fprintf(a.out, "  and %d more: --json has all\n", len(all)-most)
	}
}

func (a *app) migrateUpCmd() *cobra.Command {
	var opts metered.MigrateOptions
	timeout := days(10 * time.Minute)
	c := &cobra.Command{
		Use:   "up",
		Short: "Create the schema, or bring it up to the version of this build",
		Long: `Up creates the schema, upgrades an earlier version to that of this build, and repairs functions that are missing or
differ. Processes of the previous version go on meanwhile. The schema changes in one transaction. River's migrations
follow, each in one of its own. Any number of processes may run it at once. It waits for a lock for a second at a time,
so that nobody queues behind it for longer.

Run it as the role that owns the schema, or is to own it.`,
		Example: `  metered migrate up
  metered migrate up --river
  metered migrate up --drop-previous`,
	}
	c.Flags().BoolVar(&opts.River, "river", false, "migrate River's tables, too")
	c.Flags().StringVar(&opts.RiverSchema, "river-schema", "",
		"where River's tables go; defaults to the search_path")
	c.Flags().BoolVar(&opts.DropPrevious, "drop-previous", false,
		"drop functions that only the previous build calls, once none of its processes runs")
	c.Flags().Var(&timeout, "timeout", "give up waiting for locks after so long")
	return a.does(c, needOwner, func(ctx context.Context, _ []string) error {
		pool, err := a.open(ctx)
		if err != nil {
			return err
		}
		defer pool.Close()
		opts.Schema = a.schema
		opts.OnWait = func(_ context.Context,
			what string) {
			fmt.Fprintf(a.err, "waiting for %s\n", what)
		}
		return a.migrateUp(ctx, pool, opts, time.Duration(timeout))
	})
}

func (a *app) migrateUp(ctx context.Context, pool *pgxpool.Pool, opts metered.MigrateOptions,
	timeout time.Duration) error {
	within, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	r, err := metered.Migrate(within, pool, opts)
	if err != nil {
		return err
	}
	if a.json {
		return a.print(map[string]any{
			"schema": a.schema, "from": r.From, "to": r.To,
			"repaired": append([]metered.SchemaDifference{}, r.Repaired...),
			"dropped":  append([]string{}, r.Dropped...),
			"previous": append([]string{}, r.Previous...), "river": append([]int{}, r.River...),
		})
	}
	switch {
	case r.From == 0:
		fmt.Fprintf(a.out, "Created schema %s, version %d.\n", a.schema, r.To)
	case r.From < r.To:
		fmt.Fprintf(a.out, "Upgraded schema %s from version %d to %d.\n", a.schema, r.From, r.To)
	default:
		fmt.Fprintf(a.out, "Schema %s is of version %d: nothing to upgrade.\n", a.schema, r.To)
	}
	for _, d := range r.Repaired {
		fmt.Fprintf(a.out, "Repaired: %s %s\n", d.Object, d.Problem)
	}
	for _, d := range r.Dropped {
		fmt.Fprintf(a.out, "Dropped: %s\n", d)
	}
	if len(r.River) > 0 {
		fmt.Fprintf(a.out, "River: migrations %v.\n", r.River)
	}
	if len(r.Previous) > 0 {
		fmt.Fprintf(a.out, "%d functions are left for the build before: metered migrate up --drop-previous drops them.\n", len(r.Previous))
	}
	return nil
}

func (a *app) migrateSQLCmd() *cobra.Command {
	var opts metered.SchemaSQLOptions
	var tool string
	c := &cobra.Command{
		Use:   "sql",
		Short: "Print the SQL of up, for psql or another migration tool",
		Long: `SQL prints the whole schema, or the upgrade from an earlier version, as a file for psql or for the tool that keeps
the database's other migrations: goose, golang-migrate, tern or atlas. It asks no database.`,
		Example: `  metered migrate sql
  metered migrate sql --from 1 --tool goose`,
	}
	c.Flags().IntVar(&opts.From, "from", 0, "the version that is installed; 0 is none")
	c.Flags().StringVar(&tool, "tool", "",
		"goose, golang-migrate, tern or atlas; defaults to plain SQL")
	c.Flags().BoolVar(&opts.DropPrevious, "drop-previous", false,
		"drop functions that only the previous build calls")
	return a.does(c, needNothing, func(_ context.Context, _ []string) error {
		opts.Schema, opts.Tool = a.schema, tool
		sql, err := metered.SchemaSQL(opts)
		switch {
		case err != nil:
			return err
		case a.json:
			return a.print(map[string]any{"schema": a.schema, "from": opts.From,
				"to": metered.SchemaVersion, "sql": sql})
		}
		_, err = fmt.Fprint(a.out, sql)
		return err
	})
}
