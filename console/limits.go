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

// limitsOf are the limits typed, or else those that the program knows, or else those of refusals on
// record. wrong is the fault of the typed ones.
func (h *Handler) limitsOf(ctx context.Context, in *inspect.Reader, scope,
	typed string) (l limits, wrong string, err error) {
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
func window(d time.Duration) string { return inspect.DurationText(d) }

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
	if l.Prepaid {
		return inspect.LimitText(l)
	}
	return number(l.Max) + " / " + windowOf(l)
}

// limitSource is a limit as it is typed.
func limitSource(l budget.Limit) string {
	text := inspect.LimitText(l)
	switch {
	case l.Name == "":
		return text
	case strings.ContainsAny(l.Name, `,="`) || strings.TrimSpace(l.Name) != l.Name ||
		printable(l.Name) != l.Name:
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
			if rest, equals = strings.CutPrefix(strings.TrimSpace(rest[len(quoted):]),
				"="); !equals {
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
		limit, err := inspect.ParseLimit(item)
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
