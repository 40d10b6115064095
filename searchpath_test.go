package metered_test

import (
	"context"
	"go/ast"
	"go/constant"
	"go/parser"
	"go/token"
	"go/types"
	"io/fs"
	"maps"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/internal/purge"
	"github.com/pgmetered/metered/internal/schema"
)

// Whatever operators somebody has created in a schema on the search_path, each statement that the library sends is made of
// those of pg_catalog. A function that it calls without its schema has no arguments, or is count(*).
func TestStatements_MeanTheSameOnAnySearchPath(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	pool := pgtest.Open(t)
	conn, err := pool.Acquire(ctx)
	require.NoError(t, err)
	defer conn.Release()
	_, err = conn.Exec(ctx, citusSQL, pgx.QueryExecModeSimpleProtocol)
	require.NoError(t, err)
	all := statementsSent(t)
	require.Greater(t, len(all), 120)
	pgtest.SetTraps(t, pool, touched(t, conn, all))

	catalog := map[string]bool{}
	rows, err := conn.Query(ctx, "select distinct proname::text from pg_proc where pronamespace = 'pg_catalog'::regnamespace and pronargs + provariadic::int > 0")
	require.NoError(t, err)
	var name string
	_, err = pgx.ForEachRow(rows, []any{&name}, func() error { catalog[name] = true; return nil })
	require.NoError(t, err)

	texts := slices.Collect(maps.Keys(all))
	for sql, places := range all {
		at := places[0]
		if slices.ContainsFunc(places, func(place string) bool {
			// privacy/export.go is built of columns, and calls pg_catalog's functions: TestExport_MeansTheSameOnAnySearchPath
			return slices.ContainsFunc([]string{"budget/verify", "cells/rows", "cells/move", "privacy/work", "privacy/export", "notary/notarize", "notary/verify", "notary/log", "internal/schema/macros"}, func(file string) bool { return strings.HasPrefix(place, file) })
		}) {
			continue // these transactions have a search_path of their own, and so have functions, of which a macro is a part
		}
		for _, call := range calls.FindAllStringSubmatch(quotes.ReplaceAllString(sql, "''"), -1) {
			if catalog[call[1]] && !slices.Contains(grammar, call[1]) && call[1] != "count" {
				t.Errorf("%s: %s is called without pg_catalog", at, call[1])
			}
		}
		shadowed := shadowedIn(t, conn, sql)
		if strings.HasPrefix(shadowed, "no statement") && slices.ContainsFunc(texts, func(other string) bool { return other != sql && strings.Contains(other, sql) }) {
			continue // it is a part of one
		}
		if shadowed != "" && !strings.Contains(sql, "was not inserted") { // a statement that is to fail
			t.Errorf("%s: %s\n%s", at, shadowed, sql)
		}
	}
	for sql, trap := range map[string]string{
		"select 1 from metered.ledger where amount > 1":                         "traps.>(metered.units,",
		"select 1 from river_job where state = 'pending'":                       "traps.=(public.river_job_state,",
		"select 1 from river_job where state in ('pending', 'available')":       "traps.=(public.river_job_state,",
		"select 1 from river_job where case state when 'pending' then true end": "traps.=(public.river_job_state,",
		"select '2020-01-01' || xact_start from pg_stat_activity":               "traps.||(timestamp with time zone,",
		"select 1 from pg_proc where proargnames = '{a}'":                       "traps.=(text[],",
	} {
		require.Contains(t, shadowedIn(t, conn, sql), trap, sql)
	}
}

// touched are the types and operators in the trees that the server makes of the statements.
func touched(t *testing.T, conn *pgxpool.Conn, all map[string][]string) pgtest.Touched {
	types, operators := map[string]bool{}, map[string]bool{}
	for sql := range all {
		probed(t, conn, sql, "pg_catalog, public", func(tx pgx.Tx) {
			tree := pgtest.Value[string](t, tx, "select prosqlbody::text from pg_proc where oid = 'pg_temp.probe'::regproc")
			for _, found := range typesOf.FindAllStringSubmatch(tree, -1) {
				types[found[1]] = true
			}
			for _, found := range operatorsOf.FindAllStringSubmatch(tree, -1) {
				for oid := range strings.FieldsSeq(found[1]) {
					operators[oid] = true
				}
			}
		})
	}
	return pgtest.Touched{
		Types:     pgtest.Value[[]uint32](t, conn, "select array_agg(oid) from pg_type where oid::text = any ($1::text[])", slices.Collect(maps.Keys(types))),
		Operators: pgtest.Value[[]string](t, conn, "select array_agg(distinct oprname::text) from pg_operator where oid::text = any ($1::text[])", slices.Collect(maps.Keys(operators))),
	}
}

var (
	typesOf     = regexp.MustCompile(`(?i):\w*type(?:id)? (\d+)`)
	operatorsOf = regexp.MustCompile(`:opnos? (?:\(o )?([\d ]+)`)
)

// citusSQL has the objects of Citus that statements mean, without their behavior.
const citusSQL = `
set allow_system_table_mods = on;
create table pg_catalog.pg_dist_schema (schemaid oid);
create table pg_catalog.pg_dist_partition (logicalrelid regclass);
create function pg_catalog.create_distributed_table(regclass, text, colocate_with text) returns void language sql as '';
create function pg_catalog.truncate_local_data_after_distributing_table(regclass) returns void language sql as '';
create function pg_catalog.run_command_on_all_nodes(text) returns table (success bool, result text) language sql as 'select true, ''''';
reset allow_system_table_mods`

var (
	quotes  = regexp.MustCompile(`'[^']*'`)
	calls   = regexp.MustCompile(`(?:^|[^.:\w"])(?:unnest\([^()]*,|([a-z_0-9]+)\()`) // unnest of several arrays is that of pg_catalog
	grammar = []string{"coalesce", "greatest", "least", "nullif", "extract", "row", "exists", "values", "cast", "overlay", "position", "substring", "trim", "any"}
)

// shadowedIn says which operators of the statement are somebody else's, or why it is none where there are such.
func shadowedIn(t *testing.T, conn *pgxpool.Conn, sql string) (shadowed string) {
	problem := probed(t, conn, sql, "public, traps", func(tx pgx.Tx) {
		shadowed = pgtest.Value[string](t, tx, `
			select coalesce(string_agg(o.oid::regoperator::text, ', '), '') from pg_depend d join pg_operator o on o.oid = d.refobjid
			where d.classid = 'pg_proc'::regclass and d.objid = 'pg_temp.probe'::regproc and d.refclassid = 'pg_operator'::regclass`)
	})
	return problem + shadowed
}

// probed makes a statement the body of a function, on a search_path, and calls look. It says why it could not.
func probed(t *testing.T, conn *pgxpool.Conn, sql, path string, look func(pgx.Tx)) (problem string) {
	ctx := t.Context()
	_, err := conn.Exec(ctx, "set search_path = pg_catalog, public")
	require.NoError(t, err)
	described, err := conn.Conn().Prepare(ctx, "", sql)
	if err != nil {
		return "no statement: " + err.Error()
	}
	var types []string
	for _, oid := range described.ParamOIDs {
		types = append(types, pgtest.Value[string](t, conn, "select format_type($1, null)", oid))
	}
	tx, err := conn.Begin(ctx)
	require.NoError(t, err)
	defer func() { _ = tx.Rollback(ctx) }()
	_, err = tx.Exec(ctx, "select set_config('search_path', $1, true)", path)
	require.NoError(t, err)
	_, err = tx.Exec(ctx, "create function pg_temp.probe("+strings.Join(types, ", ")+") returns void language sql begin atomic "+sql+"; end", pgx.QueryExecModeSimpleProtocol)
	if err != nil {
		return err.Error()
	}
	_, err = tx.Exec(ctx, "set local search_path = pg_catalog")
	require.NoError(t, err)
	look(tx)
	return ""
}

// statementsSent are the constants of this module's packages that are statements, with the places where they stand.
func statementsSent(t *testing.T) map[string][]string {
	c := &checker{fset: token.NewFileSet(), packages: map[string]*types.Package{}, called: map[types.Object]bool{}}
	files := map[string][]*ast.File{}
	require.NoError(t, filepath.WalkDir(".", func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() && slices.Contains([]string{"bench", "examples", "integration_test", "interleave", "pgtest", "pgserver", "testdata", "docs"}, d.Name()) {
			return cmpOr(err, filepath.SkipDir)
		}
		if d.IsDir() || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") {
			return nil
		}
		file, err := parser.ParseFile(c.fset, path, nil, parser.SkipObjectResolution)
		files[filepath.Dir(path)] = append(files[filepath.Dir(path)], file)
		return err
	}))
	all := map[string][]string{}
	for dir, of := range files {
		info := &types.Info{Types: map[ast.Expr]types.TypeAndValue{}, Uses: map[*ast.Ident]types.Object{}}
		c.check(modulePath+"/"+dir, of, info)
		for _, file := range of {
			ast.Inspect(file, func(n ast.Node) bool {
				expr, ok := n.(ast.Expr)
				if !ok {
					return true
				}
				value := info.Types[expr].Value
				if value == nil || value.Kind() != constant.String {
					return true
				}
				if sql := strings.TrimSpace(constant.StringVal(value)); statement.MatchString(sql) {
					sql = strings.NewReplacer("from %s", "from river_job", "(%s", "(select 1::int8", "%d", "1").Replace(sql)
					all[sql] = append(all[sql], c.fset.Position(expr.Pos()).String())
				}
				return false
			})
		}
	}
	return all
}

var statement = regexp.MustCompile(`^(?:(?:select|values|update|delete from|insert into|merge into)\s|with\s(?:recursive\s)?[a-z_]+(?:\([^)]*\))? as\s)`)

// A superuser on whose search_path an application may create things migrates, grants, looks and runs the library.
func TestHostileSearchPath_IsNotAskedBySuperusers(t *testing.T) {
	t.Parallel()
	pgtest.InCI(t)
	ctx := t.Context()
	trapped := func(pool *pgxpool.Pool) *pgxpool.Pool {
		return pgtest.Reopen(t, pool, func(cfg *pgxpool.Config) { cfg.ConnConfig.RuntimeParams["search_path"] = "public, traps" })
	}
	empty := pgtest.OpenWith(t, pgtest.Options{Empty: true})
	sent := statementsSent(t)
	find := func(pool *pgxpool.Pool) (all pgtest.Touched) {
		require.NoError(t, pool.AcquireFunc(ctx, func(conn *pgxpool.Conn) error { all = touched(t, conn, sent); return nil }))
		return all
	}
	pgtest.SetTraps(t, empty, find(empty))
	super := trapped(empty)
	_, err := super.Exec(ctx, "select format('%s', 'x'::text)")
	require.ErrorContains(t, err, "trap")

	// Each statement by itself, as psql and some tools send it, and all of them at once.
	conn, err := super.Acquire(ctx)
	require.NoError(t, err)
	defer conn.Release()
	for i, name := range []string{"one", "whole"} {
		text, err := metered.SchemaSQL(metered.SchemaSQLOptions{Schema: name})
		require.NoError(t, err)
		statements := splitSQL(text)
		if i > 0 {
			statements = []string{text}
		}
		for _, one := range statements {
			_, err := conn.Exec(ctx, one, pgx.QueryExecModeSimpleProtocol)
			require.NoError(t, err, one)
		}
		require.Equal(t, "public, traps", pgtest.Value[string](t, conn, "show search_path"))
	}
	pgtest.Migrate(t, super, metered.MigrateOptions{})
	for _, name := range []string{"one", "whole", "metered"} {
		report, err := metered.Validate(ctx, super, name)
		require.NoError(t, err)
		require.NoError(t, report.Err())
	}
	require.Zero(t, pgtest.Count(t, empty, `pg_depend d join pg_operator o on d.refclassid = 'pg_operator'::regclass and o.oid = d.refobjid
		where o.oprnamespace = 'traps'::regnamespace and d.classid <> 'pg_operator'::regclass`), "what uses a trap")

	// With operators of the library's own types, too.
	owner := pgtest.Open(t)
	pgtest.SetTraps(t, owner, find(owner))
	super = trapped(owner)
	pgtest.Execute(t, owner, "grant execute on function metered.charge to public")
	tx, err := owner.Begin(ctx)
	require.NoError(t, err)
	defer func() { _ = tx.Rollback(ctx) }()
	_, err = tx.Exec(ctx, "lock table metered.schema_version in share mode")
	require.NoError(t, err)
	_, err = tx.Exec(ctx, "select pg_advisory_xact_lock($1)", schema.MigrationLock)
	require.NoError(t, err)
	waited := false
	r := pgtest.Migrate(t, super, metered.MigrateOptions{OnWait: func(_ context.Context, what string) {
		require.Contains(t, what, "another migration")
		require.NoError(t, tx.Rollback(ctx))
		waited = true
	}})
	require.True(t, waited)
	require.Len(t, r.Repaired, 1)
	pgtest.Execute(t, owner, "grant execute on function metered.charge to public")
	for _, render := range []func(schema, role string) (string, error){metered.GrantSQL, metered.GrantJobsSQL, metered.GrantMaintenanceSQL, metered.GrantReportingSQL} {
		app := pgtest.AsRole(t, super, render, "set search_path = public, traps")
		require.NoError(t, app.Ping(ctx))
	}
	c, err := metered.New(super, metered.Config{})
	require.NoError(t, err)
	_, err = owner.Exec(ctx, "select metered.grant_lot('w', null, row(1000, null, '1 h', '', 0, null, null, 5, '1 h', null)::metered.new_lot, false, 1000, null)")
	require.NoError(t, err)
	_, err = metered.Do[any](ctx, c, metered.Command{ID: "op", Charges: []budget.Charge{pgtest.Charge("s", 2, 100), {Scope: "w", Amount: 1}}}, nil)
	require.NoError(t, err)
	_, err = super.Exec(ctx, "select amount > 1 from metered.ledger")
	require.ErrorContains(t, err, "trap")
	_, err = pgtest.InTx(ctx, super, func(tx pgx.Tx) (budget.Posted, error) {
		return c.Budget.Refund(ctx, tx, budget.Refund{Scope: "s", Seq: 1, Amount: 1})
	})
	require.NoError(t, err)
	report, err := c.Budget.Verify(ctx, super, budget.VerifyOptions{})
	require.NoError(t, err)
	require.Empty(t, report.Differences)
	pgtest.Execute(t, owner, "update metered.refund_sum set amount = 2")
	report, err = c.Budget.Verify(ctx, super, budget.VerifyOptions{})
	require.NoError(t, err)
	require.NotEmpty(t, report.Differences)
	for _, view := range []string{"statement", "scopes", "holds_words", "hold_events_words", "leases_words", "lease_spends_words", "operations_words", "tokens_words", "lots_words", "lots_statement", "parked_scopes_words", "parked_jobs_words"} {
		_, err := super.Exec(ctx, "select * from metered."+view)
		require.NoError(t, err, view)
	}
	_, err = c.Holds.Sweep(ctx, super, holds.SweepOptions{})
	require.NoError(t, err)
	_, err = purge.Operations.Delete(ctx, super, purge.Options{OlderThan: time.Second})
	require.NoError(t, err)
	_, err = c.Budget.Purge(ctx, super, budget.PurgeOptions{OlderThan: time.Second})
	require.NoError(t, err)
}

// splitSQL are the statements of a text, as psql finds them.
func splitSQL(text string) (all []string) {
	one, quoted := "", false
	for line := range strings.Lines(text) {
		one += line
		code, _, _ := strings.Cut(line, "--")
		if strings.Count(line, "$$")%2 == 1 {
			quoted = !quoted
		}
		if !quoted && strings.HasSuffix(strings.TrimSpace(code), ";") {
			all, one = append(all, one), ""
		}
	}
	return all
}

func cmpOr(err, other error) error {
	if err != nil {
		return err
	}
	return other
}
