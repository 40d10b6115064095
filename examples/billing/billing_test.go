package main

import (
	"bytes"
	"context"
	"fmt"
	"regexp"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/riverqueue/river"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/examples/internal/exampledb"
	"github.com/pgmetered/metered/examples/internal/exampletest"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/wallet"
)

func TestMain(m *testing.M) { exampletest.Main(m, main) }

type fixture struct {
	*service
	t     *testing.T
	clock *pgtest.Clock
	zone  *time.Location
	works bool // River does
}

// open has an account, ann, of the small plan, that subscribes at nine o'clock in Berlin on the 31st of January.
func open(t *testing.T) *fixture {
	t.Helper()
	zone, err := time.LoadLocation("Europe/Berlin")
	require.NoError(t, err)
	pool := exampletest.Open(t, serviceSQL)
	s, err := newService(pool)
	require.NoError(t, err)
	f := &fixture{service: s, t: t, zone: zone}
	f.clock = pgtest.SetClock(t, pool, f.at(1, 31, 9))
	require.NoError(t, s.subscribe(t.Context(), account{ID: "ann", Plan: "small", Zone: "Europe/Berlin", Since: f.at(1, 31, 9)}))
	return f
}

func (f *fixture) at(month time.Month, day, hour int) time.Time {
	return time.Date(2027, month, day, hour, 0, 0, 0, f.zone)
}

func (f *fixture) renders(id string, units int64) {
	f.t.Helper()
	_, err := f.render(f.t.Context(), id, "ann", units)
	require.NoError(f.t, err)
}

func (f *fixture) refuses(id string, units int64, why string) {
	f.t.Helper()
	_, err := f.render(f.t.Context(), id, "ann", units)
	require.ErrorIs(f.t, err, budget.ErrExceeded)
	require.Equal(f.t, why, explain(err))
}

// has checks the balance, in all and by category, and all sums.
func (f *fixture) has(units, plan, promo, bought int64) {
	f.t.Helper()
	b, err := f.book.Balance(f.t.Context(), f.pool, scope("ann"))
	require.NoError(f.t, err)
	require.Equal(f.t, []int64{units, plan, promo, bought}, []int64{b.Units, b.Of(ofPlan), b.Of(promotional), b.Of(paid)}, "in all, plan, promotional, paid")
	var out bytes.Buffer
	require.NoError(f.t, f.audit(f.t.Context(), &out, "ann"), "%s", &out)
}

// closes has a River worker close the books.
func (f *fixture) closes() {
	f.t.Helper()
	if !f.works {
		f.works = true
		require.NoError(f.t, f.river.Start(context.WithoutCancel(f.t.Context())))
		f.t.Cleanup(func() { require.NoError(f.t, f.river.StopAndCancel(context.Background())) })
	}
	done, cancel := f.river.Subscribe(river.EventKindJobCompleted, river.EventKindJobFailed)
	defer cancel()
	job, err := f.river.Insert(f.t.Context(), closing{}, nil)
	require.NoError(f.t, err)
	for {
		select {
		case e := <-done:
			if e.Job.ID == job.Job.ID {
				require.Equal(f.t, river.EventKindJobCompleted, e.Kind, "%v", e.Job.Errors)
				return
			}
		case <-time.After(time.Until(pgtest.Patience(f.t))):
			f.t.Fatal("the books are not closed")
		}
	}
}

// alerts waits until all jobs are worked, and returns the account's alerts.
func (f *fixture) alerts() (all []string) {
	f.t.Helper()
	pgtest.WaitFor(f.t, "the alerts", func() bool {
		return pgtest.Count(f.t, f.pool, `river_job where kind = 'threshold' and state <> 'completed'`) == 0
	})
	rows, _ := f.pool.Query(f.t.Context(), `select month, name, used from alerts order by month, name`)
	var month time.Time
	var name string
	var used int64
	_, err := pgx.ForEachRow(rows, []any{&month, &name, &used}, func() error {
		all = append(all, fmt.Sprintf("%s %s at %d", month.In(f.zone).Format("2 Jan"), name, used))
		return nil
	})
	require.NoError(f.t, err)
	return all
}

// invoice is that of the month that begins then. Its sums are those of Ledger.Series.
func (f *fixture) invoice(starts time.Time) invoice {
	f.t.Helper()
	in := pgtest.Value[invoice](f.t, f.pool, `select lines from invoices where account = 'ann' and starts = $1`, starts)
	series, err := f.metered.Budget.Series(f.t.Context(), f.pool, scope("ann"), in.Starts, in.Ends, budget.Day, f.zone)
	require.NoError(f.t, err)
	var used, refunded int64
	for _, day := range series {
		used, refunded = used+day.Charged, refunded+day.RefundsMade
	}
	require.Equal(f.t, []int64{used, refunded}, []int64{in.Used, in.Refunded})
	return in
}

// Four months of an account, over the end of February and a change of clocks.
func TestMonths_AddUp(t *testing.T) {
	t.Parallel()
	f := open(t)
	_, err := f.promote(t.Context(), "spring", "ann", 300, 90*24*time.Hour)
	require.NoError(t, err)
	_, err = f.topUp(t.Context(), "p1", "ann", 500)
	require.NoError(t, err)
	f.has(1_800, 1_000, 300, 500)
	f.clock.Set(f.at(2, 10, 12))
	f.renders("feb", 900)
	f.closes()
	f.has(900, 100, 300, 500) // nothing is due

	// The second month begins on the last day of February. Unused units were rolled over.
	f.clock.Set(f.at(2, 28, 9))
	f.closes()
	f.has(1_900, 1_100, 300, 500)
	first := f.invoice(f.at(1, 31, 9))
	require.Equal(t, f.at(2, 28, 9), first.Ends.In(f.zone))
	require.Equal(t, map[string]int64{ofPlan: 900}, first.Of)
	require.Equal(t, []int64{0, 1_800, 900, 900, 20_00}, []int64{first.Opening, first.Granted, first.Used, first.Closing, first.Total})

	f.clock.Set(f.at(3, 10, 12))
	f.renders("mar1", 1_599)
	require.Empty(t, f.alerts())
	f.renders("mar2", 1)
	f.renders("mar3", 400)
	f.has(-100, 0, 0, 0)
	f.refuses("more", 1, "0 of month are left until 2027-03-31")
	given, err := f.refund(t.Context(), "mar3", "ann", 0, "dispute")
	require.NoError(t, err)
	require.Equal(t, int64(400), given)
	f.has(300, 0, 0, 300) // 100 were overdrawn
	f.renders("mar4", 400)
	require.Equal(t, []string{"28 Feb 80% at 1600"}, f.alerts(), "once, though use went back and came again")
	f.clock.Set(f.at(3, 31, 9).Add(-time.Microsecond)) // a month that lacks an hour: clocks were set forward
	f.refuses("more", 1, "0 of month are left until 2027-03-31")
	f.closes()
	f.has(-100, 0, 0, 0)
	f.clock.Advance(time.Microsecond)
	f.renders("apr1", 10) // before anybody closed the books
	f.has(890, 890, 0, 0) // the plan's lot has paid 100 back
	f.closes()
	second := f.invoice(f.at(2, 28, 9))
	require.Equal(t, 743*time.Hour, second.Ends.Sub(second.Starts))
	require.Equal(t, []int64{900, 1_000, 2_400, 400, 0, -100, 100, 21_00},
		[]int64{second.Opening, second.Granted, second.Used, second.Refunded, second.Lapsed, second.Closing, second.Overage, second.Total})
	f.has(990, 990, 0, 0)

	// The payment of January bounces when all of it is spent. Large plan: the cap grows at once, the included units
	// next month.
	revoked, err := f.bounce(t.Context(), "p1", "ann")
	require.NoError(t, err)
	require.Equal(t, []int64{0, 500}, []int64{revoked.Amount, revoked.Missing})
	f.refuses("apr2", 1_991, "1490 of credit are left; 1990 of month are left until 2027-04-30")
	_, err = f.topUp(t.Context(), "p2", "ann", 3_000)
	require.NoError(t, err)
	require.NoError(t, f.change(t.Context(), "evt_1", "ann", "large"))
	require.NoError(t, f.change(t.Context(), "evt_1", "ann", "large"), "delivered again")
	f.renders("apr3", 1_991)
	require.Len(t, f.alerts(), 1, "20 % of the large plan")
	f.has(1_999, 0, 0, 1_999)

	f.clock.Set(f.at(5, 2, 0)) // two days late
	f.closes()
	f.closes()
	third := f.invoice(f.at(3, 31, 9))
	require.Equal(t, []int64{-100, 4_100, 2_001, 1_999, 0, 500, 85_00},
		[]int64{third.Opening, third.Granted, third.Used, third.Closing, third.Overage, third.Debts, third.Total})
	f.has(6_999, 5_000, 0, 1_999)
	require.Equal(t, 3, pgtest.Count(t, f.pool, "invoices"))
}

func TestRender_OfManyAtOnceExactlyThoseAreMadeThatFit(t *testing.T) {
	t.Parallel()
	f := open(t)
	_, err := f.topUp(t.Context(), "p", "ann", 800)
	require.NoError(t, err)
	made, _, err := exampledb.Admitted(40, func(i int) error {
		_, err := f.render(context.Background(), fmt.Sprint(i/2), "ann", 110) // each twice
		return err
	})
	require.NoError(t, err)
	require.Equal(t, 2*18, made, "of 2000, and 2300 in the wallet")
	f.has(1_800-1_980, 0, 0, 0)
	f.closes()
	require.Len(t, f.alerts(), 1)
	require.Equal(t, 1, pgtest.Count(t, f.pool, `river_job where kind = 'threshold'`))
}

func TestPayments_AnnouncedAndBouncedAgainCountOnce(t *testing.T) {
	t.Parallel()
	f := open(t)
	require.NoError(t, pgtest.InParallel(8, func(int) error {
		_, err := f.topUp(context.Background(), "p", "ann", 500)
		return err
	}))
	_, err := f.topUp(t.Context(), "p", "ann", 900)
	require.ErrorIs(t, err, wallet.ErrConflict)
	f.renders("r", 1_200)
	f.has(300, 0, 0, 300)
	require.NoError(t, pgtest.InParallel(8, func(int) error {
		revoked, err := f.bounce(context.Background(), "p", "ann")
		if err == nil && revoked.Missing != 200 {
			err = fmt.Errorf("missing %d", revoked.Missing)
		}
		return err
	}))
	f.has(0, 0, 0, 0)
	require.Equal(t, 200, pgtest.Value[int](t, f.pool, `select sum(units)::bigint from debts`))
}

// Many at once close the same month: one invoice, one grant.
func TestRenew_AtOnceIsOnce(t *testing.T) {
	t.Parallel()
	f := open(t)
	f.renders("r", 1_400)
	f.clock.Set(f.at(2, 28, 9))
	var done atomic.Int64
	require.NoError(t, pgtest.InParallel(8, func(int) error {
		renewed, err := f.renew(context.Background(), "ann")
		if renewed {
			done.Add(1)
		}
		return err
	}))
	require.Equal(t, int64(1), done.Load())
	require.Equal(t, int64(20_00+400), f.invoice(f.at(1, 31, 9)).Total)
	f.has(1_000, 1_000, 0, 0)
}

// The program is run as a user would.
func TestBilling(t *testing.T) {
	t.Parallel()
	program := exampletest.New(t)
	printed := program.Output()
	for _, line := range []string{
		`payment-1: granted before: true`,
		`balance 1800: plan 1000, promotional 300, paid 500`,
		`rendered: 40, refused: 0`,
		`alerts: 1, at 1600`,
		`one more: 0 of month are left until \d{4}-\d\d-\d\d`,
		`balance -200: plan 0, promotional 0, paid 0`,
		`given back: 30`,
		`taken back: 0, spent before: 500`,
		`opening 0 \+ granted 1800 - used 2000 \+ refunded 50 - revoked 0 = closing -150`,
		`of the plan 1000, promotional 300, paid 500, overdrawn 200`,
		`verified 45 entries: \[\]; ann: 2000 rendered, 0 on invoices, 2000 since`,
	} {
		require.Regexp(t, regexp.MustCompile(`(?m)^`+line+`$`), printed)
	}
}
