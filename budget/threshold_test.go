package budget_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/internal/bounds"
	"github.com/pgmetered/metered/internal/fault"
	"github.com/pgmetered/metered/internal/ledger"
	"github.com/pgmetered/metered/internal/pgtest"
)

// reportTo writes a crossing into the table reports, in the transaction of its charge.
func reportTo(ctx context.Context, tx pgx.Tx, c budget.Crossing) error {
	_, err := tx.Exec(ctx, `insert into reports (scope, name, seq, used, held, available) values ($1, $2, $3, $4, $5, $6)`,
		c.Scope, c.Threshold.Name, c.Seq, c.Used, c.Held, c.Available)
	return err
}

func makeReports(t testing.TB, pool *pgxpool.Pool) {
	t.Helper()
	execute(t, pool, `create table reports (n bigint generated always as identity, scope text, name text, seq bigint, used bigint, held bigint, available bigint)`)
}

// openReporting is open, with a ledger that reports thresholds.
func openReporting(t testing.TB, cfg budget.Config) (*pgxpool.Pool, *budget.Ledger, *pgtest.Clock) {
	t.Helper()
	pool, _, clock := open(t)
	makeReports(t, pool)
	if cfg.OnThreshold == nil {
		cfg.OnThreshold = reportTo
	}
	return pool, newLedger(t, cfg), clock
}

// reported returns the committed reports of a scope, in order, and forgets them.
func reported(t testing.TB, pool *pgxpool.Pool, scope string) []string {
	t.Helper()
	rows, err := pool.Query(t.Context(), `with gone as (delete from reports where scope = $1 returning n, name) select name from gone order by n`, scope)
	require.NoError(t, err)
	names, err := pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(t, err)
	return names
}

func eighty() []budget.Threshold {
	return []budget.Threshold{{Name: "80%", Percent: 80}, {Name: "used up"}}
}

func TestThreshold_OfAPeriodIsReportedOnceInEach(t *testing.T) {
	t.Parallel()
	for _, quiet := range []bool{false, true} {
		pool, l, clock := openReporting(t, budget.Config{NoStandings: quiet})
		month := budget.Per(100, budget.Month, time.UTC, time.Time{}).WithThresholds(eighty()...)
		mustCharge(t, pool, l, "a", 79, month)
		require.Empty(t, reported(t, pool, "a"))
		var receipt budget.Receipt
		require.NoError(t, pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) (err error) {
			receipt, err = l.Charge(t.Context(), tx, budget.Charge{Scope: "b", Amount: 1}, budget.Charge{Scope: "a", Amount: 1, Limits: []budget.Limit{month}})
			return err
		}))
		require.Equal(t, []budget.Crossing{{
			Scope: "a", Seq: 2, At: start, Limit: month, Threshold: budget.Threshold{Name: "80%", Percent: 80}, Used: 80, Available: 20,
			PeriodStart: start, PeriodEnd: start.AddDate(0, 1, 0),
		}}, receipt.Crossed)
		require.Equal(t, []string{"80%"}, reported(t, pool, "a"))
		mustCharge(t, pool, l, "a", 19, month)
		require.Empty(t, reported(t, pool, "a"), "it was reported")
		require.NoError(t, refund(t.Context(), pool, l, "a", 1, 79))
		mustCharge(t, pool, l, "a", 70, month)
		require.Empty(t, reported(t, pool, "a"), "once in a period, whatever is given back")
		mustCharge(t, pool, l, "a", 10, month)
		require.Equal(t, []string{"used up"}, reported(t, pool, "a"))
		_, err := charge(t.Context(), pool, l, "a", 1, month)
		require.ErrorIs(t, err, budget.ErrExceeded)

		clock.Set(start.AddDate(0, 1, 0))
		mustCharge(t, pool, l, "a", 79, month)
		require.Empty(t, reported(t, pool, "a"))
		mustCharge(t, pool, l, "a", 21, month)
		require.Equal(t, []string{"80%", "used up"}, reported(t, pool, "a"), "one charge can reach several")
		requireVerified(t, pool, l)
	}
}

func TestThreshold_OfAWindowIsArmedAgainWhenUseWentBack(t *testing.T) {
	t.Parallel()
	for _, quiet := range []bool{false, true} {
		pool, l, clock := openReporting(t, budget.Config{NoStandings: quiet})
		hour := budget.PerWindow(100, time.Hour).WithThresholds(budget.Threshold{Name: "80%", Percent: 80, Rearm: 30})
		mustCharge(t, pool, l, "a", 30, hour)
		clock.Advance(30 * time.Minute)
		mustCharge(t, pool, l, "a", 50, hour)
		require.Equal(t, []string{"80%"}, reported(t, pool, "a"))
		clock.Advance(25 * time.Minute)
		mustCharge(t, pool, l, "a", 1, hour)
		clock.Advance(5 * time.Minute) // 51 are left: more than 50
		mustCharge(t, pool, l, "a", 49, hour)
		require.Empty(t, reported(t, pool, "a"), "it went back, but not far enough")
		clock.Advance(30 * time.Minute) // 50 of now
		mustCharge(t, pool, l, "a", 1, hour)
		require.Empty(t, reported(t, pool, "a"))
		mustCharge(t, pool, l, "a", 29, hour)
		require.Equal(t, []string{"80%"}, reported(t, pool, "a"), "it was armed by the charge before, which did not reach it")
	}
}

func TestThreshold_OfABalanceIsArmedAgainByCredit(t *testing.T) {
	t.Parallel()
	pool, l, _ := openReporting(t, budget.Config{})
	low := budget.Prepaid(0).WithThresholds(budget.Threshold{Name: "low", Left: 500}, budget.Threshold{Name: "gone"})
	mustCredit(t, pool, l, "a", 1000)
	mustCharge(t, pool, l, "a", 499, low)
	require.Empty(t, reported(t, pool, "a"))
	mustCharge(t, pool, l, "a", 1, low)
	require.Equal(t, []string{"low"}, reported(t, pool, "a"))
	mustCredit(t, pool, l, "a", 49) // 549, and 550 is a tenth above 500
	mustCharge(t, pool, l, "a", 49, low)
	require.Empty(t, reported(t, pool, "a"))
	mustCredit(t, pool, l, "a", 50) // 550
	mustCharge(t, pool, l, "a", 20) // knows of no threshold
	mustCharge(t, pool, l, "a", 40, low)
	require.Equal(t, []string{"low"}, reported(t, pool, "a"), "the credit armed it, whoever spends it first")
	mustCharge(t, pool, l, "a", 490, low)
	require.Equal(t, []string{"gone"}, reported(t, pool, "a"))
}

var errVeto = errors.New("veto")

// The report exists with its charge, or neither does.
func TestThreshold_TheReportCommitsWithTheChargeOrNot(t *testing.T) {
	t.Parallel()
	veto := false
	pool, l, _ := openReporting(t, budget.Config{OnThreshold: func(ctx context.Context, tx pgx.Tx, c budget.Crossing) error {
		if err := reportTo(ctx, tx, c); err != nil || !veto {
			return err
		}
		_, err := tx.Exec(ctx, `select 1 / 0`)
		return errors.Join(errVeto, err)
	}})
	limit := budget.Lifetime(100).WithThresholds(eighty()...)
	crossing := budget.Charge{Scope: "a", Amount: 80, Limits: []budget.Limit{limit}}

	tx := begin(t, pool, pgx.ReadCommitted)
	_, err := l.Charge(t.Context(), tx, crossing)
	require.NoError(t, err)
	require.NoError(t, tx.Rollback(t.Context()))
	require.Empty(t, reported(t, pool, "a"))

	tx = begin(t, pool, pgx.ReadCommitted)
	sub, err := tx.Begin(t.Context())
	require.NoError(t, err)
	_, err = l.Charge(t.Context(), sub, crossing)
	require.NoError(t, err)
	require.NoError(t, sub.Rollback(t.Context()))
	r, err := l.Charge(t.Context(), tx, budget.Charge{Scope: "a", Amount: 79, Limits: []budget.Limit{limit}})
	require.NoError(t, err)
	require.Empty(t, r.Crossed)
	require.NoError(t, tx.Commit(t.Context()))
	require.Empty(t, reported(t, pool, "a"), "a savepoint takes it back")

	veto = true
	tx = begin(t, pool, pgx.ReadCommitted)
	crossing.Amount = 1
	_, err = l.Charge(t.Context(), tx, crossing)
	require.ErrorIs(t, err, errVeto)
	require.ErrorContains(t, err, `OnThreshold: scope "a" crosses "80%"`)
	require.NoError(t, tx.Commit(t.Context()), "the transaction is as usable as it was")
	require.Empty(t, reported(t, pool, "a"))
	require.EqualValues(t, 79, usage(t, pool, l, "a", 0).Used)

	veto = false
	mustCharge(t, pool, l, "a", 1, limit)
	require.Equal(t, []string{"80%"}, reported(t, pool, "a"))
}

// A wallet's sweeper asks this before it writes a lapse of credit: nobody charges then.
func TestThreshold_OfABalanceIsCrossedByCreditThatLapses(t *testing.T) {
	t.Parallel()
	pool, l, _ := openReporting(t, budget.Config{})
	low := budget.Prepaid(0).WithThresholds(budget.Threshold{Name: "low", Left: 500}, budget.Threshold{Name: "gone"})
	mustCredit(t, pool, l, "a", 1000)
	mustCharge(t, pool, l, "a", 100, low)
	call, err := prepareCharges(l, budget.Charge{Scope: "a", Amount: 1, Limits: []budget.Limit{budget.PerWindow(10, time.Hour), low}})
	require.NoError(t, err)
	lapse := func(units int64) {
		require.NoError(t, pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error {
			var crossings []byte
			err := tx.QueryRow(t.Context(), `
				with tip as (select jsonb_populate_record(y, jsonb_build_object('credited', y.credited - $2::bigint)) as e
					from metered.ledger y where y.scope = 'a' order by y.seq desc limit 1),
				reports as (select (e).*, w.crossings, w.crossed as after from tip, lateral metered._cross_lowered(e, 0, ($1::metered.new_charge[])[1].limits, metered.clock()) w),
				entry as (insert into metered.ledger (seq, amount, at, spent, refunded, credited, held, epoch, kind, scope, crossed, others)
					select seq + 1, $2, at, spent, refunded, credited, held, epoch, 'd', scope, after, coalesce(others, 0) + 1 from reports)
				select crossings from reports`, ledger.Charges(ledger.Telling(call.Charges, true)), units).Scan(&crossings)
			if err != nil {
				return err
			}
			return call.Cross(t.Context(), tx, crossings)
		}))
	}
	lapse(399)
	require.Empty(t, reported(t, pool, "a"))
	lapse(1)
	require.Equal(t, []string{"low"}, reported(t, pool, "a"))
	lapse(100)
	require.Empty(t, reported(t, pool, "a"), "it was reported")
	mustCharge(t, pool, l, "a", 1, low)
	require.Empty(t, reported(t, pool, "a"), "to charges, too")
	lapse(399)
	require.Equal(t, []string{"gone"}, reported(t, pool, "a"))
}

// A clock that jumps past a period's end, and is repaired, makes no level of a period come twice, and none be left out.
func TestThreshold_OfAPeriodIsReportedOnceThoughTheClockJumpsPastItsEnd(t *testing.T) {
	t.Parallel()
	pool, l, clock := openReporting(t, budget.Config{})
	noon := start.Add(12 * time.Hour)
	clock.Set(noon)
	day := func(name string) budget.Limit {
		return budget.Per(1000, budget.Day, time.UTC, time.Time{}).Named(name).WithThresholds(budget.Threshold{Name: name, Used: 50})
	}
	mustCharge(t, pool, l, "a", 60, day("both"))
	mustCharge(t, pool, l, "a", 1, day("before"))
	require.Equal(t, []string{"both", "before"}, reported(t, pool, "a"))

	clock.Set(noon.Add(48 * time.Hour))
	mustCharge(t, pool, l, "a", 60, day("both"))
	mustCharge(t, pool, l, "a", 1, day("after"))
	require.Equal(t, []string{"both", "after"}, reported(t, pool, "a"))
	clock.Set(noon.Add(time.Hour))
	require.NoError(t, pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error {
		_, err := l.RepairClock(t.Context(), tx, "a", budget.Note{})
		return err
	}))
	for _, name := range []string{"both", "before", "after", "both", "before", "after"} {
		mustCharge(t, pool, l, "a", 1, day(name))
	}
	require.Equal(t, []string{"after"}, reported(t, pool, "a"), "the charges of the day to come count today")

	clock.Set(noon.Add(48 * time.Hour))
	for _, name := range []string{"both", "before", "after", "both", "before", "after"} {
		mustCharge(t, pool, l, "a", 20, day(name))
	}
	require.Equal(t, []string{"after", "both", "before"}, reported(t, pool, "a"))
	requireVerified(t, pool, l)
}

// A scope remembers as many thresholds as are documented. A charge that needs one more is refused, and none is reported twice.
func TestThreshold_AScopeHasABoundedNumber(t *testing.T) {
	t.Parallel()
	pool, l, clock := openReporting(t, budget.Config{})
	clock.Set(start.Add(12 * time.Hour))
	for kind, limit := range map[string]budget.Limit{"lifetime": budget.Lifetime(10_000), "window": budget.PerWindow(10_000, time.Hour), "period": budget.Per(10_000, budget.Day, time.UTC, time.Time{})} {
		try := func(n int) error {
			name := fmt.Sprint("limit", n)
			_, err := charge(t.Context(), pool, l, kind, 1, limit.Named(name).WithThresholds(budget.Threshold{Name: name, Used: 1}))
			return err
		}
		for n := range bounds.MaxScopeThresholds {
			require.NoError(t, try(n))
		}
		require.Len(t, reported(t, pool, kind), bounds.MaxScopeThresholds)
		require.ErrorIs(t, try(64), fault.New("budget_thresholds", ""), kind)
		for n := range bounds.MaxScopeThresholds {
			require.NoError(t, try(n))
		}
		require.Empty(t, reported(t, pool, kind), kind)
		clock.Advance(72 * time.Hour)
		if err := try(64); kind == "lifetime" {
			require.ErrorIs(t, err, fault.New("budget_thresholds", ""))
		} else {
			require.NoError(t, err, kind)
			require.Len(t, reported(t, pool, kind), 1)
		}
	}
	requireVerified(t, pool, l)
}

// A call may carry more thresholds than a scope remembers otherwise. The next ones, that carry a part of them and report no other, are not refused.
func TestThreshold_AScopeThatRemembersManyIsRefusedOnlyForOneMore(t *testing.T) {
	t.Parallel()
	pool, l, clock := openReporting(t, budget.Config{})
	var limits []budget.Limit
	for n := range 9 {
		limit := budget.PerWindow(10_000, time.Hour).Named(fmt.Sprint("limit ", n))
		var levels []budget.Threshold
		for i := range bounds.MaxThresholds {
			levels = append(levels, budget.Threshold{Name: fmt.Sprint("level ", i), Used: int64(10 * (i + 1)), Rearm: int64(i + 1)})
		}
		limits = append(limits, limit.WithThresholds(levels...))
	}
	mustCharge(t, pool, l, "a", 90, limits...)
	require.Len(t, reported(t, pool, "a"), 72)
	require.NoError(t, refund(t.Context(), pool, l, "a", 1, 1))
	mustCharge(t, pool, l, "a", 1, limits[3])
	require.Empty(t, reported(t, pool, "a"), "it is counted anew, and stays reported")
	one := budget.Lifetime(1000).Named("one").WithThresholds(budget.Threshold{Name: "more", Used: 1})
	_, err := charge(t.Context(), pool, l, "a", 1, one)
	require.ErrorIs(t, err, fault.New("budget_thresholds", ""))

	clock.Advance(25 * time.Hour)
	mustCharge(t, pool, l, "a", 40)
	clock.Advance(-10 * time.Minute)
	require.NoError(t, pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error {
		_, err := l.RepairClock(t.Context(), tx, "a", budget.Note{})
		return err
	}))
	_, err = charge(t.Context(), pool, l, "a", 1, one)
	require.ErrorIs(t, err, fault.New("budget_thresholds", ""), "a repair makes no window older")
	mustCharge(t, pool, l, "a", 5, limits[4])
	require.Empty(t, reported(t, pool, "a"))
	_, err = charge(t.Context(), pool, l, "a", 5, limits[4])
	require.ErrorIs(t, err, fault.New("budget_thresholds", ""), "four levels were armed at 40, and lost their place")
	requireVerified(t, pool, l)
}

// A clock that jumps by days makes reports old, which a scope with many gives up. A repair brings them back.
func TestThreshold_AScopeThatRemembersManyForgetsNoneByAClockThatJumped(t *testing.T) {
	t.Parallel()
	pool, l, clock := openReporting(t, budget.Config{})
	noon := start.Add(12 * time.Hour)
	clock.Set(noon)
	try := func(from, to int) {
		for n := from; n < to; n++ {
			name := fmt.Sprint("limit ", n)
			mustCharge(t, pool, l, "a", 1, budget.Per(10_000, budget.Day, time.UTC, time.Time{}).Named(name).WithThresholds(budget.Threshold{Name: name, Used: 1}))
		}
	}
	try(0, 60)
	require.Len(t, reported(t, pool, "a"), 60)
	clock.Set(noon.Add(72 * time.Hour))
	try(60, 80)
	require.Len(t, reported(t, pool, "a"), 20)
	clock.Set(noon.Add(time.Hour))
	require.NoError(t, pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error {
		_, err := l.RepairClock(t.Context(), tx, "a", budget.Note{})
		return err
	}))
	try(0, 60)
	require.Empty(t, reported(t, pool, "a"))
	try(60, 64)
	require.Len(t, reported(t, pool, "a"), 4, "their charges of the day to come count today")
	requireVerified(t, pool, l)
}
