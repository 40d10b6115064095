package command_test

import (
	"bytes"
	"context"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/internal/guardtx"
	"github.com/pgmetered/metered/internal/pgtest"
)

// The last flush of a command is cut, lost or refused: Do finds out the outcome by itself, and the command has run
// exactly once.
func TestDo_AnUnknownOutcomeIsResolved(t *testing.T) {
	t.Parallel()
	instead := func(f *pgtest.Flush, answer []byte) { // the server never gets it
		f.Deliver = func() { f.Conn.Answer = answer; f.Close() }
	}
	partly := func(f *pgtest.Flush, upTo string) {
		f.Deliver = func() {
			all := f.Ask()
			f.Conn.Answer = all[:bytes.Index(all, []byte(upTo))]
			f.Close()
		}
	}
	answered := func(f *pgtest.Flush, text string, committed bool) {
		f.AnswerInDoubt("XX000", committed)
		deliver := f.Deliver
		f.Deliver = func() {
			deliver()
			f.Conn.Answer = append(pgtest.ErrorResponse("ERROR", "XX000", text), 'Z', 0, 0, 0, 5, 'I')
		}
	}
	tagged := func(f *pgtest.Flush, tag string) {
		f.Deliver = func() {
			f.Conn.Answer = bytes.Replace(f.Ask(), []byte("COMMIT\x00"), []byte(tag+"\x00"), 1)
			f.Close()
		}
	}
	owner, w, c, _ := onWire(t, metered.Config{}, nil)
	n := 0 // the level of isolation that is next in turn
	for what, test := range map[string]struct {
		fault    func(f *pgtest.Flush)
		runs     int64 // of the function
		replayed bool
	}{
		"the answer is lost":              {func(f *pgtest.Flush) { f.LoseAnswer() }, 1, true},
		"the flush is lost":               {func(f *pgtest.Flush) { f.Lose() }, 2, false},
		"FATAL 08P01, committed":          {func(f *pgtest.Flush) { f.AnswerWith(pgtest.ErrorResponse("FATAL", "08P01", "server conn crashed?")) }, 1, true},
		"FATAL 08P01, not committed":      {func(f *pgtest.Flush) { instead(f, pgtest.ErrorResponse("FATAL", "08P01", "server conn crashed?")) }, 2, false},
		"FATAL 57P01, committed":          {func(f *pgtest.Flush) { f.AnswerWith(pgtest.ErrorResponse("FATAL", "57P01", "terminating")) }, 1, true},
		"ERROR and no end, committed":     {func(f *pgtest.Flush) { f.AnswerWith(pgtest.ErrorResponse("ERROR", "XX000", "no")) }, 1, true},
		"ERROR and no end, not committed": {func(f *pgtest.Flush) { instead(f, pgtest.ErrorResponse("ERROR", "XX000", "no")) }, 2, false},
		"a shard that collided": {func(f *pgtest.Flush) {
			answered(f, "could not commit transaction for shard 7 on at least one active node", false)
		}, 2, false},
		"a shard whose worker died": {func(f *pgtest.Flush) {
			answered(f, "could not commit transaction for shard 7 on at least one active node", true)
		}, 1, true},
		"a collision of a worker":                  {func(f *pgtest.Flush) { answered(f, "could not serialize access due to concurrent update", false) }, 2, false},
		"a serialization failure, but committed":   {func(f *pgtest.Flush) { f.AnswerWith(pgtest.ErrorResponse("ERROR", "40001", "no")) }, 1, true},
		"the answer stops before COMMIT's tag":     {func(f *pgtest.Flush) { partly(f, "C\x00\x00\x00\x0bCOMMIT") }, 1, true},
		"the answer stops after COMMIT's tag":      {func(f *pgtest.Flush) { partly(f, "Z\x00\x00\x00\x05") }, 1, false},
		"the answer stops in the middle of a byte": {func(f *pgtest.Flush) { partly(f, "OMMIT\x00") }, 1, true},
		"another tag than COMMIT's":                {func(f *pgtest.Flush) { tagged(f, "CALLED") }, 1, true},
	} {
		for _, level := range pgtest.Size(isolationLevels[n:n+1], isolationLevels) {
			t.Run(what+", "+string(level), func(t *testing.T) {
				cmd := whole(t, owner, c, t.Name())
				cmd.Isolation = level
				w.Once((*pgtest.Flush).Last, test.fault)
				var runs atomic.Int64
				out, err := metered.Do(t.Context(), c, cmd, pgtest.Counting(cmd.ID, &runs))
				require.NoError(t, err)
				require.Equal(t, cmd.ID, out.Result.Name)
				require.Equal(t, test.replayed, out.Replayed)
				require.Len(t, out.Receipt.Entries, 3)
				require.Equal(t, test.runs, runs.Load())
				require.Equal(t, everything, footprintOf(t, owner, cmd))
			})
		}
		n = (n + 1) % len(isolationLevels)
	}
}

func TestDo_AnOutcomeThatStaysUnknownIsIndefinite(t *testing.T) {
	t.Parallel()
	events := &pgtest.Recorder{}
	owner, w, c, _ := onWire(t, metered.Config{ResolveTimeout: 100 * time.Millisecond, Config: budget.Config{Observer: events}}, nil)
	for what, committed := range map[string]bool{"committed": true, "not committed": false} {
		for _, by := range []string{"deadline", "timeout", "cancel"} {
			t.Run(what+", "+by, func(t *testing.T) {
				cmd := whole(t, owner, c, t.Name())
				cmd.Tenant = "ns"
				ctx, cancel := context.WithCancel(t.Context())
				defer cancel()
				if by == "deadline" {
					deadline := pgtest.NewDeadline(t, time.Minute)
					ctx, cancel = deadline, deadline.Pass
				}
				w.Once((*pgtest.Flush).Last, func(f *pgtest.Flush) {
					w.Refuse(true)
					if f.Lose(); committed {
						f.LoseAnswer()
					}
					if by != "timeout" {
						deliver := f.Deliver
						f.Deliver = func() { deliver(); cancel() }
					}
				})
				var runs atomic.Int64
				_, err := metered.Do(ctx, c, cmd, pgtest.Counting(cmd.ID, &runs))
				var indefinite *metered.IndefiniteError
				require.ErrorAs(t, err, &indefinite)
				require.ErrorIs(t, err, metered.ErrIndefinite)
				require.Equal(t, "ns", indefinite.Tenant)
				require.Equal(t, cmd.ID, indefinite.ID)
				require.Equal(t, "indefinite", metered.Code(err))
				require.Equal(t, int64(1), runs.Load())
				resolved := map[string]string{"deadline": "unknown", "timeout": "unknown", "cancel": "left"}[by]
				require.Contains(t, strings.Join(events.Told(), "\n"), "commit "+resolved, "a caller who left pages nobody")
				events.Forget()

				w.Refuse(false)
				pgtest.WaitSettled(t, owner)
				out, err := metered.Do(t.Context(), c, cmd, pgtest.Counting(cmd.ID, &runs))
				require.NoError(t, err)
				require.Equal(t, committed, out.Replayed)
				require.Equal(t, cmd.ID, out.Result.Name)
				require.Equal(t, everything, footprintOf(t, owner, cmd))
			})
		}
	}
}

// After the outcome is known to be "not committed", the repetition gives the answer, and a definite one.
func TestDo_ARepetitionThatFailsIsDefinite(t *testing.T) {
	t.Parallel()
	owner, w, c, cmd := onWire(t, metered.Config{}, nil)
	w.Once((*pgtest.Flush).Last, (*pgtest.Flush).Lose)
	var runs atomic.Int64
	_, err := metered.Do(t.Context(), c, cmd, wholeFunc("op", func(step int) error {
		if step == 0 && runs.Add(1) == 2 {
			return errOwn
		}
		return nil
	}))
	require.ErrorIs(t, err, errOwn)
	require.NotErrorIs(t, err, metered.ErrIndefinite)
	require.Equal(t, nothing, footprintOf(t, owner, cmd))
}

func TestDo_ACommitAnsweredByRollbackIsNoSuccess(t *testing.T) {
	t.Parallel()
	owner, w, c, cmd := onWire(t, metered.Config{}, func(config *pgxpool.Config) {
		config.ConnConfig.DefaultQueryExecMode = pgx.QueryExecModeSimpleProtocol
	})
	w.Once((*pgtest.Flush).Last, func(f *pgtest.Flush) {
		at := bytes.LastIndex(f.Raw, []byte("commit"))
		f.Raw = append(append(bytes.Clone(f.Raw[:at]), "abort "...), f.Raw[at+6:]...)
	})
	_, err := metered.Do(t.Context(), c, cmd, wholeFunc("op", nil))
	require.ErrorIs(t, err, guardtx.ErrFailed)
	require.NotErrorIs(t, err, metered.ErrIndefinite)
	require.Equal(t, nothing, footprintOf(t, owner, cmd))
}

func TestDo_AFunctionThatSwallowsAnErrorCommitsNothing(t *testing.T) {
	t.Parallel()
	pool, c := setUp(t, metered.Config{})
	cmd := whole(t, pool, c, "op")
	_, err := metered.Do(t.Context(), c, cmd, func(ctx context.Context, tx *metered.Tx) (uploaded, error) {
		out, err := wholeFunc("op", nil)(ctx, tx)
		require.NoError(t, err)
		_, err = tx.Exec(ctx, "select 1/0")
		require.Error(t, err)
		return out, nil
	})
	require.ErrorIs(t, err, guardtx.ErrFailed)
	require.Equal(t, nothing, footprintOf(t, pool, cmd))

	// Rows left open would take the place of the last flush's.
	_, err = metered.Do(t.Context(), c, cmd, func(ctx context.Context, tx *metered.Tx) (uploaded, error) {
		_, err := tx.Query(ctx, "select generate_series(1, 10)")
		return uploaded{}, err
	})
	require.ErrorIs(t, err, guardtx.ErrFailed)
	require.Equal(t, nothing, footprintOf(t, pool, cmd))
	_, err = metered.Do(t.Context(), c, cmd, wholeFunc("op", nil))
	require.NoError(t, err)
}

func TestDo_AConstraintThatFailsAtCommitIsDefinite(t *testing.T) {
	t.Parallel()
	owner, w, c, cmd := onWire(t, metered.Config{}, nil)
	_, err := owner.Exec(t.Context(), `create table owners (name text primary key);
		alter table uploads add constraint owned foreign key (name) references owners deferrable initially deferred`)
	require.NoError(t, err)
	w.Each(nil)
	var runs atomic.Int64
	_, err = metered.Do(t.Context(), c, cmd, pgtest.Counting(cmd.ID, &runs))
	require.ErrorContains(t, err, "23503")
	require.NotErrorIs(t, err, metered.ErrIndefinite)
	require.Equal(t, int64(1), runs.Load())
	require.Equal(t, nothing, footprintOf(t, owner, cmd))
	_, err = owner.Exec(t.Context(), `insert into owners values ('op')`)
	require.NoError(t, err)
	_, err = metered.Do(t.Context(), c, cmd, pgtest.Counting(cmd.ID, &runs))
	require.NoError(t, err)
}

// A constraint that the caller deferred to COMMIT has codes of its own, which are not this library's.
func TestDo_AnErrorOfADeferredTriggerIsTheCallers(t *testing.T) {
	t.Parallel()
	pool, c := setUp(t, metered.Config{MaxAttempts: 3})
	ctx := t.Context()
	for raise, state := range map[string]string{
		"perform 2147483647 + 1":                  "22003",
		"perform 1 from no_such_table":            "42P01",
		"raise exception using errcode = '55P03'": "55P03",
		"raise exception using errcode = 'MT001'": "MT001",
		"raise exception using errcode = '40001'": "40001",
	} {
		_, err := pool.Exec(ctx, `create or replace function boom() returns trigger language plpgsql as $$ begin `+raise+`; return null; end $$;
			drop trigger if exists boom on uploads;
			create constraint trigger boom after insert on uploads deferrable initially deferred for each row execute function boom()`)
		require.NoError(t, err)
		_, err = metered.Do(ctx, c, metered.Command{ID: raise, Charges: []budget.Charge{charge("s", 1, 10)}}, upload(raise))
		var pgErr *pgconn.PgError
		require.ErrorAs(t, err, &pgErr)
		require.Equal(t, state, pgErr.Code)
		require.Equal(t, map[bool]string{true: "serialization"}[state == "40001"], metered.Code(err), raise)
		require.Equal(t, state == "40001", strings.Contains(err.Error(), "after 3 attempts"), raise)
	}
	require.Zero(t, count(t, pool, "metered.ledger"))
}

// The backend is killed while COMMIT runs.
func TestDo_ABackendKilledDuringCommitIsResolved(t *testing.T) {
	t.Parallel()
	pool, c := setUp(t, metered.Config{})
	cmd := whole(t, pool, c, "op")
	ctx := t.Context()
	_, err := pool.Exec(ctx, `create function slow() returns trigger language plpgsql as
		$$ begin perform pg_advisory_xact_lock_shared(77); return new; end $$;
		create constraint trigger slow after insert on uploads deferrable initially deferred for each row execute function slow()`)
	require.NoError(t, err)
	tx, err := pool.Begin(ctx)
	require.NoError(t, err)
	defer tx.Rollback(context.Background())
	_, err = tx.Exec(ctx, "select pg_advisory_xact_lock(77)")
	require.NoError(t, err)

	var runs atomic.Int64
	done := make(chan error, 1)
	go func() {
		_, err := metered.Do(ctx, c, cmd, pgtest.Counting(cmd.ID, &runs))
		done <- err
	}()
	for range 2 { // the repetition is killed as well
		pgtest.WaitAdvisory(t, pool, 1)
		require.True(t, pgtest.Value[bool](t, pool, `select pg_terminate_backend(pid, 100000) from pg_stat_activity
			where datname = current_database() and wait_event = 'advisory'`))
	}
	pgtest.WaitAdvisory(t, pool, 1)
	require.Equal(t, nothing, footprintOf(t, pool, cmd))
	require.NoError(t, tx.Rollback(ctx))
	require.NoError(t, <-done)
	require.Equal(t, int64(3), runs.Load())
	require.Equal(t, everything, footprintOf(t, pool, cmd))
}
