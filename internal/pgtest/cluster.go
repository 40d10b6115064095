package pgtest

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgmetered/metered/internal/pgserver"
	"github.com/pgmetered/metered/internal/sqlstate"
)

// The name of a database shows its kind and its user, so that any process can tell which are left
// over:
//
//	metered_template_<schema hash>    made once per schema, in use while somebody holds the hash's lock shared
//	metered_test_<run>_<number>       one test's, in use while somebody holds the run's lock
//
// The locks are session-level advisory locks in the database of DATABASE_URL. They end with their
// process in any case. The next process that starts drops databases without a holder.
const (
	templatePrefix = "metered_template_"
	testPrefix     = "metered_test_"
	makingSuffix   = "_making"
)

// templateLock is held while a template is made and while left-over databases are dropped.
var templateLock = lockKey("pgtest/template")

// cluster is the server as the tests of this binary see it.
type cluster struct {
	server   *pgserver.Server
	admin    *pgxpool.Pool // creates and drops databases
	session  *pgx.Conn     // holds this process's locks, for as long as it lives
	run      string
	template string
	nextTest atomic.Int64
}

// shared starts the server with the first test that needs it. There is nothing to stop: see
// pgserver.
var shared = sync.OnceValues(func() (*cluster, error) {
	ctx := context.Background() // the binary's -timeout says where it hangs
	// Some tests switch locks off, and each deadlock then lasts until Postgres looks for it, by
	// default after a second. Autovacuum would go round hundreds of databases that live for
	// seconds. Compiled statements (jit) cost a tenth of the tests' time: tests of what is compiled
	// switch it on. Each backend would load PL/pgSQL for itself: 3 percent.
	opts := pgserver.Options{Settings: map[string]string{
		"deadlock_timeout": "100ms", "autovacuum": "off", "jit": "off", "max_prepared_transactions": "16",
		"shared_preload_libraries": "plpgsql",
	}}
	if os.Getenv(MutantEnv) == "" { // or each mutant would be kept
		hash, err := schemaHash()
		if err != nil {
			return nil, fmt.Errorf("rendering the schema: %w", err)
		}
		opts.Prepared, opts.Prepare = hash, makeTemplate
	}
	server, err := pgserver.Start(ctx, opts)
	if err != nil {
		return nil, err
	}
	return newCluster(ctx, server)
})

// makeTemplate makes the template that newCluster then finds on each copy of the server.
func makeTemplate(ctx context.Context, server *pgserver.Server) error {
	c, err := newCluster(ctx, server)
	if err != nil {
		return err
	}
	c.admin.Close()
	return c.session.Close(ctx)
}

func newCluster(ctx context.Context, server *pgserver.Server) (*cluster, error) {
	hash, err := schemaHash()
	if err != nil {
		return nil, fmt.Errorf("rendering the schema: %w", err)
	}
	config, err := pgxpool.ParseConfig(server.ConnString())
	if err != nil {
		return nil, err
	}
	config.MaxConns = 4
	config.ConnConfig.RuntimeParams["application_name"] = "pgtest"
	c := &cluster{server: server, run: randomHex(8), template: templatePrefix + hash}
	if c.admin, err = pgxpool.NewWithConfig(ctx, config); err != nil {
		return nil, err
	}
	if c.session, err = pgx.ConnectConfig(ctx, config.ConnConfig); err != nil {
		return nil, err
	}
	_, err = c.session.Exec(ctx, "select pg_advisory_lock($1), pg_advisory_lock_shared($2), pg_advisory_lock($3)",
		lockKey(c.run), lockKey(c.template), templateLock)
	if err != nil {
		return nil, fmt.Errorf("waiting for another process that prepares databases: %w", err)
	}
	if err := c.dropLeftOvers(ctx); err != nil {
		return nil, fmt.Errorf("dropping databases left over: %w", err)
	}
	if err := c.makeTemplate(ctx); err != nil {
		return nil, fmt.Errorf("preparing the template: %w", err)
	}
	_, err = c.session.Exec(ctx, "select pg_advisory_unlock($1)", templateLock)
	return c, err
}

// makeTemplate makes the template unless it is there. The caller holds templateLock.
func (c *cluster) makeTemplate(ctx context.Context) error {
	var exists bool
	err := c.admin.QueryRow(ctx, "select exists (select from pg_database where datname = $1)", c.template).Scan(&exists)
	if err != nil || exists {
		return err
	}
	// Under another name first: one that was given up half way must not look like a template.
	making := c.template + makingSuffix
	if err := c.dropDatabase(ctx, making); err != nil {
		return err
	}
	if err := c.exec(ctx, "create database %s template template0 encoding 'UTF8' lc_collate 'C' lc_ctype 'C'", making); err != nil {
		return err
	}
	connString := pgserver.WithDatabase(c.server.ConnString(), making)
	if err := fill(ctx, connString, prepare); err != nil {
		return err
	}
	if c.server.Owned() {
		if err := fill(ctx, connString, pack); err != nil {
			return err
		}
	}
	return c.exec(ctx, "alter database %s rename to %s", making, c.template)
}

// dropLeftOvers drops the databases of processes that have gone. The caller holds templateLock.
func (c *cluster) dropLeftOvers(ctx context.Context) error {
	rows, err := c.session.Query(ctx, "select datname::text from pg_database where datname like any ($1)",
		[]string{strings.ReplaceAll(testPrefix, "_", `\_`) + "%", strings.ReplaceAll(templatePrefix, "_", `\_`) + "%"})
	if err != nil {
		return err
	}
	names, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		return err
	}
	for _, name := range names {
		owner := strings.TrimSuffix(name, makingSuffix)
		if run, ok := strings.CutPrefix(name, testPrefix); ok {
			owner, _, _ = strings.Cut(run, "_")
		}
		if owner == c.run || owner == c.template {
			continue
		}
		var unused bool
		if err := c.session.QueryRow(ctx, "select pg_try_advisory_lock($1)", lockKey(owner)).Scan(&unused); err != nil {
			return err
		}
		if !unused {
			continue
		}
		err := c.dropDatabase(ctx, name)
		if _, unlockErr := c.session.Exec(ctx, "select pg_advisory_unlock($1)", lockKey(owner)); unlockErr != nil {
			return unlockErr
		}
		// Another role's, which this one may not touch: not our business.
		if pgErr := (*pgconn.PgError)(nil); err != nil && !(errors.As(err, &pgErr) && pgErr.Code == "42501") {
			return err
		}
	}
	return nil
}

func (c *cluster) createDatabase(ctx context.Context, empty bool) (name string, err error) {
	if !empty {
		return c.copyDatabase(ctx, c.template)
	}
	name = c.nextName()
	return name, c.exec(ctx, "create database %s template template0 encoding 'UTF8' lc_collate 'C' lc_ctype 'C'", name)
}

func (c *cluster) nextName() string {
	return fmt.Sprintf("%s%s_%d", testPrefix, c.run, c.nextTest.Add(1))
}

func (c *cluster) copyDatabase(ctx context.Context, template string) (name string, err error) {
	name = c.nextName()
	clone := "create database %s template %s"
	// On a throwaway server copying files is cheaper than logging each page of the copy, which is
	// the default and better where files are synced to disk.
	if c.server.Owned() && c.server.Version() >= 150000 {
		clone += " strategy file_copy"
	}
	return name, c.exec(ctx, clone, name, template)
}

func (c *cluster) dropDatabase(ctx context.Context, name string) error {
	return c.exec(ctx, "drop database if exists %s with (force)", name)
}

// exec runs a statement with names in it, which cannot be parameters there. To copy or drop a
// database, Postgres waits only five seconds for its other sessions to end, although it has told
// them to: on a busy machine they may need longer, so exec tries again until ctx ends.
func (c *cluster) exec(ctx context.Context, format string, names ...any) error {
	for i, name := range names {
		names[i] = pgx.Identifier{name.(string)}.Sanitize()
	}
	sql := fmt.Sprintf(format, names...)
	for {
		_, err := c.admin.Exec(ctx, sql)
		switch {
		case err == nil:
			return nil
		case sqlstate.Of(err) != sqlstate.ObjectInUse || ctx.Err() != nil:
			return fmt.Errorf("%s: %w", sql, err)
		}
	}
}

func lockKey(name string) int64 {
	sum := sha256.Sum256([]byte("pgtest " + name))
	return int64(binary.BigEndian.Uint64(sum[:]))
}

func randomHex(n int) string {
	b := make([]byte, n)
	_, _ = rand.Read(b)
	return hex.EncodeToString(b)
}
