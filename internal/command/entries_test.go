package command_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/guardtx"
	"github.com/pgmetered/metered/internal/pgtest"
)

// prepaid takes amount from the credit of scope.
func prepaid(scope string, amount int64) budget.Charge {
	return budget.Charge{Scope: scope, Amount: amount, Limits: []budget.Limit{budget.Prepaid(0)}}
}

// balance returns the credit of scope without the held units.
func balance(t *testing.T, c *metered.Client, db budget.Querier, scope string) int64 {
	t.Helper()
	usage, err := c.Budget.Usage(t.Context(), db, budget.Query{Scope: scope})
	require.NoError(t, err)
	return -usage[0].Used - usage[0].Held
}

// transfer charges one scope and credits the other with the same units.
func transfer(ctx context.Context, c *metered.Client, id, from, to string, amount int64, level pgx.TxIsoLevel) error {
	_, err := metered.Do(ctx, c, metered.Command{ID: id, Input: amount, Charges: []budget.Charge{prepaid(from, amount)}, Isolation: level},
		func(_ context.Context, tx *metered.Tx) (any, error) {
			return nil, tx.Credit(budget.Credit{Scope: to, Amount: amount})
		})
	return err
}

func deposit(t *testing.T, pool interface {
	Begin(context.Context) (pgx.Tx, error)
}, c *metered.Client, scope string, amount int64) {
	t.Helper()
	require.NoError(t, pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error {
		_, err := c.Budget.Credit(t.Context(), tx, budget.Credit{Scope: scope, Amount: amount})
		return err
	}))
}

// At READ COMMITTED none needs a second attempt: neither the deadlock of a credit that
// is made before the charge, nor a conflict.
func TestDo_TransfersInBothDirectionsLoseNothing(t *testing.T) {
	t.Parallel()
	const callers = 6
	each := pgtest.Size(6, 12)
	pool, _ := setUp(t, metered.Config{}, pgtest.Options{MaxConns: callers})
	for _, level := range isolationLevels {
		t.Run(string(level), func(t *testing.T) {
			cfg := metered.Config{MaxAttempts: 100}
			if level == pgx.ReadCommitted {
				cfg.MaxAttempts = 1
			}
			c := newClient(t, pool, cfg)
			accounts := []string{"ann, " + string(level), "ben, " + string(level), "cyd, " + string(level)}
			for _, account := range accounts {
				deposit(t, pool, c, account, 20)
			}
			moved := make([]map[string]int64, callers)
			atOnce(callers, func(caller int) {
				moved[caller] = map[string]int64{}
				for i := range each {
					from, to := accounts[(caller+i)%3], accounts[(caller+2*i+1)%3]
					if from == to {
						to = accounts[(caller+i+1)%3]
					}
					amount := int64(1 + (caller+i)%7)
					switch err := transfer(t.Context(), c, fmt.Sprint(level, caller, "/", i), from, to, amount, level); metered.Code(err) {
					case "budget_exceeded":
					case "":
						if err != nil {
							t.Errorf("%s to %s: %v", from, to, err)
						}
						moved[caller][from] -= amount
						moved[caller][to] += amount
					default:
						t.Errorf("%s to %s: %v", from, to, err)
					}
				}
			})
			for _, account := range accounts {
				want := int64(20)
				for _, m := range moved {
					want += m[account]
				}
				require.Equal(t, want, balance(t, c, pool, account), account)
			}
			report, err := c.Budget.Verify(t.Context(), pool, budget.VerifyOptions{})
			require.NoError(t, err)
			require.Empty(t, report.Differences)
		})
	}
}

func TestDo_CreditsAndRefundsAreTheCommands(t *testing.T) {
	t.Parallel()
	for _, own := range []bool{true, false} {
		t.Run(map[bool]string{true: "Do", false: "DoTx"}[own], func(t *testing.T) {
			t.Parallel()
			pool, c := setUp(t, metered.Config{})
			ctx := t.Context()
			do := func(id string, fn metered.Func[uploaded], charges ...budget.Charge) (out metered.Outcome[uploaded], err error) {
				cmd := metered.Command{Input: 1, Tenant: "bank", ID: id, Charges: charges}
				if own {
					return metered.Do(ctx, c, cmd, fn)
				}
				require.NoError(t, pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
					out, err = metered.DoTx(ctx, c, tx, cmd, fn)
					return nil // the refusal leaves the rest of tx as it was
				}))
				return out, err
			}
			topUp := func(ctx context.Context, tx *metered.Tx) (uploaded, error) {
				return uploaded{}, tx.Credit(budget.Credit{Scope: "ann", Amount: 10}, budget.Credit{Scope: "ben", Amount: 1})
			}
			_, err := do("top-up", topUp)
			require.NoError(t, err)
			out, err := do("top-up", topUp)
			require.NoError(t, err)
			require.True(t, out.Replayed)
			require.Equal(t, int64(10), balance(t, c, pool, "ann"))
			require.Equal(t, int64(1), balance(t, c, pool, "ben"))

			// A command can spend and hold the units that it credits.
			out, err = do("spend", func(ctx context.Context, tx *metered.Tx) (uploaded, error) {
				if err := tx.Charge(prepaid("ann", 12)); err != nil {
					return uploaded{}, err
				}
				_, err := tx.Place(ctx, holds.Placement{
					ID: "h", Lines: []holds.Line{{Scope: "ben", Amount: 4, Limits: []budget.Limit{budget.Prepaid(0)}}}, TTL: time.Hour,
				}, nil)
				if err != nil {
					return uploaded{}, err
				}
				return uploaded{}, tx.Credit(budget.Credit{Scope: "ann", Amount: 2}, budget.Credit{Scope: "ben", Amount: 3})
			})
			require.NoError(t, err)
			require.Zero(t, balance(t, c, pool, "ann"))
			require.Zero(t, balance(t, c, pool, "ben"))
			spent := out.Receipt.Entries[0]
			require.Equal(t, budget.Posted{Scope: "ann", Amount: 12, Seq: 3, At: spent.At, Standings: spent.Standings}, spent)

			refund := func(seq, amount int64) metered.Func[uploaded] {
				return func(ctx context.Context, tx *metered.Tx) (uploaded, error) {
					if _, err := tx.Exec(ctx, `insert into uploads values ('refund')`); err != nil {
						return uploaded{}, err
					}
					return uploaded{}, tx.Refund(budget.Refund{Scope: "ann", Seq: seq, Amount: amount, Note: budget.Note{Reason: "broken"}})
				}
			}
			var exceeds *budget.RefundExceedsError
			_, err = do("refund", refund(3, 13), charge("ben", 1, 0))
			require.ErrorAs(t, err, &exceeds)
			require.Equal(t, budget.RefundExceedsError{Requested: 13, Remaining: 12}, *exceeds)
			require.Equal(t, "budget_refund_exceeds", metered.Code(err))
			_, err = do("refund", refund(1, 1))
			require.ErrorIs(t, err, budget.ErrNotCharge)
			_, err = do("refund", refund(99, 1))
			require.ErrorIs(t, err, budget.ErrUnknownEntry)
			require.Zero(t, count(t, pool, "uploads"), "what is refused leaves nothing")
			require.Equal(t, 2, count(t, pool, "metered.operations"))
			require.Zero(t, balance(t, c, pool, "ben"))

			for range 2 {
				_, err = do("refund", refund(3, 5))
				require.NoError(t, err)
			}
			require.Equal(t, int64(5), balance(t, c, pool, "ann"))
			last := budget.Entry{}
			for e, err := range c.Budget.Entries(ctx, pool, "ann", budget.EntriesOptions{After: 3}) {
				require.NoError(t, err)
				last = e
			}
			require.Equal(t, []any{int64(4), budget.EntryRefund, int64(3), "bank", "refund", "broken"},
				[]any{last.Seq, last.Kind, last.Ref, last.OperationTenant, last.Operation, last.Note.Reason})
		})
	}
}

// The sticky charge of the command's own attempt is newer than its snapshot.
func TestDo_RefundsItsOwnAttemptAtEachIsolationLevel(t *testing.T) {
	t.Parallel()
	pgtest.OnEachVersion(t)
	pool, c := setUp(t, metered.Config{})
	for _, level := range isolationLevels {
		t.Run(string(level), func(t *testing.T) {
			scope := string(level)
			_, err := metered.Do(t.Context(), c, metered.Command{ID: scope, Input: 1, Isolation: level, Sticky: []budget.Charge{charge(scope, 2, 5)}},
				func(_ context.Context, tx *metered.Tx) (any, error) {
					attempt := tx.Sticky.Entries[0]
					return nil, tx.Refund(budget.Refund{Scope: attempt.Scope, Seq: attempt.Seq, Amount: 1})
				})
			require.NoError(t, err)
			require.Equal(t, int64(1), used(t, pool, c, scope))
			_, err = metered.Do(t.Context(), c, metered.Command{ID: scope + "2", Input: 1, Isolation: level}, func(_ context.Context, tx *metered.Tx) (any, error) {
				return nil, tx.Refund(budget.Refund{Scope: scope, Seq: 3, Amount: 1})
			})
			require.ErrorIs(t, err, budget.ErrUnknownEntry)
			require.Equal(t, 2, count(t, pool, "metered.ledger where scope = '"+scope+"'"))
		})
	}
}

// A refusal of the charges takes the credits with it.
func TestDo_ARefusedTransferCreditsNobody(t *testing.T) {
	t.Parallel()
	pool, c := setUp(t, metered.Config{})
	deposit(t, pool, c, "ann", 5)
	late := func(_ context.Context, tx *metered.Tx) (any, error) {
		if err := tx.Charge(prepaid("ann", 6)); err != nil {
			return nil, err
		}
		return nil, tx.Credit(budget.Credit{Scope: "ben", Amount: 6})
	}
	_, err := metered.Do(t.Context(), c, metered.Command{ID: "op", Input: 1}, late)
	require.ErrorIs(t, err, budget.ErrExceeded)
	require.Equal(t, int64(5), balance(t, c, pool, "ann"))
	require.Zero(t, balance(t, c, pool, "ben"))
	require.Equal(t, 1, count(t, pool, "metered.ledger"))
	require.ErrorIs(t, transfer(t.Context(), c, "op", "ann", "ben", 6, ""), budget.ErrExceeded)
	require.NoError(t, transfer(t.Context(), c, "op", "ann", "ben", 5, ""))
	require.Equal(t, int64(5), balance(t, c, pool, "ben"))
}

func TestTx_CreditAndRefundCheckTheirArguments(t *testing.T) {
	t.Parallel()
	pool, c := setUp(t, metered.Config{})
	var dead *metered.Tx
	_, err := metered.Do(t.Context(), c, metered.Command{ID: "op", Input: 1}, func(_ context.Context, tx *metered.Tx) (any, error) {
		dead = tx
		for field, err := range map[string]error{
			"Credit.Amount": tx.Credit(budget.Credit{Scope: "s", Amount: 1}, budget.Credit{Scope: "s"}),
			"Credit.Scope":  tx.Credit(budget.Credit{Amount: 1}),
			"Refund.Seq":    tx.Refund(budget.Refund{Scope: "s", Amount: 1}),
			"Refund.Scope":  tx.Refund(budget.Refund{Seq: 1, Amount: 1}),
		} {
			var argument *budget.ArgumentError
			require.ErrorAs(t, err, &argument)
			require.Equal(t, field, argument.Field)
		}
		return nil, nil
	})
	require.NoError(t, err)
	usage, err := c.Budget.Usage(t.Context(), pool, budget.Query{Scope: "s"})
	require.NoError(t, err)
	require.Zero(t, usage[0].Seq, "none of a call whose last is refused")
	require.ErrorIs(t, dead.Credit(budget.Credit{Scope: "s", Amount: 1}), guardtx.ErrDone)
	require.ErrorIs(t, dead.Refund(budget.Refund{Scope: "s", Seq: 1, Amount: 1}), guardtx.ErrDone)
}

// waiting counts the backends that wait for a lock.
const waiting = `select count(*) from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'`

// started calls f in another goroutine, and waits until one more backend waits for a lock.
func started(t *testing.T, pool *pgxpool.Pool, f func() error) <-chan error {
	t.Helper()
	before := pgtest.Value[int](t, pool, waiting)
	done := make(chan error, 1)
	go func() { done <- f() }()
	pgtest.WaitFor(t, "one more to wait", func() bool { return pgtest.Value[int](t, pool, waiting) > before })
	return done
}

// All calls of a command lock the rows of due holds in one order: here the first hold blocks the last call of the
// command, or the first.
func TestDoTx_EndsDueHoldsInOneOrderWithOthers(t *testing.T) {
	t.Parallel()
	full := []budget.Limit{budget.Lifetime(1)}
	place := func(ctx context.Context, tx *metered.Tx, scope string) error {
		_, err := tx.Place(ctx, holds.Placement{Lines: []holds.Line{{Scope: scope, Amount: 1, Limits: full}}, TTL: time.Hour}, nil)
		return err
	}
	for name, test := range map[string]struct {
		charge string // its scope
		fn     func(ctx context.Context, tx *metered.Tx) error
	}{
		"a placement and a charge": {"a", func(ctx context.Context, tx *metered.Tx) error { return place(ctx, tx, "b") }},
		"two placements": {"", func(ctx context.Context, tx *metered.Tx) error {
			return errors.Join(place(ctx, tx, "b"), place(ctx, tx, "a"))
		}},
		"a charge, and a capture of more than is held": {"b", func(_ context.Context, tx *metered.Tx) error {
			return tx.Capture(holds.Capture{IDs: []string{"mine"}, Lines: []holds.Line{{Scope: "a", Amount: 2}}, Over: holds.OverAllowed})
		}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pool, c := setUp(t, metered.Config{Config: budget.Config{LockTimeout: time.Minute}, Holds: holds.Config{MaxTTL: 10 * time.Hour}})
			ctx := t.Context()
			within := func(f func(tx pgx.Tx) error) error { return pgx.BeginFunc(ctx, pool, f) }
			place := func(tx pgx.Tx, id string, ttl time.Duration, scopes ...string) error {
				r := holds.Placement{ID: id, TTL: ttl}
				for _, scope := range scopes {
					r.Lines = append(r.Lines, holds.Line{Scope: scope, Amount: 1, Limits: []budget.Limit{budget.Lifetime(2)}})
				}
				_, err := c.Holds.Place(ctx, tx, r)
				return err
			}
			require.NoError(t, within(func(tx pgx.Tx) error { return place(tx, "first", time.Hour, "a", "c1") }))
			require.NoError(t, within(func(tx pgx.Tx) error { return place(tx, "second", time.Hour, "b", "c2") }))
			if test.charge == "b" {
				require.NoError(t, within(func(tx pgx.Tx) error { return place(tx, "mine", 10*time.Hour, "a") }))
			}
			for _, scope := range []string{"c1", "c2"} {
				require.NoError(t, within(func(tx pgx.Tx) error { return place(tx, scope, 10*time.Hour, scope) }))
			}
			pgtest.SetClock(t, pool, time.Now().Add(2*time.Hour))

			first, err := pool.Begin(ctx)
			require.NoError(t, err)
			defer func() { _ = first.Rollback(context.Background()) }()
			_, err = first.Exec(ctx, `select from metered.holds where id = 'first' for no key update`)
			require.NoError(t, err)
			other := started(t, pool, func() error {
				return within(func(tx pgx.Tx) error { return place(tx, "both", time.Hour, "c1", "c2") })
			})
			cmd := metered.Command{ID: "op", Input: 1}
			if test.charge != "" {
				cmd.Charges = []budget.Charge{{Scope: test.charge, Amount: 1, Limits: full}}
			}
			command := started(t, pool, func() error {
				return within(func(tx pgx.Tx) error {
					_, err := metered.DoTx(ctx, c, tx, cmd, func(ctx context.Context, tx *metered.Tx) (any, error) { return nil, test.fn(ctx, tx) })
					return err
				})
			})
			require.NoError(t, first.Rollback(ctx))
			require.NoError(t, <-other)
			require.NoError(t, <-command)
		})
	}
}

// So are the ids that a command gives to holds.
func TestDoTx_TakesTheIDsOfItsHoldsInOneOrderWithOthers(t *testing.T) {
	t.Parallel()
	pool, c := setUp(t, metered.Config{Config: budget.Config{LockTimeout: time.Minute}})
	ctx := t.Context()
	do := func(op string, ids ...string) error {
		return pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
			_, err := metered.DoTx(ctx, c, tx, metered.Command{ID: op, Input: 1}, func(ctx context.Context, tx *metered.Tx) (any, error) {
				for _, id := range ids {
					r := holds.Placement{ID: id, Lines: []holds.Line{{Scope: op + id, Amount: 1}}, TTL: time.Hour}
					if _, err := tx.Place(ctx, r, nil); err != nil {
						return nil, err
					}
				}
				return nil, nil
			})
			return err
		})
	}
	middle, err := pool.Begin(ctx)
	require.NoError(t, err)
	defer func() { _ = middle.Rollback(context.Background()) }()
	_, err = c.Holds.Place(ctx, middle, holds.Placement{ID: "m", Lines: []holds.Line{{Scope: "s", Amount: 1}}, TTL: time.Hour})
	require.NoError(t, err)
	one := started(t, pool, func() error { return do("one", "x", "m", "y") })
	other := make(chan error, 1)
	go func() { other <- do("other", "y", "x") }()
	pgtest.WaitFor(t, "the other to wait, or to end", func() bool { // it waits, too, or has not had to
		return len(other) > 0 || pgtest.Value[int](t, pool, waiting) > 1
	})
	require.NoError(t, middle.Rollback(ctx))
	errs := []error{<-one, <-other}
	for _, err := range errs {
		if err != nil {
			require.ErrorIs(t, err, holds.ErrConflict, "the second has other content")
		}
	}
	require.False(t, errs[0] != nil && errs[1] != nil, "%v", errs)
}
