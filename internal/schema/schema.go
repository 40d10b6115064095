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

// Parse validates a schema name; "" means Default. A name is 1 to 63 bytes of
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

// space is what the keys of advisory locks are derived from: a kind, and the schema's name.
var space = regexp.MustCompile(`'metered/([a-z]+)/metered'`)

// SQL returns query with each mention of the schema replaced by n: "metered." in
// front of a name, "schema metered", and its name for to_regnamespace, which takes it
// quoted as an identifier is. With the default name the query means the
// same as before.
func (n Name) SQL(query string) string {
	query = space.ReplaceAllString(query, "'metered/${1}/"+n.plain+"'")
	var b strings.Builder
	done := 0
	for at := 0; ; {
		i := strings.Index(query[at:], Default)
		if i < 0 {
			break
		}
		i += at
		at = i + len(Default)
		if mentioned(query[:i], query[at:]) {
			b.WriteString(query[done:i])
			b.WriteString(n.quoted)
			done = at
		}
	}
	return b.String() + query[done:]
}

// mentioned reports whether the default name between two parts of SQL means the library's schema. Every mention is
// qualified, so that the caller's search_path is never consulted. A name is in lower case: comments speak of
// metered.Migrate, too. A regular expression for it takes half a second of the tests of each package with the race detector.
func mentioned(before, after string) bool {
	if len(after) > 1 && after[0] == '.' && (after[1] == '_' || 'a' <= after[1] && after[1] <= 'z') {
		return !endsInWord(before)
	}
	if rest, ok := strings.CutSuffix(before, "to_regnamespace('"); ok {
		return strings.HasPrefix(after, "'") && !endsInWord(rest)
	}
	rest, ok := strings.CutSuffix(strings.TrimSuffix(before, "if not exists "), "schema ")
	return ok && !endsInWord(rest) && (after == "" || !isWord(after[0]))
}

func endsInWord(text string) bool { return text != "" && isWord(text[len(text)-1]) }

func isWord(c byte) bool {
	return c == '_' || '0' <= c && c <= '9' || 'a' <= c && c <= 'z' || 'A' <= c && c <= 'Z'
}
