package inspect

import (
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/internal/bounds"
)

// LimitForms names the ways to write a limit.
const LimitForms = "1000/1h, 20000/30d, 500/lifetime, 9000/month@Europe/Berlin, prepaid or credit/50"

// ParseLimit reads a limit without a name: units and a window or period, "prepaid", or "credit/50"
// with an overdraft of 50. 50/credit is the same.
func ParseLimit(text string) (budget.Limit, error) {
	units, length, found := strings.Cut(strings.TrimSpace(text), "/")
	units, length = strings.TrimSpace(units), strings.TrimSpace(length)
	switch {
	case units == "prepaid" && !found:
		return budget.Prepaid(0), nil
	case units == "credit" && found:
		units, length = length, units
	case !found:
		return budget.Limit{}, fmt.Errorf("%q is not of the form %s", text, LimitForms)
	}
	most, err := strconv.ParseInt(units, 10, 64)
	if err != nil || most < 0 || most > bounds.MaxLimit {
		return budget.Limit{}, fmt.Errorf("%q is not a number of units from 0 to 2^62", units)
	}
	if period, ok, err := ParsePeriod(length); ok {
		return budget.Limit{Max: most, Period: period}, err
	}
	switch length {
	case "lifetime":
		return budget.Lifetime(most), nil
	case "credit":
		return budget.Prepaid(most), nil
	}
	w, err := ParseDuration(length)
	if err != nil {
		return budget.Limit{}, fmt.Errorf("%q is not a window such as 1h, 30d, lifetime or credit", length)
	}
	if w < time.Microsecond || w > bounds.MaxWindow || w%time.Microsecond != 0 {
		return budget.Limit{}, fmt.Errorf("the window %q is not from 1µs to a century, in whole microseconds", length)
	}
	return budget.Limit{Max: most, Window: w}, nil
}

// LimitText is a limit as ParseLimit reads it, without its name.
func LimitText(l budget.Limit) string {
	switch {
	case l.Prepaid && l.Max == 0:
		return "prepaid"
	case l.Prepaid:
		return fmt.Sprintf("credit/%d", l.Max)
	case l.Lifetime:
		return fmt.Sprintf("%d/lifetime", l.Max)
	case !l.Period.IsZero():
		return fmt.Sprintf("%d/%s", l.Max, PeriodText(l.Period))
	}
	return fmt.Sprintf("%d/%s", l.Max, DurationText(l.Window))
}

const day = 24 * time.Hour

// ParseDuration reads 90s, 36h, 30d and 1d12h.
func ParseDuration(text string) (time.Duration, error) {
	var whole time.Duration
	rest := text
	if n, after, ok := strings.Cut(text, "d"); ok {
		count, err := strconv.ParseUint(n, 10, 16)
		if err != nil {
			return 0, fmt.Errorf("%q is not a duration such as 90s, 36h or 30d", text)
		}
		whole, rest = time.Duration(count)*day, after
		if rest == "" {
			return whole, nil
		}
	}
	d, err := time.ParseDuration(rest)
	if err != nil || d < 0 {
		return 0, fmt.Errorf("%q is not a duration such as 90s, 36h or 30d", text)
	}
	return whole + d, nil
}

// DurationText is a duration as ParseDuration reads it: days alone, or hours and less.
func DurationText(d time.Duration) string {
	if d%day == 0 && d > 0 {
		return fmt.Sprintf("%dd", d/day)
	}
	text := d.String()
	for _, zero := range []struct{ after, what string }{{"m", "0s"}, {"h", "0m"}} {
		if strings.HasSuffix(text, zero.after+zero.what) {
			text = strings.TrimSuffix(text, zero.what)
		}
	}
	return text
}
