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
	require.Equal(t, http.StatusConflict, a.status, a.text)
	require.Equal(t, "sale_not_open", a.code())
	require.Equal(t, "90", a.header.Get("Retry-After"))
	clock.Set(noon.Add(90*time.Second - time.Microsecond))
	a = ben.hold(h.seats[0])
	require.Equal(t, "sale_not_open", a.code())
	require.Equal(t, "1", a.header.Get("Retry-After"))
	require.Equal(t, before, h.written())
	clock.Set(noon.Add(90 * time.Second))
	require.Equal(t, http.StatusCreated, ben.hold(h.seats[0]).status)

	clock.Set(noon.Add(time.Hour - time.Microsecond))
	require.Equal(t, http.StatusCreated, ben.hold(h.seats[1]).status)
	clock.Set(noon.Add(time.Hour))
	before = h.written()
	a = ben.hold(h.seats[2])
	require.Equal(t, http.StatusConflict, a.status, a.text)
	require.Equal(t, "sale_closed", a.code())
	require.Empty(t, a.header.Get("Retry-After"))
	require.Equal(t, before, h.written())
	require.Equal(t, []string{"sale_not_open", "sale_not_open", "sale_closed"}, h.refusals())

	h.setSale(map[string]any{}) // without a window
	require.Equal(t, http.StatusCreated, ben.hold(h.seats[2]).status)
	h.verify()
}

func TestStatus_EachRefusesWithACodeOfItsOwn(t *testing.T) {
	t.Parallel()
	h := open(t, 1, quiet)
	paid := h.till(nil)
	people := h.people(h.org, 2)
	held := people[0].holding(h.seats[0])
	for status, code := range map[status]string{
		statusDraft: "event_draft", statusClosed: "sale_closed", statusCancelled: "event_cancelled", statusArchived: "event_archived",
	} {
		h.exec(`update hall.events set status = $2 where id = $1`, h.event, status)
		before := h.written()
		a := people[1].hold(h.seats[1])
		require.Equal(t, http.StatusConflict, a.status, status)
		require.Equal(t, code, a.code())
		require.Equal(t, code, people[0].checkout("", held).code())
		require.Equal(t, before, h.written())
		require.Equal(t, code, people[0].ask(http.MethodGet, "/api/events/"+h.event+"/map", "", nil).body["sale"])
	}
	h.settled(paid)
	h.exec(`update hall.events set status = 'live' where id = $1`, h.event)
	require.Equal(t, http.StatusCreated, people[1].hold(h.seats[1]).status)
	require.Equal(t, http.StatusOK, people[0].checkout("", held).status)
	h.verify()
}

func TestHoldTime_IsThatOfTheEvent(t *testing.T) {
	t.Parallel()
	h := open(t, 1, quiet)
	clock := pgtest.SetClock(t, h.pool, noon)
	people := h.people(h.org, 2)
	h.setSale(map[string]any{"hold_seconds": 90})
	first := people[0].hold(h.seats[0])
	require.Equal(t, 90.0, first.body["expires_in_seconds"])
	h.setSale(map[string]any{}) // back to the process's setting. Present holds keep their time
	require.Equal(t, 300.0, people[0].hold(h.seats[1]).body["expires_in_seconds"])
	clock.Advance(90*time.Second - time.Microsecond)
	require.Equal(t, "seat_held", people[1].hold(h.seats[0]).code())
	clock.Advance(time.Microsecond)
	require.Equal(t, http.StatusCreated, people[1].hold(h.seats[0]).status)
	require.Equal(t, "hold_expired", people[0].checkout("", first.hold()).code())
	h.verify()
}

func TestHoldTime_EndsWithTheSaleOnlyIfTheEventSaysSo(t *testing.T) {
	t.Parallel()
	h := open(t, 1, quiet)
	clock := pgtest.SetClock(t, h.pool, noon)
	paid := h.till(nil)
	ben, office := h.people(h.org, 1)[0], h.staff(boxOffice)
	closes := noon.Add(2 * time.Minute)
	long := ben.hold(h.seats[0])
	h.setSale(map[string]any{"closes": closes, "holds_end_with_sale": true})
	short := ben.hold(h.seats[1])
	require.Equal(t, 120.0, short.body["expires_in_seconds"])
	require.Equal(t, closes.Format(time.RFC3339), short.body["held_until"])
	own := office.holdBy(h.seats[2], "box_office")
	require.Equal(t, 300.0, own.body["expires_in_seconds"], "the box office sells on")
	clock.Set(closes.Add(-time.Second + time.Microsecond))
	require.Equal(t, "sale_closed", ben.hold(h.seats[3]).code(), "nobody pays within less than a second")

	clock.Set(closes)
	require.Equal(t, "expired", ben.ask(http.MethodGet, "/api/holds/"+short.hold(), "", nil).body["status"])
	require.Equal(t, "sale_closed", ben.checkout("", long.hold()).code(), "held before the event said so, and held still")
	require.Equal(t, http.StatusOK, office.checkout("", own.hold()).status)
	h.setSale(map[string]any{"closes": closes})
	require.Equal(t, http.StatusOK, ben.checkout("", long.hold()).status, "seats held when the sale closes can be paid for")
	h.settled(paid)
	h.verify()
}
