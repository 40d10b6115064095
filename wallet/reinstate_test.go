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

func (f *fixture) reinstate(r wallet.Revoke) (wallet.Granted, error) {
	if r.Wallet == "" {
		r.Wallet = "ann"
	}
	return do(f, func(ctx context.Context, tx pgx.Tx) (wallet.Granted, error) { return f.book.Reinstate(ctx, tx, r) })
}

// A dispute is opened and won. The payment's grant says that it was revoked, and brings nothing. Reinstate does, in the lot of the
// grant, with its end and what rolls over.
func TestReinstate_UnitsComeBackUnderTheirName(t *testing.T) {
	t.Parallel()
	for _, uses := range [][]string{nil, {"images"}} {
		f := setUp(t, wallet.Config{})
		g := wallet.Grant{Wallet: "ann", Amount: 100, Reference: "payment 17", Ends: wallet.After(day), Roll: &wallet.Roll{Cap: 30, Lasts: wallet.For(day)}, Uses: uses}
		has := func(units int64) {
			t.Helper()
			require.EqualValues(t, units, f.balance().For("images"))
		}
		first := f.grant(g)
		require.Zero(t, first.Revoked)
		f.mustDraw(forUse("images", 10))
		_, err := f.revoke(wallet.Revoke{Reference: "payment 17"})
		require.NoError(t, err)
		has(0)
		again := f.grant(g)
		require.Equal(t, []any{true, first.Lot, int64(100), int64(90), false}, []any{again.Replayed, again.Lot, again.Amount, again.Revoked, again.RenewalsEnded})
		has(0)

		back, err := f.reinstate(wallet.Revoke{Reference: "payment 17", Amount: 20})
		require.NoError(t, err)
		require.Equal(t, []any{first.Lot, int64(20), first.Expires}, []any{back.Lot, back.Amount, back.Expires})
		has(20)
		back, err = f.reinstate(wallet.Revoke{Lot: first.Lot})
		require.NoError(t, err)
		require.EqualValues(t, 70, back.Amount)
		has(90)
		back, err = f.reinstate(wallet.Revoke{Reference: "payment 17"})
		require.NoError(t, err)
		require.Equal(t, []any{true, int64(0)}, []any{back.Replayed, back.Amount})
		require.Zero(t, f.grant(g).Revoked)
		f.mustDraw(forUse("images", 50))
		f.clock.Advance(day)
		has(30)

		_, err = f.revoke(wallet.Revoke{Reference: "payment 17"}) // of the lot in which it went on
		require.NoError(t, err)
		has(0)
		require.EqualValues(t, 30, f.grant(g).Revoked)
		back, err = f.reinstate(wallet.Revoke{Reference: "payment 17"})
		require.NoError(t, err)
		require.EqualValues(t, 30, back.Amount)
		has(30)
		_, err = f.revoke(wallet.Revoke{Reference: "payment 17"})
		require.NoError(t, err)
		f.clock.Advance(day)
		_, err = f.reinstate(wallet.Revoke{Reference: "payment 17"})
		require.ErrorIs(t, err, wallet.ErrExpired)
		_, err = f.reinstate(wallet.Revoke{Reference: "another"})
		require.ErrorIs(t, err, wallet.ErrUnknownLot)
		_, err = f.reinstate(wallet.Revoke{})
		var argument *budget.ArgumentError
		require.ErrorAs(t, err, &argument)
		has(0)
	}
}

// A purge leaves the lots that the units of a lot went on in, as long as that lot is there: what is revoked of them has
// ended, and what is drawn of them is missing.
func TestReinstate_APurgeForgetsNoUnitsThatWentOn(t *testing.T) {
	t.Parallel()
	for _, purged := range []bool{false, true} {
		t.Run(fmt.Sprint("purged ", purged), func(t *testing.T) {
			t.Parallel()
			f := setUp(t, wallet.Config{})
			f.grant(wallet.Grant{Amount: 100, Reference: "pay"})
			first := f.rollover(wallet.Rollover{Reference: "pay", Cap: 20, For: day})
			next := f.rollover(wallet.Rollover{Lot: first.Lot, Cap: 20, For: day})
			f.draw(5)
			r, err := f.revoke(wallet.Revoke{Lot: next.Lot})
			require.NoError(t, err)
			require.EqualValues(t, 15, r.Amount)
			for range 16 { // a purge begins what it leaves at a multiple of 16
				f.grant(wallet.Grant{Amount: 1})
			}
			f.clock.Advance(100 * day)
			f.grant(wallet.Grant{Amount: 1})
			if purged {
				_, err := f.ledger.Purge(t.Context(), f.pool, budget.PurgeOptions{OlderThan: 50 * day})
				require.NoError(t, err)
			}
			_, err = f.reinstate(wallet.Revoke{Reference: "pay"})
			require.ErrorIs(t, err, wallet.ErrExpired)
			r, err = f.revoke(wallet.Revoke{Reference: "pay"})
			require.NoError(t, err)
			require.Equal(t, []int64{80, 5}, []int64{r.Amount, r.Missing})
		})
	}
}

// A purge leaves a lot that rolled over, and the one that it rolled over into, as long as units that a refund gave back to it
// are there, in a lot of their own.
func TestPurge_LeavesALotWithAllThatItsUnitsWentOnIn(t *testing.T) {
	t.Parallel()
	for _, purged := range []bool{false, true} {
		t.Run(fmt.Sprint("purged ", purged), func(t *testing.T) {
			t.Parallel()
			f := setUp(t, wallet.Config{LateRefunds: wallet.Forever})
			f.grant(wallet.Grant{Amount: 100, Reference: "pay", Ends: wallet.After(day)})
			drawn := f.draw(10)
			next := f.rollover(wallet.Rollover{Reference: "pay", Cap: 20, For: day})
			_, err := f.revoke(wallet.Revoke{Lot: next.Lot})
			require.NoError(t, err)
			f.clock.Advance(2 * day)
			f.refund(drawn.Seq, 10)
			f.has(10)
			for range 16 { // a purge begins what it leaves at a multiple of 16
				f.grant(wallet.Grant{Amount: 1})
			}
			f.sweeps()
			f.clock.Advance(100 * day)
			f.grant(wallet.Grant{Amount: 1})
			if purged {
				_, err := f.ledger.Purge(t.Context(), f.pool, budget.PurgeOptions{OlderThan: 50 * day})
				require.NoError(t, err)
			}
			again := f.rollover(wallet.Rollover{Reference: "pay", Cap: 20, For: day})
			require.Equal(t, []any{next.Lot, int64(20), true}, []any{again.Lot, again.Amount, again.Replayed})
			_, err = f.reinstate(wallet.Revoke{Reference: "pay"})
			require.ErrorIs(t, err, wallet.ErrExpired)
			r, err := f.revoke(wallet.Revoke{Reference: "pay"})
			require.NoError(t, err)
			require.EqualValues(t, 10, r.Amount)
		})
	}
}

// Each step of a purge takes the lots that ended with its entries, and looks at no others. The last one takes also those that
// were told to subscribers since.
func TestPurge_TakesLotsWithTheirEntries(t *testing.T) {
	t.Parallel()
	var refuses error
	f := setUp(t, wallet.Config{Subscribers: []wallet.Subscriber{func(context.Context, pgx.Tx, wallet.Breakage) error { return refuses }}})
	lots := func() int64 { return pgtest.Value[int64](t, f.pool, "select count(*) from metered.lot_rows") }
	age := func() {
		for range 20 {
			f.grant(wallet.Grant{Amount: 10, Ends: wallet.After(90 * time.Minute), Roll: &wallet.Roll{Cap: 5, Lasts: wallet.For(time.Hour)}})
			f.clock.Advance(time.Hour)
			_, err := f.book.Sweep(t.Context(), f.pool, wallet.SweepOptions{})
			require.ErrorIs(t, err, refuses)
		}
		f.clock.Advance(100 * day)
		f.grant(wallet.Grant{Amount: 1})
	}
	reads := func(tx pgx.Tx) int64 {
		return pgtest.Value[int64](t, tx, "select pg_stat_get_xact_tuples_fetched('metered.lot_rows'::regclass)")
	}
	var left, looked []int64 // after, and in, each step
	purge := func() {
		left, looked = nil, nil
		for upto, done := int64(0), false; !done; {
			require.NoError(t, pgx.BeginFunc(t.Context(), f.pool, func(tx pgx.Tx) error {
				before := reads(tx)
				err := tx.QueryRow(t.Context(), `select upto, done from metered.purge_scope('ann', $1, metered.clock() - interval '50 days', $2, 16, 1000, false)`,
					f.ledger.LockKey("ann"), upto).Scan(&upto, &done)
				looked = append(looked, reads(tx)-before)
				return err
			}))
			left = append(left, lots())
		}
	}
	age()
	require.EqualValues(t, 41, lots())
	purge()
	require.Greater(t, len(left), 4)
	for n := range left[1:] {
		require.Less(t, left[n+1], left[n], left)
	}
	require.Less(t, left[len(left)-1], int64(9), "lots of the last 16 entries")

	refuses = errors.New("the subscriber is away")
	age()
	purge()
	require.Greater(t, left[len(left)-1], int64(20), "not told yet")
	refuses = nil
	_, err := f.book.Sweep(t.Context(), f.pool, wallet.SweepOptions{})
	require.NoError(t, err)
	purge()
	require.Less(t, left[len(left)-1], int64(9))
	last := len(looked) - 1
	require.Equal(t, make([]int64, last), looked[:last], "the moves of these steps are gone, and no lot is looked at")
	require.Positive(t, looked[last])
	f.has(2)
}

// A subscription is cancelled, and goes on after all: the next period brings its lot, and each one after it.
func TestReinstate_RenewalsGoOn(t *testing.T) {
	t.Parallel()
	f := setUp(t, wallet.Config{})
	g := wallet.Grant{Wallet: "ann", Amount: 10, Reference: "plan", Ends: wallet.EachPeriodProrated(daily)}
	renewals := wallet.Revoke{Wallet: "ann", Reference: "plan", Renewals: true}
	f.grant(g)
	require.False(t, f.grant(g).RenewalsEnded)
	back, err := f.reinstate(renewals)
	require.NoError(t, err)
	require.True(t, back.Replayed)
	_, err = f.revoke(renewals)
	require.NoError(t, err)
	again := f.grant(g)
	require.Equal(t, []any{int64(0), true}, []any{again.Revoked, again.RenewalsEnded})
	back, err = f.reinstate(renewals)
	require.NoError(t, err)
	midnight := noon.Truncate(day).Add(day)
	require.Equal(t, []any{int64(10), midnight.Add(day), false}, []any{back.Amount, back.Expires, back.Replayed})
	require.False(t, f.grant(g).RenewalsEnded)
	f.has(5)
	for n := range 3 {
		f.clock.Set(midnight.Add(time.Duration(n) * day))
		f.has(10)
	}
	_, err = f.revoke(renewals)
	require.NoError(t, err)
	f.clock.Advance(day)
	_, err = f.reinstate(renewals)
	require.ErrorIs(t, err, wallet.ErrExpired, "its period has begun without it")
	f.has(0)
	_, err = f.reinstate(wallet.Revoke{Reference: "none", Renewals: true})
	require.ErrorIs(t, err, wallet.ErrUnknownLot)

	// A lot that has not begun begins at its time, and renews.
	g = wallet.Grant{Wallet: "ann", Amount: 7, Reference: "later", Ends: wallet.EachPeriod(daily), Starts: f.clock.Now().Add(day)}
	f.grant(g)
	_, err = f.revoke(wallet.Revoke{Reference: "later"})
	require.NoError(t, err)
	again = f.grant(g)
	require.Equal(t, []any{int64(7), true}, []any{again.Revoked, again.RenewalsEnded})
	_, err = f.reinstate(wallet.Revoke{Reference: "later"})
	require.NoError(t, err)
	for range 2 {
		f.clock.Advance(day)
		f.has(7)
	}
}

// Units that come back pay an overdraft, arm the thresholds that a grant arms, and say in the statement what they are.
func TestReinstate_PaysAnOverdraftAndArmsThresholds(t *testing.T) {
	t.Parallel()
	f := setUpReporting(t, wallet.Config{Overdraft: 50, Thresholds: []budget.Threshold{{Name: "overdrawn", Used: 1}}}, nil)
	f.grant(wallet.Grant{Amount: 20, Reference: "r"})
	_, err := f.revoke(wallet.Revoke{Reference: "r"})
	require.NoError(t, err)
	f.draw(5)
	require.Len(t, f.crossed(), 1)
	_, err = f.reinstate(wallet.Revoke{Reference: "r", Note: budget.Note{Reason: "won"}})
	require.NoError(t, err)
	require.EqualValues(t, 15, f.balance().Units)
	_, err = do(f, func(ctx context.Context, tx pgx.Tx) (budget.Receipt, error) { // whose limits have no thresholds
		return f.ledger.Charge(ctx, tx, budget.Charge{Scope: "ann", Amount: 16})
	})
	require.NoError(t, err)
	f.draw(1)
	require.Len(t, f.crossed(), 1, "once more")
	var lines []string
	for l, err := range f.book.Statement(t.Context(), f.pool, "ann", budget.EntriesOptions{After: 3}) {
		require.NoError(t, err)
		for _, m := range l.Lots {
			lines = append(lines, fmt.Sprint(l.Kind, " ", l.Note.Reason, " ", m.Kind, " ", m.Amount))
		}
	}
	require.Equal(t, []string{"credit won reinstated 20", "credit won paid back 5", "charge  taken 15", "charge  taken 1", "charge  taken 1"}, lines)
	require.EqualValues(t, 20, pgtest.Value[int64](t, f.pool, "select sum(change) from metered.lots_statement where does in ('credited', 'revoked', 'reinstated')"))
}

// Many revoke and reinstate one lot at once. In the end it has all of its units, or none.
func TestReinstate_ConcurrentCallsAddUp(t *testing.T) {
	t.Parallel()
	f := setUp(t, wallet.Config{})
	f.grant(wallet.Grant{Amount: 100, Reference: "r"})
	for _, level := range anyLevel {
		require.NoError(t, pgtest.InParallel(6, func(n int) error {
			for {
				err := pgx.BeginTxFunc(t.Context(), f.pool, pgx.TxOptions{IsoLevel: level}, func(tx pgx.Tx) (err error) {
					if r := (wallet.Revoke{Wallet: "ann", Reference: "r"}); n%2 == 0 {
						_, err = f.book.Revoke(t.Context(), tx, r)
					} else {
						_, err = f.book.Reinstate(t.Context(), tx, r)
					}
					return err
				})
				if !metered.Retryable(err) {
					return err
				}
			}
		}))
		_, err := f.reinstate(wallet.Revoke{Reference: "r"})
		require.NoError(t, err)
		f.has(100)
	}
}
