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
