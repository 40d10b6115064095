package guardtx

import (
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// A plain oracle: one expression blanks quotes and comments, and the oracle reads the statements between semicolons.
// It knows no nested comments, tags, continued or backslash literals: the test leaves out texts with those.
var (
	blanked = regexp.MustCompile(`(?s)'[^']*'|"[^"]*"|--[^\r\n]*|/\*.*?\*/|\$\$.*?\$\$`)
	control = regexp.MustCompile(`^(?:begin|start|commit|end|abort|prepare\s+transaction|close\s+all|close\s+metered_(?:command|write))(?:[^a-z0-9_$\x80-\xff]|$)`)
	back    = regexp.MustCompile(`^rollback(?:[^a-z0-9_$\x80-\xff]|$)`)
	to      = regexp.MustCompile(`^rollback\s+(?:[a-z_\x80-\xff][a-z0-9_$\x80-\xff]*\s+)?to(?:[^a-z0-9_$\x80-\xff]|$)`)
	beyond  = regexp.MustCompile(`(?i)\\|/\*[^*]*/\*|\*/|e'|u&|\$[^$]|[0-9a-z_\x80-\xff]\$|''|["']\s*["']|[^\x00-\x7f]|\$$`)
)

func oracle(sql string) bool {
	sql = blanked.ReplaceAllStringFunc(sql, func(s string) string {
		if strings.HasPrefix(s, "--") || strings.HasPrefix(s, "/*") {
			return " "
		}
		return " ' "
	})
	for _, s := range strings.Split(sql, ";") {
		s = strings.ToLower(strings.TrimLeft(s, " \t\n\v\f\r"))
		if control.MatchString(s) || back.MatchString(s) && !to.MatchString(s) {
			return true
		}
	}
	return false
}

func FuzzControlsTransaction(f *testing.F) {
	for _, sql := range []string{
		"", "commit", "select 1; rollback", "rollback to x", "rollback work to x", "/* x */ end", "select $$;$$; abort", "-- x\rbegin",
		"select ';'; start transaction", `select ";"`, "select $x$ ; $x$", `select E'\''; commit`, "/* /* */ */ commit", "prepare transaction 'x'",
		"select 1$$;$$", "select $1$a$", "close all", "'", `"`, "$", "$$", "/*", "--", "E'", `E'\`, "\x00", "é$é$",
		"(commit", "'x' commit", "1 commit",
	} {
		f.Add(sql, false)
		f.Add(sql, true)
	}
	f.Fuzz(func(t *testing.T, sql string, backslashes bool) {
		got := controlsTransaction(sql, backslashes)
		// The first statement is enough to refuse a text.
		require.True(t, controlsTransaction("commit;"+sql, backslashes))
		require.Equal(t, got, controlsTransaction("; select 1;"+sql, backslashes))
		if !strings.Contains(sql, `\`) {
			require.Equal(t, got, controlsTransaction(sql, !backslashes))
		}
		if beyond.MatchString(sql) || strings.Count(sql, "/*") != strings.Count(sql, "*/") || strings.ContainsAny(sql, "'\"$*") && unbalanced(sql) {
			return
		}
		require.Equal(t, oracle(sql), got, "%q", sql)
	})
}

// unbalanced reports whether a quote is left open, where the oracle is too plain.
func unbalanced(sql string) bool {
	rest := blanked.ReplaceAllString(sql, " ")
	return strings.ContainsAny(rest, `'"$`) || strings.Contains(rest, "/*")
}
