package budget_test

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
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
	"github.com/pgmetered/metered/observe"
)

// tellTo writes crossings into the table told, in the transaction that crosses.
func tellTo(ctx context.Context, tx pgx.Tx, c budget.Crossing) error {
	_, err := tx.Exec(ctx, `insert into told (scope, name, seq) values ($1, $2, $3)`, c.Scope, c.Threshold.Name, c.Seq)
	return err
}

func setUpReporting(t *testing.T, cfg metered.Config) (*pgxpool.Pool, *metered.Client) {
	t.Helper()
	pool := pgtest.Open(t)
	_, err := pool.Exec(t.Context(), `create table uploads (name text primary key);
		create table told (n bigint generated always as identity, scope text, name text, seq bigint)`)
	require.NoError(t, err)
	if cfg.OnThreshold == nil {
		cfg.OnThreshold = tellTo
	}
	return pool, pgtest.NewClient(t, pool, cfg)
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
	return budget.Charge{Scope: scope, Amount: amount, Limits: []budget.Limit{budget.Lifetime(100).WithThresholds(budget.Threshold{Name: "80%", Percent: 80})}}
}

func TestThreshold_IsReportedByTheCommandThatCrossesIt(t *testing.T) {
	t.Parallel()
	pool, c := setUpReporting(t, metered.Config{})
	for _, iso := range pgtest.IsolationLevels {
		scope := string(iso)
		runs := 0
		fn := func(ctx context.Context, tx *metered.Tx) (pgtest.Uploaded, error) {
			runs++
			return pgtest.Upload(tx.Placed[0])(ctx, tx)
		}
		cmd := metered.Command{ID: scope, Isolation: iso, Charges: []budget.Charge{telling(scope, 80)},
			Holds: []holds.Placement{{ID: scope, Lines: []holds.Line{{Scope: scope + "/seat", Amount: 1}}, TTL: time.Hour}}}
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

		_, err = metered.Do(t.Context(), c, metered.Command{ID: scope + "2", Isolation: iso, Charges: []budget.Charge{telling(scope, 1)}}, pgtest.Upload(scope+"2"))
		require.NoError(t, err)
		require.Equal(t, []string{"80%"}, told(t, pool, scope))
	}
}

func TestThreshold_IsReportedByEachLastCallOfACommand(t *testing.T) {
	t.Parallel()
	var r pgtest.Recorder
	pool, c := setUpReporting(t, metered.Config{Config: budget.Config{Observer: &r}})
	stock := telling("", 1).Limits
	place := func(id, scope string, amount int64) error {
		_, err := metered.Do(t.Context(), c, metered.Command{ID: id, Holds: []holds.Placement{
			{ID: id, Lines: []holds.Line{{Scope: scope, Amount: amount, Limits: stock}}, TTL: time.Hour}}}, pgtest.Upload(id))
		return err
	}
	require.NoError(t, place("hold", "held", 80))
	require.Equal(t, []string{"80%"}, told(t, pool, "held"), "what is held counts")
	require.EqualValues(t, 1, r.Sum(observe.Threshold))

	for _, over := range []holds.Over{holds.OverIfFits, holds.OverAllowed} {
		scope := "captured " + string(over)
		require.NoError(t, place(scope, scope, 79))
		require.Empty(t, told(t, pool, scope))
		_, err := metered.Do(t.Context(), c, metered.Command{ID: scope + "/2", Input: 1}, func(ctx context.Context, tx *metered.Tx) (pgtest.Uploaded, error) {
			return pgtest.Uploaded{}, tx.Capture(holds.Capture{IDs: []string{scope}, Over: over, Lines: []holds.Line{{Scope: scope, Amount: 80, Limits: stock}}})
		})
		require.NoError(t, err)
		require.Equal(t, []string{"80%"}, told(t, pool, scope), "what is used beyond what was held")
	}

	_, err := metered.Do(t.Context(), c, metered.Command{ID: "tx", Input: 1}, func(ctx context.Context, tx *metered.Tx) (pgtest.Uploaded, error) {
		return pgtest.Uploaded{}, tx.Charge(telling("late", 80))
	})
	require.NoError(t, err)
	require.Equal(t, []string{"80%"}, told(t, pool, "late"))

	_, err = metered.Do(t.Context(), c, metered.Command{ID: "fails", Sticky: []budget.Charge{telling("sticky", 80)}}, func(context.Context, *metered.Tx) (pgtest.Uploaded, error) {
		return pgtest.Uploaded{}, pgtest.ErrOwn
	})
	require.ErrorIs(t, err, pgtest.ErrOwn)
	require.Equal(t, []string{"80%"}, told(t, pool, "sticky"), "a sticky charge stays, and so does what is told of it")

	require.NoError(t, pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error {
		_, err := metered.DoTx(t.Context(), c, tx, metered.Command{ID: "in tx", Charges: []budget.Charge{telling("in tx", 80)}}, pgtest.Upload("in tx"))
		return err
	}))
	require.Equal(t, []string{"80%"}, told(t, pool, "in tx"))
	tx, err := pool.Begin(t.Context())
	require.NoError(t, err)
	_, err = metered.DoTx(t.Context(), c, tx, metered.Command{ID: "rolled back", Charges: []budget.Charge{telling("rolled back", 80)}}, pgtest.Upload("rolled back"))
	require.NoError(t, err)
	require.NoError(t, tx.Rollback(t.Context()))
	require.Empty(t, told(t, pool, "rolled back"))
}

// An error of OnThreshold is one of the command, of which nothing is left.
func TestThreshold_AFailedReportCrossesNothing(t *testing.T) {
	t.Parallel()
	veto := errors.New("veto")
	pool, c := setUpReporting(t, metered.Config{Config: budget.Config{OnThreshold: func(ctx context.Context, tx pgx.Tx, crossing budget.Crossing) error {
		require.ErrorIs(t, tx.Commit(ctx), guardtx.ErrControl)
		return errors.Join(tellTo(ctx, tx, crossing), veto)
	}}})
	cmd := metered.Command{ID: "a", Charges: []budget.Charge{telling("a", 80)}, RecordRefusal: true}
	for range 2 {
		_, err := metered.Do(t.Context(), c, cmd, pgtest.Upload("a"))
		require.ErrorIs(t, err, veto)
		require.ErrorContains(t, err, "OnThreshold: scope")
	}
	require.Empty(t, told(t, pool, "a"))
	usage, err := c.Budget.Usage(t.Context(), pool, budget.Query{Scope: "a"})
	require.NoError(t, err)
	require.Zero(t, usage[0].Used)

	require.NoError(t, pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error {
		_, err := metered.DoTx(t.Context(), c, tx, metered.Command{ID: "b", Charges: []budget.Charge{telling("a", 80)}}, pgtest.Upload("b"))
		require.ErrorIs(t, err, veto)
		return nil
	}), "the transaction is as it was")
}

func TestThreshold_WithoutACallbackIsRefused(t *testing.T) {
	t.Parallel()
	_, c := pgtest.SetUp(t, metered.Config{})
	_, err := metered.Do(t.Context(), c, metered.Command{ID: "a", Charges: []budget.Charge{telling("a", 1)}}, pgtest.Upload("a"))
	var argument *budget.ArgumentError
	require.ErrorAs(t, err, &argument)
}

// spentOf is a limit of 100 with a threshold at 80 spent.
var spentOf = budget.Lifetime(100).WithThresholds(budget.Threshold{Name: "80% spent", Percent: 80, Spent: true})

// A session reserves more than it uses: only the settled units cross the thresholds of the reservation's limits.
func TestThreshold_OfSpendingIsReportedBySettle(t *testing.T) {
	t.Parallel()
	pool, c := setUpReporting(t, metered.Config{})
	for _, iso := range pgtest.IsolationLevels {
		for name, used := range map[string]metered.Cost{
			"lines": {Lines: []holds.Line{{Amount: 80}}}, "beyond": {Lines: []holds.Line{{Amount: 92}}, Over: holds.OverAllowed},
			"fits": {Lines: []holds.Line{{Amount: 95}}, Over: holds.OverIfFits}, "all": {All: true},
		} {
			scope := fmt.Sprint(iso, "/", name)
			r := metered.Reservation{ID: scope, Isolation: iso, Lines: []holds.Line{{Scope: scope, Amount: 90, Limits: []budget.Limit{spentOf}}, {Scope: "other", Amount: 1}}}
			s, err := metered.Open[any](t.Context(), c, r)
			require.NoError(t, err)
			t.Cleanup(s.Close)
			if used.Lines != nil {
				used.Lines[0].Scope = scope
			}
			require.Empty(t, told(t, pool, scope), "held")
			var captured int64
			out, err := s.Settle(t.Context(), used, func(ctx context.Context, tx *metered.Tx) (any, error) { captured++; return nil, nil })
			require.NoError(t, err)
			require.EqualValues(t, 2, captured, "the first attempt met the threshold")
			require.Equal(t, []string{"80% spent"}, told(t, pool, scope), name)
			require.Len(t, out.Holds[0].Crossed, 1)
			require.Equal(t, spentOf, out.Holds[0].Crossed[0].Limit)
			out, err = s.Settle(t.Context(), used, nil)
			require.NoError(t, err)
			require.True(t, out.Replayed)
			require.Empty(t, out.Holds[0].Crossed)
			require.Len(t, told(t, pool, scope), 1, "a replay tells nothing")
		}
	}

	// A limit from a query is asked for the hold, and not again for the settlement: the next charge crosses the
	// threshold.
	asked := budget.Lifetime(0).MaxFrom(`select 100`).WithThresholds(spentOf.Thresholds()...)
	s, err := metered.Open[any](t.Context(), c, metered.Reservation{ID: "asked", Lines: []holds.Line{{Scope: "asked", Amount: 90, Limits: []budget.Limit{asked}}}})
	require.NoError(t, err)
	defer s.Close()
	_, err = s.Settle(t.Context(), metered.Cost{All: true}, nil)
	require.NoError(t, err)
	require.Empty(t, told(t, pool, "asked"))
	_, err = metered.Do(t.Context(), c, metered.Command{ID: "next", Charges: []budget.Charge{{Scope: "asked", Amount: 1, Limits: []budget.Limit{asked}}}}, pgtest.Upload("asked"))
	require.NoError(t, err)
	require.Equal(t, []string{"80% spent"}, told(t, pool, "asked"))
}

// Whatever OnThreshold refuses is not settled, and the session goes on.
func TestThreshold_AFailedReportSettlesNothing(t *testing.T) {
	t.Parallel()
	var veto atomic.Bool
	veto.Store(true)
	pool, c := setUpReporting(t, metered.Config{Config: budget.Config{OnThreshold: func(ctx context.Context, tx pgx.Tx, crossing budget.Crossing) error {
		err := tellTo(ctx, tx, crossing)
		if veto.Load() {
			err = errors.Join(err, pgtest.ErrOwn)
		}
		return err
	}}})
	s, err := metered.Open[any](t.Context(), c, metered.Reservation{ID: "a", Lines: []holds.Line{{Scope: "a", Amount: 90, Limits: []budget.Limit{spentOf}}}})
	require.NoError(t, err)
	defer s.Close()
	_, err = s.Settle(t.Context(), metered.Cost{All: true}, nil)
	require.ErrorIs(t, err, pgtest.ErrOwn)
	require.Empty(t, told(t, pool, "a"))
	require.NoError(t, s.Context().Err())
	veto.Store(false)
	_, err = s.Settle(t.Context(), metered.Cost{All: true}, nil)
	require.NoError(t, err)
	require.Equal(t, []string{"80% spent"}, told(t, pool, "a"))
}
