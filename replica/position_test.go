package replica_test

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
	"github.com/pgmetered/metered/internal/pgserver"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/replica"
)

// replicated is a client of a primary with a replica.
type replicated struct {
	*testing.T
	primary, standby *pgxpool.Pool
	client           *metered.Client
}

// do does a command that is new, and returns its position.
func (r *replicated) do(id string, change func(*metered.Command)) replica.LSN {
	r.Helper()
	cmd := metered.Command{ID: id, Charges: []budget.Charge{{Scope: "user/ann", Amount: 1}}, LSN: true}
	change(&cmd)
	out, err := metered.Do[any](r.Context(), r.client, cmd, nil)
	require.NoError(r, err)
	return out.LSN
}

func (r *replicated) readAt(lsn replica.LSN, timeout time.Duration, fn func(context.Context, *pgx.Conn) error) error {
	return replica.ReadAt(r.Context(), r.standby, lsn, timeout, fn)
}

// With replay paused, the replica has the rows from before the command and none of the command's own, in each way to
// ask for the position.
func TestDo_PositionIsAfterItsCommit(t *testing.T) {
	t.Parallel()
	r := &replicated{T: t}
	r.primary, r.standby = pgtest.Replicate(t, pgserver.Options{})
	r.client = pgtest.NewClient(t, r.primary, metered.Config{})
	as := func(*metered.Command) {}
	early := func(cmd *metered.Command) { cmd.EarlyRelease = true }
	require.Zero(t, r.do("not asked for", func(cmd *metered.Command) { cmd.LSN = false }))
	for i, change := range []func(*metered.Command){as, early, as, early} { // again, when all is prepared
		id := fmt.Sprint("op", i)
		before, err := replica.CommitLSN(t.Context(), r.primary)
		require.NoError(t, err)
		require.NoError(t, r.readAt(before, time.Minute, noRead))
		pgtest.Value[any](t, r.standby, `select pg_wal_replay_pause()`)
		pos := r.do(id, change)
		after, err := replica.CommitLSN(t.Context(), r.primary)
		require.NoError(t, err)
		require.Greater(t, pos, before)
		require.LessOrEqual(t, pos, after)
		require.ErrorIs(t, r.readAt(pos, 100*time.Millisecond, noRead), replica.ErrStale)
		replayed := r.do(id, change)
		require.GreaterOrEqual(t, replayed, pos)
		pgtest.Value[any](t, r.standby, `select pg_wal_replay_resume()`)
		for _, p := range []replica.LSN{pos, replayed} {
			require.NoError(t, r.readAt(p, time.Minute, func(ctx context.Context, conn *pgx.Conn) error {
				_, err := r.client.Lookup(ctx, conn, "", id)
				return err
			}))
		}
	}
}

// A command writes nothing after its position: where nobody else writes, that is the end of the log. The server's
// own records now and then are not in the way three times.
func TestDo_PositionIsTheEndOfItsLog(t *testing.T) {
	t.Parallel()
	r := &replicated{T: t}
	_, r.primary = pgtest.Start(t, pgserver.Options{})
	r.client = pgtest.NewClient(t, r.primary, metered.Config{})
	var pos, end replica.LSN
	for n := range 3 {
		pos = r.do(fmt.Sprint("op", n), func(*metered.Command) {})
		var err error
		end, err = replica.CommitLSN(t.Context(), r.primary)
		require.NoError(t, err)
		if pos == end {
			return
		}
	}
	require.Equal(t, end, pos)
}
