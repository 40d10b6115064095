package holds_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
)

// A hold counts as a charge when it is captured, once, whatever it spent beyond its units.
func TestCapture_CountsAsOneCharge(t *testing.T) {
	t.Parallel()
	f := setUp(t, holds.Config{})
	charges := func(want int64) {
		t.Helper()
		u, err := f.ledger.Usage(t.Context(), f.pool, budget.Query{Scope: "tokens"},
			budget.Query{Scope: "tokens", Window: time.Hour})
		require.NoError(t, err)
		require.Equal(t, want, u[0].Charges, "of the lifetime")
		require.Equal(t, want, u[1].Charges, "of an hour")
		f.verify()
	}
	capture := func(id string, units int64, keep bool) {
		t.Helper()
		_, err := f.capture(holds.Capture{IDs: []string{id}, Lines: []holds.Line{{Scope: "tokens", Amount: units}},
			Over: holds.OverAllowed, Keep: keep})
		require.NoError(t, err)
		f.clock.Advance(time.Second)
	}
	place := func(id string, charges ...budget.Charge) {
		t.Helper()
		f.mustPlace(holds.Placement{ID: id, Charges: charges,
			Lines: []holds.Line{{Scope: "tokens", Amount: 10, Limits: []budget.Limit{budget.Lifetime(1000)}}}})
		f.clock.Advance(time.Second)
	}
	place("all")
	charges(0)
	capture("all", 10, false)
	charges(1)
	place("less")
	capture("less", 4, false)
	charges(2)
	place("more")
	capture("more", 25, false)
	charges(3)
	place("nothing", budget.Charge{Scope: "tokens", Amount: 1}) // a charge beside a hold is one
	charges(4)
	capture("nothing", 0, false)
	charges(4)
	place("released")
	_, err := f.release("released")
	require.NoError(t, err)
	charges(4)
	place("parts") // each capture is one, also where all of it is beyond the held units
	capture("parts", 3, true)
	capture("parts", 7, true)
	capture("parts", 5, false)
	charges(7)
	f.mustPlace(holds.Placement{ID: "least", TTL: time.Minute,
		Lines: []holds.Line{{Scope: "tokens", Amount: 10, AtLeast: 2, Limits: []budget.Limit{budget.Lifetime(1000)}}}})
	charges(7)
	f.clock.Advance(2 * time.Minute) // its minimum is due, and nobody has written it down
	charges(8)
	place("after")
	charges(8)
	got, err := f.ledger.UsageBetween(t.Context(), f.pool, "tokens", noon, f.clock.Now().Add(time.Second))
	require.NoError(t, err)
	require.Equal(t, int64(8), got.Charges)
}
