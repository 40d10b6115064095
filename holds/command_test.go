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
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/jobs"
)

func TestDo_PlacesCapturesAndReleasesWithTheChargesOrNothing(t *testing.T) {
	t.Parallel()
	pool, c := pgtest.SetUp(t, metered.Config{})
	ctx := t.Context()
	r := holds.Request{ID: "h1", Holder: "ann", TTL: time.Minute, Lines: []holds.Line{pgtest.Room("seat", 1, 1)}}
	cmd := metered.Command{ID: "op1", Input: 1, Tenant: "acme", Charges: []budget.Charge{{Scope: "user/ann", Amount: 1, Limits: []budget.Limit{budget.Lifetime(1)}}}}
	out, err := metered.Do(ctx, c, cmd, pgtest.Placing(r))
	require.NoError(t, err)
	require.Equal(t, "h1", out.Result)
	require.Len(t, out.Holds, 1)
	require.True(t, out.Holds[0].Created)

	again, err := metered.Do(ctx, c, cmd, pgtest.Placing(r))
	require.NoError(t, err)
	require.True(t, again.Replayed)
	require.Equal(t, out.Holds, again.Holds, "the hold as it was, in a replay too")
	op, err := c.Lookup(ctx, pool, "acme", "op1")
	require.NoError(t, err)
	require.Equal(t, again.Holds, op.Holds)

	history, err := c.Holds.History(ctx, pool, "", "h1", "")
	require.NoError(t, err)
	require.Equal(t, "op1", history[0].Operation)
	require.Equal(t, "acme", history[0].OperationTenant)

	// A refusal of the charge takes the hold back, and one of the hold the charge.
	other := r
	other.ID, other.Lines = "h2", []holds.Line{pgtest.Room("seat 2", 1, 1)}
	cmd.ID = "op2"
	_, err = metered.Do(ctx, c, cmd, pgtest.Placing(other))
	require.ErrorIs(t, err, budget.ErrExceeded)
	_, err = c.Holds.Get(ctx, pool, "", "h2", "")
	require.ErrorIs(t, err, holds.ErrUnknown)
	r.ID = "h3"
	_, err = metered.Do(ctx, c, metered.Command{ID: "op3", Input: 1, Charges: []budget.Charge{{Scope: "user/ben", Amount: 1}}}, pgtest.Placing(r))
	var exceeded *budget.ExceededError
	require.ErrorAs(t, err, &exceeded)
	require.Equal(t, "seat", exceeded.Refusals[0].Scope)
	usage, err := c.Budget.Usage(ctx, pool, budget.Query{Scope: "user/ben"})
	require.NoError(t, err)
	require.Zero(t, usage[0].Seq)
	_, err = c.Lookup(ctx, pool, "", "op3")
	require.ErrorIs(t, err, metered.ErrUnknownOperation)

	// In one command: capture one, release another, place a third.
	_, err = metered.Do(ctx, c, metered.Command{ID: "op4", Input: 1}, pgtest.Placing(other))
	require.NoError(t, err)
	third := r
	third.ID, third.Lines = "h4", []holds.Line{pgtest.Room("seat 2", 1, 1)}
	out4, err := metered.Do(ctx, c, metered.Command{ID: "op5", Input: 1}, func(ctx context.Context, tx *metered.Tx) (any, error) {
		if err := tx.Capture(holds.Capture{IDs: []string{"h1"}, All: true, Entity: "ticket/1"}); err != nil {
			return nil, err
		}
		if err := tx.Release(holds.Release{IDs: []string{"h2"}}); err != nil {
			return nil, err
		}
		_, err := tx.Place(ctx, third, nil)
		return nil, err
	})
	require.NoError(t, err)
	require.Equal(t, []holds.State{holds.Captured, holds.Released, holds.Held},
		[]holds.State{out4.Holds[0].State, out4.Holds[1].State, out4.Holds[2].State})

	// A refusal of the second takes the first back.
	_, err = metered.Do(ctx, c, metered.Command{ID: "op6", Input: 1}, func(ctx context.Context, tx *metered.Tx) (any, error) {
		if err := tx.Capture(holds.Capture{IDs: []string{"h4"}, All: true}); err != nil {
			return nil, err
		}
		return nil, tx.Release(holds.Release{IDs: []string{"h1"}})
	})
	require.ErrorIs(t, err, inState(holds.Captured))
	h, err := c.Holds.Get(ctx, pool, "", "h4", "")
	require.NoError(t, err)
	require.Equal(t, holds.Held, h.State)

	// A place that repeats the id of a hold that has ended.
	r.ID = "h1"
	_, err = metered.Do(ctx, c, metered.Command{ID: "op7", Input: 1}, pgtest.Placing(r))
	require.ErrorIs(t, err, inState(holds.Captured))
	require.NotErrorIs(t, err, metered.ErrIndefinite)
}

func TestDoTx_PlacesAndRefusesWithoutATrace(t *testing.T) {
	t.Parallel()
	pool, c := pgtest.SetUp(t, metered.Config{})
	ctx := t.Context()
	r := holds.Request{ID: "h1", TTL: time.Minute, Lines: []holds.Line{pgtest.Room("seat", 1, 1)}}
	require.NoError(t, pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		out, err := metered.DoTx(ctx, c, tx, metered.Command{ID: "op1", Input: 1}, pgtest.Placing(r))
		require.NoError(t, err)
		require.Equal(t, holds.Held, out.Holds[0].State)
		r.ID = "h2"
		_, err = metered.DoTx(ctx, c, tx, metered.Command{ID: "op2", Input: 1}, pgtest.Placing(r))
		require.ErrorIs(t, err, budget.ErrExceeded)
		return nil
	}))
	list, err := c.Holds.List(ctx, pool, holds.Filter{})
	require.NoError(t, err)
	require.Len(t, list.Holds, 1)
}

func TestDo_SubscribersHearBeforeTheCommitAndCanRefuse(t *testing.T) {
	t.Parallel()
	var told []holds.Transition
	var kept pgx.Tx
	refuse := errors.New("not this one")
	subscriber := func(ctx context.Context, tx pgx.Tx, tr holds.Transition) error {
		told, kept = append(told, tr), tx
		require.ErrorIs(t, tx.Commit(ctx), metered.ErrTxControl)
		_, err := tx.Exec(ctx, "commit")
		require.ErrorIs(t, err, metered.ErrTxControl)
		if tr.Hold.ID == "h2" {
			return refuse
		}
		return nil
	}
	pool, c := pgtest.SetUp(t, metered.Config{Holds: holds.Config{Subscribers: []holds.Subscriber{subscriber}}})
	ctx := t.Context()
	r := holds.Request{ID: "h1", TTL: time.Minute, Lines: []holds.Line{pgtest.Room("seat", 1, 9)}}
	out, err := metered.Do(ctx, c, metered.Command{ID: "op1", Input: 1, LSN: true}, pgtest.Placing(r))
	require.NoError(t, err)
	require.Positive(t, out.LSN)
	require.Len(t, told, 1)
	require.Equal(t, holds.EventPlaced, told[0].Kind)
	_, err = kept.Exec(ctx, "select 1")
	require.ErrorIs(t, err, metered.ErrTxDone)
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

func TestDo_ExtendsAndRefunds(t *testing.T) {
	t.Parallel()
	var refused []metered.Refusal
	pool, c := pgtest.SetUp(t, metered.Config{OnRefusal: func(_ context.Context, d metered.Refusal) { refused = append(refused, d) }})
	ctx := t.Context()
	first, err := metered.Do(ctx, c, metered.Command{ID: "op1", Input: 1}, pgtest.Placing(holds.Request{ID: "h1", TTL: time.Minute, Lines: []holds.Line{pgtest.Room("seat", 1, 1)}}))
	require.NoError(t, err)
	out, err := metered.Do(ctx, c, metered.Command{ID: "op2", Input: 1}, func(_ context.Context, tx *metered.Tx) (any, error) {
		return nil, errors.Join(
			tx.Extend(holds.Extend{IDs: []string{"h1"}, By: time.Minute}),
			tx.Capture(holds.Capture{IDs: []string{"h1"}, All: true}),
			tx.Return(holds.Return{IDs: []string{"h1"}, All: true}))
	})
	require.NoError(t, err)
	require.Len(t, out.Holds, 3)
	require.Equal(t, first.Holds[0].Deadline.Add(time.Minute), out.Holds[0].Deadline)
	require.Equal(t, holds.Returned, out.Holds[2].State)
	usage, err := c.Budget.Usage(ctx, pool, budget.Query{Scope: "seat"})
	require.NoError(t, err)
	require.Zero(t, usage[0].Used)

	_, err = metered.Do(ctx, c, metered.Command{ID: "op3", Input: 1}, func(_ context.Context, tx *metered.Tx) (any, error) {
		return nil, tx.Extend(holds.Extend{IDs: []string{"h1"}, By: time.Minute})
	})
	require.ErrorIs(t, err, inState(holds.Returned))
	require.Len(t, refused, 1)
	require.ErrorIs(t, refused[0].Err, holds.ErrState)
}

func TestOnRefusal_HearsOfEveryRefusalOfAHold(t *testing.T) {
	t.Parallel()
	var refused []error
	_, c := pgtest.SetUp(t, metered.Config{OnRefusal: func(_ context.Context, d metered.Refusal) { refused = append(refused, d.Err) }})
	ctx := t.Context()
	do := func(id string, f func(tx *metered.Tx) error) error {
		_, err := metered.Do(ctx, c, metered.Command{ID: id, Input: 1}, func(_ context.Context, tx *metered.Tx) (any, error) { return nil, f(tx) })
		return err
	}
	_, err := metered.Do(ctx, c, metered.Command{ID: "op1", Input: 1}, pgtest.Placing(holds.Request{ID: "h", TTL: time.Minute, Lines: []holds.Line{pgtest.Room("seat", 1, 1)}}))
	require.NoError(t, err)
	want := []error{holds.ErrExcess, holds.ErrCeiling, holds.ErrExcess, budget.ErrRefundExceeds}
	require.ErrorIs(t, do("op2", func(tx *metered.Tx) error {
		return tx.Capture(holds.Capture{IDs: []string{"h"}, Lines: []holds.Line{{Scope: "seat", Amount: 2}}})
	}), holds.ErrExcess)
	require.ErrorIs(t, do("op2", func(tx *metered.Tx) error {
		return tx.Extend(holds.Extend{IDs: []string{"h"}, By: 24 * time.Hour})
	}), holds.ErrCeiling)
	require.NoError(t, do("op3", func(tx *metered.Tx) error { return tx.Capture(holds.Capture{IDs: []string{"h"}, All: true}) }))
	require.NoError(t, do("op4", func(tx *metered.Tx) error {
		return tx.Refund(budget.Refund{Scope: "seat", Seq: 2, Amount: 1})
	}))
	require.ErrorIs(t, do("op5", func(tx *metered.Tx) error {
		return tx.Return(holds.Return{IDs: []string{"h"}, Lines: []holds.Line{{Scope: "seat", Amount: 1}}})
	}), holds.ErrExcess)
	require.ErrorIs(t, do("op5", func(tx *metered.Tx) error {
		return tx.Refund(budget.Refund{Scope: "seat", Seq: 2, Amount: 1})
	}), budget.ErrRefundExceeds)
	require.Len(t, refused, len(want))
	for i := range want {
		require.ErrorIs(t, refused[i], want[i])
	}
}

// Several calls first lock the scopes of the holds that they name. Unknown holds have none.
func TestDo_UnknownHoldsAreUnknownAlsoIfThereAreSeveral(t *testing.T) {
	t.Parallel()
	pool, c := pgtest.SetUp(t, metered.Config{})
	ctx := t.Context()
	fn := func(_ context.Context, tx *metered.Tx) (any, error) {
		return nil, errors.Join(tx.Release(holds.Release{IDs: []string{"a"}}), tx.Capture(holds.Capture{IDs: []string{"b"}, All: true}))
	}
	_, err := metered.Do(ctx, c, metered.Command{ID: "op", Input: 1}, fn)
	require.ErrorIs(t, err, holds.ErrUnknown)
	require.NoError(t, pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		_, err := metered.DoTx(ctx, c, tx, metered.Command{ID: "op", Input: 1}, fn)
		require.ErrorIs(t, err, holds.ErrUnknown)
		_, err = tx.Exec(ctx, "select metered.lock_all('{}', '{}', '{}', '{}', 1)")
		return err
	}))
}

// A wait for scopes must not show that somebody else's hold exists.
func TestDo_WaitsForNothingOfAnothersHold(t *testing.T) {
	t.Parallel()
	pool, c := pgtest.SetUp(t, metered.Config{LockTimeout: 50 * time.Millisecond})
	r := holds.Request{ID: "h", Holder: "ann", TTL: time.Minute, Lines: []holds.Line{pgtest.Room("seat", 1, 1)}}
	_, err := metered.Do(t.Context(), c, metered.Command{ID: "op1", Input: 1}, pgtest.Placing(r))
	require.NoError(t, err)
	pgtest.LockScope(t, pool, c, "seat")
	for _, test := range []struct {
		id, holder string
		want       error
	}{{"h", "ben", holds.ErrUnknown}, {"none", "ben", holds.ErrUnknown}, {"none", "", holds.ErrUnknown}, {"h", "ann", metered.ErrBusy}, {"h", "", metered.ErrBusy}} {
		_, err := metered.Do(t.Context(), c, metered.Command{ID: "op2", Input: 1, Charges: []budget.Charge{pgtest.Charge("fee", 1, 0)}},
			func(_ context.Context, tx *metered.Tx) (any, error) {
				return nil, tx.Release(holds.Release{IDs: []string{test.id}, Holder: test.holder})
			})
		require.ErrorIs(t, err, test.want, "%+v", test)
	}
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
				return pgtest.Placing(holds.Request{TTL: time.Minute, Lines: []holds.Line{pgtest.Room("seat", 1, 9)}})(ctx, tx)
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
					require.ErrorIs(t, err, metered.ErrTxControl, "%s: %s", what, sql)
				}
				for _, table := range []string{"uploads", "metered.operations", "metered.ledger", "metered.holds"} {
					require.Zero(t, pgtest.Count(t, pool, table), "%s: %s: %s", what, sql, table)
				}
			}
		}
	}
	sql = "select 1"
	returned = false
	_, err := metered.Do(ctx, c, metered.Command{ID: "after", Input: 1}, pgtest.Placing(holds.Request{TTL: time.Minute, Lines: []holds.Line{pgtest.Room("seat", 1, 9)}}))
	require.NoError(t, err)
}

func TestDo_ASubscriberThatOutlastsTheDeadlineIsATimeout(t *testing.T) {
	t.Parallel()
	pool, c := pgtest.SetUp(t, metered.Config{Holds: holds.Config{Subscribers: []holds.Subscriber{
		func(ctx context.Context, _ pgx.Tx, _ holds.Transition) error { <-ctx.Done(); return nil },
	}}})
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	_, err := metered.Do(ctx, c, metered.Command{ID: "op", Input: 1}, pgtest.Placing(holds.Request{TTL: time.Minute, Lines: []holds.Line{pgtest.Room("seat", 1, 9)}}))
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
			_, err := metered.Do(ctx, c, metered.Command{ID: "op", Input: 1, EarlyRelease: early}, pgtest.Placing(holds.Request{TTL: time.Minute, Lines: []holds.Line{pgtest.Room("seat", 1, 9)}}))
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
	place := pgtest.Placing(holds.Request{TTL: time.Minute, Lines: []holds.Line{pgtest.Room("seat", 1, 9)}})
	requireOwn := func(err error) {
		var refused *holds.SubscriberError
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

func (transition) Kind() string { return "transition" }

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
	require.Equal(t, 2, pgtest.Value[int](t, pool, `select count(*)::int from river_job where kind = 'transition'`), "and no other")
}
