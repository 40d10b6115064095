package holds_test

import (
	"context"
	"fmt"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/ledger"
	"github.com/pgmetered/metered/internal/pgtest"
)

// Placing a hold again that has ended returns how it ended, by an answer and by an error alike.
func TestPlace_OfAHoldThatHasEndedSaysHow(t *testing.T) {
	t.Parallel()
	f := setUp(t, holds.Config{})
	ends := map[holds.State]func(id string){
		holds.Captured: func(id string) {
			_, err := f.capture(holds.Capture{IDs: []string{id}, All: true})
			require.NoError(t, err)
		},
		holds.Released: func(id string) { _, err := f.release(id); require.NoError(t, err) },
		holds.Expired:  func(string) {},
		"swept": func(id string) {
			h := f.get(id)
			f.clock.Set(h.Due)
			_, ended, err := f.expire(holds.Expire{ID: id, Deadline: h.Deadline})
			require.NoError(t, err)
			require.True(t, ended)
		},
	}
	request := func(id string) holds.Placement {
		return holds.Placement{ID: id, TTL: time.Minute, Lines: []holds.Line{capacity(id, 1, 1)}}
	}
	for how, end := range ends {
		f.mustPlace(request(string(how)))
		end(string(how))
	}
	f.clock.Advance(time.Hour)
	for how := range ends {
		want := map[bool]holds.State{true: holds.Expired, false: how}[how == "swept"]
		p, err := placeHold(f.book, request(string(how)))
		require.NoError(t, err)
		for _, raising := range []bool{false, true} {
			tx := begin(t, f.pool, pgx.ReadCommitted)
			_, err := p.Scan(tx.QueryRow(t.Context(), p.SQL, p.Args(ledger.Sending{WaitMS: 5000, Raising: raising})...))
			var state *holds.StateError
			require.ErrorAs(t, err, &state, "%s, %v", how, raising)
			require.Equal(t, []any{string(how), want, want}, []any{state.ID, state.State, state.Hold.State}, raising)
			require.Equal(t, raising, tx.Commit(t.Context()) != nil, "the transaction is usable unless it was to fail")
		}
	}
	f.verify()
}

// An entry names its hold, unless it is about several at once.
func TestEntries_NameTheHoldThatTheyAreAbout(t *testing.T) {
	t.Parallel()
	f := setUp(t, holds.Config{})
	place := func(ids ...string) {
		for _, id := range ids {
			f.mustPlace(holds.Placement{ID: id, Lines: []holds.Line{capacity("a", 2, 9)}})
		}
	}
	place("1", "2", "3", "4")
	_, err := f.capture(holds.Capture{IDs: []string{"1"}, Lines: []holds.Line{{Scope: "a", Amount: 1}}})
	require.NoError(t, err)
	_, err = f.release("2")
	require.NoError(t, err)
	_, err = f.release("3", "4")
	require.NoError(t, err)
	place("5", "6", "7")
	f.clock.Advance(time.Minute)
	_, _, err = f.expire(holds.Expire{ID: "5", Deadline: f.clock.Now()})
	require.NoError(t, err)
	_, err = f.book.Sweep(t.Context(), f.pool, holds.SweepOptions{})
	require.NoError(t, err)
	var got []string
	for e, err := range f.ledger.Entries(t.Context(), f.pool, "a", budget.EntriesOptions{}) {
		require.NoError(t, err)
		got = append(got, fmt.Sprintf("%s %d %s", e.Kind, e.Amount, e.Hold))
	}
	require.Equal(t, []string{
		"hold 2 1", "hold 2 2", "hold 2 3", "hold 2 4", "capture 1 1", "release 1 1", "release 2 2", "release 4 ",
		"hold 2 5", "hold 2 6", "hold 2 7", "expire 2 5", "expire 4 ",
	}, got)
}

// forget purges the ledger of scopes that have been idle for a minute.
func (f *fixture) forget() (forgotten int) {
	f.Helper()
	report, err := f.ledger.Purge(f.Context(), f.pool, budget.PurgeOptions{OlderThan: time.Minute, Forget: func(string) bool { return true }})
	require.NoError(f, err)
	return report.Forgotten
}

func TestForget_AScopeIsKeptWhileAHoldOrAClaimOfItCounts(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	f := setUp(t, holds.Config{})
	name := holds.Claim{Key: holds.Key{Type: "name", Value: "ann"}, Holder: "ann", TTL: time.Hour}
	claim, err := f.claim(name)
	require.NoError(t, err)
	f.mustPlace(holds.Placement{Lines: []holds.Line{{Scope: "stock", Amount: 1}}, TTL: time.Hour})
	f.clock.Advance(30 * time.Minute)
	require.Zero(t, f.forget(), "both are held")

	_, err = f.capture(holds.Capture{IDs: []string{claim.ID}, All: true})
	require.NoError(t, err)
	f.clock.Advance(24 * time.Hour)
	_, err = f.book.Sweep(ctx, f.pool, holds.SweepOptions{})
	require.NoError(t, err)
	require.Equal(t, 1, f.forget(), "the claim stands, and the stock was free when its hold fell due")
	f.clock.Advance(24 * time.Hour)
	require.Zero(t, f.forget())
	name.Holder = "bob"
	_, err = f.claim(name)
	require.ErrorIs(t, err, holds.ErrTaken)

	_, err = do(f, func(ctx context.Context, tx pgx.Tx) ([]holds.Hold, error) {
		return f.book.Return(ctx, tx, holds.Return{IDs: []string{claim.ID}, All: true})
	})
	require.NoError(t, err)
	f.clock.Advance(24 * time.Hour)
	require.Equal(t, 1, f.forget(), "the claim was given back")
	claim, err = f.claim(name)
	require.NoError(t, err)
	_, err = f.release(claim.ID)
	require.NoError(t, err)
	f.clock.Advance(24 * time.Hour)
	require.Equal(t, 1, f.forget(), "the claim was released")
	f.mustPlace(holds.Placement{Lines: []holds.Line{{Scope: claim.Lines[0].Scope, Amount: 1, Limits: []budget.Limit{budget.Lifetime(1)}}}})
	f.verify()
}

// Its hold is how a claim that was captured is found, and given back: a purge leaves it
// until then.
func TestPurge_KeepsAClaimThatStands(t *testing.T) {
	t.Parallel()
	f := setUp(t, holds.Config{})
	name := holds.Claim{Key: holds.Key{Type: "name", Value: "ann"}, Holder: "ann"}
	claim, err := f.claim(name)
	require.NoError(t, err)
	_, err = f.capture(holds.Capture{IDs: []string{claim.ID}, All: true})
	require.NoError(t, err)
	purge := func() int64 {
		f.clock.Set(later(f.clock.Now(), time.Now()).Add(time.Hour)) // the claim's id has the machine's time
		n, err := f.purge()
		require.NoError(t, err)
		return n
	}
	require.Zero(t, purge())
	name.Holder = "bob"
	_, err = f.claim(name)
	require.ErrorIs(t, err, holds.ErrTaken)
	_, err = do(f, refund(f, claim.ID))
	require.NoError(t, err)
	require.Equal(t, int64(1), purge())
	_, err = f.claim(name)
	require.NoError(t, err)
	f.verify()
}

// A hold remembers the charge that captured it by its number, which is another's by
// now: of a hold of the same id, even, in another tenant.
func TestForget_ACaptureThatWasForgottenIsNotRefundedFromAnother(t *testing.T) {
	t.Parallel()
	f := setUp(t, holds.Config{})
	use := func(tenant string) {
		f.mustPlace(holds.Placement{Tenant: tenant, ID: "h", Lines: []holds.Line{{Scope: "stock", Amount: 1}}})
		_, err := f.capture(holds.Capture{Tenant: tenant, IDs: []string{"h"}, All: true})
		require.NoError(t, err)
	}
	refund := func(tenant string) error {
		_, err := do(f, func(ctx context.Context, tx pgx.Tx) ([]holds.Hold, error) {
			return f.book.Return(ctx, tx, holds.Return{Tenant: tenant, IDs: []string{"h"}, All: true})
		})
		return err
	}
	use("a")
	f.clock.Advance(time.Hour)
	require.Equal(t, 1, f.forget())
	require.ErrorIs(t, refund("a"), holds.ErrNotReturnable)
	use("b")
	require.ErrorIs(t, refund("a"), holds.ErrNotReturnable)
	require.NoError(t, refund("b"))
	used, _ := f.usage("stock")
	require.Zero(t, used)
}

// Nor where the clock was set back since, to the very time of that charge.
func TestForget_NorFromOneOfTheSameTime(t *testing.T) {
	t.Parallel()
	f := setUp(t, holds.Config{})
	for _, id := range []string{"forgotten", "there"} {
		f.clock.Set(noon)
		f.mustPlace(holds.Placement{ID: id, Lines: []holds.Line{{Scope: "stock", Amount: 1}}})
		_, err := f.capture(holds.Capture{IDs: []string{id}, All: true})
		require.NoError(t, err)
		if id == "forgotten" {
			f.clock.Advance(time.Hour)
			require.Equal(t, 1, f.forget())
		}
	}
	f.refused(holds.Return{IDs: []string{"forgotten"}, All: true}, holds.ErrNotReturnable)
	_, err := do(f, refund(f, "there"))
	require.NoError(t, err)
	f.verify()
}

// With glibc's malloc as it starts out, a place or transition gives memory back to the
// kernel and asks for it again up to four times, which each time has to clear it: 15 to 19
// percent of its time. See docs/adr/0008-functions.md.
func TestMemory_CallsTakeNoneFromTheKernel(t *testing.T) {
	t.Parallel()
	pgtest.OnEachVersion(t)
	f := on(t, pgtest.Open(t), holds.Config{}, nil)                                              // with the real clock, which it is about
	f.mustPlace(holds.Placement{TTL: time.Minute, Lines: []holds.Line{capacity("first", 1, 1)}}) // the first-time work is done here
	f.pool.Reset()
	conn, err := f.pool.Acquire(t.Context())
	require.NoError(t, err)
	defer conn.Release()
	cycle := func(i int) {
		var h [2]holds.Hold
		for n := range h {
			r := holds.Placement{TTL: time.Minute, Lines: []holds.Line{capacity(fmt.Sprint("a", i%100), 1, 1_000_000)}}
			require.NoError(t, pgx.BeginFunc(t.Context(), conn, func(tx pgx.Tx) (err error) {
				h[n], err = f.book.Place(t.Context(), tx, r)
				return err
			}))
		}
		require.NoError(t, pgx.BeginFunc(t.Context(), conn, func(tx pgx.Tx) error {
			_, err := f.book.Capture(t.Context(), tx, holds.Capture{IDs: []string{h[0].ID}, All: true})
			return err
		}))
		require.NoError(t, pgx.BeginFunc(t.Context(), conn, func(tx pgx.Tx) error {
			_, err := f.book.Release(t.Context(), tx, holds.Release{IDs: []string{h[1].ID}})
			return err
		}))
	}
	for i := range 50 {
		cycle(i)
	}
	before := pageFaults(t, conn)
	cycles := pgtest.Size(60, 200)
	for i := range cycles {
		cycle(i)
	}
	faults := float64(pageFaults(t, conn)-before) / float64(4*cycles)
	t.Logf("%.2f page faults a call", faults)
	require.Less(t, faults, 5.0)
}

// pageFaults is how many pages the backend of a connection has got from the kernel without
// reading them from disk.
func pageFaults(t *testing.T, conn *pgxpool.Conn) int {
	t.Helper()
	var pid int
	var local bool
	require.NoError(t, conn.QueryRow(t.Context(), `select pg_backend_pid(), inet_server_addr() is null`).Scan(&pid, &local))
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if !local || err != nil || !strings.Contains(string(stat), "postgres") {
		t.Skip("the backend is not a process that can be looked at here")
	}
	maps, err := os.ReadFile(fmt.Sprintf("/proc/%d/maps", pid))
	if err != nil || strings.Contains(string(maps), "musl") {
		t.Skip("the server's malloc is not glibc's")
	}
	n, err := strconv.Atoi(strings.Fields(string(stat[strings.LastIndexByte(string(stat), ')')+1:]))[7])
	require.NoError(t, err)
	return n
}
