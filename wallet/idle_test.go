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

	"github.com/pgmetered/metered/budget"
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
after as (select a.* from tip, due d, metered.%s(tip.l, $2, (tip.l).crossed, 0, %sd.lines, d.lots, d.parts, d.debts, d.spent) a),
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
	others := map[string]string{"_advance_each": "0, "}[function]
	var text []byte
	require.NoError(f, f.pool.QueryRow(f.Context(), fmt.Sprintf(foldSQL, function, others), scope, f.clock.Now(), most).Scan(&text, &entries))
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
			_, err := f.tryDraw(wallet.Draw{Wallet: scope, Amount: random.Int64N(9) + 1})
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
		_, err := f.tryDraw(wallet.Draw{Wallet: scope, Amount: 1, UpTo: true})
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
	require.Less(t, entries, 400)
	_, err := f.book.Sweep(t.Context(), f.pool, wallet.SweepOptions{})
	require.NoError(t, err)
	require.EqualValues(t, 5*5*(3*365+1)-5*5-8, told)
	require.EqualValues(t, told, lapsed)
}

// Periods that coincide after ages are not skipped, and neither are so many units that no lot has them: a call on the wallet goes on.
func TestIdle_OddPeriodsAndUnlimitedPlansAreNotSkipped(t *testing.T) {
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
	for _, scope := range []string{"odd", "unlimited"} {
		want, each := f.fold("_advance_each", scope, true)
		have, entries := f.fold("_advance", scope, true)
		require.Equal(t, want, have)
		require.Equal(t, each, entries)
		_, err := f.tryDraw(wallet.Draw{Wallet: scope, Amount: 1})
		require.NoError(t, err)
	}
}
