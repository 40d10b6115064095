package holds_test

import (
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/ledger"
)

func TestCapture_ChargesWhatWasUsedAndFreesTheRest(t *testing.T) {
	t.Parallel()
	f := setUp(t, holds.Config{})
	f.mustPlace(holds.Request{ID: "h1", Lines: []holds.Line{capacity("gpu", 10, 10), capacity("disk", 5, 5)}})
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
	require.ErrorIs(t, err, holds.ErrCaptured)
	_, err = f.release("h1")
	require.ErrorIs(t, err, holds.ErrCaptured)
	f.verify()

	hs, err = do(f, refund(f, "h1"))
	require.NoError(t, err)
	require.Equal(t, holds.Returned, hs[0].State)
	used, _ = f.usage("gpu")
	require.Zero(t, used)
	_, err = do(f, refund(f, "h1"))
	require.ErrorIs(t, err, holds.ErrReturned)
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
	require.NoError(t, err, "whoever comes next")
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
