package main

import (
	"context"
	"math"
)

// factorize finds the prime factors of n, from 2 up, by trying. It counts its divisions. ctx may end it before.
func factorize(ctx context.Context, n int64) (factors []int64, divisions int64, err error) {
	for d := int64(2); d <= n/d; divisions++ {
		if divisions%(1<<20) == 0 && ctx.Err() != nil {
			return nil, divisions, context.Cause(ctx)
		}
		switch {
		case n%d == 0:
			factors = append(factors, d)
			n /= d
		case d == 2:
			d = 3
		default:
			d += 2
		}
	}
	return append(factors, n), divisions, nil
}

// atMost bounds the divisions of factorize: it tries 2 and the odd numbers to the root, and each divisor again.
func atMost(n int64) int64 { return int64(math.Sqrt(float64(n)))/2 + 64 }

// units are the cost of divisions: 1 for each 1000 begun.
func units(divisions int64) int64 { return max(1, (divisions+999)/1000) }
