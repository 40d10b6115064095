package budget_test

import (
	"fmt"
	"math"
	"os"
	"sync/atomic"
	"testing"
	"time"

	"github.com/pgmetered/metered/internal/pgtest"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/pgmetered/metered/budget"
)

// TestMain sets how many random histories are tried.
func TestMain(m *testing.M) {
	pgtest.Histories(30, 250)
	os.Exit(m.Run())
}

// Random histories of two scopes agree with the model in every answer, at every isolation
// level, with standings and without: then most charges are decided by a bound. Their
// windows are microseconds long, so that entries and edges lie close together.
// One in twenty begins with hundreds of entries, so that the blocks of the time
// index and the levels of the refund sums matter.
func TestLedger_AgreesWithTheModel(t *testing.T) {
	t.Parallel()
	pgtest.OnEachVersion(t)
	for _, half := range []string{"one half", "other half"} {
		t.Run(half, func(t *testing.T) {
			t.Parallel()
			checkHistories(t)
		})
	}
}

var (
	historyWindows = []time.Duration{
		0, time.Microsecond, 7 * time.Microsecond, 20 * time.Microsecond, 60 * time.Microsecond,
		250 * time.Microsecond, time.Millisecond,
	}
	historySerial atomic.Int64
)

const historyTolerance = 25 * time.Microsecond

func checkHistories(t *testing.T) {
	pool, _, clock := open(t)
	conn, err := pool.Acquire(t.Context())
	require.NoError(t, err)
	defer conn.Release()
	l := newLedger(t, budget.Config{ClockTolerance: historyTolerance})
	rapid.Check(t, func(rt *rapid.T) {
		h := &history{T: rt, outer: t, pool: pool, conn: conn, ledger: l, clock: clock, now: start}
		serial := historySerial.Add(1)
		for i := range h.models {
			h.models[i] = &model{scope: fmt.Sprintf("%d/%d", serial, i), tolerance: historyTolerance, kept: 1, outer: t, spans: map[budget.Period]span{}}
		}
		level := rapid.SampledFrom([]string{"read committed", "repeatable read", "serializable"}).Draw(rt, "isolation")
		_, err := conn.Exec(t.Context(), "set default_transaction_isolation = '"+level+"'")
		require.NoError(rt, err)
		h.quiet = rapid.Bool().Draw(rt, "without standings")
		h.begin()
		if rapid.IntRange(0, 19).Draw(rt, "long") == 19 {
			h.bulk(rapid.SampledFrom([]int{40, 239, 240, 254, 255, 256, 257, 300, 400}).Draw(rt, "entries before"))
		}
		acts := map[string]func(){
			"charge": h.charge, "up to": h.chargeUpTo, "credit": h.credit, "refund": h.refund, "advance": h.advance, "step back": h.stepBack,
			"repair": h.repair, "purge": h.purge, "bulk": func() { h.bulk(rapid.IntRange(1, 30).Draw(rt, "more entries")) },
		}
		names := []string{"charge", "charge", "charge", "charge", "up to", "up to", "advance", "advance", "advance", "refund", "refund",
			"credit", "bulk", "purge", "step back", "repair"}
		for range rapid.IntRange(1, 25).Draw(rt, "length") {
			acts[rapid.SampledFrom(names).Draw(rt, "act")]()
			h.compareUsage()
		}
		h.compareSeries()
		h.compareWhatIf()
		for _, m := range h.models {
			report, err := l.Verify(t.Context(), pool, budget.VerifyOptions{Scope: m.scope})
			require.NoError(rt, err)
			require.Empty(rt, report.Differences)
		}
	})
}

// begin begins a history shortly before the end of a calendar period, or of one where clocks are set. Its limits are
// the windows and some periods.
func (h *history) begin() {
	for _, w := range historyWindows {
		h.kinds = append(h.kinds, budget.Limit{Window: w, Lifetime: w == 0})
	}
	from := start
	if rapid.Bool().Draw(h.T, "at a change of the clocks") {
		from = rapid.SampledFrom(changes).Draw(h.T, "change")
	}
	for range 3 {
		h.kinds = append(h.kinds, budget.Limit{Period: anyPeriod(h.T, from)})
	}
	last := h.kinds[len(h.kinds)-1].Period
	if rapid.Bool().Draw(h.T, "at an edge") {
		from = spanOf(h.outer, last, from).end
	}
	h.kinds = append(h.kinds, budget.PerPeriod(0, h.micros("length", 1, 300), from))
	h.set(from.Add(-h.micros("before", 0, 60)))
}

const unknown = math.MinInt64

// usages are the used units of all scopes and windows, as the model has them.
func (h *history) usages() (all []int64) {
	for _, m := range h.models {
		for _, kind := range h.kinds {
			used, known := m.used(h.now, kind)
			if !known {
				used = unknown
			}
			all = append(all, used)
		}
	}
	return all
}

func (h *history) compareUsage() {
	var queries []budget.Query
	var want []budget.Usage
	for _, m := range h.models {
		for _, kind := range h.kinds {
			q := budget.Query{Scope: m.scope, Window: kind.Window, Period: kind.Period}
			used, known := m.used(h.now, kind)
			if !known {
				_, err := h.ledger.Usage(h.outer.Context(), h.conn, q)
				require.ErrorIs(h, err, budget.ErrWindowPurged)
				continue
			}
			queries = append(queries, q)
			var s span
			if !kind.Period.IsZero() {
				s = m.span(later(h.now, m.last()), kind.Period)
			}
			want = append(want, budget.Usage{Query: q, Used: used, Seq: m.seq(), PeriodStart: s.start, PeriodEnd: s.end,
				Spent: m.sum("charge"), Refunded: m.sum("refund"), Credited: m.sum("credit"), Charges: m.made(h.now, kind)})
		}
	}
	got, err := h.ledger.Usage(h.outer.Context(), h.conn, queries...)
	require.NoError(h, err)
	require.Equal(h, want, got)
}
