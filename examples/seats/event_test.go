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
	require.Equal(t, "sale_not_open", ben.hold(h.seats[0]).code())
	require.Equal(t, before, h.written())
	clock.Set(noon.Add(90 * time.Second))
	require.Equal(t, http.StatusCreated, ben.hold(h.seats[0]).status)

	clock.Set(noon.Add(time.Hour - time.Microsecond))
	held := ben.holding(h.seats[1])
	clock.Set(noon.Add(time.Hour))
	a = ben.hold(h.seats[2])
	require.Equal(t, "sale_closed", a.code())
	require.Empty(t, a.header.Get("Retry-After"))
	require.Equal(t, http.StatusOK, ben.checkout("", held).status, "seats held when the sale closes can be paid for")
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
		require.Equal(t, http.StatusConflict, a.status, status)
		require.Equal(t, code, a.code())
		require.Equal(t, code, people[0].checkout("", held).code())
		require.Equal(t, before, h.written())
		require.Equal(t, code, people[0].ask(http.MethodGet, "/api/events/"+h.event+"/map", "", nil).body["sale"])
	}
	h.settled(paid)
	h.setSale(map[string]any{"status": "live"})
	require.Equal(t, http.StatusCreated, people[1].hold(h.seats[1]).status)
	require.Equal(t, http.StatusOK, people[0].checkout("", held).status)
	h.verify()
}
