package wallet_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/wallet"
)

func TestStatement_SaysWhatEachEntryDidToTheLots(t *testing.T) {
	t.Parallel()
	f := setUp(t, wallet.Config{Overdraft: 5})
	f.grant(wallet.Grant{Amount: 10, Reference: "a", For: time.Hour})
	d := f.draw(4)
	f.place("r", 8, day)
	f.grant(wallet.Grant{Amount: 6, Reference: "b"})
	f.refund(d.Seq, 4)
	f.clock.Set(noon.Add(time.Hour))
	f.release("r")
	f.draw(3)
	lines := func(opts budget.EntriesOptions) (all []string) {
		for l, err := range f.book.Statement(t.Context(), f.pool, "ann", opts) {
			require.NoError(t, err)
			text := fmt.Sprintf("%d %s %d = %d:", l.Seq, l.Kind, l.Amount, l.Balance)
			for _, m := range l.Lots {
				text += fmt.Sprintf(" %d %s %s", m.Amount, m.Does, m.Reference)
			}
			all = append(all, text)
		}
		return all
	}
	require.Equal(t, []string{
		"1 credit 10 = 10: 10 credited a",
		"2 charge 4 = 6: 4 taken a",
		"3 hold 8 = -2: 6 held a 2 held ",
		"4 credit 6 = 4: 6 credited b 2 held after b",
		"5 refund 4 = 8: 4 given back a",
		"6 release 8 = 16: 6 freed a 2 freed b",
		"7 lapse 6 = 10: 6 lapsed a",
		"8 lapse 4 = 6: 4 lapsed a",
		"9 charge 3 = 3: 3 taken b",
	}, lines(budget.EntriesOptions{}))
	require.Equal(t, []string{"9 charge 3 = 3: 3 taken b", "8 lapse 4 = 6: 4 lapsed a"}, lines(budget.EntriesOptions{NewestFirst: true, Max: 2}))
}

func TestVerify_FindsWhatIsWrongWithLots(t *testing.T) {
	t.Parallel()
	f := setUp(t, wallet.Config{Overdraft: 5})
	f.grant(wallet.Grant{Amount: 10, Reference: "a", For: time.Hour})
	f.grant(wallet.Grant{Amount: 10, Reference: "b"})
	d := f.draw(12)
	f.refund(d.Seq, 1)
	f.place("r", 3, day)
	f.clock.Set(noon.Add(time.Hour))
	f.draw(1)
	for _, damage := range []struct{ sql, undo, field string }{
		{"update metered.lots set rest = rest + 1 where reference = 'b'", "update metered.lots set rest = rest - 1 where reference = 'b'", "lot 2"},
		{"update metered.lots set rest = rest + 1, amount = amount + 1 where reference = 'b'", "update metered.lots set rest = rest - 1, amount = amount - 1 where reference = 'b'", "rests of lots"},
		{"update metered.lots set open = false where reference = 'b'", "update metered.lots set open = true where reference = 'b'", "lot 2"},
		{"update metered.lots set drawn = drawn - 1, rest = rest + 1, open = true where reference = 'a'", "update metered.lots set drawn = drawn + 1, rest = rest - 1, open = false where reference = 'a'", "moves of lot 1"},
		{"update metered.lots set held = held - 1, rest = rest + 1 where reference = 'b'", "update metered.lots set held = held + 1, rest = rest - 1 where reference = 'b'", "held of lot 2"},
		{"update metered.lot_holds set amount = amount + 1", "update metered.lot_holds set amount = amount - 1", "held of lots"},
		{"update metered.lot_moves set amount = amount + 1 where seq = 3 and nth = 1", "update metered.lot_moves set amount = amount - 1 where seq = 3 and nth = 1", "moves of lots"},
		{"update metered.lot_moves set back = back + 1 where seq = 3 and nth = 2", "update metered.lot_moves set back = back - 1 where seq = 3 and nth = 2", "given back to lots"},
		{"update metered.lots set expires_at = granted_at where reference = 'a'", "update metered.lots set expires_at = '2026-11-21 13:00+00' where reference = 'a'", "drawn of lot 1"},
		{"update metered.lots set expires_at = granted_at + interval '2 h' where reference = 'b'", "update metered.lots set expires_at = 'infinity' where reference = 'b'", "lots_end"},
	} {
		_, err := f.pool.Exec(t.Context(), damage.sql)
		require.NoError(t, err)
		r, err := f.ledger.Verify(context.Background(), f.pool, budget.VerifyOptions{})
		require.NoError(t, err)
		var fields []string
		for _, diff := range r.Differences {
			fields = append(fields, diff.Field)
		}
		require.Contains(t, fields, damage.field, damage.sql)
		_, err = f.pool.Exec(t.Context(), damage.undo)
		require.NoError(t, err)
		f.verify()
	}
}
