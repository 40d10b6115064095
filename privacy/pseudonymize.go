package privacy

import (
	"cmp"
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/pgmetered/metered/internal/fault"
	"github.com/pgmetered/metered/internal/savepoint"
	"github.com/pgmetered/metered/internal/sqlstate"
)

// Report says what a Pseudonymize did, and what is left.
type Report struct {
	// Done is true if no row has the name any more that was committed when the call began. Otherwise
	// call again, in another transaction.
	Done bool `json:"done"`

	// Scopes are the renamed scopes.
	Scopes int `json:"scopes"`

	// Rows are the rows that the call rewrote, of all tables.
	Rows int64 `json:"rows"`

	// Open says what keeps the name until it ends, such as an open lease: up to 20 lines, with
	// names. End it, and call again.
	Open []string `json:"open,omitempty"`

	// Near are rows that have the name in a longer word, such as upload-user/ann-17, or
	// user/ann.smith. They stay. Export their word to see whose they are.
	Near int64 `json:"near"`
}

// Pseudonymize puts alias in the place of subject, wherever that stands as a word: in names of
// scopes, tenants and holders, in ids, notes, metadata, payloads and results. A rollback of tx takes
// all of it back. The program should use the old name no more: what is charged to it begins a new
// scope.
//
// It is done when Report.Done is true. One call rewrites about Config.MaxRows rows, each scope
// whole, and the next one goes on: names of scopes come last. Calls with the same subject and alias
// may be repeated.
//
// It reads all tables, without a lock, then takes the locks of the scopes that it renames, and keeps
// them until the end of tx. It needs READ COMMITTED and the schema's owner. A refusal leaves tx as
// it was: ErrAliasTaken, budget.ErrBusy and other errors of package budget.
func (r *Register) Pseudonymize(ctx context.Context, tx pgx.Tx, subject, alias string) (Report, error) {
	if err := cmp.Or(r.made(), fault.NotNil(errArgument, "tx", tx)); err != nil {
		return Report{}, err
	}
	p, err := rename(subject, alias)
	if err != nil {
		return Report{}, err
	}
	report, err := savepoint.In(ctx, tx, "privacy", func(tx pgx.Tx) (Report, error) {
		w := &work{Register: r, tx: tx, person: p, left: int64(r.maxRows)}
		err := w.run(ctx)
		return w.report, err
	})
	if err != nil {
		report = Report{}
	}
	if sqlstate.Of(err) == sqlstate.UniqueViolation {
		err = fmt.Errorf("%w: %w", ErrAliasTaken, err)
	}
	return report, fault.Failed("privacy", "pseudonymize", err)
}
