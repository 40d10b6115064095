package metered_test

import (
	"context"
	"net/http"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/httpmetered"
	"github.com/pgmetered/metered/internal/fault"
	"github.com/pgmetered/metered/internal/pgtest"
)

// A connection whose server became read-only is closed, and the next call is made on a new one.
func TestReadOnly_ConnectionsAreLeft(t *testing.T) {
	t.Parallel()
	pool := pgtest.Reopen(t, pgtest.Open(t), func(c *pgxpool.Config) { c.MaxConns, c.MinConns = 1, 0 })
	c, err := metered.New(pool, metered.Config{Config: budget.Config{LockTimeout: time.Minute}})
	require.NoError(t, err)
	clock := pgtest.SetClock(t, pool, pgtest.Tomorrow(12))
	ctx := t.Context()
	for _, call := range []struct {
		name string
		do   func(n string) error
	}{
		{"Do", func(n string) error { return pgtest.Do(t, c, n) }},
		{"RunTx", func(string) error {
			return c.RunTx(ctx, pgx.TxOptions{}, func(ctx context.Context, tx pgx.Tx) error {
				_, err := c.Budget.Charge(ctx, tx, pgtest.Charge("s", 1, 100))
				return err
			})
		}},
		{"ChargeNow", func(string) error { _, err := c.Budget.ChargeNow(ctx, pool, pgtest.Charge("s", 1, 100)); return err }},
		{"Sweep", func(string) error { _, err := c.Holds.Sweep(ctx, pool, holds.SweepOptions{}); return err }},
	} {
		require.NoError(t, call.do(call.name+" before"), call.name)
		if call.name == "Sweep" {
			_, err := metered.Do(ctx, c, metered.Command{ID: "again", Input: 1}, pgtest.Placing(holds.Placement{ID: "h", TTL: time.Minute, Lines: []holds.Line{pgtest.Room("s", 1, 100)}}))
			require.NoError(t, err)
			clock.Advance(time.Hour)
		}
		_, err := pool.Exec(ctx, "set default_transaction_read_only = on")
		require.NoError(t, err)
		err = call.do(call.name + " then")
		require.ErrorIs(t, err, fault.ErrReadOnly, call.name)
		require.Equal(t, "read_only", metered.Code(err))
		require.True(t, metered.Retryable(err), call.name)
		require.Equal(t, http.StatusServiceUnavailable, httpmetered.ProblemOf(err).Status, call.name)
		require.NoError(t, call.do(call.name+" then"), "%s, on a new connection", call.name)
	}
}
