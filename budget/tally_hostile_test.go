package budget_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
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
	for _, none := range []int64{math.MinInt64, math.MinInt64 + 1, -1 << 53, -1 << 41, posted[0].Seq + 1} {
		require.ErrorIs(t, refund(ctx, pool, l, "channel", none, 1), budget.ErrEntryPurged, none)
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
			_, err := book.Place(ctx, tx, holds.Placement{ID: id, TTL: time.Hour, Lines: []holds.Line{{Scope: "user", Amount: 5}},
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

// A tally counts at its time, and a minimum when its hold fell due, whoever writes an entry first.
func TestTally_AndDueHoldsCountAtTheirTimesWhoeverIsFirst(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	pool, l, clock := open(t)
	book, err := holds.New(l, holds.Config{})
	require.NoError(t, err)
	for i, c := range []struct {
		name  string
		least int64
		call  func(tx pgx.Tx, id string) error
		want  []int64 // by ten minutes
	}{
		{"a tally after a minimum", 7, nil, []int64{2, 0, 1, 7, 1}},
		{"a release after a tally", 7, func(tx pgx.Tx, id string) error {
			_, err := book.Release(ctx, tx, holds.Release{IDs: []string{id}})
			return err
		}, []int64{2, 0, 1, 0, 1}},
		{"an expiry after a tally", 0, func(tx pgx.Tx, id string) error {
			clock.Advance(10 * time.Minute)
			h, err := book.Get(ctx, tx, "", id, "")
			require.NoError(t, err)
			_, ended, err := book.Expire(ctx, tx, holds.Expire{ID: id, Deadline: h.Deadline})
			require.True(t, ended)
			return err
		}, []int64{2, 0, 1, 0, 0, 1}},
	} {
		scope, begun := fmt.Sprint("channel", i), clock.Now()
		makeBusy(t, pool, l, scope)
		clock.Advance(1 * time.Microsecond) // no tally folds others then
		require.NoError(t, pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
			_, err := book.Place(ctx, tx, holds.Placement{ID: scope, TTL: 35 * time.Minute, Lines: []holds.Line{{Scope: scope, Amount: 10, AtLeast: c.least}}})
			return err
		}))
		clock.Advance(20 * time.Minute)
		sum(t, pool, l, scope, 1)
		clock.Advance(10 * time.Minute)
		if c.call != nil {
			require.NoError(t, pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error { return c.call(tx, scope) }))
		}
		clock.Advance(10 * time.Minute)
		mustCharge(t, pool, l, scope, 1)
		for range 2 { // before the fold, and after it
			var units []int64
			for at := begun; !at.After(clock.Now()); at = at.Add(10 * time.Minute) {
				r, err := l.UsageBetween(ctx, pool, scope, at, at.Add(10*time.Minute))
				require.NoError(t, err)
				units = append(units, r.Charged)
			}
			require.Equal(t, c.want, units, c.name)
			require.NoError(t, pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error { return l.Lock(ctx, tx, scope) }))
			require.Zero(t, pgtest.Count(t, pool, "metered.tallies"))
		}
	}
	requireVerified(t, pool, l)
}

// A hold that is placed in a transaction which lasts until it is due counts before the tallies that committed first, and
// are of a later time, whoever folds them.
func TestTally_CountsAfterMinimaThatFellDueBeforeIt(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	pool, l, clock := open(t)
	book, err := holds.New(l, holds.Config{})
	require.NoError(t, err)
	for by, fold := range map[string]func(tx pgx.Tx, scope string) error{
		"a lock": func(tx pgx.Tx, scope string) error { return l.Lock(ctx, tx, scope) },
		"a charge": func(tx pgx.Tx, scope string) error {
			_, err := l.Charge(ctx, tx, budget.Charge{Scope: scope, Amount: 1, Limits: []budget.Limit{budget.Lifetime(100)}})
			return err
		},
		"a release": func(tx pgx.Tx, scope string) error {
			_, err := book.Release(ctx, tx, holds.Release{IDs: []string{scope + "later"}})
			return err
		},
		"a capture": func(tx pgx.Tx, scope string) error {
			_, err := book.Capture(ctx, tx, holds.Capture{IDs: []string{scope + "later"}, Lines: []holds.Line{{Scope: scope, Amount: 2}}})
			return err
		},
		"an expiry": func(tx pgx.Tx, scope string) error {
			h, err := book.Get(ctx, tx, "", scope+"b", "")
			require.NoError(t, err)
			_, ended, err := book.Expire(ctx, tx, holds.Expire{ID: h.ID, Deadline: h.Deadline})
			require.True(t, ended)
			return err
		},
	} {
		scope, begun := by, clock.Now()
		makeBusy(t, pool, l, scope)
		clock.Advance(time.Microsecond)
		require.NoError(t, pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
			for id, ttl := range map[string]time.Duration{"a": 5, "b": 15, "later": 50} {
				_, err := book.Place(ctx, tx, holds.Placement{ID: scope + id, TTL: ttl * time.Minute,
					Lines: []holds.Line{{Scope: scope, Amount: 10, AtLeast: 7}}})
				require.NoError(t, err)
			}
			for range 3 {
				clock.Advance(10 * time.Minute)
				sum(t, pool, l, scope, 1)
			}
			return nil
		}))
		clock.Advance(10 * time.Minute)
		units := func() (units []int64) {
			for n := range time.Duration(4) {
				r, err := l.UsageBetween(ctx, pool, scope, begun.Add(n*10*time.Minute), begun.Add((n+1)*10*time.Minute))
				require.NoError(t, err)
				units = append(units, r.Charged)
			}
			return units
		}
		require.Equal(t, []int64{9, 8, 1, 1}, units(), by)
		require.NoError(t, pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error { return fold(tx, scope) }), by)
		require.Zero(t, pgtest.Count(t, pool, "metered.tallies"))
		require.Equal(t, []int64{9, 8, 1, 1}, units(), by)
		var kinds string
		require.NoError(t, pool.QueryRow(ctx, `select string_agg(l.kind, '' order by l.seq) from metered.ledger l
			where l.scope = $1 and l.seq between 6 and 10`, scope).Scan(&kinds))
		require.Equal(t, "ucucc", kinds, by)
	}
	_, err = book.Sweep(ctx, pool, holds.SweepOptions{})
	require.NoError(t, err)
	requireVerified(t, pool, l)
}

// A tally that is later than a capture's look at the clock is left to the next writer: the minimum of another hold
// may fall due in between, and counts before it.
func TestTally_LaterThanTheClockOfACaptureIsLeftToTheNextWriter(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	pool, l, clock := open(t)
	book, err := holds.New(l, holds.Config{})
	require.NoError(t, err)
	begun := clock.Now()
	makeBusy(t, pool, l, "channel")
	clock.Advance(time.Microsecond)
	require.NoError(t, pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		for id, ttl := range map[string]time.Duration{"a": 5, "later": 50} {
			_, err := book.Place(ctx, tx, holds.Placement{ID: id, TTL: ttl * time.Minute,
				Lines: []holds.Line{{Scope: "channel", Amount: 10, AtLeast: 7}}})
			require.NoError(t, err)
		}
		clock.Set(begun.Add(3 * time.Minute))
		sum(t, pool, l, "channel", 1)
		clock.Set(begun.Add(8 * time.Minute))
		sum(t, pool, l, "channel", 1)
		return nil
	}))
	clock.Set(begun.Add(4 * time.Minute)) // what the capture has seen
	require.NoError(t, pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		_, err := book.Capture(ctx, tx, holds.Capture{IDs: []string{"later"}, Lines: []holds.Line{{Scope: "channel", Amount: 2}}})
		return err
	}))
	clock.Set(begun.Add(20 * time.Minute))
	for range 2 { // unwritten, and written
		var units []int64
		for _, from := range []time.Duration{3, 4, 5, 6, 8} {
			r, err := l.UsageBetween(ctx, pool, "channel", begun.Add(from*time.Minute), begun.Add((from+1)*time.Minute))
			require.NoError(t, err)
			units = append(units, r.Charged)
		}
		require.Equal(t, []int64{1, 2, 7, 0, 1}, units)
		require.NoError(t, pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error { return l.Lock(ctx, tx, "channel") }))
	}
	requireVerified(t, pool, l)
}

// A refusal names the time at which tallies leave a window or a period, folded or not.
func TestTally_RetryTimesAreThoseOfEntries(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	pool, l, clock := open(t)
	book, err := holds.New(l, holds.Config{})
	require.NoError(t, err)
	makeBusy(t, pool, l, "channel")
	clock.Advance(time.Microsecond)
	require.NoError(t, pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		_, err := book.Place(ctx, tx, holds.Placement{ID: "h", TTL: 50 * time.Minute, Lines: []holds.Line{{Scope: "channel", Amount: 30, AtLeast: 4}}})
		return err
	}))
	for range 4 { // no entry is in a window of 35 minutes at last
		clock.Advance(10 * time.Minute)
		sum(t, pool, l, "channel", 10)
	}
	for _, c := range []struct {
		limit  budget.Limit
		amount int64
		retry  time.Duration
	}{
		{budget.PerWindow(75, 35*time.Minute), 11, 5 * time.Minute},
		{budget.PerWindow(75, 35*time.Minute), 25, 10 * time.Minute},
		{budget.PerWindow(75, 35*time.Minute), 72, 45 * time.Minute}, // the minimum leaves last
		{budget.PerWindow(75, 35*time.Minute), 42, 15 * time.Minute},
		{budget.PerPeriod(75, 45*time.Minute, start), 20, 5 * time.Minute},
		{budget.PerPeriod(75, 70*time.Minute, start), 20, 10 * time.Minute},
		{budget.Lifetime(75), 20, 10 * time.Minute},
		{budget.Lifetime(75), 60, budget.Never},
	} {
		retry := func() time.Duration {
			_, err := l.Check(ctx, pool, budget.Charge{Scope: "channel", Amount: c.amount, Limits: []budget.Limit{c.limit}})
			var e *budget.ExceededError
			require.ErrorAs(t, err, &e)
			return e.RetryAfter().Round(time.Second)
		}
		require.Equal(t, 4, pgtest.Count(t, pool, "metered.tallies"))
		before := retry()
		tx := begin(t, pool, pgx.ReadCommitted)
		_, err := tx.Exec(ctx, "select metered._fold_all()")
		require.NoError(t, err)
		_, err = l.Charge(ctx, tx, budget.Charge{Scope: "channel", Amount: c.amount, Limits: []budget.Limit{c.limit}})
		var e *budget.ExceededError
		require.ErrorAs(t, err, &e)
		require.NoError(t, tx.Rollback(ctx))
		require.Equal(t, e.RetryAfter().Round(time.Second), before, "%+v %d", c.limit, c.amount)
		require.Equal(t, c.retry, before, "%+v %d", c.limit, c.amount)
	}
}

func TestTally_APurgeFoldsThemAndKeepsTheSums(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	pool, l, clock := open(t)
	makeBusy(t, pool, l, "channel")
	var posted []budget.Posted
	for range 40 {
		clock.Advance(time.Minute)
		posted = append(posted, sum(t, pool, l, "channel", 1))
	}
	late := tally(t, pool, l, "channel", 7)
	clock.Advance(time.Minute)
	require.Positive(t, purge(t, pool, l, 10*time.Minute).Entries)
	require.Zero(t, pgtest.Count(t, pool, "metered.tallies where scope = 'channel'"))
	require.NoError(t, late.Commit(ctx))
	for range 2 { // before the fold of the late one, and after it
		require.Equal(t, int64(49), usage(t, pool, l, "channel", 0).Used)
		require.Equal(t, int64(16), usage(t, pool, l, "channel", 10*time.Minute).Used)
		_, err := charge(ctx, pool, l, "channel", 1, budget.Limit{Max: 16, Window: 10 * time.Minute})
		require.ErrorIs(t, err, budget.ErrExceeded)
		requireVerified(t, pool, l)
		require.NoError(t, pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error { return l.Lock(ctx, tx, "channel") }))
	}
	require.ErrorIs(t, refund(ctx, pool, l, "channel", posted[1].Seq, 1), budget.ErrEntryPurged)
	require.NoError(t, refund(ctx, pool, l, "channel", posted[39].Seq, 1))
	requireVerified(t, pool, l)
}

func TestTally_ARepetitionReturnsItsReceiptAfterTheFold(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	pool, l, _ := open(t)
	c := pgtest.NewClient(t, pool, metered.Config{})
	makeBusy(t, pool, l, "channel")
	cmd := metered.Command{ID: "post", Charges: []budget.Charge{{Scope: "channel", Amount: 3, Note: budget.Note{Actor: "ann"}},
		{Scope: "user", Amount: 1, Limits: []budget.Limit{budget.Lifetime(5)}}}}
	do := func() metered.Outcome[string] {
		out, err := metered.Do(ctx, c, cmd, func(context.Context, *metered.Tx) (string, error) { return "posted", nil })
		require.NoError(t, err)
		return out
	}
	first := do()
	require.False(t, first.Replayed)
	require.Negative(t, first.Receipt.Entries[0].Seq)
	again := do()
	require.True(t, again.Replayed)
	mustCharge(t, pool, l, "channel", 1, budget.Lifetime(10))
	require.Zero(t, pgtest.Count(t, pool, "metered.tallies"))
	folded := do()
	require.True(t, folded.Replayed)
	before, err := json.Marshal(again)
	require.NoError(t, err)
	after, err := json.Marshal(folded)
	require.NoError(t, err)
	require.Equal(t, string(before), string(after))
	require.Equal(t, first.Receipt.Entries[0].Seq, folded.Receipt.Entries[0].Seq)
	require.NoError(t, refund(ctx, pool, l, "channel", folded.Receipt.Entries[0].Seq, 3))
	require.Equal(t, 1, pgtest.Count(t, pool, "metered.ledger where scope = 'channel' and operation = 'post' and kind = 'c'"))
	requireVerified(t, pool, l)
}

func TestTally_TwoThatAlsoWaitForEachOtherEndByACollision(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	pool, l, _ := open(t)
	makeBusy(t, pool, l, "a")
	makeBusy(t, pool, l, "b")
	locks, tallies := begin(t, pool, pgx.ReadCommitted), begin(t, pool, pgx.ReadCommitted)
	_, err := l.Charge(ctx, locks, budget.Charge{Scope: "b", Amount: 1, Limits: []budget.Limit{budget.Lifetime(100)}})
	require.NoError(t, err)
	_, err = l.Charge(ctx, tallies, budget.Charge{Scope: "a", Amount: 1}, budget.Charge{Scope: "c", Amount: 1})
	require.NoError(t, err)
	ends := make(chan error, 1)
	go func() { // it waits for the tally
		err := l.Lock(ctx, locks, "a")
		ends <- errors.Join(err, locks.Rollback(ctx))
	}()
	pgtest.WaitAdvisory(t, pool, 1)
	_, err = l.Charge(ctx, tallies, budget.Charge{Scope: "b", Amount: 1, Limits: []budget.Limit{budget.Lifetime(100)}})
	other := errors.Join(tallies.Rollback(ctx), <-ends)
	require.True(t, (code(err) == "40P01") != (code(other) == "40P01"), "%v, %v", err, other)
	require.Equal(t, int64(2), usage(t, pool, l, "a", 0).Used)
	requireVerified(t, pool, l)
}
