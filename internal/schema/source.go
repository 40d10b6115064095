package schema

import (
	"embed"
	"strings"
)

//go:embed sql/*.sql
var files embed.FS

// sources are the files of the schema in the order in which they are run: a function in SQL
// follows those that it calls.
var sources = []string{
	"begin", "types", "tables", "locks", "ledger", "limits", "charges", "expiry", "holds", "transitions", "tokens", "jobs", "operations", "end",
}

// Source is the whole schema as one text, under its default name.
func Source() string {
	var b strings.Builder
	for i, name := range sources {
		text, err := files.ReadFile("sql/" + name + ".sql")
		if err != nil {
			panic(err) // it is embedded
		}
		if i > 0 {
			b.WriteByte('\n')
		}
		b.Write(text)
	}
	return withAttributes(b.String())
}
