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
	late                time.Duration
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

// end is when a lot ends, in a long time for never.
func (l *mLot) end() time.Time { return cmp.Or(l.ends, time.Unix(1<<40, 0)) }

func (l *mLot) due(now time.Time) bool { return !l.ends.IsZero() && !l.ends.After(now) }

// pays reports whether a lot pays for a use, "" for none.
func (l *mLot) pays(use string) bool { return l.uses == nil || slices.Contains(l.uses, use) }

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

// settled is the wallet as a reader sees it.
func (m *model) settled(now time.Time) *model {
	c := m.clone()
	if c.opened || len(c.holds) > 0 {
		c.due(now)
	}
	return c
}

// dueInWallet is due for a call that names a lot: it writes what is due, and then looks for the lot.
func (m *model) dueInWallet(now time.Time) {
	if m.opened {
		m.due(now)
	}
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

// inTurn returns the lots in the order in which they came: each was granted, began, or took units over at a time of its own, and one
// that is scheduled came with the lot before it.
func (m *model) inTurn() []int {
	turns := make([]int, len(m.lots))
	for i := range turns {
		turns[i] = i
	}
	slices.SortFunc(turns, func(a, b int) int {
		x, y := m.lots[a].age, m.lots[b].age
		return cmp.Or(cmp.Compare(x[2], y[2]), cmp.Compare(x[0], y[0]))
	})
	return turns
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

// mEnd is the end of a period.
func mEnd(p budget.Period, at time.Time) time.Time {
	_, end, err := p.At(at)
	if err != nil {
		panic(err)
	}
	return end
}

func mLater(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}

// payBy has a lot pay units that are overdrawn.
func (m *model) payBy(lot int, units int64) {
	m.lots[lot].drawn += units
	m.serial++
	m.paid = append(m.paid, mPaid{m.serial, lot, units})
}

// owe notes units that no lot covers, for a use.
func (m *model) owe(use string, units int64) {
	m.debt += units
	if use != "" {
		m.owed[use] += units
	}
}
