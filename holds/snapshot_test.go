package holds_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/internal/sqlstate"
	"github.com/pgmetered/metered/internal/uuidv7"
)

// A transaction with an old snapshot saw a scope's last entry. Since then others came, and a purge took the one that
// the next would collide with.
func TestTransitions_OldSnapshotNeverGetsPastAPurge(t *testing.T) {
	t.Parallel()
	for _, iso := range isolations[1:] {
		t.Run(string(iso), func(t *testing.T) {
			t.Parallel()
			f := setUp(t, holds.Config{})
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
					_, err := f.book.Place(ctx, tx, holds.Request{TTL: time.Minute, Lines: []holds.Line{capacity(h.Lines[0].Scope, 1, 90)}})
					return err
				},
				"charge": func(tx pgx.Tx, h holds.Hold) error {
					_, err := f.ledger.Charge(ctx, tx, budget.Charge{Scope: h.Lines[0].Scope, Amount: 1, Limits: []budget.Limit{budget.Lifetime(90)}})
					return err
				},
			}
			for name, call := range calls {
				for _, seen := range []int{1, 2, 15, 16, 17} {
					scope := fmt.Sprintf("%s %d", name, seen)
					ttl := time.Hour
					if name == "expire" {
						ttl = time.Minute
					}
					h := f.mustPlace(holds.Request{ID: scope, TTL: ttl, Lines: []holds.Line{capacity(scope, 1, 90)}})
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
			f.verify()
		})
	}
}

// Placed before, says the snapshot, and released by now: the answer would be a hold
// that nobody has.
func TestPlace_AnOldSnapshotGivesNobodyAHoldBack(t *testing.T) {
	t.Parallel()
	for _, iso := range isolations[1:] {
		t.Run(string(iso), func(t *testing.T) {
			t.Parallel()
			f := setUp(t, holds.Config{})
			r := holds.Request{ID: "h", TTL: time.Minute, Lines: []holds.Line{capacity("a", 1, 1)}}
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
			f.mustPlace(holds.Request{ID: id, Lines: []holds.Line{capacity("a", 1, 1)}})
			_, err = f.release(id)
			require.NoError(t, err)
			f.clock.Advance(time.Minute)
			n, err := f.book.Purge(t.Context(), f.pool, holds.PurgeOptions{OlderThan: time.Second})
			require.NoError(t, err)
			require.Equal(t, int64(1), n)
			r := holds.Request{ID: id, TTL: time.Minute, Lines: []holds.Line{capacity("b", 1, 1)}}
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

// Placed before, says the first look, and deleted while this waits for the hold's row.
func TestPlace_OfAHoldThatIsBeingPurgedIsASerializationFailure(t *testing.T) {
	t.Parallel()
	f := setUp(t, holds.Config{})
	r := holds.Request{ID: "h", Lines: []holds.Line{capacity("a", 1, 1)}}
	f.mustPlace(r)
	_, err := f.release("h")
	require.NoError(t, err)
	f.clock.Advance(time.Minute)
	purging := begin(t, f.pool, pgx.ReadCommitted)
	_, err = purging.Exec(t.Context(), `select metered.purge_holds('-infinity', metered.clock(), 10, 1000)`)
	require.NoError(t, err)
	late := pgtest.Going(func() error { _, err := f.place(r); return err })
	pgtest.WaitQueued(t, f.pool, 1)
	require.NoError(t, purging.Commit(t.Context()))
	require.Equal(t, sqlstate.SerializationFailure, code(<-late))
	f.mustPlace(r)
	f.verify()
}

// A hold may outlive another with a younger id: ids that were retired with that one stay retired.
func TestPurge_OfAnOlderIDTakesNothingBack(t *testing.T) {
	t.Parallel()
	f := setUp(t, holds.Config{})
	line := []holds.Line{capacity("a", 1, 5)}
	older, younger := uuidAt(noon), uuidAt(noon.Add(time.Second))
	f.clock.Advance(time.Second)
	for _, id := range []string{older, younger} {
		f.mustPlace(holds.Request{ID: id, TTL: time.Hour, Lines: line})
	}
	for _, id := range []string{younger, older} {
		_, err := f.release(id)
		require.NoError(t, err)
		f.clock.Advance(time.Minute)
		n, err := f.purge()
		require.NoError(t, err)
		require.Equal(t, int64(1), n)
		_, err = f.place(holds.Request{ID: younger, Lines: line})
		require.ErrorIs(t, err, holds.ErrRetired)
	}
	f.verify()
}

// Locks are there to wait at: without them, the second writer of a scope, or of an id, fails and has to try again.
func TestTransitions_WithoutTheirLocksAreSerializationFailures(t *testing.T) {
	t.Parallel()
	f := setUp(t, holds.Config{})
	ctx := t.Context()
	execute(t, f.pool, `create or replace function metered._lock_keys(keys bigint[], wait_ms int) returns boolean
		language plpgsql volatile as 'begin return false; end'`)
	place := func(tx pgx.Tx, id, scope string) error {
		_, err := f.book.Place(ctx, tx, holds.Request{ID: id, TTL: time.Minute, Lines: []holds.Line{capacity(scope, 2, 9)}})
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
		h := f.mustPlace(holds.Request{ID: name, Lines: []holds.Line{capacity(name, 2, 9)}})
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

// faces are all the ways in which an error shows itself to a caller.
func faces(err error) []string {
	out := []string{err.Error()}
	for _, verb := range []string{"%v", "%+v", "%#v", "%s", "%q", "%x", "%d"} {
		out = append(out, fmt.Sprintf(verb, err))
	}
	j, jsonErr := json.Marshal(err)
	out = append(out, string(j), fmt.Sprint(jsonErr))
	for e := err; e != nil; e = errors.Unwrap(e) {
		out = append(out, fmt.Sprintf("%T", e))
	}
	return out
}

// For every call, another holder's hold, in any state, is as unknown as one that does not exist, also where its id is
// so old that it might have been purged.
func TestHolder_AnothersHoldLooksLikeNone(t *testing.T) {
	t.Parallel()
	f := setUp(t, holds.Config{})
	ctx := t.Context()
	old, purged := uuidAt(noon.Add(-40*24*time.Hour)), uuidAt(noon.Add(-39*24*time.Hour))
	f.clock.Set(noon.Add(-39 * 24 * time.Hour))
	f.mustPlace(holds.Request{ID: purged, Lines: []holds.Line{capacity("purged", 1, 1)}})
	_, err := f.release(purged)
	require.NoError(t, err)
	f.clock.Set(noon)
	ids := map[string]string{"held": "held", "captured": "captured", "released": "released", "expired": "expired", "old": old}
	for state, id := range ids {
		ttl := time.Hour
		if state == "expired" {
			ttl = time.Minute
		}
		f.mustPlace(holds.Request{ID: id, Holder: "ann", TTL: ttl, Lines: []holds.Line{capacity(state, 1, 1)}})
	}
	_, err = f.capture(holds.Capture{IDs: []string{"captured"}, All: true})
	require.NoError(t, err)
	_, err = f.release("released")
	require.NoError(t, err)
	f.clock.Advance(time.Minute)
	_, err = f.book.Purge(ctx, f.pool, holds.PurgeOptions{OlderThan: 30 * 24 * time.Hour})
	require.NoError(t, err)
	before := f.dump()

	calls := map[string]func(tx pgx.Tx, id, holder string) (any, error){
		"get":     func(tx pgx.Tx, id, holder string) (any, error) { return f.book.Get(ctx, tx, "", id, holder) },
		"history": func(tx pgx.Tx, id, holder string) (any, error) { return f.book.History(ctx, tx, "", id, holder) },
		"capture": func(tx pgx.Tx, id, holder string) (any, error) {
			return f.book.Capture(ctx, tx, holds.Capture{IDs: []string{id}, All: true, Holder: holder})
		},
		"capture a line": func(tx pgx.Tx, id, holder string) (any, error) {
			return f.book.Capture(ctx, tx, holds.Capture{IDs: []string{id}, Holder: holder, Lines: []holds.Line{{Scope: "no", Amount: 9}}})
		},
		"release": func(tx pgx.Tx, id, holder string) (any, error) {
			return f.book.Release(ctx, tx, holds.Release{IDs: []string{id}, Holder: holder})
		},
		"extend": func(tx pgx.Tx, id, holder string) (any, error) {
			return f.book.Extend(ctx, tx, holds.Extend{IDs: []string{id}, Holder: holder, By: 100 * time.Hour})
		},
		"refund": func(tx pgx.Tx, id, holder string) (any, error) {
			return f.book.Return(ctx, tx, holds.Return{IDs: []string{id}, Holder: holder, All: true})
		},
	}
	for name, call := range calls {
		for state, id := range ids {
			unknown, wanted := "none", holds.ErrUnknown
			if state == "old" { // a purged hold may have had it
				unknown, wanted = uuidAt(noon.Add(-40*24*time.Hour)), holds.ErrRetired
			}
			tx := begin(t, f.pool, pgx.ReadCommitted)
			nothing, want := call(tx, unknown, "ben")
			require.ErrorIs(t, want, wanted)
			got, err := call(tx, id, "ben")
			require.Equal(t, faces(want), faces(err), "%s of a hold that is %s", name, state)
			require.Equal(t, nothing, got)
			require.NoError(t, tx.Rollback(ctx))
			require.Equal(t, wanted == holds.ErrUnknown, holds.IsOthers(err))
			require.False(t, holds.IsOthers(want))
		}
	}
	require.Equal(t, before, f.dump())

	// Beside one's own, too, in either order.
	f.mustPlace(holds.Request{ID: "mine", Holder: "ben", TTL: time.Hour, Lines: []holds.Line{capacity("mine", 1, 1)}})
	for _, pair := range [][2][]string{{{"mine", "held"}, {"mine", "none"}}, {{"held", "mine"}, {"none", "mine"}}} {
		var errs [2]error
		for i, ids := range pair {
			_, errs[i] = do(f, func(ctx context.Context, tx pgx.Tx) ([]holds.Hold, error) {
				return f.book.Release(ctx, tx, holds.Release{IDs: ids, Holder: "ben"})
			})
		}
		require.Equal(t, faces(errs[1]), faces(errs[0]))
	}
	require.Equal(t, holds.Held, f.get("mine").State)
	// Another tenant's is another hold.
	_, err = f.book.Get(ctx, f.pool, "acme", "held", "")
	require.ErrorIs(t, err, holds.ErrUnknown)
	f.verify()
}

// Nor does it show by how long the answer takes, by its locks, or by an error of the moment: the holder is checked
// before anything of the hold is locked.
func TestHolder_AnothersHoldIsNotLockedNorWaitedFor(t *testing.T) {
	t.Parallel()
	for i := range 2 * len(isolations) {
		iso, taken := isolations[i/2], i%2 == 0
		t.Run(fmt.Sprintf("%s, locks taken %v", iso, taken), func(t *testing.T) {
			t.Parallel()
			f := setUp(t, holds.Config{})
			ctx := t.Context()
			for _, id := range []string{"held", "captured", "mine"} {
				holder := map[string]string{"mine": "ben"}[id]
				if holder == "" {
					holder = "ann"
				}
				f.mustPlace(holds.Request{ID: id, Holder: holder, Lines: []holds.Line{capacity(id, 1, 1)}})
			}
			_, err := f.capture(holds.Capture{IDs: []string{"captured"}, All: true})
			require.NoError(t, err)
			calls := map[string]func(tx pgx.Tx, ids ...string) ([]holds.Hold, error){
				"capture": func(tx pgx.Tx, ids ...string) ([]holds.Hold, error) {
					return f.book.Capture(ctx, tx, holds.Capture{IDs: ids, All: true, Holder: "ben"})
				},
				"release": func(tx pgx.Tx, ids ...string) ([]holds.Hold, error) {
					return f.book.Release(ctx, tx, holds.Release{IDs: ids, Holder: "ben"})
				},
				"extend": func(tx pgx.Tx, ids ...string) ([]holds.Hold, error) {
					return f.book.Extend(ctx, tx, holds.Extend{IDs: ids, Holder: "ben", By: time.Second})
				},
				"refund": func(tx pgx.Tx, ids ...string) ([]holds.Hold, error) {
					return f.book.Return(ctx, tx, holds.Return{IDs: ids, Holder: "ben", All: true})
				},
			}
			var old []pgx.Tx // from before ann's next calls
			for range calls {
				tx := begin(t, f.pool, iso)
				_, err := f.book.Get(ctx, tx, "", "none", "")
				require.ErrorIs(t, err, holds.ErrUnknown)
				old = append(old, tx)
			}
			_, err = f.extend(time.Second, "held")
			require.NoError(t, err)
			_, err = do(f, refund(f, "captured"))
			require.NoError(t, err)
			if taken {
				busy := begin(t, f.pool, pgx.ReadCommitted)
				require.NoError(t, f.ledger.Lock(ctx, busy, "held", "captured"))
			}
			for name, call := range calls {
				tx := old[0]
				old = old[1:]
				for _, with := range [][]string{nil, {"mine"}} {
					nothing, want := call(tx, append(slices.Clone(with), "none")...)
					require.ErrorIs(t, want, holds.ErrUnknown)
					for _, id := range []string{"held", "captured"} {
						got, err := call(tx, append(slices.Clone(with), id)...)
						require.Equal(t, faces(want), faces(err), "%s of one that is %s", name, id)
						require.Equal(t, nothing, got)
						got, err = call(tx, append([]string{id}, with...)...)
						require.Equal(t, faces(want), faces(err), "%s of one that is %s", name, id)
						require.Equal(t, nothing, got)
					}
				}
				var locks int
				var wrote bool // or locked a row
				require.NoError(t, tx.QueryRow(ctx, `select count(*), pg_current_xact_id_if_assigned() is not null from pg_locks
					where pid = pg_backend_pid() and locktype in ('advisory', 'tuple') and mode <> 'SIReadLock'`).Scan(&locks, &wrote))
				require.Zero(t, locks, name)
				// Above READ COMMITTED an id that is unknown is looked for by a write that is taken back.
				require.Equal(t, iso != pgx.ReadCommitted, wrote, name)
				require.NoError(t, tx.Rollback(ctx))
			}
		})
	}
}

// uuidAt is a new UUIDv7 of another time.
func uuidAt(at time.Time) string {
	ms := fmt.Sprintf("%012x", at.UnixMilli())
	return ms[:8] + "-" + ms[8:] + uuidv7.New()[13:]
}

// A call on two holds waits for the scope of the first. The second was released, is purged
// meanwhile, and its id is another's then: that is none of its holds, and its scope is
// not locked.
func TestRelease_OfAHoldPlacedWhileItWaitsKeepsNothingBack(t *testing.T) {
	t.Parallel()
	for name, call := range map[string]func(f *fixture, ids ...string) error{
		"release": func(f *fixture, ids ...string) error { _, err := f.release(ids...); return err },
		"capture": func(f *fixture, ids ...string) error {
			_, err := f.capture(holds.Capture{IDs: ids, All: true})
			return err
		},
		"extend": func(f *fixture, ids ...string) error { _, err := f.extend(time.Second, ids...); return err },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := setUp(t, holds.Config{})
			f.mustPlace(holds.Request{ID: "second", Lines: []holds.Line{capacity("c", 1, 5)}})
			_, err := f.release("second")
			require.NoError(t, err)
			f.clock.Advance(time.Minute)
			f.mustPlace(holds.Request{ID: "first", Lines: []holds.Line{capacity("a", 1, 5)}})
			require.ErrorIs(t, call(f, "first", "third"), holds.ErrUnknown)
			busy := begin(t, f.pool, pgx.ReadCommitted)
			require.NoError(t, f.ledger.Lock(t.Context(), busy, "a"))
			late := pgtest.Going(func() error { return call(f, "first", "second") })
			pgtest.WaitQueued(t, f.pool, 1)
			n, err := f.purge()
			require.NoError(t, err)
			require.Equal(t, int64(1), n)
			f.mustPlace(holds.Request{ID: "second", Lines: []holds.Line{capacity("b", 1, 5)}})
			require.NoError(t, busy.Commit(t.Context()))
			require.ErrorIs(t, <-late, holds.ErrUnknown)
			require.Equal(t, holds.Held, f.get("first").State)
			_, held := f.usage("b")
			require.Equal(t, int64(1), held)
			f.verify()
			require.NoError(t, call(f, "first", "second"))
			f.verify()
		})
	}
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
		f.mustPlace(holds.Request{ID: "h", Lines: []holds.Line{capacity("a", 1, 1)}})
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
		_, err := f.book.Place(t.Context(), first, holds.Request{ID: "h", TTL: time.Minute, Lines: []holds.Line{capacity("a", 1, 1)}})
		require.NoError(t, err)
		second := pgtest.Going(func() error {
			_, err := f.place(holds.Request{ID: "h", Lines: []holds.Line{capacity("b", 1, 1)}})
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

// A purge while the clock is ahead retires the ids that it deleted, and nothing newer.
func TestPurge_UnderAClockThatIsAheadRetiresNoNewID(t *testing.T) {
	t.Parallel()
	f := setUp(t, holds.Config{})
	line := []holds.Line{capacity("a", 1, 5)}
	old := f.mustPlace(holds.Request{ID: uuidAt(noon), Lines: line})
	f.mustPlace(holds.Request{ID: "no time", Lines: line})
	_, err := f.release(old.ID, "no time")
	require.NoError(t, err)
	f.clock.Advance(10 * 24 * time.Hour)
	n, err := f.book.Purge(t.Context(), f.pool, holds.PurgeOptions{OlderThan: time.Second})
	require.NoError(t, err)
	require.Equal(t, int64(2), n)
	f.clock.Set(noon.Add(time.Second))
	for id, want := range map[string]error{old.ID: holds.ErrRetired, uuidAt(noon.Add(-time.Hour)): holds.ErrRetired, uuidAt(noon.Add(time.Millisecond)): nil} {
		_, err = f.place(holds.Request{ID: id, Lines: line})
		require.ErrorIs(t, err, want)
	}
}

// A client with a clock that is ahead makes an id: it is kept until its own time is old enough. To forget it earlier,
// all ids up to its time would have to be retired.
func TestPurge_KeepsAnIDWithATimeInTheFuture(t *testing.T) {
	t.Parallel()
	f := setUp(t, holds.Config{})
	line := []holds.Line{capacity("a", 1, 5)}
	early := f.mustPlace(holds.Request{ID: uuidAt(noon.Add(time.Hour)), Lines: line})
	_, err := f.release(early.ID)
	require.NoError(t, err)
	purge := func() int64 {
		dry, err := f.book.Purge(t.Context(), f.pool, holds.PurgeOptions{OlderThan: time.Minute, DryRun: true})
		require.NoError(t, err)
		n, err := f.book.Purge(t.Context(), f.pool, holds.PurgeOptions{OlderThan: time.Minute})
		require.NoError(t, err)
		require.Equal(t, dry, n)
		return n
	}
	f.clock.Advance(10 * time.Minute)
	require.Zero(t, purge())
	f.mustPlace(holds.Request{ID: uuidAt(f.clock.Now()), TTL: time.Second, Lines: line})
	f.clock.Advance(time.Hour)
	require.Equal(t, int64(1), purge())
	_, err = f.place(holds.Request{ID: early.ID, Lines: line})
	require.ErrorIs(t, err, holds.ErrRetired)
}

func TestPurge_DoesNotWaitForEverForASessionThatSharesTheHorizon(t *testing.T) {
	t.Parallel()
	f := setUp(t, holds.Config{})
	open := begin(t, f.pool, pgx.RepeatableRead)
	_, err := f.book.Place(t.Context(), open, holds.Request{ID: uuidAt(noon), TTL: time.Minute, Lines: []holds.Line{capacity("a", 1, 5)}})
	require.NoError(t, err)
	ledger, err := budget.New(budget.Config{LockTimeout: 50 * time.Millisecond})
	require.NoError(t, err)
	hasty, err := holds.New(ledger, holds.Config{})
	require.NoError(t, err)
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	_, err = hasty.Purge(ctx, f.pool, holds.PurgeOptions{})
	require.ErrorIs(t, err, budget.ErrBusy)
	require.NoError(t, open.Commit(t.Context()))
	_, err = hasty.Purge(t.Context(), f.pool, holds.PurgeOptions{})
	require.NoError(t, err)
}

func TestExpire_OfAHoldPurgedWhileItWaitsIsUnknown(t *testing.T) {
	t.Parallel()
	f := setUp(t, holds.Config{Notify: true})
	h := f.mustPlace(holds.Request{ID: "h", Lines: []holds.Line{capacity("a", 1, 5)}})
	_, err := f.release("h")
	require.NoError(t, err)
	f.clock.Advance(time.Hour)
	busy := begin(t, f.pool, pgx.ReadCommitted)
	require.NoError(t, f.ledger.Lock(t.Context(), busy, "a"))
	late := pgtest.Going(func() error {
		return pgx.BeginFunc(t.Context(), f.pool, func(tx pgx.Tx) error {
			_, _, err := f.book.Expire(t.Context(), tx, holds.Expire{ID: "h", Deadline: h.Deadline})
			return err
		})
	})
	pgtest.WaitQueued(t, f.pool, 1)
	n, err := f.book.Purge(t.Context(), f.pool, holds.PurgeOptions{OlderThan: time.Second})
	require.NoError(t, err)
	require.Equal(t, int64(1), n)
	require.NoError(t, busy.Commit(t.Context()))
	require.ErrorIs(t, <-late, holds.ErrUnknown)
}

// Two placements end holds that are due and that both come across, one of them in
// several steps: the rows of its second step come before those of its first in the
// order of rows.
func TestPlace_EndingManyHoldsInStepsDoesNotDeadlock(t *testing.T) {
	t.Parallel()
	f := setUp(t, holds.Config{})
	const both, more = 2, 520
	line := func(scope string, n int64) holds.Line { return capacity(scope, n, 10*more) }
	// In the order of rows: "last" is due after all others on s, "shared" is the first.
	f.mustPlace(holds.Request{ID: "gate", TTL: 3 * time.Minute, Lines: []holds.Line{line("s", 1), line("u", 1)}})
	f.mustPlace(holds.Request{ID: "last", TTL: 3 * time.Minute, Lines: []holds.Line{line("s", 1), line("t", 1)}})
	f.mustPlace(holds.Request{ID: "shared", TTL: time.Minute, Lines: []holds.Line{line("s", 1), line("t", 1)}})
	for i := range more {
		f.mustPlace(holds.Request{ID: fmt.Sprint(i), TTL: 2 * time.Minute, Lines: []holds.Line{line("s", 1)}})
	}
	f.clock.Advance(time.Hour)
	wait := begin(t, f.pool, pgx.ReadCommitted)
	_, err := f.book.Place(t.Context(), wait, holds.Request{ID: "ends gate", TTL: time.Minute, Lines: []holds.Line{line("u", 1)}})
	require.NoError(t, err)
	place := func(id, scope string, amount, limit int64) <-chan error {
		return pgtest.Going(func() error {
			_, err := f.place(holds.Request{ID: id, Lines: []holds.Line{capacity(scope, amount, limit)}})
			return err
		})
	}
	all := place("all of s", "s", more, more)
	pgtest.WaitQueued(t, f.pool, 1)
	other := place("all of t", "t", both, both)
	pgtest.WaitFor(t, "the other to wait or to be done", func() bool { return len(other) > 0 || pgtest.Queued(t, f.pool) == 2 })
	require.NoError(t, wait.Commit(t.Context()))
	require.NoError(t, <-all)
	require.NoError(t, <-other)
	// Let in for good: all holds that stood in the way have ended, and a clock that goes back does not bring them back.
	f.clock.Set(noon)
	_, held := f.usage("s")
	require.Equal(t, int64(more), held)
	f.verify()
}

// A call that waits for the row of a hold that another transaction is ending waits no longer than for a lock, or than
// its session's own setting allows. The session has that setting back afterwards.
func TestLockTimeout_BoundsTheWaitForAHoldsRow(t *testing.T) {
	t.Parallel()
	f := setUp(t, holds.Config{})
	ctx := t.Context()
	ledger, book := f.ledger, f.book
	waiting := func(timeout time.Duration) {
		var err error
		ledger, err = budget.New(budget.Config{LockTimeout: timeout})
		require.NoError(t, err)
		book, err = holds.New(ledger, holds.Config{})
		require.NoError(t, err)
	}
	place := func(id string, scopes ...string) func(tx pgx.Tx) error {
		r := holds.Request{ID: id, TTL: time.Minute}
		for _, scope := range scopes {
			r.Lines = append(r.Lines, capacity(scope, 1, 1))
		}
		return func(tx pgx.Tx) error { _, err := book.Place(ctx, tx, r); return err }
	}
	h := f.mustPlace(holds.Request{ID: "h", Lines: []holds.Line{capacity("a", 1, 1), capacity("b", 1, 1)}})
	live := holds.Request{ID: "live", TTL: time.Hour, Lines: []holds.Line{capacity("d", 1, 1)}}
	f.mustPlace(live)
	f.mustPlace(holds.Request{ID: "too", TTL: time.Hour, Lines: []holds.Line{capacity("e", 1, 1)}})
	f.clock.Advance(time.Minute)
	row := func(id string) func(pgx.Tx) error {
		return func(tx pgx.Tx) error {
			_, err := tx.Exec(ctx, `select from metered.holds where id = $1 for update`, id)
			return err
		}
	}
	for name, c := range map[string]struct{ busy, call func(tx pgx.Tx) error }{
		"charge": {row("h"), func(tx pgx.Tx) error {
			_, err := ledger.Charge(ctx, tx, budget.Charge{Scope: "b", Amount: 1, Limits: []budget.Limit{budget.Lifetime(1)}})
			return err
		}},
		"place":      {place("ends h", "a"), place("after h", "b")},
		"same":       {place("two places", "x"), place("two places", "y")},
		"same again": {row("live"), func(tx pgx.Tx) error { _, err := book.Place(ctx, tx, live); return err }},
		"release": {row("live"), func(tx pgx.Tx) error {
			_, err := book.Release(ctx, tx, holds.Release{IDs: []string{"live"}})
			return err
		}},
		"release two": {row("live"), func(tx pgx.Tx) error {
			_, err := book.Release(ctx, tx, holds.Release{IDs: []string{"live", "too"}})
			return err
		}},
		"extend": {row("live"), func(tx pgx.Tx) error {
			_, err := book.Extend(ctx, tx, holds.Extend{IDs: []string{"live"}, By: time.Second})
			return err
		}},
		"expire": {row("h"), func(tx pgx.Tx) error {
			_, _, err := book.Expire(ctx, tx, holds.Expire{ID: "h", Deadline: h.Deadline})
			return err
		}},
	} {
		for own, timeout := range map[string]time.Duration{"0": 100 * time.Millisecond, "50ms": time.Hour} {
			waiting(timeout)
			busy, tx := begin(t, f.pool, pgx.ReadCommitted), begin(t, f.pool, pgx.ReadCommitted)
			require.NoError(t, c.busy(busy), name)
			_, err := tx.Exec(ctx, `set local statement_timeout = '20s'; set local lock_timeout = '`+own+`'`)
			require.NoError(t, err)
			require.ErrorIs(t, c.call(tx), budget.ErrBusy, "%s, %s", name, own)
			require.NoError(t, busy.Rollback(ctx))
			require.NoError(t, tx.Rollback(ctx))
		}

		tx := begin(t, f.pool, pgx.ReadCommitted)
		_, err := tx.Exec(ctx, `set local lock_timeout = '7654ms'`)
		require.NoError(t, err)
		require.NoError(t, c.call(tx), name)
		var setting string
		require.NoError(t, tx.QueryRow(ctx, "show lock_timeout").Scan(&setting))
		require.Equal(t, "7654ms", setting, name)
		require.NoError(t, tx.Rollback(ctx))
	}
	f.verify()
}
