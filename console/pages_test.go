package console_test

import (
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
	"golang.org/x/net/html"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/console"
	"github.com/pgmetered/metered/holds"
)

// hostile are names that have broken pages before.
var hostile = []string{
	`a"b'c`, `<script>alert(1)</script>`, `"><img src=x onerror=alert(1)>`, `a/b//../c`, `.`, `..`, `100%25 %zz`, "line\nbreak", "\ttab `quote` ${x} {{.}}",
	`?x=1&y=2#frag+plus;semi`, ` lead and trail `, "\u202egnp.exe", `javascript:alert(1)`, `\back\slash`, strings.Repeat("ü", 127) + "x", strings.Repeat("🎟", 63) + "abc",
}

// checkPage reports faults that no page may have.
func checkPage(t *testing.T, where string, n *html.Node) {
	t.Helper()
	ids := map[string]bool{}
	for _, e := range all(n, "*") {
		for _, a := range e.Attr {
			require.False(t, strings.HasPrefix(a.Key, "on"), "%s: <%s> has %s", where, e.Data, a.Key)
			require.NotEqual(t, "style", a.Key, "%s: <%s> has a style, which the policy forbids", where, e.Data)
			if a.Key == "id" {
				require.False(t, ids[a.Val], "%s: two elements have the id %s", where, a.Val)
				ids[a.Val] = true
			}
		}
	}
	for _, s := range all(n, "script", "style") {
		src, _ := attr(s, "src")
		require.Contains(t, src, "console.js", "%s has an inline script or style", where)
		require.Nil(t, s.FirstChild)
	}
	require.Len(t, all(n, "h1"), 1, where)
	require.Len(t, all(n, "main"), 1, where)
	require.Len(t, all(n, "header"), 1, where)
	lang, _ := attr(all(n, "html")[0], "lang")
	require.Equal(t, "en", lang)
	skip, _ := attr(all(n, "a")[0], "href")
	require.Equal(t, "#main", skip, "%s does not begin with a link to skip to the content", where)
	for _, e := range all(n, "input", "select") {
		id, _ := attr(e, "id")
		kind, _ := attr(e, "type")
		labelled := kind == "hidden" || slices.ContainsFunc(all(n, "label"), func(l *html.Node) bool {
			of, _ := attr(l, "for")
			return of == id && id != "" || slices.Contains(all(l, "input", "select"), e)
		})
		require.True(t, labelled, "%s: a field has no label", where)
	}
	for _, table := range all(n, "table") {
		for _, th := range all(table, "th") {
			_, ok := attr(th, "scope")
			require.True(t, ok, "%s: a header of a table has no scope", where)
		}
		region := table.Parent
		_, named := attr(region, "aria-label")
		_, by := attr(region, "aria-labelledby")
		tab, _ := attr(region, "tabindex")
		require.True(t, (named || by) && tab == "0", "%s: a table cannot be scrolled by keyboard", where)
	}
	for _, img := range all(n, "img") {
		_, ok := attr(img, "alt")
		require.True(t, ok, "%s: an image has no text", where)
	}
}

// crawl follows every link of every page, and returns the pages by address.
func (w *world) crawl(most int) map[string]*html.Node {
	w.t.Helper()
	seen := map[string]*html.Node{}
	queue := []string{w.url("")}
	for len(queue) > 0 && len(seen) < most {
		address := queue[0]
		queue = queue[1:]
		if _, ok := seen[address]; ok {
			continue
		}
		response, body := w.get(address)
		require.Equal(w.t, http.StatusOK, response.StatusCode, address)
		seen[address] = nil
		if !strings.HasPrefix(response.Header.Get("Content-Type"), "text/html") {
			continue
		}
		n := parse(w.t, body)
		seen[address] = n
		checkPage(w.t, address, n)
		base, err := url.Parse(address)
		require.NoError(w.t, err)
		for _, e := range all(n, "*") {
			for _, key := range []string{"href", "src", "srcset"} {
				link, ok := attr(e, key)
				if !ok {
					continue
				}
				to, err := base.Parse(link)
				require.NoError(w.t, err)
				to.Fragment = ""
				require.True(w.t, strings.HasPrefix(to.String(), w.url("")), "%s leads to %s", address, to)
				queue = append(queue, to.String())
			}
		}
	}
	return seen
}

// Every page is reached by links from the overview, shows its data, and loads nothing from elsewhere. It is served to
// a role with the grants for reports alone, behind a prefix.
func TestPages_AreLinkedAndShowTheirData(t *testing.T) {
	t.Parallel()
	hourly := budget.PerWindow(1000, time.Hour).Named("hourly <b>")
	w := newWorld(t, console.Config{Limits: func(string) []budget.Limit { return []budget.Limit{hourly} }}, "")
	for i, name := range hostile {
		require.NoError(t, w.order(fmt.Sprintf("order <%d> %s", i, string([]rune(name)[:min(3, len([]rune(name)))])), name, int64(100+i), hourly))
	}
	require.Error(t, w.order("too much", hostile[1], 950, hourly))

	const most = 400
	seen := w.crawl(most)
	require.Less(t, len(seen), most, "the crawl was cut")
	headings := map[string]string{}
	for address, n := range seen {
		if n != nil {
			u, err := url.Parse(address)
			require.NoError(t, err)
			headings[strings.TrimPrefix(u.Path, prefix)+"?"+u.Query().Get("scope")+u.Query().Get("id")] = text(all(n, "h1")[0])
		}
	}
	for _, name := range hostile {
		require.Contains(t, headings, "/scope?"+name, "its page is linked")
	}
	require.Equal(t, `Scope <script>alert(1)</script>`, headings["/scope?"+hostile[1]])
	require.Equal(t, `Scope line\nbreak`, headings["/scope?line\nbreak"])
	require.Contains(t, headings, "/operation?too much")

	scope := w.see("scope", "scope", hostile[1])
	require.Contains(t, tile(t, scope, "Used"), "101")
	require.Contains(t, text(byID(t, scope, "entries")), "an <em>order</em>")
	require.Contains(t, text(byID(t, scope, "holds")), "held")
	operation := w.see("operation", "tenant", "shop", "id", "too much")
	require.Contains(t, text(operation), "refused")
	overview := w.see("")
	require.Contains(t, text(byID(t, overview, "refusals")), "hourly <b>")
	require.Contains(t, tile(t, overview, "Refusals on record"), "1 ")
}

func TestPages_ExplainWhyAChargeWouldBeRefused(t *testing.T) {
	t.Parallel()
	w := newWorld(t, console.Config{}, "")
	w.charge("org/acme", 900)

	no := w.see("scope", "scope", "org/acme", "amount", "200", "limits", "hourly=1000/1h, 5000/1d")
	said := text(byID(t, no, "limits"))
	require.Contains(t, said, "A charge of 200 would be refused now.")
	require.Contains(t, said, "hourly refuses 900 0 0 1\u202f000 100 entry 1: 900 of")
	require.Contains(t, said, "It would fit in")

	year := w.see("scope", "scope", "org/acme", "amount", "200", "limits", "plan=1000/year@Europe/Berlin")
	require.Contains(t, text(byID(t, year, "limits")), "plan refuses 900 0 0 1\u202f000 100 entry 1: 900 of")
	require.Contains(t, text(year), "plan: usage of this year@Europe/Berlin, against 1\u202f000")
	require.NotEmpty(t, all(year, "figure"))
	drawn, _ := w.get(w.url("usage.svg", "scope", "org/acme", "limit", "plan=1000/year@Europe/Berlin"))
	require.Equal(t, 200, drawn.StatusCode)

	yes := text(byID(t, w.see("scope", "scope", "org/acme", "amount", "100", "limits", "hourly=1000/1h"), "limits"))
	require.Contains(t, yes, "A charge of 100 would be let in now.")

	never := text(byID(t, w.see("scope", "scope", "org/acme", "amount", "101", "limits", "1000/lifetime"), "limits"))
	require.Contains(t, never, "Waiting would not help.")

	// The page names a part that it cannot read, and shows the others. So does that of a scope without entries.
	for _, wrong := range [][]string{
		{"limits", "no", "cannot be read"}, {"amount", "0", "is not a number"}, {"amount", "x", "is not a number"}, {"amount", "99999999999999999999", "is not a number"},
	} {
		page := w.see("scope", "scope", "org/acme", wrong[0], wrong[1])
		checkPage(t, wrong[1], page)
		require.Empty(t, all(page, "figure"))
		require.Contains(t, text(byID(t, page, "limits")), wrong[2])
	}
	fresh := w.see("scope", "scope", "nobody", "amount", "5", "limits", "4/1h")
	require.Contains(t, text(fresh), "A charge of 5 would be refused now.")
}

// A refusal leads from the overview to its operation, and on to the limits that refused it and the entries that they counted.
func TestPages_ARefusalLeadsToItsCause(t *testing.T) {
	t.Parallel()
	w := newWorld(t, console.Config{}, "")
	hourly := budget.PerWindow(100, time.Hour).Named("hourly <b>")
	require.NoError(t, w.order("first", hostile[0], 50, hourly)) // it holds 2
	require.Error(t, w.order("second", hostile[0], 60, hourly, budget.Lifetime(90)))
	require.Error(t, w.order("third", "other", 600, budget.Lifetime(1)))
	w.charge(hostile[0], 5)
	follow := func(page *html.Node, id, prefix string) *html.Node {
		for _, a := range all(byID(t, page, id), "a") {
			if href, _ := attr(a, "href"); strings.HasPrefix(href, prefix) {
				response, body := w.get(w.url("") + href)
				require.Equal(t, http.StatusOK, response.StatusCode)
				return parse(t, body)
			}
		}
		require.Fail(t, "no link", "%s of %s", prefix, id)
		return nil
	}
	overview := w.see("")
	require.Contains(t, text(byID(t, overview, "refusals")), hostile[0]+" hourly <b> budget_exceeded order 1")
	operation := follow(overview, "refusals", "operation?tenant=shop&id=second")
	checkPage(t, "a refused operation", operation)
	require.Contains(t, text(byID(t, operation, "refusals")), hostile[0]+" hourly <b> 60 46 50 2 and 2 by itself 0 up to 2 "+hostile[0]+" 90 / lifetime 60 36 50 2 and 2 by itself 0 up to 2")
	entries := follow(operation, "refusals", "scope?scope="+url.QueryEscape(hostile[0])+"&before=3")
	require.Contains(t, text(byID(t, entries, "entries")), "Made by 2 ", "entry 3 was made later")
	require.Contains(t, text(byID(t, w.see("operation", "tenant", "shop", "id", "third"), "refusals")), "other 1 / lifetime 600 0 0 0 and 2 by itself 0 none")
	require.Contains(t, text(w.see("operations", "state", "refused")), "refused by "+hostile[0]+" and 1 more")
}

func TestPages_ListHoldsOfManyScopes(t *testing.T) {
	t.Parallel()
	w := newWorld(t, console.Config{}, "")
	require.NoError(t, pgx.BeginFunc(t.Context(), w.pool, func(tx pgx.Tx) error {
		_, err := w.client.Holds.Place(t.Context(), tx, holds.Placement{TTL: time.Minute, ID: "trip", Lines: []holds.Line{
			{Scope: "a", Amount: 1}, {Scope: "b", Amount: 1}, {Scope: "c", Amount: 1},
		}})
		return err
	}))
	require.Contains(t, text(w.see("holds")), "trip held a b and 1 more")
}

// Without limits of the program, the page takes those of refused commands on record.
func TestPages_TakeLimitsFromRefusals(t *testing.T) {
	t.Parallel()
	w := newWorld(t, console.Config{}, "")
	hourly, whole := budget.PerWindow(100, time.Hour).Named(`"hourly", of all`), budget.Lifetime(90)
	require.NoError(t, w.order("first", "s", 50, hourly, whole))
	require.Error(t, w.order("second", "s", 60, hourly, whole))
	require.Error(t, w.order("third", "other", 600, budget.Lifetime(1)))
	page := w.see("scope", "scope", "s")
	require.Contains(t, text(page), "that refused commands on record have met")
	require.Len(t, all(page, "meter"), 2)
	require.Len(t, all(page, "figure"), 3, "two plots, and the holds")
	require.NotContains(t, text(w.see("scope", "scope", "fresh")), "on record have met")
}

// The plot's values are those of the ledger at each of its times.
func TestPages_PlotUsageAgainstEachLimit(t *testing.T) {
	t.Parallel()
	w := newWorld(t, console.Config{}, "")
	w.charge("org/acme", 900)
	page := w.see("scope", "scope", "org/acme", "limits", "hourly=1000/1h, 5000/lifetime")
	figures := all(page, "figure")
	require.Len(t, figures, 2)
	for i, limit := range []string{"1\u202f000", "5\u202f000"} {
		alt, _ := attr(all(figures[i], "img")[0], "alt")
		require.Contains(t, alt, "900 now")
		require.Contains(t, alt, "the limit is "+limit)
		require.Len(t, all(figures[i], "source"), 3, "dark, on a phone, and both")
		require.GreaterOrEqual(t, len(all(all(figures[i], "tbody")[0], "tr")), 60)
		for _, e := range all(figures[i], "img", "source") {
			address, ok := attr(e, "src")
			if !ok {
				address, _ = attr(e, "srcset")
			}
			response, body := w.get(w.url("") + address)
			require.Equal(t, http.StatusOK, response.StatusCode)
			require.Equal(t, "image/svg+xml", response.Header.Get("Content-Type"))
			require.NotContains(t, response.Header.Get("Content-Security-Policy"), "script")
			require.Contains(t, string(body), strings.ReplaceAll(limit, "\u202f", " "))
		}
	}
}
