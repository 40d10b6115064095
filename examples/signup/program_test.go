package main

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/examples/internal/exampletest"
)

// The program is built and run as a user would.
func TestSignup(t *testing.T) {
	t.Parallel()
	program := exampletest.Build(t)
	program.Prints(
		`409 {"title":"Conflict","status":409,"detail":"somebody is signing up with this address","code":"claim_taken","retry_after_seconds":`,
		`404 {"title":"Not Found","status":404,"detail":"no such claim","code":"hold_unknown"}`,
		`201 {"id":1,"email":"ann@example.com","name":"Ann"}`,
		`409 {"title":"Conflict","status":409,"detail":"there is an account with this address","code":"claim_taken"}`,
		`409 {"title":"Conflict","status":409,"detail":"the claim has ended: claim the address again","code":"hold_`,
		"status and how many: map[201:1 409:19]",
	)

	program.Serve("-b jar ", "/claims", func(base string) {
		a := newBrowser(base).do(t.Context(), "POST", "/claims", email("ann@example.com"))
		require.Equal(t, 201, a.Status)
		require.Contains(t, a.Body, `"expires_in_seconds":900`)
	})
	program.LeavesNoDatabase(`metered\_signup\_%`)
}
