package fault

import (
	"encoding/json"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/pgmetered/metered/internal/sqlstate"
)

// Errors of every package's statements.
var (
	ErrBusy = New("busy", "metered: a lock is held by another transaction for too long")
	// ErrSerialization: SQLSTATE 40001 or 40P01.
	ErrSerialization = New("serialization", "metered: the transaction collided with another one, and has to run again")
	ErrNotMigrated   = New("not_migrated", "metered: a schema is missing or incomplete: call metered.Migrate, and migrate River for jobs; metered.Validate lists the differences")
	// ErrMoved: a *Moved.
	ErrMoved   = New("tenant_moved", "metered: the tenant lives in another cell")
	ErrNotCell = New("cell_differs", "metered: the schema is not the cell that the router has at its place: call cells.Router.SetUp, with the same cells everywhere")
	// ErrReadOnly: SQLSTATE 25006.
	ErrReadOnly   = New("read_only", "metered: the server, or the transaction, is read-only: another server may be the primary by now")
	ErrNotGranted = New("not_granted", "metered: the role lacks grants of metered.GrantSQL, of GrantJobsSQL to park and release jobs, or of GrantMaintenanceSQL to purge and repair, or rights on River's tables")
)

// Failed names the failed act, and its package. It maps errors of Postgres that every package may
// meet to the errors above. The error of Postgres stays underneath, and its Detail, which has key
// values, is never printed. It is nil for nil.
func Failed(pkg, doing string, err error) error {
	var kind error
	switch sqlstate.Of(err) {
	case sqlstate.LockNotAvailable:
		kind = ErrBusy
	case sqlstate.SerializationFailure, sqlstate.DeadlockDetected, sqlstate.LeaseClosed:
		kind = ErrSerialization
	case sqlstate.InsufficientPrivilege:
		kind = ErrNotGranted
	case sqlstate.ReadOnlyTransaction:
		kind = ErrReadOnly
	case sqlstate.Moved:
		kind = moved(err)
	case sqlstate.NotCell:
		kind = ErrNotCell
	}
	if kind == nil && sqlstate.Missing(err) {
		kind = ErrNotMigrated
	}
	switch {
	case err == nil:
		return nil
	case kind == nil, errors.Is(err, kind): // a step of the act has named the kind
		return fmt.Errorf("%s: %s: %w", pkg, doing, err)
	}
	return fmt.Errorf("%w: %s: %w", kind, doing, err)
}

// Moved says where a cell knows a tenant to live that it does not have.
type Moved struct {
	Tenant string
	Cell   *int  // nil: the cell has never had it
	Moves  int64 // how often it had moved by then
}

func moved(err error) error {
	var answer *pgconn.PgError
	m := &Moved{}
	if !errors.As(err, &answer) || json.Unmarshal([]byte(answer.Detail), m) != nil {
		return ErrMoved
	}
	return m
}

func (m *Moved) Error() string { return fmt.Sprintf("%v: %q", ErrMoved, m.Tenant) }

// Unwrap returns ErrMoved.
func (m *Moved) Unwrap() error { return ErrMoved }
