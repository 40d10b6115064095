package budget_test

import (
	"net/netip"
	"os/exec"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/internal/bounds"
	"github.com/pgmetered/metered/internal/pgtest"
)

type (
	seat struct {
		Event  int64
		Number string
	}
	night struct {
		Room hotelRoom
		Day  time.Time
	}
	hotelRoom struct {
		House string
		No    uint16
	}
	trial struct {
		User userID
		Live bool
	}
	uuid    [16]byte
	userID  string
	account int32
)

func (userID) String() string { return "a method that is none of text" }

func requireRoundTrip[K comparable](t *testing.T, kind budget.Scopes[K], key K, scope string) {
	t.Helper()
	require.NoError(t, kind.Check())
	require.Equal(t, scope, kind.Scope(key))
	require.True(t, strings.HasPrefix(scope, kind.Prefix()))
	back, err := kind.Parse(scope)
	require.NoError(t, err)
	require.Equal(t, key, back)
}

func TestScopes_RenderTheKeyAndParseItBack(t *testing.T) {
	t.Parallel()
	requireRoundTrip(t, budget.Scopes[seat]{Kind: "seat"}, seat{7, "21A"}, "seat/7/21A")
	requireRoundTrip(t, budget.Scopes[seat]{Kind: "a/b%"}, seat{-1 << 63, "21/A%2F"}, "a%2Fb%25/-9223372036854775808/21%2FA%252F")
	requireRoundTrip(t, budget.Scopes[string]{Kind: "org"}, "é \"'\\", "org/é \"'\\")
	requireRoundTrip(t, budget.Scopes[userID]{Kind: "user"}, "ann", "user/ann")
	requireRoundTrip(t, budget.Scopes[account]{Kind: "account"}, -7, "account/-7")
	requireRoundTrip(t, budget.Scopes[uint8]{Kind: "byte"}, 255, "byte/255")
	requireRoundTrip(t, budget.Scopes[bool]{Kind: "live"}, true, "live/true")
	requireRoundTrip(t, budget.Scopes[trial]{Kind: "trial"}, trial{"ann", false}, "trial/ann/false")
	requireRoundTrip(t, budget.Scopes[uuid]{Kind: "order"}, uuid{0: 0x01, 5: 0x8f, 15: 0xff}, "order/01000000-008f-0000-0000-0000000000ff")
	requireRoundTrip(t, budget.Scopes[netip.Addr]{Kind: "ip"}, netip.MustParseAddr("2001:db8::1"), "ip/2001:db8::1")
	requireRoundTrip(t, budget.Scopes[netip.Prefix]{Kind: "net"}, netip.MustParsePrefix("192.0.2.0/24"), "net/192.0.2.0%2F24")
	day := time.Date(2026, 11, 21, 20, 0, 0, 5, time.UTC)
	nights := budget.Scopes[night]{Kind: "night"}
	requireRoundTrip(t, nights, night{hotelRoom{"Nord", 12}, day}, "night/Nord/12/2026-11-21T20:00:00.000000005Z")
	require.Equal(t, nights.Scope(night{hotelRoom{"Nord", 12}, day}), nights.Scope(night{hotelRoom{"Nord", 12}, day.In(time.FixedZone("x", 3600))}),
		"an instant has one scope")
	// One part, or two, are as ScopeKey has them.
	require.Equal(t, budget.ScopeKey("org", "a/b", ""), budget.Scopes[string]{Kind: "org"}.Scope("a/b"))
	require.Equal(t, budget.ScopeKey("seat", "7", "21%A"), budget.Scopes[seat]{Kind: "seat"}.Scope(seat{7, "21%A"}))
}

func TestScopes_DifferentKeysHaveDifferentScopes(t *testing.T) {
	t.Parallel()
	type pair struct{ A, B string }
	parts := []string{"a", "/", "%", "%2F", "%25", "a/", "/a", "%2", "F", "//", "a%", "%2f", "é", " "}
	seen := map[string]any{}
	for _, name := range []string{"k", "k/", "k%2F", "k/a", "%"} {
		pairs, texts := budget.Scopes[pair]{Kind: name + "2"}, budget.Scopes[string]{Kind: name}
		for _, a := range parts {
			for _, key := range parts {
				p := pair{a, key}
				scope := pairs.Scope(p)
				require.NotContains(t, seen, scope, "%v", p)
				seen[scope] = p
				back, err := pairs.Parse(scope)
				require.NoError(t, err)
				require.Equal(t, p, back)
			}
			require.NotContains(t, seen, texts.Scope(a))
			seen[texts.Scope(a)] = a
		}
	}
}

func FuzzScopes_ParseIsTheInverse(f *testing.F) {
	f.Add("seat", int64(7), "21A", "seat/7/21A")
	f.Add("a/%", int64(-1), "%2F/", "a%2F%25/-1/%252F%2F")
	f.Fuzz(func(t *testing.T, name string, event int64, number, scope string) {
		kind := budget.Scopes[seat]{Kind: name}
		if made := kind.Scope(seat{event, number}); kind.Check() == nil && made != "" && len(made) <= bounds.MaxScopeBytes {
			if back, err := kind.Parse(made); err == nil {
				require.Equal(t, seat{event, number}, back)
			} else {
				require.NotRegexp(t, "is not of the kind", err.Error(), "only text that no scope has")
			}
		}
		if key, err := kind.Parse(scope); err == nil {
			require.Equal(t, scope, kind.Scope(key), "a key has one scope")
		}
	})
}

func TestScopes_ParseRefusesOtherTexts(t *testing.T) {
	t.Parallel()
	seats := budget.Scopes[seat]{Kind: "seat"}
	for _, scope := range []string{
		"", "seat", "seat/", "seat/7", "seat/7/", "seat/7/21A/", "seat/7/21A/x", "seats/7/21A", "Seat/7/21A", "row/7/21A", "/seat/7/21A", "seat//21A",
		"seat/07/21A", "seat/+7/21A", "seat/7.0/21A", "seat/x/21A", "seat/9223372036854775808/21A", "seat/7/21%", "seat/7/21%2f", "seat/7/%41", "seat/7/a\x00",
		strings.Repeat("x", 256),
	} {
		key, err := seats.Parse(scope)
		requireArgument(t, err, "scope")
		require.Zero(t, key)
	}
	_, err := budget.Scopes[time.Time]{Kind: "day"}.Parse("day/2026-11-21T20:00:00+01:00")
	requireArgument(t, err, "scope")
	_, err = budget.Scopes[uint8]{Kind: "byte"}.Parse("byte/256")
	requireArgument(t, err, "scope")
	_, err = budget.Scopes[bool]{Kind: "live"}.Parse("live/1")
	requireArgument(t, err, "scope")
	for _, text := range []string{"01000000-008F-0000-0000-0000000000ff", "01000000008f000000000000000000ff", "01000000-008f-0000-0000-0000000000", "x"} {
		_, err = budget.Scopes[uuid]{Kind: "order"}.Parse("order/" + text)
		requireArgument(t, err, "scope")
	}
}

type (
	hidden    struct{ A, b string }
	withFloat struct {
		A string
		B float64
	}
)

func requireUndeclared[K comparable](t *testing.T, kind budget.Scopes[K], key K, field string) {
	t.Helper()
	requireArgument(t, kind.Check(), field)
	if field != "Scopes.Limits[0].Window" {
		require.Empty(t, kind.Scope(key))
		_, err := kind.Parse("a/b")
		require.Error(t, err)
	}
}

// Every call refuses a key without a scope, as an empty scope.
func TestScopes_AWrongDeclarationOrKeyHasNoScope(t *testing.T) {
	t.Parallel()
	requireUndeclared(t, budget.Scopes[string]{}, "b", "Scopes.Kind")
	requireUndeclared(t, budget.Scopes[string]{Kind: "claim"}, "b", "Scopes.Kind")
	requireUndeclared(t, budget.Scopes[string]{Kind: "a", Limits: []budget.Limit{{Max: 1}}}, "b", "Scopes.Limits[0].Window")
	requireUndeclared(t, budget.Scopes[float64]{Kind: "a"}, 1, "Scopes")
	requireUndeclared(t, budget.Scopes[*int]{Kind: "a"}, new(int), "Scopes")
	requireUndeclared(t, budget.Scopes[[2]int]{Kind: "a"}, [2]int{}, "Scopes")
	require.ErrorContains(t, budget.Scopes[*int]{Kind: "a"}.Check(), "a key cannot be made of *int: want a string, ")
	requireUndeclared(t, budget.Scopes[struct{}]{Kind: "a"}, struct{}{}, "Scopes")
	requireUndeclared(t, budget.Scopes[hidden]{Kind: "a"}, hidden{"a", "b"}, "Scopes")
	requireUndeclared(t, budget.Scopes[withFloat]{Kind: "a"}, withFloat{"a", 1}, "Scopes")
	requireUndeclared(t, budget.Scopes[*time.Time]{Kind: "a"}, new(time.Time), "Scopes")
	requireUndeclared(t, budget.Scopes[[4]byte]{Kind: "a"}, [4]byte{1}, "Scopes")
	requireUndeclared(t, budget.Scopes[any]{Kind: "a"}, any("b"), "Scopes")
	seats := budget.Scopes[seat]{Kind: "seat"}
	require.Empty(t, seats.Scope(seat{7, ""}))
	require.Empty(t, budget.Scopes[time.Time]{Kind: "day"}.Scope(time.Date(10000, 1, 1, 0, 0, 0, 0, time.UTC)))
	require.Empty(t, budget.Scopes[netip.Addr]{Kind: "ip"}.Scope(netip.Addr{}))
	_, err := newLedger(t, budget.Config{}).Charge(t.Context(), untouchable{t: t}, seats.Charge(seat{}, 1))
	requireArgument(t, err, "charges[0].Scope")
	_, err = newLedger(t, budget.Config{}).Charge(t.Context(), untouchable{t: t}, seats.Charge(seat{1, strings.Repeat("/", 200)}, 1))
	requireArgument(t, err, "charges[0].Scope")
}

func TestScopes_ChargesAndCreditsHaveTheKindsLimits(t *testing.T) {
	t.Parallel()
	seats := budget.Scopes[seat]{Kind: "seat", Limits: []budget.Limit{budget.Lifetime(1)}, MustExist: true}
	c := seats.Charge(seat{7, "21A"}, 1)
	require.Equal(t, budget.Charge{Scope: "seat/7/21A", Amount: 1, Limits: []budget.Limit{budget.Lifetime(1)}, MustExist: true}, c)
	c.Limits[0].Max = 99
	require.Equal(t, int64(1), seats.Limits[0].Max, "a change to a charge does not change the kind")
	require.Equal(t, budget.Credit{Scope: "seat/7/21A", Amount: 3, MustExist: true}, seats.Credit(seat{7, "21A"}, 3))
}

// byHand is the code of a program without Scopes, the text of the seat unescaped.
func byHand(s seat) string { return "seat/" + strconv.FormatInt(s.Event, 10) + "/" + s.Number }

func TestScopes_CostNoMoreAllocationsThanAStringByHand(t *testing.T) {
	seats, key := budget.Scopes[seat]{Kind: "seat"}, seat{7_000_000, "21A"}
	users, ann := budget.Scopes[userID]{Kind: "user"}, userID("ann of the long name")
	rooms, room := budget.Scopes[hotelRoom]{Kind: "room"}, hotelRoom{"Nord", 12}
	for name, scope := range map[string]func() string{
		"struct": func() string { return seats.Scope(key) },
		"nested": func() string { return rooms.Scope(room) },
		"text":   func() string { return users.Scope(ann) },
	} {
		var kept string
		require.Equal(t, 1.0, testing.AllocsPerRun(100, func() { kept = scope() }), name)
		require.NotEmpty(t, kept)
	}
	var kept string
	require.GreaterOrEqual(t, testing.AllocsPerRun(100, func() { kept = byHand(key) }), 1.0)
	require.Equal(t, byHand(key), kept)
}

func BenchmarkScopes(b *testing.B) {
	seats, key := budget.Scopes[seat]{Kind: "seat"}, seat{7_000_000, "21A"}
	for name, scope := range map[string]func(seat) string{
		"typed":    seats.Scope,
		"by hand":  byHand,
		"ScopeKey": func(s seat) string { return budget.ScopeKey("seat", strconv.FormatInt(s.Event, 10), s.Number) },
	} {
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				scope(key)
			}
		})
	}
}

func TestScopes_MixingKindsDoesNotCompile(t *testing.T) {
	t.Parallel()
	pgtest.InCI(t)
	out, err := exec.CommandContext(t.Context(), "go", "build", "-gcflags=-e", "-o", t.TempDir(), "./testdata/mixed").CombinedOutput()
	require.Error(t, err)
	require.Equal(t, 4, strings.Count(string(out), "mixed.go:"), string(out))
	require.Equal(t, 4, strings.Count(string(out), "as Seat value in argument to Seats."), string(out))
}
