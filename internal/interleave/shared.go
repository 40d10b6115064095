package interleave

import (
	"regexp"
	"strings"
)

// Shared matches statements that read or write tables of a schema, take advisory locks or read its
// clock, themselves or by a function in SQL.
func Shared(script, schema string) *regexp.Regexp {
	table := `\b(?:from|join|into|update|delete from)\s+` + schema + `\.[a-z_]+\b(?:[^(]|$)|\bpg_(?:try_)?advisory_`
	direct := regexp.MustCompile(table)
	names := []string{}
	for _, f := range function.FindAllStringSubmatchIndex(script, -1) {
		body, _, _ := strings.Cut(script[f[1]:], "$$")
		if lang := language.FindStringSubmatch(script[f[0]:f[1]]); lang != nil && lang[1] == "sql" && direct.MatchString(withoutComments(body)) {
			names = append(names, script[f[4]:f[5]])
		}
	}
	if len(names) > 0 {
		table += `|\b` + schema + `\.(?:` + strings.Join(names, "|") + `)\(`
	}
	return regexp.MustCompile(table)
}
