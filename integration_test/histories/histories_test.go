package histories

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"maps"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/anishathalye/porcupine"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/pgserver"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/leases"
	"github.com/pgmetered/metered/tokens"
	"github.com/pgmetered/metered/wallet"
)

var (
	operations = flag.Int("operations", pgtest.Size(1_200, 100_000), "how many calls the clients make")
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

// world is the database, and the clients of it.
type world struct {
	*testing.T
	server    *pgserver.Server
	pool      *pgxpool.Pool // not cut
	cut       *pgxpool.Pool
	c, leased *metered.Client
	wallets   *wallet.Book
	began     time.Time

	mu     sync.Mutex
	all    []recorded
	tokens map[string]string
	ended  atomic.Int64 // calls

	faults map[string]*atomic.Int64
}

func newWorld(t *testing.T) *world {
	server, err := pgserver.Start(t.Context(), pgserver.Options{Private: true, Durable: true, Settings: map[string]string{"fsync": "off"}}) // the machine does not crash
	require.NoError(t, err)
	t.Cleanup(func() { _ = server.Stop() })
	w := &world{T: t, server: server, began: time.Now(), tokens: map[string]string{}, faults: map[string]*atomic.Int64{}}
	for _, name := range []string{"cut", "killed", "stopped", "crashed", "left", "locks", "clock"} {
		w.faults[name] = new(atomic.Int64)
	}
	config, err := pgxpool.ParseConfig(server.ConnString())
	require.NoError(t, err)
	config.MaxConns = 2 * clients
	w.pool, err = pgxpool.NewWithConfig(t.Context(), config)
	require.NoError(t, err)
	t.Cleanup(w.pool.Close)
	_, err = metered.Migrate(t.Context(), w.pool, metered.MigrateOptions{})
	require.NoError(t, err)
	_, err = w.pool.Exec(t.Context(), "create table done (id text primary key);"+clockSQL, pgx.QueryExecModeSimpleProtocol)
	require.NoError(t, err)
	var cutter *pgtest.Cutter
	w.cut, cutter = pgtest.Cut(t, w.pool)
	var again func()
	again = func() {
		if w.faults["cut"].Add(1)%2 == 0 {
			cutter.Arm(1+rand.IntN(1000), again)
		} else {
			cutter.ArmAtCommit(1+rand.IntN(60), again)
		}
	}
	cutter.Arm(200, again)
	cfg := metered.Config{LockTimeout: 5 * time.Second, MaxAttempts: 50, ResolveTimeout: 200 * time.Millisecond}
	w.c, err = metered.New(w.cut, cfg)
	require.NoError(t, err)
	pool, err := leases.New(w.cut, w.c.Budget, leases.Config{Rules: []leases.Rule{{Prefix: "leased", Least: 2, Share: 4}}})
	require.NoError(t, err)
	t.Cleanup(func() { _ = pool.Close(context.Background()) })
	cfg.Leases = pool
	w.leased, err = metered.New(w.cut, cfg)
	require.NoError(t, err)
	w.wallets, err = wallet.New(w.c.Budget, wallet.Config{})
	require.NoError(t, err)
	return w
}

// refusals are answers: the call took no effect, and says why.
var refusals = []error{budget.ErrExceeded, holds.ErrState, holds.ErrTaken, holds.ErrUnknown, tokens.ErrInvalid}

// tx makes a call in a transaction that also writes the call's row, and records the answer.
func (w *world) tx(client int, c call, fn func(ctx context.Context, tx pgx.Tx) error) error {
	id := metered.NewID()
	return w.record(client, c, id, func(ctx context.Context) (answer, error) {
		iso := []pgx.TxIsoLevel{pgx.ReadCommitted, pgx.ReadCommitted, pgx.RepeatableRead, pgx.Serializable}[rand.IntN(4)]
		return answer{}, w.c.RunTx(ctx, pgx.TxOptions{IsoLevel: iso}, func(ctx context.Context, tx pgx.Tx) error {
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
	if rand.IntN(25) == 0 {
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
	}
	r.Output = a
	w.mu.Lock()
	defer w.mu.Unlock()
	w.all = append(w.all, r)
	return err
}

// generation is the number of the things that calls are about by now.
func (w *world) generation() int64 { return w.ended.Load() / int64(*things) }

// clockSQL makes the library's clock that of the server with a step in it.
const clockSQL = `create schema stepped; create sequence stepped.clock minvalue -1000000000; select setval('stepped.clock', 0);
	create or replace function metered.clock() returns timestamptz language sql volatile security definer
	as $$ select pg_catalog.clock_timestamp() + pg_catalog.pg_sequence_last_value('stepped.clock') * interval '1 ms' $$`

// fillLocks takes all that is left of the server's table of locks, for a while: statements of others fail.
func (w *world) fillLocks(ctx context.Context) error {
	return pgx.BeginFunc(ctx, w.pool, func(tx pgx.Tx) error {
		for n := 0; ; n++ {
			if err := pgx.BeginFunc(ctx, tx, func(tx pgx.Tx) error {
				_, err := tx.Exec(ctx, "select pg_advisory_xact_lock(77, g) from generate_series($1::int, $1::int + 499) g", n*500)
				return err
			}); err != nil {
				time.Sleep(rand.N(50 * time.Millisecond)) // for so long there are none
				return err
			}
		}
	})
}

// chaos ends, kills and stops backends of the server, and the server itself, in the pace of the calls.
func (w *world) chaos() {
	ctx := context.Background()
	crash := int64(*operations) / 4
	for next, crashes := int64(10), int64(1); w.ended.Load() < int64(*operations); {
		if w.ended.Load() < next {
			time.Sleep(time.Millisecond) // faults go by the number of calls
			continue
		}
		next += 1 + rand.Int64N(60)
		if next > crash*crashes {
			crashes++
			w.faults["crashed"].Add(1)
			require.NoError(w.T, w.server.Kill())
			require.NoError(w.T, w.server.Restart(ctx))
			continue
		}
		switch rand.IntN(15) {
		case 0:
			w.faults["locks"].Add(1)
			_ = w.fillLocks(ctx)
			continue
		case 1: // within the tolerance, and now and then beyond it
			w.faults["clock"].Add(1)
			ms := rand.IntN(3000) - 1500
			if rand.IntN(20) == 0 {
				ms += 90_000
			}
			_, _ = w.pool.Exec(ctx, "select setval('stepped.clock', $1)", ms)
			continue
		}
		var pid int
		if err := w.pool.QueryRow(ctx, `select pid from pg_stat_activity where datname = current_database() and pid <> pg_backend_pid()
			and backend_type = 'client backend' order by xact_start is null, random() limit 1`).Scan(&pid); err != nil {
			continue
		}
		switch rand.IntN(20) {
		case 0: // the postmaster ends all others, too, and recovers
			w.faults["crashed"].Add(1)
			_ = syscall.Kill(pid, syscall.SIGKILL)
		case 1, 2, 3, 4:
			w.faults["stopped"].Add(1)
			if syscall.Kill(pid, syscall.SIGSTOP) == nil {
				time.Sleep(rand.N(100 * time.Millisecond)) // for so long it does nothing
				_ = syscall.Kill(pid, syscall.SIGCONT)
			}
		default:
			w.faults["killed"].Add(1)
			_, _ = w.pool.Exec(ctx, "select pg_terminate_backend($1)", pid)
		}
	}
}

// Whatever happens to connections, backends, the server and callers, the answers about each thing are those of calls one after the other. A
// call whose outcome was unknown took effect, at any time since, or not, and the database says which. No answer contradicts the database.
func TestHistories_AreThoseOfOneCallAfterTheOther(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	began := time.Now()
	var wg, chaos sync.WaitGroup
	chaos.Go(w.chaos)
	for n := range clients {
		wg.Go(func() { w.client(n) })
	}
	wg.Wait()
	chaos.Wait()
	took := time.Since(began)
	pgtest.WaitFor(t, "the server to answer", func() bool { return w.pool.Ping(t.Context()) == nil })
	pgtest.WaitSettled(t, w.pool)
	w.judge(took)
}

// judge compares the answers with the rows, resolves unknown outcomes by them, and looks for an order of the calls about each thing.
func (w *world) judge(took time.Duration) {
	rows, err := w.pool.Query(w.Context(), "select id from done")
	require.NoError(w.T, err)
	ids, err := pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(w.T, err)
	there := map[string]bool{}
	for _, id := range ids {
		there[id] = true
	}
	of := map[string][]porcupine.Operation{}
	var unknown, happened, failed, refused int
	for _, r := range w.all {
		c := r.Input.(call)
		if !r.unknown {
			require.Equal(w.T, r.written, there[r.id], "%+v was answered by %+v", c, r.Output)
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
		of[c.thing] = append(of[c.thing], r.Operation)
	}
	for _, thing := range slices.Sorted(maps.Keys(of)) {
		result := porcupine.CheckOperationsTimeout(model, of[thing], 2*time.Minute)
		if !assert.Equal(w.T, porcupine.Ok, result, "%s: no order explains the answers", thing) {
			for _, op := range of[thing] {
				w.Logf("%d to %d: %s", op.Call, op.Return, model.DescribeOperation(op.Input, op.Output))
			}
		}
	}
	report, err := w.c.Budget.Verify(w.Context(), w.pool, budget.VerifyOptions{})
	require.NoError(w.T, err)
	require.Empty(w.T, report.Differences)
	var faults []string
	for _, name := range slices.Sorted(maps.Keys(w.faults)) {
		faults = append(faults, fmt.Sprint(w.faults[name].Load(), " ", name))
	}
	w.Logf("%d calls about %d things in %s: %d refused, %d failed, %d of unknown outcome, of which %d had happened; faults: %s",
		w.ended.Load(), len(of), took.Round(time.Second), refused, failed, unknown+happened, happened, strings.Join(faults, ", "))
	require.Positive(w.T, unknown+happened)
}
