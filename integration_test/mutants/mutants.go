// Package mutants breaks the library on purpose, one place at a time, and runs the test that must
// notice.
package mutants

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/pgmetered/metered/internal/pgtest"
)

// root is the directory of the library's module.
const root = "../.."

// A Mutant is one deliberate breakage.
type Mutant struct {
	Name string // the guarantee that is gone
	// In is the function of schema.sql, or the path of the Go file, in which New takes the place of
	// Old. Old is there once, whatever white space it is written with (pgtest.Replace). Without In, New is a statement that breaks a table.
	In, Old, New string
	Pkg, Test    string // the test that fails then, such as "./budget" and "TestCharge_X" or "TestCharge_X/sub test"
}

// ofGo reports whether the breakage is in Go, and not in the schema.
func (m Mutant) ofGo() bool { return strings.HasSuffix(m.In, ".go") }

// apply returns the text of the place with the breakage.
func (m Mutant) apply(schema string) (string, error) {
	if m.In == "" {
		return m.New, nil
	}
	text := ""
	if m.ofGo() {
		raw, err := os.ReadFile(filepath.Join(root, m.In))
		if err != nil {
			return "", err
		}
		text = string(raw)
	} else if text = definitions(schema, m.In); text == "" {
		return "", fmt.Errorf("%s: schema.sql has no function %s", m.Name, m.In)
	}
	text, n := pgtest.Replace(text, m.Old, m.New)
	if n != 1 {
		return "", fmt.Errorf("%s: %s has this text %d times: %s", m.Name, m.In, n, m.Old)
	}
	if bypassed[m.In] {
		text += theFullWay
	}
	return text, nil
}

// bypassed are the functions that the short way of plain calls (plain.sql) does without. Their
// mutants are run by the full way.
var bypassed = map[string]bool{
	"_write_charges": true, "begin_command": true, "complete_command": true, "consume_token": true, "claim_job_key": true,
}

const theFullWay = "create or replace function metered._goes_short() returns boolean language sql immutable as 'select false';\n"

// definitions returns the statements that make the functions of a name.
func definitions(schema, name string) string {
	var out strings.Builder
	for {
		_, rest, found := strings.Cut(schema, "\ncreate function metered."+name+"(")
		if !found {
			return out.String()
		}
		var definition string
		definition, schema, _ = strings.Cut(rest, "\n$$;\n")
		out.WriteString("create or replace function metered." + name + "(" + definition + "\n$$;\n")
	}
}
