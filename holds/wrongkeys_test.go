package holds_test

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/pgtest"
)

// A charge under a key that is not its scope's. No Go call sends one, but a role may call the
// function.
const wrongKeySQL = `select (metered.charge(array[row('a', 1, $1::bigint, 0, array[row(10, '0')::metered.charge_limit], null, null)::metered.new_charge],
	'1 minute', 60000)).denied is null`

// Lines are freed under the locks of their scopes alone. What cannot be freed keeps its room.
func TestRole_AChargeUnderAWrongKeyDoesNotTakeTheRoomOfWhatItCannotEnd(t *testing.T) {
	t.Parallel()
	owner := setUp(t, holds.Config{})
	app := on(t, pgtest.AsRole(t, owner.pool, metered.GrantSQL, ""), holds.Config{}, owner.clock)
	owner.mustPlace(holds.Request{ID: "h", Lines: []holds.Line{capacity("a", 10, 10)}})
	owner.clock.Advance(time.Minute)
	before := owner.dump()
	_, err := app.pool.Exec(t.Context(), wrongKeySQL, 10)
	require.Equal(t, "22023", code(err), "%v", err)
	require.Equal(t, before, owner.dump())
	owner.verify()
	_, err = app.charge(budget.Charge{Scope: "a", Amount: 10, Limits: []budget.Limit{budget.Lifetime(10)}})
	require.NoError(t, err)
	require.Equal(t, holds.Expired, owner.get("h").State)
	owner.verify()
}

// Without its scope's lock a charge sees a hold as due that is just being extended.
func TestRole_AChargeUnderAWrongKeyEndsNoHoldEarly(t *testing.T) {
	t.Parallel()
	owner := setUp(t, holds.Config{})
	app := on(t, pgtest.AsRole(t, owner.pool, metered.GrantSQL, ""), holds.Config{}, owner.clock)
	ctx := t.Context()
	owner.mustPlace(holds.Request{ID: "extended", Lines: []holds.Line{capacity("a", 5, 10)}})
	owner.mustPlace(holds.Request{ID: "released", Lines: []holds.Line{capacity("a", 5, 10)}, TTL: time.Hour})
	tx, err := app.pool.Begin(ctx)
	require.NoError(t, err)
	defer tx.Rollback(context.Background())
	_, err = app.book.Extend(ctx, tx, holds.Extend{IDs: []string{"extended"}, By: time.Hour})
	require.NoError(t, err)
	_, err = app.book.Release(ctx, tx, holds.Release{IDs: []string{"released"}}) // so that there is room all the same
	require.NoError(t, err)
	owner.clock.Advance(time.Minute)

	charged := app.chargeUnderAWrongKey(5)
	require.NoError(t, tx.Commit(ctx))
	<-charged // whatever it is told
	h := owner.get("extended")
	require.Equal(t, holds.Held, h.State)
	require.Equal(t, int64(5), h.Lines[0].Open)
	owner.verify()
}

// chargeUnderAWrongKey begins to charge, and returns when that waits for a lock or is over.
func (f *fixture) chargeUnderAWrongKey(amount int) <-chan error {
	charged := pgtest.Going(func() error {
		_, err := f.pool.Exec(f.Context(), wrongKeySQL, amount)
		return err
	})
	pgtest.WaitFor(f, "the charge to wait, or to be over", func() bool { return pgtest.Queued(f, f.pool) == 1 || len(charged) == 1 })
	return charged
}

// Without its scope's lock a charge sees a hold as due that is just being captured. What the capture
// spends counts against the limit.
func TestRole_AChargeUnderAWrongKeyCountsWhatIsJustCaptured(t *testing.T) {
	t.Parallel()
	owner := setUp(t, holds.Config{})
	app := on(t, pgtest.AsRole(t, owner.pool, metered.GrantSQL, ""), holds.Config{}, owner.clock)
	ctx := t.Context()
	owner.mustPlace(holds.Request{ID: "h", Lines: []holds.Line{capacity("a", 10, 10)}})
	tx, err := app.pool.Begin(ctx)
	require.NoError(t, err)
	defer tx.Rollback(context.Background())
	_, err = app.book.Capture(ctx, tx, holds.Capture{IDs: []string{"h"}, All: true})
	require.NoError(t, err)
	owner.clock.Advance(time.Minute)

	charged := app.chargeUnderAWrongKey(10)
	require.NoError(t, tx.Commit(ctx))
	<-charged // whatever it is told
	used, held := owner.usage("a")
	require.LessOrEqual(t, used+held, int64(10))
	owner.verify()
}
