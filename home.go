package metered

import (
	"context"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgmetered/metered/internal/command"
	"github.com/pgmetered/metered/internal/fault"
	"github.com/pgmetered/metered/internal/lend"
	"github.com/pgmetered/metered/internal/lockkey"
	"github.com/pgmetered/metered/internal/schema"
)

// Internals is internal.
func Internals(lend.Key) internals { return internals{} }

// internals are lent to cells.
type internals struct{}

// Place is a Client's pool and schema, nil for a Client that New did not make.
func (internals) Place(c *Client) (*pgxpool.Pool, schema.Name) {
	if c.made() != nil {
		return nil, schema.Name{}
	}
	return c.pool, c.schema
}

// For is a Client of one tenant, on the pool of c, which is that of a cell. first: the tenant lives there unless it has moved.
func (internals) For(c *Client, tenant string, cell, cells int, first bool) *Client {
	of := *c
	of.home = &home{
		tenant: tenant, sql: c.schema.SQL(enterSQL),
		args: []any{tenant, lockkey.OfTenant(c.schema.String(), tenant), cell, cells, first},
	}
	return &of
}

const enterSQL = `select metered.enter_tenant($1::text, $2::bigint, $3::int, $4::int, $5::bool, $6::int)`

// home is a tenant in a cell. Its transactions begin with a statement that fails where the tenant does not live any more, and that
// keeps it from moving until they end. All methods work on nil, and do nothing.
type home struct {
	tenant string
	sql    string
	args   []any
}

// enter makes that statement.
func (h *home) enter() func(waitMS int32) command.Statement {
	if h == nil {
		return nil
	}
	return func(waitMS int32) command.Statement {
		return command.Statement{SQL: h.sql, Args: append(h.args[:len(h.args):len(h.args)], waitMS)}
	}
}

// entered is fn after that statement.
func (h *home) entered(c *Client, fn func(context.Context, pgx.Tx) error) func(context.Context, pgx.Tx) error {
	if h == nil {
		return fn
	}
	return func(ctx context.Context, tx pgx.Tx) error {
		s := h.enter()(int32(c.cfg.LockTimeout.Milliseconds()))
		if _, err := tx.Exec(ctx, s.SQL, s.Args...); err != nil {
			return fault.Failed("metered", "enter", err)
		}
		return fn(ctx, tx)
	}
}

// here is ErrMoved if the tenant lives elsewhere: for answers that something is not there. Inside a command of the tenant it is certain.
func (c *Client) here(ctx context.Context) error {
	if c.home == nil || c.engine.Inside(ctx) {
		return nil
	}
	return c.runTx(ctx, pgx.TxOptions{}, c.home.entered(c, func(context.Context, pgx.Tx) error { return nil }))
}

// owns refuses a command whose record or token would stay behind when the tenant moves.
func (h *home) owns(cmd Command) error {
	if h == nil {
		return nil
	}
	if !h.has(cmd.Tenant) {
		return misuse("Command.Tenant", "is %q, want %q, or that and a part behind a slash", cmd.Tenant, h.tenant)
	}
	if cmd.Token != nil && !h.has(cmd.Token.Subject) {
		return misuse("Command.Token.Subject", "is %q, want %q, or that and a part behind a slash", cmd.Token.Subject, h.tenant)
	}
	return nil
}

func (h *home) has(name string) bool {
	rest, ok := strings.CutPrefix(name, h.tenant)
	return ok && (rest == "" || rest[0] == '/')
}
