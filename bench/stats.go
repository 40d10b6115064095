package main

import (
	"math"
	"slices"
)

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
