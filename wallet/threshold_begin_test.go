package wallet_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/wallet"
)

// A lot that has begun arms a threshold, and the call that takes units back reports it again, whoever wrote that the lot
// began.
func TestRevoke_TellsAThresholdThatALotArmedUnwritten(t *testing.T) {
	t.Parallel()
	for name, after := range map[string]time.Duration{"at the begin": 12 * time.Hour, "later": day} {
		for _, swept := range []bool{true, false} {
			t.Run(fmt.Sprint(name, ", swept ", swept), func(t *testing.T) {
				t.Parallel()
				f := setUpReporting(t, low(25), nil)
				first := f.grant(wallet.Grant{Amount: 20, Reference: "plan", Renews: daily, RollCap: 12, RollFor: day})
				f.draw(6)
				require.Equal(t, []string{"ann low 14"}, f.crossed())
				f.clock.Advance(after)
				if swept {
					f.sweeps()
				}
				require.EqualValues(t, 32, f.balance().Units)
				r, err := f.revoke(wallet.Revoke{Lot: first.Lot, Amount: 8})
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
