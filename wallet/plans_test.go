package wallet_test

import (
	"context"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/wallet"
)

// However long a wallet's history is, and that of others, each call reads a few rows, also by plans that were made when there was none.
func TestPlans_NoCallReadsMoreTheLongerTheHistory(t *testing.T) {
	t.Parallel()
	pgtest.OnEachVersion(t)
	pool := pgtest.Open(t)
	ledger, err := budget.New(budget.Config{})
	require.NoError(t, err)
	book, err := wallet.New(ledger, wallet.Config{Overdraft: 1000})
	require.NoError(t, err)
	held, err := holds.New(ledger, holds.Config{})
	require.NoError(t, err)
	clock := pgtest.SetClock(t, pool, noon)
	ctx := t.Context()
	conn, err := pool.Acquire(ctx)
	require.NoError(t, err)
	defer conn.Release()
	for _, table := range []string{"lot_rows", "lot_moves", "lot_holds"} {
		_, err := conn.Exec(ctx, "alter table metered."+table+" set (autovacuum_enabled = off)")
		require.NoError(t, err)
	}
	n := 0
	names := []string{"grant", "draw", "refund", "refund overdraft", "place", "capture", "release", "revoke", "roll over", "expire", "balance", "statement"}
	calls := func() map[string]int64 {
		reads := map[string]int64{}
		n++
		id := fmt.Sprint(n)
		var drawn, over wasDrawn
		for _, name := range names {
			before := lotReads(t, conn)
			require.NoError(t, pgx.BeginFunc(ctx, conn, func(tx pgx.Tx) (err error) {
				switch name {
				case "grant":
					_, err = book.Grant(ctx, tx, wallet.Grant{Wallet: "ann", Amount: 40, Reference: id, Ends: wallet.After(time.Hour)})
				case "draw":
					drawn, err = drawIn(ctx, tx, ledger, book, toDraw{Wallet: "ann", Amount: 4})
					if err == nil {
						over, err = drawIn(ctx, tx, ledger, book, toDraw{Wallet: "bob", Amount: 4})
					}
					if err == nil {
						_, err = book.Grant(ctx, tx, wallet.Grant{Wallet: "bob", Amount: 4})
					}
				case "refund":
					_, err = ledger.Refund(ctx, tx, budget.Refund{Scope: "ann", Seq: drawn.Seq, Amount: 2})
				case "refund overdraft":
					_, err = ledger.Refund(ctx, tx, budget.Refund{Scope: "bob", Seq: over.Seq, Amount: 2})
				case "place":
					_, err = held.Place(ctx, tx, holds.Placement{ID: id, TTL: 10 * time.Minute, Lines: []holds.Line{book.Line("ann", 5)}})
					if err == nil {
						_, err = held.Place(ctx, tx, holds.Placement{ID: id + "r", TTL: 10 * time.Minute, Lines: []holds.Line{book.Line("ann", 5)}})
					}
				case "capture":
					_, err = held.Capture(ctx, tx, holds.Capture{IDs: []string{id}, Lines: []holds.Line{{Scope: "ann", Amount: 3}}})
				case "release":
					_, err = held.Release(ctx, tx, holds.Release{IDs: []string{id + "r"}})
				case "revoke":
					_, err = book.Revoke(ctx, tx, wallet.Revoke{Wallet: "ann", Reference: id, Amount: 2})
				case "roll over":
					_, err = book.Rollover(ctx, tx, wallet.Rollover{Wallet: "ann", Reference: id, Cap: 2, For: time.Minute})
				case "expire":
					clock.Advance(2 * time.Hour)
					_, err = book.Expire(ctx, tx, "ann")
				case "balance":
					_, err = book.Balance(ctx, tx, "ann")
				case "statement":
					for _, e := range book.Statement(ctx, tx, "ann", budget.EntriesOptions{NewestFirst: true, Max: 3}) {
						require.NoError(t, e)
					}
				}
				return err
			}), name)
			reads[name] += lotReads(t, conn) - before
		}
		return reads
	}
	calls()
	few := calls()
	for _, w := range []string{"ann", "bob", "carl"} {
		_, err = conn.Exec(ctx, `insert into metered.lot_rows (granted_at, expires_at, granted_seq, last_seq, amount, rest, lapsed, priority, origin, open, scope, category, reference)
			select $2::timestamptz, $2::timestamptz - g * interval '1 s', 0, 0, 10, 0, 10, 0, 'g', false, $1::text, '', 'old' || g from generate_series(1, 5000) g`, w, noon.Add(-time.Hour))
		require.NoError(t, err)
		_, err = conn.Exec(ctx, `insert into metered.lot_moves (scope, seq, nth, lot, kind, amount) select $1::text, g - 10000, 1, 1, case g % 3 when 0 then 't' else 'p' end, 1 from generate_series(1, 5000) g`, w)
		require.NoError(t, err)
		_, err = conn.Exec(ctx, `insert into metered.lot_moves (scope, seq, nth, lot, kind, amount) select $1::text, 1000000000 + g, 1, 1, 't', 1 from generate_series(1, 5000) g`, w)
		require.NoError(t, err)
	}
	many := calls()
	for _, name := range names {
		t.Logf("%s: %d rows and entries read, then %d", name, few[name], many[name])
		require.LessOrEqual(t, many[name], few[name]+few[name]/2+20, name)
	}
}

// Lots and holds that are due make no plan look so dear that Postgres compiles it each time, which takes longer than
// the call.
func TestPlans_NoCallIsCompiled(t *testing.T) {
	t.Parallel()
	pgtest.InCI(t)
	pgtest.OnEachVersion(t)
	f := setUp(t, wallet.Config{Overdraft: 5})
	var compiled atomic.Int64
	pool := pgtest.Reopen(t, f.pool, func(c *pgxpool.Config) {
		c.ConnConfig.OnNotice = func(_ *pgconn.PgConn, n *pgconn.Notice) {
			if strings.Contains(n.Message, "JIT:") {
				compiled.Add(1)
				t.Log(n.Message)
			}
		}
		c.AfterConnect = func(ctx context.Context, conn *pgx.Conn) error {
			_, err := conn.Exec(ctx, `load 'auto_explain'; set auto_explain.log_min_duration = 0; set auto_explain.log_analyze = on; set auto_explain.log_nested_statements = on;
				set client_min_messages = log; set jit = on`)
			return err
		}
	})
	if !pgtest.Value[bool](t, pool, "select pg_jit_available()") {
		t.Skip("this server compiles nothing")
	}
	f.grant(wallet.Grant{Amount: 10, Ends: wallet.After(time.Hour), Roll: &wallet.Roll{Cap: 2, Lasts: wallet.For(time.Hour)}, LateRefunds: time.Hour})
	d := f.draw(2)
	f.grant(wallet.Grant{Amount: 10, Reference: "ever"})
	f.place("r", 4, time.Hour)
	f.place("s", 3, 2*time.Hour)
	f.clock.Set(noon.Add(time.Hour))
	_, err := pool.Exec(t.Context(), "set jit_above_cost = 0; select count(*) from pg_class; reset jit_above_cost")
	require.NoError(t, err)
	require.NotZero(t, compiled.Swap(0), "this is what one looks like")
	_, err = f.book.Balance(t.Context(), pool, "ann")
	require.NoError(t, err)
	_, err = f.ledger.Check(t.Context(), pool, f.book.Charge("ann", 1))
	require.NoError(t, err)
	_, err = f.ledger.Usage(t.Context(), pool, budget.Query{Scope: "ann"})
	require.NoError(t, err)
	for _, act := range []func(ctx context.Context, tx pgx.Tx) error{
		func(ctx context.Context, tx pgx.Tx) error {
			_, err := f.drawIn(ctx, tx, toDraw{Wallet: "ann", Amount: 1, UpTo: true})
			return err
		},
		func(ctx context.Context, tx pgx.Tx) error {
			_, err := f.ledger.Refund(ctx, tx, budget.Refund{Scope: "ann", Seq: d.Seq, Amount: 1})
			return err
		},
		func(ctx context.Context, tx pgx.Tx) error {
			_, err := f.book.Revoke(ctx, tx, wallet.Revoke{Wallet: "ann", Reference: "ever", Amount: 1})
			return err
		},
		func(ctx context.Context, tx pgx.Tx) error {
			_, err := f.book.Rollover(ctx, tx, wallet.Rollover{Wallet: "ann", Reference: "ever", Cap: 1, For: time.Hour})
			return err
		},
		func(ctx context.Context, tx pgx.Tx) error {
			_, err := f.holds.Release(ctx, tx, holds.Release{IDs: []string{"s"}})
			return err
		},
		func(ctx context.Context, tx pgx.Tx) error {
			_, err := f.book.Expire(ctx, tx, "ann")
			return err
		},
	} {
		tx, err := pool.Begin(t.Context()) // each meets lots that are due
		require.NoError(t, err)
		require.NoError(t, act(t.Context(), tx))
		require.NoError(t, tx.Rollback(t.Context()))
	}
	for _, err := range f.book.Statement(t.Context(), pool, "ann", budget.EntriesOptions{}) {
		require.NoError(t, err)
	}
	_, err = f.holds.Sweep(t.Context(), pool, holds.SweepOptions{})
	require.NoError(t, err)
	_, err = f.book.Sweep(t.Context(), pool, wallet.SweepOptions{})
	require.NoError(t, err)
	require.Zero(t, compiled.Load())
}

// Verify looks up the lot of an entry by its number. The rows that it reads anyway have no index: a search among them for each
// entry took twenty minutes in a wallet of 150,000 lots, where the planner took them for a few.
func TestPlans_VerifyLooksUpALotByItsNumber(t *testing.T) {
	t.Parallel()
	f := setUp(t, wallet.Config{})
	f.grant(wallet.Grant{Amount: 1, Starts: noon.Add(time.Minute), Uses: []string{"images"}})
	f.clock.Advance(time.Hour)
	_, err := f.book.Sweep(t.Context(), f.pool, wallet.SweepOptions{})
	require.NoError(t, err)
	var plans strings.Builder
	pool := pgtest.Reopen(t, f.pool, func(c *pgxpool.Config) {
		c.MaxConns = 1
		c.ConnConfig.OnNotice = func(_ *pgconn.PgConn, n *pgconn.Notice) { plans.WriteString(n.Message) }
		c.AfterConnect = func(ctx context.Context, conn *pgx.Conn) error {
			_, err := conn.Exec(ctx, `load 'auto_explain'; set auto_explain.log_min_duration = 0; set client_min_messages = log`)
			return err
		}
	})
	r, err := f.ledger.Verify(t.Context(), pool, budget.VerifyOptions{})
	require.NoError(t, err)
	require.Empty(t, r.Differences)
	require.Contains(t, plans.String(), "CTE Scan on lots l")
	require.NotContains(t, plans.String(), "CTE Scan on lots y")
}
