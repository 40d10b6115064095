package console

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/internal/bounds"
	"github.com/pgmetered/metered/internal/inspect"
)

// limits are those that a scope is looked at with.
type limits struct {
	List    []budget.Limit
	Typed   string // what the user typed; "" if these are others
	Refused bool   // these are the limits of refused commands on record
}

// Text is the form's text.
func (l limits) Text() string {
	if l.Typed != "" {
		return l.Typed
	}
	var texts []string
	for _, limit := range l.List {
		texts = append(texts, limitSource(limit))
	}
	return strings.Join(texts, ", ")
}

// limitsOf are the limits typed, or else those that the program knows, or else those of refusals on record. wrong is
// the fault of the typed ones.
func (h *Handler) limitsOf(ctx context.Context, in *inspect.Reader, scope, typed string) (l limits, wrong string, err error) {
	if strings.TrimSpace(typed) != "" {
		l.Typed = typed
		if l.List, err = parseLimits(typed); err != nil {
			return l, "The limits cannot be read: " + err.Error() + ".", nil
		}
		return l, "", nil
	}
	if h.cfg.Limits != nil {
		l.List = h.cfg.Limits(scope)
		l.List = l.List[:min(len(l.List), bounds.MaxLimits)]
	}
	if len(l.List) == 0 {
		l.List, err = in.RefusedLimits(ctx, scope)
		l.Refused = len(l.List) > 0
	}
	return l, "", err
}

// window is the length of a window, as it is typed.
func window(d time.Duration) string {
	if d%day == 0 && d > 0 {
		return fmt.Sprintf("%dd", d/day)
	}
	text := d.String()
	if strings.HasSuffix(text, "m0s") {
		text = strings.TrimSuffix(text, "0s")
	}
	if strings.HasSuffix(text, "h0m") {
		text = strings.TrimSuffix(text, "0m")
	}
	return text
}

// windowOf is a limit's window or period, as it is typed.
func windowOf(l budget.Limit) string {
	switch {
	case l.Lifetime:
		return "lifetime"
	case l.Prepaid:
		return "credit"
	case !l.Period.IsZero():
		return inspect.PeriodText(l.Period)
	}
	return window(l.Window)
}

// limitText names a limit to a reader.
func limitText(l budget.Limit) string {
	if l.Name != "" {
		return printable(l.Name)
	}
	return number(l.Max) + " / " + windowOf(l)
}

// limitSource is a limit as it is typed.
func limitSource(l budget.Limit) string {
	text := fmt.Sprintf("%d/%s", l.Max, windowOf(l))
	switch {
	case l.Name == "":
		return text
	case strings.ContainsAny(l.Name, `,="`) || strings.TrimSpace(l.Name) != l.Name || printable(l.Name) != l.Name:
		return strconv.Quote(l.Name) + "=" + text
	}
	return l.Name + "=" + text
}

// parseLimits reads the text of limitSource, separated by commas.
func parseLimits(text string) (list []budget.Limit, err error) {
	for rest := strings.TrimSpace(text); rest != ""; {
		var name, item string
		if rest[0] == '"' {
			quoted, err := strconv.QuotedPrefix(rest)
			if err != nil {
				return nil, errors.New("a name that begins with a quote does not end with one")
			}
			if name, err = strconv.Unquote(quoted); err != nil {
				return nil, err
			}
			var equals bool
			if rest, equals = strings.CutPrefix(strings.TrimSpace(rest[len(quoted):]), "="); !equals {
				return nil, fmt.Errorf("the name %q is not followed by =", name)
			}
		}
		item, rest, _ = strings.Cut(rest, ",")
		rest = strings.TrimSpace(rest)
		if name == "" {
			if before, after, found := strings.Cut(item, "="); found {
				name, item = strings.TrimSpace(before), after
			}
		}
		limit, err := parseLimit(strings.TrimSpace(item))
		if err != nil {
			return nil, err
		}
		limit.Name = name
		if list = append(list, limit); len(list) > bounds.MaxLimits {
			return nil, fmt.Errorf("there are more than %d limits", bounds.MaxLimits)
		}
	}
	return list, nil
}

// parseLimit reads units and a window or period: 1000/1h, 20000/30d, 500/lifetime, 0/credit, 9000/month@Europe/Berlin.
func parseLimit(item string) (budget.Limit, error) {
	units, length, found := strings.Cut(item, "/")
	if !found {
		return budget.Limit{}, fmt.Errorf("%q is not of the form units/window", item)
	}
	most, err := strconv.ParseInt(strings.TrimSpace(units), 10, 64)
	if err != nil || most < 0 || most > bounds.MaxLimit {
		return budget.Limit{}, fmt.Errorf("%q is not a number of units from 0 to 2^62", units)
	}
	length = strings.TrimSpace(length)
	if period, ok, err := inspect.ParsePeriod(length); ok {
		return budget.Limit{Max: most, Period: period}, err
	}
	switch length {
	case "lifetime":
		return budget.Lifetime(most), nil
	case "credit":
		return budget.Prepaid(most), nil
	}
	var w time.Duration
	if days, ok := strings.CutSuffix(length, "d"); ok {
		n, err := strconv.ParseUint(days, 10, 16)
		if err != nil {
			return budget.Limit{}, fmt.Errorf("%q is not a number of days", days)
		}
		w = time.Duration(n) * day
	} else if w, err = time.ParseDuration(length); err != nil {
		return budget.Limit{}, fmt.Errorf("%q is not a window such as 1h, 30d, lifetime or credit", length)
	}
	if w < time.Microsecond || w > bounds.MaxWindow || w%time.Microsecond != 0 {
		return budget.Limit{}, fmt.Errorf("the window %q is not from 1µs to a century, in whole microseconds", length)
	}
	return budget.Limit{Max: most, Window: w}, nil
}
