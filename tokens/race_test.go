package tokens_test

import (
	"errors"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/internal/sqlstate"
	"github.com/pgmetered/metered/tokens"
)

var racers = pgtest.Size(16, 64)

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

// testRace lets many consumers race for a token, at each isolation level and at all of them, and requires that exactly so many
// commit as it has uses, and that the others get the answer that it is used. The short form finds a use that was decided
// before the wait (consume_token with ended_at of its snapshot).
func testRace(t *testing.T, uses int) {
	pool := pgtest.OpenWith(t, pgtest.Options{MaxConns: pgtest.Size[int32](16, 32)})
	store := newStore(t)
	_, err := pool.Exec(ctx, "create table done (n int not null)")
	require.NoError(t, err)
	for _, level := range append(isolationLevels, "mixed") {
		t.Run(string(level), func(t *testing.T) {
			raceAt(t, pool, store, uses, func(i int) pgx.TxIsoLevel {
				if level == "mixed" {
					return isolationLevels[i%3]
				}
				return level
			})
		})
	}
}

func raceAt(t *testing.T, pool *pgxpool.Pool, store *tokens.Store, uses int, levelOf func(i int) pgx.TxIsoLevel) {
	minted := mint(t, pool, store, tokens.Mint{Purpose: "p", Subject: "s", Uses: uses})
	_, err := pool.Exec(ctx, "truncate done")
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
		case errors.As(err, &invalid) && invalid.Reason() == "used":
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
	require.NoError(t, pool.QueryRow(ctx, "select (select count(*) from done), used from metered.tokens where digest = $1", minted.Digest[:]).Scan(&rows, &used))
	require.Equal(t, uses, rows)
	require.Equal(t, uses, used)
	t.Logf("%d retries", retries.Load())
}

func TestConsume_OfRacingConsumersExactlyOneWins(t *testing.T) {
	t.Parallel()
	pgtest.OnEachVersion(t)
	testRace(t, 1)
}

func TestConsume_OfRacingConsumersExactlyAsManyWinAsThereAreUses(t *testing.T) {
	t.Parallel()
	pgtest.OnEachVersion(t)
	testRace(t, 10)
}

// The loser waits on the winner's row. Then it gets the truth about the token, or an error that says to try again.
func TestConsume_TheLoserOfARaceHearsTheTruth(t *testing.T) {
	t.Parallel()
	pool, store := pgtest.Open(t), newStore(t)
	for _, level := range isolationLevels {
		for _, commits := range []bool{true, false} {
			name := string(level) + ", winner rolls back"
			if commits {
				name = string(level) + ", winner commits"
			}
			t.Run(name, func(t *testing.T) {
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
				pgtest.WaitQueued(t, pool, 1)
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
					requireInvalid(t, err, "used")
				default:
					require.Equal(t, sqlstate.SerializationFailure, sqlstate.Of(err))
					require.NotErrorIs(t, err, tokens.ErrInvalid)
				}
			})
		}
	}
}
