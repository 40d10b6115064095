package jobs

import (
	"cmp"
	"context"
	"errors"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/fault"
	"github.com/pgmetered/metered/internal/ledger"
	"github.com/pgmetered/metered/internal/lend"
	"github.com/pgmetered/metered/internal/schema"
)

// inHolds is what package holds lends.
var inHolds = lend.Borrow[interface {
	AnyHolder(b *holds.Book) *holds.Book
	Channel(b *holds.Book) any
	Ledger(b *holds.Book) *budget.Ledger
	Park(b *holds.Book, r holds.Placement) (*ledger.Parking, error)
	Schema(b *holds.Book) schema.Name
	Through(ctx context.Context, b *holds.Book, pool *pgxpool.Pool, call func() error) error
}]("holds")

const (
	maxHolds   = 1000 // jobs with a hold in one EnqueueMany
	maxFair    = 255
	maxWaiting = 3652 * 24 * time.Hour
	maxParked  = 1_000_000_000
)

// gate is the part of an Enqueuer that holds units for jobs.
type gate struct {
	book        *holds.Book // nil: Options.Hold is refused
	config      Config
	name        schema.Name
	riverSchema string

	parkSQL, parkNewSQL, releaseSQL, judgedSQL, nextSQL, dropSQL, changeSQL, explainSQL, listSQL,
	endedSQL, restSQL, strayedSQL, takeOutSQL string
	wakeSQL, discardSQL, cancelSQL, lostSQL, parkAgainSQL, oneSQL, takenSQL,
	troubleSQL string
}

func newGate(client *river.Client[pgx.Tx], name schema.Name, config Config) (gate, error) {
	g := gate{book: config.Holds, config: config, name: name, riverSchema: client.Schema()}
	if g.book != nil && inHolds.Schema(g.book) != name {
		return gate{}, invalid("Config.Holds", "is not on the schema %q", name)
	}
	table := pgx.Identifier{"river_job"}
	if g.riverSchema != "" {
		table = pgx.Identifier{g.riverSchema, "river_job"}
	}
	onRiver := func(sql string) string {
		return name.SQL(strings.ReplaceAll(sql, "river_job",
			table.Sanitize()))
	}
	g.parkSQL, g.parkNewSQL, g.releaseSQL = onRiver(parkSQL), onRiver(parkNewSQL), onRiver(releaseSQL)
	g.oneSQL, g.takenSQL, g.troubleSQL = onRiver(oneSQL), name.SQL(takenSQL), name.SQL(troubleSQL)
	g.wakeSQL, g.discardSQL, g.cancelSQL = onRiver(wakeSQL), onRiver(discardSQL), onRiver(cancelSQL)
	g.endedSQL, g.restSQL, g.strayedSQL = onRiver(endedSQL), onRiver(restSQL), onRiver(strayedSQL)
	g.lostSQL = onRiver(lostSQL)
	g.parkAgainSQL = onRiver(strings.Replace(restSQL, betweenAttempts, stillLost, 1))
	g.judgedSQL, g.nextSQL, g.explainSQL, g.listSQL = name.SQL(judgedSQL), name.SQL(nextSQL),
		name.SQL(explainSQL), name.SQL(listSQL)
	g.takeOutSQL, g.dropSQL, g.changeSQL = name.SQL(takeOutSQL), name.SQL(dropSQL), name.SQL(changeSQL)
	return g, nil
}

// waits says how a parked job waits.
type waits struct {
	fair     string
	most     int
	maxWait  time.Duration
	giveBack bool
}

func noWaits(at string, opts *Options) error {
	if opts.Burst != nil || opts.FairKey != "" || opts.GiveBack || opts.MaxWait != 0 || opts.MaxParked != 0 {
		return invalid(at+"Options.Hold",
			"is nil: without it no job waits, and Burst, Fair, GiveBack, MaxWait and MaxParked mean nothing")
	}
	return nil
}

// fewHolds bounds the work that one call does under its locks.
func fewHolds(all []*prepared) error {
	n := 0
	for _, p := range all {
		if p.parking != nil {
			n++
		}
	}
	if n > maxHolds {
		return invalid("Items", "%d have a Hold: want at most %d", n, maxHolds)
	}
	return nil
}

func (e *Enqueuer) prepareHold(at string, p *prepared, opts *Options) error {
	at += "Options."
	own := river.InsertOpts{}
	if withOpts, ok := p.args.(river.JobArgsWithInsertOpts); ok {
		own = withOpts.InsertOpts()
	}
	switch {
	case e.gate.book == nil:
		return invalid(at+"Hold", "needs Config.Holds")
	case !p.opts.ScheduledAt.IsZero() || !own.ScheduledAt.IsZero() || p.opts.Pending || own.Pending:
		return invalid(at+"InsertOpts", "with a Hold a job starts when its units fit: neither ScheduledAt nor Pending")
	case isUnique(p.opts.UniqueOpts) || isUnique(own.UniqueOpts):
		return invalid(at+"InsertOpts.UniqueOpts", "cannot be combined with a Hold: use Key")
	case len(opts.FairKey) > maxFair || !storable(opts.FairKey):
		return invalid(at+"FairKey", "want at most %d bytes of UTF-8 without NUL", maxFair)
	case opts.MaxWait < 0 || opts.MaxWait > maxWaiting || opts.MaxWait%time.Microsecond != 0:
		return invalid(at+"MaxWait", "%v is not from 1µs to %v, in whole microseconds",
			opts.MaxWait, maxWaiting)
	case opts.MaxParked < 0 || opts.MaxParked > maxParked:
		return invalid(at+"MaxParked", "%d is not from 1 to %d", opts.MaxParked, maxParked)
	}
	p.waits = waits{fair: cmp.Or(opts.FairKey, opts.Tenant), most: opts.MaxParked,
		maxWait: opts.MaxWait, giveBack: opts.GiveBack}
	var err error
	if p.parking, err = e.prepareChoice(at, "Hold", opts, *opts.Hold); err == nil && opts.Burst != nil {
		p.burst, err = e.prepareChoice(at, "Burst", opts, *opts.Burst)
	}
	return err
}

// prepareChoice prepares Options.Hold or Options.Burst.
func (e *Enqueuer) prepareChoice(at, name string, opts *Options, units Units) (*ledger.Parking, error) {
	if opts.GiveBack && len(units.Lines) == 0 {
		return nil, invalid(at+"GiveBack", "needs %s.Lines: nothing else can be given back", name)
	}
	parking, err := inHolds.Park(e.gate.book, units.placement(opts.Tenant))
	if refused := (*fault.Argument)(nil); errors.As(err, &refused) {
		return nil, invalid(at+strings.Replace(refused.Field, "Placement.", name+".", 1), "%s", refused.Reason)
	}
	return parking, err
}

// choices are the units that the job takes, the first that fit.
func (p *prepared) choices() []*ledger.Parking {
	if p.burst == nil {
		return []*ledger.Parking{p.parking}
	}
	return []*ledger.Parking{p.parking, p.burst}
}

func (p *prepared) locks() (all ledger.Locks) {
	for _, choice := range p.choices() {
		all.Scopes, all.Keys = append(all.Scopes, choice.Locks.Scopes...),
			append(all.Keys, choice.Locks.Keys...)
	}
	return all
}

// retry is how the job waits for its next attempt: for its lines alone, since its charges are
// spent.
func (p *prepared) retry() *retry {
	if !p.waits.giveBack {
		return nil
	}
	r := &retry{choice: linesOf(p.parking), Fair: p.waits.fair, WaitUS: p.waits.maxWait.Microseconds()}
	if p.burst != nil {
		burst := linesOf(p.burst)
		r.Burst = &burst
	}
	return r
}

// choice is a hold and its charges, as text.
type choice struct {
	Hold    string `json:"hold"`
	Charges string `json:"charges"`
}

func choiceOf(p *ledger.Parking) choice {
	return choice{Hold: p.Hold, Charges: ledger.Charges(p.Charges)}
}

func linesOf(p *ledger.Parking) choice {
	var lines []ledger.Charge
	for _, c := range p.Charges {
		if c.Held > 0 {
			c.Amount = c.Held
			lines = append(lines, c)
		}
	}
	return choice{Hold: p.Hold, Charges: ledger.Charges(lines)}
}
