package holds_test

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/ledger"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/internal/purge"
)

// crowd puts so many holds of a unit on a scope, at once, of which those that are not
// open have been released.
func (f *fixture) crowd(scope string, n int, due time.Duration, open bool) {
	f.Helper()
	key := f.ledger.LockKey(scope)
	for _, sql := range []string{
		`with h as (
			insert into metered.holds (placed_at, deadline, due, ceiling, version, state, tenant, id, holder, fingerprint, keys)
			select $4::timestamptz, $5::timestamptz, $5, $5, 1, 'h', 'crowd', $1::text || '/' || $5::text || '/' || g, '', '\x00', array[$2::bigint] from generate_series(1, $3::int) g
			returning no)
		insert into metered.hold_lines (hold, key, amount, open, due, scope, opened_seq) select no, $2::bigint, 1, 1, $5, $1, 1 from h`,
		`insert into metered.ledger (seq, amount, at, spent, refunded, credited, held, epoch, kind, scope, next_due)
		select coalesce(max(seq), 0) + 1, $3::int, $4::timestamptz, coalesce(max(spent), 0), 0, 0,
			coalesce((select held from metered.ledger where scope = $1 order by seq desc limit 1), 0) + $3::int, 0, 'h', $1::text,
			least($5::timestamptz, (select next_due from metered.ledger where scope = $1 order by seq desc limit 1))
		from metered.ledger where scope = $1 and $2::bigint is not null`,
	} {
		execute(f, f.pool, sql, scope, key, n, f.clock.Now(), f.clock.Now().Add(due))
	}
	if !open {
		execute(f, f.pool, `update metered.hold_lines l set open = 0 from metered.holds h where h.no = l.hold and h.tenant = 'crowd'`)
		execute(f, f.pool, `update metered.holds set state = 'r', pending = false, ended_at = $1, version = 2 where tenant = 'crowd'`, f.clock.Now())
		execute(f, f.pool, `insert into metered.ledger (seq, amount, at, spent, refunded, credited, held, epoch, kind, scope, next_due)
			select seq + 1, $2::bigint, at, spent, refunded, credited, held - $2::bigint, epoch, 'l', scope, next_due
			from metered.ledger where scope = $1 order by seq desc limit 1`, scope, n)
	}
}

// buffers is how many pages a statement touches, in all that it runs.
func buffers(t *testing.T, conn *pgxpool.Conn, sql string, args ...any) int {
	t.Helper()
	var plans []struct {
		Plan struct {
			Hit  int `json:"Shared Hit Blocks"`
			Read int `json:"Shared Read Blocks"`
		}
	}
	var raw []byte
	require.NoError(t, conn.QueryRow(t.Context(), `explain (analyze, buffers, format json) `+sql, args...).Scan(&raw))
	require.NoError(t, json.Unmarshal(raw, &plans))
	return plans[0].Plan.Hit + plans[0].Plan.Read
}

// A call's reads do not grow with the number of open holds, nor of ended holds while a long transaction keeps their
// rows, with plans made while there were few.
func TestPlans_ReadNoMoreTheMoreHoldsThereAre(t *testing.T) {
	t.Parallel()
	pgtest.InCI(t)
	pgtest.OnEachVersion(t)
	const analyse = `analyze metered.holds, metered.hold_lines, metered.ledger, metered.hold_events`
	many, most := pgtest.Size(8_000, 20_000), 100_000 // the pages of 8,000 lines are 100 and more
	type plan struct {
		few           int  // when the first plans are made
		analysed      bool // then
		many          int
		analysedAgain bool
	}
	for _, c := range pgtest.Size([]plan{{0, false, many, true}, {30, true, many, false}, {3000, false, many, false}}, []plan{
		{0, false, most, false}, {0, false, most, true}, {0, true, many, false}, {30, false, many, false}, {30, true, many, false},
		{300, false, many, false}, {300, true, many, false}, {3000, false, many, false}, {3000, true, many, false},
	}) {
		for _, kind := range []string{"open", "ended"} {
			t.Run(fmt.Sprintf("%s, %+v", kind, c), func(t *testing.T) {
				t.Parallel()
				f := setUp(t, holds.Config{})
				for _, table := range []string{"ledger", "holds", "hold_lines", "hold_events"} {
					execute(t, f.pool, `alter table metered.`+table+` set (autovacuum_enabled = off)`)
				}
				if c.few > 0 {
					f.crowd("room", c.few, time.Hour, true)
				}
				if c.analysed {
					execute(t, f.pool, analyse)
				}
				conn, err := f.pool.Acquire(t.Context())
				require.NoError(t, err)
				defer conn.Release()
				f.mustPlace(holds.Placement{ID: "stays", TTL: time.Hour, Lines: []holds.Line{capacity("room", 1, 1_000_000)}})
				few := f.measure(conn) // plans are made and kept
				old := begin(t, f.pool, pgx.RepeatableRead)
				_, err = f.book.List(t.Context(), old, holds.Filter{})
				require.NoError(t, err)
				if kind == "open" {
					f.crowd("room", c.many, time.Hour, true)
				} else {
					f.crowd("room", c.many, 30*time.Minute, false)
				}
				if c.analysedAgain {
					execute(t, f.pool, analyse)
				}
				again := f.measure(conn) // with the plans of before
				fresh, err := f.pool.Acquire(t.Context())
				require.NoError(t, err)
				defer fresh.Release()
				anew := f.measure(fresh)
				for name, n := range few {
					t.Logf("%s: %d pages with few holds, %d and %d with many", name, n, again[name], anew[name])
				}
				for name, n := range few {
					if kind == "ended" && (name == "refused" || name == "usage") {
						continue // they look for the first due hold, and no call ended these, which would have moved next_due
					}
					require.LessOrEqual(t, again[name], 2*n+20, name)
					require.LessOrEqual(t, anew[name], 2*n+20, name)
				}
			})
		}
	}
}

// Usage and refusals name when the first hold falls due, and look for it no further back than the last writes did, with
// any number of ended holds that a long transaction keeps. The short form finds a look at all (_first_due without since).
func TestPlans_TheFirstDueIsFoundAtOnce(t *testing.T) {
	t.Parallel()
	pgtest.OnEachVersion(t)
	f := setUp(t, holds.Config{})
	for _, table := range []string{"ledger", "holds", "hold_lines", "hold_events"} {
		execute(t, f.pool, `alter table metered.`+table+` set (autovacuum_enabled = off)`)
	}
	old := begin(t, f.pool, pgx.RepeatableRead)
	_, err := f.book.List(t.Context(), old, holds.Filter{})
	require.NoError(t, err)
	first := f.clock.Now()
	var open []string
	for i := range pgtest.Size(450, 2000) {
		h := f.mustPlace(holds.Placement{TTL: time.Hour, Lines: []holds.Line{capacity("room", 1, 1_000_000)}})
		if open = append(open, h.ID); len(open) > 5 {
			if i%2 == 0 {
				_, err = f.release(open[0])
			} else {
				_, err = f.capture(holds.Capture{IDs: open[:1], All: true})
			}
			require.NoError(t, err)
			open = open[1:]
		}
		if i%9 == 0 { // after a release and a capture in turns
			require.False(t, queryRow[bool](t, f.pool, `select exists (select from metered.hold_lines l where l.scope = 'room' and l.open > 0
				and l.due < (select next_due from metered.ledger where scope = 'room' order by seq desc limit 1))`), "next_due is too late")
		}
		f.clock.Advance(100 * time.Millisecond)
	}
	conn, err := f.pool.Acquire(t.Context())
	require.NoError(t, err)
	defer conn.Release()
	refused, err := placeHold(f.book, holds.Placement{TTL: time.Minute, Lines: []holds.Line{capacity("room", 1, 0)}})
	require.NoError(t, err)
	for round := range 7 { // until plans are made
		all := buffers(t, conn, `select metered._first_due('room', $1, metered.clock())`, first)
		usage := buffers(t, conn, `select * from metered.usage('{room}', '{0}', null, true)`)
		refusal := buffers(t, conn, strings.TrimSpace(refused.SQL), refused.Args(ledger.Sending{WaitMS: 5000})...)
		if round == 6 {
			t.Logf("looking at all that ended: %d pages; usage: %d, a refusal: %d", all, usage, refusal)
			require.Greater(t, all, pgtest.Size(12, 25))
			require.Less(t, usage, 20)
			require.Less(t, refusal, pgtest.Size(24, 30))
		}
	}
	f.verify()
}

// A batch of a sweep, and one of a purge, cost the same however many are due, or to be
// deleted, with plans of when there were few.
func TestPlans_ABatchReadsNoMoreTheMoreThereAre(t *testing.T) {
	t.Parallel()
	pgtest.InCI(t)
	pgtest.OnEachVersion(t)
	for _, rows := range pgtest.Size([]int{0, 300}, []int{0, 30, 300, 3000}) {
		for _, analysed := range []bool{false, true} {
			t.Run(fmt.Sprintf("%d rows, analysed %v", rows, analysed), func(t *testing.T) {
				t.Parallel()
				f := setUp(t, holds.Config{})
				conn, err := f.pool.Acquire(t.Context())
				require.NoError(t, err)
				defer conn.Release()
				for _, table := range []string{"ledger", "holds", "hold_lines", "hold_events"} {
					execute(t, f.pool, `alter table metered.`+table+` set (autovacuum_enabled = off)`)
				}
				batch := func() (sweep, purge int) {
					f.clock.Advance(time.Hour)
					return buffers(t, conn, `select * from metered.sweep_holds('-infinity', 0, 10, false, null)`),
						buffers(t, conn, `select * from metered.purge_holds('-infinity', $1, 10, 1000)`, f.clock.Now().Add(-time.Minute))
				}
				if rows > 0 {
					f.crowd("room", rows, time.Minute, true)
				}
				if analysed {
					execute(t, f.pool, `analyze metered.holds, metered.hold_lines, metered.ledger, metered.hold_events`)
				}
				for range 7 {
					batch()
				}
				f.crowd("room", 300, time.Minute, true)
				batch() // frees a sum
				fewDue, fewEnded := batch()
				f.crowd("other", pgtest.Size(4_000, 10_000), time.Minute, false) // with the rest of the few
				f.crowd("room", pgtest.Size(15_000, 50_000), time.Minute, true)
				manyDue, manyEnded := batch()
				t.Logf("a sweep: %d pages with few due, %d with 50,000; a purge: %d with few ended, %d with 10,000", fewDue, manyDue, fewEnded, manyEnded)
				require.LessOrEqual(t, manyDue, 2*fewDue+200)
				require.LessOrEqual(t, manyEnded, 2*fewEnded+20)
			})
		}
	}
}

// measure is the pages that each call touches once its plans are those that are kept: the least of three, since one
// call in about 16 moves next_due past ended holds.
func (f *fixture) measure(conn *pgxpool.Conn) map[string]int {
	least := map[string]int{}
	pages := map[string]int{}
	// The clock moves on so that each round finds next_due passed, by its own times.
	run := func(name string, p *holdsCall, err error) {
		f.Helper()
		require.NoError(f, err)
		pages[name] = buffers(f.T, conn, strings.TrimSpace(p.SQL), p.Args(ledger.Sending{WaitMS: 5000})...)
	}
	for round := range 9 {
		f.clock.Advance(11 * time.Second)
		pages["locks of a command"] = buffers(f.T, conn, `select metered.lock_all('{1}', '{2}', '{room,none}', array[('', '{stays}', '{null}', '')]::metered.hold_ids[], 1000)`)
		lines := []holds.Line{capacity("room", 1, 1_000_000)}
		r := holds.Placement{ID: fmt.Sprint("h", f.clock.Now()), TTL: 30 * time.Minute, Lines: lines}
		p, err := placeHold(f.book, r)
		run("place", p, err)
		p, err = placeHold(f.book, r)
		run("place again", p, err)
		p, err = captureHolds(f.book, holds.Capture{IDs: []string{r.ID}, Lines: []holds.Line{{Scope: "room", Amount: 1}}, Keep: true})
		run("capture", p, err)
		p, err = releaseHolds(f.book, holds.Release{IDs: []string{r.ID}})
		run("release", p, err)
		c, err := prepareCharges(f.ledger, budget.Charge{Scope: "room", Amount: 1, Limits: []budget.Limit{budget.Lifetime(1_000_000), budget.PerWindow(1_000_000, time.Hour)}})
		require.NoError(f, err)
		pages["charge"] = buffers(f.T, conn, `select metered.charge($1::metered.new_charge[], $2::interval, $3::int, $4::bool)`,
			ledger.Charges(c.Charges), c.Tolerance, 5000, c.Standing)
		pages["get"] = buffers(f.T, conn, `select metered.hold_json(1, metered.clock())`)
		p, err = placeHold(f.book, holds.Placement{ID: "refused", TTL: time.Minute, Lines: []holds.Line{capacity("room", 1, 0)}})
		run("refused", p, err)
		pages["usage"] = buffers(f.T, conn, `select * from metered.usage('{room}', '{0}', null, true)`)
		for name, n := range pages {
			if round == 6 || round > 6 && n < least[name] {
				least[name] = n
			}
		}
	}
	return least
}

// Every function of holds, on tables that nobody analysed, with all its statements'
// plans looked at: no sequential scan, and nothing compiled.
func TestPlans_ScanNoTableAndCompileNothing(t *testing.T) {
	t.Parallel()
	pgtest.InCI(t)
	pgtest.OnEachVersion(t)
	var mu sync.Mutex
	var plans []string
	pool := pgtest.OpenWith(t, pgtest.Options{Config: func(c *pgxpool.Config) {
		c.ConnConfig.OnNotice = func(_ *pgconn.PgConn, n *pgconn.Notice) {
			mu.Lock()
			defer mu.Unlock()
			plans = append(plans, n.Message)
		}
		c.ConnConfig.RuntimeParams["client_min_messages"] = "log"
		c.AfterConnect = func(ctx context.Context, conn *pgx.Conn) error {
			_, err := conn.Exec(ctx, `load 'auto_explain'`)
			if err != nil {
				return nil // where it is not installed, only the statistics are looked at
			}
			_, err = conn.Exec(ctx, `set auto_explain.log_min_duration = 0; set auto_explain.log_nested_statements = on;
				set auto_explain.log_analyze = on; set auto_explain.log_timing = off; set jit = on`)
			return err
		}
	}})
	f := on(t, pool, holds.Config{Notify: true}, pgtest.SetClock(t, pool, noon))
	for _, table := range []string{"ledger", "holds", "hold_lines", "hold_events", "refund_sum", "holds_horizon"} {
		execute(t, pool, `alter table metered.`+table+` set (autovacuum_enabled = off)`)
	}
	before := seqScans(t, pool)
	for round := range 7 {
		f.everyFunction(round)
		_, err := f.purge()
		require.NoError(t, err)
		if round == 2 {
			f.crowd("a", 3000, time.Hour, true) // plans made from here on see many rows
		}
	}
	require.Equal(t, before, seqScans(t, pool))
	mu.Lock()
	defer mu.Unlock()
	looked := 0
	for _, plan := range plans {
		if !strings.Contains(plan, "metered.") || strings.Contains(plan, "crowd") { // the functions' own statements
			continue
		}
		looked++
		require.NotContains(t, plan, "JIT:")
		require.NotContains(t, plan, "Seq Scan")
	}
	t.Logf("%d of %d plans", looked, len(plans))
	if len(plans) > 0 {
		require.Greater(t, looked, 1000)
	}
}

func seqScans(t *testing.T, pool *pgxpool.Pool) (n int64) {
	pgtest.FlushStatistics(t, pool)
	return queryRow[int64](t, pool, `select sum(seq_scan)::bigint from pg_stat_user_tables where schemaname = 'metered'
		and relname in ('ledger', 'refund_sum', 'holds_horizon')`)
}

// everyFunction makes each call of a book, but Purge.
func (f *fixture) everyFunction(round int) {
	f.Helper()
	id := func(name string) string { return fmt.Sprint(name, round) }
	place := func(name string, ttl time.Duration) holds.Hold {
		return f.mustPlace(holds.Placement{ID: id(name), TTL: ttl, Lines: []holds.Line{capacity("a", 1, 9999), capacity("b", 1, 9999)}})
	}
	place("captured", time.Hour)
	place("released", time.Hour)
	expired := place("expired", time.Minute)
	place("swept", time.Minute)
	place("seen through", time.Minute)
	_, err := f.capture(holds.Capture{IDs: []string{id("captured")}, Over: holds.OverIfFits, Lines: []holds.Line{capacity("a", 2, 9999)}})
	require.NoError(f, err)
	_, err = do(f, refund(f, id("captured")))
	require.NoError(f, err)
	place("given up", time.Hour)
	_, err = f.capture(holds.Capture{IDs: []string{id("given up")}, All: true})
	require.NoError(f, err)
	_, err = do(f, func(ctx context.Context, tx pgx.Tx) ([]holds.Hold, error) {
		return f.book.Release(ctx, tx, holds.Release{IDs: []string{id("given up")}, Captured: true})
	})
	require.NoError(f, err)
	_, err = f.extend(time.Minute, id("released"))
	require.NoError(f, err)
	_, err = f.release(id("released"))
	require.NoError(f, err)
	_, err = f.claim(holds.Claim{Key: holds.Key{Type: "t", Value: id("v")}, Holder: "ann"})
	require.NoError(f, err)
	f.clock.Advance(time.Minute)
	_, _, err = f.expire(holds.Expire{ID: expired.ID, Deadline: expired.Deadline})
	require.NoError(f, err)
	place("sees through", time.Hour)
	_, err = f.book.Sweep(f.Context(), f.pool, holds.SweepOptions{})
	require.NoError(f, err)
	_, err = f.place(holds.Placement{ID: id("refused"), Lines: []holds.Line{capacity("a", 1, 0)}})
	require.ErrorIs(f, err, budget.ErrExceeded)
	f.usage("a")
	f.get(id("captured"))
	require.NoError(f, pgx.BeginFunc(f.Context(), f.pool, func(tx pgx.Tx) error { return f.ledger.Lock(f.Context(), tx, "a", "b") }))
	_, err = f.pool.Exec(f.Context(), `select metered.lock_all('{1}', '{2}', '{a,b}', array[('', array[$1], '{null}', '')]::metered.hold_ids[], 1000)`, id("captured"))
	require.NoError(f, err)
	_, err = f.book.List(f.Context(), f.pool, holds.Filter{Scope: "a", Max: 1})
	require.NoError(f, err)
	require.NotEmpty(f, f.due(holds.DueFilter{ScopePrefix: "a"}, 0))
	_, err = f.book.History(f.Context(), f.pool, "", id("captured"), "")
	require.NoError(f, err)
	claimed, err := f.book.Claimed(f.Context(), f.pool, "", holds.Key{Type: "t", Value: id("v")})
	require.NoError(f, err)
	require.Empty(f, claimed)
	f.clock.Advance(time.Minute)
}

func (f *fixture) purge() (int64, error) {
	return purge.Holds.Delete(f.Context(), f.pool, purge.Options{OlderThan: time.Second})
}

func (f *fixture) expire(e holds.Expire) (h holds.Hold, ended bool, err error) {
	f.Helper()
	err = pgx.BeginFunc(f.Context(), f.pool, func(tx pgx.Tx) (err error) {
		h, ended, err = f.book.Expire(f.Context(), tx, e)
		return err
	})
	return h, ended, err
}
