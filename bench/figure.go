package main

import (
	"context"
	"fmt"
	"io"
	"slices"
	"text/tabwriter"
)

// figure is one thing that is measured, with a goal.
type figure struct {
	name    string
	meaning string
	unit    string
	atMost  float64 // the goal
	measure func(context.Context, *bench) (samples, error)
}

// samples are the values of all rounds. What they are measured in is up to the
// figure; for a ratio each is that of one round.
type samples struct {
	values []float64
	note   string // what the reader should know beside the value
}

// result is a figure with its value, as results.json holds it.
type result struct {
	Name    string    `json:"name"`
	Value   float64   `json:"value"` // the median of Rounds
	Unit    string    `json:"unit"`
	Goal    string    `json:"goal"`
	Met     bool      `json:"met"`
	Rounds  []float64 `json:"rounds"`
	Meaning string    `json:"meaning"`
	Note    string    `json:"note,omitempty"`
}

func (f figure) result(s samples) result {
	value := median(s.values)
	return result{
		Name: f.name, Value: value, Unit: f.unit, Goal: fmt.Sprintf("<= %g", f.atMost), Met: value <= f.atMost,
		Rounds: s.values, Meaning: f.meaning, Note: s.note,
	}
}

func median(values []float64) float64 {
	sorted := slices.Sorted(slices.Values(values))
	n := len(sorted)
	if n == 0 {
		return 0
	}
	return (sorted[(n-1)/2] + sorted[n/2]) / 2
}

func printTable(w io.Writer, results []result) {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "figure\tvalue\tspread\tgoal\tmet\t")
	for _, r := range results {
		fmt.Fprintf(t, "%s\t%.3f %s\t%.3f … %.3f\t%s\t%v\t%s\n",
			r.Name, r.Value, r.Unit, slices.Min(r.Rounds), slices.Max(r.Rounds), r.Goal, r.Met, r.Note)
	}
	t.Flush()
}
