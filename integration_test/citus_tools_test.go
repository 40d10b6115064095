package integration_test

import (
	"bytes"
	"context"
	"html"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os/exec"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/console"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/jobs"
	"github.com/pgmetered/metered/wallet"
)

// shown makes a bit of everything that the command line and the console show, in scopes with the prefix "seen ". The hold's id is "seen".
func (c *citus) shown() {
	t, client := c.t, pgtest.NewClient(c.t, c.owner, metered.Config{})
	book, err := wallet.New(client.Budget, wallet.Config{})
	require.NoError(t, err)
	require.NoError(t, pgx.BeginFunc(t.Context(), c.owner, func(tx pgx.Tx) error {
		_, err := book.Grant(t.Context(), tx, wallet.Grant{Reference: "seen", Wallet: "seen wallet", Amount: 10})
		return err
	}))
	for _, id := range []string{"seen", "seen more"} {
		_, err = metered.Do(t.Context(), client, metered.Command{
			ID: id, Name: "see", Input: 1, Charges: []budget.Charge{{Scope: "seen units", Amount: 3, Limits: hourly}},
			Holds: []holds.Placement{{ID: id, TTL: time.Hour, Lines: []holds.Line{{Scope: "seen seats", Amount: 1}}}},
		}, func(ctx context.Context, tx *metered.Tx) (any, error) {
			_, err := tx.Enqueue(ctx, process{id}, &jobs.Options{Key: id, Hold: &jobs.Units{
				Lines: []holds.Line{{Scope: "seen slots", Amount: 1, Limits: []budget.Limit{budget.Lifetime(1)}}}}})
			return nil, err
		})
		require.NoError(t, err)
	}
}

// Each command of the program works through each node, and shows the data.
func TestCitus_CommandLineThroughEachNode(t *testing.T) {
	t.Parallel()
	c := onCitus(t, citusCluster).migrated()
	c.shown()
	binary := program(t)
	for _, node := range citusNodes {
		for line, text := range map[string]string{
			"migrate status":                         "2",
			"migrate validate":                       "",
			"verify":                                 "",
			"entries|seen units":                     "3",
			"explain|seen units|995|--limit|1000/1h": "",
			"usage|seen units|--window|1h":           "6",
			"series|seen units":                      "6",
			"statement|seen units":                   "3",
			"wallet|seen wallet":                     "10",
			"lots|seen wallet":                       "seen",
			"operation|seen":                         "see",
			"hold|seen":                              "seen seats",
			"holds":                                  "seen",
			"jobs":                                   "seen slots",
			"jobs|seen slots":                        "process",
			"top --count 1 --within 24h":             "seen units",
			"sweep":                                  "",
			"repair-clock":                           "",
			"purge --older-than 400d --dry-run":      "",
			"maintain --entries 400d --operations 400d --job-keys 400d": "",
		} {
			words := strings.Split(line, "|")
			if len(words) == 1 {
				words = strings.Fields(line)
			}
			cmd := exec.CommandContext(t.Context(), binary, append(words, "--database-url", c.nodes[node].Config().ConnString())...)
			out, err := cmd.CombinedOutput()
			exit := 0
			if err != nil {
				exit = cmd.ProcessState.ExitCode()
			}
			if words[0] == "explain" { // it does not fit
				require.NotContains(t, string(out), "SQLSTATE", "%s: %s", node, line)
				require.Contains(t, string(out), "seen units", "%s: %s", node, line)
				continue
			}
			require.Zero(t, exit, "%s: %s: %s", node, line, out)
			require.Contains(t, string(out), text, "%s: %s", node, line)
		}
	}
}

var links = regexp.MustCompile(`(?:href|src)="([^"]+)"`)

// Each page of the console is served through each node.
func TestCitus_ConsoleThroughEachNode(t *testing.T) {
	t.Parallel()
	c := onCitus(t, citusCluster).migrated()
	c.shown()
	for _, node := range citusNodes {
		var logged bytes.Buffer
		page, err := console.New(c.nodes[node], console.Config{Timeout: time.Minute, Logger: slog.New(slog.NewTextHandler(&logged, nil))})
		require.NoError(t, err)
		server := httptest.NewServer(page)
		defer server.Close()
		base, err := url.Parse(server.URL + "/")
		require.NoError(t, err)
		queue, seen, text := []string{base.String()}, map[string]bool{}, ""
		for len(queue) > 0 && len(seen) < 100 {
			address := queue[0]
			queue = queue[1:]
			if seen[address] {
				continue
			}
			seen[address] = true
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			request, err := http.NewRequestWithContext(ctx, http.MethodGet, address, nil)
			require.NoError(t, err)
			response, err := pgtest.HTTP.Do(request)
			require.NoError(t, err)
			require.Equal(t, http.StatusOK, response.StatusCode, "%s: %s: %s", node, address, &logged)
			if strings.HasPrefix(response.Header.Get("Content-Type"), "text/html") {
				body, err := io.ReadAll(response.Body)
				require.NoError(t, err)
				text += string(body)
				for _, m := range links.FindAllStringSubmatch(string(body), -1) {
					to, err := base.Parse(html.UnescapeString(m[1]))
					require.NoError(t, err)
					to.Fragment = ""
					queue = append(queue, to.String())
				}
			}
			response.Body.Close()
			cancel()
		}
		for _, want := range []string{"seen units", "seen seats", "seen slots", "seen wallet", "seen more"} {
			require.Contains(t, text, want, node)
		}
		require.Empty(t, logged.String(), node)
		require.Greater(t, len(seen), 10, node)
		t.Logf("%s: %d pages", node, len(seen))
	}
}
