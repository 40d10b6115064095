package budget

import (
	"context"
	"time"

	"github.com/pgmetered/metered/internal/bounds"
)

// Unit is a unit of the calendar. Series also takes an hour, and a length in whole microseconds,
// such as "15m" (time.ParseDuration), but no Every. It leaves out a day that clocks skip.
type Unit string

const (
	// Hour is an hour, for Series alone.
	Hour Unit = "hour"

	// Day is a day of the calendar, from midnight or the anchor's time of day.
	Day Unit = "day"

	// Week is a week of the calendar, from Monday or the anchor's weekday.
	Week Unit = "week"

	// Month is a month of the calendar, from the 1st or the anchor's day.
	Month Unit = "month"

	// Year is a year of the calendar, from the 1st of January or the anchor's date.
	Year Unit = "year"
)

// fixed is the length of a unit that is not of the calendar, else 0.
func (u Unit) fixed() time.Duration {
	switch u {
	case Hour, Day, Week, Month, Year:
		return 0
	}
	d, err := time.ParseDuration(string(u))
	if err != nil || d <= 0 || d%time.Microsecond != 0 {
		return -1
	}
	return d
}

func (u Unit) checkSeries() error {
	if u.fixed() < 0 {
		return invalid("unit", "%q is neither hour, day, week, month, year nor a duration in whole microseconds such as 15m", string(u))
	}
	return nil
}

// edges are where the buckets of a range begin, and where the last one ends: from, the edges
// between, to.
func (u Unit) edges(ctx context.Context, from, to time.Time, loc *time.Location) ([]time.Time, error) {
	edges := []time.Time{from}
	next := u.walk(from, loc)
	for {
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		edge := next()
		if !edge.Before(to) {
			return append(edges, to), nil
		}
		if edge.After(edges[len(edges)-1]) {
			edges = append(edges, edge)
		}
		if len(edges) > bounds.MaxBuckets {
			return nil, invalid("unit", "%q cuts the range into more than %d", string(u), bounds.MaxBuckets)
		}
	}
}

// walk returns a function that finds one edge after the other. Edges ascend. The first may be
// before from, and one may come twice.
func (u Unit) walk(from time.Time, loc *time.Location) (next func() time.Time) {
	from = from.In(loc)
	edge := from
	if u == Hour {
		return func() time.Time {
			edge = nextHour(edge)
			return edge
		}
	}
	if length := u.fixed(); length > 0 {
		return func() time.Time {
			edge = edge.Add(length)
			return edge
		}
	}
	years, months, days := from.Date()
	day := time.Date(years, months, days, 0, 0, 0, 0, time.UTC) // a date, and no instant
	switch u {
	case Week:
		day = day.AddDate(0, 0, -(int(day.Weekday())+6)%7)
	case Month:
		day = day.AddDate(0, 0, 1-days)
	case Year:
		day = day.AddDate(0, 1-int(months), 1-days)
	}
	return func() time.Time {
		switch u {
		case Day:
			day = day.AddDate(0, 0, 1)
		case Week:
			day = day.AddDate(0, 0, 7)
		case Month:
			day = day.AddDate(0, 1, 0)
		case Year:
			day = day.AddDate(1, 0, 0)
		}
		return firstAt(day, loc)
	}
}

// firstAt is the first instant at which the clock of a place shows wall (given in UTC) or later.
// time.Date does not say which of two instants it returns, and returns one before a gap.
func firstAt(wall time.Time, loc *time.Location) time.Time {
	const farthest = 26 * time.Hour // no place's clock is farther from UTC
	period := wall.Add(-farthest).In(loc)
	for {
		begins, _ := period.ZoneBounds()
		ends := zoneEnds(period)
		_, offset := period.Zone()
		at := wall.Add(-time.Duration(offset) * time.Second).In(loc)
		if at.Before(begins) {
			at = begins // the clock skipped the hour that it would have shown
		}
		if ends.IsZero() || at.Before(ends) {
			return at
		}
		period = ends
	}
}

// nextHour is the next instant at which the clock shows a full hour, or is set to another hour than
// it was in.
func nextHour(t time.Time) time.Time {
	for {
		_, offset := t.Zone()
		ends := zoneEnds(t)
		left := 3600 - mod(t.Unix()+int64(offset), 3600)
		next := t.Add(time.Duration(left)*time.Second - time.Duration(t.Nanosecond()))
		if ends.IsZero() || next.Before(ends) {
			return next
		}
		_, after := ends.Zone()
		was, is := ends.Unix()+int64(offset)-1, ends.Unix()+int64(after)
		if mod(is, 3600) == 0 || is-mod(is, 3600) != was-mod(was, 3600) {
			return ends
		}
		t = ends
	}
}

// zoneEnds is a time after t until which the clock keeps the offset from UTC that it has at t. The
// zero time is never. Where a rule decides, ZoneBounds ends each year after 365 days: on the last
// day of a leap year that is before t.
func zoneEnds(t time.Time) time.Time {
	_, ends := t.ZoneBounds()
	if !ends.IsZero() && !ends.After(t) {
		const day = 24 * time.Hour
		return t.Truncate(day).Add(day)
	}
	return ends
}

func mod(a, b int64) int64 { return (a%b + b) % b }
