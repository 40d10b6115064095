package metered_test

import (
	"context"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/internal/pgtest"
)

// A repetition that is just about to look for its record while a purge deletes that, and
// moves the horizon, finds neither the record nor room before the horizon.
func TestDo_APurgeThatCommitsBetweenItsLooksDoesNotLetAnIDRunTwice(t *testing.T) {
	t.Parallel()
	pool, c := setUp(t, metered.Config{LockTimeout: time.Minute})
	ctx := t.Context()
	clock := pgtest.SetClock(t, pool, monday)
	cmd := metered.Command{ID: "op", IssuedAt: monday}
	_, err := metered.Do(ctx, c, cmd, upload("first"))
	require.NoError(t, err)
	clock.Advance(time.Hour)

	purging, err := pool.Begin(ctx)
	require.NoError(t, err)
	defer purging.Rollback(context.Background())
	// Only the look at the records waits for this, not that at the horizon.
	_, err = purging.Exec(ctx, "lock table metered.operations in access exclusive mode")
	require.NoError(t, err)
	answer := pgtest.Going(func() error {
		_, err := metered.Do(ctx, c, cmd, upload("second"))
		return err
	})
	pgtest.WaitQueued(t, pool, 1)
	require.EqualValues(t, 1, queryRow[int](t, purging, "select deleted from metered.purge_operations(null, $1, 10, 1000)", clock.Now()))
	require.NoError(t, purging.Commit(ctx))
	require.ErrorIs(t, <-answer, metered.ErrRetired)
	require.Equal(t, "first", queryRow[string](t, pool, "select string_agg(name, ',') from uploads"))
}

// A record that is still there is the answer, whatever the horizon says of its time.
func TestDo_ARecordBehindTheHorizonIsReplayed(t *testing.T) {
	t.Parallel()
	pool, c := setUp(t, metered.Config{})
	clock := pgtest.SetClock(t, pool, monday)
	do := func(id string) (metered.Outcome[uploaded], error) {
		return metered.Do(t.Context(), c, metered.Command{ID: id, IssuedAt: monday}, upload(id))
	}
	_, err := do("early")
	require.NoError(t, err)
	clock.Advance(time.Hour)
	_, err = do("late")
	require.NoError(t, err)
	clock.Advance(time.Minute)
	require.EqualValues(t, 1, purge(t, pool, c, time.Hour))
	_, err = do("early")
	require.ErrorIs(t, err, metered.ErrRetired)
	out, err := do("late")
	require.NoError(t, err)
	require.True(t, out.Replayed)
}

// What makes an id exact is the key of its record, and not the lock that calls queue on: a
// record that somebody made without that lock takes the whole command back.
func TestDo_ARecordThatAppearsMeanwhileTakesTheCommandBack(t *testing.T) {
	t.Parallel()
	for what, do := range map[string]func(tx pgx.Tx, c *metered.Client, cmd metered.Command, fn metered.Func[uploaded]) (metered.Outcome[uploaded], error){
		"Do": func(_ pgx.Tx, c *metered.Client, cmd metered.Command, fn metered.Func[uploaded]) (metered.Outcome[uploaded], error) {
			return metered.Do(t.Context(), c, cmd, fn)
		},
		"DoTx": func(tx pgx.Tx, c *metered.Client, cmd metered.Command, fn metered.Func[uploaded]) (metered.Outcome[uploaded], error) {
			_, err := metered.DoTx(t.Context(), c, tx, cmd, fn)
			require.ErrorContains(t, err, "40001")
			require.True(t, metered.Retryable(err))
			return metered.DoTx(t.Context(), c, tx, cmd, fn) // the savepoint is gone: the same transaction can ask again
		},
	} {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			pool, c := setUp(t, metered.Config{})
			ctx := t.Context()
			_, err := metered.Do(ctx, c, metered.Command{ID: "model"}, upload("another's"))
			require.NoError(t, err)
			tx, err := pool.Begin(ctx)
			require.NoError(t, err)
			defer tx.Rollback(context.Background())
			runs := 0
			out, err := do(tx, c, metered.Command{ID: "op"}, func(ctx context.Context, tx *metered.Tx) (uploaded, error) {
				runs++
				_, err := pool.Exec(ctx, `insert into metered.operations (namespace, id, at, fingerprint, result)
					select namespace, 'op', at, fingerprint, result from metered.operations where id = 'model'`)
				require.NoError(t, err)
				return upload("own")(ctx, tx)
			})
			require.NoError(t, err)
			require.Equal(t, 1, runs)
			require.True(t, out.Replayed)
			require.Equal(t, "another's", out.Result.Name)
			require.NoError(t, tx.Commit(ctx))
			require.Equal(t, 1, count(t, pool, "uploads"))
		})
	}
}
