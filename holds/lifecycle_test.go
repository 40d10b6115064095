package holds_test

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/ledger"
)

func TestPlace_HoldsUnitsAndChargesOrNothing(t *testing.T) {
	t.Parallel()
	f := setUp(t, holds.Config{})
	h := f.mustPlace(holds.Placement{
		ID: "h1", Holder: "ann", TTL: 5 * time.Minute, Metadata: json.RawMessage(`{"row":  7}`),
		Lines:   []holds.Line{capacity("seat/1", 1, 1), capacity("block/a", 1, 2)},
		Charges: []budget.Charge{{Scope: "user/ann", Amount: 1, Limits: []budget.Limit{{Max: 10, Window: 5 * time.Minute}}}},
		Note:    budget.Note{Actor: "user:ann"},
	})
	require.True(t, h.Created)
	require.Equal(t, noon.Add(5*time.Minute), h.Deadline)
	require.Equal(t, 5*time.Minute, h.Remaining())
	require.Len(t, h.Charges, 1)

	got := f.get("h1")
	h.Created, h.Charges = false, nil
	require.Equal(t, h, got)

	_, err := f.place(holds.Placement{Holder: "ben", Lines: []holds.Line{capacity("block/a", 1, 2), capacity("seat/1", 1, 1)},
		Charges: []budget.Charge{{Scope: "user/ben", Amount: 1}}})
	var exceeded *budget.ExceededError
	require.ErrorAs(t, err, &exceeded)
	require.Len(t, exceeded.Refusals, 1)
	r := exceeded.Refusals[0]
	require.Equal(t, "seat/1", r.Scope)
	require.Equal(t, int64(1), r.Requested)
	require.Equal(t, int64(0), r.Available)
	require.Equal(t, int64(1), r.Limit.Max)
	require.Equal(t, 5*time.Minute, r.HoldDue)
	require.Equal(t, 5*time.Minute, r.RetryAfter)
	used, held := f.usage("block/a")
	require.Equal(t, []int64{0, 1}, []int64{used, held})
	used, _ = f.usage("user/ben")
	require.Zero(t, used)
	f.verify()
}

func TestPlace_TheSameIDIsPlacedOnce(t *testing.T) {
	t.Parallel()
	f := setUp(t, holds.Config{})
	r := holds.Placement{ID: "h1", Holder: "ann", Lines: []holds.Line{capacity("room", 1, 1)}, Charges: []budget.Charge{{Scope: "user/ann", Amount: 3}}}
	first := f.mustPlace(r)
	f.clock.Advance(10 * time.Second)
	again := f.mustPlace(r)
	require.False(t, again.Created)
	require.Equal(t, first.Deadline, again.Deadline)
	require.Equal(t, 50*time.Second, again.Remaining())
	used, _ := f.usage("user/ann")
	require.Equal(t, int64(3), used)

	for what, change := range map[string]func(r *holds.Placement){
		"amount":   func(r *holds.Placement) { r.Lines = []holds.Line{capacity("room", 2, 5)} },
		"scope":    func(r *holds.Placement) { r.Lines = []holds.Line{capacity("hall", 1, 1)} },
		"charge":   func(r *holds.Placement) { r.Charges = []budget.Charge{{Scope: "user/ann", Amount: 4}} },
		"holder":   func(r *holds.Placement) { r.Holder = "ben" },
		"metadata": func(r *holds.Placement) { r.Metadata = json.RawMessage(`{"a": 1}`) },
	} {
		other := r
		change(&other)
		_, err := f.place(other)
		require.ErrorIs(t, err, holds.ErrConflict, what)
	}
	for what, change := range map[string]func(r *holds.Placement){
		"limits": func(r *holds.Placement) { r.Lines = []holds.Line{capacity("room", 1, 9)} },
		"TTL":    func(r *holds.Placement) { r.TTL = 2 * time.Minute },
		"grace":  func(r *holds.Placement) { r.Grace = time.Second },
		"note":   func(r *holds.Placement) { r.Note = budget.Note{Actor: "eve"} },
	} {
		other := r
		change(&other)
		again, err := f.place(other)
		require.NoError(t, err, what)
		require.Equal(t, []any{false, first.Deadline}, []any{again.Created, again.Deadline}, what)
	}
	other := r
	other.Tenant = "acme"
	_, err := f.place(other)
	require.ErrorIs(t, err, budget.ErrExceeded, "another tenant's id is another id; the scope is the same")

	f.clock.Advance(time.Minute)
	h, err := f.place(r)
	require.ErrorIs(t, err, inState(holds.Expired))
	require.Equal(t, holds.Expired, h.State)
	f.verify()
}

func TestExpiry_CountsWhenDueWithoutASweeper(t *testing.T) {
	t.Parallel()
	f := setUp(t, holds.Config{})
	f.mustPlace(holds.Placement{ID: "h1", Lines: []holds.Line{capacity("room", 1, 1), capacity("house", 1, 9)}})
	f.clock.Advance(time.Minute - time.Microsecond)
	_, err := f.place(holds.Placement{ID: "early", Lines: []holds.Line{capacity("room", 1, 1)}})
	require.ErrorIs(t, err, budget.ErrExceeded)
	charge := budget.Charge{Scope: "room", Amount: 1, Limits: []budget.Limit{budget.Lifetime(1)}}
	_, err = f.ledger.Check(t.Context(), f.pool, charge)
	require.ErrorIs(t, err, budget.ErrExceeded)
	f.clock.Advance(time.Microsecond)
	_, held := f.usage("room")
	require.Zero(t, held)
	_, err = f.ledger.Check(t.Context(), f.pool, charge)
	require.NoError(t, err)
	require.Equal(t, holds.Expired, f.get("h1").State)
	_, err = f.capture(holds.Capture{IDs: []string{"h1"}, All: true})
	require.ErrorIs(t, err, inState(holds.Expired))
	_, err = f.extend(time.Minute, "h1")
	require.ErrorIs(t, err, inState(holds.Expired))
	f.mustPlace(holds.Placement{ID: "h2", Lines: []holds.Line{capacity("room", 1, 1)}})
	f.verify()
	_, err = f.charge(budget.Charge{Scope: "house", Amount: 9, Limits: []budget.Limit{budget.Lifetime(9)}})
	require.NoError(t, err)
	f.verify()
	report, err := f.book.Sweep(t.Context(), f.pool, holds.SweepOptions{})
	require.NoError(t, err)
	require.Equal(t, holds.SweepReport{Expired: 1, Batches: 1, ScannedAt: f.clock.Now()}, report)
	f.clock.Advance(time.Minute)
	report, err = f.book.Sweep(t.Context(), f.pool, holds.SweepOptions{})
	require.NoError(t, err)
	require.Equal(t, holds.SweepReport{Expired: 1, Batches: 1, ScannedAt: f.clock.Now()}, report)
	f.verify()
}

// A call that ends a due hold on its way does so for the system, not for its own actor. Where Expire ends the hold, the
// event has Expire's note.
func TestHistory_NamesTheSystemForAHoldThatEndedByTime(t *testing.T) {
	t.Parallel()
	var told []budget.Note
	f := setUp(t, holds.Config{Subscribers: []holds.Subscriber{func(_ context.Context, _ pgx.Tx, tr holds.Transition) error {
		if tr.Kind == holds.EventExpired {
			told = append(told, tr.Note)
		}
		return nil
	}}})
	system, job := budget.Note{Actor: "system"}, budget.Note{Actor: "job:cleanup"}
	ends := map[string]func(){
		"place": func() {
			f.mustPlace(holds.Placement{Lines: []holds.Line{capacity("place", 1, 1)}, Note: job})
		},
		"charge": func() {
			_, err := f.charge(budget.Charge{Scope: "charge", Amount: 1, Limits: []budget.Limit{budget.Lifetime(1)}, Note: job})
			require.NoError(t, err)
		},
		"sweep":  func() {},
		"expire": func() {},
	}
	placed := map[string]holds.Hold{}
	for name := range ends {
		placed[name] = f.mustPlace(holds.Placement{ID: name, Lines: []holds.Line{capacity(name, 1, 1)}})
	}
	f.clock.Advance(time.Minute)
	for _, end := range ends {
		end()
	}
	for _, name := range []string{"expire", "charge"} {
		_, ended, err := f.expire(holds.Expire{ID: name, Deadline: placed[name].Deadline, Note: job})
		require.NoError(t, err)
		require.True(t, ended)
	}
	_, err := f.book.Sweep(t.Context(), f.pool, holds.SweepOptions{})
	require.NoError(t, err)
	require.Equal(t, []budget.Note{job, job, system, system}, told)
	for name := range ends {
		want := system
		if name == "expire" {
			want = job
		}
		history, err := f.book.History(t.Context(), f.pool, "", name, "")
		require.NoError(t, err)
		require.Equal(t, holds.EventExpired, history[1].Kind)
		require.Equal(t, want, history[1].Note, name)
		for e, err := range f.ledger.Entries(t.Context(), f.pool, name, budget.EntriesOptions{}) {
			require.NoError(t, err)
			if e.Kind == "expire" {
				require.Equal(t, want, e.Note, name)
			}
		}
	}
}

// A scope may be ahead of a clock that was set back: the history has its time.
func TestHistory_OfACaptureHasTheEntriesOfTheLedger(t *testing.T) {
	t.Parallel()
	f := setUp(t, holds.Config{})
	f.mustPlace(holds.Placement{ID: "h", Lines: []holds.Line{{Scope: "ahead", Amount: 5}, {Scope: "behind", Amount: 5}}})
	f.clock.Advance(10 * time.Second)
	_, err := f.charge(budget.Charge{Scope: "ahead", Amount: 1})
	require.NoError(t, err)
	f.clock.Advance(-5 * time.Second)
	used := []holds.Line{{Scope: "ahead", Amount: 2}, {Scope: "behind", Amount: 2}}
	_, err = f.capture(holds.Capture{IDs: []string{"h"}, Keep: true, Lines: used})
	require.NoError(t, err)
	used[0].Amount, used[1].Amount = 9, 9 // 6 more of each than are left
	_, err = f.capture(holds.Capture{IDs: []string{"h"}, Over: holds.OverAllowed, Lines: used})
	require.NoError(t, err)
	history, err := f.book.History(t.Context(), f.pool, "", "h", "")
	require.NoError(t, err)
	captures := append(history[1].Captures, history[2].Captures...)
	require.Len(t, captures, 6)
	for _, c := range captures {
		require.Equal(t, noon.Add(map[string]time.Duration{"ahead": 10 * time.Second, "behind": 5 * time.Second}[c.Scope]), c.At)
		var found bool
		for e, err := range f.ledger.Entries(t.Context(), f.pool, c.Scope, budget.EntriesOptions{}) {
			require.NoError(t, err)
			if e.Seq == c.Seq {
				require.Equal(t, []any{c.Amount, c.At}, []any{e.Amount, e.At.UTC()})
				found = true
			}
		}
		require.True(t, found)
	}
	require.Equal(t, noon.Add(5*time.Second), history[1].At)
	f.verify()
}

// A hold is extended up to its ceiling, and not a microsecond further.
func TestExtend_EndsAtTheCeiling(t *testing.T) {
	t.Parallel()
	f := setUp(t, holds.Config{MaxTTL: time.Minute, MaxLifetime: time.Hour})
	h := f.mustPlace(holds.Placement{ID: "h", TTL: time.Minute, Lines: []holds.Line{capacity("room", 1, 1)}})
	left := noon.Add(time.Hour).Sub(h.Deadline)
	_, err := f.extend(left+time.Microsecond, "h")
	require.ErrorIs(t, err, holds.ErrCeiling)
	require.Equal(t, h.Deadline, f.get("h").Deadline)
	_, err = f.extend(left, "h")
	require.NoError(t, err)
	require.Equal(t, noon.Add(time.Hour), f.get("h").Deadline.UTC())
	_, err = f.extend(time.Microsecond, "h")
	require.ErrorIs(t, err, holds.ErrCeiling)
	f.verify()
}

// Some JSON of Go is no JSON to jsonb.
func TestRefusal_ShowsAHoldWithAnyMetadata(t *testing.T) {
	t.Parallel()
	f := setUp(t, holds.Config{})
	for name, metadata := range map[string]string{
		"nul": `{"a": "x\u0000y"}`, "half a pair": `{"a": "\ud83d"}`, "number": `{"a": 1e200000}`, "twice": `{"b": 1, "a": 2, "a": 3}`,
	} {
		h := f.mustPlace(holds.Placement{ID: name, Metadata: json.RawMessage(metadata), Lines: []holds.Line{capacity(name, 1, 1)}})
		_, err := f.extend(100*time.Hour, name)
		require.ErrorIs(t, err, holds.ErrCeiling)
		_, err = f.release(name)
		require.NoError(t, err)
		for _, raising := range []bool{false, true} {
			for what, prepare := range map[string]func() (*holdsCall, error){
				"place": func() (*holdsCall, error) {
					return placeHold(f.book, holds.Placement{ID: name, TTL: time.Minute, Metadata: h.Metadata, Lines: []holds.Line{capacity(name, 1, 1)}})
				},
				"capture": func() (*holdsCall, error) {
					return captureHolds(f.book, holds.Capture{IDs: []string{name}, All: true})
				},
				"release": func() (*holdsCall, error) { return releaseHolds(f.book, holds.Release{IDs: []string{name}}) },
				"extend": func() (*holdsCall, error) {
					return extendHolds(f.book, holds.Extend{IDs: []string{name}, By: time.Second})
				},
				"refund": func() (*holdsCall, error) {
					return returnHolds(f.book, holds.Return{IDs: []string{name}, All: true})
				},
			} {
				p, err := prepare()
				require.NoError(t, err)
				_, err = p.Scan(f.pool.QueryRow(t.Context(), p.SQL, p.Args(ledger.Sending{WaitMS: 5000, Raising: raising})...))
				var state *holds.StateError
				require.ErrorAs(t, err, &state, "%s of %s", what, name)
				require.Equal(t, holds.Released, state.State)
				require.Equal(t, metadata, string(state.Hold.Metadata))
			}
		}
	}
	f.verify()
}

// A charge that finds a due time passed at which nothing is due any more says so in its
// entry, or each one after it would look again.
func TestCharge_ForgetsADueTimeThatHasPassed(t *testing.T) {
	t.Parallel()
	f := setUp(t, holds.Config{})
	for _, id := range []string{"soon", "later"} {
		f.mustPlace(holds.Placement{ID: id, TTL: map[string]time.Duration{"soon": time.Minute, "later": time.Hour}[id], Lines: []holds.Line{capacity("a", 1, 5)}})
	}
	_, err := f.release("soon")
	require.NoError(t, err)
	f.clock.Advance(2 * time.Minute)
	_, err = f.charge(budget.Charge{Scope: "a", Amount: 1})
	require.NoError(t, err)
	due := queryRow[time.Time](t, f.pool, "select next_due from metered.ledger where scope = 'a' order by seq desc limit 1")
	require.True(t, due.After(f.clock.Now()), due)
}

// The server has room for so many locks, of all sessions together.
func TestSweep_TakesNoMoreThan2000LocksAtATime(t *testing.T) {
	t.Parallel()
	var locks []int
	f := setUp(t, holds.Config{Subscribers: []holds.Subscriber{func(ctx context.Context, tx pgx.Tx, tr holds.Transition) error {
		if tr.Kind != holds.EventExpired {
			return nil
		}
		var n int
		err := tx.QueryRow(ctx, `select count(*) from pg_locks where locktype = 'advisory' and pid = pg_backend_pid()`).Scan(&n)
		locks = append(locks, n)
		return err
	}}})
	for i := range 50 {
		r := holds.Placement{}
		for j := range 50 {
			r.Lines = append(r.Lines, capacity(fmt.Sprintf("seat/%d/%d", i, j), 1, 1))
		}
		f.mustPlace(r)
	}
	f.clock.Advance(time.Hour)
	report, err := f.book.Sweep(t.Context(), f.pool, holds.SweepOptions{})
	require.NoError(t, err)
	require.Equal(t, holds.SweepReport{Expired: 50, Batches: 2, ScannedAt: f.clock.Now()}, report)
	require.Equal(t, slices.Concat(slices.Repeat([]int{2000}, 40), slices.Repeat([]int{500}, 10)), locks)
	f.sums()
}

// The available units of Usage can all be held, and a refusal has the same number.
func TestPlace_HoldsTakeFromPrepaidCredit(t *testing.T) {
	t.Parallel()
	f := setUp(t, holds.Config{})
	_, err := do(f, func(ctx context.Context, tx pgx.Tx) (budget.Posted, error) {
		return f.ledger.Credit(ctx, tx, budget.Credit{Scope: "wallet", Amount: 10})
	})
	require.NoError(t, err)
	_, err = f.charge(budget.Charge{Scope: "wallet", Amount: 3})
	require.NoError(t, err)
	f.mustPlace(holds.Placement{Lines: []holds.Line{capacity("wallet", 5, 0)}})

	usage, err := f.ledger.Usage(t.Context(), f.pool, budget.Query{Scope: "wallet"})
	require.NoError(t, err)
	require.Equal(t, int64(2), usage[0].Available(0), "credited 10, spent 3, held 5")
	require.Equal(t, int64(6), usage[0].Available(4))
	_, err = f.charge(budget.Charge{Scope: "wallet", Amount: 3, Limits: []budget.Limit{budget.Prepaid(0)}})
	var exceeded *budget.ExceededError
	require.ErrorAs(t, err, &exceeded)
	require.Equal(t, usage[0].Available(0), exceeded.Refusals[0].Available)
	f.mustPlace(holds.Placement{Lines: []holds.Line{capacity("wallet", 2, 0)}})
	usage, err = f.ledger.Usage(t.Context(), f.pool, budget.Query{Scope: "wallet"})
	require.NoError(t, err)
	require.Zero(t, usage[0].Available(0))
	_, err = f.charge(budget.Charge{Scope: "wallet", Amount: 3}) // no limit: overdrawn
	require.NoError(t, err)
	usage, err = f.ledger.Usage(t.Context(), f.pool, budget.Query{Scope: "wallet"})
	require.NoError(t, err)
	require.Zero(t, usage[0].Available(0), "and not less")
}
