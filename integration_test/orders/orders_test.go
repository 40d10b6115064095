package orders

import (
	"context"
	"flag"
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/interleave"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/internal/schema"
)

var (
	preemptions = flag.Int("preemptions", 1, "the most switches away from a session that could go on")
	enough      = flag.Int("orders", pgtest.Sizes(60, 120, 0), "ends after so many orders, of groups in a fixed random order, each at one setting of levels. 0 runs all")
	faults      = flag.Int("faults", pgtest.Sizes(1, 2, len(planted)), "how many of the planted faults are looked for")
	only        = flag.String("calls", "", "explores the groups with these calls alone, as charge+refund")
	replay      = flag.String("order", "", "runs one order of -calls and prints its steps, as rc,rc:0.0.1.1")
	workers     = flag.Int("workers", 3*runtime.NumCPU(), "explorers at the same time")
	together    = flag.Int("together", 2, "how many calls at the same time: 3 are three of the hottest calls")
)

var levels = map[string]pgx.TxIsoLevel{"rc": pgx.ReadCommitted, "rr": pgx.RepeatableRead, "s": pgx.Serializable}

// explore walks the orders of some calls, and checks each. It returns how many there were.
func (e *explorer) explore(t testing.TB, all []call, words []string, bound int) int {
	ctx := t.Context()
	at := make([]pgx.TxIsoLevel, len(all))
	names := make([]string, len(all))
	for i, c := range all {
		at[i], names[i] = levels[words[i]], c.name
		if c.committed {
			at[i] = pgx.ReadCommitted
		}
	}
	var w *world
	failed := false
	n, err := e.Explore(ctx, bound, func(int) (steps []interleave.Call, err error) {
		w, steps, err = e.setup(ctx, all, at)
		return steps, err
	}, func(_ int, r *interleave.Run) (bool, error) {
		if err := e.judge(ctx, w, all, r); err != nil {
			t.Errorf("%s: %v\nrun it again: make interleave CALLS=%s ORDER=%s:%s\n%s", strings.Join(names, " and "), err,
				strings.Join(names, "+"), strings.Join(words, ","), r.Order, strings.Join(r.Steps, "\n"))
			failed = true
			return false, nil
		}
		return true, nil
	})
	if err != nil {
		t.Errorf("%s at %v: %v", strings.Join(names, " and "), words, err)
		return -1
	}
	if failed {
		return -1
	}
	return n
}

// hottest are the calls of which three run at the same time.
var hottest = []string{"charge", "charge-several", "refund", "place", "capture", "command", "lease-settle", "draw"}

// groups are the groups of n calls, a call with itself among them, that -calls admits.
func groups(n int) [][]call {
	of := calls
	if n > 2 {
		of = slices.DeleteFunc(slices.Clone(calls), func(c call) bool { return !slices.Contains(hottest, c.name) })
	}
	var all [][]call
	var walk func(group []call, from int)
	walk = func(group []call, from int) {
		if len(group) == n {
			wide, narrow := slices.ContainsFunc(group, func(c call) bool { return c.wide }), slices.ContainsFunc(group, func(c call) bool { return c.narrow })
			if chosen(group) && !(wide && narrow) {
				all = append(all, slices.Clone(group))
			}
			return
		}
		for i := from; i < len(of); i++ {
			walk(append(group, of[i]), i)
		}
	}
	walk(nil, 0)
	return all
}

// chosen reports whether the group has all the calls that -calls names.
func chosen(group []call) bool {
	left := slices.Clone(group)
	for _, name := range strings.FieldsFunc(*only, func(r rune) bool { return r == '+' }) {
		i := slices.IndexFunc(left, func(c call) bool { return c.name == name })
		if i < 0 {
			return false
		}
		left = slices.Delete(left, i, i+1)
	}
	return true
}

// Calls are run at the same time in each order of their statements, with at most so many preemptions, at each isolation level and mixed: the
// answers and the state are those of one call after the other, Verify is silent, and nobody deadlocks.
func TestOrders_AreSerial(t *testing.T) {
	if *replay != "" {
		t.Skip("one order is run alone")
	}
	all := groups(*together)
	settings := [][]string{{"rc", "rc", "rc"}, {"rr", "rr", "rr"}, {"s", "s", "s"}, {"rc", "s", "rr"}}
	sample := *enough > 0 && *only == ""
	if sample {
		rand.New(rand.NewPCG(1, 2)).Shuffle(len(all), func(i, j int) { all[i], all[j] = all[j], all[i] })
	}
	began := time.Now()
	var mu sync.Mutex
	total, next, done := 0, 0, 0
	var wg sync.WaitGroup
	var states sync.Map
	most := min(*workers, len(all))
	if sample {
		most = min(most, 1+*enough/500) // an explorer takes a while to make
	}
	for range most {
		e := newExplorerOf(t, *together, schema.Current().Source(), &states)
		wg.Go(func() {
			for {
				mu.Lock()
				i, full := next, sample && total >= *enough
				next++
				mu.Unlock()
				if i >= len(all) || full {
					break
				}
				at := settings
				if sample {
					at = settings[i%len(settings):][:1]
				}
				for _, words := range at {
					n := e.explore(t, all[i], words, *preemptions)
					mu.Lock()
					total += max(n, 0)
					if n < 0 {
						next = len(all)
					}
					if done++; done%100 == 0 && !testing.Short() {
						t.Logf("%d orders of %d of %d groups in %s", total, done, len(all)*len(settings), time.Since(began).Round(time.Second))
					}
					mu.Unlock()
					if n < 0 {
						break
					}
				}
			}
		})
	}
	wg.Wait()
	t.Logf("%d orders with at most %d preemptions, of %d groups of %d calls at a setting of levels, in %s: %.0f a second", total, *preemptions, done, *together, time.Since(began).Round(time.Second), float64(total)/time.Since(began).Seconds())
}

// planted are faults that the guard of the ledger does not meet: one commit between two statements is enough for a wrong answer.
var planted = []struct{ name, old, new, calls, at string }{
	{"a lease is spent from while it is settled", "if metered._try_lock_shared(of_fence) then", "if true then", "lease-spend+lease-settle", "rc,rc"},
	{"an old snapshot spends from a settled lease", "perform from metered.leases l where l.no = of_lease for key share;", "perform from metered.leases l where l.no = of_lease;", "lease-spend+lease-settle", "rr,rc"},
	{"a lease is settled twice", "    perform metered._lock_keys(array[metered._lease_key(of_no)], wait_ms);\n    before := metered._bound_lock_wait(wait_ms);\n    select * into of_lease from metered.leases y where y.no = of_no for update;",
		"    before := metered._bound_lock_wait(wait_ms);\n    select * into of_lease from metered.leases y where y.no = of_no;", "lease-settle+lease-settle", "rc,rc"},
	{"a token is looked at, and then used", "t.ended_at is null and t.expires_at > now_at) is true and metered._goes_short()", "exists (select from metered.tokens z where z.digest = token_digest and z.ended_at is null)) is true and metered._goes_short()", "consume+consume", "rc,rc"},
	{"a used token is revoked", "order by t.digest || '' for no key update) o;", "order by t.digest || '') o;", "consume+revoke-token", "rc,rc"},
	{"two consume the feed at once", "where c.consumer = of_consumer for update;\n    if not found then\n        insert", "where c.consumer = of_consumer;\n    if not found then\n        insert", "feed+feed", "rc,rc"},
	{"two give numbers at once", "from metered.feed_state s where s.one for update skip locked;", "from metered.feed_state s where s.one;", "feed+feed", "rc,rc"},
	{"an old snapshot frees units of a line that it does not see", "elsif metered._one_snapshot() and not exists", "elsif false and not exists", "refund+park", "rr,rc"},
}

// wakesByOldSnapshot releases jobs by one statement, which waits for the scope's lock, and then looks for
// River's rows as they were before.
var wakesByOldSnapshot = call{name: "wakes by an old snapshot", needs: aFailed, tx: func(ctx context.Context, tx pgx.Tx, w *world) error {
	var gone []string
	err := tx.QueryRow(ctx, `
		with asked as materialized (
			select (r.job ->> 'job_id')::bigint as id, r.job -> 'metadata' ->> 'metered:hold' as hold
			from metered.release_jobs(array[$1], null, 1800000, 64, '1 minute', null, null) r where r.status = 'released'
		), woken as (
			update river_job j set state = 'available' from asked a
			where j.id = a.id and j.state = 'pending' and j.metadata ->> 'metered:hold' = a.hold returning j.id
		)
		select coalesce(array_agg(a.hold) filter (where w.id is null), '{}') from asked a left join woken w on w.id = a.id`,
		w.scope("s")).Scan(&gone)
	if err == nil && len(gone) > 0 {
		_, err = w.book.Release(ctx, tx, holds.Release{Tenant: w.name, IDs: gone}) // River has the job no longer
	}
	return err
}, model: func(m *model) string { return m.release("s") }}

// A release that looks for River's rows by an older snapshot than for jobs in line loses a job.
func TestOrders_FindAJobThatIsLost(t *testing.T) {
	e := newExplorer(t, 2)
	f := &found{TB: t}
	e.explore(f, []call{named("job-fails"), wakesByOldSnapshot}, []string{"rc", "rc"}, 1)
	require.NotEmpty(t, f.errors)
	require.Contains(t, f.errors[0], "1 jobs stand in no line and are not started")
	e.explore(t, []call{named("job-fails"), named("release-failed")}, []string{"rc", "rc"}, 1)
}

// named is the call of a name.
func named(name string) call {
	return calls[slices.IndexFunc(calls, func(c call) bool { return c.name == name })]
}

// found notes that an order was not serial, instead of failing.
type found struct {
	testing.TB
	errors []string
}

func (f *found) Errorf(format string, args ...any) {
	f.errors = append(f.errors, fmt.Sprintf(format, args...))
}

// Each of the planted faults is found, with one preemption.
func TestOrders_FindPlantedFaults(t *testing.T) {
	source := schema.Current().Source()
	broken := make([]string, len(planted))
	for i, fault := range planted { // also of those that are not looked for here
		var places int
		broken[i], places = pgtest.Replace(source, fault.old, fault.new)
		require.Equal(t, 1, places, fault.name)
	}
	for i, fault := range planted[:min(*faults, len(planted))] {
		e := newExplorerOf(t, 2, broken[i], &sync.Map{})
		var all []call
		for _, name := range strings.Split(fault.calls, "+") {
			all = append(all, named(name))
		}
		f := &found{TB: t}
		e.explore(f, all, strings.Split(fault.at, ","), 1)
		require.NotEmpty(t, f.errors, fault.name)
		t.Logf("%s: %.200s", fault.name, f.errors[0])
	}
}

// A call that is run again begins with the same rows and ends with the same ones.
func TestOrders_BeginWithTheSameRows(t *testing.T) {
	pgtest.InCI(t)
	e := newExplorer(t, 1)
	for _, c := range calls {
		var rows [2][2][]string
		for n := range rows {
			_, steps, err := e.setup(t.Context(), []call{c}, []pgx.TxIsoLevel{pgx.ReadCommitted})
			require.NoError(t, err)
			rows[n][0], err = e.rows(t.Context())
			require.NoError(t, err)
			require.NoError(t, e.Open(t.Context()))
			_ = steps[0](t.Context(), e.Pool(0)) // some calls are refused
			rows[n][1], err = e.rows(t.Context())
			require.NoError(t, err)
		}
		require.Equal(t, rows[0], rows[1], c.name)
		require.Equal(t, c.idle, slices.Equal(rows[0][0], rows[0][1]), c.name)
	}
}

// The holds of jobs have random names. A beginning gets its own back, also where all else is as another one left it.
func TestOrders_BeginWithTheirOwnNames(t *testing.T) {
	e := newExplorer(t, 1)
	job := slices.IndexFunc(calls, func(c call) bool { return c.name == "job-rests" })
	other := slices.IndexFunc(calls, func(c call) bool { return c.name == "consume" })
	require.NotEqual(t, calls[job].needs, calls[job].needs|calls[other].needs)
	begin := func(c call) {
		w, _, err := e.setup(t.Context(), []call{c}, []pgx.TxIsoLevel{pgx.ReadCommitted})
		require.NoError(t, err)
		_, err = e.rows(t.Context())
		require.NoError(t, err)
		var held bool
		require.NoError(t, e.db.QueryRow(t.Context(), "select exists (select from metered.holds where id = $1)", w.job).Scan(&held))
		require.True(t, held, "the hold of the job is there by its name")
	}
	both := calls[job]
	both.needs |= calls[other].needs
	for range 2 {
		begin(calls[job])
		begin(both)
	}
}

// An order that is run again takes the same steps, so make interleave ORDER=... shows a failure again. It prints the steps, the answers and
// the state.
func TestOrders_OneIsRunAgain(t *testing.T) {
	names, levelsOf, text := "charge+refund", "rc,s", "1.1.0.0"
	if *replay != "" {
		var found bool
		names = *only
		levelsOf, text, found = strings.Cut(*replay, ":")
		require.True(t, found, "-order is levels and an order, as rc,rc:0.0.1")
	}
	order, err := interleave.ParseOrder(text)
	require.NoError(t, err)
	var all []call
	var at []pgx.TxIsoLevel
	for i, name := range strings.Split(names, "+") {
		n := slices.IndexFunc(calls, func(c call) bool { return c.name == name })
		require.GreaterOrEqual(t, n, 0, "no call %q", name)
		all = append(all, calls[n])
		at = append(at, levels[strings.Split(levelsOf, ",")[i]])
	}
	e := newExplorer(t, len(all))
	var first []string
	for range 2 {
		w, steps, err := e.setup(t.Context(), all, at)
		require.NoError(t, err)
		r, err := e.Run(t.Context(), order, steps)
		require.NoError(t, err)
		state, err := e.state(t.Context(), w, e.clock.Now())
		require.NoError(t, err)
		if first == nil {
			t.Logf("%s\nanswers: %v\nstate: %s", strings.Join(r.Steps, "\n"), r.Errs, state)
			first = r.Steps
		}
		require.NoError(t, e.judge(t.Context(), w, all, r))
		require.Equal(t, first, r.Steps)
		order = r.Order
	}
}
