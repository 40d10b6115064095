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

// Parts are the pieces of the application. All are on the same schema.
type Parts struct {
	Ledger *budget.Ledger // Required
	// Holds has the application's Subscribers and Notify: a hold is announced once, by the Book that sweeps it.
	// Defaults to none: holds are not swept.
	Holds *holds.Book
	// Wallets has the application's Subscribers and Thresholds. Defaults to none: lots are not swept.
	Wallets *wallet.Book
}

// Policy says how long rows are kept. The zero value sweeps, and deletes holds, leases and tokens that ended 30 days
// ago. The three ages without a default are dangerous if they are too short: rows without an age are kept for ever.
type Policy struct {
	// Entries is the age from which entries of the ledger may go: at least the longest window or Limit.Reach of any
	// limit, and as long as an invoice or a refund may ask for them. Defaults to 0, which keeps all.
	Entries time.Duration
	// Forget is budget.PurgeOptions.Forget: whether an idle scope may be deleted whole. Defaults to none.
	Forget func(scope string) bool
	// Operations is how long the record of an operation is kept: longer than a client may wait before it repeats a
	// call, which runs again afterwards. Defaults to 0, which keeps all.
	Operations time.Duration
	// JobKeys is how long the key of a job is kept: longer than a caller may retry, and than any job is scheduled
	// ahead. Defaults to 0, which keeps all.
	JobKeys time.Duration
	Holds   time.Duration // how long ended holds and their history are kept. Defaults to 30 days
	Leases  time.Duration // how long settled leases and their spends are kept. Defaults to 30 days
	Tokens  time.Duration // how long ended tokens are kept. Defaults to 30 days

	NoSweeps bool // leaves out the sweeps, for a program without the application's Subscribers. Defaults to false
	NoPurges bool // leaves out the purges, for a role without metered.GrantMaintenanceSQL. Defaults to false

	Batch    int          // how many rows one transaction ends or deletes, 16 to 2,000. Defaults to that of each call, 500 to 5,000
	After    string       // where the purge of entries begins: Report.After of a run that did not end. Defaults to the first scope
	Progress func(Report) // is called after each batch, once it is committed. Defaults to none
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
