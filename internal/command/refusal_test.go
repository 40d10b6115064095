package command_test

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/tokens"
)

// A pool destroys connections that come back in a failed transaction.
func TestDo_AFloodOfRefusalsKeepsItsConnections(t *testing.T) {
	t.Parallel()
	const callers = 4
	each := pgtest.Size(70, 260)
	var heard atomic.Int64
	pool, c := setUp(t, metered.Config{OnRefusal: func(context.Context, metered.RefusedCommand) { heard.Add(1) }},
		pgtest.Options{MaxConns: callers})
	presented := mint(t, pool, c)
	fill(t, pool, c, "full", 5)
	// No limit in the declaration: the first look sees nothing.
	late := func(_ context.Context, tx *metered.Tx) (any, error) { return nil, tx.Charge(charge("full", 1, 5)) }
	atOnce(callers, func(caller int) {
		for i := range each {
			cmd := metered.Command{ID: fmt.Sprint(caller, "/", i), Input: 1}
			if i%2 == 0 {
				cmd.Charges = []budget.Charge{charge("full", 1, 5)}
			}
			if i%8 == 0 {
				cmd.Token = redeem(presented)
			}
			_, err := metered.Do(t.Context(), c, cmd, late)
			if metered.Code(err) != "budget_exceeded" {
				t.Errorf("%v", err)
			}
		}
	})
	require.LessOrEqual(t, pool.Stat().NewConnsCount(), int64(callers))
	require.Equal(t, int64(callers*each), heard.Load())
	require.Zero(t, count(t, pool, "metered.operations"))
	require.Equal(t, int64(5), used(t, pool, c, "full"))
	_, err := metered.Do(t.Context(), c, metered.Command{ID: "op", Input: 1, Token: redeem(presented)}, upload("a")) // unspent
	require.NoError(t, err)
}

// Nobody waits for a command that has only looked, and it has an id of the server's only
// once it writes something.
func TestDo_TheFirstLookLocksNoScopeAndWritesNothing(t *testing.T) {
	t.Parallel()
	pool, c := setUp(t, metered.Config{})
	fill(t, pool, c, "a", 1)
	_, err := metered.Do(t.Context(), c, metered.Command{ID: "op", EarlyLook: true, Charges: []budget.Charge{charge("a", 1, 5)}},
		func(ctx context.Context, tx *metered.Tx) (any, error) {
			var locks int
			var wrote bool // or locked a row
			err := tx.QueryRow(ctx, `select count(*), pg_current_xact_id_if_assigned() is not null from pg_locks
				where pid = pg_backend_pid() and locktype in ('advisory', 'tuple')`).Scan(&locks, &wrote)
			require.Equal(t, 1, locks, "its operation's")
			require.False(t, wrote)
			return nil, err
		})
	require.NoError(t, err)
	require.Equal(t, int64(2), used(t, pool, c, "a"))
}

func TestOnRefusal_HearsOnceOfEachRefusalOutsideTheTransaction(t *testing.T) {
	t.Parallel()
	var mu sync.Mutex
	var heard []metered.RefusedCommand
	var c *metered.Client
	type key struct{}
	// One connection: if the command's were not back, the hook would wait for ever.
	owner, _ := setUp(t, metered.Config{})
	pool, _ := pgtest.Tap(t, owner, nil)
	hook := func(ctx context.Context, d metered.RefusedCommand) {
		mu.Lock()
		defer mu.Unlock()
		heard = append(heard, d)
		require.Equal(t, "value", ctx.Value(key{}))
		require.Zero(t, pool.Stat().AcquiredConns())
		_, err := pool.Exec(ctx, "insert into uploads values ($1)", d.Command.ID)
		require.NoError(t, err)
	}
	c = newClient(t, pool, metered.Config{OnRefusal: hook})
	ctx := context.WithValue(t.Context(), key{}, "value")
	fill(t, owner, c, "full", 5)
	full := []budget.Charge{charge("full", 1, 5)}
	spent := mint(t, owner, c)
	_, err := metered.Do(ctx, c, metered.Command{ID: "spends", Input: 1, Token: redeem(spent)}, nil2)
	require.NoError(t, err)

	for _, d := range []struct {
		cmd    metered.Command
		fn     metered.Func[any]
		err    error
		sticky bool
	}{
		{metered.Command{ID: "early", Input: 1, Charges: full}, nil, budget.ErrExceeded, false},
		{metered.Command{ID: "late", Input: 1}, func(_ context.Context, tx *metered.Tx) (any, error) { return nil, tx.Charge(full...) }, budget.ErrExceeded, false},
		{metered.Command{ID: "sticky", Input: 1, Sticky: full}, nil, budget.ErrExceeded, true},
		{metered.Command{ID: "spent", Input: 1, Token: redeem(spent)}, nil, tokens.ErrInvalid, false},
		{metered.Command{ID: "malformed", Input: 1, Token: redeem("x")}, nil, tokens.ErrInvalid, false},
		{metered.Command{ID: "own", Input: 1}, func(context.Context, *metered.Tx) (any, error) { return nil, errOwn }, errOwn, false},
		{metered.Command{ID: "argument", Input: 1, Name: "\xff"}, nil, budget.ErrArgument, false},
		{metered.Command{ID: "spends", Input: 1}, nil, budget.ErrConflict, false},
	} {
		heard = nil
		_, err := metered.Do(ctx, c, d.cmd, d.fn)
		require.ErrorIs(t, err, d.err, d.cmd.ID)
		if d.err != budget.ErrExceeded && d.err != tokens.ErrInvalid {
			require.Empty(t, heard, d.cmd.ID)
			continue
		}
		require.Len(t, heard, 1, d.cmd.ID)
		require.Equal(t, d.cmd.ID, heard[0].Command.ID)
		require.Equal(t, err, heard[0].Err)
		require.Equal(t, d.sticky, heard[0].Sticky)
	}
	require.Equal(t, 5, count(t, owner, "uploads"))

	heard = nil
	require.NoError(t, pgx.BeginFunc(ctx, owner, func(tx pgx.Tx) error {
		require.Zero(t, pool.Stat().AcquiredConns())
		_, err := metered.DoTx[any](ctx, c, tx, metered.Command{ID: "in", Input: 1, Charges: full}, nil)
		require.ErrorIs(t, err, budget.ErrExceeded)
		return nil
	}))
	require.Len(t, heard, 1)
}

// nil2 does nothing, as a nil function does.
func nil2(context.Context, *metered.Tx) (any, error) { return nil, nil }

func TestDo_ARefusalNamesTheLimitAndTheTimeToRetry(t *testing.T) {
	t.Parallel()
	pool, c := setUp(t, metered.Config{})
	clock := pgtest.SetClock(t, pool, monday)
	fill(t, pool, c, "s", 7)
	clock.Advance(10 * time.Minute)
	limits := []budget.Limit{budget.PerWindow(9, time.Hour), budget.Lifetime(100)}
	for what, do := range map[string]func() error{
		"early": func() error {
			_, err := metered.Do[any](t.Context(), c, metered.Command{ID: "op", Input: 1, Charges: []budget.Charge{{Scope: "s", Amount: 3, Limits: limits}}}, nil)
			return err
		},
		"late": func() error {
			_, err := metered.Do(t.Context(), c, metered.Command{ID: "op", Input: 1}, func(_ context.Context, tx *metered.Tx) (any, error) {
				return nil, tx.Charge(budget.Charge{Scope: "s", Amount: 3, Limits: limits})
			})
			return err
		},
	} {
		var exceeded *budget.ExceededError
		require.ErrorAs(t, do(), &exceeded, what)
		require.Equal(t, []budget.Refusal{{
			Scope: "s", Limit: limits[0], Used: 7, Requested: 3, Available: 2, RetryAfter: 50 * time.Minute,
		}}, exceeded.Refusals, what)
	}
}
