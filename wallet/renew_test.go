package wallet_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/wallet"
)

var daily = budget.Per(1, budget.Day, time.UTC, time.Time{}).Period

func (f *fixture) tryGrant(g wallet.Grant) (wallet.Granted, error) {
	return do(f, func(ctx context.Context, tx pgx.Tx) (wallet.Granted, error) { return f.book.Grant(ctx, tx, g) })
}

// A reader counts all that came since the last write as the next call writes it: three years of days.
func TestRenews_YearsThatNobodyTouchedAreWrittenByOneCall(t *testing.T) {
	t.Parallel()
	f := setUp(t, wallet.Config{})
	_, err := f.tryGrant(wallet.Grant{Wallet: "w", Amount: 10, Reference: "plan", Ends: wallet.EachPeriod(daily), Roll: &wallet.Roll{Cap: 25, Lasts: wallet.ToEndOf(daily), Times: -1, Shared: true}})
	require.NoError(t, err)
	days := pgtest.Size(40, 1100)
	f.clock.Advance(time.Duration(days) * day)
	before, err := f.book.Balance(t.Context(), f.pool, "w")
	require.NoError(t, err)
	require.EqualValues(t, 35, before.Units)
	drawn, err := do(f, func(ctx context.Context, tx pgx.Tx) (wasDrawn, error) {
		return f.drawIn(ctx, tx, toDraw{Wallet: "w", Amount: 1})
	})
	require.NoError(t, err)
	require.EqualValues(t, 34, drawn.Left)
	require.EqualValues(t, 10*(days+1), pgtest.Value[int64](t, f.pool, "select sum(amount)::bigint from metered.lots where scope = 'w' and origin = 'g' and pending = 0"))
}

// A hold is overdrawn, until a lot pays for it that has begun and that nobody has written. A reader knows all of it when the hold falls due.
func TestRenews_AReaderKnowsALotThatPaidForAHold(t *testing.T) {
	t.Parallel()
	f := setUp(t, wallet.Config{Overdraft: 20})
	_, err := f.tryGrant(wallet.Grant{Wallet: "ann", Amount: 5, Reference: "plan", Ends: wallet.EachPeriod(daily), Roll: &wallet.Roll{Cap: 2, Lasts: wallet.ToEndOf(daily), Times: -1}})
	require.NoError(t, err)
	f.draw(5)
	f.place("h", 14, 62*time.Hour)
	for _, at := range []time.Duration{40 * time.Hour, 62 * time.Hour, 90 * time.Hour} { // in the second, the third and the fourth day
		f.clock.Set(noon.Add(at))
		before := f.balance()
		tx, err := f.pool.Begin(t.Context())
		require.NoError(t, err)
		d, err := f.drawIn(t.Context(), tx, toDraw{Wallet: "ann", Amount: 1})
		require.NoError(t, err)
		require.Equal(t, before.Units-1, d.Left)
		require.NoError(t, tx.Rollback(t.Context()))
	}
	before := f.balance()
	f.sweeps()
	after := f.balance()
	require.Equal(t, []int64{before.Units, before.Held}, []int64{after.Units, after.Held})
	require.Len(t, after.Lots, len(before.Lots))
}

// A part of a period is exact: at its first moment, in its last second, at the ends of months of different lengths, and
// where it is less than a unit. The next period has all.
func TestProrate_TheFirstLotIsThePartOfItsPeriod(t *testing.T) {
	t.Parallel()
	f := setUp(t, wallet.Config{})
	berlin, err := time.LoadLocation("Europe/Berlin")
	require.NoError(t, err)
	month := budget.Per(1, budget.Month, berlin, time.Time{}).Period
	anchored := budget.Per(1, budget.Month, berlin, time.Date(2026, 1, 31, 9, 0, 0, 0, berlin)).Period
	for n, c := range []struct {
		period budget.Period
		amount int64
		bought time.Time
	}{
		{month, 300, time.Date(2026, 11, 1, 0, 0, 0, 0, berlin)},
		{month, 300, time.Date(2026, 11, 16, 0, 0, 0, 0, berlin)},
		{month, 10, time.Date(2026, 11, 28, 12, 0, 0, 0, berlin)},
		{month, 300, time.Date(2026, 11, 30, 23, 59, 59, 0, berlin)},
		{month, 300, time.Date(2026, 12, 1, 0, 0, 0, 0, berlin).Add(-time.Microsecond)},
		{month, 1 << 53, time.Date(2027, 2, 28, 23, 59, 59, 999999000, berlin)},
		{month, 1 << 53, time.Date(2028, 2, 29, 0, 0, 0, 1000, berlin)},
		{month, 743, time.Date(2027, 3, 31, 22, 59, 59, 0, berlin)}, // a month of 743 hours
		{anchored, 1000, time.Date(2027, 2, 28, 8, 59, 59, 0, berlin)},
		{anchored, 1000, time.Date(2027, 2, 28, 9, 0, 0, 0, berlin)},
	} {
		f.clock.Set(c.bought)
		name := fmt.Sprint("now ", n)
		start, end, err := c.period.At(c.bought)
		require.NoError(t, err)
		want, err := c.period.Prorate(c.amount, c.bought)
		require.NoError(t, err)
		plan := wallet.Grant{Wallet: name, Amount: c.amount, Reference: "plan", Ends: wallet.EachPeriodProrated(c.period)}
		granted, err := f.tryGrant(plan)
		require.NoError(t, err)
		require.Equal(t, []any{want, end.UTC()}, []any{granted.Amount, granted.Expires}, name)
		f.clock.Advance(time.Second)
		again, err := f.tryGrant(plan)
		require.NoError(t, err)
		require.True(t, again.Replayed)
		require.Equal(t, []any{granted.Lot, want}, []any{again.Lot, again.Amount})
		// The same bought ahead, at its first moment and later, and told a second after the end of the period.
		for _, told := range []time.Time{start.Add(-time.Hour), c.bought, end.Add(time.Second)} {
			f.clock.Set(told)
			plan.Wallet, plan.Starts = fmt.Sprint(name, " told ", told), c.bought
			granted, err = f.tryGrant(plan)
			require.NoError(t, err)
			require.Equal(t, []any{want, end.UTC()}, []any{granted.Amount, granted.Expires}, plan.Wallet)
			f.clock.Set(end.Add(-time.Microsecond))
			if told.Before(end) {
				f.hasIn(plan.Wallet, want)
			}
		}
		f.clock.Set(end.Add(time.Second))
		f.hasIn(name, c.amount)
		for _, told := range []time.Time{start.Add(-time.Hour), c.bought, end.Add(time.Second)} {
			f.hasIn(fmt.Sprint(name, " told ", told), c.amount)
		}
	}
}

// hasIn asserts how many units a wallet has, in a read and in a draw.
func (f *fixture) hasIn(name string, units int64) {
	f.Helper()
	b, err := f.book.Balance(f.Context(), f.pool, name)
	require.NoError(f, err)
	require.EqualValues(f, units, b.Units, name)
	tx, err := f.pool.Begin(f.Context())
	require.NoError(f, err)
	defer func() { require.NoError(f, tx.Rollback(f.Context())) }()
	if units > 0 {
		_, err = f.drawIn(f.Context(), tx, toDraw{Wallet: name, Amount: units})
		require.NoError(f, err, name)
	}
	_, err = f.drawIn(f.Context(), tx, toDraw{Wallet: name, Amount: 1})
	require.ErrorIs(f, err, budget.ErrExceeded, name)
}

// A message that comes late brings what it would have brought in time: the lots of all periods since, and what rolls over of them.
func TestRenews_AStartThatIsOverCounts(t *testing.T) {
	t.Parallel()
	f := setUp(t, wallet.Config{Overdraft: 20})
	plan := wallet.Grant{Wallet: "in time", Amount: 24, Reference: "plan", Ends: wallet.EachPeriodProrated(daily), Roll: &wallet.Roll{Cap: 7, Lasts: wallet.ToEndOf(daily), Times: -1, Shared: true}}
	granted, err := f.tryGrant(plan) // at noon
	require.NoError(t, err)
	require.EqualValues(t, 12, granted.Amount)
	f.clock.Set(noon.Add(3 * day))
	plan.Wallet, plan.Starts = "late", noon
	late, err := f.tryGrant(plan)
	require.NoError(t, err)
	require.Equal(t, []any{granted.Amount, granted.Expires}, []any{late.Amount, late.Expires})
	again, err := f.tryGrant(plan)
	require.NoError(t, err)
	require.True(t, again.Replayed)
	lots := map[string][]wallet.Lot{}
	for _, name := range []string{"in time", "late"} {
		_, err := do(f, func(ctx context.Context, tx pgx.Tx) (any, error) { return f.book.Expire(ctx, tx, name) })
		require.NoError(t, err)
		b, err := f.book.Balance(t.Context(), f.pool, name)
		require.NoError(t, err)
		require.EqualValues(t, 24+7, b.Units)
		for _, l := range b.Lots {
			l.Lot = 0
			lots[name] = append(lots[name], l)
		}
	}
	require.Equal(t, lots["in time"], lots["late"])
	// A lot that lasts for a time lasts from its start, too.
	for wait, ok := range map[time.Duration]bool{3*day + time.Second: true, 3 * day: false} {
		g := wallet.Grant{Wallet: fmt.Sprint("for ", wait), Amount: 5, Ends: wallet.After(wait), Starts: noon}
		granted, err := f.tryGrant(g)
		if !ok {
			require.ErrorIs(t, err, wallet.ErrExpired)
			continue
		}
		require.NoError(t, err)
		require.Equal(t, noon.Add(wait), granted.Expires)
	}
	// It pays what was overdrawn since, by the lots that were there then. The lots of too many periods are none.
	_, err = f.tryDraw(toDraw{Wallet: "owes", Amount: 20})
	require.NoError(t, err)
	plan = wallet.Grant{Wallet: "owes", Amount: 24, Reference: "plan", Ends: wallet.EachPeriod(daily), Starts: noon}
	_, err = f.tryGrant(plan)
	require.NoError(t, err)
	f.hasInWith("owes", 24-20)
	plan.Wallet, plan.Starts = "old", noon.Add(-22*day)
	_, err = f.tryGrant(plan)
	require.ErrorIs(t, err, wallet.ErrExpired)
	plan.Starts = noon.Add(-21 * day)
	_, err = f.tryGrant(plan)
	require.NoError(t, err)
}

// hasInWith is the balance alone, of a wallet with an overdraft.
func (f *fixture) hasInWith(name string, units int64) {
	f.Helper()
	b, err := f.book.Balance(f.Context(), f.pool, name)
	require.NoError(f, err)
	require.EqualValues(f, units, b.Units, name)
}

// A first lot can have no units. Its plan renews, is found by its reference, and can be ended.
func TestRenews_AFirstLotOfNoUnits(t *testing.T) {
	t.Parallel()
	f := setUp(t, wallet.Config{})
	midnight := noon.Truncate(day).Add(day)
	for _, uses := range [][]string{nil, {"images"}} {
		for _, starts := range []time.Time{{}, noon.Add(-day), noon.Add(day)} {
			f.clock.Set(noon)
			plan := wallet.Grant{Wallet: fmt.Sprint(uses, starts), Amount: 10, Ends: wallet.EachPeriodWithFirst(daily, 0), Reference: "plan", Starts: starts, Uses: uses}
			granted, err := f.tryGrant(plan)
			require.NoError(t, err)
			require.Zero(t, granted.Amount)
			begins := midnight
			if !starts.IsZero() {
				begins = starts.Truncate(day).Add(day)
			}
			require.Equal(t, begins, granted.Expires)
			again, err := f.tryGrant(plan)
			require.NoError(t, err)
			require.True(t, again.Replayed)
			require.Equal(t, granted.Lot, again.Lot)
			f.clock.Set(begins.Add(-time.Microsecond))
			if !begins.Before(noon) {
				f.hasInFor(plan.Wallet, 0)
			}
			f.clock.Set(mLater(begins, noon))
			f.hasInFor(plan.Wallet, 10)
			revoked, err := do(f, func(ctx context.Context, tx pgx.Tx) (wallet.Revoked, error) {
				return f.book.Revoke(ctx, tx, wallet.Revoke{Wallet: plan.Wallet, Reference: "plan", Renewals: true})
			})
			require.NoError(t, err)
			require.EqualValues(t, 10, revoked.Amount)
			f.clock.Advance(day)
			f.hasInFor(plan.Wallet, 0)
			plan.Ends = wallet.EachPeriodWithFirst(daily, 1)
			_, err = f.tryGrant(plan)
			require.ErrorIs(t, err, wallet.ErrConflict)
		}
	}
}

func (f *fixture) hasInFor(name string, units int64) {
	f.Helper()
	b, err := f.book.Balance(f.Context(), f.pool, name)
	require.NoError(f, err)
	require.EqualValues(f, units, b.For("images"), name)
}

func TestRenews_ConcurrentCallsBeginEachLotOnce(t *testing.T) {
	t.Parallel()
	f := setUp(t, wallet.Config{})
	for _, level := range []pgx.TxIsoLevel{pgx.ReadCommitted, pgx.RepeatableRead, pgx.Serializable} {
		name := string(level)
		_, err := f.tryGrant(wallet.Grant{Wallet: name, Amount: 10, Reference: "plan", Ends: wallet.EachPeriod(daily)})
		require.NoError(t, err)
		for range 3 {
			f.clock.Advance(day)
			drawn := make(chan int, 6)
			require.NoError(t, pgtest.InParallel(6, func(int) error {
				n := 0
				for {
					err := pgx.BeginTxFunc(t.Context(), f.pool, pgx.TxOptions{IsoLevel: level}, func(tx pgx.Tx) error {
						_, err := f.drawIn(t.Context(), tx, toDraw{Wallet: name, Amount: 1})
						return err
					})
					switch {
					case errors.Is(err, budget.ErrExceeded):
						drawn <- n
						return nil
					case err == nil:
						n++
					case !metered.Retryable(err):
						return err
					}
				}
			}))
			close(drawn)
			sum := 0
			for n := range drawn {
				sum += n
			}
			require.Equal(t, 10, sum, name)
		}
	}
}

func TestGrant_RefusesPlansThatAreNone(t *testing.T) {
	t.Parallel()
	f := setUp(t, wallet.Config{})
	short := budget.PerPeriod(1, time.Hour, noon).Period
	for _, c := range []struct {
		field string
		g     wallet.Grant
	}{
		{"Grant.Ends", wallet.Grant{Ends: wallet.At(time.Time{})}},
		{"Grant.Ends", wallet.Grant{Ends: wallet.At(time.Date(9000, 1, 1, 0, 0, 0, 0, time.UTC))}},
		{"Grant.Ends", wallet.Grant{Ends: wallet.After(0)}},
		{"Grant.Ends", wallet.Grant{Ends: wallet.After(-time.Hour)}},
		{"Grant.Ends", wallet.Grant{Ends: wallet.EachPeriod(budget.Period{}), Reference: "r"}},
		{"Grant.Ends", wallet.Grant{Ends: wallet.EachPeriod(short), Reference: "r"}},
		{"Grant.Ends", wallet.Grant{Ends: wallet.EachPeriodProrated(short), Reference: "r"}},
		{"Grant.Ends", wallet.Grant{Ends: wallet.EachPeriodWithFirst(daily, -1), Reference: "r"}},
		{"Grant.Ends", wallet.Grant{Ends: wallet.EachPeriodWithFirst(daily, 1<<53+1), Reference: "r"}},
		{"Grant.Ends.Zone", wallet.Grant{Ends: wallet.EachPeriod(budget.Period{Unit: budget.Day, Zone: "+1"}), Reference: "r"}},
		{"Grant.Reference", wallet.Grant{Ends: wallet.EachPeriod(daily)}},
		{"Grant.Roll", wallet.Grant{Roll: &wallet.Roll{Cap: 1, Lasts: wallet.For(day)}}},
		{"Grant.Roll.Cap", wallet.Grant{Ends: wallet.After(day), Roll: &wallet.Roll{Lasts: wallet.ToEndOf(daily)}}},
		{"Grant.Roll.Cap", wallet.Grant{Ends: wallet.After(day), Roll: &wallet.Roll{Cap: 1<<53 + 1}}},
		{"Grant.Roll.Lasts", wallet.Grant{Ends: wallet.After(day), Roll: &wallet.Roll{Cap: 1, Lasts: wallet.For(0)}}},
		{"Grant.Roll.Lasts", wallet.Grant{Ends: wallet.After(day), Roll: &wallet.Roll{Cap: 1, Lasts: wallet.ToEndOf(budget.Period{})}}},
		{"Grant.Roll.Lasts.Zone", wallet.Grant{Ends: wallet.After(day), Roll: &wallet.Roll{Cap: 1, Lasts: wallet.ToEndOf(budget.Period{Unit: budget.Day})}}},
		{"Grant.Roll.Times", wallet.Grant{Ends: wallet.After(day), Roll: &wallet.Roll{Cap: 1, Lasts: wallet.For(day), Times: -2}}},
		{"Grant.Roll.Times", wallet.Grant{Ends: wallet.After(day), Roll: &wallet.Roll{Cap: 1, Times: 2}}},
		{"Grant.Roll.Times", wallet.Grant{Ends: wallet.After(day), Roll: &wallet.Roll{Cap: 1, Lasts: wallet.For(time.Hour), Times: 2}}},
		{"Grant.Roll.Times", wallet.Grant{Ends: wallet.After(day), Roll: &wallet.Roll{Cap: 1, Lasts: wallet.ToEndOf(short), Times: 2}}},
		{"Grant.Starts", wallet.Grant{Starts: noon.Add(day), Ends: wallet.At(noon.Add(day))}},
		{"Grant.Starts", wallet.Grant{Starts: time.Date(9000, 1, 1, 0, 0, 0, 0, time.UTC)}},
	} {
		c.g.Wallet, c.g.Amount = "w", 10
		_, err := f.tryGrant(c.g)
		var argument *budget.ArgumentError
		require.ErrorAs(t, err, &argument, "%+v", c.g)
		require.Equal(t, c.field, argument.Field, fmt.Sprint(err))
	}
	_, err := do(f, func(ctx context.Context, tx pgx.Tx) (wallet.Revoked, error) {
		return f.book.Revoke(ctx, tx, wallet.Revoke{Wallet: "w", Reference: "r", Renewals: true, Amount: 1})
	})
	require.ErrorContains(t, err, "Revoke.Renewals")
}
