package holds_test

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/internal/sqlstate"
)

// A capture that OnThreshold refuses does not happen, and a capture that is rolled back was not reported.
func TestSpent_IsReportedWithTheCaptureOrNot(t *testing.T) {
	t.Parallel()
	f := setUpReporting(t)
	veto := false
	f.reportInto(func(ctx context.Context, tx pgx.Tx, c budget.Crossing) error {
		err := reportTo(ctx, tx, c)
		if veto {
			err = errors.Join(err, errVeto)
		}
		return err
	})
	limit := budget.Lifetime(100).WithThresholds(spent80...)
	h := f.mustPlace(holds.Placement{Lines: lineOf("a", 90, limit)})
	c := holds.Capture{IDs: []string{h.ID}, Lines: lineOf("a", 85, limit)}
	for _, veto = range []bool{true, false} {
		require.NoError(t, pgx.BeginFunc(t.Context(), f.pool, func(tx pgx.Tx) error {
			sub, err := tx.Begin(t.Context())
			require.NoError(t, err)
			_, err = f.book.Capture(t.Context(), sub, c)
			if veto {
				require.ErrorIs(t, err, errVeto)
				require.NoError(t, sub.Commit(t.Context()), "the transaction is as it was")
				return nil
			}
			require.NoError(t, err)
			return sub.Rollback(t.Context())
		}))
		require.Empty(t, f.crossed())
		require.Equal(t, holds.Held, f.get(h.ID).State)
	}
	_, err := f.capture(c)
	require.NoError(t, err)
	require.Equal(t, []string{"a 80: 85 used, 5 held, by u"}, f.crossed())
	f.verify()
}

// Many capture and charge at once, at each isolation level: each threshold is reported by one of them, the one that
// reaches it. The short form finds a report that leaves no mark (_cross_thresholds without tips[i] := tip).
func TestSpent_ConcurrentCapturesReportOnce(t *testing.T) {
	t.Parallel()
	pgtest.OnEachVersion(t)
	f := setUpReporting(t)
	for _, level := range isolations {
		t.Run(string(level), func(t *testing.T) {
			scope, workers, each := string(level), pgtest.Size(4, 8), pgtest.Size(12, 10)
			limits := []budget.Limit{
				budget.Lifetime(1000).Named("stock").WithThresholds(budget.Threshold{Name: "20", Used: 20, Spent: true}, budget.Threshold{Name: "40", Used: 40, Spent: true}),
				budget.PerWindow(1000, time.Hour).WithThresholds(budget.Threshold{Name: "30", Used: 30, Spent: true}, budget.Threshold{Name: "held", Used: 70}),
			}
			var backs atomic.Int64
			errBack := errors.New("rolled back")
			retried := func(fn func(tx pgx.Tx) error) error {
				for {
					err := pgx.BeginTxFunc(t.Context(), f.pool, pgx.TxOptions{IsoLevel: level}, fn)
					if !sqlstate.Collided(err) && !errors.Is(err, errBack) {
						return err
					}
				}
			}
			require.NoError(t, pgtest.InParallel(workers, func(worker int) error {
				for n := range each {
					id := fmt.Sprint(level, " ", worker, "/", n)
					err := retried(func(tx pgx.Tx) error {
						_, err := f.book.Place(t.Context(), tx, holds.Placement{ID: id, TTL: time.Minute, Lines: lineOf(scope, 3, limits...)})
						return err
					})
					if err != nil {
						return err
					}
					over, covered := holds.OverRefused, int64(1)
					if n%3 == 2 {
						over = holds.OverAllowed
					}
					err = retried(func(tx pgx.Tx) error {
						all, err := f.book.Capture(t.Context(), tx, holds.Capture{IDs: []string{id}, Over: over, Lines: lineOf(scope, covered, limits...)})
						if err == nil && len(all[0].Crossed) > 0 && backs.Add(1)%2 == 1 {
							return errBack // half of the captures that report
						}
						return err
					})
					if err != nil {
						return err
					}
				}
				return nil
			}))
			used, held := f.usage(scope)
			require.EqualValues(t, []int64{int64(workers * each), 0}, []int64{used, held})
			rows, err := f.pool.Query(t.Context(), `select format('%s %s %s', t.name, t.used, l.spent) from reports t join metered.ledger l using (scope, seq) where t.name <> 'held' and scope = $1 order by t.n`, scope)
			require.NoError(t, err)
			all, err := pgx.CollectRows(rows, pgx.RowTo[string])
			require.NoError(t, err)
			require.Equal(t, []string{"20 20 20", "30 30 30", "40 40 40"}, all)
			require.Positive(t, backs.Load())
		})
	}
	f.verify()
}

// A capture that reaches no threshold does not count usage. A charge does where held units reach it: they are in its bound.
func TestSpent_ACaptureBelowTheThresholdCountsNothing(t *testing.T) {
	t.Parallel()
	f := setUpReporting(t)
	limits := []budget.Limit{budget.Per(1000, budget.Month, time.UTC, time.Time{}).WithThresholds(spent80...), budget.PerWindow(1000, time.Hour).WithThresholds(spent80...), budget.Lifetime(2130).WithThresholds(spent80...)}
	for range 3 {
		_, err := f.charge(budget.Charge{Scope: "a", Amount: 300, Limits: limits, NoStandings: true})
		require.NoError(t, err)
		f.clock.Advance(31 * 24 * time.Hour)
	}
	h := f.mustPlace(holds.Placement{Lines: lineOf("a", 790, limits...)})
	calls := func(do func(tx pgx.Tx) error) int {
		tx, err := f.pool.Begin(t.Context())
		require.NoError(t, err)
		defer func() { require.NoError(t, tx.Rollback(context.WithoutCancel(t.Context()))) }()
		_, err = tx.Exec(t.Context(), `set local track_functions = 'all'`)
		require.NoError(t, err)
		counted := func() (n int) { // by this session, and not reported yet
			require.NoError(t, tx.QueryRow(t.Context(), `select coalesce(sum(calls), 0) from pg_stat_xact_user_functions
				where funcname in ('_check_limits', '_spent_since', '_cross_thresholds')`).Scan(&n))
			return n
		}
		before := counted()
		require.NoError(t, do(tx))
		return counted() - before
	}
	charge := func(tx pgx.Tx) error {
		_, err := f.ledger.Charge(t.Context(), tx, budget.Charge{Scope: "a", Amount: 20, Limits: limits, NoStandings: true})
		return err
	}
	capture := func(limits ...budget.Limit) func(tx pgx.Tx) error {
		return func(tx pgx.Tx) error {
			_, err := f.book.Capture(t.Context(), tx, holds.Capture{IDs: []string{h.ID}, Lines: lineOf("a", 400, limits...)})
			return err
		}
	}
	require.Zero(t, calls(capture(limits...)))
	require.Positive(t, calls(charge))
	require.Positive(t, calls(capture(budget.PerWindow(400, time.Hour).WithThresholds(spent80...))))
}
