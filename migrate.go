package metered

import (
	"cmp"
	"context"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgmetered/metered/internal/migrate"
	"github.com/pgmetered/metered/internal/schema"
)

//go:generate go run ./internal/schema/render schema.sql
//go:generate go test ./internal/schema -run Catalog -update

// SchemaVersion is the version of the schema that this release creates. It also works on a newer
// one that has the functions that it calls.
const SchemaVersion = schema.Version

// MigrateOptions configures Migrate. The zero value has the documented defaults.
type MigrateOptions struct {
	// Schema is the schema to create or to upgrade. Defaults to "metered".
	Schema string

	// DropPrevious drops functions and types that only the build before this one calls. Set it
	// once none of its processes runs.
	DropPrevious bool

	// River also brings River's tables to the version of this build of River.
	River bool

	// RiverSchema is the schema of River's tables. Defaults to the connection's search_path.
	RiverSchema string

	// OnWait is called before each further try to get a lock. It may be nil.
	OnWait func(ctx context.Context, what string)
}

// MigrateReport lists the changes of Migrate.
type MigrateReport struct {
	// From and To are versions. From is 0 without a schema. If the schema is newer than this
	// build, both are SchemaVersion + 1.
	From, To int

	// Repaired are the differences that were mended in a schema of this version.
	Repaired []SchemaDifference

	// Dropped are the functions and types of earlier versions that were dropped.
	Dropped []string

	// Previous are those that DropPrevious drops.
	Previous []string

	// River are the versions of River's migrations that were made.
	River []int
}

// Migrate creates the schema, brings an earlier version up to SchemaVersion, and repairs functions,
// in one transaction, with one more for each migration of River's. Any number of processes may call
// it at each start, while those of the version before go on (docs/operations.md). It does not
// change a schema that is newer by one version.
//
// It waits for locks until ctx is done (budget.ErrBusy): give ctx a deadline. The role that creates the
// schema owns it, and upgrades it. ErrSchemaVersion and ErrSchemaDiffers change nothing.
func Migrate(ctx context.Context, pool *pgxpool.Pool, opts MigrateOptions) (MigrateReport, error) {
	n, err := parseSchema("MigrateOptions.Schema", opts.Schema)
	if err := cmp.Or(notNil("pool", pool), err); err != nil {
		return MigrateReport{}, err
	}
	r, err := migrate.Run(ctx, pool, migrate.Options{
		Release: schema.Current(), Schema: n, DropPrevious: opts.DropPrevious, River: opts.River,
		RiverSchema: opts.RiverSchema, OnWait: opts.OnWait,
	})
	return MigrateReport{
		From: r.From, To: r.To, Repaired: differences(r.Repaired), Dropped: r.Dropped,
		Previous: r.Previous, River: r.River,
	}, err
}

// SchemaReport is the answer of Validate.
type SchemaReport struct {
	// Version is the schema's version. It is 0 without a schema.
	Version int

	// Differences are the objects unlike this build's. In a newer Version they are only those that
	// make this build's calls fail.
	Differences []SchemaDifference

	// Previous is as in MigrateReport.
	Previous []string
}

// SchemaDifference is an object unlike this build's.
type SchemaDifference struct {
	// Object is the kind and the name of the object, such as "index holds_due".
	Object string `json:"object"`

	// Problem says how the object differs, such as "missing".
	Problem string `json:"problem"`

	// Want is what this build has. Of a function's body it is a hash.
	Want string `json:"want,omitempty"`

	// Have is what the database has.
	Have string `json:"have,omitempty"`
}

func differences(all []migrate.Difference) (wrong []SchemaDifference) {
	for _, d := range all {
		wrong = append(wrong, SchemaDifference(d))
	}
	return wrong
}

// Err is nil, budget.ErrNotMigrated, ErrSchemaVersion or ErrSchemaDiffers.
func (r SchemaReport) Err() error {
	var wrong []migrate.Difference
	for _, d := range r.Differences {
		wrong = append(wrong, migrate.Difference(d))
	}
	return migrate.Err(SchemaVersion, r.Version, wrong)
}

// Validate compares the schema, by default "metered", with the one that this build needs: objects,
// owners, and functions that PUBLIC can execute. SchemaReport.Err is the verdict.
func Validate(ctx context.Context, db interface {
	Begin(ctx context.Context) (pgx.Tx, error)
}, schemaName string) (SchemaReport, error) {
	n, err := parseSchema("schema", schemaName)
	if err := cmp.Or(notNil("db", db), err); err != nil {
		return SchemaReport{}, err
	}
	s, err := migrate.Examine(ctx, schema.Current(), db, n)
	return SchemaReport{Version: s.Version, Differences: differences(s.Differences), Previous: s.Previous}, err
}

// SchemaSQLOptions describes the file of SchemaSQL.
type SchemaSQLOptions struct {
	// Schema is 1 to 63 of a-z, 0-9 and _, starting with neither a digit nor "pg_". Defaults to
	// "metered".
	Schema string

	// From is the installed version. 0 renders everything, an earlier version renders the upgrade,
	// and SchemaVersion renders all functions, as a repair.
	From int

	// DropPrevious is as in MigrateOptions. From SchemaVersion on nothing else is rendered.
	DropPrevious bool

	// Tool is "goose", "golang-migrate" (without x-multi-statement), "tern" or "atlas"
	// (versioned). "" renders several statements, for psql.
	Tool string
}

// SchemaSQL renders Migrate's statements as a file of a migration tool: the whole schema, or an
// upgrade. Run it in one transaction, with a lock_timeout, as the role that owns the data or is to
// own it (docs/operations.md).
func SchemaSQL(opts SchemaSQLOptions) (string, error) {
	n, err := parseSchema("SchemaSQLOptions.Schema", opts.Schema)
	if err != nil {
		return "", err
	}
	switch _, known := schema.Tools[opts.Tool]; {
	case opts.From < 0 || opts.From > SchemaVersion:
		return "", invalid("SchemaSQLOptions.From", "is %d, want 0 to %d", opts.From, SchemaVersion)
	case !known:
		return "", invalid("SchemaSQLOptions.Tool", "%q is not known", opts.Tool)
	}
	return schema.Current().Script(n, opts.From, opts.DropPrevious, opts.Tool), nil
}

// GrantSQL renders the grants of every call that the other sets do not name. The role can change no
// ledger entry, and is trusted with its arguments (SECURITY.md).
//
// Run it as the schema's owner, after Migrate or SchemaSQL. It also takes the functions from
// PUBLIC. role must exist. An upgrade renews the grants. River's tables need others
// (docs/operations.md).
func GrantSQL(schemaName, role string) (string, error) {
	return grants(schemaName, role, schema.Application)
}

// GrantJobsSQL renders the grants to park and release jobs, for a role that has GrantSQL, too. They
// are a set of their own, since the role decides what River's workers run: whoever releases jobs
// inserts any that the role has parked.
func GrantJobsSQL(schemaName, role string) (string, error) {
	return grants(schemaName, role, schema.Jobs)
}

// GrantMaintenanceSQL renders the grants of the Purge calls and budget.Ledger.RepairClock. A role
// may have both sets.
func GrantMaintenanceSQL(schemaName, role string) (string, error) {
	return grants(schemaName, role, schema.Maintenance)
}

// GrantReportingSQL renders the grants to read views, use, entries and holds (docs/operations.md).
func GrantReportingSQL(schemaName, role string) (string, error) {
	return grants(schemaName, role, schema.Reporting)
}

func grants(schemaName, role string, set schema.Role) (string, error) {
	n, err := parseSchema("schema", schemaName)
	if err != nil {
		return "", err
	}
	if role == "" || len(role) > 63 || strings.IndexByte(role, 0) >= 0 {
		return "", invalid("role", "want the name of a role, 1 to 63 bytes")
	}
	return schema.Current().GrantSQL(n, set, pgx.Identifier{role}.Sanitize()), nil
}

func parseSchema(field, name string) (schema.Name, error) {
	n, err := schema.Parse(name)
	if err != nil {
		return schema.Name{}, invalid(field, "%s", err)
	}
	return n, nil
}
