package carvejobs_test

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/leases"
	"github.com/pgmetered/metered/leases/carvejobs"
)

// The cluster eu has a budget of 1000 units, and carves 400 of them for the cluster us, which sells without a call to
// eu. Closing the part gives the unused units back.
func Example() {
	ctx := context.Background()
	pools, clients := map[string]*pgxpool.Pool{}, map[string]*metered.Client{}
	workers, queues := river.NewWorkers(), []*river.Client[pgx.Tx]{}
	for _, name := range []string{"eu", "us"} {
		pool, done := exampleDatabase()
		defer done()
		queue, err := river.NewClient(riverpgxv5.New(pool), &river.Config{
			Workers: workers, Queues: map[string]river.QueueConfig{river.QueueDefault: {MaxWorkers: 4}}, FetchPollInterval: 100 * time.Millisecond,
		})
		check(err)
		client, err := metered.New(pool, metered.Config{River: queue})
		check(err)
		pools[name], clients[name], queues = pool, client, append(queues, queue)
	}
	clusters, err := carvejobs.New(clients, carvejobs.Config{})
	check(err)
	clusters.AddWorkers(workers)
	for _, queue := range queues {
		check(queue.Start(ctx))
		defer queue.StopAndCancel(ctx)
	}
	_, err = metered.Do(ctx, clients["eu"], metered.Command{ID: "top-up", Input: 1000}, func(_ context.Context, tx *metered.Tx) (any, error) {
		return nil, tx.Credit(budget.Credit{Scope: "acme", Amount: 1000})
	})
	check(err)

	link, prepaid := carvejobs.Link{Home: "eu", Away: "us", Child: "acme/us"}, []budget.Limit{budget.Prepaid(0)}
	_, err = clusters.Carve(ctx, carvejobs.RemoteCarving{Link: link, From: budget.Charge{Scope: "acme", Amount: 400, Limits: prepaid}, TTL: time.Hour})
	check(err)
	carver, err := leases.NewCarver(clients["us"].Budget)
	check(err)
	for { // until the message has arrived
		if _, err := carver.Get(ctx, pools["us"], link.Child); err == nil {
			break
		}
		time.Sleep(20 * time.Millisecond)
	}
	sell := func(cluster, id, scope string, amount int64) {
		_, err := metered.Do[any](ctx, clients[cluster], metered.Command{ID: id, Charges: []budget.Charge{{Scope: scope, Amount: amount, Limits: prepaid}}}, nil)
		fmt.Printf("%s sells %d: %q\n", cluster, amount, metered.Code(err))
	}
	sell("us", "sale-1", link.Child, 150)
	sell("eu", "sale-2", "acme", 601) // 400 are leased, whether us has sold them or not
	sell("eu", "sale-3", "acme", 600)

	_, err = clusters.End(ctx, link, budget.Note{})
	check(err)
	sell("us", "sale-4", link.Child, 1)
	home, err := leases.NewCarver(clients["eu"].Budget)
	check(err)
	for lease := (leases.Lease{}); lease.SettledAt.IsZero(); time.Sleep(20 * time.Millisecond) {
		lease, err = home.Get(ctx, pools["eu"], link.Child)
		check(err)
	}
	sell("eu", "sale-5", "acme", 250)
	sell("eu", "sale-6", "acme", 1)

	// Output:
	// us sells 150: ""
	// eu sells 601: "budget_exceeded"
	// eu sells 600: ""
	// us sells 1: "scope_closed"
	// eu sells 250: ""
	// eu sells 1: "budget_exceeded"
}
