package budget_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/pgtest"
)

// upTo is the charges as far as their limits admit them.
func upTo(charges []budget.Charge) []budget.Charge {
	charges = slices.Clone(charges)
	for i := range charges {
		charges[i].UpTo = true
	}
	return charges
}

// chargeUpTo charges up to an amount in a transaction of its own.
func chargeUpTo(ctx context.Context, pool *pgxpool.Pool, l *budget.Ledger, charges ...budget.Charge) (r budget.Receipt, err error) {
	err = pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		r, err = l.Charge(ctx, tx, upTo(charges)...)
		return err
	})
	return r, err
}

// amounts are those of a receipt's entries.
func amounts(r budget.Receipt) (all []int64) {
	for _, e := range r.Entries {
		all = append(all, e.Amount)
	}
	return all
}

// levels are charges of an amount of a key, its user, team and organisation, each with a limit per hour.
func levels(amount int64, most ...int64) (charges []budget.Charge) {
	for i, scope := range []string{"key", "user", "team", "org"} {
		charges = append(charges, budget.Charge{Scope: scope, Amount: amount, Limits: []budget.Limit{budget.PerWindow(most[i], time.Hour)}})
	}
	return charges
}

func TestChargeUpTo_TakesTheSameOfEachLevel(t *testing.T) {
	t.Parallel()
	pgtest.OnEachVersion(t)
	pool, l, clock := open(t)
	r, err := chargeUpTo(t.Context(), pool, l, levels(60, 50, 30, 100, 40)...)
	require.NoError(t, err)
	require.Equal(t, []int64{30, 30, 30, 30}, amounts(r))
	for i, available := range []int64{20, 0, 70, 10} {
		require.Equal(t, []int64{30, available}, []int64{r.Entries[i].Standings[0].Used, r.Entries[i].Standings[0].Available})
		require.EqualValues(t, 30, usage(t, pool, l, r.Entries[i].Scope, time.Hour).Used)
	}

	clock.Advance(time.Minute)
	_, err = chargeUpTo(t.Context(), pool, l, levels(60, 50, 30, 100, 40)...)
	var exceeded *budget.ExceededError
	require.ErrorAs(t, err, &exceeded)
	require.Equal(t, []budget.Refusal{{Scope: "user", Limit: budget.PerWindow(30, time.Hour), Used: 30, Requested: 60, RetryAfter: 59 * time.Minute}},
		exceeded.Refusals, "the limits that do not admit 1, and when they will")

	r, err = chargeUpTo(t.Context(), pool, l, levels(15, 50, 80, 100, 100)...)
	require.NoError(t, err)
	require.Equal(t, []int64{15, 15, 15, 15}, amounts(r), "all of it fits")
	r, err = chargeUpTo(t.Context(), pool, l, levels(15, 50, 80, 100, 46)...)
	require.NoError(t, err)
	require.Equal(t, []int64{1, 1, 1, 1}, amounts(r))
	clock.Advance(59 * time.Minute)
	r, err = chargeUpTo(t.Context(), pool, l, levels(60, 50, 30, 100, 40)...)
	require.NoError(t, err)
	require.Equal(t, []int64{14, 14, 14, 14}, amounts(r), "the first hour is over")
	requireVerified(t, pool, l)
}

// Of each kind of limit, and whatever lies open or is due, it takes the available units, and the refusal after it is that of Charge of 1.
func TestChargeUpTo_TakesWhatIsAvailableOfEachKindOfLimit(t *testing.T) {
	t.Parallel()
	pgtest.OnEachVersion(t)
	pool, l, clock := open(t)
	book, err := holds.New(l, holds.Config{})
	require.NoError(t, err)
	place := func(units int64, ttl time.Duration, least int64) func(tx pgx.Tx, scope string) error {
		return func(tx pgx.Tx, scope string) error {
			_, err := book.Place(t.Context(), tx, holds.Placement{TTL: ttl, Lines: []holds.Line{{Scope: scope, Amount: units, AtLeast: least}}})
			return err
		}
	}
	spend := func(units int64) func(tx pgx.Tx, scope string) error {
		return func(tx pgx.Tx, scope string) error {
			_, err := l.Charge(t.Context(), tx, budget.Charge{Scope: scope, Amount: units})
			return err
		}
	}
	credit := func(tx pgx.Tx, scope string) error {
		_, err := l.Credit(t.Context(), tx, budget.Credit{Scope: scope, Amount: 20})
		return err
	}
	type before = func(tx pgx.Tx, scope string) error
	month := budget.Per(20, budget.Month, time.UTC, time.Time{})
	cases := map[string]struct {
		limits []budget.Limit
		before []before
		want   int64
	}{
		"a window":            {[]budget.Limit{budget.PerWindow(20, time.Hour)}, []before{spend(8)}, 12},
		"a period":            {[]budget.Limit{month}, []before{spend(8)}, 12},
		"a lifetime":          {[]budget.Limit{budget.Lifetime(20)}, []before{spend(8)}, 12},
		"credit":              {[]budget.Limit{budget.Prepaid(0)}, []before{credit, spend(8)}, 12},
		"an overdraft":        {[]budget.Limit{budget.Prepaid(5)}, []before{credit, spend(8)}, 17},
		"several limits":      {[]budget.Limit{month, budget.PerWindow(15, time.Hour), budget.Lifetime(90)}, []before{spend(8)}, 7},
		"an open hold":        {[]budget.Limit{budget.PerWindow(20, time.Hour)}, []before{spend(3), place(5, time.Hour, 0)}, 12},
		"a due hold":          {[]budget.Limit{budget.PerWindow(20, time.Hour), budget.Lifetime(25)}, []before{spend(8), place(12, time.Minute, 0)}, 12},
		"a due minimum":       {[]budget.Limit{budget.PerWindow(20, time.Hour)}, []before{spend(5), place(15, time.Minute, 3)}, 12},
		"an observed limit":   {[]budget.Limit{{Max: 10, Lifetime: true, Observe: true}, budget.Lifetime(20)}, []before{spend(8)}, 12},
		"a limit of a query":  {[]budget.Limit{budget.Lifetime(0).MaxFrom("select 20::bigint")}, []before{spend(8)}, 12},
		"no limit":            {nil, nil, 100},
		"more than the limit": {[]budget.Limit{budget.Lifetime(20)}, []before{spend(21)}, 0},
	}
	for _, quiet := range []bool{false, true} {
		clock.Set(start.Add(time.Hour))
		for name, c := range cases {
			for _, do := range c.before {
				require.NoError(t, pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error { return do(tx, fmt.Sprint(name, quiet)) }))
			}
		}
		clock.Advance(10 * time.Minute)
		for name, c := range cases {
			scope := fmt.Sprint(name, quiet)
			charges := []budget.Charge{
				{Scope: scope, Amount: 100, Limits: c.limits, NoStandings: quiet}, {Scope: "beside " + scope, Amount: 100, NoStandings: quiet},
			}
			one := charges[0]
			one.Amount = 1
			if c.want > 0 {
				r, err := chargeUpTo(t.Context(), pool, l, charges...)
				require.NoError(t, err, name)
				require.Equal(t, []int64{c.want, c.want}, amounts(r), name)
			}
			if c.limits == nil {
				continue
			}
			_, err := chargeUpTo(t.Context(), pool, l, charges...)
			_, oneErr := charge(t.Context(), pool, l, scope, 1, c.limits...)
			var got, want *budget.ExceededError
			require.ErrorAs(t, err, &got, name)
			require.ErrorAs(t, oneErr, &want, name)
			for i := range want.Refusals {
				want.Refusals[i].Requested = 100
			}
			require.Equal(t, want, got, name)
		}
	}
	requireVerified(t, pool, l)
}

// A threshold is reported if the amount that is taken crosses it.
func TestChargeUpTo_ReportsThresholdsOfTheAmountThatItTakes(t *testing.T) {
	t.Parallel()
	pool, l, _ := openReporting(t, budget.Config{})
	limit := budget.Lifetime(100).WithThresholds(eighty()...)
	mustCharge(t, pool, l, "a", 50, limit)
	r, err := chargeUpTo(t.Context(), pool, l, budget.Charge{Scope: "a", Amount: 70, Limits: []budget.Limit{limit, budget.PerWindow(70, time.Hour)}})
	require.NoError(t, err)
	require.Equal(t, []int64{20}, amounts(r))
	require.Empty(t, reported(t, pool, "a"), "70 would have crossed it")
	r, err = chargeUpTo(t.Context(), pool, l, budget.Charge{Scope: "a", Amount: 70, Limits: []budget.Limit{limit}}, budget.Charge{Scope: "b", Amount: 70})
	require.NoError(t, err)
	require.Equal(t, []int64{30, 30}, amounts(r))
	require.Len(t, r.Crossed, 2)
	require.Equal(t, []string{"80%", "used up"}, reported(t, pool, "a"))
	requireVerified(t, pool, l)
}

// A scope that does not exist refuses whatever fits, and charges nothing.
func TestChargeUpTo_OfAScopeThatMustExistAndDoesNot(t *testing.T) {
	t.Parallel()
	pool, l, _ := open(t)
	limits := []budget.Limit{budget.Lifetime(5)}
	_, err := chargeUpTo(t.Context(), pool, l, budget.Charge{Scope: "a", Amount: 9, Limits: limits}, budget.Charge{Scope: "b", Amount: 9, MustExist: true})
	require.ErrorIs(t, err, budget.ErrScopeUnknown)
	require.Zero(t, usage(t, pool, l, "a", 0).Seq)
}

func TestChargeUpTo_RefusesWrongArgumentsBeforeAnySQL(t *testing.T) {
	t.Parallel()
	l := newLedger(t, budget.Config{})
	for field, charges := range map[string][]budget.Charge{
		"charges":           nil,
		"charges[1].Amount": {{Scope: "a", Amount: 2}, {Scope: "b", Amount: 1}},
		"charges[1].Scope":  {{Scope: "a", Amount: 2}, {Scope: "a", Amount: 2}},
		"charges[2].Scope":  {{Scope: "a", Amount: 2}, {Scope: "b", Amount: 2}, {Scope: "a", Amount: 2}, {Scope: "c", Amount: 2}},
		"charges[0].Amount": {{Scope: "a"}},
	} {
		_, err := l.Charge(t.Context(), untouchable{t: t}, upTo(charges)...)
		requireArgument(t, err, field)
	}
	for field, charge := range map[string]budget.Charge{"charges[0].UpTo": {Scope: "a", Amount: 2, UpTo: true}, "charges[0].Lots": {Scope: "a", Amount: 2, Lots: true}} {
		_, err := l.ChargeEach(t.Context(), untouchable{t: t}, charge)
		requireArgument(t, err, field)
		_, err = l.Check(t.Context(), untouchable{t: t}, charge)
		requireArgument(t, err, field)
	}
	_, err := l.Charge(t.Context(), untouchable{t: t}, budget.Charge{Scope: "a", Amount: 2, UpTo: true}, budget.Charge{Scope: "b", Amount: 2})
	requireArgument(t, err, "charges[1].UpTo")
}

// A charge in a transaction of its own is up to so much as well.
func TestChargeUpTo_InATransactionOfItsOwn(t *testing.T) {
	t.Parallel()
	pool, l, _ := open(t)
	charge := budget.Charge{Scope: "a", Amount: 9, UpTo: true, Limits: []budget.Limit{budget.Lifetime(5)}}
	posted, err := l.ChargeNow(t.Context(), pool, charge)
	require.NoError(t, err)
	require.EqualValues(t, 5, posted.Amount)
	_, err = l.ChargeNow(t.Context(), pool, charge)
	require.ErrorIs(t, err, budget.ErrExceeded)
}

// Workers of two users share an organisation. Whoever comes takes what is left, so that all units of the organisation are charged, and each user's sum
// is that of its charges.
func TestChargeUpTo_ConcurrentCallersChargeEachUnitOnce(t *testing.T) {
	t.Parallel()
	pgtest.OnEachVersion(t)
	pool := pgtest.Open(t)
	l := newLedger(t, budget.Config{})
	for _, iso := range isolations {
		t.Run(string(iso), func(t *testing.T) {
			const workers, org, user = 6, 101, 60
			retry := &retrier{pool: pool}
			var charged [2]atomic.Int64
			require.NoError(t, pgtest.InParallel(workers, func(worker int) error {
				for {
					charges := []budget.Charge{
						{Scope: fmt.Sprint(iso, worker%2), Amount: 7, Limits: []budget.Limit{budget.PerWindow(user, time.Hour)}},
						{Scope: string(iso), Amount: 7, Limits: []budget.Limit{budget.Lifetime(org), budget.PerWindow(org, time.Hour)}},
					}
					if worker%3 == 0 {
						charges[0], charges[1] = charges[1], charges[0]
					}
					var r budget.Receipt
					err := retry.run(t.Context(), iso, func(tx pgx.Tx) (err error) {
						if _, err := tx.Exec(t.Context(), "select 1"); err != nil {
							return err
						}
						r, err = l.Charge(t.Context(), tx, upTo(charges)...)
						return err
					})
					if errors.Is(err, budget.ErrExceeded) {
						return nil
					}
					if err != nil {
						return err
					}
					if r.Entries[0].Amount != r.Entries[1].Amount {
						return fmt.Errorf("%v are not equal", amounts(r))
					}
					charged[worker%2].Add(r.Entries[0].Amount)
				}
			}))
			require.EqualValues(t, org, charged[0].Load()+charged[1].Load())
			require.EqualValues(t, org, usage(t, pool, l, string(iso), 0).Used)
			for i := range charged {
				require.EqualValues(t, charged[i].Load(), usage(t, pool, l, fmt.Sprint(iso, i), 0).Used)
				require.LessOrEqual(t, charged[i].Load(), int64(user))
			}
		})
	}
	requireVerified(t, pool, l)
}
