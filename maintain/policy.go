package maintain

import (
	"cmp"
	"time"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/bounds"
	"github.com/pgmetered/metered/internal/fault"
	"github.com/pgmetered/metered/internal/lend"
	"github.com/pgmetered/metered/internal/observed"
	"github.com/pgmetered/metered/internal/purge"
	"github.com/pgmetered/metered/internal/schema"
	"github.com/pgmetered/metered/wallet"
)

// Parts are the objects to maintain, of one schema.
type Parts struct {
	// Ledger is the ledger to maintain. Required.
	Ledger *budget.Ledger

	// Holds is the book of holds, with the application's Subscribers. Without it, holds are not
	// swept.
	Holds *holds.Book

	// Wallets is the book of wallets, with the application's Subscribers. Without it, lots are not
	// swept.
	Wallets *wallet.Book
}

// Policy says how long rows are kept, from 1s to a century: budget.Never keeps them for ever. The
// zero value keeps entries, operations and job keys for ever, and has the documented defaults for
// the rest.
type Policy struct {
	// Entries is how long entries are kept: at least every Limit.Reach, and as long as somebody
	// refunds or invoices. 0 keeps them for ever.
	Entries time.Duration

	// Operations is how long the records of commands are kept: longer than clients repeat calls. An
	// id with a time at or before the latest deleted record is budget.ErrRetired, and one without
	// a time looks new. 0 keeps them for ever.
	Operations time.Duration

	// JobKeys is how long the keys of jobs are kept: longer than callers retry or schedule ahead. A
	// deleted key looks new. 0 keeps them for ever.
	JobKeys time.Duration

	// Holds is how long holds are kept since they ended, with their history. Confirmed claims,
	// unannounced holds, and holds whose id has a later time stay. An id with a time (UUIDv7) at or
	// before the latest deleted one is holds.ErrRetired, and any other looks new. Defaults to 30
	// days.
	Holds time.Duration

	// Leases is how long leases are kept since they were settled, with their spends. Defaults to 30
	// days.
	Leases time.Duration

	// Tokens is how long tokens are kept since they ended, by their last use, their revocation or
	// their expiry. The secret of a deleted token can be minted again. Defaults to 30 days.
	Tokens time.Duration

	// DryRun counts the rows that would be deleted, and deletes none: no sweep runs. It needs SELECT
	// on the tables, and does not go with Forget.
	DryRun bool

	// Forget reports whether an idle scope may be deleted altogether, as
	// budget.PurgeOptions.Forget does. Defaults to none.
	Forget func(scope string) bool

	// NoSweeps leaves the sweeps out, for a program that does not have the application's
	// Subscribers.
	NoSweeps bool

	// NoPurges leaves the purges out, for a role without the rights of
	// metered.GrantMaintenanceSQL.
	NoPurges bool

	// Batch is the most rows of one transaction, from 16 to 2,000. Defaults to the default of each
	// call.
	Batch int

	// After goes on behind an earlier run that was canceled: its Report.After.
	After string

	// Progress is called after each batch, with the report so far. It may be nil.
	Progress func(Report)
}

const maxBatch = 2000 // of wallet.SweepOptions

// check refuses an argument out of bounds, and sets the defaults.
func (p *Policy) check(parts Parts) error {
	if parts.Ledger == nil {
		return invalid("Parts.Ledger", "is nil")
	}
	name, wait, _ := inBudget.Settings(parts.Ledger)
	switch {
	case wait == 0:
		return invalid("Parts.Ledger", "was not made by New")
	case parts.Holds != nil && inHolds.Schema(parts.Holds) != name:
		return invalid("Parts.Holds", "is not on the schema of Parts.Ledger, %q", name)
	case parts.Wallets != nil && inWallet.Schema(parts.Wallets) != name:
		return invalid("Parts.Wallets", "is not on the schema of Parts.Ledger, %q", name)
	case p.Batch != 0 && (p.Batch < 16 || p.Batch > maxBatch):
		return invalid("Policy.Batch", "%d is not from 16 to %d", p.Batch, maxBatch)
	case p.NoSweeps && p.NoPurges:
		return invalid("Policy.NoPurges", "is set, and so is NoSweeps: nothing is left to run")
	case p.Forget != nil && p.Entries == 0:
		return invalid("Policy.Forget", "needs Policy.Entries")
	case p.DryRun && p.NoPurges:
		return invalid("Policy.DryRun", "is of purges, which NoPurges leaves out")
	case p.Forget != nil && p.DryRun:
		return invalid("Policy.DryRun", "is not for Forget")
	}
	for _, age := range []*time.Duration{&p.Holds, &p.Leases, &p.Tokens} {
		*age = cmp.Or(*age, purge.DefaultOlderThan)
	}
	for _, age := range []struct {
		field string
		age   time.Duration
	}{
		{"Entries", p.Entries}, {"Operations", p.Operations}, {"JobKeys", p.JobKeys},
		{"Holds", p.Holds}, {"Leases", p.Leases}, {"Tokens", p.Tokens},
	} {
		if age.age != 0 && age.age != budget.Never && (age.age < purge.MinOlderThan || age.age > purge.MaxOlderThan) {
			return invalid("Policy."+age.field, "%v is not from %v to %v", age.age,
				purge.MinOlderThan, purge.MaxOlderThan)
		}
	}
	return fault.Text(errArgument, "Policy.After", p.After, bounds.MaxScopeBytes)
}

var errArgument = fault.New("invalid_argument", "maintain: invalid argument")

func invalid(field, format string, args ...any) error {
	return fault.Misuse(errArgument, field, format, args...)
}

// inBudget is what package budget lends.
var inBudget = lend.Borrow[interface {
	Observer(l *budget.Ledger) *observed.To
	Settings(l *budget.Ledger) (name schema.Name, wait time.Duration, actor bool)
}]("budget")

// inHolds is what package holds lends.
var inHolds = lend.Borrow[interface {
	Schema(b *holds.Book) schema.Name
}]("holds")

// inWallet is what package wallet lends.
var inWallet = lend.Borrow[interface {
	Schema(b *wallet.Book) schema.Name
}]("wallet")
