package schema

import (
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// A third version drops the functions that only the first calls, and leaves those of the second.
func TestSuperseded_IsCalledByNoBuildThatMayRun(t *testing.T) {
	t.Parallel()
	first := []string{"function both()", "function once(text)", "function stays()", "type old", "type until_second"}
	second := []string{"function both()", "function stays()", "function twice(text)", "type until_second"}
	current := func(key string) bool { return key == "function stays()" || key == "function new()" }
	require.Equal(t, []string{"function once(text)", "type old"}, superseded([][]string{first, second}, current, false))
	require.Equal(t, []string{"function both()", "function once(text)", "function twice(text)", "type old", "type until_second"},
		superseded([][]string{first, second}, current, true))
	require.Empty(t, superseded([][]string{first}, current, false))
	require.Equal(t, "drop function if exists\n    metered.a(text),\n    metered.b();\ndrop type if exists\n    metered.c;\n",
		dropSQL([]string{"function a(text)", "function b()", "type c"}))
	require.Empty(t, dropSQL(nil))
}

func TestStatements_AreWholeAndOfAKindThatAnUpgradeKnows(t *testing.T) {
	t.Parallel()
	all := statements(Current().definitions())
	var text strings.Builder
	for _, s := range all {
		text.WriteString(s.text)
		require.NotEmpty(t, s.verb, "an upgrade has no rule for this:\n%s", s.text)
		if slices.Contains([]string{"create function", "create type", "create domain", "create view"}, s.verb) {
			require.NotEmpty(t, s.name, s.text)
		}
	}
	blank := func(s string) string { return strings.Join(strings.Fields(s), " ") }
	require.Equal(t, blank(Current().definitions()), blank(text.String()))
}

// An upgrade keeps the grants of a function by its name. The names of all other functions begin with "_".
func TestFunctions_AreAllThere(t *testing.T) {
	t.Parallel()
	granted := map[string]bool{}
	for _, f := range Functions {
		require.NotEmpty(t, Current().signatures(f.Name), f.Name)
		granted[f.Name] = true
	}
	for object := range Current().wanted {
		if name, ok := strings.CutPrefix(object, "function "); ok {
			name, _, _ = strings.Cut(name, "(")
			require.NotEqual(t, granted[name], strings.HasPrefix(name, "_"), name)
		}
	}
	for _, table := range Tables {
		require.Contains(t, Current().wanted, "table "+table.Name)
	}
}
