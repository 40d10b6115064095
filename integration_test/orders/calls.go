package orders

import (
	"context"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
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
	idle      bool // alone it has nothing to do
	wide      bool // it is about jobs that stand in two lines, or that two scopes let in
	narrow    bool // it locks one scope, and is not called beside those
	remembers bool // its client does, for some seconds: the scopes that refused, which it looks at early
}

var tell = hour.WithThresholds(budget.Threshold{Name: "sixty", Used: level, Rearm: rearm})

var calls = slices.Concat(ledgerCalls, holdCalls, commandCalls, leaseCalls, walletCalls, dueCalls, jobCalls)

var ledgerCalls = []call{
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

	{name: "purge", needs: aged, own: func(ctx context.Context, _ *metered.Client, pool *pgxpool.Pool, w *world, _ pgx.TxIsoLevel) error {
		_, err := w.ledger.Purge(ctx, pool, budget.PurgeOptions{Scope: w.scope("s"), OlderThan: 90 * time.Minute})
		return err
	}, model: func(*model) string { return ok }},

	{name: "feed", needs: fed, own: func(ctx context.Context, _ *metered.Client, pool *pgxpool.Pool, w *world, level pgx.TxIsoLevel) error {
		err := pgx.BeginTxFunc(ctx, pool, pgx.TxOptions{IsoLevel: level}, func(tx pgx.Tx) error { return w.number(ctx, tx) })
		if err != nil {
			return err
		}
		return pgx.BeginTxFunc(ctx, pool, pgx.TxOptions{IsoLevel: level}, func(tx pgx.Tx) error { return w.consume(ctx, tx, 3) })
	}, model: func(*model) string { return ok }},

	{name: "repair", needs: jumped, tx: func(ctx context.Context, tx pgx.Tx, w *world) error {
		_, err := w.ledger.RepairClock(ctx, tx, w.scope("s"), budget.Note{})
		return err
	}, model: func(m *model) string { m.ahead = false; return ok }},

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

	{name: "charge-up-to", tx: func(ctx context.Context, tx pgx.Tx, w *world) error {
		charge := w.charge("s", 80)
		charge.UpTo = true
		_, err := w.ledger.Charge(ctx, tx, charge)
		return err
	}, model: func(m *model) string { return m.charge("s", max(1, min(80, limit-m.use("s")))) }},

	{name: "ingest", tx: func(ctx context.Context, tx pgx.Tx, w *world) error {
		_, err := w.ledger.Ingest(ctx, tx, budget.UsageEvent{ID: "event", Tenant: w.name, Charge: w.charge("s", 35)})
		return err
	}, model: func(m *model) string {
		if !m.done["event"] {
			m.done["event"] = m.charge("s", 35) == ok
		}
		return ok
	}},

	{name: "charge-created", needs: aScope, tx: func(ctx context.Context, tx pgx.Tx, w *world) error {
		c := w.charge("t", 35)
		c.MustExist = true
		_, err := w.ledger.Charge(ctx, tx, c)
		return err
	}, model: func(m *model) string {
		if m.retired {
			return "scope_retired"
		}
		return m.charge("t", 35)
	}},

	{name: "retire", needs: aScope, tx: func(ctx context.Context, tx pgx.Tx, w *world) error {
		_, err := w.ledger.Retire(ctx, tx, w.scope("t"))
		return err
	}, model: func(m *model) string { m.retired = true; return ok }},
}
