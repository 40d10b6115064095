package metered

import (
	"bytes"
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/command"
	"github.com/pgmetered/metered/internal/fault"
	"github.com/pgmetered/metered/internal/migrate"
	"github.com/pgmetered/metered/internal/schema"
	"github.com/pgmetered/metered/jobs"
	"github.com/pgmetered/metered/tokens"
)

// Config configures a Client. The zero value works, without jobs and without
// derived secrets.
type Config struct {
	// Schema is the schema that Migrate created. Defaults to "metered".
	Schema string

	// River is the client for Tx.Enqueue, with jobs.Plugin() if jobs have keys. Defaults to none (ErrNoRiver).
	River *river.Client[pgx.Tx]

	// TokenPrefix begins the text of tokens. Defaults to tokens.DefaultPrefix.
	TokenPrefix string

	// SecretKey is the key of Client.Secret, at least tokens.MinKeyLen bytes. Defaults to none: Secret then fails.
	SecretKey []byte

	// LockTimeout bounds each wait for locks, as ctx's deadline does, 1ms to 1h. Defaults to 5s.
	LockTimeout time.Duration

	// ClockTolerance is budget.Config's. Defaults to 1m.
	ClockTolerance time.Duration

	// MaxFuture is how far ahead of the database's clock an id's time may be (ErrFuture), up to 24h. Defaults to 5m.
	MaxFuture time.Duration

	// MaxAttempts is how often Do runs a command that fails with 40001 or 40P01, 1 to 100. Defaults to 10.
	MaxAttempts int

	// ResolveTimeout bounds the look-up of a COMMIT whose answer was lost, without a deadline; up to 1h. Defaults to
	// 30s.
	ResolveTimeout time.Duration

	// Holds configures Client.Holds. Subscribers cost a round trip while the locks are held.
	Holds holds.Config

	// OnDenial is called for every refused command, in Do's goroutine, after its transaction has ended; in DoTx after
	// the savepoint was rolled back. It is for audit records and counters. Defaults to none.
	OnDenial func(context.Context, Denial)
}

// Denial is a command that was refused.
type Denial struct {
	// Command is the command, without its Token, which may still be unspent.
	Command Command
	// Err matches budget.ErrExceeded (a *budget.ExceededError), budget.ErrScopeUnknown, ErrScopeRetired or
	// ErrRefundExceeds, tokens.ErrInvalid, or holds.ErrTaken, ErrState, ErrUnknown, ErrExcess, ErrCeiling or ErrNotReturnable.
	Err error
	// Sticky means that a sticky charge was refused: Err is ErrTooManyAttempts.
	Sticky bool
}

// Client runs commands on a pool. It is safe for concurrent use. Its first call checks the schema once:
// ErrNotMigrated, ErrSchemaVersion.
type Client struct {
	// Budget, Holds, Tokens and Jobs are the pieces, set up for the same schema. Jobs
	// is nil without Config.River.
	Budget *budget.Ledger
	Holds  *holds.Book
	Tokens *tokens.Store
	Jobs   *jobs.Enqueuer

	pool   *pgxpool.Pool
	cfg    Config
	schema schema.Name
	sql    statements
	check  *migrate.Check
	engine *command.Engine
}

type statements struct{ lookup, purge string }

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
	c := &Client{pool: pool, cfg: cfg, schema: name, check: migrate.NewCheck(pool, name), sql: statements{
		lookup: name.SQL(lookupSQL), purge: name.SQL(purgeSQL),
	}}
	c.engine = command.New(pool, command.Config{
		Schema: name, LockTimeout: cfg.LockTimeout, MaxFuture: cfg.MaxFuture, ResolveTimeout: cfg.ResolveTimeout, MaxAttempts: cfg.MaxAttempts,
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
	})
	if err != nil {
		return fmt.Errorf("metered: %w", err)
	}
	c.Holds, err = holds.New(c.Budget, c.cfg.Holds)
	if err != nil {
		return fmt.Errorf("metered: Config.Holds: %w", err)
	}
	c.Tokens, err = tokens.New(tokens.Config{Schema: c.cfg.Schema, Prefix: c.cfg.TokenPrefix, LockTimeout: c.cfg.LockTimeout})
	if err != nil {
		return fmt.Errorf("metered: %w", err)
	}
	if c.cfg.River != nil {
		c.Jobs, err = jobs.New(c.cfg.River, jobs.Config{Schema: c.cfg.Schema, LockTimeout: c.cfg.LockTimeout})
		if err != nil {
			return fmt.Errorf("metered: %w", err)
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
		return tokens.Secret{}, invalid("Config.SecretKey", "is needed to derive a secret")
	}
	return tokens.Derive(c.cfg.SecretKey, namespace, operationID, label)
}
