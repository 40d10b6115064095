package budget_test

import (
	"encoding/json"
	"errors"
	"sync"
	"testing"
	"time"

	"github.com/pgmetered/metered/internal/fault"
	"github.com/pgmetered/metered/internal/pgtest"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/budget"
)

// At each isolation level, and while midnight passes, each day has exactly its units.
func TestPerDay_ConcurrentCallersNeverExceedADay(t *testing.T) {
	t.Parallel()
	pgtest.OnEachVersion(t)
	pool, l, clock := open(t)
	berlin := location(t, "Europe/Berlin")
	midnight := time.Date(2026, 10, 26, 0, 0, 0, 0, berlin) // ends a day of 25 hours
	for _, level := range []pgx.TxIsoLevel{pgx.ReadCommitted, pgx.RepeatableRead, pgx.Serializable} {
		limit := budget.Per(20, budget.Day, berlin, time.Time{})
		clock.Set(midnight.Add(-25 * time.Hour))
		run := func(tries int) {
			var all sync.WaitGroup
			for range 4 {
				all.Go(func() {
					for range tries {
						err := pgx.BeginTxFunc(t.Context(), pool, pgx.TxOptions{IsoLevel: level}, func(tx pgx.Tx) error {
							_, err := l.Charge(t.Context(), tx, budget.Charge{Scope: string(level), Amount: 1, Limits: []budget.Limit{limit}, NoStandings: tries%2 == 0})
							return err
						})
						if err != nil && !errors.Is(err, budget.ErrExceeded) && !errors.Is(err, budget.ErrSerialization) {
							t.Error(err)
						}
					}
				})
			}
			if tries == 12 {
				clock.Set(midnight.Add(-time.Microsecond))
				clock.Set(midnight)
			}
			all.Wait()
		}
		run(5)
		run(12)
		for range 100 {
			if usageIn(t, pool, l, string(level), limit).Used == 20 {
				break
			}
			run(3)
		}
		run(3)
		days := map[bool]int64{}
		for e, err := range l.Entries(t.Context(), pool, string(level), budget.EntriesOptions{}) {
			require.NoError(t, err)
			days[e.At.Before(midnight)] += e.Amount
		}
		require.Equal(t, int64(20), days[false])
		require.LessOrEqual(t, days[true], int64(20))
	}
	requireVerified(t, pool, l)
}

func usageIn(t testing.TB, db budget.Querier, l *budget.Ledger, scope string, limit budget.Limit) budget.Usage {
	t.Helper()
	u, err := l.Usage(t.Context(), db, budget.Query{Scope: scope, Period: limit.Period})
	require.NoError(t, err)
	return u[0]
}

// A batch judges periods as single charges do, and a late event counts when it is recorded.
func TestChargeEach_JudgesPeriods(t *testing.T) {
	t.Parallel()
	pool, l, clock := open(t)
	limits := []budget.Limit{budget.Per(5, budget.Month, location(t, "Pacific/Apia"), time.Time{}), budget.Lifetime(100), budget.PerPeriod(9, 90*time.Minute, start)}
	var charges []budget.Charge
	for _, scope := range []string{"a", "b", "a", "a", "b"} {
		charges = append(charges, budget.Charge{Scope: scope, Amount: 2, Limits: limits})
	}
	for range 2 { // into an empty scope, and into one with entries
		want := map[string]int64{}
		var results []budget.Result
		require.NoError(t, pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) (err error) {
			results, err = l.ChargeEach(t.Context(), tx, charges...)
			return err
		}))
		for i, r := range results {
			scope := charges[i].Scope
			end := spanOf(t, limits[0].Period, clock.Now()).end
			if want[scope]+2 > 5 {
				var refused *budget.ExceededError
				require.ErrorAs(t, r.Err, &refused)
				require.Equal(t, end.Sub(clock.Now()), refused.Refusals[0].RetryAfter)
				require.Equal(t, end, refused.Refusals[0].PeriodEnd)
				continue
			}
			require.NoError(t, r.Err)
			want[scope] += 2
			require.Equal(t, want[scope], r.Posted.Standings[0].Used)
			for k, limit := range limits {
				s := r.Posted.Standings[k]
				if limit.Period.IsZero() {
					require.Zero(t, s.PeriodEnd)
					continue
				}
				require.Equal(t, spanOf(t, limit.Period, clock.Now()), span{s.PeriodStart, s.PeriodEnd})
			}
		}
		clock.Set(spanOf(t, limits[0].Period, clock.Now()).end)
	}
	for range 2 { // with room to spare, where one statement makes all entries
		roomy := budget.Charge{Scope: "d", Amount: 1, Limits: []budget.Limit{budget.Per(50, budget.Day, time.UTC, time.Time{})}}
		require.NoError(t, pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error {
			results, err := l.ChargeEach(t.Context(), tx, roomy, roomy)
			require.NoError(t, err)
			require.Equal(t, []int64{1, 2}, []int64{results[0].Posted.Standings[0].Used, results[1].Posted.Standings[0].Used})
			return nil
		}))
		clock.Set(spanOf(t, roomy.Limits[0].Period, clock.Now()).end)
	}
	events := []budget.UsageEvent{{ID: "late", OccurredAt: clock.Now().Add(-time.Hour), Charge: charges[0]}, {ID: "now", Charge: charges[0]}}
	require.NoError(t, pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error {
		results, err := l.Ingest(t.Context(), tx, events...)
		require.NoError(t, err)
		require.Equal(t, int64(2), results[0].Posted.Standings[0].Used)
		require.Equal(t, int64(4), results[1].Posted.Standings[0].Used)
		return nil
	}))
	// One caller's unknown zone does not keep another's charge from a Batcher.
	batcher, err := budget.NewBatcher(pool, l, budget.BatcherConfig{Lanes: 1})
	require.NoError(t, err)
	var all sync.WaitGroup
	for i := range 20 {
		all.Go(func() {
			zone := time.UTC
			if i%5 == 0 {
				zone = time.FixedZone("Europe/Atlantis", 0)
			}
			_, err := batcher.Charge(t.Context(), budget.Charge{Scope: "c", Amount: 1, Limits: []budget.Limit{budget.Per(100, budget.Day, zone, time.Time{})}})
			if i%5 == 0 && !errors.Is(err, fault.New("budget_time_zone", "")) || i%5 != 0 && err != nil {
				t.Errorf("%d: %v", i, err)
			}
		})
	}
	all.Wait()
	require.NoError(t, batcher.Close(t.Context()))
	require.Equal(t, int64(16), usage(t, pool, l, "c", 0).Used)
	requireVerified(t, pool, l)
}

// A period that began before the purge's end is an error, and never counted too low.
func TestPurge_KeepsTheEntriesThatPeriodsNeed(t *testing.T) {
	t.Parallel()
	pool, l, clock := open(t)
	limit := budget.Per(1000, budget.Month, time.UTC, time.Time{})
	require.Equal(t, 32*24*time.Hour, limit.Reach())
	clock.Set(start.Add(time.Hour))
	chargeMany(t, pool, l, "a", 40)
	clock.Set(start.AddDate(0, 1, 0).Add(-time.Microsecond))
	mustCharge(t, pool, l, "a", 1)
	report, err := l.Purge(t.Context(), pool, budget.PurgeOptions{OlderThan: limit.Reach()})
	require.NoError(t, err)
	require.Equal(t, budget.PurgeReport{Scopes: 1, Last: "a", KeptSince: clock.Now().Add(-limit.Reach())}, report)
	require.Equal(t, int64(41), usageIn(t, pool, l, "a", limit).Used)

	require.Equal(t, int64(31), purge(t, pool, l, time.Hour).Entries)
	_, err = l.Usage(t.Context(), pool, budget.Query{Scope: "a", Period: limit.Period})
	require.ErrorIs(t, err, budget.ErrWindowPurged)
	_, err = charge(t.Context(), pool, l, "a", 1, limit)
	require.ErrorIs(t, err, budget.ErrWindowPurged)
	clock.Advance(time.Microsecond)
	require.Zero(t, usageIn(t, pool, l, "a", limit).Used)
	mustCharge(t, pool, l, "a", 1000, limit)
}

func TestLimit_OfAPeriodIsJSONBothWays(t *testing.T) {
	t.Parallel()
	anchor := time.Date(2026, 1, 31, 0, 0, 0, 1000, time.UTC)
	for want, limit := range map[string]budget.Limit{
		`{"max":9,"period":"month","time_zone":"Europe/Berlin"}`:                                        budget.Per(9, budget.Month, location(t, "Europe/Berlin"), time.Time{}),
		`{"name":"n","max":9,"period":"week","time_zone":"UTC","anchor":"2026-01-31T00:00:00.000001Z"}`: budget.Per(9, budget.Week, time.UTC, anchor).Named("n"),
		`{"max":9,"period_us":2592000000000,"anchor":"2026-01-31T00:00:00.000001Z"}`:                    budget.PerPeriod(9, 720*time.Hour, anchor),
	} {
		text, err := json.Marshal(limit)
		require.NoError(t, err)
		require.JSONEq(t, want, string(text))
		var back budget.Limit
		require.NoError(t, json.Unmarshal(text, &back))
		require.True(t, limit == back)
		text, err = json.Marshal(limit.Period)
		require.NoError(t, err)
		var period budget.Period
		require.NoError(t, json.Unmarshal(text, &period))
		require.True(t, period == limit.Period)
		u := budget.Usage{Query: budget.Query{Scope: "a", Period: limit.Period}, Used: 3, PeriodStart: anchor, PeriodEnd: anchor}
		text, err = json.Marshal(u)
		require.NoError(t, err)
		var same budget.Usage
		require.NoError(t, json.Unmarshal(text, &same))
		require.Equal(t, u, same)
	}
	for _, wrong := range []string{
		`{"max":9,"period":"hour","time_zone":"UTC"}`, `{"max":9,"period":"day"}`, `{"max":9,"period_us":-1}`, `{"max":9,"time_zone":"UTC"}`,
		`{"max":9,"period":"day","time_zone":"UTC","lifetime":true}`, `{"max":9,"period":"day","time_zone":"UTC","window_us":5}`,
		`{"max":9,"period":"day","time_zone":"UTC","period_us":5}`, `{"max":9,"period_us":5}`, `{"max":9,"period":"day","time_zone":"Local"}`,
	} {
		require.ErrorIs(t, json.Unmarshal([]byte(wrong), new(budget.Limit)), budget.ErrArgument, wrong)
	}
}
