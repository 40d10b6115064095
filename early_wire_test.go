package metered_test

import (
	"bytes"
	"context"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/internal/pgtest"
)

const (
	commitTag      = "C\x00\x00\x00\x0bCOMMIT\x00"
	readyForQuery  = "Z\x00\x00\x00\x05"
	readyAndIdle   = readyForQuery + "I"
	otherErrorCode = "XX000"
)

// stopBehind lets the server deal with a flush, and the client see its answer up to
// and including that, then more, and then the end of the connection or not.
func stopBehind(f *pgtest.Flush, that, more string, keep bool) {
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
	failed := string(pgtest.ErrorResponse("ERROR", otherErrorCode, "no"))
	for what, test := range map[string]struct {
		fault    func(f *pgtest.Flush)
		runs     int64 // of the function
		replayed bool
	}{
		"the answer is lost":                    {(*pgtest.Flush).LoseAnswer, 1, true},
		"the flush is lost":                     {(*pgtest.Flush).Lose, 2, false},
		"FATAL instead of an answer":            {func(f *pgtest.Flush) { f.AnswerWith(pgtest.ErrorResponse("FATAL", "57P01", "terminating")) }, 1, true},
		"the answer stops behind COMMIT's tag":  {func(f *pgtest.Flush) { stopBehind(f, commitTag, "", false) }, 1, true},
		"an ERROR behind COMMIT's tag":          {func(f *pgtest.Flush) { stopBehind(f, commitTag, failed+readyAndIdle, true) }, 1, true},
		"an ERROR behind COMMIT's, and no more": {func(f *pgtest.Flush) { stopBehind(f, commitTag, failed, false) }, 1, true},
		"it stops just before it is ready": {func(f *pgtest.Flush) {
			f.Deliver = func() {
				all := f.Ask()
				f.Conn.Answer = all[:bytes.LastIndex(all, []byte(readyForQuery))]
				f.Close()
			}
		}, 1, true},
		"nothing is wrong": {func(*pgtest.Flush) {}, 1, false},
	} {
		for _, mode := range []pgx.QueryExecMode{pgx.QueryExecModeCacheStatement, pgx.QueryExecModeSimpleProtocol} {
			t.Run(what+", "+mode.String(), func(t *testing.T) {
				t.Parallel()
				owner, w, c, cmd := onWire(t, metered.Config{}, func(config *pgxpool.Config) {
					config.ConnConfig.DefaultQueryExecMode = mode
				})
				cmd.EarlyRelease = true
				last := false
				w.Once((*pgtest.Flush).Last, func(f *pgtest.Flush) { last = true; test.fault(f) })
				var runs atomic.Int64
				out, err := metered.Do(t.Context(), c, cmd, counted(&runs))
				require.NoError(t, err)
				require.True(t, last)
				require.Equal(t, "op", out.Result.Name)
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
	owner, w, c, cmd := onWire(t, metered.Config{}, nil)
	cmd.EarlyRelease, cmd.Token = true, nil
	w.Once((*pgtest.Flush).Last, func(f *pgtest.Flush) {
		stopBehind(f, commitTag, "", false)
		deliver := f.Deliver
		f.Deliver = func() {
			deliver()
			_, err := owner.Exec(t.Context(), `truncate metered.operations, metered.ledger, metered.job_keys,
				metered.holds, metered.hold_lines, metered.hold_events, uploads, river_job`)
			require.NoError(t, err)
		}
	})
	var runs atomic.Int64
	out, err := metered.Do(t.Context(), c, cmd, counted(&runs))
	require.NoError(t, err)
	require.False(t, out.Replayed)
	require.Equal(t, int64(2), runs.Load())
	require.Equal(t, 1, count(t, owner, "uploads"))
	require.Equal(t, everything.Entries, count(t, owner, "metered.ledger"))
}

// The end of a replay meets something: it is answered by another replay.
func TestDo_AReplayThatMayNotLastIsRepeated(t *testing.T) {
	t.Parallel()
	for what, fault := range map[string]func(f *pgtest.Flush){
		"the flush is lost":  (*pgtest.Flush).Lose,
		"the answer is lost": (*pgtest.Flush).LoseAnswer,
		"an ERROR": func(f *pgtest.Flush) {
			stopBehind(f, "ROLLBACK\x00", string(pgtest.ErrorResponse("ERROR", otherErrorCode, "no"))+readyAndIdle, true)
		},
	} {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			owner, _ := setUp(t, metered.Config{})
			pool, w := pgtest.Tap(t, owner, nil)
			c, hurried := newClient(t, pool, metered.Config{}), newClient(t, pool, metered.Config{ResolveTimeout: 100 * time.Millisecond})
			cmd := whole(t, owner, c, "op")
			_, err := metered.Do(t.Context(), c, cmd, wholeFunc("op", nil))
			require.NoError(t, err)
			settling := func(f *pgtest.Flush) bool { return f.Has("rollback") && f.Has("pg_logical_emit_message") }
			w.Once(settling, fault)
			out, err := metered.Do(t.Context(), c, cmd, mustNotRun(t))
			require.NoError(t, err)
			require.True(t, out.Replayed)

			w.Once(settling, func(f *pgtest.Flush) { w.Refuse(true); f.LoseAnswer() })
			_, err = metered.Do(t.Context(), hurried, cmd, mustNotRun(t))
			require.ErrorIs(t, err, metered.ErrIndefinite)
		})
	}
}

// The position is lost behind COMMIT's tag, with which the command has committed: it is asked
// for again. With early release it is not known whether the command stays, and the answer is
// its replay's.
func TestDo_APositionThatIsLostIsAskedForAgain(t *testing.T) {
	t.Parallel()
	for _, early := range []bool{false, true} {
		owner, w, c, cmd := onWire(t, metered.Config{ResolveTimeout: time.Second}, nil)
		cmd.LSN, cmd.EarlyRelease = true, early
		lose := func(f *pgtest.Flush) { stopBehind(f, commitTag, "", false) }
		w.Once((*pgtest.Flush).Last, lose)
		var runs atomic.Int64
		out, err := metered.Do(t.Context(), c, cmd, counted(&runs))
		require.NoError(t, err)
		require.Equal(t, early, out.Replayed)
		require.Positive(t, out.LSN)
		require.Equal(t, int64(1), runs.Load())
		require.Equal(t, everything, footprintOf(t, owner, cmd))
		if early {
			continue
		}
		other := whole(t, owner, c, "other")
		other.LSN = true
		w.Once((*pgtest.Flush).Last, func(f *pgtest.Flush) { w.Refuse(true); lose(f) })
		out, err = metered.Do(t.Context(), c, other, wholeFunc("other", nil))
		require.NoError(t, err, "it has committed")
		require.Zero(t, out.LSN)
	}
}

// A role that may not ask for a position has its command all the same. With early release it
// is the barrier behind the position that is skipped, and the answer is the replay's.
func TestDo_APositionThatIsRefusedLeavesTheCommand(t *testing.T) {
	t.Parallel()
	owner, _ := setUp(t, metered.Config{})
	_, err := owner.Exec(t.Context(), "revoke execute on function pg_current_wal_insert_lsn() from public")
	require.NoError(t, err)
	c := newClient(t, pgtest.AsRole(t, owner, metered.GrantSQL, riverGrantSQL), metered.Config{})
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
