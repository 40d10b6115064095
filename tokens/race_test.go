package tokens_test

import (
	"errors"
	"sync"
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

const racers = 64

// race runs f in this many goroutines at once.
func race(n int, f func(i int)) {
	var ready, done sync.WaitGroup
	start := make(chan struct{})
	ready.Add(n)
	for i := range n {
		done.Go(func() {
			ready.Done()
			<-start
			f(i)
		})
	}
	ready.Wait()
	close(start)
	done.Wait()
}

// testRace lets 64 consumers race for a token and requires that exactly so many
// commit as it has uses, and that the others are told that it is used.
func testRace(t *testing.T, uses int, levelOf func(i int) pgx.TxIsoLevel) {
	pool := pgtest.OpenWith(t, pgtest.Options{MaxConns: 32})
	store := newStore(t)
	minted := mint(t, pool, store, tokens.Mint{Purpose: "p", Subject: "s", Uses: uses})
	_, err := pool.Exec(ctx, "create table done (n int not null)")
	require.NoError(t, err)

	var won, lost, other, retries atomic.Int64
	left := make([]atomic.Int64, uses)
	race(racers, func(i int) {
		var grant tokens.Grant
		n, err := retried(pool, levelOf(i), func(tx pgx.Tx) (err error) {
			if grant, err = store.Consume(ctx, tx, "p", "s", minted.Token.Reveal()); err != nil {
				return err
			}
			_, err = tx.Exec(ctx, "insert into done values ($1)", i)
			return err
		})
		retries.Add(int64(n))
		var invalid *tokens.InvalidError
		switch {
		case err == nil:
			won.Add(1)
			left[grant.UsesLeft].Add(1)
		case errors.As(err, &invalid) && invalid.Reason() == tokens.ReasonUsed:
			lost.Add(1)
		default:
			other.Add(1)
			t.Error(err)
		}
	})
	require.EqualValues(t, uses, won.Load())
	require.EqualValues(t, racers-uses, lost.Load())
	require.Zero(t, other.Load())
	for i := range left {
		require.EqualValues(t, 1, left[i].Load(), "each use once")
	}
	var rows, used int
	require.NoError(t, pool.QueryRow(ctx, "select (select count(*) from done), used from metered.tokens").Scan(&rows, &used))
	require.Equal(t, uses, rows)
	require.Equal(t, uses, used)
	t.Logf("%d retries", retries.Load())
}

func TestConsume_OfRacingConsumersExactlyOneWins(t *testing.T) {
	t.Parallel()
	for _, level := range isolationLevels {
		t.Run(string(level), func(t *testing.T) {
			t.Parallel()
			testRace(t, 1, func(int) pgx.TxIsoLevel { return level })
		})
	}
	t.Run("mixed", func(t *testing.T) {
		t.Parallel()
		testRace(t, 1, func(i int) pgx.TxIsoLevel { return isolationLevels[i%3] })
	})
}

func TestConsume_OfRacingConsumersExactlyAsManyWinAsThereAreUses(t *testing.T) {
	t.Parallel()
	for _, level := range isolationLevels {
		t.Run(string(level), func(t *testing.T) {
			t.Parallel()
			testRace(t, 10, func(int) pgx.TxIsoLevel { return level })
		})
	}
	t.Run("mixed", func(t *testing.T) {
		t.Parallel()
		testRace(t, 10, func(i int) pgx.TxIsoLevel { return isolationLevels[i%3] })
	})
}

// waitForLock returns when a session of this database waits for a lock.
func waitForLock(t *testing.T, pool *pgxpool.Pool) {
	t.Helper()
	require.Eventually(t, func() bool {
		var waiting bool
		err := pool.QueryRow(ctx, `select exists (select from pg_stat_activity
			where datname = current_database() and wait_event_type = 'Lock')`).Scan(&waiting)
		return err == nil && waiting
	}, 10*time.Second, time.Millisecond)
}

// The loser waits on the winner's row. What it then hears is the truth about the
// token, or that it must try again.
func TestConsume_TheLoserOfARaceHearsTheTruth(t *testing.T) {
	t.Parallel()
	for _, level := range isolationLevels {
		for _, commits := range []bool{true, false} {
			name := string(level) + ", winner rolls back"
			if commits {
				name = string(level) + ", winner commits"
			}
			t.Run(name, func(t *testing.T) {
				t.Parallel()
				pool, store := pgtest.Open(t), newStore(t)
				minted := mint(t, pool, store, tokens.Mint{Purpose: "p", Subject: "s"})
				winner, err := pool.Begin(ctx)
				require.NoError(t, err)
				_, err = store.Consume(ctx, winner, "p", "s", minted.Token.Reveal())
				require.NoError(t, err)

				heard := make(chan error, 1)
				go func() {
					heard <- pgx.BeginTxFunc(ctx, pool, pgx.TxOptions{IsoLevel: level}, func(tx pgx.Tx) error {
						_, err := store.Consume(ctx, tx, "p", "s", minted.Token.Reveal())
						return err
					})
				}()
				waitForLock(t, pool)
				if commits {
					require.NoError(t, winner.Commit(ctx))
				} else {
					require.NoError(t, winner.Rollback(ctx))
				}
				err = <-heard
				switch {
				case !commits:
					require.NoError(t, err)
				case level == pgx.ReadCommitted:
					requireInvalid(t, err, tokens.ReasonUsed)
				default:
					require.Equal(t, sqlstate.SerializationFailure, sqlstate.Of(err))
					require.NotErrorIs(t, err, tokens.ErrInvalid)
				}
			})
		}
	}
}

// A snapshot from before another transaction consumed, revoked or purged the
// token must not make a second grant of it, nor an invalid one.
func TestConsume_AnOldSnapshotIsRetryable(t *testing.T) {
	t.Parallel()
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
				t.Parallel()
				pool, store := pgtest.Open(t), newStore(t)
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
