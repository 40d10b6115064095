package httpmetered_test

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgmetered/metered/internal/pgtest"
)

// exampleDatabase stands for your own database, pgxpool.New(ctx, os.Getenv("DATABASE_URL")),
// on which metered.Migrate was called once, and which has a table of yours.
func exampleDatabase() (pool *pgxpool.Pool, done func()) {
	pool, done = pgtest.Example()
	if _, err := pool.Exec(context.Background(), `create table orders (id bigint generated always as identity, item text)`); err != nil {
		panic(err)
	}
	return pool, done
}

// exampleDatabaseAt is one with a clock that stands still, where your own goes by itself.
func exampleDatabaseAt(at time.Time) (pool *pgxpool.Pool, done func()) {
	pool, _, done = pgtest.ExampleAt(at)
	return pool, done
}
