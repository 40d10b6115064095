package command_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/internal/purge"
)

// happened is when events happen, by the second.
func happened(n int) time.Time {
	return time.Date(2026, 11, 1, 12, 0, n, 0, time.UTC)
}

// event is the nth of a subscription.
func event(id, key string, n int) metered.Command {
	return metered.Command{ID: id, Tenant: "stripe", Name: "event", Input: n, Newest: metered.Order{Key: key, At: happened(n)}}
}

// Events that come at once, twice and in any order leave the state of the newest. Whatever comes after it changes nothing, also
// when it comes again.
func TestNewest_TheNewestEventWinsWhateverTheOrder(t *testing.T) {
	t.Parallel()
	const events, keys = 12, 3
	for _, level := range pgtest.IsolationLevels {
		t.Run(string(level), func(t *testing.T) {
			t.Parallel()
			pool, c := pgtest.SetUp(t, metered.Config{Config: budget.Config{LockTimeout: time.Minute}, MaxAttempts: 100}, pgtest.Options{MaxConns: 8})
			_, err := pool.Exec(t.Context(), "create table subscriptions (key text primary key, nth int not null, writes int not null)")
			require.NoError(t, err)
			var deliveries []int
			for i := range events * keys {
				deliveries = append(deliveries, i, i)
			}
			rand.New(rand.NewPCG(uint64(len(level)), 1)).Shuffle(len(deliveries), func(i, j int) {
				deliveries[i], deliveries[j] = deliveries[j], deliveries[i]
			})
			var ran, stale atomic.Int64
			pgtest.AtOnce(len(deliveries), func(i int) {
				n, key := deliveries[i]/keys, fmt.Sprint("sub_", deliveries[i]%keys)
				cmd := event(fmt.Sprintf("%s of %s", fmt.Sprint(n), key), key, n)
				cmd.Isolation = level
				out, err := metered.Do(t.Context(), c, cmd, func(ctx context.Context, tx *metered.Tx) (int, error) {
					_, err := tx.Exec(ctx, `insert into subscriptions as s values ($1, $2, 1)
						on conflict (key) do update set nth = excluded.nth, writes = s.writes + 1`, key, n)
					return n, err
				})
				switch {
				case err == nil && !out.Replayed:
					ran.Add(1)
				case err == nil:
				case metered.Code(err) == "operation_stale":
					stale.Add(1)
				default:
					t.Error(err)
				}
			})
			require.Equal(t, keys, pgtest.Count(t, pool, "subscriptions"))
			require.Zero(t, pgtest.Value[int](t, pool, "select count(*) from subscriptions where nth <> $1", events-1))
			require.EqualValues(t, ran.Load(), pgtest.Value[int](t, pool, "select sum(writes)::int from subscriptions"))
			require.Equal(t, events*keys, pgtest.Count(t, pool, "metered.operations"), "each is on record, done or stale")
			require.EqualValues(t, pgtest.Value[int](t, pool, "select count(*) from metered.operations where refusal is not null"), events*keys-ran.Load())
			for n := range events { // as a sender that goes on
				out, err := metered.Do[int](t.Context(), c, event(fmt.Sprintf("%d of sub_0", n), "sub_0", n), nil)
				require.True(t, err == nil && out.Replayed && out.Result == n || metered.Code(err) == "operation_stale", "%v", err)
			}
		})
	}
}

func TestNewest_OfOneTimeTheGreaterIDIsNewer(t *testing.T) {
	t.Parallel()
	pool, c := pgtest.SetUp(t, metered.Config{})
	do := func(cmd metered.Command) error { _, err := metered.Do[any](t.Context(), c, cmd, nil); return err }
	require.NoError(t, do(event("b", "sub_1", 5)))
	require.ErrorIs(t, do(event("a", "sub_1", 5)), metered.ErrStale)
	require.ErrorIs(t, do(event("z", "sub_1", 4)), metered.ErrStale)
	err := do(event("z2", "sub_1", 4))
	require.EqualError(t, err, `metered: a newer event has taken effect: for "sub_1", that of 2026-11-01T12:00:05Z with the id "b"`)
	require.NoError(t, do(event("c", "sub_1", 5)))
	require.NoError(t, do(event("d", "sub_1", 6)))
	require.NoError(t, do(event("b", "sub_1", 5)), "the answer of its record")
	require.NoError(t, do(event("1", "sub_2", 1)), "another key")
	other := event("1", "sub_1", 1)
	other.Tenant = "another"
	require.NoError(t, do(other))
	changed := event("d", "sub_1", 7)
	changed.Input = 6
	require.ErrorIs(t, do(changed), budget.ErrConflict, "the same id at another time")
	require.Equal(t, 3, pgtest.Count(t, pool, "metered.newest"))
	_, err = metered.Do(t.Context(), c, metered.Command{ID: "plain"}, func(context.Context, *metered.Tx) (int, error) { return 1, nil })
	require.NoError(t, err)
	require.Equal(t, 3, pgtest.Count(t, pool, "metered.newest"))
}

// A stale event charges nothing, spends no token, and does not call the function. What is rolled back has not taken effect.
func TestNewest_AStaleEventDoesNothing(t *testing.T) {
	t.Parallel()
	pool, c := pgtest.SetUp(t, metered.Config{})
	ctx := t.Context()
	fails := event("9", "sub_1", 9)
	_, err := metered.Do(ctx, c, fails, func(context.Context, *metered.Tx) (int, error) { return 0, pgtest.ErrOwn })
	require.ErrorIs(t, err, pgtest.ErrOwn)
	_, err = metered.Do[any](ctx, c, event("5", "sub_1", 5), nil)
	require.NoError(t, err, "the newer one failed")

	stale := event("4", "sub_1", 4)
	stale.Charges, stale.Token = []budget.Charge{pgtest.Charge("s", 1, 9)}, pgtest.Redeem(pgtest.Mint(t, pool, c))
	_, err = metered.Do(ctx, c, stale, pgtest.MustNotRun(t))
	require.ErrorIs(t, err, metered.ErrStale)
	require.Zero(t, pgtest.Count(t, pool, "metered.ledger"))
	require.Zero(t, pgtest.Value[int](t, pool, "select sum(used)::int from metered.tokens"))
	op, err := c.Lookup(ctx, pool, "stripe", "4")
	require.NoError(t, err)
	require.ErrorIs(t, op.Refusal, metered.ErrStale)

	sticky := event("3", "sub_1", 3)
	sticky.Sticky = []budget.Charge{pgtest.Charge("tries", 1, 9)}
	_, err = metered.Do(ctx, c, sticky, pgtest.MustNotRun(t))
	require.ErrorIs(t, err, metered.ErrStale)
	require.EqualValues(t, 1, pgtest.Used(t, pool, c, "tries"))

	// In a transaction of the caller's it is not on record, and is stale again.
	for range 2 {
		require.NoError(t, pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
			_, err := metered.DoTx(ctx, c, tx, event("2", "sub_1", 2), pgtest.MustNotRun(t))
			require.ErrorIs(t, err, metered.ErrStale)
			return nil
		}))
	}
	_, err = c.Lookup(ctx, pool, "stripe", "2")
	require.ErrorIs(t, err, metered.ErrUnknownOperation)
	require.ErrorIs(t, pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		_, err := metered.DoTx[any](ctx, c, tx, event("8", "sub_1", 8), nil)
		require.NoError(t, err)
		return pgtest.ErrOwn
	}), pgtest.ErrOwn)
	_, err = metered.Do[any](ctx, c, event("7", "sub_1", 7), nil)
	require.NoError(t, err)
}

// A key's newest event is kept as long as records are.
func TestNewest_IsPurgedWithTheRecords(t *testing.T) {
	t.Parallel()
	pool, c := pgtest.SetUp(t, metered.Config{})
	clock := pgtest.SetClock(t, pool, pgtest.Tomorrow(12))
	ctx := t.Context()
	purge := func() {
		t.Helper()
		_, err := purge.Operations.Delete(ctx, pool, purge.Options{OlderThan: time.Hour})
		require.NoError(t, err)
	}
	for i, key := range []string{"old", "kept"} {
		_, err := metered.Do[any](ctx, c, event(key, key, 5), nil)
		require.NoError(t, err)
		clock.Advance(time.Duration(1-i) * 2 * time.Hour)
	}
	purge()
	require.Equal(t, "kept", pgtest.Value[string](t, pool, "select string_agg(key, ',') from metered.newest"))
	_, err := metered.Do[any](ctx, c, event("late", "kept", 4), nil)
	require.ErrorIs(t, err, metered.ErrStale)
	_, err = metered.Do[any](ctx, c, event("later", "old", 4), nil)
	require.NoError(t, err)
}

func TestNewest_WrongArgumentsAreRefused(t *testing.T) {
	t.Parallel()
	c, err := metered.New(pgtest.Nowhere(t), metered.Config{})
	require.NoError(t, err)
	at := happened(1)
	for _, wrong := range []struct {
		field string
		order metered.Order
	}{
		{"Command.Newest.Key", metered.Order{At: at}},
		{"Command.Newest.Key", metered.Order{Key: "\x00", At: at}},
		{"Command.Newest.Key", metered.Order{Key: string(slices.Repeat([]byte("x"), 256)), At: at}},
		{"Command.Newest.At", metered.Order{Key: "k"}},
		{"Command.Newest.At", metered.Order{Key: "k", At: at.AddDate(9000, 0, 0)}},
	} {
		_, err := metered.Do[any](t.Context(), c, metered.Command{ID: "a", Newest: wrong.order}, nil)
		var argument *budget.ArgumentError
		require.ErrorAs(t, err, &argument)
		require.Equal(t, wrong.field, argument.Field)
	}
}
