package inspect

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"time"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/internal/bounds"
)

// Room is a limit of a scope, and how much of it is used.
type Room struct {
	Scope string `json:"scope"`
	ExplainedLimit
	Credited int64 `json:"credited,omitempty"` // of a limit on prepaid credit
}

// Of is the number of units in all.
func (r Room) Of() int64 { return r.Limit.Max + r.Credited }

// Gone is the number of units that were used of these.
func (r Room) Gone() int64 { return r.Used + r.Credited }

// Counts is the number of units that are used, held or leased.
func (r Room) Counts() int64 { return r.Gone() + r.Held + r.Leased }

// Share is the part of the whole that counts, 1 where nothing is left.
func (r Room) Share() float64 { return float64(r.Counts()) / max(1, float64(r.Of())) }

// Low is the count from which on the room gets scarce.
func (r Room) Low() float64 { return float64(r.Of()) * 0.75 }

// High is the count from which on the room nearly ends.
func (r Room) High() float64 { return float64(r.Of()) * 0.95 }

// NearlyOut reports whether less than a quarter is left. Where the usage is not known, it is false.
func (r Room) NearlyOut() bool { return !r.Purged && float64(r.Counts()) >= r.Low() }

// Fullest orders rooms by their shares, the largest first. Limits for a lifetime come last: that
// stock is sold, or a seat taken, is ordinary.
func Fullest(a, b Room) int {
	last := func(r Room) int {
		if r.Limit.Lifetime {
			return 1
		}
		return 0
	}
	return cmp.Or(last(a)-last(b), cmp.Compare(b.Share(), a.Share()), cmp.Compare(a.Scope, b.Scope))
}

// Rest is the number of units that are left: of credit without overdraft, those that can be drawn,
// less than 0 where it is overdrawn.
func (r Room) Rest() int64 { return r.Of() - r.Counts() }

// Least orders rooms by their rests, the fewest first.
func Least(a, b Room) int {
	return cmp.Or(cmp.Compare(a.Rest(), b.Rest()), cmp.Compare(a.Scope, b.Scope))
}

// Rooms returns the usage of each limit of the scopes, up to 16 of each.
func (r *Reader) Rooms(ctx context.Context, scopes []string, limits func(scope string) []budget.Limit) ([]Room, error) {
	var rooms []Room
	for _, scope := range scopes {
		of := limits(scope)
		for _, l := range of[:min(len(of), bounds.MaxLimits)] {
			rooms = append(rooms, Room{Scope: scope, ExplainedLimit: ExplainedLimit{Limit: l}})
		}
	}
	for batch := range slices.Chunk(rooms, bounds.MaxQueries) {
		if err := r.use(ctx, batch); err != nil {
			return nil, err
		}
	}
	return rooms, nil
}

// use reads the usages of limits in one statement. If the usage of one is not known, it reads each
// apart.
func (r *Reader) use(ctx context.Context, list []Room) error {
	queries := make([]budget.Query, len(list))
	for i, room := range list {
		queries[i] = budget.Query{Scope: room.Scope, Window: room.Limit.Window, Period: room.Limit.Period}
	}
	usages, err := r.Usages(ctx, queries...)
	if errors.Is(err, budget.ErrWindowPurged) && len(list) > 1 {
		for i := range list {
			if err := r.use(ctx, list[i:i+1]); err != nil {
				return err
			}
		}
		return nil
	}
	for i, u := range usages {
		room := &list[i]
		if room.Used, room.Held, room.Leased, room.Available = u.Used, u.Held, u.Leased, u.Available(room.Limit.Max); room.Limit.Prepaid {
			room.Credited = u.Credited
		}
	}
	if errors.Is(err, budget.ErrWindowPurged) {
		list[0].Purged, err = true, nil
	}
	return err
}

// A Walk looks at all scopes that begin with Prefix, a page at a time, also those to which nothing
// has happened for long. It keeps those of which least is left.
type Walk struct {
	Prefix string
	Limits func(scope string) []budget.Limit // or nil
	Within time.Duration                     // of lots that end, or 0: none is looked for
	Plan   PlanNames                         // or "": none is looked for
	Keep   int                               // so many of each list

	Nearly  []Room // limits of which less than a quarter is left, the fullest first
	Credit  []Room // the same of prepaid credit
	Wallets []Room // wallets with lots, by the units that can be drawn, the fewest first
	Ending  []Ending
	Plans   []Plan // by name, and of one name those with the fewest units first
	Planned int    // how many there are
	Scopes  int    // how many it has looked at

	after string
}

// More looks at the next page, and reports whether there is another.
func (w *Walk) More(ctx context.Context, r *Reader) (bool, error) {
	page, err := r.Scopes(ctx, ScopeFilter{Prefix: w.Prefix, After: w.after, Limit: MaxPage})
	if err != nil {
		return false, err
	}
	var known, wallets []string
	for _, s := range page.Scopes {
		if known = append(known, s.Scope); s.Lots {
			wallets = append(wallets, s.Scope)
		}
	}
	if w.Limits != nil {
		rooms, err := r.Rooms(ctx, known, w.Limits)
		if err != nil {
			return false, err
		}
		for _, room := range rooms {
			switch {
			case !room.NearlyOut():
			case room.Limit.Prepaid:
				w.Credit = append(w.Credit, room)
			default:
				w.Nearly = append(w.Nearly, room)
			}
		}
	}
	credit, err := r.Rooms(ctx, wallets, Credit)
	if err != nil {
		return false, err
	}
	w.Wallets = append(w.Wallets, credit...)
	if err := w.lots(ctx, r, wallets); err != nil {
		return false, err
	}
	slices.SortFunc(w.Nearly, Fullest)
	slices.SortFunc(w.Credit, Fullest)
	slices.SortFunc(w.Wallets, Least)
	for _, list := range []*[]Room{&w.Nearly, &w.Credit, &w.Wallets} {
		*list = (*list)[:min(len(*list), w.Keep)]
	}
	w.Scopes += len(known)
	w.after = page.Next
	return page.Next != "", nil
}

// lots looks at the lots of wallets that end, and at plans.
func (w *Walk) lots(ctx context.Context, r *Reader, wallets []string) error {
	if w.Within > 0 {
		ending, err := r.endingOf(ctx, wallets, w.Within, w.Keep)
		if err != nil {
			return err
		}
		w.Ending = append(w.Ending, ending...)
		slices.SortFunc(w.Ending, firstToEnd)
		w.Ending = w.Ending[:min(len(w.Ending), w.Keep)]
	}
	if w.Plan == "" {
		return nil
	}
	plans, err := r.Plans(ctx, wallets, w.Plan)
	if err != nil {
		return err
	}
	w.Planned += len(plans)
	w.Plans = append(w.Plans, plans...)
	slices.SortFunc(w.Plans, byPlan)
	w.Plans = w.Plans[:min(len(w.Plans), w.Keep)]
	return nil
}

// Credit is the limit of a wallet without overdraft.
func Credit(string) []budget.Limit { return []budget.Limit{budget.Prepaid(0)} }
