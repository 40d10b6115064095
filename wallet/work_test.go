package wallet_test

import (
	"context"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/wallet"
)

// work is what a transaction has done so far: rows of our tables that it read and wrote, and calls of our functions.
type work struct {
	read, written, calls int64
}

const workSQL = `
select coalesce(sum(coalesce(s.seq_tup_read, 0) + coalesce(s.idx_tup_fetch, 0)), 0)::bigint, coalesce(sum(s.n_tup_ins + s.n_tup_upd + s.n_tup_del), 0)::bigint,
    (select coalesce(sum(f.calls), 0)::bigint from pg_stat_xact_user_functions f where f.schemaname = 'metered')
from pg_stat_xact_user_tables s where s.schemaname = 'metered'`

// workOf is the work of a call, which is rolled back. It runs once before, which fills the session's caches.
func (f *fixture) workOf(call func(ctx context.Context, tx pgx.Tx) error) (w work) {
	f.Helper()
	conn, err := f.pool.Acquire(f.Context())
	require.NoError(f, err)
	defer conn.Release()
	count := func(tx pgx.Tx) (w work) {
		require.NoError(f, tx.QueryRow(f.Context(), workSQL).Scan(&w.read, &w.written, &w.calls))
		return w
	}
	for range 2 {
		tx, err := conn.Begin(f.Context())
		require.NoError(f, err)
		_, err = tx.Exec(f.Context(), "set local track_functions = 'pl'; set local enable_seqscan = off") // a small table is read as a large one
		require.NoError(f, err)
		before := count(tx) // of transactions before that are not flushed yet
		require.NoError(f, call(f.Context(), tx))
		after := count(tx)
		w = work{after.read - before.read, after.written - before.written, after.calls - before.calls}
		require.NoError(f, tx.Rollback(f.Context()))
	}
	return w
}

// backlog is something that falls due in a scope by itself, a little of it or much.
type backlog struct {
	name string
	fill func(f *fixture, scope string, n int)
	few  int
	many int
	then time.Duration // after it all is due

	brief  bool     // it is tried outside of CI, too
	plain  bool     // the scope is no wallet
	since  bool     // fill grants the first lot, at the time from which n counts
	flat   []string // calls that read, write and ask as much, whatever is due
	writes []string // calls that write and ask as much, and read in proportion to it
}

// holdsDue places holds, each of which falls due a microsecond after the one before.
func (f *fixture) holdsDue(scope string, n int, least int64, line holds.Line) {
	f.Helper()
	for from := 0; from < n; from += 1000 { // each is a lock until the end of the transaction
		_, err := do(f, func(ctx context.Context, tx pgx.Tx) (_ struct{}, err error) {
			for i := from; i < min(n, from+1000) && err == nil; i++ {
				line.AtLeast = least * int64(i%2)
				_, err = f.holds.Place(ctx, tx, holds.Placement{ID: fmt.Sprint(scope, "/", i), TTL: time.Hour + time.Duration(i)*time.Microsecond, Lines: []holds.Line{line}})
			}
			return struct{}{}, err
		})
		require.NoError(f, err)
	}
}

// plansIdle grants daily plans so many days ago, whose units roll over for three days.
func plansIdle(plans int) func(f *fixture, scope string, days int) {
	return func(f *fixture, scope string, days int) {
		f.clock.Set(noon.AddDate(0, 0, -days))
		f.grant(wallet.Grant{Wallet: scope, Amount: 1_000_000, Reference: "paid"})
		for i := range plans {
			f.grant(wallet.Grant{
				Wallet: scope, Amount: 5, Reference: fmt.Sprint("plan", i), Ends: wallet.EachPeriod(daily),
				Roll: &wallet.Roll{Cap: 8, Lasts: wallet.For(3 * day), Times: 1, Shared: plans > 1},
			})
		}
		f.clock.Set(noon)
	}
}

func (f *fixture) lotsEnd(scope string, n int, g wallet.Grant) {
	f.Helper()
	_, err := do(f, func(ctx context.Context, tx pgx.Tx) (_ struct{}, err error) {
		for i := range n {
			g.Wallet, g.Amount, g.Ends = scope, 5, wallet.At(noon.Add(time.Hour+time.Duration(i)*time.Microsecond))
			if _, err := f.book.Grant(ctx, tx, g); err != nil {
				return struct{}{}, err
			}
		}
		return struct{}{}, nil
	})
	require.NoError(f, err)
}

// However much is due in a scope, a call writes as much as where little is, in as many steps: nobody waits under a lock
// for what has piled up. Some calls read in proportion to it. The short form finds a charge that ends all due holds.
func TestWork_OfACallIsAsMuchHoweverMuchIsDue(t *testing.T) {
	t.Parallel()
	many := pgtest.Size(250, 100_000)
	lots := func(g wallet.Grant) func(f *fixture, scope string, n int) {
		return func(f *fixture, scope string, n int) { f.lotsEnd(scope, n, g) }
	}
	all := []string{"charge", "draw", "grant", "place", "revoke", "usage"}
	for _, b := range []backlog{
		{name: "due holds of a plain scope", few: 100, many: many, plain: true, then: 2 * time.Hour, fill: func(f *fixture, scope string, n int) {
			f.holdsDue(scope, n, 0, holds.Line{Scope: scope, Amount: 2})
		}, writes: []string{"charge", "place", "usage", "sweep"}},
		{name: "due holds of a plain scope, half of them with a minimum", brief: true, few: 100, many: many, plain: true, then: 2 * time.Hour, fill: func(f *fixture, scope string, n int) {
			f.holdsDue(scope, n, 1, holds.Line{Scope: scope, Amount: 2})
		}, flat: []string{"step"}, writes: []string{"usage", "sweep"}},
		{name: "holds that are not due, and three ended lots", few: 100, many: many, then: 45 * time.Minute, fill: func(f *fixture, scope string, n int) {
			f.lotsEnd(scope, 3, wallet.Grant{})
			f.clock.Set(noon.Add(30 * time.Minute))
			f.holdsDue(scope, n, 0, f.book.Line(scope, 2))
		}, flat: []string{"charge", "draw", "grant", "place", "usage"}},
		{name: "lots of a plan that were written", few: 30, many: pgtest.Size(400, 3*365), since: true, fill: func(f *fixture, scope string, n int) {
			f.clock.Set(noon.AddDate(0, 0, -n))
			f.grant(wallet.Grant{Wallet: scope, Amount: 1_000_000, Reference: "paid"})
			f.grant(wallet.Grant{Wallet: scope, Amount: 9, Reference: "plan", Ends: wallet.EachPeriod(daily)})
			for n > 0 {
				n -= 10
				f.clock.Set(noon.AddDate(0, 0, -max(0, n)))
				_, err := do(f, func(ctx context.Context, tx pgx.Tx) (wallet.SweepReport, error) { return f.book.Expire(ctx, tx, scope) })
				require.NoError(f, err)
			}
		}, flat: []string{"charge", "draw", "overage", "change"}},
		{name: "due holds of a wallet", brief: true, few: 100, many: many, then: 2 * time.Hour, fill: func(f *fixture, scope string, n int) {
			f.holdsDue(scope, n, 0, f.book.Line(scope, 2))
		}, flat: []string{"sweep"}, writes: []string{"charge", "draw", "grant", "place", "balance", "usage"}},
		{name: "due holds of a wallet, half of them with a minimum", few: 100, many: many, then: 2 * time.Hour, fill: func(f *fixture, scope string, n int) {
			f.holdsDue(scope, n, 1, f.book.Line(scope, 2))
		}, flat: []string{"step"}, writes: []string{"balance", "usage", "sweep"}},
		{name: "ended lots", few: 60, many: pgtest.Size(400, 10_000), then: 2 * time.Hour, fill: lots(wallet.Grant{}), flat: all},
		{name: "ended lots with uses", brief: true, few: 60, many: pgtest.Size(400, 10_000), then: 2 * time.Hour, fill: lots(wallet.Grant{Uses: []string{"images"}}), flat: all},
		{name: "lots that rolled over", few: 60, many: pgtest.Size(400, 10_000), then: 2 * time.Hour, fill: lots(wallet.Grant{Roll: &wallet.Roll{Cap: 5, Lasts: wallet.For(day)}}),
			flat: []string{"revoke"}, writes: []string{"charge", "draw", "grant", "place", "usage"}},
		{name: "lots that rolled over, and ended", brief: true, few: 60, many: pgtest.Size(400, 10_000), then: 3 * day, fill: lots(wallet.Grant{Roll: &wallet.Roll{Cap: 5, Lasts: wallet.For(day), Times: 1}}),
			flat: []string{"revoke"}, writes: []string{"charge", "draw", "grant", "place", "usage"}},
		{name: "units that rolled over and were drawn, and an end that shares their cap", few: 30, many: pgtest.Size(250, 2000), since: true, then: 6 * time.Hour, fill: func(f *fixture, scope string, n int) {
			rolls := wallet.Grant{Wallet: scope, Amount: 5, Ends: wallet.After(5 * time.Hour), Roll: &wallet.Roll{Cap: 1_000_000, Lasts: wallet.For(300 * day), Shared: true}}
			f.clock.Set(noon)
			f.grant(wallet.Grant{Wallet: scope, Amount: 1_000_000, Reference: "paid"})
			f.lotsEnd(scope, n, rolls)
			f.clock.Set(noon.Add(2 * time.Hour))
			f.sweeps()
			_, err := f.tryDraw(toDraw{Wallet: scope, Amount: int64(5 * n)})
			require.NoError(f, err)
			f.grant(rolls)
		}, flat: []string{"charge", "draw", "grant", "place", "balance", "usage", "sweep"}},
		{name: "lots that go on again", brief: true, few: 60, many: pgtest.Size(250, 10_000), then: 2 * time.Hour, fill: lots(wallet.Grant{Roll: &wallet.Roll{Cap: 5, Lasts: wallet.For(day), Times: 5}}),
			writes: []string{"sweep", "step"}},
		{name: "lots that share a cap", few: 60, many: pgtest.Size(250, 10_000), then: 2 * time.Hour, fill: lots(wallet.Grant{Roll: &wallet.Roll{Cap: 100, Lasts: wallet.For(day), Shared: true}}),
			writes: []string{"sweep", "step"}},
		{name: "units that go on each day, for ever", brief: true, few: 30, many: pgtest.Size(200, 3*365), since: true, fill: func(f *fixture, scope string, days int) {
			f.clock.Set(noon.AddDate(0, 0, -days))
			f.grant(wallet.Grant{Wallet: scope, Amount: 1_000_000, Reference: "paid"})
			for range 5 {
				f.grant(wallet.Grant{Wallet: scope, Amount: 5, Ends: wallet.After(time.Hour), Roll: &wallet.Roll{Cap: 5, Lasts: wallet.For(day), Times: -1}})
			}
			f.clock.Set(noon)
		}, writes: []string{"charge", "draw", "grant", "place", "balance", "usage", "sweep"}},
		{name: "an idle plan", few: 30, many: 3 * 365, since: true, fill: plansIdle(1),
			writes: []string{"charge", "draw", "grant", "place", "balance", "usage", "sweep"}},
		{name: "five idle plans", brief: true, few: 30, many: 3 * 365, since: true, fill: plansIdle(5),
			writes: []string{"charge", "draw", "grant", "place", "balance", "usage", "sweep"}},
	} {
		if !b.brief && !pgtest.CI {
			continue
		}
		t.Run(b.name, func(t *testing.T) {
			t.Parallel()
			f := setUp(t, wallet.Config{})
			for _, of := range []struct {
				scope string
				n     int
			}{{"much", b.many}, {"little", b.few}} {
				if !b.plain && !b.since {
					f.grant(wallet.Grant{Wallet: of.scope, Amount: 1_000_000, Reference: "paid"})
				}
				b.fill(f, of.scope, of.n)
			}
			f.clock.Advance(b.then)
			_, err := f.pool.Exec(t.Context(), "analyze metered.ledger; analyze metered.lot_rows; analyze metered.lot_moves; analyze metered.lot_holds; analyze metered.hold_lines")
			require.NoError(t, err)
			calls := f.calledOn(b.plain)
			for i, name := range append(slices.Clone(b.flat), b.writes...) {
				call := calls[name]
				little := f.workOf(func(ctx context.Context, tx pgx.Tx) error { return call(ctx, tx, "little") })
				much := f.workOf(func(ctx context.Context, tx pgx.Tx) error { return call(ctx, tx, "much") })
				t.Logf("%s: %+v, and of much %+v", name, little, much)
				require.LessOrEqual(t, much.written, 2*little.written+10, "%s: rows written", name)
				require.LessOrEqual(t, much.calls, 2*little.calls+10, "%s: calls of functions", name)
				if i < len(b.flat) { // the beginning of a window is found among 16 entries, whichever of them it is
					require.LessOrEqual(t, much.read, 2*little.read+16, "%s: rows read", name)
				}
			}
		})
	}
}

// calledOn are calls on a scope, which is a wallet unless it is plain.
func (f *fixture) calledOn(plain bool) map[string]func(ctx context.Context, tx pgx.Tx, scope string) error {
	return map[string]func(ctx context.Context, tx pgx.Tx, scope string) error{
		"charge": func(ctx context.Context, tx pgx.Tx, scope string) error {
			c := f.book.Charge(scope, 1)
			if plain {
				c.Limits = []budget.Limit{budget.Lifetime(1_000_000)}
			}
			_, err := f.ledger.Charge(ctx, tx, c)
			return err
		},
		"usage": func(ctx context.Context, tx pgx.Tx, scope string) error {
			_, err := f.ledger.Usage(ctx, tx, budget.Query{Scope: scope, Window: time.Hour})
			return err
		},
		"place": func(ctx context.Context, tx pgx.Tx, scope string) error {
			_, err := f.holds.Place(ctx, tx, holds.Placement{ID: "new", TTL: time.Hour, Lines: []holds.Line{{Scope: scope, Amount: 1}}})
			return err
		},
		"draw": func(ctx context.Context, tx pgx.Tx, scope string) error {
			_, err := f.drawIn(ctx, tx, toDraw{Wallet: scope, Amount: 7})
			return err
		},
		"grant": func(ctx context.Context, tx pgx.Tx, scope string) error {
			_, err := f.book.Grant(ctx, tx, wallet.Grant{Wallet: scope, Amount: 7, Reference: "new"})
			return err
		},
		"balance": func(ctx context.Context, tx pgx.Tx, scope string) error {
			_, err := f.book.Balance(ctx, tx, scope)
			return err
		},
		"sweep": func(ctx context.Context, tx pgx.Tx, scope string) error { // a transaction of one
			sql := "select metered.sweep_wallet($1, '-infinity', 0, 500, true, null, 1000, false)"
			if plain {
				sql = "select metered.sweep_scope($1, 500, true, null)"
			}
			_, err := tx.Exec(ctx, sql, scope)
			return err
		},
		"step": func(ctx context.Context, tx pgx.Tx, scope string) error { // of a call that would write more
			_, err := tx.Exec(ctx, "select metered.catch_up($1, 1000)", scope)
			return err
		},
		"overage": func(ctx context.Context, tx pgx.Tx, scope string) error {
			_, err := f.book.Overage(ctx, tx, wallet.Overage{Wallet: scope, Plan: "plan"})
			return err
		},
		"change": func(ctx context.Context, tx pgx.Tx, scope string) error { // it is cancelled
			_, err := f.book.Change(ctx, tx, wallet.Change{Wallet: scope, Reference: "new", Plan: "plan", AtEnd: true})
			return err
		},
		"revoke": func(ctx context.Context, tx pgx.Tx, scope string) error {
			_, err := f.book.Revoke(ctx, tx, wallet.Revoke{Wallet: scope, Reference: "paid", Amount: 7})
			return err
		},
	}
}
