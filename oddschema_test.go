package metered_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/lockkey"
	"github.com/pgmetered/metered/internal/pgtest"
)

// Whatever the name of the schema and the search_path of the session, the schema is whole, and Go and SQL lock the same keys.
func TestSchema_OddNamesAndSearchPaths(t *testing.T) {
	t.Parallel()
	for _, path := range []string{`""`, `odd, pg_catalog`, `pg_temp, public`} {
		t.Run(path, func(t *testing.T) {
			t.Parallel()
			pool := pgtest.OpenWith(t, pgtest.Options{Empty: true, Config: func(c *pgxpool.Config) {
				c.ConnConfig.RuntimeParams["search_path"] = path
			}})
			_, err := pool.Exec(t.Context(), `create schema odd;
				create function odd.now() returns pg_catalog.int4 language sql as 'select 1';
				create operator odd.= (leftarg = pg_catalog.text, rightarg = pg_catalog.text, function = pg_catalog.textne)`, pgx.QueryExecModeSimpleProtocol)
			require.NoError(t, err)
			for _, name := range []string{"select", "money_1", "metered", "metered_tx", "_", "schema"} {
				_, err := metered.Migrate(t.Context(), pool, metered.MigrateOptions{Schema: name})
				require.NoError(t, err, name)
				report, err := metered.Validate(t.Context(), pool, name)
				require.NoError(t, err, name)
				require.Empty(t, report.Differences, name)
				c, err := metered.New(pool, metered.Config{Schema: name})
				require.NoError(t, err)
				var key, hold int64
				require.NoError(t, pool.QueryRow(t.Context(), `select "`+name+`".scope_key('ä"\,'), "`+name+`".lock_key('metered/hold/`+name+`', convert_to('t','UTF8') || '\x00' || convert_to('id','UTF8'))`).Scan(&key, &hold))
				require.Equal(t, c.Budget.LockKey(`ä"\,`), key)
				require.Equal(t, lockkey.Of("metered/hold/"+name, "t\x00id"), hold)
				out, err := metered.Do(t.Context(), c, metered.Command{ID: "1", Input: 1, Name: "n", Charges: []budget.Charge{{Scope: `ä"\,{}()null`, Amount: 1, Limits: []budget.Limit{budget.Lifetime(3)}}}},
					func(ctx context.Context, tx *metered.Tx) (int, error) {
						_, err := tx.Place(ctx, holds.Request{ID: `i"\{},()`, TTL: time.Minute, Lines: []holds.Line{{Scope: `s"\{},() NULL`, Amount: 2}}}, nil)
						return 1, err
					})
				require.NoError(t, err, name)
				require.Len(t, out.Holds, 1)
			}
		})
	}
}

// A function of DoTx that panics, or whose context ends, leaves nothing of its command in the caller's transaction.
func TestDoTx_APanicLeavesTheTransactionAsItWas(t *testing.T) {
	t.Parallel()
	pool := pgtest.Open(t)
	c, err := metered.New(pool, metered.Config{})
	require.NoError(t, err)
	tx, err := pool.Begin(t.Context())
	require.NoError(t, err)
	defer tx.Rollback(context.Background())
	cmd := metered.Command{ID: "1", Name: "n", Charges: []budget.Charge{{Scope: "a", Amount: 1}}}
	require.Panics(t, func() {
		_, _ = metered.DoTx(t.Context(), c, tx, cmd, func(ctx context.Context, tx *metered.Tx) (int, error) {
			_, _ = tx.Exec(ctx, "select nonsense")
			panic("x")
		})
	})
	ctx, cancel := context.WithCancel(t.Context())
	_, err = metered.DoTx(ctx, c, tx, cmd, func(_ context.Context, tx *metered.Tx) (int, error) {
		cancel()
		return 0, errors.New("no")
	})
	require.Error(t, err)
	out, err := metered.DoTx(t.Context(), c, tx, cmd, func(ctx context.Context, tx *metered.Tx) (int, error) { return 7, nil })
	require.NoError(t, err)
	require.False(t, out.Replayed)
	require.NoError(t, tx.Commit(t.Context()))
	u, err := c.Budget.Usage(t.Context(), pool, budget.Query{Scope: "a"})
	require.NoError(t, err)
	require.Equal(t, int64(1), u[0].Used)
}
