package holds_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/wallet"
)

// pile places a hold of so many due ones in a scope: each falls due a microsecond after the one before, a minute from now. Every tenth captures
// a unit when it expires, if least.
func (f *fixture) pile(scope string, n int, least bool) {
	f.Helper()
	first := f.mustPlace(holds.Placement{ID: scope + "/1", TTL: time.Minute, Lines: []holds.Line{{Scope: scope, Amount: 2}}})
	_, err := f.pool.Exec(f.Context(), fmt.Sprintf(`
		with e as (
			insert into metered.ledger (seq, amount, at, spent, refunded, credited, held, epoch, next_due, kind, scope, hold, others)
			select g, 2, l.at, 0, 0, 0, 2 * g, 0, l.next_due, 'h', l.scope, l.scope || '/' || g, g
			from metered.ledger l, generate_series(2, %[1]d) g where l.scope = $1 and l.seq = 1
		), h as (
			insert into metered.holds (placed_at, deadline, due, ceiling, version, state, tenant, id, holder, fingerprint, keys)
			select y.placed_at, y.deadline + g * interval '1 us', y.due + g * interval '1 us', y.ceiling, 1, 'h', y.tenant, $1 || '/' || g, y.holder, y.fingerprint, y.keys
			from metered.holds y, generate_series(2, %[1]d) g where y.id = $2
			returning no, id, due, placed_at, deadline
		), v as (
			insert into metered.hold_events (hold, at, deadline, version, kind, detail)
			select h.no, h.placed_at, h.deadline, 1, 'h', case when %[2]t and split_part(h.id, '/', -1)::int %% 10 = 0
				then jsonb_set(v.detail, '{lines,0,at_least}', '1') else v.detail end
			from h, metered.hold_events v, metered.holds y where y.id = $2 and v.hold = y.no and v.version = 1
		)
		insert into metered.hold_lines (hold, key, amount, open, due, scope, opened_seq, at_least)
		select h.no, l.key, 2, 2, h.due, l.scope, x.seq, case when %[2]t and x.seq %% 10 = 0 then 1 else 0 end
		from h, lateral (select split_part(h.id, '/', -1)::bigint as seq) x, metered.hold_lines l, metered.holds y
		where y.id = $2 and l.hold = y.no`, n, least), scope, first.ID)
	require.NoError(f, err)
}

// open counts the lines of a scope that are not freed.
func (f *fixture) open(scope string) int {
	f.Helper()
	return queryRow[int](f.T, f.pool, "select count(*) from metered.hold_lines where scope = $1 and open > 0", scope)
}

// A sweep frees the units of a scope with many due holds in a transaction that locks no other scope, and then clears a batch of rows a transaction. Scopes
// with few come first, and share one. What was committed stays. All is ended at last, and the books agree.
func TestSweep_AScopeWithManyDueHoldsIsSweptAloneAndInSteps(t *testing.T) {
	t.Parallel()
	for name, least := range map[string]bool{"plain": false, "with minima": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := setUp(t, holds.Config{})
			many := pgtest.Size(130, 3_000)
			f.pile("big", many, least)
			f.pile("large", 60, least)
			for n := range 40 {
				f.mustPlace(holds.Placement{ID: fmt.Sprint("few/", n), TTL: time.Minute, Lines: []holds.Line{{Scope: fmt.Sprint("few/", n%20), Amount: 1}}})
			}
			f.clock.Advance(time.Hour)

			var reports []holds.SweepReport
			var left [][2]int // of the large scopes, after each batch
			report, err := f.book.Sweep(t.Context(), f.pool, holds.SweepOptions{Batch: 100, Progress: func(r holds.SweepReport) {
				reports = append(reports, r)
				left = append(left, [2]int{f.open("big"), f.open("large")})
			}})
			require.NoError(t, err)
			require.Equal(t, many+60+40, report.Expired)
			require.Zero(t, report.Skipped+report.Failed+report.Behind)
			before := [2]int{many, 60}
			for n, now := range left {
				freed := [2]int{before[0] - now[0], before[1] - now[1]}
				require.LessOrEqual(t, freed[0]+freed[1], 100, "batch %d", n)
				require.True(t, freed[0] == 0 || freed[1] == 0, "batch %d: both scopes", n)
				if freed[0]+freed[1] > 0 {
					require.Zero(t, queryRow[int](t, f.pool, "select count(*) from metered.hold_lines where scope like 'few/%' and open > 0"), "few come first")
				}
				if n > 0 && now[1] > 0 { // they take turns
					require.InDelta(t, many-now[0], 60-now[1], 125)
				}
				before = now
			}
			f.verify()
		})
	}
}

// A page leaves a hold of which another scope is locked, and what fell due after its minimum. A step needs the lock of one scope:
// it ends the lines of that scope in their order, and the hold ends whole, and is announced, once the other scope is free.
func TestSweep_AStepEndsTheLineOfAHoldWhoseOtherScopeIsLocked(t *testing.T) {
	t.Parallel()
	for name, many := range map[string]int{"page": 10, "step": 30} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := setUp(t, holds.Config{})
			f.pile("ours", many, false)
			f.mustPlace(holds.Placement{ID: "both", TTL: 2 * time.Minute, Lines: []holds.Line{{Scope: "ours", Amount: 20, AtLeast: 5}, {Scope: "theirs", Amount: 9, AtLeast: 3}}})
			f.mustPlace(holds.Placement{ID: "after", TTL: 3 * time.Minute, Lines: []holds.Line{{Scope: "ours", Amount: 1}}})
			f.clock.Advance(time.Hour)
			locked, err := f.pool.Begin(t.Context())
			require.NoError(t, err)
			defer func() { _ = locked.Rollback(context.Background()) }()
			require.NoError(t, f.ledger.Lock(t.Context(), locked, "theirs"))
			report, err := f.book.Sweep(t.Context(), f.pool, holds.SweepOptions{})
			require.NoError(t, err)
			left := map[string][]int64{"page": {int64(many), 21}, "step": {int64(many) + 1, 0}}[name]
			require.Equal(t, left, []int64{int64(report.Expired), lastHeld(f, "ours")})
			require.Equal(t, 1, f.open("theirs"))
			require.NoError(t, locked.Rollback(t.Context()))
			again, err := f.book.Sweep(t.Context(), f.pool, holds.SweepOptions{})
			require.NoError(t, err)
			require.Equal(t, many+2, report.Expired+again.Expired)
			for scope, least := range map[string]int64{"ours": 5, "theirs": 3} {
				var captured []int64
				for e, err := range f.ledger.Entries(t.Context(), f.pool, scope, budget.EntriesOptions{}) {
					require.NoError(t, err)
					if e.Hold == "both" && e.Kind == "capture" {
						captured = append(captured, e.Amount, int64(f.clock.Now().Sub(e.At)/time.Minute))
					}
				}
				require.Equal(t, []int64{least, 58}, captured, "%s: at its time", scope)
			}
			f.verify()
		})
	}
}

// A program of version 1 calls sweep_holds, and goes on where it says. It comes to the end of any backlog.
func TestSweep_AProgramOfVersion1EndsABacklog(t *testing.T) {
	t.Parallel()
	f := setUp(t, holds.Config{})
	f.pile("big", 130, true)
	f.mustPlace(holds.Placement{ID: "few", TTL: time.Minute, Lines: []holds.Line{{Scope: "few", Amount: 1}}})
	f.clock.Advance(time.Hour)
	var due any = "-infinity"
	var no int64
	ended, calls := 0, 0
	for more := true; more; calls++ {
		require.Less(t, calls, 100)
		var nos []int64
		var seen int
		var lastDue *time.Time
		var lastNo *int64
		before := f.open("big")
		require.NoError(t, f.pool.QueryRow(t.Context(), "select * from metered.sweep_holds($1::timestamptz, $2, 50, false, null)", due, no).
			Scan(&nos, &seen, &lastDue, &lastNo, &more))
		require.LessOrEqual(t, before-f.open("big"), 50)
		ended += len(nos)
		if seen > 0 {
			due, no = *lastDue, *lastNo
		}
	}
	require.Equal(t, 131, ended)
	f.verify()
}

// A charge of another scope never waits for a step, and one scope whose step fails, or that is locked, stops no other.
func TestSweep_AStepThatCannotBeTakenStopsNoOther(t *testing.T) {
	t.Parallel()
	f := setUp(t, holds.Config{})
	f.pile("broken", 60, false)
	f.pile("locked", 60, false)
	f.pile("sound", 60, false)
	f.clock.Advance(time.Hour)
	execute(t, f.pool, `create function refuse() returns trigger language plpgsql as $$ begin
		if new.scope = 'broken' and new.seq > 60 then raise exception 'broken' using errcode = '57014'; end if;
		return new; end $$; create trigger refuse before insert on metered.ledger for each row execute function refuse()`)
	tx := begin(t, f.pool, pgx.ReadCommitted)
	_, err := tx.Exec(t.Context(), "select pg_advisory_xact_lock($1)", f.ledger.LockKey("locked"))
	require.NoError(t, err)
	report, err := f.book.Sweep(t.Context(), f.pool, holds.SweepOptions{})
	require.ErrorContains(t, err, `scope "broken"`)
	require.Equal(t, 2, report.Behind)
	require.Equal(t, []int{60, 60, 0}, []int{f.open("broken"), f.open("locked"), f.open("sound")})
	require.Equal(t, 60, report.Expired)
	require.NoError(t, tx.Rollback(t.Context()))
	execute(t, f.pool, "drop trigger refuse on metered.ledger")

	ctx, cancel := context.WithCancel(t.Context())
	report, err = f.book.Sweep(ctx, f.pool, holds.SweepOptions{Batch: 25, Progress: func(r holds.SweepReport) {
		if r.Expired > 0 {
			cancel()
		}
	}})
	require.ErrorIs(t, err, context.Canceled)
	require.Equal(t, []int{25, 2}, []int{report.Expired, report.Behind}, "what was committed stays")
	report, err = f.book.Sweep(t.Context(), f.pool, holds.SweepOptions{Batch: 25, Max: 2})
	require.NoError(t, err)
	require.Equal(t, []int{50, 0}, []int{report.Expired, report.Behind}, "their units are free, and pages clear the rows")
	f.pile("next", 60, false)
	f.clock.Advance(time.Hour)
	report, err = f.book.Sweep(t.Context(), f.pool, holds.SweepOptions{Max: 1})
	require.NoError(t, err)
	require.Equal(t, []int{45, 1}, []int{report.Expired, report.Behind}, "it says what it left")
	report, err = f.book.Sweep(t.Context(), f.pool, holds.SweepOptions{})
	require.NoError(t, err)
	require.Equal(t, []int{60, 0}, []int{report.Expired, report.Behind})
	require.Zero(t, f.open("broken")+f.open("locked"))
	f.verify()
}

// Rows of lines that a sum freed are cleared while another call keeps their scope locked, by a page and by a step.
func TestSweep_ClearsRowsThatASumLeftWithoutTheScopesLock(t *testing.T) {
	t.Parallel()
	for name, behind := range map[string]int{"page": 0, "step": 1} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := setUp(t, holds.Config{})
			f.pile("a", 60, true)
			f.clock.Advance(time.Hour)
			_, err := f.charge(budget.Charge{Scope: "a", Amount: 1})
			require.NoError(t, err)
			placeMany(f, 60*behind, time.Minute, "a")
			f.clock.Advance(time.Hour)
			busy := begin(t, f.pool, pgx.ReadCommitted)
			require.NoError(t, f.ledger.Lock(t.Context(), busy, "a"))
			report, err := f.book.Sweep(t.Context(), f.pool, holds.SweepOptions{})
			require.NoError(t, err)
			require.Equal(t, []int{60, 0, behind}, []int{report.Expired, report.Skipped, report.Behind})
			require.Equal(t, 60*behind, f.open("a"))
			require.NoError(t, busy.Rollback(t.Context()))
			f.verify()
		})
	}
}

// A hold whose row another call has locked keeps no other waiting: its units come free with the sum, and its row is left.
func TestSweep_ALockedHoldOfAScopeThatIsBehindIsLeft(t *testing.T) {
	t.Parallel()
	f := setUp(t, holds.Config{})
	f.pile("a", 60, true)
	f.clock.Advance(time.Hour)
	busy := begin(t, f.pool, pgx.ReadCommitted)
	_, err := busy.Exec(t.Context(), "select from metered.holds where id in ('a/1', 'a/10') for update")
	require.NoError(t, err)
	report, err := f.book.Sweep(t.Context(), f.pool, holds.SweepOptions{})
	require.NoError(t, err)
	require.Equal(t, []int{58, 1}, []int{report.Expired, report.Behind})
	require.Zero(t, lastHeld(f, "a"))
	require.NoError(t, busy.Rollback(t.Context()))
	report, err = f.book.Sweep(t.Context(), f.pool, holds.SweepOptions{})
	require.NoError(t, err)
	require.Equal(t, []int{2, 0, 0}, []int{report.Expired, report.Behind, f.open("a")})
	f.verify()
}

// A hold with units of two scopes that are both behind is announced once, when it has ended in both.
func TestSweep_AHoldOfTwoScopesThatAreBehindIsAnnouncedOnce(t *testing.T) {
	t.Parallel()
	heard := map[string]int{}
	f := setUp(t, holds.Config{Subscribers: []holds.Subscriber{func(_ context.Context, _ pgx.Tx, tr holds.Transition) error {
		if tr.Kind == holds.EventExpired {
			heard[tr.Hold.ID]++
		}
		return nil
	}}})
	for n := range 60 {
		f.mustPlace(holds.Placement{ID: fmt.Sprint(n), TTL: time.Minute, Lines: []holds.Line{{Scope: "a", Amount: 1}, {Scope: "b", Amount: 1}, {Scope: fmt.Sprint("c/", n), Amount: 1}}})
		f.clock.Advance(time.Millisecond)
	}
	f.clock.Advance(time.Hour)
	report, err := f.book.Sweep(t.Context(), f.pool, holds.SweepOptions{})
	require.NoError(t, err)
	again, err := f.book.Sweep(t.Context(), f.pool, holds.SweepOptions{})
	require.NoError(t, err)
	require.Equal(t, 60, report.Expired+again.Expired)
	require.Len(t, heard, 60)
	for id, n := range heard {
		require.Equal(t, 1, n, id)
	}
	require.Zero(t, queryRow[int](t, f.pool, "select count(*) from metered.hold_lines where open > 0"))
	u, err := f.ledger.Usage(t.Context(), f.pool, budget.Query{Scope: "a"})
	require.NoError(t, err)
	require.Zero(t, u[0].Held)
	f.verify()
}

// A charge that needs the room of many due holds frees their sum by one entry, however many they are,
// and the next charge finds nothing due. Their rows are left to sweeps, which announce each once.
func TestCharge_FreesTheSumOfManyDueHolds(t *testing.T) {
	t.Parallel()
	for name, least := range map[string]bool{"plain": false, "with minima": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := setUp(t, holds.Config{})
			many := pgtest.Size(300, 5_000)
			f.pile("big", many, least)
			minima := 0
			if least {
				minima = many / 10
			}
			f.mustPlace(holds.Placement{ID: "live", TTL: time.Hour, Lines: []holds.Line{{Scope: "big", Amount: 7}}})
			f.clock.Advance(30 * time.Minute)
			steps := (max(minima, 25) - 1) / 25 // each frees a sum
			charge := func(amount int64) (budget.Posted, error) {
				return f.ledger.ChargeNow(t.Context(), f.pool, budget.Charge{Scope: "big", Amount: amount, Limits: []budget.Limit{budget.Lifetime(int64(2*many + 7 + minima))}})
			}
			_, err := charge(int64(2*many) + 1)
			require.ErrorIs(t, err, budget.ErrExceeded)
			_, err = charge(int64(2 * many))
			require.NoError(t, err)
			require.EqualValues(t, 7, lastHeld(f, "big"))
			used, held := f.usage("big")
			require.Equal(t, []int64{int64(2*many + minima), 7}, []int64{used, held})
			require.Equal(t, many+1, f.open("big"), "their rows are as they were")
			require.EqualValues(t, many+1+minima+steps+2, queryRow[int](t, f.pool, "select max(seq) from metered.ledger where scope = 'big'"))
			f.sums()
			_, err = charge(1)
			require.ErrorIs(t, err, budget.ErrExceeded)
			h, ended, err := f.expire(holds.Expire{ID: "big/2", Deadline: f.get("big/2").Deadline})
			require.NoError(t, err)
			require.True(t, ended)
			require.Equal(t, holds.Expired, h.State)
			require.Equal(t, many, f.open("big"))
			_, err = f.release("big/3")
			require.ErrorIs(t, err, holds.ErrState)
			f.sums()
			f.checkLedger()
			report, err := f.book.Sweep(t.Context(), f.pool, holds.SweepOptions{})
			require.NoError(t, err)
			require.Equal(t, many-1, report.Expired)
			require.Zero(t, report.Skipped+report.Behind)
			require.EqualValues(t, many+1+minima+steps+2, queryRow[int](t, f.pool, "select max(seq) from metered.ledger where scope = 'big'"))
			require.Equal(t, 1, f.open("big"))
			_, err = f.capture(holds.Capture{IDs: []string{"live"}, All: true})
			require.NoError(t, err)
			f.verify()
		})
	}
}

// checkLedger expects no difference.
func (f *fixture) checkLedger() {
	f.Helper()
	r, err := f.ledger.Verify(f.Context(), f.pool, budget.VerifyOptions{})
	require.NoError(f, err)
	require.Empty(f, r.Differences)
}

// Units that were freed with a sum are freed for good. If the clock is set back, no call ends the hold
// otherwise, and a new hold that falls due before them is counted by itself.
func TestCharge_WhatASumFreedStaysFreeIfTheClockGoesBack(t *testing.T) {
	t.Parallel()
	f := setUp(t, holds.Config{})
	f.pile("a", 60, false)
	f.clock.Advance(time.Hour)
	at := noon.Add(time.Hour)
	_, err := f.charge(budget.Charge{Scope: "a", Amount: 120, Limits: []budget.Limit{budget.Lifetime(120)}})
	require.NoError(t, err)
	f.clock.Set(at.Add(-time.Hour))
	for what, call := range map[string]func() error{
		"capture": func() error { _, err := f.capture(holds.Capture{IDs: []string{"a/5"}, All: true}); return err },
		"release": func() error { _, err := f.release("a/5"); return err },
		"extend":  func() error { _, err := f.extend(time.Minute, "a/5"); return err },
	} {
		require.ErrorIs(t, call(), budget.ErrSerialization, what)
	}
	_, held := f.usage("a")
	require.Zero(t, held)
	f.mustPlace(holds.Placement{ID: "soon", TTL: time.Second, Lines: []holds.Line{capacity("a", 3, 123)}})
	_, err = f.place(holds.Placement{ID: "too much", TTL: time.Second, Lines: []holds.Line{capacity("a", 1, 123)}})
	require.ErrorIs(t, err, budget.ErrExceeded)
	require.EqualValues(t, 3, lastHeld(f, "a"))
	f.sums()
	f.clock.Advance(2 * time.Second)
	f.mustPlace(holds.Placement{ID: "next", TTL: time.Minute, Lines: []holds.Line{capacity("a", 3, 123)}})
	require.EqualValues(t, 3, lastHeld(f, "a"))
	f.clock.Set(at.Add(time.Hour))
	_, err = f.book.Sweep(t.Context(), f.pool, holds.SweepOptions{})
	require.NoError(t, err)
	require.Zero(t, lastHeld(f, "a"))
	require.Zero(t, f.open("a"))
	f.verify()
}

// Rows that a sum left are locked in the order of holds, as a sweep does without the scope's lock: neither waits for the other
// while the other waits for it.
func TestPlace_LocksRowsThatASumLeftAsASweepDoes(t *testing.T) {
	t.Parallel()
	f := setUp(t, holds.Config{})
	for n := range 30 { // the last hold falls due first
		f.mustPlace(holds.Placement{ID: fmt.Sprint(n), TTL: time.Duration(60-n) * time.Second, Lines: []holds.Line{{Scope: "a", Amount: 1}}})
	}
	f.clock.Advance(time.Hour)
	_, err := f.charge(budget.Charge{Scope: "a", Amount: 1})
	require.NoError(t, err)
	f.clock.Advance(-time.Hour)
	sweep := begin(t, f.pool, pgx.ReadCommitted)
	lock := func(which string) error {
		_, err := sweep.Exec(t.Context(), "select from metered.hold_lines where hold = (select "+which+"(hold) from metered.hold_lines where scope = 'a') for update nowait")
		return err
	}
	require.NoError(t, lock("min"))
	placed := pgtest.Going(func() error {
		_, err := f.place(holds.Placement{ID: "soon", TTL: time.Second, Lines: []holds.Line{{Scope: "a", Amount: 1}}})
		return err
	})
	pgtest.WaitQueued(t, f.pool, 1)
	require.NoError(t, lock("max"))
	require.NoError(t, sweep.Commit(t.Context()))
	require.NoError(t, <-placed)
	require.Equal(t, 1, f.open("a"))
	f.clock.Advance(2 * time.Hour)
	_, err = f.book.Sweep(t.Context(), f.pool, holds.SweepOptions{})
	require.NoError(t, err)
	require.Zero(t, lastHeld(f, "a"))
	f.verify()
}

// Rows that a sum left are no units of a wallet that the scope becomes, nor of a claim or a scope that
// is closed.
func TestCharge_RowsThatASumLeftHoldNothing(t *testing.T) {
	t.Parallel()
	f := setUp(t, holds.Config{})
	key := holds.Key{Type: "name", Value: "x"}
	_, err := f.claim(holds.Claim{Key: key, Holder: "first"})
	require.NoError(t, err)
	scope, err := key.Scope("")
	require.NoError(t, err)
	for i := range 40 {
		f.mustPlace(holds.Placement{ID: fmt.Sprint(i), TTL: time.Minute, Lines: []holds.Line{capacity(scope, 1, 100), {Scope: "w", Amount: 1}}})
	}
	_, err = do(f, func(ctx context.Context, tx pgx.Tx) (budget.Posted, error) {
		return f.ledger.Credit(ctx, tx, budget.Credit{Scope: "w", Amount: 101})
	})
	require.NoError(t, err)
	f.clock.Advance(24 * time.Hour)
	_, err = f.claim(holds.Claim{Key: key, Holder: "another", TTL: time.Hour})
	require.NoError(t, err)
	require.Equal(t, 42, f.open(scope))
	f.sums()

	f.mustPlace(holds.Placement{ID: "live", TTL: time.Hour, Lines: []holds.Line{{Scope: "w", Amount: 1}}})
	_, err = f.charge(budget.Charge{Scope: "w", Amount: 100, Limits: []budget.Limit{budget.Prepaid(0)}})
	require.NoError(t, err)
	require.Equal(t, 41, f.open("w"))
	book, err := wallet.New(f.ledger, wallet.Config{})
	require.NoError(t, err)
	_, err = do(f, func(ctx context.Context, tx pgx.Tx) (wallet.Granted, error) {
		return book.Grant(ctx, tx, wallet.Grant{Wallet: "w", Amount: 10})
	})
	require.NoError(t, err)
	b, err := book.Balance(t.Context(), f.pool, "w")
	require.NoError(t, err)
	require.Equal(t, []int64{10, 1}, []int64{b.Units, b.Held})
	f.checkLedger()
	_, err = f.book.Sweep(t.Context(), f.pool, holds.SweepOptions{})
	require.NoError(t, err)
	require.Equal(t, 1, f.open("w"))
	_, err = f.capture(holds.Capture{IDs: []string{"live"}, All: true})
	require.NoError(t, err)
	f.verify()
}

// An old snapshot does not see that a hold was extended, and frees nothing of it.
func TestCharge_AnOldSnapshotFreesNoHoldThatWasExtended(t *testing.T) {
	t.Parallel()
	for _, level := range []pgx.TxIsoLevel{pgx.RepeatableRead, pgx.Serializable} {
		f := setUp(t, holds.Config{})
		f.pile("a", 60, false)
		old := begin(t, f.pool, level)
		_, err := old.Exec(t.Context(), "select count(*) from metered.hold_lines")
		require.NoError(t, err)
		f.clock.Advance(30 * time.Second)
		_, err = f.extend(2*time.Hour, "a/60")
		require.NoError(t, err)
		f.clock.Advance(time.Hour)
		_, err = f.ledger.Charge(t.Context(), old, budget.Charge{Scope: "a", Amount: 119, Limits: []budget.Limit{budget.Lifetime(120)}})
		require.ErrorIs(t, err, budget.ErrSerialization)
		require.NoError(t, old.Rollback(t.Context()))
		next := begin(t, f.pool, level)
		_, err = f.ledger.Charge(t.Context(), next, budget.Charge{Scope: "a", Amount: 119, Limits: []budget.Limit{budget.Lifetime(120)}})
		require.ErrorIs(t, err, budget.ErrExceeded)
		require.NoError(t, next.Rollback(t.Context()))
		next = begin(t, f.pool, level)
		_, err = f.ledger.Charge(t.Context(), next, budget.Charge{Scope: "a", Amount: 118, Limits: []budget.Limit{budget.Lifetime(120)}})
		require.NoError(t, err)
		require.NoError(t, next.Commit(t.Context()))
		require.EqualValues(t, 2, lastHeld(f, "a"))
		f.sums()
	}
}

// Rows that a sum left are ended by any sweep, also where the scope has many due holds again, and by
// Expire, also where it is the first to write a sum.
func TestSweep_EndsWhatASumLeftInAScopeThatIsBehindAgain(t *testing.T) {
	t.Parallel()
	f := setUp(t, holds.Config{})
	f.pile("a", 60, true)
	f.clock.Advance(time.Hour)
	_, ended, err := f.expire(holds.Expire{ID: "a/7", Deadline: f.get("a/7").Deadline})
	require.NoError(t, err)
	require.True(t, ended)
	_, err = f.charge(budget.Charge{Scope: "a", Amount: 1})
	require.NoError(t, err)
	require.Equal(t, 59, f.open("a"))
	placeMany(f, 60, time.Minute, "a")
	f.clock.Advance(time.Hour)
	report, err := f.book.Sweep(t.Context(), f.pool, holds.SweepOptions{})
	require.NoError(t, err)
	require.Equal(t, 119, report.Expired)
	require.Zero(t, report.Skipped+report.Behind)
	require.Zero(t, f.open("a"))
	f.verify()
}

// Holds of the transaction itself that a sum freed are none of the units that it holds.
func TestRefusal_CountsNoOwnHoldThatASumFreed(t *testing.T) {
	t.Parallel()
	f := setUp(t, holds.Config{})
	f.mustPlace(holds.Placement{ID: "another", TTL: time.Hour, Lines: []holds.Line{capacity("a", 5, 100)}})
	tx := begin(t, f.pool, pgx.ReadCommitted)
	place := func(id string, n int64) {
		_, err := f.book.Place(t.Context(), tx, holds.Placement{ID: id, TTL: time.Minute, Lines: []holds.Line{capacity("a", n, 100)}})
		require.NoError(t, err)
	}
	for i := range 40 {
		place(fmt.Sprint(i), 1)
	}
	f.clock.Advance(2 * time.Minute)
	place("own", 2)
	_, err := f.ledger.Charge(t.Context(), tx, budget.Charge{Scope: "a", Amount: 94, Limits: []budget.Limit{budget.Lifetime(100)}})
	var exceeded *budget.ExceededError
	require.ErrorAs(t, err, &exceeded)
	require.Equal(t, []int64{5, 2}, []int64{exceeded.Refusals[0].Held, exceeded.Refusals[0].OwnHeld})
}

// A charge of a scope in which many holds are due is no part of a batch: what it writes first keeps no
// other scope locked.
func TestBatcher_AScopeThatIsBehindKeepsNoOtherWaiting(t *testing.T) {
	t.Parallel()
	f := setUp(t, holds.Config{})
	f.pile("big", 60, true)
	f.clock.Advance(time.Hour)
	execute(t, f.pool, `create function stop() returns trigger language plpgsql as $$ begin
		perform pg_advisory_xact_lock(42); return new; end $$;
		create trigger stop before insert on metered.ledger for each row when (new.scope = 'big') execute function stop()`)
	b, err := budget.NewBatcher(f.pool, f.ledger, budget.BatcherConfig{Lanes: 1, Timeout: 5 * time.Minute})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, b.Close(context.Background())) })
	stop := begin(t, f.pool, pgx.ReadCommitted)
	_, err = stop.Exec(t.Context(), "select pg_advisory_xact_lock(42)")
	require.NoError(t, err)
	slow := make(chan error, 4)
	for range cap(slow) {
		go func() { _, err := b.Charge(t.Context(), budget.Charge{Scope: "big", Amount: 1}); slow <- err }()
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	for range 10 {
		each := make(chan error, 3)
		for n := range cap(each) {
			go func() {
				_, err := b.Charge(ctx, budget.Charge{Scope: fmt.Sprint("small/", n), Amount: 1})
				each <- err
			}()
		}
		for range cap(each) {
			require.NoError(t, <-each)
		}
	}
	require.Empty(t, slow)
	require.NoError(t, stop.Rollback(t.Context()))
	for range cap(slow) {
		require.NoError(t, <-slow)
	}
	require.Zero(t, lastHeld(f, "big"))
	used, _ := f.usage("big")
	require.EqualValues(t, 6+4, used)
	f.sums()
}
