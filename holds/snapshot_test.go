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
	"github.com/pgmetered/metered/internal/purge"
	"github.com/pgmetered/metered/internal/sqlstate"
)

// A transaction with an old snapshot saw a scope's last entry. Since then others came, and a purge took the one that
// the next would collide with.
func TestTransitions_OldSnapshotNeverGetsPastAPurge(t *testing.T) {
	t.Parallel()
	f := setUp(t, holds.Config{})
	for _, iso := range isolations[1:] {
		t.Run(string(iso), func(t *testing.T) {
			ctx := t.Context()
			calls := map[string]func(tx pgx.Tx, h holds.Hold) error{
				"capture": func(tx pgx.Tx, h holds.Hold) error {
					_, err := f.book.Capture(ctx, tx, holds.Capture{IDs: []string{h.ID}, All: true})
					return err
				},
				"capture more": func(tx pgx.Tx, h holds.Hold) error {
					_, err := f.book.Capture(ctx, tx, holds.Capture{IDs: []string{h.ID}, Over: holds.OverAllowed,
						Lines: []holds.Line{{Scope: h.Lines[0].Scope, Amount: 3}}})
					return err
				},
				"release": func(tx pgx.Tx, h holds.Hold) error {
					_, err := f.book.Release(ctx, tx, holds.Release{IDs: []string{h.ID}})
					return err
				},
				"refund": func(tx pgx.Tx, h holds.Hold) error {
					_, err := f.book.Return(ctx, tx, holds.Return{IDs: []string{h.ID}, All: true})
					return err
				},
				"expire": func(tx pgx.Tx, h holds.Hold) error {
					_, _, err := f.book.Expire(ctx, tx, holds.Expire{ID: h.ID, Deadline: h.Deadline})
					return err
				},
				"place": func(tx pgx.Tx, h holds.Hold) error {
					_, err := f.book.Place(ctx, tx, holds.Placement{TTL: time.Minute, Lines: []holds.Line{capacity(h.Lines[0].Scope, 1, 90)}})
					return err
				},
				"charge": func(tx pgx.Tx, h holds.Hold) error {
					_, err := f.ledger.Charge(ctx, tx, budget.Charge{Scope: h.Lines[0].Scope, Amount: 1, Limits: []budget.Limit{budget.Lifetime(90)}})
					return err
				},
			}
			for name, call := range calls {
				for _, seen := range pgtest.Size([]int{1, 16, 17}, []int{1, 2, 15, 16, 17}) {
					scope := fmt.Sprintf("%s %s %d", iso, name, seen)
					ttl := time.Hour
					if name == "expire" {
						ttl = time.Minute
					}
					h := f.mustPlace(holds.Placement{ID: scope, TTL: ttl, Lines: []holds.Line{capacity(scope, 1, 90)}})
					if name == "refund" {
						_, err := f.capture(holds.Capture{IDs: []string{h.ID}, All: true})
						require.NoError(t, err)
					}
					for range seen - 1 {
						_, err := f.charge(budget.Charge{Scope: scope, Amount: 1})
						require.NoError(t, err)
					}
					if name == "expire" {
						f.clock.Advance(time.Minute)
					}
					old := begin(t, f.pool, iso)
					_, err := f.ledger.Usage(ctx, old, budget.Query{Scope: scope}) // takes the snapshot
					require.NoError(t, err)
					require.NoError(t, pgx.BeginFunc(ctx, f.pool, func(tx pgx.Tx) (err error) {
						for n := 0; n < 64 && err == nil; n++ { // credits end nothing
							_, err = f.ledger.Credit(ctx, tx, budget.Credit{Scope: scope, Amount: 1})
						}
						return err
					}))
					f.clock.Advance(time.Minute)
					_, err = f.ledger.Purge(ctx, f.pool, budget.PurgeOptions{Scope: scope, OlderThan: time.Second})
					require.NoError(t, err)
					err = call(old, h)
					require.Equal(t, sqlstate.SerializationFailure, code(err), "%s: %v", scope, err)
					require.NoError(t, old.Rollback(ctx))
				}
			}
		})
	}
	f.verify()
}

// Placed before, says the snapshot, and released by now: the answer would be a hold
// that nobody has.
func TestPlace_AnOldSnapshotGivesNobodyAHoldBack(t *testing.T) {
	t.Parallel()
	for _, iso := range isolations[1:] {
		t.Run(string(iso), func(t *testing.T) {
			t.Parallel()
			f := setUp(t, holds.Config{})
			r := holds.Placement{ID: "h", TTL: time.Minute, Lines: []holds.Line{capacity("a", 1, 1)}}
			f.mustPlace(r)
			c := holds.Claim{Key: holds.Key{Type: "name", Value: "ann"}, Holder: "h", TTL: time.Minute}
			claimed, err := f.claim(c)
			require.NoError(t, err)
			old := [2]pgx.Tx{begin(t, f.pool, iso), begin(t, f.pool, iso)}
			for _, tx := range old {
				_, err := f.book.Get(t.Context(), tx, "", "h", "")
				require.NoError(t, err)
			}
			_, err = f.release("h", claimed.ID)
			require.NoError(t, err)
			_, err = f.book.Place(t.Context(), old[0], r)
			require.Equal(t, sqlstate.SerializationFailure, code(err), "%v", err)
			_, err = f.book.Claim(t.Context(), old[1], c)
			require.Equal(t, sqlstate.SerializationFailure, code(err), "%v", err)
			f.verify()
		})
	}
}

// Nobody has the id, says the snapshot, and it was placed, released and purged since.
func TestPlace_AnOldSnapshotPlacesNoRetiredIDAgain(t *testing.T) {
	t.Parallel()
	for _, iso := range isolations {
		t.Run(string(iso), func(t *testing.T) {
			t.Parallel()
			f := setUp(t, holds.Config{})
			id := uuidAt(noon)
			old := begin(t, f.pool, iso)
			_, err := f.book.Get(t.Context(), old, "", id, "")
			require.ErrorIs(t, err, holds.ErrUnknown)
			f.mustPlace(holds.Placement{ID: id, Lines: []holds.Line{capacity("a", 1, 1)}})
			_, err = f.release(id)
			require.NoError(t, err)
			f.clock.Advance(time.Minute)
			n, err := purge.Holds.Delete(t.Context(), f.pool, purge.Options{OlderThan: time.Second})
			require.NoError(t, err)
			require.Equal(t, int64(1), n)
			r := holds.Placement{ID: id, TTL: time.Minute, Lines: []holds.Line{capacity("b", 1, 1)}}
			_, err = f.book.Place(t.Context(), old, r)
			if iso == pgx.ReadCommitted {
				require.ErrorIs(t, err, holds.ErrRetired)
			} else {
				require.Equal(t, sqlstate.SerializationFailure, code(err), "%v", err)
			}
			require.NoError(t, old.Rollback(t.Context()))
			_, err = f.place(r)
			require.ErrorIs(t, err, holds.ErrRetired)
			f.verify()
		})
	}
}

// Locks are there to wait at: without them, the second writer of a scope, or of an id, fails and has to try again. The short way meets
// the same collision, and goes on the full way, which decides by what was committed.
func TestTransitions_WithoutTheirLocksAreSerializationFailures(t *testing.T) {
	t.Parallel()
	f := setUp(t, holds.Config{})
	ctx := t.Context()
	execute(t, f.pool, `create or replace function metered._lock_keys(keys bigint[], wait_ms int) returns boolean
		language plpgsql volatile as 'begin return false; end'`)
	execute(t, f.pool, `create or replace function metered._goes_short() returns boolean language sql immutable as 'select false'`)
	place := func(tx pgx.Tx, id, scope string) error {
		_, err := f.book.Place(ctx, tx, holds.Placement{ID: id, TTL: time.Minute, Lines: []holds.Line{capacity(scope, 2, 9)}})
		return err
	}
	for name, call := range map[string]func(tx pgx.Tx, h holds.Hold) error{
		"capture": func(tx pgx.Tx, h holds.Hold) error {
			_, err := f.book.Capture(ctx, tx, holds.Capture{IDs: []string{h.ID}, All: true})
			return err
		},
		"capture nothing": func(tx pgx.Tx, h holds.Hold) error {
			_, err := f.book.Capture(ctx, tx, holds.Capture{IDs: []string{h.ID}, Lines: []holds.Line{{Scope: h.ID}}})
			return err
		},
		"release": func(tx pgx.Tx, h holds.Hold) error {
			_, err := f.book.Release(ctx, tx, holds.Release{IDs: []string{h.ID}})
			return err
		},
		"place": func(tx pgx.Tx, h holds.Hold) error { return place(tx, "another", h.ID) },
		"id":    func(tx pgx.Tx, h holds.Hold) error { return place(tx, "the same", "elsewhere") },
	} {
		h := f.mustPlace(holds.Placement{ID: name, Lines: []holds.Line{capacity(name, 2, 9)}})
		first := begin(t, f.pool, pgx.ReadCommitted)
		if name == "id" {
			require.NoError(t, place(first, "the same", "there"))
		} else {
			_, err := f.ledger.Credit(ctx, first, budget.Credit{Scope: name, Amount: 1})
			require.NoError(t, err)
		}
		try := func() error { return pgx.BeginFunc(ctx, f.pool, func(tx pgx.Tx) error { return call(tx, h) }) }
		second := pgtest.Going(try)
		pgtest.WaitQueued(t, f.pool, 1)
		require.NoError(t, first.Commit(ctx))
		require.Equal(t, sqlstate.SerializationFailure, code(<-second), name)
		if name == "id" {
			require.ErrorIs(t, try(), holds.ErrConflict)
		} else {
			require.NoError(t, try(), name)
		}
	}
	f.verify()
}

// meanwhile is a pool on which something happens before each query for one row.
type meanwhile struct {
	budget.Querier
	happens func()
}

func (m meanwhile) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	m.happens()
	return m.Querier.QueryRow(ctx, sql, args...)
}

// History asks for events, and if there are none, why.
func TestHistory_OfAHoldPlacedAfterItsFirstLookIsThere(t *testing.T) {
	t.Parallel()
	f := setUp(t, holds.Config{})
	history, err := f.book.History(t.Context(), meanwhile{f.pool, func() {
		f.mustPlace(holds.Placement{ID: "h", Lines: []holds.Line{capacity("a", 1, 1)}})
	}}, "", "h", "")
	require.NoError(t, err)
	require.Len(t, history, 1)
	require.Equal(t, holds.EventPlaced, history[0].Kind)
}

// Two that place the same id on different scopes meet at the id: the second waits, and gets the first one's hold, if
// that stays.
func TestPlace_OfAnIDThatIsBeingPlacedElsewhereWaitsForTheOutcome(t *testing.T) {
	t.Parallel()
	for _, stays := range []bool{true, false} {
		f := setUp(t, holds.Config{})
		first := begin(t, f.pool, pgx.ReadCommitted)
		_, err := f.book.Place(t.Context(), first, holds.Placement{ID: "h", TTL: time.Minute, Lines: []holds.Line{capacity("a", 1, 1)}})
		require.NoError(t, err)
		second := pgtest.Going(func() error {
			_, err := f.place(holds.Placement{ID: "h", Lines: []holds.Line{capacity("b", 1, 1)}})
			return err
		})
		pgtest.WaitQueued(t, f.pool, 1)
		if stays {
			require.NoError(t, first.Commit(t.Context()))
			require.ErrorIs(t, <-second, holds.ErrConflict)
		} else {
			require.NoError(t, first.Rollback(t.Context()))
			require.NoError(t, <-second)
		}
		_, held := f.usage("b")
		require.Equal(t, !stays, held == 1)
		f.verify()
	}
}
