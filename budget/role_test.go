package budget_test

import (
	"context"
	"fmt"
	"math"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/internal/bounds"
	"github.com/pgmetered/metered/internal/fault"
	"github.com/pgmetered/metered/internal/niltest"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/internal/sqlstate"
)

func TestRole_ApplicationCanMakeEveryCallButChangeNoEntry(t *testing.T) {
	t.Parallel()
	pgtest.OnEachVersion(t)
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
	upTo, err := chargeUpTo(ctx, app, l, budget.Charge{Scope: "up to", Amount: 9, Limits: []budget.Limit{budget.Lifetime(4)}})
	require.NoError(t, err)
	require.Equal(t, []int64{4}, amounts(upTo))
	n := 0
	for _, err := range l.Entries(ctx, app, "a", budget.EntriesOptions{}) {
		require.NoError(t, err)
		n++
	}
	require.Equal(t, 22, n)
	requireReads(t, app, l)
	requireReads(t, pgtest.AsRole(t, owner, metered.GrantReportingSQL, ""), l)
	results, err := ingest(ctx, app, l, event("e", "b", 1), event("f", "b", 1, budget.Lifetime(0)), event("g", "c", 1))
	require.NoError(t, err)
	require.NoError(t, results[0].Err)
	require.ErrorIs(t, results[1].Err, budget.ErrExceeded)
	results, err = each(ctx, app, l, take("b", 1), take("c", 1))
	require.NoError(t, err)
	require.Equal(t, int64(2), results[0].Posted.Seq)
	_, err = l.ChargeNow(ctx, app, take("b", 1))
	require.NoError(t, err)
	requireVerified(t, app, l)

	for _, sql := range []string{
		`select metered._write_up_to(null, 1, '1 minute', 1000, null, 'answer', null, false)`,
		`select metered._write_plain(null, null, null, now() - interval '1 day')`,
		`select metered._write_exact(null, null, 1, '1 minute', 1000, now() - interval '1 day')`,
		`select metered._recorded_events(null, null, 1)`,
		`insert into metered.ledger (seq, amount, at, spent, refunded, credited, held, epoch, kind, scope)
			values (23, 1, now(), 21, 1, 3, 0, 0, 'c', 'a')`,
		`update metered.ledger set amount = 0`,
		`delete from metered.ledger`,
		`truncate metered.ledger`,
		`insert into metered.refund_sum values (1, 1, 1, 'a')`,
		`update metered.refund_sum set amount = 0`,
		`delete from metered.refund_sum`,
		`select * from metered.ledger for key share`,
		`select metered._append(l) from metered.ledger l`,
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

// requireReads reads the history of scope a, which has 1 credit or more in the first hour.
func requireReads(t *testing.T, db budget.Querier, l *budget.Ledger) {
	t.Helper()
	require.Positive(t, between(t, db, l, "a", start, start.Add(time.Hour)).Credited)
	for range l.Entries(t.Context(), db, "a", budget.EntriesOptions{Note: budget.Note{Actor: "nobody"}, Name: "nothing"}) {
		require.Fail(t, "nothing is to be found")
	}
	found := 0
	for _, err := range budget.Search(t.Context(), l, db, "a", budget.EntriesOptions{From: start, To: start.Add(time.Hour), NewestFirst: true}, 100) {
		require.NoError(t, err)
		found++
	}
	require.Positive(t, found)
}

func TestRole_MaintenancePurgesAndRepairsOnly(t *testing.T) {
	t.Parallel()
	pgtest.OnEachVersion(t)
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

// Objects that a caller puts in front of pg_catalog are not used, in any call: operators that always say yes or add
// wrongly, functions of the same names, a type of text.
func TestRole_HostileSearchPathChangesNothing(t *testing.T) {
	t.Parallel()
	pgtest.OnEachVersion(t)
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
	require.Equal(t, budget.RangeUsage{Charged: 6, Charges: 2, Credited: 1, RefundedOfCharged: 4, RefundsMade: 4},
		between(t, hostile, l, "a", start, start.Add(time.Hour)))
	require.Zero(t, between(t, hostile, l, "a", start.Add(time.Microsecond), start.Add(time.Hour)))
	requireReads(t, hostile, l)
	holder := occupy(t, owner, l, "a")
	late := pgtest.Going(func() error { _, err := charge(ctx, hostile, l, "a", 1, limits...); return err })
	pgtest.WaitQueued(t, owner, 1)
	require.NoError(t, holder.Commit(ctx))
	require.NoError(t, <-late)
	requireVerified(t, owner, l)
}

func TestImports_AreThePackageItselfPgxAndTheStandardLibrary(t *testing.T) {
	t.Parallel()
	const own = "github.com/pgmetered/metered/"
	out, err := exec.CommandContext(t.Context(), "go", "list", "-deps", "-f", "{{if not .Standard}}{{.ImportPath}}{{end}}", own+"budget").CombinedOutput()
	require.NoError(t, err, string(out))
	packages := strings.Fields(string(out))
	require.Contains(t, packages, own+"budget")
	for _, p := range packages {
		allowed := false
		for _, prefix := range []string{own + "budget", own + "internal/", own + "observe", "github.com/jackc/", "golang.org/x/"} {
			allowed = allowed || strings.HasPrefix(p, prefix)
		}
		require.True(t, allowed, "a program that imports only budget links %s", p)
		for _, foreign := range []string{"river", "testify", "rapid", "pgserver", "pgtest"} {
			require.NotContains(t, p, foreign)
		}
	}
}

func TestCalls_NilIsRefused(t *testing.T) {
	t.Parallel()
	ledger, err := budget.New(budget.Config{})
	require.NoError(t, err)
	tx, pool := untouchable{t: t}, new(pgxpool.Pool)
	nothing := func(context.Context, pgx.Tx, []budget.FeedEntry) error { return nil }
	charge := budget.Charge{Scope: "s", Amount: 1}
	credit, refund := budget.Credit{Scope: "s", Amount: 1}, budget.Refund{Scope: "s", Seq: 1, Amount: 1}
	niltest.Methods(t, ledger, map[string][]any{
		"Charge": {tx, charge}, "Check": {tx, charge}, "Credit": {tx, credit}, "Refund": {tx, refund}, "Lock": {tx, "s"},
		"Entries": {tx, "s", budget.EntriesOptions{}}, "Usage": {tx, budget.Query{Scope: "s"}}, "RepairClock": {tx, "s", budget.Note{}}, "ClockAhead": {pool, time.Minute},
		"Purge": {pool, budget.PurgeOptions{OlderThan: time.Hour}}, "Verify": {pool, budget.VerifyOptions{}},
		"LockKey": {"s"}, "Create": {tx, "s"}, "Retire": {tx, "s"}, "Restore": {tx, "s"}, "Resources": {pool, niltest.Given{Arg: ""}},
		"ChargeEach": {tx, charge}, "ChargeNow": {pool, charge}, "Ingest": {tx, budget.UsageEvent{ID: "e", Charge: charge}},
		"UsageBetween": {tx, "s", start, start.Add(1000)},
		"Series":       {tx, "s", start, start.Add(1000), budget.Day, niltest.Given{Arg: time.UTC}},
		"Feed":         {tx, niltest.Given{Arg: budget.FeedCursor("")}, budget.FeedOptions{}}, "NumberFeed": {pool},
		"ConsumeFeed": {tx, "c", budget.FeedOptions{}}, "FeedConsumers": {pool}, "DropFeedConsumer": {tx, "c"},
		"RunFeed": {pool, "c", budget.FeedOptions{}, nothing},
		"WhatIf":  {tx, budget.PerWindow(1, time.Hour), start, start.Add(1000), "s"},
	})
	niltest.Func(t, "NewBatcher", budget.NewBatcher, pool, niltest.Given{Arg: ledger}, budget.BatcherConfig{})
	batcher, err := budget.NewBatcher(pool, ledger, budget.BatcherConfig{})
	require.NoError(t, err)
	niltest.Methods(t, batcher, map[string][]any{"Charge": {charge}, "Ingest": {budget.UsageEvent{ID: "e", Charge: charge}}, "Close": {}})
}

// Totals near the end of 64 bits cannot be reached by charging: the owner writes them.
func TestOverflow_IsATypedErrorAndWritesNothing(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	pool, l, _ := open(t)
	const insert = `insert into metered.ledger (scope, seq, kind, amount, at, spent, refunded, credited, held, epoch)
		values ($1, 1, 'c', 1, $2, $3, $4, $5, 0, 0)`
	execute(t, pool, insert, "spent", start, int64(math.MaxInt64-5), 0, 0)
	execute(t, pool, insert, "credited", start, 0, 0, int64(math.MaxInt64-5))
	execute(t, pool, insert, "refunded", start, 0, int64(math.MaxInt64), 0)

	_, err := charge(ctx, pool, l, "spent", 6)
	require.ErrorIs(t, err, fault.New("budget_overflow", ""))
	mustCharge(t, pool, l, "spent", 5)
	require.Equal(t, int64(math.MaxInt64), usage(t, pool, l, "spent", 0).Spent)

	_, err = l.Credit(ctx, autocommit{Querier: pool}, budget.Credit{Scope: "credited", Amount: 6})
	require.ErrorIs(t, err, fault.New("budget_overflow", ""))
	_, err = l.Credit(ctx, autocommit{Querier: pool}, budget.Credit{Scope: "credited", Amount: 5})
	require.NoError(t, err)
	require.ErrorIs(t, refund(ctx, pool, l, "refunded", 1, 1), fault.New("budget_overflow", ""))
	require.Equal(t, int64(1), usage(t, pool, l, "refunded", 0).Seq)
}

func TestBounds_LargestArgumentsWork(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	pool, l, _ := open(t)
	limits := []budget.Limit{budget.Lifetime(bounds.MaxLimit), budget.PerWindow(bounds.MaxLimit, bounds.MaxWindow)}
	mustCharge(t, pool, l, "a", bounds.MaxAmount, limits...)
	posted := mustCharge(t, pool, l, "a", bounds.MaxAmount, limits...)
	for _, s := range posted.Standings {
		require.Equal(t, int64(2*bounds.MaxAmount), s.Used)
		require.Equal(t, int64(bounds.MaxLimit-2*bounds.MaxAmount), s.Available)
	}

	// So much credit that the available units would not fit into 64 bits.
	execute(t, pool, `insert into metered.ledger (scope, seq, kind, amount, at, spent, refunded, credited, held, epoch)
		values ('rich', 1, 'd', 1, $1, 0, 0, $2, 7, 0)`, start, int64(math.MaxInt64))
	posted = mustCharge(t, pool, l, "rich", 1, limits[0])
	require.Equal(t, budget.Standing{Limit: limits[0], Used: 1 - math.MaxInt64, Held: 7, Available: math.MaxInt64 - 7}, posted.Standings[0])

	// So much spent and held that the sum of both would not fit.
	execute(t, pool, `insert into metered.ledger (scope, seq, kind, amount, at, spent, refunded, credited, held, epoch, next_due)
		values ('full', 1, 'c', 1, $1, $2, 0, 0, 100, 0, $1::timestamptz + interval '1 hour')`, start, int64(math.MaxInt64-50))
	execute(t, pool, `insert into metered.hold_lines (hold, key, amount, open, due, scope, opened_seq) values (1, 0, 100, 100, $1, 'full', 1)`, start.Add(time.Hour))
	var full *budget.ExceededError
	for _, limit := range append(limits, budget.Prepaid(0), budget.PerWindow(0, time.Hour)) {
		_, err := charge(ctx, pool, l, "full", bounds.MaxAmount, limit)
		require.ErrorAs(t, err, &full)
		require.Zero(t, full.Refusals[0].Available)
	}

	var charges []budget.Charge
	for i := range bounds.MaxScopes {
		c := budget.Charge{Scope: fmt.Sprintf("scope %d", i), Amount: 1}
		for j := range bounds.MaxLimits {
			c.Limits = append(c.Limits, budget.PerWindow(1, time.Duration(j+1)*time.Hour))
		}
		charges = append(charges, c)
	}
	r, err := l.Charge(ctx, autocommit{Querier: pool}, charges...)
	require.NoError(t, err)
	require.Len(t, r.Entries, bounds.MaxScopes)
	_, err = l.Charge(ctx, autocommit{Querier: pool}, charges...)
	var exceeded *budget.ExceededError
	require.ErrorAs(t, err, &exceeded)
	require.Len(t, exceeded.Refusals, bounds.MaxScopes*bounds.MaxLimits)
	require.Equal(t, charges[63].Limits[15], exceeded.Refusals[1023].Limit)
	require.Equal(t, charges[63].Scope, exceeded.Refusals[1023].Scope)
}
