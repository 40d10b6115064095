package main

import (
	"context"
	"fmt"
	"io"
	"math"
	"slices"
	"strings"
	"text/tabwriter"
)

// figure is one thing that is measured. To add one, append it to a list that figures names.
type figure struct {
	name, unit string
	goal       goal
	meaning    string
	measure    func(context.Context, *bench) (samples, error)
}

// goal is the bound of a value. The zero goal is none: the value is only reported.
type goal struct {
	op    string
	bound float64
}

func atLeast(bound float64) goal { return goal{">=", bound} }
func atMost(bound float64) goal  { return goal{"<=", bound} }

func (g goal) String() string {
	if g.op == "" {
		return "none"
	}
	return fmt.Sprintf("%s %g", g.op, g.bound)
}

func (g goal) met(value float64) bool {
	switch g.op {
	case ">=":
		return value >= g.bound
	case "<=":
		return value <= g.bound
	case "=":
		return value == g.bound
	}
	return true
}

// samples are the values of all rounds, in the figure's unit. For a ratio each is that of one
// round.
type samples struct {
	values []float64
	note   string    // a remark beside the value
	notRun notRun    // why there is no value
	where  []profile // where the time went, of each contender
}

// notRun is why there is no value. A figure that returns it did not fail.
type notRun string

func (why notRun) Error() string { return string(why) }

// result is a figure with its samples.
type result struct {
	figure
	samples
}

// value is the median of the rounds as text.
func (r result) value() string {
	if len(r.values) == 0 {
		return "not run"
	}
	return number(median(r.values))
}

// spread is between which values the middle half of the rounds lies.
func (r result) spread() string {
	if len(r.values) < 2 {
		return ""
	}
	return number(quantile(r.values, 0.25)) + " … " + number(quantile(r.values, 0.75))
}

// verdict is whether the goal is met: yes, NO, or nothing without a goal.
func (r result) verdict() string {
	switch {
	case len(r.values) == 0:
		return "not run"
	case r.goal.op == "":
		return ""
	case r.goal.met(median(r.values)):
		return "yes"
	}
	return "NO"
}

// number is v with three digits that count.
func number(v float64) string {
	switch {
	case v == 0 || v >= 1000:
		return fmt.Sprintf("%.0f", v)
	case v >= 100:
		return fmt.Sprintf("%.4g", v)
	}
	return fmt.Sprintf("%.3g", v)
}

// pick returns the figures with the names in a comma-separated list, in that order, or all of them
// if the list is empty.
func pick(all []figure, names string) ([]figure, error) {
	if names == "" {
		return all, nil
	}
	var picked []figure
	for name := range strings.SplitSeq(names, ",") {
		i := slices.IndexFunc(all, func(f figure) bool { return f.name == strings.TrimSpace(name) })
		if i < 0 {
			return nil, fmt.Errorf("no figure is called %q: -list shows all", name)
		}
		picked = append(picked, all[i])
	}
	return picked, nil
}

func printTable(w io.Writer, results []result) {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "figure\tvalue\tunit\tmiddle half\tgoal\tmet\t")
	for _, r := range results {
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%s\t%s\t\n", r.name, r.value(), r.unit, r.spread(), r.goal, r.verdict())
	}
	t.Flush()
	for _, r := range results {
		if text := string(r.notRun) + r.note; text != "" {
			fmt.Fprintf(w, "  %s: %s\n", r.name, text)
		}
	}
}

func printMisses(w io.Writer, results []result) {
	fmt.Fprintln(w, "\nGoals missed, and where the time went:")
	for _, r := range results {
		if r.verdict() != "NO" {
			continue
		}
		fmt.Fprintf(w, "\n%s: %s %s, goal %s (%s)\n", r.name, r.value(), r.unit, r.goal, r.meaning)
		for _, p := range r.where {
			fmt.Fprintf(w, "    %s\n", p)
		}
	}
}

// figures are measured in this order.
var figures = slices.Concat(chargeFigures, snapshotFigures, thresholdFigures, batchFigures, windowFigures, walletFigures, dueFigures, commandFigures, leaseFigures,
	allowFigures, feedFigures, pieceFigures, parkedFigures, holdFigures, seatFigures, carveFigures, observerFigures, pageFigures)

// median returns 0 of nothing.
func median(values []float64) float64 { return quantile(values, 0.5) }

// quantile interpolates between the two values next to it.
func quantile(values []float64, q float64) float64 {
	if len(values) == 0 {
		return 0
	}
	sorted := slices.Sorted(slices.Values(values))
	at := q * float64(len(sorted)-1)
	below := int(math.Floor(at))
	if below+1 == len(sorted) {
		return sorted[below]
	}
	return sorted[below] + (at-float64(below))*(sorted[below+1]-sorted[below])
}

// ratios divides round by round, so that a disturbance of a whole round cancels out.
func ratios(a, b []float64) []float64 {
	out := make([]float64, min(len(a), len(b)))
	for i := range out {
		out[i] = a[i] / b[i]
	}
	return out
}
