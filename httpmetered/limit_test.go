package httpmetered_test

import (
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/httpmetered"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/leases"
)

// byHeader takes the Authorization header as a client's key.
func byHeader(r *http.Request) (string, error) {
	if who := r.Header.Get("Authorization"); who != "nobody" {
		return who, nil
	}
	return "", errNobody
}

// ways are both limiters on one database.
func ways(t *testing.T, pool *pgxpool.Pool, cfg httpmetered.LimitConfig) map[string]func(http.Handler) http.Handler {
	t.Helper()
	ledger, err := budget.New(budget.Config{})
	require.NoError(t, err)
	leased, err := leases.New(pool, ledger, leases.Config{Rules: []leases.Rule{{Prefix: "leased/", MinSlice: 1}}})
	require.NoError(t, err)
	t.Cleanup(func() { _ = leased.Close(t.Context()) })
	cfg.Kind = "exact"
	exactly, err := httpmetered.Limit(pool, ledger, cfg)
	require.NoError(t, err)
	cfg.Kind = "leased"
	fromMemory, err := httpmetered.LimitLeased(leased, cfg)
	require.NoError(t, err)
	return map[string]func(http.Handler) http.Handler{"exact": exactly, "leased": fromMemory}
}

func serve(t *testing.T, limit func(http.Handler) http.Handler) func(who string, cost int64) reply {
	t.Helper()
	server := httptest.NewServer(limit(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusTeapot) })))
	t.Cleanup(server.Close)
	s := &shop{t: t, url: server.URL}
	return func(who string, cost int64) reply {
		r, err := s.send(t.Context(), "GET", "/?cost="+strconv.FormatInt(cost, 10), who, "")
		require.NoError(t, err)
		return r
	}
}

func cost(r *http.Request) (int64, error) {
	return strconv.ParseInt(r.FormValue("cost"), 10, 64)
}

func TestLimit_AdmitsExactlyAndShowsUnitsLeft(t *testing.T) {
	t.Parallel()
	cfg := httpmetered.LimitConfig{
		Key: byHeader, Amount: cost, OnError: func(*http.Request, error) {},
		Limits: []budget.Limit{budget.PerWindow(3, time.Hour).Named("hourly")}, Shared: []budget.Limit{budget.PerWindow(5, time.Hour).Named("everyone")},
	}
	for way, limit := range ways(t, pgtest.Open(t), cfg) {
		ask := serve(t, limit)
		for left := 2; left >= 0; left-- {
			r := ask("ann", 1)
			require.Equal(t, 418, r.status, way)
			require.Equal(t, `"hourly";q=3;w=3600`, r.header.Get("RateLimit-Policy"))
			require.Equal(t, `"hourly";r=`+strconv.Itoa(left)+`;t=3600`, r.header.Get("RateLimit"), way)
		}
		r := ask("ann", 1)
		require.Equal(t, 429, r.status, way)
		after, err := strconv.Atoi(r.header.Get("Retry-After"))
		require.NoError(t, err)
		require.True(t, after > 0 && after <= 3600, after)
		require.Equal(t, "application/problem+json", r.header.Get("Content-Type"))
		require.Equal(t, "budget_exceeded", r.code())
		require.Contains(t, r.body, `"violated-policies":["hourly"]`)
		require.Equal(t, 418, ask("ann", 0).status, "it costs nothing")

		require.Equal(t, 418, ask("ben", 2).status, way)
		r = ask("ben", 1)
		require.Equal(t, 429, r.status, way)
		require.Contains(t, r.body, `"violated-policies":["everyone"]`, "and ben keeps his units")

		require.Equal(t, 401, ask("nobody", 1).status)
		require.Equal(t, 500, ask("", 1).status, "all clients would be one")
		require.Equal(t, 400, ask("carl", -1).status)
	}
}

func TestLimit_ADatabaseThatIsAwayLetsNobodyInWithoutFailOpen(t *testing.T) {
	t.Parallel()
	pool := pgtest.Open(t)
	away := pgtest.Reopen(t, pool, func(c *pgxpool.Config) {
		c.ConnConfig.Port = 1
		c.ConnConfig.Host = "127.0.0.1"
		c.ConnConfig.Fallbacks = nil
	})
	for _, open := range []bool{false, true} {
		var mu sync.Mutex
		var told []error
		cfg := httpmetered.LimitConfig{
			Key: byHeader, Limits: []budget.Limit{budget.PerWindow(3, time.Hour).Named("hourly")}, FailOpen: open,
			OnError: func(_ *http.Request, err error) { mu.Lock(); defer mu.Unlock(); told = append(told, err) },
		}
		for way, limit := range ways(t, away, cfg) {
			r := serve(t, limit)("ann", 1)
			if open {
				require.Equal(t, 418, r.status, way)
				continue
			}
			require.Equal(t, 503, r.status, way)
			require.Empty(t, r.header.Values("RateLimit"))
			if way == "leased" {
				require.Equal(t, "leases_unavailable", r.code())
			}
		}
		require.Len(t, told, 2)
		require.ErrorIs(t, errors.Join(told...), leases.ErrUnavailable)
	}
}

// A client that keeps a scope locked does not get in by it.
func TestLimit_FailOpenIsNotForADatabaseThatIsBusy(t *testing.T) {
	t.Parallel()
	pool := pgtest.Open(t)
	ledger, err := budget.New(budget.Config{LockTimeout: 10 * time.Millisecond})
	require.NoError(t, err)
	limit, err := httpmetered.Limit(pool, ledger, httpmetered.LimitConfig{
		Kind: "k", Key: byHeader, Limits: []budget.Limit{budget.PerWindow(3, time.Hour).Named("hourly")}, FailOpen: true, OnError: func(*http.Request, error) {},
	})
	require.NoError(t, err)
	tx, err := pool.Begin(t.Context())
	require.NoError(t, err)
	defer func() { _ = tx.Rollback(t.Context()) }()
	require.NoError(t, ledger.Lock(t.Context(), tx, budget.ScopeKey("k", "client", "ann")))
	r := serve(t, limit)("ann", 1)
	require.Equal(t, 503, r.status)
	require.Equal(t, "busy", r.code())
	require.Equal(t, "1", r.header.Get("Retry-After"))
}

// Requests go through minima that fell due in the scope of a client, and in that of all.
func TestLimit_GoesThroughABacklogOfMinima(t *testing.T) {
	t.Parallel()
	pool := pgtest.Open(t)
	clock := pgtest.SetClock(t, pool, pgtest.Tomorrow(9))
	cfg := httpmetered.LimitConfig{Key: byHeader, Limits: []budget.Limit{budget.Lifetime(61).Named("own")}}
	both := cfg
	both.Shared = []budget.Limit{budget.Lifetime(62).Named("everyone")}
	alone, pair := ways(t, pool, cfg)["exact"], ways(t, pool, both)["exact"]
	ledger, err := budget.New(budget.Config{})
	require.NoError(t, err)
	book, err := holds.New(ledger, holds.Config{})
	require.NoError(t, err)
	require.NoError(t, pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error {
		for n := range 60 {
			for _, scope := range []string{"exact/client/ann", "exact/client/ben", "exact/all"} {
				_, err := book.Place(t.Context(), tx, holds.Placement{ID: fmt.Sprint(scope, n), TTL: time.Minute,
					Lines: []holds.Line{{Scope: scope, Amount: 2, AtLeast: 1}}})
				require.NoError(t, err)
			}
		}
		return nil
	}))
	clock.Advance(time.Hour)
	require.Equal(t, 418, serve(t, alone)("ann", 1).status)
	require.Equal(t, 409, serve(t, alone)("ann", 1).status, "there is no room, ever")
	require.Equal(t, 418, serve(t, pair)("ben", 1).status)
	r := serve(t, pair)("ben", 1)
	require.Equal(t, 409, r.status)
	require.Contains(t, r.body, `"violated-policies":["own"]`)
	for _, scope := range []string{"exact/client/ann", "exact/client/ben", "exact/all"} {
		var used, held int64
		require.NoError(t, pool.QueryRow(t.Context(), "select spent, held from metered.ledger where scope = $1 order by seq desc limit 1", scope).Scan(&used, &held))
		require.Equal(t, []int64{61, 0}, []int64{used, held}, scope)
	}
}

func TestLimit_RefusesUnusableArguments(t *testing.T) {
	t.Parallel()
	pool := pgtest.Open(t)
	ledger, err := budget.New(budget.Config{})
	require.NoError(t, err)
	named, nameless := []budget.Limit{budget.PerWindow(3, time.Hour).Named("a")}, []budget.Limit{budget.PerWindow(3, time.Hour)}
	for _, cfg := range []httpmetered.LimitConfig{
		{}, {Kind: "k"}, {Kind: "k", Limits: named}, {Kind: "k", Key: byHeader, Limits: nameless}, {Key: byHeader, Limits: named},
		{Kind: "a/b", Key: byHeader, Limits: named}, {Kind: "k", Key: byHeader, Limits: named, Shared: named},
	} {
		_, err := httpmetered.Limit(pool, ledger, cfg)
		require.ErrorIs(t, err, budget.ErrArgument, "%+v", cfg)
	}
	_, err = httpmetered.Limit(pool, ledger, httpmetered.LimitConfig{Kind: "k", Key: byHeader, Limits: nameless})
	require.ErrorContains(t, err, "LimitConfig.Limits[0].Name")
	cfg := httpmetered.LimitConfig{Kind: "k", Shared: named}
	_, err = httpmetered.Limit(pool, ledger, cfg)
	require.NoError(t, err, "limits of all clients need no key")
	_, err = httpmetered.Limit(nil, ledger, cfg)
	require.ErrorIs(t, err, budget.ErrArgument)
	_, err = httpmetered.Limit(pool, nil, cfg)
	require.ErrorIs(t, err, budget.ErrArgument)
	_, err = httpmetered.LimitLeased(nil, cfg)
	require.ErrorIs(t, err, budget.ErrArgument)
	leased, err := leases.New(pool, ledger, leases.Config{Rules: []leases.Rule{{Prefix: "k/"}}})
	require.NoError(t, err)
	_, err = httpmetered.LimitLeased(leased, cfg)
	require.NoError(t, err)
	_, err = httpmetered.LimitLeased(leased, httpmetered.LimitConfig{Kind: "without-rule", Key: byHeader, Limits: named})
	require.ErrorIs(t, err, budget.ErrArgument)
	require.NoError(t, leased.Close(t.Context()))
	_, err = httpmetered.LimitLeased(leased, cfg)
	require.ErrorIs(t, err, leases.ErrClosed)
}

// A client sees what is left of each limit that judged its request: of one in front, of the command, and of what the handler shows itself.
func TestLimit_ItsFieldsStayInFrontOfIdempotent(t *testing.T) {
	t.Parallel()
	pool := pgtest.Open(t)
	pgtest.SetClock(t, pool, time.Date(2031, 5, 6, 12, 0, 0, 0, time.UTC))
	client := pgtest.NewClient(t, pool, metered.Config{})
	orders := budget.PerWindow(10, time.Hour).Named("orders")
	shown, err := httpmetered.NewPolicies(httpmetered.PoliciesConfig{Limits: []budget.Limit{orders}})
	require.NoError(t, err)
	inside, err := httpmetered.NewPolicies(httpmetered.PoliciesConfig{Limits: []budget.Limit{budget.Lifetime(5).Named("seats")}})
	require.NoError(t, err)
	limiter := func(kind, name string) func(http.Handler) http.Handler {
		limit, err := httpmetered.Limit(pool, client.Budget, httpmetered.LimitConfig{
			Kind: kind, Key: byHeader, Limits: []budget.Limit{budget.PerWindow(100, time.Minute).Named(name)},
		})
		require.NoError(t, err)
		return limit
	}
	once, err := httpmetered.Idempotent(client, httpmetered.IdempotentConfig{
		Tenant: byHeader, Policies: shown, OnError: func(_ *http.Request, err error) { t.Error(err) },
		Command: func(_ *http.Request, body []byte) (cmd metered.Command, err error) {
			if n := int64(len(body)); n > 0 {
				cmd.Charges = []budget.Charge{{Scope: "orders", Amount: n, Limits: []budget.Limit{orders}}}
			}
			return cmd, nil
		},
	})
	require.NoError(t, err)
	handler := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/seats" {
			inside.Show(w.Header(), budget.Receipt{Entries: []budget.Posted{{Standings: []budget.Standing{standing(budget.Lifetime(5).Named("seats"), 4)}}}})
		}
		w.WriteHeader(http.StatusTeapot - 200)
	})
	server := httptest.NewServer(limiter("ip", "address")(limiter("user", "client")(once(handler))))
	t.Cleanup(server.Close)
	s := &shop{t: t, url: server.URL}
	const front, both = `"address";q=100;w=60, "client";q=100;w=60`, `, "orders";q=10;w=3600`
	for i, ask := range []struct {
		path, body, key, policy, limit string
		status                         int
	}{
		{"/", "", "plain", front, ``, 218},
		{"/", "1234", "charged", front + both, `, "orders";r=6;t=3600`, 218},
		{"/", "1234", "charged", front, ``, 218}, // again
		{"/", "1234567", "refused", front + both, `, "orders";r=6;t=3600`, 429},
		{"/seats", "", "seats", front + `, "seats";q=5`, `, "seats";r=4`, 218},
		{"/seats", "123456", "all", front + both + `, "seats";q=5`, `, "orders";r=0;t=3600, "seats";r=4`, 218},
	} {
		r, err := s.send(t.Context(), "POST", ask.path, "ann", ask.body, ask.key)
		require.NoError(t, err)
		require.Equal(t, ask.status, r.status, ask.key)
		left := strconv.Itoa(99 - i)
		require.Equal(t, ask.policy, r.header.Get("RateLimit-Policy"), ask.key)
		require.Equal(t, `"address";r=`+left+`;t=60, "client";r=`+left+`;t=60`+ask.limit, r.header.Get("RateLimit"), ask.key)
	}
	// A replay's own numbers are older than those of the limiter in front.
	again := httptest.NewServer(limiter("ip", "seats")(once(handler)))
	t.Cleanup(again.Close)
	s.url = again.URL
	r, err := s.send(t.Context(), "POST", "/seats", "ann", "", "seats")
	require.NoError(t, err)
	require.Equal(t, `"seats";r=93;t=60`, r.header.Get("RateLimit"))
	require.Equal(t, `"seats";q=100;w=60`, r.header.Get("RateLimit-Policy"))
}
