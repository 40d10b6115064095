package holds_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/pgtest"
)

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
