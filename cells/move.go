package cells

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgmetered/metered/internal/fault"
	"github.com/pgmetered/metered/internal/pause"
	"github.com/pgmetered/metered/internal/sqlstate"
)

// Move is a tenant's move to another cell.
type Move struct {
	// Tenant is the tenant that moves.
	Tenant string

	// To is the number of the cell that the tenant moves to.
	To int

	// Tables are the application's tables that move with the tenant. Both cells have them in their
	// schemas, with the same columns. Name them in an order in which their rows can be inserted.
	Tables []Table

	// LockTimeout bounds each wait for locks, from 1ms to 1h. The tenant's commands wait
	// meanwhile, too. Defaults to 5s.
	LockTimeout time.Duration
}

// Table is a table of the application.
type Table struct {
	// Name is the table's name, without its schema.
	Name string

	// Where is the condition of the tenant's rows, with the tenant as $1. Names outside pg_catalog
	// must have their schema. Defaults to "tenant = $1".
	Where string
}

// Move moves a tenant with all of its rows: it waits for the transactions that have entered it, and
// holds up new ones. It needs the role that owns the schemas and the tables. Open holds keep their
// deadlines, and open leases end as those of a process that died. River's jobs stay, and work on
// the tenant in its new cell by the Router. One of jobs.NewWorker whose args name a hold waits
// until the tenant is back.
//
// Between cells of one pool that is one transaction. Between others it is three: the rows are
// packed in the old cell, and the tenant is out of reach until they are unpacked in the new one,
// and then they are cleared away. After an error call Move again, or Recover, from any process.
// Move to the old cell takes back a move whose rows have not arrived.
//
// Errors: ErrOpen for jobs that wait for or run on units of the tenant, holds with lines in scopes
// of others, and units carved for other tenants or clusters. ErrConflict, and budget.ErrBusy. Ids
// as old as the records that were purged in the old cell are budget.ErrRetired in the new one.
func (r *Router) Move(ctx context.Context, m Move) error {
	if err := r.check(m.Tenant); err != nil {
		return err
	}
	if m.LockTimeout == 0 {
		m.LockTimeout = 5 * time.Second
	}
	switch {
	case m.To < 0 || m.To >= len(r.cells):
		return fault.Invalid(errArgument, "Move.To", "%d is not from 0 to %d", m.To, len(r.cells)-1)
	case m.LockTimeout < time.Millisecond || m.LockTimeout > time.Hour:
		return fault.Invalid(errArgument, "Move.LockTimeout", "%v is not from 1ms to 1h",
			m.LockTimeout)
	case slices.ContainsFunc(m.Tables, func(t Table) bool { return t.Name == "" }):
		return fault.Misuse(errArgument, "Move.Tables", "has one without a name")
	}
	return pause.Collided(ctx, nil, "cells", maxFollowed, func() error {
		for {
			at, row, err := r.locate(ctx, m.Tenant)
			switch {
			case err != nil:
			case row.packed:
				err = r.settle(ctx, m.Tenant, at, m.To == at)
			case at == m.To:
				if first := r.cells[r.first(m.Tenant)]; row.moves > 0 {
					err = first.in(ctx, first.telling(ctx, m.Tenant, row.place))
				}
				return failed(err)
			default:
				if err = r.depart(ctx, m, at); err == nil {
					err = r.settle(ctx, m.Tenant, at, false)
				}
			}
			if err != nil && !errors.Is(err, errDecided) {
				return failed(err)
			}
		}
	})
}

// Recover finishes the moves that were broken off, and returns their tenants.
func (r *Router) Recover(ctx context.Context) (tenants []string, err error) {
	if err := fault.Made(errArgument, "router", r != nil && len(r.cells) > 0); err != nil {
		return nil, err
	}
	for i, c := range r.cells {
		rows, _ := c.pool.Query(ctx, c.schema.SQL(`select tenant from metered.tenants where packed order by tenant`))
		found, err := pgx.CollectRows(rows, pgx.RowTo[string])
		for _, tenant := range found {
			if err = r.settle(ctx, tenant, i, false); err != nil {
				break
			}
			tenants = append(tenants, tenant)
		}
		if err != nil {
			return tenants, failed(err)
		}
	}
	return tenants, nil
}

func failed(err error) error {
	if err == nil || fault.Code(err) != "" {
		return err
	}
	if sqlstate.Of(err) == sqlstate.UniqueViolation {
		return fmt.Errorf("%w: %w", errConflict, err)
	}
	return fault.Failed("cells", "move", err)
}

// errDecided says that another process has done the step: look again.
var errDecided = errors.New("cells: another process moves the tenant, too")

// tenantRow is a cell's row of a tenant.
type tenantRow struct {
	found bool
	place
	packed bool
}

type querier interface {
	QueryRow(ctx context.Context, sql string, args ...any) pgx.Row
}

func (c cell) row(ctx context.Context, db querier, tenant string) (t tenantRow, err error) {
	err = db.QueryRow(ctx, c.schema.SQL(`select cell, moves, packed from metered.tenants where tenant = $1`), tenant).Scan(&t.cell, &t.moves, &t.packed)
	if errors.Is(err, pgx.ErrNoRows) {
		return tenantRow{}, nil
	}
	t.found = err == nil
	return t, err
}

// locate finds the cell where a tenant lives. Or it finds a cell with a move that is not finished:
// then the row is packed. Each cell on its way knows of more moves.
func (r *Router) locate(ctx context.Context, tenant string) (at int, row tenantRow, err error) {
	at = r.first(tenant)
	if row, err = r.cells[at].row(ctx, r.cells[at].pool, tenant); err != nil || !row.found {
		return at, row, err
	}
	for row.cell != at && !row.packed {
		if row.cell >= len(r.cells) {
			return at, row, fault.ErrNotCell
		}
		next, err := r.cells[row.cell].row(ctx, r.cells[row.cell].pool, tenant)
		if err != nil {
			return at, row, err
		}
		if !next.found || next.moves < row.moves { // both were read while it moved
			return at, row, errDecided
		}
		at, row = row.cell, next
	}
	return at, row, nil
}

// in runs a step in a transaction of a cell.
func (c cell) in(ctx context.Context, step func(tx pgx.Tx) error) error {
	return pgx.BeginTxFunc(ctx, c.pool, pgx.TxOptions{IsoLevel: pgx.ReadCommitted},
		func(tx pgx.Tx) error {
			if _, err := tx.Exec(ctx, beginSQL, pgx.QueryExecModeSimpleProtocol); err != nil {
				return err
			}
			return step(tx)
		})
}

// depart packs the rows of a tenant, which lives in the cell at. In one database it does the rest,
// too.
func (r *Router) depart(ctx context.Context, m Move, at int) error {
	from, to := r.cells[at], r.cells[m.To]
	if err := r.sameColumns(ctx, m.Tables, from, to); err != nil {
		return err
	}
	return from.in(ctx, func(tx pgx.Tx) error {
		row, err := r.pack(ctx, tx, m, at)
		if err != nil || from.pool != to.pool {
			return err
		}
		if err = r.unpack(ctx, tx, tx, m.Tenant, at, m.To, row.moves); err == nil {
			err = r.clear(ctx, tx, m.Tenant, at, row)
		}
		return err
	})
}

// settle takes the steps that are left of a move from a cell.
func (r *Router) settle(ctx context.Context, tenant string, at int, back bool) error {
	for {
		row, err := r.cells[at].row(ctx, r.cells[at].pool, tenant)
		if err != nil || !row.packed {
			return err
		}
		if err = r.finish(ctx, tenant, at, row, back); err != nil && !errors.Is(err, errDecided) {
			return err
		}
	}
}

// finish takes the next step of a move of the rows that are packed in a cell. The new cell's row
// decides: whether they have arrived there, or, with back, never will.
func (r *Router) finish(ctx context.Context, tenant string, at int, packed tenantRow,
	back bool) error {
	from, to := r.cells[at], r.cells[packed.cell]
	there, err := to.row(ctx, to.pool, tenant)
	if err != nil {
		return err
	}
	switch {
	case there.moves > packed.moves || there.moves == packed.moves && there.cell == packed.cell:
		first := r.cells[r.first(tenant)]
		if err := first.in(ctx, first.telling(ctx, tenant,
			place{packed.cell, packed.moves})); err != nil {
			return err
		}
		return from.in(ctx, func(tx pgx.Tx) error { return r.clear(ctx, tx, tenant, at, packed) })
	case there.found && there.moves == packed.moves:
		return from.in(ctx, func(tx pgx.Tx) error { return r.unpack(ctx, tx, tx, tenant, at, at, packed.moves+1) })
	case back:
		return to.in(ctx, to.telling(ctx, tenant, place{at, packed.moves}))
	}
	return to.in(ctx, func(tx pgx.Tx) error { return r.unpack(ctx, from.pool, tx, tenant, at, packed.cell, packed.moves) })
}

const (
	deletePackedSQL = `delete from metered.packed_rows where tenant = $1`

	tellSQL = `
insert into metered.tenants as t (tenant, cell, moves) values ($1, $2, $3)
on conflict (tenant) do update set cell = excluded.cell, moves = excluded.moves, packed = false where t.moves < excluded.moves`

	clearSQL = `update metered.tenants set packed = false where tenant = $1 and moves = $2 and packed`
)

// tell has a cell know where a tenant lives, unless it knows of as many moves. Rows that are packed
// there are of an earlier move, which has arrived.
func (c cell) tell(ctx context.Context, tx pgx.Tx, tenant string, p place) (told bool, err error) {
	tag, err := tx.Exec(ctx, c.schema.SQL(tellSQL), tenant, p.cell, p.moves)
	if told = err == nil && tag.RowsAffected() == 1; told {
		_, err = tx.Exec(ctx, c.schema.SQL(deletePackedSQL), tenant)
	}
	return told, err
}

func (c cell) telling(ctx context.Context, tenant string, p place) func(tx pgx.Tx) error {
	return func(tx pgx.Tx) error {
		_, err := c.tell(ctx, tx, tenant, p)
		return err
	}
}

// clear deletes the packed rows of a move that has arrived.
func (r *Router) clear(ctx context.Context, tx pgx.Tx, tenant string, at int,
	packed tenantRow) error {
	c := r.cells[at]
	tag, err := tx.Exec(ctx, c.schema.SQL(clearSQL), tenant, packed.moves)
	if err == nil && tag.RowsAffected() == 1 {
		_, err = tx.Exec(ctx, c.schema.SQL(deletePackedSQL), tenant)
	}
	return err
}
