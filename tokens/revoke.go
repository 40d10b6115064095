package tokens

import (
	"cmp"
	"context"

	"github.com/jackc/pgx/v5"

	"github.com/pgmetered/metered/internal/answer"
	"github.com/pgmetered/metered/internal/fault"
)

const revokeSQL = `select metered.revoke_token($1, $2)`

// Revoke ends a token, and reports whether it was live. It locks the token's row.
func (s *Store) Revoke(ctx context.Context, tx pgx.Tx, digest Digest) (bool, error) {
	if err := cmp.Or(s.made(), notNil("tx", tx)); err != nil {
		return false, err
	}
	var revoked bool
	if err := answer.QueryRow(ctx, tx, s.sql.revoke, digest[:], s.lockTimeoutMS).Scan(&revoked); err != nil {
		return false, fault.Failed("tokens", "revoke", err)
	}
	return revoked, nil
}

const revokeSubjectSQL = `select metered.revoke_tokens($1, $2, $3)`

// RevokeSubject ends every live token of a purpose and subject, and returns how many, without those
// of open transactions. It locks their rows, by digest.
func (s *Store) RevokeSubject(ctx context.Context, tx pgx.Tx, purpose, subject string) (int64, error) {
	if err := cmp.Or(s.made(), notNil("tx", tx)); err != nil {
		return 0, err
	}
	if err := checkPurpose("purpose", purpose); err != nil {
		return 0, err
	}
	if err := checkSubject("subject", subject); err != nil {
		return 0, err
	}
	var revoked int64
	if err := answer.QueryRow(ctx, tx, s.sql.revokeSubject, purpose, subject,
		s.lockTimeoutMS).Scan(&revoked); err != nil {
		return 0, fault.Failed("tokens", "revoke subject", err)
	}
	return revoked, nil
}
