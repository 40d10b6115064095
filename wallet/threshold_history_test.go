package wallet_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/wallet"
)

// Over random histories, reports agree with a naive reading of balances: low at 50 or less, armed again at 55 or more.
// A draw is armed by the balance before it. A call that takes credit back, if it wrote anything, is armed by the
// balance after it. So is a grant, which reports nothing. The short form finds a grant that arms nothing.
func TestThresholds_AreThoseOfANaiveReading(t *testing.T) {
	t.Parallel()
	for seed := range pgtest.Size[uint64](2, 4) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			t.Parallel()
			cfg := low(50)
			cfg.Thresholds[0].Spent = seed%2 == 1 // the same, where nothing is held
			f, r := setUpReporting(t, cfg, nil), rand.New(rand.NewPCG(seed, 1))
			var references []string
			armed, tellings, byEnds := true, 0, 0
			for step := range pgtest.Size(80, 150) {
				f.clock.Advance(time.Duration(r.IntN(5)) * 10 * time.Minute)
				before, entries := f.balance().Units, f.entries()
				kind := r.IntN(7)
				if len(references) == 0 {
					kind = 0
				}
				var err error
				switch kind {
				case 0, 1:
					references = append(references, fmt.Sprint("g", step))
					g := wallet.Grant{Amount: 20 + r.Int64N(50), Reference: references[len(references)-1]}
					if g.Ends = wallet.After(time.Duration(1+r.IntN(3)) * time.Hour); r.IntN(3) == 0 {
						g.Roll = &wallet.Roll{Cap: 1 + r.Int64N(20), Lasts: wallet.For(time.Hour)}
					}
					f.grant(g)
				case 2, 3:
					if before > 0 {
						f.draw(1 + r.Int64N(min(before, 10)))
					}
				case 4:
					f.expire()
				case 5:
					_, err = f.revoke(wallet.Revoke{Reference: references[r.IntN(len(references))], Amount: r.Int64N(20)})
				case 6:
					_, err = do(f, func(ctx context.Context, tx pgx.Tx) (wallet.Granted, error) {
						return f.book.Rollover(ctx, tx, wallet.Rollover{Wallet: "ann", Reference: references[r.IntN(len(references))], Cap: 1 + r.Int64N(9), For: time.Hour})
					})
				}
				require.NoError(t, err)
				after, want := f.balance().Units, []string{}
				if f.entries() > entries {
					had := after
					if kind == 2 || kind == 3 {
						had = before
					}
					armed = armed || had >= 55
					if armed && after <= 50 && kind > 1 {
						armed, want = false, append(want, fmt.Sprintf("ann low %d", after))
						tellings++
						if kind > 3 {
							byEnds++
						}
					}
				}
				told := f.crossed()
				for i := range told {
					told[i] = strings.TrimSuffix(told[i], " earlier")
				}
				require.Equal(t, want, told, "step %d, kind %d, %d units before, %d after", step, kind, before, after)
			}
			t.Logf("%d reports, %d of them by calls that take credit back", tellings, byEnds)
			require.Positive(t, byEnds)
			f.verify()
		})
	}
}

// entries are how many the wallet has.
func (f *fixture) entries() (n int64) {
	f.Helper()
	for e, err := range f.ledger.Entries(f.Context(), f.pool, "ann", budget.EntriesOptions{NewestFirst: true}) {
		require.NoError(f, err)
		return e.Seq
	}
	return 0
}
