// Command stripe sends the usage in a ledger to a meter of Stripe, each entry once.
//
//	go run ./examples/stripe
//
// Read export.go and README.md. main.go runs it against fake.go, on a throwaway Postgres, or on that of
// DATABASE_URL in a database of its own that it drops at the end.
package main

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/examples/internal/exampledb"
)

func main() {
	exampledb.With("stripe", exampledb.Options{SQL: exportSQL}, story)
}

// newExporter sends the usage of the scopes org/… to the customers cus_….
func newExporter(db *pgxpool.Pool, base, key string, now func() time.Time) (*exporter, error) {
	ledger, err := budget.New(budget.Config{})
	return &exporter{
		db: db, ledger: ledger, http: http.DefaultClient, base: base, key: key, event: "api_calls",
		customer: func(scope string) string {
			org, is := strings.CutPrefix(scope, "org/")
			if !is {
				return ""
			}
			return "cus_" + org
		},
		now: now, pause: time.Second, tries: 8,
	}, err
}

func story(ctx context.Context, db *exampledb.Database) error {
	stripe := newFake("sk_test", time.Now)
	server := httptest.NewServer(stripe)
	defer server.Close()
	x, err := newExporter(db.Pool, server.URL, "sk_test", time.Now)
	if err != nil {
		return err
	}
	x.pause = time.Millisecond
	for _, c := range []budget.Charge{{Scope: "org/acme", Amount: 7}, {Scope: "org/zeta", Amount: 2}, {Scope: "org/acme", Amount: 5}, {Scope: "user/ann", Amount: 1}} {
		if _, err := x.ledger.ChargeNow(ctx, db.Pool, c); err != nil {
			return err
		}
	}
	stripe.breaks = func() (before, after bool) { return false, stripe.calls == 1 } // the first answer gets lost
	if err := x.run(ctx); err != nil {
		return err
	}
	fmt.Fprintf(os.Stdout, "acme %d, zeta %d, after %d calls\n", stripe.sums["cus_acme"], stripe.sums["cus_zeta"], stripe.calls)
	return nil
}
