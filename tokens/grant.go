package tokens

import (
	"encoding/json"
	"fmt"
	"time"
)

// Info is what a good token grants.
type Info struct {
	// Digest identifies the token, for audit records.
	Digest  Digest `json:"digest"`
	Purpose string `json:"purpose"`
	Subject string `json:"subject"`

	// Payload is what Mint was given, as JSON; nil if it was given none.
	Payload json.RawMessage `json:"payload,omitempty"`

	// UsesLeft is how often it can still be consumed: after this use, in a Grant.
	UsesLeft int `json:"uses_left"`

	MintedAt  time.Time `json:"minted_at"`
	ExpiresAt time.Time `json:"expires_at"`
}

// Decode unmarshals the payload into v. Without a payload it leaves v alone.
func (i Info) Decode(v any) error {
	if i.Payload == nil {
		return nil
	}
	if err := json.Unmarshal(i.Payload, v); err != nil {
		return fmt.Errorf("tokens: the payload of a token for %q: %w", i.Purpose, err)
	}
	return nil
}

// Grant is a token that was consumed, provided that the transaction commits. It
// is a type of its own so that a function which wants a Grant cannot be given
// what Inspect returned.
type Grant struct {
	Info

	// ConsumedAt is the database's clock when it was.
	ConsumedAt time.Time `json:"consumed_at"`
}

// Presented is a well-formed token with the purpose and subject it was presented
// for. Together with Row it is for SQL of your own that calls the functions
// consume_token or inspect_token, to save a round trip:
//
//	p, err := store.Present("upload", user, text)
//	…
//	var row tokens.Row
//	err = tx.QueryRow(ctx, `with t as (select * from metered.consume_token($1, $2, $3)), … select `+
//	    tokens.RowColumns+` from t, …`, p.Args()...).Scan(row.Dest()...)
//	…
//	grant, err := p.Grant(row)
type Presented struct {
	Digest  Digest
	Purpose string
	Subject string
}

// Present checks what a client presented, without a query. A malformed token is
// ErrInvalid, a bad purpose or subject ErrArgument.
func (s *Store) Present(purpose, subject, presented string) (Presented, error) {
	if err := checkPurpose("purpose", purpose); err != nil {
		return Presented{}, err
	}
	if err := checkSubject("subject", subject); err != nil {
		return Presented{}, err
	}
	token, err := s.Parse(presented)
	if err != nil {
		return Presented{}, err
	}
	return Presented{Digest: token.Digest(), Purpose: purpose, Subject: subject}, nil
}

// Args returns the arguments of consume_token and inspect_token, in order:
// digest (bytea), purpose and subject (text). consume_token takes as a fourth
// the longest wait for a lock in ms (int), which defaults to that of the
// transaction.
func (p Presented) Args() []any { return []any{p.Digest[:], p.Purpose, p.Subject} }

// RowColumns names the columns of consume_token and inspect_token in the order
// in which Row scans them.
const RowColumns = `status, payload, uses_left, minted_at, expires_at, consumed_at`

// Row is what consume_token or inspect_token returned, not yet judged.
type Row struct {
	status                          *string
	payload                         []byte
	usesLeft                        *int32
	mintedAt, expiresAt, consumedAt *time.Time
}

// Dest returns the destinations to scan RowColumns into. Nulls are accepted.
func (r *Row) Dest() []any {
	return []any{&r.status, &r.payload, &r.usesLeft, &r.mintedAt, &r.expiresAt, &r.consumedAt}
}

// Grant returns what consume_token granted to p, or ErrInvalid with its reason.
func (p Presented) Grant(r Row) (Grant, error) {
	info, err := p.info(r)
	if err != nil {
		return Grant{}, err
	}
	if r.consumedAt == nil {
		return Grant{}, fmt.Errorf("tokens: no consumed_at: this row is not of consume_token")
	}
	return Grant{Info: info, ConsumedAt: r.consumedAt.UTC()}, nil
}

// What the functions answer, apart from the reasons for a refusal.
const (
	statusOK     = "ok"
	statusExists = "exists"
)

func (p Presented) info(r Row) (Info, error) {
	if r.status == nil {
		return Info{}, fmt.Errorf("tokens: the row has no status")
	}
	switch *r.status {
	case statusOK:
	case string(ReasonUnknown), string(ReasonPurpose), string(ReasonSubject),
		string(ReasonRevoked), string(ReasonUsed), string(ReasonExpired):
		return Info{}, refuse(Reason(*r.status))
	default:
		return Info{}, fmt.Errorf("tokens: the schema answers %q, which this build does not know", *r.status)
	}
	if r.usesLeft == nil || r.mintedAt == nil || r.expiresAt == nil {
		return Info{}, fmt.Errorf("tokens: the row has an ok status and nulls")
	}
	return Info{
		Digest: p.Digest, Purpose: p.Purpose, Subject: p.Subject,
		Payload:  r.payload,
		UsesLeft: int(*r.usesLeft),
		MintedAt: r.mintedAt.UTC(), ExpiresAt: r.expiresAt.UTC(),
	}, nil
}
