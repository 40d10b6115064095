package wallet_test

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/leases"
)

// Acts on holds, and the same acts on the model.

func (h *history) reserve() {
	h.ids++
	r := holds.Placement{ID: fmt.Sprint(h.scope, "/", h.ids), TTL: h.seconds("ttl", 3, 8, 20, 40)}
	r.Note.Use = h.use()
	available := h.m.settled(h.now).available(r.Note.Use)
	amount := h.units("amount", 1, 15)
	if h.once("all", 4) {
		amount = max(1, available)
	}
	r.Lines = []holds.Line{h.book.Line(h.scope, amount)}
	if h.once("at least", 3) {
		r.Lines[0].AtLeast = h.units("least", 1, int(amount))
	}
	_, _ = try(h, func(ctx context.Context, tx pgx.Tx) (holds.Hold, error) { return h.f.holds.Place(ctx, tx, r) }, func(m *model) error {
		if amount > available {
			return budget.ErrExceeded
		}
		m.settle(h.now)
		m.holds = append(m.holds, mHold{id: r.ID, amount: amount, least: r.Lines[0].AtLeast, due: h.now.Add(r.TTL), use: r.Note.Use, parts: m.keep(amount, r.Note.Use)})
		return nil
	})
}

// hold is one that was placed, -1 for none.
func (h *history) hold() int { return h.pick(false) }

// pick is one of the holds or of the leases, mostly one that is open, -1 for none.
func (h *history) pick(lease bool) int {
	open := -1
	var all []int
	for i, hold := range h.m.holds {
		if hold.lease == lease {
			all = append(all, i)
			if !hold.ended {
				open = i
			}
		}
	}
	if len(all) > 0 && (open < 0 || h.once("any", 4)) {
		return all[h.units("hold", 0, len(all)-1)]
	}
	return open
}

// carve leases units to a child.
func (h *history) carve() {
	h.ids++
	child := fmt.Sprint(h.scope, "/", h.ids)
	available := h.m.settled(h.now).units() + h.m.overdraft
	amount := h.units("amount", 1, 15)
	_, _ = try(h, func(ctx context.Context, tx pgx.Tx) (leases.Lease, error) {
		return h.f.carver.Carve(ctx, tx, leases.Carving{Child: child, From: h.book.Charge(h.scope, amount), TTL: 300 * day})
	}, func(m *model) error {
		if amount > available {
			return budget.ErrExceeded
		}
		m.settle(h.now)
		m.holds = append(m.holds, mHold{id: child, amount: amount, due: h.now.Add(1000 * day), parts: m.keep(amount, ""), lease: true})
		return nil
	})
}

// endChild settles a lease, of which the child has used some units.
func (h *history) endChild() {
	i := h.pick(true)
	if i < 0 || h.m.holds[i].ended {
		return
	}
	used := h.units("used", 0, int(h.m.holds[i].amount))
	_, _ = try(h, func(ctx context.Context, tx pgx.Tx) (leases.Lease, error) {
		if used > 0 {
			if _, err := h.f.ledger.Charge(ctx, tx, budget.Charge{Scope: h.m.holds[i].id, Amount: used}); err != nil {
				return leases.Lease{}, err
			}
		}
		return h.f.carver.End(ctx, tx, h.m.holds[i].id, budget.Note{})
	}, func(m *model) error { return m.end(i, used, h.now) })
}

// repair ends the time that the wallet's last entry is ahead of the clock.
func (h *history) repair() {
	_, _ = try(h, func(ctx context.Context, tx pgx.Tx) (budget.ClockState, error) {
		return h.f.ledger.RepairClock(ctx, tx, h.scope, budget.Note{})
	}, func(m *model) error {
		if m.last.After(h.now) {
			m.last = h.now
			seenActs.add("repaired")
		}
		return nil
	})
}

// ready is nil if a hold can be captured.
func (m *model) ready(i int, now time.Time) error {
	if h := &m.holds[i]; h.ended || !h.due.After(now) {
		return holds.ErrState
	}
	return nil
}

func (h *history) release() {
	if i := h.hold(); i >= 0 {
		_, _ = try(h, func(ctx context.Context, tx pgx.Tx) ([]holds.Hold, error) {
			return h.f.holds.Release(ctx, tx, holds.Release{IDs: []string{h.m.holds[i].id}})
		}, func(m *model) error { return m.end(i, 0, h.now) })
	}
}

// end ends a hold, after some of it was captured.
func (m *model) end(i int, captured int64, now time.Time) error {
	if err := m.ready(i, now); err != nil {
		return err
	}
	m.settle(now)
	m.endHold(i, captured)
	return nil
}

func (h *history) extend() {
	if i := h.hold(); i >= 0 {
		by := h.seconds("by", 5, 20)
		_, _ = try(h, func(ctx context.Context, tx pgx.Tx) ([]holds.Hold, error) {
			return h.f.holds.Extend(ctx, tx, holds.Extend{IDs: []string{h.m.holds[i].id}, By: by})
		}, func(m *model) error {
			if err := m.ready(i, h.now); err != nil {
				return err
			}
			m.holds[i].due = m.holds[i].due.Add(by)
			return nil
		})
	}
}

// capture captures less than is held, or more: refused, if it fits, or in any case.
func (h *history) capture() {
	i := h.hold()
	if i < 0 {
		return
	}
	hold := h.m.holds[i]
	used := h.units("used", 1, int(max(1, hold.amount))+3)
	c := holds.Capture{IDs: []string{hold.id}, Note: budget.Note{Use: h.use()}, Lines: []holds.Line{h.book.Line(h.scope, used)}, Keep: h.once("keep", 3),
		Over: rapid.SampledFrom([]holds.Over{holds.OverRefused, holds.OverIfFits, holds.OverAllowed}).Draw(h.T, "over")}
	_, err := try(h, func(ctx context.Context, tx pgx.Tx) ([]holds.Hold, error) { return h.f.holds.Capture(ctx, tx, c) }, func(m *model) error {
		if err := m.ready(i, h.now); err != nil {
			return err
		}
		excess := used - hold.amount
		switch {
		case excess <= 0:
		case c.Over == holds.OverRefused:
			return holds.ErrExcess
		case c.Over == holds.OverIfFits && excess > m.settled(h.now).available(c.Note.Use):
			return budget.ErrExceeded
		default:
			m.settle(h.now)
			m.draw(excess, c.Note.Use)
		}
		if c.Keep {
			m.settle(h.now)
			m.capture(&m.holds[i], min(used, hold.amount))
			return nil
		}
		return m.end(i, min(used, hold.amount), h.now)
	})
	if err != nil {
		return
	}
	h.least = min(h.least, h.m.settled(h.now).units())
}

// sweep ends the holds that are due.
func (h *history) sweep() {
	_, err := h.f.holds.Sweep(h.Context(), h.f.pool, holds.SweepOptions{})
	require.NoError(h.T, err)
	h.m.sweepHolds(h.now)
	h.numberDraws()
}

func (m *model) sweepHolds(now time.Time) {
	var last time.Time
	for i := range m.holds {
		if hold := &m.holds[i]; !hold.ended && !hold.due.After(now) {
			if hold.amount > 0 {
				last = mLater(last, hold.due)
			} else {
				hold.ended = true
			}
		}
	}
	if !last.IsZero() {
		m.due(last)
	}
}
