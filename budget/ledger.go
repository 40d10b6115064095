package budget

import (
	"cmp"
	"context"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgmetered/metered/internal/fault"
	"github.com/pgmetered/metered/internal/ledger"
	"github.com/pgmetered/metered/internal/lockkey"
	"github.com/pgmetered/metered/internal/observed"
	"github.com/pgmetered/metered/internal/schema"
	"github.com/pgmetered/metered/observe"
)

// Config configures a Ledger. The zero value has the documented defaults.
type Config struct {
	// Schema is the schema that metered.Migrate created. Defaults to "metered".
	Schema string

	// LockTimeout bounds the wait of a write for its locks, from 1ms to 1h. Running into it is
	// ErrBusy. Defaults to 5s.
	LockTimeout time.Duration

	// ClockTolerance is how far a scope's last entry may be ahead of the database's clock before
	// windowed charges are ErrClock, from 1µs to 24h. Defaults to 1m.
	ClockTolerance time.Duration

	// MustExist sets Charge.MustExist for every charge, and likewise for credits, holds and
	// claims.
	MustExist bool

	// NoStandings sets Charge.NoStandings for every charge.
	NoStandings bool

	// RequireActor refuses writes whose Note has no Actor.
	RequireActor bool

	// MaxLateness is the oldest age of an event, from 1s to 10 years. An older one is ErrLate.
	// Defaults to 35 days.
	MaxLateness time.Duration

	// MaxFuture is how far an event may be ahead of the clock, from 1µs to 24h. One that is
	// further ahead is ErrFuture. Defaults to 5m.
	MaxFuture time.Duration

	// OnThreshold receives crossed thresholds, also those of Books and Pools on this Ledger. It
	// runs inside the transaction of the call. It may write in tx, and must not end it. Its error
	// takes the call back. Limits with thresholds need it.
	OnThreshold func(ctx context.Context, tx pgx.Tx, c Crossing) error

	// Observer hears of the calls of the Ledger, its Books and its Pools. Defaults to none.
	Observer observe.Observer
}

// Bounds of Config.
const (
	defaultLockTimeout    = 5 * time.Second
	defaultClockTolerance = time.Minute
	maxLockTimeout        = time.Hour
	maxClockTolerance     = 24 * time.Hour
	defaultMaxLateness    = 35 * 24 * time.Hour
	maxMaxLateness        = 3653 * 24 * time.Hour
	defaultMaxFuture      = 5 * time.Minute
	maxMaxFuture          = 24 * time.Hour
)

// Ledger is safe for concurrent use.
type Ledger struct {
	schema    schema.Name
	wait      time.Duration
	tolerance time.Duration
	mustExist bool
	quiet     bool // receipts have no standings
	actor     bool // every write names one
	late      time.Duration
	future    time.Duration
	space     string
	sql       statements
	observer  *observed.To
	spans     ledger.Spans

	onThreshold func(ctx context.Context, tx pgx.Tx, c Crossing) error
}

// Querier is a pool, a connection or a transaction.
type Querier interface {
	Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error)
	QueryRow(ctx context.Context, sql string, args ...any) pgx.Row
}

// New sends no SQL.
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
		return nil, invalid("Config.ClockTolerance", "%v is not from 1µs to %v", cfg.ClockTolerance,
			maxClockTolerance)
	}
	cfg.MaxLateness, cfg.MaxFuture = cmp.Or(cfg.MaxLateness, defaultMaxLateness),
		cmp.Or(cfg.MaxFuture, defaultMaxFuture)
	if cfg.MaxLateness < time.Second || cfg.MaxLateness > maxMaxLateness {
		return nil, invalid("Config.MaxLateness", "%v is not from 1s to %v", cfg.MaxLateness, maxMaxLateness)
	}
	if cfg.MaxFuture < time.Microsecond || cfg.MaxFuture > maxMaxFuture {
		return nil, invalid("Config.MaxFuture", "%v is not from 1µs to %v", cfg.MaxFuture, maxMaxFuture)
	}
	return &Ledger{
		schema:    name,
		wait:      cfg.LockTimeout,
		tolerance: cfg.ClockTolerance,
		mustExist: cfg.MustExist, quiet: cfg.NoStandings, actor: cfg.RequireActor,
		late: cfg.MaxLateness, future: cfg.MaxFuture,
		space: "metered/scope/" + name.String(),
		sql:   render(name), observer: observed.New(cfg.Observer), onThreshold: cfg.OnThreshold,
	}, nil
}

// LockKey is the key of a scope's advisory lock: in pg_locks classid is its upper half, objid its
// lower half, and objsubid 1.
func (l *Ledger) LockKey(scope string) int64 { return lockkey.Of(l.space, scope) }

// made refuses the zero Ledger, which has no schema.
func (l *Ledger) made() error { return fault.Made(errArgument, "ledger", l != nil && l.space != "") }

func (l *Ledger) waitMS() int32 { return int32(l.wait / time.Millisecond) }

// statements are the package's SQL, rendered for one schema.
type statements struct {
	lock, lockAll, charge, chargePlain, chargeTotal, chargeLots, each, check, usage, credit, refund string
	entries, newest, search, usageAt                                                                string
	scopes, purge, purgeable, ahead, repair                                                         string
	chain, anchors, tallies, charges, refundSums, refunded, held                                    string
	leases, carved, lots, anyLots, carried, zones                                                   string
	create, retire, resources                                                                       string
	number, feed, consume, consumers, dropConsumer                                                  string
}

func render(n schema.Name) statements {
	return statements{
		lock: n.SQL(lockSQL), lockAll: n.SQL(ledger.LockAllSQL), charge: n.SQL(chargeSQL),
		chargePlain: n.SQL(chargePlainSQL), chargeTotal: n.SQL(chargeTotalSQL),
		chargeLots: n.SQL(chargeLotsSQL), each: n.SQL(eachSQL), check: n.SQL(checkSQL),
		usage:  n.SQL(usageSQL),
		credit: n.SQL(creditSQL), refund: n.SQL(refundSQL),
		entries: n.SQL(entriesSQL), newest: n.SQL(newestSQL), search: n.SQL(searchSQL),
		usageAt: n.SQL(usageAtSQL),
		scopes:  n.SQL(scopesSQL), purge: n.SQL(purgeSQL), purgeable: n.SQL(purgeableSQL),
		ahead: n.SQL(aheadSQL), repair: n.SQL(repairSQL),
		chain: n.SQL(chainSQL), anchors: n.SQL(anchorsSQL), tallies: n.SQL(talliesSQL), charges: n.SQL(chargesSQL),
		refundSums: n.SQL(refundSumsSQL), refunded: n.SQL(refundedSQL),
		held: n.SQL(heldSQL), leases: n.SQL(leasesSQL), carved: n.SQL(carvedSQL),
		lots: n.SQL(lotsSQL), anyLots: n.SQL(anyLotsSQL), carried: n.SQL(carriedSQL),
		zones:  n.SQL(zonesSQL),
		create: n.SQL(createSQL), retire: n.SQL(retireSQL), resources: n.SQL(resourcesSQL),
		number: n.SQL(numberFeedSQL), feed: n.SQL(feedSQL), consume: n.SQL(consumeFeedSQL),
		consumers: n.SQL(feedConsumersSQL), dropConsumer: n.SQL(dropConsumerSQL),
	}
}
