package metered

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/command"
	"github.com/pgmetered/metered/internal/commit"
	"github.com/pgmetered/metered/internal/fault"
	"github.com/pgmetered/metered/internal/migrate"
	"github.com/pgmetered/metered/internal/observed"
	"github.com/pgmetered/metered/internal/refusals"
	"github.com/pgmetered/metered/internal/schema"
	"github.com/pgmetered/metered/jobs"
	"github.com/pgmetered/metered/leases"
	"github.com/pgmetered/metered/observe"
	"github.com/pgmetered/metered/tokens"
)

// Config configures a Client. The zero value works, without jobs and without derived secrets.
type Config struct {
	Schema      string                // the schema that Migrate created. Defaults to "metered"
	River       *river.Client[pgx.Tx] // for Tx.Enqueue; keys need jobs.Plugin() in it. Defaults to none (ErrNoRiver)
	TokenPrefix string                // begins the text of tokens. Defaults to tokens.DefaultPrefix
	// SecretKey is the key of Client.Secret, at least tokens.MinKeyLen bytes. Defaults to none: Secret then fails.
	SecretKey      []byte
	LockTimeout    time.Duration // bounds each wait for locks, as ctx's deadline does, 1ms to 1h. Defaults to 5s
	ClockTolerance time.Duration // as in budget.Config. Defaults to 1m
	MustExist      bool          // as in budget.Config: only scopes that were created are charged, credited or held
	RequireActor   bool          // as in budget.Config and holds.Config: each write has a Note with an Actor
	NoStandings    bool          // as in budget.Config: receipts have no standings of limits, which is faster
	EarlyLook      bool          // sets Command.EarlyLook for every command
	MaxFuture      time.Duration // how far the time of an id or an event may be ahead of the database's clock, up to 24h. Defaults to 5m
	MaxLateness    time.Duration // as in budget.Config: how long ago an event may have occurred. Defaults to 35 days
	MaxAttempts    int           // how often Do runs a command that fails with 40001 or 40P01, 1 to 100. Defaults to 10
	ResolveTimeout time.Duration // bounds the look-up of a lost COMMIT if ctx has no deadline, up to 1h. Defaults to 30s
	Holds          holds.Config  // of Client.Holds; subscribers cost a round trip while the locks are held
	// NotifyJobs and NotifyChargesFrom send committed commands to Client.Listen, at no round trip: the jobs that
	// Tx.Enqueue made, and charges (Command.Charges, Tx.Charge) of so many units and more. NotifyJobs sends the jobs of
	// Client.Jobs as well, for a round trip of each call (jobs.Config.Notify). Every role that may connect to the database can
	// listen, whatever its grants. Default to nothing. Refusals are OnDenial's.
	NotifyJobs        bool
	NotifyChargesFrom int64
	// Leases spends the charges of its Rules' scopes from leases, without their locks (package leases). Limits are kept all
	// the same. Units spent so have no Standings in the receipt. Sticky charges are not. Defaults to none.
	Leases *leases.Pool
	// OnThreshold is called with the thresholds that charges and holds cross (budget.Limit.Tell), before the transaction that
	// crosses them commits: tx is that of the command. It enqueues a job, or writes rows. A command that crosses one runs again, once, to
	// report it. Defaults to none: limits with thresholds are refused.
	OnThreshold budget.OnThreshold
	// Observer gets an event for each call of the Client and its pieces: for metrics and traces (packages observe, otelmetered).
	// That of Leases is its own, in its Config.Ledger. Defaults to none.
	Observer observe.Observer
	// OnDenial is called for every refused command, in Do's goroutine, after its transaction has ended, and in DoTx after
	// the savepoint was rolled back. It is for audit records. To count refusals, see Observer. Defaults to none.
	OnDenial func(context.Context, Denial)
}

// Denial is a command that was refused.
type Denial struct {
	Command Command // without its Token, which may still be unspent
	// Err matches budget.ErrExceeded (a *budget.ExceededError), ErrScopeUnknown, ErrScopeRetired, ErrScopeClosed or ErrRefundExceeds,
	// tokens.ErrInvalid, or holds.ErrTaken, ErrState, ErrUnknown, ErrExcess, ErrCeiling or ErrNotReturnable.
	Err      error
	Sticky   bool // a sticky charge was refused: Err is ErrTooManyAttempts
	Replayed bool // the refusal was on record (Command.RecordRefusal)
}

// Client runs commands on a pool. It is safe for concurrent use. Its first call checks the schema once:
// ErrNotMigrated, ErrSchemaVersion.
type Client struct {
	// The pieces, set up for the same schema.
	Budget *budget.Ledger
	Holds  *holds.Book
	Tokens *tokens.Store
	Jobs   *jobs.Enqueuer // nil without Config.River

	enqueuer *jobs.Enqueuer // Jobs without Notify: for commands, whose notice has their jobs

	pool   *pgxpool.Pool
	cfg    Config
	schema schema.Name
	sql    statements
	check  *migrate.Check
	engine *command.Engine

	refusals refusals.Recent
	observer *observed.To
}

type statements struct{ lookup, purge, purgeable, notify string }

// New returns a Client, or an *ArgumentError. It does not touch the database.
func New(pool *pgxpool.Pool, cfg Config) (*Client, error) {
	if err := notNil("pool", pool); err != nil {
		return nil, err
	}
	cfg.LockTimeout = orDefault(cfg.LockTimeout, 5*time.Second)
	cfg.MaxFuture = orDefault(cfg.MaxFuture, 5*time.Minute)
	cfg.ResolveTimeout = orDefault(cfg.ResolveTimeout, 30*time.Second)
	if cfg.MaxAttempts == 0 {
		cfg.MaxAttempts = 10
	}
	name, err := parseSchema("Config.Schema", cfg.Schema)
	if err != nil {
		return nil, err
	}
	switch {
	case cfg.MaxFuture < 0 || cfg.MaxFuture > 24*time.Hour:
		return nil, invalid("Config.MaxFuture", "%v is not from 0 to 24h", cfg.MaxFuture)
	case cfg.ResolveTimeout < 0 || cfg.ResolveTimeout > time.Hour:
		return nil, invalid("Config.ResolveTimeout", "%v is not from 0 to 1h", cfg.ResolveTimeout)
	case cfg.MaxAttempts < 1 || cfg.MaxAttempts > 100:
		return nil, invalid("Config.MaxAttempts", "%d is not from 1 to 100", cfg.MaxAttempts)
	}
	if len(cfg.SecretKey) > 0 {
		if _, err := tokens.Derive(cfg.SecretKey, "probe"); err != nil {
			return nil, invalid("Config.SecretKey", "%s", err)
		}
	}
	cfg.SecretKey = bytes.Clone(cfg.SecretKey)
	if cfg.Leases != nil && inLeases.Schema(cfg.Leases) != name {
		return nil, invalid("Config.Leases", "is of schema %q, want %q", inLeases.Schema(cfg.Leases), name)
	}
	c := &Client{pool: pool, cfg: cfg, observer: observed.New(cfg.Observer), schema: name, check: migrate.NewCheck(schema.Current(), name), sql: statements{
		lookup: name.SQL(lookupSQL), purge: name.SQL(purgeSQL), purgeable: name.SQL(purgeableSQL), notify: notifyJobs(cfg.River),
	}}
	if err := c.checkNotify(); err != nil {
		return nil, err
	}
	c.engine = command.New(pool, command.Config{
		Schema: name, LockTimeout: cfg.LockTimeout, MaxFuture: cfg.MaxFuture, ResolveTimeout: cfg.ResolveTimeout, MaxAttempts: cfg.MaxAttempts,
		Observer: c.observer, Usable: c.check.Usable,
	})
	if err := c.setUpPieces(); err != nil {
		return nil, err
	}
	return c, nil
}

// made refuses the zero Client, which has no pool.
func (c *Client) made() error { return fault.Made(errArgument, "client", c != nil && c.pool != nil) }

func (c *Client) setUpPieces() (err error) {
	c.Budget, err = budget.New(budget.Config{
		Schema: c.cfg.Schema, LockTimeout: c.cfg.LockTimeout, ClockTolerance: c.cfg.ClockTolerance,
		MustExist: c.cfg.MustExist, RequireActor: c.cfg.RequireActor, NoStandings: c.cfg.NoStandings,
		MaxFuture: c.cfg.MaxFuture, MaxLateness: c.cfg.MaxLateness, Observer: c.cfg.Observer, OnThreshold: c.cfg.OnThreshold,
	})
	if err != nil {
		return fmt.Errorf("metered: %w", err)
	}
	c.Holds, err = holds.New(c.Budget, c.cfg.Holds)
	if err != nil {
		return fmt.Errorf("metered: Config.Holds: %w", err)
	}
	c.Tokens, err = tokens.New(tokens.Config{
		Schema: c.cfg.Schema, Prefix: c.cfg.TokenPrefix, LockTimeout: c.cfg.LockTimeout, Observer: c.cfg.Observer,
	})
	if err != nil {
		return fmt.Errorf("metered: %w", err)
	}
	if c.cfg.River != nil {
		config := jobs.Config{Schema: c.cfg.Schema, LockTimeout: c.cfg.LockTimeout, Observer: c.cfg.Observer}
		if c.enqueuer, err = jobs.New(c.cfg.River, config); err != nil {
			return fmt.Errorf("metered: %w", err)
		}
		c.Jobs = c.enqueuer
		if config.Notify = c.cfg.NotifyJobs; config.Notify {
			if c.Jobs, err = jobs.New(c.cfg.River, config); err != nil {
				return fmt.Errorf("metered: %w", err)
			}
		}
	}
	return nil
}

func orDefault(d, def time.Duration) time.Duration {
	if d == 0 {
		return def
	}
	return d
}

// Secret derives the secret of a token that the operation mints, the same for the same operation and label, so that a
// replay can show the token without it being stored. Without Config.SecretKey it is an *ArgumentError.
func (c *Client) Secret(namespace, operationID, label string) (tokens.Secret, error) {
	if err := c.made(); err != nil {
		return tokens.Secret{}, err
	}
	if len(c.cfg.SecretKey) == 0 {
		return tokens.Secret{}, misuse("Config.SecretKey", "is needed to derive a secret")
	}
	return tokens.Derive(c.cfg.SecretKey, namespace, operationID, label)
}

// RunTx runs fn in a transaction of the Client's pool, for the pieces alone and for DoTx. After SQLSTATE 40001 or 40P01
// it runs fn again, up to Config.MaxAttempts times, as Do does. So fn must have no effect outside tx, and must not
// end it (ErrTxControl, and its commits stay). If fn returns an error, the transaction is rolled back, and RunTx
// returns that error. Its own errors: those of Postgres, ErrSerialization, ErrCommitUnknown, ErrTxFailed, ErrNested
// inside a command.
func (c *Client) RunTx(ctx context.Context, opts pgx.TxOptions, fn func(ctx context.Context, tx pgx.Tx) error) error {
	if err := cmp.Or(c.made(), notNil("fn", fn)); err != nil {
		return err
	}
	if c.engine.Inside(ctx) {
		return ErrNested
	}
	return c.engine.Again(ctx, func() error {
		err := c.runTx(ctx, opts, fn)
		c.observer.Never(ctx, err, ErrCommitUnknown)
		return err
	})
}

func (c *Client) runTx(ctx context.Context, opts pgx.TxOptions, fn func(context.Context, pgx.Tx) error) error {
	conn, tx, err := c.engine.Begin(ctx, opts)
	if err != nil {
		return err
	}
	defer conn.Release()
	return commit.Run(ctx, tx, "metered", ErrCommitUnknown, func(tx pgx.Tx) error { return fn(ctx, tx) })
}
