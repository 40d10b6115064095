package pgtest

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/pgserver"
	"github.com/pgmetered/metered/jobs"
	"github.com/pgmetered/metered/tokens"
)

var IsolationLevels = []pgx.TxIsoLevel{pgx.ReadCommitted, pgx.RepeatableRead, pgx.Serializable}

// ErrOwn is an error of the command's function.
var ErrOwn = errors.New("the function says no")

// SecretKey is any: a fixed one makes the tokens of a test the same every time.
var SecretKey = []byte("mB7-wq2Zk/90sVfXr:LdN3cYp1{TgHuJ")

type Uploaded struct {
	Name string `json:"name"`
}

type Process struct {
	Name string `json:"name"`
}

func (Process) Kind() string { return "process" }

// Mint returns the text of a new token for purpose upload and subject ann.
func Mint(t testing.TB, pool *pgxpool.Pool, c *metered.Client) string {
	t.Helper()
	var text string
	require.NoError(t, pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error {
		token, err := c.Tokens.Mint(t.Context(), tx, tokens.Mint{Purpose: "upload", Subject: "ann", TTL: time.Hour})
		text = token.Token.Reveal()
		return err
	}))
	return text
}

func Redeem(presented string) *metered.Redeem {
	return &metered.Redeem{Purpose: "upload", Subject: "ann", Presented: presented}
}

// Charge takes amount of at most limit per hour; limit 0 means none.
func Charge(scope string, amount, limit int64) budget.Charge {
	c := budget.Charge{Scope: scope, Amount: amount}
	if limit > 0 {
		c.Limits = []budget.Limit{{Max: limit, Window: time.Hour}}
	}
	return c
}

// Upload writes one row of the caller's.
func Upload(name string) metered.Func[Uploaded] {
	return func(ctx context.Context, tx *metered.Tx) (Uploaded, error) {
		_, err := tx.Exec(ctx, `insert into uploads values ($1)`, name)
		return Uploaded{Name: name}, err
	}
}

// MustNotRun is for commands that are answered without their function.
func MustNotRun(t testing.TB) metered.Func[Uploaded] {
	return func(context.Context, *metered.Tx) (Uploaded, error) {
		t.Error("the function ran")
		return Uploaded{}, nil
	}
}

// Whole is a command that does all that a command can do, named by its id.
func Whole(t testing.TB, pool *pgxpool.Pool, c *metered.Client, id string) metered.Command {
	t.Helper()
	return metered.Command{
		ID: id, Input: 1, Token: Redeem(Mint(t, pool, c)),
		Charges: []budget.Charge{Charge(id+"/a", 2, 100), Charge(id+"/b", 3, 100)},
	}
}

// WholeFunc is the function of such a command. before is called before each of
// its steps, and once after the last.
func WholeFunc(id string, before func(step int) error) metered.Func[Uploaded] {
	steps := []func(ctx context.Context, tx *metered.Tx) error{
		func(ctx context.Context, tx *metered.Tx) error {
			_, err := tx.Exec(ctx, `insert into uploads values ($1)`, id)
			return err
		},
		func(ctx context.Context, tx *metered.Tx) error {
			_, err := tx.Enqueue(ctx, Process{id}, nil)
			return err
		},
		func(ctx context.Context, tx *metered.Tx) error {
			_, err := tx.Enqueue(ctx, Process{id}, &jobs.Options{Key: id})
			return err
		},
		func(ctx context.Context, tx *metered.Tx) error { return tx.Charge(Charge(id+"/c", 4, 100)) },
		func(ctx context.Context, tx *metered.Tx) error {
			return tx.Credit(budget.Credit{Scope: id + "/d", Amount: 5})
		},
		func(ctx context.Context, tx *metered.Tx) error {
			_, err := tx.Place(ctx, holds.Placement{ID: id, Lines: []holds.Line{{Scope: id + "/e", Amount: 6}}, TTL: time.Hour}, nil)
			return err
		},
	}
	return func(ctx context.Context, tx *metered.Tx) (Uploaded, error) {
		for i := range len(steps) + 1 {
			if before != nil {
				if err := before(i); err != nil {
					return Uploaded{}, err
				}
			}
			if i < len(steps) {
				if err := steps[i](ctx, tx); err != nil {
					return Uploaded{}, err
				}
			}
		}
		return Uploaded{Name: id}, nil
	}
}

const WholeSteps = 6

// Footprint counts what a whole command leaves.
type Footprint struct{ Entries, Units, Holds, Tokens, Jobs, Keys, Operations, Rows int }

var (
	Nothing    = Footprint{}
	Everything = Footprint{Entries: 5, Units: 20, Holds: 1, Tokens: 1, Jobs: 2, Keys: 1, Operations: 1, Rows: 1}
)

func FootprintOf(t testing.TB, pool *pgxpool.Pool, cmd metered.Command) (f Footprint) {
	t.Helper()
	ctx, cancel := Patient(t)
	defer cancel()
	c, err := metered.New(pool, metered.Config{})
	require.NoError(t, err)
	token, err := c.Tokens.Parse(cmd.Token.Presented)
	require.NoError(t, err)
	digest := token.Digest()
	require.NoError(t, pool.QueryRow(ctx, `select
		(select count(*) from metered.ledger where operation = $1),
		(select coalesce(sum(amount), 0) from metered.ledger where operation = $1),
		(select count(*) from metered.holds h join metered.hold_events e on e.hold = h.no and e.operation = h.id
			join metered.hold_lines l on l.hold = h.no where h.id = $1),
		(select used from metered.tokens where digest = $2),
		(select count(*) from river_job where args->>'name' = $1),
		(select count(*) from metered.job_keys where key = $1),
		(select count(*) from metered.operations where id = $1),
		(select count(*) from uploads where name = $1)`, cmd.ID, digest[:]).
		Scan(&f.Entries, &f.Units, &f.Holds, &f.Tokens, &f.Jobs, &f.Keys, &f.Operations, &f.Rows))
	return f
}

func Count(t testing.TB, pool *pgxpool.Pool, table string) int {
	t.Helper()
	return Value[int](t, pool, "select count(*) from "+table)
}

// WaitAdvisory polls until n backends of the database wait for an advisory lock.
func WaitAdvisory(t testing.TB, pool *pgxpool.Pool, n int) {
	t.Helper()
	WaitFor(t, fmt.Sprint(n, " sessions to wait for an advisory lock"), func() bool {
		return Value[int](t, pool, `select count(*) from pg_stat_activity
			where datname = current_database() and wait_event_type = 'Lock' and wait_event = 'advisory'`) >= n
	})
}

// AtOnce calls f(0) to f(n-1) at once and waits for them.
func AtOnce(n int, f func(i int)) {
	start, done := make(chan struct{}), make(chan struct{})
	for i := range n {
		go func() {
			defer func() { done <- struct{}{} }()
			<-start
			f(i)
		}()
	}
	close(start)
	for range n {
		<-done
	}
}

// Used returns the units that count against an hour of scope.
func Used(t testing.TB, pool *pgxpool.Pool, c *metered.Client, scope string) int64 {
	t.Helper()
	usage, err := c.Budget.Usage(t.Context(), pool, budget.Query{Scope: scope, Window: time.Hour})
	require.NoError(t, err)
	return usage[0].Used
}

// Fill charges scope, and returns how to give it back.
func Fill(t testing.TB, pool *pgxpool.Pool, c *metered.Client, scope string, amount int64) (release func()) {
	t.Helper()
	var seq int64
	require.NoError(t, pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error {
		receipt, err := c.Budget.Charge(t.Context(), tx, Charge(scope, amount, 0))
		seq = receipt.Entries[0].Seq
		return err
	}))
	return func() {
		require.NoError(t, pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error {
			_, err := c.Budget.Refund(t.Context(), tx, budget.Refund{Scope: scope, Seq: seq, Amount: amount})
			return err
		}))
	}
}

func Room(scope string, amount, limit int64) holds.Line {
	return holds.Line{Scope: scope, Amount: amount, Limits: []budget.Limit{budget.Lifetime(limit)}}
}

// OnWire sets up a client whose connections run through a wire, and a command.
func OnWire(t testing.TB, cfg metered.Config, change func(*pgxpool.Config)) (*pgxpool.Pool, *Wire, *metered.Client, metered.Command) {
	t.Helper()
	owner, _ := SetUp(t, metered.Config{})
	pool, w := Tap(t, owner, change)
	c := NewClient(t, pool, cfg)
	RequireUsable(t, c, "before")
	return owner, w, c, Whole(t, owner, c, "op")
}

// Counting counts the runs of the command's function.
func Counting(id string, runs *atomic.Int64) metered.Func[Uploaded] {
	return WholeFunc(id, func(step int) error {
		if step == 0 {
			runs.Add(1)
		}
		return nil
	})
}

// Retried runs fn in a transaction of its own, again after a serialization failure.
func Retried(ctx context.Context, pool *pgxpool.Pool, level pgx.TxIsoLevel, fn func(tx pgx.Tx) error) (err error) {
	for range 100 {
		err = pgx.BeginTxFunc(ctx, pool, pgx.TxOptions{IsoLevel: level}, fn)
		if metered.Code(err) == "budget_exceeded" || !metered.Retryable(err) {
			return err
		}
	}
	return err
}

// Nowhere is a pool whose every use fails the test.
func Nowhere(t testing.TB) *pgxpool.Pool {
	t.Helper()
	config, err := pgxpool.ParseConfig("postgres://nobody@127.0.0.1:1/none")
	require.NoError(t, err)
	config.ConnConfig.DialFunc = func(context.Context, string, string) (net.Conn, error) {
		t.Error("there was an attempt to connect")
		return nil, net.ErrClosed
	}
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	return pool
}

func UnknownToken(t testing.TB, c *metered.Client) string {
	t.Helper()
	secret, err := tokens.Derive(SecretKey, "x")
	require.NoError(t, err)
	token, err := c.Tokens.Token(secret)
	require.NoError(t, err)
	return token.Reveal()
}

// SlowCommits is a server of its own, with the schema, on which COMMIT waits for a
// synchronous standby that never comes, until go on is called. watch is a pool that
// only reads.
func SlowCommits(t testing.TB) (pool, watch *pgxpool.Pool, goOn func()) {
	t.Helper()
	ctx := t.Context()
	server, err := pgserver.Start(ctx, pgserver.Options{Private: true, Durable: true, Settings: map[string]string{"fsync": "off"}}) // the machine does not crash
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, server.Stop()) })
	open := func() *pgxpool.Pool {
		config, err := pgxpool.ParseConfig(server.ConnString())
		require.NoError(t, err)
		config.MaxConns = 20
		pool, err := pgxpool.NewWithConfig(ctx, config)
		require.NoError(t, err)
		t.Cleanup(pool.Close)
		return pool
	}
	pool, watch = open(), open()
	_, err = metered.Migrate(ctx, pool, metered.MigrateOptions{River: true})
	require.NoError(t, err)
	_, err = pool.Exec(ctx, `create table uploads (name text primary key)`)
	require.NoError(t, err)
	standbys := func(names string) {
		_, err := watch.Exec(context.Background(), "alter system set synchronous_standby_names = '"+names+"'")
		require.NoError(t, err)
		require.True(t, Value[bool](t, watch, "select pg_reload_conf()"))
		WaitFor(t, "the setting to be read", func() bool {
			return Value[string](t, watch, "show synchronous_standby_names") == names
		})
	}
	t.Cleanup(func() { standbys("") })
	standbys("nobody")
	return pool, watch, func() { standbys("") }
}

// RequireUsable runs a command on the pool.
func RequireUsable(t testing.TB, c *metered.Client, id string) {
	t.Helper()
	ctx, cancel := Patient(t)
	defer cancel()
	WaitFor(t, "a command to run", func() bool { // a killed connection may still be in the pool
		_, err := metered.Do[any](ctx, c, metered.Command{ID: "usable/" + id}, nil)
		return err == nil
	})
}

// Placing is a command that places one hold.
func Placing(r holds.Placement) metered.Func[string] {
	return func(ctx context.Context, tx *metered.Tx) (string, error) {
		id, err := tx.Place(ctx, r, nil)
		return id, err
	}
}

// Do runs a command that does nothing.
func Do(t testing.TB, c *metered.Client, id string) error {
	t.Helper()
	_, err := metered.Do[any](t.Context(), c, metered.Command{ID: id}, nil)
	return err
}

func RequireField(t testing.TB, err error, field, what string) {
	t.Helper()
	var argument *budget.ArgumentError
	require.ErrorAs(t, err, &argument, what)
	require.Equal(t, field, argument.Field, what)
}
