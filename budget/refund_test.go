package budget_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/internal/sqlstate"
)

func TestRefund_LeavesTheWindowTogetherWithItsCharge(t *testing.T) {
	t.Parallel()
	pool, l, clock := open(t)
	first := mustCharge(t, pool, l, "a", 10)
	clock.Advance(30 * time.Minute)
	mustCharge(t, pool, l, "a", 5)
	clock.Advance(29 * time.Minute)
	require.NoError(t, refund(t.Context(), pool, l, "a", first.Seq, 4))
	require.Equal(t, int64(11), usage(t, pool, l, "a", time.Hour).Used)
	clock.Advance(time.Minute)
	require.Equal(t, int64(5), usage(t, pool, l, "a", time.Hour).Used, "a refund of a charge that has left the window hides nothing")
	require.Equal(t, int64(11), usage(t, pool, l, "a", 0).Used)
}

func TestRefund_NeverSumsPastTheCharge(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	pool, l, _ := open(t)
	mustCharge(t, pool, l, "a", 10)
	mustCredit(t, pool, l, "a", 10)
	require.NoError(t, refund(ctx, pool, l, "a", 1, 4))
	tx := begin(t, pool, pgx.ReadCommitted)
	for _, refused := range []struct {
		seq, amount int64
		err         error
		text        string
	}{
		{1, 7, budget.ErrRefundExceeds, "budget: the refund exceeds the rest of the charge: requested 7, left 6"},
		{2, 1, budget.ErrNotCharge, `budget: the entry is not a charge: scope "a", entry 2`},
		{3, 1, budget.ErrNotCharge, `budget: the entry is not a charge: scope "a", entry 3`},
		{4, 1, budget.ErrUnknownEntry, `budget: no such entry: scope "a", entry 4`},
	} {
		_, err := l.Refund(ctx, tx, budget.Refund{Scope: "a", Seq: refused.seq, Amount: refused.amount})
		require.ErrorIs(t, err, refused.err)
		require.EqualError(t, err, refused.text)
	}
	_, err := l.Refund(ctx, tx, budget.Refund{Scope: "a", Seq: 1})
	require.EqualError(t, err, "budget: invalid argument: Refund.Amount: is 0: say how many units, or All")
	_, err = l.Refund(ctx, tx, budget.Refund{Scope: "a", Seq: 1, Amount: 6})
	require.NoError(t, err, "a refusal leaves the transaction usable")
	require.NoError(t, tx.Commit(ctx))
	err = refund(ctx, pool, l, "a", 1, 1)
	var exceeds *budget.RefundExceedsError
	require.ErrorAs(t, err, &exceeds)
	require.Equal(t, budget.RefundExceedsError{Requested: 1}, *exceeds)
	_, err = l.Refund(ctx, begin(t, pool, pgx.ReadCommitted), budget.Refund{Scope: "a", Seq: 1, All: true})
	require.EqualError(t, err, "budget: the refund exceeds the rest of the charge: nothing is left of it")
	require.Zero(t, usage(t, pool, l, "a", time.Hour).Used)
	requireVerified(t, pool, l)
}

// Entry 1 outlives a purge, but its refunds do not. It has the time of the baseline here, so that no window shows the
// purge. All asks for the rest of the charge. It is found under the lock: after refunds in parts, once, and not of a
// charge that is refunded in full.
func TestRefund_OfAllIsOfTheRest(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	pool, l, _ := open(t)
	mustCharge(t, pool, l, "a", 10)
	mustCharge(t, pool, l, "a", 7)
	require.NoError(t, refund(ctx, pool, l, "a", 1, 4))
	var amounts []int64
	var exceeds *budget.RefundExceedsError
	for range 2 {
		tx := begin(t, pool, pgx.ReadCommitted)
		for _, seq := range []int64{1, 2} {
			p, err := l.Refund(ctx, tx, budget.Refund{Scope: "a", Seq: seq, All: true})
			if err != nil {
				require.ErrorAs(t, err, &exceeds)
				require.Zero(t, *exceeds)
			}
			amounts = append(amounts, p.Amount)
		}
		_, err := l.Refund(ctx, tx, budget.Refund{Scope: "a", Seq: 4, All: true})
		require.ErrorIs(t, err, budget.ErrNotCharge)
		require.NoError(t, tx.Commit(ctx))
	}
	require.Equal(t, []int64{6, 7, 0, 0}, amounts)
	u := usage(t, pool, l, "a", time.Hour)
	require.Zero(t, u.Used)
	require.EqualValues(t, 17, u.Refunded)
	var argument *budget.ArgumentError
	_, err := l.Refund(ctx, begin(t, pool, pgx.ReadCommitted), budget.Refund{Scope: "a", Seq: 1, All: true, Amount: 1})
	require.ErrorAs(t, err, &argument)
	require.Equal(t, "Refund.Amount", argument.Field)
	report, err := l.Verify(ctx, pool, budget.VerifyOptions{})
	require.NoError(t, err)
	require.Empty(t, report.Differences)
}

func TestRefund_OfAPurgedChargeIsRefused(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	pool, l, clock := open(t)
	chargeMany(t, pool, l, "a", 40)
	for _, seq := range []int64{1, 2, 32, 33} {
		require.NoError(t, refund(ctx, pool, l, "a", seq, 1))
	}
	clock.Advance(time.Hour)
	require.Equal(t, int64(31), purge(t, pool, l, time.Minute).Entries)
	for seq, want := range map[int64]error{
		1: budget.ErrEntryPurged, 2: budget.ErrEntryPurged, 32: budget.ErrEntryPurged,
		33: budget.ErrRefundExceeds, 45: budget.ErrUnknownEntry,
	} {
		require.ErrorIs(t, refund(ctx, pool, l, "a", seq, 1), want, seq)
	}
	var sums int
	require.NoError(t, pool.QueryRow(ctx, `select count(*) from metered.refund_sum where block << (4 * level) < 32`).Scan(&sums))
	require.Zero(t, sums, "the sums of purged entries are gone too")
	require.NoError(t, refund(ctx, pool, l, "a", 40, 1))
	require.Equal(t, int64(35), usage(t, pool, l, "a", 0).Used)
	requireVerified(t, pool, l)
}

func TestRefund_RacingRefundsNeverSumPastTheCharge(t *testing.T) {
	t.Parallel()
	pgtest.OnEachVersion(t)
	ctx := t.Context()
	for _, locks := range []bool{true, false} {
		pool, l, _ := open(t)
		if !locks {
			withoutLocks(t, pool)
		}
		posted := mustCharge(t, pool, l, "a", 10)
		retry := &retrier{pool: pool}
		require.NoError(t, pgtest.InParallel(8, func(worker int) error {
			for n := range 6 {
				err := retry.run(ctx, isolations[(worker+n)%3], func(tx pgx.Tx) error {
					_, err := l.Refund(ctx, tx, budget.Refund{Scope: "a", Seq: posted.Seq, Amount: 1})
					return err
				})
				if err != nil && !isA[*budget.RefundExceedsError](err) {
					return err
				}
			}
			return nil
		}))
		require.Equal(t, int64(10), usage(t, pool, l, "a", 0).Refunded)
		requireVerified(t, pool, l)
	}
}

// The cost of counting refunds is the number of rows summed: at most 15 of each
// level, of which a scope of 10,000 entries has 4, however many refunds there are.
func TestRefund_CostDoesNotGrowWithTheirNumber(t *testing.T) {
	t.Parallel()
	const every = 97
	n := pgtest.Size(1000, 5000)
	ctx := t.Context()
	pool, l, clock := open(t)
	conn, err := pool.Acquire(ctx)
	require.NoError(t, err)
	defer conn.Release()
	for chunk := range n / 500 {
		batch := &pgx.Batch{}
		for i := range 500 {
			call, err := prepareCharges(l, budget.Charge{Scope: "a", Amount: 3})
			require.NoError(t, err)
			batch.Queue(chargeSQL, chargeArgs(call)...)
			batch.Queue(`select setval('pgtest.clock', $1)`, start.UnixMicro()+int64(chunk*500+i+1))
		}
		require.NoError(t, conn.SendBatch(ctx, batch).Close())
	}
	for chunk := range n / 500 {
		batch := &pgx.Batch{}
		for i := range 500 {
			batch.Queue(`select metered.refund('a', null, $1, 1, 1000, null, false)`, chunk*500+i+1)
		}
		require.NoError(t, conn.SendBatch(ctx, batch).Close())
	}
	clock.Set(start.Add(time.Duration(n) * time.Microsecond))

	// Every charge has the same age as its number from the end, each counts for 2.
	var most int64
	for left := int64(1); left < int64(n); left += every {
		window := time.Duration(left) * time.Microsecond
		before := tuplesFetched(t, conn, "refund_sum")
		u, err := l.Usage(ctx, conn, budget.Query{Scope: "a", Window: window})
		require.NoError(t, err)
		require.Equal(t, 2*(left-1), u[0].Used, window)
		most = max(most, tuplesFetched(t, conn, "refund_sum")-before)
	}
	require.Positive(t, most)
	require.LessOrEqual(t, most, int64(4*15))

	var perRefund, levels int64
	require.NoError(t, conn.QueryRow(ctx, `select count(*), count(distinct level) from metered.refund_sum where block = $1 >> (4 * level)`,
		n).Scan(&perRefund, &levels))
	require.Equal(t, levels, perRefund)
	require.LessOrEqual(t, perRefund, int64(16))
	requireVerified(t, pool, l)
}

// Refunds are summed in blocks of 16 charges, of 256, and so on: one of a charge at the edge
// of a block is counted once, wherever the window begins.
func TestRefund_CountsOnceAtTheEdgesOfBlocks(t *testing.T) {
	t.Parallel()
	pool, l, clock := open(t)
	for _, seq := range []int64{1, 2, 15, 16, 17, 31, 32, 33, 255, 256, 257, 271, 272, 273} {
		scope := fmt.Sprint(seq)
		chargeMany(t, pool, l, scope, int(seq)-1)
		clock.Advance(time.Minute)
		require.Equal(t, seq, mustCharge(t, pool, l, scope, 3).Seq)
		require.NoError(t, refund(t.Context(), pool, l, scope, seq, 2))
		require.Equal(t, int64(1), usage(t, pool, l, scope, time.Minute).Used, scope)
		posted := mustCharge(t, pool, l, scope, 1, budget.Limit{Max: 2, Window: time.Minute}, budget.Limit{Max: 1 + seq, Window: time.Hour})
		require.Equal(t, []int64{2, 1 + seq}, []int64{posted.Standings[0].Used, posted.Standings[1].Used}, scope)
	}
	requireVerified(t, pool, l)
}

// A refusal that rests on an old view of the scope is none: the transaction runs again.
func TestRefund_OfAChargeThatTheSnapshotDoesNotSeeIsRetryable(t *testing.T) {
	t.Parallel()
	for _, level := range []pgx.TxIsoLevel{pgx.RepeatableRead, pgx.Serializable} {
		t.Run(string(level), func(t *testing.T) {
			t.Parallel()
			ctx := t.Context()
			pool, l, _ := open(t)
			first := mustCharge(t, pool, l, "a", 5).Seq
			for name, refund := range map[string]budget.Refund{
				"not there": {Scope: "a", Seq: first + 1, Amount: 1}, "too much": {Scope: "a", Seq: first, Amount: 6}, "of a later one": {Scope: "a", Seq: 99, Amount: 1},
			} {
				tx := begin(t, pool, level)
				_, err := l.Usage(ctx, tx, budget.Query{Scope: "a"}) // the snapshot
				require.NoError(t, err)
				mustCharge(t, pool, l, "a", 5)
				_, err = l.Refund(ctx, tx, refund)
				require.Equal(t, sqlstate.SerializationFailure, sqlstate.Of(err), "%s: %v", name, err)
				require.NoError(t, tx.Rollback(ctx))
			}
			tx := begin(t, pool, level)
			_, err := l.Refund(ctx, tx, budget.Refund{Scope: "a", Seq: first, Amount: 6})
			require.ErrorIs(t, err, budget.ErrRefundExceeds)
			before := usage(t, tx, l, "a", 0)
			_, err = l.Refund(ctx, tx, budget.Refund{Scope: "a", Seq: first, Amount: 5}) // tx is usable
			require.NoError(t, err)
			require.NoError(t, tx.Commit(ctx))
			after := usage(t, pool, l, "a", 0)
			require.Equal(t, []int64{4, 0, 5, 5}, []int64{before.Seq, before.Refunded, after.Seq, after.Refunded}, "a refused refund leaves no entry")
			requireVerified(t, pool, l)
		})
	}
}
