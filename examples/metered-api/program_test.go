package main

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/examples/internal/exampletest"
)

// The program is built and run as a user would.
func TestMeteredAPI(t *testing.T) {
	t.Parallel()
	program := exampletest.Build(t)
	program.Prints(
		`"state":"done","factors":[71,839,1471,6857],"units_held":0,"units_charged":1}`,
		`"state":"done","factors":[1000000000039],"units_held":0,"units_charged":500}`,
		`"state":"failed","units_held":0,"units_charged":0}`,
		`"violated-policies":["hourly"]`,
		"charged: 501, held: 0; verified",
		": 0 differences",
	)
	require.Error(t, program.Command("-worker").Run())

	program.Serve("curl -i ", "/tasks", func(base string) {
		ann := client{base, "key-of-ann"}
		done, err := ann.await(t.Context(), ann.submit(t.Context(), "", 91).ID)
		require.NoError(t, err)
		require.Equal(t, []int64{7, 13}, done.Factors)
	})
	program.LeavesNoDatabase(`metered\_api\_%`)
}
