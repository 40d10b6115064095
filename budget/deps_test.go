package budget_test

import (
	"os/exec"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestImports_AreThePackageItselfPgxAndTheStandardLibrary(t *testing.T) {
	t.Parallel()
	const own = "github.com/pgmetered/metered/"
	out, err := exec.CommandContext(t.Context(), "go", "list", "-deps", "-f", "{{if not .Standard}}{{.ImportPath}}{{end}}", own+"budget").CombinedOutput()
	require.NoError(t, err, string(out))
	packages := strings.Fields(string(out))
	require.Contains(t, packages, own+"budget")
	for _, p := range packages {
		allowed := false
		for _, prefix := range []string{own + "budget", own + "internal/", "github.com/jackc/", "golang.org/x/"} {
			allowed = allowed || strings.HasPrefix(p, prefix)
		}
		require.True(t, allowed, "a program that imports only budget links %s", p)
		for _, foreign := range []string{"river", "testify", "rapid", "pgserver", "pgtest"} {
			require.NotContains(t, p, foreign)
		}
	}
}
