package wallet_test

import (
	"context"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/leases"
	"github.com/pgmetered/metered/wallet"
)

var noon = time.Date(2026, 11, 21, 12, 0, 0, 0, time.UTC)

const day = 24 * time.Hour

// fixture is a book in a database of its own, with a clock that stands at noon.
type fixture struct {
	*testing.T
	pool   *pgxpool.Pool
	clock  *pgtest.Clock
	ledger *budget.Ledger
	holds  *holds.Book
	carver *leases.Carver
	book   *wallet.Book
}

func setUp(t *testing.T, cfg wallet.Config) *fixture {
	t.Helper()
	f := &fixture{T: t, pool: pgtest.Open(t)}
	f.clock = pgtest.SetClock(t, f.pool, noon)
	var err error
	f.ledger, err = budget.New(budget.Config{LockTimeout: time.Minute})
	require.NoError(t, err)
	f.holds, err = holds.New(f.ledger, holds.Config{MaxTTL: 365 * day, MaxLifetime: 365 * day})
	require.NoError(t, err)
	f.carver, err = leases.NewCarver(f.ledger)
	require.NoError(t, err)
	f.book, err = wallet.New(f.ledger, cfg)
	require.NoError(t, err)
	t.Cleanup(f.verify)
	return f
}

// verify is that of the ledger, of which every test ends with no difference.
func (f *fixture) verify() {
	f.Helper()
	r, err := f.ledger.Verify(context.Background(), f.pool, budget.VerifyOptions{})
	require.NoError(f, err)
	require.Empty(f, r.Differences)
}

// do runs fn in a transaction of its own, which commits if fn returns no error.
func do[R any](f *fixture, fn func(ctx context.Context, tx pgx.Tx) (R, error)) (r R, err error) {
	err = pgx.BeginFunc(f.Context(), f.pool, func(tx pgx.Tx) error {
		r, err = fn(f.Context(), tx)
		return err
	})
	return r, err
}

func (f *fixture) grant(g wallet.Grant) wallet.Granted {
	f.Helper()
	if g.Wallet == "" {
		g.Wallet = "ann"
	}
	r, err := do(f, func(ctx context.Context, tx pgx.Tx) (wallet.Granted, error) { return f.book.Grant(ctx, tx, g) })
	require.NoError(f, err)
	return r
}

func (f *fixture) tryDraw(d wallet.Draw) (wallet.Drawn, error) {
	if d.Wallet == "" {
		d.Wallet = "ann"
	}
	return do(f, func(ctx context.Context, tx pgx.Tx) (wallet.Drawn, error) { return f.book.Draw(ctx, tx, d) })
}

func (f *fixture) draw(amount int64) wallet.Drawn {
	f.Helper()
	d, err := f.tryDraw(wallet.Draw{Amount: amount})
	require.NoError(f, err)
	return d
}

func (f *fixture) refund(seq, amount int64) {
	f.Helper()
	_, err := do(f, func(ctx context.Context, tx pgx.Tx) (budget.Posted, error) {
		return f.ledger.Refund(ctx, tx, budget.Refund{Scope: "ann", Seq: seq, Amount: amount})
	})
	require.NoError(f, err)
}

func (f *fixture) balance() wallet.Balance {
	f.Helper()
	b, err := f.book.Balance(f.Context(), f.pool, "ann")
	require.NoError(f, err)
	return b
}

// left has the units of each lot that has any, by its reference.
func (f *fixture) left() map[string]int64 {
	f.Helper()
	all := map[string]int64{}
	for _, l := range f.balance().Lots {
		if l.Units > 0 {
			all[l.Reference] += l.Units
		}
	}
	return all
}

// has asserts that a draw of one more unit than there is is refused, and says how much there is.
func (f *fixture) has(units int64) {
	f.Helper()
	require.EqualValues(f, units, f.balance().Units)
	_, err := f.tryDraw(wallet.Draw{Amount: units + 1})
	var exceeded *budget.ExceededError
	require.ErrorAs(f, err, &exceeded)
	require.EqualValues(f, units, exceeded.Refusals[0].Available)
	if f.balance().Held == 0 {
		require.Equal(f, budget.Never, exceeded.Refusals[0].RetryAfter)
	}
}

// kinds are those of the wallet's entries, from one on, with their amounts.
func (f *fixture) kinds(from int64) (kinds []string, amounts []int64) {
	f.Helper()
	for e, err := range f.ledger.Entries(f.Context(), f.pool, "ann", budget.EntriesOptions{After: from - 1}) {
		require.NoError(f, err)
		kinds, amounts = append(kinds, string(e.Kind)), append(amounts, e.Amount)
	}
	return kinds, amounts
}

// lasting is how long units last that rolled over, for ever for 0.
func lasting(d time.Duration) wallet.Span {
	if d == 0 {
		return wallet.Span{}
	}
	return wallet.For(d)
}
