package jobs_test

import (
	"context"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/jobs"
)

// settling are the statements of the transaction that captures a cost.
var settling = []string{"begin isolation", "insert into uploads", "job_input", "capture_holds", "commit"}

// settlingJob submits a job, and works it through a wire. strike is called with the first flush of settling that has the
// statement. It returns the job, the number of its runs, and the client that works it.
func settlingJob(t *testing.T, statement string, strike func(w *pgtest.Wire, owner *pgxpool.Pool, f *pgtest.Flush)) (owner *pgxpool.Pool, c *metered.Client, job int64, runs *atomic.Int64, client *river.Client[pgx.Tx]) {
	t.Helper()
	owner, c = setUp(t, metered.Config{})
	job = submit(t, c, 5)
	pool, w := pgtest.Tap(t, owner, func(c *pgxpool.Config) { c.MaxConns = 16 })
	runs = new(atomic.Int64)
	client = workHeld(t, pool, pgtest.NewClient(t, pool, metered.Config{}), jobs.WorkerOptions{}, func(ctx context.Context, j *rendering) (jobs.JobCost, error) {
		runs.Add(1)
		cost, err := costs(7, holds.OverRefused)(ctx, j)
		own, armed := cost.Write, false
		arm := func(pid int32) {
			if !armed {
				armed = true
				w.Once(func(f *pgtest.Flush) bool { return f.Has(statement) && (pid == 0 || f.PID() == pid) }, func(f *pgtest.Flush) { strike(w, owner, f) })
			}
		}
		if statement == settling[0] {
			arm(0)
		}
		cost.Write = func(ctx context.Context, tx pgx.Tx) error {
			arm(int32(tx.Conn().PgConn().PID())) // the statements that follow are on this connection
			return own(ctx, tx)
		}
		return cost, err
	})
	return owner, c, job, runs, client
}

// The backend is killed, or the connection lost, before and after each statement: the work is not done again, and its
// cost is charged once.
func TestHeldWorker_ALostConnectionWhileCapturingIsMadeUpFor(t *testing.T) {
	t.Parallel()
	for _, statement := range settling {
		n := 0
		for what, fault := range map[string]func(w *pgtest.Wire, owner *pgxpool.Pool, f *pgtest.Flush){
			"kill before": func(_ *pgtest.Wire, owner *pgxpool.Pool, f *pgtest.Flush) { f.Terminate(t, owner) },
			"kill after": func(_ *pgtest.Wire, owner *pgxpool.Pool, f *pgtest.Flush) {
				f.Deliver = func() { f.Conn.Answer = f.Ask(); f.Terminate(t, owner) }
			},
			"cut after": func(_ *pgtest.Wire, _ *pgxpool.Pool, f *pgtest.Flush) { f.LoseAnswer() },
		} {
			// Each statement meets one of the faults, another one in each run, and COMMIT all.
			if n++; !pgtest.Long && statement != "commit" && n > 1 {
				continue
			}
			t.Run(what+" "+statement, func(t *testing.T) {
				t.Parallel()
				var struck atomic.Bool
				owner, c, job, runs, _ := settlingJob(t, statement, func(w *pgtest.Wire, owner *pgxpool.Pool, f *pgtest.Flush) {
					struck.Store(true)
					fault(w, owner, f)
				})
				awaitJob(t, owner, job, "completed")
				require.True(t, struck.Load(), statement)
				require.Equal(t, books{Job: "completed", Hold: holds.Captured, Spent: 7, Rows: 1}, booksOf(t, owner, c, job), "%s: %s", what, statement)
				require.Equal(t, int64(1), runs.Load(), "%s: %s", what, statement)
			})
		}
	}
}

// A pooler that lost its server answers COMMIT by an ERROR, whether it took effect or not: the work is not done again, and
// its cost is charged once.
func TestHeldWorker_AnAnswerToCommitThatLeavesItOpenIsMadeUpFor(t *testing.T) {
	t.Parallel()
	for i, code := range []string{"08006", "58030", "XX000"} {
		for _, committed := range []bool{false, true} {
			if !pgtest.Long && (i == 1) == committed { // each code once, and both outcomes
				continue
			}
			t.Run(fmt.Sprint(code, committed), func(t *testing.T) {
				t.Parallel()
				owner, c, job, runs, _ := settlingJob(t, "commit", func(_ *pgtest.Wire, _ *pgxpool.Pool, f *pgtest.Flush) {
					f.AnswerInDoubt(code, committed)
				})
				awaitJob(t, owner, job, "completed")
				require.Equal(t, books{Job: "completed", Hold: holds.Captured, Spent: 7, Rows: 1}, booksOf(t, owner, c, job))
				require.Equal(t, int64(1), runs.Load())
			})
		}
	}
}

// The process dies before and after each statement: nobody hears of it again. If the job is rescued in time, it is
// worked again, and charged once. If not, the hold expires, and nothing is charged.
func TestHeldWorker_AWorkerThatDiesChargesOnceOrNotAtAll(t *testing.T) {
	t.Parallel()
	for i, statement := range settling {
		for _, after := range []bool{false, true} {
			if !pgtest.Long && statement != "commit" && (i%2 == 0) == after { // at each statement, before it or after it
				continue
			}
			dead := make(chan struct{})
			owner, c, job, _, client := settlingJob(t, statement, func(w *pgtest.Wire, _ *pgxpool.Pool, f *pgtest.Flush) {
				w.Refuse(true)
				w.Each(func(f *pgtest.Flush) { f.Lose() })
				f.Lose()
				if after {
					f.LoseAnswer()
				}
				close(dead)
			})
			<-dead
			if committed := statement == "commit" && after; committed {
				awaitJob(t, owner, job, "completed")
				require.Equal(t, books{Job: "completed", Hold: holds.Captured, Spent: 7, Rows: 1}, booksOf(t, owner, c, job))
				continue
			}
			ctx, cancel := context.WithTimeout(context.Background(), time.Millisecond)
			_ = client.StopAndCancel(ctx)
			cancel()
			pgtest.WaitSettled(t, owner)
			require.Equal(t, books{Job: "running", Hold: holds.Held, Held: 10}, booksOf(t, owner, c, job), statement)

			inTime := (i%2 == 0) == after
			if !inTime {
				pgtest.SetClock(t, owner, time.Now().Add(2*time.Hour))
			}
			_, err := owner.Exec(t.Context(), `update river_job set state = 'available' where id = $1`, job) // as River's rescuer does
			require.NoError(t, err)
			workHeld(t, owner, c, jobs.WorkerOptions{}, costs(7, holds.OverRefused))
			if inTime {
				awaitJob(t, owner, job, "completed")
				require.Equal(t, books{Job: "completed", Hold: holds.Captured, Spent: 7, Rows: 1}, booksOf(t, owner, c, job), statement)
				continue
			}
			awaitJob(t, owner, job, "cancelled")
			_, err = c.Holds.Sweep(t.Context(), owner, holds.SweepOptions{})
			require.NoError(t, err)
			require.Equal(t, books{Job: "cancelled", Hold: holds.Expired}, booksOf(t, owner, c, job), statement)
		}
	}
}

// River has taken the job away from a worker that is too slow: it cannot complete it, so it charges nothing.
func TestHeldWorker_AJobThatWasTakenAwayIsNotCharged(t *testing.T) {
	t.Parallel()
	for _, sql := range []string{
		`update river_job set state = 'cancelled', finalized_at = now() where id = $1`,
		`update river_job set state = 'retryable', scheduled_at = now() + interval '1 hour' where id = $1`,
		`delete from river_job where id = $1`,
	} {
		pool, c := setUp(t, metered.Config{})
		submit(t, c, 1)
		ended := make(chan struct{})
		client := workHeld(t, pool, c, jobs.WorkerOptions{}, func(ctx context.Context, j *rendering) (jobs.JobCost, error) {
			_, err := pool.Exec(ctx, sql, j.ID)
			if err != nil {
				return jobs.JobCost{}, err
			}
			defer close(ended)
			return costs(7, holds.OverRefused)(ctx, j)
		})
		<-ended
		ctx, cancel := pgtest.Patient(t)
		require.NoError(t, client.Stop(ctx)) // which waits for the job
		cancel()
		h, err := c.Holds.Get(t.Context(), pool, "", "h", "")
		require.NoError(t, err)
		require.Equal(t, holds.Held, h.State, sql)
		usage, err := c.Budget.Usage(t.Context(), pool, budget.Query{Scope: "gpu"})
		require.NoError(t, err)
		require.Equal(t, []int64{0, 10}, []int64{usage[0].Spent, usage[0].Held}, sql)
		require.Zero(t, pgtest.Value[int](t, pool, "select count(*) from uploads"), sql)
	}
}

// Two workers of one job, since the first was taken for dead: one of them charges.
func TestHeldWorker_OfTwoWorkersOfOneJobOneCharges(t *testing.T) {
	t.Parallel()
	pool, c := setUp(t, metered.Config{})
	job := submit(t, c, 5)
	var runs atomic.Int64
	both := make(chan struct{})
	workHeld(t, pool, c, jobs.WorkerOptions{}, func(ctx context.Context, j *rendering) (jobs.JobCost, error) {
		if runs.Add(1) == 2 {
			close(both)
		} else if _, err := pool.Exec(ctx, `update river_job set state = 'available' where id = $1`, j.ID); err != nil {
			return jobs.JobCost{}, err
		}
		<-both
		return costs(7, holds.OverRefused)(ctx, j)
	})
	awaitJob(t, pool, job, "completed")
	require.Equal(t, books{Job: "completed", Hold: holds.Captured, Spent: 7, Rows: 1}, booksOf(t, pool, c, job))
	require.Equal(t, int64(2), runs.Load())
}
