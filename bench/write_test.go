package main

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// What pages quote of the table is in the table, and what they quote of contenders names a figure.
func TestPages_QuoteTheTable(t *testing.T) {
	t.Parallel()
	table := map[string]string{}
	of, err := os.ReadFile(pages[0])
	require.NoError(t, err)
	for _, m := range row.FindAllStringSubmatch(string(of), -1) {
		table[m[1]] = strings.Trim(m[2], "*")
	}
	for _, page := range pages {
		text, err := os.ReadFile(page)
		require.NoError(t, err)
		all := quoted.FindAllStringSubmatch(string(text), -1)
		require.NotEmpty(t, all, page)
		require.Equal(t, strings.Count(string(text), "<!--"), len(all)+strings.Count(string(text), "<!--run-->")+strings.Count(string(text), "<!--end-->"), page)
		for _, m := range all {
			require.True(t, slices.ContainsFunc(figures, func(f figure) bool { return f.name == m[2] }), "%s: %s", page, m[2])
			if m[3] == "" {
				require.Equal(t, quote(m[1], table[m[2]]), m[5], "%s: %s", page, m[0])
			}
		}
	}
}

func TestWrite_PutsARunIntoThePages(t *testing.T) {
	dir := t.TempDir()
	t.Chdir(dir)
	of := pages
	pages = []string{"README.md", "other.md"}
	defer func() { pages = of }()
	require.NoError(t, os.WriteFile("README.md", []byte("<!--run-->then<!--end-->\n| a_b | 1 | 1 … 2 | >= 3 |\n| c_d | 7 |  | none |\n"), 0o600))
	require.NoError(t, os.WriteFile("other.md", []byte("<!--a_b-->1, <!--1/a_b-->1.0 times, <!--a_b:each_8*8-->1 a second, <!--a_b:each_8:cpu-->3, <!--c_d-->7 stays"), 0o600))
	a := result{figure{name: "a_b", goal: atLeast(3)}, samples{values: []float64{0.5, 0.4, 0.6}, where: []profile{{contender: "each 8", rate: 1234.5, backendMicros: 247.3}}}}
	require.NoError(t, write([]result{a, {figure: figure{name: "c_d"}}}, "now"))
	text, err := os.ReadFile(filepath.Join(dir, "README.md"))
	require.NoError(t, err)
	require.Equal(t, "<!--run-->now<!--end-->\n| a_b | **0.5** | 0.45 … 0.55 | >= 3 |\n| c_d | 7 |  | none |\n", string(text))
	text, err = os.ReadFile(filepath.Join(dir, "other.md"))
	require.NoError(t, err)
	require.Equal(t, "<!--a_b-->0.5, <!--1/a_b-->2.0 times, <!--a_b:each_8*8-->9,880 a second, <!--a_b:each_8:cpu-->250, <!--c_d-->7 stays", string(text))
}
