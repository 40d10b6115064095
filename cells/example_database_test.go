package cells_test

import (
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgmetered/metered/internal/pgtest"
)

// exampleDatabase stands for your own database, pgxpool.New(ctx, os.Getenv("DATABASE_URL")).
func exampleDatabase() (pool *pgxpool.Pool, done func()) { return pgtest.Example() }
