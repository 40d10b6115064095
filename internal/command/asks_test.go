package command_test

import (
	"context"
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
)

// An error of the caller's own statement is no answer of a limit that has changed: the function is called once. It is
// called again where the answer has changed, and where the query cannot be a part of another one.
func TestCapacity_AnErrorOfTheCallersStatementIsNoChangedAnswer(t *testing.T) {
	t.Parallel()
	pool, c := setUp(t, metered.Config{})
	ctx := t.Context()
	_, err := pool.Exec(ctx, `create table seat (n int); insert into seat values (100);
		create table wrong (divisor int);
		create function divide() returns trigger language plpgsql as $$ begin perform 1 / new.divisor; return null; end $$;
		create constraint trigger divides after insert on wrong deferrable initially deferred for each row execute function divide()`)
	require.NoError(t, err)
	serial := 0
	do := func(sql string, within func(ctx context.Context, tx *metered.Tx) error) (calls int, err error) {
		serial++
		_, err = metered.Do(ctx, c, metered.Command{ID: fmt.Sprint(serial), Charges: []budget.Charge{{
			Scope: "hall", Amount: 1, Limits: []budget.Limit{budget.Lifetime(0).MaxFrom(sql)},
		}}}, func(ctx context.Context, tx *metered.Tx) (any, error) {
			calls++
			return nil, within(ctx, tx)
		})
		return calls, err
	}
	fine := func(context.Context, *metered.Tx) error { return nil }
	atCommit := func(ctx context.Context, tx *metered.Tx) error {
		_, err := tx.Exec(ctx, "insert into wrong values (0)")
		return err
	}
	for _, known := range []bool{false, true} { // known: the query is asked in the flush that commits, and there alone
		calls, err := do("select n from seat", atCommit)
		require.ErrorContains(t, err, "division by zero")
		require.Equal(t, 1, calls, known)
		for range 2 {
			calls, err = do("select n from seat", fine)
			require.NoError(t, err)
			require.Equal(t, 1, calls)
		}
	}
	_, err = pool.Exec(ctx, "update seat set n = 50")
	require.NoError(t, err)
	calls, err := do("select n from seat", fine)
	require.NoError(t, err)
	require.Equal(t, 2, calls, "its answer had been the same twice, and has changed")
	calls, err = do("select n from seat;", fine)
	require.NoError(t, err)
	require.Greater(t, calls, 1, "it cannot be a part of another query")
	calls, err = do("select n from seat;", atCommit)
	require.ErrorContains(t, err, "division by zero")
	require.LessOrEqual(t, calls, 2)
}
