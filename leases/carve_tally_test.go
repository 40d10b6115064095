package leases_test

import (
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/leases"
)

// Charges without limits of a busy child, or parent, do not queue. They count when units are carved
// and when the child is closed, which waits for those that are open.
func TestCarve_CountsChargesThatDoNotQueue(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	f := carver(t, 1_000)
	busy := func(scope string) { // as after a wait
		pgtest.Execute(t, f.db, `update metered.ledger set tallied = true where scope = '`+scope+`'`)
	}
	sum := func(scope string) pgx.Tx {
		tx, err := f.db.Begin(ctx)
		require.NoError(t, err)
		r, err := f.ledger.Charge(ctx, tx, budget.Charge{Scope: scope, Amount: 100}, budget.Charge{Scope: "total of " + scope, Amount: 1})
		require.NoError(t, err)
		require.Negative(t, r.Entries[0].Seq)
		return tx
	}
	busy("user")
	require.NoError(t, sum("user").Commit(ctx))
	_, err := f.carve(pgx.ReadCommitted, "run", "user", 901)
	require.ErrorIs(t, err, budget.ErrExceeded)
	_, err = f.carve(pgx.ReadCommitted, "run", "user", 900)
	require.NoError(t, err)
	f.stands("user", 100, 0, 900)

	busy("run")
	require.NoError(t, sum("run").Commit(ctx))
	open := sum("run")
	var closed leases.Lease
	closing := pgtest.Going(func() (err error) {
		closed, err = f.close(pgx.ReadCommitted, "run")
		return err
	})
	pgtest.WaitAdvisory(t, f.db, 1)
	require.NoError(t, open.Commit(ctx))
	require.NoError(t, <-closing)
	require.Equal(t, int64(200), closed.Spent)
	f.stands("user", 300, 0, 0)
	require.ErrorIs(t, f.charge(pgx.ReadCommitted, "run", 1), budget.ErrScopeClosed)
	require.ErrorIs(t, f.charge(pgx.ReadCommitted, "run", 1, budget.PerWindow(5, time.Hour)), budget.ErrScopeClosed)
	require.Zero(t, pgtest.Count(t, f.db, "metered.tallies"))
}
