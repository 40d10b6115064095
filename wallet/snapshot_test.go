package wallet_test

import (
	"context"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/wallet"
)

// A transaction with a snapshot older than the wallet's last change gets an error that says to try again, never a final
// answer, and never units that are gone.
func TestSnapshot_OfBeforeGivesNoFinalAnswer(t *testing.T) {
	t.Parallel()
	f := setUp(t, wallet.Config{})
	grant := func(reference string, amount int64) func(f *fixture) {
		return func(f *fixture) { f.grant(wallet.Grant{Amount: amount, Reference: reference}) }
	}
	draw := func(d toDraw) func(context.Context, *fixture, pgx.Tx) error {
		return func(ctx context.Context, f *fixture, tx pgx.Tx) error {
			d.Wallet = "ann"
			_, err := f.drawIn(ctx, tx, d)
			return err
		}
	}
	revoke := func(r wallet.Revoke) func(context.Context, *fixture, pgx.Tx) error {
		return func(ctx context.Context, f *fixture, tx pgx.Tx) error {
			r.Wallet = "ann"
			_, err := f.book.Revoke(ctx, tx, r)
			return err
		}
	}
	rollOver := func(reference string) func(context.Context, *fixture, pgx.Tx) error {
		return func(ctx context.Context, f *fixture, tx pgx.Tx) error {
			_, err := f.book.Rollover(ctx, tx, wallet.Rollover{Wallet: "ann", Reference: reference, Cap: 5, For: day})
			return err
		}
	}
	// The wallet has 10 units of a lot that ends in an hour, and its lot "empty" was drawn by entry 2.
	for name, c := range map[string]struct {
		meanwhile func(f *fixture)
		do        func(ctx context.Context, f *fixture, tx pgx.Tx) error
	}{
		"draw after a grant": {grant("c", 20), draw(toDraw{Amount: 25})},
		"draw for a use after a grant for it": {func(f *fixture) { f.grant(wallet.Grant{Amount: 20, Reference: "c", Uses: []string{"images"}}) },
			draw(toDraw{Amount: 25, Note: budget.Note{Use: "images"}})},
		"draw for a use, up to what there was": {func(f *fixture) { f.grant(wallet.Grant{Amount: 20, Reference: "c", Uses: []string{"images"}}) },
			draw(toDraw{Amount: 25, UpTo: true, Note: budget.Note{Use: "images"}})},
		"draw as much as there is, and more is": {grant("c", 20), draw(toDraw{Amount: 25, UpTo: true})},
		"draw after a draw":                     {func(f *fixture) { f.draw(10) }, draw(toDraw{Amount: 1})},
		"draw after a sweep":                    {func(f *fixture) { f.clock.Set(noon.Add(time.Hour)); f.expire() }, draw(toDraw{Amount: 1})},
		"draw after a refund":                   {func(f *fixture) { f.refund(2, 7) }, draw(toDraw{Amount: 17})},
		"draw after a release":                  {func(f *fixture) { f.release("r") }, draw(toDraw{Amount: 14})},
		"revoke after a grant":                  {grant("c", 20), revoke(wallet.Revoke{Reference: "c"})},
		"revoke after a refund":                 {func(f *fixture) { f.refund(2, 7) }, revoke(wallet.Revoke{Reference: "empty"})},
		"roll over after a grant":               {grant("c", 20), rollOver("c")},
		"roll over after a refund":              {func(f *fixture) { f.refund(2, 7) }, rollOver("empty")},
		"refund after a draw": {func(f *fixture) { f.draw(3) }, func(ctx context.Context, f *fixture, tx pgx.Tx) error {
			_, err := f.ledger.Refund(ctx, tx, budget.Refund{Scope: "ann", Seq: 5, Amount: 3})
			return err
		}},
		"refund after a refund": {func(f *fixture) { f.refund(2, 7) }, func(ctx context.Context, f *fixture, tx pgx.Tx) error {
			_, err := f.ledger.Refund(ctx, tx, budget.Refund{Scope: "ann", Seq: 2, Amount: 1})
			return err
		}},
		"reserve after a grant": {grant("c", 20), func(ctx context.Context, f *fixture, tx pgx.Tx) error {
			_, err := f.holds.Place(ctx, tx, holds.Placement{ID: "h", TTL: day, Lines: []holds.Line{f.book.Line("ann", 25)}})
			return err
		}},
		"a command that draws after a grant": {grant("c", 20), func(ctx context.Context, f *fixture, tx pgx.Tx) error {
			c, err := metered.New(f.pool, metered.Config{})
			require.NoError(f, err)
			_, err = metered.DoTx(ctx, c, tx, metered.Command{ID: "op", Input: 25}, func(_ context.Context, tx *metered.Tx) (int, error) {
				return 0, tx.Charge(toDraw{Wallet: "ann", Amount: 25}.of(f.book))
			})
			return err
		}},
	} {
		for _, level := range []pgx.TxIsoLevel{pgx.RepeatableRead, pgx.Serializable} {
			func() {
				for _, table := range []string{"lot_holds", "lot_moves", "lot_rows", "refund_sum", "hold_events", "hold_lines", "holds", "operations", "ledger"} {
					_, err := f.pool.Exec(t.Context(), "delete from metered."+table)
					require.NoError(t, err)
				}
				f.clock.Set(noon)
				f.grant(wallet.Grant{Amount: 7, Reference: "empty"})
				f.draw(7)
				f.grant(wallet.Grant{Amount: 14, Reference: "hour", Ends: wallet.After(time.Hour)})
				f.place("r", 4, 2*day)
				tx, err := f.pool.BeginTx(t.Context(), pgx.TxOptions{IsoLevel: level})
				require.NoError(t, err)
				defer func() { _ = tx.Rollback(context.Background()) }()
				_, err = tx.Exec(t.Context(), "select from metered.ledger")
				require.NoError(t, err)
				c.meanwhile(f)
				err = c.do(t.Context(), f, tx)
				require.Error(t, err, "%s, %s", name, level)
				require.True(t, metered.Retryable(err), "%s, %s: %v", name, level, err)
				require.NoError(t, tx.Rollback(t.Context()))
				err = pgx.BeginTxFunc(t.Context(), f.pool, pgx.TxOptions{IsoLevel: level}, func(tx pgx.Tx) error { return c.do(t.Context(), f, tx) })
				require.False(t, metered.Retryable(err), "%s, %s: %v", name, level, err)
				f.verify()
			}()
		}
	}
}
