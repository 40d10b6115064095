package migrate

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgmetered/metered/internal/fault"
	"github.com/pgmetered/metered/internal/schema"
)

// Check is a Client's look at the schema, before its first call.
type Check struct {
	release *schema.Release
	pool    *pgxpool.Pool
	name    schema.Name
	passed  atomic.Bool
	mu      sync.Mutex
	look    *look // the one that is being taken
}

// NewCheck returns the Check of a Client that has not made a call yet.
func NewCheck(r *schema.Release, pool *pgxpool.Pool, n schema.Name) *Check {
	return &Check{release: r, pool: pool, name: n}
}

// look is one query, whose answer all get who came meanwhile.
type look struct {
	done chan struct{}
	err  error
}

// checkTimeout bounds a look where the caller has a connection already.
const checkTimeout = time.Second

// Usable refuses a call that cannot succeed because of what the schema is or lacks. Only
// a good answer is remembered. If there is none, because the query fails, the call goes on, and
// meets by itself what is wrong.
//
// A caller that holds a connection of the pool, as in DoTx, must not wait for another one
// (spare): if none is free now, a later call looks.
func (c *Check) Usable(ctx context.Context, spare bool) error {
	if c.passed.Load() {
		return nil
	}
	c.mu.Lock()
	l, first := c.look, c.look == nil
	if first {
		l = &look{done: make(chan struct{})}
		c.look = l
	}
	c.mu.Unlock()
	if !first {
		select {
		case <-l.done:
			return l.err
		case <-ctx.Done():
			return nil
		}
	}
	defer func() {
		c.mu.Lock()
		c.look = nil
		c.mu.Unlock()
		close(l.done)
	}()
	if spare {
		stat := c.pool.Stat()
		if stat.AcquiredConns()+stat.ConstructingConns() >= stat.MaxConns() {
			return nil
		}
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, checkTimeout)
		defer cancel()
	}
	catalog, err := c.release.Read(ctx, c.pool, c.name)
	if err == nil {
		l.err = usable(c.release, catalog)
		c.passed.Store(l.err == nil)
	}
	return l.err
}

// Doubt has the next call look again if err says that something is missing: a later
// version dropped it.
func (c *Check) Doubt(err error) {
	if errors.Is(err, fault.ErrNotMigrated) {
		c.passed.Store(false)
	}
}

// usable is nil if calls of this build can succeed. Bodies and settings of functions are left to
// Validate: a function that somebody tuned, or a clock that a test has set, is no reason to
// refuse every call.
func usable(r *schema.Release, c schema.Catalog) error {
	wrong := c.Unusable()
	if c.Version != r.Version || ofVersion(wrong) {
		return stateOf(r, c).err(r.Version)
	}
	if len(wrong) > 0 {
		return fmt.Errorf("%w: %s", fault.ErrNotMigrated, listed(differences(wrong)))
	}
	return nil
}
