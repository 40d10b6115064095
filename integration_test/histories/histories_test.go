package main

import (
	"context"
	"flag"
	"fmt"
	"maps"
	"net"
	"regexp"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/anishathalye/porcupine"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/internal/pgserver"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/leases"
)

var (
	operations = flag.Int("operations", pgtest.Sizes(150, 300, 34_000), "how many calls the clients make in each setting")
	settings   = flag.String("settings", pgtest.Size("direct", "."), "the settings whose names match")
	things     = flag.Int("calls", 600, "how many calls are about the same things, before new ones take their place")
)

const clients = 8

// recorded is a call with its answer, and the times at which they were.
type recorded struct {
	porcupine.Operation
	outcome outcome
}

// cluster is a server of Postgres with the schema, and a client of it.
type cluster struct {
	server *pgserver.Server
	pool   *pgxpool.Pool // not cut
	base   *pgxpool.Pool // the same, or behind PgBouncer
	*app                 // with connections that are cut
	carver *leases.Carver
	moved  atomic.Pointer[pgx.ConnConfig] // of the standby that took its place
}

// world is two clusters, and the clients of them.
type world struct {
	*testing.T
	cluster
	setting
	other    *cluster
	children children
	disk     disk
	standby  *pgserver.Server
	older    []*older     // programs of the release before
	phase    atomic.Int32 // of the upgrade
	began    time.Time

	mu      sync.Mutex
	all     []recorded
	tokens  map[string]string
	calls   int64        // to make
	ended   atomic.Int64 // calls
	unknown atomic.Int64 // of their outcomes
	calm    atomic.Bool  // callers stay
	quiet   atomic.Bool  // there are no more faults

	faults map[string]*atomic.Int64
}

// setting is what lies between the clients and the first cluster.
type setting struct {
	bounced  bool   // PgBouncer in transaction mode
	standby  string // takes the primary's place in the middle: "sync", or "async" behind the primary
	upgraded bool   // from the release before, whose programs go on for a while
}

func newWorld(t *testing.T, s setting) *world {
	w := &world{T: t, setting: s, calls: int64(*operations), other: &cluster{}, began: time.Now(), tokens: map[string]string{}, faults: map[string]*atomic.Int64{},
		children: children{carved: map[string]leases.Lease{}, ended: map[string]leases.Lease{}}}
	for _, name := range []string{"cut", "killed", "stopped", "crashed", "left", "client killed", "locks", "clock", "full", "met a full disk", "other crashed", "promoted", "upgraded"} {
		w.faults[name] = new(atomic.Int64)
	}
	if s.standby == "" { // a standby would have its files in the same place
		w.disk = newDisk(t)
	}
	w.open(&w.cluster)
	w.setting.bounced = false
	w.open(w.other)
	w.setting = s
	if s.standby != "" {
		w.replicate()
	}
	return w
}

// open starts a cluster.
func (w *world) open(c *cluster) {
	t := w.T
	var err error
	c.server, err = pgserver.Start(t.Context(), pgserver.Options{Private: true, Durable: true, Settings: map[string]string{"fsync": "off"}}) // the machine does not crash
	require.NoError(t, err)
	t.Cleanup(func() { _ = c.server.Stop() })
	config, err := pgxpool.ParseConfig(c.server.ConnString())
	require.NoError(t, err)
	config.MaxConns = 2 * clients
	dial := config.ConnConfig.DialFunc
	config.ConnConfig.DialFunc = func(ctx context.Context, network, addr string) (net.Conn, error) {
		if to := c.moved.Load(); to != nil {
			network, addr = pgconn.NetworkAddress(to.Host, to.Port)
		}
		return dial(ctx, network, addr)
	}
	c.pool, err = pgxpool.NewWithConfig(t.Context(), config)
	require.NoError(t, err)
	t.Cleanup(c.pool.Close)
	if c == &w.cluster {
		require.NoError(t, w.disk.use(t.Context(), c.pool, c.server.Dir()))
	}
	if w.upgraded && c == &w.cluster {
		w.startOlder()
	} else {
		_, err = metered.Migrate(t.Context(), c.pool, metered.MigrateOptions{})
		require.NoError(t, err)
	}
	_, err = c.pool.Exec(t.Context(), "create table done (id text primary key);"+clockSQL, pgx.QueryExecModeSimpleProtocol)
	require.NoError(t, err)
	c.base = c.pool
	if w.bounced {
		port := pgtest.Bounce(t, c.pool, 0)
		c.base = pgtest.Reopen(t, c.pool, func(config *pgxpool.Config) {
			config.ConnConfig.Host, config.ConnConfig.Port, config.ConnConfig.Fallbacks = "127.0.0.1", port, nil
			config.ConnConfig.DialFunc = dial
			config.ConnConfig.DefaultQueryExecMode = pgx.QueryExecModeExec
		})
	}
	cut, cutter := pgtest.Cut(t, c.base)
	var again func()
	again = func() {
		if w.faults["cut"].Add(1)%2 == 0 {
			cutter.Arm(1+pgtest.Random(w.T).IntN(1000), again)
		} else {
			cutter.ArmAtCommit(1+pgtest.Random(w.T).IntN(60), again)
		}
	}
	cutter.Arm(200, again)
	c.app, err = newApp(cut, w.bounced)
	require.NoError(t, err)
	t.Cleanup(func() { _ = c.lent.Close(context.Background()) })
	c.carver, err = leases.NewCarver(c.c.Budget)
	require.NoError(t, err)
}

// generation is the number of the things that calls are about by now.
func (w *world) generation() int64 { return w.ended.Load() / int64(*things) }

// Whatever happens to connections, backends, servers and callers, the answers about each thing are those of calls one after the other. A
// call whose outcome was unknown took effect, at any time since, or not, and the database says which. No answer contradicts the database.
func TestHistories_AreThoseOfOneCallAfterTheOther(t *testing.T) {
	t.Parallel()
	for name, s := range map[string]setting{"direct": {}, "through PgBouncer": {bounced: true}, "a promoted standby": {standby: "sync"}, "a rolling upgrade": {upgraded: true}} {
		if !regexp.MustCompile(*settings).MatchString(name) {
			continue
		}
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			require.Empty(t, newWorld(t, s).run())
		})
	}
}

// A standby that is behind loses commits, and the judge sees that they are missing.
func TestHistories_FindTheLossOfAnAsynchronousStandby(t *testing.T) {
	t.Parallel()
	pgtest.InCI(t)
	w := newWorld(t, setting{standby: "async"})
	w.calls = min(w.calls, 300)
	require.NotEmpty(t, w.run())
}

// run makes the calls, and returns what contradicts their answers.
func (w *world) run() []string {
	began := time.Now()
	var wg, chaos sync.WaitGroup
	chaos.Go(func() {
		w.chaos()
		w.quiet.Store(true)
	})
	if w.upgraded {
		chaos.Go(w.upgrade)
	}
	for n := range clients {
		wg.Go(func() { w.client(n) })
	}
	wg.Wait()
	chaos.Wait()
	took := time.Since(began)
	for _, on := range []*cluster{&w.cluster, w.other} {
		pgtest.WaitFor(w.T, "the server to answer", func() bool { return on.pool.Ping(w.Context()) == nil })
		pgtest.WaitSettled(w.T, on.pool)
	}
	return w.judge(took)
}

// judge compares the answers with the rows, resolves unknown outcomes by them, and looks for an order of the calls about each thing.
func (w *world) judge(took time.Duration) (wrong []string) {
	there := map[string]bool{}
	for _, on := range []*cluster{&w.cluster, w.other} {
		rows, err := on.pool.Query(w.Context(), "select id from done")
		require.NoError(w.T, err)
		ids, err := pgx.CollectRows(rows, pgx.RowTo[string])
		require.NoError(w.T, err)
		for _, id := range ids {
			there[id] = true
		}
	}
	of := map[string][]porcupine.Operation{}
	spent := map[string]int64{} // of each child
	var happened, lost, ineffective, denied int
	for _, r := range w.all {
		c, a := r.Input.(call), r.Output.(answer)
		written := r.outcome == done && c.ID != "" && (c.Kind != "do" || a.State == c.Who)
		if r.outcome != unknown && written != there[c.ID] {
			wrong = append(wrong, fmt.Sprintf("%+v was answered by %+v, and its row is there: %v", c, a, there[c.ID]))
		}
		switch {
		case r.outcome == unknown && there[c.ID]:
			happened++
		case r.outcome == unknown:
			lost++
			continue
		case r.outcome == failed:
			ineffective++
			continue
		case r.outcome == refused:
			denied++
		}
		if strings.HasPrefix(c.Thing, "child") && !a.Refused {
			spent[c.Thing] += c.Amount
		}
		of[c.Thing] = append(of[c.Thing], r.Operation)
	}
	if len(wrong) > 0 {
		return wrong
	}
	for _, thing := range slices.Sorted(maps.Keys(of)) {
		if result := porcupine.CheckOperationsTimeout(model, of[thing], 2*time.Minute); result != porcupine.Ok {
			wrong = append(wrong, fmt.Sprintf("%s: no order explains the answers (%s)", thing, result))
			for _, op := range of[thing] {
				w.Logf("%d to %d: %s", op.Call, op.Return, model.DescribeOperation(op.Input, op.Output))
			}
		}
	}
	w.settleChildren(spent)
	for _, on := range []*cluster{&w.cluster, w.other} {
		report, err := on.c.Budget.Verify(w.Context(), on.pool, budget.VerifyOptions{})
		require.NoError(w.T, err)
		for _, d := range report.Differences {
			wrong = append(wrong, fmt.Sprint(d))
		}
	}
	var faults []string
	for _, name := range slices.Sorted(maps.Keys(w.faults)) {
		faults = append(faults, fmt.Sprint(w.faults[name].Load(), " ", name))
	}
	w.Logf("%d calls about %d things in %s: %d refused, %d failed, %d of unknown outcome, of which %d had happened; faults: %s",
		w.ended.Load(), len(of), took.Round(time.Second), denied, ineffective, lost+happened, happened, strings.Join(faults, ", "))
	require.Positive(w.T, lost+happened)
	return wrong
}

// model is that of porcupine: each thing is judged alone.
var model = porcupine.Model{
	Init: func() any { return state{} },
	Step: func(s, in, out any) (bool, any) {
		ok, next := step(s.(state), in.(call), out.(answer))
		return ok, next
	},
	Equal: func(a, b any) bool { return a == b },
	DescribeOperation: func(in, out any) string {
		return fmt.Sprintf("%+v: %+v", in, out)
	},
}
