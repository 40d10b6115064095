package main

import (
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/internal/pgtest"
)

func TestSource_EachHasItsRoles(t *testing.T) {
	t.Parallel()
	h := open(t, 1, quiet)
	h.exec(`update hall.events set status = 'live' where id = $1`, h.event)
	allowed := map[role]string{
		customer: "web", scanner: "web scanner", boxOffice: "web scanner box_office", manager: "web scanner box_office",
	}
	seat := 0
	for as, by := range allowed {
		b := h.staff(as)
		for _, source := range []string{"web", "scanner", "box_office"} {
			before := h.written()
			a := b.holdBy(h.seats[seat], source)
			if !strings.Contains(" "+by+" ", " "+source+" ") {
				require.Equal(t, http.StatusForbidden, a.status, "%s by %s", as, source)
				require.Equal(t, "source_not_allowed", a.code())
				require.Equal(t, before, h.written())
				continue
			}
			require.Equal(t, http.StatusCreated, a.status, a.text)
			require.Equal(t, source, a.body["source"])
			require.Equal(t, source, one[string](h, `select source from hall.seats where id = $1`, h.seats[seat]))
			seat++
		}
	}
	h.verify()
}

func TestSource_EachSellsAtItsTime(t *testing.T) {
	t.Parallel()
	h := open(t, 1, quiet)
	clock := pgtest.SetClock(t, h.pool, noon)
	h.setSale(map[string]any{"opens": noon.Add(time.Hour), "closes": noon.Add(2 * time.Hour)})
	office := h.staff(manager)
	seat := 0
	for _, when := range []struct {
		at                      time.Duration
		status                  status
		web, scanner, boxOffice string // codes
	}{
		{0, statusPublished, "sale_not_open", "event_not_live", ""},
		{0, statusLive, "sale_not_open", "", ""},
		{time.Hour, statusPublished, "", "event_not_live", ""},
		{time.Hour, statusLive, "", "", ""},
		{2 * time.Hour, statusPublished, "sale_closed", "event_not_live", ""},
		{2 * time.Hour, statusLive, "sale_closed", "", ""},
		{2 * time.Hour, statusClosed, "sale_closed", "sale_closed", "sale_closed"},
	} {
		clock.Set(noon.Add(when.at))
		h.exec(`update hall.events set status = $2 where id = $1`, h.event, when.status)
		for source, code := range map[string]string{"web": when.web, "scanner": when.scanner, "box_office": when.boxOffice} {
			a := office.holdBy(h.seats[seat], source)
			require.Equal(t, code, a.code(), "%s, %s after noon, %s", source, when.at, when.status)
			seat++
		}
	}
	h.verify()
}

func TestSource_TheBoxOfficeMayHoldMoreThanTen(t *testing.T) {
	t.Parallel()
	h := open(t, 1, quiet)
	office := h.staff(boxOffice)
	for i := range 12 {
		require.Equal(t, http.StatusCreated, office.holdBy(h.seats[i], "box_office").status)
	}
	require.Zero(t, h.charged(office.user))
	for i := range 10 {
		require.Equal(t, http.StatusCreated, office.holdBy(h.seats[20+i], "web").status)
	}
	require.Equal(t, "too_many_holds", office.holdBy(h.seats[40], "web").code())
	h.verify()
}

func TestRoles_HaveTheirRightsAndNoMore(t *testing.T) {
	t.Parallel()
	h := open(t, 1, quiet)
	hold := h.people(h.org, 1)[0].holding(h.seats[0])
	needs := func(request string) string {
		_, path, _ := strings.Cut(request, " ")
		switch {
		case strings.HasSuffix(path, "/block"), strings.HasSuffix(path, "/unblock"), strings.HasSuffix(path, "/holds"):
			return "box_office manager"
		case strings.HasPrefix(request, "PUT "), strings.Contains(path, "/report"):
			return "manager"
		}
		return "customer scanner box_office manager"
	}
	for _, as := range []role{customer, scanner, boxOffice, manager} {
		b := h.staff(as)
		for request, body := range endpoints(h.event, h.seats[1], h.blocks[0], hold) {
			method, path, _ := strings.Cut(request, " ")
			if strings.HasSuffix(path, "/stream") {
				continue // it does not end
			}
			h.exec(`update hall.events set status = 'published' where id = $1`, h.event)
			a := b.ask(method, path, "", body)
			may := strings.Contains(" "+needs(request)+" ", " "+string(as)+" ")
			require.Equal(t, !may, a.status == http.StatusForbidden, "%s: %s: %s", as, request, a.text)
			if !may {
				require.Equal(t, "not_allowed", a.code())
			}
		}
		report := b.ask(http.MethodGet, "/events/"+h.event+"/report", "", nil)
		require.Equal(t, as == manager, report.status == http.StatusOK, report.text)
	}
	// A role that is taken away is gone with the next request.
	b := h.staff(manager)
	h.exec(`update hall.users set role = 'customer' where id = $1`, b.user)
	require.Equal(t, http.StatusForbidden, b.ask(http.MethodPost, b.seatPath(h.seats[2], "block"), "", nil).status)
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
