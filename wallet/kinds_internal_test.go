package wallet

import (
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/budget"
)

// The view lots_statement spells the kinds of moves as Go does, all of them.
func TestMove_KindsAreThoseOfTheView(t *testing.T) {
	t.Parallel()
	raw, err := os.ReadFile("../internal/schema/sql/reporting.sql")
	require.NoError(t, err)
	_, text, found := strings.Cut(strings.Join(strings.Fields(string(raw)), " "), "case m.kind ")
	require.True(t, found)
	text, _, _ = strings.Cut(text, " end as does")
	told := map[string]budget.MoveKind{}
	for _, m := range regexp.MustCompile(`when '(.)' then '([^']*)'`).FindAllStringSubmatch(text, -1) {
		told[m[1]] = budget.MoveKind(m[2])
	}
	require.Equal(t, told, moveKinds)
}
