package console

import (
	"context"
	"net/url"
	"slices"
	"time"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/internal/inspect"
)

const (
	hotWithin     = time.Minute
	refusedWithin = time.Hour
	hotLooked     = 100 // scopes whose rates are added up
	hotShown      = 15
	latestLooked  = 100 // operations whose latencies are looked at
	latestShown   = 10
	nearlyLooked  = 30 // hot scopes whose limits are looked at each time
	nearlyShown   = 8
	linesShown    = 10
	feedShown     = 20
	endingWithin  = 7 * 24 * time.Hour
)

type overview struct {
	O         inspect.Overview
	Hot       inspect.HotList
	Hottest   []inspect.Hot // those shown
	Refusals  inspect.RefusalList
	Refused   int64
	Rate      float64 // entries a second, of all scopes in Hot
	Units     float64
	RateCut   bool // there may be more scopes than those in Hot
	Latency   *latency
	Latest    []inspect.Operation
	Curve     *plotted       // of the fullest limit, or of the hottest scope that refused; nil for none
	OfScope   string         // whose it is
	Fullest   *inspect.Room  // of the limits that were looked at; nil for none
	Nearly    []inspect.Room // limits of which little is left
	LowCredit []inspect.Room // and prepaid credit
	Wallets   []inspect.Room // those with the least credit
	Looked    int            // scopes, of which the three above are so far; 0 if these are all
	Ending    []inspect.Ending
	Lines     []inspect.Line // of parked jobs
	Troubled  []inspect.Troubled
	Consumers []consumer // of the feed, those that are furthest behind
}

// consumer is a consumer of the feed.
type consumer struct {
	budget.FeedConsumer
	Late time.Duration // how old its first unread entry is
}

// Keeps reports whether purges keep entries for the consumer.
func (c consumer) Keeps() bool { return c.Unread > 0 && c.Patience > 0 }

// nearlyOut returns the limits of scopes of which less than a quarter is left, the fullest first:
// those of wallets and other prepaid credit apart.
func (h *Handler) nearlyOut(ctx context.Context, in *inspect.Reader,
	scopes []string) (fullest *inspect.Room, limited, credit []inspect.Room, err error) {
	if h.cfg.Limits == nil {
		return nil, nil, nil, nil
	}
	found, err := in.Rooms(ctx, scopes, h.cfg.Limits)
	if err != nil {
		return nil, nil, nil, err
	}
	slices.SortFunc(found, inspect.Fullest)
	for _, room := range found {
		if fullest == nil && !room.Purged && !room.Limit.Prepaid {
			fullest = &room
		}
		switch {
		case !room.NearlyOut():
		case room.Limit.Prepaid:
			credit = append(credit, room)
		default:
			limited = append(limited, room)
		}
	}
	return fullest, limited[:min(nearlyShown, len(limited))],
		credit[:min(nearlyShown, len(credit))], nil
}

// room fills the lists of scopes with little room left, of all scopes.
func (h *Handler) room(ctx context.Context, in *inspect.Reader, o *overview) error {
	scopes, wallets, looked, err := h.walk.look(ctx, h, in)
	if err != nil {
		return err
	}
	o.Looked = looked
	if o.Fullest, o.Nearly, o.LowCredit, err = h.nearlyOut(ctx, in,
		sorted(append(scopes, o.lookedAt()...))); err != nil {
		return err
	}
	o.Wallets, err = in.Rooms(ctx, sorted(wallets), inspect.Credit)
	slices.SortFunc(o.Wallets, inspect.Least)
	o.Wallets = o.Wallets[:min(nearlyShown, len(o.Wallets))]
	return err
}

// sorted are the names, each once.
func sorted(names []string) []string {
	slices.Sort(names)
	return slices.DeleteFunc(slices.Compact(names), func(name string) bool { return name == "" })
}

// lookedAt are the scopes whose limits the overview looks at: hot ones, and those that refused
// commands.
func (o overview) lookedAt() (names []string) {
	for _, s := range o.Hot.Scopes[:min(nearlyLooked, len(o.Hot.Scopes))] {
		names = append(names, s.Scope)
	}
	for _, d := range o.Refusals.Refusals {
		names = append(names, d.Scope)
	}
	return names
}

// latency is how long commands took, from the time that their ids carry until they were recorded.
// Those without a name are left out: a usage event has none, and carries the time at which it
// occurred.
type latency struct {
	Median, P95 time.Duration
	N           int
}

func latencyOf(operations []inspect.Operation) *latency {
	var took []time.Duration
	for _, o := range operations {
		if !o.IssuedAt.IsZero() && o.Name != "" {
			took = append(took, max(0, o.At.Sub(o.IssuedAt))) // the clock that made the id may be ahead
		}
	}
	if len(took) == 0 {
		return nil
	}
	slices.Sort(took)
	return &latency{Median: took[len(took)/2], P95: took[len(took)*95/100], N: len(took)}
}

// SweepLate reports whether the sweep is later than one that runs every minute.
func (o overview) SweepLate() bool { return o.O.SweepLag > 2*time.Minute }

// LotsLate reports whether the sweep of lots is later than one that runs every few minutes.
func (o overview) LotsLate() bool { return o.O.LotLag > 15*time.Minute }

func (h *Handler) overview(ctx context.Context, in *inspect.Reader, _ url.Values) (page, error) {
	var o overview
	var err error
	if o.O, err = in.Overview(ctx); err != nil {
		return page{}, err
	}
	if o.Hot, err = in.Hot(ctx, hotWithin, hotLooked); err != nil {
		return page{}, err
	}
	if o.Refusals, err = in.Refusals(ctx, refusedWithin, latestShown); err != nil {
		return page{}, err
	}
	latest, err := in.Operations(ctx, inspect.OperationFilter{Limit: latestLooked})
	if err != nil {
		return page{}, err
	}
	for _, s := range o.Hot.Scopes {
		o.Rate += s.PerSec
		o.Units += s.UnitsPS
	}
	for _, d := range o.Refusals.Refusals {
		o.Refused += d.Count
	}
	o.RateCut = len(o.Hot.Scopes) == hotLooked
	o.Hottest = o.Hot.Scopes[:min(hotShown, len(o.Hot.Scopes))]
	if err := h.room(ctx, in, &o); err != nil {
		return page{}, err
	}
	if err := h.curve(ctx, in, &o); err != nil {
		return page{}, err
	}
	if o.Ending, err = in.Ending(ctx, endingWithin, nearlyShown); err != nil {
		return page{}, err
	}
	if o.Lines, err = in.Lines(ctx, linesShown); err != nil {
		return page{}, err
	}
	if o.Troubled, err = in.Troubled(ctx, linesShown); err != nil {
		return page{}, err
	}
	if err := o.feed(ctx, in); err != nil {
		return page{}, err
	}
	o.Latency = latencyOf(latest.Operations)
	o.Latest = latest.Operations[:min(latestShown, len(latest.Operations))]
	return page{Title: "Overview", Active: "Overview", Now: o.O.Now, Stream: streamOf("", nil),
		Data: o}, nil
}

// feed reads how far the consumers of the feed are.
func (o *overview) feed(ctx context.Context, in *inspect.Reader) error {
	found, err := in.Consumers(ctx, feedShown)
	for _, c := range found {
		late := time.Duration(0)
		if c.Unread > 0 {
			late = max(0, o.O.Now.Sub(c.UnreadSince))
		}
		o.Consumers = append(o.Consumers, consumer{c, late})
	}
	return err
}

// curve reads the curve of the limit that is nearest to its end, or else of the hottest scope with
// a limit that is known.
func (h *Handler) curve(ctx context.Context, in *inspect.Reader, o *overview) error {
	if o.Fullest != nil {
		return o.plot(ctx, in, o.Fullest.Scope, o.Fullest.Limit)
	}
	for _, hot := range o.Hottest {
		if hot.Scope == "" {
			continue
		}
		limits, _, err := h.limitsOf(ctx, in, hot.Scope, "")
		if err != nil || len(limits.List) == 0 {
			return err
		}
		return o.plot(ctx, in, hot.Scope, limits.List[0])
	}
	return nil
}

// plot reads the curve of a limit of a scope.
func (o *overview) plot(ctx context.Context, in *inspect.Reader, name string,
	limit budget.Limit) (err error) {
	s := scope{Name: name}
	if s.D, err = in.Scope(ctx, name); err != nil {
		return err
	}
	p, err := s.plotted(ctx, in, limit)
	if p.Wrong == "" {
		o.Curve, o.OfScope = &p, name
	}
	return err
}

// streamOf is the address of a page's news.
func streamOf(name string, q url.Values) string {
	all := url.Values{"page": {name}}
	for key, values := range q {
		all[key] = values
	}
	return "live?" + all.Encode()
}
