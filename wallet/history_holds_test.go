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
)

// Acts on holds, and the same acts on the model.

func (h *history) reserve() {
	h.ids++
	r := holds.Request{ID: fmt.Sprint(h.scope, "/", h.ids), TTL: h.seconds("ttl", 3, 8, 20, 40)}
	available := h.m.settled(h.now).units() + h.m.overdraft
	amount := h.units("amount", 1, 15)
	if h.once("all", 4) {
		amount = max(1, available)
	}
	r.Lines = []holds.Line{h.book.Line(h.scope, amount)}
	_, _ = try(h, func(ctx context.Context, tx pgx.Tx) (holds.Hold, error) { return h.f.holds.Place(ctx, tx, r) }, func(m *model) error {
		if amount > available {
			return budget.ErrExceeded
		}
		m.settle(h.now)
		m.holds = append(m.holds, mHold{id: r.ID, amount: amount, due: h.now.Add(r.TTL), parts: m.keep(amount)})
		return nil
	})
}

// hold is one that was placed, -1 for none.
func (h *history) hold() int {
	if len(h.m.holds) == 0 {
		return -1
	}
	open := -1
	for i, hold := range h.m.holds {
		if !hold.ended {
			open = i
		}
	}
	if open < 0 || h.once("any", 4) {
		return int(h.units("hold", 0, len(h.m.holds)-1))
	}
	return open
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
	hold := &m.holds[i]
	m.capture(hold, captured)
	m.letGo(hold, hold.amount)
	hold.ended = true
	m.pay()
	return nil
}

// capture spends units of a hold.
func (m *model) capture(hold *mHold, units int64) {
	if units == 0 {
		return
	}
	hold.amount -= units
	m.serial++
	d := mDraw{serial: m.serial, amount: units, parts: []mPart{{-1, units}}}
	if !m.opened {
		m.plain -= units
	} else {
		d.parts = m.split(hold, units)
		for _, p := range d.parts {
			if p.lot < 0 {
				m.debt += p.amount
				continue
			}
			m.lots[p.lot].kept -= p.amount
			m.lots[p.lot].drawn += p.amount
		}
		d.parts = append([]mPart(nil), d.parts...)
	}
	m.draws = append(m.draws, d)
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
	c := holds.Capture{IDs: []string{hold.id}, Lines: []holds.Line{h.book.Line(h.scope, used)}, Keep: h.once("keep", 3),
		Over: rapid.SampledFrom([]holds.Over{holds.OverRefused, holds.OverIfFits, holds.OverAllowed}).Draw(h.T, "over")}
	before := pgxValue[int64](h, `select coalesce(max(seq), 0) from metered.ledger where scope = $1`, h.scope)
	n := len(h.m.draws)
	_, err := try(h, func(ctx context.Context, tx pgx.Tx) ([]holds.Hold, error) { return h.f.holds.Capture(ctx, tx, c) }, func(m *model) error {
		if err := m.ready(i, h.now); err != nil {
			return err
		}
		excess := used - hold.amount
		switch {
		case excess <= 0:
		case c.Over == holds.OverRefused:
			return holds.ErrExcess
		case c.Over == holds.OverIfFits && excess > m.settled(h.now).units()+m.overdraft:
			return budget.ErrExceeded
		default:
			m.settle(h.now)
			m.draw(excess)
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
	rows, err := h.f.pool.Query(h.Context(), `select seq from metered.ledger where scope = $1 and seq > $2 and kind in ('c', 'u') order by seq`, h.scope, before)
	require.NoError(h.T, err)
	seqs, err := pgx.CollectRows(rows, pgx.RowTo[int64])
	require.NoError(h.T, err)
	require.Len(h.T, seqs, len(h.m.draws)-n)
	for j, seq := range seqs {
		h.m.draws[n+j].seq = seq
	}
}

// sweep ends the holds that are due.
func (h *history) sweep() {
	_, err := h.f.holds.Sweep(h.Context(), h.f.pool, holds.SweepOptions{})
	require.NoError(h.T, err)
	h.m.sweepHolds(h.now)
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
