package wallet_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/wallet"
)

// pile grants so many lots of a unit to a wallet that is new, each of which ends a microsecond after the one before, from an hour on.
func (f *fixture) pile(name string, lots int) {
	f.Helper()
	f.grant(wallet.Grant{Wallet: name, Amount: 1, Ends: wallet.After(time.Hour)})
	_, err := f.pool.Exec(f.Context(), fmt.Sprintf(`
		with e as (
			insert into metered.ledger (seq, amount, at, spent, refunded, credited, held, epoch, kind, scope, lots_end, others)
			select g, 1, l.at, 0, 0, g, 0, 0, 'd', l.scope, l.lots_end, g from metered.ledger l, generate_series(2, %[1]d) g where l.scope = $1::text
			returning seq
		), y as (
			insert into metered.lot_rows (granted_at, expires_at, granted_seq, last_seq, amount, rest, late, priority, origin, open, scope, category)
			select l.granted_at, l.expires_at + g * interval '1 us', g, g, 1, 1, l.late, 0, 'g', true, l.scope, '' from metered.lot_rows l, generate_series(2, %[1]d) g where l.scope = $1
			returning no, granted_seq
		)
		insert into metered.lot_moves (scope, seq, nth, lot, kind, amount) select $1, y.granted_seq, 1, y.no, 'd', 1 from y`, lots), name)
	require.NoError(f, err)
}

// However many lots of a wallet have ended and are not written, a call reads and writes as much, within the timeout of its statements: no backlog keeps paid
// credit from its owner, and each call makes it smaller. The short form finds a call that writes all ends (_ends_per_call of 100,000).
func TestWallet_ABacklogOfLotsThatEndedIsLeftToLaterCalls(t *testing.T) {
	t.Parallel()
	f := setUp(t, wallet.Config{Overdraft: 5})
	ctx := t.Context()
	const few, many = 100, 10_000
	lots := map[string]int{"few": few, "many": many}
	for name, n := range lots {
		f.pile(name, n)
		f.grant(wallet.Grant{Wallet: name, Amount: 1000, Reference: "paid"})
		f.grant(wallet.Grant{Wallet: name, Amount: 10, Reference: "soon", Ends: wallet.After(3 * time.Hour)})
	}
	_, err := f.pool.Exec(ctx, "analyze metered.lot_rows; analyze metered.ledger; analyze metered.lot_moves")
	require.NoError(t, err)
	f.clock.Set(noon.Add(2 * time.Hour))
	conn, err := f.pool.Acquire(ctx)
	require.NoError(t, err)
	defer func() {
		_, _ = conn.Exec(context.Background(), "reset statement_timeout")
		conn.Release()
	}()
	_, err = conn.Exec(ctx, "set statement_timeout = '1min'") // 3,000 times a call's usual time: a busy machine passes, a linear call does not
	require.NoError(t, err)
	reads := map[string]map[string]int64{"few": {}, "many": {}}
	open := func(name string) (n int64) {
		require.NoError(t, conn.QueryRow(ctx, "select count(*) from metered.lot_rows where scope = $1 and open and expires_at <= (select metered.clock())", name).Scan(&n))
		return n
	}
	drawn := map[string]int64{} // the last draw
	calls := []struct {
		what string
		call func(tx pgx.Tx, name string) error
	}{
		{"grant", func(tx pgx.Tx, name string) (err error) {
			_, err = f.book.Grant(ctx, tx, wallet.Grant{Wallet: name, Amount: 5, Reference: "new"})
			return err
		}},
		{"draw", func(tx pgx.Tx, name string) error {
			d, err := f.drawIn(ctx, tx, toDraw{Wallet: name, Amount: 12})
			drawn[name] = d.Seq
			require.Equal(t, []string{"soon", "paid"}, []string{d.Lots[0].Reference, d.Lots[1].Reference})
			require.EqualValues(t, 1003, d.Left)
			return err
		}},
		{"refund", func(tx pgx.Tx, name string) (err error) {
			_, err = f.ledger.Refund(ctx, tx, budget.Refund{Scope: name, Seq: drawn[name], Amount: 4})
			return err
		}},
		{"refusal", func(tx pgx.Tx, name string) (err error) {
			_, err = f.drawIn(ctx, tx, toDraw{Wallet: name, Amount: 1013})
			var exceeded *budget.ExceededError
			require.ErrorAs(t, err, &exceeded)
			require.EqualValues(t, 1012, exceeded.Refusals[0].Available)
			return nil
		}},
		{"revoke", func(tx pgx.Tx, name string) error {
			r, err := f.book.Revoke(ctx, tx, wallet.Revoke{Wallet: name, Reference: "new"})
			require.EqualValues(t, 5, r.Amount)
			return err
		}},
		{"roll over", func(tx pgx.Tx, name string) error {
			r, err := f.book.Rollover(ctx, tx, wallet.Rollover{Wallet: name, Reference: "soon", Cap: 1, For: day})
			require.EqualValues(t, 1, r.Amount)
			return err
		}},
		{"overdraft", func(tx pgx.Tx, name string) error {
			d, err := f.drawIn(ctx, tx, toDraw{Wallet: name, Amount: 1005})
			drawn[name] = d.Seq
			require.EqualValues(t, 3, d.Overdrawn)
			require.EqualValues(t, -3, d.Left)
			return err
		}},
		{"payment", func(tx pgx.Tx, name string) (err error) {
			_, err = f.book.Grant(ctx, tx, wallet.Grant{Wallet: name, Amount: 10, Reference: "payment"})
			return err
		}},
		{"refund of overdraft", func(tx pgx.Tx, name string) (err error) {
			_, err = f.ledger.Refund(ctx, tx, budget.Refund{Scope: name, Seq: drawn[name], Amount: 2})
			return err
		}},
	}
	for _, c := range calls {
		for _, name := range []string{"few", "many"} {
			before := lotReads(t, conn)
			require.NoError(t, pgx.BeginFunc(ctx, conn, func(tx pgx.Tx) error { return c.call(tx, name) }), c.what)
			reads[name][c.what] = lotReads(t, conn) - before
		}
		t.Logf("%s: %d rows and entries read, and %d; %d lots are left", c.what, reads["few"][c.what], reads["many"][c.what], open("many"))
		require.Less(t, reads["many"][c.what], int64(many/4), c.what) // versions of rows that calls ended are read until the server prunes them
	}
	f.verify()
	for damage, repair := range map[string]string{
		"insert into metered.lot_holds (scope, seq, lot, amount) values ('many', 0, 0, 1)":                      "delete from metered.lot_holds",
		"update metered.lot_rows set rest = rest - 1, drawn = drawn + 1, open = false where granted_seq = 5000": "update metered.lot_rows set rest = rest + 1, drawn = drawn - 1, open = true where granted_seq = 5000",
	} {
		tag, err := f.pool.Exec(ctx, damage)
		require.NoError(t, err)
		require.NotZero(t, tag.RowsAffected(), damage)
		r, err := f.ledger.Verify(ctx, f.pool, budget.VerifyOptions{Scope: "many"})
		require.NoError(t, err)
		require.NotEmpty(t, r.Differences, damage)
		_, err = f.pool.Exec(ctx, repair)
		require.NoError(t, err)
	}
	left := open("many")
	require.Greater(t, left, int64(many/2), "a backlog is left")
	for name := range lots {
		b, err := f.book.Balance(ctx, conn, name)
		require.NoError(t, err)
		require.EqualValues(t, 9, b.Units)
		require.Len(t, b.Lots, 1)
	}
	passed := 0
	report, err := f.book.Sweep(ctx, f.pool, wallet.SweepOptions{Batch: 500, Max: pgtest.Size(90, 0), Progress: func(wallet.SweepReport) {
		passed++
		require.GreaterOrEqual(t, open("many"), left-int64(passed*50), "a batch ends no more than a step")
	}})
	require.NoError(t, err)
	require.Greater(t, int64(report.Ended), pgtest.Size(1000, left-1))
	require.Equal(t, left-int64(report.Ended), open("many"))
	for name := range lots {
		b, err := f.book.Balance(ctx, conn, name)
		require.NoError(t, err)
		require.EqualValues(t, 9, b.Units)
		_, err = do(f, func(ctx context.Context, tx pgx.Tx) (wasDrawn, error) {
			return f.drawIn(ctx, tx, toDraw{Wallet: name, Amount: 14})
		})
		require.NoError(t, err)
	}
}
