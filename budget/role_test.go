package budget_test

import (
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/internal/sqlstate"
)

// asApplication returns a pool whose sessions act as a role that has nothing but
// the grants of metered.GrantSQL.
func asApplication(t *testing.T, owner *pgxpool.Pool) *pgxpool.Pool {
	t.Helper()
	role := "app_" + strings.ReplaceAll(owner.Config().ConnConfig.Database, "-", "_")
	execute(t, owner, `create role `+pgx.Identifier{role}.Sanitize())
	grants, err := metered.GrantSQL("metered", role)
	require.NoError(t, err)
	execute(t, owner, grants, pgx.QueryExecModeSimpleProtocol)
	config := owner.Config().Copy()
	config.ConnConfig.RuntimeParams["role"] = role
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	require.NoError(t, err)
	t.Cleanup(func() {
		pool.Close()
		name := pgx.Identifier{role}.Sanitize()
		_, err := owner.Exec(t.Context(), `drop owned by `+name)
		_ = err
	})
	return pool
}
