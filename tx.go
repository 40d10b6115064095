package metered

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/bounds"
	"github.com/pgmetered/metered/internal/command"
	"github.com/pgmetered/metered/internal/guardtx"
	"github.com/pgmetered/metered/internal/ledger"
	"github.com/pgmetered/metered/internal/lend"
	"github.com/pgmetered/metered/internal/listen"
	"github.com/pgmetered/metered/internal/observed"
	"github.com/pgmetered/metered/internal/schema"
	"github.com/pgmetered/metered/jobs"
	"github.com/pgmetered/metered/leases"
	"github.com/pgmetered/metered/tokens"
)

// Tx is a command's transaction: a pgx.Tx for your writes, and the calls of the command. One
// goroutine at a time may use it, until the function returns: later calls have the code
// transaction_done. Statements that end it fail with the code transaction_control. Savepoints
// (Begin) work. Send nothing over Conn.
//
// Charge, Credit, Refund, Place, Claim, Capture, Release, Extend and Return are made at the end, all
// or none: credits and refunds, then holds, charges with UpTo or Lots, and other charges. A refusal
// is the error of Do. They need a Command.Input that decides them: the same ID with another is
// budget.ErrConflict. The Receipt has charges alone.
type Tx struct {
	guarded

	// Grant is the grant of the command's token, or nil.
	Grant *tokens.Grant

	// Sticky are the charges of Command.Sticky.
	Sticky budget.Receipt

	// Placed are the ids of Command.Holds and Command.Claims, in order. A claim that its holder
	// has already keeps its id, which Outcome.Holds has.
	Placed []string

	over    *atomic.Bool // the function has returned. Nil for the zero value, which was never begun
	client  *Client
	op      *operation
	charges []budget.Charge
	charged *chargeCall // charges, prepared
	entries []command.Step
	holds   []command.Step
	done    []holds.Hold     // by the steps of holds
	kinds   []string         // of these steps, one for each of done
	apart   []command.Step   // of charges with UpTo or Lots
	told    []budget.Receipt // by these steps
	jobs    []jobs.Enqueued  // made, for the notice
	jobIDs  []int64          // made: the first maxJobIDs
}

// guarded is embedded under a name that is not exported.
type guarded = guardtx.Tx

// attempt calls the command's function, once in each attempt. Its Tx is dead afterwards, also if
// the function panics: the connection then serves others.
func (op *operation) attempt(ctx context.Context, bare pgx.Tx) (command.Ending, error) {
	over := new(atomic.Bool)
	defer over.Store(true)
	tx := &Tx{
		guarded: guardtx.New(bare, over), over: over,
		Grant: op.grant, Sticky: op.sticky, client: op.client, op: op,
		charges: slices.Clone(op.cmd.Charges), charged: op.charges,
	}
	op.tx = tx
	if s := op.cmd.settling; s != nil {
		if s.capture == nil {
			return command.Ending{}, errPurged
		}
		tx.holds = append(tx.holds, command.StepOf(s.capture, tx.held(s.capture.Kind)))
	}
	for _, call := range op.placing {
		tx.Placed = append(tx.Placed, call.Placing.ID)
		tx.holds = append(tx.holds, command.StepOf(call, tx.held(call.Kind)))
	}
	result, err := op.do(ctx, tx)
	if err != nil {
		return command.Ending{}, err
	}
	end := command.Ending{Result: result, Steps: slices.Concat(tx.entries, tx.holds, tx.apart),
		Notice: tx.notice(), Jobs: tx.jobIDs}
	if tx.charged != nil {
		end.Charges = &tx.charged.Charging
		if pool := op.client.cfg.Leases; pool != nil {
			inLeases.Lease(ctx, pool, end.Charges, tx.charges)
		}
	}
	return end, nil
}

// open refuses a call of Tx after the function has returned, or without a Command.Input: the same
// id could then be answered by the record of another command.
func (t *Tx) open() error {
	switch {
	case t.dead():
		return guardtx.ErrDone
	case t.op.cmd.Input == nil:
		return misuse("Command.Input", "is nil: a command whose function charges, credits, refunds or calls holds declares what these depend on, "+
			"so that the same id with other input is a conflict")
	}
	return nil
}

// dead reports whether the function has returned.
func (t *Tx) dead() bool { return t.over == nil || t.over.Load() }

// held takes note of the holds of a step of a kind.
func (t *Tx) held(kind string) func([]holds.Hold) {
	return func(holds []holds.Hold) {
		t.done = append(t.done, holds...)
		for range holds {
			t.kinds = append(t.kinds, kind)
		}
	}
}

// Charge adds charges, which are taken with Command.Charges after the function has returned, all of
// them or none. A mistake in an argument is reported now, and a refusal by Do. Charges of a call
// with UpTo or Lots are taken before the others. They come last in Outcome.Receipt, and no
// CommandNotice has them.
func (t *Tx) Charge(charges ...budget.Charge) error {
	if err := t.open(); err != nil {
		return err
	}
	apart, err := inBudget.ChargeLots(t.client.Budget, charges...)
	if err != nil {
		return err
	}
	if apart != nil {
		t.apart = append(t.apart, command.StepOf(apart,
			func(r budget.Receipt) { t.told = append(t.told, r) }))
		return nil
	}
	all := append(slices.Clone(t.charges), charges...)
	call, err := inBudget.Charges(t.client.Budget, all...)
	if err != nil {
		return err
	}
	t.charges, t.charged = all, call
	return nil
}

// Credit adds credit, which the command can spend.
func (t *Tx) Credit(credits ...budget.Credit) error {
	return prepareEntries(t, inBudget.Credit, credits)
}

// Refund adds refunds, which are written before the charges. A mistake in an argument is reported
// now, and a refusal by Do.
func (t *Tx) Refund(refunds ...budget.Refund) error {
	return prepareEntries(t, inBudget.Refund, refunds)
}

func prepareEntries[E any](t *Tx, prepare func(*budget.Ledger, E) (*entryCall, error), entries []E) error {
	if err := t.open(); err != nil {
		return err
	}
	all := slices.Clone(t.entries)
	for _, e := range entries {
		p, err := prepare(t.client.Budget, e)
		if err != nil {
			return err
		}
		all = append(all, command.StepOf(p, nil))
	}
	t.entries = all
	return nil
}

// Enqueue is jobs.Enqueuer.Enqueue. A new job with a Hold is placed or parked at the end: until
// then Result has its id alone, and a rollback to a savepoint does not undo it.
func (t *Tx) Enqueue(ctx context.Context, args river.JobArgs, opts *jobs.Options) (jobs.Result, error) {
	switch {
	case t.dead():
		return jobs.Result{}, guardtx.ErrDone
	case t.client.enqueuer == nil:
		return jobs.Result{}, errNoRiver
	}
	if opts != nil && opts.Hold != nil {
		if err := t.open(); err != nil {
			return jobs.Result{}, err
		}
	}
	if opts != nil && (opts.Key != "" || opts.Hold != nil) && !t.client.home.Owns(opts.Tenant) { // its key would stay behind when the tenant moves
		return jobs.Result{}, misuse("Options.Tenant",
			"is %q, want %q, or that and a part after a slash", opts.Tenant, t.client.home.Tenant)
	}
	r, park, err := inJobs.Enqueue(ctx, t.client.enqueuer, t, args, opts)
	switch {
	case err != nil:
		return r, err
	case park != nil:
		t.holds = append(t.holds, command.StepOf(park, nil))
		if len(t.jobIDs) < maxJobIDs {
			t.jobIDs = append(t.jobIDs, r.JobID)
		}
	default:
		t.enqueued(r)
	}
	return r, nil
}

// Secret is Client.Secret with the command's Tenant and ID: a command that runs again gets the same
// secret, and so mints the same token.
func (t *Tx) Secret(label string) (tokens.Secret, error) {
	if t.client == nil {
		return tokens.Secret{}, guardtx.ErrDone
	}
	return t.client.Secret(t.op.Tenant, t.op.ID, label)
}

// Place returns the hold's id. Outcome.Holds has the hold. A cleanup enqueues its job now, with the
// errors of Enqueue.
func (t *Tx) Place(ctx context.Context, r holds.Placement, cleanup *jobs.Cleanup) (id string, err error) {
	return t.place(ctx, cleanup, r.Tenant, r.TTL+r.Grace,
		func() (*holdsCall, error) { return inHolds.Place(t.client.Holds, r) })
}

// Claim is as Place, also for a claim that its holder has already.
func (t *Tx) Claim(ctx context.Context, c holds.Claim, cleanup *jobs.Cleanup) (id string, err error) {
	return t.place(ctx, cleanup, c.Tenant, c.TTL+c.Grace,
		func() (*holdsCall, error) { return inHolds.Claim(t.client.Holds, c) })
}

func (t *Tx) place(ctx context.Context, cleanup *jobs.Cleanup, tenant string, ttl time.Duration,
	prepare func() (*holdsCall, error)) (string, error) {
	if err := t.open(); err != nil {
		return "", err
	}
	p, err := prepare()
	if err != nil {
		return "", err
	}
	if cleanup != nil {
		args, opts, err := inJobs.CleanupJob(*cleanup, tenant, p.Placing.ID, ttl)
		if err == nil {
			_, err = t.Enqueue(ctx, args, &jobs.Options{Tenant: tenant, InsertOpts: opts})
		}
		if err != nil {
			return "", err
		}
	}
	t.holds = append(t.holds, command.StepOf(p, t.held(p.Kind)))
	return p.Placing.ID, nil
}

// Capture is holds.Book.Capture, carried out after the function has returned. Outcome.Holds has the
// holds. A mistake in an argument is reported now.
func (t *Tx) Capture(c holds.Capture) error {
	return end(t, inHolds.Capture, c)
}

// Release is holds.Book.Release, carried out after the function has returned.
func (t *Tx) Release(r holds.Release) error {
	return end(t, inHolds.Release, r)
}

// Extend is holds.Book.Extend, carried out after the function has returned.
func (t *Tx) Extend(e holds.Extend) error {
	return end(t, inHolds.Extend, e)
}

// Return is holds.Book.Return, carried out after the function has returned.
func (t *Tx) Return(r holds.Return) error {
	return end(t, inHolds.Return, r)
}

func end[E any](t *Tx, prepare func(*holds.Book, E) (*holdsCall, error), e E) error {
	if err := t.open(); err != nil {
		return err
	}
	p, err := prepare(t.client.Holds, e)
	if err != nil {
		return err
	}
	t.holds = append(t.holds, command.StepOf(p, t.held(p.Kind)))
	return nil
}

type (
	chargeCall = ledger.ChargeCall[budget.Receipt]
	entryCall  = ledger.Call[budget.Posted]
	holdsCall  = ledger.Call[[]holds.Hold]
)

// Functions that the packages lend.
var (
	inBudget = lend.Borrow[interface {
		Charges(l *budget.Ledger, charges ...budget.Charge) (*ledger.ChargeCall[budget.Receipt], error)
		ChargeLots(l *budget.Ledger, charges ...budget.Charge) (*ledger.Call[budget.Receipt], error)
		Content(scope, use string) string
		Credit(l *budget.Ledger, c budget.Credit) (*ledger.Call[budget.Posted], error)
		Refund(l *budget.Ledger, r budget.Refund) (*ledger.Call[budget.Posted], error)
		TellRefused(ctx context.Context, to *observed.To, err error)
		TellsSpent(l budget.Limit) (tells, known bool)
	}]("budget")

	inHolds = lend.Borrow[interface {
		Capture(b *holds.Book, c holds.Capture) (*ledger.Call[[]holds.Hold], error)
		Claim(b *holds.Book, c holds.Claim) (*ledger.Call[[]holds.Hold], error)
		Decode(raw []byte) (holds.Hold, error)
		Extend(b *holds.Book, e holds.Extend) (*ledger.Call[[]holds.Hold], error)
		OfSession(ctx context.Context, b *holds.Book, db budget.Querier, tenant, operation,
			holder string) (holds.Hold, []byte, error)
		Open(b *holds.Book, r holds.Placement, o *ledger.Opening) (*ledger.Call[[]holds.Hold], error)
		Place(b *holds.Book, r holds.Placement) (*ledger.Call[[]holds.Hold], error)
		Release(b *holds.Book, r holds.Release) (*ledger.Call[[]holds.Hold], error)
		Return(b *holds.Book, r holds.Return) (*ledger.Call[[]holds.Hold], error)
		Tell(ctx context.Context, to *observed.To, kind string, all []holds.Hold, pending bool)
		Unknown(others bool) error
	}]("holds")

	inJobs = lend.Borrow[interface {
		CleanupJob(c jobs.Cleanup, tenant, id string,
			ttl time.Duration) (jobs.CleanupArgs, river.InsertOpts, error)
		Enqueue(ctx context.Context, e *jobs.Enqueuer, tx pgx.Tx, args river.JobArgs,
			opts *jobs.Options) (jobs.Result, *ledger.Call[jobs.Result], error)
	}]("jobs")

	inLeases = lend.Borrow[interface {
		Learn(p *leases.Pool, err error)
		Lease(ctx context.Context, p *leases.Pool, c *ledger.Charging, charges []budget.Charge)
		Look(p *leases.Pool, c *ledger.Charging, charges []budget.Charge)
		Schema(p *leases.Pool) schema.Name
	}]("leases")

	inTokens = lend.Borrow[interface {
		Grant(p ledger.PresentedToken, r ledger.TokenRow) (tokens.Grant, error)
		Present(s *tokens.Store, purpose, subject, text string) (ledger.PresentedToken, error)
		Refuse(reason string) error
		TellRefused(ctx context.Context, to *observed.To, err error)
	}]("tokens")
)

// CommandNotice is a committed command, or jobs without one.
type CommandNotice struct {
	// Missed says that commands may have been missed. All other fields are empty then.
	Missed bool `json:"missed,omitempty"`

	// Tenant is the command's tenant.
	Tenant string `json:"tenant,omitempty"`

	// ID is the command's. It is "" for jobs without a command.
	ID string `json:"id,omitempty"`

	// Name is the command's name.
	Name string `json:"name,omitempty"`

	// Charges are the charges of Config.NotifyChargesFrom units and more.
	Charges []budget.Charge `json:"charges,omitempty"`

	// Jobs are the jobs that the command enqueued.
	Jobs []jobs.Enqueued `json:"jobs,omitempty"`

	// Cut says that some of it did not fit into the notice: Client.Lookup has them.
	Cut bool `json:"cut,omitempty"`
}

// Listen calls handle with each CommandNotice of Clients with Config.NotifyJobs or NotifyChargesFrom, as
// holds.Book.Listen. For exactly once, enqueue a job.
func (c *Client) Listen(ctx context.Context, pool *pgxpool.Pool, opts holds.ListenOptions,
	handle func(context.Context, CommandNotice) error) error {
	if err := cmp.Or(c.made(), notNil("pool", pool), notNil("handle", handle)); err != nil {
		return err
	}
	if err := checkChannel("client", c.channel()); err != nil {
		return err
	}
	idle, wrong := listen.Idle(opts.Idle)
	if wrong != "" {
		return invalid("ListenOptions.Idle", "%s", wrong)
	}
	return listen.Run(ctx, listen.Channel[CommandNotice]{
		Name: c.channel(), Config: pool.Config(), Parse: parseNotice, Missed: CommandNotice{Missed: true},
		Idle: idle, OnError: listen.Wrapped("metered", opts.OnError),
	}, handle)
}

// channel is the channel of notices.
func (c *Client) channel() string { return listen.Commands(c.schema.String()) }

func checkChannel(field, channel string) error {
	if len(channel) > listen.MaxNameBytes {
		return invalid(field, "the channel %q is longer than the %d bytes of a name: use a shorter schema", channel, listen.MaxNameBytes)
	}
	return nil
}

func (c *Client) checkNotify() error {
	switch from := c.cfg.NotifyChargesFrom; {
	case from < 0 || from > bounds.MaxAmount:
		return invalid("Config.NotifyChargesFrom", "%d is not from 0 to %d", from, int64(bounds.MaxAmount))
	case from > 0:
		return checkChannel("Config.NotifyChargesFrom", c.channel())
	case c.cfg.NotifyJobs:
		return checkChannel("Config.NotifyJobs", c.channel())
	}
	return nil
}

func parseNotice(payload string) (n CommandNotice, ok bool) {
	if json.Unmarshal([]byte(payload), &n) != nil || n.Missed || n.ID == "" && len(n.Jobs) == 0 {
		return CommandNotice{}, false
	}
	return n, true
}

// maxPayload bounds a payload in UTF-8. Postgres takes less than 8,000 bytes in the database's
// encoding, in which a character can have half as many again (EUC_JP).
const maxPayload = 5_300

const notifySQL = `select pg_catalog.pg_notify($1, $2::text || ']}')`

// notifyJobsSQL notifies of those jobs that are there: not of jobs that a savepoint took back.
const notifyJobsSQL = `
select pg_catalog.pg_notify($1, $2::text || coalesce(pg_catalog.string_agg(j.said, ',' order by j.n), '') || ']}')
from unnest($3::bigint[], $4::text[]) with ordinality j(id, said, n)
where exists (select from %s r where r.id = j.id)
having count(*) > 0 or $5::bool`

// riverJobs is River's table, as River's own statements name it.
func riverJobs(client *river.Client[pgx.Tx]) string {
	if client != nil && client.Schema() != "" {
		return pgx.Identifier{client.Schema(), "river_job"}.Sanitize()
	}
	return `"river_job"`
}

// maxJobIDs is how many jobs the record of an operation names.
const maxJobIDs = 1000

// enqueued takes note of a job, for the record and the notice.
func (t *Tx) enqueued(r jobs.Result) {
	if r.Created && len(t.jobIDs) < maxJobIDs {
		t.jobIDs = append(t.jobIDs, r.JobID)
	}
	if t.client.cfg.NotifyJobs && r.Created {
		made := jobs.Of(r.Job)
		made.Hold = ""
		t.jobs = append(t.jobs, made)
	}
}

// large are the charges of the notice.
func (t *Tx) large() (large []noticed) {
	from := t.client.cfg.NotifyChargesFrom
	if from == 0 || t.charged == nil {
		return nil
	}
	for _, c := range t.charged.Charges {
		if c.Amount >= from {
			large = append(large, noticed{Scope: c.Scope, Amount: c.Amount, Note: json.RawMessage(c.Note)})
		}
	}
	return large
}

// noticed is a charge of a CommandNotice, whose note is encoded already.
type noticed struct {
	Scope  string          `json:"scope"`
	Amount int64           `json:"amount"`
	Note   json.RawMessage `json:"note,omitempty"`
}

// notice is the statement that notifies of the command, or nil. It takes no lock, so it comes
// before those that do.
func (t *Tx) notice() *command.Statement {
	charges := t.large()
	if len(charges)+len(t.jobs) == 0 {
		return nil
	}
	// Texts cannot fail.
	head, _ := json.Marshal(CommandNotice{Tenant: t.op.Tenant, ID: t.op.ID, Name: t.op.cmd.Name})
	room, cut := maxPayload-len(head)-len(`,"cut":true,"charges":[],"jobs":[]`), false
	fits := func(item any) (string, bool) {
		b, _ := json.Marshal(item)
		room -= len(b) + 1
		cut = cut || room < 0
		return string(b), !cut
	}
	var said, saidJobs []string
	var ids []int64
	for _, c := range charges {
		if s, ok := fits(c); ok {
			said = append(said, s)
		}
	}
	for _, j := range t.jobs {
		if s, ok := fits(j); ok {
			ids, saidJobs = append(ids, j.ID), append(saidJobs, s)
		}
	}
	text := fmt.Sprintf(`%s,"cut":%t,"charges":[%s],"jobs":[`, head[:len(head)-1], cut, strings.Join(said, ","))
	if len(ids) == 0 {
		return &command.Statement{SQL: notifySQL, Args: []any{t.client.channel(), text}}
	}
	return &command.Statement{SQL: t.client.sql.notify,
		Args: []any{t.client.channel(), text, ids, saidJobs, len(charges) > 0 || cut}}
}
