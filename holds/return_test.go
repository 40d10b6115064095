package holds_test

import (
	"context"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/ledger"
	"github.com/pgmetered/metered/internal/pgtest"
)

// A hold that was captured is given back by the verb that gives up one that is held, also both in one call, or
// neither. Its state says so, and so does its history.
func TestRelease_OfACapturedHoldReturnsIt(t *testing.T) {
	t.Parallel()
	for _, iso := range isolations {
		f := setUp(t, holds.Config{})
		release := func(r holds.Release) ([]holds.Hold, error) {
			tx := begin(t, f.pool, iso)
			hs, err := f.book.Release(t.Context(), tx, r)
			require.NoError(t, tx.Commit(context.Background()))
			return hs, err
		}
		for _, id := range []string{"h1", "h2", "h3", "gone", "over"} {
			f.mustPlace(holds.Placement{ID: id, Holder: "ann", TTL: time.Hour, Lines: []holds.Line{capacity("a", 2, 10), capacity(id, 1, 1)}})
		}
		_, err := f.capture(holds.Capture{IDs: []string{"h1", "h3"}, All: true})
		require.NoError(t, err)
		_, err = f.release("gone")
		require.NoError(t, err)
		_, err = release(holds.Release{IDs: []string{"h2", "h1"}})
		require.ErrorIs(t, err, inState(holds.Captured), "unless it is asked for")
		before := f.dump()
		for _, c := range []struct {
			ids    []string
			holder string
			want   error
		}{
			{[]string{"h1", "gone"}, "", inState(holds.Released)}, {[]string{"h2", "h1", "gone"}, "ann", inState(holds.Released)},
			{[]string{"h1"}, "ben", holds.ErrUnknown}, {[]string{"h1", "none"}, "", holds.ErrUnknown},
		} {
			_, err = release(holds.Release{IDs: c.ids, Holder: c.holder, Captured: true})
			require.ErrorIs(t, err, c.want, "%v", c.ids)
		}
		require.Equal(t, before, f.dump())

		note := budget.Note{Actor: "user:ann", Reason: "changed_plans"}
		hs, err := release(holds.Release{IDs: []string{"h2", "h1"}, Holder: "ann", Captured: true, Note: note})
		require.NoError(t, err)
		for i, want := range []holds.State{holds.Released, holds.Returned} {
			require.Equal(t, []any{want, note.Reason}, []any{hs[i].State, hs[i].Reason})
			require.Equal(t, hs[i], f.get(hs[i].ID))
		}
		require.Equal(t, int64(1), hs[1].Lines[1].Refunded)
		used, held := f.usage("a")
		require.Equal(t, []int64{2, 2}, []int64{used, held}, "h3, over")
		history, err := f.book.History(t.Context(), f.pool, "", "h1", "")
		require.NoError(t, err)
		require.Equal(t, []any{holds.EventReturned, note}, []any{history[2].Kind, history[2].Note})

		_, err = release(holds.Release{IDs: []string{"h3", "h1"}, Captured: true})
		var state *holds.StateError
		require.ErrorAs(t, err, &state)
		require.ErrorIs(t, err, inState(holds.Returned))
		require.Equal(t, []any{"h1", holds.Returned}, []any{state.ID, state.State})
		f.clock.Advance(time.Hour)
		_, err = release(holds.Release{IDs: []string{"h3", "over"}, Captured: true})
		require.ErrorIs(t, err, inState(holds.Expired))
		f.purgeOf("a")
		_, err = release(holds.Release{IDs: []string{"h3"}, Captured: true})
		require.ErrorIs(t, err, holds.ErrNotReturnable)
		f.verify()
	}
}

// Captures and such releases of one hold race: each happens at most once, and the units spent in the end agree with the
// last state.
func TestRelease_AndCaptureAtOnceAreInOneOrder(t *testing.T) {
	t.Parallel()
	f := setUp(t, holds.Config{})
	for _, iso := range isolations {
		t.Run(string(iso), func(t *testing.T) {
			var ids []string
			for i := range pgtest.Size(10, 20) {
				ids = append(ids, fmt.Sprint(iso, i))
				f.mustPlace(holds.Placement{ID: ids[i], TTL: time.Hour, Lines: []holds.Line{capacity("a", 1, 100)}})
			}
			var going []<-chan error
			for _, id := range ids {
				for range 2 {
					going = append(going, pgtest.Going(func() error {
						return retried(t, f, iso, func(tx pgx.Tx) error {
							_, err := f.book.Release(t.Context(), tx, holds.Release{IDs: []string{id}, Captured: true})
							return err
						})
					}), pgtest.Going(func() error {
						return retried(t, f, iso, func(tx pgx.Tx) error {
							_, err := f.book.Capture(t.Context(), tx, holds.Capture{IDs: []string{id}, All: true})
							return err
						})
					}))
				}
			}
			for _, done := range going {
				if err := <-done; err != nil {
					require.ErrorIs(t, err, holds.ErrState)
				}
			}
			for _, id := range ids {
				history, err := f.book.History(t.Context(), f.pool, "", id, "")
				require.NoError(t, err)
				kinds := []holds.EventKind{}
				for _, e := range history {
					kinds = append(kinds, e.Kind)
				}
				require.True(t, slices.Equal(kinds, []holds.EventKind{holds.EventPlaced, holds.EventReleased}) ||
					slices.Equal(kinds, []holds.EventKind{holds.EventPlaced, holds.EventCaptured, holds.EventReturned}), "%v", kinds)
			}
			used, held := f.usage("a")
			require.Equal(t, []int64{0, 0}, []int64{used, held})
		})
	}
	f.verify()
}

// retried runs fn in transactions of a level until it is not in the way of others.
func retried(t *testing.T, f *fixture, iso pgx.TxIsoLevel, fn func(tx pgx.Tx) error) error {
	for {
		err := pgx.BeginTxFunc(t.Context(), f.pool, pgx.TxOptions{IsoLevel: iso}, fn)
		if c := code(err); c != "40001" && c != "40P01" {
			return err
		}
	}
}

func sending(raising bool) ledger.Sending { return ledger.Sending{WaitMS: 5000, Raising: raising} }
