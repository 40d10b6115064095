package console

import (
	"cmp"
	"context"
	"errors"
	"net/url"
	"slices"
	"time"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/internal/bounds"
	"github.com/pgmetered/metered/internal/inspect"
)

const (
	hotWithin     = time.Minute
	refusedWithin = time.Hour
	hotLooked     = 100 // scopes whose rates are added up
	hotShown      = 15
	latestLooked  = 100 // operations whose latencies are looked at
	latestShown   = 10
	nearlyLooked  = 30 // scopes whose limits are looked at
	nearlyShown   = 8
	linesShown    = 10
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
	Curve     *plotted // of the hottest scope with a limit that is known; nil for none
	OfScope   string   // whose it is
	Nearly    []nearly // limits of which little is left
	LowCredit []nearly // and prepaid credit
	Ending    []inspect.Ending
	Lines     []inspect.Line // of parked jobs
}

// nearly is a limit of a busy scope with little room left.
type nearly struct {
	Scope string
	standing
}

// nearlyOut looks at the limits of scopes that the program knows, and returns those of which most is used, the fullest first:
// those of wallets and other prepaid credit apart.
func (h *Handler) nearlyOut(ctx context.Context, in *inspect.Reader, scopes []string) (limited, credit []nearly, err error) {
	if h.cfg.Limits == nil {
		return nil, nil, nil
	}
	var found []nearly
	for _, scope := range scopes {
		limits := h.cfg.Limits(scope)
		for _, l := range limits[:min(len(limits), bounds.MaxLimits)] {
			found = append(found, nearly{scope, standing{ExplainedLimit: inspect.ExplainedLimit{Limit: l}}})
		}
	}
	for batch := range slices.Chunk(found, bounds.MaxQueries) {
		if err := usagesOf(ctx, in, batch); err != nil {
			return nil, nil, err
		}
	}
	slices.SortStableFunc(found, func(a, b nearly) int { return cmp.Compare(b.Share(), a.Share()) })
	for _, n := range found {
		switch {
		case n.Purged || float64(n.Counts()) < n.Low():
		case n.Limit.Prepaid:
			credit = append(credit, n)
		default:
			limited = append(limited, n)
		}
	}
	return limited[:min(nearlyShown, len(limited))], credit[:min(nearlyShown, len(credit))], nil
}

// usagesOf reads the usages of limits in one statement. If the usage of one is not known, it reads each apart.
func usagesOf(ctx context.Context, in *inspect.Reader, list []nearly) error {
	queries := make([]budget.Query, len(list))
	for i, n := range list {
		queries[i] = budget.Query{Scope: n.Scope, Window: n.Limit.Window, Period: n.Limit.Period}
	}
	usages, err := in.Usages(ctx, queries...)
	if errors.Is(err, budget.ErrWindowPurged) && len(list) > 1 {
		for i := range list {
			if err := usagesOf(ctx, in, list[i:i+1]); err != nil {
				return err
			}
		}
		return nil
	}
	for i, u := range usages {
		n := &list[i]
		if n.Used, n.Held, n.Leased, n.Available = u.Used, u.Held, u.Leased, u.Available(n.Limit.Max); n.Limit.Prepaid {
			n.credited = u.Credited
		}
	}
	if errors.Is(err, budget.ErrWindowPurged) {
		list[0].Purged, err = true, nil
	}
	return err
}

// lookedAt are the scopes whose limits the overview looks at: hot ones, and those that refused commands.
func (o overview) lookedAt() (names []string) {
	for _, s := range o.Hot.Scopes[:min(nearlyLooked, len(o.Hot.Scopes))] {
		names = append(names, s.Scope)
	}
	for _, d := range o.Refusals.Refusals {
		names = append(names, d.Scope)
	}
	slices.Sort(names)
	return slices.DeleteFunc(slices.Compact(names), func(name string) bool { return name == "" })
}

// latency is how long commands took, from the time that their ids carry until they were recorded. Those without a name
// are left out: a usage event has none, and carries the time at which it occurred.
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
	if o.Nearly, o.LowCredit, err = h.nearlyOut(ctx, in, o.lookedAt()); err != nil {
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
	o.Latency = latencyOf(latest.Operations)
	o.Latest = latest.Operations[:min(latestShown, len(latest.Operations))]
	return page{Title: "Overview", Active: "Overview", Now: o.O.Now, Stream: streamOf("", nil), Data: o}, nil
}

// curve reads the curve of the hottest scope.
func (h *Handler) curve(ctx context.Context, in *inspect.Reader, o *overview) error {
	for _, hot := range o.Hottest {
		if hot.Scope == "" {
			continue
		}
		limits, _, err := h.limitsOf(ctx, in, hot.Scope, "")
		if err != nil || len(limits.List) == 0 {
			return err
		}
		s := scope{Name: hot.Scope}
		if s.D, err = in.Scope(ctx, hot.Scope); err != nil {
			return err
		}
		p, err := s.plotted(ctx, in, limits.List[0])
		if p.Wrong == "" {
			o.Curve, o.OfScope = &p, hot.Scope
		}
		return err
	}
	return nil
}

// streamOf is the address of a page's news.
func streamOf(name string, q url.Values) string {
	all := url.Values{"page": {name}}
	for key, values := range q {
		all[key] = values
	}
	return "live?" + all.Encode()
}
