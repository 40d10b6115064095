package main

import (
	"os"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/examples/internal/exampletest"
)

// The program is built and run as a user would, and prints what the README says.
func TestHello(t *testing.T) {
	t.Parallel()
	program := exampletest.Build(t)
	printed := program.Output()
	readme, err := os.ReadFile("../../README.md")
	require.NoError(t, err)
	for line := range strings.Lines(printed) {
		require.True(t, strings.Contains(string(readme), "    "+line), line)
	}
	require.Equal(t, 3, strings.Count(printed, "\n"))
	require.NotContains(t, program.Output(), "replayed=false code=\"\"", "a second run does nothing")
}
