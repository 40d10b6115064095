package command_test

import (
	"context"
	"errors"
	"maps"
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

// Where the answers come in text, and a server, database or role has other forms for them, commands are answered as ever: first, as replays and
// as refusals, with their holds.
func TestDo_IsAnsweredUnderAnySetting(t *testing.T) {
	t.Parallel()
	for name, settings := range map[string]map[string]string{
		"German":      {"DateStyle": "German", "IntervalStyle": "sql_standard", "TimeZone": "Asia/Kolkata", "bytea_output": "escape"},
		"Postgres":    {"DateStyle": "Postgres, MDY", "IntervalStyle": "postgres_verbose", "TimeZone": "America/St_Johns", "array_nulls": "off"},
		"backslashes": {"DateStyle": "SQL, DMY", "standard_conforming_strings": "off", "backslash_quote": "off", "escape_string_warning": "off"},
	} {
		for _, mode := range []pgx.QueryExecMode{pgx.QueryExecModeExec, pgx.QueryExecModeSimpleProtocol, pgx.QueryExecModeCacheStatement} {
			if mode == pgx.QueryExecModeSimpleProtocol && settings["standard_conforming_strings"] == "off" {
				continue // pgx refuses it
			}
			t.Run(name+" "+mode.String(), func(t *testing.T) {
				t.Parallel()
				owner, _ := setUp(t, metered.Config{})
				pool := pgtest.Reopen(t, owner, func(c *pgxpool.Config) {
					c.ConnConfig.DefaultQueryExecMode = mode
					maps.Copy(c.ConnConfig.RuntimeParams, settings)
				})
				c := newClient(t, pool, metered.Config{})
				before := time.Now().Add(-time.Minute)
				for i := range 2 {
					out, err := metered.Do(t.Context(), c, metered.Command{ID: "op", Charges: []budget.Charge{charge("s", 1, 5)}, Holds: []holds.Placement{
						{ID: "all", TTL: time.Hour, Lines: []holds.Line{{Scope: "seats", Amount: 1}}},
						{ID: "h", TTL: time.Hour, Lines: []holds.Line{{Scope: "seats", Amount: 1}}},
					}}, upload("a"))
					require.NoError(t, err)
					require.Equal(t, i == 1, out.Replayed)
					require.WithinRange(t, out.At, before, time.Now().Add(time.Minute))
					require.WithinRange(t, out.Receipt.Entries[0].At, before, time.Now().Add(time.Minute))
					require.Len(t, out.Holds, 2)
				}
				captured, err := metered.Do(t.Context(), c, metered.Command{ID: "capture", Input: 1}, func(_ context.Context, tx *metered.Tx) (any, error) {
					return nil, errors.Join(tx.Capture(holds.Capture{IDs: []string{"all"}, All: true}),
						tx.Capture(holds.Capture{IDs: []string{"h"}, Lines: []holds.Line{{Scope: "seats", Amount: 1}}}))
				})
				require.NoError(t, err)
				require.Equal(t, holds.Captured, captured.Holds[0].State)
				_, err = metered.Do(t.Context(), c, metered.Command{ID: "full", Charges: []budget.Charge{charge("s", 9, 5)}}, upload("b"))
				require.ErrorIs(t, err, budget.ErrExceeded)
				require.NoError(t, pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error {
					for i := range 3 {
						out, err := metered.DoTx(t.Context(), c, tx, metered.Command{ID: "lent", Charges: []budget.Charge{charge("s", int64(1+i/2*9), 5)}, Holds: []holds.Placement{
							{ID: "lent", TTL: time.Hour, Lines: []holds.Line{{Scope: "seats", Amount: 1}}},
						}}, upload("lent"))
						if i == 2 {
							require.ErrorIs(t, err, budget.ErrConflict)
						} else {
							require.NoError(t, err)
							require.Equal(t, i == 1, out.Replayed)
							require.WithinRange(t, out.At, before, time.Now().Add(time.Minute))
						}
						require.Contains(t, pgtest.Value[string](t, tx, "show DateStyle"), settings["DateStyle"], "the caller's stays")
					}
					return nil
				}))
				posted, err := c.Budget.ChargeNow(t.Context(), pool, charge("now", 1, 5))
				require.NoError(t, err)
				require.WithinRange(t, posted.At, before, time.Now().Add(time.Minute))
				require.NoError(t, c.RunTx(t.Context(), pgx.TxOptions{}, func(ctx context.Context, tx pgx.Tx) error {
					_, err := c.Budget.Charge(ctx, tx, charge("now", 1, 5))
					return err
				}))
				require.Equal(t, settings["DateStyle"], pgtest.Value[string](t, pool, "select split_part(current_setting('DateStyle'), ',', 1) || case when $1 ~ ',' then ',' || split_part(current_setting('DateStyle'), ',', 2) else '' end", settings["DateStyle"]), "the session's stays")
			})
		}
	}
}
