package tokens_test

import (
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/internal/sqlstate"
	"github.com/pgmetered/metered/tokens"
)

func replace(pool *pgxpool.Pool, store *tokens.Store, m tokens.Mint) (tokens.Minted, error) {
	var minted tokens.Minted
	err := inTx(pool, func(tx pgx.Tx) (err error) {
		minted, err = store.Replace(ctx, tx, m)
		return err
	})
	return minted, err
}

func TestReplace_LeavesOneLiveToken(t *testing.T) {
	t.Parallel()
	pool, store := pgtest.Open(t), newStore(t)
	clock := pgtest.SetClock(t, pool, noon)
	m := tokens.Mint{Purpose: "reset", Subject: "ada", Payload: "x", TTL: time.Hour, Uses: 2}
	expired := mint(t, pool, store, tokens.Mint{Purpose: "reset", Subject: "ada", TTL: time.Second})
	clock.Advance(time.Second)
	one, two := mint(t, pool, store, m), mint(t, pool, store, m)
	others := []tokens.Minted{
		mint(t, pool, store, tokens.Mint{Purpose: "reset", Subject: "bob"}),
		mint(t, pool, store, tokens.Mint{Purpose: "login", Subject: "ada"}),
	}

	replaced, err := replace(pool, store, m)
	require.NoError(t, err)
	require.EqualValues(t, 2, replaced.Replaced)
	require.Equal(t, clock.Now(), replaced.MintedAt)
	require.Equal(t, clock.Now().Add(time.Hour), replaced.ExpiresAt)
	for _, gone := range []tokens.Minted{one, two} {
		_, err = consume(pool, store, "reset", "ada", gone.Token.Reveal())
		requireInvalid(t, err, "revoked")
	}
	_, err = consume(pool, store, "reset", "ada", expired.Token.Reveal())
	requireInvalid(t, err, "expired")
	for _, other := range others {
		_, err = consume(pool, store, other.Purpose, other.Subject, other.Token.Reveal())
		require.NoError(t, err)
	}
	grant, err := consume(pool, store, "reset", "ada", replaced.Token.Reveal())
	require.NoError(t, err)
	require.Equal(t, `"x"`, string(grant.Payload))
	require.Equal(t, 1, grant.UsesLeft)

	again, err := replace(pool, store, m)
	require.NoError(t, err)
	require.EqualValues(t, 1, again.Replaced)
	clock.Advance(time.Hour) // a replaced token that has expired is not in the way
	third, err := replace(pool, store, m)
	require.NoError(t, err)
	require.Zero(t, third.Replaced)
}

// With the lock taken away the unique index still holds: the lock only makes
// callers queue instead of fail.
const noLocksSQL = `create or replace function metered._lock_keys(keys bigint[], wait_ms int) returns boolean
language plpgsql as 'begin return false; end'`

// The short form finds a missing lock (replace_token without _lock_keys).
func TestReplace_RacingCallersLeaveOneLiveToken(t *testing.T) {
	t.Parallel()
	pgtest.OnEachVersion(t)
	callers := pgtest.Size(8, 32)
	for _, locked := range []bool{true, false} {
		pool, store := pgtest.Open(t), newStore(t)
		if !locked {
			_, err := pool.Exec(ctx, noLocksSQL)
			require.NoError(t, err)
		}
		for i, level := range append(isolationLevels, "mixed") {
			t.Run(fmt.Sprintf("%s, locked %t", level, locked), func(t *testing.T) {
				var retries, revoked atomic.Int64
				race(callers, func(n int) {
					at := level
					if level == "mixed" {
						at = isolationLevels[n%3]
					}
					for range 3 {
						var minted tokens.Minted
						again, err := retried(pool, at, func(tx pgx.Tx) (err error) {
							minted, err = store.Replace(ctx, tx, tokens.Mint{Purpose: "p", Subject: string(level)})
							return err
						})
						if err != nil {
							t.Error(err)
						}
						retries.Add(int64(again))
						revoked.Add(minted.Replaced)
					}
				})
				requireLive(t, pool, i+1)
				require.EqualValues(t, callers*3-1, revoked.Load(), "each token is replaced once, but for the last")
				if i == 0 && locked {
					require.Zero(t, retries.Load(), "at READ COMMITTED callers queue")
				}
				t.Logf("%d retries", retries.Load())
			})
		}
	}
}

func requireLive(t *testing.T, pool *pgxpool.Pool, want int) {
	t.Helper()
	var live int
	require.NoError(t, pool.QueryRow(ctx, `select count(*) from metered.tokens
		where not revoked and used < uses and expires_at > metered.clock()`).Scan(&live))
	require.Equal(t, want, live)
}

// The first token of a subject is the case in which an old snapshot has nothing
// to collide with but the index.
func TestReplace_AnOldSnapshotIsRetryable(t *testing.T) {
	t.Parallel()
	for _, level := range isolationLevels[1:] {
		pool, store := pgtest.Open(t), newStore(t)
		tx, err := pool.BeginTx(ctx, pgx.TxOptions{IsoLevel: level})
		require.NoError(t, err)
		_, err = tx.Exec(ctx, "select 1")
		require.NoError(t, err)
		_, err = replace(pool, store, tokens.Mint{Purpose: "p", Subject: "s"})
		require.NoError(t, err)
		_, err = store.Replace(ctx, tx, tokens.Mint{Purpose: "p", Subject: "s"})
		require.Equal(t, sqlstate.SerializationFailure, sqlstate.Of(err), "%v", err)
		require.NoError(t, tx.Rollback(ctx))
		requireLive(t, pool, 1)
	}
}

func TestReplace_RacingConsumersNeverUseAReplacedToken(t *testing.T) {
	t.Parallel()
	pgtest.OnEachVersion(t)
	pool, store := pgtest.Open(t), newStore(t)
	first, err := replace(pool, store, tokens.Mint{Purpose: "p", Subject: "s"})
	require.NoError(t, err)
	var current atomic.Pointer[tokens.Minted]
	current.Store(&first)
	var consumed, revoked atomic.Int64
	race(16, func(n int) {
		for range 10 {
			if n%2 == 0 {
				minted, err := replace(pool, store, tokens.Mint{Purpose: "p", Subject: "s"})
				if err != nil {
					t.Error(err)
					return
				}
				revoked.Add(minted.Replaced)
				current.Store(&minted)
				continue
			}
			if _, err := consume(pool, store, "p", "s", current.Load().Token.Reveal()); err == nil {
				consumed.Add(1)
			}
		}
	})
	var used, gone, live int64
	require.NoError(t, pool.QueryRow(ctx, `select count(*) filter (where used = 1), count(*) filter (where revoked),
		count(*) filter (where ended_at is null) from metered.tokens`).Scan(&used, &gone, &live))
	require.Equal(t, consumed.Load(), used)
	require.Equal(t, revoked.Load(), gone)
	require.LessOrEqual(t, live, int64(1))
	require.EqualValues(t, 1+8*10, used+gone+live, "each token had one end")
}

func TestReplace_WaitsAtMostTheLockTimeout(t *testing.T) {
	t.Parallel()
	pool := pgtest.Open(t)
	store := must(tokens.New(tokens.Config{Prefix: "acme_upload", LockTimeout: 20 * time.Millisecond}))
	m := tokens.Mint{Purpose: "p", Subject: "s"}

	// For another Replace, which holds only the advisory lock and rows unseen.
	holder, err := pool.Begin(ctx)
	require.NoError(t, err)
	_, err = store.Replace(ctx, holder, m)
	require.NoError(t, err)
	_, err = replace(pool, store, m)
	requireBusy(t, err)
	_, err = replace(pool, store, tokens.Mint{Purpose: "p", Subject: "other"})
	require.NoError(t, err)
	require.NoError(t, holder.Rollback(ctx))

	// For a consumer.
	minted := mint(t, pool, store, m)
	holder, err = pool.Begin(ctx)
	require.NoError(t, err)
	_, err = store.Consume(ctx, holder, "p", "s", minted.Token.Reveal())
	require.NoError(t, err)
	_, err = replace(pool, store, m)
	requireBusy(t, err)
	require.NoError(t, holder.Rollback(ctx))

	require.NoError(t, inTx(pool, func(tx pgx.Tx) error {
		_, err := store.Replace(ctx, tx, m)
		require.NoError(t, err)
		requireSetting(t, tx, "lock_timeout", "0")
		return nil
	}))
}
