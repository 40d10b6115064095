package metered

import (
	"context"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"
	"github.com/riverqueue/river/rivermigrate"

	"github.com/pgmetered/metered/internal/schema"
)

//go:generate go run ./internal/schema/render schema.sql
//go:generate go test ./internal/schema -run Catalog|Versions -update

// SchemaVersion is the version of the schema that this release creates and
// needs. It also works on the version after it, as long as that one has what it calls.
const SchemaVersion = schema.Version

// MigrateOptions says what Migrate creates. The zero value creates the schema
// "metered" and nothing else.
type MigrateOptions struct {
	// Schema is the name of the schema to create. Defaults to "metered".
	Schema string

	// DropPrevious drops the functions and types that only the build before this one calls,
	// MigrateReport.Previous. Set it when no process of that build runs any more. Defaults to
	// false: they stay until the upgrade to the version after this one.
	DropPrevious bool

	// River also brings River's own tables to the latest version that this
	// build of River knows. Defaults to false: many programs migrate River
	// themselves.
	River bool

	// RiverSchema is where River's tables go. Defaults to the connection's
	// search_path, as with River itself.
	RiverSchema string

	// OnWait is told what Migrate is waiting for, each time that it gave up a wait for a lock
	// and is about to try again. Defaults to none.
	OnWait func(ctx context.Context, what string)
}

// MigrateReport is what Migrate did.
type MigrateReport struct {
	// From and To are the schema's versions before and after. From is 0 if there was no schema.
	// Both are SchemaVersion + 1 if the schema is newer than this build.
	From, To int

	// Repaired is what was not as it should be in a schema of this version, and is now: functions
	// and types were created again, or taken from everybody.
	Repaired []SchemaDifference

	// Dropped are the functions and types of earlier versions that were dropped.
	Dropped []string

	// Previous are the functions and types that only the build before this one calls, and that
	// are still there. See MigrateOptions.DropPrevious.
	Previous []string

	// River are the versions of River's migrations that were made.
	River []int
}

// Migrate creates the library's schema, brings an earlier version up to SchemaVersion, and
// repairs functions of this version that are missing or differ. Any number of processes may call
// it at once, at every start: they queue on an advisory lock. It changes the schema in one
// transaction; River's migrations follow, each in one that takes the lock again. It needs one
// connection of pool, and works through a pooler in transaction mode.
//
// Processes of the build before can go on: what only they call stays. Roles that could make the
// calls of the earlier version can make those of the new one. A schema that is newer by one
// version is left as it is, without an error.
//
// It waits for a lock for a second at a time, so that nobody queues behind it for longer. Then it
// tells OnWait and tries again, until ctx is done (ErrBusy): give ctx a deadline.
//
// The role that creates the schema owns it. It needs no right to create schemas if it owns an empty
// one of that name. An upgrade needs the owner, or a member of it. Other errors: ErrSchemaVersion if
// the schema is newer by more than one version, or lacks what this build calls; ErrSchemaDiffers if
// tables are not as they should be, with nothing changed. More is in docs/operations.md.
func Migrate(ctx context.Context, pool *pgxpool.Pool, opts MigrateOptions) (MigrateReport, error) {
	if err := notNil("pool", pool); err != nil {
		return MigrateReport{}, err
	}
	name, err := parseSchema("MigrateOptions.Schema", opts.Schema)
	if err != nil {
		return MigrateReport{}, err
	}
	conn, err := pool.Acquire(ctx)
	if err != nil {
		return MigrateReport{}, fmt.Errorf("metered: migrate: %w", err)
	}
	defer conn.Release()
	m := migration{conn, name, opts}
	var report MigrateReport
	err = m.locked(ctx, func(tx pgx.Tx) (err error) {
		report, err = m.schema(ctx, tx)
		return err
	})
	if err != nil {
		return MigrateReport{}, fmt.Errorf("metered: migrate schema %s: %w", name, err)
	}
	if opts.River {
		if report.River, err = m.river(ctx); err != nil {
			return report, fmt.Errorf("metered: migrate river: %w", err)
		}
	}
	return report, nil
}

// migration is one call of Migrate.
type migration struct {
	conn *pgxpool.Conn
	name schema.Name
	opts MigrateOptions
}

// schema makes the library's part, and says what it did.
func (m migration) schema(ctx context.Context, tx pgx.Tx) (MigrateReport, error) {
	before, err := schema.ReadCatalog(ctx, tx, m.name)
	if err != nil {
		return MigrateReport{}, err
	}
	report := MigrateReport{From: before.Version, To: SchemaVersion}
	switch {
	case before.Version == 0:
		return report, m.run(ctx, tx, schema.Source())
	case before.Version > SchemaVersion:
		report.To = before.Version
		return report, examine(before).Err()
	case before.Version == SchemaVersion:
		wrong := before.Differences()
		if err := irreparable(wrong); err != nil {
			return report, err
		}
		report.Repaired = differences(wrong)
	}
	upgrade := schema.Upgrade{From: before.Version, DropPrevious: m.opts.DropPrevious, Missing: before.Missing()}
	report.Dropped = present(before, upgrade.Drops())
	sql := upgrade.SQL()
	if before.Version == SchemaVersion && len(report.Repaired) == 0 {
		if len(report.Dropped) == 0 {
			report.Previous = previous(before)
			return report, nil
		}
		sql = schema.DropPreviousSQL()
	}
	if err := m.becomeOwner(ctx, tx, report.Repaired); err != nil {
		return report, err
	}
	if err := m.run(ctx, tx, sql); err != nil {
		return report, err
	}
	after, err := schema.ReadCatalog(ctx, tx, m.name)
	if err != nil {
		return report, err
	}
	report.Previous = previous(after)
	return report, irreparable(after.Differences())
}

// run runs a text of several statements. Without arguments Exec uses the simple protocol, which
// takes the whole of it. Types, and operators of defaults and checks, are looked up as it runs.
func (m migration) run(ctx context.Context, tx pgx.Tx, sql string) error {
	_, err := tx.Exec(ctx, "set local search_path = pg_catalog, pg_temp;\n"+m.name.SQL(sql), pgx.QueryExecModeSimpleProtocol)
	return err
}

const ownerSQL = `
select c.relowner::regrole::text, c.relowner <> r.oid
from pg_class c, pg_roles r
where c.oid = to_regclass('metered.schema_version') and r.rolname = current_user`

// becomeOwner acts as the owner of the tables from here on, so that all that is created belongs to
// them. Before that it gives the owner the functions that are somebody else's.
func (m migration) becomeOwner(ctx context.Context, tx pgx.Tx, wrong []SchemaDifference) error {
	var owner string // quoted
	var other bool
	if err := tx.QueryRow(ctx, m.name.SQL(ownerSQL)).Scan(&owner, &other); err != nil {
		return err
	}
	for _, d := range wrong {
		if signature, ok := strings.CutPrefix(d.Object, "function "); ok && d.Problem == string(schema.Lost) {
			if err := m.run(ctx, tx, "alter function metered."+signature+" owner to "+owner); err != nil {
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

// river makes one migration of River's per transaction, since some need that an earlier one
// has committed. Each looks anew, under the lock, at what is left to do.
func (m migration) river(ctx context.Context) (made []int, err error) {
	migrator, err := rivermigrate.New(riverpgxv5.New(nil), &rivermigrate.Config{Schema: m.opts.RiverSchema})
	if err != nil {
		return nil, err
	}
	for {
		var result *rivermigrate.MigrateResult
		err := m.locked(ctx, func(tx pgx.Tx) (err error) {
			//lint:ignore SA1019 it is deprecated for several migrations in one transaction
			result, err = migrator.MigrateTx(ctx, tx, rivermigrate.DirectionUp, &rivermigrate.MigrateOpts{MaxSteps: 1})
			return err
		})
		if err != nil || len(result.Versions) == 0 {
			return made, err
		}
		made = append(made, result.Versions[0].Version)
	}
}

func parseSchema(field, name string) (schema.Name, error) {
	n, err := schema.Parse(name)
	if err != nil {
		return schema.Name{}, invalid(field, "%s", err)
	}
	return n, nil
}
