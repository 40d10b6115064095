// Package lend holds functions that the public packages lend to each other, and not to their
// users. Each package sets its own in an init function. Their types name types of the package
// that lends, which this one cannot import; so a borrower asserts the type, once, where a
// package variable is set: a wrong one ends the program as it starts.
package lend

// Package budget.
var (
	Charges any // func(*budget.Ledger, ...budget.Charge) (*ledger.ChargeCall[budget.Receipt], error)
	Credit  any // func(*budget.Ledger, budget.Credit) (*ledger.Call[budget.Posted], error)
	Refund  any // func(*budget.Ledger, budget.Refund) (*ledger.Call[budget.Posted], error)

	LedgerSettings any // func(*budget.Ledger) (schema.Name, time.Duration, bool): where, the timeout for locks, and whether each write names an actor
	LedgerObserver any // func(*budget.Ledger) *observed.To
	TellCrossings  any // func(context.Context, *budget.Ledger, pgx.Tx, []budget.Crossing) error: tells of thresholds
	TellsSpent     any // func(budget.Limit) (tells, known bool): whether it has thresholds of what is spent, and whether its Max is known
	TellDenied     any // func(context.Context, *observed.To, error): tells which limits refused, if they did
	LedgerFailed   any // func(doing string, err error) error: of a statement, with the errors of a charge
	NoteJSON       any // func(budget.Note) string: as it is stored
)

// Package holds.
var (
	PlaceHold    any // func(*holds.Book, holds.Request) (*ledger.Call[[]holds.Hold], error)
	OpenHold     any // func(*holds.Book, holds.Request, *ledger.Opening) (*ledger.Call[[]holds.Hold], error): a session's hold
	ClaimHold    any // func(*holds.Book, holds.Claim) (*ledger.Call[[]holds.Hold], error)
	CaptureHolds any // func(*holds.Book, holds.Capture) (*ledger.Call[[]holds.Hold], error)
	ReleaseHolds any // func(*holds.Book, holds.Release) (*ledger.Call[[]holds.Hold], error)
	ExtendHolds  any // func(*holds.Book, holds.Extend) (*ledger.Call[[]holds.Hold], error)
	RefundHolds  any // func(*holds.Book, holds.Refund) (*ledger.Call[[]holds.Hold], error)
	BookSchema   any // func(*holds.Book) schema.Name
	AnyHolder    any // func(*holds.Book) *holds.Book: the same without Config.RequireHolder
	TellHolds    any // func(context.Context, *observed.To, kind string, all []holds.Hold, pending bool): tells what a call of that kind did
	DecodeHold   any // func([]byte) (holds.Hold, error)
	UnknownHold  any // func(holds.Reason) error: the error of that reason
)

// Package wallet.
var Draw any // func(*wallet.Book, wallet.Draw) (*ledger.Call[wallet.Drawn], error)

// Package leases.
var (
	Lease        any // func(context.Context, *leases.Pool, *ledger.Charging, []budget.Charge): spends charges from leases, as far as there are any
	LeaseLook    any // func(*leases.Pool, *ledger.Charging, []budget.Charge): leaves out of the first look what is leased
	LeaseSchema  any // func(*leases.Pool) schema.Name
	LeaseRefused any // func(*leases.Pool, error): is told of a refusal
)

// Package tokens.
var (
	Present any // func(store *tokens.Store, purpose, subject, text string) (ledger.PresentedToken, error)
	Grant   any // func(ledger.PresentedToken, ledger.TokenRow) (tokens.Grant, error)
	Refuse  any // func(tokens.Reason) error: the error of that reason

	TellRefused any // func(context.Context, *observed.To, error): tells why a token was refused, if it was
)

// Package replica.
var (
	CommitLSN string // the query of replica.CommitLSN
	ScanLSN   any    // func(pgx.Row) (replica.LSN, error): its answer
)
