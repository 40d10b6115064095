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
	_, err := f.tryGrant(wallet.Grant{Wallet: "w", Amount: 10, Reference: "plan", Renews: daily, RollCap: 25, RollShared: true, RollTo: daily, RollTimes: -1})
	require.NoError(t, err)
	days := pgtest.Size(40, 1100)
	f.clock.Advance(time.Duration(days) * day)
	before, err := f.book.Balance(t.Context(), f.pool, "w")
	require.NoError(t, err)
	require.EqualValues(t, 35, before.Units)
	drawn, err := do(f, func(ctx context.Context, tx pgx.Tx) (wallet.Drawn, error) {
		return f.book.Draw(ctx, tx, wallet.Draw{Wallet: "w", Amount: 1})
	})
	require.NoError(t, err)
	require.EqualValues(t, 34, drawn.Left)
	require.EqualValues(t, days+1, pgtest.Value[int64](t, f.pool, "select count(*) from metered.lots where scope = 'w' and origin = 'g' and pending = 0"))
}

// A hold is overdrawn, until a lot pays for it that has begun and that nobody has written. A reader knows all of it when the hold falls due.
func TestRenews_AReaderKnowsALotThatPaidForAHold(t *testing.T) {
	t.Parallel()
	f := setUp(t, wallet.Config{Overdraft: 20})
	_, err := f.tryGrant(wallet.Grant{Wallet: "ann", Amount: 5, Reference: "plan", Renews: daily, RollCap: 2, RollTo: daily, RollTimes: -1})
	require.NoError(t, err)
	f.draw(5)
	f.place("h", 14, 62*time.Hour)
	for _, at := range []time.Duration{40 * time.Hour, 62 * time.Hour, 90 * time.Hour} { // in the second, the third and the fourth day
		f.clock.Set(noon.Add(at))
		before := f.balance()
		tx, err := f.pool.Begin(t.Context())
		require.NoError(t, err)
		d, err := f.book.Draw(t.Context(), tx, wallet.Draw{Wallet: "ann", Amount: 1})
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

// A caller's clock can be behind, over the edge of a period.
func TestRenews_AStartThatIsOverIsInThePresentPeriod(t *testing.T) {
	t.Parallel()
	f := setUp(t, wallet.Config{})
	granted, err := f.tryGrant(wallet.Grant{Wallet: "w", Amount: 10, Reference: "plan", Renews: daily, Starts: noon.Add(-day)})
	require.NoError(t, err)
	require.Equal(t, noon.Truncate(day).Add(day), granted.Expires)
}

func TestRenews_ConcurrentCallsBeginEachLotOnce(t *testing.T) {
	t.Parallel()
	f := setUp(t, wallet.Config{})
	for _, level := range []pgx.TxIsoLevel{pgx.ReadCommitted, pgx.RepeatableRead, pgx.Serializable} {
		name := string(level)
		_, err := f.tryGrant(wallet.Grant{Wallet: name, Amount: 10, Reference: "plan", Renews: daily})
		require.NoError(t, err)
		for range 3 {
			f.clock.Advance(day)
			drawn := make(chan int, 6)
			require.NoError(t, pgtest.InParallel(6, func(int) error {
				n := 0
				for {
					err := pgx.BeginTxFunc(t.Context(), f.pool, pgx.TxOptions{IsoLevel: level}, func(tx pgx.Tx) error {
						_, err := f.book.Draw(t.Context(), tx, wallet.Draw{Wallet: name, Amount: 1})
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
		{"Grant.Renews", wallet.Grant{Renews: daily, For: day, Reference: "r"}},
		{"Grant.Renews", wallet.Grant{Renews: daily}},
		{"Grant.Renews", wallet.Grant{Renews: short, Reference: "r"}},
		{"Grant.First", wallet.Grant{First: 1}},
		{"Grant.First", wallet.Grant{First: -1, Renews: daily, Reference: "r"}},
		{"Grant.RollCap", wallet.Grant{For: day, RollTo: daily}},
		{"Grant.RollCap", wallet.Grant{For: day, RollTimes: 2}},
		{"Grant.RollTo", wallet.Grant{For: day, RollCap: 1, RollTo: daily, RollFor: day}},
		{"Grant.RollTimes", wallet.Grant{For: day, RollCap: 1, RollTimes: -2, RollFor: day}},
		{"Grant.RollTimes", wallet.Grant{For: day, RollCap: 1, RollTimes: 2}},
		{"Grant.RollTimes", wallet.Grant{For: day, RollCap: 1, RollTimes: 2, RollFor: time.Hour}},
		{"Grant.RollTimes", wallet.Grant{For: day, RollCap: 1, RollTimes: 2, RollTo: short}},
		{"Grant.Starts", wallet.Grant{Starts: noon.Add(day), Expires: noon.Add(day)}},
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
