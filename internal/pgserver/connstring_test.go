package pgserver

import (
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
)

func TestWithDatabase(t *testing.T) {
	t.Parallel()
	for _, connString := range []string{
		"postgres://u:p%40ss@localhost:5433/other?sslmode=disable",
		"postgresql://u:p%40ss@localhost:5433/?dbname=other&sslmode=disable",
		"postgres://u:p%40ss@localhost:5433?sslmode=disable",
		"host=localhost port=5433 user=u password='p@ss' dbname=other sslmode=disable",
		"host=localhost port=5433 user=u password=p@ss sslmode=disable",
		"postgres://u:p%40ss@/x?host=localhost&port=5433&sslmode=disable",
	} {
		config, err := pgx.ParseConfig(WithDatabase(connString, "mine"))
		require.NoError(t, err, connString)
		require.Equal(t, "mine", config.Database, connString)
		require.Equal(t, "localhost", config.Host, connString)
		require.EqualValues(t, 5433, config.Port, connString)
		require.Equal(t, "u", config.User, connString)
		require.Equal(t, "p@ss", config.Password, connString)
	}
}
