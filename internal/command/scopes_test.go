package command_test

import (
	"context"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/pgtest"
)

// createScopes and retireScopes do so in a transaction of their own.
func createScopes(t *testing.T, c *metered.Client, pool *pgxpool.Pool, scopes ...string) {
	t.Helper()
	require.NoError(t, pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error {
		_, err := c.Budget.Create(t.Context(), tx, scopes...)
		return err
	}))
}

func retireScopes(ctx context.Context, c *metered.Client, pool *pgxpool.Pool, scopes ...string) error {
	return pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		_, err := c.Budget.Retire(ctx, tx, scopes...)
		return err
	})
}

// A command that uses a scope that must exist and does not is refused, and leaves nothing. Where it declares that use
// it is refused before its function runs.
func TestDo_AScopeThatMustExistAndDoesNotRefusesTheCommand(t *testing.T) {
	t.Parallel()
	var refusals []error
	pool, c := setUp(t, metered.Config{EarlyLook: true, OnRefusal: func(_ context.Context, d metered.RefusedCommand) {
		refusals = append(refusals, d.Err)
		require.False(t, d.Sticky)
	}})
	createScopes(t, c, pool, "seat/1", "seat/2")
	require.NoError(t, retireScopes(t.Context(), c, pool, "seat/2"))
	for _, level := range isolationLevels {
		t.Run(string(level), func(t *testing.T) {
			refusals = nil
			one := func(scope string) budget.Charge { return budget.Charge{Scope: scope, Amount: 1, MustExist: true} }
			line := func(scope string) []holds.Line { return []holds.Line{{Scope: scope, Amount: 1, MustExist: true}} }
			refused := 0
			for scope, want := range map[string]error{"seat/3": budget.ErrScopeUnknown, "seat/2": budget.ErrScopeRetired} {
				for what, cmd := range map[string]metered.Command{
					"charge": {ID: "op", Charges: []budget.Charge{one("seat/1"), one(scope)}},
					"sticky": {ID: "op", Sticky: []budget.Charge{one(scope)}},
				} {
					cmd.Isolation = level
					_, err := metered.Do(t.Context(), c, cmd, mustNotRun(t))
					require.ErrorIs(t, err, want, what)
					require.NotErrorIs(t, err, metered.ErrTooManyAttempts)
					require.NotErrorIs(t, err, metered.ErrSticky)
					require.False(t, metered.Retryable(err))
					refused++
				}
				for what, fn := range map[string]func(ctx context.Context, tx *metered.Tx) error{
					"charge": func(_ context.Context, tx *metered.Tx) error { return tx.Charge(one("seat/1"), one(scope)) },
					"credit": func(_ context.Context, tx *metered.Tx) error {
						return tx.Credit(budget.Credit{Scope: scope, Amount: 1, MustExist: true})
					},
					"place": func(ctx context.Context, tx *metered.Tx) error {
						_, err := tx.Place(ctx, holds.Placement{Lines: line(scope), TTL: time.Minute}, nil)
						return err
					},
					"claim": func(ctx context.Context, tx *metered.Tx) error {
						_, err := tx.Claim(ctx, holds.Claim{Key: holds.Key{Type: "k", Value: "v"}, Holder: "ann", Lines: line(scope), TTL: time.Minute}, nil)
						return err
					},
				} {
					_, err := metered.Do(t.Context(), c, metered.Command{ID: "op", Input: 1, Isolation: level}, func(ctx context.Context, tx *metered.Tx) (uploaded, error) {
						if _, err := tx.Exec(ctx, `insert into uploads values ('x')`); err != nil {
							return uploaded{}, err
						}
						return uploaded{}, fn(ctx, tx)
					})
					require.ErrorIs(t, err, want, what)
					refused++
				}
			}
			require.Len(t, refusals, refused, "each counts as a refusal")
			for _, table := range []string{"uploads", "metered.ledger", "metered.operations", "metered.holds"} {
				require.Zero(t, count(t, pool, table), table)
			}
		})
	}
	_, err := metered.Do(t.Context(), c, metered.Command{ID: "op", Input: 1, Charges: []budget.Charge{{Scope: "seat/1", Amount: 1, MustExist: true}}}, upload("x"))
	require.NoError(t, err)
}

// A scope that is retired while the function runs is refused in the last flush.
func TestDo_AScopeThatIsRetiredMeanwhileRefusesTheCommand(t *testing.T) {
	t.Parallel()
	pool, c := setUp(t, metered.Config{})
	for _, level := range isolationLevels {
		t.Run(string(level), func(t *testing.T) {
			scope := string(level)
			createScopes(t, c, pool, scope)
			runs := 0
			_, err := metered.Do(t.Context(), c, metered.Command{ID: "op", Input: 1, Isolation: level, EarlyLook: true, Charges: []budget.Charge{{Scope: scope, Amount: 1, MustExist: true}}},
				func(ctx context.Context, tx *metered.Tx) (uploaded, error) {
					if runs++; runs == 1 {
						if err := retireScopes(ctx, c, pool, scope); err != nil {
							return uploaded{}, err
						}
					}
					return upload("x")(ctx, tx)
				})
			require.ErrorIs(t, err, budget.ErrScopeRetired)
			require.Equal(t, 1, runs)
			require.Zero(t, count(t, pool, "uploads"))
			require.Zero(t, count(t, pool, "metered.ledger"))
		})
	}
}

// An early look whose snapshot is older than the scope is no refusal.
func TestDoTx_AScopeThatWasCreatedSinceTheSnapshotIsTriedAgain(t *testing.T) {
	t.Parallel()
	pool, c := setUp(t, metered.Config{})
	for _, level := range isolationLevels[1:] {
		t.Run(string(level), func(t *testing.T) {
			tx, err := pool.BeginTx(t.Context(), pgx.TxOptions{IsoLevel: level})
			require.NoError(t, err)
			defer tx.Rollback(context.Background())
			require.Zero(t, pgtest.Value[int](t, tx, `select count(*) from metered.ledger`))
			createScopes(t, c, pool, string(level))
			_, err = metered.DoTx(t.Context(), c, tx, metered.Command{ID: "op", Input: 1, EarlyLook: true, Charges: []budget.Charge{{Scope: string(level), Amount: 1, MustExist: true}}}, mustNotRun(t))
			require.NotErrorIs(t, err, budget.ErrScopeUnknown)
			require.True(t, metered.Retryable(err), "%v", err)
		})
	}
}
