package budget_test

import (
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/pgtest"
)

// sum charges a busy scope, and returns the entry, which is a tally.
func sum(t testing.TB, pool *pgxpool.Pool, l *budget.Ledger, scope string, amount int64) budget.Posted {
	t.Helper()
	posted := mustCharge(t, pool, l, scope, amount)
	require.Negative(t, posted.Seq)
	return posted
}

func TestTally_ItsNumberNamesOneChargeWhateverTheClockDoes(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	pool, l, clock := open(t)
	makeBusy(t, pool, l, "channel")
	fold := func() {
		mustCharge(t, pool, l, "channel", 1, budget.Lifetime(1<<40))
		require.Zero(t, pgtest.Count(t, pool, "metered.tallies"))
	}
	var posted []budget.Posted
	for range 3 { // the clock stands still
		posted = append(posted, sum(t, pool, l, "channel", 10), sum(t, pool, l, "channel", 20))
		fold()
	}
	clock.Advance(time.Hour)
	posted = append(posted, sum(t, pool, l, "channel", 30))
	clock.Advance(-time.Hour)
	fold()
	posted = append(posted, sum(t, pool, l, "channel", 40))
	fold()
	pending := sum(t, pool, l, "channel", 45)
	repair := func(tx pgx.Tx) error {
		_, err := l.RepairClock(ctx, tx, "channel", budget.Note{})
		return err
	}
	require.Equal(t, "25001", code(pgx.BeginTxFunc(ctx, pool, pgx.TxOptions{IsoLevel: pgx.RepeatableRead}, repair)))
	require.NoError(t, pgx.BeginFunc(ctx, pool, repair))
	posted = append(posted, pending)
	require.Zero(t, pgtest.Count(t, pool, "metered.tallies"))

	// From here on, times come twice: the scope has no tallies any more, even if it is busy.
	tx := begin(t, pool, pgx.ReadCommitted)
	require.NoError(t, l.Lock(ctx, tx, "channel"))
	waits := make(chan error, 1)
	go func() {
		_, err := charge(ctx, pool, l, "channel", 49)
		waits <- err
	}()
	pgtest.WaitAdvisory(t, pool, 1)
	require.NoError(t, tx.Commit(ctx))
	require.NoError(t, <-waits)
	posted = append(posted, mustCharge(t, pool, l, "channel", 50))
	require.Positive(t, posted[len(posted)-1].Seq)
	fold()
	seen := map[int64]bool{}
	for _, p := range posted {
		require.False(t, seen[p.Seq], "%d names two charges", p.Seq)
		seen[p.Seq] = true
		require.NoError(t, refund(ctx, pool, l, "channel", p.Seq, p.Amount-1))
		require.ErrorIs(t, refund(ctx, pool, l, "channel", p.Seq, 2), budget.ErrRefundExceeds)
		require.NoError(t, refund(ctx, pool, l, "channel", p.Seq, 1))
	}
	var last time.Time
	for e, err := range l.Entries(ctx, pool, "channel", budget.EntriesOptions{}) {
		require.NoError(t, err)
		if e.Kind == budget.EntryClockRepair {
			last = time.Time{}
		}
		require.False(t, e.At.Before(last), "entry %d", e.Seq)
		last = e.At
	}
	requireVerified(t, pool, l)
}

func TestTally_OfAPlacementKeepsItsHold(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	pool, l, _ := open(t)
	book, err := holds.New(l, holds.Config{})
	require.NoError(t, err)
	makeBusy(t, pool, l, "channel")
	place := func(id string) {
		require.NoError(t, pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
			_, err := book.Place(ctx, tx, holds.Request{ID: id, TTL: time.Hour, Lines: []holds.Line{{Scope: "user", Amount: 5}},
				Charges: []budget.Charge{{Scope: "channel", Amount: 2}}})
			return err
		}))
	}
	place("h1")
	require.Equal(t, 1, pgtest.Count(t, pool, "metered.tallies"))
	mustCharge(t, pool, l, "channel", 1, budget.Lifetime(10))
	var of []string
	for e, err := range l.Entries(ctx, pool, "channel", budget.EntriesOptions{}) {
		require.NoError(t, err)
		of = append(of, e.Hold)
	}
	require.ElementsMatch(t, []string{"", "", "h1", ""}, of)
	requireVerified(t, pool, l)
}
