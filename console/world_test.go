package console_test

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"
	"golang.org/x/net/html"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/console"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/bounds"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/jobs"
)

const prefix = "/ops/console"

// world is a database with the page on it, as a role that can do nothing but look.
type world struct {
	t       *testing.T
	pool    *pgxpool.Pool // the owner's
	client  *metered.Client
	reader  *pgxpool.Pool // the page's
	queries *counter
	page    *console.Handler
	server  *httptest.Server
}

// counter counts the statements of a pool, BEGIN and COMMIT too.
type counter struct{ n atomic.Int64 }

func (c *counter) TraceQueryStart(ctx context.Context, _ *pgx.Conn, _ pgx.TraceQueryStartData) context.Context {
	c.n.Add(1)
	return ctx
}

func (c *counter) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}

// newWorld serves the page behind a prefix. more is granted to its role, where $role stands for its name.
func newWorld(t *testing.T, cfg console.Config, more string) *world {
	t.Helper()
	w := &world{t: t, queries: &counter{}}
	w.pool = pgtest.Open(t)
	w.client = pgtest.NewClient(t, w.pool, metered.Config{})
	role := pgtest.AsRole(t, w.pool, metered.GrantReportingSQL, more)
	config := role.Config().Copy()
	config.ConnConfig.Tracer = w.queries
	config.MaxConns = 1 // the statistics of its statements can be flushed then
	w.reader = newPool(t, config)
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.NewTextHandler(testWriter{t}, nil))
	}
	if cfg.Timeout == 0 {
		cfg.Timeout = 30 * time.Second // the machine may be busy otherwise
	}
	var err error
	w.page, err = console.New(w.reader, cfg)
	require.NoError(t, err)
	w.page.WaitAtMost(cfg.Refresh)
	mux := http.NewServeMux()
	mux.Handle(prefix+"/", http.StripPrefix(prefix, w.page))
	w.server = httptest.NewServer(mux)
	t.Cleanup(w.server.Close)
	t.Cleanup(w.page.Close)
	return w
}

type testWriter struct{ t *testing.T }

func (w testWriter) Write(p []byte) (int, error) {
	w.t.Logf("%s", bytes.TrimSpace(p))
	return len(p), nil
}

// url is the address of a page.
func (w *world) url(name string, pairs ...string) string {
	q := url.Values{}
	for i := 0; i < len(pairs); i += 2 {
		q.Add(pairs[i], pairs[i+1])
	}
	u := w.server.URL + prefix + "/" + name
	if len(q) > 0 {
		u += "?" + q.Encode()
	}
	return u
}

func (w *world) get(address string) (*http.Response, []byte) {
	w.t.Helper()
	response, err := pgtest.HTTP.Get(address)
	require.NoError(w.t, err)
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)
	require.NoError(w.t, err)
	return response, body
}

// see gets a page that must be there, and parses it.
func (w *world) see(name string, pairs ...string) *html.Node {
	w.t.Helper()
	response, body := w.get(w.url(name, pairs...))
	require.Equal(w.t, http.StatusOK, response.StatusCode, "%s %v: %s", name, pairs, text(parse(w.t, body)))
	return parse(w.t, body)
}

func parse(t *testing.T, body []byte) *html.Node {
	t.Helper()
	n, err := html.Parse(bytes.NewReader(body))
	require.NoError(t, err)
	return n
}

// all are the elements of these names, or of any.
func all(n *html.Node, names ...string) (found []*html.Node) {
	for d := range n.Descendants() {
		if d.Type != html.ElementNode {
			continue
		}
		for _, name := range names {
			if d.Data == name || name == "*" {
				found = append(found, d)
			}
		}
	}
	return found
}

// text is an element's text, with single spaces.
func text(n *html.Node) string {
	var b strings.Builder
	for d := range n.Descendants() {
		if d.Type == html.TextNode && d.Parent.Data != "style" && d.Parent.Data != "script" {
			b.WriteString(d.Data)
			b.WriteByte(' ')
		}
	}
	return strings.Join(strings.FieldsFunc(b.String(), func(r rune) bool { return r == ' ' || r == '\n' }), " ")
}

func attr(n *html.Node, name string) (string, bool) {
	for _, a := range n.Attr {
		if a.Key == name {
			return a.Val, true
		}
	}
	return "", false
}

// byID is the element with an id.
func byID(t *testing.T, n *html.Node, id string) *html.Node {
	t.Helper()
	for _, e := range all(n, "*") {
		if got, _ := attr(e, "id"); got == id {
			return e
		}
	}
	require.Fail(t, "no element has the id "+id)
	return nil
}

// tile is the text of the tile with a heading.
func tile(t *testing.T, n *html.Node, heading string) string {
	t.Helper()
	for _, dt := range all(n, "dt") {
		if text(dt) == heading {
			return strings.TrimPrefix(text(dt.Parent), heading+" ")
		}
	}
	require.Fail(t, "no tile has the heading "+heading)
	return ""
}

type process struct {
	Name string `json:"name"`
}

func (process) Kind() string { return "process" }

// order is a command with a charge, a hold and a job.
func (w *world) order(id, scope string, amount int64, limits ...budget.Limit) error {
	_, err := metered.Do(w.t.Context(), w.client, metered.Command{
		Tenant: "shop", ID: id, Name: "order", Input: id, RecordRefusal: true,
		Charges: []budget.Charge{{Scope: scope, Amount: amount, Limits: limits, Note: budget.Note{Actor: "user:ann", Reason: "an <em>order</em>"}}},
		Holds: []holds.Placement{{
			Tenant: "acme", Holder: "ann", TTL: time.Hour, Lines: []holds.Line{{Scope: scope, Amount: 2}},
		}},
	}, func(ctx context.Context, tx *metered.Tx) (string, error) {
		_, err := tx.Enqueue(ctx, process{Name: id}, &jobs.Options{Key: id})
		return id, err
	})
	return err
}

func (w *world) charge(scope string, amount int64) {
	w.t.Helper()
	require.NoError(w.t, pgx.BeginFunc(w.t.Context(), w.pool, func(tx pgx.Tx) error {
		_, err := w.client.Budget.Charge(w.t.Context(), tx, budget.Charge{Scope: scope, Amount: amount})
		return err
	}))
}

// crowd charges n scopes, each times.
func (w *world) crowd(n, times int) {
	w.t.Helper()
	for range times {
		for from := 0; from < n; from += bounds.MaxBatch {
			var charges []budget.Charge
			for i := from; i < min(n, from+bounds.MaxBatch); i++ {
				charges = append(charges, budget.Charge{Scope: fmt.Sprintf("crowd/%05d", i), Amount: int64(i%7 + 1)})
			}
			require.NoError(w.t, pgx.BeginFunc(w.t.Context(), w.pool, func(tx pgx.Tx) error {
				_, err := w.client.Budget.ChargeEach(w.t.Context(), tx, charges...)
				return err
			}))
		}
	}
}

func newPool(t *testing.T, config *pgxpool.Config) *pgxpool.Pool {
	t.Helper()
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	return pool
}

// serve serves another page, at the root, and returns its address.
func (w *world) serve(page *console.Handler) string {
	w.t.Helper()
	server := httptest.NewServer(page)
	w.t.Cleanup(server.Close)
	w.t.Cleanup(page.Close)
	return server.URL + "/"
}
