package migrate

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/pgmetered/metered/internal/fault"
	"github.com/pgmetered/metered/internal/schema"
)

// Package metered has these as ErrSchemaVersion and ErrSchemaDiffers.
var (
	ErrVersion = fault.New("schema_version", "metered: the schema is too new for this build")
	ErrDiffers = fault.New("schema_differs", "metered: the schema is not as it should be")
)

// State is metered.SchemaReport.
type State struct {
	Version     int
	Differences []Difference
	Previous    []string
}

// Difference is metered.SchemaDifference.
type Difference struct{ Object, Problem, Want, Have string }

func (d Difference) String() string {
	if d.Have != "" {
		return fmt.Sprintf("%s %s: it is %q and should be %q", d.Object, d.Problem, d.Have, d.Want)
	}
	return d.Object + " " + d.Problem
}

// Examine is metered.Validate, of the build of a release.
func Examine(ctx context.Context, r *schema.Release, db schema.DB, n schema.Name) (State, error) {
	c, err := r.Read(ctx, db, n)
	if err != nil {
		return State{}, fault.Failed("metered", "validate", err)
	}
	return stateOf(r, c), nil
}

func stateOf(r *schema.Release, c schema.Catalog) State {
	wrong := c.Differences()
	if c.Version > r.Version {
		wrong = c.Unusable()
	}
	return State{Version: c.Version, Differences: differences(c, wrong), Previous: previous(r, c)}
}

func (s State) err(needs int) error { return Err(needs, s.Version, s.Differences) }

// Err is metered.SchemaReport.Err, for a schema of that version with those differences, and a build
// that needs a version.
func Err(needs, version int, wrong []Difference) error {
	switch {
	case slices.ContainsFunc(wrong, func(d Difference) bool { return schema.Problem(d.Problem).OfVersion() }):
		return fmt.Errorf("%w: %s", ErrDiffers, listed(wrong))
	case version < needs:
		return fmt.Errorf("%w: the database has version %d, this build needs %d", fault.ErrNotMigrated, version, needs)
	case version > needs+1:
		return fmt.Errorf("%w: the database has version %d, this build knows %d", ErrVersion, version, needs)
	case len(wrong) == 0:
		return nil
	case version > needs:
		return fmt.Errorf("%w: the database has version %d, and lacks objects that this build of version %d needs: %s",
			ErrVersion, version, needs, listed(wrong))
	default:
		return fmt.Errorf("%w: %s", ErrDiffers, listed(wrong))
	}
}

// ofVersion: the schema says another version than it has.
func ofVersion(wrong []schema.Difference) bool {
	return slices.ContainsFunc(wrong, func(d schema.Difference) bool { return d.Problem.OfVersion() })
}

// previous are those of the build before that are still there.
func previous(r *schema.Release, c schema.Catalog) (there []string) {
	if c.Version == r.Version {
		there = present(c, r.Previous())
	}
	return there
}

func present(c schema.Catalog, keys []string) (there []string) {
	for _, key := range keys {
		if c.Has(key) {
			there = append(there, key)
		}
	}
	return there
}

func differences(c schema.Catalog, wrong []schema.Difference) (all []Difference) {
	for _, d := range wrong {
		diff := Difference{Object: c.Named(d.Object.Key()), Problem: string(d.Problem)}
		if d.Problem == schema.Other || d.Problem == schema.Behind {
			diff.Want, diff.Have = c.Named(d.Object.Definition), c.Named(d.Have)
		}
		all = append(all, diff)
	}
	return all
}

// irreparable is ErrDiffers if some of the differences are more than Migrate can mend.
func irreparable(c schema.Catalog, wrong []schema.Difference) error {
	left := c.Irreparable(wrong)
	if len(left) == 0 {
		return nil
	}
	return fmt.Errorf("%w: %s", ErrDiffers, listed(differences(c, left)))
}

// listed names up to ten differences.
func listed(all []Difference) string {
	const limit = 10
	var b strings.Builder
	for i, d := range all[:min(limit, len(all))] {
		if i > 0 {
			b.WriteString("; ")
		}
		b.WriteString(d.String())
	}
	if more := len(all) - limit; more > 0 {
		fmt.Fprintf(&b, "; and %d more", more)
	}
	return b.String()
}
