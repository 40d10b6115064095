package wallet_test

import (
	"context"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/wallet"
)

func (f *fixture) revoke(r wallet.Revoke) (wallet.Revoked, error) {
	r.Wallet = "ann"
	return do(f, func(ctx context.Context, tx pgx.Tx) (wallet.Revoked, error) { return f.book.Revoke(ctx, tx, r) })
}

func (f *fixture) rollover(r wallet.Rollover) wallet.Granted {
	f.Helper()
	r.Wallet = "ann"
	rolled, err := do(f, func(ctx context.Context, tx pgx.Tx) (wallet.Granted, error) { return f.book.Rollover(ctx, tx, r) })
	require.NoError(f, err)
	return rolled
}

func TestRefund_ToALotThatHasEndedFollowsItsPolicy(t *testing.T) {
	t.Parallel()
	for name, policy := range map[string]time.Duration{"lapses": wallet.Lapse, "new lot": time.Hour, "for ever": wallet.Forever, "default": 0} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := setUp(t, wallet.Config{})
			f.grant(wallet.Grant{Amount: 5, Reference: "a", Ends: wallet.After(time.Hour), LateRefunds: policy})
			f.grant(wallet.Grant{Amount: 5, Reference: "b"})
			d := f.draw(8)
			f.clock.Set(noon.Add(time.Hour))
			f.refund(d.Seq, 4) // the last one first: 3 of b, 1 of a
			switch name {
			case "lapses":
				require.Equal(t, map[string]int64{"b": 5}, f.left())
				kinds, _ := f.kinds(d.Seq + 1)
				require.Equal(t, []string{"refund", "lapse"}, kinds)
				f.refund(d.Seq, 4)
				f.has(5)
				return
			case "new lot":
				require.Equal(t, noon.Add(2*time.Hour), f.balance().Lots[0].Expires)
			case "for ever":
				require.Zero(t, f.balance().Lots[1].Expires)
			case "default":
				require.Equal(t, noon.Add(time.Hour+time.Duration(30*24*time.Hour)), f.balance().Lots[0].Expires)
			}
			require.Equal(t, map[string]int64{"b": 5, "a": 1}, f.left())
			f.refund(d.Seq, 4)
			f.has(10)
			f.draw(10)
		})
	}
}

// Units that come back late go on in a new lot. When all have come back, it pays the overdraft, first that of the draw
// itself.
func TestRefund_OfALotThatHasEndedPaysTheOverdraftOfHolds(t *testing.T) {
	t.Parallel()
	f := setUp(t, wallet.Config{Overdraft: 10, LateRefunds: wallet.Forever})
	f.grant(wallet.Grant{Amount: 1, Ends: wallet.After(time.Hour)})
	d := f.draw(4) // 1 of the lot, 3 overdrawn
	f.grant(wallet.Grant{Amount: 2, Reference: "pays"})
	f.place("overdrawn", 4, 2*time.Hour)
	f.clock.Set(noon.Add(time.Hour))
	require.EqualValues(t, -5, f.balance().Units)
	f.refund(d.Seq, 4) // 1 was owed, 2 come back to the lot that paid, 1 goes on: all 3 are the hold's now
	require.EqualValues(t, -1, f.balance().Units)
	f.grant(wallet.Grant{Amount: 3, Reference: "last"})
	require.Equal(t, map[string]int64{"last": 2}, f.left())
}

func TestRefund_AndADisputeOfTheSameDrawTakeOnce(t *testing.T) {
	t.Parallel()
	f := setUp(t, wallet.Config{})
	f.grant(wallet.Grant{Amount: 10})
	d := f.draw(6)
	give := func(amount int64) error {
		_, err := do(f, func(ctx context.Context, tx pgx.Tx) (budget.Posted, error) {
			return f.ledger.Refund(ctx, tx, budget.Refund{Scope: "ann", Seq: d.Seq, Amount: amount})
		})
		return err
	}
	require.NoError(t, give(4))
	var exceeds *budget.RefundExceedsError
	require.ErrorAs(t, give(6), &exceeds)
	require.EqualValues(t, 2, exceeds.Remaining)
	f.has(8)
	require.NoError(t, give(2))
	f.has(10)
}

func TestRevoke_TakesTheUnitsLeftAndCountsTheMissing(t *testing.T) {
	t.Parallel()
	f := setUp(t, wallet.Config{})
	g := f.grant(wallet.Grant{Amount: 20, Reference: "bounced"})
	f.grant(wallet.Grant{Amount: 5, Reference: "other"})
	f.draw(6)
	f.place("r", 4, day)
	r, err := f.revoke(wallet.Revoke{Lot: g.Lot, Amount: 3})
	require.NoError(t, err)
	require.Equal(t, wallet.Revoked{Lot: g.Lot, Amount: 3, Seq: 5}, r)
	r, err = f.revoke(wallet.Revoke{Reference: "bounced"})
	require.NoError(t, err)
	require.EqualValues(t, []int64{7, 10}, []int64{r.Amount, r.Missing})
	f.release("r")
	r, err = f.revoke(wallet.Revoke{Reference: "bounced"})
	require.NoError(t, err)
	require.EqualValues(t, []int64{4, 6}, []int64{r.Amount, r.Missing})
	r, err = f.revoke(wallet.Revoke{Reference: "bounced", Amount: 9})
	require.NoError(t, err)
	require.EqualValues(t, []int64{0, 9, 0}, []int64{r.Amount, r.Missing, r.Seq})
	f.has(5)
	_, err = f.revoke(wallet.Revoke{Reference: "none"})
	require.ErrorIs(t, err, wallet.ErrUnknownLot)
	require.EqualError(t, err, `wallet: the wallet has no such lot: wallet "ann", reference "none"`)
	_, err = f.revoke(wallet.Revoke{Lot: 99})
	require.EqualError(t, err, `wallet: the wallet has no such lot: wallet "ann", lot 99`)
}

func TestRollover_IsDoneOnceWhoeverEndsTheLot(t *testing.T) {
	t.Parallel()
	for _, by := range []string{"draw", "sweep", "grant", "wallet"} {
		t.Run(by, func(t *testing.T) {
			t.Parallel()
			f := setUp(t, wallet.Config{})
			f.grant(wallet.Grant{Amount: 10, Reference: "month", Ends: wallet.After(30 * day), Roll: &wallet.Roll{Cap: 4, Lasts: wallet.For(10 * day)}})
			f.draw(1)
			f.clock.Set(noon.Add(32 * day))
			f.has(4)
			require.Equal(t, noon.Add(40*day), f.balance().Lots[0].Expires)
			switch by {
			case "draw":
				f.draw(1)
			case "sweep":
				for range 2 {
					_, err := f.book.Sweep(t.Context(), f.pool, wallet.SweepOptions{})
					require.NoError(t, err)
				}
				f.draw(1)
			case "grant":
				f.grant(wallet.Grant{Amount: 1, Ends: wallet.After(day)})
				f.draw(2)
			case "wallet":
				_, err := do(f, func(ctx context.Context, tx pgx.Tx) (wallet.SweepReport, error) {
					return f.book.Expire(ctx, tx, "ann")
				})
				require.NoError(t, err)
				f.draw(1)
			}
			f.has(3)
			require.True(t, f.rollover(wallet.Rollover{Reference: "month", Cap: 9, For: 0}).Replayed)
			f.clock.Set(noon.Add(40 * day))
			f.has(0)
		})
	}
}

func TestRollover_BeforeTheEndByCall(t *testing.T) {
	t.Parallel()
	f := setUp(t, wallet.Config{})
	f.grant(wallet.Grant{Amount: 10, Reference: "a", Ends: wallet.After(day), Roll: &wallet.Roll{Cap: 10, Lasts: wallet.For(day)}})
	r := f.rollover(wallet.Rollover{Reference: "a", Cap: 4, For: 3 * day})
	require.EqualValues(t, 4, r.Amount)
	require.Equal(t, noon.Add(3*day), r.Expires)
	again := f.rollover(wallet.Rollover{Reference: "a", Cap: 9, For: day})
	require.True(t, again.Replayed)
	require.Equal(t, r.Lot, again.Lot)
	f.has(10)
	f.clock.Set(noon.Add(day))
	f.has(4) // units beyond the cap have lapsed, and roll over no more
}

func TestExpire_AnnouncesEachBreakageOnce(t *testing.T) {
	t.Parallel()
	var told []wallet.Breakage
	fail := map[string]bool{"b": true}
	f := setUp(t, wallet.Config{Subscribers: []wallet.Subscriber{func(ctx context.Context, tx pgx.Tx, b wallet.Breakage) error {
		_, err := tx.Exec(ctx, "insert into told values ($1)", b.Reference)
		if fail[b.Reference] {
			return errNotNow
		}
		told = append(told, b)
		return err
	}}})
	_, err := f.pool.Exec(t.Context(), "create table told (reference text)")
	require.NoError(t, err)
	for _, name := range []string{"a", "b", "c", "d", "drawn"} {
		f.grant(wallet.Grant{Wallet: "w" + name, Amount: 10, Reference: name, Ends: wallet.After(time.Hour)})
	}
	_, err = f.tryDraw(toDraw{Wallet: "wdrawn", Amount: 10})
	require.NoError(t, err)
	f.clock.Set(noon.Add(time.Hour))
	// A grant ends this lot, and the sweep announces it.
	f.grant(wallet.Grant{Wallet: "wd", Amount: 1})
	// A wallet in use is left for the next pass.
	busy, err := f.pool.Begin(t.Context())
	require.NoError(t, err)
	defer func() { _ = busy.Rollback(context.Background()) }()
	_, err = f.book.Grant(t.Context(), busy, wallet.Grant{Wallet: "wc", Amount: 1})
	require.NoError(t, err)
	r, err := f.book.Sweep(t.Context(), f.pool, wallet.SweepOptions{Batch: 1})
	require.ErrorIs(t, err, errNotNow)
	require.ErrorContains(t, err, `wallet "wb", lot `)
	require.Equal(t, wallet.SweepReport{Ended: 2, Announced: 2, Failed: 1, Busy: 1, Batches: 5}, r)
	require.NoError(t, busy.Rollback(context.Background()))
	fail = nil
	r, err = f.book.Sweep(t.Context(), f.pool, wallet.SweepOptions{})
	require.NoError(t, err)
	require.Equal(t, wallet.SweepReport{Ended: 1, Announced: 2, Batches: 1}, r)
	var names []string
	for _, b := range told {
		names = append(names, b.Reference)
		require.EqualValues(t, 10, b.Amount)
		require.Equal(t, noon.Add(time.Hour), b.Expires)
	}
	require.ElementsMatch(t, []string{"a", "b", "c", "d"}, names)
	var rows int
	require.NoError(t, f.pool.QueryRow(t.Context(), "select count(*) from told").Scan(&rows))
	require.Equal(t, 4, rows)
	r, err = f.book.Sweep(t.Context(), f.pool, wallet.SweepOptions{})
	require.NoError(t, err)
	require.Equal(t, wallet.SweepReport{Batches: 1}, r)
}

func TestPurge_ForgetsNoDebt(t *testing.T) {
	t.Parallel()
	f := setUp(t, wallet.Config{Overdraft: 50})
	f.grant(wallet.Grant{Amount: 10, Ends: wallet.After(time.Hour)})
	f.clock.Advance(2 * time.Hour)
	_, err := f.book.Sweep(t.Context(), f.pool, wallet.SweepOptions{})
	require.NoError(t, err)
	f.draw(20)
	f.clock.Advance(100 * day)
	_, err = f.ledger.Purge(t.Context(), f.pool, budget.PurgeOptions{OlderThan: 50 * day, Forget: func(string) bool { return true }})
	require.NoError(t, err)
	require.EqualValues(t, -20, f.balance().Units)
}

func TestPurge_ChangesNoBalance(t *testing.T) {
	t.Parallel()
	f := setUp(t, wallet.Config{Priorities: map[string]int{"late": 1}})
	f.grant(wallet.Grant{Amount: 100, Category: "late", Reference: "idle"})
	f.draw(30) // and its move is purged
	f.grant(wallet.Grant{Amount: 1000, Reference: "ever"})
	for i := range 40 {
		f.grant(wallet.Grant{Amount: 10, Ends: wallet.After(time.Hour)})
		f.draw(int64(1 + i%12))
		f.clock.Advance(2 * time.Hour)
	}
	f.place("r", 5, 300*day)
	f.clock.Advance(100 * day)
	_, err := f.book.Sweep(t.Context(), f.pool, wallet.SweepOptions{}) // a lapse that was not announced is kept
	require.NoError(t, err)
	before := f.balance()
	_, err = f.ledger.Purge(t.Context(), f.pool, budget.PurgeOptions{OlderThan: 50 * day})
	require.NoError(t, err)
	after := f.balance()
	after.Now = before.Now
	require.Equal(t, before, after)
	var lots, moves int
	require.NoError(t, f.pool.QueryRow(t.Context(), "select (select count(*) from metered.lots), (select count(*) from metered.lot_moves)").Scan(&lots, &moves))
	require.Less(t, lots, 10)
	require.Less(t, moves, 60)
	f.release("r")
	f.draw(before.Units + 5)
	f.has(0)
	f.verify()
}

// A lapse is announced, though the clock was set back after it, and the lot was made to last for ever then.
func TestExpire_AnnouncesALapseOfALotThatNeverEndsSince(t *testing.T) {
	t.Parallel()
	told := int64(0)
	f := setUp(t, wallet.Config{Subscribers: []wallet.Subscriber{func(_ context.Context, _ pgx.Tx, b wallet.Breakage) error {
		told += b.Amount
		return nil
	}}})
	f.grant(wallet.Grant{Amount: 10, Reference: "hour", Ends: wallet.After(time.Hour)})
	f.grant(wallet.Grant{Amount: 10})
	f.clock.Set(noon.Add(time.Hour))
	f.draw(1)
	f.clock.Set(noon)
	_, err := do(f, func(ctx context.Context, tx pgx.Tx) (wallet.Granted, error) {
		if _, err := f.ledger.RepairClock(ctx, tx, "ann", budget.Note{}); err != nil {
			return wallet.Granted{}, err
		}
		return f.book.SetEnd(ctx, tx, wallet.LotEnd{Wallet: "ann", Reference: "hour"})
	})
	require.NoError(t, err)
	r, err := do(f, func(ctx context.Context, tx pgx.Tx) (wallet.SweepReport, error) { return f.book.Expire(ctx, tx, "ann") })
	require.NoError(t, err)
	require.Equal(t, 1, r.Announced)
	require.EqualValues(t, 10, told)
}

// A hold keeps all units of a lot while another lot ends. Once they are released, the end of the lot takes them all the same.
func TestEnds_OfALotThatAHoldKeptWholeIsNotForgotten(t *testing.T) {
	t.Parallel()
	f := setUp(t, wallet.Config{})
	f.grant(wallet.Grant{Amount: 10, Reference: "kept", Ends: wallet.After(time.Hour)})
	f.place("h", 10, 50*time.Minute)
	f.grant(wallet.Grant{Amount: 5, Ends: wallet.After(10 * time.Minute)})
	f.grant(wallet.Grant{Amount: 100, Reference: "ever"})
	f.clock.Advance(20 * time.Minute)
	f.draw(1)
	f.release("h")
	f.verify()
	f.clock.Advance(time.Hour)
	require.Equal(t, map[string]int64{"ever": 99}, f.left())
	f.has(99)
}
