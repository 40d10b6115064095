package commit_test

import (
	"context"
	"fmt"
	"slices"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/stdlib"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/internal/commit"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/sqlmetered"
)

// answered is a fault by which COMMIT is answered by an ERROR and ReadyForQuery.
func answered(code string, committed bool) func(*pgtest.Flush, func()) {
	return func(f *pgtest.Flush, _ func()) { f.AnswerInDoubt(code, committed) }
}

// Each call that commits reports the outcome of COMMIT correctly: committed, not committed, or unknown.
func TestOutcome_IsTheSameForEachCallThatCommits(t *testing.T) {
	t.Parallel()
	owner, _ := pgtest.SetUp(t, metered.Config{}, pgtest.Options{})
	pool, wire := pgtest.Tap(t, owner, nil)
	c := pgtest.NewClient(t, pool, metered.Config{})
	db := stdlib.OpenDBFromPool(pool)
	defer db.Close()
	insert := func(ctx context.Context, tx pgx.Tx, id string) error {
		_, err := tx.Exec(ctx, "insert into uploads values ($1)", id)
		return err
	}
	callers := map[string]func(ctx context.Context, id string) error{
		"Do": func(ctx context.Context, id string) error {
			_, err := metered.Do(ctx, c, metered.Command{ID: id}, func(ctx context.Context, tx *metered.Tx) (any, error) { return nil, insert(ctx, tx, id) })
			return err
		},
		"RunTx": func(ctx context.Context, id string) error {
			return c.RunTx(ctx, pgx.TxOptions{}, func(ctx context.Context, tx pgx.Tx) error { return insert(ctx, tx, id) })
		},
		"ChargeNow": func(ctx context.Context, id string) error {
			_, err := c.Budget.ChargeNow(ctx, pool, budget.Charge{Scope: id, Amount: 1})
			return err
		},
		"sqlmetered": func(ctx context.Context, id string) error {
			tx, err := db.BeginTx(ctx, nil)
			require.NoError(t, err)
			require.NoError(t, sqlmetered.InTx(ctx, tx, func(ctx context.Context, tx pgx.Tx) error { return insert(ctx, tx, id) }))
			return sqlmetered.Commit(tx)
		},
	}
	type test struct {
		fault     func(f *pgtest.Flush, cancel func())
		unknown   bool
		committed bool
	}
	tests := map[string]test{
		"all is well":        {func(*pgtest.Flush, func()) {}, false, true},
		"the answer is lost": {func(f *pgtest.Flush, _ func()) { f.LoseAnswer() }, true, true},
		"the flush is lost":  {func(f *pgtest.Flush, _ func()) { f.Lose() }, true, false},
		"FATAL": {func(f *pgtest.Flush, _ func()) {
			f.AnswerWith(pgtest.ErrorResponse("FATAL", "08P01", "server conn crashed?"))
		}, true, true},
		"ERROR, and no end": {func(f *pgtest.Flush, _ func()) { f.AnswerWith(pgtest.ErrorResponse("ERROR", "23505", "no")) }, true, true},
		"the context ends while the answer is under way": {func(f *pgtest.Flush, cancel func()) {
			f.Deliver = func() { f.Ask(); cancel() }
		}, true, true},
		"the context ends, and the flush is lost": {func(f *pgtest.Flush, cancel func()) { f.Deliver = func() { cancel(); f.Close() } }, true, false},
	}
	for _, code := range []string{"23505", "57014", "P0001"} {
		tests["ERROR "+code] = test{answered(code, false), false, false}
	}
	for _, code := range []string{"08006", "57P01", "58030", "XX000", "40003"} {
		for _, committed := range []bool{false, true} {
			tests[fmt.Sprintf("ERROR %s, committed %v", code, committed)] = test{answered(code, committed), true, committed}
		}
	}
	n := 0
	for what, test := range tests {
		for caller, call := range callers {
			n++
			id := fmt.Sprint(n)
			what := what + ", " + caller
			wire.Each(nil)
			pool.Reset()
			require.NoError(t, call(t.Context(), id+" before"), what) // its statements are prepared
			ctx, cancel := context.WithCancel(t.Context())
			struck := false
			wire.Once(func(f *pgtest.Flush) bool {
				return slices.Contains(f.SQL, "commit") || caller == "ChargeNow" && f.Has(".charge_plain(")
			}, func(f *pgtest.Flush) {
				struck = true
				test.fault(f, cancel)
			})
			err := call(ctx, id)
			left := ctx.Err() != nil
			cancel()
			require.True(t, struck, what)
			pgtest.WaitSettled(t, owner)
			there := 0 < pgtest.Value[int](t, owner, "select (select count(*) from uploads where name = $1) + (select count(*) from metered.ledger where scope = $1)", id)
			switch {
			case caller != "Do":
				require.Equal(t, test.committed, there, what)
				require.Equal(t, !test.unknown && test.committed, err == nil, "%s: %v", what, err)
				require.Equal(t, test.unknown, metered.Code(err) == "commit_unknown", "%s: %v", what, err)
			case left: // nobody waits for the outcome
				require.ErrorIs(t, err, metered.ErrIndefinite, what)
			default: // found out
				require.NotErrorIs(t, err, metered.ErrIndefinite, what)
				require.Equal(t, err == nil, there, "%s: %v", what, err)
			}
		}
	}
}

// A COMMIT that was not sent, since the context of the transaction had ended before, is known not to be committed.
func TestOutcome_OfACommitThatWasNotSent(t *testing.T) {
	t.Parallel()
	owner, _ := pgtest.SetUp(t, metered.Config{}, pgtest.Options{})
	tx, err := owner.Begin(t.Context())
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	err = tx.Commit(ctx)
	require.Equal(t, commit.NotCommitted, commit.Of(nil, "", err), "%v", err)
}
