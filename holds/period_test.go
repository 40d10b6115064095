package holds_test

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"time"
	_ "time/tzdata"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/pgtest"
)

// day is a period done plainly, and the units that count in it.
type day struct {
	limit budget.Limit
	span  func(at time.Time) (start, end time.Time)
	spent []*spending
	open  map[string]*held
}

type spending struct {
	at     time.Time
	amount int64
	seq    int64 // 0 for a capture
}

type held struct {
	amount int64
	due    time.Time
}

func (d *day) used(now time.Time) (used int64) {
	start, _ := d.span(now)
	for _, s := range d.spent {
		if !s.at.Before(start) {
			used += s.amount
		}
	}
	return used
}

// heldAt is the open units that are still open at a time, and when the next of them is due.
func (d *day) heldAt(at time.Time) (units int64, next time.Time) {
	for _, h := range d.open {
		if h.due.After(at) {
			units += h.amount
			if next.IsZero() || h.due.Before(next) {
				next = h.due
			}
		}
	}
	return units, next
}

func (d *day) retryAfter(now time.Time, amount int64) time.Duration {
	if amount > d.limit.Max {
		return budget.Never
	}
	_, at := d.span(now)
	if atEnd, next := d.heldAt(at); atEnd+amount > d.limit.Max {
		at = next
	}
	if _, first := d.heldAt(now); d.used(now)+amount <= d.limit.Max && first.Before(at) {
		at = first
	}
	return at.Sub(now)
}

// Random histories of charges, holds, captures, releases and refunds in periods, across days of 23 and 25 hours: holds count
// where they are open, captures where they are made, refunds where their charge was.
func TestPeriods_HoldsCountWhereTheyAreOpen(t *testing.T) {
	t.Parallel()
	f := setUp(t, holds.Config{MaxTTL: 48 * time.Hour})
	berlin, err := time.LoadLocation("Europe/Berlin")
	require.NoError(t, err)
	anchor := time.Date(2026, 3, 1, 4, 0, 0, 0, time.UTC)
	for seed := range pgtest.Size[uint64](12, 24) {
		r := rand.New(rand.NewPCG(seed, 7))
		now := []time.Time{time.Date(2026, 3, 27, 9, 0, 0, 0, berlin), time.Date(2026, 10, 23, 9, 0, 0, 0, berlin)}[seed%2].UTC()
		d := &day{open: map[string]*held{}, limit: budget.Per(20, budget.Day, berlin, time.Time{}), span: func(at time.Time) (start, end time.Time) {
			y, m, day := at.In(berlin).Date()
			return time.Date(y, m, day, 0, 0, 0, 0, berlin), time.Date(y, m, day+1, 0, 0, 0, 0, berlin)
		}}
		if seed%3 == 0 {
			d.limit, d.span = budget.PerPeriod(20, 31*time.Hour, anchor), func(at time.Time) (start, end time.Time) {
				start = anchor.Add(at.Sub(anchor) / (31 * time.Hour) * (31 * time.Hour))
				return start, start.Add(31 * time.Hour)
			}
		}
		scope := fmt.Sprint("day/", seed)
		for range 50 {
			f.clock.Set(now)
			for id, h := range d.open {
				if !h.due.After(now) {
					delete(d.open, id)
				}
			}
			d.act(f, r, scope, now)
			if r.IntN(3) == 0 {
				_, end := d.span(now)
				now = []time.Time{now.Add(time.Duration(1+r.IntN(600)) * time.Minute), end.Add(-time.Microsecond).UTC(), end.UTC()}[r.IntN(3)]
			}
		}
	}
	f.verify()
}

func (d *day) act(f *fixture, r *rand.Rand, scope string, now time.Time) {
	amount := 1 + r.Int64N(9)
	if r.IntN(20) == 0 {
		amount += 15
	}
	var id string
	for id = range d.open {
		break
	}
	inHold, _ := d.heldAt(now)
	fits := d.used(now)+inHold+amount <= d.limit.Max
	var err error
	switch act := r.IntN(8); {
	case act < 3:
		var receipt budget.Receipt
		if receipt, err = f.charge(budget.Charge{Scope: scope, Amount: amount, Limits: []budget.Limit{d.limit}}); err == nil {
			start, end := d.span(now)
			require.Equal(f, budget.Standing{Limit: d.limit, Used: d.used(now) + amount, Held: inHold, PeriodStart: start.UTC(), PeriodEnd: end.UTC(),
				Available: d.limit.Max - d.used(now) - inHold - amount}, receipt.Entries[0].Standings[0])
			d.spent = append(d.spent, &spending{now, amount, receipt.Entries[0].Seq})
		}
	case act < 5:
		ttl := time.Duration(1+r.IntN(2000)) * time.Minute
		var h holds.Hold
		if h, err = f.place(holds.Placement{Holder: "ann", TTL: ttl, Lines: []holds.Line{{Scope: scope, Amount: amount, Limits: []budget.Limit{d.limit}}}}); err == nil {
			d.open[h.ID] = &held{amount, now.Add(ttl)}
		}
	case act == 5 && id != "":
		units := 1 + r.Int64N(d.open[id].amount)
		_, err := f.capture(holds.Capture{IDs: []string{id}, Lines: []holds.Line{{Scope: scope, Amount: units}}})
		require.NoError(f, err)
		d.spent = append(d.spent, &spending{now, units, 0})
		delete(d.open, id)
		return
	case act == 6 && id != "":
		_, err := f.release(id)
		require.NoError(f, err)
		delete(d.open, id)
		return
	case len(d.spent) > 0:
		s := d.spent[r.IntN(len(d.spent))]
		if s.seq > 0 && s.amount > 0 {
			require.NoError(f, pgx.BeginFunc(f.Context(), f.pool, func(tx pgx.Tx) error {
				_, err := f.ledger.Refund(f.Context(), tx, budget.Refund{Scope: scope, Seq: s.seq, Amount: 1})
				return err
			}))
			s.amount--
		}
		return
	default:
		return
	}
	require.Equal(f, fits, err == nil, "%v", err)
	if fits {
		return
	}
	var refused *budget.ExceededError
	require.ErrorAs(f, err, &refused)
	start, end := d.span(now)
	got := refused.Refusals[0]
	require.Equal(f, []any{d.used(now), inHold, start.UTC(), end.UTC()}, []any{got.Used, got.Held, got.PeriodStart, got.PeriodEnd})
	require.Equal(f, d.retryAfter(now, amount), got.RetryAfter, "%d of %d used, %d held", got.Used, d.limit.Max, got.Held)
}
