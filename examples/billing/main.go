// Command billing sells to accounts that pay beforehand: a debit inside the application's own transaction.
//
//	go run ./examples/billing
//
// An order takes an item from stock, ships it and debits the account, or does none of it. The account's balance and its
// daily cap are limits on one scope, kept whatever the number of orders at once. A payment is credited once however often
// it is announced, a cancelled order is refunded once, and the statement is the ledger itself.
//
// What to read: shop.go, and statement.go for what is read from the ledger. main.go starts it, on a throwaway Postgres or,
// if DATABASE_URL is set, on that server in a database of its own that it drops at the end. What it takes from
// examples/internal for that is the only thing here that another module cannot import.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"sync"
	"syscall"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/examples/internal/exampledb"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop) // a second Ctrl-C ends the program at once; the server's watchdog cleans up
	if err := run(ctx, os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "billing:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, out io.Writer) (err error) {
	db, err := exampledb.Open(ctx, "billing", exampledb.Options{SQL: shopSQL})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, db.Close()) }()
	if _, err := db.Pool.Exec(ctx, `insert into items values ('tea', 1200, 10), ('cup', 400, 100)`); err != nil {
		return err
	}
	client, err := metered.New(db.Pool, metered.Config{})
	if err != nil {
		return err
	}
	return story(ctx, out, &shop{db.Pool, client})
}

func story(ctx context.Context, out io.Writer, s *shop) error {
	order := func(id, sku, address string) {
		cents, err := s.order(ctx, id, "ann", sku, address)
		if err != nil {
			fmt.Fprintf(out, "%s, a %s: refused: %s\n", id, sku, explain(err))
			return
		}
		fmt.Fprintf(out, "%s, a %s: shipped, %s debited\n", id, sku, money(cents))
	}

	fmt.Fprintln(out, "Without credit nothing is sold. A payment is announced twice, and credited once.")
	order("order-1", "tea", "1 High Street")
	for range 2 {
		replayed, err := s.topUp(ctx, "payment-1", "ann", 80_00)
		if err != nil {
			return err
		}
		fmt.Fprintf(out, "payment-1 of %s: replayed: %v\n", money(80_00), replayed)
	}

	fmt.Fprintln(out, "\nAn order debits and ships, or does neither.")
	order("order-1", "tea", "1 High Street")
	order("order-1", "tea", "1 High Street")
	order("order-2", "tea", "") // shipments refuse to go nowhere
	order("order-3", "pot", "1 High Street")

	fmt.Fprintln(out, "\nAs a command, the same order is answered again.")
	for range 2 {
		cents, replayed, err := s.orderOnce(ctx, "order-4", "ann", "tea", "1 High Street")
		if err != nil {
			return err
		}
		fmt.Fprintf(out, "order-4, a tea: %s debited, replayed: %v\n", money(cents), replayed)
	}

	fmt.Fprintln(out, "\n20 orders of a cup at once. There is credit for 14, and the day's cap has room for 6.")
	if err := rush(ctx, out, s, 20); err != nil {
		return err
	}
	order("order-5", "cup", "1 High Street")

	fmt.Fprintln(out, "\nCancelled, an order is refunded, once, and the day has the room again.")
	for range 2 {
		fmt.Fprintf(out, "cancel order-4: %s\n", outcome(s.cancel(ctx, "order-4", "ann")))
	}
	order("order-6", "tea", "1 High Street")

	fmt.Fprintln(out, "\nThe statement of ann")
	if err := s.statement(ctx, out, "ann"); err != nil {
		return err
	}
	fmt.Fprintln(out)
	return s.audit(ctx, out, "ann")
}

func outcome(err error) string {
	if err != nil {
		return "refused: " + explain(err)
	}
	return "done"
}

// rush orders n cups at the same time.
func rush(ctx context.Context, out io.Writer, s *shop, n int) error {
	errs := make([]error, n)
	var wg sync.WaitGroup
	for i := range n {
		wg.Go(func() { _, errs[i] = s.order(ctx, fmt.Sprint("cup-", i+1), "ann", "cup", "1 High Street") })
	}
	wg.Wait()
	var shipped, refused int
	for _, err := range errs {
		switch {
		case err == nil:
			shipped++
		case metered.Code(err) == "budget_exceeded":
			refused++
		default:
			return err
		}
	}
	fmt.Fprintf(out, "shipped: %d, refused: %d\n", shipped, refused)
	return nil
}
