package main

import (
	"io"
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// The operations guide names commands and flags that there are.
func TestDocs_NameCommandsThatExist(t *testing.T) {
	t.Parallel()
	guide, err := os.ReadFile("../../docs/operations.md")
	require.NoError(t, err)
	found := 0
	for _, match := range regexp.MustCompile("`metered ([^`]+)`").FindAllStringSubmatch(string(guide), -1) {
		words := strings.Fields(match[1])
		root := (&app{streams: streams{strings.NewReader(""), io.Discard, io.Discard}}).root()
		c, rest, err := root.Find(words)
		require.NoError(t, err, match[1])
		require.NotEqual(t, root, c, match[1])
		for _, word := range rest {
			if name, ok := strings.CutPrefix(word, "--"); ok {
				require.NotNil(t, c.Flag(name), "%s: no flag --%s", match[1], name)
			}
		}
		found++
	}
	require.Greater(t, found, 20)
}
