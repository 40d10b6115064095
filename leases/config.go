package leases

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/internal/bounds"
	"github.com/pgmetered/metered/internal/fault"
	"github.com/pgmetered/metered/internal/ledger"
	"github.com/pgmetered/metered/internal/lend"
	"github.com/pgmetered/metered/internal/observed"
	"github.com/pgmetered/metered/internal/schema"
)

// Errors, beside those of package budget.
var (
	ErrUnavailable error = errUnavailable // of Allow. If the database's answer was lost, the units may be spent
	ErrClosed      error = errClosed
)

var (
	errArgument    = fault.New("invalid_argument", "leases: invalid argument")
	errUnavailable = fault.New("leases_unavailable", "leases: there is no slice, and the database cannot be asked")
	errClosed      = fault.New("leases_closed", "leases: the pool is closed")
)

// Config configures a Pool. Rules are required, and everything else has a documented default.
type Config struct {
	// Rules name the scopes that the Pool leases, and how. The first rule whose Prefix matches a
	// scope counts. A scope that no rule matches is charged in the ledger. Required.
	Rules []Rule

	// Owner names this process in the history of leases, in 1 to 200 bytes. Defaults to a name
	// made of host, process id and random bytes.
	Owner string

	// OnError gets errors of work in the background, such as a lease that could not be settled. No
	// unit is lost by them: the lease's end settles it. Defaults to none.
	OnError func(error)

	// NoRecall keeps the Pool from listening for recalls. Set it behind a pooler that has no
	// sessions. Then a slice is returned when it ends, and not when another process needs its
	// units, or when its scope is retired.
	NoRecall bool
}

// Rule says how scopes are leased (docs/scale.md).
type Rule struct {
	// Prefix is what the scopes begin with, such as "org/". "" matches all scopes.
	Prefix string

	// MinSlice is the smallest slice, in units, from 1 to 2^53. Defaults to 16.
	MinSlice int64

	// MaxSlice is the largest slice, in units, from MinSlice to 2^53. Defaults to 1<<20.
	MaxSlice int64

	// SliceLasts is how long a slice should last at the present rate of spending: slices grow and
	// shrink to it. It is from 10ms to 1m. Defaults to 500ms.
	SliceLasts time.Duration

	// Idle is how long an unused slice is kept before its units are returned, from 10ms to TTL.
	// Defaults to 1s.
	Idle time.Duration

	// TTL is how long a lease lives. The units of a process that died are free again after it. It
	// is from 100ms to 1h. Defaults to 10s.
	TTL time.Duration

	// Share bounds a slice to one part in Share of the units that are left, from 1 to 1,000,000. A
	// greater Share leaves more for other processes. Defaults to 32.
	Share int

	// RememberRefusal is how long a refusal is remembered, for the same amount, where a credit or a release
	// could end it earlier. It is from 0 to 1m. Defaults to 100ms.
	RememberRefusal time.Duration
}

func (r *Rule) complete(i int) error {
	field := func(name string) string { return fmt.Sprintf("Config.Rules[%d].%s", i, name) }
	for _, d := range []struct {
		value      *int64
		otherwise  int64
		name       string
		least, max int64
	}{{&r.MinSlice, 16, "MinSlice", 1, bounds.MaxAmount},
		{&r.MaxSlice, max(1<<20, r.MinSlice), "MaxSlice", r.MinSlice, bounds.MaxAmount}} {
		if *d.value == 0 {
			*d.value = d.otherwise
		}
		if *d.value < d.least || *d.value > d.max {
			return invalid(field(d.name), "%d is not from %d to %d", *d.value, d.least, d.max)
		}
	}
	if r.Share == 0 {
		r.Share = 32
	}
	if r.Share < 1 || r.Share > 1_000_000 {
		return invalid(field("Share"), "%d is not from 1 to 1,000,000", r.Share)
	}
	if r.TTL == 0 {
		r.TTL = 10 * time.Second
	}
	for _, d := range []struct {
		value      *time.Duration
		otherwise  time.Duration
		name       string
		least, max time.Duration
	}{
		{&r.TTL, 0, "TTL", 100 * time.Millisecond, time.Hour},
		{&r.SliceLasts, 500 * time.Millisecond, "SliceLasts", 10 * time.Millisecond,
			time.Minute},
		{&r.Idle, min(time.Second, r.TTL), "Idle", 10 * time.Millisecond, r.TTL},
		{&r.RememberRefusal, 100 * time.Millisecond, "RememberRefusal", 0, time.Minute},
	} {
		if *d.value == 0 {
			*d.value = d.otherwise
		}
		if *d.value < d.least || *d.value > d.max {
			return invalid(field(d.name), "%v is not from %v to %v", *d.value, d.least, d.max)
		}
	}
	return nil
}

// New sends no SQL.
func New(pool *pgxpool.Pool, ledger *budget.Ledger, cfg Config) (*Pool, error) {
	p, err := bare(pool, ledger)
	if err != nil {
		return nil, err
	}
	if len(cfg.Rules) == 0 {
		return nil, invalid("Config.Rules", "are none")
	}
	cfg.Rules = append([]Rule(nil), cfg.Rules...)
	for i := range cfg.Rules {
		if err := cfg.Rules[i].complete(i); err != nil {
			return nil, err
		}
	}
	if cfg.Owner == "" {
		cfg.Owner = owner()
	}
	if err := fault.Text(errArgument, "Config.Owner", cfg.Owner, maxOwnerBytes); err != nil {
		return nil, err
	}
	own := pool.Config()
	own.MaxConns, own.MinConns, own.MinIdleConns, own.MaxConnIdleTime = 4, 0, 0, 30*time.Second
	if p.own, err = pgxpool.NewWithConfig(context.Background(), own); err != nil {
		return nil, invalid("pool", "%s", err)
	}
	p.cfg, p.carver.owner = cfg, cfg.Owner
	p.live, p.stop = context.WithCancel(context.Background())
	p.last, p.end = context.WithCancel(context.Background())
	return p, nil
}

// bare is a Pool that leases nothing, and can settle leases of others.
func bare(pool *pgxpool.Pool, ledger *budget.Ledger) (*Pool, error) {
	if err := notNil("pool", pool); err != nil {
		return nil, err
	}
	carver, err := NewCarver(ledger)
	if err != nil {
		return nil, err
	}
	p := &Pool{db: pool, own: pool, ledger: ledger, carver: carver,
		cfg: Config{Owner: carver.owner}, active: map[*slot]struct{}{}}
	p.schema, p.wait, p.strict = inBudget.Settings(ledger)
	p.observer = inBudget.Observer(ledger)
	p.sql = render(p.schema)
	return p, nil
}

const maxOwnerBytes = 200

func owner() string {
	host, _ := os.Hostname()
	if len(host) > 150 {
		host = host[:150]
	}
	var b [6]byte
	_, _ = rand.Read(b[:]) // never fails, as of Go 1.24
	return strings.ToValidUTF8(host, "?") + "/" + fmt.Sprint(os.Getpid()) + "/" + hex.EncodeToString(b[:])
}

// inBudget is what package budget lends.
var inBudget = lend.Borrow[interface {
	Charges(l *budget.Ledger, charges ...budget.Charge) (*ledger.ChargeCall[budget.Receipt], error)
	Credit(l *budget.Ledger, c budget.Credit) (*ledger.Call[budget.Posted], error)
	NoteJSON(n budget.Note) string
	Observer(l *budget.Ledger) *observed.To
	Settings(l *budget.Ledger) (name schema.Name, wait time.Duration, actor bool)
	TellCrossings(ctx context.Context, l *budget.Ledger, tx pgx.Tx, all []budget.Crossing) error
	TellRefused(ctx context.Context, to *observed.To, err error)
	TellsSpent(l budget.Limit) (tells, known bool)
}]("budget")

func invalid(field, format string, args ...any) error {
	return fault.Invalid(errArgument, field, format, args...)
}

func notNil(field string, arg any) error { return fault.NotNil(errArgument, field, arg) }

func failed(doing string, err error) error { return fault.Failed("leases", doing, err) }
