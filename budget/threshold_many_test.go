package budget_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/internal/bounds"
	"github.com/pgmetered/metered/internal/pgtest"
)

// As many thresholds as one call can carry are crossed at once, and each is reported once, in a time that grows with their number
// and not with its square: 16 times as many took 213 times as long where each was added to a JSON value, and take 15 times as long.
func TestThreshold_ManyCrossingsOfACallTakeTimeByTheirNumber(t *testing.T) {
	t.Parallel()
	heard := map[string]bool{}
	pool, l, _ := openReporting(t, budget.Config{OnThreshold: func(_ context.Context, _ pgx.Tx, c budget.Crossing) error {
		name := c.Scope + " " + c.Limit.Name + " " + c.Threshold.Name
		require.False(t, heard[name], name)
		heard[name] = true
		return nil
	}})
	var levels []budget.Threshold
	for i := range bounds.MaxThresholds {
		levels = append(levels, budget.Threshold{Name: fmt.Sprint("level ", i), Used: int64(i + 1)})
	}
	cross := func(of string, scopes int) time.Duration {
		var charges []budget.Charge
		for s := range scopes {
			c := budget.Charge{Scope: fmt.Sprint(of, s), Amount: 100}
			for i := range 16 {
				c.Limits = append(c.Limits, budget.Lifetime(1000).Named(fmt.Sprint("limit ", i)).WithThresholds(levels...))
			}
			charges = append(charges, c)
		}
		clear(heard)
		began := time.Now()
		require.NoError(t, pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error {
			_, err := l.Charge(t.Context(), tx, charges...)
			return err
		}))
		took := time.Since(began)
		require.Len(t, heard, scopes*16*bounds.MaxThresholds)
		return took
	}
	few, many := time.Duration(0), time.Hour
	for round := range pgtest.Size(1, 2) {
		few = max(few, cross(fmt.Sprint("few ", round, " "), 4))
		many = min(many, cross(fmt.Sprint("many ", round, " "), 32))
	}
	t.Log(few, many)
	if pgtest.Long { // only there are times compared
		require.Less(t, many, 32*few)
	}
}
