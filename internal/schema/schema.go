// Package schema names the database schema that the library's tables and
// functions live in, and puts that name into the SQL that mentions them.
package schema

import (
	"fmt"
	"regexp"
	"strings"

	"github.com/jackc/pgx/v5"
)

// Default is the schema used when a caller names none.
const Default = "metered"

// Name is a validated schema name.
type Name struct{ quoted, plain string }

var valid = regexp.MustCompile(`^[a-z_][a-z0-9_]{0,62}$`)

// Parse validates a schema name. "" means Default. A name is 1 to 63 bytes of
// lower-case ASCII letters, digits and underscores, does not start with a
// digit and not with "pg_", which Postgres keeps for itself. Mixed case is
// refused rather than quoted: an unquoted mention in somebody's migration
// would silently mean another schema.
func Parse(name string) (Name, error) {
	if name == "" {
		name = Default
	}
	if !valid.MatchString(name) || strings.HasPrefix(name, "pg_") {
		return Name{}, fmt.Errorf("schema name %q: want 1 to 63 of a-z, 0-9 and _, not starting with a digit or pg_", name)
	}
	return Name{quoted: pgx.Identifier{name}.Sanitize(), plain: name}, nil
}

// String returns the name as it was given, unquoted.
func (n Name) String() string { return n.plain }

// mention is a reference to the library's schema in SQL of this project. Every mention is
// qualified, so that the caller's search_path is never consulted. Its name is in lower case:
// comments speak of metered.Migrate, too.
var mention = regexp.MustCompile(`\bmetered\.[a-z_]|\bschema (if not exists )?metered\b|\bto_regnamespace\('metered'`)

// space is the source of the keys of advisory locks: a kind, and the schema's name.
var space = regexp.MustCompile(`'metered/([a-z]+)/metered'`)

// SQL returns query with each mention of the schema replaced by n: "metered." in front of a name,
// "schema metered", and its name for to_regnamespace, quoted as an identifier. The default name
// changes nothing.
func (n Name) SQL(query string) string {
	if n.plain == Default {
		return query
	}
	query = space.ReplaceAllString(query, "'metered/${1}/"+n.plain+"'")
	return mention.ReplaceAllStringFunc(query, func(m string) string {
		return strings.Replace(m, Default, n.quoted, 1)
	})
}
