package budget_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/internal/pgtest"
)

// makeBusy lets a charge of a scope without limits wait for another one: from then on they are
// tallies. The scope has two entries of one unit then.
func makeBusy(t testing.TB, pool *pgxpool.Pool, l *budget.Ledger, scope string) {
	t.Helper()
	mustCharge(t, pool, l, scope, 1)
	tx := begin(t, pool, pgx.ReadCommitted)
	require.NoError(t, l.Lock(t.Context(), tx, scope))
	waits := make(chan error, 1)
	go func() {
		_, err := charge(t.Context(), pool, l, scope, 1)
		waits <- err
	}()
	pgtest.WaitAdvisory(t, pool, 1)
	require.NoError(t, tx.Commit(t.Context()))
	require.NoError(t, <-waits)
}

func TestTally_SumsOfABusyScopeWaitForNobodyAndCountAtOnce(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	pool, l, clock := open(t)
	makeBusy(t, pool, l, "channel")
	require.Equal(t, 2, pgtest.Count(t, pool, "metered.ledger"))

	// Each of three has charged while none has committed, and so has a call of two scopes.
	var txs []pgx.Tx
	var posted []budget.Posted
	for i := range 3 {
		clock.Advance(time.Minute)
		tx := begin(t, pool, pgx.ReadCommitted)
		receipt, err := l.Charge(ctx, tx, budget.Charge{Scope: "channel", Amount: int64(10 + i), Note: budget.Note{Actor: fmt.Sprint(i)}},
			budget.Charge{Scope: fmt.Sprint("user", i), Amount: 1, Limits: []budget.Limit{budget.Lifetime(5)}})
		require.NoError(t, err)
		require.Negative(t, receipt.Entries[0].Seq)
		require.Equal(t, int64(1), receipt.Entries[1].Seq)
		require.Equal(t, int64(4), receipt.Entries[1].Standings[0].Available)
		require.WithinDuration(t, clock.Now(), receipt.Entries[0].At, time.Millisecond)
		txs, posted = append(txs, tx), append(posted, receipt.Entries[0])
	}
	require.Equal(t, int64(2), usage(t, pool, l, "channel", 0).Used)
	require.NoError(t, txs[2].Commit(ctx))
	require.Equal(t, int64(14), usage(t, pool, l, "channel", 0).Used)
	require.NoError(t, txs[0].Commit(ctx))
	require.NoError(t, txs[1].Rollback(ctx))
	require.Equal(t, int64(24), usage(t, pool, l, "channel", 0).Spent)
	require.Equal(t, int64(12), usage(t, pool, l, "channel", 90*time.Second).Used)
	requireVerified(t, pool, l)

	series := func() (units []int64) {
		for at := start; !at.After(clock.Now()); at = at.Add(time.Minute) {
			r, err := l.UsageBetween(ctx, pool, "channel", at, at.Add(time.Minute))
			require.NoError(t, err)
			units = append(units, r.Charged)
		}
		return units
	}
	before := series()
	require.Equal(t, []int64{2, 10, 0, 12}, before)

	// A limit counts them, and the refusal leaves them as they are.
	look, err := l.Check(ctx, pool, budget.Charge{Scope: "channel", Amount: 1, Limits: []budget.Limit{budget.Lifetime(24)}})
	require.ErrorIs(t, err, budget.ErrExceeded)
	require.Empty(t, look)
	_, err = charge(ctx, pool, l, "channel", 1, budget.Lifetime(24))
	require.ErrorIs(t, err, budget.ErrExceeded)
	limited := mustCharge(t, pool, l, "channel", 1, budget.Lifetime(25))
	require.Equal(t, int64(5), limited.Seq)
	require.Zero(t, pgtest.Count(t, pool, "metered.tallies"))
	var notes []string
	for e, err := range l.Entries(ctx, pool, "channel", budget.EntriesOptions{}) {
		require.NoError(t, err)
		notes = append(notes, fmt.Sprint(e.Seq, " ", e.Amount, e.Note.Actor))
	}
	require.Equal(t, []string{"1 1", "2 1", "3 100", "4 122", "5 1"}, notes)
	before[3]++
	require.Equal(t, before, series())

	// The receipt of a tally names its charge for good.
	require.NoError(t, refund(ctx, pool, l, "channel", posted[2].Seq, 5))
	require.NoError(t, refund(ctx, pool, l, "channel", posted[0].Seq, 10))
	require.ErrorIs(t, refund(ctx, pool, l, "channel", posted[0].Seq, 1), budget.ErrRefundExceeds)
	require.Error(t, refund(ctx, pool, l, "channel", posted[1].Seq, 1))
	require.Equal(t, int64(10), usage(t, pool, l, "channel", 0).Used)
	requireVerified(t, pool, l)
}

func TestTally_FinalSumsAreExactAtEachIsolationLevel(t *testing.T) {
	t.Parallel()
	workers, each, most := pgtest.Sizes(4, 6, 6), pgtest.Sizes(20, 25, 25), pgtest.Sizes[int64](20, 60, 60)
	for _, iso := range []pgx.TxIsoLevel{pgx.ReadCommitted, pgx.RepeatableRead, pgx.Serializable} {
		t.Run(string(iso), func(t *testing.T) {
			t.Parallel()
			ctx := t.Context()
			pool, l, _ := open(t)
			makeBusy(t, pool, l, "channel")
			var sums, limited, refused atomic.Int64
			var wg sync.WaitGroup
			for w := range workers {
				random := rand.New(rand.NewPCG(1, uint64(w)))
				wg.Go(func() {
					for n := range each {
						c, counter := budget.Charge{Scope: "channel", Amount: 1}, &sums
						if (n+w)%3 == 0 {
							c.Limits, counter = []budget.Limit{budget.Lifetime(most), {Max: most, Window: time.Hour}}, &limited
							c.Note.Actor = "limited"
						}
						drop := random.IntN(5) == 0
						errDropped := errors.New("dropped")
						err := retried(ctx, pool, iso, func(tx pgx.Tx) error {
							if _, err := l.Charge(ctx, tx, c, budget.Charge{Scope: fmt.Sprint("user", w), Amount: 1}); err != nil {
								return err
							}
							if drop {
								return errDropped
							}
							return nil
						})
						switch {
						case err == nil:
							counter.Add(1)
						case errors.Is(err, budget.ErrExceeded):
							refused.Add(1)
						case !errors.Is(err, errDropped):
							t.Error(err)
						}
						if used := usage(t, pool, l, "channel", 0).Used; used < 2 {
							t.Errorf("used %d", used)
						}
					}
				})
			}
			wg.Wait()
			want := 2 + sums.Load() + limited.Load()
			require.Equal(t, want, usage(t, pool, l, "channel", 0).Used)
			requireVerified(t, pool, l)
			require.Positive(t, refused.Load())
			mustCharge(t, pool, l, "channel", 1, budget.Lifetime(1<<40))
			require.Zero(t, pgtest.Count(t, pool, "metered.tallies where scope = 'channel'"))
			require.Equal(t, want+1, pgtest.Value[int64](t, pool, `select sum(amount)::bigint from metered.ledger where scope = 'channel'`))
			require.Zero(t, pgtest.Count(t, pool, fmt.Sprintf(`metered.ledger where note ->> 'actor' = 'limited' and spent > %d`, most)))
			if iso == pgx.ReadCommitted {
				require.NotZero(t, pgtest.Count(t, pool, `metered.ledger where ref is not null`))
			}
			requireVerified(t, pool, l)
		})
	}
}

// retried runs f in a transaction until it does not collide with another one.
func retried(ctx context.Context, pool *pgxpool.Pool, iso pgx.TxIsoLevel, f func(pgx.Tx) error) error {
	for {
		err := pgx.BeginTxFunc(ctx, pool, pgx.TxOptions{IsoLevel: iso}, f)
		if code(err) != "40001" && code(err) != "40P01" {
			return err
		}
	}
}

// tally charges a busy scope in a transaction that stays open.
func tally(t testing.TB, pool *pgxpool.Pool, l *budget.Ledger, scope string, amount int64) pgx.Tx {
	t.Helper()
	tx := begin(t, pool, pgx.ReadCommitted)
	receipt, err := l.Charge(t.Context(), tx, budget.Charge{Scope: scope, Amount: amount}, budget.Charge{Scope: scope + "/other", Amount: 1})
	require.NoError(t, err)
	require.Negative(t, receipt.Entries[0].Seq)
	return tx
}

func TestTally_AWriterThatIsKilledLeavesThemAndAnOldSnapshotCollides(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	pool, l, _ := open(t)
	makeBusy(t, pool, l, "channel")
	require.NoError(t, tally(t, pool, l, "channel", 10).Commit(ctx))

	folds, old := begin(t, pool, pgx.ReadCommitted), begin(t, pool, pgx.RepeatableRead)
	require.Equal(t, int64(12), pgtest.Value[int64](t, old, `select sum(amount)::bigint from (
		select amount from metered.ledger where scope = 'channel' union all select amount from metered.tallies) x`))
	limit := budget.Lifetime(13)
	_, err := l.Charge(ctx, folds, budget.Charge{Scope: "channel", Amount: 1, Limits: []budget.Limit{limit}})
	require.NoError(t, err)
	require.Zero(t, pgtest.Value[int](t, folds, `select count(*)::int from metered.tallies where scope = 'channel'`))
	execute(t, pool, `select pg_terminate_backend($1)`, folds.Conn().PgConn().PID())
	require.Error(t, folds.Commit(ctx))
	require.Equal(t, int64(12), usage(t, pool, l, "channel", 0).Used)
	require.Equal(t, 1, pgtest.Count(t, pool, "metered.tallies where scope = 'channel'"))

	// Others fold, while the old snapshot still sees the row.
	mustCharge(t, pool, l, "channel", 1, limit)
	_, err = l.Charge(ctx, old, budget.Charge{Scope: "channel", Amount: 1, Limits: []budget.Limit{{Max: 100, Window: time.Hour}}})
	require.Equal(t, "40001", code(err))
	require.Equal(t, int64(13), usage(t, pool, l, "channel", 0).Used)
	requireVerified(t, pool, l)
}

func TestTally_NoScopeIsForgottenWhileOneIsOpen(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	pool, l, clock := open(t)
	makeBusy(t, pool, l, "channel")
	tx := tally(t, pool, l, "channel", 10)
	clock.Advance(time.Hour)
	forget := func() int {
		report, err := l.Purge(ctx, pool, budget.PurgeOptions{OlderThan: time.Minute, Forget: func(scope string) bool { return scope == "channel" }})
		require.NoError(t, err)
		return report.Forgotten
	}
	require.Zero(t, forget())
	require.NoError(t, tx.Commit(ctx))
	require.Equal(t, int64(12), usage(t, pool, l, "channel", 0).Used)
	require.Equal(t, 1, forget())
	require.Zero(t, pgtest.Count(t, pool, "metered.tallies where scope = 'channel'"))
	require.Zero(t, usage(t, pool, l, "channel", 0).Used)
	require.Equal(t, int64(1), mustCharge(t, pool, l, "channel", 1).Seq)
	requireVerified(t, pool, l)
}

func TestTally_ABatchFoldsThem(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	pool, l, _ := open(t)
	makeBusy(t, pool, l, "channel")
	require.NoError(t, tally(t, pool, l, "channel", 10).Commit(ctx))
	limited := []budget.Limit{budget.Lifetime(15)}
	tx := begin(t, pool, pgx.ReadCommitted)
	results, err := l.ChargeEach(ctx, tx, budget.Charge{Scope: "channel", Amount: 2, Limits: limited},
		budget.Charge{Scope: "channel", Amount: 1}, budget.Charge{Scope: "channel", Amount: 1, Limits: limited})
	require.NoError(t, err)
	require.NoError(t, tx.Commit(ctx))
	require.NoError(t, results[0].Err)
	require.NoError(t, results[1].Err)
	require.ErrorIs(t, results[2].Err, budget.ErrExceeded)
	require.Equal(t, int64(15), usage(t, pool, l, "channel", 0).Used)
	require.Equal(t, 5, pgtest.Count(t, pool, "metered.ledger where scope = 'channel'"))
	requireVerified(t, pool, l)
}

func TestTally_ACallThatIsRefusedTakesItsOwnBack(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	pool, l, _ := open(t)
	makeBusy(t, pool, l, "channel")
	for range 64 { // one in 32 folds
		tx := begin(t, pool, pgx.ReadCommitted)
		_, err := l.Charge(ctx, tx, budget.Charge{Scope: "channel", Amount: 1}, budget.Charge{Scope: "user", Amount: 2, Limits: []budget.Limit{budget.Lifetime(1)}})
		require.ErrorIs(t, err, budget.ErrExceeded)
		require.NoError(t, tx.Commit(ctx))
	}
	require.Equal(t, int64(2), usage(t, pool, l, "channel", 0).Used)
	require.Zero(t, pgtest.Count(t, pool, "metered.tallies"))
}

func TestTally_UnderTheLockNothingOfThePastIsMissing(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	pool, l, clock := open(t)
	makeBusy(t, pool, l, "channel")
	tx := tally(t, pool, l, "channel", 10)
	billed := make(chan budget.RangeUsage)
	lock := begin(t, pool, pgx.ReadCommitted)
	go func() {
		err := l.Lock(ctx, lock, "channel")
		u, also := l.UsageBetween(ctx, lock, "channel", start, clock.Now().Add(time.Second))
		if err = errors.Join(err, also); err != nil {
			t.Error(err)
		}
		billed <- u
	}()
	pgtest.WaitAdvisory(t, pool, 1)
	require.NoError(t, tx.Commit(ctx))
	require.Equal(t, int64(12), (<-billed).Charged)
	require.NoError(t, lock.Commit(ctx))
}

// A total that is charged from SQL waits for nobody either, and is given back by its number.
func TestTally_OfAChargeFromSQL(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	pool, l, _ := open(t)
	makeBusy(t, pool, l, "channel")
	other := begin(t, pool, pgx.ReadCommitted)
	_, err := l.Charge(ctx, other, budget.Charge{Scope: "channel", Amount: 1, Limits: []budget.Limit{budget.Lifetime(100)}}) // it has the lock of the chain
	require.NoError(t, err)
	var seq int64
	require.NoError(t, pool.QueryRow(ctx, `select (metered.v1_charge('channel', 10) ->> 'seq')::bigint`).Scan(&seq))
	require.Negative(t, seq)
	require.NoError(t, other.Commit(ctx))
	require.Equal(t, int64(13), usage(t, pool, l, "channel", 0).Used)
	require.Equal(t, "4", pgtest.Value[string](t, pool, `select metered.v1_refund('channel', $1, 6) ->> 'remaining'`, seq))
	require.Equal(t, int64(7), usage(t, pool, l, "channel", 0).Used)
	pgtest.RequireVerified(t, pool, l)
}
