package metered

import (
	"github.com/pgmetered/metered/internal/schema"
)

// MigrationTool is a program that keeps a database's migrations as files.
type MigrationTool string

// The tools that SchemaSQL knows.
const (
	// PlainSQL is a text of several statements, for psql or a simple query.
	PlainSQL MigrationTool = ""
	// Goose is github.com/pressly/goose.
	Goose MigrationTool = "goose"
	// GolangMigrate is github.com/golang-migrate/migrate, without x-multi-statement.
	GolangMigrate MigrationTool = "golang-migrate"
	// Tern is github.com/jackc/tern.
	Tern MigrationTool = "tern"
	// Atlas is versioned migrations of atlasgo.io.
	Atlas MigrationTool = "atlas"
)

// SchemaSQLOptions says what SchemaSQL renders. The zero value is the whole schema.
type SchemaSQLOptions struct {
	// Schema is the schema's name: 1 to 63 of a-z, 0-9 and _, starting with neither a digit nor
	// "pg_". Defaults to "metered".
	Schema string

	// From is the version that is installed. Defaults to 0, none: the whole schema. With an earlier
	// version it is the upgrade to SchemaVersion. With SchemaVersion all functions are created
	// again, as a repair does.
	From int

	// DropPrevious is that of MigrateOptions. With From = SchemaVersion nothing else is rendered: it
	// is the migration that follows when no process of the build before runs any more.
	DropPrevious bool

	// Tool is what the text is for. Defaults to PlainSQL.
	Tool MigrationTool
}

// SchemaSQL renders what Migrate does as a file of a migration tool's: the whole schema, or the
// upgrade from an earlier version, up. Each upgrade of this library that changes SchemaVersion
// then is a file more, rendered by the new build from the version before. Run it in one
// transaction, as the role that owns the data or is to own it. Migrate afterwards sees its version,
// and Validate says whether all is as it should be.
//
// It renders up to SchemaVersion, and to no other version, since a build has the functions of its own
// version alone. A file that was made by an earlier build stays good. The text is ASCII. Its locks are
// waited for as long as lock_timeout says: set one, for the reason that Migrate has. Anything else
// than the options allow is an *ArgumentError.
func SchemaSQL(opts SchemaSQLOptions) (string, error) {
	n, err := parseSchema("SchemaSQLOptions.Schema", opts.Schema)
	if err != nil {
		return "", err
	}
	forTool, known := schema.Tools[string(opts.Tool)]
	switch {
	case opts.From < 0 || opts.From > SchemaVersion:
		return "", invalid("SchemaSQLOptions.From", "is %d, want 0 to %d", opts.From, SchemaVersion)
	case !known:
		return "", invalid("SchemaSQLOptions.Tool", "%q is not known", opts.Tool)
	case opts.From == 0:
		return forTool(n.SQL(schema.Source())), nil
	case opts.From == SchemaVersion && opts.DropPrevious:
		return forTool(n.SQL(schema.DropPreviousSQL())), nil
	}
	return forTool(n.SQL(schema.Upgrade{From: opts.From, DropPrevious: opts.DropPrevious}.SQL())), nil
}
