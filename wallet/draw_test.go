package wallet_test

import (
	"context"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/bounds"
	"github.com/pgmetered/metered/internal/fault"
	"github.com/pgmetered/metered/wallet"
)

func parts(d wasDrawn) map[string]int64 {
	all := map[string]int64{}
	for _, p := range d.Lots {
		all[p.Reference] = p.Amount
	}
	return all
}

func TestDraw_TakesByPriorityThenEarliestEndThenOldest(t *testing.T) {
	t.Parallel()
	f := setUp(t, wallet.Config{Priorities: map[string]int{"paid": 10, "promotional": 5}})
	first := -1
	f.grant(wallet.Grant{Amount: 10, Category: "paid", Reference: "paid for ever"})
	f.grant(wallet.Grant{Amount: 10, Category: "paid", Reference: "paid late", Ends: wallet.After(9 * day)})
	f.grant(wallet.Grant{Amount: 10, Category: "paid", Reference: "paid early", Ends: wallet.After(8 * day)})
	f.grant(wallet.Grant{Amount: 10, Category: "promotional", Reference: "older", Ends: wallet.After(20 * day)})
	f.grant(wallet.Grant{Amount: 10, Category: "promotional", Reference: "newer", Ends: wallet.After(20 * day)})
	f.grant(wallet.Grant{Amount: 10, Category: "paid", Priority: &first, Reference: "first"})
	var order []string
	for _, l := range f.balance().Lots {
		order = append(order, l.Reference)
	}
	require.Equal(t, []string{"first", "older", "newer", "paid early", "paid late", "paid for ever"}, order)
	require.Equal(t, map[string]int64{"first": 5}, parts(f.draw(5)))
	d := f.draw(17)
	require.Equal(t, map[string]int64{"first": 5, "older": 10, "newer": 2}, parts(d))
	require.EqualValues(t, 38, d.Left)
	d = f.draw(38)
	require.Equal(t, map[string]int64{"newer": 8, "paid early": 10, "paid late": 10, "paid for ever": 10}, parts(d))
	require.Zero(t, d.Overdrawn)
	f.has(0)
}

func TestLot_EndsWhenItIsDueSweptOrNot(t *testing.T) {
	t.Parallel()
	f := setUp(t, wallet.Config{})
	g := f.grant(wallet.Grant{Amount: 10, Ends: wallet.After(time.Hour), Reference: "hour"})
	require.Equal(t, noon.Add(time.Hour), g.Expires)
	f.grant(wallet.Grant{Amount: 5, Reference: "rest"})
	f.clock.Set(noon.Add(time.Hour - time.Microsecond))
	require.Equal(t, map[string]int64{"hour": 4}, parts(f.draw(4)))
	f.has(11)
	f.clock.Set(noon.Add(time.Hour))
	f.has(5)
	// A look without a lock judges the same, and writes nothing.
	_, err := f.ledger.Check(t.Context(), f.pool, f.book.Charge("ann", 6))
	require.ErrorIs(t, err, budget.ErrExceeded)
	u, err := f.ledger.Usage(t.Context(), f.pool, budget.Query{Scope: "ann"})
	require.NoError(t, err)
	require.EqualValues(t, -5, u[0].Used)
	kinds, _ := f.kinds(1)
	require.Equal(t, []string{"credit", "credit", "charge"}, kinds)
	d := f.draw(2)
	require.Equal(t, map[string]int64{"rest": 2}, parts(d))
	kinds, amounts := f.kinds(4)
	require.Equal(t, []string{"lapse", "charge"}, kinds)
	require.Equal(t, []int64{6, 2}, amounts)
	require.EqualValues(t, 5, d.Seq)
	// A clock that is set back does not bring it to life.
	f.clock.Set(noon.Add(30 * time.Minute))
	f.has(3)
}

// All units of a lot are drawn, another lot ends meanwhile, and then a refund brings units back: the lot still ends at its time.
func TestLot_EndsAtItsTimeThoughARefundBroughtItsUnitsBack(t *testing.T) {
	t.Parallel()
	f := setUp(t, wallet.Config{})
	f.grant(wallet.Grant{Amount: 5, Ends: wallet.After(time.Hour)})
	f.grant(wallet.Grant{Amount: 5, Reference: "day", Ends: wallet.After(day)})
	d := f.draw(10)
	f.clock.Set(noon.Add(2 * time.Hour))
	f.grant(wallet.Grant{Amount: 3, Reference: "kept"}) // no lot with units ends any more
	f.refund(d.Seq, 4)
	require.Equal(t, map[string]int64{"day": 4, "kept": 3}, f.left())
	f.clock.Set(noon.Add(day))
	require.Equal(t, map[string]int64{"kept": 3}, f.left())
	f.has(3)
	f.draw(3)
}

func TestOverdraft_IsPaidBackByTheNextGrant(t *testing.T) {
	t.Parallel()
	f := setUp(t, wallet.Config{Overdraft: 10})
	f.grant(wallet.Grant{Amount: 5, Reference: "first"})
	d := f.draw(12)
	require.Equal(t, map[string]int64{"first": 5}, parts(d))
	require.EqualValues(t, 7, d.Overdrawn)
	require.EqualValues(t, -7, d.Left)
	require.EqualValues(t, 7, f.balance().Overdrawn)
	_, err := f.tryDraw(toDraw{Amount: 4})
	require.ErrorIs(t, err, budget.ErrExceeded)
	f.grant(wallet.Grant{Amount: 3, Reference: "second"})
	require.EqualValues(t, -4, f.balance().Units)
	f.grant(wallet.Grant{Amount: 20, Reference: "third"})
	require.Equal(t, map[string]int64{"third": 16}, f.left())
	// Refunded units that were overdrawn go to the lots that paid the overdraft back, the last one first.
	f.refund(d.Seq, 5)
	require.Equal(t, map[string]int64{"third": 20, "second": 1}, f.left())
	f.refund(d.Seq, 7)
	require.Equal(t, map[string]int64{"third": 20, "second": 3, "first": 5}, f.left())
}

// A charge or line of the Book keeps the wallet's limit and those beside it. One that leaves the wallet's out is not bounded by it, and
// a wallet that was granted nothing has its overdraft, unless it must exist.
func TestCharge_KeepsTheLimitsThatItNames(t *testing.T) {
	t.Parallel()
	f := setUp(t, wallet.Config{Overdraft: 10})
	f.grant(wallet.Grant{Amount: 100})
	charge := func(c budget.Charge) error {
		_, err := do(f, func(ctx context.Context, tx pgx.Tx) (budget.Receipt, error) { return f.ledger.Charge(ctx, tx, c) })
		return err
	}
	refusedBy := func(err error, limit string) {
		t.Helper()
		var exceeded *budget.ExceededError
		require.ErrorAs(t, err, &exceeded)
		require.Equal(t, limit, exceeded.Refusals[0].Limit.Name)
		require.Len(t, exceeded.Refusals, 1)
	}
	month := budget.Per(40, budget.Month, time.UTC, time.Time{}).Named("month")
	refusedBy(charge(f.book.Charge("ann", 41, month)), "month")
	refusedBy(charge(f.book.Charge("ann", 111)), "credit")
	_, err := do(f, func(ctx context.Context, tx pgx.Tx) (holds.Hold, error) {
		return f.holds.Place(ctx, tx, holds.Placement{TTL: time.Minute, Lines: []holds.Line{f.book.Line("ann", 41, month)}})
	})
	refusedBy(err, "month")
	require.NoError(t, charge(f.book.Charge("ann", 40, month)))
	require.NoError(t, charge(budget.Charge{Scope: "ann", Amount: 150}))
	require.EqualValues(t, 90, f.balance().Overdrawn)

	mistyped := f.book.Charge("an", 1)
	mistyped.MustExist = true
	require.ErrorIs(t, charge(mistyped), budget.ErrScopeUnknown)
	mistyped.MustExist = false
	require.NoError(t, charge(mistyped))
}

func TestWallet_BeginsWithTheUnitsOfTheScope(t *testing.T) {
	t.Parallel()
	f := setUp(t, wallet.Config{})
	_, err := f.ledger.ChargeNow(t.Context(), f.pool, budget.Charge{Scope: "ann", Amount: 4})
	require.NoError(t, err)
	f.grant(wallet.Grant{Amount: 10, Reference: "a", Ends: wallet.After(time.Hour)}) // pays back
	require.Equal(t, map[string]int64{"a": 6}, f.left())
	f.refund(1, 3)
	require.Equal(t, map[string]int64{"a": 9}, f.left())
}

// A batch charges wallets beside other scopes. Each charge is judged after those before it.
func TestBatch_SpendsLots(t *testing.T) {
	t.Parallel()
	f := setUp(t, wallet.Config{})
	f.grant(wallet.Grant{Amount: 5, Reference: "hour", Ends: wallet.After(time.Hour)})
	f.grant(wallet.Grant{Amount: 5, Reference: "ever"})
	f.clock.Set(noon.Add(time.Hour))
	charges := []budget.Charge{f.book.Charge("ann", 3), {Scope: "other", Amount: 1}, f.book.Charge("ann", 3), f.book.Charge("ann", 2)}
	answers, err := do(f, func(ctx context.Context, tx pgx.Tx) ([]budget.Result, error) {
		return f.ledger.ChargeEach(ctx, tx, charges...)
	})
	require.NoError(t, err)
	for i, a := range answers {
		if i == 2 {
			require.ErrorIs(t, a.Err, budget.ErrExceeded)
			continue
		}
		require.NoError(t, a.Err)
	}
	f.has(0)
	kinds, _ := f.kinds(3)
	require.Equal(t, []string{"lapse", "charge", "charge"}, kinds)
}

// A clock was ahead, and is repaired: lots that ended by it have ended.
func TestLot_EndsByTheEntrysTimeWhereTheClockIsBehind(t *testing.T) {
	t.Parallel()
	f := setUp(t, wallet.Config{})
	f.grant(wallet.Grant{Amount: 5, Reference: "hour", Ends: wallet.After(time.Hour)})
	f.grant(wallet.Grant{Amount: 5, Reference: "ever"})
	f.clock.Set(noon.Add(time.Hour - time.Second))
	f.draw(1)
	f.clock.Set(noon.Add(time.Hour + time.Second))
	f.grant(wallet.Grant{Amount: 1, Reference: "new"})
	f.clock.Set(noon)
	f.has(6)
	_, err := do(f, func(ctx context.Context, tx pgx.Tx) (budget.ClockState, error) {
		return f.ledger.RepairClock(ctx, tx, "ann", budget.Note{})
	})
	require.NoError(t, err)
	f.has(6)
	require.Equal(t, noon, f.draw(2).At)
}

func TestDraw_UpToOfAVeryGreatCredit(t *testing.T) {
	t.Parallel()
	f := setUp(t, wallet.Config{Overdraft: bounds.MaxLimit})
	_, err := f.pool.Exec(t.Context(), `select metered.grant_lot('ann', null, row(9007199254740992, null, null, '', 0, null, null, null, null, null)::metered.new_lot, false, 1000, null)
		from generate_series(1, 1023)`)
	require.NoError(t, err)
	_, err = do(f, func(ctx context.Context, tx pgx.Tx) (wallet.Granted, error) {
		return f.book.Grant(ctx, tx, wallet.Grant{Wallet: "ann", Amount: bounds.MaxAmount})
	})
	require.ErrorIs(t, err, fault.New("budget_overflow", ""))
	d, err := f.tryDraw(toDraw{Amount: 5, UpTo: true})
	require.NoError(t, err)
	require.EqualValues(t, 5, d.Amount)
}

// A wallet is a level like others: what it lacks is charged nowhere.
func TestChargeUpTo_OfAWalletAndALimitBesideIt(t *testing.T) {
	t.Parallel()
	f := setUp(t, wallet.Config{Overdraft: 2})
	f.grant(wallet.Grant{Amount: 3, Reference: "hour", Ends: wallet.After(time.Hour)})
	f.grant(wallet.Grant{Amount: 7, Reference: "ever"})
	charge := func(amount, team int64) (budget.Receipt, error) {
		return do(f, func(ctx context.Context, tx pgx.Tx) (budget.Receipt, error) {
			return f.ledger.Charge(ctx, tx, upTo(f.book.Charge("ann", amount)), budget.Charge{Scope: "team", Amount: amount, UpTo: true, Limits: []budget.Limit{budget.Lifetime(team)}})
		})
	}
	r, err := charge(9, 4)
	require.NoError(t, err)
	require.EqualValues(t, 4, r.Entries[0].Amount)
	require.Equal(t, map[string]int64{"ever": 6}, f.left())
	f.refund(r.Entries[0].Seq, 4)
	f.clock.Advance(time.Hour) // its 3 units have ended, and nothing has written that down
	r, err = charge(20, 100)
	require.NoError(t, err)
	require.Equal(t, []int64{9, 9}, []int64{r.Entries[0].Amount, r.Entries[1].Amount})
	require.Empty(t, f.left())
	require.EqualValues(t, 2, f.balance().Overdrawn)
	_, err = charge(20, 100)
	require.ErrorIs(t, err, budget.ErrExceeded)
}

// A lot that ends between two looks at the clock has not ended: both attempts are made at one moment.
func TestChargeUpTo_JudgesByOneMoment(t *testing.T) {
	t.Parallel()
	f := setUp(t, wallet.Config{})
	f.grant(wallet.Grant{Amount: 3, Reference: "hour", Ends: wallet.After(time.Hour)})
	f.grant(wallet.Grant{Amount: 2, Reference: "ever"})
	_, err := f.pool.Exec(t.Context(), `create or replace function metered.clock() returns timestamptz language sql volatile security definer
		as $$ select timestamptz 'epoch' + us / 1000000 * interval '1 second' + us % 1000000 * interval '1 microsecond' from nextval('pgtest.clock') us $$`)
	require.NoError(t, err)
	f.clock.Set(noon.Add(time.Hour - 2*time.Microsecond)) // each look is a microsecond later than the one before
	r, err := do(f, func(ctx context.Context, tx pgx.Tx) (budget.Receipt, error) {
		return f.ledger.Charge(ctx, tx, upTo(f.book.Charge("ann", 8)))
	})
	require.NoError(t, err)
	require.EqualValues(t, 5, r.Entries[0].Amount)
	require.Equal(t, noon.Add(time.Hour-time.Microsecond), r.Entries[0].At.UTC())
}
