package metered_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/leases"
	"github.com/pgmetered/metered/wallet"
)

// What is there since version 2 is gone on with: the data is of testdata/version2_data.sql.

func useSessions(t *testing.T, pool *pgxpool.Pool, c *metered.Client) {
	t.Helper()
	ctx := t.Context()
	reservation := func(id string) metered.Reservation {
		return metered.Reservation{ID: id, Namespace: "acme", Input: 1, TTL: time.Hour, Grace: time.Minute,
			Lines: []holds.Line{{Scope: "wallet/ann", Amount: 20, AtLeast: 7, Limits: []budget.Limit{budget.Prepaid()}}}}
	}
	_, err := metered.Open[string](ctx, c, reservation("session open"))
	var running *metered.RunningError
	require.ErrorAs(t, err, &running)
	s, err := metered.Open[string](ctx, c, reservation("session dead"))
	require.NoError(t, err, "its process died: it runs anew")
	out, err := s.Settle(ctx, metered.Used{Lines: []holds.Line{{Scope: "wallet/ann", Amount: 9}}},
		func(context.Context, *metered.Tx) (string, error) { return "done", nil })
	require.NoError(t, err)
	require.Equal(t, "done", out.Result)
	again, err := metered.Open[string](ctx, c, reservation("session dead"))
	require.NoError(t, err)
	require.True(t, again.Finished())
}

func useWallets(t *testing.T, pool *pgxpool.Pool, c *metered.Client) {
	t.Helper()
	ctx := t.Context()
	var lapsed int64
	book, err := wallet.New(c.Budget, wallet.Config{Overdraft: 50, LateRefunds: wallet.Lapse,
		Thresholds:  []budget.Threshold{{Name: "low", Left: 60}},
		Subscribers: []wallet.Subscriber{func(_ context.Context, _ pgx.Tx, b wallet.Breakage) error { lapsed += b.Amount; return nil }}})
	require.NoError(t, err)
	balance := func(name string) wallet.Balance {
		t.Helper()
		b, err := book.Balance(ctx, pool, name)
		require.NoError(t, err)
		return b
	}
	// Granted 100, 40, 70 less 20, and 200; drawn 26, 7 by the session that died and 9 by the one after it. 45 are held. The first
	// two have ended: of the first 9 lapsed and 16 stay held, of the second 30 went on.
	ann := balance("wallet/ann")
	report, err := book.Expire(ctx, pool, wallet.ExpireOptions{})
	require.NoError(t, err)
	require.Positive(t, report.Told)
	require.Equal(t, ann.Units, balance("wallet/ann").Units, "swept or not")
	require.Equal(t, int64(390-26-7-9-45)-lapsed, ann.Units)
	require.Equal(t, int64(-30), balance("wallet/bob").Units)
	require.NoError(t, pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		first := wallet.Grant{Wallet: "wallet/ann", Amount: 100, Reference: "first", Category: "paid", Expires: time.Date(2026, 3, 1, 11, 50, 0, 0, time.UTC)}
		granted, err := book.Grant(ctx, tx, first)
		require.NoError(t, err)
		require.True(t, granted.Replayed, "it was granted by the build before")
		first.Amount++
		_, err = book.Grant(ctx, tx, first)
		require.ErrorIs(t, err, wallet.ErrConflict)
		_, err = book.Draw(ctx, tx, wallet.Draw{Wallet: "wallet/ann", Amount: ann.Units + 51})
		require.ErrorIs(t, err, budget.ErrExceeded)
		_, err = book.Draw(ctx, tx, wallet.Draw{Wallet: "wallet/ann", Amount: ann.Units})
		require.NoError(t, err)
		_, err = c.Holds.Capture(ctx, tx, holds.Capture{Tenant: "acme", IDs: []string{"of lots", "overdrawn"}, All: true})
		require.NoError(t, err)
		_, err = book.Refund(ctx, tx, budget.Refund{Scope: "wallet/ann", Seq: 5, Amount: 27})
		require.ErrorIs(t, err, budget.ErrRefundExceeds, "4 of 30 were given back")
		_, err = book.Grant(ctx, tx, wallet.Grant{Wallet: "wallet/bob", Amount: 100})
		return err
	}))
	require.Zero(t, balance("wallet/ann").Units)
	require.Equal(t, int64(70), balance("wallet/bob").Units)
}

func useLeases(t *testing.T, pool *pgxpool.Pool, c *metered.Client) {
	t.Helper()
	ctx := t.Context()
	used := func(scope string) int64 {
		t.Helper()
		u, err := c.Budget.Usage(ctx, pool, budget.Query{Scope: scope})
		require.NoError(t, err)
		return u[0].Used
	}
	// Of those that ended, one in rows spent 5, and one in memory counts as spent in full; one goes on.
	p, err := leases.New(pool, leases.Config{Rules: []leases.Rule{{Prefix: "org/"}}, NoRecall: true})
	require.NoError(t, err)
	defer func() { require.NoError(t, p.Close(context.Background())) }()
	report, err := p.Settle(ctx)
	require.NoError(t, err)
	require.Equal(t, 2, report.Settled)
	var memory int64
	require.NoError(t, pool.QueryRow(ctx, `select granted from metered.leases where mode = 'm' and spent = granted`).Scan(&memory))
	require.Equal(t, 5+memory+7, used("org/leased"), "with what was spent of the one that is open")
	require.Equal(t, int64(6), used("org/settled"))
	// The build before settles its own by the call that it knows.
	var spent int64
	require.NoError(t, pool.QueryRow(ctx, `select spent from metered.settle_lease((select no from metered.leases where scope = 'org/leased' and settled_at is null), 'gone', null, 1000)`).Scan(&spent))
	require.Equal(t, int64(7), spent)
	require.Equal(t, 5+memory+7, used("org/leased"))

	carver, err := leases.NewCarver(c.Budget)
	require.NoError(t, err)
	require.NoError(t, pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		lease, err := carver.Close(ctx, tx, "run/open", budget.Note{})
		require.NoError(t, err)
		require.Equal(t, int64(8), lease.Spent)
		_, err = carver.Carve(ctx, tx, leases.Carving{Child: "run/closed", TTL: time.Hour,
			From: budget.Charge{Scope: "user/ann", Amount: 50, Limits: []budget.Limit{budget.Lifetime(1000)}}})
		return err
	}))
	require.Equal(t, int64(16), used("user/ann"))
}

func useThresholds(t *testing.T, pool *pgxpool.Pool, c *metered.Client) {
	t.Helper()
	ctx := t.Context()
	berlin, err := time.LoadLocation("Europe/Berlin")
	require.NoError(t, err)
	eighty := budget.Threshold{Name: "80 %", Percent: 80}
	require.NoError(t, pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		plan := func(n int64, levels ...budget.Threshold) []budget.Crossing {
			r, err := c.Budget.Charge(ctx, tx, budget.Charge{Scope: "org/plan", Amount: n, Limits: []budget.Limit{
				budget.PerMonth(100, berlin, time.Time{}).Tell(levels...),
				budget.Lifetime(100).Tell(budget.Threshold{Name: "few", Left: 20, Rearm: 10})}})
			require.NoError(t, err)
			return r.Crossed
		}
		require.Empty(t, plan(1, eighty), "it was told by the build before")
		require.Len(t, plan(1, eighty, budget.Threshold{Name: "spent", Percent: 80, Spent: true}), 1, "another kind")
		_, err := c.Budget.Charge(ctx, tx, budget.Charge{Scope: "desk/2", Amount: 1, MustExist: true})
		require.ErrorIs(t, err, budget.ErrScopeRetired)
		return nil
	}))
}

// A refund that is under way while the schema is upgraded ends with functions of both versions. Of what it gives back late it pays what is
// overdrawn, once.
func TestMigrate_ARefundMeanwhilePaysWhatIsOverdrawn(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	pool := pgtest.OpenWith(t, pgtest.Options{Empty: true})
	execute(t, pool, pgtest.VersionSQL(t, 2, ""))
	clock := pgtest.SetClock(t, pool, time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC))
	charge := func(units int64) {
		execute(t, pool, fmt.Sprintf("select metered.charge(array[row('ann', null, %d, 0, '{}', null, null, null, null)::metered.new_charge], null, 1000, false)", units))
	}
	execute(t, pool, "select metered.grant_lot('ann', null, row(10, null, '1 hour', '', 0, null, null, null, null, '0')::metered.new_lot, false, 1000, null)")
	charge(10)
	clock.Advance(2 * time.Hour)
	charge(4)

	upgrade, err := metered.SchemaSQL(metered.SchemaSQLOptions{From: 2})
	require.NoError(t, err)
	tx, err := pool.Begin(ctx)
	require.NoError(t, err)
	defer func() { _ = tx.Rollback(context.Background()) }()
	_, err = tx.Exec(ctx, upgrade, pgx.QueryExecModeSimpleProtocol)
	require.NoError(t, err)
	refunded := pgtest.Going(func() error {
		_, err := pool.Exec(ctx, "select metered.refund('ann', null, 2, 10, 60000, null, true)")
		return err
	})
	pgtest.WaitQueued(t, pool, 1)
	require.NoError(t, tx.Commit(ctx))
	require.NoError(t, <-refunded)

	c, err := metered.New(pool, metered.Config{})
	require.NoError(t, err)
	report, err := c.Budget.Verify(ctx, pool, budget.VerifyOptions{})
	require.NoError(t, err)
	require.Empty(t, report.Differences)
	require.Equal(t, int64(6), queryRow[int64](t, pool, "select sum(rest)::bigint from metered.lots"))
}
