package metered

import (
	"encoding/json"
	"errors"
	"fmt"

	"github.com/pgmetered/metered/budget"
	"github.com/pgmetered/metered/holds"
	"github.com/pgmetered/metered/internal/fault"
	"github.com/pgmetered/metered/internal/lend"
	"github.com/pgmetered/metered/tokens"
)

// refusal is an error that fault.Refused reports, as it is recorded. One field tells its type.
type refusal struct {
	Code          string                     `json:"code"`
	Text          string                     `json:"text"`
	Attempts      bool                       `json:"attempts,omitempty"` // by a sticky charge
	Exceeded      *budget.ExceededError      `json:"exceeded,omitempty"`
	RefundExceeds *budget.RefundExceedsError `json:"refund_exceeds,omitempty"`
	Token         tokens.Reason              `json:"token,omitempty"`
	Unknown       holds.Reason               `json:"unknown,omitempty"`
	Taken         *holds.TakenError          `json:"taken,omitempty"`
	State         *holds.StateError          `json:"state,omitempty"`
	Excess        *holds.ExcessError         `json:"excess,omitempty"`
	Ceiling       *holds.CeilingError        `json:"ceiling,omitempty"`
}

// refusalJSON is a refusal as it is recorded.
func refusalJSON(err error) string {
	r := refusal{Code: fault.Code(err), Text: err.Error(), Attempts: errors.Is(err, ErrTooManyAttempts)}
	var token *tokens.InvalidError
	var unknown *holds.UnknownError
	switch {
	case errors.As(err, &r.Exceeded), errors.As(err, &r.RefundExceeds), errors.As(err, &r.Taken), errors.As(err, &r.State),
		errors.As(err, &r.Excess), errors.As(err, &r.Ceiling):
	case errors.As(err, &token):
		r.Token = token.Reason()
	case errors.As(err, &unknown):
		r.Unknown = unknown.Reason()
	}
	b, _ := json.Marshal(r) // of plain fields: never fails
	return string(b)
}

// refusalOf is the error that refusalJSON was given.
func refusalOf(raw []byte) error {
	var r refusal
	if err := json.Unmarshal(raw, &r); err != nil {
		return fmt.Errorf("metered: read a refusal: %w", err)
	}
	err := r.err()
	if r.Attempts {
		return fmt.Errorf("%w: %w", ErrTooManyAttempts, err)
	}
	return err
}

func (r *refusal) err() error {
	switch {
	case r.Exceeded != nil:
		return r.Exceeded
	case r.RefundExceeds != nil:
		return r.RefundExceeds
	case r.Taken != nil:
		return r.Taken
	case r.State != nil:
		return r.State
	case r.Excess != nil:
		return r.Excess
	case r.Ceiling != nil:
		return r.Ceiling
	case r.Token != "":
		return refuseToken(r.Token)
	case r.Unknown != "":
		return unknownHold(r.Unknown)
	}
	return fault.New(r.Code, r.Text) // which errors.Is finds by its code
}

var (
	refuseToken = lend.Refuse.(func(tokens.Reason) error)
	unknownHold = lend.UnknownHold.(func(holds.Reason) error)
)
