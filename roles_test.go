package metered_test

import (
	"context"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"
	"github.com/riverqueue/river/rivertype"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/internal/sqlstate"
	"github.com/pgmetered/metered/jobs"
	"github.com/pgmetered/metered/tokens"
)

type noteArgs struct {
	N int `json:"n"`
}

func (noteArgs) Kind() string { return "note" }

// What River's insert needs, and no more.
const riverGrantSQL = `
grant select, insert, update on river_job, river_queue to $role;
grant usage on sequence river_job_id_seq to $role`

func TestGrantSQL_AllowsEveryCallAndNoChangeOfALedgerEntry(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	owner := pgtest.Open(t)
	app := pgtest.AsRole(t, owner, metered.GrantSQL, riverGrantSQL)
	client, err := river.NewClient(riverpgxv5.New(app), &river.Config{Plugins: []rivertype.Plugin{jobs.Plugin()}})
	require.NoError(t, err)
	c, err := metered.New(app, metered.Config{River: client})
	require.NoError(t, err)

	everyCall(t, app, c)

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
	_, err = c.PurgeOperations(ctx, app, metered.PurgeOptions{OlderThan: time.Second})
	require.Equal(t, sqlstate.InsufficientPrivilege, sqlstate.Of(err))
}

func TestGrantMaintenanceSQL_AllowsThePurgesAndNoCharge(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	owner := pgtest.Open(t)
	keeper := pgtest.AsRole(t, owner, metered.GrantMaintenanceSQL, "")
	c, err := metered.New(keeper, metered.Config{})
	require.NoError(t, err)
	_, err = c.PurgeOperations(ctx, keeper, metered.PurgeOptions{OlderThan: time.Second})
	require.NoError(t, err)
	_, err = c.Budget.Purge(ctx, keeper, budget.PurgeOptions{OlderThan: time.Second})
	require.NoError(t, err)
	_, err = c.Tokens.Purge(ctx, keeper, tokens.PurgeOptions{})
	require.NoError(t, err)
	require.NoError(t, pgx.BeginFunc(ctx, keeper, func(tx pgx.Tx) error {
		_, err := c.Budget.RepairClock(ctx, tx, "s", budget.Note{})
		return err
	}))
	_, err = metered.Do[any](ctx, c, metered.Command{ID: "op"}, nil)
	require.Equal(t, sqlstate.InsufficientPrivilege, sqlstate.Of(err))
}

// everyCall makes each call that an application makes.
func everyCall(t *testing.T, app *pgxpool.Pool, c *metered.Client) {
	t.Helper()
	ctx := t.Context()
	charge := budget.Charge{Scope: "s", Amount: 5, Limits: []budget.Limit{{Max: 100, Window: time.Hour}}}
	var token tokens.Minted
	require.NoError(t, pgx.BeginFunc(ctx, app, func(tx pgx.Tx) error {
		receipt, err := c.Budget.Charge(ctx, tx, charge)
		require.NoError(t, err)
		_, err = c.Budget.Credit(ctx, tx, budget.Credit{Scope: "s", Amount: 5})
		require.NoError(t, err)
		_, err = c.Budget.Refund(ctx, tx, budget.Refund{Scope: "s", Seq: receipt.Entries[0].Seq, Amount: 2})
		require.NoError(t, err)
		token, err = c.Tokens.Mint(ctx, tx, tokens.Mint{Purpose: "p", Subject: "s", TTL: time.Minute})
		require.NoError(t, err)
		_, err = c.Tokens.Replace(ctx, tx, tokens.Mint{Purpose: "p", Subject: "t", TTL: time.Minute})
		require.NoError(t, err)
		_, err = c.Tokens.RevokeSubject(ctx, tx, "p", "t")
		require.NoError(t, err)
		_, err = c.Tokens.Inspect(ctx, tx, "p", "s", token.Token.Reveal())
		return err
	}))
	_, err := metered.Do(ctx, c, metered.Command{
		ID: "op", Charges: []budget.Charge{charge}, Sticky: []budget.Charge{{Scope: "tries", Amount: 1}},
		Token: &metered.Redeem{Purpose: "p", Subject: "s", Presented: token.Token.Reveal()},
	}, func(ctx context.Context, tx *metered.Tx) (int64, error) {
		_, err := tx.Enqueue(ctx, noteArgs{N: 1}, &jobs.Options{Key: "k"})
		require.NoError(t, err)
		job, err := tx.Enqueue(ctx, noteArgs{N: 2}, nil)
		return job.JobID, err
	})
	require.NoError(t, err)
	for range 2 { // then a replay
		_, err = metered.Do[any](ctx, c, metered.Command{ID: "early", EarlyRelease: true, Charges: []budget.Charge{charge}}, nil)
		require.NoError(t, err)
	}
	_, err = c.Jobs.Find(ctx, app, "default", "k")
	require.NoError(t, err)
	_, err = c.Lookup(ctx, app, "", "op")
	require.NoError(t, err)
	_, err = c.Budget.Check(ctx, app, charge)
	require.NoError(t, err)
	_, err = c.Budget.Usage(ctx, app, budget.Query{Scope: "s"})
	require.NoError(t, err)
	for _, err := range c.Budget.Entries(ctx, app, "s", budget.EntriesOptions{}) {
		require.NoError(t, err)
	}
	report, err := c.Budget.Verify(ctx, app, budget.VerifyOptions{})
	require.NoError(t, err)
	require.True(t, report.OK(), report.Differences)
}

func TestGrantSQL_IsNamedWhereItIsMissing(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	c := newClient(t, pgtest.AsRole(t, pgtest.Open(t), nil, ""), metered.Config{})
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
			_, err := c.Holds.Place(ctx, tx, holds.Request{Lines: []holds.Line{{Scope: "s", Amount: 1}}, TTL: time.Minute})
			return err
		},
		"sweep": func(pgx.Tx) error { _, err := c.Holds.Sweep(ctx, app, holds.SweepOptions{}); return err },
		"purge": func(pgx.Tx) error {
			_, err := c.PurgeOperations(ctx, app, metered.PurgeOptions{OlderThan: time.Hour})
			return err
		},
		"purge ledger": func(pgx.Tx) error {
			_, err := c.Budget.Purge(ctx, app, budget.PurgeOptions{OlderThan: time.Hour})
			return err
		},
		"purge holds": func(pgx.Tx) error {
			_, err := c.Holds.Purge(ctx, app, holds.PurgeOptions{OlderThan: time.Hour})
			return err
		},
		"purge tokens": func(pgx.Tx) error { _, err := c.Tokens.Purge(ctx, app, tokens.PurgeOptions{}); return err },
		"token":        func(tx pgx.Tx) error { _, err := c.Tokens.RevokeSubject(ctx, tx, "p", "s"); return err },
		"job":          func(tx pgx.Tx) error { _, err := c.Jobs.Find(ctx, tx, "default", "k"); return err },
	} {
		err := pgx.BeginFunc(ctx, app, call)
		require.Equal(t, sqlstate.InsufficientPrivilege, sqlstate.Of(err), what)
		require.ErrorContains(t, err, "metered.GrantSQL", what)
		require.Equal(t, "not_granted", metered.Code(err), what)
		for _, same := range []error{metered.ErrNotGranted, budget.ErrNotGranted, holds.ErrNotGranted, tokens.ErrNotGranted, jobs.ErrNotGranted} {
			require.ErrorIs(t, err, same, what)
		}
		require.False(t, metered.Retryable(err), what)
	}
}
