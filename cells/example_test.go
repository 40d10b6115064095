package cells_test

import (
	"context"
	"fmt"
	"log"

	"github.com/jackc/pgx/v5"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/cells"
)

// Two cells in one database. The second router is another process: it follows the tenant that the first one has moved.
func Example() {
	ctx := context.Background()
	pool, done := exampleDatabase()
	defer done()
	var clients []*metered.Client
	for _, schema := range []string{"cell_0", "cell_1"} {
		_, err := metered.Migrate(ctx, pool, metered.MigrateOptions{Schema: schema})
		check(err)
		client, err := metered.New(pool, metered.Config{Config: budget.Config{Schema: schema}})
		check(err)
		clients = append(clients, client)
	}
	router, err := cells.New(clients)
	check(err)
	check(router.SetUp(ctx)) // once, as the owner of the schemas
	other, err := cells.New(clients)
	check(err)

	upload := metered.Command{ID: "1", Tenant: "acme", Charges: []budget.Charge{{Scope: "acme/uploads", Amount: 3}}}
	for _, r := range []*cells.Router{router, other} {
		check(r.Run(ctx, "acme", func(ctx context.Context, c *metered.Client) error {
			out, err := metered.Do[string](ctx, c, upload, nil)
			if err == nil { // else it may have moved
				fmt.Println(out.Receipt.Entries[0].Scope, out.Receipt.Entries[0].Amount, out.Replayed)
			}
			return err
		}))
		check(r.Move(ctx, cells.Move{Tenant: "acme", To: 1}))
	}
	left, err := router.Recover(ctx) // at the start of a process that moves tenants
	check(err)
	c, err := other.Client("acme")
	check(err)
	check(c.RunTx(ctx, pgx.TxOptions{}, func(ctx context.Context, tx pgx.Tx) error {
		usage, err := c.Budget.Usage(ctx, tx, budget.Query{Scope: "acme/uploads"})
		fmt.Println(len(left), usage[0].Spent)
		return err
	}))
	// Output:
	// acme/uploads 3 false
	// acme/uploads 3 true
	// 0 3
}

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}
