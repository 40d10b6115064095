package schema_test

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/internal/bounds"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/internal/schema"
)

// argumentType is a type of the catalog, as arguments have it.
type argumentType struct {
	name    string
	base    uint32 // of a domain
	element uint32 // of an array
	names   []string
	fields  []uint32
}

type boundsTest struct {
	*testing.T
	owner *pgxpool.Pool
	types map[uint32]argumentType
	tried map[string]int
}

// Each argument of each function that a role may execute, and each field of one, is refused one above its bound,
// before anything else is looked at. Arguments without a bound have a type that bounds them.
func TestBounds_AreThereForEveryArgumentOfEveryGrantedFunction(t *testing.T) {
	t.Parallel()
	owner := pgtest.Open(t)
	role := pgtest.AsRole(t, owner, pgtest.Grants(metered.GrantSQL, metered.GrantJobsSQL, metered.GrantMaintenanceSQL, metered.GrantReportingSQL), "")
	b := &boundsTest{t, owner, map[uint32]argumentType{}, map[string]int{}}
	rows, err := role.Query(t.Context(), `select p.proname::text, p.proargtypes::oid[], coalesce(p.proargnames, '{}') from pg_proc p
		where p.pronamespace = 'metered'::regnamespace and has_function_privilege(p.oid, 'execute') order by p.oid`)
	require.NoError(t, err)
	type function struct {
		Name  string
		Types []uint32
		Names []string
	}
	all, err := pgx.CollectRows(rows, pgx.RowToStructByPos[function])
	require.NoError(t, err)
	require.Len(t, all, len(schema.Functions))
	for _, f := range all {
		for i, typ := range f.Types {
			for _, v := range b.beyond(f.Name, f.Names[i], typ, false) {
				args := make([]string, len(f.Types))
				for k, other := range f.Types {
					args[k] = b.nothing(other)
				}
				args[i] = v.sql
				sql := "select metered." + f.Name + "(" + strings.Join(args, ", ") + ")"
				_, err := role.Exec(t.Context(), sql, pgx.QueryExecModeSimpleProtocol)
				var refused *pgconn.PgError
				what := fmt.Sprintf("%s: %s is %s", f.Name, v.path, v.what)
				if !errors.As(err, &refused) {
					t.Errorf("%s: %v", what, err)
				} else if !(refused.Code == "22023" && slices.Contains([]string{"an argument of " + f.Name, f.Names[i]}, strings.TrimPrefix(refused.Message, "out of bounds: ")) || refused.Code == "23514" && refused.DataTypeName != "") {
					t.Errorf("%s: %v", what, err)
				}
				b.tried[v.what]++
			}
		}
	}
	t.Log(b.tried)
	require.Greater(t, b.tried["too long"], 150)
	require.Greater(t, b.tried["of too many"], 50)
}

// tooMuch is an expression that is beyond a bound.
type tooMuch struct{ path, what, sql string }

// beyond are expressions of a type, each beyond one bound. inArray: it is within an array, where only large values are looked at.
func (b *boundsTest) beyond(function, name string, oid uint32, inArray bool) (all []tooMuch) {
	typ := b.typeOf(oid)
	add := func(what, sql string) { all = append(all, tooMuch{name, what, sql + "::" + typ.name}) }
	of := func(unit schema.Unit) int { return schema.BoundOf(function, name, unit) }
	more := 1
	if inArray {
		more = 3000
	}
	base := typ
	if typ.base != 0 {
		base = b.typeOf(typ.base)
	}
	switch {
	case typ.element != 0:
		element := b.typeOf(typ.element)
		if of(schema.Items) == 0 {
			b.Errorf("%s: %s has no bound of its items", function, name)
			return nil
		}
		add("of too many", fmt.Sprintf("array_fill(%s, array[%d])", b.filled(typ.element), of(schema.Items)+(more+9)/10))
		if !inArray {
			add("without the first", fmt.Sprintf("array_fill(%s, array[2], array[0])", b.filled(typ.element)))
			add("of two dimensions", fmt.Sprintf("array_fill(%s, array[1, 1])", b.filled(typ.element)))
		}
		if len(element.fields) > 0 {
			for _, v := range b.beyond(function, "", typ.element, true) {
				all = append(all, tooMuch{name + "[]" + v.path, v.what, "array[" + v.sql + "]::" + typ.name})
			}
		} else if element.name == "text" {
			add("too long", fmt.Sprintf("array[repeat('x', %d)]", of(schema.Bytes)+more))
		}
	case len(typ.fields) > 0:
		for i, field := range typ.fields {
			for _, v := range b.beyond(function, typ.names[i], field, inArray) {
				values := make([]string, len(typ.fields))
				for k, other := range typ.fields {
					values[k] = "null::" + b.typeOf(other).name
				}
				values[i] = v.sql
				all = append(all, tooMuch{name + "." + v.path, v.what, "row(" + strings.Join(values, ", ") + ")::" + typ.name})
			}
		}
	case slices.Contains([]string{"text", "bytea", "json", "jsonb"}, base.name):
		most := of(schema.Bytes)
		if typ.name == "metered.scope_name" || typ.name == "metered.fingerprint" {
			require.Contains(b, []int{255, 33}, most)
		}
		if most == 0 {
			b.Errorf("%s: %s has no bound of its bytes", function, name)
		}
		switch base.name {
		case "text":
			add("too long", fmt.Sprintf("('\"' || repeat('x', %d) || '\"')", most-2+more))
		case "bytea":
			add("too long", fmt.Sprintf("convert_to(repeat('x', %d), 'UTF8')", most+more))
		default:
			add("too long", fmt.Sprintf("to_json(repeat('x', %d))", most+more))
		}
		if lines := of(schema.Lines); lines > 0 {
			add("of too many lines", fmt.Sprintf("(repeat(rpad('1 1 x', 182, 'x') || chr(10), %d) || '1 1 x')", lines))
		}
	case base.name == "integer":
		if most := of(schema.Value); most > 0 && !inArray {
			add("too much", fmt.Sprintf("(%d)", most+1))
		} else if most == 0 && name != "priority" && name != "timeout_ms" {
			b.Errorf("%s: %s has no bound", function, name)
		}
	}
	return all
}

// nothing is an expression of a type that is within all bounds.
func (b *boundsTest) nothing(oid uint32) string {
	name := b.typeOf(oid).name
	switch name {
	case "metered.scope_name":
		return "'s'"
	case "metered.amount", "metered.units":
		return "1"
	case "metered.fingerprint":
		return "decode(repeat('01', 33), 'hex')"
	}
	return "null::" + name
}

// filled is an expression of a type that is large enough for arrays of it to be looked into.
func (b *boundsTest) filled(oid uint32) string {
	switch typ := b.typeOf(oid); {
	case len(typ.fields) > 0:
		values := make([]string, len(typ.fields))
		for i, field := range typ.fields {
			values[i] = b.filled(field)
		}
		return "row(" + strings.Join(values, ", ") + ")::" + typ.name
	case typ.name == "text":
		return "repeat('x', 100)"
	case typ.name == "timestamp with time zone":
		return "now()"
	default:
		return "null::" + typ.name
	}
}

func (b *boundsTest) typeOf(oid uint32) argumentType {
	if typ, ok := b.types[oid]; ok {
		return typ
	}
	var typ argumentType
	require.NoError(b, b.owner.QueryRow(b.Context(), `
		select format_type(t.oid, null), t.typbasetype, case when t.typcategory = 'A' then t.typelem else 0 end,
			array(select a.attname::text from pg_attribute a where a.attrelid = t.typrelid and a.attnum > 0 order by a.attnum),
			array(select a.atttypid from pg_attribute a where a.attrelid = t.typrelid and a.attnum > 0 order by a.attnum)
		from pg_type t where t.oid = $1`, oid).Scan(&typ.name, &typ.base, &typ.element, &typ.names, &typ.fields))
	b.types[oid] = typ
	return typ
}

// The check at the beginning of a function does not look into a small array. Compressed values of a table are small: their length is checked where they are used.
func TestBounds_HoldForSmallCallsAndCompressedValues(t *testing.T) {
	t.Parallel()
	owner := pgtest.Open(t)
	role := pgtest.AsRole(t, owner, pgtest.Grants(metered.GrantSQL, metered.GrantJobsSQL), "")
	conn, err := role.Acquire(t.Context())
	require.NoError(t, err)
	defer conn.Release()
	_, err = conn.Exec(t.Context(), `create temp table large as select to_jsonb(repeat('x', 60000)) as note, repeat('1 1 w/x/x' || chr(10), 5000) || '1 1 x' as thresholds, repeat('x', 30000000) as text`)
	require.NoError(t, err)
	for what, sql := range map[string]string{
		"limits":              `metered.charge(array[row('s', null, 1, 0, array(select row(9, '1 h', null, null, null, false)::metered.charge_limit from generate_series(1, 17)), null, null, null, null)]::metered.new_charge[], '1 min', 1000, false)`,
		"a note":              `metered.charge(array[row('s', null, 1, 0, '{}', note, null, null, null)]::metered.new_charge[], '1 min', 1000, false) from large`,
		"a note of a batch":   `metered.charge_each(array(select row('s' || g, null, 1, 0, '{}', note, null, null, null)::metered.new_charge from generate_series(1, 3) g)::metered.new_charge[], null, '1 min', '1 d', '1 d', 1000, false) from large`,
		"thresholds":          `metered.charge(array[row('s', null, 1, 0, array[row(9, '1 h', null, 1, thresholds, true)::metered.charge_limit], null, null, null, null)]::metered.new_charge[], '1 min', 1000, false) from large`,
		"a note of an origin": `metered.credit('s', null, 1, false, 1000, row(null, null, note)::metered.origin, false) from large`,
		"a note of a spend":   `metered.spend(1, 1, 0, 1, 's', note) from large`,
		"the note of an end":  `metered.expire_hold('', 'h', null, now(), 1000, text, null) from large`,
	} {
		_, err := conn.Exec(t.Context(), "select "+sql, pgx.QueryExecModeSimpleProtocol)
		var refused *pgconn.PgError
		require.ErrorAs(t, err, &refused, what)
		require.Contains(t, []string{"22023", "23514"}, refused.Code, "%s: %v", what, err)
	}
	var entries int
	require.NoError(t, owner.QueryRow(t.Context(), "select count(*) from metered.ledger").Scan(&entries))
	require.Zero(t, entries)
}

// A program meets the bounds of Go first, which say more.
func TestBounds_AreThoseOfGo(t *testing.T) {
	t.Parallel()
	for _, same := range []struct {
		function, name string
		unit           schema.Unit
		want           int
	}{
		{"charge", "charges", schema.Items, bounds.MaxScopes}, {"charge", "limits", schema.Items, bounds.MaxLimits}, {"charge", "scope", schema.Bytes, bounds.MaxScopeBytes},
		{"charge_each", "charges", schema.Items, bounds.MaxBatch}, {"charge_each", "events", schema.Items, bounds.MaxBatch}, {"charge", "thresholds", schema.Lines, bounds.MaxThresholds},
		{"usage_of", "scopes", schema.Items, bounds.MaxQueries}, {"usage_before", "times", schema.Items, bounds.MaxBuckets + 1}, {"create_scopes", "scopes", schema.Items, bounds.MaxResources},
		{"search_entries", "look", schema.Value, bounds.MaxSearch}, {"search_entries", "most", schema.Value, bounds.MaxFound},
		{"capture_holds", "ids", schema.Items, bounds.MaxHolds}, {"place", "id", schema.Bytes, bounds.MaxIDBytes}, {"place", "metadata", schema.Bytes, bounds.MaxMetadataBytes},
		{"sweep_holds", "max_holds", schema.Value, bounds.MaxSweepBatch}, {"mint_tokens", "minted", schema.Items, 1000}, {"mint_tokens", "payload", schema.Bytes, 8 << 10},
		{"mint_tokens", "purpose", schema.Bytes, 128}, {"mint_tokens", "subject", schema.Bytes, 512}, {"mint_tokens", "uses", schema.Value, 1_000_000},
	} {
		require.Equal(t, same.want, schema.BoundOf(same.function, same.name, same.unit), "%s: %s", same.function, same.name)
	}
	line := len(fmt.Sprintf("%d %d %s/%s/%s\n", int64(bounds.MaxLimit), -int64(bounds.MaxLimit), "W", strings.Repeat("x", bounds.MaxThresholdNameBytes), strings.Repeat("x", bounds.MaxThresholdNameBytes)))
	require.LessOrEqual(t, line*bounds.MaxThresholds-1, schema.BoundOf("charge", "thresholds", schema.Bytes))
}

func TestBounds_AreThoseOfSecurityMD(t *testing.T) {
	t.Parallel()
	page, err := os.ReadFile("../../SECURITY.md")
	require.NoError(t, err)
	require.Contains(t, string(page), boundsTable())
}

// boundsTable are the bounds as a table of a page.
func boundsTable() string {
	var b strings.Builder
	b.WriteString("| arguments and fields | at most |\n|---|---|\n")
	names := ""
	for i, bound := range schema.Bounds {
		names += " " + bound.Names
		if next := i + 1; next < len(schema.Bounds) && bound.In == "" {
			if n := schema.Bounds[next]; n.In == "" && n.Unit == bound.Unit && n.Max == bound.Max {
				continue // a row has all of them
			}
		}
		in, unit := "", " "+string(bound.Unit)
		if bound.In != "" {
			in = " of " + quotedList(bound.In)
		}
		if bound.Unit == schema.Value {
			unit = ""
		}
		fmt.Fprintf(&b, "| %s%s | %d%s |\n", quotedList(names), in, bound.Max, unit)
		names = ""
	}
	return b.String()
}

func quotedList(names string) string {
	return "`" + strings.Join(strings.Fields(names), "`, `") + "`"
}

// The page lists the functions and the tables of each role.
func TestGrants_AreThoseOfSecurityMD(t *testing.T) {
	t.Parallel()
	page, err := os.ReadFile("../../SECURITY.md")
	require.NoError(t, err)
	require.Contains(t, string(page), grantsTable())
}

// grantsTable are the grants as a table of a page.
func grantsTable() string {
	var b strings.Builder
	b.WriteString("| role | functions | tables and views |\n|---|---|---|\n")
	for _, role := range []struct {
		name string
		set  schema.Role
	}{{"GrantSQL", schema.Application}, {"GrantJobsSQL", schema.Jobs}, {"GrantMaintenanceSQL", schema.Maintenance}, {"GrantReportingSQL", schema.Reporting}} {
		var functions, tables []string
		for _, f := range schema.Functions {
			if f.Roles&role.set != 0 {
				functions = append(functions, f.Name)
			}
		}
		for _, table := range schema.Tables {
			if table.Roles&role.set != 0 {
				tables = append(tables, table.Name)
			}
		}
		fmt.Fprintf(&b, "| `%s` | %s | %s |\n", role.name, strings.Join(functions, ", "), strings.Join(tables, ", "))
	}
	return b.String()
}
