package schema

import (
	"context"
	_ "embed"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/pgmetered/metered/internal/answer"
)

// Object is one table, column, index, constraint, type or function of a schema.
type Object struct {
	Kind, Name string
	// Definition is the object's definition, without the schema's name. For a function's body it is
	// a hash.
	Definition string
	// Lost: its owner is not that of the schema's tables.
	Lost bool
	// Public: everybody may execute it.
	Public bool
}

// reparable: it is created again without a loss, or moved on.
func (r *Release) reparable(o Object) bool {
	table, _, _ := strings.Cut(o.Name, ".")
	return o.Kind == "function" || o.Kind == "sequence" || (o.Kind == "table" || o.Kind == "column") && r.wanted["table "+table].Definition == "view"
}

// Key names the object: "function clock()".
func (o Object) Key() string { return o.Kind + " " + o.Name }

func (o Object) String() string { return o.Key() + ": " + o.Definition }

// use is a function's interface, as its callers see it.
func (o Object) use() string {
	use, _, _ := strings.Cut(o.Definition, " language ")
	return use
}

// Catalog is the objects that are installed in a schema.
type Catalog struct {
	// Version is that of the schema, 0 if there is none.
	Version int
	release *Release // of the build that reads
	schema  Name
	objects map[string]Object
	behind  []Difference // sequences
}

// DB is a pool, a connection or a transaction.
type DB interface {
	Begin(ctx context.Context) (pgx.Tx, error)
}

//go:embed catalog.sql
var catalogSQL string

//go:embed usable.sql
var usableSQL string

// Read reads the objects of the schema n. It changes nothing, even in a transaction passed to it.
func (r *Release) Read(ctx context.Context, db DB, n Name) (Catalog, error) {
	return r.read(ctx, db, n, true)
}

// ReadUsable is Read of no more than Unusable judges.
func (r *Release) ReadUsable(ctx context.Context, db DB, n Name) (Catalog, error) {
	return r.read(ctx, db, n, false)
}

func (r *Release) read(ctx context.Context, db DB, n Name, whole bool) (c Catalog, err error) {
	c.release, c.schema = r, n
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
	sql := usableSQL
	if whole {
		sql = catalogSQL
	}
	batch.Queue(sql, n.plain).Query(func(rows pgx.Rows) error {
		all, err := pgx.CollectRows(rows, pgx.RowToStructByName[Object])
		for _, o := range all {
			o.Name, o.Definition = n.unqualified(o.Name), n.unqualified(o.Definition)
			c.objects[o.Key()] = o
		}
		return err
	})
	if err := answer.SendBatch(ctx, tx, batch).Close(); err != nil {
		return c, err
	}
	if c.Has("table schema_version") && c.Has("column schema_version.version") {
		err = answer.QueryRow(ctx, tx, n.SQL(`select coalesce(max(version), 0) from metered.schema_version`)).Scan(&c.Version)
	}
	if err == nil && whole && !slices.ContainsFunc(behindReads, c.lacks) {
		c.behind, err = behind(ctx, tx, n)
	}
	return c, err
}

const mayLookSQL = `select pg_catalog.has_function_privilege('metered.numbers_behind()', 'execute')`

const behindSQL = `select b.of_table, b.last, b.largest from metered.numbers_behind() b`

// behindReads are the keys of what behindSQL runs and reads. Where one is missing or differs, that
// is the difference, and the sequences are not looked at.
var behindReads = []string{
	"function numbers_behind()", "function _largest_number(text)", "function _numbers(text)",
	"column holds.no", "column leases.no", "column lot_rows.no", "column lot_rows.roll_no",
	"column cell.no", "column cell.one",
}

// lacks reports whether the object of that key is missing, or differs from the release's.
func (c Catalog) lacks(key string) bool {
	return !c.Has(key) || c.objects[key].Definition != c.release.wanted[key].Definition
}

// behind are the sequences that are behind their tables, if the role may ask.
func behind(ctx context.Context, tx pgx.Tx, n Name) (all []Difference, err error) {
	var may bool
	if err := answer.QueryRow(ctx, tx, n.SQL(mayLookSQL)).Scan(&may); err != nil || !may {
		return nil, err
	}
	var table string
	var last, largest int64
	rows, _ := answer.Query(ctx, tx, n.SQL(behindSQL))
	_, err = pgx.ForEachRow(rows, []any{&table, &last, &largest}, func() error {
		want := Object{Kind: "sequence", Name: table + ".no", Definition: fmt.Sprintf("%d or more", largest)}
		all = append(all, Difference{want, Behind, fmt.Sprint(last)})
		return nil
	})
	return all, err
}

// unqualified replaces the schema's name by its default in a text.
func (n Name) unqualified(text string) string {
	text = strings.ReplaceAll(text, n.quoted+".", Default+".")
	if n.plain == Default || !strings.Contains(text, n.plain) {
		return text
	}
	return regexp.MustCompile(`\b`+n.plain+`\.`).ReplaceAllLiteralString(text, Default+".")
}

// Named is a key or a definition under the schema's own name: a catalog has the default name for
// it.
func (c Catalog) Named(text string) string { return c.schema.SQL(text) }

// Has reports whether there is an object of that key.
func (c Catalog) Has(key string) bool {
	_, ok := c.objects[key]
	return ok
}

// Irreparable are those of the differences that are more than creating functions, views and types
// again can mend.
func (c Catalog) Irreparable(wrong []Difference) []Difference {
	return slices.DeleteFunc(slices.Clone(wrong), func(d Difference) bool {
		return !d.Problem.OfVersion() && (c.release.reparable(d.Object) || d.Object.Kind == "type" && d.Problem == Missing)
	})
}

// Missing are the keys of functions and types that the installed version has and that are not
// there.
func (c Catalog) Missing() []string { return slices.DeleteFunc(c.release.keysOf(c.Version), c.Has) }

// Text is the catalog as catalog.txt has it.
func (c Catalog) Text() string {
	var b strings.Builder
	for _, key := range slices.Sorted(maps.Keys(c.objects)) {
		b.WriteString(c.objects[key].String() + "\n")
	}
	return b.String()
}

// Problem is the fault of an object.
type Problem string

// The problems.
const (
	Missing Problem = "is missing"
	Other   Problem = "differs"
	Public  Problem = "can be executed by everybody"
	Lost    Problem = "has another owner than schema_version"
	Behind  Problem = "is behind its table"

	// These make the version that the schema says a wrong one.
	Unreleased Problem = "is of an unreleased build: this schema cannot be upgraded. Drop it, or use one of another name"
	Unsaid     Problem = "says no version, though other parts of the schema are there: it was emptied or set back"
	Later      Problem = "is of a later version than schema_version says: it was set back"
)

// OfVersion reports whether the problem is that the schema says another version than it has.
func (p Problem) OfVersion() bool { return p == Unreleased || p == Unsaid || p == Later }

// Difference is an object that is not installed as it should be.
type Difference struct {
	Object  Object // as it should be
	Problem Problem
	Have    string // its definition, if it differs, or the last number of a sequence
}

// Differences compares the installed objects with the release's. Functions that only the previous
// version calls may be there, too, but not for everybody to call. Where the version itself is
// wrong, nothing else is compared.
func (c Catalog) Differences() []Difference {
	all := c.versionDifferences()
	if len(all) > 0 {
		return all
	}
	for _, key := range slices.Sorted(maps.Keys(c.release.wanted)) {
		want := c.release.wanted[key]
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
	for _, key := range c.release.Previous() {
		if have := c.objects[key]; have.Public {
			all = append(all, Difference{have, Public, ""})
		}
	}
	return append(all, c.behind...)
}

// versionDifferences are why the version that the schema says cannot be its own.
func (c Catalog) versionDifferences() (all []Difference) {
	versions := c.release.wanted["table schema_version"]
	switch {
	case c.Has("column schema_version.applied_at"): // no release has it
		return []Difference{{versions, Unreleased, ""}}
	case c.Version <= 0:
		for key := range c.release.wanted {
			if c.Has(key) {
				return []Difference{{versions, Unsaid, ""}}
			}
		}
	case c.Version < c.release.Version:
		before := c.release.keysOf(c.Version)
		for _, key := range callable(c.release.wanted) {
			if c.Has(key) && !slices.Contains(before, key) {
				all = append(all, Difference{c.release.wanted[key], Later, ""})
			}
		}
	}
	return all
}

// Unusable are those of the Differences that make calls fail: missing objects except views, and
// functions with another interface. A clock that a test has set is none of them.
func (c Catalog) Unusable() []Difference {
	return slices.DeleteFunc(c.Differences(), func(d Difference) bool {
		switch {
		case d.Problem.OfVersion():
			return false
		case d.Object.Kind == "index" || d.Object.Kind == "constraint" || d.Problem == Behind || d.Object.Kind != "function" && c.release.reparable(d.Object):
			return true
		case d.Problem == Missing:
			return false
		}
		return d.Problem != Other || d.Object.Kind != "function" || Object{Definition: d.Have}.use() == d.Object.use()
	})
}
