package metered_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/tokens"
)

type uploaded struct {
	Name string `json:"name"`
}

func setUp(t *testing.T, cfg metered.Config) (*pgxpool.Pool, *metered.Client) {
	t.Helper()
	pool := pgtest.Open(t)
	c, err := metered.New(pool, cfg)
	require.NoError(t, err)
	_, err = pool.Exec(t.Context(), `create table uploads (name text primary key)`)
	require.NoError(t, err)
	return pool, c
}

func mint(t *testing.T, pool *pgxpool.Pool, c *metered.Client) string {
	t.Helper()
	var text string
	require.NoError(t, pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error {
		token, err := c.Tokens.Mint(t.Context(), tx, tokens.Mint{Purpose: "upload", Subject: "ann", TTL: time.Hour})
		text = token.Token.Reveal()
		return err
	}))
	return text
}

func upload(name string) metered.Func[uploaded] {
	return func(ctx context.Context, tx *metered.Tx) (uploaded, error) {
		_, err := tx.Exec(ctx, `insert into uploads values ($1)`, name)
		return uploaded{Name: name}, err
	}
}

func TestDo_ReplayReturnsTheFirstResultAndDoesNothingMore(t *testing.T) {
	t.Parallel()
	pool, c := setUp(t, metered.Config{})
	ctx := t.Context()
	cmd := metered.Command{
		ID: "op-1", Name: "upload", Input: map[string]int{"size": 3},
		Token:   &metered.Redeem{Purpose: "upload", Subject: "ann", Presented: mint(t, pool, c)},
		Charges: []budget.Charge{{Scope: "org/acme", Amount: 3, Limits: []budget.Limit{{Max: 5, Window: time.Hour}}}},
	}
	first, err := metered.Do(ctx, c, cmd, upload("a"))
	require.NoError(t, err)
	require.Equal(t, "a", first.Result.Name)
	require.False(t, first.Replayed)
	require.Equal(t, int64(2), first.Receipt.Entries[0].Standings[0].Available)

	again, err := metered.Do(ctx, c, cmd, func(context.Context, *metered.Tx) (uploaded, error) {
		t.Error("the function ran again")
		return uploaded{}, nil
	})
	require.NoError(t, err)
	require.True(t, again.Replayed)
	require.Equal(t, first.Raw, again.Raw)
	require.Equal(t, first.Result, again.Result)
	require.Equal(t, first.Receipt.Entries[0].Seq, again.Receipt.Entries[0].Seq)

	usage, err := c.Budget.Usage(ctx, pool, budget.Query{Scope: "org/acme"})
	require.NoError(t, err)
	require.Equal(t, int64(3), usage[0].Used)

	cmd.Input = "other"
	_, err = metered.Do(ctx, c, cmd, upload("b"))
	require.ErrorIs(t, err, metered.ErrConflict)
}

func TestDo_DenialInTheLastFlushLeavesNothing(t *testing.T) {
	t.Parallel()
	pool, c := setUp(t, metered.Config{})
	ctx := t.Context()
	presented := mint(t, pool, c)
	cmd := metered.Command{ID: "op-1", Token: &metered.Redeem{Purpose: "upload", Subject: "ann", Presented: presented}}
	_, err := metered.Do(ctx, c, cmd, func(ctx context.Context, tx *metered.Tx) (uploaded, error) {
		if _, err := tx.Exec(ctx, `insert into uploads values ('a')`); err != nil {
			return uploaded{}, err
		}
		return uploaded{}, tx.Charge(budget.Charge{Scope: "s", Amount: 6, Limits: []budget.Limit{{Max: 5}}})
	})
	require.ErrorIs(t, err, budget.ErrExceeded)
	var n int
	require.NoError(t, pool.QueryRow(ctx, `select count(*) from uploads`).Scan(&n))
	require.Zero(t, n)
	_, err = metered.Do(ctx, c, cmd, upload("a")) // the token is unspent
	require.NoError(t, err)
}

func TestDo_TheFunctionCannotEndTheTransaction(t *testing.T) {
	t.Parallel()
	pool, c := setUp(t, metered.Config{})
	ctx := t.Context()
	for _, sql := range []string{"commit", "rollback", " /* x */ COMMIT", "end", "abort", "rollback; insert into uploads values ('b')"} {
		_, err := metered.Do(ctx, c, metered.Command{ID: "op"}, func(ctx context.Context, tx *metered.Tx) (any, error) {
			_, err := tx.Exec(ctx, `insert into uploads values ('a')`)
			require.NoError(t, err)
			_, err = tx.Exec(ctx, sql, pgx.QueryExecModeSimpleProtocol)
			require.ErrorIs(t, err, metered.ErrTxControl, sql)
			return nil, err
		})
		require.ErrorIs(t, err, metered.ErrTxControl)
	}
	// Around the wrapper, by the bare connection: the server refuses.
	_, err := metered.Do(ctx, c, metered.Command{ID: "op"}, func(ctx context.Context, tx *metered.Tx) (any, error) {
		_, err := tx.Exec(ctx, `insert into uploads values ('a')`)
		require.NoError(t, err)
		_, err = tx.Conn().Exec(ctx, "commit")
		require.Error(t, err)
		_, err = tx.Exec(ctx, `insert into uploads values ('b')`)
		require.ErrorIs(t, err, metered.ErrTxControl)
		return nil, nil
	})
	require.ErrorIs(t, err, metered.ErrTxControl)
	var n int
	require.NoError(t, pool.QueryRow(ctx, `select count(*) from uploads`).Scan(&n))
	require.Zero(t, n)
}

func TestDoTx_RefusedCommandLeavesTheCallersTransactionAsItWas(t *testing.T) {
	t.Parallel()
	pool, c := setUp(t, metered.Config{})
	ctx := t.Context()
	require.NoError(t, pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		_, err := tx.Exec(ctx, `insert into uploads values ('mine')`)
		require.NoError(t, err)
		_, err = metered.DoTx(ctx, c, tx, metered.Command{ID: "op-1", Charges: []budget.Charge{{Scope: "s", Amount: 1}}},
			func(ctx context.Context, tx *metered.Tx) (uploaded, error) {
				_, err := tx.Exec(ctx, `insert into uploads values ('a')`)
				return uploaded{}, errors.Join(err, errors.New("no"))
			})
		require.ErrorContains(t, err, "no")
		out, err := metered.DoTx(ctx, c, tx, metered.Command{ID: "op-2", Charges: []budget.Charge{{Scope: "s", Amount: 1}}}, upload("b"))
		require.NoError(t, err)
		require.Equal(t, int64(1), out.Receipt.Entries[0].Seq)
		return nil
	}))
	rows, _ := pool.Query(ctx, `select name from uploads order by 1`)
	names, err := pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(t, err)
	require.Equal(t, []string{"b", "mine"}, names)
}
