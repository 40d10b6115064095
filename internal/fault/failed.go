package fault

import (
	"fmt"

	"github.com/pgmetered/metered/internal/sqlstate"
)

// Errors of every package's statements.
var (
	ErrBusy = New("busy", "metered: a lock is held by another transaction for too long")
	// ErrSerialization: SQLSTATE 40001 or 40P01.
	ErrSerialization = New("serialization", "metered: the transaction collided with another one, and has to run again")
	ErrNotMigrated   = New("not_migrated", "metered: a schema is missing or incomplete: call metered.Migrate, and migrate River for jobs; metered.Validate lists the differences")
	ErrNotGranted    = New("not_granted", "metered: the role lacks grants of metered.GrantSQL, or of GrantMaintenanceSQL to purge and repair, or rights on River's tables")
)

// Failed names the failed act, and its package. It maps errors of Postgres that every package may meet to the errors
// above. The error of Postgres stays underneath, and its Detail, which has key values, is never printed. It is nil
// for nil.
func Failed(pkg, doing string, err error) error {
	var kind error
	switch sqlstate.Of(err) {
	case sqlstate.LockNotAvailable:
		kind = ErrBusy
	case sqlstate.SerializationFailure, sqlstate.DeadlockDetected, sqlstate.LeaseClosed:
		kind = ErrSerialization
	case sqlstate.UndefinedTable, sqlstate.UndefinedFunction, sqlstate.InvalidSchemaName:
		kind = ErrNotMigrated
	case sqlstate.InsufficientPrivilege:
		kind = ErrNotGranted
	}
	switch {
	case err == nil:
		return nil
	case kind == nil:
		return fmt.Errorf("%s: %s: %w", pkg, doing, err)
	}
	return fmt.Errorf("%w: %s: %w", kind, doing, err)
}
