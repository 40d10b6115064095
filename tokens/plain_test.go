package tokens_test

import (
	"context"
	"encoding/json"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/tokens"
)

// Consume answers the short way as the full function does, and leaves the same rows and settings,
// whatever became of the token, at each isolation level, with and without a lock_timeout.
func TestConsume_AnswersTheShortWayAsTheFullFunctionDoes(t *testing.T) {
	t.Parallel()
	store := newStore(t)
	var told [2][]string
	for way := range told {
		pool := pgtest.Open(t)
		clock := pgtest.SetClock(t, pool, time.Date(2026, 3, 1, 12, 0, 0, 123_456_000, time.UTC))
		if way == 1 {
			_, err := pool.Exec(ctx, `create or replace function metered._goes_short() returns boolean language sql immutable as 'select false'`)
			require.NoError(t, err)
		}
		told[way] = consumeAll(t, pool, store, clock)
	}
	require.Equal(t, told[1], told[0])
	require.Len(t, told[0], 3*len(isolationLevels)*12)
}

// consumeAll consumes tokens that are good, and such that are not, and tells what it was answered.
func consumeAll(t *testing.T, pool *pgxpool.Pool, store *tokens.Store, clock *pgtest.Clock) (told []string) {
	for i, level := range isolationLevels {
		for j, before := range []string{"0", "7s", "2s"} { // the store's is 5s
			nth := 0
			token := func(m tokens.Mint) string {
				nth++
				m.Secret = must(tokens.Derive(testKey, fmt.Sprint(i, j, nth)))
				return mint(t, pool, store, m).Token.Reveal()
			}
			take := func(purpose, subject, text string) {
				tx, err := pool.BeginTx(ctx, pgx.TxOptions{IsoLevel: level})
				require.NoError(t, err)
				_, err = tx.Exec(ctx, "select set_config('lock_timeout', $1, true)", before)
				require.NoError(t, err)
				grant, err := store.Consume(ctx, tx, purpose, subject, text)
				requireSetting(t, tx, "lock_timeout", before)
				told = append(told, fmt.Sprint(string(must(json.Marshal(grant))), err))
				require.NoError(t, tx.Commit(ctx))
			}
			one := token(tokens.Mint{Purpose: "p", Subject: "s"})
			take("q", "s", one)
			take("p", "t", one)
			take("p", "s", one)
			take("p", "s", one)
			many := token(tokens.Mint{Purpose: "p", Subject: "s", Uses: 1000, Payload: map[string]string{"path": `a "b" é`}})
			take("p", "s", many)
			clock.Advance(time.Second)
			take("p", "s", many)
			revoked := token(tokens.Mint{Purpose: "p", Subject: "s"})
			require.NoError(t, inTx(pool, func(tx pgx.Tx) error {
				_, err := store.Revoke(ctx, tx, must(store.Parse(revoked)).Digest())
				return err
			}))
			take("p", "s", revoked)
			late := token(tokens.Mint{Purpose: "p", Subject: "s", TTL: time.Second})
			clock.Advance(time.Second)
			take("p", "s", late)
			take("p", "s", must(store.Token(must(tokens.Derive(testKey, "never")))).Reveal())
			var rows string
			for _, digest := range []string{one, many, late} {
				parsed := must(store.Parse(digest)).Digest()
				require.NoError(t, pool.QueryRow(ctx, "select k::text from metered.tokens k where digest = $1", parsed[:]).Scan(&rows))
				told = append(told, rows)
			}
		}
	}
	return told
}

// A consumer that waited for another one in vain has its lock_timeout back, for what its transaction does next.
func TestConsume_AWaitInVainLeavesTheSetting(t *testing.T) {
	t.Parallel()
	pool, store := pgtest.Open(t), newStore(t)
	minted := mint(t, pool, store, tokens.Mint{Purpose: "p", Subject: "s"})
	patient := must(tokens.New(tokens.Config{Prefix: "acme_upload", LockTimeout: time.Hour}))
	winner := must(pool.Begin(ctx))
	_, err := store.Consume(ctx, winner, "p", "s", minted.Token.Reveal())
	require.NoError(t, err)
	var refusal error
	var setting string
	loser := pgtest.Going(func() error {
		return inTx(pool, func(tx pgx.Tx) error {
			_, refusal = patient.Consume(ctx, tx, "p", "s", minted.Token.Reveal())
			return tx.QueryRow(ctx, "select current_setting('lock_timeout')").Scan(&setting)
		})
	})
	pgtest.WaitQueued(t, pool, 1)
	require.NoError(t, winner.Commit(ctx))
	require.NoError(t, <-loser)
	requireInvalid(t, refusal, "used")
	require.Equal(t, "0", setting)
}

// The shorter one of the session's lock_timeout and of the store's counts.
func TestConsume_WaitsNoLongerThanTheShorterTimeout(t *testing.T) {
	t.Parallel()
	pool, store := pgtest.Open(t), newStore(t)
	minted := mint(t, pool, store, tokens.Mint{Purpose: "p", Subject: "s"})
	winner := must(pool.Begin(ctx))
	defer func() { _ = winner.Rollback(ctx) }()
	_, err := store.Consume(ctx, winner, "p", "s", minted.Token.Reveal())
	require.NoError(t, err)
	within, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	for before, own := range map[string]time.Duration{"1h": time.Millisecond, "1ms": time.Hour, "0": time.Millisecond} {
		hasty := must(tokens.New(tokens.Config{Prefix: "acme_upload", LockTimeout: own}))
		err := inTx(pool, func(tx pgx.Tx) error {
			_, err := tx.Exec(ctx, "select set_config('lock_timeout', $1, true)", before)
			require.NoError(t, err)
			_, err = hasty.Consume(within, tx, "p", "s", minted.Token.Reveal())
			return err
		})
		require.ErrorIs(t, err, budget.ErrBusy, before)
		require.NotErrorIs(t, err, context.DeadlineExceeded, before)
	}
}
