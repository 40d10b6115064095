package holds_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/internal/purge"
)

// step is a transition of holds that are there by then.
type step struct {
	name string
	run  func(f *fixture) error
}

// transitions are one of every kind, each of them on several scopes or holds.
func transitions() []step {
	lines := func(scopes ...string) (l []holds.Line) {
		for _, scope := range scopes {
			l = append(l, capacity(scope, 2, 100))
		}
		return l
	}
	in := func(f *fixture, fn func(ctx context.Context, tx pgx.Tx) error) error {
		return pgx.BeginFunc(f.Context(), f.pool, func(tx pgx.Tx) error { return fn(f.Context(), tx) })
	}
	place := func(id string, ttl time.Duration, scopes ...string) step {
		return step{"place " + id, func(f *fixture) error {
			_, err := f.place(holds.Placement{ID: id, TTL: ttl, Lines: lines(scopes...), Charges: []budget.Charge{{Scope: "user", Amount: 1}}})
			return err
		}}
	}
	at := func(after time.Duration, s step) step {
		return step{s.name, func(f *fixture) error { f.clock.Set(noon.Add(after)); return s.run(f) }}
	}
	return []step{
		place("h1", time.Hour, "a", "b"), place("h2", time.Hour, "b", "c"), place("h3", time.Minute, "a", "c"),
		place("h4", time.Minute, "a", "b"), place("h5", time.Minute, "c", "d"), place("h6", time.Minute, "b", "d"),
		{"claim", func(f *fixture) error {
			_, err := f.claim(holds.Claim{Key: holds.Key{Type: "name", Value: "ann"}, Holder: "ann", Lines: lines("a")})
			return err
		}},
		{"capture in part", func(f *fixture) error {
			_, err := f.capture(holds.Capture{IDs: []string{"h1"}, Keep: true, Lines: []holds.Line{{Scope: "a", Amount: 1}, {Scope: "b", Amount: 1}}})
			return err
		}},
		{"extend", func(f *fixture) error { _, err := f.extend(time.Minute, "h1", "h2"); return err }},
		{"capture more", func(f *fixture) error {
			_, err := f.capture(holds.Capture{IDs: []string{"h1"}, Over: holds.OverIfFits, Lines: lines("a", "b")})
			return err
		}},
		{"refund", func(f *fixture) error { _, err := do(f, refund(f, "h1")); return err }},
		at(time.Minute, step{"expire", func(f *fixture) error {
			return in(f, func(ctx context.Context, tx pgx.Tx) error {
				_, _, err := f.book.Expire(ctx, tx, holds.Expire{ID: "h3", Deadline: noon.Add(time.Minute)})
				return err
			})
		}}),
		at(time.Minute, place("sees through h4", time.Hour, "a")),
		at(time.Minute, step{"charge that sees through h6", func(f *fixture) error {
			_, err := f.charge(budget.Charge{Scope: "d", Amount: 1})
			return err
		}}),
		at(time.Minute, step{"sweep", func(f *fixture) error {
			_, err := f.book.Sweep(f.Context(), f.pool, holds.SweepOptions{})
			return err
		}}),
		{"release", func(f *fixture) error { _, err := f.release("h2", "sees through h4"); return err }},
		at(time.Hour, step{"purge", func(f *fixture) error {
			_, err := purge.Holds.Delete(f.Context(), f.pool, purge.Options{OlderThan: time.Minute})
			return err
		}}),
	}
}

// The backend is killed at each row that a transition writes, before it, after it, and
// once more when it is committed: nothing of the transition remains, in any table, and
// it can be made again.
func TestFault_AKilledBackendLeavesTheOldStateOrTheNew(t *testing.T) {
	t.Parallel()
	turn := pgtest.Random(t).IntN(3)
	for n, when := range []string{"before", "after", "deferred"} {
		t.Run(when, func(t *testing.T) {
			t.Parallel()
			told := 0
			f := setUp(t, holds.Config{Notify: true, Subscribers: []holds.Subscriber{
				func(context.Context, pgx.Tx, holds.Transition) error { told++; return nil },
			}})
			execute(t, f.pool, `create sequence fault_at`)
			execute(t, f.pool, `create function fault() returns trigger language plpgsql security definer as $$
				begin
					if nextval('public.fault_at') = 0 then
						perform pg_terminate_backend(pg_backend_pid());
					end if;
					if tg_op = 'DELETE' then return old; end if;
					return new;
				end $$`)
			execute(t, f.pool, `alter sequence fault_at minvalue -100000`)
			for _, table := range []string{"ledger", "refund_sum", "holds", "hold_lines", "hold_events", "holds_horizon"} {
				on := `insert or update or delete on metered.` + table
				sql := `create trigger fault ` + when + ` ` + on + ` for each row execute function fault()`
				if when == "deferred" {
					sql = `create constraint trigger fault after ` + on + ` deferrable initially deferred for each row execute function fault()`
				}
				execute(t, f.pool, sql)
			}
			for i, s := range transitions() {
				if !pgtest.Long && (i+turn)%3 != n { // it is one of the others' this time
					execute(t, f.pool, `select setval('fault_at', 1)`)
					require.NoError(t, s.run(f), s.name)
					continue
				}
				before := f.dump()
				kills := 0
				for at := pgtest.Size(1+pgtest.Random(t).IntN(3), 1); ; at += pgtest.Sizes(4, 2, 0) + pgtest.Size(pgtest.Random(t).IntN(5), 1) { // at each write, or at some
					execute(t, f.pool, `select setval('fault_at', $1::bigint)`, -at)
					err := s.run(f)
					if err == nil {
						break
					}
					require.Contains(t, []string{"57P01", ""}, code(err), "%s: %v", s.name, err)
					f.settled()
					require.Equal(t, before, f.dump(), "%s, killed at write %d", s.name, at)
					kills++
				}
				require.Greater(t, kills, pgtest.Size(0, 2), s.name)
				require.NotEqual(t, before, f.dump(), s.name)
				f.verify()
			}
			require.Positive(t, told)
		})
	}
}

// A backend is killed while it waits for a lock, or its call is cancelled.
func TestFault_EndedWhileItWaitsItLeavesTheOldState(t *testing.T) {
	t.Parallel()
	f := setUp(t, holds.Config{})
	f.mustPlace(holds.Placement{ID: "h", TTL: time.Hour, Lines: []holds.Line{capacity("a", 1, 9), capacity("b", 1, 9)}})
	before := f.dump()
	for _, end := range []string{"pg_terminate_backend", "pg_cancel_backend"} {
		busy := begin(t, f.pool, pgx.ReadCommitted)
		require.NoError(t, f.ledger.Lock(t.Context(), busy, "a", "b"))
		late := pgtest.Going(func() error { _, err := f.capture(holds.Capture{IDs: []string{"h"}, All: true}); return err })
		pgtest.WaitQueued(t, f.pool, 1)
		execute(t, f.pool, `select `+end+`(pid) from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'`)
		err := <-late
		require.Error(t, err)
		require.False(t, errors.Is(err, budget.ErrBusy), "%v", err)
		require.NoError(t, busy.Rollback(t.Context()))
		f.settled()
		require.Equal(t, before, f.dump())
	}
	_, err := f.capture(holds.Capture{IDs: []string{"h"}, All: true})
	require.NoError(t, err)
	f.verify()
}

// settled waits until no other backend of the database is in a transaction.
func (f *fixture) settled() {
	f.Helper()
	pgtest.WaitFor(f, "all transactions to end", func() bool {
		return queryRow[int](f, f.pool, `select count(*) from pg_stat_activity where datname = current_database()
			and pid <> pg_backend_pid() and xact_start is not null and backend_type = 'client backend'`) == 0
	})
}
