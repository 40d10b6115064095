package main

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/httpmetered"
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

// standings are those of all the limits that a key's requests must keep, from one snapshot.
func (g *gateway) standings(ctx context.Context, c *caller) ([]standing, error) {
	var queries []budget.Query
	var all []standing
	for _, m := range c.measures() {
		for _, l := range m.limits {
			all = append(all, standing{Account: m.account, Limit: l.Name, Max: l.Max})
			queries = append(queries, budget.Query{Scope: m.scope, Window: l.Window, Period: l.Period})
		}
	}
	usages, err := g.metered.Budget.Usage(ctx, g.pool, queries...)
	if err != nil {
		return nil, err
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
	return all, nil
}

func (g *gateway) usage(w http.ResponseWriter, r *http.Request) error {
	c, err := g.caller(r)
	if err != nil {
		return err
	}
	all, err := g.standings(r.Context(), c)
	if err != nil {
		return err
	}
	return answer(w, all)
}

// invoice is an organisation's use in a month of its time zone. It is read from the ledger, and adds up: the days to
// the total, the users to their team, and the teams to the total.
type invoice struct {
	Organisation string       `json:"organisation"`
	From         time.Time    `json:"from"`
	To           time.Time    `json:"to"`
	Total        int64        `json:"total_microdollars"`
	Days         []dayItem    `json:"days"`
	Teams        []invoiceRow `json:"teams"`
	Credit       creditItem   `json:"credit"`
}

type dayItem struct {
	Date         string `json:"date"`
	Microdollars int64  `json:"microdollars"`
}

type invoiceRow struct {
	Account      string       `json:"account"`
	Microdollars int64        `json:"microdollars"`
	Users        []invoiceRow `json:"users,omitempty"`
}

// creditItem is the month of the credit: Opening + Credited - the used units = Closing. Credited is less lapsed
// units.
type creditItem struct {
	Opening  int64 `json:"opening"`
	Credited int64 `json:"credited"`
	Closing  int64 `json:"closing"`
}

var errMonth = &httpmetered.Problem{Status: http.StatusBadRequest, Detail: "want ?month=2026-11"}

func (g *gateway) invoice(w http.ResponseWriter, r *http.Request) error {
	organisation, err := g.admin(r)
	if err != nil {
		return err
	}
	var zone string
	if err := g.pool.QueryRow(r.Context(), `select zone from accounts where id = $1`, organisation).Scan(&zone); err != nil {
		return err
	}
	location, err := time.LoadLocation(zone)
	if err != nil {
		return err
	}
	from, err := time.ParseInLocation("2006-01", r.FormValue("month"), location)
	if err != nil {
		return errors.Join(errMonth, err)
	}
	var bill *invoice
	err = pgx.BeginTxFunc(r.Context(), g.pool, pgx.TxOptions{IsoLevel: pgx.RepeatableRead, AccessMode: pgx.ReadOnly}, func(tx pgx.Tx) error {
		bill, err = g.bill(r.Context(), tx, organisation, location, from)
		return err
	})
	if err != nil {
		return err
	}
	return answer(w, bill)
}

// bill makes the invoice, from the snapshot of tx.
func (g *gateway) bill(ctx context.Context, tx pgx.Tx, organisation string, location *time.Location, from time.Time) (*invoice, error) {
	bill := &invoice{Organisation: organisation, From: from, To: from.AddDate(0, 1, 0), Days: []dayItem{}, Teams: []invoiceRow{}}
	days, err := g.metered.Budget.Series(ctx, tx, credit(organisation), bill.From, bill.To, budget.Day, location)
	if err != nil {
		return nil, err
	}
	for _, day := range days {
		if used := day.Billed(); used != 0 {
			bill.Days = append(bill.Days, dayItem{day.From.In(location).Format(time.DateOnly), used})
			bill.Total += used
		}
		bill.Credit.Credited += day.Credited
	}
	before, err := g.metered.Budget.UsageBetween(ctx, tx, credit(organisation), time.Time{}, bill.From)
	if err != nil {
		return nil, err
	}
	bill.Credit.Opening = before.Credited - before.Billed()
	bill.Credit.Closing = bill.Credit.Opening + bill.Credit.Credited - bill.Total
	rows, err := tx.Query(ctx, accountsSQL, organisation)
	if err != nil {
		return nil, err
	}
	accounts, err := pgx.CollectRows(rows, pgx.RowToStructByPos[struct{ ID, Parent, Level string }])
	if err != nil {
		return nil, err
	}
	teams := map[string]int{}
	for _, a := range accounts {
		used, err := g.metered.Budget.UsageBetween(ctx, tx, money(a.ID), bill.From, bill.To)
		if err != nil {
			return nil, err
		}
		row := invoiceRow{Account: a.ID, Microdollars: used.Billed()}
		if a.Level == "team" {
			teams[a.ID] = len(bill.Teams)
			bill.Teams = append(bill.Teams, row)
			continue
		}
		team := &bill.Teams[teams[a.Parent]]
		team.Users = append(team.Users, row)
	}
	return bill, nil
}

// The teams first.
const accountsSQL = `
select a.id, a.parent, a.level from accounts a left join accounts team on team.id = a.parent and a.level = 'user'
where (a.level = 'team' and a.parent = $1) or team.parent = $1 order by a.level, a.id`

func answer(w http.ResponseWriter, body any) error {
	w.Header().Set("Content-Type", "application/json")
	return json.NewEncoder(w).Encode(body)
}
