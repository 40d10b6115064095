package httpmetered_test

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/httpmetered"
	"github.com/pgmetered/metered/internal/pgtest"
)

// shop takes orders: each handler writes a row, and answers as the test says.
type shop struct {
	t    *testing.T
	pool *pgxpool.Pool
	url  string

	mu     sync.Mutex
	errs   []error // the errors that OnError got
	answer http.HandlerFunc
}

// order writes a row, as every handler of a shop does before it answers.
func order(r *http.Request) error {
	_, err := httpmetered.Tx(r).Exec(r.Context(), `insert into orders (tenant) values ($1)`, r.Header.Get("Authorization"))
	return err
}

var errNobody = &httpmetered.Problem{Status: http.StatusUnauthorized, Detail: "who are you?"}

func newShop(t *testing.T, cfg httpmetered.IdempotentConfig, answer http.HandlerFunc) *shop {
	t.Helper()
	pool := pgtest.Open(t)
	_, err := pool.Exec(t.Context(), `create table orders (id bigint generated always as identity, tenant text)`)
	require.NoError(t, err)
	return branch(t, pool, cfg, metered.Config{}, answer)
}

// branch is a process of a shop.
func branch(t *testing.T, pool *pgxpool.Pool, cfg httpmetered.IdempotentConfig, own metered.Config, answer http.HandlerFunc) *shop {
	t.Helper()
	s := &shop{t: t, pool: pool, answer: answer}
	client, err := metered.New(pool, own)
	require.NoError(t, err)
	cfg.Tenant = func(r *http.Request) (string, error) {
		if who := r.Header.Get("Authorization"); who != "nobody" {
			return who, nil
		}
		return "", errNobody
	}
	cfg.OnError = func(_ *http.Request, err error) {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.errs = append(s.errs, err)
	}
	once, err := httpmetered.Idempotent(client, cfg)
	require.NoError(t, err)
	mux := http.NewServeMux()
	mux.Handle("/orders/{kind}", once(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { s.answer(w, r) })))
	server := httptest.NewUnstartedServer(mux)
	server.Config.ErrorLog = nil
	server.Start()
	t.Cleanup(server.Close)
	s.url = server.URL
	return s
}

type reply struct {
	status int
	header http.Header // without the mark of a replay
	body   string
}

func (r reply) code() string {
	var p httpmetered.Problem
	_ = json.Unmarshal([]byte(r.body), &p)
	return p.Code
}

func (s *shop) send(ctx context.Context, method, path, who, body string, keys ...string) (reply, error) {
	r, err := http.NewRequestWithContext(ctx, method, s.url+path, strings.NewReader(body))
	require.NoError(s.t, err)
	r.Header.Set("Authorization", who)
	for _, key := range keys {
		r.Header.Add("Idempotency-Key", key)
	}
	got, err := pgtest.HTTP.Do(r)
	if err != nil {
		return reply{}, err
	}
	defer func() { _ = got.Body.Close() }()
	b, err := io.ReadAll(got.Body)
	got.Header.Del("Date")
	got.Header.Del("Idempotent-Replayed")
	return reply{got.StatusCode, got.Header, string(b)}, err
}

func (s *shop) post(body string, keys ...string) reply {
	s.t.Helper()
	r, err := s.send(s.t.Context(), "POST", "/orders/book", "ann", body, keys...)
	require.NoError(s.t, err)
	return r
}

func (s *shop) orders() (n int) {
	s.t.Helper()
	require.NoError(s.t, s.pool.QueryRow(s.t.Context(), `select count(*) from orders`).Scan(&n))
	return n
}

func (s *shop) records() (n int) {
	s.t.Helper()
	require.NoError(s.t, s.pool.QueryRow(s.t.Context(), `select count(*) from metered.operations`).Scan(&n))
	return n
}

func (s *shop) told() []error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.errs
}

// created orders, with an answer that differs from call to call.
func created(w http.ResponseWriter, r *http.Request) {
	if err := order(r); err != nil {
		httpmetered.Write(w, err)
		return
	}
	body, _ := io.ReadAll(r.Body)
	w.Header().Set("Content-Type", "application/json")
	w.Header()["X-Two"] = []string{"a", "b"}
	w.Header().Set("Location", "/orders/"+metered.NewID())
	w.WriteHeader(http.StatusCreated)
	_, _ = fmt.Fprintf(w, "{\"id\": %q,\n \"of\": %q, \"umlaut\": \"ä<&>\"}", metered.NewID(), body)
}

// raw are the bytes of an answer, without its date and the mark of a replay.
func (s *shop) raw(body, key string) string {
	s.t.Helper()
	conn, err := net.Dial("tcp", strings.TrimPrefix(s.url, "http://"))
	require.NoError(s.t, err)
	defer func() { _ = conn.Close() }()
	_, err = fmt.Fprintf(conn, "POST /orders/book HTTP/1.1\r\nHost: shop\r\nConnection: close\r\nAuthorization: ann\r\nIdempotency-Key: %s\r\nContent-Length: %d\r\n\r\n%s",
		key, len(body), body)
	require.NoError(s.t, err)
	var b strings.Builder
	for lines := bufio.NewReader(conn); ; {
		line, err := lines.ReadString('\n')
		if !strings.HasPrefix(line, "Date: ") && !strings.HasPrefix(line, "Idempotent-Replayed: true\r") {
			b.WriteString(line)
		}
		if err != nil {
			return b.String()
		}
	}
}
