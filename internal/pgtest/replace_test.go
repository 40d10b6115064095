package pgtest_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/internal/pgtest"
)

func TestReplace_FindsATextHoweverItsLinesAreBroken(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		in, old, out string
		places       int
	}{
		{"if a and b then", "a and b", "if X then", 1},
		{"if a\n        and b then", "a and b", "if X then", 1},
		{"if a and b then", "a\n    and  b", "if X then", 1},
		{"f(\n    a,\n    b\n)", "f(a, b)", "X", 1},
		{"f(a) + f( a )", "f(a)", "X + X", 2},
		{"$1 = any (x[1])", "$1 = any (x[1])", "X", 1},
		{"if aand b then", "a and b", "if aand b then", 0},
		{"if a and c then", "a and b", "if a and c then", 0},
		{"a  -- one\n    b", "a -- one\n b", "X", 1},
		{"a, -- one\n    b,\n    c\nfrom", "    b,\n    c\n", "a, -- one\n    X\nfrom", 1},
	} {
		out, places := pgtest.Replace(c.in, c.old, "X")
		require.Equal(t, c.out, out, c.in)
		require.Equal(t, c.places, places, c.in)
	}
	out, _ := pgtest.Replace("a b", "a b", "$1 \\1")
	require.Equal(t, "$1 \\1", out)
}
