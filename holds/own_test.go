package holds_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
)

// refusal is the only refusal of a charge that was denied.
func refusal(t *testing.T, err error) budget.Refusal {
	t.Helper()
	var exceeded *budget.ExceededError
	require.ErrorAs(t, err, &exceeded)
	require.Len(t, exceeded.Refusals, 1)
	return exceeded.Refusals[0]
}

// What a transaction itself holds goes when it is rolled back: no refusal names its end as the
// time to come back, nor counts it among what others hold.
func TestRefusal_DoesNotCountOnTheEndOfItsOwnHolds(t *testing.T) {
	t.Parallel()
	credit := []budget.Limit{budget.Prepaid()}
	for name, c := range map[string]struct {
		others int64 // held by another holder for 5 minutes
		do     func(f *fixture, ctx context.Context, tx pgx.Tx) error
		want   budget.Refusal
	}{
		"placed": {
			do: func(f *fixture, ctx context.Context, tx pgx.Tx) error {
				_, err := f.book.Place(ctx, tx, holds.Request{TTL: time.Second, Lines: []holds.Line{{Scope: "w", Amount: 60, Limits: credit}}})
				return err
			},
			want: budget.Refusal{Used: -100, OwnHeld: 60, Available: 40, RetryAfter: budget.Never},
		},
		"placed in savepoints": {
			do: func(f *fixture, ctx context.Context, tx pgx.Tx) error {
				for range 2 {
					err := pgx.BeginFunc(ctx, tx, func(tx pgx.Tx) error {
						_, err := f.book.Place(ctx, tx, holds.Request{TTL: time.Second, Lines: []holds.Line{{Scope: "w", Amount: 30, Limits: credit}}})
						return err
					})
					if err != nil {
						return err
					}
				}
				return nil
			},
			want: budget.Refusal{Used: -100, OwnHeld: 60, Available: 40, RetryAfter: budget.Never},
		},
		"placed, in part captured and released": {
			do: func(f *fixture, ctx context.Context, tx pgx.Tx) error {
				_, place := f.book.Place(ctx, tx, holds.Request{ID: "h", TTL: time.Second, Lines: []holds.Line{{Scope: "w", Amount: 80, Limits: credit}}})
				_, capture := f.book.Capture(ctx, tx, holds.Capture{IDs: []string{"h"}, Keep: true, Lines: []holds.Line{{Scope: "w", Amount: 20}}})
				_, other := f.book.Place(ctx, tx, holds.Request{ID: "other", TTL: time.Second, Lines: []holds.Line{{Scope: "w", Amount: 9, Limits: credit}}})
				_, release := f.book.Release(ctx, tx, holds.Release{IDs: []string{"other"}})
				return errors.Join(place, capture, other, release)
			},
			want: budget.Refusal{Used: -80, OwnHeld: 60, Available: 20, RetryAfter: budget.Never},
		},
		"others hold, and so does it": {
			others: 20,
			do: func(f *fixture, ctx context.Context, tx pgx.Tx) error {
				_, err := f.book.Place(ctx, tx, holds.Request{TTL: time.Second, Lines: []holds.Line{{Scope: "w", Amount: 40, Limits: credit}}})
				return err
			},
			want: budget.Refusal{Used: -100, Held: 20, OwnHeld: 40, Available: 40, RetryAfter: 5 * time.Minute, HoldDue: 5 * time.Minute},
		},
		"others hold": {
			others: 60,
			do:     func(*fixture, context.Context, pgx.Tx) error { return nil },
			want:   budget.Refusal{Used: -100, Held: 60, Available: 40, RetryAfter: 5 * time.Minute, HoldDue: 5 * time.Minute},
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := setUp(t, holds.Config{})
			_, err := do(f, func(ctx context.Context, tx pgx.Tx) (budget.Posted, error) {
				return f.ledger.Credit(ctx, tx, budget.Credit{Scope: "w", Amount: 100})
			})
			require.NoError(t, err)
			if c.others > 0 {
				f.mustPlace(holds.Request{TTL: 5 * time.Minute, Lines: []holds.Line{{Scope: "w", Amount: c.others}}})
			}
			_, err = do(f, func(ctx context.Context, tx pgx.Tx) (budget.Receipt, error) {
				if err := c.do(f, ctx, tx); err != nil {
					return budget.Receipt{}, err
				}
				return f.ledger.Charge(ctx, tx, budget.Charge{Scope: "w", Amount: 50, Limits: credit})
			})
			c.want.Scope, c.want.Limit, c.want.Requested = "w", credit[0], 50
			require.Equal(t, c.want, refusal(t, err))
			f.verify()
		})
	}
}

// Nor on the end of the hold that it captures: by then there is nothing to capture.
func TestRefusal_OfACaptureDoesNotCountOnTheEndOfItsHold(t *testing.T) {
	t.Parallel()
	f := setUp(t, holds.Config{})
	limits := []budget.Limit{budget.Lifetime(100)}
	_, err := f.charge(budget.Charge{Scope: "a", Amount: 30})
	require.NoError(t, err)
	f.mustPlace(holds.Request{ID: "h", Lines: []holds.Line{{Scope: "a", Amount: 60}}})
	over := holds.Capture{IDs: []string{"h"}, Over: holds.OverIfFits, Lines: []holds.Line{{Scope: "a", Amount: 80, Limits: limits}}}
	_, err = f.capture(over)
	want := budget.Refusal{Scope: "a", Limit: limits[0], Used: 30, OwnHeld: 60, Requested: 20, Available: 10, RetryAfter: budget.Never}
	require.Equal(t, want, refusal(t, err))

	f.mustPlace(holds.Request{TTL: 30 * time.Minute, Lines: []holds.Line{{Scope: "a", Amount: 5}}})
	_, err = f.capture(over)
	want.Held, want.Available, want.HoldDue = 5, 5, 30*time.Minute
	require.Equal(t, want, refusal(t, err), "without these 5 there is still too little room")

	over.Lines[0].Amount = 66
	_, err = f.capture(over)
	want.Requested, want.RetryAfter = 6, 30*time.Minute
	require.Equal(t, want, refusal(t, err))
	f.verify()
}

// On a server that was switched to by logical replication sequences lag behind their tables.
func TestPlace_BehindASequenceThatLagsGoesOn(t *testing.T) {
	t.Parallel()
	f := setUp(t, holds.Config{})
	for range 5 {
		f.mustPlace(holds.Request{Lines: []holds.Line{capacity("a", 1, 99)}})
	}
	_, err := f.pool.Exec(t.Context(), `select setval(pg_get_serial_sequence('metered.holds', 'no'), 1, false)`)
	require.NoError(t, err)
	for range 3 {
		f.mustPlace(holds.Request{Lines: []holds.Line{capacity("a", 1, 99)}})
	}
	require.Equal(t, 8, queryRow[int](t, f.pool, `select count(*) from metered.holds`))
	f.verify()
}
