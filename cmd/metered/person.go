package main

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/spf13/cobra"

	"github.com/pgmetered/metered/privacy"
)

func (a *app) exportCmd() *cobra.Command {
	var subject string
	var config privacy.Config
	c := &cobra.Command{
		Use:   "export --subject NAME",
		Short: "Print every row that has a person's name",
		Long: `Export prints the rows of all tables that have the name as a word, with the lines, transitions and spends of such holds
and leases: a JSON object for each row. All are of one moment. The rows also have what others wrote about the person, and
what the person did in scopes of others: read them before you hand them out (docs/privacy.md).

It reads all tables, in a READ ONLY transaction, and needs SELECT on them, which the schema's owner has.`,
		Example: `  metered export --subject ann
  metered export --subject ann --table river_job`,
	}
	flags := c.Flags()
	flags.StringVar(&subject, "subject", "", "the person's name, as in user/ann")
	flags.StringSliceVar(&config.Tables, "table", nil,
		"a further table to search, such as river_job or app.orders")
	_ = c.MarkFlagRequired("subject")
	return a.does(c, needOwner, func(ctx context.Context, _ []string) error {
		config.Schema = a.schema
		register, err := privacy.New(config)
		if err != nil {
			return err
		}
		a.json = true // an object a line, whoever reads it
		return a.read(ctx, func(tx pgx.Tx) error {
			for row, err := range register.Export(ctx, tx, subject) {
				if err != nil {
					return err
				}
				if err := a.print(row); err != nil {
					return err
				}
			}
			return nil
		})
	})
}

func (a *app) pseudonymizeCmd() *cobra.Command {
	var subject, alias string
	var yes bool
	var config privacy.Config
	c := &cobra.Command{
		Use:   "pseudonymize --subject NAME --alias ALIAS",
		Short: "Put an alias in the place of a person's name, everywhere",
		Long: `Pseudonymize puts the alias in the place of the name wherever that stands as a word: in names of scopes, tenants and
holders, in ids, notes, metadata, payloads and results. Units, chains and replays stay as they are, and the alias goes on
with the balance. What is charged to the old name begins a new scope, so let your program use it no more, first.

Each transaction rewrites about --max-rows rows, and a scope whole. An interruption leaves the person half renamed: the same
command goes on. What keeps the name until it ends, such as an open lease, is listed, and the exit code is 4: run it again
then. docs/privacy.md says what remains in the write-ahead log, in backups, and in dead rows until VACUUM FULL.

It needs the schema's owner. Nothing takes it back.`,
		Example: `  metered pseudonymize --subject user/eve --alias gone/7f3a --yes
  metered pseudonymize --subject user/eve --alias gone/7f3a --table river_job --yes`,
	}
	flags := c.Flags()
	flags.StringVar(&subject, "subject", "", "the person's name, as in user/ann")
	flags.StringVar(&alias, "alias", "", "what stands in its place, as in gone/7f3a")
	flags.StringSliceVar(&config.Tables, "table", nil,
		"a further table to rewrite, such as river_job or app.orders")
	flags.IntVar(&config.MaxRows, "max-rows", 20_000,
		"rewrite about so many rows in one transaction")
	flags.BoolVarP(&yes, "yes", "y", false, "do not ask")
	_ = c.MarkFlagRequired("subject")
	_ = c.MarkFlagRequired("alias")
	return a.does(c, needOwner, func(ctx context.Context, _ []string) error {
		config.Schema = a.schema
		register, err := privacy.New(config)
		if err != nil {
			return err
		}
		return a.with(ctx, func(pool *pgxpool.Pool) error {
			if !yes && !a.confirm(ctx, fmt.Sprintf("Put %s in the place of %s everywhere, for good?", shown(alias), shown(subject))) {
				return errRefused
			}
			return a.pseudonymize(ctx, pool, register, subject, alias)
		})
	})
}

func (a *app) pseudonymize(ctx context.Context, pool *pgxpool.Pool, register *privacy.Register,
	subject, alias string) error {
	bar := a.progress("rows rewritten", -1)
	var all, one privacy.Report
	for {
		err := pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) (err error) {
			one, err = register.Pseudonymize(ctx, tx, subject, alias)
			return err
		})
		if err != nil {
			bar.end()
			return err
		}
		rows := one.Rows
		one.Rows, one.Scopes = one.Rows+all.Rows, one.Scopes+all.Scopes
		all = one
		bar.at(all.Rows)
		if all.Done || rows == 0 {
			break
		}
	}
	bar.end()
	if a.json {
		if err := a.print(all); err != nil {
			return err
		}
	} else {
		fmt.Fprintf(a.out, "%s, %s renamed.\n",
			plural(int(all.Rows), "row rewritten", "rows rewritten"),
			plural(all.Scopes, "scope", "scopes"))
		for _, what := range all.Open {
			fmt.Fprintf(a.out, "It keeps the name until it ends: %s.\n", what)
		}
		if all.Near > 0 {
			fmt.Fprintf(a.out, "%s the name in a longer word, and stay as they are.\n",
				plural(int(all.Near), "row has", "rows have"))
		}
	}
	if !all.Done {
		return found(exitRefused)
	}
	return nil
}
