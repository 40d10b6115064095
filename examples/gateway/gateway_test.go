package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net/http"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/examples/internal/examplehttp"
	"github.com/pgmetered/metered/examples/internal/exampletest"
	"github.com/pgmetered/metered/internal/pgtest"
)

func TestMain(m *testing.M) { exampletest.Main(m, main) }

// fixture is a gateway, the model behind it, and its organisation.
type fixture struct {
	*gateway
	t     *testing.T
	model *model
	bases []string // of the gateways
}

const patience = 2 * time.Minute

// openGateway serves on loopback, in this process.
func openGateway(t *testing.T) *fixture {
	t.Helper()
	f := newFixture(t, pgtest.Open(t), time.Minute) // a busy machine may renew late
	f.bases = []string{exampletest.Serve(t, f.handler())}
	return f
}

// newFixture makes the tables, the accounts and the model.
func newFixture(t *testing.T, pool *pgxpool.Pool, ttl time.Duration) *fixture {
	t.Helper()
	m := newModel(time.Millisecond)
	g, err := newGateway(pool, config{model: exampletest.Serve(t, m.handler()), ttl: ttl})
	require.NoError(t, err)
	_, err = pool.Exec(t.Context(), gatewaySQL+";"+seedSQL)
	require.NoError(t, err)
	return &fixture{gateway: g, t: t, model: m}
}

// set changes an account's limits.
func (f *fixture) set(account, column string, value int64) {
	f.t.Helper()
	tag, err := f.pool.Exec(f.t.Context(), fmt.Sprintf(`update accounts set %s = $1 where id = $2`, column), value, account)
	require.NoError(f.t, err)
	require.EqualValues(f.t, 1, tag.RowsAffected())
}

// grants gives acme credit.
func (f *fixture) grants(micro int64) {
	f.t.Helper()
	a := asking(f.t.Context(), f.bases[0], http.MethodPost, "/v1/credit", "admin-of-acme", map[string]any{"id": fmt.Sprint("payment-", micro), "amount": micro})
	require.Equal(f.t, http.StatusOK, a.Status, a.Body)
}

// counted is the model's count of a generation, and why that ended.
func (m *model) counted(id string) (u usage, finish string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	g := m.generations[id]
	if g == nil {
		return usage{}, "unknown"
	}
	return g.Usage, g.Finish
}

// ids are the generations that were ever begun.
func (m *model) ids() []string {
	m.mu.Lock()
	defer m.mu.Unlock()
	return slices.Collect(maps.Keys(m.generations))
}

// asking sends requests with a secret.
func asking(ctx context.Context, base, method, path, secret string, body any) examplehttp.Answer {
	return examplehttp.NewClient(base).Do(ctx, method, path, body, "Authorization", "Bearer "+secret)
}

// heard is a client's view of a completion.
type heard struct {
	Status     int    // 0: no answer
	Text       string // of the tokens
	Finish     string // "" if the stream broke off
	Generation string
	Usage      usage
	Cost       int64
	Problem    string // the answer, if it is no stream, or the error that ended the stream
}

// ask asks for a completion, and hangs up after so many events, unless that is 0.
func (f *fixture) ask(base, secret, key, prompt string, hangUp int) (h heard) {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	body, _ := json.Marshal(chat{Model: "large", Messages: []message{{"user", prompt}}, MaxTokens: 100})
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, base+"/v1/chat/completions", bytes.NewReader(body))
	require.NoError(f.t, err)
	r.Header.Set("Authorization", "Bearer "+secret)
	if key != "" {
		r.Header.Set("Idempotency-Key", key)
	}
	res, err := pgtest.HTTP.Do(r)
	if err != nil {
		return heard{Problem: err.Error()}
	}
	defer res.Body.Close()
	h.Status = res.StatusCode
	if h.Status != http.StatusOK {
		text, _ := io.ReadAll(res.Body)
		h.Problem = string(text)
		return h
	}
	events := 0
	err = eachEvent(res.Body, func(text []byte) error {
		var c struct {
			chunk
			Cost  int64           `json:"cost_microdollars"`
			Error json.RawMessage `json:"error"`
		}
		if err := json.Unmarshal(text, &c); err != nil {
			return err
		}
		if c.Error != nil {
			return fmt.Errorf("%s", c.Error)
		}
		h.Text += c.Choices[0].Delta.Content
		h.Finish, h.Generation, h.Usage, h.Cost = c.Choices[0].FinishReason, c.ID, c.Usage, c.Cost
		if events++; events == hangUp {
			return io.EOF
		}
		return nil
	})
	if err != nil {
		h.Problem = err.Error()
	}
	return h
}

// spent is a scope's spent and held units.
func (f *fixture) spent(scope string) (spent, held int64) {
	f.t.Helper()
	u, err := f.metered.Budget.Usage(f.t.Context(), f.pool, budget.Query{Scope: scope})
	require.NoError(f.t, err)
	return u[0].Spent - u[0].Refunded, u[0].Held
}

// The program is run as a user would.
func TestGateway(t *testing.T) {
	t.Parallel()
	readme, err := os.ReadFile("README.md")
	require.NoError(t, err)
	program := exampletest.New(t)
	program.Serve("curl -i ", "/v1/credit", func(base string) {
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
			a := asking(t.Context(), base, step.method, step.path, step.secret, []byte(step.body))
			require.Equal(t, http.StatusOK, a.Status, a.Body)
			if events := strings.Split(a.Body, "data: "); len(events) > 2 {
				require.NoError(t, json.Unmarshal([]byte(events[len(events)-2]), &cost))
			}
		}
		require.NotZero(t, cost.Cost)
	})
}
