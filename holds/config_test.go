package holds_test

import (
	"context"
	"encoding/json"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/bounds"
)

// everyWrite calls each method that writes, with a holder and a note, and returns the error of each.
func everyWrite(f *fixture, book *holds.Book, holder string, note budget.Note) map[string]error {
	ctx, tx := f.Context(), begin(f, f.pool, pgx.ReadCommitted)
	defer func() { require.NoError(f, tx.Rollback(context.Background())) }()
	ids := func(name string) []string { return []string{name} }
	errs := map[string]error{}
	r := holds.Placement{ID: "placed", Holder: holder, TTL: time.Minute, Lines: []holds.Line{capacity("a", 1, 99)}, Note: note}
	_, errs["place"] = book.Place(ctx, tx, r)
	_, errs["claim"] = book.Claim(ctx, tx, holds.Claim{Key: seat("a"), Holder: "ann", TTL: time.Minute, Note: note})
	_, errs["extend"] = book.Extend(ctx, tx, holds.Extend{IDs: ids("h"), Holder: holder, By: time.Second, Note: note})
	_, errs["capture"] = book.Capture(ctx, tx, holds.Capture{IDs: ids("h"), Holder: holder, All: true, Note: note})
	_, errs["refund"] = book.Return(ctx, tx, holds.Return{IDs: ids("captured"), Holder: holder, All: true, Note: note})
	_, errs["release"] = book.Release(ctx, tx, holds.Release{IDs: ids("other"), Holder: holder, Note: note})
	_, _, errs["expire"] = book.Expire(ctx, tx, holds.Expire{ID: "other", Deadline: noon, Note: note})
	return errs
}

func TestConfig_CanDemandAHolderAndAnActor(t *testing.T) {
	t.Parallel()
	f := setUp(t, holds.Config{})
	for _, id := range []string{"h", "other", "captured"} {
		f.mustPlace(holds.Placement{ID: id, Holder: "ann", TTL: time.Hour, Lines: []holds.Line{capacity("a", 1, 99)}})
	}
	_, err := f.capture(holds.Capture{IDs: []string{"captured"}, All: true})
	require.NoError(t, err)
	book := func(cfg holds.Config) *holds.Book {
		b, err := holds.New(f.ledger, cfg)
		require.NoError(t, err)
		return b
	}
	strict := book(holds.Config{RequireHolder: true, RequireActor: true})
	ann := budget.Note{Actor: "user:ann"}
	noActor := map[string]string{"place": "Placement.Note.Actor", "claim": "Placement.Note.Actor", "extend": "Note.Actor",
		"capture": "Capture.Note.Actor", "refund": "Note.Actor", "release": "Note.Actor", "expire": "Expire.Note.Actor"}
	ledger, err := budget.New(budget.Config{RequireActor: true})
	require.NoError(t, err)
	ofLedger, err := holds.New(ledger, holds.Config{}) // a transition writes entries of this ledger
	require.NoError(t, err)
	for _, c := range []struct {
		book    *holds.Book
		holder  string
		note    budget.Note
		refused map[string]string // the argument, by call
	}{
		{f.book, "", budget.Note{}, nil},
		{strict, "ann", ann, nil},
		{strict, "", ann, map[string]string{"place": "Placement.Holder", "extend": "Holder", "capture": "Capture.Holder", "refund": "Holder", "release": "Holder"}},
		{book(holds.Config{RequireHolder: true}), "ann", budget.Note{}, nil},
		{book(holds.Config{RequireActor: true}), "", ann, nil},
		{strict, "ann", budget.Note{Reason: "why"}, noActor},
		{ofLedger, "", budget.Note{Reason: "why"}, noActor},
		{ofLedger, "", ann, nil},
	} {
		for call, err := range everyWrite(f, c.book, c.holder, c.note) {
			if field := c.refused[call]; field != "" {
				requireArgument(t, err, field)
			} else {
				require.NoError(t, err, call)
			}
		}
	}
	_, err = strict.Place(t.Context(), untouchable{}, holds.Placement{Holder: "ann", TTL: time.Minute, Lines: []holds.Line{capacity("a", 1, 99)}, Note: ann,
		Charges: []budget.Charge{{Scope: "fee", Amount: 1}, {Scope: "tax", Amount: 1, Note: budget.Note{Reason: "why"}}}})
	requireArgument(t, err, "Placement.Charges[1].Note.Actor")
	// Reads, sweeps and expiries are the program's own.
	_, err = strict.Get(t.Context(), f.pool, "", "h", "")
	require.NoError(t, err)
	f.clock.Advance(time.Hour)
	report, err := strict.Sweep(t.Context(), f.pool, holds.SweepOptions{})
	require.NoError(t, err)
	require.Equal(t, 2, report.Expired)
	_, err = book(holds.Config{RequireHolder: true}).Release(t.Context(), untouchable{}, holds.Release{IDs: []string{"h"}, Captured: true})
	requireArgument(t, err, "Holder")
}

// A hold without a ceiling is extended further than any other could be, also by a book with a ceiling, which is not the
// hold's.
func TestExtend_HasNoCeilingWhereConfigured(t *testing.T) {
	t.Parallel()
	f := setUp(t, holds.Config{NoCeiling: true})
	h := f.mustPlace(holds.Placement{ID: "h", Lines: []holds.Line{capacity("a", 1, 1)}})
	require.Zero(t, h.Ceiling)
	h.Created = false
	require.Equal(t, h, f.get("h"))
	encoded, err := json.Marshal(h)
	require.NoError(t, err)
	require.NotContains(t, string(encoded), "ceiling")
	for n := range 3 {
		hs, err := f.extend(bounds.MaxLifetime, "h")
		require.NoError(t, err)
		require.Equal(t, h.Deadline.Add(time.Duration(n+1)*bounds.MaxLifetime), hs[0].Deadline)
		require.Equal(t, hs[0], f.get("h"))
	}
	other, err := holds.New(f.ledger, holds.Config{})
	require.NoError(t, err)
	_, err = do(f, func(ctx context.Context, tx pgx.Tx) ([]holds.Hold, error) {
		return other.Extend(ctx, tx, holds.Extend{IDs: []string{"h"}, By: 48 * time.Hour})
	})
	require.NoError(t, err)
	f.verify() // its history says the same

	// The largest TTL is as before, and so is everything else.
	_, err = f.place(holds.Placement{TTL: time.Hour + time.Second, Lines: []holds.Line{capacity("a", 1, 1)}})
	requireArgument(t, err, "Placement.TTL")
	c, err := f.claim(holds.Claim{Key: seat("a"), Holder: "ann"})
	require.NoError(t, err)
	require.Zero(t, c.Ceiling)
	_, err = f.capture(holds.Capture{IDs: []string{"h", c.ID}, All: true})
	require.NoError(t, err)
	f.verify()
}

// The reason of a release or a return is on the hold, in every answer. The reasons of earlier calls are not.
func TestRelease_ItsReasonIsOnTheHold(t *testing.T) {
	t.Parallel()
	f := setUp(t, holds.Config{})
	note := func(reason string) budget.Note { return budget.Note{Actor: "system", Reason: reason} }
	for _, id := range []string{"a", "b", "c"} {
		f.mustPlace(holds.Placement{ID: id, Note: note("placed"), Lines: []holds.Line{capacity(id, 2, 2)}})
		_, err := f.capture(holds.Capture{IDs: []string{id}, Keep: true, Lines: []holds.Line{{Scope: id, Amount: 1}}, Note: note("used")})
		require.NoError(t, err)
		require.Empty(t, f.get(id).Reason)
	}
	release := func(id, reason string) holds.Hold {
		hs, err := do(f, func(ctx context.Context, tx pgx.Tx) ([]holds.Hold, error) {
			return f.book.Release(ctx, tx, holds.Release{IDs: []string{id}, Note: note(reason)})
		})
		require.NoError(t, err)
		require.Equal(t, hs[0], f.get(id))
		return hs[0]
	}
	require.Equal(t, "payment_failed", release("a", "payment_failed").Reason)
	require.Empty(t, release("b", "").Reason)
	hs, err := f.capture(holds.Capture{IDs: []string{"c"}, All: true, Note: note("sold")})
	require.NoError(t, err)
	require.Empty(t, hs[0].Reason)
	giveBack := func(r holds.Return) holds.Hold {
		hs, err := do(f, func(ctx context.Context, tx pgx.Tx) ([]holds.Hold, error) { return f.book.Return(ctx, tx, r) })
		require.NoError(t, err)
		require.Equal(t, hs[0], f.get("c"))
		return hs[0]
	}
	part := giveBack(holds.Return{IDs: []string{"c"}, Lines: []holds.Line{{Scope: "c", Amount: 1}}, Note: note("in part")})
	require.Equal(t, []any{holds.Captured, ""}, []any{part.State, part.Reason})
	whole := giveBack(holds.Return{IDs: []string{"c"}, All: true, Note: note("event_cancelled")})
	require.Equal(t, []any{holds.Returned, "event_cancelled"}, []any{whole.State, whole.Reason})
	require.Equal(t, "payment_failed", queryRow[string](t, f.pool, `select reason from metered.holds_words where id = 'a'`))
	f.verify()
}

// A sweep says when it looked, whether it found anything or not: the clock of its last batch.
func TestSweep_SaysWhenItLooked(t *testing.T) {
	t.Parallel()
	f := setUp(t, holds.Config{})
	for range 3 {
		f.mustPlace(holds.Placement{Lines: []holds.Line{capacity("a", 1, 9)}})
	}
	report, err := f.book.Sweep(t.Context(), f.pool, holds.SweepOptions{})
	require.NoError(t, err)
	require.Equal(t, holds.SweepReport{Batches: 1, ScannedAt: noon}, report)
	f.clock.Advance(time.Minute)
	var at []time.Time
	report, err = f.book.Sweep(t.Context(), f.pool, holds.SweepOptions{Batch: 2, Progress: func(r holds.SweepReport) {
		at = append(at, r.ScannedAt)
		f.clock.Advance(time.Second)
	}})
	require.NoError(t, err)
	require.Equal(t, []time.Time{noon.Add(time.Minute), noon.Add(time.Minute + time.Second)}, at)
	require.Equal(t, holds.SweepReport{Expired: 3, Batches: 2, ScannedAt: at[1]}, report)
}

// It goes on from any answer, with any history before it, and also from one that shows a hold as ended that went on by
// the clock of the primary. Events that do not follow from the snapshot are an error.
func TestRebuild_GoesOnFromASnapshot(t *testing.T) {
	t.Parallel()
	f := setUp(t, holds.Config{})
	var snapshots []holds.Hold
	snapshots = append(snapshots, f.mustPlace(holds.Placement{ID: "h", Lines: []holds.Line{capacity("a", 3, 9)}, Charges: []budget.Charge{{Scope: "b", Amount: 1}}}))
	hs, err := f.capture(holds.Capture{IDs: []string{"h"}, Keep: true, Lines: []holds.Line{{Scope: "a", Amount: 1}}})
	require.NoError(t, err)
	f.clock.Advance(time.Minute)
	ahead := f.get("h")
	require.Equal(t, holds.Expired, ahead.State)
	f.clock.Set(noon.Add(time.Second))
	snapshots = append(snapshots, hs[0], ahead)
	hs, err = f.extend(time.Minute, "h")
	require.NoError(t, err)
	snapshots = append(snapshots, hs[0])
	hs, err = f.capture(holds.Capture{IDs: []string{"h"}, All: true})
	require.NoError(t, err)
	snapshots = append(snapshots, hs[0])
	history, err := f.book.History(t.Context(), f.pool, "", "h", "")
	require.NoError(t, err)
	for _, s := range snapshots {
		lines := s.Lines[0]
		for from := 0; from <= s.Version; from++ {
			got, err := holds.Rebuild(s, history[from:])
			require.NoError(t, err)
			require.Equal(t, hs[0], got)
		}
		same, err := holds.Rebuild(s, nil)
		require.NoError(t, err)
		s.Created, s.Charges = false, nil
		require.Equal(t, s, same)
		require.Equal(t, lines, s.Lines[0], "the snapshot is as it was")
	}
	for what, wrong := range map[string]struct {
		snapshot holds.Hold
		later    []holds.HistoryEvent
	}{
		"nothing":         {holds.Hold{}, nil},
		"a gap":           {snapshots[0], history[2:]},
		"another's":       {holds.Hold{ID: "other", Version: 1, State: holds.Held}, history[1:]},
		"another tenant":  {holds.Hold{ID: "h", Tenant: "t", Version: 1, State: holds.Held}, history[1:]},
		"no beginning":    {holds.Hold{}, history[1:]},
		"after its end":   {holds.Hold{ID: "h", Version: 2, State: holds.Released}, history[2:]},
		"out of order":    {snapshots[0], []holds.HistoryEvent{history[2], history[1]}},
		"without version": {snapshots[0], []holds.HistoryEvent{{ID: "h", Kind: holds.EventReleased}}},
	} {
		_, err := holds.Rebuild(wrong.snapshot, wrong.later)
		require.Error(t, err, what)
	}
}
