package wallet_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/wallet"
)

// openLots counts the lots of a wallet whose end is not written.
func (f *fixture) openLots(of string) (n int) {
	f.Helper()
	require.NoError(f, f.pool.QueryRow(f.Context(), "select count(*) from metered.lot_rows where scope = $1 and open", of).Scan(&n))
	return n
}

// A transaction of a sweep ends about 25 lots of a wallet in which many are due, and locks no other wallet meanwhile. Wallets
// with few come first, and share one. All breakage is announced by the sweep that ends the lots, and what was committed stays.
func TestSweep_AWalletThatIsBehindIsSweptAloneAndInSteps(t *testing.T) {
	t.Parallel()
	told := map[string]int{}
	f := setUp(t, wallet.Config{Subscribers: []wallet.Subscriber{func(_ context.Context, _ pgx.Tx, b wallet.Breakage) error {
		told[b.Wallet] += int(b.Amount)
		return nil
	}}})
	many := pgtest.Size(70, 2_000)
	f.lotsEnd("big", many, wallet.Grant{})
	f.lotsEnd("large", 60, wallet.Grant{})
	for n := range 10 {
		f.lotsEnd(fmt.Sprint("few/", n), 2, wallet.Grant{})
	}
	f.clock.Advance(2 * time.Hour)

	before := [2]int{many, 60}
	ctx, cancel := context.WithCancel(t.Context())
	opts := wallet.SweepOptions{Batch: 40, Progress: func(wallet.SweepReport) {
		now := [2]int{f.openLots("big"), f.openLots("large")}
		ended := [2]int{before[0] - now[0], before[1] - now[1]}
		require.LessOrEqual(t, ended[0]+ended[1], 25)
		require.True(t, ended[0] == 0 || ended[1] == 0, "both at once")
		if ended[0]+ended[1] > 0 {
			require.Zero(t, f.openLots("few/0")+f.openLots("few/9"), "few come first")
		}
		before = now
		if now[0] < many && now[1] < 60 {
			cancel()
		}
	}}
	report, err := f.book.Sweep(ctx, f.pool, opts)
	require.ErrorIs(t, err, context.Canceled)
	require.Equal(t, 2, report.Behind)
	require.Equal(t, []int{many - 25, 35}, []int{f.openLots("big"), f.openLots("large")}, "they take turns")
	require.Equal(t, []int{125, 125}, []int{told["big"], told["large"]})

	locked, err := f.pool.Begin(t.Context())
	require.NoError(t, err)
	defer func() { _ = locked.Rollback(context.Background()) }()
	_, err = locked.Exec(t.Context(), "select pg_advisory_xact_lock($1)", f.ledger.LockKey("large"))
	require.NoError(t, err)
	cancel = func() {}
	report, err = f.book.Sweep(t.Context(), f.pool, opts)
	require.NoError(t, err)
	require.Equal(t, 1, report.Behind)
	require.Equal(t, []int{0, 35}, []int{f.openLots("big"), f.openLots("large")})
	require.NoError(t, locked.Rollback(t.Context()))
	report, err = f.book.Sweep(t.Context(), f.pool, opts)
	require.NoError(t, err)
	require.Equal(t, []int{35, 35, 0}, []int{report.Ended, report.Announced, report.Behind})
	require.Equal(t, []int{5 * many, 300, 10}, []int{told["big"], told["large"], told["few/3"]})
	f.verify()
}

// Units that a due hold gives back to a lot that has ended lapse. The sweep that writes that down announces them, also those of a
// lot whose end was announced before.
func TestSweep_AnnouncesWhatADueHoldGaveBackToAnEndedLot(t *testing.T) {
	t.Parallel()
	for _, n := range []int{1, 40} { // in a page, and in steps
		told := 0
		f := setUp(t, wallet.Config{Subscribers: []wallet.Subscriber{func(_ context.Context, _ pgx.Tx, b wallet.Breakage) error {
			told += int(b.Amount)
			return nil
		}}})
		f.grant(wallet.Grant{Amount: 1000, Ends: wallet.After(time.Hour), Reference: "held"})
		f.grant(wallet.Grant{Amount: 1000, Ends: wallet.After(90 * time.Minute)})
		_, err := do(f, func(ctx context.Context, tx pgx.Tx) (_ struct{}, err error) {
			for i := range n {
				r := holds.Placement{ID: fmt.Sprint(i), TTL: 2*time.Hour + time.Duration(i)*time.Microsecond, Lines: []holds.Line{f.book.Line("ann", 2)}}
				if _, err := f.holds.Place(ctx, tx, r); err != nil {
					return struct{}{}, err
				}
			}
			return struct{}{}, nil
		})
		require.NoError(t, err)
		f.clock.Advance(70 * time.Minute)
		_, err = f.book.Sweep(t.Context(), f.pool, wallet.SweepOptions{})
		require.NoError(t, err)
		require.Equal(t, 1000-2*n, told)
		f.clock.Advance(2 * time.Hour)
		_, err = f.book.Sweep(t.Context(), f.pool, wallet.SweepOptions{})
		require.NoError(t, err)
		require.Equal(t, 2000, told, "%d holds", n)
		f.verify()
	}
}

// A step of a sweep of holds writes no more of a wallet than one of a sweep of wallets: a plan that nobody touched comes
// before the due hold, and its periods are written in steps, too.
func TestSweep_OfHoldsWritesAWalletThatIsBehindInSteps(t *testing.T) {
	t.Parallel()
	f := setUp(t, wallet.Config{})
	f.grant(wallet.Grant{Amount: 9, Reference: "plan", Ends: wallet.EachPeriod(daily)})
	f.place("h", 2, 40*day)
	f.clock.Advance(60 * day)
	entries, most, batches := pgtest.Count(t, f.pool, "metered.ledger"), 0, 0
	report, err := f.holds.Sweep(t.Context(), f.pool, holds.SweepOptions{Progress: func(holds.SweepReport) {
		now := pgtest.Count(t, f.pool, "metered.ledger")
		most, batches, entries = max(most, now-entries), batches+1, now
	}})
	require.NoError(t, err)
	require.Equal(t, []int{1, 0}, []int{report.Expired, report.Behind})
	require.LessOrEqual(t, most, 30, "in %d batches", batches)
	f.verify()
}

// A sweep in steps reports a level where the balance of now is at it, once, and not where it was in between: no step but
// the last crosses one. Each breakage is told once.
func TestSweep_InStepsReportsALevelThatTheBalanceOfNowIsAt(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		later   wallet.Grant
		crossed []string
		left    int64
	}{
		"it has risen again":   {wallet.Grant{Amount: 100}, []string{}, 100},
		"it rose, and fell":    {wallet.Grant{Amount: 100, Ends: wallet.After(30 * time.Minute)}, []string{"ann low 0"}, 0},
		"it rose to the level": {wallet.Grant{Amount: 20}, []string{"ann low 20"}, 20},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			told := 0
			cfg := low(25)
			cfg.Subscribers = []wallet.Subscriber{func(_ context.Context, _ pgx.Tx, b wallet.Breakage) error {
				told += int(b.Amount)
				return nil
			}}
			f := setUpReporting(t, cfg, nil)
			f.lotsEnd("ann", 52, wallet.Grant{})           // after two steps 10 units are left
			f.clock.Set(noon.Add(time.Hour - time.Minute)) // when the levels of grants are armed
			c.later.Starts = noon.Add(2 * time.Hour)
			f.grant(c.later)
			f.clock.Set(noon.Add(3 * time.Hour))
			for range 3 { // the first one tells all
				f.expire()
				require.EqualValues(t, 260+c.later.Amount-c.left, told)
			}
			require.Equal(t, c.crossed, f.crossed())
			require.EqualValues(t, c.left, f.balance().Units)
		})
	}
}

// A wallet that is behind and crosses a level is written in steps, too.
func TestSweep_OfAWalletThatCrossesALevelIsInSteps(t *testing.T) {
	t.Parallel()
	f := setUpReporting(t, low(490), nil)
	f.lotsEnd("ann", 100, wallet.Grant{})
	f.clock.Advance(2 * time.Hour)
	most, open := 0, 100
	_, err := f.book.Sweep(t.Context(), f.pool, wallet.SweepOptions{Progress: func(wallet.SweepReport) {
		now := f.openLots("ann")
		most, open = max(most, open-now), now
	}})
	require.NoError(t, err)
	require.Equal(t, []int{25, 0}, []int{most, open})
	require.Equal(t, []string{"ann low 0"}, f.crossed())
}
