package main

import (
	"os"
	"os/exec"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/examples/internal/exampledb"
	"github.com/pgmetered/metered/examples/internal/exampletest"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/pgtest"
)

// Workers of the program itself are killed, one after the other, while they work off a queue. Then one may live. A
// task that was done to the end is charged once, and any other attempt not at all.
func TestWorker_KilledAgainAndAgainLosesNothingAndChargesNothingTwice(t *testing.T) {
	t.Parallel()
	pgtest.InCI(t)
	tasks, kills := pgtest.Size(25, 120), pgtest.Size(3, 20)
	db, err := exampledb.Open(t.Context(), "crash", exampledb.Options{Jobs: true, SQL: tasksSQL})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, db.Close()) })
	f := serve(t, db.Pool, 1<<40)

	ids := map[string]int64{} // numbers by task
	for range tasks {
		number := 1 + 1<<(30+pgtest.Random(t).Int64N(18)) + pgtest.Random(t).Int64N(1<<30)
		r := f.ann.submit(t.Context(), "", number)
		require.Equal(t, 202, r.Status, r.Body)
		ids[r.Field("id")] = number
	}

	start := func() *exec.Cmd {
		_, cmd := exampletest.Start(t, "", "working", "-worker", "-database", db.ConnString)
		return cmd
	}
	cut := 0
	for n := 0; n < kills || cut == 0 && n < 20*kills; n++ { // a slow machine takes long to start one
		cmd := start()
		time.Sleep(time.Duration(pgtest.Random(t).Int64N(int64(time.Duration(1+n/kills) * 200 * time.Millisecond)))) // any moment of its work
		require.NoError(t, cmd.Process.Kill())                                                                       // SIGKILL
		require.Error(t, cmd.Wait())
		// Jobs of the dead: rescued by a later worker, or not yet.
		cut = max(cut, pgtest.Count(t, db.Pool, `river_job where state = 'running' and kind = 'factorize'`))
	}
	t.Logf("at most %d jobs were cut off, of %d", cut, tasks)
	require.NotZero(t, cut, "no worker was killed at work")

	last := start()
	pgtest.WaitFor(t, "all tasks to be worked", func() bool {
		return pgtest.Count(t, db.Pool, `river_job where kind = 'factorize' and finalized_at is null`) == 0
	})
	require.NoError(t, last.Process.Signal(os.Interrupt))
	require.NoError(t, last.Wait())

	pgtest.SetClock(t, db.Pool, time.Now().Add(24*time.Hour))
	_, err = f.metered.Holds.Sweep(t.Context(), db.Pool, holds.SweepOptions{})
	require.NoError(t, err)
	f.requireSettled(t, ids)
}

// requireSettled checks each task against its job, its hold and the ledger.
func (f *fixture) requireSettled(t *testing.T, ids map[string]int64) {
	t.Helper()
	rows, err := f.pool.Query(t.Context(), `
		select j.args->'hold'->>'id', j.state::text, j.attempt, coalesce(t.factors, '{}'),
		    (select count(*) from metered.ledger l where l.hold = t.id and l.kind = 'u')
		from river_job j join tasks t on t.id = j.args->'hold'->>'id'`)
	require.NoError(t, err)
	type row struct {
		ID, State string
		Attempt   int
		Factors   []int64
		Charges   int
	}
	jobs, err := pgx.CollectRows(rows, pgx.RowToStructByPos[row])
	require.NoError(t, err)
	require.Len(t, jobs, len(ids))
	var charged int64
	states, retried := map[string]int{}, 0
	for _, j := range jobs {
		states[j.State]++
		if j.Attempt > 1 {
			retried++
		}
		s, err := f.status(t.Context(), "ann", j.ID)
		require.NoError(t, err)
		factors, divisions, err := factorize(t.Context(), ids[j.ID])
		require.NoError(t, err)
		if j.State == "completed" {
			require.Equal(t, status{ID: j.ID, Number: ids[j.ID], State: "done", Factors: factors, Charged: units(divisions)}, s)
			require.Equal(t, factors, j.Factors)
			require.Equal(t, 1, j.Charges)
			charged += units(divisions)
			continue
		}
		require.Equal(t, status{ID: j.ID, Number: ids[j.ID], State: "failed"}, s)
		require.Empty(t, j.Factors)
		require.Zero(t, j.Charges)
	}
	t.Logf("jobs: %v; tried again: %d", states, retried)
	require.NotZero(t, retried, "nothing was rescued")
	require.NotZero(t, states["completed"])
	spent, held := f.usage(t, "ann")
	require.Equal(t, []int64{charged, 0}, []int64{spent, held})
}
