package observe_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/observed"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/internal/purge"
	"github.com/pgmetered/metered/jobs"
	"github.com/pgmetered/metered/leases"
	"github.com/pgmetered/metered/observe"
)

func TestObserver_HearsWhyATransactionRunsAgain(t *testing.T) {
	t.Parallel()
	var r pgtest.Recorder
	pool, c := pgtest.SetUp(t, metered.Config{Config: budget.Config{Observer: &r}})
	raise := func(ctx context.Context, tx pgx.Tx, state string) error {
		_, err := tx.Exec(ctx, "do $$ begin raise sqlstate '"+state+"'; end $$")
		return err
	}
	for state, name := range map[string]string{"40001": "serialization", "40P01": "deadlock"} {
		r.Forget()
		runs := 0
		_, err := metered.Do(t.Context(), c, metered.Command{ID: state}, func(ctx context.Context, tx *metered.Tx) (any, error) {
			if runs++; runs < 3 {
				return nil, raise(ctx, tx, state)
			}
			return nil, nil
		})
		require.NoError(t, err)
		require.Equal(t, []string{"retried " + name + " 1", "retried " + name + " 1"}, r.Told())
		require.Equal(t, observe.End{Outcome: observe.Committed, Attempts: 3, RoundTrips: 4}, only(t, &r, observe.Command).End)
		r.Forget()
		runs = 0
		require.NoError(t, c.RunTx(t.Context(), pgx.TxOptions{}, func(ctx context.Context, tx pgx.Tx) error {
			if runs++; runs < 2 {
				return raise(ctx, tx, state)
			}
			return nil
		}))
		require.Equal(t, []string{"retried " + name + " 1"}, r.Told())
	}
	release := pgtest.LockScope(t, pool, c, "locked")
	defer release()
	busy := pgtest.NewClient(t, pool, metered.Config{Config: budget.Config{Observer: &r, LockTimeout: 10 * time.Millisecond}})
	r.Forget()
	_, err := metered.Do[any](t.Context(), busy, metered.Command{ID: "busy", Charges: []budget.Charge{pgtest.Charge("locked", 1, 5)}},
		func(context.Context, *metered.Tx) (any, error) { return nil, nil })
	require.ErrorIs(t, err, budget.ErrBusy)
	flushes := r.Ended(t, observe.Flush)
	require.Equal(t, []string{"", "busy"}, []string{flushes[0].Code, flushes[1].Code}, "which flush waited")
}

func TestObserver_HearsHowAnUnknownOutcomeIsResolved(t *testing.T) {
	t.Parallel()
	for what, fault := range map[string]func(*pgtest.Flush){
		"committed":     func(f *pgtest.Flush) { f.LoseAnswer() },
		"not_committed": func(f *pgtest.Flush) { f.Lose() },
	} {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			var r pgtest.Recorder
			_, w, c, cmd := pgtest.OnWire(t, metered.Config{Config: budget.Config{Observer: &r}}, nil)
			r.Forget()
			w.Once((*pgtest.Flush).Last, fault)
			_, err := metered.Do(t.Context(), c, cmd, pgtest.WholeFunc("op", nil))
			require.NoError(t, err)
			told := lasting(&r)
			require.Equal(t, []string{"commit lost 1", "commit " + what + " 1"}, told[:2])
			outcome := map[string]observe.Outcome{"committed": observe.Replayed, "not_committed": observe.Committed}[what]
			require.Equal(t, outcome, only(t, &r, observe.Command).Outcome)
			require.Error(t, r.Ended(t, observe.Flush)[1].Err)
		})
	}
	t.Run("unknown", func(t *testing.T) {
		t.Parallel()
		var r pgtest.Recorder
		_, w, c, cmd := pgtest.OnWire(t, metered.Config{Config: budget.Config{Observer: &r}, ResolveTimeout: 100 * time.Millisecond}, nil)
		r.Forget()
		w.Once((*pgtest.Flush).Last, func(f *pgtest.Flush) { w.Refuse(true); f.LoseAnswer() })
		_, err := metered.Do(t.Context(), c, cmd, pgtest.WholeFunc("op", nil))
		require.ErrorIs(t, err, metered.ErrIndefinite)
		require.Equal(t, []string{"commit lost 1", "commit unknown 1"}, lasting(&r))
		require.Equal(t, observe.Indefinite, only(t, &r, observe.Command).Outcome)
		w.Refuse(false)
	})
	t.Run("of a charge alone", func(t *testing.T) {
		t.Parallel()
		var r pgtest.Recorder
		owner, _ := pgtest.SetUp(t, metered.Config{})
		pool, w := pgtest.Tap(t, owner, nil)
		c := pgtest.NewClient(t, pool, metered.Config{Config: budget.Config{Observer: &r}})
		w.Once(func(f *pgtest.Flush) bool { return f.Has("charge_plain(") }, func(f *pgtest.Flush) { f.LoseAnswer() })
		_, err := c.Budget.ChargeNow(t.Context(), pool, pgtest.Charge("a", 1, 5))
		require.ErrorIs(t, err, budget.ErrCommitUnknown)
		require.Equal(t, []string{"commit lost 1", "commit unknown 1"}, r.Told())
		b, err := budget.NewBatcher(pool, c.Budget, budget.BatcherConfig{})
		require.NoError(t, err)
		each := func(f *pgtest.Flush) bool { return f.Has("charge_each(") }
		r.Forget()
		w.Once(each, func(f *pgtest.Flush) { f.LoseAnswer() })
		_, err = b.Ingest(t.Context(), budget.UsageEvent{ID: "e", Charge: pgtest.Charge("a", 1, 5)})
		require.NoError(t, err)
		require.Equal(t, []string{"commit lost 1", "commit committed 1"}, r.Told())
		require.NoError(t, b.Close(t.Context()))
	})
}

func TestObserver_HearsOfHoldsSweepsAndPurges(t *testing.T) {
	t.Parallel()
	var r pgtest.Recorder
	refuse := errors.New("not now")
	subscriber := func(_ context.Context, _ pgx.Tx, tr holds.Transition) error {
		if tr.Kind == holds.EventExpired && tr.Hold.ID == "held up" {
			return refuse
		}
		return nil
	}
	pool, c := pgtest.SetUp(t, metered.Config{Config: budget.Config{Observer: &r}, Holds: holds.Config{Subscribers: []holds.Subscriber{subscriber}}})
	ctx := t.Context()
	clock := pgtest.SetClock(t, pool, pgtest.Tomorrow(9))
	request := func(id string) holds.Placement {
		return holds.Placement{ID: id, Lines: []holds.Line{{Scope: "s", Amount: 3}}, TTL: time.Minute}
	}
	in := func(f func(tx pgx.Tx) error) { t.Helper(); require.NoError(t, pgx.BeginFunc(ctx, pool, f)) }
	r.Forget()
	in(func(tx pgx.Tx) error {
		for _, id := range []string{"a", "b"} {
			_, err := c.Holds.Place(ctx, tx, request(id))
			require.NoError(t, err)
		}
		_, err := c.Holds.Place(ctx, tx, request("a"))
		require.NoError(t, err, "the same again, which changes nothing")
		_, err = c.Holds.Extend(ctx, tx, holds.Extend{IDs: []string{"a"}, By: time.Minute})
		require.NoError(t, err)
		_, err = c.Holds.Capture(ctx, tx, holds.Capture{IDs: []string{"a"}, Lines: []holds.Line{{Scope: "s", Amount: 1}}, Keep: true})
		require.NoError(t, err)
		_, err = c.Holds.Capture(ctx, tx, holds.Capture{IDs: []string{"a"}, All: true})
		require.NoError(t, err)
		_, err = c.Holds.Return(ctx, tx, holds.Return{IDs: []string{"a"}, All: true})
		require.NoError(t, err)
		_, err = c.Holds.Release(ctx, tx, holds.Release{IDs: []string{"b"}})
		return err
	})
	require.Equal(t, []string{"hold placed 1 pending", "hold placed 1 pending", "hold extended 1 pending", "hold captured in part 1 pending",
		"hold captured 1 pending", "hold returned 1 pending", "hold released 1 pending"}, r.Told())
	require.Equal(t, []string{"holds.place", "holds.place", "holds.place", "holds.extend", "holds.capture", "holds.capture", "holds.return", "holds.release"},
		r.Names(t, observe.Call))

	for _, id := range []string{"held up", "x", "y"} {
		_, err := metered.Do[any](ctx, c, metered.Command{ID: id, Input: 1, Holds: []holds.Placement{request(id)}}, nil)
		require.NoError(t, err)
	}
	r.Forget()
	_, err := c.Holds.Sweep(ctx, pool, holds.SweepOptions{})
	require.NoError(t, err)
	require.Equal(t, []string{"sweep_lag holds 1"}, r.Told())
	require.Zero(t, r.Lag())
	clock.Advance(3 * time.Minute)
	r.Forget()
	_, err = c.Holds.Sweep(ctx, pool, holds.SweepOptions{})
	require.ErrorIs(t, err, refuse)
	require.Equal(t, []string{"sweep_lag holds 1", "hold expired 2", "sweep_failed holds 1"}, r.Told())
	require.Equal(t, 2*time.Minute, r.Lag(), "of the oldest")
	sweep := only(t, &r, observe.Sweep)
	require.Equal(t, int64(2), sweep.Rows)
	require.ErrorIs(t, sweep.Err, refuse)

	text := pgtest.Mint(t, pool, c)
	_, err = metered.Do(ctx, c, metered.Command{ID: "more", Token: pgtest.Redeem(text), Charges: []budget.Charge{pgtest.Charge("s", 1, 0)}}, func(ctx context.Context, tx *metered.Tx) (any, error) {
		_, err := tx.Enqueue(ctx, pgtest.Process{Name: "a"}, &jobs.Options{Key: "a"})
		return nil, err
	})
	require.NoError(t, err)
	r.Forget()
	clock.Advance(100 * time.Hour)
	_, err = purge.Tokens.Delete(ctx, pool, purge.Options{OlderThan: time.Hour, DryRun: true, Observer: observed.New(&r)})
	require.NoError(t, err)
	_, err = c.Budget.Purge(ctx, pool, budget.PurgeOptions{OlderThan: time.Hour, DryRun: true})
	require.NoError(t, err)
	require.Empty(t, r.Told())
	require.Empty(t, r.Ended(t, observe.Purge), "what is counted is not purged")
	opts := purge.Options{OlderThan: time.Hour, Observer: observed.New(&r)}
	for _, run := range []func() (int64, error){
		func() (int64, error) {
			few := opts
			few.Batch = 3
			return purge.Operations.Delete(ctx, pool, few)
		},
		func() (int64, error) { return purge.Holds.Delete(ctx, pool, opts) },
		func() (int64, error) { return purge.Tokens.Delete(ctx, pool, opts) },
		func() (int64, error) { return purge.JobKeys.Delete(ctx, pool, opts) },
	} {
		_, err := run()
		require.NoError(t, err)
	}
	require.Equal(t, []string{"purged operations 3", "purged operations 1", "purged holds 4", "purged tokens 1", "purged job_keys 1"}, r.Told())
	report, err := c.Budget.Purge(ctx, pool, budget.PurgeOptions{OlderThan: time.Hour})
	require.NoError(t, err)
	require.Equal(t, []string{"operations", "holds", "tokens", "job_keys", "entries"}, r.Names(t, observe.Purge))
	require.Equal(t, report.Entries, r.Ended(t, observe.Purge)[4].Rows)
	require.Equal(t, int64(10)+report.Entries, r.Sum(observe.Purged))
}

func TestObserver_HearsOfLeases(t *testing.T) {
	t.Parallel()
	var r pgtest.Recorder
	db := pgtest.Open(t)
	ledger, err := budget.New(budget.Config{Observer: &r})
	require.NoError(t, err)
	p, err := leases.New(db, ledger, leases.Config{Rules: []leases.Rule{{Share: 2, MinSlice: 10}}})
	require.NoError(t, err)
	t.Cleanup(func() { _ = p.Close(context.Background()) })
	limit := budget.Lifetime(1000)
	spent := int64(0)
	for r.Sum(observe.Slice, "opened") == 0 {
		require.NoError(t, p.Allow(t.Context(), budget.Charge{Scope: "s", Amount: 1, Limits: []budget.Limit{limit}}))
		spent++
	}
	out := r.Sum(observe.Slice, "opened")
	require.Positive(t, out)
	require.Error(t, p.Allow(t.Context(), budget.Charge{Scope: "s", Amount: 1000, Limits: []budget.Limit{limit}}))
	require.Equal(t, int64(1), r.Sum(observe.LimitRefused))
	require.Equal(t, int64(1), r.Sum(observe.Slice, "recalled"), "the refusal met a lease")
	require.NoError(t, p.Close(t.Context()))
	require.Equal(t, r.Sum(observe.Slice, "opened"), r.Sum(observe.Slice, "ended"))
	require.Equal(t, r.Sum(observe.Slice, "opened"), r.Sum(observe.Slice, "spent")+r.Sum(observe.Slice, "returned"))
	direct := int64(0)
	for _, name := range r.Names(t, observe.Lease) {
		if name == "direct" {
			direct++
		}
	}
	usage, err := ledger.Usage(t.Context(), db, budget.Query{Scope: "s"})
	require.NoError(t, err)
	require.Equal(t, spent, usage[0].Spent)
	require.Equal(t, spent, r.Sum(observe.Slice, "spent")+direct-1, "one of the direct ones was refused")
}
