package main

import (
	"time"

	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/leases"
	"github.com/pgmetered/metered/wallet"
)

// The release before has other names for these: testdata/names.go is compiled into its programs.

type placement = holds.Placement

func ending(g wallet.Grant, after time.Duration) wallet.Grant {
	g.Ends = wallet.After(after)
	return g
}

func least(r leases.Rule, slice int64) leases.Rule {
	r.MinSlice = slice
	return r
}
