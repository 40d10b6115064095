package leases_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/internal/pgtest"
)

// held is a lease that a test opens, spends from and settles by the schema's functions, without a Pool.
type held struct{ no, fence, granted int64 }

const owner = "me"

func (f *fixture) open(mode string, units int64, ttl time.Duration) (l held) {
	f.Helper()
	require.NoError(f, f.db.QueryRow(f.Context(), `select no, fence, granted from metered.open_lease(
		row('hot', null, $1::bigint, 0, '{}', null, null, null, null)::metered.new_charge,
		row($2::text, $3::text, 1, 1, $4::interval, null)::metered.lease_terms, '1 min', 5000)`, units, mode, owner, ttl).Scan(&l.no, &l.fence, &l.granted))
	require.Equal(f, units, l.granted)
	return l
}

var errRefused = errors.New("the lease refuses")

// spend spends a range of l.
func (l held) spend(ctx context.Context, db budget.Querier, offset, amount int64) error {
	var refused []byte
	rows, err := db.Query(ctx, `select refused from metered.charge_leased(
		array[row('hot', $1::bigint, $2::bigint, 0, '{}', null, null, $3::bigint, $4::bigint)::metered.new_charge], '1 min', 5000, null, 'answer', true)`,
		l.fence, amount, l.no, offset)
	if err == nil {
		refused, err = pgx.CollectExactlyOneRow(rows, pgx.RowTo[[]byte])
	}
	if err == nil && refused != nil {
		return errRefused
	}
	return err
}

// settle settles l in the name of a caller, and returns the units that it captured.
func (l held) settle(ctx context.Context, db interface {
	QueryRow(context.Context, string, ...any) pgx.Row
}, who string, wait time.Duration) (status string, spent int64, err error) {
	var units *int64
	err = db.QueryRow(ctx, `select status, spent from metered.settle_lease($1, $2, null, $3::int, null, null)`, l.no, who, wait.Milliseconds()).Scan(&status, &units)
	if units != nil {
		spent = *units
	}
	return status, spent, err
}

func (f *fixture) begin(level pgx.TxIsoLevel) pgx.Tx {
	f.Helper()
	tx, err := f.db.BeginTx(f.Context(), pgx.TxOptions{IsoLevel: level})
	require.NoError(f, err)
	f.Cleanup(func() { _ = tx.Rollback(context.Background()) })
	return tx
}

// Spends race with settlements by other connections. Each settlement captures the committed spends, and none that was
// rolled back, to a savepoint or whole. The short form finds a settlement that does not wait for spends.
func TestFence_ASettlementCapturesCommittedSpends(t *testing.T) {
	t.Parallel()
	for _, level := range levels {
		t.Run(string(level), func(t *testing.T) {
			t.Parallel()
			f := setUp(t)
			type lease struct {
				held
				next, committed atomic.Int64
			}
			var current atomic.Pointer[lease]
			fresh := func() { current.Store(&lease{held: f.open("rows", 1_000_000, time.Minute)}) }
			fresh()
			var spends, refused atomic.Int64
			var all, settler sync.WaitGroup
			done := make(chan struct{})
			ended := []*lease{}
			settler.Go(func() {
				for {
					select {
					case <-done:
						return
					case <-time.After(3 * time.Millisecond):
					}
					old := current.Load()
					status, _, err := old.settle(context.Background(), f.db, owner, 10*time.Second)
					if err != nil || status != "settled" {
						t.Errorf("%s, %v", status, err)
						return
					}
					ended = append(ended, old)
					fresh()
				}
			})
			for g := range 6 {
				all.Go(func() {
					for i := range pgtest.Size(100, 250) {
						l := current.Load()
						amount := int64(1 + (g+i)%4)
						err := f.commit(level, l.held, l.next.Add(amount)-amount, amount, (g*7+i)%5)
						switch {
						case err == nil:
							l.committed.Add(amount)
							spends.Add(1)
						case errors.Is(err, errRefused) || collided(err):
							refused.Add(1)
						case !errors.Is(err, errUndone):
							t.Error(err)
						}
					}
				})
			}
			all.Wait()
			close(done)
			settler.Wait()
			last := current.Load()
			_, _, err := last.settle(t.Context(), f.db, owner, time.Second)
			require.NoError(t, err)
			sum := int64(0)
			for _, l := range append(ended, last) {
				sum += l.committed.Load()
				require.Equal(t, l.committed.Load(), pgtest.Value[int64](t, f.db, `select spent from metered.leases where no = $1`, l.no))
			}
			t.Logf("%d spends of %d leases, %d refused", spends.Load(), len(ended)+1, refused.Load())
			require.Positive(t, refused.Load(), "the race must happen")
			require.Equal(t, sum, f.settled("hot"))
		})
	}
}

var errUndone = errors.New("undone")

// commit spends in a transaction of its own. The ways: 0 spends, 1 spends after a savepoint, 2 rolls back to the
// savepoint and spends the range again, 3 rolls back to the savepoint and then fails, 4 spends and then fails.
func (f *fixture) commit(level pgx.TxIsoLevel, l held, offset, amount int64, way int) error {
	ctx := context.Background()
	return pgx.BeginTxFunc(ctx, f.db, pgx.TxOptions{IsoLevel: level}, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, `select 1`); err != nil { // the snapshot
			return err
		}
		if way == 0 {
			return l.spend(ctx, tx, offset, amount)
		}
		if way == 4 {
			return errors.Join(l.spend(ctx, tx, offset, amount), errUndone)
		}
		sub, err := tx.Begin(ctx)
		if err != nil {
			return err
		}
		if err := l.spend(ctx, sub, offset, amount); err != nil {
			return err
		}
		if way == 1 {
			return sub.Commit(ctx)
		}
		if err := sub.Rollback(ctx); err != nil {
			return err
		}
		if way == 2 {
			return l.spend(ctx, tx, offset, amount) // a range that was rolled back may be spent
		}
		if _, err := tx.Exec(ctx, `select 2`); err != nil {
			return err
		}
		return errUndone
	})
}

// A spend that has not committed makes the settler wait. While the settler waits, new spends are sent elsewhere at once.
func TestFence_OpenSpendsAreWaitedForAndNewOnesRefused(t *testing.T) {
	t.Parallel()
	for _, level := range levels {
		f := setUp(t)
		l := f.open("rows", 100, time.Minute)
		tx := f.begin(level)
		require.NoError(t, l.spend(t.Context(), tx, 0, 7))
		_, _, err := l.settle(t.Context(), f.db, owner, 30*time.Millisecond)
		require.Equal(t, "55P03", state(err), "the wait is bounded")

		settled := pgtest.Going(func() error {
			status, spent, err := l.settle(context.Background(), f.db, owner, time.Minute)
			if err == nil && (status != "settled" || spent != 12) {
				err = fmt.Errorf("%s: %d", status, spent)
			}
			return err
		})
		pgtest.WaitQueued(t, f.db, 1)
		ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second) // the settler waits for longer
		defer cancel()
		require.ErrorIs(t, l.spend(ctx, f.db, 20, 1), errRefused)
		require.NoError(t, l.spend(ctx, tx, 7, 5), "a transaction that has begun to spend goes on")
		require.NoError(t, tx.Commit(t.Context()))
		require.NoError(t, <-settled)
		require.ErrorIs(t, l.spend(ctx, f.db, 40, 1), errRefused)
		require.Equal(t, int64(12), f.settled("hot"))
	}
}

// A snapshot from before the settlement shows the lease open. No spend is lost by it.
func TestFence_AnOldSnapshotDoesNotSpendFromASettledLease(t *testing.T) {
	t.Parallel()
	for _, level := range levels {
		f := setUp(t)
		l := f.open("rows", 100, time.Minute)
		require.NoError(t, l.spend(t.Context(), f.db, 0, 3))
		tx := f.begin(level)
		require.Equal(t, 1, pgtest.Value[int](t, tx, `select count(*)::int from metered.leases where settled_at is null`))
		_, spent, err := l.settle(t.Context(), f.db, owner, time.Second)
		require.NoError(t, err)
		require.Equal(t, int64(3), spent)
		err = l.spend(t.Context(), tx, 3, 3)
		if level == pgx.ReadCommitted {
			require.ErrorIs(t, err, errRefused)
		} else {
			require.Equal(t, "40001", state(err), "%v at %s", err, level)
		}
		_ = tx.Commit(t.Context())
		require.Equal(t, int64(3), f.settled("hot"))
	}
}

// A snapshot from before the opening does not show the lease. That is no reason to give it back.
func TestFence_ASnapshotFromBeforeTheOpeningIsRetried(t *testing.T) {
	t.Parallel()
	f := setUp(t)
	for _, level := range levels[1:] {
		tx := f.begin(level)
		_, err := tx.Exec(t.Context(), `select 1`)
		require.NoError(t, err)
		l := f.open("rows", 100, time.Minute)
		require.Equal(t, "40001", state(l.spend(t.Context(), tx, 0, 3)))
	}
}

func state(err error) string {
	var with interface{ SQLState() string }
	if errors.As(err, &with) {
		return with.SQLState()
	}
	return ""
}

// Units of open leases are not available: a charge up to so much takes the rest.
func TestChargeUpTo_LeavesTheUnitsOfLeases(t *testing.T) {
	t.Parallel()
	f := setUp(t)
	f.open("rows", 7, time.Minute)
	var r budget.Receipt
	up := func() error {
		return pgx.BeginFunc(t.Context(), f.db, func(tx pgx.Tx) (err error) {
			upTo := charge(50, budget.Lifetime(20))
			upTo.UpTo = true
			r, err = f.ledger.Charge(t.Context(), tx, upTo)
			return err
		})
	}
	require.NoError(t, up())
	require.EqualValues(t, 13, r.Entries[0].Amount)
	require.ErrorIs(t, up(), budget.ErrExceeded)
}
