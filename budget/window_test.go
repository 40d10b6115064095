package budget_test

import (
	"context"
	"encoding/json"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/internal/bounds"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/internal/sqlstate"
)

func TestWindow_ChargeLeavesExactlyWhenItsAgeIsTheWindow(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	pool, l, clock := open(t)
	hourly := budget.Limit{Max: 10, Window: time.Hour}
	mustCharge(t, pool, l, "a", 4, hourly)
	clock.Advance(time.Microsecond)
	mustCharge(t, pool, l, "a", 6, hourly)

	clock.Set(start.Add(time.Hour - time.Microsecond))
	require.Equal(t, int64(10), usage(t, pool, l, "a", time.Hour).Used)
	_, err := charge(ctx, pool, l, "a", 1, hourly)
	var exceeded *budget.ExceededError
	require.ErrorAs(t, err, &exceeded)
	require.Equal(t, time.Microsecond, exceeded.RetryAfter())

	clock.Set(start.Add(time.Hour))
	require.Equal(t, int64(6), usage(t, pool, l, "a", time.Hour).Used)
	_, err = charge(ctx, pool, l, "a", 5, hourly)
	require.ErrorAs(t, err, &exceeded)
	require.Equal(t, time.Microsecond, exceeded.RetryAfter())
	mustCharge(t, pool, l, "a", 4, hourly)

	clock.Advance(time.Microsecond)
	require.Equal(t, int64(4), usage(t, pool, l, "a", time.Hour).Used)
	require.Zero(t, usage(t, pool, l, "a", time.Microsecond).Used)
}

// The entry is dated after the wait, and judged by the units in the window then.
func TestWindow_WaitingLongerThanTheWindowDatesTheEntryAfterTheWait(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	pool, l, clock := open(t)
	limit := budget.Limit{Max: 1, Window: time.Minute}
	first, second := begin(t, pool, pgx.ReadCommitted), begin(t, pool, pgx.ReadCommitted)
	_, err := second.Exec(ctx, "select now()") // its now() stays behind
	require.NoError(t, err)
	c := budget.Charge{Scope: "a", Amount: 1, Limits: []budget.Limit{limit}}
	_, err = l.Charge(ctx, first, c)
	require.NoError(t, err)

	var got budget.Receipt
	late := pgtest.Going(func() (err error) {
		got, err = l.Charge(ctx, second, c)
		return err
	})
	pgtest.WaitQueued(t, pool, 1)
	clock.Advance(time.Minute)
	require.NoError(t, first.Commit(ctx))
	require.NoError(t, <-late)
	require.NoError(t, second.Commit(ctx))
	require.WithinDuration(t, start.Add(time.Minute), got.Entries[0].At, 0)
	require.Equal(t, int64(1), usage(t, pool, l, "a", time.Minute).Used)
	requireVerified(t, pool, l)
}

// By the real clock: now() would date the entry to the transaction's start.
func TestWindow_SlowTransactionDatesItsEntryWhenItCharges(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	pool := pgtest.Open(t)
	l := newLedger(t, budget.Config{})
	tx := begin(t, pool, pgx.ReadCommitted)
	var began time.Time
	require.NoError(t, tx.QueryRow(ctx, "select now()").Scan(&began))
	const window = 5 * time.Millisecond
	pgtest.WaitFor(t, "the transaction to be older than the window", func() bool {
		var age time.Duration
		require.NoError(t, tx.QueryRow(ctx, "select clock_timestamp() - now()").Scan(&age))
		return age > 2*window
	})
	r, err := l.Charge(ctx, tx, budget.Charge{Scope: "a", Amount: 1, Limits: []budget.Limit{{Max: 1, Window: window}}})
	require.NoError(t, err)
	require.Greater(t, r.Entries[0].At.Sub(began), window)
	require.NoError(t, tx.Commit(ctx))
}

func TestWindow_BeforeTheRetainedEntriesIsAnError(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	pool, l, clock := open(t)
	for range 40 {
		mustCharge(t, pool, l, "a", 1)
		clock.Advance(time.Minute)
	}
	purge(t, pool, l, 20*time.Minute) // keeps 17 and later, made 16 minutes after the start
	for window, known := range map[time.Duration]bool{
		0: true, time.Minute: true, 20 * time.Minute: true, 24 * time.Minute: true,
		24*time.Minute + time.Microsecond: false, time.Hour: false,
	} {
		limits := []budget.Limit{{Max: 100, Window: window, Lifetime: window == 0}}
		_, usageErr := l.Usage(ctx, pool, budget.Query{Scope: "a", Window: window})
		_, checkErr := l.Check(ctx, pool, budget.Charge{Scope: "a", Amount: 1, Limits: limits})
		tx := begin(t, pool, pgx.ReadCommitted)
		_, chargeErr := l.Charge(ctx, tx, budget.Charge{Scope: "a", Amount: 1, Limits: limits})
		require.NoError(t, tx.Rollback(ctx))
		for _, err := range []error{usageErr, checkErr, chargeErr} {
			if known {
				require.NoError(t, err, window)
			} else {
				require.ErrorIs(t, err, budget.ErrWindowPurged, window)
				require.Equal(t, sqlstate.WindowPurged, code(err))
				require.NotContains(t, err.Error(), `"a"`)
			}
		}
	}
}

// For every amount that can be too much, where charges are uneven and most refunds lie in one place: the search for the
// entry that has to leave is led astray.
func TestWindow_RetryAfterIsExactWhereverTheRefundsAre(t *testing.T) {
	t.Parallel()
	const charges = 40
	pool, l, clock := open(t)
	for i, place := range [][2]int64{{1, 10}, {12, 20}, {16, 33}, {30, charges}, {2, charges - 1}} {
		m := &model{scope: fmt.Sprint(i), kept: 1}
		now := start.Add(time.Duration(i) * time.Hour)
		for n := range int64(charges) {
			clock.Set(now)
			amount := []int64{1, 2, 9, 25}[n*n%7%4]
			mustCharge(t, pool, l, m.scope, amount)
			m.add(now, "charge", amount, 0)
			now = now.Add(time.Second)
		}
		clock.Set(now)
		for seq := place[0]; seq <= place[1]; seq++ {
			amount := max(1, m.entries[seq-1].amount-seq%3)
			_, err := m.refund(now, seq, amount)
			require.NoError(t, err)
			require.NoError(t, refund(t.Context(), pool, l, m.scope, seq, amount))
		}
		used := m.chargedAfter(time.Time{})
		for most := int64(1); most <= used; most += bounds.MaxLimits {
			c := budget.Charge{Scope: m.scope, Amount: 1}
			for n := range min(bounds.MaxLimits, used-most+1) {
				c.Limits = append(c.Limits, budget.Limit{Max: most + n, Window: time.Hour})
			}
			_, want, err := m.judge(now, c)
			require.NoError(t, err)
			_, err = l.Check(t.Context(), pool, c)
			var exceeded *budget.ExceededError
			require.ErrorAs(t, err, &exceeded)
			require.Equal(t, want, exceeded.Refusals)
		}
	}
}

// The shortest chain that a purge can shorten: entries 1 and 17 remain.
func TestWindow_BeforeTheOnlyEntryKeptIsAnError(t *testing.T) {
	t.Parallel()
	pool, l, clock := open(t)
	chargeMany(t, pool, l, "a", 16)
	clock.Advance(time.Minute)
	mustCharge(t, pool, l, "a", 1)
	clock.Advance(time.Minute)
	require.Equal(t, int64(15), purge(t, pool, l, time.Minute).Entries)
	require.Zero(t, usage(t, pool, l, "a", time.Minute).Used)
	_, err := l.Usage(t.Context(), pool, budget.Query{Scope: "a", Window: time.Minute + time.Microsecond})
	require.ErrorIs(t, err, budget.ErrWindowPurged)
}

func repairClock(ctx context.Context, pool *pgxpool.Pool, l *budget.Ledger, scope string) (r budget.ClockState, err error) {
	err = pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		r, err = l.RepairClock(ctx, tx, scope, budget.Note{Actor: "operator"})
		return err
	})
	return r, err
}

func TestClock_AheadBeyondTheToleranceFailsForWindowsOnly(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	pool, l, clock := open(t)
	hourly, total := budget.Limit{Max: 10, Window: time.Hour}, budget.Lifetime(10)
	mustCharge(t, pool, l, "a", 1, hourly)
	clock.Advance(-time.Minute - time.Microsecond)

	_, err := charge(ctx, pool, l, "a", 1, total, hourly)
	require.ErrorIs(t, err, budget.ErrClock)
	require.ErrorContains(t, err, `scope "a" by 1m0.000001s`)
	_, err = l.Check(ctx, pool, budget.Charge{Scope: "a", Amount: 1, Limits: []budget.Limit{hourly}})
	require.ErrorIs(t, err, budget.ErrClock)

	posted := mustCharge(t, pool, l, "a", 1, total)
	require.WithinDuration(t, start, posted.At, 0, "an entry is never dated before the last one")
	mustCredit(t, pool, l, "a", 1)
	require.NoError(t, refund(ctx, pool, l, "a", 1, 1))
	requireVerified(t, pool, l)
}

func TestClock_RepairLetsChargesPassAndNothingLeaveEarly(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	pool, l, clock := open(t)
	hourly := budget.Limit{Max: 10, Window: time.Hour}
	for range 20 {
		mustCharge(t, pool, l, "a", 1)
		clock.Advance(time.Minute)
	}
	clock.Set(start.Add(5 * time.Hour)) // the clock is wrong
	mustCharge(t, pool, l, "a", 3)
	clock.Set(start.Add(40 * time.Minute)) // and right again
	require.Equal(t, int64(3), usage(t, pool, l, "a", time.Hour).Used, "until the repair, the wrong time rules")

	r, err := repairClock(ctx, pool, l, "a")
	require.NoError(t, err)
	require.True(t, r.Repaired)
	require.Equal(t, int64(22), r.Seq)
	require.WithinDuration(t, clock.Now(), r.At, 0)
	require.Equal(t, 4*time.Hour+20*time.Minute, r.Ahead)

	// Entries dated into the future count from the repair, all others from their own time.
	require.Equal(t, int64(23), usage(t, pool, l, "a", time.Hour).Used)
	_, err = charge(ctx, pool, l, "a", 1, hourly)
	var exceeded *budget.ExceededError
	require.ErrorAs(t, err, &exceeded)
	require.Equal(t, int64(23), exceeded.Refusals[0].Used)
	require.Equal(t, 33*time.Minute, exceeded.RetryAfter(), "14 must go: the one of 0:13 leaves at 1:13")
	clock.Set(start.Add(time.Hour + 40*time.Minute - time.Microsecond))
	require.Equal(t, int64(3), usage(t, pool, l, "a", time.Hour).Used)
	clock.Advance(time.Microsecond)
	require.Zero(t, usage(t, pool, l, "a", time.Hour).Used)
	mustCharge(t, pool, l, "a", 10, hourly)

	again, err := repairClock(ctx, pool, l, "a")
	require.NoError(t, err)
	require.Equal(t, budget.ClockState{Scope: "a", At: again.At}, again)
	require.Equal(t, int64(23), usage(t, pool, l, "a", 0).Seq)
	requireVerified(t, pool, l)
}

func TestClock_RepairOfAnEmptyScopeDoesNothing(t *testing.T) {
	t.Parallel()
	pool, l, _ := open(t)
	r, err := repairClock(t.Context(), pool, l, "a")
	require.NoError(t, err)
	require.Equal(t, budget.ClockState{Scope: "a", At: r.At}, r)
	require.Zero(t, usage(t, pool, l, "a", 0).Seq)
}

func TestLimit_ConstructorsSayTheKind(t *testing.T) {
	t.Parallel()
	require.Equal(t, budget.Limit{Max: 9, Window: time.Hour}, budget.PerWindow(9, time.Hour))
	require.Equal(t, budget.Limit{Max: 9, Lifetime: true}, budget.Lifetime(9))
	require.Equal(t, budget.Limit{Max: 0, Prepaid: true}, budget.Prepaid(0))
	nine := budget.Lifetime(9)
	require.Equal(t, budget.Limit{Max: 9, Lifetime: true, Name: "stock"}, nine.Named("stock"))
	require.Empty(t, nine.Name, "Named returns another one")
	require.True(t, budget.Lifetime(9) == nine, "limits can be compared")
}

// "2 a minute" without its window must not become "2 for life".
func TestCharge_ALimitWithoutAWindowSuggestsTheRightCode(t *testing.T) {
	t.Parallel()
	l := newLedger(t, budget.Config{})
	for _, limit := range []budget.Limit{{Max: 2}, {Max: 2, Name: "a minute"}, budget.PerWindow(2, 0)} {
		_, err := l.Charge(t.Context(), untouchable{t: t}, budget.Charge{Scope: "a", Amount: 1, Limits: []budget.Limit{limit}})
		require.ErrorIs(t, err, budget.ErrArgument)
		require.EqualError(t, err, "budget: invalid argument: charges[0].Limits[0].Window: is missing: "+
			"write budget.PerWindow(2, window), or budget.Lifetime(2) for a limit over the scope's lifetime")
	}
}

func TestLimit_AsJSONSaysItsKindAndComesBack(t *testing.T) {
	t.Parallel()
	for text, limit := range map[string]budget.Limit{
		`{"max":9,"window_us":60000000}`:                 budget.PerWindow(9, time.Minute),
		`{"name":"stock","max":9,"lifetime":true}`:       budget.Lifetime(9).Named("stock"),
		`{"max":0,"prepaid":true}`:                       budget.Prepaid(0),
		`{"max":7,"prepaid":true}`:                       budget.Prepaid(7),
		`{"max":0,"lifetime":true}`:                      budget.Lifetime(0),
		`{"max":1,"window_us":3155760000000000}`:         budget.PerWindow(1, bounds.MaxWindow),
		`{"max":4611686018427387904,"lifetime":true}`:    budget.Lifetime(bounds.MaxLimit),
		`{"name":"\u003ca\u003e","max":2,"window_us":1}`: budget.PerWindow(2, time.Microsecond).Named("<a>"),
		`{"max":2}`: {Max: 2}, // refused when it is used, as it was before
	} {
		written, err := json.Marshal(limit)
		require.NoError(t, err)
		require.Equal(t, text, string(written))
		back := budget.Lifetime(77).Named("overwritten")
		require.NoError(t, json.Unmarshal(written, &back))
		require.Equal(t, limit, back)

		receipt := budget.Receipt{Entries: []budget.Posted{{Scope: "a", Standings: []budget.Standing{{Limit: limit, Used: 1, Available: 8}}}}}
		written, err = json.Marshal(receipt)
		require.NoError(t, err)
		require.Contains(t, string(written), `{"limit":`+text+`,"used":1,"held":0,"available":8}`)
		var again budget.Receipt
		require.NoError(t, json.Unmarshal(written, &again))
		require.Equal(t, receipt, again)
	}
	for _, text := range []string{
		`{"max":9,"window_us":-1}`, `{"max":9,"window_us":3155760000000001}`, `{"max":9,"window_us":60000000,"lifetime":true}`, `{"max":9,"lifetime":true,"prepaid":true}`,
	} {
		require.ErrorIs(t, json.Unmarshal([]byte(text), new(budget.Limit)), budget.ErrArgument, text)
	}
}

func TestAhead_NamesTheScopesThatRepairClockRepairs(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	pool, l, clock := open(t)
	ahead := func(tolerance time.Duration) (found []budget.ClockState) {
		for s, err := range l.ClockAhead(ctx, pool, tolerance) {
			require.NoError(t, err)
			found = append(found, s)
		}
		return found
	}
	require.Empty(t, ahead(0), "an empty ledger")
	execute(t, pool, `insert into metered.ledger (seq, amount, at, spent, refunded, credited, held, epoch, kind, scope)
		select 1, 1, $1::timestamptz, 1, 0, 0, 0, 0, 'c', 'n' || n from generate_series(1, 1500) n`, start.Add(-time.Minute))
	clock.Advance(time.Minute)
	mustCharge(t, pool, l, "a minute", 1)
	clock.Advance(time.Microsecond)
	mustCharge(t, pool, l, "z more", 1)
	clock.Advance(time.Hour)
	mustCharge(t, pool, l, "a", 1)
	clock.Set(start)
	mustCharge(t, pool, l, "right", 1)
	_, err := repairClock(ctx, pool, l, "right")
	require.NoError(t, err)

	most := budget.ClockState{Scope: "a", Seq: 1, At: start.Add(time.Hour + time.Minute + time.Microsecond), Ahead: time.Hour + time.Minute + time.Microsecond}
	more := budget.ClockState{Scope: "z more", Seq: 1, At: start.Add(time.Minute + time.Microsecond), Ahead: time.Minute + time.Microsecond}
	found := ahead(0)
	require.Len(t, found, 2, "a minute is within the tolerance")
	for i, want := range []budget.ClockState{most, more} {
		require.WithinDuration(t, want.At, found[i].At, 0)
		found[i].At = want.At
		require.Equal(t, want, found[i])
	}
	require.Len(t, ahead(time.Microsecond), 3)
	requireJSON(t, `{"scope":"z more","seq":1,"at":"2026-01-01T00:01:00.000001Z","repaired":false,"ahead_us":60000001}`, more)
	for s, err := range l.ClockAhead(ctx, pool, time.Microsecond) {
		require.NoError(t, err)
		r, err := repairClock(ctx, pool, l, s.Scope)
		require.NoError(t, err)
		require.Equal(t, s.Ahead, r.Ahead)
		break // and stops when asked to
	}
	require.Len(t, ahead(time.Microsecond), 2)
	for _, err := range l.ClockAhead(ctx, pool, 25*time.Hour) {
		requireArgument(t, err, "tolerance")
	}
}
