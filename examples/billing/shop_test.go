package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/internal/pgtest"
)

func openShop(t *testing.T) *shop {
	t.Helper()
	pool := pgtest.Open(t)
	_, err := pool.Exec(t.Context(), shopSQL)
	require.NoError(t, err)
	_, err = pool.Exec(t.Context(), `insert into items values ('tea', 1200, 1000), ('cup', 400, 1000), ('rare', 100, 5), ('gold', 6000, 1)`)
	require.NoError(t, err)
	client, err := metered.New(pool, metered.Config{})
	require.NoError(t, err)
	return &shop{pool, client}
}

func (s *shop) pays(t *testing.T, account string, cents int64) {
	t.Helper()
	_, err := s.topUp(t.Context(), metered.NewID(), account, cents)
	require.NoError(t, err)
}

// books is everything that an order touches.
type books struct{ Balance, Entries, Orders, Shipments, Stock int64 }

func (s *shop) books(t *testing.T, account string) books {
	t.Helper()
	var b books
	require.NoError(t, s.pool.QueryRow(t.Context(), `
		select (select count(*) from metered.ledger), (select count(*) from orders where cancelled is null),
		    (select count(*) from shipments), (select sum(stock) from items)`).Scan(&b.Entries, &b.Orders, &b.Shipments, &b.Stock))
	var err error
	b.Balance, err = s.balance(t.Context(), account)
	require.NoError(t, err)
	return b
}

// agrees fails if the ledger and the shop's tables do not.
func (s *shop) agrees(t *testing.T, accounts ...string) {
	t.Helper()
	var out bytes.Buffer
	require.NoError(t, s.audit(t.Context(), &out, accounts...), out.String())
}

// atOnce runs f n times at the same time, and counts the runs that returned nil.
func atOnce(n int, f func(i int) error) (ok int64, failed []error) {
	var wg sync.WaitGroup
	var done atomic.Int64
	errs := make([]error, n)
	for i := range n {
		wg.Go(func() {
			if errs[i] = f(i); errs[i] == nil {
				done.Add(1)
			}
		})
	}
	wg.Wait()
	for _, err := range errs {
		if err != nil {
			failed = append(failed, err)
		}
	}
	return done.Load(), failed
}

func TestOrder_OfManyAtOnceExactlyThoseShipThatTheCreditPaysFor(t *testing.T) {
	t.Parallel()
	s := openShop(t)
	s.pays(t, "ann", 30_00) // 7 cups, and 2.00
	s.pays(t, "bob", 8_00)
	before := s.books(t, "ann")
	shipped, refused := atOnce(60, func(i int) (err error) {
		id, account := fmt.Sprint("o", i), []string{"ann", "ann", "bob"}[i%3]
		if i%2 == 0 {
			_, err = s.order(context.Background(), id, account, "cup", "here")
		} else {
			_, _, err = s.orderOnce(context.Background(), id, account, "cup", "here")
		}
		return err
	})
	require.Equal(t, int64(7+2), shipped)
	for _, err := range refused {
		require.ErrorIs(t, err, budget.ErrExceeded)
	}
	require.Equal(t, books{2_00, before.Entries + 9, 9, 9, before.Stock - 9}, s.books(t, "ann"))
	bob, err := s.balance(t.Context(), "bob")
	require.NoError(t, err)
	require.Zero(t, bob)
	s.agrees(t, "ann", "bob")
}

func TestOrder_ShipsAndDebitsOrDoesNeither(t *testing.T) {
	t.Parallel()
	s := openShop(t)
	s.pays(t, "ann", 20_00)
	_, err := s.order(t.Context(), "first", "ann", "rare", "here")
	require.NoError(t, err)
	before := s.books(t, "ann")
	cut, cancel := context.WithCancel(t.Context())
	cancel()
	for name, test := range map[string]struct {
		ctx              context.Context
		id, sku, address string
		want             error
	}{
		"no credit":    {t.Context(), "a", "gold", "here", budget.ErrExceeded},
		"no address":   {t.Context(), "b", "tea", "", errNoAddress},
		"no item":      {t.Context(), "c", "pot", "here", errNoItem},
		"repeated":     {t.Context(), "first", "tea", "here", errRepeated},
		"cut off":      {cut, "d", "tea", "here", context.Canceled},
		"last failure": {t.Context(), "e", "tea", "here", nil}, // below: the statement after the charge
	} {
		if name == "last failure" {
			_, err := s.pool.Exec(t.Context(), `create function no() returns trigger language plpgsql as $$ begin raise 'no'; end $$;
				create trigger no before insert on orders for each row when (new.id = 'e') execute function no()`)
			require.NoError(t, err)
		}
		_, err := s.order(test.ctx, test.id, "ann", test.sku, test.address)
		require.Error(t, err, name)
		_, _, errOnce := s.orderOnce(test.ctx, test.id, "ann", test.sku, test.address)
		require.Error(t, errOnce, name)
		if test.want != nil {
			require.ErrorIs(t, err, test.want, name)
			require.ErrorIs(t, errOnce, test.want, name)
		}
		require.Equal(t, before, s.books(t, "ann"), name)
	}
	s.agrees(t, "ann")
}

func TestOrder_LastOfAnItemIsSoldOnce(t *testing.T) {
	t.Parallel()
	s := openShop(t)
	s.pays(t, "ann", 40_00)
	shipped, refused := atOnce(20, func(i int) error {
		_, err := s.order(context.Background(), fmt.Sprint(i), "ann", "rare", "here")
		return err
	})
	require.Equal(t, int64(5), shipped)
	for _, err := range refused {
		require.ErrorIs(t, err, errNoItem)
	}
	require.Equal(t, int64(35_00), s.books(t, "ann").Balance, "who got nothing paid nothing")
	s.agrees(t, "ann")
}

func TestOrderOnce_SentManyTimesAtOnceIsOneOrder(t *testing.T) {
	t.Parallel()
	s := openShop(t)
	s.pays(t, "ann", 50_00)
	var replays atomic.Int64
	ok, _ := atOnce(20, func(int) error {
		cents, replayed, err := s.orderOnce(context.Background(), "o", "ann", "tea", "here")
		if replayed {
			replays.Add(1)
		}
		if err == nil && cents != 12_00 {
			err = fmt.Errorf("%d", cents)
		}
		return err
	})
	require.Equal(t, int64(20), ok)
	require.Equal(t, int64(19), replays.Load())
	require.Equal(t, int64(38_00), s.books(t, "ann").Balance)
	_, _, err := s.orderOnce(t.Context(), "o", "ann", "cup", "here")
	require.ErrorIs(t, err, metered.ErrConflict)
	s.agrees(t, "ann")
}

func TestTopUp_AnnouncedManyTimesIsCreditedOnce(t *testing.T) {
	t.Parallel()
	s := openShop(t)
	ok, _ := atOnce(20, func(int) error {
		_, err := s.topUp(context.Background(), "payment", "ann", 10_00)
		return err
	})
	require.Equal(t, int64(20), ok)
	_, err := s.topUp(t.Context(), "payment", "ann", 99_00)
	require.ErrorIs(t, err, metered.ErrConflict)
	require.Equal(t, books{Balance: 10_00, Entries: 1, Stock: 2006}, s.books(t, "ann"))
}

func TestCancel_RefundsOnce(t *testing.T) {
	t.Parallel()
	s := openShop(t)
	s.pays(t, "ann", 20_00)
	_, err := s.order(t.Context(), "kept", "ann", "cup", "here")
	require.NoError(t, err)
	before := s.books(t, "ann")
	_, err = s.order(t.Context(), "o", "ann", "tea", "here")
	require.NoError(t, err)
	ok, refused := atOnce(20, func(int) error { return s.cancel(context.Background(), "o", "ann") })
	require.Equal(t, int64(1), ok)
	for _, err := range refused {
		require.ErrorIs(t, err, errNoOrder)
	}
	before.Entries += 2 // the ledger forgets nothing
	require.Equal(t, before, s.books(t, "ann"))
	require.ErrorIs(t, s.cancel(t.Context(), "never ordered", "ann"), errNoOrder)
	s.agrees(t, "ann")
}

// What was cancelled stays in the books, and its id is used up.
func TestOrder_TheIdOfACancelledOrderIsUsedUp(t *testing.T) {
	t.Parallel()
	s := openShop(t)
	s.pays(t, "ann", 20_00)
	_, err := s.order(t.Context(), "o", "ann", "cup", "here")
	require.NoError(t, err)
	require.NoError(t, s.cancel(t.Context(), "o", "ann"))
	before := s.books(t, "ann")
	_, err = s.order(t.Context(), "o", "ann", "cup", "here")
	require.ErrorIs(t, err, errRepeated)
	_, _, err = s.orderOnce(t.Context(), "o", "ann", "cup", "here")
	require.ErrorIs(t, err, errRepeated)
	require.Equal(t, "the order is there already, or was cancelled", explain(err))
	require.Equal(t, before, s.books(t, "ann"))
	s.agrees(t, "ann")
}

func TestOrder_IdsAreAnAccountsOwn(t *testing.T) {
	t.Parallel()
	s := openShop(t)
	s.pays(t, "ann", 20_00)
	s.pays(t, "bob", 20_00)
	for _, account := range []string{"ann", "bob"} {
		_, err := s.order(t.Context(), "1", account, "cup", "here")
		require.NoError(t, err)
		_, replayed, err := s.orderOnce(t.Context(), "2", account, "cup", "here")
		require.NoError(t, err)
		require.False(t, replayed)
	}
	require.NoError(t, s.cancel(t.Context(), "1", "bob"))
	require.ErrorIs(t, s.cancel(t.Context(), "1", "bob"), errNoOrder)
	require.Equal(t, int64(3), s.books(t, "ann").Shipments)
	require.Equal(t, int64(12_00), s.books(t, "ann").Balance)
	require.Equal(t, int64(16_00), s.books(t, "bob").Balance)
	s.agrees(t, "ann", "bob")
}

// Orders, payments and cancellations of one account, all at once: the exact sum comes out.
func TestShop_EverythingAtOnceAddsUp(t *testing.T) {
	t.Parallel()
	s := openShop(t)
	s.pays(t, "ann", 10_00)
	var paid, cups, cancelled atomic.Int64
	_, failed := atOnce(60, func(i int) error {
		ctx, id := context.Background(), fmt.Sprint("o", i)
		if i%3 == 0 {
			_, err := s.topUp(ctx, id, "ann", 1_00)
			paid.Add(1_00)
			return err
		}
		_, err := s.order(ctx, id, "ann", "cup", "here")
		if errors.Is(err, budget.ErrExceeded) {
			return nil
		} else if err != nil {
			return err
		}
		cups.Add(1)
		if i%3 == 1 {
			cancelled.Add(1)
			return s.cancel(ctx, id, "ann")
		}
		return nil
	})
	require.Empty(t, failed)
	require.NotZero(t, cancelled.Load())
	b := s.books(t, "ann")
	require.Equal(t, 10_00+paid.Load()-4_00*(cups.Load()-cancelled.Load()), b.Balance)
	require.Equal(t, cups.Load()-cancelled.Load(), b.Orders)
	require.GreaterOrEqual(t, b.Balance, int64(0))
	s.agrees(t, "ann")
}

func TestDailyCap_IsOfAnyTwentyFourHours(t *testing.T) {
	t.Parallel()
	s := openShop(t)
	clock := pgtest.SetClock(t, s.pool, pgtest.Tomorrow(23))
	s.pays(t, "ann", 500_00)
	n := 0
	order := func(sku string) error {
		n++
		_, err := s.order(t.Context(), fmt.Sprint("o", n), "ann", sku, "here")
		return err
	}
	refused := func(sku, why string) {
		t.Helper()
		err := order(sku)
		require.ErrorIs(t, err, budget.ErrExceeded)
		require.Equal(t, why, explain(err))
	}
	require.NoError(t, order("tea")) // o1, at 23:00
	clock.Advance(2 * time.Hour)     // another day, and still within 24 hours
	for range 3 {
		require.NoError(t, order("tea")) // 48.00
	}
	refused("cup", "it costs 4.00, and 2.00 of the day's 50.00 are left; it fits in 22h0m0s.")
	refused("gold", "it costs 60.00, and a day's cap is 50.00.")
	s.pays(t, "ann", 100_00)
	refused("cup", "it costs 4.00, and 2.00 of the day's 50.00 are left; it fits in 22h0m0s.")

	require.NoError(t, s.cancel(t.Context(), "o2", "ann"))
	require.NoError(t, order("tea"), "the room of what was cancelled")
	refused("cup", "it costs 4.00, and 2.00 of the day's 50.00 are left; it fits in 22h0m0s.")

	clock.Advance(22*time.Hour - time.Microsecond)
	refused("cup", "it costs 4.00, and 2.00 of the day's 50.00 are left; it fits in 1m0s.")
	clock.Advance(time.Microsecond)
	require.NoError(t, order("tea"), "o1 is 24 hours old")
	s.agrees(t, "ann")
}

func TestExplain_NamesEveryLimitThatRefused(t *testing.T) {
	t.Parallel()
	s := openShop(t)
	s.pays(t, "ann", 1_00)
	_, err := s.order(t.Context(), "o", "ann", "gold", "here")
	require.Equal(t, "it costs 60.00, and there is 1.00. it costs 60.00, and a day's cap is 50.00.", explain(err))
}

func TestStatement_ShowsEveryEntryWithItsBalance(t *testing.T) {
	t.Parallel()
	s := openShop(t)
	clock := pgtest.SetClock(t, s.pool, time.Date(2026, 11, 21, 12, 0, 0, 0, time.UTC))
	_, err := s.topUp(t.Context(), "p1", "ann", 20_00)
	require.NoError(t, err)
	clock.Advance(time.Minute)
	_, err = s.order(t.Context(), "o1", "ann", "tea", "here")
	require.NoError(t, err)
	clock.Advance(time.Minute)
	require.NoError(t, s.cancel(t.Context(), "o1", "ann"))
	var out bytes.Buffer
	require.NoError(t, s.statement(t.Context(), &out, "ann"))
	require.Equal(t, ""+
		"  entry                   at  by            what     in    out  balance\n"+
		"      1  2026-11-21 12:00:00  p1          top-up  20.00           20.00\n"+
		"      2  2026-11-21 12:01:00  o1             tea         12.00     8.00\n"+
		"      3  2026-11-21 12:02:00  o1  cancelled: tea  12.00           20.00\n", out.String())
}

func TestAudit_FindsBooksThatDoNotAgree(t *testing.T) {
	t.Parallel()
	for _, tamper := range []string{
		`update orders set cents = cents + 1`,
		`delete from shipments`,
		`update metered.ledger set spent = spent - 1 where kind = 'charge'`,
	} {
		s := openShop(t)
		s.pays(t, "ann", 20_00)
		_, err := s.order(t.Context(), "o", "ann", "tea", "here")
		require.NoError(t, err)
		s.agrees(t, "ann")
		_, err = s.pool.Exec(t.Context(), tamper)
		require.NoError(t, err)
		require.Error(t, s.audit(t.Context(), &bytes.Buffer{}, "ann"), tamper)
	}
}
