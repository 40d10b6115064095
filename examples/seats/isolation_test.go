package main

import (
	"net/http"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
)

// endpoints are all of the API, with the ids given.
func endpoints(event, seat, block, hold string) map[string]any {
	e := "/api/events/" + event
	return map[string]any{
		"GET " + e + "/map":                         nil,
		"GET " + e + "/stream":                      nil,
		"POST " + e + "/seats/" + seat + "/hold":    nil,
		"POST " + e + "/seats/" + seat + "/block":   nil,
		"POST " + e + "/seats/" + seat + "/unblock": nil,
		"PUT " + e + "/blocks/" + block:             map[string]any{"capacity": 1},
		"PUT " + e:                                  map[string]any{"status": "published"},
		"POST " + e + "/checkout":                   map[string]any{"holds": []string{hold}},
		"DELETE /api/holds/" + hold:                 nil,
	}
}

func TestIsolation_AnotherOrganisationsIsAsUnknown(t *testing.T) {
	t.Parallel()
	h := open(t, 1, quiet)
	theirs := h.seatsOf(h.otherEvent)
	finn := h.people(h.otherOrg, 1)[0]
	a := finn.ask(http.MethodPost, "/api/events/"+h.otherEvent+"/seats/"+theirs[0]+"/hold", "", nil)
	require.Equal(t, http.StatusCreated, a.Status, a.Body)
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
		require.Equal(t, http.StatusNotFound, got.Status, request)
		require.Equal(t, want.Body, got.Body, request)
		require.Equal(t, want.Header.Get("Content-Type"), got.Header.Get("Content-Type"), request)
	}
	// Their seat by way of one's own event, and one's own by way of theirs.
	for _, path := range []string{
		"/api/events/" + h.event + "/seats/" + theirs[0] + "/hold", "/api/events/" + h.otherEvent + "/seats/" + h.seats[0] + "/hold",
		"/api/events/" + h.event + "/seats/" + theirs[0] + "/block",
	} {
		require.Equal(t, http.StatusNotFound, h.admin.ask(http.MethodPost, path, "", nil).Status, path)
	}
	require.Equal(t, before, h.written())
	require.Equal(t, state, one[string](h, `select string_agg(e.status || b.capacity, ',' order by b.id) from hall.events e join hall.blocks b on b.event = e.id`))

	// Nor does another user of the same organisation learn anything of a hold.
	gwen := h.people(h.otherOrg, 1)[0]
	got, want := gwen.cancel(a.hold()), gwen.cancel(noHold)
	require.Equal(t, http.StatusNotFound, got.Status)
	require.Equal(t, want.Body, got.Body)
	require.Equal(t, http.StatusOK, finn.cancel(a.hold()).Status)
	h.verify()
}

func TestRequests_WithoutSessionOrWithMalformedIDsDoNothing(t *testing.T) {
	t.Parallel()
	h := open(t, 1, quiet)
	ben := h.people(h.org, 1)[0]
	hold := ben.holding(h.seats[0])
	before := h.written()
	nobody, forged := *ben, *ben
	nobody.cookie = ""
	forged.cookie += "x"
	for _, who := range []browser{nobody, forged} {
		for request, body := range endpoints(h.event, h.seats[1], h.blocks[0], hold) {
			method, path, _ := strings.Cut(request, " ")
			require.Equal(t, http.StatusUnauthorized, who.ask(method, path, "", body).Status, request)
		}
	}
	for _, bad := range []string{"1", "x%27%3B", "%00", strings.ToUpper(h.seats[1]), h.seats[1] + "0"} {
		for request, body := range endpoints(bad, bad, bad, bad) {
			method, path, _ := strings.Cut(request, " ")
			require.Equal(t, http.StatusBadRequest, h.admin.ask(method, path, "", body).Status, request)
		}
	}
	for _, body := range []any{map[string]any{"capacity": -1}, map[string]any{}, map[string]any{"capacity": 1, "org": h.otherOrg}, "x"} {
		require.Equal(t, http.StatusBadRequest, h.admin.ask(http.MethodPut, "/api/events/"+h.event+"/blocks/"+h.blocks[0], "", body).Status, "%v", body)
	}
	h.exec(`delete from hall.users where id = $1`, ben.user)
	require.Equal(t, http.StatusUnauthorized, ben.hold(h.seats[1]).Status, "of a deleted user")
	require.Equal(t, before, h.written())
}
