package httpmetered_test

import (
	"fmt"
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
)

const page = "https://example.com/docs/idempotency?v=7"

// keyed returns a handler below Idempotent, whose requests it sends as ann's.
func keyed(t *testing.T, cfg httpmetered.IdempotentConfig, handler http.HandlerFunc) (send func(body string, keys ...string) *httptest.ResponseRecorder) {
	t.Helper()
	_, client := pgtest.SetUp(t, metered.Config{})
	cfg.Tenant = func(*http.Request) (string, error) { return "ann", nil }
	once, err := httpmetered.Idempotent(client, cfg)
	require.NoError(t, err)
	return func(body string, keys ...string) *httptest.ResponseRecorder {
		r, w := httptest.NewRequest("POST", "/orders", strings.NewReader(body)), httptest.NewRecorder()
		r.Header["Idempotency-Key"] = keys
		once(handler).ServeHTTP(w, r)
		return w
	}
}

func TestIdempotent_MarksReplaysAndNothingElse(t *testing.T) {
	t.Parallel()
	refuse := budget.Charge{Scope: "stock", Amount: 2, Limits: []budget.Limit{budget.Lifetime(1)}}
	send := keyed(t, httpmetered.IdempotentConfig{
		Command: func(_ *http.Request, body []byte) (cmd metered.Command, _ error) {
			if string(body) == "refused" {
				cmd.Charges, cmd.RecordRefusal = []budget.Charge{refuse}, true
			}
			return cmd, nil
		},
	}, func(w http.ResponseWriter, r *http.Request) {
		if r.ContentLength == 0 {
			w.WriteHeader(http.StatusTeapot)
			return
		}
		w.WriteHeader(http.StatusCreated)
	})
	for _, c := range []struct {
		key, body, marks string
		status           int
	}{
		{"a", "body", " true true", 201},
		{"b", "refused", " true true", 409}, // on record
		{"c", "", "  ", 418},                // not on record
	} {
		marks := make([]string, 3)
		for i := range marks {
			w := send(c.body, c.key)
			require.Equal(t, c.status, w.Code)
			marks[i] = w.Header().Get("Idempotent-Replayed")
		}
		require.Equal(t, c.marks, strings.Join(marks, " "), c.body)
	}
	require.Empty(t, send("another body", "a").Header().Get("Idempotent-Replayed"))
}

// As the draft has it: the problem's type, or a Link, leads to the page about keys.
func TestIdempotent_FaultsOfAKeyLeadToItsDocumentation(t *testing.T) {
	t.Parallel()
	exceeded := budget.Charge{Scope: "calls", Amount: 2, Limits: []budget.Limit{budget.PerWindow(1, time.Hour)}}
	config := httpmetered.IdempotentConfig{
		Documentation: page,
		Command: func(_ *http.Request, body []byte) (cmd metered.Command, _ error) {
			if string(body) == "refused" {
				cmd.Charges = []budget.Charge{exceeded}
			}
			return cmd, nil
		},
	}
	var again func(w http.ResponseWriter)
	send := keyed(t, config, func(w http.ResponseWriter, r *http.Request) {
		if again != nil {
			again(w)
			return
		}
		w.WriteHeader(http.StatusCreated)
	})
	require.Equal(t, 201, send("body", "k").Code)
	at := fmt.Sprintf("%012x", time.Now().AddDate(0, 0, 2).UnixMilli())
	later := at[:8] + "-" + at[8:] + metered.NewID()[13:]
	for _, c := range []struct {
		status int
		code   string
		w      *httptest.ResponseRecorder
	}{
		{400, "idempotency_key_missing", send("body")},
		{400, "idempotency_key_invalid", send("body", "k", "k")},
		{400, "operation_future", send("body", later)},
		{422, "operation_conflict", send("another body", "k")},
	} {
		require.Equal(t, c.status, c.w.Code, c.code)
		require.Contains(t, c.w.Body.String(), c.code)
		require.Contains(t, c.w.Body.String(), `"type":"`+page+`"`)
		require.Equal(t, "<"+page+`>; rel="describedby"`, c.w.Header().Get("Link"), c.code)
	}
	var inner *httptest.ResponseRecorder
	again = func(w http.ResponseWriter) {
		again = nil
		inner = send("body", "flying")
		w.WriteHeader(http.StatusCreated)
	}
	require.Equal(t, 201, send("body", "flying").Code)
	require.Equal(t, 409, inner.Code)
	require.Equal(t, "<"+page+`>; rel="describedby"`, inner.Header().Get("Link"))

	refused := send("refused", "other")
	require.Equal(t, 429, refused.Code)
	require.Empty(t, refused.Header().Get("Link"), "not about the key")

	for _, bad := range []string{"/relative", "https://", "ftp://example.com/", "https://example.com/a b", "https://example.com/>;", "javascript:alert(1)"} {
		_, err := httpmetered.Idempotent(&metered.Client{}, httpmetered.IdempotentConfig{Tenant: func(*http.Request) (string, error) { return "ann", nil }, Documentation: bad})
		require.ErrorContains(t, err, "Documentation", bad)
	}
}

// A limit that is tried lets everything through, and clients do not see it.
func TestLimit_ObservedLimitsAreNeitherShownNorRefuse(t *testing.T) {
	t.Parallel()
	pool := pgtest.Open(t)
	ledger, err := budget.New(budget.Config{LockTimeout: time.Minute})
	require.NoError(t, err)
	tried := budget.PerWindow(1, time.Hour).Named("tried")
	tried.Observe = true
	limit, err := httpmetered.Limit(pool, ledger, httpmetered.LimitConfig{
		Kind: "api", Key: func(*http.Request) (string, error) { return "ann", nil },
		Limits: []budget.Limit{budget.PerWindow(3, time.Hour).Named("hourly"), tried},
	})
	require.NoError(t, err)
	handler := limit(http.NotFoundHandler())
	for i, status := range []int{404, 404, 404, 429} {
		w := httptest.NewRecorder()
		handler.ServeHTTP(w, httptest.NewRequest("GET", "/", nil))
		require.Equal(t, status, w.Code, i)
		require.NotContains(t, w.Header().Get("RateLimit")+w.Header().Get("RateLimit-Policy"), "tried")
	}
}
