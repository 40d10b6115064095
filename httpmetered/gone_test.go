package httpmetered_test

import (
	"context"
	"errors"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/httpmetered"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/observe"
)

// A client that hangs up while COMMIT is on its way leaves nothing open, and pages nobody: the COMMIT is answered, also that of sticky charges
// and of a refusal.
func TestIdempotent_FinishesTheCommitOfAClientThatHungUp(t *testing.T) {
	t.Parallel()
	owner, _ := pgtest.SetUp(t, metered.Config{}, pgtest.Options{})
	pool, wire := pgtest.Tap(t, owner, nil)
	events := &pgtest.Recorder{}
	c := pgtest.NewClient(t, pool, metered.Config{Config: budget.Config{Observer: events}})
	var failed []error
	once, err := httpmetered.Idempotent(c, httpmetered.IdempotentConfig{
		Tenant: func(*http.Request) (string, error) { return "ann", nil },
		Command: func(r *http.Request, _ []byte) (metered.Command, error) {
			full := budget.Charge{Scope: "full", Amount: 1, Limits: []budget.Limit{budget.Lifetime(0)}}
			switch r.URL.Path {
			case "/sticky":
				return metered.Command{Sticky: []budget.Charge{{Scope: "tries", Amount: 1}}}, nil
			case "/refused":
				return metered.Command{Charges: []budget.Charge{full}, RecordRefusal: true}, nil
			}
			return metered.Command{}, nil
		},
		OnError: func(_ *http.Request, err error) { failed = append(failed, err) },
	})
	require.NoError(t, err)
	handler := once(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, err := httpmetered.Tx(r).Exec(r.Context(), "insert into uploads values ($1)", r.URL.Path)
		if err != nil {
			httpmetered.Write(w, err)
			return
		}
		w.WriteHeader(http.StatusCreated)
	}))
	post := func(path string, hangUp func(*pgtest.Flush) bool) int {
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		hungUp := hangUp == nil
		if !hungUp {
			wire.Once(hangUp, func(f *pgtest.Flush) {
				f.Deliver = func() { cancel(); hungUp = true; require.NoError(t, f.Pass()) }
			})
		}
		r := httptest.NewRequestWithContext(ctx, "POST", path, strings.NewReader(""))
		r.Header.Set("Idempotency-Key", path)
		w := httptest.NewRecorder()
		handler.ServeHTTP(w, r)
		require.True(t, hungUp, path)
		return w.Code
	}
	commits := func(f *pgtest.Flush) bool { return f.Has("commit") }
	for path, status := range map[string]int{"/": 201, "/sticky": 201, "/refused": 409} {
		post(path, commits)
		require.Equal(t, status, post(path, nil), path)
	}
	require.Zero(t, events.Sum(observe.Commit))
	require.Empty(t, failed)
	require.Equal(t, 1, pgtest.Count(t, owner, "metered.operations where refusal is not null"))
	require.Equal(t, 2, pgtest.Count(t, owner, "uploads"))
	require.Equal(t, 2, pgtest.Count(t, owner, "metered.ledger where scope = 'tries'"), "one of the client that left before the handler, one of its repetition")
}

// A client that leaves while the handler works ends it, and nothing is written.
func TestIdempotent_AHandlerEndsWithItsRequest(t *testing.T) {
	t.Parallel()
	owner, c := pgtest.SetUp(t, metered.Config{}, pgtest.Options{})
	once, err := httpmetered.Idempotent(c, httpmetered.IdempotentConfig{Tenant: func(*http.Request) (string, error) { return "ann", nil }})
	require.NoError(t, err)
	ctx, cancel := context.WithCancelCause(t.Context())
	left := errors.New("left")
	handler := once(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, err := httpmetered.Tx(r).Exec(r.Context(), "insert into uploads values ('a')")
		require.NoError(t, err)
		cancel(left)
		<-r.Context().Done()
		require.ErrorIs(t, context.Cause(r.Context()), left)
		httpmetered.Write(w, r.Context().Err())
	}))
	r := httptest.NewRequestWithContext(ctx, "POST", "/", strings.NewReader(""))
	r.Header.Set("Idempotency-Key", "k")
	handler.ServeHTTP(httptest.NewRecorder(), r)
	require.Zero(t, pgtest.Count(t, owner, "uploads"))
}

// A request's deadline is answered alike, whether the server met it first, by the timeout that the command gave it, or the handler did.
func TestIdempotent_ADeadlineIsATimeoutWhoeverMeetsItFirst(t *testing.T) {
	t.Parallel()
	_, c := pgtest.SetUp(t, metered.Config{}, pgtest.Options{})
	var failed []error
	once, err := httpmetered.Idempotent(c, httpmetered.IdempotentConfig{
		Tenant: func(*http.Request) (string, error) { return "ann", nil }, OnError: func(_ *http.Request, err error) { failed = append(failed, err) },
	})
	require.NoError(t, err)
	for who, handler := range map[string]http.HandlerFunc{
		"the server": func(w http.ResponseWriter, r *http.Request) {
			_, err := httpmetered.Tx(r).Exec(context.WithoutCancel(r.Context()), "select pg_sleep(60)")
			require.ErrorContains(t, err, "57014")
			httpmetered.Write(w, err)
		},
		"the handler": func(w http.ResponseWriter, r *http.Request) {
			<-r.Context().Done()
			httpmetered.Write(w, r.Context().Err())
		},
	} {
		ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
		r := httptest.NewRequestWithContext(ctx, "POST", "/", strings.NewReader(""))
		r.Header.Set("Idempotency-Key", `"`+who+`"`)
		w := httptest.NewRecorder()
		once(handler).ServeHTTP(w, r)
		cancel()
		require.Equal(t, 503, w.Code, who)
		require.Contains(t, w.Body.String(), `"code":"timeout"`, who)
		require.Equal(t, "1", w.Header().Get("Retry-After"), who)
	}
	require.Len(t, failed, 2)
	for _, err := range failed {
		require.ErrorIs(t, err, metered.ErrTimeout)
	}
}

// A limiter whose charge may or may not be committed cannot be asked: 503, as docs/http.md says, and not 500.
func TestLimit_ALostCommitIsUnavailable(t *testing.T) {
	t.Parallel()
	owner := pgtest.Open(t)
	pool, wire := pgtest.Tap(t, owner, nil)
	var failed []error
	cfg := httpmetered.LimitConfig{
		Key: byHeader, Limits: []budget.Limit{budget.PerWindow(10, time.Hour).Named("hourly")}, OnError: func(_ *http.Request, err error) { failed = append(failed, err) },
	}
	request := serve(t, ways(t, pool, cfg)["exact"])
	require.Equal(t, http.StatusTeapot, request("ann", 1).status)
	wire.Once(func(f *pgtest.Flush) bool { return f.Has(".charge_plain(") }, func(f *pgtest.Flush) { f.LoseAnswer() })
	r := request("ann", 1)
	require.Equal(t, 503, r.status)
	require.Equal(t, "commit_unknown", r.code())
	require.Equal(t, "1", r.header.Get("Retry-After"))
	require.Len(t, failed, 1)
	require.ErrorIs(t, failed[0], budget.ErrCommitUnknown)
}
