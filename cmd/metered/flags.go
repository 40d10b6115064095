package main

import (
	"fmt"
	"strings"
	"time"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/internal/inspect"
)

// days is a flag of a duration that may be in days.
type days time.Duration

func (d *days) String() string { return lasting(time.Duration(*d)) }
func (d *days) Type() string   { return "duration" }
func (d *days) Set(text string) error {
	parsed, err := inspect.ParseDuration(text)
	*d = days(parsed)
	return err
}

// moment is a flag of a time.
type moment struct{ time.Time }

func (m *moment) String() string {
	if m.IsZero() {
		return ""
	}
	return m.Format(time.RFC3339Nano)
}
func (m *moment) Type() string { return "time" }
func (m *moment) Set(text string) (err error) {
	m.Time, err = parseTime(text, time.UTC)
	return err
}

// parseTime parses RFC 3339, and dates and times of day in a place.
func parseTime(text string, in *time.Location) (time.Time, error) {
	for _, layout := range []string{time.RFC3339Nano, "2006-01-02T15:04:05", "2006-01-02 15:04:05",
		"2006-01-02T15:04", "2006-01-02 15:04", time.DateOnly} {
		if t, err := time.ParseInLocation(layout, text, in); err == nil {
			return t, nil
		}
	}
	return time.Time{}, fmt.Errorf("%q is not a time such as 2026-11-23 or 2026-11-23T20:15:00Z",
		text)
}

const limitsHelp = "a limit: " + inspect.LimitForms + ", or, with its name, hourly=1000/1h"

// limits is a flag of limits.
type limits []budget.Limit

func (l *limits) String() string { return "" }
func (l *limits) Type() string   { return "limit" }
func (l *limits) Set(text string) error {
	limit, err := parseLimit(text)
	*l = append(*l, limit)
	return err
}

// scopeLimits is a flag of limits, each for the scopes that begin with a prefix.
type scopeLimits []scopeLimit

type scopeLimit struct {
	prefix string
	limit  budget.Limit
}

func (l *scopeLimits) String() string { return "" }
func (l *scopeLimits) Type() string   { return "limit" }
func (l *scopeLimits) Set(text string) error {
	prefix, rule, some := strings.Cut(text, "* ")
	if !some {
		prefix, rule = "", text
	}
	limit, err := parseLimit(rule)
	*l = append(*l, scopeLimit{prefix, limit})
	return err
}

// of returns the limits of a scope.
func (l scopeLimits) of(scope string) (list []budget.Limit) {
	for _, x := range l {
		if strings.HasPrefix(scope, x.prefix) {
			list = append(list, x.limit)
		}
	}
	return list
}

func parseLimit(text string) (budget.Limit, error) {
	name, rule, named := strings.Cut(text, "=")
	if !named {
		name, rule = "", text
	}
	limit, err := inspect.ParseLimit(rule)
	if err != nil {
		return budget.Limit{}, fmt.Errorf("%q: %w: want %s", text, err, limitsHelp)
	}
	return limit.Named(name), nil
}
