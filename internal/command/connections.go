package command

import (
	"context"
	"fmt"
	"sync/atomic"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/multitracer"
	"github.com/jackc/pgx/v5/pgxpool"
)

// running is the key of a context that a function was given. Its value is a *called.
type running struct{}

// called is a call of an operation's function: its context, and that of what comes after it.
type called struct {
	context.Context
	engine *Engine
	op     *Operation
	over   atomic.Bool
}

// Value is the call itself for the two keys of this package.
func (c *called) Value(key any) any {
	if key == (running{}) || key == (inside{c.engine}) {
		return c
	}
	return c.Context.Value(key)
}

// connect acquires a connection of the pool. An error of a pool that is exhausted says by whom.
func (e *Engine) connect(ctx context.Context) (*pgxpool.Conn, error) {
	conn, err := e.cfg.Observer.Acquire(ctx, e.pool)
	if err == nil {
		return conn, nil
	}
	stat := e.pool.Stat()
	if most := stat.MaxConns(); ctx.Err() != nil && stat.AcquiredConns() >= most {
		running, hint := e.functions.Load(), ""
		if running < most {
			hint = " (an *sql.DB with SetMaxIdleConns keeps connections of the pool that it does not use; one of sqlmetered.OpenDB does not)"
		}
		return nil, fmt.Errorf("metered: connect: all %d connections of the pool are in use, %d of them by functions of commands%s: %w",
			most, running, hint, err)
	}
	return nil, fmt.Errorf("metered: connect: %w", err)
}

// NoOthers makes a pool refuse to connect for a function of a command.
func NoOthers(cfg *pgxpool.Config) {
	if others := cfg.ConnConfig.Tracer; others != nil {
		cfg.ConnConfig.Tracer = multitracer.New(others, noOthers{})
		return
	}
	cfg.ConnConfig.Tracer = noOthers{}
}

// noOthers is a tracer that ends the context of a connect within a function. pgxpool asks no other
// hook before it waits for a connection.
type noOthers struct{}

func (noOthers) TraceAcquireStart(ctx context.Context, _ *pgxpool.Pool, _ pgxpool.TraceAcquireStartData) context.Context {
	c, ok := ctx.Value(running{}).(*called)
	if !ok || c.over.Load() {
		return ctx
	}
	return refusedContext{ctx, fmt.Errorf("%w: its function asks the pool for another connection than that of its Tx: "+
		"command %q of tenant %q, named %q", ErrNested, c.op.ID, c.op.Tenant, c.op.Name)}
}

func (noOthers) TraceAcquireEnd(context.Context, *pgxpool.Pool, pgxpool.TraceAcquireEndData) {}

func (noOthers) TraceQueryStart(ctx context.Context, _ *pgx.Conn, _ pgx.TraceQueryStartData) context.Context {
	return ctx
}

func (noOthers) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}

// refusedContext is a context that has ended with err.
type refusedContext struct {
	context.Context
	err error
}

var ended = func() chan struct{} { c := make(chan struct{}); close(c); return c }()

func (refusedContext) Done() <-chan struct{} { return ended }
func (c refusedContext) Err() error          { return c.err }
