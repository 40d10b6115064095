package leases_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/niltest"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/internal/purge"
	"github.com/pgmetered/metered/leases"
)

func TestCarve_HoldsOfTheChildEndBeforeItIsSettled(t *testing.T) {
	t.Parallel()
	f := carver(t, 1_000)
	clock := pgtest.SetClock(t, f.db, time.Now())
	_, err := f.carve(pgx.ReadCommitted, "run", "user", 600)
	require.NoError(t, err)
	require.NoError(t, f.hold("a", "run", 50, time.Hour))
	require.NoError(t, f.hold("b", "run", 70, 30*time.Minute))
	require.NoError(t, f.hold("c", "run", 20, time.Hour))
	require.NoError(t, f.charge(pgx.ReadCommitted, "run", 5))
	l, err := f.close(pgx.ReadCommitted, "run")
	require.NoError(t, err)
	require.Zero(t, l.SettledAt)
	f.stands("user", 0, 0, 600)
	f.stands("run", 5, 140, 0)
	require.ErrorIs(t, f.charge(pgx.ReadCommitted, "run", 1), budget.ErrScopeClosed)

	over := func(policy holds.Over, amount int64) error {
		return f.in(pgx.ReadCommitted, func(tx pgx.Tx) error {
			_, err := f.book.Capture(t.Context(), tx, holds.Capture{IDs: []string{"a"}, Over: policy, Lines: []holds.Line{{Scope: "run", Amount: amount}}})
			return err
		})
	}
	require.ErrorIs(t, over(holds.OverAllowed, 51), budget.ErrScopeClosed, "more than was held is new")
	require.NoError(t, over(holds.OverRefused, 40))
	require.ErrorIs(t, f.charge(pgx.ReadCommitted, "run", 1), budget.ErrScopeClosed, "the close is not its last entry any more")
	require.NoError(t, f.in(pgx.ReadCommitted, func(tx pgx.Tx) error {
		_, err := f.book.Release(t.Context(), tx, holds.Release{IDs: []string{"c"}})
		return err
	}))
	l, err = f.close(pgx.ReadCommitted, "run")
	require.NoError(t, err)
	require.Zero(t, l.SettledAt)
	clock.Advance(31 * time.Minute) // the last one is due
	l, err = f.close(pgx.ReadCommitted, "run")
	require.NoError(t, err)
	require.NotZero(t, l.SettledAt)
	require.Equal(t, int64(45), l.Spent)
	f.stands("user", 45, 0, 0)
	f.stands("run", 45, 0, 0)
	require.ErrorIs(t, f.in(pgx.ReadCommitted, func(tx pgx.Tx) error {
		_, err := f.book.Return(t.Context(), tx, holds.Return{IDs: []string{"a"}, All: true})
		return err
	}), budget.ErrScopeClosed)
	require.ErrorIs(t, f.charge(pgx.ReadCommitted, "run", 1), budget.ErrScopeClosed)
}

func TestCarve_AChildOfAChildIsSettledFirst(t *testing.T) {
	t.Parallel()
	f := carver(t, 1_000)
	clock := pgtest.SetClock(t, f.db, time.Now())
	run, err := f.carve(pgx.ReadCommitted, "run", "user", 600)
	require.NoError(t, err)
	clock.Advance(10 * time.Minute)
	step, err := f.carve(pgx.ReadCommitted, "step", "run", 200)
	require.NoError(t, err)
	require.Equal(t, run.EndsAt, step.EndsAt, "not an hour from now")
	require.NoError(t, f.charge(pgx.ReadCommitted, "step", 30, budget.Prepaid(0)))
	require.NoError(t, f.charge(pgx.ReadCommitted, "run", 7, budget.Prepaid(0)))
	l, err := f.close(pgx.ReadCommitted, "run")
	require.NoError(t, err)
	require.Zero(t, l.SettledAt, "its child is open")
	f.stands("user", 0, 0, 600)
	require.NoError(t, f.charge(pgx.ReadCommitted, "step", 3, budget.Prepaid(0)), "which was held before")
	clock.Advance(50 * time.Minute)
	report, err := leases.Sweep(t.Context(), f.db, f.ledger)
	require.NoError(t, err)
	require.Equal(t, leases.SweepReport{Settled: 2}, report, "in one go")
	f.stands("step", 33, 0, 0)
	f.stands("run", 40, 0, 0)
	f.stands("user", 40, 0, 0)
}

// A run that nobody closes is closed at its end, by a Pool or by Sweep, however many there are.
func TestCarve_ACrashedRunIsClosedAtItsEnd(t *testing.T) {
	t.Parallel()
	f := carver(t, 100_000)
	clock := pgtest.SetClock(t, f.db, time.Now())
	pool := f.pool(leases.Rule{Prefix: "hot"})
	for i := range 30 {
		child := fmt.Sprint("run/", i)
		_, err := f.carve(pgx.ReadCommitted, child, "user", 100)
		require.NoError(t, err)
		require.NoError(t, f.charge(pgx.ReadCommitted, child, 10))
	}
	clock.Advance(30 * time.Minute)
	require.NoError(t, f.hold("held", "run/29", 5, time.Hour))
	clock.Advance(30*time.Minute - time.Millisecond)
	report, err := leases.Sweep(t.Context(), f.db, f.ledger)
	require.NoError(t, err)
	require.Zero(t, report, "never early")
	clock.Advance(time.Millisecond)
	require.NoError(t, f.charge(pgx.ReadCommitted, "run/3", 1), "until it is closed")
	reports := make([]leases.SweepReport, 4)
	require.NoError(t, pgtest.InParallel(4, func(w int) (err error) {
		reports[w], err = leases.Sweep(context.Background(), f.db, f.ledger)
		return err
	}))
	settled := 0
	for _, r := range reports {
		settled += r.Settled
		require.Zero(t, r.Busy)
	}
	require.Equal(t, 29, settled)
	f.stands("user", 291, 0, 100)
	report, err = leases.Sweep(t.Context(), f.db, f.ledger)
	require.NoError(t, err)
	require.Equal(t, leases.SweepReport{Held: 1}, report)
	clock.Advance(time.Hour)
	report, err = leases.Sweep(t.Context(), f.db, f.ledger)
	require.NoError(t, err)
	require.Equal(t, leases.SweepReport{Settled: 1}, report)
	f.stands("user", 301, 0, 0)
	var seen int
	for l, err := range pool.History(t.Context(), f.db, "user") {
		require.NoError(t, err)
		require.Equal(t, "carved", l.Mode)
		seen++
	}
	require.Equal(t, 30, seen)
}

// A child is leased to processes as any scope: its leases end before it is settled.
func TestCarve_LeasesOfTheChildEndBeforeItIsSettled(t *testing.T) {
	t.Parallel()
	f := carver(t, 1<<40)
	_, err := f.carve(pgx.ReadCommitted, "hot", "user", 1<<30)
	require.NoError(t, err)
	p := f.pool(patient)
	spent := f.warm(p, charge(5, budget.Prepaid(0)))
	l, err := f.close(pgx.ReadCommitted, "hot")
	require.NoError(t, err)
	require.Zero(t, l.SettledAt)
	r, err := f.spend(p, pgx.ReadCommitted, charge(5, budget.Prepaid(0)))
	require.NoError(t, err, "the leased units can be spent")
	require.NotZero(t, r.Entries[0].Lease)
	require.NoError(t, p.Close(t.Context()))
	l, err = f.close(pgx.ReadCommitted, "hot")
	require.NoError(t, err)
	require.Equal(t, spent+5, l.Spent)
	f.stands("user", spent+5, 0, 0)
}

// Units that a child charged beyond its credit are captured too, and show.
func TestCarve_AChildThatChargesMoreThanItHasIsCapturedInFull(t *testing.T) {
	t.Parallel()
	f := carver(t, 1_000)
	_, err := f.carve(pgx.ReadCommitted, "run", "user", 100)
	require.NoError(t, err)
	require.NoError(t, f.charge(pgx.ReadCommitted, "run", 130))
	l, err := f.close(pgx.ReadCommitted, "run")
	require.NoError(t, err)
	require.Equal(t, int64(130), l.Spent)
	f.stands("user", 130, 0, 0)
}

// A purge that forgets scopes opens no child again that was closed, as long as its lease is there.
func TestCarve_APurgeForgetsAChildOnceItsLeaseIsPurged(t *testing.T) {
	t.Parallel()
	f := carver(t, 1_000)
	clock := pgtest.SetClock(t, f.db, time.Now())
	for _, child := range []string{"open", "held", "settled"} {
		_, err := f.carve(pgx.ReadCommitted, child, "user", 100)
		require.NoError(t, err)
		require.NoError(t, f.charge(pgx.ReadCommitted, child, 10))
	}
	require.NoError(t, f.hold("h", "held", 5, time.Hour))
	for _, child := range []string{"held", "settled"} {
		_, err := f.close(pgx.ReadCommitted, child)
		require.NoError(t, err)
	}
	clock.Advance(24 * time.Hour)
	_, err := f.book.Sweep(t.Context(), f.db, holds.SweepOptions{})
	require.NoError(t, err)
	clock.Advance(24 * time.Hour)
	purged := func() []string {
		_, err := f.ledger.Purge(t.Context(), f.db, budget.PurgeOptions{OlderThan: time.Hour, Forget: func(string) bool { return true }})
		require.NoError(t, err)
		f.verified()
		return pgtest.Value[[]string](t, f.db, `select array_agg(distinct scope order by scope) from metered.ledger`)
	}
	require.Equal(t, []string{"held", "open", "settled", "user"}, purged())
	require.ErrorIs(t, f.charge(pgx.ReadCommitted, "settled", 1), budget.ErrScopeClosed)
	_, err = purge.Leases.Delete(t.Context(), f.db, purge.Options{OlderThan: time.Hour})
	require.NoError(t, err)
	require.Equal(t, []string{"held", "open", "user"}, purged())
	report, err := leases.Sweep(t.Context(), f.db, f.ledger)
	require.NoError(t, err)
	require.Equal(t, 2, report.Settled)
	f.stands("user", 30, 0, 0)
}

// Verify reports a child that spent another number of units than were captured for it, and a charge that was let in
// after its end.
func TestVerify_KnowsChildren(t *testing.T) {
	t.Parallel()
	f := carver(t, 1_000)
	_, err := f.carve(pgx.ReadCommitted, "run", "user", 100)
	require.NoError(t, err)
	require.NoError(t, f.charge(pgx.ReadCommitted, "run", 10))
	_, err = f.close(pgx.ReadCommitted, "run")
	require.NoError(t, err)
	f.verified()
	_, err = f.db.Exec(t.Context(), `insert into metered.ledger (seq, amount, at, spent, refunded, credited, held, epoch, kind, scope, next_due, others)
		select seq + 1, 7, at, spent + 7, refunded, credited, held, epoch, 'c', scope, next_due, others from metered.ledger where scope = 'run' and kind = 'z'`)
	require.NoError(t, err)
	report, err := f.ledger.Verify(t.Context(), f.db, budget.VerifyOptions{})
	require.NoError(t, err)
	fields := map[string]string{}
	for _, d := range report.Differences {
		fields[d.Scope] = d.Field
	}
	require.Equal(t, map[string]string{"run": "kind", "user": "captured for lease 1"}, fields)
}

func TestCarver_NilIsRefused(t *testing.T) {
	t.Parallel()
	f := carver(t, 0)
	tx, err := f.db.Begin(t.Context())
	require.NoError(t, err)
	defer func() { _ = tx.Rollback(context.Background()) }()
	note := budget.Note{Actor: "ann"}
	niltest.Methods(t, f.carver, map[string][]any{
		"Carve": {tx, leases.Carving{Child: "a", From: budget.Charge{Scope: "b", Amount: 1}, TTL: time.Minute}},
		"End":   {tx, "a", note}, "Receive": {tx, leases.Lease{Child: "a", Granted: 1, EndsAt: time.Now()}, note},
		"SettleAway": {tx, "a", int64(1), note}, "WriteOff": {tx, "a", note}, "Get": {f.db, "a"},
	})
	niltest.Func(t, "NewCarver", leases.NewCarver, f.ledger)
}

func TestCarver_RefusesArgumentsOutOfBounds(t *testing.T) {
	t.Parallel()
	f := carver(t, 0)
	strict, err := budget.New(budget.Config{RequireActor: true})
	require.NoError(t, err)
	careful, err := leases.NewCarver(strict)
	require.NoError(t, err)
	from := budget.Charge{Scope: "user", Amount: 1}
	require.NoError(t, pgx.BeginFunc(t.Context(), f.db, func(tx pgx.Tx) error {
		for field, g := range map[string]leases.Carving{
			"Carving.Child":         {From: from, TTL: time.Minute},
			"Carving.From.Note.Use": {Child: "a", From: budget.Charge{Scope: "b", Amount: 1, Note: budget.Note{Use: "images"}}, TTL: time.Minute},
			"Carving.TTL":           {Child: "a", From: from},
			"charges[0].Amount":     {Child: "a", From: budget.Charge{Scope: "user"}, TTL: time.Minute},
			"Carving.From.Limits": {Child: "a", From: budget.Charge{Scope: "user", Amount: 1, Limits: []budget.Limit{
				budget.Lifetime(0).MaxFrom("select 1")}}, TTL: time.Minute},
		} {
			_, err := f.carver.Carve(t.Context(), tx, g)
			var argument *budget.ArgumentError
			require.ErrorAs(t, err, &argument, field)
			require.Equal(t, field, argument.Field)
		}
		_, err := f.carver.Carve(t.Context(), tx, leases.Carving{Child: "user", From: from, TTL: time.Minute})
		require.ErrorIs(t, err, budget.ErrArgument)
		_, err = f.carver.SettleAway(t.Context(), tx, "a", -1, budget.Note{})
		require.ErrorIs(t, err, budget.ErrArgument)
		_, err = f.carver.Receive(t.Context(), tx, leases.Lease{Child: "a", Granted: -1}, budget.Note{})
		require.ErrorIs(t, err, budget.ErrArgument)
		_, err = careful.End(t.Context(), tx, "a", budget.Note{})
		require.ErrorIs(t, err, budget.ErrArgument, "it has no actor")
		return nil
	}))
}
