package holds_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/wallet"
)

// The short way and the full way of placements and captures answer alike, and leave the same rows, whatever
// the scope has been through.
func TestPlainHolds_AnswerAsTheFullFunctionsDo(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	short, full := setUp(t, holds.Config{}), setUp(t, holds.Config{})
	_, err := full.pool.Exec(ctx, `create or replace function metered._goes_short() returns boolean language sql immutable as 'select false'`)
	require.NoError(t, err)
	both := func(what string, do func(f *fixture) (any, error)) {
		t.Helper()
		one, oneErr := do(short)
		other, otherErr := do(full)
		require.Equal(t, fmt.Sprint(otherErr), fmt.Sprint(oneErr), what)
		require.Equal(t, other, one, what)
	}
	limits := [][]budget.Limit{nil, {budget.PerWindow(90, time.Hour)}, {budget.PerWindow(25, time.Minute)}, {budget.Lifetime(400)},
		{budget.PerPeriod(30, 2*time.Minute, time.Date(2020, 1, 1, 0, 0, 0, 0, time.UTC))}}
	for step := range 90 {
		id := fmt.Sprint("h", step)
		scope := []string{"a", "b"}[step%2]
		r := holds.Placement{ID: id, TTL: time.Duration(20+step%5*30) * time.Second, Grace: time.Duration(step%2) * time.Second,
			Lines: []holds.Line{{Scope: scope, Amount: int64(2 + step%4), Limits: limits[step%len(limits)]}}}
		if step%3 == 0 {
			r.Holder, r.Metadata, r.Note = "ann", []byte(`{"step": 1}`), budget.Note{Actor: "ann"}
		}
		if step%11 == 10 {
			r.Lines[0].AtLeast = 1
		}
		both("place "+id, func(f *fixture) (any, error) { return f.place(r) })
		if step%5 == 0 {
			both("place again "+id, func(f *fixture) (any, error) { return f.place(r) })
		}
		c := holds.Capture{IDs: []string{fmt.Sprint("h", max(0, step-step%3))}, All: true, Note: budget.Note{Reason: "done"}}
		switch step % 6 {
		case 1:
			c.All, c.Lines = false, []holds.Line{{Scope: scope, Amount: int64(step % 5)}}
		case 2:
			c.Entity = "order"
		case 3:
			c.Holder = "bob"
		case 4:
			c.All, c.Lines, c.Keep = false, []holds.Line{{Scope: scope, Amount: 1}}, step%8 == 4
		}
		if step%6 != 5 {
			both(fmt.Sprint("capture ", c.IDs), func(f *fixture) (any, error) { return f.capture(c) })
		}
		switch step {
		case 20, 21: // the clock steps back: entries are ahead of it
			for _, f := range []*fixture{short, full} {
				f.clock.Advance(-30 * time.Second)
			}
		case 60:
			both("credit", func(f *fixture) (any, error) {
				return do(f, func(_ context.Context, tx pgx.Tx) (any, error) {
					return f.ledger.Credit(ctx, tx, budget.Credit{Scope: "a", Amount: 5})
				})
			})
		case 70: // lots
			both("grant", func(f *fixture) (any, error) {
				b, err := wallet.New(f.ledger, wallet.Config{})
				require.NoError(t, err)
				return do(f, func(_ context.Context, tx pgx.Tx) (any, error) {
					return b.Grant(ctx, tx, wallet.Grant{Wallet: "b", Amount: 50, Ends: wallet.After(time.Minute)})
				})
			})
		}
		for _, f := range []*fixture{short, full} {
			f.clock.Advance(time.Duration(step%7) * 4 * time.Second)
		}
	}
	for _, table := range []string{"ledger", "holds", "hold_lines", "hold_events", "lot_moves"} {
		both(table, func(f *fixture) (any, error) {
			// An entry without standings may go on with another anchor, and next_due is a bound.
			rows, err := f.pool.Query(ctx, `select (to_jsonb(y) - 'anchor_at' - 'anchor_spent' - 'next_due')::text from metered.`+table+` y order by 1`)
			require.NoError(t, err)
			return pgx.CollectRows(rows, pgx.RowTo[string])
		})
	}
	for _, f := range []*fixture{short, full} {
		report, err := f.ledger.Verify(ctx, f.pool, budget.VerifyOptions{})
		require.NoError(t, err)
		require.Empty(t, report.Differences)
	}
}

// The short way has the scope's lock and that of no entry, whose row is then not written. Above READ COMMITTED, where
// a purge may have been since its snapshot, a call goes the full way.
func TestPlainHolds_LockNoEntry(t *testing.T) {
	t.Parallel()
	f := setUp(t, holds.Config{})
	line := holds.Line{Scope: "s", Amount: 1, Limits: []budget.Limit{budget.Lifetime(100)}}
	rowsLocked := func() int {
		return pgtest.Value[int](t, f.pool, "select count(*) from metered.ledger where scope = 's' and xmax::text <> '0'")
	}
	for i := range 4 {
		f.mustPlace(holds.Placement{ID: fmt.Sprint("id ", i), TTL: time.Hour, Lines: []holds.Line{line}})
		if i == 0 {
			require.Zero(t, rowsLocked(), "the first one goes the full way, and finds no entry")
		}
	}
	require.Zero(t, rowsLocked())
	_, err := f.capture(holds.Capture{IDs: []string{"id 1"}, All: true})
	require.NoError(t, err)
	require.Zero(t, rowsLocked())
	for i, call := range []func(tx pgx.Tx) error{
		func(tx pgx.Tx) error {
			_, err := f.book.Place(t.Context(), tx, holds.Placement{TTL: time.Hour, Lines: []holds.Line{line}})
			return err
		},
		func(tx pgx.Tx) error {
			_, err := f.book.Capture(t.Context(), tx, holds.Capture{IDs: []string{"id 2"}, All: true})
			return err
		},
	} {
		require.NoError(t, pgx.BeginTxFunc(t.Context(), f.pool, pgx.TxOptions{IsoLevel: pgx.RepeatableRead}, call))
		require.Equal(t, i+1, rowsLocked())
	}
}

// A hold of two lines, or one whose line another call has emptied, takes the full way.
func TestPlainHolds_ACaptureOfTwoLinesTakesBoth(t *testing.T) {
	t.Parallel()
	f := setUp(t, holds.Config{})
	h := f.mustPlace(holds.Placement{Lines: []holds.Line{{Scope: "a", Amount: 1}, {Scope: "b", Amount: 2}}})
	// As if their locks had one key.
	_, err := f.pool.Exec(t.Context(), `update metered.holds set keys = keys[1:1]`)
	require.NoError(t, err)
	all, err := f.capture(holds.Capture{IDs: []string{h.ID}, All: true})
	require.NoError(t, err)
	require.Equal(t, int64(1), all[0].Lines[0].Captured)
	require.Equal(t, int64(2), all[0].Lines[1].Captured)
}

// What the short way must not do: each of its conditions, where only it decides.
func TestPlainHolds_RefuseAndCountAsOthers(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	f := setUp(t, holds.Config{})
	place := func(scope string, amount int64) holds.Hold {
		return f.mustPlace(holds.Placement{Lines: []holds.Line{{Scope: scope, Amount: amount}}})
	}
	two := holds.Placement{Lines: []holds.Line{{Scope: "a", Amount: 2, Limits: []budget.Limit{budget.Lifetime(3)}}}}
	h := f.mustPlace(two)
	_, err := f.place(two)
	require.ErrorIs(t, err, budget.ErrExceeded)
	_, err = f.capture(holds.Capture{IDs: []string{h.ID}, Lines: []holds.Line{{Scope: "a", Amount: 3}}})
	require.ErrorIs(t, err, holds.ErrExcess)
	place("a", 1)
	f.clock.Advance(time.Minute)
	_, err = f.capture(holds.Capture{IDs: []string{h.ID}, All: true})
	require.ErrorIs(t, err, holds.ErrState)

	b, err := wallet.New(f.ledger, wallet.Config{})
	require.NoError(t, err)
	_, err = do(f, func(ctx context.Context, tx pgx.Tx) (any, error) {
		return b.Grant(ctx, tx, wallet.Grant{Wallet: "b", Amount: 50, Ends: wallet.After(time.Hour)})
	})
	require.NoError(t, err)
	for _, scope := range []string{"b", "c"} {
		place(scope, 1) // stays, so that units are held
		h = place(scope, 5)
		_, err = f.capture(holds.Capture{IDs: []string{h.ID}, Lines: []holds.Line{{Scope: scope, Amount: 2}}})
		require.NoError(t, err)
		h = place(scope, 5)
		_, err = f.capture(holds.Capture{IDs: []string{h.ID}, All: true})
		require.NoError(t, err)
	}
	report, err := f.ledger.Verify(ctx, f.pool, budget.VerifyOptions{})
	require.NoError(t, err)
	require.Empty(t, report.Differences)
}
