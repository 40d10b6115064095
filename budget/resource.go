package budget

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgmetered/metered/internal/fault"
)

// MaxResources bounds the scopes of a Create and the answer of Resources.
const MaxResources = 1000

// Resource is a scope that was created: calls with MustExist ask for one.
type Resource struct {
	Scope     string    `json:"scope"`
	CreatedAt time.Time `json:"created_at"`
	RetiredAt time.Time `json:"retired_at,omitzero"` // zero if it is not
	Changed   bool      `json:"changed,omitempty"`   // by this call. False: it was so before
	Held      int64     `json:"held,omitempty"`      // by open holds, as Retire and Restore report it
}

// Times are in microseconds: as text they would be in the session's DateStyle.
const resourceSQL = `
select scope, coalesce((extract(epoch from created_at) * 1e6)::bigint, 0), (extract(epoch from retired_at) * 1e6)::bigint, `

const createSQL = resourceSQL + `changed, 0
from metered.create_scopes($1::text[], $2::int)`

// Create declares that up to MaxResources scopes exist. It answers in the order of their names. Resource.Changed marks
// the new ones. Nobody can retire them before tx ends. A Retire that waits has
// their locks, so a charge of them that follows in tx can deadlock with it (40P01). If one was retired it is a *ScopeError, and nothing is created:
// only Restore undoes a retirement.
func (l *Ledger) Create(ctx context.Context, tx pgx.Tx, scopes ...string) ([]Resource, error) {
	return l.declare(ctx, tx, "create", scopes)
}

const retireSQL = resourceSQL + `coalesce(changed, false), coalesce(held, -1)
from metered.retire_scopes($1::text[], $3::bool, $2::int)`

// Retire declares that up to MaxScopes scopes exist no more. It takes their locks: once tx has committed, calls with
// MustExist are refused. Its leases end then, those of Pool.Allow too: nothing more is spent from them, and any process may settle
// one, units in the memory of a process that is gone as spent. Entries stay, and open holds go on: roll back if Resource.Held forbids it. If one was never
// created it is a *ScopeError, and nothing is retired.
func (l *Ledger) Retire(ctx context.Context, tx pgx.Tx, scopes ...string) ([]Resource, error) {
	return l.declare(ctx, tx, "retire", scopes)
}

// Restore undoes Retire. Spent units count as before.
func (l *Ledger) Restore(ctx context.Context, tx pgx.Tx, scopes ...string) ([]Resource, error) {
	return l.declare(ctx, tx, "restore", scopes)
}

func (l *Ledger) declare(ctx context.Context, tx pgx.Tx, doing string, scopes []string) ([]Resource, error) {
	if err := cmp.Or(l.made(), notNil("tx", tx)); err != nil {
		return nil, err
	}
	sql, most, args := l.sql.retire, MaxScopes, []any{scopes, l.waitMS(), doing == "retire"}
	if doing == "create" {
		sql, most, args = l.sql.create, MaxResources, args[:2]
	}
	if len(scopes) == 0 || len(scopes) > most {
		return nil, invalid("scopes", "are %d, want 1 to %d", len(scopes), most)
	}
	for i, scope := range scopes {
		if err := checkScope(index("scopes", i, ""), scope); err != nil {
			return nil, err
		}
	}
	all, err := collectResources(ctx, tx, doing, sql, args...)
	if err != nil {
		return nil, err
	}
	refused := &ScopeError{}
	for _, r := range all {
		switch {
		case r.Held < 0:
			refused.Unknown = append(refused.Unknown, r.Scope)
		case doing == "create" && !r.RetiredAt.IsZero():
			refused.Retired = append(refused.Retired, r.Scope)
		}
	}
	if refused.Unwrap() != nil {
		return nil, refused
	}
	return all, nil
}

// ResourceFilter selects resources. The zero value selects the first of all.
type ResourceFilter struct {
	Prefix string // of the scopes, as Scopes.Prefix makes one
	After  string // the last scope seen, to go on behind it
	Max    int    // up to MaxResources, which is the default
}

const resourcesSQL = resourceSQL + `false, 0
from metered.resources where scope >= $1::text and scope > $2::text order by scope limit $3`

// Resources lists created scopes, also retired ones, in the order of bytes.
func (l *Ledger) Resources(ctx context.Context, db Querier, f ResourceFilter) ([]Resource, error) {
	if err := cmp.Or(l.made(), notNil("db", db), checkText("ResourceFilter.Prefix", f.Prefix, MaxScopeBytes),
		checkText("ResourceFilter.After", f.After, MaxScopeBytes)); err != nil {
		return nil, err
	}
	if f.Max < 0 || f.Max > MaxResources {
		return nil, invalid("ResourceFilter.Max", "%d is not from 0 to %d", f.Max, MaxResources)
	}
	// Planned for each page: a plan kept from when the table was small reads all of it.
	all, err := collectResources(ctx, db, "resources", l.sql.resources, pgx.QueryExecModeExec, f.Prefix, f.After, cmp.Or(f.Max, MaxResources))
	if end := slices.IndexFunc(all, func(r Resource) bool { return !strings.HasPrefix(r.Scope, f.Prefix) }); end >= 0 {
		all = all[:end]
	}
	return all, err
}

func collectResources(ctx context.Context, db Querier, doing, sql string, args ...any) ([]Resource, error) {
	rows, err := db.Query(ctx, sql, args...)
	if err != nil {
		return nil, failed(doing, err)
	}
	all, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (r Resource, err error) {
		var created int64
		var retired *int64
		if err = row.Scan(&r.Scope, &created, &retired, &r.Changed, &r.Held); retired != nil {
			r.RetiredAt = time.UnixMicro(*retired).UTC()
		}
		r.CreatedAt = time.UnixMicro(created).UTC()
		return r, err
	})
	return all, failed(doing, err)
}

// ScopeError is a refusal: these scopes must exist, and do not, or are closed. It is ErrScopeUnknown, ErrScopeRetired,
// ErrScopeClosed or several of them. Nothing was written.
type ScopeError struct {
	Unknown []string `json:"unknown,omitempty"` // never created
	Retired []string `json:"retired,omitempty"`
	Closed  []string `json:"closed,omitempty"` // carved from another scope, which has the rest back (package leases)
}

func (e *ScopeError) Error() string {
	var texts []string
	for _, kind := range e.kinds() {
		texts = append(texts, fmt.Sprintf("%v: %q", kind.err, kind.scopes))
	}
	return strings.Join(texts, "; ")
}

type scopesKind struct {
	err    error
	scopes []string
}

// kinds are the errors that it is.
func (e *ScopeError) kinds() []scopesKind {
	return slices.DeleteFunc([]scopesKind{{errScopeUnknown, e.Unknown}, {errScopeRetired, e.Retired}, {errScopeClosed, e.Closed}},
		func(k scopesKind) bool { return len(k.scopes) == 0 })
}

func (e *ScopeError) Unwrap() (kinds []error) {
	for _, kind := range e.kinds() {
		kinds = append(kinds, kind.err)
	}
	return kinds
}

func (e *ScopeError) Code() string { return fault.Code(e) }

// absentScopes decodes the detail that _with_absent in schema.sql wrote.
func absentScopes(refused []byte) error {
	var rows []struct{ Scope, Absent string }
	if err := json.Unmarshal(refused, &rows); err != nil {
		return failed("read a refusal", err)
	}
	e := &ScopeError{}
	for _, row := range rows {
		switch row.Absent {
		case "retired":
			e.Retired = append(e.Retired, row.Scope)
		case "closed":
			e.Closed = append(e.Closed, row.Scope)
		default:
			e.Unknown = append(e.Unknown, row.Scope)
		}
	}
	return e
}
