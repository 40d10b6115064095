package schema

import (
	"fmt"
	"regexp"
	"slices"
	"strings"
)

// A comment in the source is also a COMMENT in the database: that above a table, a view, a type or
// a function that roles may execute, up to its first empty line, and those after columns.

var (
	tableColumn  = regexp.MustCompile(`^    (\w+)\s`)
	viewColumn   = regexp.MustCompile(`(\w+),?\s*(?:--.*)?$`)
	argumentName = regexp.MustCompile(`^(?:inout )?\w+ `)
)

// comments are the COMMENT ON statements of a text of SQL.
func comments(sql string) string {
	var b strings.Builder
	add := func(what, text string) {
		if text != "" {
			fmt.Fprintf(&b, "comment on %s is '%s';\n", what, strings.ReplaceAll(text, "'", "''"))
		}
	}
	for _, s := range statements(sql) {
		kind, known := strings.CutPrefix(s.verb, "create ")
		if !known || s.name == "" {
			continue
		}
		above, body := split(s.text)
		switch kind {
		case "table", "view":
			add(kind+" metered."+s.name, above)
			for _, c := range columns(kind, body) {
				add("column metered."+s.name+"."+c.name, c.text)
			}
		case "type", "domain":
			add(kind+" metered."+s.name, above)
		case "function":
			public := slices.ContainsFunc(Functions, func(f Function) bool { return f.Name == s.name })
			if public {
				add("function metered."+s.name+"("+arguments(body)+")", above)
			}
		}
	}
	return b.String()
}

// split is the first paragraph of the comment above a statement, on one line, and the statement.
func split(text string) (above, body string) {
	var words []string
	var code strings.Builder
	ended := false
	for line := range strings.Lines(text) {
		comment, ok := strings.CutPrefix(line, "--")
		if !ok {
			if strings.TrimSpace(line) == "" && code.Len() == 0 {
				words, ended = nil, false // above the statement's own comment
				continue
			}
			code.WriteString(line)
			continue
		}
		if comment = strings.TrimSpace(comment); comment == "" {
			ended = true
		}
		if !ended && code.Len() == 0 {
			words = append(words, comment)
		}
	}
	return strings.Join(words, " "), code.String()
}

type column struct{ name, text string }

// columns are those of a table or a view that have a comment after them, which may go on in lines
// of its own.
func columns(kind, body string) (all []column) {
	for line := range strings.Lines(body) {
		code, comment, ok := strings.Cut(strings.TrimRight(line, "\n"), "-- ")
		if !ok {
			continue
		}
		if strings.TrimSpace(code) == "" && len(all) > 0 {
			all[len(all)-1].text += " " + strings.TrimSpace(comment)
			continue
		}
		name := tableColumn
		if kind == "view" {
			name = viewColumn
		}
		if m := name.FindStringSubmatch(strings.TrimRight(code, " ")); m != nil {
			all = append(all, column{m[1], strings.TrimSpace(comment)})
		}
	}
	return all
}

// arguments are the types of a function's arguments, as they name it.
func arguments(body string) string {
	_, list, _ := strings.Cut(body, "(")
	depth, end := 1, 0
	var types []string
	take := func(arg string) {
		arg = strings.TrimSpace(strings.Join(strings.Fields(arg), " "))
		if arg == "" || strings.HasPrefix(arg, "out ") {
			return
		}
		arg, _, _ = strings.Cut(arg, " default ")
		types = append(types, argumentName.ReplaceAllString(arg, ""))
	}
	for i, c := range list {
		switch {
		case c == '(':
			depth++
		case c == ')':
			depth--
		}
		if depth == 0 || depth == 1 && c == ',' {
			take(list[end:i])
			end = i + 1
		}
		if depth == 0 {
			break
		}
	}
	return strings.Join(types, ", ")
}
