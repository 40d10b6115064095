package schema

import (
	"context"
	_ "embed"
	"maps"
	"regexp"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"
)

// Object is one table, column, index, constraint, type or function of a schema.
type Object struct {
	Kind, Name string
	// Definition is what it is, without the schema's name; of a function's body a hash.
	Definition string
	// Lost: its owner is not that of the schema's tables.
	Lost bool
	// Public: everybody may execute it.
	Public bool
}

// Reparable: it is created again without a loss.
func (o Object) Reparable() bool {
	table, _, _ := strings.Cut(o.Name, ".")
	return o.Kind == "function" || (o.Kind == "table" || o.Kind == "column") && wanted["table "+table].Definition == "view"
}

// Key names the object: "function clock()".
func (o Object) Key() string { return o.Kind + " " + o.Name }

func (o Object) String() string { return o.Key() + ": " + o.Definition }

// use is what its callers see of a function.
func (o Object) use() string {
	use, _, _ := strings.Cut(o.Definition, " language ")
	return use
}

// Catalog is what is installed in a schema.
type Catalog struct {
	// Version is that of the schema, 0 if there is none.
	Version int
	objects map[string]Object
}

// DB is a pool, a connection or a transaction.
type DB interface {
	Begin(ctx context.Context) (pgx.Tx, error)
}

//go:embed catalog.sql
var catalogSQL string

// ReadCatalog reads what is installed in the schema n. It changes nothing, neither in a
// transaction that is given to it.
func ReadCatalog(ctx context.Context, db DB, n Name) (c Catalog, err error) {
	tx, err := db.Begin(ctx)
	if err != nil {
		return c, err
	}
	defer func() {
		if e := tx.Rollback(ctx); err == nil {
			err = e
		}
	}()
	c.objects = make(map[string]Object)
	// By itself: a batch is prepared before any of it runs.
	if _, err := tx.Exec(ctx, "set local search_path = pg_catalog"); err != nil {
		return c, err
	}
	batch := &pgx.Batch{}
	batch.Queue(catalogSQL, n.plain).Query(func(rows pgx.Rows) error {
		all, err := pgx.CollectRows(rows, pgx.RowToStructByName[Object])
		for _, o := range all {
			o.Name, o.Definition = n.unqualified(o.Name), n.unqualified(o.Definition)
			c.objects[o.Key()] = o
		}
		return err
	})
	if err := tx.SendBatch(ctx, batch).Close(); err != nil {
		return c, err
	}
	if _, ok := c.objects["table schema_version"]; ok {
		err = tx.QueryRow(ctx, n.SQL(`select coalesce(max(version), 0) from metered.schema_version`)).Scan(&c.Version)
	}
	return c, err
}

// unqualified gives what is qualified by the schema's name its default name.
func (n Name) unqualified(text string) string {
	text = strings.ReplaceAll(text, n.quoted+".", Default+".")
	if n.plain == Default || !strings.Contains(text, n.plain) {
		return text
	}
	return regexp.MustCompile(`\b`+n.plain+`\.`).ReplaceAllLiteralString(text, Default+".")
}

// Has reports whether there is an object of that key.
func (c Catalog) Has(key string) bool {
	_, ok := c.objects[key]
	return ok
}

// Callable are the keys of the functions and types, sorted.
func (c Catalog) Callable() []string { return callable(c.objects) }

// Missing are the keys of functions and types that the installed version has and that are not
// there.
func (c Catalog) Missing() []string { return slices.DeleteFunc(slices.Clone(keysOf(c.Version)), c.Has) }

// Text is the catalog as catalog.txt has it.
func (c Catalog) Text() string {
	var b strings.Builder
	for _, key := range slices.Sorted(maps.Keys(c.objects)) {
		b.WriteString(c.objects[key].String() + "\n")
	}
	return b.String()
}

//go:embed catalog.txt
var catalogText string

// wanted is the catalog of Source.
var wanted = func() map[string]Object {
	all := make(map[string]Object)
	for line := range strings.Lines(catalogText) {
		key, definition, _ := strings.Cut(strings.TrimSuffix(line, "\n"), ": ")
		kind, name, _ := strings.Cut(key, " ")
		all[key] = Object{Kind: kind, Name: name, Definition: definition}
	}
	return all
}()

// signatures are the functions of Source that bear the name.
func signatures(name string) []string {
	var all []string
	for _, key := range slices.Sorted(maps.Keys(wanted)) {
		if s, ok := strings.CutPrefix(key, "function "+name+"("); ok {
			all = append(all, name+"("+s)
		}
	}
	return all
}

// Problem is what is wrong with an object.
type Problem string

// The problems.
const (
	Missing Problem = "is missing"
	Other   Problem = "differs"
	Public  Problem = "can be executed by everybody"
	Lost    Problem = "has another owner than schema_version"
)

// Difference is an object that is not installed as it should be.
type Difference struct {
	Object  Object // as it should be
	Problem Problem
	Have    string // its definition, if it differs
}

// Differences compares what is installed with what Source makes. What only the version before
// calls may be there, too, but not for everybody.
func (c Catalog) Differences() []Difference {
	var all []Difference
	for _, key := range slices.Sorted(maps.Keys(wanted)) {
		want := wanted[key]
		have, ok := c.objects[key]
		switch {
		case !ok:
			all = append(all, Difference{want, Missing, ""})
			continue
		case have.Definition != want.Definition:
			all = append(all, Difference{want, Other, have.Definition})
		}
		if have.Public {
			all = append(all, Difference{want, Public, ""})
		}
		if have.Lost {
			all = append(all, Difference{want, Lost, ""})
		}
	}
	for _, key := range Previous() {
		if have := c.objects[key]; have.Public {
			all = append(all, Difference{have, Public, ""})
		}
	}
	return all
}

// Unusable are those of the Differences that make calls fail: what is missing, but for views, and functions
// that are to be called otherwise. A clock that a test has set is none of them.
func (c Catalog) Unusable() []Difference {
	return slices.DeleteFunc(c.Differences(), func(d Difference) bool {
		switch {
		case d.Object.Kind == "index" || d.Object.Kind == "constraint" || d.Object.Kind != "function" && d.Object.Reparable():
			return true
		case d.Problem == Missing:
			return false
		}
		return d.Problem != Other || d.Object.Kind != "function" || Object{Definition: d.Have}.use() == d.Object.use()
	})
}
