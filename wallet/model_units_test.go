package wallet_test

import (
	"cmp"
	"maps"
	"slices"
	"time"

	"github.com/pgmetered/metered/wallet"
)

// take takes units of the lots that pay for a use, in their order.
func (m *model) take(units int64, use string) (parts []mPart) {
	for _, i := range m.order() {
		if n := min(units, m.lots[i].rest()); n > 0 && m.lots[i].pays(use) {
			parts = append(parts, mPart{i, n})
			units -= n
		}
	}
	return parts
}

// takeLive is take, for no use, of the lots that have not ended by the last entry.
func (m *model) takeLive(units int64) (parts []mPart) {
	for _, i := range m.order() {
		if n := min(units, m.lots[i].rest()); n > 0 && m.lots[i].pays("") && !m.lots[i].due(m.last) {
			parts = append(parts, mPart{i, n})
			units -= n
		}
	}
	return parts
}

func mSum(parts []mPart) (units int64) {
	for _, p := range parts {
		units += p.amount
	}
	return units
}

func (m *model) spend(units int64, use string) []mPart {
	if !m.opened {
		m.plain -= units
		return []mPart{{-1, units}}
	}
	parts := m.take(units, use)
	for _, p := range parts {
		m.lots[p.lot].drawn += p.amount
	}
	if over := units - mSum(parts); over > 0 {
		m.debt += over
		m.owe(use, over)
		parts = append(parts, mPart{-1, over})
	}
	return parts
}

func (m *model) keep(units int64, use string) []mPart {
	if !m.opened {
		return nil
	}
	parts := m.take(units, use)
	for _, p := range parts {
		m.lots[p.lot].kept += p.amount
	}
	if over := units - mSum(parts); over > 0 {
		parts = append(parts, mPart{-1, over})
	}
	return parts
}

// pay pays the overdraft as far as there are units: first spent units, then held ones, the oldest hold first.
func (m *model) pay() {
	if !m.opened {
		return
	}
	for _, p := range m.takeLive(m.debt) {
		m.lots[p.lot].drawn += p.amount
		m.lower(p.amount, "")
		m.serial++
		m.paid = append(m.paid, mPaid{m.serial, p.lot, p.amount})
	}
	for i := range m.holds {
		h := &m.holds[i]
		for j := range h.parts {
			if h.parts[j].lot >= 0 {
				continue
			}
			for _, p := range m.takeLive(h.parts[j].amount) {
				m.lots[p.lot].kept += p.amount
				h.parts[j].amount -= p.amount
				h.parts = append(h.parts, p)
			}
		}
		h.parts = slices.DeleteFunc(h.parts, func(p mPart) bool { return p.amount == 0 })
	}
}

// split takes the first of a hold's units, in the order of lots, and overdraft last.
func (m *model) split(h *mHold, units int64) (first []mPart) {
	slices.SortStableFunc(h.parts, func(a, b mPart) int {
		if a.lot < 0 || b.lot < 0 {
			return cmp.Compare(b.lot, a.lot)
		}
		return m.before(a.lot, b.lot)
	})
	var merged, rest []mPart
	for _, p := range h.parts {
		if n := len(merged); n > 0 && merged[n-1].lot == p.lot {
			merged[n-1].amount += p.amount
		} else {
			merged = append(merged, p)
		}
	}
	for _, p := range merged {
		n := min(units, p.amount)
		units -= n
		if n > 0 {
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

// owe notes units that no lot covers, for a use.
func (m *model) owe(use string, units int64) {
	if use != "" {
		if m.owed == nil {
			m.owed = map[string]int64{}
		}
		m.owed[use] += units
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
		if m.owed != nil {
			m.owed[use] -= n
		}
		return units - n
	}
	units = of(use, units) - none
	for _, use := range slices.Sorted(maps.Keys(m.owed)) {
		units = of(use, max(0, units))
	}
}

// payDebts has lots whose units have come pay what was drawn for their uses.
func (m *model) payDebts(lots ...int) {
	slices.SortFunc(lots, func(a, b int) int { return cmp.Compare(m.lots[a].no, m.lots[b].no) })
	for _, i := range lots {
		l := &m.lots[i]
		if l.uses == nil || l.due(m.last) {
			continue
		}
		for _, use := range mSorted(l.uses) {
			if n := min(m.owed[use], l.rest()); n > 0 {
				m.owed[use] -= n
				m.debt -= n
				l.drawn += n
				m.serial++
				m.paid = append(m.paid, mPaid{m.serial, i, n})
			}
		}
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
		next.ends = at.Add(time.Duration(l.late))
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
	for left := units; left > 0; {
		p := &d.parts[len(d.parts)-1]
		n := min(left, p.amount)
		if p.lot < 0 {
			bare += n
		} else {
			m.giveBack(p.lot, n, at)
			came = append(came, p.lot)
		}
		left -= n
		if p.amount -= n; p.amount == 0 {
			d.parts = d.parts[:len(d.parts)-1]
		}
	}
	n := min(bare, m.debt)
	m.lower(n, d.use)
	bare -= n
	for i := len(m.paid) - 1; i >= 0 && bare > 0; i-- {
		if p := &m.paid[i]; p.amount > 0 {
			n := min(bare, p.amount)
			p.amount -= n
			bare -= n
			m.giveBack(p.lot, n, at)
			came = append(came, p.lot)
		}
	}
	if bare > 0 {
		m.add(mLot{amount: bare, late: wallet.Lapse})
	}
	m.pay()
	m.payDebts(came...)
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
		l.began = l.starts
		if l.starts.IsZero() {
			l.began = at
		}
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
		m.pay()
		i := len(m.lots) - 1
		m.renew(i)
		m.payDebts(i)
	}
}
