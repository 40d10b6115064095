package tokens_test

import (
	"encoding/json"
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

func TestConsume_ReturnsTheMintedGrantOnce(t *testing.T) {
	t.Parallel()
	pool, store := pgtest.Open(t), newStore(t)
	clock := pgtest.SetClock(t, pool, noon)
	minted := mint(t, pool, store, tokens.Mint{Purpose: "upload", Subject: "ada", Payload: map[string]int{"asset": 42}, TTL: time.Minute})
	clock.Advance(time.Second)

	grant, err := consume(pool, store, "upload", "ada", minted.Token.Reveal())
	require.NoError(t, err)
	require.Equal(t, tokens.Grant{
		Info: tokens.Info{
			Digest: minted.Digest, Purpose: "upload", Subject: "ada", Payload: json.RawMessage(`{"asset":42}`),
			UsesLeft: 0, MintedAt: noon, ExpiresAt: noon.Add(time.Minute)},
		ConsumedAt: noon.Add(time.Second),
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
		_, err := tx.Exec(ctx, "set local lock_timeout = '30ms'; set local statement_timeout = '20s'")
		require.NoError(t, err)
		_, err = patient.Inspect(ctx, tx, "p", "s", minted.Token.Reveal())
		require.NoError(t, err, "inspecting does not wait")
		_, err = patient.Mint(ctx, tx, tokens.Mint{Purpose: "p", Subject: "s"})
		require.NoError(t, err)
		requireSetting(t, tx, "lock_timeout", "30ms")
		_, err = patient.Consume(ctx, tx, "p", "s", minted.Token.Reveal())
		return err
	}), tokens.ErrBusy)
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
// commit as it has uses, and that the others get the answer that it is used.
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
	require.NoError(t, pool.QueryRow(ctx, "select (select count(*) from done), used from metered.tokens").Scan(&rows, &used))
	require.Equal(t, uses, rows)
	require.Equal(t, uses, used)
	t.Logf("%d retries", retries.Load())
}

func TestConsume_OfRacingConsumersExactlyOneWins(t *testing.T) {
	t.Parallel()
	pgtest.OnEachVersion(t)
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
	pgtest.OnEachVersion(t)
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

// The loser waits on the winner's row. Then it gets the truth about the token, or an error that says to try again.
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
					requireInvalid(t, err, "used")
				default:
					require.Equal(t, sqlstate.SerializationFailure, sqlstate.Of(err))
					require.NotErrorIs(t, err, tokens.ErrInvalid)
				}
			})
		}
	}
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

func TestRevoke_RolledBackLeavesTheTokenGood(t *testing.T) {
	t.Parallel()
	pool, store := pgtest.Open(t), newStore(t)
	minted := mint(t, pool, store, tokens.Mint{Purpose: "p", Subject: "s"})
	tx, err := pool.Begin(ctx)
	require.NoError(t, err)
	revoked, err := store.Revoke(ctx, tx, minted.Digest)
	require.NoError(t, err)
	require.True(t, revoked)
	count, err := store.RevokeSubject(ctx, tx, "p", "s")
	require.NoError(t, err)
	require.Zero(t, count)
	require.NoError(t, tx.Rollback(ctx))
	_, err = consume(pool, store, "p", "s", minted.Token.Reveal())
	require.NoError(t, err)
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
