// Command openmeter sends the usage in a ledger to OpenMeter as CloudEvents, each entry once.
//
//	go run ./examples/openmeter
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
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/examples/internal/exampledb"
)

func main() {
	exampledb.With("openmeter", exampledb.Options{SQL: exportSQL}, story)
}

// newExporter names this ledger by source: give each ledger one of its own.
func newExporter(db *pgxpool.Pool, base, key string) (*exporter, error) {
	ledger, err := budget.New(budget.Config{})
	return &exporter{
		db: db, ledger: ledger, http: http.DefaultClient, base: base, key: key,
		source: "metered/production", typ: "units", pause: time.Second, tries: 8,
	}, err
}

func story(ctx context.Context, db *exampledb.Database) error {
	receiver := newFake("om_test")
	server := httptest.NewServer(receiver)
	defer server.Close()
	x, err := newExporter(db.Pool, server.URL, "om_test")
	if err != nil {
		return err
	}
	x.pause = time.Millisecond
	for _, c := range []budget.Charge{{Scope: "org/acme", Amount: 7}, {Scope: "org/zeta", Amount: 2}, {Scope: "org/acme", Amount: 5}} {
		if _, err := x.ledger.ChargeNow(ctx, db.Pool, c); err != nil {
			return err
		}
	}
	receiver.breaks = func() (before, after bool) { return false, len(receiver.known) == 0 } // the first answer gets lost
	if err := x.run(ctx); err != nil {
		return err
	}
	fmt.Fprintf(os.Stdout, "acme %d, zeta %d, %d events came twice\n", receiver.sums["org/acme"], receiver.sums["org/zeta"], receiver.again)
	return nil
}
