package purge_test

import (
	"context"
	"encoding/hex"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/internal/purge"
)

// uuid7 is a UUID of version 7 of the given time; n tells several apart.
func uuid7(at time.Time, n int) string {
	ms := at.UnixMilli()
	b := []byte{byte(ms >> 40), byte(ms >> 32), byte(ms >> 24), byte(ms >> 16), byte(ms >> 8), byte(ms),
		0x70, 0, 0x80, 0, 0, 0, 0, 0, byte(n >> 8), byte(n)}
	h := hex.EncodeToString(b)
	return h[:8] + "-" + h[8:12] + "-" + h[12:16] + "-" + h[16:20] + "-" + h[20:]
}

func olderThan(t *testing.T, pool *pgxpool.Pool, olderThan time.Duration) int64 {
	t.Helper()
	told, err := purge.Operations.Delete(t.Context(), pool, purge.Options{OlderThan: olderThan, DryRun: true})
	require.NoError(t, err)
	n, err := purge.Operations.Delete(t.Context(), pool, purge.Options{OlderThan: olderThan})
	require.NoError(t, err)
	require.Equal(t, told, n)
	return n
}

var monday = time.Date(2031, 5, 5, 12, 0, 0, 0, time.UTC)

func TestPurgeOperations_RetiresIDsThatCarryTheirTime(t *testing.T) {
	t.Parallel()
	pgtest.OnEachVersion(t)
	pool, c := pgtest.SetUp(t, metered.Config{})
	ctx := t.Context()
	clock := pgtest.SetClock(t, pool, monday)
	commands := map[string]metered.Command{
		"uuid":   {ID: uuid7(monday, 1)},
		"issued": {ID: "issued", IssuedAt: monday},
		"plain":  {ID: "plain"},
		"uuid4":  {ID: "0196a000-0000-4000-8000-000000000000"},
	}
	do := func(name string) error {
		_, err := metered.Do[any](ctx, c, commands[name], nil)
		return err
	}
	for name := range commands {
		require.NoError(t, do(name))
	}
	clock.Advance(time.Hour)
	require.Zero(t, olderThan(t, pool, time.Hour), "an hour old is not older than an hour")
	clock.Advance(time.Microsecond)
	require.EqualValues(t, 4, olderThan(t, pool, time.Hour))
	require.Zero(t, pgtest.Count(t, pool, "metered.operations"))

	require.ErrorIs(t, do("uuid"), budget.ErrRetired)
	require.ErrorIs(t, do("issued"), budget.ErrRetired)
	require.NoError(t, do("plain"), "looks new again")
	require.NoError(t, do("uuid4"), "looks new again")

	// At the horizon is not newer than it; a microsecond later is.
	commands["at"] = metered.Command{ID: "at", IssuedAt: monday}
	require.ErrorIs(t, do("at"), budget.ErrRetired)
	commands["after"] = metered.Command{ID: "after", IssuedAt: monday.Add(time.Microsecond)}
	require.NoError(t, do("after"))
	// The time in the id wins over one that is given, which may be another each time.
	commands["uuid"] = metered.Command{ID: commands["uuid"].ID, IssuedAt: clock.Now()}
	require.ErrorIs(t, do("uuid"), budget.ErrRetired)
	commands["both"] = metered.Command{ID: uuid7(clock.Now(), 2), IssuedAt: monday.Add(-time.Hour)}
	require.NoError(t, do("both"))
}

func TestPurgeOperations_RetiresEachSpellingOfAUUID(t *testing.T) {
	t.Parallel()
	pgtest.OnEachVersion(t)
	pool, c := pgtest.SetUp(t, metered.Config{})
	clock := pgtest.SetClock(t, pool, time.Now())
	var ids []string
	for _, spell := range []func(id string) string{
		strings.ToUpper, func(id string) string { return strings.ReplaceAll(id, "-", "") },
		func(id string) string { return "{" + id + "}" }, func(id string) string { return "urn:uuid:" + id },
	} {
		ids = append(ids, spell(metered.NewID()))
		_, err := metered.Do[any](t.Context(), c, metered.Command{ID: ids[len(ids)-1]}, nil)
		require.NoError(t, err)
	}
	clock.Advance(time.Hour)
	require.EqualValues(t, len(ids), olderThan(t, pool, time.Minute))
	for _, id := range ids {
		_, err := metered.Do(t.Context(), c, metered.Command{ID: id}, pgtest.MustNotRun(t))
		require.ErrorIs(t, err, budget.ErrRetired, id)
	}
}

func TestPurgeOperations_KeepsIDsIssuedLaterThanTheHorizon(t *testing.T) {
	t.Parallel()
	pgtest.OnEachVersion(t)
	pool, c := pgtest.SetUp(t, metered.Config{Config: budget.Config{MaxFuture: time.Hour}})
	ctx := t.Context()
	clock := pgtest.SetClock(t, pool, monday)
	// Completed before the horizon, issued after it: deleted, it could run again.
	cmd := metered.Command{ID: uuid7(monday.Add(30*time.Minute), 1)}
	_, err := metered.Do(ctx, c, cmd, pgtest.Upload("a"))
	require.NoError(t, err)
	clock.Advance(20 * time.Minute)
	require.Zero(t, olderThan(t, pool, time.Minute))
	out, err := metered.Do(ctx, c, cmd, pgtest.MustNotRun(t))
	require.NoError(t, err)
	require.True(t, out.Replayed)
	clock.Advance(20 * time.Minute)
	require.EqualValues(t, 1, olderThan(t, pool, time.Minute))
	_, err = metered.Do(ctx, c, cmd, pgtest.MustNotRun(t))
	require.ErrorIs(t, err, budget.ErrRetired)
}

func TestDo_RefusesTheFuture(t *testing.T) {
	t.Parallel()
	pool, c := pgtest.SetUp(t, metered.Config{Config: budget.Config{MaxFuture: time.Minute}})
	ctx := t.Context()
	pgtest.SetClock(t, pool, monday)
	for _, cmd := range []metered.Command{
		{ID: "a", IssuedAt: monday.Add(time.Minute + time.Microsecond)}, {ID: uuid7(monday.Add(time.Hour), 1)},
	} {
		_, err := metered.Do(ctx, c, cmd, pgtest.MustNotRun(t))
		require.ErrorIs(t, err, budget.ErrFuture)
		require.Equal(t, "operation_future", metered.Code(err))
	}
	for _, cmd := range []metered.Command{
		{ID: "a", IssuedAt: monday.Add(time.Minute)}, {ID: uuid7(monday.Add(59*time.Second), 1)},
	} {
		_, err := metered.Do[any](ctx, c, cmd, nil)
		require.NoError(t, err)
	}
}

func TestPurgeOperations_TheHorizonIsTheLatestTimePurged(t *testing.T) {
	t.Parallel()
	pgtest.OnEachVersion(t)
	pool, c := pgtest.SetUp(t, metered.Config{})
	clock := pgtest.SetClock(t, pool, monday)
	do := func(id string, issued time.Time) error {
		_, err := metered.Do[any](t.Context(), c, metered.Command{ID: id, IssuedAt: issued}, nil)
		return err
	}
	purged := func(n int64, horizon time.Time) {
		t.Helper()
		require.Equal(t, n, olderThan(t, pool, time.Hour))
		require.True(t, horizon.Equal(pgtest.Value[time.Time](t, pool, "select greatest(at, '0001-01-01 00:00:00Z') from metered.operations_horizon")))
	}
	purged(0, time.Time{})
	require.NoError(t, do("plain", time.Time{}))
	clock.Advance(2 * time.Hour)
	purged(1, time.Time{})

	require.NoError(t, do("b", monday.Add(2*time.Minute)))
	require.NoError(t, do("a", monday.Add(time.Minute)))
	require.NoError(t, do("later", monday.Add(2*time.Hour)))
	clock.Advance(70 * time.Minute)
	purged(3, monday.Add(2*time.Hour))
	require.ErrorIs(t, do("older", monday.Add(time.Hour)), budget.ErrRetired)

	// One that began before the horizon moved past its time ends all the same: the
	// horizon is not moved back to it.
	_, err := pool.Exec(t.Context(), `insert into metered.operations (tenant, id, at, issued_at, fingerprint, result)
		values ('', 'late', $1, $2, '', '')`, clock.Now(), monday)
	require.NoError(t, err)
	clock.Advance(2 * time.Hour)
	purged(1, monday.Add(2*time.Hour))
	clock.Advance(-24 * time.Hour)
	purged(0, monday.Add(2*time.Hour))
}

func TestPurgeOperations_AClockThatWasAheadRefusesNoNewIDs(t *testing.T) {
	t.Parallel()
	pgtest.OnEachVersion(t)
	pool, c := pgtest.SetUp(t, metered.Config{})
	clock := pgtest.SetClock(t, pool, monday)
	old := metered.Command{ID: uuid7(monday, 1)}
	_, err := metered.Do[any](t.Context(), c, old, nil)
	require.NoError(t, err)
	clock.Advance(10 * 24 * time.Hour)
	require.EqualValues(t, 1, olderThan(t, pool, 24*time.Hour))
	clock.Set(monday.Add(time.Minute)) // it is right again
	_, err = metered.Do[any](t.Context(), c, metered.Command{ID: uuid7(clock.Now(), 2)}, nil)
	require.NoError(t, err)
	_, err = metered.Do(t.Context(), c, old, pgtest.MustNotRun(t))
	require.ErrorIs(t, err, budget.ErrRetired)
}

func TestPurgeOperations_MovesTheHorizonWithTheDeletes(t *testing.T) {
	t.Parallel()
	pgtest.OnEachVersion(t)
	pool, c := pgtest.SetUp(t, metered.Config{})
	ctx := t.Context()
	clock := pgtest.SetClock(t, pool, monday)
	cmd := metered.Command{ID: "op", IssuedAt: monday}
	_, err := metered.Do(ctx, c, cmd, pgtest.Upload("a"))
	require.NoError(t, err)
	clock.Advance(time.Hour)

	tx, err := pool.Begin(ctx)
	require.NoError(t, err)
	defer tx.Rollback(context.Background())
	require.EqualValues(t, 1, pgtest.Value[int](t, tx, "select deleted from metered.purge_operations(null, $1, 10, 1000)", clock.Now()))
	out, err := metered.Do(ctx, c, cmd, pgtest.MustNotRun(t)) // neither the delete nor the horizon is there yet
	require.NoError(t, err)
	require.True(t, out.Replayed)
	require.NoError(t, tx.Rollback(ctx))
	out, err = metered.Do(ctx, c, cmd, pgtest.MustNotRun(t))
	require.NoError(t, err)
	require.True(t, out.Replayed)
	require.EqualValues(t, 1, olderThan(t, pool, time.Second))
	_, err = metered.Do(ctx, c, cmd, pgtest.MustNotRun(t))
	require.ErrorIs(t, err, budget.ErrRetired)
}

func TestPurgeOperations_WaitsForAnotherNoLongerThanTheLockTimeout(t *testing.T) {
	t.Parallel()
	pgtest.OnEachVersion(t)
	pool, c := pgtest.SetUp(t, metered.Config{})
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute) // not for ever
	defer cancel()
	clock := pgtest.SetClock(t, pool, monday)
	_, err := metered.Do[any](ctx, c, metered.Command{ID: "op", IssuedAt: monday}, nil)
	require.NoError(t, err)
	clock.Advance(time.Hour)
	other, err := pool.Begin(ctx)
	require.NoError(t, err)
	defer other.Rollback(context.Background())
	_, err = other.Exec(ctx, `select from metered.operations_horizon for update`)
	require.NoError(t, err)
	n, err := purge.Operations.Delete(ctx, pool, purge.Options{OlderThan: time.Minute, LockTimeout: 50 * time.Millisecond})
	require.ErrorIs(t, err, budget.ErrBusy)
	require.Zero(t, n)
	require.NoError(t, other.Rollback(ctx))
	n, err = purge.Operations.Delete(ctx, pool, purge.Options{OlderThan: time.Minute})
	require.NoError(t, err)
	require.EqualValues(t, 1, n)
}

// At each level, also from inside a transaction whose snapshot is from before.
func TestDo_AnOldSnapshotDoesNotHideTheHorizon(t *testing.T) {
	t.Parallel()
	for _, level := range pgtest.IsolationLevels {
		t.Run(string(level), func(t *testing.T) {
			t.Parallel()
			pool, c := pgtest.SetUp(t, metered.Config{})
			ctx := t.Context()
			clock := pgtest.SetClock(t, pool, monday)
			tx, err := pool.BeginTx(ctx, pgx.TxOptions{IsoLevel: level})
			require.NoError(t, err)
			defer tx.Rollback(context.Background())
			_, err = tx.Exec(ctx, "select from uploads") // takes the snapshot
			require.NoError(t, err)

			cmd := metered.Command{ID: "op", IssuedAt: monday}
			_, err = metered.Do(ctx, c, cmd, pgtest.Upload("a"))
			require.NoError(t, err)
			clock.Advance(time.Hour)
			require.EqualValues(t, 1, olderThan(t, pool, time.Second))
			_, err = metered.DoTx(ctx, c, tx, cmd, pgtest.MustNotRun(t))
			if level == pgx.ReadCommitted {
				require.ErrorIs(t, err, budget.ErrRetired)
			} else {
				require.ErrorContains(t, err, "40001")
			}
		})
	}
}

func TestPurgeOperations_AmongClaimsNeverLetsATimeBearingIDRunTwice(t *testing.T) {
	t.Parallel()
	pgtest.OnEachVersion(t)
	pool, c := pgtest.SetUp(t, metered.Config{Config: budget.Config{LockTimeout: time.Minute, MaxFuture: time.Hour}, MaxAttempts: 100})
	ctx := t.Context()
	clock := pgtest.SetClock(t, pool, monday)
	_, err := pool.Exec(ctx, "create table runs (id text)")
	require.NoError(t, err)

	const ids, callers = 30, 8
	outcomes := [3]atomic.Int64{}
	pgtest.AtOnce(callers, func(caller int) {
		for i := range ids {
			clock.Advance(100 * time.Millisecond)
			if i%3 == 0 {
				if _, err := purge.Operations.Delete(ctx, pool, purge.Options{OlderThan: time.Second, Batch: 3}); err != nil {
					t.Error(err)
				}
			}
			for _, old := range []int{0, 0, 8} { // an id of now, again, and one of a while ago
				n := max(0, i-old)
				issued := monday.Add(time.Duration(n) * callers * 100 * time.Millisecond)
				id := uuid7(issued, n)
				if caller%2 == 0 {
					id = fmt.Sprint(n)
				}
				cmd := metered.Command{ID: id, IssuedAt: issued, Isolation: pgtest.IsolationLevels[caller%3]}
				out, err := metered.Do(ctx, c, cmd, func(ctx context.Context, tx *metered.Tx) (any, error) {
					_, err := tx.Exec(ctx, "insert into runs values ($1)", id+issued.String())
					return nil, err
				})
				switch metered.Code(err) {
				case "operation_retired":
					outcomes[2].Add(1)
				case "":
					if err != nil {
						t.Error(err)
					}
					if out.Replayed {
						outcomes[1].Add(1)
					} else {
						outcomes[0].Add(1)
					}
				default:
					t.Error(err)
				}
			}
		}
	})
	t.Logf("run %d, replayed %d, retired %d", outcomes[0].Load(), outcomes[1].Load(), outcomes[2].Load())
	require.Zero(t, pgtest.Value[int](t, pool, "select count(*) - count(distinct id) from runs"))
	require.EqualValues(t, outcomes[0].Load(), pgtest.Count(t, pool, "runs"))
	for i := range 3 {
		require.NotZero(t, outcomes[i].Load())
	}
}
