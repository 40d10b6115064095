package wallet_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/wallet"
)

// monthly is a period of calendar months in UTC. Noon is two thirds into one: 9.5 of 30 days are left.
var monthly = budget.Per(1, budget.Month, time.UTC, time.Time{}).Period

var december = time.Date(2026, 12, 1, 0, 0, 0, 0, time.UTC)

func (f *fixture) tryChange(c wallet.Change) (wallet.Changed, error) {
	if c.Wallet == "" {
		c.Wallet = "ann"
	}
	return do(f, func(ctx context.Context, tx pgx.Tx) (wallet.Changed, error) { return f.book.Change(ctx, tx, c) })
}

func (f *fixture) change(c wallet.Change) wallet.Changed {
	f.Helper()
	changed, err := f.tryChange(c)
	require.NoError(f, err)
	return changed
}

// small is a fixture with a plan of 300 units a month, of which 100 are drawn.
func small(t *testing.T, cfg wallet.Config) *fixture {
	t.Helper()
	f := setUp(t, cfg)
	f.grant(wallet.Grant{Amount: 300, Reference: "small", Ends: wallet.EachPeriod(monthly), Starts: noon.AddDate(0, 0, -10)})
	f.draw(100)
	return f
}

func TestChange_UpNow(t *testing.T) {
	t.Parallel()
	large := &wallet.Grant{Amount: 900, Ends: wallet.EachPeriodProrated(monthly)}
	for name, c := range map[string]struct {
		carry        bool
		first, taken int64
		left         map[string]int64
	}{
		"the rest is carried": {true, 600 * 19 / 60, 0, map[string]int64{"small": 200, "up": 190}},
		"the rest is dropped": {false, 900 * 19 / 60, 200, map[string]int64{"up": 285}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := small(t, wallet.Config{})
			up := wallet.Change{Reference: "up", Plan: "small", To: large, Carry: c.carry}
			changed := f.change(up)
			require.Equal(t, wallet.Changed{Plan: "small", At: noon, Ends: december, To: "up", Lot: changed.Lot, Amount: c.first,
				Expires: december, Taken: c.taken}, changed)
			require.Equal(t, c.left, f.left())
			again := f.change(up)
			require.True(t, again.Replayed)
			again.Replayed = false
			require.Equal(t, changed, again)
			f.clock.Set(december)
			require.Equal(t, map[string]int64{"up 2026-12-01T00:00:00Z": 900}, f.left(), "the old plan renews no more")
			late := f.change(up)
			require.True(t, late.Replayed)
			f.has(900)
		})
	}
}

func TestChange_AtTheEnd(t *testing.T) {
	t.Parallel()
	f := small(t, wallet.Config{})
	down := wallet.Change{Reference: "down", Plan: "small", AtEnd: true, To: &wallet.Grant{Amount: 50, Reference: "tiny", Ends: wallet.EachPeriod(monthly)}}
	changed := f.change(down)
	require.Equal(t, "tiny after small from 2026-12-01T00:00:00Z, with 50 until 2027-01-01T00:00:00Z", changed.String())
	require.Equal(t, map[string]int64{"small": 200}, f.left())
	f.clock.Set(december.Add(-time.Microsecond))
	f.has(200)
	f.clock.Set(december)
	require.Equal(t, map[string]int64{"tiny": 50}, f.left())
	_, err := f.tryChange(wallet.Change{Reference: "late", Plan: "small", Resume: true})
	require.ErrorIs(t, err, wallet.ErrExpired)
	require.ErrorContains(t, err, `the change "down" took effect at 2026-12-01T00:00:00Z`)
	_, err = f.tryChange(wallet.Change{Reference: "late", Plan: "small"})
	require.ErrorIs(t, err, wallet.ErrExpired)
	require.Equal(t, int64(10), f.change(wallet.Change{Reference: "later", Plan: "tiny", AtEnd: true, To: &wallet.Grant{Amount: 10, Ends: wallet.EachPeriod(monthly)}}).Amount)
	f.clock.Set(december.AddDate(0, 1, 0))
	f.has(10)
}

// A plan that is over has no end at which it could be changed: that is refused, where it once ran for ever.
func TestChange_AtTheEndOfAPlanThatIsOverIsRefused(t *testing.T) {
	t.Parallel()
	f := small(t, wallet.Config{})
	f.change(wallet.Change{Reference: "cancel", Plan: "small"})
	f.clock.Advance(100 * day)
	_, err := do(f, func(ctx context.Context, tx pgx.Tx) (wallet.Changed, error) {
		if _, err := tx.Exec(ctx, "set local statement_timeout = '20s'"); err != nil {
			return wallet.Changed{}, err
		}
		return f.book.Change(ctx, tx, wallet.Change{Wallet: "ann", Reference: "new", Plan: "small", AtEnd: true, To: &wallet.Grant{Amount: 10, Ends: wallet.EachPeriod(monthly)}})
	})
	require.ErrorIs(t, err, wallet.ErrExpired)
}

func TestChange_CancelAndResume(t *testing.T) {
	t.Parallel()
	f := small(t, wallet.Config{})
	cancel := wallet.Change{Reference: "cancel", Plan: "small", AtEnd: true}
	require.Equal(t, "small ends at 2026-12-01T00:00:00Z", f.change(cancel).String())
	f.has(200)
	resume := wallet.Change{Reference: "resume", Plan: "small", Resume: true}
	require.Equal(t, "small renews, in place of cancel", f.change(resume).String())
	require.True(t, f.change(cancel).Replayed, "it cancels no second time")
	require.True(t, f.change(resume).Replayed)
	f.clock.Set(december)
	f.has(300)
	f.change(wallet.Change{Reference: "cancel 2", Plan: "small", AtEnd: true})
	f.clock.Set(december.AddDate(0, 1, 0))
	require.True(t, f.change(resume).Replayed, "it resumes no second time")
	f.has(0)
	_, err := f.tryChange(wallet.Change{Reference: "resume 2", Plan: "small", Resume: true})
	require.ErrorIs(t, err, wallet.ErrExpired)

	f.grant(wallet.Grant{Amount: 300, Reference: "again", Ends: wallet.EachPeriod(monthly)})
	now := f.change(wallet.Change{Reference: "now", Plan: "again"})
	require.Equal(t, "again ends at 2027-01-01T00:00:00Z, 300 taken back", now.String())
	f.has(0)
	f.clock.Advance(40 * day)
	f.has(0)
}

// A change that waits for the period's end gives way to another one, and to a change now.
func TestChange_ALaterOneTakesThePlaceOfOneThatWaits(t *testing.T) {
	t.Parallel()
	f := small(t, wallet.Config{})
	to := func(amount int64) *wallet.Grant {
		return &wallet.Grant{Amount: amount, Ends: wallet.EachPeriod(monthly)}
	}
	f.change(wallet.Change{Reference: "1", Plan: "small", AtEnd: true, To: to(50)})
	require.Equal(t, "1", f.change(wallet.Change{Reference: "2", Plan: "small", AtEnd: true, To: to(70)}).Replaced)
	require.Equal(t, "2", f.change(wallet.Change{Reference: "3", Plan: "small", AtEnd: true}).Replaced)
	require.Equal(t, "3", f.change(wallet.Change{Reference: "4", Plan: "small", Resume: true}).Replaced)
	require.Empty(t, f.change(wallet.Change{Reference: "5", Plan: "small", AtEnd: true, To: to(60)}).Replaced)
	_, err := f.tryChange(wallet.Change{Reference: "6", Plan: "5"})
	require.ErrorIs(t, err, wallet.ErrUnknownLot)
	require.ErrorContains(t, err, "has not begun")
	require.Equal(t, "5", f.change(wallet.Change{Reference: "7", Plan: "small", To: to(80), Carry: true}).Replaced)
	f.has(280)
	f.clock.Set(december)
	f.has(80)
}

// A plan's units that were carried go with the plan after it.
func TestChange_NowTakesBackWhatEarlierChangesCarried(t *testing.T) {
	t.Parallel()
	f := small(t, wallet.Config{})
	to := &wallet.Grant{Amount: 40, Ends: wallet.EachPeriod(monthly)}
	f.change(wallet.Change{Reference: "1", Plan: "small", To: to, Carry: true})
	f.change(wallet.Change{Reference: "2", Plan: "1", To: to, Carry: true})
	f.grant(wallet.Grant{Amount: 7, Reference: "paid"})
	require.Equal(t, map[string]int64{"small": 200, "1": 40, "2": 40, "paid": 7}, f.left())
	require.Equal(t, int64(280), f.change(wallet.Change{Reference: "3", Plan: "2", To: to}).Taken)
	require.Equal(t, map[string]int64{"3": 40, "paid": 7}, f.left())
}

// Held units pay for what their hold spends. What it frees can be drawn until the period's end.
func TestChange_HeldUnitsStay(t *testing.T) {
	t.Parallel()
	f := small(t, wallet.Config{})
	f.place("h", 150, 20*day)
	changed := f.change(wallet.Change{Reference: "up", Plan: "small", To: &wallet.Grant{Amount: 900, Ends: wallet.EachPeriod(monthly)}})
	require.Equal(t, []int64{50, 150, 900}, []int64{changed.Taken, changed.Held, changed.Amount})
	f.has(900)
	_, err := do(f, func(ctx context.Context, tx pgx.Tx) ([]holds.Hold, error) {
		return f.holds.Capture(ctx, tx, holds.Capture{IDs: []string{"h"}, Lines: []holds.Line{{Scope: "ann", Amount: 110}}})
	})
	require.NoError(t, err)
	require.Equal(t, map[string]int64{"small": 40, "up": 900}, f.left())
	f.clock.Set(december)
	f.has(900)
}

// Overdraft is paid back by the first lot of the new plan. Units that rolled over stay.
func TestChange_DebtIsPaidAndRolledUnitsStay(t *testing.T) {
	t.Parallel()
	f := small(t, wallet.Config{Overdraft: 100})
	f.draw(280)
	f.change(wallet.Change{Reference: "up", Plan: "small", To: &wallet.Grant{Amount: 900, Ends: wallet.EachPeriod(monthly), Roll: &wallet.Roll{Cap: 500, Lasts: wallet.ToEndOf(monthly)}}})
	require.Equal(t, map[string]int64{"up": 820}, f.left())
	f.clock.Set(december)
	require.EqualValues(t, 1400, f.balance().Units)
	require.Equal(t, int64(900), f.change(wallet.Change{Reference: "down", Plan: "up", To: &wallet.Grant{Amount: 10, Ends: wallet.EachPeriod(monthly)}}).Taken)
	require.EqualValues(t, 510, f.balance().Units)
}

// An anchor changes now, with a period that begins at once, or with the next one, which is short then. Periods are exact over the
// end of February, and where clocks skip or repeat an hour.
func TestChange_OfTheAnchor(t *testing.T) {
	t.Parallel()
	berlin, err := time.LoadLocation("Europe/Berlin")
	require.NoError(t, err)
	at := func(year int, month time.Month, day, hour, minute int) time.Time {
		return time.Date(year, month, day, hour, minute, 0, 0, berlin)
	}
	for n, c := range []struct {
		from, now, anchor time.Time
		atEnd             bool
		begins, ends      time.Time
	}{
		{at(2027, 12, 31, 9, 0), at(2028, 2, 10, 9, 0), at(2027, 12, 30, 9, 0), true, at(2028, 2, 29, 9, 0), at(2028, 3, 30, 9, 0)},
		{at(2026, 12, 31, 9, 0), at(2027, 2, 10, 9, 0), at(2026, 12, 15, 9, 0), true, at(2027, 2, 28, 9, 0), at(2027, 3, 15, 9, 0)},
		{at(2026, 12, 31, 9, 0), at(2027, 2, 28, 8, 59), at(2027, 2, 28, 8, 59), false, at(2027, 2, 28, 8, 59), at(2027, 3, 28, 8, 59)},
		{at(2027, 1, 28, 2, 30), at(2027, 3, 1, 0, 0), at(2027, 1, 31, 2, 30), true, at(2027, 3, 28, 3, 30), at(2027, 3, 31, 2, 30)},
		{at(2027, 9, 30, 2, 30), at(2027, 10, 5, 0, 0), at(2027, 8, 31, 2, 30), true, at(2027, 10, 30, 2, 30), time.Date(2027, 10, 31, 0, 30, 0, 0, time.UTC)},
	} {
		f := setUp(t, wallet.Config{})
		f.clock.Set(c.from)
		old := budget.Per(1, budget.Month, berlin, c.from).Period
		f.grant(wallet.Grant{Amount: 100, Reference: "old", Ends: wallet.EachPeriod(old)})
		f.clock.Set(c.now)
		moved := budget.Per(1, budget.Month, berlin, c.anchor).Period
		changed := f.change(wallet.Change{Reference: "moved", Plan: "old", AtEnd: c.atEnd, To: &wallet.Grant{Amount: 100, Ends: wallet.EachPeriodProrated(moved)}})
		require.Equal(t, []time.Time{c.begins.UTC(), c.ends.UTC()}, []time.Time{changed.At, changed.Expires}, n)
		part, err := moved.Prorate(100, c.begins)
		require.NoError(t, err)
		require.Equal(t, part, changed.Amount, n)
		f.clock.Set(c.begins)
		f.has(part)
		f.clock.Set(c.ends)
		f.has(100)
	}
}

// A message comes late. The change counts from its time, in the present period.
func TestChange_OfAMessageThatComesLate(t *testing.T) {
	t.Parallel()
	f := small(t, wallet.Config{})
	to := wallet.Grant{Amount: 300, Ends: wallet.EachPeriodProrated(monthly), Starts: noon.AddDate(0, 0, -5)}
	up := wallet.Change{Reference: "up", Plan: "small", To: &to}
	changed := f.change(up)
	require.Equal(t, []any{to.Starts, int64(145)}, []any{changed.At, changed.Amount})

	f = small(t, wallet.Config{})
	to.Starts = noon.AddDate(0, 0, -21)
	_, err := f.tryChange(up)
	require.ErrorIs(t, err, wallet.ErrExpired)
	to.Starts = noon.Add(time.Hour)
	_, err = f.tryChange(up)
	require.ErrorContains(t, err, "Change.To.Starts: is in the future")
	f.has(200)
	to.Starts = noon.Add(time.Minute) // a clock that is ahead
	require.Equal(t, noon, f.change(up).At)
	f.clock.Set(december.Add(time.Hour)) // the period is over
	to = wallet.Grant{Amount: 300, Ends: wallet.EachPeriod(monthly), Starts: december.Add(-time.Hour)}
	_, err = f.tryChange(wallet.Change{Reference: "late", Plan: "up", To: &to})
	require.ErrorIs(t, err, wallet.ErrExpired)
	f.has(300)
}

// A plan that a change brought is not changed from before it on, though its period began earlier.
func TestChange_OfAMessageBeforeThePlanIsRefused(t *testing.T) {
	t.Parallel()
	f := small(t, wallet.Config{})
	f.change(wallet.Change{Reference: "1", Plan: "small", To: &wallet.Grant{Amount: 10, Ends: wallet.EachPeriod(monthly)}})
	f.clock.Advance(day)
	_, err := f.tryChange(wallet.Change{Reference: "2", Plan: "1", To: &wallet.Grant{Amount: 10, Ends: wallet.EachPeriod(monthly), Starts: noon.Add(-1)}})
	require.ErrorIs(t, err, wallet.ErrExpired)
	require.Equal(t, noon, f.change(wallet.Change{Reference: "2", Plan: "1", To: &wallet.Grant{Amount: 10, Ends: wallet.EachPeriod(monthly), Starts: noon}}).At)
}

// A refusal writes nothing, and leaves the transaction usable.
func TestChange_ARefusalWritesNothing(t *testing.T) {
	t.Parallel()
	f := small(t, wallet.Config{})
	f.grant(wallet.Grant{Amount: 1, Reference: "taken"})
	f.change(wallet.Change{Reference: "cancel", Plan: "small", AtEnd: true})
	to := &wallet.Grant{Amount: 10, Ends: wallet.EachPeriod(monthly)}
	before := f.balance()
	for want, c := range map[error]wallet.Change{
		wallet.ErrConflict:   {Reference: "cancel", Plan: "small"},
		wallet.ErrUnknownLot: {Reference: "new", Plan: "taken", To: to},
		errors.ErrUnsupported: {Reference: "new", Plan: "small", To: &wallet.Grant{Amount: 10, Ends: wallet.EachPeriod(budget.Per(1, budget.Month,
			time.FixedZone("Nowhere/Land", 3600), time.Time{}).Period)}},
	} {
		_, err := do(f, func(ctx context.Context, tx pgx.Tx) (int64, error) {
			c.Wallet = "ann"
			if _, err := f.book.Change(ctx, tx, c); err == nil || want != errors.ErrUnsupported && !errors.Is(err, want) {
				return 0, fmt.Errorf("%v is not %v", err, want)
			}
			var one int64
			return one, tx.QueryRow(ctx, "select 1").Scan(&one)
		})
		require.NoError(t, err)
	}
	_, err := f.tryChange(wallet.Change{Reference: "new", Plan: "small", To: &wallet.Grant{Amount: 10, Ends: wallet.EachPeriod(monthly), Reference: "taken"}})
	require.ErrorIs(t, err, wallet.ErrConflict)
	_, err = f.tryChange(wallet.Change{Reference: "new", Plan: "nothing"})
	require.ErrorIs(t, err, wallet.ErrUnknownLot)
	_, err = f.tryChange(wallet.Change{Reference: "new", Plan: "small", Wallet: "ben"})
	require.ErrorIs(t, err, wallet.ErrUnknownLot)
	after := f.balance()
	require.Equal(t, before.Seq, after.Seq)
	require.Equal(t, 1, pgtest.Count(t, f.pool, "metered.plan_changes"))
}

func TestChange_RefusesHostileArguments(t *testing.T) {
	t.Parallel()
	f := small(t, wallet.Config{})
	to, long := &wallet.Grant{Amount: 10, Ends: wallet.EachPeriod(monthly)}, strings.Repeat("x", 256)
	with := func(change func(*wallet.Grant)) *wallet.Grant { g := *to; change(&g); return &g }
	for field, c := range map[string]wallet.Change{
		"Change.Reference ":  {Plan: "small"},
		"Change.Reference":   {Plan: "small", Reference: long},
		"Change.Plan ":       {Reference: "r"},
		"Change.Plan":        {Reference: "r", Plan: "a\x00"},
		"Change.Wallet":      {Reference: "r", Plan: "small", Wallet: long},
		"Change.Resume":      {Reference: "r", Plan: "small", Resume: true, To: to},
		"Change.Resume ":     {Reference: "r", Plan: "small", Resume: true, AtEnd: true},
		"Change.Carry":       {Reference: "r", Plan: "small", AtEnd: true, Carry: true},
		"Change.To.Ends":     {Reference: "r", Plan: "small", To: &wallet.Grant{Amount: 1}},
		"Change.To.Amount":   {Reference: "r", Plan: "small", To: with(func(g *wallet.Grant) { g.Amount = -1 })},
		"Change.To.Wallet":   {Reference: "r", Plan: "small", To: with(func(g *wallet.Grant) { g.Wallet = "ben" })},
		"Change.To.Starts":   {Reference: "r", Plan: "small", AtEnd: true, To: with(func(g *wallet.Grant) { g.Starts = noon })},
		"Change.To.Referenc": {Reference: "small", Plan: "small", To: to},
		"Change.To.Roll":     {Reference: "r", Plan: "small", To: with(func(g *wallet.Grant) { g.Roll = &wallet.Roll{Times: 3} })},
	} {
		_, err := f.tryChange(c)
		var argument *budget.ArgumentError
		require.ErrorAs(t, err, &argument, field)
		require.True(t, strings.HasPrefix(argument.Field, strings.TrimSpace(field)), "%s: %v", field, err)
	}
	require.Zero(t, pgtest.Count(t, f.pool, "metered.plan_changes"))
}

// Callers at once make a change once, at every isolation level.
func TestChange_AtOnceIsOnce(t *testing.T) {
	t.Parallel()
	f := small(t, wallet.Config{})
	for _, level := range pgtest.IsolationLevels {
		up := wallet.Change{Wallet: "ann", Reference: "to " + string(level), Plan: "small", AtEnd: true,
			To: &wallet.Grant{Amount: 900, Ends: wallet.EachPeriod(monthly)}}
		require.NoError(t, pgtest.InParallel(8, func(int) error {
			for {
				err := pgx.BeginTxFunc(context.Background(), f.pool, pgx.TxOptions{IsoLevel: level}, func(tx pgx.Tx) error {
					_, err := f.book.Change(context.Background(), tx, up)
					return err
				})
				var failed *pgconn.PgError
				if !errors.As(err, &failed) || failed.Code != "40001" {
					return err
				}
			}
		}))
	}
	require.Equal(t, len(pgtest.IsolationLevels), pgtest.Count(t, f.pool, "metered.plan_changes"))
	f.clock.Set(december)
	f.has(900)
}

// A purge takes a change when no lot of its plan is left that has not ended.
func TestChange_APurgeForgetsItWithItsPlan(t *testing.T) {
	t.Parallel()
	f := small(t, wallet.Config{})
	f.change(wallet.Change{Reference: "up", Plan: "small", To: &wallet.Grant{Amount: 900, Ends: wallet.EachPeriod(monthly)}, Carry: true})
	purge := func() int {
		for range 40 {
			f.draw(1)
		}
		f.clock.Advance(time.Second)
		_, err := f.ledger.Purge(t.Context(), f.pool, budget.PurgeOptions{OlderThan: time.Microsecond})
		require.NoError(t, err)
		return pgtest.Count(t, f.pool, "metered.plan_changes")
	}
	f.clock.Advance(time.Hour)
	require.Equal(t, 1, purge())
	f.clock.Set(december.Add(time.Hour))
	require.Zero(t, purge())
	f.has(860)
}
