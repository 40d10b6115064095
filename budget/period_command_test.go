package budget_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/internal/fault"
	"github.com/pgmetered/metered/internal/pgtest"
)

// A command, in a transaction of its own or of the caller's, is judged in periods: its receipt and its refusal have them, its early
// look refuses, and the same command with another period is the same command.
func TestPeriods_InCommands(t *testing.T) {
	t.Parallel()
	pool, client := pgtest.SetUp(t, metered.Config{})
	noon := pgtest.Tomorrow(12)
	pgtest.SetClock(t, pool, noon)
	day := budget.Per(10, budget.Day, time.UTC, time.Time{})
	midnight := noon.Add(12 * time.Hour)
	command := func(id string, amount int64, limits ...budget.Limit) metered.Command {
		return metered.Command{ID: id, Charges: []budget.Charge{{Scope: "a", Amount: amount, Limits: limits}}}
	}
	nothing := func(context.Context, *metered.Tx) (int, error) { return 1, nil }

	out, err := metered.Do(t.Context(), client, command("1", 6, budget.Lifetime(100), day), nothing)
	require.NoError(t, err)
	standings := out.Receipt.Entries[0].Standings
	require.Zero(t, standings[0].PeriodEnd)
	require.Equal(t, budget.Standing{Limit: day, Used: 6, Available: 4, PeriodStart: midnight.AddDate(0, 0, -1), PeriodEnd: midnight}, standings[1])
	require.NoError(t, pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error {
		out, err := metered.DoTx(t.Context(), client, tx, command("2", 3, day), nothing)
		require.NoError(t, err)
		require.Equal(t, midnight, out.Receipt.Entries[0].Standings[0].PeriodEnd)
		return nil
	}))

	for _, early := range []bool{false, true} {
		ran := false
		cmd := command("3", 2, day)
		cmd.EarlyLook = early
		_, err = metered.Do(t.Context(), client, cmd, func(context.Context, *metered.Tx) (int, error) { ran = true; return 1, nil })
		var refused *budget.ExceededError
		require.ErrorAs(t, err, &refused)
		require.Equal(t, midnight, refused.Refusals[0].PeriodEnd)
		require.Equal(t, 12*time.Hour, refused.RetryAfter())
		if early {
			require.False(t, ran, "it was looked at early")
		}
	}

	replayed, err := metered.Do(t.Context(), client, command("1", 6, budget.Per(1, budget.Year, time.UTC, time.Time{})), nothing)
	require.NoError(t, err)
	require.True(t, replayed.Replayed)
	_, err = metered.Do(t.Context(), client, command("4", 1, budget.Per(10, budget.Day, time.FixedZone("Europe/Atlantis", 0), time.Time{})), nothing)
	require.True(t, errors.Is(err, fault.New("budget_time_zone", "")) && metered.Code(err) == "budget_time_zone", "%v", err)

	// The number that a query answers is for the period.
	out, err = metered.Do(t.Context(), client, command("5", 1, day.MaxFrom("select 10")), nothing)
	require.NoError(t, err)
	require.Equal(t, int64(10), out.Receipt.Entries[0].Standings[0].Used)
}
