package budget_test

import (
	"encoding/json"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/internal/bounds"
)

func observed(l budget.Limit) budget.Limit {
	l.Observe = true
	return l
}

// Each charge says whether the limit would have refused it. Windows forget, as for a limit that bites.
func TestObserve_ALimitJudgesAndNeverRefuses(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	pool, l, clock := open(t)
	tried := []budget.Limit{
		observed(budget.PerWindow(10, time.Hour)), observed(budget.Per(20, budget.Day, time.UTC, time.Time{})), observed(budget.Lifetime(30)),
		budget.PerWindow(1_000, time.Hour),
	}
	over := func(standings []budget.Standing) (all [4]bool) {
		for i, s := range standings {
			all[i] = s.Over
		}
		return all
	}
	charges := func(amount int64) [4]bool {
		t.Helper()
		c := budget.Charge{Scope: "a", Amount: amount, Limits: tried}
		checked, err := l.Check(ctx, pool, c)
		require.NoError(t, err)
		posted := mustCharge(t, pool, l, "a", amount, tried...)
		require.Equal(t, checked.Entries[0].Standings, posted.Standings)
		return over(posted.Standings)
	}
	require.Equal(t, [4]bool{}, charges(10))
	require.Equal(t, [4]bool{0: true}, charges(1))
	require.Equal(t, [4]bool{0: true}, charges(9))
	require.Equal(t, [4]bool{0: true, 1: true}, charges(1))
	clock.Advance(time.Hour)
	require.Equal(t, [4]bool{1: true}, charges(9))
	clock.Advance(24 * time.Hour)
	require.Equal(t, [4]bool{2: true}, charges(1))

	var batch []budget.Result
	require.NoError(t, pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) (err error) {
		batch, err = l.ChargeEach(ctx, tx, budget.Charge{Scope: "a", Amount: 9, Limits: tried}, budget.Charge{Scope: "a", Amount: 1, Limits: tried})
		return err
	}))
	require.Equal(t, [4]bool{2: true}, over(batch[0].Posted.Standings))
	require.Equal(t, [4]bool{0: true, 2: true}, over(batch[1].Posted.Standings))
	now, err := l.ChargeNow(ctx, pool, budget.Charge{Scope: "a", Amount: 1, Limits: tried})
	require.NoError(t, err)
	require.Equal(t, [4]bool{0: true, 2: true}, over(now.Standings))
	require.Zero(t, now.Standings[0].Available)

	asked, err := l.Check(ctx, pool, budget.Charge{Scope: "b", Amount: 5, Limits: []budget.Limit{budget.Limit{Window: time.Hour, Observe: true}.MaxFrom("select 4")}})
	require.NoError(t, err)
	require.True(t, asked.Entries[0].Standings[0].Over, "the query's number is judged")

	_, err = charge(ctx, pool, l, "a", 1_000, tried...)
	require.ErrorIs(t, err, budget.ErrExceeded, "the last one bites")
	requireVerified(t, pool, l)
}

// A limit on trial refuses nothing, also where a purge took entries that it would count, or where the clock was set back. It says that
// its use is unknown, and reports no threshold by it. A limit that bites fails there.
func TestObserve_NeverRefusesWhereItsUseIsNotKnown(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	pool, l, clock := openReporting(t, budget.Config{})
	for range 40 {
		mustCharge(t, pool, l, "a", 1)
	}
	clock.Advance(2 * time.Hour)
	mustCharge(t, pool, l, "a", 1)
	_, err := l.Purge(ctx, pool, budget.PurgeOptions{OlderThan: time.Hour, Scope: "a"})
	require.NoError(t, err)
	for _, bites := range []budget.Limit{budget.PerWindow(bounds.MaxLimit, 24*time.Hour), budget.Per(bounds.MaxLimit, budget.Year, time.UTC, time.Time{})} {
		_, err := charge(ctx, pool, l, "a", 1, bites)
		require.ErrorIs(t, err, budget.ErrWindowPurged)
		known := observed(budget.PerWindow(5, time.Hour))
		tried := []budget.Limit{observed(bites), known, observed(bites).Named("tells").WithThresholds(budget.Threshold{Name: "one", Used: 1}), budget.Lifetime(1_000)}
		judged := func(standings []budget.Standing, used int64) {
			t.Helper()
			require.Len(t, standings, len(tried))
			for _, i := range []int{0, 2} {
				s := standings[i]
				require.Equal(t, budget.Standing{Limit: s.Limit, Unknown: true, PeriodStart: s.PeriodStart, PeriodEnd: s.PeriodEnd}, s)
				require.Equal(t, !bites.Period.IsZero(), !s.PeriodEnd.IsZero())
			}
			require.Equal(t, used, standings[1].Used)
			require.Equal(t, used > 5, standings[1].Over)
			require.False(t, standings[1].Unknown || standings[3].Unknown)
		}
		c := budget.Charge{Scope: "a", Amount: 2, Limits: tried}
		checked, err := l.Check(ctx, pool, c)
		require.NoError(t, err)
		used := checked.Entries[0].Standings[1].Used
		judged(checked.Entries[0].Standings, used)
		judged(mustCharge(t, pool, l, "a", 2, tried...).Standings, used)
		now, err := l.ChargeNow(ctx, pool, c)
		require.NoError(t, err)
		judged(now.Standings, used+2)
		require.NoError(t, pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
			batch, err := l.ChargeEach(ctx, tx, c, c)
			if err == nil {
				judged(batch[0].Posted.Standings, used+4)
				judged(batch[1].Posted.Standings, used+6)
			}
			return err
		}))
		require.Empty(t, reported(t, pool, "a"))
		quiet := c
		quiet.NoStandings = true
		_, err = l.ChargeNow(ctx, pool, quiet)
		require.NoError(t, err)
	}
	mustCharge(t, pool, l, "ahead", 1)
	clock.Advance(-time.Hour)
	bites := budget.PerWindow(10, time.Hour)
	_, err = charge(ctx, pool, l, "ahead", 1, bites)
	require.ErrorIs(t, err, budget.ErrClock)
	posted := mustCharge(t, pool, l, "ahead", 1, observed(bites))
	require.Equal(t, int64(2), posted.Standings[0].Used)
	clock.Advance(time.Hour)
	requireVerified(t, pool, l)
}

// OnThreshold hears once of the scopes that a tried limit would refuse, and of those that go far beyond.
func TestObserve_ThresholdsBeyondTheLimitAreReported(t *testing.T) {
	t.Parallel()
	pool, l, _ := openReporting(t, budget.Config{})
	tried := observed(budget.Per(100, budget.Day, time.UTC, time.Time{})).WithThresholds(
		budget.Threshold{Name: "80%", Percent: 80}, budget.Threshold{Name: "refused", Used: 101}, budget.Threshold{Name: "double", Percent: 200})
	for _, step := range []struct {
		amount int64
		want   []string
	}{{79, []string{}}, {21, []string{"80%"}}, {1, []string{"refused"}}, {98, []string{}}, {1, []string{"double"}}, {500, []string{}}} {
		mustCharge(t, pool, l, "a", step.amount, tried)
		require.Equal(t, step.want, reported(t, pool, "a"), step.amount)
	}
	requireVerified(t, pool, l)
}

func TestObserve_ArgumentsAndJSON(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	pool, l, _ := openReporting(t, budget.Config{})
	_, err := charge(ctx, pool, l, "a", 1, observed(budget.Prepaid(5)))
	require.ErrorContains(t, err, "Observe")
	for percent, ok := range map[int64]bool{-1: false, 101: true, bounds.MaxPercent: true, bounds.MaxPercent + 1: false} {
		_, err := charge(ctx, pool, l, "b", 1, budget.PerWindow(bounds.MaxLimit, time.Hour).WithThresholds(budget.Threshold{Name: "far", Percent: percent}))
		require.Equal(t, ok, err == nil, "%d: %v", percent, err)
	}
	require.Empty(t, reported(t, pool, "b"), "no level overflows")

	text, err := json.Marshal(observed(budget.PerWindow(5, time.Hour)))
	require.NoError(t, err)
	require.JSONEq(t, `{"max":5,"window_us":3600000000,"observe":true}`, string(text))
	var back budget.Limit
	require.NoError(t, json.Unmarshal(text, &back))
	require.Equal(t, observed(budget.PerWindow(5, time.Hour)), back)
}
