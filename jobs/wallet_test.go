package jobs_test

import (
	"context"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/jobs"
	"github.com/pgmetered/metered/wallet"
)

// A job for one use waits, and jobs for another use of the same wallet, whose credit is there, start past it.
func TestGated_AJobForOneUseKeepsNoneOfAnotherWaiting(t *testing.T) {
	t.Parallel()
	g := openGated(t, nil)
	w, err := wallet.New(g.ledger, wallet.Config{})
	require.NoError(t, err)
	g.in(pgx.ReadCommitted, func(tx pgx.Tx) error {
		_, err := w.Grant(g.ctx, tx, wallet.Grant{Wallet: "w", Amount: 110, Ends: wallet.After(time.Hour), Reference: "text", Uses: []string{"text"}})
		return err
	})
	use := func(amount int64, name string) *jobs.Options {
		line := w.Line("w", amount)
		return &jobs.Options{Hold: &jobs.Units{Lines: []holds.Line{line}, Note: budget.Note{Use: name}}}
	}
	require.True(t, g.mustEnqueue(process{"a"}, use(1, "images")).Parked)
	for range 3 {
		require.True(t, g.mustEnqueue(process{"b"}, use(10, "text")).Parked, "it waits for its turn")
	}
	require.EqualValues(t, 3, g.release().Released)
	pgtest.RequireVerified(t, g.pool, g.ledger)
}

// A job that waits for credit is told how much there is for it: of the wallet, and of lots for its use.
func TestExplain_OfAJobThatWaitsForCreditSaysHowMuchThereIs(t *testing.T) {
	t.Parallel()
	g := openGated(t, nil)
	w, err := wallet.New(g.ledger, wallet.Config{Overdraft: 3})
	require.NoError(t, err)
	waits := func(want, use string) {
		t.Helper()
		options := needs(w.Line("w", 100))
		options.Hold.Note.Use = use
		r := g.mustEnqueue(process{use}, options)
		require.True(t, r.Parked)
		p, err := g.Explain(g.ctx, g.pool, r.JobID)
		require.NoError(t, err)
		require.Equal(t, []string{`"w" has credit for ` + want + `, 100 wanted: when units are freed`}, p.Refused)
	}
	g.in(pgx.ReadCommitted, func(tx pgx.Tx) error {
		for _, lot := range []wallet.Grant{{Amount: 40, Reference: "all"}, {Amount: 20, Reference: "text", Uses: []string{"text"}}} {
			lot.Wallet = "w"
			if _, err := w.Grant(g.ctx, tx, lot); err != nil {
				return err
			}
		}
		return nil
	})
	waits("43: 0 held of it", "images")
	waits("63: 0 held of it", "text")
}

// A wallet with thresholds gates jobs. The next call that carries them reports what is reached.
func TestGated_OfAWalletWithThresholds(t *testing.T) {
	t.Parallel()
	g := openGated(t, nil)
	var crossed []budget.Crossing
	ledger, err := budget.New(budget.Config{OnThreshold: func(_ context.Context, _ pgx.Tx, c budget.Crossing) error {
		crossed = append(crossed, c)
		return nil
	}})
	require.NoError(t, err)
	book, err := holds.New(ledger, holds.Config{})
	require.NoError(t, err)
	g.Enqueuer, err = jobs.New(g.client, jobs.Config{Holds: book})
	require.NoError(t, err)
	w, err := wallet.New(ledger, wallet.Config{Thresholds: []budget.Threshold{{Name: "low", Left: 50}}})
	require.NoError(t, err)
	g.in(pgx.ReadCommitted, func(tx pgx.Tx) error {
		_, err := w.Grant(g.ctx, tx, wallet.Grant{Wallet: "w", Amount: 100, Ends: wallet.After(time.Hour), Reference: "r"})
		return err
	})
	require.False(t, g.mustEnqueue(process{"a"}, needs(w.Line("w", 60))).Parked)
	require.True(t, g.mustEnqueue(process{"b"}, needs(w.Line("w", 60))).Parked)
	require.Empty(t, crossed)
	g.in(pgx.ReadCommitted, func(tx pgx.Tx) error {
		_, err := ledger.Charge(g.ctx, tx, w.Charge("w", 1))
		return err
	})
	require.Len(t, crossed, 1)
	pgtest.RequireVerified(t, g.pool, g.ledger)
}

// The Client's Enqueuer asks its limits, and tells of drops.
func TestClient_AsksLimitsOfJobsAndTellsOfDrops(t *testing.T) {
	t.Parallel()
	g := openGated(t, nil)
	clock := pgtest.SetClock(t, g.pool, pgtest.Tomorrow(9))
	most := int64(1)
	var dropped []int64
	c, err := metered.New(g.pool, metered.Config{
		River: g.client,
		JobLimits: func(context.Context, pgx.Tx, string) ([]budget.Limit, error) {
			return []budget.Limit{budget.Lifetime(most)}, nil
		},
		OnDropJob: func(_ context.Context, _ pgx.Tx, p jobs.Parked) error {
			dropped = append(dropped, p.JobID)
			return nil
		},
	})
	require.NoError(t, err)
	enqueue := func() jobs.Result {
		o := needs(slots("gpu", 1, 1))
		o.MaxWait = time.Minute
		outcome, err := metered.Do(g.ctx, c, metered.Command{ID: metered.NewID(), Input: 1}, func(ctx context.Context, tx *metered.Tx) (jobs.Result, error) {
			return tx.Enqueue(ctx, process{"a"}, o)
		})
		require.NoError(t, err)
		return outcome.Result
	}
	enqueue()
	second, third := enqueue(), enqueue()
	most = 2
	g.in(pgx.ReadCommitted, func(tx pgx.Tx) error {
		results, err := c.Jobs.ReleaseIn(g.ctx, tx, "gpu")
		require.Len(t, results, 1)
		require.Equal(t, second.JobID, results[0].JobID)
		return err
	})
	clock.Advance(time.Hour)
	report, err := c.Jobs.Release(g.ctx, g.pool)
	require.NoError(t, err)
	require.Equal(t, jobs.ReleaseReport{Dropped: 1}, report)
	require.Equal(t, []int64{third.JobID}, dropped)
}
