package holds_test

import (
	"context"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/ledger"
	"github.com/pgmetered/metered/internal/purge"
)

func TestCapture_ChargesTheUsedUnitsAndFreesTheRest(t *testing.T) {
	t.Parallel()
	f := setUp(t, holds.Config{})
	f.mustPlace(holds.Placement{ID: "h1", Lines: []holds.Line{capacity("gpu", 10, 10), capacity("disk", 5, 5)}})
	hs, err := f.capture(holds.Capture{IDs: []string{"h1"}, Lines: []holds.Line{{Scope: "gpu", Amount: 3}}, Keep: true})
	require.NoError(t, err)
	require.Equal(t, holds.Held, hs[0].State)
	used, held := f.usage("gpu")
	require.Equal(t, []int64{3, 7}, []int64{used, held})

	_, err = f.capture(holds.Capture{IDs: []string{"h1"}, Lines: []holds.Line{{Scope: "gpu", Amount: 8}}})
	var excess *holds.ExcessError
	require.ErrorAs(t, err, &excess)
	require.Equal(t, holds.ExcessError{ID: "h1", Scope: "gpu", Requested: 8, Open: 7}, *excess)

	_, err = f.capture(holds.Capture{IDs: []string{"h1"}, Over: holds.OverIfFits, Lines: []holds.Line{capacity("gpu", 8, 10)}})
	require.ErrorIs(t, err, budget.ErrExceeded)
	f.verify()

	hs, err = f.capture(holds.Capture{IDs: []string{"h1"}, Over: holds.OverIfFits, Entity: "order/7", Lines: []holds.Line{capacity("gpu", 8, 11)}})
	require.NoError(t, err)
	require.Equal(t, holds.Captured, hs[0].State)
	require.Equal(t, "order/7", hs[0].Entity)
	used, held = f.usage("gpu")
	require.Equal(t, []int64{11, 0}, []int64{used, held})
	used, held = f.usage("disk")
	require.Equal(t, []int64{0, 0}, []int64{used, held})

	_, err = f.capture(holds.Capture{IDs: []string{"h1"}, All: true})
	require.ErrorIs(t, err, inState(holds.Captured))
	_, err = f.release("h1")
	require.ErrorIs(t, err, inState(holds.Captured))
	f.verify()

	hs, err = do(f, refund(f, "h1"))
	require.NoError(t, err)
	require.Equal(t, holds.Returned, hs[0].State)
	used, _ = f.usage("gpu")
	require.Zero(t, used)
	_, err = do(f, refund(f, "h1"))
	require.ErrorIs(t, err, inState(holds.Returned))
	f.verify()
}

func TestCapture_OfAClaimInPartLeavesItsOwnUnit(t *testing.T) {
	t.Parallel()
	f := setUp(t, holds.Config{})
	key := holds.Key{Type: "machine", Value: "7"}
	for _, release := range []bool{true, false} {
		h, err := f.claim(holds.Claim{Key: key, Holder: "ann", Lines: []holds.Line{{Scope: "power", Amount: 9}}})
		require.NoError(t, err)
		tx := begin(t, f.pool, pgx.ReadCommitted)
		_, err = f.book.Capture(t.Context(), tx, holds.Capture{IDs: []string{h.ID}, Keep: true,
			Lines: []holds.Line{{Scope: "power", Amount: 1}, {Scope: h.Lines[0].Scope, Amount: 1}}})
		requireArgument(t, err, "Capture.Keep")
		hs, err := f.book.Capture(t.Context(), tx, holds.Capture{IDs: []string{h.ID}, Keep: true,
			Lines: []holds.Line{{Scope: "power", Amount: 1}, {Scope: h.Lines[0].Scope}}})
		require.NoError(t, err)
		require.Equal(t, []int64{1, 8}, []int64{hs[0].Lines[0].Open, hs[0].Lines[1].Open})
		require.NoError(t, tx.Commit(t.Context()))
		if release {
			_, err = f.release(h.ID)
			require.NoError(t, err)
		} else {
			f.clock.Advance(time.Minute)
		}
	}
	h, err := f.claim(holds.Claim{Key: key, Holder: "ben"})
	require.NoError(t, err, "for the next caller")
	_, err = f.capture(holds.Capture{IDs: []string{h.ID}, Lines: []holds.Line{{Scope: h.Lines[0].Scope, Amount: 1}}})
	require.NoError(t, err)
	_, err = f.claim(holds.Claim{Key: key, Holder: "ann"})
	require.ErrorIs(t, err, holds.ErrTaken)
	f.verify()
}

func TestCapture_ThatEndsAClaimTakesItsOwnUnit(t *testing.T) {
	t.Parallel()
	f := setUp(t, holds.Config{})
	key := holds.Key{Type: "machine", Value: "7"}
	h, err := f.claim(holds.Claim{Key: key, Holder: "ann", Lines: []holds.Line{{Scope: "power", Amount: 9}}})
	require.NoError(t, err)
	own, power := claimScope("", key), holds.Line{Scope: "power", Amount: 4}
	before := f.dump()
	for _, lines := range [][]holds.Line{{power}, {power, {Scope: own}}, {{Scope: own}}, {{Scope: "power"}}} {
		p, err := captureHolds(f.book, holds.Capture{IDs: []string{h.ID}, Lines: lines})
		require.NoError(t, err)
		for _, raising := range []bool{false, true} {
			tx := begin(t, f.pool, pgx.ReadCommitted)
			_, err = p.Scan(tx.QueryRow(t.Context(), p.SQL, p.Args(ledger.Sending{WaitMS: 5000, Raising: raising})...))
			requireArgument(t, err, "Capture.Lines")
			require.ErrorContains(t, err, own, "which scope")
			require.Equal(t, raising, tx.Commit(t.Context()) != nil, "the transaction is usable unless it was to fail")
		}
	}
	require.Equal(t, before, f.dump())
	hs, err := f.capture(holds.Capture{IDs: []string{h.ID}, Lines: []holds.Line{power, {Scope: own, Amount: 1}}})
	require.NoError(t, err)
	require.Equal(t, []int64{1, 4}, []int64{hs[0].Lines[0].Captured, hs[0].Lines[1].Captured})
	used, held := f.usage(own)
	require.Equal(t, []int64{1, 0}, []int64{used, held})
	_, err = do(f, refund(f, h.ID))
	require.NoError(t, err)
	_, err = f.claim(holds.Claim{Key: key, Holder: "ben"})
	require.NoError(t, err)
	f.verify()
}

// purgeOf takes all entries of a scope that were there away, but the first.
func (f *fixture) purgeOf(scope string) {
	f.Helper()
	for range 32 {
		_, err := do(f, func(ctx context.Context, tx pgx.Tx) (budget.Posted, error) {
			return f.ledger.Credit(ctx, tx, budget.Credit{Scope: scope, Amount: 1})
		})
		require.NoError(f, err)
	}
	f.clock.Advance(time.Hour)
	_, err := f.ledger.Purge(f.Context(), f.pool, budget.PurgeOptions{Scope: scope, OlderThan: time.Minute})
	require.NoError(f, err)
}

// refused tries a refund that says why it is refused, or raises it, and changes nothing.
func (f *fixture) refused(r holds.Return, want error) {
	f.Helper()
	before := f.dump()
	p, err := returnHolds(f.book, r)
	require.NoError(f, err)
	for _, raising := range []bool{false, true} {
		tx := begin(f, f.pool, pgx.ReadCommitted)
		_, err := p.Scan(tx.QueryRow(f.Context(), p.SQL, p.Args(ledger.Sending{WaitMS: 5000, Raising: raising})...))
		require.ErrorIs(f, err, want)
		require.Equal(f, raising, tx.Commit(f.Context()) != nil, "the transaction is usable unless it was to fail")
	}
	require.Equal(f, before, f.dump())
}

// The ledger no longer has the charge of one line of a confirmed claim: that line stays spent, and the key is free all
// the same.
func TestReturn_OfAClaimWithAPurgedSideLine(t *testing.T) {
	t.Parallel()
	f := setUp(t, holds.Config{})
	key := holds.Key{Type: "machine", Value: "7"}
	h, err := f.claim(holds.Claim{Key: key, Holder: "ann", Lines: []holds.Line{capacity("power", 4, 9), capacity("water", 3, 9)}})
	require.NoError(t, err)
	_, err = f.capture(holds.Capture{IDs: []string{h.ID}, Keep: true, Lines: []holds.Line{{Scope: "power", Amount: 1}}})
	require.NoError(t, err)
	_, err = f.capture(holds.Capture{IDs: []string{h.ID}, All: true})
	require.NoError(t, err)
	f.purgeOf("power")
	f.refused(holds.Return{IDs: []string{h.ID}, All: true}, holds.ErrNotReturnable)
	_, err = f.claim(holds.Claim{Key: key, Holder: "ben"})
	require.ErrorIs(t, err, holds.ErrTaken)

	hs, err := do(f, func(ctx context.Context, tx pgx.Tx) ([]holds.Hold, error) {
		return f.book.Return(ctx, tx, holds.Return{IDs: []string{h.ID}, SkipPurged: true, All: true})
	})
	require.NoError(t, err)
	require.Equal(t, holds.Returned, hs[0].State)
	for scope, want := range map[string]int64{"power": 4 - 32, "water": 0, claimScope("", key): 0} {
		used, _ := f.usage(scope)
		require.Equal(t, want, used, scope)
	}
	f.refused(holds.Return{IDs: []string{h.ID}, SkipPurged: true, All: true}, inState(holds.Returned))
	history, err := f.book.History(t.Context(), f.pool, "", h.ID, "")
	require.NoError(t, err)
	require.Equal(t, append(history[1].Captures, history[2].Captures[1]), history[3].Skipped, "both of power")
	require.Equal(t, "power", history[3].Skipped[0].Scope)
	f.verify()

	_, err = f.claim(holds.Claim{Key: key, Holder: "ben", TTL: time.Hour})
	require.NoError(t, err)
	f.clock.Set(later(f.clock.Now(), time.Now()).Add(time.Minute)) // the claim's id has the machine's time
	n, err := purge.Holds.Delete(t.Context(), f.pool, purge.Options{OlderThan: time.Second})
	require.NoError(t, err)
	require.Equal(t, int64(1), n)
	f.verify()
}

// The unit of the claim itself is not left spent: then nobody could claim the key.
func TestRefund_NeverLeavesAClaimsOwnUnitSpent(t *testing.T) {
	t.Parallel()
	f := setUp(t, holds.Config{})
	key := holds.Key{Type: "machine", Value: "7"}
	h, err := f.claim(holds.Claim{Key: key, Holder: "ann"})
	require.NoError(t, err)
	_, err = f.capture(holds.Capture{IDs: []string{h.ID}, All: true})
	require.NoError(t, err)
	f.purgeOf(claimScope("", key))
	f.refused(holds.Return{IDs: []string{h.ID}, SkipPurged: true, All: true}, holds.ErrNotReturnable)
	f.verify()
}

// One that was given back before, among others, is the one that is named.
func TestRefund_NamesTheHoldThatWasReturned(t *testing.T) {
	t.Parallel()
	f := setUp(t, holds.Config{})
	ids := []string{"first", "second", "third"}
	for _, id := range ids {
		f.mustPlace(holds.Placement{ID: id, Lines: []holds.Line{capacity("a", 1, 9)}})
	}
	_, err := f.capture(holds.Capture{IDs: ids, All: true})
	require.NoError(t, err)
	_, err = do(f, refund(f, "second"))
	require.NoError(t, err)
	f.refused(holds.Return{IDs: ids, All: true}, inState(holds.Returned))
	_, err = do(f, refund(f, ids...))
	var state *holds.StateError
	require.ErrorAs(t, err, &state)
	require.Equal(t, []string{"second", "second"}, []string{state.ID, state.Hold.ID})
	_, err = do(f, refund(f, "third", "first"))
	require.NoError(t, err)
	f.verify()
}

// Somebody has refunded part of a charge by hand: Return refunds the rest.
func TestReturn_GivesBackTheRest(t *testing.T) {
	t.Parallel()
	f := setUp(t, holds.Config{})
	f.mustPlace(holds.Placement{ID: "h", Lines: []holds.Line{capacity("a", 4, 9), capacity("b", 4, 9)}})
	_, err := f.capture(holds.Capture{IDs: []string{"h"}, All: true})
	require.NoError(t, err)
	history, err := f.book.History(t.Context(), f.pool, "", "h", "")
	require.NoError(t, err)
	charge := history[1].Captures[1]
	_, err = do(f, func(ctx context.Context, tx pgx.Tx) (budget.Posted, error) {
		return f.ledger.Refund(ctx, tx, budget.Refund{Scope: charge.Scope, Seq: charge.Seq, Amount: 1})
	})
	require.NoError(t, err)
	_, err = do(f, refund(f, "h"))
	require.NoError(t, err)
	for _, scope := range []string{"a", "b"} {
		used, _ := f.usage(scope)
		require.Zero(t, used)
	}
	require.Equal(t, holds.Returned, f.get("h").State)
	f.refused(holds.Return{IDs: []string{"h"}, All: true}, inState(holds.Returned))
	f.verify()
}

// A part is given back of several captures, oldest first, and the rest later.
func TestRefund_InPartsOverSeveralCaptures(t *testing.T) {
	t.Parallel()
	f := setUp(t, holds.Config{})
	f.mustPlace(holds.Placement{ID: "h", Lines: []holds.Line{capacity("a", 9, 9), capacity("b", 5, 9)}})
	for _, amount := range []int64{2, 3, 4} {
		_, err := f.capture(holds.Capture{IDs: []string{"h"}, Keep: amount < 4, Lines: []holds.Line{{Scope: "a", Amount: amount}, {Scope: "b", Amount: 1}}})
		require.NoError(t, err)
	}
	part := func(lines ...holds.Line) holds.Hold {
		t.Helper()
		h, err := do(f, func(ctx context.Context, tx pgx.Tx) ([]holds.Hold, error) {
			return f.book.Return(ctx, tx, holds.Return{IDs: []string{"h"}, Lines: lines})
		})
		require.NoError(t, err)
		f.verify()
		return h[0]
	}
	more := holds.Return{IDs: []string{"h"}, Lines: []holds.Line{{Scope: "b", Amount: 1}, {Scope: "a", Amount: 10}}}
	f.refused(more, holds.ErrExcess)
	h := part(holds.Line{Scope: "a", Amount: 4}) // 2 of the first capture, 2 of the second
	require.NotEqual(t, holds.Returned, h.State)
	require.Equal(t, int64(4), h.Lines[0].Refunded)
	used, _ := f.usage("a")
	require.Equal(t, int64(5), used)
	history, err := f.book.History(t.Context(), f.pool, "", "h", "")
	require.NoError(t, err)
	last := history[len(history)-1]
	require.Equal(t, holds.EventReturnedPart, last.Kind)
	require.Equal(t, []int64{2, 2}, []int64{last.Refunds[0].Amount, last.Refunds[1].Amount})
	more.Lines[1].Amount = 6
	f.refused(more, holds.ErrExcess)
	part(holds.Line{Scope: "b", Amount: 3})
	h = part(holds.Line{Scope: "a", Amount: 5})
	require.Equal(t, holds.Returned, h.State, "nothing is left")
	f.refused(holds.Return{IDs: []string{"h"}, Lines: []holds.Line{{Scope: "a", Amount: 1}}}, inState(holds.Returned))
}

// A claim is given up whole: its key would else be free in the ledger, and taken in the book.
func TestRefund_InPartsLeavesAClaimsOwnUnit(t *testing.T) {
	t.Parallel()
	f := setUp(t, holds.Config{})
	key := holds.Key{Type: "desk", Value: "4"}
	h, err := f.claim(holds.Claim{Key: key, Holder: "ann", Lines: []holds.Line{capacity("power", 4, 9)}})
	require.NoError(t, err)
	_, err = f.capture(holds.Capture{IDs: []string{h.ID}, All: true})
	require.NoError(t, err)
	own := holds.Line{Scope: claimScope("", key), Amount: 1}
	f.refused(holds.Return{IDs: []string{h.ID}, Lines: []holds.Line{own}}, budget.ErrArgument)
	f.refused(holds.Return{IDs: []string{h.ID}, Lines: []holds.Line{own, {Scope: "power", Amount: 3}}}, budget.ErrArgument)
	for _, lines := range [][]holds.Line{{{Scope: "power", Amount: 3}}, {{Scope: "power", Amount: 1}, own}} {
		_, err = do(f, func(ctx context.Context, tx pgx.Tx) ([]holds.Hold, error) {
			return f.book.Return(ctx, tx, holds.Return{IDs: []string{h.ID}, Lines: lines})
		})
		require.NoError(t, err)
	}
	_, err = f.claim(holds.Claim{Key: key, Holder: "ben"})
	require.NoError(t, err)
	f.verify()
}

// A hold that ended otherwise, or not yet, keeps its captured units: the ledger refunds them, not Return.
func TestRefund_OfACaptureInPartIsTheLedgers(t *testing.T) {
	t.Parallel()
	f := setUp(t, holds.Config{})
	for _, state := range []holds.State{holds.Held, holds.Released, holds.Expired} {
		id := string(state)
		f.mustPlace(holds.Placement{ID: id, Lines: []holds.Line{capacity("a", 4, 9)}})
		_, err := f.capture(holds.Capture{IDs: []string{id}, Keep: true, Lines: []holds.Line{{Scope: "a", Amount: 3}}})
		require.NoError(t, err)
		switch state {
		case holds.Released:
			_, err = f.release(id)
			require.NoError(t, err)
		case holds.Expired:
			f.clock.Advance(time.Minute)
		}
		f.refused(holds.Return{IDs: []string{id}, SkipPurged: true, All: true}, inState(state))
		history, err := f.book.History(t.Context(), f.pool, "", id, "")
		require.NoError(t, err)
		_, err = do(f, func(ctx context.Context, tx pgx.Tx) (budget.Posted, error) {
			return f.ledger.Refund(ctx, tx, budget.Refund{Scope: "a", Seq: history[1].Captures[0].Seq, Amount: 3})
		})
		require.NoError(t, err)
		used, _ := f.usage("a")
		require.Zero(t, used, id)
	}
	f.verify()
}
