package budget

import (
	"context"
	"time"
)

// Bucket says how a Series cuts a range: ByHour, ByDay, ByWeek, ByMonth, or a fixed length such as
// Bucket(15 * time.Minute), in whole microseconds, counted from the range's beginning.
//
// The others follow the clock of a place. A day begins at midnight there, so it may have 23 or 25 hours. If that
// midnight is skipped (daylight saving begins), the day begins right after the skipped time. A day that is skipped whole
// has no bucket. If midnight comes twice, the day begins at the first. Weeks begin on Monday, months on the 1st. An hour that
// comes twice is two buckets. Where the clock is set by half an hour, an hour may have 30 or 90 minutes.
type Bucket time.Duration

const (
	ByHour  Bucket = -1
	ByDay   Bucket = -2
	ByWeek  Bucket = -3
	ByMonth Bucket = -4
)

// MaxBuckets is how many buckets a Series may have: a day by the minute, eleven weeks by the hour, five years by the day.
const MaxBuckets = 2000

var bucketNames = map[Bucket]string{ByHour: "hour", ByDay: "day", ByWeek: "week", ByMonth: "month"}

// ParseBucket reads hour, day, week, month, or a duration as time.ParseDuration does.
func ParseBucket(text string) (Bucket, error) {
	for b, name := range bucketNames {
		if text == name {
			return b, nil
		}
	}
	d, err := time.ParseDuration(text)
	if err != nil || d <= 0 || Bucket(d).check() != nil {
		return 0, invalid("bucket", "is neither hour, day, week nor month, nor a duration in whole microseconds")
	}
	return Bucket(d), nil
}

// String returns the text that ParseBucket reads.
func (b Bucket) String() string {
	if name, ok := bucketNames[b]; ok {
		return name
	}
	return time.Duration(b).String()
}

func (b Bucket) check() error {
	switch {
	case b == 0:
		return invalid("bucket", "is missing: write budget.ByDay, or budget.Bucket(15 * time.Minute)")
	case b < ByMonth:
		return invalid("bucket", "%d is negative", int64(b))
	case b > 0 && time.Duration(b)%time.Microsecond != 0:
		return invalid("bucket", "%v is not in whole microseconds", time.Duration(b))
	}
	return nil
}

// edges are where the buckets of a range begin, and where the last one ends: from, the edges between, to.
func (b Bucket) edges(ctx context.Context, from, to time.Time, loc *time.Location) ([]time.Time, error) {
	edges := []time.Time{from}
	next := b.walk(from, loc)
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
		if len(edges) > MaxBuckets {
			return nil, invalid("bucket", "%v cuts the range into more than %d", b, MaxBuckets)
		}
	}
}

// walk returns a function that finds one edge after the other. Edges ascend. The first may be before from, and one may come twice.
func (b Bucket) walk(from time.Time, loc *time.Location) (next func() time.Time) {
	from = from.In(loc)
	edge := from
	if b == ByHour {
		return func() time.Time {
			edge = nextHour(edge)
			return edge
		}
	}
	if b > 0 {
		return func() time.Time {
			edge = edge.Add(time.Duration(b))
			return edge
		}
	}
	years, months, days := from.Date()
	day := time.Date(years, months, days, 0, 0, 0, 0, time.UTC) // a date, and no instant
	switch b {
	case ByWeek:
		day = day.AddDate(0, 0, -(int(day.Weekday())+6)%7)
	case ByMonth:
		day = day.AddDate(0, 0, 1-days)
	}
	return func() time.Time {
		switch b {
		case ByDay:
			day = day.AddDate(0, 0, 1)
		case ByWeek:
			day = day.AddDate(0, 0, 7)
		case ByMonth:
			day = day.AddDate(0, 1, 0)
		}
		return firstAt(day, loc)
	}
}

// firstAt is the first instant at which the clock of a place shows wall (given in UTC) or later. time.Date does not say
// which of two instants it returns, and returns one before a gap.
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

// nextHour is the next instant at which the clock shows a full hour, or is set to another hour than it was in.
func nextHour(t time.Time) time.Time {
	for {
		_, offset := t.Zone()
		ends := zoneEnds(t)
		next := t.Add(time.Duration(3600-mod(t.Unix()+int64(offset), 3600))*time.Second - time.Duration(t.Nanosecond()))
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

// zoneEnds is a time after t until which the clock keeps the offset from UTC that it has at t. The zero time is never. Where
// a rule decides, ZoneBounds ends each year after 365 days: on the last day of a leap year that is before t.
func zoneEnds(t time.Time) time.Time {
	_, ends := t.ZoneBounds()
	if !ends.IsZero() && !ends.After(t) {
		const day = 24 * time.Hour
		return t.Truncate(day).Add(day)
	}
	return ends
}

func mod(a, b int64) int64 { return (a%b + b) % b }
