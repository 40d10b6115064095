package privacy_test

import (
	"context"
	"fmt"
	"log"

	"github.com/jackc/pgx/v5"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/privacy"
)

// A person gets what is stored, and then an alias. The balance goes on under the alias.
func ExampleRegister_Pseudonymize() {
	ctx := context.Background()
	db, done := exampleDatabase()
	defer done()
	ledger, err := budget.New(budget.Config{})
	check(err)
	spend := func(scope string) {
		check(pgx.BeginFunc(ctx, db, func(tx pgx.Tx) error {
			_, err := ledger.Charge(ctx, tx, budget.Charge{Scope: scope, Amount: 5, Note: budget.Note{Actor: "user/ann"}})
			return err
		}))
	}
	spend("user/ann")
	spend("org/acme")

	register, err := privacy.New(privacy.Config{})
	check(err)
	for row, err := range register.Export(ctx, db, "user/ann") {
		check(err)
		fmt.Println(row.Table)
	}
	for {
		var report privacy.Report
		check(pgx.BeginFunc(ctx, db, func(tx pgx.Tx) (err error) {
			report, err = register.Pseudonymize(ctx, tx, "user/ann", "gone/7f3a")
			return err
		}))
		fmt.Println(report.Scopes, "scope,", report.Rows, "rows")
		if report.Done {
			break
		}
	}
	usage, err := ledger.Usage(ctx, db, budget.Query{Scope: "gone/7f3a"})
	check(err)
	fmt.Println("used:", usage[0].Used)
	// Output:
	// ledger
	// ledger
	// 1 scope, 3 rows
	// used: 5
}

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}
