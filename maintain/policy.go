package maintain

import (
	"cmp"
	"time"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/bounds"
	"github.com/pgmetered/metered/internal/fault"
	"github.com/pgmetered/metered/internal/lend"
	"github.com/pgmetered/metered/internal/purge"
	"github.com/pgmetered/metered/wallet"
)

// Parts are the objects to maintain, of one schema.
type Parts struct {
	Ledger  *budget.Ledger // Required
	Holds   *holds.Book    // with the application's Subscribers. nil: holds are not swept
	Wallets *wallet.Book   // likewise of lots
}

// Policy says how long rows are kept. Zero keeps entries, operations and job keys for ever.
type Policy struct {
	Entries    time.Duration // at least every Limit.Reach, and until nobody refunds or invoices
	Operations time.Duration // longer than clients repeat calls
	JobKeys    time.Duration // longer than callers retry or schedule ahead
	Holds      time.Duration // since they ended. Defaults to 30 days
	Leases     time.Duration // since they were settled. Defaults to 30 days
	Tokens     time.Duration // since they ended. Defaults to 30 days

	Forget   func(scope string) bool // as in budget.PurgeOptions
	NoSweeps bool                    // for a program without the Subscribers
	NoPurges bool                    // for a role without metered.GrantMaintenanceSQL
	Batch    int                     // rows of a transaction, 16 to 2,000. Defaults to that of each call
	After    string                  // Report.After of a run that was canceled
	Progress func(Report)            // after each batch
}

const (
	keep     = 30 * 24 * time.Hour
	maxBatch = 2000 // of wallet.SweepOptions
)

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
	}
	p.Holds, p.Leases, p.Tokens = cmp.Or(p.Holds, keep), cmp.Or(p.Leases, keep), cmp.Or(p.Tokens, keep)
	for _, age := range []struct {
		field string
		age   time.Duration
	}{
		{"Entries", p.Entries}, {"Operations", p.Operations}, {"JobKeys", p.JobKeys},
		{"Holds", p.Holds}, {"Leases", p.Leases}, {"Tokens", p.Tokens},
	} {
		if age.age != 0 && (age.age < purge.MinOlderThan || age.age > purge.MaxOlderThan) {
			return invalid("Policy."+age.field, "%v is not from %v to %v", age.age, purge.MinOlderThan, purge.MaxOlderThan)
		}
	}
	return fault.Text(errArgument, "Policy.After", p.After, bounds.MaxScopeBytes)
}

var errArgument = fault.New("invalid_argument", "maintain: invalid argument")

func invalid(field, format string, args ...any) error {
	return fault.Misuse(errArgument, field, format, args...)
}

var (
	inBudget = budget.Internals(lend.Key{})
	inHolds  = holds.Internals(lend.Key{})
	inWallet = wallet.Internals(lend.Key{})
)
