package holds_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/pgtest"
)

// A call on two holds waits for the scope of the first. The second was released, is purged
// meanwhile, and its id is another's then: that is none of its holds, and its scope is
// not locked.
func TestRelease_OfAHoldPlacedWhileItWaitsKeepsNothingBack(t *testing.T) {
	t.Parallel()
	for name, call := range map[string]func(f *fixture, ids ...string) error{
		"release": func(f *fixture, ids ...string) error { _, err := f.release(ids...); return err },
		"capture": func(f *fixture, ids ...string) error {
			_, err := f.capture(holds.Capture{IDs: ids, All: true})
			return err
		},
		"extend": func(f *fixture, ids ...string) error { _, err := f.extend(time.Second, ids...); return err },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := setUp(t, holds.Config{})
			f.mustPlace(holds.Request{ID: "second", Lines: []holds.Line{capacity("c", 1, 5)}})
			_, err := f.release("second")
			require.NoError(t, err)
			f.clock.Advance(time.Minute)
			f.mustPlace(holds.Request{ID: "first", Lines: []holds.Line{capacity("a", 1, 5)}})
			require.ErrorIs(t, call(f, "first", "third"), holds.ErrUnknown)
			busy := begin(t, f.pool, pgx.ReadCommitted)
			require.NoError(t, f.ledger.Lock(t.Context(), busy, "a"))
			late := pgtest.Going(func() error { return call(f, "first", "second") })
			pgtest.WaitQueued(t, f.pool, 1)
			n, err := f.purge()
			require.NoError(t, err)
			require.Equal(t, int64(1), n)
			f.mustPlace(holds.Request{ID: "second", Lines: []holds.Line{capacity("b", 1, 5)}})
			require.NoError(t, busy.Commit(t.Context()))
			require.ErrorIs(t, <-late, holds.ErrUnknown)
			require.Equal(t, holds.Held, f.get("first").State)
			_, held := f.usage("b")
			require.Equal(t, int64(1), held)
			f.verify()
			require.NoError(t, call(f, "first", "second"))
			f.verify()
		})
	}
}

// meanwhile is a pool on which something happens before each query for one row.
type meanwhile struct {
	holds.Querier
	happens func()
}

func (m meanwhile) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	m.happens()
	return m.Querier.QueryRow(ctx, sql, args...)
}

// History asks for events, and if there are none, why.
func TestHistory_OfAHoldPlacedAfterItsFirstLookIsThere(t *testing.T) {
	t.Parallel()
	f := setUp(t, holds.Config{})
	history, err := f.book.History(t.Context(), meanwhile{f.pool, func() {
		f.mustPlace(holds.Request{ID: "h", Lines: []holds.Line{capacity("a", 1, 1)}})
	}}, "", "h", "")
	require.NoError(t, err)
	require.Len(t, history, 1)
	require.Equal(t, holds.EventPlaced, history[0].Kind)
}

// Two that place the same id on different scopes meet at the id: the second waits, and
// is told of the first, if that stays.
func TestPlace_OfAnIDThatIsBeingPlacedElsewhereWaitsForTheOutcome(t *testing.T) {
	t.Parallel()
	for _, stays := range []bool{true, false} {
		f := setUp(t, holds.Config{})
		first := begin(t, f.pool, pgx.ReadCommitted)
		_, err := f.book.Place(t.Context(), first, holds.Request{ID: "h", TTL: time.Minute, Lines: []holds.Line{capacity("a", 1, 1)}})
		require.NoError(t, err)
		second := pgtest.Going(func() error {
			_, err := f.place(holds.Request{ID: "h", Lines: []holds.Line{capacity("b", 1, 1)}})
			return err
		})
		pgtest.WaitQueued(t, f.pool, 1)
		if stays {
			require.NoError(t, first.Commit(t.Context()))
			require.ErrorIs(t, <-second, holds.ErrConflict)
		} else {
			require.NoError(t, first.Rollback(t.Context()))
			require.NoError(t, <-second)
		}
		_, held := f.usage("b")
		require.Equal(t, !stays, held == 1)
		f.verify()
	}
}

// A purge while the clock is ahead retires what it deleted, and nothing newer.
func TestPurge_UnderAClockThatIsAheadRetiresNoNewID(t *testing.T) {
	t.Parallel()
	f := setUp(t, holds.Config{})
	line := []holds.Line{capacity("a", 1, 5)}
	old := f.mustPlace(holds.Request{ID: uuidAt(noon), Lines: line})
	f.mustPlace(holds.Request{ID: "no time", Lines: line})
	_, err := f.release(old.ID, "no time")
	require.NoError(t, err)
	f.clock.Advance(10 * 24 * time.Hour)
	n, err := f.book.Purge(t.Context(), f.pool, holds.PurgeOptions{OlderThan: time.Second})
	require.NoError(t, err)
	require.Equal(t, int64(2), n)
	f.clock.Set(noon.Add(time.Second))
	for id, want := range map[string]error{old.ID: holds.ErrRetired, uuidAt(noon.Add(-time.Hour)): holds.ErrRetired, uuidAt(noon.Add(time.Millisecond)): nil} {
		_, err = f.place(holds.Request{ID: id, Lines: line})
		require.ErrorIs(t, err, want)
	}
}

// An id of a client whose clock is ahead is kept until its own time is old enough: to
// forget it earlier, all ids up to its time would have to be retired.
func TestPurge_KeepsAnIDWhoseTimeIsYetToCome(t *testing.T) {
	t.Parallel()
	f := setUp(t, holds.Config{})
	line := []holds.Line{capacity("a", 1, 5)}
	early := f.mustPlace(holds.Request{ID: uuidAt(noon.Add(time.Hour)), Lines: line})
	_, err := f.release(early.ID)
	require.NoError(t, err)
	purge := func() int64 {
		n, err := f.book.Purge(t.Context(), f.pool, holds.PurgeOptions{OlderThan: time.Minute})
		require.NoError(t, err)
		return n
	}
	f.clock.Advance(10 * time.Minute)
	require.Zero(t, purge())
	f.mustPlace(holds.Request{ID: uuidAt(f.clock.Now()), TTL: time.Second, Lines: line})
	f.clock.Advance(time.Hour)
	require.Equal(t, int64(1), purge())
	_, err = f.place(holds.Request{ID: early.ID, Lines: line})
	require.ErrorIs(t, err, holds.ErrRetired)
}

func TestPurge_DoesNotWaitForEverForWhoSharesTheHorizon(t *testing.T) {
	t.Parallel()
	f := setUp(t, holds.Config{})
	open := begin(t, f.pool, pgx.RepeatableRead)
	_, err := f.book.Place(t.Context(), open, holds.Request{ID: uuidAt(noon), TTL: time.Minute, Lines: []holds.Line{capacity("a", 1, 5)}})
	require.NoError(t, err)
	ledger, err := budget.New(budget.Config{LockTimeout: 50 * time.Millisecond})
	require.NoError(t, err)
	hasty, err := holds.New(ledger, holds.Config{})
	require.NoError(t, err)
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	_, err = hasty.Purge(ctx, f.pool, holds.PurgeOptions{})
	require.ErrorIs(t, err, budget.ErrBusy)
	require.NoError(t, open.Commit(t.Context()))
	_, err = hasty.Purge(t.Context(), f.pool, holds.PurgeOptions{})
	require.NoError(t, err)
}

func TestExpire_OfAHoldPurgedWhileItWaitsIsUnknown(t *testing.T) {
	t.Parallel()
	f := setUp(t, holds.Config{Notify: true})
	h := f.mustPlace(holds.Request{ID: "h", Lines: []holds.Line{capacity("a", 1, 5)}})
	_, err := f.release("h")
	require.NoError(t, err)
	f.clock.Advance(time.Hour)
	busy := begin(t, f.pool, pgx.ReadCommitted)
	require.NoError(t, f.ledger.Lock(t.Context(), busy, "a"))
	late := pgtest.Going(func() error {
		return pgx.BeginFunc(t.Context(), f.pool, func(tx pgx.Tx) error {
			_, _, err := f.book.Expire(t.Context(), tx, holds.Expire{ID: "h", Deadline: h.Deadline})
			return err
		})
	})
	pgtest.WaitQueued(t, f.pool, 1)
	n, err := f.book.Purge(t.Context(), f.pool, holds.PurgeOptions{OlderThan: time.Second})
	require.NoError(t, err)
	require.Equal(t, int64(1), n)
	require.NoError(t, busy.Commit(t.Context()))
	require.ErrorIs(t, <-late, holds.ErrUnknown)
}

// Two placements end holds that are due and that both come across, one of them in
// several steps: the rows of its second step come before those of its first in the
// order of rows.
func TestPlace_EndingManyHoldsInStepsDoesNotDeadlock(t *testing.T) {
	t.Parallel()
	f := setUp(t, holds.Config{})
	const both, more = 2, 520
	line := func(scope string, n int64) holds.Line { return capacity(scope, n, 10*more) }
	// In the order of rows: "last" is due after all others on s, "shared" is the first.
	f.mustPlace(holds.Request{ID: "gate", TTL: 3 * time.Minute, Lines: []holds.Line{line("s", 1), line("u", 1)}})
	f.mustPlace(holds.Request{ID: "last", TTL: 3 * time.Minute, Lines: []holds.Line{line("s", 1), line("t", 1)}})
	f.mustPlace(holds.Request{ID: "shared", TTL: time.Minute, Lines: []holds.Line{line("s", 1), line("t", 1)}})
	for i := range more {
		f.mustPlace(holds.Request{ID: fmt.Sprint(i), TTL: 2 * time.Minute, Lines: []holds.Line{line("s", 1)}})
	}
	f.clock.Advance(time.Hour)
	wait := begin(t, f.pool, pgx.ReadCommitted)
	_, err := f.book.Place(t.Context(), wait, holds.Request{ID: "ends gate", TTL: time.Minute, Lines: []holds.Line{line("u", 1)}})
	require.NoError(t, err)
	place := func(id, scope string, amount, limit int64) <-chan error {
		return pgtest.Going(func() error {
			_, err := f.place(holds.Request{ID: id, Lines: []holds.Line{capacity(scope, amount, limit)}})
			return err
		})
	}
	all := place("all of s", "s", more, more)
	pgtest.WaitQueued(t, f.pool, 1)
	other := place("all of t", "t", both, both)
	pgtest.WaitFor(t, "the other to wait or to be done", func() bool { return len(other) > 0 || pgtest.Queued(t, f.pool) == 2 })
	require.NoError(t, wait.Commit(t.Context()))
	require.NoError(t, <-all)
	require.NoError(t, <-other)
	// Let in for good: all that stood in the way has ended, whatever the clock says later.
	f.clock.Set(noon)
	_, held := f.usage("s")
	require.Equal(t, int64(more), held)
	f.verify()
}

// Whoever waits for the row of a hold that another transaction is ending waits no
// longer than for a lock, or than its own setting allows, which it has back afterwards.
func TestLockTimeout_BoundsTheWaitForAHoldsRow(t *testing.T) {
	t.Parallel()
	f := setUp(t, holds.Config{})
	ctx := t.Context()
	ledger, book := f.ledger, f.book
	waiting := func(timeout time.Duration) {
		var err error
		ledger, err = budget.New(budget.Config{LockTimeout: timeout})
		require.NoError(t, err)
		book, err = holds.New(ledger, holds.Config{})
		require.NoError(t, err)
	}
	place := func(id string, scopes ...string) func(tx pgx.Tx) error {
		r := holds.Request{ID: id, TTL: time.Minute}
		for _, scope := range scopes {
			r.Lines = append(r.Lines, capacity(scope, 1, 1))
		}
		return func(tx pgx.Tx) error { _, err := book.Place(ctx, tx, r); return err }
	}
	h := f.mustPlace(holds.Request{ID: "h", Lines: []holds.Line{capacity("a", 1, 1), capacity("b", 1, 1)}})
	live := holds.Request{ID: "live", TTL: time.Hour, Lines: []holds.Line{capacity("d", 1, 1)}}
	f.mustPlace(live)
	f.mustPlace(holds.Request{ID: "too", TTL: time.Hour, Lines: []holds.Line{capacity("e", 1, 1)}})
	f.clock.Advance(time.Minute)
	row := func(id string) func(pgx.Tx) error {
		return func(tx pgx.Tx) error {
			_, err := tx.Exec(ctx, `select from metered.holds where id = $1 for update`, id)
			return err
		}
	}
	for name, c := range map[string]struct{ busy, call func(tx pgx.Tx) error }{
		"charge": {row("h"), func(tx pgx.Tx) error {
			_, err := ledger.Charge(ctx, tx, budget.Charge{Scope: "b", Amount: 1, Limits: []budget.Limit{budget.Lifetime(1)}})
			return err
		}},
		"place":      {place("ends h", "a"), place("after h", "b")},
		"same":       {place("two places", "x"), place("two places", "y")},
		"same again": {row("live"), func(tx pgx.Tx) error { _, err := book.Place(ctx, tx, live); return err }},
		"release": {row("live"), func(tx pgx.Tx) error {
			_, err := book.Release(ctx, tx, holds.Release{IDs: []string{"live"}})
			return err
		}},
		"release two": {row("live"), func(tx pgx.Tx) error {
			_, err := book.Release(ctx, tx, holds.Release{IDs: []string{"live", "too"}})
			return err
		}},
		"extend": {row("live"), func(tx pgx.Tx) error {
			_, err := book.Extend(ctx, tx, holds.Extend{IDs: []string{"live"}, By: time.Second})
			return err
		}},
		"expire": {row("h"), func(tx pgx.Tx) error {
			_, _, err := book.Expire(ctx, tx, holds.Expire{ID: "h", Deadline: h.Deadline})
			return err
		}},
	} {
		for own, timeout := range map[string]time.Duration{"0": 100 * time.Millisecond, "50ms": time.Hour} {
			waiting(timeout)
			busy, tx := begin(t, f.pool, pgx.ReadCommitted), begin(t, f.pool, pgx.ReadCommitted)
			require.NoError(t, c.busy(busy), name)
			_, err := tx.Exec(ctx, `set local statement_timeout = '20s'; set local lock_timeout = '`+own+`'`)
			require.NoError(t, err)
			require.ErrorIs(t, c.call(tx), holds.ErrBusy, "%s, %s", name, own)
			require.NoError(t, busy.Rollback(ctx))
			require.NoError(t, tx.Rollback(ctx))
		}

		tx := begin(t, f.pool, pgx.ReadCommitted)
		_, err := tx.Exec(ctx, `set local lock_timeout = '7654ms'`)
		require.NoError(t, err)
		require.NoError(t, c.call(tx), name)
		var setting string
		require.NoError(t, tx.QueryRow(ctx, "show lock_timeout").Scan(&setting))
		require.Equal(t, "7654ms", setting, name)
		require.NoError(t, tx.Rollback(ctx))
	}
	f.verify()
}
