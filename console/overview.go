package console

import (
	"cmp"
	"context"
	"errors"
	"net/url"
	"slices"
	"time"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/internal/inspect"
)

const (
	hotWithin    = time.Minute
	deniedWithin = time.Hour
	hotLooked    = 100 // scopes whose rates are added up
	hotShown     = 15
	latestLooked = 100 // operations whose latencies are looked at
	latestShown  = 10
	nearlyLooked = 30 // scopes whose limits are looked at
	nearlyShown  = 8
	endingWithin = 7 * 24 * time.Hour
)

type overview struct {
	O       inspect.Overview
	Hot     inspect.HotList
	Hottest []inspect.Hot // those shown
	Denials inspect.DenialList
	Denied  int64
	Rate    float64 // entries a second, of all scopes in Hot
	Units   float64
	RateCut bool // there may be more scopes than those in Hot
	Latency *latency
	Latest  []inspect.Operation
	Curve   *plotted // of the hottest scope with a limit that is known; nil for none
	OfScope string   // whose it is
	Nearly  []nearly
	Ending  []inspect.Ending
}

// nearly is a limit of a busy scope with little room left.
type nearly struct {
	Scope string
	standing
}

// nearlyOut looks at the limits of scopes that the program knows, and returns those of which most is used, the fullest first.
func (h *Handler) nearlyOut(ctx context.Context, in *inspect.Reader, scopes []inspect.Hot) (list []nearly, err error) {
	if h.cfg.Limits == nil {
		return nil, nil
	}
	for _, s := range scopes {
		limits := h.cfg.Limits(s.Scope)
		limits = limits[:min(len(limits), budget.MaxLimits)]
		if s.Scope == "" || len(limits) == 0 {
			continue
		}
		var queries []budget.Query
		for _, l := range limits {
			queries = append(queries, budget.Query{Scope: s.Scope, Window: l.Window, Period: l.Period})
		}
		usages, err := in.Ledger.Usage(ctx, in.DB, queries...)
		switch {
		case errors.Is(err, budget.ErrWindowPurged):
			continue
		case err != nil:
			return nil, err
		}
		for i, l := range limits {
			u := usages[i]
			n := nearly{s.Scope, standing{ExplainedLimit: inspect.ExplainedLimit{
				Limit: l, Used: u.Used, Held: u.Held, Leased: u.Leased, Available: u.Available(l.Max),
			}}}
			if l.Prepaid {
				n.credited = u.Credited
			}
			if float64(n.Counts()) >= n.Low() {
				list = append(list, n)
			}
		}
	}
	slices.SortStableFunc(list, func(a, b nearly) int { return cmp.Compare(b.Share(), a.Share()) })
	return list[:min(nearlyShown, len(list))], nil
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
	if o.Denials, err = in.Denials(ctx, deniedWithin, latestShown); err != nil {
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
	for _, d := range o.Denials.Denials {
		o.Denied += d.Count
	}
	o.RateCut = len(o.Hot.Scopes) == hotLooked
	o.Hottest = o.Hot.Scopes[:min(hotShown, len(o.Hot.Scopes))]
	if o.Nearly, err = h.nearlyOut(ctx, in, o.Hot.Scopes[:min(nearlyLooked, len(o.Hot.Scopes))]); err != nil {
		return page{}, err
	}
	if err := h.curve(ctx, in, &o); err != nil {
		return page{}, err
	}
	if o.Ending, err = in.Ending(ctx, endingWithin, nearlyShown); err != nil {
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
