package holds_test

import (
	"context"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/leases"
)

// A minimum that fell due in November is on November's invoice: before its hold is ended, and with any entries in the
// scope in December before that.
func TestAtLeast_IsOnTheInvoiceOfTheMonthInWhichItFellDue(t *testing.T) {
	t.Parallel()
	f := setUp(t, holds.Config{MaxTTL: 24 * time.Hour})
	ctx := t.Context()
	carver, err := leases.NewCarver(f.ledger)
	require.NoError(t, err)
	november := time.Date(2031, 11, 1, 0, 0, 0, 0, time.UTC)
	december := november.AddDate(0, 1, 0)
	inTx := func(fn func(tx pgx.Tx) error) error {
		return pgx.BeginFunc(ctx, f.pool, fn)
	}
	acts := map[string]func(tx pgx.Tx, scope string) error{
		"nothing": func(pgx.Tx, string) error { return nil },
		"charge": func(tx pgx.Tx, scope string) error {
			_, err := f.ledger.Charge(ctx, tx, budget.Charge{Scope: scope, Amount: 1, Limits: []budget.Limit{budget.Lifetime(1000)}})
			return err
		},
		"credit": func(tx pgx.Tx, scope string) error {
			_, err := f.ledger.Credit(ctx, tx, budget.Credit{Scope: scope, Amount: 9})
			return err
		},
		"refund": func(tx pgx.Tx, scope string) error {
			_, err := f.ledger.Refund(ctx, tx, budget.Refund{Scope: scope, Seq: 1, Amount: 2})
			return err
		},
		"place": func(tx pgx.Tx, scope string) error {
			_, err := f.book.Place(ctx, tx, holds.Placement{TTL: time.Hour, Lines: []holds.Line{{Scope: scope, Amount: 4}}})
			return err
		},
		"capture": func(tx pgx.Tx, scope string) error {
			_, err := f.book.Capture(ctx, tx, holds.Capture{IDs: []string{"open/" + scope}, All: true})
			return err
		},
		"capture in part": func(tx pgx.Tx, scope string) error {
			_, err := f.book.Capture(ctx, tx, holds.Capture{IDs: []string{"open/" + scope}, Keep: true, Lines: []holds.Line{{Scope: scope, Amount: 1}}})
			return err
		},
		"release": func(tx pgx.Tx, scope string) error {
			_, err := f.book.Release(ctx, tx, holds.Release{IDs: []string{"open/" + scope}})
			return err
		},
		"expire another": func(tx pgx.Tx, scope string) error {
			at := f.get("late/" + scope).Deadline
			_, ended, err := f.book.Expire(ctx, tx, holds.Expire{ID: "late/" + scope, Deadline: at})
			if err == nil {
				require.True(t, ended)
			}
			return err
		},
		"settle": func(tx pgx.Tx, scope string) error {
			_, err := carver.End(ctx, tx, "child/"+scope, budget.Note{})
			return err
		},
		"sweep beside a lock": func(tx pgx.Tx, scope string) error {
			if err := f.ledger.Lock(ctx, tx, scope+"/2"); err != nil {
				return err
			}
			_, err := f.book.Sweep(ctx, f.pool, holds.SweepOptions{})
			return err
		},
	}
	all := []string{"last: sweep beside a lock"}
	for name := range acts {
		if name != "sweep beside a lock" {
			all = append(all, name)
		}
	}
	f.clock.Set(december.Add(-2 * time.Hour))
	for _, scope := range all {
		_, err := f.charge(budget.Charge{Scope: scope, Amount: 5})
		require.NoError(t, err)
		f.mustPlace(holds.Placement{ID: "least/" + scope, TTL: 90 * time.Minute, Lines: []holds.Line{
			{Scope: scope, Amount: 100, AtLeast: 50}, {Scope: scope + "/2", Amount: 20, AtLeast: 20}}})
		f.mustPlace(holds.Placement{ID: "early/" + scope, TTL: 70 * time.Minute, Lines: []holds.Line{{Scope: scope, Amount: 1}}})
		f.mustPlace(holds.Placement{ID: "late/" + scope, TTL: 110 * time.Minute, Lines: []holds.Line{{Scope: scope, Amount: 3}}})
		f.mustPlace(holds.Placement{ID: "open/" + scope, TTL: 10 * time.Hour, Lines: []holds.Line{{Scope: scope, Amount: 7}}})
		require.NoError(t, inTx(func(tx pgx.Tx) error {
			_, err := carver.Carve(ctx, tx, leases.Carving{Child: "child/" + scope, TTL: 10 * time.Hour, From: budget.Charge{Scope: scope, Amount: 11}})
			return err
		}))
	}
	// A child has a minimum of its own that is due before it is closed.
	f.mustPlace(holds.Placement{ID: "of a child", TTL: 90 * time.Minute, Lines: []holds.Line{{Scope: "child/nothing", Amount: 10, AtLeast: 10}}})

	invoiced := func(when string) {
		for _, locked := range []bool{true, false} {
			require.NoError(t, inTx(func(tx pgx.Tx) error {
				for _, scope := range append([]string{"child/nothing"}, all...) {
					if locked {
						if err := f.ledger.Lock(ctx, tx, scope); err != nil {
							return err
						}
					}
					want := int64(55)
					if scope == "child/nothing" {
						want = 10
					}
					month, err := f.ledger.UsageBetween(ctx, tx, scope, november, december)
					require.NoError(t, err)
					require.Equal(t, want, month.Charged, "%s, %s, locked: %v", when, scope, locked)
					halfHours, err := f.ledger.Series(ctx, tx, scope, december.Add(-time.Hour), december.Add(time.Hour), budget.Unit((30 * time.Minute).String()), nil)
					require.NoError(t, err)
					require.Len(t, halfHours, 4)
					require.Zero(t, halfHours[0].Charged)
					require.Equal(t, want-(want%10), halfHours[1].Charged, "%s, %s, locked: %v", when, scope, locked)
				}
				return nil
			}))
		}
	}
	f.clock.Set(december.Add(-30*time.Minute - time.Microsecond))
	u, err := f.ledger.UsageBetween(ctx, f.pool, "nothing", november, december)
	require.NoError(t, err)
	require.EqualValues(t, 5, u.Charged, "not due yet")

	f.clock.Set(december.Add(5 * time.Minute))
	invoiced("before anybody came")
	for name, act := range acts {
		if name != "sweep beside a lock" {
			require.NoError(t, inTx(func(tx pgx.Tx) error { return act(tx, name) }), name)
		}
	}
	require.NoError(t, inTx(func(tx pgx.Tx) error {
		_, err := carver.End(ctx, tx, "child/nothing", budget.Note{})
		return err
	}))
	invoiced("after the entries of December")
	require.NoError(t, inTx(func(tx pgx.Tx) error { return acts["sweep beside a lock"](tx, all[0]) }))
	waits := int64(110 + 11)
	if queryRow[int](t, f.pool, "select metered._events_per_step()") < 4 { // the scope is behind, so its lines end under its lock alone
		waits = 7 + 11
	}
	require.Equal(t, waits, lastHeld(f, all[0]), "the hold after the minimum waits for it")
	invoiced("after a sweep that left it")

	f.clock.Advance(time.Hour)
	_, err = f.book.Sweep(ctx, f.pool, holds.SweepOptions{Batch: 1})
	require.NoError(t, err)
	invoiced("after a sweep")
	for _, scope := range all {
		for e, err := range f.ledger.Entries(ctx, f.pool, scope, budget.EntriesOptions{From: november, To: december}) {
			require.NoError(t, err)
			if e.Hold == "least/"+scope && e.Kind == "capture" {
				require.Equal(t, december.Add(-30*time.Minute), e.At)
			}
		}
	}
	report, err := f.ledger.Verify(ctx, f.pool, budget.VerifyOptions{})
	require.NoError(t, err)
	require.Empty(t, report.Differences)
}

// However many minima fell due in November, the first entry of December moves none of them into its month, nor into a window.
func TestAtLeast_HoweverManyFellDueTheyStayWhereTheyWere(t *testing.T) {
	t.Parallel()
	const many = 510
	f := setUp(t, holds.Config{MaxTTL: 24 * time.Hour})
	c := pgtest.NewClient(t, f.pool, metered.Config{})
	november := time.Date(2031, 11, 1, 0, 0, 0, 0, time.UTC)
	december := november.AddDate(0, 1, 0)
	for what, act := range map[string]func(ctx context.Context, tx pgx.Tx) error{
		"charge": func(ctx context.Context, tx pgx.Tx) error {
			_, err := f.ledger.Charge(ctx, tx, budget.Charge{Scope: "charge", Amount: 1})
			return err
		},
		"credit": func(ctx context.Context, tx pgx.Tx) error {
			_, err := f.ledger.Credit(ctx, tx, budget.Credit{Scope: "credit", Amount: 1})
			return err
		},
	} {
		f.clock.Set(december.Add(-2 * time.Hour))
		require.NoError(t, pgx.BeginFunc(t.Context(), f.pool, func(tx pgx.Tx) error {
			for i := range many {
				_, err := f.book.Place(t.Context(), tx, holds.Placement{TTL: time.Hour + time.Duration(i)*time.Microsecond, Lines: []holds.Line{{Scope: what, Amount: 2, AtLeast: 1}}})
				require.NoError(t, err)
			}
			return nil
		}))
		f.clock.Set(december.Add(5 * time.Minute))
		for _, when := range []string{"before", "after"} {
			month, err := f.ledger.UsageBetween(t.Context(), f.pool, what, november, december)
			require.NoError(t, err)
			require.EqualValues(t, many, month.Charged, "%s a %s", when, what)
			window, err := f.ledger.Usage(t.Context(), f.pool, budget.Query{Scope: what, Window: time.Hour})
			require.NoError(t, err)
			require.LessOrEqual(t, window[0].Used, int64(1), "%s a %s", when, what)
			if when == "before" {
				require.NoError(t, c.RunTx(t.Context(), pgx.TxOptions{}, act))
			}
		}
	}
	f.verify()
}

// lastHeld is the held units in the last entry of a scope.
func lastHeld(f *fixture, scope string) int64 {
	f.Helper()
	for e, err := range f.ledger.Entries(context.Background(), f.pool, scope, budget.EntriesOptions{NewestFirst: true, Max: 1}) {
		require.NoError(f, err)
		return e.Held
	}
	return 0
}
