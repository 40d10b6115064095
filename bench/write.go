package main

import (
	"fmt"
	"math"
	"os"
	"regexp"
	"strconv"
	"strings"
)

// pages quote figures. The first one has the table of them, too.
var pages = []string{"README.md", "../README.md", "../docs/scale.md", "../docs/feed.md"}

// quoted is a value in a page, behind a comment that says which one it is:
//
//	<!--charge_vs_floor-->0.557                  a figure
//	<!--1/command_vs_counter_row-->2.3           how many times as long
//	<!--charge_vs_floor:metered-->4,200          calls a second of a contender
//	<!--batch_64_vs_single:each_64*64-->56,000   the same for 64 charges a call
//	<!--charge_vs_floor:metered:cpu-->240        microseconds of its backends' CPU
var quoted = regexp.MustCompile(`<!--(1/)?([a-z]\w+)(?::([a-z0-9_]+)(:cpu|\*\d+)?)?-->([0-9]+(?:,[0-9]{3})*(?:\.[0-9]+)?)`)

// row is a figure in the table: its name, value and spread.
var row = regexp.MustCompile(`(?m)^\| ([a-z]\w+) \| ([^|]*) \| ?([^|]*) ?\|`)

// about is what the table was measured on.
var about = regexp.MustCompile(`(?s)<!--run-->.*?<!--end-->`)

// write puts the values of a run into the pages, and leaves what was not measured. on is what all figures were measured on, or "" if some were not.
func write(results []result, on string) error {
	measured := map[string]result{}
	for _, r := range results {
		if len(r.values) > 0 {
			measured[r.name] = r
		}
	}
	for _, page := range pages {
		text, err := os.ReadFile(page)
		if err != nil {
			return err
		}
		out := quoted.ReplaceAllStringFunc(string(text), func(all string) string {
			m := quoted.FindStringSubmatch(all)
			r, ok := measured[m[2]]
			if !ok {
				return all
			}
			value := r.quote(m)
			return strings.TrimSuffix(all, m[5]) + value
		})
		if page == "README.md" {
			out = row.ReplaceAllStringFunc(out, func(all string) string {
				r, ok := measured[row.FindStringSubmatch(all)[1]]
				if !ok {
					return all
				}
				value := r.value()
				if r.verdict() == "NO" {
					value = "**" + value + "**"
				}
				return fmt.Sprintf("| %s | %s | %s |", r.name, value, r.spread())
			})
			if on != "" {
				out = about.ReplaceAllLiteralString(out, "<!--run-->"+on+"<!--end-->")
			}
		}
		if err := os.WriteFile(page, []byte(out), 0o644); err != nil {
			return err
		}
	}
	return nil
}

// quote is what a page says of a result: m is a match of quoted.
func (r result) quote(m []string) string {
	if m[3] == "" {
		return quote(m[1], r.value())
	}
	for _, p := range r.where {
		if strings.ReplaceAll(p.contender, " ", "_") != m[3] {
			continue
		}
		if m[4] == ":cpu" {
			return thousands(p.backendMicros, 2)
		}
		times, err := strconv.Atoi(strings.TrimPrefix(m[4], "*"))
		if err != nil {
			times = 1
		}
		return thousands(float64(times)*p.rate, 3)
	}
	return m[5]
}

// quote is what a page says of a value of the table.
func quote(inverse, value string) string {
	if inverse == "" {
		return value
	}
	v, err := strconv.ParseFloat(value, 64)
	if err != nil || v == 0 {
		return value
	}
	return fmt.Sprintf("%.1f", 1/v)
}

// thousands is v with some digits that count, and a comma behind thousands.
func thousands(v float64, digits int) string {
	if v < 1 {
		return fmt.Sprintf("%.2g", v)
	}
	unit := math.Pow(10, max(0, math.Floor(math.Log10(v))+1-float64(digits)))
	text := fmt.Sprintf("%.0f", math.Round(v/unit)*unit)
	for i := len(text) - 3; i > 0; i -= 3 {
		text = text[:i] + "," + text[i:]
	}
	return text
}
