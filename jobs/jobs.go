package jobs

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/riverqueue/river"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/fault"
	"github.com/pgmetered/metered/internal/listen"
	"github.com/pgmetered/metered/internal/observed"
	"github.com/pgmetered/metered/internal/schema"
	"github.com/pgmetered/metered/observe"
)

// Bounds of this package.
const (
	maxKeyBytes    = 255
	maxTenantBytes = 255
	maxItems       = 10_000 // in one EnqueueMany

	defaultLockTimeout = 5 * time.Second
	minLockTimeout     = time.Millisecond
	maxLockTimeout     = time.Hour
)

// Config configures an Enqueuer. The zero value has the documented defaults.
type Config struct {
	// Schema is the schema that metered.Migrate created. River's schema is that of its client.
	// Defaults to "metered".
	Schema string

	// LockTimeout bounds the wait for transactions with the same keys, from 1ms to 1h. Defaults to
	// 5s.
	LockTimeout time.Duration

	// Notify sends new jobs to metered.Client.Listen, for a round trip a call. Client.Jobs has
	// metered.Config.NotifyJobs.
	Notify bool

	// Observer is told of the calls. Defaults to none.
	Observer observe.Observer

	// Holds is the book that Options.Hold is placed in. metered.Client.Jobs has that of the
	// Client.
	Holds *holds.Book

	// Limits returns the limits of a scope as they are now. It is called under the scope's lock,
	// before the scope's parked jobs are released. If it is nil, or returns nil, the limits are
	// those that each job came with. After an error, the jobs of the scope wait until it is asked
	// again, in 10 seconds or when units are freed. Those of other scopes go on.
	Limits func(ctx context.Context, tx pgx.Tx, scope string) ([]budget.Limit, error)

	// OnDrop is called in the transaction that drops a parked job, after Options.MaxWait. An error
	// keeps the job, which is in trouble until it is tried again. Others are dropped. Defaults to
	// none.
	OnDrop func(ctx context.Context, tx pgx.Tx, dropped Parked) error
}

// Enqueuer is safe for concurrent use.
type Enqueuer struct {
	client   *river.Client[pgx.Tx]
	sequence string // River's, as text for regclass
	wait     time.Duration
	channel  string // "" without Config.Notify
	observer *observed.To

	claimSQL, claimManySQL, renumberSQL, findSQL string

	gate gate

	// apart is the wait for a look that a notice causes, after the one that began. A test has its own.
	apart func(began time.Time, atLeast time.Duration) <-chan time.Time
}

// after waits until a look that began is so long ago.
func after(began time.Time, atLeast time.Duration) <-chan time.Time {
	return time.After(time.Until(began.Add(atLeast)))
}

// New sends no SQL. The client may be insert-only.
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
		wait = defaultLockTimeout
	}
	if wait < minLockTimeout || wait > maxLockTimeout {
		return nil, invalid("Config.LockTimeout", "%s: want %s to %s", config.LockTimeout,
			minLockTimeout, maxLockTimeout)
	}
	// Named as River's own insert names it: without a schema it is found by the
	// connection's search_path, like the table.
	table, sequence := pgx.Identifier{"river_job"}, pgx.Identifier{"river_job_id_seq"}
	if s := client.Schema(); s != "" {
		table, sequence = pgx.Identifier{s, "river_job"}, pgx.Identifier{s, "river_job_id_seq"}
	}
	channel := ""
	if config.Notify {
		if channel = listen.Commands(name.String()); len(channel) > listen.MaxNameBytes {
			return nil, invalid("Config.Notify",
				"the channel %q is longer than the %d bytes of a name: use a shorter schema",
				channel, listen.MaxNameBytes)
		}
	}
	gate, err := newGate(client, name, config)
	if err != nil {
		return nil, err
	}
	return &Enqueuer{
		gate:         gate,
		apart:        after,
		channel:      channel,
		client:       client,
		sequence:     sequence.Sanitize(),
		renumberSQL:  "update " + table.Sanitize() + " set id = $1 where id operator(pg_catalog.=) $2",
		wait:         wait,
		observer:     observed.New(config.Observer),
		claimSQL:     name.SQL(claimSQL),
		claimManySQL: name.SQL(claimManySQL),
		findSQL:      name.SQL(findSQL),
	}, nil
}

// made refuses the zero Enqueuer, which has no client.
func (e *Enqueuer) made() error {
	return fault.Made(errArgument, "enqueuer", e != nil && e.client != nil)
}

// querier runs reads: a *pgxpool.Pool, a *pgx.Conn or a pgx.Tx.
type querier interface {
	QueryRow(ctx context.Context, sql string, args ...any) pgx.Row
}
