package budget_test

import (
	"fmt"
	"maps"
	"slices"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/internal/sqlstate"
)

// Without the lock, the short way's entry collides with one that it did not see. Then it writes nothing,
// and the full function decides by a new look, where there is one.
func TestChargePlain_CollisionIsDecidedByTheFullFunction(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	pool := pgtest.Open(t)
	withoutLocks(t, pool)
	l := newLedger(t, budget.Config{})
	for _, iso := range isolations {
		for _, quiet := range []bool{false, true} {
			scope := fmt.Sprintf("%s, %v", iso, quiet)
			one := budget.Charge{Scope: scope, Amount: 1, NoStandings: quiet,
				Limits: []budget.Limit{budget.PerWindow(2, time.Hour)}}
			chargeMany(t, pool, l, scope, 1)
			first, second := begin(t, pool, iso), begin(t, pool, iso)
			_, err := second.Exec(ctx, "select 1")
			require.NoError(t, err)
			_, err = l.Charge(ctx, first, one)
			require.NoError(t, err)
			late := pgtest.Going(func() error {
				_, err := l.Charge(ctx, second, one)
				return err
			})
			pgtest.WaitQueued(t, pool, 1)
			require.NoError(t, first.Commit(ctx))
			if err = <-late; iso == pgx.ReadCommitted {
				require.ErrorIs(t, err, budget.ErrExceeded, "it saw the first one's entry")
			} else {
				require.Equal(t, sqlstate.SerializationFailure, code(err))
			}
			require.NoError(t, second.Rollback(ctx))
			require.Equal(t, int64(2), usage(t, pool, l, scope, 0).Used)
		}
	}
	requireVerified(t, pool, l)
}

// With the scope's own lock, at READ COMMITTED, the short way leaves the row of the last entry alone: its lock would be
// written to the log. A call with another lock goes the full way, which locks that row.
func TestChargePlain_HasTheScopesLockAndNotThatOfTheLastEntry(t *testing.T) {
	t.Parallel()
	pool := pgtest.Open(t)
	for _, standing := range []bool{false, true} {
		scope := fmt.Sprint(standing)
		charged := func(keyOf string) string {
			return pgtest.Value[string](t, pool, `select metered.charge_plain($1, metered._scope_key($2), 1, 10, '1 hour', null, null, null, null, $3, '1 minute', 1000)::text`,
				scope, keyOf, standing)
		}
		rowsLocked := func() int {
			return pgtest.Value[int](t, pool, "select count(*) from metered.ledger where scope = $1 and xmax::text <> '0'", scope)
		}
		for range 3 {
			require.Regexp(t, `^(\[[23]|{"seqs" : \[1\])`, charged(scope), "the first one goes the full way")
		}
		require.Zero(t, rowsLocked())
		require.Regexp(t, `^{"seqs" : \[4\]`, charged("another"))
		require.Equal(t, 1, rowsLocked())
	}
}

// A limit by period goes the short way in the period that the server told of, and in no other one.
func TestChargePlain_GoesShortInThePeriodThatIsKnown(t *testing.T) {
	t.Parallel()
	pool := pgtest.Open(t)
	clock := pgtest.SetClock(t, pool, time.Date(2026, 3, 1, 0, 0, 0, 0, time.UTC))
	month := budget.Per(3, budget.Month, time.UTC, time.Time{})
	for _, quiet := range []bool{false, true} {
		l := newLedger(t, budget.Config{})
		charge := func(of, outcome string) {
			t.Helper()
			scope := fmt.Sprint(of, quiet)
			locked := func() int {
				return pgtest.Value[int](t, pool, "select count(*) from metered.ledger where scope = $1 and xmax::text <> '0'", scope)
			}
			before := locked()
			r, err := l.ChargeNow(t.Context(), pool, budget.Charge{Scope: scope, Amount: 1, NoStandings: quiet, Limits: []budget.Limit{month}})
			if outcome == "refused" {
				require.ErrorIs(t, err, budget.ErrExceeded)
				return
			}
			require.NoError(t, err)
			require.Equal(t, outcome == "full", locked() > before || r.Seq == 1, "the full way locks the last entry")
			if !quiet {
				at, s := clock.Now(), r.Standings[0]
				require.Equal(t, time.Date(at.Year(), at.Month(), 1, 0, 0, 0, 0, time.UTC), s.PeriodStart)
				require.Equal(t, s.PeriodStart.AddDate(0, 1, 0), s.PeriodEnd)
			}
		}
		at := func(month time.Month, day int) { clock.Set(time.Date(2026, month, day, 0, 0, 0, 0, time.UTC)) }
		at(3, 1)
		charge("a", "full")
		charge("a", "short")
		at(4, 1)
		clock.Advance(-time.Microsecond)
		charge("a", "short")
		clock.Advance(time.Microsecond)
		charge("a", "full") // the first moment of the next one
		charge("a", "short")
		charge("b", "full")
		charge("b", "short")
		charge("b", "short")
		charge("b", "refused")
		at(6, 1)
		charge("a", "full")
		charge("b", "short")
		require.Equal(t, int64(6), usage(t, pool, l, fmt.Sprint("a", quiet), 0).Used)
		require.Equal(t, int64(4), usage(t, pool, l, fmt.Sprint("b", quiet), 0).Used)
		requireVerified(t, pool, l)
	}
}

// A clock that is set back is before the period that is known: the entries of the one before count.
func TestChargePlain_IsFullBeforeThePeriodThatIsKnown(t *testing.T) {
	t.Parallel()
	pool := pgtest.Open(t)
	clock := pgtest.SetClock(t, pool, time.Date(2026, 3, 31, 0, 0, 0, 0, time.UTC))
	limit := []budget.Limit{budget.Per(2, budget.Month, time.UTC, time.Time{})}
	for _, quiet := range []bool{false, true} {
		l, behind := newLedger(t, budget.Config{}), fmt.Sprint("behind", quiet)
		one := func(scope string) error {
			_, err := l.ChargeNow(t.Context(), pool, budget.Charge{Scope: scope, Amount: 1, NoStandings: quiet, Limits: limit})
			return err
		}
		clock.Set(time.Date(2026, 3, 31, 0, 0, 0, 0, time.UTC))
		require.NoError(t, one(behind))
		require.NoError(t, one(behind))
		clock.Advance(48 * time.Hour)
		require.NoError(t, one(fmt.Sprint("ahead", quiet)))
		clock.Advance(-47 * time.Hour)
		require.ErrorIs(t, one(behind), budget.ErrExceeded)
	}
}

// A limit with thresholds goes the short way until one is reached, and the full one while it stays
// reported.
func TestChargePlain_GoesShortBelowTheNextThreshold(t *testing.T) {
	t.Parallel()
	pool, l, _ := openReporting(t, budget.Config{})
	for _, quiet := range []bool{false, true} {
		c := budget.Charge{Scope: fmt.Sprint(quiet), Amount: 1, NoStandings: quiet,
			Limits: []budget.Limit{budget.PerWindow(10, time.Hour).WithThresholds(eighty()...)}}
		for i := range 10 {
			_, err := l.ChargeNow(t.Context(), pool, c)
			require.NoError(t, err)
			locked := pgtest.Value[int](t, pool, "select count(*) from metered.ledger where scope = $1 and xmax::text <> '0'", c.Scope)
			require.Equal(t, max(0, i-6), locked, "the full way locks the last entry: from the 8th charge on")
		}
		require.Equal(t, []string{"80%", "used up"}, reported(t, pool, c.Scope))
	}
}

// The short way and the full way answer alike, entry by entry, whatever the scope has been through.
func TestChargePlain_AnswersAsTheFullFunctionDoes(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	type world struct {
		l     *budget.Ledger
		tx    func(func(pgx.Tx) error) error
		clock *pgtest.Clock
	}
	var worlds []world
	for _, full := range []bool{false, true} {
		pool, l, clock := openReporting(t, budget.Config{})
		if full {
			theFullWay(t, pool)
		}
		worlds = append(worlds, world{l, func(f func(pgx.Tx) error) error { return pgx.BeginFunc(ctx, pool, f) }, clock})
	}
	both := func(what string, do func(w world, tx pgx.Tx) (any, error)) {
		t.Helper()
		var answers, errs [2]any
		for i, w := range worlds {
			err := w.tx(func(tx pgx.Tx) (err error) {
				answers[i], err = do(w, tx)
				return err
			})
			errs[i] = fmt.Sprint(err)
		}
		require.Equal(t, errs[1], errs[0], what)
		require.Equal(t, answers[1], answers[0], what)
	}
	berlin, origin := location(t, "Europe/Berlin"), time.Date(2020, 1, 1, 0, 0, 0, 0, time.UTC)
	day := budget.Per(pgtest.Sizes[int64](150, 1200, 1200), budget.Day, berlin, time.Time{})
	limits := [][]budget.Limit{nil, {budget.PerWindow(40, time.Hour)}, {budget.PerWindow(9, time.Minute)}, {budget.Lifetime(90)}, {budget.Prepaid(50)},
		{day}, {budget.PerPeriod(60, 10*time.Minute, origin)},
		{budget.PerWindow(1000, time.Hour), budget.PerPeriod(100, 10*time.Minute, origin)}, // the full way, in one chain
		// Each of these has a chain of its own: the full way is taken while a threshold stays reported.
		{budget.PerWindow(40, time.Hour).WithThresholds(eighty()...)}, {budget.PerWindow(9, time.Minute).WithThresholds(budget.Threshold{Name: "low", Left: 3, Rearm: 2})},
		{budget.Lifetime(40).WithThresholds(budget.Threshold{Name: "spent", Used: 30, Spent: true})},
		{budget.PerPeriod(40, 10*time.Minute, origin).WithThresholds(eighty()...)}}
	seqs := map[string]int64{}
	const chained = 8 // have one chain
	admitted, refused, crossed := make([]int, len(limits)), make([]int, len(limits)), make([]int, len(limits))
	for step := range pgtest.Sizes(40, 120, 120) {
		for i, set := range limits {
			for _, quiet := range []bool{false, true} {
				scope := "a"
				if i >= chained {
					scope = fmt.Sprint(i)
				}
				c := budget.Charge{Scope: scope, Amount: int64(1 + step%3), Limits: set, NoStandings: quiet}
				if step%4 == i {
					c.Note = budget.Note{Actor: "ann"}
				}
				both(fmt.Sprintf("step %d, limits %d, quiet %v", step, i, quiet), func(w world, tx pgx.Tx) (any, error) {
					r, err := w.l.Charge(ctx, tx, c)
					if err == nil {
						seqs[scope] = r.Entries[0].Seq
						admitted[i]++
						crossed[i] += len(r.Crossed)
					} else {
						refused[i]++
					}
					return r, err
				})
			}
		}
		for _, scope := range slices.Sorted(maps.Keys(seqs)) {
			switch step % 8 {
			case 3:
				both("refund", func(w world, tx pgx.Tx) (any, error) {
					return w.l.Refund(ctx, tx, budget.Refund{Scope: scope, Seq: seqs[scope], Amount: 1})
				})
			case 5:
				both("credit", func(w world, tx pgx.Tx) (any, error) {
					return w.l.Credit(ctx, tx, budget.Credit{Scope: scope, Amount: 20})
				})
			}
		}
		for _, w := range worlds {
			w.clock.Advance(time.Duration(step%7) * 13 * time.Second)
		}
	}
	require.Greater(t, seqs["a"], int64(pgtest.Sizes(70, 200, 200)))
	for i, set := range limits {
		require.Positive(t, admitted[i], set)
		require.Equal(t, i >= chained, crossed[i] > 0, set)
		require.True(t, set == nil || refused[i] > 0, set)
	}
}
