package metered_test

import (
	"go/ast"
	"go/doc"
	"go/parser"
	"go/token"
	"go/types"
	"io/fs"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/pgmetered/metered/internal/pgtest"

	"github.com/stretchr/testify/require"
)

const modulePath = "github.com/pgmetered/metered"

// The methods that the standard library, encoders and River call by an interface.
var ofInterfaces = strings.Fields(`Kind Error Unwrap Code Reason String GoString Format LogValue MarshalJSON UnmarshalJSON MarshalText UnmarshalText IsZero`)

// Each public call has a use that readers can copy: in an Example whose output is compared, or in a program of examples/ or cmd/,
// all of which are tested.
func TestExamples_CallEachPublicFunction(t *testing.T) {
	t.Parallel()
	pgtest.OnEachVersion(t)
	c := &checker{fset: token.NewFileSet(), packages: map[string]*types.Package{}, called: map[types.Object]bool{}}
	shown := map[string][]*ast.File{}
	require.NoError(t, filepath.WalkDir(".", func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() || !strings.HasSuffix(path, ".go") {
			return err
		}
		own, test := filepath.ToSlash(path), strings.HasSuffix(path, "_test.go")
		program := !test && (strings.HasPrefix(own, "examples/") || strings.HasPrefix(own, "cmd/"))
		if !program && !(test && strings.HasPrefix(d.Name(), "example_")) {
			return nil
		}
		file, err := parser.ParseFile(c.fset, path, nil, parser.SkipObjectResolution|parser.ParseComments)
		if err == nil && test {
			for _, example := range doc.Examples(file) {
				if example.Output == "" && !example.EmptyOutput {
					t.Errorf("%s: Example%s is not run: it has no Output", path, example.Name)
				}
			}
		}
		shown[filepath.Dir(path)] = append(shown[filepath.Dir(path)], file)
		return err
	}))
	for dir, files := range shown {
		c.check(dir, files, &types.Info{Uses: map[*ast.Ident]types.Object{}})
	}
	var missing []string
	calls := 0
	for _, path := range []string{"", "/budget", "/holds", "/leases", "/tokens", "/jobs", "/wallet", "/maintain", "/httpmetered", "/cells", "/privacy"} {
		for _, call := range public(c.packages[modulePath+path]) {
			if calls++; !c.called[call] && !slices.Contains(ofInterfaces, call.Name()) {
				missing = append(missing, nameOf(call))
			}
		}
	}
	require.Empty(t, missing, "without an example")
	require.Greater(t, calls, 200)
}

// nameOf is a call's name without its module: wallet.Book.Grant.
func nameOf(call *types.Func) string {
	name := call.Pkg().Name() + "."
	if of := call.Signature().Recv(); of != nil {
		receiver := of.Type()
		if pointer, ok := receiver.(*types.Pointer); ok {
			receiver = pointer.Elem()
		}
		name += receiver.(*types.Named).Obj().Name() + "."
	}
	return name + call.Name()
}

// checker finds the calls that files make to this module's packages. Other packages are empty to it, and it leaves
// their names unresolved.
type checker struct {
	fset     *token.FileSet
	packages map[string]*types.Package
	called   map[types.Object]bool
}

func (c *checker) check(path string, files []*ast.File, info *types.Info) *types.Package {
	config := types.Config{Importer: c, IgnoreFuncBodies: info == nil, Error: func(error) {}}
	p, _ := config.Check(path, c.fset, files, info)
	if info != nil {
		for _, object := range info.Uses {
			if fn, ok := object.(*types.Func); ok {
				c.called[fn.Origin()] = true
			}
		}
	}
	return p
}

// Import is that of types.Importer.
func (c *checker) Import(path string) (*types.Package, error) {
	p := c.packages[path]
	if p != nil {
		return p, nil
	}
	dir, own := strings.CutPrefix(path, modulePath)
	if own {
		paths, err := filepath.Glob(filepath.Join(".", dir, "*.go"))
		if err != nil {
			return nil, err
		}
		var files []*ast.File
		for _, path := range paths {
			if strings.HasSuffix(path, "_test.go") {
				continue
			}
			file, err := parser.ParseFile(c.fset, path, nil, parser.SkipObjectResolution)
			if err != nil {
				return nil, err
			}
			files = append(files, file)
		}
		p = c.check(path, files, nil)
	} else {
		p = types.NewPackage(path, filepath.Base(path))
		p.MarkComplete()
	}
	c.packages[path] = p
	return p, nil
}

// public is the exported functions of a package, and the methods of its types.
func public(p *types.Package) []*types.Func {
	var all []*types.Func
	for _, name := range p.Scope().Names() {
		switch object := p.Scope().Lookup(name).(type) {
		case *types.Func:
			all = append(all, object)
		case *types.TypeName:
			named, ok := object.Type().(*types.Named)
			if !ok || !object.Exported() || object.IsAlias() {
				continue
			}
			all = slices.AppendSeq(all, named.Methods())
		}
	}
	return slices.DeleteFunc(all, func(fn *types.Func) bool { return !fn.Exported() })
}
