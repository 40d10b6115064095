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
	"github.com/pgmetered/metered/internal/ledger"
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
		r := holds.Request{Tenant: h.tenant, ID: h.id, Holder: h.holder, TTL: time.Hour}
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
				f.mustPlace(holds.Request{ID: string(name), TTL: ttl, Lines: []holds.Line{capacity("room", 1, 999)}})
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
				f.mustPlace(holds.Request{TTL: time.Hour, Lines: []holds.Line{capacity("room", 1, 999)}})
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
	pgtest.OnEachVersion(t)
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
			many := pgtest.Size(20_000, 60_000)
			grow(many)
			after := measure()
			t.Logf("%d pages with few holds, %d with many", before, after)
			for _, n := range after {
				require.LessOrEqual(t, n, many/150) // all lines are half as many again, and more
			}
		})
	}
}

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
		f.mustPlace(holds.Request{Tenant: tenant, ID: id, TTL: ttl, Lines: []holds.Line{capacity("common", 1, 99), capacity(scope, 1, 1)}})
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
	for _, few := range []int{0, 300} {
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
				f.mustPlace(holds.Request{ID: "mine", TTL: 12 * time.Hour, Lines: []holds.Line{capacity("event/1", 1, 1)}})
				page := func(f *fixture, filter holds.DueFilter) holds.Page {
					list, err := f.book.Due(t.Context(), conn, filter)
					require.NoError(t, err)
					return list
				}
				mine := holds.DueFilter{ScopePrefix: "event/"}
				for range 7 { // until plans are made
					require.Len(t, page(f, mine).Holds, 1)
				}
				f.crowd("room", 25_000, 2*time.Hour, true)
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
				require.Equal(t, 3, pages, "10,000 at a time")
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
	f.mustPlace(holds.Request{ID: active[:39] + "forged", Lines: []holds.Line{capacity("a", 1, 1)}})

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
		f.crowd("room", 30_000, 2*time.Hour, true)
		if analysed {
			execute(t, f.pool, `analyze metered.holds, metered.hold_lines`)
		}
		pgtest.FlushStatistics(t, conn)
		const scans = `select seq_scan::int from pg_stat_user_tables where schemaname = 'metered' and relname = 'holds'`
		before := queryRow[int](t, f.pool, scans)
		list(2)
		pgtest.FlushStatistics(t, conn)
		require.Equal(t, before, queryRow[int](t, f.pool, scans))
		require.Less(t, buffers(t, conn, strings.TrimSpace(spied.sql), spied.args...), 600, "all of the others' are 30,000")
	}
}

// With Reveal, the refusal of a taken key has the same answer as Claimed, for a held claim and for a confirmed one.
// Without it, the refusal does not name the holder. Both hold for a raised error too, as in a command.
func TestTaken_NamesTheHolderWithReveal(t *testing.T) {
	t.Parallel()
	for _, iso := range isolations {
		f := setUp(t, holds.Config{})
		mine, err := f.claim(holds.Claim{Key: seat("a"), Holder: "ann", Metadata: []byte(`{"note": "\u0000"}`)})
		require.NoError(t, err)
		for _, confirmed := range []bool{false, true} {
			if confirmed {
				_, err = f.capture(holds.Capture{IDs: []string{mine.ID}, All: true})
				require.NoError(t, err)
			}
			want := f.claimed(seat("a"))
			for _, reveal := range []bool{false, true} {
				for _, raising := range []bool{false, true} {
					call, err := claimHold(f.book, holds.Claim{Key: seat("a"), Holder: "ben", TTL: time.Minute, Reveal: reveal})
					require.NoError(t, err)
					tx := begin(t, f.pool, iso)
					_, err = call.Scan(tx.QueryRow(t.Context(), call.SQL, call.Args(sending(raising))...))
					require.NoError(t, tx.Rollback(context.Background()))
					var taken *holds.TakenError
					require.ErrorAs(t, err, &taken)
					require.Equal(t, seat("a"), taken.Key)
					require.Equal(t, confirmed, taken.Confirmed)
					require.NotContains(t, err.Error(), "ann")
					if !reveal {
						require.Nil(t, taken.By)
						continue
					}
					require.Equal(t, &want, taken.By)
					require.Equal(t, []any{mine.ID, "ann", mine.Deadline}, []any{taken.By.ID, taken.By.Holder, taken.By.Deadline})
				}
			}
		}
	}
}

// A hold that was captured is given back by the verb that gives up one that is held, also both in one call, or
// neither. Its state says so, and so does its history.
func TestRelease_OfACapturedHoldReturnsIt(t *testing.T) {
	t.Parallel()
	for _, iso := range isolations {
		f := setUp(t, holds.Config{})
		release := func(r holds.Release) ([]holds.Hold, error) {
			tx := begin(t, f.pool, iso)
			hs, err := f.book.Release(t.Context(), tx, r)
			require.NoError(t, tx.Commit(context.Background()))
			return hs, err
		}
		for _, id := range []string{"h1", "h2", "h3", "gone", "over"} {
			f.mustPlace(holds.Request{ID: id, Holder: "ann", TTL: time.Hour, Lines: []holds.Line{capacity("a", 2, 10), capacity(id, 1, 1)}})
		}
		_, err := f.capture(holds.Capture{IDs: []string{"h1", "h3"}, All: true})
		require.NoError(t, err)
		_, err = f.release("gone")
		require.NoError(t, err)
		_, err = release(holds.Release{IDs: []string{"h2", "h1"}})
		require.ErrorIs(t, err, inState(holds.Captured), "unless it is asked for")
		before := f.dump()
		for _, c := range []struct {
			ids    []string
			holder string
			want   error
		}{
			{[]string{"h1", "gone"}, "", inState(holds.Released)}, {[]string{"h2", "h1", "gone"}, "ann", inState(holds.Released)},
			{[]string{"h1"}, "ben", holds.ErrUnknown}, {[]string{"h1", "none"}, "", holds.ErrUnknown},
		} {
			_, err = release(holds.Release{IDs: c.ids, Holder: c.holder, Captured: true})
			require.ErrorIs(t, err, c.want, "%v", c.ids)
		}
		require.Equal(t, before, f.dump())

		note := budget.Note{Actor: holds.User("ann"), Reason: "changed_plans"}
		hs, err := release(holds.Release{IDs: []string{"h2", "h1"}, Holder: "ann", Captured: true, Note: note})
		require.NoError(t, err)
		for i, want := range []holds.State{holds.Released, holds.Returned} {
			require.Equal(t, []any{want, note.Reason}, []any{hs[i].State, hs[i].Reason})
			require.Equal(t, hs[i], f.get(hs[i].ID))
		}
		require.Equal(t, int64(1), hs[1].Lines[1].Refunded)
		used, held := f.usage("a")
		require.Equal(t, []int64{2, 2}, []int64{used, held}, "h3, over")
		history, err := f.book.History(t.Context(), f.pool, "", "h1", "")
		require.NoError(t, err)
		require.Equal(t, []any{holds.EventReturned, note}, []any{history[2].Kind, history[2].Note})

		_, err = release(holds.Release{IDs: []string{"h3", "h1"}, Captured: true})
		var state *holds.StateError
		require.ErrorAs(t, err, &state)
		require.ErrorIs(t, err, inState(holds.Returned))
		require.Equal(t, []any{"h1", holds.Returned}, []any{state.ID, state.State})
		f.clock.Advance(time.Hour)
		_, err = release(holds.Release{IDs: []string{"h3", "over"}, Captured: true})
		require.ErrorIs(t, err, inState(holds.Expired))
		f.purgeOf("a")
		_, err = release(holds.Release{IDs: []string{"h3"}, Captured: true})
		require.ErrorIs(t, err, holds.ErrNotReturnable)
		f.verify()
	}
}

// Captures and such releases of one hold race: each happens at most once, and the units spent in the end agree with the
// last state.
func TestRelease_AndCaptureAtOnceAreInOneOrder(t *testing.T) {
	t.Parallel()
	for _, iso := range isolations {
		t.Run(string(iso), func(t *testing.T) {
			t.Parallel()
			f := setUp(t, holds.Config{})
			var ids []string
			for i := range 20 {
				ids = append(ids, fmt.Sprint("h", i))
				f.mustPlace(holds.Request{ID: ids[i], TTL: time.Hour, Lines: []holds.Line{capacity("a", 1, 100)}})
			}
			var going []<-chan error
			for _, id := range ids {
				for range 2 {
					going = append(going, pgtest.Going(func() error {
						return retried(t, f, iso, func(tx pgx.Tx) error {
							_, err := f.book.Release(t.Context(), tx, holds.Release{IDs: []string{id}, Captured: true})
							return err
						})
					}), pgtest.Going(func() error {
						return retried(t, f, iso, func(tx pgx.Tx) error {
							_, err := f.book.Capture(t.Context(), tx, holds.Capture{IDs: []string{id}, All: true})
							return err
						})
					}))
				}
			}
			for _, done := range going {
				if err := <-done; err != nil {
					require.ErrorIs(t, err, holds.ErrState)
				}
			}
			for _, id := range ids {
				history, err := f.book.History(t.Context(), f.pool, "", id, "")
				require.NoError(t, err)
				kinds := []holds.EventKind{}
				for _, e := range history {
					kinds = append(kinds, e.Kind)
				}
				require.True(t, slices.Equal(kinds, []holds.EventKind{holds.EventPlaced, holds.EventReleased}) ||
					slices.Equal(kinds, []holds.EventKind{holds.EventPlaced, holds.EventCaptured, holds.EventReturned}), "%v", kinds)
			}
			used, held := f.usage("a")
			require.Equal(t, []int64{0, 0}, []int64{used, held})
			f.verify()
		})
	}
}

// retried runs fn in transactions of a level until it is not in the way of others.
func retried(t *testing.T, f *fixture, iso pgx.TxIsoLevel, fn func(tx pgx.Tx) error) error {
	for {
		err := pgx.BeginTxFunc(t.Context(), f.pool, pgx.TxOptions{IsoLevel: iso}, fn)
		if c := code(err); c != "40001" && c != "40P01" {
			return err
		}
	}
}

func sending(raising bool) ledger.Sending { return ledger.Sending{WaitMS: 5000, Raising: raising} }
