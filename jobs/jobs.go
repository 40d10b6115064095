package jobs

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/riverqueue/river"

	"github.com/pgmetered/metered/internal/fault"
	"github.com/pgmetered/metered/internal/schema"
)

// Bounds of this package.
const (
	MaxKeyBytes    = 255
	MaxTenantBytes = 255
	MaxItems       = 10_000 // in one EnqueueMany

	DefaultLockTimeout = 5 * time.Second
	MinLockTimeout     = time.Millisecond
	MaxLockTimeout     = time.Hour
)

// Config configures an Enqueuer. The zero value is what most programs want.
type Config struct {
	// Schema is the schema that metered.Migrate made. Defaults to "metered".
	// River's tables are found where the client's own Config.Schema says.
	Schema string

	// LockTimeout is how long one call waits in all for other transactions that
	// have claimed the same keys and are still open, 1ms to 1h. A shorter
	// lock_timeout or statement_timeout of the session and the context's deadline
	// bound the wait as well. Defaults to 5s.
	LockTimeout time.Duration
}

// Enqueuer enqueues jobs through a River client. It may be used by many
// goroutines at once, and remembers nothing between calls.
type Enqueuer struct {
	client   *river.Client[pgx.Tx]
	sequence string // River's, as text for regclass
	wait     time.Duration

	claimSQL, claimManySQL, findSQL, purgeSQL string
}

// New returns an Enqueuer on client, which may be insert-only. Keys need Plugin in
// the client's Config.Plugins; River does not let New see whether it is there, so
// the first keyed Enqueue fails with ErrPlugin if not. New sends no SQL. Its
// errors are ErrArgument.
func New(client *river.Client[pgx.Tx], config Config) (*Enqueuer, error) {
	if err := notNil("client", client); err != nil {
		return nil, err
	}
	name, err := schema.Parse(config.Schema)
	if err != nil {
		return nil, invalid("Config.Schema", "%s", err)
	}
	wait := config.LockTimeout
	if wait == 0 {
		wait = DefaultLockTimeout
	}
	if wait < MinLockTimeout || wait > MaxLockTimeout {
		return nil, invalid("Config.LockTimeout", "%s: want %s to %s", config.LockTimeout, MinLockTimeout, MaxLockTimeout)
	}
	// Named as River's own insert names it: without a schema it is found by the
	// connection's search_path, like the table.
	sequence := pgx.Identifier{"river_job_id_seq"}
	if s := client.Schema(); s != "" {
		sequence = pgx.Identifier{s, "river_job_id_seq"}
	}
	return &Enqueuer{
		client:       client,
		sequence:     sequence.Sanitize(),
		wait:         wait,
		claimSQL:     name.SQL(claimSQL),
		claimManySQL: name.SQL(claimManySQL),
		findSQL:      name.SQL(findSQL),
		purgeSQL:     name.SQL(purgeSQL),
	}, nil
}

// made refuses the zero Enqueuer, which has no client.
func (e *Enqueuer) made() error {
	return fault.Made(errArgument, "enqueuer", e != nil && e.client != nil)
}

// Querier reads: a *pgxpool.Pool, a *pgx.Conn or a pgx.Tx.
type Querier interface {
	QueryRow(ctx context.Context, sql string, args ...any) pgx.Row
}
