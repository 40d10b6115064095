package holds_test

import (
	"context"
	"errors"
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
	"github.com/pgmetered/metered/internal/fault"
	"github.com/pgmetered/metered/internal/guardtx"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/jobs"
)

func TestDo_SubscribersHearBeforeTheCommitAndCanRefuse(t *testing.T) {
	t.Parallel()
	var told []holds.Transition
	var kept pgx.Tx
	refuse := errors.New("not this one")
	subscriber := func(ctx context.Context, tx pgx.Tx, tr holds.Transition) error {
		told, kept = append(told, tr), tx
		require.ErrorIs(t, tx.Commit(ctx), guardtx.ErrControl)
		_, err := tx.Exec(ctx, "commit")
		require.ErrorIs(t, err, guardtx.ErrControl)
		if tr.Hold.ID == "h2" {
			return refuse
		}
		return nil
	}
	pool, c := pgtest.SetUp(t, metered.Config{Holds: holds.Config{Subscribers: []holds.Subscriber{subscriber}}})
	ctx := t.Context()
	r := holds.Placement{ID: "h1", TTL: time.Minute, Lines: []holds.Line{pgtest.Room("seat", 1, 9)}}
	out, err := metered.Do(ctx, c, metered.Command{ID: "op1", Input: 1, LSN: true}, pgtest.Placing(r))
	require.NoError(t, err)
	require.Positive(t, out.LSN)
	require.Len(t, told, 1)
	require.Equal(t, holds.EventPlaced, told[0].Kind)
	_, err = kept.Exec(ctx, "select 1")
	require.ErrorIs(t, err, guardtx.ErrDone)
	r.ID = "h2"
	_, err = metered.Do(ctx, c, metered.Command{ID: "op2", Input: 1}, pgtest.Placing(r))
	require.ErrorIs(t, err, refuse)
	require.NotErrorIs(t, err, metered.ErrIndefinite)
	_, err = c.Holds.Get(ctx, pool, "", "h2", "")
	require.ErrorIs(t, err, holds.ErrUnknown)
	require.NoError(t, pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		_, err := metered.DoTx(ctx, c, tx, metered.Command{ID: "op3", Input: 1}, pgtest.Placing(r))
		require.ErrorIs(t, err, refuse)
		return nil
	}))
	_, err = c.Holds.Get(ctx, pool, "", "h2", "")
	require.ErrorIs(t, err, holds.ErrUnknown)
}

// Past the wrapper, by the bare connection: until COMMIT's own flush the server refuses
// every other, and that flush whatever came of a ROLLBACK.
func TestDo_SubscribersCannotEndTheTransaction(t *testing.T) {
	t.Parallel()
	var sql string
	var returned bool
	pool, c := pgtest.SetUp(t, metered.Config{Holds: holds.Config{Subscribers: []holds.Subscriber{
		func(ctx context.Context, tx pgx.Tx, _ holds.Transition) error {
			_, err := tx.Conn().Exec(ctx, sql, pgx.QueryExecModeSimpleProtocol)
			if returned {
				return errors.Join(pgtest.ErrOwn, err)
			}
			return nil
		},
	}}})
	ctx := t.Context()
	for _, sql = range []string{
		"commit", "commit and chain", "commit; begin", "prepare transaction 'x'",
		"rollback", "rollback and chain", "rollback; begin", "rollback; begin; select set_config('metered_tx.command', 'x', true)",
		"close all; rollback; begin",
	} {
		for _, returned = range []bool{false, true} {
			fn := func(ctx context.Context, tx *metered.Tx) (any, error) {
				if _, err := pgtest.Upload(sql)(ctx, tx); err != nil {
					return nil, err
				}
				return pgtest.Placing(holds.Placement{TTL: time.Minute, Lines: []holds.Line{pgtest.Room("seat", 1, 9)}})(ctx, tx)
			}
			cmd := metered.Command{ID: sql, Input: 1, Charges: []budget.Charge{pgtest.Charge("s", 1, 10)}}
			for what, do := range map[string]func() error{
				"Do": func() error { _, err := metered.Do(ctx, c, cmd, fn); return err },
				"DoTx": func() error {
					tx, err := pool.Begin(ctx)
					require.NoError(t, err)
					defer tx.Rollback(ctx)
					_, err = metered.DoTx(ctx, c, tx, cmd, fn)
					return err
				},
			} {
				err := do()
				require.NotErrorIs(t, err, metered.ErrIndefinite, "%s: %s", what, sql)
				if returned {
					require.ErrorIs(t, err, pgtest.ErrOwn, "%s: %s", what, sql)
				} else {
					require.ErrorIs(t, err, guardtx.ErrControl, "%s: %s", what, sql)
				}
				for _, table := range []string{"uploads", "metered.operations", "metered.ledger", "metered.holds"} {
					require.Zero(t, pgtest.Count(t, pool, table), "%s: %s: %s", what, sql, table)
				}
			}
		}
	}
	sql = "select 1"
	returned = false
	_, err := metered.Do(ctx, c, metered.Command{ID: "after", Input: 1}, pgtest.Placing(holds.Placement{TTL: time.Minute, Lines: []holds.Line{pgtest.Room("seat", 1, 9)}}))
	require.NoError(t, err)
}

func TestDo_ASubscriberThatOutlastsTheDeadlineIsATimeout(t *testing.T) {
	t.Parallel()
	pool, c := pgtest.SetUp(t, metered.Config{Holds: holds.Config{Subscribers: []holds.Subscriber{
		func(ctx context.Context, _ pgx.Tx, _ holds.Transition) error { <-ctx.Done(); return nil },
	}}})
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	_, err := metered.Do(ctx, c, metered.Command{ID: "op", Input: 1}, pgtest.Placing(holds.Placement{TTL: time.Minute, Lines: []holds.Line{pgtest.Room("seat", 1, 9)}}))
	require.ErrorIs(t, err, metered.ErrTimeout)
	require.NotErrorIs(t, err, metered.ErrIndefinite)
	require.Zero(t, pgtest.Count(t, pool, "metered.holds"))
}

// With subscribers there is no COMMIT in the flush that waits for the scope.
func TestDo_WithSubscribersAnErrorBeforeTheirTurnIsDefinite(t *testing.T) {
	t.Parallel()
	pool, c := pgtest.SetUp(t, metered.Config{Holds: holds.Config{Subscribers: []holds.Subscriber{
		func(context.Context, pgx.Tx, holds.Transition) error { return nil },
	}}})
	for _, early := range []bool{false, true} {
		release := pgtest.LockScope(t, pool, c, "seat")
		ctx, cancel := context.WithCancel(t.Context())
		errs := make(chan error, 1)
		go func() {
			_, err := metered.Do(ctx, c, metered.Command{ID: "op", Input: 1, EarlyRelease: early}, pgtest.Placing(holds.Placement{TTL: time.Minute, Lines: []holds.Line{pgtest.Room("seat", 1, 9)}}))
			errs <- err
		}()
		pgtest.WaitAdvisory(t, pool, 1)
		cancel()
		err := <-errs
		require.ErrorIs(t, err, context.Canceled)
		require.NotErrorIs(t, err, metered.ErrIndefinite)
		release()
	}
	require.Zero(t, pgtest.Count(t, pool, "metered.holds"))
}

func TestDo_AnErrorOfASubscriberIsItsOwn(t *testing.T) {
	t.Parallel()
	pool, c := pgtest.SetUp(t, metered.Config{Holds: holds.Config{Subscribers: []holds.Subscriber{
		func(ctx context.Context, tx pgx.Tx, _ holds.Transition) error {
			_, err := tx.Exec(ctx, "select 1 from no_such_table")
			return err
		},
	}}})
	ctx := t.Context()
	place := pgtest.Placing(holds.Placement{TTL: time.Minute, Lines: []holds.Line{pgtest.Room("seat", 1, 9)}})
	requireOwn := func(err error) {
		var refused *fault.Listener
		require.ErrorAs(t, err, &refused)
		require.Empty(t, metered.Code(err))
	}
	_, err := metered.Do(ctx, c, metered.Command{ID: "op", Input: 1}, place)
	requireOwn(err)
	require.NoError(t, pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		_, err := metered.DoTx(ctx, c, tx, metered.Command{ID: "op", Input: 1}, place)
		requireOwn(err)
		return nil
	}))
}

// transition is a job that is enqueued with each transition of a hold.
type transition struct {
	holds.Transition
}

// Exactly once: a job in the transaction of the transition, with the event as its key.
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
		FetchCooldown: 10 * time.Millisecond, FetchPollInterval: 50 * time.Millisecond, PollOnly: true,
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
			return tx.Place(ctx, holds.Placement{ID: id, Holder: "ann", TTL: time.Hour, Note: budget.Note{Reason: "wanted"},
				Lines: []holds.Line{{Scope: "room", Amount: 1, Limits: []budget.Limit{budget.Lifetime(1)}}}}, nil)
		}
	}
	for range 2 { // and a replay
		_, err = metered.Do(ctx, c, metered.Command{ID: "op", Input: "h"}, place("h"))
		require.NoError(t, err)
	}
	_, err = metered.Do(ctx, c, metered.Command{ID: "refused", Input: 1}, place("refused"))
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
	_, err = c.Holds.Place(ctx, tx, holds.Placement{ID: "rolled back", TTL: time.Minute, Lines: []holds.Line{{Scope: "room", Amount: 1}}})
	require.NoError(t, err)
	require.NoError(t, tx.Rollback(ctx))

	require.NoError(t, client.Start(ctx))
	t.Cleanup(func() { require.NoError(t, client.Stop(context.Background())) })
	got := map[int]string{}
	for range 2 {
		select {
		case tr := <-worked:
			got[tr.Hold.Version] = fmt.Sprint(tr.Kind, " ", tr.Hold.ID, " ", tr.Hold.Holder, " ", tr.Hold.Lines[0].Scope, " ", tr.Note.Reason)
		case <-time.After(time.Until(pgtest.Patience(t))):
			t.Fatal("not worked")
		}
	}
	require.Equal(t, map[int]string{1: "placed h ann room wanted", 2: "released h ann room changed their mind"}, got)
	require.Equal(t, 2, pgtest.Value[int](t, pool, `select count(*)::int from river_job where kind = 'transition'`), "and no other")
}
