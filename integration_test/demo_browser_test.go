package integration_test

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/chromedp/cdproto/emulation"
	"github.com/chromedp/chromedp"
	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/internal/pgtest"
)

// program builds the command line.
func program(t *testing.T) string {
	t.Helper()
	binary := filepath.Join(t.TempDir(), "metered")
	build := exec.CommandContext(t.Context(), "go", "build", "-o", binary, "./cmd/metered")
	build.Dir = ".."
	out, err := build.CombinedOutput()
	require.NoError(t, err, "go build: %s", out)
	return binary
}

// runDemo runs the program's demo until the test ends. It returns the page's address and a connection to its database.
func runDemo(t *testing.T) (address string, conn *pgx.Conn) {
	t.Helper()
	demo := exec.CommandContext(context.Background(), program(t), "demo", "--listen", "127.0.0.1:0", "--rate", "100", "--json")
	demo.Stderr = os.Stderr
	stdout, err := demo.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, demo.Start())
	t.Cleanup(func() {
		require.NoError(t, demo.Process.Signal(os.Interrupt))
		require.NoError(t, demo.Wait())
	})
	var at struct {
		Page string `json:"page"`
		URL  string `json:"database_url"`
	}
	require.NoError(t, json.NewDecoder(stdout).Decode(&at))
	conn, err = pgx.Connect(t.Context(), at.URL)
	require.NoError(t, err)
	t.Cleanup(func() { _ = conn.Close(context.Background()) })
	return at.Page, conn
}

// inCards fails if a table is wider than the card that it is in.
func (p *page) inCards(what string) {
	p.t.Helper()
	require.Empty(p.t, eval[string](p, `[...document.querySelectorAll(".wide")].filter((e) => e.scrollWidth > e.clientWidth)
		.map((e) => e.scrollWidth + " of " + e.clientWidth + ": " + e.innerText).join("\n")`), what)
}

// takeAll keeps pictures of pages at two widths, in both colours, if somebody wants to look at them. fresh
// are queries of pages that are soon gone.
func takeAll(t *testing.T, browser context.Context, address string, pages map[string]string, conn *pgx.Conn, fresh map[string]string) {
	t.Helper()
	dir := os.Getenv(screenshotsEnv)
	if dir == "" {
		return
	}
	for _, width := range []int64{1200, 390} {
		for _, colours := range []string{"light", "dark"} {
			page := openPage(t, browser, fmt.Sprint(width, colours), dir, width, 1480, width < 500, &emulation.MediaFeature{Name: "prefers-color-scheme", Value: colours})
			for what, path := range pages {
				if sql := fresh[what]; sql != "" {
					path = pgtest.Value[string](t, conn, "select coalesce(("+sql+"), '"+path+"')")
				}
				page.do(chromedp.Navigate(address+path), chromedp.Sleep(500*time.Millisecond))
				page.fits()
				page.shot(what)
			}
		}
	}
}

// The demo's page shows each kind of scope within its limits, and a refusal that leads to the limit and the
// entries behind it.
func TestDemo_InABrowserContradictsNoPromise(t *testing.T) {
	t.Parallel()
	program := chromium(t)
	address, conn := runDemo(t)
	for what, sql := range map[string]string{
		"refusals":   `select count(*) > 5 from metered.operations where refusal is not null`,
		"lots":       `select count(*) > 5 from metered.lots where drawn > 0`,
		"sessions":   `select count(*) > 0 from metered.holds where id like 'session_%'`,
		"leases":     `select count(*) > 0 from metered.leases`,
		"thresholds": `select count(*) > 0 from metered.ledger where crossed is not null`,
	} {
		pgtest.WaitFor(t, what, func() bool { return pgtest.Value[bool](t, conn, sql) })
	}
	for _, sql := range []string{
		`select metered.number_feed(10000)`,
		`select count(*) from metered.consume_feed('a warehouse of all entries, by the hour', 1, '7 days', false)`,
	} {
		_, err := conn.Exec(t.Context(), sql)
		require.NoError(t, err)
	}
	allocator, stop := chromedp.NewExecAllocator(context.Background(), append(chromedp.DefaultExecAllocatorOptions[:],
		chromedp.ExecPath(program), chromedp.NoSandbox, chromedp.Flag("disable-dev-shm-usage", true))...)
	t.Cleanup(stop)
	browser, end := chromedp.NewContext(allocator)
	t.Cleanup(end)
	require.NoError(t, chromedp.Do(browser))
	desk := openPage(t, browser, "demo", t.TempDir(), 1280, 1000, false)
	text := func(selector string) string {
		return eval[string](desk, `(document.querySelector("`+selector+`")?.innerText ?? "")`)
	}

	// No table of any page runs past its card.
	pages := map[string]string{
		"overview": "", "scopes": "scopes", "wallets": "scopes?kind=wallets", "plans": "scopes?kind=planned&plan=*", "reached": "scopes?kind=reached",
		"holds": "holds", "leases": "leases", "operations": "operations",
	}
	desk.do(chromedp.Navigate(address))
	for what, link := range map[string]string{"hold": "hold?", "operation": "operation?", "job": "job?", "scope": "scope?"} {
		pages[what], _ = strings.CutPrefix(eval[string](desk, `document.querySelector('main a[href^="`+link+`"]')?.href ?? ""`), address)
	}
	pages["wallet"] = "scope?scope=" + pgtest.Value[string](t, conn, `select scope from metered.lot_rows order by no desc limit 1`)
	fresh := map[string]string{
		"hold": `select 'hold?tenant=' || tenant || '&id=' || id from metered.holds order by no desc limit 1`,
		"job":  `select 'job?id=' || job_id from metered.parked_jobs where scope <> '' order by job_id desc limit 1`,
	}
	for what, sql := range fresh {
		if pages[what] == "" {
			pgtest.WaitFor(t, what, func() bool { return pgtest.Value[bool](t, conn, "select exists ("+sql+")") })
			pages[what] = pgtest.Value[string](t, conn, sql)
		}
	}
	for what, page := range pages {
		desk.do(chromedp.Navigate(address + page))
		require.NotContains(t, text("h1"), "Not found", what)
		desk.fits()
		desk.inCards(what)
	}
	takeAll(t, browser, address, pages, conn, fresh)

	desk.do(chromedp.Navigate(address))
	desk.drawn(".svg?")
	require.Regexp(t, `(?s)a warehouse of all.*yes`, text("#feed tbody"))
	desk.fits()
	hrefs := eval[[]string](desk, `[...document.querySelectorAll('a[href^="operation?"]')].map((a) => a.href)`)
	require.NotEmpty(t, hrefs, "the overview lists refusals")
	desk.do(chromedp.Navigate(hrefs[0]))
	require.Contains(t, text("main"), "refused")
	causes := eval[[]string](desk, `[...document.querySelectorAll('#refusals a[href^="scope?"]')].map((a) => a.href)`)
	require.NotEmpty(t, causes, "a refusal names its scope and the entries behind it")
	desk.do(chromedp.Navigate(causes[len(causes)-1]))
	require.NotEmpty(t, eval[[]string](desk, `[...document.querySelectorAll("#entries tbody tr")].map((row) => row.innerText)`))

	rows, err := conn.Query(t.Context(), `select distinct on (split_part(scope, '/', 1)) scope from metered.ledger order by split_part(scope, '/', 1), at desc`)
	require.NoError(t, err)
	scopes, err := pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(t, err)
	require.Len(t, scopes, 4)
	for _, scope := range scopes {
		desk.do(chromedp.Navigate(address + "scope?scope=" + scope))
		limits := eval[[][]int64](desk, `[...document.querySelectorAll('[aria-label="Limits"] tbody tr')].map((row) =>
			[...row.querySelectorAll("td.n")].map((cell) => Number(cell.textContent.replace(/\s/g, "").replace("−", "-"))))`)
		require.NotEmpty(t, limits, scope)
		for _, row := range limits {
			used, held, leased, of, room := row[0], row[1], row[2], row[3], row[4]
			require.GreaterOrEqual(t, min(used, held, leased, room), int64(0), "%s: %v", scope, row)
			require.Equal(t, of, used+held+leased+room, "%s: %v", scope, row)
		}
		for _, tile := range eval[[]string](desk, `[...document.querySelectorAll("dd")].map((e) => e.innerText)`) {
			require.False(t, strings.HasPrefix(tile, "−"), "%s: %s", scope, tile)
		}
	}
}
