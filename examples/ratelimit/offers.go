package main

import (
	"encoding/json"
	"net/http"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/httpmetered"
	"github.com/pgmetered/metered/leases"
)

// looks is the limit of all clients together.
var looks = []budget.Limit{budget.PerWindow(300_000, time.Hour).Named("looks")}

// offers limits GET /offers, a public look that writes nothing. The limit is decided from memory, by leases of this
// process: as exact as a charge, in nanoseconds. The price: the slice of a killed process counts as used.
type offers struct {
	leases  *leases.Pool
	limited func(http.Handler) http.Handler
}

func newOffers(pool *pgxpool.Pool) (*offers, error) {
	ledger, err := budget.New(budget.Config{})
	if err != nil {
		return nil, err
	}
	p, err := leases.New(pool, ledger, leases.Config{Rules: []leases.Rule{{Prefix: "offers/"}}})
	if err != nil {
		return nil, err
	}
	limited, err := httpmetered.LimitLeased(p, httpmetered.LimitConfig{Kind: "offers", Shared: looks})
	return &offers{p, limited}, err
}

func serveOffers(w http.ResponseWriter, _ *http.Request) {
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode([]string{"WELCOME", "SUMMER"})
}
