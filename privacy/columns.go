package privacy

import (
	"fmt"
	"strings"
)

// kind says how a column has names in it.
type kind int

const (
	text     kind = iota // one text
	list                 // an array of texts
	json                 // json or jsonb
	jsonList             // an array of json or jsonb
	jsonText             // an array of texts that are JSON
	bytes                // JSON as bytes
	plan                 // a metered.lot_plan
	rowText              // the text of a row
	composed             // a whole row of a table, to be found only
)

// column is a column that may have a name in it.
type column struct {
	name string
	kind kind
	of   string // the type of json and jsonList
}

// table is a table with its columns. scopes are those of the names of scopes, which are
// rewritten together, under the scopes' locks. The rows of an open table are found, and rewritten
// by nobody: they go when what they are about has ended.
type table struct {
	name     string // as it stands in SQL
	scopes   []string
	columns  []column
	appended bool   // its rows never change
	also     string // a condition for further rows of the person: their own have no name
	open     string // what a row of it is, for Report.Open
}

// tables are all tables of the schema that have names.
var tables = []table{
	{name: "metered.ledger", scopes: []string{"scope"}, columns: columns("hold operation_tenant operation", "note crossed"), appended: true},
	{name: "metered.tallies", scopes: []string{"scope"}, columns: columns("operation_tenant operation hold", "note")},
	{name: "metered.refund_sum", scopes: []string{"scope"}},
	{name: "metered.resources", scopes: []string{"scope"}},
	{name: "metered.leases", scopes: []string{"scope", "child"}, columns: columns("owner settled_by", "")},
	{name: "metered.lease_sum", scopes: []string{"scope"}},
	{name: "metered.lease_spends", appended: true, columns: columns("operation_tenant operation", "note"),
		also: "x.lease in (select y.no from metered.leases y where %s)"},
	{name: "metered.holds", scopes: []string{"claim"},
		columns: append(columns("tenant id holder entity", ""), column{"metadata", json, "json"})},
	{name: "metered.hold_lines", scopes: []string{"scope"}, also: "x.hold in (select y.no from metered.holds y where %s)"},
	{name: "metered.hold_events", appended: true, columns: columns("entity operation_tenant operation", "detail note"),
		also: "x.hold in (select y.no from metered.holds y where %s)"},
	{name: "metered.lot_rows", scopes: []string{"scope"}, columns: append(columns("category reference", ""), column{"plan", plan, ""})},
	{name: "metered.lot_moves", scopes: []string{"scope"}},
	{name: "metered.lot_holds", scopes: []string{"scope"}},
	{name: "metered.lot_debts", scopes: []string{"scope"}, columns: columns("use", "")},
	{name: "metered.plan_changes", scopes: []string{"scope"}, columns: columns("reference plan to_plan", "answer")},
	{name: "metered.feed", scopes: []string{"scope"}},
	{name: "metered.feed_scopes", scopes: []string{"scope"}},
	{name: "metered.feed_round", scopes: []string{"scope"}},
	{name: "metered.feed_consumers", columns: columns("consumer", "")},
	{name: "metered.feed_histories", columns: columns("server", "")},
	{name: "metered.notary_scopes", scopes: []string{"scope"}},
	{name: "metered.parked_scopes", scopes: []string{"scope"}, columns: columns("trouble", "")},
	{name: "metered.tokens", columns: append(columns("purpose subject", ""), column{"payload", json, "json"})},
	{name: "metered.job_keys", columns: columns("queue key kind tenant", "")},
	{name: "metered.operations", appended: true, columns: append(columns("tenant id name", ""), column{"result", bytes, ""},
		column{"scopes", list, ""}, column{"holds", jsonText, ""}, column{"refusal", json, "json"})},
	{name: "metered.newest", columns: columns("tenant key id", "")},
	{name: "metered.tenants", columns: columns("tenant", "")},
	{name: "metered.parked_jobs", columns: []column{{"x", composed, ""}},
		open: "'job ' || x.job_id || ' waits for units'"},
	{name: "metered.packed_rows", columns: []column{{"tenant", text, ""}, {"body", rowText, ""}},
		open: "'a row of ' || x.of_table || ' is on its way to another cell'"},
}

// columns are columns of text, and of jsonb.
func columns(texts, jsons string) []column {
	var all []column
	for name := range strings.FieldsSeq(texts) {
		all = append(all, column{name, text, ""})
	}
	for name := range strings.FieldsSeq(jsons) {
		all = append(all, column{name, json, "jsonb"})
	}
	return all
}

// text is the column's text, of a row x.
func (c column) text() string {
	switch c.kind {
	case list, jsonText:
		return fmt.Sprintf("pg_catalog.array_to_string(x.%s, pg_catalog.chr(10))", c.name)
	case bytes:
		return fmt.Sprintf("pg_catalog.convert_from(x.%s, 'UTF8')", c.name)
	case composed:
		return "x::text"
	}
	return fmt.Sprintf("x.%s::text", c.name)
}

// isPlain reports whether names stand in the column as they are.
func (c column) isPlain() bool { return c.kind == text || c.kind == list }

// has is the condition that a column has the name $1, whose patterns are $2 and $3. The search for
// characters is a tenth of the work, and most rows do not have them.
func (c column) has() string {
	if c.isPlain() {
		return fmt.Sprintf(`(pg_catalog.strpos(%[1]s, $1) > 0 and (%[1]s) collate "C" ~ $2)`, c.text())
	}
	return fmt.Sprintf(`((pg_catalog.strpos(%[1]s, $1) > 0 or pg_catalog.strpos(%[1]s, pg_catalog.chr(92)) > 0) and (%[1]s) collate "C" ~ $3)`, c.text())
}

// near is the condition that the characters of the name are in a column, of a longer word too.
func (c column) near() string { return fmt.Sprintf("pg_catalog.strpos(%s, $1) > 0", c.text()) }

// value is what a column has with the alias $4 in place of the name.
func (c column) value() (value string) {
	replaced := func(of, pattern string) string {
		return fmt.Sprintf(`pg_catalog.regexp_replace((%s) collate "C", %s, $4, 'g')`, of, pattern)
	}
	each := func(pattern, cast string) string {
		return fmt.Sprintf(`case when x.%[1]s is not null then array(select %[2]s%[3]s from pg_catalog.unnest(x.%[1]s) with ordinality e(v, nth) order by e.nth) end`,
			c.name, replaced("e.v::text", pattern), cast)
	}
	switch c.kind {
	case text:
		value = replaced("x."+c.name, "$2")
	case list:
		value = each("$2", "")
	case jsonText:
		value = each("$3", "")
	case jsonList:
		value = each("$3", "::"+c.of)
	case json:
		value = replaced(c.text(), "$3") + "::" + c.of
	case bytes:
		value = fmt.Sprintf("pg_catalog.convert_to(%s, 'UTF8')", replaced(c.text(), "$3"))
	case plan:
		value = fmt.Sprintf(`case when x.%[1]s is distinct from null then pg_catalog.jsonb_populate_record(x.%[1]s, pg_catalog.jsonb_build_object(
    'renewal', %[2]s, 'of_reference', %[3]s, 'uses', pg_catalog.to_jsonb(%[4]s))) end`, c.name,
			replaced(fmt.Sprintf("(x.%s).renewal", c.name), "$2"), replaced(fmt.Sprintf("(x.%s).of_reference", c.name), "$2"),
			fmt.Sprintf(`case when (x.%[1]s).uses is not null then array(select %[2]s from pg_catalog.unnest((x.%[1]s).uses) with ordinality e(v, nth) order by e.nth) end`,
				c.name, replaced("e.v", "$2")))
	}
	return value
}

// isStable reports whether functions of has and value depend on settings, for Postgres. Citus
// refuses those in an UPDATE, but for the rows that it is given.
func (c column) isStable() bool { return c.kind != text && c.kind != json }

// all are the table's columns, with those of scopes.
func (t table) all() []column {
	found := make([]column, 0, len(t.scopes)+len(t.columns))
	for _, name := range t.scopes {
		found = append(found, column{name, text, ""})
	}
	return append(found, t.columns...)
}

// any is a condition of which one column is enough.
func anyOf(columns []column, has func(column) string) string {
	conditions := make([]string, len(columns))
	for i, c := range columns {
		conditions[i] = has(c)
	}
	return strings.Join(conditions, "\n    or ")
}
