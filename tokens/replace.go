package tokens

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgmetered/metered/internal/answer"
	"github.com/pgmetered/metered/internal/fault"
)

const replaceSQL = `select status, minted_at, revoked
from metered.replace_token($1::bigint, $2::metered.new_token, $3::int)`

// Replace revokes every live token of m's purpose and subject and mints another, in one round trip.
// A second call with a Secret is ErrExists, and changes nothing.
//
// Calls queue, and the last wins. Locks: the purpose and subject, then the rows of revoked tokens.
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
	err = answer.QueryRow(ctx, tx, s.sql.replace, s.lockKey(p.Purpose, p.Subject),
		p.sent().String(), s.lockTimeoutMS).
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
