package main

import (
	"context"
	"errors"
	"net/http"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/internal/pgtest"
)

// till is a payment service that remembers, and does what a test wants done while a payment is on its way.
type till struct {
	mu         sync.Mutex
	authorised map[string]int // by reference, how often
	voided     []string
	meanwhile  func()
}

func (p *till) authorise(_ context.Context, id string, cents int64) (string, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if cents <= 0 {
		return "", errors.New("for nothing")
	}
	p.authorised["pay_"+id]++
	if p.meanwhile != nil {
		p.meanwhile()
	}
	return "pay_" + id, nil
}

func (p *till) void(_ context.Context, reference string) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.voided = append(p.voided, reference)
	return nil
}

func (h *hall) till(meanwhile func()) *till {
	p := &till{authorised: map[string]int{}, meanwhile: meanwhile}
	for _, a := range h.apps {
		a.payments = p
	}
	return p
}

// openTransactions of this database, the one that asks aside.
const openTransactions = `select count(*)::int from pg_stat_activity where datname = current_database() and xact_start is not null and pid <> pg_backend_pid()`

func TestCheckout_SellsAllThatOneHolds(t *testing.T) {
	t.Parallel()
	h := open(t, 1, quiet)
	during := -1
	paid := h.till(func() { during = one[int](h, openTransactions) })
	ben := h.people(h.org, 1)[0]
	ids := []string{ben.holding(h.seats[0]), ben.holding(h.seats[1]), ben.holding(h.seats[100])}
	a := ben.checkout("pay-1", ids...)
	require.Equal(t, http.StatusOK, a.status, a.text)
	require.Equal(t, 4500.0+4500+5200, a.body["cents"])
	require.Zero(t, during, "transactions open while the payment is on its way")
	require.Equal(t, []string{a.body["order_id"].(string)}, all[string](h, `select id::text from hall.orders`))
	for _, id := range ids {
		held, err := h.apps[0].metered.Holds.Get(t.Context(), h.pool, h.org, id, ben.user)
		require.NoError(t, err)
		require.Equal(t, "order/"+a.body["order_id"].(string), held.Entity)
	}
	// Repeated, because the answer was lost: the first answer, and the same payment.
	again := ben.checkout("pay-1", ids...)
	require.Equal(t, http.StatusOK, again.status)
	require.Equal(t, a.text, again.text)
	require.Equal(t, map[string]int{a.body["payment"].(string): 1}, paid.authorised)
	require.Empty(t, paid.voided)
	other := ben.checkout("pay-1", ids[0])
	require.Equal(t, "operation_conflict", other.code())
	require.Empty(t, paid.voided, "it is the payment of the order")
	require.Equal(t, "hold_captured", ben.checkout("pay-2", ids...).code())
	h.verify()
}

func TestCheckout_OfAHoldThatRanOutSellsNothing(t *testing.T) {
	t.Parallel()
	h := open(t, 1, quiet)
	clock := pgtest.SetClock(t, h.pool, noon)
	people := h.people(h.org, 2)
	first := people[0].holding(h.seats[0])
	clock.Advance(2 * time.Minute)
	second := people[0].holding(h.seats[1])
	// The first runs out while the payment is on its way.
	paid := h.till(func() { clock.Set(noon.Add(5 * time.Minute)) })
	before := h.written()
	a := people[0].checkout("", first, second)
	require.Equal(t, http.StatusConflict, a.status, a.text)
	require.Equal(t, "hold_expired", a.code())
	require.Equal(t, before, h.written())
	require.Len(t, paid.authorised, 1)
	require.Len(t, paid.voided, 1)
	require.Zero(t, one[int](h, `select count(*)::int from hall.orders`))
	m, err := h.apps[0].readMap(t.Context(), h.org, h.event)
	require.NoError(t, err)
	require.Equal(t, counts{Available: 499, Held: 1, Seats: 500}, m.Counts, "nobody has swept, and the seat is free")

	// The other one is for sale still, and the seat is for somebody else to take: no job and no sweeper runs here.
	taken := people[1].holding(h.seats[0])
	a = people[0].checkout("", first, second)
	require.Equal(t, "hold_expired", a.code())
	require.Len(t, paid.authorised, 1, "known before any payment")
	require.Equal(t, http.StatusOK, people[0].checkout("", second).status)
	require.Equal(t, http.StatusOK, people[1].checkout("", taken).status)
	require.Equal(t, "hold_expired", people[0].cancel(first).code())
	h.verify()
}

func TestCheckout_RefusesWhatIsNotOnesOwnOrNotOpen(t *testing.T) {
	t.Parallel()
	h := open(t, 1, quiet)
	people := h.people(h.org, 2)
	mine, theirs := people[0].holding(h.seats[0]), people[1].holding(h.seats[1])
	paid := h.till(nil)
	unknown := "claim_" + theirs[6:38] + "_" + h.event
	a, b := people[0].checkout("", mine, theirs), people[0].checkout("", mine, unknown)
	require.Equal(t, http.StatusNotFound, a.status)
	require.Equal(t, b.text, a.text)
	for _, ids := range [][]string{{}, {mine, mine}, {"x"}, {mine, "'; drop"}} {
		require.Equal(t, http.StatusBadRequest, people[0].checkout("", ids...).status)
	}
	require.Empty(t, paid.authorised)

	// Closed while the payment is on its way.
	paid = h.till(func() { h.exec(`update hall.events set status = 'closed' where id = $1`, h.event) })
	a = people[0].checkout("", mine)
	require.Equal(t, "event_not_open", a.code())
	require.Len(t, paid.voided, 1)
	m, err := h.apps[0].readMap(t.Context(), h.org, h.event)
	require.NoError(t, err)
	require.Equal(t, counts{Available: 498, Held: 2, Seats: 500}, m.Counts)
	h.verify()
}

// Each cart has a seat of each block, taken in opposite order; and each is paid for from two tabs at once.
func TestCheckout_CartsInOppositeOrderDoNotDeadlock(t *testing.T) {
	t.Parallel()
	h := open(t, 2, quiet)
	people := h.people(h.org, 8)
	carts := make([][]string, len(people))
	for i, b := range people {
		for n := range 5 {
			if i%2 == 1 {
				n = 4 - n
			}
			carts[i] = append(carts[i], b.holding(h.seats[100*n+i]))
		}
	}
	tabs := make([]*browser, 0, 16)
	for _, b := range people {
		tabs = append(tabs, b.at(0), b.at(1))
	}
	answers := together(tabs, func(i int, b *browser) answer { return b.checkout("", carts[i/2]...) })
	require.Equal(t, map[int]int{http.StatusOK: 8, http.StatusConflict: 8}, counted(answers))
	for _, a := range answers {
		if a.status == http.StatusConflict {
			require.Equal(t, "hold_captured", a.code())
		}
	}
	require.Equal(t, 8, one[int](h, `select count(*)::int from hall.orders`))
	m, err := h.apps[0].readMap(t.Context(), h.org, h.event)
	require.NoError(t, err)
	require.Equal(t, counts{Available: 460, Sold: 40, Seats: 500}, m.Counts)
	require.Zero(t, one[int](h, `select deadlocks::int from pg_stat_database where datname = current_database()`))
	h.verify()
}
