package replica_test

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/replica"
)

// A balance is read from a replica, and never from before the user's own last write. The
// position travels with the user, in a cookie for example.
func ExampleReadAt() {
	ctx := context.Background()
	primary, done := exampleDatabase()
	defer done()
	standby := primary // of an application: a pool on a standby
	client, err := metered.New(primary, metered.Config{})
	check(err)

	out, err := metered.Do(ctx, client, metered.Command{ID: "top-up 1", LSN: true, Input: 100}, func(_ context.Context, tx *metered.Tx) (any, error) {
		return nil, tx.Credit(budget.Credit{Scope: "wallet/ann", Amount: 100})
	})
	check(err)
	cookie := out.LSN.String()

	seen, err := replica.ParseLSN(cookie)
	check(err)
	var usage []budget.Usage
	read := func(ctx context.Context, conn *pgx.Conn) (err error) {
		usage, err = client.Budget.Usage(ctx, conn, budget.Query{Scope: "wallet/ann"})
		return err
	}
	err = replica.ReadAt(ctx, standby, seen, time.Second, read)
	if seen == 0 || errors.Is(err, replica.ErrStale) { // not known, or the replica is far behind
		err = primary.AcquireFunc(ctx, func(conn *pgxpool.Conn) error { return read(ctx, conn.Conn()) })
	}
	check(err)
	fmt.Println("left:", usage[0].Available(0))
	// Output:
	// left: 100
}
