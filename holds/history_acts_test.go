package holds_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
)

// int is evenly one of lo to hi: rapid's own ranges prefer small numbers.
func (h *history) int(label string, lo, hi int) int64 {
	all := make([]int, hi-lo+1)
	for i := range all {
		all[i] = lo + i
	}
	return int64(rapid.SampledFrom(all).Draw(h.T, label))
}

// once in n times.
func (h *history) once(label string, n int) bool { return h.int(label, 1, n) == int64(n) }

func (h *history) scope() string { return rapid.SampledFrom(h.scopes).Draw(h.T, "scope") }

func (h *history) holder() string {
	return rapid.SampledFrom([]string{"", "ann", "ben"}).Draw(h.T, "holder")
}

// limits are some limits near to the units used and held.
func (h *history) limits(scope string) (limits []budget.Limit) {
	for range rapid.SampledFrom([]int{0, 0, 1, 1, 2}).Draw(h.T, "limits") {
		window := rapid.SampledFrom(modelWindows).Draw(h.T, "window")
		held, _ := h.m.held(scope, h.now)
		limits = append(limits, budget.Limit{Window: window, Lifetime: window == 0, Max: max(0, h.m.used(scope, h.now, window)+held+int64(rapid.SampledFrom([]int{-1, 1, 3, 5, 8, 12, 20, 40}).Draw(h.T, "room")))})
	}
	return limits
}

func (h *history) lines() (lines []holds.Line) {
	for range h.int("lines", 1, 3) {
		scope := h.scope()
		amount := h.int("amount", 1, 5)
		lines = append(lines, holds.Line{Scope: scope, Amount: amount, Limits: h.limits(scope), AtLeast: max(0, h.int("at least", -8, int(amount)))})
	}
	return lines
}

// equal are lines of a request with UpTo.
func (h *history) equal() (lines []holds.Line) {
	amount := h.int("amount", 1, 9)
	for _, scope := range h.scopes[:h.int("lines", 1, len(h.scopes))] {
		lines = append(lines, holds.Line{Scope: scope, Amount: amount, Limits: h.limits(scope), AtLeast: max(0, h.int("at least", -8, int(amount)))})
	}
	return lines
}

func (h *history) somewhat() (charges []budget.Charge) {
	for range h.int("charges", 0, 1) {
		scope := h.scope()
		charges = append(charges, budget.Charge{Scope: scope, Amount: h.int("amount", 1, 5), Limits: h.limits(scope)})
	}
	return charges
}

func (h *history) reason() budget.Note {
	return budget.Note{Reason: rapid.SampledFrom([]string{"", "payment_failed"}).Draw(h.T, "reason")}
}

func (h *history) ttl() time.Duration { return h.duration("ttl", 2, 5, 10, 30) }

func (h *history) grace() time.Duration {
	return time.Duration(rapid.SampledFrom([]int{0, 0, 0, 4}).Draw(h.T, "grace")) * time.Second
}

// ids are those of one or two holds, mostly some that there are.
func (h *history) ids() []string {
	one := func() string {
		if len(h.m.holds) > 0 && !h.once("unknown", 10) {
			return h.m.holds[h.int("hold", 0, len(h.m.holds)-1)].id
		}
		return fmt.Sprint("h", h.int("id", 0, 5))
	}
	ids := []string{one()}
	if second := one(); h.once("second", 4) && second != ids[0] {
		ids = append(ids, second)
	}
	return ids
}

// who is the holder that a call names: mostly none, or the right one.
func (h *history) who(ids []string) string {
	if hold := h.m.find(ids[0]); hold != nil && h.once("named", 3) {
		return hold.holder
	}
	return rapid.SampledFrom([]string{"", "", "", "ann"}).Draw(h.T, "who")
}

func (h *history) place() {
	r := holds.Placement{Tenant: h.tenant, ID: fmt.Sprint("h", h.int("id", 0, 9)), Holder: h.holder(), Lines: h.lines(), Charges: h.somewhat(),
		TTL: h.ttl(), Grace: h.grace(), Metadata: rapid.SampledFrom([]json.RawMessage{nil, json.RawMessage(`{"row":  7}`)}).Draw(h.T, "metadata")}
	if r.UpTo = h.once("up to", 3); r.UpTo {
		r.Lines = h.equal()
	}
	if was := h.m.find(r.ID); was != nil && !h.once("other content", 3) { // the same again
		r.Holder, r.Charges, r.Lines, r.Metadata, r.UpTo = was.holder, nil, nil, was.metadata, was.upTo > 0
		for _, l := range was.lines {
			r.Lines = append(r.Lines, holds.Line{Scope: l.scope, Amount: max(l.amount, was.upTo)})
		}
	}
	n := len(h.m.holds)
	want, wantErr := h.m.place(h.now, r, nil, "", false)
	got, err := h.f.book.Place(h.ctx(), h.tx, r)
	h.compareError(wantErr, err)
	h.comparePlaced(want, got, len(h.m.holds) > n)
}

func (h *history) claim() {
	c := holds.Claim{Tenant: h.tenant, Key: holds.Key{Type: "seat", Value: fmt.Sprint(h.int("seat", 1, 2))},
		Holder: rapid.SampledFrom([]string{"ann", "ben"}).Draw(h.T, "claimant"), TTL: h.ttl(), Grace: h.grace(), Reveal: rapid.Bool().Draw(h.T, "reveal")}
	if h.once("with a line", 3) {
		c.Lines = []holds.Line{{Scope: h.scopes[0], Amount: 1, Limits: h.limits(h.scopes[0])}}
	}
	scope := claimScope(c.Tenant, c.Key)
	r := holds.Placement{Tenant: c.Tenant, ID: "a claim", Holder: c.Holder, Lines: c.Lines, TTL: c.TTL, Grace: c.Grace}
	n := len(h.m.holds)
	want, wantErr := h.m.place(h.now, r, &c.Key, scope, c.Reveal)
	got, err := h.f.book.Claim(h.ctx(), h.tx, c)
	h.compareError(wantErr, err)
	created := len(h.m.holds) > n
	if created {
		require.Nil(h, h.m.find(got.ID), "each generation has an id of its own")
		want.id = got.ID
	}
	h.comparePlaced(want, got, created)
}

func (h *history) comparePlaced(want *mHold, got holds.Hold, created bool) {
	if want == nil {
		require.Zero(h, got)
		return
	}
	require.Equal(h, created, got.Created)
	got.Created, got.Charges = false, nil
	require.Equal(h, want.view(h.now), got)
}

func (h *history) charge() {
	var charges []budget.Charge
	for range h.int("charges", 1, 2) {
		scope := h.scope()
		charges = append(charges, budget.Charge{Scope: scope, Amount: h.int("amount", 1, 5), Limits: h.limits(scope)})
	}
	checks := true
	if _, ok := h.tx.(autocommit); !ok { // a look that fails would abort the transaction
		for _, s := range h.scopes {
			checks = checks && !h.m.scopes[s].last.After(h.now.Add(time.Minute))
		}
	}
	var checkErr error
	if checks {
		_, checkErr = h.f.ledger.Check(h.ctx(), h.tx, charges...)
	}
	wantErr := h.m.charges(h.now, merged(nil, charges))
	if checks {
		h.compareError(wantErr, checkErr)
	}
	_, err := h.f.ledger.Charge(h.ctx(), h.tx, charges...)
	h.compareError(wantErr, err)
}

// runAhead steps the clock of one scope alone: it is charged by a clock that is fast, and
// then put right.
func (h *history) runAhead() {
	now, c := h.now, budget.Charge{Scope: h.scope(), Amount: h.int("amount", 1, 5)}
	h.set(now.Add(h.duration("ahead", 5, 30, 90, 200)))
	require.NoError(h, h.m.charges(h.now, []budget.Charge{c}))
	_, err := h.f.ledger.Charge(h.ctx(), h.tx, c)
	require.NoError(h, err)
	h.set(now)
}

func (h *history) repair() {
	scope := h.scope()
	ahead := h.m.repair(scope, h.now)
	got, err := h.f.ledger.RepairClock(h.ctx(), h.tx, scope, budget.Note{})
	require.NoError(h, err)
	require.Equal(h, ahead, got.Ahead)
	require.Equal(h, ahead > 0, got.Repaired)
}

func (h *history) capture() {
	c := holds.Capture{Tenant: h.tenant, IDs: h.ids(), Entity: rapid.SampledFrom([]string{"", "order/1", "order/2"}).Draw(h.T, "entity")}
	c.Holder = h.who(c.IDs)
	if len(c.IDs) == 1 && !h.once("as it is", 3) {
		hold, scopes := h.m.find(c.IDs[0]), h.scopes
		if hold != nil && hold.claim != nil {
			scopes = append(slices.Clip(scopes), claimScope(h.tenant, *hold.claim))
		}
		for _, scope := range scopes {
			kept := hold != nil && len(hold.lines) > 0 && hasLine(hold, scope)
			most := 7
			if len(scope) > len(h.scopes[0]) { // a claim's
				most = 2
			}
			if kept && !h.once("not used", 4) || h.once("stranger", 30) {
				c.Lines = append(c.Lines, holds.Line{Scope: scope, Amount: h.int("amount", 0, most), Limits: h.limits(scope)})
			}
		}
	}
	if c.All = c.Lines == nil; !c.All {
		c.Keep = rapid.Bool().Draw(h.T, "keep")
		c.Over = rapid.SampledFrom([]holds.Over{holds.OverRefused, holds.OverIfFits, holds.OverUpTo, holds.OverEvenly, holds.OverAllowed}).Draw(h.T, "over")
		for i, l := range c.Lines {
			if (c.Over == holds.OverIfFits || c.Over == holds.OverUpTo || c.Over == holds.OverEvenly) && len(l.Limits) == 0 {
				c.Lines[i].Limits = []budget.Limit{budget.Lifetime(h.int("limit", 0, 99))}
			}
		}
	}
	want, wantErr := h.m.capture(h.now, c)
	got, err := h.f.book.Capture(h.ctx(), h.tx, c)
	h.compareAll(want, wantErr, got, err)
}

func hasLine(hold *mHold, scope string) bool {
	for _, l := range hold.lines {
		if l.scope == scope {
			return true
		}
	}
	return false
}

func (h *history) release() {
	r := holds.Release{Tenant: h.tenant, IDs: h.ids(), Captured: h.once("captured too", 3), Note: h.reason()}
	r.Holder = h.who(r.IDs)
	want, wantErr := h.m.release(h.now, r)
	got, err := h.f.book.Release(h.ctx(), h.tx, r)
	h.compareAll(want, wantErr, got, err)
}

func (h *history) extend() {
	e := holds.Extend{Tenant: h.tenant, IDs: h.ids(), By: h.duration("by", 1, 5, 20, 60)}
	e.Holder = h.who(e.IDs)
	want, wantErr := h.m.extend(h.now, e)
	got, err := h.f.book.Extend(h.ctx(), h.tx, e)
	h.compareAll(want, wantErr, got, err)
}

func (h *history) refund() {
	r := holds.Return{Tenant: h.tenant, IDs: h.ids(), All: true, Note: h.reason()}
	r.Holder = h.who(r.IDs)
	want, wantErr := h.m.refund(h.now, r)
	got, err := h.f.book.Return(h.ctx(), h.tx, r)
	h.compareAll(want, wantErr, got, err)
}

func (h *history) expire() {
	e := holds.Expire{Tenant: h.tenant, ID: h.ids()[0], Deadline: h.now}
	if hold := h.m.find(e.ID); hold != nil && !h.once("wrong deadline", 5) {
		e.Deadline = hold.deadline
	}
	want, wantEnded, wantErr := h.m.expireOne(h.now, e)
	got, ended, err := h.f.book.Expire(h.ctx(), h.tx, e)
	h.compareError(wantErr, err)
	require.Equal(h, wantEnded, ended)
	h.comparePlaced(want, got, false)
}

func (h *history) sweep() {
	batch := int(h.int("batch", 1, 4))
	want := h.m.sweep(h.now, batch)
	report, err := h.f.book.Sweep(h.ctx(), h.f.pool, holds.SweepOptions{Batch: batch})
	require.NoError(h, err)
	require.Equal(h, want, report.Expired)
	require.Zero(h, report.Skipped)
}

func (h *history) compareAll(want []*mHold, wantErr error, got []holds.Hold, err error) {
	h.compareError(wantErr, err)
	var views []holds.Hold
	for _, w := range want {
		views = append(views, w.view(h.now))
	}
	require.Equal(h, views, got)
}

func (h *history) compareError(want, err error) {
	h.aborted = errors.Is(err, budget.ErrClock)
	outcomes.count(h.name, want)
	switch want := want.(type) {
	case nil:
		require.NoError(h, err)
	case refused:
		var exceeded *budget.ExceededError
		require.ErrorAs(h, err, &exceeded)
		got := refused{}
		for _, r := range exceeded.Refusals {
			refusal := mRefusal{scope: r.Scope, max: r.Limit.Max, window: r.Limit.Window, used: r.Used, held: r.Held + r.OwnHeld,
				requested: r.Requested, available: r.Available, due: r.HoldDue, retry: r.RetryAfter}
			for w := range want {
				// The model does not know which holds are the transaction's own: TestRefusal_… looks at
				// these. One of them may fall due first.
				if (r.OwnHeld > 0 || h.name == "capture") && w.scope == refusal.scope && w.max == refusal.max && w.window == refusal.window {
					refusal.due, refusal.retry = w.due, w.retry
				}
			}
			got[refusal] = true
		}
		require.Equal(h, want, got)
	case *holds.StateError, *holds.TakenError, *holds.ExcessError:
		require.Equal(h, want, err)
	default:
		if errors.Is(want, holds.ErrCeiling) { // with its text
			require.EqualError(h, err, want.Error())
			want = holds.ErrCeiling
		}
		require.ErrorIs(h, err, want)
	}
}
