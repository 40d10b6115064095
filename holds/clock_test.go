package holds_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/pgtest"
)

// From its deadline on a hold is not extended, and until it is due it can still be captured:
// what it keeps is nobody else's.
func TestExpiry_GraceIsForCaptures(t *testing.T) {
	t.Parallel()
	f := setUp(t, holds.Config{})
	scopes := []string{"captured", "released", "expired"}
	for _, scope := range scopes {
		f.mustPlace(holds.Request{ID: scope, Grace: 10 * time.Second, Lines: []holds.Line{capacity(scope, 1, 1)}})
	}
	f.clock.Set(noon.Add(time.Minute - time.Microsecond))
	_, err := f.extend(time.Second, scopes...)
	require.NoError(t, err)
	for _, at := range []time.Duration{61 * time.Second, 71*time.Second - time.Microsecond} {
		f.clock.Set(noon.Add(at))
		for _, scope := range scopes {
			_, err = f.extend(time.Second, scope)
			require.ErrorIs(t, err, holds.ErrExpired, at)
			require.Equal(t, holds.Held, f.get(scope).State, at)
			_, err = f.charge(budget.Charge{Scope: scope, Amount: 1, Limits: []budget.Limit{budget.Lifetime(1)}})
			require.ErrorIs(t, err, budget.ErrExceeded, at)
		}
	}
	_, err = f.capture(holds.Capture{IDs: []string{"captured"}, All: true})
	require.NoError(t, err)
	_, err = f.release("released")
	require.NoError(t, err)
	f.clock.Advance(time.Microsecond)
	_, err = f.capture(holds.Capture{IDs: []string{"expired"}, All: true})
	require.ErrorIs(t, err, holds.ErrExpired)
	_, err = f.release("expired")
	require.ErrorIs(t, err, holds.ErrExpired)
	_, err = f.charge(budget.Charge{Scope: "expired", Amount: 1, Limits: []budget.Limit{budget.Lifetime(1)}})
	require.NoError(t, err)
	f.verify()
}

// tick makes the clock of a database move by a microsecond each time it is read.
func tick(t *testing.T, f *fixture) {
	execute(t, f.pool, `create or replace function metered.clock() returns timestamptz language sql volatile security definer
		as $$ select timestamptz 'epoch' + us / 1000000 * interval '1 second' + us % 1000000 * interval '1 microsecond'
		      from pg_catalog.nextval('pgtest.clock') us $$`)
}

// A hold falls due while a capture of it is under way, between any two readings of
// the clock: the capture is whole or it is none.
func TestCapture_AsTheHoldFallsDueIsWholeOrNone(t *testing.T) {
	t.Parallel()
	f := setUp(t, holds.Config{})
	tick(t, f)
	captured, expired := 0, 0
	for us := range 12 {
		for _, over := range []holds.Over{holds.OverRefused, holds.OverAllowed, holds.OverIfFits} {
			for _, amount := range []int64{5, 8} {
				scope := fmt.Sprintf("%s %d %d", over, us, amount)
				h := f.mustPlace(holds.Request{ID: scope, Lines: []holds.Line{capacity(scope, 5, 9)}})
				other := f.mustPlace(holds.Request{ID: scope + "other", TTL: time.Hour, Lines: []holds.Line{capacity(scope, 1, 9)}})
				f.clock.Set(h.Due.Add(-time.Duration(us) * time.Microsecond))
				hs, err := f.capture(holds.Capture{IDs: []string{h.ID}, Over: over, Lines: []holds.Line{capacity(scope, amount, 9)}})
				switch {
				case err == nil:
					require.Equal(t, holds.Captured, hs[0].State)
					captured++
				case over == holds.OverRefused && amount == 8 && !isA[*holds.StateError](err):
					require.ErrorIs(t, err, holds.ErrExcess)
				default:
					if code(err) == "40001" {
						hs, err = f.capture(holds.Capture{IDs: []string{h.ID}, Over: over, Lines: []holds.Line{capacity(scope, amount, 9)}})
						require.Empty(t, hs)
					}
					require.ErrorIs(t, err, holds.ErrExpired)
					expired++
				}
				used, held := f.usage(scope)
				require.LessOrEqual(t, used+held, int64(9))
				_, err = f.release(other.ID)
				require.NoError(t, err)
			}
		}
	}
	require.Positive(t, captured)
	require.Positive(t, expired)
	pgtest.SetClock(t, f.pool, f.clock.Now().Add(time.Hour))
	f.verify()
}
