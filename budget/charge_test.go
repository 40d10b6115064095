package budget_test

import (
	"errors"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/internal/sqlstate"
)

func TestCharge_RefusalNamesEveryLimitAndLeavesTheTransactionUsable(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	pool, l, clock := open(t)

	hourly := budget.Limit{Max: 100, Window: time.Hour, Name: "hourly"}
	total := budget.Lifetime(150).Named("total")
	require.NoError(t, pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		r, err := l.Charge(ctx, tx, budget.Charge{Scope: "a", Amount: 60, Limits: []budget.Limit{hourly, total}})
		require.NoError(t, err)
		require.Equal(t, int64(1), r.Entries[0].Seq)
		require.Equal(t, int64(40), r.Entries[0].Standings[0].Available)
		clock.Advance(time.Minute)

		_, err = l.Charge(ctx, tx, budget.Charge{Scope: "a", Amount: 95, Limits: []budget.Limit{hourly, total}})
		var exceeded *budget.ExceededError
		require.ErrorAs(t, err, &exceeded)
		require.ErrorIs(t, err, budget.ErrExceeded)
		require.Equal(t, []budget.Refusal{
			{Scope: "a", Limit: hourly, Used: 60, Requested: 95, Available: 40, RetryAfter: 59 * time.Minute},
			{Scope: "a", Limit: total, Used: 60, Requested: 95, Available: 90, RetryAfter: budget.Never},
		}, exceeded.Refusals)
		require.Equal(t, budget.Never, exceeded.RetryAfter())

		_, err = l.Charge(ctx, tx, budget.Charge{Scope: "a", Amount: 40, Limits: []budget.Limit{hourly, total}})
		return err
	}))
	usage, err := l.Usage(ctx, pool, budget.Query{Scope: "a", Window: time.Hour}, budget.Query{Scope: "a"})
	require.NoError(t, err)
	require.Equal(t, int64(100), usage[0].Used)
	require.Equal(t, int64(2), usage[1].Seq)
	report, err := l.Verify(ctx, pool, budget.VerifyOptions{})
	require.NoError(t, err)
	require.Empty(t, report.Differences)
	require.Equal(t, int64(2), report.Entries)
}

func TestCharge_WithoutLimitsIsOnlyRecorded(t *testing.T) {
	t.Parallel()
	pool, l, _ := open(t)
	posted := mustCharge(t, pool, l, "a", 7)
	posted.At = posted.At.UTC()
	require.Equal(t, budget.Posted{Scope: "a", Seq: 1, Amount: 7, At: start}, posted)
	looked, err := l.Check(t.Context(), pool, budget.Charge{Scope: "a", Amount: 7})
	require.NoError(t, err)
	require.Equal(t, budget.Receipt{Entries: []budget.Posted{{Scope: "a", Amount: 7}}}, looked)
}

func TestCharge_SeveralScopesAreChargedTogetherOrNotAtAll(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	pool, l, _ := open(t)
	free, tight := budget.Lifetime(100).Named("free"), budget.Limit{Max: 3, Window: time.Hour, Name: "tight"}
	charges := []budget.Charge{
		{Scope: "b", Amount: 2, Limits: []budget.Limit{free}},
		{Scope: "a", Amount: 1},
		{Scope: "c", Amount: 2, Limits: []budget.Limit{free, tight}},
	}
	for range 2 {
		require.NoError(t, pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
			r, err := l.Charge(ctx, tx, charges...)
			if exceeded := (*budget.ExceededError)(nil); errors.As(err, &exceeded) {
				require.Equal(t, []budget.Refusal{
					{Scope: "c", Limit: tight, Used: 2, Requested: 2, Available: 1, RetryAfter: time.Hour},
				}, exceeded.Refusals)
				return nil // commits, and the refused call has written nothing
			}
			require.NoError(t, err)
			require.Equal(t, []string{"b", "a", "c"}, []string{r.Entries[0].Scope, r.Entries[1].Scope, r.Entries[2].Scope})
			require.Equal(t, []budget.Standing{{Limit: free, Used: 2, Available: 98}, {Limit: tight, Used: 2, Available: 1}},
				r.Entries[2].Standings)
			return nil
		}))
	}
	for scope, spent := range map[string]int64{"a": 1, "b": 2, "c": 2} {
		u := usage(t, pool, l, scope, 0)
		require.Equal(t, spent, u.Spent)
		require.Equal(t, int64(1), u.Seq)
	}
}

func TestCharge_RepeatedScopesAreJudgedAndRecordedAsOne(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	pool, l, _ := open(t)
	first, second := budget.Lifetime(9).Named("first"), budget.Lifetime(10).Named("second")
	charges := []budget.Charge{
		{Scope: "a", Amount: 3, Limits: []budget.Limit{first}},
		{Scope: "b", Amount: 1},
		{Scope: "a", Amount: 3, Limits: []budget.Limit{first, second}},
	}
	require.NoError(t, pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		r, err := l.Charge(ctx, tx, charges...)
		require.NoError(t, err)
		require.Len(t, r.Entries, 2)
		require.Equal(t, int64(6), r.Entries[0].Amount)
		require.Equal(t, []budget.Standing{{Limit: first, Used: 6, Available: 3}, {Limit: second, Used: 6, Available: 4}},
			r.Entries[0].Standings)
		return nil
	}))
	_, err := l.Check(ctx, pool, charges...)
	var exceeded *budget.ExceededError
	require.ErrorAs(t, err, &exceeded)
	require.Equal(t, []budget.Refusal{
		{Scope: "a", Limit: first, Used: 6, Requested: 6, Available: 3, RetryAfter: budget.Never},
		{Scope: "a", Limit: second, Used: 6, Requested: 6, Available: 4, RetryAfter: budget.Never},
	}, exceeded.Refusals)
}

func TestCharge_RetryAfterIsNeverForAnAmountAboveTheLimit(t *testing.T) {
	t.Parallel()
	pool, l, _ := open(t)
	for _, limit := range []budget.Limit{budget.PerWindow(4, time.Hour), budget.PerWindow(0, time.Hour), budget.Lifetime(4), budget.Prepaid(0)} {
		_, err := charge(t.Context(), pool, l, "a", 5, limit)
		var exceeded *budget.ExceededError
		require.ErrorAs(t, err, &exceeded)
		require.Equal(t, budget.Never, exceeded.RetryAfter())
		require.Equal(t, limit.Max, exceeded.Refusals[0].Available)
	}
}

// Held units are in the ledger from the start: here as the owner writes them.
func TestCharge_HeldUnitsCountAgainstEveryLimit(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	pool, l, clock := open(t)
	mustCharge(t, pool, l, "a", 2)
	execute(t, pool, `update metered.ledger set held = 5, next_due = $1, hold = 'h', operation_tenant = 'n', operation = 'o'`, start.Add(time.Minute))
	execute(t, pool, `insert into metered.hold_lines (hold, key, amount, open, due, scope, opened_seq) values (1, 0, 5, 5, $1, 'a', 1)`, start.Add(time.Minute))
	clock.Advance(time.Second)
	hourly, brief, total := budget.Limit{Max: 10, Window: time.Hour}, budget.Limit{Max: 10, Window: 10 * time.Second}, budget.Lifetime(10)
	due := time.Minute - time.Second

	looked, err := l.Check(ctx, pool, budget.Charge{Scope: "a", Amount: 3, Limits: []budget.Limit{hourly, total}})
	require.NoError(t, err)
	require.Equal(t, budget.Standing{Limit: hourly, Used: 5, Held: 5}, looked.Entries[0].Standings[0])

	for _, refused := range []struct {
		amount int64
		limit  budget.Limit
		retry  time.Duration
	}{
		{4, hourly, due},                     // the hold is gone before the 2 have left
		{4, brief, 9 * time.Second},          // the 2 leave before that
		{6, hourly, due},                     // only when the hold is gone
		{9, brief, due},                      // when both are gone
		{9, hourly, time.Hour - time.Second}, // the same
		{4, total, due},
		{9, total, budget.Never}, // not even with nothing held
		{11, total, budget.Never},
		{11, hourly, budget.Never},
	} {
		_, err := l.Check(ctx, pool, budget.Charge{Scope: "a", Amount: refused.amount, Limits: []budget.Limit{refused.limit}})
		var exceeded *budget.ExceededError
		require.ErrorAs(t, err, &exceeded)
		require.Equal(t, []budget.Refusal{{
			Scope: "a", Limit: refused.limit, Used: 2, Held: 5, Requested: refused.amount, Available: 3,
			RetryAfter: refused.retry, HoldDue: due,
		}}, exceeded.Refusals)
	}
	u := usage(t, pool, l, "a", time.Hour)
	require.Equal(t, []int64{2, 5, int64(due)}, []int64{u.Used, u.Held, int64(u.HoldDue)})
	mustCredit(t, pool, l, "a", 1)
	posted := mustCharge(t, pool, l, "a", 1)
	require.NoError(t, refund(ctx, pool, l, "a", posted.Seq, 1))
	mustCredit(t, pool, l, "a", 1)
	u = usage(t, pool, l, "a", 0)
	require.Equal(t, []int64{5, int64(due)}, []int64{u.Held, int64(u.HoldDue)}, "every entry carries them on")
	for e, err := range l.Entries(ctx, pool, "a", budget.EntriesOptions{After: 1}) {
		require.NoError(t, err)
		require.Equal(t, []any{"", "", "", e.Kind == "refund"}, []any{e.Hold, e.OperationTenant, e.Operation, e.Ref != 0}, "and nothing else")
	}
}

func TestCharge_RaisedRefusalIsTheSameError(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	pool, l, _ := open(t)
	call, err := prepareCharges(l, budget.Charge{Scope: "a", Amount: 5, Limits: []budget.Limit{budget.Lifetime(4).Named("four")}})
	require.NoError(t, err)
	_, returned := call.Scan(pool.QueryRow(ctx, chargeSQL, chargeArgs(call)...))
	_, err = pool.Exec(ctx, `select metered._write_charges($1::metered.new_charge[], $2::interval, $3::int, null, 'raise', null, $4)`, chargeArgs(call)...)
	require.Equal(t, sqlstate.Exceeded, code(err))
	raised := call.Failed(err)
	require.ErrorIs(t, raised, budget.ErrExceeded)
	require.Equal(t, returned, raised)
	require.Zero(t, usage(t, pool, l, "a", 0).Seq)
}

func TestCharge_NoteIsStoredWithEveryKindOfEntry(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	pool, l, _ := open(t)
	note := budget.Note{Actor: `"<ann>" & co`, Tenant: "acme", Correlation: `\u0000 \t`, Reason: "日本語"}
	require.NoError(t, pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		_, err := l.Charge(ctx, tx, budget.Charge{Scope: "a", Amount: 1, Note: note})
		require.NoError(t, err)
		_, err = l.Credit(ctx, tx, budget.Credit{Scope: "a", Amount: 1, Note: note})
		require.NoError(t, err)
		_, err = l.Refund(ctx, tx, budget.Refund{Scope: "a", Seq: 1, Amount: 1, Note: note})
		require.NoError(t, err)
		_, err = l.Charge(ctx, tx, budget.Charge{Scope: "a", Amount: 1})
		return err
	}))
	for e, err := range l.Entries(ctx, pool, "a", budget.EntriesOptions{}) {
		require.NoError(t, err)
		require.Equal(t, e.Seq < 4, e.Note == note)
		require.Equal(t, e.Seq == 4, e.Note == budget.Note{})
	}
}

func TestRefusal_SaysWhenToRetryOrThatCreditIsNeeded(t *testing.T) {
	t.Parallel()
	refusal := func(limit budget.Limit, after time.Duration) string {
		r := budget.Refusal{Scope: "a", Limit: limit, Requested: 5, Available: 2, RetryAfter: after}
		return (&budget.ExceededError{Refusals: []budget.Refusal{r}}).Error()
	}
	const begin = `budget: limit exceeded: scope "a": requested 5, available 2, `
	require.Equal(t, begin+"limit 9 per 1h0m0s, retry after 5m0s", refusal(budget.Limit{Max: 9, Window: time.Hour}, 5*time.Minute))
	require.Equal(t, begin+"limit 4 per 1h0m0s, never fits", refusal(budget.Limit{Max: 4, Window: time.Hour}, budget.Never))
	require.Equal(t, begin+"the credit left, needs more credit", refusal(budget.Prepaid(0), budget.Never))
	require.Equal(t, begin+"the credit left, retry after 5m0s", refusal(budget.Prepaid(0), 5*time.Minute))
	require.Equal(t, begin+"limit 9 for the lifetime, waiting makes no room", refusal(budget.Lifetime(9), budget.Never))
	require.Equal(t, begin+"limit 9 for the lifetime, retry after 5m0s", refusal(budget.Lifetime(9), 5*time.Minute))

	const named = `budget: limit exceeded: scope "a", limit "the \"day\"": requested 5, available 2, `
	require.Equal(t, named+"limit 4 per 24h0m0s, never fits", refusal(budget.PerWindow(4, 24*time.Hour).Named(`the "day"`), budget.Never))
	require.Equal(t, named+"the credit left, needs more credit", refusal(budget.Prepaid(0).Named(`the "day"`), budget.Never))
}
