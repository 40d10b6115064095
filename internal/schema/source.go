package schema

import (
	"regexp"
	"strings"
)

// sources are the files of the schema in the order in which they are run: a function in SQL
// follows those that it calls.
var sources = []string{
	"begin",
	"types",
	"tables",
	"recordtables",
	"jobtables",
	"locks",
	"cells",
	"numbers",
	"ledger",
	"tallies",
	"purge",
	"lots",
	"debts",
	"duelots",
	"repaid",
	"advance",
	"foreseen",
	"idle",
	"settle",
	"lapses",
	"lotmoves",
	"lotends",
	"grants",
	"wallets",
	"reinstate",
	"changes",
	"uses",
	"periods",
	"limits",
	"thresholds",
	"charges",
	"checks",
	"upto",
	"series",
	"leases",
	"carve",
	"resources",
	"due",
	"expiry",
	"minima",
	"sweeps",
	"walletsweeps",
	"holdjson",
	"holds",
	"transitions",
	"returns",
	"tokens",
	"jobs",
	"parked",
	"parking",
	"turns",
	"releases",
	"lines",
	"dropped",
	"newest",
	"notary",
	"operations",
	"plain",
	"plaintotals",
	"sessions",
	"plainholds",
	"batches",
	"feed",
	"reporting",
	"v1",
	"v1holds",
}

// statement is one of a release's, with the comment above it.
type statement struct {
	// verb is its beginning: one of verbs.
	verb string
	// name is that of the function, type or view that it creates.
	name string
	text string
}

// verbs are the beginnings of all statements. An upgrade repeats those from "create function" on,
// and creates new types. The rest is for migrations.
var verbs = regexp.MustCompile(`\A(do |insert into|(?:create|alter) (?:table|(?:unique )?index|sequence)|` +
	`create (?:type|domain)|create function|create trigger|create view|comment on)(?: ?metered\.([a-z_0-9]+))?`)

// dollarTag opens a quoted text, and the same one ends it.
var dollarTag = regexp.MustCompile(`\$[a-z_]*\$`)

// quotes are the tags of a line that open or end a quoted text. Most lines have none.
func quotes(line string) []string {
	if !strings.Contains(line, "$") {
		return nil
	}
	return dollarTag.FindAllString(line, -1)
}

// statements splits a text of SQL. A statement ends with its line, outside of dollar quotes.
func statements(sql string) []statement {
	var all []statement
	var text strings.Builder
	tag, head := "", "" // of the quoted text, and the statement's first line
	for line := range strings.Lines(sql) {
		text.WriteString(line)
		code, _, _ := strings.Cut(line, "--")
		if head == "" && verbs.MatchString(code) {
			head = code
		}
		for _, t := range quotes(line) {
			if tag == "" {
				tag = t
			} else if tag == t {
				tag = ""
			}
		}
		if tag != "" || !strings.HasSuffix(strings.TrimSpace(code), ";") {
			continue
		}
		s := statement{text: strings.TrimLeft(text.String(), "\n")}
		if m := verbs.FindStringSubmatch(head); m != nil {
			s.verb, s.name = strings.TrimSpace(m[1]), m[2]
		}
		all = append(all, s)
		text.Reset()
		head = ""
	}
	return all
}

// Statements splits a text of this package's SQL into its statements.
func Statements(sql string) []string {
	var texts []string
	rest := sql
	for _, s := range statements(sql) {
		texts = append(texts, s.text)
		_, rest, _ = strings.Cut(rest, s.text)
	}
	if rest = strings.TrimSpace(rest); rest != "" { // a last one without a semicolon, or a comment
		texts = append(texts, rest)
	}
	return texts
}
