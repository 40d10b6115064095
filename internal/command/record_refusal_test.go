package command_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/internal/purge"
	"github.com/pgmetered/metered/tokens"
)

// refuser is a command that is refused, and a function that makes room for it afterwards.
type refuser struct {
	cmd  metered.Command
	fn   metered.Func[string]
	room func()
}

// refusers are commands for every kind of refusal.
func refusers(t *testing.T, pool *pgxpool.Pool, c *metered.Client) map[string]refuser {
	t.Helper()
	ctx := t.Context()
	do := func(fn func(tx pgx.Tx) error) { require.NoError(t, pgx.BeginFunc(ctx, pool, fn)) }
	place := func(id string, lines ...holds.Line) {
		do(func(tx pgx.Tx) error {
			_, err := c.Holds.Place(ctx, tx, holds.Placement{ID: id, Holder: "ann", TTL: time.Hour, Lines: lines})
			return err
		})
	}
	calls := func(call func(tx *metered.Tx) error) metered.Func[string] {
		return func(_ context.Context, tx *metered.Tx) (string, error) { return "done", call(tx) }
	}
	place("kept", room("kept", 2, 2))
	place("ended", room("ended", 1, 1))
	do(func(tx pgx.Tx) error {
		_, err := c.Holds.Release(ctx, tx, holds.Release{IDs: []string{"ended"}})
		return err
	})
	var claim string
	do(func(tx pgx.Tx) error {
		h, err := c.Holds.Claim(ctx, tx, holds.Claim{Key: holds.Key{Type: "seat", Value: "21A"}, Holder: "ann", TTL: time.Hour})
		claim = h.ID
		return err
	})
	var charged budget.Receipt
	do(func(tx pgx.Tx) (err error) {
		charged, err = c.Budget.Charge(ctx, tx, charge("refunded", 5, 0))
		return err
	})
	one := charge("full", 1, 5)
	return map[string]refuser{
		"early look": {cmd: metered.Command{EarlyLook: true, Charges: []budget.Charge{one}}, room: fill(t, pool, c, "full", 5)},
		"last flush": {fn: calls(func(tx *metered.Tx) error { return tx.Charge(charge("late", 1, 5)) }), room: fill(t, pool, c, "late", 5)},
		"two limits": {cmd: metered.Command{Charges: []budget.Charge{{Scope: "two", Amount: 3, Limits: []budget.Limit{budget.Prepaid(0), budget.PerWindow(2, time.Hour).Named("hourly")}}}}},
		"no such scope": {cmd: metered.Command{Charges: []budget.Charge{{Scope: "mistyped", Amount: 1, MustExist: true}}}, room: func() {
			do(func(tx pgx.Tx) error {
				_, err := c.Budget.Create(ctx, tx, "mistyped")
				return err
			})
		}},
		"sticky": {cmd: metered.Command{Sticky: []budget.Charge{charge("tries", 1, 5)}}, room: fill(t, pool, c, "tries", 5)},
		"token":  {cmd: metered.Command{Token: redeem(unknownToken(t, c))}},
		"refund": {fn: calls(func(tx *metered.Tx) error {
			return tx.Refund(budget.Refund{Scope: "refunded", Seq: charged.Entries[0].Seq, Amount: 6})
		})},
		"taken": {fn: func(ctx context.Context, tx *metered.Tx) (string, error) {
			return tx.Claim(ctx, holds.Claim{Key: holds.Key{Type: "seat", Value: "21A"}, Holder: "ben", TTL: time.Minute}, nil)
		}, room: func() {
			do(func(tx pgx.Tx) error {
				_, err := c.Holds.Release(ctx, tx, holds.Release{IDs: []string{claim}})
				return err
			})
		}},
		"state":   {fn: calls(func(tx *metered.Tx) error { return tx.Capture(holds.Capture{IDs: []string{"ended"}, All: true}) })},
		"holder":  {fn: calls(func(tx *metered.Tx) error { return tx.Release(holds.Release{IDs: []string{"kept"}, Holder: "ben"}) })},
		"unknown": {fn: calls(func(tx *metered.Tx) error { return tx.Release(holds.Release{IDs: []string{"none"}}) })},
		"excess": {fn: calls(func(tx *metered.Tx) error {
			return tx.Capture(holds.Capture{IDs: []string{"kept"}, Lines: []holds.Line{{Scope: "kept", Amount: 3}}})
		})},
		"ceiling": {fn: calls(func(tx *metered.Tx) error {
			return tx.Extend(holds.Extend{IDs: []string{"kept"}, By: 9999 * time.Hour})
		})},
	}
}

func TestRecordRefusal_TheSameIDIsRefusedInTheSameWay(t *testing.T) {
	t.Parallel()
	var heard sync.Map
	pool, c := setUp(t, metered.Config{OnRefusal: func(_ context.Context, d metered.RefusedCommand) {
		heard.Store(fmt.Sprint(d.Command.ID, d.Replayed), d)
	}})
	ctx := t.Context()
	for name, r := range refusers(t, pool, c) {
		r.cmd.ID, r.cmd.Input, r.cmd.RecordRefusal = name, name, true
		out, refused := metered.Do(ctx, c, r.cmd, r.fn)
		require.NotEmpty(t, metered.Code(refused), name)
		require.Empty(t, out, name)
		require.NotNil(t, pgtest.Value[*string](t, pool, "select refusal::text from metered.operations where id = $1", name), "%s: %v", name, refused)
		if r.room != nil {
			r.room()
		}
		out, err := metered.Do(ctx, c, r.cmd, func(context.Context, *metered.Tx) (string, error) {
			t.Error(name, ": the function ran")
			return "", nil
		})
		requireSameRefusal(t, refused, err)
		require.True(t, out.Replayed, name)
		require.WithinDuration(t, time.Now(), out.At, time.Hour)
		for i, replayed := range []bool{false, true} {
			d, ok := heard.Load(fmt.Sprint(name, replayed))
			require.True(t, ok, name)
			requireSameRefusal(t, refused, d.(metered.RefusedCommand).Err)
			require.Equal(t, name == "sticky", d.(metered.RefusedCommand).Sticky, "%s %d", name, i)
		}
		op, err := c.Lookup(ctx, pool, "", name)
		require.NoError(t, err)
		requireSameRefusal(t, refused, op.Refusal)
		require.Equal(t, metered.Code(refused), op.Code)
		require.Empty(t, op.Result)

		r.cmd.Name = "another"
		_, err = metered.Do(ctx, c, r.cmd, r.fn)
		require.ErrorIs(t, err, budget.ErrConflict, name)
		r.cmd.ID, r.cmd.Name = name+" anew", ""
		if _, err = metered.Do(ctx, c, r.cmd, r.fn); r.room != nil {
			require.NoError(t, err, "%s: there is room for another id", name)
		}
	}
}

// requireSameRefusal compares two errors by all that a caller can see of them.
func requireSameRefusal(t *testing.T, want, got error) {
	t.Helper()
	require.EqualError(t, got, want.Error())
	require.Equal(t, metered.Code(want), metered.Code(got))
	require.Equal(t, errors.Is(want, metered.ErrTooManyAttempts), errors.Is(got, metered.ErrTooManyAttempts))
	var w, g *budget.ExceededError
	if errors.As(want, &w) {
		require.ErrorAs(t, got, &g)
		require.Equal(t, w, g)
		return
	}
	var wt, gt *tokens.InvalidError
	if errors.As(want, &wt) {
		require.ErrorAs(t, got, &gt)
		require.Equal(t, wt.Reason(), gt.Reason())
		return
	}
	if errors.Is(want, holds.ErrUnknown) {
		require.Equal(t, fmt.Sprintf("%T", want), fmt.Sprintf("%T", got))
		require.Equal(t, holds.IsOthers(want), holds.IsOthers(got))
		return
	}
	if errors.Is(want, holds.ErrCeiling) { // it has only its text
		require.ErrorIs(t, got, holds.ErrCeiling)
		return
	}
	for errors.Unwrap(want) != nil && fmt.Sprintf("%T", want) == "*fmt.wrapError" {
		want = errors.Unwrap(want)
	}
	require.Equal(t, want, got)
}

// Only refusals by the command's own parts are recorded.
func TestRecordRefusal_LeavesOutFailuresAndTheFunctionsErrors(t *testing.T) {
	t.Parallel()
	pool, c := setUp(t, metered.Config{Config: budget.Config{LockTimeout: 50 * time.Millisecond}})
	ctx := t.Context()
	release := fill(t, pool, c, "full", 5)
	for name, fn := range map[string]metered.Func[string]{
		"own": func(context.Context, *metered.Tx) (string, error) { return "", errOwn },
		"a refusal that the function met": func(ctx context.Context, tx *metered.Tx) (string, error) {
			_, err := c.Budget.Charge(ctx, tx, charge("full", 1, 5))
			return "", fmt.Errorf("mine: %w", err)
		},
	} {
		_, err := metered.Do(ctx, c, metered.Command{ID: name, Input: 1, RecordRefusal: true}, fn)
		require.Error(t, err)
	}
	unlock := lockScope(t, pool, c, "busy")
	_, err := metered.Do[any](ctx, c, metered.Command{ID: "busy", Charges: []budget.Charge{charge("busy", 1, 5)}, RecordRefusal: true}, nil)
	unlock()
	require.ErrorIs(t, err, budget.ErrBusy)
	_, err = metered.Do[any](ctx, c, metered.Command{ID: "not asked for", Charges: []budget.Charge{charge("full", 1, 5)}}, nil)
	require.ErrorIs(t, err, budget.ErrExceeded)
	require.Zero(t, count(t, pool, "metered.operations"))
	release()
	require.NoError(t, pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		_, err := metered.DoTx[any](ctx, c, tx, metered.Command{ID: "tx", RecordRefusal: true}, nil)
		require.ErrorIs(t, err, budget.ErrArgument)
		return nil
	}))
}

// A subscriber may answer with a refusal of its own, which is not the command's.
func TestRecordRefusal_LeavesOutRefusalsOfASubscriber(t *testing.T) {
	t.Parallel()
	pool, c := setUp(t, metered.Config{Holds: holds.Config{Subscribers: []holds.Subscriber{
		func(context.Context, pgx.Tx, holds.Transition) error { return &budget.ExceededError{} },
	}}})
	cmd := metered.Command{ID: "op", RecordRefusal: true, Holds: []holds.Placement{{TTL: time.Minute, Lines: []holds.Line{room("s", 1, 9)}}}}
	_, err := metered.Do[any](t.Context(), c, cmd, nil)
	require.ErrorIs(t, err, budget.ErrExceeded)
	require.Zero(t, count(t, pool, "metered.operations"))
}

// A refusal that could not be recorded is not the answer: the same id runs anew.
func TestRecordRefusal_ThatFailsIsNoRefusal(t *testing.T) {
	t.Parallel()
	pool, c := setUp(t, metered.Config{})
	ctx := t.Context()
	_, err := pool.Exec(ctx, `create function fail() returns trigger language plpgsql as $$ begin raise 'no disk' using errcode = '53100'; end $$;
		create trigger fail before insert on metered.operations for each row when (new.refusal is not null) execute function fail()`)
	require.NoError(t, err)
	release := fill(t, pool, c, "full", 5)
	cmd := metered.Command{ID: "op", Charges: []budget.Charge{charge("full", 1, 5)}, RecordRefusal: true}
	_, err = metered.Do[any](ctx, c, cmd, nil)
	require.NotErrorIs(t, err, budget.ErrExceeded)
	require.ErrorContains(t, err, "record the refusal")
	require.True(t, metered.Retryable(err))
	release()
	_, err = metered.Do[any](ctx, c, cmd, nil)
	require.NoError(t, err)
}

// The answer to the COMMIT of a refusal's record is lost.
func TestRecordRefusal_AnUnknownOutcomeIsResolved(t *testing.T) {
	t.Parallel()
	for name, lose := range map[string]func(*pgtest.Flush){
		"the answer is lost": func(f *pgtest.Flush) { f.LoseAnswer() }, "the flush is lost": func(f *pgtest.Flush) { f.Lose() },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			owner, w, c, _ := onWire(t, metered.Config{}, nil)
			fill(t, owner, c, "full", 5)
			w.Once((*pgtest.Flush).Last, lose)
			cmd := metered.Command{ID: "refused", Charges: []budget.Charge{charge("full", 1, 5)}, RecordRefusal: true}
			for range 2 {
				_, err := metered.Do[any](t.Context(), c, cmd, nil)
				require.ErrorIs(t, err, budget.ErrExceeded)
			}
			require.Equal(t, 1, count(t, owner, "metered.operations where refusal is not null"))
		})
	}
}

// Room comes while calls with one id are refused: all of them get one answer, and the ledger agrees with it.
func TestRecordRefusal_ConcurrentCallsGetOneAnswer(t *testing.T) {
	t.Parallel()
	pgtest.OnEachVersion(t)
	const callers = 5
	rounds := pgtest.Size(10, 30)
	pool, c := setUp(t, metered.Config{MaxAttempts: 100}, pgtest.Options{MaxConns: callers + 1})
	for _, level := range isolationLevels {
		t.Run(string(level), func(t *testing.T) {
			ctx := t.Context()
			var admitted, refused atomic.Int64
			for round := range rounds {
				scope := fmt.Sprint(level, round)
				release := fill(t, pool, c, scope, 5)
				var yes, no atomic.Int64
				atOnce(callers+1, func(i int) {
					if i == callers {
						time.Sleep(time.Duration(round%10) * 500 * time.Microsecond) // mixes up the interleavings
						release()
						return
					}
					cmd := metered.Command{ID: scope, Charges: []budget.Charge{charge(scope, 2, 5)}, Isolation: level, RecordRefusal: true}
					switch _, err := metered.Do[any](ctx, c, cmd, nil); {
					case err == nil:
						yes.Add(1)
					case errors.Is(err, budget.ErrExceeded):
						no.Add(1)
					default:
						t.Errorf("%v", err)
					}
				})
				require.True(t, yes.Load() == callers || no.Load() == callers, "round %d: %d admitted, %d refused", round, yes.Load(), no.Load())
				require.Equal(t, 2*yes.Load()/callers, used(t, pool, c, scope))
				admitted.Add(yes.Load() / callers)
				refused.Add(no.Load() / callers)
			}
			require.Equal(t, rounds, count(t, pool, "metered.operations where id like '"+string(level)+"%'"))
			t.Logf("%d admitted, %d refused", admitted.Load(), refused.Load())
		})
	}
}

// Sticky charges are taken once for a refusal on record, and its repetitions cost none.
func TestRecordRefusal_KeepsItsStickyCharges(t *testing.T) {
	t.Parallel()
	pool, c := setUp(t, metered.Config{})
	fill(t, pool, c, "full", 5)
	cmd := metered.Command{ID: "op", Charges: []budget.Charge{charge("full", 1, 5)}, Sticky: tries, RecordRefusal: true}
	for range 3 {
		_, err := metered.Do[any](t.Context(), c, cmd, nil)
		require.ErrorIs(t, err, budget.ErrExceeded)
		require.NotErrorIs(t, err, metered.ErrTooManyAttempts)
	}
	require.Equal(t, int64(1), used(t, pool, c, "tries"))
}

// A refusal is forgotten like any other record.
func TestRecordRefusal_EndsWithItsRecord(t *testing.T) {
	t.Parallel()
	pool, c := setUp(t, metered.Config{})
	clock := pgtest.SetClock(t, pool, time.Now())
	release := fill(t, pool, c, "full", 5)
	cmds := []metered.Command{{ID: metered.NewID()}, {ID: "without a time"}}
	do := func(cmd metered.Command) error {
		cmd.Charges, cmd.RecordRefusal = []budget.Charge{charge("full", 1, 5)}, true
		_, err := metered.Do[any](t.Context(), c, cmd, nil)
		return err
	}
	for _, cmd := range cmds {
		require.ErrorIs(t, do(cmd), budget.ErrExceeded)
	}
	release()
	clock.Advance(2 * time.Hour)
	n, err := purge.Operations.Delete(t.Context(), pool, purge.Options{OlderThan: time.Hour})
	require.NoError(t, err)
	require.EqualValues(t, 2, n)
	require.ErrorIs(t, do(cmds[0]), budget.ErrRetired)
	require.NoError(t, do(cmds[1]))
}

// The holder of a key is named to the call that may know it. The record does not keep that name for another caller
// with the same id.
func TestRecordRefusal_DoesNotKeepTheHolderOfAClaim(t *testing.T) {
	t.Parallel()
	pool := pgtest.Open(t)
	c, err := metered.New(pool, metered.Config{})
	require.NoError(t, err)
	claim := func(id, holder string, reveal bool) error {
		_, err := metered.Do[int](t.Context(), c, metered.Command{ID: id, RecordRefusal: true, Claims: []holds.Claim{
			{Key: holds.Key{Type: "seat", Value: "1"}, Holder: holder, TTL: time.Minute, Reveal: reveal}}}, nil)
		return err
	}
	require.NoError(t, claim("1", "ann", false))
	var first, again *holds.TakenError
	require.ErrorAs(t, claim("2", "ben", true), &first)
	require.Equal(t, "ann", first.By.Holder)
	require.ErrorAs(t, claim("2", "ben", false), &again)
	require.Nil(t, again.By)
	require.Equal(t, []any{first.Key, first.RetryAfter}, []any{again.Key, again.RetryAfter})
	op, err := c.Lookup(t.Context(), pool, "", "2")
	require.NoError(t, err)
	require.ErrorAs(t, op.Refusal, &again)
	require.Nil(t, again.By)
}
