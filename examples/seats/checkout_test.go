package main

import (
	"context"
	"errors"
	"net/http"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/internal/pgtest"
)

// till is a payment service that remembers, and runs a test's code while a payment is on its way. It knows a payment
// again by its id, and takes no more for it than the first time.
type till struct {
	mu         sync.Mutex
	authorised map[string]int64 // by reference, for how much
	attempts   int
	voided     map[string]bool
	meanwhile  func(attempt int)
}

func (p *till) authorise(_ context.Context, id string, cents int64) (string, error) {
	if cents <= 0 {
		return "", errors.New("for nothing")
	}
	p.mu.Lock()
	if _, again := p.authorised["pay_"+id]; !again {
		p.authorised["pay_"+id] = cents
	}
	p.attempts++
	attempt := p.attempts
	p.mu.Unlock()
	p.meanwhile(attempt)
	return "pay_" + id, nil
}

func (p *till) void(_ context.Context, reference string) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.voided[reference] = true
	return nil
}

// till has all processes use a new one.
func (h *hall) till(meanwhile func(attempt int)) *till {
	if meanwhile == nil {
		meanwhile = func(int) {}
	}
	p := &till{authorised: map[string]int64{}, voided: map[string]bool{}, meanwhile: meanwhile}
	for _, a := range h.apps {
		a.payments = p
	}
	return p
}

// settled requires that each order has its payment, of its sum, and that all the others were given back.
func (h *hall) settled(p *till) {
	h.t.Helper()
	p.mu.Lock()
	defer p.mu.Unlock()
	kept := map[string]int64{}
	for reference, cents := range p.authorised {
		if !p.voided[reference] {
			kept[reference] = cents
		}
	}
	orders := map[string]int64{}
	rows, err := h.pool.Query(context.Background(), `select payment, cents from hall.orders`)
	require.NoError(h.t, err)
	var payment string
	var cents int64
	_, err = pgx.ForEachRow(rows, []any{&payment, &cents}, func() error { orders[payment] = cents; return nil })
	require.NoError(h.t, err)
	require.Equal(h.t, orders, kept)
}

func TestCheckout_SellsAllThatOneHolds(t *testing.T) {
	t.Parallel()
	h := open(t, 1, quiet)
	during := -1
	paid := h.till(func(int) {
		during = pgtest.Count(t, h.pool, `pg_stat_activity where datname = current_database() and xact_start is not null and pid <> pg_backend_pid()`)
	})
	ben := h.people(h.org, 1)[0]
	ids := []string{ben.holding(h.seats[0]), ben.holding(h.seats[1]), ben.holding(h.seats[100])}
	a := ben.checkout("pay-1", ids...)
	require.Equal(t, http.StatusOK, a.Status, a.Body)
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
	require.Equal(t, http.StatusOK, again.Status)
	require.Equal(t, a.Body, again.Body)
	require.Equal(t, 1, paid.attempts)
	require.Empty(t, paid.voided)
	other := ben.checkout("pay-1", ids[0])
	require.Equal(t, "operation_conflict", other.code())
	require.Empty(t, paid.voided, "it is the payment of the order")
	require.Equal(t, "hold_captured", ben.checkout("pay-2", ids...).code())
	h.settled(paid)
	h.verify()
}

// While the payment for a cheap seat is on its way, dear ones are bought with the same key, or the same seat is.
func TestCheckout_OfAttemptsWithOneKeyOneIsPaidFor(t *testing.T) {
	t.Parallel()
	for _, same := range []bool{false, true} {
		h := open(t, 1, quiet)
		ben := h.people(h.org, 1)[0]
		cheap := []string{ben.holding(h.seats[300])}
		dear := []string{ben.holding(h.seats[100]), ben.holding(h.seats[101])}
		if same {
			dear = cheap
		}
		var between answer
		paid := h.till(func(attempt int) {
			if attempt == 1 {
				between = ben.checkout("pay-1", dear...)
			}
		})
		a := ben.checkout("pay-1", cheap...)
		require.Equal(t, http.StatusOK, between.Status, between.Body)
		if same {
			require.Equal(t, between.Body, a.Body)
		} else {
			require.Equal(t, "operation_conflict", a.code())
		}
		require.Len(t, paid.authorised, 2)
		require.Len(t, paid.voided, 1)
		h.settled(paid)
		h.verify()
	}
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
	paid := h.till(func(int) { clock.Set(noon.Add(5 * time.Minute)) })
	before := h.written()
	a := people[0].checkout("", first, second)
	require.Equal(t, http.StatusConflict, a.Status, a.Body)
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
	require.Equal(t, http.StatusOK, people[0].checkout("", second).Status)
	require.Equal(t, http.StatusOK, people[1].checkout("", taken).Status)
	require.Equal(t, "hold_expired", people[0].cancel(first).code())
	h.verify()
}
