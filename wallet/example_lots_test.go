package wallet_test

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/wallet"
)

// balanceByLotSQL is the balance of each lot of a wallet just before a time.
const balanceByLotSQL = `
select reference, sum(change) from metered.lots_statement
where scope = $1 and at < $2 and lot is not null group by lot, reference having sum(change) <> 0 order by reference`

// What became of a wallet's lots, and how much of each was left at a past time: two views answer it.
func Example_lots() {
	ctx := context.Background()
	november := time.Date(2026, time.November, 1, 0, 0, 0, 0, time.UTC)
	pool, setClock, done := exampleDatabaseAt(november)
	defer done()
	ledger, err := budget.New(budget.Config{})
	check(err)
	book, err := wallet.New(ledger, wallet.Config{})
	check(err)
	in := func(f func(tx pgx.Tx) error) { check(pgx.BeginFunc(ctx, pool, f)) }
	for _, g := range []wallet.Grant{
		{Reference: "trial", Amount: 50, Ends: wallet.At(november.AddDate(0, 0, 10))},
		{Reference: "welcome", Amount: 30, Ends: wallet.At(november.AddDate(0, 0, 20))},
		{Reference: "bounced", Amount: 100, Ends: wallet.At(november.AddDate(1, 0, 0))},
		{Reference: "paid", Amount: 200},
	} {
		g.Wallet = "ann"
		in(func(tx pgx.Tx) error { _, err := book.Grant(ctx, tx, g); return err })
	}
	in(func(tx pgx.Tx) error {
		_, err := ledger.Charge(ctx, tx, book.Charge("ann", 40))
		return err
	})
	setClock(november.AddDate(0, 0, 15))
	in(func(tx pgx.Tx) error {
		_, err := ledger.Charge(ctx, tx, book.Charge("ann", 30))
		return err
	})
	in(func(tx pgx.Tx) error {
		_, err := book.Revoke(ctx, tx, wallet.Revoke{Wallet: "ann", Reference: "bounced"})
		return err
	})

	rows, err := pool.Query(ctx, `select reference, state, rest, drawn, lapsed, revoked from metered.lots_words where scope = $1 order by no`, "ann")
	check(err)
	var reference, state string
	var rest, drawn, lapsed, revoked int64
	_, err = pgx.ForEachRow(rows, []any{&reference, &state, &rest, &drawn, &lapsed, &revoked}, func() error {
		fmt.Printf("%s: %s, %d left, %d drawn, %d lapsed, %d revoked\n", reference, state, rest, drawn, lapsed, revoked)
		return nil
	})
	check(err)
	rows, err = pool.Query(ctx, balanceByLotSQL, "ann", november.AddDate(0, 0, 10))
	check(err)
	_, err = pgx.ForEachRow(rows, []any{&reference, &rest}, func() error {
		fmt.Println("on the 10th:", reference, rest)
		return nil
	})
	check(err)
	// Output:
	// trial: ended, 0 left, 40 drawn, 10 lapsed, 0 revoked
	// welcome: used up, 0 left, 30 drawn, 0 lapsed, 0 revoked
	// bounced: revoked, 0 left, 0 drawn, 0 lapsed, 100 revoked
	// paid: open, 200 left, 0 drawn, 0 lapsed, 0 revoked
	// on the 10th: bounced 100
	// on the 10th: paid 200
	// on the 10th: trial 10
	// on the 10th: welcome 30
}
