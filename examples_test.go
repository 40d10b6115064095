package metered_test

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// What readers copy has to compile in a module of theirs, which can import no internal package:
// each file that has an Example, and each file of a program in examples. Of those, main.go may
// take from examples/internal what starts the demonstration.
func TestExamples_ImportNoInternalPackage(t *testing.T) {
	t.Parallel()
	shown := 0
	require.NoError(t, filepath.WalkDir(".", func(path string, _ fs.DirEntry, err error) error {
		own := filepath.ToSlash(path)
		program := strings.HasPrefix(own, "examples/") && !strings.HasPrefix(own, "examples/internal/") && !strings.HasSuffix(own, "_test.go")
		if err != nil || !strings.HasSuffix(own, ".go") || !program && !strings.HasSuffix(own, "_test.go") {
			return err
		}
		file, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.SkipObjectResolution)
		if err != nil || !program && !hasExample(file) {
			return err
		}
		shown++
		for _, spec := range file.Imports {
			name, err := strconv.Unquote(spec.Path.Value)
			if err != nil {
				return err
			}
			starts := program && filepath.Base(path) == "main.go" && strings.HasPrefix(name, "github.com/pgmetered/metered/examples/internal/")
			if strings.Contains(name+"/", "/internal/") && !starts {
				t.Errorf("%s imports %s", own, name)
			}
		}
		return nil
	}))
	require.Greater(t, shown, 50)
}

func hasExample(file *ast.File) bool {
	for _, decl := range file.Decls {
		if fn, ok := decl.(*ast.FuncDecl); ok && fn.Recv == nil && strings.HasPrefix(fn.Name.Name, "Example") {
			return true
		}
	}
	return false
}
