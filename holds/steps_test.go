package holds_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/internal/schema"
	"github.com/pgmetered/metered/internal/sweep"
)

// minimaAgree expects that the minima of a pile of n holds count at their own times, whoever has written how many of them, in months and in
// windows that begin among them.
func (f *fixture) minimaAgree(scope string, n int, charged int64) {
	f.Helper()
	first := noon.Add(time.Minute)
	for _, part := range []int{0, 1, 3, 5, 9, 10} {
		cut := first.Add(time.Duration(n*part/10)*time.Microsecond + 5*time.Microsecond)
		var before int64
		for i := 10; i <= n; i += 10 {
			if first.Add(time.Duration(i) * time.Microsecond).Before(cut) {
				before++
			}
		}
		u, err := f.ledger.UsageBetween(f.Context(), f.pool, scope, noon, cut)
		require.NoError(f, err)
		require.Equal(f, before, u.Charged, "%s until %d of 10", scope, part)
		w, err := f.ledger.Usage(f.Context(), f.pool, budget.Query{Scope: scope, Window: f.clock.Now().Sub(cut)})
		require.NoError(f, err)
		require.Equal(f, int64(n/10)-before+charged, w[0].Used, "%s after %d of 10", scope, part)
	}
}

// entries counts the entries of each kind in a scope.
func (f *fixture) entries(scope string) map[budget.EntryKind]int {
	f.Helper()
	kinds := map[budget.EntryKind]int{}
	for e, err := range f.ledger.Entries(f.Context(), f.pool, scope, budget.EntriesOptions{}) {
		require.NoError(f, err)
		kinds[e.Kind]++
	}
	return kinds
}

// A call in a transaction of the library's writes minima in steps of 25, each in a transaction that stays, at any level. A call in a caller's
// transaction is ErrBusy, and writes nothing. A refusal needs no step. Each minimum counts when its hold fell due, before, between and after
// the steps.
func TestBacklog_MinimaAreWrittenInStepsThatStay(t *testing.T) {
	t.Parallel()
	const many, minima = 600, 60
	f := setUp(t, holds.Config{})
	c := pgtest.NewClient(t, f.pool, metered.Config{MaxAttempts: 1}) // a step is no collision
	b, err := budget.NewBatcher(f.pool, f.ledger, budget.BatcherConfig{})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, b.Close(context.Background())) })
	one := func(scope string) budget.Charge {
		return budget.Charge{Scope: scope, Amount: 1, Limits: []budget.Limit{budget.Lifetime(minima + 1)}}
	}
	inTx := func(level pgx.TxIsoLevel) func(scope string) error {
		return func(scope string) error {
			return c.RunTx(t.Context(), pgx.TxOptions{IsoLevel: level}, func(ctx context.Context, tx pgx.Tx) error {
				_, err := f.ledger.Charge(ctx, tx, one(scope))
				return err
			})
		}
	}
	calls := map[string]func(scope string) error{
		"read committed":  inTx(pgx.ReadCommitted),
		"repeatable read": inTx(pgx.RepeatableRead),
		"serializable":    inTx(pgx.Serializable),
		"command": func(scope string) error {
			_, err := metered.Do[any](t.Context(), c, metered.Command{ID: "charge", Charges: []budget.Charge{one(scope)}}, nil)
			return err
		},
		"alone":   func(scope string) error { _, err := f.ledger.ChargeNow(t.Context(), f.pool, one(scope)); return err },
		"batcher": func(scope string) error { _, err := b.Charge(t.Context(), one(scope)); return err },
	}
	for scope := range calls {
		f.pile(scope, many, true)
	}
	f.clock.Advance(time.Hour)
	for scope, call := range calls {
		t.Run(scope, func(t *testing.T) {
			f := f.as(t)
			f.minimaAgree(scope, many, 0)
			_, err := f.charge(budget.Charge{Scope: scope, Amount: 1, Limits: []budget.Limit{budget.Lifetime(minima)}})
			require.ErrorIs(t, err, budget.ErrExceeded)
			_, err = f.charge(one(scope))
			require.ErrorIs(t, err, budget.ErrBusy)
			require.ErrorContains(t, err, "sweep it")
			require.Equal(t, map[budget.EntryKind]int{"hold": many}, f.entries(scope), "nothing is written")

			var more bool
			require.NoError(t, f.pool.QueryRow(t.Context(), "select metered.catch_up($1, 1000)", scope).Scan(&more))
			require.True(t, more)
			require.Equal(t, map[budget.EntryKind]int{"hold": many, "capture": 25, "expire": 1}, f.entries(scope), "a step")
			f.minimaAgree(scope, many, 0) // as after a crash
			f.sums()
			f.checkLedger()
			_, err = f.charge(one(scope))
			require.ErrorIs(t, err, budget.ErrBusy)

			require.NoError(t, call(scope))
			require.Equal(t, map[budget.EntryKind]int{"hold": many, "capture": minima, "expire": 3, "charge": 1}, f.entries(scope), "a step, and the rest")
			f.minimaAgree(scope, many, 1)
			require.Zero(t, lastHeld(f, scope))
		})
	}
	_, err = f.book.Sweep(t.Context(), f.pool, holds.SweepOptions{})
	require.NoError(t, err)
	f.verify()
}

// Two writers and a sweep at the same time write each minimum once, at its own time. A charge of another scope is part of no step.
func TestBacklog_WritersAndASweepWriteEachMinimumOnce(t *testing.T) {
	t.Parallel()
	many := pgtest.Size(1_500, 10_000)
	f := setUp(t, holds.Config{})
	c := pgtest.NewClient(t, f.pool, metered.Config{})
	f.pile("big", many, true)
	f.clock.Advance(time.Hour)
	errs := make(chan error, 5)
	for n := range 4 {
		go func() {
			for range 5 {
				err := c.RunTx(t.Context(), pgx.TxOptions{}, func(ctx context.Context, tx pgx.Tx) error {
					if n%2 == 0 {
						_, err := f.ledger.Charge(ctx, tx, budget.Charge{Scope: "big", Amount: 1})
						return err
					}
					_, err := f.book.Place(ctx, tx, holds.Placement{TTL: time.Hour, Lines: []holds.Line{{Scope: "big", Amount: 1}}})
					return err
				})
				if err != nil {
					errs <- err
					return
				}
			}
			errs <- nil
		}()
	}
	go func() {
		_, err := f.book.Sweep(t.Context(), f.pool, holds.SweepOptions{})
		errs <- err
	}()
	for range 5 {
		require.NoError(t, <-errs)
	}
	_, err := f.book.Sweep(t.Context(), f.pool, holds.SweepOptions{})
	require.NoError(t, err)
	require.Equal(t, many/10, queryRow[int](t, f.pool, `select count(*) from metered.ledger e join metered.holds h on h.id = e.hold
		where e.scope = 'big' and e.kind = 'u' and e.at = h.due`))
	used, held := f.usage("big")
	require.Equal(t, []int64{int64(many/10 + 10), 10}, []int64{used, held})
	f.clock.Advance(time.Second) // past entries that are microseconds ahead of it
	f.minimaAgree("big", many, 10)
	f.verify()
}

// Minima of one instant are written in steps, too, and so are those that capture all units.
func TestBacklog_MinimaOfOneInstantAreWrittenInSteps(t *testing.T) {
	t.Parallel()
	f := setUp(t, holds.Config{})
	for n := range 60 {
		f.mustPlace(holds.Placement{ID: fmt.Sprint(n), TTL: time.Minute, Lines: []holds.Line{{Scope: "a", Amount: 3, AtLeast: 1 + int64(n%3)}}})
	}
	for n := range 60 {
		f.mustPlace(holds.Placement{TTL: time.Minute + time.Duration(n)*time.Microsecond, Lines: []holds.Line{{Scope: "whole", Amount: 1, AtLeast: 1}}})
	}
	f.clock.Advance(time.Hour)
	execute(t, f.pool, "select metered.catch_up('whole', 1000)")
	require.Equal(t, noon.Add(time.Minute+25*time.Microsecond), queryRow[time.Time](t, f.pool, "select next_due from metered.ledger where scope = 'whole' order by seq desc limit 1").UTC(),
		"no search reads these lines again")
	_, err := f.ledger.ChargeNow(t.Context(), f.pool, budget.Charge{Scope: "a", Amount: 1})
	require.NoError(t, err)
	require.Equal(t, map[budget.EntryKind]int{"hold": 60, "capture": 60, "expire": 1, "charge": 1}, f.entries("a"))
	require.Equal(t, 120, queryRow[int](t, f.pool, "select sum(amount) from metered.ledger where scope = 'a' and kind = 'u' and at = $1", noon.Add(time.Minute)))
	_, err = f.book.Sweep(t.Context(), f.pool, holds.SweepOptions{})
	require.NoError(t, err)
	f.verify()
}

// flushes counts the steps of each flush.
type flushes []int

func (s *flushes) TraceBatchStart(ctx context.Context, _ *pgx.Conn, data pgx.TraceBatchStartData) context.Context {
	*s = append(*s, data.Batch.Len()/3)
	return ctx
}

func (s *flushes) TraceBatchQuery(context.Context, *pgx.Conn, pgx.TraceBatchQueryData) {}
func (s *flushes) TraceBatchEnd(context.Context, *pgx.Conn, pgx.TraceBatchEndData)     {}
func (s *flushes) TraceQueryStart(ctx context.Context, _ *pgx.Conn, _ pgx.TraceQueryStartData) context.Context {
	return ctx
}
func (s *flushes) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}

// Steps go out 1, 2, 4 and then 8 at a time, a transaction each. Where one fails, those before it stay, and the connection is usable.
func TestBacklog_StepsGoOutSeveralAtATime(t *testing.T) {
	t.Parallel()
	f := setUp(t, holds.Config{})
	f.pile("a", 10_000, true)
	f.clock.Advance(time.Hour)
	var sent flushes
	pool := pgtest.Reopen(t, f.pool, func(c *pgxpool.Config) { c.ConnConfig.Tracer = &sent; c.MaxConns = 1 })
	name, err := schema.Parse("metered")
	require.NoError(t, err)
	pid := queryRow[int](t, pool, "select pg_backend_pid()")
	steps := func() int {
		t.Helper()
		require.Equal(t, 0, queryRow[int](t, f.pool, "select count(*) % 25 from metered.ledger where kind = 'u'"), "whole steps")
		return queryRow[int](t, f.pool, "select count(distinct xmin::text) from metered.ledger where kind = 'u'")
	}

	// The fourth step fails: it is the first one of the third flush.
	execute(t, f.pool, `create function boom() returns trigger language plpgsql as 'begin raise exception ''boom''; end'`)
	execute(t, f.pool, `create trigger boom after insert on metered.ledger for each row when (new.hold = 'a/1010') execute function boom()`)
	err = sweep.CatchUp(t.Context(), pool, name, time.Minute, "a")
	require.ErrorContains(t, err, "boom")
	require.Equal(t, flushes{1, 2, 4}, sent)
	require.Equal(t, 4, steps(), "100 minima")
	require.Equal(t, pid, queryRow[int](t, pool, "select pg_backend_pid()"), "no transaction is left on the connection")
	execute(t, f.pool, `drop trigger boom on metered.ledger`)

	// A call that is cancelled while it waits for the lock has done nothing.
	lock, err := f.pool.Begin(t.Context())
	require.NoError(t, err)
	require.NoError(t, f.ledger.Lock(t.Context(), lock, "a"))
	ctx, cancel := context.WithCancel(t.Context())
	failed := make(chan error, 1)
	go func() { failed <- sweep.CatchUp(ctx, pool, name, time.Minute, "a") }()
	pgtest.WaitFor(t, "the step to wait", func() bool { return queryRow[int](t, f.pool, "select count(*) from pg_locks where not granted") > 0 })
	cancel()
	require.ErrorIs(t, <-failed, context.Canceled)
	require.NoError(t, lock.Rollback(t.Context()))
	pgtest.WaitFor(t, "the server to be done", func() bool { return queryRow[int](t, f.pool, "select count(*) from pg_locks where not granted") == 0 })

	sent = nil
	require.NoError(t, sweep.CatchUp(t.Context(), pool, name, time.Minute, "a"))
	require.Equal(t, flushes{1, 2, 4, 8, 8, 8, 8}, sent)
	require.Equal(t, 4+36, steps(), "what goes out after the last of them writes nothing")
	_, err = f.charge(budget.Charge{Scope: "a", Amount: 1, Limits: []budget.Limit{budget.Lifetime(1_001)}})
	require.NoError(t, err)
	f.minimaAgree("a", 10_000, 1)
	_, err = f.book.Sweep(t.Context(), f.pool, holds.SweepOptions{})
	require.NoError(t, err)
	f.verify()
}
