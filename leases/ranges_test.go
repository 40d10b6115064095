package leases_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/internal/pgtest"
)

// A caller that names a lease spends a range of it. Nobody spends that range again, nor more than the lease has.
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

	// A refused range takes back the spends of its own call, and nothing else of its transaction.
	k := f.open("rows", 100, time.Minute)
	tx := f.begin(pgx.ReadCommitted)
	require.NoError(t, k.spend(ctx, tx, 0, 5))
	require.ErrorIs(t, k.spend(ctx, tx, 0, 5), errRefused)
	require.ErrorIs(t, k.spend(ctx, tx, 0, 2), errRefused)
	var refused []byte
	require.NoError(t, tx.QueryRow(ctx, `select refused from metered.charge_leased(array[
		row('hot', $1::bigint, 7, 0, '{}', null, null, $2::bigint, 20), row('hot', $1, 5, 0, '{}', null, null, $2, 0)]::metered.new_charge[], '1 min', 5000, null, 'answer', true)`,
		k.fence, k.no).Scan(&refused))
	require.NotNil(t, refused)
	require.NoError(t, tx.Commit(ctx))
	_, spent, err := k.settle(ctx, f.db, owner, time.Second)
	require.NoError(t, err)
	require.Equal(t, int64(5), spent)
	_, spent, err = l.settle(ctx, f.db, owner, time.Second)
	require.NoError(t, err)
	require.Equal(t, int64(100), spent)
	require.Equal(t, int64(105), f.settled("hot"))
}

// By another key than that of the lease there is no fence: a range that is free is refused.
func TestRanges_AreSpentByTheLeasesOwnKeyOnly(t *testing.T) {
	t.Parallel()
	for _, level := range levels {
		f := setUp(t)
		l := f.open("rows", 100, time.Minute)
		other := f.open("rows", 100, time.Minute)
		for _, key := range []int64{l.fence + 1, other.fence} {
			tx := f.begin(level)
			require.ErrorIs(t, held{no: l.no, fence: key}.spend(t.Context(), tx, 0, 1), errRefused)
			require.NoError(t, tx.Commit(t.Context()))
		}
		_, spent, err := l.settle(t.Context(), f.db, owner, time.Second)
		require.NoError(t, err)
		require.Zero(t, spent)
	}
}

// Two sessions that both count from the same state, as clones of a machine do, or an intruder with the role of the
// application. When their ranges share a unit, one is spent, though neither session sees the other's spend.
func TestRanges_OfTwoSessionsAtATimeAreSpentOnce(t *testing.T) {
	t.Parallel()
	type race struct {
		first, second [2]int64
		commits       bool
	}
	races := map[string]race{
		"the same":           {[2]int64{0, 60}, [2]int64{0, 60}, true},
		"one begins in both": {[2]int64{0, 60}, [2]int64{10, 90}, true},
		"one ends in both":   {[2]int64{10, 90}, [2]int64{0, 11}, true},
		"one within":         {[2]int64{0, 100}, [2]int64{99, 1}, true},
		"one around":         {[2]int64{50, 1}, [2]int64{0, 100}, true},
		"one is undone":      {[2]int64{0, 60}, [2]int64{10, 90}, false},
		"they touch":         {[2]int64{0, 60}, [2]int64{60, 40}, true},
	}
	for _, level := range levels {
		t.Run(string(level), func(t *testing.T) {
			t.Parallel()
			f := setUp(t)
			ctx := t.Context()
			for name, c := range races {
				l := f.open("rows", 100, time.Minute)
				apart := name == "they touch"
				one, two := f.begin(level), f.begin(level)
				for _, tx := range []pgx.Tx{one, two} { // neither sees the other's
					_, err := tx.Exec(ctx, `select 1`)
					require.NoError(t, err)
				}
				require.NoError(t, l.spend(ctx, one, c.first[0], c.first[1]))
				second := pgtest.Going(func() error {
					if err := l.spend(context.Background(), two, c.second[0], c.second[1]); err != nil {
						return err
					}
					return two.Commit(context.Background())
				})
				if apart {
					require.NoError(t, <-second, "nobody waits")
				} else {
					pgtest.WaitQueued(t, f.db, 1)
				}
				want := c.second[1]
				if c.commits {
					require.NoError(t, one.Commit(ctx))
					want = c.first[1]
				} else {
					require.NoError(t, one.Rollback(ctx))
				}
				switch err := (error)(nil); {
				case apart:
					want = 100
				case !c.commits:
					require.NoError(t, <-second)
				case level == pgx.ReadCommitted:
					require.ErrorIs(t, <-second, errRefused)
				default:
					err = <-second
					require.Equal(t, "40001", state(err), "%v", err)
				}
				_ = two.Rollback(ctx)
				_, spent, err := l.settle(ctx, f.db, owner, time.Second)
				require.NoError(t, err)
				require.Equal(t, want, spent, name)
			}
			pgtest.RequireVerified(t, f.db, f.ledger)
		})
	}
}

// Verify says which it is: more was spent than the lease was granted, or something else was captured than was spent.
func TestVerify_NamesTheLeaseTheUnitsAndTheirBound(t *testing.T) {
	t.Parallel()
	f := setUp(t)
	ctx := t.Context()
	for range 2 {
		l := f.open("rows", 17, time.Minute)
		require.NoError(t, l.spend(ctx, f.db, 0, 17))
		_, _, err := l.settle(ctx, f.db, owner, time.Second)
		require.NoError(t, err)
	}
	open := f.open("rows", 17, time.Minute)
	require.NoError(t, open.spend(ctx, f.db, 0, 17))
	for _, c := range []struct {
		edit string
		want []string
	}{
		{`update metered.leases set granted = 10 where no = 2`, []string{"units spent from lease 2: 17, want at most the 10 that it was granted"}},
		{`update metered.leases set granted = 17, spent = 16 where no = 2`, []string{"captured for lease 2: 16, want 17"}},
		{`update metered.leases set spent = 18 where no = 2`, []string{"captured for lease 2: 18, want 17", "units spent from lease 2: 18, want at most the 17 that it was granted"}},
		{`update metered.leases set spent = 17 where no = 2`, nil},
		{`update metered.lease_spends set amount = 18 where lease = 3`, []string{"units spent from lease 3: 18, want at most the 17 that it was granted"}},
	} {
		_, err := f.db.Exec(ctx, c.edit)
		require.NoError(t, err)
		report, err := f.ledger.Verify(ctx, f.db, budget.VerifyOptions{})
		require.NoError(t, err)
		var got []string
		for _, d := range report.Differences {
			got = append(got, fmt.Sprintf("%s: %v, want %v", d.Field, d.Got, d.Want))
		}
		require.Equal(t, c.want, got, c.edit)
	}
}

// A refused call takes back its own spends and no others, in whatever order its charges come.
func TestRanges_OfOthersAreNeverTakenBack(t *testing.T) {
	t.Parallel()
	f := setUp(t)
	ctx := t.Context()
	l := f.open("rows", 100, time.Minute)
	require.NoError(t, l.spend(ctx, f.db, 0, 60))
	intruder := pgtest.AsRole(t, f.db, metered.GrantSQL, "")
	const one = `row('hot', %[2]d, %[3]d, 0, '{}', null, null, %[1]d, %[4]d)::metered.new_charge`
	victim, fresh := fmt.Sprintf(one, l.no, l.fence, 60, 0), fmt.Sprintf(one, l.no, l.fence, 5, 60)
	for what, charges := range map[string]string{
		"from 0":            `('[0:1]=' || array[%[2]s, %[1]s]::text)::metered.new_charge[]`,
		"from -1":           `('[-1:0]=' || array[%[2]s, %[1]s]::text)::metered.new_charge[]`,
		"from 2":            `('[2:3]=' || array[%[2]s, %[1]s]::text)::metered.new_charge[]`,
		"of two dimensions": `array[array[%[2]s], array[%[1]s]]`,
		"in order":          `array[%[2]s, %[1]s]`,
		"the other way":     `array[%[1]s, %[2]s]`,
		"twice":             `array[%[1]s, %[1]s]`,
		"after one that is": `array[%[2]s, %[2]s, %[1]s]`,
	} {
		var refused []byte
		err := intruder.QueryRow(ctx, `select refused from metered.charge_leased(`+fmt.Sprintf(charges, victim, fresh)+`, '1 min', 5000, null, 'answer', true)`,
			pgx.QueryExecModeSimpleProtocol).Scan(&refused)
		if what[:2] == "fr" || what[:2] == "of" {
			require.Equal(t, "22023", state(err), "%s: %v", what, err)
		} else {
			require.NoError(t, err, what)
			require.NotNil(t, refused, what)
		}
		require.Equal(t, []int64{60}, pgtest.Value[[]int64](t, f.db, `select array_agg(amount) from metered.lease_spends`), what)
	}
	require.Equal(t, int64(60), f.usage("hot").Used)
}

// The owner of a lease in memory says how many units it used: that number counts, up to the units granted. A stranger's
// number does not count.
func TestSettle_OfMemoryTakesTheOwnersWordUpToTheGrant(t *testing.T) {
	t.Parallel()
	pgtest.OnEachVersion(t)
	for name, c := range map[string]struct {
		who        string
		says, want int64
	}{
		"the owner": {owner, 3, 3}, "the owner, all": {owner, 100, 100}, "the owner, more than was granted": {owner, 101, 100},
		"another, nothing": {"stranger", 0, 100}, "another, some": {"stranger", 3, 100}, "another, too many": {"stranger", 1 << 60, 100},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := setUp(t)
			clock := pgtest.SetClock(t, f.db, pgtest.Tomorrow(9))
			l := f.open("memory", 100, 10*time.Second)
			clock.Advance(10 * time.Second)
			var status string
			var spent int64
			require.NoError(t, f.db.QueryRow(t.Context(), `select status, spent from metered.settle_lease($1, $2, $3, 1000, null, null)`, l.no, c.who, c.says).Scan(&status, &spent))
			require.Equal(t, "settled", status)
			require.Equal(t, c.want, spent)
			require.Equal(t, c.want, f.settled("hot"))
		})
	}
}

// A lease's capture is dated no earlier than its spends, so that they do not leave a window early: a clock that was set
// back in between makes no room.
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

// By the database's clock the lease is past its end: its owner cannot spend from it any more, and it is not freed either.
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

// A slice is at most the share of what is left, and none if that is less than the least. Held and leased units are not
// left.
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
