package main

import (
	"context"
	"net/http"
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

type fixture struct {
	*app
	ann, ben client
}

// openAPI serves on loopback, with workers or without.
func openAPI(t *testing.T, limit int64, workers bool) *fixture {
	t.Helper()
	f := serve(t, exampletest.Open(t, tasksSQL), limit)
	if workers {
		require.NoError(t, f.river.Start(context.Background()))
		t.Cleanup(func() {
			ctx, cancel := pgtest.Patient(t)
			defer cancel()
			require.NoError(t, f.river.StopAndCancel(ctx))
		})
	}
	return f
}

func serve(t *testing.T, pool *pgxpool.Pool, limit int64) *fixture {
	t.Helper()
	a, err := newApp(pool, []budget.Limit{budget.PerWindow(limit, time.Hour).Named("hourly")})
	require.NoError(t, err)
	handler, err := a.handler()
	require.NoError(t, err)
	base := exampletest.Serve(t, handler)
	return &fixture{a, newClient(base, "key-of-ann"), newClient(base, "key-of-ben")}
}

// usage is an account's spent and held units, from a ledger that is verified.
func (f *fixture) usage(t *testing.T, account string) (spent, held int64) {
	t.Helper()
	pgtest.RequireVerified(t, f.pool, f.metered.Budget)
	usage, err := f.metered.Budget.Usage(t.Context(), f.pool, budget.Query{Scope: scopeOf(account)})
	require.NoError(t, err)
	return usage[0].Spent, usage[0].Held
}

func TestTask_IsChargedItsActualCost(t *testing.T) {
	t.Parallel()
	f := openAPI(t, 1_000_000, true)
	total := int64(0)
	for _, n := range []int64{2, 97, 600851475143, 1_000_000_000_039} {
		r := f.ann.submit(t.Context(), "", n)
		require.Equal(t, http.StatusAccepted, r.Status, r.Body)
		s, err := f.ann.await(t.Context(), r.Field("id"))
		require.NoError(t, err)
		factors, divisions, err := factorize(t.Context(), n)
		require.NoError(t, err)
		require.Equal(t, status{ID: r.Field("id"), Number: n, State: "done", Factors: factors, Charged: units(divisions)}, s)
		total += units(divisions)
	}
	spent, held := f.usage(t, "ann")
	require.Equal(t, []int64{total, 0}, []int64{spent, held})
}

func TestSubmit_EstimatesThatAreHeldAreNotAdmittedTwice(t *testing.T) {
	t.Parallel()
	const number = 1_000_000_000_039
	estimate := units(atMost(number))
	f := openAPI(t, 5*estimate+estimate/2, false)
	codes := map[int]int{}
	for _, r := range exampledb.AtOnce(20, func(int) examplehttp.Answer { return f.ann.submit(context.Background(), "", number) }) {
		codes[r.Status]++
	}
	require.Equal(t, map[int]int{http.StatusAccepted: 5, http.StatusTooManyRequests: 15}, codes)
	require.Equal(t, http.StatusAccepted, f.ben.submit(t.Context(), "", number).Status)
	require.Equal(t, []int{6, 6}, []int{pgtest.Count(t, f.pool, "tasks"), pgtest.Count(t, f.pool, "river_job")}, "a refusal leaves neither")
	spent, held := f.usage(t, "ann")
	require.Equal(t, []int64{0, 5 * estimate}, []int64{spent, held})
}

func TestTask_ThatFailsForGoodReleasesItsHold(t *testing.T) {
	t.Parallel()
	f := openAPI(t, 2_000_000, true)
	r := f.ann.submit(t.Context(), "", 1<<63-25) // takes too long
	require.Equal(t, http.StatusAccepted, r.Status)
	refused := f.ann.submit(t.Context(), "", 1<<60-93)
	require.Equal(t, http.StatusTooManyRequests, refused.Status, "while it is tried")
	s, err := f.ann.await(t.Context(), r.Field("id"))
	require.NoError(t, err)
	require.Equal(t, status{ID: r.Field("id"), Number: 1<<63 - 25, State: "failed"}, s)
	spent, held := f.usage(t, "ann")
	require.Equal(t, []int64{0, 0}, []int64{spent, held})
	pgtest.WaitFor(t, "River to give up", func() bool {
		return pgtest.Value[int](t, f.pool, `select coalesce(max(attempt), 0) from river_job where state = 'discarded'`) == maxAttempts
	})
}

func TestAPI_HidesTheTasksOfOtherAccounts(t *testing.T) {
	t.Parallel()
	f := openAPI(t, 100, false)
	r := f.ann.submit(t.Context(), "", 97)
	unknown := f.ben.do(t.Context(), http.MethodGet, "/tasks/unknown", "", nil)
	require.Equal(t, http.StatusNotFound, unknown.Status)
	require.Equal(t, unknown.Body, f.ben.do(t.Context(), http.MethodGet, "/tasks/"+r.Field("id"), "", nil).Body)
	nobody := newClient(f.ann.Base, "key-of-nobody")
	require.Equal(t, http.StatusUnauthorized, nobody.submit(t.Context(), "", 97).Status)
}

func TestFactorize_TakesNoMoreThanEstimated(t *testing.T) {
	t.Parallel()
	for _, n := range []int64{2, 3, 4, 9, 25, 97, 1 << 40, 1<<31 - 1, 3037000499 * 2, 999983 * 999983, 600851475143} {
		factors, divisions, err := factorize(t.Context(), n)
		require.NoError(t, err)
		product := int64(1)
		for _, f := range factors {
			product *= f
		}
		require.Equal(t, n, product)
		require.LessOrEqual(t, divisions, atMost(n), n)
	}
}

// The program is run as a user would.
func TestMeteredAPI(t *testing.T) {
	t.Parallel()
	program := exampletest.New(t)
	program.Prints(
		`"state":"done","factors":[71,839,1471,6857],"units_held":0,"units_charged":1}`,
		`"state":"done","factors":[1000000000039],"units_held":0,"units_charged":500}`,
		`"state":"failed","units_held":0,"units_charged":0}`,
		`"violated-policies":["hourly"]`,
		"charged: 501, held: 0; verified",
		": 0 differences",
	)
	require.Error(t, program.Command("-worker").Run())

	program.Serve("curl -i ", "/tasks", func(base string) {
		ann := newClient(base, "key-of-ann")
		done, err := ann.await(t.Context(), ann.submit(t.Context(), "", 91).Field("id"))
		require.NoError(t, err)
		require.Equal(t, []int64{7, 13}, done.Factors)
	})
}
