package notary

import (
	"cmp"
	"context"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgmetered/metered/internal/fault"
	"github.com/pgmetered/metered/internal/schema"
)

const (
	defaultEntries = 100_000
	maxEntries     = 1_000_000

	minLockTimeout     = time.Millisecond
	maxLockTimeout     = time.Hour
	defaultLockTimeout = 5 * time.Second

	maxScope = 255 // bytes
)

// Config configures a Notary. The zero value has the documented defaults.
type Config struct {
	// Schema is the schema that metered.Migrate created. Defaults to "metered".
	Schema string

	// MaxEntries is the most entries that one transaction takes down, from 1 to 1,000,000. Each
	// transaction signs a head. Defaults to 100,000.
	MaxEntries int

	// LockTimeout bounds the wait for another Notarize, from 1ms to 1h. Running into it is
	// budget.ErrBusy. Defaults to 5s.
	LockTimeout time.Duration
}

// Notary is safe for concurrent use.
type Notary struct {
	name        schema.Name
	entries     int
	lockTimeout time.Duration
}

// New sends no SQL.
func New(config Config) (*Notary, error) {
	name, err := schema.Parse(config.Schema)
	if err != nil {
		return nil, fault.Misuse(errArgument, "Config.Schema", "%s", err)
	}
	n := &Notary{name, cmp.Or(config.MaxEntries, defaultEntries),
		cmp.Or(config.LockTimeout, defaultLockTimeout)}
	if n.entries < 1 || n.entries > maxEntries {
		return nil, fault.Misuse(errArgument, "Config.MaxEntries", "%d is not from 1 to 1,000,000",
			config.MaxEntries)
	}
	if n.lockTimeout < minLockTimeout || n.lockTimeout > maxLockTimeout {
		return nil, fault.Misuse(errArgument, "Config.LockTimeout", "%v is not from %v to %v",
			config.LockTimeout, minLockTimeout, maxLockTimeout)
	}
	return n, nil
}

func (n *Notary) made() error { return fault.Made(errArgument, "notary", n != nil && n.entries > 0) }

var errArgument = fault.New("invalid_argument", "notary: invalid argument")

// ErrUnknown says that an entry is not in the log, or not in the ledger any more.
var ErrUnknown error = fault.New("not_notarized", "notary: the entry is not in the log")

// ErrHead says that a head is not signed by the given key, or cannot be read.
var ErrHead error = fault.New("head_invalid", "notary: the head is not signed by this key")

// querier runs reads: a *pgxpool.Pool, a *pgx.Conn or a pgx.Tx.
type querier interface {
	Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error)
}

func failed(doing string, err error) error { return fault.Failed("notary", doing, err) }

// beginSQL makes statements mean pg_catalog's operators.
const beginSQL = `begin isolation level read committed; set local search_path = pg_catalog, pg_temp; set local jit = off`

// beginReadSQL is beginSQL for a transaction that sees one moment.
const beginReadSQL = `begin isolation level repeatable read, read only; set local search_path = pg_catalog, pg_temp; set local jit = off`
