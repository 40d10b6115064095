package httpmetered_test

import (
	"encoding/json"
	"fmt"
	"io"
	"math"
	"net/http"
	"net/http/httptest"
	"os/exec"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/httpmetered"
	"github.com/pgmetered/metered/internal/bounds"
	"github.com/pgmetered/metered/internal/niltest"
)

var (
	burst    = budget.Limit{Name: "burst", Max: 10, Window: time.Second}
	daily    = budget.Limit{Name: "daily", Max: 1000, Window: 24 * time.Hour}
	stock    = budget.Lifetime(50).Named("stock")
	everyone = budget.Limit{Name: "everyone", Max: 77_777, Window: time.Minute}
)

func policies(t testing.TB, cfg httpmetered.PoliciesConfig) *httpmetered.Policies {
	t.Helper()
	p, err := httpmetered.NewPolicies(cfg)
	require.NoError(t, err)
	return p
}

func standing(l budget.Limit, available int64) budget.Standing {
	return budget.Standing{Limit: l, Used: l.Max - available, Available: available}
}

func TestShow_SetsBothFieldsInTheOrderOfThePolicies(t *testing.T) {
	t.Parallel()
	p := policies(t, httpmetered.PoliciesConfig{Limits: []budget.Limit{burst, daily, stock}})
	h := http.Header{}
	p.Show(h, budget.Receipt{Entries: []budget.Posted{
		{Scope: "a", Standings: []budget.Standing{standing(stock, 4), standing(daily, 420)}},
		{Scope: "b", Standings: []budget.Standing{standing(burst, 9)}},
	}})
	require.Equal(t, http.Header{
		"Ratelimit-Policy": {`"burst";q=10;w=1, "daily";q=1000;w=86400, "stock";q=50`},
		"Ratelimit":        {`"burst";r=9;t=1, "daily";r=420;t=86400, "stock";r=4`},
	}, h)

	p.Show(h, budget.Receipt{}) // a replay: earlier values must not stay
	require.Empty(t, h.Values("RateLimit"))
	require.Len(t, h.Values("RateLimit-Policy"), 1)
}

func TestShow_LeastOfAPolicyThatIsThereTwice(t *testing.T) {
	t.Parallel()
	p := policies(t, httpmetered.PoliciesConfig{Limits: []budget.Limit{burst}})
	h := http.Header{}
	p.Show(h, budget.Receipt{Entries: []budget.Posted{
		{Standings: []budget.Standing{standing(burst, 5)}}, {Standings: []budget.Standing{standing(burst, 3)}}, {Standings: []budget.Standing{standing(burst, 8)}},
	}})
	require.Equal(t, `"burst";r=3;t=1`, h.Get("RateLimit"))
}

// Both fields are lists: whoever shows policies leaves those of others, whatever their names look like.
func TestShow_LeavesThePoliciesOfOthers(t *testing.T) {
	t.Parallel()
	odd := budget.Limit{Name: `a"b\c;pk=:eA==:, "burst";r=5`, Max: 7, Window: time.Second}
	oddly := `"a\"b\\c;pk=:eA==:, \"burst\";r=5"`
	receipt := func(l budget.Limit, available int64) budget.Receipt {
		return budget.Receipt{Entries: []budget.Posted{{Standings: []budget.Standing{standing(l, available)}}}}
	}
	front := policies(t, httpmetered.PoliciesConfig{Limits: []budget.Limit{odd}})
	behind := policies(t, httpmetered.PoliciesConfig{Limits: []budget.Limit{burst, daily}})
	mine, err := behind.Partition([]byte("x"))
	require.NoError(t, err)
	yours, err := behind.Partition([]byte("y"))
	require.NoError(t, err)
	h := http.Header{}
	fields := func(policy, limit string) {
		t.Helper()
		require.Equal(t, []string{policy}, h.Values("RateLimit-Policy"))
		require.Equal(t, []string{limit}, h.Values("RateLimit"))
	}
	front.Show(h, receipt(odd, 3))
	behind.Show(h, receipt(burst, 9))
	all := oddly + `;q=7;w=1, "burst";q=10;w=1, "daily";q=1000;w=86400`
	fields(all, oddly+`;r=3;t=1, "burst";r=9;t=1`)
	behind.ShowRefusal(h, &budget.ExceededError{Refusals: []budget.Refusal{{Limit: daily, Available: 1, RetryAfter: time.Minute}}})
	fields(all, oddly+`;r=3;t=1, "daily";r=1;t=60`)
	behind.Show(h, budget.Receipt{})
	fields(all, oddly+`;r=3;t=1`)
	(*httpmetered.Policies)(nil).Show(h, receipt(odd, 1))
	fields(all, oddly+`;r=3;t=1`)

	h = http.Header{"Ratelimit-Policy": {`other;q=1`, "\t"}, "Ratelimit": {`"burst";r=1;t=1`, ` "burst" ; t=1 ; pk=:eA==:;r=2`, `"o";r=1`}}
	mine.Show(h, receipt(burst, 8)) // the policy of another key is another one
	fields(`other;q=1, "burst";q=10;w=1;pk=:eA==:, "daily";q=1000;w=86400;pk=:eA==:`, `"burst";r=1;t=1, "o";r=1, "burst";r=8;t=1;pk=:eA==:`)
	yours.Show(h, receipt(burst, 7))
	require.Equal(t, `"burst";r=1;t=1, "o";r=1, "burst";r=8;t=1;pk=:eA==:, "burst";r=7;t=1;pk=:eQ==:`, h.Get("RateLimit"))
	h = http.Header{"Ratelimit": {`"an open String`}, "Ratelimit-Policy": {`"and \"`}}
	behind.Show(h, receipt(burst, 6))
	fields(`"burst";q=10;w=1, "daily";q=1000;w=86400`, `"burst";r=6;t=1`)
}

func TestPolicies_UnitsKeysAndNamesAreWrittenAsStructuredFields(t *testing.T) {
	t.Parallel()
	odd := budget.Limit{Name: `a"b\c;q=9, d`, Max: math.MaxInt64 / 4, Window: 1500 * time.Millisecond}
	p := policies(t, httpmetered.PoliciesConfig{
		Limits: []budget.Limit{odd, burst},
		Units:  map[string]string{odd.Name: "content-bytes", "burst": "requests"},
	})
	p, err := p.Partition([]byte("trial121323"))
	require.NoError(t, err)
	h := http.Header{}
	p.Show(h, budget.Receipt{Entries: []budget.Posted{{Standings: []budget.Standing{standing(odd, math.MaxInt64)}}}})
	require.Equal(t, `"a\"b\\c;q=9, d";q=999999999999999;qu="content-bytes";w=2;pk=:dHJpYWwxMjEzMjM=:, `+
		`"burst";q=10;w=1;pk=:dHJpYWwxMjEzMjM=:`, h.Get("RateLimit-Policy"))
	require.Equal(t, `"a\"b\\c;q=9, d";r=999999999999999;t=2;pk=:dHJpYWwxMjEzMjM=:`, h.Get("RateLimit"))
}

func TestPolicies_WriteNamesTheLimitAndWhenToComeBack(t *testing.T) {
	t.Parallel()
	refused := func(l budget.Limit, available int64, after time.Duration) budget.Refusal {
		return budget.Refusal{Scope: "scope/zed", Limit: l, Used: 333, Held: 444, Requested: 555, Available: available, RetryAfter: after}
	}
	other := budget.PerWindow(1, time.Hour).Named("unheard of")
	prepaid := budget.Prepaid(0).Named("credit")
	for name, test := range map[string]struct {
		refusals   []budget.Refusal
		status     int
		retryAfter []string
		limit      []string
		violated   string
	}{
		"rounded up":       {[]budget.Refusal{refused(burst, 3, time.Microsecond)}, 429, []string{"1"}, []string{`"burst";r=3;t=1`}, `["burst"]`},
		"due now, still 1": {[]budget.Refusal{refused(burst, 0, 0)}, 429, []string{"1"}, []string{`"burst";r=0;t=1`}, `["burst"]`},
		"whole seconds":    {[]budget.Refusal{refused(burst, 0, 2*time.Second)}, 429, []string{"2"}, []string{`"burst";r=0;t=2`}, `["burst"]`},
		"the longest": {
			[]budget.Refusal{refused(daily, 7, 90*time.Minute), refused(burst, 0, 1100*time.Millisecond)},
			429, []string{"5400"}, []string{`"burst";r=0;t=2, "daily";r=7;t=5400`}, `["burst","daily"]`,
		},
		"too much for the window": {[]budget.Refusal{refused(burst, 0, budget.Never)}, 429, nil, []string{`"burst";r=0`}, `["burst"]`},
		"a stock": {
			[]budget.Refusal{refused(stock, 2, budget.Never), refused(burst, 0, time.Second)},
			409, nil, []string{`"burst";r=0;t=1, "stock";r=2`}, `["burst","stock"]`,
		},
		"a stock of which some is held": {
			[]budget.Refusal{refused(burst, 0, 2*time.Second), refused(stock, 2, time.Second)},
			409, []string{"2"}, []string{`"burst";r=0;t=2, "stock";r=2;t=1`}, `["burst","stock"]`,
		},
		"credit before a stock and a window": {
			[]budget.Refusal{refused(burst, 0, time.Second), refused(stock, 2, time.Second), refused(prepaid, 2, time.Second)},
			402, nil, []string{`"burst";r=0;t=1, "stock";r=2;t=1, "credit";r=2`}, `["burst","stock","credit"]`,
		},
		"one in three scopes": {
			[]budget.Refusal{refused(burst, 5, 7*time.Second), refused(burst, 2, 3*time.Second), refused(burst, 9, 4*time.Second)},
			429, []string{"7"}, []string{`"burst";r=2;t=7`}, `["burst"]`,
		},
		"one in three scopes, never": {
			[]budget.Refusal{refused(stock, 5, time.Second), refused(stock, 5, budget.Never), refused(stock, 5, time.Second)},
			409, nil, []string{`"stock";r=5`}, `["stock"]`,
		},
		"shared, by name":    {[]budget.Refusal{refused(everyone, 888, 61*time.Second)}, 429, []string{"61"}, nil, `["everyone"]`},
		"no policy, no name": {[]budget.Refusal{refused(other, 999, 5*time.Second)}, 429, []string{"5"}, nil, ``},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p := policies(t, httpmetered.PoliciesConfig{Limits: []budget.Limit{burst, daily, stock, prepaid}, Shared: []budget.Limit{everyone}})
			w := httptest.NewRecorder()
			w.Header().Set("Retry-After", "77") // an earlier value must not stay
			p.Show(w.Header(), budget.Receipt{Entries: []budget.Posted{{Standings: []budget.Standing{standing(daily, 1)}}}})
			require.Equal(t, test.status, p.Write(w, fmt.Errorf("while: %w", &budget.ExceededError{Refusals: test.refusals})))
			answer := w.Result()
			body, err := io.ReadAll(answer.Body)
			require.NoError(t, err)
			require.Equal(t, test.status, answer.StatusCode)
			want := httpmetered.Problem{Title: http.StatusText(test.status), Status: test.status, Code: "budget_exceeded"}
			switch test.status {
			case 429:
				want.Type, want.Title = "https://iana.org/assignments/http-problem-types#quota-exceeded", "Request cannot be satisfied as assigned quota has been exceeded"
			case 402:
				want.Detail = "a part of the credit is reserved"
			}
			if test.violated != "" {
				require.NoError(t, json.Unmarshal([]byte(test.violated), &want.ViolatedPolicies))
			}
			if test.retryAfter != nil {
				want.RetryAfterSeconds, err = strconv.ParseInt(test.retryAfter[0], 10, 64)
				require.NoError(t, err)
			}
			var got httpmetered.Problem
			require.NoError(t, json.Unmarshal(body, &got))
			require.Equal(t, want, got)
			require.Equal(t, "application/problem+json", answer.Header.Get("Content-Type"))
			require.Equal(t, "no-store", answer.Header.Get("Cache-Control"))
			require.Equal(t, test.retryAfter, answer.Header.Values("Retry-After"))
			require.Equal(t, test.limit, answer.Header.Values("RateLimit"))
			require.Equal(t, `"burst";q=10;w=1, "daily";q=1000;w=86400, "stock";q=50, "credit";q=0`, answer.Header.Get("RateLimit-Policy"))
			for _, secret := range []string{"zed", "333", "444", "555", "888", "999", "77777", "unheard", "while"} {
				require.NotContains(t, string(body), secret)
				for _, values := range answer.Header {
					require.NotContains(t, strings.Join(values, " "), secret)
				}
			}
		})
	}
}

func TestPolicies_WriteLeavesTheFieldsAfterAnotherError(t *testing.T) {
	t.Parallel()
	p := policies(t, httpmetered.PoliciesConfig{Limits: []budget.Limit{burst}})
	w := httptest.NewRecorder()
	p.Show(w.Header(), budget.Receipt{Entries: []budget.Posted{{Standings: []budget.Standing{standing(burst, 4)}}}}) // of an attempt
	require.Equal(t, 404, p.Write(w, holds.ErrUnknown))
	require.Equal(t, `"burst";r=4;t=1`, w.Header().Get("RateLimit"))
	require.JSONEq(t, `{"title":"Not Found","status":404,"code":"hold_unknown"}`, w.Body.String())
}

func TestShow_NumbersOfSharedLimitsStayOut(t *testing.T) {
	t.Parallel()
	p := policies(t, httpmetered.PoliciesConfig{Limits: []budget.Limit{burst}, Shared: []budget.Limit{everyone}})
	h := http.Header{}
	p.Show(h, budget.Receipt{Entries: []budget.Posted{{Standings: []budget.Standing{standing(everyone, 12), standing(burst, 1)}}}})
	require.Equal(t, http.Header{"Ratelimit-Policy": {`"burst";q=10;w=1`}, "Ratelimit": {`"burst";r=1;t=1`}}, h)

	none := policies(t, httpmetered.PoliciesConfig{Shared: []budget.Limit{everyone}})
	h = http.Header{}
	none.Show(h, budget.Receipt{Entries: []budget.Posted{{Standings: []budget.Standing{standing(everyone, 12)}}}})
	require.Empty(t, h, "an empty list is no field")
}

func TestNew_RefusesNamesThatNoFieldCanHold(t *testing.T) {
	t.Parallel()
	named := func(names ...string) (limits []budget.Limit) {
		for _, name := range names {
			limits = append(limits, budget.Limit{Name: name, Max: 1, Window: time.Second})
		}
		return limits
	}
	many := named(strings.Split("abcdefghijklmnopqrstuvwxyz", "")[:16+1]...)
	for _, cfg := range []httpmetered.PoliciesConfig{
		{Limits: named("")},
		{Limits: named("two", "two")},
		{Limits: named("both"), Shared: named("both")},
		{Limits: named("line\r\nSet-Cookie: a=b")},
		{Shared: named("täglich")},
		{Limits: named("del\x7f")},
		{Limits: named(strings.Repeat("n", 64+1))},
		{Limits: many},
		{Shared: many},
		{Limits: []budget.Limit{budget.Lifetime(-1).Named("n")}},
		{Limits: []budget.Limit{{Name: "n", Max: 1}}},
		{Limits: []budget.Limit{{Name: "n", Max: 1, Window: -1}}},
		{Limits: named("a"), Units: map[string]string{"b": "requests"}},
		{Limits: named("a"), Shared: named("b"), Units: map[string]string{"b": "requests"}},
		{Limits: named("a"), Units: map[string]string{"a": "by\ntes"}},
	} {
		_, err := httpmetered.NewPolicies(cfg)
		require.ErrorIs(t, err, budget.ErrArgument, "%+v", cfg)
		var argument *budget.ArgumentError
		require.ErrorAs(t, err, &argument)
	}
	nothing := budget.Prepaid(0).Named("nothing")
	policies(t, httpmetered.PoliciesConfig{Limits: append(many[2:], nothing), Shared: named("~", strings.Repeat("n", 64))})
	p := policies(t, httpmetered.PoliciesConfig{})
	for _, size := range []int{0, 32 + 1} {
		_, err := p.Partition(make([]byte, size))
		require.ErrorIs(t, err, budget.ErrArgument)
	}
	_, err := p.Partition(make([]byte, 1))
	require.NoError(t, err)
}

func TestFields_StayBelowFourKilobytes(t *testing.T) {
	t.Parallel()
	cfg := httpmetered.PoliciesConfig{Units: map[string]string{}}
	receipt := budget.Receipt{Entries: []budget.Posted{{}}}
	for i := range 16 {
		l := budget.Limit{
			Name: strings.Repeat(`"`, 64-1) + string(rune('a'+i)), Max: bounds.MaxLimit, Window: bounds.MaxWindow,
		}
		cfg.Limits = append(cfg.Limits, l)
		cfg.Units[l.Name] = "concurrent-requests"
		receipt.Entries[0].Standings = append(receipt.Entries[0].Standings, standing(l, math.MaxInt64))
	}
	p, err := policies(t, cfg).Partition(make([]byte, 32))
	require.NoError(t, err)
	h := http.Header{}
	p.Show(h, receipt)
	for _, field := range []string{"RateLimit", "RateLimit-Policy"} {
		require.Less(t, len(h.Get(field)), 4<<10)
	}
}

func TestProblem_LeavesEmptyMembersOut(t *testing.T) {
	t.Parallel()
	w := httptest.NewRecorder()
	w.Header().Set("Retry-After", "77")
	httpmetered.Problem{Title: "Not Found", Status: 404, Detail: `no <such> "code"`}.Write(w)
	require.Equal(t, 404, w.Code)
	require.Empty(t, w.Header().Values("Retry-After"))
	require.JSONEq(t, `{"title":"Not Found","status":404,"detail":"no <such> \"code\""}`, w.Body.String())
	w = httptest.NewRecorder()
	httpmetered.Problem{}.Write(w)
	require.Equal(t, 500, w.Code)
	require.JSONEq(t, `{"status":500}`, w.Body.String())
}

// For every name that New accepts, the field is one list of one String and its parameters, and the name comes back
// from it.
func FuzzName(f *testing.F) {
	for _, name := range []string{"burst", `a"b\`, `\\`, "a, b;c=:d:", "\r\n", "ä"} {
		f.Add(name)
	}
	item := regexp.MustCompile(`^"((?:[\x20-\x21\x23-\x5b\x5d-\x7e]|\\["\\])*)";q=1;w=1$`) // RFC 9651, 3.3.3
	f.Fuzz(func(t *testing.T, name string) {
		p, err := httpmetered.NewPolicies(httpmetered.PoliciesConfig{Limits: []budget.Limit{{Name: name, Max: 1, Window: time.Second}}})
		if err != nil {
			return
		}
		h := http.Header{}
		p.Show(h, budget.Receipt{})
		parts := item.FindStringSubmatch(h.Get("RateLimit-Policy"))
		require.NotNil(t, parts, h.Get("RateLimit-Policy"))
		require.Equal(t, name, regexp.MustCompile(`\\(.)`).ReplaceAllString(parts[1], "$1"))
		body, err := json.Marshal(p.ProblemOf(&budget.ExceededError{Refusals: []budget.Refusal{{Limit: budget.Limit{Name: name}}}}))
		require.NoError(t, err)
		var back httpmetered.Problem
		require.NoError(t, json.Unmarshal(body, &back))
		require.Equal(t, []string{name}, back.ViolatedPolicies)
	})
}

// A router can use a package that needs net/http alone.
func TestImports_NoRouterAndNoServer(t *testing.T) {
	t.Parallel()
	out, err := exec.CommandContext(t.Context(), "go", "list", "-deps", "-f", "{{if not .Standard}}{{.ImportPath}}{{end}}", "..", ".").CombinedOutput()
	require.NoError(t, err, string(out))
	core, err := exec.CommandContext(t.Context(), "go", "list", "-deps", "-f", "{{if not .Standard}}{{.ImportPath}}{{end}}", "..").CombinedOutput()
	require.NoError(t, err, string(core))
	const own = "github.com/pgmetered/metered/httpmetered"
	require.ElementsMatch(t, append(strings.Fields(string(core)), own), strings.Fields(string(out)))
}

// A client gets an answer even without policies, header or receipt.
func TestPolicies_NilAndZeroShowNothing(t *testing.T) {
	t.Parallel()
	refused := &budget.ExceededError{Refusals: []budget.Refusal{{Limit: burst, RetryAfter: time.Second}}}
	niltest.Func(t, "Partition", (*httpmetered.Policies).Partition, policies(t, httpmetered.PoliciesConfig{}), []byte("k"))
	for _, p := range []*httpmetered.Policies{nil, {}, policies(t, httpmetered.PoliciesConfig{Limits: []budget.Limit{burst}})} {
		answer := httptest.NewRecorder()
		require.Equal(t, 429, p.Write(answer, refused))
		require.Equal(t, "1", answer.Header().Get("Retry-After"))
		require.Equal(t, 500, p.Write(httptest.NewRecorder(), nil))
		h := http.Header{}
		p.Show(h, budget.Receipt{})
		p.ShowRefusal(h, nil)
	}
}

func TestPolicies_OfPeriodsLastUntilTheirEnd(t *testing.T) {
	t.Parallel()
	plan := budget.Per(1000, budget.Month, time.UTC, time.Time{}).Named("plan")
	cycle := budget.PerPeriod(30, 720*time.Hour, time.Date(2026, 1, 31, 0, 0, 0, 0, time.UTC)).Named("cycle")
	p := policies(t, httpmetered.PoliciesConfig{Limits: []budget.Limit{plan, cycle}})
	at := time.Date(2026, 2, 28, 23, 0, 0, 0, time.UTC)
	month, end := standing(plan, 420), standing(cycle, 7)
	month.PeriodEnd, end.PeriodEnd = at.Add(time.Hour), at.Add(time.Microsecond)
	h := http.Header{}
	p.Show(h, budget.Receipt{Entries: []budget.Posted{{At: at, Standings: []budget.Standing{month, end}}}})
	require.Equal(t, http.Header{
		"Ratelimit-Policy": {`"plan";q=1000;w=2678400, "cycle";q=30;w=2592000`},
		"Ratelimit":        {`"plan";r=420;t=3600, "cycle";r=7;t=1`},
	}, h)

	month.PeriodEnd = time.Now().Add(90 * time.Minute) // a check's standing, which has no time
	p.Show(h, budget.Receipt{Entries: []budget.Posted{{Standings: []budget.Standing{month}}}})
	require.Regexp(t, `^"plan";r=420;t=5[34]\d\d$`, h.Get("RateLimit"))

	answer := httptest.NewRecorder()
	require.Equal(t, 429, p.Write(answer, &budget.ExceededError{Refusals: []budget.Refusal{{Limit: plan, RetryAfter: time.Hour}}}))
	require.Equal(t, "3600", answer.Header().Get("Retry-After"))
	_, err := httpmetered.NewPolicies(httpmetered.PoliciesConfig{Limits: []budget.Limit{{Name: "neither", Max: 1, Period: budget.Period{Zone: "UTC"}}}})
	require.ErrorIs(t, err, budget.ErrArgument)
}
