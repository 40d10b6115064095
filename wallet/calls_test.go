package wallet_test

import (
	"math"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/internal/bounds"
	"github.com/pgmetered/metered/internal/niltest"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/internal/sqlstate"
	"github.com/pgmetered/metered/wallet"
)

type noSQL struct{ pgx.Tx }

func TestCalls_NilIsRefused(t *testing.T) {
	t.Parallel()
	ledger, err := budget.New(budget.Config{})
	require.NoError(t, err)
	book, err := wallet.New(ledger, wallet.Config{})
	require.NoError(t, err)
	tx, pool := noSQL{}, new(pgxpool.Pool)
	niltest.Methods(t, book, map[string][]any{
		"Grant":  {tx, wallet.Grant{Wallet: "a", Amount: 1}},
		"Refund": {tx, budget.Refund{Scope: "a", Seq: 1, Amount: 1}}, "Revoke": {tx, wallet.Revoke{Wallet: "a", Lot: 1}},
		"Reinstate": {tx, wallet.Revoke{Wallet: "a", Lot: 1}},
		"Rollover":  {tx, wallet.Rollover{Wallet: "a", Lot: 1, Cap: 1, For: time.Hour}}, "Balance": {pool, "a"},
		"SetEnd": {tx, wallet.LotEnd{Wallet: "a", Lot: 1}},
		"Change": {tx, wallet.Change{Wallet: "a", Reference: "c", Plan: "p"}}, "Overage": {tx, wallet.Overage{Wallet: "a", Plan: "p"}},
		"Statement": {pool, "a", budget.EntriesOptions{}}, "Sweep": {pool, wallet.SweepOptions{}}, "Expire": {tx, "a"},
		"Limit": {}, "Charge": {"a", int64(1)}, "Line": {"a", int64(1)},
	})
	niltest.Func(t, "New", wallet.New, ledger, wallet.Config{})
}

func TestCalls_ArgumentsOutOfBoundsAreRefusedBeforeAnySQL(t *testing.T) {
	t.Parallel()
	ledger, err := budget.New(budget.Config{RequireActor: true})
	require.NoError(t, err)
	book, err := wallet.New(ledger, wallet.Config{})
	require.NoError(t, err)
	requireField := func(err error, field string) {
		t.Helper()
		var argument *budget.ArgumentError
		require.ErrorAs(t, err, &argument, field)
		require.Equal(t, field, argument.Field)
		require.ErrorIs(t, err, budget.ErrArgument)
	}
	long := strings.Repeat("x", 256)
	good := wallet.Grant{Wallet: "a", Amount: 1, Note: budget.Note{Actor: "me"}}
	for field, change := range map[string]func(*wallet.Grant){
		"Grant.Wallet": func(g *wallet.Grant) { g.Wallet = long }, "Grant.Amount": func(g *wallet.Grant) { g.Amount = bounds.MaxAmount + 1 },
		"Grant.Category": func(g *wallet.Grant) { g.Category = long }, "Grant.Reference": func(g *wallet.Grant) { g.Reference = "\xff" },
		"Grant.Priority":        func(g *wallet.Grant) { g.Priority = new(int); *g.Priority = math.MaxInt },
		"Grant.LateRefunds":     func(g *wallet.Grant) { g.LateRefunds = time.Nanosecond },
		"charges[0].Note.Actor": func(g *wallet.Grant) { g.Note = budget.Note{} },
	} {
		g := good
		change(&g)
		_, err := book.Grant(t.Context(), noSQL{}, g)
		requireField(err, field)
	}
	_, err = book.Revoke(t.Context(), noSQL{}, wallet.Revoke{Wallet: "a", Lot: 1, Reference: "b"})
	requireField(err, "Revoke.Lot")
	_, err = book.Revoke(t.Context(), noSQL{}, wallet.Revoke{Wallet: "a", Lot: 1, Amount: -1})
	requireField(err, "Revoke.Amount")
	_, err = book.Rollover(t.Context(), noSQL{}, wallet.Rollover{Wallet: "a", Lot: 1, Cap: 1, For: -1})
	requireField(err, "Rollover.For")
	_, err = book.Sweep(t.Context(), new(pgxpool.Pool), wallet.SweepOptions{Batch: 10_001})
	requireField(err, "SweepOptions.Batch")
	for field, cfg := range map[string]wallet.Config{
		"Config.Overdraft": {Overdraft: -1}, "Config.LateRefunds": {LateRefunds: -3}, "Config.Priorities": {Priorities: map[string]int{"x": math.MinInt}},
	} {
		_, err := wallet.New(ledger, cfg)
		requireField(err, field)
	}
}

func TestRole_ApplicationCanMakeEveryCallAndNothingElse(t *testing.T) {
	t.Parallel()
	pgtest.OnEachVersion(t)
	f := setUp(t, wallet.Config{})
	owner := f.pool
	f.pool = pgtest.AsRole(t, owner, metered.GrantSQL, "")
	f.grant(wallet.Grant{Amount: 10, Reference: "a", Ends: wallet.After(time.Hour), Roll: &wallet.Roll{Cap: 1, Lasts: wallet.For(time.Hour)}})
	f.refund(f.draw(5).Seq, 1)
	_, err := f.revoke(wallet.Revoke{Reference: "a", Amount: 1})
	require.NoError(t, err)
	f.rollover(wallet.Rollover{Reference: "a", Cap: 1, For: time.Hour})
	_, err = f.book.Sweep(t.Context(), f.pool, wallet.SweepOptions{})
	require.NoError(t, err)
	f.has(5)
	for _, err := range f.book.Statement(t.Context(), f.pool, "ann", budget.EntriesOptions{}) {
		require.NoError(t, err)
	}
	for _, sql := range []string{
		"update metered.lots set rest = 100", "update metered.lot_rows set rest = 100", "update metered.lot_moves set rest = 100", "delete from metered.lot_rows", "delete from metered.lot_moves", "update metered.lot_holds set amount = 1",
		"insert into metered.lot_moves (scope, seq, nth, lot, amount, kind) values ('ann', 99, 1, 1, 1, 't')",
		"select metered._take_lots('ann', 1, 1, 't', null, null, 1)", "select metered._take_units(metered._last_entry('ann'), null, 1, 'v')",
		"select metered._settle(metered._last_entry('ann'), now(), 1, 0, 1)", "select metered._purge_lots('ann', 0, 100)", "select nextval(pg_get_serial_sequence('metered.lot_rows', 'no'))",
	} {
		_, err := f.pool.Exec(t.Context(), sql)
		require.Equal(t, sqlstate.InsufficientPrivilege, sqlstate.Of(err), sql)
	}
	f.pool = pgtest.AsRole(t, owner, metered.GrantReportingSQL, "")
	require.EqualValues(t, 5, f.balance().Units)
	_, err = f.tryDraw(toDraw{Amount: 1})
	require.ErrorIs(t, err, budget.ErrNotGranted)
	f.pool = owner
}

// However many lots have ended, a draw reads a few rows, also by plans that were made when there were none.
func TestPlans_ADrawReadsNoMoreTheMoreLotsHaveEnded(t *testing.T) {
	t.Parallel()
	pgtest.OnEachVersion(t)
	pool := pgtest.Open(t)
	ledger, err := budget.New(budget.Config{})
	require.NoError(t, err)
	book, err := wallet.New(ledger, wallet.Config{})
	require.NoError(t, err)
	ctx := t.Context()
	conn, err := pool.Acquire(ctx)
	require.NoError(t, err)
	defer conn.Release()
	for _, table := range []string{"lot_rows", "lot_moves", "lot_holds"} {
		_, err := conn.Exec(ctx, "alter table metered."+table+" set (autovacuum_enabled = off)")
		require.NoError(t, err)
	}
	draws := func() {
		for range 20 {
			require.NoError(t, pgx.BeginFunc(ctx, conn, func(tx pgx.Tx) error {
				_, err := ledger.Charge(ctx, tx, book.Charge("ann", 1))
				return err
			}))
			_, err := book.Balance(ctx, conn, "ann")
			require.NoError(t, err)
		}
	}
	reads := func() (n int64) {
		before := lotReads(t, conn)
		draws()
		return lotReads(t, conn) - before
	}
	for range 4 {
		require.NoError(t, pgx.BeginFunc(ctx, conn, func(tx pgx.Tx) error {
			_, err := book.Grant(ctx, tx, wallet.Grant{Wallet: "ann", Amount: 1000, Ends: wallet.After(time.Hour)})
			return err
		}))
	}
	draws()
	few := reads()
	_, err = conn.Exec(ctx, `insert into metered.lot_rows (granted_at, expires_at, granted_seq, last_seq, amount, rest, lapsed, priority, origin, open, scope, category)
		select now(), now() - g * interval '1 s', 0, 0, 10, 0, 10, 0, 'c', false, 'ann', '' from generate_series(1, 10000) g`)
	require.NoError(t, err)
	many := reads()
	t.Logf("%d rows and entries read, then %d", few, many)
	require.LessOrEqual(t, many, few+few/5)
	pgtest.FlushStatistics(t, conn)
	require.Zero(t, pgtest.Value[int64](t, conn, "select sum(n_tup_upd)::bigint from pg_stat_user_tables where schemaname = 'metered'"), "draws update no row")
}

// lotReads is how many index entries and rows of lots were read so far.
func lotReads(t *testing.T, conn *pgxpool.Conn) (n int64) {
	pgtest.FlushStatistics(t, conn)
	require.NoError(t, conn.QueryRow(t.Context(), `
		select (select sum(seq_tup_read + coalesce(idx_tup_fetch, 0)) from pg_stat_user_tables where relname in ('lot_rows', 'lot_moves', 'lot_holds') and schemaname = 'metered')
			+ (select sum(idx_tup_read) from pg_stat_user_indexes where relname in ('lot_rows', 'lot_moves', 'lot_holds') and schemaname = 'metered')`).Scan(&n))
	return n
}
