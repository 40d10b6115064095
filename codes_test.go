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

func TestCode_CommentListsEveryCode(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile("errors.go")
	require.NoError(t, err)
	_, list, ok := strings.Cut(string(text), "// Code returns the stable code")
	require.True(t, ok)
	list, _, _ = strings.Cut(list, "func Code(")
	sentinel := regexp.MustCompile(`(?:fault\.|= )New\("([a-z_]+)"`)
	seen := 0
	require.NoError(t, filepath.WalkDir(".", func(path string, _ fs.DirEntry, err error) error {
		if err != nil || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") {
			return err
		}
		source, err := os.ReadFile(path)
		for _, code := range sentinel.FindAllStringSubmatch(string(source), -1) {
			seen++
			require.Regexp(t, `\b`+code[1]+`\b`, list, path)
		}
		return err
	}))
	require.Greater(t, seen, 30)
}
