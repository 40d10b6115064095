package integration_test

import (
	"bufio"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/internal/pgtest"
)

// built finds Node and the built example, or skips the test: .ci/run builds it, where npm is.
func built(t *testing.T) (node string) {
	t.Helper()
	node, err := exec.LookPath("node")
	if err != nil {
		t.Skip("node is not there")
	}
	if _, err := os.Stat("../examples/node/dist/service.js"); err != nil {
		t.Skip("examples/node is not built: npm ci && npm run build")
	}
	return node
}

// The contract of the functions v1_* holds for Node's driver.
func TestNode_AnswersAsTheCasesSay(t *testing.T) {
	t.Parallel()
	node := built(t)
	pool := pgtest.Open(t)
	cmd := exec.CommandContext(t.Context(), node, "../examples/node/dist/conformance.js", "../internal/schema/testdata/v1.json")
	cmd.Env = append(os.Environ(), "DATABASE_URL="+pgtest.ConnString(pool))
	said, err := cmd.CombinedOutput()
	require.NoError(t, err, string(said))
	require.Contains(t, string(said), " 0 failed")
}

// The service reserves, settles what the work did cost, and refuses with the code, the status and Retry-After of the library. Its
// role has the grants of an application, and no other.
func TestNode_ServiceReservesSettlesAndRefuses(t *testing.T) {
	t.Parallel()
	node := built(t)
	pool := pgtest.Open(t)
	app := pgtest.AsRole(t, pool, metered.GrantSQL, "")
	cmd := exec.CommandContext(t.Context(), node, "../examples/node/dist/service.js")
	cmd.Env = append(os.Environ(), "DATABASE_URL="+pgtest.ConnString(pool), "PGOPTIONS=-c role="+app.Config().ConnConfig.RuntimeParams["role"], "PORT=0", "RATE=4")
	out, err := cmd.StdoutPipe()
	require.NoError(t, err)
	cmd.Stderr = os.Stderr
	require.NoError(t, cmd.Start())
	t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
	line, err := bufio.NewReader(out).ReadString('\n')
	require.NoError(t, err)
	var port int
	_, err = fmt.Sscanf(line, "listening on %d", &port)
	require.NoError(t, err, line)

	post := func(id, prompt string) (status int, retry string, body map[string]any) {
		req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, fmt.Sprintf("http://127.0.0.1:%d/", port), strings.NewReader(prompt))
		require.NoError(t, err)
		req.Header.Set("X-User", "ann")
		req.Header.Set("Idempotency-Key", id)
		res, err := (&http.Client{Timeout: time.Minute}).Do(req)
		require.NoError(t, err)
		defer res.Body.Close()
		require.NoError(t, json.NewDecoder(res.Body).Decode(&body))
		return res.StatusCode, res.Header.Get("Retry-After"), body
	}
	status, retry, body := post("1", "no credit yet")
	require.Equal(t, []any{402, "", "budget_exceeded"}, []any{status, retry, body["code"]})
	_, err = pool.Exec(t.Context(), "select metered.v1_credit('user/ann', 150)")
	require.NoError(t, err)
	status, _, body = post("2", "three words here")
	require.Equal(t, 200, status, body)
	require.Equal(t, map[string]any{"text": "THREE WORDS HERE", "tokens": 6.0, "left": 144.0}, body)
	status, _, body = post("2", "three words here")
	require.Equal(t, []any{409, "hold_captured"}, []any{status, body["code"]})
	status, _, body = post("3", strings.Repeat("word ", 500))
	require.Equal(t, []any{200, 44.0}, []any{status, body["left"]}, body)
	status, retry, body = post("4", "too many requests")
	require.Equal(t, []any{429, "budget_exceeded"}, []any{status, body["code"]})
	require.NotEmpty(t, retry)
	require.Equal(t, "44", pgtest.Value[string](t, pool, "select metered.v1_balance('user/ann') ->> 'units'"))
}
