package schema

import (
	"fmt"
	"strings"
)

// Tools are the migration tools whose files can be rendered.
var Tools = map[string]func(sql string) string{
	"":               asItIs,
	"goose":          forGoose,
	"golang-migrate": asItIs,                                                                       // it sends a file as one query
	"tern":           func(sql string) string { return strings.ReplaceAll(sql, "{{", `{{"{{"}}`) }, // its files are templates
	"atlas":          asItIs,                                                                       // it knows dollar quotes
}

func asItIs(sql string) string { return sql }

// forGoose keeps goose, which takes each line that ends with a semicolon for the end of a
// statement, from cutting functions into pieces.
func forGoose(sql string) string {
	var b strings.Builder
	b.WriteString("-- +goose Up\n")
	for _, s := range statements(sql) {
		format := "\n%s"
		if strings.Contains(s.text, "$$") {
			format = "\n-- +goose StatementBegin\n%s-- +goose StatementEnd\n"
		}
		fmt.Fprintf(&b, format, s.text)
	}
	return b.String()
}

// Script makes SQL mean the same under any search_path of its session: somebody may have created
// functions, operators and types there. It restores the search_path at its end, for later
// statements. It sets the path for the whole session: a tool may run each statement in a
// transaction of its own.
func Script(sql string) string { return fixPathSQL + sql + putPathBackSQL }

const fixPathSQL = `-- Names are those of pg_catalog, whatever is on the search_path. It is put back at the end.
do $$
begin
    perform pg_catalog.set_config('metered_script.search_path', pg_catalog.current_setting('search_path'), false);
    perform pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', false);
end
$$;

`

const putPathBackSQL = `
do $$
begin
    perform pg_catalog.set_config('search_path', pg_catalog.current_setting('metered_script.search_path'), false);
end
$$;
`
