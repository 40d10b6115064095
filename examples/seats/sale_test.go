package main

import (
	"context"
	"net/http"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/examples/internal/exampledb"
	"github.com/pgmetered/metered/internal/pgtest"
)

func TestBlock_TakesASeatOutOfTheSaleAndPutsItBack(t *testing.T) {
	t.Parallel()
	h := open(t, 1, quiet)
	people := h.people(h.org, 2)
	seat := h.seats[42]
	hold := people[0].holding(seat)
	before := h.written()
	require.Equal(t, http.StatusForbidden, people[0].ask(http.MethodPost, people[0].seatPath(seat, "block"), "", nil).Status)
	require.Equal(t, before, h.written())
	for range 2 { // blocked is blocked
		a := h.admin.ask(http.MethodPost, h.admin.seatPath(seat, "block"), "", nil)
		require.Equal(t, http.StatusOK, a.Status, a.Body)
	}
	a := people[0].checkout("", hold)
	require.Equal(t, http.StatusConflict, a.Status)
	require.Equal(t, "hold_released", a.code())
	for _, b := range people {
		a := b.hold(seat)
		require.Equal(t, http.StatusConflict, a.Status)
		require.Equal(t, "seat_blocked", a.code())
	}
	h.verify()
	events, err := h.apps[0].metered.Holds.History(t.Context(), h.pool, h.org, hold, "")
	require.NoError(t, err)
	require.Equal(t, "user:"+h.admin.user, events[1].Note.Actor)

	require.Equal(t, http.StatusOK, h.admin.ask(http.MethodPost, h.admin.seatPath(seat, "unblock"), "", nil).Status)
	h.verify()
	bought := people[1].checkout("", people[1].holding(seat))
	require.Equal(t, http.StatusOK, bought.Status)
	a = h.admin.ask(http.MethodPost, h.admin.seatPath(seat, "block"), "", nil)
	require.Equal(t, http.StatusConflict, a.Status)
	require.Equal(t, "seat_sold", a.code())
	require.Equal(t, http.StatusOK, h.admin.ask(http.MethodPost, h.admin.seatPath(seat, "unblock"), "", nil).Status, "of no effect")
	h.verify()
	m, err := h.apps[0].readMap(t.Context(), h.org, h.event)
	require.NoError(t, err)
	require.Equal(t, counts{Available: 499, Sold: 1, Seats: 500}, m.Counts)
}

// A hold is being made and the box office waits for it. A hold and a checkout that come then wait for the box office.
func TestBoxOffice_IsNotOvertakenByThoseWhoComeLater(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		path           func(h *hall) string
		body           any
		held, checkout string // refusals
	}{
		"capacity": {func(h *hall) string { return "/blocks/" + h.blocks[1] }, map[string]any{"capacity": 0}, "block_full", ""},
		"status":   {func(*hall) string { return "" }, map[string]any{"status": "closed"}, "sale_closed", "sale_closed"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			h := open(t, 1, quiet)
			people := h.people(h.org, 3)
			event, cart := "/api/events/"+h.event, people[2].holding(h.seats[200])
			tx, err := h.pool.Begin(t.Context())
			require.NoError(t, err)
			defer tx.Rollback(context.Background())
			_, err = tx.Exec(t.Context(), `select from hall.seats where id = $1 for update`, h.seats[0]) // a hold writes it last
			require.NoError(t, err)
			waiters := 0
			ask := func(b *browser, method, path string, body any) <-chan answer {
				answered := make(chan answer, 1)
				go func() {
					answered <- b.do(method, path, "", body)
				}()
				waiters++
				pgtest.WaitQueued(t, h.pool, waiters)
				return answered
			}
			first := ask(people[0], http.MethodPost, people[0].seatPath(h.seats[0], "hold"), nil)
			set := ask(h.admin, http.MethodPut, event+test.path(h), test.body)
			later := ask(people[1], http.MethodPost, people[1].seatPath(h.seats[100], "hold"), nil) // in another block
			bought := ask(people[2], http.MethodPost, event+"/checkout", map[string]any{"holds": []string{cart}})
			require.NoError(t, tx.Rollback(t.Context()))
			require.Equal(t, http.StatusCreated, (<-first).Status)
			require.Equal(t, http.StatusOK, (<-set).Status)
			require.Equal(t, test.held, (<-later).code())
			require.Equal(t, test.checkout, (<-bought).code())
			h.verify()
		})
	}
}

// More buyers than seats at the same places, and blocked seats that come and go: each seat is sold once. The short
// form, which sells the first seats alone, finds a claim that a second holder takes.
func TestSale_SellsEverySeatOnce(t *testing.T) {
	t.Parallel()
	h := open(t, 2, quiet)
	n := pgtest.Sizes(25, 50, 500)
	seats := h.seats[:n]
	people := h.people(h.org, n*12/100)
	admin := make(chan struct{})
	go func() {
		defer close(admin)
		for i := range 20 {
			h.admin.do(http.MethodPost, h.admin.seatPath(seats[i*n/20], "block"), "", nil)
			h.admin.do(http.MethodPost, h.admin.seatPath(seats[i*n/20], "unblock"), "", nil)
		}
	}()
	sell := func(b *browser, seats ...string) (bought int) {
		for _, seat := range seats {
			a := b.hold(seat)
			if a.Status == http.StatusTooManyRequests {
				return bought
			}
			if a.Status != http.StatusCreated {
				continue
			}
			var c answer
			key := metered.NewID()
			pgtest.WaitFor(t, "an answer", func() bool { // a busy machine may let it wait too long
				c = b.checkout(key, a.hold())
				return c.Status != http.StatusServiceUnavailable
			})
			if c.Status == http.StatusOK {
				bought++
			} else if !strings.HasPrefix(c.code(), "hold_") { // the box office may have blocked it
				t.Errorf("checkout: %s", c.Body)
			}
		}
		return bought
	}
	sum := 0
	twice := slices.Concat(seats, seats)
	for _, bought := range exampledb.AtOnce(len(people), func(i int) int { return sell(people[i], twice[i*8:i*8+30]...) }) {
		sum += bought
	}
	<-admin
	for _, b := range h.people(h.org, len(people)) { // the seats left, and those that were blocked just then
		sum += sell(b, all[string](h, `select id::text from hall.seats where event = $1 and state = 'free' and id = any ($2) order by ordinal`, h.event, seats)...)
	}
	require.Equal(t, n, sum)
	m, err := h.apps[0].readMap(t.Context(), h.org, h.event)
	require.NoError(t, err)
	require.Equal(t, counts{Available: 500 - n, Sold: n, Seats: 500}, m.Counts)
	require.Equal(t, n, one[int](h, `select count(*)::int from hall.orders`))
	require.Equal(t, n, one[int](h, `select count(distinct x.h)::int from hall.orders o, unnest(o.holds) x(h)`))
	a := h.people(h.org, 1)[0].hold(seats[n-1])
	require.Equal(t, "seat_sold", a.code())
	h.verify()
}
