package httpmetered

import (
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/pgmetered/metered/budget"
)

// The fields, in the spelling of net/http.
const (
	fieldPolicy = "Ratelimit-Policy"
	fieldLimit  = "Ratelimit"
)

// Show sets RateLimit-Policy, and RateLimit to the units left after a charge:
//
//	RateLimit-Policy: "burst";q=10;w=1, "daily";q=1000;w=86400
//	RateLimit: "burst";r=9;t=1, "daily";r=420;t=86400
//
// t is the whole window, or the rest of a period. RateLimit has the receipt's policies alone. With
// several scopes the smallest remainder counts. Members of other policies in the fields stay.
func (p *Policies) Show(h http.Header, receipt budget.Receipt) {
	left := map[string]service{}
	for _, entry := range receipt.Entries {
		for _, s := range entry.Standings {
			within := s.Limit.Window
			if !s.PeriodEnd.IsZero() {
				within = max(untilEnd(s, entry.At), 1)
			}
			add(left, s.Limit.Name, service{s.Available, within})
		}
	}
	p.show(h, left)
}

// untilEnd is the rest of a standing's period, from its charge on, or from now for a check.
func untilEnd(s budget.Standing, at time.Time) time.Duration {
	if at.IsZero() {
		return time.Until(s.PeriodEnd)
	}
	return s.PeriodEnd.Sub(at)
}

// ShowRefusal sets both fields for a refusal: r is the units that would have fitted, and t the time
// until the amount fits, left out if waiting does not help.
func (p *Policies) ShowRefusal(h http.Header, e *budget.ExceededError) {
	e = orNothing(e)
	left := map[string]service{}
	for _, r := range e.Refusals {
		wait := max(r.RetryAfter, 1)
		if r.RetryAfter == budget.Never || r.Limit.Prepaid {
			wait = 0
		}
		add(left, r.Limit.Name, service{r.Available, wait})
	}
	p.show(h, left)
}

// service is a policy's service limit: so much within a time, or for ever.
type service struct {
	available int64
	within    time.Duration // 0 for none
}

// add merges the services of one policy into one that holds for all of them: the least remainder,
// and the longest time, unless one is for ever.
func add(left map[string]service, name string, s service) {
	if before, ok := left[name]; ok {
		ever := s.within == 0 || before.within == 0
		s = service{min(s.available, before.available), max(s.within, before.within)}
		if ever {
			s.within = 0
		}
	}
	left[name] = s
}

// orNothing makes a refusal that is nil one that names nothing.
func orNothing(e *budget.ExceededError) *budget.ExceededError {
	if e == nil {
		return &budget.ExceededError{}
	}
	return e
}

// show sets the members of p's policies, and leaves those that others have set, such as a Limit in
// front of the handler.
func (p *Policies) show(h http.Header, left map[string]service) {
	if p == nil {
		p = &Policies{}
	}
	var items []string
	mine := map[string]bool{}
	for _, policy := range p.shown {
		mine[policy.item+p.key] = true
		s, ok := left[policy.name]
		if !ok {
			continue
		}
		item := policy.item + ";r=" + integer(s.available)
		if s.within > 0 {
			item += ";t=" + seconds(s.within)
		}
		items = append(items, item+p.key)
	}
	others := func(item string) bool { return mine[policyOf(item)] }
	setList(h, fieldPolicy, append(slices.DeleteFunc(members(h[fieldPolicy]), others), p.header))
	setList(h, fieldLimit, append(slices.DeleteFunc(members(h[fieldLimit]), others), items...))
}

// addShown adds the fields of an answer to those that are set already. Of a policy that is in both
// the latest numbers stay: those of the answer, unless it is a replay.
func addShown(h, answer http.Header, replayed bool) {
	for _, field := range []string{fieldPolicy, fieldLimit} {
		before, after := members(h[field]), members(answer[field])
		if replayed {
			before, after = after, before
		}
		again := map[string]bool{}
		for _, item := range after {
			again[policyOf(item)] = true
		}
		setList(h, field, append(slices.DeleteFunc(before,
			func(item string) bool { return again[policyOf(item)] }), after...))
	}
}

// setList sets a field to a list of structured fields. An empty one is no field.
func setList(h http.Header, field string, items []string) {
	items = slices.DeleteFunc(items, func(item string) bool { return item == "" })
	if len(items) == 0 {
		h.Del(field)
		return
	}
	h.Set(field, strings.Join(items, ", "))
}

// members splits a field, a List of structured fields (RFC 9651, 3.1), into its members. One that
// ends within a String is none: whatever follows it would be a part of the String.
func members(lines []string) (items []string) {
	list := strings.Join(lines, ",")
	if parts, ok := cut(list, ','); ok {
		for _, item := range parts {
			items = append(items, strings.Trim(item, " \t"))
		}
	}
	return items
}

// policyOf is the name of a member and its partition key, as both are written. Equal names with
// other keys are other policies.
func policyOf(item string) string {
	parts, _ := cut(item, ';')
	name := strings.Trim(parts[0], " \t")
	for _, param := range parts[1:] {
		if param = strings.Trim(param, " \t"); strings.HasPrefix(param, "pk=") {
			return name + ";" + param
		}
	}
	return name
}

// cut splits a text at a mark outside of Strings. It is not ok if the text ends within one.
func cut(text string, mark byte) (parts []string, ok bool) {
	begin, within := 0, false
	for i := 0; i < len(text); i++ {
		switch c := text[i]; {
		case within && c == '\\':
			i++
		case c == '"':
			within = !within
		case c == mark && !within:
			parts, begin = append(parts, text[begin:i]), i+1
		}
	}
	return append(parts, text[begin:]), !within
}
