package tokens_test

import (
	"context"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/internal/purge"
	"github.com/pgmetered/metered/tokens"
)

// mintOf mints n tokens that live for ttl.
func mintOf(t *testing.T, pool *pgxpool.Pool, store *tokens.Store, n int, ttl time.Duration) []tokens.Minted {
	t.Helper()
	var all []tokens.Minted
	for len(all) < n {
		mints := make([]tokens.Mint, min(n-len(all), 1000))
		for i := range mints {
			mints[i] = tokens.Mint{Purpose: "p", Subject: fmt.Sprint(i), TTL: ttl}
		}
		require.NoError(t, inTx(pool, func(tx pgx.Tx) error {
			minted, err := store.MintMany(ctx, tx, mints)
			all = append(all, minted...)
			return err
		}))
	}
	return all
}

func countTokens(t *testing.T, pool *pgxpool.Pool) (n int) {
	t.Helper()
	require.NoError(t, pool.QueryRow(ctx, "select count(*) from metered.tokens").Scan(&n))
	return n
}

func TestPurge_DeletesTokensThatEndedARetentionAgo(t *testing.T) {
	t.Parallel()
	pool, store := pgtest.Open(t), newStore(t)
	clock := pgtest.SetClock(t, pool, noon)
	const day = 24 * time.Hour
	used, revoked := mint(t, pool, store, tokens.Mint{Purpose: "p", Subject: "s", TTL: 100 * day}), mint(t, pool, store, tokens.Mint{Purpose: "p", Subject: "s", TTL: 100 * day})
	half := mint(t, pool, store, tokens.Mint{Purpose: "p", Subject: "s", TTL: 100 * day, Uses: 2})
	clock.Advance(day)
	for _, m := range []tokens.Minted{used, half} {
		_, err := consume(pool, store, "p", "s", m.Token.Reveal())
		require.NoError(t, err)
	}
	require.True(t, revoke(t, pool, store, revoked.Digest))
	expired := mint(t, pool, store, tokens.Mint{Purpose: "p", Subject: "s", TTL: time.Second})
	ended := clock.Now()

	purgeAt := func(at time.Time, retention time.Duration) int64 {
		clock.Set(at)
		told, err := purge.Tokens.Delete(ctx, pool, purge.Options{OlderThan: retention, DryRun: true})
		require.NoError(t, err)
		deleted, err := purge.Tokens.Delete(ctx, pool, purge.Options{OlderThan: retention})
		require.NoError(t, err)
		require.Equal(t, told, deleted)
		return deleted
	}
	require.Zero(t, purgeAt(ended.Add(7*day-time.Microsecond), 7*day))
	_, err := consume(pool, store, "p", "s", used.Token.Reveal())
	requireInvalid(t, err, "used")
	require.EqualValues(t, 2, purgeAt(ended.Add(7*day), 7*day), "the used and the revoked one")
	require.Zero(t, purgeAt(ended.Add(7*day+time.Second-time.Microsecond), 7*day))
	require.EqualValues(t, 1, purgeAt(ended.Add(7*day+time.Second), 7*day), "the expired one")
	for _, gone := range []tokens.Minted{used, revoked, expired} {
		_, err := consume(pool, store, "p", "s", gone.Token.Reveal())
		requireInvalid(t, err, "unknown")
	}
	_, err = consume(pool, store, "p", "s", half.Token.Reveal())
	require.NoError(t, err)
	require.Zero(t, purgeAt(clock.Now().Add((30*24*time.Hour)-time.Microsecond), 0))
	require.EqualValues(t, 1, purgeAt(clock.Now().Add(time.Microsecond), 0), "the default retention")
}

// Retention counts from the revocation for a token that the revocation ended, and from the expiry for a token that had
// expired before.
func TestPurge_CountsFromTheEndThatASubjectsRevocationMakes(t *testing.T) {
	t.Parallel()
	pool, store := pgtest.Open(t), newStore(t)
	clock := pgtest.SetClock(t, pool, noon)
	for _, ttl := range []time.Duration{time.Minute, 24 * time.Hour} {
		mint(t, pool, store, tokens.Mint{Purpose: "p", Subject: "s", TTL: ttl})
	}
	clock.Advance(time.Hour)
	require.NoError(t, inTx(pool, func(tx pgx.Tx) error {
		revoked, err := store.RevokeSubject(ctx, tx, "p", "s")
		require.Equal(t, int64(1), revoked)
		return err
	}))
	const retention = 3 * time.Hour
	for _, ended := range []time.Duration{time.Minute, time.Hour} {
		for wait, want := range []int64{0, 1} {
			clock.Set(noon.Add(ended + retention + time.Duration(wait-1)*time.Microsecond))
			deleted, err := purge.Tokens.Delete(ctx, pool, purge.Options{OlderThan: retention})
			require.NoError(t, err)
			require.Equal(t, want, deleted, ended)
		}
	}
}

func TestPurge_NeverDeletesALiveTokenWhateverTheArguments(t *testing.T) {
	t.Parallel()
	pool, store := pgtest.Open(t), newStore(t)
	mintOf(t, pool, store, 10, time.Minute)
	_, err := pool.Exec(ctx, "select metered.purge_tokens(null, 'infinity', 1000)")
	require.NoError(t, err)
	require.Equal(t, 10, countTokens(t, pool))
}

func TestPurge_WorksInBatchesWithProgress(t *testing.T) {
	t.Parallel()
	pool, store := pgtest.Open(t), newStore(t)
	clock := pgtest.SetClock(t, pool, noon)
	mintOf(t, pool, store, 25, time.Second) // all ended at the same microsecond
	clock.Advance(time.Hour)
	mintOf(t, pool, store, 7, time.Minute)
	var progress []int64
	opts := purge.Options{OlderThan: time.Minute, Batch: 10, Progress: func(n int64) { progress = append(progress, n) }}
	deleted, err := purge.Tokens.Delete(ctx, pool, opts)
	require.NoError(t, err)
	require.EqualValues(t, 25, deleted)
	require.Equal(t, []int64{10, 20, 25}, progress)
	require.Equal(t, 7, countTokens(t, pool))
	deleted, err = purge.Tokens.Delete(ctx, pool, opts)
	require.NoError(t, err)
	require.Zero(t, deleted)
	require.Len(t, progress, 3)
}

// Where a batch ended is where the next one begins.
func TestPurge_GoesOnWhereTheLastBatchEnded(t *testing.T) {
	t.Parallel()
	pool, store := pgtest.Open(t), newStore(t)
	clock := pgtest.SetClock(t, pool, noon)
	for i := range 4 {
		mintOf(t, pool, store, 1, time.Duration(i+1)*time.Second)
	}
	clock.Advance(time.Hour)
	batch := func(after any) (deleted int, lastEnd time.Time) {
		require.NoError(t, pool.QueryRow(ctx, "select * from metered.purge_tokens($1, 'infinity', 2)", after).Scan(&deleted, &lastEnd))
		return deleted, lastEnd.UTC()
	}
	deleted, lastEnd := batch(nil)
	require.Equal(t, 2, deleted)
	require.Equal(t, noon.Add(2*time.Second), lastEnd)
	deleted, lastEnd = batch(noon.Add(4 * time.Second))
	require.Equal(t, 1, deleted, "one was before it")
	require.Equal(t, noon.Add(4*time.Second), lastEnd)
}

func TestPurge_StopsWhenItsContextEndsAndKeepsFinishedBatches(t *testing.T) {
	t.Parallel()
	pool, store := pgtest.Open(t), newStore(t)
	clock := pgtest.SetClock(t, pool, noon)
	mintOf(t, pool, store, 50, time.Second)
	clock.Advance(time.Hour)
	cancellable, cancel := context.WithCancel(ctx)
	defer cancel()
	deleted, err := purge.Tokens.Delete(cancellable, pool, purge.Options{OlderThan: time.Minute, Batch: 10, Progress: func(n int64) {
		if n == 20 {
			cancel()
		}
	}})
	require.ErrorIs(t, err, context.Canceled)
	require.EqualValues(t, 20, deleted)
	require.Equal(t, 30, countTokens(t, pool))
}

func TestPurge_AnyNumberMayRunAtOnce(t *testing.T) {
	t.Parallel()
	pool := pgtest.OpenWith(t, pgtest.Options{Config: func(c *pgxpool.Config) {
		c.ConnConfig.RuntimeParams["default_transaction_isolation"] = "serializable" // which Purge overrides
	}})
	store := newStore(t)
	clock := pgtest.SetClock(t, pool, noon)
	mintOf(t, pool, store, 5000, time.Second)
	clock.Advance(time.Hour)
	live := mintOf(t, pool, store, 100, time.Hour)
	var total atomic.Int64
	race(8, func(i int) {
		deleted, err := purge.Tokens.Delete(ctx, pool, purge.Options{OlderThan: time.Minute, Batch: 50 + i})
		if err != nil {
			t.Error(err)
		}
		total.Add(deleted)
	})
	require.EqualValues(t, 5000, total.Load(), "each token is deleted once")
	require.Equal(t, len(live), countTokens(t, pool))
}

func TestPurge_PassesOverATokenThatAnotherTransactionHolds(t *testing.T) {
	t.Parallel()
	pool, store := pgtest.Open(t), newStore(t)
	clock := pgtest.SetClock(t, pool, noon)
	mintOf(t, pool, store, 3, time.Second)
	clock.Advance(time.Hour)
	holder, err := pool.Begin(ctx)
	require.NoError(t, err)
	_, err = holder.Exec(ctx, "select from metered.tokens where subject = '1' for key share")
	require.NoError(t, err)
	deleted, err := purge.Tokens.Delete(ctx, pool, purge.Options{OlderThan: time.Minute})
	require.NoError(t, err)
	require.EqualValues(t, 2, deleted)
	require.NoError(t, holder.Rollback(ctx))
}
