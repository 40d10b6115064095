package main

import (
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
)

// What is said otherwise in the build before: see testdata/rolling_before.

func lifetime(max int64) budget.Limit { return budget.Lifetime(max) }

func all(c holds.Capture) holds.Capture {
	c.All = true
	return c
}

func refundAll(id string) holds.Refund { return holds.Refund{IDs: []string{id}, All: true} }
