package wallet_test

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/wallet"
)

// told is a plan as its oracle has it: by the calendar alone, and without lots that wait, end or are withdrawn.
type told struct {
	period      budget.Period
	amount      int64
	from, until time.Time // it brings no lot from until on
	before      *told     // the plan that it took the place of
	lots        []*part
}

// part is the units of a plan in one period.
type part struct {
	from, ends time.Time
	units      int64
}

// upTo brings the lots of a plan that have begun by a time. first is the units of the first one.
func (p *told) upTo(t *testing.T, now time.Time, first int64) {
	t.Helper()
	for from, units := p.from, first; ; units = p.amount {
		if n := len(p.lots); n > 0 {
			from, units = p.lots[n-1].ends, p.amount
		}
		if from.After(now) || !p.until.IsZero() && !from.Before(p.until) {
			return
		}
		_, ends, err := p.period.At(from)
		require.NoError(t, err)
		p.lots = append(p.lots, &part{from, ends.UTC(), units})
	}
}

// Plans that change at random times, in any way, have the units of an oracle that knows calendars alone.
func TestChange_RandomChangesAgreeWithAnOracle(t *testing.T) {
	t.Parallel()
	berlin, err := time.LoadLocation("Europe/Berlin")
	require.NoError(t, err)
	var periods []budget.Period
	for _, anchor := range []time.Time{{}, time.Date(2026, 1, 31, 9, 0, 0, 0, berlin), time.Date(2024, 2, 29, 0, 0, 0, 0, berlin), time.Date(2026, 3, 29, 2, 30, 0, 0, berlin)} {
		periods = append(periods, budget.Per(1, budget.Month, berlin, anchor).Period)
	}
	periods = append(periods, budget.PerPeriod(1, 10*day, noon).Period)
	for seed := range uint64(pgtest.Size(3, 60)) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			t.Parallel()
			r := rand.New(rand.NewPCG(seed, 48))
			f := setUp(t, wallet.Config{})
			now, n := noon, 0
			name := func() string { n++; return fmt.Sprint("r", n) }
			units := map[*told]int64{} // of the first lot
			var all []*told            // that have begun or will
			begin := func(p *told, first int64) { all = append(all, p); units[p] = first }
			old, plan := "r0", &told{period: periods[0], amount: 300, from: now}
			var waits *told // until the end of the period
			f.grant(wallet.Grant{Amount: 300, Reference: old, Ends: wallet.EachPeriod(plan.period)})
			begin(plan, 300)
			live := func() (lots []*part) {
				for _, p := range all {
					p.upTo(t, now, units[p])
					for _, l := range p.lots {
						if l.ends.After(now) {
							lots = append(lots, l)
						}
					}
				}
				slices.SortStableFunc(lots, func(a, b *part) int {
					if c := a.ends.Compare(b.ends); c != 0 {
						return c
					}
					return a.from.Compare(b.from)
				})
				return lots
			}
			next := ""
			for step := range 25 {
				now = now.Add(time.Duration(r.Int64N(int64(12 * day))).Truncate(time.Microsecond))
				if r.IntN(4) == 0 { // a period's last or first moment
					_, ends, err := plan.period.At(now)
					require.NoError(t, err)
					now = ends.UTC().Add(-time.Duration(r.IntN(2)) * time.Microsecond)
				}
				f.clock.Set(now)
				if waits != nil && !now.Before(waits.from) {
					plan, old, waits = waits, next, nil
				}
				sum := int64(0)
				for _, l := range live() {
					sum += l.units
				}
				require.Equal(t, sum, f.balance().Units, "seed %d, step %d, at %s", seed, step, now)
				if over := !plan.until.IsZero() && !now.Before(plan.until); over { // cancelled
					_, err := f.tryChange(wallet.Change{Reference: name(), Plan: old})
					require.ErrorIs(t, err, wallet.ErrExpired)
					old, plan = name(), &told{period: periods[r.IntN(len(periods))], amount: 1 + r.Int64N(500), from: now}
					f.grant(wallet.Grant{Amount: plan.amount, Reference: old, Ends: wallet.EachPeriod(plan.period)})
					begin(plan, plan.amount)
					live()
				}
				if sum > 0 && r.IntN(2) == 0 {
					left := 1 + r.Int64N(sum)
					f.draw(left)
					for _, l := range live() {
						taken := min(left, l.units)
						l.units, left = l.units-taken, left-taken
					}
				}
				_, ends, err := plan.period.At(now)
				require.NoError(t, err)
				ends = ends.UTC()
				c := wallet.Change{Reference: name(), Plan: old, AtEnd: r.IntN(2) == 0}
				withdraw := func() {
					if waits != nil {
						all = slices.DeleteFunc(all, func(p *told) bool { return p == waits })
					}
					waits = nil
				}
				if r.IntN(5) == 0 {
					c = wallet.Change{Reference: c.Reference, Plan: old, Resume: true}
					withdraw()
					plan.until = time.Time{}
					require.True(t, f.change(c).Resumed)
					continue
				}
				to := &told{period: periods[r.IntN(len(periods))], amount: 1 + r.Int64N(900), from: now, before: plan}
				if c.AtEnd {
					to.from = ends
				} else {
					c.Carry = r.IntN(2) == 0
				}
				withdraw()
				plan.until = to.from
				if !c.AtEnd && !c.Carry {
					for p := plan; p != nil; p = p.before {
						for _, l := range p.lots {
							if l.ends.After(now) {
								l.units = 0
							}
						}
					}
				}
				if r.IntN(5) > 0 {
					c.To = &wallet.Grant{Amount: to.amount, Ends: wallet.EachPeriod(to.period)}
					first := to.amount
					if r.IntN(2) == 0 {
						c.To.Ends = wallet.EachPeriodProrated(to.period)
						if c.Carry {
							first = max(0, to.amount-plan.amount)
						}
						if first > 0 {
							first, err = to.period.Prorate(first, to.from)
							require.NoError(t, err)
						}
					}
					begin(to, first)
					if c.AtEnd {
						waits, next = to, c.Reference
					} else {
						plan, old = to, c.Reference
					}
					require.Equal(t, first, f.change(c).Amount, "seed %d, step %d: %+v", seed, step, c)
				} else {
					f.change(c)
				}
				require.True(t, f.change(c).Replayed)
			}
		})
	}
}
