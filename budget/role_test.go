package budget_test

import (
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/internal/sqlstate"
)

func TestRole_ApplicationCanMakeEveryCallButChangeNoEntry(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	owner, l, clock := open(t)
	app := pgtest.AsRole(t, owner, metered.GrantSQL, "")
	limits := []budget.Limit{budget.PerWindow(20, time.Hour), budget.Lifetime(20)}
	for range 20 {
		mustCharge(t, app, l, "a", 1, limits...)
		clock.Advance(time.Second)
	}
	_, err := charge(ctx, app, l, "a", 1, limits...)
	require.ErrorIs(t, err, budget.ErrExceeded)
	_, err = l.Check(ctx, app, budget.Charge{Scope: "a", Amount: 1, Limits: limits})
	require.ErrorIs(t, err, budget.ErrExceeded)
	mustCredit(t, app, l, "a", 3)
	require.NoError(t, refund(ctx, app, l, "a", 1, 1))
	require.Equal(t, int64(19), usage(t, app, l, "a", time.Hour).Used)
	n := 0
	for _, err := range l.Entries(ctx, app, "a", budget.EntriesOptions{}) {
		require.NoError(t, err)
		n++
	}
	require.Equal(t, 22, n)
	requireVerified(t, app, l)

	for _, sql := range []string{
		`insert into metered.ledger (seq, amount, at, spent, refunded, credited, held, epoch, kind, scope)
			values (23, 1, now(), 21, 1, 3, 0, 0, 'c', 'a')`,
		`update metered.ledger set amount = 0`,
		`delete from metered.ledger`,
		`truncate metered.ledger`,
		`insert into metered.refund_sum values (1, 1, 1, 'a')`,
		`update metered.refund_sum set amount = 0`,
		`delete from metered.refund_sum`,
		`select * from metered.ledger for key share`,
		`select metered.append(l) from metered.ledger l`,
		`create or replace function metered.clock() returns timestamptz language sql as 'select now()'`,
		`create table metered.mine ()`,
	} {
		_, err := app.Exec(ctx, sql)
		require.Equal(t, sqlstate.InsufficientPrivilege, code(err), "%s: %v", sql, err)
	}
	_, err = l.Purge(ctx, app, budget.PurgeOptions{OlderThan: time.Second})
	require.Equal(t, sqlstate.InsufficientPrivilege, code(err))
	_, err = repairClock(ctx, app, l, "a")
	require.Equal(t, sqlstate.InsufficientPrivilege, code(err))
}

func TestRole_MaintenancePurgesAndRepairsOnly(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	owner, l, clock := open(t)
	maintenance := pgtest.AsRole(t, owner, metered.GrantMaintenanceSQL, "")
	chargeMany(t, owner, l, "a", 40)
	clock.Advance(-time.Hour)
	r, err := repairClock(ctx, maintenance, l, "a")
	require.NoError(t, err)
	require.True(t, r.Repaired)
	clock.Advance(2 * time.Hour)
	require.Equal(t, int64(31), purge(t, maintenance, l, time.Minute).Entries)
	_, err = charge(ctx, maintenance, l, "a", 1)
	require.Equal(t, sqlstate.InsufficientPrivilege, code(err))
	_, err = maintenance.Exec(ctx, `delete from metered.ledger`)
	require.Equal(t, sqlstate.InsufficientPrivilege, code(err))
	requireVerified(t, owner, l)
}

// What a caller puts in front of pg_catalog is not used, in any call: operators
// that always say yes or add wrongly, functions of the same names, a type of text.
func TestRole_HostileSearchPathChangesNothing(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	owner, l, _ := open(t)
	execute(t, owner, `
		create schema evil;
		create function evil.no(bigint, bigint) returns boolean language sql as 'select false';
		create function evil.no(text, text) returns boolean language sql as 'select false';
		create function evil.no(timestamptz, timestamptz) returns boolean language sql as 'select false';
		create function evil.zero(bigint, bigint) returns bigint language sql as 'select 0::bigint';
		create operator evil.= (leftarg = bigint, rightarg = bigint, function = evil.no);
		create operator evil.<= (leftarg = bigint, rightarg = bigint, function = evil.no);
		create operator evil.> (leftarg = bigint, rightarg = bigint, function = evil.no);
		create operator evil.> (leftarg = timestamptz, rightarg = timestamptz, function = evil.no);
		create operator evil.<= (leftarg = timestamptz, rightarg = timestamptz, function = evil.no);
		create operator evil.= (leftarg = text, rightarg = text, function = evil.no);
		create operator evil.+ (leftarg = bigint, rightarg = bigint, function = evil.zero);
		create operator evil.- (leftarg = bigint, rightarg = bigint, function = evil.zero);
		create function evil.cardinality(int[]) returns int language sql as 'select 0';
		create function evil.pg_try_advisory_xact_lock(bigint) returns boolean language sql as 'select true';
		create function evil.clock_timestamp() returns timestamptz language sql as $$select timestamptz '1999-01-01'$$;
		grant usage on schema evil to public`)
	app := pgtest.AsRole(t, owner, metered.GrantSQL, "")
	config := app.Config().Copy()
	config.ConnConfig.RuntimeParams["search_path"] = "evil, pg_catalog"
	hostile, err := pgxpool.NewWithConfig(ctx, config)
	require.NoError(t, err)
	defer hostile.Close()
	var zero int64
	require.NoError(t, hostile.QueryRow(ctx, "select 3::bigint + 4::bigint").Scan(&zero))
	require.Zero(t, zero, "the schema is in front")

	limits := []budget.Limit{budget.PerWindow(10, time.Hour), budget.Lifetime(10)}
	mustCharge(t, hostile, l, "a", 4, limits...)
	require.Equal(t, int64(6), mustCharge(t, hostile, l, "a", 2, limits...).Standings[0].Used)
	_, err = charge(ctx, hostile, l, "a", 5, limits...)
	var exceeded *budget.ExceededError
	require.ErrorAs(t, err, &exceeded)
	require.Len(t, exceeded.Refusals, 2)
	require.NoError(t, refund(ctx, hostile, l, "a", 1, 4))
	require.ErrorIs(t, refund(ctx, hostile, l, "a", 1, 1), budget.ErrRefundExceeds)
	mustCredit(t, hostile, l, "a", 1)
	u, err := l.Usage(ctx, hostile, budget.Query{Scope: "a", Window: time.Hour}, budget.Query{Scope: "a"})
	require.NoError(t, err)
	require.Equal(t, []int64{2, 1}, []int64{u[0].Used, u[1].Used})
	holder := occupy(t, owner, l, "a")
	late := pgtest.Going(func() error { _, err := charge(ctx, hostile, l, "a", 1, limits...); return err })
	pgtest.WaitQueued(t, owner, 1)
	require.NoError(t, holder.Commit(ctx))
	require.NoError(t, <-late)
	requireVerified(t, owner, l)
}
