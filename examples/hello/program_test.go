package main

import (
	"os"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/examples/internal/exampletest"
)

func TestMain(m *testing.M) { exampletest.Main(m, main) }

// The program, built and run as by a user, prints the README's output.
func TestHello(t *testing.T) {
	t.Parallel()
	program := exampletest.New(t)
	printed := program.Output()
	readme, err := os.ReadFile("../../README.md")
	require.NoError(t, err)
	for line := range strings.Lines(printed) {
		require.True(t, strings.Contains(string(readme), "    "+line), line)
	}
	require.Equal(t, 3, strings.Count(printed, "\n"))
	require.NotContains(t, program.Output(), "replayed=false code=\"\"", "a second run does nothing")
}
