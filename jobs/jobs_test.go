package jobs_test

import (
	"context"
	"fmt"
	"maps"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"
	"github.com/riverqueue/river/rivertype"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/internal/sqlstate"
	"github.com/pgmetered/metered/jobs"
)

// process is the usual job of these tests.
type process struct {
	Asset string `json:"asset"`
}

func (process) Kind() string { return "process" }

// discard has the same args as process, and another kind.
type discard struct {
	Asset string `json:"asset"`
}

func (discard) Kind() string { return "discard" }

// routed chooses its queue and more by itself.
type routed struct {
	Asset string `json:"asset"`
	opts  river.InsertOpts
}

func (routed) Kind() string                   { return "routed" }
func (r routed) InsertOpts() river.InsertOpts { return r.opts }

var isolationLevels = []pgx.TxIsoLevel{pgx.ReadCommitted, pgx.RepeatableRead, pgx.Serializable}

// fixture is a database with an insert-only client and an Enqueuer on it.
type fixture struct {
	*jobs.Enqueuer
	t      *testing.T
	ctx    context.Context
	pool   *pgxpool.Pool
	client *river.Client[pgx.Tx]
}

func open(t *testing.T) *fixture {
	t.Helper()
	return on(t, database(t, nil), jobs.Config{}, &river.Config{Plugins: []rivertype.Plugin{jobs.Plugin()}})
}

// database is pgtest's, with session settings.
func database(t *testing.T, settings map[string]string) *pgxpool.Pool {
	t.Helper()
	return pgtest.OpenWith(t, pgtest.Options{Config: func(c *pgxpool.Config) {
		maps.Copy(c.ConnConfig.RuntimeParams, settings)
	}})
}

// on waits a minute for locks unless config says otherwise.
func on(t *testing.T, pool *pgxpool.Pool, config jobs.Config, riverConfig *river.Config) *fixture {
	t.Helper()
	if config.LockTimeout == 0 {
		config.LockTimeout = time.Minute
	}
	client, err := river.NewClient(riverpgxv5.New(pool), riverConfig)
	require.NoError(t, err)
	e, err := jobs.New(client, config)
	require.NoError(t, err)
	return &fixture{Enqueuer: e, t: t, ctx: t.Context(), pool: pool, client: client}
}

// begin opens a transaction that the test need not end.
func (f *fixture) begin(level pgx.TxIsoLevel) pgx.Tx {
	f.t.Helper()
	tx, err := f.pool.BeginTx(f.ctx, pgx.TxOptions{IsoLevel: level})
	require.NoError(f.t, err)
	f.t.Cleanup(func() { _ = tx.Rollback(context.Background()) })
	return tx
}

// enqueue enqueues in a transaction of its own.
func (f *fixture) enqueue(args river.JobArgs, opts *jobs.Options) (result jobs.Result, err error) {
	err = pgx.BeginFunc(f.ctx, f.pool, func(tx pgx.Tx) error {
		result, err = f.Enqueue(f.ctx, tx, args, opts)
		return err
	})
	return result, err
}

func (f *fixture) mustEnqueue(args river.JobArgs, opts *jobs.Options) jobs.Result {
	f.t.Helper()
	result, err := f.enqueue(args, opts)
	require.NoError(f.t, err)
	return result
}

// counts returns how many jobs and how many keys are committed.
func (f *fixture) counts() (riverJobs, keys int) {
	f.t.Helper()
	const countSQL = `select (select count(*) from river_job), (select count(*) from metered.job_keys)`
	require.NoError(f.t, f.pool.QueryRow(f.ctx, countSQL).Scan(&riverJobs, &keys))
	return riverJobs, keys
}

func (f *fixture) requireCounts(riverJobs, keys int) {
	f.t.Helper()
	gotJobs, gotKeys := f.counts()
	require.Equal(f.t, [2]int{riverJobs, keys}, [2]int{gotJobs, gotKeys}, "jobs and keys")
}

// job reads a job back through River.
func (f *fixture) job(id int64) *rivertype.JobRow {
	f.t.Helper()
	job, err := f.client.JobGet(f.ctx, id)
	require.NoError(f.t, err)
	return job
}

// pid returns the backend of tx.
func pid(t *testing.T, tx pgx.Tx) uint32 { t.Helper(); return tx.Conn().PgConn().PID() }

// untilBlocked returns once the backend waits for a lock.
func (f *fixture) untilBlocked(pid uint32) {
	f.t.Helper()
	pgtest.WaitFor(f.t, fmt.Sprintf("backend %d to wait", pid), func() bool {
		var blocked bool
		err := f.pool.QueryRow(f.ctx, "select cardinality(pg_blocking_pids($1)) > 0", int32(pid)).Scan(&blocked)
		return err == nil && blocked
	})
}

func requireAborted(t *testing.T, tx pgx.Tx) {
	t.Helper()
	require.ErrorIs(t, tx.Commit(context.Background()), pgx.ErrTxCommitRollback)
}

func retryable(err error) bool {
	state := sqlstate.Of(err)
	return state == sqlstate.SerializationFailure || state == sqlstate.DeadlockDetected
}

func key(k string) *jobs.Options { return &jobs.Options{Key: k} }
