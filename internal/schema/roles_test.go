package schema_test

import (
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"
	"github.com/riverqueue/river/rivertype"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/internal/purge"
	"github.com/pgmetered/metered/internal/sqlstate"
	"github.com/pgmetered/metered/jobs"
)

func TestGrantSQL_AllowsEveryCallAndNoChangeOfALedgerEntry(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	owner := pgtest.Open(t)
	app := pgtest.AsRole(t, owner, pgtest.Grants(metered.GrantSQL, metered.GrantJobsSQL), pgtest.RiverGrantSQL)
	client, err := river.NewClient(riverpgxv5.New(app), &river.Config{Plugins: []rivertype.Plugin{jobs.Plugin()}})
	require.NoError(t, err)
	c, err := metered.New(app, metered.Config{River: client})
	require.NoError(t, err)

	pgtest.EveryCall(t, app, c)

	for _, sql := range []string{
		`update metered.ledger set amount = 1`, `delete from metered.ledger`, `truncate metered.ledger`,
		`insert into metered.ledger select * from metered.ledger`, `update metered.refund_sum set amount = 1`,
		`delete from metered.operations`, `update metered.tokens set used = 0`, `select * from metered.tokens`,
		`create or replace function metered.clock() returns timestamptz language sql as 'select now()'`,
		`select metered.purge_scope('s', 1, now(), 0, 16, 1, true)`, `select metered.repair_clock('s', 1, 1, '')`,
		`select metered._append(l) from metered.ledger l`,
		`select metered._write_charges(array[('s', 1, 1, 0, '{}', null, null, null, null)]::metered.new_charge[], '1 minute', 1000, null, 'answer', (null, null, null, now() - interval '1 day'), true)`,
		`select metered._write_charges(array[('s', 1, 1, 1, '{}', null, null, null, null)]::metered.new_charge[], '1 minute', 1000, null, 'answer', ('no hold', '1 day', null, null), true)`, `select * from metered.ledger for update`,
	} {
		_, err := app.Exec(ctx, sql)
		require.Equal(t, sqlstate.InsufficientPrivilege, sqlstate.Of(err), "%s: %v", sql, err)
	}
	// The functions themselves let no spending be taken back, and make no empty entry.
	for _, sql := range []string{
		`select metered.charge(array[('s', 1, -1000, 0, '{}', null, null, null, null)]::metered.new_charge[], '1 minute', 1000, true)`,
		`select metered.charge(array[('s', 1, 0, 0, '{}', null, null, null, null)]::metered.new_charge[], '1 minute', 1000, true)`,
		`select metered.credit('s', 1, -7, false, 1000, null, false)`,
		`select metered.credit('s', 1, 0, false, 1000, null, false)`,
		`select metered.refund('s', 1, 1, -3, 1000, null, false)`,
	} {
		_, err := app.Exec(ctx, sql)
		require.Equal(t, sqlstate.CheckViolation, sqlstate.Of(err), "%s: %v", sql, err)
	}
	_, err = app.Exec(ctx, `select metered.refund('s', 1, 1, 0, 1000, null, false)`)
	require.Equal(t, "22023", sqlstate.Of(err), "%v", err)
	_, err = purge.Operations.Delete(ctx, app, purge.Options{OlderThan: time.Second})
	require.Equal(t, sqlstate.InsufficientPrivilege, sqlstate.Of(err))
}

func TestGrantMaintenanceSQL_AllowsThePurgesAndNoCharge(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	owner := pgtest.Open(t)
	keeper := pgtest.AsRole(t, owner, metered.GrantMaintenanceSQL, "")
	c, err := metered.New(keeper, metered.Config{})
	require.NoError(t, err)
	_, err = purge.Operations.Delete(ctx, keeper, purge.Options{OlderThan: time.Second})
	require.NoError(t, err)
	_, err = c.Budget.Purge(ctx, keeper, budget.PurgeOptions{OlderThan: time.Second})
	require.NoError(t, err)
	_, err = purge.Tokens.Delete(ctx, keeper, purge.Options{})
	require.NoError(t, err)
	require.NoError(t, pgx.BeginFunc(ctx, keeper, func(tx pgx.Tx) error {
		_, err := c.Budget.RepairClock(ctx, tx, "s", budget.Note{})
		return err
	}))
	_, err = metered.Do[any](ctx, c, metered.Command{ID: "op"}, nil)
	require.Equal(t, sqlstate.InsufficientPrivilege, sqlstate.Of(err))
}

func TestGrantSQL_IsNamedWhereItIsMissing(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	c := pgtest.NewClient(t, pgtest.AsRole(t, pgtest.Open(t), nil, ""), metered.Config{})
	app := pgtest.AsRole(t, pgtest.Open(t), nil, "")
	for what, call := range map[string]func(tx pgx.Tx) error{
		"command": func(pgx.Tx) error { _, err := metered.Do[any](ctx, c, metered.Command{ID: "op"}, nil); return err },
		"lookup":  func(tx pgx.Tx) error { _, err := c.Lookup(ctx, tx, "", "op"); return err },
		"charge": func(tx pgx.Tx) error {
			_, err := c.Budget.Charge(ctx, tx, budget.Charge{Scope: "s", Amount: 1})
			return err
		},
		"entries": func(tx pgx.Tx) error {
			for _, err := range c.Budget.Entries(ctx, tx, "s", budget.EntriesOptions{}) {
				return err
			}
			return nil
		},
		"hold": func(tx pgx.Tx) error { _, err := c.Holds.Get(ctx, tx, "", "h", ""); return err },
		"place": func(tx pgx.Tx) error {
			_, err := c.Holds.Place(ctx, tx, holds.Placement{Lines: []holds.Line{{Scope: "s", Amount: 1}}, TTL: time.Minute})
			return err
		},
		"sweep": func(pgx.Tx) error { _, err := c.Holds.Sweep(ctx, app, holds.SweepOptions{}); return err },
		"purge": func(pgx.Tx) error {
			_, err := purge.Operations.Delete(ctx, app, purge.Options{OlderThan: time.Hour})
			return err
		},
		"purge ledger": func(pgx.Tx) error {
			_, err := c.Budget.Purge(ctx, app, budget.PurgeOptions{OlderThan: time.Hour})
			return err
		},
		"purge holds": func(pgx.Tx) error {
			_, err := purge.Holds.Delete(ctx, app, purge.Options{OlderThan: time.Hour})
			return err
		},
		"purge tokens": func(pgx.Tx) error { _, err := purge.Tokens.Delete(ctx, app, purge.Options{}); return err },
		"token":        func(tx pgx.Tx) error { _, err := c.Tokens.RevokeSubject(ctx, tx, "p", "s"); return err },
		"job":          func(tx pgx.Tx) error { _, err := c.Jobs.Find(ctx, tx, "default", "k"); return err },
	} {
		err := pgx.BeginFunc(ctx, app, call)
		require.Equal(t, sqlstate.InsufficientPrivilege, sqlstate.Of(err), what)
		require.ErrorContains(t, err, "metered.GrantSQL", what)
		require.Equal(t, "not_granted", metered.Code(err), what)
		for _, same := range []error{budget.ErrNotGranted, budget.ErrNotGranted} {
			require.ErrorIs(t, err, same, what)
		}
		require.False(t, metered.Retryable(err), what)
	}
}
