package wallet_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/wallet"
)

// A reservation that expires draws its charge from its lots, in their order, also from one that has ended meanwhile.
func TestReservation_AMinimumIsDrawnFromItsOwnLots(t *testing.T) {
	t.Parallel()
	f := setUp(t, wallet.Config{})
	f.grant(wallet.Grant{Wallet: "ann", Amount: 20, Ends: wallet.At(f.clock.Now().Add(time.Minute))})
	f.grant(wallet.Grant{Wallet: "ann", Amount: 50})
	line := f.book.Line("ann", 60)
	line.AtLeast = 30
	_, err := do(f, func(ctx context.Context, tx pgx.Tx) (holds.Hold, error) {
		return f.holds.Place(ctx, tx, holds.Placement{ID: "h", TTL: 5 * time.Minute, Lines: []holds.Line{line}})
	})
	require.NoError(t, err)
	f.clock.Advance(10 * time.Minute)
	f.has(40)
	_, err = f.holds.Sweep(t.Context(), f.pool, holds.SweepOptions{})
	require.NoError(t, err)
	f.has(40)
	f.verify()
	f.draw(40)
	f.has(0)
	f.verify()
}

// looks has every answer about a wallet: of reads, of a look that takes no lock, and of a write.
type looks struct {
	Units, Held, Used, HeldOfLimit, Available int64
	Lots                                      map[string][2]int64
}

func (f *fixture) looks(name string, byLot bool) looks {
	f.Helper()
	b, err := f.book.Balance(f.Context(), f.pool, name)
	require.NoError(f, err)
	u, err := f.ledger.Usage(f.Context(), f.pool, budget.Query{Scope: name})
	require.NoError(f, err)
	l := looks{Units: b.Units, Held: b.Held, Used: u[0].Used, HeldOfLimit: u[0].Held, Lots: map[string][2]int64{}}
	require.Equal(f, b.Units, -u[0].Used-u[0].Held, "%s", name)
	for _, lot := range b.Lots {
		if byLot {
			l.Lots[lot.Reference] = [2]int64{lot.Units, lot.Held}
		}
	}
	room := b.Units + overdraftOfLooks
	var exceeded *budget.ExceededError
	_, err = f.ledger.Check(f.Context(), f.pool, f.book.Charge(name, max(0, room)+1))
	require.ErrorAs(f, err, &exceeded, "%s", name)
	require.Equal(f, room, exceeded.Refusals[0].Available, "%s", name)
	if room > 0 {
		_, err = f.ledger.Check(f.Context(), f.pool, f.book.Charge(name, room))
		require.NoError(f, err, "%s", name)
		tx, err := f.pool.Begin(f.Context())
		require.NoError(f, err)
		_, err = f.drawIn(f.Context(), tx, toDraw{Wallet: name, Amount: room})
		require.NoError(f, err, "%s", name)
		require.NoError(f, tx.Rollback(f.Context()))
	}
	_, err = f.tryDraw(toDraw{Wallet: name, Amount: max(0, room) + 1})
	require.ErrorAs(f, err, &exceeded, "%s", name)
	l.Available = exceeded.Refusals[0].Available
	require.Equal(f, room, l.Available, "%s", name)
	return l
}

const overdraftOfLooks = 15

// A reader gets the same answers before and after a sweep: about minimums that are due, lots that have ended, overdraft and rollovers.
func TestReservations_WithMinimumsReadTheSameBeforeAndAfterTheSweep(t *testing.T) {
	t.Parallel()
	for _, seed := range []uint64{1795480059715089347, pgtest.Seed(t)}[:pgtest.Sizes(1, 2, 2)] { // the first: a lot that is all held ends, unswept
		t.Run(fmt.Sprint(seed), func(t *testing.T) { minimumsReadTheSame(t, seed) })
	}
}

func minimumsReadTheSame(t *testing.T, seed uint64) {
	r := rand.New(rand.NewPCG(seed, 0))
	f := setUp(t, wallet.Config{Overdraft: overdraftOfLooks})
	const wallets = 10
	rolls := make([]bool, wallets)
	for w := range wallets {
		name := fmt.Sprint("w", w)
		for n := range 1 + r.IntN(4) {
			g := wallet.Grant{Wallet: name, Amount: 1 + r.Int64N(20), Reference: fmt.Sprint(n), Priority: new(int)}
			*g.Priority = r.IntN(2)
			if r.IntN(3) > 0 {
				g.Ends = wallet.After(time.Duration(1+r.IntN(8)) * time.Minute)
				if r.IntN(4) == 0 {
					g.Roll = &wallet.Roll{Cap: 1 + r.Int64N(10), Lasts: lasting([]time.Duration{0, 4 * time.Minute}[r.IntN(2)])}
					rolls[w] = true
				}
			}
			f.grant(g)
		}
		if r.IntN(2) == 0 {
			_, _ = f.tryDraw(toDraw{Wallet: name, Amount: 1 + r.Int64N(20)})
		}
		for n := range 1 + r.IntN(3) {
			line := f.book.Line(name, 1+r.Int64N(25))
			line.AtLeast = r.Int64N(line.Amount + 1)
			_, _ = do(f, func(ctx context.Context, tx pgx.Tx) (holds.Hold, error) {
				return f.holds.Place(ctx, tx, holds.Placement{ID: fmt.Sprint(name, "-", n), TTL: time.Duration(1+r.IntN(8)) * time.Minute, Lines: []holds.Line{line}})
			})
		}
	}
	f.clock.Advance(5 * time.Minute)
	before := make([]looks, wallets)
	for w := range before {
		before[w] = f.looks(fmt.Sprint("w", w), !rolls[w])
	}
	_, err := f.holds.Sweep(t.Context(), f.pool, holds.SweepOptions{})
	require.NoError(t, err)
	_, err = f.book.Sweep(t.Context(), f.pool, wallet.SweepOptions{})
	require.NoError(t, err)
	for w := range before {
		require.Equal(t, before[w], f.looks(fmt.Sprint("w", w), !rolls[w]), "wallet %d", w)
	}
	f.verify()
}
