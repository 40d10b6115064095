package tokens_test

import (
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/tokens"
)

func revoke(t *testing.T, pool *pgxpool.Pool, store *tokens.Store, digest tokens.Digest) bool {
	t.Helper()
	var revoked bool
	require.NoError(t, inTx(pool, func(tx pgx.Tx) (err error) {
		revoked, err = store.Revoke(ctx, tx, digest)
		return err
	}))
	return revoked
}

func TestRevoke_EndsALiveTokenOnce(t *testing.T) {
	t.Parallel()
	pool, store := pgtest.Open(t), newStore(t)
	clock := pgtest.SetClock(t, pool, noon)
	m := tokens.Mint{Purpose: "p", Subject: "s", TTL: time.Minute, Uses: 2}
	live, other, used, expired := mint(t, pool, store, m), mint(t, pool, store, m), mint(t, pool, store, m), mint(t, pool, store, m)
	_, err := consume(pool, store, "p", "s", live.Token.Reveal())
	require.NoError(t, err)
	for range 2 {
		_, err = consume(pool, store, "p", "s", used.Token.Reveal())
		require.NoError(t, err)
	}

	require.True(t, revoke(t, pool, store, must(store.Parse(live.Token.Reveal())).Digest()))
	require.False(t, revoke(t, pool, store, live.Digest), "again")
	_, err = consume(pool, store, "p", "s", live.Token.Reveal())
	requireInvalid(t, err, "revoked")
	_, err = store.Inspect(ctx, pool, "p", "s", live.Token.Reveal())
	requireInvalid(t, err, "revoked")

	require.False(t, revoke(t, pool, store, used.Digest))
	_, err = consume(pool, store, "p", "s", used.Token.Reveal())
	requireInvalid(t, err, "used")
	require.False(t, revoke(t, pool, store, tokens.Digest{}), "unknown")
	_, err = consume(pool, store, "p", "s", other.Token.Reveal())
	require.NoError(t, err)

	clock.Advance(time.Minute)
	require.False(t, revoke(t, pool, store, expired.Digest))
	_, err = consume(pool, store, "p", "s", expired.Token.Reveal())
	requireInvalid(t, err, "expired")
}

func TestRevokeSubject_EndsAndCountsLiveTokens(t *testing.T) {
	t.Parallel()
	pool, store := pgtest.Open(t), newStore(t)
	clock := pgtest.SetClock(t, pool, noon)
	mints := func(purpose, subject string, ttl time.Duration) []tokens.Minted {
		var minted []tokens.Minted
		require.NoError(t, inTx(pool, func(tx pgx.Tx) (err error) {
			m := tokens.Mint{Purpose: purpose, Subject: subject, TTL: ttl}
			minted, err = store.MintMany(ctx, tx, []tokens.Mint{m, m, m})
			return err
		}))
		return minted
	}
	expired := mints("p", "s", time.Second)
	live := mints("p", "s", time.Hour)
	otherPurpose, otherSubject := mints("q", "s", time.Hour), mints("p", "t", time.Hour)
	_, err := consume(pool, store, "p", "s", live[0].Token.Reveal())
	require.NoError(t, err)
	clock.Advance(time.Second)

	for _, want := range []int64{2, 0} {
		require.NoError(t, inTx(pool, func(tx pgx.Tx) error {
			count, err := store.RevokeSubject(ctx, tx, "p", "s")
			require.Equal(t, want, count)
			return err
		}))
	}
	for _, c := range []struct {
		minted tokens.Minted
		reason string
	}{
		{live[0], "used"}, {live[1], "revoked"}, {live[2], "revoked"},
		{expired[0], "expired"},
	} {
		_, err := consume(pool, store, "p", "s", c.minted.Token.Reveal())
		requireInvalid(t, err, c.reason)
	}
	for _, other := range append(otherPurpose, otherSubject...) {
		_, err := consume(pool, store, other.Purpose, other.Subject, other.Token.Reveal())
		require.NoError(t, err)
	}
}

func TestRevokeSubject_ManyAtOnceDoNotDeadlock(t *testing.T) {
	t.Parallel()
	pgtest.OnEachVersion(t)
	pool, store := pgtest.Open(t), newStore(t)
	for range 5 {
		mints := make([]tokens.Mint, 200)
		for i := range mints {
			mints[i] = tokens.Mint{Purpose: "p", Subject: "s"}
		}
		require.NoError(t, inTx(pool, func(tx pgx.Tx) error {
			_, err := store.MintMany(ctx, tx, mints)
			return err
		}))
		counts := make([]int64, 12)
		race(len(counts), func(i int) {
			err := inTx(pool, func(tx pgx.Tx) (err error) {
				counts[i], err = store.RevokeSubject(ctx, tx, "p", "s")
				return err
			})
			if err != nil {
				t.Error(err)
			}
		})
		var total int64
		for _, n := range counts {
			total += n
		}
		require.EqualValues(t, len(mints), total)
	}
}

func TestRevoke_WaitsForAConsumerAtMostTheLockTimeout(t *testing.T) {
	t.Parallel()
	pool := pgtest.Open(t)
	store := must(tokens.New(tokens.Config{Prefix: "acme_upload", LockTimeout: 20 * time.Millisecond}))
	minted := mint(t, pool, store, tokens.Mint{Purpose: "p", Subject: "s"})
	holder, err := pool.Begin(ctx)
	require.NoError(t, err)
	_, err = store.Consume(ctx, holder, "p", "s", minted.Token.Reveal())
	require.NoError(t, err)
	requireBusy(t, inTx(pool, func(tx pgx.Tx) error {
		_, err := store.Revoke(ctx, tx, minted.Digest)
		return err
	}))
	requireBusy(t, inTx(pool, func(tx pgx.Tx) error {
		_, err := store.RevokeSubject(ctx, tx, "p", "s")
		return err
	}))
	require.NoError(t, holder.Commit(ctx))
	require.NoError(t, inTx(pool, func(tx pgx.Tx) error {
		revoked, err := store.Revoke(ctx, tx, minted.Digest)
		require.NoError(t, err)
		require.False(t, revoked, "its use was taken first")
		count, err := store.RevokeSubject(ctx, tx, "p", "s")
		require.NoError(t, err)
		require.Zero(t, count)
		requireSetting(t, tx, "lock_timeout", "0")
		return nil
	}))
}
