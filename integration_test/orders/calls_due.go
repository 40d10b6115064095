package orders

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/schema"
	"github.com/pgmetered/metered/internal/sweep"
	"github.com/pgmetered/metered/wallet"
)

// makeDue makes the wallet "d", in which all is due two hours later that time alone does, and nobody
// has written it: a hold with a minimum, a lot that ends and rolls over in part, one that begins, and
// a plan that renews.
func (w *world) makeDue(ctx context.Context, tx pgx.Tx, now time.Time) error {
	var b steps
	w.since = now
	half := now.Add(30 * time.Minute)
	for _, g := range []wallet.Grant{
		{Amount: 30, Reference: "old", Ends: wallet.After(time.Hour), Roll: &wallet.Roll{Cap: 20}},
		{Amount: 50, Reference: "plan", Ends: wallet.EachPeriod(budget.PerPeriod(1, 24*time.Hour, half).Period)},
		{Amount: 7, Reference: "later", Starts: half.Add(time.Hour)},
	} {
		g.Wallet = w.scope("d")
		b.do(func() error { _, err := w.wallet.Grant(ctx, tx, g); return err })
	}
	b.do(func() error {
		r, err := w.ledger.Charge(ctx, tx, w.wallet.Charge(w.scope("d"), 50)) // the plan's first lot
		if err == nil {
			w.drawn = r.Entries[0].Seq
		}
		return err
	})
	b.do(func() error {
		line := w.wallet.Line(w.scope("d"), 10)
		line.AtLeast = 4
		_, err := w.book.Place(ctx, tx, holds.Placement{Tenant: w.name, ID: "of d", TTL: 40 * time.Minute, Lines: []holds.Line{line}})
		return err
	})
	w.model.due = []lot{{"plan", 225, 50, ""}, {"old", 1000, 20, ""}, {"later", 1001, 7, ""}} // tenths of an hour
	return b.err
}

// endLater gives the units of the lot "later" another end, unless it was earlier: they have rolled over.
func (m *model) endLater(at int) string {
	for i := range m.due {
		if m.due[i].ref == "later" {
			m.due[i].ends = min(m.due[i].ends, at)
		}
	}
	return ok
}

// onDue is a call on "d" in a transaction.
func onDue(name string, tx func(ctx context.Context, tx pgx.Tx, w *world, scope string) error, model func(m *model) string) call {
	return call{name: name, needs: aBacklog, model: model, tx: func(ctx context.Context, t pgx.Tx, w *world) error {
		return tx(ctx, t, w, w.scope("d"))
	}}
}

// pile is how many due holds of "p" capture a unit each: more than one step writes.
const pile = 27

// ofPile lets in two of the calls on "p".
var ofPile = budget.Lifetime(75)

// onPile is a call on "p" that has transactions of its own, and takes steps first.
func onPile(name string, own func(ctx context.Context, c *metered.Client, pool *pgxpool.Pool, w *world, level pgx.TxIsoLevel) error, model func(m *model) string) call {
	return call{name: name, needs: aPile, own: own, model: model}
}

// takeOfPile spends or holds units of "p".
func (m *model) takeOfPile(spent, held int64) string {
	p := m.scopes["p"]
	if p.spent+p.held+spent+held > ofPile.Max {
		return "budget_exceeded"
	}
	p.spent += spent
	p.held += held
	return ok
}

// pileText is the units of "p".
func pileText(spent, held int64) string { return fmt.Sprintf(" pile=%d,%d", spent, held) }

// nothing is the effect of a call that writes what is due, and no more.
func nothing(*model) string { return ok }

var dueCalls = []call{
	onDue("due-draw", func(ctx context.Context, tx pgx.Tx, w *world, scope string) error {
		_, err := w.ledger.Charge(ctx, tx, w.wallet.Charge(scope, 60))
		return err
	}, func(m *model) string { return take(m.due, "", 60) }),

	onDue("due-grant", func(ctx context.Context, tx pgx.Tx, w *world, scope string) error {
		_, err := w.wallet.Grant(ctx, tx, wallet.Grant{Wallet: scope, Amount: 30, Reference: "more", Ends: wallet.After(time.Hour)})
		return err
	}, func(m *model) string {
		if !slices.ContainsFunc(m.due, func(l lot) bool { return l.ref == "more" }) {
			m.due = append(m.due, lot{"more", 10, 30, ""})
		}
		return ok
	}),

	onDue("due-refund", func(ctx context.Context, tx pgx.Tx, w *world, scope string) error {
		_, err := w.ledger.Refund(ctx, tx, budget.Refund{Scope: scope, Seq: w.drawn, Amount: 5})
		return err
	}, func(m *model) string { // of a lot that has ended: they go on in another one
		m.due = append(m.due, lot{"plan", 500, 5, ""})
		return ok
	}),

	onDue("due-revoke", func(ctx context.Context, tx pgx.Tx, w *world, scope string) error {
		_, err := w.wallet.Revoke(ctx, tx, wallet.Revoke{Wallet: scope, Reference: "old"})
		return err
	}, func(m *model) string {
		for i := range m.due {
			if m.due[i].ref == "old" {
				m.due[i].rest = 0
			}
		}
		return ok
	}),

	onDue("due-end", func(ctx context.Context, tx pgx.Tx, w *world, scope string) error {
		_, err := w.wallet.SetEnd(ctx, tx, wallet.LotEnd{Wallet: scope, Reference: "later", Expires: w.since.Add(5 * time.Hour)})
		return err
	}, func(m *model) string { return m.endLater(30) }),

	onDue("due-rollover", func(ctx context.Context, tx pgx.Tx, w *world, scope string) error {
		_, err := w.wallet.Rollover(ctx, tx, wallet.Rollover{Wallet: scope, Reference: "later", Cap: 1000, For: time.Hour})
		return err
	}, func(m *model) string { return m.endLater(5) }), // older than "more", which ends then, too

	onDue("due-renewals", func(ctx context.Context, tx pgx.Tx, w *world, scope string) error {
		_, err := w.wallet.Revoke(ctx, tx, wallet.Revoke{Wallet: scope, Reference: "plan", Renewals: true})
		return err
	}, nothing),

	onDue("due-lapse", func(ctx context.Context, tx pgx.Tx, w *world, scope string) error {
		_, err := w.wallet.Expire(ctx, tx, scope)
		return err
	}, nothing),

	onPile("pile-charge", func(ctx context.Context, c *metered.Client, pool *pgxpool.Pool, w *world, _ pgx.TxIsoLevel) error {
		_, err := c.Budget.ChargeNow(ctx, pool, budget.Charge{Scope: w.scope("p"), Amount: 20, Limits: []budget.Limit{ofPile}})
		return err
	}, func(m *model) string { return m.takeOfPile(20, 0) }),

	onPile("pile-place", func(ctx context.Context, c *metered.Client, _ *pgxpool.Pool, w *world, level pgx.TxIsoLevel) error {
		return c.RunTx(ctx, pgx.TxOptions{IsoLevel: level}, func(ctx context.Context, tx pgx.Tx) error {
			_, err := w.book.Place(ctx, tx, holds.Placement{Tenant: w.name, ID: "on pile", TTL: time.Hour,
				Lines: []holds.Line{{Scope: w.scope("p"), Amount: 25, AtLeast: 1, Limits: []budget.Limit{ofPile}}}})
			return err
		})
	}, func(m *model) string {
		said := ok
		if m.holds["on pile"] == "" {
			if said = m.takeOfPile(0, 25); said == ok {
				m.holds["on pile"] = "h"
			}
		}
		return said
	}),

	onPile("pile-open", func(ctx context.Context, c *metered.Client, _ *pgxpool.Pool, w *world, _ pgx.TxIsoLevel) error {
		r := w.reservation("pile", 0)
		r.Lines = []holds.Line{{Scope: w.scope("p"), Amount: 30, Limits: []budget.Limit{ofPile}}}
		s, err := metered.Open[int](ctx, c, r)
		if err == nil {
			s.Close()
		}
		return err
	}, func(m *model) string {
		if m.holds["pile"] == "h" {
			return "session_running"
		}
		said := m.takeOfPile(0, 30)
		if said == ok {
			m.holds["pile"] = "h"
		}
		return said
	}),

	onPile("pile-step", func(ctx context.Context, _ *metered.Client, pool *pgxpool.Pool, w *world, _ pgx.TxIsoLevel) error {
		name, err := schema.Parse("")
		if err != nil {
			return err
		}
		return sweep.CatchUp(ctx, pool, name, 30*time.Minute, w.scope("p"))
	}, nothing),

	onPile("pile-sweep", func(ctx context.Context, _ *metered.Client, pool *pgxpool.Pool, w *world, _ pgx.TxIsoLevel) error {
		_, err := w.book.Sweep(ctx, pool, holds.SweepOptions{})
		return err
	}, nothing),

	{name: "due-sweep-lots", needs: aBacklog, model: nothing, own: func(ctx context.Context, _ *metered.Client, pool *pgxpool.Pool, w *world, _ pgx.TxIsoLevel) error {
		_, err := w.wallet.Sweep(ctx, pool, wallet.SweepOptions{})
		return err
	}},

	{name: "due-sweep-holds", needs: aBacklog, model: nothing, own: func(ctx context.Context, _ *metered.Client, pool *pgxpool.Pool, w *world, _ pgx.TxIsoLevel) error {
		_, err := w.book.Sweep(ctx, pool, holds.SweepOptions{})
		return err
	}},
}

// dueText is the units of the lots of "d".
func dueText(lots []lot) string {
	units := map[string]int64{}
	for _, l := range lots {
		units[l.ref] += l.rest
	}
	return fmt.Sprintf(" due=%d,%d,%d,%d", units["plan"], units["old"], units["later"], units["more"])
}

// dueState is the units of each lot of "d", as Balance shows them.
func (w *world) dueState(ctx context.Context, db *pgxpool.Pool) (string, error) {
	b, err := w.wallet.Balance(ctx, db, w.scope("d"))
	var lots []lot
	for _, l := range b.Lots {
		ref, _, _ := strings.Cut(l.Reference, " ")
		lots = append(lots, lot{ref: ref, rest: l.Units})
	}
	return dueText(lots), err
}
