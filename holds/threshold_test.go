package holds_test

import (
	"context"
	"fmt"
	"math"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/bounds"
	"github.com/pgmetered/metered/internal/fault"
)

// setUpReporting is setUp, with a ledger that reports thresholds into a table.
func setUpReporting(t *testing.T) *fixture {
	t.Helper()
	f := setUp(t, holds.Config{})
	_, err := f.pool.Exec(t.Context(), `create table reports (n bigint generated always as identity, scope text, name text, seq bigint, used bigint, held bigint)`)
	require.NoError(t, err)
	f.reportInto(reportTo)
	return f
}

func (f *fixture) reportInto(tell func(ctx context.Context, tx pgx.Tx, c budget.Crossing) error) {
	f.Helper()
	var err error
	f.ledger, err = budget.New(budget.Config{LockTimeout: time.Minute, OnThreshold: tell})
	require.NoError(f, err)
	f.book, err = holds.New(f.ledger, holds.Config{})
	require.NoError(f, err)
}

func reportTo(ctx context.Context, tx pgx.Tx, c budget.Crossing) error {
	_, err := tx.Exec(ctx, `insert into reports (scope, name, seq, used, held) values ($1, $2, $3, $4, $5)`, c.Scope, c.Threshold.Name, c.Seq, c.Used, c.Held)
	return err
}

// crossed returns the committed reports, in order, each with the ledger's entry, and forgets them.
func (f *fixture) crossed() []string {
	f.Helper()
	rows, err := f.pool.Query(f.Context(), `with gone as (delete from reports returning *)
		select format('%s %s: %s used, %s held, by %s', g.scope, g.name, g.used, g.held, l.kind) || case when l.held <> g.held then ', wrongly' else '' end
		from gone g join metered.ledger l using (scope, seq) order by g.n`)
	require.NoError(f, err)
	all, err := pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(f, err)
	return all
}

// spent80 is a threshold on spending, at 80 percent.
var spent80 = []budget.Threshold{{Name: "80", Percent: 80, Spent: true}}

func spentLimits() map[string]budget.Limit {
	return map[string]budget.Limit{
		"lifetime": budget.Lifetime(100).WithThresholds(spent80...),
		"window":   budget.PerWindow(100, time.Hour).WithThresholds(spent80...),
		"month":    budget.Per(100, budget.Month, time.UTC, time.Time{}).WithThresholds(spent80...),
	}
}

func lineOf(scope string, amount int64, limits ...budget.Limit) []holds.Line {
	return []holds.Line{{Scope: scope, Amount: amount, Limits: limits}}
}

// A threshold on spending is reported by the capture that reaches it, and not by the hold.
func TestSpent_IsReportedByTheCapture(t *testing.T) {
	t.Parallel()
	f := setUpReporting(t)
	for scope, limit := range spentLimits() {
		both := limit.WithThresholds(append([]budget.Threshold{{Name: "held too", Percent: 80}}, spent80...)...)
		id := f.mustPlace(holds.Placement{Lines: lineOf(scope, 90, both)})
		require.Len(t, id.Crossed, 1)
		require.Equal(t, []string{scope + " held too: 0 used, 90 held, by h"}, f.crossed())
		_, err := f.charge(budget.Charge{Scope: scope, Amount: 5, Limits: []budget.Limit{both}})
		require.NoError(t, err)
		require.Empty(t, f.crossed(), "5 are spent")
		capture := func(id string, amount int64, keep bool) []budget.Crossing {
			all, err := f.capture(holds.Capture{IDs: []string{id}, Lines: lineOf(scope, amount, both), Keep: keep})
			require.NoError(t, err)
			return all[0].Crossed
		}
		require.Empty(t, capture(id.ID, 74, true))
		require.Empty(t, f.crossed(), "79 are")
		crossed := capture(id.ID, 2, false)
		require.Len(t, crossed, 1)
		require.Equal(t, spent80[0], crossed[0].Threshold)
		require.Equal(t, both, crossed[0].Limit)
		require.EqualValues(t, []int64{4, 81, 14, 5}, []int64{crossed[0].Seq, crossed[0].Used, crossed[0].Held, crossed[0].Available})
		require.Equal(t, []string{scope + " 80: 81 used, 14 held, by u"}, f.crossed())

		id = f.mustPlace(holds.Placement{Lines: lineOf(scope, 10, both)})
		require.Empty(t, capture(id.ID, 10, false))
		_, err = f.charge(budget.Charge{Scope: scope, Amount: 1, Limits: []budget.Limit{both}})
		require.NoError(t, err)
		require.Empty(t, f.crossed(), "once")
	}
	f.verify()
}

// A capture takes held units and units beyond them: it reaches a threshold once, with each policy.
func TestSpent_IsReportedOnceByCoveredAndExcess(t *testing.T) {
	t.Parallel()
	f := setUpReporting(t)
	limit := budget.Lifetime(100).WithThresholds(spent80...)
	for _, over := range []holds.Over{holds.OverIfFits, holds.OverUpTo, holds.OverEvenly, holds.OverAllowed} {
		for _, held := range []int64{10, 75, 79} {
			scope := fmt.Sprint(over, held)
			h := f.mustPlace(holds.Placement{Lines: lineOf(scope, held)})
			all, err := f.capture(holds.Capture{IDs: []string{h.ID}, Over: over, Lines: lineOf(scope, 85, limit)})
			require.NoError(t, err)
			require.Len(t, all[0].Crossed, 1)
			require.Equal(t, []string{scope + " 80: 85 used, 0 held, by u"}, f.crossed(), "the excess came first, and did not reach it")
		}
		scope := string(over)
		_, err := f.charge(budget.Charge{Scope: scope, Amount: 75})
		require.NoError(t, err)
		h := f.mustPlace(holds.Placement{Lines: lineOf(scope, 4)})
		all, err := f.capture(holds.Capture{IDs: []string{h.ID}, Over: over, Lines: lineOf(scope, 10, limit)})
		require.NoError(t, err)
		require.Len(t, all[0].Crossed, 1)
		require.Equal(t, []string{scope + " 80: 81 used, 4 held, by c"}, f.crossed(), "the excess reached it")
	}
	// As much as there is: it is judged with the requested amount, and reported with the captured one.
	_, err := f.charge(budget.Charge{Scope: "a", Amount: 20}, budget.Charge{Scope: "b", Amount: 20})
	require.NoError(t, err)
	h := f.mustPlace(holds.Placement{Lines: append(lineOf("a", 5), lineOf("b", 5)...)})
	few := budget.Lifetime(50).WithThresholds(budget.Threshold{Name: "80", Used: 80, Spent: true}, budget.Threshold{Name: "all", Spent: true})
	all, err := f.capture(holds.Capture{IDs: []string{h.ID}, Over: holds.OverUpTo, Lines: append(lineOf("a", 70, few), lineOf("b", 6, few)...)})
	require.NoError(t, err)
	require.EqualValues(t, []int64{30, 6}, []int64{all[0].Lines[0].Captured, all[0].Lines[1].Captured})
	require.Equal(t, []string{"a all: 50 used, 0 held, by u"}, f.crossed())
	f.verify()
}

func TestSpent_OfACaptureOfAll(t *testing.T) {
	t.Parallel()
	f := setUpReporting(t)
	limit := budget.Lifetime(100).WithThresholds(spent80...)
	for scope, lines := range map[string][]holds.Line{"named": lineOf("named", 0, limit), "unnamed": nil} {
		h := f.mustPlace(holds.Placement{Lines: append(lineOf(scope, 85), lineOf(scope+"/2", 3)...)})
		all, err := f.capture(holds.Capture{IDs: []string{h.ID}, All: true, Lines: lines})
		require.NoError(t, err)
		require.Equal(t, holds.Captured, all[0].State)
		require.EqualValues(t, []int64{85, 3}, []int64{all[0].Lines[0].Captured, all[0].Lines[1].Captured})
		if lines != nil {
			require.Equal(t, []string{scope + " 80: 85 used, 0 held, by u"}, f.crossed())
			continue
		}
		require.Empty(t, f.crossed(), "nobody said which limit")
		_, err = f.charge(budget.Charge{Scope: scope, Amount: 1, Limits: []budget.Limit{limit}})
		require.NoError(t, err)
		require.Equal(t, []string{scope + " 80: 86 used, 0 held, by c"}, f.crossed(), "the next charge tells")
	}
	c, err := do(f, func(ctx context.Context, tx pgx.Tx) (holds.Hold, error) {
		return f.book.Claim(ctx, tx, holds.Claim{Key: holds.Key{Type: "seat", Value: "12"}, Holder: "ann", TTL: time.Minute, Lines: lineOf("seats", 90)})
	})
	require.NoError(t, err)
	all, err := f.capture(holds.Capture{IDs: []string{c.ID}, All: true, Lines: lineOf("seats", 0, limit)})
	require.NoError(t, err)
	require.Equal(t, holds.Captured, all[0].State, "a claim's own unit is among all")
	require.Equal(t, []string{"seats 80: 90 used, 0 held, by u"}, f.crossed())

	var argument *budget.ArgumentError
	_, err = f.capture(holds.Capture{IDs: []string{"a"}, All: true, Lines: lineOf("seats", 1, limit)})
	require.ErrorAs(t, err, &argument)
	_, err = f.capture(holds.Capture{IDs: []string{"a", "b"}, All: true, Lines: lineOf("seats", 0, limit)})
	require.ErrorAs(t, err, &argument)
	h := f.mustPlace(holds.Placement{Lines: lineOf("a", 1)})
	_, err = f.capture(holds.Capture{IDs: []string{h.ID}, All: true, Lines: lineOf("seats", 0, limit)})
	require.ErrorAs(t, err, &argument, "which it does not keep")
	f.verify()
}

// Held units neither reach a threshold on spending, nor arm one. Refunded units do arm one.
func TestSpent_IsArmedByReturnedUnits(t *testing.T) {
	t.Parallel()
	f := setUpReporting(t)
	limit := budget.Lifetime(120).WithThresholds(budget.Threshold{Name: "80", Used: 80, Spent: true})
	held := f.mustPlace(holds.Placement{Lines: lineOf("a", 20, limit)})
	_, err := f.charge(budget.Charge{Scope: "a", Amount: 80, Limits: []budget.Limit{limit}})
	require.NoError(t, err)
	require.Equal(t, []string{"a 80: 80 used, 20 held, by c"}, f.crossed())
	refund := func(units int64) {
		_, err := do(f, func(ctx context.Context, tx pgx.Tx) (budget.Posted, error) {
			return f.ledger.Refund(ctx, tx, budget.Refund{Scope: "a", Seq: 2, Amount: units})
		})
		require.NoError(t, err)
	}
	refund(7)
	_, err = f.charge(budget.Charge{Scope: "a", Amount: 7, Limits: []budget.Limit{limit}})
	require.NoError(t, err)
	require.Empty(t, f.crossed(), "73 is not far enough")
	refund(8)
	_, err = f.capture(holds.Capture{IDs: []string{held.ID}, Lines: lineOf("a", 7, limit)})
	require.NoError(t, err)
	require.Empty(t, f.crossed())
	_, err = f.charge(budget.Charge{Scope: "a", Amount: 1, Limits: []budget.Limit{limit}})
	require.NoError(t, err)
	require.Equal(t, []string{"a 80: 80 used, 0 held, by c"}, f.crossed(), "72 were spent, whatever was held")

	// The refund arms it, and not the charge after that, which does not carry it.
	f.mustPlace(holds.Placement{Lines: lineOf("c", 20)})
	for _, c := range []budget.Charge{{Amount: 80, Limits: []budget.Limit{limit}}, {Amount: 8}, {Amount: 1, Limits: []budget.Limit{limit}}} {
		c.Scope = "c"
		_, err = f.charge(c)
		require.NoError(t, err)
		if c.Amount == 80 {
			require.Len(t, f.crossed(), 1)
			_, err = do(f, func(ctx context.Context, tx pgx.Tx) (budget.Posted, error) {
				return f.ledger.Refund(ctx, tx, budget.Refund{Scope: "c", Seq: 2, Amount: 8})
			})
			require.NoError(t, err)
		}
	}
	require.Equal(t, []string{"c 80: 81 used, 20 held, by c"}, f.crossed())

	// In a window, units age: the capture sees that before it adds its own.
	hour := budget.PerWindow(100, time.Hour).WithThresholds(spent80...)
	_, err = f.charge(budget.Charge{Scope: "b", Amount: 80, Limits: []budget.Limit{hour}})
	require.NoError(t, err)
	require.Len(t, f.crossed(), 1)
	f.clock.Advance(59 * time.Minute)
	h := f.mustPlace(holds.Placement{TTL: time.Hour, Lines: lineOf("b", 20, hour)})
	other := f.mustPlace(holds.Placement{TTL: time.Hour, Lines: lineOf("b", 80)})
	f.clock.Advance(time.Minute - time.Microsecond)
	_, err = f.capture(holds.Capture{IDs: []string{h.ID}, Keep: true, Lines: lineOf("b", 1, hour)})
	require.NoError(t, err)
	require.Empty(t, f.crossed())
	f.clock.Advance(time.Microsecond)
	_, err = f.capture(holds.Capture{IDs: []string{other.ID}, Lines: lineOf("b", 79, hour)})
	require.NoError(t, err)
	require.Equal(t, []string{"b 80: 80 used, 20 held, by u"}, f.crossed())
	f.verify()
}

// The sweeper spends the minimum of an expired hold, and knows no limits: the next call that carries the threshold
// reports it.
func TestSpent_AnExpiredMinimumIsReportedByTheNextCall(t *testing.T) {
	t.Parallel()
	for scope, limit := range spentLimits() {
		t.Run(scope, func(t *testing.T) {
			t.Parallel()
			f := setUpReporting(t)
			for _, swept := range []bool{true, false} {
				for _, by := range []string{"charge", "hold", "capture"} {
					scope := fmt.Sprint(scope, swept, by)
					other := f.mustPlace(holds.Placement{TTL: 30 * time.Minute, Lines: lineOf(scope, 15, limit)})
					f.mustPlace(holds.Placement{Lines: []holds.Line{{Scope: scope, Amount: 85, AtLeast: 80, Limits: []budget.Limit{limit}}}})
					f.clock.Advance(time.Minute)
					if swept {
						_, err := f.book.Sweep(t.Context(), f.pool, holds.SweepOptions{})
						require.NoError(t, err)
					}
					require.Empty(t, f.crossed())
					var err error
					want := []string{scope + " 80: 81 used, 15 held, by c"}
					switch by {
					case "charge":
						_, err = f.charge(budget.Charge{Scope: scope, Amount: 1, Limits: []budget.Limit{limit}})
					case "hold":
						f.mustPlace(holds.Placement{Lines: lineOf(scope, 1, limit)})
						want = []string{scope + " 80: 80 used, 16 held, by h"}
					case "capture":
						_, err = f.capture(holds.Capture{IDs: []string{other.ID}, Lines: lineOf(scope, 1, limit)})
						want = []string{scope + " 80: 81 used, 14 held, by u"}
					}
					require.NoError(t, err)
					require.Equal(t, want, f.crossed())
					_, err = f.charge(budget.Charge{Scope: scope, Amount: 1, Limits: []budget.Limit{limit}})
					require.NoError(t, err)
					require.Empty(t, f.crossed(), "once")
				}
			}
			f.verify()
		})
	}
}

// A refund does not arm a threshold that is still reached with the minimum of a hold that is due and not swept.
func TestThresholds_AreNotArmedWhereAMinimumIsDue(t *testing.T) {
	t.Parallel()
	f := setUpReporting(t)
	for _, spent := range []bool{false, true} {
		scope := fmt.Sprint(spent)
		limit := budget.Lifetime(100).WithThresholds(budget.Threshold{Name: "80", Percent: 80, Spent: spent})
		charge := func(amount int64) {
			_, err := f.charge(budget.Charge{Scope: scope, Amount: amount, Limits: []budget.Limit{limit}})
			require.NoError(t, err)
		}
		charge(5)
		f.mustPlace(holds.Placement{Lines: []holds.Line{{Scope: scope, Amount: 75, AtLeast: 75, Limits: []budget.Limit{limit}}}})
		f.clock.Advance(time.Minute)
		charge(1)
		require.Len(t, f.crossed(), 1)
		f.mustPlace(holds.Placement{Lines: []holds.Line{{Scope: scope, Amount: 10, AtLeast: 10, Limits: []budget.Limit{limit}}}})
		f.clock.Advance(time.Minute)
		_, err := do(f, func(ctx context.Context, tx pgx.Tx) (budget.Posted, error) {
			return f.ledger.Refund(ctx, tx, budget.Refund{Scope: scope, Seq: 3, Amount: 18}) // of 75
		})
		require.NoError(t, err)
		charge(8)
		require.Empty(t, f.crossed(), "73 were there")
	}
}

// A credit after an entry that is ahead of the clock arms nothing by the end of a hold that is not due by the clock.
func TestThresholds_AreNotArmedByAHoldThatIsDueByALaterEntryAlone(t *testing.T) {
	t.Parallel()
	f := setUpReporting(t)
	limit := budget.Prepaid(100).WithThresholds(budget.Threshold{Name: "50", Used: 50, Rearm: 20})
	long := f.mustPlace(holds.Placement{TTL: time.Hour, Lines: lineOf("a", 5, limit)})
	f.mustPlace(holds.Placement{TTL: time.Minute, Lines: lineOf("a", 60, limit)})
	require.Equal(t, []string{"a 50: 0 used, 65 held, by h"}, f.crossed())
	f.clock.Advance(70 * time.Second)
	_, err := f.capture(holds.Capture{IDs: []string{long.ID}, All: true})
	require.NoError(t, err)
	f.clock.Advance(-20 * time.Second)
	_, err = do(f, func(ctx context.Context, tx pgx.Tx) (budget.Posted, error) {
		return f.ledger.Credit(ctx, tx, budget.Credit{Scope: "a", Amount: 1})
	})
	require.NoError(t, err)
	_, err = f.charge(budget.Charge{Scope: "a", Amount: 1, Limits: []budget.Limit{limit}})
	require.NoError(t, err)
	require.Empty(t, f.crossed(), "64 were used, and 65 are now")
}

// A cost that was incurred is charged at any state of its limits, up to the bound of totals, and its thresholds are
// reported as far as the scope can remember them.
func TestThresholds_NeverRefuseACostThatWasIncurred(t *testing.T) {
	t.Parallel()
	f := setUpReporting(t)
	allowed := func(scope string, held, amount int64, limit budget.Limit) error {
		h := f.mustPlace(holds.Placement{Lines: lineOf(scope, held)})
		_, err := f.capture(holds.Capture{IDs: []string{h.ID}, Over: holds.OverAllowed, Lines: lineOf(scope, amount, limit)})
		return err
	}
	stand := func(scope string, spent int64) {
		_, err := f.charge(budget.Charge{Scope: scope, Amount: 1})
		require.NoError(t, err)
		_, err = f.pool.Exec(t.Context(), `update metered.ledger set amount = $2::bigint, spent = $2 where scope = $1`, scope, spent)
		require.NoError(t, err)
	}
	for name, spent := range map[string]bool{"held counts": false, "spent alone": true} {
		for kind, limit := range map[string]budget.Limit{"lifetime": budget.Lifetime(bounds.MaxLimit), "hour": budget.PerWindow(bounds.MaxLimit, time.Hour),
			"day": budget.Per(bounds.MaxLimit, budget.Day, time.UTC, time.Time{})} {
			scope := name + " " + kind
			stand(scope, bounds.MaxLimit-20)
			limit = limit.WithThresholds(budget.Threshold{Name: "all", Spent: spent})
			require.NoError(t, allowed(scope, 5, 15, limit), scope)
			require.Empty(t, f.crossed(), scope)
			require.NoError(t, allowed(scope, 5, 15, limit), scope)
			require.Len(t, f.crossed(), 1, scope)
			require.NoError(t, allowed(scope, 1, bounds.MaxAmount, limit), scope)
			require.Empty(t, f.crossed(), scope)
		}
	}
	limit := budget.Lifetime(bounds.MaxLimit).WithThresholds(budget.Threshold{Name: "all"})
	stand("end", math.MaxInt64-10)
	require.ErrorIs(t, allowed("end", 5, 11, limit), fault.New("budget_overflow", ""))
	require.NoError(t, allowed("end", 5, 10, limit), "with the other open holds there is no total to report")

	for n := range bounds.MaxScopeThresholds {
		name := fmt.Sprint("limit ", n)
		_, err := f.charge(budget.Charge{Scope: "names", Amount: 1, Limits: []budget.Limit{budget.Lifetime(10_000).Named(name).WithThresholds(budget.Threshold{Name: name, Used: 1})}})
		require.NoError(t, err)
	}
	require.Len(t, f.crossed(), bounds.MaxScopeThresholds)
	one := budget.Lifetime(10_000).Named("one more").WithThresholds(budget.Threshold{Name: "one more", Used: 1})
	require.NoError(t, allowed("names", 5, 10, one))
	require.NoError(t, allowed("names", 5, 3, one.WithThresholds(budget.Threshold{Name: "one more", Used: 1, Spent: true})), "a capture has no one to refuse, either")
	require.Empty(t, f.crossed())
	results, err := do(f, func(ctx context.Context, tx pgx.Tx) ([]budget.Result, error) {
		return f.ledger.ChargeEach(ctx, tx, budget.Charge{Scope: "names", Amount: 1, Limits: []budget.Limit{one}}, budget.Charge{Scope: "other", Amount: 1})
	})
	require.NoError(t, err)
	require.ErrorIs(t, results[0].Err, fault.New("budget_thresholds", ""))
	require.NoError(t, results[1].Err)

	for range 40 {
		_, err := f.charge(budget.Charge{Scope: "purged", Amount: 1})
		require.NoError(t, err)
	}
	f.clock.Advance(time.Hour)
	_, err = f.ledger.Purge(t.Context(), f.pool, budget.PurgeOptions{OlderThan: time.Minute, Scope: "purged"})
	require.NoError(t, err)
	unknown := budget.PerWindow(bounds.MaxLimit, 2*time.Hour).WithThresholds(budget.Threshold{Name: "all", Used: 1, Spent: true})
	require.NoError(t, allowed("purged", 5, 3, unknown), "the window reaches purged entries")
	require.Empty(t, f.crossed())
	f.verify()
}
