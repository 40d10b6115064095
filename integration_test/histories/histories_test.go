package histories

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"maps"
	"math"
	"math/rand/v2"
	"net"
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
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/pgserver"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/internal/sqlstate"
	"github.com/pgmetered/metered/leases"
	"github.com/pgmetered/metered/tokens"
	"github.com/pgmetered/metered/wallet"
)

var (
	operations = flag.Int("operations", pgtest.Size(600, 34_000), "how many calls the clients make in each setting")
	things     = flag.Int("calls", 600, "how many calls are about the same things, before new ones take their place")
)

const clients = 8

// recorded is a call with its answer, and the times at which they were.
type recorded struct {
	porcupine.Operation
	id      string // of the row that it writes if it takes effect
	unknown bool   // whether it took effect
	failed  bool   // without effect
	written bool   // its row must be there, if its outcome is known
}

// cluster is a server of Postgres with the schema, and a client of it.
type cluster struct {
	server *pgserver.Server
	pool   *pgxpool.Pool // not cut
	base   *pgxpool.Pool // the same, or behind PgBouncer
	cut    *pgxpool.Pool
	c      *metered.Client
	carver *leases.Carver
	moved  atomic.Pointer[pgx.ConnConfig] // of the standby that took its place
}

// world is two clusters, and the clients of them.
type world struct {
	*testing.T
	cluster
	setting
	other    *cluster
	leased   *metered.Client
	wallets  *wallet.Book
	children children
	disk     disk
	standby  *pgserver.Server
	began    time.Time

	mu     sync.Mutex
	all    []recorded
	tokens map[string]string
	calls  int64        // to make
	ended  atomic.Int64 // calls
	calm   atomic.Bool  // callers stay

	faults map[string]*atomic.Int64
}

// setting is what lies between the clients and the first cluster.
type setting struct {
	bounced bool   // PgBouncer in transaction mode
	standby string // takes the primary's place in the middle: "sync", or "async" behind the primary
}

func newWorld(t *testing.T, s setting) *world {
	w := &world{T: t, setting: s, calls: int64(*operations), other: &cluster{}, began: time.Now(), tokens: map[string]string{}, faults: map[string]*atomic.Int64{},
		children: children{carved: map[string]leases.Lease{}, ended: map[string]leases.Lease{}}}
	for _, name := range []string{"cut", "killed", "stopped", "crashed", "left", "locks", "clock", "full", "met a full disk", "other crashed", "promoted"} {
		w.faults[name] = new(atomic.Int64)
	}
	if s.standby == "" { // a standby would have its files in the same place
		w.disk = newDisk(t)
	}
	w.open(&w.cluster)
	w.setting.bounced = false
	w.open(w.other)
	w.setting = s
	pool, err := leases.New(w.cut, w.c.Budget, leases.Config{Rules: []leases.Rule{{Prefix: "leased", Least: 2, Share: 4}}, NoRecall: s.bounced})
	require.NoError(t, err)
	t.Cleanup(func() { _ = pool.Close(context.Background()) })
	cfg := clientConfig
	cfg.Leases = pool
	w.leased, err = metered.New(w.cut, cfg)
	require.NoError(t, err)
	w.wallets, err = wallet.New(w.c.Budget, wallet.Config{})
	require.NoError(t, err)
	if s.standby != "" {
		w.replicate()
	}
	return w
}

var clientConfig = metered.Config{LockTimeout: 5 * time.Second, MaxAttempts: 50, ResolveTimeout: 200 * time.Millisecond}

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
	_, err = metered.Migrate(t.Context(), c.pool, metered.MigrateOptions{})
	require.NoError(t, err)
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
	var cutter *pgtest.Cutter
	c.cut, cutter = pgtest.Cut(t, c.base)
	var again func()
	again = func() {
		if w.faults["cut"].Add(1)%2 == 0 {
			cutter.Arm(1+rand.IntN(1000), again)
		} else {
			cutter.ArmAtCommit(1+rand.IntN(60), again)
		}
	}
	cutter.Arm(200, again)
	c.c, err = metered.New(c.cut, clientConfig)
	require.NoError(t, err)
	c.carver, err = leases.NewCarver(c.c.Budget)
	require.NoError(t, err)
}

// refusals are answers: the call took no effect, and says why.
var refusals = []error{budget.ErrExceeded, budget.ErrScopeClosed, holds.ErrState, holds.ErrTaken, holds.ErrUnknown, tokens.ErrInvalid}

// tx makes a call in a transaction that also writes the call's row, and records the answer.
func (w *world) tx(on *cluster, client int, c call, fn func(ctx context.Context, tx pgx.Tx) error) error {
	id := metered.NewID()
	return w.record(client, c, id, func(ctx context.Context) (answer, error) {
		iso := []pgx.TxIsoLevel{pgx.ReadCommitted, pgx.ReadCommitted, pgx.RepeatableRead, pgx.Serializable}[rand.IntN(4)]
		return answer{}, on.c.RunTx(ctx, pgx.TxOptions{IsoLevel: iso}, func(ctx context.Context, tx pgx.Tx) error {
			if err := fn(ctx, tx); err != nil {
				return err
			}
			_, err := tx.Exec(ctx, insert, id)
			return err
		})
	})
}

const insert = "insert into done values ($1)"

// record makes a call, sometimes of a caller that leaves. If the call takes effect, it writes the row of id. A reading has none.
func (w *world) record(client int, c call, id string, fn func(ctx context.Context) (answer, error)) error {
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	if rand.IntN(25) == 0 && !w.calm.Load() {
		time.AfterFunc(rand.N(10*time.Millisecond), func() { w.faults["left"].Add(1); cancel() })
	}
	r := recorded{id: id, Operation: porcupine.Operation{ClientId: client, Input: c}}
	r.Call = int64(time.Since(w.began))
	a, err := fn(ctx)
	r.Return = int64(time.Since(w.began))
	w.ended.Add(1)
	switch refused := slices.ContainsFunc(refusals, func(target error) bool { return errors.Is(err, target) }); {
	case err == nil:
		r.written = id != "" && (c.kind != "do" || a.state == c.who)
	case refused:
		a = answer{refused: true}
	case errors.Is(err, metered.ErrIndefinite) || errors.Is(err, metered.ErrCommitUnknown):
		r.unknown = true
		r.Return = math.MaxInt64
		a = answer{state: c.who} // if its row is there, it ran
	case id == "":
		return err // a reading that failed says nothing
	default:
		r.failed = true
		if sqlstate.Of(err) == sqlstate.DiskFull {
			w.faults["met a full disk"].Add(1)
		}
	}
	r.Output = a
	w.mu.Lock()
	defer w.mu.Unlock()
	w.all = append(w.all, r)
	return err
}

// generation is the number of the things that calls are about by now.
func (w *world) generation() int64 { return w.ended.Load() / int64(*things) }

// Whatever happens to connections, backends, servers and callers, the answers about each thing are those of calls one after the other. A
// call whose outcome was unknown took effect, at any time since, or not, and the database says which. No answer contradicts the database.
func TestHistories_AreThoseOfOneCallAfterTheOther(t *testing.T) {
	t.Parallel()
	for name, s := range map[string]setting{"direct": {}, "through PgBouncer": {bounced: true}, "a promoted standby": {standby: "sync"}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			require.Empty(t, newWorld(t, s).run())
		})
	}
}

// A standby that is behind loses commits, and the judge sees that they are missing.
func TestHistories_FindTheLossOfAnAsynchronousStandby(t *testing.T) {
	t.Parallel()
	w := newWorld(t, setting{standby: "async"})
	w.calls = min(w.calls, 600)
	require.NotEmpty(t, w.run())
}

// run makes the calls, and returns what contradicts their answers.
func (w *world) run() []string {
	began := time.Now()
	var wg, chaos sync.WaitGroup
	chaos.Go(w.chaos)
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
	var unknown, happened, failed, refused int
	for _, r := range w.all {
		c := r.Input.(call)
		if !r.unknown && r.written != there[r.id] {
			wrong = append(wrong, fmt.Sprintf("%+v was answered by %+v, and its row is there: %v", c, r.Output, there[r.id]))
		}
		switch {
		case r.unknown && there[r.id]:
			happened++
		case r.unknown:
			unknown++
			continue
		case r.failed:
			failed++
			continue
		case r.Output.(answer).refused:
			refused++
		}
		if strings.HasPrefix(c.thing, "child") && !r.Output.(answer).refused {
			spent[c.thing] += c.amount
		}
		of[c.thing] = append(of[c.thing], r.Operation)
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
		w.ended.Load(), len(of), took.Round(time.Second), refused, failed, unknown+happened, happened, strings.Join(faults, ", "))
	require.Positive(w.T, unknown+happened)
	return wrong
}
