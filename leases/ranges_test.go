package leases_test

import (
	"context"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/internal/pgtest"
)

// Who believes to own a lease spends a range of it, and nobody spends it again, nor more than there is.
func TestRanges_AreSpentOnceAndWithinTheSlice(t *testing.T) {
	t.Parallel()
	f := setUp(t)
	ctx := t.Context()
	l := f.open("rows", 100, time.Minute)
	require.NoError(t, l.spend(ctx, f.db, 10, 10))
	for _, r := range [][2]int64{{10, 10}, {10, 1}, {15, 1}, {19, 1}, {5, 6}, {0, 100}, {9, 12}, {19, 2}, {0, 101}, {91, 10}, {100, 1}, {-1, 1}, {101, 1}, {1 << 62, 1 << 52}} {
		require.ErrorIs(t, l.spend(ctx, f.db, r[0], r[1]), errRefused, "%v", r)
	}
	require.Equal(t, "23514", state(l.spend(ctx, f.db, 50, 0)))
	require.NoError(t, l.spend(ctx, f.db, 0, 10))
	require.NoError(t, l.spend(ctx, f.db, 20, 80))
	other := held{no: l.no, fence: l.fence + 1}
	require.ErrorIs(t, other.spend(ctx, f.db, 0, 1), errRefused, "by another key there is no fence")

	// A refused range takes back what the call has spent, and nothing else of its transaction.
	k := f.open("rows", 100, time.Minute)
	tx := f.begin(pgx.ReadCommitted)
	require.NoError(t, k.spend(ctx, tx, 0, 5))
	require.ErrorIs(t, k.spend(ctx, tx, 0, 5), errRefused)
	require.ErrorIs(t, k.spend(ctx, tx, 0, 2), errRefused)
	var denied []byte
	require.NoError(t, tx.QueryRow(ctx, `select denied from metered.charge_leased(array[
		row('hot', $1::bigint, 7, 0, '{}', null, null, $2::bigint, 20), row('hot', $1, 5, 0, '{}', null, null, $2, 0)]::metered.new_charge[], '1 min', 5000, null, 'answer', true)`,
		k.fence, k.no).Scan(&denied))
	require.NotNil(t, denied)
	require.NoError(t, tx.Commit(ctx))
	_, spent, err := k.settle(ctx, f.db, owner, time.Second)
	require.NoError(t, err)
	require.Equal(t, int64(5), spent)
	_, spent, err = l.settle(ctx, f.db, owner, time.Second)
	require.NoError(t, err)
	require.Equal(t, int64(100), spent)
	require.Equal(t, int64(105), f.settled("hot"))
}

// Two processes that both count from the same state, as clones of a machine do, spend a range at the same time only if the
// ranges differ and neither sees the other's. No unit of that goes uncounted, and Verify tells.
func TestRanges_OfTwoOwnersAtATimeAreAllCounted(t *testing.T) {
	t.Parallel()
	f := setUp(t)
	ctx := t.Context()
	l := f.open("rows", 100, time.Minute)
	one, two := f.begin(pgx.ReadCommitted), f.begin(pgx.ReadCommitted)
	require.NoError(t, l.spend(ctx, one, 0, 60))
	same := pgtest.Going(func() error {
		return l.spend(context.Background(), f.db, 0, 60) // waits for the first
	})
	require.NoError(t, l.spend(ctx, two, 10, 90))
	pgtest.WaitQueued(t, f.db, 1)
	require.NoError(t, one.Commit(ctx))
	require.ErrorIs(t, <-same, errRefused)
	require.NoError(t, two.Commit(ctx))
	_, spent, err := l.settle(ctx, f.db, owner, time.Second)
	require.NoError(t, err)
	require.Equal(t, int64(150), spent)
	u := f.usage("hot")
	require.Equal(t, int64(150), u.Used)
	require.Zero(t, u.Held)
	report, err := f.ledger.Verify(ctx, f.db, budget.VerifyOptions{})
	require.NoError(t, err)
	require.NotEmpty(t, report.Differences)
}

// What a lease captures is dated no earlier than its spends, so that they do not leave a window early: a clock that was
// set back in between makes no room.
func TestSettle_IsDatedNoEarlierThanTheSpends(t *testing.T) {
	t.Parallel()
	f := setUp(t)
	ctx := t.Context()
	clock := pgtest.SetClock(t, f.db, pgtest.Tomorrow(9))
	l := f.open("rows", 100, 10*time.Second)
	clock.Advance(8 * time.Second)
	require.NoError(t, l.spend(ctx, f.db, 0, 100))
	spentAt := clock.Now()
	clock.Advance(-6 * time.Second)
	_, _, err := l.settle(ctx, f.db, owner, time.Second)
	require.NoError(t, err)
	clock.Set(spentAt.Add(time.Minute - time.Microsecond))
	window := budget.PerWindow(100, time.Minute)
	_, err = f.ledger.Check(ctx, f.db, charge(1, window))
	require.ErrorIs(t, err, budget.ErrExceeded)
	clock.Advance(time.Microsecond)
	_, err = f.ledger.Check(ctx, f.db, charge(100, window))
	require.NoError(t, err)
	require.Equal(t, int64(100), f.settled("hot"))
}

// A lease that is past its end by the database's clock is not spent from, whatever its owner believes; nor is it freed.
func TestSettle_AnEndedLeaseIsSettledByAnybodyAndNotFreed(t *testing.T) {
	t.Parallel()
	f := setUp(t)
	ctx := t.Context()
	clock := pgtest.SetClock(t, f.db, pgtest.Tomorrow(9))
	for _, mode := range []string{"rows", "memory"} {
		l := f.open(mode, 100, 10*time.Second)
		before := f.usage("hot")
		if mode == "rows" {
			require.NoError(t, l.spend(ctx, f.db, 0, 3))
			clock.Advance(10*time.Second - time.Microsecond)
			require.NoError(t, l.spend(ctx, f.db, 3, 3))
		} else {
			clock.Advance(10*time.Second - time.Microsecond)
			require.ErrorIs(t, l.spend(ctx, f.db, 0, 3), errRefused, "it has no rows")
		}
		status, _, err := l.settle(ctx, f.db, "stranger", time.Second)
		require.NoError(t, err)
		require.Equal(t, "early", status)
		clock.Advance(time.Microsecond)
		require.ErrorIs(t, l.spend(ctx, f.db, 6, 1), errRefused)
		clock.Advance(time.Hour)
		u := f.usage("hot")
		require.Equal(t, before.Available(1000), u.Available(1000), "not freed")
		status, spent, err := l.settle(ctx, f.db, "stranger", time.Second)
		require.NoError(t, err)
		require.Equal(t, "settled", status)
		require.Equal(t, map[string]int64{"rows": 6, "memory": 100}[mode], spent)
		status, spent, err = l.settle(ctx, f.db, owner, time.Second)
		require.NoError(t, err)
		require.Equal(t, "closed", status, "settled once")
		require.Equal(t, map[string]int64{"rows": 6, "memory": 100}[mode], spent)
	}
	require.Equal(t, int64(106), f.settled("hot"))
}

// A slice is at most the share of what is left, and none if that is less than the least; what holds and leases keep is
// not left.
func TestOpen_TakesNoMoreThanItsShare(t *testing.T) {
	t.Parallel()
	f := setUp(t)
	for _, want := range []int64{250, 187, 140, 0} { // of 1000, 750, 563 and 423
		least := 130
		granted := pgtest.Value[int64](t, f.db, `select granted from metered.open_lease(
			row('hot', null, 500, 0, '{"(1000,0,,,,)"}', null, null, null, null)::metered.new_charge, row('rows', 'me', $1, 4, '1 min', null)::metered.lease_terms, '1 min', 5000)`, least)
		require.Equal(t, want, granted)
	}
	require.Equal(t, int64(1000-250-187-140), f.usage("hot").Available(1000))
}
