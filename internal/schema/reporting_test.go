package schema_test

import (
	"context"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/internal/sqlstate"
	"github.com/pgmetered/metered/jobs"
	"github.com/pgmetered/metered/tokens"
	"github.com/pgmetered/metered/wallet"
)

// A role with GrantReportingSQL tries statements that it may not run.
func TestGrantReportingSQL_OnlyReads(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	owner, c := pgtest.SetUp(t, metered.Config{})
	pgtest.EveryCall(t, owner, c)
	pgtest.Mint(t, owner, c)
	role := pgtest.AsRole(t, owner, metered.GrantReportingSQL, "")
	for sql, code := range map[string]string{
		`select digest from metered.tokens_words`:                                           "42703",
		`select payload from metered.tokens_words`:                                          "42703",
		`select result from metered.operations_words`:                                       "42703",
		`select fingerprint from metered.operations_words`:                                  "42703",
		`select args from metered.parked_jobs_words`:                                        "42703",
		`select job from metered.parked_jobs`:                                               "",
		`select * from metered.tokens`:                                                      "",
		`select digest from metered.tokens limit 1`:                                         "",
		`select result from metered.operations`:                                             "",
		`select digest from metered.job_keys`:                                               "",
		`select * from metered.inspect_token('', 'upload', 'ann')`:                          "",
		`select * from metered.find_job_key('default', 'k')`:                                "",
		`select * from metered.ledger for update`:                                           "",
		`select * from metered.holds for key share`:                                         "",
		`update metered.statement set amount = 0`:                                           "",
		`delete from metered.statement`:                                                     "",
		`update metered.operations_words set name = ''`:                                     "",
		`insert into metered.tokens_words (purpose) values ('p')`:                           "55000", // no view of several relations takes rows
		`truncate metered.ledger`:                                                           "",
		`do $$ begin lock table metered.ledger in row exclusive mode; end $$`:               "",
		`create table metered.mine ()`:                                                      "",
		`create or replace view metered.scopes as select 1`:                                 "",
		`drop view metered.scopes`:                                                          "",
		`grant select on metered.tokens to public`:                                          "",
		`select metered.credit('s', 1, 1, false, 1000, null, false)`:                        "",
		`select metered.revoke_tokens('upload', 'ann', 1000)`:                               "",
		`select nextval(pg_get_serial_sequence('metered.holds', 'no'))`:                     "",
		`create or replace function metered.clock() returns timestamptz as '' language sql`: "",
	} {
		_, err := role.Exec(ctx, sql)
		if code == "" {
			code = sqlstate.InsufficientPrivilege
		}
		require.Equal(t, code, sqlstate.Of(err), "%s: %v", sql, err)
	}
	// Whatever there is.
	rights, err := role.Query(ctx, `
		select c.relname || ' ' || p from pg_class c, unnest(array['insert', 'update', 'delete', 'truncate', 'references', 'trigger']) p
		where c.relnamespace = 'metered'::regnamespace and c.relkind in ('r', 'v') and has_table_privilege(c.oid, p)
		union all select f.proname from pg_proc f -- one that is not volatile cannot write
		where f.pronamespace = 'metered'::regnamespace and has_function_privilege(f.oid, 'execute') and f.provolatile = 'v' and f.proname <> 'clock'`)
	require.NoError(t, err)
	beyond, err := pgx.CollectRows(rights, pgx.RowTo[string])
	require.NoError(t, err)
	require.Empty(t, beyond)

	for _, view := range []string{"statement", "scopes", "holds_words", "hold_events_words", "leases_words", "lease_spends_words", "operations_words", "tokens_words", "lots_words", "lots_statement", "parked_scopes_words", "parked_jobs_words"} {
		_, err := role.Exec(ctx, "select * from metered."+view)
		require.NoError(t, err, view)
	}
	report, err := metered.Validate(ctx, role, "")
	require.NoError(t, err)
	require.NoError(t, report.Err())
	_, err = c.Budget.Usage(ctx, role, budget.Query{Scope: "s"})
	require.NoError(t, err)
	_, err = c.Budget.Check(ctx, role, pgtest.Charge("s", 1, 1000))
	require.NoError(t, err)
	_, err = c.Holds.Due(ctx, role, holds.DueFilter{AllTenants: true})
	require.NoError(t, err)
	for _, err := range c.Budget.Entries(ctx, role, "s", budget.EntriesOptions{}) {
		require.NoError(t, err)
	}
}

// The clock is set as docs/operations.md says it. The views and the calls go by it.
func TestReports_GoByTheClockThatIsSet(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	owner, c := pgtest.SetUp(t, metered.Config{})
	text, err := os.ReadFile("../../docs/operations.md")
	require.NoError(t, err)
	_, page, _ := strings.Cut(string(text), "## The clock in tests\n")
	_, page, _ = strings.Cut(page, "```sql\n")
	set, _, _ := strings.Cut(page, "```")
	const noon = "2031-05-05 12:00:00Z"
	require.Contains(t, set, noon)
	pgtest.Execute(t, owner, set)
	credit, err := wallet.New(c.Budget, wallet.Config{})
	require.NoError(t, err)
	require.NoError(t, pgx.BeginFunc(ctx, owner, func(tx pgx.Tx) error {
		if _, err := credit.Grant(ctx, tx, wallet.Grant{Wallet: "ann", Amount: 10, Ends: wallet.After(time.Minute), Reference: "gift"}); err != nil {
			return err
		}
		h, err := c.Holds.Place(ctx, tx, holds.Placement{ID: "h", TTL: time.Minute, Lines: []holds.Line{{Scope: "s", Amount: 1}}})
		require.Equal(t, time.Date(2031, 5, 5, 12, 1, 0, 0, time.UTC), h.Deadline)
		if err != nil {
			return err
		}
		_, err = c.Tokens.Mint(ctx, tx, tokens.Mint{Purpose: "p", Subject: "s", TTL: time.Minute})
		return err
	}))
	role := pgtest.AsRole(t, owner, metered.GrantReportingSQL, "")
	states := func() string {
		return pgtest.Value[string](t, role, `select (select state from metered.lots_words) || ', ' || (select state from metered.holds_words) || ', ' ||
			(select state from metered.tokens_words)`)
	}
	require.Equal(t, "open, held, open", states())
	pgtest.Execute(t, owner, strings.Replace(set, noon, "2031-05-05 12:01:00Z", 1))
	require.Equal(t, "ended, expired, expired", states())
	pgtest.Migrate(t, owner, metered.MigrateOptions{})
	require.Less(t, pgtest.Value[time.Time](t, owner, `select metered.clock()`).Year(), 2031, "Migrate puts it back")
}

// An upgrade, and a repair, of the reports keeps who may read them.
func TestMigrate_ReplacesAViewThatHasOtherColumns(t *testing.T) {
	t.Parallel()
	pgtest.OnEachVersion(t)
	ctx := t.Context()
	owner := pgtest.Open(t)
	role := pgtest.AsRole(t, owner, metered.GrantReportingSQL, "")
	pgtest.Execute(t, owner, `create view metered.more as select 1 as a; drop view metered.scopes;
		create view metered.scopes as select now() as scope, 7 as gone; create table public.r as select rolname from pg_roles where rolname = '`+
		pgtest.Value[string](t, role, "select current_user")+`';
		do $$ begin execute format('grant select on metered.scopes to %I', (select rolname from public.r)); end $$`)
	require.Equal(t, 7, pgtest.Value[int](t, role, "select gone from metered.scopes"))
	report := pgtest.Migrate(t, owner, metered.MigrateOptions{})
	require.NotEmpty(t, report.Repaired)
	require.NoError(t, pgtest.Validate(t, owner).Err())
	require.Zero(t, pgtest.Value[int](t, role, "select count(*) from metered.scopes where scope = 's'"))

	pgtest.Execute(t, owner, `create or replace view metered.tokens_words as select purpose, subject, 'x'::text as state, minted_at, expires_at, ended_at, uses, used, sole,
		digest from metered.tokens`) // a column that somebody added at its end would be seen by all that may read it
	require.NoError(t, pgtest.Validate(t, owner).Err())
	pgtest.Execute(t, owner, "drop view metered.scopes")
	pgtest.Migrate(t, owner, metered.MigrateOptions{})
	_, err := role.Exec(ctx, "select * from metered.scopes")
	require.NoError(t, err, "who may read the statement may read what is new")
	_, err = role.Exec(ctx, "select digest from metered.tokens_words")
	require.Equal(t, "42703", sqlstate.Of(err))
	_, err = role.Exec(ctx, "select purpose from metered.tokens_words")
	require.NoError(t, err)

	// Somebody's own view on it stops that, and nothing is changed.
	pgtest.Execute(t, owner, `drop view metered.scopes; create view metered.scopes as select 1 as scope; create view public.mine as select * from metered.scopes`)
	_, err = metered.Migrate(ctx, owner, metered.MigrateOptions{})
	require.Equal(t, "2BP01", sqlstate.Of(err))
	pgtest.Execute(t, owner, "drop view public.mine")
	pgtest.Migrate(t, owner, metered.MigrateOptions{})
}

func TestOperation_HasTheNameAndTheJobs(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	pool, c := pgtest.SetUp(t, metered.Config{})
	var ids []int64
	named := metered.Command{ID: "op", Name: `a "name", (odd) \ one`}
	do := func(cmd metered.Command) error {
		_, err := metered.Do(ctx, c, cmd, func(ctx context.Context, tx *metered.Tx) (any, error) {
			for _, key := range []string{"k", "k", ""} {
				r, err := tx.Enqueue(ctx, pgtest.Process{}, &jobs.Options{Key: key})
				if err != nil {
					return nil, err
				}
				if r.Created {
					ids = append(ids, r.JobID)
				}
			}
			return nil, nil
		})
		return err
	}
	for range 2 { // then a replay
		require.NoError(t, do(named))
		op, err := c.Lookup(ctx, pool, "", "op")
		require.NoError(t, err)
		require.Equal(t, named.Name, op.Name)
		require.Equal(t, ids, op.Jobs)
		require.Len(t, ids, 2)
	}
	named.Name = "another"
	require.ErrorIs(t, do(named), budget.ErrConflict)

	refused := metered.Command{ID: "refused", Name: "n", RecordRefusal: true, Charges: []budget.Charge{pgtest.Charge("s", 2, 1)}}
	_, err := metered.Do[any](ctx, c, refused, nil)
	require.ErrorIs(t, err, budget.ErrExceeded)
	op, err := c.Lookup(ctx, pool, "", "refused")
	require.NoError(t, err)
	require.Equal(t, []any{"n", []int64(nil)}, []any{op.Name, op.Jobs})
	_, err = metered.Do[any](ctx, c, metered.Command{ID: "nameless"}, nil)
	require.NoError(t, err)
	require.True(t, pgtest.Value[bool](t, pool, "select name is null and jobs is null from metered.operations where id = 'nameless'"))
	// A record of the build before has neither.
	pgtest.Execute(t, pool, `insert into metered.operations (tenant, id, at, fingerprint, result) values ('', 'old', now(), '', '{}')`)
	op, err = c.Lookup(ctx, pool, "", "old")
	require.NoError(t, err)
	require.Empty(t, op.Name)
}

func TestViews_ShowRowsInWords(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	pool, c := pgtest.SetUp(t, metered.Config{})
	pgtest.Mint(t, pool, c)
	require.NoError(t, pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		receipt, err := c.Budget.Charge(ctx, tx, budget.Charge{Scope: "s", Amount: 5, Note: budget.Note{Actor: "ann", Reason: "why"}})
		require.NoError(t, err)
		_, err = c.Budget.Refund(ctx, tx, budget.Refund{Scope: "s", Seq: receipt.Entries[0].Seq, Amount: 2})
		require.NoError(t, err)
		_, err = c.Budget.Credit(ctx, tx, budget.Credit{Scope: "s", Amount: 4})
		require.NoError(t, err)
		_, err = c.Holds.Place(ctx, tx, holds.Placement{ID: "h", TTL: time.Minute, Lines: []holds.Line{{Scope: "s", Amount: 3}}})
		require.NoError(t, err)
		_, err = c.Holds.Capture(ctx, tx, holds.Capture{IDs: []string{"h"}, Lines: []holds.Line{{Scope: "s", Amount: 1}}})
		return err
	}))
	rows, err := pool.Query(ctx, `select kind, change, used, coalesce(actor, ''), coalesce(reason, '') from metered.statement where scope = 's' order by seq`)
	require.NoError(t, err)
	type line struct {
		Kind          string
		Change, Used  int64
		Actor, Reason string
	}
	lines, err := pgx.CollectRows(rows, pgx.RowToStructByPos[line])
	require.NoError(t, err)
	require.Equal(t, []line{{"charge", 5, 5, "ann", "why"}, {"refund", -2, 3, "", ""}, {"credit", -4, -1, "", ""}, {"hold", 0, -1, "", ""},
		{"capture", 1, 0, "", ""}, {"release", 0, 0, "", ""}}, lines)
	// Its changes are the scope.
	require.True(t, pgtest.Value[bool](t, pool, `select s.used = (select sum(change) from metered.statement where scope = 's') and s.entries = 6 and s.held = 0
		and not s.closed and s.created_at is null from metered.scopes s where scope = 's'`))
	require.Equal(t, `captured {"s": 3} {"s": 1}`, pgtest.Value[string](t, pool, `select concat_ws(' ', state, units, captured) from metered.holds_words`))
	require.Equal(t, "placed, captured", pgtest.Value[string](t, pool, `select string_agg(kind, ', ' order by version) from metered.hold_events_words`))
	require.Equal(t, "open upload ann", pgtest.Value[string](t, pool, `select concat_ws(' ', state, purpose, subject) from metered.tokens_words`))
	pgtest.Execute(t, pool, `update metered.tokens set minted_at = now() - interval '1 h', expires_at = now() - interval '1 min'`)
	require.Equal(t, "expired", pgtest.Value[string](t, pool, `select state from metered.tokens_words`))
}

// One scope's statement, and one scope, are read by their key, however large the ledger is; all scopes by the index that
// has the sixteenth part of the entries.
func TestViews_AreReadByIndexes(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	pool := pgtest.Open(t)
	pgtest.Execute(t, pool, pgtest.BigTablesSQL)
	pgtest.Execute(t, pool, `insert into metered.operations (tenant, id, at, fingerprint, result) select '', 'o' || g, now(), '', '' from generate_series(1, 20000) g`)
	for _, table := range []string{"ledger", "holds", "hold_lines", "hold_events", "operations"} {
		_, err := pool.Exec(ctx, "vacuum analyze metered."+table)
		require.NoError(t, err)
	}
	for sql, index := range map[string]string{
		`select * from metered.statement where scope = 'held' and seq > 5 order by seq limit 10`:               "ledger_pkey",
		`select * from metered.scopes where scope = 'held'`:                                                    "ledger_pkey",
		`select * from metered.scopes`:                                                                         "ledger_time",
		`select * from metered.holds_words where tenant = '' and id = 'old 7'`:                                 "holds_tenant_id_key",
		`select * from metered.holds_words order by no desc limit 10`:                                          "holds_pkey",
		`select * from metered.hold_events_words where tenant = '' and id = 'old 7'`:                           "hold_events_pkey",
		`select * from metered.operations_words where tenant = '' and id = 'o7'`:                               "operations_pkey",
		`select * from metered.operations_words where at > now() - interval '1 min' order by at desc limit 10`: "operations_at",
	} {
		rows, err := pool.Query(ctx, "explain "+sql, pgx.QueryExecModeExec)
		require.NoError(t, err)
		plan, err := pgx.CollectRows(rows, pgx.RowTo[string])
		require.NoError(t, err)
		require.Contains(t, join(plan), index, sql)
		for _, table := range []string{"ledger", "holds", "hold_lines", "hold_events", "operations"} {
			require.NotContains(t, join(plan), "Seq Scan on "+table+" ", sql)
		}
	}
}

func join(lines []string) (text string) {
	for _, l := range lines {
		text += l + "\n"
	}
	return text
}
