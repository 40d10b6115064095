// Package cells spreads tenants over cells: up to 256 schemas, in one database or in several, each
// with its own metered tables, River's and the application's. A tenant lives in one cell, and can
// be moved.
//
//	clients[i], err = metered.New(pools[i], metered.Config{Schema: fmt.Sprintf("cell_%d", i), …}) // for each cell
//	router, err := cells.New(clients)
//	err = router.Run(ctx, "acme", func(ctx context.Context, c *metered.Client) error {
//	    out, err = metered.Do(ctx, c, metered.Command{ID: id, Tenant: "acme", …}, fn)
//	    return err
//	})
//
// A tenant's rows have its name, alone or before a slash: in scopes (acme/uploads), in the Tenant
// of commands, holds, claims and jobs, and in the Subject of tokens. A budget.Scopes with the
// tenant as key makes such scopes, if Scopes.Scope(tenant) is the tenant's name.
//
// No call looks a tenant up. Each transaction of its Client begins with a statement that fails once
// the tenant has left the cell. Commands and sessions need no round trip for it.
package cells

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/internal/fault"
	"github.com/pgmetered/metered/internal/lend"
	"github.com/pgmetered/metered/internal/pause"
	"github.com/pgmetered/metered/internal/schema"
)

var (
	ErrMoved    error = fault.ErrMoved   // the tenant has left the cell, or is on its way. Nothing was written
	ErrNotCell  error = fault.ErrNotCell // SetUp was not called, or with other cells
	ErrOpen     error = errOpen          // of a Move. Its text has the first ten reasons
	ErrConflict error = errConflict      // the new cell has a row with the key of one that moves, or a table with other columns
)

var (
	errArgument = fault.New("invalid_argument", "cells: invalid argument")
	errOpen     = fault.New("tenant_open", "cells: the tenant has something open that cannot be moved")
	errConflict = fault.New("tenant_conflict", "cells: the rows do not fit into the new cell")
)

// Bounds of a router.
const (
	maxCells    = 256
	maxParts    = 4      // of a tenant's name: _refuse_moved looks at as many
	maxKnown    = 65_536 // moved tenants that a Router remembers
	maxFollowed = 30     // times that Run looks for a tenant on its way: 4 seconds
)

// Router is safe for concurrent use.
type Router struct {
	cells []cell

	mu    sync.Mutex
	known map[string]place // of moved tenants
}

type cell struct {
	client *metered.Client
	pool   *pgxpool.Pool
	schema schema.Name
}

// place is a tenant's cell after so many moves.
type place struct {
	cell  int
	moves int64
}

// inMetered is what package metered lends.
var inMetered = lend.Borrow[interface {
	For(c *metered.Client, tenant string, cell, cells int, first bool) *metered.Client
	Place(c *metered.Client) (*pgxpool.Pool, schema.Name)
	RiverJobs(c *metered.Client) string
}]("metered")

// New takes the Clients of all cells, 1 to 256: the same in all programs, in the same order, for
// good. It sends no SQL. Between cells that share a pool a tenant moves in one transaction.
func New(clients []*metered.Client) (*Router, error) {
	if len(clients) < 1 || len(clients) > maxCells {
		return nil, fault.Invalid(errArgument, "clients", "are %d, want 1 to %d", len(clients),
			maxCells)
	}
	r := &Router{known: map[string]place{}}
	for i, client := range clients {
		pool, name := inMetered.Place(client)
		if pool == nil {
			return nil, fault.Misuse(errArgument, fmt.Sprintf("clients[%d]", i),
				"was not made by metered.New")
		}
		if slices.ContainsFunc(r.cells, func(c cell) bool { return c.pool == pool && c.schema == name }) {
			return nil, fault.Misuse(errArgument, fmt.Sprintf("clients[%d]", i),
				"is of the schema of another one")
		}
		r.cells = append(r.cells, cell{client, pool, name})
	}
	return r, nil
}

func (r *Router) check(tenant string) error {
	if err := fault.Made(errArgument, "router", r != nil && len(r.cells) > 0); err != nil {
		return err
	}
	if tenant == "" || slices.Contains(strings.Split(tenant, "/"), "") ||
		strings.Count(tenant, "/") >= maxParts {
		return fault.Invalid(errArgument, "tenant",
			"%q is not 1 to %d parts with slashes between them", tenant, maxParts)
	}
	return fault.Text(errArgument, "tenant", tenant, maxTenantBytes)
}

const maxTenantBytes = 200 // leaves room for the rest of a scope

// first is a tenant's first cell: the first 8 bytes of the SHA-256 of its name, as a big-endian
// number, modulo the number of cells.
func (r *Router) first(tenant string) int {
	sum := sha256.Sum256([]byte(tenant))
	return int(binary.BigEndian.Uint64(sum[:8]) % uint64(len(r.cells)))
}

// Client returns a tenant's Client in the cell where this Router last knew it, without a query. If
// the tenant has left, its transactions (metered.Do, Open, RunTx and so on) are ErrMoved. Call
// Budget, Holds, Tokens and Jobs in its RunTx: in other transactions only charges and the ends of
// holds are as safe. Reads on a pool may find the old cell, which is empty.
func (r *Router) Client(tenant string) (*metered.Client, error) {
	if err := r.check(tenant); err != nil {
		return nil, err
	}
	return r.at(tenant, r.place(tenant).cell), nil
}

func (r *Router) at(tenant string, in int) *metered.Client {
	return inMetered.For(r.cells[in].client, tenant, in, len(r.cells), in == r.first(tenant))
}

func (r *Router) place(tenant string) place {
	r.mu.Lock()
	defer r.mu.Unlock()
	p, ok := r.known[tenant]
	if !ok {
		p = place{cell: r.first(tenant), moves: -1}
	}
	return p
}

// Run calls fn with the tenant's Client, and after ErrMoved again with that of the new cell. It
// waits for a tenant on its way, up to 4 seconds.
//
// A session that moved along with its tenant is ErrMoved at Settle and Cancel, and is not renewed:
// go on with metered.Resume, in its grace at the latest.
func (r *Router) Run(ctx context.Context, tenant string,
	fn func(ctx context.Context, c *metered.Client) error) error {
	if err := r.check(tenant); err != nil {
		return err
	}
	if err := fault.NotNil(errArgument, "fn", fn); err != nil {
		return err
	}
	for n := 1; ; {
		at := r.place(tenant)
		err := fn(ctx, r.at(tenant, at.cell))
		var moved *fault.Moved
		if !errors.As(err, &moved) || moved.Tenant != tenant {
			return err
		}
		if r.learn(at, moved) {
			continue // it has moved more often each time
		}
		if n++; n > maxFollowed {
			return err
		}
		if ended := pause.Before(ctx, n); ended != nil {
			return fmt.Errorf("cells: %w, while following: %w", ended, err)
		}
	}
}

// learn remembers the tenant's cell that a refusal names, and reports whether that is newer than
// was, the place that refused. If not, the tenant is on its way there, and the search begins anew
// at its first cell.
func (r *Router) learn(was place, m *fault.Moved) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if m.Cell == nil || m.Moves <= was.moves || *m.Cell >= len(r.cells) {
		if r.known[m.Tenant] == was {
			delete(r.known, m.Tenant)
		}
		return false
	}
	if len(r.known) >= maxKnown {
		clear(r.known)
	}
	if now, ok := r.known[m.Tenant]; !ok || now.moves < m.Moves {
		r.known[m.Tenant] = place{*m.Cell, m.Moves}
	}
	return true
}

const numbersPerCell = 1 << 40

const setUpSQL = `
with own as (insert into metered.cell (no, cells) values ($1::int, $2::int) on conflict do nothing returning no, cells)
select no, cells from own union all select no, cells from metered.cell`

// replanSQL has each session make its plans of the ledger anew: whether a schema is a cell is a
// constant in them. On Citus no call goes the short way that asks for it.
const replanSQL = `
do $$ begin
    if not metered._sharded() then
        alter table metered.ledger alter column seq set statistics -1;
    end if;
end $$`

// setNumbersSQL gives holds, leases, lots and River's jobs of each cell a range of numbers, so that
// they stay unique when a tenant moves.
const setNumbersSQL = `
select count(pg_catalog.setval(s.seq, s.base)) from (
    select seq, q.seqmin - 1 + $1::bigint as base
    from (values ('metered.holds', 'no'), ('metered.leases', 'no'), ('metered.lot_rows', 'no'), (nullif($2::text, ''), 'id')) t(name, number),
        lateral (select case when pg_catalog.to_regclass(t.name) is not null then pg_catalog.pg_get_serial_sequence(t.name, t.number) end::regclass as seq) s
        join pg_catalog.pg_sequence q on q.seqrelid = s.seq::pg_catalog.oid) s
where coalesce(pg_catalog.pg_sequence_last_value(s.seq), 0) < s.base`

// A text, since each node of Citus has numbers of its own.
const setAllNumbersSQL = `select pg_catalog.max(n.result) from pg_catalog.run_command_on_all_nodes($1) n where not n.success`

func (c cell) setNumbers(ctx context.Context, tx pgx.Tx, from int64) error {
	sql, river := c.schema.SQL(setNumbersSQL), inMetered.RiverJobs(c.client)
	var sharded bool
	if err := tx.QueryRow(ctx, c.schema.SQL(`select metered._sharded()`)).Scan(&sharded); err != nil {
		return err
	}
	if !sharded {
		_, err := tx.Exec(ctx, sql, from, river)
		return err
	}
	sql = strings.NewReplacer("$1", fmt.Sprint(from), "$2",
		"'"+strings.ReplaceAll(river, "'", "''")+"'").Replace(sql)
	var failed *string
	err := tx.QueryRow(ctx, setAllNumbersSQL, sql).Scan(&failed)
	if err == nil && failed != nil {
		err = errors.New(*failed)
	}
	return err
}

const usedSQL = `select exists (select from metered.cell), exists (select from metered.holds) or exists (select from metered.leases) or exists (select from metered.lots)`

// SetUp tells each schema which cell it is, after metered.Migrate. It needs the role that owns the
// schemas, and River's tables of Clients with metered.Config.River. A second call does nothing, but
// numbers for new nodes of Citus. A schema with holds, leases or lots can only become cell 0, since
// cell n numbers them, and its jobs, from n times 2^40 on.
func (r *Router) SetUp(ctx context.Context) error {
	if err := fault.Made(errArgument, "router", r != nil && len(r.cells) > 0); err != nil {
		return err
	}
	for i, c := range r.cells {
		err := pgx.BeginTxFunc(ctx, c.pool, pgx.TxOptions{IsoLevel: pgx.ReadCommitted},
			func(tx pgx.Tx) error {
				var known, used bool
				var no, of int
				if err := tx.QueryRow(ctx, c.schema.SQL(usedSQL)).Scan(&known, &used); err != nil {
					return err
				}
				if !known && used && i > 0 {
					return fault.Misuse(errArgument, fmt.Sprintf("clients[%d]", i),
						"is of a schema with holds, leases or lots: it can only be the first")
				}
				if err := tx.QueryRow(ctx, c.schema.SQL(setUpSQL), i, len(r.cells)).Scan(&no,
					&of); err != nil {
					return err
				}
				if no != i || of != len(r.cells) {
					return fmt.Errorf("%w: schema %s is cell %d of %d, and not %d of %d",
						fault.ErrNotCell, c.schema, no, of, i, len(r.cells))
				}
				if !known {
					if _, err := tx.Exec(ctx, c.schema.SQL(replanSQL)); err != nil {
						return err
					}
				}
				if i == 0 {
					return nil
				}
				return c.setNumbers(ctx, tx, int64(i)*numbersPerCell)
			})
		if err != nil && fault.Code(err) == "" {
			err = fault.Failed("cells", "set up", err)
		}
		if err != nil {
			return err
		}
	}
	return nil
}
