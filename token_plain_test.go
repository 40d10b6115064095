package metered_test

import (
	"context"
	"encoding/json"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/tokens"
)

// A command's token is spent by the short way as by the full functions, whatever became of it and of
// the command's id, in a transaction of the command's own, under its timeouts, and in a lent one.
func TestDo_ATokenIsSpentAsTheFullWaySpendsIt(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
	defer cancel()
	w := bothWays(t)
	mint := func(i int, name string, m tokens.Mint) (text string) {
		m.Purpose, m.Subject = "upload", "ann"
		var err error
		m.Secret, err = tokens.Derive(pgtest.SecretKey, name)
		require.NoError(t, err)
		require.NoError(t, pgx.BeginFunc(ctx, w.pools[i], func(tx pgx.Tx) error {
			minted, err := w.clients[i].Tokens.Mint(ctx, tx, m)
			text = minted.Token.Reveal()
			return err
		}))
		return text
	}
	nothing := func(*metered.Command) {}
	for n, test := range []struct {
		name   string
		with   func(cmd *metered.Command)
		before func(i int, id, presented string)
		says   string
	}{
		{"good", nothing, nil, "<nil>"},
		{"with a charge", func(cmd *metered.Command) { cmd.Charges = []budget.Charge{{Scope: "s", Amount: 2}} }, nil, "<nil>"},
		{"a charge is refused", func(cmd *metered.Command) {
			cmd.Charges = []budget.Charge{{Scope: "full", Amount: 2, Limits: []budget.Limit{budget.Lifetime(1)}}}
		}, nil, "limit exceeded"},
		{"at an old snapshot", func(cmd *metered.Command) { cmd.Isolation = pgx.RepeatableRead }, nil, "<nil>"},
		{"another purpose", func(cmd *metered.Command) { cmd.Token.Purpose = "download" }, nil, "not valid"},
		{"another subject", func(cmd *metered.Command) { cmd.Token.Subject = "bob" }, nil, "not valid"},
		{"nobody minted it", func(cmd *metered.Command) { cmd.Token.Presented = pgtest.UnknownToken(t, w.clients[0]) }, nil, "not valid"},
		{"spent", nothing, func(i int, id, presented string) {
			_, err := metered.Do(ctx, w.clients[i], metered.Command{ID: "another " + id, Token: pgtest.Redeem(presented)}, says(1))
			require.NoError(t, err)
		}, "not valid"},
		{"expired", nothing, func(i int, _, _ string) { w.clocks[i].Advance(time.Hour) }, "not valid"},
		{"the id is another command's", nothing, func(i int, id, _ string) {
			_, err := metered.Do(ctx, w.clients[i], metered.Command{ID: id}, says(1))
			require.NoError(t, err)
		}, "another command"},
		{"the id is retired", func(cmd *metered.Command) { cmd.IssuedAt = w.clocks[0].Now().Add(-2 * time.Hour) }, func(i int, _, _ string) {
			pgtest.Execute(t, w.pools[i], "update metered.operations_horizon set at = metered.clock() - interval '1 hour'")
		}, "older than the retained records"},
	} {
		for _, lent := range []bool{false, true} {
			id := fmt.Sprint("op ", n, lent)
			var cmds [2]metered.Command
			for i := range cmds {
				presented := mint(i, id, tokens.Mint{TTL: time.Hour, Payload: map[string]string{"path": `a "b" é`}})
				cmds[i] = metered.Command{ID: id, Token: pgtest.Redeem(presented)}
				test.with(&cmds[i])
				if test.before != nil {
					test.before(i, id, presented)
				}
			}
			for range 2 {
				said := w.same(test.name, func(i int) (_ any, err error) {
					var out metered.Outcome[usage]
					if lent {
						err = pgx.BeginTxFunc(ctx, w.pools[i], pgx.TxOptions{IsoLevel: cmds[i].Isolation}, func(tx pgx.Tx) (err error) {
							of := cmds[i]
							of.Isolation = ""
							out, err = metered.DoTx(ctx, w.clients[i], tx, of, says(3))
							return err
						})
					} else {
						out, err = metered.Do(ctx, w.clients[i], cmds[i], says(3))
					}
					text, _ := json.Marshal(out)
					return string(text), err
				})
				require.Contains(t, said, test.says, test.name)
			}
			for i, c := range w.clocks {
				c.Advance(time.Second)
				pgtest.Execute(t, w.pools[i], "update metered.operations_horizon set at = '-infinity'")
			}
		}
	}
	for table, but := range map[string]string{"tokens": "", "operations": "", "ledger": "next_due"} {
		w.same(table, func(i int) (any, error) {
			rows, err := w.pools[i].Query(ctx, `select (to_jsonb(y) - 'anchor_at' - 'anchor_spent' - $1::text)::text from metered.`+table+` y order by 1`, but)
			require.NoError(t, err)
			return pgx.CollectRows(rows, pgx.RowTo[string])
		})
	}
	for i := range w.pools {
		require.Equal(t, 8, pgtest.Value[int](t, w.pools[i], "select sum(used)::int from metered.tokens"), "a known id spends none")
	}
	require.Equal(t, [2]int64{4, 0}, stands(t, w.pools[0], w.clients[0], "s"))
}

// A repetition is answered while another transaction has the row of its token.
func TestDo_ARepetitionWaitsForNoToken(t *testing.T) {
	t.Parallel()
	pool, c := pgtest.SetUp(t, metered.Config{Config: budget.Config{LockTimeout: 100 * time.Millisecond}})
	var presented string
	require.NoError(t, pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error {
		minted, err := c.Tokens.Mint(t.Context(), tx, tokens.Mint{Purpose: "upload", Subject: "ann", Uses: 2})
		presented = minted.Token.Reveal()
		return err
	}))
	cmd := metered.Command{ID: "op", Token: pgtest.Redeem(presented)}
	_, err := metered.Do(t.Context(), c, cmd, says(3))
	require.NoError(t, err)
	other, err := pool.Begin(t.Context())
	require.NoError(t, err)
	defer func() { _ = other.Rollback(context.Background()) }()
	_, err = c.Tokens.Consume(t.Context(), other, "upload", "ann", presented)
	require.NoError(t, err)
	out, err := metered.Do(t.Context(), c, cmd, says(4))
	require.NoError(t, err)
	require.True(t, out.Replayed)
}
