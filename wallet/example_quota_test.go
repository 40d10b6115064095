package wallet_test

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/wallet"
)

// A program has a column of credit, users.quota, which it lowered by itself. Its users move into wallets, as often as the import runs.
// Codes that were sold before are redeemed once, and an administrator sets a balance: a grant or a revocation of the difference,
// which is on the statement and is no use.
func Example_quota() {
	ctx := context.Background()
	pool, done := exampleDatabase()
	defer done()
	client, err := metered.New(pool, metered.Config{})
	check(err)
	book, err := wallet.New(client.Budget, wallet.Config{})
	check(err)
	_, err = pool.Exec(ctx, `create table users (name text primary key, quota bigint not null);
		insert into users values ('ann', 700), ('bob', 0)`)
	check(err)

	// The reference makes each user's import take effect once.
	move := func(tx pgx.Tx, name string) error {
		var quota int64
		if err := tx.QueryRow(ctx, "select quota from users where name = $1 for update", name).Scan(&quota); err != nil || quota <= 0 {
			return err
		}
		_, err := book.Grant(ctx, tx, wallet.Grant{Wallet: "credit/" + name, Amount: quota, Reference: "users.quota"})
		return err
	}
	// redeem is a command by the code, so that a code is redeemed once, whoever sends it and however often.
	redeem := func(user, code string, units int64) (metered.Outcome[any], error) {
		return metered.Do(ctx, client, metered.Command{ID: code, Tenant: "codes", Name: "redeem", Input: user},
			func(ctx context.Context, tx *metered.Tx) (any, error) {
				_, err := book.Grant(ctx, tx, wallet.Grant{Wallet: "credit/" + user, Amount: units, Reference: "code " + code})
				return nil, err
			})
	}
	// setBalance locks the wallet, so that nothing is drawn between the look and the difference.
	setBalance := func(tx pgx.Tx, user string, units int64, reference string) error {
		name, note := "credit/"+user, budget.Note{Actor: "admin/root", Reason: reference}
		if err := client.Budget.Lock(ctx, tx, name); err != nil {
			return err
		}
		balance, err := book.Balance(ctx, tx, name)
		if err != nil {
			return err
		}
		if more := units - balance.Units; more > 0 {
			_, err := book.Grant(ctx, tx, wallet.Grant{Wallet: name, Amount: more, Reference: reference, Note: note})
			return err
		}
		for _, lot := range balance.Lots {
			if less := min(balance.Units-units, lot.Units); less > 0 {
				if _, err := book.Revoke(ctx, tx, wallet.Revoke{Wallet: name, Lot: lot.Lot, Amount: less, Note: note}); err != nil {
					return err
				}
				balance.Units -= less
			}
		}
		return nil
	}

	show := func(what string) {
		ann, err := book.Balance(ctx, pool, "credit/ann")
		check(err)
		usage, err := client.Budget.Usage(ctx, pool, budget.Query{Scope: "credit/ann", Window: 24 * time.Hour})
		check(err)
		fmt.Printf("%s: balance %d, used %d\n", what, ann.Units, usage[0].Used)
	}
	in := func(f func(tx pgx.Tx) error) {
		check(pgx.BeginFunc(ctx, pool, f))
	}
	for range 2 {
		in(func(tx pgx.Tx) error { return move(tx, "ann") })
	}
	show("imported twice")
	for range 2 {
		_, err := redeem("ann", "SUMMER-26", 50)
		check(err)
	}
	_, err = redeem("bob", "SUMMER-26", 50)
	fmt.Println("bob:", metered.Code(err))
	in(func(tx pgx.Tx) error {
		_, err := client.Budget.Charge(ctx, tx, book.Charge("credit/ann", 20))
		return err
	})
	show("a code, and a request")
	in(func(tx pgx.Tx) error { return setBalance(tx, "ann", 100, "ticket 17") })
	show("set to 100")
	in(func(tx pgx.Tx) error { return setBalance(tx, "ann", 300, "ticket 18") })
	show("set to 300")
	// Output:
	// imported twice: balance 700, used 0
	// bob: operation_conflict
	// a code, and a request: balance 730, used 20
	// set to 100: balance 100, used 20
	// set to 300: balance 300, used 20
}
