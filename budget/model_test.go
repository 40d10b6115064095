package budget_test

import (
	"testing"
	"time"

	"github.com/pgmetered/metered/budget"
)

// model is one scope's ledger done plainly: a list of everything that happened,
// from which each answer is computed anew.
type model struct {
	scope     string
	tolerance time.Duration
	entries   []modelEntry // entry seq is entries[seq-1]
	outer     testing.TB
	spans     map[budget.Period]span
	kept      int // after a purge, the first entry kept besides entry 1, else 1
}

type modelEntry struct {
	kind   string
	amount int64
	at     time.Time
	ref    int // of a refund: the number of its charge
}

// counted returns since when each entry counts: its own time, or that of a later
// clock repair where that is earlier.
func (m *model) counted() []time.Time {
	times := make([]time.Time, len(m.entries))
	var repair time.Time
	for i := len(m.entries) - 1; i >= 0; i-- {
		e := m.entries[i]
		times[i] = e.at
		if !repair.IsZero() && repair.Before(e.at) {
			times[i] = repair
		}
		if e.kind == "clock repair" && (repair.IsZero() || e.at.Before(repair)) {
			repair = e.at
		}
	}
	return times
}

func (m *model) seq() int64 { return int64(len(m.entries)) }

// last is the time of the last entry.
func (m *model) last() time.Time {
	if len(m.entries) == 0 {
		return time.Time{}
	}
	return m.entries[len(m.entries)-1].at
}

func (m *model) add(now time.Time, kind string, amount int64, ref int) time.Time {
	if kind != "clock repair" && now.Before(m.last()) {
		now = m.last()
	}
	m.entries = append(m.entries, modelEntry{kind: kind, amount: amount, at: now, ref: ref})
	return now
}

func (m *model) sum(kind string) (total int64) {
	for _, e := range m.entries {
		if e.kind == kind {
			total += e.amount
		}
	}
	return total
}

// chargedAfter is the units charged after since, less the refunds of these charges.
func (m *model) chargedAfter(since time.Time) (total int64) {
	counted := m.counted()
	for i, e := range m.entries {
		switch {
		case e.kind == "charge" && counted[i].After(since):
			total += e.amount
		case e.kind == "refund" && counted[e.ref-1].After(since):
			total -= e.amount
		}
	}
	return total
}

// made is how many charges count at a time.
func (m *model) made(now time.Time, of budget.Limit) (n int64) {
	for i, at := range m.counted() {
		if m.entries[i].kind == "charge" && (lifetime(of) || at.After(m.since(now, of))) {
			n++
		}
	}
	return n
}

// used is the units that count against a limit at a time. They are not known if the window begins before all entries
// kept by a purge.
func (m *model) used(now time.Time, of budget.Limit) (used int64, known bool) {
	if lifetime(of) {
		return m.sum("charge") - m.sum("refund") - m.sum("credit"), true
	}
	since := m.since(now, of)
	if !m.last().After(since) {
		return 0, true
	}
	if m.kept > 1 && m.counted()[m.kept-1].After(since) {
		return 0, false
	}
	return m.chargedAfter(since), true
}

// trulyUsed is the units that count against a limit, purged ones too.
func (m *model) trulyUsed(now time.Time, of budget.Limit) int64 {
	if lifetime(of) {
		used, _ := m.used(now, of)
		return used
	}
	return m.chargedAfter(m.since(now, of))
}

// lifetime reports whether a limit is for one. A question may leave its window out.
func lifetime(of budget.Limit) bool { return of.Window <= 0 && of.Period.IsZero() }

// since is the last moment that does not count any more.
func (m *model) since(now time.Time, of budget.Limit) time.Time {
	if now = later(now, m.last()); of.Window > 0 {
		return now.Add(-of.Window)
	}
	return m.span(now, of.Period).start.Add(-time.Microsecond)
}

// span is spanOf, which is slow, kept for the next question.
func (m *model) span(at time.Time, p budget.Period) span {
	if s := m.spans[p]; s.start.After(at) || !s.end.After(at) {
		m.spans[p] = spanOf(m.outer, p, at)
	}
	return m.spans[p]
}

// retryAfter tries the time at which each charge leaves the window.
func (m *model) retryAfter(now time.Time, limit budget.Limit, amount int64) time.Duration {
	if amount > limit.Max || limit.Lifetime {
		return budget.Never
	}
	if !limit.Period.IsZero() {
		return m.span(later(now, m.last()), limit.Period).end.Sub(now)
	}
	best := budget.Never
	for _, at := range m.counted() {
		leaves := at.Add(limit.Window)
		if leaves.After(now) && m.chargedAfter(at)+amount <= limit.Max {
			best = min(best, leaves.Sub(now))
		}
	}
	return best
}

// judge is the answer to a charge: the standing of each limit, the limits that refuse, or the error.
func (m *model) judge(now time.Time, c budget.Charge) (standings []budget.Standing, refusals []budget.Refusal, err error) {
	for _, limit := range c.Limits {
		if !lifetime(limit) && m.last().After(now.Add(m.tolerance)) {
			return nil, nil, budget.ErrClock
		}
		used, known := m.used(now, limit)
		if !known {
			return nil, nil, budget.ErrWindowPurged
		}
		var s span
		if !limit.Period.IsZero() {
			s = m.span(later(now, m.last()), limit.Period)
		}
		standings = append(standings, budget.Standing{Limit: limit, Used: used + c.Amount, Available: max(0, limit.Max-used-c.Amount),
			Over: limit.Observe && used+c.Amount > limit.Max, PeriodStart: s.start, PeriodEnd: s.end})
		if used+c.Amount > limit.Max && !limit.Observe {
			refusals = append(refusals, budget.Refusal{
				Scope: c.Scope, Limit: limit, Used: used, Requested: c.Amount, Available: max(0, limit.Max-used),
				RetryAfter: m.retryAfter(now, limit, c.Amount), PeriodStart: s.start, PeriodEnd: s.end,
			})
		}
	}
	return standings, refusals, nil
}

// refund returns the rest of the charge before the refund.
func (m *model) refund(now time.Time, seq, amount int64) (remaining int64, err error) {
	switch {
	case seq > m.seq():
		return 0, budget.ErrUnknownEntry
	case m.kept > 1 && seq < int64(m.kept):
		return 0, budget.ErrEntryPurged
	case m.entries[seq-1].kind != "charge":
		return 0, budget.ErrNotCharge
	}
	remaining = m.entries[seq-1].amount
	for _, e := range m.entries {
		if e.kind == "refund" && int64(e.ref) == seq {
			remaining -= e.amount
		}
	}
	if amount > remaining {
		return remaining, budget.ErrRefundExceeds
	}
	m.add(now, "refund", amount, int(seq))
	return remaining, nil
}

// purge returns how many entries it deletes: of those before the last one that is
// old enough, whole blocks 2-16, 17-32, 33-48, …
func (m *model) purge(cutoff time.Time) (deleted int64) {
	base := 0
	for i, at := range m.counted() {
		if !at.After(cutoff) {
			base = i + 1
		}
	}
	if keep := (base-1)/16*16 + 1; base > 0 && keep > m.kept {
		deleted = int64(keep - max(m.kept, 2))
		m.kept = keep
	}
	return deleted
}

// repair returns how far the scope was ahead.
func (m *model) repair(now time.Time) time.Duration {
	ahead := max(0, m.last().Sub(now))
	if len(m.entries) == 0 {
		return 0
	}
	if ahead > 0 {
		m.add(now, "clock repair", 0, 0)
	}
	return ahead
}

func later(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}
