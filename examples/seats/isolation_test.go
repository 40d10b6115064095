package main

import (
	"context"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/internal/pgtest"
)

// endpoints are all of the API, with the ids given.
func endpoints(event, seat, block, hold string) map[string]any {
	e := "/api/events/" + event
	return map[string]any{
		"GET " + e + "/map":                         nil,
		"GET " + e + "/stream":                      nil,
		"POST " + e + "/seats/" + seat + "/hold":    nil,
		"GET " + e + "/seats/" + seat + "/history":  nil,
		"POST " + e + "/seats/" + seat + "/block":   nil,
		"POST " + e + "/seats/" + seat + "/unblock": nil,
		"PUT " + e + "/blocks/" + block:             map[string]any{"capacity": 1},
		"PUT " + e:                                  map[string]any{"status": "closed"},
		"PUT " + e + "/sale":                        map[string]any{"hold_seconds": 60},
		"GET " + e + "/holds":                       nil,
		"GET " + e + "/report":                      nil,
		"GET " + e + "/report.svg?by=hour":          nil,
		"POST " + e + "/checkout":                   map[string]any{"holds": []string{hold}},
		"GET /api/holds/" + hold:                    nil,
		"DELETE /api/holds/" + hold:                 nil,
	}
}

func TestIsolation_AnotherOrganisationsIsAsUnknown(t *testing.T) {
	t.Parallel()
	h := open(t, 1, quiet)
	theirs := h.seatsOf(h.otherEvent)
	finn := h.people(h.otherOrg, 1)[0]
	a := finn.ask(http.MethodPost, "/api/events/"+h.otherEvent+"/seats/"+theirs[0]+"/hold", "", nil)
	require.Equal(t, http.StatusCreated, a.status, a.text)
	block := one[string](h, `select id::text from hall.blocks where event = $1 limit 1`, h.otherEvent)
	before, state := h.written(), one[string](h, `select string_agg(e.status || b.capacity, ',' order by b.id) from hall.events e join hall.blocks b on b.event = e.id`)

	// An admin of this organisation asks for everything of the other.
	unknown := metered.NewID()
	noHold := a.hold()[:39] + unknown
	real := endpoints(h.otherEvent, theirs[0], block, a.hold())
	for request, body := range real {
		method, path, _ := strings.Cut(request, " ")
		got := h.admin.ask(method, path, "", body)
		made := strings.NewReplacer(h.otherEvent, unknown, theirs[0], unknown, block, unknown, a.hold(), noHold).Replace(path)
		if body, ok := body.(map[string]any); ok && body["holds"] != nil {
			body["holds"] = []string{noHold}
		}
		want := h.admin.ask(method, made, "", body)
		require.Equal(t, http.StatusNotFound, got.status, request)
		require.Equal(t, want.text, got.text, request)
		require.Equal(t, want.header.Get("Content-Type"), got.header.Get("Content-Type"), request)
	}
	// Their seat by way of one's own event, and one's own by way of theirs.
	for _, path := range []string{
		"/api/events/" + h.event + "/seats/" + theirs[0] + "/hold", "/api/events/" + h.otherEvent + "/seats/" + h.seats[0] + "/hold",
		"/api/events/" + h.event + "/seats/" + theirs[0] + "/block",
	} {
		require.Equal(t, http.StatusNotFound, h.admin.ask(http.MethodPost, path, "", nil).status, path)
	}
	require.Equal(t, before, h.written())
	require.Equal(t, state, one[string](h, `select string_agg(e.status || b.capacity, ',' order by b.id) from hall.events e join hall.blocks b on b.event = e.id`))

	// Nor does another user of the same organisation learn anything of a hold.
	gwen := h.people(h.otherOrg, 1)[0]
	for _, method := range []string{http.MethodGet, http.MethodDelete} {
		got, want := gwen.ask(method, "/api/holds/"+a.hold(), "", nil), gwen.ask(method, "/api/holds/"+noHold, "", nil)
		require.Equal(t, http.StatusNotFound, got.status)
		require.Equal(t, want.text, got.text)
	}
	history := gwen.ask(http.MethodGet, "/api/events/"+h.otherEvent+"/seats/"+theirs[0]+"/history", "", nil)
	require.Equal(t, http.StatusOK, history.status)
	require.Contains(t, history.text, `"placed"`)
	require.NotContains(t, history.text, finn.user)
	require.Contains(t, h.otherAdmin.ask(http.MethodGet, "/api/events/"+h.otherEvent+"/seats/"+theirs[0]+"/history", "", nil).text, finn.user)
	require.Equal(t, http.StatusOK, finn.ask(http.MethodGet, "/api/holds/"+a.hold(), "", nil).status)
	h.verify()
}

// sent counts the statements of a pool's connections, those of the listener aside.
type sent struct{ n atomic.Int64 }

func (s *sent) TraceQueryStart(ctx context.Context, _ *pgx.Conn, q pgx.TraceQueryStartData) context.Context {
	if !strings.HasPrefix(q.SQL, "listen") && !strings.HasPrefix(q.SQL, "-- ping") {
		s.n.Add(1)
	}
	return ctx
}

func (s *sent) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}

func (s *sent) TraceBatchStart(ctx context.Context, _ *pgx.Conn, _ pgx.TraceBatchStartData) context.Context {
	s.n.Add(1)
	return ctx
}

func (s *sent) TraceBatchQuery(context.Context, *pgx.Conn, pgx.TraceBatchQueryData) {}

func (s *sent) TraceBatchEnd(context.Context, *pgx.Conn, pgx.TraceBatchEndData) {}

// Malformed requests of a signed-in user reach only the audit table.
func TestRequests_WithoutSessionOrWithMalformedIDsDoNotReachTheDatabase(t *testing.T) {
	t.Parallel()
	var statements sent
	pool := pgtest.OpenWith(t, pgtest.Options{Config: func(c *pgxpool.Config) { c.ConnConfig.Tracer = &statements }})
	h := openOn(t, pool, 1, quiet)
	ben := h.people(h.org, 1)[0]
	hold := ben.holding(h.seats[0])
	nobody, forged, cut := *ben, *ben, *ben
	nobody.cookie = nil
	payload, mac, _ := strings.Cut(ben.cookie.Value, ".")
	others, _, _ := strings.Cut(h.admin.cookie.Value, ".")
	forged.cookie = &http.Cookie{Name: sessionCookie, Value: others + "." + mac}
	cut.cookie = &http.Cookie{Name: sessionCookie, Value: payload}

	before := statements.n.Load()
	for _, who := range []browser{nobody, forged, cut} {
		for request, body := range endpoints(h.event, h.seats[1], h.blocks[0], hold) {
			method, path, _ := strings.Cut(request, " ")
			require.Equal(t, http.StatusUnauthorized, who.ask(method, path, "", body).status, request)
		}
	}
	require.Equal(t, before, statements.n.Load())
	written := 0
	for _, bad := range []string{"1", "x'; drop table hall.seats; --", "%00", strings.ToUpper(h.seats[1]), h.seats[1] + "0", "{" + h.seats[1] + "}"} {
		bad = strings.NewReplacer("'", "%27", " ", "%20", ";", "%3B", "{", "%7B", "}", "%7D").Replace(bad)
		for request, body := range endpoints(bad, bad, bad, bad) {
			method, path, _ := strings.Cut(request, " ")
			require.Equal(t, http.StatusBadRequest, h.admin.ask(method, path, "", body).status, request)
			if method != http.MethodGet {
				written++
			}
		}
	}
	require.Equal(t, http.StatusBadRequest, ben.ask(http.MethodPost, ben.seatPath(h.seats[1], "hold"), strings.Repeat("k", 256), nil).status)
	require.Equal(t, before+int64(written)+1, statements.n.Load())
	require.Len(t, h.refusals(), written+1)

	// The session of a deleted user, and a request from another site's page.
	h.exec(`delete from hall.users where id = $1`, ben.user)
	require.Equal(t, http.StatusUnauthorized, ben.hold(h.seats[1]).status)
	request, err := http.NewRequest(http.MethodPost, h.bases[0]+h.admin.seatPath(h.seats[1], "hold"), nil)
	require.NoError(t, err)
	request.AddCookie(h.admin.cookie)
	request.Header.Set("Sec-Fetch-Site", "cross-site")
	response, err := http.DefaultClient.Do(request)
	require.NoError(t, err)
	require.NoError(t, response.Body.Close())
	require.Equal(t, http.StatusForbidden, response.StatusCode)

	for _, body := range []any{map[string]any{"capacity": -1}, map[string]any{"capacity": "1"}, map[string]any{}, map[string]any{"capacity": 1, "org": h.otherOrg}, "x"} {
		require.Equal(t, http.StatusBadRequest, h.admin.ask(http.MethodPut, "/api/events/"+h.event+"/blocks/"+h.blocks[0], "", body).status, "%v", body)
	}
	require.Equal(t, 1, h.written().Holds)
}
