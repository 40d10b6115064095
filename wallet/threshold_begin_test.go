package wallet_test

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

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
				var told bool
				sql := "select e.crossed is not null from metered.ledger e where e.scope = 'ann' order by e.seq desc limit 1"
				require.NoError(t, f.pool.QueryRow(t.Context(), sql).Scan(&told))
				require.True(t, told)
			})
		}
	}
}
