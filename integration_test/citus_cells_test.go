package integration_test

import (
	"context"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/rivertype"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/cells"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/jobs"
	"github.com/pgmetered/metered/jobs/citusjobs"
)

// cellsOn is a Router of the schemas metered and second. With one pool a tenant moves in one transaction, with two in three.
func cellsOn(pools ...*pgxpool.Pool) (*cells.Router, error) {
	var clients []*metered.Client
	for i, schema := range []string{"metered", "second"} {
		pool := pools[i%len(pools)]
		enqueues, err := river.NewClient(citusjobs.New(pool), &river.Config{Schema: schema, Plugins: []rivertype.Plugin{jobs.Plugin()}})
		if err != nil {
			return nil, err
		}
		c, err := metered.New(pool, metered.Config{Config: budget.Config{Schema: schema, LockTimeout: time.Minute}, River: enqueues})
		if err != nil {
			return nil, err
		}
		clients = append(clients, c)
	}
	return cells.New(clients)
}

// router is that of a process on a node, with so many pools.
func (c *citus) router(node string, pools int) *cells.Router {
	c.t.Helper()
	all := []*pgxpool.Pool{c.nodes[node]}
	for range pools - 1 {
		all = append(all, pgtest.Reopen(c.t, c.nodes[node], func(*pgxpool.Config) {}))
	}
	r, err := cellsOn(all...)
	require.NoError(c.t, err)
	return r
}

// A tenant moves between cells on two workers, and back, with a hold and a record. Whoever does not know yet follows it, through each node.
func TestCitus_ATenantMovesBetweenWorkers(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	c := onCitus(t, citusCluster).migrated()
	second := c.elsewhere("second")
	mover := c.router("coordinator", 1)
	require.NoError(t, mover.SetUp(ctx))
	var callers []*cells.Router
	for _, node := range citusNodes {
		callers = append(callers, c.router(node, 1))
	}
	spend := metered.Command{ID: "1", Tenant: "acme", Charges: []budget.Charge{{Scope: "acme/uploads", Amount: 3}},
		Holds: []holds.Placement{{Tenant: "acme", ID: "kept", TTL: time.Hour, Lines: []holds.Line{{Scope: "acme/seats", Amount: 2}}}}}
	for n, to := range []int{1, 0, 1} {
		for i, r := range callers {
			require.NoError(t, r.Run(ctx, "acme", func(ctx context.Context, tenant *metered.Client) error {
				out, err := metered.Do[any](ctx, tenant, spend, nil)
				if err == nil {
					require.Equal(t, n > 0 || i > 0, out.Replayed)
				}
				return err
			}))
		}
		require.NoError(t, mover.Move(ctx, cells.Move{Tenant: "acme", To: to}))
	}
	require.NoError(t, callers[1].Run(ctx, "acme", func(ctx context.Context, tenant *metered.Client) error {
		return tenant.RunTx(ctx, pgx.TxOptions{}, func(ctx context.Context, tx pgx.Tx) error {
			_, err := tenant.Holds.Capture(ctx, tx, holds.Capture{Tenant: "acme", IDs: []string{"kept"}, All: true})
			return err
		})
	}))
	here, there := pgtest.NewClient(t, c.owner, metered.Config{}), pgtest.NewClient(t, c.owner, metered.Config{Config: budget.Config{Schema: second}})
	for scope, units := range map[string]int64{"acme/uploads": 3, "acme/seats": 2} {
		u, err := there.Budget.Usage(ctx, c.owner, budget.Query{Scope: scope})
		require.NoError(t, err)
		require.Equal(t, units, u[0].Spent, scope)
	}
	require.Zero(t, pgtest.Count(t, c.owner, "metered.ledger"))
	pgtest.RequireVerified(t, c.owner, here.Budget)
	pgtest.RequireVerified(t, c.owner, there.Budget)
}
