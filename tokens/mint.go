package tokens

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgmetered/metered/internal/answer"
	"github.com/pgmetered/metered/internal/fault"
	"github.com/pgmetered/metered/internal/jsontext"
	"github.com/pgmetered/metered/internal/ledger"
)

// Mint is a token to mint.
type Mint struct {
	// Purpose says what the token may be used for, such as "upload": 1 to 128 bytes of UTF-8.
	// Consume must name the same purpose. Required.
	Purpose string

	// Subject is the user or the thing that the token is for: 1 to 512 bytes of UTF-8. Consume
	// must name the same subject. Required.
	Subject string

	// Payload comes back with the grant, encoded as JSON of up to 8 KiB. A json.RawMessage comes
	// back byte for byte. It is stored in the clear, so it must hold no secret. Defaults to none.
	Payload any

	// TTL is the time until the token expires, by the database's clock: 1s to 400 days, cut to
	// whole microseconds. Defaults to 1h.
	TTL time.Duration

	// Uses is how often the token can be consumed, from 1 to 1,000,000. Defaults to 1.
	Uses int

	// Secret makes the token reproducible: the same secret has the same text, so a command that
	// runs again can derive it again (see Derive). Defaults to 32 bytes of crypto/rand.
	Secret Secret
}

// Minted is a new token.
type Minted struct {
	// Token is the token itself. It is stored nowhere: this is its only copy.
	Token Token `json:"token"`

	// Digest is the SHA-256 of the token's text. It names the token for Revoke.
	Digest Digest `json:"digest"`

	// Purpose is that of the Mint.
	Purpose string `json:"purpose"`

	// Subject is that of the Mint.
	Subject string `json:"subject"`

	// Uses is how often the token can be used.
	Uses int `json:"uses"`

	// MintedAt is when the token was minted.
	MintedAt time.Time `json:"minted_at"`

	// ExpiresAt is when the token is no longer good.
	ExpiresAt time.Time `json:"expires_at"`

	// Replaced is how many tokens of the same purpose and subject Replace has revoked.
	Replaced int64 `json:"replaced,omitempty"`
}

// Mint stores a new token, in one round trip. Hand it out after the commit. Each call mints another
// token, except with a Secret, which it locks: then a second call is ErrExists, and Store.Token has
// the text.
func (s *Store) Mint(ctx context.Context, tx pgx.Tx, m Mint) (Minted, error) {
	minted, err := s.prepare("Mint", m)
	if err != nil {
		return Minted{}, err
	}
	batch := []prepared{minted}
	if err := s.insert(ctx, tx, batch); err != nil {
		return Minted{}, err
	}
	return batch[0].Minted, nil
}

// MintMany is Mint for up to 1000 tokens, all or none, in their order. The same secret twice is
// budget.ErrArgument.
func (s *Store) MintMany(ctx context.Context, tx pgx.Tx, mints []Mint) ([]Minted, error) {
	if len(mints) > maxMints {
		return nil, invalid("Mints", "%d: want at most %d", len(mints), maxMints)
	}
	if len(mints) == 0 {
		return nil, nil
	}
	batch := make([]prepared, len(mints))
	seen := make(map[Digest]int, len(mints))
	for i, m := range mints {
		field := fmt.Sprintf("Mints[%d]", i)
		p, err := s.prepare(field, m)
		if err != nil {
			return nil, err
		}
		if first, twice := seen[p.Digest]; twice {
			return nil, invalid(field+".Secret", "the same as that of Mints[%d]", first)
		}
		seen[p.Digest] = i
		batch[i] = p
	}
	if err := s.insert(ctx, tx, batch); err != nil {
		return nil, err
	}
	minted := make([]Minted, len(batch))
	for i, p := range batch {
		minted[i] = p.Minted
	}
	return minted, nil
}

// prepared is a checked Mint on its way to the database.
type prepared struct {
	Minted
	payload *string
	ttl     time.Duration
}

// stamp fills in the times, which the database decides.
func (p *prepared) stamp(mintedAt time.Time) {
	p.MintedAt = mintedAt.UTC()
	p.ExpiresAt = p.MintedAt.Add(p.ttl)
}

func (p *prepared) sent() ledger.NewToken {
	return ledger.NewToken{Digest: p.Digest[:], Purpose: p.Purpose, Subject: p.Subject,
		Payload: p.payload, Uses: p.Uses, TTL: p.ttl}
}

func (s *Store) prepare(field string, m Mint) (prepared, error) {
	if err := s.made(); err != nil {
		return prepared{}, err
	}
	if err := checkPurpose(field+".Purpose", m.Purpose); err != nil {
		return prepared{}, err
	}
	if err := checkSubject(field+".Subject", m.Subject); err != nil {
		return prepared{}, err
	}
	if m.TTL == 0 {
		m.TTL = defaultTTL
	}
	if m.TTL < minTTL || m.TTL > maxTTL {
		return prepared{}, invalid(field+".TTL", "%v: want %v to %v", m.TTL, minTTL, maxTTL)
	}
	if m.Uses == 0 {
		m.Uses = 1
	}
	if m.Uses < 1 || m.Uses > maxUses {
		return prepared{}, invalid(field+".Uses", "%d: want 1 to %d", m.Uses, maxUses)
	}
	payload, err := encodePayload(field+".Payload", m.Payload)
	if err != nil {
		return prepared{}, err
	}
	var token Token
	if m.Secret.isZero() {
		token = s.encode(drawSecret())
	} else {
		token = s.encode(m.Secret.reveal())
	}
	return prepared{
		Minted: Minted{
			Token: token, Digest: token.Digest(),
			Purpose: m.Purpose, Subject: m.Subject, Uses: m.Uses,
		},
		payload: payload,
		ttl:     m.TTL.Truncate(time.Microsecond), // as Postgres keeps it
	}, nil
}

// encodePayload returns nil for none. The checks are those of Postgres's json
// type, made here so that bad input fails before any SQL.
func encodePayload(field string, payload any) (*string, error) {
	var encoded []byte
	switch v := payload.(type) {
	case nil:
		return nil, nil
	case json.RawMessage: // not through Marshal, which would rewrite it
		if v == nil {
			return nil, nil
		}
		if len(v) <= maxPayloadLen && !json.Valid(v) {
			return nil, invalid(field, "not JSON")
		}
		encoded = v
	default:
		var buf bytes.Buffer
		enc := json.NewEncoder(&buf)
		enc.SetEscapeHTML(false)
		if err := enc.Encode(v); err != nil {
			return nil, invalid(field, "%v", err)
		}
		encoded = bytes.TrimSuffix(buf.Bytes(), []byte("\n"))
	}
	if len(encoded) > maxPayloadLen {
		return nil, invalid(field, "%d bytes of JSON: want at most %d", len(encoded), maxPayloadLen)
	}
	if err := jsontext.Check(payload, encoded); err != nil {
		return nil, invalid(field, "%v", err)
	}
	text := string(encoded)
	return &text, nil
}

const mintSQL = `select status, minted_at from metered.mint_tokens($1::metered.new_token[], $2::int)`

// insert stores the batch and fills in its times.
func (s *Store) insert(ctx context.Context, tx pgx.Tx, batch []prepared) error {
	if err := notNil("tx", tx); err != nil {
		return err
	}
	sent := make([]ledger.NewToken, len(batch))
	for i := range batch {
		sent[i] = batch[i].sent()
	}
	var status string
	var mintedAt time.Time
	err := answer.QueryRow(ctx, tx, s.sql.mint, ledger.NewTokens(sent),
		s.lockTimeoutMS).Scan(&status, &mintedAt)
	if err != nil {
		return fault.Failed("tokens", "mint", err)
	}
	if status == statusExists {
		return ErrExists
	}
	for i := range batch {
		batch[i].stamp(mintedAt)
	}
	return nil
}
