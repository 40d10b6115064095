package command_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/tokens"
)

func TestDo_ReplayReturnsTheFirstResultAndDoesNothingMore(t *testing.T) {
	t.Parallel()
	pool, c := setUp(t, metered.Config{})
	ctx := t.Context()
	cmd := metered.Command{
		ID: "op-1", Name: "upload", Input: map[string]int{"size": 3}, Token: redeem(mint(t, pool, c)),
		Charges: []budget.Charge{charge("org/acme", 3, 5)},
	}
	first, err := metered.Do(ctx, c, cmd, upload("a"))
	require.NoError(t, err)
	require.Equal(t, "a", first.Result.Name)
	require.False(t, first.Replayed)
	require.Equal(t, int64(2), first.Receipt.Entries[0].Standings[0].Available)

	// Another charge would not fit, and the token is spent; then it is gone.
	check := func() {
		t.Helper()
		again, err := metered.Do(ctx, c, cmd, mustNotRun(t))
		require.NoError(t, err)
		require.True(t, again.Replayed)
		require.Equal(t, []byte(first.Raw), []byte(again.Raw))
		require.Equal(t, first.Result, again.Result)
		require.True(t, first.At.Equal(again.At))
		require.Len(t, again.Receipt.Entries, 1)
		was, is := first.Receipt.Entries[0], again.Receipt.Entries[0]
		require.Equal(t, []any{was.Scope, was.Seq, was.Amount, was.At.UnixMicro()}, []any{is.Scope, is.Seq, is.Amount, is.At.UnixMicro()})
		require.Equal(t, int64(3), used(t, pool, c, "org/acme"))
	}
	check()
	_, err = pool.Exec(ctx, `delete from metered.tokens`)
	require.NoError(t, err)
	check()
}

func TestDo_ReplayIsByteForByte(t *testing.T) {
	t.Parallel()
	_, c := setUp(t, metered.Config{})
	// jsonb would reorder the keys, drop the spaces and round the number.
	const raw = "{\"z\" : 1.10,\n\"a\":\"\\u00e9é\", \"n\":123456789012345678901234567890}"
	cmd := metered.Command{ID: "op"}
	first, err := metered.Do(t.Context(), c, cmd, func(context.Context, *metered.Tx) (verbatim, error) { return raw, nil })
	require.NoError(t, err)
	again, err := metered.Do(t.Context(), c, cmd, func(context.Context, *metered.Tx) (verbatim, error) { return "", nil })
	require.NoError(t, err)
	require.Equal(t, string(first.Raw), string(again.Raw))
	require.Contains(t, string(first.Raw), "123456789012345678901234567890")
	require.Equal(t, first.Result, again.Result)
}

// verbatim is its own JSON.
type verbatim string

func (v verbatim) MarshalJSON() ([]byte, error) { return []byte(v), nil }

func (v *verbatim) UnmarshalJSON(data []byte) error { *v = verbatim(data); return nil }

func TestDo_ReplayHasTheHoldsOfEveryCall(t *testing.T) {
	t.Parallel()
	pool, c := setUp(t, metered.Config{})
	ctx := t.Context()
	claim := holds.Claim{Key: holds.Key{Type: "name", Value: "ann"}, Holder: "ann", TTL: time.Minute}
	r := holds.Placement{ID: "h", TTL: time.Minute, Lines: []holds.Line{room("seat", 2, 9)},
		Charges: []budget.Charge{{Scope: "fee", Amount: 5}, {Scope: "seat", Amount: 1}}}
	other := holds.Placement{ID: "other", TTL: time.Minute, Lines: []holds.Line{room("seat", 1, 9)}}
	both := func(ctx context.Context, tx *metered.Tx) (any, error) {
		_, err := tx.Claim(ctx, claim, nil)
		require.NoError(t, err)
		_, err = tx.Place(ctx, r, nil)
		return nil, err
	}
	for i, fn := range []metered.Func[any]{both, both, func(ctx context.Context, tx *metered.Tx) (any, error) {
		_, err := tx.Place(ctx, other, nil)
		return nil, errors.Join(err,
			tx.Extend(holds.Extend{IDs: []string{"h"}, By: time.Second}),
			tx.Capture(holds.Capture{IDs: []string{"h"}, All: true}),
			tx.Return(holds.Return{IDs: []string{"h"}, All: true}),
			tx.Release(holds.Release{IDs: []string{"other"}}))
	}} {
		cmd := metered.Command{ID: fmt.Sprint(i), Input: 1}
		out, err := metered.Do(ctx, c, cmd, fn)
		require.NoError(t, err)
		require.Len(t, out.Holds, []int{2, 2, 5}[i])
		require.Equal(t, i != 1, out.Holds[0].Created, "the second command has what the first one made")
		again, err := metered.Do(ctx, c, cmd, fn)
		require.NoError(t, err)
		require.True(t, again.Replayed)
		require.Equal(t, out.Holds, again.Holds)
		op, err := c.Lookup(ctx, pool, "", cmd.ID)
		require.NoError(t, err)
		require.Equal(t, out.Holds, op.Holds)
	}
}

// Also where subscribers are told in between.
func TestDoTx_EachCommandOfATransactionRecordsItsOwnHolds(t *testing.T) {
	t.Parallel()
	for _, subscribers := range [][]holds.Subscriber{nil, {func(context.Context, pgx.Tx, holds.Transition) error { return nil }}} {
		pool, c := setUp(t, metered.Config{Holds: holds.Config{Subscribers: subscribers}})
		ctx := t.Context()
		ids := []string{"a", "b", "c"}
		require.NoError(t, pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
			for _, id := range ids {
				fn := pgtest.Placing(holds.Placement{ID: id, TTL: time.Minute, Lines: []holds.Line{room("seat", 1, 9)}})
				if id == "c" {
					fn = func(context.Context, *metered.Tx) (string, error) { return "", nil }
				}
				if _, err := metered.DoTx(ctx, c, tx, metered.Command{ID: id, Input: 1}, fn); err != nil {
					return err
				}
			}
			return nil
		}))
		for i, id := range ids {
			op, err := c.Lookup(ctx, pool, "", id)
			require.NoError(t, err)
			require.Len(t, op.Holds, []int{1, 1, 0}[i])
			for _, h := range op.Holds {
				require.Equal(t, id, h.ID)
			}
		}
	}
}

func TestDo_TheIDWithAnotherCommandIsAConflict(t *testing.T) {
	t.Parallel()
	pool, c := setUp(t, metered.Config{})
	ctx := t.Context()
	issued := time.Now()
	spent := mint(t, pool, c)
	command := func() metered.Command {
		return metered.Command{
			ID: "op", Name: "upload", Input: "in", IssuedAt: issued, Token: redeem(spent),
			Charges: []budget.Charge{charge("s", 1, 10), charge("t", 1, 10)}, Sticky: []budget.Charge{charge("tries", 1, 10)},
		}
	}
	_, err := metered.Do(ctx, c, command(), upload("a"))
	require.NoError(t, err)

	for what, change := range map[string]func(*metered.Command){
		"name":            func(cmd *metered.Command) { cmd.Name = "Upload" },
		"input":           func(cmd *metered.Command) { cmd.Input = "in " },
		"no input":        func(cmd *metered.Command) { cmd.Input = nil },
		"token":           func(cmd *metered.Command) { cmd.Token = redeem(mint(t, pool, c)) },
		"no token":        func(cmd *metered.Command) { cmd.Token = nil },
		"subject":         func(cmd *metered.Command) { cmd.Token.Subject = "bob" },
		"purpose":         func(cmd *metered.Command) { cmd.Token.Purpose = "download" },
		"amount":          func(cmd *metered.Command) { cmd.Charges[0].Amount = 2 },
		"scope":           func(cmd *metered.Command) { cmd.Charges[0].Scope = "S" },
		"fewer charges":   func(cmd *metered.Command) { cmd.Charges = cmd.Charges[:1] },
		"no charges":      func(cmd *metered.Command) { cmd.Charges = nil },
		"sticky amount":   func(cmd *metered.Command) { cmd.Sticky[0].Amount = 2 },
		"no sticky":       func(cmd *metered.Command) { cmd.Sticky = nil },
		"issued at":       func(cmd *metered.Command) { cmd.IssuedAt = issued.Add(time.Microsecond) },
		"not issued":      func(cmd *metered.Command) { cmd.IssuedAt = time.Time{} },
		"moved to charge": func(cmd *metered.Command) { cmd.Charges, cmd.Sticky = append(cmd.Charges, cmd.Sticky...), nil },
	} {
		cmd := command()
		change(&cmd)
		_, err := metered.Do(ctx, c, cmd, mustNotRun(t))
		require.ErrorIs(t, err, budget.ErrConflict, what)
	}
	require.Equal(t, int64(1), used(t, pool, c, "s"))
	require.Equal(t, int64(1), used(t, pool, c, "tries"))

	for what, change := range map[string]func(*metered.Command){
		"nothing":     func(*metered.Command) {},
		"limits":      func(cmd *metered.Command) { cmd.Charges[0].Limits = []budget.Limit{budget.Lifetime(1)} },
		"no limits":   func(cmd *metered.Command) { cmd.Charges[0].Limits = nil },
		"note":        func(cmd *metered.Command) { cmd.Charges[0].Note = budget.Note{Reason: "because"} },
		"must exist":  func(cmd *metered.Command) { cmd.Charges[0].MustExist = true },
		"isolation":   func(cmd *metered.Command) { cmd.Isolation = pgx.Serializable },
		"position":    func(cmd *metered.Command) { cmd.LSN = true },
		"early":       func(cmd *metered.Command) { cmd.EarlyRelease = true },
		"nanoseconds": func(cmd *metered.Command) { cmd.IssuedAt = issued.Truncate(time.Microsecond) },
		"location":    func(cmd *metered.Command) { cmd.IssuedAt = issued.In(time.FixedZone("x", 3600)) },
		"raw input":   func(cmd *metered.Command) { cmd.Input = json.RawMessage(`"in"`) },
	} {
		cmd := command()
		change(&cmd)
		out, err := metered.Do(ctx, c, cmd, mustNotRun(t))
		require.NoError(t, err, what)
		require.True(t, out.Replayed, what)
	}
}

func TestDo_TenantsKeepIDsApart(t *testing.T) {
	t.Parallel()
	_, c := setUp(t, metered.Config{})
	for i, cmd := range []metered.Command{
		{Tenant: "", ID: "ab"}, {Tenant: "a", ID: "b"}, {Tenant: "ab", ID: "ab"}, {Tenant: "b", ID: "a"}, {Tenant: "a", ID: "B"},
	} {
		name := string(rune('a' + i))
		out, err := metered.Do(t.Context(), c, cmd, upload(name))
		require.NoError(t, err)
		require.False(t, out.Replayed)
		again, err := metered.Do(t.Context(), c, cmd, mustNotRun(t))
		require.NoError(t, err)
		require.Equal(t, name, again.Result.Name)
	}
}

func TestDo_TheRecordIsAnsweredBeforeTheTokenAndTheTokenBeforeTheBudget(t *testing.T) {
	t.Parallel()
	pool, c := setUp(t, metered.Config{EarlyLook: true})
	ctx := t.Context()
	spent := mint(t, pool, c)
	full := []budget.Charge{charge("s", 5, 5)}
	cmd := metered.Command{ID: "first", Token: redeem(spent), Charges: full}
	_, err := metered.Do(ctx, c, cmd, upload("a"))
	require.NoError(t, err)

	out, err := metered.Do(ctx, c, cmd, mustNotRun(t)) // a spent token and a full budget
	require.NoError(t, err)
	require.True(t, out.Replayed)
	cmd.Name = "other"
	_, err = metered.Do(ctx, c, cmd, mustNotRun(t))
	require.ErrorIs(t, err, budget.ErrConflict)

	cmd.ID = "second"
	_, err = metered.Do(ctx, c, cmd, mustNotRun(t))
	require.ErrorIs(t, err, tokens.ErrInvalid)
	require.NotErrorIs(t, err, budget.ErrExceeded)

	fresh := mint(t, pool, c)
	cmd.Token = redeem(fresh)
	_, err = metered.Do(ctx, c, cmd, mustNotRun(t))
	require.ErrorIs(t, err, budget.ErrExceeded)
	require.Zero(t, pgtest.Value[int](t, pool, `select used from metered.tokens where ended_at is null`), "the token is unspent")
}

func TestDo_FailedAndRefusedCommandsLeaveNoRecordAndMayBeTriedAgain(t *testing.T) {
	t.Parallel()
	pool, c := setUp(t, metered.Config{})
	ctx := t.Context()
	cmd := whole(t, pool, c, "op")

	_, err := metered.Do(ctx, c, cmd, func(ctx context.Context, tx *metered.Tx) (uploaded, error) {
		_, err := upload("op")(ctx, tx)
		require.NoError(t, err)
		return uploaded{}, errOwn
	})
	require.ErrorIs(t, err, errOwn)
	require.Equal(t, nothing, footprintOf(t, pool, cmd))

	release := fill(t, pool, c, "op/a", 99)
	looked := cmd
	looked.EarlyLook = true
	_, err = metered.Do(ctx, c, looked, mustNotRun(t))
	require.ErrorIs(t, err, budget.ErrExceeded)
	require.Equal(t, nothing, footprintOf(t, pool, cmd))
	release()

	_, err = metered.Do(ctx, c, cmd, func(ctx context.Context, tx *metered.Tx) (uploaded, error) {
		_, err := upload("op")(ctx, tx)
		require.NoError(t, err)
		return uploaded{}, tx.Charge(charge("op/c", 101, 100)) // refused by the last flush
	})
	require.ErrorIs(t, err, budget.ErrExceeded)
	require.Equal(t, nothing, footprintOf(t, pool, cmd))

	out, err := metered.Do(ctx, c, cmd, wholeFunc("op", nil))
	require.NoError(t, err)
	require.False(t, out.Replayed)
	require.Equal(t, everything, footprintOf(t, pool, cmd))
}

// A charge of the hold was refunded by hand: the command must not commit without the
// refund that it was to make.
func TestDo_FailsWithARefundOfAHoldThatIsRefused(t *testing.T) {
	t.Parallel()
	pool, c := setUp(t, metered.Config{})
	ctx := t.Context()
	_, err := metered.Do(ctx, c, metered.Command{ID: "op1", Input: 1}, pgtest.Placing(holds.Placement{ID: "h1", TTL: time.Minute, Lines: []holds.Line{room("seat", 1, 1)}}))
	require.NoError(t, err)
	require.NoError(t, pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		if _, err := c.Holds.Capture(ctx, tx, holds.Capture{IDs: []string{"h1"}, All: true}); err != nil {
			return err
		}
		_, err := c.Budget.Refund(ctx, tx, budget.Refund{Scope: "seat", Seq: 2, Amount: 1})
		return err
	}))
	refund := func(_ context.Context, tx *metered.Tx) (any, error) {
		return nil, tx.Return(holds.Return{IDs: []string{"h1"}, Lines: []holds.Line{{Scope: "seat", Amount: 1}}})
	}
	_, err = metered.Do(ctx, c, metered.Command{ID: "op2", Input: 1}, refund)
	require.ErrorIs(t, err, holds.ErrExcess)
	require.NoError(t, pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		_, err := metered.DoTx(ctx, c, tx, metered.Command{ID: "op2", Input: 1}, refund)
		require.ErrorIs(t, err, holds.ErrExcess)
		return nil
	}))
}
