package command_test

import (
	"context"
	"fmt"
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
	"github.com/pgmetered/metered/internal/purge"
	"github.com/pgmetered/metered/jobs"
	"github.com/pgmetered/metered/tokens"
)

// A sequential scan in a cached plan makes a hot table quadratic. These functions turn sequential scans off, and then
// the cost of one makes Postgres compile the plan (jit), for 50 ms a command.
func TestDoTx_ScansNoTableSequentially(t *testing.T) {
	t.Parallel()
	pgtest.OnEachVersion(t)
	for _, level := range isolationLevels {
		t.Run(string(level), func(t *testing.T) {
			t.Parallel()
			pool, c := setUp(t, metered.Config{})
			ctx := t.Context()
			cmd := whole(t, pool, c, "op")
			cmd.IssuedAt = time.Now()
			tx, err := pool.BeginTx(ctx, pgx.TxOptions{IsoLevel: level})
			require.NoError(t, err)
			defer tx.Rollback(context.Background())
			for range 2 { // the second is a replay
				_, err = metered.DoTx(ctx, c, tx, cmd, wholeFunc("op", nil))
				require.NoError(t, err)
			}
			pgtest.Value[int](t, tx, `select deleted from metered.purge_operations(null, now() - interval '1 hour', 100, 1000)`)
			rows, err := tx.Query(ctx, `select relname::text from pg_stat_xact_user_tables where schemaname = 'metered' and seq_scan > 0`)
			require.NoError(t, err)
			scanned, err := pgx.CollectRows(rows, pgx.RowTo[string])
			require.NoError(t, err)
			require.Empty(t, scanned)
			require.NotZero(t, pgtest.Value[int](t, tx, `select sum(idx_scan) from pg_stat_xact_user_tables where schemaname = 'metered'`))
		})
	}
}

// A purge reads the rows that it deletes, once, with a plan from when the table was small, and also while an old
// snapshot keeps the rows that it deleted before.
func TestPurgeOperations_ReadsOnlyRowsThatItDeletes(t *testing.T) {
	t.Parallel()
	pgtest.OnEachVersion(t)
	for _, rows := range []int{0, 30, 300} {
		for _, analysed := range []bool{false, true} {
			t.Run(fmt.Sprintf("%d rows, analysed %v", rows, analysed), func(t *testing.T) {
				t.Parallel()
				pool, ctx := pgtest.Open(t), t.Context()
				conn, err := pool.Acquire(ctx)
				require.NoError(t, err)
				defer conn.Release()
				exec := func(sql string, args ...any) {
					_, err := conn.Exec(ctx, sql, args...)
					require.NoError(t, err)
				}
				record := func(n int, name, age string) {
					exec(`insert into metered.operations (tenant, id, at, fingerprint, result)
						select '', $2 || g, now() - $3::interval + g * interval '1 us', '', '' from generate_series(1, $1::int) g`, n, name, age)
				}
				purge := func(after *time.Time) (deleted int64, last *time.Time) {
					require.NoError(t, conn.QueryRow(ctx, `select deleted, last from metered.purge_operations($1, now() - interval '1 h', 100, 1000)`,
						after).Scan(&deleted, &last))
					return deleted, last
				}
				reads := func() int64 {
					pgtest.FlushStatistics(t, conn)
					return pgtest.Value[int64](t, conn, `select sum(i.idx_tup_read + 1000000 * s.seq_scan)::bigint from pg_stat_user_indexes i
						join pg_stat_user_tables s using (relid) where i.relname = 'operations'`)
				}
				exec(`alter table metered.operations set (autovacuum_enabled = off)`)
				record(rows, "first ", "0")
				if analysed {
					exec(`analyze metered.operations`)
				}
				for range 7 {
					purge(nil)
				}
				record(2000, "old ", "2 h")
				record(5000, "young ", "0")

				old, err := pool.BeginTx(ctx, pgx.TxOptions{IsoLevel: pgx.RepeatableRead})
				require.NoError(t, err)
				defer old.Rollback(context.Background())
				pgtest.Value[int](t, old, `select count(*) from metered.operations`)
				before := reads()
				var total int64
				for deleted, last := purge(nil); deleted > 0; deleted, last = purge(last) {
					total += deleted
				}
				require.EqualValues(t, 2000, total)
				require.LessOrEqual(t, reads()-before, int64(2*2000))
			})
		}
	}
}

// Postgres compiles a statement whose plan looks expensive (jit, on by default), for 10 to 50 ms
// a call. Nothing that a command waits for may look so, however much there is in the tables,
// whether they were analysed or not. The tables are a quarter of what they are to stand for, and so is the cost.
func TestPlans_NoStatementIsCompiled(t *testing.T) {
	t.Parallel()
	pgtest.InCI(t)
	pgtest.OnEachVersion(t)
	template := pgtest.Template{Fill: func(ctx context.Context, pool *pgxpool.Pool) error {
		_, err := metered.Migrate(ctx, pool, metered.MigrateOptions{River: true})
		if err == nil {
			_, err = pool.Exec(ctx, pgtest.BigTablesSQL, pgx.QueryExecModeSimpleProtocol)
		}
		return err
	}}
	for _, analysed := range []bool{false, true} {
		t.Run(map[bool]string{false: "never analysed", true: "analysed"}[analysed], func(t *testing.T) {
			t.Parallel()
			ctx := t.Context()
			owner := pgtest.OpenWith(t, pgtest.Options{Template: &template})
			if analysed {
				_, err := owner.Exec(ctx, "analyze")
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
						set auto_explain.log_analyze = on; set auto_explain.log_level = notice; set jit = on; set jit_above_cost = 25000`, pgx.QueryExecModeSimpleProtocol)
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

// bigCalls makes the calls of an application, and the purges, on the rows of pgtest.BigTablesSQL.
func bigCalls(t *testing.T, pool *pgxpool.Pool, c *metered.Client) {
	ctx := t.Context()
	window := func(max int64) []budget.Limit { return []budget.Limit{budget.PerWindow(max, 20*time.Minute)} }
	for range 2 {
		require.NoError(t, pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
			_, err := c.Budget.Charge(ctx, tx, budget.Charge{Scope: "refunded", Amount: 1, Limits: append(window(1<<40), budget.Lifetime(1<<40))})
			require.NoError(t, err)
			_, err = c.Budget.Charge(ctx, tx, budget.Charge{Scope: "refunded", Amount: 1250, Limits: []budget.Limit{budget.PerWindow(5_000, 25*time.Minute)}})
			require.ErrorIs(t, err, budget.ErrExceeded)
			_, err = c.Budget.Charge(ctx, tx, budget.Charge{Scope: "held", Amount: 9, Limits: window(5_001)})
			require.ErrorIs(t, err, budget.ErrExceeded)
			_, err = c.Budget.Refund(ctx, tx, budget.Refund{Scope: "refunded", Seq: 13_750, Amount: 1})
			require.NoError(t, err)
			_, err = c.Budget.Credit(ctx, tx, budget.Credit{Scope: "held", Amount: 5})
			require.NoError(t, err)
			_, err = c.Budget.Usage(ctx, tx, budget.Query{Scope: "refunded", Window: 25 * time.Minute}, budget.Query{Scope: "held", Window: time.Hour})
			return err
		}))
		require.NoError(t, pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
			h, err := c.Holds.Place(ctx, tx, holds.Placement{TTL: time.Minute, Lines: []holds.Line{{Scope: "held", Amount: 2, Limits: window(1 << 40)}}})
			require.NoError(t, err)
			_, err = c.Holds.Extend(ctx, tx, holds.Extend{IDs: []string{h.ID}, By: time.Second})
			require.NoError(t, err)
			_, err = c.Holds.Capture(ctx, tx, holds.Capture{IDs: []string{h.ID}, All: true})
			require.NoError(t, err)
			_, err = c.Holds.Return(ctx, tx, holds.Return{IDs: []string{h.ID}, All: true})
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
	pgtest.EveryCall(t, pool, c)
	_, err = c.Holds.Sweep(ctx, pool, holds.SweepOptions{})
	require.NoError(t, err)
	_, err = c.Budget.Purge(ctx, pool, budget.PurgeOptions{OlderThan: 25 * time.Minute, Scope: "refunded"})
	require.NoError(t, err)
	_, err = purge.Tokens.Delete(ctx, pool, purge.Options{OlderThan: time.Second})
	require.NoError(t, err)
	_, err = purge.JobKeys.Delete(ctx, pool, purge.Options{OlderThan: time.Minute})
	require.NoError(t, err)
	_, err = purge.Operations.Delete(ctx, pool, purge.Options{OlderThan: time.Minute})
	require.NoError(t, err)
	_, err = purge.Holds.Delete(ctx, pool, purge.Options{OlderThan: time.Second})
	require.NoError(t, err)
}

func TestDo_RoundTrips(t *testing.T) {
	t.Parallel()
	pgtest.OnEachVersion(t)
	owner, _ := setUp(t, metered.Config{})
	pool, w := pgtest.Tap(t, owner, func(config *pgxpool.Config) { config.MaxConns = 2 })
	c := newClient(t, pool, metered.Config{})
	n := 0
	trips := func(change func(*metered.Command), fn metered.Func[any]) int {
		for range 4 { // warm: statements are prepared, and River has notified
			n++
			cmd := whole(t, owner, c, fmt.Sprint(n))
			change(&cmd)
			w.Each(nil)
			_, _ = metered.Do(t.Context(), c, cmd, fn)
		}
		return len(w.Sent())
	}
	as := func(*metered.Command) {}
	keyless := func(ctx context.Context, tx *metered.Tx) (any, error) {
		return tx.Enqueue(ctx, process{Name: "x"}, nil)
	}
	full := func(cmd *metered.Command) { cmd.Charges = []budget.Charge{charge("full", 9, 5)} }
	for what, test := range map[string]struct {
		change func(*metered.Command)
		fn     metered.Func[any]
		want   int
	}{
		"token and charges":                {as, nil, 2},
		"token, a keyless job and charges": {as, keyless, 3},
		"with declared holds": {func(cmd *metered.Command) {
			cmd.Holds = []holds.Placement{{TTL: time.Minute, Lines: []holds.Line{room("a", 1, 99)}}}
			cmd.Claims = []holds.Claim{seat(fmt.Sprint(n), "ann")}
		}, nil, 2},
		"with limits from queries": {func(cmd *metered.Command) {
			ten := budget.Lifetime(0).MaxFrom("select 10")
			cmd.Charges = []budget.Charge{{Scope: fmt.Sprint(n), Amount: 1, Limits: []budget.Limit{ten}}}
			cmd.Holds = []holds.Placement{{TTL: time.Minute, Lines: []holds.Line{{Scope: fmt.Sprint("b", n), Amount: 1, Limits: []budget.Limit{ten}}}}}
		}, nil, 2},
		"with a limit from a query that was not answered before": {func(cmd *metered.Command) {
			cmd.Charges = []budget.Charge{{Scope: fmt.Sprint(n), Amount: 1, Limits: []budget.Limit{budget.Lifetime(0).MaxFrom("select 10 + $1::int", n)}}}
		}, nil, 3},
		"with a refusal to record":     {func(cmd *metered.Command) { cmd.RecordRefusal = true }, nil, 2},
		"one that is recorded":         {func(cmd *metered.Command) { full(cmd); cmd.RecordRefusal = true }, nil, 4},
		"the same with early release":  {func(cmd *metered.Command) { cmd.EarlyRelease = true }, keyless, 3},
		"early, and with its position": {func(cmd *metered.Command) { cmd.EarlyRelease, cmd.LSN = true, true }, keyless, 3},
		"not early, with its position": {func(cmd *metered.Command) { cmd.LSN = true }, keyless, 3},
		"and a statement of the function": {as, func(ctx context.Context, tx *metered.Tx) (any, error) {
			_, _ = tx.Exec(ctx, "select 1")
			return keyless(ctx, tx)
		}, 4},
		"token, a keyed job and charges": {as, func(ctx context.Context, tx *metered.Tx) (any, error) {
			return tx.Enqueue(ctx, process{Name: "x"}, &jobs.Options{Key: fmt.Sprint(n)})
		}, 4},
		"a replay, and the rollback":  {func(cmd *metered.Command) { *cmd = metered.Command{ID: "replayed", Input: 1} }, nil, 2},
		"a replay with its position":  {func(cmd *metered.Command) { *cmd = metered.Command{ID: "replayed", Input: 1, LSN: true} }, nil, 3},
		"a refusal, and the rollback": {full, nil, 2},
		"a refusal by the last flush": {as, func(_ context.Context, tx *metered.Tx) (any, error) { return nil, tx.Charge(charge("full", 9, 5)) }, 5}, // pgx prepares a failed batch again: 2 more
		"with sticky charges":         {func(cmd *metered.Command) { cmd.Sticky = tries }, nil, 6},
	} {
		require.Equal(t, test.want, trips(test.change, test.fn), what)
	}
}

func TestSession_WithoutAFunctionIsTwoRoundTrips(t *testing.T) {
	t.Parallel()
	owner, _ := setUp(t, metered.Config{})
	pool, w := pgtest.Tap(t, owner, nil)
	c := newClient(t, pool, metered.Config{})
	var trips [2]int
	for n := range 4 { // warm
		w.Each(nil)
		s, err := metered.Open[any](t.Context(), c, metered.Reservation{ID: fmt.Sprint(n), TTL: time.Hour, Lines: []holds.Line{room("seat", 5, 99)}})
		require.NoError(t, err)
		trips[0] = len(w.Sent())
		w.Each(nil)
		out, err := s.Settle(t.Context(), metered.Cost{Lines: []holds.Line{{Scope: "seat", Amount: 3}}}, nil)
		require.NoError(t, err)
		require.EqualValues(t, 3, out.Holds[0].Lines[0].Captured)
		trips[1] = len(w.Sent())
	}
	require.Equal(t, [2]int{1, 1}, trips)
	used, err := c.Budget.Usage(t.Context(), owner, budget.Query{Scope: "seat"})
	require.NoError(t, err)
	require.EqualValues(t, 12, used[0].Used)
	require.Zero(t, used[0].Held)
}

// Subscribers take a flush more, the position does not.
func TestDo_PositionTakesNoRoundTripBehindSubscribersEither(t *testing.T) {
	t.Parallel()
	pgtest.OnEachVersion(t)
	owner, _ := setUp(t, metered.Config{})
	pool, w := pgtest.Tap(t, owner, nil)
	c := newClient(t, pool, metered.Config{Holds: holds.Config{Subscribers: []holds.Subscriber{
		func(context.Context, pgx.Tx, holds.Transition) error { return nil },
	}}})
	trips := func(id string, early, asked bool) (n int) {
		for i := range 3 { // warm
			w.Each(nil)
			out, err := metered.Do(t.Context(), c, metered.Command{ID: fmt.Sprint(id, i), Input: 1, EarlyRelease: early, LSN: asked},
				pgtest.Placing(holds.Placement{TTL: time.Minute, Lines: []holds.Line{room("seat", 1, 99)}}))
			require.NoError(t, err)
			require.Equal(t, asked, out.LSN > 0)
			n = len(w.Sent())
		}
		return n
	}
	require.Equal(t, trips("a", false, false), trips("b", false, true))
	require.Equal(t, trips("c", true, false), trips("d", true, true))
}
