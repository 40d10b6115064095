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

// Units that a hold keeps of what has rolled over count to a shared cap, also where the hold falls due
// before anybody looks: they come back to the lot that had them, and the cap is not passed.
func TestRollShared_CountsUnitsThatHoldsKeep(t *testing.T) {
	t.Parallel()
	for n := range 4 {
		swept, kept := n%2 == 0, []int64{6, 10}[n/2]
		t.Run(fmt.Sprint(kept, " kept, swept ", swept), func(t *testing.T) {
			t.Parallel()
			f := setUp(t, wallet.Config{})
			looks := func(at time.Duration, want map[string]int64) {
				t.Helper()
				if f.clock.Set(noon.Add(at)); swept {
					f.sweeps()
				}
				require.Equal(t, want, f.left(), at)
			}
			month := wallet.Grant{Amount: 10, Ends: wallet.After(day), Roll: &wallet.Roll{Cap: 10, Lasts: wallet.For(10 * day), Shared: true}}
			month.Reference = "first"
			f.grant(month)
			looks(day, map[string]int64{"first": 10})
			f.place("h", kept, 36*time.Hour) // of what rolled over, until 60 hours
			month.Reference = "second"
			f.grant(month)
			if swept {
				f.clock.Set(noon.Add(49 * time.Hour))
				f.sweeps()
				require.EqualValues(t, 10-kept, f.balance().Units)
			}
			looks(61*time.Hour, map[string]int64{"first": 10})
			require.Zero(t, f.draw(10).Left)
		})
	}
}

// A lot that begins, ends and rolls over while a wallet has more ended lots than one call writes: a
// call has the units that rolled over.
func TestLots_ThatBeginInABacklogAreEndedInTheirTurn(t *testing.T) {
	t.Parallel()
	f := setUp(t, wallet.Config{})
	f.endsPerCall(2)
	for i := range 5 {
		f.grant(wallet.Grant{Amount: 1, Ends: wallet.After(time.Hour + time.Duration(i)*time.Minute)})
	}
	f.grant(wallet.Grant{Amount: 7, Reference: "later", Starts: noon.Add(2 * time.Hour), Ends: wallet.After(time.Hour), Roll: &wallet.Roll{Cap: 5, Lasts: wallet.For(day)}})
	f.clock.Set(noon.Add(4 * time.Hour))
	require.Equal(t, map[string]int64{"later": 5}, f.left())
	d := f.draw(5)
	require.Len(t, d.Lots, 1)
	require.Equal(t, []int64{5, 0, 0}, []int64{d.Lots[0].Amount, d.Overdrawn, d.Left})
	require.Positive(t, pgtest.Value[int](t, f.pool, "select count(*) from metered.lots where open and expires_at <= metered.clock()"), "a backlog is left")
}

// A sweep tells of the units of lots that began or rolled over, and lapsed, since the one before.
func TestSweep_TellsOfUnitsThatCameAndWent(t *testing.T) {
	t.Parallel()
	for name, sweep := range map[string]func(f *fixture) error{
		"all": func(f *fixture) error {
			_, err := f.book.Sweep(f.Context(), f.pool, wallet.SweepOptions{})
			return err
		},
		"one": func(f *fixture) error {
			return pgx.BeginFunc(f.Context(), f.pool, func(tx pgx.Tx) error { _, err := f.book.Expire(f.Context(), tx, "ann"); return err })
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			told := map[string]int64{}
			f := setUp(t, wallet.Config{Subscribers: []wallet.Subscriber{func(_ context.Context, _ pgx.Tx, b wallet.Breakage) error {
				told[b.Reference] += b.Amount
				return nil
			}}})
			f.grant(wallet.Grant{Amount: 10, Reference: "rolls", Ends: wallet.After(time.Hour), Roll: &wallet.Roll{Cap: 8, Lasts: wallet.For(day), Times: 2}})
			f.grant(wallet.Grant{Amount: 3, Reference: "plan", Ends: wallet.EachPeriod(daily)})
			f.clock.Set(noon.Add(4 * day))
			require.NoError(t, sweep(f))
			require.Equal(t, map[string]int64{"rolls": 10, "plan": 3, "plan 2026-11-22T00:00:00Z": 3, "plan 2026-11-23T00:00:00Z": 3, "plan 2026-11-24T00:00:00Z": 3}, told)
			told = map[string]int64{}
			require.NoError(t, sweep(f))
			require.Empty(t, told)
		})
	}
}

// manyDue places 60 holds of a unit of a wallet. Half of them fall due before the lot ends that they
// are of, and their units roll over. The others fall due later, and their units lapse.
func (f *fixture) manyDue() {
	f.Helper()
	f.grant(wallet.Grant{Amount: 60, Reference: "lot", Ends: wallet.After(90 * time.Second), Roll: &wallet.Roll{Cap: 60, Lasts: wallet.For(day)}})
	_, err := do(f, func(ctx context.Context, tx pgx.Tx) (_ holds.Hold, err error) {
		for i := range 60 {
			line := f.book.Line("ann", 1)
			if _, err = f.holds.Place(ctx, tx, holds.Placement{ID: fmt.Sprint(i), TTL: time.Minute + time.Duration(i)*time.Second, Lines: []holds.Line{line}}); err != nil {
				break
			}
		}
		return holds.Hold{}, err
	})
	require.NoError(f, err)
	f.clock.Set(noon.Add(time.Hour))
	require.EqualValues(f, 30, f.balance().Units)
}

// A sweep ends the due holds of a wallet that has many in steps, in the order of their times, and each
// step ends the lots that end by then.
func TestSweep_AWalletWithManyDueHoldsIsSweptInSteps(t *testing.T) {
	t.Parallel()
	f := setUp(t, wallet.Config{})
	f.manyDue()
	var left []int64
	report, err := f.holds.Sweep(t.Context(), f.pool, holds.SweepOptions{Progress: func(holds.SweepReport) {
		left = append(left, pgtest.Value[int64](t, f.pool, "select count(*) from metered.hold_lines where open > 0"))
		require.EqualValues(t, 30, f.balance().Units)
		f.verify()
	}})
	require.NoError(t, err)
	require.Equal(t, 60, report.Expired)
	require.Subset(t, []int64{60, 35, 10, 0}, left)
	require.Contains(t, left, int64(10))
	require.Equal(t, map[string]int64{"lot": 30}, f.left())
	require.EqualValues(t, 60, pgtest.Value[int64](t, f.pool, `select count(*) from metered.ledger l join metered.hold_lines x on true
		join metered.holds h on h.no = x.hold and h.id = l.hold where l.kind = 'x' and l.at = h.due`), "each at its time")
}

// A step of a sweep leaves a wallet alone that somebody draws from. A draw beside a step waits for it,
// and frees the rest.
func TestDraw_AndAStepOfASweepComeOneAfterTheOther(t *testing.T) {
	t.Parallel()
	for _, commits := range []bool{true, false} {
		f := setUp(t, wallet.Config{})
		f.manyDue()
		draws, err := f.pool.Begin(t.Context())
		require.NoError(t, err)
		_, err = f.drawIn(t.Context(), draws, toDraw{Wallet: "ann", Amount: 1})
		require.NoError(t, err)
		step, err := f.pool.Begin(t.Context())
		require.NoError(t, err)
		_, err = step.Exec(t.Context(), "set local lock_timeout = '1s'") // it waits for nobody
		require.NoError(t, err)
		require.True(t, pgtest.Value[bool](t, step, "select freed is null and not more from metered.sweep_scope('ann', 10, false, null)"))
		require.NoError(t, draws.Rollback(t.Context()))

		require.EqualValues(t, 10, pgtest.Value[int64](t, step, "select freed from metered.sweep_scope('ann', 10, false, null)"))
		drawn := pgtest.Going(func() error {
			d, err := f.tryDraw(toDraw{Amount: 1})
			if err == nil && d.Left != 29 {
				err = fmt.Errorf("%d are left", d.Left)
			}
			return err
		})
		pgtest.WaitQueued(t, f.pool, 1)
		if commits {
			require.NoError(t, step.Commit(t.Context()))
		} else {
			require.NoError(t, step.Rollback(t.Context()))
		}
		require.NoError(t, <-drawn)
		f.verify()
		f.sweeps() // clears the rows of lines that the draw freed
		require.Zero(t, pgtest.Value[int64](t, f.pool, "select count(*) from metered.hold_lines where open > 0"))
		require.Equal(t, map[string]int64{"lot": 29}, f.left())
	}
}

// A plan whose time zone the server has lost keeps no other scope from a sweep of holds, also where the
// wallet has due holds, few or many.
func TestZone_ThatTheServerHasLostStopsNoSweepOfHolds(t *testing.T) {
	t.Parallel()
	for _, many := range []int{1, 60} {
		t.Run(fmt.Sprint(many), func(t *testing.T) {
			t.Parallel()
			f := setUp(t, wallet.Config{})
			f.grant(wallet.Grant{Amount: 10, Reference: "plan", Ends: wallet.EachPeriod(daily)})
			f.grant(wallet.Grant{Amount: 100, Reference: "paid"})
			f.grant(wallet.Grant{Wallet: "bob", Amount: 10})
			for _, name := range []string{"ann", "bob"} {
				_, err := do(f, func(ctx context.Context, tx pgx.Tx) (_ holds.Hold, err error) {
					for i := range map[string]int{"ann": many, "bob": 1}[name] {
						if _, err = f.holds.Place(ctx, tx, holds.Placement{ID: fmt.Sprint(name, i), TTL: 2*day + time.Duration(i)*time.Second, Lines: []holds.Line{f.book.Line(name, 1)}}); err != nil {
							break
						}
					}
					return holds.Hold{}, err
				})
				require.NoError(t, err)
				f.clock.Advance(time.Millisecond)
			}
			_, err := f.pool.Exec(t.Context(), `update metered.lot_rows set plan.renews.zone = 'Asia/Nowhere' where scope = 'ann' and ((plan).renews).every is not null`)
			require.NoError(t, err)
			f.clock.Advance(3 * day)
			report, err := f.holds.Sweep(t.Context(), f.pool, holds.SweepOptions{})
			require.ErrorContains(t, err, `scope "ann"`)
			require.ErrorContains(t, err, "the time zone of a plan is not known")
			require.Equal(t, []int{1, 1, 0}, []int{report.Expired, report.Behind, report.Skipped}, "bob's")
			_, err = f.revoke(wallet.Revoke{Reference: "plan", Renewals: true})
			require.NoError(t, err)
		})
	}
}
