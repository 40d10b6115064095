package command_test

import (
	"context"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
)

// Where nothing was refused lately a hopeless command is refused at its end. Then it is looked at before its function
// runs, in that scope, by that client.
func TestDo_LooksEarlyWhereItSawARefusalLately(t *testing.T) {
	t.Parallel()
	pool, c := setUp(t, metered.Config{})
	ctx := t.Context()
	runs := 0
	try := func(c *metered.Client, cmd metered.Command) {
		t.Helper()
		cmd.ID, cmd.Input = metered.NewID(), 1
		_, err := metered.Do(ctx, c, cmd, func(ctx context.Context, tx *metered.Tx) (uploaded, error) {
			runs++
			return upload("x")(ctx, tx)
		})
		require.ErrorIs(t, err, budget.ErrExceeded)
		require.Zero(t, count(t, pool, "uploads"))
		require.Zero(t, count(t, pool, "metered.operations"))
	}
	of := func(scopes ...string) (cmd metered.Command) {
		for _, scope := range scopes {
			cmd.Charges = append(cmd.Charges, charge(scope, 6, 5))
		}
		return cmd
	}
	try(c, of("a"))
	require.Equal(t, 1, runs)
	try(c, of("a"))
	try(c, of("b", "a"))
	require.Equal(t, 1, runs, "it looks where a scope refused")
	try(c, of("c"))
	require.Equal(t, 2, runs, "and not elsewhere")
	try(newClient(t, pool, metered.Config{}), of("a"))
	require.Equal(t, 3, runs, "another process saw nothing")

	asked := of("d")
	asked.EarlyLook = true
	try(c, asked)
	try(newClient(t, pool, metered.Config{EarlyLook: true}), of("d"))
	require.Equal(t, 3, runs)
}

// A look that refuses no more lets the command through.
func TestDo_AnEarlyLookIsNotMoreThanALook(t *testing.T) {
	t.Parallel()
	pool, c := setUp(t, metered.Config{})
	cmd := metered.Command{ID: "op", Charges: []budget.Charge{charge("a", 5, 5)}}
	release := fill(t, pool, c, "a", 1)
	_, err := metered.Do(t.Context(), c, cmd, upload("x"))
	require.ErrorIs(t, err, budget.ErrExceeded)
	_, err = metered.Do(t.Context(), c, cmd, mustNotRun(t))
	require.ErrorIs(t, err, budget.ErrExceeded)
	release()
	_, err = metered.Do(t.Context(), c, cmd, upload("x"))
	require.NoError(t, err)
}
