package main

import (
	"net/http"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/internal/pgtest"
)

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
	require.Equal(t, http.StatusBadRequest, ben.holdBy(h.seats[seat], "nobody").status)
	h.verify()
}

func TestHold_SaysWhetherASeatIsHeldSoldOrBlocked(t *testing.T) {
	t.Parallel()
	h := open(t, 1, quiet)
	clock := pgtest.SetClock(t, h.pool, noon)
	people := h.people(h.org, 2)
	people[0].holding(h.seats[0])
	require.Equal(t, http.StatusOK, people[0].checkout("", people[0].holding(h.seats[1])).status)
	require.Equal(t, http.StatusOK, h.admin.ask(http.MethodPost, h.admin.seatPath(h.seats[2], "block"), "", nil).status)
	clock.Advance(100*time.Second + 500*time.Millisecond)

	a := people[1].hold(h.seats[0])
	require.Equal(t, http.StatusConflict, a.status)
	until := noon.Add(5 * time.Minute)
	require.Equal(t, map[string]any{
		"title": "Conflict", "status": 409.0, "detail": "Somebody else is holding this seat.", "code": "seat_held",
		"retry_after_seconds": 200.0, "held_until": until.Format(time.RFC3339), "held_until_unix": float64(until.Unix()), "expires_in_seconds": 199.0,
	}, a.body)
	require.Equal(t, "200", a.header.Get("Retry-After"), "by then it is free: rounded up")
	require.NotContains(t, a.text, people[0].user)
	for i, code := range []string{"seat_sold", "seat_blocked"} {
		a := people[1].hold(h.seats[i+1])
		require.Equal(t, http.StatusConflict, a.status)
		require.Equal(t, code, a.code())
		require.Empty(t, a.header.Get("Retry-After"))
		require.NotContains(t, a.text, "held_until")
	}
	require.Equal(t, []string{"seat_held", "seat_sold", "seat_blocked"}, h.refusals())
	h.verify()
}
