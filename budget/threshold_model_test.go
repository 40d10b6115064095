package budget_test

import (
	"context"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/internal/pgtest"
)

// reporting drives a ledger and a model of its reports side by side.
type reporting struct {
	*testing.T
	*rand.Rand
	conn     *pgx.Conn
	ledger   *budget.Ledger
	clock    *pgtest.Clock
	model    *model
	limits   []budget.Limit
	reported map[string]time.Time // by limit, threshold and period: the period's start, or zero without a period
	heard    []string             // by OnThreshold, of the last transaction
	quiet    bool
	level    pgx.TxIsoLevel
	stats    map[string]int
	seed     uint64
}

func crossingName(c budget.Crossing) string {
	return fmt.Sprintf("%d: %s %s: %d", c.Seq, c.Limit.Name, c.Threshold.Name, c.Used)
}

// modelLevels are the level and where it is armed again.
func modelLevels(l budget.Limit, t budget.Threshold) (level, rearm int64) {
	back := t.Rearm
	switch {
	case t.Percent > 0:
		if back == 0 {
			back = max(1, t.Percent/10)
		}
		for level*100 < l.Max*t.Percent {
			level++
		}
		for (rearm+1)*100 <= l.Max*(t.Percent-back) {
			rearm++
		}
		return level, min(rearm, level-1)
	case t.Used > 0:
		level = t.Used
	default:
		level = l.Max - t.Left
	}
	if back == 0 {
		back = max(1, (t.Used+t.Left)/10)
	}
	return level, level - back
}

// expect is the reports of a charge that is let in, by the model's rule.
func (h *reporting) expect(now time.Time, amount int64, limits []budget.Limit) (want []string) {
	now = later(now, h.model.last())
	for _, l := range limits {
		used, known := h.model.used(now, l)
		require.True(h, known)
		for _, t := range l.Thresholds() {
			level, rearm := modelLevels(l, t)
			key, begins := l.Name+"/"+t.Name, time.Time{}
			if !l.Period.IsZero() {
				begins = h.model.span(now, l.Period).start
				key += "/" + begins.String()
			}
			_, reported := h.reported[key]
			switch {
			case reported && l.Period.IsZero() && used <= rearm:
				reported = false
				h.stats["armed"]++
			case reported:
				h.stats["stayed"]++
			}
			if !reported && used+amount >= level {
				want = append(want, fmt.Sprintf("%d: %s %s: %d", h.model.seq()+1, l.Name, t.Name, used+amount))
				reported = true
			}
			if reported {
				h.reported[key] = begins
			} else {
				delete(h.reported, key)
			}
		}
	}
	return want
}

// lowered arms the thresholds that a credit or a refund armed.
func (h *reporting) lowered() {
	for _, l := range h.limits {
		if !lifetime(l) {
			continue
		}
		used, _ := h.model.used(h.clock.Now(), l)
		for _, t := range l.Thresholds() {
			if _, rearm := modelLevels(l, t); used <= rearm {
				delete(h.reported, l.Name+"/"+t.Name)
			}
		}
	}
}

func (h *reporting) tx(fn func(pgx.Tx)) {
	h.heard = nil
	tx, err := h.conn.BeginTx(h.Context(), pgx.TxOptions{IsoLevel: h.level})
	require.NoError(h, err)
	fn(tx)
	require.NoError(h, tx.Commit(h.Context()))
}

func (h *reporting) charge() {
	amount := h.Int64N(12) + 1
	limits := slices.DeleteFunc(slices.Clone(h.limits), func(budget.Limit) bool { return h.IntN(4) == 0 })
	now := h.clock.Now()
	c := budget.Charge{Scope: h.model.scope, Amount: amount, Limits: limits, NoStandings: h.quiet}
	batch := h.IntN(4) == 0 && h.level == pgx.ReadCommitted
	h.tx(func(tx pgx.Tx) {
		for range map[bool]int{false: 1, true: 3}[batch] {
			if batch && h.IntN(3) == 0 {
				continue
			}
			_, refusals, err := h.model.judge(now, c)
			require.NoError(h, err)
			heard := len(h.heard)
			r, err := h.send(tx, c, batch)
			if len(refusals) > 0 {
				h.stats["refused"]++
				require.ErrorIs(h, err, budget.ErrExceeded)
				require.Len(h, h.heard, heard)
				continue
			}
			require.NoError(h, err)
			want := h.expect(now, amount, limits)
			h.model.add(now, "charge", amount, 0)
			h.stats["reported"] += len(want)
			require.Equal(h, want, append([]string(nil), h.heard[heard:]...), "seed %d, charged %d", h.seed, amount)
			var crossed []string
			for _, c := range r {
				crossed = append(crossed, crossingName(c))
			}
			require.Equal(h, want, crossed)
		}
	})
}

// send makes a charge alone, or in a batch with one of another scope.
func (h *reporting) send(tx pgx.Tx, c budget.Charge, batch bool) ([]budget.Crossing, error) {
	if !batch {
		r, err := h.ledger.Charge(h.Context(), tx, c)
		return r.Crossed, err
	}
	results, err := h.ledger.ChargeEach(h.Context(), tx, budget.Charge{Scope: "other", Amount: 1}, c)
	require.NoError(h, err)
	return results[1].Crossed, results[1].Err
}

func (h *reporting) credit() {
	h.tx(func(tx pgx.Tx) {
		amount := h.Int64N(30) + 1
		_, err := h.ledger.Credit(h.Context(), tx, budget.Credit{Scope: h.model.scope, Amount: amount})
		require.NoError(h, err)
		h.model.add(h.clock.Now(), "credit", amount, 0)
		h.lowered()
	})
}

func (h *reporting) refund() {
	if h.model.seq() == 0 {
		return
	}
	seq, amount := h.Int64N(h.model.seq())+1, h.Int64N(9)+1
	h.tx(func(tx pgx.Tx) {
		_, want := h.model.refund(h.clock.Now(), seq, amount)
		_, err := h.ledger.Refund(h.Context(), tx, budget.Refund{Scope: h.model.scope, Seq: seq, Amount: amount})
		require.ErrorIs(h, err, want)
		if want == nil {
			h.lowered()
		}
	})
}

// forget forgets periods that have not begun when the clock is repaired. Their charges count in the period of now, which may be reported already.
func (h *reporting) forget(now time.Time) {
	h.stats["repaired"]++
	maps.DeleteFunc(h.reported, func(_ string, begins time.Time) bool { return begins.After(now) })
}

func (h *reporting) repair() {
	h.tx(func(tx pgx.Tx) {
		if h.model.repair(h.clock.Now()) > 0 {
			h.forget(h.clock.Now())
		}
		_, err := h.ledger.RepairClock(h.Context(), tx, h.model.scope, budget.Note{})
		require.NoError(h, err)
	})
}

// jump makes charges by a clock that is ahead, by some periods more each time, and repairs it.
func (h *reporting) jump() {
	at := h.clock.Now()
	for range 1 + h.IntN(4) {
		h.clock.Advance(time.Duration(h.IntN(400)) * time.Microsecond)
		for range h.IntN(8) {
			h.charge()
		}
	}
	h.clock.Set(at.Add(time.Duration(h.IntN(100)-30) * time.Microsecond))
	h.repair()
}

func (h *reporting) purge(purge func() error) {
	h.model.purge(h.clock.Now().Add(-time.Millisecond))
	require.NoError(h, purge())
}

// thresholds are some for a limit.
func (h *reporting) thresholds(l budget.Limit) budget.Limit {
	var list []budget.Threshold
	for i := range 1 + h.IntN(3) {
		t := budget.Threshold{Name: fmt.Sprint(i), Spent: h.IntN(2) == 0} // the same, without holds
		switch kind := h.IntN(4); {
		case kind == 0 && !l.Prepaid:
			t.Percent = h.Int64N(100) + 1
		case kind == 1:
			t.Used = h.Int64N(60) + 1
		case kind == 2:
			t.Left = h.Int64N(60)
		}
		if l.Period.IsZero() && h.IntN(2) == 0 {
			if t.Rearm = h.Int64N(30) + 1; t.Percent > 0 {
				t.Rearm = min(t.Rearm, t.Percent)
			}
		}
		list = append(list, t)
	}
	return l.WithThresholds(list...)
}

// Random histories have the same reports as a plain model: charges, alone and in batches, credits, refunds, purges,
// clocks that jump over periods, and repairs. Windows and periods are microseconds long, so that their edges lie close
// together.
func TestThreshold_AgreesWithTheModel(t *testing.T) {
	t.Parallel()
	pgtest.OnEachVersion(t)
	pool, _, clock := open(t)
	var h *reporting
	l := newLedger(t, budget.Config{ClockTolerance: time.Hour, OnThreshold: func(_ context.Context, _ pgx.Tx, c budget.Crossing) error {
		h.heard = append(h.heard, crossingName(c))
		return nil
	}})
	conn, err := pool.Acquire(t.Context())
	require.NoError(t, err)
	defer conn.Release()
	stats := map[string]int{}
	for seed := range pgtest.Size(uint64(12), 40) {
		clock.Set(start.Add(time.Duration(seed) * time.Millisecond))
		h = &reporting{T: t, Rand: rand.New(rand.NewPCG(seed, 39)), conn: conn.Conn(), ledger: l, clock: clock, reported: map[string]time.Time{}, stats: stats, seed: seed,
			model: &model{scope: fmt.Sprint(seed), tolerance: time.Hour, kept: 1, outer: t, spans: map[budget.Period]span{}}}
		h.quiet, h.level = h.IntN(2) == 0, isolations[h.IntN(len(isolations))]
		h.limits = []budget.Limit{
			h.thresholds(budget.PerWindow(100, time.Duration(20+h.IntN(100))*time.Microsecond)).Named("window"),
			h.thresholds(budget.PerPeriod(100, time.Duration(20+h.IntN(200))*time.Microsecond, start)).Named("period"),
			h.thresholds(budget.Prepaid(200)).Named("credit"),
		}
		for range 45 {
			switch n := h.IntN(20); {
			case n < 10:
				h.charge()
			case n < 15:
				clock.Advance(time.Duration(h.IntN(70)) * time.Microsecond)
			case n < 16:
				clock.Advance(time.Duration(-h.IntN(30)) * time.Microsecond)
			case n < 17:
				h.credit()
			case n < 18:
				h.refund()
			case n < 19:
				if h.repair(); h.IntN(2) == 0 {
					h.jump()
				}
			default:
				h.purge(func() error {
					_, err := l.Purge(t.Context(), pool, budget.PurgeOptions{OlderThan: time.Millisecond, Scope: h.model.scope})
					return err
				})
			}
		}
	}
	t.Log(stats)
	for _, what := range []string{"reported", "armed", "stayed", "refused", "repaired"} {
		require.Greater(t, stats[what], 10, what)
	}
	requireVerified(t, pool, l)
}
