package wallet_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/wallet"
)

// calls is how many calls of functions fn makes in a session.
func (f *fixture) calls(fn func(tx pgx.Tx) error) (n int64) {
	f.Helper()
	conn, err := f.pool.Acquire(f.Context())
	require.NoError(f, err)
	defer conn.Release()
	count := func() (n int64) {
		pgtest.FlushStatistics(f, conn)
		require.NoError(f, conn.QueryRow(f.Context(), "select coalesce(sum(calls), 0)::bigint from pg_stat_user_functions where schemaname = 'metered'").Scan(&n))
		return n
	}
	_, err = conn.Exec(f.Context(), "set track_functions = 'pl'")
	require.NoError(f, err)
	before := count()
	require.NoError(f, pgx.BeginFunc(f.Context(), conn, fn))
	n = count() - before
	_, err = conn.Exec(f.Context(), "reset track_functions")
	require.NoError(f, err)
	return n
}

// Holds of a wallet that are due are ended by a few statements, however many they are, and each has its entry at its time.
func TestDueHolds_OfAWalletEndTogether(t *testing.T) {
	t.Parallel()
	const few, many = 20, 400
	calls := map[int]int64{}
	for _, n := range []int{few, many} {
		f := setUp(t, wallet.Config{})
		f.grant(wallet.Grant{Amount: 10 * many, Reference: "a", For: 30 * day})
		f.grant(wallet.Grant{Amount: 10 * many, Reference: "b"})
		_, err := do(f, func(ctx context.Context, tx pgx.Tx) (_ struct{}, err error) {
			for i := range n {
				line := f.book.Line("ann", 20*many/int64(n)) // together they hold all of it
				if _, err := f.holds.Place(ctx, tx, holds.Request{ID: fmt.Sprint(i), TTL: time.Hour + time.Duration(i%7)*time.Minute, Lines: []holds.Line{line}}); err != nil {
					return struct{}{}, err
				}
			}
			return struct{}{}, nil
		})
		require.NoError(t, err)
		require.Zero(t, f.balance().Units)
		f.clock.Advance(2 * time.Hour)
		before := f.balance()
		require.EqualValues(t, 20*many, before.Units)
		calls[n] = f.calls(func(tx pgx.Tx) error {
			d, err := f.book.Draw(t.Context(), tx, wallet.Draw{Wallet: "ann", Amount: 20*many - 1})
			require.EqualValues(t, 1, d.Left)
			return err
		})
		require.Equal(t, map[string]int64{"b": 1}, f.left())
		ended, last := 0, time.Time{}
		for e, err := range f.ledger.Entries(t.Context(), f.pool, "ann", budget.EntriesOptions{After: int64(n) + 2}) {
			require.NoError(t, err)
			require.False(t, e.At.Before(last))
			if last = e.At; e.Kind != "expire" {
				continue
			}
			ended++
			h, err := f.holds.Get(t.Context(), f.pool, "", e.Hold, "")
			require.NoError(t, err)
			require.Equal(t, h.Deadline, e.At)
		}
		require.Equal(t, n, ended)
	}
	t.Logf("%d calls of functions with %d holds that are due, %d with %d", calls[few], few, calls[many], many)
	require.Less(t, calls[many]-calls[few], int64(many-few)+20, "one call for each, of the trigger of holds")
}
