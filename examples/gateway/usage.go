package main

import (
	"encoding/json"
	"net/http"
	"time"

	"github.com/pgmetered/metered/budget"
)

// standing is the state of a level's limit.
type standing struct {
	Account string     `json:"account"`
	Limit   string     `json:"limit"`
	Used    int64      `json:"used"`
	Held    int64      `json:"held"` // by requests that are under way
	Max     int64      `json:"max"`  // of credit: granted units less lapsed ones
	Until   *time.Time `json:"until,omitempty"`
}

// usage answers the state of all the limits that a key's requests must keep, from one snapshot.
func (g *gateway) usage(w http.ResponseWriter, r *http.Request) error {
	c, err := g.caller(r)
	if err != nil {
		return err
	}
	var queries []budget.Query
	var all []standing
	for _, m := range c.measures() {
		for _, l := range m.limits {
			all = append(all, standing{Account: m.account, Limit: l.Name, Max: l.Max})
			queries = append(queries, budget.Query{Scope: m.scope, Window: l.Window, Period: l.Period})
		}
	}
	usages, err := g.metered.Budget.Usage(r.Context(), g.pool, queries...)
	if err != nil {
		return err
	}
	for i, u := range usages {
		all[i].Used, all[i].Held = u.Used, u.Held
		if all[i].Limit == "credit" {
			all[i].Used, all[i].Max = u.Used+u.Credited, all[i].Max+u.Credited
		}
		if !u.PeriodEnd.IsZero() {
			all[i].Until = &u.PeriodEnd
		}
	}
	return answer(w, all)
}

func answer(w http.ResponseWriter, body any) error {
	w.Header().Set("Content-Type", "application/json")
	return json.NewEncoder(w).Encode(body)
}
