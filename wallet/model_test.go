package wallet_test

import (
	"cmp"
	"maps"
	"slices"
	"time"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/wallet"
)

// model is one wallet done plainly: lists of lots, draws and holds, and hardly a sum. Each answer is computed anew. A
// rollback goes back to a copy made by clone.
type model struct {
	overdraft int64     // how far below zero draws and holds may go
	last      time.Time // of its last entry
	opened    bool      // it has been granted a lot
	plain     int64     // before that: its units, holds aside
	lots      []mLot    // in the order in which they came to be
	draws     []mDraw
	holds     []mHold          // in the order in which they were placed
	paid      []mPaid          // overdrafts that a lot paid later
	debt      int64            // spent, and paid by no lot
	owed      map[string]int64 // of debt: what was drawn for uses
	serial    int              // of draws and payments
	numbers   int              // of lots
	grants    int64            // of lots, and beginnings
}

type mLot struct {
	reference, category string
	priority            int
	amount              int64
	ends                time.Time // zero: never
	drawn, kept         int64     // units spent of it, and reserved by holds
	lapsed, revoked     int64
	rolled              int64
	rollCap             int64
	rollFor             time.Duration
	late                wallet.Late
	grant               wallet.Grant
	child               int       // 1 + the number of the lot that it rolled over into, 0 for none
	from                int       // 1 + the number of the lot that its units were in before, 0 for none
	shown               string    // the reference of the lot that its units were in first
	pending             int64     // units that begin at starts
	starts              time.Time // zero: they began with the grant
	renews              budget.Period
	began               time.Time // of the first of renews: its grant
	fullCap             int64     // the rollCap of each of them
	each                int64     // units of each lot of renews
	renewal             string    // the reference of the first of them
	rollTo              budget.Period
	again               int      // how often its units can roll over after the first time, -1: always
	shared              bool     // rollCap is for all units of the category that rolled over
	pooled              bool     // it rolled over of a shared one
	carried             bool     // its units rolled over into it
	uses                []string // what it pays for, none for everything
	no, rollNo          int      // its number, and the number set aside for the lot that it rolls over into
	age                 [3]int64 // when its units were granted first, and the order of that grant and of its own
}

// mPart is units taken of a lot. Lot -1 is the overdraft.
type mPart struct {
	lot    int
	amount int64
}

type mDraw struct {
	serial           int
	seq              int64
	amount, refunded int64
	use              string
	parts            []mPart // that stand
}

type mHold struct {
	id     string
	due    time.Time
	amount int64
	least  int64 // units to be captured when it falls due, with those that were captured before
	spent  int64 // units that were captured
	parts  []mPart
	use    string
	ended  bool
	lease  bool // of a child: it has no time to fall due
}

type mPaid struct {
	serial, lot int
	amount      int64
}

func (m *model) clone() *model {
	c := *m
	c.lots, c.draws, c.holds, c.paid = slices.Clone(m.lots), slices.Clone(m.draws), slices.Clone(m.holds), slices.Clone(m.paid)
	c.owed = maps.Clone(m.owed)
	for i := range c.draws {
		c.draws[i].parts = slices.Clone(c.draws[i].parts)
	}
	for i := range c.holds {
		c.holds[i].parts = slices.Clone(c.holds[i].parts)
	}
	return &c
}

// rest is the free units of a lot.
func (l *mLot) rest() int64 {
	return l.amount - l.drawn - l.kept - l.lapsed - l.revoked - l.rolled - l.pending
}

func (l *mLot) due(now time.Time) bool { return !l.ends.IsZero() && !l.ends.After(now) }

// before reports whether a lot is drawn before another one, both given by number.
func (m *model) before(a, b int) int {
	x, y := &m.lots[a], &m.lots[b]
	never := func(l *mLot) int {
		if l.ends.IsZero() {
			return 1
		}
		return 0
	}
	return cmp.Or(cmp.Compare(x.priority, y.priority), cmp.Compare(never(x), never(y)), x.ends.Compare(y.ends), slices.Compare(x.age[:], y.age[:]))
}

func (m *model) order() []int {
	order := make([]int, len(m.lots))
	for i := range order {
		order[i] = i
	}
	slices.SortFunc(order, m.before)
	return order
}

// heldDebt is how much of the open holds no lot covers.
func (m *model) heldDebt() (units int64) {
	for _, h := range m.holds {
		for _, p := range h.parts {
			if p.lot < 0 {
				units += p.amount
			}
		}
	}
	return units
}

// units is the balance of the wallet, less than 0 if it is overdrawn.
func (m *model) units() int64 {
	if !m.opened {
		units := m.plain
		for _, h := range m.holds {
			if !h.ended {
				units -= h.amount
			}
		}
		return units
	}
	units := -m.debt - m.heldDebt()
	for i := range m.lots {
		if m.lots[i].uses == nil {
			units += m.lots[i].rest()
		}
	}
	return units
}

// pays reports whether a lot pays for a use, "" for none.
func (l *mLot) pays(use string) bool { return l.uses == nil || slices.Contains(l.uses, use) }

// keptFor is the units of lots for a use alone.
func (m *model) keptFor(use string) (units int64) {
	for i := range m.lots {
		if l := &m.lots[i]; l.uses != nil && l.pays(use) {
			units += l.rest()
		}
	}
	return units
}

// unitsFor is the balance for a use.
func (m *model) unitsFor(use string) int64 {
	if kept := m.keptFor(use); kept > 0 {
		return kept + max(0, m.units())
	}
	return m.units()
}

// available is the most that can be drawn for a use.
func (m *model) available(use string) int64 {
	if kept := m.keptFor(use); kept > 0 {
		return kept + max(0, m.units()+m.overdraft)
	}
	return m.units() + m.overdraft
}

func (m *model) held() (units int64) {
	for _, h := range m.holds {
		if !h.ended {
			units += h.amount
		}
	}
	return units
}

// at is the time that an entry has.
func (m *model) at(now time.Time) time.Time {
	m.last = mLater(m.last, now)
	return m.last
}

// settle is the first step of a write that is let in: everything due by then happens.
func (m *model) settle(now time.Time) time.Time {
	m.due(now)
	return m.at(now)
}

// due lets everything due happen, in the order of time: lots that end, lots that begin, and then holds.
func (m *model) due(now time.Time) {
	until := mLater(now, m.last)
	for {
		lot, hold, start := -1, -1, -1
		for i := range m.lots {
			l := &m.lots[i]
			if l.due(until) && l.rest() > 0 && (lot < 0 || cmp.Or(l.ends.Compare(m.lots[lot].ends), slices.Compare(l.age[:], m.lots[lot].age[:])) < 0) {
				lot = i
			}
			if l.pending > 0 && !l.starts.After(until) && (start < 0 || cmp.Or(l.starts.Compare(m.lots[start].starts), slices.Compare(l.age[:], m.lots[start].age[:])) < 0) {
				start = i
			}
		}
		for i := range m.holds { // with nothing held one is due by the clock alone, which may go back
			if h := &m.holds[i]; !h.ended && h.amount > 0 && !h.due.After(now) && (hold < 0 || h.due.Before(m.holds[hold].due)) {
				hold = i
			}
		}
		switch {
		case lot >= 0 && (hold < 0 || !m.lots[lot].ends.After(m.holds[hold].due)) && (start < 0 || !m.lots[lot].ends.After(m.lots[start].starts)):
			m.at(m.lots[lot].ends)
			m.endLot(lot)
		case start >= 0 && (hold < 0 || !m.lots[start].starts.After(m.holds[hold].due)):
			m.at(m.lots[start].starts)
			m.lots[start].pending = 0
			m.lots[start].age = m.newAge(m.lots[start].starts)
			m.pay()
			m.payDebts(start)
			m.renew(start)
		case hold >= 0:
			h := &m.holds[hold]
			m.at(h.due)
			m.capture(h, min(h.amount, max(0, h.least-h.spent)))
			came := m.letGo(h, h.amount)
			h.ended = true
			m.pay()
			m.payDebts(came...)
		default:
			return
		}
	}
}

// dueInWallet is due for a call that names a lot: it writes what is due, and then looks for the lot.
func (m *model) dueInWallet(now time.Time) {
	if m.opened {
		m.due(now)
	}
}

// endLot ends a lot: some units roll over, the rest lapse.
func (m *model) endLot(i int) {
	l := &m.lots[i]
	room := l.rollCap
	for j := range m.lots {
		if c := &m.lots[j]; l.shared && c.pooled && c.category == l.category && (c.ends.IsZero() || c.ends.After(l.ends)) {
			room -= c.rest() + c.kept
		}
	}
	if n := min(l.rest(), room); n > 0 {
		m.roll(i, n, l.ends, l.rollFor, l.rollNo)
		l = &m.lots[i]
	}
	l.lapsed += l.rest()
}

// newAge is the age of a lot that is granted at a time.
func (m *model) newAge(at time.Time) [3]int64 {
	m.grants++
	return [3]int64{at.UnixMicro(), m.grants, m.grants}
}

// add adds a lot, with its number, and with that of the one that goes on of it.
func (m *model) add(l mLot) {
	if l.no == 0 {
		m.numbers++
		l.no = m.numbers
	}
	if l.rollCap > 0 {
		m.numbers++
		l.rollNo = m.numbers
	}
	if l.age = m.newAge(cmp.Or(l.starts, m.last)); l.from > 0 { // its units were granted before
		copy(l.age[:2], m.lots[l.from-1].age[:2])
	}
	m.lots = append(m.lots, l)
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

// mEnd is the end of a period.
func mEnd(p budget.Period, at time.Time) time.Time {
	_, end, err := p.At(at)
	if err != nil {
		panic(err)
	}
	return end
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
	for j := range m.lots {
		if m.lots[j].reference == l.reference {
			l.reference = ""
		}
	}
	m.add(l)
}

// settled is the wallet as a reader sees it.
func (m *model) settled(now time.Time) *model {
	c := m.clone()
	if c.opened || len(c.holds) > 0 {
		c.due(now)
	}
	return c
}

func (m *model) open() {
	if m.opened {
		return
	}
	m.opened = true
	covered, held := max(0, m.plain), m.held()
	m.debt = max(0, -m.plain)
	if covered > 0 {
		m.add(mLot{amount: covered, kept: min(held, covered), late: wallet.Lapse})
	}
	left := min(held, covered)
	for i := range m.holds {
		h := &m.holds[i]
		if h.ended {
			continue
		}
		n := min(left, h.amount)
		left -= n
		if n > 0 {
			h.parts = append(h.parts, mPart{0, n})
		}
		if n < h.amount {
			h.parts = append(h.parts, mPart{-1, h.amount - n})
		}
	}
}

func mLater(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}

// family is a lot, and those that its units went on in, in the order in which they are taken back.
func (m *model) family(i int) []int {
	all := []int{i}
	for n := 0; n < len(all); n++ {
		for j := range m.lots {
			if m.lots[j].from == all[n]+1 {
				all = append(all, j)
			}
		}
	}
	slices.SortFunc(all, func(a, b int) int { return cmp.Compare(m.lots[a].no, m.lots[b].no) })
	return all
}
