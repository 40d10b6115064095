package metered_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/pgtest"
)

// tellTo writes crossings into the table told, in their own transactions.
func tellTo(ctx context.Context, tx pgx.Tx, c budget.Crossing) error {
	_, err := tx.Exec(ctx, `insert into told (scope, name, seq) values ($1, $2, $3)`, c.Scope, c.Threshold.Name, c.Seq)
	return err
}

func setUpTelling(t *testing.T, cfg metered.Config) (*pgxpool.Pool, *metered.Client) {
	t.Helper()
	pool := pgtest.Open(t)
	_, err := pool.Exec(t.Context(), `create table uploads (name text primary key);
		create table told (n bigint generated always as identity, scope text, name text, seq bigint)`)
	require.NoError(t, err)
	if cfg.OnThreshold == nil {
		cfg.OnThreshold = tellTo
	}
	return pool, newClient(t, pool, cfg)
}

func told(t *testing.T, pool *pgxpool.Pool, scope string) []string {
	t.Helper()
	rows, err := pool.Query(t.Context(), `select name from told where scope = $1 order by n`, scope)
	require.NoError(t, err)
	names, err := pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(t, err)
	return names
}

// telling is a charge of amount from a stock of 100, with a threshold at 80.
func telling(scope string, amount int64) budget.Charge {
	return budget.Charge{Scope: scope, Amount: amount, Limits: []budget.Limit{budget.Lifetime(100).Tell(budget.Threshold{Name: "80%", Percent: 80})}}
}

func TestThreshold_IsToldByTheCommandThatCrossesIt(t *testing.T) {
	t.Parallel()
	pool, c := setUpTelling(t, metered.Config{})
	for _, iso := range isolationLevels {
		scope := string(iso)
		runs := 0
		fn := func(ctx context.Context, tx *metered.Tx) (uploaded, error) {
			runs++
			return upload(tx.Placed[0])(ctx, tx)
		}
		cmd := metered.Command{ID: scope, Isolation: iso, Charges: []budget.Charge{telling(scope, 80)},
			Holds: []holds.Request{{ID: scope, Lines: []holds.Line{{Scope: scope + "/seat", Amount: 1}}, TTL: time.Hour}}}
		out, err := metered.Do(t.Context(), c, cmd, fn)
		require.NoError(t, err)
		require.Equal(t, "80%", out.Receipt.Crossed[0].Threshold.Name)
		require.Equal(t, out.Receipt.Entries[0].Seq, out.Receipt.Crossed[0].Seq)
		require.Equal(t, 2, runs, "the first attempt met the threshold, and the second told of it")
		require.Equal(t, []string{"80%"}, told(t, pool, scope))

		out, err = metered.Do(t.Context(), c, cmd, fn)
		require.NoError(t, err)
		require.True(t, out.Replayed)
		require.Equal(t, []string{"80%"}, told(t, pool, scope), "a replay tells nothing")

		_, err = metered.Do(t.Context(), c, metered.Command{ID: scope + "2", Isolation: iso, Charges: []budget.Charge{telling(scope, 1)}}, upload(scope+"2"))
		require.NoError(t, err)
		require.Equal(t, []string{"80%"}, told(t, pool, scope))
	}
}

func TestThreshold_IsToldByWhateverACommandDoesAtItsEnd(t *testing.T) {
	t.Parallel()
	pool, c := setUpTelling(t, metered.Config{})
	stock := telling("", 1).Limits
	place := func(id, scope string, amount int64) error {
		_, err := metered.Do(t.Context(), c, metered.Command{ID: id, Holds: []holds.Request{
			{ID: id, Lines: []holds.Line{{Scope: scope, Amount: amount, Limits: stock}}, TTL: time.Hour}}}, upload(id))
		return err
	}
	require.NoError(t, place("hold", "held", 80))
	require.Equal(t, []string{"80%"}, told(t, pool, "held"), "what is held counts")

	for _, over := range []holds.Over{holds.OverIfFits, holds.OverAllowed} {
		scope := "captured " + string(over)
		require.NoError(t, place(scope, scope, 79))
		require.Empty(t, told(t, pool, scope))
		_, err := metered.Do(t.Context(), c, metered.Command{ID: scope + "/2", Input: 1}, func(ctx context.Context, tx *metered.Tx) (uploaded, error) {
			return uploaded{}, tx.Capture(holds.Capture{IDs: []string{scope}, Over: over, Lines: []holds.Line{{Scope: scope, Amount: 80, Limits: stock}}})
		})
		require.NoError(t, err)
		require.Equal(t, []string{"80%"}, told(t, pool, scope), "what is used beyond what was held")
	}

	_, err := metered.Do(t.Context(), c, metered.Command{ID: "tx", Input: 1}, func(ctx context.Context, tx *metered.Tx) (uploaded, error) {
		return uploaded{}, tx.Charge(telling("late", 80))
	})
	require.NoError(t, err)
	require.Equal(t, []string{"80%"}, told(t, pool, "late"))

	_, err = metered.Do(t.Context(), c, metered.Command{ID: "fails", Sticky: []budget.Charge{telling("sticky", 80)}}, func(context.Context, *metered.Tx) (uploaded, error) {
		return uploaded{}, errOwn
	})
	require.ErrorIs(t, err, errOwn)
	require.Equal(t, []string{"80%"}, told(t, pool, "sticky"), "a sticky charge stays, and so does what is told of it")

	require.NoError(t, pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error {
		_, err := metered.DoTx(t.Context(), c, tx, metered.Command{ID: "in tx", Charges: []budget.Charge{telling("in tx", 80)}}, upload("in tx"))
		return err
	}))
	require.Equal(t, []string{"80%"}, told(t, pool, "in tx"))
	tx, err := pool.Begin(t.Context())
	require.NoError(t, err)
	_, err = metered.DoTx(t.Context(), c, tx, metered.Command{ID: "rolled back", Charges: []budget.Charge{telling("rolled back", 80)}}, upload("rolled back"))
	require.NoError(t, err)
	require.NoError(t, tx.Rollback(t.Context()))
	require.Empty(t, told(t, pool, "rolled back"))
}

// An error of OnThreshold is one of the command, of which nothing is left.
func TestThreshold_ThatCannotBeToldIsNotCrossed(t *testing.T) {
	t.Parallel()
	veto := errors.New("veto")
	pool, c := setUpTelling(t, metered.Config{OnThreshold: func(ctx context.Context, tx pgx.Tx, crossing budget.Crossing) error {
		require.ErrorIs(t, tx.Commit(ctx), metered.ErrTxControl)
		return errors.Join(tellTo(ctx, tx, crossing), veto)
	}})
	cmd := metered.Command{ID: "a", Charges: []budget.Charge{telling("a", 80)}, RecordRefusal: true}
	for range 2 {
		_, err := metered.Do(t.Context(), c, cmd, upload("a"))
		require.ErrorIs(t, err, veto)
		var crossing *budget.CrossingError
		require.ErrorAs(t, err, &crossing)
	}
	require.Empty(t, told(t, pool, "a"))
	usage, err := c.Budget.Usage(t.Context(), pool, budget.Query{Scope: "a", Window: budget.Forever})
	require.NoError(t, err)
	require.Zero(t, usage[0].Used)

	require.NoError(t, pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error {
		_, err := metered.DoTx(t.Context(), c, tx, metered.Command{ID: "b", Charges: []budget.Charge{telling("a", 80)}}, upload("b"))
		require.ErrorIs(t, err, veto)
		return nil
	}), "the transaction is as it was")
}

func TestThreshold_WithoutAnybodyToTellIsRefused(t *testing.T) {
	t.Parallel()
	_, c := setUp(t, metered.Config{})
	_, err := metered.Do(t.Context(), c, metered.Command{ID: "a", Charges: []budget.Charge{telling("a", 1)}}, upload("a"))
	var argument *metered.ArgumentError
	require.ErrorAs(t, err, &argument)
}
