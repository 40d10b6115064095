package httpmetered_test

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/httpmetered"
	"github.com/pgmetered/metered/internal/pgtest"
)

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
	require.NoError(t, s.pool.QueryRow(t.Context(), `select convert_from(result, 'utf8') from metered.operations where id = 'unsniffed' and tenant = 'ann'`).Scan(&result))
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
	require.Equal(t, 500, nameless.status, "a tenant in common would give one client another's answer")
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
	require.Equal(t, quoted, s.post("body", "k"), "the key is the text between the quotes")
	require.Equal(t, 1, s.orders())
	require.Empty(t, s.told())
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
	other := branch(t, s.pool, httpmetered.IdempotentConfig{}, metered.Config{Config: budget.Config{LockTimeout: 50 * time.Millisecond}}, created)
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
	pgtest.WaitFor(t, "the first request to end", func() bool { // the first may be on its way out
		again = s.post("body", "k")
		return again.status != 409
	})
	require.Equal(t, 200, again.status, "the first was taken back: its answer was never recorded")
	require.Equal(t, again, s.post("body", "k"))
	require.Equal(t, 1, s.orders())
}
