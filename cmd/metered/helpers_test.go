package main

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"net/url"
	"os"
	"strings"
	"sync"
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

// line is a command line that runs in process, on a test's database.
type line struct {
	t         testing.TB
	url       string
	in        string
	ctx       context.Context
	configure func(*pgxpool.Config)
	until     func(out string) bool // interrupts it once this is true of its output
	silent    bool                  // nobody answers its questions
	errs      *lockedBuffer         // its standard error
}

// cli is the command line on a pool's database, as the role that the pool acts as.
func cli(t testing.TB, pool *pgxpool.Pool) *line {
	u, err := url.Parse(pgtest.ConnString(pool))
	require.NoError(t, err)
	if role := pool.Config().ConnConfig.RuntimeParams["role"]; role != "" {
		q := u.Query()
		q.Set("role", role)
		u.RawQuery = q.Encode()
	}
	return &line{t: t, url: u.String(), ctx: t.Context()}
}

// result is the result of a command line.
type result struct {
	t        testing.TB
	code     int
	out, err string
}

// run runs a command line. A word with a space in it is given as it is.
func (l *line) run(args ...string) result {
	l.t.Helper()
	out := lockedBuffer{wrote: make(chan struct{}, 1)}
	in, errs := io.Reader(strings.NewReader(l.in)), l.errs
	if errs == nil {
		errs = new(lockedBuffer)
	}
	if l.silent {
		r, w := io.Pipe()
		defer w.Close()
		in = r
	}
	a := &app{streams: streams{in, &out, errs}, configure: l.configure}
	if l.url != "" {
		args = append(args, "--database-url", l.url)
	}
	ctx, interrupt := context.WithCancel(l.ctx)
	defer interrupt()
	if l.until != nil {
		go func() {
			defer interrupt() // also if until has failed the test
			for !l.until(out.String()) {
				select {
				case <-ctx.Done():
					return
				case <-out.wrote:
				}
			}
		}()
	}
	code := runApp(ctx, a, args)
	return result{l.t, code, out.String(), errs.String()}
}

// ok runs a command line that must succeed, and returns its output.
func (l *line) ok(args ...string) string {
	l.t.Helper()
	return l.exits(exitDone, args...).out
}

// exits runs a command line that must exit so.
func (l *line) exits(code int, args ...string) result {
	l.t.Helper()
	r := l.run(args...)
	require.Equal(l.t, code, r.code, "metered %s\n%s%s", strings.Join(args, " "), r.out, r.err)
	return r
}

// object is the JSON object that a command line prints.
func (l *line) object(args ...string) map[string]any {
	l.t.Helper()
	all := l.objects(args...)
	require.Len(l.t, all, 1)
	return all[0]
}

// objects are those that a command line prints, one a line.
func (l *line) objects(args ...string) []map[string]any {
	l.t.Helper()
	return l.exits(exitDone, append(args, "--json")...).objects()
}

func (r result) objects() (all []map[string]any) {
	r.t.Helper()
	for text := range strings.Lines(r.out) {
		var o map[string]any
		require.NoError(r.t, json.Unmarshal([]byte(text), &o), text)
		all = append(all, o)
	}
	return all
}

// values are the values of a name in objects.
func values(all []map[string]any, name string) (vs []any) {
	for _, o := range all {
		vs = append(vs, o[name])
	}
	return vs
}

// lockedBuffer is a buffer that one goroutine writes and another reads, which wrote wakes.
type lockedBuffer struct {
	mu    sync.Mutex
	b     bytes.Buffer
	wrote chan struct{}
}

func (b *lockedBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	select {
	case b.wrote <- struct{}{}:
	default: // it is still to wake
	}
	return b.b.Write(p)
}

func (b *lockedBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.String()
}

type shipArgs struct {
	Order string `json:"order"`
}

func (shipArgs) Kind() string { return "ship" }

var hourly = budget.PerWindow(100, time.Hour).Named("hourly")

// shop opens a database with something of everything: charges, a refund, credit, holds in each state, an operation
// with a job, a refused one, and a token. It is filled once, and each test gets a copy.
func shop(t testing.TB) (*pgxpool.Pool, *metered.Client) {
	t.Helper()
	fills := func(_ context.Context, pool *pgxpool.Pool) error {
		fill(t, pool)
		return nil
	}
	filling.Do(func() { filled.Fill = fills })
	template := &filled
	if os.Getenv(pgtest.CitusEnv) != "" { // there is no copy of a database: each test fills its own
		template = &pgtest.Template{Fill: fills}
	}
	return pgtest.SetUp(t, metered.Config{}, pgtest.Options{Template: template})
}

var (
	filling sync.Once
	filled  pgtest.Template
)

func fill(t testing.TB, pool *pgxpool.Pool) {
	t.Helper()
	ctx := t.Context()
	pgtest.Migrate(t, pool, metered.MigrateOptions{River: true})
	c := pgtest.NewClient(t, pool, metered.Config{})
	inTx := func(f func(tx pgx.Tx) error) {
		t.Helper()
		require.NoError(t, pgx.BeginFunc(ctx, pool, f))
	}
	order := metered.Command{ID: "order-42", Tenant: "shop", Name: "order", Input: 42,
		Charges: []budget.Charge{{Scope: "org/acme", Amount: 5, Limits: []budget.Limit{hourly}, Note: budget.Note{Actor: "ann", Reason: "first"}}}}
	_, err := metered.Do(ctx, c, order, func(ctx context.Context, tx *metered.Tx) (string, error) {
		_, err := tx.Enqueue(ctx, shipArgs{"42"}, &jobs.Options{Key: "ship-42"})
		return "done", err
	})
	require.NoError(t, err)
	order.ID, order.RecordRefusal = "order-43", true
	order.Charges[0].Amount = 500
	_, err = metered.Do[string](ctx, c, order, nil)
	require.ErrorIs(t, err, budget.ErrExceeded)
	inTx(func(tx pgx.Tx) error {
		_, err := c.Budget.Charge(ctx, tx, budget.Charge{Scope: "org/globex", Amount: 3})
		return err
	})
	inTx(func(tx pgx.Tx) error {
		_, err := c.Budget.Charge(ctx, tx, budget.Charge{Scope: "org/acme", Amount: 7, Note: budget.Note{Actor: "bob, \"the builder\""}})
		return err
	})
	inTx(func(tx pgx.Tx) error {
		_, err := c.Budget.Refund(ctx, tx, budget.Refund{Scope: "org/acme", Seq: 1, Amount: 2})
		return err
	})
	inTx(func(tx pgx.Tx) error {
		_, err := c.Budget.Credit(ctx, tx, budget.Credit{Scope: "org/acme", Amount: 50})
		return err
	})
	place := func(tenant, id, holder string, ttl time.Duration) {
		inTx(func(tx pgx.Tx) error {
			_, err := c.Holds.Place(ctx, tx, holds.Placement{ID: id, Tenant: tenant, Holder: holder, TTL: ttl,
				Lines: []holds.Line{{Scope: "org/acme", Amount: 4, Limits: []budget.Limit{budget.Lifetime(1000)}}}})
			return err
		})
	}
	place("hall", "seat-21A", "ann", time.Hour)
	place("hall", "seat-21B", "ann", time.Hour)
	place("", "seat-1", "bob", 30*time.Minute)
	inTx(func(tx pgx.Tx) error {
		_, err := c.Holds.Capture(ctx, tx, holds.Capture{Tenant: "hall", IDs: []string{"seat-21B"}, All: true, Entity: "order-7"})
		return err
	})
	inTx(func(tx pgx.Tx) error {
		_, err := c.Tokens.Mint(ctx, tx, tokens.Mint{Purpose: "upload", Subject: "ann", TTL: time.Minute})
		return err
	})
}

// as is the command line of a new role with grants.
func as(t testing.TB, pool *pgxpool.Pool, render func(schema, role string) (string, error)) *line {
	t.Helper()
	return cli(t, pgtest.AsRole(t, pool, render, ""))
}

func execute(t testing.TB, pool *pgxpool.Pool, sql string, args ...any) {
	t.Helper()
	_, err := pool.Exec(t.Context(), sql, args...)
	require.NoError(t, err)
}
