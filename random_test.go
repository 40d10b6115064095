package metered_test

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// made are the functions of math/rand/v2 that take a seed, or a source that did.
var made = regexp.MustCompile(`^(New|NewPCG|NewChaCha8|NewZipf|Rand|Source|Zipf|PCG|ChaCha8)$`)

// unseeded are the places in a file of tests where a number comes from nowhere: from the functions of math/rand that no seed decides, from a
// seed that the clock makes, or from rapid in a package whose TestMain does not set its seed.
func unseeded(fset *token.FileSet, f *ast.File, seeded bool) (places []string) {
	imported := map[string]string{} // paths by name
	for _, i := range f.Imports {
		path := strings.Trim(i.Path.Value, `"`)
		name := strings.TrimSuffix(filepath.Base(path), "v2")
		if name == "" || strings.HasSuffix(path, "rand/v2") {
			name = "rand"
		}
		if i.Name != nil {
			name = i.Name.Name
		}
		imported[name] = path
	}
	say := func(at ast.Node, what string) { places = append(places, fset.Position(at.Pos()).String()+" "+what) }
	of := func(n ast.Node) (path, name string) {
		if call, is := n.(*ast.CallExpr); is {
			n = call.Fun
		}
		s, is := n.(*ast.SelectorExpr)
		if !is {
			return "", ""
		}
		x, is := s.X.(*ast.Ident)
		if !is || x.Obj != nil { // a variable
			return "", s.Sel.Name
		}
		return imported[x.Name], s.Sel.Name
	}
	ast.Inspect(f, func(n ast.Node) bool {
		switch path, name := of(n); {
		case n == nil:
		case path == "math/rand" || path == "math/rand/v2" && !made.MatchString(name):
			say(n, name+" has no seed: pgtest.Random has one")
			return false
		case path == "math/rand/v2" && strings.HasPrefix(name, "New"):
			ast.Inspect(n, func(arg ast.Node) bool {
				if _, clock := of(arg); clock == "UnixNano" || clock == "Now" {
					say(n, "the clock is no seed: pgtest.Seed is")
					return false
				}
				return true
			})
		case path == "testing/quick":
			say(n, "testing/quick has no seed")
		case path == "pgregory.net/rapid" && name == "Check" && !seeded:
			say(n, "pgtest.Histories sets rapid's seed, in TestMain")
			return false
		}
		if a, is := n.(*ast.AssignStmt); is && len(a.Lhs) == 1 && len(a.Rhs) == 1 {
			if to, is := a.Lhs[0].(*ast.Ident); is && strings.Contains(strings.ToLower(to.Name), "seed") {
				ast.Inspect(a.Rhs[0], func(n ast.Node) bool {
					if _, clock := of(n); clock == "UnixNano" || clock == "Now" {
						say(a, "the clock is no seed: pgtest.Seed is")
						return false
					}
					return true
				})
			}
		}
		return true
	})
	return places
}

var setsSeed = regexp.MustCompile(`(?m)^func TestMain[^\n]*\n(?:[^}].*\n)*\tpgtest\.Histories\(`)

// Tests draw the same numbers in each run, other than at full size: what a stranger's first run finds is what ours found. It looks at
// tests, and at the programs that only they run.
func TestRandomNumbers_OfTestsHaveASeed(t *testing.T) {
	t.Parallel()
	fset, asked, seeded := token.NewFileSet(), 0, map[string]bool{}
	require.NoError(t, filepath.WalkDir(".", func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() && strings.HasPrefix(d.Name(), ".") && path != "." {
			return fs.SkipDir
		}
		tool := strings.HasPrefix(path, "integration_test/") || strings.HasPrefix(path, "internal/interleave/")
		if !strings.HasSuffix(path, "_test.go") && !(tool && strings.HasSuffix(path, ".go")) {
			return nil
		}
		f, err := parser.ParseFile(fset, path, nil, 0)
		require.NoError(t, err)
		asked++
		dir := filepath.Dir(path)
		if _, known := seeded[dir]; !known {
			main, err := filepath.Glob(filepath.Join(dir, "*_test.go"))
			require.NoError(t, err)
			for _, name := range main {
				text, err := os.ReadFile(name)
				require.NoError(t, err)
				seeded[dir] = seeded[dir] || setsSeed.Match(text)
			}
		}
		require.Empty(t, unseeded(fset, f, seeded[dir]))
		return nil
	}))
	require.Greater(t, asked, 300)
}

// The check itself finds each of these.
func TestRandomNumbers_WithoutASeedAreFound(t *testing.T) {
	t.Parallel()
	for body, want := range map[string]int{
		`_ = rand.IntN(3)`:        1,
		`_ = rand.N(time.Second)`: 1,
		`rand.Shuffle(3, nil)`:    1,
		`_ = rand.New(rand.NewPCG(uint64(time.Now().UnixNano()), 0))`: 2, // New and NewPCG
		`seed := uint64(time.Now().UnixNano()); _ = seed`:             1,
		`rapid.Check(nil, nil)`:                                       1,
		`r := rand.New(rand.NewPCG(7, 1)); _ = r.IntN(3)`:             0,
		`var rand struct{ IntN func(int) int }; _ = rand.IntN(3)`:     0,
	} {
		fset := token.NewFileSet()
		f, err := parser.ParseFile(fset, "x_test.go", `package x
import ("math/rand/v2"; "time"; "pgregory.net/rapid")
func f() { `+body+` }`, 0)
		require.NoError(t, err)
		require.Len(t, unseeded(fset, f, false), want, body)
	}
}
