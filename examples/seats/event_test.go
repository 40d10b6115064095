package main

import (
	"net/http"
	"slices"
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

// The map is read as good as never by itself here.
func TestSaleWindow_BrowsersSeeItOpenAndClose(t *testing.T) {
	t.Parallel()
	cfg := quiet
	cfg.refresh = time.Hour
	h := open(t, 1, cfg)
	now := one[time.Time](h, `select clock_timestamp()`)
	h.setSale(map[string]any{"opens": now.Add(2 * time.Second), "closes": now.Add(4 * time.Second)})
	messages := h.people(h.org, 1)[0].watch()
	for _, sale := range []string{"sale_not_open", "open", "sale_closed"} {
		m := h.until(messages, sale, func(m message) bool { return m.Sale == sale })
		require.Equal(t, statusPublished, m.Status)
		require.WithinDuration(t, now.Add(4*time.Second), *m.Closes, time.Millisecond)
	}
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

func TestStatus_IsFollowedByItsSuccessorsOnly(t *testing.T) {
	t.Parallel()
	h := open(t, 1, quiet)
	require.Len(t, successors, 6)
	for from, after := range successors {
		for to := range successors {
			h.exec(`update hall.events set status = $2 where id = $1`, h.event, from)
			a := h.set("", map[string]any{"status": to})
			want := to
			if to != from && !slices.Contains(after, to) {
				want = from
				require.Equal(t, http.StatusConflict, a.status)
				require.Equal(t, "status_not_allowed", a.code())
			} else {
				require.Equal(t, http.StatusOK, a.status, a.text)
			}
			require.Equal(t, want, one[status](h, `select status from hall.events where id = $1`, h.event), "%s to %s", from, to)
		}
	}
	require.Equal(t, http.StatusBadRequest, h.set("", map[string]any{"status": "sold out"}).status)
	require.Equal(t, http.StatusBadRequest, h.set("", map[string]any{}).status)
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

// A hold that waits for its turn, until the sale has closed, is judged by the time when it has it.
func TestSaleWindow_IsJudgedWhenAHoldHasItsTurn(t *testing.T) {
	t.Parallel()
	h := open(t, 1, quiet)
	clock := pgtest.SetClock(t, h.pool, noon)
	h.setSale(map[string]any{"closes": noon.Add(time.Minute)})
	ben := h.people(h.org, 1)[0]
	tx, err := h.pool.Begin(t.Context())
	require.NoError(t, err)
	require.NoError(t, changing(t.Context(), tx, h.org, h.event))
	answered := make(chan answer, 1)
	go func() {
		a, _ := ben.do(http.MethodPost, ben.seatPath(h.seats[0], "hold"), "", nil)
		answered <- a
	}()
	h.waiting(1)
	clock.Set(noon.Add(time.Minute))
	require.NoError(t, tx.Rollback(t.Context()))
	require.Equal(t, "sale_closed", (<-answered).code())
	h.verify()
}

func TestSale_RefusesContradictions(t *testing.T) {
	t.Parallel()
	h := open(t, 1, quiet)
	for _, body := range []any{
		map[string]any{"opens": noon, "closes": noon}, map[string]any{"hold_seconds": 0}, map[string]any{"hold_seconds": 3601},
		map[string]any{"holds_end_with_sale": true}, map[string]any{"opens": "soon"}, map[string]any{"price": 1}, nil,
	} {
		a := h.set("/sale", body)
		require.Equal(t, http.StatusBadRequest, a.status, a.text)
	}
	require.True(t, one[bool](h, `select opens is null and closes is null and hold_seconds is null and not holds_end from hall.events where id = $1`, h.event))
}

func TestHolds_AreListedWithWhenTheyEndTheNextOneFirst(t *testing.T) {
	t.Parallel()
	h := open(t, 1, quiet)
	clock := pgtest.SetClock(t, h.pool, noon)
	ben, office := h.people(h.org, 1)[0], h.staff(boxOffice)
	ben.holding(h.seats[9]) // over, and not swept, when it is looked at
	clock.Advance(4 * time.Minute)
	later := office.holdBy(h.seats[205], "box_office")
	h.setSale(map[string]any{"hold_seconds": 100})
	sooner := ben.hold(h.seats[1])
	require.Equal(t, http.StatusOK, ben.checkout("", ben.holding(h.seats[2])).status)
	clock.Advance(time.Minute + 500*time.Millisecond)
	a := office.ask(http.MethodGet, "/api/events/"+h.event+"/holds", "", nil)
	require.Equal(t, http.StatusOK, a.status, a.text)
	line := func(of answer, seat, holder, section, row string, number, left float64) map[string]any {
		return map[string]any{
			"hold_id": of.hold(), "seat_id": seat, "holder": holder, "source": of.body["source"], "section": section, "row": row, "number": number,
			"held_until": of.body["held_until"], "held_until_unix": of.body["held_until_unix"], "expires_in_seconds": left,
		}
	}
	require.Equal(t, []any{
		line(sooner, h.seats[1], ben.user, "Stalls left", "A", 2, 39),
		line(later, h.seats[205], office.user, "Stalls right", "A", 6, 239),
	}, a.body["holds"])
	require.Equal(t, http.StatusForbidden, ben.ask(http.MethodGet, "/api/events/"+h.event+"/holds", "", nil).status)
}
