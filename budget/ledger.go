package budget

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgmetered/metered/internal/fault"
	"github.com/pgmetered/metered/internal/lockkey"
	"github.com/pgmetered/metered/internal/schema"
)

// Config configures a Ledger. The zero value is ready for use.
type Config struct {
	// Schema is the schema that metered.Migrate created. Defaults to "metered".
	Schema string

	// LockTimeout bounds how long a write waits for the locks of all its scopes
	// together, from 1ms to 1h. When it runs out the call fails with ErrBusy.
	// Defaults to 5s. A shorter lock_timeout or statement_timeout of the session
	// and the context's deadline bound the wait as well; the latter two end it with
	// their own errors.
	LockTimeout time.Duration

	// ClockTolerance is how far a scope's last entry may be ahead of the
	// database's clock, from 1µs to 24h, before charges with windowed limits fail with
	// ErrClock. A charge within it gets the time of the last entry. Defaults to 1m.
	ClockTolerance time.Duration
}

// Bounds of Config.
const (
	defaultLockTimeout    = 5 * time.Second
	defaultClockTolerance = time.Minute
	maxLockTimeout        = time.Hour
	maxClockTolerance     = 24 * time.Hour
)

// Ledger charges, credits and refunds scopes. It holds no connection and no
// state, and may be used by any number of goroutines.
//
// Most programs want Charge, or package metered, which calls it as part of a
// whole command.
type Ledger struct {
	schema    schema.Name
	wait      time.Duration
	tolerance time.Duration
	space     string
	sql       statements
}

// Querier runs reads: a *pgxpool.Pool, a *pgx.Conn or a pgx.Tx.
type Querier interface {
	Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error)
	QueryRow(ctx context.Context, sql string, args ...any) pgx.Row
}

// New returns a Ledger, or an *ArgumentError. It does not touch the database.
func New(cfg Config) (*Ledger, error) {
	name, err := schema.Parse(cfg.Schema)
	if err != nil {
		return nil, invalid("Config.Schema", "%s", err)
	}
	if cfg.LockTimeout == 0 {
		cfg.LockTimeout = defaultLockTimeout
	}
	if cfg.LockTimeout < time.Millisecond || cfg.LockTimeout > maxLockTimeout {
		return nil, invalid("Config.LockTimeout", "%v is not from 1ms to %v", cfg.LockTimeout, maxLockTimeout)
	}
	if cfg.ClockTolerance == 0 {
		cfg.ClockTolerance = defaultClockTolerance
	}
	if cfg.ClockTolerance < time.Microsecond || cfg.ClockTolerance > maxClockTolerance {
		return nil, invalid("Config.ClockTolerance", "%v is not from 1µs to %v", cfg.ClockTolerance, maxClockTolerance)
	}
	return &Ledger{
		schema:    name,
		wait:      cfg.LockTimeout,
		tolerance: cfg.ClockTolerance,
		space:     "metered/scope/" + name.String(),
		sql:       render(name),
	}, nil
}

// LockKey is the key of the advisory lock that writes to a scope take, as it stands
// in pg_locks: its upper half in classid, its lower half in objid.
func (l *Ledger) LockKey(scope string) int64 { return lockkey.Of(l.space, scope) }

// made refuses the zero Ledger, which has no schema.
func (l *Ledger) made() error { return fault.Made(errArgument, "ledger", l != nil && l.space != "") }

func (l *Ledger) waitMS() int32 { return int32(l.wait / time.Millisecond) }

// statements are the package's SQL, rendered for one schema.
type statements struct {
	lock, charge, check, usage, credit, refund string
	entries, newest                            string
	scopes, purge, repair                      string
	chain, refundSums, refunded, held          string
}

func render(n schema.Name) statements {
	return statements{
		lock: n.SQL(lockSQL), charge: n.SQL(chargeSQL), check: n.SQL(checkSQL), usage: n.SQL(usageSQL),
		credit: n.SQL(creditSQL), refund: n.SQL(refundSQL),
		entries: n.SQL(entriesSQL), newest: n.SQL(newestSQL),
		scopes: n.SQL(scopesSQL), purge: n.SQL(purgeSQL), repair: n.SQL(repairSQL),
		chain: n.SQL(chainSQL), refundSums: n.SQL(refundSumsSQL), refunded: n.SQL(refundedSQL), held: n.SQL(heldSQL),
	}
}
