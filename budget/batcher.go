package budget

import (
	"cmp"
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgmetered/metered/internal/bounds"
	"github.com/pgmetered/metered/internal/fault"
	"github.com/pgmetered/metered/internal/observed"
	"github.com/pgmetered/metered/internal/pause"
)

// BatcherConfig configures a Batcher. The zero value has the documented defaults.
type BatcherConfig struct {
	// MaxBatch is the most charges that one transaction commits, from 1 to 1,000. Defaults to 512.
	MaxBatch int

	// Lanes is the most batches that are in flight at once, from 1 to 64. Each takes a connection
	// of the pool. Defaults to 2.
	Lanes int

	// Timeout bounds a batch with all its attempts, from 100ms to 1h. Defaults to 30s.
	Timeout time.Duration
}

// Batcher commits charges together that arrive during the last commit. A lone charge does not wait,
// and a locked scope delays no other.
type Batcher struct {
	ledger *Ledger
	pool   *pgxpool.Pool
	cfg    BatcherConfig

	mu      sync.Mutex
	lanes   []*lane // the last one is for scopes that others lock
	closed  bool
	running sync.WaitGroup // of lanes
}

// NewBatcher uses up to Lanes connections, and one more for locked scopes.
func NewBatcher(pool *pgxpool.Pool, l *Ledger, cfg BatcherConfig) (*Batcher, error) {
	if err := cmp.Or(l.made(), notNil("pool", pool)); err != nil {
		return nil, err
	}
	cfg = BatcherConfig{cmp.Or(cfg.MaxBatch, 512), cmp.Or(cfg.Lanes, 2), cmp.Or(cfg.Timeout, 30*time.Second)}
	switch {
	case cfg.MaxBatch < 1 || cfg.MaxBatch > bounds.MaxBatch:
		return nil, invalid("BatcherConfig.MaxBatch", "%d is not from 1 to %d", cfg.MaxBatch, bounds.MaxBatch)
	case cfg.Lanes < 1 || cfg.Lanes > 64:
		return nil, invalid("BatcherConfig.Lanes", "%d is not from 1 to 64", cfg.Lanes)
	case cfg.Timeout < 100*time.Millisecond || cfg.Timeout > time.Hour:
		return nil, invalid("BatcherConfig.Timeout", "%v is not from 100ms to 1h", cfg.Timeout)
	}
	b := &Batcher{ledger: l, pool: pool, cfg: cfg}
	for range cfg.Lanes + 1 {
		b.lanes = append(b.lanes, &lane{batcher: b})
	}
	b.lanes[cfg.Lanes].waits = true
	return b, nil
}

// Charge returns when the charge is committed. After ErrCommitUnknown it may be, as when ctx ends
// while its batch is under way. After other errors it is not made.
func (b *Batcher) Charge(ctx context.Context, charge Charge) (Posted, error) {
	if err := b.made(); err != nil {
		return Posted{}, err
	}
	a, err := b.ledger.newItem(charge)
	if err != nil {
		return Posted{}, within("charge", err)
	}
	return b.submit(ctx, a)
}

// Ingest is Ledger.Ingest for one event. After ErrCommitUnknown, call it again.
func (b *Batcher) Ingest(ctx context.Context, event UsageEvent) (Posted, error) {
	if err := b.made(); err != nil {
		return Posted{}, err
	}
	a, err := b.ledger.newEventItem(&event)
	if err != nil {
		return Posted{}, within("event", err)
	}
	return b.submit(ctx, a)
}

// Close refuses new charges (ErrClosed), and waits until ctx ends for earlier ones.
func (b *Batcher) Close(ctx context.Context) error {
	if err := b.made(); err != nil {
		return err
	}
	b.mu.Lock()
	b.closed = true
	b.mu.Unlock()
	idle := make(chan struct{})
	go func() {
		b.running.Wait()
		close(idle)
	}()
	select {
	case <-idle:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("budget: close: %w", pause.Ended(ctx))
	}
}

func (b *Batcher) made() error {
	return fault.Made(errArgument, "batcher", b != nil && b.ledger != nil)
}

// call is a charge that somebody waits for.
type call struct {
	*item
	result Result
	done   chan struct{} // closed when there is a result
	lost   error         // of a commit whose outcome is open, set while taken
	to     *observed.To  // which received lost
	taken  bool          // by a batch, guarded by Batcher.mu
	gone   bool          // its caller has left before, guarded by Batcher.mu
}

func (b *Batcher) submit(ctx context.Context, a *item) (Posted, error) {
	if ctx.Err() != nil {
		return Posted{}, fmt.Errorf("budget: %w", pause.Ended(ctx))
	}
	c := &call{item: a, done: make(chan struct{})}
	b.mu.Lock()
	if b.closed {
		b.mu.Unlock()
		return Posted{}, ErrClosed
	}
	b.lanes[uint64(a.charge.Key)%uint64(b.cfg.Lanes)].add(c)
	b.mu.Unlock()
	select {
	case <-c.done:
	case <-ctx.Done():
		if err := b.leave(ctx, c); err != nil {
			return Posted{}, err
		}
	}
	return c.result.Posted, c.result.Err
}

// leave is the error of a caller that leaves, or nil if there is a result.
func (b *Batcher) leave(ctx context.Context, c *call) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	select {
	case <-c.done:
		return nil
	default:
	}
	if !c.taken && c.lost == nil {
		c.gone = true
		return fmt.Errorf("budget: the charge was not made: %w", pause.Ended(ctx))
	}
	return fmt.Errorf("%w: its batch is under way: %w", ErrCommitUnknown, pause.Ended(ctx))
}
