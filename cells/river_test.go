package cells_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"
	"github.com/riverqueue/river/rivertype"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/cells"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/jobs"
)

// chore is a job of a tenant.
type chore struct {
	Tenant string `json:"tenant"`
	Name   string `json:"name"`
}

func (chore) Kind() string { return "chore" }

// withRiver gives each cell a client of River that only enqueues.
func (w *world) withRiver() *world {
	w.Helper()
	for i := range w.pools {
		w.rivers = append(w.rivers, w.river(i, nil))
	}
	require.NoError(w, w.router().SetUp(w.Context()))
	return w
}

// river is a client of River of a cell.
func (w *world) river(i int, workers *river.Workers) *river.Client[pgx.Tx] {
	w.Helper()
	config := &river.Config{
		Schema: w.schemas[i], Workers: workers, Plugins: []rivertype.Plugin{jobs.Plugin()}, FetchCooldown: 10 * time.Millisecond, FetchPollInterval: 200 * time.Millisecond, PollOnly: true,
		Logger: slog.New(slog.NewTextHandler(io.Discard, nil)),
	}
	if workers != nil {
		config.Queues = map[string]river.QueueConfig{river.QueueDefault: {MaxWorkers: 3}}
	}
	client, err := river.NewClient(riverpgxv5.New(w.pools[i]), config)
	require.NoError(w, err)
	return client
}

// team is a process that works the jobs of all cells, and releases parked ones.
type team struct {
	*world // with the team's clients
	router *cells.Router
	mu     sync.Mutex
	ran    map[string][]string // by the name of a chore
}

// workers starts a team until the test ends. work nil does chores.
func (w *world) workers(work func(ctx context.Context, team *team, job *river.Job[chore]) error, more ...func(*river.Workers)) *team {
	w.Helper()
	own := *w
	own.rivers = nil
	team := &team{world: &own, ran: map[string][]string{}}
	if work == nil {
		work = doChore
	}
	all := river.NewWorkers()
	river.AddWorker(all, river.WorkFunc(func(ctx context.Context, job *river.Job[chore]) error { return work(ctx, team, job) }))
	for _, add := range more {
		add(all)
	}
	for i := range w.pools {
		own.rivers = append(own.rivers, w.river(i, all))
	}
	team.router = own.router()
	ctx, stop := context.WithCancel(context.Background())
	var running sync.WaitGroup
	for i, pool := range w.pools {
		require.NoError(w, own.rivers[i].Start(ctx))
		running.Go(func() {
			err := own.client(i, pool).Jobs.Run(ctx, pool, func(err error) { w.Errorf("Run of cell %d: %v", i, err) })
			if !errors.Is(err, context.Canceled) {
				w.Errorf("Run of cell %d: %v", i, err)
			}
		})
	}
	w.Cleanup(func() {
		for _, client := range own.rivers {
			within, cancel := pgtest.Patient(w)
			if err := client.StopAndCancel(within); err != nil {
				w.Errorf("River does not stop: %v", err)
			}
			cancel()
		}
		stop()
		running.Wait()
	})
	return team
}

// where are the schemas of River in which a chore was worked.
func (team *team) where(name string) []string {
	team.mu.Lock()
	defer team.mu.Unlock()
	return slices.Clone(team.ran[name])
}

// doChore does a chore once, where its tenant lives by now.
func doChore(ctx context.Context, team *team, job *river.Job[chore]) error {
	tenant := job.Args.Tenant
	charge := budget.Charge{Scope: tenant + "/done", Amount: 1}
	_, err := do(ctx, team.router, metered.Command{ID: "chore " + job.Args.Name, Tenant: tenant, Charges: []budget.Charge{charge}},
		func(context.Context, *metered.Tx) (int, error) { return 1, nil })
	if err == nil {
		team.mu.Lock()
		defer team.mu.Unlock()
		team.ran[job.Args.Name] = append(team.ran[job.Args.Name], river.ClientFromContext[pgx.Tx](ctx).Schema())
	}
	return err
}

// enqueue enqueues a chore by a command of its tenant.
func enqueue(ctx context.Context, r *cells.Router, id string, level pgx.TxIsoLevel, job chore, opts jobs.Options) (result jobs.Result, err error) {
	for {
		_, err = do(ctx, r, metered.Command{ID: id, Tenant: job.Tenant, Input: id, Isolation: level}, func(ctx context.Context, tx *metered.Tx) (int, error) {
			var err error
			result, err = tx.Enqueue(ctx, job, &opts)
			return 1, err
		})
		if !errors.Is(err, budget.ErrSerialization) {
			return result, err
		}
	}
}

func keyed(tenant, key string) (chore, jobs.Options) {
	return chore{tenant, key}, jobs.Options{Tenant: tenant, Key: key}
}

// slots are units of which a job needs one until it ends, and there are two.
func slots(tenant string) *jobs.Units {
	return &jobs.Units{Lines: []holds.Line{{Scope: tenant + "/slots", Amount: 1, Limits: []budget.Limit{budget.Lifetime(2)}}}}
}

// number is the value of a query of a cell, with its schema as %[1]s.
func (w *world) number(i int, sql string) int64 {
	w.Helper()
	return pgtest.Value[int64](w, w.pools[i], fmt.Sprintf(sql, w.schemas[i]))
}

// worked returns when River has completed so many jobs of a cell, and their holds are released.
func (w *world) worked(i int, jobs int64) {
	w.Helper()
	pgtest.WaitFor(w, fmt.Sprintf("%d jobs of cell %d", jobs, i), func() bool {
		return w.number(i, `select count(*) from %s.river_job where state = 'completed'`) == jobs && w.number(i, `select count(*) from %s.holds where pending`) == 0
	})
}

// tenantOf is a tenant that lives in a cell at first.
func tenantOf(r *cells.Router, i int) string {
	for n := 0; ; n++ {
		if tenant := fmt.Sprint("t", n); r.First(tenant) == i {
			return tenant
		}
	}
}

// River has its tables in each cell. Workers of each cell get the jobs that were enqueued there, with their commands. In one of them jobs wait for
// units, which are never exceeded.
func TestRiver_WorksTheJobsOfEachCell(t *testing.T) {
	t.Parallel()
	const each = 8
	w := newWorld(t, 3, database(t), database(t)).withRiver()
	r := w.router()
	ids := map[int64]bool{}
	for i := range w.pools {
		tenant := tenantOf(r, i)
		for n := range each {
			for again := range 2 {
				job, opts := keyed(tenant, fmt.Sprint(tenant, "-", n))
				if i == 1 {
					opts.Hold = slots(tenant)
				}
				result, err := enqueue(t.Context(), r, fmt.Sprint(n, again), pgx.ReadCommitted, job, opts)
				require.NoError(t, err)
				require.Equal(t, again == 0, result.Created)
				ids[result.JobID] = true
			}
		}
		started := int64(each)
		if i == 1 {
			started = 2
		}
		require.Equal(t, started, w.number(i, `select count(*) from %s.river_job`))
		require.Equal(t, each-started, w.number(i, `select count(*) from %s.parked_jobs`))
	}
	require.Len(t, ids, 3*each, "ids of jobs are those of one cell")
	team := w.workers(nil)
	for i := range w.pools {
		w.worked(i, each)
		tenant := tenantOf(r, i)
		require.Equal(t, int64(each), w.number(i, `select spent from %s.scopes where scope = '`+tenant+`/done'`))
		for n := range each {
			name := fmt.Sprint(tenant, "-", n)
			require.Equal(t, []string{w.schemas[i]}, team.where(name), name)
		}
	}
	require.Equal(t, int64(2), w.number(1, `select max(held) from %s.ledger`))
	require.Zero(t, w.number(1, `select count(*) from %s.parked_jobs`))
	w.verified()
}
