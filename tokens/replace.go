package tokens

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgmetered/metered/internal/fault"
)

const replaceSQL = `select status, minted_at, revoked
from metered.replace_token($1::bigint, $2::metered.new_token, $3::int)`

// Replace revokes every live token of m's purpose and subject and mints another,
// in one round trip: "send me a new link". Minted.Replaced says how many went.
//
// After a rollback the new token is unknown and the old ones are as they were.
//
// Each call mints another token. With a Secret the second call is ErrExists, and
// neither mints nor revokes anything.
//
// However many call it at once, at whatever isolation level, at most one token
// that Replace minted is live per purpose and subject. At READ COMMITTED they
// queue on an advisory lock of the purpose and subject, held until the transaction
// ends, and the last one wins; a transaction with an older snapshot gets 40001. A
// token that Mint adds at the same time, or later, lives beside it.
//
// Locks: that advisory lock, then the rows of the tokens that it revokes, in the
// order of their digests; it waits for open transactions that consume them.
// Errors: ErrArgument, ErrExists, ErrBusy, and Postgres's.
func (s *Store) Replace(ctx context.Context, tx pgx.Tx, m Mint) (Minted, error) {
	p, err := s.prepare("Mint", m)
	if err != nil {
		return Minted{}, err
	}
	if err := notNil("tx", tx); err != nil {
		return Minted{}, err
	}
	var status string
	var mintedAt *time.Time
	var revoked *int64
	err = tx.QueryRow(ctx, s.sql.replace, s.lockKey(p.Purpose, p.Subject), p.sent().String(), s.lockTimeoutMS).
		Scan(&status, &mintedAt, &revoked)
	if err != nil {
		return Minted{}, fault.Failed("tokens", "replace", err)
	}
	if status == statusExists {
		return Minted{}, ErrExists
	}
	p.stamp(*mintedAt)
	p.Replaced = *revoked
	return p.Minted, nil
}
