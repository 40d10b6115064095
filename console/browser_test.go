package console_test

import (
	"context"
	"encoding/json"
	"fmt"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/chromedp/cdproto/cdp"
	"github.com/chromedp/cdproto/emulation"
	"github.com/chromedp/chromedp"
	"github.com/chromedp/chromedp/kb"
	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered"
	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/console"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/pgtest"
	"github.com/pgmetered/metered/jobs"
)

// screenshotsEnv names the directory that this test writes what it saw to. Without it that is a temporary one.
//
//	SCREENSHOTS=/tmp/shots go test ./console -run Browser
const screenshotsEnv = "SCREENSHOTS"

// chromium finds a browser, as the distributions call it.
func chromium() string {
	for _, name := range []string{"chromium", "chromium-browser", "google-chrome", "google-chrome-stable"} {
		if path, err := exec.LookPath(name); err == nil {
			return path
		}
	}
	return ""
}

// tab is one of the browser's.
type tab struct {
	t   *testing.T
	ctx context.Context
	dir string // for screenshots
}

func openTab(t *testing.T, browser context.Context, dir string, width, height int64, phone bool, features ...*emulation.MediaFeature) *tab {
	t.Helper()
	ctx, cancel := chromedp.NewContext(browser, chromedp.WithNewBrowserContext())
	t.Cleanup(cancel)
	var viewport []chromedp.EmulateViewportOption
	if phone {
		viewport = append(viewport, chromedp.EmulateScale(2), chromedp.EmulateMobile, chromedp.EmulateTouch, chromedp.EmulatePortrait)
	}
	b := &tab{t: t, ctx: ctx, dir: dir}
	require.NoError(t, chromedp.Do(ctx, chromedp.EmulateViewport(width, height, viewport...), // it also opens the tab, which has no end
		chromedp.Func(func(ctx context.Context, target *chromedp.Target) error {
			_, err := cdp.Call(ctx, target, emulation.SetEmulatedMedia, emulation.SetEmulatedMediaParams{Features: features})
			return err
		})))
	return b
}

func (b *tab) do(steps ...chromedp.Action[chromedp.Void]) {
	b.t.Helper()
	ctx, cancel := context.WithTimeout(b.ctx, time.Minute)
	defer cancel()
	require.NoError(b.t, chromedp.Do(ctx, steps...))
}

func eval[T any](b *tab, expression string) T {
	b.t.Helper()
	ctx, cancel := context.WithTimeout(b.ctx, time.Minute)
	defer cancel()
	v, err := chromedp.Run(ctx, chromedp.Evaluate[T](expression))
	require.NoError(b.t, err, expression)
	return v
}

// sees waits until an expression is true in the page.
func (b *tab) sees(expression string) {
	b.t.Helper()
	for end := time.Now().Add(time.Minute); !eval[bool](b, expression); time.Sleep(30 * time.Millisecond) {
		if time.Now().After(end) {
			b.shot("failed")
			require.Fail(b.t, "never true: "+expression, eval[string](b, `document.body.innerText`))
		}
	}
}

func (b *tab) seesText(selector, text string) {
	b.t.Helper()
	b.sees(fmt.Sprintf(`(document.querySelector(%s)?.textContent ?? "").includes(%s)`, quoted(selector), quoted(text)))
}

func quoted(text string) string {
	q, _ := json.Marshal(text)
	return string(q)
}

func (b *tab) shot(what string) []byte {
	b.t.Helper()
	ctx, cancel := context.WithTimeout(b.ctx, time.Minute)
	defer cancel()
	png, err := chromedp.Run(ctx, chromedp.CaptureScreenshot())
	require.NoError(b.t, err)
	require.NoError(b.t, os.WriteFile(filepath.Join(b.dir, what+".png"), png, 0o644))
	return png
}

// fits fails if the page is wider than the screen, or what one touches is smaller than a finger.
func (b *tab) fits() {
	b.t.Helper()
	require.False(b.t, eval[bool](b, `document.documentElement.scrollWidth > window.innerWidth`), "it has to be scrolled sideways")
	require.Empty(b.t, eval[string](b, `[...document.querySelectorAll("nav a, button, input:not([type=hidden]), select")]
		.filter((e) => e.offsetParent && e.getBoundingClientRect().height < 32).map((e) => e.outerHTML).join("\n")`))
}

// drawn waits until all drawings are there.
func (b *tab) drawn(variant string) {
	b.t.Helper()
	b.sees(fmt.Sprintf(`[...document.querySelectorAll("picture img")].length > 0 && [...document.querySelectorAll("picture img")].every(
		(i) => i.complete && i.naturalWidth > 0 && i.currentSrc.includes(%q))`, variant))
}

// focused is what has the focus.
func (b *tab) focused() string {
	b.t.Helper()
	return eval[string](b, `document.activeElement.getAttribute("href") ?? document.activeElement.id`)
}

// morning is a morning of a small company: what it counts, by the clock.
func (w *world) morning(clock *pgtest.Clock, hours int) {
	w.t.Helper()
	ctx := w.t.Context()
	hourly := budget.PerWindow(1000, time.Hour).Named("hourly")
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
		require.NoError(w.t, pgx.BeginFunc(ctx, w.pool, func(tx pgx.Tx) error {
			_, err := w.client.Budget.ChargeEach(ctx, tx, charges...)
			return err
		}))
		if minute%24 == 7 {
			w.ticket(clock, minute)
		}
		clock.Advance(time.Minute)
	}
	for i := range 14 {
		issued := clock.Now()
		clock.Advance(time.Duration(9+i*i%23) * time.Millisecond)
		_, err := metered.Do(ctx, w.client, metered.Command{
			Namespace: "acme", ID: fmt.Sprintf("render-%04d", 1200+i), Name: []string{"render", "upload", "export"}[i%3], Input: i, IssuedAt: issued,
			RecordRefusal: true,
			Charges:       []budget.Charge{{Scope: "org/acme/requests", Amount: int64(1 + i%4*(i%5)*30), Limits: []budget.Limit{hourly}, Note: budget.Note{Actor: "user:ann"}}},
		}, func(ctx context.Context, tx *metered.Tx) (int, error) {
			_, err := tx.Enqueue(ctx, process{Name: fmt.Sprint(i)}, &jobs.Options{Key: fmt.Sprint("asset/", i)})
			return i, err
		})
		if metered.Code(err) != "budget_exceeded" {
			require.NoError(w.t, err)
		}
		clock.Advance(3 * time.Second)
		for scope, pace := range paces {
			for range int(pace) {
				w.charge(scope, 1)
			}
		}
	}
}

// ticket is a hold that ends in one way or another, or is open.
func (w *world) ticket(clock *pgtest.Clock, minute int) {
	w.t.Helper()
	ctx := w.t.Context()
	require.NoError(w.t, pgx.BeginFunc(ctx, w.pool, func(tx pgx.Tx) error {
		h, err := w.client.Holds.Place(ctx, tx, holds.Request{
			Tenant: "acme", ID: fmt.Sprintf("order-%04d", 300+minute), Holder: "user:ann", TTL: 40 * time.Minute,
			Lines: []holds.Line{{Scope: "org/acme/requests", Amount: int64(5 + minute%9)}},
		})
		if err != nil {
			return err
		}
		clock.Advance(time.Duration(minute%5) * time.Second)
		switch minute / 24 % 4 {
		case 0:
			_, err = w.client.Holds.Capture(ctx, tx, holds.Capture{Tenant: "acme", IDs: []string{h.ID}, All: true, Note: budget.Note{Reason: "paid"}})
		case 1:
			_, err = w.client.Holds.Release(ctx, tx, holds.Release{Tenant: "acme", IDs: []string{h.ID}})
		}
		return err
	}))
}

// The page in a browser: on a phone, in the dark, by keyboard, and live; under the policy, which the browser enforces.
func TestBrowser_PhoneDarkKeyboardAndLive(t *testing.T) {
	t.Parallel()
	binary := chromium()
	if binary == "" {
		t.Skip("no Chromium in PATH: install the package chromium to have the console tested")
	}
	dir := os.Getenv(screenshotsEnv)
	if dir == "" {
		dir = t.TempDir()
	}
	require.NoError(t, os.MkdirAll(dir, 0o755))
	w := newWorld(t, console.Config{
		Refresh: 100 * time.Millisecond,
		Limits: func(scope string) []budget.Limit {
			if strings.HasSuffix(scope, "/requests") {
				return []budget.Limit{budget.PerWindow(1000, time.Hour).Named("hourly"), budget.PerWindow(8000, 24*time.Hour).Named("daily")}
			}
			return nil
		},
	}, "grant select on river_job to $role")
	clock := pgtest.SetClock(t, w.pool, pgtest.Tomorrow(0).Add(-15*time.Hour))
	w.morning(clock, 6)

	allocator, stop := chromedp.NewExecAllocator(context.Background(), append(chromedp.DefaultExecAllocatorOptions[:],
		chromedp.ExecPath(binary), chromedp.NoSandbox, chromedp.Flag("disable-dev-shm-usage", true))...)
	t.Cleanup(stop)
	browser, end := chromedp.NewContext(allocator)
	t.Cleanup(end)
	require.NoError(t, chromedp.Do(browser))

	dark := &emulation.MediaFeature{Name: "prefers-color-scheme", Value: "dark"}
	still := &emulation.MediaFeature{Name: "prefers-reduced-motion", Value: "reduce"}
	phone := openTab(t, browser, dir, 390, 844, true, dark, still)
	phone.do(chromedp.Navigate(w.url("")))
	phone.seesText("#live", "Live")
	phone.fits()
	require.Equal(t, "rgb(18, 22, 30)", eval[string](phone, `getComputedStyle(document.body).backgroundColor`))
	require.Zero(t, eval[int](phone, `document.getAnimations().length`), "something moves")
	phone.shot("phone-overview")

	// What happens is seen without a reload, and the focus stays where it is.
	link := `document.querySelector('#hot a[href*="acme"]')`
	eval[bool](phone, `window.kept = true, `+link+`.focus(), true`)
	focus := phone.focused()
	w.charge("live/<b>now", 5)
	phone.seesText("#hot", "live/<b>now")
	require.Equal(t, focus, phone.focused())
	require.True(t, eval[bool](phone, `window.kept`), "it was not reloaded")

	// By keyboard: skip to the content; and on to a scope.
	phone.do(chromedp.Navigate(w.url("")), chromedp.KeyEvent(kb.Tab))
	require.Equal(t, "#main", phone.focused())
	require.GreaterOrEqual(t, eval[float64](phone, `document.activeElement.getBoundingClientRect().top`), 0.0, "what has the focus is seen")
	phone.do(chromedp.KeyEvent(kb.Enter))
	require.Equal(t, "main", phone.focused())
	for range 3 { // the table, and its first links
		phone.do(chromedp.KeyEvent(kb.Tab))
	}
	require.NotEqual(t, "none", eval[string](phone, `getComputedStyle(document.activeElement).outlineStyle`), "the focus is seen")
	require.Contains(t, phone.focused(), "scope?scope=")
	phone.do(chromedp.Navigate(w.url("scope", "scope", "org/acme/requests")))
	phone.drawn("dark=1")
	phone.drawn("narrow=1")
	phone.fits()
	phone.shot("phone-scope")

	desk := openTab(t, browser, dir, 1280, 1000, false)
	desk.do(chromedp.Navigate(w.url("scope", "scope", "org/acme/requests", "amount", "400")))
	desk.drawn(".svg?")
	desk.seesText("#live", "Live")
	desk.seesText("#limits", "would be refused")
	w.charge("org/acme/requests", 12345)
	desk.seesText("#entries", "12\u202f345")
	desk.do(chromedp.Click(chromedp.CSS("#pause")))
	desk.seesText("#live", "Paused")
	require.True(t, eval[bool](desk, `performance.getEntriesByType("resource").every((r) => r.name.startsWith(`+quoted(w.url(""))+`))`))
	require.Equal(t, "undefined", eval[string](desk, `(() => {
		const inline = document.createElement("script");
		inline.textContent = "window.ran = true";
		document.body.append(inline);
		return typeof window.ran;
	})()`), "the policy is in force")
	desk.fits()
	if os.Getenv(screenshotsEnv) != "" {
		for name, address := range map[string]string{
			"overview": w.url(""), "scope": w.url("scope", "scope", "org/hooli/requests", "amount", "700"), "acme": w.url("scope", "scope", "org/acme/requests"),
			"scopes": w.url("scopes"), "holds": w.url("holds"), "hold": w.url("hold", "tenant", "acme", "id", "order-0307"),
			"operations": w.url("operations"), "operation": w.url("operation", "namespace", "acme", "id", "render-1201"), "missing": w.url("missing"),
		} {
			desk.do(chromedp.Navigate(address), chromedp.Sleep(time.Second))
			desk.shot(name)
		}
	}
}
