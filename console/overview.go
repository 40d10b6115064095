package console

import (
	"context"
	"net/url"
	"slices"
	"time"

	"github.com/pgmetered/metered/internal/inspect"
)

const (
	hotWithin    = time.Minute
	deniedWithin = time.Hour
	hotLooked    = 100 // scopes whose rates are added up
	hotShown     = 15
	latestLooked = 100 // operations whose latencies are looked at
	latestShown  = 10
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
			took = append(took, max(0, o.At.Sub(o.IssuedAt))) // the clock of the one who made the id may be ahead
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
	o.Latency = latencyOf(latest.Operations)
	o.Latest = latest.Operations[:min(latestShown, len(latest.Operations))]
	return page{Title: "Overview", Active: "Overview", Now: o.O.Now, Stream: streamOf("", nil), Data: o}, nil
}

// streamOf is the address of what is new on a page.
func streamOf(name string, q url.Values) string {
	all := url.Values{"page": {name}}
	for key, values := range q {
		all[key] = values
	}
	return "live?" + all.Encode()
}
