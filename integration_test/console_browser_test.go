package integration_test

import (
	"context"
	"fmt"
	"math"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/chromedp/cdproto/cdp"
	"github.com/chromedp/cdproto/emulation"
	"github.com/chromedp/chromedp"
	"github.com/chromedp/chromedp/kb"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/console"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/jobs"
)

// openPage is a page of the browser, with features of the user's choice.
func openPage(t *testing.T, browser context.Context, name, dir string, width, height int64, phone bool, features ...*emulation.MediaFeature) *page {
	t.Helper()
	ctx, cancel := chromedp.NewContext(browser, chromedp.WithNewBrowserContext())
	t.Cleanup(cancel)
	var viewport []chromedp.EmulateViewportOption
	if phone {
		viewport = append(viewport, chromedp.EmulateScale(2), chromedp.EmulateMobile, chromedp.EmulateTouch, chromedp.EmulatePortrait)
	}
	require.NoError(t, chromedp.Do(ctx, chromedp.EmulateViewport(width, height, viewport...), // it also opens the tab, which has no end
		chromedp.Func(func(ctx context.Context, target *chromedp.Target) error {
			_, err := cdp.Call(ctx, target, emulation.SetEmulatedMedia, emulation.SetEmulatedMediaParams{Features: features})
			return err
		})))
	return &page{t: t, name: name, ctx: ctx, dir: dir}
}

// fits fails if the page is wider than the screen, or a control is smaller than a finger.
func (p *page) fits() {
	p.t.Helper()
	p.noSideways()
	require.Empty(p.t, eval[string](p, `[...document.querySelectorAll("nav a, button, input:not([type=hidden]), select")]
		.filter((e) => e.offsetParent && e.getBoundingClientRect().height < 32).map((e) => e.outerHTML).join("\n")`))
}

// drawn waits until all drawings are there.
func (p *page) drawn(variant string) {
	p.t.Helper()
	p.see(fmt.Sprintf(`[...document.querySelectorAll("picture img")].length > 0 && [...document.querySelectorAll("picture img")].every(
		(i) => i.complete && i.naturalWidth > 0 && i.currentSrc.includes(%q))`, variant), "drawings: "+variant)
}

// focused is the element with the focus.
func (p *page) focused() string {
	p.t.Helper()
	return eval[string](p, `document.activeElement.getAttribute("href") ?? document.activeElement.id`)
}

// watched is a company's database, and its clock.
type watched struct {
	t      *testing.T
	pool   *pgxpool.Pool
	client *metered.Client
	clock  *pgtest.Clock
}

type render struct {
	Asset string `json:"asset"`
}

func (render) Kind() string { return "render" }

// requestLimits are those of the scopes of requests, for the company and on the page.
func requestLimits(scope string) []budget.Limit {
	if strings.HasSuffix(scope, "/requests") {
		return []budget.Limit{budget.PerWindow(1000, time.Hour).Named("hourly"), budget.PerWindow(8000, 24*time.Hour).Named("daily")}
	}
	return nil
}

func (w *watched) charge(charges ...budget.Charge) {
	w.t.Helper()
	for i := range charges {
		charges[i].Limits = requestLimits(charges[i].Scope)
	}
	require.NoError(w.t, pgx.BeginFunc(w.t.Context(), w.pool, func(tx pgx.Tx) error {
		_, err := w.client.Budget.ChargeEach(w.t.Context(), tx, charges...)
		return err
	}))
}

// morning is a morning of a small company: the entries that it makes, by the clock.
func (w *watched) morning(hours int) {
	w.t.Helper()
	ctx := w.t.Context()
	paces := map[string]float64{
		"org/acme/requests": 15.5, "org/umbrella/requests": 9, "org/initech/requests": 6, "org/hooli/requests": 12, "org/stark/uploads": 3,
		"org/wayne/mails": 2, "org/tyrell/requests": 5, "org/cyberdyne/renders": 1, "org/soylent/exports": 1, "org/globex/requests": 4,
	}
	for minute := range hours * 60 {
		var charges []budget.Charge
		for scope, pace := range paces {
			wave := pace * (0.55 + 0.45*math.Sin(float64(minute)/38+float64(len(scope))))
			if n := int64(wave + 0.5); n > 0 {
				charges = append(charges, budget.Charge{Scope: scope, Amount: n, Note: budget.Note{Actor: "gateway"}})
			}
		}
		w.charge(charges...)
		if minute%24 == 7 {
			w.ticket(minute)
		}
		w.clock.Advance(time.Minute)
	}
	for i := range 14 {
		issued := w.clock.Now()
		w.clock.Advance(time.Duration(9+i*i%23) * time.Millisecond)
		_, err := metered.Do(ctx, w.client, metered.Command{
			Tenant: "acme", ID: fmt.Sprintf("render-%04d", 1200+i), Name: []string{"render", "upload", "export"}[i%3], Input: i, IssuedAt: issued,
			RecordRefusal: true,
			Charges:       []budget.Charge{{Scope: "org/acme/requests", Amount: int64(1 + i%4*(i%5)*30), Limits: requestLimits("/requests"), Note: budget.Note{Actor: "user:ann"}}},
		}, func(ctx context.Context, tx *metered.Tx) (int, error) {
			_, err := tx.Enqueue(ctx, render{fmt.Sprint(i)}, &jobs.Options{Key: fmt.Sprint("asset/", i)})
			return i, err
		})
		if metered.Code(err) != "budget_exceeded" {
			require.NoError(w.t, err)
		}
		w.clock.Advance(3 * time.Second)
		var burst []budget.Charge
		for scope, pace := range paces {
			for range int(pace) {
				burst = append(burst, budget.Charge{Scope: scope, Amount: 1})
			}
		}
		w.charge(burst...)
	}
}

// ticket is a hold that ends in one way or another, or is open.
func (w *watched) ticket(minute int) {
	w.t.Helper()
	ctx := w.t.Context()
	require.NoError(w.t, pgx.BeginFunc(ctx, w.pool, func(tx pgx.Tx) error {
		h, err := w.client.Holds.Place(ctx, tx, holds.Placement{
			Tenant: "acme", ID: fmt.Sprintf("order-%04d", 300+minute), Holder: "user:ann", TTL: 40 * time.Minute,
			Lines: []holds.Line{{Scope: "org/acme/requests", Amount: int64(5 + minute%9), Limits: requestLimits("/requests")}},
		})
		if err != nil {
			return err
		}
		w.clock.Advance(time.Duration(minute%5) * time.Second)
		switch minute / 24 % 4 {
		case 0:
			_, err = w.client.Holds.Capture(ctx, tx, holds.Capture{Tenant: "acme", IDs: []string{h.ID}, All: true, Note: budget.Note{Reason: "paid"}})
		case 1:
			_, err = w.client.Holds.Release(ctx, tx, holds.Release{Tenant: "acme", IDs: []string{h.ID}})
		}
		return err
	}))
}

// The page in a browser: on a phone, in the dark, by keyboard, and live. The browser enforces the content policy.
func TestConsole_PhoneDarkKeyboardAndLive(t *testing.T) {
	t.Parallel()
	binary := chromium(t)
	dir := os.Getenv(screenshotsEnv)
	if dir == "" {
		dir = t.TempDir()
	}
	require.NoError(t, os.MkdirAll(dir, 0o755))
	pool := pgtest.Open(t)
	w := &watched{t, pool, pgtest.NewClient(t, pool, metered.Config{}), pgtest.SetClock(t, pool, pgtest.Tomorrow(0).Add(-15*time.Hour))}
	w.morning(6)
	const prefix = "/ops/console"
	handler, err := console.New(pgtest.AsRole(t, pool, metered.GrantReportingSQL, "grant select on river_job to $role"), console.Config{
		Refresh: 100 * time.Millisecond, Timeout: 30 * time.Second,
		Limits: requestLimits,
	})
	require.NoError(t, err)
	server := httptest.NewServer(http.StripPrefix(prefix, handler))
	t.Cleanup(server.Close)
	t.Cleanup(handler.Close)
	at := func(name string) string { return server.URL + prefix + "/" + name }

	allocator, stop := chromedp.NewExecAllocator(context.Background(), append(chromedp.DefaultExecAllocatorOptions[:],
		chromedp.ExecPath(binary), chromedp.NoSandbox, chromedp.Flag("disable-dev-shm-usage", true))...)
	t.Cleanup(stop)
	browser, end := chromedp.NewContext(allocator)
	t.Cleanup(end)
	require.NoError(t, chromedp.Do(browser))

	dark := &emulation.MediaFeature{Name: "prefers-color-scheme", Value: "dark"}
	still := &emulation.MediaFeature{Name: "prefers-reduced-motion", Value: "reduce"}
	phone := openPage(t, browser, "phone", dir, 390, 844, true, dark, still)
	phone.do(chromedp.Navigate(at("")))
	phone.seesText("#live", "Live")
	phone.fits()
	require.Equal(t, "rgb(18, 22, 30)", eval[string](phone, `getComputedStyle(document.body).backgroundColor`))
	require.Zero(t, eval[int](phone, `document.getAnimations().length`), "something moves")
	phone.shot("overview")

	// Changes are seen without a reload, and the focus stays where it is.
	link := `document.querySelector('#hot a[href*="acme"]')`
	eval[bool](phone, `window.kept = true, `+link+`.focus(), true`)
	focus := phone.focused()
	w.charge(budget.Charge{Scope: "live/<b>now", Amount: 5})
	phone.seesText("#hot", "live/<b>now")
	require.Equal(t, focus, phone.focused())
	require.True(t, eval[bool](phone, `window.kept`), "it was not reloaded")

	// By keyboard: skip to the content, and on to a scope.
	phone.do(chromedp.Navigate(at("")), chromedp.KeyEvent(kb.Tab))
	require.Equal(t, "#main", phone.focused())
	require.GreaterOrEqual(t, eval[float64](phone, `document.activeElement.getBoundingClientRect().top`), 0.0, "the focus is on the screen")
	phone.do(chromedp.KeyEvent(kb.Enter))
	require.Equal(t, "main", phone.focused())
	for range 3 { // the table, and its first links
		phone.do(chromedp.KeyEvent(kb.Tab))
	}
	require.NotEqual(t, "none", eval[string](phone, `getComputedStyle(document.activeElement).outlineStyle`), "the focus is seen")
	require.Contains(t, phone.focused(), "scope?scope=")
	phone.do(chromedp.Navigate(at("scope?scope=org/acme/requests")))
	phone.drawn("dark=1")
	phone.drawn("narrow=1")
	phone.fits()
	phone.shot("scope")

	desk := openPage(t, browser, "desk", dir, 1280, 1000, false)
	desk.do(chromedp.Navigate(at("scope?scope=org/acme/requests&amount=400")))
	desk.drawn(".svg?")
	desk.seesText("#live", "Live")
	desk.seesText("#limits", "would be refused")
	w.clock.Advance(10 * time.Minute) // its hour is full
	w.charge(budget.Charge{Scope: "org/acme/requests", Amount: 1, Note: budget.Note{Actor: "latecomer"}})
	desk.seesText("#entries", "latecomer")
	desk.do(chromedp.Click(chromedp.CSS("#pause")))
	desk.seesText("#live", "Paused")
	require.True(t, eval[bool](desk, `performance.getEntriesByType("resource").every((r) => r.name.startsWith("`+at("")+`"))`))
	require.Equal(t, "undefined", eval[string](desk, `(() => {
		const inline = document.createElement("script");
		inline.textContent = "window.ran = true";
		document.body.append(inline);
		return typeof window.ran;
	})()`), "the policy is in force")
	desk.fits()
	desk.inCards("a scope")

	// No scope shows a limit that is passed, or units below zero.
	for _, scope := range []string{"org/acme/requests", "org/umbrella/requests", "org/hooli/requests", "org/globex/requests"} {
		desk.do(chromedp.Navigate(at("scope?scope=" + scope)))
		rows := eval[[][]int64](desk, `[...document.querySelectorAll('[aria-label="Limits"] tbody tr')].map((row) =>
			[...row.querySelectorAll("td.n")].map((cell) => Number(cell.textContent.replace(/\s/g, "").replace("−", "-"))))`)
		require.Len(t, rows, len(requestLimits(scope)))
		for i, row := range rows {
			used, held, leased, of, room := row[0], row[1], row[2], row[3], row[4]
			require.Positive(t, used, "%s: %v", scope, row)
			require.GreaterOrEqual(t, min(held, leased, room), int64(0), "%s: %v", scope, row)
			require.Equal(t, requestLimits(scope)[i].Max, of, scope)
			require.Equal(t, of, used+held+leased+room, "%s: %v", scope, row)
		}
	}
	if os.Getenv(screenshotsEnv) != "" {
		desk.do(chromedp.EmulateViewport(1200, 1480)) // desk-scope.png is console/screenshot.png
		for name, address := range map[string]string{
			"overview": at(""), "scope": at("scope?scope=org/hooli/requests&amount=700"), "acme": at("scope?scope=org/acme/requests"),
			"timeline": at("scope?scope=org/acme/requests#holds"), "scopes": at("scopes"), "holds": at("holds"), "hold": at("hold?tenant=acme&id=order-0307"),
			"operations": at("operations"), "operation": at("operation?tenant=acme&id=render-1201"), "missing": at("missing"),
		} {
			desk.do(chromedp.Navigate(address), chromedp.Sleep(time.Second))
			desk.shot(name)
		}
	}
}
