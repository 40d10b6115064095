package holds_test

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/ledger"
	"github.com/pgmetered/metered/internal/pgtest"
)

// twoLevels are lines of an amount of a user and an organisation.
func twoLevels(amount, user, org int64) []holds.Line {
	return []holds.Line{capacity("user", amount, user), capacity("org", amount, org)}
}

// openUnits are the open units of each line, in the order of the scopes.
func openUnits(h holds.Hold) (all []int64) {
	for _, l := range h.Lines {
		all = append(all, l.Open)
	}
	return all
}

func TestPlace_UpToHoldsTheSameOfEachLine(t *testing.T) {
	t.Parallel()
	pgtest.OnEachVersion(t)
	f := setUp(t, holds.Config{})
	fee := budget.Charge{Scope: "fees", Amount: 2, Limits: []budget.Limit{budget.Lifetime(5)}}
	same := budget.Charge{Scope: "user", Amount: 3}
	r := holds.Placement{ID: "a", UpTo: true, Lines: twoLevels(60, 33, 40), Charges: []budget.Charge{fee, same}, Metadata: []byte(`{"row": 7}`)}
	h := f.mustPlace(r)
	require.True(t, h.Created)
	require.Equal(t, []int64{30, 30}, openUnits(h), "the user's 33, less the charge of 3")
	require.Len(t, h.Charges, 2)
	require.Equal(t, []int64{3, 2}, []int64{h.Charges[0].Amount, h.Charges[1].Amount}, "charges are made in full")
	got := f.get("a")
	h.Created, h.Charges = false, nil
	require.Equal(t, got, h)

	again := f.mustPlace(r)
	require.False(t, again.Created)
	require.Equal(t, openUnits(h), openUnits(again))
	for _, other := range []func(r *holds.Placement){
		func(r *holds.Placement) { r.UpTo = false }, func(r *holds.Placement) { r.Lines = twoLevels(30, 33, 40) },
	} {
		changed := r
		other(&changed)
		_, err := f.place(changed)
		require.ErrorIs(t, err, holds.ErrConflict)
	}

	r.ID = "b"
	_, err := f.place(r)
	var exceeded *budget.ExceededError
	require.ErrorAs(t, err, &exceeded)
	require.Len(t, exceeded.Refusals, 1)
	refusal := exceeded.Refusals[0]
	require.Equal(t, []int64{63, 0, 3, 30}, []int64{refusal.Requested, refusal.Available, refusal.Used, refusal.Held})
	require.Equal(t, time.Minute, refusal.RetryAfter, "then 1 unit and the charge of 3 fit")

	f.clock.Advance(time.Minute) // due, and not swept
	r.Charges[0].Amount = 4
	_, err = f.place(r)
	require.ErrorAs(t, err, &exceeded)
	require.Equal(t, "fees", exceeded.Refusals[0].Scope, "a charge takes all of its amount or nothing")
	require.Len(t, exceeded.Refusals, 1)
	r.Charges = nil
	h = f.mustPlace(r)
	require.Equal(t, []int64{30, 30}, openUnits(h))
	_, err = f.release("b")
	require.NoError(t, err)
	r.ID, r.Lines = "c", twoLevels(20, 33, 40)
	require.Equal(t, []int64{20, 20}, openUnits(f.mustPlace(r)), "all of it fits")
	f.verify()
}

// A hold is never of less than what it captures when it expires.
func TestPlace_UpToIsAtLeastTheMinimum(t *testing.T) {
	t.Parallel()
	f := setUp(t, holds.Config{})
	r := holds.Placement{ID: "a", UpTo: true, Lines: twoLevels(60, 10, 40)}
	r.Lines[0].AtLeast, r.Lines[1].AtLeast = 4, 11
	_, err := f.place(r)
	var exceeded *budget.ExceededError
	require.ErrorAs(t, err, &exceeded)
	require.EqualValues(t, 10, exceeded.Refusals[0].Available)
	require.Equal(t, budget.Never, exceeded.Refusals[0].RetryAfter, "11 never fit")
	r.Lines[1].AtLeast = 10
	h := f.mustPlace(r)
	require.Equal(t, []int64{10, 10}, openUnits(h))
	require.Equal(t, []int64{10, 4}, []int64{h.Lines[0].AtLeast, h.Lines[1].AtLeast})
	f.clock.Advance(time.Minute)
	used, _ := f.usage("org")
	require.EqualValues(t, 10, used)
	_, err = f.book.Sweep(t.Context(), f.pool, holds.SweepOptions{})
	require.NoError(t, err)
	f.verify()
}

// In a command it is looked at with the fewest units, and its record has the units that it got.
func TestPlace_UpToInACommand(t *testing.T) {
	t.Parallel()
	pool, c := pgtest.SetUp(t, metered.Config{})
	cmd := func(id string) metered.Command {
		return metered.Command{ID: id, Input: 1, Holds: []holds.Placement{{ID: id, UpTo: true, TTL: time.Hour, Lines: twoLevels(60, 30, 40)}}}
	}
	ran := 0
	fn := func(ctx context.Context, tx *metered.Tx) (any, error) {
		ran++
		_, err := tx.Place(ctx, holds.Placement{ID: tx.Placed[0] + ", beside", UpTo: true, TTL: time.Hour, Lines: []holds.Line{capacity("org", 60, 40)}}, nil)
		return nil, err
	}
	for replayed := range 2 {
		out, err := metered.Do(t.Context(), c, cmd("a"), fn)
		require.NoError(t, err)
		require.Equal(t, replayed == 1, out.Replayed)
		require.Equal(t, []int64{30, 30}, openUnits(out.Holds[0]))
		require.Equal(t, []int64{10}, openUnits(out.Holds[1]))
	}
	require.Equal(t, 1, ran)
	_, err := metered.Do(t.Context(), c, cmd("b"), fn)
	require.ErrorIs(t, err, budget.ErrExceeded)
	require.Equal(t, 1, ran, "it was refused before its function ran")
	report, err := c.Budget.Verify(t.Context(), pool, budget.VerifyOptions{})
	require.NoError(t, err)
	require.Empty(t, report.Differences)
}

// A session that reserves as much as is left can settle that.
func TestOpen_UpToReservesWhatIsLeft(t *testing.T) {
	t.Parallel()
	pool, c := pgtest.SetUp(t, metered.Config{})
	r := metered.Reservation{ID: "op", UpTo: true, Lines: twoLevels(60, 30, 40)}
	s, err := metered.Open[any](t.Context(), c, r)
	require.NoError(t, err)
	defer s.Close()
	require.Equal(t, []int64{30, 30}, openUnits(s.Hold()))
	out, err := s.Settle(t.Context(), metered.Cost{Lines: []holds.Line{{Scope: "org", Amount: 25}, {Scope: "user", Amount: 25}}}, nil)
	require.NoError(t, err)
	require.EqualValues(t, 25, out.Holds[0].Lines[0].Captured)
	again, err := metered.Open[any](t.Context(), c, r)
	require.NoError(t, err)
	require.True(t, again.Finished())
	r.ID = "more"
	s, err = metered.Open[any](t.Context(), c, r)
	require.NoError(t, err)
	defer s.Close()
	require.Equal(t, []int64{5, 5}, openUnits(s.Hold()))
	cost := metered.Cost{Lines: []holds.Line{{Scope: "org", Amount: 12}, {Scope: "user", Amount: 12}}, Over: holds.OverEvenly}
	for range 2 { // the second time it is answered by the record
		out, err = s.Settle(t.Context(), cost, nil)
		require.NoError(t, err)
		require.Equal(t, []int64{5, 5}, []int64{out.Holds[0].Lines[0].Captured, out.Holds[0].Lines[1].Captured}, "the user has no more")
	}
	usage, err := c.Budget.Usage(t.Context(), pool, budget.Query{Scope: "org"})
	require.NoError(t, err)
	require.EqualValues(t, 30, usage[0].Used+usage[0].Held)
}

// A capture that goes over takes the same more of equal lines. Lines that were used up to what they hold take that.
func TestCapture_OverEvenlyTakesTheSameOfEqualLines(t *testing.T) {
	t.Parallel()
	f := setUp(t, holds.Config{})
	used := func(key, user, team int64) (lines []holds.Line) {
		for i, amount := range []int64{key, user, team} {
			lines = append(lines, capacity([]string{"key", "user", "team"}[i], amount, []int64{60, 26, 90}[i]))
		}
		return lines
	}
	captured := func(id string, over holds.Over, lines []holds.Line) (all []int64) {
		got, err := f.capture(holds.Capture{IDs: []string{id}, Over: over, Lines: lines})
		require.NoError(f, err)
		for _, l := range got[0].Lines {
			all = append(all, l.Captured)
		}
		return all
	}
	f.mustPlace(holds.Placement{ID: "a", Lines: used(10, 10, 10)})
	require.Equal(t, []int64{16, 16, 16}, captured("a", holds.OverEvenly, used(16, 16, 16)), "all of it fits")
	f.mustPlace(holds.Placement{ID: "b", Lines: used(5, 5, 5)})
	require.Equal(t, []int64{10, 10, 10}, captured("b", holds.OverEvenly, used(30, 30, 30)), "the user has 5 more")
	f.mustPlace(holds.Placement{ID: "c", Lines: []holds.Line{{Scope: "key", Amount: 5}, {Scope: "user", Amount: 5}, {Scope: "team", Amount: 5}}})
	require.Equal(t, []int64{5, 4, 5}, captured("c", holds.OverEvenly, used(9, 9, 4)), "the key, the team and the user")
	f.verify()
}

// Whoever comes holds the units that are left: all of them are held, by holds whose lines are equal.
func TestPlace_UpToByConcurrentCallersHoldsEachUnitOnce(t *testing.T) {
	t.Parallel()
	pgtest.OnEachVersion(t)
	f := setUp(t, holds.Config{})
	for _, iso := range isolations {
		t.Run(string(iso), func(t *testing.T) {
			const limit = 77
			org := "org " + string(iso)
			var units atomic.Int64
			retry := &retrier{pool: f.pool}
			require.NoError(t, pgtest.InParallel(5, func(worker int) error {
				for n := 0; ; n++ {
					r := holds.Placement{UpTo: true, TTL: time.Minute, Lines: []holds.Line{capacity(fmt.Sprint(iso, worker%2), 6, limit), capacity(org, 6, limit)}}
					if n%2 == 0 {
						r.ID = fmt.Sprintf("%s %d/%d", iso, worker, n)
					}
					var h holds.Hold
					err := retry.run(t.Context(), iso, func(tx pgx.Tx) (err error) {
						if _, err := tx.Exec(t.Context(), "select 1"); err != nil { // the snapshot is older than the lock
							return err
						}
						h, err = f.book.Place(t.Context(), tx, r)
						return err
					})
					if errors.Is(err, budget.ErrExceeded) {
						return nil
					}
					if err != nil {
						return err
					}
					if h.Lines[0].Open != h.Lines[1].Open {
						return fmt.Errorf("%v are not equal", openUnits(h))
					}
					units.Add(h.Lines[0].Open)
				}
			}))
			require.EqualValues(t, limit, units.Load())
			_, held := f.usage(org)
			require.EqualValues(t, limit, held)
		})
	}
	f.verify()
}

// A role that calls place itself makes no hold of it that no caller could.
func TestPlace_UpToOfArgumentsThatNobodySends(t *testing.T) {
	t.Parallel()
	f := setUp(t, holds.Config{})
	call, err := placeHold(f.book, holds.Placement{ID: "a", UpTo: true, TTL: time.Minute, Lines: twoLevels(20, 30, 40)})
	require.NoError(t, err)
	args := call.Args(ledger.Sending{WaitMS: 1000})
	for what, change := range map[string]string{
		"fewer than 1": `hold.minimum[1].amount := 0`, "less than none": `hold.minimum[1].amount := -5`, "more than is asked for": `hold.minimum[1].amount := 21`,
		"other units of a line": `charges[1].held := 19`, "no line": `charges[1].held := 0; charges[2].held := 0`,
		"not the last": `hold.minimum := hold.minimum || row('org', 1, '{}')::metered.used_units`, "twice": `hold.minimum := hold.minimum || hold.minimum`,
	} {
		_, err := f.pool.Exec(t.Context(), fmt.Sprintf(`do $do$
			declare
				hold metered.new_hold := $a$%s$a$::text::metered.new_hold;
				charges metered.new_charge[] := $a$%s$a$::text::metered.new_charge[];
			begin
				%s;
				perform metered.place(hold, charges, '1 min', 1000, null, null, false);
			end $do$`, args[0], args[1], change))
		var pg *pgconn.PgError
		require.ErrorAs(t, err, &pg, what)
		require.Equal(t, "22023", pg.Code, "%s: %s, %s", what, pg.Message, pg.Where)
	}
	f.verify()
}
