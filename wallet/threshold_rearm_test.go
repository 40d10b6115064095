package wallet_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/wallet"
)

// A lot rolls over while another one lapses: the units that go on are not new, and arm nothing in between.
func TestThresholds_AreNotArmedByARollover(t *testing.T) {
	t.Parallel()
	for _, by := range []string{"sweep", "draw"} {
		f := setUpReporting(t, low(50), nil)
		f.grant(wallet.Grant{Amount: 10, Ends: wallet.After(time.Hour), Roll: &wallet.Roll{Cap: 4, Lasts: wallet.For(day)}})
		f.grant(wallet.Grant{Amount: 100, Ends: wallet.After(2 * time.Hour)})
		f.clock.Set(noon.Add(2 * time.Hour))
		if by == "sweep" {
			f.expire()
		} else {
			f.draw(1)
		}
		require.Len(t, f.crossed(), 1)
		f.draw(1)
		require.Empty(t, f.crossed(), by)
		f.verify()
	}
}

// A lot that has ended and is not written down yet arms nothing: a refund looks at the available units.
func TestThresholds_AreNotArmedByAnEndedLot(t *testing.T) {
	t.Parallel()
	f := setUpReporting(t, low(50), nil)
	f.grant(wallet.Grant{Amount: 30, Ends: wallet.After(time.Hour)})
	f.grant(wallet.Grant{Amount: 60, Ends: wallet.After(2 * time.Hour)})
	f.grant(wallet.Grant{Amount: 20})
	d := f.draw(30)
	f.draw(35)
	require.Equal(t, []string{"ann low 45"}, f.crossed())
	f.clock.Set(noon.Add(2 * time.Hour))
	f.refund(d.Seq, 30)
	require.EqualValues(t, 50, f.balance().Units)
	f.draw(1)
	require.Empty(t, f.crossed())
	f.refund(d.Seq+1, 35)
	f.draw(34)
	require.Equal(t, []string{"ann low 50"}, f.crossed())
	f.verify()
}

// A refund to a lot that has ended lapses and arms nothing. A refund that goes on in a new lot does arm.
func TestThresholds_AreNotArmedByARefundThatLapses(t *testing.T) {
	t.Parallel()
	for late, told := range map[time.Duration][]string{wallet.Lapse: nil, 2 * time.Hour: {"ann low 25"}} {
		cfg := low(25) // of which 20 are overdraft
		cfg.Overdraft, cfg.LateRefunds = 20, late
		f := setUpReporting(t, cfg, nil)
		refund := func(d wasDrawn) {
			f.refund(d.Seq, d.Amount)
			if units := f.balance().Units; told != nil {
				f.draw(units - 5)
			} else {
				f.draw(1)
			}
			require.ElementsMatch(t, told, f.crossed())
		}
		f.grant(wallet.Grant{Amount: 30, Ends: wallet.After(time.Hour)})
		f.grant(wallet.Grant{Amount: 20})
		d := f.draw(30)
		f.draw(15)
		require.Equal(t, []string{"ann low 25"}, f.crossed())
		f.clock.Set(noon.Add(time.Hour))
		refund(d)

		// The same for overdrawn units that a lot has paid back, and that lot has ended since.
		d = f.draw(f.balance().Units + 15)
		f.grant(wallet.Grant{Amount: 40, Ends: wallet.After(time.Hour)})
		f.clock.Set(noon.Add(2 * time.Hour))
		f.expire()
		require.Equal(t, []string{"ann low 20"}, f.crossed())
		refund(d)
	}
}

// A hold that fell due before its lot ended has given its units back to it, and they roll over. A revocation after both
// counts them, though nobody has written that: it reports no level that they are above.
func TestThresholds_CountUnitsThatWereFreedBeforeTheirLotEnded(t *testing.T) {
	t.Parallel()
	for _, swept := range []bool{true, false} {
		f := setUpReporting(t, low(50), nil)
		f.grant(wallet.Grant{Amount: 100, Reference: "a", Ends: wallet.After(2 * time.Hour), Roll: &wallet.Roll{Cap: 100, Lasts: wallet.For(day)}})
		_, err := do(f, func(ctx context.Context, tx pgx.Tx) (holds.Hold, error) { // without thresholds: it reports none
			return f.holds.Place(ctx, tx, holds.Placement{ID: "h", TTL: time.Hour, Lines: []holds.Line{{Scope: "ann", Amount: 80}}})
		})
		require.NoError(t, err)
		f.clock.Set(noon.Add(2 * time.Hour))
		if swept {
			f.sweeps()
		}
		_, err = f.revoke(wallet.Revoke{Reference: "a", Amount: 10})
		require.NoError(t, err)
		require.Empty(t, f.crossed(), "90 are left")
	}
}

// The first call with an entry of its own after lots have begun reports a level that they have not left. The books agree.
func TestThresholds_AreReportedByACallThatWritesThatLotsBegan(t *testing.T) {
	t.Parallel()
	f := setUpReporting(t, low(50), nil)
	for n := range 2 {
		f.grant(wallet.Grant{Amount: 10, Reference: fmt.Sprint(n), Starts: noon.Add(time.Hour)})
	}
	f.clock.Set(noon.Add(time.Hour))
	for days, want := range [][]string{{"ann low 20"}, {}} {
		_, err := f.setEnd(wallet.LotEnd{Reference: "0", Expires: noon.AddDate(0, 0, 1+days)})
		require.NoError(t, err)
		require.Equal(t, want, f.crossed())
		f.verify()
	}
}

// The clock was set back. A hold that is due by the time of an entry, and not by the clock, is held: no revocation and
// no rollover arms a reported threshold.
func TestThresholds_AreNotArmedWhereTheClockWasSetBack(t *testing.T) {
	t.Parallel()
	f := setUpReporting(t, low(50), nil)
	f.grant(wallet.Grant{Amount: 100, Reference: "all"})
	f.place("long", 5, time.Hour)
	f.place("short", 60, time.Minute)
	require.Equal(t, []string{"ann low 35"}, f.crossed())
	f.clock.Set(noon.Add(70 * time.Second))
	f.release("long")
	f.clock.Set(noon.Add(50 * time.Second))
	for _, lower := range []func() error{
		func() error { _, err := f.revoke(wallet.Revoke{Reference: "all", Amount: 1}); return err },
		func() error {
			_, err := do(f, func(ctx context.Context, tx pgx.Tx) (wallet.Granted, error) {
				return f.book.Rollover(ctx, tx, wallet.Rollover{Wallet: "ann", Reference: "all", Cap: 10, For: time.Hour})
			})
			return err
		},
	} {
		require.NoError(t, lower())
		f.draw(1)
		require.Empty(t, f.crossed(), "40 were left, and fewer are now")
	}
}
