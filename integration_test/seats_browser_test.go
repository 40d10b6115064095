package integration_test

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/chromedp/chromedp"
	"github.com/chromedp/chromedp/kb"
	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/internal/pgtest"
)

// screenshotsEnv names the directory for the browser test's pictures. Defaults to a temporary one.
const screenshotsEnv = "SCREENSHOTS"

// chromium finds a browser, as the distributions call it. Three pages in it take a minute of the machine, so it is used where METERED_LONG is
// set, as in a step of .ci/run.
func chromium(t *testing.T) string {
	t.Helper()
	if !pgtest.Long {
		t.Skip("a browser takes a minute: make long and .ci/run have it")
	}
	for _, name := range []string{"chromium", "chromium-browser", "google-chrome", "google-chrome-stable"} {
		if path, err := exec.LookPath(name); err == nil {
			return path
		}
	}
	t.Skip("no Chromium in PATH: install the package chromium to have this page tested")
	return ""
}

// seatsProgram runs two processes of examples/seats on an empty database.
func seatsProgram(t *testing.T, args ...string) (bases []string) {
	t.Helper()
	pool := pgtest.OpenWith(t, pgtest.Options{Empty: true})
	binary := filepath.Join(t.TempDir(), "seats")
	build := exec.Command("go", "build", "-o", binary, "./examples/seats")
	build.Dir = ".."
	out, err := build.CombinedOutput()
	require.NoError(t, err, "go build: %s", out)
	for range 2 {
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Minute)
		t.Cleanup(cancel)
		process := exec.CommandContext(ctx, binary, append([]string{"-listen", "127.0.0.1:0"}, args...)...)
		process.Env = append(os.Environ(), "DATABASE_URL="+pgtest.ConnString(pool))
		process.Stderr = os.Stderr
		stdout, err := process.StdoutPipe()
		require.NoError(t, err)
		require.NoError(t, process.Start())
		lines, base := bufio.NewScanner(stdout), ""
		for base == "" && lines.Scan() {
			_, base, _ = strings.Cut(lines.Text(), "open ")
		}
		require.NotEmpty(t, base)
		drained := make(chan struct{})
		go func() {
			defer close(drained)
			_, _ = io.Copy(io.Discard, stdout)
		}()
		t.Cleanup(func() {
			require.NoError(t, process.Process.Signal(os.Interrupt))
			<-drained
			require.NoError(t, process.Wait())
		})
		bases = append(bases, base)
	}
	return bases
}

// page is a browser of one user.
type page struct {
	t    *testing.T
	name string
	ctx  context.Context
	dir  string // for screenshots
}

// newPage is a browser with cookies of its own, that signs a user in by clicking and opens the event.
func newPage(t *testing.T, browser context.Context, base, user, dir string, width, height int64, phone bool) *page {
	t.Helper()
	ctx, cancel := chromedp.NewContext(browser, chromedp.WithNewBrowserContext())
	t.Cleanup(cancel)
	p := &page{t: t, name: user, ctx: ctx, dir: dir}
	viewport := []chromedp.EmulateViewportOption{chromedp.EmulateScale(2)}
	if phone {
		viewport = append(viewport, chromedp.EmulateMobile, chromedp.EmulateTouch, chromedp.EmulatePortrait)
	}
	require.NoError(t, chromedp.Do(ctx, chromedp.EmulateViewport(width, height, viewport...))) // it also opens the tab, which has no end
	p.do(chromedp.Navigate(base), chromedp.Click(fmt.Sprintf(`//button[contains(., %q)]`, user)),
		chromedp.Click(chromedp.CSS("a.row")), chromedp.WaitVisible(chromedp.CSS("#live.on")))
	return p
}

// clickUntil clicks until something is seen: a click misses a button that still slides into its place.
func (p *page) clickUntil(button, seen string) {
	p.t.Helper()
	ctx, cancel := context.WithTimeout(p.ctx, time.Minute)
	defer cancel()
	try := func(step chromedp.Action[chromedp.Void]) error {
		short, cancel := context.WithTimeout(ctx, 5*time.Second)
		defer cancel()
		return chromedp.Do(short, step)
	}
	for {
		_ = try(chromedp.Click(chromedp.CSS(button)))
		err := try(chromedp.WaitVisible(chromedp.CSS(seen)))
		if err == nil {
			return
		}
		if ctx.Err() != nil {
			p.shot("failed")
			require.NoError(p.t, err, p.name)
		}
	}
}

func (p *page) do(steps ...chromedp.Action[chromedp.Void]) {
	p.t.Helper()
	ctx, cancel := context.WithTimeout(p.ctx, time.Minute)
	defer cancel()
	for _, step := range steps {
		err := chromedp.Do(ctx, step)
		for err != nil && ctx.Err() == nil && strings.Contains(err.Error(), "does not have a layout object") {
			err = chromedp.Do(ctx, step) // the page was drawn anew between finding the element and clicking it
		}
		if err != nil {
			p.shot("failed")
		}
		require.NoError(p.t, err, p.name)
	}
}

func eval[T any](p *page, expression string) T {
	p.t.Helper()
	ctx, cancel := context.WithTimeout(p.ctx, time.Minute)
	defer cancel()
	v, err := chromedp.Run(ctx, chromedp.Evaluate[T](expression))
	require.NoError(p.t, err, "%s: %s", p.name, expression)
	return v
}

// see waits until an expression is true in the page.
func (p *page) see(expression, what string) {
	p.t.Helper()
	for end := pgtest.Patience(p.t); !eval[bool](p, expression); time.Sleep(30 * time.Millisecond) { // a browser is asked, it does not say when
		if time.Now().After(end) {
			p.shot("failed")
			require.Fail(p.t, p.name+" does not see: "+what)
		}
	}
}

// seat is the expression of a seat's button.
func seat(index int) string {
	return fmt.Sprintf(`document.querySelectorAll("button.seat")[%d]`, index)
}

func (p *page) seesSeat(index int, state string) {
	p.t.Helper()
	p.see(fmt.Sprintf(`%s.classList.contains(%q)`, seat(index), state), fmt.Sprint("seat ", index, " ", state))
}

func (p *page) seesText(selector, text string) {
	p.t.Helper()
	p.see(fmt.Sprintf(`(document.querySelector(%q)?.textContent ?? "").includes(%q)`, selector, text), text)
}

func (p *page) clickSeat(index int) {
	p.t.Helper()
	p.do(chromedp.Click(p.selector(index)))
}

// selector finds a seat's button.
func (p *page) selector(index int) chromedp.CSS {
	p.t.Helper()
	return chromedp.CSS(fmt.Sprintf(`button[data-id=%q]`, eval[string](p, seat(index)+`.dataset.id`)))
}

func (p *page) shot(what string) {
	ctx, cancel := context.WithTimeout(p.ctx, time.Minute)
	defer cancel()
	png, err := chromedp.Run(ctx, chromedp.CaptureScreenshot())
	if err != nil {
		p.t.Log("no screenshot:", err)
		return
	}
	file := filepath.Join(p.dir, strings.ToLower(p.name)+"-"+what+".png")
	require.NoError(p.t, os.WriteFile(file, png, 0o644))
	p.t.Log("screenshot:", file)
}

// noSideways fails if the page is wider than the screen.
func (p *page) noSideways() {
	p.t.Helper()
	require.False(p.t, eval[bool](p, `document.documentElement.scrollWidth > window.innerWidth`), "%s has to scroll sideways", p.name)
}

// Two users in browsers of their own, one of them on a phone, each at another process, and the box office.
func TestSeatsPage_TwoBrowsersSeeEachOther(t *testing.T) {
	t.Parallel()
	binary := chromium(t)
	dir := os.Getenv(screenshotsEnv)
	if dir == "" {
		dir = t.TempDir()
	}
	require.NoError(t, os.MkdirAll(dir, 0o755))
	bases := seatsProgram(t, "-hold", "55s", "-pay", "300ms")
	allocator, stop := chromedp.NewExecAllocator(context.Background(), append(chromedp.DefaultExecAllocatorOptions[:],
		chromedp.ExecPath(binary), chromedp.NoSandbox, chromedp.Flag("disable-dev-shm-usage", true))...)
	t.Cleanup(stop)
	browser, end := chromedp.NewContext(allocator)
	t.Cleanup(end)
	require.NoError(t, chromedp.Do(browser))

	ben := newPage(t, browser, bases[0], "Ben", dir, 1280, 900, false)
	cleo := newPage(t, browser, bases[1], "Cleo", dir, 390, 844, true)
	cleo.noSideways()

	// A hold is seen by both, and belongs to one.
	ben.clickSeat(4)
	ben.seesSeat(4, "mine")
	ben.seesText("#holds", "Stalls left A5")
	cleo.seesSeat(4, "held")
	cleo.clickSeat(4)
	cleo.seesText("#toasts", "Somebody else is holding Stalls left A5. It is free in 0:")
	ben.seesText("#n-held", "1")

	// The clock counts down, and warns half a minute before the end.
	ben.seesText("#holds .clock", "0:")
	ben.see(`!document.querySelector("#holds .late")`, "no warning yet")
	ben.seesText("#alarm", "30 seconds left for Stalls left A5.")
	ben.seesSeat(4, "late")
	ben.shot("late")

	// By keyboard: to the right, down, and Enter.
	cleo.do(chromedp.Focus(cleo.selector(0)), chromedp.KeyEvent(kb.ArrowRight), chromedp.KeyEvent(kb.ArrowDown), chromedp.KeyEvent(kb.Enter))
	cleo.seesSeat(11, "mine")
	ben.seesSeat(11, "held")

	// Checkout on the phone, soon after the hold, which does not wait for a slow machine.
	cleo.do(chromedp.Click(chromedp.CSS("#fold")), chromedp.WaitVisible(chromedp.CSS("#inside")))
	cleo.shot("cart")
	cleo.noSideways()
	cleo.clickUntil("#pay", "#bought")
	cleo.seesText("#bought-text", "Stalls left B2")
	cleo.shot("bought")
	cleo.do(chromedp.Click(chromedp.CSS("#bought button")))
	cleo.seesSeat(11, "bought")
	ben.seesSeat(11, "sold")
	cleo.do(chromedp.Click(chromedp.CSS("#fold")))

	// The box office blocks a seat under somebody's hands, and lowers a capacity.
	ada := newPage(t, browser, bases[0], "Ada", dir, 1024, 768, false)
	ada.do(chromedp.Click(chromedp.CSS("#blocking")))
	cleo.clickSeat(12)
	ben.seesSeat(12, "held")
	cleo.see(`document.querySelectorAll("#holds .item").length === 1`, "one hold")
	ada.clickSeat(12)
	ada.seesSeat(12, "blocked")
	cleo.seesSeat(12, "blocked")
	cleo.see(`!document.querySelector("#holds .item")`, "no hold left")
	ada.do(chromedp.SetValue(chromedp.CSS(`.block:nth-of-type(2) input`), "0"))
	ben.see(`document.querySelectorAll(".block")[1].classList.contains("full")`, "a full block")
	ada.clickSeat(300)
	ada.seesSeat(300, "blocked")
	ben.seesSeat(300, "blocked")
	ada.clickSeat(300)
	ben.seesSeat(300, "available")

	ada.shot("office")
	cleo.shot("map")

	// The end of a hold, at both, and the same seat again.
	ben.seesText("#alarm", "The time for Stalls left A5 is over.")
	ben.seesText("#holds .over", "run out")
	ben.seesSeat(4, "available")
	cleo.seesSeat(4, "available")
	ben.do(chromedp.Click(chromedp.CSS("#holds .over button")))
	ben.seesSeat(4, "mine")
	for _, index := range []int{5, 6, 404} {
		ben.clickSeat(index)
		ben.seesSeat(index, "mine")
	}
	ben.shot("map")
	ben.noSideways()
	// While its release is under way, a seat is not paid for.
	eval[bool](ben, `document.querySelector("#holds li:nth-child(2) button").click(), document.querySelector("#pay").click(), true`)
	ben.do(chromedp.WaitVisible(chromedp.CSS("#bought")))
	cleo.seesSeat(5, "available")
	cleo.see(`document.querySelectorAll("button.seat.sold").length === 3`, "three sold to another")
	cleo.seesText("#n-sold", "4")

	// The manager closes the sale by its window.
	closes := chromedp.CSS(`#window [name="closes"]`)
	ada.do(chromedp.Focus(closes), chromedp.SetValue(closes, "2020-01-01T00:00"), chromedp.Click(chromedp.CSS("#window button")))
	ben.do(chromedp.Click(chromedp.CSS("#bought button")))
	ben.seesText("#sale", "sale closed")
	ben.clickSeat(8)
	ben.seesText("#toasts", "The sale has ended.")
	ada.noSideways()
	ada.shot("closed")
}
