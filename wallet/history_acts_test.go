package wallet_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/wallet"
)

// acts counts what histories did, to see that it is tested at all.
type acts struct {
	mu sync.Mutex
	n  map[string]int
}

var seenActs = acts{n: map[string]int{}}

func (a *acts) add(what string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.n[what]++
}

func (a *acts) count(what string) int {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.n[what]
}

func (h *history) units(label string, lo, hi int) int64 {
	return int64(rapid.IntRange(lo, hi).Draw(h.T, label))
}

func (h *history) once(label string, in int) bool {
	return rapid.IntRange(1, in).Draw(h.T, label) == in
}

// grant grants a lot, often one that ends soon, and sometimes under a reference that was used.
func (h *history) grant() {
	g := wallet.Grant{Wallet: h.scope, Amount: h.units("amount", 1, 20), Category: rapid.SampledFrom([]string{"", "paid", "promotional"}).Draw(h.T, "category")}
	l := mLot{category: g.Category, amount: g.Amount, priority: map[string]int{"paid": 10, "promotional": 5}[g.Category], late: h.lates}
	at := mLater(h.now, h.m.last)
	switch rapid.IntRange(0, 3).Draw(h.T, "end") {
	case 0:
	case 1:
		g.For = h.seconds("for", 5, 10, 30)
		l.ends = at.Add(g.For)
	default:
		g.Expires = h.now.Add(h.seconds("expires", 0, 5, 10, 20, 30, 60))
		l.ends = g.Expires
	}
	if h.once("priority", 4) {
		l.priority = int(h.units("priority", -1, 12))
		g.Priority = &l.priority
	}
	if !l.ends.IsZero() && h.once("rolls", 3) {
		g.RollCap, l.rollCap = h.units("cap", 1, 10), 0
		g.RollFor = rapid.SampledFrom([]time.Duration{wallet.Forever, 5 * time.Second, 30 * time.Second}).Draw(h.T, "roll for")
		l.rollCap, l.rollFor = g.RollCap, g.RollFor
	}
	if h.once("late refunds", 3) {
		g.LateRefunds = rapid.SampledFrom([]time.Duration{wallet.Lapse, wallet.Forever, 7 * time.Second}).Draw(h.T, "late")
		l.late = g.LateRefunds
	}
	if h.once("referenced", 2) {
		g.Reference = fmt.Sprint("r", h.units("reference", 1, 6))
		l.reference = g.Reference
	}
	was := -1
	for i := range h.m.lots {
		if g.Reference != "" && h.m.lots[i].reference == g.Reference {
			was = i
		}
	}
	if was >= 0 && h.once("same", 2) {
		g = h.m.lots[was].grant
	}
	l.grant = g
	granted, err := try(h, func(ctx context.Context, tx pgx.Tx) (wallet.Granted, error) { return h.book.Grant(ctx, tx, g) }, func(m *model) error {
		switch {
		case was >= 0 && !same(g, h.m.lots[was].grant):
			return wallet.ErrConflict
		case was >= 0:
			return nil
		case l.due(at):
			return wallet.ErrExpired
		}
		m.grant(l, h.now)
		return nil
	})
	if err == nil {
		require.Equal(h.T, was >= 0, granted.Replayed)
		if was < 0 {
			was = len(h.m.lots) - 1
			require.Equal(h.T, l.ends, granted.Expires)
		}
		require.Equal(h.T, h.nos[was], granted.Lot)
	}
}

// same reports whether two grants are the same to a reference.
func same(a, b wallet.Grant) bool {
	if (a.Priority == nil) != (b.Priority == nil) || a.Priority != nil && *a.Priority != *b.Priority {
		return false
	}
	a.Priority, b.Priority = nil, nil
	return fmt.Sprint(a) == fmt.Sprint(b)
}

// draw draws, now and then as much as there is, and now and then by a charge.
func (h *history) draw() {
	available := h.m.settled(h.now).units() + h.m.overdraft
	amount := h.units("amount", 1, 30)
	if h.once("all", 3) {
		amount = max(1, available+h.units("beside", -1, 1))
	}
	d := wallet.Draw{Wallet: h.scope, Amount: amount, UpTo: h.once("up to", 3)}
	plain := !d.UpTo && h.once("charge", 3)
	var parts []mPart
	drawn, err := try(h, func(ctx context.Context, tx pgx.Tx) (wallet.Drawn, error) {
		if !plain {
			return h.book.Draw(ctx, tx, d)
		}
		r, err := h.f.ledger.Charge(ctx, tx, h.book.Charge(h.scope, amount))
		if err != nil {
			return wallet.Drawn{}, err
		}
		return wallet.Drawn{Wallet: h.scope, Seq: r.Entries[0].Seq, At: r.Entries[0].At}, nil
	}, func(m *model) error {
		if d.UpTo {
			amount = max(1, min(amount, available))
		}
		if amount > available {
			return budget.ErrExceeded
		}
		m.settle(h.now)
		parts = m.draw(amount)
		return nil
	})
	if exceeded := (*budget.ExceededError)(nil); errors.As(err, &exceeded) {
		require.Equal(h.T, max(0, available), exceeded.Refusals[0].Available)
	}
	if err != nil {
		return
	}
	h.m.draws[len(h.m.draws)-1].seq = drawn.Seq
	if plain {
		return
	}
	want := wallet.Drawn{Wallet: h.scope, Seq: drawn.Seq, At: h.m.last, Amount: amount, Left: h.m.units()}
	for _, p := range parts {
		if p.lot < 0 {
			want.Overdrawn = max(0, min(p.amount, -want.Left))
			seenActs.add("overdrawn")
			continue
		}
		l := &h.m.lots[p.lot]
		want.Lots = append(want.Lots, wallet.Part{Lot: h.nos[p.lot], Reference: l.reference, Category: l.category, Amount: p.amount})
	}
	require.Equal(h.T, want, drawn)
}

// draw of the model notes what a refund needs.
func (m *model) draw(amount int64) []mPart {
	parts := m.spend(amount)
	m.serial++
	m.draws = append(m.draws, mDraw{serial: m.serial, amount: amount, parts: append([]mPart(nil), parts...)})
	return parts
}

// refund gives back a part of a draw or of a capture, sometimes more than is left of it.
func (h *history) refund() {
	if len(h.m.draws) == 0 {
		return
	}
	i := int(h.units("draw", 0, len(h.m.draws)-1))
	d := h.m.draws[i]
	amount := h.units("amount", 1, int(d.amount-d.refunded)+1)
	lots := len(h.m.lots)
	_, err := try(h, func(ctx context.Context, tx pgx.Tx) (budget.Posted, error) {
		return h.f.ledger.Refund(ctx, tx, budget.Refund{Scope: h.scope, Seq: d.seq, Amount: amount})
	}, func(m *model) error {
		if amount > d.amount-d.refunded {
			return budget.ErrRefundExceeds
		}
		m.refund(&m.draws[i], amount, h.now)
		return nil
	})
	if err == nil && len(h.m.lots) > lots {
		seenActs.add("late")
	}
}

// credit is one without a grant.
func (h *history) credit() {
	amount := h.units("amount", 1, 10)
	_, _ = try(h, func(ctx context.Context, tx pgx.Tx) (budget.Posted, error) {
		return h.f.ledger.Credit(ctx, tx, budget.Credit{Scope: h.scope, Amount: amount})
	}, func(m *model) error {
		if !m.opened {
			m.at(h.now)
			m.plain += amount
			return nil
		}
		m.grant(mLot{amount: amount, late: wallet.Lapse}, h.now)
		return nil
	})
}

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
	hold := &m.holds[i]
	m.at(now)
	m.capture(hold, captured)
	m.letGo(hold, hold.amount)
	hold.ended = true
	m.pay()
	return nil
}

// capture spends what a hold keeps.
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
			m.at(h.now)
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

func pgxValue[T any](h *history, sql string, args ...any) T {
	rows, err := h.f.pool.Query(h.Context(), sql, args...)
	require.NoError(h.T, err)
	v, err := pgx.CollectExactlyOneRow(rows, pgx.RowTo[T])
	require.NoError(h.T, err)
	return v
}

// sweep ends the holds that are due.
func (h *history) sweep() {
	_, err := h.f.holds.Sweep(h.Context(), h.f.pool, holds.SweepOptions{})
	require.NoError(h.T, err)
	h.m.sweepHolds(h.now)
}

func (m *model) sweepHolds(now time.Time) {
	due := false
	for i := range m.holds {
		if hold := &m.holds[i]; !hold.ended && !hold.due.After(now) {
			m.at(now)
			m.letGo(hold, hold.amount)
			hold.ended, due = true, true
		}
	}
	if due {
		m.pay()
	}
}

// lot is one of the wallet's, by number or by reference, and -1 for one that there is not.
func (h *history) lot() (i int, no int64, reference string) {
	if len(h.m.lots) == 0 || h.once("unknown", 10) {
		return -1, 0, "unknown"
	}
	i = int(h.units("lot", 0, len(h.m.lots)-1))
	if reference = h.m.lots[i].reference; reference != "" && h.once("by reference", 2) {
		return i, 0, reference
	}
	return i, h.nos[i], ""
}

// revoke takes a part of a lot back, or all of it.
func (h *history) revoke() {
	i, no, reference := h.lot()
	r := wallet.Revoke{Wallet: h.scope, Lot: no, Reference: reference, Amount: h.units("amount", 0, 12)}
	var want wallet.Revoked
	got, err := try(h, func(ctx context.Context, tx pgx.Tx) (wallet.Revoked, error) { return h.book.Revoke(ctx, tx, r) }, func(m *model) error {
		if i < 0 {
			return wallet.ErrUnknownLot
		}
		m.lapse(h.now)
		l := &m.lots[i]
		want = wallet.Revoked{Lot: h.nos[i], Amount: l.rest(), Missing: l.drawn + l.kept}
		if r.Amount > 0 {
			want.Amount = min(r.Amount, l.rest())
			want.Missing = r.Amount - want.Amount
		}
		if l.revoked += want.Amount; want.Amount > 0 {
			m.at(h.now)
		}
		return nil
	})
	if err == nil {
		got.Seq = 0
		require.Equal(h.T, want, got)
	}
}

// rollOver rolls a lot over before its end.
func (h *history) rollOver() {
	i, no, reference := h.lot()
	r := wallet.Rollover{Wallet: h.scope, Lot: no, Reference: reference, Cap: h.units("cap", 1, 12),
		For: rapid.SampledFrom([]time.Duration{wallet.Forever, 5 * time.Second, 30 * time.Second}).Draw(h.T, "for")}
	var want int
	var units int64
	var before bool
	got, err := try(h, func(ctx context.Context, tx pgx.Tx) (wallet.Rolled, error) { return h.book.Rollover(ctx, tx, r) }, func(m *model) error {
		if i < 0 {
			return wallet.ErrUnknownLot
		}
		m.lapse(h.now)
		if before = m.lots[i].child > 0; before {
			want, units = m.lots[i].child, m.lots[m.lots[i].child-1].amount
			return nil
		}
		if units = min(r.Cap, m.lots[i].rest()); units > 0 {
			m.roll(i, units, m.at(h.now), r.For)
			want = len(m.lots)
		}
		return nil
	})
	if err == nil {
		require.Equal(h.T, units, got.Amount)
		require.Equal(h.T, before, got.Replayed)
		if want > 0 {
			require.Equal(h.T, h.nos[want-1], got.Lot)
		}
	}
}

// expire sweeps the wallet's lots.
func (h *history) expire() {
	_, _ = try(h, func(ctx context.Context, tx pgx.Tx) (wallet.ExpireReport, error) {
		return h.book.ExpireWallet(ctx, tx, h.scope)
	}, func(m *model) error {
		for i := range m.lots {
			if m.lots[i].due(h.now) && m.lots[i].rest() > 0 {
				m.lapse(h.now)
				break
			}
		}
		return nil
	})
}

// advance moves the clock on: by some seconds, or to the end of a lot or of a hold, and sometimes a microsecond beside.
func (h *history) advance() {
	var times []time.Time
	for i := range h.m.lots {
		times = append(times, h.m.lots[i].ends)
	}
	for _, hold := range h.m.holds {
		times = append(times, hold.due)
	}
	if len(times) > 0 && h.once("to an end", 2) {
		to := times[h.units("which", 0, len(times)-1)].Add(time.Duration(h.units("edge", -1, 1)) * time.Microsecond)
		if to.After(h.now) {
			h.set(to)
			return
		}
	}
	h.set(h.now.Add(h.seconds("advance", 1, 3, 10, 30)))
}
