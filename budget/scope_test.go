package budget_test

import (
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/internal/bounds"
)

func TestScopeKey_PartsCannotRunIntoEachOther(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ kind, key, slot, scope string }{
		{"seat", "21A", "", "seat/21A"},
		{"seat", "21A", "2026-11-21T20:00", "seat/21A/2026-11-21T20:00"},
		{"seat", "21A/2026", "", "seat/21A%2F2026"},
		{"seat/21A", "2026", "", "seat%2F21A/2026"},
		{"seat", "%2F", "100%", "seat/%252F/100%25"},
	} {
		scope := budget.ScopeKey(c.kind, c.key, c.slot)
		require.Equal(t, c.scope, scope)
		kind, key, slot, err := splitScope(scope)
		require.NoError(t, err)
		require.Equal(t, []string{c.kind, c.key, c.slot}, []string{kind, key, slot})
	}
}

func TestScopeKey_OfWrongPartsIsRefusedByEveryCall(t *testing.T) {
	t.Parallel()
	l := newLedger(t, budget.Config{})
	for _, c := range []struct{ kind, key, slot string }{
		{"", "a", ""}, {"a", "", ""}, {"a", "", "b"}, {"a", "b", "\x00"}, {"a", "\xff", ""},
		{"a", strings.Repeat("b", 254), ""}, {"a", strings.Repeat("/", 85), ""},
	} {
		_, err := prepareCharges(l, budget.Charge{Scope: budget.ScopeKey(c.kind, c.key, c.slot), Amount: 1})
		requireArgument(t, err, "charges[0].Scope")
	}
	for _, scope := range []string{"", "a", "/", "a/", "/a", "a/b/", "a//b", "a/b/c/d", "a/%", "a/%2f", "a/%41", "a/b%2", "a/\x00"} {
		_, _, _, err := splitScope(scope)
		requireArgument(t, err, "scope")
	}
}

// Different parts never give the same scope: every scope splits into the parts it
// was built from, and no other text splits at all.
func FuzzScopeKey(f *testing.F) {
	for _, seed := range [][3]string{
		{"seat", "21A", ""}, {"a/b", "%2F", "%"}, {"%25", "2F", "/"}, {"", "", ""}, {"a", "b", "\xff"}, {"é", "日本", "\u2028"},
		{"%2", "5", "F"}, {"a%", "2F", ""},
	} {
		f.Add(seed[0], seed[1], seed[2])
	}
	f.Fuzz(func(t *testing.T, kind, key, slot string) {
		scope := budget.ScopeKey(kind, key, slot)
		gotKind, gotKey, gotSlot, err := splitScope(scope)
		if err == nil {
			require.Equal(t, []string{kind, key, slot}, []string{gotKind, gotKey, gotSlot})
			require.LessOrEqual(t, len(scope), bounds.MaxScopeBytes)
		} else {
			require.ErrorIs(t, err, budget.ErrArgument)
			require.True(t, kind == "" || key == "" || len(scope) > bounds.MaxScopeBytes || !utf8.ValidString(scope) || strings.Contains(scope, "\x00"))
		}
		// The other way round, for a scope that was not built here.
		raw := kind + "/" + key
		if k, b, s, err := splitScope(raw); err == nil {
			require.Equal(t, raw, budget.ScopeKey(k, b, s))
		} else {
			require.ErrorIs(t, err, budget.ErrArgument)
		}
	})
}
