package cells

import (
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgmetered/metered"
)

// PoolOf is the pool of a Client.
func PoolOf(c *metered.Client) *pgxpool.Pool {
	pool, _ := inMetered.Place(c)
	return pool
}

// First is a tenant's first cell.
func (r *Router) First(tenant string) int { return r.first(tenant) }
