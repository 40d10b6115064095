package budget_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"reflect"
	"slices"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/pgtest"
)

// happened is one thing that the test did to a scope, at a time that it had set.
type happened struct {
	at        time.Time
	charged   int64
	credited  int64
	refunded  int64
	refundsOf time.Time // when the charge was that is refunded
	lease     int64     // spent from it
}

// life drives a scope through charges, refunds, credits, late events, holds, leases and purges, in the days around a
// change of some place's clock, and keeps a plain list of its acts.
type life struct {
	*rand.Rand
	t     testing.TB
	pool  *pgxpool.Pool
	l     *budget.Ledger
	book  *holds.Book
	clock *pgtest.Clock
	loc   *time.Location
	scope string

	now     time.Time
	log     []happened
	charges []budget.Posted
	left    map[int64]int64 // of a charge, by its number
	held    []holds.Hold
	leases  []*ownLease
}

type ownLease struct {
	no, fence, granted, spent int64
	settled                   bool
}

var lifePlaces = []string{"Europe/Berlin", "America/New_York", "America/Sao_Paulo", "Asia/Kolkata", "Africa/Cairo", "Pacific/Auckland", "UTC"}

func (x *life) tx(f func(pgx.Tx) error) {
	require.NoError(x.t, pgx.BeginFunc(x.t.Context(), x.pool, f))
}

func (x *life) pass() {
	unit := []time.Duration{time.Microsecond, time.Minute, time.Hour, 24 * time.Hour}[x.IntN(4)]
	x.now = x.now.Add(time.Duration(1+x.IntN(30)) * unit)
	if x.IntN(3) == 0 { // a full hour is the edge of a bucket, mostly
		x.now = x.now.Truncate(time.Hour).Add(time.Hour).Add(time.Duration(x.IntN(3)-1) * time.Microsecond)
	}
	x.clock.Set(x.now)
}

func (x *life) charge() {
	posted := mustCharge(x.t, x.pool, x.l, x.scope, int64(1+x.IntN(9)))
	x.charges, x.left[posted.Seq] = append(x.charges, posted), posted.Amount
	x.log = append(x.log, happened{at: x.now, charged: posted.Amount})
}

// late counts an event that happened long before: it counts now.
func (x *life) late() {
	e := event(fmt.Sprint(x.scope, len(x.log), x.IntN(1e9)), x.scope, int64(1+x.IntN(5)))
	e.OccurredAt = x.now.Add(-time.Duration(x.IntN(30*24)) * time.Hour)
	results, err := ingest(x.t.Context(), x.pool, x.l, e)
	require.NoError(x.t, err)
	require.NoError(x.t, results[0].Err)
	x.log = append(x.log, happened{at: x.now, charged: e.Amount})
}

func (x *life) refund() {
	if len(x.charges) == 0 {
		return
	}
	c := x.charges[x.IntN(len(x.charges))]
	if x.left[c.Seq] == 0 {
		return
	}
	amount := 1 + x.Int64N(x.left[c.Seq])
	err := refund(x.t.Context(), x.pool, x.l, x.scope, c.Seq, amount)
	if errors.Is(err, budget.ErrEntryPurged) {
		return
	}
	require.NoError(x.t, err)
	x.left[c.Seq] -= amount
	x.log = append(x.log, happened{at: x.now, refunded: amount, refundsOf: c.At})
}

func (x *life) credit() {
	amount := int64(1 + x.IntN(20))
	mustCredit(x.t, x.pool, x.l, x.scope, amount)
	x.log = append(x.log, happened{at: x.now, credited: amount})
}

func (x *life) place() {
	x.tx(func(tx pgx.Tx) error {
		h, err := x.book.Place(x.t.Context(), tx, holds.Placement{TTL: 8000 * time.Hour,
			Lines: []holds.Line{{Scope: x.scope, Amount: int64(5 + x.IntN(9))}}})
		x.held = append(x.held, h)
		return err
	})
}

// end releases a hold, or captures a part of it, some of which may be refunded later.
func (x *life) end() {
	if len(x.held) == 0 {
		return
	}
	id, used := x.held[0].ID, int64(x.IntN(6))
	x.held = x.held[1:]
	x.tx(func(tx pgx.Tx) error {
		_, err := x.book.Capture(x.t.Context(), tx, holds.Capture{IDs: []string{id}, Lines: []holds.Line{{Scope: x.scope, Amount: used}}})
		return err
	})
	captured := x.now
	x.log = append(x.log, happened{at: captured, charged: used})
	if used < 2 {
		return
	}
	x.pass()
	x.tx(func(tx pgx.Tx) error {
		_, err := x.book.Return(x.t.Context(), tx, holds.Return{IDs: []string{id}, Lines: []holds.Line{{Scope: x.scope, Amount: 1}}})
		return err
	})
	x.log = append(x.log, happened{at: x.now, refunded: 1, refundsOf: captured})
}

func (x *life) lease() {
	o := &ownLease{}
	require.NoError(x.t, x.pool.QueryRow(x.t.Context(), `select no, fence, granted from metered.open_lease(
		row($1, null, 30, 0, '{}', null, false, null, null), row('rows', 'me', 1, 1, '100 days', null), '1 minute', 1000)`, x.scope).
		Scan(&o.no, &o.fence, &o.granted))
	x.leases = append(x.leases, o)
}

func (x *life) spend() {
	for _, o := range x.leases {
		amount := int64(1 + x.IntN(4))
		if o.settled || o.spent+amount > o.granted {
			continue
		}
		var at *time.Time
		require.NoError(x.t, x.pool.QueryRow(x.t.Context(), `select metered.spend($1, $2, $3, $4, $5, null)`, o.no, o.fence, o.spent, amount, x.scope).Scan(&at))
		if at == nil {
			return // the lease is over
		}
		o.spent += amount
		x.log = append(x.log, happened{at: x.now, lease: o.no, charged: amount})
		return
	}
}

// settle captures the units spent of a lease: all of them count from now on.
func (x *life) settle() {
	for _, o := range x.leases {
		if o.settled {
			continue
		}
		var spent int64
		require.NoError(x.t, x.pool.QueryRow(x.t.Context(), `select spent from metered.settle_lease($1, 'me', null, 1000, null, null)`, o.no).Scan(&spent))
		require.Equal(x.t, o.spent, spent)
		o.settled = true
		for i := range x.log {
			if x.log[i].lease == o.no {
				x.log[i].at, x.log[i].lease = x.now, 0
			}
		}
		return
	}
}

func (x *life) purge() {
	_, err := x.l.Purge(x.t.Context(), x.pool, budget.PurgeOptions{Scope: x.scope, Batch: 16,
		OlderThan: time.Duration(1+x.IntN(60*24)) * time.Hour})
	require.NoError(x.t, err)
}

// live makes a random life of a scope.
func live(t testing.TB, pool *pgxpool.Pool, l *budget.Ledger, clock *pgtest.Clock, seed uint64) *life {
	book, err := holds.New(l, holds.Config{MaxTTL: 8000 * time.Hour})
	require.NoError(t, err)
	x := &life{Rand: rand.New(rand.NewPCG(seed, 1)), t: t, pool: pool, l: l, book: book, clock: clock,
		scope: fmt.Sprint("life/", seed, "/", historySerial.Add(1)), left: map[int64]int64{}}
	x.loc, err = time.LoadLocation(lifePlaces[x.IntN(len(lifePlaces))])
	require.NoError(t, err)
	_, change := time.Date(2016+x.IntN(3), time.Month(1+x.IntN(12)), 1, 0, 0, 0, 0, x.loc).ZoneBounds()
	if change.IsZero() || change.Year() > 2026 {
		change = start
	}
	x.now = change.Add(-time.Duration(x.IntN(20*24)) * time.Hour).UTC()
	x.clock.Set(x.now)
	acts := []func(){x.charge, x.charge, x.charge, x.charge, x.late, x.refund, x.refund, x.credit, x.place, x.end, x.lease, x.spend, x.spend, x.settle}
	for range 15 + x.IntN(45) {
		acts[x.IntN(len(acts))]()
		if x.IntN(3) > 0 {
			x.pass()
		}
	}
	if x.IntN(3) == 0 {
		x.purge()
		x.charge()
	}
	return x
}

// naive adds up the acts in a range, each in the bucket that a calendar shows.
func (x *life) naive(from, to time.Time, shown func(time.Time) string) map[string]budget.RangeUsage {
	all := map[string]budget.RangeUsage{}
	add := func(at time.Time, more budget.RangeUsage) {
		if at.Before(from) || !at.Before(to) {
			return
		}
		key := shown(at.In(x.loc))
		u := all[key]
		u.Charged += more.Charged
		u.Credited += more.Credited
		u.RefundedOfCharged += more.RefundedOfCharged
		u.RefundsMade += more.RefundsMade
		u.Unsettled += more.Unsettled
		u.Charges += more.Charges
		all[key] = u
	}
	for _, e := range x.log {
		if e.lease != 0 {
			add(e.at, budget.RangeUsage{Unsettled: e.charged, Charges: 1})
			continue
		}
		add(e.at, budget.RangeUsage{Charged: e.charged, Charges: min(e.charged, 1), Credited: e.credited, RefundsMade: e.refunded})
		if e.refunded > 0 {
			add(e.refundsOf, budget.RangeUsage{RefundedOfCharged: e.refunded})
		}
	}
	return all
}

var shownBy = map[budget.Unit]func(time.Time) string{
	budget.Hour:  func(t time.Time) string { return t.Format("2006-01-02 15 -0700") },
	budget.Day:   func(t time.Time) string { return t.Format("2006-01-02") },
	budget.Week:  func(t time.Time) string { y, w := t.ISOWeek(); return fmt.Sprint(y, "/", w) },
	budget.Month: func(t time.Time) string { return t.Format("2006-01") },
}

// compare asks for series of random ranges, and returns how an answer differs from the plain list.
func (x *life) compare(ctx context.Context) error {
	var first, kept time.Time // a purge left entry 1, and the entries from here on
	var second bool
	require.NoError(x.t, x.pool.QueryRow(ctx, `select (select at from metered.ledger where scope = $1 and seq = 1),
		(select at from metered.ledger where scope = $1 and seq > 1 order by seq limit 1),
		exists (select from metered.ledger where scope = $1 and seq = 2)`, x.scope).Scan(&first, &kept, &second))
	for range 12 {
		bucket := []budget.Unit{budget.Hour, budget.Day, budget.Week, budget.Month}[x.IntN(4)]
		from, to := x.moment(), x.moment()
		if to.Before(from) {
			from, to = to, from
		}
		to = to.Add(time.Microsecond)
		if x.IntN(10) == 0 {
			to = to.AddDate(0, 1, 0)
		}
		got, err := x.l.Series(ctx, x.pool, x.scope, from, to, bucket, x.loc)
		if errors.Is(err, budget.ErrArgument) {
			continue // too many hours
		}
		known := func(t time.Time) bool { return second || kept.Before(t) || !first.Before(t) }
		var purged *budget.PurgedError
		if errors.As(err, &purged) {
			if second || known(from) && known(to) && len(got) == 1 || !purged.KnownFrom.Equal(kept.Add(time.Microsecond)) {
				return fmt.Errorf("%v to %v: %w", from, to, err)
			}
			continue
		} else if err != nil {
			return err
		}
		want := x.naive(from, to, shownBy[bucket])
		for i, u := range got {
			if !known(u.From) || !known(u.To) {
				return fmt.Errorf("an answer for %v to %v, which is not known", u.From, u.To)
			}
			key := shownBy[bucket](u.From)
			expected := want[key]
			delete(want, key)
			expected.From, expected.To = u.From, u.To
			if !reflect.DeepEqual(expected, u) {
				return fmt.Errorf("%s: want %+v, got %+v", key, expected, u)
			}
			if last := i == len(got)-1; !last && !u.To.Equal(got[i+1].From) || last && !u.To.Equal(to) || i == 0 && !u.From.Equal(from) {
				return fmt.Errorf("%v to %v: not all of the range is in a bucket", from, to)
			}
		}
		if len(want) > 0 {
			return fmt.Errorf("no bucket for %v", want)
		}
	}
	return nil
}

// moment is some time, mostly near to something that happened.
func (x *life) moment() time.Time {
	at := x.log[x.IntN(len(x.log))].at
	switch x.IntN(3) {
	case 0:
		return at
	case 1:
		return at.Add(time.Duration(x.IntN(5)-2) * time.Microsecond)
	}
	return at.Truncate(24 * time.Hour)
}

// seriesSeeds is how many histories there are: enough in CI for each of the breaks below to be found, and elsewhere for the first.
var seriesSeeds = pgtest.Sizes(uint64(4), 10, 60)

// The plain list finds each way to break the look-ups, too.
func TestSeries_AgreesWithAPlainList(t *testing.T) {
	t.Parallel()
	pool, l, clock := open(t)
	var lives []*life
	for seed := range seriesSeeds {
		x := live(t, pool, l, clock, seed)
		if len(x.log) > 0 {
			require.NoError(t, x.compare(t.Context()), "seed %d, %v", seed, x.loc)
			lives = append(lives, x)
		}
	}
	requireVerified(t, pool, l)
	for name, change := range map[string][3]string{
		"an edge belongs to the range before": {"usage_before", "times[i] - interval '1 microsecond'", "times[i]"},
		"an edge is a microsecond early":      {"usage_before", "interval '1 microsecond'", "interval '2 microseconds'"},
		"refunds by their own time":           {"usage_before", `metered._refunds_after(of_scope, tip.seq, seq)`, "tip.refunded - refunded"},
		"no credit":                           {"usage_before", "tip.credited = 0", "true"},
		"purged entries count as 0":           {"usage_before", "tip.epoch = 0 and (select l.at > until", "(select true"},
		"known a microsecond earlier":         {"_usage_known_from", "since + interval '1 microsecond'", "since"},
		"spends of leases count at once":      {"_unsettled_spends", "y.settled_at is null", "true"},
		"spends of leases do not count":       {"usage_before", "tip.held > 0", "false"},
	} {
		if !pgtest.CI && name != "an edge belongs to the range before" {
			continue
		}
		var whole string
		require.NoError(t, pool.QueryRow(t.Context(), `select pg_get_functiondef(oid) from pg_proc
			where pronamespace = 'metered'::regnamespace and proname = $1`, change[0]).Scan(&whole))
		broken, places := pgtest.Replace(whole, change[1], change[2])
		require.Positive(t, places, "nothing to break: %s", name)
		execute(t, pool, broken)
		require.True(t, slices.ContainsFunc(slices.Repeat(lives, 3), func(x *life) bool { return x.compare(t.Context()) != nil }), name)
		execute(t, pool, whole)
	}
}
