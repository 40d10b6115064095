package otelmetered_test

import (
	"context"
	"fmt"
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
	"github.com/pgmetered/metered/maintain"
	"github.com/pgmetered/metered/tokens"
	"github.com/pgmetered/metered/wallet"
)

// work makes everything happen that is measured.
func (s *service) work() {
	s.T.Helper()
	t, ctx := s.T, s.T.Context()
	clock := pgtest.SetClock(t, s.pool, pgtest.Tomorrow(9))
	stop, err := s.w.WatchTables(s.pool, "")
	require.NoError(t, err)
	t.Cleanup(func() { _ = stop() })
	stopParked, err := s.w.WatchParked(s.pool, "")
	require.NoError(t, err)
	t.Cleanup(func() { _ = stopParked() })

	token := s.mint()
	require.NoError(t, s.upload(ctx, "a", token))
	require.NoError(t, s.upload(ctx, "a", token), "a replay")
	require.ErrorIs(t, s.upload(ctx, "b", token), tokens.ErrInvalid)
	require.ErrorIs(t, s.upload(ctx, "b", s.mint()), budget.ErrExceeded)
	_, err = metered.Do[any](ctx, s.client, metered.Command{ID: "a", Tenant: "ann", Name: "upload"}, nil)
	require.ErrorIs(t, err, budget.ErrConflict)

	runs := 0
	_, err = metered.Do(ctx, s.client, metered.Command{ID: "again", Name: "upload"}, func(ctx context.Context, tx *metered.Tx) (any, error) {
		if runs++; runs == 1 {
			_, err := tx.Exec(ctx, "do $$ begin raise sqlstate '40001'; end $$")
			return nil, err
		}
		_, err := tx.Enqueue(ctx, thumbnail{1}, &jobs.Options{Key: "a"}) // which is there
		return nil, err
	})
	require.NoError(t, err)
	_, err = metered.Do(ctx, s.client, metered.Command{ID: "job"}, func(ctx context.Context, tx *metered.Tx) (any, error) {
		_, err := tx.Enqueue(ctx, thumbnail{2}, &jobs.Options{Key: "a"})
		return nil, err
	})
	require.ErrorIs(t, err, jobs.ErrConflict)
	s.wire.Once((*pgtest.Flush).Last, func(f *pgtest.Flush) { f.LoseAnswer() })
	_, err = metered.Do[any](ctx, s.client, metered.Command{ID: "lost", Name: "upload"}, nil)
	require.NoError(t, err)

	impatient, err := metered.New(s.pool, metered.Config{Config: budget.Config{Observer: s.w, LockTimeout: 10 * time.Millisecond}})
	require.NoError(t, err)
	release := pgtest.LockScope(t, s.pool, s.client, "locked")
	_, err = metered.Do[any](ctx, impatient, metered.Command{ID: "busy", Name: "upload", Charges: []budget.Charge{{Scope: "locked", Amount: 1}}}, nil)
	require.ErrorIs(t, err, budget.ErrBusy)
	release()

	batcher, err := budget.NewBatcher(s.pool, s.client.Budget, budget.BatcherConfig{})
	require.NoError(t, err)
	_, err = batcher.Charge(ctx, budget.Charge{Scope: "batched", Amount: 1})
	require.NoError(t, err)
	require.NoError(t, batcher.Close(ctx))
	require.NoError(t, pgx.BeginFunc(ctx, s.pool, func(tx pgx.Tx) error {
		_, err := s.client.Budget.Charge(ctx, tx, budget.Charge{Scope: "alone", Amount: 1})
		return err
	}))
	s.threshold()
	s.lease()
	s.wallets(clock)
	s.session()
	s.feed(clock)
	s.parked(clock)
	s.maintain(clock)
}

// parked enqueues three jobs of which one fits. One of the others is dropped, and one is released when the limit is raised.
func (s *service) parked(clock *pgtest.Clock) {
	s.T.Helper()
	t, ctx := s.T, s.T.Context()
	most := int64(1)
	enqueuer, err := jobs.New(s.queue, jobs.Config{Observer: s.w, Holds: s.client.Holds, Limits: func(context.Context, pgx.Tx, string) ([]budget.Limit, error) {
		return []budget.Limit{budget.Lifetime(most)}, nil
	}})
	require.NoError(t, err)
	for i := range 3 {
		opts := &jobs.Options{Hold: &jobs.Units{Lines: []holds.Line{{Scope: "gated", Amount: 1, Limits: []budget.Limit{budget.Lifetime(most)}}}}}
		if i == 2 {
			opts.MaxWait = time.Minute
		}
		_, err := metered.Do(ctx, s.client, metered.Command{ID: fmt.Sprint("gated ", i), Input: i}, func(ctx context.Context, tx *metered.Tx) (any, error) {
			return tx.Enqueue(ctx, thumbnail{int64(10 + i)}, opts)
		})
		require.NoError(t, err)
	}
	clock.Advance(time.Minute)
	s.w.requireValue(2, "metered_jobs_total", "metered_result=parked")
	s.w.requireValue(2, "metered_parked_jobs")
	s.w.requireValue(60, "metered_parked_age_seconds")
	_, err = enqueuer.Release(ctx, s.pool)
	require.NoError(t, err)
	s.w.requireValue(1, "metered_jobs_total", "metered_result=dropped")
	most = 2
	require.NoError(t, pgx.BeginFunc(ctx, s.pool, func(tx pgx.Tx) error {
		_, err := enqueuer.ReleaseIn(ctx, tx, "gated")
		return err
	}))
	s.w.requireValue(0, "metered_parked_jobs")
	s.w.requireValue(0, "metered_parked_age_seconds")
}

// threshold charges half of a limit, and crosses a threshold.
func (s *service) threshold() {
	s.T.Helper()
	l, err := budget.New(budget.Config{Observer: s.w, OnThreshold: func(context.Context, pgx.Tx, budget.Crossing) error { return nil }})
	require.NoError(s.T, err)
	limit := budget.Lifetime(10).Named("hourly").WithThresholds(budget.Threshold{Name: "half", Percent: 50})
	require.NoError(s.T, pgx.BeginFunc(s.T.Context(), s.pool, func(tx pgx.Tx) error {
		_, err := l.Charge(s.T.Context(), tx, budget.Charge{Scope: "told", Amount: 5, Limits: []budget.Limit{limit}})
		return err
	}))
	s.w.requireValue(1, "metered_thresholds_total")
}

// wallets grants, revokes and rolls over lots, and sweeps those that end.
func (s *service) wallets(clock *pgtest.Clock) {
	s.T.Helper()
	t, ctx := s.T, s.T.Context()
	book, err := wallet.New(s.client.Budget, wallet.Config{})
	require.NoError(t, err)
	require.NoError(t, pgx.BeginFunc(ctx, s.pool, func(tx pgx.Tx) error {
		_, err := book.Grant(ctx, tx, wallet.Grant{Wallet: "ann", Amount: 10, Ends: wallet.After(time.Second), Reference: "a"})
		if err == nil {
			_, err = book.Rollover(ctx, tx, wallet.Rollover{Wallet: "ann", Reference: "a", Cap: 1, For: time.Second})
		}
		if err == nil {
			_, err = book.Revoke(ctx, tx, wallet.Revoke{Wallet: "ann", Reference: "a", Amount: 1})
		}
		return err
	}))
	clock.Advance(time.Minute)
	refusing, err := wallet.New(s.client.Budget, wallet.Config{Subscribers: []wallet.Subscriber{func(context.Context, pgx.Tx, wallet.Breakage) error { return context.Canceled }}})
	require.NoError(t, err)
	_, err = refusing.Sweep(ctx, s.pool, wallet.SweepOptions{})
	require.Error(t, err, "the subscriber fails")
	_, err = book.Sweep(ctx, s.pool, wallet.SweepOptions{})
	require.NoError(t, err)
	s.w.requireValue(9, "metered_lots_lapsed_total")
	s.w.requireValue(2, "metered_lots_total", "metered_lot=ended")
	s.w.requireValue(2, "metered_sweep_left_total", "metered_sweep=lots", "metered_reason=failed")
	s.w.requireValue(59, "metered_sweep_lag_seconds", "metered_sweep=lots")
}

// feed consumes the feed, to its end, stands still for an hour, and goes on.
func (s *service) feed(clock *pgtest.Clock) {
	s.T.Helper()
	stop, err := s.w.WatchFeed(s.pool, "")
	require.NoError(s.T, err)
	s.T.Cleanup(func() { _ = stop() })
	l := s.client.Budget
	for range 2 {
		require.NoError(s.T, l.RunFeed(s.T.Context(), s.pool, "bill", budget.FeedOptions{},
			func(context.Context, pgx.Tx, []budget.FeedEntry) error { return nil }))
		s.w.requireValue(0, "metered_feed_lag_seconds", "metered_consumer=bill")
		_, err := l.ChargeNow(s.T.Context(), s.pool, budget.Charge{Scope: "fed", Amount: 1})
		require.NoError(s.T, err)
		clock.Advance(30 * time.Minute)
		s.w.requireValue(1800, "metered_feed_lag_seconds", "metered_consumer=bill") // it has no number yet
		_, err = l.NumberFeed(s.T.Context(), s.pool)
		require.NoError(s.T, err)
		clock.Advance(30 * time.Minute)
		s.w.requireValue(3600, "metered_feed_lag_seconds", "metered_consumer=bill")
	}
}

// session opens a session, and leaves it.
func (s *service) session() {
	s.T.Helper()
	session, err := metered.Open[any](s.T.Context(), s.client, metered.Reservation{ID: "stream", Lines: []holds.Line{{Scope: "streams", Amount: 1, Limits: []budget.Limit{budget.Lifetime(9)}}}})
	require.NoError(s.T, err)
	session.Close()
	s.w.requireValue(1, "metered_sessions_total", "metered_session=opened")
	s.w.requireValue(1, "metered_sessions_total", "metered_session=abandoned")
	s.w.requireValue(0, "metered_sessions_total", "metered_session=lost")
}

// lease has a lease, meets a refusal with it, and gives it back.
func (s *service) lease() {
	s.T.Helper()
	t, ctx := s.T, s.T.Context()
	ledger, err := budget.New(budget.Config{Observer: s.w})
	require.NoError(t, err)
	p, err := leases.New(s.pool, ledger, leases.Config{Rules: []leases.Rule{{Share: 2, MinSlice: 10}}})
	require.NoError(t, err)
	limit := []budget.Limit{budget.Lifetime(1000).Named("stock")}
	for opened := false; !opened; {
		require.NoError(t, p.Allow(ctx, budget.Charge{Scope: "hot", Amount: 1, Limits: limit}))
		_, opened = s.w.value("metered_lease_out")
	}
	require.ErrorIs(t, p.Allow(ctx, budget.Charge{Scope: "hot", Amount: 1000, Limits: limit}), budget.ErrExceeded)
	require.NoError(t, p.Close(ctx))
}

// maintain sweeps, and purges all that can be purged.
func (s *service) maintain(clock *pgtest.Clock) {
	s.T.Helper()
	t, ctx := s.T, s.T.Context()
	clock.Advance(time.Minute)
	book, err := holds.New(s.client.Budget, holds.Config{Subscribers: []holds.Subscriber{func(context.Context, pgx.Tx, holds.Transition) error { return context.Canceled }}})
	require.NoError(t, err)
	_, err = book.Sweep(ctx, s.pool, holds.SweepOptions{})
	require.Error(t, err, "the subscriber fails")
	_, err = s.client.Holds.Sweep(ctx, s.pool, holds.SweepOptions{})
	require.NoError(t, err)
	ended, cancel := context.WithCancel(ctx)
	cancel()
	_, err = purge.Tokens.Delete(ended, s.pool, purge.Options{Observer: observed.New(s.w)})
	require.ErrorIs(t, err, context.Canceled)
	clock.Advance(1000 * time.Hour)
	const age = time.Hour
	_, err = maintain.Run(ctx, s.pool, maintain.Parts{Ledger: s.client.Budget}, maintain.Policy{NoSweeps: true, Entries: age,
		Operations: age, JobKeys: age, Holds: age, Leases: budget.Never, Tokens: age})
	require.NoError(t, err)
}
