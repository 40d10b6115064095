package wallet_test

import (
	"cmp"
	"maps"
	"slices"
	"time"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/wallet"
)

// The rules of a model (model_test.go): which lot is drawn, what time does, and where units go that come back.

// before reports whether a lot is drawn before another one, both given by number.
func (m *model) before(a, b int) int {
	x, y := &m.lots[a], &m.lots[b]
	return cmp.Or(cmp.Compare(x.priority, y.priority), x.end().Compare(y.end()), slices.Compare(x.age[:], y.age[:]))
}

// due lets everything due happen, in the order of time: lots that end, lots that begin, and then holds, each from the oldest on.
func (m *model) due(now time.Time) {
	until := mLater(now, m.last)
	for {
		var first func()
		var order [5]int64
		next := func(at time.Time, kind int64, age [3]int64, do func()) {
			if o := [5]int64{at.UnixMicro(), kind, age[0], age[1], age[2]}; first == nil || slices.Compare(o[:], order[:]) < 0 {
				first, order = func() { m.at(at); do() }, o
			}
		}
		for i := range m.lots {
			l := &m.lots[i]
			if l.due(until) && l.rest() > 0 {
				next(l.ends, 0, l.age, func() { m.endLot(i) })
			}
			if l.pending > 0 && !l.starts.After(until) {
				next(l.starts, 1, l.age, func() { m.begin(i) })
			}
		}
		for i := range m.holds { // with nothing held one is due by the clock alone, which may go back
			if h := &m.holds[i]; !h.ended && h.amount > 0 && !h.due.After(now) {
				next(h.due, 2, [3]int64{int64(i)}, func() { m.endHold(i, min(h.amount, max(0, h.least-h.spent))) })
			}
		}
		if first == nil {
			return
		}
		first()
	}
}

// begin begins a lot: its units come.
func (m *model) begin(i int) {
	m.lots[i].pending = 0
	m.lots[i].age = m.newAge(m.lots[i].starts)
	m.pay(i)
	m.renew(i)
}

// endHold ends a hold, after some of it was captured.
func (m *model) endHold(i int, captured int64) {
	h := &m.holds[i]
	m.capture(h, captured)
	came := m.letGo(h, h.amount)
	h.ended = true
	m.pay(came...)
}

// endLot ends a lot: some units roll over, the rest lapse.
func (m *model) endLot(i int) {
	l := &m.lots[i]
	room := l.rollCap
	for j := range m.lots {
		if c := &m.lots[j]; l.shared && c.pooled && c.category == l.category && c.end().After(l.ends) {
			room -= c.rest() + c.kept
		}
	}
	if n := min(l.rest(), room); n > 0 {
		m.roll(i, n, l.ends, l.rollFor, l.rollNo)
		l = &m.lots[i]
	}
	l.lapsed += l.rest()
}

// roll lets units of a lot go on in another one.
func (m *model) roll(i int, units int64, from time.Time, lasts time.Duration, no int) {
	l := &m.lots[i]
	next := mLot{category: l.category, priority: l.priority, uses: l.uses, amount: units, late: l.late, from: i + 1, no: no, carried: true, pooled: l.shared || l.pooled, shown: cmp.Or(l.reference, l.shown)}
	if lasts != 0 {
		next.ends = from.Add(lasts)
	}
	if no > 0 { // at its end
		if !l.rollTo.IsZero() {
			next.ends = mEnd(l.rollTo, from)
		}
		if l.again != 0 {
			next.rollCap, next.rollFor, next.rollTo, next.shared, next.again = l.rollCap, l.rollFor, l.rollTo, l.shared, l.again
		}
		if l.again > 0 {
			next.again--
		}
	}
	l.rolled += units
	l.rollCap = 0
	l.child = len(m.lots) + 1
	m.add(next)
}

// renew notes the lot of the period after that of a lot that has begun.
func (m *model) renew(i int) {
	l := m.lots[i]
	if l.renews.IsZero() {
		return
	}
	m.lots[i].renews = budget.Period{}
	l.starts = mEnd(l.renews, mLater(l.starts, l.began))
	l.ends = mEnd(l.renews, l.starts)
	l.amount, l.pending = l.each, l.each
	l.drawn, l.kept, l.lapsed, l.revoked, l.rolled, l.child, l.from, l.no, l.rollNo, l.rollCap = 0, 0, 0, 0, 0, 0, 0, 0, 0, l.fullCap
	l.reference, l.grant = l.renewal+" "+l.starts.UTC().Format("2006-01-02T15:04:05Z"), wallet.Grant{}
	if slices.ContainsFunc(m.lots, func(other mLot) bool { return other.reference == l.reference }) {
		l.reference = ""
	}
	m.add(l)
}

// take takes units of the lots that pay for a use, in their order, or of those alone that have not ended by the last entry (live).
func (m *model) take(units int64, use string, live bool) (parts []mPart) {
	for _, i := range m.order() {
		l := &m.lots[i]
		if n := min(units, l.rest()); n > 0 && l.pays(use) && !(live && l.due(m.last)) {
			parts = append(parts, mPart{i, n})
			units -= n
		}
	}
	return parts
}

// cover takes units for a use of lots, which spend or keep them. What no lot covers is overdraft.
func (m *model) cover(units int64, use string, spends bool) (parts []mPart) {
	for _, p := range m.take(units, use, false) {
		if l := &m.lots[p.lot]; spends {
			l.drawn += p.amount
		} else {
			l.kept += p.amount
		}
		parts, units = append(parts, p), units-p.amount
	}
	if units > 0 {
		parts = append(parts, mPart{-1, units})
		if spends {
			m.owe(use, units)
		}
	}
	return parts
}

// draw notes the parts that a refund needs.
func (m *model) draw(amount int64, use string) []mPart {
	parts := []mPart{{-1, amount}}
	if m.opened {
		parts = m.cover(amount, use, true)
	} else {
		m.plain -= amount
	}
	m.serial++
	m.draws = append(m.draws, mDraw{serial: m.serial, amount: amount, use: use, parts: slices.Clone(parts)})
	return parts
}

// keep reserves units for a use.
func (m *model) keep(units int64, use string) []mPart {
	if !m.opened {
		return nil
	}
	return m.cover(units, use, false)
}

// capture spends units of a hold.
func (m *model) capture(hold *mHold, units int64) {
	if units == 0 {
		return
	}
	hold.amount -= units
	hold.spent += units
	m.serial++
	d := mDraw{serial: m.serial, amount: units, parts: []mPart{{-1, units}}}
	if !m.opened {
		m.plain -= units
	} else {
		d.parts = m.split(hold, units)
		for _, p := range d.parts {
			if p.lot < 0 {
				m.owe(hold.use, p.amount)
				continue
			}
			m.lots[p.lot].kept -= p.amount
			m.lots[p.lot].drawn += p.amount
		}
	}
	m.draws = append(m.draws, d)
}

// split takes the first of a hold's units, in the order of lots, and overdraft last.
func (m *model) split(h *mHold, units int64) (first []mPart) {
	slices.SortStableFunc(h.parts, func(a, b mPart) int {
		if a.lot < 0 || b.lot < 0 {
			return cmp.Compare(b.lot, a.lot)
		}
		return m.before(a.lot, b.lot)
	})
	var rest []mPart
	for _, p := range h.parts {
		n := min(units, p.amount)
		units -= n
		if last := len(first) - 1; last >= 0 && first[last].lot == p.lot {
			first[last].amount += n
		} else if n > 0 {
			first = append(first, mPart{p.lot, n})
		}
		if n < p.amount {
			rest = append(rest, mPart{p.lot, p.amount - n})
		}
	}
	h.parts = rest
	return first
}

// letGo gives back units of a hold. They lapse if their lot has ended.
func (m *model) letGo(h *mHold, units int64) (lots []int) {
	h.amount -= units
	for _, p := range m.split(h, units) {
		if p.lot < 0 {
			continue
		}
		l := &m.lots[p.lot]
		if l.kept -= p.amount; l.due(m.last) {
			l.lapsed += p.amount
		}
		lots = append(lots, p.lot)
	}
	return lots
}

// pay pays the overdraft as far as there are units: first spent units, then held ones, the oldest hold first. Lots to which
// units came pay what was drawn for their uses.
func (m *model) pay(came ...int) {
	if !m.opened {
		return
	}
	for _, p := range m.take(m.debt, "", true) {
		m.payBy(p.lot, p.amount)
		m.lower(p.amount, "")
	}
	for i := range m.holds {
		h := &m.holds[i]
		for j := range h.parts {
			if h.parts[j].lot >= 0 {
				continue
			}
			for _, p := range m.take(h.parts[j].amount, "", true) {
				m.lots[p.lot].kept += p.amount
				h.parts[j].amount -= p.amount
				h.parts = append(h.parts, p)
			}
		}
		h.parts = slices.DeleteFunc(h.parts, func(p mPart) bool { return p.amount == 0 })
	}
	m.payDebts(came)
}

// payDebts has lots whose units have come pay what was drawn for their uses.
func (m *model) payDebts(lots []int) {
	slices.SortFunc(lots, func(a, b int) int { return slices.Compare(m.lots[a].age[:], m.lots[b].age[:]) })
	for _, i := range lots {
		l := &m.lots[i]
		if l.uses == nil || l.due(m.last) {
			continue
		}
		for _, use := range mSorted(l.uses) {
			if n := min(m.owed[use], l.rest()); n > 0 {
				m.owed[use] -= n
				m.debt -= n
				m.payBy(i, n)
			}
		}
	}
}

// lower lowers the debt, first what was drawn for a use, then what was drawn for none, and then others.
func (m *model) lower(units int64, use string) {
	none := m.debt
	for _, n := range m.owed {
		none -= n
	}
	m.debt -= units
	of := func(use string, units int64) int64 {
		n := max(0, min(units, m.owed[use]))
		m.owed[use] -= n
		return units - n
	}
	units = of(use, units) - none
	for _, use := range slices.Sorted(maps.Keys(m.owed)) {
		units = of(use, max(0, units))
	}
}

// giveBack gives units of a refund back to a lot. If it has ended, they lapse or go on in a new one.
func (m *model) giveBack(lot int, units int64, at time.Time) {
	l := &m.lots[lot]
	if l.drawn -= units; !l.due(at) {
		return
	}
	if l.late == wallet.Lapse {
		l.lapsed += units
		return
	}
	next := mLot{category: l.category, priority: l.priority, uses: l.uses, amount: units, late: l.late, from: lot + 1, shown: cmp.Or(l.reference, l.shown)}
	if l.late != wallet.Forever {
		next.ends = at.Add(l.late)
	}
	l.rolled += units
	m.add(next)
}

// refund gives units of a draw back to its lots, the last one first. Overdrawn units reduce the debt first. Next they
// go to the lots that have paid the debt since, and the rest becomes a lot.
func (m *model) refund(i int, units int64, now time.Time) {
	m.minima(now)
	if !m.opened {
		m.at(now)
		m.draws[i].refunded += units
		m.plain += units
		return
	}
	at := m.settle(now)
	d := &m.draws[i] // after the captures of minima
	d.refunded += units
	bare := int64(0)
	var came []int
	back := func(lot int, of *int64, most int64) int64 {
		n := min(most, *of)
		if *of -= n; lot >= 0 && n > 0 {
			m.giveBack(lot, n, at)
			came = append(came, lot)
		}
		return n
	}
	for left := units; left > 0; {
		p := &d.parts[len(d.parts)-1]
		n := back(p.lot, &p.amount, left)
		if left -= n; p.lot < 0 {
			bare += n
		}
		if p.amount == 0 {
			d.parts = d.parts[:len(d.parts)-1]
		}
	}
	n := min(bare, m.debt)
	m.lower(n, d.use)
	bare -= n
	for i := len(m.paid) - 1; i >= 0; i-- {
		bare -= back(m.paid[i].lot, &m.paid[i].amount, bare)
	}
	if bare > 0 {
		m.add(mLot{amount: bare, late: wallet.Lapse})
	}
	m.pay(came...)
}

// minima ends the holds that are due in a scope that is no wallet yet, if one of them spends a minimum.
func (m *model) minima(now time.Time) {
	if !m.opened && slices.ContainsFunc(m.holds, func(h mHold) bool { return !h.ended && h.amount > 0 && h.least > h.spent && !h.due.After(now) }) {
		m.due(now)
	}
}

// grant adds a lot. The first one makes the scope a wallet: its units become a lot that never ends.
func (m *model) grant(l mLot, now time.Time) {
	m.minima(now)
	m.open()
	at := m.settle(now)
	switch {
	case l.amount == 0: // the next one brings units
		l.began = cmp.Or(l.starts, at)
		m.add(l)
		m.renew(len(m.lots) - 1)
		m.due(now)
	case l.starts.After(at) || l.due(at):
		l.pending = l.amount
		m.add(l)
		m.due(now)
	default:
		l.began, l.starts = at, time.Time{}
		m.add(l)
		m.pay(len(m.lots) - 1)
		m.renew(len(m.lots) - 1)
	}
}
