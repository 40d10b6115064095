// Package metered runs metered commands on Postgres: a command charges budgets, spends a one-time
// token, makes the caller's writes and enqueues jobs, and all of it commits or none.
//
//	out, err := metered.Do(ctx, client, metered.Command{
//	    ID:      requestID,
//	    Tenant:  user,
//	    Name:    "upload",
//	    Input:   input,
//	    Token:   &metered.Redeem{Purpose: "upload", Subject: user, Presented: token},
//	    Charges: []budget.Charge{{Scope: "org/acme", Amount: size, Limits: limits}},
//	}, func(ctx context.Context, tx *metered.Tx) (Stored, error) {
//	    … your writes through tx, tx.Grant, tx.Enqueue(ctx, ProcessUpload{…}, nil) …
//	    return stored, nil
//	})
//
// Do owns its transaction, DoTx runs in one of yours, and Open is for work whose cost is known at
// its end. A command can be refused after its function has run.
//
// A nil error means committed. After an *IndefiniteError the outcome is unknown: send the command
// again. After any other error nothing is written, except sticky charges and a recorded refusal.
package metered

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/answer"
	"github.com/pgmetered/metered/internal/command"
	"github.com/pgmetered/metered/internal/commit"
	"github.com/pgmetered/metered/internal/fault"
	"github.com/pgmetered/metered/internal/jsontext"
	"github.com/pgmetered/metered/internal/ledger"
	"github.com/pgmetered/metered/internal/lend"
	"github.com/pgmetered/metered/internal/migrate"
	"github.com/pgmetered/metered/internal/observed"
	"github.com/pgmetered/metered/internal/refusals"
	"github.com/pgmetered/metered/internal/schema"
	"github.com/pgmetered/metered/internal/uuidv7"
	"github.com/pgmetered/metered/jobs"
	"github.com/pgmetered/metered/leases"
	"github.com/pgmetered/metered/observe"
	"github.com/pgmetered/metered/replica"
	"github.com/pgmetered/metered/tokens"
)

// NewID returns a UUIDv7 for Command.ID. Each repetition needs the same.
func NewID() string { return uuidv7.New() }

// Func makes a command's writes, and its result, stored as JSON. It may be called several times,
// and must have no effect outside tx. Do with its ctx fails with the code
// nested_command.
type Func[R any] func(ctx context.Context, tx *Tx) (R, error)

// Outcome is the answer of a committed command. On error all fields except Sticky are zero, but for
// Replayed and At of a refusal on record.
type Outcome[R any] struct {
	// Result is the function's result, decoded from JSON.
	Result R `json:"result"`

	// Raw is the result's JSON, with the same bytes in each replay.
	Raw json.RawMessage `json:"-"`

	// Replayed says that the answer is an earlier call's record, or this one's after a lost answer
	// to COMMIT.
	Replayed bool `json:"replayed"`

	// Receipt has the charges, without sticky ones. Those with UpTo or Lots come last. A replay has
	// no standings.
	Receipt budget.Receipt `json:"receipt"`

	// Sticky are the charges of Command.Sticky, also on error. It is empty if they were refused,
	// if they are not known to be taken (ErrSticky), or if the call found another's record.
	Sticky budget.Receipt `json:"sticky,omitzero"`

	// Holds are the holds that calls of Tx placed or changed, each as it was after its call.
	Holds []holds.Hold `json:"holds,omitempty"`

	// At is the time of completion, by the database's clock.
	At time.Time `json:"at"`

	// LSN is a position in the log after the commit, if Command.LSN asked for it. It is 0 if
	// unknown. It is not stored, so a replay has a later one.
	LSN replica.LSN `json:"lsn,omitzero"`
}

// Do runs a command as one unit: it claims the operation id, spends the token, calls fn (nil in a
// Do[any]), makes the charges, records the result and commits.
//
// A command that committed under the same ID and Tenant gets its first result. It must present its
// token, which may be spent. Concurrent calls with one id wait for each other.
//
// Do tries again after SQLSTATE 40001 and 40P01, up to Config.MaxAttempts, and looks up a COMMIT
// whose answer was lost, until ctx's deadline or Config.ResolveTimeout. A panic in fn rolls back,
// and goes on.
//
// Locks: the operation id and the token's row, and at the end scopes, ids of new holds and rows of
// holds. ctx's deadline also bounds the server's waits.
func Do[R any](ctx context.Context, c *Client, cmd Command, fn Func[R]) (Outcome[R], error) {
	if err := c.made(); err != nil {
		return Outcome[R]{}, err
	}
	if c.engine.Inside(ctx) {
		return Outcome[R]{}, command.ErrNested
	}
	return run(ctx, c, nil, cmd, fn)
}

// DoTx is Do inside the caller's transaction, in a savepoint: if the command is refused or fails,
// tx is as before, and usable. It takes effect with the caller's commit, and so does its record.
//
// The scopes stay locked until tx ends: make it the last thing. A second command in tx, or one
// after a charge, can deadlock (SQLSTATE 40P01). Nothing is retried, and no timeout is set: see
// Client.RunTx. Sticky, Isolation, EarlyRelease, RecordRefusal and LSN are refused. After a replay
// or budget.ErrConflict the caller's commit waits until that record is durable.
func DoTx[R any](ctx context.Context, c *Client, tx pgx.Tx, cmd Command, fn Func[R]) (Outcome[R], error) {
	if err := cmp.Or(c.made(), notNil("tx", tx)); err != nil {
		return Outcome[R]{}, err
	}
	if err := lendable("Command", cmd); err != nil {
		return Outcome[R]{}, err
	}
	return run(ctx, c, tx, cmd, fn)
}

// lendable refuses what a command in a transaction of the caller's cannot have. of is the argument
// that the caller knows.
func lendable(of string, cmd Command) error {
	switch {
	case len(cmd.Sticky) > 0:
		return misuse(of+".Sticky", "cannot be taken from inside a transaction: use Do")
	case cmd.Isolation != "":
		return misuse(of+".Isolation", "is the caller's, who began the transaction")
	case cmd.EarlyRelease:
		return misuse(of+".EarlyRelease", "is about a COMMIT, which is the caller's")
	case cmd.RecordRefusal:
		return misuse(of+".RecordRefusal", "needs a transaction of its own: use Do")
	case cmd.LSN:
		return misuse(of+".LSN", "is that of a COMMIT, which is the caller's: use replica.CommitLSN after it")
	}
	return nil
}

// run runs a command in tx, or in a transaction of its own if that is nil.
func run[R any](ctx context.Context, c *Client, tx pgx.Tx, cmd Command,
	fn Func[R]) (out Outcome[R], err error) {
	var op *operation
	ctx, span := c.observer.Start(ctx, observe.Op{Work: observe.Command, Name: cmd.Name,
		Tenant: cmd.Tenant, ID: cmd.ID})
	returned := false // else the function panics
	defer func() { c.ended(ctx, span, op, tx != nil, returned, err) }()
	op, err = c.prepare(cmd, encoded(fn, &out.Result))
	if err == nil && fn != nil && op.Statements != nil {
		op, err = nil, misuse("Command.Statements", "are for a command without a function")
	}
	if err == nil {
		op.Bare = fn == nil && c.cfg.Leases == nil
		err = op.run(ctx, tx)
		c.check.Doubt(err)
	}
	if err == nil && op.rec.Replayed {
		var first R
		if err = json.Unmarshal(op.rec.Result, &first); err != nil {
			err = fmt.Errorf("%w: the recorded result does not fit its type: %w", errResult, err)
		}
		out.Result = first
	}
	returned = true
	if err != nil {
		out = Outcome[R]{Sticky: op.stickyReceipt()}
		if op != nil && op.rec.Refusal != nil {
			out.Replayed, out.At = true, op.rec.At
		}
		return out, c.reportRefusal(ctx, cmd, op, err)
	}
	out.Raw, out.Replayed, out.At, out.LSN = op.rec.Result, op.rec.Replayed, op.rec.At, op.rec.LSN
	out.Receipt, out.Sticky, out.Holds = op.receipt, op.sticky, op.holds
	return out, nil
}

// work is a Func with its result as JSON.
type work func(ctx context.Context, tx *Tx) ([]byte, error)

// encoded runs fn and its result through JSON and back before anything commits, so
// that a result which cannot be replayed is refused the first time.
func encoded[R any](fn Func[R], result *R) work {
	return func(ctx context.Context, tx *Tx) ([]byte, error) {
		var r R
		if fn != nil {
			var err error
			if r, err = fn(ctx, tx); err != nil {
				return nil, err
			}
		}
		raw, err := json.Marshal(r)
		if err != nil {
			return nil, fmt.Errorf("%w: %w", errResult, err)
		}
		if len(raw) > maxResultBytes {
			return nil, fmt.Errorf("%w: %d bytes, want at most %d", errResult, len(raw), maxResultBytes)
		}
		if err := jsontext.Check(r, raw); err != nil {
			return nil, fmt.Errorf("%w: it %w", errResult, err)
		}
		var back R
		if err := json.Unmarshal(raw, &back); err != nil {
			return nil, fmt.Errorf("%w: it does not come back from JSON: %w", errResult, err)
		}
		*result = back
		return raw, nil
	}
}

// Config configures a Client. The zero value has the documented defaults.
type Config struct {
	// Config configures Client.Budget. Its Schema and LockTimeout are those of all pieces, and its
	// Observer hears of the calls of the Client and all pieces, except Leases. Its MaxFuture also
	// bounds the times of ids. A command that crosses a threshold runs again, once, for its
	// OnThreshold.
	budget.Config

	// River is the client that Tx.Enqueue inserts jobs with. Keys need jobs.Plugin() in its
	// configuration. Without River there are no jobs.
	River *river.Client[pgx.Tx]

	// TokenPrefix begins the text of tokens, as tokens.Config.Prefix. Defaults to "metered".
	TokenPrefix string

	// SecretKey is the key of Client.Secret: 32 to 1024 random bytes.
	SecretKey []byte

	// EarlyLook sets Command.EarlyLook of every command.
	EarlyLook bool

	// MaxAttempts is how often a command runs that fails with 40001 or 40P01, from 1 to 100.
	// Defaults to 10.
	MaxAttempts int

	// ResolveTimeout bounds the look-up after a lost COMMIT if ctx has no deadline, up to 1h.
	// Defaults to 30s.
	ResolveTimeout time.Duration

	// Holds configures Client.Holds. Its Subscribers cost each command that changes holds a round
	// trip under the locks.
	Holds holds.Config

	// NotifyJobs sends the jobs of committed commands to Client.Listen, and those of Client.Jobs
	// for a round trip a call. Any role can listen.
	NotifyJobs bool

	// NotifyChargesFrom sends charges of so many units and more to Client.Listen. 0 sends none.
	NotifyChargesFrom int64

	// Leases spends charges of the scopes of its Rules from leases, without the scopes' locks and
	// without Standings. Sticky charges are made in the ledger. Defaults to none.
	Leases *leases.Pool

	// JobLimits is jobs.Config.Limits of Client.Jobs and of Tx.Enqueue. Defaults to none.
	JobLimits func(ctx context.Context, tx pgx.Tx, scope string) ([]budget.Limit, error)

	// OnDropJob is jobs.Config.OnDrop of Client.Jobs. Defaults to none.
	OnDropJob func(ctx context.Context, tx pgx.Tx, dropped jobs.Parked) error

	// OnRefusal hears of refused commands, in Do's goroutine, after the rollback. Defaults to
	// none.
	OnRefusal func(context.Context, RefusedCommand)
}

// RefusedCommand is a refused command, for Config.OnRefusal.
type RefusedCommand struct {
	// Command is the refused command, without its Token, which may be unspent.
	Command Command

	// Err is the refusal, an error of package budget, tokens or holds.
	Err error

	// Sticky says that Err is ErrTooManyAttempts.
	Sticky bool

	// Replayed says that the refusal was on record.
	Replayed bool
}

// Client is safe for concurrent use. Its first call may be ErrSchemaVersion or
// budget.ErrNotMigrated.
type Client struct {
	// Budget is the ledger: charges, credits, refunds and usage in a transaction of yours.
	Budget *budget.Ledger

	// Holds is the book of holds: reservations, which are captured or released later.
	Holds *holds.Book

	// Tokens is the store of one-time grants.
	Tokens *tokens.Store

	// Jobs enqueues jobs without a command. It is nil without Config.River.
	Jobs *jobs.Enqueuer

	enqueuer *jobs.Enqueuer // Jobs without Notify: for commands, whose notice has their jobs

	pool   *pgxpool.Pool
	cfg    Config
	schema schema.Name
	sql    statements
	check  *migrate.Check
	engine *command.Engine

	refusals *refusals.Recent
	home     *command.Home // of the one tenant that it works for, in a cell. nil for others
	observer *observed.To
}

type statements struct{ lookup, notify string }

func init() { lend.Lend("metered", internals{}) }

// internals are lent to cells.
type internals struct{}

// Place is a Client's pool and schema, nil for a Client that New did not make.
func (internals) Place(c *Client) (*pgxpool.Pool, schema.Name) {
	if c.made() != nil {
		return nil, schema.Name{}
	}
	return c.pool, c.schema
}

// RiverJobs is River's table of a Client, as text for regclass, or "".
func (internals) RiverJobs(c *Client) string {
	if c.cfg.River == nil {
		return ""
	}
	return riverJobs(c.cfg.River)
}

// For is a Client of one tenant, on the pool of c, which is that of a cell. first: the tenant lives
// there unless it has moved.
func (internals) For(c *Client, tenant string, cell, cells int, first bool) *Client {
	of := *c
	of.home = command.NewHome(c.schema, tenant, cell, cells, first)
	return &of
}

// New sends no SQL.
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
	c := &Client{pool: pool, cfg: cfg, observer: observed.New(cfg.Observer),
		refusals: &refusals.Recent{}, schema: name, check: migrate.NewCheck(schema.Current(), name),
		sql: statements{
			lookup: name.SQL(lookupSQL),
			notify: fmt.Sprintf(notifyJobsSQL, riverJobs(cfg.River)),
		}}
	if err := c.checkNotify(); err != nil {
		return nil, err
	}
	c.engine = command.New(pool, command.Config{
		Schema: name, LockTimeout: cfg.LockTimeout, MaxFuture: cfg.MaxFuture,
		ResolveTimeout: cfg.ResolveTimeout, MaxAttempts: cfg.MaxAttempts,
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
	c.Budget, err = budget.New(c.cfg.Config)
	if err != nil {
		return fmt.Errorf("metered: %w", err)
	}
	c.Holds, err = holds.New(c.Budget, c.cfg.Holds)
	if err != nil {
		return fmt.Errorf("metered: Config.Holds: %w", err)
	}
	c.Tokens, err = tokens.New(tokens.Config{
		Schema: c.cfg.Schema, Prefix: c.cfg.TokenPrefix, LockTimeout: c.cfg.LockTimeout,
		Observer: c.cfg.Observer,
	})
	if err != nil {
		return fmt.Errorf("metered: %w", err)
	}
	if c.cfg.River != nil {
		config := jobs.Config{
			Schema: c.cfg.Schema, LockTimeout: c.cfg.LockTimeout, Observer: c.cfg.Observer, Holds: c.Holds,
			Limits: c.cfg.JobLimits, OnDrop: c.cfg.OnDropJob,
		}
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

// NoOtherConnections makes a pool that is made of cfg refuse connections to functions of commands,
// for tests and development. A function writes by its Tx alone. A call of an ORM's handle or of the
// pool in it takes another connection: its rows stay when the command is refused, and as many
// commands as the pool has connections wait for one another for ever. With this, such a call with
// the function's context fails with the code nested_command, and its error names the command. A call
// with another context goes unnoticed.
//
// It sets cfg.ConnConfig.Tracer, beside the one that is there. The calls that functions of RunTx
// and subscribers make are not refused.
func NoOtherConnections(cfg *pgxpool.Config) error {
	if err := notNil("cfg", cfg); err != nil {
		return err
	}
	command.NoOthers(cfg)
	return nil
}

// Secret derives the secret of a token that the operation mints from Config.SecretKey. A replay
// derives it again.
func (c *Client) Secret(tenant, operationID, label string) (tokens.Secret, error) {
	if err := c.made(); err != nil {
		return tokens.Secret{}, err
	}
	if len(c.cfg.SecretKey) == 0 {
		return tokens.Secret{}, misuse("Config.SecretKey", "is needed to derive a secret")
	}
	return tokens.Derive(c.cfg.SecretKey, tenant, operationID, label)
}

// RunTx runs fn in a transaction of the Client's pool. After SQLSTATE 40001 or 40P01 it runs fn
// again, up to Config.MaxAttempts times: fn must have no effect outside tx, and must not end it. If
// it does, what it committed stays, and RunTx fails with the code transaction_control. An error of fn
// rolls back. Others: budget.ErrCommitUnknown, budget.ErrSerialization, and mistakes of a program,
// which have a Code.
func (c *Client) RunTx(ctx context.Context, opts pgx.TxOptions,
	fn func(ctx context.Context, tx pgx.Tx) error) error {
	if err := cmp.Or(c.made(), notNil("fn", fn)); err != nil {
		return err
	}
	if c.engine.Inside(ctx) {
		return command.ErrNested
	}
	return c.engine.Again(ctx, func() error {
		err := c.runTx(ctx, opts, func(ctx context.Context, tx pgx.Tx) error {
			if err := c.home.Enter(ctx, tx, c.cfg.LockTimeout); err != nil {
				return err
			}
			return fn(ctx, tx)
		})
		c.observer.Never(ctx, err, errCommitUnknown)
		return err
	})
}

// here looks again for something that is missing, where the tenant certainly lives, as it does
// inside a command: it may have been away.
func (c *Client) here(ctx context.Context, missing error,
	look func(context.Context, budget.Querier) error) error {
	if c.home == nil || c.engine.Inside(ctx) {
		return missing
	}
	return c.RunTx(ctx, pgx.TxOptions{IsoLevel: pgx.ReadCommitted},
		func(ctx context.Context, tx pgx.Tx) error { return look(ctx, tx) })
}

func (c *Client) runTx(ctx context.Context, opts pgx.TxOptions, fn func(context.Context, pgx.Tx) error) error {
	conn, tx, err := c.engine.Begin(ctx, opts)
	if err != nil {
		return err
	}
	defer conn.Release()
	err = commit.Run(ctx, tx, "metered", errCommitUnknown, func(tx pgx.Tx) error { return fn(ctx, tx) })
	commit.Leave(ctx, conn.Conn(), err)
	return err
}

// Warm makes a new connection as fast as a used one: call it in pgxpool.Config.AfterConnect
// (docs/operations.md). schema defaults to "metered". Where that is missing, or not granted, Warm
// does nothing. After an error drop the connection.
func Warm(ctx context.Context, conn *pgx.Conn, schema string) error {
	if err := notNil("conn", conn); err != nil {
		return err
	}
	name, err := parseSchema("schema", schema)
	if err != nil {
		return err
	}
	cfg := budget.Config{Schema: name.String(), LockTimeout: 5 * time.Second, MaxFuture: 5 * time.Minute}
	c := &Client{cfg: Config{Config: cfg}, schema: name, observer: observed.New(nil),
		refusals: &refusals.Recent{}}
	c.engine = command.New(nil, command.Config{Schema: name, LockTimeout: c.cfg.LockTimeout,
		MaxFuture: c.cfg.MaxFuture})
	if err := c.setUpPieces(); err != nil {
		return err
	}
	batch := &pgx.Batch{} // is prepared: these begin and end the flushes of a command
	batch.BeginTx(pgx.TxOptions{IsoLevel: pgx.ReadCommitted})
	batch.Queue("commit")
	if err := conn.SendBatch(ctx, batch).Close(); err != nil {
		return err
	}
	tx, err := conn.BeginTx(ctx, pgx.TxOptions{IsoLevel: pgx.ReadCommitted})
	if err != nil {
		return err
	}
	return errors.Join(c.warm(ctx, tx), tx.Rollback(ctx))
}

// warm is nil also where a call fails: it will fail again, for its caller. Calls with one line or
// one charge have statements of their own.
func (c *Client) warm(ctx context.Context, tx pgx.Tx) error {
	of := "metered/warm"
	line := func(limits ...budget.Limit) []holds.Line {
		return []holds.Line{{Scope: of + "/line" + NewID(), Amount: 1, Limits: limits}}
	}
	daily := budget.Per(9, budget.Day, time.UTC, time.Time{})
	rate := []budget.Charge{{Scope: of + "/rate" + NewID(), Amount: 1,
		Limits: []budget.Limit{budget.PerWindow(9, time.Minute), budget.Lifetime(9)}}}
	commands := []Command{
		{ID: NewID(), Tenant: of, Charges: rate,
			Holds: []holds.Placement{{Lines: line(daily), TTL: time.Minute}}},
		{ID: NewID(), Tenant: of, Holds: []holds.Placement{{Lines: line(), TTL: time.Minute}}},
	}
	for _, r := range []Reservation{{Lines: line(daily), Charges: rate}, {Lines: line()}} {
		r.ID, r.Tenant = NewID(), of
		s := &session{client: c, r: r}
		open, _, err := s.prepare()
		if err != nil {
			return err
		}
		opened, err := open.Scan(answer.QueryRow(ctx, tx, open.SQL,
			open.Args(ledger.Sending{WaitMS: 1, Tenant: of, Operation: r.ID})...))
		if err != nil {
			return nil
		}
		s.id = opened[0].ID
		if _, err := c.Holds.Extend(ctx, tx,
			holds.Extend{Tenant: of, IDs: []string{s.id}, By: time.Second}); err != nil {
			return nil
		}
		capture, err := inHolds.Capture(c.Holds, s.capture(Cost{All: true}))
		if err != nil {
			return err
		}
		commands = append(commands, s.command(capture))
	}
	for _, cmd := range commands {
		op, err := c.prepare(cmd, func(context.Context, *Tx) ([]byte, error) { return []byte("null"), nil })
		if err != nil {
			return err
		}
		if err := op.run(ctx, tx); err != nil {
			return nil
		}
	}
	return nil
}
