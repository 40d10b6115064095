package leases_test

import (
	"fmt"
	"os"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/ledger"
	"github.com/pgmetered/metered/internal/lend"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/leases"
)

// TestMain lets the test binary be a process of its own (see child), and sets how many random histories are tried.
func TestMain(m *testing.M) {
	if conn := os.Getenv(childOf); conn != "" {
		serve(conn)
		return
	}
	pgtest.Histories(40, 80)
	os.Exit(m.Run())
}

var prepareCharges = lend.Borrow[interface {
	Charges(l *budget.Ledger, charges ...budget.Charge) (*ledger.ChargeCall[budget.Receipt], error)
}]("budget").Charges

// use is one use of the scope: a charge, a capture, or a spend from a lease.
type use struct {
	amount  int64
	at      time.Time
	counted time.Time // the entry's time: for a spend, when its lease was settled. Zero until then
	seq     int64     // the entry that a refund names: for a spend, its lease's
	lease   int64
}

type modelLease struct {
	held
	mode  string
	ends  time.Time
	next  int64
	spent int64
}

// history is a scope in which every charge, hold and lease has the same limits, and the model's state of it.
type history struct {
	*rapid.T
	*fixture
	book   *holds.Book
	pool   *leases.Pool
	clock  *pgtest.Clock
	scope  string
	limits []budget.Limit
	now    time.Time
	last   time.Time // of the chain

	uses     []*use
	leases   []*modelLease // open
	holds    map[string]int64
	credited int64
	refunded int64
	serial   int
	rows     int // spends that were let in, to see that there are some
}

var historyScope, historySpends atomic.Int64

// Random histories of charges, leases, holds, refunds, credits, purges and clocks, at three levels. Use in any window
// never exceeds the limit, each unit taken at the time at which it was used. Usage is right at each step, and Verify
// finds nothing.
func TestHistories_NeverExceedALimitInAnyWindow(t *testing.T) {
	t.Parallel()
	f := setUp(t)
	clock := pgtest.SetClock(t, f.db, pgtest.Tomorrow(9))
	book, err := holds.New(f.ledger, holds.Config{})
	require.NoError(t, err)
	pool, err := leases.New(f.db, f.ledger, leases.Config{Rules: []leases.Rule{{}}, Owner: owner})
	require.NoError(t, err)
	defer func() { _ = pool.Close(t.Context()) }()
	rapid.Check(t, func(rt *rapid.T) {
		h := &history{T: rt, fixture: f, book: book, pool: pool, clock: clock, holds: map[string]int64{}, now: pgtest.Tomorrow(9)}
		h.scope = fmt.Sprint("scope ", historyScope.Add(1))
		h.limits = []budget.Limit{budget.PerWindow(30, 5*time.Second), budget.PerWindow(60, 20*time.Second), budget.Lifetime(200)}
		clock.Set(h.now)
		acts := []func(){h.open, h.open, h.spend, h.spend, h.spend, h.spend, h.charge, h.charge, h.both, h.settle, h.settle, h.place,
			h.endHold, h.refund, h.credit, h.advance, h.advance, h.advance, h.stepBack, h.repair, h.purge}
		for range rapid.IntRange(5, 40).Draw(rt, "length") {
			acts[rapid.IntRange(0, len(acts)-1).Draw(rt, "act")]()
			h.check()
		}
		report, err := f.ledger.Verify(t.Context(), f.db, budget.VerifyOptions{Scope: h.scope})
		require.NoError(rt, err)
		require.Empty(rt, report.Differences)
		historySpends.Add(int64(h.rows))
	})
	require.Positive(t, historySpends.Load())
}

// check compares Usage of each window with the model.
func (h *history) check() {
	var queries []budget.Query
	for _, l := range h.limits {
		queries = append(queries, budget.Query{Scope: h.scope, Window: l.Window})
	}
	got, err := h.ledger.Usage(h.Context(), h.db, queries...)
	require.NoError(h.T, err)
	for i, q := range queries {
		want := budget.Usage{Query: q, Seq: got[i].Seq, HoldDue: got[i].HoldDue, Refunded: h.refunded, Credited: h.credited, Spent: h.refunded}
		for _, u := range h.uses {
			want.Spent += u.amount
			if q.Window <= 0 || u.counted.IsZero() || u.counted.After(later(h.now, h.last).Add(-q.Window)) {
				want.Used += u.amount
				want.Charges++
			}
		}
		if q.Window <= 0 {
			want.Used -= h.credited
		}
		for _, l := range h.leases {
			want.Leased += l.granted - l.spent
		}
		for _, amount := range h.holds {
			want.Held += amount
		}
		require.Equal(h.T, want, got[i])
	}
}
