package leases_test

import (
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgmetered/metered/internal/pgtest"
)

// exampleDatabase stands for your own database, on which metered.Migrate was called once.
func exampleDatabase() (pool *pgxpool.Pool, done func()) { return pgtest.Example() }
