package main

import (
	"net/http"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// asked is a request that follows no redirect.
func (b *browser) asked(method, path string, header ...string) answer {
	b.h.t.Helper()
	request, err := http.NewRequest(method, b.h.bases[0]+path, nil)
	require.NoError(b.h.t, err)
	if b.cookie != nil {
		request.AddCookie(b.cookie)
	}
	for i := 0; i < len(header); i += 2 {
		request.Header.Set(header[i], header[i+1])
	}
	client := http.Client{CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
	response, err := client.Do(request)
	require.NoError(b.h.t, err)
	require.NoError(b.h.t, response.Body.Close())
	return answer{status: response.StatusCode, header: response.Header}
}

func TestCacheControl_IsOnEveryAnswer(t *testing.T) {
	t.Parallel()
	h := open(t, 1, quiet)
	h.till(nil)
	ben := h.people(h.org, 1)[0]
	hold := ben.holding(h.seats[0])
	nobody := *ben
	nobody.cookie = nil
	statuses := map[int]bool{}
	never := func(a answer, what string) {
		t.Helper()
		require.Equal(t, []string{"no-store"}, a.header.Values("Cache-Control"), "%d %s", a.status, what)
		statuses[a.status] = true
	}
	for _, b := range []*browser{h.admin, ben, &nobody} {
		for request := range endpoints(h.event, h.seats[1], h.blocks[0], hold) {
			method, path, _ := strings.Cut(request, " ")
			never(b.asked(method, path), request)
			never(b.asked(method, strings.Replace(path, h.event, h.otherEvent, 1)), request)
			never(b.asked(method, strings.Replace(path, h.event, "x", 1)), request)
		}
		for _, path := range []string{"/", "/events/" + h.event, "/events/" + h.event + "/report", "/events/x", "/events/" + h.otherEvent, "/nothing", "/api/nothing"} {
			never(b.asked(http.MethodGet, path), path)
		}
	}
	never(ben.asked(http.MethodPost, "/api/events/"+h.event+"/map"), "another method")
	never(ben.asked(http.MethodPost, ben.seatPath(h.seats[1], "hold"), "Sec-Fetch-Site", "cross-site"), "another site")
	never(ben.asked(http.MethodPost, "/login"), "no login")
	never(ben.asked(http.MethodPost, "/logout"), "logout")
	never(ben.asked(http.MethodGet, "/page/nothing.js"), "no such file")
	never(ben.hold(h.seats[5]), "created")
	never(ben.checkout("", hold), "ok")
	for _, status := range []int{200, 201, 303, 400, 401, 403, 404, 405, 409} {
		require.True(t, statuses[status], status)
	}
}

func TestCacheControl_AFileIsKeptAndAskedForAgain(t *testing.T) {
	t.Parallel()
	h := open(t, 1, quiet)
	for _, file := range []string{"seats.js", "seats.css", "icon.svg"} {
		a := h.admin.asked(http.MethodGet, "/page/"+file)
		require.Equal(t, http.StatusOK, a.status)
		require.Equal(t, "no-cache", a.header.Get("Cache-Control"))
		again := h.admin.asked(http.MethodGet, "/page/"+file, "If-None-Match", a.header.Get("ETag"))
		require.Equal(t, http.StatusNotModified, again.status)
		require.Equal(t, "no-cache", again.header.Get("Cache-Control"))
		require.Equal(t, http.StatusOK, h.admin.asked(http.MethodGet, "/page/"+file, "If-None-Match", `"another"`).status)
	}
}
