package wallet_test

import (
	"cmp"
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

// toDraw is a charge of a wallet.
type toDraw struct {
	Wallet string
	Amount int64
	UpTo   bool
	Note   budget.Note
}

// of is the charge, which asks for the lots.
func (d toDraw) of(book *wallet.Book) budget.Charge {
	c := book.Charge(d.Wallet, d.Amount)
	c.UpTo, c.Note, c.Lots = d.UpTo, d.Note, true
	return c
}

// upTo is the charge as far as its limits admit it.
func upTo(c budget.Charge) budget.Charge {
	c.UpTo = true
	return c
}

// wasDrawn is the answer: Left is the balance, and Overdrawn are the units that no lot covers.
type wasDrawn struct {
	budget.Posted
	Overdrawn, Left int64
}

func drawnBy(p budget.Posted) wasDrawn {
	d := wasDrawn{Posted: p, Overdrawn: p.Amount}
	for _, l := range p.Lots {
		d.Overdrawn -= l.Amount
	}
	if len(p.Standings) > 0 {
		d.Left = -p.Standings[0].Used - p.Standings[0].Held
	}
	if len(p.Lots) == 0 { // perhaps of a scope that no grant made a wallet
		d.Overdrawn = max(0, min(d.Overdrawn, -d.Left))
	}
	return d
}

func drawIn(ctx context.Context, tx pgx.Tx, l *budget.Ledger, b *wallet.Book, d toDraw) (wasDrawn, error) {
	r, err := l.Charge(ctx, tx, d.of(b))
	if err != nil {
		return wasDrawn{}, err
	}
	r.Entries[0].At = r.Entries[0].At.UTC()
	return drawnBy(r.Entries[0]), nil
}

func (f *fixture) drawIn(ctx context.Context, tx pgx.Tx, d toDraw) (wasDrawn, error) {
	return drawIn(ctx, tx, f.ledger, f.book, d)
}

func (f *fixture) tryDraw(d toDraw) (wasDrawn, error) {
	d.Wallet = cmp.Or(d.Wallet, "ann")
	return do(f, func(ctx context.Context, tx pgx.Tx) (wasDrawn, error) { return f.drawIn(ctx, tx, d) })
}

func (f *fixture) draw(amount int64) wasDrawn {
	f.Helper()
	d, err := f.tryDraw(toDraw{Amount: amount})
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
	_, err := f.tryDraw(toDraw{Amount: units + 1})
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
