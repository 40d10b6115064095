package main

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
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

func TestPage_ShowsSettledUnitsLiveAndEscapesText(t *testing.T) {
	t.Parallel()
	f := openGateway(t, false)
	f.grants(5 * dollar)
	status, text := f.do(t.Context(), http.MethodGet, "/", "", "", "")
	require.Equal(t, http.StatusOK, status)
	require.Contains(t, text, "/v1/live")

	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	res, err := f.send(ctx, f.bases[0], http.MethodGet, "/v1/live", "key-of-ann", "", "")
	require.NoError(t, err)
	defer res.Body.Close()
	shown := 0
	err = eachEvent(res.Body, func(html []byte) error {
		if shown++; shown == 1 {
			require.NotContains(t, string(html), "key-of-ann")
			h := f.ask(f.bases[0], "key-of-ann", "", "How is a stream metered?", 0)
			require.Equal(t, "stop", h.Finish)
			_, err := f.pool.Exec(ctx, `update completions set finish = '<script>'`)
			return err
		}
		if bytes.Contains(html, []byte("&lt;script&gt;")) && !bytes.Contains(html, []byte("<script")) {
			return io.EOF
		}
		return nil
	})
	require.ErrorIs(t, err, io.EOF)
}

func TestView_CountsOnlyTheOrganisationsOwn(t *testing.T) {
	t.Parallel()
	f := openGateway(t, false)
	f.grants(5 * dollar)
	require.Equal(t, "stop", f.ask(f.bases[0], "key-of-eve", "", "How is a stream metered?", 0).Finish)
	_, err := f.pool.Exec(t.Context(), `
		insert into accounts (id, level, zone) values ('acm', 'organisation', 'UTC');
		insert into accounts (id, parent, level, secret) values ('acm/k', 'acm', 'key', sha256('key-of-acm'))`)
	require.NoError(t, err)
	r := httptest.NewRequest(http.MethodGet, "/", strings.NewReader(""))
	r.Header.Set("Authorization", "Bearer key-of-acm")
	c, err := f.caller(r)
	require.NoError(t, err)
	v, err := f.view(t.Context(), c)
	require.NoError(t, err)
	require.Empty(t, v.Last)
	r.Header.Set("Authorization", "Bearer key-of-ann")
	c, err = f.caller(r)
	require.NoError(t, err)
	v, err = f.view(t.Context(), c)
	require.NoError(t, err)
	require.Len(t, v.Last, 1)
}
