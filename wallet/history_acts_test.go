package wallet_test

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/wallet"
)

// acts counts the acts of all histories, to see that each kind is tested at all.
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

func (a *acts) String() string {
	a.mu.Lock()
	defer a.mu.Unlock()
	return fmt.Sprint(a.n)
}

func (h *history) units(label string, lo, hi int) int64 {
	return int64(rapid.IntRange(lo, hi).Draw(h.T, label))
}

// use is that of a draw or of a hold, mostly none.
func (h *history) use() string {
	return rapid.SampledFrom([]string{"", "images", "images", "tokens", "mail"}).Draw(h.T, "use")
}

func pgxValue[T any](h *history, sql string, args ...any) T {
	rows, err := h.f.pool.Query(h.Context(), sql, args...)
	require.NoError(h.T, err)
	v, err := pgx.CollectExactlyOneRow(rows, pgx.RowTo[T])
	require.NoError(h.T, err)
	return v
}

func (h *history) once(label string, in int) bool {
	return rapid.IntRange(1, in).Draw(h.T, label) == in
}

// grant grants a lot, often one that ends soon, and sometimes under a reference that was used.
func (h *history) grant() {
	g := wallet.Grant{Wallet: h.scope, Amount: h.units("amount", 1, 20), Category: rapid.SampledFrom([]string{"", "paid", "promotional"}).Draw(h.T, "category")}
	l := mLot{category: g.Category, amount: g.Amount, priority: map[string]int{"paid": 10, "promotional": 5}[g.Category], late: h.lates}
	at := mLater(h.now, h.m.last)
	var lasts time.Duration
	switch rapid.IntRange(0, 3).Draw(h.T, "end") {
	case 0:
	case 1:
		lasts = h.seconds("for", 5, 10, 30)
		g.Ends, l.ends = wallet.After(lasts), at.Add(lasts)
	default:
		l.ends = h.now.Add(h.seconds("expires", 0, 5, 10, 20, 30, 60))
		g.Ends = wallet.At(l.ends)
	}
	if h.once("later", 4) {
		g.Starts = h.now.Add(h.seconds("starts", -90000, -10, 0, 3, 10, 20, 40, 90000))
		l.starts = g.Starts
		switch {
		case lasts != 0:
			l.ends = g.Starts.Add(lasts)
		case !l.ends.IsZero() && !g.Starts.Before(l.ends):
			l.ends = g.Starts.Add(h.seconds("after", 1, 10, 90000))
			g.Ends = wallet.At(l.ends)
		}
	}
	if h.once("for uses", 3) {
		g.Uses = rapid.SampledFrom([][]string{{"images"}, {"images"}, {"tokens"}, {"tokens", "images"}}).Draw(h.T, "uses")
		l.uses = g.Uses
	}
	days := budget.PerPeriod(1, 24*time.Hour, noon.Add(7*time.Minute)).Period
	plan := h.once("renews", 4)
	if plan {
		g.Ends = wallet.EachPeriod(days)
		g.Reference = fmt.Sprint("plan", h.units("plan", 1, 4))
		l.reference, l.renewal, l.renews, l.each = g.Reference, g.Reference, days, g.Amount
		since := at
		if !g.Starts.IsZero() {
			since = g.Starts
		}
		l.ends = mEnd(days, since)
		switch h.units("first", 0, 2) {
		case 1:
			l.amount = h.units("first", 0, 20)
			g.Ends = wallet.EachPeriodWithFirst(days, l.amount)
		case 2:
			g.Ends = wallet.EachPeriodProrated(days)
			var err error
			l.amount, err = days.Prorate(g.Amount, since)
			require.NoError(h.T, err)
		}
	}
	if h.once("priority", 4) {
		l.priority = int(h.units("priority", -1, 12))
		g.Priority = &l.priority
	}
	if !l.ends.IsZero() && h.once("rolls", 3) {
		roll := &wallet.Roll{Cap: h.units("cap", 1, 10)}
		l.rollFor = rapid.SampledFrom([]time.Duration{0, 5 * time.Second, 30 * time.Second, 24 * time.Hour}).Draw(h.T, "roll for")
		roll.Lasts = lasting(l.rollFor)
		if h.once("to a period", 3) {
			l.rollFor, l.rollTo = 0, days
			roll.Lasts = wallet.ToEndOf(days)
		}
		if l.rollFor > time.Hour || !l.rollTo.IsZero() {
			roll.Times = rapid.SampledFrom([]int{0, 0, 1, 2, 3, -1}).Draw(h.T, "times")
			if l.again = max(roll.Times-1, 0); roll.Times < 0 {
				l.again = -1
			}
		}
		roll.Shared = h.once("shared", 3)
		l.rollCap, l.shared, l.fullCap, g.Roll = roll.Cap, roll.Shared, roll.Cap, roll
	}
	if h.once("late refunds", 3) {
		g.LateRefunds = rapid.SampledFrom([]time.Duration{wallet.Lapse, wallet.Forever, 7 * time.Second}).Draw(h.T, "late")
		l.late = g.LateRefunds
	}
	if !plan && h.once("referenced", 2) {
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
		g, plan = h.m.lots[was].grant, h.m.lots[was].renewal != ""
	}
	l.grant = g
	granted, err := try(h, func(ctx context.Context, tx pgx.Tx) (wallet.Granted, error) { return h.book.Grant(ctx, tx, g) }, func(m *model) error {
		switch {
		case was >= 0 && !same(g, h.m.lots[was].grant):
			return wallet.ErrConflict
		case was >= 0:
			return nil
		case !plan && l.due(mLater(at, g.Starts)):
			if g.Reference != "" && m.opened { // a lot that was due might have had the reference
				m.due(h.now)
			}
			return wallet.ErrExpired
		}
		m.grant(l, h.now)
		return nil
	})
	if err == nil {
		require.Equal(h.T, was >= 0, granted.Replayed)
		if was < 0 {
			for was = len(h.m.lots) - 1; h.m.lots[was].grant.Wallet == ""; was-- { // the next one of Renews is after it
			}
			require.Equal(h.T, l.ends, granted.Expires)
		}
		require.Equal(h.T, h.nos[was], granted.Lot)
	}
}

// same reports whether two grants are the same to a reference.
func same(a, b wallet.Grant) bool {
	a.Wallet, a.Note, b.Wallet, b.Note = "", budget.Note{}, "", budget.Note{}
	one, _ := json.Marshal(a)
	other, err := json.Marshal(b)
	return err == nil && string(one) == string(other)
}

// draw draws, now and then as much as there is, and now and then by a charge.
func (h *history) draw() {
	use := h.use()
	available := h.m.settled(h.now).available(use)
	amount := h.units("amount", 1, 30)
	if h.once("all", 3) {
		amount = max(1, available+h.units("beside", -1, 1))
	}
	d := toDraw{Wallet: h.scope, Amount: amount, UpTo: h.once("up to", 3), Note: budget.Note{Use: use}}
	plain := h.once("charge", 3)
	var parts []mPart
	drawn, err := try(h, func(ctx context.Context, tx pgx.Tx) (wasDrawn, error) {
		if !plain {
			return drawIn(ctx, tx, h.f.ledger, h.book, d)
		}
		c := d.of(h.book)
		c.Lots = false
		r, err := h.f.ledger.Charge(ctx, tx, c)
		if err != nil {
			return wasDrawn{}, err
		}
		return wasDrawn{Posted: r.Entries[0]}, nil
	}, func(m *model) error {
		if d.UpTo {
			amount = max(1, min(amount, available))
		}
		if amount > available {
			return budget.ErrExceeded
		}
		m.settle(h.now)
		parts = m.draw(amount, use)
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
	want := wasDrawn{Posted: budget.Posted{Scope: h.scope, Seq: drawn.Seq, At: h.m.last, Amount: amount},
		Left: h.m.unitsFor(use)}
	require.Equal(h.T, max(0, h.m.available(use)), drawn.Standings[0].Available)
	if drawn.Standings = nil; h.m.keptFor(use) > 0 { // its standing has what others owe, too
		drawn.Left = want.Left
	}
	for _, p := range parts {
		if p.lot < 0 {
			if want.Overdrawn = p.amount; !h.m.opened {
				want.Overdrawn = max(0, min(p.amount, -want.Left))
			}
			seenActs.add("overdrawn")
			continue
		}
		l := &h.m.lots[p.lot]
		if l.uses != nil {
			seenActs.add("drawn for a use")
		}
		want.Lots = append(want.Lots, budget.LotMove{Lot: h.nos[p.lot], Reference: cmp.Or(l.reference, l.shown), Category: l.category, Amount: p.amount})
	}
	require.Equal(h.T, want, drawn)
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
		m.refund(i, amount, h.now)
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
			m.minima(h.now)
			m.at(h.now)
			m.plain += amount
			return nil
		}
		m.grant(mLot{amount: amount, late: wallet.Lapse}, h.now)
		return nil
	})
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
		m.dueInWallet(h.now)
		if i < 0 {
			return wallet.ErrUnknownLot
		}
		want = wallet.Revoked{Lot: h.nos[i]}
		for _, j := range m.family(i) { // units that have not begun
			l := &m.lots[j]
			n := l.pending
			if r.Amount > 0 {
				n = min(n, r.Amount-want.Amount)
			}
			l.pending -= n
			l.revoked += n
			want.Amount += n
		}
		for _, j := range m.family(i) {
			l := &m.lots[j]
			n := l.rest()
			if r.Amount > 0 {
				n = min(n, r.Amount-want.Amount)
			}
			l.revoked += n
			want.Amount += n
			want.Missing += l.drawn + l.kept
		}
		if r.Amount > 0 {
			want.Missing = r.Amount - want.Amount
		}
		if want.Amount > 0 {
			m.at(h.now)
		}
		return nil
	})
	if err == nil {
		got.Seq = 0
		require.Equal(h.T, want, got)
	}
}

// endRenewals ends the renewals of a plan.
func (h *history) endRenewals() {
	reference := fmt.Sprint("plan", h.units("plan", 1, 4))
	if h.once("another", 6) {
		reference = "r1"
	}
	var want wallet.Revoked
	got, err := try(h, func(ctx context.Context, tx pgx.Tx) (wallet.Revoked, error) {
		return h.book.Revoke(ctx, tx, wallet.Revoke{Wallet: h.scope, Reference: reference, Renewals: true})
	}, func(m *model) error {
		m.dueInWallet(h.now)
		if !slices.ContainsFunc(m.lots, func(l mLot) bool { return l.reference == reference && l.renewal == reference }) {
			return wallet.ErrUnknownLot
		}
		for i := range m.lots {
			if l := &m.lots[i]; l.renewal == reference && !l.renews.IsZero() && l.pending > 0 {
				want.Lot, want.Amount = int64(l.no), l.pending
				l.revoked, l.pending = l.revoked+l.pending, 0
				m.at(h.now)
			}
		}
		return nil
	})
	if err == nil {
		require.Equal(h.T, want.Amount, got.Amount)
		require.Equal(h.T, want.Lot > 0, got.Lot > 0)
	}
}

// reinstate gives back what was revoked of a lot.
func (h *history) reinstate() {
	i, no, reference := h.lot()
	r := wallet.Revoke{Wallet: h.scope, Lot: no, Reference: reference, Amount: h.units("amount", 0, 12)}
	var want wallet.Granted
	got, err := try(h, func(ctx context.Context, tx pgx.Tx) (wallet.Granted, error) { return h.book.Reinstate(ctx, tx, r) }, func(m *model) error {
		m.dueInWallet(h.now)
		if i < 0 {
			return wallet.ErrUnknownLot
		}
		want = wallet.Granted{Lot: h.nos[i]}
		at, ended := mLater(h.now, m.last), false
		for _, j := range m.family(i) {
			l := &m.lots[j]
			if ended = ended || l.revoked > 0; l.revoked == 0 || l.due(at) {
				continue
			}
			n := l.revoked
			if r.Amount > 0 {
				n = min(n, r.Amount-want.Amount)
			}
			if n == 0 {
				break
			}
			l.revoked -= n
			if l.starts.After(at) {
				l.pending += n
			}
			want.Amount += n
			m.at(h.now)
			m.pay(j)
		}
		if want.Replayed = want.Amount == 0; ended && want.Amount == 0 {
			return wallet.ErrExpired
		}
		return nil
	})
	if err == nil {
		require.Equal(h.T, []any{want.Lot, want.Amount, want.Replayed}, []any{got.Lot, got.Amount, got.Replayed})
	}
}

// resumeRenewals takes back that the renewals of a plan were ended.
func (h *history) resumeRenewals() {
	reference := fmt.Sprint("plan", h.units("plan", 1, 4))
	var want int64
	got, err := try(h, func(ctx context.Context, tx pgx.Tx) (wallet.Granted, error) {
		return h.book.Reinstate(ctx, tx, wallet.Revoke{Wallet: h.scope, Reference: reference, Renewals: true})
	}, func(m *model) error {
		m.dueInWallet(h.now)
		if !slices.ContainsFunc(m.lots, func(l mLot) bool { return l.reference == reference && l.renewal == reference }) {
			return wallet.ErrUnknownLot
		}
		for i := range m.lots {
			switch l := &m.lots[i]; {
			case l.renewal != reference || l.renews.IsZero():
			case l.pending > 0:
				return nil
			case l.revoked > 0 && l.starts.After(mLater(h.now, m.last)):
				want = l.revoked
				l.pending, l.revoked = l.revoked, 0
				m.at(h.now)
				return nil
			}
		}
		return wallet.ErrExpired
	})
	if err == nil {
		require.Equal(h.T, want, got.Amount)
		require.Equal(h.T, want == 0, got.Replayed)
	}
}

// setEnd sets the end of a lot.
func (h *history) setEnd() {
	i, no, reference := h.lot()
	e := wallet.LotEnd{Wallet: h.scope, Lot: no, Reference: reference}
	if !h.once("never", 4) {
		e.Expires = h.now.Add(h.seconds("expires", 0, 5, 10, 30, 60, 90000))
	}
	var same bool
	got, err := try(h, func(ctx context.Context, tx pgx.Tx) (wallet.Granted, error) { return h.book.SetEnd(ctx, tx, e) }, func(m *model) error {
		at := mLater(h.now, m.last)
		m.dueInWallet(h.now)
		if i < 0 {
			return wallet.ErrUnknownLot
		}
		l := &m.lots[i]
		begins := at
		if l.pending > 0 {
			begins = mLater(at, l.starts)
		}
		switch same = l.ends.Equal(e.Expires); {
		case same:
		case l.due(at) || !e.Expires.IsZero() && !e.Expires.After(begins):
			return wallet.ErrExpired
		default:
			l.ends = e.Expires
			m.at(h.now)
		}
		return nil
	})
	if err == nil {
		require.Equal(h.T, same, got.Replayed)
		require.Equal(h.T, e.Expires, got.Expires)
	}
}

// rollOver rolls a lot over before its end.
func (h *history) rollOver() {
	i, no, reference := h.lot()
	r := wallet.Rollover{Wallet: h.scope, Lot: no, Reference: reference, Cap: h.units("cap", 1, 12),
		For: rapid.SampledFrom([]time.Duration{0, 5 * time.Second, 30 * time.Second}).Draw(h.T, "for")}
	var want int
	var units int64
	var before bool
	got, err := try(h, func(ctx context.Context, tx pgx.Tx) (wallet.Granted, error) { return h.book.Rollover(ctx, tx, r) }, func(m *model) error {
		m.dueInWallet(h.now)
		if i < 0 {
			return wallet.ErrUnknownLot
		}
		if before = m.lots[i].child > 0; before {
			want, units = m.lots[i].child, m.lots[m.lots[i].child-1].amount
			return nil
		}
		if units = min(r.Cap, m.lots[i].rest()); units > 0 {
			m.roll(i, units, m.at(h.now), r.For, 0)
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
	_, _ = try(h, func(ctx context.Context, tx pgx.Tx) (wallet.SweepReport, error) {
		return h.book.Expire(ctx, tx, h.scope)
	}, func(m *model) error {
		m.expire(h.now)
		return nil
	})
}

func (m *model) expire(now time.Time) {
	for i := range m.lots {
		if l := &m.lots[i]; l.due(now) && l.rest() > 0 || l.pending > 0 && !l.starts.After(now) {
			m.due(now)
			break
		}
	}
}

// advance moves the clock on: by some seconds, or to the end of a lot or of a hold, and sometimes a microsecond beside.
func (h *history) advance() {
	var times []time.Time
	for i := range h.m.lots {
		times = append(times, h.m.lots[i].ends, h.m.lots[i].starts)
	}
	for _, hold := range h.m.holds {
		if !hold.lease {
			times = append(times, hold.due)
		}
	}
	if len(times) > 0 && h.once("to an end", 2) {
		to := times[h.units("which", 0, len(times)-1)].Add(time.Duration(h.units("edge", -1, 1)) * time.Microsecond)
		if to.After(h.now) {
			h.set(to)
			return
		}
	}
	h.set(h.now.Add(h.seconds("advance", 1, 3, 10, 30, 1, 3, 10, 30, 70000, 200000)))
}
