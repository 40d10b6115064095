package wallet_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/wallet"
)

// seriesOf is what the readers of usage say about ann, from since on, in parts of an hour and as a whole, without
// numbers of entries.
func (f *fixture) seriesOf(since time.Time) (said []string) {
	f.Helper()
	hours, err := f.ledger.Series(f.Context(), f.pool, "ann", since, f.clock.Now().Truncate(time.Hour).Add(3*time.Hour), budget.Hour, nil)
	require.NoError(f, err)
	var sum int64
	for _, u := range hours {
		said = append(said, fmt.Sprintf("%s: %d charged by %d, %d credited, %d refunded of %d", u.From.Format(time.DateTime),
			u.Charged, u.Charges, u.Credited, u.RefundsMade, u.RefundedOfCharged))
		sum += u.Credited
	}
	now := f.clock.Now().Add(time.Microsecond)
	whole, err := f.ledger.UsageBetween(f.Context(), f.pool, "ann", since, now)
	require.NoError(f, err)
	require.Equal(f, sum, whole.Credited)
	u, err := f.ledger.Usage(f.Context(), f.pool, budget.Query{Scope: "ann"}, budget.Query{Scope: "ann", Window: 5 * time.Hour})
	require.NoError(f, err)
	require.Equal(f, u[0].Credited, whole.Credited, "all of it is after since")
	for i := range u {
		u[i].Seq = 0
	}
	old := pgtest.Value[string](f, f.pool, `select json_agg(json_build_array(spent, refunded, credited, refunded_after, unsettled))::text
		from metered.usage_at('ann', array['`+since.Format(time.RFC3339)+`', '`+now.Format(time.RFC3339Nano)+`']::timestamptz[])`)
	typed := pgtest.Value[string](f, f.pool, `select metered.v1_usage('ann')::text || metered.v1_balance('ann')`)
	return append(said, fmt.Sprint(whole), fmt.Sprint(u), old, typed)
}

// What lots and holds of a wallet brought and took is of the hour in which it happened, whether it is written or not:
// in a wallet that was never swept, in one that is swept before it is read, and in one that is swept each hour.
func TestSeries_OfAWalletIsTheSameWhoeverSwept(t *testing.T) {
	t.Parallel()
	histories := map[string]func(f *fixture){
		"a plan whose units roll over": func(f *fixture) {
			f.grant(wallet.Grant{Amount: 20, Reference: "plan", Ends: wallet.EachPeriod(daily),
				Roll: &wallet.Roll{Cap: 15, Lasts: wallet.For(36 * time.Hour), Times: 2, Shared: true}})
			f.draw(3)
		},
		"lots that end, and begin later": func(f *fixture) {
			f.grant(wallet.Grant{Amount: 5, Ends: wallet.After(90 * time.Minute)})
			f.grant(wallet.Grant{Amount: 7, Ends: wallet.After(4 * time.Hour), Roll: &wallet.Roll{Cap: 4, Lasts: wallet.For(3 * time.Hour)}})
			f.grant(wallet.Grant{Amount: 11, Starts: noon.Add(3 * time.Hour), Ends: wallet.At(noon.Add(6 * time.Hour))})
			f.grant(wallet.Grant{Amount: 13, Starts: noon.Add(8 * time.Hour)})
		},
		"holds that give units back to lots that have ended": func(f *fixture) {
			f.grant(wallet.Grant{Amount: 20, Ends: wallet.After(2 * time.Hour)})
			f.grant(wallet.Grant{Amount: 50})
			f.place("h1", 3, time.Hour)
			f.place("h2", 5, 3*time.Hour)
			require.NoError(f, f.placeAtLeast("h3", 7, 2, 5*time.Hour))
			f.place("h4", 2, 7*time.Hour+30*time.Minute)
		},
		"lots for uses, and overdraft": func(f *fixture) {
			f.grant(wallet.Grant{Amount: 20, Reference: "images", Uses: []string{"images"}, Starts: noon.Add(2 * time.Hour), Ends: wallet.At(noon.Add(9 * time.Hour))})
			f.grant(wallet.Grant{Amount: 6, Ends: wallet.After(4 * time.Hour)})
			f.mustDraw(toDraw{Amount: 9, Note: budget.Note{Use: "images"}})
			f.grant(wallet.Grant{Amount: 8, Starts: noon.Add(5 * time.Hour), Ends: wallet.At(noon.Add(11 * time.Hour))})
			require.NoError(f, f.placeAtLeast("h1", 4, 1, 6*time.Hour))
		},
		"more than one call ends": func(f *fixture) {
			for n := range 40 {
				f.grant(wallet.Grant{Amount: 1 + int64(n), Ends: wallet.After(time.Duration(30+20*n) * time.Minute),
					Roll: &wallet.Roll{Cap: 2, Lasts: wallet.For(150 * time.Minute)}})
			}
		},
	}
	for name, history := range histories {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var never []string
			for _, swept := range []string{"never", "before", "each hour"} {
				f := setUp(t, wallet.Config{Overdraft: 10})
				history(f)
				for range 31 {
					f.clock.Advance(time.Hour)
					if swept == "each hour" {
						f.sweeps()
					}
				}
				if swept == "before" {
					f.sweeps()
				}
				said := f.seriesOf(noon.Add(-time.Hour))
				if swept == "never" {
					never = said
					f.sweeps()
					said = f.seriesOf(noon.Add(-time.Hour))
				}
				require.Equal(t, never, said, swept)
			}
		})
	}
}
