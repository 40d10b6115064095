package main

import (
	"encoding/json"
	"net/http"
	"time"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
)

// dollar is a dollar in the unit of money, micro-dollars.
const dollar = 1_000_000

// price is the price of a model, in micro-dollars per token.
type price struct{ prompt, completion int64 }

var prices = map[string]price{"small": {1, 4}, "large": {10, 30}}

func (p price) of(u usage) int64 { return p.prompt*u.Prompt + p.completion*u.Completion }

// atMost is the largest use of a request. A token has at least one byte.
func (r chat) atMost() usage {
	u := usage{Completion: r.MaxTokens}
	for _, m := range r.Messages {
		u.Prompt += int64(len(m.Content))
	}
	return u
}

// credit is an organisation's wallet, which has its spending. money is the spending of an account below it.
func credit(organisation string) string { return budget.ScopeKey("credit", organisation, "") }
func money(account string) string       { return budget.ScopeKey("money", account, "") }

// measure is a scope that a request uses, and must keep the limits of.
type measure struct {
	account, unit string // unit: money, tokens or requests
	scope         string
	limits        []budget.Limit
}

// measures are those of all levels. The spending of each is measured, whether it has a limit or not.
func (c *caller) measures() (all []measure) {
	for i, a := range c.levels {
		spent := measure{a.ID, "money", money(a.ID), nil}
		if i == 0 {
			spent.scope, spent.limits = credit(a.ID), []budget.Limit{c.credit}
		}
		if a.Monthly != nil {
			spent.limits = append(spent.limits, budget.Per(*a.Monthly, budget.Month, c.zone, time.Time{}).Named(a.Level+"-monthly"))
		}
		all = append(all, spent)
		perMinute := func(unit string, most *int64) {
			if most != nil {
				limit := budget.PerWindow(*most, time.Minute).Named(a.Level + "-" + unit)
				all = append(all, measure{a.ID, unit, budget.ScopeKey(unit, a.ID, ""), []budget.Limit{limit}})
			}
		}
		perMinute("tokens", a.TokensPerMinute)
		perMinute("requests", a.RequestsPerMinute)
	}
	return all
}

// lines are the money and tokens of a use.
func (c *caller) lines(p price, u usage) (lines []holds.Line) {
	for _, m := range c.measures() {
		switch m.unit {
		case "money":
			lines = append(lines, holds.Line{Scope: m.scope, Amount: p.of(u), Limits: m.limits})
		case "tokens":
			lines = append(lines, holds.Line{Scope: m.scope, Amount: u.Prompt + u.Completion, Limits: m.limits})
		}
	}
	return lines
}

// requests are the charges of an attempt, whether it succeeds or not.
func (c *caller) requests() (charges []budget.Charge) {
	for _, m := range c.measures() {
		if m.unit == "requests" {
			charges = append(charges, budget.Charge{Scope: m.scope, Amount: 1, Limits: m.limits})
		}
	}
	return charges
}

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
