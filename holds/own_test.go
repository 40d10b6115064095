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

// refusal is the only refusal of a charge.
func refusal(t *testing.T, err error) budget.Refusal {
	t.Helper()
	var exceeded *budget.ExceededError
	require.ErrorAs(t, err, &exceeded)
	require.Len(t, exceeded.Refusals, 1)
	return exceeded.Refusals[0]
}

// A transaction's own holds go when it is rolled back: no refusal names their end as the time to come back, nor counts
// them among the units that others hold.
func TestRefusal_DoesNotCountOnTheEndOfItsOwnHolds(t *testing.T) {
	t.Parallel()
	one := setUp(t, holds.Config{})
	credit := []budget.Limit{budget.Prepaid(0)}
	for name, c := range map[string]struct {
		others int64 // held by another holder for 5 minutes
		do     func(f *fixture, ctx context.Context, tx pgx.Tx) error
		want   budget.Refusal
	}{
		"placed": {
			do: func(f *fixture, ctx context.Context, tx pgx.Tx) error {
				_, err := f.book.Place(ctx, tx, holds.Placement{TTL: time.Second, Lines: []holds.Line{{Scope: f.Name(), Amount: 60, Limits: credit}}})
				return err
			},
			want: budget.Refusal{Used: -100, OwnHeld: 60, Available: 40, RetryAfter: budget.Never},
		},
		"placed in savepoints": {
			do: func(f *fixture, ctx context.Context, tx pgx.Tx) error {
				for range 2 {
					err := pgx.BeginFunc(ctx, tx, func(tx pgx.Tx) error {
						_, err := f.book.Place(ctx, tx, holds.Placement{TTL: time.Second, Lines: []holds.Line{{Scope: f.Name(), Amount: 30, Limits: credit}}})
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
				_, place := f.book.Place(ctx, tx, holds.Placement{ID: "h", TTL: time.Second, Lines: []holds.Line{{Scope: f.Name(), Amount: 80, Limits: credit}}})
				_, capture := f.book.Capture(ctx, tx, holds.Capture{IDs: []string{"h"}, Keep: true, Lines: []holds.Line{{Scope: f.Name(), Amount: 20}}})
				_, other := f.book.Place(ctx, tx, holds.Placement{ID: "other", TTL: time.Second, Lines: []holds.Line{{Scope: f.Name(), Amount: 9, Limits: credit}}})
				_, release := f.book.Release(ctx, tx, holds.Release{IDs: []string{"other"}})
				return errors.Join(place, capture, other, release)
			},
			want: budget.Refusal{Used: -80, OwnHeld: 60, Available: 20, RetryAfter: budget.Never},
		},
		"others hold, and so does it": {
			others: 20,
			do: func(f *fixture, ctx context.Context, tx pgx.Tx) error {
				_, err := f.book.Place(ctx, tx, holds.Placement{TTL: time.Second, Lines: []holds.Line{{Scope: f.Name(), Amount: 40, Limits: credit}}})
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
			f := one.as(t)
			_, err := do(f, func(ctx context.Context, tx pgx.Tx) (budget.Posted, error) {
				return f.ledger.Credit(ctx, tx, budget.Credit{Scope: f.Name(), Amount: 100})
			})
			require.NoError(t, err)
			if c.others > 0 {
				f.mustPlace(holds.Placement{TTL: 5 * time.Minute, Lines: []holds.Line{{Scope: f.Name(), Amount: c.others}}})
			}
			_, err = do(f, func(ctx context.Context, tx pgx.Tx) (budget.Receipt, error) {
				if err := c.do(f, ctx, tx); err != nil {
					return budget.Receipt{}, err
				}
				return f.ledger.Charge(ctx, tx, budget.Charge{Scope: f.Name(), Amount: 50, Limits: credit})
			})
			c.want.Scope, c.want.Limit, c.want.Requested = f.Name(), credit[0], 50
			require.Equal(t, c.want, refusal(t, err))
		})
	}
	one.verify()
}

// Nor on the end of the hold that it captures: by then there is nothing to capture.
func TestRefusal_OfACaptureDoesNotCountOnTheEndOfItsHold(t *testing.T) {
	t.Parallel()
	f := setUp(t, holds.Config{})
	limits := []budget.Limit{budget.Lifetime(100)}
	_, err := f.charge(budget.Charge{Scope: "a", Amount: 30})
	require.NoError(t, err)
	f.mustPlace(holds.Placement{ID: "h", Lines: []holds.Line{{Scope: "a", Amount: 60}}})
	over := holds.Capture{IDs: []string{"h"}, Over: holds.OverIfFits, Lines: []holds.Line{{Scope: "a", Amount: 80, Limits: limits}}}
	_, err = f.capture(over)
	want := budget.Refusal{Scope: "a", Limit: limits[0], Used: 30, OwnHeld: 60, Requested: 20, Available: 10, RetryAfter: budget.Never}
	require.Equal(t, want, refusal(t, err))

	f.mustPlace(holds.Placement{TTL: 30 * time.Minute, Lines: []holds.Line{{Scope: "a", Amount: 5}}})
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
		f.mustPlace(holds.Placement{Lines: []holds.Line{capacity("a", 1, 99)}})
	}
	_, err := f.pool.Exec(t.Context(), `select setval(pg_get_serial_sequence('metered.holds', 'no'), 1, false)`)
	require.NoError(t, err)
	for range 3 {
		f.mustPlace(holds.Placement{Lines: []holds.Line{capacity("a", 1, 99)}})
	}
	require.Equal(t, 8, queryRow[int](t, f.pool, `select count(*) from metered.holds`))
	f.verify()
}

// Holds that a transaction has placed and released again are not its own any more, also where one call released
// several: the refusal waits for the others.
func TestRefusal_OwnHoldsReleasedTogetherAreNoLongerHeld(t *testing.T) {
	t.Parallel()
	f := setUp(t, holds.Config{})
	f.mustPlace(holds.Placement{TTL: 5 * time.Minute, Lines: []holds.Line{capacity("w", 6, 10)}})
	_, err := do(f, func(ctx context.Context, tx pgx.Tx) (budget.Receipt, error) {
		for _, id := range []string{"a", "b"} {
			_, err := f.book.Place(ctx, tx, holds.Placement{ID: id, TTL: time.Minute, Lines: []holds.Line{capacity("w", 2, 10)}})
			require.NoError(t, err)
		}
		_, err := f.book.Release(ctx, tx, holds.Release{IDs: []string{"a", "b"}})
		require.NoError(t, err)
		return f.ledger.Charge(ctx, tx, budget.Charge{Scope: "w", Amount: 6, Limits: []budget.Limit{budget.Lifetime(10)}})
	})
	r := refusal(t, err)
	require.Equal(t, []int64{6, 0}, []int64{r.Held, r.OwnHeld})
	require.Equal(t, 5*time.Minute, r.RetryAfter)
}

// Holds of others that this transaction ended are not taken for its own.
func TestRefusal_OwnHoldsBesideOnesOfOthersThatFellDue(t *testing.T) {
	t.Parallel()
	one := setUp(t, holds.Config{})
	for name, c := range map[string]struct {
		before, after []string // what the transaction places before and after the others' hold falls due
		held, own     int64
		retry         time.Duration
	}{
		"placed after":               {after: []string{"a"}, held: 3, own: 2, retry: 5 * time.Minute},
		"placed before, and due too": {before: []string{"a"}, held: 3, retry: 5 * time.Minute},
		"one of each":                {before: []string{"a"}, after: []string{"b"}, held: 3, own: 2, retry: 5 * time.Minute},
	} {
		t.Run(name, func(t *testing.T) {
			f := one.as(t)
			f.clock.Set(noon)
			f.mustPlace(holds.Placement{ID: name + " kept", TTL: 6 * time.Minute, Lines: []holds.Line{capacity(name, 3, 10)}})
			f.mustPlace(holds.Placement{ID: name + " due", TTL: time.Minute, Lines: []holds.Line{capacity(name, 4, 10)}})
			_, err := do(f, func(ctx context.Context, tx pgx.Tx) (budget.Receipt, error) {
				place := func(ids []string) {
					for _, id := range ids {
						_, err := f.book.Place(ctx, tx, holds.Placement{ID: id, TTL: time.Minute, Lines: []holds.Line{capacity(name, 2, 10)}})
						require.NoError(t, err)
					}
				}
				place(c.before)
				f.clock.Set(noon.Add(time.Minute))
				_, err := f.ledger.Charge(ctx, tx, budget.Charge{Scope: name, Amount: 1, Limits: []budget.Limit{budget.Lifetime(5)}})
				require.NoError(t, err, "due units are freed for it")
				place(c.after)
				return f.ledger.Charge(ctx, tx, budget.Charge{Scope: name, Amount: 7, Limits: []budget.Limit{budget.Lifetime(10)}})
			})
			r := refusal(t, err)
			require.Equal(t, []int64{c.held, c.own}, []int64{r.Held, r.OwnHeld})
			require.Equal(t, c.retry, r.RetryAfter)
		})
	}
}

// A hold of another that this transaction has extended falls due for everybody, it included.
func TestRefusal_AfterAnExtensionNamesWhenTheHoldFallsDue(t *testing.T) {
	t.Parallel()
	f := setUp(t, holds.Config{})
	f.mustPlace(holds.Placement{ID: "first", TTL: time.Minute, Lines: []holds.Line{capacity("w", 3, 10)}})
	f.mustPlace(holds.Placement{ID: "later", TTL: 5 * time.Minute, Lines: []holds.Line{capacity("w", 3, 10)}})
	_, err := do(f, func(ctx context.Context, tx pgx.Tx) (budget.Receipt, error) {
		_, err := f.book.Extend(ctx, tx, holds.Extend{IDs: []string{"first"}, By: 2 * time.Minute})
		require.NoError(t, err)
		return f.ledger.Charge(ctx, tx, budget.Charge{Scope: "w", Amount: 5, Limits: []budget.Limit{budget.Lifetime(10)}})
	})
	require.Equal(t, 3*time.Minute, refusal(t, err).HoldDue)
}

// The same id in two tenants is two holds.
func TestRefusal_OwnHoldsOfTwoTenantsUnderOneID(t *testing.T) {
	t.Parallel()
	f := setUp(t, holds.Config{})
	_, err := do(f, func(ctx context.Context, tx pgx.Tx) (budget.Receipt, error) {
		for _, tenant := range []string{"t1", "t2"} {
			_, err := f.book.Place(ctx, tx, holds.Placement{Tenant: tenant, ID: "a", TTL: time.Minute, Lines: []holds.Line{capacity("w", 4, 10)}})
			require.NoError(t, err)
		}
		_, err := f.book.Release(ctx, tx, holds.Release{Tenant: "t2", IDs: []string{"a"}})
		require.NoError(t, err)
		return f.ledger.Charge(ctx, tx, budget.Charge{Scope: "w", Amount: 9, Limits: []budget.Limit{budget.Lifetime(10)}})
	})
	r := refusal(t, err)
	require.Equal(t, []int64{0, 4}, []int64{r.Held, r.OwnHeld})
}

// A partial refund stays when the rest of its charge was purged.
func TestReturn_OfTheRestOfAPurgedChargeKeepsEarlierRefunds(t *testing.T) {
	t.Parallel()
	f := setUp(t, holds.Config{})
	f.mustPlace(holds.Placement{ID: "h", Lines: []holds.Line{capacity("power", 10, 10), capacity("water", 3, 9)}})
	_, err := f.capture(holds.Capture{IDs: []string{"h"}, All: true})
	require.NoError(t, err)
	_, err = do(f, func(ctx context.Context, tx pgx.Tx) ([]holds.Hold, error) {
		return f.book.Return(ctx, tx, holds.Return{IDs: []string{"h"}, Lines: []holds.Line{{Scope: "power", Amount: 4}}})
	})
	require.NoError(t, err)
	f.purgeOf("power")
	hs, err := do(f, func(ctx context.Context, tx pgx.Tx) ([]holds.Hold, error) {
		return f.book.Return(ctx, tx, holds.Return{IDs: []string{"h"}, All: true, SkipPurged: true})
	})
	require.NoError(t, err)
	require.Equal(t, holds.Returned, hs[0].State)
	f.verify()
	require.Equal(t, int64(4), hs[0].Lines[0].Refunded)
}
