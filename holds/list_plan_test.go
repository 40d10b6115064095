package holds_test

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/holds"
)

// spy keeps the last query for rows.
type spy struct {
	holds.Querier
	sql  string
	args []any
}

func (s *spy) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	s.sql, s.args = sql, args
	return s.Querier.Query(ctx, sql, args...)
}

// A page of the holds of a scope is read from the newest on, with one look at a line for
// each hold of the tenant on the way, however many other lines, holds and entries there
// are: with a plan that is kept, a new one, and one for the values. That a tenant with many
// holds is read in their order, and not sorted, needs statistics.
func TestPlans_AListOfAScopeReadsNoMoreTheMoreHoldsThereAre(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		tenant   string // the many are those of "crowd"
		few      int
		analysed bool
	}{
		{"mine", 0, false}, {"mine", 0, true}, {"mine", 30, false}, {"mine", 30, true}, {"mine", 3000, false}, {"mine", 3000, true},
		{"crowd", 0, true}, {"crowd", 30, true}, {"crowd", 3000, true},
	} {
		t.Run(fmt.Sprintf("%+v", c), func(t *testing.T) {
			t.Parallel()
			f := setUp(t, holds.Config{})
			for _, table := range []string{"ledger", "holds", "hold_lines", "hold_events"} {
				execute(t, f.pool, `alter table metered.`+table+` set (autovacuum_enabled = off)`)
			}
			conn, err := f.pool.Acquire(t.Context())
			require.NoError(t, err)
			defer conn.Release()
			run := func(sql string) {
				_, err := conn.Exec(t.Context(), sql)
				require.NoError(t, err)
			}
			list := spy{Querier: conn}
			grow := func(n int) {
				f.clock.Advance(time.Second)
				if n > 0 {
					f.crowd("room", n, time.Hour, true)
				}
				for i := range 20 { // every fourth is of the scope
					scope := []string{"shown", "room", "room", "room"}[i%4]
					f.mustPlace(holds.Request{Tenant: c.tenant, TTL: time.Hour, Lines: []holds.Line{capacity(scope, 1, 1_000_000)}})
				}
				if c.analysed {
					execute(t, f.pool, `analyze metered.holds, metered.hold_lines, metered.ledger, metered.hold_events`)
				}
				page, err := f.book.List(t.Context(), &list, holds.Filter{Tenant: c.tenant, Scope: "shown", Max: 5})
				require.NoError(t, err)
				require.Len(t, page.Holds, 5)
			}
			prepare := func(name string) {
				run(`set plan_cache_mode = force_generic_plan; prepare ` + name + ` (text, text, text, text, text, bigint, int, timestamptz) as ` + list.sql)
			}
			measure := func() (pages [3]int) {
				args := `('` + c.tenant + `', '', '', '', 'shown', 9223372036854775807, 5, '2026-11-21 12:00 Z')`
				for range 2 { // the first one fills caches
					pages[0] = buffers(t, conn, `execute kept`+args)
					prepare("anew")
					pages[1] = buffers(t, conn, `execute anew`+args)
					run(`deallocate anew; reset plan_cache_mode`)
					pages[2] = buffers(t, conn, strings.TrimSpace(list.sql), list.args...)
				}
				return pages
			}
			grow(c.few)
			prepare("kept")
			before := measure()
			grow(60_000)
			after := measure()
			t.Logf("%d pages with few holds, %d with many", before, after)
			for _, n := range after {
				require.LessOrEqual(t, n, 400) // all lines are 600 and more
			}
		})
	}
}
