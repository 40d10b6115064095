package cells_test

import (
	"context"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/cells"
	"github.com/pgmetered/metered/internal/pgtest"
)

// world is cells on some databases, each with a table of the application.
type world struct {
	testing.TB
	pools   []*pgxpool.Pool
	schemas []string
	cfg     metered.Config
	rivers  []*river.Client[pgx.Tx] // or none
}

// three are the schemas of three cells, with River's tables.
var three = &pgtest.Template{Fill: func(ctx context.Context, pool *pgxpool.Pool) error {
	for i := range 3 {
		if err := makeCell(ctx, pool, i, true); err != nil {
			return err
		}
	}
	return nil
}}

func cellSchema(i int) string { return fmt.Sprint("cell_", i) }

func makeCell(ctx context.Context, pool *pgxpool.Pool, i int, river bool) error {
	schema := cellSchema(i)
	_, err := metered.Migrate(ctx, pool, metered.MigrateOptions{Schema: schema, River: river, RiverSchema: schema})
	if err == nil {
		_, err = pool.Exec(ctx, fmt.Sprintf(`create table %s.uploads (tenant text, name text primary key, size int, doubled int generated always as (size * 2) stored);
			create table %[1]s.pages (upload text references %[1]s.uploads, page int, primary key (upload, page))`, schema))
	}
	if err == nil {
		_, err = pool.Exec(ctx, strings.ReplaceAll(os.Getenv(pgtest.MutantEnv), "metered.", schema+"."))
	}
	return err
}

// newWorld has n cells on the databases, in turn.
func newWorld(t testing.TB, n int, databases ...*pgxpool.Pool) *world {
	t.Helper()
	w := &world{TB: t, cfg: metered.Config{Config: budget.Config{LockTimeout: time.Minute}}}
	for i := range n {
		w.pools, w.schemas = append(w.pools, databases[i%len(databases)]), append(w.schemas, cellSchema(i))
	}
	require.NoError(t, w.router().SetUp(t.Context()))
	return w
}

func database(t testing.TB) *pgxpool.Pool {
	t.Helper()
	return pgtest.OpenWith(t, pgtest.Options{Template: three, MaxConns: 30})
}

// router is one of a process of its own, on the pools or on others in their places.
func (w *world) router(pools ...*pgxpool.Pool) *cells.Router {
	w.Helper()
	var clients []*metered.Client
	for i, pool := range w.pools {
		if i < len(pools) && pools[i] != nil {
			pool = pools[i]
		}
		clients = append(clients, w.client(i, pool))
	}
	r, err := cells.New(clients)
	require.NoError(w, err)
	return r
}

// client is that of a cell.
func (w *world) client(i int, pool *pgxpool.Pool) *metered.Client {
	w.Helper()
	cfg := w.cfg
	if cfg.Schema = w.schemas[i]; w.rivers != nil {
		cfg.River = w.rivers[i]
	}
	c, err := metered.New(pool, cfg)
	require.NoError(w, err)
	return c
}

var appTables = []cells.Table{{Name: "uploads"}, {Name: "pages", Where: `upload in (select name from uploads where tenant = $1)`}}

func (w *world) move(r *cells.Router, tenant string, to int) {
	w.Helper()
	require.NoError(w, r.Move(w.Context(), cells.Move{Tenant: tenant, To: to, Tables: appTables, LockTimeout: time.Minute}))
}

// lives is the cell that has entries of the tenant. No other one has any row of its.
func (w *world) lives(tenant string) int {
	w.Helper()
	at := -1
	for i, pool := range w.pools {
		n := 0
		for table, column := range map[string]string{
			"ledger": "scope", "tallies": "scope", "refund_sum": "scope", "resources": "scope", "leases": "scope", "lease_sum": "scope", "lot_rows": "scope", "lot_moves": "scope", "lot_holds": "scope", "lot_debts": "scope", "plan_changes": "scope", "feed_scopes": "scope", "feed": "scope",
			"hold_lines": "scope", "holds": "tenant", "tokens": "subject", "operations": "tenant", "newest": "tenant", "job_keys": "tenant", "packed_rows": "tenant", "uploads": "tenant",
		} {
			n += pgtest.Value[int](w, pool, fmt.Sprintf(`select count(*)::int from %s.%s where %s = $1 or starts_with(%[3]s, $1 || '/')`, w.schemas[i], table, column), tenant)
		}
		if n > 0 {
			require.Equal(w, -1, at, "cells %d and %d have rows of %s", at, i, tenant)
			at = i
		}
	}
	return at
}

// verified checks that all cells add up.
func (w *world) verified() {
	w.Helper()
	for i, pool := range w.pools {
		pgtest.RequireVerified(w, pool, w.client(i, pool).Budget)
	}
}

// in runs fn in a transaction of the tenant.
func in(t testing.TB, r *cells.Router, tenant string, fn func(c *metered.Client, tx pgx.Tx) error) {
	t.Helper()
	require.NoError(t, patiently(t.Context(), r, tenant, func(ctx context.Context, c *metered.Client) error {
		return c.RunTx(ctx, pgx.TxOptions{}, func(_ context.Context, tx pgx.Tx) error { return fn(c, tx) })
	}))
}

// do runs a command of the tenant.
func do[R any](ctx context.Context, r *cells.Router, cmd metered.Command, fn metered.Func[R]) (out metered.Outcome[R], err error) {
	err = patiently(ctx, r, cmd.Tenant, func(ctx context.Context, c *metered.Client) (err error) {
		out, err = metered.Do(ctx, c, cmd, fn)
		return err
	})
	return out, err
}
