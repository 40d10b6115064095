package schema_test

import (
	"math/rand/v2"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/internal/schema"
)

func TestParse_RefusesWhatWouldNeedCare(t *testing.T) {
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

func TestSQL_AgreesWithARegularExpression(t *testing.T) {
	t.Parallel()
	mention := regexp.MustCompile(`\bmetered\.[a-z_]|\bschema (if not exists )?metered\b|\bto_regnamespace\('metered'`)
	overlaps := regexp.MustCompile(`metered\.(metered|schema|to_)`)
	n, err := schema.Parse("other")
	require.NoError(t, err)
	agree := func(text string) {
		if overlaps.MatchString(text) { // the expression takes the letter behind the point, and misses what begins with it
			return
		}
		want := mention.ReplaceAllStringFunc(text, func(m string) string { return strings.Replace(m, "metered", `"other"`, 1) })
		if got := n.SQL(text); got != want {
			require.Equal(t, want, got, "%q", text)
		}
	}
	agree(regexp.MustCompile(`'metered/[a-z]+/metered'`).ReplaceAllString(schema.Source(), ""))
	parts := []string{"metered", "metered", ".", "a", "Z", "_", "9", " ", "'", "(", "to_regnamespace('", "schema ", "if not exists ", "é"}
	for range 50_000 {
		text := ""
		for range 1 + rand.IntN(8) {
			text += parts[rand.IntN(len(parts))]
		}
		agree(text)
	}
}
