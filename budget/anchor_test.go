package budget_test

import (
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/budget"
)

// anchor is the anchor in the last entry of scope "a".
type anchor struct {
	at    *time.Time
	spent *int64
}

func anchorOf(t *testing.T, pool *pgxpool.Pool) (a anchor) {
	t.Helper()
	row := pool.QueryRow(t.Context(), `select anchor_at, anchor_spent from metered.ledger where scope = 'a' order by seq desc limit 1`)
	require.NoError(t, row.Scan(&a.at, &a.spent))
	return a
}

func anchored(at time.Time, spent int64) func(*testing.T, anchor) {
	return func(t *testing.T, a anchor) {
		t.Helper()
		require.NotNil(t, a.at)
		require.True(t, at.Equal(*a.at), "anchored at %v, want %v", *a.at, at)
		require.Equal(t, spent, *a.spent)
	}
}

func noAnchor(t *testing.T, a anchor) {
	t.Helper()
	require.Equal(t, anchor{}, a)
}

func TestCharge_ABoundIsReplacedOnlyWhereItDoesNotFit(t *testing.T) {
	t.Parallel()
	pool, l, clock := open(t)
	tx := autocommit{Querier: pool}
	spend := func(amount int64, quiet bool) error {
		_, err := l.Charge(t.Context(), tx, budget.Charge{Scope: "a", Amount: amount, NoStandings: quiet,
			Limits: []budget.Limit{budget.PerWindow(10, time.Minute)}})
		return err
	}
	require.NoError(t, spend(4, true))
	require.NoError(t, spend(5, false))
	noAnchor(t, anchorOf(t, pool)) // nothing was spent before the window
	require.NoError(t, spend(1, true))
	noAnchor(t, anchorOf(t, pool)) // all that was ever spent fits
	clock.Advance(time.Minute + time.Second)
	require.NoError(t, spend(3, true)) // the last entry is outside: nothing to look up
	noAnchor(t, anchorOf(t, pool))
	require.NoError(t, spend(5, true))
	begin := start.Add(time.Second)
	anchored(begin, 10)(t, anchorOf(t, pool))
	clock.Advance(50 * time.Second)
	require.NoError(t, spend(2, true)) // full
	anchored(begin, 10)(t, anchorOf(t, pool))
	require.ErrorIs(t, spend(1, true), budget.ErrExceeded)
	require.ErrorIs(t, spend(1, false), budget.ErrExceeded)
	clock.Advance(10 * time.Second)
	require.NoError(t, spend(1, false)) // one that asks for standings looks it up, and anchors there
	anchored(start.Add(61*time.Second), 18)(t, anchorOf(t, pool))
	require.NoError(t, spend(7, true))
	anchored(start.Add(61*time.Second), 18)(t, anchorOf(t, pool))
	require.ErrorIs(t, spend(1, true), budget.ErrExceeded)
}

// A window that begins before the anchor has more in it than was spent since.
func TestCharge_AnAnchorServesNoWindowThatBeginsBeforeIt(t *testing.T) {
	t.Parallel()
	pool, l, clock := open(t)
	tx := autocommit{Querier: pool}
	spend := func(amount int64, limits ...budget.Limit) error {
		_, err := l.Charge(t.Context(), tx, budget.Charge{Scope: "a", Amount: amount, NoStandings: true, Limits: limits})
		return err
	}
	minute, hour := budget.PerWindow(10, time.Minute), budget.PerWindow(20, time.Hour)
	require.NoError(t, spend(9, minute, hour))
	clock.Advance(2 * time.Minute)
	require.NoError(t, spend(1, minute, hour))
	require.NoError(t, spend(8, minute, hour))
	anchored(start.Add(time.Minute), 9)(t, anchorOf(t, pool))
	clock.Advance(2 * time.Minute)
	var exceeded *budget.ExceededError
	require.ErrorAs(t, spend(3, minute, hour), &exceeded)
	require.Len(t, exceeded.Refusals, 1)
	require.Equal(t, []any{hour, int64(18)}, []any{exceeded.Refusals[0].Limit, exceeded.Refusals[0].Used})
	require.NoError(t, spend(2, minute, hour))
	require.ErrorIs(t, spend(1, hour), budget.ErrExceeded)
	require.ErrorIs(t, spend(1, hour, minute), budget.ErrExceeded)
}

// Every kind of entry copies the anchor that a later charge relies on, except a repair.
func TestCharge_AnAnchorEndsWithTheClockItIsOf(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	pool, l, clock := open(t)
	tx := autocommit{Querier: pool}
	spend := func(amount int64) error {
		_, err := l.Charge(ctx, tx, budget.Charge{Scope: "a", Amount: amount, NoStandings: true,
			Limits: []budget.Limit{budget.PerWindow(10, time.Minute)}})
		return err
	}
	require.NoError(t, spend(9))
	clock.Advance(2 * time.Minute)
	require.NoError(t, spend(1))
	require.NoError(t, spend(4))
	begin := start.Add(time.Minute)
	anchored(begin, 9)(t, anchorOf(t, pool))
	mustCredit(t, pool, l, "a", 1)
	anchored(begin, 9)(t, anchorOf(t, pool))
	require.NoError(t, refund(ctx, pool, l, "a", 3, 2))
	anchored(begin, 9)(t, anchorOf(t, pool))
	require.NoError(t, spend(7)) // 12 were spent since the anchor, of which 2 were given back
	require.ErrorIs(t, spend(1), budget.ErrExceeded)
	requireVerified(t, pool, l)
	execute(t, pool, `update metered.ledger set anchor_spent = 8 where seq = 5`)
	found, err := l.Verify(ctx, pool, budget.VerifyOptions{})
	require.NoError(t, err)
	require.Equal(t, []budget.Difference{{Scope: "a", Seq: 5, Field: "anchor", Got: "8", Want: "9"}}, found.Differences)
	execute(t, pool, `update metered.ledger set anchor_spent = 9 where seq = 5`)

	clock.Advance(-90 * time.Second)
	report, err := repairClock(ctx, pool, l, "a")
	require.NoError(t, err)
	require.True(t, report.Repaired)
	noAnchor(t, anchorOf(t, pool))
	require.ErrorIs(t, spend(1), budget.ErrExceeded)
	clock.Advance(time.Minute)
	require.NoError(t, spend(10))
	require.ErrorIs(t, spend(1), budget.ErrExceeded)
}

// A purge takes the entry that an anchor was read from. A charge that fits by the bound does not need that entry.
func TestCharge_AnAnchorOutlivesThePurge(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	pool, l, clock := open(t)
	tx := autocommit{Querier: pool}
	hour := budget.PerWindow(50, time.Hour)
	spend := func(quiet bool, amount int64) error {
		_, err := l.Charge(ctx, tx, budget.Charge{Scope: "a", Amount: amount, NoStandings: quiet, Limits: []budget.Limit{hour}})
		return err
	}
	for range 40 {
		require.NoError(t, spend(true, 1))
		clock.Advance(time.Second)
	}
	report, err := l.Purge(ctx, pool, budget.PurgeOptions{Scope: "a", OlderThan: time.Second})
	require.NoError(t, err)
	require.Equal(t, int64(31), report.Entries)
	require.ErrorIs(t, spend(false, 1), budget.ErrWindowPurged)
	require.NoError(t, spend(true, 10))
	require.ErrorIs(t, spend(true, 1), budget.ErrWindowPurged)
}

func TestCharge_NoStandingsLeavesThemOutOfTheReceiptAlone(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	pool, _, _ := open(t)
	quiet := newLedger(t, budget.Config{NoStandings: true})
	loud := newLedger(t, budget.Config{})
	tx := autocommit{Querier: pool}
	c := budget.Charge{Scope: "a", Amount: 3, Limits: []budget.Limit{budget.PerWindow(10, time.Minute), budget.Lifetime(9)}}
	other := budget.Charge{Scope: "b", Amount: 1, Limits: []budget.Limit{budget.Lifetime(5)}}

	r, err := quiet.Charge(ctx, tx, c)
	require.NoError(t, err)
	require.Equal(t, []any{int64(1), []budget.Standing(nil)}, []any{r.Entries[0].Seq, r.Entries[0].Standings})
	c.NoStandings = true
	r, err = loud.Charge(ctx, tx, c, other)
	require.NoError(t, err)
	require.Nil(t, r.Entries[0].Standings)
	require.Equal(t, []budget.Standing{{Limit: other.Limits[0], Used: 1, Available: 4}}, r.Entries[1].Standings)
	c.Amount = 1
	asked := c
	asked.NoStandings = false
	r, err = loud.Charge(ctx, tx, c, asked) // of one scope: one of them asks
	require.NoError(t, err)
	require.Equal(t, []budget.Standing{{Limit: c.Limits[0], Used: 8, Available: 2}}, r.Entries[0].Standings[:1])
}
