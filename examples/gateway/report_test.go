package main

import (
	"encoding/json"
	"net/http"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/internal/pgtest"
)

// bill asks for the invoice of a month.
func (f *fixture) bill(month string) (bill invoice) {
	f.t.Helper()
	status, text := f.do(f.t.Context(), http.MethodGet, "/v1/invoice?month="+month, "admin-of-acme", "", "")
	require.Equal(f.t, http.StatusOK, status, text)
	require.NoError(f.t, json.Unmarshal([]byte(text), &bill))
	return bill
}

// requireAddsUp checks that the parts of an invoice are its total.
func (b *invoice) requireAddsUp(t *testing.T) {
	t.Helper()
	var days, teams int64
	for _, d := range b.Days {
		days += d.Microdollars
	}
	for _, team := range b.Teams {
		var users int64
		for _, u := range team.Users {
			users += u.Microdollars
		}
		require.Equal(t, team.Microdollars, users, team.Account)
		teams += users
	}
	require.Equal(t, []int64{b.Total, b.Total}, []int64{days, teams})
}

func TestInvoice_AMonthIsTheCustomersAndSoIsTheBudget(t *testing.T) {
	t.Parallel()
	f := openGateway(t, false)
	f.grants(5 * dollar)
	berlin := f.zone()
	y, m, _ := time.Now().In(berlin).Date()
	next := time.Date(y, m+1, 1, 0, 0, 0, 0, berlin)
	clock := pgtest.SetClock(t, f.pool, next.Add(-time.Second))
	ask := func(secret string) heard { return f.ask(f.bases[0], secret, "", "How is a stream metered?", 0) }

	first := ask("key-of-ann")
	require.Equal(t, "stop", first.Finish)
	other := ask("key-of-eve")
	f.set("acme/search/ann", "monthly", first.Cost+10*24+30*100-1) // an estimate more would be one too many
	require.Equal(t, http.StatusTooManyRequests, ask("key-of-ann").Status)
	clock.Advance(time.Second)
	second := ask("key-of-ann")
	require.Equal(t, "stop", second.Finish, second.Problem)
	clock.Advance(24*time.Hour + 30*time.Minute) // in UTC it is still the day before
	third := ask("key-of-eve")

	bill := f.bill(next.Add(-time.Second).Format("2006-01"))
	bill.requireAddsUp(t)
	require.Equal(t, first.Cost+other.Cost, bill.Total)
	require.Equal(t, []dayItem{{next.Add(-time.Second).Format(time.DateOnly), bill.Total}}, bill.Days)
	require.Equal(t, []invoiceRow{
		{"acme/ads", other.Cost, []invoiceRow{{"acme/ads/eve", other.Cost, nil}}},
		{"acme/search", first.Cost, []invoiceRow{{"acme/search/ann", first.Cost, nil}, {"acme/search/ben", 0, nil}}},
	}, bill.Teams)
	bill = f.bill(next.Format("2006-01"))
	bill.requireAddsUp(t)
	require.Equal(t, second.Cost+third.Cost, bill.Total)
	require.Equal(t, []dayItem{
		{next.Format(time.DateOnly), second.Cost}, {next.AddDate(0, 0, 1).Format(time.DateOnly), third.Cost},
	}, bill.Days)
	require.True(t, bill.From.Equal(next))

	status, text := f.do(t.Context(), http.MethodGet, "/v1/usage", "key-of-ann", "", "")
	require.Equal(t, http.StatusOK, status)
	var all []standing
	require.NoError(t, json.Unmarshal([]byte(text), &all))
	require.Equal(t, standing{"acme", "credit", first.Cost + other.Cost + second.Cost + third.Cost, 0, 5 * dollar, nil}, all[0])
	for _, s := range all {
		if s.Limit == "user-monthly" {
			until := next.AddDate(0, 1, 0).UTC()
			require.Equal(t, standing{"acme/search/ann", "user-monthly", second.Cost, 0, first.Cost + 10*24 + 30*100 - 1, &until}, s)
		}
	}
}
