package budget

import (
	"fmt"
	"time"
)

// At returns the first moments of t's period and of the next, in UTC, by the program's time zones,
// which may differ from the server's. Errors: *ArgumentError, and
// the code budget_time_zone.
func (p Period) At(t time.Time) (start, end time.Time, err error) {
	if p.IsZero() {
		return start, end, invalid("Period", "is missing")
	}
	if err := p.check("Period"); err != nil {
		return start, end, err
	}
	if err := checkTime("t", t); err != nil {
		return start, end, err
	}
	t = t.UTC().Truncate(time.Microsecond)
	if p.Unit == "" {
		into := time.Duration(mod(t.UnixMicro()-p.Anchor.UnixMicro(),
			p.Length.Microseconds())) * time.Microsecond
		return t.Add(-into), t.Add(p.Length - into), nil
	}
	loc, err := time.LoadLocation(p.Zone)
	if err != nil {
		return start, end, fmt.Errorf("%w: %w", errTimeZone, err)
	}
	// As _period_at in SQL has it: from a period that starts later, back to the one that has begun.
	shown, origin := shownAt(t, loc), time.Date(1, 1, 1, 0, 0, 0, 0, time.UTC)
	if !p.Anchor.IsZero() {
		origin = shownAt(p.Anchor, loc)
	}
	months, days := p.Unit.lasts()
	n := 1
	if days > 0 {
		n += int((shown.Unix() - origin.Unix()) / (24 * 60 * 60) / int64(days))
	} else {
		n += (shown.Year()*12 + int(shown.Month()) - origin.Year()*12 - int(origin.Month())) / months
	}
	for {
		start = startsAt(plusMonths(origin, n*months).AddDate(0, 0, n*days), loc)
		switch {
		case start.After(t):
			end = start
			n--
		case end.IsZero():
			n += 2
		default:
			return start, end, nil
		}
	}
}

// shownAt is the reading of a clock of the place, as a time in UTC.
func shownAt(t time.Time, loc *time.Location) time.Time {
	_, offset := t.In(loc).Zone()
	return t.UTC().Add(time.Duration(offset) * time.Second)
}

// plusMonths is a time so many months later, on the last day of a month that is shorter.
func plusMonths(t time.Time, months int) time.Time {
	first := time.Date(t.Year(), t.Month()+time.Month(months), 1, 0, 0, 0, 0, time.UTC)
	last := first.AddDate(0, 1, -1).Day()
	return first.AddDate(0, 0, min(t.Day(), last)-1).Add(t.Sub(t.Truncate(24 * time.Hour)))
}

// startsAt is when a clock of the place shows a time first. Where it is set forward past that, it
// is as if it had not been.
func startsAt(shown time.Time, loc *time.Location) time.Time {
	const day = 24 * time.Hour
	begin := shown.Add(-day).In(loc)
	_, before := begin.Zone()
	after := before
	at := func(offset int) time.Time { return shown.Add(-time.Duration(offset) * time.Second) }
	for ends := zoneEnds(begin); !ends.IsZero() && ends.Before(shown.Add(2*day)); ends = zoneEnds(ends) {
		if _, after = ends.Zone(); after != before {
			if after > before && at(after).Before(ends) || after < before && at(before).Before(ends) {
				after = before
			}
			break
		}
	}
	return at(after).UTC()
}
