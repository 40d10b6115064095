package inspect

import (
	"fmt"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/pgmetered/metered/budget"
)

// PeriodText is a period as it is typed: month@Europe/Berlin, 3months@Europe/Berlin,
// month@Europe/Berlin@2026-01-31T00:00:00Z for one with an anchor, 720h0m0s@2026-01-31T00:00:00Z
// for a fixed length.
func PeriodText(p budget.Period) string {
	text := strings.ReplaceAll(string(p.Unit), " ", "") + "@" + p.Zone
	if p.Unit == "" {
		text = p.Length.String()
	}
	if !p.Anchor.IsZero() {
		text += "@" + p.Anchor.Format(time.RFC3339Nano)
	}
	return text
}

var (
	oneUnits     = []budget.Unit{budget.Day, budget.Week, budget.Month, budget.Year}
	severalUnits = regexp.MustCompile(`^([0-9]{1,5}) ?((?:day|week|month|year)s)$`)
)

// ParsePeriod reads the texts of PeriodText. A unit alone is of UTC. ok is false for any other
// text, such as a window.
func ParsePeriod(text string) (p budget.Period, ok bool, err error) {
	parts := strings.Split(text, "@")
	switch unit := budget.Unit(parts[0]); {
	case slices.Contains(oneUnits, unit) || severalUnits.MatchString(parts[0]):
		p.Unit, p.Zone = budget.Unit(severalUnits.ReplaceAllString(parts[0], "$1 $2")), "UTC"
		if parts = parts[1:]; len(parts) > 0 {
			p.Zone, parts = parts[0], parts[1:]
		}
	default:
		if len(parts) == 1 {
			return p, false, nil
		}
		if p.Length, err = time.ParseDuration(parts[0]); err != nil {
			return p, true, fmt.Errorf("%q is neither day, week, month or year nor a length such as 720h", parts[0])
		}
		parts = parts[1:]
	}
	if len(parts) > 1 {
		return p, true, fmt.Errorf("%q has more than an anchor", text)
	}
	if len(parts) == 1 {
		if p.Anchor, err = time.Parse(time.RFC3339Nano, parts[0]); err != nil {
			return p, true, fmt.Errorf("%q is not a time such as 2026-01-31T00:00:00Z", parts[0])
		}
		p.Anchor = p.Anchor.UTC()
	}
	return p, true, nil
}
