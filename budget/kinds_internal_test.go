package budget

import (
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// The view statement spells the kinds of entries as Go does, all of them.
func TestEntry_KindsAreThoseOfTheView(t *testing.T) {
	t.Parallel()
	raw, err := os.ReadFile("../internal/schema/sql/reporting.sql")
	require.NoError(t, err)
	_, text, found := strings.Cut(strings.Join(strings.Fields(string(raw)), " "), "case l.kind ")
	require.True(t, found)
	text, _, _ = strings.Cut(text, " end as kind")
	told := map[string]EntryKind{}
	for _, m := range regexp.MustCompile(`when '(.)' then '([^']*)'`).FindAllStringSubmatch(text, -1) {
		told[m[1]] = EntryKind(m[2])
	}
	require.Equal(t, told, kinds)
}
