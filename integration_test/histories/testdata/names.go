package main

import (
	"time"

	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/leases"
	"github.com/pgmetered/metered/wallet"
)

// The names of the release before, for ../names.go.

type placement = holds.Request

func ending(g wallet.Grant, after time.Duration) wallet.Grant {
	g.For = after
	return g
}

func least(r leases.Rule, slice int64) leases.Rule {
	r.Least = slice
	return r
}
