package budget_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/internal/pgtest"
)

// tampered is a scope with entries of every kind: 20 charges of 3 a minute apart,
// entry 21 a refund of 1 of charge 17, 22 a credit, 23 a clock repair, 24 a charge.
func tampered(t *testing.T) (find func(tamper string) []string) {
	ctx := t.Context()
	pool, l, clock := open(t)
	for range 20 {
		mustCharge(t, pool, l, "a", 3)
		clock.Advance(time.Minute)
	}
	require.NoError(t, refund(ctx, pool, l, "a", 17, 1))
	mustCredit(t, pool, l, "a", 9)
	clock.Advance(-time.Minute)
	_, err := repairClock(ctx, pool, l, "a")
	require.NoError(t, err)
	mustCharge(t, pool, l, "a", 3)
	mustCharge(t, pool, l, "b", 1)
	requireVerified(t, pool, l)
	execute(t, pool, `alter domain metered.units drop constraint units_check`)
	return func(tamper string) (found []string) {
		// The owner's changes are put back afterwards.
		execute(t, pool, `create table saved_ledger as table metered.ledger; create table saved_sums as table metered.refund_sum`)
		execute(t, pool, tamper)
		report, err := l.Verify(ctx, pool, budget.VerifyOptions{})
		require.NoError(t, err)
		for _, d := range report.Differences {
			require.Equal(t, "a", d.Scope)
			require.NotEqual(t, d.Got, d.Want)
			found = append(found, fmt.Sprintf("%d %s", d.Seq, d.Field))
		}
		execute(t, pool, `truncate metered.ledger, metered.refund_sum, metered.hold_lines;
			insert into metered.ledger table saved_ledger; insert into metered.refund_sum table saved_sums;
			drop table saved_ledger, saved_sums`)
		return found
	}
}

func TestVerify_NamesEveryKindOfDifference(t *testing.T) {
	t.Parallel()
	find := tampered(t)
	const update = `update metered.ledger set `
	for _, c := range []struct {
		tamper string
		found  []string
	}{
		{`select 1`, nil},
		{update + `spent = spent + 1 where scope = 'a' and seq = 5`, []string{"5 spent", "6 spent"}},
		{update + `spent = 0 where scope = 'a' and seq = 1`, []string{"1 spent", "2 spent"}},
		{update + `refunded = 0 where scope = 'a' and seq = 21`, []string{"21 refunded", "22 refunded"}},
		{update + `credited = 8 where scope = 'a' and seq = 24`, []string{"24 credited"}},
		{update + `held = 8 where scope = 'a' and seq = 24`, []string{"24 held", "24 units of open holds"}},
		{update + `epoch = 0 where scope = 'a' and seq = 24`, []string{"24 epoch"}},
		{update + `amount = 4 where scope = 'a' and seq = 3`, []string{"3 amount"}},
		{update + `amount = amount + seq where scope = 'a' and seq in (1, 3, 4, 16, 21)`, []string{"1 amount", "3 amount", "4 amount", "16 amount", "21 amount", "17 refund sum of level 0", "16 refund sum of level 1", "17 refunds"}},
		{update + `amount = 4 where scope = 'a' and seq = 24`, []string{"24 spent"}},
		{update + `amount = 4 where scope = 'a' and seq = 3; ` + update + `spent = 7 where scope = 'a' and seq = 4`, []string{"3 spent", "4 spent", "5 spent"}},
		{update + `amount = 0 where scope = 'a' and seq = 3`, []string{"3 amount"}},
		{update + `amount = 0 where scope = 'a' and seq = 24`, []string{"24 amount", "24 spent"}},
		{update + `amount = 2 where scope = 'a' and seq = 23`, []string{"23 amount"}},
		{update + `kind = 'q' where scope = 'a' and seq = 3`, []string{"3 kind", "3 spent", "3 charges"}},
		{update + `kind = 'x' where scope = 'a' and seq = 3`, []string{"3 spent", "3 held", "3 charges"}},
		{update + `kind = 'd' where scope = 'a' and seq = 3`, []string{"3 spent", "3 credited", "3 charges"}},
		{update + `kind = 'd' where scope = 'a' and seq = 17`, []string{"17 spent", "17 credited", "17 refunds", "17 charges"}},
		{update + `at = at - interval '2 min' where scope = 'a' and seq = 9`, []string{"9 at"}},
		{update + `at = at + interval '2 min' where scope = 'a' and seq = 9`, []string{"10 at"}},
		{update + `at = at + interval '2 min' where scope = 'a' and seq = 23`, []string{"23 at", "24 at"}},
		{update + `ref = 24 where scope = 'a' and seq = 21`, []string{"21 ref", "17 refund sum of level 0", "24 refund sum of level 0"}},
		{`delete from metered.ledger where scope = 'a' and seq = 7`, []string{"8 seq", "8 spent"}},
		{`delete from metered.ledger where scope = 'a' and seq = 1`, []string{"2 seq", "2 spent"}},
		{`delete from metered.ledger where scope = 'a' and seq between 2 and 9`, []string{"10 seq", "10 spent"}},
		{`update metered.refund_sum set amount = 2 where level = 0`, []string{"17 refund sum of level 0"}},
		{`delete from metered.refund_sum where level = 1`, []string{"16 refund sum of level 1"}},
		{`insert into metered.refund_sum values (19, 1, 0, 'a')`, []string{"19 refund sum of level 0"}},
		{`insert into metered.refund_sum values (1, 1, 2, 'a')`, []string{"256 refund sum of level 2"}},
		{update + `refunded = refunded + 100 where scope = 'a' and seq = 24`, []string{"24 refunded", "24 refunded"}},
		{update + `spent = -9, amount = -9 where scope = 'a' and seq = 1`, []string{"1 amount", "1 spent", "1 refunded", "2 spent"}},
		{`insert into metered.hold_lines (hold, key, amount, open, due, scope, opened_seq) values (1, 1, 3, 3, now(), 'a', 1)`, []string{"24 units of open holds"}},
		{`insert into metered.hold_lines (hold, key, amount, open, due, scope, opened_seq) values (1, 1, 3, -3, now(), 'a', 1)`, []string{"24 units of open holds", "24 hold lines"}},
		{`insert into metered.hold_lines (hold, key, amount, open, captured, due, scope, opened_seq) values (1, 1, 3, 0, -3, now(), 'a', 1)`, []string{"24 hold lines"}},
		{`update metered.refund_sum set amount = 4; ` + update + `refunded = 4, amount = case when seq = 21 then 4 else amount end
			where scope = 'a' and seq >= 21`, []string{"17 refunds"}},
	} {
		require.ElementsMatch(t, c.found, find(c.tamper), c.tamper)
	}
}

func TestVerify_ReportsProgressAndStopsAtItsBound(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	pool, l, _ := open(t)
	chargeMany(t, pool, l, "a", 20)
	chargeMany(t, pool, l, "b", 10)
	execute(t, pool, `insert into metered.ledger (seq, amount, at, spent, refunded, credited, held, epoch, kind, scope)
		select n, 1, $1, n, 0, 0, 0, 0, 'c', 'c' from generate_series(1, 20001) n`, start)
	var progress []budget.VerifyReport
	report, err := l.Verify(ctx, pool, budget.VerifyOptions{Progress: func(r budget.VerifyReport) { progress = append(progress, r) }})
	require.NoError(t, err)
	require.Equal(t, budget.VerifyReport{Scopes: 3, Entries: 20031, Last: "c"}, report)
	require.Equal(t, []budget.VerifyReport{
		{Scopes: 1, Entries: 20, Last: "a"}, {Scopes: 2, Entries: 30, Last: "b"},
		{Scopes: 2, Entries: 10030, Last: "b"}, {Scopes: 2, Entries: 20030, Last: "b"}, {Scopes: 3, Entries: 20031, Last: "c"},
	}, progress)

	one, err := l.Verify(ctx, pool, budget.VerifyOptions{Scope: "b"})
	require.NoError(t, err)
	require.Equal(t, budget.VerifyReport{Scopes: 1, Entries: 10, Last: "b"}, one)
	rest, err := l.Verify(ctx, pool, budget.VerifyOptions{After: "a"})
	require.NoError(t, err)
	require.Equal(t, budget.VerifyReport{Scopes: 2, Entries: 20011, Last: "c"}, rest)

	execute(t, pool, `update metered.ledger set spent = 7 where scope = 'b'`)
	report, err = l.Verify(ctx, pool, budget.VerifyOptions{MaxDifferences: 4})
	require.NoError(t, err)
	require.Len(t, report.Differences, 4)
	require.Equal(t, "a", report.Last, "not all of b was reported")
}

func TestVerify_CancelledReturnsTheDifferencesFound(t *testing.T) {
	t.Parallel()
	pool, l, _ := open(t)
	chargeMany(t, pool, l, "a", 3)
	chargeMany(t, pool, l, "b", 3)
	execute(t, pool, `update metered.ledger set held = 1 where seq = 3`)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	report, err := l.Verify(ctx, pool, budget.VerifyOptions{Progress: func(budget.VerifyReport) { cancel() }})
	require.ErrorIs(t, err, context.Canceled)
	require.Equal(t, 1, report.Scopes)
	require.Len(t, report.Differences, 2)
}

// A purge leaves nothing that looks like a difference, and the kept entries are checked.
func TestVerify_AfterAPurgeBeginsWithTheKeptEntries(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	pool, l, clock := open(t)
	chargeMany(t, pool, l, "a", 60)
	for _, seq := range []int64{1, 30, 32, 33, 47, 60} {
		require.NoError(t, refund(ctx, pool, l, "a", seq, 1))
	}
	clock.Advance(time.Hour)
	chargeMany(t, pool, l, "a", 60)
	require.Equal(t, int64(63), purge(t, pool, l, time.Minute).Entries)
	require.NoError(t, refund(ctx, pool, l, "a", 90, 1))
	requireVerified(t, pool, l)
	execute(t, pool, `update metered.refund_sum set amount = 5 where level = 0 and block = 90`)
	report, err := l.Verify(ctx, pool, budget.VerifyOptions{})
	require.NoError(t, err)
	require.Len(t, report.Differences, 1)
}

// The statement about lots takes longer to plan than all others together. A scope that is no wallet is spared it.
func TestVerify_LooksForLotsInWalletsAlone(t *testing.T) {
	t.Parallel()
	pool, l, _ := open(t)
	_, err := charge(t.Context(), pool, l, "plain", 1)
	require.NoError(t, err)
	tapped, wire := pgtest.Tap(t, pool, nil)
	asked := func() (n int) {
		for _, f := range wire.Sent() {
			if f.Has("rests of lots") {
				n++
			}
		}
		return n
	}
	wire.Each(nil)
	_, err = l.Verify(t.Context(), tapped, budget.VerifyOptions{})
	require.NoError(t, err)
	require.Zero(t, asked())
	execute(t, pool, `select metered.grant_lot('plain', null, row(10, null, null, '', 0, null, null, null, null, null)::metered.new_lot, false, 1000, null)`)
	_, err = l.Verify(t.Context(), tapped, budget.VerifyOptions{})
	require.NoError(t, err)
	require.Positive(t, asked())
}
