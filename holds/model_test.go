package holds_test

import (
	"encoding/json"
	"fmt"
	"slices"
	"time"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
)

// model is the scopes and holds of one history done plainly: each answer is computed
// anew from lists of charges and holds. It is a value: a savepoint goes back to a copy made by clone.
type model struct {
	scopes map[string]mScope
	holds  []mHold
}

type mScope struct {
	last    time.Time // of its last entry
	charges []mCharge
}

type mCharge struct {
	at               time.Time
	amount, refunded int64
	due              time.Time // of a minimum that is not written down
}

type mLine struct {
	scope                  string
	amount, captured, open int64 // open is counted until somebody frees it
	least                  int64 // is captured by expiry
}

// mHold is a hold as it is written down: one that is due may not have been ended yet.
type mHold struct {
	tenant, id, holder, entity, print string
	reason                            string
	metadata                          json.RawMessage
	claim                             *holds.Key
	state                             holds.State
	placed, deadline, due             time.Time
	ceiling, ended                    time.Time
	version                           int
	returned, pending                 bool
	upTo                              int64 // units that were asked for of each line, 0 without UpTo
	lines                             []mLine
	spent                             []mRef
}

// mRef is a charge that a capture made.
type mRef struct {
	scope  string
	charge int
}

func (m *model) clone() *model {
	c := &model{scopes: map[string]mScope{}, holds: slices.Clone(m.holds)}
	for name, s := range m.scopes {
		s.charges = slices.Clone(s.charges)
		c.scopes[name] = s
	}
	for i := range c.holds {
		c.holds[i].lines = slices.Clone(c.holds[i].lines)
		c.holds[i].spent = slices.Clone(c.holds[i].spent)
	}
	return c
}

func (m *model) find(id string) *mHold {
	for i := range m.holds {
		if m.holds[i].id == id {
			return &m.holds[i]
		}
	}
	return nil
}

// entry makes an entry of a scope: time does not go back in it.
func (m *model) entry(scope string, now time.Time) time.Time {
	s := m.scopes[scope]
	s.last = later(s.last, now)
	m.scopes[scope] = s
	return s.last
}

func (m *model) charge(scope string, now time.Time, amount int64) mRef {
	at := m.entry(scope, now)
	s := m.scopes[scope]
	s.charges = append(s.charges, mCharge{at: at, amount: amount})
	m.scopes[scope] = s
	return mRef{scope, len(s.charges) - 1}
}

// repair lets a scope go on that is ahead of the clock: its charges count as made no later than now.
func (m *model) repair(scope string, now time.Time) (ahead time.Duration) {
	s := m.scopes[scope]
	if !s.last.After(now) {
		return 0
	}
	ahead, s.last = s.last.Sub(now), now
	for i, c := range s.charges {
		if c.at.After(now) {
			s.charges[i].at = now
		}
	}
	m.scopes[scope] = s
	return ahead
}

func (m *model) used(scope string, now time.Time, window time.Duration) (used int64) {
	s := m.scopes[scope]
	since := later(now, s.last).Add(-window)
	for _, c := range s.charges {
		if window == 0 || c.at.After(since) {
			used += c.amount - c.refunded
		}
	}
	for _, c := range m.minima(scope, now) {
		if window == 0 || c.at.After(since) {
			used += c.amount
		}
	}
	return used
}

// minima are charges that expiry makes, and nobody has written down.
func (m *model) minima(scope string, now time.Time) (charges []mCharge) {
	for _, h := range m.holds {
		for _, l := range h.lines {
			if l.scope == scope && l.open > 0 && !h.due.After(now) {
				charges = append(charges, mCharge{at: later(h.due, m.scopes[scope].last), amount: max(0, l.least-l.captured), due: h.due})
			}
		}
	}
	return charges
}

// between is the units charged to a scope from one time until another.
func (m *model) between(scope string, now, from, to time.Time) (units int64) {
	for _, c := range append(m.minima(scope, now), m.scopes[scope].charges...) {
		if !c.at.Before(from) && c.at.Before(to) {
			units += c.amount
		}
	}
	return units
}

// held is the units of a scope in open holds, without due ones, and when the next of them is due.
func (m *model) held(scope string, now time.Time) (held int64, due time.Time) {
	for _, h := range m.holds {
		for _, l := range h.lines {
			if l.scope == scope && l.open > 0 && h.due.After(now) {
				held += l.open
				if due.IsZero() || h.due.Before(due) {
					due = h.due
				}
			}
		}
	}
	return held, due
}

// mRefusal is the part of a refusal that the model knows.
type mRefusal struct {
	scope                            string
	max                              int64
	window                           time.Duration
	used, held, requested, available int64
	due, retry                       time.Duration
}

// judge returns the limits that refuse charges, of distinct scopes.
func (m *model) judge(now time.Time, charges []budget.Charge) (refusals map[mRefusal]bool, err error) {
	refusals = map[mRefusal]bool{}
	for _, c := range charges {
		for _, l := range c.Limits {
			if l.Window > 0 && m.scopes[c.Scope].last.After(now.Add(time.Minute)) {
				return nil, budget.ErrClock
			}
			used := m.used(c.Scope, now, l.Window)
			held, due := m.held(c.Scope, now)
			if used+held+c.Amount > l.Max {
				r := mRefusal{scope: c.Scope, max: l.Max, window: l.Window, used: used, held: held, requested: c.Amount,
					available: max(0, l.Max-used-held)}
				if held > 0 {
					r.due = due.Sub(now)
				}
				r.retry = m.retry(c, l, now, held, due)
				refusals[r] = true
			}
		}
	}
	return refusals, nil
}

// retry tries the times at which a charge or a minimum leaves the window, or the first hold falls due: from then on nothing counts as held, but
// all that holds will capture counts as charged.
func (m *model) retry(c budget.Charge, l budget.Limit, now time.Time, held int64, due time.Time) time.Duration {
	best := budget.Never
	times := []time.Time{due}
	for _, spent := range m.scopes[c.Scope].charges {
		times = append(times, spent.at.Add(l.Window))
	}
	minima := m.minima(c.Scope, now.Add(365*24*time.Hour))
	for _, spent := range minima {
		times = append(times, spent.at.Add(l.Window))
	}
	for _, t := range times {
		units, fallen := held, held > 0 && !t.Before(due)
		if fallen {
			units = 0
		}
		for _, spent := range append(minima, m.scopes[c.Scope].charges...) {
			if (fallen || !spent.due.After(now)) && (l.Lifetime || spent.at.After(later(t, m.scopes[c.Scope].last).Add(-l.Window))) {
				units += spent.amount - spent.refunded
			}
		}
		if t.After(now) && units+c.Amount <= l.Max {
			best = min(best, t.Sub(now))
		}
	}
	return best
}

// admit ends the due holds on the scopes of a call that was let in, and frees their units of the locked scopes.
func (m *model) admit(now time.Time, scopes, locked []string) {
	var due []*mHold
	for i := range m.holds {
		h := &m.holds[i]
		counts := func(l mLine) bool { return l.open > 0 && slices.Contains(scopes, l.scope) }
		if !h.due.After(now) && slices.ContainsFunc(h.lines, counts) {
			due = append(due, h)
		}
	}
	m.expire(due, now, locked)
}

// expire ends holds that are due, in the order of placing: it captures the least of their lines on the scopes, or on all, each
// when it was due, and then frees the rest.
func (m *model) expire(all []*mHold, now time.Time, scopes []string) {
	for _, h := range all {
		if h.state == holds.Held {
			h.state, h.ended = holds.Expired, h.due
			h.version++
		}
	}
	byDue := slices.Clone(all)
	slices.SortStableFunc(byDue, func(a, b *mHold) int { return a.due.Compare(b.due) })
	for _, h := range byDue {
		for i := range h.lines {
			l := &h.lines[i]
			if l.open > 0 && l.least > l.captured && (scopes == nil || slices.Contains(scopes, l.scope)) {
				at := h.due
				if at.After(now) {
					at = now
				}
				m.charge(l.scope, at, l.least-l.captured)
				l.open -= l.least - l.captured
				l.captured = l.least
			}
		}
	}
	last := map[string]time.Time{}
	for _, h := range all {
		for i := range h.lines {
			l := &h.lines[i]
			if l.open > 0 && (scopes == nil || slices.Contains(scopes, l.scope)) {
				last[l.scope] = later(last[l.scope], h.due)
				l.open = 0
			}
		}
	}
	for scope, due := range last {
		if due.After(now) {
			due = now
		}
		m.entry(scope, due)
	}
}

// endMinima ends due holds, except own, on those of the scopes where that captures units, ahead of an entry.
func (m *model) endMinima(now time.Time, own *mHold, scopes ...string) {
	scopes = slices.DeleteFunc(slices.Clone(scopes), func(scope string) bool {
		return !slices.ContainsFunc(m.holds, func(h mHold) bool {
			return (own == nil || h.id != own.id) && !h.due.After(now) &&
				slices.ContainsFunc(h.lines, func(l mLine) bool { return l.scope == scope && l.open > 0 && l.least > l.captured })
		})
	})
	m.admit(now, scopes, scopes)
}

// open are the scopes of which holds keep something.
func open(all ...*mHold) (scopes []string) {
	for _, h := range all {
		for _, l := range h.lines {
			if l.open > 0 {
				scopes = append(scopes, l.scope)
			}
		}
	}
	return scopes
}

func (m *model) free(h *mHold, now time.Time, scopes []string) {
	for i := range h.lines {
		l := &h.lines[i]
		if l.open > 0 && (scopes == nil || slices.Contains(scopes, l.scope)) {
			m.entry(l.scope, now)
			l.open = 0
		}
	}
}

// view is a hold as it is read at a time.
func (h *mHold) view(now time.Time) holds.Hold {
	v := holds.Hold{Tenant: h.tenant, ID: h.id, Holder: h.holder, State: h.state, Version: h.version, PlacedAt: h.placed, Deadline: h.deadline,
		Due: h.due, Ceiling: h.ceiling, EndedAt: h.ended, Now: now, Claim: h.claim, Entity: h.entity, Reason: h.reason, Metadata: h.metadata}
	if h.returned {
		v.State = holds.Returned
	}
	if h.state == holds.Held && !h.due.After(now) {
		v.State, v.EndedAt = holds.Expired, h.due
	}
	for _, l := range h.lines {
		line := holds.HeldLine{Scope: l.scope, Amount: l.amount, Captured: l.captured, Open: l.open, AtLeast: l.least}
		if v.State == holds.Expired {
			line.Captured = max(l.captured, l.least)
		}
		if h.returned {
			line.Refunded = l.captured
		}
		if v.State != holds.Held {
			line.Open = 0
		}
		v.Lines = append(v.Lines, line)
	}
	return v
}

// named are the holds of a call, or why it is refused.
func (m *model) named(now time.Time, ids []string, holder string, needs ...holds.State) ([]*mHold, error) {
	var found []*mHold
	for _, id := range ids {
		h := m.find(id)
		if h == nil || holder != "" && h.holder != holder {
			return nil, holds.ErrUnknown
		}
		found = append(found, h)
	}
	for _, h := range found {
		if !slices.Contains(needs, h.view(now).State) {
			return nil, stateError(h, now)
		}
	}
	return found, nil
}

func stateError(h *mHold, now time.Time) error {
	v := h.view(now)
	return &holds.StateError{ID: h.id, State: v.State, Hold: v}
}

func fingerprint(r holds.Placement, claim *holds.Key) string {
	sums := map[string][2]int64{}
	for _, l := range r.Lines {
		s := sums[l.Scope]
		s[0] += l.Amount
		sums[l.Scope] = s
	}
	for _, c := range r.Charges {
		s := sums[c.Scope]
		s[1] += c.Amount
		sums[c.Scope] = s
	}
	return fmt.Sprintln(r.Holder, claim, sums, string(r.Metadata), r.UpTo)
}

func later(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}
