package holds_test

import (
	"context"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/bounds"
	"github.com/pgmetered/metered/internal/fault"
	"github.com/pgmetered/metered/internal/pgtest"
)

// TestMain sets how many random histories are tried in each half of the test.
func TestMain(m *testing.M) {
	pgtest.Histories(40, 400)
	os.Exit(m.Run())
}

// Random histories of a few scopes and holds agree with the model in every answer, with steps of the clock in both
// directions, of one scope's alone and their repair, and savepoints that are rolled back. Afterwards the ledger
// verifies, each scope holds the sum of its open lines, and each hold agrees with its history.
func TestHolds_AgreeWithTheModel(t *testing.T) {
	t.Parallel()
	pgtest.OnEachVersion(t)
	for _, half := range []string{"one half", "other half"} {
		t.Run(half, func(t *testing.T) {
			t.Parallel()
			f := setUp(t, modelConfig)
			conn, err := f.pool.Acquire(t.Context())
			require.NoError(t, err)
			defer conn.Release()
			rapid.Check(t, func(rt *rapid.T) { newHistory(rt, f, conn).run() })
			f.verify()
			t.Logf("%v", outcomes.seen())
		})
	}
}

const modelLifetime = 2 * time.Minute

var (
	modelConfig   = holds.Config{MaxTTL: time.Minute, MaxLifetime: modelLifetime}
	modelWindows  = []time.Duration{0, 10 * time.Second, time.Minute}
	historySerial atomic.Int64
)

// history drives a book and its model side by side. Each has a tenant and scopes of
// its own.
type history struct {
	*rapid.T
	f       *fixture
	conn    *pgxpool.Conn
	tx      pgx.Tx
	now     time.Time
	m       *model
	tenant  string
	scopes  []string
	name    string // of the call
	aborted bool   // tx is
}

func newHistory(rt *rapid.T, f *fixture, conn *pgxpool.Conn) *history {
	h := &history{T: rt, f: f, conn: conn, tx: autocommit{conn: conn}, m: &model{scopes: map[string]mScope{}},
		tenant: fmt.Sprint(historySerial.Add(1))}
	for _, name := range []string{"a", "b", "c"} {
		h.scopes = append(h.scopes, h.tenant+"/"+name)
	}
	h.set(noon)
	_, err := conn.Exec(f.Context(), "rollback") // a failed history may have left a transaction open
	require.NoError(rt, err)
	return h
}

func (h *history) run() {
	names := []string{"place", "place", "place", "claim", "claim", "charge", "capture", "capture", "capture", "release", "extend",
		"extend", "refund", "refund", "expire", "sweep", "advance", "advance", "advance", "step back", "run ahead", "repair", "savepoint", "savepoint"}
	h.act("place")
	for range h.int("length", 4, 24) {
		h.act(rapid.SampledFrom(names).Draw(h.T, "act"))
	}
	h.check()
	h.set(h.latest().Add(time.Minute))
	h.sweep()
	for _, hold := range h.check() {
		rebuilds(h, h.ctx(), h.f.book, h.conn, hold)
	}
	for _, scope := range h.scopes {
		held, _ := h.m.held(scope, h.now)
		require.Zero(h, held)
		report, err := h.f.ledger.Verify(h.ctx(), h.f.pool, budget.VerifyOptions{Scope: scope})
		require.NoError(h, err)
		require.Empty(h, report.Differences)
	}
}

func (h *history) act(name string) {
	h.name = name
	map[string]func(){
		"place": h.place, "claim": h.claim, "charge": h.charge, "capture": h.capture, "release": h.release, "extend": h.extend,
		"refund": h.refund, "expire": h.expire, "sweep": h.sweep, "savepoint": h.savepoint,
		"advance": h.advance, "run ahead": h.runAhead, "repair": h.repair,
		"step back": func() { h.set(h.now.Add(-h.duration("step back", 1, 5, 30, 90))) },
	}[name]()
	if !h.aborted && h.once("usage", 2) { // sometimes only: a later step shows the same
		h.compareUsage()
	}
}

// advance moves the clock on: by some seconds, or to when a hold is due, and sometimes
// a microsecond beside.
func (h *history) advance() {
	if len(h.m.holds) > 0 && h.once("to a hold's due", 2) {
		hold := h.m.holds[h.int("hold", 0, len(h.m.holds)-1)]
		if due := hold.due.Add(time.Duration(h.int("edge", -1, 1)) * time.Microsecond); due.After(h.now) {
			h.set(due)
			return
		}
	}
	h.set(h.now.Add(h.duration("advance", 1, 5, 10, 15, 60)))
}

// savepoint makes some calls in a transaction, or a savepoint of one, that is kept or
// rolled back.
func (h *history) savepoint() {
	sub, err := h.tx.Begin(h.ctx())
	require.NoError(h, err)
	outer, before := h.tx, h.m.clone()
	h.tx = sub
	names := []string{"place", "place", "claim", "charge", "capture", "release", "extend", "refund", "expire", "advance", "step back", "run ahead", "repair", "savepoint"}
	for range rapid.IntRange(1, 4).Draw(h.T, "calls") {
		if h.act(rapid.SampledFrom(names).Draw(h.T, "call")); h.aborted {
			break
		}
	}
	if h.aborted || rapid.Bool().Draw(h.T, "roll back") {
		require.NoError(h, sub.Rollback(h.ctx()))
		h.m, h.aborted = before, false
	} else {
		require.NoError(h, sub.Commit(h.ctx()))
	}
	h.tx = outer
}

// check compares all holds with the model.
func (h *history) check() []holds.Hold {
	list, err := h.f.book.List(h.ctx(), h.conn, holds.Filter{Tenant: h.tenant, Max: bounds.MaxPage})
	require.NoError(h, err)
	slices.Reverse(list.Holds)
	var want []holds.Hold
	for i := range h.m.holds {
		want = append(want, h.m.holds[i].view(h.now))
	}
	require.Equal(h, want, list.Holds)
	h.checkDue()
	checkSums(h, h.ctx(), h.conn, h.tenant+"/%")
	return list.Holds
}

// checkDue compares the due holds with the model, a page at a time.
func (h *history) checkDue() {
	f := holds.DueFilter{Tenant: h.tenant, ScopePrefix: rapid.SampledFrom([]string{"", h.tenant + "/", h.scopes[1], h.scopes[2] + "x"}).Draw(h.T, "prefix"),
		State: rapid.SampledFrom([]holds.State{"", holds.Held, holds.Expired}).Draw(h.T, "state"), Max: int(h.int("page", 1, 3))}
	if h.once("before", 3) {
		f.Before = h.now.Add(h.duration("before", -5, 0, 5, 30))
	}
	var want []string
	for _, i := range h.m.byDue() {
		hold := &h.m.holds[i]
		view := hold.view(h.now)
		scoped := slices.ContainsFunc(hold.lines, func(l mLine) bool { return strings.HasPrefix(l.scope, f.ScopePrefix) })
		// A sweep sees none that ended by a clock that was ahead, until it is due again.
		seen := f.State == "" || view.State == f.State && (f.State == holds.Held || !hold.due.After(h.now))
		if hold.pending && scoped && seen && (f.Before.IsZero() || hold.due.Before(f.Before)) {
			want = append(want, hold.id)
		}
	}
	var got []string
	for {
		page, err := h.f.book.Due(h.ctx(), h.conn, f)
		require.NoError(h, err)
		require.LessOrEqual(h, len(page.Holds), f.Max)
		for _, hold := range page.Holds {
			require.Equal(h, h.m.find(hold.ID).view(h.now), hold)
			got = append(got, hold.ID)
		}
		if f.After = page.Next; page.Next == "" {
			break
		}
	}
	require.Equal(h, want, got)
}

// byDue are the holds by when they are due.
func (m *model) byDue() []int {
	order := make([]int, len(m.holds))
	for i := range order {
		order[i] = i
	}
	slices.SortStableFunc(order, func(a, b int) int { return m.holds[a].due.Compare(m.holds[b].due) })
	return order
}

func (h *history) compareUsage() {
	var queries []budget.Query
	var want, got []budget.Usage
	for _, scope := range h.scopes {
		for _, w := range modelWindows {
			q := budget.Query{Scope: scope, Window: w}
			u := budget.Usage{Query: q, Used: h.m.used(scope, h.now, w)}
			var due time.Time
			if u.Held, due = h.m.held(scope, h.now); u.Held > 0 {
				u.HoldDue = due.Sub(h.now)
			}
			queries, want = append(queries, q), append(want, u)
		}
	}
	usages, err := h.f.ledger.Usage(h.ctx(), h.tx, queries...)
	require.NoError(h, err)
	for _, u := range usages {
		got = append(got, budget.Usage{Query: u.Query, Used: u.Used, Held: u.Held, HoldDue: u.HoldDue})
	}
	require.Equal(h, want, got)
	scope, from, edge := h.scope(), noon.Add(-time.Hour), h.now.Add(-h.duration("edge", 0, 1, 5, 10, 30))
	u, err := h.f.ledger.UsageBetween(h.ctx(), h.tx, scope, from, edge)
	require.NoError(h, err)
	require.Equal(h, h.m.between(scope, h.now, from, edge), u.Charged, "%s until %v", scope, edge)
}

func (h *history) ctx() context.Context { return h.f.Context() }

func (h *history) set(now time.Time) {
	h.now = now
	h.f.clock.Set(now)
}

// latest is after all that is held is due.
func (h *history) latest() time.Time {
	at := h.now
	for _, hold := range h.m.holds {
		at = later(at, hold.due)
	}
	return at
}

// duration is one of so many seconds, or a microsecond more or less.
func (h *history) duration(label string, seconds ...int) time.Duration {
	return time.Duration(rapid.SampledFrom(seconds).Draw(h.T, label))*time.Second +
		time.Duration(rapid.SampledFrom([]int{0, 0, 0, 0, -1, 1}).Draw(h.T, "edge"))*time.Microsecond
}

// tally counts the answers of each call.
type tally struct{ sync.Map }

var outcomes tally

func (c *tally) count(call string, err error) {
	n, _ := c.LoadOrStore(call+": "+fmt.Sprintf("%T %s", err, fault.Code(err)), new(atomic.Int64))
	n.(*atomic.Int64).Add(1)
}

func (c *tally) seen() (all []string) {
	c.Range(func(k, n any) bool {
		all = append(all, fmt.Sprintf("%s %d", k, n.(*atomic.Int64).Load()))
		return true
	})
	slices.Sort(all)
	return all
}

// autocommit is a transaction per statement, which saves two round trips.
type autocommit struct {
	pgx.Tx
	conn *pgxpool.Conn
}

func (a autocommit) Conn() *pgx.Conn { return a.conn.Conn() }

func (a autocommit) Begin(ctx context.Context) (pgx.Tx, error) { return a.conn.Begin(ctx) }

func (a autocommit) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	return a.conn.QueryRow(ctx, sql, args...)
}

func (a autocommit) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	return a.conn.Query(ctx, sql, args...)
}
