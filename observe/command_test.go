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
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/observe"
)

// lasting returns the events that an observer gets after the commit or with the answer: no jobs.
func lasting(r *pgtest.Recorder) []string { return r.Told(observe.Job) }

func only(t *testing.T, r *pgtest.Recorder, work observe.Work) pgtest.Ended {
	t.Helper()
	all := r.Ended(t, work)
	require.Len(t, all, 1)
	return all[0]
}

func TestObserver_HearsOfACommandAndItsParts(t *testing.T) {
	t.Parallel()
	var r pgtest.Recorder
	pool, c := pgtest.SetUp(t, metered.Config{Config: budget.Config{Observer: &r}})
	cmd := pgtest.Whole(t, pool, c, "op")
	cmd.Name, cmd.Tenant = "upload", "ann"
	r.Forget()
	_, err := metered.Do(t.Context(), c, cmd, pgtest.WholeFunc("op", nil))
	require.NoError(t, err)
	done := only(t, &r, observe.Command)
	require.Equal(t, observe.Op{Work: observe.Command, Name: "upload", Tenant: "ann", ID: "op"}, done.Op)
	require.Equal(t, observe.End{Outcome: observe.Committed, Attempts: 1, RoundTrips: 2}, done.End)
	require.Equal(t, []string{"begin", "complete"}, r.Names(t, observe.Flush))
	for _, work := range []observe.Work{observe.Flush, observe.Function, observe.Connect} {
		for _, e := range r.Ended(t, work) {
			require.Equal(t, observe.Command, e.Within, work)
		}
	}
	jobs := r.Ended(t, observe.Enqueue)
	require.Len(t, jobs, 2)
	for _, e := range jobs {
		require.Equal(t, observe.Function, e.Within)
		require.Equal(t, "process", e.Name)
		require.Len(t, e.Jobs, 1)
	}
	require.Equal(t, []string{"job created 1 pending", "job created 1 pending", "token consumed 1", "hold placed 1"}, r.Told())

	r.Forget()
	_, err = metered.Do(t.Context(), c, cmd, pgtest.WholeFunc("op", nil))
	require.NoError(t, err)
	require.Equal(t, observe.End{Outcome: observe.Replayed, Attempts: 1, RoundTrips: 2}, only(t, &r, observe.Command).End)
	require.Equal(t, []string{"begin", "replay"}, r.Names(t, observe.Flush))
	require.Empty(t, r.Told(), "a replay does nothing")

	cmd.Input = 2
	_, err = metered.Do(t.Context(), c, cmd, pgtest.WholeFunc("op", nil))
	conflict := r.Ended(t, observe.Command)[1]
	require.ErrorIs(t, err, budget.ErrConflict)
	require.Equal(t, observe.Conflict, conflict.Outcome)
	require.Equal(t, "operation_conflict", conflict.Code)
}

func TestObserver_HearsOfNothingDoneThatIsRolledBack(t *testing.T) {
	t.Parallel()
	var r pgtest.Recorder
	pool, c := pgtest.SetUp(t, metered.Config{Config: budget.Config{Observer: &r}})
	cmd := pgtest.Whole(t, pool, c, "op")
	pgtest.Fill(t, pool, c, "full", 5)
	r.Forget()
	_, err := metered.Do(t.Context(), c, cmd, pgtest.WholeFunc("op", func(step int) error {
		if step == pgtest.WholeSteps {
			return pgtest.ErrOwn
		}
		return nil
	}))
	require.ErrorIs(t, err, pgtest.ErrOwn)
	failed := only(t, &r, observe.Command)
	require.Equal(t, observe.Failed, failed.Outcome)
	require.Empty(t, failed.Code)
	require.Equal(t, pgtest.ErrOwn, only(t, &r, observe.Function).Err)

	cmd.Charges = append(cmd.Charges, pgtest.Charge("full", 1, 5))
	_, err = metered.Do(t.Context(), c, cmd, pgtest.WholeFunc("op", nil))
	require.ErrorIs(t, err, budget.ErrExceeded)
	require.Equal(t, []string{"limit_refused 1h0m0s 1"}, lasting(&r), "by the last flush: the hold was placed, and rolled back")
	refused := r.Ended(t, observe.Command)[1]
	require.Equal(t, observe.Refused, refused.Outcome)
	require.Equal(t, "budget_exceeded", refused.Code)

	r.Forget()
	require.Panics(t, func() {
		_, _ = metered.Do(t.Context(), c, metered.Command{ID: "panic"}, func(context.Context, *metered.Tx) (any, error) { panic("oh") })
	})
	require.Equal(t, observe.Failed, only(t, &r, observe.Command).Outcome)
	require.Error(t, only(t, &r, observe.Function).Err)

	r.Forget()
	require.ErrorIs(t, pgtest.ErrOwn, pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error {
		_, err := metered.DoTx(t.Context(), c, tx, pgtest.Whole(t, pool, c, "tx"), pgtest.WholeFunc("tx", nil))
		require.NoError(t, err)
		require.Equal(t, observe.Open, only(t, &r, observe.Command).Outcome)
		return pgtest.ErrOwn
	}))
	require.Equal(t, []string{"token consumed 1 pending", "hold placed 1 pending"}, lasting(&r))
}

func TestObserver_HearsOfRefusalsByLimit(t *testing.T) {
	t.Parallel()
	var r pgtest.Recorder
	pool, c := pgtest.SetUp(t, metered.Config{Config: budget.Config{Observer: &r}})
	ctx := t.Context()
	of := func(scope string, limits ...budget.Limit) budget.Charge {
		return budget.Charge{Scope: scope, Amount: 10, Limits: limits}
	}
	all := of("a", budget.PerWindow(9, time.Minute).Named("burst"), budget.PerWindow(9, time.Hour), budget.Lifetime(9), budget.Prepaid(0), budget.Lifetime(100))
	names := []string{"limit_refused burst 1", "limit_refused 1h0m0s 1", "limit_refused lifetime 1", "limit_refused credit 1"}
	in := func(f func(tx pgx.Tx) error) error { return pgx.BeginFunc(ctx, pool, f) }
	for what, call := range map[string]func() error{
		"Do": func() error {
			_, err := metered.Do[any](ctx, c, metered.Command{ID: "op", Charges: []budget.Charge{all}}, nil)
			return err
		},
		"Do of an early look": func() error {
			_, err := metered.Do[any](ctx, c, metered.Command{ID: "op", Charges: []budget.Charge{all}, EarlyLook: true}, nil)
			return err
		},
		"Do of a hold": func() error {
			_, err := metered.Do[any](ctx, c, metered.Command{ID: "op", Input: 1, Holds: []holds.Placement{{Lines: []holds.Line{{Scope: "a", Amount: 10, Limits: all.Limits}}, TTL: time.Minute}}}, nil)
			return err
		},
		"Do of a sticky charge": func() error {
			_, err := metered.Do[any](ctx, c, metered.Command{ID: "op", Sticky: []budget.Charge{all}}, nil)
			return err
		},
		"Do of a function's charge": func() error {
			_, err := metered.Do(ctx, c, metered.Command{ID: "op"}, func(ctx context.Context, tx *metered.Tx) (any, error) {
				_, err := c.Budget.Charge(ctx, tx, all)
				return nil, err
			})
			return err
		},
		"Charge": func() error {
			return in(func(tx pgx.Tx) error { _, err := c.Budget.Charge(ctx, tx, all); return err })
		},
		"ChargeEach": func() error {
			return in(func(tx pgx.Tx) error { r, err := c.Budget.ChargeEach(ctx, tx, all); return errors.Join(err, r[0].Err) })
		},
		"ChargeNow": func() error { _, err := c.Budget.ChargeNow(ctx, pool, all); return err },
		"Batcher": func() error {
			b, err := budget.NewBatcher(pool, c.Budget, budget.BatcherConfig{})
			require.NoError(t, err)
			_, err = b.Charge(ctx, all)
			return errors.Join(err, b.Close(ctx))
		},
		"Place": func() error {
			return in(func(tx pgx.Tx) error {
				_, err := c.Holds.Place(ctx, tx, holds.Placement{Lines: []holds.Line{{Scope: "a", Amount: 10, Limits: all.Limits}}, TTL: time.Minute})
				return err
			})
		},
	} {
		r.Forget()
		require.ErrorIs(t, call(), budget.ErrExceeded, what)
		require.Equal(t, names, r.Told(), what)
	}

	cmd := metered.Command{ID: "recorded", Charges: []budget.Charge{all}, RecordRefusal: true}
	r.Forget()
	for range 2 {
		_, err := metered.Do[any](ctx, c, cmd, nil)
		require.ErrorIs(t, err, budget.ErrExceeded)
	}
	require.Equal(t, names, r.Told(), "what is on record is no refusal of now")
	for _, e := range r.Ended(t, observe.Command) {
		require.Equal(t, observe.Refused, e.Outcome)
	}
}

func TestObserver_HearsWhyTokensAreRefused(t *testing.T) {
	t.Parallel()
	var r pgtest.Recorder
	pool, c := pgtest.SetUp(t, metered.Config{Config: budget.Config{Observer: &r}})
	used := pgtest.Mint(t, pool, c)
	do := func(presented, purpose string) {
		_, _ = metered.Do[any](t.Context(), c, metered.Command{ID: metered.NewID(), Token: &metered.Redeem{Purpose: purpose, Subject: "ann", Presented: presented}}, nil)
	}
	r.Forget()
	do(used, "upload")
	do(used, "upload")
	do("mistyped", "upload")
	do(pgtest.UnknownToken(t, c), "upload")
	do(pgtest.Mint(t, pool, c), "other")
	want := []string{"token consumed 1", "token used 1", "token malformed 1", "token unknown 1", "token purpose 1"}
	require.Equal(t, want, r.Told())

	alone := pgtest.Mint(t, pool, c)
	r.Forget()
	require.NoError(t, pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error {
		for _, text := range []string{alone, alone, "mistyped"} {
			_, _ = c.Tokens.Consume(t.Context(), tx, "upload", "ann", text)
		}
		return nil
	}))
	require.Equal(t, []string{"token consumed 1 pending", "token used 1", "token malformed 1"}, r.Told())
	require.Equal(t, []string{"tokens.consume", "tokens.consume"}, r.Names(t, observe.Call))
}
