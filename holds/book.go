package holds

import (
	"context"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/internal/bounds"
	"github.com/pgmetered/metered/internal/fault"
	"github.com/pgmetered/metered/internal/ledger"
	"github.com/pgmetered/metered/internal/listen"
	"github.com/pgmetered/metered/internal/observed"
	"github.com/pgmetered/metered/internal/schema"
)

// Config configures a Book. The zero value has the documented defaults.
type Config struct {
	// MinTTL and MaxTTL bound Placement.TTL, from 1ms to MaxLifetime. They default to 1s and 1h.
	MinTTL, MaxTTL time.Duration

	// MaxLifetime bounds the time from placement to deadline, up to 10 years. Defaults to 24h, or a
	// longer MaxTTL.
	MaxLifetime time.Duration

	// NoCeiling lets Extend go on without MaxLifetime, up to the year 9980, 10 years at a time.
	NoCeiling bool

	// RequireHolder refuses to place, capture, release, extend or return without a Holder.
	RequireHolder bool

	// RequireActor refuses writes whose Note has no Actor. Defaults to the ledger's setting.
	RequireActor bool

	// Subscribers get every transition of this Book's calls, in order. An error or a panic takes
	// the transition back, and the call fails.
	Subscribers []Subscriber
	// Notify sends committed transitions to Listen. Such commits pass the server one by one
	// (docs/operations.md).
	Notify bool
	// NotifyContent is Notify with all fields of Notice, for any role.
	NotifyContent bool
}

// Defaults.
const (
	defaultMinTTL     = time.Second
	defaultMaxTTL     = time.Hour
	defaultLifetime   = 24 * time.Hour
	defaultPage       = 100
	defaultSweepBatch = 500
)

// Subscriber acts on a transition, within a savepoint of the call's transaction. For an effect
// outside the database enqueue a job through tx (jobs.Enqueuer). A statement that may fail needs a
// savepoint of its own (tx.Begin). Close rows, and do not end tx.
type Subscriber func(ctx context.Context, tx pgx.Tx, t Transition) error

// Transition is a change of a hold.
type Transition struct {
	// Kind is what happened to the hold.
	Kind EventKind `json:"kind"`

	// Hold is the hold after the transition.
	Hold Hold `json:"hold"`

	// Note is the caller's note of the transition.
	Note budget.Note `json:"note,omitzero"`
}

// Book is safe for concurrent use.
type Book struct {
	ledger *budget.Ledger
	cfg    Config
	schema schema.Name
	wait   time.Duration // for locks
	sql    statements

	observer *observed.To // the ledger's
}

// New uses the ledger's schema and LockTimeout. It sends no SQL.
func New(ledger *budget.Ledger, cfg Config) (*Book, error) {
	if err := notNil("ledger", ledger); err != nil {
		return nil, err
	}
	name, wait, actor := inBudget.Settings(ledger)
	if wait == 0 {
		return nil, invalid("ledger", "was not made by New")
	}
	cfg.RequireActor = cfg.RequireActor || actor
	if cfg.MinTTL == 0 {
		cfg.MinTTL = defaultMinTTL
	}
	if cfg.MaxTTL == 0 {
		cfg.MaxTTL = max(defaultMaxTTL, cfg.MinTTL)
	}
	if cfg.NoCeiling && cfg.MaxLifetime != 0 {
		return nil, invalid("Config.MaxLifetime", "is set, and so is NoCeiling")
	}
	if cfg.NoCeiling {
		cfg.MaxLifetime = bounds.MaxLifetime // for MaxTTL
	}
	if cfg.MaxLifetime == 0 {
		cfg.MaxLifetime = max(defaultLifetime, cfg.MaxTTL)
	}
	switch {
	case cfg.MaxLifetime < 0 || cfg.MaxLifetime > bounds.MaxLifetime:
		return nil, invalid("Config.MaxLifetime", "%v is not from 0 to %v", cfg.MaxLifetime, bounds.MaxLifetime)
	case cfg.MinTTL < time.Millisecond || cfg.MinTTL > cfg.MaxTTL:
		return nil, invalid("Config.MinTTL", "%v is not from 1ms to MaxTTL, %v", cfg.MinTTL, cfg.MaxTTL)
	case cfg.MaxTTL > cfg.MaxLifetime:
		return nil, invalid("Config.MaxTTL", "%v is longer than MaxLifetime, %v", cfg.MaxTTL, cfg.MaxLifetime)
	}
	cfg.Subscribers = slices.Clone(cfg.Subscribers)
	for i, s := range cfg.Subscribers {
		if s == nil {
			return nil, invalid(index("Config.Subscribers", i, ""), "is nil")
		}
	}
	b := &Book{ledger: ledger, cfg: cfg, schema: name, wait: wait, sql: render(name),
		observer: inBudget.Observer(ledger)}
	if b.channel() != nil && len(b.Channel()) > listen.MaxNameBytes {
		return nil, invalid("Config.Notify",
			"the channel %q is longer than the 63 bytes of a name: use a shorter schema",
			b.Channel())
	}
	return b, nil
}

// Channel names the channel of Config.Notify.
func (b *Book) Channel() string { return b.schema.String() + "_holds" }

// channel is the argument of functions that notify: null for no notification.
func (b *Book) channel() any {
	switch {
	case b.cfg.NotifyContent:
		return b.Channel() + "+" // as announce in schema.sql reads it
	case b.cfg.Notify:
		return b.Channel()
	}
	return nil
}

// made refuses the zero Book, which has no ledger.
func (b *Book) made() error { return fault.Made(errArgument, "book", b != nil && b.ledger != nil) }

// lifetime is the longest time from placement to deadline, 0 without a bound.
func (b *Book) lifetime() time.Duration {
	if b.cfg.NoCeiling {
		return 0
	}
	return b.cfg.MaxLifetime
}

func (b *Book) waitMS() int32 { return int32(b.wait / time.Millisecond) }

// statements are the package's SQL, rendered for one schema.
type statements struct {
	place, placePlain, look, open, openPlain, lockAll, capture, capturePlain, runCapture, release,
	releaseCaptured, extend, giveBack, expire string
	get, ofSession, claimed, list, claims, due,
	history string
	sweep, sweepScope, announced string
}

func render(n schema.Name) statements {
	return statements{
		place: n.SQL(placeSQL), look: n.SQL(lookSQL), open: n.SQL(openSQL),
		placePlain: n.SQL(placePlainSQL), openPlain: n.SQL(openPlainSQL),
		capturePlain: n.SQL(capturePlainSQL), runCapture: n.SQL(runCaptureSQL), lockAll: n.SQL(ledger.LockAllSQL),
		capture: n.SQL(captureSQL), release: n.SQL(releaseSQL),
		releaseCaptured: n.SQL(releaseCapturedSQL),
		extend:          n.SQL(extendSQL), giveBack: n.SQL(returnSQL), expire: n.SQL(expireSQL),
		get: n.SQL(getSQL), ofSession: n.SQL(ofSessionSQL), claimed: n.SQL(claimedSQL), list: n.SQL(listSQL),
		claims: n.SQL(listClaimsSQL), due: n.SQL(dueSQL), history: n.SQL(historySQL),
		sweep: n.SQL(sweepSQL), sweepScope: n.SQL(sweepScopeSQL), announced: n.SQL(announcedSQL),
	}
}

func interval(d time.Duration) pgtype.Interval {
	return pgtype.Interval{Microseconds: d.Microseconds(), Valid: true}
}
