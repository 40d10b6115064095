package main

import (
	"encoding/json"
	"net/http"
	"os"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/examples/internal/exampletest"
)

// The program is built and run as a user would.
func TestGateway(t *testing.T) {
	t.Parallel()
	readme, err := os.ReadFile("README.md")
	require.NoError(t, err)
	program := exampletest.Build(t)
	program.Serve("curl -i ", "/v1/credit", func(base string) {
		f := &fixture{t: t, bases: []string{base}}
		var cost struct {
			Cost int64 `json:"cost_microdollars"`
		}
		for _, step := range []struct{ method, path, secret, body string }{ // as README.md and the program have them
			{http.MethodPost, "/v1/credit", "admin-of-acme", `{"id": "payment-1", "amount": 5000000}`},
			{http.MethodPost, "/v1/chat/completions", "key-of-ann", `{"model": "small", "messages": [{"role": "user", "content": "How is a stream metered?"}]}`},
			{http.MethodGet, "/v1/usage", "key-of-ann", ""},
		} {
			require.Contains(t, string(readme), step.path)
			require.Contains(t, string(readme), step.body)
			status, text := f.do(t.Context(), step.method, step.path, step.secret, "", step.body)
			require.Equal(t, http.StatusOK, status, text)
			if events := strings.Split(text, "data: "); len(events) > 2 {
				require.NoError(t, json.Unmarshal([]byte(events[len(events)-2]), &cost))
			}
		}
		require.NotZero(t, cost.Cost)
	})
	program.LeavesNoDatabase(`metered\_gateway\_%`)
}
