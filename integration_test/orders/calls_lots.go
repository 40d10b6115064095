package orders

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/wallet"
)

var leaseCalls = []call{
	{name: "lease-open", tx: func(ctx context.Context, tx pgx.Tx, w *world) error {
		var no *int64
		err := tx.QueryRow(ctx, openLease, w.scope("s")).Scan(&no, new(*int64))
		if err == nil && no == nil {
			return budget.ErrExceeded
		}
		return err
	}, model: func(m *model) string {
		switch {
		case m.ahead:
			return "budget_clock"
		case m.use("s")+20 > limit:
			return "budget_exceeded"
		}
		m.scopes["s"].held += 20
		if m.lease == "" || m.lease == "settled" { // the text has the greater of both words
			m.lease = max(m.lease, "open")
		}
		return ok
	}},

	{name: "lease-spend", needs: aLease, tx: func(ctx context.Context, tx pgx.Tx, w *world) error {
		var spent bool
		err := tx.QueryRow(ctx, spendLease, w.scope("s"), w.lease.fence, w.lease.no, 5).Scan(&spent)
		if err == nil && !spent {
			return budget.ErrExceeded
		}
		return err
	}, model: func(m *model) string {
		if m.lease != "open" || m.leased > 5 { // the range is spent once
			return "budget_exceeded"
		}
		m.leased += 5
		return ok
	}},

	{name: "lease-settle", needs: aLease, committed: true, tx: func(ctx context.Context, tx pgx.Tx, w *world) error {
		return tx.QueryRow(ctx, settleLease, w.lease.no).Scan(new(string))
	}, model: func(m *model) string {
		if m.lease == "open" {
			m.lease = "settled"
			m.scopes["s"].held -= 20
			m.scopes["s"].spent += m.leased
			m.lowered()
		}
		return ok
	}},

	{name: "carve", tx: func(ctx context.Context, tx pgx.Tx, w *world) error {
		_, err := w.carver.Carve(ctx, tx, w.carving())
		return err
	}, model: func(m *model) string {
		switch {
		case m.child != "":
			return ok
		case m.ahead:
			return "budget_clock"
		case m.use("s")+20 > limit:
			return "budget_exceeded"
		}
		m.child = "open"
		m.scopes["s"].held += 20
		m.scopes["child"].credited = 20
		return ok
	}},

	{name: "charge-child", needs: aChild, tx: func(ctx context.Context, tx pgx.Tx, w *world) error {
		_, err := w.ledger.Charge(ctx, tx, budget.Charge{Scope: w.scope("child"), Amount: 10, Limits: []budget.Limit{budget.Prepaid(0)}})
		return err
	}, model: func(m *model) string {
		c := m.scopes["child"]
		if m.child != "open" {
			return "scope_closed"
		}
		if c.spent+10 > c.credited {
			return "budget_exceeded"
		}
		c.spent += 10
		return ok
	}},

	{name: "end-child", needs: aChild, tx: func(ctx context.Context, tx pgx.Tx, w *world) error {
		_, err := w.carver.End(ctx, tx, w.scope("child"), budget.Note{})
		return err
	}, model: func(m *model) string {
		if m.child == "open" {
			m.child = "closed"
			m.scopes["s"].held -= 20
			m.scopes["s"].spent += m.scopes["child"].spent
			m.lowered()
		}
		return ok
	}},
}

var walletCalls = []call{
	{name: "grant", needs: aWallet, tx: func(ctx context.Context, tx pgx.Tx, w *world) error {
		_, err := w.wallet.Grant(ctx, tx, wallet.Grant{Wallet: w.scope("w"), Amount: 30, Ends: wallet.After(2 * time.Hour), Reference: "c"})
		return err
	}, model: func(m *model) string {
		for _, l := range m.lots {
			if l.ref == "c" {
				return ok
			}
		}
		m.lots = append(m.lots, lot{"c", 2, 30, ""})
		return ok
	}},

	{name: "draw", needs: aWallet, tx: func(ctx context.Context, tx pgx.Tx, w *world) error {
		_, err := w.ledger.Charge(ctx, tx, w.wallet.Charge(w.scope("w"), 40))
		return err
	}, model: func(m *model) string { return m.draw("", 40) }},

	{name: "draw-use", needs: aWallet, tx: func(ctx context.Context, tx pgx.Tx, w *world) error {
		draw := w.wallet.Charge(w.scope("w"), 70)
		draw.Note, draw.Lots = budget.Note{Use: "images"}, true
		_, err := w.ledger.Charge(ctx, tx, draw)
		return err
	}, model: func(m *model) string { return m.draw("images", 70) }},

	{name: "revoke", needs: aWallet, tx: func(ctx context.Context, tx pgx.Tx, w *world) error {
		_, err := w.wallet.Revoke(ctx, tx, wallet.Revoke{Wallet: w.scope("w"), Reference: "a"})
		return err
	}, model: func(m *model) string {
		for i := range m.lots {
			if m.lots[i].ref == "a" {
				m.lots[i].rest = 0
			}
		}
		return ok
	}},

	{name: "rollover", needs: aWallet, tx: func(ctx context.Context, tx pgx.Tx, w *world) error {
		_, err := w.wallet.Rollover(ctx, tx, wallet.Rollover{Wallet: w.scope("w"), Reference: "a", Cap: 1000, For: 3 * time.Hour})
		return err
	}, model: func(m *model) string {
		for i, l := range m.lots {
			if l.ref == "a" && l.ends == 1 && l.rest > 0 {
				m.lots[i].rest = 0
				m.lots = append(m.lots, lot{"a", 3, l.rest, ""})
				break
			}
		}
		return ok
	}},

	{name: "lapse", needs: aWallet, tx: func(ctx context.Context, tx pgx.Tx, w *world) error {
		_, err := w.wallet.Expire(ctx, tx, w.scope("w"))
		return err
	}, model: func(*model) string { return ok }},

	{name: "hold-wallet", needs: aWallet, tx: func(ctx context.Context, tx pgx.Tx, w *world) error {
		_, err := w.book.Place(ctx, tx, holds.Placement{Tenant: w.name, ID: "of lots", TTL: time.Hour, Lines: []holds.Line{w.wallet.Line(w.scope("w"), 40)}})
		return err
	}, model: func(m *model) string {
		said := ok
		if m.holds["of lots"] == "" {
			if said = m.take("", 40); said == ok {
				m.holds["of lots"] = "h"
			}
		}
		return said
	}},

	{name: "sweep-lots", needs: aWallet, own: func(ctx context.Context, _ *metered.Client, pool *pgxpool.Pool, w *world, _ pgx.TxIsoLevel) error {
		_, err := w.wallet.Sweep(ctx, pool, wallet.SweepOptions{})
		return err
	}, model: func(*model) string { return ok }},
}

var jobCalls = []call{
	{name: "park", tx: func(ctx context.Context, tx pgx.Tx, w *world) error {
		_, err := w.enqueue(ctx, tx, w.model.wants)
		return err
	},
		model: func(m *model) string { return m.park(tenantsOwn, m.wanted()) }},

	{name: "park-burst", wide: true, tx: func(ctx context.Context, tx pgx.Tx, w *world) error { return w.enqueueEither(ctx, tx) },
		model: func(m *model) string { return m.park(tenantsOwn, m.wanted(), inEither) }},

	{name: "park-two", wide: true, tx: func(ctx context.Context, tx pgx.Tx, w *world) error { return w.enqueueTwo(ctx, tx) },
		model: func(m *model) string { return m.park("own", inTwo) }},

	{name: "release-jobs", needs: parked, tx: releasesUnder("s"), model: func(m *model) string { return m.release("s") }},

	{name: "job-ends", needs: aJob, tx: func(ctx context.Context, tx pgx.Tx, w *world) error {
		_, err := w.book.Release(ctx, tx, holds.Release{Tenant: w.name, IDs: []string{w.job}})
		return err
	}, model: func(m *model) string { return m.jobEnds(&m.job) }},

	{name: "job-rests", needs: aJob, tx: func(ctx context.Context, tx pgx.Tx, w *world) error {
		return w.rest(ctx, tx, w.job)
	}, model: func(m *model) string { return m.jobRests(&m.job, true) }},

	{name: "job-again", narrow: true, needs: rested, tx: releases("s"), model: func(m *model) string { return m.release("s") }},

	{name: "job-fails", needs: aFailed, tx: func(ctx context.Context, tx pgx.Tx, w *world) error {
		return w.rest(ctx, tx, w.fails)
	}, model: func(m *model) string { return m.jobRests(&m.failed, false) }},

	{name: "release-failed", narrow: true, needs: aFailed, idle: true, tx: releases("s"), model: func(m *model) string { return m.release("s") }},

	{name: "free-own", wide: true, needs: full | two, tx: func(ctx context.Context, tx pgx.Tx, w *world) error {
		_, err := w.book.Release(ctx, tx, holds.Release{Tenant: w.name, IDs: []string{"full"}})
		return err
	}, model: func(m *model) string {
		if !m.full {
			return "hold_released"
		}
		m.full = false
		m.scopes["t"].held -= 60
		return ok
	}},

	{name: "release-own", wide: true, needs: full | two, tx: releasesUnder("t"), model: func(m *model) string { return m.release("t") }},

	{name: "release-pool", wide: true, needs: full | two, idle: true, tx: releasesUnder("s"), model: func(m *model) string { return m.release("s") }},

	{name: "release-first", wide: true, needs: full | either, tx: releasesUnder("s"), model: func(m *model) string { return m.release("s") }},

	{name: "release-second", wide: true, needs: full | either, tx: releasesUnder("t"), model: func(m *model) string { return m.release("t") }},
}

// releases releases the jobs of a line, by a statement that waits for the scope's lock.
func releases(scope string) func(ctx context.Context, tx pgx.Tx, w *world) error {
	return func(ctx context.Context, tx pgx.Tx, w *world) error {
		_, err := w.jobs.ReleaseIn(ctx, tx, w.scope(scope))
		return err
	}
}

// releasesUnder is the same under the locks of both scopes: a job whose other scope somebody locks just
// then is left for a look in 20 milliseconds, and a transaction that ends frees its locks one by one.
func releasesUnder(scope string) func(ctx context.Context, tx pgx.Tx, w *world) error {
	return func(ctx context.Context, tx pgx.Tx, w *world) error {
		err := w.ledger.Lock(ctx, tx, w.scope("s"), w.scope("t"))
		if err == nil {
			err = releases(scope)(ctx, tx, w)
		}
		return err
	}
}
