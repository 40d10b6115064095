// Package pgtest gives each test a database of its own, as a clone of a template that holds the
// schema.
//
// The tests of a binary share a server of internal/pgserver: that of DATABASE_URL, or a throwaway
// one that ends with the binary. No TestMain is needed. Several binaries may share the server of
// DATABASE_URL, with the same schema or different ones.
package pgtest

import (
	"context"
	"os"
	"strings"
	"testing"
	"time"
	"unicode"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgmetered/metered/internal/pgserver"
	"github.com/pgmetered/metered/internal/sqlstate"
)

const (
	defaultMaxConns = 16

	// closeTimeout bounds waiting for a test's connections.
	closeTimeout = time.Minute
)

// Options describes a test's database. The zero value serves most tests.
type Options struct {
	// Empty gives a database without the schema, for tests of migrations. Defaults to false.
	Empty bool

	// Template gives a copy of that instead. Defaults to the schema and River's tables.
	Template *Template

	// MaxConns is the size of the pool. Defaults to 16.
	MaxConns int32

	// Config changes the pool's configuration before it is opened. Defaults to none.
	Config func(*pgxpool.Config)
}

// Open returns a pool on a database of t's own that holds the schema and River's tables. Its role
// is a superuser, unless DATABASE_URL names another. When the test ends the pool is closed and the
// database dropped. A connection that is not returned by then fails the test.
func Open(t testing.TB) *pgxpool.Pool {
	t.Helper()
	return OpenWith(t, Options{})
}

// OpenWith is Open with options.
func OpenWith(t testing.TB, opts Options) *pgxpool.Pool {
	t.Helper()
	skipUnmarked(t)
	ctx, cancel := Patient(t)
	defer cancel()

	connString, drop, err := database(ctx, opts)
	if err != nil {
		t.Fatalf("pgtest: %v", err)
	}
	t.Cleanup(func() {
		ctx, cancel := Patient(t)
		defer cancel()
		if err := drop(ctx); err != nil {
			t.Errorf("pgtest: %v", err)
		}
	})

	config, err := pgxpool.ParseConfig(connString)
	if err != nil {
		t.Fatalf("pgtest: %v", err)
	}
	config.MaxConns = defaultMaxConns
	if opts.MaxConns > 0 {
		config.MaxConns = opts.MaxConns
	}
	config.ConnConfig.RuntimeParams["application_name"] = applicationName(t.Name())
	if opts.Config != nil {
		opts.Config(config)
	}
	pool, err := pgxpool.NewWithConfig(ctx, config)
	if err != nil {
		t.Fatalf("pgtest: %v", err)
	}
	t.Cleanup(func() { closePool(t, pool) })
	return pool
}

func database(ctx context.Context, opts Options) (connString string, drop func(context.Context) error, err error) {
	if node := os.Getenv(CitusEnv); node != "" {
		connString, drop, err = citusDatabase(ctx, node, opts.Empty || opts.Template != nil)
		if err == nil && opts.Template != nil {
			err = fill(ctx, connString, opts.Template.Fill)
		}
		return connString, drop, err
	}
	c, err := shared()
	if err != nil {
		return "", nil, err
	}
	var name string
	if opts.Template == nil {
		name, err = c.createDatabase(ctx, opts.Empty)
	} else if name, err = opts.Template.in(ctx, c); err == nil {
		name, err = c.copyDatabase(ctx, name)
	}
	return pgserver.WithDatabase(c.server.ConnString(), name), func(ctx context.Context) error { return c.dropDatabase(ctx, name) }, err
}

// Reopen opens another pool on the database of pool, with other settings.
func Reopen(t testing.TB, pool *pgxpool.Pool, change func(*pgxpool.Config)) *pgxpool.Pool {
	t.Helper()
	config := pool.Config()
	config.MaxConns = 4
	change(config)
	other, err := pgxpool.NewWithConfig(context.Background(), config)
	if err != nil {
		t.Fatalf("pgtest: %v", err)
	}
	t.Cleanup(other.Close)
	return other
}

// ConnString returns a connection string of the pool's database, for programs that cannot use the
// pool.
func ConnString(pool *pgxpool.Pool) string { return pool.Config().ConnString() }

// closePool fails the test if connections are still out, instead of hanging as Close would. The
// database is dropped with force, which ends them.
func closePool(t testing.TB, pool *pgxpool.Pool) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		pool.Close()
	}()
	select {
	case <-done:
	case <-time.After(closeTimeout):
		t.Errorf("pgtest: %d connections were not returned to the pool: a transaction was left open",
			pool.Stat().AcquiredConns())
	}
}

// applicationName cuts a name to the length that Postgres keeps, from the left: the name of the
// subtest says more. It replaces non-ASCII characters, of which Postgres makes "?" or, since 16,
// four characters a byte.
func applicationName(test string) string {
	const maxLen = 63
	name := strings.Map(func(r rune) rune {
		if r > unicode.MaxASCII {
			return '?'
		}
		return r
	}, test)
	return name[max(0, len(name)-maxLen):]
}

// execer is a pool, a connection or a transaction.
type execer interface {
	Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error)
}

// FlushStatistics makes a connection's activity show in the pg_stat views, for itself too. A server
// before Postgres 15 cannot flush on request, so FlushStatistics waits.
func FlushStatistics(t testing.TB, db execer) {
	t.Helper()
	exec := func(sql string) error {
		_, err := db.Exec(t.Context(), sql)
		return err
	}
	err := exec("select pg_stat_force_next_flush()")
	if sqlstate.Of(err) == sqlstate.UndefinedFunction {
		// A backend waits half a second between two reports, and so does the collector.
		const interval = 600 * time.Millisecond
		time.Sleep(interval)
		err = exec("select")
		time.Sleep(interval)
	}
	if err == nil {
		err = exec("select pg_stat_clear_snapshot()")
	}
	if err != nil {
		t.Fatalf("pgtest: flush statistics: %v", err)
	}
}
