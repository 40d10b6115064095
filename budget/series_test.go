package budget_test

import (
	"encoding/json"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/internal/bounds"
	"github.com/pgmetered/metered/internal/pgtest"
)

func between(t testing.TB, db budget.Querier, l *budget.Ledger, scope string, from, to time.Time) budget.RangeUsage {
	t.Helper()
	u, err := l.UsageBetween(t.Context(), db, scope, from, to)
	require.NoError(t, err)
	require.True(t, u.From.Before(u.To))
	u.From, u.To = time.Time{}, time.Time{}
	return u
}

func TestUsageBetween_BeginsAtFromAndEndsBeforeTo(t *testing.T) {
	t.Parallel()
	pool, l, clock := open(t)
	for i := range 40 { // more than a block of the time index, two entries at a time
		clock.Set(start.Add(time.Duration(i/2) * time.Microsecond))
		mustCharge(t, pool, l, "a", 1)
	}
	at := func(micros int) time.Time { return start.Add(time.Duration(micros) * time.Microsecond) }
	for from := -1; from <= 20; from++ {
		for to := from + 1; to <= 21; to++ {
			want := int64(2 * (min(to, 20) - max(from, 0)))
			require.Equal(t, budget.RangeUsage{Charged: want, Charges: want}, between(t, pool, l, "a", at(from), at(to)), "%d %d", from, to)
		}
	}
	// A time between two microseconds is after the entry before it.
	require.EqualValues(t, 4, between(t, pool, l, "a", at(3).Add(-999), at(4).Add(1)).Charged)
	require.EqualValues(t, 2, between(t, pool, l, "a", at(3).Add(1), at(4).Add(1)).Charged)
	require.EqualValues(t, 40, between(t, pool, l, "a", time.Time{}, at(1e9)).Charged)
	require.Zero(t, between(t, pool, l, "nobody", time.Time{}, at(1e9)))
}

func TestUsageBetween_TellsRefundsByTheirChargeFromThoseMade(t *testing.T) {
	t.Parallel()
	pool, l, clock := open(t)
	ctx := t.Context()
	mustCharge(t, pool, l, "a", 10)
	mustCredit(t, pool, l, "a", 7)
	clock.Advance(24 * time.Hour)
	mustCharge(t, pool, l, "a", 20)
	require.NoError(t, refund(ctx, pool, l, "a", 1, 4)) // of the day before
	clock.Advance(24 * time.Hour)
	require.NoError(t, refund(ctx, pool, l, "a", 3, 5))
	days, err := l.Series(ctx, pool, "a", start, start.AddDate(0, 0, 4), budget.Day, nil)
	require.NoError(t, err)
	day := func(n int) time.Time { return start.AddDate(0, 0, n) }
	require.Equal(t, []budget.RangeUsage{
		{From: day(0), To: day(1), Charged: 10, Charges: 1, Credited: 7, RefundedOfCharged: 4},
		{From: day(1), To: day(2), Charged: 20, Charges: 1, RefundedOfCharged: 5, RefundsMade: 4},
		{From: day(2), To: day(3), RefundsMade: 5},
		{From: day(3), To: day(4)},
	}, days)
	require.Equal(t, []int64{6, 15, 0, 0}, []int64{days[0].Used(), days[1].Used(), days[2].Used(), days[3].Used()})
	require.Equal(t, []int64{10, 16, -5, 0}, []int64{days[0].Billed(), days[1].Billed(), days[2].Billed(), days[3].Billed()})
	require.Equal(t, budget.RangeUsage{Charged: 30, Charges: 2, Credited: 7, RefundedOfCharged: 9, RefundsMade: 9}, between(t, pool, l, "a", day(0), day(4)))

	text, err := json.Marshal(days[1])
	require.NoError(t, err)
	require.JSONEq(t, `{"from":"2026-01-02T00:00:00Z","to":"2026-01-03T00:00:00Z","charged":20,"credited":0,"refunded_of_charged":5,"refunds_made":4,"charges":1}`, string(text))
}

// Windows count it then, too. An invoice that was written does not change.
func TestUsageBetween_ALateEventCountsWhenItWasRecorded(t *testing.T) {
	t.Parallel()
	pool, l, clock := open(t)
	clock.Advance(48 * time.Hour)
	late := event("e", "a", 5)
	late.OccurredAt = start
	_, err := ingest(t.Context(), pool, l, late)
	require.NoError(t, err)
	require.Zero(t, between(t, pool, l, "a", start, start.Add(48*time.Hour)))
	require.EqualValues(t, 5, between(t, pool, l, "a", start.Add(48*time.Hour), start.Add(49*time.Hour)).Charged)
}

// Entries that a clock dated into the future count at the time of its repair, as in windows.
func TestUsageBetween_AfterAClockRepair(t *testing.T) {
	t.Parallel()
	pool, l, clock := open(t)
	mustCharge(t, pool, l, "a", 1)
	clock.Advance(48 * time.Hour) // the wrong clock
	mustCharge(t, pool, l, "a", 2)
	clock.Set(start.Add(time.Hour))
	require.EqualValues(t, 2, between(t, pool, l, "a", start.Add(48*time.Hour), start.Add(49*time.Hour)).Charged)
	_, err := repairClock(t.Context(), pool, l, "a")
	require.NoError(t, err)
	clock.Advance(time.Hour)
	mustCharge(t, pool, l, "a", 4)
	hours, err := l.Series(t.Context(), pool, "a", start, start.Add(3*time.Hour), budget.Hour, nil)
	require.NoError(t, err)
	require.Equal(t, []int64{1, 2, 4}, []int64{hours[0].Charged, hours[1].Charged, hours[2].Charged})
	require.Zero(t, between(t, pool, l, "a", start.Add(48*time.Hour), start.Add(49*time.Hour)))
}

func TestUsageBetween_SpendsOfLeasesCountWhenTheyAreSettled(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	pool, l, clock := open(t)
	open := func(mode string) (no, fence int64) {
		require.NoError(t, pool.QueryRow(ctx, `select no, fence from metered.open_lease(row('a', null, 30, 0, '{}', null, false, null, null),
			row($1, 'me', 1, 1, '1 hour', null), '1 minute', 1000)`, mode).Scan(&no, &fence))
		return no, fence
	}
	minutes := func() (charged, unsettled []int64) {
		ranges, err := l.Series(ctx, pool, "a", start, start.Add(3*time.Minute), budget.Unit(time.Minute.String()), nil)
		require.NoError(t, err)
		for _, u := range ranges {
			charged, unsettled = append(charged, u.Charged), append(unsettled, u.Unsettled)
		}
		return charged, unsettled
	}
	rows, fence := open("rows")
	memory, _ := open("memory")
	mustCharge(t, pool, l, "a", 100)
	for i, amount := range []int64{3, 4} {
		execute(t, pool, `select metered.spend($1, $2, $3, $4, 'a', null)`, rows, fence, 10*i, amount)
		clock.Advance(time.Minute)
	}
	charged, unsettled := minutes()
	require.Equal(t, []int64{100, 0, 0}, charged)
	require.Equal(t, []int64{3, 4, 0}, unsettled)
	require.EqualValues(t, 4, between(t, pool, l, "a", start.Add(time.Microsecond), clock.Now()).Unsettled)

	execute(t, pool, `select metered.settle_lease($1, 'me', null, 1000, null, null)`, rows)
	execute(t, pool, `select metered.settle_lease($1, 'me', 5, 1000, null, null)`, memory)
	charged, unsettled = minutes()
	require.Equal(t, []int64{100, 0, 12}, charged)
	require.Equal(t, []int64{0, 0, 0}, unsettled)
}

func TestUsageBetween_APurgedRangeIsAnErrorThatNamesTheFirstKnownTime(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	pool, l, clock := open(t)
	for range 40 {
		posted := mustCharge(t, pool, l, "a", 2)
		if posted.Seq%4 == 1 {
			require.NoError(t, refund(ctx, pool, l, "a", posted.Seq, 1))
		}
		clock.Advance(time.Minute)
	}
	whole := between(t, pool, l, "a", start, clock.Now())
	purge(t, pool, l, 20*time.Minute)
	var kept time.Time
	require.NoError(t, pool.QueryRow(ctx, `select at from metered.ledger where seq > 1 order by seq limit 1`).Scan(&kept))

	tx := begin(t, pool, pgx.ReadCommitted)
	loc, err := time.LoadLocation("Asia/Tokyo")
	require.NoError(t, err)
	_, err = l.Series(ctx, tx, "a", start.Add(time.Minute), clock.Now(), budget.Hour, loc)
	var purged *budget.PurgedError
	require.ErrorAs(t, err, &purged)
	require.ErrorIs(t, err, budget.ErrWindowPurged)
	require.Equal(t, "budget_window_purged", metered.Code(err))
	require.False(t, metered.Retryable(err))
	require.Equal(t, budget.PurgedError{Scope: "a", KnownFrom: kept.Add(time.Microsecond).In(loc)}, *purged)
	require.ErrorContains(t, err, purged.KnownFrom.Format(time.RFC3339Nano))

	// The transaction goes on, from when on it is known.
	require.EqualValues(t, whole.Charged-between(t, tx, l, "a", time.Time{}, purged.KnownFrom).Charged,
		between(t, tx, l, "a", purged.KnownFrom, clock.Now()).Charged)
	_, err = l.UsageBetween(ctx, tx, "a", kept, clock.Now())
	require.ErrorIs(t, err, budget.ErrWindowPurged)
	// The time before the first entry is known as well: nothing was used. So is all since then.
	require.Zero(t, between(t, tx, l, "a", time.Time{}, start))
	require.Equal(t, whole, between(t, tx, l, "a", start, clock.Now()))
	require.Zero(t, between(t, tx, l, "a", clock.Now(), clock.Now().Add(time.Hour)))

	for _, opts := range []budget.EntriesOptions{{From: start.Add(time.Second)}, {To: kept}} {
		for _, err := range l.Entries(ctx, tx, "a", opts) {
			require.ErrorIs(t, err, budget.ErrWindowPurged)
		}
		opts.Note.Actor = "ann"
		for _, err := range l.Entries(ctx, tx, "a", opts) {
			require.ErrorIs(t, err, budget.ErrWindowPurged)
		}
	}
}

func TestUsageBetween_AForgottenScopeIsOneThatWasNeverCharged(t *testing.T) {
	t.Parallel()
	pool, l, clock := open(t)
	mustCharge(t, pool, l, "a", 2)
	clock.Advance(time.Hour)
	_, err := l.Purge(t.Context(), pool, budget.PurgeOptions{OlderThan: time.Minute, Forget: func(string) bool { return true }})
	require.NoError(t, err)
	require.Zero(t, between(t, pool, l, "a", time.Time{}, clock.Now()))
	mustCharge(t, pool, l, "a", 3)
	require.EqualValues(t, 3, between(t, pool, l, "a", time.Time{}, clock.Now().Add(time.Second)).Charged)
}

// The reader stops in the middle, and meanwhile others charge, refund and commit.
func TestSeries_IsOfOneSnapshot(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	for _, volatility := range []string{"stable", "volatile"} {
		t.Run(volatility, func(t *testing.T) {
			t.Parallel()
			pool, l, clock := open(t)
			for range 3 {
				posted := mustCharge(t, pool, l, "a", 10)
				clock.Advance(time.Hour)
				require.NoError(t, refund(ctx, pool, l, "a", posted.Seq, 1))
			}
			execute(t, pool, `alter function metered.usage_before `+volatility)
			execute(t, pool, `alter function metered._refunds_after `+volatility)
			execute(t, pool, `do $$ begin
				execute regexp_replace(pg_get_functiondef('metered._refunds_after'::regproc), '\mbegin\M',
					'begin perform pg_advisory_lock(4711); perform pg_advisory_unlock(4711);');
			end $$`)
			stop := begin(t, pool, "")
			_, err := stop.Exec(ctx, "select pg_advisory_xact_lock(4711)")
			require.NoError(t, err)
			var got []budget.RangeUsage
			reading := pgtest.Going(func() (err error) {
				got, err = l.Series(ctx, pool, "a", start, start.Add(4*time.Hour), budget.Hour, nil)
				return err
			})
			pgtest.WaitQueued(t, pool, 1)
			mustCharge(t, pool, l, "a", 100)
			require.NoError(t, refund(ctx, pool, l, "a", 3, 5))
			require.NoError(t, stop.Rollback(ctx))
			require.NoError(t, <-reading)
			var refunded []int64
			for _, u := range got {
				require.Less(t, u.Charged, int64(100))
				refunded = append(refunded, u.RefundedOfCharged)
			}
			want := []int64{1, 1, 1, 0}
			if volatility == "stable" {
				require.Equal(t, want, refunded)
			} else {
				require.NotEqual(t, want, refunded, "this test is to find it")
			}
		})
	}
}

// A charge has the scope's lock until it commits, so a reader that gets the lock misses nothing of the past.
func TestUsageBetween_UnderTheLockNothingOfThePastIsMissing(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	pool := pgtest.Open(t) // by the real clock
	l := newLedger(t, budget.Config{})
	now := func() (at time.Time) {
		require.NoError(t, pool.QueryRow(ctx, "select clock_timestamp()").Scan(&at))
		return at
	}
	from := now()
	slow := begin(t, pool, "")
	_, err := l.Charge(ctx, slow, budget.Charge{Scope: "a", Amount: 5})
	require.NoError(t, err)
	to := now()
	require.Zero(t, between(t, pool, l, "a", from, to), "it has not committed")
	var got budget.RangeUsage
	reading := pgtest.Going(func() error {
		return pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) (err error) {
			if err = l.Lock(ctx, tx, "a"); err == nil {
				got, err = l.UsageBetween(ctx, tx, "a", from, to)
			}
			return err
		})
	})
	pgtest.WaitQueued(t, pool, 1)
	require.NoError(t, slow.Commit(ctx))
	require.NoError(t, <-reading)
	require.EqualValues(t, 5, got.Charged)
}

func TestSeries_RefusesArgumentsBeforeAnySQL(t *testing.T) {
	t.Parallel()
	l := newLedger(t, budget.Config{})
	db := untouchable{t: t}
	day := 24 * time.Hour
	for _, c := range []struct {
		field    string
		scope    string
		from, to time.Time
		unit     budget.Unit
	}{
		{"scope", "", start, start.Add(day), budget.Day},
		{"to", "a", start, start, budget.Day},
		{"to", "a", start.Add(1), start.Add(2), budget.Day},
		{"to", "a", start, start.Add(-1), budget.Day},
		{"from", "a", start.AddDate(-2027, 0, 0), start, budget.Day},
		{"to", "a", start, start.AddDate(8000, 0, 0), budget.Day},
		{"unit", "a", start, start.Add(day), ""},
		{"unit", "a", start, start.Add(day), "-5s"},
		{"unit", "a", start, start.Add(day), "1500ns"},
		{"unit", "a", start, start.Add(bounds.MaxBuckets*time.Second + time.Microsecond), budget.Unit(time.Second.String())},
		{"unit", "a", start, start.AddDate(0, 3, 0), budget.Hour},
	} {
		_, err := l.Series(t.Context(), db, c.scope, c.from, c.to, c.unit, nil)
		requireArgument(t, err, c.field)
		if c.field != "unit" {
			_, err = l.UsageBetween(t.Context(), db, c.scope, c.from, c.to)
			requireArgument(t, err, c.field)
		}
	}
	_, err := new(budget.Ledger).Series(t.Context(), db, "a", start, start.Add(day), budget.Day, nil)
	requireArgument(t, err, "ledger")
	_, err = l.UsageBetween(t.Context(), nil, "a", start, start.Add(day))
	requireArgument(t, err, "db")
	for field, opts := range map[string]budget.EntriesOptions{
		"EntriesOptions.To":         {From: start, To: start},
		"EntriesOptions.From":       {From: start.AddDate(8000, 0, 0)},
		"EntriesOptions.Max":        {Max: -1},
		"EntriesOptions.Note.Actor": {Note: budget.Note{Actor: "\xff"}},
		"EntriesOptions.Name":       {Name: "\xff"},
	} {
		for _, err := range l.Entries(t.Context(), db, "a", opts) {
			requireArgument(t, err, field)
		}
	}
}
