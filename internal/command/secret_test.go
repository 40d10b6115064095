package command_test

import (
	"context"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/tokens"
)

func TestSecret_AReplayCanShowTheTokenThatTheCommandMinted(t *testing.T) {
	t.Parallel()
	pool, c := pgtest.SetUp(t, metered.Config{SecretKey: pgtest.SecretKey})
	ctx := t.Context()
	cmd := metered.Command{Tenant: "ns", ID: "op"}
	var minted string
	invite := func(ctx context.Context, tx *metered.Tx) (map[string]string, error) {
		secret, err := tx.Secret("invitation")
		require.NoError(t, err)
		m, err := c.Tokens.Mint(ctx, tx, tokens.Mint{Purpose: "invite", Subject: "bob", Secret: secret})
		if err != nil {
			return nil, err
		}
		minted = m.Token.Reveal()
		return map[string]string{"digest": m.Digest.String()}, nil
	}
	_, err := metered.Do(ctx, c, cmd, func(ctx context.Context, tx *metered.Tx) (map[string]string, error) {
		_, err := invite(ctx, tx)
		require.NoError(t, err)
		return nil, pgtest.ErrOwn
	})
	require.ErrorIs(t, err, pgtest.ErrOwn)
	failed := minted
	out, err := metered.Do(ctx, c, cmd, invite)
	require.NoError(t, err)
	require.Equal(t, failed, minted, "each attempt mints the same")

	again, err := metered.Do(ctx, pgtest.NewClient(t, pool, metered.Config{SecretKey: pgtest.SecretKey}), cmd, invite)
	require.NoError(t, err)
	require.True(t, again.Replayed)
	require.Equal(t, out.Result, again.Result)
	secret, err := c.Secret("ns", "op", "invitation")
	require.NoError(t, err)
	shown, err := c.Tokens.Token(secret)
	require.NoError(t, err)
	require.Equal(t, minted, shown.Reveal())

	// No other operation, tenant, label or key gives it.
	seen := map[string]bool{minted: true}
	for _, parts := range [][3]string{{"ns", "op", ""}, {"ns", "op", "x"}, {"", "op", "invitation"}, {"ns", "op2", "invitation"}, {"nso", "p", "invitation"}} {
		secret, err := c.Secret(parts[0], parts[1], parts[2])
		require.NoError(t, err)
		token, err := c.Tokens.Token(secret)
		require.NoError(t, err)
		require.False(t, seen[token.Reveal()])
		seen[token.Reveal()] = true
	}
	_, err = metered.Do(ctx, pgtest.NewClient(t, pool, metered.Config{}), metered.Command{ID: "no key"}, func(_ context.Context, tx *metered.Tx) (any, error) {
		_, err := tx.Secret("invitation")
		return nil, err
	})
	require.ErrorIs(t, err, budget.ErrArgument)

	// The stored rows do not give the token away.
	_, body, _ := strings.Cut(minted, "_")
	for _, table := range []string{"metered.operations", "metered.tokens", "metered.ledger"} {
		require.Zero(t, pgtest.Value[int](t, pool, "select count(*) from "+table+" x where position($1 in x::text || coalesce(convert_from("+
			map[bool]string{true: "x.result", false: "null"}[table == "metered.operations"]+", 'utf8'), '')) > 0", body), table)
	}
	_, err = metered.Do(ctx, c, metered.Command{ID: "redeem", Token: &metered.Redeem{Purpose: "invite", Subject: "bob", Presented: shown.Reveal()}},
		func(_ context.Context, tx *metered.Tx) (any, error) {
			require.Equal(t, "invite", tx.Grant.Purpose)
			return nil, nil
		})
	require.NoError(t, err)
}

func TestNew_CopiesTheKey(t *testing.T) {
	t.Parallel()
	key := slices.Clone(pgtest.SecretKey)
	c, err := metered.New(pgtest.Nowhere(t), metered.Config{SecretKey: key})
	require.NoError(t, err)
	before, err := c.Secret("", "op", "")
	require.NoError(t, err)
	clear(key) // the caller's, who may want it out of memory
	after, err := c.Secret("", "op", "")
	require.NoError(t, err)
	require.Equal(t, textOf(t, c, before), textOf(t, c, after))
}

func textOf(t *testing.T, c *metered.Client, secret tokens.Secret) string {
	t.Helper()
	token, err := c.Tokens.Token(secret)
	require.NoError(t, err)
	return token.Reveal()
}
