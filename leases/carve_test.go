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
			Child: child, From: budget.Charge{Scope: parent, Amount: amount, Limits: []budget.Limit{budget.Prepaid(0)}}, TTL: time.Hour,
		})
		return err
	})
	return l, err
}

func (f *carving) close(level pgx.TxIsoLevel, child string) (l leases.Lease, err error) {
	err = f.in(level, func(tx pgx.Tx) (err error) {
		l, err = f.carver.End(context.Background(), tx, child, budget.Note{Actor: "ann"})
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
		_, err := f.book.Place(context.Background(), tx, holds.Placement{ID: id, TTL: ttl, Lines: []holds.Line{{Scope: scope, Amount: amount}}})
		return err
	})
}

// stands checks the units of a scope that are spent, held and leased, and the whole ledger.
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

func TestCarve_TheChildsChargesAreCapturedAtTheParent(t *testing.T) {
	t.Parallel()
	for _, level := range levels {
		f := carver(t, 1_000)
		l, err := f.carve(level, "run", "user", 600)
		require.NoError(t, err)
		require.Equal(t, "carved", l.Mode)
		require.Equal(t, []any{int64(600), "run", "user"}, []any{l.Granted, l.Child, l.Scope})
		require.WithinDuration(t, time.Now().Add(time.Hour), l.EndsAt, time.Minute)
		f.stands("user", 0, 0, 600)
		require.ErrorIs(t, f.charge(level, "user", 401, budget.Prepaid(0)), budget.ErrExceeded)
		require.NoError(t, f.charge(level, "user", 100, budget.Prepaid(0)))
		require.NoError(t, f.charge(level, "run", 250, budget.Prepaid(0)))
		require.ErrorIs(t, f.charge(level, "run", 351, budget.Prepaid(0)), budget.ErrExceeded)

		l, err = f.close(level, "run")
		require.NoError(t, err)
		require.NotZero(t, l.SettledAt)
		require.Equal(t, []any{int64(250), "ann"}, []any{l.Spent, l.SettledBy})
		f.stands("user", 350, 0, 0)
		require.NoError(t, f.charge(level, "user", 650, budget.Prepaid(0)), "the rest is free again")

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
					budget.Charge{Scope: "user", Amount: 9_999, Limits: []budget.Limit{budget.Prepaid(0)}})
				return err
			},
			"a look": func(tx pgx.Tx) error {
				_, err := f.ledger.Check(t.Context(), tx, budget.Charge{Scope: "run", Amount: 1})
				return err
			},
			"a hold": func(tx pgx.Tx) error {
				_, err := f.book.Place(t.Context(), tx, holds.Placement{TTL: time.Minute, Lines: []holds.Line{{Scope: "run", Amount: 1}}})
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

	var kinds []string
	for e, err := range f.ledger.Entries(t.Context(), f.db, "run", budget.EntriesOptions{}) {
		require.NoError(t, err)
		require.Zero(t, e.HoldDue)
		kinds = append(kinds, string(e.Kind))
	}
	require.Equal(t, []string{"credit", "charge", "close"}, kinds)
	require.Equal(t, "close", pgtest.Value[string](t, f.db, `select kind from metered.statement where scope = 'run' order by seq desc limit 1`))
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
	require.EqualError(t, err, `leases: no such child: "never"`)
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
					switch err := f.charge(levels[w%3], child, 3, budget.Prepaid(0)); {
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
