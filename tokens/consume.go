package tokens

import (
	"context"

	"github.com/jackc/pgx/v5"

	"github.com/pgmetered/metered/internal/fault"
	"github.com/pgmetered/metered/internal/ledger"
)

const consumeSQL = `select ` + ledger.TokenColumns + ` from metered.consume_token($1, $2, $3, $4)`

// Consume takes one use of the token that a client presented, if it was minted
// for this purpose and subject and is good, in one round trip. Call it in the
// transaction that does what the token grants.
//
// After a rollback the use is there again. Consuming is not idempotent: a client
// that repeats a request presents a used token. For commands that must answer
// again there is metered.Do, which remembers its results.
//
// It locks the token's row until the transaction ends; other consumers of the
// same token wait for it, at most Config.LockTimeout each. Several tokens in one
// transaction can deadlock with another that takes them in another order.
//
// Errors: ErrInvalid for whatever is wrong with the token, and then the
// transaction stays usable and the token is as it was; ErrArgument for a purpose
// or subject that cannot be; ErrBusy; and Postgres's, of which 40001 means to
// run the transaction again, so that a token which stays unspent is not called
// invalid.
func (s *Store) Consume(ctx context.Context, tx pgx.Tx, purpose, subject, presented string) (Grant, error) {
	p, err := s.present(purpose, subject, presented)
	if err != nil {
		return Grant{}, err
	}
	if err := notNil("tx", tx); err != nil {
		return Grant{}, err
	}
	var row ledger.TokenRow
	if err := tx.QueryRow(ctx, s.sql.consume, p.Digest, p.Purpose, p.Subject, s.lockTimeoutMS).Scan(row.Dest()...); err != nil {
		return Grant{}, fault.Failed("tokens", "consume", err)
	}
	return granted(p, row)
}

const inspectSQL = `select ` + ledger.TokenColumns + ` from metered.inspect_token($1, $2, $3)`

// Inspect tells what Consume would find now, and consumes nothing: use it to
// show a page for a link, since mail scanners follow links too, and Consume when
// the form on it is sent. A good answer promises nothing: the token may be gone by
// the time it is consumed.
//
// It writes nothing, takes no lock, and works in read-only transactions and on
// standbys. Errors: ErrInvalid, ErrArgument, and Postgres's.
func (s *Store) Inspect(ctx context.Context, db Querier, purpose, subject, presented string) (Info, error) {
	p, err := s.present(purpose, subject, presented)
	if err != nil {
		return Info{}, err
	}
	if err := notNil("db", db); err != nil {
		return Info{}, err
	}
	var row ledger.TokenRow
	if err := db.QueryRow(ctx, s.sql.inspect, p.Digest, p.Purpose, p.Subject).Scan(row.Dest()...); err != nil {
		return Info{}, fault.Failed("tokens", "inspect", err)
	}
	return informed(p, row)
}
