package main

import (
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
)

func lifetime(max int64) budget.Limit { return budget.Limit{Max: max} }

func all(c holds.Capture) holds.Capture { return c }

func refundAll(id string) holds.Refund { return holds.Refund{IDs: []string{id}} }
