package console_test

import (
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/console"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/wallet"
)

// A wallet's page has its lots, the outcome of ended ones, the open sessions and the thresholds that were reached.
func TestPages_ShowWalletsSessionsAndThresholds(t *testing.T) {
	t.Parallel()
	w := newWorld(t, console.Config{Limits: func(scope string) []budget.Limit {
		return map[string][]budget.Limit{"user/ann": {budget.Prepaid(10).Named("credit")}, "seats": {budget.Lifetime(10).Named("seats")}}[scope]
	}}, "")
	clock := pgtest.SetClock(t, w.pool, pgtest.Tomorrow(9))
	book, err := wallet.New(w.client.Budget, wallet.Config{Overdraft: 10})
	require.NoError(t, err)
	require.NoError(t, pgx.BeginFunc(t.Context(), w.pool, func(tx pgx.Tx) error {
		for _, g := range []wallet.Grant{{Amount: 30, Ends: wallet.After(time.Hour), Reference: hostile[1]}, {Amount: 20, Ends: wallet.After(3 * time.Hour), Category: "paid", Reference: "invoice"}} {
			g.Wallet = "user/ann"
			if _, err := book.Grant(t.Context(), tx, g); err != nil {
				return err
			}
		}
		_, err := w.client.Budget.Charge(t.Context(), tx, book.Charge("user/ann", 4))
		return err
	}))
	s, err := metered.Open[any](t.Context(), w.client, metered.Reservation{ID: "stream", Tenant: "ann", TTL: 50 * time.Minute, Grace: time.Nanosecond * 1000,
		Lines: []holds.Line{book.Line("user/ann", 10)}})
	require.NoError(t, err)
	defer s.Close()
	_, err = w.pool.Exec(t.Context(), `update metered.ledger set crossed = jsonb_build_object('p/plan/80 %', jsonb_build_object('until', metered.clock() + interval '1 day'), 'L/credit/low', jsonb_build_object('rearm', 5))
		where scope = 'user/ann'`)
	require.NoError(t, err)

	page := w.see("scope", "scope", "user/ann")
	checkPage(t, "a wallet", page)
	require.Contains(t, tile(t, page, "To draw"), "36 16 of it end in 1 h 0 min; 10 held")
	require.Contains(t, tile(t, page, "Open sessions"), "1 the first is over in 50 min")
	stands := text(byID(t, page, "stands"))
	require.Contains(t, stands, "The threshold plan/80 % was reached; it is armed again in 1 d 0 h")
	require.Contains(t, stands, "The threshold credit/low was reached by what is spent.")
	require.Contains(t, stands, "1 open <script>alert(1)</script> – 16 10 30")
	require.Contains(t, stands, "2 open invoice paid 20 0 20")
	require.Contains(t, text(byID(t, page, "holds")), "session held user/ann ann")
	require.Contains(t, text(byID(t, page, "entries")), "credit")
	require.Contains(t, text(w.see("scopes")), "user/ann wallet")
	require.NotContains(t, text(w.see("")), "Lots to sweep")

	// The overview lists scopes that are nearly used up, and credit that ends soon. The list of scopes shows only
	// wallets, or only scopes that reached a threshold.
	require.NoError(t, pgx.BeginFunc(t.Context(), w.pool, func(tx pgx.Tx) error {
		_, err := w.client.Budget.Charge(t.Context(), tx, budget.Charge{Scope: "seats", Amount: 8})
		return err
	}))
	require.Contains(t, text(byID(t, w.see(""), "nearly")), "seats seats 8 0 10 2")
	require.Contains(t, text(byID(t, w.see(""), "ending")), "user/ann 1 <script>alert(1)</script> 16")
	for _, kind := range []string{"wallets", "reached"} {
		list := text(w.see("scopes", "kind", kind))
		require.Contains(t, list, "user/ann wallet 4 10 50 36")
		require.NotContains(t, list, "seats")
		require.Equal(t, kind == "reached", strings.Contains(list, "credit/low plan/80 %"), "the list of reached thresholds names them")
	}
	require.Contains(t, text(w.see("scopes")), "seats 8 0 – –")
	response, _ := w.get(w.url("scopes", "kind", "nonsense"))
	require.Equal(t, http.StatusBadRequest, response.StatusCode)

	clock.Advance(2 * time.Hour)
	page = w.see("scope", "scope", "user/ann")
	require.Contains(t, tile(t, page, "To draw"), "20 20 of it end in 1 h 0 min; 0 held")
	require.Contains(t, tile(t, w.see(""), "Lots to sweep"), "1 of wallets, ended and not swept; the oldest 1 h 0 min ago")
	_, err = book.Sweep(t.Context(), w.pool, wallet.SweepOptions{})
	require.NoError(t, err)
	page = w.see("scope", "scope", "user/ann")
	for _, state := range all(byID(t, page, "lots"), "span") {
		class, _ := attr(state, "class")
		require.NotContains(t, class, "expired", "an end is ordinary, and not red")
	}
	require.Contains(t, text(byID(t, page, "lots")), "1 ended <script>alert(1)</script> 30 0 4 26 lapsed", "units that the session kept lapse with it")
	require.Contains(t, text(byID(t, page, "entries")), "lapse")

	require.NoError(t, pgx.BeginFunc(t.Context(), w.pool, func(tx pgx.Tx) error {
		_, err := w.client.Budget.Charge(t.Context(), tx, budget.Charge{Scope: "user/ann", Amount: 25, Limits: []budget.Limit{book.Limit()}})
		return err
	}))
	require.Contains(t, tile(t, w.see("scope", "scope", "user/ann"), "To draw"), "−5 it is overdrawn; the next credit pays that back; 0 held")
	require.Contains(t, text(byID(t, w.see(""), "low")), "user/ann credit ")
	scope := w.see("scope", "scope", "user/ann", "amount", "6", "limits", "wallet=10/credit")
	require.Contains(t, text(byID(t, scope, "limits")), "A charge of 6 would be refused now.")

	// Lots for a use pay for a charge that names it.
	require.NotContains(t, text(byID(t, scope, "limits")), "name the use")
	require.NoError(t, pgx.BeginFunc(t.Context(), w.pool, func(tx pgx.Tx) error {
		_, err := book.Grant(t.Context(), tx, wallet.Grant{Wallet: "user/ann", Amount: 7, Reference: "pictures", Uses: []string{hostile[1]}})
		return err
	}))
	why := func(amount, use string) string {
		page := w.see("scope", "scope", "user/ann", "amount", amount, "limits", "wallet=10/credit", "use", use)
		checkPage(t, "a use", page)
		return text(byID(t, page, "limits"))
	}
	require.Contains(t, why("12", ""), "refused now. Waiting would not help. Lots for some uses are not counted: name the use.")
	require.Contains(t, why("12", hostile[1]), "A charge of 12 for <script>alert(1)</script> would be let in now. Limit")
	require.Contains(t, why("12", hostile[1]), "wallet admits −2 0 0 10 12")
	require.Contains(t, why("13", hostile[1]), "would be refused now. Waiting would not help. Limit")
	require.Contains(t, why("1", strings.Repeat("x", 256)), "The use is not a text of up to 255 bytes.")
}

// The list of scopes shows what plans do next, and only wallets with a plan that somebody asks for.
func TestScopes_ListWalletsByPlan(t *testing.T) {
	t.Parallel()
	w := newWorld(t, console.Config{}, "")
	pgtest.SetClock(t, w.pool, time.Date(2031, 3, 10, 9, 0, 0, 0, time.UTC))
	book, err := wallet.New(w.client.Budget, wallet.Config{})
	require.NoError(t, err)
	month := budget.Per(1, budget.Month, time.UTC, time.Time{}).Period
	require.NoError(t, pgx.BeginFunc(t.Context(), w.pool, func(tx pgx.Tx) error {
		for i := range 60 {
			g := wallet.Grant{Wallet: fmt.Sprintf("user/%02d", i), Amount: 300, Reference: "pro " + hostile[1]}
			if i < 55 {
				g.Ends = wallet.EachPeriod(month)
			}
			if i == 2 {
				g.Reference = "free"
			}
			if _, err := book.Grant(t.Context(), tx, g); err != nil {
				return err
			}
		}
		_, err := book.Change(t.Context(), tx, wallet.Change{Wallet: "user/02", Reference: "cancel", Plan: "free", AtEnd: true})
		return err
	}))
	renews := "pro " + hostile[1] + " : 300 each month, renews 2031-04-01 00:00:00"
	page := w.see("scopes", "kind", "wallets")
	checkPage(t, "wallets", page)
	list := text(page)
	require.Contains(t, list, renews)
	require.Contains(t, list, "free , ends 2031-04-01 00:00:00")
	page = w.see("scopes", "kind", "planned", "plan", "free")
	require.Contains(t, text(page), "user/02")
	require.NotContains(t, text(page), "user/01")

	// The second page is of the same plan.
	page = w.see("scopes", "kind", "planned", "plan", "pro*")
	require.NotContains(t, text(page), "user/02")
	seen := strings.Count(text(page), renews)
	for _, a := range all(page, "a") {
		if rel, _ := attr(a, "rel"); rel == "next" {
			href, _ := attr(a, "href")
			_, body := w.get(w.url("") + href)
			seen += strings.Count(text(parse(t, body)), renews)
		}
	}
	require.Equal(t, 54, seen)
	require.Contains(t, text(w.see("scopes", "kind", "planned", "plan", "fre")), "No scope.")
}
