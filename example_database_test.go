package metered_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgconn/ctxwatch"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/internal/pgtest"
)

// exampleDatabase stands for your own database, pgxpool.New(ctx, os.Getenv("DATABASE_URL")),
// on which metered.Migrate was called once.
func exampleDatabase() (pool *pgxpool.Pool, done func()) { return pgtest.Example() }

// exampleDatabaseAt is one with a clock that is set, where your own goes by itself.
func exampleDatabaseAt(at time.Time) (pool *pgxpool.Pool, set func(time.Time), done func()) {
	pool, clock, done := pgtest.ExampleAt(at)
	return pool, clock.Set, done
}

// A deployment looks at the schema before a new build may serve. Here somebody has run `grant execute on all
// functions` on it. Migrate takes that back, for functions alone: it leaves differences of tables and indexes to you.
func ExampleValidate() {
	ctx := context.Background()
	pool, done := exampleDatabase()
	defer done()
	_, err := pool.Exec(ctx, `grant execute on function metered.clock() to public`)
	check(err)

	report, err := metered.Validate(ctx, pool, "")
	check(err)
	switch err := report.Err(); {
	case errors.Is(err, metered.ErrSchemaDiffers):
		for _, d := range report.Differences {
			fmt.Println(d)
		}
	default: // ErrNotMigrated: migrate first; ErrSchemaVersion: this build is too old
		check(err)
	}
	repaired, err := metered.Migrate(ctx, pool, metered.MigrateOptions{})
	check(err)
	fmt.Println("repaired:", repaired.Repaired[0].Object)
	report, err = metered.Validate(ctx, pool, "")
	check(err)
	fmt.Println("fit to serve:", report.OK())
	// Output:
	// function clock() can be executed by everybody
	// repaired: function clock()
	// fit to serve: true
}

// A pool for calls with short deadlines: its connections are warm before they are used, two are made before anybody asks, and a
// call that is cancelled keeps its connection.
func ExampleWarm() {
	ctx := context.Background()
	database, done := exampleDatabase()
	defer done()
	config, err := pgxpool.ParseConfig(database.Config().ConnString())
	if err != nil {
		log.Fatal(err)
	}
	config.MinIdleConns = 2
	config.AfterConnect = func(ctx context.Context, conn *pgx.Conn) error { return metered.Warm(ctx, conn, "") }
	config.ConnConfig.BuildContextWatcherHandler = func(conn *pgconn.PgConn) ctxwatch.Handler {
		return &pgconn.CancelRequestContextWatcherHandler{Conn: conn, DeadlineDelay: 5 * time.Second}
	}
	pool, err := pgxpool.NewWithConfig(ctx, config)
	if err != nil {
		log.Fatal(err)
	}
	defer pool.Close()
	client, err := metered.New(pool, metered.Config{})
	if err != nil {
		log.Fatal(err)
	}
	out, err := metered.Do(ctx, client, metered.Command{ID: "warm"}, func(context.Context, *metered.Tx) (string, error) { return "done", nil })
	fmt.Println(out.Result, err)
	// Output: done <nil>
}
