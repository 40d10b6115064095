package holds_test

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/pgtest"
)

// shown are the ids of a page.
func shown(page holds.Page) (ids []string) {
	for _, h := range page.Holds {
		ids = append(ids, h.ID)
	}
	return ids
}

// Each filter alone, and all of them together, select the right holds, newest first.
func TestList_ShowsTheHoldsThatAllItsFiltersSelect(t *testing.T) {
	t.Parallel()
	f := setUp(t, holds.Config{})
	type facts struct {
		id, tenant, holder, entity string
		scopes                     []string
		state                      holds.State
	}
	all := []facts{ // in the order in which they are placed
		{"swept", "", "ann", "", []string{"a"}, holds.Expired},
		{"due", "", "ann", "", []string{"a", "b"}, holds.Expired},
		{"captured in part", "", "ann", "order/1", []string{"b"}, holds.Expired},
		{"in its grace", "", "ben", "", []string{"a"}, holds.Held},
		{"held", "", "ann", "", []string{"b"}, holds.Held},
		{"held, in part", "", "ben", "order/2", []string{"a", "b"}, holds.Held},
		{"captured", "", "ann", "order/2", []string{"b", "c"}, holds.Captured},
		{"captured by nobody", "", "", "order/1", []string{"a"}, holds.Captured},
		{"released", "", "ben", "", []string{"c"}, holds.Released},
		{"held", "acme", "ann", "order/1", []string{"a"}, holds.Held},
	}
	place := func(h facts) {
		r := holds.Placement{Tenant: h.tenant, ID: h.id, Holder: h.holder, TTL: time.Hour}
		if h.state == holds.Expired || h.id == "in its grace" {
			r.TTL = time.Minute
		}
		if h.id == "in its grace" {
			r.Grace = time.Hour
		}
		for _, scope := range h.scopes {
			r.Lines = append(r.Lines, capacity(scope, 5, 99))
		}
		f.mustPlace(r)
		var err error
		switch {
		case h.state == holds.Released:
			_, err = f.release(h.id)
		case h.entity != "" && h.state == holds.Captured:
			_, err = f.capture(holds.Capture{IDs: []string{h.id}, All: true, Entity: h.entity})
		case h.entity != "": // all of its first scope
			_, err = f.capture(holds.Capture{Tenant: h.tenant, IDs: []string{h.id}, Entity: h.entity, Keep: true, Lines: []holds.Line{{Scope: h.scopes[0], Amount: 5}}})
		}
		require.NoError(t, err)
	}
	place(all[0])
	f.clock.Advance(time.Minute)
	_, err := f.book.Sweep(t.Context(), f.pool, holds.SweepOptions{})
	require.NoError(t, err)
	for _, h := range all[1:] {
		place(h)
	}
	f.clock.Advance(time.Minute)
	require.Equal(t, 1, queryRow[int](t, f.pool, `select version from metered.holds where id = 'due'`), "nobody has written down that it is over")

	tried, found := 0, 0
	for _, tenant := range []string{"", "acme", "none"} {
		for _, holder := range []string{"", "ann", "ben", "none"} {
			for _, entity := range []string{"", "order/1", "order/2", "none"} {
				for _, scope := range []string{"", "a", "b", "c", "none"} {
					for _, state := range []holds.State{"", holds.Held, holds.Captured, holds.Released, holds.Expired} {
						var want []string
						for _, h := range all {
							if h.tenant == tenant && (holder == "" || h.holder == holder) && (entity == "" || h.entity == entity) &&
								(scope == "" || slices.Contains(h.scopes, scope)) && (state == "" || h.state == state) {
								want = append(want, h.id)
							}
						}
						slices.Reverse(want)
						filter := holds.Filter{Tenant: tenant, Holder: holder, Entity: entity, Scope: scope, State: state}
						page, err := f.book.List(t.Context(), f.pool, filter)
						require.NoError(t, err)
						require.Equal(t, want, shown(page), "%+v", filter)
						require.Zero(t, page.Next)
						for _, h := range page.Holds {
							require.True(t, state == "" || h.State == state)
						}
						tried, found = tried+1, found+min(1, len(want))
					}
				}
			}
		}
	}
	require.Equal(t, 3*4*4*5*5, tried)
	require.Greater(t, found, 50)
}

// Holds are placed and end while somebody reads page after page: a hold that was there at the beginning is shown once,
// in order. Only with a filter by state a hold that ended before its page is left out.
func TestList_PagesStayInPlaceWhileHoldsComeAndEnd(t *testing.T) {
	t.Parallel()
	for _, state := range []holds.State{"", holds.Held} {
		for _, size := range []int{1, 3, 4} {
			f := setUp(t, holds.Config{})
			names := "abcdefghijkl"
			for i, name := range names {
				ttl := time.Hour
				if i < 2 {
					ttl = time.Minute // due when its page comes
				}
				f.mustPlace(holds.Placement{ID: string(name), TTL: ttl, Lines: []holds.Line{capacity("room", 1, 999)}})
			}
			var got []string
			next := ""
			for pages := 0; ; pages++ {
				page, err := f.book.List(t.Context(), f.pool, holds.Filter{State: state, Max: size, After: next})
				require.NoError(t, err)
				require.LessOrEqual(t, len(page.Holds), size)
				got = append(got, shown(page)...)
				if next = page.Next; next == "" {
					break
				}
				f.mustPlace(holds.Placement{TTL: time.Hour, Lines: []holds.Line{capacity("room", 1, 999)}})
				switch pages {
				case 0: // the last one shown, and one that is not yet
					last := page.Holds[len(page.Holds)-1].ID
					_, err = f.release(last, "d")
				case 1:
					_, err = f.capture(holds.Capture{IDs: []string{"c"}, All: true})
					f.clock.Advance(time.Minute)
				}
				require.NoError(t, err)
			}
			want := "lkjihgfedcba"
			if state == holds.Held {
				want = "lkjihgfe" // d, c, b and a had ended
			}
			require.Equal(t, want, strings.Join(got, ""), "pages of %d, state %q", size, state)
		}
	}
}

// spy keeps the last query for rows.
type spy struct {
	budget.Querier
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
	pgtest.InCI(t)
	pgtest.OnEachVersion(t)
	type plan struct {
		tenant   string // the many are those of "crowd"
		few      int
		analysed bool
	}
	for _, c := range pgtest.Size([]plan{{"mine", 0, false}, {"mine", 3000, true}, {"crowd", 30, true}}, []plan{
		{"mine", 0, false}, {"mine", 0, true}, {"mine", 30, false}, {"mine", 30, true}, {"mine", 3000, false}, {"mine", 3000, true},
		{"crowd", 0, true}, {"crowd", 30, true}, {"crowd", 3000, true},
	}) {
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
					f.mustPlace(holds.Placement{Tenant: c.tenant, TTL: time.Hour, Lines: []holds.Line{capacity(scope, 1, 1_000_000)}})
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
			grow(pgtest.Size(30_000, 60_000))
			after := measure()
			t.Logf("%d pages with few holds, %d with many", before, after)
			for _, n := range after {
				require.LessOrEqual(t, n, pgtest.Size(250, 400)) // all lines are 300 and more, and 600
			}
		})
	}
}

// The claims of a key one after another, with any holder and any end. Claims of other keys and tenants are not shown,
// nor a hold with an id that looks like a claim's.
func TestList_OfAClaimsKeyShowsAllThatHadIt(t *testing.T) {
	t.Parallel()
	f := setUp(t, holds.Config{})
	key := holds.Key{Type: "seat", Value: "21A"}
	claim := func(tenant, holder string, key holds.Key) string {
		h, err := f.claim(holds.Claim{Tenant: tenant, Key: key, Holder: holder})
		require.NoError(t, err)
		return h.ID
	}
	released := claim("", "ann", key)
	_, err := f.release(released)
	require.NoError(t, err)
	expired := claim("", "ben", key)
	f.clock.Advance(time.Minute)
	returned := claim("", "cid", key)
	_, err = f.capture(holds.Capture{IDs: []string{returned}, All: true})
	require.NoError(t, err)
	_, err = do(f, refund(f, returned))
	require.NoError(t, err)
	active := claim("", "ann", key)
	theirs := claim("other", "dan", key)
	claim("", "dan", holds.Key{Type: "seat", Value: "21B"})
	f.mustPlace(holds.Placement{ID: active[:39] + "forged", Lines: []holds.Line{capacity("a", 1, 1)}})

	list := func(filter holds.Filter) (ids []string) {
		for {
			page, err := f.book.List(t.Context(), f.pool, filter)
			require.NoError(t, err)
			ids = append(ids, shown(page)...)
			if filter.After = page.Next; page.Next == "" {
				return ids
			}
		}
	}
	for _, size := range []int{0, 1, 3} {
		require.Equal(t, []string{active, returned, expired, released}, list(holds.Filter{Claim: key, Max: size}))
	}
	require.Equal(t, []string{theirs}, list(holds.Filter{Tenant: "other", Claim: key}))
	require.Equal(t, []string{active, released}, list(holds.Filter{Claim: key, Holder: "ann"}))
	require.Equal(t, []string{returned}, list(holds.Filter{Claim: key, State: holds.Returned}))
	require.Empty(t, list(holds.Filter{Claim: key, State: holds.Captured}))
	require.Equal(t, []string{expired}, list(holds.Filter{Claim: key, State: holds.Expired}))
	require.Empty(t, list(holds.Filter{Claim: holds.Key{Type: "seat", Value: "never"}}))
	_, err = f.book.List(t.Context(), untouchable{}, holds.Filter{Claim: holds.Key{Type: "seat"}})
	requireArgument(t, err, "Key.Value")
	history, err := f.book.History(t.Context(), f.pool, "", returned, "")
	require.NoError(t, err)
	require.Len(t, history, 3)
}

// By the index of ids, with a plan of whenever there were few, though the tenant has many holds.
func TestList_OfAClaimsKeyReadsNoMoreTheMoreHoldsThereAre(t *testing.T) {
	t.Parallel()
	pgtest.InCI(t)
	for _, analysed := range []bool{false, true} {
		f := setUp(t, holds.Config{})
		execute(t, f.pool, `alter table metered.holds set (autovacuum_enabled = off)`)
		claim := func() {
			h, err := f.claim(holds.Claim{Tenant: "crowd", Key: seat("a"), Holder: "ann"})
			require.NoError(t, err)
			_, err = do(f, func(ctx context.Context, tx pgx.Tx) ([]holds.Hold, error) {
				return f.book.Release(ctx, tx, holds.Release{Tenant: "crowd", IDs: []string{h.ID}})
			})
			require.NoError(t, err)
		}
		claim()
		f.crowd("room", 300, time.Hour, true)
		conn, err := f.pool.Acquire(t.Context())
		require.NoError(t, err)
		defer conn.Release()
		spied := spy{Querier: conn}
		list := func(want int) {
			page, err := f.book.List(t.Context(), &spied, holds.Filter{Tenant: "crowd", Claim: seat("a"), Max: 2})
			require.NoError(t, err)
			require.Len(t, page.Holds, want)
		}
		for range 7 {
			list(1)
		}
		// It had many claims once, and since then others had theirs.
		// Its scan is counted with those of conn: another connection would report it at any time later.
		_, err = conn.Exec(t.Context(), `insert into metered.holds (placed_at, deadline, due, ceiling, ended_at, version, state, pending, tenant, id, holder, claim, fingerprint, keys)
			select placed_at, deadline, due, ceiling, ended_at, version, state, pending, tenant, left(id, 39) || to_char(g, 'fm00000'), holder, claim, fingerprint, keys
			from metered.holds, generate_series(1, 3000) g where claim is not null`)
		require.NoError(t, err)
		f.crowd("room", pgtest.Size(10_000, 30_000), 2*time.Hour, true)
		if analysed {
			execute(t, f.pool, `analyze metered.holds, metered.hold_lines`)
		}
		pgtest.FlushStatistics(t, conn)
		const scans = `select seq_scan::int from pg_stat_user_tables where schemaname = 'metered' and relname = 'holds'`
		before := queryRow[int](t, f.pool, scans)
		list(2)
		pgtest.FlushStatistics(t, conn)
		require.Equal(t, before, queryRow[int](t, f.pool, scans))
		require.Less(t, buffers(t, conn, strings.TrimSpace(spied.sql), spied.args...), 600, "all of the others' are 10,000 and more")
	}
}
