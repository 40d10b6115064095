package wallet_test

import (
	"context"
	"fmt"
	"maps"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/wallet"
)

// The balance of each lot as it was at many times of a random history, ends and rollovers that were written later among them.
func TestLots_TheStatementHasTheBalanceByLotOfAPastTime(t *testing.T) {
	t.Parallel()
	f := setUp(t, wallet.Config{Overdraft: 20})
	random := rand.New(rand.NewPCG(32, 9))
	var times []time.Time
	var balances []map[int64]int64
	var drawn []wasDrawn
	now := noon
	for i := range 80 {
		switch n := random.IntN(10); {
		case n < 3 || i == 0:
			g := wallet.Grant{Amount: 1 + random.Int64N(50), Reference: fmt.Sprint(i), Priority: new(int)}
			*g.Priority = random.IntN(2)
			if random.IntN(4) > 0 {
				g.Ends = wallet.After(time.Duration(1+random.IntN(5)) * day)
				if random.IntN(3) == 0 {
					g.Roll = &wallet.Roll{Cap: 10, Lasts: wallet.For(2 * day)}
				}
			}
			f.grant(g)
		case n < 7:
			d, err := f.tryDraw(toDraw{Amount: 1 + random.Int64N(40), UpTo: true})
			if err == nil {
				drawn = append(drawn, d)
			}
		case n < 8 && len(drawn) > 0:
			f.refund(drawn[len(drawn)-1].Seq, 1)
			drawn = drawn[:len(drawn)-1]
		case n < 9:
			_, err := do(f, func(ctx context.Context, tx pgx.Tx) (wallet.Revoked, error) {
				return f.book.Revoke(ctx, tx, wallet.Revoke{Wallet: "ann", Lot: 1 + random.Int64N(3), Amount: 3})
			})
			require.NoError(t, err)
		}
		now = now.Add(time.Duration(random.Int64N(int64(day))))
		f.clock.Set(now)
		lots := map[int64]int64{}
		for _, l := range f.balance().Lots {
			if l.Units > 0 {
				lots[l.Lot] = l.Units
			}
		}
		times, balances = append(times, now.Truncate(time.Microsecond).Add(time.Microsecond)), append(balances, lots)
		now = now.Add(time.Second)
		f.clock.Set(now)
	}
	f.grant(wallet.Grant{Amount: 1}) // which writes the ends that are due
	some := 0
	for i, at := range times {
		rows, err := f.pool.Query(t.Context(), `select lot, sum(change)::bigint from metered.lots_statement
			where scope = 'ann' and at < $1 and lot is not null group by lot having sum(change) <> 0`, at)
		require.NoError(t, err)
		got := map[int64]int64{}
		var lot, units int64
		_, err = pgx.ForEachRow(rows, []any{&lot, &units}, func() error { got[lot] = units; return nil })
		require.NoError(t, err)
		require.True(t, maps.Equal(balances[i], got), "%d: %v, want %v", i, got, balances[i])
		some += len(got)
	}
	require.Greater(t, some, 50)
}
