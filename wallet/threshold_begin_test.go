package wallet_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/wallet"
)

// A lot that has begun arms a threshold, and the call that takes units back reports it again, whoever wrote that the lot
// began.
func TestRevoke_TellsAThresholdThatALotArmedUnwritten(t *testing.T) {
	t.Parallel()
	for _, rolled := range []bool{false, true} {
		for _, swept := range []bool{true, false} {
			t.Run(fmt.Sprint("by the number of the lot that it rolled into ", rolled, ", swept ", swept), func(t *testing.T) {
				t.Parallel()
				f := setUpReporting(t, low(25), nil)
				first := f.grant(wallet.Grant{Amount: 20, Reference: "plan", Ends: wallet.EachPeriod(daily), Roll: &wallet.Roll{Cap: 12, Lasts: wallet.For(day)}})
				f.draw(6)
				require.Equal(t, []string{"ann low 14"}, f.crossed())
				f.clock.Advance(day)
				if swept {
					f.sweeps()
				}
				require.EqualValues(t, 32, f.balance().Units)
				no := first.Lot
				for _, l := range f.balance().Lots {
					if rolled && l.Units == 12 {
						no = l.Lot
					}
				}
				require.Equal(t, rolled, no != first.Lot)
				r, err := f.revoke(wallet.Revoke{Lot: no, Amount: 8})
				require.NoError(t, err)
				require.EqualValues(t, 8, r.Amount)
				require.Equal(t, []string{"ann low 24"}, f.crossed())
				require.True(t, f.remembers())
			})
		}
	}
}

// A lot that has begun arms a threshold for the calls that report none, too: the entry which such a call writes after
// that of the lot does not say that the threshold is still reported, nor does the entry of the lot's end.
func TestThresholds_StayArmedByALotThatACallWroteDown(t *testing.T) {
	t.Parallel()
	forSeats := func(f *fixture, _ int64) {
		_, err := f.tryDraw(toDraw{Amount: 1, Note: budget.Note{Use: "seats"}})
		require.NoError(f, err)
	}
	for by, call := range map[string]struct {
		do      func(f *fixture, charge int64)
		reports bool
	}{
		"sweep": {func(f *fixture, _ int64) { f.expire() }, true},
		"revoke": {func(f *fixture, _ int64) {
			_, err := f.revoke(wallet.Revoke{Reference: "ever", Amount: 1})
			require.NoError(f, err)
		}, true},
		"draw": {func(f *fixture, _ int64) { f.draw(1) }, true},
		"charge without thresholds": {func(f *fixture, _ int64) {
			f.charge(1)
		}, false},
		"charge with a threshold of a window": {func(f *fixture, _ int64) {
			f.chargeHourly(1, budget.Threshold{Name: "hourly", Used: 1})
			require.Equal(f, []string{"ann hourly 8"}, f.crossed())
		}, false},
		"draw for a use": {forSeats, true},
		"capture": {func(f *fixture, _ int64) {
			f.capture(holds.Capture{IDs: []string{"r"}, Lines: []holds.Line{{Scope: "ann"}}})
		}, false},
		"release": {func(f *fixture, _ int64) { f.release("r") }, false},
		"sweep of holds": {func(f *fixture, _ int64) {
			_, err := f.holds.Sweep(f.Context(), f.pool, holds.SweepOptions{})
			require.NoError(f, err)
		}, false},
		"refund": {func(f *fixture, charge int64) { f.refund(charge, 1) }, false},
		"grant":  {func(f *fixture, _ int64) { f.grant(wallet.Grant{Amount: 1, Starts: f.clock.Now().Add(day)}) }, false},
	} {
		for _, lot := range []string{"begins", "begins and ends", "ends"} {
			t.Run(by+", where a lot "+lot, func(t *testing.T) {
				t.Parallel()
				f := setUpReporting(t, low(10), nil)
				f.grant(wallet.Grant{Amount: 100, Reference: "ever"})
				f.grant(wallet.Grant{Amount: 10, Reference: "for seats", Uses: []string{"seats"}})
				g := wallet.Grant{Amount: 50, Starts: noon.Add(2 * time.Hour), Ends: wallet.After(time.Hour)}
				switch lot {
				case "begins":
					g.Ends = wallet.After(365 * day)
				case "ends":
					g = wallet.Grant{Amount: 1, Ends: wallet.After(time.Hour)}
				}
				f.place("due", 1, day)
				f.place("r", 1, 2*day)
				d := f.draw(90)
				require.Equal(t, []string{"ann low 8"}, f.crossed())
				f.grant(g)
				f.clock.Set(noon.Add(day))
				call.do(f, d.Seq)
				told := f.crossed()
				require.Equal(t, lot == "begins and ends" && call.reports, len(told) == 1, told)
				still := len(told) == 1 || lot == "ends"
				require.Equal(t, still, f.remembers())
				f.draw(f.balance().Units - 5)
				require.Equal(t, !still, len(f.crossed()) == 1, "the level is reached again")
				require.True(t, f.remembers())
			})
		}
	}
}

// chargeHourly charges the wallet with a limit of 10 units an hour that has the threshold.
func (f *fixture) chargeHourly(amount int64, t budget.Threshold) {
	f.Helper()
	_, err := do(f, func(ctx context.Context, tx pgx.Tx) (budget.Receipt, error) {
		hourly := budget.Limit{Max: 10, Window: time.Hour}.WithThresholds(t)
		return f.ledger.Charge(ctx, tx, budget.Charge{Scope: "ann", Amount: amount, Limits: []budget.Limit{hourly}})
	})
	require.NoError(f, err)
}

// A lot that begins arms a threshold where the balance has then come back far enough, however many ends of other lots a
// call leaves to later ones: lots that end after it still count then, and so do units that go on.
func TestThresholds_AreArmedByWhatALotFindsWhenItBegins(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		lots []wallet.Grant
		arms bool
	}{
		"lots that end later": {[]wallet.Grant{
			{Amount: 3, Ends: wallet.After(4 * time.Hour)}, {Amount: 3, Ends: wallet.After(5 * time.Hour)}}, true},
		"lots that ended before": {[]wallet.Grant{
			{Amount: 3, Ends: wallet.After(90 * time.Minute)}, {Amount: 3, Ends: wallet.After(100 * time.Minute)}}, false},
		"units that go on": {[]wallet.Grant{
			{Amount: 6, Ends: wallet.After(90 * time.Minute), Roll: &wallet.Roll{Cap: 4, Lasts: wallet.For(365 * day)}}}, true},
		"units that went on and ended": {[]wallet.Grant{
			{Amount: 6, Ends: wallet.After(90 * time.Minute), Roll: &wallet.Roll{Cap: 4, Lasts: wallet.For(10 * time.Minute)}}}, false},
		"units that go on and end later": {[]wallet.Grant{
			{Amount: 6, Ends: wallet.After(90 * time.Minute), Roll: &wallet.Roll{Cap: 4, Lasts: wallet.For(2 * time.Hour)}}}, true},
	} {
		for by, call := range map[string]func(f *fixture){
			"release, which leaves ends to later calls": func(f *fixture) {
				f.endsPerCall(1)
				f.release("r")
			},
			"draw": func(f *fixture) { f.draw(2) },
			"charge with a threshold of a window": func(f *fixture) {
				f.chargeHourly(1, budget.Threshold{Name: "hourly", Used: 1})
				require.Equal(f, []string{"ann hourly 8"}, f.crossed())
			},
		} {
			if by == "charge with a threshold of a window" && name != "lots that end later" {
				continue
			}
			t.Run(name+", "+by, func(t *testing.T) {
				t.Parallel()
				f := setUpReporting(t, low(10), nil)
				f.grant(wallet.Grant{Amount: 1, Ends: wallet.After(time.Hour)})
				for _, g := range test.lots {
					f.grant(g)
				}
				f.grant(wallet.Grant{Amount: 2, Reference: "ever"})
				f.place("r", 1, 2*day)
				require.Equal(t, []string{"ann low 8"}, f.crossed())
				f.grant(wallet.Grant{Amount: 6, Starts: noon.Add(2 * time.Hour), Ends: wallet.After(365 * day)})
				f.clock.Set(noon.Add(6 * time.Hour))
				call(f)
				told := f.crossed()
				require.Equal(t, test.arms && by == "draw", len(told) == 1, told)
				require.Equal(t, len(told) == 1 || !test.arms, f.remembers())
			})
		}
	}
}

// remembers is whether the last entry has a threshold of the balance that was reported.
func (f *fixture) remembers() (told bool) {
	f.Helper()
	sql := `select exists (select from jsonb_each(e.crossed) x where x.value ? 'rearm')
		from metered.ledger e where e.scope = 'ann' order by e.seq desc limit 1`
	require.NoError(f, f.pool.QueryRow(f.Context(), sql).Scan(&told))
	return told
}

// A wallet is below a level that no call has judged, from its first grant or a charge without thresholds on. A sweep that only brings units
// lowers nothing, nor do units that come back: they do not report the level, and no entry of theirs has it. The next call that lowers the
// balance reports it, once.
func TestThresholds_WhatOnlyBringsUnitsReportsNone(t *testing.T) {
	t.Parallel()
	units, renewals := wallet.Revoke{Reference: "ever", Amount: 1}, wallet.Revoke{Reference: "plan", Renewals: true}
	for by, call := range map[string]func(f *fixture, revoked bool){
		"sweep":    func(f *fixture, _ bool) { f.expire() },
		"units":    func(f *fixture, revoked bool) { f.comesBack(units, revoked) },
		"renewals": func(f *fixture, revoked bool) { f.comesBack(renewals, revoked) },
	} {
		for _, revoked := range []bool{false, true} {
			t.Run(fmt.Sprint(by, ", revoked before ", revoked), func(t *testing.T) {
				t.Parallel()
				f := setUpReporting(t, low(45), nil)
				f.grant(wallet.Grant{Amount: 9, Reference: "ever"})
				f.grant(wallet.Grant{Amount: 1, Reference: "plan", Ends: wallet.EachPeriod(daily)})
				if revoked {
					f.grant(wallet.Grant{Amount: 60})
					for _, r := range []wallet.Revoke{units, renewals} {
						_, err := f.revoke(r)
						require.NoError(t, err)
					}
					f.charge(59)
				}
				f.grant(wallet.Grant{Amount: 4, Starts: noon.Add(time.Hour)})
				f.clock.Set(noon.Add(2 * time.Hour))
				call(f, revoked)
				require.Empty(t, f.crossed())
				require.False(t, f.remembers())
				f.draw(1)
				require.Len(t, f.crossed(), 1)
				f.draw(1)
				require.Empty(t, f.crossed())
			})
		}
	}
}

// comesBack takes a revocation back, if there was one.
func (f *fixture) comesBack(r wallet.Revoke, revoked bool) {
	f.Helper()
	back, err := f.reinstate(r)
	require.NoError(f, err)
	require.Equal(f, revoked, !back.Replayed)
}

// charge charges the wallet without limits.
func (f *fixture) charge(amount int64) {
	f.Helper()
	_, err := do(f, func(ctx context.Context, tx pgx.Tx) (budget.Receipt, error) {
		return f.ledger.Charge(ctx, tx, budget.Charge{Scope: "ann", Amount: amount})
	})
	require.NoError(f, err)
}
