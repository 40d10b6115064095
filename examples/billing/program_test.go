package main

import (
	"regexp"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/examples/internal/exampletest"
)

// The program is built and run as a user would.
func TestBilling(t *testing.T) {
	t.Parallel()
	program := exampletest.Build(t)
	printed := program.Output()
	for _, line := range []string{
		`payment-1: granted before: true`,
		`balance 1800: plan 1000, promotional 300, paid 500`,
		`rendered: 40, refused: 0`,
		`alerts: 1, at 1600`,
		`one more: 0 of month are left until \d{4}-\d\d-\d\d`,
		`balance -200: plan 0, promotional 0, paid 0`,
		`given back: 30`,
		`taken back: 0, spent before: 500`,
		`opening 0 \+ granted 1800 - used 2000 \+ refunded 50 - revoked 0 = closing -150`,
		`of the plan 1000, promotional 300, paid 500, overdrawn 200`,
		`verified 45 entries: \[\]; ann: 2000 rendered, 0 on invoices, 2000 since`,
	} {
		require.Regexp(t, regexp.MustCompile(`(?m)^`+line+`$`), printed)
	}
	program.LeavesNoDatabase(`metered\_billing\_%`)
}
