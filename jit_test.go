package metered_test

import (
	"context"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"
	"github.com/riverqueue/river/rivertype"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/jobs"
	"github.com/pgmetered/metered/tokens"
)

// bigTablesSQL is a scope with 60,000 charges and 50,000 refunds of them, 20,000 holds in another,
// and as many tokens, keys and operations.
const bigTablesSQL = `
insert into metered.ledger (seq, amount, at, spent, refunded, credited, held, epoch, kind, scope, ref)
	select g, 2, metered.clock() - interval '30 min' + g * interval '10 ms', 2 * g, 0, 0, 0, 0, 'c'::"char", 'refunded', null::bigint from generate_series(1, 60000) g
	union all select 60000 + g, 1, metered.clock() - interval '10 min' + g * interval '1 ms', 120000, g, 0, 0, 0, 'r', 'refunded', g from generate_series(1, 50000) g;
insert into metered.refund_sum (scope, level, block, amount)
	select 'refunded', lv, g >> (4 * lv), count(*) from generate_series(1::bigint, 50000) g, generate_series(0, 15) lv
	where lv = 0 or g >> (4 * lv) > 0 group by lv, g >> (4 * lv);
insert into metered.ledger (seq, amount, at, spent, refunded, credited, held, epoch, kind, scope, next_due, hold)
	select g, 1, metered.clock() - interval '30 min' + g * interval '1 ms', 0, 0, 0, g, 0, 'h', 'held', metered.clock() + interval '1 h', 'old ' || g from generate_series(1, 20000) g;
insert into metered.holds (placed_at, deadline, due, ceiling, version, state, tenant, id, holder, fingerprint, keys)
	select metered.clock(), metered.clock() + interval '1 h', metered.clock() + interval '1 h', metered.clock() + interval '1 h', 1, 'h', '', 'old ' || g, 'ann', '', array[metered.scope_key('held')]
	from generate_series(1, 20000) g;
insert into metered.hold_lines (hold, key, amount, open, due, scope) select h.no, h.keys[1], 1, 1, h.due, 'held' from metered.holds h;
insert into metered.hold_events (hold, at, deadline, version, kind) select h.no, h.placed_at, h.deadline, 1, 'h' from metered.holds h;
insert into metered.tokens (digest, minted_at, expires_at, uses, purpose, subject)
	select sha256(g::text::bytea), metered.clock(), metered.clock() + interval '1 h', 1, 'p', 's' || g from generate_series(1, 20000) g;
insert into metered.job_keys (job_id, created_at, queue, key, kind, tenant, digest)
	select g, metered.clock() - interval '1 h', 'default', 'old ' || g, 'k', '', '' from generate_series(1, 20000) g;
insert into metered.operations (at, namespace, id, fingerprint, result)
	select metered.clock() - interval '1 h', '', 'old ' || g, '', '1' from generate_series(1, 20000) g`

// Postgres compiles a statement whose plan looks expensive (jit, on by default), for 10 to 50 ms
// a call. Nothing that a command waits for may look so, however much there is in the tables,
// whether they were analysed or not.
func TestPlans_NoStatementIsCompiled(t *testing.T) {
	t.Parallel()
	for _, analysed := range []bool{false, true} {
		t.Run(map[bool]string{false: "never analysed", true: "analysed"}[analysed], func(t *testing.T) {
			t.Parallel()
			ctx := t.Context()
			owner := pgtest.Open(t)
			_, err := owner.Exec(ctx, bigTablesSQL, pgx.QueryExecModeSimpleProtocol)
			require.NoError(t, err)
			if analysed {
				_, err = owner.Exec(ctx, "analyze")
				require.NoError(t, err)
			}
			var mu sync.Mutex
			var looked int
			var compiled []string
			pool := pgtest.Reopen(t, owner, func(cfg *pgxpool.Config) {
				cfg.MaxConns = 4
				cfg.ConnConfig.OnNotice = func(_ *pgconn.PgConn, n *pgconn.Notice) {
					mu.Lock()
					defer mu.Unlock()
					looked++
					if strings.Contains(n.Message, "JIT:") {
						compiled = append(compiled, n.Message)
					}
				}
				cfg.AfterConnect = func(ctx context.Context, conn *pgx.Conn) error {
					_, err := conn.Exec(ctx, `load 'auto_explain'; set auto_explain.log_min_duration = 0; set auto_explain.log_nested_statements = on;
						set auto_explain.log_analyze = on; set auto_explain.log_level = notice; set jit = on; set jit_above_cost = 100000`, pgx.QueryExecModeSimpleProtocol)
					return err
				}
			})
			if err := pool.Ping(ctx); err != nil && strings.Contains(err.Error(), "auto_explain") {
				t.Skip("these server binaries are without auto_explain")
			}
			client, err := river.NewClient(riverpgxv5.New(pool), &river.Config{Plugins: []rivertype.Plugin{jobs.Plugin()}})
			require.NoError(t, err)
			c := newClient(t, pool, metered.Config{River: client})
			bigCalls(t, pool, c)
			require.Greater(t, looked, 200, "auto_explain reports every statement")
			require.Empty(t, compiled)
		})
	}
}

// bigCalls makes the calls of an application, and the purges, on what bigTablesSQL made.
func bigCalls(t *testing.T, pool *pgxpool.Pool, c *metered.Client) {
	ctx := t.Context()
	window := func(max int64) []budget.Limit { return []budget.Limit{budget.PerWindow(max, 20*time.Minute)} }
	for range 2 {
		require.NoError(t, pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
			_, err := c.Budget.Charge(ctx, tx, budget.Charge{Scope: "refunded", Amount: 1, Limits: append(window(1<<40), budget.Lifetime(1<<40))})
			require.NoError(t, err)
			_, err = c.Budget.Charge(ctx, tx, budget.Charge{Scope: "refunded", Amount: 5000, Limits: []budget.Limit{budget.PerWindow(40_500, 25*time.Minute)}})
			require.ErrorIs(t, err, budget.ErrExceeded)
			_, err = c.Budget.Charge(ctx, tx, budget.Charge{Scope: "held", Amount: 9, Limits: window(20_001)})
			require.ErrorIs(t, err, budget.ErrExceeded)
			_, err = c.Budget.Refund(ctx, tx, budget.Refund{Scope: "refunded", Seq: 55_000, Amount: 1})
			require.NoError(t, err)
			_, err = c.Budget.Credit(ctx, tx, budget.Credit{Scope: "held", Amount: 5})
			require.NoError(t, err)
			_, err = c.Budget.Usage(ctx, tx, budget.Query{Scope: "refunded", Window: 25 * time.Minute}, budget.Query{Scope: "held", Window: time.Hour})
			return err
		}))
		require.NoError(t, pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
			h, err := c.Holds.Place(ctx, tx, holds.Request{TTL: time.Minute, Lines: []holds.Line{{Scope: "held", Amount: 2, Limits: window(1 << 40)}}})
			require.NoError(t, err)
			_, err = c.Holds.Extend(ctx, tx, holds.Extend{IDs: []string{h.ID}, By: time.Second})
			require.NoError(t, err)
			_, err = c.Holds.Capture(ctx, tx, holds.Capture{IDs: []string{h.ID}, All: true})
			require.NoError(t, err)
			_, err = c.Holds.Refund(ctx, tx, holds.Refund{IDs: []string{h.ID}, All: true})
			require.NoError(t, err)
			claim, err := c.Holds.Claim(ctx, tx, holds.Claim{Key: holds.Key{Type: "k", Value: "v"}, Holder: "ann", TTL: time.Minute})
			require.NoError(t, err)
			_, err = c.Holds.Release(ctx, tx, holds.Release{IDs: []string{claim.ID, "old 7"}})
			require.ErrorIs(t, err, map[bool]error{true: nil, false: holds.ErrState}[err == nil])
			_, err = c.Tokens.Replace(ctx, tx, tokens.Mint{Purpose: "p", Subject: "s9", TTL: time.Minute})
			require.NoError(t, err)
			_, err = c.Tokens.RevokeSubject(ctx, tx, "p", "s9")
			return err
		}))
	}
	report, err := c.Budget.Verify(ctx, pool, budget.VerifyOptions{MaxDifferences: 3})
	require.NoError(t, err)
	require.Empty(t, report.Differences)
	everyCall(t, pool, c)
	_, err = c.Holds.Sweep(ctx, pool, holds.SweepOptions{})
	require.NoError(t, err)
	_, err = c.Budget.Purge(ctx, pool, budget.PurgeOptions{OlderThan: 25 * time.Minute, Scope: "refunded"})
	require.NoError(t, err)
	_, err = c.Tokens.Purge(ctx, pool, tokens.PurgeOptions{OlderThan: time.Second})
	require.NoError(t, err)
	_, err = c.Jobs.Purge(ctx, pool, jobs.PurgeOptions{OlderThan: time.Minute})
	require.NoError(t, err)
	_, err = c.PurgeOperations(ctx, pool, metered.PurgeOptions{OlderThan: time.Minute})
	require.NoError(t, err)
	_, err = c.Holds.Purge(ctx, pool, holds.PurgeOptions{OlderThan: time.Second})
	require.NoError(t, err)
}
