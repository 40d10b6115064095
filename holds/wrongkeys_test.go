package holds_test

import (
	"context"
	"errors"
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
const wrongKeySQL = `select denied is null from metered.charge(array[('a', 1, $1::bigint, 0, array[(10, '0')]::metered.charge_limit[], null)]::metered.new_charge[], '1 minute', 60000)`

// Without its scope's lock a charge ends what is due all the same: the guard of the chain is
// what keeps it exact.
func TestRole_AChargeUnderAWrongKeyEndsWhatIsDue(t *testing.T) {
	t.Parallel()
	owner := setUp(t, holds.Config{})
	app := on(t, pgtest.AsRole(t, owner.pool, metered.GrantSQL, ""), holds.Config{}, owner.clock)
	owner.mustPlace(holds.Request{ID: "h", Lines: []holds.Line{capacity("a", 10, 10)}})
	owner.clock.Advance(time.Minute)
	require.True(t, queryRow[bool](t, app.pool, wrongKeySQL, int64(10)))
	owner.verify()
	_, err := app.charge(budget.Charge{Scope: "a", Amount: 1, Limits: []budget.Limit{budget.Lifetime(10)}})
	require.ErrorIs(t, err, budget.ErrExceeded)
	require.Equal(t, holds.Expired, owner.get("h").State)
	owner.verify()
}

// Without its scope's lock a charge sees a hold as due that is just being extended. It waits
// for the hold's row, and by then the hold is not due.
func TestRole_AChargeUnderAWrongKeyEndsNoHoldEarly(t *testing.T) {
	t.Parallel()
	owner := setUp(t, holds.Config{})
	app := on(t, pgtest.AsRole(t, owner.pool, metered.GrantSQL, ""), holds.Config{}, owner.clock)
	ctx := t.Context()
	owner.mustPlace(holds.Request{ID: "extended", Lines: []holds.Line{capacity("a", 5, 10)}})
	owner.mustPlace(holds.Request{ID: "released", Lines: []holds.Line{capacity("a", 5, 10)}, TTL: time.Hour})
	tx, err := owner.pool.Begin(ctx)
	require.NoError(t, err)
	defer tx.Rollback(context.Background())
	_, err = owner.book.Extend(ctx, tx, holds.Extend{IDs: []string{"extended"}, By: time.Hour})
	require.NoError(t, err)
	_, err = owner.book.Release(ctx, tx, holds.Release{IDs: []string{"released"}}) // so that there is room all the same
	require.NoError(t, err)
	owner.clock.Advance(time.Minute)

	charged := pgtest.Going(func() error {
		var admitted bool
		err := app.pool.QueryRow(ctx, wrongKeySQL, 5).Scan(&admitted)
		if err == nil && !admitted {
			err = errors.New("denied")
		}
		return err
	})
	pgtest.WaitQueued(t, owner.pool, 1)
	require.NoError(t, tx.Commit(ctx))
	require.NoError(t, <-charged)
	h := owner.get("extended")
	require.Equal(t, holds.Held, h.State)
	require.Equal(t, int64(5), h.Lines[0].Open)
	used, held := owner.usage("a")
	require.Equal(t, []int64{5, 5}, []int64{used, held})
	owner.verify()
}
