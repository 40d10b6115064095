package leases_test

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/leases"
)

type carving struct {
	*fixture
	carver *leases.Carver
	book   *holds.Book
}

// carve has a user with credit.
func carver(t *testing.T, credit int64) *carving {
	f := &carving{fixture: setUp(t)}
	var err error
	f.carver, err = leases.NewCarver(f.ledger)
	require.NoError(t, err)
	f.book, err = holds.New(f.ledger, holds.Config{})
	require.NoError(t, err)
	if credit > 0 {
		require.NoError(t, f.in(pgx.ReadCommitted, func(tx pgx.Tx) error {
			_, err := f.ledger.Credit(t.Context(), tx, budget.Credit{Scope: "user", Amount: credit})
			return err
		}))
	}
	return f
}

// in runs do in a transaction, again where it met others.
func (f *carving) in(level pgx.TxIsoLevel, do func(tx pgx.Tx) error) error {
	for {
		err := pgx.BeginTxFunc(context.Background(), f.db, pgx.TxOptions{IsoLevel: level}, do)
		if !errors.Is(err, budget.ErrSerialization) {
			return err
		}
	}
}

func (f *carving) carve(level pgx.TxIsoLevel, child, parent string, amount int64) (l leases.Lease, err error) {
	err = f.in(level, func(tx pgx.Tx) (err error) {
		l, err = f.carver.Carve(context.Background(), tx, leases.Carving{
			Child: child, From: budget.Charge{Scope: parent, Amount: amount, Limits: []budget.Limit{budget.Prepaid()}}, TTL: time.Hour,
		})
		return err
	})
	return l, err
}

func (f *carving) close(level pgx.TxIsoLevel, child string) (l leases.Lease, err error) {
	err = f.in(level, func(tx pgx.Tx) (err error) {
		l, err = f.carver.Close(context.Background(), tx, child, budget.Note{Actor: "ann"})
		return err
	})
	return l, err
}

func (f *carving) charge(level pgx.TxIsoLevel, scope string, amount int64, limits ...budget.Limit) error {
	return f.in(level, func(tx pgx.Tx) error {
		_, err := f.ledger.Charge(context.Background(), tx, budget.Charge{Scope: scope, Amount: amount, Limits: limits})
		return err
	})
}

func (f *carving) hold(id, scope string, amount int64, ttl time.Duration) error {
	return f.in(pgx.ReadCommitted, func(tx pgx.Tx) error {
		_, err := f.book.Place(context.Background(), tx, holds.Request{ID: id, TTL: ttl, Lines: []holds.Line{{Scope: scope, Amount: amount}}})
		return err
	})
}

// stands checks what a scope has spent, what holds and what leases keep of it, and the whole ledger.
func (f *carving) stands(scope string, spent, held, leased int64) {
	f.Helper()
	u := f.usage(scope)
	require.Equal(f, []int64{spent, held, leased}, []int64{u.Spent - u.Refunded, u.Held, u.Leased}, scope)
	f.verified()
}

func (f *carving) verified() {
	f.Helper()
	report, err := f.ledger.Verify(context.Background(), f.db, budget.VerifyOptions{})
	require.NoError(f, err)
	require.Empty(f, report.Differences)
}

func TestCarve_WhatTheChildChargesIsCapturedAtTheParent(t *testing.T) {
	t.Parallel()
	for _, level := range levels {
		f := carver(t, 1_000)
		l, err := f.carve(level, "run", "user", 600)
		require.NoError(t, err)
		require.Equal(t, leases.ModeCarved, l.Mode)
		require.Equal(t, []any{int64(600), "run", "user"}, []any{l.Granted, l.Child, l.Scope})
		require.WithinDuration(t, time.Now().Add(time.Hour), l.EndsAt, time.Minute)
		f.stands("user", 0, 0, 600)
		require.ErrorIs(t, f.charge(level, "user", 401, budget.Prepaid()), budget.ErrExceeded)
		require.NoError(t, f.charge(level, "user", 100, budget.Prepaid()))
		require.NoError(t, f.charge(level, "run", 250, budget.Prepaid()))
		require.ErrorIs(t, f.charge(level, "run", 351, budget.Prepaid()), budget.ErrExceeded)

		l, err = f.close(level, "run")
		require.NoError(t, err)
		require.NotZero(t, l.SettledAt)
		require.Equal(t, []any{int64(250), "ann"}, []any{l.Spent, l.SettledBy})
		f.stands("user", 350, 0, 0)
		require.NoError(t, f.charge(level, "user", 650, budget.Prepaid()), "the rest is free again")

		again, err := f.close(level, "run")
		require.NoError(t, err)
		require.Equal(t, l, again)
		got, err := f.carver.Get(t.Context(), f.db, "run")
		require.NoError(t, err)
		require.Equal(t, l, got)
	}
}

func TestCarve_AClosedChildLetsNothingIn(t *testing.T) {
	t.Parallel()
	f := carver(t, 1_000)
	client := pgtest.NewClient(t, f.db, metered.Config{})
	_, err := f.carve(pgx.ReadCommitted, "run", "user", 600)
	require.NoError(t, err)
	require.NoError(t, f.charge(pgx.ReadCommitted, "run", 10))
	_, err = f.close(pgx.ReadCommitted, "run")
	require.NoError(t, err)
	for _, level := range levels {
		for what, do := range map[string]func(tx pgx.Tx) error{
			"a charge": func(tx pgx.Tx) error {
				_, err := f.ledger.Charge(t.Context(), tx, budget.Charge{Scope: "run", Amount: 1})
				return err
			},
			"a charge with another scope": func(tx pgx.Tx) error {
				_, err := f.ledger.Charge(t.Context(), tx, budget.Charge{Scope: "run", Amount: 1, Limits: []budget.Limit{budget.PerWindow(1_000, time.Hour)}},
					budget.Charge{Scope: "user", Amount: 9_999, Limits: []budget.Limit{budget.Prepaid()}})
				return err
			},
			"a look": func(tx pgx.Tx) error {
				_, err := f.ledger.Check(t.Context(), tx, budget.Charge{Scope: "run", Amount: 1})
				return err
			},
			"a hold": func(tx pgx.Tx) error {
				_, err := f.book.Place(t.Context(), tx, holds.Request{TTL: time.Minute, Lines: []holds.Line{{Scope: "run", Amount: 1}}})
				return err
			},
			"a credit": func(tx pgx.Tx) error {
				_, err := f.ledger.Credit(t.Context(), tx, budget.Credit{Scope: "run", Amount: 1})
				return err
			},
			"a refund": func(tx pgx.Tx) error {
				_, err := f.ledger.Refund(t.Context(), tx, budget.Refund{Scope: "run", Seq: 2, Amount: 1})
				return err
			},
			"a carving": func(tx pgx.Tx) error {
				_, err := f.carver.Carve(t.Context(), tx, leases.Carving{Child: "step", From: budget.Charge{Scope: "run", Amount: 1}, TTL: time.Minute})
				return err
			},
		} {
			err := f.in(level, do)
			require.ErrorIs(t, err, budget.ErrScopeClosed, what)
			var closed *budget.ScopeError
			require.ErrorAs(t, err, &closed, what)
			require.Equal(t, []string{"run"}, closed.Closed, what)
			require.Equal(t, "scope_closed", metered.Code(err), what)
		}
	}
	_, err = metered.Do[int](t.Context(), client, metered.Command{ID: "late", Charges: []budget.Charge{{Scope: "run", Amount: 1}}}, nil)
	require.ErrorIs(t, err, budget.ErrScopeClosed)
	_, err = metered.Do(t.Context(), client, metered.Command{ID: "later", Input: 1}, func(_ context.Context, tx *metered.Tx) (int, error) {
		return 0, tx.Charge(budget.Charge{Scope: "run", Amount: 1})
	})
	require.ErrorIs(t, err, budget.ErrScopeClosed, "in the last flush")
	f.stands("user", 10, 0, 0)

	var kinds []budget.Kind
	for e, err := range f.ledger.Entries(t.Context(), f.db, "run", budget.EntriesOptions{}) {
		require.NoError(t, err)
		require.Zero(t, e.HoldDue)
		kinds = append(kinds, e.Kind)
	}
	require.Equal(t, []budget.Kind{budget.KindCredit, budget.KindCharge, budget.KindClose}, kinds)
	require.Equal(t, "close", pgtest.Value[string](t, f.db, `select kind from metered.ledger_words where scope = 'run' order by seq desc limit 1`))
}

func TestCarve_HappensOncePerChild(t *testing.T) {
	t.Parallel()
	f := carver(t, 1_000)
	for _, level := range levels {
		child := "run/" + string(level)
		require.NoError(t, pgtest.InParallel(8, func(int) error {
			l, err := f.carve(level, child, "user", 100)
			if err == nil && l.Granted != 100 {
				err = fmt.Errorf("%+v", l)
			}
			return err
		}))
		_, err := f.carve(level, child, "user", 101)
		require.ErrorIs(t, err, leases.ErrCarved)
		_, err = f.carve(level, child, "another", 100)
		require.ErrorIs(t, err, leases.ErrCarved)
		_, err = f.carve(level, "user", child, 1)
		require.ErrorIs(t, err, leases.ErrChildUsed)
	}
	f.stands("user", 0, 0, 300)
	require.Equal(t, int64(100), -f.usage("run/serializable").Used)

	// A rollback takes it back.
	tx, err := f.db.Begin(t.Context())
	require.NoError(t, err)
	_, err = f.carver.Carve(t.Context(), tx, leases.Carving{Child: "never", From: budget.Charge{Scope: "user", Amount: 5}, TTL: time.Hour})
	require.NoError(t, err)
	require.NoError(t, tx.Rollback(t.Context()))
	_, err = f.carver.Get(t.Context(), f.db, "never")
	require.ErrorIs(t, err, leases.ErrUnknownChild)
	_, err = f.close(pgx.ReadCommitted, "never")
	require.ErrorIs(t, err, leases.ErrUnknownChild)
	f.stands("user", 0, 0, 300)

	// Two parents for one child, at the same time: one has it.
	var won atomic.Int64
	require.NoError(t, pgtest.InParallel(8, func(w int) error {
		_, err := f.carve(pgx.ReadCommitted, "wanted", "user", int64(1+w))
		if err == nil {
			won.Add(1)
		} else if errors.Is(err, leases.ErrCarved) {
			return nil
		}
		return err
	}))
	require.Equal(t, int64(1), won.Load())
}

func TestCarve_NeverMoreThanTheParentHas(t *testing.T) {
	t.Parallel()
	f := carver(t, 1_000)
	var carved atomic.Int64
	require.NoError(t, pgtest.InParallel(12, func(w int) error {
		for i := range 5 {
			_, err := f.carve(levels[w%3], fmt.Sprint("run/", w, "/", i), "user", 30)
			switch {
			case err == nil:
				carved.Add(30)
			case !errors.Is(err, budget.ErrExceeded):
				return err
			}
		}
		return nil
	}))
	require.Equal(t, int64(990), carved.Load())
	f.stands("user", 0, 0, 990)
	_, err := f.carve(pgx.ReadCommitted, "more", "user", 11)
	var exceeded *budget.ExceededError
	require.ErrorAs(t, err, &exceeded)
	require.Equal(t, []int64{10, 990}, []int64{exceeded.Refusals[0].Available, exceeded.Refusals[0].Leased})
}

// Charges of a child race its close: those that committed are captured, and no other commits.
func TestCarve_ClosingIsFencedAtEveryLevel(t *testing.T) {
	t.Parallel()
	f := carver(t, 1<<40)
	for round := range 12 {
		child := fmt.Sprint("run/", round)
		_, err := f.carve(pgx.ReadCommitted, child, "user", 1_000_000)
		require.NoError(t, err)
		before := f.usage("user").Spent
		var charged atomic.Int64
		closing := make(chan struct{})
		done := pgtest.Going(func() error {
			return pgtest.InParallel(6, func(w int) error {
				for n := 0; ; n++ {
					if n == 3 && w == 0 {
						close(closing)
					}
					switch err := f.charge(levels[w%3], child, 3, budget.Prepaid()); {
					case err == nil:
						charged.Add(3)
					case errors.Is(err, budget.ErrScopeClosed):
						return nil
					default:
						return err
					}
				}
			})
		})
		<-closing
		require.NoError(t, pgtest.InParallel(3, func(w int) error { _, err := f.close(levels[(w+round)%3], child); return err }))
		l, err := f.carver.Get(t.Context(), f.db, child)
		require.NoError(t, err)
		require.NoError(t, <-done)
		require.NotZero(t, l.SettledAt)
		require.Equal(t, charged.Load(), l.Spent)
		require.Equal(t, charged.Load(), f.usage("user").Spent-before)
	}
	f.verified()
}

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
		_, err := f.book.Refund(t.Context(), tx, holds.Refund{IDs: []string{"a"}, All: true})
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
	require.NoError(t, f.charge(pgx.ReadCommitted, "step", 30, budget.Prepaid()))
	require.NoError(t, f.charge(pgx.ReadCommitted, "run", 7, budget.Prepaid()))
	l, err := f.close(pgx.ReadCommitted, "run")
	require.NoError(t, err)
	require.Zero(t, l.SettledAt, "its child is open")
	f.stands("user", 0, 0, 600)
	require.NoError(t, f.charge(pgx.ReadCommitted, "step", 3, budget.Prepaid()), "which was held before")
	clock.Advance(50 * time.Minute)
	report, err := f.carver.Sweep(t.Context(), f.db)
	require.NoError(t, err)
	require.Equal(t, leases.SettleReport{Settled: 2}, report, "in one go")
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
	report, err := f.carver.Sweep(t.Context(), f.db)
	require.NoError(t, err)
	require.Zero(t, report, "never early")
	clock.Advance(time.Millisecond)
	require.NoError(t, f.charge(pgx.ReadCommitted, "run/3", 1), "until it is closed")
	reports := make([]leases.SettleReport, 4)
	require.NoError(t, pgtest.InParallel(4, func(w int) (err error) {
		if w%2 == 0 {
			reports[w], err = f.carver.Sweep(context.Background(), f.db)
		} else {
			reports[w], err = pool.Settle(context.Background())
		}
		return err
	}))
	settled := 0
	for _, r := range reports {
		settled += r.Settled
		require.Zero(t, r.Busy)
	}
	require.Equal(t, 29, settled)
	f.stands("user", 291, 0, 100)
	report, err = f.carver.Sweep(t.Context(), f.db)
	require.NoError(t, err)
	require.Equal(t, leases.SettleReport{Held: 1}, report)
	clock.Advance(time.Hour)
	report, err = pool.Settle(t.Context())
	require.NoError(t, err)
	require.Equal(t, leases.SettleReport{Settled: 1}, report)
	f.stands("user", 301, 0, 0)
	var seen int
	for l, err := range pool.History(t.Context(), f.db, "user") {
		require.NoError(t, err)
		require.Equal(t, leases.ModeCarved, l.Mode)
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
	p := f.pool(leases.Rule{})
	spent := f.warm(p, charge(5, budget.Prepaid()))
	l, err := f.close(pgx.ReadCommitted, "hot")
	require.NoError(t, err)
	require.Zero(t, l.SettledAt)
	r, err := f.spend(p, pgx.ReadCommitted, charge(5, budget.Prepaid()))
	require.NoError(t, err, "what was leased can be spent")
	require.NotZero(t, r.Entries[0].Lease)
	require.NoError(t, p.Close(t.Context()))
	l, err = f.close(pgx.ReadCommitted, "hot")
	require.NoError(t, err)
	require.Equal(t, spent+5, l.Spent)
	f.stands("user", spent+5, 0, 0)
}

// What a child charged in spite of its credit is captured, and shows.
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

func TestCarve_APurgeForgetsAChildThatIsSettled(t *testing.T) {
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
	_, err = f.ledger.Purge(t.Context(), f.db, budget.PurgeOptions{OlderThan: time.Hour, Forget: func(string) bool { return true }})
	require.NoError(t, err)
	require.Equal(t, []string{"held", "open", "user"}, pgtest.Value[[]string](t, f.db, `select array_agg(distinct scope order by scope) from metered.ledger`))
	f.verified()
	report, err := f.carver.Sweep(t.Context(), f.db)
	require.NoError(t, err)
	require.Equal(t, 2, report.Settled)
	f.stands("user", 30, 0, 0)
}

// Verify tells when a child spent something else than was captured for it, and when something was let in after its end.
func TestVerify_KnowsChildren(t *testing.T) {
	t.Parallel()
	f := carver(t, 1_000)
	_, err := f.carve(pgx.ReadCommitted, "run", "user", 100)
	require.NoError(t, err)
	require.NoError(t, f.charge(pgx.ReadCommitted, "run", 10))
	_, err = f.close(pgx.ReadCommitted, "run")
	require.NoError(t, err)
	f.verified()
	_, err = f.db.Exec(t.Context(), `insert into metered.ledger (seq, amount, at, spent, refunded, credited, held, epoch, kind, scope, next_due)
		select seq + 1, 7, at, spent + 7, refunded, credited, held, epoch, 'c', scope, next_due from metered.ledger where scope = 'run' and kind = 'z'`)
	require.NoError(t, err)
	report, err := f.ledger.Verify(t.Context(), f.db, budget.VerifyOptions{})
	require.NoError(t, err)
	fields := map[string]string{}
	for _, d := range report.Differences {
		fields[d.Scope] = d.Field
	}
	require.Equal(t, map[string]string{"run": "kind", "user": "captured for lease 1"}, fields)
}
