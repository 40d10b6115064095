package holds_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
)

// A minimum leaves its window or its period as a charge does, before anybody has ended its hold and after.
func TestAtLeast_LeavesItsWindowAndItsPeriod(t *testing.T) {
	t.Parallel()
	f := setUp(t, holds.Config{MaxTTL: 96 * time.Hour})
	minute, day := budget.PerWindow(100, time.Minute), budget.Per(100, budget.Day, time.UTC, time.Time{}) // it is noon
	for name, c := range map[string]struct {
		limit    budget.Limit
		ttl, now time.Duration // of the hold, and when the charge is refused
		lines    []int64       // minima of 70 units each, one hold a minute after the other
		charge   int64
		amount   int64
		want     time.Duration
	}{
		"a window":                           {minute, time.Minute, 0, []int64{60}, 0, 50, 2 * time.Minute},
		"a window, due":                      {minute, time.Minute, 90 * time.Second, []int64{60}, 0, 50, 30 * time.Second},
		"a window, with a charge":            {minute, time.Minute, 70 * time.Second, []int64{60}, 20, 90, 60 * time.Second},
		"two holds":                          {minute, time.Minute, 0, []int64{30, 60}, 0, 70, 3 * time.Minute},
		"two holds, of which one may stay":   {minute, time.Minute, 0, []int64{60, 30}, 0, 70, 2 * time.Minute},
		"a hold due, and a long one":         {budget.PerWindow(150, time.Minute), time.Minute, 90 * time.Second, []int64{60, 60}, 0, 50, 30 * time.Second},
		"it never fits":                      {minute, time.Minute, 0, []int64{60}, 0, 101, budget.Never},
		"a lifetime":                         {budget.Lifetime(100), time.Minute, 0, []int64{60}, 0, 50, budget.Never},
		"a period":                           {day, 6 * time.Hour, 0, []int64{60}, 0, 50, 12 * time.Hour},
		"a period, due":                      {day, 6 * time.Hour, 7 * time.Hour, []int64{60}, 0, 50, 5 * time.Hour},
		"due at the end of the period":       {day, 12 * time.Hour, 0, []int64{60}, 0, 50, 36 * time.Hour},
		"due in the next period":             {day, 20 * time.Hour, 0, []int64{60}, 0, 50, 36 * time.Hour},
		"due in the next period, with room":  {day, 20 * time.Hour, 0, []int64{40}, 0, 50, 20 * time.Hour},
		"due in the next period, room today": {day, 20 * time.Hour, 0, []int64{60}, 15, 20, 12 * time.Hour},
	} {
		f.clock.Set(noon)
		for i, least := range c.lines {
			f.mustPlace(holds.Placement{TTL: c.ttl + time.Duration(i)*time.Minute, Lines: []holds.Line{{Scope: name, Amount: 70, AtLeast: least}}})
		}
		f.clock.Set(noon.Add(c.now))
		if c.charge > 0 {
			_, err := f.charge(budget.Charge{Scope: name, Amount: c.charge})
			require.NoError(t, err)
		}
		for _, when := range []string{"before", "after"} {
			_, err := f.charge(budget.Charge{Scope: name, Amount: c.amount, Limits: []budget.Limit{c.limit}})
			require.Equal(t, c.want, refusal(t, err).RetryAfter, "%s, %s a sweep", name, when)
			_, err = f.book.Sweep(t.Context(), f.pool, holds.SweepOptions{})
			require.NoError(t, err)
		}
	}
}
