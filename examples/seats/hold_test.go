package main

import (
	"maps"
	"net/http"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/examples/internal/exampledb"
	"github.com/pgmetered/metered/internal/pgtest"
)

func TestHold_AFreeSeatIsHeldWithAllThatGoesWithIt(t *testing.T) {
	t.Parallel()
	h := open(t, 1, quiet)
	clock := pgtest.SetClock(t, h.pool, noon)
	ben := h.people(h.org, 1)[0]
	a := ben.ask(http.MethodPost, ben.seatPath(h.seats[123], "hold"), "click-1", nil)
	require.Equal(t, http.StatusCreated, a.Status, a.Body)
	require.Equal(t, "no-store", a.Header.Get("Cache-Control"))
	require.Regexp(t, holdForm, a.hold())
	require.Equal(t, map[string]any{
		"hold_id": a.hold(), "event_id": h.event, "seat_id": h.seats[123],
		"section": "Stalls centre", "row": "C", "number": 4.0, "status": "held", "source": "web",
		"held_until": noon.Add(5 * time.Minute).Format(time.RFC3339), "held_until_unix": float64(noon.Add(5 * time.Minute).Unix()),
		"expires_in_seconds": 300.0,
	}, a.body)
	// The seat, the block and the user each have their entry. Every other table has one row.
	require.Equal(t, written{Holds: 1, Events: 1, Entries: 3, Jobs: 1, Operations: 1, Audit: 1}, h.written())
	require.Equal(t, int64(1), h.charged(ben.user))
	require.Equal(t, 1, one[int](h, `select count(distinct x.xmin::text)::int from (select xmin from metered.holds union all select xmin from metered.hold_events
		union all select xmin from metered.ledger union all select xmin from river_job union all select xmin from metered.operations
		union all select xmin from hall.audit) x`), "all of one transaction")
	delay := one[float64](h, `select extract(epoch from scheduled_at - created_at)::float8 from river_job where kind = 'metered_hold_cleanup'`)
	require.InDelta(t, 340, delay, 35) // it is 310, and what passed since the transaction began
	require.Equal(t, 3, one[int](h, `select max_attempts::int from river_job`))

	// The answer was lost, and the request comes again, later: the same hold, with the time that is left by then.
	for _, left := range []float64{210, 0} {
		clock.Set(noon.Add(5*time.Minute - time.Duration(left)*time.Second))
		again := ben.ask(http.MethodPost, ben.seatPath(h.seats[123], "hold"), "click-1", nil)
		require.Equal(t, http.StatusCreated, again.Status)
		want := maps.Clone(a.body)
		want["expires_in_seconds"] = left
		if left == 0 {
			want["status"] = "expired"
		}
		require.Equal(t, want, again.body)
	}
	require.Equal(t, written{Holds: 1, Events: 1, Entries: 3, Jobs: 1, Operations: 1, Audit: 1}, h.written())

	h.verify()
}

func TestHold_OneOfManyGetsTheSeat(t *testing.T) {
	t.Parallel()
	h := open(t, 2, quiet)
	pgtest.SetClock(t, h.pool, noon)
	n := pgtest.Size(60, 200)
	clients := h.people(h.org, n)
	answers := exampledb.AtOnce(n, func(i int) answer { return clients[i].hold(h.seats[0]) })
	require.Equal(t, map[int]int{http.StatusCreated: 1, http.StatusConflict: n - 1}, counted(answers))
	winner := 0
	for i, a := range answers {
		if a.Status == http.StatusCreated {
			winner = i
			continue
		}
		require.Equal(t, "seat_held", a.code())
		require.Equal(t, 300.0, a.body["retry_after_seconds"])
		require.Equal(t, "300", a.Header.Get("Retry-After"))
		require.NotContains(t, a.Body, "claim_")
	}
	for i, a := range answers {
		if i == winner {
			continue
		}
		require.NotContains(t, a.Body, clients[winner].user)
		require.Zero(t, h.charged(clients[i].user))
	}
	require.Equal(t, written{Holds: 1, Events: 1, Entries: 3, Jobs: 1, Operations: 1, Audit: 1}, h.written())
	require.Equal(t, n-1, one[int](h, `select count(*)::int from hall.audit where code = 'seat_held'`))
	h.verify()
}

func TestHold_TheSameUserAgainGetsTheSameHoldAndIsChargedOnce(t *testing.T) {
	t.Parallel()
	h := open(t, 2, quiet)
	clock := pgtest.SetClock(t, h.pool, noon)
	ben := h.people(h.org, 1)[0]
	answers := exampledb.AtOnce(20, func(i int) answer { return ben.at(i % 2).hold(h.seats[7]) })
	require.Equal(t, map[int]int{http.StatusCreated: 1, http.StatusOK: 19}, counted(answers))
	for _, a := range answers {
		require.Equal(t, answers[0].Body, a.Body)
	}
	clock.Advance(100*time.Second + 500*time.Millisecond)
	a := ben.hold(h.seats[7])
	require.Equal(t, http.StatusOK, a.Status)
	require.Equal(t, answers[0].hold(), a.hold())
	require.Equal(t, answers[0].body["held_until"], a.body["held_until"])
	require.Equal(t, 199.0, a.body["expires_in_seconds"])
	require.Equal(t, int64(1), h.charged(ben.user))
	require.Equal(t, 1, h.written().Holds)
	require.Equal(t, 3, h.written().Entries)
	h.verify()
}

func TestHold_TheEleventhWithinFiveMinutesIsLetInWhenItSaid(t *testing.T) {
	t.Parallel()
	h := open(t, 2, quiet)
	clock := pgtest.SetClock(t, h.pool, noon)
	ben := h.people(h.org, 1)[0]
	var last string
	for i := range 10 {
		last = ben.at(i % 2).holding(h.seats[i])
		clock.Advance(1500 * time.Millisecond)
	}
	require.Equal(t, http.StatusOK, ben.cancel(last).Status)
	before := h.written()
	a := ben.hold(h.seats[10]) // a seat given up is no place in the window
	require.Equal(t, http.StatusTooManyRequests, a.Status, a.Body)
	require.Equal(t, "285", a.Header.Get("Retry-After"))
	require.Equal(t, before, h.written())
	require.Equal(t, []string{"too_many_holds"}, h.refusals())
	require.Equal(t, http.StatusOK, ben.hold(h.seats[3]).Status, "one's own seat is not a new one")

	clock.Advance(285*time.Second - time.Microsecond)
	require.Equal(t, http.StatusTooManyRequests, ben.hold(h.seats[10]).Status)
	clock.Advance(time.Microsecond)
	require.Equal(t, http.StatusCreated, ben.hold(h.seats[10]).Status)
	require.Equal(t, int64(10), h.charged(ben.user))
	h.verify()
}

func TestHold_AFullBlockRefusesAndChargesNothing(t *testing.T) {
	t.Parallel()
	h := open(t, 1, quiet)
	pgtest.SetClock(t, h.pool, noon)
	people := h.people(h.org, 2)
	a := h.set("/blocks/"+h.blocks[1], map[string]any{"capacity": 3})
	require.Equal(t, http.StatusOK, a.Status, a.Body)
	for i := range 3 {
		people[0].holding(h.seats[100+i])
	}
	before := h.written()
	a = people[1].hold(h.seats[110])
	require.Equal(t, http.StatusConflict, a.Status)
	require.Equal(t, "block_full", a.code())
	require.Equal(t, "300", a.Header.Get("Retry-After"), "the first of the holds may end then")
	require.Equal(t, before, h.written())
	require.Zero(t, h.charged(people[1].user))
	require.Equal(t, "free", one[string](h, `select state from hall.seats where id = $1`, h.seats[110]))
	require.Equal(t, []string{"block_full"}, h.refusals())
	people[1].holding(h.seats[0]) // another block
	h.verify()
}
