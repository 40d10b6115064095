package orders

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/tokens"
)

var holdCalls = []call{
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

	{name: "return", needs: aSale, tx: func(ctx context.Context, tx pgx.Tx, w *world) error {
		_, err := w.book.Return(ctx, tx, holds.Return{Tenant: w.name, IDs: []string{"sold"}, All: true})
		return err
	}, model: func(m *model) string {
		if m.returned {
			return "hold_returned"
		}
		m.returned = true
		m.scopes["s"].refunded += 20
		m.lowered()
		return ok
	}},

	{name: "claim", tx: func(ctx context.Context, tx pgx.Tx, w *world) error { return w.claim(ctx, tx, "alice") },
		model: func(m *model) string { return m.claim("alice") }},

	{name: "claim-other", tx: func(ctx context.Context, tx pgx.Tx, w *world) error { return w.claim(ctx, tx, "bob") },
		model: func(m *model) string { return m.claim("bob") }},
}

var commandCalls = []call{
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
	}, model: func(m *model) string { m.revoke(); return ok }},

	{name: "command", remembers: true, own: func(ctx context.Context, c *metered.Client, _ *pgxpool.Pool, w *world, level pgx.TxIsoLevel) error {
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

	{name: "replace-token", needs: aToken, tx: func(ctx context.Context, tx pgx.Tx, w *world) error {
		secret, err := tokens.Derive([]byte("a key of thirty-two bytes and so"), "sole")
		if err == nil {
			_, err = w.tokens.Replace(ctx, tx, tokens.Mint{Purpose: "order", Subject: w.name, Secret: secret})
		}
		return err
	}, model: func(m *model) string {
		if m.replaced {
			return "token_exists"
		}
		m.replaced = true
		m.revoke()
		m.sole = 1
		return ok
	}},
}
