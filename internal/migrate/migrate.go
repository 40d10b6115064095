// Package migrate creates, upgrades and repairs the schema, and reports its state. It is the
// machinery of metered.Migrate and metered.Validate, and of a Client's look at the schema.
package migrate

import (
	"context"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"
	"github.com/riverqueue/river/rivermigrate"

	"github.com/pgmetered/metered/internal/answer"
	"github.com/pgmetered/metered/internal/schema"
)

// Options are those of metered.MigrateOptions.
type Options struct {
	Release             *schema.Release // the target
	Schema              schema.Name
	DropPrevious, River bool
	RiverSchema         string
	OnWait              func(ctx context.Context, what string)
}

// Report is metered.MigrateReport.
type Report struct {
	From, To          int
	Repaired          []Difference
	Dropped, Previous []string
	River             []int
}

// Run is metered.Migrate. An error that comes with a report is of River's part alone.
func Run(ctx context.Context, pool *pgxpool.Pool, opts Options) (Report, error) {
	conn, err := pool.Acquire(ctx)
	if err != nil {
		return Report{}, fmt.Errorf("metered: migrate: %w", err)
	}
	defer conn.Release()
	m := migration{conn, opts}
	var report Report
	err = m.locked(ctx, func(tx pgx.Tx) (err error) {
		report, err = m.schema(ctx, tx)
		return err
	})
	if err != nil {
		return Report{}, fmt.Errorf("metered: migrate schema %s: %w", opts.Schema, err)
	}
	if opts.River {
		if report.River, err = m.river(ctx); err != nil {
			return report, fmt.Errorf("metered: migrate river: %w", err)
		}
	}
	return report, nil
}

// migration is one call of Run.
type migration struct {
	conn *pgxpool.Conn
	opts Options
}

// schema makes the library's part, and reports its steps.
func (m migration) schema(ctx context.Context, tx pgx.Tx) (Report, error) {
	to := m.opts.Release
	before, err := to.Read(ctx, tx, m.opts.Schema)
	if err != nil {
		return Report{}, err
	}
	report := Report{From: before.Version, To: to.Version}
	wrong := before.Differences()
	switch {
	case ofVersion(wrong):
		return report, irreparable(before, wrong)
	case before.Version == 0:
		return report, m.run(ctx, tx, to.Source())
	case before.Version > to.Version:
		report.To = before.Version
		return report, stateOf(to, before).err(to.Version)
	case before.Version == to.Version:
		if err := irreparable(before, wrong); err != nil {
			return report, err
		}
		report.Repaired = differences(before, wrong)
	}
	upgrade := schema.Upgrade{To: to, From: before.Version, DropPrevious: m.opts.DropPrevious, Missing: before.Missing()}
	report.Dropped = present(before, upgrade.Drops())
	var sql string
	switch {
	case before.Version < to.Version || len(report.Repaired) > 0:
		sql = upgrade.SQL()
	case len(report.Dropped) > 0:
		sql = to.DropPreviousSQL()
	default:
		report.Previous = previous(to, before)
		return report, nil
	}
	if err := m.becomeOwner(ctx, tx, report.Repaired); err != nil {
		return report, err
	}
	if err := m.run(ctx, tx, sql); err != nil {
		return report, err
	}
	after, err := to.Read(ctx, tx, m.opts.Schema)
	if err != nil {
		return report, err
	}
	report.Previous = previous(to, after)
	return report, irreparable(after, after.Differences())
}

// run runs a text of several statements, each sent as one of its own, all in one round trip. Citus
// passes the text of some statements on to the workers, and a text of several is more than it can
// pass on.
func (m migration) run(ctx context.Context, tx pgx.Tx, sql string) error {
	batch := &pgconn.Batch{}
	for _, text := range schema.Statements("set local search_path = pg_catalog, pg_temp;\n" + m.opts.Schema.SQL(sql)) {
		batch.ExecParams(text, nil, nil, nil, nil)
	}
	return tx.Conn().PgConn().ExecBatch(ctx, batch).Close()
}

const ownerSQL = `
select c.relowner::regrole::text, c.relowner <> r.oid
from pg_class c, pg_roles r
where c.oid = pg_catalog.to_regclass('metered.schema_version')::oid and r.rolname = current_user`

// becomeOwner acts as the owner of the tables from here on, so that all that is created belongs to
// them. Before that it gives the owner the functions and views that are somebody else's.
func (m migration) becomeOwner(ctx context.Context, tx pgx.Tx, wrong []Difference) error {
	var owner string // quoted
	var other bool
	if err := answer.QueryRow(ctx, tx, m.opts.Schema.SQL(ownerSQL)).Scan(&owner, &other); err != nil {
		return err
	}
	for _, d := range wrong {
		kind, name, _ := strings.Cut(d.Object, " ")
		if (kind == "function" || kind == "table") && d.Problem == string(schema.Lost) { // no tables get here, only views
			if err := m.run(ctx, tx, "alter "+kind+" metered."+name+" owner to "+owner); err != nil {
				return err
			}
		}
	}
	if !other {
		return nil
	}
	if _, err := tx.Exec(ctx, "set local role "+owner); err != nil {
		return fmt.Errorf("the schema belongs to the role %s: %w", owner, err)
	}
	return nil
}

// river makes one migration of River's per transaction, since some need an earlier one committed.
// Each looks again, under the lock, which ones are left.
func (m migration) river(ctx context.Context) (made []int, err error) {
	migrator, err := rivermigrate.New(riverpgxv5.New(nil), &rivermigrate.Config{Schema: m.opts.RiverSchema})
	if err != nil {
		return nil, err
	}
	for {
		var result *rivermigrate.MigrateResult
		err := m.locked(ctx, func(tx pgx.Tx) (err error) {
			// River's first version makes a trigger, and its fourth drops it. The setting is read
			// by Citus alone.
			if _, err := tx.Exec(ctx, "set local citus.enable_unsafe_triggers = on"); err != nil {
				return err
			}
			//lint:ignore SA1019 it is deprecated for several migrations in one transaction
			result, err = migrator.MigrateTx(ctx, singly{answer.Tx(tx)}, rivermigrate.DirectionUp, &rivermigrate.MigrateOpts{MaxSteps: 1})
			if err == nil && len(result.Versions) == 0 {
				err = m.distribute(ctx, tx)
			}
			return err
		})
		if err != nil || len(result.Versions) == 0 {
			return made, err
		}
		made = append(made, result.Versions[0].Version)
	}
}
