package holds_test

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
)

// The calls, as the model carries them out. An error leaves it as it was.

// merged are the charges that lines and charges make together, one a scope.
func merged(lines []holds.Line, charges []budget.Charge) []budget.Charge {
	var all []budget.Charge
	add := func(c budget.Charge) {
		i := slices.IndexFunc(all, func(x budget.Charge) bool { return x.Scope == c.Scope })
		if i < 0 {
			all = append(all, budget.Charge{Scope: c.Scope})
			i = len(all) - 1
		}
		all[i].Amount += c.Amount
		all[i].Limits = append(all[i].Limits, c.Limits...)
	}
	for _, l := range lines {
		add(budget.Charge{Scope: l.Scope, Amount: l.Amount, Limits: l.Limits})
	}
	for _, c := range charges {
		add(c)
	}
	return all
}

func scopesOf(charges []budget.Charge) (scopes []string) {
	for _, c := range charges {
		scopes = append(scopes, c.Scope)
	}
	return scopes
}

// refused is the model's ExceededError.
type refused map[mRefusal]bool

func (refused) Error() string { return "refused" }

func (m *model) charges(now time.Time, charges []budget.Charge) error {
	refusals, err := m.judge(now, charges)
	switch {
	case err != nil:
		return err
	case len(refusals) > 0:
		return refused(refusals)
	}
	m.admit(now, scopesOf(charges), scopesOf(charges))
	for _, c := range charges {
		m.charge(c.Scope, now, c.Amount)
	}
	return nil
}

// fewestOf are the units that each line of a request with UpTo must have.
func fewestOf(lines []holds.Line) (units int64) {
	for _, l := range lines {
		units = max(1, units, l.AtLeast)
	}
	return units
}

// askedFor are refusals that name the units which the caller asked for.
func askedFor(refusals map[mRefusal]bool, charges []budget.Charge) map[mRefusal]bool {
	all := map[mRefusal]bool{}
	for r := range refusals {
		for _, c := range charges {
			if c.Scope == r.scope {
				r.requested = c.Amount
			}
		}
		all[r] = true
	}
	return all
}

// place returns the hold that there is with that id, or claim, or makes one.
func (m *model) place(now time.Time, r holds.Placement, claim *holds.Key, claimScope string, reveal bool) (*mHold, error) {
	print := fingerprint(r, claim)
	was := m.find(r.ID)
	if claim != nil {
		was = nil
		for i := range m.holds {
			h := &m.holds[i]
			if h.claim != nil && *h.claim == *claim &&
				(h.state == holds.Held && h.due.After(now) || h.state == holds.Captured && !h.returned) {
				was = h
			}
		}
		if was != nil && (was.state == holds.Captured || was.holder != r.Holder) {
			taken := &holds.TakenError{Key: *claim, Confirmed: was.state == holds.Captured}
			if !taken.Confirmed {
				taken.RetryAfter = was.due.Sub(now)
			}
			if reveal {
				by := was.view(now)
				taken.By = &by
			}
			return nil, taken
		}
		r.Lines = append([]holds.Line{{Scope: claimScope, Amount: 1, Limits: []budget.Limit{budget.Lifetime(1)}}}, r.Lines...)
	}
	switch {
	case was != nil && was.print != print:
		return nil, holds.ErrConflict
	case was != nil && was.view(now).State != holds.Held:
		return was, stateError(was, now)
	case was != nil:
		return was, nil
	}
	asked := r.Lines
	all := merged(r.Lines, r.Charges)
	refusals, err := m.judge(now, all)
	for r.UpTo && err == nil && len(refusals) > 0 && r.Lines[0].Amount > fewestOf(asked) {
		r.Lines = slices.Clone(r.Lines)
		for i := range r.Lines {
			r.Lines[i].Amount--
		}
		all = merged(r.Lines, r.Charges)
		refusals, err = m.judge(now, all)
	}
	if r.UpTo {
		refusals = askedFor(refusals, merged(asked, r.Charges))
	}
	switch {
	case err != nil:
		return nil, err
	case len(refusals) > 0:
		return nil, refused(refusals)
	}
	m.admit(now, scopesOf(all), scopesOf(all))
	h := mHold{tenant: r.Tenant, id: r.ID, holder: r.Holder, print: print, claim: claim, state: holds.Held, placed: now, deadline: now.Add(r.TTL),
		due: now.Add(r.TTL + r.Grace), ceiling: now.Add(modelLifetime), version: 1, pending: true, metadata: r.Metadata}
	if r.UpTo {
		h.upTo = asked[0].Amount
	}
	for _, c := range merged(r.Lines, nil) {
		m.entry(c.Scope, now)
		line := mLine{scope: c.Scope, amount: c.Amount, open: c.Amount}
		for _, l := range r.Lines {
			if l.Scope == c.Scope {
				line.least += l.AtLeast
			}
		}
		h.lines = append(h.lines, line)
	}
	slices.SortFunc(h.lines, func(a, b mLine) int { return strings.Compare(a.scope, b.scope) })
	for _, c := range r.Charges {
		m.charge(c.Scope, now, c.Amount)
	}
	m.holds = append(m.holds, h)
	return &m.holds[len(m.holds)-1], nil
}

// claimScope is the scope of a claim's own unit.
func claimScope(tenant string, key holds.Key) string {
	return budget.ScopeKey("claim", budget.ScopeKey(key.Type, key.Value, tenant), "")
}

// opened are the units of a scope that a hold still keeps.
func opened(h *mHold, scope string) (units int64) {
	for _, l := range h.lines {
		if l.scope == scope {
			units = l.open
		}
	}
	return units
}

func (m *model) capture(now time.Time, c holds.Capture) ([]*mHold, error) {
	found, err := m.named(now, c.IDs, c.Holder, holds.Held)
	if err != nil {
		return nil, err
	}
	var excess []budget.Charge
	take := map[string]int64{}
	if own := found[0].claim; own != nil && !c.All {
		confirms := slices.ContainsFunc(c.Lines, func(l holds.Line) bool { return l.Scope == claimScope(c.Tenant, *own) && l.Amount > 0 })
		if confirms == c.Keep {
			return nil, budget.ErrArgument
		}
	}
	for _, used := range c.Lines {
		i := slices.IndexFunc(found[0].lines, func(l mLine) bool { return l.scope == used.Scope })
		if i < 0 {
			return nil, budget.ErrArgument
		}
		take[used.Scope] = used.Amount
		if open := found[0].lines[i].open; used.Amount > open {
			if c.Over == holds.OverRefused {
				return nil, &holds.ExcessError{ID: c.IDs[0], Scope: used.Scope, Requested: used.Amount, Open: open}
			}
			more := budget.Charge{Scope: used.Scope, Amount: used.Amount - open}
			if c.Over == holds.OverIfFits || c.Over == holds.OverUpTo || c.Over == holds.OverEvenly {
				more.Limits = used.Limits
			}
			if c.Over == holds.OverUpTo {
				refusals, err := m.judge(now, []budget.Charge{more})
				if err != nil {
					return nil, err
				}
				for r := range refusals {
					more.Amount = min(more.Amount, r.available)
				}
				if take[used.Scope] = open + more.Amount; more.Amount == 0 {
					continue
				}
			}
			excess = append(excess, more)
		}
	}
	if c.Over == holds.OverEvenly {
		refusals, err := m.judge(now, excess)
		if err != nil {
			return nil, err
		}
		less := int64(0)
		for r := range refusals {
			less = max(less, r.requested-r.available)
		}
		for i := range excess {
			excess[i].Amount -= min(less, excess[i].Amount)
			take[excess[i].Scope] -= min(less, take[excess[i].Scope]-opened(found[0], excess[i].Scope))
		}
		excess = slices.DeleteFunc(excess, func(c budget.Charge) bool { return c.Amount == 0 })
	}
	if len(excess) > 0 {
		refusals, err := m.judge(now, excess)
		switch {
		case err != nil:
			return nil, err
		case len(refusals) > 0:
			return nil, refused(refusals)
		}
		m.admit(now, scopesOf(excess), scopesOf(excess))
	}
	written := open(found...)
	if c.Keep {
		written = slices.DeleteFunc(written, func(scope string) bool { return take[scope] == 0 })
	}
	m.endMinima(now, nil, written...)
	for _, h := range found {
		for i := range h.lines {
			l := &h.lines[i]
			n := take[l.scope]
			if c.All {
				n = l.open
			}
			if covered := min(n, l.open); covered > 0 {
				h.spent = append(h.spent, m.charge(l.scope, now, covered))
			}
			if n > l.open {
				h.spent = append(h.spent, m.charge(l.scope, now, n-l.open))
			}
			l.captured += n
			l.open -= min(n, l.open)
		}
		h.version++
		if c.Entity != "" {
			h.entity = c.Entity
		}
		if !c.Keep {
			m.free(h, now, nil)
			h.state, h.ended, h.pending = holds.Captured, now, false
		}
	}
	return found, nil
}

func (m *model) release(now time.Time, r holds.Release) ([]*mHold, error) {
	needs := []holds.State{holds.Held}
	if r.Captured {
		needs = append(needs, holds.Captured, holds.Returned)
	}
	found, err := m.named(now, r.IDs, r.Holder, needs...)
	for _, h := range found {
		if h.returned {
			return nil, stateError(h, now)
		}
	}
	for _, h := range found {
		if h.state == holds.Captured {
			m.giveBack(h, now, r.Note.Reason)
			continue
		}
		m.endMinima(now, nil, open(h)...)
		m.free(h, now, nil)
		h.state, h.ended, h.pending, h.reason = holds.Released, now, false, r.Note.Reason
		h.version++
	}
	return found, err
}

func (m *model) extend(now time.Time, e holds.Extend) ([]*mHold, error) {
	found, err := m.named(now, e.IDs, e.Holder, holds.Held)
	for _, h := range found {
		if !h.deadline.After(now) {
			return nil, &holds.StateError{ID: h.id, State: holds.Expired, Hold: h.view(now)}
		}
		if h.deadline.Add(e.By).After(h.ceiling) {
			return nil, fmt.Errorf("%w: %q has %v left", holds.ErrCeiling, h.id, h.ceiling.Sub(h.deadline))
		}
	}
	for _, h := range found {
		h.deadline, h.due = h.deadline.Add(e.By), h.due.Add(e.By)
		h.version++
	}
	return found, err
}

func (m *model) refund(now time.Time, r holds.Return) ([]*mHold, error) {
	found, err := m.named(now, r.IDs, r.Holder, holds.Captured, holds.Returned)
	for _, h := range m.holds { // in the order in which they were placed
		if h.returned && slices.ContainsFunc(found, func(f *mHold) bool { return f.id == h.id }) {
			return nil, stateError(&h, now)
		}
	}
	for _, h := range found {
		m.giveBack(h, now, r.Note.Reason)
	}
	return found, err
}

func (m *model) giveBack(h *mHold, now time.Time, reason string) {
	for _, ref := range h.spent {
		m.endMinima(now, nil, ref.scope)
		m.entry(ref.scope, now)
		c := &m.scopes[ref.scope].charges[ref.charge]
		c.refunded = c.amount
	}
	h.returned, h.reason = true, reason
	h.version++
}

func (m *model) expireOne(now time.Time, e holds.Expire) (h *mHold, ended bool, err error) {
	h = m.find(e.ID)
	switch {
	case h == nil:
		return nil, false, holds.ErrUnknown
	case h.state == holds.Captured || h.state == holds.Released || !h.pending, // it ended before
		!h.deadline.Equal(e.Deadline),             // it was extended
		h.state == holds.Held && h.due.After(now): // it is not due
		return h, false, nil
	}
	if h.state == holds.Held {
		h.state, h.ended = holds.Expired, h.due
		h.version++
	}
	m.endMinima(now, h, open(h)...)
	m.expire([]*mHold{h}, now, nil)
	h.pending = false
	return h, true, nil
}

// sweep returns how many holds it ended, in transactions of batch holds.
func (m *model) sweep(now time.Time, batch int) (n int) {
	var due []*mHold
	for _, i := range m.byDue() {
		if h := &m.holds[i]; h.pending && !h.due.After(now) {
			due = append(due, h)
		}
	}
	for some := range slices.Chunk(due, batch) {
		m.expire(some, now, nil)
		for _, h := range some {
			h.pending = false
			n++
		}
	}
	return n
}
