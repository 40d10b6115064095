package leases_test

import (
	"context"
	"fmt"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/internal/purge"
	"github.com/pgmetered/metered/internal/sqlstate"
	"github.com/pgmetered/metered/leases"
)

// A role with the documented grants does all that a Pool does, but for purges, and cannot reach the tables beside that.
func TestGrants_AreEnoughForAPool(t *testing.T) {
	t.Parallel()
	f := setUp(t)
	app := pgtest.AsRole(t, f.db, metered.GrantSQL, "")
	keeper := pgtest.AsRole(t, f.db, metered.GrantMaintenanceSQL, "")
	role := *f
	role.db = app
	p, err := leases.New(app, f.ledger, leases.Config{Rules: []leases.Rule{{}}, OnError: func(err error) { t.Error(err) }})
	require.NoError(t, err)
	spent := role.warm(p, charge(2))
	for range 20 {
		require.NoError(t, p.Allow(t.Context(), charge(1)))
	}
	_, err = leases.Sweep(t.Context(), app, f.ledger)
	require.NoError(t, err)
	for l, err := range p.History(t.Context(), app, "hot") {
		require.NoError(t, err)
		for _, err := range p.Spends(t.Context(), app, l.No) {
			require.NoError(t, err)
		}
	}
	_, err = purge.Leases.Delete(t.Context(), app, purge.Options{OlderThan: time.Second})
	require.Equal(t, sqlstate.InsufficientPrivilege, sqlstate.Of(err))
	require.Equal(t, spent+20, role.settled("hot", p))
	for _, sql := range []string{`delete from metered.lease_spends`, `update metered.leases set spent = 0`, `insert into metered.lease_spends select * from metered.lease_spends`,
		`select metered._close_lease(l, 0, 'me', 1000, null, null, null, 1) from metered.leases l`, `select metered.purge_leases(null, now(), 10)`, `delete from metered.leases`} {
		_, err := app.Exec(t.Context(), sql)
		require.Equal(t, sqlstate.InsufficientPrivilege, sqlstate.Of(err), sql)
	}
	_, err = purge.Leases.Delete(t.Context(), keeper, purge.Options{OlderThan: time.Second})
	require.NoError(t, err)
}

// A role without grants may take a scope's lock and forge a recall, as everybody who may connect. Calls wait then, and leases are given back. No
// number changes.
func TestStranger_DelaysCallsAndChangesNoNumber(t *testing.T) {
	t.Parallel()
	f := setUp(t)
	stranger := pgtest.AsRole(t, f.db, nil, "")
	for _, sql := range []string{`select 1 from metered.ledger`, `select metered.clock()`, `insert into metered.ledger (scope, seq) values ('hot', 99)`} {
		_, err := stranger.Exec(t.Context(), sql)
		require.Equal(t, sqlstate.InsufficientPrivilege, sqlstate.Of(err), sql)
	}
	p := f.pool(leases.Rule{})
	spent := f.warm(p, charge(2))
	settled := func() (n int) {
		return pgtest.Value[int](t, f.db, `select count(*)::int from metered.leases where settled_at is not null`)
	}
	before := settled()
	pgtest.WaitFor(t, "a forged recall", func() bool {
		_, err := stranger.Exec(t.Context(), `select pg_notify('metered_leases_metered', 'hot')`)
		require.NoError(t, err)
		return settled() > before
	})
	require.Equal(t, spent, f.usage("hot").Spent)

	hasty, err := budget.New(budget.Config{LockTimeout: time.Millisecond})
	require.NoError(t, err)
	conn, err := stranger.Acquire(t.Context())
	require.NoError(t, err)
	defer conn.Release()
	for _, lock := range []string{`select pg_advisory_lock($1)`, `select pg_advisory_unlock($1)`} {
		_, err := conn.Exec(t.Context(), lock, f.ledger.LockKey("hot"))
		require.NoError(t, err)
		_, err = hasty.ChargeNow(t.Context(), f.db, charge(3, budget.Lifetime(1000)))
		if lock == `select pg_advisory_lock($1)` {
			require.ErrorIs(t, err, budget.ErrBusy)
			continue
		}
		require.NoError(t, err)
	}
	require.Equal(t, spent+3, f.settled("hot", p))
}

// A purge deletes leases that were settled that long ago, spends first, in batches, and never an open lease. Captured
// units stay, and Verify finds nothing at any point.
func TestPurge_TakesSettledLeasesWithTheirSpends(t *testing.T) {
	t.Parallel()
	f := setUp(t)
	clock := pgtest.SetClock(t, f.db, pgtest.Tomorrow(9))
	rows := func() int {
		return pgtest.Value[int](t, f.db, `select (select count(*) from metered.leases)::int + (select count(*) from metered.lease_spends)::int`)
	}
	for range 5 {
		l := f.open("rows", 100, time.Hour)
		for i := range int64(7) {
			require.NoError(t, l.spend(t.Context(), f.db, i*3, 3))
		}
		_, _, err := l.settle(t.Context(), f.db, owner, time.Second)
		require.NoError(t, err)
		clock.Advance(time.Minute)
	}
	open := f.open("rows", 100, 24*time.Hour)
	require.NoError(t, open.spend(t.Context(), f.db, 0, 5))
	require.Equal(t, 5*8+2, rows())
	n, err := purge.Leases.Delete(t.Context(), f.db, purge.Options{OlderThan: 5 * time.Minute, Batch: 3})
	require.NoError(t, err)
	require.Zero(t, n, "the first is as old, and not older")
	clock.Advance(time.Microsecond)
	var progress []int64
	n, err = purge.Leases.Delete(t.Context(), f.db, purge.Options{OlderThan: 3 * time.Minute, Batch: 5, Progress: func(n int64) {
		progress = append(progress, n)
		report, err := f.ledger.Verify(t.Context(), f.db, budget.VerifyOptions{})
		require.NoError(t, err)
		require.Empty(t, report.Differences, "in between")
	}})
	require.NoError(t, err)
	require.Equal(t, int64(3*8), n)
	require.Equal(t, []int64{5, 10, 15, 20, 24}, progress)
	require.Equal(t, 2*8+2, rows())
	clock.Advance(time.Hour)
	_, err = purge.Leases.Delete(t.Context(), f.db, purge.Options{OlderThan: time.Second, Batch: 1})
	require.NoError(t, err)
	require.Equal(t, 2, rows())
	require.Equal(t, int64(5*21+5), f.usage("hot").Used)
	_, _, err = open.settle(t.Context(), f.db, owner, time.Second)
	require.NoError(t, err)
	require.Equal(t, int64(5*21+5), f.settled("hot"))
}

// Verify reports a spend that was not captured, a spend that is gone, and a lease that is held no more.
func TestVerify_ReportsLeasesAtOddsWithTheLedger(t *testing.T) {
	t.Parallel()
	for what, sql := range map[string]string{
		"a spend after the end":  `insert into metered.lease_spends (lease, at_offset, amount, at) select no, 90, 1, now() from metered.leases where spent > 0`,
		"a spend that is gone":   `delete from metered.lease_spends where lease = (select max(no) from metered.leases where settled_at is not null)`,
		"a lease that is gone":   `delete from metered.leases where settled_at is null`,
		"a lease of more":        `update metered.leases set granted = granted + 1 where settled_at is null`,
		"captured something":     `update metered.leases set spent = spent - 1 where spent > 0`,
		"spent of an open lease": `insert into metered.lease_spends (lease, at_offset, amount, at) select no, 0, 101, now() from metered.leases where settled_at is null`,
	} {
		f := setUp(t)
		for range 2 {
			l := f.open("rows", 100, time.Hour)
			require.NoError(t, l.spend(t.Context(), f.db, 0, 3))
			_, _, err := l.settle(t.Context(), f.db, owner, time.Second)
			require.NoError(t, err)
		}
		f.open("rows", 100, time.Hour)
		report, err := f.ledger.Verify(t.Context(), f.db, budget.VerifyOptions{})
		require.NoError(t, err)
		require.Empty(t, report.Differences)
		_, err = f.db.Exec(t.Context(), sql)
		require.NoError(t, err)
		report, err = f.ledger.Verify(t.Context(), f.db, budget.VerifyOptions{})
		require.NoError(t, err)
		require.NotEmpty(t, report.Differences, what)
	}
}

// No call reads a table from its beginning to its end, and none reads more of it because the history is long, with
// whatever statistics its plans are made. The short form finds a scope's leases without their index.
func TestPlans_OfLeasesReadNoWholeTable(t *testing.T) {
	t.Parallel()
	pgtest.InCI(t)
	pgtest.OnEachVersion(t)
	for _, few := range []int{0, 300} {
		for _, analysed := range []bool{false, true} {
			if few == 0 && !analysed && !pgtest.Long {
				continue // its plans are those of 300 that were not analysed
			}
			t.Run(fmt.Sprintf("%d, analysed %v", few, analysed), func(t *testing.T) {
				t.Parallel()
				f := setUp(t)
				old := func(from, to int) {
					for _, sql := range []string{
						`insert into metered.leases (no, opened_at, ends_at, settled_at, granted, spent, fence, opened_seq, settled_seq, mode, scope, owner, settled_by) overriding system value
							select 1000000 + g, now(), now(), now() - interval '1 day', 10, 10, g, 1, 2, 's', case when g % 2 = 0 then 'hot' else 'cold ' || g % 10 end, 'me', 'me' from generate_series($1::int, $2::int) g`,
						`insert into metered.lease_spends (lease, at_offset, amount, at) select 1000000 + g, 0, 10, now() from generate_series($1::int, $2::int) g`,
					} {
						_, err := f.db.Exec(t.Context(), sql, from, to)
						require.NoError(t, err)
					}
				}
				exec := func(db interface {
					Exec(context.Context, string, ...any) (pgconn.CommandTag, error)
				}, sql string) {
					_, err := db.Exec(t.Context(), sql)
					require.NoError(t, err)
				}
				exec(f.db, `alter table metered.leases set (autovacuum_enabled = off); alter table metered.lease_spends set (autovacuum_enabled = off)`)
				old(1, few)
				if analysed {
					exec(f.db, `analyze metered.leases, metered.lease_spends`)
				}
				conn, err := f.db.Acquire(t.Context())
				require.NoError(t, err)
				defer conn.Release()
				one := *f
				one.db = pgtest.Reopen(t, f.db, func(c *pgxpool.Config) { c.MaxConns = 1 })
				p, err := leases.New(one.db, one.ledger, leases.Config{Rules: []leases.Rule{{}}, NoRecall: true})
				require.NoError(t, err)
				defer func() { _ = p.Close(context.Background()) }()
				act := func() {
					l := one.open("rows", 100, time.Hour)
					for i := range int64(5) {
						require.NoError(t, l.spend(t.Context(), one.db, i*2, 2))
					}
					one.usage("hot")
					_, err := one.ledger.Check(t.Context(), one.db, charge(1, budget.Lifetime(1)))
					require.ErrorIs(t, err, budget.ErrExceeded)
					_, _, err = l.settle(t.Context(), one.db, owner, time.Second)
					require.NoError(t, err)
				}
				read := func() { // by statements that are planned each time
					_, err = leases.Sweep(t.Context(), one.db, one.ledger)
					require.NoError(t, err)
					for range p.History(t.Context(), one.db, "hot") {
						break
					}
					for range p.Spends(t.Context(), one.db, 1000001) {
					}
				}
				stat := func(what string) int64 {
					pgtest.FlushStatistics(t, one.db)
					pgtest.FlushStatistics(t, conn)
					return pgtest.Value[int64](t, conn, `select sum(`+what+`)::bigint from pg_stat_user_tables where schemaname = 'metered' and relname in ('leases', 'lease_spends')`)
				}
				measure := func(f func()) int64 {
					before := stat("seq_tup_read + idx_tup_fetch")
					f()
					return stat("seq_tup_read + idx_tup_fetch") - before
				}
				scans := stat("seq_scan")
				for range 10 {
					act()
				}
				early := measure(act)
				require.Equal(t, scans, stat("seq_scan"))
				for range 10 {
					read()
				}
				old(few+1, few+20_000)
				before := stat("seq_scan")
				late, reads := measure(act), measure(read)
				t.Logf("rows read: %d, and %d later; by what is planned each time %d", early, late, reads)
				require.Equal(t, before, stat("seq_scan"))
				require.LessOrEqual(t, late, 2*early+10)
				require.LessOrEqual(t, reads, int64(1200), "a page of history")
			})
		}
	}
}

// Close leaves no goroutine, even in the middle of work.
func TestClose_LeavesNoGoroutine(t *testing.T) {
	f := setUp(t)
	running := func() string {
		all := make([]byte, 1<<20)
		var own []string
		for _, g := range strings.Split(string(all[:runtime.Stack(all, true)]), "\n\n") {
			if strings.Contains(g, "metered/leases.(") || strings.Contains(g, "internal/listen.") {
				own = append(own, g)
			}
		}
		return strings.Join(own, "\n\n")
	}
	require.Empty(t, running(), "this test runs alone")
	for range 3 {
		p := f.pool(leases.Rule{})
		f.warm(p, charge(1, budget.Lifetime(1_000_000)))
		go func() { _ = p.Allow(context.Background(), charge(1, budget.Lifetime(1_000_000))) }()
		tx := f.begin(pgx.ReadCommitted)
		_, err := p.Charge(t.Context(), tx, charge(1, budget.Lifetime(1_000_000)))
		require.NoError(t, err)
		ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
		_ = p.Close(ctx) // a lease is being spent from
		cancel()
		require.NoError(t, tx.Rollback(t.Context()))
		_, err = p.Charge(t.Context(), tx, charge(1))
		require.ErrorIs(t, err, leases.ErrClosed)
	}
	pgtest.WaitFor(t, "the end of:\n"+running(), func() bool { return running() == "" })
}
