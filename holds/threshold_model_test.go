package holds_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/pgmetered/metered/internal/pgtest"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
)

// reporting drives a book and a naive model of its reports on one scope side by side.
type reporting struct {
	*fixture
	*rand.Rand
	scope  string
	level  pgx.TxIsoLevel
	limits []budget.Limit
	heard  []string
	stats  map[string]int

	charges  []spend // in their order
	credited int64
	last     time.Time // of the last entry
	lines    []*openLine
	reported map[string]time.Time // by limit and threshold: the period's end, or zero
}

// spend is an entry that spends.
type spend struct {
	amount, refunded int64
	at               time.Time
}

// openLine is the line of a hold that is open. The units that it captures when it is due are spent from then on.
type openLine struct {
	id                  string
	open, captured, atl int64
	due                 time.Time
}

func (l *openLine) least() int64 { return max(0, l.atl-l.captured) }

func (h *reporting) now() time.Time {
	if now := h.clock.Now(); now.After(h.last) {
		return now
	}
	return h.last
}

// used is the units that count against a limit, holds aside, and held is the held units.
func (h *reporting) used(l budget.Limit) (used, held int64) {
	since := time.Time{}
	switch {
	case !l.Period.IsZero():
		n := h.now().Sub(noon) / l.Period.Length
		since = noon.Add(n*l.Period.Length - time.Microsecond)
	case l.Window > 0:
		since = h.now().Add(-l.Window)
	default:
		used -= h.credited
	}
	for _, c := range h.charges {
		if c.at.After(since) {
			used += c.amount - c.refunded
		}
	}
	for _, line := range h.lines {
		if line.due.After(h.clock.Now()) {
			held += line.open
		} else if at := line.due; at.After(since) || h.last.After(since) {
			used += line.least()
		}
	}
	return used, held
}

// expect is the reports on limits of an entry that spends, and holds: the rule of thresholds, all of them or only those
// on spending.
func (h *reporting) expect(limits []budget.Limit, spends, holds int64, onlySpent bool) (want []string) {
	for _, l := range limits {
		used, held := h.used(l)
		for _, t := range l.Thresholds() {
			if onlySpent && !t.Spent {
				continue
			}
			had, adds := used+held, spends+holds
			if t.Spent {
				had, adds = used, spends
			}
			level, rearm := levelsOf(l, t)
			key := l.Name + "/" + t.Name
			until, reported := h.reported[key]
			if l.Period.IsZero() && reported && had <= rearm {
				reported = false
				h.stats["armed"]++
			} else if !l.Period.IsZero() && reported && !h.now().Before(until) {
				reported = false
			}
			if !reported && had+adds >= level {
				want = append(want, fmt.Sprintf("%s: %d, %d", key, used+spends, held+holds))
				h.stats[fmt.Sprintf("reported, spent %t", t.Spent)]++
				reported, until = true, time.Time{}
				if !l.Period.IsZero() {
					until = noon.Add((h.now().Sub(noon)/l.Period.Length + 1) * l.Period.Length)
				}
			}
			if reported {
				h.reported[key] = until
			} else if l.Period.IsZero() {
				delete(h.reported, key)
			}
		}
	}
	return want
}

// levelsOf are the level and where it is armed again.
func levelsOf(l budget.Limit, t budget.Threshold) (level, rearm int64) {
	level = l.Max - t.Left
	if t.Used > 0 {
		level = t.Used
	}
	return level, level - t.Rearm
}

// lowered arms lifetimes after a credit or a refund.
func (h *reporting) lowered() {
	for _, l := range h.limits {
		for _, t := range l.Thresholds() {
			had, held := h.used(l)
			if !t.Spent {
				had += held
			}
			if _, rearm := levelsOf(l, t); l.Period.IsZero() && l.Window <= 0 && had <= rearm {
				delete(h.reported, l.Name+"/"+t.Name)
			}
		}
	}
}

// expire ends the lines that are due, in their order: first the units that they spend, and then, in one entry, the
// units that they free.
func (h *reporting) expire() {
	freed := false
	slices.SortStableFunc(h.lines, func(a, b *openLine) int { return a.due.Compare(b.due) })
	h.lines = slices.DeleteFunc(h.lines, func(l *openLine) bool {
		if l.due.After(h.clock.Now()) {
			return false
		}
		if units := l.least(); units > 0 {
			if l.due.After(h.last) {
				h.last = l.due
			}
			h.add(units, h.last)
			h.stats["expired"]++
		}
		freed = freed || l.open > l.least()
		return true
	})
	if freed {
		h.last = h.now()
	}
}

func (h *reporting) add(units int64, at time.Time) {
	h.charges = append(h.charges, spend{amount: units, at: at})
	h.last = at
}

// tx runs fn in a transaction, and collects its reports.
func (h *reporting) tx(fn func(ctx context.Context, tx pgx.Tx) error) error {
	h.heard = nil
	return pgx.BeginTxFunc(h.Context(), h.pool, pgx.TxOptions{IsoLevel: h.level}, func(tx pgx.Tx) error { return fn(h.Context(), tx) })
}

// some are some of the limits, so that some are left out.
func (h *reporting) some() []budget.Limit {
	return slices.DeleteFunc(slices.Clone(h.limits), func(budget.Limit) bool { return h.IntN(4) == 0 })
}

// fits reports whether limits admit an amount.
func (h *reporting) fits(limits []budget.Limit, amount int64) bool {
	return !slices.ContainsFunc(limits, func(l budget.Limit) bool {
		used, held := h.used(l)
		return used+held+amount > l.Max
	})
}

// admit charges and holds units. Due holds are ended before it.
func (h *reporting) admit(limits []budget.Limit, spends, held int64) []string {
	want := h.expect(limits, spends, held, false)
	h.expire()
	if spends > 0 {
		h.add(spends, h.now())
	}
	h.last = h.now()
	return want
}

func (h *reporting) charge() {
	limits, amount := h.some(), h.Int64N(12)+1
	fits := h.fits(limits, amount)
	err := h.tx(func(ctx context.Context, tx pgx.Tx) error {
		c := budget.Charge{Scope: h.scope, Amount: amount, Limits: limits, NoStandings: h.IntN(2) == 0}
		if h.level == pgx.ReadCommitted && h.IntN(2) == 0 {
			results, err := h.ledger.ChargeEach(ctx, tx, budget.Charge{Scope: "other", Amount: 1}, c)
			if err != nil {
				return err
			}
			return results[1].Err
		}
		_, err := h.ledger.Charge(ctx, tx, c)
		return err
	})
	if !fits {
		require.ErrorIs(h, err, budget.ErrExceeded)
		require.Empty(h, h.heard)
		return
	}
	require.NoError(h, err)
	require.Equal(h, h.admit(limits, amount, 0), h.heard, h.scope)
}

func (h *reporting) placeOne() {
	limits, amount := h.some(), h.Int64N(40)+1
	l := &openLine{id: fmt.Sprint(h.scope, "/", h.IntN(1e9)), open: amount, atl: max(0, h.Int64N(2*amount)-amount)}
	ttl := time.Duration(1+h.IntN(150)) * time.Second
	fits := h.fits(limits, amount)
	err := h.tx(func(ctx context.Context, tx pgx.Tx) error {
		_, err := h.book.Place(ctx, tx, holds.Placement{ID: l.id, TTL: ttl, Lines: []holds.Line{{Scope: h.scope, Amount: amount, AtLeast: l.atl, Limits: limits}}})
		return err
	})
	if !fits {
		require.ErrorIs(h, err, budget.ErrExceeded)
		return
	}
	require.NoError(h, err)
	require.Equal(h, h.admit(limits, 0, amount), h.heard, h.scope)
	l.due = h.clock.Now().Add(ttl)
	h.lines = append(h.lines, l)
}

// captureOne captures part of a hold, or more than it has.
func (h *reporting) captureOne() {
	if len(h.lines) == 0 {
		return
	}
	l, limits := h.lines[h.IntN(len(h.lines))], h.some()
	take := h.Int64N(l.open+10) + 1
	c := holds.Capture{IDs: []string{l.id}, Lines: []holds.Line{{Scope: h.scope, Amount: take, Limits: limits}}, Keep: h.IntN(2) == 0}
	covered := min(take, l.open)
	switch {
	case take > l.open:
		c.Over = []holds.Over{holds.OverAllowed, holds.OverIfFits}[h.IntN(2)]
	case h.IntN(4) == 0:
		c.All, c.Keep, c.Lines[0].Amount, take, covered = true, false, 0, l.open, l.open
	}
	if c.Over == holds.OverIfFits && len(limits) == 0 {
		c.Over = holds.OverAllowed
	}
	due, fits := !l.due.After(h.clock.Now()), c.Over != holds.OverIfFits || h.fits(limits, take-covered)
	var all []holds.Hold
	err := h.tx(func(ctx context.Context, tx pgx.Tx) (err error) {
		all, err = h.book.Capture(ctx, tx, c)
		return err
	})
	if due {
		require.ErrorIs(h, err, holds.ErrState)
		return
	} else if !fits {
		require.ErrorIs(h, err, budget.ErrExceeded)
		return
	}
	require.NoError(h, err)
	want := []string(nil)
	if take > covered {
		want = h.admit(limits, take-covered, 0)
		h.stats["excess"]++
	}
	if covered > 0 {
		want = append(want, h.expect(limits, covered, -covered, true)...)
		h.add(covered, h.now())
		h.stats["captured"]++
	}
	require.Equal(h, want, h.heard, h.scope)
	require.Len(h, all[0].Crossed, len(want))
	l.open, l.captured, h.last = l.open-covered, l.captured+take, h.now()
	if !c.Keep || l.open == 0 {
		h.lines = slices.DeleteFunc(h.lines, func(of *openLine) bool { return of == l })
	}
}

func (h *reporting) releaseOne() {
	if len(h.lines) == 0 {
		return
	}
	n := h.IntN(len(h.lines))
	if !h.lines[n].due.After(h.clock.Now()) {
		return
	}
	require.NoError(h, h.tx(func(ctx context.Context, tx pgx.Tx) error {
		_, err := h.book.Release(ctx, tx, holds.Release{IDs: []string{h.lines[n].id}})
		return err
	}))
	h.lines, h.last = slices.Delete(h.lines, n, n+1), h.now()
	require.Empty(h, h.heard)
}

// giveBack credits the scope, or refunds some of a charge.
func (h *reporting) giveBack() {
	written := true
	require.NoError(h, h.tx(func(ctx context.Context, tx pgx.Tx) error {
		if len(h.charges) == 0 || h.IntN(3) == 0 {
			h.credited += 10
			_, err := h.ledger.Credit(ctx, tx, budget.Credit{Scope: h.scope, Amount: 10})
			return err
		}
		seqs, err := tx.Query(ctx, `select seq from metered.ledger where scope = $1 and kind in ('c', 'u') order by seq`, h.scope)
		require.NoError(h, err)
		all, err := pgx.CollectRows(seqs, pgx.RowTo[int64])
		require.NoError(h, err)
		require.Len(h, all, len(h.charges), h.scope)
		n := h.IntN(len(all))
		c := &h.charges[n]
		units := h.Int64N(c.amount - c.refunded + 1)
		if written = units > 0; written {
			c.refunded += units
			_, err = h.ledger.Refund(ctx, tx, budget.Refund{Scope: h.scope, Seq: all[n], Amount: units})
		}
		return err
	}))
	if !written {
		return
	}
	h.last = h.now()
	h.lowered()
	require.Empty(h, h.heard)
}

func (h *reporting) thresholds(l budget.Limit) budget.Limit {
	var list []budget.Threshold
	for i := range 2 + h.IntN(3) {
		t := budget.Threshold{Name: fmt.Sprint(i), Spent: i > 0, Rearm: h.Int64N(30) + 1, Used: h.Int64N(70) + 1}
		if h.IntN(2) == 0 {
			t.Used, t.Left = 0, h.Int64N(40)+1
		}
		if !l.Period.IsZero() {
			t.Rearm = 0
		}
		list = append(list, t)
	}
	return l.WithThresholds(list...)
}

// Random histories of charges, alone and in batches, holds, captures of less and of more than is held, releases,
// expiries with a minimum, swept or not, credits, refunds and steps of the clock have the same reports as a plain
// model, by thresholds on spending and by those on held units too.
func TestThresholds_AgreeWithTheModel(t *testing.T) {
	t.Parallel()
	pgtest.OnEachVersion(t)
	f := setUpReporting(t)
	var h *reporting
	f.reportInto(func(_ context.Context, _ pgx.Tx, c budget.Crossing) error {
		h.heard = append(h.heard, fmt.Sprintf("%s/%s: %d, %d", c.Limit.Name, c.Threshold.Name, c.Used, c.Held))
		return nil
	})
	stats := map[string]int{}
	for seed := range pgtest.Sizes[uint64](12, 24, 24) {
		f.clock.Set(noon.Add(10 * time.Minute)) // no step back leads before the first period
		h = &reporting{fixture: f, Rand: rand.New(rand.NewPCG(seed, 40)), scope: fmt.Sprint(seed), stats: stats, reported: map[string]time.Time{}, level: isolations[seed%3]}
		h.limits = []budget.Limit{
			h.thresholds(budget.PerWindow(100, time.Duration(40+h.IntN(120))*time.Second)).Named("window"),
			h.thresholds(budget.PerPeriod(100, time.Duration(100+h.IntN(600))*time.Second, noon)).Named("period"),
			h.thresholds(budget.Prepaid(200)).Named("credit"),
		}
		for range 60 {
			switch n := h.IntN(20); {
			case n < 4:
				h.charge()
			case n < 8:
				h.placeOne()
			case n < 13:
				h.captureOne()
			case n < 14:
				h.releaseOne()
			case n < 16:
				h.giveBack()
			case n == 16 && h.IntN(3) == 0 && !f.clock.Now().Before(h.last):
				f.clock.Advance(-time.Duration(h.IntN(30)) * time.Second)
			case n < 19:
				f.clock.Advance(time.Duration(h.IntN(90)) * time.Second)
			default:
				h.expire()
				_, err := f.book.Sweep(t.Context(), f.pool, holds.SweepOptions{})
				require.NoError(t, err)
			}
		}
	}
	t.Log(stats)
	for _, what := range []string{"reported, spent true", "reported, spent false", "armed", "expired", "captured", "excess"} {
		require.Greater(t, stats[what], pgtest.Sizes(4, 10, 10), what)
	}
	f.verify()
}
