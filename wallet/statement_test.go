package wallet_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/wallet"
)

func TestStatement_HasTheMovesOfLotsOfEachEntry(t *testing.T) {
	t.Parallel()
	f := setUp(t, wallet.Config{Overdraft: 5})
	f.grant(wallet.Grant{Amount: 10, Reference: "a", Ends: wallet.After(time.Hour)})
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
				text += fmt.Sprintf(" %d %s %s", m.Amount, m.Kind, m.Reference)
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
		"6 lapse 4 = 4: 4 lapsed a",
		"7 release 8 = 12: 6 freed a 2 freed b",
		"8 lapse 6 = 6: 6 lapsed a",
		"9 charge 3 = 3: 3 taken b",
	}, lines(budget.EntriesOptions{}))
	require.Equal(t, []string{"9 charge 3 = 3: 3 taken b", "8 lapse 6 = 6: 6 lapsed a"}, lines(budget.EntriesOptions{NewestFirst: true, Max: 2}))
}

func TestVerify_FindsEachDamageToLots(t *testing.T) {
	t.Parallel()
	cfg := low(13)
	cfg.Overdraft = 5
	f := setUpReporting(t, cfg, nil)
	f.grant(wallet.Grant{Amount: 10, Reference: "a", Ends: wallet.After(time.Hour)})
	f.grant(wallet.Grant{Amount: 10, Reference: "b"})
	d := f.draw(12) // entry 3
	f.refund(d.Seq, 10)
	f.place("r", 3, day)
	f.place("s", 4, day)
	f.clock.Set(noon.Add(time.Hour))
	o := f.draw(11) // after the lapse, and lots cover 10
	f.grant(wallet.Grant{Amount: 9, Reference: "c"})
	for range 2 {
		_, err := do(f, func(ctx context.Context, tx pgx.Tx) (budget.Posted, error) {
			return f.ledger.Credit(ctx, tx, budget.Credit{Scope: "ann", Amount: 7})
		})
		require.NoError(t, err)
	}
	f.draw(15)
	f.release("s")
	f.refund(o.Seq, 5)
	newest := func(changes, lots string) string {
		return "update metered.lot_moves m set " + changes + " from metered.lots l where m.lot = l.no and m.version = l.version and " + lots
	}
	tables := []string{"ledger", "lot_rows", "lot_moves", "lot_holds"}
	for _, table := range tables {
		_, err := f.pool.Exec(t.Context(), fmt.Sprintf("create table kept_%[1]s as select * from metered.%[1]s", table))
		require.NoError(t, err)
	}
	for damage, field := range map[string]string{
		newest("rest = m.rest + 1", "l.reference = 'b'"): "lot 2",
		newest("rest = m.rest + 1", "l.reference = 'b'") + "; update metered.lot_rows set amount = amount + 1 where reference = 'b'":           "rests of lots",
		"update metered.lot_rows set open = not open where reference = 'b'":                                                                    "lot 2",
		"update metered.lot_rows set keeps = true where reference = 'b'":                                                                       "lot 2",
		"update metered.lot_rows set untold = lapsed + 1 where reference = 'a'":                                                                "lot 1",
		newest("drawn = m.drawn - 1, rest = m.rest + 1", "l.reference = 'a'"):                                                                  "moves of lot 1",
		"update metered.lot_rows set lapsed = 0, untold = 0 where reference = 'a'":                                                             "moves of lot 1",
		newest("held = m.held - 1, rest = m.rest + 1", "l.reference = 'a'"):                                                                    "held of lot 1",
		newest("drawn = m.drawn + case l.no when 3 then 1 else -1 end, rest = m.rest - case l.no when 3 then 1 else -1 end", "l.no in (3, 4)"): "moves of lot 3",
		newest("drawn = m.drawn + case l.no when 5 then 1 else -1 end, rest = m.rest - case l.no when 5 then 1 else -1 end", "l.no in (4, 5)"): "moves of lot 5",
		"update metered.lot_moves set rest = rest + 1 where lot = 1 and version = 2":                                                           "units after a move of lot 1",
		"update metered.lot_moves set drawn = drawn + 1 where lot = 1 and version = 2":                                                         "units after a move of lot 1",
		"update metered.lot_moves set held = held + 1, rest = rest - 1 where lot = 1 and version = 2":                                          "units after a move of lot 1",
		"update metered.lot_moves set version = version + 100 where lot = 1 and version >= 3":                                                  "units after a move of lot 1",
		"update metered.lot_rows set scope = 'bob' where reference = 'a'":                                                                      "moves of lots",
		"update metered.lot_rows set expires_at = granted_at where reference = 'a'":                                                            "drawn of lot 1",
		"update metered.lot_rows set expires_at = granted_at + interval '2 h' where reference = 'b'":                                           "lots_end",
		"delete from metered.lot_rows where reference = 'a'":                                                                                   "moves of lots",
		"update metered.lot_holds set amount = amount + 1":                                                                                     "held of lots",
		"update metered.lot_holds set lot = 2":                                                                                                 "held of lot 1",
		"update metered.lot_holds set seq = 6":                                                                                                 "held of lots",
		"update metered.lot_holds set lot = 0":                                                                                                 "held of no lot",
		"insert into metered.lot_holds (scope, seq, lot, amount) values ('ann', 0, 0, 5)":                                                      "overdrawn",
		"delete from metered.lot_holds":                                                                                                        "held of lots",
		"update metered.lot_moves set amount = amount + 1 where seq = 3 and nth = 1":                                                           "moves of lots",
		"update metered.lot_moves set lot = 2, version = 100 where seq = 3 and nth = 1":                                                        "moves of lot 1",
		"update metered.lot_moves set lot = 2, version = 100 where kind = 'd' and lot = 3":                                                     "moves of lot 3",
		"update metered.lot_moves set kind = 'p' where seq = 3 and nth = 1":                                                                    "moves of lots",
		"update metered.lot_moves set back = back + 1 where seq = 3 and nth = 2":                                                               "given back to lots",
		"update metered.lot_moves set back = back - 1 where kind = 'p' and back > 0":                                                           "given back to lot 3",
		"delete from metered.lot_moves where seq = 3 and nth = 2":                                                                              "moves of lots",
		"update metered.ledger set lots_end = null where seq = 5":                                                                              "lots_end",
		"update metered.ledger set lots_end = null where seq = (select max(seq) from metered.ledger)":                                          "lots_end",
		"update metered.ledger set crossed = null where kind = 'l'":                                                                            "crossed",
		`update metered.ledger set crossed = '{"more": {"rearm": 1}}' where kind = 'r'`:                                                        "crossed",
	} {
		tag, err := f.pool.Exec(t.Context(), damage)
		require.NoError(t, err, damage)
		require.NotZero(t, tag.RowsAffected(), damage)
		r, err := f.ledger.Verify(t.Context(), f.pool, budget.VerifyOptions{Scope: "ann"})
		require.NoError(t, err)
		var fields []string
		for _, diff := range r.Differences {
			fields = append(fields, diff.Field)
		}
		assert.Contains(t, fields, field, damage)
		for _, table := range tables {
			_, err := f.pool.Exec(t.Context(), fmt.Sprintf("delete from metered.%[1]s; insert into metered.%[1]s overriding system value select * from kept_%[1]s", table))
			require.NoError(t, err)
		}
	}
}
