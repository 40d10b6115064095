package leases_test

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/leases"
)

const (
	childOf  = "METERED_LEASES_CHILD" // a connection string makes the test binary a process with a Pool
	childTTL = "METERED_LEASES_TTL"   // and this is how long its leases last
)

const childMax = 100_000

// serve reads commands, a line each, runs them, and answers each with a line.
func serve(conn string) {
	ctx := context.Background()
	db, err := pgxpool.New(ctx, conn)
	if err != nil {
		panic(err)
	}
	ledger, err := budget.New(budget.Config{})
	if err != nil {
		panic(err)
	}
	ttl, err := time.ParseDuration(os.Getenv(childTTL))
	if err != nil {
		panic(err)
	}
	p, err := leases.New(db, ledger, leases.Config{Rules: []leases.Rule{{TTL: ttl, Idle: ttl, Share: 2}}})
	if err != nil {
		panic(err)
	}
	var open pgx.Tx
	for lines := bufio.NewScanner(os.Stdin); lines.Scan(); {
		c, err, lease := charge(1, budget.Lifetime(childMax)), error(nil), int64(0)
		switch lines.Text() {
		case "allow":
			err = p.Allow(ctx, c)
		case "begin", "spend":
			if open, err = db.Begin(ctx); err != nil {
				break
			}
			r, failed := p.Charge(ctx, open, c)
			if err = failed; err == nil {
				lease = r.Entries[0].Lease
			}
			if lines.Text() == "begin" {
				break
			}
			fallthrough
		case "commit":
			if err != nil {
				_ = open.Rollback(ctx)
			} else {
				err = open.Commit(ctx)
			}
		case "close":
			err = p.Close(ctx)
		}
		if err != nil {
			fmt.Println(err)
		} else {
			fmt.Println("ok", lease)
		}
	}
}

type child struct {
	*exec.Cmd
	in  io.WriteCloser
	out *bufio.Scanner
}

func (f *fixture) child(ttl time.Duration) *child {
	c := &child{Cmd: exec.Command(os.Args[0])}
	c.Env, c.Stderr = append(os.Environ(), childOf+"="+pgtest.ConnString(f.db), childTTL+"="+ttl.String()), os.Stderr
	in, err := c.StdinPipe()
	require.NoError(f, err)
	out, err := c.StdoutPipe()
	require.NoError(f, err)
	require.NoError(f, c.Start())
	f.Cleanup(func() { _ = c.Process.Kill(); _ = c.Wait() })
	c.in, c.out = in, bufio.NewScanner(out)
	return c
}

// tell sends the child a command, and returns its lease, or -1 and the error.
func (c *child) tell(what string) (lease int64, failed string) {
	_, _ = io.WriteString(c.in, what+"\n")
	if !c.out.Scan() {
		return -1, "it is gone"
	}
	if n, _ := fmt.Sscanf(c.out.Text(), "ok %d", &lease); n != 1 {
		return -1, c.out.Text()
	}
	return lease, ""
}

func (f *fixture) warmChild(c *child, what string) (done int64) {
	pgtest.WaitFor(f, "the child to have a lease", func() bool {
		lease, failed := c.tell(what)
		require.Empty(f, failed)
		done++
		return lease > 0 || what == "allow" && f.usage("hot").Leased > 0
	})
	return done
}

func (f *fixture) settleAll(p *leases.Pool) {
	pgtest.WaitFor(f, "all leases to be settled", func() bool {
		_, err := leases.Sweep(f.Context(), f.db, f.ledger)
		require.NoError(f, err)
		u := f.usage("hot")
		return u.Held+u.Leased == 0
	})
}

// A process is stopped, its lease ends and others settle it, and the process goes on: it believes to have the slice, and
// spends nothing of it. All in all never more is spent than there is.
func TestStopped_AProcessDoesNotSpendFromALeaseThatOthersSettled(t *testing.T) {
	t.Parallel()
	for _, what := range []string{"spend", "allow"} {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			f := setUp(t)
			c, other := f.child(2*time.Second), f.pool(leases.Rule{})
			done := f.warmChild(c, what)
			slice := pgtest.Value[int64](t, f.db, `select coalesce(max(granted), 0) from metered.leases where settled_at is null`)
			require.NoError(t, c.Process.Signal(syscall.SIGSTOP))
			f.settleAll(other)
			settled := f.usage("hot").Spent
			if what == "spend" {
				require.Equal(t, done, settled)
			} else {
				require.LessOrEqual(t, done, settled)
				require.LessOrEqual(t, settled, done+slice)
			}
			// All free units are spent meanwhile: one more that the child lets in would exceed the limit.
			_, err := f.spend(other, pgx.ReadCommitted, charge(childMax-settled, budget.Lifetime(childMax)))
			require.NoError(t, err)
			require.NoError(t, c.Process.Signal(syscall.SIGCONT))
			for range 20 {
				_, failed := c.tell(what)
				require.Contains(t, failed, "exceeded")
			}
			_, failed := c.tell("close")
			require.Empty(t, failed)
			require.Equal(t, int64(childMax), f.settled("hot", other))
		})
	}
}

// A process is killed with a spend that has not committed. Nothing else is lost.
func TestKilled_OnlyCommittedSpendsCount(t *testing.T) {
	t.Parallel()
	f := setUp(t)
	clock := pgtest.SetClock(t, f.db, pgtest.Tomorrow(9))
	c, other := f.child(time.Minute), f.pool(leases.Rule{})
	done := f.warmChild(c, "spend")
	for range 5 {
		lease, failed := c.tell("spend")
		require.Empty(t, failed)
		require.Positive(t, lease)
		done++
	}
	lease, failed := c.tell("begin")
	require.Empty(t, failed)
	require.Positive(t, lease)
	require.NoError(t, c.Process.Kill())
	clock.Advance(time.Minute)
	f.settleAll(other)
	require.Equal(t, done, f.settled("hot", other))
}

func TestKilled_AllowLosesAtMostTheSlices(t *testing.T) {
	t.Parallel()
	f := setUp(t)
	c, other := f.child(2*time.Second), f.pool(leases.Rule{})
	done := f.warmChild(c, "allow")
	for range 5 {
		_, failed := c.tell("allow")
		require.Empty(t, failed)
		done++
	}
	require.NoError(t, c.Process.Kill())
	granted := pgtest.Value[int64](t, f.db, `select coalesce(sum(granted), 0)::bigint from metered.leases`)
	f.settleAll(other)
	spent := f.settled("hot", other)
	require.GreaterOrEqual(t, spent, done)
	require.LessOrEqual(t, spent, done+granted)
}

// The process, its connection or its server is lost at each statement. Once others have settled, leases in rows count
// exactly the committed spends. The short form has the two rarer faults where their answers differ most.
func TestLost_AtEachStatementNothingIsLost(t *testing.T) {
	t.Parallel()
	lose := func(_ *testing.T, _ *fixture, x *pgtest.Flush) { x.Lose() }
	loseAnswer := func(_ *testing.T, _ *fixture, x *pgtest.Flush) { x.LoseAnswer() }
	terminate := func(t *testing.T, f *fixture, x *pgtest.Flush) { x.Terminate(t, f.db) }
	for _, statement := range []string{"open_lease", "after open", "a spend", "commit", "settle_lease"} {
		for _, fault := range []struct {
			name string
			do   func(*testing.T, *fixture, *pgtest.Flush)
			dead bool // and so is the process
		}{{"lost", lose, true}, {"unanswered and dead", loseAnswer, true}, {"unanswered", loseAnswer, false}, {"terminated", terminate, false}} {
			rare := fault.name == "unanswered and dead" && statement != "commit" && statement != "a spend" ||
				fault.name == "terminated" && statement != "commit" && statement != "open_lease"
			if rare && !pgtest.Long {
				continue
			}
			t.Run(statement+" "+fault.name, func(t *testing.T) {
				t.Parallel()
				lostAt(t, statement, fault.dead, fault.do)
			})
		}
	}
}

func lostAt(t *testing.T, statement string, dead bool, fault func(*testing.T, *fixture, *pgtest.Flush)) {
	f := setUp(t)
	clock := pgtest.SetClock(t, f.db, pgtest.Tomorrow(9))
	_, err := f.db.Exec(t.Context(), `create table mine (amount bigint)`)
	require.NoError(t, err)
	db, w := pgtest.Tap(t, f.db, nil)
	p, err := leases.New(db, f.ledger, leases.Config{Rules: []leases.Rule{{Share: 2, Idle: 30 * time.Millisecond}}, NoRecall: true})
	require.NoError(t, err)
	limit := budget.Lifetime(10_000)
	var opened, hit atomic.Bool
	w.Each(func(x *pgtest.Flush) {
		at := x.Has(statement) || statement == "after open" && opened.Load() && x.Has("commit") ||
			statement == "a spend" && (x.Has("charge_leased(") || x.Has("spend("))
		if x.Has("open_lease") {
			opened.Store(true)
		}
		switch {
		case at && hit.CompareAndSwap(false, true):
			fault(t, f, x)
		case dead && hit.Load():
			x.Lose()
		}
	})
	spend := func() {
		_ = pgx.BeginFunc(t.Context(), db, func(tx pgx.Tx) error {
			if _, err := tx.Exec(t.Context(), `insert into mine values (3)`); err != nil {
				return err
			}
			_, err := p.Charge(t.Context(), tx, charge(3, limit))
			return err
		})
	}
	for n := 0; !hit.Load(); n++ {
		spend()
		if n > 10 {
			time.Sleep(20 * time.Millisecond) // idle: given back
		}
		require.Less(t, n, 500)
	}
	if !dead {
		for range 10 {
			spend()
		}
	}
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	if !dead {
		ctx = t.Context()
	}
	_ = p.Close(ctx)
	cancel()
	pgtest.WaitSettled(t, f.db)
	committed := pgtest.Value[int64](t, f.db, `select coalesce(sum(amount), 0)::bigint from mine`)
	require.Equal(t, committed, f.usage("hot").Used, "before the end, too")
	clock.Advance(10 * time.Second)
	other := f.pool(leases.Rule{})
	f.settleAll(other)
	require.Equal(t, committed, f.settled("hot", other))
}
