package wallet_test

import (
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/wallet"
)

// folded is what time alone makes of a wallet: its lots without their numbers, and its sums.
type folded struct {
	Credited, Spent, Held, Lapsed, Granted, Balance int64
	Lots                                            []string
}

// foldSQL loads all that is due in a wallet, and applies it by one of two functions.
const foldSQL = `
with tip as (select l from metered.ledger l where l.scope = $1 order by l.seq desc limit 1),
due as (select d.* from tip, metered._load_due(tip.l, $2, $3, 0, null, true, null) d),
after as (select a.* from tip, due d, metered.%s(tip.l, $2, (tip.l).crossed, null, d.lines, d.lots, d.parts, d.debts, d.spent) a),
lots as (select x.* from after, unnest(after.lots) x)
select json_build_object('Credited', (a.tip).credited, 'Spent', (a.tip).spent, 'Held', (a.tip).held,
    'Lapsed', (select sum(x.lapsed) from lots x), 'Granted', (select sum(x.amount - x.pending) from lots x where x.origin = 'g'),
    'Balance', metered._balance(a.tip), 'Lots', (
        select json_agg(concat_ws(' ', x.reference, (x.plan).of_reference, x.origin, x.category, x.priority, 'starts', x.starts_at, 'granted', x.granted_at,
            'ends', x.expires_at, 'goes on until', x.roll_end, 'cap', x.roll_cap, 'has', x.amount, x.pending, x.rest, x.kept, x.held, x.drawn,
            'age', x.age[1], x.plan, x.open, x.keeps, x.again) order by x.age)
        from lots x where x.pending + x.rest + x.kept + x.held > 0)), cardinality(a.entries)
from after a`

func (f *fixture) fold(function, scope string, writes bool) (all folded, entries int) {
	f.Helper()
	var most *int
	if !writes {
		most = new(int) // as readers do
	}
	var text []byte
	require.NoError(f, f.pool.QueryRow(f.Context(), fmt.Sprintf(foldSQL, function), scope, f.clock.Now(), most).Scan(&text, &entries))
	require.NoError(f, json.Unmarshal(text, &all))
	return all, entries
}

// What plans repeat is skipped: the lots and the sums after that are those of one event after the other.
func TestIdle_WhatIsSkippedIsWhatHappensEventByEvent(t *testing.T) {
	t.Parallel()
	berlin, err := time.LoadLocation("Europe/Berlin")
	require.NoError(t, err)
	f := setUp(t, wallet.Config{Overdraft: 3})
	random := rand.New(rand.NewPCG(45, 1))
	skipped := 0
	for n := range pgtest.Size(5, 400) {
		scope, caps := fmt.Sprint("w", n), random.Int64N(12)+1
		zone := []*time.Location{time.UTC, berlin}[random.IntN(2)]
		f.clock.Set(noon.Add(time.Duration(random.IntN(24*365)) * time.Hour))
		f.grant(wallet.Grant{Wallet: scope, Amount: 9, Reference: "paid", Ends: wallet.After(time.Duration(random.IntN(80)+1) * day)})
		for i := range random.IntN(3) + 1 {
			priority := random.IntN(2)
			daily := budget.Per(1, budget.Day, zone, time.Time{}).Period
			g := wallet.Grant{
				Wallet: scope, Amount: random.Int64N(7) + 1, Reference: fmt.Sprint("plan", i), Ends: wallet.EachPeriod(daily),
				Category: []string{"", "other"}[random.IntN(2)], Priority: &priority,
			}
			switch random.IntN(8) {
			case 0:
				g.Ends = wallet.EachPeriod(budget.Per(1, budget.Week, zone, time.Time{}).Period)
			case 1:
				g.Ends = wallet.EachPeriod(budget.PerPeriod(1, 36*time.Hour, f.clock.Now()).Period)
			case 2, 3:
				g.Ends = wallet.EachPeriodProrated(daily)
			}
			if random.IntN(4) == 0 {
				g.Uses = []string{"images"}
			}
			if random.IntN(4) > 0 {
				g.Roll = &wallet.Roll{Cap: caps, Shared: random.IntN(3) > 0, Times: random.IntN(4),
					Lasts: wallet.For(time.Duration(random.IntN(96)+24) * time.Hour)}
				if random.IntN(3) == 0 {
					g.Roll.Lasts = wallet.ToEndOf(daily)
				}
				if g.Roll.Shared && random.IntN(3) == 0 {
					g.Roll.Times = -1
				}
			}
			f.grant(g)
		}
		if random.IntN(2) == 0 {
			_, err := f.tryDraw(toDraw{Wallet: scope, Amount: random.Int64N(9) + 1})
			require.NoError(t, err)
		}
		f.clock.Advance(time.Duration(random.IntN(24*130)+24*20) * time.Hour)
		writes := random.IntN(2) == 0
		want, each := f.fold("_advance_each", scope, writes)
		have, entries := f.fold("_advance", scope, writes)
		require.Equal(t, want, have, "%s", scope)
		require.LessOrEqual(t, entries, each+each/10+20)
		if entries < each {
			skipped++
		}
		t.Logf("%s: %d entries in place of %d", scope, entries, each)
		_, err := f.tryDraw(toDraw{Wallet: scope, Amount: 1, UpTo: true})
		require.NoError(t, err)
	}
	require.Greater(t, skipped, pgtest.Size(2, 200))
}

// A wallet whose plans nobody touched for three years lets a draw in, and refuses one, by few entries. Balance, statement and
// breakage have the sums of three years.
func TestIdle_ThreeYearsOfFivePlansHaveFewEntries(t *testing.T) {
	t.Parallel()
	told := 0
	f := setUp(t, wallet.Config{Subscribers: []wallet.Subscriber{func(_ context.Context, _ pgx.Tx, b wallet.Breakage) error {
		told += int(b.Amount)
		return nil
	}}})
	plansIdle(5)(f, "ann", 3*365)
	before := f.balance()
	require.EqualValues(t, 1_000_000+5*5+8, before.Units)
	f.has(before.Units)
	f.draw(before.Units)
	require.Zero(t, f.balance().Units)
	lapsed, entries := int64(0), 0
	for line, err := range f.book.Statement(t.Context(), f.pool, "ann", budget.EntriesOptions{}) {
		require.NoError(t, err)
		entries++
		if line.Kind == budget.EntryLapse {
			lapsed += line.Amount
		}
	}
	require.Less(t, entries, 70)
	_, err := f.book.Sweep(t.Context(), f.pool, wallet.SweepOptions{})
	require.NoError(t, err)
	require.EqualValues(t, 5*5*(3*365+1)-5*5-8, told)
	require.EqualValues(t, told, lapsed)

	plansIdle(5)(f, "ben", 3*365)
	swept, err := f.book.Sweep(t.Context(), f.pool, wallet.SweepOptions{})
	require.NoError(t, err)
	require.EqualValues(t, lapsed, told-int(lapsed), "a sweep writes the same")
	require.LessOrEqual(t, swept.Batches, 4)
	ben, err := f.book.Balance(t.Context(), f.pool, "ben")
	require.NoError(t, err)
	require.Equal(t, before.Units, ben.Units)
	var skipped int
	require.NoError(t, f.pool.QueryRow(t.Context(), `select count(*) from metered.lots where scope = 'ben' and amount > 5000 and lapsed = amount
		and reference ~ '^plan[0-4] 2023-11-[0-9T:]*Z/2026-11-2[01]T00:00:00Z$'`).Scan(&skipped))
	require.Equal(t, 5, skipped, "lots that say how much lapsed from when to when")
}

// A call accepts the reference of a period that Balance showed, also if the period was skipped since: its lot has ended. What is
// no period of the plan is unknown.
func TestIdle_ReferencesOfSkippedPeriodsAreKnown(t *testing.T) {
	t.Parallel()
	f := setUp(t, wallet.Config{})
	f.clock.Set(noon.AddDate(0, 0, -90))
	f.grant(wallet.Grant{Wallet: "ann", Amount: 5, Reference: "plan", Ends: wallet.EachPeriod(daily)})
	f.clock.Advance(30 * day)
	name := f.balance().Lots[0].Reference
	f.draw(1)
	f.clock.Advance(3 * day)
	skipped := f.balance().Lots[0].Reference
	f.clock.Set(noon)
	f.draw(1)
	var known bool
	require.NoError(t, f.pool.QueryRow(t.Context(), "select exists (select from metered.lots where reference = $1)", skipped).Scan(&known))
	require.False(t, known, "it was skipped")
	for _, name := range []string{name, skipped} {
		revoked, err := do(f, func(ctx context.Context, tx pgx.Tx) (wallet.Revoked, error) {
			return f.book.Revoke(ctx, tx, wallet.Revoke{Wallet: "ann", Reference: name})
		})
		require.NoError(t, err, name)
		require.Zero(t, revoked.Amount)
		_, err = do(f, func(ctx context.Context, tx pgx.Tx) (any, error) {
			return f.book.SetEnd(ctx, tx, wallet.LotEnd{Wallet: "ann", Reference: name, Expires: noon.Add(day)})
		})
		require.ErrorIs(t, err, wallet.ErrExpired, name)
		rolled, err := do(f, func(ctx context.Context, tx pgx.Tx) (wallet.Granted, error) {
			return f.book.Rollover(ctx, tx, wallet.Rollover{Wallet: "ann", Reference: name, Cap: 3, For: day})
		})
		require.NoError(t, err, name)
		require.Zero(t, rolled.Amount)
		back, err := do(f, func(ctx context.Context, tx pgx.Tx) (wallet.Granted, error) {
			return f.book.Reinstate(ctx, tx, wallet.Revoke{Wallet: "ann", Reference: name})
		})
		require.NoError(t, err, name)
		began, err := time.Parse(time.RFC3339, name[len("plan "):])
		require.NoError(t, err)
		require.Equal(t, began.Add(day), back.Expires)
		_, err = f.tryGrant(wallet.Grant{Wallet: "ann", Amount: 5, Reference: name})
		require.ErrorIs(t, err, wallet.ErrConflict, name)
	}
	for _, name := range []string{"plan 2026-10-20T01:00:00Z", "plan 2026-10-99T00:00:00Z", "other 2026-10-20T00:00:00Z", "plan 2029-10-20T00:00:00Z"} {
		_, err := do(f, func(ctx context.Context, tx pgx.Tx) (any, error) {
			return f.book.Revoke(ctx, tx, wallet.Revoke{Wallet: "ann", Reference: name})
		})
		require.ErrorIs(t, err, wallet.ErrUnknownLot, name)
	}
}

// A series over skipped time has the draws before and after it, in their days, and nothing else.
func TestIdle_ASeriesOverSkippedTimeHasDrawsAlone(t *testing.T) {
	t.Parallel()
	f := setUp(t, wallet.Config{})
	since := noon.AddDate(0, 0, -60).Truncate(day)
	f.clock.Set(since.Add(time.Hour))
	f.grant(wallet.Grant{Wallet: "ann", Amount: 5, Reference: "plan", Ends: wallet.EachPeriod(daily), Roll: &wallet.Roll{Cap: 5, Lasts: wallet.For(day)}})
	f.draw(3)
	f.clock.Set(noon)
	f.draw(4)
	f.clock.Advance(day)
	days, err := f.ledger.Series(t.Context(), f.pool, "ann", since, since.AddDate(0, 0, 62), budget.Day, nil)
	require.NoError(t, err)
	require.Len(t, days, 62)
	for i, d := range days {
		require.Equal(t, map[int]int64{0: 3, 60: 4}[i], d.Charged, "%v", d)
		require.Equal(t, d.Charged > 0, d.Charges == 1)
		require.Zero(t, d.RefundsMade)
	}
}

// Periods that never coincide are skipped as others are. So many units that no lot has them are not: a call on the wallet goes through them in steps.
func TestIdle_OddPeriodsAreSkippedAndUnlimitedPlansAreNot(t *testing.T) {
	t.Parallel()
	f := setUp(t, wallet.Config{})
	f.clock.Set(noon.AddDate(0, 0, -40))
	for i, length := range []time.Duration{day + time.Microsecond, day + 3*time.Microsecond} {
		f.grant(wallet.Grant{
			Wallet: "odd", Amount: 5, Reference: fmt.Sprint("plan", i), Ends: wallet.EachPeriod(budget.PerPeriod(1, length, noon).Period),
		})
	}
	f.grant(wallet.Grant{Wallet: "unlimited", Amount: 1 << 53, Reference: "plan", Ends: wallet.EachPeriod(daily)})
	f.clock.Set(noon)
	for scope, skipped := range map[string]bool{"odd": true, "unlimited": false} {
		want, each := f.fold("_advance_each", scope, true)
		have, entries := f.fold("_advance", scope, true)
		require.Equal(t, want, have)
		require.Equal(t, skipped, entries < each)
		require.NoError(t, pgtest.NewClient(t, f.pool, metered.Config{}).RunTx(t.Context(), pgx.TxOptions{}, func(ctx context.Context, tx pgx.Tx) error {
			_, err := f.drawIn(ctx, tx, toDraw{Wallet: scope, Amount: 1})
			return err
		}))
	}
}

// Each kind of wallet is skipped as it is, or not: overdraft that renewals pay back, lots that end or begin within the time, units
// that go on for ever, held ones, and a zone whose clocks change.
func TestIdle_EachKindIsWhatHappensEventByEvent(t *testing.T) {
	t.Parallel()
	berlin, err := time.LoadLocation("Europe/Berlin")
	require.NoError(t, err)
	f := setUp(t, wallet.Config{Overdraft: 60})
	local, weekly := budget.Per(1, budget.Day, berlin, time.Time{}).Period, budget.Per(1, budget.Week, time.UTC, time.Time{}).Period
	three := &wallet.Roll{Cap: 4, Lasts: wallet.For(3 * day), Times: 2}
	shared := &wallet.Roll{Cap: 7, Lasts: wallet.For(50 * time.Hour), Times: 2, Shared: true}
	for name, kind := range map[string]struct {
		grants []wallet.Grant
		draw   int64
		use    string
		holds  int64
	}{
		"overdrawn": {grants: []wallet.Grant{{Amount: 2, Ends: wallet.EachPeriod(daily)}}, draw: 50},
		"overdrawn for a use": {
			grants: []wallet.Grant{{Amount: 1, Uses: []string{"images"}, Ends: wallet.EachPeriod(daily), Roll: three}, {Amount: 9, Ends: wallet.EachPeriod(daily)}},
			draw:   50, use: "images",
		},
		"other ends": {grants: []wallet.Grant{{Amount: 3, Ends: wallet.EachPeriod(daily), Roll: shared}, {Amount: 9, Ends: wallet.After(50*day + time.Hour), Roll: shared}}},
		"months":     {grants: []wallet.Grant{{Amount: 9, Ends: wallet.EachPeriod(monthly), Roll: shared}, {Amount: 3, Ends: wallet.EachPeriod(local), Roll: shared}}},
		"weeks and a year": { // which begins before the next week does
			grants: []wallet.Grant{{Amount: 9, Ends: wallet.EachPeriod(budget.Per(1, budget.Year, time.UTC, noon.AddDate(0, 0, -2)).Period)},
				{Amount: 3, Ends: wallet.EachPeriod(weekly)}, {Amount: 2, Ends: wallet.EachPeriod(weekly)}},
		},
		"other begins": {
			grants: []wallet.Grant{{Amount: 3, Ends: wallet.EachPeriod(daily), Roll: shared}, {Amount: 9, Starts: noon.AddDate(0, 0, -45), Ends: wallet.EachPeriod(daily), Roll: shared}},
		},
		"a roll begins": { // it takes room, so a later day has less of it
			grants: []wallet.Grant{
				{Amount: 1, Ends: wallet.EachPeriod(daily), Roll: &wallet.Roll{Cap: 35, Lasts: wallet.For(30*day + 2*time.Hour), Times: 1, Shared: true}},
				{Amount: 9, Starts: noon.AddDate(0, 0, -45), Ends: wallet.After(5 * day), Roll: &wallet.Roll{Cap: 35, Lasts: wallet.For(60 * day), Times: 1, Shared: true}},
			},
		},
		"for ever": {grants: []wallet.Grant{{Amount: 3, Ends: wallet.EachPeriod(daily), Roll: &wallet.Roll{Cap: 8, Lasts: wallet.ToEndOf(daily), Times: -1, Shared: true}}}},
		"apart": { // of some the last units come and go before those of others
			grants: []wallet.Grant{
				{Amount: 5, Ends: wallet.After(time.Hour), Roll: &wallet.Roll{Cap: 4, Lasts: wallet.For(day), Times: -1}},
				{Amount: 9, Ends: wallet.After(50 * time.Hour), Roll: shared},
				{Amount: 7, Ends: wallet.After(50 * time.Hour), Roll: &wallet.Roll{Cap: 8, Lasts: wallet.For(36 * time.Hour), Times: -1}, Uses: []string{"images"}},
				{Amount: 3, Ends: wallet.EachPeriod(daily), Roll: three},
				{Amount: 6, Ends: wallet.After(50 * day), Roll: &wallet.Roll{Cap: 5, Lasts: wallet.For(day), Times: 40}},
				{Amount: 2, Ends: wallet.EachPeriod(daily), Roll: shared},
				{Amount: 8, Starts: noon.AddDate(0, 0, -45), Ends: wallet.After(day), Roll: &wallet.Roll{Cap: 8, Lasts: wallet.ToEndOf(daily), Times: -1}},
				{Amount: 8, Ends: wallet.After(time.Hour), Roll: &wallet.Roll{Cap: 1, Lasts: wallet.For(day), Times: -1}},
			},
			draw: 2,
		},
		"held":           {grants: []wallet.Grant{{Amount: 3, Ends: wallet.EachPeriod(daily), Roll: three}, {Amount: 9, Ends: wallet.After(200 * day)}}, holds: 4},
		"a clock is set": {grants: []wallet.Grant{{Amount: 3, Ends: wallet.EachPeriod(local), Roll: three}, {Amount: 2, Ends: wallet.EachPeriod(local)}}},
	} {
		f.clock.Set(noon.AddDate(0, 0, -100))
		for i, g := range kind.grants {
			g.Wallet, g.Reference = name, fmt.Sprint("plan", i)
			f.grant(g)
		}
		if kind.draw > 0 {
			_, err := f.tryDraw(toDraw{Wallet: name, Amount: kind.draw, Note: budget.Note{Use: kind.use}})
			require.NoError(t, err)
		}
		if kind.holds > 0 {
			_, err := do(f, func(ctx context.Context, tx pgx.Tx) (holds.Hold, error) {
				return f.holds.Place(ctx, tx, holds.Placement{TTL: 200 * day, Lines: []holds.Line{f.book.Line(name, kind.holds)}})
			})
			require.NoError(t, err)
		}
		f.clock.Set(noon)
		want, each := f.fold("_advance_each", name, true)
		have, entries := f.fold("_advance", name, true)
		require.Equal(t, want, have, name)
		t.Logf("%s: %d entries in place of %d", name, entries, each)
		require.Less(t, entries, each/2, name)
		_, err := f.tryDraw(toDraw{Wallet: name, Amount: 1})
		require.NoError(t, err, name)
	}
	var late int
	require.NoError(t, f.pool.QueryRow(t.Context(), `select count(*) from metered.lots l join metered.ledger e on e.scope = l.scope and e.seq = l.granted_seq
		where l.pending = 0 and l.rest > 0 and e.at <> l.granted_at`).Scan(&late))
	require.Zero(t, late, "lots that are left, of an entry that is not of their beginning")
	require.NoError(t, f.pool.QueryRow(t.Context(), `select count(*) from metered.lots l join metered.lot_moves m on m.lot = l.no and m.kind = 'e'
		join metered.ledger e on e.scope = m.scope and e.seq = m.seq where (l.plan).renewal is null and e.at <> l.expires_at`).Scan(&late))
	require.Zero(t, late, "lots of no plan that did not lapse at their end")
}

// Lots of which no other depends on one are foreseen each apart, however many they are: as many repetitions as there is time for are a step.
// Those that share a cap, of which each step looks at all, are not, if they are many.
func TestIdle_ManyLotsAreForeseenEachApart(t *testing.T) {
	t.Parallel()
	f := setUp(t, wallet.Config{})
	shared := wallet.Roll{Cap: 9, Lasts: wallet.For(day), Times: -1, Shared: true}
	alone := shared
	alone.Shared = false
	f.grant(wallet.Grant{Wallet: "alone", Amount: 5, Ends: wallet.After(time.Hour), Roll: &alone})
	f.grant(wallet.Grant{Wallet: "alone", Amount: 3, Ends: wallet.After(2 * time.Hour), Roll: &alone})
	f.grant(wallet.Grant{Wallet: "shared", Amount: 5, Ends: wallet.After(time.Hour), Roll: &shared})
	f.clock.Set(noon.AddDate(0, 0, 300))
	tx, err := f.pool.Begin(t.Context())
	require.NoError(t, err)
	defer tx.Rollback(context.WithoutCancel(t.Context()))
	var idle, soon, together bool
	var lots, steps int
	require.NoError(t, tx.QueryRow(t.Context(), `
		select metered._is_idle(x.alone, x.now), metered._is_idle(x.alone, x.now - interval '280 days'), metered._is_idle(x.shared, x.now)
		from (select metered.clock() as now, array(select l from metered.lots l, generate_series(1, 110) where l.scope = 'alone') as alone,
			array(select l from metered.lots l, generate_series(1, 220) where l.scope = 'shared') as shared) x`).Scan(&idle, &soon, &together))
	require.True(t, idle)
	require.False(t, soon, "one event after the other is faster")
	require.False(t, together)
	_, err = tx.Exec(t.Context(), "set local track_functions = 'pl'")
	require.NoError(t, err)
	require.NoError(t, tx.QueryRow(t.Context(), `
		select cardinality((metered._foreseen_all(array(select l from metered.lots l, generate_series(1, 110) where l.scope = 'alone'), metered.clock())).said)`).Scan(&lots))
	require.Equal(t, 220, lots)
	require.NoError(t, tx.QueryRow(t.Context(), "select calls from pg_stat_xact_user_functions where funcname = '_foreseen_next'").Scan(&steps))
	require.Less(t, steps, 220*12)
}
