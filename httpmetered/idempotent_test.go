package httpmetered_test

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/httpmetered"
	"github.com/pgmetered/metered/internal/pgtest"
)

// shop takes orders: each handler writes a row, and answers as the test says.
type shop struct {
	t    *testing.T
	pool *pgxpool.Pool
	url  string

	mu     sync.Mutex
	errs   []error // what OnError was told
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
	header http.Header
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
	got, err := http.DefaultClient.Do(r)
	if err != nil {
		return reply{}, err
	}
	defer func() { _ = got.Body.Close() }()
	b, err := io.ReadAll(got.Body)
	got.Header.Del("Date")
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

// created orders, and answers with what differs from call to call.
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

// raw are the bytes of an answer, without its date.
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
		if !strings.HasPrefix(line, "Date: ") {
			b.WriteString(line)
		}
		if err != nil {
			return b.String()
		}
	}
}

func TestIdempotent_AReplayIsTheFirstAnswerByteForByte(t *testing.T) {
	t.Parallel()
	s := newShop(t, httpmetered.IdempotentConfig{}, nil)
	calls := 0
	for name, answer := range map[string]http.HandlerFunc{
		"text":   created,
		"binary": func(w http.ResponseWriter, r *http.Request) { _, _ = w.Write([]byte("\x00\xff\x80 \x00")) },
		"sniffed": func(w http.ResponseWriter, r *http.Request) {
			_, _ = io.WriteString(w, "<html>")
			_, _ = fmt.Fprint(w, metered.NewID())
			w.Header().Set("X-Late", "not sent") // after the status
		},
		"unsniffed": func(w http.ResponseWriter, r *http.Request) {
			w.Header()["Content-Type"] = nil
			_, _ = io.WriteString(w, "<html>")
		},
		"no content":  func(w http.ResponseWriter, r *http.Request) { w.WriteHeader(http.StatusNoContent) },
		"redirection": func(w http.ResponseWriter, r *http.Request) { http.Redirect(w, r, "/orders/x", http.StatusSeeOther) },
		"escapes": func(w http.ResponseWriter, r *http.Request) {
			_, _ = w.Write(bytes.Repeat([]byte("<\x01\u2028\ufffd"), 6000))
		},
	} {
		s.answer = func(w http.ResponseWriter, r *http.Request) { calls++; answer(w, r) }
		first := s.raw("body", `"`+name+`"`)
		require.Contains(t, first, "HTTP/1.1 ")
		require.NotContains(t, first, "X-Late")
		require.Equal(t, first, s.raw("body", `"`+name+`"`), name)
	}
	require.Equal(t, 7, calls)
	require.Equal(t, 1, s.orders())
	require.Empty(t, s.told())

	var result string // which people read
	require.NoError(t, s.pool.QueryRow(t.Context(), `select convert_from(result, 'utf8') from metered.operations where id = 'unsniffed' and namespace = 'ann'`).Scan(&result))
	require.JSONEq(t, `{"status": 200, "header": {"Content-Type": null}, "text": "<html>"}`, result)
}

func TestIdempotent_AnotherRequestWithTheKeyIs422(t *testing.T) {
	t.Parallel()
	s := newShop(t, httpmetered.IdempotentConfig{}, created)
	require.Equal(t, 201, s.post("body", "k").status)
	for _, other := range []struct{ method, path, body string }{
		{"POST", "/orders/book", "bodY"}, {"POST", "/orders/book", ""}, {"POST", "/orders/book", "body "},
		{"POST", "/orders/bookk", "body"}, {"POST", "/orders/book?", "body"}, {"POST", "/orders/book?a=1", "body"}, {"PUT", "/orders/book", "body"},
	} {
		r, err := s.send(t.Context(), other.method, other.path, "ann", other.body, "k")
		require.NoError(t, err)
		if other.path == "/orders/book?" { // the client leaves it out
			require.Contains(t, []int{201, 422}, r.status)
			continue
		}
		require.Equal(t, 422, r.status, other)
		require.Equal(t, "application/problem+json", r.header.Get("Content-Type"))
		require.JSONEq(t, `{"title":"Unprocessable Entity","status":422,"code":"operation_conflict","detail":"the Idempotency-Key was used for another request"}`, r.body)
		require.Empty(t, r.header.Get("Retry-After"))
	}
	require.Equal(t, 1, s.orders())
}

func TestIdempotent_AnotherTenantsKeyIsAnotherKey(t *testing.T) {
	t.Parallel()
	s := newShop(t, httpmetered.IdempotentConfig{}, created)
	ann := s.post("body", "k")
	ben, err := s.send(t.Context(), "POST", "/orders/book", "ben", "body", "k")
	require.NoError(t, err)
	require.Equal(t, []int{201, 201}, []int{ann.status, ben.status})
	require.NotEqual(t, ann.body, ben.body)
	require.Equal(t, 2, s.orders())

	nobody, err := s.send(t.Context(), "POST", "/orders/book", "nobody", "body", "k")
	require.NoError(t, err)
	require.Equal(t, 401, nobody.status)
	require.JSONEq(t, `{"title":"Unauthorized","status":401,"detail":"who are you?"}`, nobody.body)
	nameless, err := s.send(t.Context(), "POST", "/orders/book", "", "body", "k")
	require.NoError(t, err)
	require.Equal(t, 500, nameless.status, "a namespace in common would give one client another's answer")
	require.Equal(t, 2, s.orders())
}

func TestIdempotent_HostileKeysAre400(t *testing.T) {
	t.Parallel()
	s := newShop(t, httpmetered.IdempotentConfig{}, created)
	for _, keys := range [][]string{{""}, {`""`}, {`"k`}, {strings.Repeat("k", 10<<10)}, {"k", "k"}, {"k, k"}, {"clé"}, {"a\tb"}} {
		r := s.post("body", keys...)
		require.Equal(t, 400, r.status, "%q", keys)
		require.Equal(t, "idempotency_key_invalid", r.code(), "%q", keys)
	}
	r := s.post("body")
	require.Equal(t, 400, r.status)
	require.Equal(t, "idempotency_key_missing", r.code())
	for _, key := range []string{"a\x00b", "a\x01b", "a\x7fb"} { // net/http has them already
		require.Contains(t, s.raw("body", key), "HTTP/1.1 400 ")
	}
	require.Zero(t, s.orders())

	quoted := s.post("body", `"k"`)
	require.Equal(t, 201, quoted.status)
	require.Equal(t, quoted, s.post("body", "k"), "the key is what is between the quotes")
	require.Equal(t, 1, s.orders())
	require.Empty(t, s.told())
}

func TestIdempotent_ConcurrentRequestsHaveOneEffect(t *testing.T) {
	t.Parallel()
	s := newShop(t, httpmetered.IdempotentConfig{}, created)
	other := branch(t, s.pool, httpmetered.IdempotentConfig{}, metered.Config{}, created)
	var group sync.WaitGroup
	var mu sync.Mutex
	answers := map[int][]string{}
	for i := range 24 {
		group.Go(func() {
			at := []*shop{s, other}[i%2]
			r, err := at.send(t.Context(), "POST", "/orders/book", "ann", "body", "k")
			mu.Lock()
			defer mu.Unlock()
			if err != nil {
				answers[0] = append(answers[0], err.Error())
				return
			}
			answers[r.status] = append(answers[r.status], r.body)
			if r.status == 409 && (r.header.Get("Retry-After") != "1" || r.code() != "idempotency_key_in_flight") {
				answers[0] = append(answers[0], r.body)
			}
		})
	}
	group.Wait()
	require.Equal(t, 24, len(answers[201])+len(answers[409]), answers)
	require.NotEmpty(t, answers[201])
	for _, body := range answers[201] {
		require.Equal(t, answers[201][0], body)
	}
	require.Equal(t, 1, s.orders())
	require.Equal(t, 1, s.records())
}

func TestIdempotent_InFlightIs409WithRetryAfter(t *testing.T) {
	t.Parallel()
	running, end := make(chan bool), make(chan bool)
	s := newShop(t, httpmetered.IdempotentConfig{}, func(w http.ResponseWriter, r *http.Request) {
		running <- true
		<-end
		created(w, r)
	})
	stop := sync.OnceFunc(func() { close(end) })
	t.Cleanup(stop) // also if the test fails: the server waits for the handler
	other := branch(t, s.pool, httpmetered.IdempotentConfig{}, metered.Config{LockTimeout: 50 * time.Millisecond}, created)
	first := make(chan reply)
	go func() {
		r, _ := s.send(t.Context(), "POST", "/orders/book", "ann", "body", "k")
		first <- r
	}()
	<-running
	acquired := s.pool.Stat().AcquireCount()
	require.Equal(t, 409, s.post("body", "k").status)
	require.Equal(t, acquired, s.pool.Stat().AcquireCount(), "no connection is held by those that wait in one process")
	for _, at := range []*shop{s, other} {
		for _, body := range []string{"body", "another"} {
			r := at.post(body, "k")
			require.Equal(t, 409, r.status)
			require.Equal(t, "1", r.header.Get("Retry-After"))
			require.Equal(t, "idempotency_key_in_flight", r.code())
		}
	}
	stop()
	done := <-first
	require.Equal(t, 201, done.status)
	require.Equal(t, done, s.post("body", "k"))
	require.Equal(t, done, other.post("body", "k"))
	require.Equal(t, 1, s.orders())
}

func TestIdempotent_AClientThatGoesMidWayCanAskAgain(t *testing.T) {
	t.Parallel()
	running := make(chan context.CancelFunc, 1)
	stopped := make(chan bool, 1)
	s := newShop(t, httpmetered.IdempotentConfig{}, func(w http.ResponseWriter, r *http.Request) {
		if err := order(r); err != nil {
			httpmetered.Write(w, err)
			return
		}
		select {
		case cancel := <-running:
			cancel()
			<-r.Context().Done() // the server has seen it
			w.WriteHeader(http.StatusCreated)
			stopped <- true
		default:
			w.WriteHeader(http.StatusOK)
		}
	})
	ctx, cancel := context.WithCancel(t.Context())
	running <- cancel
	_, err := s.send(ctx, "POST", "/orders/book", "ann", "body", "k")
	require.ErrorIs(t, err, context.Canceled)
	<-stopped
	var again reply
	require.Eventually(t, func() bool { // the first may be on its way out
		again = s.post("body", "k")
		return again.status != 409
	}, time.Minute, time.Millisecond)
	require.Equal(t, 200, again.status, "the first was taken back: its answer was never recorded")
	require.Equal(t, again, s.post("body", "k"))
	require.Equal(t, 1, s.orders())
}

func TestIdempotent_AnAnswerOf400AndMoreUndoesTheCommand(t *testing.T) {
	t.Parallel()
	s := newShop(t, httpmetered.IdempotentConfig{}, nil)
	for _, status := range []int{400, 404, 409, 422, 500, 503, 599} {
		calls := 0
		s.answer = func(w http.ResponseWriter, r *http.Request) {
			calls++
			require.NoError(t, order(r))
			w.Header().Set("Retry-After", "7")
			w.WriteHeader(status)
			_, _ = fmt.Fprintf(w, "call %d", calls)
		}
		for n := 1; n <= 2; n++ {
			r := s.post("body", fmt.Sprint(status))
			require.Equal(t, status, r.status)
			require.Equal(t, fmt.Sprintf("call %d", n), r.body, "it is the handler's own, and not on record")
			require.Equal(t, "7", r.header.Get("Retry-After"))
		}
	}
	require.Zero(t, s.orders())
	require.Zero(t, s.records())
	require.Empty(t, s.told(), "the handler knows what it answers")
}

func TestIdempotent_CommitBelow500RecordsRefusalsOfTheHandler(t *testing.T) {
	t.Parallel()
	s := newShop(t, httpmetered.IdempotentConfig{CommitBelow: 500}, nil)
	status := 0
	s.answer = func(w http.ResponseWriter, r *http.Request) {
		require.NoError(t, order(r))
		w.WriteHeader(status)
		_, _ = io.WriteString(w, metered.NewID())
	}
	status = 404
	first := s.post("body", "k")
	status = 201
	require.Equal(t, first, s.post("body", "k"))
	require.Equal(t, 404, first.status)
	require.Equal(t, 1, s.orders())
	status = 500
	require.Equal(t, 500, s.post("body", "other").status)
	status = 201
	require.Equal(t, 201, s.post("body", "other").status)
	require.Equal(t, 2, s.orders())
}

func TestIdempotent_APanicUndoesTheCommand(t *testing.T) {
	t.Parallel()
	s := newShop(t, httpmetered.IdempotentConfig{}, func(w http.ResponseWriter, r *http.Request) {
		_ = order(r)
		w.WriteHeader(http.StatusCreated)
		panic(http.ErrAbortHandler)
	})
	_, err := s.send(t.Context(), "POST", "/orders/book", "ann", "body", "k")
	require.ErrorIs(t, err, io.EOF)
	require.Zero(t, s.orders())
	s.answer = created
	require.Equal(t, 201, s.post("body", "k").status)
	require.Equal(t, 1, s.orders())
}

func TestIdempotent_WhatCannotBeRecordedIsNotCommitted(t *testing.T) {
	t.Parallel()
	s := newShop(t, httpmetered.IdempotentConfig{AnswerBytes: 100, RequestBytes: 8}, nil)
	for name, answer := range map[string]http.HandlerFunc{
		"nothing": func(http.ResponseWriter, *http.Request) {},
		"a body that is too large": func(w http.ResponseWriter, _ *http.Request) {
			_, _ = w.Write(make([]byte, 60))
			_, err := w.Write(make([]byte, 41))
			require.ErrorIs(t, err, httpmetered.ErrAnswer)
		},
		"fields that are too large": func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("X", strings.Repeat("x", 17<<10))
			w.WriteHeader(200)
		},
		"a cookie": func(w http.ResponseWriter, _ *http.Request) {
			http.SetCookie(w, &http.Cookie{Name: "session", Value: "secret"})
			w.WriteHeader(200)
		},
		"a trailer": func(w http.ResponseWriter, _ *http.Request) {
			w.WriteHeader(200)
			w.Header().Set(http.TrailerPrefix+"Sum", "1")
		},
		"a field that is no text": func(w http.ResponseWriter, _ *http.Request) { w.Header().Set("X", "\xff"); w.WriteHeader(200) },
		"a transaction that failed": func(w http.ResponseWriter, r *http.Request) {
			_, err := httpmetered.Tx(r).Exec(r.Context(), "nonsense")
			require.Error(t, err)
			w.WriteHeader(200)
		},
	} {
		s.answer = func(w http.ResponseWriter, r *http.Request) { require.NoError(t, order(r)); answer(w, r) }
		before := len(s.told())
		r := s.post("body", `"`+name+`"`)
		require.Equal(t, 500, r.status, name)
		require.JSONEq(t, `{"title":"Internal Server Error","status":500}`, r.body, "nothing of what was written gets out")
		require.Empty(t, r.header.Values("Set-Cookie"))
		require.Len(t, s.told(), before+1, name)
	}
	s.answer = func(w http.ResponseWriter, r *http.Request) {
		require.ErrorIs(t, http.NewResponseController(w).Flush(), http.ErrNotSupported)
		_, flusher := w.(http.Flusher)
		require.False(t, flusher)
		w.WriteHeader(http.StatusEarlyHints) // not sent
		_, _ = w.Write(make([]byte, 100))
	}
	require.Equal(t, 200, s.post("body", "whole").status)
	r := s.post("too large", "k")
	require.Equal(t, 413, r.status)
	require.JSONEq(t, `{"title":"Request Entity Too Large","status":413}`, r.body)
	require.Zero(t, s.orders())
}

// The handler gives its errors to Write, and Do sees them: what passes is tried again.
func TestIdempotent_WriteLetsTheCommandBeRepeated(t *testing.T) {
	t.Parallel()
	calls := 0
	s := newShop(t, httpmetered.IdempotentConfig{}, func(w http.ResponseWriter, r *http.Request) {
		calls++
		body, _ := io.ReadAll(r.Body)
		require.Equal(t, "body", string(body), "each attempt has it")
		if calls < 3 {
			_, err := httpmetered.Tx(r).Exec(r.Context(), `do $$ begin raise exception 'collided' using errcode = '40001'; end $$`)
			w.Header().Set("X-Attempt", "first")
			httpmetered.Write(struct{ wrapped }{wrapped{w}}, fmt.Errorf("order: %w", err))
			return
		}
		created(w, r)
	})
	r := s.post("body", "k")
	require.Equal(t, 201, r.status)
	require.Empty(t, r.header.Get("X-Attempt"))
	require.Equal(t, 3, calls)
	require.Equal(t, 1, s.orders())

	s.answer = func(w http.ResponseWriter, r *http.Request) { httpmetered.Write(w, errNobody) }
	require.Equal(t, 401, s.post("body", "l").status)
	s.answer = func(w http.ResponseWriter, r *http.Request) {
		calls++
		httpmetered.Write(w, metered.ErrBusy)
	}
	calls = 0
	require.Equal(t, 503, s.post("body", "m").status)
	require.Equal(t, 1, calls, "only collisions are repeated here")
}

type wrapped struct{ http.ResponseWriter }

func (w wrapped) Unwrap() http.ResponseWriter { return w.ResponseWriter }

func charging(record bool, limits ...budget.Limit) func(*http.Request, []byte) (metered.Command, error) {
	return func(r *http.Request, body []byte) (metered.Command, error) {
		if string(body) == "bad" {
			return metered.Command{}, &httpmetered.Problem{Status: 400, Detail: "bad"}
		}
		return metered.Command{RecordRefusal: record, Charges: []budget.Charge{{Scope: "ann", Amount: int64(len(body)), Limits: limits}}}, nil
	}
}

func TestIdempotent_ARefusedCommandAnswersTheRefusal(t *testing.T) {
	t.Parallel()
	limit := budget.PerWindow(10, time.Hour).Named("hourly")
	policies := policies(t, httpmetered.PoliciesConfig{Limits: []budget.Limit{limit}})
	for _, record := range []bool{false, true} {
		s := newShop(t, httpmetered.IdempotentConfig{Command: charging(record, limit), Policies: policies}, created)
		clock := pgtest.SetClock(t, s.pool, time.Date(2031, 5, 6, 12, 0, 0, 0, time.UTC))
		first := s.post("sixsix", "a")
		require.Equal(t, 201, first.status)
		require.Equal(t, `"hourly";r=4;t=3600`, first.header.Get("RateLimit"))
		denied := s.post("sixsix", "b")
		require.Equal(t, 429, denied.status)
		require.Equal(t, "3600", denied.header.Get("Retry-After"))
		require.Equal(t, "budget_exceeded", denied.code())
		require.Contains(t, denied.body, `"violated-policies":["hourly"]`)
		require.Equal(t, `"hourly";r=4;t=3600`, denied.header.Get("RateLimit"))
		require.Empty(t, denied.header.Get("Location"), "the handler's answer is dropped")
		require.Equal(t, 1, s.orders())

		bad := s.post("bad", "c")
		require.Equal(t, 400, bad.status)
		require.JSONEq(t, `{"title":"Bad Request","status":400,"detail":"bad"}`, bad.body)

		clock.Advance(2 * time.Hour)
		again := s.post("sixsix", "b")
		if record {
			require.Equal(t, denied, again)
			require.Equal(t, 422, s.post("sixsiX", "b").status)
		} else {
			require.Equal(t, 201, again.status)
			require.Equal(t, 2, s.orders())
		}
	}
}

func TestIdempotent_WithoutAKeyWhereItIsOptionalAndSafeMethods(t *testing.T) {
	t.Parallel()
	s := newShop(t, httpmetered.IdempotentConfig{Optional: true}, created)
	a, b := s.post("body"), s.post("body")
	require.Equal(t, []int{201, 201}, []int{a.status, b.status})
	require.NotEqual(t, a.body, b.body)
	require.Equal(t, 400, s.post("body", `"`).status)
	require.Equal(t, 2, s.orders())
	s.answer = func(w http.ResponseWriter, r *http.Request) {
		require.Nil(t, httpmetered.Tx(r))
		_, flusher := w.(http.Flusher)
		require.True(t, flusher)
	}
	for _, method := range []string{"GET", "HEAD", "OPTIONS", "TRACE"} {
		r, err := s.send(t.Context(), method, "/orders/book", "nobody", "", `"`)
		require.NoError(t, err)
		require.Equal(t, 200, r.status)
	}
	require.Equal(t, 2, s.records())
}

func TestIdempotent_AKeyWithATimeIsNotCarriedOutAgainAfterAPurge(t *testing.T) {
	t.Parallel()
	s := newShop(t, httpmetered.IdempotentConfig{}, created)
	client, err := metered.New(s.pool, metered.Config{})
	require.NoError(t, err)
	key := metered.NewID()
	require.Equal(t, 201, s.post("body", `"`+key+`"`).status)
	pgtest.SetClock(t, s.pool, time.Now().Add(2*time.Hour))
	purged, err := client.PurgeOperations(t.Context(), s.pool, metered.PurgeOptions{OlderThan: time.Hour})
	require.NoError(t, err)
	require.EqualValues(t, 1, purged)
	r := s.post("body", `"`+key+`"`)
	require.Equal(t, 409, r.status)
	require.Equal(t, "operation_retired", r.code())
	require.Equal(t, 1, s.orders())
}

func TestIdempotent_WithoutTheSchemaIs500WithoutDetail(t *testing.T) {
	t.Parallel()
	s := branch(t, pgtest.OpenWith(t, pgtest.Options{Empty: true}), httpmetered.IdempotentConfig{}, metered.Config{}, created)
	r := s.post("body", "k")
	require.Equal(t, 500, r.status)
	require.JSONEq(t, `{"title":"Internal Server Error","status":500}`, r.body)
	require.ErrorIs(t, errors.Join(s.told()...), metered.ErrNotMigrated)
}

func TestIdempotent_RefusesWhatItCannotWorkWith(t *testing.T) {
	t.Parallel()
	client, err := metered.New(pgtest.Open(t), metered.Config{})
	require.NoError(t, err)
	tenant := func(*http.Request) (string, error) { return "ann", nil }
	_, err = httpmetered.Idempotent(nil, httpmetered.IdempotentConfig{Tenant: tenant})
	require.ErrorIs(t, err, httpmetered.ErrArgument)
	for _, cfg := range []httpmetered.IdempotentConfig{
		{}, {Tenant: tenant, CommitBelow: 299}, {Tenant: tenant, CommitBelow: 501}, {Tenant: tenant, RequestBytes: -1},
		{Tenant: tenant, AnswerBytes: -1}, {Tenant: tenant, AnswerBytes: httpmetered.MaxAnswerBytes + 1},
	} {
		_, err := httpmetered.Idempotent(client, cfg)
		require.ErrorIs(t, err, httpmetered.ErrArgument)
	}
	_, err = httpmetered.Idempotent(client, httpmetered.IdempotentConfig{Tenant: tenant, AnswerBytes: httpmetered.MaxAnswerBytes})
	require.NoError(t, err)
}
