package budget_test

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/internal/bounds"
	"github.com/pgmetered/metered/internal/pgtest"
)

// Many charge at once, at each isolation level, with the lock and by the guard alone: each level is reported by one
// charge, the one that reaches it.
func TestThreshold_ConcurrentChargesReportOnce(t *testing.T) {
	t.Parallel()
	pgtest.OnEachVersion(t)
	for _, locks := range []bool{true, false} {
		t.Run(fmt.Sprintf("locks %t", locks), func(t *testing.T) {
			t.Parallel()
			pool := pgtest.Open(t)
			makeReports(t, pool)
			if !locks {
				withoutLocks(t, pool)
			}
			l := newLedger(t, budget.Config{OnThreshold: reportTo})
			limit := budget.Per(90, budget.Day, time.UTC, time.Time{}).WithThresholds(budget.Threshold{Name: "third", Used: 30}, budget.Threshold{Name: "two thirds", Used: 60}, budget.Threshold{Name: "all"})
			if time.Until(time.Now().UTC().Truncate(24*time.Hour).Add(24*time.Hour)) < 5*time.Minute {
				limit = budget.Lifetime(90).WithThresholds(limit.Thresholds()...) // not over midnight
			}
			retry := &retrier{pool: pool}
			var rolledBack atomic.Int64
			errBack := errors.New("rolled back")
			workers := pgtest.Size(4, 8)
			require.NoError(t, pgtest.InParallel(workers, func(worker int) error {
				for n := range 160 / workers {
					err := retry.run(t.Context(), isolations[(worker+n)%3], func(tx pgx.Tx) error {
						if _, err := tx.Exec(t.Context(), "select 1"); err != nil {
							return err
						}
						r, err := l.Charge(t.Context(), tx, budget.Charge{Scope: "a", Amount: 1, Limits: []budget.Limit{limit}})
						if err == nil && len(r.Crossed) > 0 && rolledBack.Add(1)%2 == 1 {
							return errBack // half of the charges that report
						}
						return err
					})
					if err != nil && !errors.Is(err, budget.ErrExceeded) && !errors.Is(err, errBack) {
						return err
					}
				}
				return nil
			}))
			rows, err := pool.Query(t.Context(), `select t.name, t.used, t.seq, l.spent from reports t join metered.ledger l using (scope, seq) order by t.n`)
			require.NoError(t, err)
			type report struct {
				Name             string
				Used, Seq, Spent int64
			}
			all, err := pgx.CollectRows(rows, pgx.RowToStructByPos[report])
			require.NoError(t, err)
			require.Equal(t, []report{{"third", 30, 30, 30}, {"two thirds", 60, 60, 60}, {"all", 90, 90, 90}}, all)
			require.Positive(t, rolledBack.Load())
		})
	}
}

// A backend that dies between the charge and its commit has reported nothing, and the next charge reports.
func TestThreshold_AKilledBackendReportsNothing(t *testing.T) {
	t.Parallel()
	kill := false
	pool, l, _ := openReporting(t, budget.Config{OnThreshold: func(ctx context.Context, tx pgx.Tx, c budget.Crossing) error {
		err := reportTo(ctx, tx, c)
		if kill {
			_, err = tx.Exec(ctx, `select pg_terminate_backend(pg_backend_pid())`)
		}
		return err
	}})
	limit := budget.Lifetime(10).WithThresholds(budget.Threshold{Name: "half", Percent: 50})
	for n := range 3 {
		scope := fmt.Sprint(n)
		tx := begin(t, pool, pgx.ReadCommitted)
		kill = n == 1
		_, err := l.Charge(t.Context(), tx, budget.Charge{Scope: scope, Amount: 5, Limits: []budget.Limit{limit}})
		require.Equal(t, kill, err != nil, "%v", err)
		if n == 0 {
			execute(t, pool, `select pg_terminate_backend($1, 120000)`, tx.Conn().PgConn().PID())
		}
		if n < 2 {
			require.Error(t, tx.Commit(t.Context()))
		} else {
			require.NoError(t, tx.Rollback(t.Context()))
		}
		kill = false
		require.Empty(t, reported(t, pool, scope))
		mustCharge(t, pool, l, scope, 4, limit)
		require.Empty(t, reported(t, pool, scope), "nothing was charged")
		mustCharge(t, pool, l, scope, 1, limit)
		require.Equal(t, []string{"half"}, reported(t, pool, scope))
	}
}

func TestThreshold_IsReportedByEveryWayToCharge(t *testing.T) {
	t.Parallel()
	pool, l, _ := openReporting(t, budget.Config{})
	limit := budget.Lifetime(10).WithThresholds(budget.Threshold{Name: "half", Percent: 50})
	of := func(scope string, amount int64) budget.Charge {
		return budget.Charge{Scope: scope, Amount: amount, Limits: []budget.Limit{limit}}
	}
	posted, err := l.ChargeNow(t.Context(), pool, of("now", 5))
	require.NoError(t, err)
	require.EqualValues(t, 1, posted.Seq)
	require.Equal(t, []string{"half"}, reported(t, pool, "now"))
	_, err = l.ChargeNow(t.Context(), pool, of("now", 1))
	require.NoError(t, err)
	require.Empty(t, reported(t, pool, "now"))

	batcher, err := budget.NewBatcher(pool, l, budget.BatcherConfig{Lanes: 1})
	require.NoError(t, err)
	require.NoError(t, pgtest.InParallel(12, func(int) error {
		_, err := batcher.Charge(t.Context(), of("batcher", 1))
		if errors.Is(err, budget.ErrExceeded) {
			return nil
		}
		return err
	}))
	require.Equal(t, []string{"half"}, reported(t, pool, "batcher"))
	event := budget.UsageEvent{Charge: of("event", 5), ID: "e"}
	for range 2 {
		_, err = batcher.Ingest(t.Context(), event)
		require.NoError(t, err)
		require.NoError(t, pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error {
			_, err := l.Ingest(t.Context(), tx, event)
			return err
		}))
	}
	require.Equal(t, []string{"half"}, reported(t, pool, "event"), "a replay reports nothing")

	var results []budget.Result
	require.NoError(t, pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) (err error) {
		results, err = l.ChargeEach(t.Context(), tx, of("each", 4), of("each", 4), of("each", 4), of("each", 2), of("other", 1), of("fits", 5))
		return err
	}))
	require.Equal(t, []int{0, 1, 0, 0, 0}, []int{len(results[0].Crossed), len(results[1].Crossed), len(results[2].Crossed), len(results[3].Crossed), len(results[4].Crossed)})
	require.EqualValues(t, 2, results[1].Crossed[0].Seq)
	require.ErrorIs(t, results[2].Err, budget.ErrExceeded)
	require.Equal(t, []string{"half"}, reported(t, pool, "each"))
	require.Equal(t, []string{"half"}, reported(t, pool, "fits"), "where all charges of the scope fit, too")
	requireVerified(t, pool, l)
}

// When its report fails, a charge in a batch is taken back, and no other.
func TestThreshold_AFailedReportTakesBackItsOwnChargeAlone(t *testing.T) {
	t.Parallel()
	pool, l, _ := openReporting(t, budget.Config{OnThreshold: func(ctx context.Context, tx pgx.Tx, c budget.Crossing) error {
		return errors.Join(reportTo(ctx, tx, c), errVeto)
	}})
	limit := budget.Lifetime(10).WithThresholds(budget.Threshold{Name: "half", Percent: 50})
	batcher, err := budget.NewBatcher(pool, l, budget.BatcherConfig{Lanes: 1})
	require.NoError(t, err)
	var vetoed atomic.Int64
	require.NoError(t, pgtest.InParallel(12, func(n int) error {
		c := budget.Charge{Scope: fmt.Sprint(n), Amount: 4, Limits: []budget.Limit{limit}}
		if n%4 == 0 {
			c.Amount = 5
		}
		_, err := batcher.Charge(t.Context(), c)
		if errors.Is(err, errVeto) && n%4 == 0 {
			vetoed.Add(1)
			return nil
		}
		return err
	}))
	require.EqualValues(t, 3, vetoed.Load())
	_, err = l.ChargeNow(t.Context(), pool, budget.Charge{Scope: "now", Amount: 5, Limits: []budget.Limit{limit}})
	require.ErrorIs(t, err, errVeto)
	require.NotErrorIs(t, err, budget.ErrCommitUnknown)
	require.Zero(t, usage(t, pool, l, "now", 0).Used)
	tx := begin(t, pool, pgx.ReadCommitted)
	_, err = l.ChargeEach(t.Context(), tx, budget.Charge{Scope: "each", Amount: 5, Limits: []budget.Limit{limit}})
	require.ErrorIs(t, err, errVeto)
	require.NoError(t, tx.Commit(t.Context()), "the transaction is as it was")
	require.Zero(t, usage(t, pool, l, "each", 0).Used)
}

func TestThreshold_ArgumentsAreChecked(t *testing.T) {
	t.Parallel()
	l := newLedger(t, budget.Config{OnThreshold: reportTo})
	check := func(l *budget.Ledger, limits ...budget.Limit) error {
		_, err := prepareCharges(l, budget.Charge{Scope: "a", Amount: 1, Limits: limits})
		return err
	}
	name := func(n int) string { return fmt.Sprintf("%0*d", n, 0) }
	day, stock := budget.Per(100, budget.Day, time.UTC, time.Time{}), budget.Lifetime(100)
	require.NoError(t, check(l, day.WithThresholds(eighty()...), stock.WithThresholds(eighty()...)))
	require.NoError(t, check(l, stock.WithThresholds(budget.Threshold{Name: name(bounds.MaxThresholdNameBytes), Left: bounds.MaxLimit, Rearm: bounds.MaxLimit})))
	require.Equal(t, stock, stock.WithThresholds(eighty()...).WithThresholds())
	one, same := stock.WithThresholds(eighty()...), stock.WithThresholds(eighty()...)
	require.True(t, one == same, "limits of the same thresholds are the same")
	require.Equal(t, eighty(), stock.WithThresholds(eighty()...).Thresholds())
	var nine []budget.Threshold
	for i := range bounds.MaxThresholds + 1 {
		nine = append(nine, budget.Threshold{Name: fmt.Sprint(i)})
	}
	require.NoError(t, check(l, stock.WithThresholds(nine[1:]...)))
	require.Equal(t, nine[1:], stock.WithThresholds(nine[1:]...).Thresholds())
	for what, err := range map[string]error{
		"no name":       check(l, stock.WithThresholds(budget.Threshold{})),
		"long name":     check(l, stock.WithThresholds(budget.Threshold{Name: name(bounds.MaxThresholdNameBytes + 1)})),
		"two lines":     check(l, stock.WithThresholds(budget.Threshold{Name: "a\nb"})),
		"long limit":    check(l, stock.Named(name(bounds.MaxThresholdNameBytes+1)).WithThresholds(eighty()...)),
		"twice":         check(l, stock.WithThresholds(eighty()[0], eighty()[0])),
		"two limits":    check(l, stock.WithThresholds(eighty()...), budget.Lifetime(50).WithThresholds(eighty()...)),
		"too many":      check(l, stock.WithThresholds(nine...)),
		"two levels":    check(l, stock.WithThresholds(budget.Threshold{Name: "a", Percent: 1, Left: 1})),
		"percent":       check(l, stock.WithThresholds(budget.Threshold{Name: "a", Percent: bounds.MaxPercent + 1})),
		"of credit":     check(l, budget.Prepaid(0).WithThresholds(budget.Threshold{Name: "a", Percent: 80})),
		"used":          check(l, stock.WithThresholds(budget.Threshold{Name: "a", Used: -1})),
		"left":          check(l, stock.WithThresholds(budget.Threshold{Name: "a", Left: -1})),
		"rearm":         check(l, stock.WithThresholds(budget.Threshold{Name: "a", Used: 1, Rearm: -1})),
		"rearm percent": check(l, stock.WithThresholds(budget.Threshold{Name: "a", Percent: 10, Rearm: 11})),
		"period":        check(l, day.WithThresholds(budget.Threshold{Name: "a", Percent: 10, Rearm: 1})),
		"nobody":        check(newLedger(t, budget.Config{}), stock.WithThresholds(eighty()...)),
	} {
		require.True(t, isA[*budget.ArgumentError](err), "%s: %v", what, err)
	}
}

// Sessions at all isolation levels charge, credit, refund and roll back at once, while one of them moves the clock over
// periods, back, and repairs it. In the order that the chain has in the end, a plain model has the same reports, by the
// same entries.
func TestThreshold_RacesAgreeWithTheModel(t *testing.T) {
	t.Parallel()
	for seed := range pgtest.Size(uint64(1), 6) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			t.Parallel()
			pool, l, clock := openReporting(t, budget.Config{ClockTolerance: time.Hour, OnThreshold: func(ctx context.Context, tx pgx.Tx, c budget.Crossing) error {
				_, err := tx.Exec(ctx, `insert into reports (seq, name) values ($1, $2)`, c.Seq, crossingName(c))
				return err
			}})
			h := &reporting{T: t, Rand: rand.New(rand.NewPCG(seed, 77)), clock: clock, reported: map[string]time.Time{}, stats: map[string]int{}, seed: seed,
				model: &model{scope: "a", tolerance: time.Hour, kept: 1, outer: t, spans: map[budget.Period]span{}}}
			h.limits = []budget.Limit{
				h.thresholds(budget.PerWindow(100, 200*time.Microsecond)).Named("window"),
				h.thresholds(budget.PerPeriod(100, 200*time.Microsecond, start)).Named("period"),
				h.thresholds(budget.PerPeriod(700, 5*time.Millisecond, start)).Named("longer"),
				h.thresholds(budget.Prepaid(200)).Named("credit"),
			}
			retry := &retrier{pool: pool}
			errBack := errors.New("rolled back")
			require.NoError(t, pgtest.InParallel(6, func(worker int) error {
				r := rand.New(rand.NewPCG(seed, uint64(worker)))
				for n := range 60 {
					if worker == 0 {
						clock.Advance(time.Duration(r.IntN(400)-50) * time.Microsecond)
						if n%20 == 19 {
							clock.Advance(-time.Duration(r.IntN(6000)) * time.Microsecond)
						}
					}
					kind, amount, seq, back := r.IntN(10), r.Int64N(12)+1, r.Int64N(int64(3*n+1))+1, r.IntN(8) == 0
					var carried []budget.Limit
					for _, limit := range h.limits {
						if r.IntN(4) > 0 {
							carried = append(carried, limit)
						}
					}
					names := make([]string, len(carried))
					for i, limit := range carried {
						names[i] = limit.Name
					}
					charge := budget.Charge{Scope: "a", Amount: amount, Limits: carried, Note: budget.Note{Reason: strings.Join(names, " ")}, NoStandings: kind%2 == 0}
					err := retry.run(t.Context(), isolations[(worker+n)%3], func(tx pgx.Tx) (err error) {
						switch {
						case worker == 0 && n%20 == 19:
							_, err = l.RepairClock(t.Context(), tx, "a", budget.Note{})
						case kind < 6:
							_, err = l.Charge(t.Context(), tx, charge)
						case kind < 7:
							var results []budget.Result
							results, err = l.ChargeEach(t.Context(), tx, charge, charge)
							for _, result := range results {
								err = cmp.Or(err, result.Err)
							}
						case kind < 8:
							_, err = l.Credit(t.Context(), tx, budget.Credit{Scope: "a", Amount: 4 * amount})
						default:
							_, err = l.Refund(t.Context(), tx, budget.Refund{Scope: "a", Seq: seq, Amount: amount})
						}
						if err == nil && back {
							return errBack
						}
						return err
					})
					switch {
					case err == nil, errors.Is(err, errBack), errors.Is(err, budget.ErrExceeded), errors.Is(err, budget.ErrUnknownEntry), errors.Is(err, budget.ErrNotCharge),
						errors.Is(err, budget.ErrRefundExceeds):
					default:
						return err
					}
				}
				return nil
			}))

			rows, err := pool.Query(t.Context(), `select kind::text, amount, at, coalesce(ref, 0)::int, coalesce(note ->> 'reason', '') from metered.ledger order by seq`)
			require.NoError(t, err)
			type entry struct {
				Kind   string
				Amount int64
				At     time.Time
				Ref    int
				Names  string
			}
			entries, err := pgx.CollectRows(rows, pgx.RowToStructByPos[entry])
			require.NoError(t, err)
			var want []string
			for _, e := range entries {
				kind := map[string]string{"c": "charge", "d": "credit", "r": "refund", "k": "clock repair"}[e.Kind]
				if kind == "charge" {
					want = append(want, h.expect(e.At, e.Amount, slices.DeleteFunc(slices.Clone(h.limits), func(l budget.Limit) bool {
						return !slices.Contains(strings.Fields(e.Names), l.Name)
					}))...)
				}
				require.Equal(t, e.At.UTC(), h.model.add(e.At, kind, e.Amount, e.Ref).UTC())
				switch kind {
				case "clock repair":
					h.forget(e.At)
				case "credit", "refund":
					h.lowered()
				}
			}
			rows, err = pool.Query(t.Context(), `select name from reports order by seq, n`)
			require.NoError(t, err)
			heard, err := pgx.CollectRows(rows, pgx.RowTo[string])
			require.NoError(t, err)
			require.Equal(t, want, heard)
			t.Log(len(entries), len(heard), h.stats)
			require.Greater(t, len(heard), 3)
			requireVerified(t, pool, l)
		})
	}
}
