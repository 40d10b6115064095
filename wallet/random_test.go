package wallet_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/leases"
	"github.com/pgmetered/metered/wallet"
)

// Random calls on a wallet, in random order: Verify finds no difference after each step, a read and the next draw
// agree, and the sum of announced units is the sum of lapsed units.
func TestWallet_AddsUpInRandomHistories(t *testing.T) {
	t.Parallel()
	r := pgtest.Random(t)
	var told int64
	f := setUp(t, wallet.Config{Overdraft: 20, Subscribers: []wallet.Subscriber{func(_ context.Context, _ pgx.Tx, b wallet.Breakage) error {
		told += b.Amount
		return nil
	}}})
	ctx := t.Context()
	var draws []wasDrawn
	var open, captured, children []string
	carver, err := leases.NewCarver(f.ledger)
	require.NoError(t, err)
	grants := 0
	pick := func(of *[]string) string {
		i := r.IntN(len(*of))
		id := (*of)[i]
		*of = append((*of)[:i], (*of)[i+1:]...)
		return id
	}
	for n := range 60 {
		what := ""
		var err error
		switch k := r.IntN(23); {
		case k < 4:
			g := wallet.Grant{Wallet: "ann", Amount: 1 + r.Int64N(30), Reference: fmt.Sprint(grants), Priority: new(int)}
			*g.Priority = r.IntN(2)
			if r.IntN(4) > 0 {
				g.Ends = wallet.After(time.Duration(1+r.IntN(10)) * time.Hour)
				if r.IntN(3) == 0 {
					g.Roll = &wallet.Roll{Cap: 1 + r.Int64N(10), Lasts: lasting([]time.Duration{0, time.Hour, 5 * time.Hour}[r.IntN(3)])}
				}
			}
			g.LateRefunds = []time.Duration{wallet.Lapse, wallet.Forever, 2 * time.Hour}[r.IntN(3)]
			what = fmt.Sprintf("%+v", g)
			f.grant(g)
			grants++
		case k < 8:
			d := toDraw{Amount: 1 + r.Int64N(25), UpTo: r.IntN(2) == 0}
			what = fmt.Sprintf("%+v", d)
			var drawn wasDrawn
			if drawn, err = f.tryDraw(d); err == nil {
				draws = append(draws, drawn)
			}
		case k < 11:
			id := fmt.Sprint("h", n)
			what = "place"
			_, err = do(f, func(ctx context.Context, tx pgx.Tx) (holds.Hold, error) {
				return f.holds.Place(ctx, tx, holds.Placement{ID: id, TTL: time.Duration(1+r.IntN(6)) * time.Hour, Lines: []holds.Line{f.book.Line("ann", 1+r.Int64N(15))}})
			})
			if err == nil {
				open = append(open, id)
			}
		case k < 13 && len(open) > 0:
			c := holds.Capture{IDs: []string{pick(&open)}, Over: holds.OverIfFits, Lines: []holds.Line{{Scope: "ann", Amount: 1 + r.Int64N(15), Limits: []budget.Limit{f.book.Limit()}}}}
			what = fmt.Sprintf("%+v", c)
			if _, err = do(f, func(ctx context.Context, tx pgx.Tx) ([]holds.Hold, error) { return f.holds.Capture(ctx, tx, c) }); err == nil {
				captured = append(captured, c.IDs[0])
			}
		case k < 14 && len(open) > 0:
			ids := []string{pick(&open)}
			if len(open) > 0 {
				ids = append(ids, pick(&open))
			}
			what = "release"
			_, err = do(f, func(ctx context.Context, tx pgx.Tx) ([]holds.Hold, error) {
				return f.holds.Release(ctx, tx, holds.Release{IDs: ids})
			})
		case k < 16 && len(draws) > 0:
			d := draws[r.IntN(len(draws))]
			what = fmt.Sprintf("refund of %d", d.Seq)
			_, err = do(f, func(ctx context.Context, tx pgx.Tx) (budget.Posted, error) {
				return f.ledger.Refund(ctx, tx, budget.Refund{Scope: "ann", Seq: d.Seq, Amount: 1 + r.Int64N(d.Amount)})
			})
		case k < 17 && len(captured) > 0:
			id := pick(&captured)
			what = "refund of " + id
			_, err = do(f, func(ctx context.Context, tx pgx.Tx) ([]holds.Hold, error) {
				return f.holds.Return(ctx, tx, holds.Return{IDs: []string{id}, All: true})
			})
		case k < 18 && grants > 0:
			what = "revoke"
			_, err = f.revoke(wallet.Revoke{Reference: fmt.Sprint(r.IntN(grants)), Amount: r.Int64N(20)})
		case k < 19 && grants > 0:
			what = "roll over"
			f.rollover(wallet.Rollover{Reference: fmt.Sprint(r.IntN(grants)), Cap: 1 + r.Int64N(10), For: 3 * time.Hour})
		case k < 20:
			child := fmt.Sprint("c", n)
			what = "carve"
			_, err = do(f, func(ctx context.Context, tx pgx.Tx) (leases.Lease, error) {
				return carver.Carve(ctx, tx, leases.Carving{From: f.book.Charge("ann", 1+r.Int64N(15)), Child: child, TTL: day})
			})
			if err == nil {
				children = append(children, child)
			}
		case k < 21 && len(children) > 0:
			child := pick(&children)
			what = "close " + child
			used := r.Int64N(20) // more than it has, perhaps
			_, err = do(f, func(ctx context.Context, tx pgx.Tx) (leases.Lease, error) {
				if used > 0 {
					if _, err := f.ledger.Charge(ctx, tx, budget.Charge{Scope: child, Amount: used}); err != nil {
						return leases.Lease{}, err
					}
				}
				return carver.End(ctx, tx, child, budget.Note{})
			})
		case k < 22:
			what = "repair"
			back := f.clock.Now()
			f.clock.Advance(time.Duration(1+r.IntN(300)) * time.Minute)
			_, err = f.book.Sweep(ctx, f.pool, wallet.SweepOptions{})
			require.NoError(t, err)
			_, _ = f.tryDraw(toDraw{Amount: 1})
			f.clock.Set(back)
			_, err = do(f, func(ctx context.Context, tx pgx.Tx) (budget.ClockState, error) {
				return f.ledger.RepairClock(ctx, tx, "ann", budget.Note{})
			})
		default:
			what = "sweeps"
			_, err = f.book.Sweep(ctx, f.pool, wallet.SweepOptions{})
			require.NoError(t, err)
			_, err = f.holds.Sweep(ctx, f.pool, holds.SweepOptions{})
		}
		if err != nil {
			what += ": " + err.Error()
			refused := errors.Is(err, budget.ErrExceeded) || errors.Is(err, budget.ErrRefundExceeds) || errors.Is(err, holds.ErrState) || errors.Is(err, holds.ErrNotReturnable)
			require.True(t, refused, "step %d: %s", n, what)
		}
		check, err := f.ledger.Verify(ctx, f.pool, budget.VerifyOptions{})
		require.NoError(t, err)
		require.Empty(t, check.Differences, "step %d: %s", n, what)
		f.clock.Advance(time.Duration(r.IntN(60)) * time.Minute)
		b := f.balance()
		var sum int64
		for _, l := range b.Lots {
			sum += l.Units
		}
		require.Equal(t, max(0, b.Units), sum, "step %d: %s", n, what)
		_, err = f.ledger.Check(ctx, f.pool, f.book.Charge("ann", max(1, b.Units+21))) // a child may have overspent
		require.ErrorIs(t, err, budget.ErrExceeded)
		if b.Units+20 > 0 {
			tx, err := f.pool.Begin(ctx)
			require.NoError(t, err)
			d, err := f.drawIn(ctx, tx, toDraw{Wallet: "ann", Amount: b.Units + 20})
			require.NoError(t, err, "step %d: %s", n, what)
			require.Equal(t, max(0, 20+min(0, b.Units)), d.Overdrawn)
			require.NoError(t, tx.Rollback(ctx))
		}
	}
	f.clock.Advance(1000 * time.Hour)
	_, err = f.holds.Sweep(ctx, f.pool, holds.SweepOptions{})
	require.NoError(t, err)
	_, err = f.book.Sweep(ctx, f.pool, wallet.SweepOptions{})
	require.NoError(t, err)
	var lapsed int64
	require.NoError(t, f.pool.QueryRow(ctx, "select coalesce(sum(amount), 0)::bigint from metered.ledger where kind = 'e'").Scan(&lapsed))
	require.Equal(t, lapsed, told)
}
