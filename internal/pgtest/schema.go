package pgtest

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

// OpenVersion is Open with an earlier version of the schema, and what the build of that
// version left in it.
func OpenVersion(t testing.TB, version int) *pgxpool.Pool {
	t.Helper()
	pool := OpenWith(t, Options{Empty: true})
	for _, part := range []string{"", "_data"} {
		_, err := pool.Exec(context.Background(), VersionSQL(t, version, part), pgx.QueryExecModeSimpleProtocol)
		if err != nil {
			t.Fatalf("pgtest: version %d%s of the schema: %v", version, part, err)
		}
	}
	return pool
}

// VersionSQL is a text of an earlier version of the schema: the whole schema (""), what its
// build left in it ("_data"), or what it granted to the roles $app and $keeper ("_grants").
func VersionSQL(t testing.TB, version int, part string) string {
	t.Helper()
	text, err := versionSQL(version, part)
	if err != nil {
		t.Fatalf("pgtest: %v", err)
	}
	return text
}

func versionSQL(version int, part string) (string, error) {
	_, file, _, _ := runtime.Caller(0)
	name := fmt.Sprintf("version%d%s.sql", version, part)
	text, err := os.ReadFile(filepath.Join(filepath.Dir(file), "..", "schema", "testdata", name))
	return string(text), err
}
