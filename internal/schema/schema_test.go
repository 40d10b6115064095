package schema_test

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/internal/schema"
)

func TestParse_RefusesNamesThatNeedQuotes(t *testing.T) {
	t.Parallel()
	for _, name := range []string{"A", "a-b", `a"`, "1a", "pg_x", "a.b", strings.Repeat("a", 64), "ä", " ", "a\x00"} {
		_, err := schema.Parse(name)
		require.Error(t, err, name)
	}
	n, err := schema.Parse("")
	require.NoError(t, err)
	require.Equal(t, "metered", n.String())
}

func TestSQL_ReplacesEveryMentionAndNothingElse(t *testing.T) {
	t.Parallel()
	n, err := schema.Parse("money_1")
	require.NoError(t, err)
	require.Equal(t,
		`select to_regnamespace('"money_1"'); create schema if not exists "money_1"; create schema metered_x; select "money_1".f("money_1".g()), 'metered_tx.c' -- metered.Migrate; schema "money_1";`,
		n.SQL(`select to_regnamespace('metered'); create schema if not exists metered; create schema metered_x; select metered.f(metered.g()), 'metered_tx.c' -- metered.Migrate; schema metered;`))
}
