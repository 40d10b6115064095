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

// NearlyOut reports whether less than a quarter is left. Where the usage is not known, it is false.
func (r Room) NearlyOut() bool { return !r.Purged && float64(r.Counts()) >= r.Low() }

// mayBeOut reports whether a limit of the scope may be nearly out. By its last entry no more can be
// used, held and leased than all that was ever spent and what is held, or what is held alone where the
// last entry is older than the window. Lots may end meanwhile, so a wallet always may be.
func (s Scope) mayBeOut(l budget.Limit) bool {
	most := s.Spent + s.Held
	switch {
	case s.Lots:
		return true
	case l.Prepaid:
		most -= s.Refunded
	case l.Lifetime:
		most -= s.Refunded + s.Credited
	case l.Window > 0 && s.idle >= l.Window:
		most = s.Held
	}
	room := Room{ExplainedLimit: ExplainedLimit{Limit: l}}
	if l.Prepaid {
		room.Credited = s.Credited
	}
	return float64(most) >= room.Low()
}

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
		rooms = append(rooms, roomsOf(scope, limits)...)
	}
	return rooms, r.useAll(ctx, rooms)
}

// roomsOf returns each limit of a scope, without its usage.
func roomsOf(scope string, limits func(scope string) []budget.Limit) (rooms []Room) {
	of := limits(scope)
	for _, l := range of[:min(len(of), bounds.MaxLimits)] {
		rooms = append(rooms, Room{Scope: scope, ExplainedLimit: ExplainedLimit{Limit: l}})
	}
	return rooms
}

// useAll reads the usages of limits.
func (r *Reader) useAll(ctx context.Context, rooms []Room) error {
	for batch := range slices.Chunk(rooms, bounds.MaxQueries) {
		if err := r.use(ctx, batch); err != nil {
			return err
		}
	}
	return nil
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

// usagesRead is the number of usages that More reads, and those of the last scope's other limits.
const usagesRead = 200

// More looks at the next page, and reports whether there is another. The page ends early where it
// has read the usage of enough limits: that is dear, and a limit that cannot be nearly out by the
// scope's last entry goes without.
func (w *Walk) More(ctx context.Context, r *Reader) (bool, error) {
	page, err := r.Scopes(ctx, ScopeFilter{Prefix: w.Prefix, After: w.after, Limit: MaxPage})
	if err != nil {
		return false, err
	}
	var wallets []string
	var rooms []Room
	for i, s := range page.Scopes {
		if len(wallets)+len(rooms) >= usagesRead {
			page.Scopes, page.Next = page.Scopes[:i], page.Scopes[i-1].Scope
			break
		}
		if s.Lots {
			wallets = append(wallets, s.Scope)
		}
		if w.Limits != nil {
			rooms = append(rooms, slices.DeleteFunc(roomsOf(s.Scope, w.Limits),
				func(room Room) bool { return !s.mayBeOut(room.Limit) })...)
		}
	}
	if err := r.useAll(ctx, rooms); err != nil {
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
	w.Scopes += len(page.Scopes)
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
