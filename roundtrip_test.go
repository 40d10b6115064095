package metered_test

import (
	"context"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/jobs"
)

func TestDo_RoundTrips(t *testing.T) {
	t.Parallel()
	owner, _ := setUp(t, metered.Config{})
	pool, w := pgtest.Tap(t, owner, func(config *pgxpool.Config) { config.MaxConns = 2 })
	c := newClient(t, pool, metered.Config{})
	n := 0
	trips := func(change func(*metered.Command), fn metered.Func[any]) (own int, notified bool) {
		for range 4 { // warm: statements are prepared, and River's NOTIFY was sent a moment ago
			n++
			cmd := whole(t, owner, c, fmt.Sprint(n))
			change(&cmd)
			w.Each(nil)
			_, _ = metered.Do(t.Context(), c, cmd, fn)
		}
		sent := w.Sent()
		notified = slices.ContainsFunc(sent, func(f *pgtest.Flush) bool { return f.Has("pg_notify") })
		if notified {
			return len(sent) - 1, true
		}
		return len(sent), false
	}
	as := func(*metered.Command) {}
	keyless := func(ctx context.Context, tx *metered.Tx) (any, error) { return tx.Enqueue(ctx, process{"x"}, nil) }
	full := func(cmd *metered.Command) { cmd.Charges = []budget.Charge{charge("full", 9, 5)} }
	for what, test := range map[string]struct {
		change func(*metered.Command)
		fn     metered.Func[any]
		want   int
	}{
		"token and charges":                {as, nil, 2},
		"token, a keyless job and charges": {as, keyless, 3},
		"with declared holds": {func(cmd *metered.Command) {
			cmd.Holds = []holds.Request{{TTL: time.Minute, Lines: []holds.Line{room("a", 1, 99)}}}
			cmd.Claims = []holds.Claim{seat(fmt.Sprint(n), "ann")}
		}, nil, 2},
		"with limits from queries": {func(cmd *metered.Command) {
			ten := budget.Lifetime(0).MaxFrom("select 10")
			cmd.Charges = []budget.Charge{{Scope: fmt.Sprint(n), Amount: 1, Limits: []budget.Limit{ten}}}
			cmd.Holds = []holds.Request{{TTL: time.Minute, Lines: []holds.Line{{Scope: fmt.Sprint("b", n), Amount: 1, Limits: []budget.Limit{ten}}}}}
		}, nil, 3},
		"with a refusal to record":     {func(cmd *metered.Command) { cmd.RecordRefusal = true }, nil, 2},
		"one that is recorded":         {func(cmd *metered.Command) { full(cmd); cmd.RecordRefusal = true }, nil, 4},
		"the same with early release":  {func(cmd *metered.Command) { cmd.EarlyRelease = true }, keyless, 3},
		"early, and with its position": {func(cmd *metered.Command) { cmd.EarlyRelease, cmd.LSN = true, true }, keyless, 3},
		"not early, with its position": {func(cmd *metered.Command) { cmd.LSN = true }, keyless, 3},
		"and a statement of the function": {as, func(ctx context.Context, tx *metered.Tx) (any, error) {
			_, _ = tx.Exec(ctx, "select 1")
			return keyless(ctx, tx)
		}, 4},
		"token, a keyed job and charges": {as, func(ctx context.Context, tx *metered.Tx) (any, error) {
			return tx.Enqueue(ctx, process{"x"}, &jobs.Options{Key: fmt.Sprint(n)})
		}, 4},
		"a replay, and the rollback":  {func(cmd *metered.Command) { *cmd = metered.Command{ID: "replayed", Input: 1} }, nil, 2},
		"a replay with its position":  {func(cmd *metered.Command) { *cmd = metered.Command{ID: "replayed", Input: 1, LSN: true} }, nil, 3},
		"a refusal, and the rollback": {full, nil, 2},
		"a refusal by the last flush": {as, func(_ context.Context, tx *metered.Tx) (any, error) { return nil, tx.Charge(charge("full", 9, 5)) }, 5}, // pgx prepares a failed batch again: 2 more
		"with sticky charges":         {func(cmd *metered.Command) { cmd.Sticky = tries }, nil, 6},
	} {
		got, notified := trips(test.change, test.fn)
		t.Logf("%s: %d round trips, and NOTIFY: %v", what, got, notified)
		require.Equal(t, test.want, got, what)
	}
}

// Subscribers take a flush more, the position does not.
func TestDo_PositionTakesNoRoundTripBehindSubscribersEither(t *testing.T) {
	t.Parallel()
	owner, _ := setUp(t, metered.Config{})
	pool, w := pgtest.Tap(t, owner, nil)
	c := newClient(t, pool, metered.Config{Holds: holds.Config{Subscribers: []holds.Subscriber{
		func(context.Context, pgx.Tx, holds.Transition) error { return nil },
	}}})
	trips := func(id string, early, asked bool) (n int) {
		for i := range 3 { // warm
			w.Each(nil)
			out, err := metered.Do(t.Context(), c, metered.Command{ID: fmt.Sprint(id, i), Input: 1, EarlyRelease: early, LSN: asked},
				placing(holds.Request{TTL: time.Minute, Lines: []holds.Line{room("seat", 1, 99)}}))
			require.NoError(t, err)
			require.Equal(t, asked, out.LSN > 0)
			n = len(w.Sent())
		}
		return n
	}
	require.Equal(t, trips("a", false, false), trips("b", false, true))
	require.Equal(t, trips("c", true, false), trips("d", true, true))
}

func TestDo_WorksInEachExecMode(t *testing.T) {
	t.Parallel()
	for _, mode := range []pgx.QueryExecMode{
		pgx.QueryExecModeCacheStatement, pgx.QueryExecModeCacheDescribe, pgx.QueryExecModeDescribeExec,
		pgx.QueryExecModeExec, pgx.QueryExecModeSimpleProtocol,
	} {
		t.Run(mode.String(), func(t *testing.T) {
			t.Parallel()
			owner, _ := setUp(t, metered.Config{})
			pool := pgtest.Reopen(t, owner, func(config *pgxpool.Config) { config.ConnConfig.DefaultQueryExecMode = mode })
			c := newClient(t, pool, metered.Config{})
			ctx := t.Context()
			for i, level := range isolationLevels {
				cmd := whole(t, owner, c, fmt.Sprint("op ", i, " é'\\"))
				cmd.Isolation, cmd.Sticky, cmd.Input = level, tries, map[string]any{"a": []byte{0, 1, 255}}
				cmd.EarlyRelease, cmd.LSN = i == 0, i < 2
				cmd.Charges[0].Note = budget.Note{Reason: `it's "quoted" \`}
				for range 2 {
					out, err := metered.Do(ctx, c, cmd, wholeFunc(cmd.ID, nil))
					require.NoError(t, err)
					require.Equal(t, cmd.ID, out.Result.Name)
					require.Equal(t, cmd.LSN, out.LSN > 0)
					require.Equal(t, int64(2), out.Receipt.Entries[0].Amount)
					require.Equal(t, everything, footprintOf(t, owner, cmd))
				}
				again, err := metered.Do(ctx, c, cmd, wholeFunc(cmd.ID, nil))
				require.NoError(t, err)
				op, err := c.Lookup(ctx, pool, "", cmd.ID)
				require.NoError(t, err)
				require.Equal(t, string(again.Raw), string(op.Result))
				cmd.Name = "other"
				_, err = metered.Do(ctx, c, cmd, wholeFunc(cmd.ID, nil))
				require.ErrorIs(t, err, metered.ErrConflict)
			}
			fill(t, owner, c, "full", 5)
			_, err := metered.Do[any](ctx, c, metered.Command{ID: "early", Input: 1, Charges: []budget.Charge{charge("full", 1, 5)}}, nil)
			require.ErrorIs(t, err, budget.ErrExceeded)
			_, err = metered.Do(ctx, c, metered.Command{ID: "late", Input: 1}, func(_ context.Context, tx *metered.Tx) (any, error) {
				return nil, tx.Charge(charge("full", 1, 5))
			})
			require.ErrorIs(t, err, budget.ErrExceeded)
			cmd := whole(t, owner, c, "in")
			require.NoError(t, pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
				_, err := metered.DoTx(ctx, c, tx, metered.Command{ID: "failed", Input: 1}, func(context.Context, *metered.Tx) (any, error) { return nil, errOwn })
				require.ErrorIs(t, err, errOwn)
				_, err = metered.DoTx(ctx, c, tx, cmd, wholeFunc("in", nil))
				return err
			}))
			require.Equal(t, everything, footprintOf(t, owner, cmd))
			hall(t, owner, 4)
			declared := metered.Command{ID: "declared", Claims: []holds.Claim{seat("21A", "ann")}, RecordRefusal: true,
				Holds: []holds.Request{{TTL: time.Hour, Lines: []holds.Line{{Scope: "hall", Amount: 3, Limits: seatsOf}}}}}
			for i, code := range []string{"", "", "claim_taken", "claim_taken"} {
				if i == 2 {
					declared.ID, declared.Claims[0].Holder = "refused", "ben"
				}
				out, err := metered.Do[any](ctx, c, declared, nil)
				require.Equal(t, code, metered.Code(err))
				require.Equal(t, i%2 == 1, out.Replayed)
			}
			_, err = c.PurgeOperations(ctx, pool, metered.PurgeOptions{OlderThan: 3600e9})
			require.NoError(t, err)
		})
	}
}
