package budget_test

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/pgmetered/metered/budget"
)

// An alert at 80 % of a plan, and one when it is used up. The alert is a row that commits with the charge that crosses
// the level. With River it would be a job.
func ExampleLimit_WithThresholds() {
	ctx := context.Background()
	pool, done := exampleDatabase()
	defer done()
	_, err := pool.Exec(ctx, `create table alerts (scope text, what text, used bigint)`)
	check(err)
	ledger, err := budget.New(budget.Config{
		OnThreshold: func(ctx context.Context, tx pgx.Tx, c budget.Crossing) error {
			_, err := tx.Exec(ctx, `insert into alerts values ($1, $2, $3)`, c.Scope, c.Threshold.Name, c.Used)
			return err
		},
	})
	check(err)
	plan := budget.Lifetime(1_000).WithThresholds(budget.Threshold{Name: "80%", Percent: 80}, budget.Threshold{Name: "used up"})
	fmt.Println(len(plan.Thresholds()), "levels")

	for _, amount := range []int64{700, 150, 150} {
		check(pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
			_, err := ledger.Charge(ctx, tx, budget.Charge{Scope: "org/acme", Amount: amount, Limits: []budget.Limit{plan}})
			return err
		}))
	}
	rows, err := pool.Query(ctx, `select what, used from alerts order by used`)
	check(err)
	var what string
	var used int64
	_, err = pgx.ForEachRow(rows, []any{&what, &used}, func() error {
		_, err := fmt.Println(what, used)
		return err
	})
	check(err)
	// Output:
	// 2 levels
	// 80% 850
	// used up 1000
}
