package console_test

import (
	"io"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/console"
	"github.com/pgmetered/metered/internal/pgtest"
)

// Only GET and HEAD are answered, with a policy under which nothing runs that is not ours.
func TestHandler_AnswersGetAndHeadUnderAStrictPolicy(t *testing.T) {
	t.Parallel()
	w := newWorld(t, console.Config{}, "")
	for _, name := range []string{"", "scopes", "scope", "live", "console.css", "usage.svg", "nothing"} {
		for _, method := range []string{"POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT", "QUERY"} {
			r := httptest.NewRecorder()
			w.page.ServeHTTP(r, httptest.NewRequest(method, "/"+name, nil))
			require.Equal(t, http.StatusMethodNotAllowed, r.Code, "%s %s", method, name)
			require.Equal(t, "GET, HEAD", r.Header().Get("Allow"))
		}
		response, err := pgtest.HTTP.Head(w.url(name))
		require.NoError(t, err)
		got, body := response.Header, response.Body
		none, err := io.ReadAll(body)
		require.NoError(t, err)
		require.NoError(t, body.Close())
		require.Empty(t, none)
		policy := got.Get("Content-Security-Policy")
		require.Contains(t, policy, "default-src 'none'", name)
		require.Contains(t, policy, "frame-ancestors 'none'", name)
		require.NotContains(t, policy, "unsafe-inline", name)
		require.NotContains(t, policy, "*", name)
		require.Equal(t, "nosniff", got.Get("X-Content-Type-Options"))
		require.Equal(t, "no-referrer", got.Get("Referrer-Policy"))
	}
	response, _ := w.get(w.url("console.js"))
	tag := response.Header.Get("ETag")
	require.NotEmpty(t, tag)
	again, err := http.NewRequest(http.MethodGet, w.url("console.js"), nil)
	require.NoError(t, err)
	again.Header.Set("If-None-Match", tag)
	response, err = pgtest.HTTP.Do(again)
	require.NoError(t, err)
	require.NoError(t, response.Body.Close())
	require.Equal(t, http.StatusNotModified, response.StatusCode)
}

func TestHandler_NamesMissingPages(t *testing.T) {
	t.Parallel()
	w := newWorld(t, console.Config{}, "")
	for _, name := range []string{"nothing", "scope/", "a/b/c", "console.html", "page/layout.html", "hold?tenant=acme&id=x", "operation?tenant=shop&id=x", "live?page=scopes", "live?page=scope", "live?page=hold&tenant=acme", "usage.svg?scope=x&limit=no", "holds.svg?scope=x"} {
		response, body := w.get(w.url("") + name)
		require.Equal(t, http.StatusNotFound, response.StatusCode, name)
		n := parse(t, body)
		checkPage(t, name, n)
		home, err := url.Parse(w.url("") + name)
		require.NoError(t, err)
		for _, link := range all(n, "link", "a")[1:] { // the first one leads to the stylesheet from wherever it is
			href, _ := attr(link, "href")
			to, err := home.Parse(href)
			require.NoError(t, err)
			require.True(t, strings.HasPrefix(to.String(), w.url("")), "%s leads to %s", name, to)
		}
	}
	for _, name := range []string{"holds?state=open", "operations?state=x", "scopes?after=" + strings.Repeat("x", 300), "scope?scope=" + strings.Repeat("x", 256), "scope?scope=%ff", "hold?tenant=%00&id=x", "scope"} {
		response, body := w.get(w.url("") + name)
		require.Equal(t, http.StatusBadRequest, response.StatusCode, "%s: %s", name, text(parse(t, body)))
	}
}

// A request for the prefix itself leads to where relative links work.
func TestHandler_LeadsToItsRoot(t *testing.T) {
	t.Parallel()
	w := newWorld(t, console.Config{}, "")
	r := httptest.NewRecorder()
	http.StripPrefix("/ops/console", w.page).ServeHTTP(r, httptest.NewRequest(http.MethodGet, "/ops/console?x=1", nil))
	require.Equal(t, http.StatusPermanentRedirect, r.Code)
	require.Equal(t, "./console/", r.Header().Get("Location"))
}

func TestNew_RefusesSettingsOutOfBounds(t *testing.T) {
	t.Parallel()
	w := newWorld(t, console.Config{}, "")
	for field, cfg := range map[string]console.Config{
		"Config.Schema":      {Schema: "a b"},
		"Config.RiverSchema": {RiverSchema: strings.Repeat("x", 64)},
		"Config.Refresh":     {Refresh: time.Millisecond},
		"Config.Timeout":     {Timeout: time.Hour},
		"Config.MaxConns":    {MaxConns: -1},
		"Config.MaxViewers":  {MaxViewers: 10_001},
		"Config.RiverUI":     {RiverUI: "javascript:alert(1)"},
	} {
		_, err := console.New(w.reader, cfg)
		var refused *budget.ArgumentError
		require.ErrorAs(t, err, &refused)
		require.Equal(t, field, refused.Field)
	}
	_, err := console.New(nil, console.Config{})
	require.Error(t, err)
}

// A Handler that New did not make answers that, and panics in no request.
func TestHandler_ThatNewDidNotMakeSaysSo(t *testing.T) {
	t.Parallel()
	for _, h := range []*console.Handler{nil, new(console.Handler)} {
		r := httptest.NewRecorder()
		h.ServeHTTP(r, httptest.NewRequest(http.MethodGet, "/", nil))
		require.Equal(t, http.StatusInternalServerError, r.Code)
		require.Contains(t, r.Body.String(), "was not made by New")
		h.Close()
	}
}
