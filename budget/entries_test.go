package budget_test

import (
	"context"
	"encoding/json"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/internal/bounds"
	"github.com/pgmetered/metered/internal/pgtest"
)

func TestEntries_SayEverythingAboutEachEntry(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	pool, l, clock := open(t)
	note := budget.Note{Actor: "ann", Reason: "top-up"}
	mustCharge(t, pool, l, "a", 5)
	clock.Advance(time.Second)
	_, err := l.Credit(ctx, autocommit{Querier: pool}, budget.Credit{Scope: "a", Amount: 7, Note: note})
	require.NoError(t, err)
	require.NoError(t, refund(ctx, pool, l, "a", 1, 2))
	clock.Advance(-2 * time.Second)
	_, err = repairClock(ctx, pool, l, "a")
	require.NoError(t, err)
	execute(t, pool, `select metered._write_charges(array[('a', null, 3, 0, '{}', null, null, null, null)]::metered.new_charge[], '1 min', 1, ('shop', 'order 7', null), 'answer', null, true)`)
	execute(t, pool, `update metered.ledger set held = 4, next_due = $1 where seq = 5`, start)

	var got []budget.Entry
	for e, err := range l.Entries(ctx, pool, "a", budget.EntriesOptions{}) {
		require.NoError(t, err)
		e.At = e.At.UTC()
		got = append(got, e)
	}
	got[4].HoldDue = got[4].HoldDue.UTC()
	require.Equal(t, []budget.Entry{
		{Scope: "a", Seq: 1, Kind: "charge", Amount: 5, At: start, Spent: 5},
		{Scope: "a", Seq: 2, Kind: "credit", Amount: 7, At: start.Add(time.Second), Spent: 5, Credited: 7, Note: note},
		{Scope: "a", Seq: 3, Kind: "refund", Amount: 2, At: start.Add(time.Second), Spent: 5, Refunded: 2, Credited: 7, Ref: 1},
		{Scope: "a", Seq: 4, Kind: "clock repair", At: start.Add(-time.Second), Epoch: 1, Spent: 5, Refunded: 2, Credited: 7,
			Note: budget.Note{Actor: "operator"}},
		{Scope: "a", Seq: 5, Kind: "charge", Amount: 3, At: start.Add(-time.Second), Epoch: 1, Spent: 8, Refunded: 2, Credited: 7,
			Held: 4, HoldDue: start, OperationTenant: "shop", Operation: "order 7"},
	}, got)
}

func TestEntries_PagesAfterAndMax(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	pool, l, _ := open(t)
	chargeMany(t, pool, l, "a", 1001)
	chargeMany(t, pool, l, "b", 3)
	for _, c := range []struct {
		opts        budget.EntriesOptions
		first, last int64
	}{
		{budget.EntriesOptions{}, 1, 1001},
		{budget.EntriesOptions{After: 1}, 2, 1001},
		{budget.EntriesOptions{After: 501}, 502, 1001},
		{budget.EntriesOptions{Max: 1}, 1, 1},
		{budget.EntriesOptions{Max: 500}, 1, 500},
		{budget.EntriesOptions{Max: 501}, 1, 501},
		{budget.EntriesOptions{After: 400, Max: 600}, 401, 1000},
		{budget.EntriesOptions{After: 400, Max: 5000}, 401, 1001},
		{budget.EntriesOptions{After: 1001}, 1002, 1001},
	} {
		next := c.first
		for e, err := range l.Entries(ctx, pool, "a", c.opts) {
			require.NoError(t, err)
			require.Equal(t, next, e.Seq)
			require.Equal(t, "a", e.Scope)
			next++
		}
		require.Equal(t, c.last, next-1, c.opts)
	}
	for range l.Entries(ctx, pool, "nobody", budget.EntriesOptions{}) {
		t.Fatal("an unknown scope has no entries")
	}
}

func TestEntries_NewestFirst(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	pool, l, clock := open(t)
	chargeMany(t, pool, l, "a", 1001)
	chargeMany(t, pool, l, "b", 3)
	seqs := func(opts budget.EntriesOptions) (all []int64) {
		opts.NewestFirst = true
		for e, err := range l.Entries(ctx, pool, "a", opts) {
			require.NoError(t, err)
			require.Equal(t, "a", e.Scope)
			require.Equal(t, e.Seq, e.Spent)
			all = append(all, e.Seq)
		}
		return all
	}
	down := func(from, to int64) (all []int64) {
		for seq := from; seq >= to; seq-- {
			all = append(all, seq)
		}
		return all
	}
	for _, c := range []struct {
		opts budget.EntriesOptions
		want []int64
	}{
		{budget.EntriesOptions{}, down(1001, 1)},
		{budget.EntriesOptions{Max: 3}, down(1001, 999)},
		{budget.EntriesOptions{Max: 500}, down(1001, 502)},
		{budget.EntriesOptions{Max: 501}, down(1001, 501)},
		{budget.EntriesOptions{Before: 999, Max: 2}, down(998, 997)},
		{budget.EntriesOptions{Before: 3, Max: 20}, down(2, 1)}, // a young scope
		{budget.EntriesOptions{Before: 1}, nil},
		{budget.EntriesOptions{Before: 5000, Max: 1}, down(1001, 1001)},
		{budget.EntriesOptions{After: 400, Before: 1000}, down(999, 401)},
	} {
		require.Equal(t, c.want, seqs(c.opts), c.opts)
	}
	n := 0
	for e, err := range l.Entries(ctx, pool, "a", budget.EntriesOptions{After: 10, Before: 13}) {
		require.NoError(t, err)
		require.Equal(t, int64(11+n), e.Seq, "oldest first, Before is a bound, too")
		n++
	}
	require.Equal(t, 2, n)

	// After a purge entry 1 is there, and then none for a while.
	clock.Advance(time.Hour)
	chargeMany(t, pool, l, "a", 40)
	purge(t, pool, l, time.Minute)
	all := seqs(budget.EntriesOptions{})
	gap := all[len(all)-2]
	require.Greater(t, gap, int64(900))
	require.Equal(t, append(down(1041, gap), 1), all)
	require.Equal(t, []int64{gap, 1}, seqs(budget.EntriesOptions{Before: gap + 1, Max: 2}))
	require.Equal(t, []int64{1}, seqs(budget.EntriesOptions{Before: gap}))
	require.Empty(t, seqs(budget.EntriesOptions{After: 1, Before: gap}))
	for range l.Entries(ctx, pool, "nobody", budget.EntriesOptions{NewestFirst: true}) {
		t.Fatal("an unknown scope has no entries")
	}
}

// The last ones of a long chain are read from the index's end.
func TestEntries_NewestFirstReadsNoMoreThanItShows(t *testing.T) {
	t.Parallel()
	pool, l, _ := open(t)
	execute(t, pool, `alter table metered.ledger set (autovacuum_enabled = off)`)
	chargeMany(t, pool, l, "b", 3)
	execute(t, pool, `analyze metered.ledger`)
	conn, err := pool.Acquire(t.Context())
	require.NoError(t, err)
	defer conn.Release()
	show := func(n int) {
		for range n {
			for _, err := range l.Entries(t.Context(), conn, "a", budget.EntriesOptions{NewestFirst: true, Max: 10}) {
				require.NoError(t, err)
			}
		}
	}
	show(10) // a plan that is kept is made now
	chargeMany(t, conn, l, "a", 3000)
	fetched, scans := tuplesFetched(t, conn, "ledger"), tableStat(t, conn, "ledger", "seq_scan")
	show(10)
	require.LessOrEqual(t, tuplesFetched(t, conn, "ledger")-fetched, int64(100))
	require.Equal(t, scans, tableStat(t, conn, "ledger", "seq_scan"))
}

func TestEntries_BodyMayUseTheSameTransactionAndBreak(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	pool, l, _ := open(t)
	chargeMany(t, pool, l, "a", 600)
	tx := begin(t, pool, pgx.ReadCommitted)
	var refunded int
	for e, err := range l.Entries(ctx, tx, "a", budget.EntriesOptions{}) {
		require.NoError(t, err)
		if e.Kind == "refund" {
			break // entries made meanwhile are seen
		}
		if e.Seq > 597 {
			_, err = l.Refund(ctx, tx, budget.Refund{Scope: "a", Seq: e.Seq, Amount: 1})
			require.NoError(t, err)
			refunded++
		}
	}
	require.Equal(t, 3, refunded)
	require.NoError(t, tx.Commit(ctx))
	require.Equal(t, int64(603), usage(t, pool, l, "a", 0).Seq)
}

func TestEntries_ErrorIsTheLastElement(t *testing.T) {
	t.Parallel()
	pool, l, _ := open(t)
	chargeMany(t, pool, l, "a", 600)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var seen int
	var last error
	for e, err := range l.Entries(ctx, pool, "a", budget.EntriesOptions{}) {
		require.NoError(t, last, "nothing comes after the error")
		if last = err; err != nil {
			require.Zero(t, e)
			continue
		}
		if seen++; seen == 500 {
			cancel()
		}
	}
	require.Equal(t, 500, seen)
	require.ErrorIs(t, last, context.Canceled)
}

func TestLedger_SaysThatTheSchemaIsMissing(t *testing.T) {
	t.Parallel()
	pgtest.OnEachVersion(t)
	ctx := t.Context()
	pool, _, _ := open(t)
	l := newLedger(t, budget.Config{Schema: "elsewhere"})
	_, err := charge(ctx, pool, l, "a", 1)
	require.ErrorIs(t, err, budget.ErrNotMigrated)
	_, err = l.Usage(ctx, pool, budget.Query{Scope: "a"})
	require.ErrorIs(t, err, budget.ErrNotMigrated)
	for _, err := range l.Entries(ctx, pool, "a", budget.EntriesOptions{}) {
		require.ErrorIs(t, err, budget.ErrNotMigrated)
	}
}

func TestUsage_AnswersManyQueriesInTheOrderAsked(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	pool, l, clock := open(t)
	const scopes = 32
	var charges []budget.Charge
	for i := range scopes {
		charges = append(charges, budget.Charge{Scope: fmt.Sprint(i), Amount: int64(i + 1)})
	}
	for range 2 {
		_, err := l.Charge(ctx, autocommit{Querier: pool}, charges...)
		require.NoError(t, err)
		clock.Advance(time.Minute)
	}
	var queries []budget.Query
	var want []budget.Usage
	for n := range bounds.MaxQueries {
		i := n * 7 % (scopes + 1)
		u := budget.Usage{Query: budget.Query{Scope: fmt.Sprint(i), Window: time.Duration(n%3) * time.Minute}}
		if amount := int64(i + 1); i < scopes {
			u.Used = amount * []int64{2, 0, 1}[n%3]
			u.Spent, u.Seq, u.Charges = 2*amount, 2, u.Used/amount
		}
		queries, want = append(queries, u.Query), append(want, u)
	}
	got, err := l.Usage(ctx, pool, queries...)
	require.NoError(t, err)
	require.Equal(t, want, got)
}

// In a REPEATABLE READ transaction the answers are those of its snapshot, and
// nothing waits for a lock.
func TestUsage_AndCheckNeitherWaitNorWrite(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	pool, l, _ := open(t)
	mustCharge(t, pool, l, "a", 1)
	occupy(t, pool, l, "a")
	tx, err := pool.BeginTx(ctx, pgx.TxOptions{IsoLevel: pgx.RepeatableRead, AccessMode: pgx.ReadOnly})
	require.NoError(t, err)
	defer func() { require.NoError(t, tx.Rollback(ctx)) }()
	require.Equal(t, int64(1), usage(t, tx, l, "a", time.Hour).Used)
	require.EqualValues(t, 1, between(t, tx, l, "a", start, start.Add(time.Hour)).Charged)
	for range l.Entries(ctx, tx, "a", budget.EntriesOptions{Name: "any", From: start}) {
		require.Fail(t, "no command has that name")
	}
	r, err := l.Check(ctx, tx, budget.Charge{Scope: "a", Amount: 1, Limits: []budget.Limit{budget.Lifetime(5)}})
	require.NoError(t, err)
	require.Equal(t, budget.Standing{Limit: budget.Lifetime(5), Used: 2, Available: 3}, r.Entries[0].Standings[0])
	var locks int
	require.NoError(t, tx.QueryRow(ctx, `select count(*) from pg_locks where pid = pg_backend_pid() and locktype = 'advisory'`).Scan(&locks))
	require.Zero(t, locks)
}

func requireJSON[T any](t *testing.T, want string, v T) {
	t.Helper()
	text, err := json.Marshal(v)
	require.NoError(t, err)
	require.JSONEq(t, want, string(text))
	var back T
	require.NoError(t, json.Unmarshal(text, &back))
	require.Equal(t, v, back)
}

func TestRefusal_AsJSONSaysNeverAndHowLong(t *testing.T) {
	t.Parallel()
	r := budget.Refusal{
		Scope: "a", Limit: budget.PerWindow(9, time.Minute).Named("burst"), Used: 5, Held: 2, Requested: 3, Available: 2,
		RetryAfter: 1500 * time.Millisecond, HoldDue: 7 * time.Microsecond,
	}
	const text = `{"scope":"a","limit":{"name":"burst","max":9,"window_us":60000000},"used":5,"held":2,"requested":3,"available":2,` +
		`"retry_after_us":1500000,"hold_due_us":7}`
	requireJSON(t, text, r)
	requireJSON(t, `{"refusals":[`+text+`]}`, budget.ExceededError{Refusals: []budget.Refusal{r}})
	requireJSON(t, `{"scope":"a","limit":{"max":0,"prepaid":true},"used":-4,"held":0,"requested":5,"available":4,"retry_after_us":null}`,
		budget.Refusal{Scope: "a", Limit: budget.Prepaid(0), Used: -4, Requested: 5, Available: 4, RetryAfter: budget.Never})
	requireJSON(t, `{"scope":"","limit":{"max":1,"lifetime":true},"used":0,"held":1,"requested":1,"available":0,"retry_after_us":0,"hold_due_us":0}`,
		budget.Refusal{Limit: budget.Lifetime(1), Held: 1, Requested: 1}) // a hold that is due now
}

func TestUsage_AsJSONSaysItsWindow(t *testing.T) {
	t.Parallel()
	u := budget.Usage{
		Query: budget.Query{Scope: "a", Window: time.Hour}, Used: 1, Held: 2, HoldDue: time.Second, Spent: 3, Refunded: 4, Credited: 5, Seq: 6, Charges: 7,
	}
	const sums = `"spent":3,"refunded":4,"credited":5,"seq":6,"charges":7`
	requireJSON(t, `{"scope":"a","window_us":3600000000,"used":1,"held":2,"hold_due_us":1000000,`+sums+`}`, u)
	u.Window, u.Held, u.HoldDue = 0, 0, 0
	requireJSON(t, `{"scope":"a","lifetime":true,"used":1,"held":0,`+sums+`}`, u)
	u.Window = 0
	text, err := json.Marshal(u)
	require.NoError(t, err)
	require.JSONEq(t, `{"scope":"a","lifetime":true,"used":1,"held":0,`+sums+`}`, string(text))
}

func TestClockRepair_AsJSONSaysHowFar(t *testing.T) {
	t.Parallel()
	requireJSON(t, `{"scope":"a","repaired":true,"seq":3,"at":"2026-01-01T00:00:00Z","ahead_us":90000000}`,
		budget.ClockState{Scope: "a", Repaired: true, Seq: 3, At: start, Ahead: 90 * time.Second})
}
