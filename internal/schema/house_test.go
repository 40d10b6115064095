package schema_test

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// functionLines is how many lines a function of the SQL may have.
const functionLines = 120

var (
	sqlFunction = regexp.MustCompile(`(?ms)^create function metered\.(\w+)\(.*?\$\$.*?\$\$;`)
	// letter is a declared variable or an argument whose name is one letter.
	letter = regexp.MustCompile(`(?m)^ +[a-z] +[a-z]|[(,]\s*(?:in |out |inout )?[a-z] [a-z]+[. \[(),]`)
)

// A function is read by subject, and its variables say what they are. Functions of 0.1.0 keep the
// names of their arguments, which its Validate compares.
func TestSQL_FunctionsAreShortAndTheirVariablesHaveNames(t *testing.T) {
	t.Parallel()
	files, err := filepath.Glob("sql/*.sql")
	require.NoError(t, err)
	first, err := os.ReadFile("versions/0001.txt")
	require.NoError(t, err)
	read := 0
	for _, file := range files {
		raw, err := os.ReadFile(file)
		require.NoError(t, err)
		for _, m := range sqlFunction.FindAllStringSubmatch(string(raw), -1) {
			read++
			require.LessOrEqual(t, strings.Count(m[0], "\n")+1, functionLines, "%s: %s", file, m[1])
			head, body, _ := strings.Cut(m[0], "$$")
			declared := ""
			if d := strings.Index(body, "\ndeclare\n"); d >= 0 {
				declared, _, _ = strings.Cut(body[d:], "\nbegin\n")
			}
			if !strings.Contains(string(first), "\nfunction "+m[1]+"(") {
				require.NotRegexp(t, letter, head, "%s: %s", file, m[1])
			}
			require.NotRegexp(t, letter, declared, "%s: %s", file, m[1])
		}
	}
	require.Greater(t, read, 400)
}
