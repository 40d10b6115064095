package main

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/examples/internal/exampletest"
)

// The program is built and run as a user would.
func TestRatelimit(t *testing.T) {
	t.Parallel()
	program := exampletest.Build(t)
	program.Prints(
		`RateLimit: "hourly";r=9;t=3600, "daily";r=29;t=86400`,
		`RateLimit: "hourly";r=8;t=3600, "daily";r=28;t=86400`,
		"admitted: 8, refused: 22",
		"admitted: 15, refused: 25",
		`"violated-policies":["all-hourly"]`,
		" 0 differences",
	)

	program.Serve("curl -i ", "/redeem", func(base string) {
		a, err := ask(t.Context(), base, "192.0.2.1", "SUMMER", "")
		require.NoError(t, err)
		require.Equal(t, `{"cents":1000}`, a.body)
	})
	program.LeavesNoDatabase(`metered\_ratelimit\_%`)
}
