package console

import (
	"fmt"
	"html/template"
	"math"
	"strconv"
	"strings"
	"time"
	"unicode"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/inspect"
)

// functions are those of the templates.
func functions(zone *time.Location) template.FuncMap {
	return template.FuncMap{
		"name": printable, "middle": middle, "shortID": shortID, "number": numberOf, "rate": perSecond, "count": count,
		"span": span, "until": until,
		"length": length, "drawing": drawing, "window": window, "limit": limitText,
		"units": heldUnits, "session": inspect.IsSession, "period": each,
		"time": func(t time.Time) template.HTML { return timeHTML(t, zone) },
		"more": func(all, shown int) int { return all - shown },
		"next": func(seq int64) int64 { return seq + 1 },
	}
}

// each is how long a period is.
func each(p budget.Period) string {
	if p.Unit == "" {
		return window(p.Length)
	}
	return string(p.Unit)
}

// printable escapes invisible characters of a name, and those that change the direction of the text
// around it.
func printable(name any) string {
	text := fmt.Sprint(name)
	if text == "" {
		return "–"
	}
	var b strings.Builder
	for _, r := range text {
		if unicode.IsPrint(r) {
			b.WriteRune(r)
		} else {
			b.WriteString(strings.Trim(strconv.QuoteRune(r), "'"))
		}
	}
	return b.String()
}

const (
	nameShown = 36 // characters of a name in a table, as many as a UUID has
	idShown   = 20 // characters of an id in a table
)

// middle is a long name without its middle, and "" for a name that is short enough. Names differ at
// their ends.
func middle(name any) string { return cutTo(nameShown, name) }

// cutTo cuts the middle of a name that is longer than most characters.
func cutTo(most int, name any) string {
	text := []rune(printable(name))
	if len(text) <= most {
		return ""
	}
	return string(text[:most/2]) + "…" + string(text[len(text)-most/2+1:])
}

// shortID cuts an id, whose whole is on its own page: else the times beside it had two lines each.
func shortID(id any) string { return cutTo(idShown, id) }

// number has a thin space between thousands.
func number(n int64) string {
	digits, sign := strconv.FormatInt(n, 10), ""
	if n < 0 {
		sign, digits = "−", digits[1:]
	}
	var b strings.Builder
	for i, d := range digits {
		if i > 0 && (len(digits)-i)%3 == 0 {
			b.WriteRune('\u202f')
		}
		b.WriteRune(d)
	}
	return sign + b.String()
}

// numberOf is number for templates, which do not convert.
func numberOf(n any) (string, error) {
	switch n := n.(type) {
	case int64:
		return number(n), nil
	case int:
		return number(int64(n)), nil
	}
	return "", fmt.Errorf("%T is no number", n)
}

func perSecond(r float64) string {
	if r != 0 && r < 10 {
		return strconv.FormatFloat(r, 'f', 2, 64)
	}
	return number(int64(math.Round(r)))
}

func count(c inspect.Count) string {
	switch c.Kind {
	case inspect.Estimated:
		return "about " + brief(float64(c.N))
	case inspect.AtLeast:
		return "over " + number(c.N)
	case inspect.Unknown:
		return "not known"
	}
	return number(c.N)
}

// span is a duration, in its two greatest units.
func span(d time.Duration) string {
	switch {
	case d < 0:
		return "−" + span(-d)
	case d < time.Millisecond:
		return fmt.Sprintf("%d µs", d.Microseconds())
	case d < time.Second:
		return fmt.Sprintf("%d ms", d.Milliseconds())
	case d < 10*time.Second:
		return fmt.Sprintf("%.1f s", d.Seconds())
	case d < time.Minute:
		return fmt.Sprintf("%d s", d/time.Second)
	case d < time.Hour:
		return fmt.Sprintf("%d min %d s", d/time.Minute, d%time.Minute/time.Second)
	case d < day:
		return fmt.Sprintf("%d h %d min", d/time.Hour, d%time.Hour/time.Minute)
	}
	return fmt.Sprintf("%d d %d h", d/day, d%day/time.Hour)
}

const day = 24 * time.Hour

// length is a window as one speaks of it.
func length(d time.Duration) string {
	switch d {
	case time.Minute:
		return "minute"
	case time.Hour:
		return "hour"
	case day:
		return "day"
	}
	return window(d)
}

func until(now, then time.Time) string {
	if d := then.Sub(now); d > 0 {
		return "in " + span(d)
	} else {
		return span(-d) + " ago"
	}
}

func timeHTML(t time.Time, zone *time.Location) template.HTML {
	if t.IsZero() {
		return "–"
	}
	const layout = "2006-01-02 15:04:05"
	return template.HTML(fmt.Sprintf(`<time datetime="%s">%s</time>`,
		t.UTC().Format(time.RFC3339Nano), t.In(zone).Format(layout)))
}

// drawing is the address of a variant of a drawing. The template would cut a list of addresses at
// commas, and escape nothing: the address has its query escaped already.
func drawing(address string, variants ...string) template.Srcset {
	for _, v := range variants {
		address += "&" + v + "=1"
	}
	return template.Srcset(address)
}

// heldUnits are the units of all lines of a hold.
func heldUnits(h holds.Hold) (n int64) {
	for _, line := range h.Lines {
		n += line.Amount
	}
	return n
}
