package twins

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/wallet"
)

// A motif is a few acts on the same lots, such as meet seldom where all is random: each is about one thing that time
// does. After it the history goes on.
func (w *twins) motif(n int) {
	motifs := []func(n int){w.holdOverAnEnd, w.rollAgain, w.manyEnds, w.planGoesOn, w.sameEnd, w.sharedCap, w.manyHolds, w.takenBack, w.together, w.idle}
	motifs[w.r.IntN(len(motifs))](n)
}

// holdOverAnEnd places holds that fall due before, at and after the end of a lot that rolls over, some with a minimum.
func (w *twins) holdOverAnEnd(n int) {
	g := wallet.Grant{Wallet: "ann", Amount: 20 + w.r.Int64N(20), Reference: fmt.Sprint("m", n), Ends: wallet.After(2 * time.Hour), Roll: &wallet.Roll{Cap: 1 + w.r.Int64N(20), Times: 1}, Priority: new(int)}
	*g.Priority = -1
	lasts := of(w, 5*time.Hour, day)
	if g.Roll.Lasts = wallet.For(lasts); lasts == day {
		g.Roll.Times = of(w, 1, 2)
	}
	if w.once(4) {
		g.Uses = []string{"images"}
	}
	w.grant(g)
	for i := range 3 {
		amount := 3 + w.r.Int64N(8)
		w.reserve(fmt.Sprint("m", n, "/", i), amount, w.r.Int64N(2)*(1+w.r.Int64N(amount)), of(w, time.Hour, 2*time.Hour, 3*time.Hour), of(w, "", "images"))
	}
	for range 2 {
		w.advance(of(w, time.Hour, 2*time.Hour, 3*time.Hour, day))
		w.look()
	}
	w.onNamed()
}

// rollAgain has a lot roll over more than once, unseen, beside one of the same end, and calls it by its name.
func (w *twins) rollAgain(n int) {
	hour := w.now.Truncate(time.Hour)
	g := wallet.Grant{Wallet: "ann", Amount: 5 + w.r.Int64N(20), Reference: fmt.Sprint("m", n), Ends: wallet.At(hour.Add(2 * time.Hour)), Roll: &wallet.Roll{Cap: 4 + w.r.Int64N(20), Lasts: wallet.For(day), Times: of(w, 2, 3, -1)}}
	other := wallet.Grant{Wallet: "ann", Amount: 5, Reference: fmt.Sprint("n", n), Ends: wallet.At(hour.Add(2*time.Hour + of(w, day, 2*day)))}
	if w.once(3) {
		other.Starts = hour.Add(of(w, time.Hour, 3*time.Hour))
	}
	if w.once(2) {
		g, other = other, g
	}
	w.grant(g)
	w.grant(other)
	w.advance(2*time.Hour + of(w, 30*time.Minute, day, day+time.Hour, 2*day-time.Hour))
	w.look()
	w.onNamed()
	w.look()
	w.draw()
}

// manyEnds lets more lots end than a call writes, and calls some of them.
func (w *twins) manyEnds(n int) {
	w.burst(n)
	w.advance(of(w, 2*time.Hour, 3*time.Hour, 58*day))
	w.look()
	w.onNamed()
	if l := w.lots; len(l) > 0 { // one of the burst, which has ended
		w.onLot(l[len(l)-1-w.r.IntN(min(33, len(l)))])
	}
}

// planGoesOn leaves a plan alone for some periods, and calls its lots by what the balance shows.
func (w *twins) planGoesOn(n int) {
	g := w.somePlan(n)
	g.Starts = time.Time{}
	if w.once(2) {
		g.Ends = wallet.EachPeriod(budget.Per(1, budget.Day, zone(of(w, "UTC", "Africa/Cairo")), time.Time{}).Period)
	}
	w.grant(g)
	w.advance(of(w, day, 3*day, 5*day))
	w.look()
	w.onNamed()
	w.look()
	w.grant(wallet.Grant{Wallet: "ann", Amount: 3, Reference: of(w, g.Reference, "x"+g.Reference)})
	w.draw()
}

// sameEnd has lots of one end that were granted in another order than they begin.
func (w *twins) sameEnd(n int) {
	hour := w.now.Truncate(time.Hour)
	for i := range 3 {
		g := wallet.Grant{Wallet: "ann", Amount: 4, Reference: fmt.Sprint("m", n, "/", i), Ends: wallet.At(hour.Add(5 * time.Hour))}
		if i != 1 {
			g.Starts = hour.Add(time.Duration(4-i) * time.Hour)
		}
		w.grant(g)
	}
	w.advance(4 * time.Hour)
	w.look()
	w.draw()
}

// sharedCap fills a cap that lots of one end share.
func (w *twins) sharedCap(n int) {
	end := w.now.Truncate(time.Hour).Add(2 * time.Hour)
	for i := range 3 {
		w.grant(wallet.Grant{Wallet: "ann", Amount: 5 + w.r.Int64N(5), Reference: fmt.Sprint("m", n, "/", i), Category: "paid", Ends: wallet.At(end), Roll: &wallet.Roll{Cap: 12, Lasts: wallet.For(day), Times: of(w, 1, 2), Shared: true}})
	}
	if w.once(2) {
		w.reserve(fmt.Sprint("m", n), 7, 0, of(w, time.Hour, 2*time.Hour, 3*time.Hour), "")
	}
	w.advance(2*time.Hour + of(w, 30*time.Minute, day))
	w.look()
	w.onNamed()
}

// manyHolds has more holds fall due than a call writes, of lots of which some end before, and some after.
func (w *twins) manyHolds(n int) {
	many := 30 + w.r.IntN(of(w, 3, 40, 168))
	g := wallet.Grant{Wallet: "ann", Amount: int64(2 * many), Reference: fmt.Sprint("m", n), Ends: wallet.After(of(w, 2*time.Hour, 5*time.Hour, 3*day))}
	if w.once(2) {
		g.Roll = w.someRoll()
	}
	if w.once(4) {
		g.Uses = []string{"images"}
	}
	use, apart := of(w, "", "images"), of(w, 0, time.Minute)
	least := w.r.Int64N(2) * w.r.Int64N(2)
	w.grant(g)
	w.call(fmt.Sprintf("place %d holds, %v apart, at least %d, use %q", many, apart, least, use), func(ctx context.Context, tx pgx.Tx, tw *twin) (said, error) {
		for i := range many {
			line := tw.book.Line("ann", 2)
			line.AtLeast = least * int64(i%3)
			r := holds.Placement{ID: fmt.Sprint("m", n, "/", i), TTL: time.Hour + time.Duration(i)*apart, Note: budget.Note{Use: use}, Lines: []holds.Line{line}}
			if _, err := tw.holds.Place(ctx, tx, r); err != nil {
				return said{}, err
			}
		}
		return said{}, nil
	})
	for range 2 {
		w.advance(of(w, 90*time.Minute, 3*time.Hour, 5*time.Hour))
		w.look()
		w.onNamed()
	}
	w.draw()
}

// takenBack has units, or a plan, taken back and given back while it ends, rolls over and renews.
func (w *twins) takenBack(n int) {
	g := wallet.Grant{Wallet: "ann", Amount: 10 + w.r.Int64N(10), Reference: fmt.Sprint("m", n), Ends: wallet.After(day), Roll: &wallet.Roll{Cap: 5 + w.r.Int64N(10), Lasts: wallet.For(day), Times: of(w, 0, 1, -1)}}
	renewals := w.once(2)
	if renewals {
		g.Ends = wallet.EachPeriod(w.somePeriod())
	}
	w.grant(g)
	for range 4 {
		r := wallet.Revoke{Wallet: "ann", Reference: g.Reference}
		if r.Renewals = renewals && w.once(2); !r.Renewals {
			r.Amount = w.r.Int64N(8)
		}
		if w.once(2) {
			w.reinstated(fmt.Sprintf("reinstate %+v", r), func(*twin) wallet.Revoke { return r })
		} else {
			w.call(fmt.Sprintf("revoke %+v", r), func(ctx context.Context, tx pgx.Tx, tw *twin) (said, error) {
				a, err := tw.book.Revoke(ctx, tx, r)
				no := a.Lot
				a.Lot, a.Seq = 0, 0
				return say(a, no), err
			})
		}
		w.look()
		w.advance(of(w, time.Minute, time.Hour, day-time.Hour, day+time.Hour))
		w.look()
	}
	w.draw()
}

// together has plans that renew at one instant, some with a cap that they share, and holds of their lots.
func (w *twins) together(n int) {
	p := w.somePeriod()
	for i := range 2 + w.r.IntN(2) {
		g := wallet.Grant{Wallet: "ann", Amount: 5, Reference: fmt.Sprint("m", n, "/", i), Category: "paid", Ends: wallet.EachPeriod(p)}
		if w.once(2) {
			g.Starts = w.now.Add(of(w, time.Hour, day))
		}
		if w.once(2) {
			g.Roll = &wallet.Roll{Cap: 8, Lasts: wallet.For(day), Times: of(w, 1, -1), Shared: w.once(2)}
		}
		w.grant(g)
		w.reserve(fmt.Sprint("m", n, "/", i), 3, w.r.Int64N(3), of(w, time.Hour, day, 2*day), "")
		w.advance(of(w, time.Minute, 10*time.Hour, day))
	}
	w.advance(of(w, day, 3*day, 33*day))
	w.look()
	w.onNamed()
	w.draw()
	for i := range 2 { // so that not all plans go on for good
		if w.once(2) {
			reference := fmt.Sprint("m", n, "/", i)
			w.call("end "+reference, func(ctx context.Context, tx pgx.Tx, tw *twin) (said, error) {
				_, err := tw.book.Revoke(ctx, tx, wallet.Revoke{Wallet: "ann", Reference: reference, Renewals: true})
				return said{}, err
			})
		}
	}
}

// idle leaves the wallet alone for a year or more, with a plan or two.
func (w *twins) idle(n int) {
	if len(w.plans) > 1 {
		w.endPlans()
	}
	w.planGoesOn(n)
	if !w.once(3) {
		return
	}
	w.advance(of(w, 366*day, 500*day))
	w.look()
	w.onNamed()
	w.draw()
	w.endPlans()
}

// endPlans ends all plans, or the next steps would be slow.
func (w *twins) endPlans() {
	for _, one := range w.plans {
		w.call("end "+one.reference, func(ctx context.Context, tx pgx.Tx, tw *twin) (said, error) {
			_, err := tw.book.Revoke(ctx, tx, wallet.Revoke{Wallet: "ann", Reference: one.reference, Renewals: true})
			if errors.Is(err, wallet.ErrUnknownLot) {
				err = nil // it may have been purged
			}
			return said{}, err
		})
	}
	w.plans = nil
}

// onNamed makes a call on a lot that the balance shows.
func (w *twins) onNamed() {
	if len(w.rows) > 0 {
		w.onLot(w.rows[len(w.rows)-1-w.r.IntN(min(4, len(w.rows)))])
	}
}

func (w *twins) onLot(l *named) {
	what, nos, reference := w.nameOf(l)
	switch {
	case what == "":
	case w.once(3):
		w.revokeLot(what, nos, reference)
	case w.once(2):
		w.rollOverLot(what, nos, reference)
	default:
		w.setEndOf(what, nos, reference)
	}
}
