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

	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/purge"
)

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
	f.mustPlace(holds.Placement{ID: purged, Lines: []holds.Line{capacity("purged", 1, 1)}})
	_, err := f.release(purged)
	require.NoError(t, err)
	f.clock.Set(noon)
	ids := map[string]string{"held": "held", "captured": "captured", "released": "released", "expired": "expired", "old": old}
	for state, id := range ids {
		ttl := time.Hour
		if state == "expired" {
			ttl = time.Minute
		}
		f.mustPlace(holds.Placement{ID: id, Holder: "ann", TTL: ttl, Lines: []holds.Line{capacity(state, 1, 1)}})
	}
	_, err = f.capture(holds.Capture{IDs: []string{"captured"}, All: true})
	require.NoError(t, err)
	_, err = f.release("released")
	require.NoError(t, err)
	f.clock.Advance(time.Minute)
	_, err = purge.Holds.Delete(ctx, f.pool, purge.Options{OlderThan: 30 * 24 * time.Hour})
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
	f.mustPlace(holds.Placement{ID: "mine", Holder: "ben", TTL: time.Hour, Lines: []holds.Line{capacity("mine", 1, 1)}})
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
				f.mustPlace(holds.Placement{ID: id, Holder: holder, Lines: []holds.Line{capacity(id, 1, 1)}})
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
