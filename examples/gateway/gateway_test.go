package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/internal/pgtest"
)

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
	server := httptest.NewServer(f.handler())
	t.Cleanup(server.Close)
	f.bases = []string{server.URL}
	return f
}

// newFixture makes the tables, the accounts and the model.
func newFixture(t *testing.T, pool *pgxpool.Pool, ttl time.Duration) *fixture {
	t.Helper()
	m := newModel(time.Millisecond)
	server := httptest.NewServer(m.handler())
	t.Cleanup(server.Close)
	g, err := newGateway(pool, config{model: server.URL, ttl: ttl})
	require.NoError(t, err)
	_, err = pool.Exec(t.Context(), gatewaySQL)
	require.NoError(t, err)
	_, err = pool.Exec(t.Context(), seedSQL)
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
	status, body := f.do(f.t.Context(), http.MethodPost, "/v1/credit", "admin-of-acme", "", fmt.Sprintf(`{"id": %q, "amount": %d}`, fmt.Sprint("payment-", micro), micro))
	require.Equal(f.t, http.StatusOK, status, body)
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

// do sends a request and reads all of its answer. A status of 0 is no answer.
func (f *fixture) do(ctx context.Context, method, path, secret, key, body string) (status int, text string) {
	res, err := f.send(ctx, f.bases[0], method, path, secret, key, body)
	if err != nil {
		return 0, err.Error()
	}
	defer res.Body.Close()
	all, err := io.ReadAll(res.Body)
	if err != nil {
		return 0, err.Error()
	}
	return res.StatusCode, string(all)
}

func (f *fixture) send(ctx context.Context, base, method, path, secret, key, body string) (*http.Response, error) {
	req, err := http.NewRequestWithContext(ctx, method, base+path, strings.NewReader(body))
	if err != nil {
		return nil, err
	}
	req.Header.Set("Authorization", "Bearer "+secret)
	if key != "" {
		req.Header.Set("Idempotency-Key", key)
	}
	return http.DefaultClient.Do(req)
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
	res, err := f.send(ctx, base, http.MethodPost, "/v1/chat/completions", secret, key, string(body))
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
