package metered_test

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestReadme_ExampleIsTheOneThatRuns(t *testing.T) {
	t.Parallel()
	example, err := os.ReadFile("example_test.go")
	require.NoError(t, err)
	require.Contains(t, unindented(string(example)), unindented(goBlock(t)))
}

func TestReadme_NamesTestsThatExist(t *testing.T) {
	t.Parallel()
	readme, err := os.ReadFile("README.md")
	require.NoError(t, err)
	var all strings.Builder
	require.NoError(t, filepath.WalkDir(".", func(path string, _ fs.DirEntry, err error) error {
		if err == nil && strings.HasSuffix(path, "_test.go") {
			text, err := os.ReadFile(path)
			all.Write(text)
			return err
		}
		return err
	}))
	names := regexp.MustCompile("`(Test[A-Za-z_]+)`").FindAllStringSubmatch(string(readme), -1)
	require.NotEmpty(t, names)
	for _, name := range names {
		if !strings.Contains(all.String(), "func "+name[1]+"(t *testing.T)") {
			t.Errorf("README.md names %s, which is not there", name[1])
		}
	}
}

// goBlock is the first block of Go in the README.
func goBlock(t *testing.T) string {
	t.Helper()
	readme, err := os.ReadFile("README.md")
	require.NoError(t, err)
	_, rest, ok := strings.Cut(string(readme), "```go\n")
	require.True(t, ok)
	block, _, ok := strings.Cut(rest, "```")
	require.True(t, ok)
	return block
}

func unindented(text string) string {
	lines := strings.Split(text, "\n")
	for i, line := range lines {
		lines[i] = strings.TrimSpace(line)
	}
	return strings.Join(lines, "\n")
}
