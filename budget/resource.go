package budget

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"iter"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgmetered/metered/internal/answer"
	"github.com/pgmetered/metered/internal/bounds"
)

// Resource is a created scope.
type Resource struct {
	// Scope is the scope's name.
	Scope string `json:"scope"`

	// CreatedAt is when the scope was created.
	CreatedAt time.Time `json:"created_at"`

	// RetiredAt is when the scope was retired. It is zero for one that is in use.
	RetiredAt time.Time `json:"retired_at,omitzero"`

	// Changed says that the call created, retired or restored the scope.
	Changed bool `json:"changed,omitempty"`

	// Held are the units of open holds, as Retire and Restore saw them.
	Held int64 `json:"held,omitempty"`
}

// Times are in microseconds: as text they would be in the session's DateStyle.
const resourceSQL = `
select scope, coalesce((extract(epoch from created_at) * 1e6)::bigint, 0), (extract(epoch from retired_at) * 1e6)::bigint, `

const createSQL = resourceSQL + `changed, 0
from metered.create_scopes($1::text[], $2::int)`

// Create declares that up to 1,000 scopes exist. A retired one is a *ScopeError. A charge of them
// in tx can deadlock with Retire.
func (l *Ledger) Create(ctx context.Context, tx pgx.Tx, scopes ...string) ([]Resource, error) {
	return l.declare(ctx, tx, "create", scopes)
}

const retireSQL = resourceSQL + `coalesce(changed, false), coalesce(held, -1)
from metered.retire_scopes($1::text[], $3::bool, $2::int)`

// Retire locks up to 64 created scopes (else *ScopeError): after the commit, calls with MustExist
// are refused. Entries and open holds stay: roll back if Resource.Held forbids it. Leases end: any
// process may settle them. leases.Pool.Allow, which decides in memory, hears of it when the
// transaction commits, or at most five seconds after the recall before. A Pool with NoRecall lets
// calls in until its slices end.
func (l *Ledger) Retire(ctx context.Context, tx pgx.Tx, scopes ...string) ([]Resource, error) {
	return l.declare(ctx, tx, "retire", scopes)
}

// Restore undoes Retire. Spent units still count.
func (l *Ledger) Restore(ctx context.Context, tx pgx.Tx, scopes ...string) ([]Resource, error) {
	return l.declare(ctx, tx, "restore", scopes)
}

func (l *Ledger) declare(ctx context.Context, tx pgx.Tx, doing string, scopes []string) ([]Resource, error) {
	if err := cmp.Or(l.made(), notNil("tx", tx)); err != nil {
		return nil, err
	}
	sql, most, args := l.sql.retire, bounds.MaxScopes, []any{scopes, l.waitMS(), doing == "retire"}
	if doing == "create" {
		sql, most, args = l.sql.create, bounds.MaxResources, args[:2]
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

const resourcesSQL = resourceSQL + `false, 0
from metered.resources where scope >= $1::text and scope > $2::text order by scope limit $3`

// Resources yields the created and retired scopes that begin with a prefix, such as Scopes.Prefix,
// in order of bytes. A prefix of "" yields all.
func (l *Ledger) Resources(ctx context.Context, db Querier, prefix string) iter.Seq2[Resource, error] {
	return func(yield func(Resource, error) bool) {
		if err := cmp.Or(l.made(), notNil("db", db),
			checkText("prefix", prefix, bounds.MaxScopeBytes)); err != nil {
			yield(Resource{}, err)
			return
		}
		for after, n := "", bounds.MaxResources; n == bounds.MaxResources; {
			// Planned for each page: a plan kept from when the table was small reads all of it.
			page, err := collectResources(ctx, db, "resources", l.sql.resources, pgx.QueryExecModeExec,
				prefix, after, bounds.MaxResources)
			if err != nil {
				yield(Resource{}, err)
				return
			}
			for _, r := range page {
				if !strings.HasPrefix(r.Scope, prefix) || !yield(r, nil) {
					return
				}
				after = r.Scope
			}
			n = len(page)
		}
	}
}

func collectResources(ctx context.Context, db Querier, doing, sql string, args ...any) ([]Resource, error) {
	rows, err := answer.Query(ctx, db, sql, args...)
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

// ScopeError is ErrScopeUnknown, ErrScopeRetired and ErrScopeClosed as they apply.
type ScopeError struct {
	// Unknown are the scopes that a charge with MustExist names and that were never created.
	Unknown []string `json:"unknown,omitempty"`

	// Retired are the scopes that were retired.
	Retired []string `json:"retired,omitempty"`

	// Closed are scopes that were carved, and have ended (see package leases).
	Closed []string `json:"closed,omitempty"`
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
	return slices.DeleteFunc([]scopesKind{{errScopeUnknown, e.Unknown},
		{errScopeRetired, e.Retired}, {errScopeClosed, e.Closed}},
		func(k scopesKind) bool { return len(k.scopes) == 0 })
}

func (e *ScopeError) Unwrap() (kinds []error) {
	for _, kind := range e.kinds() {
		kinds = append(kinds, kind.err)
	}
	return kinds
}

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
