// Command billing is a metered service with monthly plans, prepaid credit, alerts and invoices.
//
//	go run ./examples/billing
//
// Read service.go and usage.go, then invoice.go. main.go runs it on a throwaway Postgres, or on that of
// DATABASE_URL in a database of its own that it drops at the end.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/pgmetered/metered/examples/internal/exampledb"
)

func main() {
	exampledb.With("billing", exampledb.Options{SQL: serviceSQL, Jobs: true}, func(ctx context.Context, db *exampledb.Database) error {
		s, err := newService(db.Pool)
		if err != nil {
			return err
		}
		if err := db.Work(ctx, s.river); err != nil {
			return err
		}
		return story(ctx, os.Stdout, s)
	})
}

// story is the first month of an account. The tests are those of many months.
func story(ctx context.Context, out io.Writer, s *service) error {
	ann := account{ID: "ann", Plan: "small", Zone: "Europe/Berlin", Since: time.Now().Add(-time.Hour)}
	if err := s.subscribe(ctx, ann); err != nil {
		return err
	}
	fmt.Fprintln(out, "Ann subscribes: 1000 units this month, in a lot that ends with it. There is a promotion, and she pays 500.")
	if _, err := s.promote(ctx, "spring", "ann", 300, 90*24*time.Hour); err != nil {
		return err
	}
	for range 2 {
		granted, err := s.topUp(ctx, "payment-1", "ann", 500)
		if err != nil {
			return err
		}
		fmt.Fprintf(out, "payment-1: granted before: %v\n", granted.Replayed)
	}
	if err := balance(ctx, out, s); err != nil {
		return err
	}

	fmt.Fprintln(out, "\n40 renders of 50 at once. The plan's cap of a month is 2000; at 80 % of it she gets an alert, once.")
	if err := rush(ctx, out, s, 40, 50); err != nil {
		return err
	}
	if err := alerted(ctx, out, s); err != nil {
		return err
	}
	_, err := s.render(ctx, "one-more", "ann", 1)
	if err == nil {
		return errors.New("it was let in")
	}
	fmt.Fprintf(out, "one more: %s\n", explain(err))
	if err := balance(ctx, out, s); err != nil {
		return err
	}

	fmt.Fprintln(out, "\nA refund of 20, and then a dispute of the same render: 50 in all, and no more.")
	for _, units := range []int64{20, 0, 0} {
		given, err := s.refund(ctx, "render-1", "ann", units, "too dark")
		if err != nil {
			return err
		}
		fmt.Fprintf(out, "given back: %d\n", given)
	}

	fmt.Fprintln(out, "\nThe payment bounces. Its spent units go on the invoice.")
	revoked, err := s.bounce(ctx, "payment-1", "ann")
	if err != nil {
		return err
	}
	fmt.Fprintf(out, "taken back: %d, spent before: %d\n", revoked.Amount, revoked.Missing)

	fmt.Fprintln(out, "\nThe month so far")
	a, err := find(ctx, s.pool, accountSQL, "ann")
	if err != nil {
		return err
	}
	in, err := s.month(ctx, s.pool, a)
	if err != nil {
		return err
	}
	fmt.Fprintf(out, "opening %d + granted %d - used %d + refunded %d - revoked %d = closing %d\n",
		in.Opening, in.Granted, in.Used, in.Refunded, in.Revoked, in.Closing)
	fmt.Fprintf(out, "of the plan %d, promotional %d, paid %d, overdrawn %d\n", in.Of[ofPlan], in.Of[promotional], in.Of[paid], in.Of[""])
	return s.audit(ctx, out, "ann")
}

func balance(ctx context.Context, out io.Writer, s *service) error {
	b, err := s.book.Balance(ctx, s.pool, scope("ann"))
	if err == nil {
		fmt.Fprintf(out, "balance %d: plan %d, promotional %d, paid %d\n", b.Units, b.Of(ofPlan), b.Of(promotional), b.Of(paid))
	}
	return err
}

// rush makes n renders at the same time.
func rush(ctx context.Context, out io.Writer, s *service, n int, units int64) error {
	done, refused, err := exampledb.Admitted(n, func(i int) error {
		_, err := s.render(ctx, fmt.Sprint("render-", i+1), "ann", units)
		return err
	})
	fmt.Fprintf(out, "rendered: %d, refused: %d\n", done, refused)
	return err
}

// alerted waits for River to have worked the job.
func alerted(ctx context.Context, out io.Writer, s *service) error {
	return exampledb.Await(ctx, func() (done bool, err error) {
		var n, used int64
		err = s.pool.QueryRow(ctx, `select count(*), coalesce(max(used), 0) from alerts`).Scan(&n, &used)
		if n > 0 {
			fmt.Fprintf(out, "alerts: %d, at %d\n", n, used)
		}
		return n > 0, err
	})
}
