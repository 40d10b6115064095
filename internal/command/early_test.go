package command_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/replica"
)

// waitingForStandby polls until n backends wait for the standby.
func waitingForStandby(t *testing.T, watch *pgxpool.Pool, n int) {
	t.Helper()
	pgtest.WaitFor(t, fmt.Sprint(n, " to wait for the standby"), func() bool {
		return pgtest.Value[int](t, watch, `select count(*) from pg_stat_activity where wait_event = 'SyncRep'`) == n
	})
}

func early(id string) metered.Command {
	return metered.Command{ID: id, EarlyRelease: true, Charges: []budget.Charge{charge("s", 1, 100)}}
}

// Locks are let go of when the commit is in the log; the answer, and any other that
// rests on it, comes when that is durable.
func TestDo_EarlyReleaseLetsGoBeforeItsAnswerIsDurable(t *testing.T) {
	t.Parallel()
	pgtest.OnEachVersion(t)
	pool, watch, goOn := pgtest.SlowCommits(t)
	c := newClient(t, pool, metered.Config{})
	ctx := t.Context()
	waiting, answers := 0, make(chan error, 100)
	call := func(f func() error) {
		waiting++
		go func() { answers <- f() }()
		waitingForStandby(t, watch, waiting)
		require.Empty(t, answers)
	}
	do := func(cmd metered.Command, fn metered.Func[uploaded], want error, replayed bool) {
		call(func() error {
			out, err := metered.Do(ctx, c, cmd, fn)
			if !errors.Is(err, want) || out.Replayed != replayed {
				return fmt.Errorf("%s: %v, replayed: %v", cmd.ID, err, out.Replayed)
			}
			return nil
		})
	}
	do(early("a"), upload("a"), nil, false)
	do(early("b"), upload("b"), nil, false) // on the same scope
	require.Equal(t, 2, count(t, watch, "uploads"))
	require.Equal(t, int64(2), used(t, watch, c, "s"))

	plain := early("a")
	plain.EarlyRelease = false
	do(early("a"), mustNotRun(t), nil, true)
	do(plain, mustNotRun(t), nil, true)
	other := early("a")
	other.Name = "other"
	do(other, mustNotRun(t), budget.ErrConflict, false)
	for _, want := range []error{nil, budget.ErrConflict} {
		call(func() error { // the caller's COMMIT waits, though all that it did was read
			return pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
				cmd := plain
				if want != nil {
					cmd.Name = "other"
				}
				if _, err := metered.DoTx(ctx, c, tx, cmd, mustNotRun(t)); !errors.Is(err, want) {
					return fmt.Errorf("in a transaction: %v", err)
				}
				return nil
			})
		})
	}

	// A refusal promises nothing, and waits for nothing.
	full := early("full")
	full.EarlyLook = true
	full.Charges[0].Amount = 1000
	_, err := metered.Do(ctx, c, full, mustNotRun(t))
	require.ErrorIs(t, err, budget.ErrExceeded)

	plain.ID = "c"
	do(plain, upload("c"), nil, false)
	require.Equal(t, 2, count(t, watch, "uploads"), "without early release it is not seen either")
	goOn()
	for range waiting {
		require.NoError(t, <-answers)
	}
	require.Equal(t, 3, count(t, watch, "uploads"))
}

// The barrier waits as the session would, or as the default does where the session
// does not wait.
func TestDo_EarlyReleaseWaitsForTheSessionsSynchronousCommit(t *testing.T) {
	t.Parallel()
	pgtest.OnEachVersion(t)
	pool, watch, goOn := pgtest.SlowCommits(t)
	answers := make(chan error, 10)
	for i, level := range []string{"on", "remote_write", "remote_apply", "off"} {
		c := newClient(t, pgtest.Reopen(t, pool, func(config *pgxpool.Config) {
			config.ConnConfig.RuntimeParams["synchronous_commit"] = level
		}), metered.Config{})
		go func() {
			_, err := metered.Do(t.Context(), c, early(level), upload(level))
			answers <- err
		}()
		waitingForStandby(t, watch, i+1)
		require.Empty(t, answers)
	}
	local := pgtest.Reopen(t, pool, func(config *pgxpool.Config) { config.ConnConfig.RuntimeParams["synchronous_commit"] = "local" })
	_, err := metered.Do(t.Context(), newClient(t, local, metered.Config{}), early("local"), upload("local"))
	require.NoError(t, err)
	require.Equal(t, 5, count(t, watch, "uploads"))
	require.Equal(t, "local", pgtest.Value[string](t, local, "show synchronous_commit"))
	goOn()
	for range 4 {
		require.NoError(t, <-answers)
	}
}

// COMMIT has taken effect, and then the way to the answer is cut: it is not known
// whether it lasts.
func TestDo_EarlyReleaseSeenButNotKnownToBeDurableIsIndefinite(t *testing.T) {
	t.Parallel()
	pgtest.OnEachVersion(t)
	pool, watch, goOn := pgtest.SlowCommits(t)
	c := newClient(t, pool, metered.Config{})
	for _, fn := range []metered.Func[uploaded]{upload("a"), mustNotRun(t)} { // the second is a replay
		ctx, cancel := context.WithCancel(t.Context())
		answer := make(chan error, 1)
		go func() {
			_, err := metered.Do(ctx, c, early("a"), fn)
			answer <- err
		}()
		waitingForStandby(t, watch, 1)
		require.Equal(t, 1, count(t, watch, "uploads"))
		cancel()
		require.ErrorIs(t, <-answer, metered.ErrIndefinite)
		waitingForStandby(t, watch, 0) // pgx has its wait cancelled
	}
	goOn()
	out, err := metered.Do(t.Context(), c, early("a"), mustNotRun(t))
	require.NoError(t, err)
	require.True(t, out.Replayed)
}

func TestDoTx_RefusesOptionsOfACommit(t *testing.T) {
	t.Parallel()
	pool, c := setUp(t, metered.Config{})
	require.NoError(t, pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error {
		for field, cmd := range map[string]metered.Command{
			"Command.EarlyRelease": {ID: "a", EarlyRelease: true}, "Command.LSN": {ID: "a", LSN: true},
		} {
			_, err := metered.DoTx(t.Context(), c, tx, cmd, mustNotRun(t))
			var argument *budget.ArgumentError
			require.ErrorAs(t, err, &argument)
			require.Equal(t, field, argument.Field)
		}
		return nil
	}))
}

// A replay in a transaction that may not write, since it writes no row.
func TestDoTx_ReplaysInAReadOnlyTransaction(t *testing.T) {
	t.Parallel()
	pool, c := setUp(t, metered.Config{})
	cmd := metered.Command{ID: "a"}
	_, err := metered.Do(t.Context(), c, cmd, upload("a"))
	require.NoError(t, err)
	require.NoError(t, pgx.BeginTxFunc(t.Context(), pool, pgx.TxOptions{AccessMode: pgx.ReadOnly}, func(tx pgx.Tx) error {
		out, err := metered.DoTx(t.Context(), c, tx, cmd, mustNotRun(t))
		require.True(t, out.Replayed)
		return err
	}))
}

const (
	commitTag      = "C\x00\x00\x00\x0bCOMMIT\x00"
	readyForQuery  = "Z\x00\x00\x00\x05"
	readyAndIdle   = readyForQuery + "I"
	otherErrorCode = "XX000"
)

// stopAfter lets the server deal with a flush, and the client see its answer up to
// and including that, then more, and then the end of the connection or not.
func stopAfter(f *pgtest.Flush, that, more string, keep bool) {
	f.Deliver = func() {
		all := f.Ask()
		f.Conn.Answer = append(all[:bytes.Index(all, []byte(that))+len(that):len(all)], more...)
		if !keep {
			f.Close()
		}
	}
}

// Early release: as TestDo_AnUnknownOutcomeIsResolved, but COMMIT's tag alone says
// nothing yet.
func TestDo_AnUnknownOutcomeOfEarlyReleaseIsResolved(t *testing.T) {
	t.Parallel()
	pgtest.OnEachVersion(t)
	failed := string(pgtest.ErrorResponse("ERROR", otherErrorCode, "no"))
	type faulty struct {
		fault    func(f *pgtest.Flush)
		runs     int64 // of the function
		replayed bool
	}
	faults := map[string]faulty{
		"the answer is lost":                   {(*pgtest.Flush).LoseAnswer, 1, true},
		"the flush is lost":                    {(*pgtest.Flush).Lose, 2, false},
		"FATAL instead of an answer":           {func(f *pgtest.Flush) { f.AnswerWith(pgtest.ErrorResponse("FATAL", "57P01", "terminating")) }, 1, true},
		"the answer stops after COMMIT's tag":  {func(f *pgtest.Flush) { stopAfter(f, commitTag, "", false) }, 1, true},
		"an ERROR after COMMIT's tag":          {func(f *pgtest.Flush) { stopAfter(f, commitTag, failed+readyAndIdle, true) }, 1, true},
		"an ERROR after COMMIT's, and no more": {func(f *pgtest.Flush) { stopAfter(f, commitTag, failed, false) }, 1, true},
		"it stops just before it is ready": {func(f *pgtest.Flush) {
			f.Deliver = func() {
				all := f.Ask()
				f.Conn.Answer = all[:bytes.LastIndex(all, []byte(readyForQuery))]
				f.Close()
			}
		}, 1, true},
		"nothing is wrong": {func(*pgtest.Flush) {}, 1, false},
	}
	for _, mode := range []pgx.QueryExecMode{pgx.QueryExecModeCacheStatement, pgx.QueryExecModeSimpleProtocol} {
		owner, w, c, _ := onWire(t, metered.Config{}, func(config *pgxpool.Config) {
			config.ConnConfig.DefaultQueryExecMode = mode
		})
		for what, test := range faults {
			t.Run(what+", "+mode.String(), func(t *testing.T) {
				cmd := whole(t, owner, c, t.Name())
				cmd.EarlyRelease = true
				last := false
				w.Once((*pgtest.Flush).Last, func(f *pgtest.Flush) { last = true; test.fault(f) })
				var runs atomic.Int64
				out, err := metered.Do(t.Context(), c, cmd, pgtest.Counting(cmd.ID, &runs))
				require.NoError(t, err)
				require.True(t, last)
				require.Equal(t, cmd.ID, out.Result.Name)
				require.Equal(t, test.replayed, out.Replayed)
				require.Len(t, out.Receipt.Entries, 3)
				require.Equal(t, test.runs, runs.Load())
				require.Equal(t, everything, footprintOf(t, owner, cmd))
			})
		}
	}
}

// A crash after COMMIT's tag took the command back: it runs again.
func TestDo_EarlyReleaseTakenBackByACrashRunsAgain(t *testing.T) {
	t.Parallel()
	pgtest.OnEachVersion(t)
	owner, w, c, cmd := onWire(t, metered.Config{}, nil)
	cmd.EarlyRelease, cmd.Token = true, nil
	w.Once((*pgtest.Flush).Last, func(f *pgtest.Flush) {
		stopAfter(f, commitTag, "", false)
		deliver := f.Deliver
		f.Deliver = func() {
			deliver()
			_, err := owner.Exec(t.Context(), `truncate metered.operations, metered.ledger, metered.job_keys,
				metered.holds, metered.hold_lines, metered.hold_events, uploads, river_job`)
			require.NoError(t, err)
		}
	})
	var runs atomic.Int64
	out, err := metered.Do(t.Context(), c, cmd, pgtest.Counting(cmd.ID, &runs))
	require.NoError(t, err)
	require.False(t, out.Replayed)
	require.Equal(t, int64(2), runs.Load())
	require.Equal(t, 1, count(t, owner, "uploads"))
	require.Equal(t, everything.Entries, count(t, owner, "metered.ledger"))
}

// The end of a replay meets something: it is answered by another replay.
func TestDo_AReplayThatMayNotLastIsRepeated(t *testing.T) {
	t.Parallel()
	owner, _ := setUp(t, metered.Config{})
	pool, w := pgtest.Tap(t, owner, nil)
	c, hurried := newClient(t, pool, metered.Config{}), newClient(t, pool, metered.Config{ResolveTimeout: 100 * time.Millisecond})
	for what, fault := range map[string]func(f *pgtest.Flush){
		"the flush is lost":  (*pgtest.Flush).Lose,
		"the answer is lost": (*pgtest.Flush).LoseAnswer,
		"an ERROR": func(f *pgtest.Flush) {
			stopAfter(f, "ROLLBACK\x00", string(pgtest.ErrorResponse("ERROR", otherErrorCode, "no"))+readyAndIdle, true)
		},
	} {
		t.Run(what, func(t *testing.T) {
			cmd := whole(t, owner, c, what)
			_, err := metered.Do(t.Context(), c, cmd, wholeFunc(what, nil))
			require.NoError(t, err)
			settling := func(f *pgtest.Flush) bool { return f.Has("rollback") && f.Has("pg_logical_emit_message") }
			w.Once(settling, fault)
			out, err := metered.Do(t.Context(), c, cmd, mustNotRun(t))
			require.NoError(t, err)
			require.True(t, out.Replayed)

			w.Once(settling, func(f *pgtest.Flush) { w.Refuse(true); f.LoseAnswer() })
			_, err = metered.Do(t.Context(), hurried, cmd, mustNotRun(t))
			require.ErrorIs(t, err, metered.ErrIndefinite)
			w.Refuse(false)
		})
	}
}

// The position is lost after COMMIT's tag, with which the command has committed: it is asked
// for again. With early release it is not known whether the command stays, and the answer is
// its replay's.
func TestDo_APositionThatIsLostIsAskedForAgain(t *testing.T) {
	t.Parallel()
	for _, early := range []bool{false, true} {
		owner, w, c, _ := onWire(t, metered.Config{}, nil)
		lsn := replica.LSN(0)
		for n := 1; lsn == 0; n++ { // it is asked for a second at most, which can pass on a busy machine
			require.LessOrEqual(t, n, 5, "no position")
			cmd := whole(t, owner, c, fmt.Sprint("op ", n))
			cmd.LSN, cmd.EarlyRelease = true, early
			w.Once((*pgtest.Flush).Last, func(f *pgtest.Flush) { stopAfter(f, commitTag, "", false) })
			var runs atomic.Int64
			out, err := metered.Do(t.Context(), c, cmd, pgtest.Counting(cmd.ID, &runs))
			require.NoError(t, err)
			require.Equal(t, early, out.Replayed)
			require.Equal(t, int64(1), runs.Load())
			require.Equal(t, everything, footprintOf(t, owner, cmd))
			lsn = out.LSN
		}
	}
	_, w, c, cmd := onWire(t, metered.Config{ResolveTimeout: time.Second}, nil)
	cmd.LSN = true
	w.Once((*pgtest.Flush).Last, func(f *pgtest.Flush) { w.Refuse(true); stopAfter(f, commitTag, "", false) })
	out, err := metered.Do(t.Context(), c, cmd, wholeFunc(cmd.ID, nil))
	require.NoError(t, err, "it has committed")
	require.Zero(t, out.LSN)
}

// A role that may not ask for a position has its command all the same. With early release it
// is the barrier after the position that is skipped, and the answer is the replay's.
func TestDo_APositionThatIsRefusedLeavesTheCommand(t *testing.T) {
	t.Parallel()
	owner, _ := setUp(t, metered.Config{})
	_, err := owner.Exec(t.Context(), "revoke execute on function pg_current_wal_insert_lsn() from public")
	require.NoError(t, err)
	c := newClient(t, pgtest.AsRole(t, owner, metered.GrantSQL, pgtest.RiverGrantSQL), metered.Config{})
	for _, early := range []bool{false, true} {
		cmd := whole(t, owner, c, fmt.Sprint("op ", early))
		cmd.LSN, cmd.EarlyRelease = true, early
		var runs atomic.Int64
		out, err := metered.Do(t.Context(), c, cmd, func(context.Context, *metered.Tx) (int64, error) { return runs.Add(1), nil })
		require.NoError(t, err)
		require.Equal(t, early, out.Replayed)
		require.Zero(t, out.LSN)
		require.Equal(t, int64(1), runs.Load())
		require.Len(t, out.Receipt.Entries, 2)
	}
}
