package integration_test

import (
	"context"
	"database/sql"
	"testing"

	"github.com/jackc/pgx/v5"
	_ "github.com/lib/pq"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/sqlmetered"
)

func TestSQL_LibPqIsRefusedAndItsTransactionGoesOn(t *testing.T) {
	t.Parallel()
	pool, _ := pgtest.SetUp(t, metered.Config{}, pgtest.Options{})
	db, err := sql.Open("postgres", pgtest.ConnString(pool))
	require.NoError(t, err)
	defer db.Close()
	tx, err := db.BeginTx(t.Context(), nil)
	require.NoError(t, err)
	_, err = tx.Exec("insert into uploads values ('a')")
	require.NoError(t, err)
	var argument *budget.ArgumentError
	require.ErrorAs(t, sqlmetered.InTx(t.Context(), tx, func(context.Context, pgx.Tx) error {
		t.Error("the function ran")
		return nil
	}), &argument)
	require.Equal(t, "tx", argument.Field)
	require.NoError(t, tx.Commit())
	require.Equal(t, 1, pgtest.Value[int](t, pool, "select count(*) from uploads"))
}
