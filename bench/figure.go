package main

import (
	"context"
	"fmt"
	"io"
	"slices"
	"strings"
	"text/tabwriter"
)

// figure is one thing that is measured. To add one, append it to a list that
// figures names.
type figure struct {
	name    string
	meaning string
	unit    string
	goal    goal
	measure func(context.Context, *bench) (samples, error)
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

// samples are the values of all rounds, in the figure's unit. For a ratio each is that of one round.
type samples struct {
	values []float64
	note   string    // a remark beside the value
	notRun string    // why there is no value
	where  []profile // where the time went, of each contender
}

// result is a figure with its value, as results.json holds it.
type result struct {
	Name    string    `json:"name"`
	Value   *float64  `json:"value"` // the median of Rounds, null if it was not run
	Unit    string    `json:"unit"`
	Goal    string    `json:"goal"`
	Met     bool      `json:"met"`
	Spread  []float64 `json:"spread,omitempty"` // the least, the quartiles and the most of Rounds
	Rounds  []float64 `json:"rounds,omitempty"`
	Meaning string    `json:"meaning"`
	Note    string    `json:"note,omitempty"`
	NotRun  string    `json:"not_run,omitempty"`
	Where   []profile `json:"where,omitempty"`
}

func (f figure) result(s samples) result {
	r := result{
		Name: f.name, Unit: f.unit, Goal: f.goal.String(), Meaning: f.meaning,
		Note: s.note, NotRun: s.notRun, Where: s.where, Rounds: s.values,
	}
	if len(s.values) == 0 {
		return r
	}
	value := median(s.values)
	r.Value, r.Met = &value, f.goal.met(value)
	for _, q := range []float64{0, 0.25, 0.75, 1} {
		r.Spread = append(r.Spread, quantile(s.values, q))
	}
	return r
}

// value is the value as text.
func (r result) value() string {
	if r.Value == nil {
		return "not run"
	}
	return number(*r.Value)
}

// spread is between which values the middle half of the rounds lies.
func (r result) spread() string {
	if len(r.Rounds) < 2 {
		return ""
	}
	return number(r.Spread[1]) + " … " + number(r.Spread[2])
}

func (r result) verdict() string {
	switch {
	case r.Value == nil:
		return "not run"
	case r.Goal == "none":
		return ""
	case r.Met:
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

// pick returns the figures with the names in a comma-separated list, in that order, or all of them if the list is
// empty.
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
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%s\t%s\t\n", r.Name, r.value(), r.Unit, r.spread(), r.Goal, r.verdict())
	}
	t.Flush()
	for _, r := range results {
		for _, text := range []string{r.NotRun, r.Note} {
			if text != "" {
				fmt.Fprintf(w, "  %s: %s\n", r.Name, text)
			}
		}
	}
}

func printMisses(w io.Writer, results []result) {
	missed := slices.DeleteFunc(slices.Clone(results), func(r result) bool { return r.Met || r.Value == nil })
	if len(missed) == 0 {
		fmt.Fprintln(w, "\nNo goal that was measured is missed.")
		return
	}
	fmt.Fprintln(w, "\nGoals missed, and where the time went:")
	for _, r := range missed {
		fmt.Fprintf(w, "\n%s: %s %s, goal %s (%s)\n", r.Name, r.value(), r.Unit, r.Goal, r.Meaning)
		if r.Note != "" {
			fmt.Fprintf(w, "    %s\n", r.Note)
		}
		for _, p := range r.Where {
			fmt.Fprintf(w, "    %s\n", p)
		}
	}
}

// figures are measured in this order.
var figures = slices.Concat(
	chargeFigures, thresholdFigures, batchFigures, windowFigures, walletFigures, commandFigures, leaseFigures, allowFigures, pieceFigures, holdFigures, seatFigures, carveFigures, observerFigures, pageFigures, // with goals
)
