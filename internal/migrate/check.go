package migrate

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"

	"github.com/jackc/pgx/v5"

	"github.com/pgmetered/metered/internal/fault"
	"github.com/pgmetered/metered/internal/pause"
	"github.com/pgmetered/metered/internal/schema"
)

// Check is a Client's look at the schema, before its first call.
type Check struct {
	release *schema.Release
	name    schema.Name
	passed  atomic.Bool
	mu      sync.Mutex
	look    *look // the one that is being taken
}

// NewCheck returns the Check of a Client that has not made a call yet.
func NewCheck(r *schema.Release, n schema.Name) *Check { return &Check{release: r, name: n} }

// look is a check of the schema under way, which later callers wait for.
type look struct {
	done    chan struct{}
	decided bool
	err     error
}

// Usable refuses a call for which the schema is too old or incomplete. It looks on the call's own
// connection, before the call writes. If the look fails, so does the call, with the same error.
// Only a good answer is remembered.
//
// Calls that come at once share a look. A call in a caller's transaction looks for itself: its
// transaction may hold a lock that another look waits for.
func (c *Check) Usable(ctx context.Context, db schema.DB) error {
	if c.passed.Load() {
		return nil
	}
	if _, lent := db.(pgx.Tx); lent {
		_, err := c.decide(ctx, db)
		return err
	}
	for {
		c.mu.Lock()
		l := c.look
		if l == nil {
			l = &look{done: make(chan struct{})}
			c.look = l
			c.mu.Unlock()
			return c.take(ctx, db, l)
		}
		c.mu.Unlock()
		select {
		case <-l.done:
		case <-ctx.Done():
			return fmt.Errorf("metered: look at the schema: %w", pause.Ended(ctx))
		}
		if l.decided {
			return l.err
		}
	}
}

// take takes the look that others wait for.
func (c *Check) take(ctx context.Context, db schema.DB, l *look) error {
	defer func() {
		c.mu.Lock()
		c.look = nil
		c.mu.Unlock()
		close(l.done)
	}()
	l.decided, l.err = c.decide(ctx, db)
	return l.err
}

// decide looks. An error of the look itself decides nothing.
func (c *Check) decide(ctx context.Context, db schema.DB) (decided bool, err error) {
	catalog, err := c.release.ReadUsable(ctx, db, c.name)
	if err != nil {
		return false, fault.Failed("metered", "look at the schema", err)
	}
	err = usable(c.release, catalog)
	c.passed.Store(err == nil)
	return true, err
}

// Doubt has the next call look again if err says that something is missing: a later
// version dropped it.
func (c *Check) Doubt(err error) {
	if errors.Is(err, fault.ErrNotMigrated) {
		c.passed.Store(false)
	}
}

// usable is nil if calls of this build can succeed. It leaves bodies and settings of functions to
// Validate: a function that somebody tuned, or a clock that a test has set, is no reason to refuse
// every call.
func usable(r *schema.Release, c schema.Catalog) error {
	wrong := c.Unusable()
	if c.Version != r.Version || ofVersion(wrong) {
		return stateOf(r, c).err(r.Version)
	}
	if len(wrong) > 0 {
		return fmt.Errorf("%w: %s", fault.ErrNotMigrated, listed(differences(c, wrong)))
	}
	return nil
}
