package main

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/examples/internal/exampletest"
)

func TestMain(m *testing.M) { exampletest.Main(m, main) }

// The program is run as a user would. with files of the repository, and with others.
func TestQuickstart(t *testing.T) {
	t.Parallel()
	program := exampletest.New(t)
	dir := t.TempDir()
	files := []string{filepath.Join(dir, "page.html"), filepath.Join(dir, "ä picture?.png"), filepath.Join(dir, "empty")}
	for i, content := range []string{"<!DOCTYPE html><p>hello", "\x89PNG\r\n\x1a\n" + strings.Repeat("x", 100_000), ""} {
		require.NoError(t, os.WriteFile(files[i], []byte(content), 0o600))
	}
	for i, out := range []string{program.Output(), program.Output(files...)} {
		require.NotContains(t, out, "FAILED")
		for _, line := range append([][]string{{`schema\.sql stored, status: 201`}, {
			`page\.html stored, status: 201`, `ä picture\?\.png stored, status: 201`, `empty stored, status: 201`,
		}}[i],
			`rows with the digest that the worker found: [34]`,
			`same operation, status: 200`,
			`its answer is the first one: \{"row":1,`,
			`same operation with another file, status: 422`,
			`same token for another operation, status: 403`,
			`the reason, for the server alone: used`,
			`1000 are left, and the next upload has one more`,
			`"detail":"the account's plan has no room for it now","code":"budget_exceeded","retry_after_seconds":3\d\d\d`,
			`uses left of its token: 1`,
			`answers with status 201: 10`,
			`answers with status 429: 54`,
			`tokens still unspent: 54`,
			`its server process: .*57P01`,
			`Do found out by itself: replayed: true`,
			`runs of the command's function: 1`,
			`differences: 0`,
			`all \d+ checks held`,
		) {
			require.Regexp(t, regexp.MustCompile(`(?m)`+line), out)
		}
	}
	require.Error(t, program.Command("/no/such/file").Run())
}
