package tokens

import (
	"context"
	"errors"

	"github.com/jackc/pgx/v5"

	"github.com/pgmetered/metered/internal/answer"
	"github.com/pgmetered/metered/internal/fault"
	"github.com/pgmetered/metered/internal/ledger"
	"github.com/pgmetered/metered/internal/observed"
	"github.com/pgmetered/metered/observe"
)

const consumeSQL = `select metered.consume_token_plain($1::bytea, $2::text, $3::text, $4::int)`

// Consume takes one use of a good token of this purpose and subject, in one round trip. A repeated
// request presents a used token (metered.Do has its first result).
//
// It locks the token's row. Several tokens in one transaction can deadlock. ErrInvalid leaves the
// token as it was.
func (s *Store) Consume(ctx context.Context, tx pgx.Tx, purpose, subject,
	presented string) (grant Grant, err error) {
	p, err := s.present(purpose, subject, presented)
	if err != nil {
		if s != nil {
			tellRefused(ctx, s.observer, err)
		}
		return Grant{}, err
	}
	if err := notNil("tx", tx); err != nil {
		return Grant{}, err
	}
	ctx, span := s.observer.Start(ctx, observe.Op{Work: observe.Call, Name: "tokens.consume"})
	defer func() {
		tellRefused(ctx, s.observer, err)
		if err == nil {
			s.observer.Event(ctx, observe.Event{Kind: observe.Token, Name: "consumed", Pending: true})
		}
		span.End(err)
	}()
	var consumed []byte
	if err := answer.QueryRow(ctx, tx, s.sql.consume, p.Digest, p.Purpose, p.Subject,
		s.lockTimeoutMS).Scan(&consumed); err != nil {
		return Grant{}, fault.Failed("tokens", "consume", err)
	}
	return granted(p, ledger.ConsumedToken(consumed))
}

// tellRefused tells why a token was refused, if it was.
func tellRefused(ctx context.Context, to *observed.To, err error) {
	if to == nil || err == nil {
		return
	}
	var invalid *InvalidError // from here on, since it is allocated here
	if errors.As(err, &invalid) {
		to.Event(ctx, observe.Event{Kind: observe.Token, Name: invalid.Reason()})
	}
}

const inspectSQL = `select ` + ledger.TokenColumns + ` from metered.inspect_token($1, $2, $3)`

// Inspect is the answer of Consume now, and consumes nothing. It runs on standbys.
func (s *Store) Inspect(ctx context.Context, db querier, purpose, subject, presented string) (Grant, error) {
	p, err := s.present(purpose, subject, presented)
	if err != nil {
		return Grant{}, err
	}
	if err := notNil("db", db); err != nil {
		return Grant{}, err
	}
	var row ledger.TokenRow
	if err := answer.QueryRow(ctx, db, s.sql.inspect, p.Digest, p.Purpose,
		p.Subject).Scan(row.Dest()...); err != nil {
		return Grant{}, fault.Failed("tokens", "inspect", err)
	}
	return informed(p, row)
}
