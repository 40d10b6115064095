package cells_test

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/cells"
	"github.com/pgmetered/metered/internal/pgserver"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/tokens"
)

// mover is a process whose connections can be watched, and lost.
type mover struct {
	*cells.Router
	pools []*pgxpool.Pool
	wires []*pgtest.Wire
}

func newMover(t *testing.T, w *world) *mover {
	m := &mover{}
	var pools []*pgxpool.Pool
	tapped := map[*pgxpool.Pool]*pgxpool.Pool{}
	for _, pool := range w.pools {
		if tapped[pool] == nil {
			own, wire := pgtest.Tap(t, pool, nil)
			tapped[pool] = own
			m.pools, m.wires = append(m.pools, own), append(m.wires, wire)
		}
		pools = append(pools, tapped[pool])
	}
	m.Router = w.router(pools...)
	return m
}

// commits reports whether a flush is a COMMIT. The first one of a step names the setting
// synchronous_commit.
func commits(f *pgtest.Flush) bool { return slices.Contains(f.SQL, "commit") }

// dies has the process die at its nth COMMIT, before or after that is carried out, and calls also by then. died reports whether it has.
func (m *mover) dies(nth int, after bool, also func()) (died func() bool) {
	for _, pool := range m.pools {
		pool.Reset() // no connection of before is used again
	}
	var mu sync.Mutex
	seen, dead := 0, false
	for _, wire := range m.wires {
		wire.Each(func(f *pgtest.Flush) {
			mu.Lock()
			defer mu.Unlock()
			if dead {
				f.Lose()
				return
			}
			if !commits(f) {
				return
			}
			if seen++; seen < nth {
				return
			}
			dead = true
			for _, each := range m.wires {
				each.Refuse(true)
			}
			f.Deliver = func() {
				if after {
					f.Ask()
				}
				also()
				f.Close()
			}
		})
	}
	return func() bool {
		mu.Lock()
		defer mu.Unlock()
		return dead
	}
}

// The process that moves a tenant dies at each COMMIT, before and after it. Whoever comes next goes on, or takes the move back, and all
// counts once.
func TestMove_DiesAtEachCommit(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 3, database(t), database(t), database(t))
	crashes(t, w, newMover(t, w), pgtest.Size(3, 1), func(int) {})
}

// Both servers are killed (-9) there, and come back in both orders.
func TestMove_ServersDieAtEachCommit(t *testing.T) {
	t.Parallel()
	pgtest.InCI(t)
	var servers []*pgserver.Server
	var pools []*pgxpool.Pool
	for i := range 2 {
		server, pool := pgtest.Start(t, pgserver.Options{Durable: true, Settings: map[string]string{"fsync": "off"}}) // servers crash, the machine does not
		require.NoError(t, makeCell(t.Context(), pool, i, false))
		servers, pools = append(servers, server), append(pools, pool)
	}
	w := newWorld(t, 2, pools...)
	crashes(t, w, newMover(t, w), pgtest.Size(5, 1), func(n int) {
		for _, s := range servers {
			require.NoError(t, s.Kill())
		}
		for i := range servers {
			require.NoError(t, servers[(i+n)%2].Restart(context.Background()))
		}
		for _, pool := range pools {
			pool.Reset() // no connection of before is used again
		}
	})
}

// crashes makes every nth of all crashes.
func crashes(t *testing.T, w *world, m *mover, every int, also func(n int)) {
	r := w.router()
	var spent int64
	charge := func(ctx context.Context, id string) error {
		_, err := do(ctx, r, command(id), func(context.Context, *metered.Tx) (int, error) { return 7, nil })
		return err
	}
	charged := func(id string) {
		t.Helper()
		pgtest.WaitFor(t, "the servers", func() bool { return charge(t.Context(), id) == nil })
		spent++
	}
	charged("first")
	n := 0
	for step := 1; step <= 4; step++ {
		for _, after := range []bool{false, true} {
			for _, back := range []bool{false, true} {
				n++
				if n%every != 0 {
					continue
				}
				name := fmt.Sprintf("%d/after=%v/back=%v", step, after, back)
				t.Log(name)
				var token tokens.Token
				pgtest.WaitFor(t, "the servers", func() bool {
					return r.Run(t.Context(), "acme", func(ctx context.Context, c *metered.Client) error {
						return c.RunTx(ctx, pgx.TxOptions{}, func(ctx context.Context, tx pgx.Tx) error {
							minted, err := c.Tokens.Mint(ctx, tx, tokens.Mint{Purpose: "p", Subject: "acme", TTL: time.Hour})
							token = minted.Token
							return err
						})
					}) == nil
				})
				from := w.lives("acme")
				to := (from + 1) % len(w.pools)
				died := m.dies(step, after, func() { also(n) })
				require.Error(t, m.Move(t.Context(), cells.Move{Tenant: "acme", To: to}), name)
				require.True(t, died(), name)
				for _, wire := range m.wires {
					wire.Refuse(false)
					wire.Each(func(*pgtest.Flush) {})
				}
				within, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
				_ = charge(within, name) // it is refused, or carried out, or unknown
				cancel()
				pgtest.WaitFor(t, name, func() bool { // as a new process, once the servers are back
					other := w.router()
					if back {
						return other.Move(t.Context(), cells.Move{Tenant: "acme", To: from}) == nil
					}
					_, err := other.Recover(t.Context())
					return err == nil
				})
				charged(name)
				w.move(w.router(), "acme", to)
				_, err := w.router().Recover(t.Context())
				require.NoError(t, err)
				require.Equal(t, to, w.lives("acme"), name)
				charged(name + " and on")
				in(t, r, "acme", func(c *metered.Client, tx pgx.Tx) error {
					u, err := c.Budget.Usage(t.Context(), tx, budget.Query{Scope: "acme/hot"})
					require.NoError(t, err)
					require.Equal(t, spent, u[0].Spent, name)
					_, err = c.Tokens.Consume(t.Context(), tx, "p", "acme", token.Reveal())
					return err
				})
			}
		}
	}
	w.verified()
}
