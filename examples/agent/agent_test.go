package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/leases"
	"github.com/pgmetered/metered/wallet"
)

// crashing is set in a process of this binary that is there to be killed: to a connection string.
const crashing = "AGENT_TEST_CRASHING"

func TestMain(m *testing.M) {
	if url := os.Getenv(crashing); url != "" {
		fmt.Fprintln(os.Stderr, untilKilled(url))
		os.Exit(1)
	}
	os.Exit(m.Run())
}

func openOffice(t *testing.T, at time.Time) (*office, *pgtest.Clock) {
	t.Helper()
	pool := pgtest.Open(t)
	_, err := pool.Exec(t.Context(), callsSQL)
	require.NoError(t, err)
	o, err := newOffice(pool)
	require.NoError(t, err)
	return o, pgtest.SetClock(t, pool, at)
}

var may = time.Date(2026, 5, 4, 12, 0, 0, 0, time.UTC)

// stands checks the user's spent and free units, the calls on record, and all sums of the ledger.
func (o *office) stands(t *testing.T, used, left, calls int64) {
	t.Helper()
	gotUsed, gotLeft, err := o.left(t.Context(), "ann")
	require.NoError(t, err)
	var made int64
	require.NoError(t, o.db.QueryRow(t.Context(), `select coalesce(sum(units), 0)::bigint from calls`).Scan(&made))
	require.Equal(t, []int64{used, left, calls}, []int64{gotUsed, gotLeft, made}, "used, left, units of calls")
	report, err := o.client.Budget.Verify(t.Context(), o.db, budget.VerifyOptions{})
	require.NoError(t, err)
	require.Empty(t, report.Differences)
}

func TestWork_AgentsSpendAtOnceAndUnusedUnitsGoBack(t *testing.T) {
	t.Parallel()
	o, _ := openOffice(t, may)
	lease, err := o.work(t.Context(), "ann", "1", 600, time.Hour, func(ctx context.Context, r *run) error {
		o.stands(t, 0, 400, 0)
		var made atomic.Int64
		err := pgtest.InParallel(3, func(i int) error {
			lease, err := r.sub(ctx, fmt.Sprint(i), 150, time.Hour, func(ctx context.Context, agent *run) error {
				n, refused, err := agent.callAtOnce(ctx, 25, 7)
				made.Add(int64(n))
				require.Equal(t, 25-21, refused)
				return err
			})
			require.Equal(t, int64(147), lease.Spent)
			require.NotZero(t, lease.SettledAt)
			return err
		})
		require.NoError(t, err)
		require.Equal(t, int64(3*21), made.Load())
		o.stands(t, 0, 400, 441)

		left, _, err := r.call(ctx, "rest", "think", 100)
		require.NoError(t, err)
		require.Equal(t, int64(600-441-100), left)
		_, _, err = r.call(ctx, "more", "think", 60)
		require.ErrorIs(t, err, budget.ErrExceeded)
		return nil
	})
	require.NoError(t, err)
	require.Equal(t, int64(541), lease.Spent)
	o.stands(t, 541, 459, 541)
}

func TestCall_SentAtOnceAndAgainIsMadeOnce(t *testing.T) {
	t.Parallel()
	o, _ := openOffice(t, may)
	_, err := o.work(t.Context(), "ann", "1", 100, time.Hour, func(ctx context.Context, r *run) error {
		var replays atomic.Int64
		require.NoError(t, pgtest.InParallel(8, func(int) error {
			_, replayed, err := r.call(ctx, "one", "search", 30)
			if replayed {
				replays.Add(1)
			}
			return err
		}))
		require.Equal(t, int64(7), replays.Load())
		return nil
	})
	require.NoError(t, err)
	o.stands(t, 30, 970, 30)
}

// A run's budget ends with the run, in each way that a run can end.
func TestWork_FailedAndCancelledRunsGiveUnusedUnitsBack(t *testing.T) {
	t.Parallel()
	o, _ := openOffice(t, may)
	failure := errors.New("no answer")
	var late *run
	ctx, cancel := context.WithCancel(t.Context())
	_, err := o.work(ctx, "ann", "1", 900, time.Hour, func(ctx context.Context, r *run) error {
		_, err := r.sub(ctx, "agent", 500, time.Hour, func(ctx context.Context, agent *run) error {
			late = agent
			_, _, err := agent.call(ctx, "one", "search", 11)
			cancel()
			return errors.Join(err, failure)
		})
		return err
	})
	require.ErrorIs(t, err, failure)
	o.stands(t, 11, 989, 11)
	_, _, err = late.call(t.Context(), "two", "search", 1)
	require.ErrorIs(t, err, budget.ErrScopeClosed)

	_, err = o.work(t.Context(), "ann", "2", 990, time.Hour, nil)
	require.ErrorIs(t, err, budget.ErrExceeded, "and more than there is, is not given")
	o.stands(t, 11, 989, 11)
}

// A run's budget can come from a wallet. Units of a lot that the run has outlive the lot. Units that it gives back do
// not.
func TestWork_FromAWallet(t *testing.T) {
	t.Parallel()
	o, clock := openOffice(t, may)
	book, err := wallet.New(o.client.Budget, wallet.Config{})
	require.NoError(t, err)
	require.NoError(t, pgx.BeginFunc(t.Context(), o.db, func(tx pgx.Tx) error {
		_, err := book.Grant(t.Context(), tx, wallet.Grant{Wallet: "wallet/ann", Amount: 1_000, For: time.Hour})
		return err
	}))
	carving := leases.Carving{Child: "run/1", From: book.Charge("wallet/ann", 600), TTL: 3 * time.Hour}
	lease, err := o.within(t.Context(), carving, func(ctx context.Context, r *run) error {
		_, _, err := r.call(ctx, "before", "search", 100)
		require.NoError(t, err)
		clock.Advance(2 * time.Hour)
		balance, err := book.Balance(ctx, o.db, "wallet/ann")
		require.NoError(t, err)
		require.Equal(t, []int64{0, 600}, []int64{balance.Units, balance.Held})
		_, _, err = r.call(ctx, "after", "search", 50)
		return err
	})
	require.NoError(t, err)
	require.Equal(t, int64(150), lease.Spent)
	balance, err := book.Balance(t.Context(), o.db, "wallet/ann")
	require.NoError(t, err)
	require.Equal(t, []int64{0, 0}, []int64{balance.Units, balance.Held})
	o.stands(t, 0, 1_000, 150)
	usage, err := o.client.Budget.Usage(t.Context(), o.db, budget.Query{Scope: "wallet/ann"})
	require.NoError(t, err)
	require.Equal(t, []int64{150, 150}, []int64{usage[0].Spent, usage[0].Credited}, "the rest has lapsed")
}

// A process is killed while a run and two agents of it make calls, several at once each. At the run's deadline, and
// not before, all units go back except those that calls on record have used.
func TestSweep_OfAKilledProcessGivesUnusedUnitsBack(t *testing.T) {
	t.Parallel()
	o, clock := openOffice(t, may)
	victim := exec.Command(os.Args[0])
	victim.Env = append(os.Environ(), crashing+"="+pgtest.ConnString(o.db))
	victim.Stderr = os.Stderr
	stdout, err := victim.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, victim.Start())
	t.Cleanup(func() { _ = victim.Process.Kill() })
	for calls, n := bufio.NewScanner(stdout), 0; n < 30; n++ {
		require.True(t, calls.Scan(), "it ended by itself")
	}
	require.NoError(t, victim.Process.Kill())
	_ = victim.Wait()

	_, left, err := o.left(t.Context(), "ann")
	require.NoError(t, err)
	require.Equal(t, int64(100), left)
	report, err := leases.Sweep(t.Context(), o.db, o.client.Budget)
	require.NoError(t, err)
	require.Equal(t, leases.SweepReport{}, report, "not before its time")

	clock.Advance(time.Hour)
	settled := 0
	require.Eventually(t, func() bool { // its last transactions may still be going on
		report, err := leases.Sweep(context.Background(), o.db, o.client.Budget)
		settled += report.Settled
		return err == nil && settled == 3
	}, 2*time.Minute, 10*time.Millisecond)
	var made int64
	require.NoError(t, o.db.QueryRow(t.Context(), `select sum(units) from calls`).Scan(&made))
	require.GreaterOrEqual(t, made, int64(30))
	o.stands(t, made, 1_000-made, made)
}

// untilKilled is the work of the killed process: a run of 900 units, and two agents of it, with calls of one unit.
func untilKilled(url string) error {
	ctx := context.Background()
	pool, err := pgxpool.New(ctx, url)
	if err != nil {
		return err
	}
	o, err := newOffice(pool)
	if err != nil {
		return err
	}
	r, err := o.begin(ctx, ofUser("ann", "1", 900, time.Hour))
	if err != nil {
		return err
	}
	at := []*run{r, r, nil, nil}
	for i := range 2 {
		if at[2+i], err = r.begin(ctx, r.part(fmt.Sprint(i), 200, time.Hour)); err != nil {
			return err
		}
	}
	return pgtest.InParallel(len(at), func(worker int) error {
		for n := 0; ; n++ {
			if _, _, err := at[worker].call(ctx, fmt.Sprint(worker, "-", n), "search", 1); err != nil {
				return err
			}
			fmt.Println(n)
		}
	})
}
