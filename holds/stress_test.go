package holds_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/pgtest"
)

// stress is a database in which everybody is at work at once, by the real clock, with
// holds that fall due within milliseconds.
type stress struct {
	*testing.T
	f      *fixture
	retry  retrier
	scopes []string

	mu  sync.Mutex
	ids []string // the last that were placed

	charged                     sync.Map // by scope: the units that committed transactions spent
	placed, ended, swept, tried atomic.Int64
	took                        atomic.Int64 // ns, to place the last hold: holds live as long as some calls take
}

const stressCapacity = 1 << 40 // of spending, while no more than 30 units of a scope are held at any time
const stressHeld = 30

// The short form finds locks in any order (_lock_all_scopes).
func TestHolds_UnderStressThereIsNoDeadlockAndAllSumsAreExact(t *testing.T) {
	t.Parallel()
	pgtest.InCI(t)
	pool := pgtest.Open(t)
	f := on(t, pool, holds.Config{MinTTL: time.Millisecond}, nil)
	s := &stress{T: t, f: f, retry: retrier{pool: pool}, scopes: []string{"a", "b", "c", "d", "e"}}
	for _, scope := range s.scopes {
		s.charged.Store(scope, new(atomic.Int64))
	}
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	most := pgtest.Size[int64](60, math.MaxInt64)
	workers := []func(ctx context.Context, iso pgx.TxIsoLevel) error{
		s.place, s.place, s.place, s.place, s.capture, s.capture, s.release, s.extend, s.expire, s.charge, s.sweep, s.sweep, s.watch,
	}
	require.NoError(t, pgtest.InParallel(len(workers), func(w int) error {
		for n := 0; ctx.Err() == nil && s.placed.Load() < most || !s.metAll() && n < 10_000; n++ {
			// Mostly as nearly everybody does, and sometimes with a snapshot.
			iso := pgx.ReadCommitted
			if n%4 == 3 {
				iso = isolations[1+n/4%2]
			}
			// Not cut off by ctx: the outcome of each call has to be known.
			if err := workers[w](t.Context(), iso); err != nil {
				cancel()
				return fmt.Errorf("worker %d: %w", w, err)
			}
			s.tried.Add(1)
		}
		return nil
	}))
	t.Logf("%d calls, %d placed, %d captured or released, %d swept, %d retries",
		s.tried.Load(), s.placed.Load(), s.ended.Load(), s.swept.Load(), s.retry.retries.Load())

	pgtest.WaitFor(t, "all holds to be due", func() bool { // by the real clock, also those of which all is captured and nothing is open
		return queryRow[int](t, pool, `select count(*) from metered.holds where state = 'h' and due > clock_timestamp()`) == 0
	})
	for _, scope := range s.scopes {
		used, held := f.usage(scope)
		want, _ := s.charged.Load(scope)
		require.Equal(t, want.(*atomic.Int64).Load(), used, scope)
		require.Zero(t, held)
	}
	report, err := f.book.Sweep(t.Context(), pool, holds.SweepOptions{})
	require.NoError(t, err)
	require.Equal(t, s.placed.Load(), s.ended.Load()+s.swept.Load()+int64(report.Expired), "each has ended once")
	require.Zero(t, queryRow[int](t, pool, `select count(*) from metered.hold_lines where open > 0`))
	require.True(t, s.metAll())
	f.verify()
}

// metAll is whether holds have ended in each way.
func (s *stress) metAll() bool {
	return s.placed.Load() > 0 && s.ended.Load() > 0 && s.swept.Load() > 0
}

// run counts the units that fn spent if it commits. A refusal, or a hold that another has ended, is an answer too.
func (s *stress) run(ctx context.Context, iso pgx.TxIsoLevel, fn func(tx pgx.Tx) (spent map[string]int64, err error)) (bool, error) {
	var spent map[string]int64
	err := s.retry.run(ctx, iso, func(tx pgx.Tx) (err error) { spent, err = fn(tx); return err })
	if errors.Is(err, budget.ErrExceeded) || errors.Is(err, holds.ErrState) || errors.Is(err, holds.ErrCeiling) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	for scope, units := range spent {
		n, _ := s.charged.Load(scope)
		n.(*atomic.Int64).Add(units)
	}
	return true, nil
}

// some are 1 to 3 scopes in any order.
func (s *stress) some() (scopes []string) {
	for _, i := range pgtest.Random(s.T).Perm(len(s.scopes))[:1+pgtest.Random(s.T).IntN(3)] {
		scopes = append(scopes, s.scopes[i])
	}
	return scopes
}

// recent are one or two of the holds placed last.
func (s *stress) recent() (ids []string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, i := range pgtest.Random(s.T).Perm(len(s.ids))[:min(len(s.ids), 1+pgtest.Random(s.T).IntN(2))] {
		ids = append(ids, s.ids[i])
	}
	return ids
}

func (s *stress) place(ctx context.Context, iso pgx.TxIsoLevel) error {
	began := time.Now()
	longest := min(250*time.Millisecond+10*time.Duration(s.took.Load()), 15*time.Second) // the test waits for the last of them
	r := holds.Placement{TTL: (time.Duration(pgtest.Random(s.T).Int64N(int64(longest))) + time.Millisecond).Truncate(time.Microsecond)}
	for _, scope := range s.some() {
		// Only held units are limited: spending leaves the window at once.
		r.Lines = append(r.Lines, holds.Line{Scope: scope, Amount: 1 + pgtest.Random(s.T).Int64N(3),
			Limits: []budget.Limit{budget.PerWindow(stressHeld, time.Microsecond), budget.Lifetime(stressCapacity)}})
	}
	var h holds.Hold
	ok, err := s.run(ctx, iso, func(tx pgx.Tx) (_ map[string]int64, err error) {
		h, err = s.f.book.Place(ctx, tx, r)
		return nil, err
	})
	if ok {
		s.placed.Add(1)
		s.took.Store(int64(time.Since(began)))
		s.mu.Lock()
		defer s.mu.Unlock()
		if s.ids = append(s.ids, h.ID); len(s.ids) > 12 {
			s.ids = s.ids[1:]
		}
	}
	return err
}

func (s *stress) capture(ctx context.Context, iso pgx.TxIsoLevel) error {
	ids := s.recent()
	if len(ids) == 0 {
		return s.pause()
	}
	c := holds.Capture{IDs: ids, All: true}
	ended := int64(len(ids))
	if pgtest.Random(s.T).IntN(3) == 0 { // at most 1 unit more than is held, of one scope, and sometimes more follows
		h, err := s.f.book.Get(ctx, s.f.pool, "", ids[0], "")
		if err != nil {
			return err
		}
		scope := h.Lines[0].Scope
		c = holds.Capture{IDs: ids[:1], Lines: []holds.Line{{Scope: scope, Amount: 1 + pgtest.Random(s.T).Int64N(4)}}, Over: holds.OverAllowed, Keep: pgtest.Random(s.T).IntN(2) == 0}
		if ended = 1; c.Keep {
			ended = 0
		}
	}
	ok, err := s.run(ctx, iso, func(tx pgx.Tx) (map[string]int64, error) {
		hs, err := s.f.book.Capture(ctx, tx, c)
		spent := map[string]int64{}
		if c.Lines != nil {
			spent[c.Lines[0].Scope] = c.Lines[0].Amount
			return spent, err
		}
		for _, h := range hs {
			before := map[string]int64{}
			history, err := s.f.book.History(ctx, tx, "", h.ID, "")
			if err != nil {
				return nil, err
			}
			for _, e := range history[:len(history)-1] { // parts were counted when they were captured
				for _, p := range e.Captures {
					before[p.Scope] += p.Amount
				}
			}
			for _, l := range h.Lines {
				spent[l.Scope] += l.Captured - before[l.Scope]
			}
		}
		return spent, err
	})
	if ok {
		s.ended.Add(ended)
	}
	return err
}

func (s *stress) release(ctx context.Context, iso pgx.TxIsoLevel) error {
	ids := s.recent()
	if len(ids) == 0 {
		return s.pause()
	}
	ok, err := s.run(ctx, iso, func(tx pgx.Tx) (map[string]int64, error) {
		_, err := s.f.book.Release(ctx, tx, holds.Release{IDs: ids})
		return nil, err
	})
	if ok {
		s.ended.Add(int64(len(ids)))
	}
	return err
}

func (s *stress) extend(ctx context.Context, iso pgx.TxIsoLevel) error {
	ids := s.recent()
	if len(ids) == 0 {
		return s.pause()
	}
	_, err := s.run(ctx, iso, func(tx pgx.Tx) (map[string]int64, error) {
		_, err := s.f.book.Extend(ctx, tx, holds.Extend{IDs: ids, By: time.Duration(1+pgtest.Random(s.T).IntN(10)) * time.Millisecond})
		return nil, err
	})
	return err
}

func (s *stress) expire(ctx context.Context, iso pgx.TxIsoLevel) error {
	for _, id := range s.recent() {
		var ended bool
		h, err := s.f.book.Get(ctx, s.f.pool, "", id, "")
		if err != nil {
			return err
		}
		_, err = s.run(ctx, iso, func(tx pgx.Tx) (_ map[string]int64, err error) {
			_, ended, err = s.f.book.Expire(ctx, tx, holds.Expire{ID: id, Deadline: h.Deadline})
			return nil, err
		})
		if err != nil {
			return err
		}
		if ended {
			s.swept.Add(1)
		}
	}
	return s.pause()
}

func (s *stress) charge(ctx context.Context, iso pgx.TxIsoLevel) error {
	var charges []budget.Charge
	spent := map[string]int64{}
	for _, scope := range s.some() {
		charges = append(charges, budget.Charge{Scope: scope, Amount: 1, Limits: []budget.Limit{{Max: stressHeld, Window: time.Microsecond}}})
		spent[scope] = 1
	}
	_, err := s.run(ctx, iso, func(tx pgx.Tx) (map[string]int64, error) {
		_, err := s.f.ledger.Charge(ctx, tx, charges...)
		return spent, err
	})
	return err
}

func (s *stress) sweep(ctx context.Context, _ pgx.TxIsoLevel) error {
	report, err := s.f.book.Sweep(ctx, s.f.pool, holds.SweepOptions{Batch: 1 + pgtest.Random(s.T).IntN(50)})
	s.swept.Add(int64(report.Expired))
	return errors.Join(err, s.pause())
}

// pause leaves the processors to others.
func (s *stress) pause() error {
	time.Sleep(time.Duration(1+pgtest.Random(s.T).IntN(5)) * time.Millisecond) // nothing happens that it could wait for
	return nil
}

// watch looks on: at no time is more held than may be.
func (s *stress) watch(ctx context.Context, _ pgx.TxIsoLevel) error {
	for _, scope := range s.scopes {
		u, err := s.f.ledger.Usage(ctx, s.f.pool, budget.Query{Scope: scope})
		if err != nil {
			return err
		}
		if u[0].Held < 0 || u[0].Held > stressHeld {
			return fmt.Errorf("%d units of %s are held, of %d", u[0].Held, scope, stressHeld)
		}
	}
	return s.pause()
}
