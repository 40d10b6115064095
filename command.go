package metered

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/command"
	"github.com/pgmetered/metered/internal/fault"
	"github.com/pgmetered/metered/internal/guardtx"
	"github.com/pgmetered/metered/internal/jsontext"
	"github.com/pgmetered/metered/internal/ledger"
	"github.com/pgmetered/metered/internal/lockkey"
	"github.com/pgmetered/metered/internal/observed"
	"github.com/pgmetered/metered/internal/uuidv7"
	"github.com/pgmetered/metered/observe"
	"github.com/pgmetered/metered/tokens"
)

// Bounds of a command.
const (
	maxIDBytes     = 255     // of Command.ID, Tenant and Name each
	maxInputBytes  = 1 << 20 // of Command.Input as JSON
	maxResultBytes = 1 << 20 // of the result as JSON
)

// Command is what Do carries out at most once. Only its ID is required.
type Command struct {
	// ID names the command within its Tenant: 1 to 255 bytes. A Tenant's command with an ID runs
	// once. Once its record is purged, an ID that carries its time (a UUIDv7, or one with
	// IssuedAt) is refused, and another ID runs again. Required.
	ID string

	// Tenant owns the ID, in up to 255 bytes. If clients choose the IDs, it must be the signed-in
	// user, or one client can get another's result.
	Tenant string

	// Name is the kind of command, in up to 255 bytes. The same ID with another Name is
	// budget.ErrConflict.
	Name string

	// Input is the command's argument, as JSON of up to 1 MiB. Its SHA-256 is stored. The same ID
	// with another Input is budget.ErrConflict. It is required if the function charges, credits, refunds
	// or calls holds.
	Input any

	// IssuedAt is when the client issued the command, if ID is no UUIDv7. It must be the same in
	// each repetition.
	IssuedAt time.Time

	// Charges are the units that the command spends. They are taken after its function has
	// returned, all of them or none. The same ID with other scopes or amounts is budget.ErrConflict.
	//
	// After a recent refusal of a scope, its charges are looked at before the function runs
	// (docs/model.md). A charge that the function itself makes room for therefore belongs in
	// Tx.Charge.
	Charges []budget.Charge

	// EarlyLook always looks at the Charges before the function runs.
	EarlyLook bool

	// Holds are placed together with the charges. They are looked at before the function runs. A
	// hold that the function itself makes room for therefore belongs in Tx.Place.
	Holds []holds.Placement

	// Claims are placed as Holds are.
	Claims []holds.Claim

	// Sticky are charges that stay if the command fails: a limit on attempts. Each Do that is no
	// replay takes them before the command, in a transaction of their own. A refusal is
	// ErrTooManyAttempts. To count failures alone, refund Tx.Sticky in the function.
	Sticky []budget.Charge

	// Token is spent with the command, unless the command is a replay.
	Token *Redeem

	// Isolation is the transaction's isolation level. Defaults to READ COMMITTED.
	Isolation pgx.TxIsoLevel

	// EarlyRelease releases the locks before the commit is durable. Do returns when it is. In
	// between, others may see state that a crash undoes.
	EarlyRelease bool

	// RecordRefusal makes a refusal the operation's answer: the same ID gets it again. It counts
	// for refusals by the command's own token, charges and holds, and by Sticky. The record is
	// written after the rollback. If that fails, Do returns another error and nothing is decided.
	// A malformed token is not recorded.
	RecordRefusal bool

	// Newest makes the command an event that must take effect in order, such as a webhook's: after
	// a newer one for its key it is ErrStale, does nothing, and is on record as refused. Commands
	// of one key wait for each other. It defaults to no order.
	Newest Order

	// LSN asks for Outcome.LSN, for replica.ReadAt. In DoTx use replica.CommitLSN.
	LSN bool

	// Statements are the writes of a command without a function, in their order, before its
	// Charges. They go in one round trip with its claim, its record and COMMIT. So they answer
	// nothing, none may end the transaction, and each is one statement. A batch may be sent again.
	// The error of one is a *StatementError, and then nothing was done. Whatever they depend on
	// belongs in Input: the same ID with other statements is no conflict. They are not in a
	// Command's JSON, since their arguments may be secrets.
	Statements *pgx.Batch `json:"-"`

	settling *settling // of a session
}

// Order is an event's place among those of its key. The zero value has none.
type Order struct {
	// Key names what the event is about within Command.Tenant, such as a subscription: 1 to 255
	// bytes.
	Key string

	// At is when the event happened, as its sender says, to the microsecond. Of two events of one
	// time, the one with the greater Command.ID is newer. A time ahead is taken as it is: until it
	// has passed, other events of the Key are older. So refuse one that cannot be.
	//
	// The newest event of a Key is kept as long as the records of operations
	// (maintain.Policy.Operations). After that, an older one takes effect again.
	At time.Time
}

// Redeem is a presented token. It prints and encodes without its text.
type Redeem struct {
	// Purpose is as in tokens.Mint.
	Purpose string

	// Subject is as in tokens.Mint.
	Subject string

	// Presented is the token's text, as the client sent it.
	Presented string
}

func (r Redeem) redacted() string { return fmt.Sprintf("token for %q of %q", r.Purpose, r.Subject) }

func (r Redeem) Format(f fmt.State, _ rune) { _, _ = io.WriteString(f, r.redacted()) }

func (r Redeem) LogValue() slog.Value { return slog.StringValue(r.redacted()) }

func (r Redeem) MarshalJSON() ([]byte, error) { return json.Marshal(r.redacted()) }

// operation is a validated command, with its outcome.
type operation struct {
	command.Operation
	client  *Client
	cmd     Command
	do      work
	charges *chargeCall   // nil without charges
	placing []*holdsCall  // Command.Holds and Claims
	grant   *tokens.Grant // of the token, in the last attempt
	tx      *Tx           // of the last attempt

	rec           command.Record
	receipt       budget.Receipt
	sticky        budget.Receipt // once they are taken
	stickyRefused bool           // the sticky charges were refused
	holds         []holds.Hold
}

func (c *Client) prepare(cmd Command, do work) (*operation, error) {
	if err := checkID(cmd.Tenant, cmd.ID); err != nil {
		return nil, err
	}
	if err := checkText("Command.Name", cmd.Name); err != nil {
		return nil, err
	}
	op := &operation{client: c, cmd: cmd, do: do, Operation: command.Operation{
		Tenant: cmd.Tenant, ID: cmd.ID, Name: cmd.Name, IssuedAt: issuedAt(cmd),
		Isolation: cmd.Isolation, EarlyRelease: cmd.EarlyRelease, LSN: cmd.LSN,
	}}
	op.Function, op.Enter = op.attempt, c.home.Statement()
	if err := c.owns(cmd); err != nil {
		return nil, err
	}
	switch cmd.Isolation {
	case "":
		op.Isolation = pgx.ReadCommitted
	case pgx.ReadCommitted, pgx.RepeatableRead, pgx.Serializable:
	default:
		return nil, misuse("Command.Isolation", "%q is not an isolation level of Postgres", cmd.Isolation)
	}
	if op.IssuedAt != nil && (op.IssuedAt.Year() < 1 || op.IssuedAt.Year() > 9999) {
		return nil, invalid("Command.IssuedAt", "the year %d is not from 1 to 9999", op.IssuedAt.Year())
	}
	if at := cmd.IssuedAt; !at.IsZero() && (at.Year() < 1 || at.Year() > 9999) {
		return nil, invalid("Command.IssuedAt", "the year %d is not from 1 to 9999", at.Year())
	}
	if err := cmd.Newest.check(); err != nil {
		return nil, err
	} else if cmd.Newest != (Order{}) {
		op.Newest = &command.Event{Key: cmd.Newest.Key, At: cmd.Newest.At.Truncate(time.Microsecond)}
	}
	var err error
	if len(cmd.Charges) > 0 {
		if op.charges, err = inBudget.Charges(c.Budget, cmd.Charges...); err != nil {
			return nil, fmt.Errorf("metered: Command.Charges: %w", err)
		}
		if cmd.EarlyLook || c.cfg.EarlyLook || c.refusals.Seen(time.Now(), cmd.Charges) {
			op.Charges = &op.charges.Charging
			if pool := c.cfg.Leases; pool != nil {
				op.Looking = func() { inLeases.Look(pool, op.Charges, cmd.Charges) }
			}
		}
	}
	if err := op.prepareHolds(); err != nil {
		return nil, err
	}
	if err := op.prepareStatements(); err != nil {
		return nil, err
	}
	if len(cmd.Sticky) > 0 {
		if _, err = inBudget.Charges(c.Budget, cmd.Sticky...); err != nil {
			return nil, fmt.Errorf("metered: Command.Sticky: %w", err)
		}
		if !c.engine.TakesFirst() {
			return nil, misuse("Command.Sticky", "need a pool of at least two connections")
		}
		op.First = op.takeSticky
	}
	if cmd.Token != nil {
		if op.Token, err = inTokens.Present(c.Tokens, cmd.Token.Purpose, cmd.Token.Subject,
			cmd.Token.Presented); err != nil {
			return nil, err
		}
		op.Granted = func(row ledger.TokenRow) error {
			grant, err := inTokens.Grant(op.Token, row)
			op.grant = &grant
			return err
		}
	}
	if op.Fingerprint, err = fingerprint(cmd, op.Token, op.Holds); err != nil {
		return nil, err
	}
	if cmd.settling != nil {
		op.Fingerprint, op.Until = cmd.settling.fingerprint, cmd.settling.until
	}
	op.Key = lockkey.OfOperation(c.schema.String(), cmd.Tenant, cmd.ID)
	return op, nil
}

func (o Order) check() error {
	switch {
	case o == Order{}:
		return nil
	case o.Key == "":
		return invalid("Command.Newest.Key", "is empty")
	case o.At.IsZero():
		return invalid("Command.Newest.At", "is not set")
	case o.At.Year() < 1 || o.At.Year() > 9999:
		return invalid("Command.Newest.At", "the year %d is not from 1 to 9999", o.At.Year())
	}
	return checkText("Command.Newest.Key", o.Key)
}

// owns refuses a command whose record or token would stay behind when the tenant of the Client
// moves.
func (c *Client) owns(cmd Command) error {
	if !c.home.Owns(cmd.Tenant) {
		return misuse("Command.Tenant", "is %q, want %q, or that and a part after a slash",
			cmd.Tenant, c.home.Tenant)
	}
	if cmd.Token != nil && !c.home.Owns(cmd.Token.Subject) {
		return misuse("Command.Token.Subject", "is %q, want %q, or that and a part after a slash",
			cmd.Token.Subject, c.home.Tenant)
	}
	return nil
}

// prepareHolds prepares the command's holds and claims.
func (op *operation) prepareHolds() error {
	add := func(field string, i int, call *holdsCall, err error) error {
		if err != nil {
			return fmt.Errorf("metered: Command.%s[%d]: %w", field, i, err)
		}
		op.placing, op.Holds = append(op.placing, call), append(op.Holds, call.Placing)
		return nil
	}
	for i, r := range op.cmd.Holds {
		call, err := inHolds.Place(op.client.Holds, r)
		if err := add("Holds", i, call, err); err != nil {
			return err
		}
	}
	for i, c := range op.cmd.Claims {
		call, err := inHolds.Claim(op.client.Holds, c)
		if err := add("Claims", i, call, err); err != nil {
			return err
		}
	}
	return nil
}

// prepareStatements takes the command's statements.
func (op *operation) prepareStatements() error {
	if op.cmd.Statements == nil {
		return nil
	}
	for i, q := range op.cmd.Statements.QueuedQueries {
		field := fmt.Sprintf("Command.Statements[%d]", i)
		switch {
		case q.Fn != nil:
			return misuse(field, "has a function for its answer, which comes after COMMIT")
		case guardtx.Several(q.SQL):
			return misuse(field, "has more than one statement")
		}
	}
	op.Statements = op.cmd.Statements.QueuedQueries
	return nil
}

// run runs op in tx, or in a transaction of its own if that is nil.
func (op *operation) run(ctx context.Context, tx pgx.Tx) (err error) {
	if tx == nil {
		op.rec, err = op.client.engine.Do(ctx, &op.Operation)
	} else {
		op.rec, err = op.client.engine.DoTx(ctx, tx, &op.Operation)
	}
	refused := err
	if leases := op.client.cfg.Leases; leases != nil && err != nil {
		inLeases.Learn(leases, err)
	}
	if (op.cmd.RecordRefusal || tx == nil && errors.Is(err, ErrStale)) && op.refusedItself(err) {
		if op.rec, err = op.record(ctx, refused); err != nil {
			err = fmt.Errorf("metered: record the refusal: %w", err)
		} else if !op.rec.Replayed {
			return refused
		}
	}
	switch {
	case err != nil:
		if lost := (*command.Indefinite)(nil); errors.As(err, &lost) {
			return &IndefiniteError{Tenant: op.Tenant, ID: op.ID, cause: lost.Cause}
		}
		return err
	case op.rec.Refusal != nil:
		err = refusalOf(op.rec.Refusal)
		op.stickyRefused = errors.Is(err, ErrTooManyAttempts)
		return err
	case op.rec.Replayed:
		op.receipt, op.holds, err = recorded(op.rec)
		return err
	}
	op.holds = op.tx.done
	if op.tx.charged != nil {
		op.receipt, err = op.tx.charged.Receipt(op.rec.Answer)
	}
	for _, r := range op.tx.told {
		op.receipt.Entries, op.receipt.Crossed = append(op.receipt.Entries, r.Entries...),
			append(op.receipt.Crossed, r.Crossed...)
	}
	return err
}

// refusedItself reports whether err is a refusal by the command itself, and neither by its function
// nor by a subscriber.
func (op *operation) refusedItself(err error) bool {
	var listener *fault.Listener
	return err != nil && fault.Refused(err) && !op.Failed && !errors.As(err, &listener)
}

// record records a refusal, unless there is a record by now.
func (op *operation) record(ctx context.Context, refusal error) (command.Record, error) {
	raw := refusalJSON(refusal)
	if len(raw) > maxResultBytes {
		return command.Record{}, fmt.Errorf("%w: %d bytes, want at most %d", errResult, len(raw),
			maxResultBytes)
	}
	refused := op.Refused(raw)
	defer func() { op.RoundTrips += refused.RoundTrips }()
	return op.client.engine.Do(ctx, refused)
}

// takeSticky takes the sticky charges in a transaction of its own, on a second
// connection, while the first one holds the claim: so this call is no replay, and
// a concurrent repetition waits until there is a record.
func (op *operation) takeSticky(ctx context.Context) error {
	var receipt budget.Receipt
	var refused error
	ctx, span := op.client.observer.Start(ctx, observe.Op{Work: observe.Flush, Name: "sticky"})
	op.RoundTrips += 3 // BEGIN, the charge, COMMIT
	err := op.client.runTx(ctx, pgx.TxOptions{}, func(ctx context.Context, tx pgx.Tx) error {
		receipt, refused = op.client.Budget.Charge(ctx, tx, op.cmd.Sticky...)
		return refused
	})
	span.End(err)
	switch {
	case errors.Is(refused, budget.ErrExceeded):
		op.stickyRefused = true
		return fmt.Errorf("%w: %w", ErrTooManyAttempts, refused)
	case fault.Refused(refused): // by a scope that must exist: nothing was counted
		return refused
	case err != nil:
		return fmt.Errorf("%w: %w", ErrSticky, err)
	}
	op.sticky = receipt
	return nil
}

// stickyReceipt is empty without an op.
func (op *operation) stickyReceipt() budget.Receipt {
	if op == nil {
		return budget.Receipt{}
	}
	return op.sticky
}

// reportRefusal calls Config.OnRefusal with err if it is a refusal, and returns err.
func (c *Client) reportRefusal(ctx context.Context, cmd Command, op *operation, err error) error {
	c.refusals.Add(time.Now(), err)
	if c.cfg.OnRefusal != nil && fault.Refused(err) {
		cmd.Token = nil
		c.cfg.OnRefusal(ctx, RefusedCommand{Command: cmd, Err: err,
			Sticky: op != nil && op.stickyRefused, Replayed: op != nil && op.rec.Refusal != nil})
	}
	return err
}

// issuedAt is a command's time, or nil. The id's time comes before Command.IssuedAt,
// because all calls with the id share it: once the record of one was purged, none of
// them is newer than the horizon.
func issuedAt(cmd Command) *time.Time {
	if t := uuidv7.Time(cmd.ID); t != nil || cmd.IssuedAt.IsZero() {
		return t
	}
	t := cmd.IssuedAt.Truncate(time.Microsecond)
	return &t
}

// fingerprintVersion is the first byte of a stored fingerprint.
const fingerprintVersion = 1

// fingerprint is a version byte and the SHA-256 of the command, each part preceded by its length in
// 8 bytes, big-endian, so that parts cannot run into each other. Limits, MustExist, notes but for
// their Use, isolation and early release are left out: they may change between a call and its
// repetition without making it another command.
func fingerprint(cmd Command, token ledger.PresentedToken, holds []*ledger.Placing) ([]byte, error) {
	input, err := encodeInput(cmd.Input)
	if err != nil {
		return nil, err
	}
	var room [512]byte // most commands need no memory
	b := part(part(room[:0], cmd.Name), input)
	b = part(b, token.Digest)
	if token.Digest != nil {
		b = part(part(b, token.Purpose), token.Subject)
	}
	if cmd.IssuedAt.IsZero() {
		b = part(b, "") // a time in the id is compared with the id
	} else {
		b = number(number(b, 8), cmd.IssuedAt.Truncate(time.Microsecond).UnixMicro())
	}
	for _, charges := range [...][]budget.Charge{cmd.Charges, cmd.Sticky} {
		b = number(b, int64(len(charges)))
		for i := range charges {
			charge := &charges[i]
			b = number(part(b, inBudget.Content(charge.Scope, charge.Note.Use)), charge.Amount)
		}
	}
	for _, hold := range holds { // no count: commands without holds keep the fingerprints of builds that had none
		b = part(b, hold.Identity)
	}
	if o := cmd.Newest; o.Key != "" { // likewise
		b = number(part(b, "newest\x00"+o.Key), o.At.UnixMicro())
	}
	sum := sha256.Sum256(b)
	return append([]byte{fingerprintVersion}, sum[:]...), nil
}

func part[T string | []byte](b []byte, of T) []byte { return append(number(b, int64(len(of))), of...) }

func number(b []byte, n int64) []byte { return binary.BigEndian.AppendUint64(b, uint64(n)) }

func encodeInput(input any) ([]byte, error) {
	var b []byte
	switch in := input.(type) {
	case nil:
	case []byte:
		b = in
	case json.RawMessage:
		b = in
	default:
		var err error
		if b, err = json.Marshal(input); err == nil {
			err = jsontext.Check(input, b)
		}
		if err != nil {
			return nil, invalid("Command.Input", "%s", err)
		}
	}
	if len(b) > maxInputBytes {
		return nil, invalid("Command.Input", "is %d bytes, want at most %d", len(b), maxInputBytes)
	}
	return b, nil
}

func checkID(tenant, id string) error {
	if id == "" {
		return invalid("Command.ID", "is empty")
	}
	if err := checkText("Command.ID", id); err != nil {
		return err
	}
	return checkText("Command.Tenant", tenant)
}

func checkText(field, text string) error { return fault.Text(errArgument, field, text, maxIDBytes) }

// ended reports the end of a command to the observer. op is nil if it was refused before any SQL.
func (c *Client) ended(ctx context.Context, span observed.Span, op *operation, lent, returned bool, err error) {
	if c.observer == nil {
		return
	}
	if !returned {
		err = command.ErrPanics
	}
	end := observe.End{Err: err, Outcome: outcomeOf(op, lent, err)}
	if op != nil {
		end.Attempts, end.RoundTrips = op.Attempts, op.RoundTrips
	}
	switch end.Outcome {
	case observe.Committed, observe.Open:
		op.tell(ctx, lent)
	case observe.Refused:
		if op == nil || op.rec.Refusal == nil && op.refusedItself(err) { // else it was reported before
			inTokens.TellRefused(ctx, c.observer, err)
			if op != nil && !op.stickyRefused {
				inBudget.TellRefused(ctx, c.observer, err)
			}
		}
	}
	span.With(end)
}

func outcomeOf(op *operation, lent bool, err error) observe.Outcome {
	switch {
	case err == nil && op.rec.Replayed:
		return observe.Replayed
	case err == nil && lent:
		return observe.Open
	case err == nil:
		return observe.Committed
	case errors.Is(err, ErrIndefinite):
		return observe.Indefinite
	case op != nil && op.Failed: // the function's own error, whatever it is
		return observe.Failed
	case fault.Refused(err):
		return observe.Refused
	case errors.Is(err, command.ErrConflict), errors.Is(err, command.ErrRetired), errors.Is(err, command.ErrFuture):
		return observe.Conflict
	}
	return observe.Failed
}

// tell reports the steps of a command to the observer, once they are done.
func (op *operation) tell(ctx context.Context, lent bool) {
	if op.Token.Digest != nil {
		op.client.observer.Event(ctx, observe.Event{Kind: observe.Token, Name: "consumed", Pending: lent})
	}
	for i, kind := range op.tx.kinds {
		inHolds.Tell(ctx, op.client.observer, kind, []holds.Hold{op.tx.done[i]}, lent)
	}
}
