package schema

import (
	"fmt"
	"strings"
)

// Tools are the migration tools whose files can be rendered.
var Tools = map[string]func(sql string) string{
	"":               func(sql string) string { return sql },
	"goose":          forGoose,
	"golang-migrate": func(sql string) string { return sql },
	"tern":           func(sql string) string { return strings.ReplaceAll(sql, "{{", `{{"{{"}}`) }, // its files are templates
	"atlas":          forAtlas,
}

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

// forAtlas ends each statement with a line of its own.
func forAtlas(sql string) string {
	const end = "-- end of statement"
	var b strings.Builder
	b.WriteString("-- atlas:delimiter " + end + "\n")
	for _, s := range statements(sql) {
		b.WriteString("\n" + s.text + end + "\n")
	}
	return b.String()
}
