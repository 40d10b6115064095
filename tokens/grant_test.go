package tokens_test

import (
	"encoding/json"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/internal/ledger"
	"github.com/pgmetered/metered/internal/lend"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/tokens"
)

func TestInspect_AnswersAsConsumeWouldAndConsumesNothing(t *testing.T) {
	t.Parallel()
	pool, store := pgtest.Open(t), newStore(t)
	pgtest.SetClock(t, pool, noon)
	minted := mint(t, pool, store, tokens.Mint{Purpose: "p", Subject: "s", Payload: "x", Uses: 2, TTL: time.Minute})
	text := minted.Token.Reveal()
	want := tokens.Grant{
		Digest: minted.Digest, Purpose: "p", Subject: "s", Payload: json.RawMessage(`"x"`),
		UsesLeft: 2, MintedAt: noon, ExpiresAt: noon.Add(time.Minute)}
	for range 5 {
		info, err := store.Inspect(ctx, pool, "p", "s", text)
		require.NoError(t, err)
		require.Equal(t, want, info)
	}
	_, err := store.Inspect(ctx, pool, "q", "s", text)
	requireInvalid(t, err, "purpose")
	_, err = store.Inspect(ctx, pool, "p", "t", text)
	requireInvalid(t, err, "subject")
	_, err = store.Inspect(ctx, pool, "p", "s", must(store.Token(must(tokens.Derive(testKey, "never minted")))).Reveal())
	requireInvalid(t, err, "unknown")
	for range 2 {
		_, err := consume(pool, store, "p", "s", text)
		require.NoError(t, err)
	}
	_, err = store.Inspect(ctx, pool, "p", "s", text)
	requireInvalid(t, err, "used")
}

// Steps that the package lends to its siblings.
var (
	lent = lend.Borrow[interface {
		Present(s *tokens.Store, purpose, subject, text string) (ledger.PresentedToken, error)
		Grant(p ledger.PresentedToken, r ledger.TokenRow) (tokens.Grant, error)
	}]("tokens")
	present, granted = lent.Present, lent.Grant
)

func TestPresented_LetsOtherSQLConsume(t *testing.T) {
	t.Parallel()
	pool, store := pgtest.Open(t), newStore(t)
	minted := mint(t, pool, store, tokens.Mint{Purpose: "p", Subject: "s", Payload: 7})
	p, err := present(store, "p", "s", minted.Token.Reveal())
	require.NoError(t, err)
	require.Equal(t, minted.Digest[:], p.Digest)

	call := func(sql string) ledger.TokenRow {
		var row ledger.TokenRow
		require.NoError(t, pool.QueryRow(ctx, sql, p.Digest, p.Purpose, p.Subject).Scan(row.Dest()...))
		return row
	}
	const consumeIt = `select ` + ledger.TokenColumns + ` from metered.consume_token($1, $2, $3)`
	inspected := call(`select ` + ledger.TokenColumns + ` from metered.inspect_token($1, $2, $3)`)
	_, err = granted(p, inspected)
	require.ErrorContains(t, err, "not of consume_token")

	row := call(consumeIt)
	grant, err := granted(p, row)
	require.NoError(t, err)
	require.Equal(t, "7", string(grant.Payload))
	_, err = granted(p, call(consumeIt))
	requireInvalid(t, err, "used")

	nothing := call(`select ` + ledger.TokenColumns + ` from metered.consume_token($1, $2, $3) t right join (select 1) one on false`)
	_, err = granted(p, nothing)
	require.Error(t, err)
	require.NotErrorIs(t, err, tokens.ErrInvalid)
	_, err = granted(p, call(`select 'new', null::json, null::int, null::timestamptz, null::timestamptz, null::timestamptz where $1::bytea || $2::text::bytea || $3::text::bytea is not null`))
	require.ErrorContains(t, err, `"new"`)
	_, err = granted(p, call(`select 'ok', null::json, null::int, null::timestamptz, null::timestamptz, null::timestamptz where $1::bytea || $2::text::bytea || $3::text::bytea is not null`))
	require.Error(t, err)
}
