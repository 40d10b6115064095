package budget

import (
	"cmp"
	"context"
	"math"
	"slices"
	"time"

	"github.com/pgmetered/metered/internal/bounds"
)

// Trial compares another limit with a scope's charges. Those that it would have refused count too.
type Trial struct {
	// Scope is the scope whose charges were judged.
	Scope string `json:"scope"`

	// Limit is the limit that judged them.
	Limit Limit `json:"limit"`

	// Used is the most that counted at any time.
	Used int64 `json:"used"`

	// Available is the least that was left at any time.
	Available int64 `json:"available"`

	// RefusedAt is the time of the first charge that the limit would have refused. It is zero if
	// there is none.
	RefusedAt time.Time `json:"refused_at,omitzero"`
}

// WhatIf tries a limit by window or period on the history of scopes, from a time until before
// another (docs/plans.md). Refunded units do not count, and held ones when they are captured. A
// purged range is a *PurgedError. At REPEATABLE READ refunds made meanwhile do not count.
func (l *Ledger) WhatIf(ctx context.Context, db Querier, limit Limit, from, to time.Time,
	scopes ...string) ([]Trial, error) {
	if err := cmp.Or(l.made(), notNil("db", db), limit.check("limit")); err != nil {
		return nil, err
	}
	if limit.Window == 0 && limit.Period.IsZero() || limit.query != nil {
		return nil, invalid("limit", "is neither by window nor by period, or has MaxFrom")
	}
	trials := make([]Trial, len(scopes))
	for i, scope := range scopes {
		from, to, err := l.checkRange(db, scope, from, to)
		if err != nil {
			return nil, err
		}
		h := history{Ledger: l, db: db, scope: scope, limit: limit, known: map[int64]int64{}}
		if err := h.try(ctx, from.UnixMicro(), to.UnixMicro()); err != nil {
			return nil, err
		}
		trials[i] = Trial{Scope: scope, Limit: limit, Used: h.most, Available: available(limit.Max, h.most, 0)}
		if h.first < math.MaxInt64 {
			trials[i].RefusedAt = time.UnixMicro(h.first - 1).UTC() // the use before a moment has its entry
		}
	}
	return trials, nil
}

// history is what a scope spent. Times are in microseconds.
type history struct {
	*Ledger
	db    Querier
	scope string
	limit Limit
	known map[int64]int64 // the units spent before a time, and the refunds of later ones: differences are the use between two times

	most  int64 // found so far
	first int64 // the earliest time found before which the limit was exceeded
}

// span is a part of the range, whose ends are known. A charge that comes in it counts from the
// span's base on: the window's length before it, or the start of its period.
type span struct {
	from, to int64
	start    int64 // of the period
}

// cut is the end of the i-th of so many parts.
func (s span) cut(i, parts int64) int64 {
	length := s.to - s.from
	return s.from + length/parts*i + length%parts*i/parts
}

// pointsAtOnce is how many times are looked at in one round trip.
const pointsAtOnce = 1000

// try cuts the range, and looks again into those parts that may have more than what was found. The
// use at the end of a window that ends in a part is at most what was spent from its base, at the
// part's beginning, to the part's end.
func (h *history) try(ctx context.Context, from, to int64) error {
	h.first = math.MaxInt64
	spans, err := h.spans(from, to)
	if err != nil {
		return err
	}
	parts := int64(1) // a period may not need more than its ends
	if h.limit.Window > 0 {
		parts = 64
	}
	for len(spans) > 0 {
		now := spans[:min(len(spans), pointsAtOnce/int(parts)/2)]
		var cut []span
		var times []int64
		for _, s := range now {
			times = append(times, s.from, h.base(s, s.from))
			for i := range parts {
				part := span{s.cut(i, parts), s.cut(i+1, parts), s.start}
				if part.from < part.to {
					cut = append(cut, part)
					times = append(times, part.to, h.base(s, part.to))
				}
			}
		}
		if err := h.learn(ctx, times); err != nil {
			return err
		}
		next := h.look(cut)
		spans = append(next, spans[len(now):]...)
		parts = min(64, max(2, int64(pointsAtOnce/2/max(1, len(spans)))))
	}
	return nil
}

// spans are the range, or its periods.
func (h *history) spans(from, to int64) (all []span, err error) {
	if h.limit.Window > 0 {
		return []span{{from: from, to: to}}, nil
	}
	for from < to {
		start, end, err := h.limit.Period.At(time.UnixMicro(from))
		if err != nil {
			return nil, err
		}
		until := min(to, end.UnixMicro())
		all = append(all, span{from, until, start.UnixMicro()})
		if from = until; len(all) > bounds.MaxBuckets {
			return nil, invalid("limit.Period", "cuts the range into more than %d", bounds.MaxBuckets)
		}
	}
	return all, nil
}

func (h *history) base(s span, at int64) int64 {
	if h.limit.Window > 0 {
		return at - h.limit.Window.Microseconds()
	}
	return s.start
}

// look counts at the end of each part, and returns those that need to be cut.
func (h *history) look(parts []span) (again []span) {
	for _, p := range parts {
		h.count(p, p.from) // it may be more than the limit before the range, which is no refusal
		if h.known[p.to] == h.known[p.from] {
			continue // nothing was charged, so use only fell
		}
		if used := h.count(p, p.to); used > h.limit.Max {
			h.first = min(h.first, p.to)
		}
	}
	for _, p := range parts {
		bound := h.known[p.to] - h.known[h.base(p, p.from)]
		if p.to-p.from > 1 && h.known[p.to] > h.known[p.from] &&
			(bound > h.most || bound > h.limit.Max && p.from < h.first) {
			again = append(again, p)
		}
	}
	return again
}

func (h *history) count(p span, at int64) int64 {
	used := h.known[at] - h.known[h.base(p, at)]
	h.most = max(h.most, used)
	return used
}

// learn reads the sums at times.
func (h *history) learn(ctx context.Context, times []int64) error {
	slices.Sort(times)
	times = slices.DeleteFunc(slices.Compact(times), func(t int64) bool { _, ok := h.known[t]; return ok })
	in, _ := time.LoadLocation(h.limit.Period.Zone) // Period.At has found it
	for some := range slices.Chunk(times, bounds.MaxBuckets) {
		at := make([]time.Time, len(some))
		for i, t := range some {
			at[i] = time.UnixMicro(t).UTC()
		}
		sums, err := h.sumsAt(ctx, h.db, h.scope, at, in)
		if err != nil {
			return err
		}
		for i, t := range some {
			h.known[t] = sums[i].spent + sums[i].refundedAfter
		}
	}
	return ctx.Err()
}
