package tokens_test

import (
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/internal/fault"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/internal/purge"
	"github.com/pgmetered/metered/tokens"
)

func TestStore_WorksInASchemaOfAnotherName(t *testing.T) {
	t.Parallel()
	pgtest.OnEachVersion(t)
	pool := pgtest.OpenWith(t, pgtest.Options{Empty: true})
	_, err := metered.Migrate(ctx, pool, metered.MigrateOptions{Schema: "billing_2"})
	require.NoError(t, err)
	store := must(tokens.New(tokens.Config{Schema: "billing_2"}))
	minted := mint(t, pool, store, tokens.Mint{Purpose: "p", Subject: "s"})
	require.NoError(t, inTx(pool, func(tx pgx.Tx) error {
		replaced, err := store.Replace(ctx, tx, tokens.Mint{Purpose: "p", Subject: "s"})
		require.NoError(t, err)
		require.EqualValues(t, 1, replaced.Replaced)
		_, err = store.Consume(ctx, tx, "p", "s", minted.Token.Reveal())
		requireInvalid(t, err, "revoked")
		_, err = store.Consume(ctx, tx, "p", "s", replaced.Token.Reveal())
		return err
	}))
}

func TestStore_SaysThatTheSchemaIsMissing(t *testing.T) {
	t.Parallel()
	pgtest.OnEachVersion(t)
	pool := pgtest.OpenWith(t, pgtest.Options{Empty: true})
	store := newStore(t)
	text := must(store.Token(must(tokens.Derive(testKey, "x")))).Reveal()
	_, err := store.Inspect(ctx, pool, "p", "s", text)
	require.ErrorIs(t, err, budget.ErrNotMigrated)
	require.Equal(t, "not_migrated", fault.Code(err))
	_, err = purge.Tokens.Delete(ctx, pool, purge.Options{})
	require.ErrorIs(t, err, budget.ErrNotMigrated)
	require.ErrorIs(t, inTx(pool, func(tx pgx.Tx) error {
		_, err := store.Mint(ctx, tx, tokens.Mint{Purpose: "p", Subject: "s"})
		return err
	}), budget.ErrNotMigrated)

	older := pgtest.Open(t)
	_, err = older.Exec(ctx, "drop function metered.inspect_token")
	require.NoError(t, err)
	_, err = store.Inspect(ctx, older, "p", "s", text)
	require.ErrorIs(t, err, budget.ErrNotMigrated)
}

func TestStore_WorksWithoutPreparedStatements(t *testing.T) {
	t.Parallel()
	for _, mode := range []pgx.QueryExecMode{pgx.QueryExecModeExec, pgx.QueryExecModeSimpleProtocol, pgx.QueryExecModeDescribeExec} {
		pool := pgtest.OpenWith(t, pgtest.Options{Config: func(c *pgxpool.Config) { c.ConnConfig.DefaultQueryExecMode = mode }})
		store := newStore(t)
		require.NoError(t, inTx(pool, func(tx pgx.Tx) error {
			minted, err := store.MintMany(ctx, tx, []tokens.Mint{{Purpose: "p", Subject: "s", Payload: "a'b\\"}, {Purpose: "p", Subject: "s"}})
			require.NoError(t, err, mode)
			grant, err := store.Consume(ctx, tx, "p", "s", minted[0].Token.Reveal())
			require.NoError(t, err, mode)
			require.Equal(t, `"a'b\\"`, string(grant.Payload))
			replaced, err := store.Replace(ctx, tx, tokens.Mint{Purpose: "p", Subject: "s"})
			require.NoError(t, err, mode)
			require.EqualValues(t, 1, replaced.Replaced)
			_, err = store.Inspect(ctx, tx, "p", "s", replaced.Token.Reveal())
			require.NoError(t, err, mode)
			revoked, err := store.Revoke(ctx, tx, replaced.Digest)
			require.NoError(t, err, mode)
			require.True(t, revoked)
			_, err = store.RevokeSubject(ctx, tx, "p", "s")
			require.NoError(t, err, mode)
			return nil
		}))
		_, err := purge.Tokens.Delete(ctx, pool, purge.Options{})
		require.NoError(t, err, mode)
	}
}
