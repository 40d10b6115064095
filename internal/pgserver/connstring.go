package pgserver

import (
	"net/url"
	"strings"
)

// WithDatabase returns a connection string with another database. DATABASE_URL may have either of
// libpq's forms.
func WithDatabase(connString, database string) string {
	if !strings.HasPrefix(connString, "postgres://") && !strings.HasPrefix(connString, "postgresql://") {
		return connString + " dbname=" + database // the last one counts
	}
	u, err := url.Parse(connString)
	if err != nil {
		return connString // pgx has accepted it, so this does not happen
	}
	u.Path, u.RawPath = "/"+database, ""
	query := u.Query()
	query.Del("dbname") // it would win over the path
	query.Del("database")
	u.RawQuery = query.Encode()
	return u.String()
}
