package main

import (
	"encoding/csv"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/wallet"
)

// purse gives ann a wallet: a gift for an hour, and a lot that never ends. 12 are drawn of them, and 8 reserved by a
// session.
func purse(t testing.TB, pool *pgxpool.Pool, c *metered.Client) *wallet.Book {
	t.Helper()
	book, err := wallet.New(c.Budget, wallet.Config{})
	require.NoError(t, err)
	require.NoError(t, pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error {
		for _, g := range []wallet.Grant{
			{Amount: 10, Ends: wallet.After(time.Hour), Category: "promotional", Reference: "gift"}, {Amount: 40, Category: "paid", Reference: "invoice-17"},
			{Amount: 7, Category: "paid", Reference: "bounced"},
		} {
			g.Wallet = "user/ann"
			if _, err := book.Grant(t.Context(), tx, g); err != nil {
				return err
			}
		}
		if _, err := c.Budget.Charge(t.Context(), tx, noted(book.Charge("user/ann", 4), budget.Note{Reason: "a picture"})); err != nil {
			return err
		}
		_, err := book.Revoke(t.Context(), tx, wallet.Revoke{Wallet: "user/ann", Reference: "bounced", Note: budget.Note{Reason: "no funds"}})
		return err
	}))
	s, err := metered.Open[any](t.Context(), c, metered.Reservation{ID: "stream-1", Tenant: "user/ann", TTL: 40 * time.Minute, Lines: []holds.Line{book.Line("user/ann", 8)}})
	require.NoError(t, err)
	s.Close()
	return book
}

func TestWallet_ShowsUnitsByLotAndCategory(t *testing.T) {
	t.Parallel()
	pool, c := shop(t)
	purse(t, pool, c)
	l := as(t, pool, metered.GrantReportingSQL)
	w := l.object("wallet", "user/ann", "--expiring-before", time.Now().UTC().AddDate(0, 0, 2).Format(time.RFC3339))
	require.Equal(t, []any{38.0, 8.0, 0.0, 0.0, 0.0}, []any{w["units"], w["held"], w["overdrawn"], w["next_units"], w["expiring"]})
	require.Equal(t, []any{"gift", "invoice-17"}, values(objects(w["lots"]), "reference"))
	require.Equal(t, []any{38.0, 0.0}, values(objects(w["categories"]), "units"))
	require.Equal(t, []any{0.0, 38.0}, values(objects(w["lots"]), "units"))
	text := l.ok("wallet", "user/ann", "--expiring-before", "2999-01-01")
	for _, part := range []string{"has 38 to draw, and 8 held", "0 of it end before 2999", "never", "promotional  0     6"} {
		require.Contains(t, text, part)
	}
	require.NotContains(t, l.ok("wallet", "user/ann"), "before")
	for _, args := range [][]string{{"wallet", "org/acme"}, {"wallet", "nobody"}, {"lots", "nobody"}, {"statement", "org/acme", "--by-lot"}} {
		require.Contains(t, l.exits(exitUnknown, args...).err, "wallet", args)
	}
	require.Contains(t, l.exits(exitUnknown, "statement", "nobody", "--by-lot").err, `scope "nobody" has no entries`)
	l.exits(exitUsage, "wallet", "user/ann", "--expiring-before", "soon")

	lots := l.objects("lots", "user/ann")
	require.Equal(t, []any{"bounced", "invoice-17", "gift"}, values(lots, "reference"))
	require.Equal(t, []any{"revoked", "open", "held"}, values(lots, "state"))
	require.Equal(t, []any{0.0, 0.0, 4.0}, values(lots, "drawn"))
	require.Equal(t, []any{7.0, 0.0, 0.0}, values(lots, "revoked"))
	require.Contains(t, l.ok("lots", "user/ann", "-n", "1"), "There may be more")
	require.Len(t, l.objects("lots", "user/ann", "-n", "2"), 2)
}

func TestStatement_SaysWhereCreditWentByLot(t *testing.T) {
	t.Parallel()
	pool, c := shop(t)
	purse(t, pool, c)
	l := as(t, pool, metered.GrantReportingSQL)
	sheet, err := csv.NewReader(strings.NewReader(l.ok("statement", "user/ann", "--by-lot", "--format", "csv"))).ReadAll()
	require.NoError(t, err)
	var got [][]string
	for _, row := range sheet {
		got = append(got, append([]string{row[3], row[4]}, row[17:]...))
	}
	require.Equal(t, [][]string{
		{"kind", "amount", "balance", "lot", "reference", "category", "move", "units"},
		{"credit", "10", "10", "1", "gift", "promotional", "credited", "10"},
		{"credit", "40", "50", "2", "invoice-17", "paid", "credited", "40"},
		{"credit", "7", "57", "3", "bounced", "paid", "credited", "7"},
		{"charge", "4", "53", "1", "gift", "promotional", "taken", "4"},
		{"revoke", "7", "46", "3", "bounced", "paid", "revoked", "7"},
		{"hold", "8", "38", "1", "gift", "promotional", "held", "6"},
		{"hold", "8", "38", "2", "invoice-17", "paid", "held", "2"},
	}, got)
	one := l.objects("statement", "user/ann", "--lot", "1")
	require.Equal(t, []any{"credit", "charge", "hold"}, values(one[:3], "kind"))
	require.Len(t, one, 4)
	require.Contains(t, one[3], "period")
	text := l.ok("statement", "user/ann", "--by-lot")
	require.Contains(t, text, "a picture")
	require.Contains(t, text, "Charged 4, of which 0 were refunded until now; credited 50", "less what was revoked")
	changes := l.objects("statement", "user/ann")
	require.Len(t, changes, 7)
	require.Contains(t, l.ok("statement", "user/ann"), "revoke  +7")
}

func TestExplain_ShowsRemainingLots(t *testing.T) {
	t.Parallel()
	pool, c := shop(t)
	purse(t, pool, c)
	l := as(t, pool, metered.GrantReportingSQL)
	l.ok("explain", "user/ann", "38", "-l", "wallet=prepaid")
	text := l.exits(exitRefused, "explain", "user/ann", "39", "-l", "wallet=prepaid").out
	never := l.exits(exitRefused, "explain", "user/ann", "100", "-l", "wallet=prepaid").out
	require.Contains(t, never, "Waiting does not help.\nUnits that come later are not counted")
	require.Contains(t, text, "wallet (credit)")
	require.Contains(t, text, "invoice-17")
	require.Contains(t, text, "REST")
	refused := l.exits(exitRefused, "explain", "user/ann", "39", "-l", "wallet=prepaid", "--json").objects()[0]
	require.Equal(t, 38.0, refused["wallet"].(map[string]any)["units"])
}

// A charge for a use is explained with the lots that pay for it, and one without a use is told of them. The answers are those of Draw.
func TestExplain_OfAChargeForAUse(t *testing.T) {
	t.Parallel()
	pool, c := shop(t)
	book, err := wallet.New(c.Budget, wallet.Config{Overdraft: 5})
	require.NoError(t, err)
	require.NoError(t, pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error {
		for _, g := range []wallet.Grant{{Amount: 30, Reference: "images", Uses: []string{"images"}}, {Amount: 10, Reference: "all"}} {
			g.Wallet = "user/bob"
			if _, err := book.Grant(t.Context(), tx, g); err != nil {
				return err
			}
		}
		return nil
	}))
	l := as(t, pool, metered.GrantReportingSQL)
	credit := "credit/5"
	explained := func(code int, args ...string) (text string, limit map[string]any) {
		args = append([]string{"explain", "user/bob"}, append(args, "-l", credit)...)
		limit = l.exits(code, append(args, "--json")...).objects()[0]["limits"].([]any)[0].(map[string]any)
		return l.exits(code, args...).out, limit
	}
	text, limit := explained(exitRefused, "16")
	require.Contains(t, text, "name the use of the charge with --use")
	require.Equal(t, 15.0, limit["available"])
	text, limit = explained(0, "45", "--use", "images")
	require.Contains(t, text, "a charge of 45 for images on user/bob would be let in")
	require.Equal(t, []any{45.0, -40.0}, []any{limit["available"], limit["used"]})
	text, limit = explained(exitRefused, "46", "--use", "images")
	require.NotContains(t, text, "--use")
	require.Equal(t, []any{45.0, -40.0}, []any{limit["available"], limit["used"]})
	require.Equal(t, []any{45.0, -40.0}, []any{limit["refusal"].(map[string]any)["available"], limit["refusal"].(map[string]any)["used"]})
	explained(exitRefused, "16", "--use", "text")

	// An overdraft that others drew is not paid by the lot: all of it is there for its use.
	require.NoError(t, pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error {
		_, err := c.Budget.Charge(t.Context(), tx, book.Charge("user/bob", 15))
		return err
	}))
	for limited, used := range map[string]float64{"credit/5": -25, "prepaid": -30} {
		for amount, code := range map[string]int{"30": 0, "31": exitRefused} {
			credit = limited
			_, limit = explained(code, amount, "--use", "images")
			require.Equal(t, []any{30.0, used}, []any{limit["available"], limit["used"]})
		}
	}
	require.NoError(t, pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error {
		_, err := c.Budget.Charge(t.Context(), tx, noted(book.Charge("user/bob", 30), budget.Note{Use: "images"}))
		return err
	}))
}

func TestSweep_EndsLotsThatAreDue(t *testing.T) {
	t.Parallel()
	pool, c := shop(t)
	book := purse(t, pool, c)
	require.NoError(t, pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error {
		_, err := book.Grant(t.Context(), tx, wallet.Grant{Wallet: "user/bob", Amount: 5, Ends: wallet.After(time.Hour)})
		return err
	}))
	pgtest.SetClock(t, pool, time.Now().Add(2*time.Hour))
	report := as(t, pool, metered.GrantReportingSQL)
	require.Contains(t, report.ok("top", "--count", "1"), "lots of wallets ended and not swept 1, the oldest 1h")
	l := as(t, pool, metered.GrantSQL)
	require.Equal(t, 0.0, l.object("sweep", "--no-lots")["lots"].(map[string]any)["ended"])
	require.Equal(t, 2.0, l.object("sweep")["lots"].(map[string]any)["ended"], "bob's, and ann's gift, to which her session's hold gave back 6")
	require.Contains(t, l.ok("sweep"), "lots    0     0")
	require.Equal(t, []any{5.0}, values(report.objects("lots", "user/bob"), "lapsed"))
	require.NotContains(t, report.ok("top", "--count", "1"), "lots of wallets")
	report.exits(exitNotGranted, "sweep")
}

// Verify and purge know lots.
func TestVerifyAndPurge_CoverLots(t *testing.T) {
	t.Parallel()
	pool, c := shop(t)
	book := purse(t, pool, c)
	require.NoError(t, pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error {
		for range 30 { // a purge keeps the last few entries
			if _, err := c.Budget.Charge(t.Context(), tx, book.Charge("user/ann", 1)); err != nil {
				return err
			}
		}
		return nil
	}))
	l := as(t, pool, metered.GrantReportingSQL)
	l.ok("verify", "--scope", "user/ann")
	execute(t, pool, `update metered.lot_moves set rest = rest + 1 where lot = (select no from metered.lots where reference = 'invoice-17')`)
	require.Contains(t, l.exits(exitDifferences, "verify", "--scope", "user/ann").out, "lot")
	execute(t, pool, `update metered.lot_moves set rest = rest - 1 where lot = (select no from metered.lots where reference = 'invoice-17')`)

	clock := pgtest.SetClock(t, pool, time.Now().Add(time.Minute))
	clock.Advance(100 * 24 * time.Hour)
	as(t, pool, metered.GrantSQL).ok("sweep")
	before := l.object("wallet", "user/ann")["units"]
	require.Contains(t, values(l.objects("lots", "user/ann"), "reference"), "bounced")
	clock.Advance(800 * 24 * time.Hour)
	require.Contains(t, as(t, pool, metered.GrantMaintenanceSQL).ok("purge", "--older-than", "400d", "--only", "ledger"), "ledger")
	require.NotContains(t, values(l.objects("lots", "user/ann"), "reference"), "bounced", "nothing is left of it, and it was not drawn since")
	require.Equal(t, before, l.object("wallet", "user/ann")["units"], "what can be drawn is as it was")
	l.ok("verify")
}

func TestHolds_ListsSessions(t *testing.T) {
	t.Parallel()
	pool, c := shop(t)
	purse(t, pool, c)
	l := as(t, pool, metered.GrantReportingSQL)
	all := l.objects("holds", "--sessions")
	require.Len(t, all, 1)
	require.Equal(t, "user/ann", all[0]["tenant"])
	require.Len(t, l.objects("holds", "--sessions", "--scope", "user/ann", "--state", "held"), 1)
	require.Empty(t, l.ok("holds", "--sessions", "--state", "captured"))
	l.exits(exitUsage, "holds", "--sessions", "--by-due")
}

func TestWallet_ShowsLotsForSomeUses(t *testing.T) {
	t.Parallel()
	pool, c := shop(t)
	book := purse(t, pool, c)
	require.NoError(t, pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error {
		if _, err := book.Grant(t.Context(), tx, wallet.Grant{Wallet: "user/ann", Amount: 25, Category: "paid", Reference: "pack", Uses: []string{"tokens", "images"}}); err != nil {
			return err
		}
		_, err := c.Budget.Charge(t.Context(), tx, noted(book.Charge("user/ann", 40), budget.Note{Use: "images"}))
		return err
	}))
	l := as(t, pool, metered.GrantReportingSQL)
	for _, part := range []string{"has 0 to draw, and 8 held", "For images it has 23.", "For tokens it has 23.", "paid for images, tokens"} {
		require.Contains(t, l.ok("wallet", "user/ann"), part)
	}
	require.Contains(t, l.ok("lots", "user/ann"), "paid for images, tokens")
	require.Contains(t, l.ok("statement", "user/ann", "--by-lot"), "applied")
	require.Contains(t, l.ok("statement", "user/ann"), "use images")
}

func noted(c budget.Charge, note budget.Note) budget.Charge {
	c.Note = note
	return c
}
