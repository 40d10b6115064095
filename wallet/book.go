package wallet

import (
	"context"
	"errors"
	"slices"
	"strings"
	"time"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/bounds"
	"github.com/pgmetered/metered/internal/fault"
	"github.com/pgmetered/metered/internal/ledger"
	"github.com/pgmetered/metered/internal/lend"
	"github.com/pgmetered/metered/internal/observed"
	"github.com/pgmetered/metered/internal/schema"
	"github.com/pgmetered/metered/observe"
)

// Config configures a Book. The zero value has the documented defaults.
type Config struct {
	// Overdraft is how far draws may go below zero, up to 2^62. It counts for a wallet of a
	// mistyped name, too. Defaults to 0.
	Overdraft int64

	// Priorities are the priorities of grants without one, by category. Defaults to 0 for each.
	Priorities map[string]int

	// LateRefunds is the LateRefunds of grants without one. Defaults to 30 days.
	LateRefunds time.Duration

	// Thresholds are levels of the balance to report (docs/thresholds.md).
	Thresholds []budget.Threshold

	// Subscribers get each breakage from Sweep and Expire.
	Subscribers []Subscriber
}

// Values of LateRefunds that are no time.
const (
	// Lapse says that there is no new lot: a late refund lapses at once.
	Lapse time.Duration = -1

	// Forever says that the new lot of a late refund never ends.
	Forever time.Duration = -2
)

const (
	defaultLateRefunds = 30 * 24 * time.Hour
	day                = 24 * time.Hour
	maxRolls           = 10_000                 // Roll.Times
	maxUses            = 16                     // Grant.Uses
	maxTextBytes       = 255                    // of a wallet, a reference and a category
	maxDuration        = 36525 * 24 * time.Hour // of After, For, Rollover.For and LateRefunds
)

// Book is safe for concurrent use.
type Book struct {
	ledger   *budget.Ledger
	cfg      Config
	limit    budget.Limit
	schema   schema.Name
	wait     time.Duration
	sql      statements
	observer *observed.To
}

func init() { lend.Lend("wallet", internals{}) }

// internals are lent to maintain and metered.
type internals struct{}

// Schema is the zero Name for a Book that New has not made.
func (internals) Schema(b *Book) schema.Name { return b.schema }

// inBudget is what package budget lends.
var inBudget = lend.Borrow[interface {
	Charges(l *budget.Ledger, charges ...budget.Charge) (*ledger.ChargeCall[budget.Receipt], error)
	Failed(doing string, err error) error
	Observer(l *budget.Ledger) *observed.To
	Period(field string, p budget.Period) (ledger.Period, error)
	Settings(l *budget.Ledger) (name schema.Name, wait time.Duration, actor bool)
}]("budget")

// New sends no SQL.
func New(l *budget.Ledger, cfg Config) (*Book, error) {
	if err := notNil("ledger", l); err != nil {
		return nil, err
	}
	name, wait, _ := inBudget.Settings(l)
	if wait == 0 {
		return nil, invalid("ledger", "was not made by New")
	}
	if cfg.Overdraft < 0 || cfg.Overdraft > bounds.MaxLimit {
		return nil, invalid("Config.Overdraft", "%d is not from 0 to %d", cfg.Overdraft, int64(bounds.MaxLimit))
	}
	if cfg.LateRefunds == 0 {
		cfg.LateRefunds = defaultLateRefunds
	}
	if err := checkLate("Config.LateRefunds", cfg.LateRefunds); err != nil {
		return nil, err
	}
	priorities := make(map[string]int, len(cfg.Priorities))
	for category, p := range cfg.Priorities {
		if err := checkPriority("Config.Priorities", p); err != nil {
			return nil, err
		}
		priorities[category] = p
	}
	cfg.Priorities, cfg.Subscribers = priorities, slices.Clone(cfg.Subscribers)
	b := &Book{ledger: l, cfg: cfg, schema: name, wait: wait, sql: render(name), observer: inBudget.Observer(l)}
	b.limit = budget.Prepaid(cfg.Overdraft).Named("credit").WithThresholds(cfg.Thresholds...)
	b.cfg.Thresholds = b.limit.Thresholds()
	_, err := b.priced("-", someone)
	var argument *fault.Argument
	if errors.As(err, &argument) {
		err = invalid(strings.Replace(argument.Field, "charges[0].Limits[0].Tell",
			"Config.Thresholds", 1), "%s", argument.Reason)
	}
	if err != nil {
		return nil, err
	}
	return b, nil
}

// priced is a charge of the wallet, for its checks, and for its thresholds as they are sent and
// reported.
func (b *Book) priced(wallet string, note budget.Note) (*ledger.ChargeCall[budget.Receipt], error) {
	charge := b.Charge(wallet, 1)
	charge.Note = note
	return inBudget.Charges(b.ledger, charge)
}

// someone is the actor of a charge that is only checked.
var someone = budget.Note{Actor: "-"}

// Limit is the limit of a wallet's charges, with Config.Overdraft and Config.Thresholds.
func (b *Book) Limit() budget.Limit { return b.limit }

// Charge makes a charge of a wallet, with Limit and more limits, for every call that takes charges.
// It draws from the wallet's lots. Charge.Lots asks which, and Charge.UpTo takes what there is.
func (b *Book) Charge(wallet string, amount int64, limits ...budget.Limit) budget.Charge {
	return budget.Charge{Scope: wallet, Amount: amount, Limits: append([]budget.Limit{b.Limit()}, limits...)}
}

// Line holds units in a hold or session, with limits as in Charge.
func (b *Book) Line(wallet string, amount int64, limits ...budget.Limit) holds.Line {
	return holds.Line{Scope: wallet, Amount: amount, Limits: append([]budget.Limit{b.Limit()}, limits...)}
}

func (b *Book) made() error { return fault.Made(errArgument, "book", b != nil && b.ledger != nil) }

func (b *Book) waitMS() int32 { return int32(b.wait / time.Millisecond) }

func (b *Book) begin(ctx context.Context, name string) (context.Context, observed.Span) {
	return b.observer.Start(ctx, observe.Op{Work: observe.Call, Name: name})
}

// tellLots reports a call on a lot to the observer, in the caller's transaction.
func (b *Book) tellLots(ctx context.Context, what string) {
	b.observer.Event(ctx, observe.Event{Kind: observe.Lots, Name: what, Pending: true})
}

// statements are the package's SQL, rendered for one schema.
type statements struct {
	grant, balance, revoke, renewal, reinstate, resumeRenewal, setEnd, rollover, sweep,
	sweepWallet, told, moves string
	beginChange, planState, noteChange, overage,
	lotEnd string
}

func render(n schema.Name) statements {
	return statements{
		beginChange: n.SQL(beginChangeSQL), planState: n.SQL(planStateSQL), noteChange: n.SQL(noteChangeSQL),
		overage: n.SQL(overageSQL), lotEnd: n.SQL(lotEndSQL), reinstate: n.SQL(reinstateSQL),
		resumeRenewal: n.SQL(resumeRenewalSQL),
		grant:         n.SQL(grantSQL), renewal: n.SQL(renewalSQL), setEnd: n.SQL(setEndSQL),
		balance: n.SQL(balanceSQL),
		revoke:  n.SQL(revokeSQL), rollover: n.SQL(rolloverSQL), sweep: n.SQL(sweepSQL),
		sweepWallet: n.SQL(sweepWalletSQL), told: n.SQL(toldSQL), moves: n.SQL(movesSQL)}
}
