package metered

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/pgmetered/metered/internal/fault"
	"github.com/pgmetered/metered/internal/schema"
)

// Beginner is a pool, a connection or a transaction.
type Beginner interface {
	Begin(ctx context.Context) (pgx.Tx, error)
}

// SchemaReport is what Validate found.
type SchemaReport struct {
	// Version is that of the schema, 0 if there is none.
	Version int

	// Differences are what is not as this build needs it. If Version is newer than
	// SchemaVersion these are only such that make calls of this build fail.
	Differences []SchemaDifference

	// Previous are the functions and types that only the build before this one calls: see
	// MigrateOptions.DropPrevious. They are no difference.
	Previous []string
}

// SchemaDifference is one object of the schema that is not as it should be.
type SchemaDifference struct {
	// Object is what it is about: "function clock()", "column ledger.seq", "index holds_due".
	Object string
	// Problem says what is wrong.
	Problem string
	// Want is what it should be, and Have what it is, if it is there. They are empty where that
	// is not the problem. Of a function's body they have a hash.
	Want, Have string
}

func (d SchemaDifference) String() string {
	if d.Have != "" {
		return fmt.Sprintf("%s %s: it is %q and should be %q", d.Object, d.Problem, d.Have, d.Want)
	}
	return d.Object + " " + d.Problem
}

// OK reports whether the schema is what this build needs.
func (r SchemaReport) OK() bool { return r.Err() == nil }

// Err is nil if the schema is what this build needs. Otherwise it is ErrNotMigrated: there is no
// schema, or an older one; ErrSchemaVersion: it is newer, and lacks what this build calls; or
// ErrSchemaDiffers: it is of this version, and has Differences. Its text names them.
func (r SchemaReport) Err() error {
	switch {
	case r.Version < SchemaVersion:
		return fmt.Errorf("%w: the database has version %d, this build needs %d", ErrNotMigrated, r.Version, SchemaVersion)
	case r.Version > SchemaVersion+1:
		return fmt.Errorf("%w: the database has version %d, this build knows %d", ErrSchemaVersion, r.Version, SchemaVersion)
	case len(r.Differences) == 0:
		return nil
	case r.Version > SchemaVersion:
		return fmt.Errorf("%w: the database has version %d, without what this build of version %d needs: %s",
			ErrSchemaVersion, r.Version, SchemaVersion, listed(r.Differences))
	default:
		return fmt.Errorf("%w: %s", ErrSchemaDiffers, listed(r.Differences))
	}
}

// Validate compares what is installed in the schema ("" means "metered") with what this build
// needs: tables, columns, indexes, constraints, types and functions, their owners, and that
// nothing can be executed by everybody. It changes nothing and needs no more than to read
// schema_version, which every role has that GrantSQL was run for. Objects of other names, and
// columns, indexes and triggers that somebody added, are no difference. Comments are not looked at.
//
// Migrate repairs functions and rights; where tables differ it says the same. The report tells what
// was found. An error means that it could not be found out.
func Validate(ctx context.Context, db Beginner, schemaName string) (SchemaReport, error) {
	if db == nil {
		return SchemaReport{}, invalid("db", "is nil")
	}
	n, err := parseSchema("schema", schemaName)
	if err != nil {
		return SchemaReport{}, err
	}
	c, err := schema.ReadCatalog(ctx, db, n)
	if err != nil {
		return SchemaReport{}, fault.Failed("metered", "validate", err)
	}
	return examine(c), nil
}

func examine(c schema.Catalog) SchemaReport {
	wrong := c.Differences()
	if c.Version > SchemaVersion {
		wrong = c.Unusable()
	}
	return SchemaReport{Version: c.Version, Differences: differences(wrong), Previous: previous(c)}
}

// previous are those of the build before that are still there.
func previous(c schema.Catalog) (there []string) {
	if c.Version == SchemaVersion {
		there = present(c, schema.Previous())
	}
	return there
}

func present(c schema.Catalog, keys []string) (there []string) {
	for _, key := range keys {
		if c.Has(key) {
			there = append(there, key)
		}
	}
	return there
}

func differences(wrong []schema.Difference) (all []SchemaDifference) {
	for _, d := range wrong {
		diff := SchemaDifference{Object: d.Object.Key(), Problem: string(d.Problem)}
		if d.Problem == schema.Other {
			diff.Want, diff.Have = d.Object.Definition, d.Have
		}
		all = append(all, diff)
	}
	return all
}

// irreparable is ErrSchemaDiffers if some of the differences are more than Migrate can mend by
// creating functions and types.
func irreparable(wrong []schema.Difference) error {
	left := slices.DeleteFunc(slices.Clone(wrong), func(d schema.Difference) bool {
		return d.Object.Kind == "function" || d.Object.Kind == "type" && d.Problem == schema.Missing
	})
	if len(left) == 0 {
		return nil
	}
	return fmt.Errorf("%w: %s", ErrSchemaDiffers, listed(differences(left)))
}

// listed names up to ten differences.
func listed(all []SchemaDifference) string {
	const limit = 10
	var b strings.Builder
	for i, d := range all[:min(limit, len(all))] {
		if i > 0 {
			b.WriteString("; ")
		}
		b.WriteString(d.String())
	}
	if more := len(all) - limit; more > 0 {
		fmt.Fprintf(&b, "; and %d more", more)
	}
	return b.String()
}
