package citusjobs_test

import (
	"context"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/jobs/citusjobs"
)

// statements keeps the SQL that a pool sends.
type statements struct {
	mu  sync.Mutex
	all []string
}

func (s *statements) TraceQueryStart(ctx context.Context, _ *pgx.Conn, data pgx.TraceQueryStartData) context.Context {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.all = append(s.all, data.SQL)
	return ctx
}

func (*statements) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}

func (s *statements) has(name string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, sql := range s.all {
		if strings.Contains(sql, "-- name: "+name+" ") {
			return true
		}
	}
	return false
}

// refused are the words that Citus refuses outside of an INSERT: a time of the server where one of its own may be given, and an answer of NOTIFY
// as a column.
var refused = regexp.MustCompile(`(?is)coalesce\([^()]*now\(\)\)|json_build_object\([^)]*\)::text\s*\) END`)

// River does all its work by the driver, on plain Postgres as well, and no statement of it has words that Citus refuses.
func TestDriver_WordsWhatCitusRefuses(t *testing.T) {
	t.Parallel()
	var sent statements
	pool := pgtest.Reopen(t, pgtest.Open(t), func(c *pgxpool.Config) { c.MaxConns, c.ConnConfig.Tracer = 8, &sent })
	workers := river.NewWorkers()
	river.AddWorker(workers, river.WorkFunc(func(ctx context.Context, job *river.Job[pgtest.Process]) error {
		if job.Args.Name == "in its transaction" {
			return pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
				_, err := river.JobCompleteTx[*riverpgxv5.Driver](ctx, tx, job)
				return err
			})
		}
		return nil
	}))
	client, err := river.NewClient(citusjobs.New(pool), &river.Config{
		Schema: "public", Workers: workers, Queues: map[string]river.QueueConfig{river.QueueDefault: {MaxWorkers: 2}},
		FetchCooldown: 10 * time.Millisecond, FetchPollInterval: 50 * time.Millisecond,
	})
	require.NoError(t, err)
	ctx := t.Context()
	later, err := client.Insert(ctx, pgtest.Process{Name: "later"}, &river.InsertOpts{ScheduledAt: time.Now().Add(time.Hour)})
	require.NoError(t, err)
	_, err = client.JobCancel(ctx, later.Job.ID)
	require.NoError(t, err)
	retried, err := client.JobRetry(ctx, later.Job.ID)
	require.NoError(t, err)
	require.WithinDuration(t, time.Now(), retried.ScheduledAt, time.Minute)
	require.NoError(t, pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		for _, name := range []string{"plain", "in its transaction"} {
			if _, err := client.InsertTx(ctx, tx, pgtest.Process{Name: name}, nil); err != nil {
				return err
			}
		}
		return nil
	}))
	require.NoError(t, client.Start(ctx))
	pgtest.WaitFor(t, "the jobs are completed", func() bool {
		return pgtest.Value[int](t, pool, "select count(*)::int from river_job where state = 'completed'") == 3
	})
	pgtest.WaitFor(t, "River's leader has scheduled", func() bool { return sent.has("JobSchedule") })
	require.NoError(t, client.QueuePause(ctx, river.QueueDefault, nil))
	require.NoError(t, client.QueueResume(ctx, river.QueueDefault, nil))
	require.NoError(t, client.Stop(ctx))
	for _, name := range []string{"JobGetAvailable", "JobSetStateIfRunningMany", "JobCancel", "JobRetry", "LeaderAttemptElect", "LeaderDeleteExpired", "LeaderResign", "QueuePause", "QueueResume"} {
		require.True(t, sent.has(name), name)
	}
	for _, sql := range sent.all {
		require.False(t, refused.MatchString(sql) && !strings.Contains(sql, "INSERT INTO"), sql)
	}
}
