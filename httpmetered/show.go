package httpmetered

import (
	"net/http"
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
// several scopes the smallest remainder counts.
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

func (p *Policies) show(h http.Header, left map[string]service) {
	if p == nil {
		p = &Policies{}
	}
	h.Del(fieldPolicy)
	h.Del(fieldLimit)
	if p.header != "" { // an empty list is no field
		h.Set(fieldPolicy, p.header)
	}
	var items []string
	for _, policy := range p.shown {
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
	if len(items) > 0 {
		h.Set(fieldLimit, strings.Join(items, ", "))
	}
}
