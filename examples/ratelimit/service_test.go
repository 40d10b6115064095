package main

import (
	"context"
	"net/http"
	"slices"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/examples/internal/exampledb"
	"github.com/pgmetered/metered/examples/internal/examplehttp"
	"github.com/pgmetered/metered/examples/internal/exampletest"
	"github.com/pgmetered/metered/internal/pgtest"
)

func TestMain(m *testing.M) { exampletest.Main(m, main) }

type running struct {
	*testing.T
	pool  *pgxpool.Pool
	clock *pgtest.Clock
	s     *service
	bases []string // of all processes
}

// start serves over HTTP, with its limits' clock standing still.
func start(t *testing.T, l limits) running {
	t.Helper()
	pool := exampletest.Open(t, vouchersSQL+`; insert into vouchers values ('WELCOME', 500)`)
	s, err := newService(pool, l)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, s.close()) })
	return running{t, pool, pgtest.SetClock(t, pool, pgtest.Tomorrow(12)), s, []string{exampletest.Serve(t, s.handler())}}
}

// another process of the service, with connections of its own.
func (r *running) another() {
	pool, err := pgxpool.New(r.Context(), pgtest.ConnString(r.pool))
	require.NoError(r, err)
	r.Cleanup(pool.Close)
	s, err := newService(pool, r.s.limits)
	require.NoError(r, err)
	r.bases = append(r.bases, exampletest.Serve(r.T, s.handler()))
}

func limit(name string, n int64, window time.Duration) budget.Limit {
	return budget.Limit{Name: name, Max: n, Window: window}
}

// admitted is the model: the attempts that were let in, and a count over any window.
type admitted []attempt

type attempt struct {
	client string
	at     time.Time
}

// room is how many more fit, for one client or for all ("").
func (a admitted) room(now time.Time, client string, limits []budget.Limit) int64 {
	var rooms []int64
	for _, l := range limits {
		n := l.Max
		for _, attempt := range a {
			if (client == "" || client == attempt.client) && now.Sub(attempt.at) < l.Window {
				n--
			}
		}
		rooms = append(rooms, n)
	}
	return slices.Min(rooms)
}

func TestService_AdmitsExactlyTheLimitInEveryWindow(t *testing.T) {
	t.Parallel()
	l := limits{
		Client: []budget.Limit{limit("minute", 5, time.Minute), limit("ten", 8, 10*time.Minute)},
		All:    []budget.Limit{limit("all-minute", 14, time.Minute), limit("all-ten", 26, 10*time.Minute)},
	}
	r := start(t, l)
	r.another()
	clients := []string{"192.0.2.1", "192.0.2.2", "192.0.2.3", "2001:db8::1"}
	random := pgtest.Random(t)
	var model admitted
	refusals := 0
	for range pgtest.Sizes(28, 35, 60) {
		r.clock.Advance(time.Duration(random.Int64N(int64(50 * time.Second))))
		asking, asked := []string{}, map[string]int64{}
		for range 1 + random.IntN(16) {
			client := clients[random.IntN(len(clients))]
			asking, asked[client] = append(asking, client), asked[client]+1
		}
		now := r.clock.Now()
		var want int64
		for client, n := range asked {
			want += min(n, model.room(now, client, l.Client))
		}
		want = min(want, model.room(now, "", l.All))

		before := len(model)
		for i, a := range exampledb.AtOnce(len(asking), func(i int) examplehttp.Answer {
			return ask(context.Background(), r.bases[i%len(r.bases)], asking[i], "GUESS", "")
		}) {
			switch a.Status {
			case http.StatusNotFound:
				model = append(model, attempt{asking[i], now})
			case http.StatusTooManyRequests:
				refusals++
				require.NotEmpty(t, a.Header.Get("Retry-After"))
			default:
				t.Fatal(a)
			}
		}
		require.Equal(t, want, int64(len(model)-before))
	}
	require.NotZero(t, refusals)
	require.Greater(t, len(model), 26, "the windows moved")
	pgtest.RequireVerified(t, r.pool, r.s.metered.Budget)
}

func TestService_LetsInAtTheStatedSecond(t *testing.T) {
	t.Parallel()
	r := start(t, limits{Client: []budget.Limit{limit("ten", 2, 10*time.Second), limit("minute", 3, time.Minute)}})
	refused := func(retryAfter, left, violated string) {
		t.Helper()
		a := ask(t.Context(), r.bases[0], "192.0.2.1", "GUESS", "")
		require.Equal(t, http.StatusTooManyRequests, a.Status)
		require.Equal(t, "application/problem+json", a.Header.Get("Content-Type"))
		require.Equal(t, retryAfter, a.Header.Get("Retry-After"))
		require.Equal(t, `"ten";q=2;w=10, "minute";q=3;w=60`, a.Header.Get("RateLimit-Policy"))
		require.Equal(t, left, a.Header.Get("RateLimit"))
		require.Contains(t, a.Body, `#quota-exceeded","title"`)
		require.Contains(t, a.Body, `"violated-policies":`+violated)
	}
	let := func(left string) {
		t.Helper()
		a := ask(t.Context(), r.bases[0], "192.0.2.1", "GUESS", "")
		require.Equal(t, http.StatusNotFound, a.Status)
		require.Equal(t, left, a.Header.Get("RateLimit"))
		require.Empty(t, a.Header.Get("Retry-After"))
	}
	let(`"ten";r=1;t=10, "minute";r=2;t=60`) // at 0s
	r.clock.Advance(2500 * time.Millisecond)
	let(`"ten";r=0;t=10, "minute";r=1;t=60`) // at 2.5s
	refused("8", `"ten";r=0;t=8`, `["ten"]`)
	r.clock.Advance(7 * time.Second)
	refused("1", `"ten";r=0;t=1`, `["ten"]`)
	r.clock.Advance(time.Second)
	let(`"ten";r=0;t=10, "minute";r=0;t=60`) // at 10.5s
	refused("50", `"ten";r=0;t=2, "minute";r=0;t=50`, `["ten","minute"]`)
	r.clock.Advance(49500*time.Millisecond - time.Microsecond)
	refused("1", `"minute";r=0;t=1`, `["minute"]`)
	r.clock.Advance(time.Microsecond)
	let(`"ten";r=1;t=10, "minute";r=0;t=60`) // at 60s
}

// The program is run as a user would.
func TestRatelimit(t *testing.T) {
	t.Parallel()
	program := exampletest.New(t)
	program.Prints(
		`RateLimit: "hourly";r=9;t=3600, "daily";r=29;t=86400`,
		`RateLimit: "hourly";r=8;t=3600, "daily";r=28;t=86400`,
		"admitted: 8, refused: 22",
		"admitted: 15, refused: 25",
		`"violated-policies":["all-hourly"]`,
		" 0 differences",
	)

	program.Serve("curl -i ", "/redeem", func(base string) {
		require.Equal(t, `{"cents":1000}`, ask(t.Context(), base, "192.0.2.1", "SUMMER", "").Body)
	})
}
