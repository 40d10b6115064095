package main

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/json"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/internal/pgtest"
)

// receiver is an organisation's server for webhooks.
type receiver struct {
	t   *testing.T
	got chan alert
}

// receive makes one. It refuses the first so many deliveries, and checks the signature of each.
func (f *fixture) receive(refusals int64) *receiver {
	f.t.Helper()
	rec := &receiver{f.t, make(chan alert, 100)}
	secret := sha256.Sum256([]byte("webhooks-of-acme"))
	var refused atomic.Int64
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		id := r.Header.Get("webhook-id")
		want := sign(secret[:], id, r.Header.Get("webhook-timestamp"), body)
		var a alert
		if json.Unmarshal(body, &a) != nil || a.ID != id || !hmac.Equal([]byte(want), []byte(r.Header.Get("webhook-signature"))) {
			f.t.Errorf("a webhook that is none: %v %s", r.Header, body)
		}
		if refused.Add(1) <= refusals {
			http.Error(w, "not now", http.StatusServiceUnavailable)
			return
		}
		rec.got <- a
	}))
	f.t.Cleanup(server.Close)
	_, err := f.pool.Exec(f.t.Context(), `update accounts set webhook = $1 where id = 'acme'`, server.URL)
	require.NoError(f.t, err)
	return rec
}

func (r *receiver) next() alert {
	r.t.Helper()
	select {
	case a := <-r.got:
		return a
	case <-time.After(patience):
		r.t.Fatal("no webhook came")
		return alert{}
	}
}

// alerts is how many were ever enqueued.
func (f *fixture) alerts() (n int) {
	f.t.Helper()
	require.NoError(f.t, f.pool.QueryRow(f.t.Context(), `select count(*) from river_job where kind = 'alert'`).Scan(&n))
	return n
}

// Held units use up a budget, which refuses the next request. The alert of 80 % waits until so much was spent.
func TestAlert_AThresholdFiresOnceAMonthAndNotForARefusal(t *testing.T) {
	t.Parallel()
	f := openGateway(t, true)
	rec := f.receive(1)
	f.grants(50 * dollar)
	const estimate, cost = 10*24 + 30*100, 10*5 + 30*78
	ask := func() heard { return f.ask(f.bases[0], "key-of-eve", "", "How is stream 4 metered?", 0) }
	y, m, _ := time.Now().In(f.zone()).Date()
	next := time.Date(y, m+1, 1, 0, 0, 0, 0, f.zone())
	clock := pgtest.SetClock(t, f.pool, next.Add(-time.Hour))

	f.set("acme/ads/eve", "monthly", estimate-1)
	require.Equal(t, http.StatusTooManyRequests, ask().Status)
	f.set("acme/ads/eve", "monthly", cost+estimate)
	for month := range 2 {
		require.EqualValues(t, cost, ask().Cost)
		require.Equal(t, 2*month, f.alerts())
		require.EqualValues(t, cost, ask().Cost)
		require.Equal(t, http.StatusTooManyRequests, ask().Status)
		told := []alert{rec.next(), rec.next()}
		slices.SortFunc(told, func(a, b alert) int { return len(a.Threshold) - len(b.Threshold) })
		for i, want := range []alert{{Threshold: "80 %", Used: 2 * cost, Held: estimate - cost}, {Threshold: "used up", Used: cost, Held: estimate}} {
			want.ID, want.Organisation, want.Account, want.Limit = told[i].ID, "acme", "acme/ads/eve", "user-monthly"
			want.Max, want.At = cost+estimate, clock.Now()
			require.Equal(t, want, told[i], "month %d", month)
		}
		require.NotEqual(t, told[0].ID, told[1].ID)
		require.Equal(t, 2*(month+1), f.alerts())
		clock.Set(next)
	}
}
