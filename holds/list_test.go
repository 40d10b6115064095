package holds_test

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/holds"
)

// shown are the ids of a page.
func shown(page holds.Listed) (ids []string) {
	for _, h := range page.Holds {
		ids = append(ids, h.ID)
	}
	return ids
}

// Each filter alone, and all of them together, select what they say, newest first.
func TestList_ShowsWhatAllItsFiltersSelect(t *testing.T) {
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

// Whatever is placed and ends while somebody reads page after page: what was there at the
// beginning is shown once, in order, and if its state is asked for, unless it ended before
// its page.
func TestList_PagesStayInPlaceWhateverHappensBetweenThem(t *testing.T) {
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
			next := int64(0)
			for pages := 0; ; pages++ {
				page, err := f.book.List(t.Context(), f.pool, holds.Filter{State: state, Max: size, Before: next})
				require.NoError(t, err)
				require.LessOrEqual(t, len(page.Holds), size)
				got = append(got, shown(page)...)
				if next = page.Next; next == 0 {
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
