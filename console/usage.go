package console

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"time"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/inspect"
)

const (
	points      = 60          // of a plot, beside the first
	lifetimeAgo = 30 * day    // how far back a plot of a lifetime goes at most
	leastRange  = time.Minute // and how far at least
)

// plotted is a plot of the page, with its text.
type plotted struct {
	Limit   budget.Limit
	Drawing string // its address
	Wrong   string // why there is none
	Points  []usagePoint
}

func (p plotted) Caption() string {
	what := "of the last " + length(p.Limit.Window)
	switch {
	case p.Limit.Prepaid:
		return limitText(p.Limit) + ": credit that is left, held units among it"
	case p.Limit.Lifetime:
		what = "of its lifetime"
	case !p.Limit.Period.IsZero():
		what = "of this " + inspect.PeriodText(p.Limit.Period)
	}
	return fmt.Sprintf("%s: usage %s, against %s", limitText(p.Limit), what, number(p.Limit.Max))
}

// Room is the number of units that the limit still admits at a point.
func (p plotted) Room(at usagePoint) int64 {
	if p.Limit.Prepaid {
		return max(0, at.Used+p.Limit.Max)
	}
	return max(0, p.Limit.Max-at.Used)
}

// Alt describes the drawing in words.
func (p plotted) Alt() string {
	first, last := p.Points[0], p.Points[len(p.Points)-1]
	low, high := first, first
	for _, at := range p.Points {
		if at.Used < low.Used {
			low = at
		}
		if at.Used > high.Used {
			high = at
		}
	}
	const layout = "2006-01-02 15:04"
	return fmt.Sprintf("From %s to %s: %s at first, %s now; the lowest was %s and the highest %s; the limit is %s.",
		first.At.Format(layout), last.At.Format(layout), number(first.Used), number(last.Used),
		number(low.Used), number(high.Used), number(drawnAt(p.Limit)))
}

// drawnAt is the height at which a plot draws a limit. For prepaid credit it is the overdraft.
func drawnAt(l budget.Limit) int64 {
	if l.Prepaid {
		return -l.Max
	}
	return l.Max
}

// plotted reads the data of a limit's plot.
func (s *scope) plotted(ctx context.Context, in *inspect.Reader,
	limit budget.Limit) (plotted, error) {
	p := plotted{Limit: limit, Drawing: "usage.svg?" +
		url.Values{"scope": {s.Name}, "limit": {limitSource(limit)}}.Encode()}
	var err error
	p.Points, err = usageOver(ctx, in, s.D, limit)
	if purged := (*budget.PurgedError)(nil); errors.As(err, &purged) {
		p.Wrong = "What counted is not known: the window reaches purged entries, before " +
			purged.KnownFrom.Format(time.RFC3339) + "."
		err = nil
	}
	return p, err
}

// usageOver is the usage of a limit over time, or the prepaid credit left, without holds. It is the
// ledger's present view: a refund counts at the time of its charge.
func usageOver(ctx context.Context, in *inspect.Reader, d inspect.ScopeDetail,
	limit budget.Limit) ([]usagePoint, error) {
	if limit.Lifetime || limit.Prepaid {
		list, err := lifetimeOver(ctx, in, d)
		for i := range list {
			if limit.Prepaid {
				list[i].Used = -list[i].Used
			}
		}
		return list, err
	}
	if !limit.Period.IsZero() {
		return periodOver(ctx, in, d, limit.Period)
	}
	bucket := max(limit.Window/points, time.Microsecond).Truncate(time.Microsecond)
	to := d.Now.Add(time.Microsecond) // an entry of this moment counts
	// The first point needs a window before it.
	ranges, err := in.Ledger.Series(ctx, in.DB, d.Scope.Scope, to.Add(-2*points*bucket), to,
		budget.Unit(bucket.String()), nil)
	if purged := (*budget.PurgedError)(nil); errors.As(err, &purged) {
		known := int(to.Sub(purged.KnownFrom) / bucket)
		if known < points {
			return nil, err
		}
		ranges, err = in.Ledger.Series(ctx, in.DB, d.Scope.Scope,
			to.Add(-time.Duration(known)*bucket), to, budget.Unit(bucket.String()), nil)
	}
	if err != nil {
		return nil, err
	}
	var list []usagePoint
	var inside int64
	for i, r := range ranges {
		inside += r.Used() + r.Unsettled
		if i >= points {
			inside -= ranges[i-points].Used() + ranges[i-points].Unsettled
		}
		if i >= points-1 {
			list = append(list, usagePoint{r.To, inside})
		}
	}
	return list, nil
}

// periodOver is the usage of a period since it began.
func periodOver(ctx context.Context, in *inspect.Reader, d inspect.ScopeDetail,
	period budget.Period) ([]usagePoint, error) {
	usages, err := in.Ledger.Usage(ctx, in.DB, budget.Query{Scope: d.Scope.Scope, Period: period})
	if err != nil {
		return nil, err
	}
	from, to := usages[0].PeriodStart, d.Now.Add(time.Microsecond)
	bucket := max(to.Sub(from)/points, time.Microsecond).Truncate(time.Microsecond)
	ranges, err := in.Ledger.Series(ctx, in.DB, d.Scope.Scope, from, to,
		budget.Unit(bucket.String()), nil)
	if err != nil {
		return nil, err
	}
	list := []usagePoint{{from, 0}}
	var inside int64
	for _, r := range ranges {
		inside += r.Used() + r.Unsettled
		list = append(list, usagePoint{r.To, inside})
	}
	return list, nil
}

// lifetimeOver is the usage of a lifetime, backwards from the present one.
func lifetimeOver(ctx context.Context, in *inspect.Reader,
	d inspect.ScopeDetail) ([]usagePoint, error) {
	to := d.Now.Add(time.Microsecond)
	length := min(max(to.Sub(d.First), leastRange), lifetimeAgo).Truncate(time.Microsecond)
	bucket := (length / points).Truncate(time.Microsecond)
	ranges, err := in.Ledger.Series(ctx, in.DB, d.Scope.Scope, to.Add(-points*bucket), to,
		budget.Unit(bucket.String()), nil)
	if err != nil {
		return nil, err
	}
	list := make([]usagePoint, len(ranges)+1)
	used := d.Used
	for i := len(ranges) - 1; i >= 0; i-- {
		list[i+1] = usagePoint{ranges[i].To, used}
		used -= ranges[i].Charged - ranges[i].RefundsMade - ranges[i].Credited
	}
	list[0] = usagePoint{ranges[0].From, used}
	return list, nil
}

// usageSVG draws the usage of a limit.
func (h *Handler) usageSVG(ctx context.Context, in *inspect.Reader, q url.Values,
	l look) ([]byte, error) {
	list, err := parseLimits(q.Get("limit"))
	if err != nil || len(list) != 1 {
		return nil, errNoPage
	}
	d, err := in.Scope(ctx, q.Get("scope"))
	if err != nil {
		return nil, err
	}
	drawn, err := usageOver(ctx, in, d, list[0])
	if err != nil {
		return nil, err
	}
	return usagePlot{points: drawn, limit: drawnAt(list[0]), name: limitText(list[0]),
		zone: h.cfg.Location}.svg(l), nil
}

// holdsSVG draws when the newest holds of a scope began and ended.
func (h *Handler) holdsSVG(ctx context.Context, in *inspect.Reader, q url.Values,
	l look) ([]byte, error) {
	list, err := in.Holds(ctx, inspect.HoldFilter{Scope: q.Get("scope"), Limit: holdsShown})
	if err != nil {
		return nil, err
	}
	if len(list.Holds) == 0 {
		return nil, errNoPage
	}
	return timelineOf(list.Holds, h.cfg.Location).svg(l), nil
}

// timelineOf makes a timeline of holds. It ends a little after now, or where the last open hold
// falls due.
func timelineOf(list []holds.Hold, zone *time.Location) timeline {
	t := timeline{zone: zone, from: list[0].PlacedAt, to: list[0].Now}
	for _, hold := range list {
		end := hold.EndedAt
		if end.IsZero() {
			end = hold.Due
		}
		t.holds = append(t.holds, bar{hold.ID, string(hold.State), hold.PlacedAt, end})
		if hold.PlacedAt.Before(t.from) {
			t.from = hold.PlacedAt
		}
		if end.After(t.to) {
			t.to = end
		}
	}
	margin := max(t.to.Sub(t.from)/50, time.Second)
	t.from, t.to = t.from.Add(-margin), t.to.Add(margin)
	return t
}
