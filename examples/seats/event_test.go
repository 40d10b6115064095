package main

import (
	"net/http"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/internal/pgtest"
)

func TestSaleWindow_SellsFromWhenItOpensUntilBeforeItCloses(t *testing.T) {
	t.Parallel()
	h := open(t, 1, quiet)
	clock := pgtest.SetClock(t, h.pool, noon)
	h.setSale(map[string]any{"opens": noon.Add(90 * time.Second), "closes": noon.Add(time.Hour)})
	ben := h.people(h.org, 1)[0]
	before := h.written()
	a := ben.hold(h.seats[0])
	require.Equal(t, http.StatusConflict, a.Status, a.Body)
	require.Equal(t, "sale_not_open", a.code())
	require.Equal(t, "90", a.Header.Get("Retry-After"))
	clock.Set(noon.Add(90*time.Second - time.Microsecond))
	require.Equal(t, "sale_not_open", ben.hold(h.seats[0]).code())
	require.Equal(t, before, h.written())
	clock.Set(noon.Add(90 * time.Second))
	require.Equal(t, http.StatusCreated, ben.hold(h.seats[0]).Status)

	clock.Set(noon.Add(time.Hour - time.Microsecond))
	held := ben.holding(h.seats[1])
	clock.Set(noon.Add(time.Hour))
	a = ben.hold(h.seats[2])
	require.Equal(t, "sale_closed", a.code())
	require.Empty(t, a.Header.Get("Retry-After"))
	require.Equal(t, http.StatusOK, ben.checkout("", held).Status, "seats held when the sale closes can be paid for")
	require.Equal(t, []string{"sale_not_open", "sale_not_open", "sale_closed"}, h.refusals())
	h.verify()
}

func TestStatus_EachRefusesWithACodeOfItsOwn(t *testing.T) {
	t.Parallel()
	h := open(t, 1, quiet)
	paid := h.till(nil)
	people := h.people(h.org, 2)
	held := people[0].holding(h.seats[0])
	for status, code := range map[status]string{statusDraft: "event_draft", statusClosed: "sale_closed", statusCancelled: "event_cancelled"} {
		h.setSale(map[string]any{"status": status})
		before := h.written()
		a := people[1].hold(h.seats[1])
		require.Equal(t, http.StatusConflict, a.Status, status)
		require.Equal(t, code, a.code())
		require.Equal(t, code, people[0].checkout("", held).code())
		require.Equal(t, before, h.written())
		require.Equal(t, code, people[0].ask(http.MethodGet, "/api/events/"+h.event+"/map", "", nil).body["sale"])
	}
	h.settled(paid)
	h.setSale(map[string]any{"status": "live"})
	require.Equal(t, http.StatusCreated, people[1].hold(h.seats[1]).Status)
	require.Equal(t, http.StatusOK, people[0].checkout("", held).Status)
	h.verify()
}

func TestSource_EachSellsAtItsTimeToItsRoles(t *testing.T) {
	t.Parallel()
	h := open(t, 1, quiet)
	clock := pgtest.SetClock(t, h.pool, noon)
	office, ben := h.staff(boxOffice), h.people(h.org, 1)[0]
	seat := 0
	for _, when := range []struct {
		at                      time.Duration
		status                  status
		web, scanner, boxOffice string // codes
	}{
		{0, statusPublished, "sale_not_open", "event_not_live", ""},
		{0, statusLive, "sale_not_open", "", ""},
		{time.Hour, statusPublished, "", "event_not_live", ""},
		{2 * time.Hour, statusLive, "sale_closed", "", ""},
		{2 * time.Hour, statusClosed, "sale_closed", "sale_closed", "sale_closed"},
	} {
		clock.Set(noon.Add(when.at))
		h.setSale(map[string]any{"status": when.status, "opens": noon.Add(time.Hour), "closes": noon.Add(2 * time.Hour)})
		for source, code := range map[string]string{"web": when.web, "scanner": when.scanner, "box_office": when.boxOffice} {
			a := office.holdBy(h.seats[seat], source)
			require.Equal(t, code, a.code(), "%s, %s after noon, %s", source, when.at, when.status)
			if source != "web" {
				require.Equal(t, "source_not_allowed", ben.holdBy(h.seats[seat], source).code())
			}
			seat++
		}
	}
	require.Equal(t, http.StatusBadRequest, ben.holdBy(h.seats[seat], "nobody").Status)
	h.verify()
}

func TestHold_SaysWhetherASeatIsHeldSoldOrBlocked(t *testing.T) {
	t.Parallel()
	h := open(t, 1, quiet)
	clock := pgtest.SetClock(t, h.pool, noon)
	people := h.people(h.org, 2)
	people[0].holding(h.seats[0])
	require.Equal(t, http.StatusOK, people[0].checkout("", people[0].holding(h.seats[1])).Status)
	require.Equal(t, http.StatusOK, h.admin.ask(http.MethodPost, h.admin.seatPath(h.seats[2], "block"), "", nil).Status)
	clock.Advance(100*time.Second + 500*time.Millisecond)

	a := people[1].hold(h.seats[0])
	require.Equal(t, http.StatusConflict, a.Status)
	until := noon.Add(5 * time.Minute)
	require.Equal(t, map[string]any{
		"title": "Conflict", "status": 409.0, "detail": "Somebody else is holding this seat.", "code": "seat_held",
		"retry_after_seconds": 200.0, "held_until": until.Format(time.RFC3339), "held_until_unix": float64(until.Unix()), "expires_in_seconds": 199.0,
	}, a.body)
	require.Equal(t, "200", a.Header.Get("Retry-After"), "by then it is free: rounded up")
	require.NotContains(t, a.Body, people[0].user)
	for i, code := range []string{"seat_sold", "seat_blocked"} {
		a := people[1].hold(h.seats[i+1])
		require.Equal(t, http.StatusConflict, a.Status)
		require.Equal(t, code, a.code())
		require.Empty(t, a.Header.Get("Retry-After"))
		require.NotContains(t, a.Body, "held_until")
	}
	require.Equal(t, []string{"seat_held", "seat_sold", "seat_blocked"}, h.refusals())
	h.verify()
}
