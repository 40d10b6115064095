package holds_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/pgtest"
)

// due are the ids of all pages of so many holds.
func (f *fixture) due(filter holds.DueFilter, size int) (ids []string) {
	f.Helper()
	filter.Max = size
	for {
		page, err := f.book.Due(f.Context(), f.pool, filter)
		require.NoError(f, err)
		for _, h := range page.Holds {
			ids = append(ids, h.ID)
		}
		if filter.After = page.Next; page.Next == "" {
			return ids
		}
	}
}

// Holds of three events and two tenants, of which one fell due and was swept, one was ended by a placement
// that needed its room, and others ended otherwise.
func TestDue_ShowsTheEarliestFirstByTenantScopeTimeAndWhetherItIsOver(t *testing.T) {
	t.Parallel()
	f := setUp(t, holds.Config{MaxTTL: 24 * time.Hour})
	place := func(tenant, id, scope string, ttl time.Duration) {
		f.mustPlace(holds.Placement{Tenant: tenant, ID: id, TTL: ttl, Lines: []holds.Line{capacity("common", 1, 99), capacity(scope, 1, 1)}})
	}
	place("", "swept", "event/1/a", time.Minute)
	f.clock.Advance(time.Minute)
	_, err := f.book.Sweep(t.Context(), f.pool, holds.SweepOptions{})
	require.NoError(t, err)
	place("", "over", "event/1/c", 2*time.Minute)
	place("", "displaced", "event/1/b", time.Minute)
	place("other", "theirs", "event/1/d", 3*time.Minute)
	place("", "last", "event/1/e", 12*time.Hour)
	place("", "next", "event/2/a", 10*time.Minute)
	place("", "same time", "event/1/f", 10*time.Minute)
	place("", "released", "event/1/g", time.Minute)
	place("", "captured", "event/1/h", time.Minute)
	_, err = f.release("released")
	require.NoError(t, err)
	_, err = f.capture(holds.Capture{IDs: []string{"captured"}, All: true})
	require.NoError(t, err)
	f.clock.Advance(time.Minute)
	place("", "displaces", "event/1/b", 11*time.Minute)
	f.clock.Advance(2 * time.Minute)
	require.Equal(t, holds.Expired, f.get("displaced").State)

	now := f.clock.Now()
	for _, c := range []struct {
		filter holds.DueFilter
		want   []string
	}{
		{holds.DueFilter{}, []string{"displaced", "over", "next", "same time", "displaces", "last"}},
		{holds.DueFilter{AllTenants: true}, []string{"displaced", "over", "theirs", "next", "same time", "displaces", "last"}},
		{holds.DueFilter{Tenant: "other"}, []string{"theirs"}},
		{holds.DueFilter{Tenant: "none"}, nil},
		{holds.DueFilter{State: holds.Expired}, []string{"displaced", "over"}},
		{holds.DueFilter{State: holds.Expired, AllTenants: true}, []string{"displaced", "over", "theirs"}},
		{holds.DueFilter{State: holds.Held}, []string{"next", "same time", "displaces", "last"}},
		{holds.DueFilter{State: holds.Held, ScopePrefix: "event/1/"}, []string{"same time", "displaces", "last"}},
		{holds.DueFilter{ScopePrefix: "event/2/"}, []string{"next"}},
		{holds.DueFilter{ScopePrefix: "event/1/f"}, []string{"same time"}},
		{holds.DueFilter{ScopePrefix: "event/%/"}, nil},
		{holds.DueFilter{Before: now}, []string{"displaced", "over"}},
		{holds.DueFilter{Before: now, AllTenants: true}, []string{"displaced", "over"}}, // theirs is due now
		{holds.DueFilter{Before: now.Add(time.Hour), State: holds.Held}, []string{"next", "same time", "displaces"}},
		{holds.DueFilter{Before: now.Add(-time.Hour)}, nil},
	} {
		for _, size := range []int{0, 1, 2, 3} {
			require.Equal(t, c.want, f.due(c.filter, size), "%+v", c.filter)
		}
	}

	// A sweep leaves holds that are not due.
	_, err = f.book.Sweep(t.Context(), f.pool, holds.SweepOptions{})
	require.NoError(t, err)
	require.Empty(t, f.due(holds.DueFilter{State: holds.Expired, AllTenants: true}, 0))
	require.Len(t, f.due(holds.DueFilter{AllTenants: true}, 0), 4)
	for after, field := range map[string]string{"1": "DueFilter.After", "1.2.3": "DueFilter.After", "x": "DueFilter.After", " 1.2": "DueFilter.After"} {
		_, err = f.book.Due(t.Context(), untouchable{}, holds.DueFilter{After: after})
		requireArgument(t, err, field)
	}
	_, err = f.book.Due(t.Context(), untouchable{}, holds.DueFilter{State: holds.Captured})
	requireArgument(t, err, "DueFilter.State")
}

// A page of a tenant with few holds among many is bounded, by a plan of whenever there were few, and no table
// is scanned. All pages together show each hold.
func TestDue_APageReadsNoMoreTheMoreHoldsThereAre(t *testing.T) {
	t.Parallel()
	for _, few := range pgtest.Size([]int{300}, []int{0, 300}) {
		for _, analysed := range []bool{false, true} {
			t.Run(fmt.Sprintf("%d holds, analysed %v", few, analysed), func(t *testing.T) {
				t.Parallel()
				f := setUp(t, holds.Config{MaxTTL: 24 * time.Hour})
				for _, table := range []string{"holds", "hold_lines"} {
					execute(t, f.pool, `alter table metered.`+table+` set (autovacuum_enabled = off)`)
				}
				if few > 0 {
					f.crowd("room", few, time.Hour, true)
				}
				if analysed {
					execute(t, f.pool, `analyze metered.holds, metered.hold_lines`)
				}
				conn, err := f.pool.Acquire(t.Context())
				require.NoError(t, err)
				defer conn.Release()
				f.mustPlace(holds.Placement{ID: "mine", TTL: 12 * time.Hour, Lines: []holds.Line{capacity("event/1", 1, 1)}})
				page := func(f *fixture, filter holds.DueFilter) holds.Page {
					list, err := f.book.Due(t.Context(), conn, filter)
					require.NoError(t, err)
					return list
				}
				mine := holds.DueFilter{ScopePrefix: "event/"}
				for range 7 { // until plans are made
					require.Len(t, page(f, mine).Holds, 1)
				}
				f.crowd("room", pgtest.Size(10_000, 25_000), 2*time.Hour, true)
				scans := func() int {
					pgtest.FlushStatistics(t, conn)
					return queryRow[int](t, f.pool, `select sum(seq_scan)::int from pg_stat_user_tables
						where schemaname = 'metered' and relname in ('holds', 'hold_lines')`)
				}
				before := scans()
				pages := 0
				var got []string
				for {
					list := page(f, mine)
					for _, h := range list.Holds {
						got = append(got, h.ID)
					}
					pages++
					if mine.After = list.Next; list.Next == "" {
						break
					}
				}
				require.Equal(t, []string{"mine"}, got)
				require.Equal(t, pgtest.Size(2, 3), pages, "10,000 at a time")
				first := page(f, holds.DueFilter{AllTenants: true, Max: 10})
				require.Len(t, first.Holds, 10)
				require.Equal(t, before, scans())
				n := buffers(t, conn, `select * from metered.due_holds(null, '', '-infinity', 0, 'infinity', metered.clock(), 10)`)
				require.Less(t, n, 150, "pages of ten of many")
				deep := buffers(t, conn, `select * from metered.due_holds('', '', '-infinity', 0, 'infinity', metered.clock(), 10)`)
				require.Less(t, deep, 12_000, "pages of 10,000 that are others'")
			})
		}
	}
}
