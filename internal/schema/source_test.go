package schema_test

import (
	"os"
	"strings"
	"testing"
	"unicode"

	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/internal/schema"
)

func TestSource_IsTheFileInTheRoot(t *testing.T) {
	t.Parallel()
	file, err := os.ReadFile("../../schema.sql")
	require.NoError(t, err)
	require.Equal(t, schema.Script(schema.Current().Source()), string(file), "run: go generate .")
}

// A server in another encoding than UTF-8 refuses characters that it lacks.
func TestSQL_IsASCII(t *testing.T) {
	t.Parallel()
	catalog, err := os.ReadFile("catalog.sql")
	require.NoError(t, err)
	texts := map[string]string{
		"the whole":   schema.Current().Source(),
		"a repair":    schema.Upgrade{To: schema.Current(), From: schema.Version, DropPrevious: true}.SQL(),
		"the catalog": string(catalog),
	}
	for what, text := range texts {
		for n, line := range strings.Split(text, "\n") {
			for _, r := range line {
				require.LessOrEqual(t, r, unicode.MaxASCII, "%s, line %d: %s", what, n+1, line)
			}
		}
	}
}
