package wallet_test

import (
	"context"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/wallet"
)

func (f *fixture) tryOverage(o wallet.Overage) (wallet.Granted, error) {
	o.Wallet = "ann"
	return do(f, func(ctx context.Context, tx pgx.Tx) (wallet.Granted, error) { return f.book.Overage(ctx, tx, o) })
}

func (f *fixture) overage(at time.Time, forgive bool) wallet.Granted {
	f.Helper()
	over, err := f.tryOverage(wallet.Overage{Plan: "small", At: at, Forgive: forgive})
	require.NoError(f, err)
	return over
}

// Forgiven overdraft is credited once, and the new period has all of its units. Without that, the next lot pays it back.
func TestOverage_IsToldAndForgivenOnce(t *testing.T) {
	t.Parallel()
	f := small(t, wallet.Config{Overdraft: 100})
	f.draw(280)
	require.Zero(t, f.overage(time.Time{}, true).Amount, "the first period began without any")
	_, err := f.tryOverage(wallet.Overage{Plan: "small", At: december})
	require.ErrorIs(t, err, wallet.ErrUnknownLot, "it has not begun")
	f.clock.Set(december.Add(time.Hour)) // and nothing is written
	f.draw(20)
	require.EqualValues(t, 300-80-20, f.balance().Units)
	require.Equal(t, wallet.Granted{Amount: 80}, f.overage(time.Time{}, false))
	require.EqualValues(t, 200, f.balance().Units)
	for n := range 3 {
		over := f.overage(december, true)
		require.Equal(t, []any{int64(80), december.AddDate(0, 1, 0), n > 0}, []any{over.Amount, over.Expires, over.Replayed})
		require.NotZero(t, over.Lot)
		require.EqualValues(t, 280, f.balance().Units)
	}
	f.clock.Set(december.AddDate(0, 1, 0))
	require.EqualValues(t, 300, f.balance().Units)
	require.Zero(t, f.overage(time.Time{}, true).Amount)
	require.Equal(t, int64(80), f.overage(december, true).Amount, "as before")
	require.EqualValues(t, 300, f.balance().Units)
}

// A job that comes a period late credits the units in the present period. Callers at once credit them once.
func TestOverage_OfAnEarlierPeriodGoesToThePresentOne(t *testing.T) {
	t.Parallel()
	f := small(t, wallet.Config{Overdraft: 100})
	f.draw(260)
	f.clock.Set(december.Add(time.Hour))
	f.draw(1)
	f.clock.Set(december.AddDate(0, 1, 1))
	require.NoError(t, pgtest.InParallel(8, func(int) error {
		_, err := f.tryOverage(wallet.Overage{Plan: "small", At: december, Forgive: true})
		return err
	}))
	require.EqualValues(t, 360, f.balance().Units)
	require.Equal(t, december.AddDate(0, 2, 0), f.overage(december, true).Expires)
	f.change(wallet.Change{Reference: "end", Plan: "small"})
	require.EqualValues(t, 60, f.balance().Units)
	f.clock.Set(december.AddDate(0, 2, 1))
	require.True(t, f.overage(december, true).Replayed, "also when no lot of the plan is left")
}

// Units that a hold keeps beyond the lots are no overage: they are not spent.
func TestOverage_CountsSpentUnitsAlone(t *testing.T) {
	t.Parallel()
	f := small(t, wallet.Config{Overdraft: 100})
	f.draw(210)
	f.place("h", 50, 60*day)
	f.clock.Set(december)
	require.Equal(t, int64(10), f.overage(time.Time{}, true).Amount)
	require.EqualValues(t, 250, f.balance().Units)
}

func TestOverage_RefusesHostileArguments(t *testing.T) {
	t.Parallel()
	f := small(t, wallet.Config{})
	for field, o := range map[string]wallet.Overage{
		"Overage.Plan":  {},
		"Overage.Plan:": {Plan: "a\x00"},
		"Overage.At":    {Plan: "small", At: time.Date(9000, 1, 1, 0, 0, 0, 0, time.UTC)},
	} {
		_, err := f.tryOverage(o)
		require.ErrorContains(t, err, field)
	}
	_, err := f.tryOverage(wallet.Overage{Plan: "nothing"})
	require.ErrorIs(t, err, wallet.ErrUnknownLot)
}
