package metered_test

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"iter"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/internal/pgtest"
)

// Each statement of this module is sent by internal/answer, whose answers no setting changes. TestAnswers_AreTheSameUnderAnySetting shows that.
func TestStatements_AreSentSoThatNoSettingChangesTheirAnswers(t *testing.T) {
	t.Parallel()
	sent := 0
	for path, file := range sources(t) {
		if pathOfOther(path) {
			continue
		}
		ast.Inspect(file, func(n ast.Node) bool {
			call, ok := n.(*ast.CallExpr)
			if !ok || len(call.Args) < 2 {
				return true
			}
			method, ok := call.Fun.(*ast.SelectorExpr)
			if !ok || !slices.Contains([]string{"Query", "QueryRow", "SendBatch"}, method.Sel.Name) {
				return true
			}
			if pkg, ok := method.X.(*ast.Ident); ok && pkg.Name == "answer" {
				sent++
			} else if !slices.Contains(bySomebodyElse, path+" "+method.Sel.Name) {
				t.Errorf("%s: %s is not that of internal/answer", path, method.Sel.Name)
			}
			return true
		})
	}
	require.Greater(t, sent, 100)
}

// bySomebodyElse are the places that pass statements on, or pin the settings themselves.
var bySomebodyElse = []string{
	"internal/command/statements.go SendBatch",                                                                           // Command.Statements
	"internal/guardtx/guardtx.go Query", "internal/guardtx/guardtx.go QueryRow", "internal/guardtx/guardtx.go SendBatch", // a caller's statements
	"jobs/citusjobs/citusjobs.go Query", "jobs/citusjobs/citusjobs.go QueryRow", // River's statements
	"internal/command/owned.go SendBatch", // begins with answer.PinSQL
	"leases/open.go SendBatch",            // has answer.PinSQL
	"metered.go SendBatch",                // BEGIN and COMMIT
	"internal/sweep/through.go SendBatch", // BEGIN, an answer of yes or no, and COMMIT
}

// pathOfOther reports whether a file is of another module, or of internal/answer itself.
func pathOfOther(path string) bool {
	return slices.ContainsFunc([]string{"internal/answer/", "cells/", "cmd/", "console/", "otelmetered/"}, func(dir string) bool { return strings.HasPrefix(path, dir) })
}

// sources are the files of the library.
func sources(t *testing.T) map[string]*ast.File {
	files := map[string]*ast.File{}
	require.NoError(t, filepath.WalkDir(".", func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() && slices.Contains([]string{"bench", "examples", "integration_test", "interleave", "pgtest", "pgserver", "testdata", "docs"}, d.Name()) {
			return cmpOr(err, filepath.SkipDir)
		}
		if d.IsDir() || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") {
			return nil
		}
		files[path], err = parser.ParseFile(token.NewFileSet(), path, nil, parser.SkipObjectResolution)
		return err
	}))
	return files
}

// No statement makes text of a time, an interval, a fraction or bytes, or a date of a time, in the way that the session has set. Of the
// other modules, which send their statements themselves, none has an answer of such a type either.
func TestStatements_MeanTheSameUnderAnySetting(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	pool := pgtest.Open(t)
	conn, err := pool.Acquire(ctx)
	require.NoError(t, err)
	defer conn.Release()
	_, err = conn.Exec(ctx, citusSQL, pgx.QueryExecModeSimpleProtocol)
	require.NoError(t, err)
	looked := 0
	for sql, places := range statementsSent(t) {
		problem := probed(t, conn, sql, "pg_catalog, public", func(tx pgx.Tx) {
			looked++
			tree := pgtest.Value[string](t, tx, "select prosqlbody::text from pg_proc where oid = 'pg_temp.probe'::regproc")
			if found := bySettings(t, tx, sql, tree); len(found) > 0 {
				t.Errorf("%v: %v\n%s", places, found, sql)
			}
		})
		if problem != "" {
			continue // a part of a statement, or one of what is not in this database: TestStatements_MeanTheSameOnAnySearchPath
		}
		if slices.ContainsFunc(places, pathOfOther) {
			described, err := conn.Conn().Prepare(ctx, "", sql)
			require.NoError(t, err)
			for _, field := range described.Fields {
				if slices.Contains(changed, field.DataTypeOID) {
					t.Errorf("%v: the answer's %s depends on settings, where it is text\n%s", places, field.Name, sql)
				}
			}
		}
	}
	require.Greater(t, looked, 120)
	for sql, wanted := range map[string]string{
		"select at::text from metered.ledger":                                       "a cast of text",
		"select (now() - at)::text from metered.ledger":                             "a cast of text",
		"select 'at ' || l.at from metered.ledger l":                                "textanycat(text,anynonarray)",
		"select format('%s', at) from metered.ledger":                               `format(text,"any")`,
		"select at::date from metered.ledger":                                       "date(timestamp with time zone)",
		"select date_trunc('day', at) from metered.ledger":                          "date_trunc(text,timestamp with time zone)",
		"select extract(day from at) from metered.ledger":                           `"extract"(text,timestamp with time zone)`,
		"select at::timestamp from metered.ledger":                                  `"timestamp"(timestamp with time zone)`,
		"select concat(fingerprint) from metered.operations":                        `concat("any")`,
		"select array_to_string(array_agg(fingerprint), '') from metered.holds":     "array_to_string(anyarray,text)",
		"select to_char(at, 'YYYY') from metered.ledger where at < '2020-01-01'":    "to_char(timestamp with time zone,text)",
		"select 1 from metered.ledger where at > '2020-01-01'::timestamp":           "timestamptz_gt_timestamp(timestamp with time zone,timestamp without time zone)",
		"select case when true then 1::float8 else 2 end::text from metered.ledger": "a cast of text",
	} {
		require.Empty(t, probed(t, conn, sql, "pg_catalog, public", func(tx pgx.Tx) {
			tree := pgtest.Value[string](t, tx, "select prosqlbody::text from pg_proc where oid = 'pg_temp.probe'::regproc")
			require.Contains(t, bySettings(t, tx, sql, tree), wanted, sql)
		}), sql)
	}
}

// changed are the types whose text depends on settings.
var changed = []uint32{pgtype.TimestamptzOID, pgtype.TimestamptzArrayOID, pgtype.TimestampOID, pgtype.TimestampArrayOID, pgtype.DateOID, pgtype.DateArrayOID,
	pgtype.IntervalOID, pgtype.IntervalArrayOID, pgtype.ByteaOID, pgtype.ByteaArrayOID, pgtype.Float4OID, pgtype.Float8OID, pgtype.Float8ArrayOID, pgtype.TimetzOID}

// bySettings are the functions and casts in a tree whose results depend on settings.
func bySettings(t *testing.T, tx pgx.Tx, sql, tree string) (found []string) {
	types := map[string]bool{}
	for _, oid := range changed {
		types[strconv.Itoa(int(oid))] = true
	}
	var oids []string
	for node := range nodesOf(tree) {
		first, _, _ := strings.Cut(node, " ")
		m := calledIn.FindStringSubmatch(node)
		switch {
		case first == "{COERCEVIAIO" && slices.ContainsFunc(children(node), func(child string) bool { return types[typeOf(child)] }):
			found = append(found, "a cast of text")
		case m == nil || first != "{FUNCEXPR" && first != "{OPEXPR" && first != "{AGGREF":
		case slices.ContainsFunc(children(node), func(child string) bool { return types[typeOf(child)] }) || types[typeOf(node)]:
			oids = append(oids, m[1])
		}
	}
	found = append(found, pgtest.Value[[]string](t, tx, `
		select coalesce(array_agg(p.oid::regprocedure::text), '{}') from pg_proc p
		where p.oid::text = any ($1::text[]) and p.pronamespace = 'pg_catalog'::regnamespace and p.provolatile = 's'`, oids)...)
	return slices.DeleteFunc(found, func(name string) bool {
		return slices.Contains(harmless, name) || strings.Contains(name, "extract") && !otherExtract.MatchString(sql)
	})
}

// harmless are functions of times whose results depend on no setting here. The library sends intervals in microseconds alone, so that
// a day of the session's zone is none of them. JSON has times in one form under any DateStyle, and with their offset.
var harmless = []string{"now()", "to_char(timestamp without time zone,text)", "timestamptz_mi_interval(timestamp with time zone,interval)", "timestamptz_pl_interval(timestamp with time zone,interval)",
	"to_json(anyelement)", "to_jsonb(anyelement)", "json_build_object(\"any\")", "jsonb_build_object(\"any\")", `json_build_array("any")`}

var (
	otherExtract = regexp.MustCompile(`(?i)(extract\(\s*(?:[^e ]|e[^p])|date_part)`)
	calledIn     = regexp.MustCompile(`^\{\w+ (?::opno \d+ )?:(?:funcid|opfuncid|aggfnoid) (\d+)`)
	typeIn       = regexp.MustCompile(`:(?:vartype|funcresulttype|opresulttype|aggtype|consttype|paramtype|resulttype|coalescetype|casetype|minmaxtype|array_typeid) (\d+)`)
)

// nodesOf are the nodes of a tree, each with what is in it.
func nodesOf(tree string) iter.Seq[string] {
	return func(yield func(string) bool) {
		for at := range tree {
			if tree[at] == '{' && !yield(tree[at:at+ends(tree[at:])]) {
				return
			}
		}
	}
}

// ends is where the node ends that a text begins with.
func ends(text string) int {
	deep := 0
	for i := 0; i < len(text); i++ {
		switch text[i] {
		case '\\':
			i++
		case '{':
			deep++
		case '}':
			if deep--; deep == 0 {
				return i + 1
			}
		}
	}
	return len(text)
}

// children are the nodes that a node has in it, without theirs.
func children(node string) (all []string) {
	for at := 1; at < len(node); at++ {
		if node[at] == '{' {
			end := ends(node[at:])
			all = append(all, node[at:at+end])
			at += end - 1
		}
	}
	return all
}

// typeOf is the type of an expression: of its own field, not of a node within.
func typeOf(node string) string {
	for _, child := range children(node) {
		node = strings.Replace(node, child, "", 1)
	}
	if m := typeIn.FindStringSubmatch(node); m != nil {
		return m[1]
	}
	return ""
}
