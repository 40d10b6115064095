package tokens

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	"github.com/pgmetered/metered/internal/ledger"
	"github.com/pgmetered/metered/internal/lend"
	"github.com/pgmetered/metered/internal/observed"
)

// Grant is what a good token grants, as Inspect finds it, or as Consume has taken a use of it, if the
// transaction commits.
type Grant struct {
	// Digest is the SHA-256 of the token's text.
	Digest Digest `json:"digest"`

	// Purpose is the right that the token grants.
	Purpose string `json:"purpose"`

	// Subject is the user or thing that the token is for.
	Subject string `json:"subject"`

	// Payload is that of the Mint, as JSON, or nil.
	Payload json.RawMessage `json:"payload,omitempty"`

	// UsesLeft is how often the token can still be used. After Consume it is counted without this use.
	UsesLeft int `json:"uses_left"`

	// MintedAt is when the token was minted.
	MintedAt time.Time `json:"minted_at"`

	// ExpiresAt is when the token is no longer good.
	ExpiresAt time.Time `json:"expires_at"`

	// ConsumedAt is when the use was taken, by the database's clock. It is zero after Inspect.
	ConsumedAt time.Time `json:"consumed_at,omitzero"`
}

// Decode unmarshals the payload into v, if there is one.
func (g Grant) Decode(v any) error {
	if g.Payload == nil {
		return nil
	}
	if err := json.Unmarshal(g.Payload, v); err != nil {
		return fmt.Errorf("tokens: the payload of a token for %q: %w", g.Purpose, err)
	}
	return nil
}

func init() { lend.Lend("tokens", internals{}) }

// internals are lent to metered.
type internals struct{}

// Present checks the text that a client presented, without a query.
func (internals) Present(s *Store, purpose, subject, text string) (ledger.PresentedToken, error) {
	return s.present(purpose, subject, text)
}

// Grant is the grant of consume_token to p, or ErrInvalid with its reason.
func (internals) Grant(p ledger.PresentedToken, r ledger.TokenRow) (Grant, error) {
	return granted(p, r)
}

// Refuse is the *InvalidError of a reason.
func (internals) Refuse(reason string) error { return refuse(reason) }

// TellRefused reports why a token was refused, if err says that it was.
func (internals) TellRefused(ctx context.Context, to *observed.To, err error) {
	tellRefused(ctx, to, err)
}

// present checks the text that a client presented, without a query. A malformed token is
// ErrInvalid, a bad purpose or subject budget.ErrArgument.
func (s *Store) present(purpose, subject, text string) (ledger.PresentedToken, error) {
	if err := checkPurpose("purpose", purpose); err != nil {
		return ledger.PresentedToken{}, err
	}
	if err := checkSubject("subject", subject); err != nil {
		return ledger.PresentedToken{}, err
	}
	token, err := s.Parse(text)
	if err != nil {
		return ledger.PresentedToken{}, err
	}
	digest := token.Digest()
	return ledger.PresentedToken{Digest: digest[:], Purpose: purpose, Subject: subject}, nil
}

// granted is the grant of consume_token to p, or ErrInvalid with its reason.
func granted(p ledger.PresentedToken, r ledger.TokenRow) (Grant, error) {
	info, err := informed(p, r)
	if err != nil {
		return Grant{}, err
	}
	if r.ConsumedAt == nil {
		return Grant{}, fmt.Errorf("tokens: no consumed_at: this row is not of consume_token")
	}
	info.ConsumedAt = r.ConsumedAt.UTC()
	return info, nil
}

// The answers of the functions, apart from the reasons for a refusal.
const (
	statusOK     = "ok"
	statusExists = "exists"
)

func informed(p ledger.PresentedToken, r ledger.TokenRow) (Grant, error) {
	if r.Status == nil {
		return Grant{}, fmt.Errorf("tokens: the row has no status")
	}
	switch *r.Status {
	case statusOK:
	case "unknown", "purpose", "subject", "revoked", "used", "expired":
		return Grant{}, refuse(*r.Status)
	default:
		return Grant{}, fmt.Errorf("tokens: the schema answers %q, which this build does not know", *r.Status)
	}
	if r.UsesLeft == nil || r.MintedAt == nil || r.ExpiresAt == nil {
		return Grant{}, fmt.Errorf("tokens: the row has an ok status and nulls")
	}
	return Grant{
		Digest: Digest(p.Digest), Purpose: p.Purpose, Subject: p.Subject,
		Payload:  r.Payload,
		UsesLeft: int(*r.UsesLeft),
		MintedAt: r.MintedAt.UTC(), ExpiresAt: r.ExpiresAt.UTC(),
	}, nil
}
