package feedjobs_test

import (
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgmetered/metered/internal/pgtest"
)

// exampleDatabase stands for your own database, pgxpool.New(ctx, os.Getenv("DATABASE_URL")),
// on which metered.Migrate was called once.
func exampleDatabase() (pool *pgxpool.Pool, done func()) { return pgtest.Example() }

func check(err error) {
	if err != nil {
		panic(err)
	}
}
