package tokens

import (
	"context"
	"regexp"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgmetered/metered/internal/fault"
	"github.com/pgmetered/metered/internal/lockkey"
	"github.com/pgmetered/metered/internal/observed"
	"github.com/pgmetered/metered/internal/schema"
	"github.com/pgmetered/metered/observe"
)

// Bounds, checked before any SQL, and defaults. Lengths are in bytes.
const (
	minTTL     = time.Second
	maxTTL     = 400 * 24 * time.Hour
	defaultTTL = time.Hour
	maxUses    = 1_000_000
	maxMints   = 1000 // tokens of one MintMany

	maxPrefixLen   = 32
	defaultPrefix  = "metered"
	maxPurposeLen  = 128
	maxSubjectLen  = 512
	maxPayloadLen  = 8 << 10 // as JSON
	secretBytes    = 32      // the secret in a token
	minKeyLen      = 32      // the key of Derive
	maxKeyLen      = 1024
	maxDeriveParts = 16
	maxDeriveLen   = 4096 // the parts of Derive together

	minLockTimeout     = time.Millisecond
	maxLockTimeout     = time.Hour
	defaultLockTimeout = 5 * time.Second
)

// Config configures a Store. The zero value has the documented defaults.
type Config struct {
	// Schema is the schema that metered.Migrate created. Defaults to "metered".
	Schema string

	// Prefix begins the text of every token, so that scanners of leaked secrets find them. It has
	// 1 to 32 of A-Z, a-z, 0-9 and _, starts with a letter and does not end with _. Defaults to
	// "metered".
	Prefix string

	// LockTimeout bounds each wait for a lock, from 1ms to 1h. If the session's lock_timeout is
	// shorter, that one counts. Running into it is budget.ErrBusy. Defaults to 5s.
	LockTimeout time.Duration

	// Observer hears of the Store's calls. Defaults to none.
	Observer observe.Observer
}

// Store is safe for concurrent use.
type Store struct {
	prefix        string
	lockTimeoutMS int32
	lockSpace     string
	sql           statements
	observer      *observed.To
}

// statements are this package's, with the schema's name in them.
type statements struct {
	mint, replace, consume, inspect, revoke, revokeSubject string
}

// New sends no SQL.
func New(config Config) (*Store, error) {
	name, err := schema.Parse(config.Schema)
	if err != nil {
		return nil, invalid("Config.Schema", "%s", err)
	}
	if config.Prefix == "" {
		config.Prefix = defaultPrefix
	}
	if len(config.Prefix) > maxPrefixLen || !validPrefix.MatchString(config.Prefix) {
		return nil, invalid("Config.Prefix",
			"want 1 to %d of A-Z, a-z, 0-9 and _, starting with a letter and not ending with _", maxPrefixLen)
	}
	if config.LockTimeout == 0 {
		config.LockTimeout = defaultLockTimeout
	}
	if config.LockTimeout < minLockTimeout || config.LockTimeout > maxLockTimeout {
		return nil, invalid("Config.LockTimeout", "%v: want %v to %v", config.LockTimeout,
			minLockTimeout, maxLockTimeout)
	}
	return &Store{
		prefix:        config.Prefix,
		lockTimeoutMS: int32(config.LockTimeout / time.Millisecond),
		lockSpace:     "metered/tokens/" + name.String(),
		observer:      observed.New(config.Observer),
		sql: statements{
			mint:          name.SQL(mintSQL),
			replace:       name.SQL(replaceSQL),
			consume:       name.SQL(consumeSQL),
			inspect:       name.SQL(inspectSQL),
			revoke:        name.SQL(revokeSQL),
			revokeSubject: name.SQL(revokeSubjectSQL),
		},
	}, nil
}

var validPrefix = regexp.MustCompile(`^[A-Za-z]([A-Za-z0-9_]*[A-Za-z0-9])?$`)

// made refuses the zero Store, which has no prefix.
func (s *Store) made() error { return fault.Made(errArgument, "store", s != nil && s.prefix != "") }

// querier runs reads: a *pgxpool.Pool, a *pgx.Conn or a pgx.Tx.
type querier interface {
	QueryRow(ctx context.Context, sql string, args ...any) pgx.Row
}

// lockKey is the advisory lock of a purpose and subject, neither of which can
// contain a zero byte.
func (s *Store) lockKey(purpose, subject string) int64 {
	return lockkey.Of(s.lockSpace, purpose+"\x00"+subject)
}

func checkPurpose(field, purpose string) error { return checkName(field, purpose, maxPurposeLen) }
func checkSubject(field, subject string) error { return checkName(field, subject, maxSubjectLen) }

func checkName(field, name string, maxLen int) error {
	if name == "" {
		return invalid(field, "is empty")
	}
	return fault.Text(errArgument, field, name, maxLen)
}
