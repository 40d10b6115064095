package metered_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"
	"github.com/riverqueue/river/rivertype"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/jobs"
)

// transition is a job that is enqueued with each transition of a hold.
type transition struct {
	holds.Transition
}

func (transition) Kind() string { return "transition" }

// Exactly once: a job in the transaction of the transition, keyed by what happened.
func TestSubscriber_AJobForEachTransitionIsWorkedExactlyOnce(t *testing.T) {
	t.Parallel()
	pool := pgtest.Open(t)
	worked := make(chan holds.Transition, 100)
	workers := river.NewWorkers()
	river.AddWorker(workers, river.WorkFunc(func(_ context.Context, job *river.Job[transition]) error {
		worked <- job.Args.Transition
		return nil
	}))
	client, err := river.NewClient(riverpgxv5.New(pool), &river.Config{
		Plugins: []rivertype.Plugin{jobs.Plugin()}, Workers: workers, Queues: map[string]river.QueueConfig{"default": {MaxWorkers: 3}},
		FetchCooldown: 10 * time.Millisecond, FetchPollInterval: 50 * time.Millisecond,
	})
	require.NoError(t, err)
	enqueuer, err := jobs.New(client, jobs.Config{})
	require.NoError(t, err)
	c, err := metered.New(pool, metered.Config{Holds: holds.Config{Subscribers: []holds.Subscriber{
		func(ctx context.Context, tx pgx.Tx, tr holds.Transition) error {
			_, err := enqueuer.Enqueue(ctx, tx, transition{tr}, &jobs.Options{Key: fmt.Sprintf("hold/%s/%d", tr.Hold.ID, tr.Hold.Version)})
			return err
		},
	}}})
	require.NoError(t, err)
	ctx := t.Context()
	place := func(id string) func(ctx context.Context, tx *metered.Tx) (any, error) {
		return func(ctx context.Context, tx *metered.Tx) (any, error) {
			return tx.Place(ctx, holds.Request{ID: id, Holder: "ann", TTL: time.Hour, Note: budget.Note{Reason: "wanted"},
				Lines: []holds.Line{{Scope: "room", Amount: 1, Limits: []budget.Limit{budget.Lifetime(1)}}}}, nil)
		}
	}
	for range 2 { // and a replay
		_, err = metered.Do(ctx, c, metered.Command{ID: "op", Input: "h"}, place("h"))
		require.NoError(t, err)
	}
	_, err = metered.Do(ctx, c, metered.Command{ID: "denied", Input: 1}, place("denied"))
	require.ErrorIs(t, err, budget.ErrExceeded)
	tx, err := pool.Begin(ctx)
	require.NoError(t, err)
	sub, err := tx.Begin(ctx)
	require.NoError(t, err)
	_, err = c.Holds.Extend(ctx, sub, holds.Extend{IDs: []string{"h"}, By: time.Second})
	require.NoError(t, err)
	require.NoError(t, sub.Rollback(ctx))
	_, err = c.Holds.Release(ctx, tx, holds.Release{IDs: []string{"h"}, Note: budget.Note{Reason: "changed their mind"}})
	require.NoError(t, err)
	require.NoError(t, tx.Commit(ctx))
	tx, err = pool.Begin(ctx)
	require.NoError(t, err)
	_, err = c.Holds.Place(ctx, tx, holds.Request{ID: "rolled back", TTL: time.Minute, Lines: []holds.Line{{Scope: "room", Amount: 1}}})
	require.NoError(t, err)
	require.NoError(t, tx.Rollback(ctx))

	require.NoError(t, client.Start(ctx))
	t.Cleanup(func() { require.NoError(t, client.Stop(context.Background())) })
	got := map[int]string{}
	for range 2 {
		select {
		case tr := <-worked:
			got[tr.Hold.Version] = fmt.Sprint(tr.Kind, " ", tr.Hold.ID, " ", tr.Hold.Holder, " ", tr.Hold.Lines[0].Scope, " ", tr.Note.Reason)
		case <-time.After(time.Minute):
			t.Fatal("not worked")
		}
	}
	require.Equal(t, map[int]string{1: "placed h ann room wanted", 2: "released h ann room changed their mind"}, got)
	require.Equal(t, 2, queryRow[int](t, pool, `select count(*)::int from river_job where kind = 'transition'`), "and no other")
}
