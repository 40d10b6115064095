package commit

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgmetered/metered/internal/sqlstate"
)

// InTx is pgx.BeginTxFunc on a connection of the pool, which Leave judges afterwards.
func InTx(ctx context.Context, pool *pgxpool.Pool, opts pgx.TxOptions, fn func(pgx.Tx) error) error {
	conn, err := pool.Acquire(ctx)
	if err != nil {
		return err
	}
	defer conn.Release()
	err = pgx.BeginTxFunc(ctx, conn, opts, fn)
	Leave(ctx, conn.Conn(), err)
	return err
}

// leaveTimeout bounds saying goodbye to a server, also when ctx is done.
const leaveTimeout = time.Second

// Leave closes a connection whose server answered that it is read-only: a primary that became a
// standby. The next connection of the pool looks up the name again, and may reach the new primary.
// A connection that is not closed here would stay in the pool for as long as the server lives.
func Leave(ctx context.Context, conn *pgx.Conn, err error) {
	if sqlstate.Of(err) != sqlstate.ReadOnlyTransaction {
		return
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), leaveTimeout)
	defer cancel()
	_ = conn.Close(ctx)
}
