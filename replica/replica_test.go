package replica_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/pgserver"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/replica"
)

func TestLSN_HasTheTextFormOfPostgres(t *testing.T) {
	t.Parallel()
	pool := pgtest.Open(t)
	for text, want := range map[string]replica.LSN{
		"0/0": 0, "0/1": 1, "1/0": 1 << 32, "16/B374D848": 0x16_B374D848, "FFFFFFFF/FFFFFFFF": math.MaxUint64,
	} {
		got, err := replica.ParseLSN(text)
		require.NoError(t, err)
		require.Equal(t, want, got)
		require.Equal(t, text, got.String())
		require.Equal(t, text, pgtest.Value[string](t, pool, `select $1::text::pg_lsn::text`, text))
		encoded, err := json.Marshal(map[string]replica.LSN{"at": got})
		require.NoError(t, err)
		require.JSONEq(t, `{"at": "`+text+`"}`, string(encoded))
		var decoded map[string]replica.LSN
		require.NoError(t, json.Unmarshal(encoded, &decoded))
		require.Equal(t, want, decoded["at"])
	}
	for _, text := range []string{"", "/", "1", "1/", "/1", "1/G", "100000000/0", "0/100000000", "-1/0", "0/+1", "0x1/0", " 1/0", "1/0/0", "1_0/0"} {
		_, err := replica.ParseLSN(text)
		require.ErrorIs(t, err, budget.ErrArgument, text)
	}
}

// replication is a primary with the schema and a replica that streams from it.
type replication struct {
	*testing.T
	primary, replica *pgxpool.Pool
	client           *metered.Client
	book             *holds.Book
}

func replicate(t *testing.T, opts pgserver.Options) *replication {
	t.Helper()
	r := &replication{T: t}
	r.primary, r.replica = pgtest.Replicate(t, opts)
	var err error
	r.client, err = metered.New(r.primary, metered.Config{})
	require.NoError(t, err)
	r.book = r.client.Holds
	return r
}

// place places a hold and returns the position after that.
func (r *replication) place(id string) replica.LSN {
	r.Helper()
	require.NoError(r, pgx.BeginFunc(r.Context(), r.primary, func(tx pgx.Tx) error {
		_, err := r.book.Place(r.Context(), tx, holds.Placement{
			ID: id, Holder: "ann", TTL: time.Hour, Lines: []holds.Line{{Scope: "room", Amount: 1}},
			Charges: []budget.Charge{{Scope: "user/ann", Amount: 1}},
		})
		return err
	}))
	pos, err := replica.CommitLSN(r.Context(), r.primary)
	require.NoError(r, err)
	return pos
}

func (r *replication) replay(function string) {
	r.Helper()
	_, err := r.replica.Exec(r.Context(), `select `+function+`()`)
	require.NoError(r, err)
}

func (r *replication) readAt(pos replica.LSN, timeout time.Duration, fn func(context.Context, *pgx.Conn) error) error {
	return replica.ReadAt(r.Context(), r.replica, pos, timeout, fn)
}

func noRead(context.Context, *pgx.Conn) error { return nil }

func TestReadAt_AReplicaIsNeverSilentlyBehind(t *testing.T) {
	t.Parallel()
	r := replicate(t, pgserver.Options{})
	before := r.place("h1")
	require.NoError(t, r.readAt(before, time.Minute, func(ctx context.Context, conn *pgx.Conn) error {
		_, err := r.book.Get(ctx, conn, "", "h1", "ann")
		return err
	}))

	r.replay("pg_wal_replay_pause")
	pos := r.place("h2")
	require.Greater(t, pos, before)
	_, err := r.book.Get(t.Context(), r.replica, "", "h2", "ann")
	require.ErrorIs(t, err, holds.ErrUnknown, "a replica without a wait")

	var stale *replica.StaleError
	for stale == nil || stale.Reached == 0 { // the replica may need longer to answer than the test waits
		called := false
		err = r.readAt(pos, 2*time.Second, func(context.Context, *pgx.Conn) error {
			called = true
			return nil
		})
		require.False(t, called)
		require.ErrorIs(t, err, replica.ErrStale)
		require.Equal(t, "stale_read", metered.Code(err))
		require.ErrorAs(t, err, &stale)
	}
	require.Equal(t, pos, stale.Wanted)
	require.GreaterOrEqual(t, stale.Reached, before)
	require.Less(t, stale.Reached, pos)
	require.GreaterOrEqual(t, stale.Waited, 2*time.Second)
	require.NoError(t, r.readAt(before, time.Minute, noRead), "an earlier position can be read at once")

	resumed := make(chan error, 1)
	time.AfterFunc(200*time.Millisecond, func() {
		_, err := r.replica.Exec(t.Context(), `select pg_wal_replay_resume()`)
		resumed <- err
	})
	require.NoError(t, r.readAt(pos, time.Minute, r.everyRead))
	require.NoError(t, <-resumed)
	pgtest.WaitFor(t, "its connections", func() bool { return r.replica.Stat().AcquiredConns() == 0 })
}

// everyRead makes every read of the library after h2 was placed.
func (r *replication) everyRead(ctx context.Context, conn *pgx.Conn) error {
	require.True(r, pgtest.Value[bool](r, conn, `select pg_is_in_recovery()`))
	h, err := r.book.Get(ctx, conn, "", "h2", "ann")
	require.NoError(r, err)
	require.Equal(r, holds.Held, h.State)
	list, err := r.book.List(ctx, conn, holds.Filter{Holder: "ann"})
	require.NoError(r, err)
	require.Len(r, list.Holds, 2)
	history, err := r.book.History(ctx, conn, "", "h2", "ann")
	require.NoError(r, err)
	require.Len(r, history, 1)
	claimed, err := r.book.Claimed(ctx, conn, "", holds.Key{Type: "name", Value: "ann"})
	require.NoError(r, err)
	require.Empty(r, claimed)

	client, err := metered.New(r.primary, metered.Config{})
	require.NoError(r, err)
	usage, err := client.Budget.Usage(ctx, conn, budget.Query{Scope: "room"}, budget.Query{Scope: "user/ann", Window: time.Hour})
	require.NoError(r, err)
	require.EqualValues(r, 2, usage[0].Held)
	require.EqualValues(r, 2, usage[1].Used)
	_, err = client.Budget.Check(ctx, conn, budget.Charge{Scope: "room", Amount: 1, Limits: []budget.Limit{budget.Lifetime(2)}})
	require.ErrorIs(r, err, budget.ErrExceeded)
	entries := 0
	for _, err := range client.Budget.Entries(ctx, conn, "room", budget.EntriesOptions{}) {
		require.NoError(r, err)
		entries++
	}
	require.Equal(r, 2, entries)
	_, err = client.Lookup(ctx, conn, "", "op")
	require.ErrorIs(r, err, metered.ErrUnknownOperation)
	return nil
}

// A position is where the log ends, not where it would go on: a replica reaches it even if its primary writes nothing
// more.
func TestCommitLSN_IsReachedWhenTheLogEndsWithAPage(t *testing.T) {
	t.Parallel()
	r := replicate(t, pgserver.Options{Settings: map[string]string{"autovacuum": "off"}})
	conn, err := r.primary.Acquire(t.Context())
	require.NoError(t, err)
	defer conn.Release()
	const page, header = 8192, 24
	lsn := func(db budget.Querier, function string) replica.LSN {
		pos, err := replica.ParseLSN(pgtest.Value[string](t, db, `select `+function+`()::text`))
		require.NoError(t, err)
		return pos
	}
	insert := func() replica.LSN { return lsn(conn, "pg_current_wal_insert_lsn") }
	log := func(bytes replica.LSN) {
		_, err := conn.Exec(t.Context(), `select pg_logical_emit_message(false, '', $1)`, strings.Repeat("x", int(bytes)))
		require.NoError(t, err)
	}
	proven := false
	for tries := 0; tries < 200 && !proven; tries++ {
		begin := insert()
		log(1000)
		end := insert()
		overhead, left := end-begin-1000, page-end%page
		if begin/page != end/page || left < overhead+500 {
			continue
		}
		log(left - overhead)
		next := insert()
		pos, err := replica.CommitLSN(t.Context(), conn)
		require.NoError(t, err)
		if next%page != header || insert() != next {
			continue // the server wrote something of its own
		}
		require.Equal(t, next-header, pos)
		require.NoError(t, r.readAt(pos, time.Minute, noRead))
		reached := lsn(r.replica, "pg_last_wal_replay_lsn")
		if proven = insert() == next; proven {
			require.Equal(t, pos, reached, "no further, as long as nothing else is written")
		}
	}
	require.True(t, proven, "the log never ended with a page")
}

// A replica at the position of ReadLSN has everything read before it: a recorded operation and the history of its
// hold, read from the primary, in a transaction there, or from the replica itself.
func TestReadLSN_IsAfterEarlierReads(t *testing.T) {
	t.Parallel()
	r := replicate(t, pgserver.Options{})
	ctx := t.Context()
	look := func(db budget.Querier, id string) replica.LSN {
		op, err := r.client.Lookup(ctx, db, "", id)
		require.NoError(t, err)
		history, err := r.book.History(ctx, db, "", op.Holds[0].ID, "")
		require.NoError(t, err)
		require.Len(t, history, 1)
		lsn, err := replica.ReadLSN(ctx, db)
		require.NoError(t, err)
		return lsn
	}
	for i, iso := range []pgx.TxIsoLevel{"", pgx.ReadCommitted, pgx.RepeatableRead, pgx.Serializable} {
		id := fmt.Sprint("op", i)
		before, err := replica.CommitLSN(ctx, r.primary)
		require.NoError(t, err)
		require.NoError(t, r.readAt(before, time.Minute, noRead))
		r.replay("pg_wal_replay_pause")
		_, err = metered.Do(ctx, r.client, metered.Command{ID: id, Input: 1}, func(ctx context.Context, tx *metered.Tx) (string, error) {
			return tx.Place(ctx, holds.Placement{ID: id, TTL: time.Hour, Lines: []holds.Line{{Scope: "room", Amount: 1}}}, nil)
		})
		require.NoError(t, err)
		var lsn replica.LSN
		if iso == "" {
			lsn = look(r.primary, id)
		} else {
			require.NoError(t, pgx.BeginTxFunc(ctx, r.primary, pgx.TxOptions{IsoLevel: iso}, func(tx pgx.Tx) error {
				lsn = look(tx, id)
				return nil
			}))
		}
		pgtest.WaitFor(t, "the replica to have the commit", func() bool { // it has it, and does not show it
			return pgtest.Value[bool](t, r.replica, `select pg_last_wal_receive_lsn() >= $1::text::pg_lsn`, lsn.String())
		})
		stale, err := replica.ReadLSN(ctx, r.replica)
		require.NoError(t, err)
		require.Less(t, stale, lsn, "the replica's state is older")
		require.NoError(t, r.readAt(stale, time.Minute, noRead))
		require.ErrorIs(t, r.readAt(lsn, 50*time.Millisecond, noRead), replica.ErrStale)
		r.replay("pg_wal_replay_resume")
		require.NoError(t, r.readAt(lsn, time.Minute, func(ctx context.Context, conn *pgx.Conn) error {
			require.GreaterOrEqual(t, look(conn, id), lsn)
			return nil
		}))
	}
}

func TestReadAt_APrimaryIsNotWaitedFor(t *testing.T) {
	t.Parallel()
	pool := pgtest.Open(t)
	pos, err := replica.CommitLSN(t.Context(), pool)
	require.NoError(t, err)
	require.NoError(t, replica.ReadAt(t.Context(), pool, pos, 0, noRead))
	own := errors.New("fn's own")
	require.Equal(t, own, replica.ReadAt(t.Context(), pool, pos, 0, func(context.Context, *pgx.Conn) error { return own }))
	err = replica.ReadAt(t.Context(), pool, pos+1<<40, time.Hour, noRead)
	require.ErrorIs(t, err, replica.ErrAhead)
	require.Equal(t, "position_unknown", metered.Code(err))
	pgtest.WaitFor(t, "its connections", func() bool { return pool.Stat().AcquiredConns() == 0 })
}

func TestReadAt_EndsWithItsTimeOrItsContext(t *testing.T) {
	t.Parallel()
	r := replicate(t, pgserver.Options{})
	pos := r.place("h1")
	ctx, cancel := context.WithCancel(t.Context())
	time.AfterFunc(50*time.Millisecond, cancel)
	err := replica.ReadAt(ctx, r.replica, pos+1<<40, time.Hour, noRead)
	require.ErrorIs(t, err, context.Canceled)
	require.NotErrorIs(t, err, replica.ErrStale)
	_, err = replica.CommitLSN(t.Context(), r.replica)
	require.Error(t, err, "a replica commits nothing")

	stale := func(err error) (reached bool) {
		t.Helper()
		var e *replica.StaleError
		require.ErrorAs(t, err, &e)
		require.ErrorIs(t, err, replica.ErrStale)
		require.ErrorIs(t, err, context.DeadlineExceeded)
		require.Positive(t, e.Waited)
		return e.Reached > 0
	}
	answers := func(read func(within time.Duration) error) { // in time, unless the machine stands still
		for within := time.Second; !stale(read(within)); within *= 2 {
		}
	}
	answers(func(within time.Duration) error {
		ctx, cancel := context.WithTimeout(t.Context(), within)
		defer cancel()
		return replica.ReadAt(ctx, r.replica, pos+1<<40, time.Hour, noRead)
	})
	answers(func(within time.Duration) error { return r.readAt(pos+1<<40, min(within, time.Hour), noRead) })

	// First a pool that has its only connection taken, and then a server that does not answer.
	config := r.replica.Config()
	config.MaxConns = 1
	single, err := pgxpool.NewWithConfig(t.Context(), config)
	require.NoError(t, err)
	defer single.Close()
	conn, err := single.Acquire(t.Context())
	require.NoError(t, err)
	backend := pgtest.Value[int](t, conn, `select pg_backend_pid()`)
	require.False(t, stale(replica.ReadAt(t.Context(), single, pos, time.Millisecond, noRead)))
	require.NoError(t, syscall.Kill(backend, syscall.SIGSTOP))
	defer func() { require.NoError(t, syscall.Kill(backend, syscall.SIGCONT)) }()
	conn.Release()
	require.False(t, stale(replica.ReadAt(t.Context(), single, pos, time.Millisecond, noRead)))
}

func TestReadAt_RefusesBadArguments(t *testing.T) {
	t.Parallel()
	pool := pgtest.Open(t)
	ctx := t.Context()
	require.ErrorIs(t, replica.ReadAt(ctx, pool, 0, 0, noRead), budget.ErrArgument, "after no write")
	require.ErrorIs(t, replica.ReadAt(ctx, nil, 1, 0, noRead), budget.ErrArgument)
	require.ErrorIs(t, replica.ReadAt(ctx, pool, 1, 0, nil), budget.ErrArgument)
	for _, timeout := range []time.Duration{-1, time.Microsecond, time.Hour + 1} {
		require.ErrorIs(t, replica.ReadAt(ctx, pool, 1, timeout, noRead), budget.ErrArgument)
	}
	require.NoError(t, pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		_, err := replica.CommitLSN(ctx, tx)
		require.ErrorIs(t, err, budget.ErrArgument)
		return nil
	}))
}
