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
	operations = flag.Int("operations", pgtest.Size(1_500, 100_000), "how many calls the clients make")
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
	for _, name := range []string{"cut", "killed", "stopped", "crashed", "left"} {
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
	_, err = w.pool.Exec(t.Context(), "create table done (id text primary key)")
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

// client makes calls of all kinds until enough were made.
func (w *world) client(n int) {
	charged := map[string][]budget.Posted{} // that it may refund
	for w.ended.Load() < int64(*operations) {
		failed := w.one(n, charged) != nil
		for failed && w.pool.Ping(context.Background()) != nil {
			time.Sleep(10 * time.Millisecond) // the server restarts: not all calls are to meet that
		}
	}
}

func (w *world) one(n int, charged map[string][]budget.Posted) error {
	of := func(kind string) string { return fmt.Sprint(kind, "/", w.generation(), "/", rand.IntN(2)) }
	units := 1 + rand.Int64N(4)
	switch rand.IntN(12) {
	case 0, 1:
		c := call{thing: of("scope"), kind: "charge", amount: units, limit: 30}
		var entry budget.Posted
		err := w.tx(n, c, func(ctx context.Context, tx pgx.Tx) error {
			r, err := w.c.Budget.Charge(ctx, tx, budget.Charge{Scope: c.thing, Amount: units, Limits: []budget.Limit{budget.Lifetime(c.limit)}})
			if err == nil {
				entry = r.Entries[0]
			}
			return err
		})
		if err == nil {
			charged[c.thing] = append(charged[c.thing], entry)
		}
		return err
	case 2:
		if len(charged) == 0 {
			return nil
		}
		scope := slices.Sorted(maps.Keys(charged))[rand.IntN(len(charged))]
		entry := charged[scope][0]
		if charged[scope] = charged[scope][1:]; len(charged[scope]) == 0 {
			delete(charged, scope)
		}
		return w.tx(n, call{thing: scope, kind: "refund", amount: entry.Amount}, func(ctx context.Context, tx pgx.Tx) error {
			_, err := w.c.Budget.Refund(ctx, tx, budget.Refund{Scope: scope, Seq: entry.Seq, Amount: entry.Amount})
			return err
		})
	case 3:
		c := call{thing: of([]string{"scope", "scope", "leased"}[rand.IntN(3)]), kind: "usage"}
		return w.record(n, c, "", func(ctx context.Context) (answer, error) {
			u, err := w.c.Budget.Usage(ctx, w.cut, budget.Query{Scope: c.thing})
			if err != nil {
				return answer{}, err
			}
			return answer{units: u[0].Used}, nil
		})
	case 4:
		c := call{thing: of("wallet"), kind: "charge", amount: units}
		return w.tx(n, c, func(ctx context.Context, tx pgx.Tx) error {
			_, err := w.wallets.Draw(ctx, tx, wallet.Draw{Wallet: c.thing, Amount: units})
			return err
		})
	case 5:
		c := call{thing: of("wallet"), kind: "credit", amount: units}
		if rand.IntN(2) == 0 {
			c.kind = "usage"
			return w.record(n, c, "", func(ctx context.Context) (answer, error) {
				b, err := w.wallets.Balance(ctx, w.cut, c.thing)
				return answer{units: -b.Units}, err
			})
		}
		return w.tx(n, c, func(ctx context.Context, tx pgx.Tx) error {
			_, err := w.wallets.Grant(ctx, tx, wallet.Grant{Wallet: c.thing, Amount: units, For: time.Duration(1+rand.IntN(3)) * time.Hour})
			return err
		})
	case 6:
		return w.hold(n, of("hold"))
	case 7:
		return w.claim(n, of("claim"))
	case 8, 9:
		return w.do(n, of("operation"))
	case 10:
		c := call{thing: of("token"), kind: "consume"}
		text, err := w.token(c.thing)
		if err != nil {
			return err
		}
		return w.tx(n, c, func(ctx context.Context, tx pgx.Tx) error {
			_, err := w.c.Tokens.Consume(ctx, tx, "p", c.thing, text)
			return err
		})
	}
	c := call{thing: of("leased"), kind: "leased charge", amount: units, limit: 200}
	id := metered.NewID()
	return w.record(n, c, id, func(ctx context.Context) (answer, error) {
		_, err := metered.Do(ctx, w.leased, metered.Command{ID: id, Input: 1, Charges: []budget.Charge{{Scope: c.thing, Amount: units, Limits: []budget.Limit{budget.Lifetime(c.limit)}}}},
			func(ctx context.Context, tx *metered.Tx) (int, error) {
				_, err := tx.Exec(ctx, insert, id)
				return 1, err
			})
		return answer{}, err
	})
}

// hold places a hold, ends it, or looks at it.
func (w *world) hold(n int, id string) error {
	c := call{thing: id, kind: []string{"place", "capture", "release", "look"}[rand.IntN(4)]}
	if c.kind == "look" {
		return w.record(n, c, "", func(ctx context.Context) (answer, error) {
			h, err := w.c.Holds.Get(ctx, w.cut, "", id, "")
			if errors.Is(err, holds.ErrUnknown) {
				return answer{}, nil
			}
			return answer{state: string(h.State)}, err
		})
	}
	return w.tx(n, c, func(ctx context.Context, tx pgx.Tx) (err error) {
		switch c.kind {
		case "place":
			var h holds.Hold
			h, err = w.c.Holds.Place(ctx, tx, holds.Request{ID: id, TTL: time.Hour, Lines: []holds.Line{{Scope: "held " + id, Amount: 1}}})
			if err == nil && !h.Created {
				err = holds.ErrState // it was placed before
			}
		case "capture":
			_, err = w.c.Holds.Capture(ctx, tx, holds.Capture{IDs: []string{id}, All: true})
		default:
			_, err = w.c.Holds.Release(ctx, tx, holds.Release{IDs: []string{id}})
		}
		return err
	})
}

// claim claims a key, or lets go of it.
func (w *world) claim(n int, value string) error {
	who := fmt.Sprint("client ", n)
	key := holds.Key{Type: "key", Value: value}
	if rand.IntN(2) == 0 {
		return w.tx(n, call{thing: value, kind: "claim", who: who}, func(ctx context.Context, tx pgx.Tx) error {
			_, err := w.c.Holds.Claim(ctx, tx, holds.Claim{Key: key, Holder: who, TTL: time.Hour})
			return err
		})
	}
	return w.tx(n, call{thing: value, kind: "let go", who: who}, func(ctx context.Context, tx pgx.Tx) error {
		list, err := w.c.Holds.List(ctx, tx, holds.Filter{Claim: key, Holder: who, State: holds.Held})
		if err != nil {
			return err
		}
		if len(list.Holds) == 0 {
			return holds.ErrUnknown
		}
		_, err = w.c.Holds.Release(ctx, tx, holds.Release{IDs: []string{list.Holds[0].ID}})
		return err
	})
}

// do runs a command. Its result is the value of the attempt that ran.
func (w *world) do(n int, of string) error {
	value := metered.NewID()
	return w.record(n, call{thing: of, kind: "do", who: value}, value, func(ctx context.Context) (answer, error) {
		cmd := metered.Command{ID: of, Input: 1, EarlyRelease: rand.IntN(3) == 0, LSN: rand.IntN(5) == 0}
		out, err := metered.Do(ctx, w.c, cmd, func(ctx context.Context, tx *metered.Tx) (string, error) {
			_, err := tx.Exec(ctx, insert, value)
			return value, err
		})
		return answer{state: out.Result}, err
	})
}

// token is the token of a name, which the first call mints.
func (w *world) token(name string) (string, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if text := w.tokens[name]; text != "" {
		return text, nil
	}
	err := pgx.BeginFunc(context.Background(), w.pool, func(tx pgx.Tx) error {
		minted, err := w.c.Tokens.Mint(context.Background(), tx, tokens.Mint{Purpose: "p", Subject: name})
		if err == nil {
			w.tokens[name] = minted.Token.Reveal()
		}
		return err
	})
	if err != nil {
		delete(w.tokens, name) // nobody has presented it
	}
	return w.tokens[name], err
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
