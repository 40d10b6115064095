package integration_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/cells"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/jobs"
	"github.com/pgmetered/metered/wallet"
)

// moverEnv has the number of pools and the connection string of a child process that moves a tenant to and fro.
const moverEnv = "METERED_TEST_MOVER"

// keepMoving moves a tenant until the process is killed.
func keepMoving(ctx context.Context, env string) error {
	count, connString, _ := strings.Cut(env, " ")
	pools, err := strconv.Atoi(count)
	if err != nil {
		return err
	}
	var all []*pgxpool.Pool
	for range pools {
		pool, err := pgxpool.New(ctx, connString)
		if err != nil {
			return err
		}
		all = append(all, pool)
	}
	r, err := cellsOn(all...)
	for n := 0; err == nil; n++ {
		err = r.Move(ctx, cells.Move{Tenant: "acme", To: n % 2, LockTimeout: time.Minute})
	}
	return err
}

// traffic is what callers on all nodes have done for a tenant.
type traffic struct {
	*citus
	most                                             int64
	charged, refused, captured, held, drawn, retried atomic.Int64
	mu                                               sync.Mutex
	commands                                         []string     // that were acknowledged
	jobs                                             map[int]bool // by their keys
}

const (
	granted   = 100_000
	heldUnits = 2
	drawUnits = 3
)

// act does one thing of the tenant, again until it is done.
func (a *traffic) act(ctx context.Context, r *cells.Router, id string, n int) error {
	level := pgtest.IsolationLevels[n/4%3]
	cmd := metered.Command{ID: id, Tenant: "acme", Input: n, Isolation: level}
	var fn func(book *wallet.Book) metered.Func[int]
	switch n % 4 {
	case 0:
		cmd.Charges = []budget.Charge{{Scope: "acme/uploads", Amount: 1, Limits: []budget.Limit{budget.Lifetime(a.most)}}}
	case 1:
		cmd.Holds = []holds.Placement{{Tenant: "acme", ID: id, TTL: time.Hour, Lines: []holds.Line{{Scope: "acme/seats", Amount: heldUnits}}}}
	case 2:
		fn = func(book *wallet.Book) metered.Func[int] {
			return func(_ context.Context, tx *metered.Tx) (int, error) {
				return n, tx.Charge(book.Charge("acme/wallet", drawUnits))
			}
		}
	default: // callers on all nodes enqueue the same jobs
		fn = func(*wallet.Book) metered.Func[int] {
			return func(ctx context.Context, tx *metered.Tx) (int, error) {
				_, err := tx.Enqueue(ctx, plainJob{n}, &jobs.Options{Tenant: "acme", Key: fmt.Sprint(n)})
				return n, err
			}
		}
	}
	err := a.again(ctx, r, func(ctx context.Context, c *metered.Client) error {
		book, err := wallet.New(c.Budget, wallet.Config{})
		if err != nil {
			return err
		}
		var do metered.Func[int]
		if fn != nil {
			do = fn(book)
		}
		_, err = metered.Do(ctx, c, cmd, do)
		return err
	})
	if errors.Is(err, budget.ErrExceeded) {
		a.refused.Add(1)
		return nil
	}
	if err != nil {
		return err
	}
	a.mu.Lock()
	a.commands = append(a.commands, id)
	if n%4 == 3 {
		a.jobs[n] = true
	}
	a.mu.Unlock()
	switch {
	case n%4 == 0:
		a.charged.Add(1)
	case n%4 == 2:
		a.drawn.Add(1)
	case n%4 == 3:
	case n%8 == 1:
		a.held.Add(1)
	default:
		a.captured.Add(1)
		return a.again(ctx, r, func(ctx context.Context, c *metered.Client) error {
			return c.RunTx(ctx, pgx.TxOptions{IsoLevel: level}, func(ctx context.Context, tx pgx.Tx) error {
				_, err := c.Holds.Capture(ctx, tx, holds.Capture{Tenant: "acme", IDs: []string{id}, All: true})
				return err
			})
		})
	}
	return nil
}

func (a *traffic) again(ctx context.Context, r *cells.Router, fn func(ctx context.Context, c *metered.Client) error) error {
	for {
		err := r.Run(ctx, "acme", fn)
		if errors.Is(err, budget.ErrExceeded) || !metered.Retryable(err) || ctx.Err() != nil {
			return err
		}
		a.retried.Add(1)
	}
}

// A tenant moves between cells on two workers while callers on all nodes charge, hold, draw and enqueue at each level. The mover is killed, and loses its
// context, amid a move. Others go on with it. Each unit and each job counts once.
func TestCitus_ATenantMovesUnderLoad(t *testing.T) {
	t.Parallel()
	for pools, name := range map[int]string{1: "in one transaction", 2: "in three"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			a := &traffic{citus: onCitus(t, citusCluster).migrated(), most: 40, jobs: map[int]bool{}}
			a.elsewhere("second")
			mover := a.router("coordinator", pools)
			require.NoError(t, mover.SetUp(t.Context()))
			require.NoError(t, mover.Run(t.Context(), "acme", func(ctx context.Context, c *metered.Client) error {
				return c.RunTx(ctx, pgx.TxOptions{}, func(ctx context.Context, tx pgx.Tx) error {
					book, err := wallet.New(c.Budget, wallet.Config{})
					if err == nil {
						_, err = book.Grant(ctx, tx, wallet.Grant{Reference: "all", Wallet: "acme/wallet", Amount: granted})
					}
					return err
				})
			}))
			ctx, over := context.WithTimeout(t.Context(), 3*time.Minute)
			defer over()
			moved := make(chan bool)
			var calling sync.WaitGroup
			for _, node := range citusNodes {
				for w := range 2 {
					calling.Go(func() {
						r := a.router(node, 1)
						for n := 0; ; n++ {
							select {
							case <-moved:
								if a.refused.Load() > 0 {
									return
								}
							default:
							}
							if err := a.act(ctx, r, fmt.Sprint(node, w, "-", n), n); err != nil {
								t.Errorf("%s %d: %v", node, n, err)
								return
							}
						}
					})
				}
			}
			func() {
				defer calling.Wait()
				defer close(moved)
				a.moves(ctx, mover, pools)
			}()
			a.settledAt(a.lives())
		})
	}
}

// moves moves the tenant, and has movers die.
func (a *traffic) moves(ctx context.Context, mover *cells.Router, pools int) {
	t, at := a.t, 0
	to := func(cell int) cells.Move { return cells.Move{Tenant: "acme", To: cell, LockTimeout: time.Minute} }
	back := func() {
		t.Helper()
		at = 1 - at
		require.NoError(t, mover.Move(ctx, to(at)))
	}
	amid := func() { // a move goes on
		t.Helper()
		pgtest.WaitFor(t, "a move", func() bool {
			if pools == 2 {
				return pgtest.Value[bool](t, a.owner, `select exists (select from metered.tenants where packed)`) ||
					pgtest.Value[bool](t, a.owner, `select exists (select from second.tenants where packed)`)
			}
			return pgtest.Value[bool](t, a.owner, `select exists (select from pg_stat_activity where datname = current_database() and pid <> pg_backend_pid()
				and state <> 'idle' and query like '%packed_rows%')`)
		})
	}
	back()
	back()
	for range 3 { // the process is killed
		child := exec.Command(os.Args[0])
		child.Env, child.Stderr = append(os.Environ(), fmt.Sprintf("%s=%d %s", moverEnv, pools, a.owner.Config().ConnString())), os.Stderr
		require.NoError(t, child.Start())
		t.Cleanup(func() { _ = child.Process.Kill(); _ = child.Wait() })
		amid()
		require.NoError(t, child.Process.Kill())
		_ = child.Wait()
		recovered, err := mover.Recover(ctx)
		require.NoError(t, err)
		t.Logf("killed, %v was on its way", recovered)
		back()
	}
	for range 3 { // its context ends
		within, end := context.WithCancel(ctx)
		moving := pgtest.Going(func() error { return mover.Move(within, to(1-at)) })
		amid()
		end()
		t.Logf("its context ended: %v", <-moving)
		back()
	}
}

// lives is the one cell that has rows of the tenant.
func (a *traffic) lives() (schema string) {
	for _, of := range []string{"metered", "second"} {
		n := 0
		for _, table := range []string{"ledger", "holds", "operations", "lots", "lot_moves", "packed_rows"} {
			n += pgtest.Count(a.t, a.owner, of+"."+table)
		}
		if n > 0 {
			require.Empty(a.t, schema)
			schema = of
		}
	}
	return schema
}

// settledAt adds everything up.
func (a *traffic) settledAt(schema string) {
	t := a.t
	t.Logf("%d charged, %d refused, %d captured, %d held, %d drawn, %d jobs, %d tried again", a.charged.Load(), a.refused.Load(), a.captured.Load(),
		a.held.Load(), a.drawn.Load(), len(a.jobs), a.retried.Load())
	require.Equal(t, a.most, a.charged.Load())
	require.NotZero(t, a.refused.Load())
	for _, of := range []string{"metered", "second"} {
		pgtest.RequireVerified(t, a.owner, pgtest.NewClient(t, a.owner, metered.Config{Config: budget.Config{Schema: of}}).Budget)
	}
	c := pgtest.NewClient(t, a.owner, metered.Config{Config: budget.Config{Schema: schema}})
	u, err := c.Budget.Usage(t.Context(), a.owner, budget.Query{Scope: "acme/uploads"}, budget.Query{Scope: "acme/seats"}, budget.Query{Scope: "acme/wallet"})
	require.NoError(t, err)
	require.Equal(t, []int64{a.charged.Load(), a.captured.Load() * heldUnits, a.held.Load() * heldUnits, a.drawn.Load() * drawUnits},
		[]int64{u[0].Spent, u[1].Spent, u[1].Held, u[2].Spent})
	book, err := wallet.New(c.Budget, wallet.Config{})
	require.NoError(t, err)
	balance, err := book.Balance(t.Context(), a.owner, "acme/wallet")
	require.NoError(t, err)
	require.Equal(t, granted-a.drawn.Load()*drawUnits, balance.Units)
	require.Equal(t, len(a.commands), pgtest.Count(t, a.owner, schema+".operations"))
	require.Equal(t, len(a.jobs), pgtest.Count(t, a.owner, "metered.river_job")+pgtest.Count(t, a.owner, "second.river_job"), "one job for each key")
	require.Equal(t, len(a.jobs), pgtest.Count(t, a.owner, schema+".job_keys"))
	for n, id := range a.commands[:min(9, len(a.commands))] {
		_, err := c.Lookup(t.Context(), a.nodes[citusNodes[n%3]], "acme", id)
		require.NoError(t, err, id)
	}
}
