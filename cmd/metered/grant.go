package main

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
)

func (a *app) grantCmd() *cobra.Command {
	var apply bool
	grants := map[string]func(schemaName, role string) (string, error){
		"application": metered.GrantSQL, "jobs": metered.GrantJobsSQL,
		"maintenance": metered.GrantMaintenanceSQL, "reporting": metered.GrantReportingSQL,
	}
	names := []string{"application", "jobs", "maintenance", "reporting"}
	c := &cobra.Command{
		Use:   "grant {application|jobs|maintenance|reporting} ROLE",
		Short: "Print or apply the grants that a role needs",
		Long: `Grant prints the SQL of a role's grants, or runs it, in one transaction, with --apply.

  application  to charge, hold, mint and so on: all calls of the library except those below, and to sweep
  jobs         to park and release jobs that wait for budget, for a role that has application, too
  maintenance  to purge, and to repair the clock
  reporting    to read views, scopes, holds and operations, and nothing else: to look, to verify, and for the page

A role may have several. The role must exist. Apply as the schema's owner, after metered migrate up.`,
		Example: `  metered grant application app
  metered grant reporting viewer --apply`,
		Args:      cobra.ExactArgs(2),
		ValidArgs: names,
	}
	c.Flags().BoolVar(&apply, "apply", false, "run it, instead of printing it")
	return a.does(c, needOwner, func(ctx context.Context, args []string) error {
		render := grants[args[0]]
		if render == nil {
			return usagef("%q: want one of %v", args[0], names)
		}
		sql, err := render(a.schema, args[1])
		if err != nil {
			return err
		}
		if apply {
			err = a.runSQL(ctx, sql)
		}
		switch {
		case err != nil:
			return err
		case a.json:
			return a.print(map[string]any{"role": args[1], "grants": args[0], "sql": sql,
				"applied": apply})
		case apply:
			fmt.Fprintf(a.out, "Role %s has the %s grants of schema %s.\n", shown(args[1]), args[0],
				a.schema)
		default:
			fmt.Fprint(a.out, sql)
		}
		return nil
	})
}

const ownerSQL = `select pg_catalog.pg_has_role(n.nspowner, 'usage') from pg_namespace n where n.nspname = $1`

// runSQL runs statements in one transaction, as the schema's owner.
func (a *app) runSQL(ctx context.Context, sql string) error {
	pool, err := a.open(ctx)
	if err != nil {
		return err
	}
	defer pool.Close()
	if err := a.usable(ctx, pool); err != nil {
		return err
	}
	return pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		var owner bool
		if err := tx.QueryRow(ctx, ownerSQL, a.schema).Scan(&owner); err != nil {
			return err
		}
		if !owner { // a grant by another is a warning, and does nothing
			return fmt.Errorf("%w: it does not own the schema", budget.ErrNotGranted)
		}
		_, err := tx.Exec(ctx, sql, pgx.QueryExecModeSimpleProtocol)
		return err
	})
}
