package console_test

import (
	"net/http"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/console"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/wallet"
)

// Whoever has little left is listed, also if nothing has happened to the scope for days: by limit, and wallets by what they can draw now,
// lots that have ended and were not swept aside.
func TestOverview_ListsAllThatAreNearlyOut(t *testing.T) {
	t.Parallel()
	month := budget.PerWindow(600, 30*24*time.Hour).Named("month")
	w := newWorld(t, console.Config{Limits: func(scope string) []budget.Limit {
		return map[string][]budget.Limit{"ann": {month}, "ben": {month}, "a seat": {budget.Lifetime(1).Named("seats")}}[scope]
	}}, "")
	clock := pgtest.SetClock(t, w.pool, pgtest.Tomorrow(9))
	book, err := wallet.New(w.client.Budget, wallet.Config{})
	require.NoError(t, err)
	require.NoError(t, pgx.BeginFunc(t.Context(), w.pool, func(tx pgx.Tx) error {
		for name, amount := range map[string]int64{"rich": 900, "poor": 3, "ends": 500} {
			g := wallet.Grant{Wallet: "purse/" + name, Amount: amount, Reference: "r"}
			if name == "ends" {
				g.Ends = wallet.After(time.Hour)
			}
			if _, err := book.Grant(t.Context(), tx, g); err != nil {
				return err
			}
		}
		_, err := w.client.Budget.Charge(t.Context(), tx, budget.Charge{Scope: "a seat", Amount: 1}, budget.Charge{Scope: "ann", Amount: 600}, budget.Charge{Scope: "ben", Amount: 60})
		return err
	}))
	clock.Advance(2 * 24 * time.Hour)
	page := w.see("")
	nearly := text(byID(t, page, "nearly"))
	require.Regexp(t, `ann month 600 0 600 0 .*a seat seats 1 0 1 0`, nearly, "a seat that is taken is ordinary, and comes last")
	_, coloured := attr(all(byID(t, page, "nearly"), "meter")[1], "optimum")
	require.False(t, coloured)
	require.NotContains(t, nearly, "ben")
	require.Regexp(t, `purse/ends 0 0 \d+ purse/poor 3 0 3 purse/rich 900 0 900`, text(byID(t, page, "wallets")))

	// Who is nearly out comes before the hot scopes, and the curve is of the fullest limit.
	var order []string
	for _, n := range all(page, "section", "figure") {
		id, _ := attr(n, "id")
		order = append(order, id)
	}
	require.Equal(t, []string{"figures", "nearly", "refusals", "", "hot", "wallets", "latest"}, order)
	require.Contains(t, text(all(page, "figcaption")[0]), "ann , month: usage of the last 30d, against 600")

	response, _ := w.get(w.url("live", "page", "scope"))
	require.Equal(t, http.StatusNotFound, response.StatusCode, "it would fail at each reading")
}

// Each reading looks at a thousand more scopes, until all have been looked at: also those that nobody wrote to of late.
func TestOverview_ComesToEachScopeInTurn(t *testing.T) {
	t.Parallel()
	w := newWorld(t, console.Config{Limits: func(scope string) []budget.Limit {
		if scope != "zoe" {
			return nil
		}
		return []budget.Limit{budget.PerWindow(10, 30*24*time.Hour).Named("month")}
	}}, "")
	clock := pgtest.SetClock(t, w.pool, pgtest.Tomorrow(9))
	w.crowd(2100, 1)
	w.charge("zoe", 9)
	clock.Advance(2 * 24 * time.Hour)
	for range 2 {
		require.NotContains(t, text(w.see("")), "zoe")
	}
	require.Regexp(t, `zoe month 9 0 10 1 `, text(byID(t, w.see(""), "nearly")))
}
