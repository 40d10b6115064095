package tokens_test

import (
	"context"
	"encoding/json"
	"fmt"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/internal/fault"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/internal/sqlstate"
	"github.com/pgmetered/metered/tokens"
)

func TestMint_StoresNothingButTheDigest(t *testing.T) {
	t.Parallel()
	pool, store := pgtest.Open(t), newStore(t)
	clock := pgtest.SetClock(t, pool, noon)
	minted := mint(t, pool, store, tokens.Mint{
		Purpose: "upload", Subject: "ada", Payload: map[string]string{"asset": "<42>"}, TTL: 90 * time.Second, Uses: 3})

	require.Equal(t, minted.Token.Digest(), minted.Digest)
	require.Equal(t, clock.Now(), minted.MintedAt)
	require.Equal(t, noon.Add(90*time.Second), minted.ExpiresAt)
	require.Equal(t, 3, minted.Uses)
	require.Equal(t, "upload", minted.Purpose)
	require.Equal(t, "ada", minted.Subject)
	require.Zero(t, minted.Replaced)

	var row string
	require.NoError(t, pool.QueryRow(ctx, `select row_to_json(t)::text from metered.tokens t`).Scan(&row))
	require.Contains(t, row, minted.Digest.String())
	require.Contains(t, row, `{"asset":"<42>"}`)
	body := minted.Token.Reveal()[len("acme_upload_"):]
	require.NotContains(t, row, body[:43])
	require.NotContains(t, row, fmt.Sprintf("%x", rawSecret(t, minted.Token.Reveal())))
}

func TestMint_Defaults(t *testing.T) {
	t.Parallel()
	pool, store := pgtest.Open(t), newStore(t)
	minted := mint(t, pool, store, tokens.Mint{Purpose: "p", Subject: "s"})
	require.Equal(t, time.Hour, minted.ExpiresAt.Sub(minted.MintedAt))
	require.Equal(t, 1, minted.Uses)
	other := mint(t, pool, store, tokens.Mint{Purpose: "p", Subject: "s", Payload: json.RawMessage(nil)})
	require.NotEqual(t, other.Digest, minted.Digest)

	for _, m := range []tokens.Minted{minted, other} {
		grant, err := consume(pool, store, "p", "s", m.Token.Reveal())
		require.NoError(t, err)
		require.Nil(t, grant.Payload)
		into := "untouched"
		require.NoError(t, grant.Decode(&into))
		require.Equal(t, "untouched", into)
	}
}

func TestMint_RefusesBadArgumentsBeforeAnySQL(t *testing.T) {
	t.Parallel()
	store := newStore(t)
	same := must(tokens.Derive(testKey, "same"))
	deep := strings.Repeat("[", 4096) + strings.Repeat("]", 4097)
	for i, c := range []struct {
		field string
		with  tokens.Mint
	}{
		{"TTL", tokens.Mint{TTL: -1}},
		{"TTL", tokens.Mint{TTL: time.Second - 1}},
		{"TTL", tokens.Mint{TTL: (400 * 24 * time.Hour) + 1}},
		{"TTL", tokens.Mint{TTL: math.MinInt64}},
		{"Uses", tokens.Mint{Uses: -1}},
		{"Uses", tokens.Mint{Uses: 1_000_000 + 1}},
		{"Payload", tokens.Mint{Payload: make(chan int)}},
		{"Payload", tokens.Mint{Payload: math.Inf(1)}},
		{"Payload", tokens.Mint{Payload: json.RawMessage(`{`)}},
		{"Payload", tokens.Mint{Payload: json.RawMessage{}}},
		{"Payload", tokens.Mint{Payload: json.RawMessage("\"\xff\"")}},
		{"Payload", tokens.Mint{Payload: map[string]string{"a": "\xff"}}},
		{"Payload", tokens.Mint{Payload: map[string]json.RawMessage{"a": json.RawMessage("\"\xff\"")}}},
		{"Payload", tokens.Mint{Payload: json.RawMessage(deep)}},
		{"Payload", tokens.Mint{Payload: strings.Repeat("x", (8<<10)-1)}},
		{"Payload", tokens.Mint{Payload: json.RawMessage(`"` + strings.Repeat("x", (8<<10)-1) + `"`)}},
	} {
		t.Log(i, c.field)
		c.with.Purpose, c.with.Subject = "p", "s"
		_, err := store.Mint(ctx, noSQL{t: t}, c.with)
		requireArgument(t, err, "Mint."+c.field)
		_, err = store.Replace(ctx, noSQL{t: t}, c.with)
		requireArgument(t, err, "Mint."+c.field)
		_, err = store.MintMany(ctx, noSQL{t: t}, []tokens.Mint{c.with})
		requireArgument(t, err, "Mints[0]."+c.field)
	}

	_, err := store.MintMany(ctx, noSQL{t: t}, make([]tokens.Mint, 1000+1))
	requireArgument(t, err, "Mints")
	_, err = store.MintMany(ctx, noSQL{t: t}, []tokens.Mint{
		{Purpose: "p", Subject: "s", Secret: same}, {Purpose: "p", Subject: "s"}, {Purpose: "q", Subject: "r", Secret: same}})
	requireArgument(t, err, "Mints[2].Secret")
	none, err := store.MintMany(ctx, noSQL{t: t}, nil)
	require.NoError(t, err)
	require.Empty(t, none)
}

func TestMint_AcceptsTheBounds(t *testing.T) {
	t.Parallel()
	pool, store := pgtest.Open(t), newStore(t)
	purpose := strings.Repeat("ü", 128/2)
	subject := strings.Repeat("x", 512)
	for _, payload := range []any{
		strings.Repeat("x", (8<<10)-2),
		json.RawMessage(strings.Repeat("[", 4096) + strings.Repeat("]", 4096)),
		json.RawMessage("null"),
		"\ufffd",
		json.RawMessage(" {\"b\" : 1e999, \"a\":\t\"\\u0000<\\ud800\", \"a\": 2} "),
	} {
		minted := mint(t, pool, store, tokens.Mint{
			Purpose: purpose, Subject: subject, Payload: payload, TTL: 400 * 24 * time.Hour, Uses: 1_000_000})
		require.Equal(t, 400*24*time.Hour, minted.ExpiresAt.Sub(minted.MintedAt))
		grant, err := consume(pool, store, purpose, subject, minted.Token.Reveal())
		require.NoError(t, err)
		require.Equal(t, minted.ExpiresAt, grant.ExpiresAt)
		require.Equal(t, 1_000_000-1, grant.UsesLeft)
		want := must(json.Marshal(payload))
		if raw, ok := payload.(json.RawMessage); ok {
			want = raw
		}
		require.Equal(t, string(want), string(grant.Payload), "must come back byte for byte")
	}
	minted := mint(t, pool, store, tokens.Mint{Purpose: "p", Subject: "s", TTL: time.Second + 1234567})
	require.Equal(t, time.Second+1234*time.Microsecond, minted.ExpiresAt.Sub(minted.MintedAt))
}

func TestMint_RolledBackIsUnknown(t *testing.T) {
	t.Parallel()
	pool, store := pgtest.Open(t), newStore(t)
	tx, err := pool.Begin(ctx)
	require.NoError(t, err)
	minted, err := store.Mint(ctx, tx, tokens.Mint{Purpose: "p", Subject: "s"})
	require.NoError(t, err)
	require.NoError(t, tx.Rollback(ctx))
	_, err = consume(pool, store, "p", "s", minted.Token.Reveal())
	requireInvalid(t, err, "unknown")
}

func TestMint_TheSameSecretTwiceExistsAndLeavesTheTransactionUsable(t *testing.T) {
	t.Parallel()
	pool, store := pgtest.Open(t), newStore(t)
	secret := must(tokens.Derive(testKey, "acme", "op-1"))
	m := tokens.Mint{Purpose: "p", Subject: "s", Payload: 1, Secret: secret}
	first := mint(t, pool, store, m)
	require.Equal(t, first.Digest, must(store.Token(secret)).Digest())

	require.NoError(t, inTx(pool, func(tx pgx.Tx) error {
		_, err := store.Mint(ctx, tx, m)
		require.ErrorIs(t, err, tokens.ErrExists)
		require.Equal(t, "token_exists", fault.Code(err))
		m.Payload = 2
		_, err = store.Mint(ctx, tx, m)
		require.ErrorIs(t, err, tokens.ErrExists)
		_, err = store.Replace(ctx, tx, m)
		require.ErrorIs(t, err, tokens.ErrExists)
		_, err = store.MintMany(ctx, tx, []tokens.Mint{{Purpose: "p", Subject: "other"}, m, {Purpose: "p", Subject: "other"}})
		require.ErrorIs(t, err, tokens.ErrExists)
		return nil
	}))
	var count int
	require.NoError(t, pool.QueryRow(ctx, `select count(*) from metered.tokens`).Scan(&count))
	require.Equal(t, 1, count, "a refused mint must write nothing")

	grant, err := consume(pool, store, "p", "s", first.Token.Reveal())
	require.NoError(t, err)
	require.Equal(t, "1", string(grant.Payload))
	require.NoError(t, inTx(pool, func(tx pgx.Tx) error {
		_, err := store.Mint(ctx, tx, m)
		require.ErrorIs(t, err, tokens.ErrExists, "a spent secret must not come back")
		return nil
	}))
}

func TestMint_ASecretThatTheSnapshotCannotSeeIsRetryable(t *testing.T) {
	t.Parallel()
	pool, store := pgtest.Open(t), newStore(t)
	m := tokens.Mint{Purpose: "p", Subject: "s", Secret: must(tokens.Derive(testKey, "x"))}
	for _, level := range isolationLevels[1:] {
		tx, err := pool.BeginTx(ctx, pgx.TxOptions{IsoLevel: level})
		require.NoError(t, err)
		_, err = tx.Exec(ctx, "select 1")
		require.NoError(t, err)
		m.Secret = must(tokens.Derive(testKey, string(level)))
		mint(t, pool, store, m)
		_, err = store.Mint(ctx, tx, m)
		require.Equal(t, sqlstate.SerializationFailure, sqlstate.Of(err))
		require.NoError(t, tx.Rollback(ctx))
	}
}

func TestMintMany_KeepsTheOrderAndMintsAllInOneRoundTrip(t *testing.T) {
	t.Parallel()
	pgtest.OnEachVersion(t)
	pool, store := pgtest.Open(t), newStore(t)
	mints := make([]tokens.Mint, 1000)
	for i := range mints {
		mints[i] = tokens.Mint{Purpose: "p", Subject: fmt.Sprint(i), Payload: i, TTL: time.Duration(i+1) * time.Minute, Uses: i + 1}
	}
	var minted []tokens.Minted
	queries := &counted{}
	require.NoError(t, inTx(pool, func(tx pgx.Tx) (err error) {
		queries.Tx = tx
		minted, err = store.MintMany(ctx, queries, mints)
		return err
	}))
	require.Equal(t, 1, queries.n)
	require.Len(t, minted, len(mints))
	for _, i := range []int{0, 1, 500, len(mints) - 1} {
		require.Equal(t, time.Duration(i+1)*time.Minute, minted[i].ExpiresAt.Sub(minted[i].MintedAt))
		grant, err := consume(pool, store, "p", fmt.Sprint(i), minted[i].Token.Reveal())
		require.NoError(t, err)
		require.Equal(t, fmt.Sprint(i), string(grant.Payload))
		require.Equal(t, i, grant.UsesLeft)
	}
}

// counted counts queries. Any other statement panics.
type counted struct {
	pgx.Tx
	n int
}

func (c *counted) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	c.n++
	return c.Tx.QueryRow(ctx, sql, args...)
}

func TestMint_WaitsForTheSameSecretAtMostTheLockTimeout(t *testing.T) {
	t.Parallel()
	pool := pgtest.Open(t)
	store := must(tokens.New(tokens.Config{Prefix: "acme_upload", LockTimeout: 20 * time.Millisecond}))
	m := tokens.Mint{Purpose: "p", Subject: "s", Secret: must(tokens.Derive(testKey, "x"))}
	holder, err := pool.Begin(ctx)
	require.NoError(t, err)
	_, err = store.Mint(ctx, holder, m)
	require.NoError(t, err)
	requireBusy(t, inTx(pool, func(tx pgx.Tx) error {
		_, err := store.Mint(ctx, tx, m)
		return err
	}))
	require.NoError(t, holder.Rollback(ctx))
	mint(t, pool, store, m)
}

func requireBusy(t *testing.T, err error) {
	t.Helper()
	require.ErrorIs(t, err, budget.ErrBusy)
	require.Equal(t, "busy", fault.Code(err))
	require.Equal(t, sqlstate.LockNotAvailable, sqlstate.Of(err))
}
