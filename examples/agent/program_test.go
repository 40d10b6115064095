package main

import (
	"testing"

	"github.com/pgmetered/metered/examples/internal/exampletest"
)

// The program is built and run as a user would.
func TestAgent(t *testing.T) {
	t.Parallel()
	program := exampletest.Build(t)
	program.Prints(
		`agent-1: 25 calls made, 15 refused`,
		`agent-2 used 50 of 250`,
		`summary: replayed: true`,
		`run 43: refused, 400 of the month are free`,
		`ann: 320 used this month, 680 left`,
		`ann: 335 used this month, 665 left`,
		`entries: 0 differences`,
	)
	program.LeavesNoDatabase(`metered\_agent\_%`)
}
