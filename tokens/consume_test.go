package tokens_test

import (
	"encoding/json"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/internal/sqlstate"
	"github.com/pgmetered/metered/tokens"
)

func TestConsume_ReturnsTheMintedGrantOnce(t *testing.T) {
	t.Parallel()
	pool, store := pgtest.Open(t), newStore(t)
	clock := pgtest.SetClock(t, pool, noon)
	minted := mint(t, pool, store, tokens.Mint{Purpose: "upload", Subject: "ada", Payload: map[string]int{"asset": 42}, TTL: time.Minute})
	clock.Advance(time.Second)

	grant, err := consume(pool, store, "upload", "ada", minted.Token.Reveal())
	require.NoError(t, err)
	require.Equal(t, tokens.Grant{
		Digest: minted.Digest, Purpose: "upload", Subject: "ada", Payload: json.RawMessage(`{"asset":42}`),
		UsesLeft: 0, MintedAt: noon, ExpiresAt: noon.Add(time.Minute), ConsumedAt: noon.Add(time.Second),
	}, grant)
	var payload struct{ Asset int }
	require.NoError(t, grant.Decode(&payload))
	require.Equal(t, 42, payload.Asset)
	var wrong []int
	require.ErrorContains(t, grant.Decode(&wrong), `"upload"`)

	_, err = consume(pool, store, "upload", "ada", minted.Token.Reveal())
	requireInvalid(t, err, "used")
}

func TestConsume_IsOneRoundTripAndSoIsItsRefusal(t *testing.T) {
	t.Parallel()
	pgtest.OnEachVersion(t)
	pool, store := pgtest.Open(t), newStore(t)
	minted := mint(t, pool, store, tokens.Mint{Purpose: "p", Subject: "s"})
	require.NoError(t, inTx(pool, func(tx pgx.Tx) error {
		queries := &counted{Tx: tx}
		_, err := store.Consume(ctx, queries, "p", "s", minted.Token.Reveal())
		require.NoError(t, err)
		require.Equal(t, 1, queries.n)
		_, err = store.Consume(ctx, queries, "p", "s", minted.Token.Reveal())
		requireInvalid(t, err, "used")
		require.Equal(t, 2, queries.n)
		return nil
	}))
}

func TestConsume_RolledBackLeavesTheTokenUnspent(t *testing.T) {
	t.Parallel()
	pool, store := pgtest.Open(t), newStore(t)
	minted := mint(t, pool, store, tokens.Mint{Purpose: "p", Subject: "s"})
	text := minted.Token.Reveal()

	tx, err := pool.Begin(ctx)
	require.NoError(t, err)
	_, err = store.Consume(ctx, tx, "p", "s", text)
	require.NoError(t, err)
	_, err = store.Consume(ctx, tx, "p", "s", text)
	requireInvalid(t, err, "used")
	require.NoError(t, tx.Rollback(ctx))

	require.NoError(t, inTx(pool, func(tx pgx.Tx) error {
		savepoint, err := tx.Begin(ctx)
		require.NoError(t, err)
		_, err = store.Consume(ctx, savepoint, "p", "s", text)
		require.NoError(t, err)
		require.NoError(t, savepoint.Rollback(ctx))
		return nil
	}))

	_, err = consume(pool, store, "p", "s", text)
	require.NoError(t, err)
}

func TestConsume_WrongPurposeOrSubjectDoesNotBurnTheToken(t *testing.T) {
	t.Parallel()
	pool, store := pgtest.Open(t), newStore(t)
	minted := mint(t, pool, store, tokens.Mint{Purpose: "upload", Subject: "ada"})
	text := minted.Token.Reveal()
	for _, c := range []struct {
		purpose, subject string
		reason           string
	}{
		{"download", "ada", "purpose"},
		{"Upload", "ada", "purpose"},
		{"upload ", "ada", "purpose"},
		{"upload", "bob", "subject"},
		{"upload", "adä", "subject"},
		{"download", "bob", "purpose"},
	} {
		require.NoError(t, inTx(pool, func(tx pgx.Tx) error {
			_, err := store.Consume(ctx, tx, c.purpose, c.subject, text)
			requireInvalid(t, err, c.reason)
			return nil // and so commits
		}))
	}
	grant, err := consume(pool, store, "upload", "ada", text)
	require.NoError(t, err)
	require.Zero(t, grant.UsesLeft)
}

func TestConsume_ExpiresAtEquality(t *testing.T) {
	t.Parallel()
	pool, store := pgtest.Open(t), newStore(t)
	clock := pgtest.SetClock(t, pool, noon)
	m := tokens.Mint{Purpose: "p", Subject: "s", TTL: 90*time.Second + 7*time.Microsecond}
	atDeadline := mint(t, pool, store, m)
	justBefore := mint(t, pool, store, m)

	clock.Set(atDeadline.ExpiresAt)
	_, err := consume(pool, store, "p", "s", atDeadline.Token.Reveal())
	requireInvalid(t, err, "expired")
	_, err = store.Inspect(ctx, pool, "p", "s", atDeadline.Token.Reveal())
	requireInvalid(t, err, "expired")

	clock.Advance(-time.Microsecond)
	_, err = store.Inspect(ctx, pool, "p", "s", justBefore.Token.Reveal())
	require.NoError(t, err)
	grant, err := consume(pool, store, "p", "s", justBefore.Token.Reveal())
	require.NoError(t, err)
	require.Equal(t, justBefore.ExpiresAt.Add(-time.Microsecond), grant.ConsumedAt)
}

func TestConsume_AUsedTokenStaysUsedWhenTheClockStepsBack(t *testing.T) {
	t.Parallel()
	pool, store := pgtest.Open(t), newStore(t)
	clock := pgtest.SetClock(t, pool, noon)
	used := mint(t, pool, store, tokens.Mint{Purpose: "p", Subject: "s"})
	revoked := mint(t, pool, store, tokens.Mint{Purpose: "p", Subject: "s"})
	_, err := consume(pool, store, "p", "s", used.Token.Reveal())
	require.NoError(t, err)
	require.NoError(t, inTx(pool, func(tx pgx.Tx) error {
		_, err := store.Revoke(ctx, tx, revoked.Digest)
		return err
	}))
	clock.Advance(-time.Hour)
	_, err = consume(pool, store, "p", "s", used.Token.Reveal())
	requireInvalid(t, err, "used")
	_, err = consume(pool, store, "p", "s", revoked.Token.Reveal())
	requireInvalid(t, err, "revoked")
}

func TestConsume_SeveralUses(t *testing.T) {
	t.Parallel()
	pool, store := pgtest.Open(t), newStore(t)
	minted := mint(t, pool, store, tokens.Mint{Purpose: "p", Subject: "s", Uses: 3})
	for left := 2; left >= 0; left-- {
		grant, err := consume(pool, store, "p", "s", minted.Token.Reveal())
		require.NoError(t, err)
		require.Equal(t, left, grant.UsesLeft)
	}
	_, err := consume(pool, store, "p", "s", minted.Token.Reveal())
	requireInvalid(t, err, "used")
}

func TestConsume_AnUnknownTokenIsInvalidAndTheTransactionStaysUsable(t *testing.T) {
	t.Parallel()
	pool, store := pgtest.Open(t), newStore(t)
	text := must(store.Token(must(tokens.Derive(testKey, "never minted")))).Reveal()
	for _, level := range isolationLevels {
		require.NoError(t, pgx.BeginTxFunc(ctx, pool, pgx.TxOptions{IsoLevel: level}, func(tx pgx.Tx) error {
			_, err := store.Consume(ctx, tx, "p", "s", text)
			requireInvalid(t, err, "unknown")
			_, err = store.Mint(ctx, tx, tokens.Mint{Purpose: "p", Subject: "s"})
			return err
		}))
	}
}

// A token can be minted between the update that does not find it and the look
// at why. The reason is then "none", which is no answer.
func TestConsume_ATokenMintedMeanwhileIsConsumedOrRetryable(t *testing.T) {
	t.Parallel()
	pool, store := pgtest.Open(t), newStore(t)
	token := must(store.Token(must(tokens.Derive(testKey, "meanwhile"))))
	stubInspect := func(body string) {
		_, err := pool.Exec(ctx, `create or replace function metered.inspect_token(token_digest bytea, for_purpose text, for_subject text,
			out status text, out payload json, out uses_left int,
			out minted_at timestamptz, out expires_at timestamptz, out consumed_at timestamptz)
			language plpgsql as $$ begin status := 'ok'; `+body+` end $$`)
		require.NoError(t, err)
	}
	stubInspect("")
	_, err := consume(pool, store, "p", "s", token.Reveal())
	require.Equal(t, sqlstate.SerializationFailure, sqlstate.Of(err))

	stubInspect(`insert into metered.tokens (digest, minted_at, expires_at, uses, purpose, subject)
		values (token_digest, now(), now() + interval '1 hour', 1, for_purpose, for_subject);`)
	grant, err := consume(pool, store, "p", "s", token.Reveal())
	require.NoError(t, err)
	require.Equal(t, token.Digest(), grant.Digest)
}

func TestConsume_WaitsForACompetitorAtMostTheLockTimeout(t *testing.T) {
	t.Parallel()
	pool := pgtest.Open(t)
	store := must(tokens.New(tokens.Config{Prefix: "acme_upload", LockTimeout: 20 * time.Millisecond}))
	minted := mint(t, pool, store, tokens.Mint{Purpose: "p", Subject: "s"})
	holder, err := pool.Begin(ctx)
	require.NoError(t, err)
	_, err = store.Consume(ctx, holder, "p", "s", minted.Token.Reveal())
	require.NoError(t, err)

	_, err = consume(pool, store, "p", "s", minted.Token.Reveal())
	requireBusy(t, err)

	// The transaction's own timeout takes precedence, and both are as they were.
	patient := must(tokens.New(tokens.Config{Prefix: "acme_upload", LockTimeout: time.Hour}))
	require.ErrorIs(t, inTx(pool, func(tx pgx.Tx) error {
		_, err := tx.Exec(ctx, "set local lock_timeout = '30ms'; set local statement_timeout = '2min'")
		require.NoError(t, err)
		_, err = patient.Inspect(ctx, tx, "p", "s", minted.Token.Reveal())
		require.NoError(t, err, "inspecting does not wait")
		_, err = patient.Mint(ctx, tx, tokens.Mint{Purpose: "p", Subject: "s"})
		require.NoError(t, err)
		requireSetting(t, tx, "lock_timeout", "30ms")
		_, err = patient.Consume(ctx, tx, "p", "s", minted.Token.Reveal())
		return err
	}), budget.ErrBusy)
	require.NoError(t, holder.Rollback(ctx))
	require.NoError(t, inTx(pool, func(tx pgx.Tx) error {
		_, err = store.Consume(ctx, tx, "p", "s", minted.Token.Reveal())
		require.NoError(t, err)
		requireSetting(t, tx, "lock_timeout", "0")
		_, err := tx.Exec(ctx, "set local lock_timeout = '30ms'")
		require.NoError(t, err)
		_, err = patient.Consume(ctx, tx, "p", "s", minted.Token.Reveal())
		requireInvalid(t, err, "used")
		requireSetting(t, tx, "lock_timeout", "30ms")
		return nil
	}))
}

func requireSetting(t *testing.T, tx pgx.Tx, name, want string) {
	t.Helper()
	var got string
	require.NoError(t, tx.QueryRow(ctx, "select current_setting($1)", name).Scan(&got))
	require.Equal(t, want, got, name)
}

func TestConsume_InAReadOnlyTransactionIsPostgressError(t *testing.T) {
	t.Parallel()
	pool, store := pgtest.Open(t), newStore(t)
	minted := mint(t, pool, store, tokens.Mint{Purpose: "p", Subject: "s"})
	err := pgx.BeginTxFunc(ctx, pool, pgx.TxOptions{AccessMode: pgx.ReadOnly}, func(tx pgx.Tx) error {
		_, err := store.Inspect(ctx, tx, "p", "s", minted.Token.Reveal())
		require.NoError(t, err)
		_, err = store.Consume(ctx, tx, "p", "s", minted.Token.Reveal())
		return err
	})
	require.Equal(t, sqlstate.ReadOnlyTransaction, sqlstate.Of(err))
	require.NotErrorIs(t, err, tokens.ErrInvalid)
}

func TestConsume_ATokenMintedSinceTheSnapshotIsRetryable(t *testing.T) {
	t.Parallel()
	for _, level := range isolationLevels[1:] {
		pool, store := pgtest.Open(t), newStore(t)
		tx, err := pool.BeginTx(ctx, pgx.TxOptions{IsoLevel: level})
		require.NoError(t, err)
		_, err = tx.Exec(ctx, "select from metered.tokens") // takes the snapshot
		require.NoError(t, err)
		minted := mint(t, pool, store, tokens.Mint{Purpose: "p", Subject: "s"})
		_, err = store.Consume(ctx, tx, "p", "s", minted.Token.Reveal())
		require.Equal(t, sqlstate.SerializationFailure, sqlstate.Of(err), "%v", err)
		require.NoError(t, tx.Rollback(ctx))
		_, err = consume(pool, store, "p", "s", minted.Token.Reveal())
		require.NoError(t, err)
	}
}

// A snapshot from before another transaction consumed, revoked or purged the
// token must not make a second grant of it, nor an invalid one.
func TestConsume_AnOldSnapshotIsRetryable(t *testing.T) {
	t.Parallel()
	pool, store := pgtest.Open(t), newStore(t)
	for _, level := range isolationLevels[1:] {
		for name, meanwhile := range map[string]func(*pgxpool.Pool, *tokens.Store, tokens.Minted) error{
			"consumed": func(pool *pgxpool.Pool, store *tokens.Store, m tokens.Minted) error {
				_, err := consume(pool, store, "p", "s", m.Token.Reveal())
				return err
			},
			"revoked": func(pool *pgxpool.Pool, store *tokens.Store, m tokens.Minted) error {
				return inTx(pool, func(tx pgx.Tx) error {
					_, err := store.Revoke(ctx, tx, m.Digest)
					return err
				})
			},
			"purged": func(pool *pgxpool.Pool, store *tokens.Store, m tokens.Minted) error {
				if _, err := consume(pool, store, "p", "s", m.Token.Reveal()); err != nil {
					return err
				}
				_, err := pool.Exec(ctx, "select metered.purge_tokens(null, 'infinity', 100)")
				return err
			},
		} {
			t.Run(string(level)+", "+name, func(t *testing.T) {
				minted := mint(t, pool, store, tokens.Mint{Purpose: "p", Subject: "s"})
				tx, err := pool.BeginTx(ctx, pgx.TxOptions{IsoLevel: level})
				require.NoError(t, err)
				_, err = store.Inspect(ctx, tx, "p", "s", minted.Token.Reveal())
				require.NoError(t, err)
				require.NoError(t, meanwhile(pool, store, minted))
				_, err = store.Consume(ctx, tx, "p", "s", minted.Token.Reveal())
				require.Equal(t, sqlstate.SerializationFailure, sqlstate.Of(err), err)
				require.NoError(t, tx.Rollback(ctx))
			})
		}
	}
}
