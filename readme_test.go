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

func TestReadme_ExamplesAreThoseThatRun(t *testing.T) {
	t.Parallel()
	blocks := goBlocks(t)
	for i, file := range []string{"example_test.go", "holds/example_test.go"} {
		example, err := os.ReadFile(file)
		require.NoError(t, err)
		require.Contains(t, unindented(string(example)), unindented(blocks[i]))
	}
	require.Len(t, blocks, 2)
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

// goBlocks are the blocks of Go in the README.
func goBlocks(t *testing.T) (blocks []string) {
	t.Helper()
	readme, err := os.ReadFile("README.md")
	require.NoError(t, err)
	for _, part := range strings.Split(string(readme), "```go\n")[1:] {
		block, _, ok := strings.Cut(part, "```")
		require.True(t, ok)
		blocks = append(blocks, block)
	}
	return blocks
}

func unindented(text string) string {
	lines := strings.Split(text, "\n")
	for i, line := range lines {
		lines[i] = strings.TrimSpace(line)
	}
	return strings.Join(lines, "\n")
}
