package mutants

import (
	"cmp"
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgmetered/metered/internal/pgtest"
)

var only = flag.String("only", "", "runs the mutants whose names match, also without METERED_LONG")

// A survivor fails: no test guards what it breaks. By default each mutant is only made, and CI runs one.
func TestMutants_AreKilledByTheirTests(t *testing.T) {
	raw, err := os.ReadFile(filepath.Join(root, "schema.sql"))
	require.NoError(t, err)
	schema := string(raw)
	texts := make([]string, len(all))
	names := map[string]bool{}
	for i, m := range all {
		require.False(t, names[m.Name], m.Name)
		names[m.Name] = true
		texts[i], err = m.apply(schema)
		require.NoError(t, err)
		require.True(t, exists(t, m), "%s: %s has no %s", m.Name, m.Pkg, m.Test)
	}
	chosen := regexp.MustCompile(*only)
	r := runner{T: t, dir: t.TempDir(), binaries: map[string]string{}}
	var runs []int
	for i, m := range all {
		if chosen.MatchString(m.Name) && (*only != "" || pgtest.Long || pgtest.CI && i < short) {
			runs = append(runs, i)
		}
	}
	r.unbroken(runs)
	var killed int
	var took time.Duration
	for _, i := range runs {
		m, began := all[i], time.Now()
		verdict := r.run(m, texts[i])
		took += time.Since(began)
		if strings.HasPrefix(verdict, "killed") {
			killed++
		} else {
			t.Errorf("%s: %s", m.Name, verdict)
		}
		t.Logf("| %s | `%s` | %s %s | %s | %.0f s |", m.Name, m.In, m.Pkg, m.Test, verdict, time.Since(began).Seconds())
	}
	t.Logf("%d mutants, %d run, %d killed, %d survived, in %v", len(all), len(runs), killed, len(runs)-killed, took.Round(time.Second))
}

// runner builds the tests of a package once, for all mutants of the schema.
type runner struct {
	*testing.T
	dir      string
	binaries map[string]string
}

// unbroken runs the tests of the mutants on the library as it is: they pass.
func (r *runner) unbroken(mutants []int) {
	tests := map[string][]string{}
	for _, i := range mutants {
		tests[all[i].Pkg] = append(tests[all[i].Pkg], top(all[i].Test))
	}
	for _, pkg := range slices.Sorted(maps.Keys(tests)) {
		slices.Sort(tests[pkg])
		out, err := r.test(pkg, "^("+strings.Join(slices.Compact(tests[pkg]), "|")+")$", "")
		require.NoError(r, err, out)
	}
}

// run returns "killed", or how the mutant got away.
func (r *runner) run(m Mutant, text string) string {
	pattern := "^" + strings.ReplaceAll(m.Test, "/", "$/^") + "$"
	var out string
	var err error
	if m.ofGo() {
		out, err = r.overlaid(m, pattern, text)
	} else {
		out, err = r.test(m.Pkg, pattern, text)
	}
	switch {
	case strings.Contains(out, "[build failed]") || strings.Contains(out, "[setup failed]"):
		return "does not compile: " + out
	case err == nil:
		return "survived"
	case strings.Contains(out, "panic: test timed out"):
		return "killed: it hangs"
	case strings.Contains(out, "--- FAIL: "+top(m.Test)) || strings.Contains(out, "panic: ") && strings.Contains(out, top(m.Test)):
		return "killed"
	}
	return fmt.Sprintf("another error: %v: %s", err, out)
}

// test runs tests of a package on the schema, broken by the statements.
func (r *runner) test(pkg, pattern, statements string) (string, error) {
	binary, ok := r.binaries[pkg]
	if !ok {
		binary = filepath.Join(r.dir, strings.NewReplacer("/", "_", ".", "_").Replace(pkg)+".test")
		out, err := command(r.Context(), root, "go", "test", "-c", "-o", binary, pkg).CombinedOutput()
		require.NoError(r, err, "%s", out)
		r.binaries[pkg] = binary
	}
	cmd := command(r.Context(), filepath.Join(root, pkg), binary, "-test.run", pattern, "-test.timeout", "3m")
	cmd.Env = append(cmd.Env, pgtest.MutantEnv+"="+statements)
	out, err := cmd.CombinedOutput()
	return string(out), err
}

// overlaid runs tests of a package with the file of Go that the mutant breaks.
func (r *runner) overlaid(m Mutant, pattern, text string) (string, error) {
	broken, overlay := filepath.Join(r.dir, "broken.go"), filepath.Join(r.dir, "overlay.json")
	path, err := filepath.Abs(filepath.Join(root, m.In))
	require.NoError(r, err)
	replace, err := json.Marshal(map[string]map[string]string{"Replace": {path: broken}})
	require.NoError(r, err)
	require.NoError(r, os.WriteFile(broken, []byte(text), 0o600))
	require.NoError(r, os.WriteFile(overlay, replace, 0o600))
	out, err := command(r.Context(), root, "go", "test", "-overlay", overlay, "-vet=off", "-count=1", "-timeout", "3m", "-run", pattern, m.Pkg).CombinedOutput()
	return string(out), err
}

func command(ctx context.Context, dir, name string, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), "METERED_CI=1", "METERED_TWINS="+cmp.Or(os.Getenv("METERED_TWINS"), "1/2/40")) // the histories that find the mutants of wallets
	return cmd
}

// exists reports whether the package has the test function.
func exists(t *testing.T, m Mutant) bool {
	files, err := filepath.Glob(filepath.Join(root, m.Pkg, "*_test.go"))
	require.NoError(t, err)
	return slices.ContainsFunc(files, func(file string) bool {
		raw, err := os.ReadFile(file)
		require.NoError(t, err)
		return strings.Contains(string(raw), "\nfunc "+top(m.Test)+"(")
	})
}

func top(test string) string {
	name, _, _ := strings.Cut(test, "/")
	return name
}
