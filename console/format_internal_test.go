package console

import (
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/internal/inspect"
)

func TestPrintable_EscapesInvisibleCharacters(t *testing.T) {
	t.Parallel()
	for name, want := range map[string]string{
		"":                   "–",
		"org/acme":           "org/acme",
		"a b":                "a b",
		"line\nbreak":        `line\nbreak`,
		"\u202egnp.exe":      `\u202egnp.exe`, // turns the following text around
		"zero\u200bwidth":    `zero\u200bwidth`,
		"no\u00a0break":      `no\u00a0break`,
		"ünïcode 漢字 🎟":       "ünïcode 漢字 🎟",
		`quotes " and ' too`: `quotes " and ' too`,
	} {
		require.Equal(t, want, printable(name))
	}
}

func TestFormat_NumbersAndDurations(t *testing.T) {
	t.Parallel()
	for n, want := range map[int64]string{0: "0", 999: "999", 1000: "1\u202f000", -1234567: "−1\u202f234\u202f567", -9223372036854775808: "−9\u202f223\u202f372\u202f036\u202f854\u202f775\u202f808"} {
		require.Equal(t, want, number(n))
	}
	for d, want := range map[time.Duration]string{
		0: "0 µs", 900 * time.Millisecond: "900 ms", 1500 * time.Millisecond: "1.5 s", 59 * time.Second: "59 s", 61 * time.Second: "1 min 1 s",
		25 * time.Hour: "1 d 1 h", 3 * time.Hour: "3 h 0 min", -time.Minute: "−1 min 0 s",
	} {
		require.Equal(t, want, span(d))
	}
	require.Equal(t, "about 1.234 M", count(inspect.Count{N: 1_234_000, Kind: inspect.Estimated}))
	require.Equal(t, "over 10\u202f000", count(inspect.Count{N: 10_000, Kind: inspect.AtLeast}))
	require.Equal(t, "not known", count(inspect.Count{Kind: inspect.Unknown}))
	require.Equal(t, "7", count(inspect.Count{N: 7, Kind: inspect.Exact}))
}

// A long name is cut in its middle, and one of a UUID's length is not.
func TestMiddle_CutsLongNamesWhereTheyAreAlike(t *testing.T) {
	t.Parallel()
	require.Empty(t, middle("019a0000-0000-7000-8000-000000000000"))
	require.Empty(t, middle(strings.Repeat("é", 36)))
	require.Equal(t, "org/acme/departmen…-2026-11-0042.pdf", middle("org/acme/department/of/very/long/invoices-2026-11-0042.pdf"))
	require.Len(t, []rune(middle(strings.Repeat("é", 37))), 36)
	require.Equal(t, "019a0000-7…901c5e8fb", shortID("019a0000-7000-7000-8000-0901c5e8fb"))
	require.Empty(t, shortID("order/2026/11/000042"))
}
