package schema

import (
	"embed"
	"fmt"
	"io/fs"
	"slices"
	"strings"
	"sync"
)

// Version is the version of the schema that this build makes.
const Version = 2

// Files are the source of this build's release.
//
//go:embed sql versions catalog.txt
var Files embed.FS

// Current is the release of this build.
var Current = sync.OnceValue(func() *Release { return Load(Files, Version) })

// Release is one version of the schema, as the build of that version knows it. Tests make the one
// after Current.
type Release struct {
	Version int

	files       fs.FS
	definitions func() string       // sql/*.sql as one text, with macros, attributes, bounds and comments
	wanted      map[string]Object   // the catalog of a fresh schema
	history     []map[string]Object // those of the versions before it, version 1 first
}

// Load reads a release: sql/*.sql, catalog.txt, and for each earlier version its catalog,
// versions/000N.txt, and the changes of its tables, versions/000M.sql.
func Load(files fs.FS, version int) *Release {
	r := &Release{Version: version, files: files}
	r.wanted = objects(r.file("catalog.txt"))
	for v := 1; v < version; v++ {
		r.history = append(r.history, objects(r.file(fmt.Sprintf("versions/%04d.txt", v))))
	}
	r.definitions = sync.OnceValue(r.render)
	return r
}

func (r *Release) render() string {
	var b strings.Builder
	for i, name := range sources {
		if i > 0 {
			b.WriteByte('\n')
		}
		b.WriteString(expand(r.file("sql/" + name + ".sql")))
		if name == "types" {
			b.WriteString("\n" + fits(b.String()))
		}
	}
	return withAttributes(withBounds(b.String())) + "\n" + comments(b.String())
}

func (r *Release) file(name string) string {
	text, err := fs.ReadFile(r.files, name)
	if err != nil {
		panic(err) // it is embedded
	}
	return string(text)
}

// Source is the whole schema as one text, under its default name.
func (r *Release) Source() string {
	return r.definitions() + "\n" + r.revokeFromPublic(false) + "\n" + onCitusSQL
}

// migration changes the tables of the version before v.
func (r *Release) migration(v int) string { return r.file(fmt.Sprintf("versions/%04d.sql", v)) }

// objects reads the text of a catalog.
func objects(text string) map[string]Object {
	all := make(map[string]Object)
	for line := range strings.Lines(text) {
		key, definition, _ := strings.Cut(strings.TrimSuffix(line, "\n"), ": ")
		kind, name, _ := strings.Cut(key, " ")
		all[key] = Object{Kind: kind, Name: name, Definition: definition}
	}
	return all
}

// keysOf are the keys of the functions and types of a version up to this one.
func (r *Release) keysOf(version int) []string {
	if version < r.Version {
		return callable(r.history[version-1])
	}
	return callable(r.wanted)
}

// previous are the keys of the functions and types of the version before. Version 1 has none.
func (r *Release) previous() []string {
	if r.Version == 1 {
		return nil
	}
	return r.keysOf(r.Version - 1)
}

func (r *Release) wants(key string) bool {
	_, ok := r.wanted[key]
	return ok
}

// Previous are the keys of functions and types that only the version before this one calls.
func (r *Release) Previous() []string { return slices.DeleteFunc(r.previous(), r.wants) }

// signatures are the functions that bear the name.
func (r *Release) signatures(name string) []string {
	var all []string
	for _, key := range callable(r.wanted) {
		if s, ok := strings.CutPrefix(key, "function "+name+"("); ok {
			all = append(all, name+"("+s)
		}
	}
	return all
}
