package metered_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/jobs"
	"github.com/pgmetered/metered/tokens"
)

var isolationLevels = []pgx.TxIsoLevel{pgx.ReadCommitted, pgx.RepeatableRead, pgx.Serializable}

// errOwn is an error of the command's function.
var errOwn = errors.New("the function says no")

// secretKey is any: a fixed one makes the tokens of a test the same every time.
var secretKey = []byte("mB7-wq2Zk/90sVfXr:LdN3cYp1{TgHuJ")

type uploaded struct {
	Name string `json:"name"`
}

type process struct {
	Name string `json:"name"`
}

func (process) Kind() string { return "process" }

func setUp(t *testing.T, cfg metered.Config) (*pgxpool.Pool, *metered.Client) {
	t.Helper()
	return pgtest.SetUp(t, cfg, pgtest.Options{})
}

func setUpWith(t *testing.T, cfg metered.Config, opts pgtest.Options) (*pgxpool.Pool, *metered.Client) {
	t.Helper()
	return pgtest.SetUp(t, cfg, opts)
}

func newClient(t *testing.T, pool *pgxpool.Pool, cfg metered.Config) *metered.Client {
	t.Helper()
	return pgtest.NewClient(t, pool, cfg)
}

// mint returns the text of a new token for purpose upload and subject ann.
func mint(t *testing.T, pool *pgxpool.Pool, c *metered.Client) string {
	t.Helper()
	var text string
	require.NoError(t, pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error {
		token, err := c.Tokens.Mint(t.Context(), tx, tokens.Mint{Purpose: "upload", Subject: "ann", TTL: time.Hour})
		text = token.Token.Reveal()
		return err
	}))
	return text
}

func redeem(presented string) *metered.Redeem {
	return &metered.Redeem{Purpose: "upload", Subject: "ann", Presented: presented}
}

// charge takes amount of at most limit per hour; limit 0 means none.
func charge(scope string, amount, limit int64) budget.Charge {
	c := budget.Charge{Scope: scope, Amount: amount}
	if limit > 0 {
		c.Limits = []budget.Limit{{Max: limit, Window: time.Hour}}
	}
	return c
}

// upload writes one row of the caller's.
func upload(name string) metered.Func[uploaded] {
	return func(ctx context.Context, tx *metered.Tx) (uploaded, error) {
		_, err := tx.Exec(ctx, `insert into uploads values ($1)`, name)
		return uploaded{Name: name}, err
	}
}

// mustNotRun is for commands that are answered without their function.
func mustNotRun(t *testing.T) metered.Func[uploaded] {
	return func(context.Context, *metered.Tx) (uploaded, error) {
		t.Error("the function ran")
		return uploaded{}, nil
	}
}

// whole is a command that does all that a command can do, named by its id.
func whole(t *testing.T, pool *pgxpool.Pool, c *metered.Client, id string) metered.Command {
	t.Helper()
	return metered.Command{
		ID: id, Input: 1, Token: redeem(mint(t, pool, c)),
		Charges: []budget.Charge{charge(id+"/a", 2, 100), charge(id+"/b", 3, 100)},
	}
}

// wholeFunc is the function of such a command. before is called before each of
// its steps, and once after the last.
func wholeFunc(id string, before func(step int) error) metered.Func[uploaded] {
	steps := []func(ctx context.Context, tx *metered.Tx) error{
		func(ctx context.Context, tx *metered.Tx) error {
			_, err := tx.Exec(ctx, `insert into uploads values ($1)`, id)
			return err
		},
		func(ctx context.Context, tx *metered.Tx) error {
			_, err := tx.Enqueue(ctx, process{id}, nil)
			return err
		},
		func(ctx context.Context, tx *metered.Tx) error {
			_, err := tx.Enqueue(ctx, process{id}, &jobs.Options{Key: id})
			return err
		},
		func(ctx context.Context, tx *metered.Tx) error { return tx.Charge(charge(id+"/c", 4, 100)) },
		func(ctx context.Context, tx *metered.Tx) error {
			return tx.Credit(budget.Credit{Scope: id + "/d", Amount: 5})
		},
		func(ctx context.Context, tx *metered.Tx) error {
			_, err := tx.Place(ctx, holds.Request{ID: id, Lines: []holds.Line{{Scope: id + "/e", Amount: 6}}, TTL: time.Hour}, nil)
			return err
		},
	}
	return func(ctx context.Context, tx *metered.Tx) (uploaded, error) {
		for i := range len(steps) + 1 {
			if before != nil {
				if err := before(i); err != nil {
					return uploaded{}, err
				}
			}
			if i < len(steps) {
				if err := steps[i](ctx, tx); err != nil {
					return uploaded{}, err
				}
			}
		}
		return uploaded{Name: id}, nil
	}
}

const wholeSteps = 6

// footprint counts what a whole command leaves.
type footprint struct{ Entries, Units, Holds, Tokens, Jobs, Keys, Operations, Rows int }

var (
	nothing    = footprint{}
	everything = footprint{Entries: 5, Units: 20, Holds: 1, Tokens: 1, Jobs: 2, Keys: 1, Operations: 1, Rows: 1}
)

func footprintOf(t *testing.T, pool *pgxpool.Pool, cmd metered.Command) (f footprint) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
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

// queryRow returns the one value of a query.
func queryRow[T any](t *testing.T, db interface {
	Query(context.Context, string, ...any) (pgx.Rows, error)
}, sql string, args ...any) T {
	t.Helper()
	return pgtest.Value[T](t, db, sql, args...)
}

func count(t *testing.T, pool *pgxpool.Pool, table string) int {
	t.Helper()
	return queryRow[int](t, pool, "select count(*) from "+table)
}

// waitingForLock polls until n backends of the database wait for an advisory lock.
func waitingForLock(t *testing.T, pool *pgxpool.Pool, n int) {
	t.Helper()
	require.Eventually(t, func() bool {
		return queryRow[int](t, pool, `select count(*) from pg_stat_activity
			where datname = current_database() and wait_event_type = 'Lock' and wait_event = 'advisory'`) >= n
	}, 2*time.Minute, 5*time.Millisecond)
}

// lockScope holds the lock of a scope until the returned function is called.
func lockScope(t *testing.T, pool *pgxpool.Pool, c *metered.Client, scope string) (release func()) {
	t.Helper()
	return pgtest.LockScope(t, pool, c, scope)
}

// inParallel calls f(0) to f(n-1) at once and waits for them.
func inParallel(n int, f func(i int)) {
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

// used is what counts against an hour of scope.
func used(t *testing.T, pool *pgxpool.Pool, c *metered.Client, scope string) int64 {
	t.Helper()
	usage, err := c.Budget.Usage(t.Context(), pool, budget.Query{Scope: scope, Window: time.Hour})
	require.NoError(t, err)
	return usage[0].Used
}

// fill charges scope, and returns how to give it back.
func fill(t *testing.T, pool *pgxpool.Pool, c *metered.Client, scope string, amount int64) (release func()) {
	t.Helper()
	var seq int64
	require.NoError(t, pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error {
		receipt, err := c.Budget.Charge(t.Context(), tx, charge(scope, amount, 0))
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
