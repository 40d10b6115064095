package jobs_test

import (
	"errors"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/pgtest"
)

// errOwn is an error of the work, or of a subscriber.
var errOwn = errors.New("the work says no")

func setUp(t *testing.T, cfg metered.Config) (*pgxpool.Pool, *metered.Client) {
	t.Helper()
	return pgtest.SetUp(t, cfg, pgtest.Options{})
}

// room is a line of scope under a limit for the lifetime.
func room(scope string, amount, limit int64) holds.Line {
	return holds.Line{Scope: scope, Amount: amount, Limits: []budget.Limit{budget.Lifetime(limit)}}
}
