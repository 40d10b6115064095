package holds_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/internal/purge"
	"github.com/pgmetered/metered/internal/sqlstate"
	"github.com/pgmetered/metered/internal/uuidv7"
)

// Placed before, says the first look, and deleted while this waits for the hold's row.
func TestPlace_OfAHoldThatIsBeingPurgedIsASerializationFailure(t *testing.T) {
	t.Parallel()
	f := setUp(t, holds.Config{})
	r := holds.Placement{ID: "h", Lines: []holds.Line{capacity("a", 1, 1)}}
	f.mustPlace(r)
	_, err := f.release("h")
	require.NoError(t, err)
	f.clock.Advance(time.Minute)
	purging := begin(t, f.pool, pgx.ReadCommitted)
	_, err = purging.Exec(t.Context(), `select metered.purge_holds('-infinity', metered.clock(), 10, 1000)`)
	require.NoError(t, err)
	late := pgtest.Going(func() error { _, err := f.place(r); return err })
	pgtest.WaitQueued(t, f.pool, 1)
	require.NoError(t, purging.Commit(t.Context()))
	require.Equal(t, sqlstate.SerializationFailure, code(<-late))
	f.mustPlace(r)
	f.verify()
}

// A hold may outlive another with a younger id: ids that were retired with that one stay retired.
func TestPurge_OfAnOlderIDTakesNothingBack(t *testing.T) {
	t.Parallel()
	f := setUp(t, holds.Config{})
	line := []holds.Line{capacity("a", 1, 5)}
	older, younger := uuidAt(noon), uuidAt(noon.Add(time.Second))
	f.clock.Advance(time.Second)
	for _, id := range []string{older, younger} {
		f.mustPlace(holds.Placement{ID: id, TTL: time.Hour, Lines: line})
	}
	for _, id := range []string{younger, older} {
		_, err := f.release(id)
		require.NoError(t, err)
		f.clock.Advance(time.Minute)
		n, err := f.purge()
		require.NoError(t, err)
		require.Equal(t, int64(1), n)
		_, err = f.place(holds.Placement{ID: younger, Lines: line})
		require.ErrorIs(t, err, holds.ErrRetired)
	}
	f.verify()
}

// uuidAt is a new UUIDv7 of another time.
func uuidAt(at time.Time) string {
	ms := fmt.Sprintf("%012x", at.UnixMilli())
	return ms[:8] + "-" + ms[8:] + uuidv7.New()[13:]
}

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
			f.mustPlace(holds.Placement{ID: "second", Lines: []holds.Line{capacity("c", 1, 5)}})
			_, err := f.release("second")
			require.NoError(t, err)
			f.clock.Advance(time.Minute)
			f.mustPlace(holds.Placement{ID: "first", Lines: []holds.Line{capacity("a", 1, 5)}})
			require.ErrorIs(t, call(f, "first", "third"), holds.ErrUnknown)
			busy := begin(t, f.pool, pgx.ReadCommitted)
			require.NoError(t, f.ledger.Lock(t.Context(), busy, "a"))
			late := pgtest.Going(func() error { return call(f, "first", "second") })
			pgtest.WaitQueued(t, f.pool, 1)
			n, err := f.purge()
			require.NoError(t, err)
			require.Equal(t, int64(1), n)
			f.mustPlace(holds.Placement{ID: "second", Lines: []holds.Line{capacity("b", 1, 5)}})
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

// A purge while the clock is ahead retires the ids that it deleted, and nothing newer.
func TestPurge_UnderAClockThatIsAheadRetiresNoNewID(t *testing.T) {
	t.Parallel()
	f := setUp(t, holds.Config{})
	line := []holds.Line{capacity("a", 1, 5)}
	old := f.mustPlace(holds.Placement{ID: uuidAt(noon), Lines: line})
	f.mustPlace(holds.Placement{ID: "no time", Lines: line})
	_, err := f.release(old.ID, "no time")
	require.NoError(t, err)
	f.clock.Advance(10 * 24 * time.Hour)
	n, err := purge.Holds.Delete(t.Context(), f.pool, purge.Options{OlderThan: time.Second})
	require.NoError(t, err)
	require.Equal(t, int64(2), n)
	f.clock.Set(noon.Add(time.Second))
	for id, want := range map[string]error{old.ID: holds.ErrRetired, uuidAt(noon.Add(-time.Hour)): holds.ErrRetired, uuidAt(noon.Add(time.Millisecond)): nil} {
		_, err = f.place(holds.Placement{ID: id, Lines: line})
		require.ErrorIs(t, err, want)
	}
}

// A client with a clock that is ahead makes an id: it is kept until its own time is old enough. To forget it earlier,
// all ids up to its time would have to be retired.
func TestPurge_KeepsAnIDWithATimeInTheFuture(t *testing.T) {
	t.Parallel()
	f := setUp(t, holds.Config{})
	line := []holds.Line{capacity("a", 1, 5)}
	early := f.mustPlace(holds.Placement{ID: uuidAt(noon.Add(time.Hour)), Lines: line})
	_, err := f.release(early.ID)
	require.NoError(t, err)
	purge := func() int64 {
		dry, err := purge.Holds.Delete(t.Context(), f.pool, purge.Options{OlderThan: time.Minute, DryRun: true})
		require.NoError(t, err)
		n, err := purge.Holds.Delete(t.Context(), f.pool, purge.Options{OlderThan: time.Minute})
		require.NoError(t, err)
		require.Equal(t, dry, n)
		return n
	}
	f.clock.Advance(10 * time.Minute)
	require.Zero(t, purge())
	f.mustPlace(holds.Placement{ID: uuidAt(f.clock.Now()), TTL: time.Second, Lines: line})
	f.clock.Advance(time.Hour)
	require.Equal(t, int64(1), purge())
	_, err = f.place(holds.Placement{ID: early.ID, Lines: line})
	require.ErrorIs(t, err, holds.ErrRetired)
}

func TestPurge_DoesNotWaitForEverForASessionThatSharesTheHorizon(t *testing.T) {
	t.Parallel()
	f := setUp(t, holds.Config{})
	open := begin(t, f.pool, pgx.RepeatableRead)
	_, err := f.book.Place(t.Context(), open, holds.Placement{ID: uuidAt(noon), TTL: time.Minute, Lines: []holds.Line{capacity("a", 1, 5)}})
	require.NoError(t, err)
	ctx, cancel := pgtest.Patient(t)
	defer cancel()
	_, err = purge.Holds.Delete(ctx, f.pool, purge.Options{LockTimeout: 50 * time.Millisecond})
	require.ErrorIs(t, err, budget.ErrBusy)
	require.NoError(t, open.Commit(t.Context()))
	_, err = purge.Holds.Delete(t.Context(), f.pool, purge.Options{})
	require.NoError(t, err)
}

func TestExpire_OfAHoldPurgedWhileItWaitsIsUnknown(t *testing.T) {
	t.Parallel()
	f := setUp(t, holds.Config{Notify: true})
	h := f.mustPlace(holds.Placement{ID: "h", Lines: []holds.Line{capacity("a", 1, 5)}})
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
	n, err := purge.Holds.Delete(t.Context(), f.pool, purge.Options{OlderThan: time.Second})
	require.NoError(t, err)
	require.Equal(t, int64(1), n)
	require.NoError(t, busy.Commit(t.Context()))
	require.ErrorIs(t, <-late, holds.ErrUnknown)
}
