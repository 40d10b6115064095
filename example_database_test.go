package metered_test

import (
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

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
