package maintain_test

import (
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgmetered/metered/internal/pgtest"
)

// exampleDatabaseAt is a database with a clock that is set, where your own goes by itself: pgxpool.New(ctx,
// os.Getenv("DATABASE_URL")), on which metered.Migrate was called once.
func exampleDatabaseAt(at time.Time) (pool *pgxpool.Pool, set func(time.Time), done func()) {
	pool, clock, done := pgtest.ExampleAt(at)
	return pool, clock.Set, done
}
