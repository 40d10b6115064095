package inspect_test

import (
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"
)

func execute(t *testing.T, pool *pgxpool.Pool, sql string) {
	t.Helper()
	for _, one := range strings.Split(sql, ";\n") { // VACUUM demands to be alone
		_, err := pool.Exec(t.Context(), one, pgx.QueryExecModeSimpleProtocol)
		require.NoError(t, err)
	}
}

func replaceAll(s, from, to string) string { return strings.ReplaceAll(s, from, to) }
