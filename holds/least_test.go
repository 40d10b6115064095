package holds_test

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/pgtest"
)

// Units captured by expiry count from the time at which the hold was due, and in that period, the same before and after
// the expiry is written down.
func TestAtLeast_CountsWhenItFellDueSweptOrNot(t *testing.T) {
	t.Parallel()
	f := setUp(t, holds.Config{})
	f.clock.Set(time.Date(2031, 1, 31, 23, 30, 0, 0, time.UTC))
	_, err := pgtest.InTx(t.Context(), f.pool, func(tx pgx.Tx) (holds.Hold, error) {
		return f.book.Place(t.Context(), tx, holds.Placement{ID: "h", TTL: 10 * time.Minute, Lines: []holds.Line{
			{Scope: "a", Amount: 100, AtLeast: 30}, {Scope: "b", Amount: 5, AtLeast: 5}, {Scope: "c", Amount: 7}}})
	})
	require.NoError(t, err)
	f.clock.Set(time.Date(2031, 2, 1, 0, 10, 0, 0, time.UTC))
	month := budget.Per(100, budget.Month, time.UTC, time.Time{})
	usage := func() (all []int64) {
		for _, scope := range []string{"a", "b", "c"} {
			for _, q := range []budget.Query{{Scope: scope}, {Scope: scope, Window: time.Hour},
				{Scope: scope, Window: 20 * time.Minute}, {Scope: scope, Period: month.Period}} {
				u, err := f.ledger.Usage(t.Context(), f.pool, q)
				require.NoError(t, err)
				require.Zero(t, u[0].Held)
				all = append(all, u[0].Used)
			}
		}
		return all
	}
	want := []int64{30, 30, 0, 0, 5, 5, 0, 0, 0, 0, 0, 0}
	require.Equal(t, want, usage())
	h, err := f.book.Get(t.Context(), f.pool, "", "h", "")
	require.NoError(t, err)
	require.Equal(t, holds.Expired, h.State)
	require.EqualValues(t, 30, h.Lines[0].Captured)
	_, err = f.ledger.Check(t.Context(), f.pool, budget.Charge{Scope: "a", Amount: 71, Limits: []budget.Limit{budget.PerWindow(100, time.Hour)}})
	require.ErrorIs(t, err, budget.ErrExceeded)
	_, err = f.ledger.Check(t.Context(), f.pool, budget.Charge{Scope: "a", Amount: 100, Limits: []budget.Limit{month}})
	require.NoError(t, err, "it was due in January")

	_, err = f.book.Sweep(t.Context(), f.pool, holds.SweepOptions{})
	require.NoError(t, err)
	require.Equal(t, want, usage())
	after, err := f.book.Get(t.Context(), f.pool, "", "h", "")
	require.NoError(t, err)
	require.Equal(t, h.Lines, after.Lines)
	f.verify()
}

// A refusal does not wait for units that will be charged in any case.
func TestAtLeast_IsNotWaitedFor(t *testing.T) {
	t.Parallel()
	f := setUp(t, holds.Config{})
	place := func(scope string, least int64) {
		_, err := pgtest.InTx(t.Context(), f.pool, func(tx pgx.Tx) (holds.Hold, error) {
			return f.book.Place(t.Context(), tx, holds.Placement{TTL: time.Minute, Lines: []holds.Line{{Scope: scope, Amount: 100, AtLeast: least}}})
		})
		require.NoError(t, err)
	}
	place("all", 100)
	place("some", 40)
	for scope, want := range map[string]time.Duration{"all": budget.Never, "some": time.Minute} {
		_, err := f.ledger.Check(t.Context(), f.pool, budget.Charge{Scope: scope, Amount: 60, Limits: []budget.Limit{budget.Lifetime(100)}})
		require.Equal(t, want, refusal(t, err).RetryAfter, scope)
	}
}

// A capture in part ends no hold of a scope that it leaves alone, whatever was due in the others before.
func TestAtLeast_IsNotWrittenByACaptureOfOtherScopes(t *testing.T) {
	t.Parallel()
	f := setUp(t, holds.Config{})
	f.mustPlace(holds.Placement{ID: "both", TTL: time.Hour, Lines: []holds.Line{{Scope: "a", Amount: 5}, {Scope: "b", Amount: 5}}})
	f.mustPlace(holds.Placement{ID: "early", TTL: 10 * time.Second, Lines: []holds.Line{{Scope: "a", Amount: 1}}})
	f.mustPlace(holds.Placement{ID: "due", TTL: time.Minute, Lines: []holds.Line{{Scope: "b", Amount: 5, AtLeast: 2}}})
	_, err := do(f, func(ctx context.Context, tx pgx.Tx) ([]holds.Hold, error) {
		return f.book.Release(ctx, tx, holds.Release{IDs: []string{"early"}})
	})
	require.NoError(t, err)
	f.clock.Advance(time.Minute)
	for want, scope := range []string{"", "a", "b"} {
		if scope != "" {
			_, err := do(f, func(ctx context.Context, tx pgx.Tx) ([]holds.Hold, error) {
				return f.book.Capture(ctx, tx, holds.Capture{IDs: []string{"both"}, Keep: true, Lines: []holds.Line{{Scope: scope, Amount: 1}}})
			})
			require.NoError(t, err)
		}
		require.Equal(t, max(1, want), f.get("due").Version, "after a capture of %q", scope)
	}
}

// The first writer writes it down, once: charges that need the room, sweeps, and Expire, at each isolation level.
func TestAtLeast_IsChargedOnceByTheFirstWriter(t *testing.T) {
	t.Parallel()
	f := setUp(t, holds.Config{})
	for _, level := range []pgx.TxIsoLevel{pgx.ReadCommitted, pgx.RepeatableRead, pgx.Serializable} {
		scope := string(level)
		const n = 8
		for range n {
			_, err := pgtest.InTx(t.Context(), f.pool, func(tx pgx.Tx) (holds.Hold, error) {
				return f.book.Place(t.Context(), tx, holds.Placement{TTL: time.Minute, Lines: []holds.Line{
					{Scope: scope, Amount: 10, AtLeast: 3}, {Scope: scope + "/2", Amount: 4, AtLeast: 4}}})
			})
			require.NoError(t, err)
		}
		f.clock.Advance(time.Minute)
		var charged atomic.Int64
		require.NoError(t, pgtest.InParallel(8, func(i int) error {
			ctx := context.Background()
			if i == 0 {
				_, err := f.book.Sweep(ctx, f.pool, holds.SweepOptions{Batch: 3})
				return err
			}
			for { // the only room is the units that the holds free
				err := pgx.BeginTxFunc(ctx, f.pool, pgx.TxOptions{IsoLevel: level}, func(tx pgx.Tx) error {
					_, err := f.ledger.Charge(ctx, tx, budget.Charge{Scope: scope, Amount: 5, Limits: []budget.Limit{budget.Lifetime(3*n + 20)}})
					return err
				})
				switch {
				case err == nil:
					charged.Add(5)
				case errors.Is(err, budget.ErrSerialization):
					continue
				}
				return nil
			}
		}))
		require.EqualValues(t, 20, charged.Load(), level)
		_, err := f.book.Sweep(t.Context(), f.pool, holds.SweepOptions{})
		require.NoError(t, err)
		for of, want := range map[string]int64{scope: 3*n + 20, scope + "/2": 4 * n} {
			u, err := f.ledger.Usage(t.Context(), f.pool, budget.Query{Scope: of})
			require.NoError(t, err)
			require.Equal(t, want, u[0].Used, of)
			require.Zero(t, u[0].Held)
		}
		require.Equal(t, n, pgtest.Value[int](t, f.pool, `select count(distinct hold) from metered.ledger where scope = $1 and kind = 'u'`, scope))
	}
	f.verify()
}
