package notary_test

import (
	"encoding/json"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/internal/pgtest"
)

// exampleDatabase is a new database with the schema, where yours is pgxpool.New(ctx, os.Getenv("DATABASE_URL")), on which
// metered.Migrate was called once.
func exampleDatabase() (pool *pgxpool.Pool, done func()) { return pgtest.Example() }

func encode(t *testing.T, v any) []byte {
	t.Helper()
	text, err := json.Marshal(v)
	require.NoError(t, err)
	return text
}
