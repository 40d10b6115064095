package main

import (
	"fmt"
	"math"
	"runtime"
	"strings"
)

// cause says why a goal was missed, from what its run measured: where the time of each
// contender went, or what the figure counted itself. The first contender is what was to
// be fast, the second what it was compared with.
func cause(g goal, s samples) string {
	var b strings.Builder
	if s.counted != "" {
		fmt.Fprintln(&b, s.counted)
	}
	for _, p := range s.where {
		fmt.Fprintln(&b, p)
	}
	if len(s.where) > 1 {
		if lag := lag(s.where[0], s.where[1]); lag < 0 && g.op == ">=" && g.bound > 1 {
			b.WriteString(distance(g, s.where))
		} else {
			b.WriteString(difference(lag, s.where[0], s.where[1]))
		}
	}
	if len(s.parts) > 0 {
		fmt.Fprintf(&b, "inside %s, one client, apart from the comparison (functions by track_functions, without what they call; "+
			"statements that call none of these by auto_explain):\n", s.where[0].Contender)
		for _, p := range s.parts {
			fmt.Fprintln(&b, "  "+p.String())
		}
	}
	if b.Len() == 0 {
		return "unknown: nothing was counted beside the value\n"
	}
	return b.String()
}

// lag is how many microseconds an op of a takes more than one of b, the median of
// the rounds, as the value is: a mean over all ops may point the other way.
func lag(a, b profile) float64 {
	var micros []float64
	for i := range min(len(a.rates), len(b.rates)) {
		micros = append(micros, 1e6/a.rates[i]-1e6/b.rates[i])
	}
	return median(micros)
}

// cpu is what an op uses on both sides of the connection, as far as it is known.
func (p profile) cpu() float64 {
	if p.BackendMicros == nil {
		return p.ClientMicros
	}
	return p.ClientMicros + *p.BackendMicros
}

// distance is for one that is ahead of what it is compared with, but not far enough: what
// its own op takes, against what it may take.
func distance(g goal, where []profile) string {
	a, b := where[0], where[1]
	need := g.bound * b.Rate
	text := fmt.Sprintf("%s is ahead of %s, but %g times that is %s/s, one op each %.0f µs (all clients together); it takes %.0f µs",
		a.Contender, b.Contender, g.bound, number(need), 1e6/need, 1e6/a.Rate)
	text += fmt.Sprintf(", and its CPU is %.0f µs: on %d cores %.0f µs if none of them ever waits", a.cpu(), runtime.NumCPU(), a.cpu()/float64(runtime.NumCPU()))
	for _, p := range where[2:] {
		if strings.Contains(p.Contender, "floor") {
			text += fmt.Sprintf("; %s makes %s/s", p.Contender, number(p.Rate))
		}
	}
	return text + "\n"
}

// difference weighs CPU against time: on so many cores, CPU that both sides of the
// connection use more bounds the rate.
func difference(lag float64, a, b profile) string {
	text := fmt.Sprintf("%s takes %+.0f µs an op more than %s (all clients together, median of the rounds)", a.Contender, lag, b.Contender)
	text += fmt.Sprintf("; over all ops: %+.0f µs CPU in this program", a.ClientMicros-b.ClientMicros)
	if a.BackendMicros != nil && b.BackendMicros != nil {
		text += fmt.Sprintf(", %+.0f µs CPU in the backends", *a.BackendMicros-*b.BackendMicros)
	}
	text += fmt.Sprintf(" (on %d cores), %+.0f bytes of WAL", runtime.NumCPU(), a.WALBytes-b.WALBytes)
	event, share := "", 0.02
	for e := range a.Waits {
		if d := a.Waits[e] - b.Waits[e]; math.Abs(d) > math.Abs(share) {
			event, share = e, d
		}
	}
	if event != "" {
		text += fmt.Sprintf("; the share of \"%s\" differs most, by %+.0f points", event, 100*share)
	}
	if lag*(a.cpu()-b.cpu()) < 0 {
		text += "; the CPU goes the other way, so it is not what made the difference"
	}
	return text + "\n"
}
