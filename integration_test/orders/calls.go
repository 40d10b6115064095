package orders

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/jobs"
	"github.com/pgmetered/metered/wallet"
)

// call is one call of the library, with the data that it needs, and its effect on the model.
type call struct {
	name  string
	needs need
	tx    func(ctx context.Context, tx pgx.Tx, w *world) error // in a transaction of its own
	own   func(ctx context.Context, c *metered.Client, pool *pgxpool.Pool, w *world, level pgx.TxIsoLevel) error
	model func(m *model) string
	// committed is true where the call is made at READ COMMITTED alone.
	committed bool
	session   bool // one of its process is open
}

var tell = hour.Tell(budget.Threshold{Name: "sixty", Used: level, Rearm: rearm})

var calls = []call{
	{name: "charge", tx: func(ctx context.Context, tx pgx.Tx, w *world) error {
		_, err := w.ledger.Charge(ctx, tx, w.charge("s", 35))
		return err
	}, model: func(m *model) string { return m.charge("s", 35) }},

	{name: "charge-several", tx: func(ctx context.Context, tx pgx.Tx, w *world) error {
		_, err := w.ledger.Charge(ctx, tx, w.charge("t", 60), w.charge("s", 35))
		return err
	}, model: func(m *model) string {
		if m.use("t")+60 > limit {
			if m.ahead {
				return "budget_clock"
			}
			return "budget_exceeded"
		}
		said := m.charge("s", 35)
		if said == ok {
			m.scopes["t"].spent += 60
		}
		return said
	}},

	{name: "charge-by-bound", tx: func(ctx context.Context, tx pgx.Tx, w *world) error {
		c := w.charge("s", 35)
		c.NoStandings = true
		_, err := w.ledger.Charge(ctx, tx, c)
		return err
	}, model: func(m *model) string { return m.charge("s", 35) }},

	{name: "charge-to-limit", tx: func(ctx context.Context, tx pgx.Tx, w *world) error {
		_, err := w.ledger.Charge(ctx, tx, w.charge("s", 60))
		return err
	}, model: func(m *model) string { return m.charge("s", 60) }},

	{name: "charge-each", tx: func(ctx context.Context, tx pgx.Tx, w *world) error {
		_, err := w.ledger.ChargeEach(ctx, tx, w.charge("s", 35), w.charge("t", 60), w.charge("s", 25))
		return err
	}, model: func(m *model) string {
		m.charge("s", 35)
		m.charge("t", 60)
		m.charge("s", 25)
		return ok
	}},

	{name: "credit", tx: func(ctx context.Context, tx pgx.Tx, w *world) error {
		_, err := w.ledger.Credit(ctx, tx, budget.Credit{Scope: w.scope("s"), Amount: 50})
		return err
	}, model: func(m *model) string { m.scopes["s"].credited += 50; return ok }},

	{name: "refund", tx: func(ctx context.Context, tx pgx.Tx, w *world) error {
		_, err := w.ledger.Refund(ctx, tx, budget.Refund{Scope: w.scope("s"), Seq: w.first, Amount: 25})
		return err
	}, model: func(m *model) string {
		if m.left < 25 {
			return "budget_refund_exceeds"
		}
		m.left -= 25
		m.scopes["s"].refunded += 25
		m.lowered()
		return ok
	}},

	{name: "place", tx: func(ctx context.Context, tx pgx.Tx, w *world) error { return w.place(ctx, tx, "place", 35, time.Hour) },
		model: func(m *model) string { return m.hold("place", 35) }},

	{name: "capture", needs: aHold, tx: func(ctx context.Context, tx pgx.Tx, w *world) error {
		_, err := w.book.Capture(ctx, tx, holds.Capture{Tenant: w.name, IDs: []string{"capture"}, Lines: []holds.Line{{Scope: w.scope("s"), Amount: 15}}})
		return err
	}, model: func(m *model) string { return m.end("capture", "c", 15) }},

	{name: "release", needs: aHold, tx: func(ctx context.Context, tx pgx.Tx, w *world) error {
		_, err := w.book.Release(ctx, tx, holds.Release{Tenant: w.name, IDs: []string{"capture"}})
		return err
	}, model: func(m *model) string { return m.end("capture", "r", 0) }},

	{name: "extend", needs: aHold, tx: func(ctx context.Context, tx pgx.Tx, w *world) error {
		_, err := w.book.Extend(ctx, tx, holds.Extend{Tenant: w.name, IDs: []string{"capture"}, By: time.Minute})
		return err
	}, model: func(m *model) string {
		if m.holds["capture"] == "h" {
			return ok
		}
		return m.end("capture", "", 0)
	}},

	{name: "expire", needs: aDue, tx: func(ctx context.Context, tx pgx.Tx, w *world) error {
		_, _, err := w.book.Expire(ctx, tx, holds.Expire{Tenant: w.name, ID: "due", Deadline: w.due})
		return err
	}, model: func(*model) string { return ok }},

	{name: "sweep", needs: aDue, own: func(ctx context.Context, _ *metered.Client, pool *pgxpool.Pool, w *world, _ pgx.TxIsoLevel) error {
		_, err := w.book.Sweep(ctx, pool, holds.SweepOptions{Max: 1})
		return err
	}, model: func(*model) string { return ok }},

	{name: "purge", needs: aged, own: func(ctx context.Context, _ *metered.Client, pool *pgxpool.Pool, w *world, _ pgx.TxIsoLevel) error {
		_, err := w.ledger.Purge(ctx, pool, budget.PurgeOptions{Scope: w.scope("s"), OlderThan: 90 * time.Minute})
		return err
	}, model: func(*model) string { return ok }},

	{name: "repair", needs: jumped, tx: func(ctx context.Context, tx pgx.Tx, w *world) error {
		_, err := w.ledger.RepairClock(ctx, tx, w.scope("s"), budget.Note{})
		return err
	}, model: func(m *model) string { m.ahead = false; return ok }},

	{name: "mint", tx: func(ctx context.Context, tx pgx.Tx, w *world) error { return w.mint(ctx, tx) },
		model: func(m *model) string {
			if m.minted {
				return "token_exists"
			}
			m.minted = true
			m.uses++
			return ok
		}},

	{name: "consume", needs: aToken, tx: func(ctx context.Context, tx pgx.Tx, w *world) error {
		_, err := w.tokens.Consume(ctx, tx, "order", w.name, w.token)
		return err
	}, model: func(m *model) string {
		if m.uses == 0 {
			return "token_invalid"
		}
		m.uses--
		return ok
	}},

	{name: "revoke-token", needs: aToken, tx: func(ctx context.Context, tx pgx.Tx, w *world) error {
		_, err := w.tokens.RevokeSubject(ctx, tx, "order", w.name)
		return err
	}, model: func(m *model) string {
		m.revoked += min(1, m.uses)
		m.uses = 0
		return ok
	}},

	{name: "command", own: func(ctx context.Context, c *metered.Client, _ *pgxpool.Pool, w *world, level pgx.TxIsoLevel) error {
		_, err := metered.Do(ctx, c, metered.Command{ID: "command", Tenant: w.name, Isolation: level, Charges: []budget.Charge{w.charge("s", 35)}},
			func(context.Context, *metered.Tx) (int, error) { return 1, nil })
		return err
	}, model: func(m *model) string {
		if m.done["command"] {
			return ok
		}
		said := m.charge("s", 35)
		m.done["command"] = said == ok
		return said
	}},

	{name: "session-open", own: func(ctx context.Context, c *metered.Client, _ *pgxpool.Pool, w *world, _ pgx.TxIsoLevel) error {
		s, err := metered.Open[int](ctx, c, w.reservation("session", 35))
		if err == nil {
			s.Close() // as one of a process that dies
		}
		return err
	}, model: func(m *model) string {
		if m.holds["session"] == "h" {
			return "session_running"
		}
		return m.hold("session", 35)
	}},

	{name: "session-settle", session: true, own: func(ctx context.Context, c *metered.Client, _ *pgxpool.Pool, w *world, _ pgx.TxIsoLevel) error {
		_, err := w.sessions[c].Settle(ctx, metered.Cost{Lines: []holds.Line{{Scope: w.scope("s"), Amount: 3}}}, nil)
		return err
	}, model: func(m *model) string { m.sessionEnds(3); return ok }},

	{name: "session-cancel", session: true, own: func(ctx context.Context, c *metered.Client, _ *pgxpool.Pool, w *world, _ pgx.TxIsoLevel) error {
		return w.sessions[c].Cancel(ctx, "not needed")
	}, model: func(m *model) string { m.sessionEnds(0); return ok }},

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

	{name: "grant", needs: aWallet, tx: func(ctx context.Context, tx pgx.Tx, w *world) error {
		_, err := w.wallet.Grant(ctx, tx, wallet.Grant{Wallet: w.scope("w"), Amount: 30, For: 2 * time.Hour, Reference: "c"})
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
		_, err := w.wallet.Draw(ctx, tx, wallet.Draw{Wallet: w.scope("w"), Amount: 40})
		return err
	}, model: func(m *model) string { return m.draw("", 40) }},

	{name: "draw-use", needs: aWallet, tx: func(ctx context.Context, tx pgx.Tx, w *world) error {
		_, err := w.wallet.Draw(ctx, tx, wallet.Draw{Wallet: w.scope("w"), Amount: 70, Note: budget.Note{Use: "images"}})
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

	{name: "park", tx: func(ctx context.Context, tx pgx.Tx, w *world) error {
		_, err := w.enqueue(ctx, tx, w.model.wants)
		return err
	},
		model: func(m *model) string { return m.park() }},

	{name: "park-burst", tx: func(ctx context.Context, tx pgx.Tx, w *world) error {
		_, err := w.jobs.Enqueue(ctx, tx, work{}, &jobs.Options{
			Tenant: w.name, Hold: w.holding("s", w.model.wants), Burst: w.holding("t", 30),
		})
		return err
	}, model: func(m *model) string { return m.parkBurst() }},

	{name: "release-jobs", needs: parked, tx: func(ctx context.Context, tx pgx.Tx, w *world) error {
		_, err := w.jobs.ReleaseIn(ctx, tx, w.scope("s"))
		return err
	}, model: func(m *model) string { return m.release() }},

	{name: "job-ends", needs: aJob, tx: func(ctx context.Context, tx pgx.Tx, w *world) error {
		_, err := w.book.Release(ctx, tx, holds.Release{Tenant: w.name, IDs: []string{w.job}})
		return err
	}, model: func(m *model) string { return m.jobEnds() }},

	{name: "job-rests", needs: aJob, tx: func(ctx context.Context, tx pgx.Tx, w *world) error {
		return w.rest(ctx, tx, w.job)
	}, model: func(m *model) string { return m.jobRests() }},

	{name: "job-again", needs: rested, tx: func(ctx context.Context, tx pgx.Tx, w *world) error {
		_, err := w.jobs.ReleaseIn(ctx, tx, w.scope("s"))
		return err
	}, model: func(m *model) string { return m.release() }},

	{name: "charge-threshold", tx: func(ctx context.Context, tx pgx.Tx, w *world) error {
		c := w.charge("s", 35)
		c.Limits = []budget.Limit{tell}
		_, err := w.ledger.Charge(ctx, tx, c)
		return err
	}, model: func(m *model) string {
		said := m.charge("s", 35)
		if said == ok && m.use("s") >= level && !m.reported {
			m.reported = true
			m.reports++
		}
		return said
	}},
}
