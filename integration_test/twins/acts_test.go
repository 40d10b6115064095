package twins

import (
	"context"
	"encoding/json"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/leases"
	"github.com/pgmetered/metered/wallet"
)

// The acts of the twins. Each depends on its random numbers, and on what the balance shows.

func (w *twins) step(n int) {
	switch k := w.r.IntN(100); {
	case k < 30:
		w.motif(n)
	case k < 36 || n == 0:
		w.grant(w.someGrant(n))
	case k < 38:
		w.grant(w.somePlan(n))
	case k < 39:
		w.burst(n)
	case k < 46:
		w.draw()
	case k < 53:
		w.place(n)
	case k < 59:
		w.endHold()
	case k < 65:
		w.refund()
	case k < 69:
		w.revoke()
	case k < 71:
		w.reinstate()
	case k < 73:
		w.endPlan()
	case k < 78:
		w.rollOver()
	case k < 83:
		w.setEnd()
	case k < 85:
		w.credit()
	case k < 88:
		w.carve(n)
	case k < 89:
		if len(w.plans) > 3 {
			w.endPlans()
		}
		w.advance(of(w, 40*day, 100*day, 366*day))
	default:
		w.advance(of(w, time.Hour, 5*time.Hour, day, 3*day, 10*day))
	}
	if w.r.IntN(3) == 0 {
		w.advance(of(w, time.Minute, time.Hour, time.Hour, 2*time.Hour, 5*time.Hour, day))
	}
	if w.r.IntN(6) == 0 {
		w.toAnEnd()
	}
	w.look()
}

func of[T any](w *twins, some ...T) T { return some[w.r.IntN(len(some))] }

func (w *twins) once(in int) bool { return w.r.IntN(in) == 0 }

// toAnEnd goes to the end of a lot, or a microsecond beside.
func (w *twins) toAnEnd() {
	for _, l := range w.last.Lots {
		if to := l.Expires.Add(time.Duration(w.r.IntN(3)-1) * time.Microsecond); !l.Expires.IsZero() && to.After(w.now) && to.Before(w.now.Add(10*day)) {
			w.advance(to.Sub(w.now))
			return
		}
	}
}

// someGrant is a lot that often ends at a full hour, where others do.
func (w *twins) someGrant(n int) wallet.Grant {
	g := wallet.Grant{Wallet: "ann", Amount: 1 + w.r.Int64N(30), Category: of(w, "", "paid", "promotional")}
	hour := w.now.Truncate(time.Hour)
	var at time.Time
	switch w.r.IntN(4) {
	case 0:
	case 1:
		g.Ends = wallet.After(of(w, time.Hour, 5*time.Hour, day))
	default:
		at = hour.Add(of(w, 2*time.Hour, 2*time.Hour, 10*time.Hour, day, 3*day, 20*day))
	}
	if w.once(4) {
		g.Starts = hour.Add(of(w, time.Hour, time.Hour, 90*time.Minute, day))
		if !at.IsZero() {
			at = g.Starts.Add(of(w, time.Hour, 2*time.Hour, 2*day))
		}
	}
	if !at.IsZero() {
		g.Ends = wallet.At(at)
	}
	if w.once(3) {
		g.Uses = of(w, []string{"images"}, []string{"tokens"}, []string{"images", "tokens"})
	}
	if w.once(4) {
		p := w.r.IntN(3) * 5
		g.Priority = &p
	}
	if g.Ends != (wallet.Ends{}) && w.once(2) {
		g.Roll = w.someRoll()
	}
	if w.once(3) {
		g.LateRefunds = of(w, wallet.Lapse, wallet.Forever, 7*time.Hour)
	}
	if w.once(2) {
		g.Reference = fmt.Sprint("r", n)
	}
	w.grants = slices.DeleteFunc(w.grants, func(g granted) bool { return w.now.Sub(g.at) > retained/2 }) // a purge forgets them
	if len(w.grants) > 0 && w.once(12) {                                                                 // again, or another one under the reference
		was := w.grants[len(w.grants)-1-w.r.IntN(min(5, len(w.grants)))].Grant
		if w.once(3) {
			g.Reference = was.Reference
			return g
		}
		return was
	}
	return g
}

func (w *twins) someRoll() *wallet.Roll {
	roll := &wallet.Roll{Cap: 1 + w.r.Int64N(20)}
	lasts := of(w, 0, time.Hour, 3*time.Hour, day, 2*day)
	if lasts > 0 {
		roll.Lasts = wallet.For(lasts)
	}
	if w.once(3) {
		lasts, roll.Lasts = day, wallet.ToEndOf(w.somePeriod())
	}
	if lasts >= day {
		roll.Times = of(w, 0, 1, 2, 3, -1)
	}
	roll.Shared = w.once(3)
	return roll
}

func zone(name string) *time.Location {
	l, err := time.LoadLocation(name)
	if err != nil {
		panic(err)
	}
	return l
}

// somePeriod is a period in a zone that may lack a midnight, or begins on a 29 February.
func (w *twins) somePeriod() budget.Period {
	in := zone(of(w, "UTC", "Europe/Berlin", "Africa/Cairo", "America/Santiago", "Asia/Beirut"))
	leap := time.Date(2024, 2, 29, 0, 0, 0, 0, in)
	return of(w,
		budget.Per(1, budget.Day, in, time.Time{}), budget.Per(1, budget.Week, in, time.Time{}), budget.Per(1, budget.Month, in, time.Time{}),
		budget.Per(1, budget.Month, in, time.Date(2024, 1, 31, 12, 0, 0, 0, in)), budget.Per(1, budget.Year, in, leap),
		budget.PerPeriod(1, day, noon.Add(7*time.Minute))).Period
}

func (w *twins) somePlan(n int) wallet.Grant {
	g := wallet.Grant{Wallet: "ann", Amount: 1 + w.r.Int64N(30), Category: of(w, "", "paid"), Reference: fmt.Sprint("plan", n)}
	p := w.somePeriod()
	if w.once(3) {
		g.Starts = w.now.Truncate(time.Hour).Add(of(w, time.Hour, 30*time.Hour, -30*time.Hour))
	}
	if g.Ends = wallet.EachPeriod(p); w.once(4) {
		g.Ends = wallet.EachPeriodProrated(p)
	}
	if w.once(3) {
		g.Uses = []string{"images"}
	}
	if w.once(2) {
		g.Roll = w.someRoll()
	}
	return g
}

// ofPlan reports whether a grant brings a lot in each period.
func ofPlan(g wallet.Grant) bool {
	return strings.Contains(describe(wallet.Grant{Ends: g.Ends}), `"kind":"each_period`)
}

func (w *twins) grant(g wallet.Grant) {
	ok := w.call(fmt.Sprintf("grant %s", describe(g)), func(ctx context.Context, tx pgx.Tx, tw *twin) (said, error) {
		r, err := tw.book.Grant(ctx, tx, g)
		no := r.Lot
		r.Lot, r.Seq = 0, 0
		return say(r, no), err
	})
	if ok && g.Reference != "" {
		w.grants = append(w.grants, granted{g, w.now})
	}
	if ok && ofPlan(g) {
		w.plans = append(w.plans, plan{g.Reference, w.now})
	}
}

// describe is a grant without the fields that are zero.
func describe(g wallet.Grant) string {
	raw, err := json.Marshal(g)
	if err != nil {
		panic(err)
	}
	var fields map[string]any
	if err := json.Unmarshal(raw, &fields); err != nil {
		panic(err)
	}
	for name, v := range fields {
		if v == nil || v == "" || v == 0.0 || v == false || v == "0001-01-01T00:00:00Z" || name == "Note" || name == "Wallet" || reflect.DeepEqual(v, map[string]any{}) {
			delete(fields, name)
		}
	}
	raw, _ = json.Marshal(fields)
	return string(raw)
}

// burst grants many lots in one transaction.
func (w *twins) burst(n int) {
	many := 33 + w.r.IntN(of(w, 3, 40, 168))
	g := w.someGrant(n)
	g.Reference, g.Starts = "", time.Time{}
	ends := w.now.Truncate(time.Hour).Add(of(w, 2*time.Hour, 2*time.Hour, 10*time.Hour, day, 3*day, 20*day))
	g.Ends = wallet.At(ends)
	apart := of(w, 0, time.Minute)
	w.call(fmt.Sprintf("burst of %d, %v apart: %s", many, apart, describe(g)), func(ctx context.Context, tx pgx.Tx, tw *twin) (said, error) {
		var nos []int64
		for i := range many {
			one := g
			one.Ends = wallet.At(ends.Add(time.Duration(i) * apart))
			one.Reference = fmt.Sprint("b", n, "/", i)
			r, err := tw.book.Grant(ctx, tx, one)
			if err != nil {
				return said{}, err
			}
			nos = append(nos, r.Lot)
		}
		return say(many, nos...), nil
	})
}

func (w *twins) use() string { return of(w, "", "", "images", "tokens") }

func (w *twins) some(use string) int64 {
	if w.once(3) {
		return max(1, w.last.For(use)+w.cfg.Overdraft+w.r.Int64N(2))
	}
	return 1 + w.r.Int64N(30)
}

func moves(d budget.Posted) (nos []int64) {
	for i := range d.Lots {
		nos = append(nos, d.Lots[i].Lot)
		d.Lots[i].Lot = 0
	}
	return nos
}

func (w *twins) draw() {
	note, upTo := budget.Note{Use: w.use()}, w.once(3)
	d := w.all[0].book.Charge("ann", w.some(note.Use))
	d.Note, d.UpTo, d.Lots = note, upTo, true
	var got budget.Posted
	ok := w.call(fmt.Sprintf("draw %+v", d), func(ctx context.Context, tx pgx.Tx, tw *twin) (said, error) {
		receipt, err := tw.ledger.Charge(ctx, tx, d)
		if err != nil {
			return say(budget.Posted{}), err
		}
		r := receipt.Entries[0]
		tw.seqs = append(tw.seqs, r.Seq)
		got = r
		r.Seq = 0
		nos := moves(r)
		return say(r, nos...), nil
	})
	if ok {
		w.draws = append(w.draws, drawn{w.now, got.Amount})
		if d.Note.Use == "" { // lots for a use alone cross nothing
			w.armed("draw")
		}
	}
}

func (w *twins) place(n int) {
	ttl, use := of(w, time.Hour, 2*time.Hour, 5*time.Hour, day, 30*day), w.use()
	amount := w.some(use)
	least := int64(0)
	if w.once(2) {
		least = 1 + w.r.Int64N(amount)
	}
	w.reserve(fmt.Sprint("h", n), amount, least, ttl, use)
}

func (w *twins) reserve(id string, amount, least int64, ttl time.Duration, use string) {
	r := holds.Placement{ID: id, TTL: ttl, Note: budget.Note{Use: use}}
	ok := w.call(fmt.Sprintf("place %s %d at least %d for %v use %q", r.ID, amount, least, r.TTL, r.Note.Use), func(ctx context.Context, tx pgx.Tx, tw *twin) (said, error) {
		r.Lines = []holds.Line{tw.book.Line("ann", amount)}
		r.Lines[0].AtLeast = least
		h, err := tw.holds.Place(ctx, tx, r)
		return say(h.Due), err
	})
	if ok {
		w.holds = append(w.holds, held{r.ID, w.now, amount})
		if use == "" {
			w.armed("place")
		}
	}
}

// endHold captures, releases or extends a hold.
func (w *twins) endHold() {
	if len(w.holds) == 0 {
		return
	}
	h := w.holds[len(w.holds)-1-w.r.IntN(min(4, len(w.holds)))]
	if w.now.Sub(h.at) > retained/2 {
		return
	}
	ids := []string{h.id}
	what := w.r.IntN(4)
	c := holds.Capture{IDs: ids, Over: of(w, holds.OverRefused, holds.OverIfFits, holds.OverAllowed), Keep: w.once(3)}
	used, by := 1+w.r.Int64N(h.amount+2), of(w, time.Hour, day)
	w.call(fmt.Sprintf("end %d of %s, used %d, keep %v, over %v, by %v", what, h.id, used, c.Keep, c.Over, by), func(ctx context.Context, tx pgx.Tx, tw *twin) (said, error) {
		var all []holds.Hold
		var err error
		switch what {
		case 0:
			all, err = tw.holds.Release(ctx, tx, holds.Release{IDs: ids})
		case 1:
			all, err = tw.holds.Extend(ctx, tx, holds.Extend{IDs: ids, By: by})
		default:
			c.Lines = []holds.Line{tw.book.Line("ann", used)}
			all, err = tw.holds.Capture(ctx, tx, c)
		}
		if err != nil {
			return said{}, err
		}
		return say([]any{all[0].State, all[0].Due, all[0].EndedAt}), nil
	})
}

func (w *twins) refund() {
	if len(w.draws) == 0 {
		return
	}
	i := len(w.draws) - 1 - w.r.IntN(min(6, len(w.draws)))
	d := w.draws[i]
	if w.now.Sub(d.at) > retained/2 {
		return
	}
	amount := 1 + w.r.Int64N(d.amount)
	w.call(fmt.Sprintf("refund %d of draw %d", amount, i), func(ctx context.Context, tx pgx.Tx, tw *twin) (said, error) {
		p, err := tw.ledger.Refund(ctx, tx, budget.Refund{Scope: "ann", Seq: tw.seqs[i], Amount: amount})
		return say(p.Amount), err
	})
}

// name is a lot that a balance shows, or has shown, as each twin calls it.
func (w *twins) name() (what string, nos [3]int64, reference string) {
	if w.once(15) {
		return "unknown", nos, "unknown"
	}
	from := w.rows
	if w.once(2) {
		from = nil
		for _, l := range w.lots {
			if w.now.Sub(l.shown) < retained/2 {
				from = append(from, l)
			}
		}
	}
	if len(from) == 0 {
		return "", nos, ""
	}
	return w.nameOf(from[w.r.IntN(len(from))])
}

// nameOf is how each twin calls a lot, by its number or its reference.
func (w *twins) nameOf(l *named) (what string, nos [3]int64, reference string) {
	numbered := l.nos[0] > 0 && l.nos[1] > 0 && l.nos[2] > 0
	switch {
	case l.reference != "" && (!numbered || w.once(2)):
		return fmt.Sprintf("%q", l.reference), nos, l.reference
	case numbered:
		return fmt.Sprintf("lot %v (%s)", l.nos, l.reference), l.nos, ""
	}
	return "", nos, ""
}

func (w *twins) revoke() {
	if what, nos, reference := w.name(); what != "" {
		w.revokeLot(what, nos, reference)
	}
}

func (w *twins) revokeLot(what string, nos [3]int64, reference string) {
	amount := w.r.Int64N(12)
	var taken int64
	w.call(fmt.Sprintf("revoke %d of %s", amount, what), func(ctx context.Context, tx pgx.Tx, tw *twin) (said, error) {
		r, err := tw.book.Revoke(ctx, tx, wallet.Revoke{Wallet: "ann", Lot: nos[tw.no], Reference: reference, Amount: amount})
		no := r.Lot
		r.Lot, r.Seq = 0, 0
		taken = r.Amount
		return say(r, no), err
	})
	if taken > 0 {
		w.armed("revoke")
	}
}

func (w *twins) reinstate() {
	if what, nos, reference := w.name(); what != "" {
		amount := w.r.Int64N(12)
		w.reinstated(fmt.Sprintf("reinstate %d of %s", amount, what), func(tw *twin) wallet.Revoke {
			return wallet.Revoke{Wallet: "ann", Lot: nos[tw.no], Reference: reference, Amount: amount}
		})
	}
}

func (w *twins) reinstated(what string, of func(tw *twin) wallet.Revoke) {
	w.call(what, func(ctx context.Context, tx pgx.Tx, tw *twin) (said, error) {
		r, err := tw.book.Reinstate(ctx, tx, of(tw))
		no := r.Lot
		r.Lot, r.Seq = 0, 0
		return say(r, no), err
	})
}

func (w *twins) endPlan() {
	if len(w.plans) == 0 {
		return
	}
	one := &w.plans[w.r.IntN(len(w.plans))]
	if w.now.Sub(one.at) > retained/2 { // a purge forgets one that ended
		return
	}
	one.at = w.now
	if w.once(3) {
		w.reinstated("resume "+one.reference, func(*twin) wallet.Revoke {
			return wallet.Revoke{Wallet: "ann", Reference: one.reference, Renewals: true}
		})
		return
	}
	w.call("end "+one.reference, func(ctx context.Context, tx pgx.Tx, tw *twin) (said, error) {
		r, err := tw.book.Revoke(ctx, tx, wallet.Revoke{Wallet: "ann", Reference: one.reference, Renewals: true})
		no := r.Lot
		r.Lot, r.Seq = 0, 0
		return say(r, no), err
	})
}

func (w *twins) rollOver() {
	if what, nos, reference := w.name(); what != "" {
		w.rollOverLot(what, nos, reference)
	}
}

func (w *twins) rollOverLot(what string, nos [3]int64, reference string) {
	units, lasts := 1+w.r.Int64N(20), of(w, 0, time.Hour, day)
	w.call(fmt.Sprintf("roll over %d of %s for %v", units, what, lasts), func(ctx context.Context, tx pgx.Tx, tw *twin) (said, error) {
		r, err := tw.book.Rollover(ctx, tx, wallet.Rollover{Wallet: "ann", Lot: nos[tw.no], Reference: reference, Cap: units, For: lasts})
		if r.Replayed { // of units that go on for ever this is the last lot, where the wallet was idle for long
			return say(r.Replayed), err
		}
		no := r.Lot
		r.Lot, r.Seq = 0, 0
		return say(r, no), err
	})
}

func (w *twins) setEnd() {
	if what, nos, reference := w.name(); what != "" {
		w.setEndOf(what, nos, reference)
	}
}

func (w *twins) setEndOf(what string, nos [3]int64, reference string) {
	var ends time.Time
	if !w.once(3) {
		ends = w.now.Truncate(time.Hour).Add(of(w, 0, time.Hour, time.Hour, 5*time.Hour, 2*day, 30*day))
	}
	w.call(fmt.Sprintf("set the end of %s to %v", what, ends), func(ctx context.Context, tx pgx.Tx, tw *twin) (said, error) {
		r, err := tw.book.SetEnd(ctx, tx, wallet.LotEnd{Wallet: "ann", Lot: nos[tw.no], Reference: reference, Expires: ends})
		no := r.Lot
		r.Lot, r.Seq, r.At = 0, 0, time.Time{}
		return say(r, no), err
	})
}

func (w *twins) credit() {
	amount := 1 + w.r.Int64N(10)
	w.call(fmt.Sprintf("credit %d", amount), func(ctx context.Context, tx pgx.Tx, tw *twin) (said, error) {
		p, err := tw.ledger.Credit(ctx, tx, budget.Credit{Scope: "ann", Amount: amount})
		return say(p.Amount), err
	})
}

// carve carves for a child, or ends the last one.
func (w *twins) carve(n int) {
	if len(w.children) > 0 && w.once(2) {
		child := w.children[len(w.children)-1]
		w.children = w.children[:len(w.children)-1]
		used := w.r.Int64N(10)
		w.call(fmt.Sprintf("end child %s, used %d", child, used), func(ctx context.Context, tx pgx.Tx, tw *twin) (said, error) {
			if used > 0 {
				_, err := tw.ledger.Charge(ctx, tx, budget.Charge{Scope: child, Amount: used})
				require.NoError(w, err)
			}
			_, err := tw.carver.End(ctx, tx, child, budget.Note{})
			return said{}, err
		})
		return
	}
	child, amount := fmt.Sprint("ann/child", n), 1+w.r.Int64N(15)
	if w.call(fmt.Sprintf("carve %d for %s", amount, child), func(ctx context.Context, tx pgx.Tx, tw *twin) (said, error) {
		_, err := tw.carver.Carve(ctx, tx, leases.Carving{Child: child, From: tw.book.Charge("ann", amount), TTL: 3600 * day})
		return said{}, err
	}) {
		w.children = append(w.children, child)
	}
}
