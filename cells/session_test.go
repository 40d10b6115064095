package cells_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/cells"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/pgtest"
)

func session(id string, level pgx.TxIsoLevel) metered.Reservation {
	return metered.Reservation{
		ID: id, Tenant: "acme", Input: id, TTL: time.Hour, Isolation: level,
		Lines: []holds.Line{{Scope: "acme/hot", Amount: 10, Limits: []budget.Limit{budget.Lifetime(1 << 40)}}},
	}
}

func used(amount int64) metered.Cost {
	return metered.Cost{Lines: []holds.Line{{Scope: "acme/hot", Amount: amount}}}
}

func opened(t testing.TB, r *cells.Router, reservation metered.Reservation) (s *metered.Session[int]) {
	t.Helper()
	require.NoError(t, patiently(t.Context(), r, reservation.Tenant, func(_ context.Context, c *metered.Client) (err error) {
		s, err = metered.Open[int](t.Context(), c, reservation) // its context is not Run's
		return err
	}))
	return s
}

// follow goes on with a session in the cell where its tenant lives by now.
func follow(ctx context.Context, r *cells.Router, reservation metered.Reservation, fn func(s *metered.Session[int]) error) error {
	return patiently(ctx, r, reservation.Tenant, func(ctx context.Context, c *metered.Client) error {
		s, err := metered.Resume[int](ctx, c, reservation)
		if err != nil {
			return err
		}
		defer s.Close()
		return fn(s)
	})
}

// patiently is Router.Run, which waits for a tenant on its way for 4 seconds: a busy machine takes longer.
func patiently(ctx context.Context, r *cells.Router, tenant string, fn func(ctx context.Context, c *metered.Client) error) error {
	for ctx.Err() == nil {
		if err := r.Run(ctx, tenant, fn); !errors.Is(err, cells.ErrMoved) {
			return err
		}
	}
	return ctx.Err()
}

// A session whose tenant has moved is ErrMoved, and does nothing. Resume goes on with it in the new cell, or the session itself where the tenant is back.
// It is charged once, at each level.
func TestMove_SessionsAreSettledOnce(t *testing.T) {
	t.Parallel()
	for name, pools := range places(t) {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, 3, pools...)
			r, mover := w.router(), w.router()
			spent, settled := int64(0), func(context.Context, *metered.Tx) (int, error) { return 7, nil }
			never := func(context.Context, *metered.Tx) (int, error) { panic("it ran") }
			away := func() { w.move(mover, "acme", (w.lives("acme")+1)%3) }
			for n, level := range pgtest.IsolationLevels {
				first, gone, back := session(fmt.Sprint("settled ", n), level), session(fmt.Sprint("cancelled ", n), level), session(fmt.Sprint("back ", n), level)
				settles, cancels, stays := opened(t, r, first), opened(t, r, gone), opened(t, r, back)
				home := w.lives("acme")
				away()
				_, err := settles.Settle(t.Context(), used(4), never)
				require.ErrorIs(t, err, cells.ErrMoved)
				require.ErrorIs(t, cancels.Cancel(t.Context(), "no"), cells.ErrMoved)
				require.NoError(t, settles.Context().Err())
				for again := range 2 { // a repetition has the recorded outcome
					require.NoError(t, follow(t.Context(), r, first, func(s *metered.Session[int]) error {
						require.Equal(t, again > 0, s.Finished())
						out, err := s.Settle(t.Context(), used(4), settled)
						if err == nil {
							require.Equal(t, 7, out.Result)
							require.EqualValues(t, 4, out.Holds[0].Lines[0].Captured)
						}
						return err
					}))
				}
				require.NoError(t, follow(t.Context(), r, gone, func(s *metered.Session[int]) error { return s.Cancel(t.Context(), "no") }))
				w.move(mover, "acme", home)
				out, err := settles.Settle(t.Context(), used(4), never)
				require.NoError(t, err)
				require.Equal(t, 7, out.Result)
				require.NoError(t, cancels.Cancel(t.Context(), "no"))
				_, err = stays.Settle(t.Context(), used(9), settled)
				require.NoError(t, err)
				spent += 4 + 9
				away()
				in(t, r, "acme", func(c *metered.Client, tx pgx.Tx) error {
					u, err := c.Budget.Usage(t.Context(), tx, budget.Query{Scope: "acme/hot"})
					require.NoError(t, err)
					require.Equal(t, []int64{spent, 0}, []int64{u[0].Spent, u[0].Held}, level)
					return nil
				})
				err = follow(t.Context(), w.router(), gone, func(*metered.Session[int]) error { panic("it is open") })
				require.ErrorIs(t, err, metered.ErrLost)
				require.NotErrorIs(t, err, cells.ErrMoved)
			}
			w.verified()
		})
	}
}

// The old cell does not renew a session. It ends at its deadline, and can be settled in the new cell within its grace.
func TestMove_ASessionThatIsNotRenewedIsSettledInItsGrace(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 2, database(t))
	r := w.router()
	reservation := session("1", pgx.ReadCommitted)
	reservation.TTL, reservation.Grace = time.Second, time.Hour
	s := opened(t, r, reservation)
	w.move(w.router(), "acme", 1-w.lives("acme"))
	<-s.Context().Done()
	require.ErrorIs(t, context.Cause(s.Context()), metered.ErrNotRenewed)
	require.NoError(t, follow(t.Context(), r, reservation, func(s *metered.Session[int]) error {
		_, err := s.Settle(t.Context(), used(3), nil)
		return err
	}))
	s.Close()
	require.Equal(t, int64(3), pgtest.Value[int64](t, w.pools[0], `select spent - held from `+w.schemas[w.lives("acme")]+`.ledger order by seq desc limit 1`))
	w.verified()
}

// While their tenant moves, sessions of many processes are opened, settled and cancelled at each level. Each counts once. The short form finds a
// move that waits for no transaction (lockTenantSQL without its lock).
func TestMove_SessionsUnderLoadAreExact(t *testing.T) {
	t.Parallel()
	pgtest.InCI(t)
	for name, pools := range places(t) {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, 3, pools...)
			var spent, settled, followed atomic.Int64
			var working sync.WaitGroup
			acts := make(chan bool)
			for i := range pgtest.Size(3, 6) {
				working.Go(func() {
					r := w.router()
					for n := range pgtest.Size(5, 150) {
						reservation := session(fmt.Sprint(i, "/", n), pgtest.IsolationLevels[pgtest.Random(t).IntN(3)])
						s := opened(t, r, reservation)
						acts <- true // it may move
						amount, cancelled := pgtest.Random(t).Int64N(11), pgtest.Random(t).IntN(4) == 0
						end := func(s *metered.Session[int]) (err error) {
							if cancelled {
								return s.Cancel(t.Context(), "no")
							}
							_, err = s.Settle(t.Context(), used(amount), func(context.Context, *metered.Tx) (int, error) { return n, nil })
							return err
						}
						err := end(s)
						if errors.Is(err, cells.ErrMoved) {
							followed.Add(1)
							err = follow(t.Context(), r, reservation, end)
						}
						s.Close()
						switch {
						case err != nil:
							t.Errorf("%s: %v", reservation.ID, err)
						case !cancelled:
							spent.Add(amount)
							settled.Add(1)
						}
					}
				})
			}
			go func() { working.Wait(); close(acts) }()
			mover, moves := w.router(), 0
			var moving sync.WaitGroup
			for range acts {
				if moving.Wait(); moves < pgtest.Size(30, 600) {
					moves++
					moving.Go(func() { w.move(mover, "acme", moves%3) })
				}
			}
			moving.Wait()
			t.Logf("%d moves, %d settled, %d in another cell than they were opened in", moves, settled.Load(), followed.Load())
			require.NotZero(t, followed.Load())
			at := w.lives("acme")
			sum := func(sql string) int64 {
				return pgtest.Value[int64](t, w.pools[at], fmt.Sprintf(sql, w.schemas[at]))
			}
			require.Equal(t, spent.Load(), sum(`select spent from %s.ledger order by seq desc limit 1`))
			require.Zero(t, sum(`select held from %s.ledger order by seq desc limit 1`))
			require.Equal(t, settled.Load(), sum(`select count(*) from %s.operations`))
			w.verified()
		})
	}
}
