package command

import (
	"context"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgmetered/metered/internal/fault"
	"github.com/pgmetered/metered/internal/lockkey"
	"github.com/pgmetered/metered/internal/schema"
)

// Home is a tenant in a cell. Its transactions begin with a statement that fails where the tenant
// does not live any more, and that keeps it from moving until they end. All methods work on nil,
// and do nothing.
type Home struct {
	Tenant string
	sql    string
	args   []any
}

const enterSQL = `select metered.enter_tenant($1::text, $2::bigint, $3::int, $4::int, $5::bool, $6::int)`

// NewHome is a tenant in one of so many cells. first: it lives there unless it has moved.
func NewHome(name schema.Name, tenant string, cell, cells int, first bool) *Home {
	return &Home{
		Tenant: tenant, sql: name.SQL(enterSQL),
		args: []any{tenant, lockkey.OfTenant(name.String(), tenant), cell, cells, first},
	}
}

// Statement makes that statement, for an Operation.
func (h *Home) Statement() func(waitMS int32) Statement {
	if h == nil {
		return nil
	}
	return func(waitMS int32) Statement {
		return Statement{SQL: h.sql, Args: append(h.args[:len(h.args):len(h.args)], waitMS)}
	}
}

// Enter sends it.
func (h *Home) Enter(ctx context.Context, tx pgx.Tx, wait time.Duration) error {
	if h == nil {
		return nil
	}
	s := h.Statement()(int32(wait.Milliseconds()))
	if _, err := tx.Exec(ctx, s.SQL, s.Args...); err != nil {
		return fault.Failed("metered", "enter", err)
	}
	return nil
}

// Owns reports whether a name is the tenant's, or begins with that and a slash.
func (h *Home) Owns(name string) bool {
	if h == nil {
		return true
	}
	rest, ok := strings.CutPrefix(name, h.Tenant)
	return ok && (rest == "" || rest[0] == '/')
}
