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
		`order-1, a tea: refused: it costs 12\.00, and there is 0\.00\.`,
		`payment-1 of 80\.00: replayed: true`,
		`order-1, a tea: shipped, 12\.00 debited`,
		`order-2, a tea: refused: there is no address to ship to`,
		`order-4, a tea: 12\.00 debited, replayed: true`,
		`shipped: 6, refused: 14`,
		`order-5, a cup: refused: it costs 4\.00, and 2\.00 of the day's 50\.00 are left; it fits in 2\dh\d+m0s\.`,
		`cancel order-4: done`,
		`cancel order-4: refused: no such order, or it was cancelled before`,
		` +1 .* payment-1 +top-up +80\.00 +80\.00`,
		` +10 .* order-4 +cancelled: tea +12\.00 +44\.00`,
		` +11 .* order-6 +tea +12\.00 +32\.00`,
		`verified 11 entries of 1 scopes: 0 differences`,
		`8 orders of 48\.00, 8 shipments, 48\.00 debited`,
	} {
		require.Regexp(t, regexp.MustCompile(`(?m)^`+line+`$`), printed)
	}
	program.LeavesNoDatabase(`metered\_billing\_%`)
}
