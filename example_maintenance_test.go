package metered_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"strings"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/jobs"
	"github.com/pgmetered/metered/tokens"
)

// maintain is what to run once a day, as a role with GrantMaintenanceSQL's grants: from
// cron, or a River periodic job. All of it may run beside everything else, any number
// of times, and can be cancelled.
func maintain(ctx context.Context, pool *pgxpool.Pool, c *metered.Client) error {
	// At least the longest window of any limit. Limits by address come and go.
	entries, err1 := c.Budget.Purge(ctx, pool, budget.PurgeOptions{
		OlderThan: 35 * 24 * time.Hour,
		Forget:    func(scope string) bool { return strings.HasPrefix(scope, "address/") },
	})
	// For as long as a client may repeat a request.
	operations, err2 := c.PurgeOperations(ctx, pool, metered.PurgeOptions{OlderThan: 7 * 24 * time.Hour})
	used, err3 := c.Tokens.Purge(ctx, pool, tokens.PurgeOptions{})
	ended, err4 := c.Holds.Purge(ctx, pool, holds.PurgeOptions{})
	keys, err5 := c.Jobs.Purge(ctx, pool, jobs.PurgeOptions{OlderThan: 30 * 24 * time.Hour})
	fmt.Printf("purged: %d entries (%d scopes forgotten), %d operations, %d tokens, %d holds, %d keys\n",
		entries.Entries, entries.Forgotten, operations, used, ended, keys)
	return errors.Join(err1, err2, err3, err4, err5)
}

// Tables grow with use: what to run regularly.
func Example_maintenance() {
	ctx := context.Background()
	pool, stop := exampleDatabase(ctx)
	defer stop()
	if _, err := metered.Migrate(ctx, pool, metered.MigrateOptions{River: true}); err != nil {
		log.Fatal(err)
	}
	riverClient, err := river.NewClient(riverpgxv5.New(pool), &river.Config{})
	if err != nil {
		log.Fatal(err)
	}
	client, err := metered.New(pool, metered.Config{River: riverClient})
	if err != nil {
		log.Fatal(err)
	}

	_, err = metered.Do[any](ctx, client, metered.Command{ID: metered.NewID(), Charges: []budget.Charge{
		{Scope: "address/192.0.2.1", Amount: 1, Limits: []budget.Limit{{Max: 10, Window: time.Minute}}},
	}}, nil)
	if err != nil {
		log.Fatal(err)
	}
	if err := maintain(ctx, pool, client); err != nil {
		log.Fatal(err)
	}
	// Output:
	// purged: 0 entries (0 scopes forgotten), 0 operations, 0 tokens, 0 holds, 0 keys
}
