package privacy

import (
	"cmp"
	"context"
	"fmt"
	"regexp"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgmetered/metered/internal/fault"
	"github.com/pgmetered/metered/internal/schema"
)

// Bounds, checked before any SQL, and defaults. Lengths are in bytes.
const (
	maxSubject = 512
	maxAlias   = 128
	maxTables  = 32
	maxName    = 255 // of a scope or an id with the alias in it

	defaultRows = 20_000
	maxRows     = 1_000_000

	minLockTimeout     = time.Millisecond
	maxLockTimeout     = time.Hour
	defaultLockTimeout = 5 * time.Second
)

// Config configures a Register. The zero value has the documented defaults.
type Config struct {
	// Schema is the schema that metered.Migrate created. Defaults to "metered".
	Schema string

	// Tables are further tables, such as "river_job" or "app.orders", up to 32. Their columns of
	// text, JSON, and arrays of both are exported and rewritten, too. Defaults to none.
	Tables []string

	// MaxRows is about how many rows one Pseudonymize rewrites, from 1 to 1,000,000. A scope is
	// rewritten whole, however many entries it has. Defaults to 20,000.
	MaxRows int

	// LockTimeout bounds each wait for a lock, from 1ms to 1h. If the session's lock_timeout is
	// shorter, that one counts. Running into it is budget.ErrBusy. Defaults to 5s.
	LockTimeout time.Duration
}

// Register finds and rewrites the rows of persons. It is safe for concurrent use.
type Register struct {
	name        schema.Name
	tables      []string
	maxRows     int
	lockTimeout time.Duration
}

// New sends no SQL.
func New(config Config) (*Register, error) {
	name, err := schema.Parse(config.Schema)
	if err != nil {
		return nil, misuse("Config.Schema", "%s", err)
	}
	r := &Register{
		name:        name,
		tables:      config.Tables,
		maxRows:     cmp.Or(config.MaxRows, defaultRows),
		lockTimeout: cmp.Or(config.LockTimeout, defaultLockTimeout),
	}
	if r.maxRows < 1 || r.maxRows > maxRows {
		return nil, misuse("Config.MaxRows", "%d is not from 1 to 1,000,000", config.MaxRows)
	}
	if r.lockTimeout < minLockTimeout || r.lockTimeout > maxLockTimeout {
		return nil, misuse("Config.LockTimeout", "%v is not from %v to %v", config.LockTimeout,
			minLockTimeout, maxLockTimeout)
	}
	if len(config.Tables) > maxTables {
		return nil, misuse("Config.Tables", "has %d tables, want at most %d", len(config.Tables), maxTables)
	}
	for i, table := range config.Tables {
		if err := fault.Text(errArgument, fmt.Sprintf("Config.Tables[%d]", i), table, maxName); err != nil {
			return nil, err
		}
	}
	return r, nil
}

// made refuses the zero Register.
func (r *Register) made() error {
	return fault.Made(errArgument, "register", r != nil && r.maxRows > 0)
}

var errArgument = fault.New("invalid_argument", "privacy: invalid argument")

// ErrAliasTaken says that rows of another name have the alias already. Nothing was rewritten. Take
// another alias.
var ErrAliasTaken error = fault.New("alias_taken", "privacy: the alias is in use")

func invalid(field, format string, args ...any) error {
	return fault.Invalid(errArgument, field, format, args...)
}

func misuse(field, format string, args ...any) error {
	return fault.Misuse(errArgument, field, format, args...)
}

// person is a name and its alias, with the patterns that find the name.
type person struct {
	subject, plain, escaped, alias string
}

func (p person) args() []any { return []any{p.subject, p.plain, p.escaped, p.alias} }

// find is the person of a subject, without an alias.
func find(subject string) (person, error) {
	if subject == "" {
		return person{}, invalid("subject", "is empty")
	}
	err := fault.Text(errArgument, "subject", subject, maxSubject)
	return person{subject: subject, plain: plainPattern(subject), escaped: escapedPattern(subject)}, err
}

// An alias needs no escape in a regular expression, in JSON, or in the text of a row.
var validAlias = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9/_.:@+=-]*$`)

// rename is the person of a subject that gets an alias.
func rename(subject, alias string) (person, error) {
	p, err := find(subject)
	if err != nil {
		return p, err
	}
	switch p.alias = alias; {
	case len(alias) > maxAlias:
		return p, invalid("alias", "is %d bytes long, want at most %d", len(alias), maxAlias)
	case !validAlias.MatchString(alias):
		return p, invalid("alias", "want one or more of A-Z, a-z, 0-9 and /_.:@+=-, starting with a letter or digit")
	case strings.Contains(alias, subject):
		return p, invalid("alias", "has the subject in it")
	}
	return p, nil
}

// querier runs reads: a *pgxpool.Pool, a *pgx.Conn or a pgx.Tx.
type querier interface {
	Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error)
}
