package inspect_test

import (
	"context"
	"flag"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/inspect"
	"github.com/pgmetered/metered/internal/pgtest"
)

var (
	entries = flag.Int("entries", 120_000, "entries of the ledger in the test of plans; a tenth of them are operations, holds and leases")
	times   = flag.Bool("times", false, "print how long each call takes")
)

// bigSQL fills every table: a third of the entries is of one scope, the rest of $scopes others. Most holds and leases
// have ended, and one operation in a thousand was refused.
const bigSQL = `
insert into metered.ledger (seq, amount, at, spent, refunded, credited, held, epoch, kind, scope, operation_tenant, operation)
    select g, 2, now() - interval '1 h' + g * (interval '1 h' / ($entries / 3)), 2 * g, 0, 0, 0, 0, 'c'::"char", 'hot', '', 'op' || g
    from generate_series(1, $entries / 3) g;
insert into metered.ledger (seq, amount, at, spent, refunded, credited, held, epoch, kind, scope, next_due)
    select q, 1, now() - interval '1 day' + q * interval '1 min', q, 0, 0, 1, 0, 'c', 'org/' || s, now() + interval '1 h'
    from generate_series(1, $scopes) s, generate_series(1, $entries / $scopes * 2 / 3) q;
insert into metered.operations (tenant, id, at, fingerprint, result, scopes, amounts, seqs, ats, name, jobs, refusal)
    select 'ns' || g % 7, 'op' || g, now() - interval '1 h' + g * (interval '1 h' / ($entries / 10)), '', '{}', array['hot'], array[2], array[g], array[now()],
        'upload', array[g], case when g % 1000 = 0 then '{"code":"budget_exceeded","text":"no","exceeded":{"refusals":[{"limit":{"name":"burst","max":9,"window_us":1000000}}]}}'::json end
    from generate_series(1, $entries / 10) g;
insert into metered.holds (placed_at, deadline, due, ceiling, ended_at, version, state, pending, tenant, id, holder, fingerprint, keys)
    select t.at, t.at, t.at, 'infinity', case when g % 10 <> 0 then t.at end, 1, case when g % 10 = 0 then 'h' else 'c' end::"char", g % 10 = 0, 't' || g % 5, 'h' || g, 'ann', '', array[1]
    from generate_series(1, $entries / 10) g, lateral (select now() + case when g % 20 = 0 then interval '-1 h' else interval '2 h' end + g * interval '1 ms' as at) t;
insert into metered.hold_lines (hold, key, amount, open, due, scope, opened_seq)
    select h.no, 1, 1, case when h.state = 'h' then 1 else 0 end, h.due, 'org/' || 1 + h.no % 3, 1 from metered.holds h;
insert into metered.hold_events (hold, at, deadline, version, kind, detail) select h.no, h.placed_at, h.deadline, 1, 'h', '{"lines":[]}' from metered.holds h;
insert into metered.leases (opened_at, ends_at, settled_at, granted, spent, fence, opened_seq, mode, scope, owner)
    select now(), now() + case when g % 200 = 0 then interval '-1 min' else interval '1 h' end, case when g % 100 <> 0 then now() end, 10, case when g % 100 <> 0 then 5 end, g, g, 's', 'org/' || 1 + g % 3, 'p'
    from generate_series(1, $entries / 10) g;
insert into metered.lease_spends (lease, at_offset, amount, at) select l.no, 0, 5, now() from metered.leases l;
insert into metered.tokens (digest, minted_at, expires_at, uses, purpose, subject)
    select sha256(g::text::bytea), now(), now() + interval '1 h', 1, 'p', 's' || g from generate_series(1, $entries / 10) g;
insert into metered.lot_rows (granted_at, expires_at, granted_seq, last_seq, amount, rest, lapsed, priority, origin, open, scope, category)
    select now(), now() + case when g % 1000 = 0 then interval '1 h' else interval '-1 h' end, g, g, 10, case when g % 1000 = 0 then 10 else 0 end, case when g % 1000 = 0 then 0 else 10 end,
        0, 'g', g % 1000 = 0, 'wallet/' || g % 2, 'paid' from generate_series(1, $entries / 10) g;
insert into metered.lot_moves (scope, seq, nth, lot, kind, amount, version, rest, drawn, held, kept)
    select l.scope, l.no, 1, l.no, 'd', 10, 1, l.rest, 0, 0, 0 from metered.lot_rows l;
insert into metered.ledger (seq, amount, at, spent, refunded, credited, held, epoch, kind, scope, lots_end)
    select 1, 1, now(), 0, 0, sum(l.rest), 0, 0, 'd', l.scope, now() + interval '1 h' from metered.lots l group by l.scope;
insert into metered.lot_rows (granted_at, starts_at, expires_at, granted_seq, last_seq, amount, rest, pending, priority, origin, open, scope, category, reference, plan)
    select now(), now() + interval '1 h', now() + interval '2 h', 1, 1, 10, 0, 10, 0, 'g', false, 'wallet/' || g, '', 'plan ' || g,
        row(row('1 month', null, 'UTC')::metered.period, 10, 'plan ' || g, null, null, null, null, null, null)::metered.lot_plan from generate_series(0, 1) g;
insert into metered.resources (created_at, scope) select now(), 'org/' || g from generate_series(1, $entries / 10) g;
insert into metered.parked_jobs (job_id, turn, amount, class, parked_at, priority, scope, fair, tenant, job, hold, charges)
    select 1000000 + g, g, 1, 1, now() - interval '1 h', 2, case when g % 3 = 0 then 'hot' else 'line/' || g end, '', '', '{"kind": "k", "queue": "q", "metadata": {}}', '', ''
    from generate_series(1, $entries / 10) g;
insert into metered.parked_scopes (key, wake_at, waiting, scope, since) select 1, 'infinity', count(*), j.scope, now() - interval '1 h' from metered.parked_jobs j group by j.scope;
update metered.feed_state set last = $entries / 10, whole_at = now();
insert into metered.feed (no, seq, entries, scope) select g, g, 1, 'hot' from generate_series(1, $entries / 10) g;
insert into metered.feed_consumers (no, patience, moved_at, consumer) select g, '1 day', now(), 'consumer ' || g from generate_series(1, $entries / 10) g;
insert into river_job (args, kind, max_attempts, state) select '{}', 'k', 3, 'available' from generate_series(1, $entries / 10);`

func openBig(t *testing.T) (owner *pgxpool.Pool) {
	t.Helper()
	owner = pgtest.Open(t)
	for _, table := range []string{"ledger", "operations", "holds", "hold_lines", "hold_events", "leases", "lease_spends", "tokens", "lot_rows", "lot_moves", "parked_jobs", "parked_scopes", "feed", "feed_consumers"} {
		execute(t, owner, "alter table metered."+table+" set (autovacuum_enabled = off)")
	}
	execute(t, owner, fill(bigSQL, *entries))
	return owner
}

// fill puts sizes into a statement: a scope has about 66 entries, as a hundredth of the entries are scopes.
func fill(sql string, n int) string {
	replaced := sql
	for from, to := range map[string]int{"$entries": n, "$scopes": n / 100} {
		replaced = replaceAll(replaced, from, fmt.Sprint(to))
	}
	return replaced
}

type call struct {
	name string
	run  func(ctx context.Context, r *inspect.Reader) error
}

// calls are all that a Reader answers, on the tables of bigSQL.
func calls(since time.Time) []call {
	tenant, owner := "t3", "ns3"
	does := func(f func(ctx context.Context, r *inspect.Reader) (int, error)) func(context.Context, *inspect.Reader) error {
		return func(ctx context.Context, r *inspect.Reader) error {
			n, err := f(ctx, r)
			if err == nil && n == 0 {
				err = fmt.Errorf("nothing was found")
			}
			return err
		}
	}
	scopes := func(prefix, after string) func(context.Context, *inspect.Reader) error {
		return does(func(ctx context.Context, r *inspect.Reader) (int, error) {
			l, err := r.Scopes(ctx, inspect.ScopeFilter{Prefix: prefix, After: after, Limit: 100})
			return len(l.Scopes), err
		})
	}
	held := func(f inspect.HoldFilter) func(context.Context, *inspect.Reader) error {
		return does(func(ctx context.Context, r *inspect.Reader) (int, error) {
			l, err := r.Holds(ctx, f)
			return len(l.Holds) + len(l.Next), err
		})
	}
	leased := func(f inspect.LeaseFilter) func(context.Context, *inspect.Reader) error {
		return does(func(ctx context.Context, r *inspect.Reader) (int, error) {
			l, err := r.Leases(ctx, f)
			return len(l.Leases) + len(l.Next), err
		})
	}
	done := func(f inspect.OperationFilter) func(context.Context, *inspect.Reader) error {
		return does(func(ctx context.Context, r *inspect.Reader) (int, error) {
			l, err := r.Operations(ctx, f)
			return len(l.Operations) + len(l.Next), err
		})
	}
	explain := func(c budget.Charge) func(context.Context, *inspect.Reader) error {
		return does(func(ctx context.Context, r *inspect.Reader) (int, error) {
			e, err := r.Explain(ctx, c)
			return len(e.Limits), err
		})
	}
	return []call{
		{"overview", func(ctx context.Context, r *inspect.Reader) error { _, err := r.Overview(ctx); return err }},
		{"hot", does(func(ctx context.Context, r *inspect.Reader) (int, error) {
			l, err := r.Hot(ctx, 10*time.Minute, 20)
			return len(l.Scopes), err
		})},
		{"hot of a day", does(func(ctx context.Context, r *inspect.Reader) (int, error) {
			l, err := r.Hot(ctx, 24*time.Hour, 100)
			return len(l.Scopes), err
		})},
		{"scopes", scopes("", "")},
		{"scopes by prefix", scopes("org/1", "org/10")},
		{"scope", func(ctx context.Context, r *inspect.Reader) error { _, err := r.Scope(ctx, "hot"); return err }},
		{"scope with holds", func(ctx context.Context, r *inspect.Reader) error { _, err := r.Scope(ctx, "org/1"); return err }},
		{"wallet", func(ctx context.Context, r *inspect.Reader) error { _, err := r.Scope(ctx, "wallet/0"); return err }},
		{"lots", does(func(ctx context.Context, r *inspect.Reader) (int, error) {
			l, err := r.Lots(ctx, "wallet/0", "", 100)
			return len(l.Lots), err
		})},
		{"ending", does(func(ctx context.Context, r *inspect.Reader) (int, error) {
			l, err := r.Ending(ctx, 24*365*time.Hour, 100)
			return len(l), err
		})},
		{"wallets", does(func(ctx context.Context, r *inspect.Reader) (int, error) {
			w := inspect.Walk{Prefix: "wallet/", Within: 24 * 365 * time.Hour, Plan: "*", Keep: 100}
			_, err := w.More(ctx, r)
			return len(w.Wallets) * len(w.Ending) * len(w.Plans), err
		})},
		{"wallets with a plan", does(func(ctx context.Context, r *inspect.Reader) (int, error) {
			l, err := r.Scopes(ctx, inspect.ScopeFilter{Prefix: "wallet/", Kind: inspect.Planned, Plan: "plan*"})
			return len(l.Scopes), err
		})},
		{"sessions", held(inspect.HoldFilter{Sessions: true})},
		{"sessions of a scope", func(ctx context.Context, r *inspect.Reader) error {
			_, err := r.Holds(ctx, inspect.HoldFilter{Scope: "org/1", State: holds.Held, Sessions: true})
			return err
		}},
		{"holds", held(inspect.HoldFilter{})},
		{"holds of a tenant, released", held(inspect.HoldFilter{Tenant: &tenant, State: holds.Released})},
		{"holds of a scope", held(inspect.HoldFilter{Scope: "org/1"})},
		{"holds of a scope that has none", held(inspect.HoldFilter{Scope: "org/9"})},
		{"held of a scope", held(inspect.HoldFilter{Scope: "org/1", State: holds.Held})},
		{"hold", func(ctx context.Context, r *inspect.Reader) error { _, err := r.Hold(ctx, "t3", "h3"); return err }},
		{"due", does(func(ctx context.Context, r *inspect.Reader) (int, error) {
			l, err := r.Book.Due(ctx, r.DB, holds.DueFilter{AllTenants: true})
			return len(l.Holds), err
		})},
		{"leases", leased(inspect.LeaseFilter{})},
		{"leases of a scope", leased(inspect.LeaseFilter{Scope: "org/1", State: inspect.LeaseSettled})},
		{"leases out", leased(inspect.LeaseFilter{State: inspect.LeaseOut})},
		{"leases ended of a scope", leased(inspect.LeaseFilter{State: inspect.LeaseEnded, Scope: "org/3"})},
		{"operations", done(inspect.OperationFilter{})},
		{"operations of a tenant, refused", done(inspect.OperationFilter{Tenant: &owner, State: inspect.Refused, Since: since})},
		{"operations of no name", done(inspect.OperationFilter{Name: "none"})},
		{"operation", does(func(ctx context.Context, r *inspect.Reader) (int, error) {
			o, err := r.Operation(ctx, "ns3", "op3")
			return len(o.Jobs.Jobs), err
		})},
		{"lines", does(func(ctx context.Context, r *inspect.Reader) (int, error) {
			l, err := r.Lines(ctx, 100)
			return len(l), err
		})},
		{"consumers", does(func(ctx context.Context, r *inspect.Reader) (int, error) {
			l, err := r.Consumers(ctx, 100)
			return len(l), err
		})},
		{"waiting", does(func(ctx context.Context, r *inspect.Reader) (int, error) {
			l, err := r.Waiting(ctx, "hot", 100)
			return len(l), err
		})},
		{"parked jobs", does(func(ctx context.Context, r *inspect.Reader) (int, error) {
			l, err := r.Jobs(ctx, []int64{1_004_001, 1_004_002, 1_004_003, 1_004_005})
			return len(l.Jobs), err
		})},
		{"refusals", does(func(ctx context.Context, r *inspect.Reader) (int, error) {
			l, err := r.Refusals(ctx, time.Hour, 0)
			return len(l.Refusals), err
		})},
		{"explain", explain(budget.Charge{Scope: "hot", Amount: 1000, Limits: []budget.Limit{
			budget.PerWindow(1001, time.Minute), budget.PerWindow(1<<40, 30*time.Minute), budget.Lifetime(5)}})},
		{"explain with holds", explain(budget.Charge{Scope: "org/1", Amount: 2, Limits: []budget.Limit{budget.PerWindow(2, 48*time.Hour)}})},
	}
}

// Each call reads a bounded number of rows of each table, by indexes. Only the last
// pages of the ledger are read as they lie.
func TestReader_ReadsABoundedNumberOfRows(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	owner := openBig(t)
	role := pgtest.AsRole(t, owner, metered.GrantReportingSQL, "grant select on river_job to $role")
	execute(t, owner, "vacuum analyze")
	for _, c := range calls(time.Now().Add(-time.Hour)) {
		tx, err := role.BeginTx(ctx, pgx.TxOptions{AccessMode: pgx.ReadOnly, IsoLevel: pgx.RepeatableRead})
		require.NoError(t, err)
		r, err := inspect.New(tx, "")
		require.NoError(t, err)
		before, _ := readsOf(ctx, tx)
		began := time.Now()
		err = c.run(ctx, r)
		took := time.Since(began)
		after, readErr := readsOf(ctx, tx)
		require.NoError(t, tx.Rollback(ctx)) // before an assertion ends the test
		require.NoError(t, err, c.name)
		require.NoError(t, readErr)
		if *times {
			t.Logf("%-40s %v", c.name, took.Round(100*time.Microsecond))
		}
		for table, is := range after {
			was := before[table]
			small := table == "schema_version" || table == "holds_horizon" || table == "feed_state" || table == "parked_scopes" && c.name == "lines" // which ends at MaxLooked
			require.True(t, small || is.Scans == was.Scans, "%s scans %s", c.name, table)
			require.LessOrEqual(t, max(is.Rows-was.Rows, is.Indexed-was.Indexed), int64(3*inspect.MaxLooked), "%s reads %s", c.name, table)
		}
	}
}

// reads counts the rows and pages of a table that a session has read.
type reads struct {
	Table                string
	Scans, Rows, Indexed int64
}

const readsSQL = `
select relname::text, seq_scan, coalesce(seq_tup_read, 0) + coalesce(idx_tup_fetch, 0),
	coalesce((select sum(pg_stat_get_xact_tuples_returned(i.indexrelid)) from pg_index i where i.indrelid = s.relid), 0)::bigint
from pg_stat_xact_user_tables s where schemaname = 'metered' or relname = 'river_job'`

func readsOf(ctx context.Context, tx pgx.Tx) (map[string]reads, error) {
	rows, err := tx.Query(ctx, readsSQL)
	if err != nil {
		return nil, err
	}
	all, err := pgx.CollectRows(rows, pgx.RowToStructByPos[reads])
	byTable := make(map[string]reads)
	for _, r := range all {
		byTable[r.Table] = r
	}
	return byTable, err
}
